// Resolve: a block of threads for each batch row turns its selections into slots, a list of rows to fetch,
// and the index lists of split attention.
#pragma once

#include "rows.cuh"
#include "rule.cuh"

// Where the answers of one batch row go.
struct Answers {
    const i32* selection;  // [query rows][k]
    i32* slots;            // [query rows][k]
    i32* lists;            // [1 + waves][batch][query rows][k], or null
    u32* counts;           // [1 + waves][batch][query rows]
    u32 row, lane, batch, rows, k, waves;

    // Which row of all lists is that of a query row in one of them.
    __device__ __forceinline__ u64 list_row(u32 list, u32 query) const {
        return (static_cast<u64>(list) * batch + row) * rows + query;
    }
};

// The room for the sets of a resolve: shared memory where it is small enough, else a batch row's own.
static __device__ u32* work_at(const Pools& pools, const Micro& micro, u32 row, RoomAt at_room) {
    FOREBAY_DYNAMIC_SHARED(u32, room);
    return at_room != IN_MEMORY ? room : at<u32>(micro.work) + static_cast<u64>(row) * pools.work_words;
}

// Query rows from `first` on select nothing.
static __device__ void answer_nothing(const Answers& answers, u32 first) {
    for (u64 entry = static_cast<u64>(first) * answers.k + threadIdx.x;
         entry < static_cast<u64>(answers.rows) * answers.k; entry += blockDim.x) {
        answers.slots[entry] = -1;
    }
    if (!answers.lists) return;
    for (u32 list = 0; list <= answers.waves; ++list) {
        for (u32 query = first; query < answers.rows; ++query) {
            u64 row = answers.list_row(list, query);
            for (u32 i = threadIdx.x; i < answers.k; i += blockDim.x) answers.lists[row * answers.k + i] = -1;
            if (threadIdx.x == 0) answers.counts[row] = 0;
        }
    }
}

// Which wave fetches `position`, one of the rows in scratch slots: they take the slots in turn, by rank.
static __device__ u32 wave_of(const Step& step, u32 scratch, u32 position) {
    u32 low = 0, high = scratch;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (step.fetches[middle].position < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low / step.scratch;
}

// How many lanes before this one, in the whole block, have `first` set (the low half of the result) and `second` set
// (the high half); `total` counts all lanes. Calls use the two rooms alternately, so that one barrier a call is enough:
// a thread that writes to a room has passed the barrier of the call in between.
static __device__ u32 block_rank(u32 (&rooms)[2][MOST_WARPS], u32& turn, bool first, bool second, u32& total) {
    u32 (&room)[MOST_WARPS] = rooms[turn];
    turn ^= 1;
    u32 ones = __ballot_sync(ALL_LANES, first), twos = __ballot_sync(ALL_LANES, second);
    if (lane_id() == 0) room[warp_id()] = __popc(ones) | __popc(twos) << 16;
    __syncthreads();
    u32 below = (1u << lane_id()) - 1, rank = __popc(ones & below) | __popc(twos & below) << 16;
    total = 0;
    for (u32 warp = 0; warp < warps(); ++warp) {
        if (warp == warp_id()) rank += total;
        total += room[warp];
    }
    return rank;
}

// The slot of an entry of a query row, and in which list it belongs; EMPTY for an entry that selects nothing.
// A missed position is looked up again, and answered.
static __device__ u32 list_of(const Lane& lane, const Step& step, u32 scratch, u32 position, i32& answer) {
    i32 found = answer;
    if (found < 0) return EMPTY;
    bool missed = found == static_cast<i32>(ABSENT);
    if (missed) answer = found = static_cast<i32>(lane.slot_of[position]);
    if (static_cast<u32>(found) - step.scratch_start < step.scratch) {
        return 1 + wave_of(step, scratch, position);
    }
    return missed;
}

// Answers what was missed, and divides a query row into its lists, two of them at a time, each in the order
// of the selection.
static __device__ void divide(const Lane& lane, const Step& step, u32 scratch, const Answers& answers,
                              u32 query, Room& room, u32& turn) {
    const i32* selection = answers.selection + static_cast<u64>(query) * answers.k;
    i32* slots = answers.slots + static_cast<u64>(query) * answers.k;
    for (u32 list = 0; list <= answers.waves; list += 2) {
        u64 rows[2] = {answers.list_row(list, query), answers.list_row(list + 1, query)};
        u32 filled = 0;  // of both, as `block_rank` counts
        for (u32 first = 0; first < answers.k; first += blockDim.x) {
            u32 entry = first + threadIdx.x, number = EMPTY, total;
            i32 slot = -1;
            if (entry < answers.k) {
                slot = slots[entry];
                i32 before = slot;
                number = list_of(lane, step, scratch, static_cast<u32>(selection[entry]), slot);
                if (slot != before) slots[entry] = slot;
            }
            u32 rank = block_rank(room.totals, turn, number == list, number == list + 1, total) + filled;
            if (number == list) answers.lists[rows[0] * answers.k + (rank & 0xFFFF)] = slot;
            if (number == list + 1) answers.lists[rows[1] * answers.k + (rank >> 16)] = slot;
            filled += total;
        }
        for (u32 i = 0; i < 2 && list + i <= answers.waves; ++i) {
            u32 count = i ? filled >> 16 : filled & 0xFFFF;
            for (u32 entry = count + threadIdx.x; entry < answers.k; entry += blockDim.x) {
                answers.lists[rows[i] * answers.k + entry] = -1;
            }
            if (threadIdx.x == 0) answers.counts[rows[i]] = count;
        }
    }
}

// Answers what was missed. Each thread looks at the entries that it looked up before.
static __device__ void look_up_missed(const Lane& lane, const Step& step) {
    for (u32 row = 0; row < step.rows; ++row) {
        const i32* selection = step.selection + static_cast<u64>(row) * step.k;
        i32* slots = step.slots + static_cast<u64>(row) * step.k;
        for (u32 first = threadIdx.x; first < step.k; first += AHEAD * blockDim.x) {
            u32 position[AHEAD], found[AHEAD];
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
                u32 entry = first + i * blockDim.x;
                position[i] = EMPTY;
                if (entry >= step.k) continue;
                u32 asked = static_cast<u32>(selection[entry]);
                if (slots[entry] == static_cast<i32>(ABSENT)) position[i] = asked;
            }
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
                found[i] = position[i] != EMPTY ? lane.slot_of[position[i]] : EMPTY;
            }
            FOREBAY_UNROLL
            for (u32 i = 0; i < AHEAD; ++i) {
                if (position[i] != EMPTY) slots[first + i * blockDim.x] = static_cast<i32>(found[i]);
            }
        }
    }
}

// Whether a lane whose head is this can make a step of `count` query rows from `first` on.
static __device__ bool can_resolve(const Layer& layer, const Pools& pools, const LaneHead& head, u32 first,
                                   u32 count) {
    if (head.budget == 0) return false;
    // No more distinct rows can be asked for than there are.
    u64 most = min(static_cast<u64>(count) * pools.top_k, static_cast<u64>(head.length));
    u64 room = head.budget + static_cast<u64>(layer.scratch) * layer.waves;
    return first + count <= head.landed && head.stamp < UNUSED_STAMP - 2 && most <= room;
}

// Of the batch row's first thread: its list begins anew, and its query rows count as resolved in every layer of the
// group. `wrong` is what was not gathered of the list before.
static __device__ void begin_row(const ResolveArgs& args, u32 row, const StepHead& head, const Entry& entry,
                                 u32 wrong) {
    List& list = at<List>(args.micro.lists)[row];
    list.step = head.step;
    list.count = list.scratch = 0;
    FOREBAY_UNROLL
    for (u32 place = 0; place < GROUP_MAX; ++place) list.gathered[place] = 0;
    list.layer = args.number;
    list.members = args.layer.members;
    list.first = args.row_first;
    list.rows = args.row_count;
    if (row >= head.real) return;
    list.lane = entry.lane;
    u32 words = div_ceil(args.layer.query_rows, 32);
    for (u32 member = 0; member < args.layer.members; ++member) {
        u32* marks = marks_of(args.pools, args.micro, words, args.number + member, row, RESOLVED);
        note_rows(marks, args.row_first, args.row_count);
    }
    if (wrong) {
        blame(args.pools, args.micro, entry.lane, 1, args.number, row, static_cast<Cause>(wrong), args.number);
    }
}

// What a step found goes to the row's list, the counters of every layer of the group, and the sticky word.
static __device__ void note(const ResolveArgs& args, const Answers& answers, const Room& room) {
    List& list = at<List>(args.micro.lists)[answers.row];
    list.count = room.outcome.misses;
    list.scratch = room.outcome.scratch;
    list.share = args.layer.scratch;
    u32* counts = at<u32>(args.micro.counts) + static_cast<u64>(args.number) * REPORT_COUNT;
    for (u32 member = 0; member < args.layer.members; ++member, counts += REPORT_COUNT) {
        atomicAdd(counts, room.splits[0].touched);
        atomicAdd(counts + 1, room.outcome.misses);
        atomicAdd(counts + 2, room.outcome.scratch);
    }
    if (room.beyond != EMPTY) {
        u32 position = static_cast<u32>(answers.selection[room.beyond]);
        blame(args.pools, args.micro, list.lane, 1, args.number, answers.row, BEYOND_LENGTH, position);
    }
}

// Before the first selected position is looked up, a thread waits for device memory three times: for the step
// descriptor, for the lane's head, for the selection.
FOREBAY_KERNEL(forebay_resolve, ResolveArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ Room room;
    // In shared memory: what every thread knows alike must not take every thread's registers.
    __shared__ Answers answers;
    __shared__ Step step;
    __shared__ Lane lane;
    __shared__ LaneHead known;
    __shared__ Sets sets;
    const Pools& pools = args.pools;
    const Layer& layer = args.layer;
    const Micro& micro = args.micro;
    const bool speaks = threadIdx.x == 0;
    u32 row = args.first + blockIdx.x, k = pools.top_k;
    StepHead head = step_head(pools, micro);
    Entry entry = step_entry(micro, row);
    // Loaded together with the step descriptor.
    u32 wrong = speaks && (pools.due & DUE_GATHERED) ? missing(at<const List>(micro.lists)[row], head.step).cause : 0;
    if (speaks) {
        const bool has_lane = row < head.real && entry.lane < layer.lanes;
        known = has_lane ? at<const LaneHead>(layer.heads)[entry.lane] : LaneHead{};
        u64 offset = static_cast<u64>(blockIdx.x) * args.row_count * k;
        answers = {at<const i32>(args.selection) + offset, at<i32>(args.slots) + offset, at<i32>(args.lists),
                   at<u32>(args.counts), row, entry.lane, args.lists_batch, args.row_count, k, layer.waves};
        begin_row(args, row, head, entry, wrong);
        sets = sets_at(pools, work_at(pools, micro, row, args.shared));
    }
    __syncthreads();
    // A sequence may have fewer query rows than the step is wide: the others are inert.
    u32 count = row < head.real ? min(saturating_sub(entry.query_rows, args.row_first), args.row_count) : 0;
    if (count == 0) return answer_nothing(answers, 0);
    if (!can_resolve(layer, pools, known, args.row_first, count)) {
        if (speaks) blame(pools, micro, entry.lane, 1, args.number, row, TABLES, entry.lane);
        return answer_nothing(answers, 0);
    }
    answer_nothing(answers, count);
    Lane own = lane_of(layer, entry.lane, known.blocks);
    bring_blocks(pools, sets, args.shared, own);
    if (speaks) {
        lane = own;
        Fetch* fetches = at<Fetch>(micro.fetches) + static_cast<u64>(row) * pools.selected;
        step = {answers.selection, answers.slots, fetches, count, k, known.length + args.row_first + 1,
                known.stamp + 1, layer.scratch_base + entry.lane * layer.scratch, layer.scratch,
                layer.scratch * layer.waves};
    }
    // All threads see lane and step after its first barrier.
    begin_step(lane, known, step, sets, layer.tokens, room, [&](u32 position) {
        return row_of(pools, answers.lane, position);
    });
    if (answers.lists) {
        u32 turn = 0;
        for (u32 query = 0; query < step.rows; ++query) {
            divide(lane, step, room.outcome.scratch, answers, query, room, turn);
        }
    } else {
        look_up_missed(lane, step);
    }
    __syncthreads();
    end_step(lane, known, step, room);
    if (speaks) note(args, answers, room);
}
