// The functions by which tests read and set the driver's state; the Rust side of the crate calls them.

#include <cstring>

#include "state.h"

// The same layout as in lib.rs.
struct StandinResources {
    uint64_t allocations, host_allocations, reservations, handles, mappings, registrations, streams, events, graphs,
        execs, modules, contexts, pinned;
};

using namespace driver;

namespace {

typedef std::lock_guard<std::mutex> Held;

uint64_t spans_of(Span::Kind kind) {
    uint64_t count = 0;
    for (auto& [begin, span] : gpu.spans) count += span.kind == kind;
    return count;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void standin_configure(const StandinOptions* options) {
    Held held(gpu.lock);
    gpu.options = *options;
    gpu.random = options->seed;
}

uint64_t standin_calls() {
    Held held(gpu.lock);
    return gpu.calls;
}

uint64_t standin_calls_of(const char* name) {
    Held held(gpu.lock);
    uint64_t count = 0;
    for (auto& [called, times] : gpu.calls_of) count += strcmp(called, name) ? 0 : times;
    return count;
}

uint64_t standin_operations() {
    Held held(gpu.lock);
    return gpu.operations;
}

uint64_t standin_waits() {
    Held held(gpu.lock);
    return gpu.waits;
}

uint64_t standin_synchronizations() {
    Held held(gpu.lock);
    return gpu.synchronizations;
}

uint64_t standin_prioritized() {
    Held held(gpu.lock);
    return gpu.prioritized;
}

void standin_fail_call(uint64_t from_now, int code) {
    Held held(gpu.lock);
    gpu.fail_call_at = gpu.calls + from_now;
    gpu.fail_call_code = static_cast<CUresult>(code);
    gpu.failed = nullptr;
}

const char* standin_failed() {
    Held held(gpu.lock);
    return gpu.failed;
}

void standin_fail_operation(uint64_t from_now, int code) {
    Held held(gpu.lock);
    gpu.fail_operation_at = gpu.operations + from_now;
    gpu.fail_operation_code = static_cast<CUresult>(code);
}

void standin_hold(uint64_t handle, int hold) {
    Held held(gpu.lock);
    auto stream = find_stream(reinterpret_cast<CUstream>(handle));
    if (!stream) return;
    stream->held = hold;
    if (!hold && !gpu.options.has_seed) observe();
}

void standin_without_waits(uint64_t from, uint64_t to) {
    Held held(gpu.lock);
    gpu.unwaited_from = from;
    gpu.unwaited_to = to;
}

void standin_held_resources(StandinResources* out) {
    Held held(gpu.lock);
    *out = {};
    out->allocations = spans_of(Span::Allocation);
    out->host_allocations = spans_of(Span::HostAllocation);
    out->reservations = gpu.reservations.size();
    out->handles = gpu.handles.objects.size();
    out->mappings = spans_of(Span::Mapped);
    out->registrations = spans_of(Span::Registered);
    for (auto& [handle, stream] : gpu.streams) out->streams += handle > PER_THREAD && !stream->gone;
    out->events = gpu.events.objects.size();
    out->graphs = gpu.graphs.objects.size();
    out->execs = gpu.execs.objects.size();
    out->modules = gpu.modules.objects.size();
    for (auto& device : gpu.devices) out->contexts += device->retained;
    for (auto& [begin, span] : gpu.spans) {
        bool pinned = span.kind == Span::HostAllocation || span.kind == Span::Registered;
        out->pinned += pinned ? span.bytes : 0;
    }
}

int standin_read(uint64_t address, void* to, uint64_t bytes) {
    Held held(gpu.lock);
    Place there = place(address, bytes);
    if (there != Place::Device && there != Place::Pinned) return 0;
    memcpy(to, reinterpret_cast<const void*>(address), bytes);
    return 1;
}

int standin_write(uint64_t address, const void* from, uint64_t bytes) {
    Held held(gpu.lock);
    Place there = place(address, bytes);
    if (there != Place::Device && there != Place::Pinned) return 0;
    memcpy(reinterpret_cast<void*>(address), from, bytes);
    return 1;
}
}
#pragma GCC visibility pop
