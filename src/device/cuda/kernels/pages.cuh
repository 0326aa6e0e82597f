// The pages of a dense cache: the begin of a step, and copies of pages.
//
// **A begin** is one block of threads, because its parts wait for each other and are short: a batch row is a thread
// until its place among all query rows and changed entries is known, by sums over the block. Then the threads divide
// the changed entries of all rows, and after them the query rows. So a row with a long prompt, or a whole table, takes
// no longer than many short ones. It waits for the link twice, for the descriptor and for the entries. `device::pages`
// has the rule. Rows come in tiles of as many as there are threads.
//
// **A copy** takes the planes and pages with its arguments, so that nothing of the host's has to stay. All planes of a
// launch have pieces of the same bytes; the words of all pieces are divided evenly.
#pragma once

#include "rows.cuh"

// What a begin keeps of the rows of a tile.
struct PageTile {
    u32 starts[MOST_THREADS], committed[MOST_THREADS];
    u32 lanes[MOST_THREADS];
    u32 before[MOST_THREADS];  // changed entries before the row's
    u32 first[PAGE_GROUPS][MOST_THREADS], count[PAGE_GROUPS][MOST_THREADS];
};

// Keeps the least error of a step.
static __device__ __forceinline__ void blame_page(u64* sticky, u64 stage, u32 group, u32 row, Cause cause, u32 value) {
    atomicMin(sticky, sticky_key(stage, group, row, cause, value));
}

// As `block_scan`, of numbers whose sum may be more than a word.
static __device__ u64 block_scan_wide(u64 (&room)[MOST_WARPS], u64 value, u64& total) {
    u64 inclusive = value;
    for (u32 by = 1; by < WARP_LANES; by *= 2) {
        u64 below = __shfl_up_sync(ALL_LANES, inclusive, by);
        if (lane_id() >= by) inclusive += below;
    }
    if (lane_id() == WARP_LANES - 1) room[warp_id()] = inclusive;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 warp = 0; warp < warps(); ++warp) {
        if (warp == warp_id()) before = total;
        total += room[warp];
    }
    __syncthreads();
    return before + inclusive - value;
}

// Writes a number of a tensor of i32 or of i64.
static __device__ __forceinline__ void set_number(u64 tensor, u32 wide, u32 index, u64 value) {
    if (wide) {
        at<u64>(tensor)[index] = value;
    } else {
        at<u32>(tensor)[index] = static_cast<u32>(value);
    }
}

// A batch row. One that does not count has no tokens and no query rows.
struct PageRow {
    u32 lane, committed, query_rows;
    bool counts;
};

// A row's commit, by its descriptor words.
static __device__ PageRow commit_page_row(const BeginPagesArgs& args, u32 row, const u32* entry, u64* sticky) {
    u32 lane = entry[0], length = entry[1], accepted = entry[2], query_rows = entry[3];
    PageRow none = {lane, 0, 0, false};
    if (lane >= args.lane_count) {
        blame_page(sticky, 0, 0, row, TABLES, lane);
        return none;
    }
    // Both are asked for before one is looked at.
    const u32* own = at<const u32>(args.lanes) + 2ull * lane;
    u32 last = own[0], landed = own[1];
    if (args.accepted != 0 && accepted == ACCEPTED_ON_DEVICE) accepted = at<const u32>(args.accepted)[row];
    u64 committed = length;
    if (length == FROM_DEVICE) {
        if (accepted > landed) {
            blame_page(sticky, 0, 0, row, ACCEPTED, accepted);
            accepted = 0;
        }
        committed = static_cast<u64>(last) + accepted;
    }
    if (committed + query_rows > MOST_TOKENS) {
        blame_page(sticky, 0, 0, row, TABLES, query_rows);
        return none;
    }
    return {lane, static_cast<u32>(committed), query_rows, true};
}

// The changed entries of a row in all groups, as its descriptor words name them, noted in the tile.
static __device__ u32 note_changed(const BeginPagesArgs& args, PageTile& tile, u32 row, u32 lane, const u32* entry,
                                   u64* sticky) {
    u32 changed = 0;
    FOREBAY_UNROLL
    for (u32 group = 0; group < PAGE_GROUPS; ++group) {
        u32 first = 0, count = 0;
        if (group < args.group_count && lane < args.lane_count) {
            first = entry[PAGE_ENTRY + 2 * group];
            count = entry[PAGE_ENTRY + 2 * group + 1];
            if (static_cast<u64>(first) + count > args.tables[group].columns) {
                blame_page(sticky, 1, group, row, TABLES, first);
                count = 0;
            }
        }
        tile.first[group][threadIdx.x] = first;
        tile.count[group][threadIdx.x] = count;
        changed += count;
    }
    return changed;
}

// Copies the changed entries of a tile, `changed` in all, from the lanes' words to the rows of the tables.
static __device__ void take_entries(const BeginPagesArgs& args, const PageTile& tile, u32 base, u32 rows, u32 changed,
                                    u64* sticky) {
    for (u32 begin = threadIdx.x; begin < changed; begin += AHEAD * blockDim.x) {
        u32 held[AHEAD], place[AHEAD], column[AHEAD];
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            u32 number = begin + i * blockDim.x;
            place[i] = EMPTY;
            if (number >= changed) continue;
            u32 row = find_row(tile.before, rows, number), group = 0;
            number -= tile.before[row];
            while (group < PAGE_GROUPS - 1 && number >= tile.count[group][row]) number -= tile.count[group++][row];
            const PageTables& tables = args.tables[group];
            place[i] = row * PAGE_GROUPS + group;
            column[i] = tile.first[group][row] + number;
            held[i] = at<const u32>(tables.lanes)[static_cast<u64>(tile.lanes[row]) * tables.columns + column[i]];
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < AHEAD; ++i) {
            if (place[i] == EMPTY) continue;
            u32 row = base + place[i] / PAGE_GROUPS, group = place[i] % PAGE_GROUPS;
            const PageTables& tables = args.tables[group];
            bool known = held[i] < tables.pages;
            if (!known) blame_page(sticky, 1, group, row, TABLES, held[i]);
            at<u32>(tables.table)[static_cast<u64>(row) * tables.columns + column[i]] = known ? held[i] : 0;
        }
    }
}

// Writes the positions and slots of a tile's query rows, from `first` to before `end`.
static __device__ void place_query_rows(const BeginPagesArgs& args, const PageTile& tile, u32 base, u32 rows, u32 first,
                                        u32 end, u64* sticky) {
    for (u32 query = first + threadIdx.x; query < end; query += blockDim.x) {
        u32 row = find_row(tile.starts, rows, query);
        u32 position = tile.committed[row] + (query - tile.starts[row]);
        set_number(args.positions, args.wide, query, position);
        u32 page[PAGE_GROUPS];
        FOREBAY_UNROLL
        for (u32 group = 0; group < PAGE_GROUPS; ++group) {
            page[group] = 0;
            if (group >= args.group_count) continue;
            const PageTables& tables = args.tables[group];
            u32 column = position / tables.page_tokens;
            if (column >= tables.columns) continue;
            page[group] = at<const u32>(tables.table)[static_cast<u64>(base + row) * tables.columns + column];
        }
        FOREBAY_UNROLL
        for (u32 group = 0; group < PAGE_GROUPS; ++group) {
            if (group >= args.group_count) continue;
            const PageTables& tables = args.tables[group];
            bool there = page[group] > 0 && page[group] < tables.pages;
            u64 slot = static_cast<u64>(page[group]) * tables.page_tokens + position % tables.page_tokens;
            if (!there) blame_page(sticky, 1, group, base + row, TABLES, position);
            set_number(tables.slots, args.wide, query, there ? slot : ~0ull);
        }
    }
}

// Begins the rows of a tile, `rows` from `base` on, after `queries` query rows, which it counts on. Every thread calls
// it.
static __device__ void begin_tile(const BeginPagesArgs& args, PageTile& tile, u64 (&room)[MOST_WARPS], u32 base,
                                  u32 rows, u64& queries, u64* sticky) {
    const u32 words = PAGE_ENTRY + 2 * args.group_count, row = base + threadIdx.x;
    PageRow own = {args.lane_count, 0, 0, false};
    u32 changed = 0;
    if (threadIdx.x < rows) {
        const u32* given = at<const u32>(args.descriptor) + STEP_HEADER + row * words;
        u32 entry[PAGE_ENTRY + 2 * PAGE_GROUPS];
        FOREBAY_UNROLL
        for (u32 word = 0; word < PAGE_ENTRY + 2 * PAGE_GROUPS; ++word) entry[word] = word < words ? given[word] : 0;
        own = commit_page_row(args, row, entry, sticky);
        changed = note_changed(args, tile, row, own.lane, entry, sticky);
    }
    u64 all = 0, all_changed = 0;
    u64 before = queries + block_scan_wide(room, own.query_rows, all);
    tile.before[threadIdx.x] = static_cast<u32>(block_scan_wide(room, changed, all_changed));
    const u64 most = args.step_tokens;
    u32 start = static_cast<u32>(min(before, most)), end = static_cast<u32>(min(before + own.query_rows, most));
    if (threadIdx.x < rows) {
        if (end - start < own.query_rows) blame_page(sticky, 0, 0, row, TABLES, own.query_rows);
        tile.starts[threadIdx.x] = start;
        tile.committed[threadIdx.x] = own.committed;
        tile.lanes[threadIdx.x] = own.lane;
        if (own.counts) {
            u32* lane = at<u32>(args.lanes) + 2ull * own.lane;
            lane[0] = own.committed;
            lane[1] = end - start;
        }
        at<u32>(args.lengths)[row] = own.committed + (end - start);
        at<u32>(args.starts)[row] = start;
        at<u32>(args.report)[REPORT_HEADER + row] = own.committed;
    }
    __syncthreads();
    take_entries(args, tile, base, rows, static_cast<u32>(all_changed), sticky);
    __syncthreads();
    u32 first = static_cast<u32>(min(queries, most));
    queries += all;
    place_query_rows(args, tile, base, rows, first, static_cast<u32>(min(queries, most)), sticky);
    __syncthreads();
}

// Fills what is beyond the step's rows and query rows.
static __device__ void pad_step(const BeginPagesArgs& args, u32 rows, u32 queries) {
    for (u32 row = rows + threadIdx.x; row < args.batch; row += blockDim.x) at<u32>(args.lengths)[row] = 0;
    for (u32 row = rows + threadIdx.x; row <= args.batch; row += blockDim.x) at<u32>(args.starts)[row] = queries;
    for (u32 query = queries + threadIdx.x; query < args.step_tokens; query += blockDim.x) {
        set_number(args.positions, args.wide, query, 0);
        FOREBAY_UNROLL
        for (u32 group = 0; group < PAGE_GROUPS; ++group) {
            if (group < args.group_count) set_number(args.tables[group].slots, args.wide, query, ~0ull);
        }
    }
}

// Begins a step of a dense cache. One block.
FOREBAY_KERNEL(forebay_begin_pages, BeginPagesArgs, MOST_THREADS, 2) {
    after_previous();
    __shared__ PageTile tile;
    __shared__ u64 room[MOST_WARPS];
    __shared__ u64 sticky;
    const u32* given = at<const u32>(args.descriptor);
    const u64 step = static_cast<u64>(given[1]) << 32 | given[0];
    u32 rows = given[2];
    if (threadIdx.x == 0) sticky = rows > args.batch ? sticky_key(0, 0, 0, TABLES, rows) : NOTHING_WRONG;
    if (rows > args.batch) rows = 0;
    __syncthreads();
    u64 queries = 0;
    for (u32 base = 0; base < rows; base += blockDim.x) {
        begin_tile(args, tile, room, base, min(blockDim.x, rows - base), queries, &sticky);
    }
    pad_step(args, rows, static_cast<u32>(min(queries, static_cast<u64>(args.step_tokens))));
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) end_report(at<u32>(args.report), step, sticky, 0);
}

// A word of a piece: where it is read, and where it is written.
template <class Piece>
struct PageWord {
    const Piece* from;
    Piece* to;
};

template <class Piece>
static __device__ __forceinline__ PageWord<Piece> page_word(const PagesArgs& args, u32 number) {
    u32 piece = number / args.words, word = number % args.words;
    u32 page = piece % args.page_count;
    const PagePlane& plane = args.planes[piece / args.page_count];
    return {at<const Piece>(plane.from + args.from[page] * plane.from_stride) + word,
            at<Piece>(plane.to + args.to[page] * plane.to_stride) + word};
}

template <class Piece>
static __device__ void copy_page_words(const PagesArgs& args) {
    const u32 all = args.plane_count * args.page_count * args.words, threads = gridDim.x * blockDim.x;
    for (u32 begin = blockIdx.x * blockDim.x + threadIdx.x; begin < all; begin += IN_FLIGHT * threads) {
        Piece held[IN_FLIGHT];
        Piece* to[IN_FLIGHT];
        FOREBAY_UNROLL
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            to[i] = nullptr;
            if (begin + i * threads >= all) continue;
            PageWord<Piece> word = page_word<Piece>(args, begin + i * threads);
            held[i] = load(word.from);
            to[i] = word.to;
        }
        FOREBAY_UNROLL
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            if (to[i] != nullptr) *to[i] = held[i];
        }
    }
}

// Copies a piece of each page in each plane. Grid: any number of blocks, which divide the words.
FOREBAY_KERNEL(forebay_pages, PagesArgs, MOST_THREADS, 2) {
    after_previous();
    switch (args.word_bytes) {
        case 16: return copy_page_words<Words4>(args);
        case 8: return copy_page_words<Words2>(args);
        default: return copy_page_words<u32>(args);
    }
}
