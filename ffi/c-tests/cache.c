/* A cache: its parts, what it reports about itself, its memory. */

#include "check.h"

static void presets(void) {
    fb_cache_config config = SIZED(fb_cache_config);
    OK(NULL, fb_preset("deepseek-v3.2", NULL, 0, &config));
    CHECK(config.layers == 61 && config.row_bytes[0] + config.row_bytes[1] == 656 && config.top_k == 2048);
    CHECK(config.index_key_bytes == 132 && config.lanes == 0 && config.slots == 0);
    fb_cache_config before = config;
    char reason[512] = "";
    IS(FB_OUT_OF_RANGE, fb_preset("no such model", reason, sizeof reason, &config));
    CHECK(strstr(reason, "no such model") != NULL);
    CHECK(memcmp(&before, &config, sizeof config) == 0);
}

static void footprint(void) {
    fb_cache_config config = declared();
    fb_cache_footprint bytes = SIZED(fb_cache_footprint);
    char reason[512] = "";
    OK(NULL, fb_footprint(&config, reason, sizeof reason, &bytes));
    CHECK(bytes.rows >= (uint64_t)LANES * LAYERS * MAX_TOKENS * ROW);
    CHECK(bytes.slots >= (uint64_t)LANES * LAYERS * SLOTS * ROW);
    CHECK(bytes.tables > 0 && bytes.landing > 0 && bytes.index_keys > 0);
    config.layers = 0;
    IS(FB_INVALID_CONFIG, fb_footprint(&config, reason, sizeof reason, &bytes));
    CHECK(strstr(reason, "layers") != NULL);
    config = declared();
    config.max_tokens = UINT32_MAX;
    config.host_pages = UINT32_MAX;
    CHECK(fb_footprint(&config, NULL, 0, &bytes) != FB_OK);
}

static void info(const fb_cache *cache) {
    fb_info found = SIZED(fb_info);
    OK(cache, fb_cache_info(cache, &found));
    CHECK(found.layers == LAYERS && found.row_bytes == ROW && found.first_run_bytes == ROW);
    CHECK(found.top_k == TOP_K && found.query_rows == QUERY && found.batch == LANES && found.page_tokens == PAGE);
    CHECK(found.host_stride >= ROW && found.block_bytes == 64 * ROW && found.lanes == LANES);
    CHECK(found.attention_waves == 1);
}

static void slabs(const fb_cache *cache) {
    void *slab = NULL, *other = NULL, *keys = NULL;
    uint64_t bytes = 0, other_bytes = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        OK(cache, fb_slab(cache, layer, &slab, &bytes));
        CHECK(slab != NULL && slab != other && bytes % (64 * ROW) == 0 && bytes >= LANES * SLOTS * ROW);
        other = slab;
        OK(cache, fb_index_keys(cache, layer, &keys, &bytes));
        CHECK(keys != NULL && bytes % (PAGE * INDEX_KEY) == 0 && bytes >= LANES * MAX_TOKENS * INDEX_KEY);
    }
    slab = NULL;
    IS(FB_OUT_OF_RANGE, fb_slab(cache, LAYERS, &slab, &other_bytes));
    IS(FB_OUT_OF_RANGE, fb_index_keys(cache, LAYERS, &slab, &other_bytes));
    CHECK(slab == NULL && other_bytes == 0);
}

/* A cache lists the options that it requested and the system refused; options that it did not request are not
 * listed. */
static void fallbacks(fb_device *device, const fb_cache *plain) {
    char text[256] = "untouched";
    size_t count = 0;
    IS(FB_OUT_OF_RANGE, fb_cache_fallback(plain, 0, text, sizeof text));
    CHECK(strcmp(text, "untouched") == 0);
    fb_cache_config config = declared();
    config.memory = 0;
    fb_cache *cache = cache_of(device, &config);
    while (fb_cache_fallback(cache, count, text, sizeof text) == FB_OK) {
        CHECK(strstr(text, "(wanted ") != NULL);
        OK(cache, fb_cache_fallback(cache, count, text, 5));
        CHECK(strlen(text) == 4);
        OK(cache, fb_cache_fallback(cache, count, NULL, 0));
        count++;
    }
    IS(FB_OUT_OF_RANGE, fb_cache_fallback(cache, SIZE_MAX, text, sizeof text));
    OK(cache, fb_cache_destroy(cache));
}

/* Pools smaller than all lanes at their longest run out, with an error that names the pool, and nothing is
 * allocated. */
static void exhausted(fb_device *device) {
    fb_cache_config config = declared();
    config.host_pages = 9;
    fb_cache *cache = cache_of(device, &config);
    fb_open_config open = opening(100, 30);
    uint64_t sequence = 77;
    OK(cache, fb_open(cache, &open, &sequence));
    fb_stats before = stats_of(cache);
    uint64_t second = 77;
    IS(FB_EXHAUSTED, fb_open(cache, &open, &second));
    CHECK(second == 77 && says(cache, "pages"));
    fb_stats after = stats_of(cache);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    OK(cache, fb_close(cache, sequence, NULL));
    OK(cache, fb_cache_destroy(cache));
}

/* Layers may have their own budgets. */
static void by_layer(fb_device *device) {
    uint32_t slots[LAYERS] = {64, 24, 40};
    fb_cache_config config = declared();
    config.slots_by_layer = slots;
    config.min_budget = 8;
    fb_cache *cache = cache_of(device, &config);
    fb_open_config open = opening(20, 20);
    uint64_t sequence = 0;
    open.slots = 24;
    OK(cache, fb_open(cache, &open, &sequence));
    OK(cache, fb_close(cache, sequence, NULL));
    OK(cache, fb_cache_destroy(cache));
}

static void two_runs(fb_device *device) {
    fb_cache_config config = declared();
    config.row_bytes[0] = 48;
    config.row_bytes[1] = 16;
    fb_cache *cache = cache_of(device, &config);
    fb_info found = SIZED(fb_info);
    OK(cache, fb_cache_info(cache, &found));
    CHECK(found.row_bytes == 64 && found.first_run_bytes == 48);
    OK(cache, fb_cache_destroy(cache));
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    presets();
    footprint();
    info(cache);
    slabs(cache);
    fallbacks(device, cache);
    exhausted(device);
    by_layer(device);
    two_runs(device);
    end_all(device, cache);
    return checked();
}
