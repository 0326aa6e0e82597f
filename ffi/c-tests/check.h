/* The shared part of this folder's programs: checks, a small cache on the host device, and rows whose bytes identify
 * them.
 *
 * A program returns 0 and prints how many checks it made; a check that fails ends it with 1 and prints its place.
 * Programs include this header once, in their only file.
 */

#ifndef FB_CHECK_H
#define FB_CHECK_H

#include <forebay.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t checks_made;

/* Checks that a condition holds. */
#define CHECK(condition) check_that((condition) ? 1 : 0, #condition, __FILE__, __LINE__)
/* Checks that a call on a handle succeeds; prints the handle's error text if it does not. */
#define OK(handle, call) check_status((handle), (call), FB_OK, #call, __FILE__, __LINE__)
/* Checks that a call returns this status. */
#define IS(wanted, call) check_status(NULL, (call), (wanted), #call, __FILE__, __LINE__)

static inline void check_that(int holds, const char *what, const char *file, int line) {
    checks_made++;
    if (!holds) {
        fprintf(stderr, "%s:%d: %s\n", file, line, what);
        _Exit(1);
    }
}

static inline void check_status(const void *handle, fb_status found, fb_status wanted, const char *what,
                                const char *file, int line) {
    char text[256] = "";
    checks_made++;
    if (found == wanted) {
        return;
    }
    if (handle != NULL) {
        (void)fb_error_text(handle, text, sizeof text);
    }
    fprintf(stderr, "%s:%d: %s: %s, not %s: %s\n", file, line, what, fb_status_text(found), fb_status_text(wanted),
            text);
    _Exit(1);
}

/* Checks that the text of the last failed call on a handle contains these words. */
static inline int says(const void *handle, const char *words) {
    char text[512] = "";
    CHECK(fb_error_text(handle, text, sizeof text) == FB_OK);
    return strstr(text, words) != NULL;
}

/* A program's end. */
static inline int checked(void) {
    printf("%llu checks\n", (unsigned long long)checks_made);
    return 0;
}

/* An fb_ struct with its size set. */
#define SIZED(type) \
    { .size = sizeof(type) }

enum {
    LAYERS = 3,
    ROW = 64,
    WORDS = ROW / 4,
    INDEX_KEY = 16,
    PAGE = 16,
    TOP_K = 8,
    QUERY = 2,
    ENTRIES = QUERY * TOP_K,
    LANES = 3,
    SLOTS = 24,
    MAX_TOKENS = 200
};

static inline fb_device *device_of(uint32_t kind) {
    fb_device_config config = SIZED(fb_device_config);
    fb_device *device = NULL;
    char text[256] = "";
    config.kind = kind;
    fb_status status = fb_device_create(&config, text, sizeof text, &device);
    if (status != FB_OK) {
        fprintf(stderr, "fb_device_create: %s\n", text);
    }
    CHECK(status == FB_OK && device != NULL);
    return device;
}

static inline fb_cache_config declared(void) {
    fb_cache_config config = SIZED(fb_cache_config);
    config.layers = LAYERS;
    config.row_bytes[0] = ROW;
    config.index_key_bytes = INDEX_KEY;
    config.page_tokens = PAGE;
    config.top_k = TOP_K;
    config.lanes = LANES;
    config.max_tokens = MAX_TOKENS;
    config.slots = SLOTS;
    config.query_rows = QUERY;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    return config;
}

static inline fb_cache *cache_of(fb_device *device, const fb_cache_config *config) {
    fb_cache *cache = NULL;
    char text[256] = "";
    fb_status status = fb_cache_create(device, config, text, sizeof text, &cache);
    if (status != FB_OK) {
        fprintf(stderr, "fb_cache_create: %s\n", text);
    }
    CHECK(status == FB_OK && cache != NULL);
    return cache;
}

static inline fb_stats stats_of(const fb_cache *cache) {
    fb_stats stats = SIZED(fb_stats);
    OK(cache, fb_cache_stats(cache, &stats));
    return stats;
}

static inline fb_sequence_length length_of(const fb_cache *cache, uint64_t sequence) {
    fb_sequence_length length = SIZED(fb_sequence_length);
    OK(cache, fb_length(cache, sequence, &length));
    return length;
}

/* The engine's record of a sequence. */
typedef struct {
    uint64_t sequence;
    uint32_t committed;
    /* The number of rows of its last step that the next one accepts. */
    uint32_t accepted;
    /* By position, the number of its last write: each write of a position has its own number. */
    uint32_t written[MAX_TOKENS + 2 * QUERY];
} story;

static uint32_t writes;

/* Returns the row of a position, in a layer. */
static inline void stamp(const story *of, uint32_t *row, uint32_t layer, uint32_t position) {
    for (uint32_t word = 0; word < WORDS; word++) {
        row[word] = of->written[position] << 16 | layer << 12 | position << 4 | word;
    }
}

/* Appends the rows of positions from `first` to `end` in one layer. */
static inline void append_rows(fb_cache *cache, const story *of, uint32_t layer, uint32_t first, uint32_t end) {
    uint32_t *rows = (uint32_t *)malloc((size_t)(end - first + 1) * ROW);
    CHECK(rows != NULL);
    for (uint32_t position = first; position < end; position++) {
        stamp(of, rows + (size_t)(position - first) * WORDS, layer, position);
    }
    OK(cache, fb_append(cache, of->sequence, layer, rows, end - first));
    free(rows);
}

/* A new sequence's rows: none of its positions has been written before. */
static inline void begin_story(story *of, uint32_t prompt) {
    memset(of, 0, sizeof *of);
    of->committed = prompt;
    for (uint32_t position = 0; position < prompt; position++) {
        of->written[position] = ++writes;
    }
}

static inline fb_open_config opening(uint32_t prompt, uint32_t promised) {
    fb_open_config config = SIZED(fb_open_config);
    config.prompt = prompt;
    config.promised = promised;
    return config;
}

/* Opens a sequence, appends its prompt in all layers, and joins it. */
static inline void open_story(fb_cache *cache, story *of, uint32_t prompt, void *stream) {
    fb_open_config config = opening(prompt, MAX_TOKENS - prompt);
    begin_story(of, prompt);
    OK(cache, fb_open(cache, &config, &of->sequence));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append_rows(cache, of, layer, 0, prompt);
    }
    OK(cache, fb_join(cache, of->sequence, NULL, stream, NULL));
}

static inline unsigned char *row_at(const fb_cache *cache, uint32_t layer, int32_t slot) {
    void *slab = NULL;
    uint64_t bytes = 0;
    OK(cache, fb_slab(cache, layer, &slab, &bytes));
    CHECK(slab != NULL && slot >= 0 && ((uint64_t)slot + 1) * ROW <= bytes);
    return (unsigned char *)slab + (size_t)slot * ROW;
}

/* The engine's projections: write a step's new rows to their landing slots. */
static inline void land(const fb_cache *cache, const story *of, uint32_t layer, uint32_t query_rows) {
    for (uint32_t query = 0; query < query_rows; query++) {
        uint32_t slot = 0;
        uint32_t row[WORDS];
        OK(cache, fb_landing_slot(cache, of->sequence, query, &slot));
        stamp(of, row, layer, of->committed + query);
        memcpy(row_at(cache, layer, (int32_t)slot), row, ROW);
    }
}

/* Positions that a query row may select: its own, one twice, none, and others that vary. */
static inline void select_rows(int32_t *selection, uint32_t own, uint32_t number) {
    for (uint32_t k = 0; k < TOP_K; k++) {
        selection[k] = (int32_t)((number * 13 + k * k * 5) % (own + 1));
    }
    selection[1] = (int32_t)own;
    selection[3] = selection[2];
    selection[5] = -1;
}

/* Attention's view: checks that the row at each returned slot is the last write; returns the number of compared
 * rows. */
static inline uint32_t compare_rows(const fb_cache *cache, const story *of, uint32_t layer, const int32_t *selection,
                                    const int32_t *slots, uint32_t count) {
    uint32_t compared = 0;
    for (uint32_t entry = 0; entry < count; entry++) {
        uint32_t row[WORDS];
        if (selection[entry] < 0) {
            CHECK(slots[entry] == -1);
            continue;
        }
        stamp(of, row, layer, (uint32_t)selection[entry]);
        CHECK(memcmp(row_at(cache, layer, slots[entry]), row, ROW) == 0);
        compared++;
    }
    return compared;
}

/* Prepares a step of `count` sequences with `query_rows` each. */
static inline fb_step begin_step(fb_cache *cache, story *of, uint32_t count, uint32_t query_rows, void *stream) {
    fb_batch_row rows[LANES];
    fb_step_config config = SIZED(fb_step_config);
    fb_step step = 0;
    CHECK(count <= LANES);
    for (uint32_t row = 0; row < count; row++) {
        rows[row].sequence = of[row].sequence;
        rows[row].accepted = of[row].accepted;
        rows[row].query_rows = query_rows;
    }
    config.rows = rows;
    config.row_count = count;
    config.query_rows = query_rows;
    OK(cache, fb_prepare(cache, &config, stream, &step));
    CHECK(step != 0);
    for (uint32_t row = 0; row < count; row++) {
        of[row].committed += of[row].accepted;
        of[row].accepted = 0;
        for (uint32_t query = 0; query < query_rows; query++) {
            of[row].written[of[row].committed + query] = ++writes;
        }
    }
    return step;
}

/* Makes the calls that a step's layers need from `first` on, without a test of their results: they select nothing,
 * and store the contents of the landing slots. */
static inline void rest_of_step(fb_cache *cache, fb_step step, uint32_t first, void *stream) {
    static int32_t selection[LANES * ENTRIES], slots[LANES * ENTRIES];
    memset(selection, 0xff, sizeof selection);
    for (uint32_t layer = first; layer < LAYERS; layer++) {
        OK(cache, fb_layer(cache, step, layer, selection, slots, stream));
        OK(cache, fb_scatter(cache, step, layer, stream));
    }
}

/* Runs one whole step of sequences in inline streams; each accepts `accepted` of its rows in the next one. */
static inline void decode_step(fb_cache *cache, story *of, uint32_t count, uint32_t number, uint32_t accepted) {
    int32_t selection[LANES * ENTRIES], slots[LANES * ENTRIES];
    fb_step step = begin_step(cache, of, count, QUERY, NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t row = 0; row < count; row++) {
            for (uint32_t query = 0; query < QUERY; query++) {
                int32_t *own = selection + row * ENTRIES + query * TOP_K;
                select_rows(own, of[row].committed + query, number + layer + query);
            }
            land(cache, &of[row], layer, QUERY);
        }
        OK(cache, fb_layer(cache, step, layer, selection, slots, NULL));
        for (uint32_t row = 0; row < count; row++) {
            (void)compare_rows(cache, &of[row], layer, selection + row * ENTRIES, slots + row * ENTRIES, ENTRIES);
        }
        OK(cache, fb_scatter(cache, step, layer, NULL));
    }
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    CHECK(step == 0);
    for (uint32_t row = 0; row < count; row++) {
        of[row].accepted = accepted;
    }
}

/* Reads every stored row of a sequence back from the total pool. */
static inline void compare_stored(const fb_cache *cache, const story *of, uint32_t length) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t position = 0; position < length; position++) {
            uint32_t wanted[WORDS], found[WORDS];
            stamp(of, wanted, layer, position);
            OK(cache, fb_read_row(cache, of->sequence, layer, position, found, ROW));
            CHECK(memcmp(found, wanted, ROW) == 0);
        }
    }
}

/* Checks that every resource is released, without closing anything; then destroys the cache and its device. */
static inline void end_all(fb_device *device, fb_cache *cache) {
    fb_stats stats;
    OK(cache, fb_cache_reap(cache, NULL, NULL));
    OK(cache, fb_cache_validate(cache));
    stats = stats_of(cache);
    CHECK(stats.sequences == 0 && stats.steps_in_flight == 0 && stats.free_lanes == LANES);
    OK(cache, fb_cache_destroy(cache));
    OK(device, fb_device_destroy(device));
}

#endif
