/* Layers in the orders none, DA, DBA and ahead, on streams with their own threads: attention reads the same bytes in
 * each order, and a layer's slots are the same. Callbacks enqueue the engine's work, which runs on its stream. */

#include "check.h"

#include <pthread.h>
#include <time.h>

enum { STEPS = 12, BATCH = 2, LISTS = 2, CALLS_MAX = 4096 };
enum { BATCH_ENTRIES = BATCH * ENTRIES };

/* The orders of all layers, and which of them share a selection. */
typedef struct {
    uint32_t lone;
    uint32_t group;
    uint32_t by_layer[LAYERS];
} table;

enum { NONE = FB_OVERLAP_NONE, DA = FB_OVERLAP_DA, DBA = FB_OVERLAP_DBA, AHEAD = FB_OVERLAP_AHEAD };
/* Every layer selects. */
static const table ALONE[] = {{0, 0, {NONE, NONE, NONE}}, {0, 0, {DA, DA, DA}}, {0, 0, {DBA, DBA, DBA}}};
/* Layer 0 selects for all. */
static const table GROUP[] = {
    {0, 3, {NONE, NONE, NONE}}, {0, 3, {NONE, AHEAD, AHEAD}}, {0, 3, {DA, AHEAD, AHEAD}},
    {0, 3, {DBA, AHEAD, NONE}}, {0, 3, {DA, DA, AHEAD}},      {0, 3, {DBA, DBA, DBA}},
};
/* Layer 0 selects for itself, layer 1 for layer 2. */
static const table PAIR[] = {{1, 2, {NONE, NONE, NONE}}, {1, 2, {DA, NONE, AHEAD}}, {1, 2, {NONE, DBA, AHEAD}}};

/* Whether this layer selects, for itself or for others too. */
static int selects(const table *of, uint32_t layer) {
    return of->group == 0 || layer < of->lone || (layer - of->lone) % of->group == 0;
}

typedef struct engine engine;

/* One piece of the engine's work, as it runs on the stream. */
typedef struct {
    engine *of;
    fb_engine_call call;
} work;

struct engine {
    fb_device *device;
    fb_cache *cache;
    story stories[BATCH];
    uint32_t number;
    /* Counts down the calls until one is refused; -1 for none. */
    int refuse_at;
    int32_t selection[BATCH_ENTRIES];
    int32_t slots[BATCH_ENTRIES];
    int32_t lists[LISTS * BATCH_ENTRIES];
    uint32_t counts[LISTS * BATCH * QUERY];
    /* The words that attention has read, by row. */
    uint64_t attended[BATCH * QUERY];
    uint64_t sums[STEPS * LAYERS * BATCH * QUERY];
    uint32_t sum_count;
    /* The slots of each step's last selection. */
    int32_t decided[STEPS][BATCH_ENTRIES];
    const table *layers;
    /* Where the first layer's attention waits until the gather stream has run all that it holds. */
    int holds;
    int released;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t in_parts;
    work works[CALLS_MAX];
    uint32_t work_count;
    unsigned char *slabs[LAYERS];
    uint32_t landing[BATCH][QUERY];
};

/* Runs behind the gathers: checks the rows of the layers that have not begun, without those of this step. */
static void release(void *data) {
    engine *e = (engine *)data;
    for (uint32_t entry = 0; entry < BATCH_ENTRIES; entry++) {
        const story *of = &e->stories[entry / ENTRIES];
        int32_t position = e->selection[entry];
        for (uint32_t layer = 1; position >= 0 && (uint32_t)position < of->committed && layer < LAYERS; layer++) {
            uint32_t words[WORDS];
            stamp(of, words, layer, (uint32_t)position);
            CHECK(memcmp(e->slabs[layer] + (size_t)e->slots[entry] * ROW, words, ROW) == 0);
        }
    }
    CHECK(pthread_mutex_lock(&e->lock) == 0);
    e->released = 1;
    CHECK(pthread_cond_signal(&e->changed) == 0);
    CHECK(pthread_mutex_unlock(&e->lock) == 0);
}

/* Waits for `release`: only a call that is wrong makes it give up. */
static void hold(engine *e) {
    struct timespec until;
    int waited = 0;
    CHECK(timespec_get(&until, TIME_UTC) == TIME_UTC);
    until.tv_sec += 30;
    CHECK(pthread_mutex_lock(&e->lock) == 0);
    while (!e->released && waited == 0) {
        waited = pthread_cond_timedwait(&e->changed, &e->lock, &until);
    }
    CHECK(pthread_mutex_unlock(&e->lock) == 0);
    CHECK(waited == 0);
}

static uint64_t sum_row(const engine *e, uint32_t layer, int32_t slot) {
    uint32_t row[WORDS];
    uint64_t sum = 0;
    memcpy(row, e->slabs[layer] + (size_t)slot * ROW, ROW);
    for (uint32_t word = 0; word < WORDS; word++) {
        sum += (uint64_t)row[word] * (word + 1);
    }
    return sum;
}

/* Attention over a list of slots: a sum, so the sums of shares add up. */
static void attend(engine *e, const fb_engine_call *call) {
    for (uint32_t row = call->first; row < call->first + call->count; row++) {
        for (uint32_t query = 0; query < QUERY; query++) {
            uint32_t at = row * QUERY + query;
            uint32_t list = call->attended == FB_ATTEND_FETCHED ? 1 + call->attention_wave : 0;
            const int32_t *slots = e->lists + (list * BATCH * QUERY + at) * TOP_K;
            uint32_t count = e->counts[list * BATCH * QUERY + at];
            if (call->attended == FB_ATTEND_ALL) {
                slots = e->slots + at * TOP_K;
                count = TOP_K;
            } else {
                e->in_parts++;
            }
            for (uint32_t k = 0; k < count; k++) {
                if (slots[k] >= 0) {
                    e->attended[at] += sum_row(e, call->layer, slots[k]);
                }
            }
        }
    }
}

/* Selects every row once in each query row, so that the test can compute the sum beforehand. */
static void compare_sums(engine *e, uint32_t layer) {
    for (uint32_t row = 0; row < BATCH; row++) {
        for (uint32_t query = 0; query < QUERY; query++) {
            uint32_t at = row * QUERY + query;
            uint64_t wanted = 0;
            for (uint32_t k = 0; k < TOP_K; k++) {
                uint32_t words[WORDS];
                int32_t position = e->selection[at * TOP_K + k];
                if (position < 0) {
                    continue;
                }
                stamp(&e->stories[row], words, layer, (uint32_t)position);
                for (uint32_t word = 0; word < WORDS; word++) {
                    wanted += (uint64_t)words[word] * (word + 1);
                }
            }
            CHECK(e->attended[at] == wanted);
            e->sums[e->sum_count++] = e->attended[at];
            e->attended[at] = 0;
        }
    }
}

static void run_work(void *data) {
    const work *w = (const work *)data;
    engine *e = w->of;
    const fb_engine_call *call = &w->call;
    switch (call->work) {
    case FB_WORK_INDEX:
        for (uint32_t row = call->first; row < call->first + call->count; row++) {
            for (uint32_t query = 0; query < QUERY; query++) {
                select_rows(e->selection + (row * QUERY + query) * TOP_K, e->stories[row].committed + query,
                          e->number * 17 + call->layer);
            }
        }
        break;
    case FB_WORK_PREPARE:
        for (uint32_t row = 0; row < BATCH; row++) {
            for (uint32_t query = 0; query < QUERY; query++) {
                uint32_t words[WORDS];
                stamp(&e->stories[row], words, call->layer, e->stories[row].committed + query);
                memcpy(e->slabs[call->layer] + (size_t)e->landing[row][query] * ROW, words, ROW);
            }
        }
        break;
    case FB_WORK_ATTEND:
        if (e->holds && call->layer == 0) {
            hold(e);
        }
        attend(e, call);
        break;
    case FB_WORK_REST:
        compare_sums(e, call->layer);
        break;
    default:
        break;
    }
}

static uint32_t enqueue(void *data, const fb_engine_call *call, void *stream) {
    engine *e = (engine *)data;
    fb_stats stats = SIZED(fb_stats);
    CHECK(call->size >= sizeof *call && call->query_rows == QUERY && call->first_query_row == 0);
    CHECK(call->first + call->count <= BATCH && call->count > 0 && call->micro_batch == 0 && call->layer < LAYERS);
    CHECK(call->work != FB_WORK_INDEX || selects(e->layers, call->layer));
    /* The cache is in use during the call that calls back. */
    IS(FB_BUSY, fb_cache_stats(e->cache, &stats));
    IS(FB_BUSY, fb_close(e->cache, e->stories[0].sequence, stream));
    if (e->refuse_at >= 0 && e->refuse_at-- == 0) {
        return FB_IO;
    }
    CHECK(e->work_count < CALLS_MAX);
    work *w = &e->works[e->work_count++];
    w->of = e;
    w->call = *call;
    return fb_stream_call(e->device, stream, run_work, w);
}

typedef struct {
    void *stream[4];
} streams;

static streams streams_of(fb_device *device) {
    streams four;
    for (uint32_t index = 0; index < 4; index++) {
        OK(device, fb_stream_create(device, &four.stream[index]));
    }
    return four;
}

static fb_overlap_config layers_of(engine *e, const streams *four) {
    fb_overlap_config layers = SIZED(fb_overlap_config);
    layers.compute = four->stream[0];
    layers.resolve = four->stream[1];
    layers.gather = four->stream[2];
    layers.scatter = four->stream[3];
    layers.selection = e->selection;
    layers.slots = e->slots;
    layers.lists = e->lists;
    layers.counts = e->counts;
    layers.lists_batch = BATCH;
    layers.batch = BATCH;
    layers.half = 1;
    return layers;
}

static void record_addresses(engine *e) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        e->slabs[layer] = row_at(e->cache, layer, 0);
    }
    for (uint32_t row = 0; row < BATCH; row++) {
        for (uint32_t query = 0; query < QUERY; query++) {
            OK(e->cache, fb_landing_slot(e->cache, e->stories[row].sequence, query, &e->landing[row][query]));
        }
    }
}

static fb_step begin(engine *e, const streams *four) {
    fb_step step = begin_step(e->cache, e->stories, BATCH, QUERY, four->stream[0]);
    e->work_count = 0;
    record_addresses(e);
    return step;
}

static void end_step(engine *e, fb_step *step, const streams *four, fb_status wanted) {
    OK(e->cache, fb_finish(e->cache, *step, four->stream[0]));
    OK(e->device, fb_stream_wait(e->device, four->stream[0]));
    IS(wanted, fb_retire(e->cache, step, four->stream[0], NULL));
    CHECK(*step == 0);
}

static void start(engine *e, fb_device *device, const table *layers) {
    fb_cache_config config = declared();
    memset(e, 0, sizeof *e);
    config.lone_layers = layers->lone;
    config.group_layers = layers->group;
    if (layers->group != 0) {
        /* Fewer slots than a step selects: the other rows are in scratch slots. */
        config.slots = 4;
    }
    e->layers = layers;
    e->device = device;
    e->cache = cache_of(device, &config);
    e->refuse_at = -1;
    writes = 0;
    open_story(e->cache, &e->stories[0], 90, NULL);
    open_story(e->cache, &e->stories[1], 70, NULL);
    OK(device, fb_stream_wait(device, NULL));
}

static void stop(engine *e) {
    for (uint32_t row = 0; row < BATCH; row++) {
        OK(e->cache, fb_close(e->cache, e->stories[row].sequence, NULL));
    }
    OK(e->device, fb_stream_wait(e->device, NULL));
    OK(e->cache, fb_cache_reap(e->cache, NULL, NULL));
    CHECK(stats_of(e->cache).sequences == 0);
    OK(e->cache, fb_cache_destroy(e->cache));
}

/* The engine's callbacks, as the library calls them. */
static fb_engine callbacks_of(engine *e) {
    fb_engine calls = SIZED(fb_engine);
    calls.enqueue = enqueue;
    calls.data = e;
    return calls;
}

/* Decodes layer by layer or whole steps; returns the digests of both sequences. */
static void decode(engine *e, fb_device *device, const table *of, int whole, uint64_t digest[BATCH]) {
    start(e, device, of);
    streams four = streams_of(device);
    fb_engine calls = callbacks_of(e);
    int splits = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        splits |= of->by_layer[layer] == FB_OVERLAP_DA || of->by_layer[layer] == FB_OVERLAP_DBA;
    }
    for (e->number = 0; e->number < STEPS; e->number++) {
        fb_step step = begin(e, &four);
        fb_overlap_config layers = layers_of(e, &four);
        if (whole) {
            OK(e->cache, fb_overlap_steps(e->cache, &step, &layers, 1, of->by_layer, 0, &calls));
        }
        for (uint32_t layer = 0; !whole && layer < LAYERS; layer++) {
            uint32_t order = of->by_layer[layer];
            OK(e->cache, fb_overlap(e->cache, step, layer, FB_ALL_QUERY_ROWS, order, &layers, &calls));
        }
        end_step(e, &step, &four, FB_OK);
        memcpy(e->decided[e->number], e->slots, sizeof e->slots);
        for (uint32_t row = 0; row < BATCH; row++) {
            e->stories[row].accepted = 1 + e->number % QUERY;
        }
    }
    for (uint32_t row = 0; row < BATCH; row++) {
        OK(e->cache, fb_digest(e->cache, e->stories[row].sequence, &digest[row]));
        compare_stored(e->cache, &e->stories[row], e->stories[row].committed);
    }
    CHECK(e->sum_count == STEPS * LAYERS * BATCH * QUERY);
    CHECK((e->in_parts > 0) == splits);
    CHECK((stats_of(e->cache).scratch > 0) == (of->group != 0));
    stop(e);
}

/* The same sums, slots and digests in every order of these layers, layer by layer and in whole steps. */
static void twins(engine *engines, fb_device *device, const table *tables, size_t count) {
    uint64_t digest[2][BATCH];
    decode(&engines[0], device, &tables[0], 0, digest[0]);
    for (size_t turn = 1; turn < 2 * count; turn++) {
        decode(&engines[1], device, &tables[turn % count], turn >= count, digest[1]);
        CHECK(memcmp(engines[0].sums, engines[1].sums, sizeof engines[0].sums) == 0);
        CHECK(memcmp(engines[0].decided, engines[1].decided, sizeof engines[0].decided) == 0);
        CHECK(memcmp(digest[0], digest[1], sizeof digest[0]) == 0);
    }
}

/* A callback that refuses abandons the step; its sequences are truncated and go on. */
static void refusing(engine *e, fb_device *device) {
    start(e, device, &ALONE[0]);
    streams four = streams_of(device);
    fb_engine calls = callbacks_of(e);
    for (int at = 0; at < 5; at++) {
        fb_step step = begin(e, &four);
        fb_overlap_config layers = layers_of(e, &four);
        e->refuse_at = at;
        IS(FB_IO, fb_overlap(e->cache, step, 0, FB_ALL_QUERY_ROWS, FB_OVERLAP_DA, &layers, &calls));
        e->refuse_at = -1;
        IS(FB_INVALID_STATE, fb_overlap(e->cache, step, 0, FB_ALL_QUERY_ROWS, FB_OVERLAP_DA, &layers, &calls));
        end_step(e, &step, &four, FB_CANCELLED);
        memset(e->attended, 0, sizeof e->attended);
        for (uint32_t row = 0; row < BATCH; row++) {
            uint64_t sequence = e->stories[row].sequence;
            e->stories[row].committed = length_of(e->cache, sequence).committed;
            OK(e->cache, fb_truncate(e->cache, sequence, e->stories[row].committed, four.stream[0], NULL));
        }
        OK(device, fb_stream_wait(device, four.stream[0]));
    }
    stop(e);
}

static void refused(engine *e, fb_device *device) {
    start(e, device, &ALONE[0]);
    streams four = streams_of(device);
    fb_engine calls = callbacks_of(e);
    e->refuse_at = 0;
    fb_step step = begin(e, &four);
    fb_overlap_config layers = layers_of(e, &four);
    IS(FB_OUT_OF_RANGE, fb_overlap(e->cache, step, LAYERS, 0, FB_OVERLAP_NONE, &layers, &calls));
    CHECK(fb_overlap(e->cache, step, 0, 1, FB_OVERLAP_NONE, &layers, &calls) == FB_OUT_OF_RANGE);
    IS(FB_INVALID_CONFIG, fb_overlap(e->cache, step, 0, 0, 4, &layers, &calls));
    layers.batch = LANES + 1;
    IS(FB_OUT_OF_RANGE, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_NONE, &layers, &calls));
    layers = layers_of(e, &four);
    layers.lists = NULL;
    layers.counts = NULL;
    layers.lists_batch = 0;
    IS(FB_INVALID_CONFIG, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_DA, &layers, &calls));
    layers = layers_of(e, &four);
    layers.compute = four.stream[1];
    IS(FB_INVALID_STATE, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_DA, &layers, &calls));
    calls.enqueue = NULL;
    layers = layers_of(e, &four);
    IS(FB_INVALID_CONFIG, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_DA, &layers, &calls));
    /* None of these has called the engine. */
    CHECK(e->refuse_at == 0);
    /* The enqueue detects a stream that the device has no record of: the step is abandoned. */
    e->refuse_at = -1;
    calls.enqueue = enqueue;
    layers.gather = e;
    IS(FB_OUT_OF_RANGE, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_DA, &layers, &calls));
    end_step(e, &step, &four, FB_CANCELLED);
    stop(e);
}

/* While the attention of a group's first layer waits, the gathers of the others run to their end: ahead of their
 * layers, and into scratch slots that this attention does not read. */
static void runs_ahead(engine *e, fb_device *device) {
    start(e, device, &GROUP[0]);
    CHECK(pthread_mutex_init(&e->lock, NULL) == 0 && pthread_cond_init(&e->changed, NULL) == 0);
    e->holds = 1;
    streams four = streams_of(device);
    fb_engine calls = callbacks_of(e);
    fb_step step = begin(e, &four);
    fb_overlap_config layers = layers_of(e, &four);
    OK(e->cache, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_NONE, &layers, &calls));
    OK(e->cache, fb_overlap(e->cache, step, 1, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    OK(e->cache, fb_overlap(e->cache, step, 2, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    OK(device, fb_stream_call(device, four.stream[2], release, e));
    end_step(e, &step, &four, FB_OK);
    CHECK(e->sum_count == LAYERS * BATCH * QUERY && stats_of(e->cache).scratch > 0);
    stop(e);
    CHECK(pthread_mutex_destroy(&e->lock) == 0 && pthread_cond_destroy(&e->changed) == 0);
}

/* The order ahead in a layer that selects for itself, and behind no fb_overlap of the layer that selects. */
static void refused_ahead(engine *e, fb_device *device) {
    const uint32_t all[LAYERS] = {FB_OVERLAP_AHEAD, FB_OVERLAP_AHEAD, FB_OVERLAP_AHEAD};
    const char *unresolved = "has not resolved the layer that selects for this one";
    start(e, device, &GROUP[0]);
    streams four = streams_of(device);
    fb_engine calls = callbacks_of(e);
    e->refuse_at = 0;
    fb_step step = begin(e, &four);
    /* Attention is not split in the orders none and ahead: no index lists. */
    fb_overlap_config layers = layers_of(e, &four);
    layers.lists = NULL;
    layers.counts = NULL;
    layers.lists_batch = 0;
    IS(FB_INVALID_CONFIG, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    CHECK(says(e->cache, "the order ahead in a layer that selects for itself"));
    IS(FB_INVALID_CONFIG, fb_overlap_steps(e->cache, &step, &layers, 1, all, 0, &calls));
    CHECK(says(e->cache, "the order ahead in a layer that selects for itself"));
    IS(FB_INVALID_STATE, fb_overlap(e->cache, step, 1, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    CHECK(says(e->cache, unresolved));
    /* None of these has called the engine. */
    CHECK(e->refuse_at == 0);
    e->refuse_at = -1;
    OK(e->cache, fb_overlap(e->cache, step, 0, 0, FB_OVERLAP_NONE, &layers, &calls));
    OK(e->cache, fb_overlap(e->cache, step, 1, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    IS(FB_INVALID_CONFIG, fb_overlap(e->cache, step, 2, 0, FB_OVERLAP_DA, &layers, &calls));
    OK(e->cache, fb_overlap(e->cache, step, 2, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    end_step(e, &step, &four, FB_OK);

    /* Neither the step before nor fb_layer counts. */
    e->number++;
    step = begin(e, &four);
    IS(FB_INVALID_STATE, fb_overlap(e->cache, step, 1, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    CHECK(says(e->cache, unresolved));
    memset(e->selection, 0xff, sizeof e->selection);
    OK(e->cache, fb_layer(e->cache, step, 0, e->selection, e->slots, four.stream[0]));
    OK(e->cache, fb_scatter(e->cache, step, 0, four.stream[0]));
    IS(FB_INVALID_STATE, fb_overlap(e->cache, step, 1, 0, FB_OVERLAP_AHEAD, &layers, &calls));
    CHECK(says(e->cache, unresolved));
    OK(e->cache, fb_overlap(e->cache, step, 1, 0, FB_OVERLAP_NONE, &layers, &calls));
    OK(e->cache, fb_overlap(e->cache, step, 2, 0, FB_OVERLAP_NONE, &layers, &calls));
    end_step(e, &step, &four, FB_OK);
    stop(e);
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST_THREADS);
    engine *engines = (engine *)calloc(2, sizeof *engines);
    CHECK(engines != NULL);
    twins(engines, device, ALONE, sizeof ALONE / sizeof ALONE[0]);
    twins(engines, device, GROUP, sizeof GROUP / sizeof GROUP[0]);
    twins(engines, device, PAIR, sizeof PAIR / sizeof PAIR[0]);
    refusing(&engines[1], device);
    refused(&engines[1], device);
    runs_ahead(&engines[1], device);
    refused_ahead(&engines[1], device);
    free(engines);
    OK(device, fb_device_destroy(device));
    return checked();
}
