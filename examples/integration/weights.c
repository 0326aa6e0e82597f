/* The program of examples/sharded_weights.rs, in C: two ranks share the weights of six layers. Each keeps half of every
 * layer and pulls the other half while earlier layers compute. It prints what a rank holds, and compares every use with
 * the whole weights. The ranks are threads here, each with a device of its own; the same calls serve processes of a
 * host. Built by `cc weights.c -pthread $(pkg-config --cflags --libs forebay)`. */
#define _DEFAULT_SOURCE
#include <forebay.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, LAYERS = 6, BYTES = 256 << 10, SOON_MS = 30000 };
static const char NAME[] = "o_proj";
static char folder[] = "/tmp/forebay-weights-XXXXXX";

/* Ends the program with the text of the handle's last error. */
static void must(fb_status status, const void *handle) {
    if (status != FB_OK) {
        char text[512] = "";
        fb_error_text(handle, text, sizeof text);
        fprintf(stderr, "%s: %s\n", fb_status_text(status), text);
        exit(1);
    }
}

/* A byte of a layer's weights, as each rank would load them. */
static uint8_t weight(uint32_t layer, uint32_t at) { return (uint8_t)(at / 7 + 31 * layer); }

/* The engine's output projection, which reads a window in the order of its stream. */
typedef struct {
    const uint8_t *window;
    uint32_t layer;
    atomic_uint *wrong;
} projection;

static void project(void *data) {
    const projection *with = data;
    for (uint32_t at = 0; at < BYTES; at++) {
        if (with->window[at] != weight(with->layer, at)) {
            atomic_fetch_add(with->wrong, 1);
            return;
        }
    }
}

/* Plan and memory of one rank. */
static fb_weights *declare(fb_device *device, uint32_t rank, fb_weights_footprint *held) {
    fb_tensor tensors[LAYERS];
    memset(tensors, 0, sizeof tensors);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        tensors[layer].size = sizeof tensors[layer];
        tensors[layer].name = NAME;
        tensors[layer].bytes = BYTES;
        tensors[layer].layer = layer;
    }
    const char *patterns[] = {NAME};
    fb_weights_config config = {0};
    config.size = sizeof config;
    config.tensors = tensors;
    config.tensor_count = LAYERS;
    config.patterns = patterns;
    config.pattern_count = 1;
    config.layers = LAYERS;
    config.rank = rank;
    config.ranks = RANKS;
    char text[512] = "";
    fb_weights *weights = NULL;
    held->size = sizeof *held;
    if (fb_weights_plan(device, &config, text, sizeof text, held) != FB_OK ||
        fb_weights_create(device, &config, text, sizeof text, &weights) != FB_OK) {
        fprintf(stderr, "no weights: %s\n", text);
        exit(1);
    }
    return weights;
}

/* A step: the engine's work between enter and leave reads the layer's window. Behind leave come the experts. */
static void step(fb_device *device, fb_weights *weights, projection *work, void *compute) {
    must(fb_weights_begin(weights, 1, 0), weights);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        must(fb_weights_enter(weights, layer, 0, compute), weights);
        must(fb_stream_call(device, compute, project, &work[layer]), device);
        must(fb_weights_leave(weights, layer, 0, compute), weights);
    }
    must(fb_weights_end(weights, compute), weights);
}

/* One rank: plan, windows, fill, share, and two steps. */
static void *run(void *data) {
    uint32_t rank = *(const uint32_t *)data;
    char text[512] = "";
    fb_device_config where = {0};
    where.size = sizeof where;
    where.kind = FB_DEVICE_HOST_THREADS;
    fb_device *device = NULL;
    if (fb_device_create(&where, text, sizeof text, &device) != FB_OK) {
        fprintf(stderr, "no device: %s\n", text);
        exit(1);
    }
    fb_weights_footprint held = {0};
    fb_weights *weights = declare(device, rank, &held);

    /* The engine has each tensor whole for a moment, and the windows keep this rank's part of it. */
    uint8_t *loaded = malloc(BYTES);
    void *stream = NULL, *compute = NULL;
    must(fb_stream_create(device, &stream), device);
    must(fb_stream_create(device, &compute), device);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t at = 0; loaded != NULL && at < BYTES; at++) {
            loaded[at] = weight(layer, at);
        }
        must(fb_weights_fill(weights, layer, NAME, loaded, BYTES, stream), weights);
        must(fb_stream_wait(device, stream), device);
    }
    free(loaded);

    /* The ranks say who they are, compare their plans, and give each other their parts. */
    fb_links_config links_config = {0};
    links_config.size = sizeof links_config;
    links_config.folder = folder;
    fb_links *links = NULL;
    must(fb_links_meet(weights, &links_config, stream, &links), weights);
    must(fb_weights_share(weights, links, stream, SOON_MS), weights);

    /* Windows never move, so an engine asks for them once. */
    atomic_uint wrong = 0;
    projection work[LAYERS];
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        void *window = NULL;
        uint64_t bytes = 0;
        must(fb_weights_tensor(weights, layer, NAME, &window, &bytes), weights);
        work[layer] = (projection){window, layer, &wrong};
    }
    for (int number = 0; number < 2; number++) {
        step(device, weights, work, compute);
    }
    must(fb_stream_wait(device, compute), device);
    if (atomic_load(&wrong) > 0) {
        fprintf(stderr, "a window showed other weights\n");
        exit(1);
    }

    fb_links_event event = {0};
    event.size = sizeof event;
    must(fb_links_end(links), links);
    do {
        must(fb_links_poll(links, 1000, text, sizeof text, &event), links);
    } while (!event.is_over);
    must(fb_links_destroy(links), links);
    must(fb_weights_destroy(weights), weights);
    must(fb_device_destroy(device), device);
    char *line = malloc(128);
    if (line != NULL) {
        unsigned long long buffers = held.buffers[0] + held.buffers[1] + held.buffers[2];
        snprintf(line, 128, "%4u %9llu %9llu %9llu %9lld", rank, (unsigned long long)held.resident,
                 (unsigned long long)held.shards, buffers, (long long)held.saved);
    }
    return line;
}

int main(void) {
    pthread_t threads[RANKS];
    uint32_t numbers[RANKS];
    if (fb_abi_version() != FB_ABI_VERSION || mkdtemp(folder) == NULL) {
        return 1;
    }
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        numbers[rank] = rank;
        if (pthread_create(&threads[rank], NULL, run, &numbers[rank]) != 0) {
            return 1;
        }
    }
    printf("rank  resident     parts   buffers     saved   (bytes of %d)\n", LAYERS * BYTES);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        void *line = NULL;
        if (pthread_join(threads[rank], &line) != 0 || line == NULL) {
            return 1;
        }
        printf("%s\n", (const char *)line);
        free(line);
    }
    return rmdir(folder) == 0 ? 0 : 1;
}
