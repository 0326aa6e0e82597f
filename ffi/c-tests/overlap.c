/* A layer in the orders none, DA and DBA, on streams with their own threads: attention reads the same bytes in each
 * order. Callbacks enqueue the engine's work, which runs on its stream. */

#include "check.h"

enum { STEPS = 12, BATCH = 2, LISTS = 2, CALLS_MAX = 4096 };
enum { BATCH_ENTRIES = BATCH * ENTRIES };

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
    uint32_t in_parts;
    work works[CALLS_MAX];
    uint32_t work_count;
    unsigned char *slabs[LAYERS];
    uint32_t landing[BATCH][QUERY];
};

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

static void start(engine *e, fb_device *device) {
    fb_cache_config config = declared();
    memset(e, 0, sizeof *e);
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

/* Decodes in one order, layer by layer or whole steps; returns the digests of both sequences. */
static void decode(engine *e, fb_device *device, uint32_t order, int whole, uint64_t digest[BATCH]) {
    start(e, device);
    streams four = streams_of(device);
    fb_engine calls = SIZED(fb_engine);
    calls.enqueue = enqueue;
    calls.data = e;
    uint32_t by_layer[LAYERS] = {order, order, order};
    for (e->number = 0; e->number < STEPS; e->number++) {
        fb_step step = begin(e, &four);
        fb_overlap_config layers = layers_of(e, &four);
        if (whole) {
            OK(e->cache, fb_overlap_steps(e->cache, &step, &layers, 1, by_layer, 0, &calls));
        }
        for (uint32_t layer = 0; !whole && layer < LAYERS; layer++) {
            OK(e->cache, fb_overlap(e->cache, step, layer, FB_ALL_QUERY_ROWS, order, &layers, &calls));
        }
        end_step(e, &step, &four, FB_OK);
        for (uint32_t row = 0; row < BATCH; row++) {
            e->stories[row].accepted = 1 + e->number % QUERY;
        }
    }
    for (uint32_t row = 0; row < BATCH; row++) {
        OK(e->cache, fb_digest(e->cache, e->stories[row].sequence, &digest[row]));
        compare_stored(e->cache, &e->stories[row], e->stories[row].committed);
    }
    CHECK(e->sum_count == STEPS * LAYERS * BATCH * QUERY);
    CHECK((e->in_parts > 0) == (order != FB_OVERLAP_NONE));
    stop(e);
}

/* A callback that refuses abandons the step; its sequences are truncated and go on. */
static void refusing(engine *e, fb_device *device) {
    start(e, device);
    streams four = streams_of(device);
    fb_engine calls = SIZED(fb_engine);
    calls.enqueue = enqueue;
    calls.data = e;
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
    start(e, device);
    streams four = streams_of(device);
    fb_engine calls = SIZED(fb_engine);
    calls.enqueue = enqueue;
    calls.data = e;
    e->refuse_at = 0;
    fb_step step = begin(e, &four);
    fb_overlap_config layers = layers_of(e, &four);
    IS(FB_OUT_OF_RANGE, fb_overlap(e->cache, step, LAYERS, 0, FB_OVERLAP_NONE, &layers, &calls));
    CHECK(fb_overlap(e->cache, step, 0, 1, FB_OVERLAP_NONE, &layers, &calls) == FB_OUT_OF_RANGE);
    IS(FB_INVALID_CONFIG, fb_overlap(e->cache, step, 0, 0, 3, &layers, &calls));
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

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST_THREADS);
    engine *engines = (engine *)calloc(2, sizeof *engines);
    uint64_t digest[2][BATCH];
    CHECK(engines != NULL);
    const uint32_t orders[] = {FB_OVERLAP_NONE, FB_OVERLAP_DA, FB_OVERLAP_DBA};
    decode(&engines[0], device, FB_OVERLAP_NONE, 0, digest[0]);
    for (uint32_t turn = 0; turn < 5; turn++) {
        decode(&engines[1], device, orders[(turn + 1) % 3], turn > 1, digest[1]);
        CHECK(memcmp(engines[0].sums, engines[1].sums, sizeof engines[0].sums) == 0);
        CHECK(memcmp(digest[0], digest[1], sizeof digest[0]) == 0);
    }
    refusing(&engines[1], device);
    refused(&engines[1], device);
    free(engines);
    OK(device, fb_device_destroy(device));
    return checked();
}
