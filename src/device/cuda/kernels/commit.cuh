// Commit: accepted rows move from their landing slots into budget slots, in every layer of a table's group; rejected
// rows are forgotten. One block of threads handles a table and some of the lanes, one after the other.
#pragma once

#include "rows.cuh"
#include "rule.cuh"

// The first empty place from `first` on, EMPTY if there is none; `found` is EMPTY before. All threads return the same.
// Mostly it is `first` itself, which the first loads find.
static __device__ u32 first_empty(const Lane& lane, u32 first, u32& found) {
    for (u32 from = first; from < lane.places; from += AHEAD * blockDim.x) {
        u32 slot[AHEAD], stamp[AHEAD], least = EMPTY;
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) slot[i] = lane.slot_or_empty(from + threadIdx.x + i * blockDim.x);
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) stamp[i] = slot[i] != EMPTY ? lane.stamps[slot[i]] : UNUSED_STAMP;
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            if (stamp[i] == FREE_STAMP) least = min(least, from + threadIdx.x + i * blockDim.x);
        }
        least = __reduce_min_sync(ALL_LANES, least);
        if (lane_id() == 0 && least != EMPTY) atomicMin(&found, least);
        // Without a find no thread writes to `found`, and none reads it.
        if (__syncthreads_or(least != EMPTY)) return found;
    }
    return EMPTY;
}

// The least recently used slot of the lane: the first empty slot in the lane's order, or else the slot of the row with
// the lowest position among the rows of the lowest stamp. The caller puts a row there. Every thread returns the same.
static __device__ u32 lru_slot(const Lane& lane, u32 tokens, Room& room) {
    LaneHead head = *lane.head;
    if (threadIdx.x == 0) {
        room.lru_slot = ~0ull;
        room.empty_place = EMPTY;
    }
    __syncthreads();
    if (head.min_stamp == FREE_STAMP) {
        u32 place = first_empty(lane, head.full_places, room.empty_place);
        if (place != EMPTY) {
            if (threadIdx.x == 0) lane.head->full_places = place + 1;
            return lane.slot(place);
        }
    }
    if (head.min_stamp != FREE_STAMP && head.next_victim < tokens) {
        // Mostly it is the victim that the last choice has noted, if its slot still has the lowest stamp.
        u32 slot = lane.slot_of[head.next_victim];
        if (slot >= lane.base && lane.stamps[slot - lane.base] == head.min_stamp) {
            if (threadIdx.x == 0) lane.head->next_victim = EMPTY;
            return slot - lane.base;
        }
    }
    u64 least = ~0ull;
    auto age = [&](u32 place, u32 slot) {
        u32 stamp = lane.stamps[slot], position = lane.position_of[slot];
        return static_cast<u64>(stamp) << 32 | (stamp == FREE_STAMP ? place : position);
    };
    each_slot(lane, 0, age, [&](u32, u32, u64 age) { least = min(least, age); });
    u32 stamp = __reduce_min_sync(ALL_LANES, static_cast<u32>(least >> 32));
    u32 then = static_cast<u32>(least >> 32) == stamp ? static_cast<u32>(least) : EMPTY;
    then = __reduce_min_sync(ALL_LANES, then);
    if (lane_id() == 0) atomicMin(&room.lru_slot, static_cast<u64>(stamp) << 32 | then);
    __syncthreads();
    stamp = static_cast<u32>(room.lru_slot >> 32);
    then = static_cast<u32>(room.lru_slot);
    // Only a block that is twice in the lane's list has an empty slot here.
    if (stamp == FREE_STAMP) return lane.slot(then);
    if (threadIdx.x == 0) {
        lane.head->min_stamp = stamp;
        lane.head->next_victim = EMPTY;
    }
    return lane.slot_of[then] - lane.base;
}

// Whether `accepted` landed rows, at most as many as there are, can be committed and `next` ones awaited.
static __device__ bool can_commit(const Layer& layer, u32 lane, u32 accepted, u32 next) {
    if (!has_sequence(layer, lane) || next > layer.query_rows) return false;
    u64 length = static_cast<u64>(at<const LaneHead>(layer.heads)[lane].length) + accepted;
    return length + next <= layer.tokens;
}

// Of the landed rows the first `accepted` become the newest residents, the others are forgotten, and `next`
// rows are expected to land. Every thread of the block calls it.
static __device__ void commit_rows(const Pools& pools, const Layer& layer, u32 number, u32 accepted, u32 next,
                                   Room& room) {
    Lane lane = lane_at(layer, number);
    LaneHead head = *lane.head;
    u32 landing = layer.landing_base + number * layer.query_rows;
    for (u32 row = threadIdx.x; row < head.landed; row += blockDim.x) {
        lane.slot_of[head.length + row] = ABSENT;
    }
    // A budget below `accepted` keeps the last ones.
    for (u32 row = saturating_sub(accepted, head.budget); row < accepted; ++row) {
        u32 slot = lru_slot(lane, layer.tokens, room), position = head.length + row;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 old = lane.position_of[slot];
            if (old != EMPTY) lane.slot_of[old] = ABSENT;
            lane.position_of[slot] = position;
            lane.slot_of[position] = lane.base + slot;
            lane.stamps[slot] = head.stamp;
        }
        copy_slot(layer, landing + row, lane.base + slot);
        for (u32 member = 1; member < layer.members; ++member) {
            copy_slot(layer_at(pools, layer.first + member), landing + row, lane.base + slot);
        }
    }
    __syncthreads();
    for (u32 row = threadIdx.x; row < next; row += blockDim.x) {
        lane.slot_of[head.length + accepted + row] = landing + row;
    }
    if (threadIdx.x == 0) {
        lane.head->length = head.length + accepted;
        lane.head->landed = next;
    }
}

// One batch row in one table; `on_device` are the accepted counts there, or 0. Every thread of the block calls it.
static __device__ void commit_entry(const Pools& pools, const Layer& layer, const Micro& micro, u32 row,
                                    const Entry& entry, u64 on_device, Room& room) {
    // Nothing was done of the step yet, in any layer of the group.
    u32 words = div_ceil(layer.query_rows, 32);
    u32* marks = marks_of(pools, micro, words, layer.first, row, RESOLVED);
    for (u32 word = threadIdx.x; word < 2 * words * layer.members; word += blockDim.x) marks[word] = 0;
    u32 accepted = entry.accepted;
    if (accepted == ACCEPTED_ON_DEVICE) accepted = on_device ? at<const u32>(on_device)[row] : EMPTY;
    u32 landed = entry.lane < layer.lanes ? at<const LaneHead>(layer.heads)[entry.lane].landed : 0;
    // A count that cannot be is not believed, and of a failed step nothing is accepted: this step fails too,
    // the tables stay sound.
    bool failed = at<const u32>(micro.failed)[row] != SOUND;
    u32 believed = failed || accepted > landed ? 0 : accepted;
    Cause cause = failed ? EARLIER : accepted > landed ? ACCEPTED : TABLES;
    bool can = can_commit(layer, entry.lane, believed, entry.query_rows);
    if (can) commit_rows(pools, layer, entry.lane, believed, entry.query_rows, room);
    if (threadIdx.x != 0) return;
    if (failed || !can || believed != accepted) {
        blame(pools, micro, entry.lane, 0, layer.first, row, cause, accepted);
    }
    if (layer.first == 0) {
        bool known = entry.lane < layer.lanes;
        at<u32>(micro.lengths)[row] = known ? at<const LaneHead>(layer.heads)[entry.lane].length : 0;
    }
}

// Most steps accept a row or two of a lane: a block of few threads, and few blocks. Grid: tables, batch rows or
// fewer. Between two rows of a block no barrier is needed: no two name the same lane (`load` refuses such a step), and
// threads read nothing shared after the last barrier of a row.
FOREBAY_KERNEL(forebay_commit, CommitArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Room room;
    // Read once, for all rows: a write to any table would have it read again.
    __shared__ Layer layer;
    u32 real = step_head(args.pools, args.micro).real;
    Entry entry = step_entry(args.micro, blockIdx.y);
    if (threadIdx.x == 0) layer = table_at(args.pools, blockIdx.x);
    __syncthreads();
    for (u32 row = blockIdx.y; row < real; row += gridDim.y) {
        if (row != blockIdx.y) entry = step_entry(args.micro, row);
        commit_entry(args.pools, layer, args.micro, row, entry, args.accepted, room);
    }
}
