// Resize: a lane gets another budget between two of its steps. One block of threads handles one of the tables.
//
// A budget ends with the lane's last places. So a smaller one gives up the places behind its end, and a row there that
// stays moves to a place before it that is empty or whose row leaves. Invariants that need no barrier or order:
// - every row moves from a place behind the end to one before it, so no copy reads what another one writes;
// - of the movers and the vacant places, rank n of one meets rank n of the other, so the result does not depend on the
//   order of threads;
// - at most as many rows stay as the new budget has places: no mover is left without a vacant place.
//
// The tables change in a single launch, with the rows that move: a driver that refuses it has changed neither.
#pragma once

#include "lanes.cuh"

// The moves of a round, one a thread, and how many ones the two sets have before each thread's words.
struct Moves {
    u32 from[MOST_THREADS], to[MOST_THREADS];  // slots; `from` is EMPTY where nothing moves
    u32 movers[MOST_THREADS], vacant[MOST_THREADS];
};

// Whether a lane's budget can become `budget`: `blocks` is its whole list afterwards, of which the blocks that stay
// must be its present ones. Both lists are asked for together: one is across the link.
static __device__ bool can_resize(const Layer& layer, u32 number, u32 budget, const u32* blocks, u32 staged_blocks) {
    if (!has_sequence(layer, number) || !can_have(layer, budget, staged_blocks)) return false;
    const u32* own = blocks_at(layer, number);
    u32 present = at<const LaneHead>(layer.heads)[number].blocks;
    bool all = true;
    for (u32 i = threadIdx.x; i < div_ceil(budget, SLOT_BLOCK); i += blockDim.x) {
        u32 block = blocks[i], before = i < present ? own[i] : block;
        all = all && block < layer.budget_blocks && block == before;
    }
    return __syncthreads_and(all);
}

// Appends the blocks that come; all new slots are empty.
static __device__ void grow(const Layer& layer, u32 number, const LaneHead& head, u32 budget, const u32* blocks) {
    u32 count = div_ceil(budget, SLOT_BLOCK);
    u32* own = blocks_at(layer, number);
    for (u32 i = head.blocks + threadIdx.x; i < count; i += blockDim.x) own[i] = blocks[i];
    __syncthreads();
    Lane lane = lane_of(layer, number, count);
    clear_slots(lane, head.budget, budget);
    if (threadIdx.x == 0) {
        *lane.head = {head.length, head.landed, budget, count, head.stamp, FREE_STAMP, EMPTY, head.full_places};
    }
}

// Notes how many ones of a set come before each thread's words; returns how many there are.
static __device__ u32 count_ones(u32 (&room)[MOST_WARPS], const u32* set, u32 words, u32 (&before)[MOST_THREADS]) {
    Words own = words_of(threadIdx.x, words);
    u32 count = 0, total;
    for (u32 word = own.first; word < own.end; ++word) count += __popc(set[word]);
    before[threadIdx.x] = block_scan(room, count, total);
    return total;
}

// The place of the one of rank `rank`, which the set has.
static __device__ u32 place_of(const u32* set, u32 words, const u32 (&before)[MOST_THREADS], u32 rank) {
    u32 thread = find_row(before, blockDim.x, rank), word = words_of(thread, words).first;
    u32 left = rank - before[thread], bits = set[word];
    while (left >= __popc(bits)) {
        left -= __popc(bits);
        bits = set[++word];
    }
    for (; left > 0; --left) bits &= bits - 1;
    return word * 32 + __ffs(static_cast<i32>(bits)) - 1;
}

// Of the lane's places, leaves in `sets.older` those before `budget` that are vacant or whose row leaves, and in
// `sets.tied` those behind it whose row stays.
static __device__ void find_moves(const Lane& lane, const Victims& victims, u32 present, u32 budget, const Sets& sets) {
    for (u32 word = threadIdx.x; word < lane.places / 32; word += blockDim.x) {
        // Without older victims, that set may be of the slots that bear the next stamp: they stay.
        u32 gone = victims.tied[word] | (victims.older_count > 0 ? victims.older[word] : 0);
        sets.older[word] = gone & rows_below(word, budget);
        sets.tied[word] = ~gone & rows_below(word, present) & ~rows_below(word, budget);
    }
}

// Forgets the rows that leave.
static __device__ void forget(const Lane& lane, u32 present, u32 budget, const Sets& sets) {
    auto leaving = [&](u32 place, u32 slot) {
        u32 bit = 1u << place % 32;
        bool leaves = place < budget ? (sets.older[place / 32] & bit) != 0 : (sets.tied[place / 32] & bit) == 0;
        return leaves && place < present ? lane.position_of[slot] : EMPTY;
    };
    each_slot(lane, 0, leaving, [&](u32, u32 slot, u32 position) {
        if (position == EMPTY) return;
        lane.slot_of[position] = ABSENT;
        lane.position_of[slot] = EMPTY;
        lane.stamps[slot] = FREE_STAMP;
    });
}

// Moves one row in the tables: of rank `rank` among those that move.
static __device__ void move_row(const Lane& lane, const Sets& sets, u32 rank, Moves& moves) {
    const u32 words = lane.places / 32;
    u32 from = lane.slot(place_of(sets.tied, words, moves.movers, rank));
    u32 to = lane.slot(place_of(sets.older, words, moves.vacant, rank));
    u32 position = lane.position_of[from], stamp = lane.stamps[from];
    moves.from[threadIdx.x] = EMPTY;
    // Only a block that is twice in the lane's list has a slot without a row here.
    if (position == EMPTY) return;
    lane.position_of[to] = position;
    lane.stamps[to] = stamp;
    lane.slot_of[position] = lane.base + to;
    moves.from[threadIdx.x] = lane.base + from;
    moves.to[threadIdx.x] = lane.base + to;
}

// Copies the rows of a round's moves in a layer.
template <class Piece>
static __device__ void copy_moves(const Layer& layer, const Moves& moves, u32 rows) {
    const u32 size = sizeof(Piece), in_first = layer.runs[0] / size, in_row = in_first + layer.runs[1] / size;
    const Slab slab = slab_of(layer);
    auto place = [&](u32 slot, u32 piece) {
        u64 run = piece < in_first ? slab.first_run(slot) : slab.second_run(slot) - in_first * size;
        return at<Piece>(run + piece * size);
    };
    copy_numbered<Piece>(
        rows, in_row, in_row, [&](u32 row) { return moves.from[row] != EMPTY; }, [](u32) { return 0u; },
        [&](u32 row, u32 piece) { return place(moves.from[row], piece); },
        [&](u32 row, u32 piece) { return place(moves.to[row], piece); });
}

// Moves the rows that stay to vacant places, `count` of them, as many at a time as there are threads, in every layer of
// the table's group.
static __device__ void move_rows(const Pools& pools, const Layer& table, const Lane& lane, const Sets& sets, u32 count,
                                 Moves& moves) {
    for (u32 first = 0; first < count; first += blockDim.x) {
        u32 rows = min(blockDim.x, count - first);
        if (threadIdx.x < rows) move_row(lane, sets, first + threadIdx.x, moves);
        __syncthreads();
        // A cache without rows has no bytes to copy.
        for (u32 member = 0; (pools.due & DUE_GATHERED) && member < table.members; ++member) {
            const Layer& layer = layer_at(pools, table.first + member);
            switch (layer.piece_bytes) {
                case 16: copy_moves<Words4>(layer, moves, rows); break;
                case 8: copy_moves<Words2>(layer, moves, rows); break;
                default: copy_moves<u32>(layer, moves, rows);
            }
        }
        __syncthreads();
    }
}

// What all threads know alike, so that it takes no registers of theirs.
struct Known {
    LaneHead head;
    Lane lane;
    Sets sets;
    Victims victims;
};

// Gives up the oldest slots of a lane, the empty ones first, and the places from `budget` on. Returns how many rows
// have moved.
static __device__ u32 shrink(const Pools& pools, const Layer& layer, u32 number, u32 budget, Known& known, Room& room,
                             Moves& moves) {
    const Lane& lane = known.lane;
    const Sets& sets = known.sets;
    const LaneHead& head = known.head;
    if (threadIdx.x == 0) {
        known.lane = lane_of(layer, number, head.blocks);
        known.sets = sets_at(pools, at<u32>(pools.warm_work) + static_cast<u64>(blockIdx.x) * pools.work_words);
    }
    Victims victims = choose_oldest(lane, head, head.budget - budget, sets, layer.tokens, room);
    if (threadIdx.x == 0) known.victims = victims;
    __syncthreads();
    find_moves(lane, known.victims, head.budget, budget, sets);
    __syncthreads();
    // If empty slots are enough, no row leaves.
    if (room.min_stamp != FREE_STAMP) forget(lane, head.budget, budget, sets);
    const u32 words = lane.places / 32;
    u32 movers = count_ones(room.scan, sets.tied, words, moves.movers);
    u32 vacant = count_ones(room.scan, sets.older, words, moves.vacant), count = min(movers, vacant);
    __syncthreads();
    move_rows(pools, layer, lane, sets, count, moves);
    clear_slots(lane, budget, 0);
    if (threadIdx.x == 0) {
        u32 blocks = div_ceil(budget, SLOT_BLOCK);
        // If a row has left, every slot holds one now. If none has, no place before became empty.
        u32 full = min(head.full_places, budget);
        *lane.head = {head.length, head.landed, budget, blocks, head.stamp, room.min_stamp, EMPTY, full};
    }
    return count;
}

// Changes a lane's budgets to the staged ones. Grid: tables. What was staged for a table and cannot be leaves the table
// as it is, and the lane's steps fail.
FOREBAY_KERNEL(forebay_resize, ResizeArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Room room;
    __shared__ Moves moves;
    __shared__ Known known;
    const Pools& pools = args.pools;
    const Layer& layer = table_at(pools, blockIdx.x);
    const u32* budgets = at<const u32>(args.staged) + STAGED_PAGES + pools.lane_pages;
    const u32* blocks = budgets + pools.table_count + static_cast<u64>(blockIdx.x) * args.staged_blocks;
    u32 budget = budgets[blockIdx.x];
    if (!can_resize(layer, args.lane, budget, blocks, args.staged_blocks)) {
        if (threadIdx.x == 0 && args.lane < pools.lanes) {
            atomicMax(at<u32>(pools.trust) + args.lane, static_cast<u32>(FAILED));
        }
        return;
    }
    if (threadIdx.x == 0) known.head = at<const LaneHead>(layer.heads)[args.lane];
    __syncthreads();
    if (budget > known.head.budget) {
        grow(layer, args.lane, known.head, budget, blocks);
    } else if (budget < known.head.budget) {
        u32 moved = shrink(pools, layer, args.lane, budget, known, room, moves);
        if (threadIdx.x == 0) atomicAdd(at<u32>(args.moved), moved * layer.members);
    }
}
