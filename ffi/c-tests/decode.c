/* An engine in small: one cache on the host device, a prompt, 100 decode steps with one draft each.
 *
 * Every row says which sequence, layer and position it is, and how often that position was written. After
 * each layer the rows at the answered slots are compared with what was written last.
 *
 *   decode            all checks; ends with 0
 *
 * Controls of the test that runs this program; each must be reported:
 *   decode leak       forgets to destroy the cache
 *   decode overrun    states more rows of a batch than its buffer has
 *   decode unstored   never stores a step's new rows
 */

#include "../include/forebay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, ROW = 64, TOP_K = 16, QUERY = 2, PROMPT = 200, PROMISED = 250, SLOTS = 64, STEPS = 100 };
enum { LENGTH_MAX = PROMPT + PROMISED, WORDS = ROW / 4, PICKS = QUERY * TOP_K };

#define CHECK(condition) check((condition), #condition, __LINE__)

static void check(int holds, const char *what, int line) {
    if (!holds) {
        fprintf(stderr, "decode.c:%d: %s\n", line, what);
        _Exit(1);
    }
}

/* Every cache of this program stands on it. */
static fb_device *device;

/* What an engine knows of its one sequence. */
typedef struct {
    fb_cache *cache;
    uint64_t sequence;
    uint32_t committed;
    uint32_t accepted;
    /* Sequences opened and steps prepared so far. */
    uint32_t opened;
    uint32_t steps;
    int stores;
    /* How often each position was written: a rejected draft's position is written again. */
    uint32_t written[LENGTH_MAX + QUERY];
    uint64_t compared;
} engine;

static void ok(const engine *e, fb_status status, int line) {
    if (status != FB_OK) {
        char text[512] = "";
        fb_error_text(e->cache, text, sizeof text);
        fprintf(stderr, "decode.c:%d: %s: %s\n", line, fb_status_text(status), text);
        _Exit(1);
    }
}

#define OK(engine, call) ok((engine), (call), __LINE__)

/* What the row of a position must hold: sequence, layer, position, generation and word side by side. */
static void stamp(const engine *e, uint32_t *row, uint32_t layer, uint32_t position) {
    for (uint32_t word = 0; word < WORDS; word++) {
        row[word] = e->opened << 28 | layer << 24 | position << 12 | e->written[position] << 4 | word;
    }
}

static fb_cache_config declared(void) {
    fb_cache_config config = {0};
    config.size = sizeof config;
    config.layers = LAYERS;
    config.row_bytes[0] = ROW;
    config.page_tokens = 64;
    config.top_k = TOP_K;
    config.lanes = 2;
    config.max_tokens = LENGTH_MAX;
    config.slots = SLOTS;
    config.query_rows = QUERY;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    return config;
}

static fb_cache *create(void) {
    fb_cache_config config = declared();
    fb_cache *cache = NULL;
    char text[128];
    CHECK(fb_cache_create(device, &config, text, sizeof text, &cache) == FB_OK);
    CHECK(cache != NULL && fb_error_text(cache, text, sizeof text) == FB_OK && text[0] == 0);
    return cache;
}

static void open_sequence(engine *e) {
    fb_open_config config = {0};
    config.size = sizeof config;
    config.prompt = PROMPT;
    config.promised = PROMISED;
    OK(e, fb_open(e->cache, &config, &e->sequence));
    e->committed = PROMPT;
    e->accepted = 0;
    e->opened++;
    memset(e->written, 0, sizeof e->written);
}

/* The prompt's rows, each layer in two parts. */
static void append(engine *e) {
    uint32_t *rows = malloc((size_t)PROMPT * ROW);
    CHECK(rows != NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t position = 0; position < PROMPT; position++) {
            stamp(e, rows + position * WORDS, layer, position);
        }
        OK(e, fb_append(e->cache, e->sequence, layer, rows, 77));
        OK(e, fb_append(e->cache, e->sequence, layer, rows + 77 * WORDS, PROMPT - 77));
        CHECK(fb_append(e->cache, e->sequence, layer, rows, 1) == FB_OUT_OF_RANGE);
    }
    free(rows);
    OK(e, fb_join(e->cache, e->sequence, NULL, NULL, NULL));
}

static fb_step prepare(engine *e) {
    fb_row row = {e->sequence, e->accepted, QUERY};
    fb_step_config config = {0};
    config.size = sizeof config;
    config.rows = &row;
    config.row_count = 1;
    config.query_rows = QUERY;
    fb_step step = 0;
    OK(e, fb_prepare(e->cache, &config, NULL, &step));
    CHECK(step != 0);
    e->steps++;
    return step;
}

/* Positions below `lengths` of each query row: its own row, the one before, one twice, none, and others
 * that wander. */
static void select_rows(int32_t *selection, uint32_t length, uint32_t number, uint32_t layer) {
    for (uint32_t query = 0; query < QUERY; query++) {
        int32_t *picks = selection + query * TOP_K;
        uint32_t own = length + query;
        for (uint32_t k = 0; k < TOP_K; k++) {
            picks[k] = (int32_t)((number * 13 + k * k * 5 + layer * 31 + query) % own);
        }
        picks[3] = (int32_t)own;
        picks[5] = (int32_t)own - 1;
        picks[7] = picks[6];
        picks[9] = -1;
    }
}

static unsigned char *slot_address(engine *e, uint32_t layer, uint32_t slot) {
    void *slab = NULL;
    uint64_t bytes = 0;
    OK(e, fb_slab(e->cache, layer, &slab, &bytes));
    CHECK(slab != NULL && ((uint64_t)slot + 1) * ROW <= bytes);
    return (unsigned char *)slab + (size_t)slot * ROW;
}

/* The engine's projections: the step's new rows, written to their landing slots. */
static void land(engine *e, uint32_t layer) {
    for (uint32_t query = 0; query < QUERY; query++) {
        uint32_t slot = 0;
        uint32_t row[WORDS];
        uint32_t position = e->committed + query;
        OK(e, fb_landing_slot(e->cache, e->sequence, query, &slot));
        stamp(e, row, layer, position);
        memcpy(slot_address(e, layer, slot), row, ROW);
    }
}

/* Attention's view: the row at each answered slot is the one that was written last. */
static void compare(engine *e, uint32_t layer, const int32_t *selection, const int32_t *slots) {
    for (uint32_t pick = 0; pick < PICKS; pick++) {
        uint32_t row[WORDS];
        if (selection[pick] < 0) {
            CHECK(slots[pick] == -1);
            continue;
        }
        uint32_t position = (uint32_t)selection[pick];
        CHECK(slots[pick] >= 0);
        stamp(e, row, layer, position);
        CHECK(memcmp(slot_address(e, layer, (uint32_t)slots[pick]), row, ROW) == 0);
        e->compared++;
    }
}

static void decode_step(engine *e, uint32_t number) {
    int32_t *selection = malloc(sizeof(int32_t) * PICKS);
    int32_t *slots = malloc(sizeof(int32_t) * PICKS);
    CHECK(selection != NULL && slots != NULL);
    fb_step step = prepare(e);
    e->committed += e->accepted;
    for (uint32_t query = 0; query < QUERY; query++) {
        e->written[e->committed + query]++;
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        select_rows(selection, e->committed, number, layer);
        memset(slots, 0x55, sizeof(int32_t) * PICKS);
        land(e, layer);
        OK(e, fb_layer(e->cache, step, layer, selection, slots, NULL));
        compare(e, layer, selection, slots);
        if (e->stores) {
            OK(e, fb_scatter(e->cache, step, layer, NULL));
        }
    }
    CHECK(fb_retire(e->cache, &step, NULL, NULL) == FB_BUSY && step != 0);
    OK(e, fb_finish(e->cache, step, NULL));
    fb_retired retired = {0};
    retired.size = sizeof retired;
    fb_step stale = step;
    OK(e, fb_retire(e->cache, &step, NULL, &retired));
    CHECK(step == 0 && retired.step == e->steps && retired.hits + retired.misses > 0);
    CHECK(fb_layer(e->cache, stale, 0, selection, slots, NULL) == FB_CLOSED);
    /* By turns the draft is accepted or rejected. */
    e->accepted = 1 + number % 2;
    free(selection);
    free(slots);
}

/* Nothing is written for a position at or beyond the length, and the step fails where it ends. */
static void beyond_length(engine *e) {
    int32_t selection[PICKS];
    int32_t slots[PICKS];
    fb_step step = prepare(e);
    e->committed += e->accepted;
    select_rows(selection, e->committed, 0, 1);
    selection[2] = (int32_t)(e->committed + QUERY);
    OK(e, fb_layer(e->cache, step, 1, selection, slots, NULL));
    OK(e, fb_finish(e->cache, step, NULL));
    fb_retired retired = {0};
    retired.size = sizeof retired;
    CHECK(fb_retire(e->cache, &step, NULL, &retired) == FB_DEVICE_FAILED);
    CHECK(step == 0 && retired.step == 0);
    char text[512];
    CHECK(fb_error_text(e->cache, text, sizeof text) == FB_OK);
    CHECK(strstr(text, "retire: device failed") != NULL && strstr(text, "layer 1") != NULL);
    fb_row row = {e->sequence, 0, 1};
    fb_step_config config = {0};
    config.size = sizeof config;
    config.rows = &row;
    config.row_count = 1;
    config.query_rows = 1;
    CHECK(fb_prepare(e->cache, &config, NULL, &step) == FB_INVALID_CONFIG && step == 0);
}

static void closed_sequence(engine *e) {
    uint32_t slot = 77;
    OK(e, fb_close(e->cache, e->sequence, NULL));
    CHECK(fb_close(e->cache, e->sequence, NULL) == FB_CLOSED);
    CHECK(fb_append(e->cache, e->sequence, 0, NULL, 0) == FB_CLOSED);
    CHECK(fb_join(e->cache, e->sequence, NULL, NULL, NULL) == FB_CLOSED);
    CHECK(fb_landing_slot(e->cache, e->sequence, 0, &slot) == FB_CLOSED && slot == 77);
    CHECK(fb_close(e->cache, UINT64_MAX, NULL) == FB_CLOSED);
    char text[512];
    CHECK(fb_error_text(e->cache, text, sizeof text) == FB_OK && strstr(text, "closed") != NULL);
}

/* A struct of a later version: ours, and a field behind it. */
typedef struct {
    fb_cache_config known;
    uint64_t later;
} later_config;

static void sizes(void) {
    fb_cache *cache = NULL;
    char text[256] = "untouched";
    fb_cache_config config = declared();
    config.size = 0;
    CHECK(fb_cache_create(device, &config, text, sizeof text, &cache) == FB_INVALID_CONFIG && cache == NULL);
    CHECK(strstr(text, "fb_cache_config") != NULL);
    CHECK(fb_cache_create(device, &config, text, 5, &cache) == FB_INVALID_CONFIG && strlen(text) == 4);
    CHECK(fb_cache_create(device, &config, NULL, 0, &cache) == FB_INVALID_CONFIG);
    config = declared();
    config.memory = 64;
    config.size = offsetof(fb_cache_config, memory);
    memcpy(text, "untouched", 10);
    CHECK(fb_cache_create(device, &config, text, sizeof text, &cache) == FB_OK && strcmp(text, "untouched") == 0);
    CHECK(fb_cache_destroy(cache) == FB_OK);
    cache = NULL;
    later_config later = {declared(), 0};
    later.known.size = sizeof later;
    CHECK(fb_cache_create(device, &later.known, NULL, 0, &cache) == FB_OK);
    CHECK(fb_cache_destroy(cache) == FB_OK);
    cache = NULL;
    later.later = 1;
    CHECK(fb_cache_create(device, &later.known, NULL, 0, &cache) == FB_INVALID_CONFIG && cache == NULL);
    config = declared();
    config.max_tokens = UINT32_MAX;
    CHECK(fb_cache_create(device, &config, text, sizeof text, &cache) != FB_OK && cache == NULL);
}

static void nulls(void) {
    fb_cache *cache = create();
    fb_cache *other = create();
    fb_cache_config config = declared();
    fb_open_config open = {0};
    fb_step step = 0;
    uint64_t sequence = 77;
    char byte = 0;
    open.size = sizeof open;
    open.prompt = 1;
    CHECK(fb_cache_create(device, NULL, NULL, 0, &cache) == FB_INVALID_CONFIG);
    CHECK(fb_cache_create(device, &config, NULL, 0, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_cache_destroy(NULL) == FB_INVALID_CONFIG);
    CHECK(fb_error_text(NULL, &byte, 1) == FB_INVALID_CONFIG);
    CHECK(fb_cache_create(NULL, &config, NULL, 0, &cache) == FB_INVALID_CONFIG);
    CHECK(fb_device_destroy(device) == FB_BUSY);
    CHECK(fb_cache_stats(cache, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_slab(cache, 0, NULL, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_open(NULL, &open, &sequence) == FB_INVALID_CONFIG);
    CHECK(fb_open(cache, NULL, &sequence) == FB_INVALID_CONFIG);
    CHECK(fb_open(cache, &open, NULL) == FB_INVALID_CONFIG);
    CHECK(sequence == 77);
    CHECK(fb_open(cache, &open, &sequence) == FB_OK);
    CHECK(fb_append(cache, sequence, 0, NULL, 1) == FB_INVALID_CONFIG);
    CHECK(fb_append(cache, sequence, LAYERS, NULL, 0) == FB_OUT_OF_RANGE);
    CHECK(fb_close(cache, sequence, &byte) == FB_OUT_OF_RANGE);
    CHECK(fb_landing_slot(cache, sequence, 0, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_landing_slot(cache, sequence, QUERY, &config.lanes) == FB_OUT_OF_RANGE);
    CHECK(fb_prepare(cache, NULL, NULL, &step) == FB_INVALID_CONFIG && step == 0);
    CHECK(fb_layer(cache, 0, 0, NULL, NULL, NULL) == FB_CLOSED);
    CHECK(fb_scatter(cache, UINT64_MAX, 0, NULL) == FB_CLOSED);
    CHECK(fb_finish(cache, 0, NULL) == FB_CLOSED);
    CHECK(fb_retire(cache, NULL, NULL, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_retire(cache, &step, NULL, NULL) == FB_CLOSED);
    CHECK(fb_cache_destroy(cache) == FB_BUSY);
    CHECK(fb_close(other, sequence, NULL) == FB_CLOSED);
    CHECK(fb_close(cache, sequence, NULL) == FB_OK);
    CHECK(fb_cache_destroy(cache) == FB_OK);
    CHECK(fb_cache_destroy(other) == FB_OK);
}

/* A step that is in flight, seen by another cache and by the end of its own. */
static void foreign_step(engine *e, fb_cache *other) {
    int32_t picks[PICKS];
    fb_step step = prepare(e);
    memset(picks, 0xff, sizeof picks);
    CHECK(fb_layer(other, step, 0, picks, picks, NULL) == FB_CLOSED);
    CHECK(fb_retire(other, &step, NULL, NULL) == FB_CLOSED && step != 0);
    CHECK(fb_layer(e->cache, step, LAYERS, picks, picks, NULL) == FB_OUT_OF_RANGE);
    CHECK(fb_layer(e->cache, step, 0, NULL, picks, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_layer(e->cache, step, 0, picks, NULL, NULL) == FB_INVALID_CONFIG);
    CHECK(fb_cache_destroy(e->cache) == FB_BUSY);
    OK(e, fb_finish(e->cache, step, NULL));
    CHECK(fb_finish(e->cache, step, NULL) == FB_INVALID_CONFIG);
    OK(e, fb_retire(e->cache, &step, NULL, NULL));
    e->committed += e->accepted;
    e->accepted = 0;
}

/* A step that was retired stays so, though the next one takes its place in the cache. */
static void stale_step(engine *e) {
    int32_t picks[PICKS], slots[PICKS];
    fb_step step = prepare(e);
    fb_step stale = step;
    memset(picks, 0xff, sizeof picks);
    OK(e, fb_finish(e->cache, step, NULL));
    OK(e, fb_retire(e->cache, &step, NULL, NULL));
    e->committed += e->accepted;
    e->accepted = 0;
    step = prepare(e);
    CHECK(step != 0 && step != stale);
    CHECK(fb_layer(e->cache, stale, 0, picks, slots, NULL) == FB_CLOSED);
    CHECK(fb_scatter(e->cache, stale, 0, NULL) == FB_CLOSED);
    CHECK(fb_finish(e->cache, stale, NULL) == FB_CLOSED);
    OK(e, fb_layer(e->cache, step, 0, picks, slots, NULL));
    OK(e, fb_finish(e->cache, step, NULL));
    CHECK(fb_retire(e->cache, &stale, NULL, NULL) == FB_CLOSED && stale != 0);
    OK(e, fb_retire(e->cache, &step, NULL, NULL));
}

/* What was asked for and could not be had is listed; what was not asked for is not missed. */
static void fallbacks(const engine *e) {
    char text[256] = "untouched";
    CHECK(fb_cache_fallback(e->cache, 0, text, sizeof text) == FB_OUT_OF_RANGE);
    CHECK(strcmp(text, "untouched") == 0);
    CHECK(fb_cache_fallback(NULL, 0, text, sizeof text) == FB_INVALID_CONFIG);
    fb_cache_config config = declared();
    fb_cache *cache = NULL;
    size_t count = 0;
    config.memory = 0;
    CHECK(fb_cache_create(device, &config, NULL, 0, &cache) == FB_OK);
    while (fb_cache_fallback(cache, count, text, sizeof text) == FB_OK) {
        CHECK(strstr(text, "(wanted ") != NULL);
        CHECK(fb_cache_fallback(cache, count, text, 5) == FB_OK && strlen(text) == 4);
        CHECK(fb_cache_fallback(cache, count, NULL, 0) == FB_OK);
        count++;
    }
    CHECK(fb_cache_fallback(cache, SIZE_MAX, text, sizeof text) == FB_OUT_OF_RANGE);
    CHECK(fb_cache_destroy(cache) == FB_OK);
}

static void overrun(engine *e) {
    fb_row *rows = calloc(1, sizeof *rows);
    CHECK(rows != NULL);
    fb_step_config config = {0};
    config.size = sizeof config;
    config.rows = rows;
    config.row_count = 2;
    config.query_rows = 1;
    fb_step step = 0;
    CHECK(fb_prepare(e->cache, &config, NULL, &step) == FB_CLOSED);
    free(rows);
}

static void decode(engine *e, uint32_t steps) {
    open_sequence(e);
    append(e);
    for (uint32_t number = 0; number < steps; number++) {
        decode_step(e, number);
    }
}

static void counters(const engine *e, uint32_t sequences) {
    fb_stats stats = {0};
    stats.size = sizeof stats;
    CHECK(fb_cache_stats(e->cache, &stats) == FB_OK);
    CHECK(stats.steps == e->steps && stats.misses > 0 && stats.steps_in_flight == 0);
    CHECK(stats.sequences == sequences && stats.free_lanes == 2 - sequences);
}

static void all(engine *e) {
    CHECK(fb_abi_version() == FB_ABI_VERSION);
    CHECK(strcmp(fb_status_text(FB_CLOSED), "closed") == 0);
    sizes();
    nulls();
    fallbacks(e);
    decode(e, STEPS);
    counters(e, 1);
    fb_cache *other = create();
    foreign_step(e, other);
    stale_step(e);
    CHECK(fb_cache_destroy(other) == FB_OK);
    beyond_length(e);
    closed_sequence(e);
    /* The lane, pages and slots of the closed sequence serve the next one. */
    decode(e, STEPS / 4);
    OK(e, fb_close(e->cache, e->sequence, NULL));
    counters(e, 0);
    CHECK(e->compared == (uint64_t)(STEPS + STEPS / 4) * LAYERS * QUERY * (TOP_K - 1));
}

int main(int argc, char **argv) {
    static engine e;
    const char *mode = argc > 1 ? argv[1] : "all";
    fb_device_config config = {0};
    config.size = sizeof config;
    config.kind = FB_DEVICE_HOST;
    CHECK(fb_device_create(&config, NULL, 0, &device) == FB_OK);
    e.cache = create();
    e.stores = strcmp(mode, "unstored") != 0;
    if (strcmp(mode, "leak") == 0) {
        e.cache = NULL;
        return 0;
    }
    if (strcmp(mode, "overrun") == 0) {
        overrun(&e);
    } else {
        all(&e);
    }
    CHECK(fb_cache_destroy(e.cache) == FB_OK);
    CHECK(fb_cache_destroy(e.cache) == FB_CLOSED);
    CHECK(fb_device_destroy(device) == FB_OK);
    CHECK(fb_device_destroy(device) == FB_CLOSED);
    printf("%u steps, %llu rows compared\n", (unsigned)e.steps, (unsigned long long)e.compared);
    return 0;
}
