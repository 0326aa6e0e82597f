// What happens to a lane between steps: join, truncate, leave, warm up. Grid: tables.
#pragma once

#include "commit.cuh"

// Makes staged pages a lane's table; a page that the total pool does not have is none.
static __device__ void take_pages(const Pools& pools, u32 lane, const u32* staged) {
    u32 count = staged[1];
    u32* table = at<u32>(pools.pages) + static_cast<u64>(lane) * pools.lane_pages;
    for (u32 index = threadIdx.x; index < pools.lane_pages; index += blockDim.x) {
        u32 page = index < count ? staged[STAGED_PAGES + index] : NO_PAGE;
        table[index] = page < pools.host_pages ? page : NO_PAGE;
    }
}

// Empties the slots of the lane's blocks from place `first` on; those before place `budget` are to be filled.
static __device__ void clear_slots(const Lane& lane, u32 first, u32 budget) {
    auto stamp = [&](u32 place, u32) { return place < budget ? FREE_STAMP : UNUSED_STAMP; };
    each_slot(lane, first, stamp, [&](u32, u32 slot, u32 stamp) {
        lane.position_of[slot] = EMPTY;
        lane.stamps[slot] = stamp;
    });
}

// Whether a lane of the layer can have a budget, for which so many blocks are staged at most.
static __device__ bool can_have(const Layer& layer, u32 budget, u32 staged_blocks) {
    return budget > 0 && div_ceil(budget, SLOT_BLOCK) <= min(layer.lane_blocks, staged_blocks);
}

// Whether a table has what is staged for it.
static __device__ bool can_join(const Layer& layer, u32 lane, u32 length, u32 budget, const u32* blocks,
                                u32 staged_blocks) {
    if (lane >= layer.lanes || length > layer.tokens || !can_have(layer, budget, staged_blocks)) return false;
    bool all = true;
    for (u32 i = threadIdx.x; i < div_ceil(budget, SLOT_BLOCK); i += blockDim.x) {
        all = all && blocks[i] < layer.budget_blocks;
    }
    return __syncthreads_and(all);
}

// Gives a lane, which is empty, to a sequence. Grid: tables, and chunks of the map from positions to slots.
FOREBAY_KERNEL(forebay_join, JoinArgs, MOST_THREADS, 2) {
    after_previous();
    const Pools& pools = args.pools;
    const Layer& layer = table_at(pools, blockIdx.x);
    const u32* staged = at<const u32>(args.staged);
    const u32* budgets = staged + STAGED_PAGES + pools.lane_pages;
    const u32* blocks = budgets + pools.table_count + static_cast<u64>(blockIdx.x) * args.staged_blocks;
    u32 length = staged[0], budget = budgets[blockIdx.x];
    if (!can_join(layer, args.lane, length, budget, blocks, args.staged_blocks)) return;
    Lane lane = lane_at(layer, args.lane);
    for (u32 position = blockIdx.y * blockDim.x + threadIdx.x; position < layer.tokens;
         position += gridDim.y * blockDim.x) {
        lane.slot_of[position] = ABSENT;
    }
    if (blockIdx.y != 0) return;
    u32 count = div_ceil(budget, SLOT_BLOCK);
    u32* own = blocks_at(layer, args.lane);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) own[i] = blocks[i];
    lane.places = count * SLOT_BLOCK;
    __syncthreads();
    clear_slots(lane, 0, budget);
    if (threadIdx.x == 0) {
        *lane.head = {length, 0, budget, count, WARMED, FREE_STAMP, EMPTY, 0};
    }
    if (blockIdx.x != 0) return;
    take_pages(pools, args.lane, staged);
    if (threadIdx.x == 0) at<u32>(pools.trust)[args.lane] = SOUND;
}

// Forgets every resident row: for rows that are resident by the tables but were never copied.
static __device__ void empty_lane(const Lane& lane) {
    auto position = [&](u32, u32 slot) { return lane.position_of[slot]; };
    each_slot(lane, 0, position, [&](u32, u32 slot, u32 position) {
        if (position == EMPTY) return;
        lane.position_of[slot] = EMPTY;
        lane.stamps[slot] = FREE_STAMP;
        lane.slot_of[position] = ABSENT;
    });
    if (threadIdx.x != 0) return;
    lane.head->min_stamp = FREE_STAMP;
    lane.head->full_places = 0;
}

// Forgets every resident row at or beyond `length`, and every landed row.
static __device__ void truncate_lane(const Lane& lane, u32 length) {
    LaneHead head = *lane.head;
    bool emptied = false;
    for (u32 position = length + threadIdx.x; position < head.length + head.landed; position += blockDim.x) {
        u32 slot = lane.slot_of[position];
        lane.slot_of[position] = ABSENT;
        if (slot < lane.base) continue;
        lane.position_of[slot - lane.base] = EMPTY;
        lane.stamps[slot - lane.base] = FREE_STAMP;
        emptied = true;
    }
    emptied = __syncthreads_or(emptied);
    if (threadIdx.x != 0) return;
    lane.head->length = length;
    lane.head->landed = 0;
    if (!emptied) return;
    lane.head->min_stamp = FREE_STAMP;
    lane.head->full_places = 0;
}

// Above a lane's trust, while it is truncated: for how many tables it was read.
static const u32 TRUST_BITS = 8;

// The lane's trust, as it was; the last table's block to read it makes it sound.
static __device__ u32 take_trust(const Pools& pools, u32 lane) {
    u32* trust = at<u32>(pools.trust) + lane;
    u32 read = atomicAdd(trust, 1u << TRUST_BITS);
    if (read >> TRUST_BITS == pools.table_count - 1) atomicExch(trust, static_cast<u32>(SOUND));
    return read & ((1u << TRUST_BITS) - 1);
}

// Accepts `settle` landed rows, truncates the sequence to `length`, and takes its new pages.
FOREBAY_KERNEL(forebay_truncate, TruncateArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Room room;
    __shared__ u32 trust;
    const Pools& pools = args.pools;
    const Layer& layer = table_at(pools, blockIdx.x);
    if (args.lane >= pools.lanes) return;
    if (threadIdx.x == 0) trust = take_trust(pools, args.lane);
    if (blockIdx.x == 0) take_pages(pools, args.lane, at<const u32>(args.staged));
    if (!has_sequence(layer, args.lane)) return;
    Lane lane = lane_at(layer, args.lane);
    u32 settle = min(args.settle, lane.head->landed);
    bool can = can_commit(layer, args.lane, settle, 0);
    if (can) commit_rows(pools, layer, args.lane, settle, 0, room);
    __syncthreads();
    if (trust == BYTES) empty_lane(lane);
    __syncthreads();
    if (args.length <= lane.head->length) truncate_lane(lane, args.length);
}

// Forgets everything of a lane; its blocks may go to another lane.
FOREBAY_KERNEL(forebay_leave, LeaveArgs, MOST_THREADS, 2) {
    after_previous();
    const Layer& layer = table_at(args.pools, blockIdx.x);
    if (!has_sequence(layer, args.lane)) return;
    Lane lane = lane_at(layer, args.lane);
    clear_slots(lane, 0, 0);
    __syncthreads();
    if (threadIdx.x == 0) *lane.head = {0, 0, 0, 0, 0, 0, 0, 0};
}

// Makes every row resident, in ascending order and older than anything a step selects, if the budget holds
// them all and the lane has made no step.
static __device__ void bring_up(const Lane& lane) {
    LaneHead head = *lane.head;
    if (head.length > head.budget || head.stamp != WARMED) return;
    // Not by `each_slot`: a thread waits for the blocks alone, which are adjacent words.
    for (u32 position = threadIdx.x; position < head.length; position += blockDim.x) {
        u32 slot = lane.slot(position);
        lane.slot_of[position] = lane.base + slot;
        lane.position_of[slot] = position;
        lane.stamps[slot] = WARMED;
    }
    // Every thread has read the head.
    __syncthreads();
    if (threadIdx.x == 0) lane.head->full_places = head.length;
}

// Computes what is resident before a lane's first step: all rows if `whole` and they fit, then what the
// selections touched, step by step, as steps that add no row and answer nothing.
FOREBAY_KERNEL(forebay_warm, WarmArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Room room;
    __shared__ Step step;
    __shared__ LaneHead head;
    const Pools& pools = args.pools;
    u32 table = args.first + blockIdx.x;
    const Layer& layer = table_at(pools, table);
    if (!has_sequence(layer, args.lane)) return;
    Lane lane = lane_at(layer, args.lane);
    if (args.whole) bring_up(lane);
    FOREBAY_DYNAMIC_SHARED(u32, shared);
    u32 k = pools.top_k;
    u32* own = at<u32>(pools.warm_work) + static_cast<u64>(table) * pools.work_words;
    Sets sets = sets_at(pools, args.shared != IN_MEMORY ? shared : own);
    bring_blocks(pools, sets, args.shared, lane);
    Fetch* fetches = at<Fetch>(pools.warm_fetches) + static_cast<u64>(table) * k;
    const i32* selections = at<const i32>(args.selections) + static_cast<u64>(blockIdx.x) * args.steps * k;
    for (u32 number = 0; args.selections && number < args.steps; ++number) {
        __syncthreads();
        if (threadIdx.x == 0) {
            head = *lane.head;
            // A warm-up is a hint: a position beyond the length warms nothing.
            step = {selections + static_cast<u64>(number) * k, nullptr, fetches, 1, k, head.length,
                    head.stamp + 1, layer.scratch_base + args.lane * layer.scratch, layer.scratch,
                    layer.scratch * layer.waves};
        }
        __syncthreads();
        if (head.stamp >= UNUSED_STAMP - 2) return;
        // No gather reads this list: `forebay_warm_gather` loads a warm-up's rows.
        auto nowhere = [](u32) { return static_cast<u64>(0); };
        begin_step(lane, head, step, sets, layer.tokens, room, nowhere);
        end_step(lane, head, step, room);
    }
}
