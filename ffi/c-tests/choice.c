/* Tables that give the order of each layer, and the chooser between them. */

#include "check.h"

static const uint32_t ORDERS[LAYERS] = {FB_OVERLAP_NONE, FB_OVERLAP_DBA, FB_OVERLAP_AHEAD};

static void texts(void) {
    fb_table table = {7, LAYERS, ORDERS};
    char text[512], cut[8], reason[256] = "untouched";
    size_t bytes = 0, again = 0;
    uint32_t orders[LAYERS + 1] = {9, 9, 9, 9}, version = 0, layers = 0;
    IS(FB_OK, fb_table_to_text(&table, NULL, 0, NULL, 0, &bytes));
    CHECK(bytes > 20 && bytes < sizeof text);
    IS(FB_OK, fb_table_to_text(&table, NULL, 0, text, sizeof text, &again));
    CHECK(again == bytes && strlen(text) + 1 == bytes);
    IS(FB_OK, fb_table_to_text(&table, NULL, 0, cut, sizeof cut, &again));
    CHECK(again == bytes && strlen(cut) == sizeof cut - 1);
    IS(FB_OK, fb_table_from_text(text, reason, sizeof reason, &version, orders, LAYERS, &layers));
    CHECK(version == 7 && layers == LAYERS && memcmp(orders, ORDERS, sizeof ORDERS) == 0 && orders[LAYERS] == 9);
    CHECK(strcmp(reason, "untouched") == 0);
    layers = 0;
    IS(FB_OK, fb_table_from_text(text, NULL, 0, &version, NULL, 0, &layers));
    CHECK(layers == LAYERS);
    orders[0] = 9;
    version = 77;
    IS(FB_BAD_FORMAT, fb_table_from_text("no table", reason, sizeof reason, &version, orders, LAYERS, &layers));
    CHECK(strcmp(reason, "untouched") != 0 && version == 77 && orders[0] == 9);
    IS(FB_BAD_VERSION, fb_table_from_text("forebay overlap table 99\n", reason, sizeof reason, &version, orders,
                                          LAYERS, &layers));
    uint32_t unknown[LAYERS] = {0, 4, 0};
    table.orders = unknown;
    IS(FB_INVALID_CONFIG, fb_table_to_text(&table, reason, sizeof reason, text, sizeof text, &bytes));
    CHECK(strstr(reason, "layer 1, value 4") != NULL);
}

/* The order none costs nothing without misses, DA little with them. */
static const double MISSES[2] = {0, 100};
static const double EXPOSED[3 * 2] = {0, 100000, 20000, 20000, 30000, 30000};

static fb_prices prices(void) {
    fb_prices all = {MISSES, 2, 1, EXPOSED, 3, 0};
    return all;
}

/* The orders of layers in an index group: none, DA and ahead, and for the layer that selects none, DA and DBA. */
static const double GROUP[LAYERS][4][2] = {
    {{0, 100000}, {20000, 20000}, {30000, 30000}, {-1, -1}},
    {{0, 100000}, {20000, 20000}, {-1, -1}, {1000, 2000}},
    {{0, 100000}, {20000, 20000}, {-1, -1}, {1000, 2000}},
};

static fb_prices group_prices(void) {
    fb_prices all = {MISSES, 2, LAYERS, &GROUP[0][0][0], 4, 0};
    return all;
}

/* Prices that fb_table_best refuses, with this reason. */
static void bad_prices(const fb_prices *wrong, const char *words) {
    const double misses[LAYERS] = {0, 50, 100};
    uint32_t orders[LAYERS] = {9, 9, 9};
    char reason[256] = "";
    IS(FB_INVALID_CONFIG, fb_table_best(wrong, misses, LAYERS, reason, sizeof reason, orders));
    CHECK(strstr(reason, words) != NULL);
    CHECK(orders[0] == 9 && orders[1] == 9 && orders[2] == 9);
}

/* Where layers share a selection, an order without a price is not chosen, and no table may have it. */
static void groups(void) {
    fb_prices all = group_prices();
    const double misses[LAYERS] = {50, 50, 0};
    uint32_t orders[LAYERS] = {9, 9, 9};
    IS(FB_OK, fb_table_best(&all, misses, LAYERS, NULL, 0, orders));
    CHECK(orders[0] == FB_OVERLAP_DA && orders[1] == FB_OVERLAP_AHEAD && orders[2] == FB_OVERLAP_NONE);
    const uint32_t wrong[] = {0, 1, 2, 5, UINT32_MAX};
    for (size_t index = 0; index < sizeof wrong / sizeof wrong[0]; index++) {
        all = group_prices();
        all.orders = wrong[index];
        bad_prices(&all, "orders");
    }
    all = group_prices();
    all.reserved = 1;
    bad_prices(&all, "reserved");
    double some[LAYERS][4][2];
    memcpy(some, GROUP, sizeof GROUP);
    all = group_prices();
    all.exposed = &some[0][0][0];
    some[1][2][1] = 5;
    bad_prices(&all, "exposed time of dba");
    some[1][2][1] = -1;
    some[2][0][0] = some[2][0][1] = -1;
    bad_prices(&all, "exposed time of none");

    const uint32_t first[LAYERS] = {FB_OVERLAP_NONE, FB_OVERLAP_AHEAD, FB_OVERLAP_AHEAD};
    const uint32_t ahead[LAYERS] = {FB_OVERLAP_AHEAD, FB_OVERLAP_AHEAD, FB_OVERLAP_AHEAD};
    fb_table table = {1, LAYERS, first};
    fb_bucket bucket = {4, 1, &table, group_prices()};
    fb_chooser_config config = SIZED(fb_chooser_config);
    config.buckets = &bucket;
    config.bucket_count = 1;
    config.tables_max = 1;
    fb_chooser *made = NULL;
    char text[256] = "";
    IS(FB_OK, fb_chooser_create(&config, text, sizeof text, &made));
    OK(made, fb_chooser_destroy(made));
    made = NULL;
    table.orders = ahead;
    IS(FB_INVALID_CONFIG, fb_chooser_create(&config, text, sizeof text, &made));
    CHECK(made == NULL && strstr(text, "an order without a price") != NULL);
}

static void best(void) {
    fb_prices all = prices();
    double misses[LAYERS] = {0, 50, 100};
    uint32_t orders[LAYERS] = {9, 9, 9};
    IS(FB_OK, fb_table_best(&all, misses, LAYERS, NULL, 0, orders));
    CHECK(orders[0] == FB_OVERLAP_NONE && orders[1] == FB_OVERLAP_DA && orders[2] == FB_OVERLAP_DA);
    const double bad[] = {-1, 0.0 / 0.0, 1.0 / 0.0};
    for (size_t index = 0; index < 3; index++) {
        double wrong[2] = {0, bad[index]};
        all = prices();
        all.misses = wrong;
        orders[0] = 9;
        char reason[256] = "";
        IS(FB_INVALID_CONFIG, fb_table_best(&all, misses, LAYERS, reason, sizeof reason, orders));
        CHECK(strstr(reason, "misses") != NULL);
        CHECK(orders[0] == 9);
    }
}

static void chooser(void) {
    const uint32_t none[LAYERS] = {0, 0, 0}, da[LAYERS] = {1, 1, 1};
    fb_table tables[2] = {{1, LAYERS, none}, {1, LAYERS, da}};
    fb_bucket buckets[1];
    memset(buckets, 0, sizeof buckets);
    buckets[0].batch = 4;
    buckets[0].table_count = 2;
    buckets[0].tables = tables;
    buckets[0].prices = prices();
    fb_hysteresis hysteresis = SIZED(fb_hysteresis);
    hysteresis.smoothing = 0.5;
    hysteresis.share = 0.1;
    hysteresis.least_ns = 1000;
    hysteresis.steps = 3;
    fb_chooser_config config = SIZED(fb_chooser_config);
    config.buckets = buckets;
    config.bucket_count = 1;
    config.tables_max = 2;
    config.hysteresis = &hysteresis;
    fb_chooser *made = NULL;
    char text[256] = "untouched";
    IS(FB_OK, fb_chooser_create(&config, text, sizeof text, &made));
    CHECK(made != NULL && strcmp(text, "untouched") == 0);
    fb_layer_count counts[LAYERS];
    memset(counts, 0, sizeof counts);
    fb_choice choice = SIZED(fb_choice);
    OK(made, fb_choose(made, counts, LAYERS, 4, 4, &choice));
    CHECK(choice.bucket == 0 && choice.index == 0 && choice.version == 1 && choice.changed == 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        counts[layer].misses = 4 * 100;
    }
    uint32_t steps = 0;
    while (choice.index == 0) {
        OK(made, fb_choose(made, counts, LAYERS, 4, 3, &choice));
        CHECK(++steps < 100);
    }
    CHECK(steps >= 3 && choice.index == 1);
    uint32_t orders[LAYERS] = {9, 9, 9}, layers = 0, version = 0;
    OK(made, fb_chooser_table(made, 0, 1, orders, LAYERS, &layers, &version));
    CHECK(layers == LAYERS && version == choice.version && memcmp(orders, da, sizeof da) == 0);
    IS(FB_OUT_OF_RANGE, fb_chooser_table(made, 0, 7, orders, LAYERS, &layers, &version));
    IS(FB_OUT_OF_RANGE, fb_chooser_table(made, 7, 0, orders, LAYERS, &layers, &version));
    fb_choice before = choice;
    CHECK(fb_choose(made, counts, LAYERS, 4, 5, &choice) != FB_OK);
    CHECK(fb_choose(made, counts, LAYERS - 1, 4, 4, &choice) != FB_OK);
    CHECK(memcmp(&before, &choice, sizeof choice) == 0);
    OK(made, fb_chooser_destroy(made));
    IS(FB_CLOSED, fb_chooser_destroy(made));
    made = NULL;
    hysteresis.smoothing = 0.0 / 0.0;
    IS(FB_INVALID_CONFIG, fb_chooser_create(&config, text, sizeof text, &made));
    CHECK(made == NULL && strcmp(text, "untouched") != 0);
}

int main(void) {
    texts();
    best();
    groups();
    chooser();
    return checked();
}
