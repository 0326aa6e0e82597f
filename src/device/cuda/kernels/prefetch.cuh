// A hint: lines of the device's memory come into L2 before they are read.
//
// A thread asks for a line and gets nothing back, so loads do not pace the kernel: it would ask as fast as it issues.
// The clock of the multiprocessor does: each thread asks for one line in a round, when the cycles of the round are
// over. The host computes these from the rate and the highest clock that the device has. At a lower one the rate is
// lower, so it is a bound. Few small blocks, without shared memory, leave room beside other kernels.
#pragma once

#include "block.cuh"

// What a request from a multiprocessor to L2 is for.
static const u32 LINE_BYTES = 128;
// How long a thread sleeps before it looks at the clock again, at most twice this.
static const u32 NAP_NS = 100;

// Asks for a line. On a CPU it is read: memory that is not there ends the run.
static __device__ __forceinline__ void ask_for_line(u64 address) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
#else
    standin::prefetch(reinterpret_cast<const char*>(address));
#endif
}

// Grid: any number of blocks, which divide the lines. `cycles` are those of a round of all blocks.
FOREBAY_KERNEL(forebay_prefetch, PrefetchArgs, MOST_THREADS, 2) {
    after_previous();
    u64 begin = static_cast<u64>(clock64()), round = static_cast<u64>(gridDim.x) * blockDim.x;
    u64 due = args.cycles;
    for (u64 line = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; line < args.lines; line += round) {
        while (static_cast<u64>(clock64()) - begin < due) __nanosleep(NAP_NS);
        ask_for_line(args.first + line * LINE_BYTES);
        due += args.cycles;
    }
}
