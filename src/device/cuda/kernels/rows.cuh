// Rows on their way: gather, scatter, warm gather, and plain copies.
//
// A stretch of rows is staged in shared memory, a row a thread: its address in host memory, and those of its runs in
// the slab. Then the threads copy it in pieces of 16 bytes where runs, strides and addresses allow, else of 8
// or 4, numbered through all staged rows, so that few threads idle because a row is no multiple of a warp's load.
//
// What a link gives is bytes in flight / round trip: 35 GB/s at 1.5 to 2 us take 52 to 70 KB. Every thread has
// `IN_FLIGHT` loads under way before its first store: with 16-byte pieces a block of 512 threads has 32 KB, so
// two or three blocks fill such a link.
#pragma once

#include "block.cuh"

static const u32 IN_FLIGHT = 4;

// Rows of a stretch that are staged at once.
struct Stage {
    u64 host[MOST_THREADS];     // 0 for a row that is not copied
    u64 runs[2][MOST_THREADS];  // addresses of its runs in the slab
};

struct alignas(16) Words4 {
    u32 words[4];
};

struct alignas(8) Words2 {
    u32 words[2];
};

// Loads past the caches where the machine can: a row is read once. Not as data that never changes: kernels that
// were launched early may still be writing it when this one begins.
static __device__ __forceinline__ Words4 load(const Words4* from) {
#if defined(__CUDA_ARCH__)
    Words4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
        : "l"(from)
        : "memory");
    return value;
#else
    return __ldcs(from);
#endif
}

static __device__ __forceinline__ Words2 load(const Words2* from) {
#if defined(__CUDA_ARCH__)
    Words2 value;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(value.words[0]), "=r"(value.words[1])
        : "l"(from)
        : "memory");
    return value;
#else
    return __ldcs(from);
#endif
}

static __device__ __forceinline__ u32 load(const u32* from) {
#if defined(__CUDA_ARCH__)
    u32 value;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
#else
    return __ldcs(from);
#endif
}

// Addresses of a layer's slots.
struct Slab {
    u64 address;
    u32 block_bytes, runs[2];

    // Addresses of a slot's first and second runs.
    __device__ __forceinline__ u64 first_run(u32 slot) const {
        return address + static_cast<u64>(slot / SLOT_BLOCK) * block_bytes + slot % SLOT_BLOCK * runs[0];
    }
    __device__ __forceinline__ u64 second_run(u32 slot) const {
        return address + static_cast<u64>(slot / SLOT_BLOCK) * block_bytes +
               static_cast<u64>(SLOT_BLOCK) * runs[0] + slot % SLOT_BLOCK * runs[1];
    }
};

static __device__ __forceinline__ Slab slab_of(const Layer& layer) {
    return {layer.slab, layer.block_bytes, {layer.runs[0], layer.runs[1]}};
}

// The place of a position's row in the total pool, among the rows of any layer, counted from 1; 0 where the lane has no
// such page.
static __device__ u64 row_of(const Pools& pools, u32 lane, u32 position) {
    // Without a branch before or after the load: a thread that asks for several pages waits once.
    u32 index = position / pools.page_tokens, within = position % pools.page_tokens;
    u64 entry = static_cast<u64>(lane) * pools.lane_pages + min(index, pools.lane_pages - 1);
    u32 page = at<const u32>(pools.pages)[entry];
    u64 row = static_cast<u64>(page) * pools.page_tokens + within + 1;
    return index < pools.lane_pages && page < pools.host_pages ? row : 0;
}

// The address of a row in a layer; 0 for no row.
static __device__ __forceinline__ u64 host_of(const Layer& layer, u64 row) {
    return row == 0 ? 0 : layer.rows + (row - 1) * layer.host_stride;
}

// Copies rows of `in_row` pieces, those for which `copies(row)`. A row has `numbers` numbers, and its pieces begin at
// number `skipped(row)`. `from(row, piece)` and `to(row, piece)` are a piece's places.
template <class Piece, class Copies, class Skipped, class From, class To>
static __device__ __forceinline__ void copy_numbered(u32 rows, u32 numbers, u32 in_row, Copies copies, Skipped skipped,
                                                     From from, To to) {
    // A thread's numbers are as far apart as there are threads: no division but these.
    const u32 rows_on = blockDim.x / numbers, numbers_on = blockDim.x % numbers;
    u32 row = threadIdx.x / numbers, number = threadIdx.x % numbers;
    while (row < rows) {
        Piece held[IN_FLIGHT];
        u32 of[IN_FLIGHT];  // piece and row: addresses would take twice the registers
        FOREBAY_UNROLL
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            of[i] = EMPTY;
            held[i] = {};  // else the compiler keeps what is left of the last turn through everything between
            if (row < rows && copies(row)) {
                u32 piece = number - skipped(row);
                if (piece < in_row) {
                    held[i] = load(from(row, piece));
                    of[i] = piece * MOST_THREADS + row;
                }
            }
            row += rows_on;
            number += numbers_on;
            if (number >= numbers) {
                number -= numbers;
                ++row;
            }
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            u32 row = of[i] % MOST_THREADS, piece = of[i] / MOST_THREADS;
            if (of[i] != EMPTY) *to(row, piece) = held[i];
        }
    }
}

// Copies the staged rows, up to their slots or down from them.
template <class Piece, bool DOWN>
static __device__ void copy_pieces(const Layer& layer, const Stage& stage, u32 rows) {
    const u32 size = sizeof(Piece), in_first = layer.runs[0] / size, in_row = in_first + layer.runs[1] / size;
    auto host = [&](u32 row, u32 piece) { return at<Piece>(stage.host[row] + piece * size); };
    auto device = [&](u32 row, u32 piece) {
        u64 run = piece < in_first ? stage.runs[0][row] : stage.runs[1][row] - in_first * size;
        return at<Piece>(run + piece * size);
    };
    copy_numbered<Piece>(
        rows, layer.piece_numbers, in_row, [&](u32 row) { return stage.host[row] != 0; },
        [&](u32 row) { return (static_cast<u32>(stage.host[row]) & layer.line_mask) / size; },
        [&](u32 row, u32 piece) { return DOWN ? device(row, piece) : host(row, piece); },
        [&](u32 row, u32 piece) { return DOWN ? host(row, piece) : device(row, piece); });
}

template <bool DOWN>
static __device__ void copy_staged(const Layer& layer, const Stage& stage, u32 rows) {
    switch (layer.piece_bytes) {
        case 16: return copy_pieces<Words4, DOWN>(layer, stage, rows);
        case 8: return copy_pieces<Words2, DOWN>(layer, stage, rows);
        default: return copy_pieces<u32, DOWN>(layer, stage, rows);
    }
}

// Copies a row from slot to slot. The words are read and written by the same thread.
static __device__ void copy_slot(const Layer& layer, u32 from, u32 to) {
    const Slab slab = slab_of(layer);
    u32 *source = at<u32>(slab.first_run(from)), *target = at<u32>(slab.first_run(to));
    for (u32 i = threadIdx.x; i < slab.runs[0] / 4; i += blockDim.x) target[i] = source[i];
    source = at<u32>(slab.second_run(from));
    target = at<u32>(slab.second_run(to));
    for (u32 i = threadIdx.x; i < slab.runs[1] / 4; i += blockDim.x) target[i] = source[i];
}

// This block's share of `all` things that the whole grid divides evenly.
struct Share {
    u32 first, end;
};

static __device__ __forceinline__ Share share_of(u32 all) {
    u32 each = div_ceil(all, gridDim.x), first = min(blockIdx.x * each, all);
    return {first, min(first + each, all)};
}

// Stages rows from `first` on, as many as there are threads; `row_of(number, host, slot)` finds a row, and leaves
// `host` 0 for one that is not copied. Every thread of the block calls it. Answers how many.
template <class RowOf>
static __device__ u32 stage_rows(const Slab& slab, Stage& stage, Share share, u32 first, RowOf row_of) {
    u32 rows = min(blockDim.x, share.end - first);
    if (threadIdx.x < rows) {
        u64 host = 0;
        u32 slot = 0;
        row_of(first + threadIdx.x, host, slot);
        stage.host[threadIdx.x] = host;
        stage.runs[0][threadIdx.x] = slab.first_run(slot);
        stage.runs[1][threadIdx.x] = slab.second_run(slot);
    }
    __syncthreads();
    return rows;
}

// Copies the rows of a share, stage by stage. Every thread of the block calls it.
template <bool DOWN, class RowOf>
static __device__ void copy_rows(const Layer& layer, Stage& stage, Share share, RowOf row_of) {
    for (u32 first = share.first; first < share.end; first += blockDim.x) {
        u32 rows = stage_rows(slab_of(layer), stage, share, first, row_of);
        copy_staged<DOWN>(layer, stage, rows);
        __syncthreads();
    }
}
