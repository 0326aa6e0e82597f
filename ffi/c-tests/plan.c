/* A plan: what fits on a GPU, before it is bought. */

#include "check.h"

int main(void) {
    fb_cache_config model = SIZED(fb_cache_config);
    char text[256] = "untouched";
    OK(NULL, fb_preset("deepseek-v3.2", NULL, 0, &model));
    fb_plan_config config = SIZED(fb_plan_config);
    config.model = &model;
    config.gpu = 141ull << 30;
    config.weights = 60ull << 30;
    config.context = 32768;
    fb_planned planned = SIZED(fb_planned);
    IS(FB_OK, fb_plan(&config, text, sizeof text, &planned));
    CHECK(strcmp(text, "untouched") == 0);
    CHECK(planned.batch > 0 && planned.slots > 0 && planned.ratio > 0 && planned.ratio <= 1);
    CHECK(planned.available <= config.gpu - config.weights);
    CHECK(planned.index_key_bytes + planned.slot_bytes + planned.landing_bytes + planned.scratch_bytes +
              planned.padding_bytes + planned.table_bytes + planned.host_page_table_bytes <=
          planned.available);
    CHECK(planned.most_batch >= planned.resident_batch);

    /* The offloaded bytes are those of a cache with that configuration. */
    config.ratio = 0.2;
    IS(FB_OK, fb_plan(&config, text, sizeof text, &planned));
    CHECK(planned.offloads == 1 && planned.row_bytes > 0 && planned.host_pages > 0);
    CHECK(planned.host_page_table_bytes > 0);
    fb_cache_config cache = model;
    cache.lanes = planned.batch;
    cache.max_tokens = config.context;
    cache.slots = planned.slots;
    cache.query_rows = 1;
    cache.host_pages = planned.host_pages;
    cache.index_pages = planned.index_pages;
    cache.pool_slots = planned.pool_slots;
    cache.batch = planned.batch_rows;
    fb_cache_footprint bytes = SIZED(fb_cache_footprint);
    OK(NULL, fb_footprint(&cache, NULL, 0, &bytes));
    CHECK(bytes.rows == planned.row_bytes && bytes.index_keys == planned.index_key_bytes);

    /* Fewer slots give more misses: a smaller ratio, a larger batch. */
    uint32_t batch = planned.batch;
    config.ratio = 0.8;
    IS(FB_OK, fb_plan(&config, text, sizeof text, &planned));
    CHECK(planned.batch < batch);

    fb_planned before = planned;
    config.batch = 2000;
    IS(FB_OUT_OF_MEMORY, fb_plan(&config, text, sizeof text, &planned));
    CHECK(strstr(text, "wanted") != NULL);
    config.batch = 0;
    const double ratios[] = {-1, 1.5, 0.0 / 0.0, 1.0 / 0.0};
    for (size_t index = 0; index < 4; index++) {
        config.ratio = ratios[index];
        CHECK(fb_plan(&config, text, sizeof text, &planned) != FB_OK);
    }
    CHECK(memcmp(&before, &planned, sizeof planned) == 0);

    for (uint32_t bit = 1; bit <= FB_NOTE_NO_ROOM; bit *= 2) {
        CHECK(fb_plan_note_text(bit)[0] != 0);
    }
    CHECK(fb_plan_note_text(0)[0] == 0 && fb_plan_note_text(UINT32_MAX)[0] == 0);
    return checked();
}
