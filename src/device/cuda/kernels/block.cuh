// What kernels are made of: their declaration, and sums over a block of threads.
//
// Kernels run with any number of threads that is a multiple of `WARP_LANES`, up to the bound they declare.
#pragma once

#include "abi.h"

// Tests run the kernels on a CPU, whose header defines these differently.
#if defined(FOREBAY_CPU)
#include "cpu.h"
#else
#define FOREBAY_KERNEL(name, Args, most_threads, least_blocks)                          \
    extern "C" __global__ void __launch_bounds__(most_threads, least_blocks)            \
        name(const __grid_constant__ Args args)
#define FOREBAY_DYNAMIC_SHARED(T, name) extern __shared__ T name[]
#define FOREBAY_UNROLL _Pragma("unroll")
#endif

// The host checks that the device's warps have as many lanes.
static const u32 WARP_LANES = 32;
static const u32 ALL_LANES = 0xFFFFFFFFu;
static const u32 MOST_THREADS = 512;
static const u32 MOST_WARPS = MOST_THREADS / WARP_LANES;
// Loads that a thread has under way in a loop, before it looks at the first.
static const u32 AHEAD = 4;

// A kernel calls this before it reads what the previous kernel wrote. Without the launch attribute that lets a kernel
// begin early there is nothing to wait for. The next kernel may begin as soon as all blocks of this one are here: it
// waits in the same call until they have ended.
static __device__ __forceinline__ void after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Copies a word of device memory to shared memory, asynchronously. Each thread waits in `wait_for_words` for the words
// that it has asked for.
static __device__ __forceinline__ void copy_word(u32* to, const u32* from) {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
#else
    *to = *from;
#endif
}

static __device__ __forceinline__ void wait_for_words() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <class T>
static __device__ __forceinline__ T* at(u64 address) {
    return reinterpret_cast<T*>(address);
}

static __device__ __forceinline__ u32 lane_id() { return threadIdx.x % WARP_LANES; }
static __device__ __forceinline__ u32 warp_id() { return threadIdx.x / WARP_LANES; }
static __device__ __forceinline__ u32 warps() { return blockDim.x / WARP_LANES; }

static __device__ __forceinline__ u32 saturating_sub(u32 a, u32 b) { return a > b ? a - b : 0; }
static __device__ __forceinline__ u32 div_ceil(u32 a, u32 b) { return a / b + (a % b != 0); }

// The sum of `value` over the threads before this one, and over all. Every thread of the block calls it;
// `room` may be used again after it.
static __device__ u32 block_scan(u32 (&room)[MOST_WARPS], u32 value, u32& total) {
    u32 inclusive = value;
    for (u32 by = 1; by < WARP_LANES; by *= 2) {
        u32 below = __shfl_up_sync(ALL_LANES, inclusive, by);
        if (lane_id() >= by) inclusive += below;
    }
    if (lane_id() == WARP_LANES - 1) room[warp_id()] = inclusive;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 warp = 0; warp < warps(); ++warp) {
        if (warp == warp_id()) before = total;
        total += room[warp];
    }
    __syncthreads();
    return before + inclusive - value;
}

// A thread's words of a set of `words` words: adjacent ones, an odd number of them, so that a warp's reads fall into
// different banks.
struct Words {
    u32 first, end;
};

static __device__ __forceinline__ Words words_of(u32 thread, u32 words) {
    u32 chunk = div_ceil(words, blockDim.x) | 1, first = min(thread * chunk, words);
    return {first, min(first + chunk, words)};
}

// Calls `found(rank, place)` for every one of a set of bits, ranks in the order of places. Every thread of the block
// calls it. Answers how many ones there are; after an answer of 0 no thread reads the set any more.
template <class Found>
static __device__ u32 each_one(u32 (&room)[MOST_WARPS], const u32* set, u32 words, Found found) {
    Words own = words_of(threadIdx.x, words);
    u32 count = 0;
    for (u32 word = own.first; word < own.end; ++word) count += __popc(set[word]);
    u32 total;
    u32 rank = block_scan(room, count, total);
    if (total == 0) return 0;
    for (u32 word = own.first; word < own.end; ++word) {
        for (u32 bits = set[word]; bits != 0; bits &= bits - 1) {
            found(rank++, word * 32 + __ffs(static_cast<i32>(bits)) - 1);
        }
    }
    return total;
}

// Which of `rows` things has the one of this number, of all their ones: the last one with no more before it.
static __device__ u32 find_row(const u32* before, u32 rows, u32 number) {
    u32 low = 0, high = rows;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (before[middle] <= number) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static const u32 BINS = 256;
static const u32 BIN_BITS = 8;

struct Histogram {
    u32 counts[BINS];
    u32 bin, before;
};

// The first warp finds the bin that holds the key of rank `need`, and how many keys are in those before it.
static __device__ void find_bin(Histogram& room, u32 need) {
    const u32 own = BINS / WARP_LANES;
    u32 first = lane_id() * own, count = 0;
    for (u32 bin = first; bin < first + own; ++bin) count += room.counts[bin];
    u32 inclusive = count;
    for (u32 by = 1; by < WARP_LANES; by *= 2) {
        u32 below = __shfl_up_sync(ALL_LANES, inclusive, by);
        if (lane_id() >= by) inclusive += below;
    }
    u32 before = inclusive - count;
    if (before < need && need <= inclusive) {
        u32 bin = first;
        while (before + room.counts[bin] < need) before += room.counts[bin++];
        room.bin = bin;
        room.before = before;
    } else if (lane_id() == WARP_LANES - 1 && inclusive < need) {
        room.bin = BINS;
        room.before = inclusive;
    }
}

// The smallest key at or below which there are `need` of those from `low` on. `each(count)` calls `count(key)`
// for every key, the threads of the block dividing them. Bins are 2^shift wide at first; while the key is
// beyond the last one they widen, then they narrow until each holds one key.
template <class Each>
static __device__ u32 nth_lowest(Histogram& room, u32 need, u32 low, u32 shift, Each each) {
    const u32 widest = 32 - BIN_BITS;
    for (;;) {
        for (u32 bin = threadIdx.x; bin < BINS; bin += blockDim.x) room.counts[bin] = 0;
        __syncthreads();
        each([&](u32 key) {
            u32 bin = (key - low) >> shift;
            if (key >= low && bin < BINS) atomicAdd(&room.counts[bin], 1u);
        });
        __syncthreads();
        if (warp_id() == 0) find_bin(room, need);
        __syncthreads();
        u32 bin = room.bin;
        need -= room.before;
        if (bin < BINS) {
            low += bin << shift;
            if (shift == 0) return low;
            shift = saturating_sub(shift, BIN_BITS);
        } else if (shift == widest) {
            return low;  // There are not as many.
        } else {
            low += BINS << shift;
            shift = min(shift + BIN_BITS, widest);
        }
    }
}

// The sticky word of an error.
static __device__ __forceinline__ u64 sticky_key(u64 stage, u32 layer, u32 row, Cause cause, u32 value) {
    return stage << 63 | static_cast<u64>(layer) << 51 | static_cast<u64>(row) << 36 |
           static_cast<u64>(cause) << 32 | value;
}

// Ends a report whose other words are written: its first ones. One thread calls it.
static __device__ void end_report(u32* slot, u64 step, u64 sticky, u32 moved) {
    bool wrong = sticky != NOTHING_WRONG;
    slot[2] = wrong ? sticky >> 32 & 0xF : 0;
    slot[3] = wrong ? sticky >> 36 & 0x7FFF : 0;
    slot[4] = wrong ? sticky >> 51 & 0xFFF : 0;
    slot[5] = wrong ? static_cast<u32>(sticky) : 0;
    slot[6] = moved;
    slot[7] = 0;
    // Who finds the step's number there finds all of its report.
    __threadfence_system();
    slot[0] = static_cast<u32>(step);
    slot[1] = static_cast<u32>(step >> 32);
}

// Records an error of a step: the sticky word keeps the least one, and the lane's trust forbids further steps.
static __device__ void blame(const Pools& pools, const Micro& micro, u32 lane, u64 stage, u32 layer, u32 row,
                             Cause cause, u32 value) {
    atomicMin(at<u64>(micro.sticky), sticky_key(stage, layer, row, cause, value));
    if (lane < pools.lanes) {
        u32 trust = cause == NOT_GATHERED ? BYTES : FAILED;
        atomicMax(at<u32>(pools.trust) + lane, trust);
    }
}

// One row of a step descriptor.
struct Entry {
    u32 lane, accepted, query_rows;
};

// The step that a micro-batch is in; `real` rows of its batch mean something.
struct StepHead {
    u64 step;
    u32 real;
};

static __device__ __forceinline__ StepHead step_head(const Pools& pools, const Micro& micro) {
    const u32* words = at<const u32>(micro.descriptor);
    return {static_cast<u64>(words[1]) << 32 | words[0], min(words[2], pools.batch)};
}

static __device__ __forceinline__ Entry step_entry(const Micro& micro, u32 row) {
    const u32* words = at<const u32>(micro.descriptor) + STEP_HEADER + row * STEP_ENTRY;
    return {words[0], words[1], words[2]};
}

// One of all tables, for kernels that run for all of them at once: the first layer of its group.
static __device__ __forceinline__ const Layer& table_at(const Pools& pools, u32 table) {
    return at<const Layer>(pools.tables)[table];
}

// One of all layers.
static __device__ __forceinline__ const Layer& layer_at(const Pools& pools, u32 layer) {
    return at<const Layer>(pools.layers)[layer];
}

// What was done of a batch row's query rows in a layer: a bit each.
enum Mark : u32 { RESOLVED = 0, SCATTERED = 1 };

// The words of a mark of one batch row in layer `number`; `words` of them are a layer's query rows. Those of SCATTERED
// follow those of RESOLVED.
static __device__ __forceinline__ u32* marks_of(const Pools& pools, const Micro& micro, u32 words, u32 number,
                                                u32 row, Mark mark) {
    u64 place = (static_cast<u64>(row) * pools.layer_count + number) * 2 + mark;
    return at<u32>(micro.marks) + place * words;
}

// The bits of a word for query rows below `count`.
static __device__ __forceinline__ u32 rows_below(u32 word, u32 count) {
    u32 left = saturating_sub(count, word * 32);
    return left >= 32 ? ALL_LANES : (1u << left) - 1;
}

// Notes what was done of query rows. One thread calls it.
static __device__ void note_rows(u32* marks, u32 first, u32 count) {
    for (u32 word = first / 32; word * 32 < first + count; ++word) {
        atomicOr(marks + word, rows_below(word, first + count) & ~rows_below(word, first));
    }
}

// What a list lacks: a cause, 0 if nothing, and the first layer of its group that lacks it. A layer of which nothing
// was gathered comes before one that only lacks a wave, since it has rows by its tables that have no bytes.
struct Lack {
    u32 cause, layer;
};

// What is wrong when nothing more is gathered of a list in `step`. All words of the list are asked for before one is
// looked at.
static __device__ Lack missing(const List& of, u64 step) {
    const List list = of;
    u32 waves = max(div_ceil(list.scratch, max(list.share, 1u)), 1u);
    Lack lack = {0, 0};
    FOREBAY_UNROLL
    for (u32 place = GROUP_MAX; place-- > 0;) {
        u32 gathered = list.gathered[place];
        if (place >= list.members || gathered >= waves) continue;
        if (gathered == 0) {
            lack = {static_cast<u32>(NOT_GATHERED), list.layer + place};
        } else if (lack.cause != NOT_GATHERED) {
            lack = {static_cast<u32>(WAVE_NOT_GATHERED), list.layer + place};
        }
    }
    bool due = static_cast<u32>(list.step == step) & (list.count != 0);
    return due ? lack : Lack{0, 0};
}
