// Kernels that show what the CPU's header detects: a program that runs one of them and prints the result.
#include "cpu.h"

struct Args {
    unsigned* out;
    unsigned flag;
};

// Reads a neighbour's word before it is surely written, unless the flag asks for the barrier.
FOREBAY_KERNEL(race, Args, 128, 1) {
    __shared__ unsigned words[128];
    words[threadIdx.x] = threadIdx.x;
    if (args.flag) __syncthreads();
    atomicAdd(args.out, unsigned{words[(threadIdx.x + 40) % blockDim.x] == (threadIdx.x + 40) % blockDim.x});
}

// The lanes of a warp exchange words through shared memory, with or without the warp's barrier.
FOREBAY_KERNEL(warp_race, Args, 128, 1) {
    __shared__ unsigned words[128];
    words[threadIdx.x] = threadIdx.x;
    if (args.flag) __syncwarp();
    atomicAdd(args.out, unsigned{words[threadIdx.x ^ 5] == (threadIdx.x ^ 5)});
}

// The later of two blocks wins; the seed decides which one that is.
FOREBAY_KERNEL(blocks_race, Args, 128, 1) {
    if (threadIdx.x == 0) *args.out = blockIdx.x;
}

FOREBAY_KERNEL(unreached, Args, 128, 1) {
    if (threadIdx.x < 7) __syncthreads();
}

FOREBAY_KERNEL(two_barriers, Args, 128, 1) {
    if (threadIdx.x < 7) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

FOREBAY_KERNEL(absent_lane, Args, 128, 1) {
    if (threadIdx.x != 9) *args.out = __ballot_sync(0xFFFFFFFFu, 1);
}

FOREBAY_KERNEL(foreign_lane, Args, 128, 1) { *args.out = __shfl_sync(0x0Fu, threadIdx.x, 9); }

FOREBAY_KERNEL(misaligned, Args, 128, 1) {
    const uint4* from = reinterpret_cast<const uint4*>(args.out + 1);
    *args.out = __ldg(from).x;
}

FOREBAY_KERNEL(beyond_shared, Args, 128, 1) {
    FOREBAY_DYNAMIC_SHARED(unsigned, words);
    words[threadIdx.x] = 1;
    *args.out = words[0];
}

FOREBAY_KERNEL(deep, Args, 128, 1) {
    // More than a stack has room for.
    volatile char room[1 << 20];
    for (unsigned i = 0; i < sizeof room; i += 512) room[sizeof room - 1 - i] = static_cast<char>(i);
    *args.out = static_cast<unsigned>(room[77]);
}

static unsigned wrong;

static void expect(bool holds, int line) {
    if (!holds && wrong++ < 5) printf("line %d, thread %u\n", line, threadIdx.x);
}
#define EXPECT(holds) expect(holds, __LINE__)

FOREBAY_KERNEL(operations, Args, 128, 1) {
    unsigned thread = threadIdx.x, lane = thread % 32, all = 0xFFFFFFFFu;
    EXPECT(blockDim.x == 96 && gridDim.x == 3 && gridDim.y == 2 && blockIdx.x < 3 && blockIdx.y < 2);
    EXPECT(__ballot_sync(all, lane % 3 == 0) == 0x49249249u);
    EXPECT(__any_sync(all, lane == 31) && !__any_sync(all, 0) && __all_sync(all, 1) && !__all_sync(all, lane));
    EXPECT(__shfl_sync(all, thread * 2ull << 32, 5) == (thread - lane + 5) * 2ull << 32);
    EXPECT(__shfl_up_sync(all, lane, 3) == (lane < 3 ? lane : lane - 3));
    EXPECT(__shfl_down_sync(all, lane, 3) == (lane > 28 ? lane : lane + 3));
    EXPECT(__shfl_xor_sync(all, lane, 6) == (lane ^ 6));
    EXPECT(__match_any_sync(all, lane / 16) == (lane < 16 ? 0xFFFFu : 0xFFFF0000u));
    EXPECT(__reduce_add_sync(all, lane) == 496 && __reduce_max_sync(all, lane) == 31);
    EXPECT(__reduce_min_sync(all, lane + 4) == 4 && __reduce_or_sync(all, 1u << lane) == all);
    EXPECT(__reduce_and_sync(all, ~(1u << lane)) == 0);
    // Two groups of lanes meet separately, at different places.
    if (lane < 8) {
        EXPECT(__ballot_sync(0xFFu, lane & 1) == 0xAAu && __reduce_add_sync(0xFFu, lane) == 28);
    } else {
        EXPECT(__ballot_sync(0xFFFFFF00u, 1) == 0xFFFFFF00u);
    }
    EXPECT(__syncthreads_count(thread % 2 == 0) == 48 && __syncthreads_or(thread == 95));
    EXPECT(__syncthreads_and(1) && !__syncthreads_and(thread != 5) && !__syncthreads_or(0));
    EXPECT(__popc(0xF0u) == 4 && __popcll(~0ull) == 64 && __clz(1) == 31 && __clz(0) == 32 && __clzll(1) == 63);
    EXPECT(__ffs(8) == 4 && __ffs(0) == 0 && __ffsll(1ll << 40) == 41 && __brev(1) == 0x80000000u);
    atomicAdd(args.out, 1u);
    atomicMax(args.out + 1, thread);
    atomicMin(args.out + 2, thread);
    atomicOr(args.out + 3, 1u << lane);
    atomicAnd(args.out + 4, ~(1u << lane));
    unsigned seen = args.out[5];
    for (unsigned was = ~seen; was != seen;) {
        was = seen;
        seen = atomicCAS(args.out + 5, was, was + 2);
    }
}

static int check_operations(const unsigned grid[3], unsigned long long seed) {
    unsigned out[6] = {0, 0, ~0u, 0, ~0u, 0}, block[3] = {96, 1, 1};
    Args args = {out, 0};
    standin::find("operations")->run(grid, block, 0, &args, seed);
    bool right = out[0] == 576 && out[1] == 95 && out[2] == 0 && out[3] == ~0u && out[4] == 0 && out[5] == 1152;
    puts(right && wrong == 0 ? "right" : "wrong");
    return 0;
}

// Arguments: kernel, flag, seed, dynamic shared bytes.
int main(int count, char** values) {
    if (count < 5) return 2;
    const standin_kernel* kernel = standin::find(values[1]);
    if (!kernel) return 2;
    unsigned long long seed = strtoull(values[3], nullptr, 10);
    unsigned six[3] = {3, 2, 1}, two[3] = {2, 1, 1}, block[3] = {64, 1, 1};
    if (!strcmp(values[1], "operations")) return check_operations(six, seed);
    alignas(16) unsigned out[8] = {};
    Args args = {out, static_cast<unsigned>(atoi(values[2]))};
    kernel->run(two, block, static_cast<unsigned>(atoi(values[4])), &args, seed);
    printf("%u\n", out[0]);
    return 0;
}
