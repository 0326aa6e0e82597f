/* Statuses, versions and the texts of errors. */

#include "check.h"

static void versions(void) {
    CHECK(fb_abi_version() == FB_ABI_VERSION);
    CHECK(fb_version() != NULL && strchr(fb_version(), '.') != NULL);
}

static void texts(void) {
    CHECK(strcmp(fb_status_text(FB_OK), "ok") == 0);
    CHECK(strcmp(fb_status_text(FB_CLOSED), "closed") == 0);
    for (uint32_t status = FB_OK; status <= FB_CORRUPT; status++) {
        const char *text = fb_status_text(status);
        CHECK(text != NULL && text[0] != 0 && strcmp(text, "unknown status") != 0);
        for (uint32_t other = 0; other < status; other++) {
            CHECK(strcmp(text, fb_status_text(other)) != 0);
        }
    }
    CHECK(strcmp(fb_status_text(FB_CORRUPT + 1), "unknown status") == 0);
    CHECK(strcmp(fb_status_text(UINT32_MAX), "unknown status") == 0);
}

/* Each handle keeps the text of its own last failure, including that of a call through a const pointer. */
static void errors(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    fb_cache *other = cache_of(device, &config);
    uint32_t slot = 7;
    char text[512], cut[8];
    text[0] = 'x';
    OK(NULL, fb_error_text(cache, text, sizeof text));
    CHECK(text[0] == 0);
    IS(FB_CLOSED, fb_close(cache, 77, NULL));
    CHECK(says(cache, "closed") && !says(other, "closed") && !says(device, "closed"));
    IS(FB_CLOSED, fb_landing_slot(other, UINT64_MAX, 0, &slot));
    CHECK(slot == 7 && says(other, "closed"));
    IS(FB_OUT_OF_RANGE, fb_slab(cache, LAYERS, (void **)&text, (uint64_t *)(void *)cut));
    CHECK(says(cache, "layer") && !says(cache, "closed"));
    /* A successful call leaves the text. */
    (void)stats_of(cache);
    CHECK(says(cache, "layer"));
    OK(NULL, fb_error_text(cache, text, sizeof text));
    OK(NULL, fb_error_text(cache, cut, sizeof cut));
    CHECK(strlen(cut) == sizeof cut - 1 && strncmp(cut, text, sizeof cut - 1) == 0);
    memcpy(cut, "kept", 5);
    OK(NULL, fb_error_text(cache, cut, 0));
    CHECK(strcmp(cut, "kept") == 0);
    IS(FB_INVALID_CONFIG, fb_error_text(NULL, cut, sizeof cut));
    OK(other, fb_cache_destroy(other));
    IS(FB_CLOSED, fb_error_text(other, cut, sizeof cut));
    CHECK(strcmp(cut, "kept") == 0);
    end_all(device, cache);
}

int main(void) {
    versions();
    texts();
    errors();
    return checked();
}
