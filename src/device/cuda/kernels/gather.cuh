// Gather and its relatives: which rows move, for one batch, one layer, or one lane.
#pragma once

#include "bulk.cuh"
#include "rows.cuh"
#include "rule.cuh"

// What a wave fetches of a list: `away` of the rows in scratch slots from rank `first` on, and in the first wave all
// others, from rank `kept_from` on.
struct WaveRows {
    u32 first, away, kept_from;

    __device__ __forceinline__ u32 rank(u32 number) const {
        return number < away ? first + number : kept_from + (number - away);
    }
};

static __device__ __forceinline__ WaveRows rows_of_wave(const List& list, u32 wave) {
    u32 first = static_cast<u32>(min(static_cast<u64>(wave) * list.share, static_cast<u64>(list.scratch)));
    return {first, min(list.share, list.scratch - first), list.scratch};
}

// Batch rows of a step range, as many at a time as there are threads, and what a wave fetches for each.
struct Flat {
    u32 scan[MOST_WARPS];
    u32 before[MOST_THREADS];  // rows that earlier batch rows fetch
    WaveRows rows[MOST_THREADS];
};

// How many rows a wave fetches for a batch row, and which. A list of another step range, or one whose earlier waves
// were not gathered, must not be fetched: its rows would be copied into slots that other rows own. The first block
// reports the error. Batch rows beyond the real batch are not fetched either: after a step's report their lanes may
// belong to other sequences. List and step are loaded before either is looked at.
static __device__ u32 to_fetch(const GatherArgs& args, u32 row, WaveRows& rows) {
    StepHead head = step_head(args.pools, args.micro);
    List& of = at<List>(args.micro.lists)[row];
    const List list = of;
    u32& own = of.gathered[args.number - args.layer.first];
    const u32 gathered = own;
    u32 other = (list.layer ^ args.layer.first) | (list.first ^ args.row_first) | (list.rows ^ args.row_count);
    bool of_range = ((list.step ^ head.step) | other | (row >= head.real)) == 0;
    // Blocks that come late may see the first block's note of this wave, which changes nothing for them.
    if (of_range && args.wave <= gathered) {
        if (blockIdx.x == 0) own = max(gathered, args.wave + 1);
        rows = rows_of_wave(list, args.wave);
        return rows.away + (args.wave == 0 ? list.count - list.scratch : 0);
    }
    if (blockIdx.x == 0 && row < head.real) {
        Cause cause = !of_range || gathered == 0 ? NOT_GATHERED : WAVE_NOT_GATHERED;
        u32 lane = step_entry(args.micro, row).lane;
        blame(args.pools, args.micro, lane, 1, args.number, row, cause, args.number);
    }
    return 0;
}

// How the rows of a share are copied.
struct Plain {
    Stage& stage;

    template <class RowOf>
    __device__ void operator()(const Layer& layer, Share share, RowOf row_of) const {
        copy_rows<false>(layer, stage, share, row_of);
    }
};

struct InBulk {
    Stage& stage;

    template <class RowOf>
    __device__ void operator()(const Layer& layer, Share share, RowOf row_of) const {
        copy_rows_in_bulk(layer, stage, share, row_of);
    }
};

// A row that the lane has no page for: its tables have it resident, and its bytes are not there.
static __device__ void blame_page(const GatherArgs& args, u32 row, u32 position) {
    u32 lane = at<const List>(args.micro.lists)[row].lane;
    blame(args.pools, args.micro, lane, 1, args.number, row, TABLES, position);
    atomicMax(at<u32>(args.pools.trust) + lane, static_cast<u32>(BYTES));
}

// Copies what a wave fetches, all batch rows of the step range flattened over the grid. Before the first row is asked
// for, a thread waits for device memory twice: for a batch row's list, for a row of it. Between two rounds no barrier
// is needed: what the next round writes was read before a barrier of the copy.
template <class Copy>
static __device__ void gather(const GatherArgs& args, Flat& flat, Copy copy) {
    for (u32 first = 0; first < args.count; first += blockDim.x) {
        u32 rows = min(blockDim.x, args.count - first), own = 0, all;
        if (threadIdx.x < rows) own = to_fetch(args, args.first + first + threadIdx.x, flat.rows[threadIdx.x]);
        flat.before[threadIdx.x] = block_scan(flat.scan, own, all);
        __syncthreads();
        copy(args.layer, share_of(all), [&](u32 number, u64& host, u32& slot) {
            u32 at_row = find_row(flat.before, rows, number), row = args.first + first + at_row;
            u32 rank = flat.rows[at_row].rank(number - flat.before[at_row]);
            u64 place = static_cast<u64>(row) * args.pools.selected + rank;
            const Fetch& fetch = at<const Fetch>(args.micro.fetches)[place];
            host = host_of(args.layer, fetch.row);
            slot = fetch.slot;
            if (host == 0) blame_page(args, row, fetch.position);
        });
    }
}

FOREBAY_KERNEL(forebay_gather, GatherArgs, MOST_THREADS, 3) {
    after_previous();
    __shared__ Flat flat;
    __shared__ Stage stage;
    gather(args, flat, Plain{stage});
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The same by the bulk copies of sm_90 and later, where rows allow them.
FOREBAY_KERNEL(forebay_gather_bulk, GatherArgs, MOST_THREADS, 3) {
    after_previous();
    __shared__ Flat flat;
    __shared__ Stage stage;
    gather(args, flat, InBulk{stage});
}
#endif

// Stores the new rows, from their landing slots to the total pool. Marks come last: they wait for the step's block
// alone.
FOREBAY_KERNEL(forebay_scatter, ScatterArgs, MOST_THREADS, 3) {
    after_previous();
    __shared__ Stage stage;
    const Pools& pools = args.pools;
    const Layer& layer = args.layer;
    const Micro& micro = args.micro;
    StepHead head = step_head(pools, micro);
    // Shares are of all batch rows, so that no thread waits for the number of real rows before it loads its own.
    const u32 all = args.count * args.row_count;
    copy_rows<true>(layer, stage, share_of(all), [&](u32 number, u64& host, u32& slot) {
        u32 row = args.first + number / args.row_count, query = args.row_first + number % args.row_count;
        u32 lane = step_entry(micro, row).lane;
        if (static_cast<u32>(row >= head.real) | (lane >= layer.lanes)) return;
        const LaneHead& of = at<const LaneHead>(layer.heads)[lane];
        if (query >= of.landed) return;
        host = host_of(layer, row_of(pools, lane, of.length + query));
        slot = layer.landing_base + lane * layer.query_rows + query;
        if (host == 0) blame(pools, micro, lane, 1, args.number, row, TABLES, of.length + query);
    });
    u32 rows = saturating_sub(min(args.first + args.count, head.real), args.first);
    u32 words = div_ceil(layer.query_rows, 32);
    for (u32 row = threadIdx.x; blockIdx.x == 0 && row < rows; row += blockDim.x) {
        u32* marks = marks_of(pools, micro, words, args.number, args.first + row, SCATTERED);
        note_rows(marks, args.row_first, args.row_count);
    }
}

// A stretch of a lane's slots, as far as it lies in one layer: places `from` to `from + here`. `first` and `left`
// are what remains of it for the layers that follow.
struct Stretch {
    u64 first, left;
    u32 from, here;
};

static __device__ void enter_layer(Stretch& stretch, u32 budget) {
    u64 from = min(stretch.first, static_cast<u64>(budget)), here = min(stretch.left, budget - from);
    stretch = {stretch.first - from, stretch.left - here, static_cast<u32>(from), static_cast<u32>(here)};
}

// Gathers what a warm-up made resident, in a stretch of the lane's slots, which are numbered through the
// layers. A row that the lane has no page for stays away, and the lane's next step fails.
FOREBAY_KERNEL(forebay_warm_gather, WarmGatherArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Stage stage;
    __shared__ Stretch stretch;
    __shared__ Lane lane;
    const Pools& pools = args.pools;
    if (threadIdx.x == 0) stretch = {args.first, args.count, 0, 0};
    for (u32 number = 0; number < pools.layer_count; ++number) {
        const Layer& layer = layer_at(pools, number);
        if (!has_sequence(layer, args.lane)) continue;
        if (threadIdx.x == 0) {
            lane = lane_at(layer, args.lane);
            enter_layer(stretch, lane.head->budget);
        }
        __syncthreads();
        copy_rows<false>(layer, stage, share_of(stretch.here), [&](u32 index, u64& host, u32& slot) {
            u32 at_slot = lane.slot(stretch.from + index), position = lane.position_of[at_slot];
            if (position == EMPTY) return;
            host = host_of(layer, row_of(pools, args.lane, position));
            slot = lane.base + at_slot;
            if (host == 0) atomicMax(at<u32>(pools.trust) + args.lane, static_cast<u32>(BYTES));
        });
        __syncthreads();
    }
}

template <class Piece>
static __device__ void copy_flat(const CopyArgs& args) {
    u64 pieces = args.bytes / sizeof(Piece), threads = static_cast<u64>(gridDim.x) * blockDim.x;
    const Piece* from = at<const Piece>(args.from);
    Piece* to = at<Piece>(args.to);
    for (u64 begin = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; begin < pieces;
         begin += IN_FLIGHT * threads) {
        Piece held[IN_FLIGHT];
        FOREBAY_UNROLL
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            if (begin + i * threads < pieces) held[i] = load(from + begin + i * threads);
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            if (begin + i * threads < pieces) to[begin + i * threads] = held[i];
        }
    }
}

// From one piece of memory to another that does not overlap it.
FOREBAY_KERNEL(forebay_copy, CopyArgs, MOST_THREADS, 2) {
    after_previous();
    u64 all = args.from | args.to | args.bytes;
    if (all % 16 == 0) {
        copy_flat<Words4>(args);
    } else if (all % 8 == 0) {
        copy_flat<Words2>(args);
    } else {
        copy_flat<u32>(args);
    }
}
