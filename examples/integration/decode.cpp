// The decode loop of docs/integration.md, in C++: two sequences, four layers, one draft per step.
#include <forebay.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

constexpr std::uint32_t kLayers = 4, kTopK = 64, kPrompt = 1000, kSteps = 100, kRow = 656, kQuery = 2, kBatch = 2;

struct Destroy {
    void operator()(fb_device *device) const { fb_device_destroy(device); }
    void operator()(fb_cache *cache) const { fb_cache_destroy(cache); }
};
using Device = std::unique_ptr<fb_device, Destroy>;
using Cache = std::unique_ptr<fb_cache, Destroy>;

// A struct that begins with its size.
template <class T>
T sized() {
    T value{};
    value.size = sizeof value;
    return value;
}

void must(fb_status status, const void *handle) {
    if (status == FB_OK) return;
    std::array<char, 512> text{};
    fb_error_text(handle, text.data(), text.size());
    throw std::runtime_error(std::string(fb_status_text(status)) + ": " + text.data());
}

// The engine's indexer: a query row at `at` selects itself, the row before it, and some of the prompt.
void select_rows(std::vector<std::int32_t> &selection, std::uint32_t number, std::uint32_t at) {
    selection.push_back(static_cast<std::int32_t>(at));
    selection.push_back(static_cast<std::int32_t>(at - 1));
    for (std::uint32_t i = 2; i < kTopK; i++) {
        selection.push_back(static_cast<std::int32_t>(3 * (i + number) % kPrompt));
    }
}

// A request: admitted for all that it may become, filled layer by layer, entered into the batch.
std::uint64_t open_sequence(fb_cache *cache) {
    auto open = sized<fb_open_config>();
    open.prompt = kPrompt;
    open.promised = 300;
    open.slots = 256;
    open.bring_up = FB_BRING_UP_NOTHING;
    std::uint64_t sequence = 0;
    must(fb_open(cache, &open, &sequence), cache);
    std::vector<std::uint8_t> rows(kPrompt * kRow);
    for (std::uint32_t layer = 0; layer < kLayers; layer++) {
        for (std::uint32_t at = 0; at < kPrompt; at++) {
            std::memset(&rows[at * kRow], static_cast<int>((31 * layer + at) & 0xff), kRow);
        }
        must(fb_append(cache, sequence, layer, rows.data(), kPrompt), cache);
    }
    must(fb_join(cache, sequence, nullptr, nullptr, nullptr), cache);
    return sequence;
}

// One layer of a step: the engine's work and the library's.
std::uint64_t run_layer(fb_cache *cache, fb_step step, std::uint32_t layer, std::uint32_t number,
                        const std::array<std::uint64_t, kBatch> &sequences,
                        const std::array<std::uint32_t, kBatch> &lengths) {
    // I: the engine's top-k writes the selection. R and G: slots, and what is missing.
    std::vector<std::int32_t> selection, slots(kBatch * kQuery * kTopK);
    for (std::uint32_t length : lengths) {
        for (std::uint32_t query = 0; query < kQuery; query++) select_rows(selection, number, length + query);
    }
    must(fb_layer(cache, step, layer, selection.data(), slots.data(), nullptr), cache);
    void *address = nullptr;
    std::uint64_t bytes = 0;
    must(fb_slab(cache, layer, &address, &bytes), cache);
    auto *slab = static_cast<std::uint8_t *>(address);
    // P: the engine writes the new rows to their landing slots.
    for (std::uint64_t sequence : sequences) {
        for (std::uint32_t query = 0; query < kQuery; query++) {
            std::uint32_t slot = 0;
            must(fb_landing_slot(cache, sequence, query, &slot), cache);
            std::memset(slab + std::size_t{slot} * kRow, static_cast<int>((number + query) & 0xff), kRow);
        }
    }
    // A: reads the slots, here the first byte of each. S: the new rows go to host memory.
    std::uint64_t sum = 0;
    for (std::int32_t slot : slots) sum += slab[static_cast<std::size_t>(slot) * kRow];
    must(fb_scatter(cache, step, layer, nullptr), cache);
    return sum;
}

int main() try {
    // Once: everything is taken here, and nothing later. The cache goes before its device.
    if (fb_abi_version() != FB_ABI_VERSION) throw std::runtime_error("another version of the library");
    auto where = sized<fb_device_config>();
    where.kind = FB_DEVICE_HOST;
    std::array<char, 512> text{};
    fb_device *made = nullptr;
    if (fb_device_create(&where, text.data(), text.size(), &made) != FB_OK) throw std::runtime_error(text.data());
    const Device device(made);
    auto config = sized<fb_cache_config>();
    if (fb_preset("deepseek-v3.2", text.data(), text.size(), &config) != FB_OK) {
        throw std::runtime_error(text.data());
    }
    config.layers = kLayers;
    config.top_k = kTopK;
    config.lanes = kBatch;
    config.max_tokens = 2048;
    config.slots = 256;
    config.query_rows = kQuery;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    fb_cache *taken = nullptr;
    if (fb_cache_create(device.get(), &config, text.data(), text.size(), &taken) != FB_OK) {
        throw std::runtime_error(text.data());
    }
    const Cache cache(taken);
    const std::array<std::uint64_t, kBatch> sequences{open_sequence(taken), open_sequence(taken)};

    std::uint64_t hits = 0, misses = 0, sum = 0;
    std::array<std::uint32_t, kBatch> lengths{kPrompt, kPrompt};
    for (std::uint32_t number = 0; number < kSteps; number++) {
        // Which sequences decode, and how many rows of their last step were accepted: the draft or not.
        std::array<fb_batch_row, kBatch> rows{};
        for (std::uint32_t s = 0; s < kBatch; s++) {
            rows[s] = {sequences[s], number == 0 ? 0 : 1 + (number + s) % 2, kQuery};
            lengths[s] += rows[s].accepted;
        }
        auto begin = sized<fb_step_config>();
        begin.rows = rows.data();
        begin.row_count = kBatch;
        begin.query_rows = kQuery;
        fb_step step = 0;
        must(fb_prepare(taken, &begin, nullptr, &step), taken);
        for (std::uint32_t layer = 0; layer < kLayers; layer++) {
            sum += run_layer(taken, step, layer, number, sequences, lengths);
        }
        must(fb_finish(taken, step, nullptr), taken);
        // When the step has ended: the counters, and the word that its tokens may be used.
        auto retired = sized<fb_retired>();
        must(fb_retire(taken, &step, nullptr, &retired), taken);
        hits += retired.hits;
        misses += retired.misses;
    }
    for (std::uint64_t sequence : sequences) must(fb_close(taken, sequence, nullptr), taken);
    std::printf("%u steps, %llu hits, %llu misses, sum %llu\n", kSteps, static_cast<unsigned long long>(hits),
                static_cast<unsigned long long>(misses), static_cast<unsigned long long>(sum));
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
