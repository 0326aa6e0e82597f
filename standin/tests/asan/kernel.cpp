// A kernel with the features of forebay's kernels: dynamic and static shared memory, barriers, warp operations, and
// arrays that a thread keeps on the stack of its fibre.
#include "cpu.h"

#include "fold.h"

// Sums `count` words, a block's share at a time, with one thread per dynamic shared word.
FOREBAY_KERNEL(asan_fold, FoldArgs, 256, 1) {
    FOREBAY_DYNAMIC_SHARED(unsigned, words);
    __shared__ unsigned sums[8];
    unsigned own[4] = {};
    const unsigned* from = reinterpret_cast<const unsigned*>(args.from);
    unsigned thread = threadIdx.x, threads = blockDim.x, first = blockIdx.x * threads;
    for (unsigned index = first + thread, turn = 0; index < args.count; index += gridDim.x * threads, ++turn) {
        own[turn % 4] += from[index];
    }
    words[args.plant == DYNAMIC ? threads + 8 : thread] = own[0] + own[1] + own[2] + own[3];
    __syncthreads();
    unsigned sum = words[threads - 1 - thread];
    for (int width = 16; width > 0; width /= 2) sum += __shfl_xor_sync(~0u, sum, width);
    if (thread % 32 == 0) sums[args.plant == STATIC ? 8 : thread / 32] = sum;
    __syncthreads();
    volatile unsigned at = args.plant == FRAME ? 5 : 3;
    unsigned* volatile row = own;
    row[at] = __reduce_add_sync(~0u, thread % 32 < threads / 32 ? sums[thread % 32] : 0);
    if (thread == 0) atomicAdd(reinterpret_cast<unsigned*>(args.to), row[at]);
}
