/* Threads: a call that needs an object alone returns FB_BUSY while another call uses it, and does nothing. Calls
 * through const pointers run at the same time. Different caches are independent. */

#include "check.h"

#include <pthread.h>

/* A point where one thread waits until another has done its part. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int stage;
} stages;

static void reach(stages *at, int stage) {
    pthread_mutex_lock(&at->lock);
    at->stage = stage;
    pthread_cond_broadcast(&at->changed);
    pthread_mutex_unlock(&at->lock);
}

static void await(stages *at, int stage) {
    pthread_mutex_lock(&at->lock);
    while (at->stage < stage) {
        pthread_cond_wait(&at->changed, &at->lock);
    }
    pthread_mutex_unlock(&at->lock);
}

typedef struct {
    fb_cache *cache;
    story of;
    fb_step step;
    stages at;
    int held;
    int32_t selection[ENTRIES], slots[ENTRIES];
} shared;

/* The engine's first work holds the cache until the other thread has made all its calls. */
static uint32_t enqueue(void *data, const fb_engine_call *call, void *stream) {
    shared *s = (shared *)data;
    (void)stream;
    if (!s->held) {
        s->held = 1;
        reach(&s->at, 1);
        await(&s->at, 2);
    }
    if (call->work == FB_WORK_INDEX) {
        for (uint32_t query = 0; query < QUERY; query++) {
            select_rows(s->selection + query * TOP_K, s->of.committed + query, 3);
        }
    }
    return FB_OK;
}

static void *hold(void *data) {
    shared *s = (shared *)data;
    fb_overlap_config layers = SIZED(fb_overlap_config);
    fb_engine engine = SIZED(fb_engine);
    layers.selection = s->selection;
    layers.slots = s->slots;
    layers.batch = 1;
    engine.enqueue = enqueue;
    engine.data = s;
    land(s->cache, &s->of, 0, QUERY);
    OK(s->cache, fb_overlap(s->cache, s->step, 0, FB_ALL_QUERY_ROWS, FB_OVERLAP_NONE, &layers, &engine));
    return NULL;
}

static void busy(fb_device *device) {
    shared s = {.at = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0}};
    fb_cache_config config = declared();
    pthread_t thread;
    s.cache = cache_of(device, &config);
    open_story(s.cache, &s.of, 40, NULL);
    s.step = begin_step(s.cache, &s.of, 1, QUERY, NULL);
    CHECK(pthread_create(&thread, NULL, hold, &s) == 0);
    await(&s.at, 1);
    fb_open_config open = opening(10, 10);
    fb_stats stats = SIZED(fb_stats);
    uint64_t sequence = 77;
    uint32_t slot = 77;
    uint64_t bytes = 77;
    void *address = NULL;
    fb_step step = s.step;
    IS(FB_BUSY, fb_open(s.cache, &open, &sequence));
    IS(FB_BUSY, fb_close(s.cache, s.of.sequence, NULL));
    IS(FB_BUSY, fb_finish(s.cache, step, NULL));
    IS(FB_BUSY, fb_retire(s.cache, &step, NULL, NULL));
    IS(FB_BUSY, fb_cache_destroy(s.cache));
    /* Reading calls fail too, because the cache is being changed. */
    IS(FB_BUSY, fb_cache_stats(s.cache, &stats));
    IS(FB_BUSY, fb_landing_slot(s.cache, s.of.sequence, 0, &slot));
    IS(FB_BUSY, fb_slab(s.cache, 0, &address, &bytes));
    IS(FB_BUSY, fb_device_destroy(device));
    CHECK(sequence == 77 && slot == 77 && bytes == 77 && address == NULL && step == s.step && stats.steps == 0);
    /* Another cache on the same device is not affected. */
    fb_cache *other = cache_of(device, &config);
    story theirs;
    open_story(other, &theirs, 40, NULL);
    decode_step(other, &theirs, 1, 3, 1);
    OK(other, fb_close(other, theirs.sequence, NULL));
    OK(other, fb_cache_destroy(other));
    reach(&s.at, 2);
    CHECK(pthread_join(thread, NULL) == 0);
    (void)compare_rows(s.cache, &s.of, 0, s.selection, s.slots, ENTRIES);
    rest_of_step(s.cache, s.step, 1, NULL);
    OK(s.cache, fb_finish(s.cache, s.step, NULL));
    OK(s.cache, fb_retire(s.cache, &s.step, NULL, NULL));
    OK(s.cache, fb_close(s.cache, s.of.sequence, NULL));
    OK(s.cache, fb_cache_destroy(s.cache));
}

enum { READS = 300, READERS = 3 };

static uint64_t reads_done[READERS];

typedef struct {
    const fb_cache *cache;
    const story *of;
    uint32_t number;
} reader;

static void *read_on(void *data) {
    const reader *r = (const reader *)data;
    for (uint32_t turn = 0; turn < READS; turn++) {
        uint32_t wanted[WORDS], found[WORDS];
        fb_stats stats = SIZED(fb_stats);
        char text[64];
        if (fb_cache_stats(r->cache, &stats) != FB_OK || stats.sequences != 1 ||
            fb_read_row(r->cache, r->of->sequence, 1, turn % 40, found, ROW) != FB_OK ||
            fb_error_text(r->cache, text, sizeof text) != FB_OK || fb_slab(r->cache, LAYERS, NULL, NULL) == FB_OK) {
            return NULL;
        }
        stamp(r->of, wanted, 1, turn % 40);
        reads_done[r->number] += memcmp(found, wanted, ROW) == 0;
    }
    return NULL;
}

/* Const calls at the same time, including failing ones, which keep their text. */
static void readers(fb_device *device) {
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    story of;
    pthread_t threads[READERS];
    reader all[READERS];
    open_story(cache, &of, 40, NULL);
    for (uint32_t number = 0; number < READERS; number++) {
        all[number] = (reader){cache, &of, number};
        CHECK(pthread_create(&threads[number], NULL, read_on, &all[number]) == 0);
    }
    for (uint32_t number = 0; number < READERS; number++) {
        CHECK(pthread_join(threads[number], NULL) == 0);
        CHECK(reads_done[number] == READS);
    }
    OK(cache, fb_close(cache, of.sequence, NULL));
    OK(cache, fb_cache_destroy(cache));
}

/* For either order of two threads, each call succeeds or returns FB_BUSY, and nothing is lost. */
static void *contend(void *data) {
    fb_cache *cache = (fb_cache *)data;
    uint64_t *closed = (uint64_t *)calloc(1, sizeof *closed);
    for (uint32_t turn = 0; closed != NULL && turn < 200; turn++) {
        fb_open_config open = opening(10, 10);
        uint64_t sequence = 0;
        fb_status status = fb_open(cache, &open, &sequence);
        if (status != FB_OK && status != FB_BUSY && status != FB_EXHAUSTED) {
            break;
        }
        while (sequence != 0 && (status = fb_close(cache, sequence, NULL)) == FB_BUSY) {
        }
        *closed += status == FB_OK || status == FB_BUSY || status == FB_EXHAUSTED;
    }
    return closed;
}

static void contention(fb_device *device) {
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    pthread_t threads[2];
    for (uint32_t number = 0; number < 2; number++) {
        CHECK(pthread_create(&threads[number], NULL, contend, cache) == 0);
    }
    for (uint32_t number = 0; number < 2; number++) {
        void *closed = NULL;
        CHECK(pthread_join(threads[number], &closed) == 0);
        CHECK(closed != NULL && *(uint64_t *)closed == 200);
        free(closed);
    }
    OK(cache, fb_cache_validate(cache));
    CHECK(stats_of(cache).sequences == 0 && stats_of(cache).free_lanes == LANES);
    OK(cache, fb_cache_destroy(cache));
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    busy(device);
    readers(device);
    contention(device);
    OK(device, fb_device_destroy(device));
    return checked();
}
