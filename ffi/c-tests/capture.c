/* Captured layers need a device with graphs: on the host each call says so, and the cache goes on. */

#include "check.h"

static uint32_t enqueue(void *data, const fb_engine_call *call, void *stream) {
    (void)data;
    (void)call;
    (void)stream;
    return FB_OK;
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    int32_t selection[LANES * PICKS], slots[LANES * PICKS];
    uint32_t by_layer[LAYERS] = {FB_OVERLAP_NONE, FB_OVERLAP_NONE, FB_OVERLAP_NONE};
    fb_overlap_config bucket = SIZED(fb_overlap_config);
    bucket.selection = selection;
    bucket.slots = slots;
    bucket.batch = LANES;
    fb_capture_config capture = SIZED(fb_capture_config);
    capture.micro_batches = &bucket;
    capture.by_layer = by_layer;
    capture.count = 1;
    capture.query_rows = QUERY;
    fb_engine engine = SIZED(fb_engine);
    engine.enqueue = enqueue;
    fb_captured *captured = NULL;
    IS(FB_INVALID_CONFIG, fb_capture(cache, &capture, &engine, &captured));
    CHECK(captured == NULL && says(cache, "captur"));
    IS(FB_INVALID_CONFIG, fb_capture_into(cache, &capture, &engine, &captured));
    CHECK(captured == NULL);
    story of;
    open_story(cache, &of, 40, NULL);
    fb_step step = begin_step(cache, &of, 1, QUERY, NULL);
    IS(FB_INVALID_CONFIG, fb_launch(cache, NULL, &step, 1));
    IS(FB_INVALID_CONFIG, fb_launched(cache, NULL, &step, 1));
    IS(FB_INVALID_CONFIG, fb_captured_destroy(NULL));
    rest_of_step(cache, step, 0, NULL);
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    of.accepted = 1;
    decode_step(cache, &of, 1, 3, 1);
    OK(cache, fb_close(cache, of.sequence, NULL));
    end_all(device, cache);
    return checked();
}
