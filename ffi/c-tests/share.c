/* Published pages, found again by their tokens. */

#include "check.h"

enum { PROMPT = 70 };

static void ids_from(uint32_t *ids, uint32_t count, uint32_t seed) {
    for (uint32_t index = 0; index < count; index++) {
        ids[index] = seed + index * 7;
    }
}

static fb_tokens tokens_of(const uint32_t *ids, uint32_t count) {
    fb_tokens tokens = SIZED(fb_tokens);
    tokens.ids = ids;
    tokens.count = count;
    return tokens;
}

/* Opens with the shared pages and appends the rows of the rest. Returns the number of shared tokens. */
static uint32_t open_with(fb_cache *cache, story *of, const story *source, const fb_tokens *tokens, const char *salt) {
    fb_open_config config = opening(PROMPT, 40);
    uint32_t shared = 77;
    begin_story(of, PROMPT);
    OK(cache, fb_open_shared(cache, &config, tokens, salt, strlen(salt), &of->sequence, &shared));
    CHECK(shared % PAGE == 0 && shared <= PROMPT);
    CHECK(shared == 0 || source != NULL);
    for (uint32_t position = 0; position < shared; position++) {
        of->written[position] = source->written[position];
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append_rows(cache, of, layer, shared, PROMPT);
    }
    OK(cache, fb_join(cache, of->sequence, NULL, NULL, NULL));
    return shared;
}

static void shared_prefix(fb_cache *cache) {
    uint32_t ids[PROMPT + 40], other[PROMPT], found = 77;
    story first, second, third;
    ids_from(ids, PROMPT + 40, 1000);
    ids_from(other, PROMPT, 1000);
    other[40] = 5;
    fb_tokens all = tokens_of(ids, PROMPT), differs = tokens_of(other, PROMPT);
    OK(cache, fb_find_shared(cache, &all, "a", 1, &found));
    CHECK(found == 0);
    CHECK(open_with(cache, &first, NULL, &all, "a") == 0);
    uint32_t published = 77;
    OK(cache, fb_publish(cache, first.sequence, 0, &all, &published));
    CHECK(published == PROMPT / PAGE * PAGE && length_of(cache, first.sequence).published == published);
    OK(cache, fb_find_shared(cache, &all, "a", 1, &found));
    CHECK(found == published);
    /* A lookup does not find the pages of another tenant or another history. */
    OK(cache, fb_find_shared(cache, &all, "b", 1, &found));
    CHECK(found == 0);
    OK(cache, fb_find_shared(cache, &differs, "a", 1, &found));
    CHECK(found == 40 / PAGE * PAGE);
    CHECK(open_with(cache, &second, &first, &all, "a") == published);
    CHECK(open_with(cache, &third, &first, &differs, "a") == 40 / PAGE * PAGE);
    story stories[3] = {first, second, third};
    for (uint32_t number = 0; number < 10; number++) {
        decode_step(cache, stories, 3, number * 11, 2);
    }
    for (uint32_t which = 0; which < 3; which++) {
        OK(cache, fb_truncate(cache, stories[which].sequence, stories[which].committed, NULL, NULL));
        compare_stored(cache, &stories[which], stories[which].committed);
    }
    /* Decoded tokens can be published after the prompt's pages. */
    fb_tokens next = tokens_of(ids + published, stories[0].committed - published);
    IS(FB_OUT_OF_RANGE, fb_publish(cache, stories[0].sequence, 0, &next, &found));
    OK(cache, fb_publish(cache, stories[0].sequence, published, &next, &published));
    CHECK(published == stories[0].committed / PAGE * PAGE);
    /* Pages outlive their sequences. */
    for (uint32_t which = 0; which < 3; which++) {
        OK(cache, fb_close(cache, stories[which].sequence, NULL));
    }
    OK(cache, fb_find_shared(cache, &all, "a", 1, &found));
    CHECK(found == PROMPT / PAGE * PAGE);
    CHECK(stats_of(cache).free_lanes == LANES);
    CHECK(open_with(cache, &second, &stories[0], &all, "a") == found);
    compare_stored(cache, &second, PROMPT);
    OK(cache, fb_close(cache, second.sequence, NULL));
}

/* A page's key distinguishes what its ids do not: another key, other pages. */
static void keyed(fb_cache *cache) {
    uint32_t ids[PROMPT], found = 77, published = 0;
    fb_key keys[PROMPT / PAGE];
    story first;
    ids_from(ids, PROMPT, 50000);
    memset(keys, 0, sizeof keys);
    keys[1].is_set = 1;
    keys[1].bytes[3] = 9;
    fb_tokens tokens = tokens_of(ids, PROMPT);
    tokens.keys = keys;
    tokens.key_count = PROMPT / PAGE;
    CHECK(open_with(cache, &first, NULL, &tokens, "") == 0);
    OK(cache, fb_publish(cache, first.sequence, 0, &tokens, &published));
    OK(cache, fb_find_shared(cache, &tokens, NULL, 0, &found));
    CHECK(found == published && published == PROMPT / PAGE * PAGE);
    keys[1].bytes[3] = 8;
    OK(cache, fb_find_shared(cache, &tokens, NULL, 0, &found));
    CHECK(found == PAGE);
    keys[1].is_set = 0;
    OK(cache, fb_find_shared(cache, &tokens, NULL, 0, &found));
    CHECK(found == PAGE);
    tokens.key_count = 1;
    found = 77;
    IS(FB_OUT_OF_RANGE, fb_find_shared(cache, &tokens, NULL, 0, &found));
    tokens = tokens_of(ids, PROMPT);
    fb_open_config config = opening(PROMPT - 1, 40);
    uint64_t sequence = 77;
    IS(FB_OUT_OF_RANGE, fb_open_shared(cache, &config, &tokens, NULL, 0, &sequence, &found));
    CHECK(found == 77 && sequence == 77);
    OK(cache, fb_close(cache, first.sequence, NULL));
}

/* Without tokens there is nothing to publish. */
static void without_tokens(fb_cache *cache) {
    uint32_t ids[PROMPT], published = 77;
    story of;
    ids_from(ids, PROMPT, 1);
    fb_tokens tokens = tokens_of(ids, PROMPT);
    open_story(cache, &of, PROMPT, NULL);
    IS(FB_INVALID_STATE, fb_publish(cache, of.sequence, 0, &tokens, &published));
    CHECK(published == 77);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    shared_prefix(cache);
    keyed(cache);
    without_tokens(cache);
    CHECK(stats_of(cache).sequences == 0);
    end_all(device, cache);
    return checked();
}
