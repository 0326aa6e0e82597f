/* Captured layers. On the host each call reports that it captures nothing, and the cache goes on. On the CUDA
 * device, whose driver is the program's argument, it is an error if an engine leaves out a part of a step whose
 * layers are captured. fb_finish rejects what the host can detect; the step's report finds a graph that was not
 * launched, also if it is one of several. An index group is captured in the order ahead. */

#include "check.h"

#include <dlfcn.h>

enum { DRAFT = LAYERS - 1, BUCKET = 2, PIECES_MAX = DRAFT + QUERY };

static uint32_t enqueue(void *data, const fb_engine_call *call, void *stream) {
    (void)data;
    (void)call;
    (void)stream;
    return FB_OK;
}

static void on_the_host(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    int32_t selection[LANES * ENTRIES], slots[LANES * ENTRIES];
    uint32_t by_layer[LAYERS] = {FB_OVERLAP_NONE, FB_OVERLAP_NONE, FB_OVERLAP_NONE};
    fb_overlap_config bucket = SIZED(fb_overlap_config);
    bucket.selection = selection;
    bucket.slots = slots;
    bucket.batch = LANES;
    fb_capture_config capture = SIZED(fb_capture_config);
    capture.micro_batches = &bucket;
    capture.by_layer = by_layer;
    capture.count = 1;
    capture.query_rows = QUERY;
    fb_engine engine = SIZED(fb_engine);
    engine.enqueue = enqueue;
    fb_captured *captured = NULL;
    IS(FB_UNSUPPORTED, fb_capture(cache, &capture, &engine, &captured));
    CHECK(captured == NULL && says(cache, "captur"));
    IS(FB_INVALID_STATE, fb_capture_into(cache, &capture, &engine, &captured));
    CHECK(captured == NULL);
    story of;
    open_story(cache, &of, 40, NULL);
    fb_step step = begin_step(cache, &of, 1, QUERY, NULL);
    IS(FB_INVALID_CONFIG, fb_launch(cache, NULL, &step, 1));
    IS(FB_INVALID_CONFIG, fb_launched(cache, NULL, &step, 1));
    IS(FB_INVALID_CONFIG, fb_captured_destroy(NULL));
    rest_of_step(cache, step, 0, NULL);
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    of.accepted = 1;
    decode_step(cache, &of, 1, 3, 1);
    OK(cache, fb_close(cache, of.sequence, NULL));
    end_all(device, cache);
}

/* The driver functions that an engine calls by itself. */
typedef struct {
    void *library;
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*release)(int);
    int (*push)(void *);
    int (*pop)(void **);
    int (*begin_capture)(void *, int);
    int (*end_capture)(void *, void **);
    int (*instantiate)(void **, void *, unsigned long long);
    int (*launch)(void *, void *);
    int (*destroy_exec)(void *);
    int (*destroy_graph)(void *);
    int (*set_bytes)(unsigned long long, unsigned char, size_t, void *);
} driver;

static void find(const driver *of, const char *name, void *function, size_t bytes) {
    void *found = dlsym(of->library, name);
    CHECK(found != NULL && bytes == sizeof found);
    memcpy(function, &found, bytes);
}
#define FIND(of, field, name) find((of), (name), &(of)->field, sizeof (of)->field)

static driver driver_of(const char *path) {
    driver d;
    memset(&d, 0, sizeof d);
    d.library = dlopen(path, RTLD_NOW);
    CHECK(d.library != NULL);
    FIND(&d, init, "cuInit");
    FIND(&d, retain, "cuDevicePrimaryCtxRetain");
    FIND(&d, release, "cuDevicePrimaryCtxRelease_v2");
    FIND(&d, push, "cuCtxPushCurrent_v2");
    FIND(&d, pop, "cuCtxPopCurrent_v2");
    FIND(&d, begin_capture, "cuStreamBeginCapture_v2");
    FIND(&d, end_capture, "cuStreamEndCapture");
    FIND(&d, instantiate, "cuGraphInstantiateWithFlags");
    FIND(&d, launch, "cuGraphLaunch");
    FIND(&d, destroy_exec, "cuGraphExecDestroy");
    FIND(&d, destroy_graph, "cuGraphDestroy");
    FIND(&d, set_bytes, "cuMemsetD8Async");
    return d;
}

/* An engine that captures its layers in one graph, or in one for each layer and each draft pass. */
typedef struct {
    const driver *driver;
    void *stream;
    int in_pieces;
    uint32_t count;
    void *graph[PIECES_MAX], *exec[PIECES_MAX];
} engine;

static void begin_piece(const engine *e) {
    CHECK(e->driver->begin_capture(e->stream, 1) == 0);
}

static void end_piece(engine *e) {
    CHECK(e->count < PIECES_MAX);
    CHECK(e->driver->end_capture(e->stream, &e->graph[e->count]) == 0);
    CHECK(e->driver->instantiate(&e->exec[e->count], e->graph[e->count], 0) == 0);
    e->count++;
}

static uint32_t enqueue_in_pieces(void *data, const fb_engine_call *call, void *stream) {
    engine *e = (engine *)data;
    CHECK(stream == e->stream);
    int first = call->layer == 0 && call->first_query_row == 0;
    if (e->in_pieces && call->work == FB_WORK_PROJECT && !first) {
        end_piece(e);
        begin_piece(e);
    }
    return FB_OK;
}

typedef struct {
    driver driver;
    fb_device *device;
    fb_cache *cache;
    void *context, *stream;
    story of[BUCKET];
    fb_overlap_config layers;
    uint32_t by_layer[LAYERS];
} rig;

static int32_t *device_words(const rig *r, size_t words, unsigned char byte) {
    void *address = NULL;
    OK(r->device, fb_device_allocate(r->device, 4 * words, &address));
    CHECK(r->driver.set_bytes((unsigned long long)(uintptr_t)address, byte, 4 * words, r->stream) == 0);
    return (int32_t *)address;
}

/* For two batch rows: two layers and a draft layer, which select nothing, or three layers of one index group, which
 * select the first position. */
static void begin(rig *r, const char *path, int grouped) {
    memset(r, 0, sizeof *r);
    r->driver = driver_of(path);
    fb_device_config config = SIZED(fb_device_config);
    config.kind = FB_DEVICE_CUDA;
    config.library = path;
    config.threads = 64;
    char text[256] = "";
    if (fb_device_create(&config, text, sizeof text, &r->device) != FB_OK) {
        fprintf(stderr, "fb_device_create: %s\n", text);
    }
    CHECK(r->device != NULL);
    CHECK(r->driver.init(0) == 0 && r->driver.retain(&r->context, 0) == 0 && r->driver.push(r->context) == 0);
    fb_cache_config cache = declared();
    cache.layers = grouped ? LAYERS : DRAFT;
    cache.draft_layers = grouped ? 0 : 1;
    cache.group_layers = grouped ? LAYERS : 0;
    r->cache = cache_of(r->device, &cache);
    OK(r->device, fb_stream_create(r->device, &r->stream));
    for (uint32_t row = 0; row < BUCKET; row++) {
        open_story(r->cache, &r->of[row], 40, r->stream);
    }
    fb_overlap_config layers = SIZED(fb_overlap_config);
    layers.compute = layers.resolve = layers.gather = layers.scatter = r->stream;
    layers.selection = device_words(r, BUCKET * ENTRIES, grouped ? 0 : 0xff);
    layers.slots = device_words(r, BUCKET * ENTRIES, 0xff);
    layers.batch = BUCKET;
    r->layers = layers;
}

static fb_captured *capture(rig *r, engine *own, uint32_t draft_passes) {
    fb_capture_config config = SIZED(fb_capture_config);
    config.micro_batches = &r->layers;
    config.by_layer = r->by_layer;
    config.count = 1;
    config.query_rows = QUERY;
    config.draft_passes = draft_passes;
    fb_engine calls = SIZED(fb_engine);
    calls.enqueue = own == NULL ? enqueue : enqueue_in_pieces;
    calls.data = own;
    fb_captured *captured = NULL;
    if (own == NULL) {
        OK(r->cache, fb_capture(r->cache, &config, &calls, &captured));
    } else {
        begin_piece(own);
        OK(r->cache, fb_capture_into(r->cache, &config, &calls, &captured));
        end_piece(own);
    }
    CHECK(captured != NULL);
    return captured;
}

static fb_step prepare(rig *r) {
    return begin_step(r->cache, r->of, BUCKET, QUERY, r->stream);
}

static fb_status retire(rig *r, fb_step step) {
    OK(r->device, fb_stream_wait(r->device, r->stream));
    fb_status ended = fb_retire(r->cache, &step, r->stream, NULL);
    CHECK(step == 0);
    return ended;
}

static void ends_well(rig *r, fb_step step) {
    OK(r->cache, fb_finish(r->cache, step, r->stream));
    OK(r->cache, retire(r, step));
}

static void truncate(rig *r) {
    for (uint32_t row = 0; row < BUCKET; row++) {
        r->of[row].committed = length_of(r->cache, r->of[row].sequence).committed;
        OK(r->cache, fb_truncate(r->cache, r->of[row].sequence, r->of[row].committed, r->stream, NULL));
    }
    OK(r->device, fb_stream_wait(r->device, r->stream));
}

static void abandon(rig *r, fb_step step) {
    OK(r->cache, fb_abandon(r->cache, step));
    OK(r->cache, fb_finish(r->cache, step, r->stream));
    IS(FB_CANCELLED, retire(r, step));
    truncate(r);
}

/* The host has a record of what a capture holds, and whether it was launched. */
static void detected_by_the_host(rig *r) {
    fb_captured *captured = capture(r, NULL, QUERY);
    fb_step step = prepare(r);
    IS(FB_INVALID_STATE, fb_finish(r->cache, step, r->stream));
    CHECK(says(r->cache, "a resolve was not enqueued (layer 0, batch row 0, query row 0)"));
    OK(r->cache, fb_launch(r->cache, captured, &step, 1));
    ends_well(r, step);
    OK(captured, fb_captured_destroy(captured));
    /* The draft passes that were not captured. */
    for (uint32_t passes = 0; passes < QUERY; passes++) {
        captured = capture(r, NULL, passes);
        for (int completed = 0; completed < 2; completed++) {
            char text[128];
            step = prepare(r);
            OK(r->cache, fb_launch(r->cache, captured, &step, 1));
            int length = snprintf(text, sizeof text,
                                  "a resolve was not enqueued (layer %d, batch row 0, query row %u)", DRAFT, passes);
            CHECK(length > 0 && (size_t)length < sizeof text);
            IS(FB_INVALID_STATE, fb_finish(r->cache, step, r->stream));
            CHECK(says(r->cache, text) && says(r->cache, "enqueue it, or abandon the step"));
            if (!completed) {
                abandon(r, step);
                continue;
            }
            fb_engine calls = SIZED(fb_engine);
            calls.enqueue = enqueue;
            for (uint32_t pass = passes; pass < QUERY; pass++) {
                OK(r->cache, fb_overlap(r->cache, step, DRAFT, pass + 1, FB_OVERLAP_NONE, &r->layers, &calls));
            }
            ends_well(r, step);
        }
        OK(captured, fb_captured_destroy(captured));
    }
}

/* A step that declares all graphs launched, but leaves out `without`, if there is one. */
static void launched_without(rig *r, const engine *own, const fb_captured *captured, uint32_t without) {
    fb_step step = prepare(r);
    for (uint32_t piece = 0; piece < own->count; piece++) {
        if (piece != without) {
            CHECK(r->driver.launch(own->exec[piece], r->stream) == 0);
        }
    }
    OK(r->cache, fb_launched(r->cache, captured, &step, 1));
    if (without >= own->count) {
        ends_well(r, step);
        return;
    }
    char text[128];
    int length =
        snprintf(text, sizeof text, "a query row was never resolved (batch row 0, layer %u, value %u)",
                 without < DRAFT ? without : DRAFT, without < DRAFT ? 0 : without - DRAFT);
    CHECK(length > 0 && (size_t)length < sizeof text);
    OK(r->cache, fb_finish(r->cache, step, r->stream));
    IS(FB_DEVICE_FAILED, retire(r, step));
    CHECK(says(r->cache, text) && says(r->cache, "truncate its sequences"));
    fb_batch_row row = {r->of[0].sequence, 0, QUERY};
    fb_step_config config = SIZED(fb_step_config);
    config.rows = &row;
    config.row_count = 1;
    config.query_rows = QUERY;
    step = 0;
    CHECK(fb_prepare(r->cache, &config, r->stream, &step) != FB_OK && step == 0);
    truncate(r);
}

/* One graph of the engine's own that was never launched; then one graph for each layer, of which one is left out. */
static void detected_by_the_device(rig *r) {
    for (int in_pieces = 0; in_pieces < 2; in_pieces++) {
        engine own;
        memset(&own, 0, sizeof own);
        own.driver = &r->driver;
        own.stream = r->stream;
        own.in_pieces = in_pieces;
        fb_captured *captured = capture(r, &own, QUERY);
        CHECK(own.count == (in_pieces ? PIECES_MAX : 1));
        for (uint32_t without = 0; without <= own.count; without++) {
            launched_without(r, &own, captured, without);
        }
        OK(captured, fb_captured_destroy(captured));
        for (uint32_t piece = 0; piece < own.count; piece++) {
            CHECK(r->driver.destroy_exec(own.exec[piece]) == 0 && r->driver.destroy_graph(own.graph[piece]) == 0);
        }
    }
}

/* A group in the order ahead, in the library's graph or in the engine's. The stand-in's device memory is the host's. */
static void runs_ahead(rig *r, int in_own) {
    engine own;
    memset(&own, 0, sizeof own);
    own.driver = &r->driver;
    own.stream = r->stream;
    OK(r->device, fb_stream_create(r->device, &r->layers.gather));
    r->by_layer[1] = r->by_layer[2] = FB_OVERLAP_AHEAD;
    fb_captured *captured = capture(r, in_own ? &own : NULL, 0);
    if (in_own) {
        launched_without(r, &own, captured, own.count);
    } else {
        fb_step step = prepare(r);
        OK(r->cache, fb_launch(r->cache, captured, &step, 1));
        ends_well(r, step);
    }
    for (uint32_t row = 0; row < BUCKET; row++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint32_t words[WORDS];
            stamp(&r->of[row], words, layer, 0);
            CHECK(memcmp(row_at(r->cache, layer, r->layers.slots[row * ENTRIES]), words, ROW) == 0);
        }
    }
    OK(captured, fb_captured_destroy(captured));
    for (uint32_t piece = 0; piece < own.count; piece++) {
        CHECK(r->driver.destroy_exec(own.exec[piece]) == 0 && r->driver.destroy_graph(own.graph[piece]) == 0);
    }
}

static void on_cuda(const char *path) {
    /* The driver stays loaded, and its memory stays reachable. */
    static rig rigs[3];
    for (int turn = 0; turn < 3; turn++) {
        rig *r = &rigs[turn];
        begin(r, path, turn > 0);
        if (turn == 0) {
            detected_by_the_host(r);
            detected_by_the_device(r);
        } else {
            runs_ahead(r, turn == 2);
        }
        for (uint32_t row = 0; row < BUCKET; row++) {
            OK(r->cache, fb_close(r->cache, r->of[row].sequence, r->stream));
        }
        OK(r->device, fb_stream_wait(r->device, r->stream));
        CHECK(r->driver.pop(&r->context) == 0 && r->driver.release(0) == 0);
        end_all(r->device, r->cache);
    }
}

int main(int count, char **arguments) {
    on_the_host();
    if (count > 1) {
        on_cuda(arguments[1]);
    }
    return checked();
}
