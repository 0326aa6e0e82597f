/* Weights that two ranks share, each on a thread: filling, steps, residence, new versions and copies of hot ranges that
 * all take or that none takes, a rank that ends, and calls out of their order. */

/* For barriers. */
#define _POSIX_C_SOURCE 200809L

#include "check.h"

#include <pthread.h>

enum { RANKS = 2, MODEL = 4, O_BYTES = 30000, KV_BYTES = 5001, SOON = 20000 };

static const char *const NAMES[2] = {"o_proj", "kv_b"};
static const uint32_t LENGTHS[2] = {O_BYTES, KV_BYTES};

/* The byte of a tensor, as every rank would load it. */
static unsigned char weight(uint32_t version, uint32_t layer, uint32_t tensor, uint32_t at) {
    return (unsigned char)(at / 5 + 31 * layer + 77 * tensor + 143 * version);
}

typedef struct {
    uint32_t number;
    fb_device *device;
    fb_weights *weights;
    fb_links *links;
    unsigned char *loaded;
    pthread_barrier_t *met;
} rank;

/* Loads a tensor whole, as an engine does. */
static uint64_t load(rank *r, uint32_t version, uint32_t layer, uint32_t tensor) {
    for (uint32_t at = 0; at < LENGTHS[tensor]; at++) {
        r->loaded[at] = weight(version, layer, tensor, at);
    }
    return LENGTHS[tensor];
}

static int shows(const rank *r, uint32_t layer, uint32_t version) {
    int same = 1;
    for (uint32_t tensor = 0; tensor < 2; tensor++) {
        void *address = NULL;
        uint64_t bytes = 0;
        OK(r->weights, fb_weights_tensor(r->weights, layer, NAMES[tensor], &address, &bytes));
        CHECK(bytes == LENGTHS[tensor]);
        for (uint32_t at = 0; at < LENGTHS[tensor]; at++) {
            same &= ((const unsigned char *)address)[at] == weight(version, layer, tensor, at);
        }
    }
    return same;
}

static void make(rank *r) {
    fb_tensor tensors[2 * MODEL];
    fb_weights_config config = SIZED(fb_weights_config);
    fb_weights_footprint footprint = SIZED(fb_weights_footprint);
    const char *patterns[] = {"o_*", "kv_b"};
    char text[512] = "";
    for (uint32_t at = 0; at < 2 * MODEL; at++) {
        fb_tensor tensor = SIZED(fb_tensor);
        tensor.name = NAMES[at % 2];
        tensor.bytes = LENGTHS[at % 2];
        tensor.layer = at / 2;
        tensors[at] = tensor;
    }
    config.tensors = tensors;
    config.tensor_count = 2 * MODEL;
    config.patterns = patterns;
    config.pattern_count = 2;
    config.layers = MODEL;
    config.rank = r->number;
    config.ranks = RANKS;
    r->device = device_of(FB_DEVICE_HOST);
    IS(FB_OK, fb_weights_plan(r->device, &config, text, sizeof text, &footprint));
    CHECK(footprint.whole == MODEL * (O_BYTES + KV_BYTES) && footprint.sharded_layers == MODEL);
    CHECK(footprint.saved == (int64_t)footprint.whole - (int64_t)footprint.device);
    config.rank = RANKS;
    IS(FB_OUT_OF_RANGE, fb_weights_create(r->device, &config, text, sizeof text, &r->weights));
    CHECK(strstr(text, "rank 2") != NULL && r->weights == NULL);
    config.rank = r->number;
    IS(FB_OK, fb_weights_create(r->device, &config, text, sizeof text, &r->weights));
}

static void fill(rank *r) {
    fb_layer_weights layer = SIZED(fb_layer_weights);
    IS(FB_INVALID_STATE, fb_weights_begin(r->weights, 1, 0));
    IS(FB_INVALID_STATE, fb_weights_layer(r->weights, 0, &layer));
    CHECK(says(r->weights, "o_proj"));
    IS(FB_OUT_OF_RANGE, fb_weights_fill(r->weights, 0, "o_proj", r->loaded, O_BYTES - 1, NULL));
    IS(FB_OUT_OF_RANGE, fb_weights_fill(r->weights, 0, "q_proj", r->loaded, O_BYTES, NULL));
    for (uint32_t at = 0; at < 2 * MODEL; at++) {
        uint64_t bytes = load(r, 0, at / 2, at % 2);
        OK(r->weights, fb_weights_fill(r->weights, at / 2, NAMES[at % 2], r->loaded, bytes, NULL));
    }
    IS(FB_INVALID_STATE, fb_weights_layer(r->weights, 0, &layer));
    CHECK(says(r->weights, "part of another rank"));
}

static void share(rank *r) {
    fb_links_config config = SIZED(fb_links_config);
    config.folder = ".";
    config.hello_ms = SOON;
    config.geometry[31] = 5;
    OK(r->weights, fb_links_meet(r->weights, &config, NULL, &r->links));
    OK(r->weights, fb_weights_share(r->weights, r->links, NULL, SOON));
    IS(FB_INVALID_STATE, fb_weights_share(r->weights, r->links, NULL, SOON));
    IS(FB_INVALID_STATE, fb_weights_fill(r->weights, 0, "o_proj", r->loaded, O_BYTES, NULL));
    CHECK(says(r->weights, "not filled any more"));
}

static void step(rank *r, uint32_t version) {
    OK(r->weights, fb_weights_begin(r->weights, 1, 0));
    IS(FB_BUSY, fb_weights_begin(r->weights, 1, 0));
    for (uint32_t layer = 0; layer < MODEL; layer++) {
        OK(r->weights, fb_weights_enter(r->weights, layer, 0, NULL));
        CHECK(shows(r, layer, version));
        OK(r->weights, fb_weights_leave(r->weights, layer, 0, NULL));
    }
    OK(r->weights, fb_weights_end(r->weights, NULL));
}

static uint32_t launch(void *data, void *stream) {
    rank *r = (rank *)data;
    CHECK(stream == NULL);
    IS(FB_BUSY, fb_weights_begin(r->weights, 1, 0));
    return FB_OK;
}

static void residence(rank *r) {
    uint64_t least = 0, most = 0, now = 0;
    OK(r->weights, fb_weights_bytes(r->weights, &least));
    OK(r->weights, fb_weights_grow(r->weights, UINT64_MAX, NULL, &most));
    CHECK(most > least && shows(r, 0, 0) && shows(r, 2, 0));
    step(r, 0);
    OK(r->weights, fb_weights_shrink(r->weights, least, &now));
    CHECK(now == least);
    IS(FB_OUT_OF_MEMORY, fb_weights_shrink(r->weights, least - 1, NULL));
    OK(r->weights, fb_weights_launch(r->weights, NULL, launch, r));
    step(r, 0);
}

/* A new version of all layers. */
static fb_update *begin_update(rank *r, uint32_t version) {
    const uint32_t layers[MODEL] = {0, 1, 2, 3};
    fb_update *update = NULL;
    IS(FB_OUT_OF_MEMORY, fb_update_create(r->weights, version, layers, MODEL, 1, &update));
    CHECK(says(r->weights, "needed") && update == NULL);
    OK(r->weights, fb_update_create(r->weights, version, layers, MODEL, 1ull << 30, &update));
    for (uint32_t at = 0; at < 2 * MODEL; at++) {
        uint64_t bytes = load(r, version, at / 2, at % 2);
        OK(update, fb_update_fill(update, at / 2, NAMES[at % 2], r->loaded, bytes, NULL));
    }
    OK(update, fb_update_share(update, r->links, NULL, SOON));
    IS(FB_INVALID_STATE, fb_update_share(update, r->links, NULL, SOON));
    OK(update, fb_update_verify(update, 1, NULL));
    step(r, 0);
    return update;
}

static void update(rank *r) {
    uint32_t outcome = 77;
    char reason[256] = "x";
    /* One that rank 1 gives up. */
    fb_update *next = begin_update(r, 1);
    pthread_barrier_wait(r->met);
    if (r->number == 1) {
        OK(next, fb_update_destroy(next));
    }
    pthread_barrier_wait(r->met);
    if (r->number == 0) {
        OK(r->weights,
           fb_weights_commit(r->weights, next, r->links, 5, NULL, SOON, &outcome, reason, sizeof reason));
        CHECK(outcome == FB_UPDATE_ABORTED && strstr(reason, "aborted") != NULL);
        OK(next, fb_update_destroy(next));
    }
    step(r, 0);
    /* One that all take. */
    next = begin_update(r, 2);
    OK(r->weights, fb_weights_commit(r->weights, next, r->links, 6, NULL, SOON, &outcome, reason, sizeof reason));
    CHECK(outcome == FB_UPDATE_COMMITTED && reason[0] == 0);
    IS(FB_INVALID_STATE, fb_weights_commit(r->weights, next, r->links, 6, NULL, 0, &outcome, NULL, 0));
    OK(next, fb_update_destroy(next));
    step(r, 2);
}

/* A change of the replicas that both ranks have shared. */
static fb_replication *begin_replicas(rank *r, uint32_t number) {
    const fb_replica wanted[2] = {{"o_proj", 3, 0}, {"o_proj", 1, 1}};
    const fb_replica nowhere = {"o_proj", 1, RANKS};
    fb_replication *change = NULL;
    uint64_t all = 0, left = 0;
    IS(FB_OUT_OF_MEMORY, fb_replication_create(r->weights, number, wanted, 2, 1, &change));
    CHECK(says(r->weights, "needed") && change == NULL);
    IS(FB_OUT_OF_RANGE, fb_replication_create(r->weights, number, &nowhere, 1, 1ull << 30, &change));
    CHECK(says(r->weights, "rank 2") && change == NULL);
    OK(r->weights, fb_replication_create(r->weights, number, wanted, 2, 1ull << 30, &change));
    IS(FB_INVALID_STATE, fb_replication_share(change, r->links, NULL, 0));
    CHECK(says(change, "bytes"));
    OK(change, fb_replication_left(change, &all));
    CHECK(all > 4096);
    OK(change, fb_replication_advance(change, 4096, NULL, &left));
    CHECK(left == all - 4096);
    step(r, 2);
    OK(change, fb_replication_advance(change, UINT64_MAX, NULL, NULL));
    OK(change, fb_replication_left(change, &left));
    CHECK(left == 0);
    OK(change, fb_replication_share(change, r->links, NULL, SOON));
    IS(FB_INVALID_STATE, fb_replication_advance(change, 1, NULL, NULL));
    step(r, 2);
    return change;
}

static void replicas(rank *r) {
    uint32_t outcome = 77, count = 77;
    uint64_t least = 0, most = 0;
    char reason[256] = "x";
    fb_replica there[2] = {{NULL, 77, 77}, {NULL, 77, 77}};
    OK(r->weights, fb_weights_bytes(r->weights, &least));
    /* One that rank 1 gives up. */
    fb_replication *next = begin_replicas(r, 1);
    pthread_barrier_wait(r->met);
    if (r->number == 1) {
        OK(next, fb_replication_abort(next));
    }
    pthread_barrier_wait(r->met);
    if (r->number == 0) {
        OK(r->weights,
           fb_weights_commit_replicas(r->weights, next, r->links, 7, NULL, SOON, &outcome, reason, sizeof reason));
        CHECK(outcome == FB_UPDATE_ABORTED && strstr(reason, "aborted") != NULL);
    }
    OK(next, fb_replication_destroy(next));
    OK(r->weights, fb_weights_replicas(r->weights, NULL, 0, &count));
    CHECK(count == 0);
    /* One that all take. */
    next = begin_replicas(r, 2);
    IS(FB_BUSY, fb_weights_drop_replicas(r->weights));
    IS(FB_BUSY, fb_weights_reroute(r->weights));
    OK(r->weights,
       fb_weights_commit_replicas(r->weights, next, r->links, 8, NULL, SOON, &outcome, reason, sizeof reason));
    CHECK(outcome == FB_UPDATE_COMMITTED && reason[0] == 0);
    outcome = 77;
    IS(FB_INVALID_STATE, fb_weights_commit_replicas(r->weights, next, r->links, 8, NULL, 0, &outcome, NULL, 0));
    CHECK(outcome == FB_UPDATE_OPEN);
    OK(next, fb_replication_destroy(next));
    IS(FB_CLOSED, fb_replication_destroy(next));
    step(r, 2);
    OK(r->weights, fb_weights_replicas(r->weights, there, 2, &count));
    CHECK(count == 2 && there[0].layer == 1 && there[0].rank == 1 && strcmp(there[0].tensor, "o_proj") == 0);
    CHECK(there[1].layer == 3 && there[1].rank == 0 && there[1].tensor == there[0].tensor);
    OK(r->weights, fb_weights_bytes(r->weights, &most));
    CHECK(most > least);
    OK(r->weights, fb_weights_reroute(r->weights));
    OK(r->weights, fb_weights_drop_replicas(r->weights));
    OK(r->weights, fb_weights_bytes(r->weights, &most));
    CHECK(most == least);
    step(r, 2);
    /* The other one still reads what this rank held until here. */
    pthread_barrier_wait(r->met);
}

/* Rank 1 ends without a word. */
static void lose(rank *r) {
    fb_links_event event = SIZED(fb_links_event);
    char text[256] = "";
    if (r->number == 1) {
        pthread_barrier_wait(r->met);
        OK(r->links, fb_links_destroy(r->links));
        return;
    }
    OK(r->links, fb_links_poll(r->links, 0, text, sizeof text, &event));
    CHECK(event.kind == FB_LINKS_NOTHING && event.is_over == 0 && text[0] == 0);
    pthread_barrier_wait(r->met);
    OK(r->links, fb_links_poll(r->links, SOON, text, sizeof text, &event));
    CHECK(event.kind == FB_LINKS_LOST && event.rank == 1 && event.status == FB_PEER_LOST && event.is_over == 1);
    CHECK(strstr(text, "rank 1") != NULL);
    IS(FB_OUT_OF_RANGE, fb_weights_lost(r->weights, 0));
    OK(r->weights, fb_weights_lost(r->weights, 1));
    OK(r->weights, fb_weights_begin(r->weights, 1, 0));
    OK(r->weights, fb_weights_enter(r->weights, 0, 0, NULL));
    IS(FB_PEER_LOST, fb_weights_leave(r->weights, 0, 0, NULL));
    OK(r->weights, fb_weights_abandon(r->weights));
    OK(r->links, fb_links_readmit(r->links, 0, &event));
    CHECK(event.kind == FB_LINKS_NOTHING);
    /* It goes on without that rank. */
    for (uint32_t layer = 0; layer < MODEL; layer++) {
        OK(r->weights, fb_weights_make_resident(r->weights, layer, NULL));
    }
    step(r, 2);
    IS(FB_PEER_LOST, fb_weights_make_sharded(r->weights, 1));
    OK(r->links, fb_links_destroy(r->links));
}

static void *run(void *data) {
    rank *r = (rank *)data;
    r->loaded = malloc(O_BYTES);
    CHECK(r->loaded != NULL);
    make(r);
    fill(r);
    share(r);
    step(r, 0);
    for (uint32_t layer = 0; layer < MODEL; layer++) {
        OK(r->weights, fb_weights_verify(r->weights, layer, NULL));
    }
    residence(r);
    update(r);
    replicas(r);
    lose(r);
    IS(FB_BUSY, fb_device_destroy(r->device));
    CHECK(says(r->device, "weights"));
    OK(r->weights, fb_weights_destroy(r->weights));
    OK(r->device, fb_device_destroy(r->device));
    free(r->loaded);
    return NULL;
}

int main(void) {
    rank ranks[RANKS];
    pthread_t threads[RANKS];
    pthread_barrier_t met;
    memset(ranks, 0, sizeof ranks);
    CHECK(pthread_barrier_init(&met, NULL, RANKS) == 0);
    for (uint32_t number = 0; number < RANKS; number++) {
        ranks[number].number = number;
        ranks[number].met = &met;
        CHECK(pthread_create(&threads[number], NULL, run, &ranks[number]) == 0);
    }
    for (uint32_t number = 0; number < RANKS; number++) {
        CHECK(pthread_join(threads[number], NULL) == 0);
    }
    CHECK(pthread_barrier_destroy(&met) == 0);
    return checked();
}
