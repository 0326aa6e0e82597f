// The kernels as a CPU runs them, and what Rust tests call by C names.
#include "include/cpu.h"

#include "../src/device/cuda/kernels/forebay.cu"

#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

// The kernel of this name, or null.
STANDIN_EXPORT const standin_kernel* standin_find(const char* name) { return standin::find(name); }

// Runs a kernel; false where there is none of this name, or its argument has another size.
STANDIN_EXPORT bool standin_run(const char* name, const unsigned grid[3], const unsigned block[3],
                                unsigned shared_bytes, const void* args, unsigned args_bytes,
                                unsigned long long seed) {
    const standin_kernel* kernel = standin::find(name);
    if (!kernel || kernel->args_bytes != args_bytes) return false;
    kernel->run(grid, block, shared_bytes, args, seed);
    return true;
}
