// The interface from C++: holders that destroy their objects, and a small engine that uses them.

#include <forebay.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::uint64_t checks = 0;

void check(bool holds, const char *what, int line) {
    checks++;
    if (!holds) {
        std::fprintf(stderr, "holders.cpp:%d: %s\n", line, what);
        std::exit(1);
    }
}
#define CHECK(condition) check((condition), #condition, __LINE__)

// A status other than FB_OK, with the error text of the failed object.
class Error : public std::runtime_error {
  public:
    Error(fb_status found, const std::string &text)
        : std::runtime_error(std::string(fb_status_text(found)) + ": " + text), status(found) {}
    fb_status status;
};

void must(const void *handle, fb_status status) {
    if (status == FB_OK) {
        return;
    }
    std::array<char, 256> text{};
    if (handle != nullptr) {
        (void)fb_error_text(handle, text.data(), text.size());
    }
    throw Error(status, text.data());
}

struct End {
    void operator()(fb_device *device) const { must(device, fb_device_destroy(device)); }
    void operator()(fb_cache *cache) const { must(cache, fb_cache_destroy(cache)); }
    void operator()(fb_ticket *ticket) const { must(ticket, fb_ticket_destroy(ticket)); }
};
template <typename T> using Holder = std::unique_ptr<T, End>;

template <typename T> T sized() {
    T value{};
    value.size = sizeof value;
    return value;
}

constexpr std::uint32_t layers = 2, row_bytes = 64, top_k = 8, prompt = 80, steps = 40;
using Row = std::array<std::uint32_t, row_bytes / 4>;

Row row_of(std::uint32_t layer, std::uint32_t position) {
    Row row{};
    for (std::uint32_t word = 0; word < row.size(); word++) {
        row[word] = layer << 24 | position << 8 | word;
    }
    return row;
}

Holder<fb_device> make_device() {
    auto config = sized<fb_device_config>();
    config.kind = FB_DEVICE_HOST;
    fb_device *device = nullptr;
    must(nullptr, fb_device_create(&config, nullptr, 0, &device));
    return Holder<fb_device>(device);
}

fb_cache_config declared() {
    auto config = sized<fb_cache_config>();
    config.layers = layers;
    config.row_bytes[0] = row_bytes;
    config.page_tokens = 16;
    config.top_k = top_k;
    config.lanes = 2;
    config.max_tokens = prompt + steps;
    config.slots = 24;
    config.query_rows = 1;
    config.memory = FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED;
    return config;
}

Holder<fb_cache> make_cache(const Holder<fb_device> &device) {
    const auto config = declared();
    fb_cache *cache = nullptr;
    std::array<char, 256> text{};
    const auto status = fb_cache_create(device.get(), &config, text.data(), text.size(), &cache);
    if (status != FB_OK) {
        throw Error(status, text.data());
    }
    return Holder<fb_cache>(cache);
}

// A sequence that its holder closes.
class Sequence {
  public:
    explicit Sequence(fb_cache *of) : cache(of) {
        auto config = sized<fb_open_config>();
        config.prompt = prompt;
        config.promised = steps;
        must(cache, fb_open(cache, &config, &number));
        for (std::uint32_t layer = 0; layer < layers; layer++) {
            std::vector<Row> rows;
            for (std::uint32_t position = 0; position < prompt; position++) {
                rows.push_back(row_of(layer, position));
            }
            must(cache, fb_append(cache, number, layer, rows.data(), prompt));
        }
        fb_ticket *ticket = nullptr;
        must(cache, fb_join(cache, number, nullptr, nullptr, &ticket));
        const Holder<fb_ticket> joined(ticket);
        std::uint32_t outcome = 0;
        must(ticket, fb_ticket_outcome(ticket, &outcome, nullptr));
        CHECK(outcome == FB_TICKET_DONE);
    }
    ~Sequence() { (void)fb_close(cache, number, nullptr); }
    Sequence(const Sequence &) = delete;
    Sequence &operator=(const Sequence &) = delete;

    void step() {
        const fb_batch_row row = {number, decoded > 0 ? 1u : 0u, 1};
        auto config = sized<fb_step_config>();
        config.rows = &row;
        config.row_count = 1;
        config.query_rows = 1;
        fb_step now = 0;
        must(cache, fb_prepare(cache, &config, nullptr, &now));
        std::uint32_t landing = 0;
        must(cache, fb_landing_slot(cache, number, 0, &landing));
        for (std::uint32_t layer = 0; layer < layers; layer++) {
            one_layer(now, layer, landing);
        }
        must(cache, fb_finish(cache, now, nullptr));
        must(cache, fb_retire(cache, &now, nullptr, nullptr));
        decoded++;
    }

  private:
    void one_layer(fb_step now, std::uint32_t layer, std::uint32_t landing) {
        void *slab = nullptr;
        std::uint64_t bytes = 0;
        must(cache, fb_slab(cache, layer, &slab, &bytes));
        auto *const at = static_cast<unsigned char *>(slab);
        const auto position = prompt + decoded;
        const auto own = row_of(layer, position);
        std::memcpy(at + std::size_t{landing} * row_bytes, own.data(), row_bytes);
        std::array<std::int32_t, top_k> selection{}, slots{};
        for (std::uint32_t k = 0; k < top_k; k++) {
            selection[k] = static_cast<std::int32_t>((position * (k + 5) + layer) % (position + 1));
        }
        must(cache, fb_layer(cache, now, layer, selection.data(), slots.data(), nullptr));
        for (std::uint32_t k = 0; k < top_k; k++) {
            const auto wanted = row_of(layer, static_cast<std::uint32_t>(selection[k]));
            CHECK(slots[k] >= 0);
            const auto slot = static_cast<std::size_t>(slots[k]);
            CHECK((slot + 1) * row_bytes <= bytes);
            CHECK(std::memcmp(at + slot * row_bytes, wanted.data(), row_bytes) == 0);
        }
        must(cache, fb_scatter(cache, now, layer, nullptr));
    }

    fb_cache *cache;
    std::uint64_t number = 0;
    std::uint32_t decoded = 0;
};

// After any exception, holders destroy their objects in the order that the library requires.
void unwinds() {
    bool thrown = false;
    try {
        const auto device = make_device();
        const auto cache = make_cache(device);
        const Sequence first(cache.get());
        must(cache.get(), fb_close(cache.get(), 77, nullptr));
    } catch (const Error &error) {
        thrown = error.status == FB_CLOSED && std::string(error.what()).find("closed") != std::string::npos;
    }
    CHECK(thrown);
}

} // namespace

int main() {
    CHECK(fb_abi_version() == FB_ABI_VERSION);
    {
        const auto device = make_device();
        const auto cache = make_cache(device);
        Sequence first(cache.get()), second(cache.get());
        for (std::uint32_t number = 0; number < steps; number++) {
            first.step();
            if (number % 3 == 0) {
                second.step();
            }
        }
    }
    unwinds();
    std::printf("%llu checks\n", static_cast<unsigned long long>(checks));
    return 0;
}
