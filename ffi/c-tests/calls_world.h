/* A world with one object of each kind, for the tests that make every call of the header. */

#ifndef CALLS_WORLD_H
#define CALLS_WORLD_H

static inline void make_files(world *w) {
    fb_trace_config config = SIZED(fb_trace_config);
    (void)remove(CALLS_TRACE);
    (void)remove(CALLS_REQUESTS);
    config.layers = LAYERS;
    config.k = 1;
    config.first_position = 4;
    config.decode_start = 4;
    IS(FB_OK, fb_trace_create(CALLS_TRACE, &config, NULL, 0, &w->trace));
    OK(w->trace, fb_trace_record(w->trace, 4, w->selection, LAYERS));
    OK(w->trace, fb_trace_flush(w->trace));
    IS(FB_OK, fb_selections_open(CALLS_TRACE, NULL, 0, &w->selections));
    IS(FB_OK, fb_requests_create(CALLS_REQUESTS, 16, NULL, 0, &w->requests));
}

/* Weights of one rank that were shared, and its sessions, of which there are none. */
static inline void share_weights(fb_device *device, fb_weights **weights, fb_links **sessions) {
    calls_model model;
    fb_links_config links = calls_links();
    char text[256] = "";
    calls_weights(&model);
    /* Two worlds at once are two groups. */
    static uint64_t group;
    model.config.group = ++group;
    IS(FB_OK, fb_weights_create(device, &model.config, text, sizeof text, weights));
    for (uint32_t at = 0; at < 2; at++) {
        OK(*weights, fb_weights_fill(*weights, at, CALLS_TENSOR, CALLS_BYTES, CALLS_TENSOR_BYTES, NULL));
    }
    OK(*weights, fb_links_meet(*weights, &links, NULL, sessions));
    OK(*weights, fb_weights_share(*weights, *sessions, NULL, 1000));
}

/* An update that is being filled, and a change of the replicas, of which one rank has none. */
static inline void make_weights(world *w) {
    const uint32_t layer = 0;
    fb_links *sessions = NULL;
    share_weights(w->device, &w->replicated, &sessions);
    OK(w->replicated, fb_replication_create(w->replicated, 1, NULL, 0, 1ull << 30, &w->replication));
    OK(sessions, fb_links_destroy(sessions));
    share_weights(w->device, &w->weights, &w->links);
    OK(w->weights, fb_update_create(w->weights, 1, &layer, 1, 1ull << 30, &w->update));
}

/* A world with one of everything, including a joined sequence and an open step. */
static inline void make_world(world *w) {
    story of;
    fb_cache_config config = declared();
    memset(w, 0, sizeof *w);
    w->device = device_of(FB_DEVICE_HOST);
    w->cache = cache_of(w->device, &config);
    open_story(w->cache, &of, 40, NULL);
    w->sequence = of.sequence;
    OK(w->cache, fb_truncate(w->cache, w->sequence, 40, NULL, &w->ticket));
    memset(w->selection, 0, sizeof w->selection);
    fb_prices prices = calls_prices(w);
    fb_table table = {1, LAYERS, w->orders};
    double exposed[3] = {0, 0, 0};
    prices.exposed = exposed;
    fb_bucket bucket = {4, 1, &table, prices};
    fb_chooser_config chooser = SIZED(fb_chooser_config);
    chooser.buckets = &bucket;
    chooser.bucket_count = 1;
    chooser.tables_max = 1;
    IS(FB_OK, fb_chooser_create(&chooser, NULL, 0, &w->chooser));
    make_files(w);
    make_weights(w);
    make_dense(w);
    make_transfer(w);
    w->step = begin_step(w->cache, &of, 1, 1, NULL);
}

/* All of it still works, and can be destroyed. */
static inline void end_world(world *w) {
    fb_step step = w->step;
    OK(w->cache, fb_abandon(w->cache, step));
    OK(w->cache, fb_finish(w->cache, step, NULL));
    IS(FB_CANCELLED, fb_retire(w->cache, &step, NULL, NULL));
    OK(w->cache, fb_close(w->cache, w->sequence, NULL));
    OK(w->ticket, fb_ticket_destroy(w->ticket));
    OK(w->chooser, fb_chooser_destroy(w->chooser));
    OK(w->trace, fb_trace_finish(w->trace, NULL));
    OK(w->trace, fb_trace_destroy(w->trace));
    OK(w->requests, fb_requests_destroy(w->requests));
    OK(w->selections, fb_selections_destroy(w->selections));
    OK(w->update, fb_update_destroy(w->update));
    OK(w->replication, fb_replication_destroy(w->replication));
    OK(w->replicated, fb_weights_destroy(w->replicated));
    OK(w->links, fb_links_destroy(w->links));
    OK(w->weights, fb_weights_destroy(w->weights));
    end_dense(w);
    end_transfer(w);
    end_all(w->device, w->cache);
    (void)remove(CALLS_TRACE);
    (void)remove(CALLS_REQUESTS);
}

#endif
