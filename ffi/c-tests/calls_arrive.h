/* The attempts of calls.h at the calls of sequences that arrive. Only calls.h includes this file. */

#ifndef FB_CALLS_ARRIVE_H
#define FB_CALLS_ARRIVE_H

TRY(arrive) {
    fb_open_config config = opening(10, 10);
    return fb_arrive(handle, P(1, &config), P(2, &w->out.number));
}
TRY(arrive_shared) {
    fb_open_config config = opening(PAGE, 10);
    fb_tokens tokens = calls_tokens(w);
    return fb_arrive_shared(handle, P(1, &config), P(2, &tokens), P(3, "salt"), 4, P(4, &w->out.number),
                            P(5, &w->out.word + 100));
}
TRY(append_layer_in_place) { return UNUSED, fb_append_layer_in_place(handle, w->sequence, 0, 1000); }
TRY(place_index_keys) {
    return fb_place_index_keys(handle, w->sequence, 0, 0, P(1, w->selection), sizeof w->selection, NULL, NULL);
}
TRY(index_keys_in_place) { return UNUSED, fb_index_keys_in_place(handle, w->sequence, 0, 1000); }
TRY(join_early) { return UNUSED, fb_join_early(handle, w->sequence, NULL, NULL); }
TRY(warm_layer) { return UNUSED, fb_warm_layer(handle, w->sequence, 0, NULL, NULL, NULL); }
TRY(abort) { return UNUSED, fb_abort(handle, w->sequence + 1, NULL); }
TRY(release) { return UNUSED, fb_release(handle, w->sequence, NULL); }

#endif
