/* The attempts of calls.h at the calls of dense caches. Only calls.h includes this file. */

#ifndef FB_CALLS_DENSE_H
#define FB_CALLS_DENSE_H

enum { DENSE_LAYERS = 2, DENSE_PROMPT = 2 * PAGE };
static const uint32_t DENSE_LAYER_NUMBERS[DENSE_LAYERS] = {0, 1};

/* One group of two layers, with K and V. */
static inline fb_dense_config dense_declared(void) {
    fb_dense_config config = SIZED(fb_dense_config);
    config.groups[0].layers = DENSE_LAYER_NUMBERS;
    config.groups[0].layer_count = DENSE_LAYERS;
    config.groups[0].row_bytes[0] = ROW;
    config.groups[0].row_bytes[1] = ROW;
    config.group_count = 1;
    config.page_tokens = PAGE;
    config.sequences = LANES;
    config.max_tokens = MAX_TOKENS;
    config.query_rows = QUERY;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    return config;
}

TRY(dense_preset) {
    uint32_t layers[64];
    UNUSED;
    return fb_dense_preset(P(1, "qwen3-32b"), NULL, 0, P(2, layers), 64, P(3, FILL(dense_config)));
}
TRY(dense_pages_for) {
    fb_dense_config config = dense_declared();
    UNUSED;
    config.groups[0].layers = P(3, config.groups[0].layers);
    return fb_dense_pages_for(P(1, &config), 1, 10, NULL, 0, P(2, &w->out.word));
}
TRY(dense_footprint) {
    fb_dense_config config = dense_declared();
    UNUSED;
    config.groups[0].layers = P(3, config.groups[0].layers);
    return fb_dense_footprint(P(1, &config), NULL, 0, P(2, FILL(dense_footprint)));
}
TRY(dense_create) {
    fb_dense_config config = dense_declared();
    config.groups[0].layers = P(3, config.groups[0].layers);
    return fb_dense_create(handle, P(1, &config), NULL, 0, P(2, (fb_dense **)&w->out.pointer));
}
TRY(dense_destroy) { return UNUSED, fb_dense_destroy(handle); }
TRY(dense_stats) { return fb_dense_stats(handle, P(1, FILL(dense_stats))); }
TRY(dense_planes) {
    return fb_dense_planes(handle, 0, P(1, (fb_dense_plane *)w->out.bytes), 4, P(2, &w->out.word + 100));
}
TRY(dense_view) { return fb_dense_view(handle, 0, 0, P(1, FILL(dense_view))); }
TRY(dense_tensors) { return fb_dense_tensors(handle, 0, P(1, FILL(dense_tensors))); }
TRY(dense_reap) { return UNUSED, fb_dense_reap(handle, NULL, NULL); }
TRY(dense_validate) { return UNUSED, fb_dense_validate(handle); }
TRY(dense_fallback) { return UNUSED, fb_dense_fallback(handle, 1000, (char *)w->out.bytes, 16); }

TRY(dense_open) { return fb_dense_open(handle, 10, 10, P(1, &w->out.number)); }
TRY(dense_extend) { return UNUSED, fb_dense_extend(handle, w->dense_sequence, 40, 8); }
TRY(dense_fork) { return fb_dense_fork(handle, w->dense_sequence, 10, NULL, P(1, &w->out.number), NULL); }
TRY(dense_truncate) { return UNUSED, fb_dense_truncate(handle, w->dense_sequence, 1000, NULL, NULL); }
TRY(dense_park) { return UNUSED, fb_dense_park(handle, w->dense_sequence, 1000, NULL, NULL); }
TRY(dense_resume) { return UNUSED, fb_dense_resume(handle, w->dense_sequence, NULL, NULL); }
TRY(dense_length) { return fb_dense_length(handle, w->dense_sequence, P(1, FILL(dense_length))); }
TRY(dense_pages) {
    return fb_dense_pages(handle, w->dense_sequence, 0, P(1, &w->out.word), 4, P(2, &w->out.word + 100));
}
TRY(dense_close) { return UNUSED, fb_dense_close(handle, w->dense_sequence + 1, NULL); }

TRY(dense_arrive) { return fb_dense_arrive(handle, 10, 10, FB_DENSE_DIRECT, NULL, P(1, &w->out.number), NULL); }
TRY(dense_arrive_shared) {
    uint64_t sequence = 0;
    return fb_dense_arrive_shared(handle, DENSE_PROMPT, 10, P(1, w->names), FB_DENSE_DIRECT, NULL, P(2, &sequence),
                                  P(3, FILL(dense_found)), NULL);
}
TRY(dense_find_arriving) {
    return fb_dense_find_arriving(handle, P(1, w->names), DENSE_PROMPT, P(2, FILL(dense_found)));
}
TRY(dense_host_view) { return fb_dense_host_view(handle, 0, 0, P(1, FILL(dense_view))); }
TRY(dense_host_pages) {
    return fb_dense_host_pages(handle, w->dense_sequence, 0, P(1, (fb_dense_host_page *)w->out.bytes), 4,
                               P(2, &w->out.word + 100));
}
TRY(dense_store) { return fb_dense_store(handle, w->dense_sequence, 0, 0, 0, 0, P(1, w->selection), 16); }
TRY(dense_append_layer_in_place) { return UNUSED, fb_dense_append_layer_in_place(handle, w->dense_sequence, 0, 1); }
TRY(dense_bring_layer) { return UNUSED, fb_dense_bring_layer(handle, w->dense_sequence, 0, NULL); }
TRY(dense_join) { return UNUSED, fb_dense_join(handle, w->dense_sequence, NULL, NULL); }
TRY(dense_abort) { return UNUSED, fb_dense_abort(handle, w->dense_sequence, NULL); }
TRY(dense_release) { return UNUSED, fb_dense_release(handle, w->dense_sequence, NULL); }

TRY(dense_names_create) {
    fb_tokens tokens = calls_tokens(w);
    tokens.ids = P(4, tokens.ids);
    return fb_dense_names_create(handle, P(1, "salt"), 4, P(2, &tokens), P(3, (fb_dense_names **)&w->out.pointer));
}
TRY(dense_names_destroy) { return UNUSED, fb_dense_names_destroy(handle); }
TRY(dense_find) { return fb_dense_find(handle, P(1, w->names), P(2, FILL(dense_found))); }
TRY(dense_open_shared) {
    uint64_t sequence = 0;
    return fb_dense_open_shared(handle, DENSE_PROMPT, 10, P(1, w->names), NULL, P(2, &sequence),
                                P(3, FILL(dense_found)), NULL);
}
TRY(dense_publish) {
    fb_tokens tokens = calls_tokens(w);
    return fb_dense_publish(handle, w->dense_sequence, 0, P(1, &tokens), P(2, &w->out.word));
}
TRY(dense_save) { return fb_dense_save(handle, NULL, 0, P(1, &w->out.number)); }

TRY(dense_prepare) {
    fb_batch_row row = {w->dense_sequence, 0, 1};
    return fb_dense_prepare(handle, 0, P(1, &row), 1, NULL, NULL, P(2, &w->out.number));
}
TRY(dense_finish) { return UNUSED, fb_dense_finish(handle, w->dense_step + 1, NULL); }
TRY(dense_arrived) { return UNUSED, fb_dense_arrived(handle, w->dense_step, 1000, NULL); }
TRY(dense_abandon) { return UNUSED, fb_dense_abandon(handle, w->dense_step + 1); }
TRY(dense_retire) {
    uint32_t lengths[1];
    return fb_dense_retire(handle, P(1, &w->out.number), NULL, P(2, lengths), 1, NULL);
}

/* A dense cache with a sequence, an open step of it, and the names of a prompt. */
static inline void make_dense(world *w) {
    fb_dense_config config = dense_declared();
    fb_tokens tokens = calls_tokens(w);
    char text[256] = "";
    IS(FB_OK, fb_dense_create(w->device, &config, text, sizeof text, &w->dense));
    OK(w->dense, fb_dense_names_create(w->dense, "salt", 4, &tokens, &w->names));
    OK(w->dense, fb_dense_open(w->dense, DENSE_PROMPT, 10, &w->dense_sequence));
    fb_batch_row row = {w->dense_sequence, 0, DENSE_PROMPT};
    OK(w->dense, fb_dense_prepare(w->dense, 0, &row, 1, NULL, NULL, &w->dense_step));
}

/* Ends all of it. */
static inline void end_dense(world *w) {
    fb_step step = w->dense_step;
    OK(w->dense, fb_dense_finish(w->dense, step, NULL));
    OK(w->dense, fb_dense_retire(w->dense, &step, NULL, NULL, 0, NULL));
    OK(w->dense, fb_dense_close(w->dense, w->dense_sequence, NULL));
    OK(w->names, fb_dense_names_destroy(w->names));
    OK(w->dense, fb_dense_validate(w->dense));
    OK(w->dense, fb_dense_destroy(w->dense));
}

#endif
