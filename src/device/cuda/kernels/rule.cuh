// The rule of `residency`, carried out by a block of threads for one lane in one layer.
//
// In canonical form a choice of `need` victims is: the bound, which is the smallest stamp at or below which
// there are enough; the slots below it, in the lane's order; then, of those that bear it, the ones with
// the lowest positions, in the lane's order. The first guess, the stamp above the oldest, takes ballots and
// population counts only; another bound, and which ties go, are found by histograms.
//
// Sets are bits: one a position for what is missed, one a slot of the lane for who goes. The two lists that
// come of them, ascending positions and victims, meet rank by rank.
#pragma once

#include "block.cuh"

// One lane of a layer.
struct Lane {
    LaneHead* head;
    u32* slot_of;       // by position
    u32* position_of;   // by budget slot
    u32* stamps;        // by budget slot
    const u32* blocks;
    u32 places;         // slots in the lane's blocks
    u32 base;           // id of the first budget slot

    // The budget slot at a place of the lane's order.
    __device__ __forceinline__ u32 slot(u32 place) const {
        return blocks[place / SLOT_BLOCK] * SLOT_BLOCK + place % SLOT_BLOCK;
    }
};

// Whether a sequence is in the lane; `lane` may be any number.
static __device__ bool has_sequence(const Layer& layer, u32 lane) {
    return lane < layer.lanes && at<const LaneHead>(layer.heads)[lane].budget > 0;
}

static __device__ Lane lane_at(const Layer& layer, u32 lane) {
    LaneHead* head = at<LaneHead>(layer.heads) + lane;
    return {head,
            at<u32>(layer.slot_of) + static_cast<u64>(lane) * layer.tokens,
            at<u32>(layer.position_of),
            at<u32>(layer.stamp_of) + layer.budget_base,
            at<const u32>(layer.blocks) + static_cast<u64>(lane) * layer.lane_blocks,
            min(head->blocks, layer.lane_blocks) * SLOT_BLOCK,
            layer.budget_base};
}

struct Split {
    u32 older, tied, touched;
};

// What threads of a block share while they work.
struct Room {
    u32 scan[MOST_WARPS];
    u32 totals[2][MOST_WARPS];
    Histogram histogram;
    Split splits[2];
    u32 beyond, heir;
    u64 eldest;
};

// The sets of a step: see `Pools`.
struct Sets {
    u32 *missed, *older, *tied;
    u32 missed_words;
};

static __device__ Sets sets_at(const Pools& pools, u32* work) {
    return {work, work + pools.missed_words, work + pools.missed_words + pools.set_words, pools.missed_words};
}

// One residency step.
struct Step {
    const i32* selection;  // [rows][k]
    i32* slots;            // [rows][k], or null: nobody asks
    Fetch* fetches;        // as many as selected
    u32 rows, k;
    u32 limit;             // the length that the first row sees, each further row sees one more
    u32 now;
    u32 scratch_start, scratch, scratch_rows;
};

struct Outcome {
    u32 hits, misses, scratch;
    u32 beyond;  // the first selected entry beyond the length, or EMPTY
};

// Looks all positions up: stamps what is resident, notes what is missed. Positions at or beyond the limit are
// answered with -1. Four look-ups of a thread are under way at once.
static __device__ void touch(const Lane& lane, const Step& step, const Sets& sets, Room& room) {
    const u32 ahead = 4;
    for (u32 row = 0; row < step.rows; ++row) {
        const i32* selection = step.selection + static_cast<u64>(row) * step.k;
        i32* slots = step.slots ? step.slots + static_cast<u64>(row) * step.k : nullptr;
        for (u32 first = threadIdx.x; first < step.k; first += ahead * blockDim.x) {
            u32 position[ahead], found[ahead];
            FOREBAY_UNROLL
            for (u32 i = 0; i < ahead; ++i) {
                u32 entry = first + i * blockDim.x;
                position[i] = entry < step.k ? static_cast<u32>(selection[entry]) : EMPTY;
            }
            FOREBAY_UNROLL
            for (u32 i = 0; i < ahead; ++i) {
                found[i] = position[i] < step.limit + row ? lane.slot_of[position[i]] : EMPTY;
            }
            FOREBAY_UNROLL
            for (u32 i = 0; i < ahead; ++i) {
                u32 entry = first + i * blockDim.x;
                if (entry >= step.k) break;
                if (slots) slots[entry] = static_cast<i32>(found[i]);
                if (found[i] == ABSENT) {
                    atomicOr(&sets.missed[position[i] / 32], 1u << position[i] % 32);
                } else if (found[i] == EMPTY) {
                    if (position[i] != EMPTY) atomicMin(&room.beyond, row * step.k + entry);
                } else if (found[i] >= lane.base) {
                    lane.stamps[found[i] - lane.base] = step.now;
                }
            }
        }
    }
}

// Splits the lane at a bound: which slots are older, which bear it, and how many bear `now`. A warp takes a
// word of the sets at a time; four loads are under way at once.
static __device__ void split(const Lane& lane, u32 bound, u32 now, const Sets& sets, Split& counts) {
    const u32 ahead = 4;
    u32 words = lane.places / 32, older = 0, tied = 0, touched = 0;
    for (u32 first = warp_id(); first < words; first += ahead * warps()) {
        u32 stamp[ahead];
        FOREBAY_UNROLL
        for (u32 i = 0; i < ahead; ++i) {
            u32 word = first + i * warps();
            stamp[i] = word < words ? lane.stamps[lane.slot(word * 32 + lane_id())] : UNUSED_STAMP;
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < ahead; ++i) {
            u32 word = first + i * warps();
            u32 below = __ballot_sync(ALL_LANES, stamp[i] < bound);
            u32 same = __ballot_sync(ALL_LANES, stamp[i] == bound);
            touched += __popc(__ballot_sync(ALL_LANES, stamp[i] == now));
            older += __popc(below);
            tied += __popc(same);
            if (lane_id() == 0 && word < words) {
                sets.older[word] = below;
                sets.tied[word] = same;
            }
        }
    }
    if (lane_id() == 0) {
        atomicAdd(&counts.older, older);
        atomicAdd(&counts.tied, tied);
        atomicAdd(&counts.touched, touched);
    }
}

// The keys that `nth_lowest` chooses from: all stamps of a lane, or the positions of a set of its slots.
struct Stamps {
    const Lane& lane;

    template <class Count>
    __device__ __forceinline__ void operator()(Count count) const {
        for (u32 place = threadIdx.x; place < lane.places; place += blockDim.x) {
            count(lane.stamps[lane.slot(place)]);
        }
    }
};

struct Positions {
    const Lane& lane;
    const u32* set;

    template <class Count>
    __device__ __forceinline__ void operator()(Count count) const {
        for (u32 place = threadIdx.x; place < lane.places; place += blockDim.x) {
            if (set[place / 32] >> place % 32 & 1) count(lane.position_of[lane.slot(place)]);
        }
    }
};

// Leaves the `keep` lowest positions in a set of slots, and notes the lowest one that is left out.
static __device__ void keep_lowest(const Lane& lane, u32* set, u32 keep, u32 tokens, Room& room) {
    u32 bits = 32 - __clz(static_cast<i32>(tokens - 1));
    Positions positions = {lane, set};
    u32 highest = nth_lowest(room.histogram, keep, 0, saturating_sub(bits, BIN_BITS), positions);
    for (u32 word = warp_id(); word < lane.places / 32; word += warps()) {
        bool in = set[word] >> lane_id() & 1;
        u32 position = in ? lane.position_of[lane.slot(word * 32 + lane_id())] : EMPTY;
        u32 kept = __ballot_sync(ALL_LANES, in && position <= highest);
        if (in && position > highest) atomicMin(&room.heir, position);
        if (lane_id() == 0) set[word] = kept;
    }
    __syncthreads();
}

// Who goes: all of the first set, and so many of the second, each in the lane's order.
struct Victims {
    const u32 *older, *tied;
    u32 older_count, tied_count;
    u32 front, heir;  // what the lane remembers of the choice
};

// Chooses `need` victims, at least one, of a lane split at `bound`. Every thread comes to the same.
static __device__ Victims choose(const Lane& lane, u32 need, u32 bound, const Split& guess, const Sets& sets,
                                 u32 tokens, u32 now, Room& room) {
    u32 *older = sets.older, *tied = sets.tied;
    Split found = guess;
    if (need > guess.older + guess.tied) {
        Stamps stamps = {lane};
        bound = nth_lowest(room.histogram, need - guess.older - guess.tied, bound + 1, 0, stamps);
        split(lane, bound, now, sets, room.splits[1]);
        __syncthreads();
        found = room.splits[1];
    } else if (need <= guess.older) {
        // The first guess was one too high: all older slots bear the lane's oldest stamp.
        tied = sets.older;
        older = sets.tied;
        found.tied = guess.older;
        found.older = 0;
        bound -= 1;
    }
    u32 go = need - found.older;
    // Empty slots bear no position: the first ones of them go.
    bool part = go != found.tied && bound != FREE_STAMP;
    if (part) keep_lowest(lane, tied, go, tokens, room);
    return {older, tied, found.older, go, bound, part ? room.heir : EMPTY};
}

// Gives the fetched rows of rank `rank` on the places of a set, `count` of them at most.
static __device__ void give_places(const Lane& lane, const u32* set, u32 rank, u32 count, const Step& step,
                                   Room& room) {
    each_one(room.scan, set, lane.places / 32, [&](u32 number, u32 place) {
        if (number < count) step.fetches[rank + number].slot = place;
    });
}

// Puts the fetched rows from rank `first` on, `end` in all, into the slots of the victims. The ones of a set may
// all stand in a few threads' words: who walks them only stores the place, and what has to be looked up for
// each is divided among all threads.
static __device__ void replace(const Lane& lane, const Victims& victims, u32 first, u32 end, const Step& step,
                               Room& room) {
    if (victims.older_count > 0) give_places(lane, victims.older, first, victims.older_count, step, room);
    give_places(lane, victims.tied, first + victims.older_count, victims.tied_count, step, room);
    __syncthreads();
    for (u32 rank = first + threadIdx.x; rank < end; rank += blockDim.x) {
        Fetch fetch = step.fetches[rank];
        u32 slot = lane.slot(fetch.slot), old = lane.position_of[slot];
        if (old != EMPTY) lane.slot_of[old] = ABSENT;
        lane.position_of[slot] = fetch.position;
        lane.slot_of[fetch.position] = lane.base + slot;
        lane.stamps[slot] = step.now;
        step.fetches[rank].slot = lane.base + slot;
    }
}

// The step up to the answers: rows that are in scratch slots stand in the map until `end_step`. Every thread
// of the block calls it and comes to the same outcome.
static __device__ Outcome begin_step(const Lane& lane, const Step& step, const Sets& sets, u32 tokens,
                                     Room& room, Victims& victims) {
    LaneHead head = *lane.head;
    for (u32 word = threadIdx.x; word < sets.missed_words; word += blockDim.x) sets.missed[word] = 0;
    if (threadIdx.x == 0) {
        room.splits[0] = room.splits[1] = {0, 0, 0};
        room.beyond = room.heir = EMPTY;
    }
    __syncthreads();
    touch(lane, step, sets, room);
    __syncthreads();
    u32 bound = min(head.front + 1, step.now - 1);
    split(lane, bound, step.now, sets, room.splits[0]);
    u32 misses = each_one(room.scan, sets.missed, sets.missed_words, [&](u32 rank, u32 position) {
        step.fetches[rank].position = position;
    });
    // The list is seen by all, and so are the counts of the split.
    __syncthreads();
    Split guess = room.splits[0];
    u32 scratch = saturating_sub(misses, head.budget - guess.touched);
    for (u32 rank = threadIdx.x; rank < scratch; rank += blockDim.x) {
        Fetch& fetch = step.fetches[rank];
        // Only a warm-up has more of them than the passes of a step take, and it reads none of them.
        fetch.slot = rank < step.scratch_rows ? step.scratch_start + rank % step.scratch : ABSENT;
        lane.slot_of[fetch.position] = fetch.slot;
    }
    victims = {sets.older, sets.tied, 0, 0, head.front, head.heir};
    if (misses > scratch) {
        victims = choose(lane, misses - scratch, bound, guess, sets, tokens, step.now, room);
        replace(lane, victims, scratch, misses, step, room);
    }
    __syncthreads();
    return {guess.touched, misses, scratch, room.beyond};
}

// Scratch slots are forgotten, and the lane's head says what the step has done. Every thread calls it, after
// all of them have read their answers.
static __device__ void end_step(const Lane& lane, const Step& step, const Outcome& outcome,
                                const Victims& victims) {
    for (u32 rank = threadIdx.x; rank < outcome.scratch; rank += blockDim.x) {
        lane.slot_of[step.fetches[rank].position] = ABSENT;
    }
    if (threadIdx.x == 0) {
        lane.head->stamp = step.now;
        lane.head->front = victims.front;
        lane.head->heir = victims.heir;
    }
}
