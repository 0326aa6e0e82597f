/* Budgets that change between steps: sequences that share the slots of a pool, and what a resize refuses. */

#include "check.h"

enum { LEAST = 8, POOL = 256, PROMPT = 150 };

static fb_cache *elastic(fb_device *device) {
    fb_cache_config config = declared();
    config.min_budget = LEAST;
    config.pool_slots = POOL;
    return cache_of(device, &config);
}

static fb_budget slots_of(uint32_t slots) {
    fb_budget budget = SIZED(fb_budget);
    budget.slots = slots;
    return budget;
}

static void resize(fb_cache *cache, const story *of, uint32_t slots) {
    fb_budget budget = slots_of(slots);
    OK(cache, fb_resize(cache, of->sequence, &budget, NULL));
    OK(cache, fb_cache_validate(cache));
}

static void has(const fb_cache *cache, const story *of, uint32_t first, uint32_t second, uint32_t third) {
    const uint32_t wanted[LAYERS] = {first, second, third};
    uint32_t slots[LAYERS + 1] = {0, 0, 0, 77};
    OK(cache, fb_budgets(cache, of->sequence, slots, LAYERS));
    CHECK(memcmp(slots, wanted, sizeof wanted) == 0 && slots[LAYERS] == 77);
}

/* A lone sequence has all slots. Another one arrives, and both have a part; it ends, and the first one has all again.
 * Every step reads the rows that were written last. */
static void slots_shared(fb_device *device) {
    fb_cache *cache = elastic(device);
    story of[2];
    open_story(cache, &of[0], PROMPT, NULL);
    has(cache, &of[0], LEAST, LEAST, LEAST);
    resize(cache, &of[0], MAX_TOKENS);
    has(cache, &of[0], MAX_TOKENS, MAX_TOKENS, MAX_TOKENS);
    CHECK(stats_of(cache).free_slots == 0 && stats_of(cache).slots_in_use == LAYERS * POOL);
    for (uint32_t number = 0; number < 6; number++) {
        decode_step(cache, of, 1, number % 2, 1);
    }
    /* What the last steps selected is resident: only a new selection misses. */
    uint64_t before = stats_of(cache).misses;
    decode_step(cache, of, 1, 0, 1);
    uint64_t misses = stats_of(cache).misses - before;
    CHECK(misses < LAYERS * ENTRIES / 2);

    fb_open_config config = opening(20, 60);
    config.slots = 64;
    uint64_t none = 77;
    IS(FB_EXHAUSTED, fb_open(cache, &config, &none));
    CHECK(none == 77);
    resize(cache, &of[0], 128);
    begin_story(&of[1], 20);
    OK(cache, fb_open(cache, &config, &of[1].sequence));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append_rows(cache, &of[1], layer, 0, 20);
    }
    OK(cache, fb_join(cache, of[1].sequence, NULL, NULL, NULL));
    for (uint32_t number = 0; number < 8; number++) {
        decode_step(cache, of, 2, number * 7, 1 + number % QUERY);
        resize(cache, &of[0], number % 2 == 0 ? LEAST : 100);
    }
    OK(cache, fb_close(cache, of[1].sequence, NULL));
    resize(cache, &of[0], MAX_TOKENS);
    decode_step(cache, of, 1, 5, 1);
    OK(cache, fb_truncate(cache, of[0].sequence, of[0].committed, NULL, NULL));
    compare_stored(cache, &of[0], of[0].committed);
    CHECK(stats_of(cache).resizes == 11 && stats_of(cache).moved_rows > 0);
    OK(cache, fb_close(cache, of[0].sequence, NULL));
    CHECK(stats_of(cache).slots_in_use == 0);
    OK(cache, fb_cache_destroy(cache));
}

/* Ranks that make the same resizes have the same residency. */
static void digests(fb_device *device) {
    uint64_t digest[3] = {0, 0, 0};
    for (uint32_t turn = 0; turn < 3; turn++) {
        fb_cache *cache = elastic(device);
        story of;
        open_story(cache, &of, PROMPT, NULL);
        for (uint32_t number = 0; number < 8; number++) {
            resize(cache, &of, number % 3 == 2 ? LEAST : turn == 2 ? 90 : 70);
            decode_step(cache, &of, 1, number * 3, 1);
        }
        OK(cache, fb_digest(cache, of.sequence, &digest[turn]));
        OK(cache, fb_close(cache, of.sequence, NULL));
        OK(cache, fb_cache_destroy(cache));
    }
    CHECK(digest[0] == digest[1] && digest[0] != digest[2]);
}

/* The three fields; each sets the budget of every layer. */
static void stated(fb_cache *cache) {
    story of;
    const uint32_t table[LAYERS] = {LEAST, 65, 3 * MAX_TOKENS};
    fb_budget by_layer = slots_of(0), ratio = slots_of(0);
    by_layer.slots_by_layer = table;
    ratio.ratio = 0.25;
    open_story(cache, &of, PROMPT, NULL);
    OK(cache, fb_resize(cache, of.sequence, &by_layer, NULL));
    /* No more than the tokens and the rows in flight. */
    has(cache, &of, LEAST, 65, MAX_TOKENS + 2 * QUERY);
    OK(cache, fb_resize(cache, of.sequence, &ratio, NULL));
    has(cache, &of, 50, 50, 50);
    ratio.ratio = 0.001;
    OK(cache, fb_resize(cache, of.sequence, &ratio, NULL));
    has(cache, &of, LEAST, LEAST, LEAST);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* Each of these leaves the budgets as they were. */
static void refused(fb_cache *cache) {
    story of, other;
    const uint32_t few[LAYERS] = {50, 50, LEAST - 1};
    fb_budget wrong = SIZED(fb_budget);
    open_story(cache, &of, PROMPT, NULL);
    resize(cache, &of, 50);
    open_story(cache, &other, 20, NULL);
    resize(cache, &other, 128);
    uint64_t resizes = stats_of(cache).resizes;
    IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    CHECK(says(cache, "set one of them"));
    const double ratios[] = {-0.5, 1.5, -1.0 / 0.0, 1.0 / 0.0, 0.0 / 0.0};
    for (size_t index = 0; index < sizeof ratios / sizeof ratios[0]; index++) {
        wrong.ratio = ratios[index];
        IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    }
    wrong = slots_of(60);
    wrong.ratio = 0.5;
    IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    wrong = slots_of(60);
    wrong.slots_by_layer = few;
    IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    wrong.slots = 0;
    IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    CHECK(says(cache, "min_budget"));
    wrong = slots_of(60);
    wrong.reserved = 1;
    IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    wrong = slots_of(LEAST - 1);
    IS(FB_INVALID_CONFIG, fb_resize(cache, of.sequence, &wrong, NULL));
    wrong = slots_of(129);
    IS(FB_EXHAUSTED, fb_resize(cache, of.sequence, &wrong, NULL));
    CHECK(says(cache, "free"));
    wrong = slots_of(60);
    IS(FB_OUT_OF_RANGE, fb_resize(cache, of.sequence, &wrong, &of));
    uint32_t slots[LAYERS] = {77, 77, 77};
    IS(FB_OUT_OF_RANGE, fb_budgets(cache, of.sequence, slots, LAYERS - 1));
    IS(FB_OUT_OF_RANGE, fb_budgets(cache, of.sequence, slots, LAYERS + 1));
    CHECK(slots[0] == 77);

    /* Inside a step, and after one that failed. */
    fb_step step = begin_step(cache, &of, 1, 1, NULL);
    IS(FB_BUSY, fb_resize(cache, of.sequence, &wrong, NULL));
    OK(cache, fb_abandon(cache, step));
    OK(cache, fb_finish(cache, step, NULL));
    IS(FB_CANCELLED, fb_retire(cache, &step, NULL, NULL));
    IS(FB_INVALID_STATE, fb_resize(cache, of.sequence, &wrong, NULL));
    OK(cache, fb_truncate(cache, of.sequence, PROMPT, NULL, NULL));
    has(cache, &of, 50, 50, 50);
    CHECK(stats_of(cache).resizes == resizes);

    /* Before the join, and after the end. */
    fb_open_config config = opening(20, 20);
    uint64_t filling = 0;
    OK(cache, fb_open(cache, &config, &filling));
    wrong = slots_of(20);
    IS(FB_INVALID_STATE, fb_resize(cache, filling, &wrong, NULL));
    OK(cache, fb_close(cache, filling, NULL));
    OK(cache, fb_close(cache, of.sequence, NULL));
    OK(cache, fb_close(cache, other.sequence, NULL));
    IS(FB_CLOSED, fb_resize(cache, of.sequence, &wrong, NULL));
    IS(FB_CLOSED, fb_budgets(cache, of.sequence, slots, LAYERS));
}

/* Two sequences that come and end, in a cache that sets the budgets itself. Returns the digest of its budgets while
 * both run. */
static uint64_t shared_by(fb_device *device, uint32_t share) {
    fb_cache_config config = declared();
    config.min_budget = LEAST;
    config.pool_slots = POOL;
    config.share = share;
    config.share_every = 2;
    config.share_resizes_a_step = 1;
    fb_cache *cache = cache_of(device, &config);
    story of[2];
    fb_budget budget = slots_of(64);
    uint32_t resized = 77;
    uint64_t digest = 0;
    open_story(cache, &of[0], PROMPT, NULL);
    has(cache, &of[0], MAX_TOKENS + 2 * QUERY, MAX_TOKENS + 2 * QUERY, MAX_TOKENS + 2 * QUERY);
    IS(FB_INVALID_CONFIG, fb_resize(cache, of[0].sequence, &budget, NULL));
    CHECK(says(cache, "shares its slots"));
    decode_step(cache, of, 1, 1, 1);
    open_story(cache, &of[1], 50, NULL);
    for (uint32_t number = 0; number < 12; number++) {
        decode_step(cache, of, 2, number * 5, 1);
        OK(cache, fb_cache_validate(cache));
    }
    CHECK(stats_of(cache).resizes > 0 && stats_of(cache).slots_in_use == LAYERS * POOL);
    OK(cache, fb_budgets_digest(cache, &digest));
    OK(cache, fb_close(cache, of[1].sequence, NULL));
    OK(cache, fb_share_slots(cache, NULL, &resized));
    CHECK(resized <= 1);
    decode_step(cache, of, 1, 3, 1);
    OK(cache, fb_share_slots(cache, NULL, NULL));
    /* It may lack a change that is smaller than a block. */
    uint32_t slots[LAYERS];
    OK(cache, fb_budgets(cache, of[0].sequence, slots, LAYERS));
    CHECK(slots[0] > MAX_TOKENS + 2 * QUERY - 64 && slots[1] == slots[0] && slots[2] == slots[0]);
    OK(cache, fb_truncate(cache, of[0].sequence, of[0].committed, NULL, NULL));
    compare_stored(cache, &of[0], of[0].committed);
    OK(cache, fb_close(cache, of[0].sequence, NULL));
    OK(cache, fb_cache_destroy(cache));
    return digest;
}

static void policies(fb_device *device) {
    const uint32_t shares[] = {FB_SHARE_EQUAL, FB_SHARE_LENGTH, FB_SHARE_MISSES};
    for (size_t at = 0; at < sizeof shares / sizeof shares[0]; at++) {
        CHECK(shared_by(device, shares[at]) == shared_by(device, shares[at]));
    }
    CHECK(shared_by(device, FB_SHARE_EQUAL) != shared_by(device, FB_SHARE_LENGTH));

    fb_cache *cache = elastic(device);
    uint32_t resized = 77;
    IS(FB_INVALID_CONFIG, fb_share_slots(cache, NULL, &resized));
    CHECK(resized == 77 && says(cache, "no share"));
    OK(cache, fb_cache_destroy(cache));
    fb_cache_config wrong = declared();
    char text[256] = "";
    wrong.share = FB_SHARE_MISSES + 1;
    IS(FB_INVALID_CONFIG, fb_cache_create(device, &wrong, text, sizeof text, &cache));
    CHECK(strstr(text, "share") != NULL);
    wrong.share = FB_SHARE_NONE;
    wrong.share_every = 4;
    IS(FB_INVALID_CONFIG, fb_cache_create(device, &wrong, text, sizeof text, &cache));
    CHECK(strstr(text, "share") != NULL);
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    slots_shared(device);
    policies(device);
    digests(device);
    fb_cache *cache = elastic(device);
    stated(cache);
    refused(cache);
    end_all(device, cache);
    return checked();
}
