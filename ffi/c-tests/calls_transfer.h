/* The calls of a transfer's sender and receiver, for the tests that make every call of the header. */

#ifndef CALLS_TRANSFER_H
#define CALLS_TRANSFER_H

enum { TRANSFER_ROW = 64, TRANSFER_PAGE = 16, TRANSFER_PAGES = 2 };

static const fb_transfer_component CALLS_COMPONENT = {"rows", "bytes", 1, TRANSFER_ROW};
static const fb_transfer_place CALLS_PLACE = {0, 0, 0, 0, 0, TRANSFER_ROW, TRANSFER_ROW};
static const uint64_t CALLS_PAGE_BYTES = TRANSFER_ROW * TRANSFER_PAGE;
static const fb_send_plane CALLS_SEND_PLANE = {0, TRANSFER_ROW * TRANSFER_PAGE};
static unsigned char calls_pages[TRANSFER_PAGES * TRANSFER_ROW * TRANSFER_PAGE];
static const fb_receive_plane CALLS_RECEIVE_PLANE = {calls_pages, sizeof calls_pages, TRANSFER_ROW * TRANSFER_PAGE};
static const uint32_t CALLS_PAGES[] = {1, 0};

static inline fb_transfer_side calls_side(void) {
    fb_transfer_side side = SIZED(fb_transfer_side);
    side.components = &CALLS_COMPONENT;
    side.places = &CALLS_PLACE;
    side.page_bytes = &CALLS_PAGE_BYTES;
    side.component_count = side.place_count = side.plane_count = 1;
    side.page_tokens = TRANSFER_PAGE;
    return side;
}

static inline fb_transfer_config calls_end(uint64_t instance, const char *address) {
    fb_transfer_config config = SIZED(fb_transfer_config);
    config.instance = instance;
    config.fabric = FB_TRANSFER_TCP;
    config.address = address;
    return config;
}

static inline fb_send_memory calls_memory(void) {
    fb_send_memory memory = SIZED(fb_send_memory);
    memory.bytes = sizeof calls_pages;
    memory.planes = &CALLS_SEND_PLANE;
    memory.plane_count = 1;
    memory.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    return memory;
}

/* Of an instance that is not there, in a use of its own. */
static inline fb_wanted calls_wanted(void) {
    static uint64_t generation;
    fb_wanted wanted = SIZED(fb_wanted);
    wanted.generation = ++generation;
    wanted.instance = 9;
    wanted.tokens = TRANSFER_PAGES * TRANSFER_PAGE;
    return wanted;
}

TRY(transfer_plan) {
    fb_transfer_side side = calls_side();
    UNUSED;
    return fb_transfer_plan(P(1, &side), P(2, &side), 1, NULL, 0, P(3, &w->out.number));
}
TRY(sender_create) {
    fb_transfer_config config = calls_end(1, NULL);
    fb_transfer_side side = calls_side();
    fb_send_memory memory = calls_memory();
    UNUSED;
    return fb_sender_create(P(1, &config), P(2, &side), P(3, &memory), NULL, 0, P(4, (fb_sender **)&w->out.pointer));
}
TRY(sender_memory) {
    return fb_sender_memory(handle, P(1, &w->out.pointer), P(2, (uint64_t *)(w->out.bytes + 64)));
}
TRY(sender_fallback) { return (void)null, fb_sender_fallback(handle, 0, (char *)w->out.bytes, 16); }
TRY(sender_add) { return (void)w, fb_sender_add(handle, P(1, "127.0.0.1:1")); }
TRY(sender_remove) { return (void)w, fb_sender_remove(handle, P(1, "127.0.0.1:1")); }
TRY(sender_begin) { return UNUSED, fb_sender_begin(handle, 1, 1, 0); }
TRY(sender_computed) {
    fb_computed part = SIZED(fb_computed);
    (void)w;
    return fb_sender_computed(handle, P(1, &part), 1);
}
TRY(sender_payload) { return (void)w, fb_sender_payload(handle, 1, 1, P(1, calls_pages), 1); }
TRY(sender_finish) { return UNUSED, fb_sender_finish(handle, 1); }
TRY(sender_abort) { return UNUSED, fb_sender_abort(handle, 1); }
TRY(sender_poll) { return fb_sender_poll(handle, 0, NULL, 0, P(1, FILL(transfer_event))); }
TRY(sender_descriptor) { return fb_sender_descriptor(handle, P(1, (int32_t *)w->out.bytes)); }
TRY(sender_stats) { return fb_sender_stats(handle, P(1, FILL(sent))); }
TRY(sender_lag) { return fb_sender_lag(handle, 0, P(1, FILL(lag))); }
TRY(sender_end) { return UNUSED, fb_sender_end(handle); }
TRY(sender_destroy) { return UNUSED, fb_sender_destroy(handle); }

TRY(receiver_create) {
    fb_transfer_config config = calls_end(2, "127.0.0.1:0");
    fb_transfer_side side = calls_side();
    UNUSED;
    return fb_receiver_create(P(1, &config), P(2, &side), P(3, &CALLS_RECEIVE_PLANE), 1, NULL, 0,
                              P(4, (fb_receiver **)&w->out.pointer));
}
TRY(receiver_address) { return fb_receiver_address(handle, P(1, (char *)w->out.bytes), 64); }
TRY(receiver_grant) {
    fb_wanted wanted = calls_wanted();
    (void)w;
    return fb_receiver_grant(handle, P(1, &wanted), P(2, CALLS_PAGES), TRANSFER_PAGES);
}
TRY(receiver_abort) { return UNUSED, fb_receiver_abort(handle, 1, 1); }
TRY(receiver_poll) { return fb_receiver_poll(handle, 0, NULL, 0, P(1, FILL(transfer_event))); }
TRY(receiver_payload) { return fb_receiver_payload(handle, 1, 1, 1, P(1, (uint8_t *)w->out.bytes), 16); }
TRY(receiver_descriptor) { return fb_receiver_descriptor(handle, P(1, (int32_t *)w->out.bytes)); }
TRY(receiver_stats) { return fb_receiver_stats(handle, P(1, FILL(received))); }
TRY(receiver_destroy) { return UNUSED, fb_receiver_destroy(handle); }

/* Two ends that do not meet. */
static inline void make_transfer(world *w) {
    fb_transfer_side side = calls_side();
    fb_send_memory memory = calls_memory();
    fb_transfer_config sends = calls_end(1, NULL), receives = calls_end(2, "127.0.0.1:0");
    IS(FB_OK, fb_sender_create(&sends, &side, &memory, NULL, 0, &w->sender));
    IS(FB_OK, fb_receiver_create(&receives, &side, &CALLS_RECEIVE_PLANE, 1, NULL, 0, &w->receiver));
}

static inline void end_transfer(world *w) {
    OK(w->sender, fb_sender_destroy(w->sender));
    OK(w->receiver, fb_receiver_destroy(w->receiver));
}

#endif
