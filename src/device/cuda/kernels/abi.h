// What host and kernels exchange: plain words, the same here and in `abi.rs`, whose sizes a test compares.
//
// Pointers are 64-bit addresses as the device sees them. `LaneHead` and the tables are those of `residency`; the step
// descriptor and the report are those of `device::descriptor`. What describes a cache (`Pools`), one of its layers or a
// micro-batch does not change once it is attached: it goes into the arguments of every kernel by value, so that no
// kernel begins by asking device memory where its tables are. Kernels of all layers at once find those in memory.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

// `residency`: the sentinels of the tables.
static const u32 ABSENT = 0;
static const u32 EMPTY = 0xFFFFFFFFu;
static const u32 FREE_STAMP = 0;
static const u32 WARMED = 1;
static const u32 UNUSED_STAMP = 0x7FFFFFFFu;
static const u32 SLOT_BLOCK = 64;

// `geometry`: the most layers that share a selection.
static const u32 GROUP_MAX = 8;

// `device::descriptor`: the device's tensor has a row's accepted count.
static const u32 ACCEPTED_ON_DEVICE = 0xFFFFFFFFu;
static const u32 STEP_HEADER = 4;   // step low, step high, rows, 0
static const u32 STEP_ENTRY = 3;    // lane, accepted, query rows
static const u32 REPORT_HEADER = 8;  // step low, step high, cause or 0, row, layer, value, moved rows, 0
static const u32 REPORT_COUNT = 3;   // hits, misses, scratch

// Beyond a lane's pages in its page table.
static const u32 NO_PAGE = 0xFFFFFFFFu;

// `device::descriptor::Cause`.
enum Cause : u32 {
    BEYOND_LENGTH = 1,
    ACCEPTED = 2,
    TABLES = 3,
    EARLIER = 4,
    NOT_GATHERED = 5,
    WAVE_NOT_GATHERED = 6,
    NOT_RESOLVED = 7,
    NOT_SCATTERED = 8,
};

// Whether a lane's steps may go on; only a join or a truncation makes it less.
enum Trust : u32 { SOUND = 0, FAILED = 1, BYTES = 2 };

// Where the room is that a resolve or a warm-up works in: all of it in device memory, the sets in shared memory, or the
// lane's blocks as well.
enum RoomAt : u32 { IN_MEMORY = 0, SETS = 1, SETS_AND_BLOCKS = 2 };

// What a report asks of a step, each query row in every layer: `device::Expected`.
static const u32 DUE_RESOLVED = 1, DUE_GATHERED = 2, DUE_SCATTERED = 4;

// The sticky word when nothing is wrong. Otherwise, so that of several errors the least is kept:
// stage (0 commit, 1 after it) << 63 | layer << 51 | batch row << 36 | cause << 32 | value.
static const u64 NOTHING_WRONG = ~0ull;

struct LaneHead {
    u32 length, landed, budget, blocks, stamp, min_stamp, next_victim, full_places;
};

// A row that a step fetches, in every layer of a group: its place among a layer's rows of the total pool, counted from
// 1, 0 where the lane has no such page.
struct Fetch {
    u64 row;
    u32 position, slot;
};

// One layer's tables and memory. The layers of a group, from layer `first` on, have the same tables; slab, rows and row
// format are each layer's own.
struct Layer {
    u64 heads;        // LaneHead [lanes]
    u64 slot_of;      // u32 [lanes][tokens]
    u64 position_of;  // u32 [budget_blocks * 64]
    u64 stamp_of;     // u32 [budget_base + budget_blocks * 64]
    u64 blocks;       // u32 [lanes][lane_blocks]
    u64 slab;         // slots of the sparse pool
    u64 rows;         // host memory: rows of the total pool
    u32 lanes, tokens, query_rows, scratch, waves, scratch_base, landing_base, budget_base, budget_blocks;
    u32 lane_blocks;
    // How rows are copied: in pieces of so many bytes (16, 8, or 4), each with a number. A row's numbers begin with the
    // line of 128 bytes that it begins in, and the next row's begin `piece_numbers` later; `line_mask` is, of a row's
    // address, the place in that line. Where this would leave out too many numbers, `line_mask` is 0, and a row has as
    // many numbers as pieces.
    u32 piece_bytes, piece_numbers, line_mask;
    u32 first, members;
    u32 runs[2];      // bytes of a row's runs, multiples of 4; the second may be 0
    u32 block_bytes;  // of 64 slots: 64 first runs, then 64 second runs, then padding
    u32 host_stride, unused;
};

// What the last resolve of a batch row missed; `Micro::fetches` has the rows.
struct List {
    u64 step;
    u32 count, scratch;   // rows, of which the first `scratch` are in scratch slots
    u32 share;            // scratch rows of a wave
    u32 lane, layer, members, first, rows;
    u32 gathered[8];  // for each of `members` layers from `layer` on, the waves that were gathered; [GROUP_MAX]
};

// What the operations of a micro-batch share.
struct Micro {
    u64 descriptor;  // u32 [words of a step descriptor]
    u64 counts;   // u32 [layers][3]: hits, misses, scratch
    u64 lengths;  // u32 [batch]
    u64 sticky;   // u64 [1]
    u64 failed;   // u32 [batch]: the lane's trust when the step began
    u64 lists;    // List [batch]
    u64 fetches;  // Fetch [batch][selected]
    u64 work;     // u32 [batch][work_words]
    u64 first;    // u32 [lanes]: 0, but while a step's lanes are checked
    u64 marks;    // u32 [batch][layers][2][words]: a bit a query row, resolved, then scattered
};

// One cache on the device. A table is of a group of layers; layers that select for themselves are groups of one. The
// room to work in of a batch row, or of a table's warm-up, is
// u32 [missed_words] (a bit a position), then [set_words] (a bit a slot of the lane), twice; in shared memory, where
// they fit, then [set_words / 2] (the lane's blocks).
struct Pools {
    u64 layers;        // Layer [layer_count]
    u64 tables;        // Layer [table_count]: the first layer of each group
    u64 pages;         // u32 [lanes][lane_pages]: host pages
    u64 trust;         // u32 [lanes]
    u64 warm_fetches;  // Fetch [table_count][top_k]
    u64 warm_work;     // u32 [table_count][work_words]
    u32 layer_count, table_count, lanes, lane_pages, batch, top_k;
    u32 selected;  // positions of a batch row's step
    u32 work_words, missed_words, set_words;
    u32 page_tokens, host_pages;
    u32 due;  // what a report asks of a step: `DUE_RESOLVED` and so on
    u32 unused;
};

// What a join, a truncation or a resize takes over, in pinned memory:
// u32 length, page_count, pages [lane_pages], budgets [tables], blocks [tables][staged_blocks].
static const u32 STAGED_PAGES = 2;

struct LoadArgs {
    Pools pools;
    Micro micro;
    u64 descriptor;  // the pinned step descriptor
    u64 heads;  // of the first layer
};

struct CommitArgs {
    Pools pools;
    Micro micro;
    u64 accepted;  // u32 [batch], or 0
};

struct ResolveArgs {
    Pools pools;
    Layer layer;
    Micro micro;
    u64 selection;  // i32 [count][row_count][top_k]
    u64 slots;      // i32 [count][row_count][top_k]
    u64 lists;      // i32 [1 + waves][lists_batch][row_count][top_k], or 0
    u64 counts;     // u32 [1 + waves][lists_batch][row_count], or 0
    u32 number;  // of the layer
    u32 first, count, row_first, row_count;
    u32 lists_batch;
    RoomAt shared;
    u32 unused;
};

struct GatherArgs {
    Pools pools;
    Layer layer;
    Micro micro;
    u32 number, first, count, row_first, row_count;
    u32 wave;
};

struct ScatterArgs {
    Pools pools;
    Layer layer;
    Micro micro;
    u32 number, first, count, row_first, row_count;
    u32 unused;
};

struct ReportArgs {
    Pools pools;
    Micro micro;
    u64 slot;   // the pinned report
    u64 moved;  // u32: rows that resizes have moved since the last report
    u32 query_rows, unused;
};

struct JoinArgs {
    Pools pools;
    u64 staged;
    u32 lane, staged_blocks;  // blocks of a table in `staged`
};

struct ResizeArgs {
    Pools pools;
    u64 staged;
    u64 moved;  // as above
    u32 lane, staged_blocks;
};

struct TruncateArgs {
    Pools pools;
    u64 staged;
    u32 lane, settle, length, unused;
};

struct LeaveArgs {
    Pools pools;
    u32 lane, unused;
};

struct WarmArgs {
    Pools pools;
    u64 selections;  // i32 [blocks][steps][top_k], or 0
    u32 lane, whole, steps;
    RoomAt shared;
    u32 first, unused;  // the table of the first block
};

struct NewestArgs {
    Pools pools;
    u64 positions;  // i32 [tables][top_k]
    u32 lane, unused;
};

struct WarmGatherArgs {
    Pools pools;
    u64 first, count;  // slots, numbered through all layers
    u32 lane, unused;
};

struct DigestArgs {
    Pools pools;
    u64 out;  // u64, zero before
    u32 lane, unused;
};

// Two pieces of mapped memory; `bytes` is a multiple of 4.
struct CopyArgs {
    u64 from, to, bytes;
};

// Lines of 128 bytes to bring into L2, from an address that is a multiple of it; and the clock's cycles of a round, in
// which each thread of all blocks asks for one.
struct PrefetchArgs {
    u64 first, lines, cycles;
};

// `device::pages`: groups of a dense cache; the words of a batch row before those of its groups; a length that only the
// device has; and the most tokens of a sequence.
static const u32 PAGE_GROUPS = 4;
static const u32 PAGE_ENTRY = 4;  // lane, length, accepted, query rows
static const u32 FROM_DEVICE = 0xFFFFFFFFu;
static const u32 MOST_TOKENS = 0x7FFFFFFFu;

// The page tables of a group.
struct PageTables {
    u64 lanes;  // u32 [lanes][columns], pinned
    u64 table;  // u32 [batch][columns]
    u64 slots;  // i32 or i64 [step_tokens]
    u32 columns, page_tokens, pages, unused;
};

struct BeginPagesArgs {
    u64 descriptor;  // pinned: as a step descriptor, but its rows are PAGE_ENTRY words and two of each group
    u64 lanes;       // u32 [lanes][2]: committed length, landed rows
    u64 accepted;    // u32 [batch], or 0
    u64 lengths, starts;  // u32 [batch], u32 [batch + 1]
    u64 positions;   // i32 or i64 [step_tokens]
    u64 report;      // the pinned report
    u32 lane_count, batch, step_tokens, wide, group_count, unused;
    PageTables tables[4];  // [PAGE_GROUPS]
};

// The memories of a piece of every page.
struct PagePlane {
    u64 from, to, from_stride, to_stride;
};

// The pieces of all planes and pages of a launch have `words` words of `word_bytes` bytes, together at most 2^31 words.
struct PagesArgs {
    PagePlane planes[32];
    u32 from[376], to[376];  // pages
    u32 plane_count, page_count, words, word_bytes;
};

// What tools have multiplied: pairs of panels, each of so many steps of 16 columns of one and rows of the other.
static const u32 WORK_PANELS = 16;
static const u32 WORK_STEPS = 8;

struct WorkArgs {
    u64 operands, results;  // bf16 [WORK_PANELS][WORK_STEPS][2][4][2][32][8], f32 [WORK_PANELS][512][4]
    u32 panels, unused;     // of the launch, at most 2^31
};

static_assert(sizeof(LaneHead) == 32, "residency's own");
static_assert(sizeof(Layer) == 136 && sizeof(List) == 72 && sizeof(Fetch) == 16, "abi.rs");
static_assert(sizeof(Micro) == 80 && sizeof(Pools) == 104, "abi.rs");
static_assert(sizeof(LoadArgs) == 200 && sizeof(CommitArgs) == 192 && sizeof(ResolveArgs) == 384, "abi.rs");
static_assert(sizeof(GatherArgs) == 344 && sizeof(ScatterArgs) == 344 && sizeof(ReportArgs) == 208, "abi.rs");
static_assert(sizeof(JoinArgs) == 120 && sizeof(TruncateArgs) == 128 && sizeof(LeaveArgs) == 112, "abi.rs");
static_assert(sizeof(WarmArgs) == 136 && sizeof(WarmGatherArgs) == 128 && sizeof(DigestArgs) == 120, "abi.rs");
static_assert(sizeof(ResizeArgs) == 128 && sizeof(NewestArgs) == 120, "abi.rs");
static_assert(sizeof(PageTables) == 40 && sizeof(BeginPagesArgs) == 240, "abi.rs");
static_assert(sizeof(PagePlane) == 32 && sizeof(PagesArgs) == 4048, "abi.rs");
static_assert(sizeof(CopyArgs) == 24 && sizeof(PrefetchArgs) == 24 && sizeof(WorkArgs) == 24, "abi.rs");
