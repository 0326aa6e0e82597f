/* A sequence that decodes one token a step with a small part of its rows on the device; the device is this machine.
 *
 * Rows are numbers here, and "attention" adds up what it selects: with a real model these are the latents of a layer
 * and a kernel that reads the slots.
 */

#include <forebay.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, ROW = 64, TOP_K = 8, SLOTS = 32, PROMPT = 128, STEPS = 64 };

static void must(const void *handle, fb_status status, const char *what) {
    char text[256] = "";
    if (status == FB_OK) {
        return;
    }
    if (handle != NULL) {
        (void)fb_error_text(handle, text, sizeof text);
    }
    fprintf(stderr, "%s: %s %s\n", what, fb_status_text(status), text);
    exit(1);
}

/* The first word of a row says which position it is. */
static void append_prompt(fb_cache *cache, uint64_t sequence) {
    static uint32_t rows[PROMPT][ROW / 4];
    for (uint32_t position = 0; position < PROMPT; position++) {
        rows[position][0] = position;
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        must(cache, fb_append(cache, sequence, layer, rows, PROMPT), "append");
    }
    must(cache, fb_join(cache, sequence, NULL, NULL, NULL), "join");
}

static uint32_t *row_at(const fb_cache *cache, uint32_t layer, uint32_t slot) {
    void *slab = NULL;
    uint64_t bytes = 0;
    must(cache, fb_slab(cache, layer, &slab, &bytes), "slab");
    return (uint32_t *)(void *)((char *)slab + (size_t)slot * ROW);
}

/* One step; answers how many selected rows were other ones than they should be. */
static uint32_t decode(fb_cache *cache, uint64_t sequence, uint32_t number, uint64_t *misses) {
    uint32_t position = PROMPT + number, wrong = 0, slot = 0;
    int32_t selection[TOP_K], slots[TOP_K];
    fb_batch_row row = {sequence, number > 0, 1};
    fb_step_config config = {.size = sizeof config, .rows = &row, .row_count = 1, .query_rows = 1};
    fb_step step = 0;
    must(cache, fb_prepare(cache, &config, NULL, &step), "prepare");
    must(cache, fb_landing_slot(cache, sequence, 0, &slot), "landing slot");
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        row_at(cache, layer, slot)[0] = position;
        for (uint32_t k = 0; k < TOP_K; k++) {
            selection[k] = (int32_t)((position * (k + 3) + layer) % (position + 1));
        }
        must(cache, fb_layer(cache, step, layer, selection, slots, NULL), "layer");
        for (uint32_t k = 0; k < TOP_K; k++) {
            wrong += row_at(cache, layer, (uint32_t)slots[k])[0] != (uint32_t)selection[k];
        }
        must(cache, fb_scatter(cache, step, layer, NULL), "scatter");
    }
    must(cache, fb_finish(cache, step, NULL), "finish");
    fb_retired retired = {.size = sizeof retired};
    must(cache, fb_retire(cache, &step, NULL, &retired), "retire");
    *misses += retired.misses;
    return wrong;
}

int main(void) {
    if (fb_abi_version() != FB_ABI_VERSION) {
        fprintf(stderr, "libforebay speaks version %u, this program %d\n", fb_abi_version(), FB_ABI_VERSION);
        return 1;
    }
    fb_device_config device_config = {.size = sizeof device_config, .kind = FB_DEVICE_HOST};
    fb_cache_config config = {.size = sizeof config, .layers = LAYERS, .row_bytes = {ROW}, .page_tokens = 64};
    fb_open_config open = {.size = sizeof open, .prompt = PROMPT, .promised = STEPS};
    fb_device *device = NULL;
    fb_cache *cache = NULL;
    uint64_t sequence = 0, misses = 0;
    uint32_t wrong = 0;
    config.top_k = TOP_K;
    config.lanes = 1;
    config.max_tokens = PROMPT + STEPS;
    config.slots = SLOTS;
    config.query_rows = 1;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_UNLOCKED;
    must(NULL, fb_device_create(&device_config, NULL, 0, &device), "device");
    must(device, fb_cache_create(device, &config, NULL, 0, &cache), "cache");
    must(cache, fb_open(cache, &open, &sequence), "open");
    append_prompt(cache, sequence);
    for (uint32_t number = 0; number < STEPS; number++) {
        wrong += decode(cache, sequence, number, &misses);
    }
    must(cache, fb_close(cache, sequence, NULL), "close");
    must(cache, fb_cache_destroy(cache), "destroy the cache");
    must(device, fb_device_destroy(device), "destroy the device");
    printf("forebay %s: %d steps, %d of %d tokens on the device, %llu rows fetched, %u wrong\n", fb_version(), STEPS,
           SLOTS, PROMPT + STEPS, (unsigned long long)misses, wrong);
    return wrong != 0;
}
