/* forebay: the KV and latent cache of large-language-model serving.
 *
 * Generated from ffi/src; do not edit. docs/versions.md says what its version promises.
 *
 * Status      Every fallible call answers an fb_status: FB_OK is 0, the others are the library's kinds of
 *             error. A NULL that is not allowed is FB_INVALID_CONFIG. A panic inside the library is
 *             FB_INTERNAL; the object then answers nothing else, and its destruction gives its memory up.
 * Answers     Out-parameters are written on FB_OK only, reasons of a failed creation on failure only.
 *             fb_retire's step is the exception: it is set to 0 whenever the step has ended.
 * Handles     What has a create (or another call that gives it) has a destroy. A handle is a token that is looked
 *             up, never followed: NULL or a handle of another kind is FB_INVALID_CONFIG, one that was destroyed or
 *             never given FB_CLOSED, and the library touches nothing. At most 65,536 are there at a time.
 *             A sequence is a number and a step an fb_step; 0 is none of either. One that was closed or retired, or
 *             never given, or another cache's, is FB_CLOSED.
 * Text        fb_error_text copies the text of the last call that failed on an object: what, where, with which
 *             numbers, what to do. A creation that fails writes it to its own `text`.
 * Threads     Calls on one object through a const pointer may run at the same time. A call through a pointer
 *             without const must be alone: beside another call on that object, also one from a callback, it answers
 *             FB_BUSY and has done nothing; so does a const call beside it. Objects are independent of each other.
 * Fork        In a forked child every handle of the parent's is FB_CLOSED, and what the child creates is its own.
 *             In the parent nothing changes.
 * Structs     A struct that begins with `size` is set to zero, then `size` to its sizeof. The library
 *             takes the size of an older header, reading what is missing as 0; it takes a larger size if
 *             what it does not know is 0. Of a struct that it fills it writes what both sides know, and
 *             zeroes the rest.
 * Streams     A stream is the engine's own, as `void *`; only fb_stream_wait waits for one. On CUDA it is a
 *             CUstream that fb_stream_borrow made known, or one of fb_stream_create's; on a host device one of
 *             fb_stream_create's, or NULL for the first. Any other is FB_OUT_OF_RANGE.
 * Memory      Buffers stay the caller's. The library reads no environment variable, installs no signal
 *             handler, and writes to no log; only a panic shows on standard error.
 */

#ifndef FB_FOREBAY_H
#define FB_FOREBAY_H

#include <stddef.h>
#include <stdint.h>

// Version of this header's interface, see docs/versions.md.
#define FB_ABI_VERSION 1

// Host memory; each operation runs in the call that enqueues it.
#define FB_DEVICE_HOST 0

// The total pool does without huge pages.
#define FB_MEMORY_SMALL_PAGES 1

// The total pool's pages become resident when they are first written.
#define FB_MEMORY_LAZY 2

// The total pool is not locked.
#define FB_MEMORY_UNLOCKED 4

// Every row is brought up when the sequence joins, if they all fit its slots.
#define FB_BRING_UP_WHOLE 0

// Nothing is brought up.
#define FB_BRING_UP_NOTHING 1

// In fb_row: the accepted rows stand in the step's tensor on the device.
#define FB_ACCEPTED_ON_DEVICE UINT32_MAX

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
    // The thing is in use by work in flight; ask again when that has ended.
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

// A device.
typedef struct fb_device fb_device;

// How a device is made. What is optional and 0 gets its default.
typedef struct fb_device_config {
    // sizeof(fb_device_config).
    size_t size;
    // FB_DEVICE_HOST.
    uint32_t kind;
    // Optional: the device's number.
    uint32_t number;
} fb_device_config;

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
    // 0.
    uint32_t reserved;
} fb_cache_config;

// What a cache has and does. Gauges describe now, counters only grow.
typedef struct fb_stats {
    // sizeof(fb_stats), set by the caller.
    size_t size;
    // Gauge: sequences that are open, or closed while work that names them is in flight.
    uint32_t sequences;
    // Gauge: steps between prepare and retire.
    uint32_t steps_in_flight;
    // Gauge: free pages of the total pool.
    uint32_t free_host_pages;
    // Gauge: free pages of index keys.
    uint32_t free_index_pages;
    // Gauge: free slots of the layer that has the fewest.
    uint32_t free_slots;
    // Gauge: free lanes.
    uint32_t free_lanes;
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
} fb_stats;

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
} fb_open_config;

// A row of a step's batch. It never grows.
typedef struct fb_row {
    // The sequence.
    uint64_t sequence;
    // Rows of its previous step that were accepted, or FB_ACCEPTED_ON_DEVICE; 0 before its first step.
    uint32_t accepted;
    // Its query rows in this step, at most the step's.
    uint32_t query_rows;
} fb_row;

// What a step decodes.
typedef struct fb_step_config {
    // sizeof(fb_step_config).
    size_t size;
    // The rows of the batch; read before the call returns.
    const struct fb_row *rows;
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

// A step between prepare and retire: its number in its cache, never given twice; 0 is none.
typedef uint64_t fb_step;

// What a step has done.
typedef struct fb_retired {
    // sizeof(fb_retired), set by the caller.
    size_t size;
    // The step's number, from 1.
    uint64_t step;
    // Distinct selected rows that were resident, all layers.
    uint64_t hits;
    // Rows fetched, all layers.
    uint64_t misses;
} fb_retired;

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

// Makes a device. When that fails, the reason is written to `text`, cut to `text_bytes` bytes with its ending zero;
// `text` may be NULL.
//
// Requires:
// `config` states its size truly; `text` has `text_bytes` bytes.
fb_status fb_device_create(const struct fb_device_config *config,
                           char *text,
                           size_t text_bytes,
                           struct fb_device **device);

// Ends a device and frees its memory. FB_BUSY while caches are left.
//
// Requires:
// No operation that was enqueued on it is at work in the caller's buffers.
fb_status fb_device_destroy(struct fb_device *device);

// Makes a cache on a device and takes all its memory. When that fails, the reason is written to `text`, cut to
// `text_bytes` bytes with its ending zero; `text` may be NULL.
//
// Requires:
// `config` states its size truly; `text` has `text_bytes` bytes.
fb_status fb_cache_create(const struct fb_device *device,
                          const struct fb_cache_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_cache **cache);

// Ends a cache and frees its memory; after a panic the memory is given up instead. FB_BUSY while a
// sequence is open or a step is not retired: nothing is freed then, and the handle stays good.
//
// Requires:
// No operation that was enqueued for it is at work in the caller's buffers.
fb_status fb_cache_destroy(struct fb_cache *cache);

// Reads a cache's counters and gauges.
//
// Requires:
// `stats` states its size truly.
fb_status fb_cache_stats(const struct fb_cache *cache, struct fb_stats *stats);

// What the cache had to do without: the fallback number `index`, from 0, as a line of text, cut to
// `text_bytes` bytes with its ending zero. FB_OUT_OF_RANGE past the last one: none, if `index` is 0.
// `text` may be NULL.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_cache_fallback(const struct fb_cache *cache, size_t index, char *text, size_t text_bytes);

// The slab of a layer, which attention reads: its address and size on the device. Slots stand in blocks
// of 64, padded as declared; in a block, run 0 of all 64 slots, then run 1 of all 64 slots. With rows in
// one run and no padding, slot `s` stands at `s * row_bytes[0]`.
//
// Requires:
// `address` and `bytes` have room for the answers.
fb_status fb_slab(const struct fb_cache *cache, uint32_t layer, void **address, uint64_t *bytes);

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

// Enters the sequence into its lane once every layer has its whole prompt, and brings up what it was
// opened for. Steps wait for it by themselves.
//
// Requires:
// What the library enqueues on `stream` may be enqueued there now.
fb_status fb_join(struct fb_cache *cache, uint64_t sequence, void *stream);

// The slot to which the row of a step's query row is to be written, the same in every layer's slab.
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

// Begins a step: enqueues the wait for the work before it, its block, and the commit of what its
// sequences' previous steps left in their landing slots. FB_BUSY when every step is in flight: retire
// one. Nothing is enqueued on an error.
//
// Requires:
// `config` states its size truly, its rows and tensor
// are there, the tensor until the stream has passed this call.
fb_status fb_prepare(struct fb_cache *cache,
                     const struct fb_step_config *config,
                     void *stream,
                     fb_step *step);

// Resolves a layer's selection and gathers what it misses. `selection` holds token positions, -1 for
// none, `[rows of the step][query rows][top_k]`; `slots`, of the same shape, receives their slots in the
// layer's slab. A position at or beyond the sequence's length makes fb_retire answer FB_DEVICE_FAILED.
//
// Requires:
// Both buffers are the device's to use until the stream has passed this call.
fb_status fb_layer(struct fb_cache *cache,
                   fb_step step,
                   uint32_t layer,
                   const int32_t *selection,
                   int32_t *slots,
                   void *stream);

// Stores a layer's new rows in the total pool, once they stand in their landing slots.
//
// Requires:
// What the library enqueues on `stream` may be enqueued there now.
fb_status fb_scatter(struct fb_cache *cache, fb_step step, uint32_t layer, void *stream);

// Ends the enqueueing of a step.
//
// Requires:
// `stream` is behind all of the step's work.
fb_status fb_finish(struct fb_cache *cache, fb_step step, void *stream);

// Ends a step whose work has ended, and sets `*step` to 0. FB_BUSY while it runs or is not finished:
// `*step` stays, to be retired later. FB_DEVICE_FAILED ends it too: none of its tokens may be published,
// and in this version its sequences can only be closed. `retired` may be NULL.
//
// Requires:
// `step` points to a step's number; `retired` states its size truly.
fb_status fb_retire(struct fb_cache *cache, fb_step *step, void *stream, struct fb_retired *retired);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FB_FOREBAY_H */
