/* Faults that must be reported: without these controls, a broken sanitizer would look like programs without errors.
 *
 *   controls leak        loses memory of its own
 *   controls forgotten   never ends its cache
 *   controls overrun     states more rows of a batch than its buffer has
 *   controls short-rows  states more prompt rows than its buffer has
 *   controls undefined   overflows a signed number
 *   controls unstored    stores a step's new rows before they are written, and compares them later
 */

#include "check.h"

static void *volatile lost;

static void leak(void) {
    lost = malloc(4321);
    CHECK(lost != NULL);
    lost = NULL;
}

static void overrun(fb_cache *cache, const story *of) {
    fb_batch_row *rows = (fb_batch_row *)malloc(sizeof *rows);
    CHECK(rows != NULL);
    rows[0].sequence = of->sequence;
    rows[0].accepted = 0;
    rows[0].query_rows = 1;
    fb_step_config config = SIZED(fb_step_config);
    fb_step step = 0;
    config.rows = rows;
    config.row_count = 2;
    config.query_rows = 1;
    (void)fb_prepare(cache, &config, NULL, &step);
    free(rows);
}

static void short_rows(fb_cache *cache) {
    fb_open_config config = opening(10, 10);
    uint64_t sequence = 0;
    unsigned char *rows = (unsigned char *)calloc(9, ROW);
    CHECK(rows != NULL);
    OK(cache, fb_open(cache, &config, &sequence));
    OK(cache, fb_append(cache, sequence, 0, rows, 10));
    OK(cache, fb_close(cache, sequence, NULL));
    free(rows);
}

static void undefined(uint32_t seed) {
    volatile int number = (int)(INT32_MAX - 1 + (int)(seed != 0));
    number = number + (int)seed;
    CHECK(number != 0);
}

/* Sparse slots are few, so that a row stored too early is fetched again from memory that it never reached. */
static void unstored(fb_cache *cache, story *of) {
    int32_t selection[ENTRIES], slots[ENTRIES];
    for (uint32_t number = 0; number < 100; number++) {
        fb_step step = begin_step(cache, of, 1, QUERY, NULL);
        for (uint32_t query = 0; query < QUERY; query++) {
            select_rows(selection + query * TOP_K, of->committed + query, number * 29);
        }
        OK(cache, fb_scatter(cache, step, 0, NULL));
        land(cache, of, 0, QUERY);
        OK(cache, fb_layer(cache, step, 0, selection, slots, NULL));
        (void)compare_rows(cache, of, 0, selection, slots, ENTRIES);
        rest_of_step(cache, step, 1, NULL);
        OK(cache, fb_finish(cache, step, NULL));
        OK(cache, fb_retire(cache, &step, NULL, NULL));
        of->accepted = 1;
    }
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    story of;
    open_story(cache, &of, 40, NULL);
    if (strcmp(mode, "leak") == 0) {
        leak();
    } else if (strcmp(mode, "forgotten") == 0) {
        return checked();
    } else if (strcmp(mode, "overrun") == 0) {
        overrun(cache, &of);
    } else if (strcmp(mode, "short-rows") == 0) {
        short_rows(cache);
    } else if (strcmp(mode, "undefined") == 0) {
        undefined((uint32_t)argc);
    } else {
        unstored(cache, &of);
    }
    OK(cache, fb_close(cache, of.sequence, NULL));
    end_all(device, cache);
    return checked();
}
