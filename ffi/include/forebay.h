/* forebay: the KV and latent cache of large-language-model serving.
 *
 * Generated from ffi/src; do not edit. docs/versions.md says what its version promises.
 *
 * Needs       Linux 4.14 or later, where memory can be had that a fork wipes (MADV_WIPEONFORK): without it every
 *             creation answers FB_OS_REFUSED.
 * Status      Every fallible call answers an fb_status: FB_OK is 0, the others are the library's kinds of
 *             error. A NULL that is not allowed is FB_INVALID_CONFIG. A panic inside the library is
 *             FB_INTERNAL; the object then answers nothing else, and its destruction gives its memory up.
 * Answers     Out-parameters are written on FB_OK only, reasons of a failed creation on failure only.
 *             fb_retire's step is the exception: it is set to 0 whenever the step has ended. They overlap neither
 *             each other nor what the call reads. A list of length 0 may be NULL everywhere.
 * Handles     What has a create (or another call that gives it) has a destroy. A handle is a token that is looked
 *             up, never followed: NULL, a handle of another kind, or no handle at all is FB_INVALID_CONFIG, one that
 *             was destroyed FB_CLOSED, and the library touches nothing. At most 65,536 are there at a time.
 *             A sequence is a number and a step an fb_step; 0 is none of either. One that was closed or retired, or
 *             never given, or another cache's, is FB_CLOSED.
 * Text        fb_error_text copies the text of the last call that failed on an object: what, where, with which
 *             numbers, what to do. A creation that fails writes it to its own `text`.
 * Threads     Calls on one object through a const pointer may run at the same time. A call through a pointer
 *             without const must be alone: beside another call on that object, also one from a callback, it answers
 *             FB_BUSY and has done nothing; so does a const call beside it. Beside const calls alone it waits for a
 *             moment, under a millisecond: a thread that reads fb_cache_stats gets FB_BUSY now and then, and does not
 *             refuse the decode thread its fb_layer; long ones (fb_cache_validate, fb_digest) belong between its
 *             calls. This FB_BUSY leaves no text: fb_error_text then still has an older failure's.
 *             Who keeps to one thread a cache never sees it, and FB_BUSY is of the work in flight.
 *             Objects are independent of each other.
 *             A callback, also fb_stream_call's work, neither throws nor jumps out.
 * Fork        In a forked child every handle of the parent's is FB_CLOSED, and what the child creates is its own.
 *             A call whose callback forks is FB_CLOSED in the child, whatever the callback answers there. In the
 *             parent nothing changes.
 * Structs     A struct that begins with `size` is set to zero, then `size` to its sizeof. The library
 *             takes the size of an older header, reading what is missing as 0; it takes a larger size if
 *             what it does not know is 0. Of a struct that it fills it writes what both sides know, and
 *             zeroes the rest.
 * Streams     A stream is the engine's own, as `void *`. On CUDA it is a CUstream that fb_stream_borrow made known
 *             (NULL: the legacy stream), or one of fb_stream_create's; on a host device one of fb_stream_create's,
 *             or NULL for the first. Any other is FB_OUT_OF_RANGE. Calls enqueue and return; those that wait for
 *             the device are fb_stream_wait, fb_stream_return and fb_device_destroy, and for tests fb_digest and
 *             fb_cache_validate. On FB_DEVICE_HOST_THREADS a stream holds 4096 operations: who enqueues more waits
 *             until one has run. Streams run beside each other but for fb_stream_order.
 * Memory      Buffers stay the caller's. What a cache takes is its device's until fb_device_destroy. The library
 *             reads no environment variable, installs no signal handler, and writes to no log; only a panic shows
 *             on standard error.
 */

#ifndef FB_FOREBAY_H
#define FB_FOREBAY_H

#include <stddef.h>
#include <stdint.h>

// Version of this header's interface, see docs/versions.md.
#define FB_ABI_VERSION 1

// Host memory; what is enqueued runs in the call that enqueues it.
#define FB_DEVICE_HOST 0

// Host memory; each stream is a thread.
#define FB_DEVICE_HOST_THREADS 1

// An NVIDIA GPU, through its driver.
#define FB_DEVICE_CUDA 2

// Rows in the system's memory, registered with the driver.
#define FB_HOST_MEMORY_REGISTERED 0

// Rows in memory that the driver makes, on a NUMA node of the host: with a driver of CUDA 12.2 or newer.
#define FB_HOST_MEMORY_DRIVER 1

// The total pool does without huge pages.
#define FB_MEMORY_SMALL_PAGES 1

// The total pool's pages become resident when they are first written.
#define FB_MEMORY_LAZY 2

// The total pool is not locked.
#define FB_MEMORY_UNLOCKED 4

// More is taken of the machine's memory than it says that it has: without this, FB_OUT_OF_MEMORY with both numbers.
#define FB_MEMORY_OVERCOMMIT 8

// Every row is brought up when the sequence joins, if they all fit its slots.
#define FB_BRING_UP_WHOLE 0

// Nothing is brought up.
#define FB_BRING_UP_NOTHING 1

// Nothing hides the gather: attention waits for it.
#define FB_OVERLAP_NONE 0

// Preparation and attention over what was resident hide it.
#define FB_OVERLAP_DA 1

// These, and the indexer of the second half of the batch.
#define FB_OVERLAP_DBA 2

// In fb_step_range and fb_overlap: all query rows of the step; a draft layer's pass is its number + 1.
#define FB_ALL_QUERY_ROWS 0

// I0: the projections that the indexer needs, and the write of the index keys.
#define FB_WORK_PROJECT 0

// I: logits and top-k of the call's batch rows, which write their selection.
#define FB_WORK_INDEX 1

// P: the preparation of attention, which writes the new rows to their landing slots.
#define FB_WORK_PREPARE 2

// A: attention over some of the selected rows: see `keys`.
#define FB_WORK_ATTEND 3

// M: merges attention's parts by their log-sum-exp. Only where attention ran in parts.
#define FB_WORK_MERGE 4

// What follows attention: output projection, experts, communication.
#define FB_WORK_REST 5

// Of FB_WORK_ATTEND: all rows, the slots of the answer.
#define FB_KEYS_ALL 0

// What was resident or is born in this step: list 0.
#define FB_KEYS_RESIDENT 1

// What an attention pass fetched: list 1 + attention_wave.
#define FB_KEYS_FETCHED 2

// All rows of the whole batch fit on the device: offload moves bytes and buys nothing.
#define FB_NOTE_ALL_RESIDENT 1

// Dense attention reads every row in every step: nothing can be left in host memory.
#define FB_NOTE_DENSE 2

// So few slots a sequence and layer that many misses are to be expected.
#define FB_NOTE_FEW_SLOTS 4

// Fewer slots than a step selects: what is beyond stands in scratch slots.
#define FB_NOTE_SCRATCH 8

// Host memory, not the GPU's, ends the batch.
#define FB_NOTE_HOST_BOUND 16

// Even the most sequences are no more than fit with all rows resident.
#define FB_NOTE_NO_ROOM 32

// In fb_selections_text: a short name of the recording.
#define FB_SELECTIONS_LABEL 0

// In fb_selections_text: the model that was run.
#define FB_SELECTIONS_MODEL 1

// In fb_selections_text: its architecture.
#define FB_SELECTIONS_ARCH 2

// In fb_selections_text: what the selector ranked positions by.
#define FB_SELECTIONS_SCORE 3

// In fb_selections_text: how the steps came about.
#define FB_SELECTIONS_MODE 4

// In fb_selections_text: which text the model read.
#define FB_SELECTIONS_TEXT 5

// In fb_batch_row: the accepted rows stand in the step's tensor on the device.
#define FB_ACCEPTED_ON_DEVICE UINT32_MAX

// The work has not ended.
#define FB_TICKET_PENDING 0

// It is done: only this makes its bytes valid.
#define FB_TICKET_DONE 1

// It failed.
#define FB_TICKET_FAILED 2

// It never ran: its device is gone.
#define FB_TICKET_CANCELLED 3

// How a call ended.
enum fb_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Done; the out-parameters are written.
    FB_OK = 0,
    // A declared value or a pointer makes no sense, alone or beside another.
    FB_INVALID_CONFIG = 1,
    // A size or product does not fit its type.
    FB_OVERFLOW = 2,
    // The operating system or the device has no more memory.
    FB_OUT_OF_MEMORY = 3,
    // The operating system refused a call.
    FB_OS_REFUSED = 4,
    // A pool sized at creation has too little left.
    FB_EXHAUSTED = 5,
    // The thing is in use by work in flight, or by another call; ask again when that has ended.
    FB_BUSY = 6,
    // The sequence, step or object has ended, or the handle never named one.
    FB_CLOSED = 7,
    // A position, layer, slot or count lies outside what was declared.
    FB_OUT_OF_RANGE = 8,
    // The device failed, or a step's selections were wrong: do not publish its tokens.
    FB_DEVICE_FAILED = 9,
    // A file is not what its format demands.
    FB_BAD_FORMAT = 10,
    // A version that this build does not read.
    FB_BAD_VERSION = 11,
    // Reading or writing a file failed.
    FB_IO = 12,
    // The work was cancelled before it ended.
    FB_CANCELLED = 13,
    // The library broke one of its own rules; always a defect of forebay.
    FB_INTERNAL = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum fb_status fb_status;
#else
typedef uint32_t fb_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A cache of one model on one device.
typedef struct fb_cache fb_cache;

// The layers of a bucket, captured.
typedef struct fb_captured fb_captured;

// A chooser of tables.
typedef struct fb_chooser fb_chooser;

// A device: memory, streams, and what runs on them.
typedef struct fb_device fb_device;

// A request trace under way.
typedef struct fb_requests fb_requests;

// A selection trace in memory.
typedef struct fb_selections fb_selections;

// The end of work that the library enqueued: a warm-up, a fork's copy, a roll-back.
typedef struct fb_ticket fb_ticket;

// A recording under way.
typedef struct fb_trace fb_trace;

// How a device is made. What is optional and 0 gets its default.
typedef struct fb_device_config {
    // sizeof(fb_device_config).
    size_t size;
    // FB_DEVICE_HOST, FB_DEVICE_HOST_THREADS or FB_DEVICE_CUDA.
    uint32_t kind;
    // Optional, CUDA: the device's number, as the driver counts.
    uint32_t number;
    // Optional, CUDA: the driver's library, by path or name, in UTF-8; libcuda.so.1.
    const char *library;
    // Optional, host: bytes of device memory that may be taken; as many as the machine has.
    uint64_t memory;
    // Optional, CUDA: thread blocks of a gather, a bound on the multiprocessors that it takes; 4.
    uint32_t gather_blocks;
    // Optional, CUDA: threads of a block, a multiple of 32 up to 512; 512.
    uint32_t threads;
    // Optional, CUDA: whose memory rows stand in, an FB_HOST_MEMORY_ constant; FB_HOST_MEMORY_REGISTERED.
    uint32_t host_memory;
    // 0.
    uint32_t reserved;
} fb_device_config;

// What runs in a stream's order on the host: see fb_stream_call.
typedef void (*fb_work)(void *data);

// What a cache is made of. What is optional and 0 gets its default.
typedef struct fb_cache_config {
    // sizeof(fb_cache_config).
    size_t size;
    // Layers that every decode step passes once.
    uint32_t layers;
    // Further layers that draft tokens.
    uint32_t draft_layers;
    // Bytes of one index key on the device; 0 when the model has no indexer.
    uint32_t index_key_bytes;
    // Bytes of a row's runs; the second is 0 for rows in one run. Multiples of 4.
    uint32_t row_bytes[2];
    // Tokens of a page: a power of two from 16 to 1024.
    uint32_t page_tokens;
    // Positions that one query row selects in one layer.
    uint32_t top_k;
    // Sequences that may be open.
    uint32_t lanes;
    // Tokens of the longest sequence: prompt and promised.
    uint32_t max_tokens;
    // Slots of one sequence in each layer.
    uint32_t slots;
    // Query rows that a sequence may have in a step: 1 + drafts.
    uint32_t query_rows;
    // Optional: bytes from one row to the next in host memory; the next multiple of 64.
    uint32_t host_stride;
    // Optional: a device block of 64 slots is padded to a multiple of this; none.
    uint32_t device_block_align;
    // Optional: pages of the total pool; enough for every lane.
    uint32_t host_pages;
    // Optional: pages of index keys; enough for every lane.
    uint32_t index_pages;
    // Optional: slots of each layer's pool, all sequences; enough for every lane.
    uint32_t pool_slots;
    // Optional: the fewest slots a sequence may have in a layer; as `slots`.
    uint32_t min_budget;
    // Optional: rows of a batch; as `lanes`.
    uint32_t batch;
    // Optional: steps of one sequence that may be in flight; 2.
    uint32_t steps_in_flight;
    // Optional: micro-batches whose steps may be open at the same time; 1.
    uint32_t micro_batches;
    // Optional: FB_MEMORY_ flags; huge pages, resident, locked, as far as they can be had.
    uint32_t memory;
    // Optional: passes of attention that take the scratch slots in turn, so that a lane needs only so large a share
    // of them; 1. With more, attention must run in parts (fb_overlap).
    uint32_t attention_waves;
    // Optional: the number of the NUMA node for the total pool, plus 1; any.
    uint32_t numa_node;
    // Optional: 1 for rows without bytes, so that nothing is gathered: for replays. The total pool takes addresses
    // alone then, whatever `memory` asks for; on a CUDA device, which pins it, all of it.
    uint32_t residency_only;
    // Optional: slots of each layer's pool, all sequences, draft layers included; as pool_slots, not beside it.
    const uint32_t *slots_by_layer;
} fb_cache_config;

// Bytes that a cache takes, by what they are for.
typedef struct fb_cache_footprint {
    // sizeof(fb_cache_footprint), set by the caller.
    size_t size;
    // Device: index keys of every page, all layers.
    uint64_t index_keys;
    // Device: the blocks of slots that budgets are made of, all layers.
    uint64_t slots;
    // Device: landing slots, all layers, in whole blocks.
    uint64_t landing;
    // Device: scratch slots, once for all layers.
    uint64_t scratch;
    // Device: what whole mappings of 2 MiB leave unused.
    uint64_t padding;
    // Device: residency tables, lanes' page tables, lists of fetches and step descriptors.
    uint64_t tables;
    // Host: the rows of the total pool.
    uint64_t rows;
    // Host: the pinned ring of step descriptors and reports; and what a GPU's joins and roll-backs are staged in.
    uint64_t step_descriptors;
    // Device: a GPU's own page tables of the host memory that it reaches, of memory that is registered: 8 bytes for 4
    // KiB.
    uint64_t host_page_tables;
} fb_cache_footprint;

// What a cache has and does. Gauges describe now, counters only grow.
typedef struct fb_stats {
    // sizeof(fb_stats), set by the caller.
    size_t size;
    // Gauge: sequences that are open, or closed while work that names them is in flight.
    uint32_t sequences;
    // Gauge: steps between prepare and retire.
    uint32_t steps_in_flight;
    // Gauge: free pages of the total pool; unused_pages are not among them.
    uint32_t free_host_pages;
    // Gauge: free pages of index keys.
    uint32_t free_index_pages;
    // Gauge: shared pages, of rows and of index keys, that no sequence uses: admission can take them too.
    uint32_t unused_pages;
    // Gauge: free slots of the layer that has the fewest.
    uint32_t free_slots;
    // Gauge: free lanes.
    uint32_t free_lanes;
    // 0.
    uint32_t reserved;
    // Counter: steps retired.
    uint64_t steps;
    // Counter: distinct selected rows that were resident, all layers.
    uint64_t hits;
    // Counter: rows fetched, all layers.
    uint64_t misses;
    // Counter: of these, rows in scratch slots.
    uint64_t scratch;
    // Counter: bytes of rows that misses asked for, host to device.
    uint64_t bytes_up;
    // Counter: prompt tokens that were looked up for sharing.
    uint64_t prompt_tokens;
    // Counter: of these, tokens in pages that were taken over.
    uint64_t shared_tokens;
    // Counter: pages that were published for others to find.
    uint64_t published_pages;
    // Counter: of these, pages that went to make room.
    uint64_t evicted_pages;
} fb_stats;

// What a cache is: what it was declared with and what follows from that. It does not change.
typedef struct fb_info {
    // sizeof(fb_info), set by the caller.
    size_t size;
    // Layers, draft layers included.
    uint32_t layers;
    // Of these, layers that draft tokens: the last ones.
    uint32_t draft_layers;
    // Bytes of a row, both runs, as fb_append takes it.
    uint32_t row_bytes;
    // Bytes of the first run.
    uint32_t first_run_bytes;
    // Bytes from one row to the next in host memory.
    uint32_t host_stride;
    // Bytes of a block of 64 slots in a slab, padding included.
    uint32_t block_bytes;
    // Bytes of one index key; 0 without.
    uint32_t index_key_bytes;
    // Tokens of a page.
    uint32_t page_tokens;
    // Positions that one query row selects in one layer.
    uint32_t top_k;
    // Sequences that may be open.
    uint32_t lanes;
    // Tokens of the longest sequence: prompt and promised.
    uint32_t max_tokens;
    // Rows of a batch.
    uint32_t batch;
    // Query rows that a sequence may have in a step.
    uint32_t query_rows;
    // Steps of one sequence that may be in flight.
    uint32_t steps_in_flight;
    // Micro-batches whose steps may be open at the same time.
    uint32_t micro_batches;
    // Passes of attention over what a step fetches, where attention runs in parts: what index lists are made for.
    uint32_t attention_waves;
    // The fewest slots that a sequence may have in a layer.
    uint32_t min_budget;
    // Pages of the total pool.
    uint32_t host_pages;
    // Pages of index keys.
    uint32_t index_pages;
    // 1 if rows have no bytes.
    uint32_t residency_only;
} fb_info;

// What a sequence asks for. What is optional and 0 gets its default.
typedef struct fb_open_config {
    // sizeof(fb_open_config).
    size_t size;
    // Tokens of the prompt.
    uint32_t prompt;
    // Tokens that it may decode.
    uint32_t promised;
    // Optional: slots in each layer; the cache's min_budget. Not beside a ratio.
    uint32_t slots;
    // Optional: FB_BRING_UP_WHOLE or FB_BRING_UP_NOTHING.
    uint32_t bring_up;
    // Optional: slots in each layer as a share of prompt and promised tokens, above 0 and at most 1.
    double ratio;
    // Optional: slots by layer, draft layers included. Not beside slots or a ratio.
    const uint32_t *slots_by_layer;
} fb_open_config;

// How a sequence enters its lane.
typedef struct fb_warm_up {
    // sizeof(fb_warm_up).
    size_t size;
    // Optional: on the device, what the last prompt positions selected, oldest first: token positions, -1 for none,
    // `[layers, draft layers included][steps][top_k]`.
    const int32_t *selections;
    // Optional: how many of them; 0 without selections.
    uint32_t steps;
    // 0.
    uint32_t reserved;
    // Optional: the most bytes of rows that one call gathers, fb_join_more the rest; no bound.
    uint64_t bytes_a_call;
} fb_warm_up;

// How long a sequence is.
typedef struct fb_sequence_length {
    // sizeof(fb_sequence_length), set by the caller.
    size_t size;
    // Committed tokens, as far as retired steps and work that the library enqueued tell.
    uint32_t committed;
    // Rows that the last retired step wrote behind them, to be accepted or rejected.
    uint32_t landed;
    // Tokens in published pages: what fb_publish goes on behind.
    uint32_t published;
    // 1 if it has joined and may take part in steps, otherwise 0.
    uint32_t running;
} fb_sequence_length;

// A page of a sequence. It never grows.
typedef struct fb_page {
    // Its page of rows in the total pool.
    uint32_t host;
    // Its page of index keys, in every layer's array of fb_index_keys: an entry of a block table.
    uint32_t index_keys;
} fb_page;

// A page's key of the caller's, or none. It never grows.
typedef struct fb_key {
    // 1 if there is a key, 0 if not.
    uint32_t is_set;
    // The key.
    uint8_t bytes[16];
} fb_key;

// What pages hold, so that they can be found again.
typedef struct fb_tokens {
    // sizeof(fb_tokens).
    size_t size;
    // Token ids, from the beginning of a page. A rest that fills no page is passed over. NULL if there are none.
    const uint32_t *ids;
    // How many.
    uint32_t count;
    // Optional: how many keys: one for each full page among the ids, or none.
    uint32_t key_count;
    // Optional: keys of the caller's, for what ids do not say: which image they stand for, for example. Pages are one
    // only if keys and ids are the same, and so is all that stands before them.
    const struct fb_key *keys;
} fb_tokens;

// Where the layers of a step are enqueued and what they share. Streams may be the same one; the buffers are as in
// fb_buffers, made for `batch` rows and the step's query rows.
typedef struct fb_overlap_config {
    // sizeof(fb_overlap_config), of all in an array the same.
    size_t size;
    // The engine's work: the stream that the step was prepared on.
    void *compute;
    // The resolve, where it runs beside the preparation.
    void *resolve;
    // The gather.
    void *gather;
    // The scatter.
    void *scatter;
    // The selection, which the engine's top-k writes.
    const int32_t *selection;
    // The answer.
    int32_t *slots;
    // Index lists; NULL where every layer runs in the order none and in one attention pass.
    int32_t *lists;
    // Their counts; NULL without lists.
    uint32_t *counts;
    // Batch rows of a list; 0 without lists.
    uint32_t lists_batch;
    // Batch rows that are enqueued, at least the step's: those of the bucket in a capture, whose other rows are
    // inert. Optional but in a capture: the step's.
    uint32_t batch;
    // Optional: the first batch row of DBA's second half; it has one half.
    uint32_t half;
    // In a capture: the micro-batch. Otherwise 0: a step has its own.
    uint32_t micro_batch;
} fb_overlap_config;

// What to capture.
typedef struct fb_capture_config {
    // sizeof(fb_capture_config).
    size_t size;
    // The micro-batches whose steps run in one graph: their streams, the batch rows of the bucket, their buffers.
    const struct fb_overlap_config *micro_batches;
    // FB_OVERLAP_ orders of every layer, draft layers last.
    const uint32_t *by_layer;
    // How many micro-batches.
    uint32_t count;
    // Query rows of the steps.
    uint32_t query_rows;
    // Optional: passes of the draft layers.
    uint32_t draft_passes;
    // 0.
    uint32_t reserved;
} fb_capture_config;

// One call of the engine.
typedef struct fb_engine_call {
    // sizeof(fb_engine_call) of the library: an older caller reads what it knows.
    size_t size;
    // FB_WORK_ something: what to enqueue.
    uint32_t work;
    // Of FB_WORK_ATTEND: FB_KEYS_ something.
    uint32_t keys;
    // Of FB_KEYS_FETCHED: which pass fetched them, from 0.
    uint32_t attention_wave;
    // For which micro-batch.
    uint32_t micro_batch;
    // In which layer.
    uint32_t layer;
    // The first batch row,
    uint32_t first;
    // and how many: half of the batch for the parts of DBA's indexer, else all.
    uint32_t count;
    // The first query row of each batch row,
    uint32_t first_query_row;
    // and how many: 1 in a draft layer's pass.
    uint32_t query_rows;
    // 0.
    uint32_t reserved;
} fb_engine_call;

// Enqueues the work of `call` on `stream`, which is the compute stream of its micro-batch; what it forks to other
// streams it joins again before it returns. 0 is success; an fb_status other than 0 abandons the step. Calls on the
// cache are FB_BUSY meanwhile, also const ones: ask fb_landing_slot, fb_slab, fb_index_keys and fb_pages before.
typedef uint32_t (*fb_enqueue)(void *data, const struct fb_engine_call *call, void *stream);

// The engine's side of the layers.
typedef struct fb_engine {
    // sizeof(fb_engine).
    size_t size;
    // Called for each of the engine's works, in the order of the enqueueing.
    fb_enqueue enqueue;
    // What it is called with.
    void *data;
} fb_engine;

// A step between prepare and retire: its number in its cache, never given twice; 0 is none.
typedef uint64_t fb_step;

// A table of orders. It never grows.
typedef struct fb_table {
    // Rises whenever the orders change.
    uint32_t version;
    // Layers, draft layers included.
    uint32_t layers;
    // FB_OVERLAP_ orders, one a layer, draft layers last.
    const uint32_t *orders;
} fb_table;

// What orders cost: nanoseconds that each exposes a layer, by misses a batch row. It never grows.
typedef struct fb_prices {
    // Counts of misses a batch row, ascending from 0.
    const double *misses;
    // How many.
    uint32_t miss_count;
    // Layers that are priced: all of them, or 1 for all alike.
    uint32_t layers;
    // Nanoseconds, `[layers][none, DA, DBA][miss_count]`, finite and not negative.
    const double *exposed;
} fb_prices;

// A captured batch size. It never grows.
typedef struct fb_bucket {
    // Batch rows that it was captured for.
    uint32_t batch;
    // Tables captured at the start.
    uint32_t table_count;
    // These; the first one is used first.
    const struct fb_table *tables;
    // What orders cost at this size.
    struct fb_prices prices;
} fb_bucket;

// When a chooser moves to another table.
typedef struct fb_hysteresis {
    // sizeof(fb_hysteresis).
    size_t size;
    // The weight of a new step's misses against what was known before, above 0 and at most 1.
    double smoothing;
    // Another table must save this share of the exposed time, 0 to 1,
    double share;
    // and so many nanoseconds a step,
    double least_ns;
    // in so many steps, one behind the other; at least 1.
    uint32_t steps;
    // 0.
    uint32_t reserved;
} fb_hysteresis;

// What a chooser chooses among.
typedef struct fb_chooser_config {
    // sizeof(fb_chooser_config).
    size_t size;
    // The captured batch sizes, ascending.
    const struct fb_bucket *buckets;
    // How many.
    uint32_t bucket_count;
    // Tables of one bucket that may be captured at the same time.
    uint32_t tables_max;
    // Optional: when it moves; a tenth and 50 us saved, in 32 steps.
    const struct fb_hysteresis *hysteresis;
} fb_chooser_config;

// Hits and misses of one layer in one step, all rows of the batch. It never grows.
typedef struct fb_layer_count {
    // Distinct selected rows that were resident.
    uint32_t hits;
    // Rows fetched.
    uint32_t misses;
    // Of these, rows in scratch slots.
    uint32_t scratch;
} fb_layer_count;

// What the next step is to run.
typedef struct fb_choice {
    // sizeof(fb_choice), set by the caller.
    size_t size;
    // Which bucket.
    uint32_t bucket;
    // Which of its tables: see fb_chooser_table.
    uint32_t index;
    // The table's version.
    uint32_t version;
    // 1 when this call has changed the table: it must be captured before it is used.
    uint32_t changed;
} fb_choice;

// Which part of a step's layer a call works on.
typedef struct fb_step_range {
    // sizeof(fb_step_range).
    size_t size;
    // The layer.
    uint32_t layer;
    // Optional: the first batch row,
    uint32_t first;
    // Optional: and how many; all from the first on.
    uint32_t count;
    // Optional: FB_ALL_QUERY_ROWS, or a draft layer's pass + 1: its one query row.
    uint32_t pass;
} fb_step_range;

// Where a call finds the selection and puts the slots, on the device. Buffers must not overlap.
typedef struct fb_buffers {
    // sizeof(fb_buffers).
    size_t size;
    // Token positions, -1 for none: `[batch rows][query rows][top_k]` of the call's part.
    const int32_t *selection;
    // Of the same shape, receives their slots in the layer's slab, -1 for none.
    int32_t *slots;
    // Optional: the slots again as the index lists of attention in parts,
    // `[1 + attention_waves][batch][query rows][top_k]`: what was resident, then what each pass fetches.
    int32_t *lists;
    // How many entries of each list are valid, `[1 + attention_waves][batch][query rows]`; NULL without lists.
    uint32_t *counts;
    // Batch rows of a list, at least the step's; 0 without lists.
    uint32_t batch;
    // 0.
    uint32_t reserved;
} fb_buffers;

// What a plan is asked for. Bytes are of one GPU, and of its share of the host's memory. What is optional and 0
// gets its default.
typedef struct fb_plan_config {
    // sizeof(fb_plan_config).
    size_t size;
    // The model's fields are read and no others: see fb_preset.
    const struct fb_cache_config *model;
    // Bytes of the GPU's memory.
    uint64_t gpu;
    // Tokens of a sequence at its end, prompt and promised.
    uint32_t context;
    // Optional: sequences that share the GPU; as many as fit.
    uint32_t batch;
    // Optional: slots as a share of the context, above 0 and at most 1; the largest that fits, or, with as many
    // sequences as fit, the one that leaves `least_slots`.
    double ratio;
    // Optional: bytes of weights on it; none.
    uint64_t weights;
    // Optional: bytes of activations; none.
    uint64_t activations;
    // Optional: bytes of whatever else the engine takes; none.
    uint64_t workspace;
    // Optional: bytes of host memory for the total pool; as many as it takes.
    uint64_t host;
    // Optional: bytes of the device's mappings; 2 MiB.
    uint64_t grain;
    // Optional: tokens of the longest sequence that the model was made for; not checked.
    uint32_t longest;
    // Optional: query rows of a step; 1.
    uint32_t query_rows;
    // Optional: steps of one sequence that may be in flight; 2.
    uint32_t steps_in_flight;
    // Optional: micro-batches that the batch is divided into; 1.
    uint32_t micro_batches;
    // Optional: the fewest slots that a sequence is left with when as many as possible are wanted; 6400.
    uint32_t least_slots;
    // Optional: 1 leaves residency tables, and the GPU's page tables of host memory, out of what has to fit; they are
    // reported all the same.
    uint32_t tables_beside;
} fb_plan_config;

// A plan.
typedef struct fb_planned {
    // sizeof(fb_planned), set by the caller.
    size_t size;
    // Sequences.
    uint32_t batch;
    // Slots of each in each layer.
    uint32_t slots;
    // Slots as a share of the context.
    double ratio;
    // 1 where rows stand in host memory; 0 where all of them stay on the device.
    uint32_t offloads;
    // FB_NOTE_ bits: what a reader should know.
    uint32_t notes;
    // The most sequences with all rows on the device.
    uint32_t resident_batch;
    // The most sequences with `least_slots` slots each; `resident_batch` if that is more.
    uint32_t most_batch;
    // Bytes of the GPU that weights, activations and workspace leave.
    uint64_t available;
    // The most live tokens that index keys leave room for, whatever the ratio; 0 for a model without them.
    uint64_t live_tokens;
    // Bytes on the device: index keys,
    uint64_t index_key_bytes;
    // the slots that budgets are made of,
    uint64_t slot_bytes;
    // landing slots,
    uint64_t landing_bytes;
    // scratch slots,
    uint64_t scratch_bytes;
    // what whole mappings leave unused,
    uint64_t padding_bytes;
    // and residency tables, page tables, lists of fetches and step descriptors.
    uint64_t table_bytes;
    // Bytes of pinned host memory: rows,
    uint64_t row_bytes;
    // and step descriptors.
    uint64_t step_block_bytes;
    // What fb_cache_config takes, 0 without offload: pages of the total pool,
    uint32_t host_pages;
    // pages of index keys,
    uint32_t index_pages;
    // slots of each layer's pool,
    uint32_t pool_slots;
    // and rows of a batch: of one micro-batch.
    uint32_t batch_rows;
    // Bytes on the device of the GPU's own page tables: what the driver takes for it to reach pinned host memory.
    uint64_t host_page_table_bytes;
} fb_planned;

// A request as it arrived.
typedef struct fb_arrival {
    // sizeof(fb_arrival).
    size_t size;
    // When, in milliseconds since the recording's start.
    uint64_t milliseconds;
    // Tokens of the prompt.
    uint32_t input_tokens;
    // Tokens generated; 0 where that is not known when the request is recorded.
    uint32_t output_tokens;
    // Ids of the prompt's blocks from its beginning, the last block perhaps partial. An id names the block and all
    // before it.
    const uint64_t *blocks;
    // How many.
    size_t block_count;
} fb_arrival;

// What a trace says about itself, in numbers.
typedef struct fb_trace_header {
    // sizeof(fb_trace_header), set by the caller.
    size_t size;
    // Recorded layers.
    uint32_t layers;
    // Positions that one query selects; fewer while the context is shorter.
    uint32_t k;
    // Recorded positions, those of the prompt included.
    uint32_t steps;
    // How many of the first steps belong to the prompt.
    uint32_t warm_steps;
    // Position of the query of step 0.
    uint32_t first_position;
    // Position of the first decode step.
    uint32_t decode_start;
    // Tokens of the context.
    uint32_t context;
    // 1 for a recording that was not finished.
    uint32_t unfinished;
    // Of such a one: bytes behind its last whole group, which were left off.
    uint64_t left_off_bytes;
    // All selected positions together, in every step and layer.
    uint64_t members;
} fb_trace_header;

// A row of a step's batch. It never grows.
typedef struct fb_batch_row {
    // The sequence.
    uint64_t sequence;
    // Rows of its previous step that were accepted, or FB_ACCEPTED_ON_DEVICE; 0 before its first step.
    uint32_t accepted;
    // Its query rows in this step, at most the step's.
    uint32_t query_rows;
} fb_batch_row;

// What a step decodes.
typedef struct fb_step_config {
    // sizeof(fb_step_config).
    size_t size;
    // The rows of the batch; read before the call returns.
    const struct fb_batch_row *rows;
    // How many.
    uint32_t row_count;
    // Query rows of each: the width of the step.
    uint32_t query_rows;
    // Optional: accepted rows, one uint32_t for each of the cache's `batch` rows, on the device; read in
    // the stream's order.
    const uint32_t *accepted;
    // Optional: the micro-batch.
    uint32_t micro_batch;
    // 0.
    uint32_t reserved;
} fb_step_config;

// What a step has done.
typedef struct fb_retired {
    // sizeof(fb_retired), set by the caller.
    size_t size;
    // Which step of its cache it was, from 1.
    uint64_t step;
    // Distinct selected rows that were resident, all layers.
    uint64_t hits;
    // Rows fetched, all layers.
    uint64_t misses;
} fb_retired;

// What a recording says about itself, and when its groups are written. What is optional and 0 or NULL gets its
// default; texts are UTF-8, and are shown and nothing else.
typedef struct fb_trace_config {
    // sizeof(fb_trace_config).
    size_t size;
    // Recorded layers.
    uint32_t layers;
    // Positions that one query selects; fewer while the context is shorter.
    uint32_t k;
    // Position of the query of the first recorded step.
    uint32_t first_position;
    // Position of the first decode step: the steps before it are of the prompt.
    uint32_t decode_start;
    // Optional: tokens of the longest context; what was recorded.
    uint32_t context;
    // Optional: steps of a group at most; 64.
    uint32_t group_steps;
    // Optional: a group is written by the step that brings it to so many bytes; 262144.
    uint32_t group_bytes;
    // 0.
    uint32_t reserved;
    // Optional: the model's own numbers of the recorded layers, `layers` of them, ascending; 0, 1, 2 and so on.
    const uint32_t *layer_ids;
    // Optional: for each layer the place, from 0, of the layer whose sets it shares, its own where it has sets;
    // every layer has its own.
    const uint32_t *shares;
    // Optional: a short name of the recording.
    const char *label;
    // Optional: the model that runs.
    const char *model;
    // Optional: its architecture.
    const char *arch;
    // Optional: what the selector ranks positions by.
    const char *score;
    // Optional: how the steps come about.
    const char *mode;
    // Optional: which text the model reads.
    const char *text;
} fb_trace_config;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the loaded library's interface: compare it with FB_ABI_VERSION before anything else.
uint32_t fb_abi_version(void);

// A status in words. The text is constant; any number is allowed.
const char *fb_status_text(uint32_t status);

// The version of the library itself, as text: "0.1.0". Constant.
const char *fb_version(void);

// Copies the text of the last call that failed inside the object of a handle, of any kind: what, where, with which
// numbers, what to do. Empty before the first. Cut to `text_bytes` bytes with its ending zero; 512 hold any. A call
// that answers FB_CLOSED or FB_BUSY for the handle itself, or a null, leaves no text.
//
// Requires:
// `text` is NULL, or has `text_bytes` bytes.
fb_status fb_error_text(const void *handle,
                        char *text,
                        size_t text_bytes);

// Makes a device. No memory is taken yet. When it fails, the reason is written to `text`, cut to `text_bytes` bytes
// with its ending zero; `text` may be NULL.
//
// Requires:
// `config` states its size truly; its `library` ends with a zero; `text` has `text_bytes` bytes.
fb_status fb_device_create(const struct fb_device_config *config,
                           char *text,
                           size_t text_bytes,
                           struct fb_device **device);

// Ends a device: waits for what was enqueued on its streams and on borrowed ones, and frees all memory that was
// taken on it, its caches' too, also of those destroyed before; what a broken cache has given up stays. FB_BUSY while
// caches or captured layers are left. Tickets stay.
//
// Requires:
// Nothing enqueued on its streams waits for what only this thread would do.
fb_status fb_device_destroy(struct fb_device *device);

// Makes a stream of the device's own, which lives as long as the device.
//
// Requires:
// `stream` has room for the answer.
fb_status fb_stream_create(const struct fb_device *device, void **stream);

// Makes a CUstream of the engine's known, once; NULL is the legacy default stream. It is neither synchronised nor
// destroyed. FB_INVALID_CONFIG on a host device, for a stream of another context, and for the per-thread stream.
//
// Requires:
// `stream` is a stream of this process until it is returned or the device destroyed, and not being captured then.
fb_status fb_stream_borrow(const struct fb_device *device,
                           void *stream);

// Gives a borrowed stream back: waits for what was enqueued on it, and knows it no more. FB_OUT_OF_RANGE for one
// that was not borrowed, FB_INVALID_CONFIG on a host device, and for one that is being captured.
//
// Requires:
// Nobody enqueues on it at the same time, and no work of its own makes this call.
fb_status fb_stream_return(const struct fb_device *device,
                           void *stream);

// Blocks the caller until what is enqueued on the stream now has ended. FB_DEVICE_FAILED when the device has.
//
// Requires:
// Nothing enqueued there waits for what only this thread would do.
fb_status fb_stream_wait(const struct fb_device *device, void *stream);

// Orders two streams: what is enqueued on `after` from now on runs behind what is enqueued on `before` now. Waits for
// nothing.
//
// Requires:
// None beside the head's.
fb_status fb_stream_order(const struct fb_device *device,
                          void *before,
                          void *after);

// Runs `work(data)` in the stream's order, on a thread of the device's; on FB_DEVICE_HOST in this call. On a GPU's
// stream it may not call the driver, and so nothing here that enqueues or waits. On FB_DEVICE_HOST_THREADS it may not
// enqueue on its own stream, nor wait for it: it is what the stream is at. Where the device fails before, it never
// runs.
//
// Requires:
// `work` may be called with `data` on another thread, until it has run or the device is destroyed; it returns, by no
// other way than its end.
fb_status fb_stream_call(const struct fb_device *device,
                         void *stream,
                         fb_work work,
                         void *data);

// Zeroed device memory that lives as long as the device: for an engine without an allocator of its own.
//
// Requires:
// `address` has room for the answer.
fb_status fb_device_allocate(const struct fb_device *device, uint64_t bytes, void **address);

// Fills in the fields that a model's shape says, and leaves the others as they are: "deepseek-v3.2",
// "deepseek-v3.2-bf16", "deepseek-v3.2-int8", "glm-5", "gqa-8x128"; "deepseek-v3", which is dense, is for planning.
// FB_OUT_OF_RANGE for another name. `config` states its size and is zero or filled before. When it fails, the reason
// is written to `text`, cut to `text_bytes` bytes with its ending zero; `text` may be NULL.
//
// Requires:
// `name` ends with a zero; `config` states its size truly; `text` has `text_bytes` bytes.
fb_status fb_preset(const char *name,
                    char *text,
                    size_t text_bytes,
                    struct fb_cache_config *config);

// What a cache of this configuration takes on a GPU, which maps memory in multiples of 2 MiB; a host device maps
// pages, and pads less. Takes nothing. Refuses what fb_cache_create refuses without asking for memory; the reason is
// written to `text`, cut to `text_bytes` bytes with its ending zero; `text` may be NULL.
//
// Requires:
// Both state their size truly, and the configuration's table is there; `text` has `text_bytes` bytes.
fb_status fb_footprint(const struct fb_cache_config *config,
                       char *text,
                       size_t text_bytes,
                       struct fb_cache_footprint *footprint);

// Makes a cache on a device and takes all its memory, which is the device's until fb_device_destroy: neither
// fb_cache_destroy nor a creation that fails half-way gives any of it back. For a cache in place of another, make
// another device. When it fails, the reason is written to `text`, cut to `text_bytes` bytes with its ending zero;
// `text` may be NULL.
//
// Requires:
// `config` states its size truly, and its table is there; `text` has `text_bytes` bytes.
fb_status fb_cache_create(const struct fb_device *device,
                          const struct fb_cache_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_cache **cache);

// Ends a cache. Its pools are the device's memory, which fb_device_destroy frees: no other cache gets them, so one
// made anew on this device takes as much again. After a panic the memory is given up instead. FB_BUSY while a
// sequence is open or a step is not retired: nothing has ended then, and the handle stays good.
//
// Requires:
// No operation that was enqueued for it is at work in the caller's buffers.
fb_status fb_cache_destroy(struct fb_cache *cache);

// Reads a cache's counters and gauges.
//
// Requires:
// `stats` states its size truly.
fb_status fb_cache_stats(const struct fb_cache *cache, struct fb_stats *stats);

// Says what a cache is.
//
// Requires:
// `info` states its size truly.
fb_status fb_cache_info(const struct fb_cache *cache, struct fb_info *info);

// Takes up what has ended since: releases closed sequences whose last work has ended, and pages and step descriptors that
// ended work held. `*waiting`, which may be NULL, says how many closed sequences still wait.
//
// Requires:
// `waiting` is NULL or has room for the answer.
fb_status fb_cache_reap(struct fb_cache *cache,
                        void *stream,
                        uint32_t *waiting);

// Checks every invariant of every pool and table. For tests, between steps: on a GPU it waits for the device.
// FB_INTERNAL names the broken one.
//
// Requires:
// None beside the head's.
fb_status fb_cache_validate(const struct fb_cache *cache);

// What the cache had to do without: the fallback number `index`, from 0, as a line of text, cut to
// `text_bytes` bytes with its ending zero. FB_OUT_OF_RANGE past the last one: none, if `index` is 0.
// `text` may be NULL.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_cache_fallback(const struct fb_cache *cache, size_t index, char *text, size_t text_bytes);

// The slab of a layer, which attention reads: its address and size on the device, the same for life. Slots stand in
// blocks of 64, `[blocks][block_bytes]`, padded as declared; in a block, run 0 of all 64 slots, then run 1 of all 64
// slots. With rows in one run and no padding, slot `s` stands at `s * row_bytes[0]`.
//
// Requires:
// `address` and `bytes` have room for the answers.
fb_status fb_slab(const struct fb_cache *cache,
                  uint32_t layer,
                  void **address,
                  uint64_t *bytes);

// The rows of a layer in the total pool, `[pages][page tokens][host_stride]`, for who writes prompt rows in place
// (fb_append_in_place): a prefill on the device, a transfer. The pages of a sequence are fb_pages'; shared ones
// (fb_open_shared, fb_fork) may not be written. FB_OUT_OF_RANGE for an unknown layer.
//
// Requires:
// `address` and `bytes` have room for the answers.
fb_status fb_rows(const struct fb_cache *cache,
                  uint32_t layer,
                  void **address,
                  uint64_t *bytes);

// The index keys of a layer on the device, `[pages][page tokens][key bytes]`: the engine writes and reads them; the
// pages of a sequence are fb_pages'. FB_OUT_OF_RANGE for an unknown layer, or a model without index keys.
//
// Requires:
// `address` and `bytes` have room for the answers.
fb_status fb_index_keys(const struct fb_cache *cache,
                        uint32_t layer,
                        void **address,
                        uint64_t *bytes);

// Admits a sequence: takes its pages, slots and lane. FB_EXHAUSTED names the pool that has too little
// left; nothing is taken then.
//
// Requires:
// `config` states its size truly.
fb_status fb_open(struct fb_cache *cache, const struct fb_open_config *config, uint64_t *sequence);

// Appends prompt rows in one layer: `count` packed rows, each row_bytes[0] + row_bytes[1] bytes. Layers
// fill independently, each in order. Nothing is written on an error.
//
// Requires:
// `rows` has `count` rows.
fb_status fb_append(struct fb_cache *cache,
                    uint64_t sequence,
                    uint32_t layer,
                    const void *rows,
                    uint32_t count);

// Declares that `count` prompt rows of every layer are in their place (fb_rows) already: written there by a prefill or
// a transfer, or not needed because only the residency is replayed. Errors as fb_append's.
//
// Requires:
// None beside the head's.
fb_status fb_append_in_place(struct fb_cache *cache,
                             uint64_t sequence,
                             uint32_t count);

// Enters the sequence into its lane once every layer has its whole prompt: brings up what it was opened for, replays
// the selections of `warm_up`, and gathers what is resident then, up to its bound; fb_join_more gathers the rest.
// Steps wait for it by themselves. `warm_up` may be NULL, and so may `ticket`, which gets the end of what was
// enqueued. FB_INVALID_CONFIG while a layer's prompt is incomplete, or when the sequence has joined.
//
// Requires:
// `warm_up` states its size truly, and its selections are the device's to read until the stream has passed this
// call.
fb_status fb_join(struct fb_cache *cache,
                  uint64_t sequence,
                  const struct fb_warm_up *warm_up,
                  void *stream,
                  struct fb_ticket **ticket);

// Gathers the next stretch of a bounded warm-up. The sequence is running (fb_length) once none is left.
// FB_INVALID_CONFIG for a sequence that is not joining.
//
// Requires:
// `ticket` is NULL or has room for the answer.
fb_status fb_join_more(struct fb_cache *cache, uint64_t sequence, void *stream, struct fb_ticket **ticket);

// Opens a sequence that begins as a copy of `parent`, whose committed tokens are its prompt (the config's `prompt` is
// passed over): full pages are shared, the partial one is copied on the stream. It is joined already. FB_BUSY while
// work of the parent is in flight; FB_INVALID_CONFIG while the parent has rows that were neither accepted nor
// rejected: roll it back to the length that is meant. Otherwise as fb_open.
//
// Requires:
// `config` states its size truly; `child` has room for the answer, and so has `ticket`, or it is NULL.
fb_status fb_fork(struct fb_cache *cache,
                  uint64_t parent,
                  const struct fb_open_config *config,
                  void *stream,
                  uint64_t *child,
                  struct fb_ticket **ticket);

// Cuts a sequence to `length` tokens: rejected drafts beyond those that the length accepts, and any committed tokens
// beyond it, are gone from every layer's residency. A page that others share is replaced before it can be written
// again. Clears a failed step. FB_BUSY while work of the sequence is in flight; FB_OUT_OF_RANGE for a length beyond
// committed and landed rows; FB_EXHAUSTED when shared pages cannot be replaced. Nothing has changed then.
//
// Requires:
// `ticket` is NULL or has room for the answer.
fb_status fb_truncate(struct fb_cache *cache,
                       uint64_t sequence,
                       uint32_t length,
                       void *stream,
                       struct fb_ticket **ticket);

// How long a sequence is, as far as is known on the host.
//
// Requires:
// `length` states its size truly.
fb_status fb_length(const struct fb_cache *cache, uint64_t sequence, struct fb_sequence_length *length);

// The pages of a sequence, in order: as many as `room` holds, and in `*count` how many there are.
//
// Requires:
// `pages` has `room` places; `count` has room for the answer.
fb_status fb_pages(const struct fb_cache *cache,
                   uint64_t sequence,
                   struct fb_page *pages,
                   uint32_t room,
                   uint32_t *count);

// Reads one row of the total pool, packed, as it is now: `bytes` is row_bytes[0] + row_bytes[1]. For checks, and for
// engines that move rows themselves. FB_OUT_OF_RANGE for an unknown layer, a position beyond the sequence's pages,
// and another size.
//
// Requires:
// `row` has `bytes` bytes; no step or append that writes the row is at work.
fb_status fb_read_row(const struct fb_cache *cache,
                      uint64_t sequence,
                      uint32_t layer,
                      uint32_t position,
                      void *row,
                      uint64_t bytes);

// The residency digest of a sequence, all layers: equal on every rank that was given the same selections, step by
// step, since it joined. On a GPU it waits for the device: between steps. What to do with ranks that differ stands in
// docs/integration.md (Ranks).
//
// Requires:
// `digest` has room for the answer.
fb_status fb_digest(const struct fb_cache *cache,
                    uint64_t sequence,
                    uint64_t *digest);

// The slot to which the row of a step's query row is to be written, the same in every layer's slab and in every step
// of the sequence: asked for once, when it is opened, and not in a callback, where it is FB_BUSY.
//
// Requires:
// `slot` has room for the answer.
fb_status fb_landing_slot(const struct fb_cache *cache,
                          uint64_t sequence,
                          uint32_t query_row,
                          uint32_t *slot);

// Ends a sequence, also as an abort. Its handle is closed at once; what it holds comes back when the last
// step that names it has been retired.
//
// Requires:
// What the library enqueues on `stream` may be enqueued there now.
fb_status fb_close(struct fb_cache *cache, uint64_t sequence, void *stream);

// As fb_open, for a prompt whose token ids are known: its leading pages that were published before, under the same
// salt, are taken over. `*shared` says how many tokens those are; fb_append goes on behind them. Admission counts
// only what is not shared. `prompt` has the prompt's ids, or as many leading ones as may be shared: leave out the
// last one where its row is to be computed anew, for the logits behind it. The salt tells apart what equal tokens do
// not: tenants, adapters, versions of the weights; it may be empty. FB_OUT_OF_RANGE for more ids than the prompt has
// tokens, and for keys that are neither one a full page nor none. Nothing is taken on an error.
//
// Requires:
// The structs state their sizes truly, and what they name is there; `salt` has `salt_bytes` bytes.
fb_status fb_open_shared(struct fb_cache *cache,
                         const struct fb_open_config *config,
                         const struct fb_tokens *prompt,
                         const void *salt,
                         size_t salt_bytes,
                         uint64_t *sequence,
                         uint32_t *shared);

// How many tokens fb_open_shared would take over now. Changes nothing. Caches of several ranks share alike only if
// each is offered what the one that finds least would find.
//
// Requires:
// As fb_open_shared.
fb_status fb_find_shared(const struct fb_cache *cache,
                         const struct fb_tokens *prompt,
                         const void *salt,
                         size_t salt_bytes,
                         uint32_t *shared);

// Publishes what can be published, for others to find: full pages behind the `from` tokens that are, whose rows are accepted
// and stored. `next` has the sequence's token ids from there on, as far as they are known. `*published` says how many
// tokens are published now; call it again when more steps have been retired, and before fb_close. FB_INVALID_CONFIG for
// a sequence that fb_open_shared did not open, or that is not running; FB_BUSY while work that the library enqueued
// for it is in flight; FB_OUT_OF_RANGE when `from` is not what fb_length says is published.
//
// Requires:
// `next` states its size truly, and what it names is there; `published` has room for the answer.
fb_status fb_publish(struct fb_cache *cache,
                  uint64_t sequence,
                  uint32_t from,
                  const struct fb_tokens *next,
                  uint32_t *published);

// Captures the layers of a bucket into a graph: the engine's work by its callback; resolve, gather and scatter
// between. Nothing runs. Steps may be in flight meanwhile; none of the bucket's micro-batches may be open. On an
// error the capture has ended, and nothing is left of it.
//
// Requires:
// `config` and `engine` state their sizes truly, and what they name is there, the buffers at every launch; the
// callback returns, by no other way than its end; `captured` has room for the answer.
fb_status fb_capture(struct fb_cache *cache,
                     const struct fb_capture_config *config,
                     const struct fb_engine *engine,
                     struct fb_captured **captured);

// The same for an engine whose own capture is under way on the compute stream of the first micro-batch: everything
// is enqueued there. After an error that capture is worth nothing, unless the config was refused. The engine's graph
// must be gone before the device is.
//
// Requires:
// As fb_capture.
fb_status fb_capture_into(struct fb_cache *cache,
                          const struct fb_capture_config *config,
                          const struct fb_engine *engine,
                          struct fb_captured **captured);

// Launches captured layers for the open steps of its micro-batches, in the capture's order of them. fb_finish comes
// next, on any stream. On an error of the steps or of the capture nothing is enqueued; what the device refuses
// afterwards abandons the steps.
//
// Requires:
// `steps` has `count` of them; the buffers of the capture are the device's to use until the launch has ended.
fb_status fb_launch(struct fb_cache *cache,
                    const struct fb_captured *captured,
                    const fb_step *steps,
                    uint32_t count);

// The engine has launched a graph that it captured around fb_capture_into, for these open steps, ordered behind each
// one's fb_prepare. fb_finish comes next, on a stream that is ordered behind the launch.
//
// Requires:
// As fb_launch.
fb_status fb_launched(struct fb_cache *cache,
                      const struct fb_captured *captured,
                      const fb_step *steps,
                      uint32_t count);

// Gives captured layers up. Launches under way still run. Their device stays until then.
fb_status fb_captured_destroy(struct fb_captured *captured);

// Reads a table's text: its version, how many layers it has, and of their orders as many as `room` holds; `orders`
// may be NULL with a room of 0. When that fails, the reason is written to `reason`, cut to `reason_bytes` bytes
// with its ending zero; `reason` may be NULL.
//
// Requires:
// `text` ends with a zero byte; `orders` has room for `room` numbers, `version` and `layers` for the answers;
// `reason` has `reason_bytes` bytes.
fb_status fb_table_from_text(const char *text,
                             char *reason,
                             size_t reason_bytes,
                             uint32_t *version,
                             uint32_t *orders,
                             uint32_t room,
                             uint32_t *layers);

// Writes a table as text, cut to `text_bytes` bytes with its ending zero; `bytes` receives how many the whole
// takes, its zero included. `text` may be NULL. When that fails, the reason is written to `reason`, cut to
// `reason_bytes` bytes with its ending zero; `reason` may be NULL.
//
// Requires:
// `table` is there, and its orders; `text` has `text_bytes` bytes and `reason` has `reason_bytes`; `bytes` has room
// for the answer.
fb_status fb_table_to_text(const struct fb_table *table,
                           char *reason,
                           size_t reason_bytes,
                           char *text,
                           size_t text_bytes,
                           size_t *bytes);

// The order that exposes each layer least at so many misses a batch row: `layers` counts of `misses`, and as many
// orders. When that fails, the reason is written to `text`, cut to `text_bytes` bytes with its ending zero; `text` may
// be NULL.
//
// Requires:
// `prices` is there, and its numbers; `misses` has `layers` numbers, `orders` room for as many; `text` has
// `text_bytes` bytes.
fb_status fb_table_best(const struct fb_prices *prices,
                        const double *misses,
                        uint32_t layers,
                        char *text,
                        size_t text_bytes,
                        uint32_t *orders);

// Makes a chooser. When that fails, the reason is written to `text`, cut to `text_bytes` bytes with its ending
// zero; `text` may be NULL.
//
// Requires:
// `config` states its size truly, and what it names is there; `text` has `text_bytes` bytes; `chooser` has room for
// the answer.
fb_status fb_chooser_create(const struct fb_chooser_config *config,
                            char *text,
                            size_t text_bytes,
                            struct fb_chooser **chooser);

// Takes up the counters of a retired step of `rows` batch rows, as fb_retired_counts gave them, and chooses for a
// step of `next_rows`. Allocates nothing.
//
// Requires:
// `counts` has `layers` of them; `choice` states its size truly.
fb_status fb_choose(struct fb_chooser *chooser,
                    const struct fb_layer_count *counts,
                    uint32_t layers,
                    uint32_t rows,
                    uint32_t next_rows,
                    struct fb_choice *choice);

// A table that a choice names: as many orders as `room` holds are written to `orders`, `layers` receives how many
// there are, `version` the version. `orders` may be NULL with a room of 0.
//
// Requires:
// `orders` has room for `room` numbers; `layers` and `version` have room for the answers.
fb_status fb_chooser_table(const struct fb_chooser *chooser,
                           uint32_t bucket,
                           uint32_t index,
                           uint32_t *orders,
                           uint32_t room,
                           uint32_t *layers,
                           uint32_t *version);

// Ends the handle.
fb_status fb_chooser_destroy(struct fb_chooser *chooser);

// Resolves a layer's selection and gathers what it misses, all rows of the step, on one stream. `selection` holds
// token positions, -1 for none, `[rows of the step][query rows][top_k]`; `slots`, of the same shape, receives their
// slots in the layer's slab. A position at or beyond the sequence's length makes fb_retire answer FB_DEVICE_FAILED.
// Rows beyond a sequence's budget are in scratch slots, which all layers share: attention of this layer comes before
// the next layer's call. FB_INVALID_CONFIG in a cache of several attention_waves, whose slots are taken in turn:
// fb_resolve, then fb_gather by pass.
//
// Requires:
// Both buffers are the device's to use until the stream has passed this call.
fb_status fb_layer(struct fb_cache *cache,
                   fb_step step,
                   uint32_t layer,
                   const int32_t *selection,
                   int32_t *slots,
                   void *stream);

// fb_layer of every layer, draft layers included, in one call: for replays and tests, which know all selections
// beforehand. `selection` and `slots` are `[layers][rows of the step][query rows][top_k]`. Layers share the scratch
// slots, which behind this call hold rows of the last layer alone: FB_INVALID_CONFIG, with nothing enqueued, where an
// earlier layer might need one. None is needed where the budget of each of the step's sequences holds query rows x
// top_k rows, or the whole sequence, nor in a cache of residency_only. On another error of one layer those before
// it are enqueued: fb_abandon the step, or go on behind them with fb_layer.
//
// Requires:
// As fb_layer.
fb_status fb_layers(struct fb_cache *cache,
                    fb_step step,
                    const int32_t *selection,
                    int32_t *slots,
                    void *stream);

// Resolves a part of a layer's selection. fb_gather must follow, ordered behind it, before the layer's attention and
// before the next resolve of the same rows: a step in which something missed was not gathered fails.
//
// Requires:
// `part` and `buffers` state their sizes truly; the buffers are the device's to use until the stream has passed this
// call.
fb_status fb_resolve(struct fb_cache *cache,
                     fb_step step,
                     const struct fb_step_range *part,
                     const struct fb_buffers *buffers,
                     void *stream);

// Fetches what the last resolve of these rows missed, or what pass `attention_wave` of attention reads of it, from
// 0. Attention may read the slots behind it.
//
// Requires:
// `part` states its size truly.
fb_status fb_gather(struct fb_cache *cache,
                    fb_step step,
                    const struct fb_step_range *part,
                    uint32_t attention_wave,
                    void *stream);

// Stores a layer's new rows in the total pool, once they stand in their landing slots.
fb_status fb_scatter(struct fb_cache *cache, fb_step step, uint32_t layer, void *stream);

// fb_scatter of a part of a layer.
//
// Requires:
// `part` states its size truly.
fb_status fb_scatter_range(struct fb_cache *cache, fb_step step, const struct fb_step_range *part, void *stream);

// Enqueues one layer of a step, or one pass of a draft layer, in an order FB_OVERLAP_NONE, FB_OVERLAP_DA or
// FB_OVERLAP_DBA: the engine's work by its callback; resolve, gather and scatter between. `pass` is
// FB_ALL_QUERY_ROWS, or the pass of a draft layer + 1. fb_finish orders the step's end behind all of it.
//
// A layer that was not enqueued whole, because the callback or the device refused, abandons the step: it is still
// to be finished and retired, which then answers FB_CANCELLED, and its sequences are rolled back or closed. The
// callback finds the cache busy: see fb_enqueue. FB_CLOSED in a child that it forked.
//
// Requires:
// `layers` and `engine` state their sizes truly; the buffers are the device's to use until every stream has passed
// this call; the callback returns, by no other way than its end.
fb_status fb_overlap(struct fb_cache *cache,
                     fb_step step,
                     uint32_t layer,
                     uint32_t pass,
                     uint32_t order,
                     const struct fb_overlap_config *layers,
                     const struct fb_engine *engine);

// Enqueues all layers of the open steps, at most one of each micro-batch: each layer once, then `draft_passes`
// passes of the draft layers, the steps in turn. `steps` and `layers` have `count` entries; `by_layer` the order of
// every layer, draft layers last. An error after the first work was enqueued abandons all the steps.
//
// Requires:
// As fb_overlap; `steps`, `layers` and `by_layer` have so many entries.
fb_status fb_overlap_steps(struct fb_cache *cache,
                           const fb_step *steps,
                           const struct fb_overlap_config *layers,
                           uint32_t count,
                           const uint32_t *by_layer,
                           uint32_t draft_passes,
                           const struct fb_engine *engine);

// Plans what is asked. When that fails, the reason is written to `text`, cut to `text_bytes` bytes with its ending
// zero: FB_OUT_OF_MEMORY names what does not fit, with bytes wanted and available. `text` may be NULL.
//
// Requires:
// `config`, its model and `planned` state their sizes truly; `text` has `text_bytes` bytes.
fb_status fb_plan(const struct fb_plan_config *config,
                  char *text,
                  size_t text_bytes,
                  struct fb_planned *planned);

// A note in a sentence, by its one bit. Constant; empty for what is no note.
const char *fb_plan_note_text(uint32_t bit);

// Creates the file `path`, which must not be there, for blocks of `block_tokens` tokens. When that fails, the
// reason is written to `text`, cut to `text_bytes` bytes with its ending zero; `text` may be NULL.
//
// Requires:
// `path` ends with a zero byte; `text` has `text_bytes` bytes; `requests` has room for the answer.
fb_status fb_requests_create(const char *path,
                             uint32_t block_tokens,
                             char *text,
                             size_t text_bytes,
                             struct fb_requests **requests);

// Records one request. Requests come in the order of their arrival. On FB_OUT_OF_RANGE nothing is recorded and the
// next call may be right; after FB_IO the file ends with the line before, and every later call fails.
//
// Requires:
// `arrival` states its size truly, and its blocks are there.
fb_status fb_requests_record(struct fb_requests *requests,
                             const struct fb_arrival *arrival);

// Writes the lines that are held. What is written survives the process.
fb_status fb_requests_flush(struct fb_requests *requests);

// Flushes, and stores the file on the disk: it survives a loss of power.
fb_status fb_requests_sync(struct fb_requests *requests);

// Ends the trace: writes what is held and stores the file. `count`, which may be NULL, receives the requests
// recorded; a file without any is one that no reader takes. Whatever the answer, the handle can then only be
// destroyed.
//
// Requires:
// `count` has room for the answer.
fb_status fb_requests_finish(struct fb_requests *requests, uint64_t *count);

// Ends the handle. All lines recorded are in the file.
fb_status fb_requests_destroy(struct fb_requests *requests);

// Reads the trace or recording `path`, packed or not. When that fails, the reason is written to `text`, cut to
// `text_bytes` bytes with its ending zero; `text` may be NULL.
//
// Requires:
// `path` ends with a zero byte; `text` has `text_bytes` bytes; `selections` has room for the answer.
fb_status fb_selections_open(const char *path,
                             char *text,
                             size_t text_bytes,
                             struct fb_selections **selections);

// What the trace says about itself.
//
// Requires:
// `header` states its size truly.
fb_status fb_selections_header(const struct fb_selections *selections, struct fb_trace_header *header);

// A text of the trace's, FB_SELECTIONS_ something, cut to `text_bytes` bytes with its ending zero; empty where the
// trace does not say.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_selections_text(const struct fb_selections *selections,
                             uint32_t which,
                             char *text,
                             size_t text_bytes);

// The model's own numbers of the recorded layers: as many as `room` holds are written to `ids`, and `count`
// receives how many there are. `ids` may be NULL with a room of 0.
//
// Requires:
// `ids` has room for `room` numbers; `count` has room for the answer.
fb_status fb_selections_layer_ids(const struct fb_selections *selections,
                                  uint32_t *ids,
                                  uint32_t room,
                                  uint32_t *count);

// Copies what `steps` steps selected, from `first_step` on: `[steps][layers][k]` positions, ascending in each set,
// -1 behind the last one of a set that has fewer.
//
// Requires:
// `positions` has room for `steps` x layers x k numbers.
fb_status fb_selections_read(const struct fb_selections *selections,
                             uint32_t first_step,
                             uint32_t steps,
                             int32_t *positions);

// Ends the handle.
fb_status fb_selections_destroy(struct fb_selections *selections);

// Begins a step: enqueues the wait for the work before it, its block, and the commit of what its
// sequences' previous steps left in their landing slots. FB_BUSY when every step is in flight: retire
// one; or when another call is inside the cache: see Threads in the head. Nothing is enqueued on an error.
//
// Requires:
// `config` states its size truly, its rows and tensor are there, the tensor until the stream has passed this call;
// `step` has room for the answer.
fb_status fb_prepare(struct fb_cache *cache,
                     const struct fb_step_config *config,
                     void *stream,
                     fb_step *step);

// Ends the enqueueing of a step: its report, then its event. What fb_overlap, fb_overlap_steps or fb_launch have
// enqueued is joined there; behind what an engine orders itself, `stream` must be ordered already.
//
// A step is whole when every query row of its batch rows was resolved, gathered in each pass of attention, and
// scattered, in every layer, draft layers included; with residency_only, when it was resolved. While a call is
// missing: FB_INVALID_CONFIG, whose text names the call, its layer, batch row and query row. Nothing is enqueued then,
// and the step stays open, to be completed or given up by fb_abandon. A gather can be made up for until any
// layer's next resolve of these batch rows. Behind that, resolve again and gather; where rows were missed that had to
// be fetched, the step fails all the same, as fb_retire says. FB_INVALID_CONFIG also for a step that is finished.
fb_status fb_finish(struct fb_cache *cache,
                    fb_step step,
                    void *stream);

// Gives an open step up, for an engine that fails between its layers. It is still to be finished and retired, which
// answers FB_CANCELLED; its sequences are then rolled back or closed.
fb_status fb_abandon(struct fb_cache *cache,
                     fb_step step);

// Ends a step whose work has ended, and sets `*step` to 0. FB_BUSY while it runs or is not finished: `*step` stays,
// to be retired later. Any other error ends it too: FB_DEVICE_FAILED when the device failed, a selection was wrong,
// or a launched graph held less than was said; FB_CANCELLED for an abandoned step. None of its tokens may be
// published then, and its sequences are rolled back or closed. `retired` may be NULL. `stream` orders what becomes
// free behind the step.
//
// Requires:
// `step` points to a step's number; `retired` states its size truly.
fb_status fb_retire(struct fb_cache *cache,
                    fb_step *step,
                    void *stream,
                    struct fb_retired *retired);

// Hits and misses by layer of the step that was retired last: as many as `room` holds are written to `counts`, and
// `count` receives how many there are: none where that step failed. `counts` may be NULL with a room of 0.
//
// Requires:
// `counts` has room for `room` of them; `count` has room for the answer.
fb_status fb_retired_counts(const struct fb_cache *cache,
                            struct fb_layer_count *counts,
                            uint32_t room,
                            uint32_t *count);

// The committed length, in tokens, of each batch row's sequence as of the step that was retired last, in the same
// way.
//
// Requires:
// `lengths` has room for `room` numbers; `count` has room for the answer.
fb_status fb_retired_lengths(const struct fb_cache *cache,
                             uint32_t *lengths,
                             uint32_t room,
                             uint32_t *count);

// How the work of a ticket stands: FB_TICKET_PENDING, FB_TICKET_DONE, FB_TICKET_FAILED or FB_TICKET_CANCELLED. A
// failure's status goes to `status`, which may be NULL; otherwise that is FB_OK, or FB_CANCELLED.
//
// Requires:
// `outcome` and `status` have room for the answers.
fb_status fb_ticket_outcome(const struct fb_ticket *ticket,
                            uint32_t *outcome,
                            uint32_t *status);

// Gives a ticket up, ended or not: its work goes on.
//
// Requires:
// None beside the head's.
fb_status fb_ticket_destroy(struct fb_ticket *ticket);

// Creates the file `path`, which must not be there, and writes the recording's beginning. When that fails, no file
// is left, and the reason is written to `text`, cut to `text_bytes` bytes with its ending zero; `text` may be NULL.
//
// Requires:
// `path` ends with a zero byte; `config` states its size truly, and its lists and texts are there; `text` has
// `text_bytes` bytes; `trace` has room for the answer.
fb_status fb_trace_create(const char *path,
                          const struct fb_trace_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_trace **trace);

// Records what the query at `position` selected: for each layer that has sets of its own, in order, k positions as
// a kernel emits them, in any order, -1 where there is none; `count` of them, in host memory. Positions come one by
// one, from first_position on, once they are accepted. On FB_OUT_OF_RANGE nothing is recorded and the next call may
// be right; after FB_IO the file ends with the group before, and every later call fails.
//
// Requires:
// `selected` has `count` numbers.
fb_status fb_trace_record(struct fb_trace *trace,
                          uint32_t position,
                          const int32_t *selected,
                          size_t count);

// Writes the steps that are held. What is written survives the process.
fb_status fb_trace_flush(struct fb_trace *trace);

// Flushes, and stores the file on the disk: it survives a loss of power.
fb_status fb_trace_sync(struct fb_trace *trace);

// Ends the recording: writes what is held and the end, and stores the file. `steps`, which may be NULL, receives
// the steps recorded; a file without any is one that no reader takes. Whatever the answer, the handle can then only
// be destroyed; on FB_IO the file is readable as far as it was written, and not finished.
//
// Requires:
// `steps` has room for the answer.
fb_status fb_trace_finish(struct fb_trace *trace,
                          uint32_t *steps);

// Ends the handle. A recording that was not finished keeps all its steps, and readers are told that it was not.
fb_status fb_trace_destroy(struct fb_trace *trace);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FB_FOREBAY_H */
