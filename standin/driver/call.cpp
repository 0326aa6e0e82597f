// What every call does first: count itself, fail if a test planned it, and check what must hold before it acts.

#include "state.h"

namespace driver {

State gpu;

namespace {

CUresult refusal(const char* name, unsigned needs) {
    if (thread.in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    uint64_t number = gpu.calls++;
    ++gpu.calls_of[name];
    if (number == gpu.fail_call_at) {
        gpu.failed = name;
        return gpu.fail_call_code;
    }
    if (gpu.options.stub) return CUDA_ERROR_STUB_LIBRARY;
    if ((needs & INITIALIZED) && !gpu.initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (gpu.sticky && !(needs & (GIVES_BACK | THREAD_ONLY))) return gpu.sticky;
    if ((needs & CONTEXT) == CONTEXT) {
        if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
        if (!current()->retained) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (needs & UNSAFE) {
        if (CUresult refused = unsafe_call()) return refused;
    }
    if (needs & BLOCKS) ++gpu.synchronizations;
    return CUDA_SUCCESS;
}

}  // namespace

CUresult enter(const char* name, unsigned needs, const std::function<CUresult()>& body) {
    std::lock_guard<std::mutex> held(gpu.lock);
    if (CUresult refused = refusal(name, needs)) return refused;
    CUresult result = body();
    // If an operation fails while a call waits for it or lets it run, that call reports the failure.
    if (gpu.sticky && !(needs & THREAD_ONLY)) return gpu.sticky;
    return result;
}

uint64_t next_random() {
    gpu.random += 0x9E3779B97F4A7C15ull;
    uint64_t word = gpu.random;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

uint64_t random_below(uint64_t bound) { return next_random() % bound; }

}  // namespace driver
