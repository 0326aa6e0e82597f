// The loop of a dense model of docs/integration.md, in C++: a prompt in chunks, then steps that decode a token. A
// second request with the same prompt finds its pages. In the middle of each another request is urgent, and the device
// is full: the running one is parked on the host, and comes back layer by layer. On this device, which works inline,
// the copies have ended when fb_dense_resume returns; on a GPU they run beside the layers.
#include <forebay.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

constexpr std::uint32_t kLayers = 4, kRun = 256, kPage = 16, kPrompt = 1000, kChunk = 256, kSteps = 100;
constexpr std::uint32_t kMost = kPrompt + kSteps;
// Pages of the device and of the host: those of one request, with its rows in flight, and a few more.
constexpr std::uint32_t kPages = kMost / kPage + 12;

struct Destroy {
    void operator()(fb_device *device) const { fb_device_destroy(device); }
    void operator()(fb_dense *dense) const { fb_dense_destroy(dense); }
    void operator()(fb_dense_names *names) const { fb_dense_names_destroy(names); }
};
using Device = std::unique_ptr<fb_device, Destroy>;
using Dense = std::unique_ptr<fb_dense, Destroy>;
using Names = std::unique_ptr<fb_dense_names, Destroy>;

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

// A model whose K and V of a token are bytes of the token's id.
class Engine {
public:
    // Where K and V of each layer are, and the tensors of steps: both stay where they are.
    explicit Engine(fb_dense *dense) : dense_(dense), tensors_(sized<fb_dense_step_tensors>()) {
        for (std::uint32_t at = 0; at < kMost; at++) ids_.push_back(at * 7 % 251);
        for (std::uint32_t layer = 0; layer < kLayers; layer++) {
            for (std::uint32_t run = 0; run < 2; run++) {
                views_[layer][run] = sized<fb_dense_layer_view>();
                must(fb_dense_view(dense, layer, run, &views_[layer][run]), dense);
            }
        }
        must(fb_dense_tensors(dense, 0, &tensors_), dense);
    }

    // A request: opens, computes what is not there, decodes, publishes, closes. Returns how many tokens were there.
    std::uint32_t serve() {
        // The last token is computed again, for its logits.
        const fb_tokens prompt = tokens(0, kPrompt - 1);
        fb_dense_names *hashed = nullptr;
        must(fb_dense_names_create(dense_, "tenant", 6, &prompt, &hashed), dense_);
        const Names names(hashed);
        std::uint64_t sequence = 0;
        auto found = sized<fb_dense_found>();
        must(fb_dense_open_shared(dense_, kPrompt, kSteps, hashed, nullptr, &sequence, &found, nullptr), dense_);
        std::uint32_t accepted = 0;
        for (std::uint32_t at = found.tokens; at < kPrompt; at += accepted) {
            const std::uint32_t rows = std::min(kPrompt - at, kChunk);
            sum_ += step(sequence, ids_.data(), accepted, rows);
            accepted = rows;
        }
        for (std::uint32_t number = 0; number < kSteps; number++) {
            if (number == kSteps / 2) {
                accepted = preempt(sequence, accepted);
            }
            sum_ += step(sequence, ids_.data(), accepted, 1);
            accepted = 1;
        }
        // Full pages whose rows are accepted are found by later requests.
        const fb_tokens all = tokens(found.tokens, kMost - found.tokens);
        std::uint32_t published = 0;
        must(fb_dense_publish(dense_, sequence, found.tokens, &all, &published), dense_);
        // They go to the host too, at most so many bytes in a call: what is there costs a parking no copy.
        std::uint64_t saved = 0;
        must(fb_dense_save(dense_, nullptr, 1 << 20, &saved), dense_);
        must(fb_dense_close(dense_, sequence, nullptr), dense_);
        return found.tokens;
    }

    // The sum of what attention has read for these requests since the last call.
    std::uint64_t sum() { return std::exchange(sum_, 0); }

private:
    fb_tokens tokens(std::uint32_t from, std::uint32_t count) const {
        auto tokens = sized<fb_tokens>();
        tokens.ids = ids_.data() + from;
        tokens.count = count;
        return tokens;
    }

    std::uint8_t *row(std::uint32_t layer, std::uint32_t run, std::uint64_t page, std::uint64_t token) const {
        const fb_dense_layer_view &view = views_[layer][run];
        return static_cast<std::uint8_t *>(view.address) + page * view.stride + token * view.row_bytes;
    }

    // The projections: new rows go to their slots.
    void write_rows(std::uint32_t layer, const std::uint32_t *ids, std::uint32_t rows) const {
        auto *slots = static_cast<const std::int64_t *>(tensors_.slots[0]);
        auto *positions = static_cast<const std::int64_t *>(tensors_.positions);
        for (std::uint32_t at = 0; at < rows; at++) {
            const auto slot = static_cast<std::uint64_t>(slots[at]);
            const auto id = static_cast<int>(ids[positions[at]]);
            for (std::uint32_t run = 0; run < 2; run++) {
                std::memset(row(layer, run, slot / kPage, slot % kPage), id, kRun);
            }
        }
    }

    // Attention: reads the rows of the only batch row by its page table, and checks whose they are.
    std::uint64_t attend(std::uint32_t layer, const std::uint32_t *ids) const {
        std::uint64_t sum = 0;
        auto *table = static_cast<const std::int32_t *>(tensors_.tables[0]);
        const auto length = static_cast<std::uint32_t>(static_cast<const std::int32_t *>(tensors_.lengths)[0]);
        for (std::uint32_t at = 0; at < length; at++) {
            for (std::uint32_t run = 0; run < 2; run++) {
                const std::uint8_t *bytes = row(layer, run, static_cast<std::uint64_t>(table[at / kPage]), at % kPage);
                if (std::count(bytes, bytes + kRun, ids[at]) != kRun) throw std::runtime_error("another row");
                sum += run == 0 ? bytes[0] : 0;
            }
        }
        return sum;
    }

    // One step of one sequence: `rows` query rows, after `accepted` of the last step's.
    std::uint64_t step(std::uint64_t sequence, const std::uint32_t *ids, std::uint32_t accepted,
                       std::uint32_t rows) const {
        std::uint64_t sum = 0;
        fb_step step = 0;
        const fb_batch_row batch_row{sequence, accepted, rows};
        must(fb_dense_prepare(dense_, 0, &batch_row, 1, nullptr, nullptr, &step), dense_);
        for (std::uint32_t layer = 0; layer < kLayers; layer++) {
            // Before new rows are written: the pages that come back from the host are there.
            must(fb_dense_arrived(dense_, step, layer, nullptr), dense_);
            // P: the engine writes the new rows to their slots. A: attention reads the pages.
            write_rows(layer, ids, rows);
            sum += attend(layer, ids);
        }
        must(fb_dense_finish(dense_, step, nullptr), dense_);
        // When the step has ended: the committed length, and the word that its tokens may be used.
        std::uint32_t length = 0;
        must(fb_dense_retire(dense_, &step, nullptr, &length, 1, nullptr), dense_);
        return sum;
    }

    // Another request is urgent. If the device is full, the running one waits on the host until it has ended. Returns
    // how many rows its next step accepts: none after a parking, which has accepted the last ones.
    std::uint32_t preempt(std::uint64_t running, std::uint32_t accepted) const {
        std::uint64_t urgent = 0;
        fb_status opened = fb_dense_open(dense_, kChunk, 1, &urgent);
        const bool parks = opened == FB_EXHAUSTED;
        if (parks) {
            must(fb_dense_park(dense_, running, accepted, nullptr, nullptr), dense_);
            opened = fb_dense_open(dense_, kChunk, 1, &urgent);
        }
        must(opened, dense_);
        step(urgent, ids_.data() + 1, 0, kChunk);
        step(urgent, ids_.data() + 1, kChunk, 1);
        must(fb_dense_close(dense_, urgent, nullptr), dense_);
        if (parks) must(fb_dense_resume(dense_, running, nullptr, nullptr), dense_);
        return parks ? 0 : accepted;
    }

    fb_dense *dense_;
    fb_dense_step_tensors tensors_;
    std::array<std::array<fb_dense_layer_view, 2>, kLayers> views_{};
    std::vector<std::uint32_t> ids_;
    std::uint64_t sum_ = 0;
};

int main() try {
    // Once: everything is taken here, and nothing later. The cache goes before its device.
    auto where = sized<fb_device_config>();
    where.kind = FB_DEVICE_HOST;
    std::array<char, 512> text{};
    fb_device *made = nullptr;
    if (fb_device_create(&where, text.data(), text.size(), &made) != FB_OK) throw std::runtime_error(text.data());
    const Device device(made);
    const std::array<std::uint32_t, kLayers> layers{0, 1, 2, 3};
    auto config = sized<fb_dense_config>();
    config.groups[0].layers = layers.data();
    config.groups[0].layer_count = kLayers;
    config.groups[0].row_bytes[0] = config.groups[0].row_bytes[1] = kRun;
    config.group_count = 1;
    config.page_tokens = kPage;
    config.sequences = 4;
    config.max_tokens = kMost;
    config.device_pages[0] = config.host_pages[0] = kPages;
    config.bring_layers = 1;
    config.memory = FB_MEMORY_UNLOCKED;
    fb_dense *taken = nullptr;
    if (fb_dense_create(made, &config, text.data(), text.size(), &taken) != FB_OK) {
        throw std::runtime_error(text.data());
    }
    const Dense dense(taken);
    Engine engine(taken);
    const std::uint32_t first = engine.serve();
    const std::uint64_t sum = engine.sum();
    const std::uint32_t second = engine.serve();
    std::printf("%u and %u tokens found, sums %llu and %llu\n", first, second, static_cast<unsigned long long>(sum),
                static_cast<unsigned long long>(engine.sum()));
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
