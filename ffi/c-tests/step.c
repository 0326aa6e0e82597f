/* A decode step, call by call: drafts accepted and rejected, layers as a whole and in ranges, and invalid calls. */

#include "check.h"

static void a_hundred_steps(fb_cache *cache) {
    story of[LANES];
    for (uint32_t which = 0; which < LANES; which++) {
        open_story(cache, &of[which], 30 + 5 * which, NULL);
    }
    for (uint32_t number = 0; number < 100; number++) {
        decode_step(cache, of, LANES, number, 1 + number % QUERY);
    }
    fb_stats stats = stats_of(cache);
    CHECK(stats.steps == 100 && stats.misses > 0 && stats.hits > 0 && stats.bytes_up == stats.misses * ROW);
    for (uint32_t which = 0; which < LANES; which++) {
        OK(cache, fb_truncate(cache, of[which].sequence, of[which].committed, NULL, NULL));
        compare_stored(cache, &of[which], of[which].committed);
        OK(cache, fb_close(cache, of[which].sequence, NULL));
    }
}

/* A step that is abandoned or failed publishes nothing; its sequence is truncated and continues. */
static void abandoned(fb_cache *cache) {
    int32_t selection[ENTRIES], slots[ENTRIES];
    story of;
    open_story(cache, &of, 40, NULL);
    decode_step(cache, &of, 1, 3, 1);
    fb_step step = begin_step(cache, &of, 1, QUERY, NULL);
    OK(cache, fb_abandon(cache, step));
    OK(cache, fb_finish(cache, step, NULL));
    IS(FB_CANCELLED, fb_retire(cache, &step, NULL, NULL));
    CHECK(step == 0);
    fb_sequence_length length = length_of(cache, of.sequence);
    of.committed = length.committed;
    OK(cache, fb_truncate(cache, of.sequence, of.committed, NULL, NULL));
    decode_step(cache, &of, 1, 5, 2);

    step = begin_step(cache, &of, 1, QUERY, NULL);
    for (uint32_t query = 0; query < QUERY; query++) {
        select_rows(selection + query * TOP_K, of.committed + query, 1);
    }
    selection[2] = (int32_t)(of.committed + QUERY);
    rest_of_step(cache, step, 0, NULL);
    OK(cache, fb_layer(cache, step, 1, selection, slots, NULL));
    OK(cache, fb_finish(cache, step, NULL));
    fb_retired retired = SIZED(fb_retired);
    IS(FB_DEVICE_FAILED, fb_retire(cache, &step, NULL, &retired));
    CHECK(step == 0 && retired.step == 0 && says(cache, "layer 1"));
    length = length_of(cache, of.sequence);
    CHECK(length.running == 0);
    of.committed = length.committed;
    OK(cache, fb_truncate(cache, of.sequence, of.committed, NULL, NULL));
    decode_step(cache, &of, 1, 9, 1);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* The slots of one step are the same for fb_layer, for ranges, and for all layers at once. */
static void ways(fb_device *device, uint32_t way, int32_t *slots, uint64_t digest[2]) {
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    int32_t selection[LAYERS * 2 * ENTRIES];
    story of[2];
    open_story(cache, &of[0], 60, NULL);
    open_story(cache, &of[1], 90, NULL);
    for (uint32_t number = 0; number < 4; number++) {
        decode_step(cache, of, 2, number * 3, 1);
    }
    fb_step step = begin_step(cache, of, 2, QUERY, NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t row = 0; row < 2; row++) {
            land(cache, &of[row], layer, QUERY);
            for (uint32_t query = 0; query < QUERY; query++) {
                int32_t *own = selection + ((layer * 2 + row) * QUERY + query) * TOP_K;
                select_rows(own, of[row].committed + query, 40 + layer);
            }
        }
    }
    if (way == 1) {
        OK(cache, fb_layers(cache, step, selection, slots, NULL));
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        size_t at = (size_t)layer * 2 * ENTRIES;
        if (way == 0) {
            OK(cache, fb_layer(cache, step, layer, selection + at, slots + at, NULL));
        }
        for (uint32_t row = 0; way == 2 && row < 2; row++) {
            fb_step_range range = SIZED(fb_step_range);
            range.layer = layer;
            range.first = row;
            range.count = 1;
            fb_buffers buffers = SIZED(fb_buffers);
            buffers.selection = selection + at + row * ENTRIES;
            buffers.slots = slots + at + row * ENTRIES;
            OK(cache, fb_resolve(cache, step, &range, &buffers, NULL));
            OK(cache, fb_gather(cache, step, &range, 0, NULL));
            OK(cache, fb_scatter_range(cache, step, &range, NULL));
        }
        for (uint32_t row = 0; row < 2; row++) {
            size_t from = at + row * ENTRIES;
            (void)compare_rows(cache, &of[row], layer, selection + from, slots + from, ENTRIES);
        }
        if (way != 2) {
            OK(cache, fb_scatter(cache, step, layer, NULL));
        }
    }
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    for (uint32_t row = 0; row < 2; row++) {
        OK(cache, fb_digest(cache, of[row].sequence, &digest[row]));
        OK(cache, fb_close(cache, of[row].sequence, NULL));
    }
    OK(cache, fb_cache_destroy(cache));
}

static void all_ways(fb_device *device) {
    int32_t slots[3][LAYERS * 2 * ENTRIES];
    uint64_t digest[3][2];
    for (uint32_t way = 0; way < 3; way++) {
        ways(device, way, slots[way], digest[way]);
    }
    for (uint32_t way = 1; way < 3; way++) {
        CHECK(memcmp(slots[0], slots[way], sizeof slots[0]) == 0);
        CHECK(memcmp(digest[0], digest[way], sizeof digest[0]) == 0);
    }
}

/* The report of the step retired last, by layer, and the length of its sequences. */
static void reports(fb_cache *cache) {
    fb_layer_count counts[LAYERS + 1];
    uint32_t lengths[LANES], count = 0;
    story of[2];
    open_story(cache, &of[0], 60, NULL);
    open_story(cache, &of[1], 45, NULL);
    fb_stats before = stats_of(cache);
    decode_step(cache, of, 2, 3, 1);
    fb_stats after = stats_of(cache);
    memset(counts, 0x5a, sizeof counts);
    fb_layer_count untouched = counts[LAYERS];
    OK(cache, fb_retired_counts(cache, counts, LAYERS, &count));
    CHECK(count == LAYERS && memcmp(&counts[LAYERS], &untouched, sizeof untouched) == 0);
    uint64_t hits = 0, misses = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        hits += counts[layer].hits;
        misses += counts[layer].misses;
    }
    CHECK(hits == after.hits - before.hits && misses == after.misses - before.misses && hits + misses > 0);
    OK(cache, fb_retired_lengths(cache, lengths, LANES, &count));
    CHECK(count == 2 && lengths[0] == 60 && lengths[1] == 45);
    OK(cache, fb_retired_lengths(cache, NULL, 0, &count));
    CHECK(count == 2);
    OK(cache, fb_close(cache, of[0].sequence, NULL));
    OK(cache, fb_close(cache, of[1].sequence, NULL));
}

/* The accepted counts may be on the device only. */
static void accepted_on_device(fb_cache *cache) {
    uint32_t accepted[LANES] = {2, 0, 0};
    int32_t selection[ENTRIES], slots[ENTRIES];
    story of;
    open_story(cache, &of, 40, NULL);
    decode_step(cache, &of, 1, 3, 2);
    fb_batch_row row = {of.sequence, FB_ACCEPTED_ON_DEVICE, QUERY};
    fb_step_config config = SIZED(fb_step_config);
    config.rows = &row;
    config.row_count = 1;
    config.query_rows = QUERY;
    fb_step step = 0;
    IS(FB_INVALID_CONFIG, fb_prepare(cache, &config, NULL, &step));
    CHECK(step == 0);
    config.accepted = accepted;
    OK(cache, fb_prepare(cache, &config, NULL, &step));
    of.committed += 2;
    for (uint32_t query = 0; query < QUERY; query++) {
        of.written[of.committed + query] = ++writes;
        select_rows(selection + query * TOP_K, of.committed + query, 5);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        land(cache, &of, layer, QUERY);
        OK(cache, fb_layer(cache, step, layer, selection, slots, NULL));
        CHECK(compare_rows(cache, &of, layer, selection, slots, ENTRIES) > 0);
        OK(cache, fb_scatter(cache, step, layer, NULL));
    }
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    uint32_t length = 0, count = 0;
    OK(cache, fb_retired_lengths(cache, &length, 1, &count));
    CHECK(count == 1 && length == of.committed);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

/* A step's number never repeats, and the number of another cache's step is rejected. */
static void stale(fb_device *device, fb_cache *cache) {
    fb_cache_config config = declared();
    fb_cache *other = cache_of(device, &config);
    int32_t selection[ENTRIES], slots[ENTRIES];
    story of, foreign;
    memset(selection, 0xff, sizeof selection);
    memset(slots, 0x5a, sizeof slots);
    open_story(cache, &of, 40, NULL);
    open_story(other, &foreign, 40, NULL);
    fb_step step = begin_step(cache, &of, 1, QUERY, NULL);
    fb_step theirs = begin_step(other, &foreign, 1, QUERY, NULL);
    CHECK(step != theirs);
    IS(FB_CLOSED, fb_layer(other, step, 0, selection, slots, NULL));
    IS(FB_CLOSED, fb_retire(other, &step, NULL, NULL));
    IS(FB_OUT_OF_RANGE, fb_layer(cache, step, LAYERS, selection, slots, NULL));
    CHECK(step != 0 && slots[0] == 0x5a5a5a5a);
    IS(FB_BUSY, fb_retire(cache, &step, NULL, NULL));
    IS(FB_BUSY, fb_cache_destroy(cache));
    rest_of_step(cache, step, 0, NULL);
    OK(cache, fb_finish(cache, step, NULL));
    IS(FB_INVALID_STATE, fb_finish(cache, step, NULL));
    fb_step gone = step;
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    of.accepted = 1;
    step = begin_step(cache, &of, 1, QUERY, NULL);
    CHECK(step != gone);
    IS(FB_CLOSED, fb_layer(cache, gone, 0, selection, slots, NULL));
    IS(FB_CLOSED, fb_scatter(cache, gone, 0, NULL));
    IS(FB_CLOSED, fb_finish(cache, gone, NULL));
    IS(FB_CLOSED, fb_abandon(cache, gone));
    IS(FB_CLOSED, fb_retire(cache, &gone, NULL, NULL));
    CHECK(gone != 0 && slots[0] == 0x5a5a5a5a);
    rest_of_step(cache, step, 0, NULL);
    rest_of_step(other, theirs, 0, NULL);
    OK(cache, fb_finish(cache, step, NULL));
    OK(cache, fb_retire(cache, &step, NULL, NULL));
    OK(other, fb_finish(other, theirs, NULL));
    OK(other, fb_retire(other, &theirs, NULL, NULL));
    OK(other, fb_close(other, foreign.sequence, NULL));
    OK(other, fb_cache_destroy(other));
    OK(cache, fb_close(cache, of.sequence, NULL));
}

static void refused(fb_cache *cache) {
    story of;
    open_story(cache, &of, 40, NULL);
    fb_batch_row rows[2] = {{of.sequence, 0, 1}, {of.sequence, 0, 1}};
    fb_step_config config = SIZED(fb_step_config);
    fb_step step = 77;
    config.rows = rows;
    config.row_count = 2;
    config.query_rows = 1;
    IS(FB_INVALID_CONFIG, fb_prepare(cache, &config, NULL, &step));
    config.row_count = LANES + 1;
    IS(FB_OUT_OF_RANGE, fb_prepare(cache, &config, NULL, &step));
    config.row_count = 1;
    config.query_rows = QUERY + 1;
    IS(FB_OUT_OF_RANGE, fb_prepare(cache, &config, NULL, &step));
    config.query_rows = 1;
    config.micro_batch = 1;
    IS(FB_OUT_OF_RANGE, fb_prepare(cache, &config, NULL, &step));
    config.micro_batch = 0;
    config.reserved = 1;
    IS(FB_INVALID_CONFIG, fb_prepare(cache, &config, NULL, &step));
    config.reserved = 0;
    rows[0].accepted = 1;
    CHECK(fb_prepare(cache, &config, NULL, &step) != FB_OK);
    rows[0].accepted = 0;
    rows[0].sequence ^= 1ull << 40;
    IS(FB_CLOSED, fb_prepare(cache, &config, NULL, &step));
    CHECK(step == 77 && stats_of(cache).steps_in_flight == 0);
    OK(cache, fb_close(cache, of.sequence, NULL));
}

int main(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    a_hundred_steps(cache);
    abandoned(cache);
    all_ways(device);
    reports(cache);
    accepted_on_device(cache);
    stale(device, cache);
    refused(cache);
    end_all(device, cache);
    return checked();
}
