// The rule of `residency`, exact LRU step by step, as a block of threads runs it for one lane in one layer.
//
// In canonical form a choice of `need` victims is: the bound, which is the smallest stamp at or below which
// there are enough; the slots below it, in the lane's order; then, of those that bear it, the ones with
// the lowest positions, in the lane's order. The first guess, the stamp above the oldest, takes ballots and
// population counts only; another bound, and which ties go, are found by histograms.
//
// Sets are bits: one a position for what is missed, one a slot of the lane for the victims. The two lists that
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
    // The same, EMPTY for a place beyond the last. Without a branch: a thread that asks for several waits once.
    __device__ __forceinline__ u32 slot_or_empty(u32 place) const {
        u32 found = slot(min(place, places - 1));
        return place < places ? found : EMPTY;
    }
};

// Calls `use` for the lane's slots from place `first` on, the threads of the block dividing them: with the place, the
// slot, and what `load` returned for them. A thread loads `AHEAD` of them before it uses the first.
template <class Load, class Use>
static __device__ __forceinline__ void each_slot(const Lane& lane, u32 first, Load load, Use use) {
    for (u32 from = first + threadIdx.x; from < lane.places; from += AHEAD * blockDim.x) {
        u32 slot[AHEAD];
        decltype(load(0u, 0u)) word[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            slot[i] = lane.slot_or_empty(from + i * blockDim.x);
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            word[i] = {};
            if (slot[i] != EMPTY) word[i] = load(from + i * blockDim.x, slot[i]);
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            if (slot[i] != EMPTY) use(from + i * blockDim.x, slot[i], word[i]);
        }
    }
}

// Whether a sequence is in the lane; `lane` may be any number.
static __device__ bool has_sequence(const Layer& layer, u32 lane) {
    return lane < layer.lanes && at<const LaneHead>(layer.heads)[lane].budget > 0;
}

// The address of a lane's blocks, `Layer::lane_blocks` words.
static __device__ __forceinline__ u32* blocks_at(const Layer& layer, u32 lane) {
    return at<u32>(layer.blocks) + static_cast<u64>(lane) * layer.lane_blocks;
}

// A lane of which so many blocks are in use.
static __device__ __forceinline__ Lane lane_of(const Layer& layer, u32 lane, u32 used) {
    return {at<LaneHead>(layer.heads) + lane,
            at<u32>(layer.slot_of) + static_cast<u64>(lane) * layer.tokens,
            at<u32>(layer.position_of),
            at<u32>(layer.stamp_of) + layer.budget_base,
            blocks_at(layer, lane),
            min(used, layer.lane_blocks) * SLOT_BLOCK,
            layer.budget_base};
}

static __device__ Lane lane_at(const Layer& layer, u32 lane) {
    return lane_of(layer, lane, at<const LaneHead>(layer.heads)[lane].blocks);
}

struct Split {
    u32 older, tied, touched;
};

struct Outcome {
    u32 misses, scratch;
};

// What threads of a block share while they work.
struct Room {
    u32 scan[MOST_WARPS];
    u32 totals[2][MOST_WARPS];
    Histogram histogram;
    Split splits[2];
    Outcome outcome;
    u32 beyond;  // the first selected entry beyond the length, or EMPTY
    // What the lane remembers of its last choice of victims: thread 0's own, and the least of all threads.
    u32 min_stamp, next_victim;
    u64 lru_slot;
    u32 empty_place;
};

// The room that a step works in: see `Pools`.
struct Sets {
    u32 *missed, *older, *tied;
    u32 missed_words;
};

static __device__ Sets sets_at(const Pools& pools, u32* work) {
    u32 *older = work + pools.missed_words, *tied = older + pools.set_words;
    return {work, older, tied, pools.missed_words};
}

// Copies a lane's blocks to shared memory, after the sets, if there is room for them: every slot that a step looks at
// needs one. The copies run while positions are looked up; `begin_step` waits for them.
static __device__ void bring_blocks(const Pools& pools, const Sets& sets, RoomAt room, Lane& lane) {
    if (room != SETS_AND_BLOCKS) return;
    u32* blocks = sets.tied + pools.set_words;
    for (u32 i = threadIdx.x; i < lane.places / SLOT_BLOCK; i += blockDim.x) copy_word(blocks + i, lane.blocks + i);
    lane.blocks = blocks;
}

// One residency step.
struct Step {
    const i32* selection;  // [rows][k]
    i32* slots;            // [rows][k], or null
    Fetch* fetches;        // as many as selected
    u32 rows, k;
    u32 limit;             // the length that the first row sees, each further row sees one more
    u32 now;
    u32 scratch_start, scratch, scratch_rows;
};

// Looks all positions up: stamps what is resident, notes what is missed. Positions at or beyond the limit are
// answered with -1. `AHEAD` look-ups of a thread are under way at once.
static __device__ void touch(const Lane& lane, const Step& step, const Sets& sets, Room& room) {
    for (u32 row = 0; row < step.rows; ++row) {
        const i32* selection = step.selection + static_cast<u64>(row) * step.k;
        i32* slots = step.slots ? step.slots + static_cast<u64>(row) * step.k : nullptr;
        for (u32 first = threadIdx.x; first < step.k; first += AHEAD * blockDim.x) {
            u32 position[AHEAD], found[AHEAD];
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
                u32 entry = first + i * blockDim.x;
                position[i] = entry < step.k ? static_cast<u32>(selection[entry]) : EMPTY;
            }
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
                found[i] = position[i] < step.limit + row ? lane.slot_of[position[i]] : EMPTY;
            }
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
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
// word of the sets at a time; `AHEAD` loads are under way at once.
static __device__ void split(const Lane& lane, u32 bound, u32 now, const Sets& sets, Split& counts) {
    u32 words = lane.places / 32, older = 0, tied = 0, touched = 0;
    for (u32 first = warp_id(); first < words; first += AHEAD * warps()) {
        u32 slot[AHEAD], stamp[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) slot[i] = lane.slot_or_empty((first + i * warps()) * 32 + lane_id());
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) stamp[i] = slot[i] != EMPTY ? lane.stamps[slot[i]] : UNUSED_STAMP;
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
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

// Counts the distinct rows that a step without misses has selected, all of them hits, by position: so the lane's stamps
// need no scan. Landed rows are at the length and beyond. Leaves a bit of each position in `sets.missed`, which must be
// empty and which no thread reads any more.
static __device__ void count_hits(const Step& step, u32 length, const Sets& sets, Split& counts) {
    u32 selected = step.rows * step.k, hits = 0;
    for (u32 first = threadIdx.x; first < selected; first += AHEAD * blockDim.x) {
        u32 position[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 entry = first + i * blockDim.x;
            position[i] = entry < selected ? static_cast<u32>(step.selection[entry]) : EMPTY;
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 bit = 1u << position[i] % 32;
            if (position[i] < length) hits += (atomicOr(&sets.missed[position[i] / 32], bit) & bit) == 0;
        }
    }
    hits = __reduce_add_sync(ALL_LANES, hits);
    if (lane_id() == 0) atomicAdd(&counts.touched, hits);
}

// The keys that `nth_lowest` chooses from: all stamps of a lane, or the positions of a set of its slots.
struct Stamps {
    const Lane& lane;

    template <class Count>
    __device__ __forceinline__ void operator()(Count count) const {
        auto stamp = [&](u32, u32 slot) { return lane.stamps[slot]; };
        each_slot(lane, 0, stamp, [&](u32, u32, u32 stamp) { count(stamp); });
    }
};

// How many positions of a set's slots a thread reads once and keeps in registers: with 512 threads, those of 7,168
// slots. Each further pass over the set reads only the rest again.
static const u32 KEPT = 14;

struct Positions {
    const Lane& lane;
    const u32* set;
    u32 kept[KEPT];  // EMPTY for a slot that is not in the set

    // The slot at a place, EMPTY where the set does not have it.
    __device__ __forceinline__ u32 member(u32 place) const {
        u32 at = min(place, lane.places - 1), slot = lane.slot(at);
        return place == at && (set[at / 32] >> at % 32 & 1) ? slot : EMPTY;
    }

    // Positions at places from `first` on, as far apart as there are threads.
    template <u32 COUNT>
    __device__ __forceinline__ void read(u32 first, u32 (&found)[COUNT]) const {
        FOREBAY_UNROLL
        for (u32 i = 0; i < COUNT; ++i) found[i] = member(first + i * blockDim.x);
        FOREBAY_UNROLL
        for (u32 i = 0; i < COUNT; ++i) found[i] = found[i] != EMPTY ? lane.position_of[found[i]] : EMPTY;
    }

    template <class Count>
    __device__ __forceinline__ void operator()(Count count) const {
        FOREBAY_UNROLL
        for (u32 i = 0; i < KEPT; ++i) {
            if (kept[i] != EMPTY) count(kept[i]);
        }
        for (u32 first = threadIdx.x + KEPT * blockDim.x; first < lane.places; first += AHEAD * blockDim.x) {
            u32 position[AHEAD];
            read(first, position);
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
                if (position[i] != EMPTY) count(position[i]);
            }
        }
    }
};

// Takes a word's slots whose positions are above `highest` out of a set; returns the lane's position if it is one of
// them, else EMPTY. A warp calls it, of the word's 32 slots each lane brings the position.
static __device__ __forceinline__ u32 keep_word(u32* set, u32 word, u32 words, u32 position, u32 highest) {
    u32 kept = __ballot_sync(ALL_LANES, position <= highest);
    if (lane_id() == 0 && word < words) set[word] = kept;
    return position > highest ? position : EMPTY;
}

// Leaves the `keep` lowest positions in a set of slots, and notes the lowest one that is left out.
static __device__ void keep_lowest(const Lane& lane, u32* set, u32 keep, u32 tokens, Room& room) {
    u32 bits = 32 - __clz(static_cast<i32>(tokens - 1)), words = lane.places / 32, next_victim = EMPTY;
    Positions positions = {lane, set};
    positions.read(threadIdx.x, positions.kept);
    u32 highest = nth_lowest(room.histogram, keep, 0, saturating_sub(bits, BIN_BITS), positions);
    FOREBAY_UNROLL
    for (u32 i = 0; i < KEPT; ++i) {
        next_victim = min(next_victim, keep_word(set, warp_id() + i * warps(), words, positions.kept[i], highest));
    }
    for (u32 first = warp_id() + KEPT * warps(); first < words; first += AHEAD * warps()) {
        u32 position[AHEAD];
        positions.read(first * 32 + lane_id(), position);
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            next_victim = min(next_victim, keep_word(set, first + i * warps(), words, position[i], highest));
        }
    }
    next_victim = __reduce_min_sync(ALL_LANES, next_victim);
    if (lane_id() == 0) atomicMin(&room.next_victim, next_victim);
    __syncthreads();
}

// The victims: all of the first set, and so many of the second, each in the lane's order.
struct Victims {
    const u32 *older, *tied;
    u32 older_count, tied_count;
};

// Chooses `need` victims, at least one, of a lane split at `bound`, and notes what the lane is to remember of it. Every
// thread comes to the same.
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
    if (threadIdx.x == 0) room.min_stamp = bound;
    return {older, tied, found.older, go};
}

// Chooses the `count` oldest slots of a lane outside of any step, at least one. Every slot is older than the next
// stamp.
static __device__ Victims choose_oldest(const Lane& lane, const LaneHead& head, u32 count, const Sets& sets,
                                        u32 tokens, Room& room) {
    if (threadIdx.x == 0) {
        room.splits[0] = room.splits[1] = {0, 0, 0};
        room.next_victim = EMPTY;
    }
    __syncthreads();
    const u32 now = head.stamp + 1, bound = min(head.min_stamp + 1, head.stamp);
    split(lane, bound, now, sets, room.splits[0]);
    __syncthreads();
    Split guess = room.splits[0];
    return choose(lane, count, bound, guess, sets, tokens, now, room);
}

// Gives the fetched rows of rank `rank` on the places of a set, `count` of them at most.
static __device__ void give_places(const Lane& lane, const u32* set, u32 rank, u32 count, const Step& step,
                                   Room& room) {
    each_one(room.scan, set, lane.places / 32, [&](u32 number, u32 place) {
        if (number < count) step.fetches[rank + number].slot = place;
    });
}

// Puts the fetched rows that get no scratch slot into the slots of the victims. The ones of a set may all be in a few
// threads' words: those threads only store the places, and all threads share the look-ups that follow.
template <class RowAt>
static __device__ void replace(const Lane& lane, const Victims& victims, const Step& step, Room& room,
                               RowAt row_at) {
    const u32 first = room.outcome.scratch, end = room.outcome.misses;
    if (victims.older_count > 0) give_places(lane, victims.older, first, victims.older_count, step, room);
    give_places(lane, victims.tied, first + victims.older_count, victims.tied_count, step, room);
    __syncthreads();
    for (u32 from = first + threadIdx.x; from < end; from += AHEAD * blockDim.x) {
        u32 position[AHEAD], slot[AHEAD], old[AHEAD];
        u64 row[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 rank = from + i * blockDim.x;
            const Fetch& fetch = step.fetches[rank < end ? rank : from];  // as above
            position[i] = fetch.position;
            slot[i] = fetch.slot;
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            slot[i] = lane.slot(slot[i]);
            old[i] = lane.position_of[slot[i]];
            row[i] = row_at(position[i]);
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 rank = from + i * blockDim.x;
            if (rank >= end) continue;
            if (old[i] != EMPTY) lane.slot_of[old[i]] = ABSENT;
            lane.position_of[slot[i]] = position[i];
            lane.slot_of[position[i]] = lane.base + slot[i];
            lane.stamps[slot[i]] = step.now;
            step.fetches[rank] = {row[i], position[i], lane.base + slot[i]};
        }
    }
}

// Puts the first `scratch` of the fetched rows into scratch slots.
template <class RowAt>
static __device__ void take_scratch(const Lane& lane, const Step& step, u32 scratch, RowAt row_at) {
    for (u32 from = threadIdx.x; from < scratch; from += AHEAD * blockDim.x) {
        u32 position[AHEAD];
        u64 row[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            // Beyond the last, the thread's own first again: no other's, which he may be writing.
            u32 rank = from + i * blockDim.x;
            position[i] = step.fetches[rank < scratch ? rank : from].position;
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) row[i] = row_at(position[i]);
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 rank = from + i * blockDim.x;
            if (rank >= scratch) continue;
            // Only a warm-up has more of them than the waves of a step take, and it reads none of them.
            u32 slot = rank < step.scratch_rows ? step.scratch_start + rank % step.scratch : ABSENT;
            lane.slot_of[position[i]] = slot;
            step.fetches[rank] = {row[i], position[i], slot};
        }
    }
}

// The step up to the answers: rows in scratch slots stay in the map until `end_step`. `head` is the lane's head before
// the step; lane and step are read after the first barrier. `row_at(position)` returns a row's place in the
// total pool, for the gather. Every thread of the block calls it, and finds the outcome in `room`.
template <class RowAt>
static __device__ void begin_step(const Lane& lane, const LaneHead& head, const Step& step, const Sets& sets,
                                  u32 tokens, Room& room, RowAt row_at) {
    for (u32 word = threadIdx.x; word < sets.missed_words; word += blockDim.x) sets.missed[word] = 0;
    if (threadIdx.x == 0) {
        room.splits[0] = room.splits[1] = {0, 0, 0};
        room.beyond = room.next_victim = EMPTY;
        room.min_stamp = head.min_stamp;
    }
    __syncthreads();
    touch(lane, step, sets, room);
    wait_for_words();
    __syncthreads();
    u32 misses = each_one(room.scan, sets.missed, sets.missed_words, [&](u32 rank, u32 position) {
        step.fetches[rank].position = position;
    });
    u32 bound = min(head.min_stamp + 1, step.now - 1);
    if (misses > 0) {
        split(lane, bound, step.now, sets, room.splits[0]);
    } else {
        count_hits(step, head.length, sets, room.splits[0]);
    }
    // The list is seen by all, and so are the counts.
    __syncthreads();
    Split guess = room.splits[0];
    u32 scratch = saturating_sub(misses, head.budget - guess.touched);
    if (threadIdx.x == 0) room.outcome = {misses, scratch};
    take_scratch(lane, step, scratch, row_at);
    // So is the outcome.
    __syncthreads();
    if (misses > scratch) {
        Victims victims = choose(lane, misses - scratch, bound, guess, sets, tokens, step.now, room);
        replace(lane, victims, step, room, row_at);
    }
    __syncthreads();
}

// Scratch slots are forgotten, and the lane's head says what the step has done. Every thread calls it, after
// all of them have read their answers.
static __device__ void end_step(const Lane& lane, const LaneHead& head, const Step& step,
                                const Room& room) {
    for (u32 rank = threadIdx.x; rank < room.outcome.scratch; rank += blockDim.x) {
        lane.slot_of[step.fetches[rank].position] = ABSENT;
    }
    if (threadIdx.x == 0) {
        lane.head->stamp = step.now;
        lane.head->min_stamp = room.min_stamp;
        lane.head->next_victim = room.outcome.misses > room.outcome.scratch ? room.next_victim : head.next_victim;
    }
}
