/* The sizes that structs state: the library accepts those of older and newer callers and rejects nonsense. It reads
 * and writes no byte after the stated size. Each struct is in memory of exactly the size that it states. */

#include "calls.h"

/* A struct that a call takes, with its size as of the header. */
typedef struct {
    const char *name;
    size_t size;
    /* The library fills it. */
    int is_answer;
    /* The last required field of an older version: everything before it is required. */
    size_t required;
    fb_status (*attempt)(world *w, void *with);
    /* A valid one. */
    void (*fill)(world *w, void *with);
} sized;

static void fill_cache_config(world *w, void *with) {
    (void)w;
    *(fb_cache_config *)with = declared();
}
static void fill_open(world *w, void *with) {
    (void)w;
    *(fb_open_config *)with = opening(10, 10);
}
static void fill_budget(world *w, void *with) {
    fb_budget budget = SIZED(fb_budget);
    (void)w;
    budget.slots = SLOTS;
    *(fb_budget *)with = budget;
}
static fb_batch_row the_row;
static void fill_step(world *w, void *with) {
    fb_step_config config = SIZED(fb_step_config);
    the_row.sequence = w->sequence;
    the_row.query_rows = 1;
    config.rows = &the_row;
    config.row_count = 1;
    config.query_rows = 1;
    *(fb_step_config *)with = config;
}
static void fill_device(world *w, void *with) {
    (void)w;
    memset(with, 0, sizeof(fb_device_config));
}
static void fill_tokens(world *w, void *with) { *(fb_tokens *)with = calls_tokens(w); }
static void fill_range(world *w, void *with) {
    (void)w;
    memset(with, 0, sizeof(fb_step_range));
}
static void fill_plan(world *w, void *with) {
    static fb_cache_config model;
    fb_plan_config config = SIZED(fb_plan_config);
    (void)w;
    model = (fb_cache_config)SIZED(fb_cache_config);
    (void)fb_preset("glm-5", NULL, 0, &model);
    config.model = &model;
    config.gpu = 1ull << 40;
    config.context = 10000;
    *(fb_plan_config *)with = config;
}
static calls_model the_model;
static void fill_weights(world *w, void *with) {
    (void)w;
    calls_weights(&the_model);
    *(fb_weights_config *)with = the_model.config;
}
static void fill_transfer_side(world *w, void *with) { (void)w, *(fb_transfer_side *)with = calls_side(); }
static void fill_transfer_config(world *w, void *with) { (void)w, *(fb_transfer_config *)with = calls_end(1, NULL); }
static void fill_send_memory(world *w, void *with) { (void)w, *(fb_send_memory *)with = calls_memory(); }
static void fill_wanted(world *w, void *with) { (void)w, *(fb_wanted *)with = calls_wanted(); }
static void fill_nothing(world *w, void *with) {
    (void)w;
    (void)with;
}

static fb_status try_cache(world *w, void *with) {
    fb_cache *cache = NULL;
    fb_status status = fb_cache_create(w->device, (const fb_cache_config *)with, NULL, 0, &cache);
    CHECK((status == FB_OK) == (cache != NULL));
    return status == FB_OK ? fb_cache_destroy(cache) : status;
}
static fb_status try_sequence(world *w, void *with) {
    uint64_t sequence = 0;
    fb_status status = fb_open(w->cache, (const fb_open_config *)with, &sequence);
    CHECK((status == FB_OK) == (sequence != 0));
    return status == FB_OK ? fb_close(w->cache, sequence, NULL) : status;
}
static fb_status try_budget(world *w, void *with) {
    return fb_resize(w->cache, w->sequence, (const fb_budget *)with, NULL);
}
static fb_status try_step(world *w, void *with) {
    fb_step step = 0;
    fb_status status = fb_prepare(w->cache, (const fb_step_config *)with, NULL, &step);
    CHECK((status == FB_OK) == (step != 0));
    if (status == FB_OK) {
        OK(w->cache, fb_abandon(w->cache, step));
        OK(w->cache, fb_finish(w->cache, step, NULL));
        IS(FB_CANCELLED, fb_retire(w->cache, &step, NULL, NULL));
        OK(w->cache, fb_truncate(w->cache, w->sequence, 40, NULL, NULL));
    }
    return status;
}
static fb_status try_device(world *w, void *with) {
    fb_device *device = NULL;
    (void)w;
    fb_status status = fb_device_create((const fb_device_config *)with, NULL, 0, &device);
    CHECK((status == FB_OK) == (device != NULL));
    return status == FB_OK ? fb_device_destroy(device) : status;
}
static fb_status try_tokens(world *w, void *with) {
    uint32_t shared = 0;
    return fb_find_shared(w->cache, (const fb_tokens *)with, NULL, 0, &shared);
}
static fb_status try_range(world *w, void *with) {
    story of;
    memset(&of, 0, sizeof of);
    of.sequence = w->sequence;
    fb_step step = begin_step(w->cache, &of, 1, 1, NULL);
    fb_status status = fb_scatter_range(w->cache, step, (const fb_step_range *)with, NULL);
    rest_of_step(w->cache, step, 0, NULL);
    OK(w->cache, fb_finish(w->cache, step, NULL));
    OK(w->cache, fb_retire(w->cache, &step, NULL, NULL));
    return status;
}
static fb_status try_planning(world *w, void *with) {
    fb_planned planned = SIZED(fb_planned);
    (void)w;
    return fb_plan((const fb_plan_config *)with, NULL, 0, &planned);
}
static fb_status try_weights(world *w, void *with) {
    fb_weights_footprint footprint = SIZED(fb_weights_footprint);
    return fb_weights_plan(w->device, (const fb_weights_config *)with, NULL, 0, &footprint);
}
static fb_status try_weights_footprint(world *w, void *with) {
    calls_model model;
    calls_weights(&model);
    return fb_weights_plan(w->device, &model.config, NULL, 0, (fb_weights_footprint *)with);
}
static fb_status try_layer_weights(world *w, void *with) {
    return fb_weights_layer(w->weights, 0, (fb_layer_weights *)with);
}
static fb_status try_links_event(world *w, void *with) {
    return fb_links_poll(w->links, 0, NULL, 0, (fb_links_event *)with);
}
static void fill_dense(world *w, void *with) {
    (void)w;
    *(fb_dense_config *)with = dense_declared();
}
static fb_status try_sized_dense(world *w, void *with) {
    fb_dense *dense = NULL;
    fb_status status = fb_dense_create(w->device, (const fb_dense_config *)with, NULL, 0, &dense);
    CHECK((status == FB_OK) == (dense != NULL));
    return status == FB_OK ? fb_dense_destroy(dense) : status;
}
static fb_status try_sized_dense_footprint(world *w, void *with) {
    fb_dense_config config = dense_declared();
    (void)w;
    return fb_dense_footprint(&config, NULL, 0, (fb_dense_cache_footprint *)with);
}
static fb_status try_sized_dense_stats(world *w, void *with) {
    return fb_dense_stats(w->dense, (fb_dense_cache_stats *)with);
}
static fb_status try_sized_dense_view(world *w, void *with) {
    return fb_dense_view(w->dense, 1, 1, (fb_dense_layer_view *)with);
}
static fb_status try_sized_dense_tensors(world *w, void *with) {
    return fb_dense_tensors(w->dense, 0, (fb_dense_step_tensors *)with);
}
static fb_status try_sized_dense_length(world *w, void *with) {
    return fb_dense_length(w->dense, w->dense_sequence, (fb_dense_sequence_length *)with);
}
static fb_status try_sized_dense_found(world *w, void *with) {
    return fb_dense_find(w->dense, w->names, (fb_dense_found *)with);
}
static fb_status sending(const void *config, const void *side, const void *memory) {
    fb_sender *sender = NULL;
    fb_status status = fb_sender_create((const fb_transfer_config *)config, (const fb_transfer_side *)side,
                                        (const fb_send_memory *)memory, NULL, 0, &sender);
    CHECK((status == FB_OK) == (sender != NULL));
    return status == FB_OK ? fb_sender_destroy(sender) : status;
}
static fb_status try_transfer_config(world *w, void *with) {
    fb_transfer_side side = calls_side();
    fb_send_memory memory = calls_memory();
    (void)w;
    return sending(with, &side, &memory);
}
static fb_status try_transfer_side(world *w, void *with) {
    fb_transfer_config config = calls_end(1, NULL);
    fb_send_memory memory = calls_memory();
    (void)w;
    return sending(&config, with, &memory);
}
static fb_status try_send_memory(world *w, void *with) {
    fb_transfer_config config = calls_end(1, NULL);
    fb_transfer_side side = calls_side();
    (void)w;
    return sending(&config, &side, with);
}
static fb_status try_computed(world *w, void *with) {
    return fb_sender_computed(w->sender, (const fb_computed *)with, 1);
}
static fb_status try_wanted(world *w, void *with) {
    fb_transfer_event event = SIZED(fb_transfer_event);
    fb_status status = fb_receiver_grant(w->receiver, (const fb_wanted *)with, CALLS_PAGES, TRANSFER_PAGES);
    /* There is no such sender. The pages are free again when that is said. */
    while (status == FB_OK && event.kind != FB_TRANSFER_FAILED)
        CHECK(fb_receiver_poll(w->receiver, 1000, NULL, 0, &event) == FB_OK);
    return status;
}
static fb_status try_transfer_event(world *w, void *with) {
    return fb_sender_poll(w->sender, 0, NULL, 0, (fb_transfer_event *)with);
}
static fb_status try_sent(world *w, void *with) { return fb_sender_stats(w->sender, (fb_sent *)with); }
static fb_status try_lag(world *w, void *with) { return fb_sender_lag(w->sender, 0, (fb_lag *)with); }
static fb_status try_received(world *w, void *with) { return fb_receiver_stats(w->receiver, (fb_received *)with); }
static fb_status try_stats(world *w, void *with) { return fb_cache_stats(w->cache, (fb_stats *)with); }
static fb_status try_info(world *w, void *with) { return fb_cache_info(w->cache, (fb_info *)with); }
static fb_status try_sequence_length(world *w, void *with) {
    return fb_length(w->cache, w->sequence, (fb_sequence_length *)with);
}

static const sized STRUCTS[] = {
    {"fb_device_config", sizeof(fb_device_config), 0, offsetof(fb_device_config, number), try_device, fill_device},
    {"fb_cache_config", sizeof(fb_cache_config), 0, offsetof(fb_cache_config, host_stride), try_cache,
     fill_cache_config},
    {"fb_open_config", sizeof(fb_open_config), 0, offsetof(fb_open_config, slots), try_sequence, fill_open},
    {"fb_budget", sizeof(fb_budget), 0, sizeof(fb_budget), try_budget, fill_budget},
    {"fb_tokens", sizeof(fb_tokens), 0, offsetof(fb_tokens, key_count), try_tokens, fill_tokens},
    {"fb_step_config", sizeof(fb_step_config), 0, offsetof(fb_step_config, accepted), try_step, fill_step},
    {"fb_step_range", sizeof(fb_step_range), 0, offsetof(fb_step_range, first), try_range, fill_range},
    {"fb_plan_config", sizeof(fb_plan_config), 0, offsetof(fb_plan_config, batch), try_planning, fill_plan},
    {"fb_weights_config", sizeof(fb_weights_config), 0, offsetof(fb_weights_config, source), try_weights, fill_weights},
    {"fb_weights_footprint", sizeof(fb_weights_footprint), 1, 0, try_weights_footprint, fill_nothing},
    {"fb_layer_weights", sizeof(fb_layer_weights), 1, offsetof(fb_layer_weights, reserved), try_layer_weights,
     fill_nothing},
    {"fb_links_event", sizeof(fb_links_event), 1, 0, try_links_event, fill_nothing},
    {"fb_dense_config", sizeof(fb_dense_config), 0, offsetof(fb_dense_config, layout), try_sized_dense, fill_dense},
    {"fb_dense_cache_footprint", sizeof(fb_dense_cache_footprint), 1, 0, try_sized_dense_footprint, fill_nothing},
    {"fb_dense_cache_stats", sizeof(fb_dense_cache_stats), 1, 0, try_sized_dense_stats, fill_nothing},
    {"fb_dense_layer_view", sizeof(fb_dense_layer_view), 1, 0, try_sized_dense_view, fill_nothing},
    {"fb_dense_step_tensors", sizeof(fb_dense_step_tensors), 1, 0, try_sized_dense_tensors, fill_nothing},
    {"fb_dense_sequence_length", sizeof(fb_dense_sequence_length), 1, offsetof(fb_dense_sequence_length, arriving),
     try_sized_dense_length, fill_nothing},
    {"fb_dense_found", sizeof(fb_dense_found), 1, 0, try_sized_dense_found, fill_nothing},
    {"fb_stats", sizeof(fb_stats), 1, offsetof(fb_stats, slots_in_use), try_stats, fill_nothing},
    {"fb_info", sizeof(fb_info), 1, 0, try_info, fill_nothing},
    {"fb_sequence_length", sizeof(fb_sequence_length), 1, offsetof(fb_sequence_length, parked), try_sequence_length,
     fill_nothing},
    {"fb_transfer_config", sizeof(fb_transfer_config), 0, offsetof(fb_transfer_config, token), try_transfer_config,
     fill_transfer_config},
    {"fb_transfer_side", sizeof(fb_transfer_side), 0, offsetof(fb_transfer_side, stages), try_transfer_side,
     fill_transfer_side},
    {"fb_send_memory", sizeof(fb_send_memory), 0, offsetof(fb_send_memory, memory), try_send_memory, fill_send_memory},
    {"fb_computed", sizeof(fb_computed), 0, offsetof(fb_computed, chunk_slice), try_computed, fill_nothing},
    {"fb_wanted", sizeof(fb_wanted), 0, offsetof(fb_wanted, first), try_wanted, fill_wanted},
    {"fb_transfer_event", sizeof(fb_transfer_event), 1, offsetof(fb_transfer_event, reserved), try_transfer_event,
     fill_nothing},
    {"fb_sent", sizeof(fb_sent), 1, 0, try_sent, fill_nothing},
    {"fb_lag", sizeof(fb_lag), 1, 0, try_lag, fill_nothing},
    {"fb_received", sizeof(fb_received), 1, 0, try_received, fill_nothing},
};
enum { STRUCT_COUNT = sizeof STRUCTS / sizeof STRUCTS[0] };

/* Makes the call with a struct in memory of `bytes` bytes that states `stated`; byte `set`, if any, is not zero. */
static fb_status with_size(world *w, const sized *of, size_t bytes, size_t stated, size_t set) {
    unsigned char *with = (unsigned char *)calloc(1, bytes);
    uint64_t whole[64] = {0};
    CHECK(with != NULL && of->size <= sizeof whole);
    of->fill(w, whole);
    memcpy(with, whole, bytes < of->size ? bytes : of->size);
    memcpy(with, &stated, bytes < sizeof stated ? bytes : sizeof stated);
    if (set != 0) {
        with[set] = 1;
    }
    fb_status status = of->attempt(w, with);
    free(with);
    return status;
}

static void newer_callers(world *w, const sized *of) {
    IS(FB_OK, with_size(w, of, of->size, of->size, 0));
    IS(FB_OK, with_size(w, of, of->size + 8, of->size + 8, 0));
    IS(FB_OK, with_size(w, of, of->size + 120, of->size + 120, 0));
    if (!of->is_answer) {
        IS(FB_INVALID_CONFIG, with_size(w, of, of->size + 8, of->size + 8, of->size));
        IS(FB_INVALID_CONFIG, with_size(w, of, of->size + 8, of->size + 8, of->size + 7));
    }
}

static void older_callers(world *w, const sized *of) {
    if (of->required != 0) {
        IS(FB_OK, with_size(w, of, of->required, of->required, 0));
        IS(FB_INVALID_CONFIG, with_size(w, of, of->required - 4, of->required - 4, 0));
    }
    IS(FB_INVALID_CONFIG, with_size(w, of, 8, 8, 0));
}

/* Sizes that no version has: the library may read only the size itself. */
static void nonsense(world *w, const sized *of) {
    const size_t sizes[] = {0, 1, 7, SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 40, 0x5a5a5a5a};
    for (size_t index = 0; index < sizeof sizes / sizeof sizes[0]; index++) {
        IS(FB_INVALID_CONFIG, with_size(w, of, 8, sizes[index], 0));
    }
}

/* A newer caller's result: the library zeroes the part that it has no field for, and writes nothing after it. */
static void zeroed(world *w) {
    struct {
        fb_sequence_length known;
        uint64_t later[2];
        uint64_t behind;
    } answer;
    memset(&answer, 0x5a, sizeof answer);
    answer.known.size = sizeof answer.known + sizeof answer.later;
    OK(w->cache, fb_length(w->cache, w->sequence, &answer.known));
    CHECK(answer.known.committed == 40 && answer.later[0] == 0 && answer.later[1] == 0);
    CHECK(answer.behind == 0x5a5a5a5a5a5a5a5a);
    CHECK(answer.known.size == sizeof answer.known + sizeof answer.later);
}

int main(void) {
    world *w = (world *)calloc(1, sizeof *w);
    CHECK(w != NULL);
    make_world(w);
    fb_step step = w->step;
    rest_of_step(w->cache, step, 0, NULL);
    OK(w->cache, fb_finish(w->cache, step, NULL));
    OK(w->cache, fb_retire(w->cache, &step, NULL, NULL));
    for (uint32_t index = 0; index < STRUCT_COUNT; index++) {
        newer_callers(w, &STRUCTS[index]);
        older_callers(w, &STRUCTS[index]);
        nonsense(w, &STRUCTS[index]);
    }
    zeroed(w);
    story of;
    memset(&of, 0, sizeof of);
    of.sequence = w->sequence;
    w->step = begin_step(w->cache, &of, 1, 1, NULL);
    end_world(w);
    free(w);
    return checked();
}
