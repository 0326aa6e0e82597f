/* If an engine leaves out a call, that is an error. A step of a model with a draft layer, in two attention waves,
 * whose batch rows differ in query rows, runs with each of its calls left out in turn. fb_finish rejects it, names
 * the layer, batch row and call, and enqueues nothing; then the step is completed, or abandoned and its sequences
 * truncated. The controls are steps in which nothing is missing, and calls that are not needed: query rows that a
 * batch row does not have. */

#include "check.h"

enum { DRAFT = LAYERS - 1, WAVES = 2, ROWS = 2, CALLS_MAX = 64, LISTS = (1 + WAVES) * ROWS * ENTRIES };

typedef enum { RESOLVE, GATHER, SCATTER } asked;
typedef enum { WHOLE, HALVES } mode;

/* A call of a layer. */
typedef struct {
    asked kind;
    fb_step_range range;
    uint32_t attention_wave;
} made;

typedef struct {
    fb_device *device;
    fb_cache *cache;
    void *stream;
    story of[ROWS];
    uint32_t query_rows[ROWS];
    /* First those of a layer, then those of each draft pass. */
    int32_t selection[ROWS * ENTRIES], by_draft_pass[QUERY][ROWS * TOP_K];
    int32_t slots[ROWS * ENTRIES], lists[LISTS];
    uint32_t counts[(1 + WAVES) * ROWS * QUERY];
    made due[CALLS_MAX];
    uint32_t due_count, refused[3], too_late;
} rig;

static void add(rig *r, asked kind, fb_step_range range, uint32_t attention_wave) {
    CHECK(r->due_count < CALLS_MAX);
    r->due[r->due_count++] = (made){kind, range, attention_wave};
}

/* R, G by attention wave, and S of a range. */
static void add_range(rig *r, uint32_t layer, uint32_t first, uint32_t count, uint32_t pass) {
    fb_step_range range = SIZED(fb_step_range);
    range.layer = layer;
    range.first = first;
    range.count = count;
    range.draft_pass = pass;
    add(r, RESOLVE, range, 0);
    for (uint32_t attention_wave = 0; attention_wave < WAVES; attention_wave++) {
        add(r, GATHER, range, attention_wave);
    }
    add(r, SCATTER, range, 0);
}

/* Every call that a step needs: the draft layer pass by pass, each call for both batch rows or for each. */
static void declare_due(rig *r, mode how) {
    r->due_count = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t pass = 0; pass < (layer == DRAFT ? (uint32_t)QUERY : 1u); pass++) {
            uint32_t of = layer == DRAFT ? pass + 1 : FB_ALL_QUERY_ROWS;
            for (uint32_t row = 0; row < (how == HALVES ? (uint32_t)ROWS : 1u); row++) {
                add_range(r, layer, row, how == HALVES, of);
            }
        }
    }
}

static fb_step prepare(rig *r) {
    fb_batch_row rows[ROWS];
    fb_step_config config = SIZED(fb_step_config);
    fb_step step = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        rows[row] = (fb_batch_row){r->of[row].sequence, r->of[row].accepted, r->query_rows[row]};
    }
    config.rows = rows;
    config.row_count = ROWS;
    config.query_rows = QUERY;
    OK(r->cache, fb_prepare(r->cache, &config, r->stream, &step));
    OK(r->device, fb_stream_wait(r->device, r->stream));
    memset(r->selection, 0xff, sizeof r->selection);
    memset(r->by_draft_pass, 0xff, sizeof r->by_draft_pass);
    for (uint32_t row = 0; row < ROWS; row++) {
        story *of = &r->of[row];
        of->committed += of->accepted;
        of->accepted = 0;
        for (uint32_t query = 0; query < r->query_rows[row]; query++) {
            int32_t *selection = r->selection + row * ENTRIES + query * TOP_K;
            of->written[of->committed + query] = ++writes;
            select_rows(selection, of->committed + query, writes);
            memcpy(r->by_draft_pass[query] + row * TOP_K, selection, TOP_K * sizeof *selection);
        }
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            land(r->cache, of, layer, r->query_rows[row]);
        }
    }
    return step;
}

static fb_status make(rig *r, fb_step step, const made *call) {
    fb_buffers buffers = SIZED(fb_buffers);
    const fb_step_range *range = &call->range;
    switch (call->kind) {
    case RESOLVE:
        buffers.selection = r->selection + range->first * ENTRIES;
        if (range->draft_pass != FB_ALL_QUERY_ROWS) {
            buffers.selection = r->by_draft_pass[range->draft_pass - 1] + range->first * TOP_K;
        }
        buffers.slots = r->slots;
        buffers.lists = r->lists;
        buffers.counts = r->counts;
        buffers.batch = ROWS;
        return fb_resolve(r->cache, step, range, &buffers, r->stream);
    case GATHER:
        return fb_gather(r->cache, step, range, call->attention_wave, r->stream);
    default:
        return fb_scatter_range(r->cache, step, range, r->stream);
    }
}

static int of_one_range(const made *one, const made *other) {
    return one->range.layer == other->range.layer && one->range.first == other->range.first &&
           one->range.draft_pass == other->range.draft_pass;
}

/* Whether a call is impossible, or counts for nothing, when another was left out. */
static int hangs_on(const made *call, const made *other) {
    return of_one_range(call, other) && call->kind == GATHER &&
           (other->kind == RESOLVE || (other->kind == GATHER && other->attention_wave < call->attention_wave));
}

/* What fb_finish reports when a call was left out; 0 if the call is for a query row that does not exist. */
static int expected(const rig *r, const made *without, char *text, size_t bytes) {
    static const char *const NAMES[] = {"resolve", "gather", "scatter"};
    const fb_step_range *range = &without->range;
    uint32_t query = range->draft_pass == FB_ALL_QUERY_ROWS ? 0 : range->draft_pass - 1;
    uint32_t end = range->count == 0 ? (uint32_t)ROWS : range->first + range->count;
    for (uint32_t row = range->first; row < end; row++) {
        if (query < r->query_rows[row]) {
            char wave[24] = "";
            if (without->kind == GATHER) {
                snprintf(wave, sizeof wave, ", wave %u", without->attention_wave);
            }
            int length = snprintf(text, bytes, "a %s was not enqueued (layer %u, batch row %u, query row %u%s)",
                                  NAMES[without->kind], range->layer, row, query, wave);
            CHECK(length > 0 && (size_t)length < bytes);
            return 1;
        }
    }
    return 0;
}

static void end_well(rig *r, fb_step step) {
    OK(r->cache, fb_finish(r->cache, step, r->stream));
    OK(r->device, fb_stream_wait(r->device, r->stream));
    OK(r->cache, fb_retire(r->cache, &step, r->stream, NULL));
    CHECK(step == 0);
    for (uint32_t row = 0; row < ROWS; row++) {
        r->of[row].accepted = r->of[row].committed < MAX_TOKENS - 60;
    }
}

/* The rows that the last resolve of a range missed, from one attention wave on. */
static uint32_t missed_from(const rig *r, const fb_step_range *range, uint32_t attention_wave) {
    size_t lists = (size_t)ROWS * (range->draft_pass == FB_ALL_QUERY_ROWS ? QUERY : 1);
    uint32_t missed = 0;
    OK(r->device, fb_stream_wait(r->device, r->stream));
    for (size_t at = (1 + attention_wave) * lists; at < (1 + WAVES) * lists; at++) {
        missed += r->counts[at];
    }
    return missed;
}

static void truncate(rig *r) {
    for (uint32_t row = 0; row < ROWS; row++) {
        r->of[row].committed = length_of(r->cache, r->of[row].sequence).committed;
        OK(r->cache, fb_truncate(r->cache, r->of[row].sequence, r->of[row].committed, r->stream, NULL));
    }
    OK(r->device, fb_stream_wait(r->device, r->stream));
}

/* Makes the missing calls. A gather after another resolve needs its own resolve again. If rows had been missed, that
 * is too late, and the step's report says so: the tables have the rows' slots already. */
static void complete(rig *r, fb_step step, const made *without, uint32_t missed) {
    for (uint32_t at = 0; at < r->due_count; at++) {
        const made *call = &r->due[at];
        if (of_one_range(call, without) && (call->kind == SCATTER) == (without->kind == SCATTER)) {
            OK(r->cache, make(r, step, call));
        }
    }
    if (missed == 0) {
        end_well(r, step);
        return;
    }
    OK(r->cache, fb_finish(r->cache, step, r->stream));
    OK(r->device, fb_stream_wait(r->device, r->stream));
    IS(FB_DEVICE_FAILED, fb_retire(r->cache, &step, r->stream, NULL));
    CHECK(says(r->cache, "were not gathered") && says(r->cache, "batch row") && says(r->cache, "layer"));
    CHECK(says(r->cache, "truncate its sequences"));
    r->too_late++;
    truncate(r);
}

static void abandon(rig *r, fb_step step) {
    OK(r->cache, fb_abandon(r->cache, step));
    OK(r->cache, fb_finish(r->cache, step, r->stream));
    OK(r->device, fb_stream_wait(r->device, r->stream));
    IS(FB_CANCELLED, fb_retire(r->cache, &step, r->stream, NULL));
    CHECK(step == 0 && says(r->cache, "truncate its sequences"));
    fb_batch_row row = {r->of[0].sequence, 0, 1};
    fb_step_config config = SIZED(fb_step_config);
    config.rows = &row;
    config.row_count = config.query_rows = 1;
    CHECK(fb_prepare(r->cache, &config, r->stream, &step) != FB_OK && step == 0);
    CHECK(says(r->cache, "a step of the sequence failed"));
    truncate(r);
}

/* A step with one of the needed calls missing, or with all of them. */
static void step_without(rig *r, const made *without, int completed) {
    char text[128] = "";
    uint32_t missed = 0;
    fb_step step = prepare(r);
    for (uint32_t at = 0; at < r->due_count; at++) {
        const made *call = &r->due[at];
        if (without == NULL || (call != without && !hangs_on(call, without))) {
            if (without != NULL && call->kind == RESOLVE && of_one_range(call, without)) {
                OK(r->device, fb_stream_wait(r->device, r->stream));
                memset(r->counts, 0, sizeof r->counts);
            }
            OK(r->cache, make(r, step, call));
        }
        if (call == without && call->kind == GATHER) {
            missed = missed_from(r, &call->range, call->attention_wave);
        }
    }
    if (without == NULL || !expected(r, without, text, sizeof text)) {
        end_well(r, step);
        return;
    }
    for (int time = 0; time < 2; time++) {
        IS(FB_INVALID_STATE, fb_finish(r->cache, step, r->stream));
        if (!says(r->cache, text) || !says(r->cache, "enqueue it, or abandon the step")) {
            fprintf(stderr, "not reported: %s\n", text);
            CHECK(!"what is missing is named");
        }
        fb_step still = step;
        IS(FB_BUSY, fb_retire(r->cache, &still, r->stream, NULL));
        CHECK(still == step && stats_of(r->cache).steps_in_flight == 1);
    }
    r->refused[without->kind]++;
    if (completed) {
        complete(r, step, without, missed);
    } else {
        abandon(r, step);
    }
    CHECK(stats_of(r->cache).steps_in_flight == 0);
}

/* A cache of two layers and a draft layer, whose sequences have so few slots that attention runs in two waves. */
static void begin(rig *r, uint32_t device) {
    fb_cache_config config = declared();
    config.layers = LAYERS - 1;
    config.draft_layers = 1;
    config.slots = config.min_budget = TOP_K;
    config.attention_waves = WAVES;
    memset(r, 0, sizeof *r);
    r->device = device_of(device);
    r->cache = cache_of(r->device, &config);
    OK(r->device, fb_stream_create(r->device, &r->stream));
    fb_info info = SIZED(fb_info);
    OK(r->cache, fb_cache_info(r->cache, &info));
    CHECK(info.attention_waves == WAVES);
    writes = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        open_story(r->cache, &r->of[row], 50 + 20 * row, r->stream);
    }
}

static void forget_each(uint32_t device) {
    rig *r = (rig *)malloc(sizeof *r);
    CHECK(r != NULL);
    begin(r, device);
    for (uint32_t wide = 0; wide < ROWS; wide++) {
        r->query_rows[wide] = QUERY;
        r->query_rows[1 - wide] = 1;
        for (mode how = WHOLE; how <= HALVES; how++) {
            declare_due(r, how);
            step_without(r, NULL, 0);
            for (uint32_t at = 0; at < r->due_count; at++) {
                step_without(r, &r->due[at], 0);
                step_without(r, &r->due[at], 1);
            }
        }
    }
    CHECK(r->refused[RESOLVE] > 20 && r->refused[GATHER] > 40 && r->refused[SCATTER] > 20);
    CHECK(r->too_late > 10);
    for (uint32_t row = 0; row < ROWS; row++) {
        OK(r->cache, fb_truncate(r->cache, r->of[row].sequence, r->of[row].committed, r->stream, NULL));
        OK(r->device, fb_stream_wait(r->device, r->stream));
        compare_stored(r->cache, &r->of[row], r->of[row].committed);
        OK(r->cache, fb_close(r->cache, r->of[row].sequence, r->stream));
    }
    OK(r->device, fb_stream_wait(r->device, r->stream));
    end_all(r->device, r->cache);
    free(r);
}

/* With fb_layer and fb_scatter: a layer that was not called, and one whose rows were not stored. */
static void forget_with_whole_layers(void) {
    static int32_t selection[LANES * ENTRIES], slots[LANES * ENTRIES];
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    story of;
    memset(selection, 0xff, sizeof selection);
    open_story(cache, &of, 40, NULL);
    fb_step step = begin_step(cache, &of, 1, QUERY, NULL);
    IS(FB_INVALID_STATE, fb_finish(cache, step, NULL));
    CHECK(says(cache, "a resolve was not enqueued (layer 0, batch row 0, query row 0)"));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        land(cache, &of, layer, QUERY);
        OK(cache, fb_layer(cache, step, layer, selection, slots, NULL));
        IS(FB_INVALID_STATE, fb_finish(cache, step, NULL));
        CHECK(says(cache, "a scatter was not enqueued"));
        OK(cache, fb_scatter(cache, step, layer, NULL));
        if (layer + 1 < LAYERS) {
            IS(FB_INVALID_STATE, fb_finish(cache, step, NULL));
            CHECK(says(cache, "a resolve was not enqueued") && says(cache, layer == 0 ? "layer 1" : "layer 2"));
        }
    }
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    of.accepted = QUERY;
    decode_step(cache, &of, 1, 3, 1);
    compare_stored(cache, &of, of.committed);
    OK(cache, fb_close(cache, of.sequence, NULL));
    end_all(device, cache);
}

int main(void) {
    forget_each(FB_DEVICE_HOST);
    forget_each(FB_DEVICE_HOST_THREADS);
    forget_with_whole_layers();
    return checked();
}
