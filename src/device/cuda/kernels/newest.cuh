// Newest: the positions of a lane's newest rows, for a warm-up that is to bring them back. One block of threads handles
// one of the tables. It changes no table.
//
// The rows are those that a shrink to their number would keep. So the choice of victims finds where the others end: at
// a stamp, and at a position among the rows that bear it. The rows behind are listed in the order of the lane's places,
// which every device has.
#pragma once

#include "lanes.cuh"

// Where a lane's newest rows begin: behind this stamp, and of the rows that bear it at this position.
struct Edge {
    u32 bound, position;
};

// Finds the edge of a lane's `count` newest rows.
static __device__ Edge edge_of(const Lane& lane, u32 count, const Sets& sets, u32 tokens, Room& room) {
    const LaneHead head = *lane.head;
    // Every row is behind empty slots.
    if (head.budget <= count) return {FREE_STAMP, EMPTY};
    choose_oldest(lane, head, head.budget - count, sets, tokens, room);
    __syncthreads();
    return {room.min_stamp, room.next_victim};
}

// Leaves in a set the places whose rows are behind the edge. A warp takes a word at a time, as `split` does.
static __device__ void find_newest(const Lane& lane, Edge edge, u32* set) {
    u32 words = lane.places / 32;
    for (u32 first = warp_id(); first < words; first += AHEAD * warps()) {
        u32 slot[AHEAD], stamp[AHEAD], position[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) slot[i] = lane.slot_or_empty((first + i * warps()) * 32 + lane_id());
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            stamp[i] = slot[i] != EMPTY ? lane.stamps[slot[i]] : UNUSED_STAMP;
            position[i] = slot[i] != EMPTY ? lane.position_of[slot[i]] : EMPTY;
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 word = first + i * warps();
            bool newer = stamp[i] > edge.bound || (stamp[i] == edge.bound && position[i] >= edge.position);
            u32 newest = __ballot_sync(ALL_LANES, newer && position[i] != EMPTY);
            if (lane_id() == 0 && word < words) set[word] = newest;
        }
    }
}

// Writes the positions of the rows at a set's places, at most `most`; returns how many. The ones may all be in a few
// threads' words: those threads only store the places, and all threads share the look-ups.
static __device__ u32 list_rows(const Lane& lane, const u32* set, u32 most, u32* positions, Room& room) {
    u32 count = each_one(room.scan, set, lane.places / 32, [&](u32 rank, u32 place) {
        if (rank < most) positions[rank] = place;
    });
    count = min(count, most);
    __syncthreads();
    for (u32 first = threadIdx.x; first < count; first += AHEAD * blockDim.x) {
        u32 word[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 rank = first + i * blockDim.x;
            // Beyond the last, the thread's own first again: another thread may be writing its own.
            word[i] = positions[rank < count ? rank : first];
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) word[i] = lane.position_of[lane.slot(word[i])];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 rank = first + i * blockDim.x;
            if (rank < count) positions[rank] = word[i];
        }
    }
    return count;
}

// Writes the positions of a lane's newest rows, of each table as many as a query row selects, and -1 where it has
// fewer. Grid: tables.
FOREBAY_KERNEL(forebay_newest, NewestArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Room room;
    const Pools& pools = args.pools;
    const Layer& layer = table_at(pools, blockIdx.x);
    u32* positions = at<u32>(args.positions) + static_cast<u64>(blockIdx.x) * pools.top_k;
    u32 count = 0;
    if (has_sequence(layer, args.lane)) {
        const Lane lane = lane_at(layer, args.lane);
        Sets sets = sets_at(pools, at<u32>(pools.warm_work) + static_cast<u64>(blockIdx.x) * pools.work_words);
        Edge edge = edge_of(lane, pools.top_k, sets, layer.tokens, room);
        // Nothing of the choice is read any more.
        find_newest(lane, edge, sets.older);
        __syncthreads();
        count = list_rows(lane, sets.older, pools.top_k, positions, room);
    }
    for (u32 i = count + threadIdx.x; i < pools.top_k; i += blockDim.x) positions[i] = EMPTY;
}
