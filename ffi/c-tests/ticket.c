/* Tickets: the single completion of work that the host issued, here on streams with their own threads. */

#include "check.h"

#include <pthread.h>

/* Holds a stream until the test releases it. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int held;
} gate;

static void hold(void *data) {
    gate *at = (gate *)data;
    pthread_mutex_lock(&at->lock);
    while (at->held) {
        pthread_cond_wait(&at->changed, &at->lock);
    }
    pthread_mutex_unlock(&at->lock);
}

static void release(gate *at) {
    pthread_mutex_lock(&at->lock);
    at->held = 0;
    pthread_cond_broadcast(&at->changed);
    pthread_mutex_unlock(&at->lock);
}

static uint32_t outcome_of(const fb_ticket *ticket) {
    uint32_t outcome = 77, failure = 77;
    OK(ticket, fb_ticket_outcome(ticket, &outcome, &failure));
    CHECK(outcome <= FB_TICKET_CANCELLED && (failure == FB_OK) == (outcome != FB_TICKET_FAILED));
    return outcome;
}

static uint64_t filled(fb_cache *cache, story *of, uint32_t prompt) {
    fb_open_config config = opening(prompt, 40);
    begin_story(of, prompt);
    OK(cache, fb_open(cache, &config, &of->sequence));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append_rows(cache, of, layer, 0, prompt);
    }
    return of->sequence;
}

/* While the stream is held its work is pending; a closed sequence's memory is released after the work has ended. */
static void pending_then_done(fb_device *device, fb_cache *cache) {
    gate at = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 1};
    void *stream = NULL;
    fb_ticket *ticket = NULL;
    story of;
    OK(device, fb_stream_create(device, &stream));
    (void)filled(cache, &of, 20);
    OK(device, fb_stream_call(device, stream, hold, &at));
    OK(cache, fb_join(cache, of.sequence, NULL, stream, &ticket));
    CHECK(ticket != NULL && outcome_of(ticket) == FB_TICKET_PENDING);
    IS(FB_BUSY, fb_truncate(cache, of.sequence, 10, stream, NULL));
    OK(cache, fb_close(cache, of.sequence, stream));
    OK(cache, fb_cache_reap(cache, stream, NULL));
    CHECK(stats_of(cache).sequences == 1);
    IS(FB_BUSY, fb_cache_destroy(cache));
    release(&at);
    OK(device, fb_stream_wait(device, stream));
    CHECK(outcome_of(ticket) == FB_TICKET_DONE && outcome_of(ticket) == FB_TICKET_DONE);
    OK(cache, fb_cache_reap(cache, stream, NULL));
    OK(device, fb_stream_wait(device, stream));
    OK(cache, fb_cache_reap(cache, stream, NULL));
    CHECK(stats_of(cache).sequences == 0);
    OK(ticket, fb_ticket_destroy(ticket));
    IS(FB_CLOSED, fb_ticket_destroy(ticket));
}

/* join_more continues a bounded warm-up; each call has its own ticket. */
static void joined_in_several_calls(fb_device *device, fb_cache *cache) {
    int32_t selections[LAYERS * 4 * TOP_K];
    void *stream = NULL;
    fb_ticket *ticket = NULL;
    story of;
    uint32_t calls = 1;
    OK(device, fb_stream_create(device, &stream));
    (void)filled(cache, &of, 100);
    for (uint32_t index = 0; index < LAYERS * 4 * TOP_K; index++) {
        selections[index] = (int32_t)(index * 37 % 100);
    }
    fb_warm_up warm_up = SIZED(fb_warm_up);
    warm_up.selections = selections;
    warm_up.steps = 4;
    warm_up.bytes_a_call = 4 * ROW;
    OK(cache, fb_join(cache, of.sequence, &warm_up, stream, &ticket));
    while (length_of(cache, of.sequence).running == 0) {
        OK(ticket, fb_ticket_destroy(ticket));
        OK(cache, fb_join_more(cache, of.sequence, stream, &ticket));
        CHECK(++calls < 1000);
    }
    CHECK(calls > 2);
    IS(FB_INVALID_STATE, fb_join_more(cache, of.sequence, stream, NULL));
    OK(device, fb_stream_wait(device, stream));
    CHECK(outcome_of(ticket) == FB_TICKET_DONE);
    OK(ticket, fb_ticket_destroy(ticket));
    /* The rows that the warm-up selected last are resident: a step that selects them misses nothing. */
    int32_t selection[TOP_K], slots[TOP_K];
    fb_step step = begin_step(cache, &of, 1, 1, stream);
    fb_retired retired = SIZED(fb_retired);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        memcpy(selection, selections + (layer * 4 + 3) * TOP_K, sizeof selection);
        OK(cache, fb_layer(cache, step, layer, selection, slots, stream));
        OK(device, fb_stream_wait(device, stream));
        CHECK(compare_rows(cache, &of, layer, selection, slots, TOP_K) == TOP_K);
        OK(cache, fb_scatter(cache, step, layer, stream));
    }
    OK(cache, fb_finish(cache, step, stream));
    OK(device, fb_stream_wait(device, stream));
    OK(cache, fb_retire(cache, &step, stream, &retired));
    CHECK(retired.misses == 0 && retired.hits == LAYERS * TOP_K);
    OK(cache, fb_close(cache, of.sequence, stream));
    OK(device, fb_stream_wait(device, stream));
}

static void refused(fb_cache *cache) {
    int32_t selections[LAYERS * TOP_K];
    fb_ticket *ticket = NULL;
    story of;
    (void)filled(cache, &of, 20);
    fb_warm_up warm_up = SIZED(fb_warm_up);
    warm_up.steps = 1;
    IS(FB_INVALID_CONFIG, fb_join(cache, of.sequence, &warm_up, NULL, &ticket));
    warm_up.selections = selections;
    warm_up.steps = 0;
    CHECK(fb_join(cache, of.sequence, &warm_up, NULL, &ticket) != FB_OK);
    CHECK(ticket == NULL);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* A ticket outlives its sequence and its cache. */
static void outlives(fb_device *device) {
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    fb_ticket *tickets[3] = {NULL, NULL, NULL};
    uint64_t child = 0;
    story of;
    (void)filled(cache, &of, 20);
    fb_open_config open = opening(0, 20);
    OK(cache, fb_join(cache, of.sequence, NULL, NULL, &tickets[0]));
    OK(device, fb_stream_wait(device, NULL));
    OK(cache, fb_fork(cache, of.sequence, &open, NULL, &child, &tickets[1]));
    OK(device, fb_stream_wait(device, NULL));
    OK(cache, fb_truncate(cache, child, 5, NULL, &tickets[2]));
    OK(device, fb_stream_wait(device, NULL));
    OK(cache, fb_close(cache, of.sequence, NULL));
    OK(cache, fb_close(cache, child, NULL));
    OK(cache, fb_cache_reap(cache, NULL, NULL));
    OK(cache, fb_cache_destroy(cache));
    for (size_t index = 0; index < 3; index++) {
        CHECK(outcome_of(tickets[index]) == FB_TICKET_DONE);
        OK(tickets[index], fb_ticket_destroy(tickets[index]));
    }
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST_THREADS);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    pending_then_done(device, cache);
    joined_in_several_calls(device, cache);
    refused(cache);
    outlives(device);
    OK(device, fb_stream_wait(device, NULL));
    end_all(device, cache);
    return checked();
}
