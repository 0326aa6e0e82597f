// Calls kernels as functions, without a driver: for tests of the kernels alone.
#include "cpu.h"

// Runs a kernel. Returns false if no kernel has this name or if its argument has another size.
extern "C" __attribute__((visibility("default"))) bool standin_run(const char* name, const unsigned grid[3],
                                                                   const unsigned block[3],
                                                                   unsigned shared_bytes, const void* args,
                                                                   unsigned args_bytes,
                                                                   unsigned long long seed) {
    const standin_kernel* kernel = standin::find(name);
    if (!kernel || kernel->args_bytes != args_bytes) return false;
    kernel->run(grid, block, shared_bytes, args, seed);
    return true;
}
