/* The decode loop of docs/integration.md, in C: two sequences, four layers, one draft per step. */
#include <forebay.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, TOP_K = 64, PROMPT = 1000, STEPS = 100, ROW = 656, QUERY = 2, BATCH = 2 };

/* Ends the program with the text of the handle's last error. */
static void must(fb_status status, const void *handle) {
    if (status != FB_OK) {
        char text[512] = "";
        fb_error_text(handle, text, sizeof text);
        fprintf(stderr, "%s: %s\n", fb_status_text(status), text);
        exit(1);
    }
}

/* The engine's indexer: a query row at `at` selects itself, the row before it, and some of the prompt. */
static void select_rows(int32_t *selection, uint32_t number, uint32_t at) {
    selection[0] = (int32_t)at;
    selection[1] = (int32_t)at - 1;
    for (uint32_t i = 2; i < TOP_K; i++) {
        selection[i] = (int32_t)(3 * (i + number) % PROMPT);
    }
}

/* A request: admitted for all that it may become, filled layer by layer, entered into the batch. */
static uint64_t open_sequence(fb_cache *cache) {
    static uint8_t rows[PROMPT][ROW];
    fb_open_config open = {0};
    open.size = sizeof open;
    open.prompt = PROMPT;
    open.promised = 300;
    open.slots = 256;
    open.bring_up = FB_BRING_UP_NOTHING;
    uint64_t sequence = 0;
    must(fb_open(cache, &open, &sequence), cache);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t at = 0; at < PROMPT; at++) {
            memset(rows[at], (int)((31 * layer + at) & 0xff), ROW);
        }
        must(fb_append(cache, sequence, layer, rows, PROMPT), cache);
    }
    must(fb_join(cache, sequence, NULL, NULL, NULL), cache);
    return sequence;
}

/* The engine's P: writes the new rows to their landing slots. */
static void write_rows(const fb_cache *cache, uint8_t *slab, const uint64_t *sequences, uint32_t number) {
    for (uint32_t s = 0; s < BATCH; s++) {
        for (uint32_t query = 0; query < QUERY; query++) {
            uint32_t slot = 0;
            must(fb_landing_slot(cache, sequences[s], query, &slot), cache);
            memset(slab + (size_t)slot * ROW, (int)((number + query) & 0xff), ROW);
        }
    }
}

int main(void) {
    /* Once: everything is taken here, and nothing later. */
    char text[512] = "";
    fb_device_config where = {0};
    where.size = sizeof where;
    where.kind = FB_DEVICE_HOST;
    fb_device *device = NULL;
    fb_cache *cache = NULL;
    fb_cache_config config = {0};
    config.size = sizeof config;
    if (fb_abi_version() != FB_ABI_VERSION || fb_device_create(&where, text, sizeof text, &device) != FB_OK ||
        fb_preset("deepseek-v3.2", text, sizeof text, &config) != FB_OK) {
        fprintf(stderr, "no device: %s\n", text);
        return 1;
    }
    config.layers = LAYERS;
    config.top_k = TOP_K;
    config.lanes = BATCH;
    config.max_tokens = 2048;
    config.slots = 256;
    config.query_rows = QUERY;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    if (fb_cache_create(device, &config, text, sizeof text, &cache) != FB_OK) {
        fprintf(stderr, "no cache: %s\n", text);
        return 1;
    }
    const uint64_t sequences[BATCH] = {open_sequence(cache), open_sequence(cache)};
    static int32_t selection[BATCH][QUERY][TOP_K], slots[BATCH][QUERY][TOP_K];

    uint64_t hits = 0, misses = 0, sum = 0;
    uint32_t lengths[BATCH] = {PROMPT, PROMPT};
    for (uint32_t number = 0; number < STEPS; number++) {
        /* Which sequences decode, and how many rows of their last step were accepted: the draft or not. */
        fb_batch_row rows[BATCH];
        for (uint32_t s = 0; s < BATCH; s++) {
            rows[s].sequence = sequences[s];
            rows[s].accepted = number == 0 ? 0 : 1 + (number + s) % 2;
            rows[s].query_rows = QUERY;
            lengths[s] += rows[s].accepted;
        }
        fb_step_config begin = {0};
        begin.size = sizeof begin;
        begin.rows = rows;
        begin.row_count = BATCH;
        begin.query_rows = QUERY;
        fb_step step = 0;
        must(fb_prepare(cache, &begin, NULL, &step), cache);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            /* I: the engine's top-k writes the selection. R and G: slots, and what is missing. */
            for (uint32_t s = 0; s < BATCH; s++) {
                for (uint32_t query = 0; query < QUERY; query++) {
                    select_rows(selection[s][query], number, lengths[s] + query);
                }
            }
            must(fb_layer(cache, step, layer, &selection[0][0][0], &slots[0][0][0], NULL), cache);
            void *slab = NULL;
            uint64_t bytes = 0;
            must(fb_slab(cache, layer, &slab, &bytes), cache);
            write_rows(cache, slab, sequences, number);
            /* A: reads the slots, here the first byte of each. S: the new rows go to host memory. */
            for (uint32_t i = 0; i < BATCH * QUERY * TOP_K; i++) {
                sum += ((const uint8_t *)slab)[(size_t)(&slots[0][0][0])[i] * ROW];
            }
            must(fb_scatter(cache, step, layer, NULL), cache);
        }
        must(fb_finish(cache, step, NULL), cache);
        /* When the step has ended: the counters, and the word that its tokens may be used. */
        fb_retired retired = {0};
        retired.size = sizeof retired;
        must(fb_retire(cache, &step, NULL, &retired), cache);
        hits += retired.hits;
        misses += retired.misses;
    }

    for (uint32_t s = 0; s < BATCH; s++) {
        must(fb_close(cache, sequences[s], NULL), cache);
    }
    must(fb_cache_destroy(cache), cache);
    must(fb_device_destroy(device), device);
    printf("%d steps, %llu hits, %llu misses, sum %llu\n", STEPS, (unsigned long long)hits,
           (unsigned long long)misses, (unsigned long long)sum);
    return 0;
}
