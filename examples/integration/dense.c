/* The loop of a dense model of docs/integration.md, in C: a prompt in chunks, then steps that decode a token. A second
 * request with the same prompt finds its pages. In the middle of each another request is urgent, and the device is
 * full: the running one is parked on the host, and comes back layer by layer. On this device, which works inline, the
 * copies have ended when fb_dense_resume returns; on a GPU they run beside the layers. */
#include <forebay.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, RUN = 256, PAGE = 16, PROMPT = 1000, CHUNK = 256, STEPS = 100, MOST = PROMPT + STEPS };
/* Pages of the device and of the host: those of one request, with its rows in flight, and a few more. */
enum { PAGES = MOST / PAGE + 12 };

static const uint32_t LAYER_NUMBERS[LAYERS] = {0, 1, 2, 3};

/* Ends the program with the text of the handle's last error. */
static void must(fb_status status, const void *handle) {
    if (status != FB_OK) {
        char text[512] = "";
        fb_error_text(handle, text, sizeof text);
        fprintf(stderr, "%s: %s\n", fb_status_text(status), text);
        exit(1);
    }
}

/* What an engine asks once: where K (0) or V (1) of a layer is. */
static fb_dense_layer_view view_of(const fb_dense *dense, uint32_t layer, uint32_t run) {
    fb_dense_layer_view view = {0};
    view.size = sizeof view;
    must(fb_dense_view(dense, layer, run, &view), dense);
    return view;
}

/* The engine's projections: the byte of each new row is the token's id. */
static void write_rows(const fb_dense *dense, uint32_t layer, const fb_dense_step_tensors *tensors, const uint32_t *ids,
                       uint32_t rows) {
    const int64_t *slots = tensors->slots[0], *positions = tensors->positions;
    for (uint32_t run = 0; run < 2; run++) {
        fb_dense_layer_view view = view_of(dense, layer, run);
        for (uint32_t row = 0; row < rows; row++) {
            uint64_t slot = (uint64_t)slots[row];
            uint8_t *page = (uint8_t *)view.address + slot / PAGE * view.stride;
            memset(page + slot % PAGE * view.row_bytes, (int)(ids[positions[row]] & 0xff), view.row_bytes);
        }
    }
}

/* The engine's attention: reads the rows of the only batch row by its page table, and checks whose they are. */
static uint64_t attend(const fb_dense *dense, uint32_t layer, const fb_dense_step_tensors *tensors,
                       const uint32_t *ids) {
    const int32_t *table = tensors->tables[0], *lengths = tensors->lengths;
    uint64_t sum = 0;
    for (uint32_t run = 0; run < 2; run++) {
        fb_dense_layer_view view = view_of(dense, layer, run);
        for (uint32_t at = 0; at < (uint32_t)lengths[0]; at++) {
            const uint8_t *page = (const uint8_t *)view.address + (uint64_t)table[at / PAGE] * view.stride;
            const uint8_t *row = page + at % PAGE * view.row_bytes;
            uint8_t wanted[RUN];
            memset(wanted, (int)(ids[at] & 0xff), sizeof wanted);
            if (memcmp(row, wanted, sizeof wanted) != 0) {
                fprintf(stderr, "another row at position %u\n", (unsigned)at);
                exit(1);
            }
            sum += run == 0 ? row[0] : 0;
        }
    }
    return sum;
}

/* One step of one sequence: `rows` query rows, after `accepted` of the last step's. */
static uint64_t step_of(fb_dense *dense, uint64_t sequence, const uint32_t *ids, uint32_t accepted, uint32_t rows) {
    uint64_t sum = 0;
    fb_step step = 0;
    fb_batch_row row = {sequence, accepted, rows};
    must(fb_dense_prepare(dense, 0, &row, 1, NULL, NULL, &step), dense);
    /* A captured graph reads the same addresses in every step. */
    fb_dense_step_tensors tensors = {0};
    tensors.size = sizeof tensors;
    must(fb_dense_tensors(dense, 0, &tensors), dense);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        /* Before new rows are written: the pages that come back from the host are there. */
        must(fb_dense_arrived(dense, step, layer, NULL), dense);
        /* P: the engine writes the new rows to their slots. A: attention reads the pages. */
        write_rows(dense, layer, &tensors, ids, rows);
        sum += attend(dense, layer, &tensors, ids);
    }
    must(fb_dense_finish(dense, step, NULL), dense);
    /* When the step has ended: the committed length, and the word that its tokens may be used. */
    uint32_t length = 0;
    must(fb_dense_retire(dense, &step, NULL, &length, 1, NULL), dense);
    return sum;
}

/* Another request is urgent. If the device is full, the running one waits on the host until it has ended. Returns how
 * many rows its next step accepts: none after a parking, which has accepted the last ones. */
static uint32_t preempt(fb_dense *dense, uint64_t running, uint32_t accepted, const uint32_t *ids) {
    uint64_t urgent = 0;
    fb_status opened = fb_dense_open(dense, CHUNK, 1, &urgent);
    const bool parks = opened == FB_EXHAUSTED;
    if (parks) {
        must(fb_dense_park(dense, running, accepted, NULL, NULL), dense);
        opened = fb_dense_open(dense, CHUNK, 1, &urgent);
    }
    must(opened, dense);
    step_of(dense, urgent, ids, 0, CHUNK);
    step_of(dense, urgent, ids, CHUNK, 1);
    must(fb_dense_close(dense, urgent, NULL), dense);
    if (parks) {
        must(fb_dense_resume(dense, running, NULL, NULL), dense);
    }
    return parks ? 0 : accepted;
}

/* A request: opens, computes what is not there, decodes, publishes, closes. Returns how many tokens were there. */
static uint32_t serve(fb_dense *dense, const uint32_t *ids, uint64_t *sum) {
    /* The last token is computed again, for its logits. */
    fb_tokens prompt = {0};
    prompt.size = sizeof prompt;
    prompt.ids = ids;
    prompt.count = PROMPT - 1;
    fb_dense_names *names = NULL;
    must(fb_dense_names_create(dense, "tenant", 6, &prompt, &names), dense);
    uint64_t sequence = 0;
    fb_dense_found found = {0};
    found.size = sizeof found;
    must(fb_dense_open_shared(dense, PROMPT, STEPS, names, NULL, &sequence, &found, NULL), dense);
    must(fb_dense_names_destroy(names), names);
    uint32_t accepted = 0;
    for (uint32_t at = found.tokens; at < PROMPT; at += accepted) {
        uint32_t rows = PROMPT - at < CHUNK ? PROMPT - at : CHUNK;
        *sum += step_of(dense, sequence, ids, accepted, rows);
        accepted = rows;
    }
    for (uint32_t number = 0; number < STEPS; number++) {
        if (number == STEPS / 2) {
            accepted = preempt(dense, sequence, accepted, ids + 1);
        }
        *sum += step_of(dense, sequence, ids, accepted, 1);
        accepted = 1;
    }
    /* Full pages whose rows are accepted are found by later requests. */
    fb_tokens next = {0};
    next.size = sizeof next;
    next.ids = ids + found.tokens;
    next.count = MOST - found.tokens;
    uint32_t published = 0;
    must(fb_dense_publish(dense, sequence, found.tokens, &next, &published), dense);
    /* They go to the host too, at most so many bytes in a call: what is there costs a parking no copy. */
    uint64_t saved = 0;
    must(fb_dense_save(dense, NULL, 1 << 20, &saved), dense);
    must(fb_dense_close(dense, sequence, NULL), dense);
    return found.tokens;
}

int main(void) {
    fb_device_config host = {0};
    host.size = sizeof host;
    fb_device *device = NULL;
    must(fb_device_create(&host, NULL, 0, &device), NULL);
    fb_dense_config config = {0};
    config.size = sizeof config;
    config.groups[0].layers = LAYER_NUMBERS;
    config.groups[0].layer_count = LAYERS;
    config.groups[0].row_bytes[0] = RUN;
    config.groups[0].row_bytes[1] = RUN;
    config.group_count = 1;
    config.page_tokens = PAGE;
    config.sequences = 4;
    config.max_tokens = MOST;
    config.device_pages[0] = config.host_pages[0] = PAGES;
    config.bring_layers = 1;
    config.memory = FB_MEMORY_UNLOCKED;
    char text[512] = "";
    fb_dense *dense = NULL;
    if (fb_dense_create(device, &config, text, sizeof text, &dense) != FB_OK) {
        fprintf(stderr, "%s\n", text);
        return 1;
    }
    static uint32_t ids[MOST];
    for (uint32_t at = 0; at < MOST; at++) {
        ids[at] = at * 7 % 251;
    }
    uint64_t sums[2] = {0, 0};
    uint32_t first = serve(dense, ids, &sums[0]), second = serve(dense, ids, &sums[1]);
    printf("%u and %u tokens found, sums %llu and %llu\n", (unsigned)first, (unsigned)second,
           (unsigned long long)sums[0], (unsigned long long)sums[1]);
    must(fb_dense_destroy(dense), dense);
    must(fb_device_destroy(device), device);
    return 0;
}
