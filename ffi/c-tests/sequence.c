/* A sequence's life: open, append, extend, join, decode, truncate, park, resume, fork, close; and its rows and pages
 * meanwhile. */

#include "check.h"

/* A prompt may come layer by layer and in pieces, or be in its place already. */
static void appended(fb_cache *cache) {
    story of;
    fb_open_config config = opening(50, 20);
    uint32_t row[WORDS] = {0};
    begin_story(&of, 50);
    OK(cache, fb_open(cache, &config, &of.sequence));
    CHECK(of.sequence != 0);
    append_rows(cache, &of, 1, 0, 17);
    append_rows(cache, &of, 0, 0, 50);
    IS(FB_INVALID_STATE, fb_join(cache, of.sequence, NULL, NULL, NULL));
    append_rows(cache, &of, 1, 17, 50);
    append_rows(cache, &of, 2, 0, 50);
    IS(FB_OUT_OF_RANGE, fb_append(cache, of.sequence, 0, row, 1));
    IS(FB_OUT_OF_RANGE, fb_append(cache, of.sequence, LAYERS, row, 1));
    OK(cache, fb_join(cache, of.sequence, NULL, NULL, NULL));
    IS(FB_INVALID_STATE, fb_append(cache, of.sequence, 0, row, 0));
    IS(FB_INVALID_STATE, fb_join(cache, of.sequence, NULL, NULL, NULL));
    compare_stored(cache, &of, 50);
    CHECK(length_of(cache, of.sequence).committed == 50 && length_of(cache, of.sequence).running == 1);
    OK(cache, fb_close(cache, of.sequence, NULL));

    OK(cache, fb_open(cache, &config, &of.sequence));
    OK(cache, fb_append_in_place(cache, of.sequence, 30));
    IS(FB_OUT_OF_RANGE, fb_append_in_place(cache, of.sequence, 21));
    CHECK(length_of(cache, of.sequence).running == 0);
    OK(cache, fb_append_in_place(cache, of.sequence, 20));
    OK(cache, fb_join(cache, of.sequence, NULL, NULL, NULL));
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* A prompt whose chunks are admitted one by one, with drafts that are rejected before it joins. */
static void chunked(fb_cache *cache) {
    story of;
    fb_open_config config = opening(20, 0);
    begin_story(&of, 70);
    OK(cache, fb_open(cache, &config, &of.sequence));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append_rows(cache, &of, layer, 0, layer == 1 ? 15 : 20);
    }
    fb_sequence_length length = length_of(cache, of.sequence);
    CHECK(length.committed == 0 && length.filled == 15 && length.running == 0 && length.parked == 0);
    append_rows(cache, &of, 1, 15, 20);
    uint32_t room = stats_of(cache).free_host_pages;
    IS(FB_OUT_OF_RANGE, fb_extend(cache, of.sequence, 19, 5));
    IS(FB_OUT_OF_RANGE, fb_extend(cache, of.sequence, 20, MAX_TOKENS));
    IS(FB_OUT_OF_RANGE, fb_extend(cache, of.sequence, UINT32_MAX, UINT32_MAX));
    CHECK(stats_of(cache).free_host_pages == room);
    OK(cache, fb_extend(cache, of.sequence, 73, 20));
    CHECK(stats_of(cache).free_host_pages < room);
    IS(FB_INVALID_STATE, fb_join(cache, of.sequence, NULL, NULL, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append_rows(cache, &of, layer, 20, 73);
    }
    IS(FB_OUT_OF_RANGE, fb_truncate(cache, of.sequence, 74, NULL, NULL));
    OK(cache, fb_truncate(cache, of.sequence, 70, NULL, NULL));
    CHECK(length_of(cache, of.sequence).filled == 70);
    OK(cache, fb_join(cache, of.sequence, NULL, NULL, NULL));
    IS(FB_INVALID_STATE, fb_extend(cache, of.sequence, 80, 20));
    CHECK(length_of(cache, of.sequence).committed == 70);
    compare_stored(cache, &of, 70);
    decode_step(cache, &of, 1, 3, 1);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* A request is preempted, and comes back with the next turn of its conversation. */
static void parked(fb_cache *cache) {
    story of;
    story other;
    fb_ticket *ticket = NULL;
    open_story(cache, &of, 60, NULL);
    IS(FB_INVALID_STATE, fb_resume(cache, of.sequence, 0, NULL, NULL));
    for (uint32_t turn = 0; turn < 3; turn++) {
        for (uint32_t number = 0; number < 4; number++) {
            decode_step(cache, &of, 1, number * 3, 1 + number % QUERY);
        }
        fb_stats before = stats_of(cache);
        IS(FB_OUT_OF_RANGE, fb_park(cache, of.sequence, QUERY + 1, NULL));
        OK(cache, fb_park(cache, of.sequence, of.accepted, NULL));
        of.committed += of.accepted;
        of.accepted = 0;
        fb_stats now = stats_of(cache);
        CHECK(now.parked == 1 && before.parked == 0 && now.sequences == before.sequences);
        CHECK(now.free_lanes == before.free_lanes + 1 && now.slots_in_use < before.slots_in_use);
        CHECK(now.free_host_pages == before.free_host_pages);
        fb_sequence_length length = length_of(cache, of.sequence);
        CHECK(length.committed == of.committed && length.landed == 0 && length.filled == of.committed);
        CHECK(length.parked == 1 && length.running == 0);
        uint32_t word = 77;
        IS(FB_INVALID_STATE, fb_landing_slot(cache, of.sequence, 0, &word));
        IS(FB_INVALID_STATE, fb_park(cache, of.sequence, 0, NULL));
        CHECK(word == 77);
        open_story(cache, &other, 20, NULL);
        IS(FB_EXHAUSTED, fb_park(cache, other.sequence, 0, NULL));
        OK(cache, fb_close(cache, other.sequence, NULL));
        uint32_t prompt = of.committed + 10;
        OK(cache, fb_extend(cache, of.sequence, prompt, MAX_TOKENS - prompt));
        IS(FB_INVALID_STATE, fb_resume(cache, of.sequence, 0, NULL, &ticket));
        CHECK(ticket == NULL);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            append_rows(cache, &of, layer, of.committed, prompt);
        }
        of.committed = prompt;
        OK(cache, fb_resume(cache, of.sequence, 0, NULL, &ticket));
        CHECK(ticket != NULL);
        OK(NULL, fb_ticket_destroy(ticket));
        ticket = NULL;
        CHECK(stats_of(cache).parked == 0 && length_of(cache, of.sequence).running == 1);
        compare_stored(cache, &of, of.committed);
    }
    decode_step(cache, &of, 1, 2, 0);
    OK(cache, fb_truncate(cache, of.sequence, of.committed, NULL, NULL));
    compare_stored(cache, &of, of.committed);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* A prefill that writes its rows by itself: page by page, at the addresses that fb_pages returns. */
static void written_in_place(fb_cache *cache) {
    story of;
    fb_page pages[20];
    uint32_t count = 0;
    fb_info info = SIZED(fb_info);
    fb_open_config config = opening(50, 20);
    begin_story(&of, 50);
    OK(cache, fb_cache_info(cache, &info));
    OK(cache, fb_open(cache, &config, &of.sequence));
    OK(cache, fb_pages(cache, of.sequence, pages, 20, &count));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        void *rows = NULL;
        uint64_t bytes = 0;
        OK(cache, fb_rows(cache, layer, &rows, &bytes));
        for (uint32_t position = 0; position < 50; position++) {
            uint64_t at = ((uint64_t)pages[position / PAGE].host * PAGE + position % PAGE) * info.host_stride;
            uint32_t row[WORDS];
            CHECK(position / PAGE < count && at + ROW <= bytes);
            stamp(&of, row, layer, position);
            memcpy((unsigned char *)rows + at, row, ROW);
        }
    }
    OK(cache, fb_append_in_place(cache, of.sequence, 50));
    OK(cache, fb_join(cache, of.sequence, NULL, NULL, NULL));
    compare_stored(cache, &of, 50);
    decode_step(cache, &of, 1, 3, 1);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

static void refused(fb_cache *cache) {
    uint64_t sequence = 77;
    fb_open_config config = opening(MAX_TOKENS, 1);
    IS(FB_OUT_OF_RANGE, fb_open(cache, &config, &sequence));
    config = opening(0, 0);
    IS(FB_OUT_OF_RANGE, fb_open(cache, &config, &sequence));
    config = opening(UINT32_MAX, UINT32_MAX);
    IS(FB_OUT_OF_RANGE, fb_open(cache, &config, &sequence));
    config = opening(10, 10);
    config.bring_up = 7;
    IS(FB_INVALID_CONFIG, fb_open(cache, &config, &sequence));
    config = opening(10, 10);
    config.slots = 8;
    config.ratio = 0.5;
    IS(FB_INVALID_CONFIG, fb_open(cache, &config, &sequence));
    const double ratios[] = {-0.5, 1.5, -1.0 / 0.0, 1.0 / 0.0, 0.0 / 0.0};
    for (size_t index = 0; index < sizeof ratios / sizeof ratios[0]; index++) {
        config = opening(10, 10);
        config.ratio = ratios[index];
        IS(FB_INVALID_CONFIG, fb_open(cache, &config, &sequence));
    }
    CHECK(sequence == 77 && stats_of(cache).sequences == 0);
}

static void truncated(fb_cache *cache) {
    story of;
    open_story(cache, &of, 60, NULL);
    for (uint32_t number = 0; number < 6; number++) {
        decode_step(cache, &of, 1, number, 1 + number % QUERY);
    }
    fb_sequence_length length = length_of(cache, of.sequence);
    CHECK(length.committed == of.committed && length.landed == QUERY && length.running == 1);
    /* One of the last step's rows is accepted; then committed tokens are truncated. */
    OK(cache, fb_truncate(cache, of.sequence, of.committed + 1, NULL, NULL));
    of.committed += 1;
    of.accepted = 0;
    CHECK(length_of(cache, of.sequence).committed == of.committed && length_of(cache, of.sequence).landed == 0);
    compare_stored(cache, &of, of.committed);
    IS(FB_OUT_OF_RANGE, fb_truncate(cache, of.sequence, of.committed + 1, NULL, NULL));
    OK(cache, fb_truncate(cache, of.sequence, 41, NULL, NULL));
    of.committed = 41;
    for (uint32_t number = 0; number < 6; number++) {
        decode_step(cache, &of, 1, number, 2);
    }
    OK(cache, fb_truncate(cache, of.sequence, of.committed, NULL, NULL));
    compare_stored(cache, &of, of.committed);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* Parent and child share the common pages and go on independently. */
static void forked(fb_cache *cache) {
    story of[2];
    open_story(cache, &of[0], 50, NULL);
    fb_open_config config = opening(0, 60);
    uint32_t room = stats_of(cache).free_host_pages;
    of[1] = of[0];
    OK(cache, fb_fork(cache, of[0].sequence, &config, NULL, &of[1].sequence, NULL));
    CHECK(of[1].sequence != of[0].sequence);
    /* Three full pages of 16 are shared, of 50 + 60 tokens and the rows in flight. */
    uint32_t taken = room - stats_of(cache).free_host_pages;
    CHECK(taken <= (50 + 60 + 2 * QUERY + PAGE - 1) / PAGE - 3 + 1);
    for (uint32_t number = 0; number < 12; number++) {
        decode_step(cache, of, 2, number * 7, 1 + number % QUERY);
    }
    for (uint32_t which = 0; which < 2; which++) {
        OK(cache, fb_truncate(cache, of[which].sequence, of[which].committed, NULL, NULL));
        compare_stored(cache, &of[which], of[which].committed);
    }
    fb_page pages[2][20];
    uint32_t count[2] = {0, 0};
    for (uint32_t which = 0; which < 2; which++) {
        OK(cache, fb_pages(cache, of[which].sequence, pages[which], 20, &count[which]));
        CHECK(count[which] >= of[which].committed / PAGE);
    }
    for (uint32_t page = 0; page < 3; page++) {
        CHECK(pages[0][page].host == pages[1][page].host && pages[0][page].index_keys == pages[1][page].index_keys);
    }
    CHECK(pages[0][3].host != pages[1][3].host);
    OK(cache, fb_close(cache, of[0].sequence, NULL));
    compare_stored(cache, &of[1], of[1].committed);
    OK(cache, fb_close(cache, of[1].sequence, NULL));
}

/* The call returns the number of pages even without room for them, and writes no more than there is room for. */
static void pages_listed(fb_cache *cache) {
    story of;
    open_story(cache, &of, 50, NULL);
    uint32_t count = 0;
    fb_page pages[4];
    memset(pages, 0x5a, sizeof pages);
    OK(cache, fb_pages(cache, of.sequence, NULL, 0, &count));
    CHECK(count >= MAX_TOKENS / PAGE);
    fb_page untouched = pages[3];
    OK(cache, fb_pages(cache, of.sequence, pages, 3, &count));
    CHECK(count >= MAX_TOKENS / PAGE && memcmp(&pages[3], &untouched, sizeof untouched) == 0);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* Two caches with the same history have the same residency; a different history gives another. */
static void digests(fb_device *device) {
    fb_cache_config config = declared();
    uint64_t digest[3] = {0, 0, 0};
    for (uint32_t turn = 0; turn < 3; turn++) {
        fb_cache *cache = cache_of(device, &config);
        story of;
        open_story(cache, &of, 80, NULL);
        for (uint32_t number = 0; number < 8; number++) {
            decode_step(cache, &of, 1, number * (turn == 2 ? 5 : 3), 1);
        }
        OK(cache, fb_digest(cache, of.sequence, &digest[turn]));
        OK(cache, fb_close(cache, of.sequence, NULL));
        OK(cache, fb_cache_destroy(cache));
    }
    CHECK(digest[0] == digest[1] && digest[0] != digest[2]);
}

static void closed(fb_cache *cache) {
    story of;
    uint32_t word = 77;
    uint64_t number = 77;
    uint32_t row[WORDS] = {77};
    fb_sequence_length length = SIZED(fb_sequence_length);
    fb_open_config config = opening(0, 10);
    fb_tokens tokens = SIZED(fb_tokens);
    open_story(cache, &of, 20, NULL);
    OK(cache, fb_close(cache, of.sequence, NULL));
    IS(FB_CLOSED, fb_close(cache, of.sequence, NULL));
    IS(FB_CLOSED, fb_append(cache, of.sequence, 0, row, 1));
    IS(FB_CLOSED, fb_append_in_place(cache, of.sequence, 1));
    IS(FB_CLOSED, fb_join(cache, of.sequence, NULL, NULL, NULL));
    IS(FB_CLOSED, fb_join_more(cache, of.sequence, NULL, NULL));
    IS(FB_CLOSED, fb_fork(cache, of.sequence, &config, NULL, &number, NULL));
    IS(FB_CLOSED, fb_truncate(cache, of.sequence, 1, NULL, NULL));
    IS(FB_CLOSED, fb_extend(cache, of.sequence, 30, 5));
    IS(FB_CLOSED, fb_park(cache, of.sequence, 0, NULL));
    IS(FB_CLOSED, fb_resume(cache, of.sequence, 0, NULL, NULL));
    IS(FB_CLOSED, fb_length(cache, of.sequence, &length));
    IS(FB_CLOSED, fb_pages(cache, of.sequence, NULL, 0, &word));
    IS(FB_CLOSED, fb_landing_slot(cache, of.sequence, 0, &word));
    IS(FB_CLOSED, fb_read_row(cache, of.sequence, 0, 0, row, ROW));
    IS(FB_CLOSED, fb_digest(cache, of.sequence, &number));
    IS(FB_CLOSED, fb_publish(cache, of.sequence, 0, &tokens, &word));
    CHECK(word == 77 && number == 77 && row[0] == 77 && length.committed == 0);
}

static void rows_read(fb_cache *cache) {
    story of;
    uint32_t row[WORDS] = {77};
    open_story(cache, &of, 20, NULL);
    IS(FB_OUT_OF_RANGE, fb_read_row(cache, of.sequence, LAYERS, 0, row, ROW));
    IS(FB_OUT_OF_RANGE, fb_read_row(cache, of.sequence, 0, UINT32_MAX, row, ROW));
    IS(FB_OUT_OF_RANGE, fb_read_row(cache, of.sequence, 0, 0, row, ROW - 4));
    IS(FB_OUT_OF_RANGE, fb_read_row(cache, of.sequence, 0, 0, row, UINT64_MAX));
    CHECK(row[0] == 77);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    config.parked = 1;
    fb_cache *cache = cache_of(device, &config);
    appended(cache);
    chunked(cache);
    parked(cache);
    written_in_place(cache);
    refused(cache);
    truncated(cache);
    forked(cache);
    pages_listed(cache);
    digests(device);
    closed(cache);
    rows_read(cache);
    end_all(device, cache);
    return checked();
}
