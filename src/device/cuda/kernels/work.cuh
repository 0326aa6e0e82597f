// An engine's work, for tools: matrix products by the tensor cores, beside which transfers are measured.
//
// A block of 16 warps multiplies a panel of 128 x 128 bf16 by another one and keeps f32 sums, 32 x 32 a warp. With a
// block a panel it is as short as a block of an engine's products, of which a launch has many: so a gather beside it
// gets its turns as blocks end. With fewer blocks than panels each takes every so many-th: as a persistent kernel,
// whose blocks stay until all is done. Operands are read where they are, L2 at most: `WORK_PANELS` pairs of panels,
// which blocks take in turn. Blocks of the same pair write the same results.
//
// Operands are laid out as the tensor cores take them: for each 16 columns of the left panel, which are rows of the
// right one, 4 x 2 tiles of 16 x 16 of the left (two for each row of warps), then 4 x 2 of 16 x 16 of the right (two
// for each column of warps); of each tile 16 bytes a lane.
#pragma once

#include "rows.cuh"

// The warps of a block form so many rows and columns.
static const u32 WORK_SIDE = 4;

struct alignas(16) Floats4 {
    float values[4];
};

// Sums of a warp's 2 x 4 tiles of 16 x 8, as the tensor cores keep them: a lane has two adjacent ones in the row
// of its number by four, and two eight rows below.
typedef float WorkSums[2][4][4];

#if defined(__CUDA_ARCH__)

// Adds the products of two tiles of 16 x 16 and two of 16 x 16.
static __device__ __forceinline__ void multiply(WorkSums& sums, const Words4* left, const Words4* right) {
    const Words4 a[2] = {left[lane_id()], left[WARP_LANES + lane_id()]};
    const Words4 b[2] = {right[lane_id()], right[WARP_LANES + lane_id()]};
    FOREBAY_UNROLL
    for (u32 row = 0; row < 2; ++row) {
        FOREBAY_UNROLL
        for (u32 column = 0; column < 4; ++column) {
            float* c = sums[row][column];
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[row].words[0]), "r"(a[row].words[1]), "r"(a[row].words[2]), "r"(a[row].words[3]),
                  "r"(b[column / 2].words[column % 2 * 2]), "r"(b[column / 2].words[column % 2 * 2 + 1]));
        }
    }
}

#else

// The element of a tile that the lane of its row and column has in one of its words.
static __device__ float work_element(const Words4* tile, u32 row, u32 column, u32 word) {
    u32 pair = tile[row * 4 + column % 8 / 2].words[word];
    u32 bits = column % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// As above, by a lane at a time.
static __device__ void multiply(WorkSums& sums, const Words4* left, const Words4* right) {
    for (u32 at = 0; at < 2 * 4 * 4; ++at) {
        u32 tile = at / 16, half = at / 4 % 4, place = at % 4;
        u32 row = lane_id() / 4, column = lane_id() % 4 * 2 + place % 2;
        for (u32 k = 0; k < 16; ++k) {
            float a = work_element(left + tile * WARP_LANES, row, k, place / 2 + k / 8 * 2);
            float b = work_element(right + half / 2 * WARP_LANES, column, k, half % 2 * 2 + k / 8);
            sums[tile][half][place] += a * b;
        }
    }
}

#endif

// One panel's products, by a block.
static __device__ __forceinline__ void multiply_panel(const WorkArgs& args, u32 panel) {
    const u32 tiles = 2 * WORK_SIDE * WARP_LANES;  // of one operand, in pieces of 16 bytes
    u32 row = warp_id() / WORK_SIDE, column = warp_id() % WORK_SIDE;
    const Words4* from = at<const Words4>(args.operands) + panel * WORK_STEPS * 2 * tiles;
    WorkSums sums = {};
    for (u32 step = 0; step < WORK_STEPS; ++step, from += 2 * tiles) {
        multiply(sums, from + row * 2 * WARP_LANES, from + tiles + column * 2 * WARP_LANES);
    }
    // All sums count in what is written.
    Floats4 folded = {};
    FOREBAY_UNROLL
    for (u32 place = 0; place < 4; ++place) {
        FOREBAY_UNROLL
        for (u32 tile = 0; tile < 8; ++tile) folded.values[place] += sums[tile / 4][tile % 4][place];
    }
    at<Floats4>(args.results)[panel * MOST_THREADS + threadIdx.x] = folded;
}

// Grid: any number of blocks, of up to 16 warps, which divide the panels.
FOREBAY_KERNEL(forebay_work, WorkArgs, MOST_THREADS, 2) {
    after_previous();
    for (u32 panel = blockIdx.x; panel < args.panels; panel += gridDim.x) multiply_panel(args, panel % WORK_PANELS);
}
