// Calls kernels as functions, without a driver: for tests of the kernels alone.
#include "cpu.h"

namespace {

// The lines that the kernels of `standin_run` asked for.
std::vector<standin::Asked> asked;

}  // namespace

// Copies what the last kernel asked for, up to `most` lines, each an address and a cycle. Returns how many there are.
extern "C" __attribute__((visibility("default"))) unsigned long long standin_asked(standin::Asked* to,
                                                                                   unsigned long long most) {
    for (unsigned long long line = 0; line < asked.size() && line < most; ++line) to[line] = asked[line];
    return asked.size();
}

// Runs a kernel. Returns false if no kernel has this name or if its argument has another size.
extern "C" __attribute__((visibility("default"))) bool standin_run(const char* name, const unsigned grid[3],
                                                                   const unsigned block[3],
                                                                   unsigned shared_bytes, const void* args,
                                                                   unsigned args_bytes,
                                                                   unsigned long long seed) {
    const standin_kernel* kernel = standin::find(name);
    if (!kernel || kernel->args_bytes != args_bytes) return false;
    asked.clear();
    standin::asked = &asked;
    kernel->run(grid, block, shared_bytes, args, seed);
    standin::asked = nullptr;
    return true;
}
