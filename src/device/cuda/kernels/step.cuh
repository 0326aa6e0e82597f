// The two ends of a step, and what ranks compare.
#pragma once

#include "rule.cuh"

// In the device's step descriptor: the number of lengths in the report. The number of rows is 0 if the descriptor
// names a wrong lane.
static const u32 STEP_LENGTHS = 3;

// The first row of the step descriptor that names a lane out of range, or the lane of an earlier row; EMPTY if
// none does. `wrong` is EMPTY before. Every thread calls it.
static __device__ u32 find_wrong(const Pools& pools, const Micro& micro, const u32* descriptor, u32 rows, u32& wrong) {
    u32* first = at<u32>(micro.first);
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        u32 lane = descriptor[STEP_HEADER + row * STEP_ENTRY];
        if (lane < pools.lanes) atomicMax(first + lane, EMPTY - row);
    }
    __syncthreads();
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        u32 lane = descriptor[STEP_HEADER + row * STEP_ENTRY];
        if (lane >= pools.lanes || first[lane] != EMPTY - row) atomicMin(&wrong, row);
    }
    __syncthreads();
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        u32 lane = descriptor[STEP_HEADER + row * STEP_ENTRY];
        if (lane < pools.lanes) first[lane] = 0;
    }
    return wrong;
}

// Takes the pinned step descriptor over, and begins the report. If it names a lane twice, or a lane
// out of range, no row of the step is run: the step fails, and its lanes. One thread block.
FOREBAY_KERNEL(forebay_load, LoadArgs, MOST_THREADS, 1) {
    after_previous();
    __shared__ u32 room;
    const Pools& pools = args.pools;
    const Micro& micro = args.micro;
    const u32* given = at<const u32>(args.descriptor);
    u32* descriptor = at<u32>(micro.descriptor);
    u32 words = STEP_HEADER + STEP_ENTRY * pools.batch;
    if (threadIdx.x == 0) {
        room = EMPTY;
        *at<u64>(micro.sticky) = NOTHING_WRONG;
    }
    for (u32 word = threadIdx.x; word < words; word += blockDim.x) descriptor[word] = given[word];
    for (u32 word = threadIdx.x; word < REPORT_COUNT * pools.layer_count; word += blockDim.x) {
        at<u32>(micro.counts)[word] = 0;
    }
    __syncthreads();
    u32 rows = min(descriptor[2], pools.batch), wrong = find_wrong(pools, micro, descriptor, rows, room);
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
        u32 lane = descriptor[STEP_HEADER + row * STEP_ENTRY];
        bool known = lane < pools.lanes;
        // The lanes' trust as the step begins: its own errors must not make its layers' commits differ.
        at<u32>(micro.failed)[row] = known ? at<const u32>(pools.trust)[lane] : SOUND;
        at<u32>(micro.lengths)[row] = known ? at<const LaneHead>(args.heads)[lane].length : 0;
        if (wrong == EMPTY) continue;
        blame(pools, micro, lane, 0, 0, wrong, TABLES, descriptor[STEP_HEADER + wrong * STEP_ENTRY]);
    }
    if (threadIdx.x != 0) return;
    descriptor[2] = wrong == EMPTY ? rows : 0;
    descriptor[STEP_LENGTHS] = rows;
}

// Blames the rows whose last list was not gathered.
static __device__ void blame_missing(const Pools& pools, const Micro& micro, StepHead head) {
    if (!(pools.due & DUE_GATHERED)) return;
    for (u32 row = threadIdx.x; row < head.real; row += blockDim.x) {
        const List& list = at<const List>(micro.lists)[row];
        Lack lack = missing(list, head.step);
        u32 lane = step_entry(micro, row).lane;
        if (lack.cause) blame(pools, micro, lane, 1, lack.layer, row, static_cast<Cause>(lack.cause), lack.layer);
    }
}

// The first query row of a word's bits; EMPTY if there is none.
static __device__ __forceinline__ u32 first_row(u32 word, u32 bits) {
    return bits ? word * 32 + __ffs(static_cast<i32>(bits)) - 1 : EMPTY;
}

// Blames the rows of which a layer was not resolved or scattered: what is not in the total pool must not be accepted. A
// layer has `most` query rows of a batch row. A word of either kind is asked for before one is looked at: a layer of a
// row waits for memory once, after its entry.
static __device__ void blame_undone(const Pools& pools, const Micro& micro, StepHead head, u32 most) {
    const u32 due = pools.due, layers = pools.layer_count;
    if (!(due & DUE_RESOLVED)) return;
    const u32 words = div_ceil(most, 32);
    for (u32 index = threadIdx.x; index < head.real * layers; index += blockDim.x) {
        u32 row = index / layers, number = index % layers, unresolved = EMPTY, unstored = EMPTY;
        const u32* marks = marks_of(pools, micro, words, number, row, RESOLVED);
        Entry entry = step_entry(micro, row);
        u32 rows = min(entry.query_rows, most);
        // As many as a row may have at most: the first is loaded together with the entry.
        for (u32 word = 0; word < words; ++word) {
            u32 resolved = marks[word], stored = due & DUE_SCATTERED ? marks[words + word] : ALL_LANES;
            unresolved = min(unresolved, first_row(word, rows_below(word, rows) & ~resolved));
            unstored = min(unstored, first_row(word, rows_below(word, rows) & ~stored));
        }
        if (unresolved != EMPTY) {
            blame(pools, micro, entry.lane, 1, number, row, NOT_RESOLVED, unresolved);
        } else if (unstored != EMPTY) {
            blame(pools, micro, entry.lane, 1, number, row, NOT_SCATTERED, unstored);
        }
    }
}

// Writes the report to its pinned slot. One block of threads.
FOREBAY_KERNEL(forebay_report, ReportArgs, MOST_THREADS, 1) {
    after_previous();
    const Pools& pools = args.pools;
    const Micro& micro = args.micro;
    StepHead head = step_head(pools, micro);
    blame_missing(pools, micro, head);
    blame_undone(pools, micro, head, args.query_rows);
    u32* slot = at<u32>(args.slot);
    u32 counts = REPORT_COUNT * pools.layer_count, lengths = at<const u32>(micro.descriptor)[STEP_LENGTHS];
    for (u32 word = threadIdx.x; word < counts; word += blockDim.x) {
        slot[REPORT_HEADER + word] = at<const u32>(micro.counts)[word];
    }
    for (u32 row = threadIdx.x; row < lengths; row += blockDim.x) {
        slot[REPORT_HEADER + counts + row] = at<const u32>(micro.lengths)[row];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    u64 sticky = atomicMin(at<u64>(micro.sticky), NOTHING_WRONG);
    // A report without rows belongs to no step, and no caller reads it.
    end_report(slot, head.step, sticky, head.real ? atomicExch(at<u32>(args.moved), 0u) : 0);
    // What runs before the next step begins, as a graph launched without one, has no rows.
    at<u32>(micro.descriptor)[2] = 0;
}

// Mixes a word so that sums of mixed words tell their sets apart.
static __device__ u64 mix(u64 word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

// Adds a lane's digest, table by table. Grid: tables.
FOREBAY_KERNEL(forebay_digest, DigestArgs, MOST_THREADS, 1) {
    after_previous();
    const Layer& layer = table_at(args.pools, blockIdx.x);
    if (!has_sequence(layer, args.lane)) return;
    Lane lane = lane_at(layer, args.lane);
    u64 sum = 0;
    if (threadIdx.x == 0) {
        LaneHead head = *lane.head;
        sum = mix(static_cast<u64>(head.length) << 32 | head.stamp) +
              mix(static_cast<u64>(head.landed) << 32 | head.budget);
    }
    auto row = [&](u32, u32 slot) { return static_cast<u64>(lane.position_of[slot]) << 32 | lane.stamps[slot]; };
    each_slot(lane, 0, row, [&](u32 place, u32, u64 row) { sum += mix(row ^ mix(place + 1ull)); });
    for (u32 by = WARP_LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
    if (lane_id() == 0) atomicAdd(at<u64>(args.out), sum * (2ull * blockIdx.x + 1));
}
