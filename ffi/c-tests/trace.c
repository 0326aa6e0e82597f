/* Traces: a recording of selections and its reader, and a recording of requests. */

#include "check.h"

#include <unistd.h>

enum { K = 4, STEPS = 40, FIRST = 100 };

static const char SELECTED[] = "trace.topk", REQUESTS[] = "trace.jsonl";

static int by_value(const void *a, const void *b) {
    int32_t left = *(const int32_t *)a, right = *(const int32_t *)b;
    return (left > right) - (left < right);
}

/* K distinct positions up to the query's own, in any order. */
static void selected_at(int32_t *selected, uint32_t position) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t k = 0; k < K; k++) {
            selected[layer * K + k] = (int32_t)((position * 7 + layer * 3 + (K - k) * 19) % position);
        }
    }
}

static void record(void) {
    fb_trace_config config = SIZED(fb_trace_config);
    fb_trace *trace = NULL;
    int32_t selected[LAYERS * K];
    char text[256] = "untouched";
    config.layers = LAYERS;
    config.k = K;
    config.first_position = FIRST;
    config.decode_start = FIRST + 8;
    config.label = "a test";
    IS(FB_OK, fb_trace_create(SELECTED, &config, text, sizeof text, &trace));
    CHECK(trace != NULL && strcmp(text, "untouched") == 0);
    fb_trace *second = NULL;
    IS(FB_IO, fb_trace_create(SELECTED, &config, text, sizeof text, &second));
    CHECK(second == NULL && strcmp(text, "untouched") != 0);
    for (uint32_t step = 0; step < STEPS; step++) {
        selected_at(selected, FIRST + step);
        OK(trace, fb_trace_record(trace, FIRST + step, selected, LAYERS * K));
        /* A rejected step is not recorded. */
        CHECK(fb_trace_record(trace, FIRST + step, selected, LAYERS * K) == FB_OUT_OF_RANGE);
        CHECK(fb_trace_record(trace, FIRST + step + 1, selected, LAYERS * K - 1) == FB_OUT_OF_RANGE);
        if (step % 16 == 0) {
            OK(trace, fb_trace_flush(trace));
        }
    }
    selected[0] = FIRST + STEPS + 1;
    IS(FB_OUT_OF_RANGE, fb_trace_record(trace, FIRST + STEPS, selected, LAYERS * K));
    uint32_t steps = 0;
    OK(trace, fb_trace_sync(trace));
    OK(trace, fb_trace_finish(trace, &steps));
    CHECK(steps == STEPS);
    CHECK(fb_trace_record(trace, FIRST + STEPS, selected, LAYERS * K) != FB_OK);
    OK(trace, fb_trace_destroy(trace));
    IS(FB_CLOSED, fb_trace_destroy(trace));
}

static void read_back(void) {
    fb_selections *selections = NULL;
    char text[256] = "untouched";
    IS(FB_OK, fb_selections_open(SELECTED, text, sizeof text, &selections));
    fb_trace_header header = SIZED(fb_trace_header);
    OK(selections, fb_selections_header(selections, &header));
    CHECK(header.layers == LAYERS && header.k == K && header.steps == STEPS && header.first_position == FIRST);
    CHECK(header.decode_start == FIRST + 8 && header.warm_steps == 8 && header.unfinished == 0);
    OK(selections, fb_selections_text(selections, FB_SELECTIONS_LABEL, text, sizeof text));
    CHECK(strcmp(text, "a test") == 0);
    IS(FB_OUT_OF_RANGE, fb_selections_text(selections, 99, text, sizeof text));
    uint32_t ids[LAYERS] = {9, 9, 9}, count = 0;
    OK(selections, fb_selections_layer_ids(selections, ids, LAYERS, &count));
    CHECK(count == LAYERS && ids[0] == 0 && ids[2] == 2);
    int32_t found[3 * LAYERS * K], wanted[LAYERS * K];
    for (uint32_t first = 0; first + 3 <= STEPS; first += 3) {
        OK(selections, fb_selections_read(selections, first, 3, found));
        for (uint32_t step = 0; step < 3; step++) {
            selected_at(wanted, FIRST + first + step);
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                qsort(wanted + layer * K, K, sizeof *wanted, by_value);
            }
            CHECK(memcmp(found + step * LAYERS * K, wanted, sizeof wanted) == 0);
        }
    }
    found[0] = 77;
    IS(FB_OUT_OF_RANGE, fb_selections_read(selections, STEPS - 1, 2, found));
    IS(FB_OUT_OF_RANGE, fb_selections_read(selections, UINT32_MAX, UINT32_MAX, found));
    CHECK(found[0] == 77);
    OK(selections, fb_selections_destroy(selections));
    selections = NULL;
    IS(FB_IO, fb_selections_open("no such file", text, sizeof text, &selections));
    IS(FB_BAD_FORMAT, fb_selections_open(REQUESTS, text, sizeof text, &selections));
    CHECK(selections == NULL && text[0] != 0);
}

static void requests(void) {
    fb_requests *trace = NULL;
    char text[256] = "untouched";
    uint64_t blocks[3] = {1, 2, 3}, count = 0;
    IS(FB_OK, fb_requests_create(REQUESTS, 16, text, sizeof text, &trace));
    CHECK(trace != NULL && strcmp(text, "untouched") == 0);
    fb_arrival arrival = SIZED(fb_arrival);
    arrival.input_tokens = 40;
    arrival.output_tokens = 5;
    arrival.blocks = blocks;
    arrival.block_count = 3;
    for (uint32_t request = 0; request < 10; request++) {
        arrival.milliseconds = request * 10;
        OK(trace, fb_requests_record(trace, &arrival));
    }
    arrival.milliseconds = 5;
    IS(FB_OUT_OF_RANGE, fb_requests_record(trace, &arrival));
    arrival.milliseconds = 500;
    arrival.input_tokens = 32;
    IS(FB_OUT_OF_RANGE, fb_requests_record(trace, &arrival));
    OK(trace, fb_requests_flush(trace));
    OK(trace, fb_requests_sync(trace));
    OK(trace, fb_requests_finish(trace, &count));
    CHECK(count == 10);
    OK(trace, fb_requests_destroy(trace));
    FILE *file = fopen(REQUESTS, "r");
    CHECK(file != NULL);
    uint32_t lines = 0;
    for (int byte = fgetc(file); byte != EOF; byte = fgetc(file)) {
        lines += byte == '\n';
    }
    (void)fclose(file);
    CHECK(lines >= 10);
}

int main(void) {
    (void)unlink(SELECTED);
    (void)unlink(REQUESTS);
    record();
    requests();
    read_back();
    (void)unlink(SELECTED);
    (void)unlink(REQUESTS);
    return checked();
}
