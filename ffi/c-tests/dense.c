/* A serving loop over the cache of a dense model: prompts in chunks, decoding with drafts, and prefixes that later
 * sequences share, also from the host's tier. The engine's kernels are here: they write rows to their slots, and read
 * them by the page tables. */

#include "check.h"

enum { DENSE_LAYERS = 3, CHUNK = 24, FIRST = 60, NEXT = 80, DECODED = 12, MODEL_TOKENS = 112, GROUPS = 2, WINDOW = 20 };

static const uint32_t FULL[] = {0, 2}, LOCAL[] = {1};

/* Layers 0 and 2 read everything, layer 1 reads a window. Pages for two sequences, and a host's tier. */
static fb_dense_config configured(uint32_t layout, uint32_t runs) {
    fb_dense_config config = SIZED(fb_dense_config);
    config.groups[0].layers = FULL;
    config.groups[0].layer_count = 2;
    config.groups[0].row_bytes[0] = ROW;
    config.groups[0].row_bytes[1] = ROW;
    config.groups[1].layers = LOCAL;
    config.groups[1].layer_count = 1;
    config.groups[1].window = WINDOW;
    config.groups[1].row_bytes[0] = ROW;
    config.groups[1].row_bytes[1] = ROW;
    config.group_count = GROUPS;
    config.page_tokens = PAGE;
    config.sequences = 2;
    config.max_tokens = MODEL_TOKENS;
    config.step_tokens = CHUNK;
    config.query_rows = QUERY;
    config.layout = layout;
    config.runs = runs;
    config.width = FB_DENSE_I32;
    for (uint32_t group = 0; group < GROUPS; group++) {
        config.host_pages[group] = 16;
    }
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    return config;
}

/* A request: its sequence, its tokens, and how many of them are committed. */
typedef struct {
    uint64_t sequence;
    uint32_t ids[MODEL_TOKENS + 2 * QUERY];
    uint32_t committed, accepted, published;
} request;

/* The byte that fills the row of a token: it differs between tokens, positions, layers and runs. */
static unsigned char mark(uint32_t id, uint32_t position, uint32_t layer, uint32_t run) {
    return (unsigned char)(id * 7 + position * 3 + layer * 2 + run);
}

static fb_dense_step_tensors tensors_of(const fb_dense *dense) {
    fb_dense_step_tensors tensors = SIZED(fb_dense_step_tensors);
    OK(dense, fb_dense_tensors(dense, 0, &tensors));
    CHECK(tensors.integer_bytes == 4);
    return tensors;
}

/* Writes the rows of a step's only batch row to their slots, in all layers. */
static void write_rows(const fb_dense *dense, const request *of, uint32_t query_rows) {
    fb_dense_step_tensors tensors = tensors_of(dense);
    const int32_t *positions = (const int32_t *)tensors.positions;
    for (uint32_t layer = 0; layer < DENSE_LAYERS; layer++) {
        for (uint32_t run = 0; run < 2; run++) {
            fb_dense_layer_view view = SIZED(fb_dense_layer_view);
            OK(dense, fb_dense_view(dense, layer, run, &view));
            const int32_t *slots = (const int32_t *)tensors.slots[view.group];
            for (uint32_t row = 0; row < query_rows; row++) {
                uint32_t position = (uint32_t)positions[row], slot = (uint32_t)slots[row];
                unsigned char *page = (unsigned char *)view.address + slot / PAGE * view.stride;
                CHECK(slots[row] >= PAGE && slot / PAGE < view.pages);
                memset(page + slot % PAGE * view.row_bytes, mark(of->ids[position], position, layer, run), ROW);
            }
        }
    }
}

/* Attention: checks every row that the last query row of the only batch row reads. */
static void read_rows(const fb_dense *dense, const request *of, uint32_t length) {
    fb_dense_step_tensors tensors = tensors_of(dense);
    CHECK(*(const int32_t *)tensors.lengths == (int32_t)length);
    for (uint32_t layer = 0; layer < DENSE_LAYERS; layer++) {
        for (uint32_t run = 0; run < 2; run++) {
            fb_dense_layer_view view = SIZED(fb_dense_layer_view);
            OK(dense, fb_dense_view(dense, layer, run, &view));
            const int32_t *table = (const int32_t *)tensors.tables[view.group];
            uint32_t first = view.group == 1 && length > WINDOW ? length - WINDOW : 0;
            for (uint32_t position = first; position < length; position++) {
                uint64_t page = (uint64_t)table[position / PAGE];
                const unsigned char *row = (const unsigned char *)view.address + page * view.stride +
                                           position % PAGE * view.row_bytes;
                unsigned char wanted = mark(of->ids[position], position, layer, run);
                CHECK(page > 0 && page < view.pages && row[0] == wanted && row[ROW - 1] == wanted);
            }
        }
    }
}

/* One step of one sequence; returns the committed length that its report gives. */
static uint32_t step_of(fb_dense *dense, request *of, uint32_t query_rows, uint32_t accepted) {
    fb_batch_row row = {of->sequence, of->accepted, query_rows};
    fb_step step = 0;
    uint32_t length = 0, count = 0;
    OK(dense, fb_dense_prepare(dense, 0, &row, 1, NULL, NULL, &step));
    of->committed += of->accepted;
    write_rows(dense, of, query_rows);
    read_rows(dense, of, of->committed + query_rows);
    OK(dense, fb_dense_finish(dense, step, NULL));
    OK(dense, fb_dense_retire(dense, &step, NULL, &length, 1, &count));
    CHECK(step == 0 && count == 1 && length == of->committed);
    of->accepted = accepted;
    return length;
}

static fb_tokens tokens_from(const request *of, uint32_t from, uint32_t end) {
    fb_tokens tokens = SIZED(fb_tokens);
    tokens.ids = of->ids + from;
    tokens.count = end - from;
    return tokens;
}

/* Publishes what is accepted and stored. */
static void publish(fb_dense *dense, request *of) {
    fb_tokens next = tokens_from(of, of->published, MODEL_TOKENS);
    OK(dense, fb_dense_publish(dense, of->sequence, of->published, &next, &of->published));
}

/* Opens a request by the names of its prompt without the last token; returns how many of its tokens are there. */
static uint32_t open_request(fb_dense *dense, request *of, uint32_t tokens, const char *salt) {
    fb_tokens prompt = tokens_from(of, 0, tokens - 1);
    fb_dense_names *names = NULL;
    fb_dense_found before = SIZED(fb_dense_found), found = SIZED(fb_dense_found);
    fb_ticket *ticket = NULL;
    uint32_t outcome = FB_TICKET_PENDING;
    OK(dense, fb_dense_names_create(dense, salt, strlen(salt), &prompt, &names));
    OK(dense, fb_dense_find(dense, names, &before));
    OK(dense, fb_dense_open_shared(dense, tokens, MODEL_TOKENS - tokens, names, NULL, &of->sequence, &found, &ticket));
    CHECK(found.tokens == before.tokens && found.host_tokens == before.host_tokens);
    OK(ticket, fb_ticket_outcome(ticket, &outcome, NULL));
    CHECK(outcome == FB_TICKET_DONE);
    OK(ticket, fb_ticket_destroy(ticket));
    OK(names, fb_dense_names_destroy(names));
    of->committed = of->published = found.tokens;
    of->accepted = 0;
    return found.tokens;
}

/* The rest of the prompt in chunks, and decoding with a draft that is rejected every other time. A page is published
 * while the window still has it. */
static void serve(fb_dense *dense, request *of, uint32_t tokens) {
    while (of->committed + of->accepted < tokens) {
        uint32_t left = tokens - of->committed - of->accepted, rows = left < CHUNK ? left : CHUNK;
        (void)step_of(dense, of, rows, rows);
        publish(dense, of);
    }
    for (uint32_t number = 0; number < DECODED; number++) {
        (void)step_of(dense, of, QUERY, number % 2 + 1);
        publish(dense, of);
    }
    fb_dense_sequence_length length = SIZED(fb_dense_sequence_length);
    OK(dense, fb_dense_length(dense, of->sequence, &length));
    CHECK(length.committed == of->committed && length.landed == QUERY && length.published == of->published);
    CHECK(length.published == of->committed / PAGE * PAGE);
    OK(dense, fb_dense_close(dense, of->sequence, NULL));
}

static void number_tokens(request *of, uint32_t first) {
    memset(of, 0, sizeof *of);
    for (uint32_t at = 0; at < MODEL_TOKENS + 2 * QUERY; at++) {
        of->ids[at] = first + at * 5;
    }
}

static fb_dense_cache_stats stats_dense(const fb_dense *dense) {
    fb_dense_cache_stats stats = SIZED(fb_dense_cache_stats);
    OK(dense, fb_dense_stats(dense, &stats));
    return stats;
}

/* A conversation goes on where its last turn was published, and comes back from the host when others have taken its
 * device pages. */
static void loop(uint32_t layout, uint32_t runs) {
    fb_dense_config config = configured(layout, runs);
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_dense *dense = NULL;
    request *of = (request *)malloc(sizeof *of);
    char text[256] = "";
    uint64_t saved = 0;
    CHECK(of != NULL);
    IS(FB_OK, fb_dense_create(device, &config, text, sizeof text, &dense));
    number_tokens(of, 1000);
    CHECK(open_request(dense, of, FIRST, "a") == 0);
    serve(dense, of, FIRST);
    uint32_t published = of->published;
    OK(dense, fb_dense_save(dense, NULL, UINT64_MAX, &saved));
    CHECK(saved > 0 && stats_dense(dense).bytes_down == saved && stats_dense(dense).saved[0] == published / PAGE);
    CHECK(open_request(dense, of, NEXT, "b") == 0);
    OK(dense, fb_dense_close(dense, of->sequence, NULL));
    CHECK(published > FIRST && open_request(dense, of, NEXT, "a") == published);
    serve(dense, of, NEXT);
    CHECK(stats_dense(dense).bytes_up == 0);
    for (uint32_t other = 1; other < 8; other++) {
        number_tokens(of, 1000 + other);
        CHECK(open_request(dense, of, FIRST, "a") == 0);
        serve(dense, of, FIRST);
    }
    number_tokens(of, 1000);
    /* Of the group with a window only the pages of the last window have to come back. */
    CHECK(open_request(dense, of, NEXT, "a") == published);
    CHECK(stats_dense(dense).bytes_up > saved / 2 && stats_dense(dense).bytes_up < saved);
    serve(dense, of, NEXT);
    CHECK(stats_dense(dense).sequences == 0 && stats_dense(dense).steps_in_flight == 0);
    OK(dense, fb_dense_validate(dense));
    OK(dense, fb_dense_destroy(dense));
    OK(device, fb_device_destroy(device));
    free(of);
}

/* A fork goes its own way, and a truncated sequence computes again. */
static void forks(void) {
    fb_dense_config config = configured(FB_DENSE_LAYER_FIRST, FB_DENSE_RUNS_APART);
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_dense *dense = NULL;
    static request parent, child;
    uint32_t pages[2][8], count = 0, waiting = 77;
    number_tokens(&parent, 5);
    IS(FB_OK, fb_dense_create(device, &config, NULL, 0, &dense));
    OK(dense, fb_dense_open(dense, CHUNK, 10, &parent.sequence));
    (void)step_of(dense, &parent, CHUNK, 0);
    OK(dense, fb_dense_truncate(dense, parent.sequence, CHUNK - 1, NULL, NULL));
    OK(dense, fb_dense_extend(dense, parent.sequence, CHUNK, 20));
    parent.committed = CHUNK - 1;
    child = parent;
    OK(dense, fb_dense_fork(dense, parent.sequence, 10, NULL, &child.sequence, NULL));
    CHECK(child.sequence != parent.sequence && child.sequence != 0);
    child.ids[CHUNK - 1] = 9;
    (void)step_of(dense, &child, 2, 1);
    (void)step_of(dense, &parent, 2, 1);
    (void)step_of(dense, &child, 1, 0);
    OK(dense, fb_dense_pages(dense, parent.sequence, 0, pages[0], 8, &count));
    OK(dense, fb_dense_pages(dense, child.sequence, 0, pages[1], 8, &count));
    CHECK(pages[0][0] == pages[1][0] && pages[0][1] != pages[1][1]);
    /* The parent waits on the host while the child goes on. */
    OK(dense, fb_dense_park(dense, parent.sequence, 1, NULL, NULL));
    parent.committed++;
    parent.accepted = 0;
    IS(FB_INVALID_STATE, fb_dense_fork(dense, parent.sequence, 1, NULL, &child.sequence, NULL));
    (void)step_of(dense, &child, 1, 0);
    OK(dense, fb_dense_resume(dense, parent.sequence, NULL, NULL));
    (void)step_of(dense, &parent, 1, 0);
    OK(dense, fb_dense_close(dense, parent.sequence, NULL));
    OK(dense, fb_dense_close(dense, child.sequence, NULL));
    IS(FB_CLOSED, fb_dense_close(dense, child.sequence, NULL));
    OK(dense, fb_dense_reap(dense, NULL, &waiting));
    CHECK(waiting == 0);
    OK(dense, fb_dense_validate(dense));
    OK(dense, fb_dense_destroy(dense));
    OK(device, fb_device_destroy(device));
}

static void presets(void) {
    fb_dense_config config = SIZED(fb_dense_config);
    fb_dense_cache_footprint bytes = SIZED(fb_dense_cache_footprint);
    uint32_t layers[128], pages[FB_DENSE_GROUPS_MAX];
    char reason[512] = "";
    config.sequences = 4;
    config.max_tokens = 8192;
    OK(NULL, fb_dense_preset("gemma-3-27b", reason, sizeof reason, layers, 128, &config));
    CHECK(config.group_count == 2 && config.groups[0].layer_count == 10 && config.groups[1].window == 1024);
    CHECK(config.groups[0].layers == layers && layers[0] == 5 && config.groups[1].layers == layers + 10);
    OK(NULL, fb_dense_pages_for(&config, 4, 8192, reason, sizeof reason, pages));
    CHECK(pages[0] == 4 * 129 + 1 && pages[1] < pages[0] && pages[2] == 0);
    OK(NULL, fb_dense_footprint(&config, reason, sizeof reason, &bytes));
    CHECK(bytes.pages == (uint64_t)64 * 8192 * (10ull * pages[0] + 52ull * pages[1]));
    IS(FB_OUT_OF_RANGE, fb_dense_preset("gemma-3-27b", reason, sizeof reason, layers, 61, &config));
    CHECK(strstr(reason, "wanted 62") != NULL);
}

int main(void) {
    presets();
    loop(FB_DENSE_LAYER_FIRST, FB_DENSE_RUNS_APART);
    loop(FB_DENSE_LAYER_FIRST, FB_DENSE_RUNS_TOGETHER);
    loop(FB_DENSE_PAGE_FIRST, FB_DENSE_RUNS_APART);
    loop(FB_DENSE_PAGE_FIRST, FB_DENSE_RUNS_TOGETHER);
    forks();
    return checked();
}
