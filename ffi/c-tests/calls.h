/* Every call of the interface that takes a pointer, in a table: with one of its pointers replaced, it must return an
 * error and write nothing. Programs include this file after check.h.
 *
 * An attempt runs on the object `handle`, with pointer number `null`, counted from 1 without the handle, as NULL. A
 * call writes only to `out`.
 */

#ifndef FB_CALLS_H
#define FB_CALLS_H

#include "check.h"

/* The memory that calls write to. */
typedef union {
    unsigned char bytes[4096];
    void *pointer;
    uint64_t number;
    uint32_t word;
    size_t length;
    double real;
    fb_cache_config cache_config;
    fb_stats stats;
    fb_info info;
    fb_cache_footprint footprint;
    fb_sequence_length sequence_length;
    fb_retired retired;
    fb_choice choice;
    fb_trace_header trace_header;
    fb_planned planned;
    fb_weights_footprint weights_footprint;
    fb_layer_weights layer_weights;
    fb_links_event links_event;
    fb_dense_config dense_config;
    fb_dense_cache_footprint dense_footprint;
    fb_dense_cache_stats dense_stats;
    fb_dense_layer_view dense_view;
    fb_dense_step_tensors dense_tensors;
    fb_dense_sequence_length dense_length;
    fb_dense_found dense_found;
    fb_transfer_event transfer_event;
    fb_sent sent;
    fb_lag lag;
    fb_received received;
} answers;

/* One handle of each kind, and the arguments of calls. */
typedef struct {
    fb_device *device;
    fb_cache *cache;
    fb_ticket *ticket;
    fb_chooser *chooser;
    fb_trace *trace;
    fb_requests *requests;
    fb_selections *selections;
    fb_weights *weights;
    fb_links *links;
    fb_update *update;
    /* Other weights, because an update and a change of replicas exclude each other. */
    fb_weights *replicated;
    fb_replication *replication;
    fb_dense *dense;
    fb_dense_names *names;
    fb_sender *sender;
    fb_receiver *receiver;
    uint64_t dense_sequence;
    fb_step dense_step;
    uint64_t sequence;
    fb_step step;
    uint32_t ids[PAGE];
    uint32_t orders[LAYERS];
    int32_t selection[LANES * ENTRIES];
    double numbers[8];
    uint64_t blocks[2];
    answers out;
} world;

static const char CALLS_TRACE[] = "calls.topk", CALLS_REQUESTS[] = "calls.jsonl", CALLS_NEW[] = "calls.new";

typedef enum { NO_HANDLE, DEVICE, CACHE, TICKET, CHOOSER, TRACE, REQUESTS, SELECTIONS,
               WEIGHTS, LINKS, UPDATE, REPLICATION, DENSE, NAMES, SENDER, RECEIVER, CAPTURED, KINDS } kind;

typedef struct {
    const char *name;
    kind on;
    /* The number of pointers that may not be NULL, without the handle. */
    uint32_t pointers;
    fb_status (*attempt)(world *w, void *handle, uint32_t null);
} call;

/* Returns pointer number `n`, or NULL in its place. */
#define P(n, pointer) (null == (n) ? NULL : (pointer))
/* Returns the struct that a call fills, with its size set. */
#define FILL(field) (w->out.field.size = sizeof w->out.field, &w->out.field)
#define TRY(name) static fb_status try_##name(world *w, void *handle, uint32_t null)
#define UNUSED ((void)w, (void)handle, (void)null)

static inline fb_prices calls_prices(world *w) {
    fb_prices prices = {w->numbers, 1, 1, w->numbers + 1, 3, 0};
    return prices;
}

static inline uint32_t calls_enqueue(void *data, const fb_engine_call *made, void *stream) {
    (void)data;
    (void)made;
    (void)stream;
    return FB_INTERNAL;
}

static inline void calls_work(void *data) {
    memset(data, 0, 1);
}

TRY(error_text) { return fb_error_text(handle, P(1, (char *)w->out.bytes), 16); }
TRY(device_create) {
    fb_device_config config = SIZED(fb_device_config);
    UNUSED;
    return fb_device_create(P(1, &config), NULL, 0, P(2, (fb_device **)&w->out.pointer));
}
TRY(device_destroy) { return UNUSED, fb_device_destroy(handle); }
TRY(stream_create) { return fb_stream_create(handle, P(1, &w->out.pointer)); }
TRY(stream_borrow) { return UNUSED, fb_stream_borrow(handle, NULL); }
TRY(stream_return) { return UNUSED, fb_stream_return(handle, NULL); }
TRY(stream_wait) { return UNUSED, fb_stream_wait(handle, NULL); }
TRY(stream_order) { return UNUSED, fb_stream_order(handle, NULL, NULL); }
TRY(stream_call) { return fb_stream_call(handle, NULL, P(1, calls_work), w->out.bytes); }
TRY(stream_mark) { return fb_stream_mark(handle, NULL, P(1, (uint32_t *)w->out.bytes)); }
TRY(device_allocate) { return fb_device_allocate(handle, 64, P(1, &w->out.pointer)); }

TRY(preset) { return UNUSED, fb_preset(P(1, "glm-5"), NULL, 0, P(2, FILL(cache_config))); }
TRY(footprint) {
    fb_cache_config config = declared();
    UNUSED;
    return fb_footprint(P(1, &config), NULL, 0, P(2, FILL(footprint)));
}
TRY(cache_create) {
    fb_cache_config config = declared();
    return fb_cache_create(handle, P(1, &config), NULL, 0, P(2, (fb_cache **)&w->out.pointer));
}
TRY(cache_destroy) { return UNUSED, fb_cache_destroy(handle); }
TRY(cache_stats) { return fb_cache_stats(handle, P(1, FILL(stats))); }
TRY(cache_info) { return fb_cache_info(handle, P(1, FILL(info))); }
TRY(cache_fallback) { return UNUSED, fb_cache_fallback(handle, 1000, (char *)w->out.bytes, 16); }
TRY(cache_reap) { return UNUSED, fb_cache_reap(handle, NULL, NULL); }
TRY(cache_validate) { return UNUSED, fb_cache_validate(handle); }
TRY(slab) { return fb_slab(handle, 0, P(1, &w->out.pointer), P(2, (uint64_t *)(w->out.bytes + 64))); }
TRY(rows) { return fb_rows(handle, 0, P(1, &w->out.pointer), P(2, (uint64_t *)(w->out.bytes + 64))); }
TRY(index_keys) { return fb_index_keys(handle, 0, P(1, &w->out.pointer), P(2, (uint64_t *)(w->out.bytes + 64))); }

TRY(open) {
    fb_open_config config = opening(10, 10);
    return fb_open(handle, P(1, &config), P(2, &w->out.number));
}
TRY(append) { return fb_append(handle, w->sequence, 0, P(1, w->selection), 1); }
TRY(append_in_place) { return UNUSED, fb_append_in_place(handle, w->sequence, 1000); }
TRY(join) { return UNUSED, fb_join(handle, w->sequence, NULL, NULL, NULL); }
TRY(join_more) { return UNUSED, fb_join_more(handle, w->sequence, NULL, NULL); }
TRY(fork) {
    fb_open_config config = opening(0, 10);
    return fb_fork(handle, w->sequence, P(1, &config), NULL, P(2, &w->out.number), NULL);
}
TRY(extend) { return UNUSED, fb_extend(handle, w->sequence, 40, 8); }
TRY(park) { return UNUSED, fb_park(handle, w->sequence, 0, NULL); }
TRY(resume) { return UNUSED, fb_resume(handle, w->sequence, 0, NULL, NULL); }
TRY(truncate) { return UNUSED, fb_truncate(handle, w->sequence, 1000, NULL, NULL); }
TRY(close) { return UNUSED, fb_close(handle, w->sequence + 1, NULL); }
TRY(length) { return fb_length(handle, w->sequence, P(1, FILL(sequence_length))); }
TRY(pages) { return fb_pages(handle, w->sequence, P(1, (fb_page *)w->out.bytes), 4, P(2, &w->out.word + 100)); }
TRY(landing_slot) { return fb_landing_slot(handle, w->sequence, 0, P(1, &w->out.word)); }
TRY(read_row) { return fb_read_row(handle, w->sequence, 0, 0, P(1, w->out.bytes), ROW); }
TRY(resize) {
    fb_budget budget = SIZED(fb_budget);
    budget.slots = 1;
    return fb_resize(handle, w->sequence, P(1, &budget), NULL);
}
TRY(budgets) { return fb_budgets(handle, w->sequence, P(1, &w->out.word), LAYERS); }
TRY(share_slots) { return UNUSED, fb_share_slots(handle, NULL, NULL); }
TRY(budgets_digest) { return fb_budgets_digest(handle, P(1, &w->out.number)); }
TRY(digest) { return fb_digest(handle, w->sequence, P(1, &w->out.number)); }

static inline fb_tokens calls_tokens(world *w) {
    fb_tokens tokens = SIZED(fb_tokens);
    tokens.ids = w->ids;
    tokens.count = PAGE;
    return tokens;
}
TRY(open_shared) {
    fb_open_config config = opening(PAGE, 10);
    fb_tokens tokens = calls_tokens(w);
    return fb_open_shared(handle, P(1, &config), P(2, &tokens), P(3, "salt"), 4, P(4, &w->out.number),
                          P(5, &w->out.word + 100));
}
TRY(find_shared) {
    fb_tokens tokens = calls_tokens(w);
    tokens.ids = P(4, tokens.ids);
    return fb_find_shared(handle, P(1, &tokens), P(2, "salt"), 4, P(3, &w->out.word));
}
TRY(publish) {
    fb_tokens tokens = calls_tokens(w);
    return fb_publish(handle, w->sequence, 0, P(1, &tokens), P(2, &w->out.word));
}

TRY(ticket_outcome) { return fb_ticket_outcome(handle, P(1, &w->out.word), NULL); }
TRY(ticket_destroy) { return UNUSED, fb_ticket_destroy(handle); }

TRY(prepare) {
    fb_batch_row row = {w->sequence, 0, 1};
    fb_step_config config = SIZED(fb_step_config);
    config.rows = P(3, &row);
    config.row_count = 1;
    config.query_rows = 1;
    return fb_prepare(handle, P(1, &config), NULL, P(2, &w->out.number));
}
TRY(layer) { return fb_layer(handle, w->step, 0, P(1, w->selection), P(2, (int32_t *)w->out.bytes), NULL); }
TRY(layers) { return fb_layers(handle, w->step, P(1, w->selection), P(2, (int32_t *)w->out.bytes), NULL); }
TRY(resolve) {
    fb_step_range range = SIZED(fb_step_range);
    fb_buffers buffers = SIZED(fb_buffers);
    buffers.selection = P(3, w->selection);
    buffers.slots = P(4, (int32_t *)w->out.bytes);
    return fb_resolve(handle, w->step, P(1, &range), P(2, &buffers), NULL);
}
TRY(gather) {
    fb_step_range range = SIZED(fb_step_range);
    range.layer = LAYERS;
    return UNUSED, fb_gather(handle, w->step, P(1, &range), 0, NULL);
}
TRY(scatter) { return UNUSED, fb_scatter(handle, w->step, LAYERS, NULL); }
TRY(scatter_range) {
    fb_step_range range = SIZED(fb_step_range);
    range.layer = LAYERS;
    return fb_scatter_range(handle, w->step, P(1, &range), NULL);
}
TRY(finish) { return UNUSED, fb_finish(handle, w->step + 1, NULL); }
TRY(abandon) { return UNUSED, fb_abandon(handle, w->step + 1); }
TRY(retire) { return UNUSED, fb_retire(handle, P(1, &w->out.number), NULL, NULL); }
TRY(retired_counts) {
    return fb_retired_counts(handle, P(1, (fb_layer_count *)w->out.bytes), LAYERS, P(2, &w->out.word + 100));
}
TRY(retired_lengths) { return fb_retired_lengths(handle, P(1, &w->out.word), 4, P(2, &w->out.word + 100)); }

static inline fb_overlap_config calls_layers(world *w) {
    fb_overlap_config layers = SIZED(fb_overlap_config);
    layers.selection = w->selection;
    layers.slots = (int32_t *)w->out.bytes;
    layers.batch = 1;
    return layers;
}
static inline fb_engine calls_engine(void) {
    fb_engine engine = SIZED(fb_engine);
    engine.enqueue = calls_enqueue;
    return engine;
}
TRY(overlap) {
    fb_overlap_config layers = calls_layers(w);
    fb_engine engine = calls_engine();
    engine.enqueue = P(5, engine.enqueue);
    layers.selection = P(3, layers.selection);
    layers.slots = P(4, layers.slots);
    return fb_overlap(handle, w->step, 0, 0, FB_OVERLAP_NONE, P(1, &layers), P(2, &engine));
}
TRY(overlap_steps) {
    fb_overlap_config layers = calls_layers(w);
    fb_engine engine = calls_engine();
    return fb_overlap_steps(handle, P(1, &w->step), P(2, &layers), 1, P(3, w->orders), 0, P(4, &engine));
}
static inline fb_capture_config calls_capture(world *w, const fb_overlap_config *layers) {
    fb_capture_config config = SIZED(fb_capture_config);
    config.micro_batches = layers;
    config.by_layer = w->orders;
    config.count = 1;
    config.query_rows = 1;
    return config;
}
TRY(capture) {
    fb_overlap_config layers = calls_layers(w);
    fb_capture_config config = calls_capture(w, P(4, &layers));
    fb_engine engine = calls_engine();
    config.by_layer = P(5, config.by_layer);
    return fb_capture(handle, P(1, &config), P(2, &engine), P(3, (fb_captured **)&w->out.pointer));
}
TRY(capture_into) {
    fb_overlap_config layers = calls_layers(w);
    fb_capture_config config = calls_capture(w, &layers);
    fb_engine engine = calls_engine();
    return fb_capture_into(handle, P(1, &config), P(2, &engine), P(3, (fb_captured **)&w->out.pointer));
}
/* A host device has nothing captured: the second handle is NULL or of another kind. */
TRY(launch) { return fb_launch(handle, P(1, (const fb_captured *)(void *)w->device), P(2, &w->step), 1); }
TRY(launched) { return fb_launched(handle, P(1, (const fb_captured *)(void *)w->device), P(2, &w->step), 1); }
TRY(captured_destroy) { return UNUSED, fb_captured_destroy(handle); }

TRY(table_from_text) {
    UNUSED;
    return fb_table_from_text(P(1, "forebay overlap table 1\nversion 1\nlayers 1\n0 da\n"), NULL, 0,
                              P(2, &w->out.word), P(3, &w->out.word + 50), 1, P(4, &w->out.word + 100));
}
TRY(table_to_text) {
    fb_table table = {1, LAYERS, P(3, w->orders)};
    UNUSED;
    return fb_table_to_text(P(1, &table), NULL, 0, (char *)w->out.bytes + 64, 16, P(2, &w->out.length));
}
TRY(table_best) {
    fb_prices prices = calls_prices(w);
    UNUSED;
    prices.misses = P(4, prices.misses);
    prices.exposed = P(5, prices.exposed);
    return fb_table_best(P(1, &prices), P(2, w->numbers), 1, NULL, 0, P(3, &w->out.word));
}
TRY(chooser_create) {
    fb_table table = {1, LAYERS, P(5, w->orders)};
    fb_bucket bucket = {1, 1, P(4, &table), calls_prices(w)};
    fb_chooser_config config = SIZED(fb_chooser_config);
    UNUSED;
    config.buckets = P(3, &bucket);
    config.bucket_count = 1;
    config.tables_max = 1;
    return fb_chooser_create(P(1, &config), NULL, 0, P(2, (fb_chooser **)&w->out.pointer));
}
TRY(choose) {
    fb_layer_count counts[LAYERS];
    memset(counts, 0, sizeof counts);
    return fb_choose(handle, P(1, counts), LAYERS, 1, 1, P(2, FILL(choice)));
}
TRY(chooser_table) {
    return fb_chooser_table(handle, 0, 0, P(1, &w->out.word), LAYERS, P(2, &w->out.word + 50),
                            P(3, &w->out.word + 100));
}
TRY(chooser_destroy) { return UNUSED, fb_chooser_destroy(handle); }

TRY(trace_create) {
    fb_trace_config config = SIZED(fb_trace_config);
    UNUSED;
    config.layers = 1;
    config.k = 1;
    return fb_trace_create(P(1, CALLS_NEW), P(2, &config), NULL, 0, P(3, (fb_trace **)&w->out.pointer));
}
TRY(trace_record) { return fb_trace_record(handle, 4, P(1, w->selection), LAYERS); }
TRY(trace_flush) { return UNUSED, fb_trace_flush(handle); }
TRY(trace_sync) { return UNUSED, fb_trace_sync(handle); }
TRY(trace_finish) { return UNUSED, fb_trace_finish(handle, NULL); }
TRY(trace_destroy) { return UNUSED, fb_trace_destroy(handle); }
TRY(requests_create) {
    UNUSED;
    return fb_requests_create(P(1, CALLS_NEW), 16, NULL, 0, P(2, (fb_requests **)&w->out.pointer));
}
TRY(requests_record) {
    fb_arrival arrival = SIZED(fb_arrival);
    arrival.input_tokens = 32;
    arrival.blocks = P(2, w->blocks);
    arrival.block_count = 2;
    return fb_requests_record(handle, P(1, &arrival));
}
TRY(requests_flush) { return UNUSED, fb_requests_flush(handle); }
TRY(requests_sync) { return UNUSED, fb_requests_sync(handle); }
TRY(requests_finish) { return UNUSED, fb_requests_finish(handle, NULL); }
TRY(requests_destroy) { return UNUSED, fb_requests_destroy(handle); }
TRY(selections_open) {
    UNUSED;
    return fb_selections_open(P(1, CALLS_TRACE), NULL, 0, P(2, (fb_selections **)&w->out.pointer));
}
TRY(selections_header) { return fb_selections_header(handle, P(1, FILL(trace_header))); }
TRY(selections_text) { return UNUSED, fb_selections_text(handle, 1000, (char *)w->out.bytes, 16); }
TRY(selections_layer_ids) {
    return fb_selections_layer_ids(handle, P(1, &w->out.word), LAYERS, P(2, &w->out.word + 100));
}
TRY(selections_read) { return fb_selections_read(handle, 0, 1, P(1, (int32_t *)w->out.bytes)); }
TRY(selections_destroy) { return UNUSED, fb_selections_destroy(handle); }

TRY(plan) {
    fb_cache_config model = SIZED(fb_cache_config);
    fb_plan_config config = SIZED(fb_plan_config);
    UNUSED;
    (void)fb_preset("glm-5", NULL, 0, &model);
    config.model = P(3, &model);
    config.gpu = 1ull << 40;
    config.context = 10000;
    return fb_plan(P(1, &config), NULL, 0, P(2, FILL(planned)));
}

/* Weights of one rank: two layers of one tensor, of which it keeps all. */
static const char CALLS_TENSOR[] = "o_proj";
enum { CALLS_TENSOR_BYTES = 3000 };
static const unsigned char CALLS_BYTES[CALLS_TENSOR_BYTES];

typedef struct {
    fb_tensor tensors[2];
    const char *patterns[1];
    fb_weights_config config;
} calls_model;

static inline void calls_weights(calls_model *model) {
    fb_tensor tensor = SIZED(fb_tensor);
    fb_weights_config config = SIZED(fb_weights_config);
    tensor.name = CALLS_TENSOR;
    tensor.bytes = CALLS_TENSOR_BYTES;
    for (uint32_t layer = 0; layer < 2; layer++) {
        model->tensors[layer] = tensor;
        model->tensors[layer].layer = layer;
    }
    model->patterns[0] = CALLS_TENSOR;
    config.tensors = model->tensors;
    config.tensor_count = 2;
    config.patterns = model->patterns;
    config.pattern_count = 1;
    config.layers = 2;
    config.ranks = 1;
    model->config = config;
}

TRY(weights_plan) {
    calls_model model;
    calls_weights(&model);
    model.config.tensors = P(3, model.config.tensors);
    model.config.patterns = P(4, model.config.patterns);
    model.tensors[1].name = P(5, model.tensors[1].name);
    model.patterns[0] = P(6, model.patterns[0]);
    return fb_weights_plan(handle, P(1, &model.config), NULL, 0, P(2, FILL(weights_footprint)));
}
TRY(weights_create) {
    calls_model model;
    calls_weights(&model);
    return fb_weights_create(handle, P(1, &model.config), NULL, 0, P(2, (fb_weights **)&w->out.pointer));
}
TRY(weights_destroy) { return UNUSED, fb_weights_destroy(handle); }
TRY(weights_fill) {
    UNUSED;
    return fb_weights_fill(handle, 0, P(1, CALLS_TENSOR), P(2, CALLS_BYTES), CALLS_TENSOR_BYTES, NULL);
}
TRY(weights_verify) { return UNUSED, fb_weights_verify(handle, 0, NULL); }
TRY(weights_layer) { return fb_weights_layer(handle, 0, P(1, FILL(layer_weights))); }
TRY(weights_tensor) {
    return fb_weights_tensor(handle, 0, P(1, CALLS_TENSOR), P(2, &w->out.pointer),
                             P(3, (uint64_t *)(w->out.bytes + 64)));
}
TRY(weights_bytes) { return fb_weights_bytes(handle, P(1, &w->out.number)); }
TRY(weights_make_resident) { return UNUSED, fb_weights_make_resident(handle, 0, NULL); }
TRY(weights_make_sharded) { return UNUSED, fb_weights_make_sharded(handle, 0); }
TRY(weights_shrink) { return UNUSED, fb_weights_shrink(handle, 1ull << 40, NULL); }
TRY(weights_grow) { return UNUSED, fb_weights_grow(handle, 0, NULL, NULL); }
TRY(weights_begin) { return UNUSED, fb_weights_begin(handle, 1, 0); }
TRY(weights_enter) { return UNUSED, fb_weights_enter(handle, 0, 0, NULL); }
TRY(weights_leave) { return UNUSED, fb_weights_leave(handle, 0, 0, NULL); }
TRY(weights_advance) { return UNUSED, fb_weights_advance(handle, NULL); }
TRY(weights_end) { return UNUSED, fb_weights_end(handle, NULL); }
TRY(weights_abandon) { return UNUSED, fb_weights_abandon(handle); }
static inline uint32_t calls_launch(void *data, void *stream) {
    (void)data;
    (void)stream;
    return FB_INTERNAL;
}
TRY(weights_launch) { return UNUSED, fb_weights_launch(handle, NULL, P(1, calls_launch), NULL); }
TRY(weights_lost) { return UNUSED, fb_weights_lost(handle, 7); }
static inline fb_links_config calls_links(void) {
    fb_links_config config = SIZED(fb_links_config);
    config.folder = ".";
    return config;
}
TRY(links_meet) {
    fb_links_config config = calls_links();
    config.folder = P(3, config.folder);
    return fb_links_meet(handle, P(1, &config), NULL, P(2, (fb_links **)&w->out.pointer));
}
TRY(weights_share) { return fb_weights_share(handle, P(1, w->links), NULL, 0); }
TRY(weights_reattach) { return fb_weights_reattach(handle, P(1, w->links), 7, 0); }
TRY(links_poll) { return fb_links_poll(handle, 0, NULL, 0, P(1, FILL(links_event))); }
TRY(links_readmit) { return fb_links_readmit(handle, 0, P(1, FILL(links_event))); }
TRY(links_end) { return UNUSED, fb_links_end(handle); }
TRY(links_destroy) { return UNUSED, fb_links_destroy(handle); }
TRY(update_create) {
    const uint32_t layer = 0;
    return fb_update_create(handle, 2, P(1, &layer), 1, 1ull << 30, P(2, (fb_update **)&w->out.pointer));
}
TRY(update_fill) {
    UNUSED;
    return fb_update_fill(handle, 0, P(1, CALLS_TENSOR), P(2, CALLS_BYTES), CALLS_TENSOR_BYTES, NULL);
}
TRY(update_share) { return fb_update_share(handle, P(1, w->links), NULL, 0); }
TRY(update_verify) { return UNUSED, fb_update_verify(handle, 0, NULL); }
TRY(update_destroy) { return UNUSED, fb_update_destroy(handle); }
TRY(weights_commit) {
    /* Written with an error too: nothing was decided. */
    uint32_t outcome = UINT32_MAX;
    fb_status found = fb_weights_commit(handle, P(1, w->update), P(2, w->links), 1, NULL, 0, P(3, &outcome), NULL, 0);
    CHECK(outcome == (null == 3 ? UINT32_MAX : FB_UPDATE_OPEN));
    return found;
}

TRY(replication_create) {
    const fb_replica replica = {P(3, CALLS_TENSOR), 0, 0};
    return fb_replication_create(handle, 2, P(1, &replica), 1, 1ull << 30, P(2, (fb_replication **)&w->out.pointer));
}
TRY(replication_advance) { return (void)null, fb_replication_advance(handle, 1, NULL, &w->out.number); }
TRY(replication_left) { return fb_replication_left(handle, P(1, &w->out.number)); }
TRY(replication_share) { return fb_replication_share(handle, P(1, w->links), NULL, 0); }
TRY(replication_abort) { return UNUSED, fb_replication_abort(handle); }
TRY(replication_destroy) { return UNUSED, fb_replication_destroy(handle); }
TRY(weights_commit_replicas) {
    uint32_t outcome = UINT32_MAX;
    fb_status found = fb_weights_commit_replicas(handle, P(1, w->replication), P(2, w->links), 1, NULL, 0,
                                                 P(3, &outcome), NULL, 0);
    CHECK(outcome == (null == 3 ? UINT32_MAX : FB_UPDATE_OPEN));
    return found;
}
TRY(weights_replicas) {
    return fb_weights_replicas(handle, P(1, (fb_replica *)(w->out.bytes + 64)), 4, P(2, &w->out.word));
}
TRY(weights_drop_replicas) { return UNUSED, fb_weights_drop_replicas(handle); }
TRY(weights_reroute) { return UNUSED, fb_weights_reroute(handle); }

#include "calls_arrive.h"
#include "calls_dense.h"
#include "calls_transfer.h"

#define CALL(name, on, pointers) \
    { "fb_" #name, on, pointers, try_##name }

static const call CALLS[] = {
    CALL(device_create, NO_HANDLE, 2), CALL(stream_create, DEVICE, 1), CALL(stream_borrow, DEVICE, 0),
    CALL(stream_return, DEVICE, 0), CALL(stream_wait, DEVICE, 0), CALL(stream_order, DEVICE, 0),
    CALL(stream_call, DEVICE, 1),
    CALL(stream_mark, DEVICE, 1),
    CALL(device_allocate, DEVICE, 1), CALL(device_destroy, DEVICE, 0), CALL(preset, NO_HANDLE, 2),
    CALL(footprint, NO_HANDLE, 2), CALL(cache_create, DEVICE, 2), CALL(cache_stats, CACHE, 1),
    CALL(cache_info, CACHE, 1), CALL(cache_fallback, CACHE, 0), CALL(cache_reap, CACHE, 0),
    CALL(cache_validate, CACHE, 0), CALL(slab, CACHE, 2), CALL(rows, CACHE, 2), CALL(index_keys, CACHE, 2),
    CALL(cache_destroy, CACHE, 0),
    CALL(open, CACHE, 2), CALL(append, CACHE, 1), CALL(append_in_place, CACHE, 0), CALL(join, CACHE, 0),
    CALL(join_more, CACHE, 0), CALL(fork, CACHE, 2), CALL(truncate, CACHE, 0), CALL(close, CACHE, 0),
    CALL(extend, CACHE, 0), CALL(park, CACHE, 0), CALL(resume, CACHE, 0), CALL(arrive, CACHE, 2),
    CALL(arrive_shared, CACHE, 5), CALL(append_layer_in_place, CACHE, 0), CALL(place_index_keys, CACHE, 1),
    CALL(index_keys_in_place, CACHE, 0), CALL(join_early, CACHE, 0), CALL(warm_layer, CACHE, 0),
    CALL(abort, CACHE, 0), CALL(release, CACHE, 0),
    CALL(length, CACHE, 1), CALL(pages, CACHE, 2), CALL(landing_slot, CACHE, 1), CALL(read_row, CACHE, 1),
    CALL(digest, CACHE, 1), CALL(resize, CACHE, 1), CALL(budgets, CACHE, 1), CALL(share_slots, CACHE, 0),
    CALL(budgets_digest, CACHE, 1), CALL(open_shared, CACHE, 5), CALL(find_shared, CACHE, 4),
    CALL(publish, CACHE, 2),
    CALL(ticket_outcome, TICKET, 1), CALL(ticket_destroy, TICKET, 0), CALL(prepare, CACHE, 3), CALL(layer, CACHE, 2),
    CALL(layers, CACHE, 2), CALL(resolve, CACHE, 4), CALL(gather, CACHE, 1), CALL(scatter, CACHE, 0),
    CALL(scatter_range, CACHE, 1), CALL(finish, CACHE, 0), CALL(abandon, CACHE, 0), CALL(retire, CACHE, 1),
    CALL(retired_counts, CACHE, 2), CALL(retired_lengths, CACHE, 2), CALL(overlap, CACHE, 5),
    CALL(overlap_steps, CACHE, 4),
    CALL(capture, CACHE, 5), CALL(capture_into, CACHE, 3), CALL(launch, CACHE, 2), CALL(launched, CACHE, 2),
    CALL(captured_destroy, CAPTURED, 0), CALL(table_from_text, NO_HANDLE, 4), CALL(table_to_text, NO_HANDLE, 3),
    CALL(table_best, NO_HANDLE, 5), CALL(chooser_create, NO_HANDLE, 5), CALL(choose, CHOOSER, 2),
    CALL(chooser_table, CHOOSER, 3), CALL(chooser_destroy, CHOOSER, 0), CALL(trace_create, NO_HANDLE, 3),
    CALL(trace_record, TRACE, 1), CALL(trace_flush, TRACE, 0), CALL(trace_sync, TRACE, 0),
    CALL(trace_finish, TRACE, 0), CALL(trace_destroy, TRACE, 0), CALL(requests_create, NO_HANDLE, 2),
    CALL(requests_record, REQUESTS, 2), CALL(requests_flush, REQUESTS, 0), CALL(requests_sync, REQUESTS, 0),
    CALL(requests_finish, REQUESTS, 0), CALL(requests_destroy, REQUESTS, 0), CALL(selections_open, NO_HANDLE, 2),
    CALL(selections_header, SELECTIONS, 1), CALL(selections_text, SELECTIONS, 0),
    CALL(selections_layer_ids, SELECTIONS, 2), CALL(selections_read, SELECTIONS, 1),
    CALL(selections_destroy, SELECTIONS, 0), CALL(plan, NO_HANDLE, 3), CALL(weights_plan, DEVICE, 6),
    CALL(weights_create, DEVICE, 2), CALL(weights_fill, WEIGHTS, 2), CALL(weights_verify, WEIGHTS, 0),
    CALL(weights_layer, WEIGHTS, 1), CALL(weights_tensor, WEIGHTS, 3), CALL(weights_bytes, WEIGHTS, 1),
    CALL(weights_make_resident, WEIGHTS, 0), CALL(weights_make_sharded, WEIGHTS, 0), CALL(weights_shrink, WEIGHTS, 0),
    CALL(weights_grow, WEIGHTS, 0), CALL(weights_begin, WEIGHTS, 0), CALL(weights_enter, WEIGHTS, 0),
    CALL(weights_leave, WEIGHTS, 0), CALL(weights_advance, WEIGHTS, 0), CALL(weights_end, WEIGHTS, 0),
    CALL(weights_abandon, WEIGHTS, 0), CALL(weights_launch, WEIGHTS, 1), CALL(weights_lost, WEIGHTS, 0),
    CALL(links_meet, WEIGHTS, 3), CALL(weights_share, WEIGHTS, 1), CALL(weights_reattach, WEIGHTS, 1),
    CALL(weights_commit, WEIGHTS, 3), CALL(weights_destroy, WEIGHTS, 0), CALL(links_poll, LINKS, 1),
    CALL(links_readmit, LINKS, 1), CALL(links_end, LINKS, 0), CALL(links_destroy, LINKS, 0),
    CALL(update_create, WEIGHTS, 2), CALL(update_fill, UPDATE, 2), CALL(update_share, UPDATE, 1),
    CALL(update_verify, UPDATE, 0), CALL(update_destroy, UPDATE, 0), CALL(replication_create, WEIGHTS, 3),
    CALL(replication_advance, REPLICATION, 0), CALL(replication_left, REPLICATION, 1),
    CALL(replication_share, REPLICATION, 1), CALL(replication_abort, REPLICATION, 0),
    CALL(replication_destroy, REPLICATION, 0), CALL(weights_commit_replicas, WEIGHTS, 3),
    CALL(weights_replicas, WEIGHTS, 2), CALL(weights_drop_replicas, WEIGHTS, 0), CALL(weights_reroute, WEIGHTS, 0),
    CALL(dense_preset, NO_HANDLE, 3), CALL(dense_pages_for, NO_HANDLE, 3), CALL(dense_footprint, NO_HANDLE, 3),
    CALL(dense_create, DEVICE, 3), CALL(dense_stats, DENSE, 1), CALL(dense_planes, DENSE, 2),
    CALL(dense_view, DENSE, 1), CALL(dense_tensors, DENSE, 1), CALL(dense_reap, DENSE, 0),
    CALL(dense_validate, DENSE, 0), CALL(dense_fallback, DENSE, 0), CALL(dense_destroy, DENSE, 0),
    CALL(dense_open, DENSE, 1), CALL(dense_extend, DENSE, 0), CALL(dense_fork, DENSE, 1),
    CALL(dense_truncate, DENSE, 0), CALL(dense_park, DENSE, 0), CALL(dense_resume, DENSE, 0),
    CALL(dense_length, DENSE, 1), CALL(dense_pages, DENSE, 2),
    CALL(dense_arrive, DENSE, 1), CALL(dense_arrive_shared, DENSE, 3), CALL(dense_find_arriving, DENSE, 2),
    CALL(dense_host_view, DENSE, 1), CALL(dense_host_pages, DENSE, 2), CALL(dense_store, DENSE, 1),
    CALL(dense_append_layer_in_place, DENSE, 0), CALL(dense_bring_layer, DENSE, 0), CALL(dense_join, DENSE, 0),
    CALL(dense_abort, DENSE, 0), CALL(dense_release, DENSE, 0),
    CALL(dense_close, DENSE, 0), CALL(dense_names_create, DENSE, 4), CALL(dense_names_destroy, NAMES, 0),
    CALL(dense_find, DENSE, 2), CALL(dense_open_shared, DENSE, 3), CALL(dense_publish, DENSE, 2),
    CALL(dense_save, DENSE, 1), CALL(dense_prepare, DENSE, 2), CALL(dense_finish, DENSE, 0),
    CALL(dense_arrived, DENSE, 0), CALL(dense_abandon, DENSE, 0), CALL(dense_retire, DENSE, 2),
    CALL(transfer_plan, NO_HANDLE, 3), CALL(sender_create, NO_HANDLE, 4), CALL(sender_memory, SENDER, 2),
    CALL(sender_fallback, SENDER, 0), CALL(sender_add, SENDER, 1), CALL(sender_remove, SENDER, 1),
    CALL(sender_begin, SENDER, 0), CALL(sender_computed, SENDER, 1), CALL(sender_payload, SENDER, 1),
    CALL(sender_finish, SENDER, 0), CALL(sender_abort, SENDER, 0), CALL(sender_poll, SENDER, 1),
    CALL(sender_descriptor, SENDER, 1), CALL(sender_stats, SENDER, 1), CALL(sender_lag, SENDER, 1),
    CALL(sender_end, SENDER, 0), CALL(sender_destroy, SENDER, 0),
    CALL(receiver_create, NO_HANDLE, 4), CALL(receiver_address, RECEIVER, 1),
    CALL(receiver_grant, RECEIVER, 2), CALL(receiver_abort, RECEIVER, 0), CALL(receiver_poll, RECEIVER, 1),
    CALL(receiver_payload, RECEIVER, 1), CALL(receiver_descriptor, RECEIVER, 1), CALL(receiver_stats, RECEIVER, 1),
    CALL(receiver_destroy, RECEIVER, 0),
    CALL(error_text, KINDS, 0),
};
enum { CALL_COUNT = sizeof CALLS / sizeof CALLS[0] };

static inline void *handle_of(const world *w, kind of) {
    void *handles[KINDS] = {NULL, w->device, w->cache, w->ticket, w->chooser, w->trace, w->requests, w->selections,
                            w->weights, w->links, w->update, w->replication, w->dense, w->names, w->sender, w->receiver,
                            NULL};
    return of < KINDS ? handles[of] : NULL;
}

/* Makes a call that must fail: the status is `wanted`, and nothing is written. */
static inline void refused(world *w, const call *made, void *handle, uint32_t null, fb_status wanted) {
    answers before;
    memset(&w->out, 0x5a, sizeof w->out);
    fb_status found = made->attempt(w, handle, null);
    if (found != wanted) {
        fprintf(stderr, "%s, pointer %u: %s\n", made->name, (unsigned)null, fb_status_text(found));
    }
    CHECK(found == wanted);
    /* The size that the caller states is still there. */
    memset(&before, 0x5a, sizeof before);
    memcpy(&before, &w->out, sizeof(size_t));
    CHECK(memcmp(&before, &w->out, sizeof before) == 0);
    size_t size = 0;
    memcpy(&size, &w->out, sizeof size);
    CHECK(size == 0x5a5a5a5a5a5a5a5a || size <= sizeof w->out);
}

#include "calls_world.h"

#endif
