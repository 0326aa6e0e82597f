/* Devices, their streams, and their memory. */

#include "check.h"

static void kinds(void) {
    fb_device_config config = SIZED(fb_device_config);
    fb_device *device = NULL;
    char text[256] = "untouched";
    config.kind = 99;
    IS(FB_INVALID_CONFIG, fb_device_create(&config, text, sizeof text, &device));
    CHECK(device == NULL && strstr(text, "kind") != NULL);
    memcpy(text, "untouched", 10);
    config.kind = FB_DEVICE_HOST;
    IS(FB_OK, fb_device_create(&config, text, sizeof text, &device));
    CHECK(device != NULL && strcmp(text, "untouched") == 0);
    OK(device, fb_device_destroy(device));
    IS(FB_CLOSED, fb_device_destroy(device));
}

/* The library loads no driver until a program wants CUDA; a missing driver is one clear error. */
static void without_a_driver(void) {
    fb_device_config config = SIZED(fb_device_config);
    fb_device *device = NULL;
    char text[256] = "";
    config.kind = FB_DEVICE_CUDA;
    config.library = "libno-such-driver.so.1";
    fb_status status = fb_device_create(&config, text, sizeof text, &device);
    CHECK(status != FB_OK && status != FB_INTERNAL && device == NULL && text[0] != 0);
}

static void add(void *data) {
    int *sum = (int *)data;
    *sum = *sum * 10 + 1;
}

static void streams_of(uint32_t kind) {
    fb_device *device = device_of(kind);
    void *stream = NULL, *second = NULL;
    int sum = 0;
    OK(device, fb_stream_create(device, &stream));
    OK(device, fb_stream_create(device, &second));
    CHECK(stream != NULL && second != NULL && stream != second);
    for (int call = 0; call < 4; call++) {
        OK(device, fb_stream_call(device, stream, add, &sum));
    }
    OK(device, fb_stream_wait(device, stream));
    CHECK(sum == 1111);
    /* NULL is the host device's first stream. */
    OK(device, fb_stream_call(device, NULL, add, &sum));
    OK(device, fb_stream_wait(device, NULL));
    CHECK(sum == 11111);
    uint32_t mark = 0;
    OK(device, fb_stream_mark(device, second, &mark));
    OK(device, fb_stream_wait(device, second));
    CHECK(mark == 1);
    IS(FB_OUT_OF_RANGE, fb_stream_call(device, &sum, add, &sum));
    IS(FB_OUT_OF_RANGE, fb_stream_wait(device, &sum));
    CHECK(sum == 11111);
    OK(device, fb_device_destroy(device));
}

static void memory(void) {
    fb_device_config config = SIZED(fb_device_config);
    fb_device *device = NULL;
    void *address = NULL, *kept = NULL;
    config.kind = FB_DEVICE_HOST;
    config.memory = 1 << 20;
    IS(FB_OK, fb_device_create(&config, NULL, 0, &device));
    OK(device, fb_device_allocate(device, 4096, &address));
    CHECK(address != NULL);
    memset(address, 0x5a, 4096);
    IS(FB_OUT_OF_MEMORY, fb_device_allocate(device, 2 << 20, &kept));
    CHECK(kept == NULL);
    OK(device, fb_device_destroy(device));
}

/* A device outlives its caches. */
static void in_use(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    fb_cache *second = cache_of(device, &config);
    IS(FB_BUSY, fb_device_destroy(device));
    OK(cache, fb_cache_destroy(cache));
    IS(FB_BUSY, fb_device_destroy(device));
    OK(second, fb_cache_destroy(second));
    OK(device, fb_device_destroy(device));
}

int main(void) {
    kinds();
    without_a_driver();
    streams_of(FB_DEVICE_HOST);
    streams_of(FB_DEVICE_HOST_THREADS);
    memory();
    in_use();
    return checked();
}
