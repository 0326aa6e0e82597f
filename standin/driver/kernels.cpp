// Finds the compiled-in kernels, and defines a few of the stand-in's own for its tests.

#include "cpu.h"

#include "state.h"

namespace driver {

const standin_kernel* find_kernel(const char* name) { return standin::find(name); }

unsigned kernel_args(const standin_kernel& kernel) { return kernel.args_bytes; }

unsigned kernel_threads(const standin_kernel& kernel) { return kernel.max_threads; }

void run_kernel(const standin_kernel& kernel, const Action& action, uint64_t seed) {
    kernel.run(action.grid, action.block, action.shared, action.args.data(), seed);
}

}  // namespace driver

struct StandinAdd {
    unsigned long long to, from;
    unsigned count, value;
};

// Sets each word of `to` to the word of `from` plus `value`.
FOREBAY_KERNEL(standin_add, StandinAdd, 256, 1) {
    const unsigned* from = reinterpret_cast<const unsigned*>(args.from);
    unsigned* to = reinterpret_cast<unsigned*>(args.to);
    for (unsigned index = blockIdx.x * blockDim.x + threadIdx.x; index < args.count;
         index += gridDim.x * blockDim.x) {
        to[index] = from[index] + args.value;
    }
}
