/* forebay: the KV and latent cache of large-language-model serving. It keeps all rows in host memory, and on the
 * device a cache of these rows, managed by exact LRU, step by step. For models whose attention reads every row it keeps
 * pages on the device, and in host memory those that the device has no room for (the calls fb_dense_).
 *
 * Generated from ffi/src; do not edit. docs/versions.md says what its version promises.
 *
 * Words       docs/design.md has all words, docs/integration.md the calls in an engine's order.
 *             row             What attention reads for one token in one layer, in one run of bytes (a latent) or two
 *                             (K and V).
 *             index key       The key that the model's indexer scores: one per token and layer, always on the device.
 *             page            `page_tokens` consecutive tokens of a sequence (a power of two from 16 to 1024): a page
 *                             of rows in host memory and a page of index keys on the device, with the same page
 *                             numbers in all layers.
 *             total pool      All rows of all open sequences, in pinned host memory.
 *             slot, slab      A slot holds one row on the device. A layer's slots are consecutive in memory: its slab.
 *             slot block      64 consecutive slots of a slab.
 *             resident        A row is resident while it has a slot of its sequence's budget.
 *             budget          The number of slots that one sequence has in one layer for its resident rows. fb_resize
 *                             changes it between steps.
 *             lane            The index of a sequence in the device's residency tables, from fb_open until the
 *                             sequence is released.
 *             step            One forward pass of decode: fb_prepare, the layers, fb_finish, fb_retire. It is open from
 *                             fb_prepare to fb_finish, and in flight from fb_prepare to fb_retire.
 *             step descriptor The lanes, accepted counts and query rows of one step, in pinned memory; in use from
 *                             fb_prepare to fb_retire.
 *             report          The hits and misses of each layer, the committed lengths and the error of one step. The
 *                             device writes it at the step's end, and fb_retire reads it.
 *             batch row       One sequence in the batch of a step.
 *             query row       One token that a sequence decodes in a step: its next token or a draft.
 *             micro-batch     A group of sequences whose steps may run at the same time as those of another group.
 *             selection       The positions that one query row reads in one layer: its top-k indices.
 *             index group     Consecutive layers that share one selection: the first one selects for the others.
 *             resolve (R)     Finds the selected rows that are resident (hits) and those that are neither resident nor
 *                             in a landing slot (misses), and gives each missed row a slot. If no slot is free, the
 *                             rows that were selected longest ago are evicted.
 *             gather (G)      Copies the missed rows from the total pool to their slots.
 *             scratch slot    A slot for a missed row that the budget has no slot for. Layers share the scratch slots,
 *                             except layers of one index group: the row is valid only for the attention of its layer
 *                             in this step.
 *             landing slot    A slot of a sequence to which the engine writes a new row. A row in a landing slot has
 *                             landed: it is neither accepted nor rejected yet.
 *             scatter (S)     Copies the new rows from the landing slots to the total pool.
 *             commit          At the beginning of the next step, copies the accepted rows from landing slots to slots
 *                             of the budget.
 *             split attention Attention in several calls: one over the resident rows and the new rows of this step,
 *                             one for each wave of fetched rows. FB_WORK_MERGE merges the results. An index list names
 *                             the slots that one of these calls reads.
 *             attention wave  A gather of a part of the missed rows, and the attention that reads them. The next wave
 *                             reuses the scratch slots.
 *             draft pass      One pass of a draft layer (MTP). It decodes one query row.
 *             bucket          A number of batch rows for which steps are captured as a graph.
 *             published page  A full page that other sequences can find by the hash of its tokens and of everything
 *                             before it, its block hash (vLLM: a cached full block).
 *             dense cache     The cache of a model whose attention reads every row, or every row of a window. Its pages
 *                             are on the device, and have the rows of all layers of one layer group.
 *             layer group     Layers of a dense cache with the same rows and the same kind of attention. They share
 *                             page tables. Page 0 of a layer group is the null page: zeros, of no sequence.
 *             plane           Device memory of a layer group with one piece of every page.
 *             host's tier     Pages of a dense cache in host memory: published pages that the device may have no room
 *                             for.
 *             group           Ranks of one host that need the same weights. Each keeps a part of every sharded layer.
 *             shard, part     What one rank keeps of a sharded layer: some granules of its window.
 *             window          A range of addresses that shows one whole layer while the layer is in use: the rank's
 *                             own part in place, and the others' parts pulled into a buffer.
 *             pull            The copies that bring the other ranks' parts into a window.
 *             ring            The order of pulls against the engine's work. Layers use two or three buffers in turn:
 *                             when the use of one ends, the pull of the buffer's next layer begins.
 *             session         The connection between two ranks: who they are, that they live, and what they share.
 *             replica         A copy of a tensor of a sharded layer on a rank that does not own all of it.
 *             version         A number of the weights of a layer: 0 at the start, then those of updates.
 *             border          A place between two steps at which all ranks take a new version or new replicas, or
 *                             none does.
 *             transfer        Rows of a prompt that go from a rank of a prefill instance, the sender, to a rank of a
 *                             decode instance, the receiver, layer by layer while the prompt is computed.
 *             use             The pages that a receiver has given to a request, from fb_receiver_grant until
 *                             FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED.
 * Needs       Linux 4.14 or later, where MADV_WIPEONFORK exists: without it every creation returns FB_OS_REFUSED.
 * Status      Every call that can fail returns an fb_status: FB_OK is 0, the others are the library's kinds of error.
 *             A NULL that is not allowed is FB_INVALID_CONFIG. A panic inside the library is FB_INTERNAL; the object
 *             is unusable after it. Its destroy call then leaks it, on purpose, because its state may be inconsistent.
 * Results     A call writes its out-parameters only if it returns FB_OK. A failed call that takes a buffer for the
 *             reason (`text` or `reason`) writes only to that buffer. There are two exceptions: the step of fb_retire
 *             and fb_dense_retire is set to 0 whenever the step has ended, and the outcome of fb_weights_commit and
 *             fb_weights_commit_replicas is always written. Out-parameters must not overlap each other or the call's
 *             inputs. An array of length 0 may always be NULL.
 * Handles     Every handle that a call makes has a destroy call. The streams of fb_stream_create and the memory of
 *             fb_device_allocate have none: they live as long as the device. A handle is a token that the library
 *             looks up and never follows. NULL and a handle of another kind are FB_INVALID_CONFIG; a handle that was
 *             destroyed, or never created, is FB_CLOSED; the library then touches nothing. At most 65,536 handles
 *             exist at a time. A sequence is a uint64_t and a step an fb_step, both plain numbers; 0 names no sequence
 *             and no step. fb_close or fb_dense_close ends a sequence, fb_retire or fb_dense_retire a step. A sequence
 *             or step number is FB_CLOSED if it was closed or retired, was never issued, or belongs to another cache.
 * Text        A call that copies a string to `text` writes at most `text_bytes` bytes, the ending zero included, and
 *             cuts a longer string. `text` may be NULL. The same is true of `reason` and `reason_bytes`.
 *             An error text says what failed, where, with which numbers, and what to do; 512 bytes hold any of them. A
 *             call that has no object, such as a creation, writes it to its own `text` or `reason`. For a call that
 *             failed on an object, fb_error_text copies it: on the first one, for a call that takes several.
 * Threads     Calls on one object through a const pointer may run at the same time. A call through a pointer without
 *             const is exclusive: if another exclusive call on that object is running, it returns FB_BUSY at once and
 *             has done nothing, also when it is made inside that other call's callback. If only const calls are
 *             running, it retries for up to a millisecond, and returns FB_BUSY only if they have not ended by then. A
 *             const call returns FB_BUSY while an exclusive call is running. So a thread that reads fb_cache_stats
 *             gets FB_BUSY now and then, but does not make the decode thread's fb_layer fail; make long const calls
 *             (fb_cache_validate, fb_digest) between the decode thread's calls.
 *             This FB_BUSY leaves no error text: fb_error_text still has that of an older failure. An engine that uses
 *             a cache from one thread, and does not call the cache inside fb_enqueue, never sees this FB_BUSY. Any
 *             FB_BUSY then means that work is in flight, or that something must end first, as the call's comment
 *             says. Objects are independent of each other. Callbacks, including the work of fb_stream_call, must not
 *             throw or jump out.
 * Processes   In a child process made by fork(2) every handle of the parent is FB_CLOSED, and what the child creates
 *             is its own. A call whose callback calls fork(2) returns FB_CLOSED in the child, whatever the callback
 *             returns there. In the parent nothing changes. (fb_fork has nothing to do with processes.)
 * Structs     Zero a struct that begins with `size`, then set `size` to its sizeof. The library accepts the size of an
 *             older header and reads the missing fields as 0. It accepts a larger size if the fields that it does not
 *             have are 0. In a struct that it fills, it writes the fields that both sides have and zeroes the rest.
 * Streams     A stream is the engine's own, as `void *`. On CUDA it is a CUstream passed to fb_stream_borrow (NULL: the
 *             legacy stream), or a stream that fb_stream_create made. On a host device it is a stream that
 *             fb_stream_create made, or NULL, the stream that the device has from the start. Any other is
 *             FB_OUT_OF_RANGE.
 *             Calls enqueue and return. fb_device_allocate, fb_cache_create and fb_dense_create wait until their memory
 *             is zeroed. Apart from them only fb_capture, fb_stream_wait, fb_stream_return and fb_device_destroy wait
 *             for the device, and, for comparisons and tests, fb_digest and fb_cache_validate. Of shared weights, those
 *             calls wait whose comments say that they block; no call of a step does. On FB_DEVICE_HOST_THREADS a stream
 *             holds 4096 operations: a caller that enqueues more waits until one has run. Streams run concurrently
 *             unless fb_stream_order orders them.
 * Memory      Buffers remain the caller's. The memory that a cache takes belongs to its device until
 *             fb_device_destroy. So does that of shared weights, and their addresses stay valid until then. The
 *             library reads no environment variable, installs no signal handler, and writes no log; only a panic
 *             prints to standard error.
 */

#ifndef FB_FOREBAY_H
#define FB_FOREBAY_H

#include <stddef.h>
#include <stdint.h>

// The version of this header's interface. docs/versions.md says what each version changed.
#define FB_ABI_VERSION 2

// Host memory. Enqueued work runs inside the call that enqueues it.
#define FB_DEVICE_HOST 0

// Host memory. Each stream is a thread.
#define FB_DEVICE_HOST_THREADS 1

// An NVIDIA GPU, through its driver.
#define FB_DEVICE_CUDA 2

// The total pool is in the system's memory and is registered with the driver.
#define FB_HOST_MEMORY_REGISTERED 0

// The total pool is in memory that the driver allocates on a NUMA node of the host. It needs a driver of CUDA 12.2 or
// newer.
#define FB_HOST_MEMORY_DRIVER 1

// The system backs the total pool with small pages, not with huge pages.
#define FB_MEMORY_SMALL_PAGES 1

// The system allocates the total pool's physical memory at the first write, not at creation.
#define FB_MEMORY_LAZY 2

// The total pool's memory is not locked, so the system may swap it out.
#define FB_MEMORY_UNLOCKED 4

// The cache may take more memory than the machine reports as available. Without this flag such a cache is refused
// with FB_OUT_OF_MEMORY, and the error text gives both numbers.
#define FB_MEMORY_OVERCOMMIT 8

// Each sequence keeps its budget until the engine resizes it.
#define FB_SHARE_NONE 0

// The cache divides its slots so that each sequence has the same number.
#define FB_SHARE_EQUAL 1

// The cache divides its slots in proportion to the lengths of the sequences.
#define FB_SHARE_LENGTH 2

// The cache gives its slots to the sequences where they avoid the most misses, as estimated from past steps.
#define FB_SHARE_MISSES 3

// In each layer, the join loads every row into slots, if all of them fit the sequence's slots there.
#define FB_BRING_UP_WHOLE 0

// The join loads no rows except those that the warm-up's selections name.
#define FB_BRING_UP_NOTHING 1

// Attention waits for the gather; nothing hides it.
#define FB_OVERLAP_NONE 0

// The preparation of attention, and attention over the resident and new rows, hide the gather.
#define FB_OVERLAP_DA 1

// In addition to FB_OVERLAP_DA, the indexer of the second half of the batch hides the gather.
#define FB_OVERLAP_DBA 2

// The layers before hide the gather. Only for a layer that another one selects for, behind fb_overlap of that one or
// in calls for all layers at once. Attention is not split.
#define FB_OVERLAP_AHEAD 3

// In fb_dense_plane: the plane has all layers of the group, or both runs, or the only one.
#define FB_DENSE_ALL UINT32_MAX

// A transfer writes to the device pages of the sequence.
#define FB_DENSE_DIRECT 0

// A transfer writes to pages of the host's tier, and the cache copies each layer up.
#define FB_DENSE_HOST 1

// The most groups of a dense model.
#define FB_DENSE_GROUPS_MAX 4

// Each layer has its own device memory: `[pages][a page's rows of the layer]`.
#define FB_DENSE_LAYER_FIRST 0

// A page has the rows of all layers of its group side by side: `[pages][layers][a page's rows of a layer]`.
#define FB_DENSE_PAGE_FIRST 1

// K and V each have their own device memory.
#define FB_DENSE_RUNS_APART 0

// K and V of a layer are in one device memory: in a page first K of all its tokens, then V of all its tokens.
#define FB_DENSE_RUNS_TOGETHER 1

// Slots and positions in a step's tensors are int64_t.
#define FB_DENSE_I64 0

// Slots and positions in a step's tensors are int32_t.
#define FB_DENSE_I32 1

// A published page is copied to the host's tier by fb_dense_save (write-through).
#define FB_DENSE_SAVE_PUBLISHED 0

// A published page is copied to the host's tier when its device page goes to others (write-back).
#define FB_DENSE_SAVE_EVICTED 1

// In fb_step_range and fb_overlap: all query rows of the step. Draft pass j, counted from 0, is given as j + 1.
#define FB_ALL_QUERY_ROWS 0

// Nothing has happened for the given time.
#define FB_LINKS_NOTHING 0

// A rank was lost: its process has died, or has broken the protocol. Call fb_weights_lost.
#define FB_LINKS_LOST 1

// A rank that was lost has come back. Call fb_weights_reattach next.
#define FB_LINKS_RETURNED 2

// A rank has ended its session in order (fb_links_end).
#define FB_LINKS_ENDED 3

// A rank has sent a message that is of no call of this header; it was dropped.
#define FB_LINKS_MESSAGE 4

// I0: the projections for the indexer, and the write of the index keys.
#define FB_WORK_PROJECT 0

// I: logits and top-k for the call's batch rows. This work writes their selection. A layer that another one selects
// for has no such call.
#define FB_WORK_INDEX 1

// P: the preparation of attention. This work writes the new rows to their landing slots.
#define FB_WORK_PREPARE 2

// A: attention over the rows that `attended` names.
#define FB_WORK_ATTEND 3

// M: the merge of split attention's results by their log-sum-exp. It is called only where attention was split.
#define FB_WORK_MERGE 4

// The rest of the layer after attention: output projection, experts, communication.
#define FB_WORK_REST 5

// For FB_WORK_ATTEND: all selected rows, in `slots`.
#define FB_ATTEND_ALL 0

// For FB_WORK_ATTEND: the rows that were resident or that this step writes, in index list 0.
#define FB_ATTEND_RESIDENT 1

// For FB_WORK_ATTEND: the rows that an attention wave fetched, in index list 1 + attention_wave.
#define FB_ATTEND_FETCHED 2

// All rows of the whole batch fit on the device: offload moves bytes without any gain.
#define FB_NOTE_ALL_RESIDENT 1

// Dense attention reads every row in every step, so every row would be fetched in every step: offload is impossible.
#define FB_NOTE_DENSE 2

// There are so few slots for each sequence and layer that many misses are likely.
#define FB_NOTE_FEW_SLOTS 4

// A sequence has fewer slots in a layer than a step may select there: the rows beyond them are in scratch slots.
#define FB_NOTE_SCRATCH 8

// Host memory, and not the GPU's memory, limits the batch.
#define FB_NOTE_HOST_BOUND 16

// Offload fits no more sequences than fit with all rows resident.
#define FB_NOTE_NO_ROOM 32

// In fb_selections_text: the recording's short name.
#define FB_SELECTIONS_LABEL 0

// In fb_selections_text: the model that was run.
#define FB_SELECTIONS_MODEL 1

// In fb_selections_text: the model's architecture.
#define FB_SELECTIONS_ARCH 2

// In fb_selections_text: the score by which the selector ranked positions.
#define FB_SELECTIONS_SCORE 3

// In fb_selections_text: how the steps were produced.
#define FB_SELECTIONS_MODE 4

// In fb_selections_text: a description of what the model read.
#define FB_SELECTIONS_TEXT 5

// In fb_batch_row: the number of accepted rows is on the device, in `accepted` of fb_step_config.
#define FB_ACCEPTED_ON_DEVICE UINT32_MAX

// The work has not ended.
#define FB_TICKET_PENDING 0

// The work has succeeded. Only this outcome makes its bytes valid.
#define FB_TICKET_DONE 1

// The work failed.
#define FB_TICKET_FAILED 2

// The work never ran, because its device has ended.
#define FB_TICKET_CANCELLED 3

// Frames and rows go over TCP: between hosts, or between processes of one that share no memory.
#define FB_TRANSFER_TCP 1

// Rows are read from shared memory, and frames go over a Unix socket: between processes of one host and user.
#define FB_TRANSFER_SHM 2

// Each rank of a stage has all tokens of its heads (tensor parallel).
#define FB_TRANSFER_SPLIT_HEADS 0

// Each rank of a stage has all heads of its tokens (sequence parallel prefill). A receiver cannot be divided so.
#define FB_TRANSFER_SPLIT_TOKENS 1

// Nothing has happened for the given time.
#define FB_TRANSFER_NOTHING 0

// A rank of the other side has said hello, on connection `link`: `instance`, `replica`, `stage` and `lane` say which.
#define FB_TRANSFER_MET 1

// Connection `link` is there.
#define FB_TRANSFER_CONNECTED 2

// Connection `link` is gone. `status` and the text say why, if this end knows it. A sender connects again by itself.
#define FB_TRANSFER_LOST 3

// A connection did not open; `status` and the text say why. A sender tries again by itself.
#define FB_TRANSFER_UNOPENED 4

// A call was refused when it was carried out, and has changed nothing. `status` and the text say why; `request` is the
// request that the call was about, if `is_of_request` is 1. Of several parts of fb_sender_computed each is taken or
// refused by itself; the text has the layer and origin of one that was refused, whose memory is the engine's.
#define FB_TRANSFER_REFUSED 5

// Sender: a receiver has given pages to `request`, and wants its tokens from `first` on.
#define FB_TRANSFER_GRANTED 6

// Sender: nothing reads the rows of `request` at `origin` any more. Their memory may be written again.
#define FB_TRANSFER_RELEASED 7

// Sender: `request` is over, and nothing reads its rows any more. `status` is FB_OK if its receivers have everything;
// FB_CANCELLED if a side gave it up; FB_CORRUPT, FB_TIMED_OUT, FB_PEER_LOST or FB_BAD_FORMAT; FB_CLOSED if this rank
// held its rows no longer.
#define FB_TRANSFER_ENDED 8

// Receiver: all rows of `layer` are stored.
#define FB_TRANSFER_READY 9

// Receiver: a payload has come. fb_receiver_payload reads it.
#define FB_TRANSFER_PAYLOAD 10

// Receiver: all rows and payloads of the use are there. Nothing is written to its pages any more.
#define FB_TRANSFER_WHOLE 11

// Receiver: the use will not become whole; `status` and the text say why. Nothing is written to its pages any more.
#define FB_TRANSFER_FAILED 12

// Receiver: all senders of the use know that it has ended, or are gone.
#define FB_TRANSFER_DRAINED 13

// Every rank keeps the old version, or the old replicas.
#define FB_UPDATE_ABORTED 0

// Every rank has the new version, or will have it before its next step. So it is with new replicas.
#define FB_UPDATE_COMMITTED 1

// Nothing was decided in a call that returned an error.
#define FB_UPDATE_OPEN 2

// The ranks have decided, and the call failed afterwards.
#define FB_UPDATE_FAILED 3

// A rank pulls what it does not hold from the device memory of the other ranks.
#define FB_WEIGHTS_FROM_PEERS 0

// A rank pulls from its own pinned host memory, which holds every sharded layer whole.
#define FB_WEIGHTS_FROM_HOST 1

// For an odd number of layers: what costs the fewest bytes. The first layer or the last stays resident.
#define FB_ODD_CHEAPEST 0

// For an odd number of layers: the last one has a third buffer.
#define FB_ODD_THIRD_BUFFER 1

// For an odd number of layers: the first one stays resident.
#define FB_ODD_RESIDENT_FIRST 2

// For an odd number of layers: the last one stays resident.
#define FB_ODD_RESIDENT_LAST 3

// The pulls of the next step's first layers are in the graph of a captured step, which ends behind them.
#define FB_WRAP_JOINED 0

// They are enqueued behind the launch, and the next launch waits for them.
#define FB_WRAP_BEHIND 1

// The plan keeps the last layer and the first one apart without further means.
#define FB_CLOSING_EVEN 0

// The last layer has a third buffer.
#define FB_CLOSING_THIRD_BUFFER 1

// One layer, `resident_layer`, stays resident.
#define FB_CLOSING_RESIDENT 2

// How a call ended.
enum fb_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Success: the out-parameters are written.
    FB_OK = 0,
    // A configuration value, an argument or a pointer is invalid, alone or in combination with another.
    FB_INVALID_CONFIG = 1,
    // A size or a product does not fit its type.
    FB_OVERFLOW = 2,
    // The operating system or the device has no more memory.
    FB_OUT_OF_MEMORY = 3,
    // The operating system, or the GPU's driver, refused a call or is missing.
    FB_OS_REFUSED = 4,
    // A pool whose size was fixed at creation has too little left.
    FB_EXHAUSTED = 5,
    // Work in flight, another call, or something that the caller must end first is using the object. Call again when
    // that has ended.
    FB_BUSY = 6,
    // The sequence, step or object has ended, or the handle never named one.
    FB_CLOSED = 7,
    // A position, layer, slot or count is outside the configured range.
    FB_OUT_OF_RANGE = 8,
    // The device failed, a step's selections were invalid, its missed rows were not gathered, or its launched graph
    // lacked a call. Discard the tokens of that step.
    FB_DEVICE_FAILED = 9,
    // A file does not follow its format.
    FB_BAD_FORMAT = 10,
    // This build does not read this version of the format.
    FB_BAD_VERSION = 11,
    // Reading or writing a file failed.
    FB_IO = 12,
    // A step was abandoned, the work of a ticket never ran, or a callback returned a number that is no status.
    FB_CANCELLED = 13,
    // The library broke one of its own rules. This is always a defect of forebay.
    FB_INTERNAL = 14,
    // The call does not fit the current state of the sequence, step or stream that it names.
    FB_INVALID_STATE = 15,
    // The device, its driver, or this build lacks the requested feature.
    FB_UNSUPPORTED = 16,
    // Another process of the group has ended, or no sign of life has come from it in time.
    FB_PEER_LOST = 17,
    // A deadline passed before the call was done.
    FB_TIMED_OUT = 18,
    // Bytes do not have the digest that was stated for them.
    FB_CORRUPT = 19,
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

// The captured layers of steps, for the batch rows of one bucket.
typedef struct fb_captured fb_captured;

// A chooser of tables of orders.
typedef struct fb_chooser fb_chooser;

// A cache of one dense model on one device.
typedef struct fb_dense fb_dense;

// The block hashes of a prompt's full pages, in one dense cache. Other caches find nothing by them.
typedef struct fb_dense_names fb_dense_names;

// A device: its memory, its streams, and the work on them.
typedef struct fb_device fb_device;

// The sessions of a rank with all others of its group.
typedef struct fb_links fb_links;

// A rank of a receiving instance, and its thread.
typedef struct fb_receiver fb_receiver;

// A change of the replicas.
typedef struct fb_replication fb_replication;

// A request trace in progress.
typedef struct fb_requests fb_requests;

// A selection trace in memory.
typedef struct fb_selections fb_selections;

// A rank of a sending instance, and its thread.
typedef struct fb_sender fb_sender;

// The completion of work that the library enqueued: a warm-up, a resume, index keys that are placed, the copy of a
// fork, a truncation, the copies of fb_dense_park, the pages that fb_dense_open_shared or fb_dense_resume bring back,
// or those of fb_dense_arrive and fb_dense_join.
typedef struct fb_ticket fb_ticket;

// A recording in progress.
typedef struct fb_trace fb_trace;

// A new version of some layers.
typedef struct fb_update fb_update;

// One rank's weights, of which other ranks hold parts.
typedef struct fb_weights fb_weights;

// The configuration of a device. An optional field that is 0 gets the default that its comment names.
typedef struct fb_device_config {
    // sizeof(fb_device_config).
    size_t size;
    // FB_DEVICE_HOST, FB_DEVICE_HOST_THREADS or FB_DEVICE_CUDA.
    uint32_t kind;
    // Optional, CUDA: the device's number in the driver's order. Default: 0.
    uint32_t number;
    // Optional, CUDA: path or name of the driver's library, in UTF-8. Default: libcuda.so.1.
    const char *library;
    // Optional, host: the most bytes of device memory. Default: as many as the machine has.
    uint64_t memory;
    // Optional, CUDA: thread blocks of a gather, which bounds the multiprocessors (SMs) that it uses. Default: 4.
    uint32_t gather_blocks;
    // Optional, CUDA: threads of a thread block, a multiple of 32 up to 512. Default: 512.
    uint32_t threads;
    // Optional, CUDA: the memory of the total pool, an FB_HOST_MEMORY_ constant. Default: FB_HOST_MEMORY_REGISTERED.
    uint32_t host_memory;
    // Must be 0.
    uint32_t reserved;
} fb_device_config;

// A function that runs on the host in a stream's order: see fb_stream_call.
typedef void (*fb_work)(void *data);

// The configuration of a cache. An optional field that is 0 gets the default that its comment names.
typedef struct fb_cache_config {
    // sizeof(fb_cache_config).
    size_t size;
    // Layers that every decode step runs once, without the draft layers. (The `layers` of fb_info count both.)
    uint32_t layers;
    // Additional layers that draft tokens.
    uint32_t draft_layers;
    // Bytes of one index key on the device; 0 for a model without an indexer.
    uint32_t index_key_bytes;
    // Bytes of a row's runs, as multiples of 4. The second is 0 for rows in one run.
    uint32_t row_bytes[2];
    // Tokens of a page: a power of two from 16 to 1024.
    uint32_t page_tokens;
    // Positions that one query row selects in one layer.
    uint32_t top_k;
    // The most sequences that may be open at once.
    uint32_t lanes;
    // Tokens of the longest sequence: prompt plus promised tokens.
    uint32_t max_tokens;
    // Slots that a typical sequence has in each layer. The defaults of `pool_slots` and `min_budget` follow from it;
    // fb_open_config sets the number for each sequence.
    uint32_t slots;
    // The most query rows of a sequence in one step: 1 + drafts.
    uint32_t query_rows;
    // Optional: bytes from one row to the next in host memory. Default: the row's bytes rounded up to a multiple of
    // 64.
    uint32_t host_stride;
    // Optional: each slot block is padded to a multiple of this many bytes. Default: no padding.
    uint32_t device_block_align;
    // Optional: pages of the total pool. Default: enough for every lane.
    uint32_t host_pages;
    // Optional: pages of index keys. Default: enough for every lane.
    uint32_t index_pages;
    // Optional: slots of each layer's pool, for all sequences together. Default: enough for every lane.
    uint32_t pool_slots;
    // Optional: the fewest slots that a sequence may have in a layer. Default: `slots`.
    uint32_t min_budget;
    // Optional: the most batch rows of a step. Default: `lanes`.
    uint32_t batch;
    // Optional: the most steps of one sequence in flight. Default: 2.
    uint32_t steps_in_flight;
    // Optional: micro-batches that may each have a step open at the same time. Default: 1.
    uint32_t micro_batches;
    // Optional: FB_MEMORY_ flags. Default: huge pages, allocated at creation and locked. fb_cache_fallback names each
    // of these options that the system refused.
    uint32_t memory;
    // Optional: the most attention waves of a step. The waves use the same scratch slots one after the other, so a
    // lane needs scratch slots for only one wave. Default: 1. With more than one, the engine must run split
    // attention: fb_overlap, or fb_resolve and one fb_gather for each wave.
    uint32_t attention_waves;
    // Optional: the NUMA node of the total pool, plus 1. Default: any node.
    uint32_t numa_node;
    // Optional: 1 for replays. The cache then tracks which rows are resident and gathers no bytes. On a host device
    // the total pool takes addresses, and memory only when a row is appended, whatever `memory` says. A CUDA device
    // pins host memory, so there the pool takes all of its memory. Default: 0.
    uint32_t residency_only;
    // Optional: slots of each layer's pool for all sequences together, one number for each layer, draft layers
    // included. Set it or `pool_slots`, not both. Default: `pool_slots` in every layer.
    const uint32_t *slots_by_layer;
    // Optional: an FB_SHARE_ constant: how the cache divides its slots over the sequences, by resizes of its own. The
    // budget of fb_open_config is then the least that a sequence ever has. fb_open takes no slots yet, fb_join takes
    // the sequence's share, and fb_prepare moves budgets towards the shares. Default: FB_SHARE_NONE.
    uint32_t share;
    // Optional: the cache divides its slots again every so many calls of fb_prepare. Default: only when a sequence has
    // joined, ended or outgrown its budget.
    uint32_t share_every;
    // Optional: the least change of a budget, as a divisor of the budget. Default: 8, an eighth.
    uint32_t share_least_change;
    // Optional: the most sequences that one step resizes. Default: 8.
    uint32_t share_resizes_a_step;
    // Optional: the most bytes of rows that the shrinks of one step may move on the device. Default: 64 MiB.
    uint64_t share_bytes_a_step;
    // Optional: the first layers that select for themselves, before the layers of `group_layers`. Default: none.
    uint32_t lone_layers;
    // Optional: the layers, one after the other, that share the first one's selection (GLM-5.2: 4, after 2 lone
    // layers). Only the first layer of such a group has a resolve and index keys. Default: every layer selects.
    uint32_t group_layers;
    // Optional, instead of `lone_layers` and `group_layers`: one number for each layer, draft layers included: 1 for a
    // layer that selects, 0 for one that shares the selection of the layer before (a model's list of indexer types).
    const uint32_t *selects_by_layer;
    // Optional: the most sequences that may be parked at once (fb_park), in addition to the open ones. Default: 0.
    uint32_t parked;
    // Optional: the most sequences that may arrive at once (fb_arrive), in addition to the open and parked ones.
    // Default: 0.
    uint32_t arriving;
} fb_cache_config;

// The bytes that a cache takes, by purpose.
typedef struct fb_cache_footprint {
    // sizeof(fb_cache_footprint), set by the caller.
    size_t size;
    // Device: index keys of every page, all layers.
    uint64_t index_keys;
    // Device: the slots for the budgets of all sequences, all layers.
    uint64_t slots;
    // Device: landing slots, all layers, in whole slot blocks.
    uint64_t landing;
    // Device: scratch slots, which layers share: as many as one layer needs, for each layer of the largest index
    // group.
    uint64_t scratch;
    // Device: bytes that whole mappings of 2 MiB leave unused.
    uint64_t padding;
    // Device: residency tables, page tables of the lanes, lists of fetches, the device's copies of step descriptors,
    // and the working memory of resolves.
    uint64_t tables;
    // Host: the rows of the total pool.
    uint64_t rows;
    // Host: the pinned ring of step descriptors and reports, and the staging memory of a GPU's joins and truncations.
    uint64_t step_descriptors;
    // Device: the GPU's own page tables for the registered host memory that it reaches, 8 bytes for each 4 KiB.
    uint64_t host_page_tables;
} fb_cache_footprint;

// Statistics of a cache. A gauge describes the present; a counter only grows.
typedef struct fb_stats {
    // sizeof(fb_stats), set by the caller.
    size_t size;
    // Gauge: sequences that are open, and closed ones that are not released yet (fb_cache_reap).
    uint32_t sequences;
    // Gauge: steps between prepare and retire.
    uint32_t steps_in_flight;
    // Gauge: free pages of the total pool, not counting `unused_pages`.
    uint32_t free_host_pages;
    // Gauge: free pages of index keys, not counting `unused_pages`.
    uint32_t free_index_pages;
    // Gauge: published pages that no sequence uses. Each counts once, and is a page of rows and a page of index keys.
    // Admission can evict and reuse them.
    uint32_t unused_pages;
    // Gauge: free slots of the layer that has the fewest; in a cache with a `share`, slots that can still be promised.
    uint32_t free_slots;
    // Gauge: free lanes.
    uint32_t free_lanes;
    // Always 0.
    uint32_t reserved;
    // Counter: steps retired.
    uint64_t steps;
    // Counter: distinct selected rows that were resident, all layers.
    uint64_t hits;
    // Counter: rows fetched, all layers.
    uint64_t misses;
    // Counter: misses whose rows were fetched into scratch slots.
    uint64_t scratch;
    // Counter: bytes of missed rows, host to device.
    uint64_t bytes_up;
    // Counter: prompt tokens that were looked up among published pages.
    uint64_t prompt_tokens;
    // Counter: prompt tokens found in published pages, whose pages the new sequence shares.
    uint64_t shared_tokens;
    // Counter: pages that were published for other sequences to find.
    uint64_t published_pages;
    // Counter: published pages that were evicted to make room.
    uint64_t evicted_pages;
    // Gauge: slots that belong to a sequence, all layers, in whole blocks of 64.
    uint64_t slots_in_use;
    // Counter: resizes of a sequence's budgets (fb_resize, or by the cache's share).
    uint64_t resizes;
    // Counter: rows that resizes have moved to other slots, all layers, as far as a retired step has reported them.
    uint64_t moved_rows;
    // Gauge: parked sequences.
    uint64_t parked;
    // Gauge: arriving sequences (fb_arrive), of at most `arriving` of fb_cache_config. One that has ended counts until
    // its work has ended.
    uint32_t arriving;
    // Gauge: pages of rows, and as many of index keys, that are withheld after an abort (fb_abort).
    uint32_t withheld_pages;
} fb_stats;

// The configuration of a cache and the sizes that follow from it. It does not change.
typedef struct fb_info {
    // sizeof(fb_info), set by the caller.
    size_t size;
    // Layers, draft layers included.
    uint32_t layers;
    // Layers that draft tokens. They are the last ones, and `layers` counts them too.
    uint32_t draft_layers;
    // Bytes of a row, both runs together, as fb_append takes it.
    uint32_t row_bytes;
    // Bytes of the first run.
    uint32_t first_run_bytes;
    // Bytes from one row to the next in host memory.
    uint32_t host_stride;
    // Bytes of a slot block, padding included.
    uint32_t block_bytes;
    // Bytes of one index key; 0 for a model without them.
    uint32_t index_key_bytes;
    // Tokens of a page.
    uint32_t page_tokens;
    // Positions that one query row selects in one layer.
    uint32_t top_k;
    // The most sequences that may be open at once.
    uint32_t lanes;
    // Tokens of the longest sequence: prompt plus promised tokens.
    uint32_t max_tokens;
    // The most batch rows of a step.
    uint32_t batch;
    // The most query rows of a sequence in one step.
    uint32_t query_rows;
    // The most steps of one sequence in flight.
    uint32_t steps_in_flight;
    // Micro-batches that may each have a step open at the same time.
    uint32_t micro_batches;
    // The most attention waves of a step: split attention has 1 + this many index lists (`lists` and `counts` of
    // fb_buffers).
    uint32_t attention_waves;
    // The fewest slots that a sequence may have in a layer.
    uint32_t min_budget;
    // Pages of the total pool.
    uint32_t host_pages;
    // Pages of index keys.
    uint32_t index_pages;
    // 1 if the cache was configured with residency_only: its rows have no bytes.
    uint32_t residency_only;
    // Index groups: layers that select, draft layers included. Without groups it is `layers`.
    uint32_t index_groups;
    // The `group_layers` of the configuration; 0 if it has a `selects_by_layer`.
    uint32_t group_layers;
} fb_info;

// What a new sequence needs. An optional field that is 0 gets the default that its comment names. In a cache with
// `share` (fb_cache_config) the budget is the least that the sequence ever has.
typedef struct fb_open_config {
    // sizeof(fb_open_config).
    size_t size;
    // Tokens of the prompt.
    uint32_t prompt;
    // Tokens that the sequence may decode after the prompt.
    uint32_t promised;
    // Optional: slots in each layer. Set it or `ratio`, not both. Default, if none of `slots`, `ratio` and
    // `slots_by_layer` is set: the cache's min_budget.
    uint32_t slots;
    // Optional: the rows that the join loads, an FB_BRING_UP_ constant. Default: FB_BRING_UP_WHOLE.
    uint32_t bring_up;
    // Optional: slots in each layer as a fraction of prompt plus promised tokens, above 0 and at most 1; at least the
    // cache's min_budget. Default: `slots` applies.
    double ratio;
    // Optional: slots of each layer, draft layers included. Set it or `slots` or `ratio`, only one of them. Default:
    // every layer has the same number of slots.
    const uint32_t *slots_by_layer;
} fb_open_config;

// The warm-up of a joining sequence.
typedef struct fb_warm_up {
    // sizeof(fb_warm_up).
    size_t size;
    // Optional: the selections (top-k indices) of the last prompt positions, oldest first, on the device: token
    // positions, -1 for none, `[index_groups of fb_info][steps][top_k]`: one for each layer that selects.
    const int32_t *selections;
    // Optional: the number of prompt positions in `selections`; 0 without selections.
    uint32_t steps;
    // Must be 0.
    uint32_t reserved;
    // Optional: the most bytes of rows that one call gathers; fb_join_more gathers the rest. Default: no bound.
    uint64_t bytes_a_call;
} fb_warm_up;

// The lengths of a sequence.
typedef struct fb_sequence_length {
    // sizeof(fb_sequence_length), set by the caller.
    size_t size;
    // Committed tokens, as far as the host can see from retired steps and from work that the library enqueued.
    uint32_t committed;
    // Rows that the last retired step wrote after the committed ones and that are neither accepted nor rejected yet.
    uint32_t landed;
    // Tokens of the sequence's published pages. The next fb_publish starts after them.
    uint32_t published;
    // 1 if the sequence has joined and may take part in steps, otherwise 0.
    uint32_t running;
    // 1 if the sequence is parked (fb_park), otherwise 0.
    uint32_t parked;
    // Prompt rows that every layer has. While the sequence is parked, all its tokens are a prompt.
    uint32_t filled;
    // 1 if the sequence is arriving (fb_arrive): it has pages, and neither a lane nor slots. Otherwise 0.
    uint32_t arriving;
    // Always 0.
    uint32_t reserved;
} fb_sequence_length;

// A page of a sequence. This struct never grows.
typedef struct fb_page {
    // The number of the page of rows in the total pool.
    uint32_t host;
    // The number of the page of index keys, the same in every layer (fb_index_keys). The engine may use it as an entry
    // of its own block table.
    uint32_t index_keys;
} fb_page;

// A budget for fb_resize. Set one of `slots`, `ratio` and `slots_by_layer`.
typedef struct fb_budget {
    // sizeof(fb_budget).
    size_t size;
    // Slots in each layer, or 0.
    uint32_t slots;
    // Must be 0.
    uint32_t reserved;
    // Slots in each layer as a fraction of prompt plus promised tokens, above 0 and at most 1; at least the cache's
    // min_budget. Or 0.
    double ratio;
    // Slots of each layer, draft layers included, or NULL.
    const uint32_t *slots_by_layer;
} fb_budget;

// A key that the caller adds to the block hash of one page, or none. This struct never grows.
typedef struct fb_key {
    // 1 if there is a key, 0 if not.
    uint32_t is_set;
    // The key.
    uint8_t bytes[16];
} fb_key;

// The tokens of consecutive pages, by which the library finds published pages.
typedef struct fb_tokens {
    // sizeof(fb_tokens).
    size_t size;
    // Token ids from the beginning of a page. The library ignores ids at the end that fill no page. NULL if there are
    // none.
    const uint32_t *ids;
    // The number of token ids.
    uint32_t count;
    // Optional: the number of keys: one for each full page among the ids, or 0.
    uint32_t key_count;
    // Optional: the caller's keys, for content that ids do not identify, such as which image they represent. Two pages
    // match only if their ids and keys are equal and everything before them matches too.
    const struct fb_key *keys;
} fb_tokens;

// The streams and buffers of a step's layers. Streams may be equal. The buffers have the shapes that fb_buffers
// describes, for this struct's `batch` batch rows and the step's query rows. A draft pass has one query row: it uses
// the beginning of each buffer, in the shape for one query row. This struct's `lists_batch` is what fb_buffers calls
// `batch`.
typedef struct fb_overlap_config {
    // sizeof(fb_overlap_config), the same in all entries of an array.
    size_t size;
    // The stream of the engine's work, on which the step was prepared.
    void *compute;
    // The stream of the resolve, in FB_OVERLAP_DA and FB_OVERLAP_DBA.
    void *resolve;
    // The stream of the gather, in all orders but FB_OVERLAP_NONE, which has resolve and gather on `compute`.
    void *gather;
    // The stream of the scatter.
    void *scatter;
    // The selection (top-k indices), which the engine's top-k writes.
    const int32_t *selection;
    // Receives the slots of the selection.
    int32_t *slots;
    // Index lists of split attention. They may be NULL if every layer runs in FB_OVERLAP_NONE or FB_OVERLAP_AHEAD,
    // with one attention wave.
    int32_t *lists;
    // The number of valid slots in each index list; NULL without index lists.
    uint32_t *counts;
    // Batch rows of each index list; 0 without index lists.
    uint32_t lists_batch;
    // The number of batch rows to enqueue, at least the step's. Required in a capture, where it is the batch rows of
    // the bucket; if a launched step has fewer, the remaining ones do nothing. Optional outside a capture. Default:
    // the step's number of batch rows.
    uint32_t batch;
    // Optional: the first batch row of DBA's second half. Default: the batch is not divided.
    uint32_t half;
    // In a capture: the micro-batch. Otherwise 0, because the step has its own.
    uint32_t micro_batch;
} fb_overlap_config;

// What to capture.
typedef struct fb_capture_config {
    // sizeof(fb_capture_config).
    size_t size;
    // The micro-batches of the graph: for each its streams, its buffers, and the batch rows of the bucket.
    const struct fb_overlap_config *micro_batches;
    // The FB_OVERLAP_ order of every layer, draft layers last.
    const uint32_t *by_layer;
    // The number of micro-batches.
    uint32_t count;
    // Query rows of the steps.
    uint32_t query_rows;
    // Optional: the number of draft passes of each draft layer, at most `query_rows`. Default: 0. With draft layers,
    // fb_finish needs a draft pass of each draft layer for each query row of the step; those beyond this number are
    // enqueued by fb_overlap.
    uint32_t draft_passes;
    // Must be 0.
    uint32_t reserved;
} fb_capture_config;

// One call of the engine's callback.
typedef struct fb_engine_call {
    // sizeof(fb_engine_call) in the library. An older caller reads the fields that it knows.
    size_t size;
    // What to enqueue: an FB_WORK_ constant.
    uint32_t work;
    // For FB_WORK_ATTEND: an FB_ATTEND_ constant.
    uint32_t attended;
    // For FB_ATTEND_FETCHED: the wave that fetched the rows, from 0.
    uint32_t attention_wave;
    // The micro-batch.
    uint32_t micro_batch;
    // The layer.
    uint32_t layer;
    // The first batch row.
    uint32_t first;
    // The number of batch rows: one of the two parts of the batch for DBA's indexer, otherwise all.
    uint32_t count;
    // The first query row of each batch row.
    uint32_t first_query_row;
    // The number of query rows of each batch row: 1 in a draft pass.
    uint32_t query_rows;
    // Always 0.
    uint32_t reserved;
} fb_engine_call;

// Enqueues the work of `call` on `stream`, the compute stream of its micro-batch. If the callback enqueues work on
// other streams, it orders `stream` after that work before it returns. It returns 0 for success; any other value,
// normally an fb_status, abandons the step. Calls on the cache, even const ones, return FB_BUSY inside the callback:
// call fb_landing_slot, fb_slab, fb_index_keys and fb_pages earlier.
typedef uint32_t (*fb_enqueue)(void *data, const struct fb_engine_call *call, void *stream);

// The engine's callback.
typedef struct fb_engine {
    // sizeof(fb_engine).
    size_t size;
    // The library calls it for each piece of the engine's work, in the order of enqueueing.
    fb_enqueue enqueue;
    // The first argument of every call.
    void *data;
} fb_engine;

// A step between prepare and retire, as its number. A cache never gives a number twice; 0 is no step.
typedef uint64_t fb_step;

// A table of orders: the overlap order of each layer. This struct never grows.
typedef struct fb_table {
    // Rises whenever the orders change.
    uint32_t version;
    // Layers, draft layers included.
    uint32_t layers;
    // FB_OVERLAP_ orders, one for each layer, draft layers last.
    const uint32_t *orders;
} fb_table;

// The price of each order: the nanoseconds by which it makes a layer longer, for each number of misses per batch row.
// The baseline is the same layer without misses and without the costs of any order. So a price includes the order's
// own costs (split attention, merge). A draft layer's price is the sum over its draft passes of a step. The price of a
// layer's order is the layer's exposed time: the time of the gather and of these costs that nothing hides. This struct
// never grows.
typedef struct fb_prices {
    // Numbers of misses per batch row, ascending from 0.
    const double *misses;
    // The number of entries in `misses`.
    uint32_t miss_count;
    // The number of layers in `exposed`: all layers, or 1 if all layers have the same prices. Where layers share a
    // selection, all layers.
    uint32_t layers;
    // Nanoseconds, `[layers][orders][miss_count]`, the orders by their FB_OVERLAP_ numbers, finite and not negative. A
    // layer that cannot run in an order has -1 in all of that order's entries: FB_OVERLAP_AHEAD in a layer that
    // selects for itself, FB_OVERLAP_DBA in the others.
    const double *exposed;
    // The number of orders in `exposed`: 3, or 4 with FB_OVERLAP_AHEAD.
    uint32_t orders;
    // Must be 0.
    uint32_t reserved;
} fb_prices;

// A captured batch size. This struct never grows.
typedef struct fb_bucket {
    // The batch rows that it was captured for.
    uint32_t batch;
    // The number of tables of orders that are captured at the start.
    uint32_t table_count;
    // These tables of orders. The chooser starts with the first one.
    const struct fb_table *tables;
    // The price of each order at this batch size.
    struct fb_prices prices;
} fb_bucket;

// The conditions under which a chooser changes to another table of orders.
typedef struct fb_hysteresis {
    // sizeof(fb_hysteresis).
    size_t size;
    // The weight of a new step's misses in the running average, above 0 and at most 1.
    double smoothing;
    // The fraction of the exposed time, over all layers (fb_prices), that another table of orders must save, 0 to 1.
    double share;
    // The nanoseconds per step that it must save as well.
    double least_ns;
    // The number of consecutive steps in which it must save both, at least 1.
    uint32_t steps;
    // Must be 0.
    uint32_t reserved;
} fb_hysteresis;

// The configuration of a chooser.
typedef struct fb_chooser_config {
    // sizeof(fb_chooser_config).
    size_t size;
    // The captured batch sizes, ascending.
    const struct fb_bucket *buckets;
    // The number of buckets.
    uint32_t bucket_count;
    // The most tables of orders of one bucket that may be captured at the same time.
    uint32_t tables_max;
    // Optional: when the chooser changes to another table of orders. Default: when it saves a tenth of the exposed
    // time and 50 us per step, in 32 consecutive steps, with a `smoothing` of 0.1.
    const struct fb_hysteresis *hysteresis;
} fb_chooser_config;

// Hits and misses of one layer in one step, over all batch rows. This struct never grows.
typedef struct fb_layer_count {
    // Distinct selected rows that were resident.
    uint32_t hits;
    // Rows fetched.
    uint32_t misses;
    // Misses whose rows were fetched into scratch slots.
    uint32_t scratch;
} fb_layer_count;

// What the next step runs.
typedef struct fb_choice {
    // sizeof(fb_choice), set by the caller.
    size_t size;
    // The index of the bucket.
    uint32_t bucket;
    // The index of the table of orders in that bucket: see fb_chooser_table.
    uint32_t index;
    // The version of that table of orders.
    uint32_t version;
    // 1 if this call has changed that table of orders: capture it again before you launch it.
    uint32_t changed;
} fb_choice;

// Layers of a dense model with the same rows and the same kind of attention. They share page tables. This struct never
// grows.
typedef struct fb_dense_group {
    // The model's layer numbers, ascending. Each layer, from 0 on, is in exactly one group.
    const uint32_t *layers;
    // The number of layers.
    uint32_t layer_count;
    // Tokens that a query reads, itself included, in layers with a sliding window; 0: all tokens before it.
    uint32_t window;
    // Bytes of a token's K and of its V in one layer: multiples of 16, at most 1 MiB each. An MLA latent is one run:
    // its bytes and 0. On a rank of tensor parallelism these are the bytes of the rank's own heads.
    uint32_t row_bytes[2];
} fb_dense_group;

// The configuration of a dense cache. An optional field that is 0 gets the default that its comment names.
typedef struct fb_dense_config {
    // sizeof(fb_dense_config).
    size_t size;
    // The groups of layers. fb_dense_preset fills them in for published models.
    struct fb_dense_group groups[FB_DENSE_GROUPS_MAX];
    // The number of groups.
    uint32_t group_count;
    // Tokens of a page: 16, 32, 64, 128 or 256. Kernels take some of them only.
    uint32_t page_tokens;
    // The most sequences that may be open at once.
    uint32_t sequences;
    // Tokens of the longest sequence: prompt plus promised tokens.
    uint32_t max_tokens;
    // Optional: how pages lie in device memory, FB_DENSE_LAYER_FIRST or FB_DENSE_PAGE_FIRST. Default:
    // FB_DENSE_LAYER_FIRST.
    uint32_t layout;
    // Optional: where K and V are, FB_DENSE_RUNS_APART or FB_DENSE_RUNS_TOGETHER. Default: FB_DENSE_RUNS_APART.
    uint32_t runs;
    // Optional: the integers of slots and positions, FB_DENSE_I64 or FB_DENSE_I32. Default: FB_DENSE_I64.
    uint32_t width;
    // Optional: when a published page is copied to the host's tier, FB_DENSE_SAVE_PUBLISHED or FB_DENSE_SAVE_EVICTED.
    // Default: FB_DENSE_SAVE_PUBLISHED.
    uint32_t save;
    // Optional: device pages of each group, its null page included: page 0, which is zeros and belongs to no sequence.
    // Default: as many as fb_dense_pages_for returns for `sequences` and `max_tokens`.
    uint32_t device_pages[FB_DENSE_GROUPS_MAX];
    // Optional: host pages of each group: the second tier, which keeps published pages that the device has no room
    // for, and the rows of parked sequences. Default: no such tier; then fb_dense_park always returns FB_EXHAUSTED.
    uint32_t host_pages[FB_DENSE_GROUPS_MAX];
    // Optional: the most batch rows of a step. Default: `sequences`, at most 32,767.
    uint32_t batch;
    // Optional: the most query rows of a step, of all batch rows together: at least `batch` x `query_rows` (vLLM:
    // max_num_batched_tokens). Default: 2048, or `batch` x `query_rows` if that is more.
    uint32_t step_tokens;
    // Optional: query rows that a decoding sequence may have in a step: 1 + drafts. A batch row with more is a chunk
    // of a prompt, and none of its rows can be rejected. Default: 1.
    uint32_t query_rows;
    // Optional: the most steps of one sequence in flight. Default: 2.
    uint32_t steps_in_flight;
    // Optional: micro-batches that may each have a step open at the same time. Default: 1.
    uint32_t micro_batches;
    // Optional: FB_MEMORY_ flags for the host's tier; FB_MEMORY_UNLOCKED also for the page tables and step
    // descriptors, and FB_MEMORY_OVERCOMMIT for all host memory. Default: huge pages, allocated at creation and
    // locked. fb_dense_fallback names each of these options that the system refused.
    uint32_t memory;
    // Optional: the NUMA node of the host's tier, plus 1. Default: any node.
    uint32_t numa_node;
    // Optional: layers whose pages come back from the host together. A step may then compute its first layers while
    // the pages of later ones still come: it must call fb_dense_arrived before it writes a layer's new rows.
    // Default: all layers, for which fb_dense_prepare waits. Not with FB_DENSE_PAGE_FIRST, where a page comes back in
    // one piece.
    uint32_t bring_layers;
} fb_dense_config;

// Statistics of a dense cache. A gauge describes the present; a counter only grows. Arrays have a number for each
// group, 0 for groups that there are not.
typedef struct fb_dense_cache_stats {
    // sizeof(fb_dense_cache_stats), set by the caller.
    size_t size;
    // Gauge: sequences that are open, and closed ones that are not released yet (fb_dense_reap).
    uint32_t sequences;
    // Gauge: sequences that may still be opened, as far as pages allow.
    uint32_t free_sequences;
    // Gauge: steps between prepare and retire.
    uint32_t steps_in_flight;
    // Gauge: parked sequences, which `sequences` counts too.
    uint32_t parked;
    // Gauge: device pages that a sequence may still take, or, with a sliding window, be promised. Unused published
    // pages count: admission can evict and reuse them.
    uint32_t free_pages[FB_DENSE_GROUPS_MAX];
    // Gauge: published pages on the device.
    uint32_t published[FB_DENSE_GROUPS_MAX];
    // Gauge: those of them that no sequence uses.
    uint32_t unused[FB_DENSE_GROUPS_MAX];
    // Gauge: published pages in the host's tier, whether or not they are on the device too.
    uint32_t saved[FB_DENSE_GROUPS_MAX];
    // Gauge: free pages of the host's tier.
    uint32_t free_host_pages[FB_DENSE_GROUPS_MAX];
    // Gauge: pages of the host's tier that parked sequences have for themselves: those of them that are not published.
    uint32_t parked_pages[FB_DENSE_GROUPS_MAX];
    // Counter: bytes of pages that were copied to the host's tier.
    uint64_t bytes_down;
    // Counter: bytes of pages that came back from it.
    uint64_t bytes_up;
    // Counter: steps retired.
    uint64_t steps;
    // Gauge: arriving sequences (fb_dense_arrive), which `sequences` counts too.
    uint32_t arriving;
    // Gauge: pages, of the device and of the host, that are withheld after an abort (fb_dense_abort).
    uint32_t withheld_pages;
} fb_dense_cache_stats;

// A plane of a group: device memory with one piece of every page. Page `p` begins at byte `p * page_bytes`. This
// struct never grows.
typedef struct fb_dense_plane {
    // The device memory.
    void *address;
    // Bytes of the device memory: `page_bytes` for each of the group's device pages.
    uint64_t bytes;
    // Bytes of the piece, and from one page of the plane to the next.
    uint64_t page_bytes;
    // The layer, or FB_DENSE_ALL: all layers of the group, one after the other.
    uint32_t layer;
    // The run: 0 for K, 1 for V, or FB_DENSE_ALL: both, or the only one.
    uint32_t run;
} fb_dense_plane;

// Where one run of one layer is. Row `t` of page `p` begins at byte `p * stride + t * row_bytes` of `address`.
typedef struct fb_dense_layer_view {
    // sizeof(fb_dense_layer_view), set by the caller.
    size_t size;
    // The run's first row in page 0, on the device.
    void *address;
    // Bytes from one page to the next.
    uint64_t stride;
    // Bytes of a row: a token's K, V or latent.
    uint64_t row_bytes;
    // Device pages of the group, the null page included.
    uint32_t pages;
    // The layer's group.
    uint32_t group;
} fb_dense_layer_view;

// What attention kernels read in the steps of one micro-batch: tensors in device memory, at addresses that never
// change. Arrays have an address for each group, NULL for groups that there are not.
typedef struct fb_dense_step_tensors {
    // sizeof(fb_dense_step_tensors), set by the caller.
    size_t size;
    // Page tables, int32_t `[batch][blocks]` (vLLM: block_table). Entries beyond a sequence's pages have no meaning.
    void *tables[FB_DENSE_GROUPS_MAX];
    // Where the new rows go, `[step_tokens]` of `integer_bytes`: page * page_tokens + token (vLLM: slot_mapping). -1
    // beyond the step's rows.
    void *slots[FB_DENSE_GROUPS_MAX];
    // The position of each new row, `[step_tokens]` of `integer_bytes`. 0 beyond the step's rows.
    void *positions;
    // Tokens of each batch row's sequence, new rows included, int32_t `[batch]` (vLLM: seq_lens). 0 beyond the step's
    // batch rows.
    void *lengths;
    // Where the new rows of each batch row begin, int32_t `[batch + 1]` (vLLM: query_start_loc).
    void *starts;
    // The most batch rows of a step.
    uint32_t batch;
    // The most query rows of a step.
    uint32_t step_tokens;
    // Entries of a page table: pages of the longest sequence with its rows in flight.
    uint32_t blocks;
    // Bytes of a slot and of a position: 8 or 4 (`width` of fb_dense_config).
    uint32_t integer_bytes;
} fb_dense_step_tensors;

// How much of a prompt a dense cache has.
typedef struct fb_dense_found {
    // sizeof(fb_dense_found), set by the caller.
    size_t size;
    // Leading tokens whose pages are published and in a tier, in whole pages.
    uint32_t tokens;
    // Tokens of those of these pages that are in the host's tier alone in some group, and have to come back.
    uint32_t host_tokens;
} fb_dense_found;

// A host page of a sequence that arrives. This struct never grows.
typedef struct fb_dense_host_page {
    // The page's block of the sequence: it has the rows of positions from `block * page_tokens` on.
    uint32_t block;
    // The number of the page in the host's tier (fb_dense_host_view).
    uint32_t page;
} fb_dense_host_page;

// The bytes that a dense cache takes, by purpose.
typedef struct fb_dense_cache_footprint {
    // sizeof(fb_dense_cache_footprint), set by the caller.
    size_t size;
    // Device: the pages of all groups, the null pages included.
    uint64_t pages;
    // Device: the page tables of the steps' batch rows, and two words for each sequence.
    uint64_t tables;
    // Device: the other tensors of steps: slots, positions, lengths and starts.
    uint64_t tensors;
    // Device: the GPU's own page tables for the registered host memory, 8 bytes for each 4 KiB. A host device has
    // none.
    uint64_t host_page_tables;
    // Host: the page tables of all sequences, pinned.
    uint64_t host_tables;
    // Host: the pinned ring of step descriptors and reports.
    uint64_t step_descriptors;
    // Host: the pages of the host's tier, pinned.
    uint64_t host_pages;
} fb_dense_cache_footprint;

// The lengths of a sequence of a dense cache.
typedef struct fb_dense_sequence_length {
    // sizeof(fb_dense_sequence_length), set by the caller.
    size_t size;
    // Committed tokens, as far as the host can see from retired steps.
    uint32_t committed;
    // Rows that the last retired step wrote after the committed ones and that are neither accepted nor rejected yet.
    uint32_t landed;
    // Tokens of the sequence's published pages. The next fb_dense_publish starts after them.
    uint32_t published;
    // 1 if the sequence is arriving (fb_dense_arrive): it has pages, and takes part in no step. Otherwise 0.
    uint32_t arriving;
    // Prompt rows that every layer has, while the sequence is arriving; otherwise `committed`.
    uint32_t filled;
    // Always 0.
    uint32_t reserved;
} fb_dense_sequence_length;

// One batch row of a step: a sequence and its query rows. This struct never grows.
typedef struct fb_batch_row {
    // The sequence.
    uint64_t sequence;
    // How many rows of the sequence's previous step were accepted, or FB_ACCEPTED_ON_DEVICE. 0 if there was no step
    // since the join, the fork or the last fb_truncate; in a dense cache, since the opening, the fork or the last
    // fb_dense_truncate.
    uint32_t accepted;
    // The sequence's query rows in this step, at most the step's `query_rows`. In a dense cache more than the cache's
    // `query_rows` are a chunk of a prompt.
    uint32_t query_rows;
} fb_batch_row;

// The batch rows and the layer of a step that a call works on.
typedef struct fb_step_range {
    // sizeof(fb_step_range).
    size_t size;
    // The layer.
    uint32_t layer;
    // Optional: the first batch row. Default: 0.
    uint32_t first;
    // Optional: the number of batch rows. Default: all from `first` on.
    uint32_t count;
    // Optional: FB_ALL_QUERY_ROWS, or j + 1 for draft pass j, counted from 0: the call then works on query row j of
    // each batch row only.
    uint32_t draft_pass;
} fb_step_range;

// The device buffers of a resolve. They must not overlap.
typedef struct fb_buffers {
    // sizeof(fb_buffers).
    size_t size;
    // The selection (top-k indices): token positions, -1 for none, `[batch rows][query rows][top_k]` of the call's
    // range.
    const int32_t *selection;
    // Receives the slots of these positions in the layer's slab, in the same shape, -1 for none.
    int32_t *slots;
    // Optional: receives the slots again as the index lists of split attention, `[1 + attention_waves][batch][query
    // rows][top_k]`. The batch rows are the step's, also in a call for a part of them, which writes only its own; the
    // query rows are those of the call's range. Index list 0 has the rows that were resident and those that this step
    // writes, index list 1 + w the rows that attention wave w fetches.
    int32_t *lists;
    // Receives the number of valid slots in each index list, `[1 + attention_waves][batch][query rows]` as in `lists`;
    // NULL without index lists.
    uint32_t *counts;
    // Batch rows of each index list, at least the step's; 0 without index lists.
    uint32_t batch;
    // Must be 0.
    uint32_t reserved;
} fb_buffers;

// Where the ranks of a group meet, and their times. An optional field that is 0 gets the default that its comment
// names.
typedef struct fb_links_config {
    // sizeof(fb_links_config).
    size_t size;
    // A folder that all ranks of the host can write.
    const char *folder;
    // Optional: a digest of what the checkpoint is at the group's start, such as the hashes of its files. Ranks with
    // different ones refuse each other. Checkpoints of one shape are told apart by this alone. It stays the same as
    // long as the group lives, also for a rank that comes back and after new weights were committed. Default: zeros.
    uint8_t geometry[32];
    // Optional: how long to wait for all ranks, in milliseconds. Ranks fill their weights before they meet. Default:
    // 10 minutes.
    uint32_t hello_ms;
    // Optional: after how long without a message a rank says that it is alive. Default: 1 second.
    uint32_t interval_ms;
    // Optional: after how long without a sign of life a rank counts as lost; at least two intervals. Default: 10
    // seconds.
    uint32_t lost_ms;
    // Optional: the most bytes that wait to be sent to one rank, at least 65,536. Default: 1 MiB.
    uint32_t queue_bytes;
} fb_links_config;

// What another rank did.
typedef struct fb_links_event {
    // sizeof(fb_links_event), set by the caller.
    size_t size;
    // An FB_LINKS_ constant.
    uint32_t kind;
    // The rank; 0 for FB_LINKS_NOTHING.
    uint32_t rank;
    // For FB_LINKS_LOST: the fb_status of the error. Otherwise 0.
    uint32_t status;
    // 1 when every session has ended or was lost: no further event comes.
    uint32_t is_over;
} fb_links_event;

// The question for the planner. All byte counts are per GPU; those of host memory are of the part that belongs to this
// GPU. An optional field that is 0 gets the default that its comment names.
typedef struct fb_plan_config {
    // sizeof(fb_plan_config).
    size_t size;
    // The model. The planner reads only the fields that fb_preset fills, and refuses a `selects_by_layer`.
    const struct fb_cache_config *model;
    // Bytes of the GPU's memory.
    uint64_t gpu;
    // Tokens of a sequence at its end: prompt plus promised tokens.
    uint32_t context;
    // Optional: sequences on the GPU at the same time. Default: as many as fit.
    uint32_t batch;
    // Optional: slots as a fraction of the context, above 0 and at most 1. Default: the largest ratio that fits; if
    // `batch` is 0, the ratio that gives each sequence `least_slots` slots in a layer, or its whole context if that is
    // less.
    double ratio;
    // Optional: bytes of weights on the GPU. Default: 0.
    uint64_t weights;
    // Optional: bytes of activations. Default: 0.
    uint64_t activations;
    // Optional: bytes that the engine takes for anything else. Default: 0.
    uint64_t workspace;
    // Optional: bytes of host memory for the total pool. Default: as many as the plan needs.
    uint64_t host;
    // Optional: bytes of the device's mapping granularity. Default: 2 MiB.
    uint64_t grain;
    // Optional: tokens of the longest sequence that the model supports. Default: not checked.
    uint32_t longest;
    // Optional: query rows of a step. Default: 1.
    uint32_t query_rows;
    // Optional: the most steps of one sequence in flight. Default: 2.
    uint32_t steps_in_flight;
    // Optional: micro-batches of the batch. Default: 1.
    uint32_t micro_batches;
    // Optional: the fewest slots of a sequence when the plan fits as many sequences as possible. Default: 6400.
    uint32_t least_slots;
    // Optional: 1 leaves `table_bytes` and `host_page_table_bytes` of fb_planned out of the sum that has to fit. The
    // plan reports them all the same.
    uint32_t tables_beside;
} fb_plan_config;

// The result of the planner.
typedef struct fb_planned {
    // sizeof(fb_planned), set by the caller.
    size_t size;
    // The number of sequences.
    uint32_t batch;
    // Slots of each sequence in each layer.
    uint32_t slots;
    // Slots as a fraction of the context.
    double ratio;
    // 1 if rows are in host memory; 0 if all rows stay on the device.
    uint32_t offloads;
    // FB_NOTE_ bits.
    uint32_t notes;
    // The largest batch with all rows on the device.
    uint32_t resident_batch;
    // The largest batch with `least_slots` slots for each sequence, or `resident_batch` if that is more.
    uint32_t most_batch;
    // Bytes of the GPU that remain after weights, activations and workspace.
    uint64_t available;
    // The most tokens, of all open sequences together, whose index keys fit in `available` if no row takes any of it;
    // 0 for a model without index keys.
    uint64_t live_tokens;
    // Device: bytes of index keys.
    uint64_t index_key_bytes;
    // Device: bytes of the slots for the budgets of all sequences.
    uint64_t slot_bytes;
    // Device: bytes of landing slots.
    uint64_t landing_bytes;
    // Device: bytes of scratch slots.
    uint64_t scratch_bytes;
    // Device: bytes that whole mappings leave unused.
    uint64_t padding_bytes;
    // Device: bytes of residency tables, page tables, lists of fetches, the device's copies of step descriptors, and
    // the working memory of resolves.
    uint64_t table_bytes;
    // Pinned host memory: bytes of rows.
    uint64_t row_bytes;
    // Pinned host memory: bytes of step descriptors.
    uint64_t step_descriptor_bytes;
    // For fb_cache_config: pages of the total pool; 0 without offload.
    uint32_t host_pages;
    // For fb_cache_config: pages of index keys; 0 without offload.
    uint32_t index_pages;
    // For fb_cache_config: slots of each layer's pool; 0 without offload.
    uint32_t pool_slots;
    // For fb_cache_config: batch rows of one micro-batch; 0 without offload.
    uint32_t batch_rows;
    // Device: bytes of the GPU's own page tables, which the driver takes so that the GPU can reach pinned host memory.
    uint64_t host_page_table_bytes;
} fb_planned;

// Who this end is, how it meets the other ones, and its times. An optional field that is 0 gets the default that its
// comment names.
typedef struct fb_transfer_config {
    // sizeof(fb_transfer_config).
    size_t size;
    // This rank's instance: a number that its ranks share, and that no other instance has. An instance that starts
    // again has another one.
    uint64_t instance;
    // What carries frames and rows, FB_TRANSFER_TCP or FB_TRANSFER_SHM.
    uint32_t fabric;
    // This rank's replica, below `replicas` of the side.
    uint32_t replica;
    // Its stage.
    uint32_t stage;
    // Its place in the stage, below `width`.
    uint32_t lane;
    // Receivers: where it listens: an IP address and a port, such as "127.0.0.1:7000", or the path of a Unix socket.
    // Of port 0 the system chooses the port. Senders: NULL.
    const char *address;
    // Optional: a secret that both sides have, of at least 16 random bytes. NULL: none; then only addresses of this
    // host are taken. It says who opens a connection, and hides nothing: on a network use a tunnel.
    const uint8_t *token;
    // The bytes of `token`.
    size_t token_bytes;
    // Optional: after how long without another byte to send a sign of life is sent, in milliseconds. Default: 1
    // second.
    uint32_t alive_ms;
    // Optional: after how long without a byte from the other end a connection is lost; more than the other end's
    // `alive_ms`. Default: 10 seconds.
    uint32_t lost_ms;
    // Optional: how long an opening may take. Default: 5 seconds.
    uint32_t opening_ms;
    // Optional: after how long a message that was not answered is sent again, each time after twice as long. Default:
    // 200 milliseconds.
    uint32_t resend_ms;
    // Optional: after how long a connection is closed on which nothing comes, although something is owed. Default: 5
    // seconds.
    uint32_t patience_ms;
    // Optional: the most open connections. Default: 1024.
    uint32_t links;
    // Optional: the most bytes that wait to be sent on a connection, rows included; one frame with its rows may be
    // longer. Default: 4 MiB.
    uint32_t queue_bytes;
    // Optional: receivers: the most bytes of rows behind a frame over TCP, above `notice_bytes` of every sender.
    // Default: 64 MiB.
    uint32_t rows_max;
    // Optional: the most requests at a time. Default: 4096.
    uint32_t requests;
    // Optional: senders: the most bytes of rows that one notice tells, if they are more than one token's. Default: 32
    // MiB.
    uint32_t notice_bytes;
    // Optional: senders: prompts of at most so many tokens are told at once when they are finished, longer ones layer
    // by layer. Default: 256.
    uint32_t bulk_tokens;
    // Must be 0.
    uint32_t reserved;
    // Optional: senders: the most bytes of rows a second that are told for the first time. Default: no limit.
    uint64_t bytes_per_second;
} fb_transfer_config;

// What every token has under one name in a layer: latents, rope keys, index keys, K or V.
typedef struct fb_transfer_component {
    // The name in UTF-8, at most 64 bytes, which both sides use.
    const char *name;
    // The type of the numbers in UTF-8, at most 64 bytes, which both sides call the same. Rows are never converted.
    const char *dtype;
    // KV heads of the model; 1 for what all heads share, such as MLA's latents and index keys.
    uint32_t heads;
    // Bytes of one head of a token.
    uint32_t head_bytes;
} fb_transfer_component;

// Where a component of a layer is in the pages of a rank: head `h` of the rank's own heads of the page's token `t` is
// at byte `offset` + `t` * `token_stride` + `h` * `head_stride` of the page.
typedef struct fb_transfer_place {
    // The pipeline stage that has the layer.
    uint32_t stage;
    // The layer's number in the model, draft layers included. A layer is in one stage.
    uint32_t layer;
    // The component, by its place in `components`.
    uint32_t component;
    // The plane, by its place among those of the stage.
    uint32_t plane;
    // The first byte of the page's first token.
    uint64_t offset;
    // Bytes from a token to the next one.
    uint64_t token_stride;
    // Bytes from a head to the next one.
    uint64_t head_stride;
} fb_transfer_place;

// Where an instance keeps the rows of a request. A plane is a list of pages; a page is one number in all planes of a
// rank. All ranks of an instance pass the same.
typedef struct fb_transfer_side {
    // sizeof(fb_transfer_side).
    size_t size;
    // What tokens have. The other side may list it in another order.
    const struct fb_transfer_component *components;
    // Where it is, in any order.
    const struct fb_transfer_place *places;
    // For each plane the bytes of a page: first the planes of stage 0.
    const uint64_t *page_bytes;
    // Optional: for each stage the number of its planes. NULL: there is one stage, which has all.
    const uint32_t *stage_planes;
    // The number of components, at most 64.
    uint32_t component_count;
    // The number of places, at most 16,384.
    uint32_t place_count;
    // The number of planes of all stages together, at most 16,384.
    uint32_t plane_count;
    // Tokens of a page, at most 65,536.
    uint32_t page_tokens;
    // Optional: pipeline stages, at most 1,024. Default: 1.
    uint32_t stages;
    // Optional: ranks of a stage. Default: 1.
    uint32_t width;
    // Optional: how they divide a request, FB_TRANSFER_SPLIT_HEADS or FB_TRANSFER_SPLIT_TOKENS. Default:
    // FB_TRANSFER_SPLIT_HEADS.
    uint32_t split;
    // Optional: independent copies of all of this, each with requests of its own (data parallel attention). Default:
    // 1.
    uint32_t replicas;
} fb_transfer_side;

// The pages of a plane, in the engine's own memory.
typedef struct fb_receive_plane {
    // Page 0.
    void *address;
    // The bytes of all pages.
    uint64_t bytes;
    // Bytes from a page to the next one, at least the side's `page_bytes` of the plane.
    uint64_t page_bytes;
} fb_receive_plane;

// A request that is wanted, and a use of pages for it.
typedef struct fb_wanted {
    // sizeof(fb_wanted).
    size_t size;
    // The number of this try at the request, as the sender has it in fb_sender_begin.
    uint64_t request;
    // With `request` the name of the use; above the generations of all grants before.
    uint64_t generation;
    // The sending instance.
    uint64_t instance;
    // Its replica that has the request.
    uint32_t replica;
    // Tokens of the prompt.
    uint32_t tokens;
    // Optional: the first token that is wanted: the receiver has the rows before it, and these are not written.
    // Default: 0.
    uint32_t first;
    // Optional: the milliseconds after which it fails, if it is not whole by then. Default: it may take any time.
    uint32_t within_ms;
    // Optional: the kinds of the payloads that belong to it, each once.
    const uint8_t *payloads;
    // The number of kinds, at most 256.
    uint32_t payload_count;
    // Must be 0.
    uint32_t reserved;
} fb_wanted;

// What has happened at an end. A field that the kind's comment does not name is 0.
typedef struct fb_transfer_event {
    // sizeof(fb_transfer_event), set by the caller.
    size_t size;
    // An FB_TRANSFER_ constant.
    uint32_t kind;
    // The fb_status of the event's error, FB_OK where there is none.
    uint32_t status;
    // The request.
    uint64_t request;
    // With `request` the use of pages, of the events of a receiver and of FB_TRANSFER_GRANTED.
    uint64_t generation;
    // FB_TRANSFER_RELEASED: where the rows are.
    uint64_t origin;
    // FB_TRANSFER_MET: the rank.
    uint64_t instance;
    // Its replica.
    uint32_t replica;
    // Its stage.
    uint32_t stage;
    // Its lane.
    uint32_t lane;
    // The connection's number, of FB_TRANSFER_MET, FB_TRANSFER_CONNECTED, FB_TRANSFER_LOST and FB_TRANSFER_GRANTED.
    uint32_t link;
    // FB_TRANSFER_READY: the layer's number in the model.
    uint32_t layer;
    // FB_TRANSFER_GRANTED: the first token that is wanted.
    uint32_t first;
    // FB_TRANSFER_PAYLOAD: its kind.
    uint32_t payload;
    // FB_TRANSFER_PAYLOAD: its bytes.
    uint32_t payload_bytes;
    // 1 if `request` names a request.
    uint32_t is_of_request;
    // 0.
    uint32_t reserved;
} fb_transfer_event;

// What a receiver has seen since its creation.
typedef struct fb_received {
    // sizeof(fb_received), set by the caller.
    size_t size;
    // Uses that became whole.
    uint64_t whole;
    // Uses that failed or were aborted.
    uint64_t failed;
    // Runs of bytes that were stored.
    uint64_t runs;
    // Their bytes.
    uint64_t bytes;
    // Runs that arrived with other bytes than their digests say, or could not be read.
    uint64_t wrong;
} fb_received;

// A copy of a tensor of a sharded layer, on a rank that does not own all of it. This struct never grows.
typedef struct fb_replica {
    // The tensor's name in UTF-8.
    const char *tensor;
    // Its layer.
    uint32_t layer;
    // The rank that holds the copy, below `ranks` of the configuration.
    uint32_t rank;
} fb_replica;

// A request at its arrival.
typedef struct fb_arrival {
    // sizeof(fb_arrival).
    size_t size;
    // The arrival, in milliseconds since the start of the recording.
    uint64_t milliseconds;
    // Tokens of the prompt.
    uint32_t input_tokens;
    // Generated tokens; 0 if the number is not known when the request is recorded.
    uint32_t output_tokens;
    // Ids of the prompt's blocks of `block_tokens` tokens (fb_requests_create), from the beginning of the prompt; the
    // last block may be partial. An id identifies the block and everything before it.
    const uint64_t *blocks;
    // The number of block ids.
    size_t block_count;
} fb_arrival;

// Launches a graph that contains a captured step, on `stream`. It returns 0 for success; any other value, normally an
// fb_status, becomes the result of fb_weights_launch. Calls on the weights, even const ones, return FB_BUSY inside it.
typedef uint32_t (*fb_launch_graph)(void *data, void *stream);

// The numbers in a trace's header.
typedef struct fb_trace_header {
    // sizeof(fb_trace_header), set by the caller.
    size_t size;
    // The number of recorded layers.
    uint32_t layers;
    // Positions that one query selects. It selects fewer while the context is shorter.
    uint32_t k;
    // The number of steps, those of the prompt included. In a trace a step is one recorded position.
    uint32_t steps;
    // The number of leading steps that belong to the prompt.
    uint32_t warm_steps;
    // The position of the query of step 0.
    uint32_t first_position;
    // The position of the first decode step.
    uint32_t decode_start;
    // Tokens of the context.
    uint32_t context;
    // 1 for a recording that was not finished.
    uint32_t unfinished;
    // In an unfinished recording: the bytes after its last complete group of steps, which the reader dropped.
    uint64_t left_off_bytes;
    // The number of selected positions in all steps and layers together.
    uint64_t members;
} fb_trace_header;

// Where the pages of a plane are in a sender's memory.
typedef struct fb_send_plane {
    // Bytes from an origin to the plane's page 0.
    uint64_t offset;
    // Bytes from a page to the next one, at least the side's `page_bytes` of the plane.
    uint64_t page_bytes;
} fb_send_plane;

// The memory of a sender, which the library makes. The rows of a part begin at an origin, which is a byte of it: page
// `p` of plane `i` is at `origin` + `planes[i].offset` + `p` * `planes[i].page_bytes`.
typedef struct fb_send_memory {
    // sizeof(fb_send_memory).
    size_t size;
    // Its bytes, rounded up to whole pages of the system.
    uint64_t bytes;
    // The planes of this rank's stage, in the order of the side.
    const struct fb_send_plane *planes;
    // Their number.
    uint32_t plane_count;
    // Optional: FB_MEMORY_ flags without FB_MEMORY_OVERCOMMIT. Default: reserved huge pages, allocated at creation and
    // locked. fb_sender_fallback names each of these options that the system refused.
    uint32_t memory;
    // Optional: 1 + the NUMA node that has the memory. Default: any.
    uint32_t numa_node;
    // Must be 0.
    uint32_t reserved;
} fb_send_memory;

// Rows of one layer of a request that are computed and written.
typedef struct fb_computed {
    // sizeof(fb_computed), the same in all entries of an array.
    size_t size;
    // The request.
    uint64_t request;
    // Where the rows are: a byte of the sender's memory.
    uint64_t origin;
    // The layer's number in the model.
    uint32_t layer;
    // The first token.
    uint32_t first;
    // How many tokens.
    uint32_t tokens;
    // Optional: of a sender that divides requests by tokens (FB_TRANSFER_SPLIT_TOKENS), tokens of the chunk's batch
    // that each rank has, padding included. Otherwise 0.
    uint32_t chunk_slice;
    // With `chunk_slice`: the chunk's first token in its request.
    uint32_t chunk_first;
    // With `chunk_slice`: the place of that token among the tokens of the batch.
    uint32_t chunk_at;
} fb_computed;

// What a sender has seen since its creation.
typedef struct fb_sent {
    // sizeof(fb_sent), set by the caller.
    size_t size;
    // Requests that have ended with all rows at their receivers.
    uint64_t done;
    // Requests that have ended otherwise.
    uint64_t failed;
    // Parts whose rows are held: computed, and not yet released.
    uint64_t held;
    // Runs of bytes that were told, each as often as it was told.
    uint64_t runs;
    // Runs that were told again because they had arrived with other bytes.
    uint64_t again;
    // Messages that were sent again because no answer came in time.
    uint64_t repeats;
    // Nanoseconds of all requests that were done, from when all was computed until the receivers had it: the part of
    // transfers that computation does not hide.
    uint64_t exposed_ns;
    // The longest of them.
    uint64_t exposed_longest_ns;
} fb_sent;

// How long rows of a layer were held: from when they were computed until their memory was free again.
typedef struct fb_lag {
    // sizeof(fb_lag), set by the caller.
    size_t size;
    // Parts that were released.
    uint64_t count;
    // Nanoseconds of all of them.
    uint64_t total_ns;
    // The longest.
    uint64_t longest_ns;
} fb_lag;

// What a step decodes.
typedef struct fb_step_config {
    // sizeof(fb_step_config).
    size_t size;
    // The batch rows. The call reads them before it returns.
    const struct fb_batch_row *rows;
    // The number of batch rows.
    uint32_t row_count;
    // The width of the step: the most query rows of a batch row.
    uint32_t query_rows;
    // Optional: accepted rows on the device, one uint32_t for each of the cache's `batch` rows. The device reads them
    // in the stream's order.
    const uint32_t *accepted;
    // Optional: the micro-batch of the step. Default: 0.
    uint32_t micro_batch;
    // Must be 0.
    uint32_t reserved;
} fb_step_config;

// What a step did.
typedef struct fb_retired {
    // sizeof(fb_retired), set by the caller.
    size_t size;
    // The step's count in its cache, from 1. It is not the fb_step that fb_prepare returned.
    uint64_t step;
    // Distinct selected rows that were resident, all layers.
    uint64_t hits;
    // Rows fetched, all layers.
    uint64_t misses;
} fb_retired;

// The description of a recording. The file stores the steps in groups: a group is written when it has `group_steps`
// steps or `group_bytes` bytes. An optional field that is 0 or NULL gets the default that its comment names. Strings
// are UTF-8; readers only display them.
typedef struct fb_trace_config {
    // sizeof(fb_trace_config).
    size_t size;
    // The number of recorded layers.
    uint32_t layers;
    // Positions that one query selects. It selects fewer while the context is shorter.
    uint32_t k;
    // The position of the query of the first recorded step.
    uint32_t first_position;
    // The position of the first decode step. Earlier steps belong to the prompt.
    uint32_t decode_start;
    // Optional: tokens of the longest context. Default: as many as were recorded.
    uint32_t context;
    // Optional: the most steps of a group that is written at once. Default: 64.
    uint32_t group_steps;
    // Optional: a group is written as soon as it has this many bytes. Default: 262144.
    uint32_t group_bytes;
    // Must be 0.
    uint32_t reserved;
    // Optional: the model's own numbers of the recorded layers, `layers` of them, ascending. Default: 0, 1, 2 and so
    // on.
    const uint32_t *layer_ids;
    // Optional: for each layer the index, from 0, of the layer whose selection it uses, or its own index if it
    // selects for itself. Default: every layer selects for itself.
    const uint32_t *shares;
    // Optional: a short name of the recording.
    const char *label;
    // Optional: the model that runs.
    const char *model;
    // Optional: the model's architecture.
    const char *arch;
    // Optional: the score by which the selector ranks positions.
    const char *score;
    // Optional: how the steps are produced.
    const char *mode;
    // Optional: a description of what the model reads.
    const char *text;
} fb_trace_config;

// One named byte range of a layer's weights, as the engine uses it.
typedef struct fb_tensor {
    // sizeof(fb_tensor), the same in all entries of an array.
    size_t size;
    // The engine's name in UTF-8, by which patterns choose the tensor; unique in its layer.
    const char *name;
    // Its length in bytes, above 0.
    uint64_t bytes;
    // The layer, below `layers` of the configuration.
    uint32_t layer;
    // Optional: its alignment in bytes, a power of two, at most the granule. Default: 256.
    uint32_t align;
} fb_tensor;

// What the ranks of a group share, and how. All ranks pass the same, but for `rank`. An optional field that is 0 gets
// the default that its comment names.
typedef struct fb_weights_config {
    // sizeof(fb_weights_config).
    size_t size;
    // The tensors of all layers. Those of one layer lie in its window in the order of the array.
    const struct fb_tensor *tensors;
    // Globs of names in UTF-8, in which `*` stands for any characters, also dots. Each tensor that one of them matches
    // is shared; each has to match a tensor, and no two the same. Without patterns nothing is shared.
    const char *const *patterns;
    // The number of tensors.
    uint32_t tensor_count;
    // The number of patterns.
    uint32_t pattern_count;
    // Layers of the model, draft layers and layers without tensors included, at most 4096.
    uint32_t layers;
    // This rank in its group, below `ranks`.
    uint32_t rank;
    // Ranks of the group, at most 4096: those of one host that hold the same bytes. With tensor parallelism these are
    // the data-parallel ranks of one tensor-parallel rank.
    uint32_t ranks;
    // Optional: where pulled bytes come from, FB_WEIGHTS_FROM_PEERS or FB_WEIGHTS_FROM_HOST. Default:
    // FB_WEIGHTS_FROM_PEERS.
    uint32_t source;
    // Optional: which group of the host this is. Groups have different bytes: with tensor parallelism the
    // tensor-parallel rank. Default: 0.
    uint64_t group;
    // Optional: the most bytes that the chosen tensors may take on a rank's device, buffers included. The fewest
    // layers are sharded that satisfy it. Default: all layers are sharded.
    uint64_t budget;
    // Optional: the most bytes of one copy of a pull. Default: 2 MiB.
    uint64_t copy_bytes;
    // Optional: what becomes of an odd number of layers, an FB_ODD_ constant. Default: FB_ODD_CHEAPEST.
    uint32_t odd;
    // Optional: the last layers, which run once for each draft pass. Default: 0.
    uint32_t draft_layers;
    // Optional: the most micro-batches of a step. Default: 1.
    uint32_t micro_batches;
    // Optional: parts of a pull. The first begins with the pull, a further one at each later fb_weights_enter,
    // fb_weights_leave and fb_weights_advance. Default: 1.
    uint32_t parts;
    // Optional: how a captured step ends, FB_WRAP_JOINED or FB_WRAP_BEHIND. Default: FB_WRAP_JOINED.
    uint32_t wrap;
    // Must be 0.
    uint32_t reserved;
    // Optional: when a layer is left, the first bytes of the next layer's window that are brought into the device's
    // L2, behind their arrival, on a stream of its own. With `prefetch_rate`. Default: nothing is.
    uint64_t prefetch_bytes;
    // Optional: their rate in bytes per second: what other work leaves of the memory's rate. With `prefetch_bytes`.
    uint64_t prefetch_rate;
} fb_weights_config;

// What a plan takes for its rank, in bytes and in whole granules, and what it decides.
typedef struct fb_weights_footprint {
    // sizeof(fb_weights_footprint), set by the caller.
    size_t size;
    // Layers that stay resident, whole.
    uint64_t resident;
    // The rank's own parts of sharded layers.
    uint64_t shards;
    // The buffers. One that there is not has 0.
    uint64_t buffers[3];
    // All of these: what the device holds.
    uint64_t device;
    // Pinned host memory, with FB_WEIGHTS_FROM_HOST.
    uint64_t host;
    // The chosen tensors themselves, which a rank would hold without sharding; not rounded.
    uint64_t whole;
    // `whole` without `device`: what sharding saves. It is negative where rounding or a small model costs more.
    int64_t saved;
    // What the rank pulls in one step.
    uint64_t pulled;
    // A granule: the device maps memory in multiples of it.
    uint64_t granule;
    // Layers with chosen tensors, resident ones included.
    uint32_t layers;
    // Layers that are sharded.
    uint32_t sharded_layers;
    // How the last layer of a step and the first one of the next are kept apart: an FB_CLOSING_ constant.
    uint32_t closing;
    // For FB_CLOSING_RESIDENT: the layer that stays resident for it. Otherwise 0.
    uint32_t resident_layer;
} fb_weights_footprint;

// A layer of shared weights.
typedef struct fb_layer_weights {
    // sizeof(fb_layer_weights), set by the caller.
    size_t size;
    // Its window: all its chosen tensors. It may only be read.
    void *address;
    // Bytes of the window, in whole granules.
    uint64_t bytes;
    // Bytes that a pull of the layer moves; 0 for one that the plan keeps resident.
    uint64_t pulled;
    // The number of copies that a pull has.
    uint32_t copies;
    // The version of its weights: 0 until an update of it was committed.
    uint32_t version;
    // 1 if the plan shards it.
    uint32_t is_sharded;
    // 1 if it is whole without a pull: by the plan, or because it was made resident.
    uint32_t is_resident;
    // The buffer that it is pulled into, from 0. For a layer that the plan keeps resident 0.
    uint32_t buffer;
    // Always 0.
    uint32_t reserved;
} fb_layer_weights;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the version of the loaded library's interface. Compare it with FB_ABI_VERSION before any other call.
uint32_t fb_abi_version(void);

// Returns a status in words, as a constant string. Any number is allowed.
const char *fb_status_text(uint32_t status);

// Returns the library's own version as a constant string, for example "0.1.0".
const char *fb_version(void);

// Copies the error text of the last call that failed on the object of `handle`, a handle of any kind. The error text
// says what failed, where, with which numbers, and what to do. It is empty before the first failure. A call that
// returns FB_CLOSED or FB_BUSY for the handle itself, or whose handle is NULL or of another kind, leaves no error
// text.
//
// Requires:
// `text` is NULL, or has `text_bytes` bytes.
fb_status fb_error_text(const void *handle,
                        char *text,
                        size_t text_bytes);

// Makes a device. It takes no memory yet. On failure, `text` receives the reason.
//
// Requires:
// `config` states its real size; its `library` is NULL or ends with a zero; `text` has `text_bytes` bytes.
fb_status fb_device_create(const struct fb_device_config *config,
                           char *text,
                           size_t text_bytes,
                           struct fb_device **device);

// Ends a device. The call waits for the work enqueued on its streams and on borrowed ones, then frees all memory
// taken on it, including that of caches destroyed earlier; the memory of a cache that was leaked after a panic stays
// allocated. FB_BUSY while caches, captured layers, weights, updates or changes of replicas are left. Tickets remain
// valid.
//
// Requires:
// No work on its streams waits for something that only this thread would do.
fb_status fb_device_destroy(struct fb_device *device);

// Makes a stream that belongs to the device and lives as long as the device.
//
// Requires:
// `stream` has room for the result.
fb_status fb_stream_create(const struct fb_device *device, void **stream);

// Tells the device about a CUstream of the engine, once for each stream; NULL is the legacy default stream. The
// library neither synchronises nor destroys it. FB_UNSUPPORTED on a host device. FB_INVALID_CONFIG for a stream of
// another context, for the per-thread stream, and for CU_STREAM_LEGACY: pass NULL.
//
// Requires:
// `stream` is a stream of this process until it is returned or the device is destroyed. It is not being captured when
// the device is destroyed.
fb_status fb_stream_borrow(const struct fb_device *device,
                           void *stream);

// Returns a borrowed stream to the engine: the call waits for the work enqueued on it, and the device then forgets it.
// FB_OUT_OF_RANGE for a stream that was not borrowed. FB_UNSUPPORTED on a host device. FB_INVALID_STATE for a stream
// that is being captured.
//
// Requires:
// No other thread enqueues on the stream during the call, and no work on the stream makes this call.
fb_status fb_stream_return(const struct fb_device *device,
                           void *stream);

// Blocks the caller until everything now enqueued on the stream has ended. FB_DEVICE_FAILED when the device has
// failed.
//
// Requires:
// No work on the stream waits for something that only this thread would do.
fb_status fb_stream_wait(const struct fb_device *device,
                         void *stream);

// Orders two streams: work enqueued on `after` from now on runs after the work that is now enqueued on `before`. The
// call does not wait.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_stream_order(const struct fb_device *device,
                          void *before,
                          void *after);

// Runs `work(data)` in the stream's order, on a thread of the device; on FB_DEVICE_HOST inside this call. On a GPU's
// stream `work` must not call the driver, and therefore no function of this header that enqueues or waits. On
// FB_DEVICE_HOST_THREADS it must not enqueue on its own stream or wait for it. If the device fails first, `work` never
// runs.
//
// Requires:
// `work` may be called with `data` on another thread, until it has run or the device is destroyed. It returns
// normally, without a throw or a longjmp.
fb_status fb_stream_call(const struct fb_device *device,
                         void *stream,
                         fb_work work,
                         void *data);

// Writes 1 to `*mark` in the stream's order, on a thread of the device; on FB_DEVICE_HOST inside this call. It runs no
// code of the caller and takes no lock of his, so a thread that waits for the stream may hold any: that is how a
// program with an interpreter's lock sees that enqueued work has run, where the work of fb_stream_call would wait for
// the lock. If the device fails first, nothing is written.
//
// The write is a release: read `*mark` with acquire before you read what the work has written. To free or to
// overwrite what the work has only read, one load of the whole word is enough, of any order: no processor makes a
// write visible before a load that decides whether it happens.
//
// FB_OUT_OF_RANGE for a stream that the device does not have. FB_BUSY for one that is being captured: every launch
// would write the word again. After an error nothing is written, nor on a device that has failed, which FB_OK does not
// tell: other calls do.
//
// Requires:
// `mark` is a word that nothing else writes, and that whole loads alone read, until it was written or the device is
// destroyed.
fb_status fb_stream_mark(const struct fb_device *device,
                         void *stream,
                         uint32_t *mark);

// Allocates zeroed device memory that lives as long as the device, for an engine without an allocator of its own.
//
// Requires:
// `address` has room for the result.
fb_status fb_device_allocate(const struct fb_device *device,
                             uint64_t bytes,
                             void **address);

// Fills in the fields that describe a model (`layers`, `draft_layers`, `index_key_bytes`, `row_bytes`, `page_tokens`,
// `top_k`, `host_stride`, `device_block_align`, `lone_layers`, `group_layers`) and leaves the other fields unchanged.
// The names are "deepseek-v3.2", "deepseek-v3.2-bf16", "deepseek-v3.2-int8", "glm-5", "glm-5.2", "glm-5.3" and
// "gqa-8x128"; "deepseek-v3" and "deepseek-r1" are dense models and are meant for planning only. Another name is
// FB_OUT_OF_RANGE. Set `size` of `config` before the call; the other fields may be zero or filled. On failure, `text`
// receives the reason.
//
// Requires:
// `name` ends with a zero; `config` states its real size; `text` has `text_bytes` bytes.
fb_status fb_preset(const char *name,
                    char *text,
                    size_t text_bytes,
                    struct fb_cache_config *config);

// Computes what a cache of this configuration takes on a GPU, and takes nothing. A GPU maps memory in multiples of 2
// MiB; a host device maps small pages and pads less. The call refuses every configuration that fb_cache_create
// refuses before it asks for memory. On failure, `text` receives the reason.
//
// Requires:
// Both structs state their real sizes, and `slots_by_layer` and `selects_by_layer` are NULL or have an entry for each
// layer; `text` has `text_bytes` bytes.
fb_status fb_footprint(const struct fb_cache_config *config,
                       char *text,
                       size_t text_bytes,
                       struct fb_cache_footprint *footprint);

// Makes a cache on a device and takes all its memory, which belongs to the device until fb_device_destroy. Neither
// fb_cache_destroy nor a creation that fails half-way frees any of it; to replace a cache, make another device. On
// failure, `text` receives the reason.
//
// Requires:
// `config` states its real size, and its `slots_by_layer` and `selects_by_layer` are NULL or have an entry for each
// layer; `text` has `text_bytes` bytes.
fb_status fb_cache_create(const struct fb_device *device,
                          const struct fb_cache_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_cache **cache);

// Ends a cache. Its pools are the device's memory, which fb_device_destroy frees. No other cache can reuse them: a
// new cache on this device takes as much memory again. After a panic the call leaks the cache, on purpose, because
// its state may be inconsistent: fb_device_destroy does not free its memory either. The call returns FB_BUSY while a
// sequence is open, a closed sequence is not released (fb_cache_reap), a step is not retired, or pages are withheld
// (fb_release); nothing has ended then, and the handle stays valid.
//
// Requires:
// No operation that was enqueued for it still uses the caller's buffers.
fb_status fb_cache_destroy(struct fb_cache *cache);

// Reads a cache's counters and gauges.
//
// Requires:
// `stats` states its real size.
fb_status fb_cache_stats(const struct fb_cache *cache, struct fb_stats *stats);

// Reads a cache's configuration and sizes.
//
// Requires:
// `info` states its real size.
fb_status fb_cache_info(const struct fb_cache *cache, struct fb_info *info);

// Releases what ended work still holds: pages, step descriptors, and closed sequences whose last work has ended.
// `waiting`, which may be NULL, receives the number of closed sequences that still wait. On `stream` the call
// enqueues the operations that empty the lanes of the released sequences; later sequences wait for them by themselves.
//
// Requires:
// `waiting` is NULL or has room for the result.
fb_status fb_cache_reap(struct fb_cache *cache,
                        void *stream,
                        uint32_t *waiting);

// Checks every invariant of the pools, the page tables and the residency tables. It is for tests, between steps. On a
// GPU it waits for the device. On FB_INTERNAL the error text names the broken invariant.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_cache_validate(const struct fb_cache *cache);

// Copies fallback number `index`, from 0, to `text`, as one line. Each fallback is an option that the system refused,
// such as huge pages. The call returns FB_OUT_OF_RANGE past the last fallback; for `index` 0 this means that there
// are no fallbacks.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_cache_fallback(const struct fb_cache *cache,
                            size_t index,
                            char *text,
                            size_t text_bytes);

// Returns the address and size of a layer's slab on the device, which attention reads. Both stay the same for the
// cache's life. The slab is `[slot blocks][block_bytes]`, padded as configured. A slot block holds run 0 of its 64
// slots, then run 1 of its 64 slots. With rows in one run and no padding, slot `s` is at byte `s * row_bytes[0]`.
//
// Requires:
// `address` and `bytes` have room for the results.
fb_status fb_slab(const struct fb_cache *cache,
                  uint32_t layer,
                  void **address,
                  uint64_t *bytes);

// Returns the rows of a layer in the total pool, `[pages][page tokens][host_stride]`. A prefill on the device or a
// transfer may write prompt rows there and then call fb_append_in_place. fb_pages returns the pages of a sequence.
// The pages that fb_open_shared or fb_fork shares must not be written. FB_OUT_OF_RANGE for an unknown layer.
//
// Requires:
// `address` and `bytes` have room for the results.
fb_status fb_rows(const struct fb_cache *cache,
                  uint32_t layer,
                  void **address,
                  uint64_t *bytes);

// Returns the index keys of a layer on the device, `[pages][page tokens][key bytes]`. The engine writes and reads
// them. fb_pages returns the pages of a sequence. FB_OUT_OF_RANGE for an unknown layer, or a model without index
// keys.
//
// Requires:
// `address` and `bytes` have room for the results.
fb_status fb_index_keys(const struct fb_cache *cache,
                        uint32_t layer,
                        void **address,
                        uint64_t *bytes);

// Admits a sequence: it takes the sequence's pages, slots and lane. FB_EXHAUSTED when a pool has too little left: the
// error text names the pool, and the call has taken nothing. In a cache with `share` (fb_cache_config) the call only
// promises the slots, and fb_join takes them. FB_EXHAUSTED then means that the pool cannot keep all promises.
//
// Requires:
// `config` states its real size, and its `slots_by_layer` is NULL or has an entry for each layer.
fb_status fb_open(struct fb_cache *cache,
                  const struct fb_open_config *config,
                  uint64_t *sequence);

// Appends `count` packed prompt rows to one layer, each of row_bytes[0] + row_bytes[1] bytes. Layers fill
// independently, each in token order. FB_INVALID_STATE once fb_join has decided the resident rows. On an error nothing
// is written.
//
// Requires:
// `rows` has `count` rows.
fb_status fb_append(struct fb_cache *cache,
                    uint64_t sequence,
                    uint32_t layer,
                    const void *rows,
                    uint32_t count);

// Declares that `count` prompt rows of every layer are already in the total pool (fb_rows), because a prefill or a
// transfer wrote them there, or that nothing needs their bytes because only residency is replayed. It returns the same
// errors as fb_append.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_append_in_place(struct fb_cache *cache,
                             uint64_t sequence,
                             uint32_t count);

// Declares that `count` more prompt rows of one layer are already in the total pool, as fb_append_in_place does for
// every layer: for a transfer that brings a sequence layer by layer.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_append_layer_in_place(struct fb_cache *cache,
                                   uint64_t sequence,
                                   uint32_t layer,
                                   uint32_t count);

// Admits more tokens to a sequence that has not joined or is parked, for prompts that arrive in chunks: its prompt
// gets `prompt` tokens in all, and after them it may decode `promised`. Neither the prompt nor the sum may become
// smaller. A budget that was given as a ratio is that ratio of the new sum. FB_OUT_OF_RANGE for a smaller number or
// more than the cache's max_tokens; FB_EXHAUSTED names the pool that has too little left; FB_INVALID_STATE once the
// sequence has joined. After any of these nothing has changed.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_extend(struct fb_cache *cache,
                    uint64_t sequence,
                    uint32_t prompt,
                    uint32_t promised);

// Parks a sequence, for example to preempt it: its lane and slots are free for others when the call returns, and its
// pages stay. `accepted` is how many rows of its last step count, as in fb_batch_row; the others are rejected. A
// sequence that has not joined is parked with 0. Until fb_resume brings it back, the sequence is a prompt: fb_extend,
// fb_append and fb_truncate accept it. The device notes the rows that the sequence selected last, in `stream`'s order.
// FB_EXHAUSTED if as many sequences are parked as `parked` of fb_cache_config; FB_BUSY while work of the sequence is
// in flight; FB_INVALID_STATE while it is joining or after a failed step; FB_OUT_OF_RANGE for more accepted rows than
// landed. After any of these nothing has changed.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_park(struct fb_cache *cache,
                  uint64_t sequence,
                  uint32_t accepted,
                  void *stream);

// Resumes a parked sequence: takes a lane and slots, and joins with the rows that it selected last before it was
// parked. `bytes_a_call` is the most bytes of rows that the call gathers, 0 for no bound; fb_join_more gathers the
// rest. `ticket` may be NULL; otherwise it receives the ticket of the enqueued work. FB_EXHAUSTED names lanes or slot
// blocks; FB_INVALID_STATE for a sequence that is not parked, or whose prompt is incomplete in a layer; FB_BUSY as in
// fb_join. After any of these nothing has changed. If the device refuses the call half-way, fb_join does the rest.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_resume(struct fb_cache *cache,
                    uint64_t sequence,
                    uint64_t bytes_a_call,
                    void *stream,
                    struct fb_ticket **ticket);

// Joins a sequence to its lane, once every layer has its whole prompt. The call decides which rows are resident. In
// each layer where `bring_up` of fb_open_config asks for all rows and they fit, it begins with all of them, otherwise
// with none. It then applies the selections of `warm_up` in order by exact LRU, as if they were steps. It gathers the
// rows that are then resident, up to the warm-up's bound. Steps wait for this work by themselves; with a bound, call
// fb_join_more until the sequence is running. `warm_up` may be NULL. `ticket` may be NULL; otherwise it receives the
// ticket of the enqueued work. FB_INVALID_STATE while a layer's prompt is incomplete, or when an earlier fb_join has
// decided the resident rows; if the device refused its gather, call fb_join_more. In a cache with `share`
// (fb_cache_config) the call first takes slots, also from other sequences. It is FB_BUSY, and nothing has changed,
// while the slots that it needs belong to sequences in open steps, or to some whose last resize has not run.
//
// Requires:
// `warm_up` states its real size. The device may read its selections until the stream has passed this call.
fb_status fb_join(struct fb_cache *cache,
                  uint64_t sequence,
                  const struct fb_warm_up *warm_up,
                  void *stream,
                  struct fb_ticket **ticket);

// Gathers the next portion of a bounded warm-up. After the last portion the sequence is running (fb_length).
// FB_INVALID_STATE for a sequence that is not joining.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_join_more(struct fb_cache *cache, uint64_t sequence, void *stream, struct fb_ticket **ticket);

// Opens a sequence that begins as a copy of `parent`. The parent's committed tokens are its prompt, and the call
// ignores the config's `prompt`. The two share full pages; the call copies the partial page on the stream. The child
// is running. FB_BUSY while work of the parent is in flight, and as in fb_join. FB_INVALID_STATE while the parent is
// not running yet, when its step failed, or while it has rows that were neither accepted nor rejected: truncate it to
// the intended length first. Other errors are those of fb_open.
//
// Requires:
// `config` states its real size, and its `slots_by_layer` is NULL or has an entry for each layer. `child` has room for
// the result. `ticket` is NULL or has room for the result.
fb_status fb_fork(struct fb_cache *cache,
                  uint64_t parent,
                  const struct fb_open_config *config,
                  void *stream,
                  uint64_t *child,
                  struct fb_ticket **ticket);

// Truncates a sequence to `length` tokens. Landed rows below the length are accepted, landed rows from it on are
// rejected. Landed rows of a failed step cannot be accepted: a length beyond the committed one is then
// FB_OUT_OF_RANGE. The call removes rejected rows, and committed tokens beyond the length, from every layer's
// residency. A page that other sequences share is replaced before it can be written again. After the call a sequence
// whose step failed may take part in steps again. A sequence that has not joined, or is parked, drops the prompt rows
// beyond the length, and FB_INVALID_STATE means that other sequences share their pages. FB_BUSY while work of the
// sequence is in flight. FB_OUT_OF_RANGE for a length beyond the committed and landed rows. FB_INVALID_STATE while the
// sequence is joining. FB_EXHAUSTED when shared pages cannot be replaced. After any of these nothing has changed.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_truncate(struct fb_cache *cache,
                      uint64_t sequence,
                      uint32_t length,
                      void *stream,
                      struct fb_ticket **ticket);

// Reads the lengths of a sequence, as far as the host has them.
//
// Requires:
// `length` states its real size.
fb_status fb_length(const struct fb_cache *cache, uint64_t sequence, struct fb_sequence_length *length);

// Copies the pages of a sequence, in token order, as many as `room` allows. `*count` receives how many there are.
//
// Requires:
// `pages` has `room` places; `count` has room for the result.
fb_status fb_pages(const struct fb_cache *cache,
                   uint64_t sequence,
                   struct fb_page *pages,
                   uint32_t room,
                   uint32_t *count);

// Copies one row of the total pool, packed, with its present content. `bytes` must be row_bytes[0] + row_bytes[1]. It
// is for checks, and for engines that move rows themselves. FB_OUT_OF_RANGE for an unknown layer, a position beyond
// the sequence's pages, or another size.
//
// Requires:
// `row` has `bytes` bytes. No step or append is writing the row.
fb_status fb_read_row(const struct fb_cache *cache,
                      uint64_t sequence,
                      uint32_t layer,
                      uint32_t position,
                      void *row,
                      uint64_t bytes);

// Returns the residency digest of a sequence over all layers. Ranks that made the same calls for the sequence (slots,
// bring-up, warm-up, accepted counts, truncations) and got the same selections in every step have equal digests. On a
// GPU the call waits for the device, so call it between steps. docs/integration.md (Ranks) says what to do when ranks
// differ.
//
// Requires:
// `digest` has room for the result.
fb_status fb_digest(const struct fb_cache *cache,
                    uint64_t sequence,
                    uint64_t *digest);

// Returns the landing slot of query row number `query_row`, from 0: the engine writes there the row of that query
// row's own token, at position L + `query_row`, where L is the committed length after this step's commit
// (fb_retired_lengths returns it). The slot is the same in every layer's slab and in every step of the sequence, so
// ask once after the opening. Inside a callback this call is FB_BUSY.
//
// Requires:
// `slot` has room for the result.
fb_status fb_landing_slot(const struct fb_cache *cache,
                          uint64_t sequence,
                          uint32_t query_row,
                          uint32_t *slot);

// Ends a sequence, also to abort a request. Its number is closed at once. Its pages, slots and lane become free when
// the last step that uses them has been retired and every ticket of the sequence has ended: in this call, in that
// fb_retire, or in fb_cache_reap. The call that frees them enqueues the operation that empties the lane, on its own
// stream.
//
// Requires:
// `stream` is ordered after the work that the engine has enqueued for the sequence outside of steps: a prefill may
// still be writing index keys to the sequence's pages.
fb_status fb_close(struct fb_cache *cache,
                   uint64_t sequence,
                   void *stream);

// Changes the budget of a sequence between two of its steps, layer by layer. A smaller budget keeps the rows that were
// selected last; a larger one adds empty slots, which misses fill. Nothing crosses the link. On the device the call
// moves the rows that stay but whose slots go, and enqueues that on `stream`; the sequence's next step waits for it by
// itself. Captured graphs stay valid. The slots that go are free at once for fb_open and fb_resize. Slots are taken
// and freed in whole blocks of 64, and slots beyond the tokens that the sequence may have are not taken.
//
// FB_INVALID_CONFIG in a cache with `share` (fb_cache_config), which sets the budgets itself, and for fewer slots than
// the cache's min_budget. FB_INVALID_STATE for a sequence that is not running, or whose step failed. FB_BUSY while a
// step of the sequence is prepared and not finished, or before earlier work of the sequence that the library enqueued
// outside of steps, such as its last resize, has ended. FB_OUT_OF_RANGE for more slots than a layer has. FB_EXHAUSTED
// for more than are free. FB_DEVICE_FAILED if work of the sequence failed. After these nothing has changed. If the
// device refuses the call half-way, the sequence has its old budgets or its new ones (fb_budgets), and the call may be
// repeated on any stream.
//
// Requires:
// `budget` states its real size, and its `slots_by_layer` is NULL or has an entry for each layer.
fb_status fb_resize(struct fb_cache *cache,
                    uint64_t sequence,
                    const struct fb_budget *budget,
                    void *stream);

// Copies the slots that a sequence has in each layer, draft layers included. FB_OUT_OF_RANGE if `layers` is not the
// cache's number of layers (`layers` of fb_info).
//
// Requires:
// `slots` has `layers` places.
fb_status fb_budgets(const struct fb_cache *cache,
                     uint64_t sequence,
                     uint32_t *slots,
                     uint32_t layers);

// Moves the budgets of all sequences towards their shares, in a cache with `share` (fb_cache_config) and within its
// limits for one step. fb_prepare does this by itself for the sequences of its micro-batch; this call is for an engine
// that wants it at a time of its own. Sequences in an open step stay as they are, and so do those that have retired no
// step since they joined or were last resized or truncated. `resized`, which may be NULL, receives the number of
// sequences that the call has resized: 0 when there is nothing left to do. FB_INVALID_CONFIG in a cache without
// `share`.
//
// Requires:
// `resized` is NULL or has room for the result.
fb_status fb_share_slots(struct fb_cache *cache,
                         void *stream,
                         uint32_t *resized);

// Returns a digest of the budgets of all open sequences. Ranks that made the same calls with the same results have
// equal digests. The call waits for no device.
//
// Requires:
// `digest` has room for the result.
fb_status fb_budgets_digest(const struct fb_cache *cache,
                            uint64_t *digest);

// Opens a sequence like fb_open, for a prompt whose token ids are known. The sequence shares the leading pages that
// were published under the same salt (vLLM: a prefix cache hit). `*shared` receives how many tokens those pages have;
// fb_append continues after them. Admission counts only what is not shared. `prompt` has the prompt's ids, or as many
// leading ones as may be shared: omit the last token if its row must be computed for its logits. The salt separates
// equal tokens of different tenants, adapters or weights; it may be empty. FB_OUT_OF_RANGE for more ids than the
// prompt has tokens, and for keys that are neither none nor one for each full page. On an error the call has taken
// nothing.
//
// Requires:
// The structs state their real sizes, and everything they point to is valid. `salt` has `salt_bytes` bytes.
fb_status fb_open_shared(struct fb_cache *cache,
                         const struct fb_open_config *config,
                         const struct fb_tokens *prompt,
                         const void *salt,
                         size_t salt_bytes,
                         uint64_t *sequence,
                         uint32_t *shared);

// Returns how many tokens fb_open_shared would share now. It changes nothing. For all ranks to share the same prefix,
// take the smallest result of all ranks, and pass only the ids of that many tokens to fb_open_shared on each.
//
// Requires:
// As fb_open_shared.
fb_status fb_find_shared(const struct fb_cache *cache,
                         const struct fb_tokens *prompt,
                         const void *salt,
                         size_t salt_bytes,
                         uint32_t *shared);

// Starting at token `from`, publishes the full pages whose rows are all accepted and stored, so that other sequences
// can find them by block hash (vLLM: a cached full block). `next` has the sequence's token ids from `from` on, as far
// as they are known. `*published` receives how many tokens the sequence's published pages have now. Call it again
// after more steps have been retired, and before fb_close. A published page also gives other sequences its index keys.
// So the engine must have written the index keys of the page's tokens: before the join (in stream order) or in the
// sequence's steps. FB_INVALID_STATE for a sequence that neither fb_open_shared opened nor fb_fork made from such a
// sequence, or that is not running. FB_BUSY while a ticket's work for it (warm-up, the copy of fb_fork, truncation) is
// in flight; steps in flight do not matter. FB_OUT_OF_RANGE when `from` differs from the `published` that fb_length
// returns.
//
// Requires:
// `next` states its real size, and everything it points to is valid. `published` has room for the result.
fb_status fb_publish(struct fb_cache *cache,
                     uint64_t sequence,
                     uint32_t from,
                     const struct fb_tokens *next,
                     uint32_t *published);

// Opens a sequence whose rows and index keys a transfer brings: it takes the sequence's pages, but neither slots nor a
// lane. fb_append, fb_append_layer_in_place, fb_place_index_keys and fb_index_keys_in_place count what has come of
// each layer, and fb_join takes slots and a lane when every layer is whole (FB_INVALID_STATE before that, with the
// layer). `arriving` of fb_cache_config bounds the sequences that arrive at once: FB_EXHAUSTED. The other errors are
// those of fb_open, but FB_EXHAUSTED also for slots that the pool does not have. On an error the call has taken
// nothing.
//
// Requires:
// As fb_open.
fb_status fb_arrive(struct fb_cache *cache,
                    const struct fb_open_config *config,
                    uint64_t *sequence);

// Opens such a sequence for a prompt whose token ids are known, as fb_open_shared does. `*shared` receives how many
// leading tokens the cache has: their rows and index keys are there, and the transfer brings what follows. Nothing may
// write to their pages. Errors are those of fb_arrive and of fb_open_shared.
//
// Requires:
// As fb_open_shared.
fb_status fb_arrive_shared(struct fb_cache *cache,
                           const struct fb_open_config *config,
                           const struct fb_tokens *prompt,
                           const void *salt,
                           size_t salt_bytes,
                           uint64_t *sequence,
                           uint32_t *shared);

// Copies index keys of a layer to the pages of a sequence that arrives, or that arrived and is parked, on `stream`.
// `keys` has `bytes` bytes: the keys of the tokens from `first` on, one after the other. Keys in place may be placed
// again, but not those of tokens that the sequence shares or had when it was parked; `first` may not be beyond those
// in place. The last page may be given whole. The join waits for the copy. `ticket` may be NULL; otherwise it receives
// the ticket of the copy.
//
// Where the engine's pages are not `[page_tokens][index_key_bytes]` inside, such as with all scales behind all keys,
// pass whole pages, and a `first` that begins one.
//
// FB_INVALID_STATE for a sequence that did not arrive, or that has joined and is not parked. FB_OUT_OF_RANGE for a
// layer without index keys of its own (fb_index_keys), bytes that are not whole keys, keys beyond the last page of the
// prompt, another `first`, and memory of another device or that does not begin at a multiple of 4. FB_DEVICE_FAILED if
// an earlier copy failed. After any of these nothing has changed. If the device refuses the call half-way, the keys
// from `first` on count no more: place them again, on any stream. The memory of the refused call stays in use until a
// later ticket of the sequence has ended.
//
// Requires:
// The device may read `bytes` bytes of `keys` until the ticket has ended, and nothing changes them before. `ticket` is
// NULL or has room for the result.
fb_status fb_place_index_keys(struct fb_cache *cache,
                              uint64_t sequence,
                              uint32_t layer,
                              uint32_t first,
                              const void *keys,
                              uint64_t bytes,
                              void *stream,
                              struct fb_ticket **ticket);

// Declares that the index keys of `count` more tokens of a layer are in place in the pages of such a sequence
// (fb_index_keys, fb_pages): a transfer or a kernel of the engine wrote them there, and the stream of the join is
// ordered after that. Errors are those of fb_place_index_keys; FB_OUT_OF_RANGE for keys beyond the prompt. An error
// changes nothing.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_index_keys_in_place(struct fb_cache *cache,
                                 uint64_t sequence,
                                 uint32_t layer,
                                 uint32_t count);

// Takes a lane and slots for a sequence before its prompt is complete, and enters the lane on `stream`. Its rows and
// index keys go on coming, and fb_warm_layer loads each layer that is whole. So rows come to their slots while the
// transfer brings later layers. Until the sequence runs it has slots that no step uses: call it only if nothing else
// wants them. `ticket` may be NULL; otherwise it receives the ticket of the enqueued work.
//
// FB_INVALID_STATE if the sequence has joined, or is parked; FB_EXHAUSTED names lanes or slot blocks; FB_BUSY as in
// fb_join; FB_DEVICE_FAILED if a copy of its index keys failed. After any of these nothing has changed. If the device
// refuses the call half-way, the sequence has its lane: try again, or call fb_join when it is complete.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_join_early(struct fb_cache *cache,
                        uint64_t sequence,
                        void *stream,
                        struct fb_ticket **ticket);

// Loads the rows of one layer of a sequence that joined early, once the layer has all rows and all index keys. The
// first layer of an index group decides which rows the whole group has, as fb_join does: `warm_up`, which may be NULL,
// has the selections of this group alone, `[steps][top_k]`. The group's other layers come after it, and take no
// selections. `bytes_a_call` must be 0. After the last layer the sequence is running (fb_length). `ticket` may be
// NULL; otherwise it receives the ticket of the enqueued work.
//
// FB_INVALID_STATE for a sequence that did not join early, an incomplete layer, one that was warmed up before, and
// before the layer that selects for it. FB_OUT_OF_RANGE for an unknown layer, for selections of a layer that another
// one selects for, and for a bound of bytes. FB_DEVICE_FAILED if work of the sequence failed. After any of these
// nothing has changed. If the device refuses the call half-way, try again on any stream, with the same warm-up.
//
// Requires:
// `warm_up` states its real size. The device may read its selections until the stream has passed this call. `ticket`
// is NULL or has room for the result.
fb_status fb_warm_layer(struct fb_cache *cache,
                        uint64_t sequence,
                        uint32_t layer,
                        const struct fb_warm_up *warm_up,
                        void *stream,
                        struct fb_ticket **ticket);

// Ends a sequence to whose pages others may still write, in any state: a write that is under way when a transfer is
// given up lands later, and may not land in another sequence's rows. It is like fb_close, but the pages behind the
// leading ones that the sequence shared stay withheld: no sequence gets them until fb_release, which takes the
// sequence's number. Until then the number names nothing else. No time releases them.
//
// The errors are FB_CLOSED, FB_OUT_OF_MEMORY, and the device's for a sequence that has not joined. The sequence is as
// before then.
//
// Requires:
// As fb_close.
fb_status fb_abort(struct fb_cache *cache,
                   uint64_t sequence,
                   void *stream);

// Releases the pages of an aborted sequence, once no writer reaches them any more: each has said that it is done, or
// what it could write through is destroyed. They are free at once; if the sequence's own work has not ended, in the
// fb_cache_reap or fb_retire after its end. `free`, which may be NULL, receives how many pages of rows are free now.
// FB_CLOSED for a sequence that was not aborted, and for pages that were released before. An error changes nothing.
//
// Requires:
// `free` is NULL or has room for the result. No one writes to these pages any more.
fb_status fb_release(struct fb_cache *cache,
                     uint64_t sequence,
                     uint32_t *free);

// Captures a step's layers into a graph, for the batch rows of one bucket. The engine's callback enqueues the engine's
// work; the call enqueues resolve, gather and scatter between the callback's calls. Nothing runs. Other steps may be
// in flight, but no step of the captured micro-batches may be open, and the first compute stream must not be in a
// capture already (FB_BUSY for both). On an error the capture has ended and no graph is left. FB_UNSUPPORTED on a
// device without graphs. FB_INVALID_STATE if an operation cannot be captured; the error text names the driver's error.
// FB_OUT_OF_RANGE for a micro-batch that the cache does not have, and for more query rows than its steps may have.
// FB_INVALID_CONFIG for a micro-batch that is named twice. Other errors for streams, buffers, batch rows, draft passes
// and orders are those of fb_overlap.
//
// Requires:
// `config` and `engine` state their real sizes, and everything they point to is valid; the buffers are valid at every
// launch. The callback returns normally, without a throw or a longjmp. `captured` has room for the result.
fb_status fb_capture(struct fb_cache *cache,
                     const struct fb_capture_config *config,
                     const struct fb_engine *engine,
                     struct fb_captured **captured);

// Does the same as fb_capture, inside a capture that the engine itself has begun on the compute stream of the first
// micro-batch: everything is enqueued there. FB_INVALID_STATE if that stream is not being captured. After an error the
// engine's capture is unusable, unless the configuration was refused. The engine must destroy its graph before the
// device is destroyed.
//
// Requires:
// As fb_capture.
fb_status fb_capture_into(struct fb_cache *cache,
                          const struct fb_capture_config *config,
                          const struct fb_engine *engine,
                          struct fb_captured **captured);

// Launches captured layers for open steps of the captured micro-batches. `steps` has the steps in the order of the
// micro-batches in the capture. Then enqueue the draft passes that were not captured, if there are any (fb_overlap),
// and call fb_finish, on any stream. If the steps or the capture are refused, nothing is enqueued. FB_OUT_OF_RANGE for
// layers that another cache captured, and for a step with more batch rows than the bucket; FB_OUT_OF_RANGE if `count`
// is 0 or more than the cache's micro-batches; FB_INVALID_CONFIG if it is otherwise not the number of captured
// micro-batches, and for steps of other micro-batches or with another number of query rows; FB_INVALID_STATE for a
// graph that the engine owns, a finished or abandoned step, a step whose layers were already launched, or a step that
// was prepared on another stream than the compute stream of the capture. If the device refuses something afterwards,
// the steps are abandoned.
//
// Requires:
// `steps` has `count` entries. The device may use the capture's buffers until the launch has ended.
fb_status fb_launch(struct fb_cache *cache,
                    const struct fb_captured *captured,
                    const fb_step *steps,
                    uint32_t count);

// Tells the cache that the engine has launched its own graph, captured with fb_capture_into, for these open steps,
// ordered after the fb_prepare of each. Then enqueue the draft passes that were not captured, if there are any
// (fb_overlap), and call fb_finish, on a stream that is ordered after the launch. The errors are those of fb_launch,
// except that the stream on which a step was prepared is not checked, and that FB_INVALID_STATE is for a graph that
// the cache owns.
//
// Requires:
// As fb_launch.
fb_status fb_launched(struct fb_cache *cache,
                      const struct fb_captured *captured,
                      const fb_step *steps,
                      uint32_t count);

// Destroys captured layers. Launches in progress still run. Until this call fb_device_destroy returns FB_BUSY.
fb_status fb_captured_destroy(struct fb_captured *captured);

// Reads a table of orders from its text form, the one used in files: the version, the number of layers, and as many
// orders as `room` allows. `orders` may be NULL with a `room` of 0. On failure, `reason` receives the reason.
//
// Requires:
// `text` ends with a zero byte. `orders` has room for `room` numbers. `version` and `layers` have room for the
// results. `reason` has `reason_bytes` bytes.
fb_status fb_table_from_text(const char *text,
                             char *reason,
                             size_t reason_bytes,
                             uint32_t *version,
                             uint32_t *orders,
                             uint32_t room,
                             uint32_t *layers);

// Writes a table of orders to `text` in its text form. `bytes` receives the size of the whole text, its ending zero
// included. On failure, `reason` receives the reason.
//
// Requires:
// `table` and its orders are valid. `text` has `text_bytes` bytes and `reason` has `reason_bytes`. `bytes` has room
// for the result.
fb_status fb_table_to_text(const struct fb_table *table,
                           char *reason,
                           size_t reason_bytes,
                           char *text,
                           size_t text_bytes,
                           size_t *bytes);

// Returns, for each layer, the order with the lowest price at that layer's number of misses per batch row. `misses`
// and `orders` have `layers` entries. On failure, `text` receives the reason.
//
// Requires:
// `prices` and its numbers are valid. `misses` has `layers` numbers and `orders` has room for as many. `text` has
// `text_bytes` bytes.
fb_status fb_table_best(const struct fb_prices *prices,
                        const double *misses,
                        uint32_t layers,
                        char *text,
                        size_t text_bytes,
                        uint32_t *orders);

// Makes a chooser. On failure, `text` receives the reason.
//
// Requires:
// `config` states its real size, and everything it points to is valid. `text` has `text_bytes` bytes. `chooser` has
// room for the result.
fb_status fb_chooser_create(const struct fb_chooser_config *config,
                            char *text,
                            size_t text_bytes,
                            struct fb_chooser **chooser);

// Adds `counts`, the result of fb_retired_counts for a step of `rows` batch rows, to the averages, and chooses the
// table of orders for a step of `next_rows` batch rows. It allocates nothing.
//
// Requires:
// `counts` has `layers` entries; `choice` states its real size.
fb_status fb_choose(struct fb_chooser *chooser,
                    const struct fb_layer_count *counts,
                    uint32_t layers,
                    uint32_t rows,
                    uint32_t next_rows,
                    struct fb_choice *choice);

// Copies the table of orders that a choice names: as many orders as `room` allows to `orders`, the number of layers
// to `layers`, and the version to `version`. `orders` may be NULL with a `room` of 0.
//
// Requires:
// `orders` has room for `room` numbers; `layers` and `version` have room for the results.
fb_status fb_chooser_table(const struct fb_chooser *chooser,
                           uint32_t bucket,
                           uint32_t index,
                           uint32_t *orders,
                           uint32_t room,
                           uint32_t *layers,
                           uint32_t *version);

// Destroys a chooser.
fb_status fb_chooser_destroy(struct fb_chooser *chooser);

// Makes a dense cache on a device and takes all its memory, which belongs to the device until fb_device_destroy.
// Neither fb_dense_destroy nor a creation that fails half-way frees any of it; to replace a cache, make another
// device. FB_INVALID_CONFIG and FB_OVERFLOW name the field; FB_OUT_OF_MEMORY gives the size. On failure, `text`
// receives the reason.
//
// Requires:
// `config` states its real size, and the layers of its groups are valid; `text` has `text_bytes` bytes; `dense` has
// room for the result.
fb_status fb_dense_create(const struct fb_device *device,
                          const struct fb_dense_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_dense **dense);

// Ends a dense cache. Its pages are the device's memory, as fb_cache_destroy says. The call returns FB_BUSY while a
// sequence is open, a closed sequence is not released (fb_dense_reap), a step is not retired, or pages are withheld
// (fb_dense_release); nothing has ended then, and the handle stays valid.
//
// Requires:
// No operation that was enqueued for it still uses the caller's buffers.
fb_status fb_dense_destroy(struct fb_dense *dense);

// Reads a dense cache's counters and gauges.
//
// Requires:
// `stats` states its real size.
fb_status fb_dense_stats(const struct fb_dense *dense, struct fb_dense_cache_stats *stats);

// Copies the planes of a group, as many as `room` allows. They stay the same for the cache's life. `*count` receives
// how many there are: one for each layer and run with FB_DENSE_LAYER_FIRST and FB_DENSE_RUNS_APART, by layer, then by
// run; fewer where layers or runs share a plane. fb_dense_view says where a layer's rows are. FB_OUT_OF_RANGE for an
// unknown group.
//
// Requires:
// `planes` has `room` places; `count` has room for the result.
fb_status fb_dense_planes(const struct fb_dense *dense,
                          uint32_t group,
                          struct fb_dense_plane *planes,
                          uint32_t room,
                          uint32_t *count);

// Returns where a run of a layer is: run 0 is K or the latent, run 1 is V. The addresses stay the same for the cache's
// life. FB_OUT_OF_RANGE for an unknown layer, or a run that the layer does not have.
//
// Requires:
// `view` states its real size.
fb_status fb_dense_view(const struct fb_dense *dense,
                        uint32_t layer,
                        uint32_t run,
                        struct fb_dense_layer_view *view);

// Returns what attention reads in the steps of a micro-batch. fb_dense_prepare enqueues the work that fills it. The
// addresses stay the same for the cache's life, so a captured graph can read them. FB_OUT_OF_RANGE for an unknown
// micro-batch.
//
// Requires:
// `tensors` states its real size.
fb_status fb_dense_tensors(const struct fb_dense *dense,
                           uint32_t micro_batch,
                           struct fb_dense_step_tensors *tensors);

// Frees what ended work still holds: closed sequences, and pages that finished copies have read. `waiting`, which may
// be NULL, receives the number of closed sequences that still wait. `stream` is as for fb_dense_close.
//
// Requires:
// `waiting` is NULL or has room for the result.
fb_status fb_dense_reap(struct fb_dense *dense,
                        void *stream,
                        uint32_t *waiting);

// Checks every invariant of the pages and the page tables. It is for tests, between steps, and does not wait for the
// device. On FB_INTERNAL the error text names the broken invariant.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_dense_validate(const struct fb_dense *dense);

// Copies fallback number `index`, from 0, to `text`, as fb_cache_fallback does.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_dense_fallback(const struct fb_dense *dense, size_t index, char *text, size_t text_bytes);

// Opens a sequence whose rows a transfer brings: it takes the sequence's pages, as fb_dense_open does, and with
// FB_DENSE_HOST a page of the host's tier for each page that is to be filled. It takes part in steps once it has
// joined (fb_dense_join). `way` is FB_DENSE_DIRECT or FB_DENSE_HOST.
//
// `ticket` may be NULL; otherwise it receives a ticket that is done when nothing uses the pages any more: only then
// may a transfer write to them. `stream` should be the one of copies; work that is enqueued there behind this call may
// write to the pages without the ticket.
//
// Errors are those of fb_dense_open; also FB_EXHAUSTED with the group for host pages, FB_INVALID_STATE for
// FB_DENSE_HOST in a cache without them, and FB_INVALID_CONFIG for another `way`. An error takes nothing; if the
// device refuses the call half-way, fb_dense_reap frees the pages later.
//
// Requires:
// `sequence` has room for the result. `ticket` is NULL or has room for the result.
fb_status fb_dense_arrive(struct fb_dense *dense,
                          uint32_t prompt,
                          uint32_t promised,
                          uint32_t way,
                          void *stream,
                          uint64_t *sequence,
                          struct fb_ticket **ticket);

// Opens such a sequence for a prompt whose names are known, as fb_dense_open_shared does. The leading pages that the
// cache has (fb_dense_find_arriving) are shared, and come back on `stream` if they are on the host alone. The transfer
// leaves their tokens out, `tokens` of `found`: they count as rows in place. Errors are those of fb_dense_arrive and
// of fb_dense_open_shared.
//
// Requires:
// As fb_dense_open_shared.
fb_status fb_dense_arrive_shared(struct fb_dense *dense,
                                 uint32_t prompt,
                                 uint32_t promised,
                                 const struct fb_dense_names *names,
                                 uint32_t way,
                                 void *stream,
                                 uint64_t *sequence,
                                 struct fb_dense_found *found,
                                 struct fb_ticket **ticket);

// Returns how much of a prompt of `prompt` tokens fb_dense_arrive_shared would find now. It may be more than
// fb_dense_find returns: a group with a sliding window needs only the pages that a query behind the prompt reads. It
// changes nothing.
//
// Requires:
// `found` states its real size.
fb_status fb_dense_find_arriving(const struct fb_dense *dense,
                                 const struct fb_dense_names *names,
                                 uint32_t prompt,
                                 struct fb_dense_found *found);

// Returns where a run of a layer is in the group's host pages, as fb_dense_view does for device pages: `pages` are
// those of the host's tier. FB_INVALID_STATE for a cache without pages on the host; FB_OUT_OF_RANGE for an unknown
// layer, or a run that the layer does not have.
//
// Requires:
// `view` states its real size.
fb_status fb_dense_host_view(const struct fb_dense *dense,
                             uint32_t layer,
                             uint32_t run,
                             struct fb_dense_layer_view *view);

// Copies the host pages of a sequence that arrives through them, in the order of their blocks, as many as `room`
// allows. `*count` receives how many there are: none with FB_DENSE_DIRECT. A transfer that writes to them by itself
// waits for the ticket of the arrival first. FB_OUT_OF_RANGE for an unknown group.
//
// Requires:
// `pages` has `room` places; `count` has room for the result.
fb_status fb_dense_host_pages(const struct fb_dense *dense,
                              uint64_t sequence,
                              uint32_t group,
                              struct fb_dense_host_page *pages,
                              uint32_t room,
                              uint32_t *count);

// Copies `count` bytes of a sequence that arrives through the host to a host page: to byte `offset` of what block
// `block` has of run `run` of a layer. What comes before a sliding window is dropped. fb_dense_append_layer_in_place
// says when rows are whole.
//
// FB_INVALID_STATE for a sequence that does not arrive through the host, and for a layer that has all rows; FB_BUSY
// before the ticket of the arrival is done, and FB_DEVICE_FAILED if that failed; FB_OUT_OF_RANGE for an unknown layer
// or run, a block that is shared or behind the prompt, and bytes beyond the block. An error writes nothing.
//
// Requires:
// `bytes` has `count` bytes.
fb_status fb_dense_store(struct fb_dense *dense,
                         uint64_t sequence,
                         uint32_t layer,
                         uint32_t run,
                         uint32_t block,
                         uint64_t offset,
                         const void *bytes,
                         uint64_t count);

// Declares that `count` more rows of a layer are in place, in the order of their tokens: in the device pages of a
// sequence that arrives (fb_dense_pages), or with FB_DENSE_HOST in its host pages. Rows before a sliding window count
// too. Work on streams that writes such rows need not have ended, but the stream of the join is ordered after it.
//
// FB_INVALID_STATE for a sequence that is not arriving; FB_OUT_OF_RANGE for an unknown layer and for rows beyond the
// prompt; through the host FB_BUSY before the ticket of the arrival is done, and FB_DEVICE_FAILED if that failed. An
// error changes nothing.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_dense_append_layer_in_place(struct fb_dense *dense,
                                         uint64_t sequence,
                                         uint32_t layer,
                                         uint32_t count);

// Brings a layer that has all rows up, from the host pages of a sequence that arrives through them. `stream` should be
// the one of copies. Layers may go up in any order, and fb_dense_join brings those that are left. FB_INVALID_STATE for
// a sequence that does not arrive through the host, a layer without all rows, and one that was brought before;
// FB_OUT_OF_RANGE for an unknown layer; FB_DEVICE_FAILED if an earlier copy failed. After any of these nothing has
// changed. If the device refuses the call half-way, call it again, on any stream.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_dense_bring_layer(struct fb_dense *dense,
                               uint64_t sequence,
                               uint32_t layer,
                               void *stream);

// Ends the arrival of a sequence whose layers have all rows: it may take part in steps from now on, in any
// micro-batch. With FB_DENSE_DIRECT `stream` is ordered after the work on streams that wrote its rows. With
// FB_DENSE_HOST it copies up the layers that fb_dense_bring_layer did not, and the host pages go back. The first step
// waits for the copies on the device, layer by layer if `bring_layers` of fb_dense_config says so. `ticket` may be
// NULL; otherwise it receives a ticket that ends when all rows are there.
//
// No one may write to the pages of the arrival any more: while a writer still may, do not join, but fb_dense_abort.
//
// FB_INVALID_STATE for a sequence that is not arriving, and while a layer lacks rows, with the layer; FB_DEVICE_FAILED
// if the work of the arrival failed. After any of these nothing has changed. If the device refuses the call half-way,
// the sequence still arrives: call it again, on any stream.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_dense_join(struct fb_dense *dense,
                        uint64_t sequence,
                        void *stream,
                        struct fb_ticket **ticket);

// Ends a sequence that arrives, to whose pages others may still write: a write that is under way when a transfer is
// given up lands later, and may not land in another sequence's rows. It is like fb_dense_close, but the pages that the
// transfer writes to stay withheld: no sequence gets them until fb_dense_release, which takes the sequence's number.
// Until then the number names nothing else. No time releases them.
//
// FB_INVALID_STATE for a sequence that is not arriving: close it. Other errors are FB_CLOSED, FB_OUT_OF_MEMORY and the
// device's. The sequence is arriving still then.
//
// Requires:
// As fb_dense_close.
fb_status fb_dense_abort(struct fb_dense *dense,
                         uint64_t sequence,
                         void *stream);

// Releases the pages of an aborted sequence, once no writer reaches them any more. They are free at once; if the
// sequence's own work has not ended, in the fb_dense_reap after its end. `free`, which may be NULL, receives how many
// pages are free now, of the device and of the host. FB_CLOSED for a sequence that was not aborted, and for pages that
// were released before. An error changes nothing.
//
// Requires:
// `free` is NULL or has room for the result. No one writes to these pages any more.
fb_status fb_dense_release(struct fb_dense *dense,
                           uint64_t sequence,
                           uint32_t *free);

// Fills in the fields that describe a published model (`groups`, `group_count`, `page_tokens`) and leaves the other
// fields unchanged. `layers` receives the layer numbers, and the groups point to them, so it must live as long as
// `config` is used. The names are "llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gemma-3-27b", "gpt-oss-20b",
// "gpt-oss-120b", "deepseek-v3", "deepseek-r1" and "smollm2-135m": the whole model in BF16 with pages of 64 tokens. A
// rank of tensor parallelism divides `row_bytes`, except those of an MLA latent. FB_OUT_OF_RANGE for another name, and
// for a `room` of fewer than the model's layers (128 hold any of them). Set `size` of `config` before the call; the
// other fields may be zero or filled. On failure, `text` receives the reason. Any thread may call it.
//
// Requires:
// `name` ends with a zero; `layers` has `room` places; `config` states its real size; `text` has `text_bytes` bytes.
fb_status fb_dense_preset(const char *name,
                          char *text,
                          size_t text_bytes,
                          uint32_t *layers,
                          uint32_t room,
                          struct fb_dense_config *config);

// Computes the device pages of each group with which `sequences` sequences of `tokens` tokens fit: the null page, each
// sequence's pages with its rows in flight, and for groups with a sliding window the pages of prompt chunks in flight.
// `pages` receives FB_DENSE_GROUPS_MAX numbers, 0 for groups that there are not. They depend on `step_tokens`,
// `query_rows`, `steps_in_flight`, `micro_batches` and `batch` of the configuration; its `device_pages` are ignored.
// The call refuses every configuration that fb_dense_create refuses with these pages before it asks for memory. On
// failure, `text` receives the reason. Any thread may call it.
//
// Requires:
// `config` states its real size, and the layers of its groups are valid; `text` has `text_bytes` bytes; `pages` has
// FB_DENSE_GROUPS_MAX places.
fb_status fb_dense_pages_for(const struct fb_dense_config *config,
                             uint32_t sequences,
                             uint32_t tokens,
                             char *text,
                             size_t text_bytes,
                             uint32_t *pages);

// Computes what a dense cache of this configuration takes, in bytes, and takes nothing. The call refuses every
// configuration that fb_dense_create refuses before it asks for memory. On failure, `text` receives the reason. Any
// thread may call it.
//
// Requires:
// Both structs state their real sizes, and the layers of the groups are valid; `text` has `text_bytes` bytes.
fb_status fb_dense_footprint(const struct fb_dense_config *config,
                             char *text,
                             size_t text_bytes,
                             struct fb_dense_cache_footprint *footprint);

// Hashes the full pages of a prompt, for fb_dense_find and fb_dense_open_shared. The salt separates equal tokens of
// different tenants, adapters or weights; it may be empty. FB_OUT_OF_RANGE for more ids than `max_tokens`, and for
// keys that are neither none nor one for each full page. The names belong to no thread and outlive their cache.
//
// Requires:
// `salt` has `salt_bytes` bytes. `prompt` states its real size, and everything it points to is valid. `names` has room
// for the result.
fb_status fb_dense_names_create(const struct fb_dense *dense,
                                const void *salt,
                                size_t salt_bytes,
                                const struct fb_tokens *prompt,
                                struct fb_dense_names **names);

// Destroys names. Sequences that were opened by them stay.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_dense_names_destroy(struct fb_dense_names *names);

// Returns how much of a prompt fb_dense_open_shared would find now. It changes nothing, not even the order in which
// pages are evicted.
//
// Requires:
// `found` states its real size.
fb_status fb_dense_find(const struct fb_dense *dense,
                        const struct fb_dense_names *names,
                        struct fb_dense_found *found);

// Opens a sequence like fb_dense_open, for a prompt whose names are known. The sequence shares the leading pages that
// were published under these names and are still in a tier; those that are on the host alone come back on `stream`.
// `found` receives how many tokens the sequence has already; its first step continues after them, and steps wait on
// the device for what comes back. `ticket` may be NULL; otherwise it receives the ticket of these copies. Admission
// counts only the pages that are not shared. Name the leading ids that may be shared: leave out the last one of the
// prompt if its row must be computed again for its logits. For all ranks to share the same prefix, pass on each rank
// the names that the rank with the fewest can find (fb_dense_find).
//
// Errors are those of fb_dense_open, and FB_OUT_OF_RANGE for names of more tokens than the prompt has. An error takes
// nothing; if the device refuses the call half-way, fb_dense_reap frees the pages later.
//
// Requires:
// `sequence` has room for the result; `found` states its real size; `ticket` is NULL or has room for the result.
fb_status fb_dense_open_shared(struct fb_dense *dense,
                               uint32_t prompt,
                               uint32_t promised,
                               const struct fb_dense_names *names,
                               void *stream,
                               uint64_t *sequence,
                               struct fb_dense_found *found,
                               struct fb_ticket **ticket);

// Starting at token `from`, publishes the full pages whose rows are accepted and whose steps have been retired, so
// that other sequences can find them by block hash (vLLM: a cached full block). `next` has the sequence's token ids
// from `from` on, as far as they are known. `*published` receives how many tokens the sequence's published pages have
// now. Call it again after more steps have been retired, and before fb_dense_close; in a model with sliding windows,
// after each chunk of a prompt, because pages before the window are gone. FB_INVALID_STATE for a sequence that neither
// fb_dense_open_shared opened nor fb_dense_fork made from such a sequence, that is parked, or whose step failed.
// FB_BUSY while a ticket's work for it is in flight; steps in flight do not matter. FB_DEVICE_FAILED if its last copy
// failed. FB_OUT_OF_RANGE when `from` differs from the `published` that fb_dense_length returns, for more ids than
// were admitted, and for keys that are neither none nor one for each full page.
//
// Requires:
// `next` states its real size, and everything it points to is valid. `published` has room for the result.
fb_status fb_dense_publish(struct fb_dense *dense,
                           uint64_t sequence,
                           uint32_t from,
                           const struct fb_tokens *next,
                           uint32_t *published);

// Copies published pages that are not yet in the host's tier to it, the oldest first, at most `bytes` bytes in this
// call: so the caller bounds the bytes a second. `stream` should have a low priority, and be no stream of steps.
// `*saved` receives the bytes; 0 if nothing is left to copy, `bytes` is less than a page, or there is no such tier.
// The errors are the device's: the next call that copies or begins a step enqueues the copies that it refused.
//
// Requires:
// `saved` has room for the result.
fb_status fb_dense_save(struct fb_dense *dense,
                        void *stream,
                        uint64_t bytes,
                        uint64_t *saved);

// Admits a sequence of `prompt` tokens that may decode `promised` tokens after them: it takes, in every group, all
// pages that the sequence's steps will need. Its first steps compute the prompt, in chunks. FB_EXHAUSTED names the
// sequences, or the pages with their group, and gives `wanted` and `free`; FB_OUT_OF_RANGE for no tokens, and for more
// than `max_tokens`. On an error the call has taken nothing.
//
// Requires:
// `sequence` has room for the result.
fb_status fb_dense_open(struct fb_dense *dense,
                        uint32_t prompt,
                        uint32_t promised,
                        uint64_t *sequence);

// Admits more tokens to a sequence: its prompt gets `prompt` tokens in all, and after them it may decode `promised`.
// Neither the prompt nor the sum may become smaller. Steps in flight go on. FB_OUT_OF_RANGE for a smaller number or
// more than `max_tokens`; FB_EXHAUSTED as in fb_dense_open; FB_INVALID_STATE for a sequence whose step failed. After
// any of these nothing has changed.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_dense_extend(struct fb_dense *dense,
                          uint64_t sequence,
                          uint32_t prompt,
                          uint32_t promised);

// Opens a sequence that begins as a copy of `parent`. The parent's committed tokens are its prompt, and after them it
// may decode `promised` tokens. The two share full pages; the call copies the partial page on `stream`. The child may
// take part in steps at once: they wait for the copy. `ticket` may be NULL; otherwise it receives the ticket of the
// copy. FB_BUSY while work of the parent is in flight. FB_INVALID_STATE while the parent is parked, when a step of it
// failed, or while it has rows that were neither accepted nor rejected: truncate it to the intended length first.
// FB_DEVICE_FAILED if its last copy failed. Other errors are those of fb_dense_open.
//
// Requires:
// `child` has room for the result. `ticket` is NULL or has room for the result.
fb_status fb_dense_fork(struct fb_dense *dense,
                        uint64_t parent,
                        uint32_t promised,
                        void *stream,
                        uint64_t *child,
                        struct fb_ticket **ticket);

// Truncates a sequence to `length` tokens. Landed rows below the length are accepted, except those of a failed step;
// landed rows from it on are rejected. Pages that other sequences share from the length on are replaced, and `stream`
// copies the rows of the first of them that remain. After the call a sequence whose step failed may take part in steps
// again. `ticket` may be NULL; otherwise it receives the ticket of the copy. FB_INVALID_STATE for a sequence that is
// parked. FB_BUSY while work of the sequence is in flight. FB_OUT_OF_RANGE for a length beyond the committed and
// landed rows, and for one whose sliding window was given back. FB_EXHAUSTED when shared pages cannot be replaced.
// After any of these nothing has changed. If the device refuses the call half-way, call it again with the same length
// or a smaller one; only fb_dense_close also accepts the sequence until then.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_dense_truncate(struct fb_dense *dense,
                            uint64_t sequence,
                            uint32_t length,
                            void *stream,
                            struct fb_ticket **ticket);

// Parks a sequence: its rows go to the host's tier, and its device pages are free for others when the call returns.
// `accepted` is how many rows of its last step count, as in fb_dense_prepare; the others are rejected. fb_dense_resume
// brings it back. Until then it can be extended and closed. `stream` copies the pages that have no copy on the host
// yet; it is ordered as for fb_dense_close, and should be a stream of copies, not of steps: it waits for all copies to
// the host that were enqueued before. `ticket` may be NULL; otherwise it receives the ticket of these copies. Nothing
// needs to wait for it.
//
// FB_INVALID_STATE for a sequence that is parked, or whose step failed (truncate it first). FB_BUSY while work of the
// sequence is in flight. FB_DEVICE_FAILED if that work failed. FB_OUT_OF_RANGE for more accepted rows than landed, and
// for a length whose sliding window was given back: accept all rows of a prompt's chunk. FB_EXHAUSTED names the host
// pages with their group. After any of these nothing has changed. If the device refuses the call half-way, call it
// again, on a stream that is ordered as the first: it goes on where it stopped, and until then the sequence may be
// parked or not.
//
// Requires:
// `ticket` is NULL or has room for the result. `stream` is as for fb_dense_close.
fb_status fb_dense_park(struct fb_dense *dense,
                        uint64_t sequence,
                        uint32_t accepted,
                        void *stream,
                        struct fb_ticket **ticket);

// Resumes a parked sequence: takes the device pages that it will need, and brings its rows back on `stream`. Its steps
// wait for them on the device, as those of fb_dense_open_shared do; it may enter any micro-batch. `ticket` may be
// NULL; otherwise it receives a ticket that ends when all of its pages are there. FB_INVALID_STATE for a sequence that
// is not parked. FB_EXHAUSTED names the device pages with their group. After any of these nothing has changed. If the
// device refuses the call half-way, the sequence stays parked and keeps the device pages that it has taken: resume it
// again, or close it.
//
// Requires:
// `ticket` is NULL or has room for the result.
fb_status fb_dense_resume(struct fb_dense *dense,
                          uint64_t sequence,
                          void *stream,
                          struct fb_ticket **ticket);

// Reads the lengths of a sequence, in tokens, as far as the host has them.
//
// Requires:
// `length` states its real size.
fb_status fb_dense_length(const struct fb_dense *dense,
                          uint64_t sequence,
                          struct fb_dense_sequence_length *length);

// Copies the device pages of a sequence in a group, in token order, as many as `room` allows: number `b` has the rows
// of positions from `b * page_tokens` on. Pages before a sliding window are 0, the null page. A parked sequence has
// none. `*count` receives how many there are. FB_OUT_OF_RANGE for an unknown group.
//
// Requires:
// `pages` has `room` places; `count` has room for the result.
fb_status fb_dense_pages(const struct fb_dense *dense,
                         uint64_t sequence,
                         uint32_t group,
                         uint32_t *pages,
                         uint32_t room,
                         uint32_t *count);

// Ends a sequence, also to abort a request. Its number is closed at once. Its pages become free when the last step
// that uses them has been retired and every ticket of the sequence has ended: in this call, in that fb_dense_retire,
// or in fb_dense_reap. If the device refuses the call, the sequence is closed even so, and fb_dense_reap frees its
// pages.
//
// Requires:
// `stream` is ordered after the work that the engine has enqueued for the sequence outside of steps.
fb_status fb_dense_close(struct fb_dense *dense,
                         uint64_t sequence,
                         void *stream);

// Begins a step of a micro-batch with these batch rows. It enqueues, on `stream`, the wait for earlier work and the
// begin, which fills the micro-batch's tensors (fb_dense_tensors). The engine's kernels then write the new rows to
// their slots, and attention reads the pages. A batch row is a decoding sequence with its drafts, or a chunk of a
// prompt; the query rows of all of them together are at most `step_tokens` of fb_dense_config.
//
// The call accepts rows, one step late. Of the rows that a sequence's previous step wrote, it commits the first
// `accepted` of fb_batch_row and forgets the others; of a prompt's chunk all rows are accepted. For rows with
// FB_ACCEPTED_ON_DEVICE, `accepted` has on the device one uint32_t for each of the cache's `batch` rows, which the
// device reads in the stream's order. It may be NULL.
//
// FB_BUSY when every step descriptor is in use or a sequence has `steps_in_flight` steps in flight (retire a step),
// when the micro-batch's last step is not finished, and while steps behind a failed one are in flight in a model with
// windows (retire those). FB_INVALID_STATE for a sequence that is parked, whose step failed, or whose first step
// was in another micro-batch: its first one since it was opened or resumed. FB_INVALID_CONFIG for a sequence that is
// named twice, and for FB_ACCEPTED_ON_DEVICE without `accepted`. FB_OUT_OF_RANGE for no or too many batch rows, query
// rows or accepted rows, and for a sequence that would outgrow its admitted tokens. FB_DEVICE_FAILED if the last copy
// of a sequence failed. FB_CLOSED for a closed sequence. On an error no step begins and no row is accepted.
//
// Requires:
// `rows` has `row_count` batch rows. `accepted` is NULL, or valid until the stream has passed this call. `step` has
// room for the result.
fb_status fb_dense_prepare(struct fb_dense *dense,
                           uint32_t micro_batch,
                           const struct fb_batch_row *rows,
                           uint32_t row_count,
                           const uint32_t *accepted,
                           void *stream,
                           fb_step *step);

// Makes `stream` wait until the pages of the step's sequences are on the device in `layer` and all layers before it.
// Call it before each layer's new rows are written, on the stream that computes the layer: the last page comes back
// whole, and would overwrite them. It costs nothing while no pages are coming back, and without `bring_layers` of
// fb_dense_config, where fb_dense_prepare has waited for all layers. A graph that is being captured cannot wait for a
// copy outside of it: for a captured step call this for the last layer, before the graph is launched. FB_OUT_OF_RANGE
// for an unknown layer, FB_INVALID_STATE for a finished step.
fb_status fb_dense_arrived(struct fb_dense *dense,
                           fb_step step,
                           uint32_t layer,
                           void *stream);

// Ends the enqueueing of a step. `stream` must be ordered after everything that the engine has enqueued for the step:
// pages and tensors may be used for other rows once the stream has passed this call. FB_INVALID_STATE for a finished
// step and, with `bring_layers` of fb_dense_config, for one that did not call fb_dense_arrived for all layers;
// FB_CLOSED for one that is not this cache's. If the device refuses the call, call it again.
fb_status fb_dense_finish(struct fb_dense *dense,
                          fb_step step,
                          void *stream);

// Abandons an open step whose work the engine cannot enqueue. The step must still be finished and retired;
// fb_dense_retire then returns FB_CANCELLED. Truncate its sequences (fb_dense_truncate) or close them afterwards.
// FB_INVALID_STATE for a finished step.
fb_status fb_dense_abandon(struct fb_dense *dense,
                           fb_step step);

// Ends a step whose work has ended, and sets `*step` to 0. `lengths` receives the committed length, in tokens, of each
// batch row's sequence, as many as `room` allows: after the step's own commit, without its new rows. `count`, which
// may be NULL, receives the number of batch rows. FB_BUSY means that the step's work is still running, that
// fb_dense_finish was not called for it, or that an earlier step of one of its sequences is not retired: retire it
// later. After an error the step has ended if and only if `*step` is
// 0. FB_DEVICE_FAILED means that the device failed or a step asked for what its sequences do not have; FB_CANCELLED
// that the step was abandoned. After any error that sets `*step` to 0, discard the step's tokens, and truncate
// (fb_dense_truncate) or close its sequences. A step that was enqueued after a failed one fails too: retire it as
// well, then truncate to at most the length that was committed before the first failed step. `stream` is as for
// fb_dense_close.
//
// Requires:
// `step` points to a step's number; `lengths` has `room` places; `count` is NULL or has room for the result.
fb_status fb_dense_retire(struct fb_dense *dense,
                          fb_step *step,
                          void *stream,
                          uint32_t *lengths,
                          uint32_t room,
                          uint32_t *count);

// Resolves a layer's selection (top-k indices) and gathers the missed rows, for all batch rows of the step, on one
// stream. `selection` has token positions, -1 for none, `[batch rows][query rows][top_k]`. `slots`, of the same shape,
// receives the slots of these positions in the layer's slab. Query row r, from 0, may select positions below L + r +
// 1, where L is the committed length after this step's commit (fb_retired_lengths returns it). On any other position
// except -1, fb_retire returns FB_DEVICE_FAILED. Fetched rows for which the budget has no slot are in scratch slots,
// which other layers use too: enqueue this layer's attention before the next layer's call. FB_INVALID_CONFIG in a
// cache with several attention waves: call fb_resolve, then fb_gather for each wave. FB_INVALID_STATE for a finished
// step.
//
// In a layer that another one selects for (`group_layers` of fb_cache_config) the call gathers only and writes no
// slots: attention reads those of the group's first layer.
//
// Requires:
// The device may use both buffers until the stream has passed this call.
fb_status fb_layer(struct fb_cache *cache,
                   fb_step step,
                   uint32_t layer,
                   const int32_t *selection,
                   int32_t *slots,
                   void *stream);

// Calls fb_layer for every layer, draft layers included. It is for replays and tests, which have all selections
// beforehand. `selection` and `slots` are `[index_groups of fb_info][batch rows][query rows][top_k]`: for each layer
// that selects. Layers share the scratch slots, so after this call these hold rows of the last layer only; where
// layers share a selection, of the last group's layers. If an earlier layer might need a scratch slot, the call
// therefore returns FB_INVALID_CONFIG and enqueues nothing. No layer needs one if each sequence of the step has a
// budget of at least query rows x top_k slots, or of a slot for each token of its prompt, its promised tokens and the
// allowance for rows in flight (the cache's `query_rows` x `steps_in_flight`), or if the cache has residency_only set.
// If another error stops the call at a layer, the layers before it are enqueued: abandon the step (fb_abandon), or
// continue with fb_layer.
//
// Requires:
// As fb_layer.
fb_status fb_layers(struct fb_cache *cache,
                    fb_step step,
                    const int32_t *selection,
                    int32_t *slots,
                    void *stream);

// Resolves the selection of a range of a step. FB_OUT_OF_RANGE for a layer that another one selects for
// (`group_layers` of fb_cache_config): it only gathers. The caller must call fb_gather for these batch rows before
// the next resolve of any of them, in any layer, and order it after this resolve: on the same stream, or by
// fb_stream_order. The gather must also be ordered before the attention that reads the fetched rows; attention over
// index list 0 may run before it. A step in which missed rows were not gathered fails.
//
// Requires:
// `range` and `buffers` state their real sizes. The device may use the buffers until the stream has passed this call.
fb_status fb_resolve(struct fb_cache *cache,
                     fb_step step,
                     const struct fb_step_range *range,
                     const struct fb_buffers *buffers,
                     void *stream);

// Fetches the rows that the last resolve of this range missed; with several attention waves, only the rows of wave
// `attention_wave`, from 0. Attention that is ordered after this call may read the slots.
//
// In a layer that another one selects for (`group_layers` of fb_cache_config) the resolve is that of the group's first
// layer. There, this call may run at any time between that resolve and the layer's own attention: the layers of a
// group have scratch slots of their own.
//
// Requires:
// `range` states its real size.
fb_status fb_gather(struct fb_cache *cache,
                    fb_step step,
                    const struct fb_step_range *range,
                    uint32_t attention_wave,
                    void *stream);

// Stores a layer's new rows in the total pool. Enqueue it after the engine has written the rows to their landing
// slots.
fb_status fb_scatter(struct fb_cache *cache,
                     fb_step step,
                     uint32_t layer,
                     void *stream);

// Does the same as fb_scatter for a range of the step.
//
// Requires:
// `range` states its real size.
fb_status fb_scatter_range(struct fb_cache *cache,
                           fb_step step,
                           const struct fb_step_range *range,
                           void *stream);

// Meets the other ranks of the group of `weights` in a folder: they say who they are and compare plan, `geometry` and
// content. Blocks until the copies on `stream` have run, this rank's part was hashed, and all ranks are there. Every
// tensor must have been filled, on `stream` or on streams that it is ordered after. Errors are texts of `weights`.
// FB_INVALID_STATE for weights that are not filled, or were shared. FB_TIMED_OUT with the lowest rank that did not
// come. FB_INVALID_CONFIG for ranks that differ, and for times that contradict each other. FB_BUSY for a second
// process of this rank. FB_IO for a folder that takes no socket. After an error the weights are filled as before, and
// the call may be repeated.
//
// Requires:
// `config` states its real size, and its `folder` ends with a zero; `links` has room for the result.
fb_status fb_links_meet(struct fb_weights *weights,
                        const struct fb_links_config *config,
                        void *stream,
                        struct fb_links **links);

// Gives this rank's parts to all other ranks and takes theirs. All ranks call it, each for at most `at_most_ms`
// milliseconds. From then on the weights serve steps, and cannot be filled any more. With FB_WEIGHTS_FROM_HOST, or in
// a group of one rank, nothing is exchanged. Errors are texts of `weights`. FB_TIMED_OUT, FB_PEER_LOST, FB_BAD_FORMAT
// and FB_CORRUPT name the rank. FB_INVALID_STATE for weights that are not filled, or were shared before.
// FB_INVALID_CONFIG for sessions of other weights. If a rank is lost meanwhile, the call exchanges the parts of all
// others and then returns that rank's error; fb_links_readmit and fb_weights_reattach do the rest. After FB_TIMED_OUT
// the weights cannot be shared any more: destroy sessions, weights and device, and begin anew, on all ranks.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_share(struct fb_weights *weights,
                           struct fb_links *links,
                           void *stream,
                           uint32_t at_most_ms);

// Takes a rank in that has come back (FB_LINKS_RETURNED): gives it this rank's parts, takes its parts, and maps them
// at the addresses of its last process's. Between steps, when all steps have run that pull from the rank. Blocks for
// at most `at_most_ms` milliseconds; let that be at least `hello_ms`, because the rank may still wait for another one
// that comes back, and its meeting ends if this call ends twice before. fb_links_poll is refused until then, because
// it would drop the rank's first part. Several ranks are taken one after another, the lowest first. Replicas are
// dropped, because the rank has none: those that it held or owned, and all once no other rank is lost or waits to be
// attached. Errors are texts of `weights`.
//
// FB_BUSY while a step is open or a change of replicas is there. FB_INVALID_STATE for a rank that was never lost. The
// error of a rank that was lost and has not come back, such as FB_PEER_LOST. FB_CORRUPT for a part that is not the one
// of before. After an error of the exchange the rank is lost again, and can come back again.
//
// Requires:
// No work that is enqueued or runs pulls from the rank.
fb_status fb_weights_reattach(struct fb_weights *weights,
                              struct fb_links *links,
                              uint32_t rank,
                              uint32_t at_most_ms);

// Serves the sessions and returns the next event, or FB_LINKS_NOTHING after `at_most_ms` milliseconds, at once if all
// sessions are over; 0 looks once and never waits. Call it at least every few seconds, on any thread: other ranks hold
// one for lost that says nothing. For FB_LINKS_LOST, `text` receives the rank's error; otherwise it is empty. A rank
// that was lost is an event and no failure of this call. Messages of an update or a change of replicas are kept for
// fb_update_share and fb_replication_share. FB_INVALID_STATE, with the rank, between the fb_links_readmit that
// returned a rank and its fb_weights_reattach.
//
// Requires:
// `event` states its real size; `text` is NULL or has `text_bytes` bytes.
fb_status fb_links_poll(struct fb_links *links,
                        uint32_t at_most_ms,
                        char *text,
                        size_t text_bytes,
                        struct fb_links_event *event);

// Looks whether a rank that was lost has come back, for at most `at_most_ms` milliseconds; 0 looks once and never
// waits. The event is FB_LINKS_RETURNED with the rank, the lowest first, or FB_LINKS_NOTHING; at once if no rank was
// lost. Its new process does what it did at the start: fill, fb_links_meet in the same folder, fb_weights_share.
// FB_INVALID_CONFIG for a process with another plan, `geometry` or content than its rank had: that connection is
// closed, and the next process can come.
//
// Requires:
// `event` states its real size.
fb_status fb_links_readmit(struct fb_links *links,
                           uint32_t at_most_ms,
                           struct fb_links_event *event);

// Ends this side of every session in order. Then poll until `is_over`, so that the other ranks do not hold this one
// for lost.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_links_end(struct fb_links *links);

// Destroys the sessions. To ranks with which they had not ended this one is lost.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_links_destroy(struct fb_links *links);

// Enqueues one layer of a step, or one draft pass, in an FB_OVERLAP_ order. The engine's callback enqueues the
// engine's work; the call enqueues resolve, gather and scatter between the callback's calls. `draft_pass` is
// FB_ALL_QUERY_ROWS, or j + 1 for draft pass j, counted from 0. fb_finish orders the step's end after all of it.
//
// A layer that another one selects for (`group_layers` of fb_cache_config) runs in FB_OVERLAP_NONE, FB_OVERLAP_DA or
// FB_OVERLAP_AHEAD; FB_OVERLAP_DBA is FB_OVERLAP_DA there. In another order than FB_OVERLAP_NONE it returns
// FB_INVALID_STATE unless fb_overlap has enqueued the layer that selects for it earlier in this step, and no other
// group's layer since.
//
// If the callback or the device refuses something half-way, the step is abandoned. It must still be finished and
// retired; fb_retire then returns FB_CANCELLED, and the caller truncates or closes its sequences. FB_INVALID_STATE for
// a finished or abandoned step, for other streams than the step's earlier layers used, and for another compute stream
// than the one the step was prepared on. FB_OUT_OF_RANGE for a layer, a draft pass, a number of batch rows or buffers
// that do not fit the step, and for streams of another device. FB_INVALID_CONFIG for an order that needs index lists
// without them, and for FB_OVERLAP_AHEAD in a layer that selects for itself. Inside the callback the cache is busy:
// see fb_enqueue. FB_CLOSED in a child process that the callback forked.
//
// Requires:
// `layers` and `engine` state their real sizes. The device may use the buffers until every stream has passed this
// call. The callback returns normally, without a throw or a longjmp.
fb_status fb_overlap(struct fb_cache *cache,
                     fb_step step,
                     uint32_t layer,
                     uint32_t draft_pass,
                     uint32_t order,
                     const struct fb_overlap_config *layers,
                     const struct fb_engine *engine);

// Enqueues the layers of the open steps, at most one step of each micro-batch: each layer that is no draft layer once,
// then `draft_passes` draft passes of each draft layer. The steps alternate in each layer and each draft pass. With
// draft layers, fb_finish needs a draft pass of each draft layer for each query row of the step; those beyond
// `draft_passes` are enqueued by fb_overlap. `layers` has the streams and buffers of each step. `by_layer` has the
// order of every layer, draft layers last. An error after the first work was enqueued abandons all the steps.
//
// Requires:
// As fb_overlap. `steps` and `layers` have `count` entries; `by_layer` has one for each layer of the cache, draft
// layers included.
fb_status fb_overlap_steps(struct fb_cache *cache,
                           const fb_step *steps,
                           const struct fb_overlap_config *layers,
                           uint32_t count,
                           const uint32_t *by_layer,
                           uint32_t draft_passes,
                           const struct fb_engine *engine);

// Computes a plan. On failure, `text` receives the reason: for FB_OUT_OF_MEMORY it names what does not fit, with the
// wanted and the available bytes.
//
// Requires:
// `config`, its model and `planned` state their real sizes; `text` has `text_bytes` bytes.
fb_status fb_plan(const struct fb_plan_config *config,
                  char *text,
                  size_t text_bytes,
                  struct fb_planned *planned);

// Returns the sentence for a note, given its one bit, as a constant string. It is empty for a bit without a note.
const char *fb_plan_note_text(uint32_t bit);

// Creates a receiver, which listens at `address` of `config`, and the thread that drives it. `planes` are those of
// this rank's stage, in the order of the side. They are the engine's own memory, of the host, such as the rows of a
// cache. Rows are written there by the thread, only to pages of a use (fb_receiver_grant), and only until
// FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for the use. FB_INVALID_CONFIG names a field, also for an address
// of a network without a token; FB_BUSY where another process listens; FB_OS_REFUSED for an address, sockets or a
// thread that cannot be.
//
// Requires:
// All structs state their real sizes, and have as many entries as they say. The planes' bytes may be written until
// fb_receiver_destroy has returned. `text` is NULL or has `text_bytes` bytes; `receiver` has room for the result.
fb_status fb_receiver_create(const struct fb_transfer_config *config,
                             const struct fb_transfer_side *side,
                             const struct fb_receive_plane *planes,
                             uint32_t plane_count,
                             char *text,
                             size_t text_bytes,
                             struct fb_receiver **receiver);

// Copies to `text` where the receiver listens: for port 0 with the port that the system chose. FB_OUT_OF_RANGE for an
// address that `text_bytes` bytes do not hold.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_receiver_address(const struct fb_receiver *receiver,
                              char *text,
                              size_t text_bytes);

// Wants a request: gives its pages to it, and asks the sender's ranks for its rows. Call it when FB_TRANSFER_MET has
// come for all of these ranks; otherwise it fails. `pages` has one page for each `page_tokens` tokens of the prompt,
// in its order; page `pages[i]` of every plane gets the rows of these tokens. From this call on the pages are the
// receiver's. They are the engine's again when FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for the use, one of
// which always comes, or when the receiver was destroyed. A page that is written is in no other use. Pages that have
// only rows before the first wanted token may be those of several uses.
//
// FB_OUT_OF_RANGE for too few pages, and for one that a plane does not have; FB_INVALID_STATE for a generation that is
// not above those of all grants before, and for a page that another use has. All change nothing, and no event follows.
// Everything else that is wrong comes out as FB_TRANSFER_FAILED. If fb_receiver_poll gives an error of its own, the
// receiver has ended: nothing is written any more, and no event follows.
//
// Requires:
// `wanted` states its real size, and has as many payloads as it says; `pages` has `page_count` entries.
fb_status fb_receiver_grant(const struct fb_receiver *receiver,
                            const struct fb_wanted *wanted,
                            const uint32_t *pages,
                            uint32_t page_count);

// Gives a use up. Its pages are the engine's again when FB_TRANSFER_FAILED or FB_TRANSFER_WHOLE has come, and not
// before. One that has ended meanwhile is no error. Waits for nothing.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_receiver_abort(const struct fb_receiver *receiver,
                            uint64_t request,
                            uint64_t generation);

// Takes the next event, as fb_sender_poll does.
//
// Requires:
// `event` states its real size; `text` is NULL or has `text_bytes` bytes.
fb_status fb_receiver_poll(const struct fb_receiver *receiver,
                           uint32_t at_most_ms,
                           char *text,
                           size_t text_bytes,
                           struct fb_transfer_event *event);

// Copies a payload of which FB_TRANSFER_PAYLOAD has told, and drops it: `room` bytes are at least the event's
// `payload_bytes`, which are written. FB_OUT_OF_RANGE for less room: the payload is still there. FB_CLOSED if there is
// none, because it was read, or FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for the use.
//
// Requires:
// `bytes` has `room` bytes.
fb_status fb_receiver_payload(const struct fb_receiver *receiver,
                              uint64_t request,
                              uint64_t generation,
                              uint32_t kind,
                              uint8_t *bytes,
                              size_t room);

// Writes a descriptor, as fb_sender_descriptor does.
//
// Requires:
// `descriptor` has room for the result.
fb_status fb_receiver_descriptor(const struct fb_receiver *receiver, int32_t *descriptor);

// Writes what the receiver has seen.
//
// Requires:
// `stats` states its real size.
fb_status fb_receiver_stats(const struct fb_receiver *receiver, struct fb_received *stats);

// Ends the thread and closes all connections. No page is written any more when it has returned FB_OK. Uses that are
// not over fail at their senders. FB_BUSY while another thread waits in fb_receiver_poll.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_receiver_destroy(struct fb_receiver *receiver);

// Begins a change of the replicas: `replicas` are all that there are to be after it, in any order, and those that are
// there and are named stay. Takes the memory of the replicas that this rank gains, and nothing else changes; steps go
// on. All ranks begin it with the same number and replicas. `number` is above all that were begun before, also those
// that failed; otherwise FB_OUT_OF_RANGE. Numbers of changes and versions of updates count apart. `at_most` bounds the
// bytes of device memory that it takes; FB_OUT_OF_MEMORY says how many it needs. Errors are texts of `weights`.
// FB_OUT_OF_RANGE for a layer or tensor that was not chosen, and for a rank that the group does not have.
// FB_INVALID_CONFIG for a replica that is named twice, or of which no whole granule is another rank's.
// FB_INVALID_STATE before the parts were shared. FB_BUSY while an update or another change of these weights is there:
// destroy it first, unless it was committed or aborted. FB_UNSUPPORTED with FB_WEIGHTS_FROM_HOST, and with a driver
// older than CUDA 13. The error of a layer that cannot be used. An error of the device, also one that keeps an update
// or a change that was destroyed from giving its memory back (fb_replication_abort): the call may be made again.
//
// Requires:
// `replicas` has `replica_count` entries, whose names end with a zero; `replication` has room for the result.
fb_status fb_replication_create(struct fb_weights *weights,
                                uint32_t number,
                                const struct fb_replica *replicas,
                                uint32_t replica_count,
                                uint64_t at_most,
                                struct fb_replication **replication);

// Enqueues on `stream` copies of at most `bytes` bytes into the replicas that this rank gains. `left`, which may be
// NULL, receives how many bytes are left then. Call it once a step, with as many bytes as the link has room for, until
// none are left. The copies need no order with a step's work, so a stream of their own lets them run beside it.
// FB_INVALID_STATE once fb_replication_share was called. FB_BUSY if `stream` is being captured.
//
// Requires:
// `left` is NULL or has room for the result.
fb_status fb_replication_advance(struct fb_replication *replication,
                                 uint64_t bytes,
                                 void *stream,
                                 uint64_t *left);

// Returns how many bytes this rank has still to copy before it can share: 0 if it gains no replica.
//
// Requires:
// `left` has room for the result.
fb_status fb_replication_left(const struct fb_replication *replication, uint64_t *left);

// Gives the replicas that this rank gains to the other ranks and takes theirs, while steps go on. All ranks call it,
// also those that gain none, when nothing is left to be copied, on a thread that serves the sessions meanwhile. Owners
// and holders hash what they have, and both have to agree. Blocks until the copies have run and this rank has hashed,
// and then until all ranks have shared, for at most `at_most_ms` milliseconds. Errors are texts of `replication`.
// FB_INVALID_STATE with the bytes that are left, for a change that was shared before, and while a rank that has come
// back is not attached again; the error of a rank that is lost; FB_INVALID_CONFIG for `links` that is NULL or has
// sessions of another group or plan; FB_BUSY while another call is inside one of the two; FB_CLOSED. Then nothing was
// said to any rank, and the call may be made again.
//
// After other errors the change cannot be committed by any rank, and is begun again, under a higher number.
// FB_CORRUPT, with rank and layer, for a replica that is not what its owner has. FB_INVALID_CONFIG for a rank that has
// other replicas or wants others: if it was called with the same, call fb_weights_drop_replicas on all ranks.
// FB_CANCELLED for a rank whose own call has failed. FB_TIMED_OUT and FB_PEER_LOST name the rank.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_replication_share(struct fb_replication *replication,
                               struct fb_links *links,
                               void *stream,
                               uint32_t at_most_ms);

// Gives a change up: the other ranks then abort it too, unless all have committed already, and its memory is given
// back. Blocks until the copies into it have run. Nothing happens to a change that is over. After an error of the
// device the change may keep its memory, and fb_replication_create returns FB_BUSY: call it again. If the change is
// destroyed instead, the next call that returns FB_BUSY while a change is there, such as fb_update_create, first does
// what is left, or returns the device's error.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_replication_abort(struct fb_replication *replication);

// Destroys a change of the replicas. One that was not committed is aborted, as by fb_replication_abort; what the
// device refuses then is left to a later call, as described there.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_replication_destroy(struct fb_replication *replication);

// Takes a change of the replicas, at a border between two steps at which all ranks do, or at which none does: then the
// old ones stay, on every rank. All is as for fb_weights_commit, `outcome` and its FB_UPDATE_ constants too.
// FB_UPDATE_COMMITTED: every rank reads the new replicas, and the memory of those that are gone was given back.
// FB_UPDATE_ABORTED: `reason` receives why. After an error `reason` is not written. No byte of a layer changes, so the
// next step pulls nothing anew. Destroy the change afterwards.
//
// Errors are texts of `weights`. With FB_UPDATE_OPEN nothing was decided in this call, and it may be called again:
// FB_BUSY while a step is open or if `stream` is being captured; FB_INVALID_STATE for a change that was not shared, is
// over, or is of other weights or sessions. With FB_UPDATE_FAILED the ranks have decided. A layer whose memory cannot
// be mapped returns the error from then on (fb_weights_layer), no step begins, and this process is ended and started
// again; so it is with FB_CORRUPT. If no layer returns an error, only memory of replicas that are gone could not be
// given back, and steps go on.
//
// Requires:
// No work that is enqueued or runs uses a window, except on `stream`. `outcome` has room for the result; `reason` is
// NULL or has `reason_bytes` bytes.
fb_status fb_weights_commit_replicas(struct fb_weights *weights,
                                     struct fb_replication *replication,
                                     struct fb_links *links,
                                     uint64_t step,
                                     void *stream,
                                     uint32_t at_most_ms,
                                     uint32_t *outcome,
                                     char *reason,
                                     size_t reason_bytes);

// Copies the replicas that ranks hold for each other at present, in the order of layers, tensors and ranks, as many as
// `room` allows. `*count` receives how many there are. Their names stay valid until the device is destroyed, also when
// the weights are.
//
// Requires:
// `replicas` has `room` places; `count` has room for the result.
fb_status fb_weights_replicas(const struct fb_weights *weights,
                              struct fb_replica *replicas,
                              uint32_t room,
                              uint32_t *count);

// Gives up all replicas, on this rank alone, between steps: it reads from owners again, and gives back the memory of
// its own replicas and what it holds of others'. Blocks until the pulls that were enqueued have run. No byte of a
// layer changes. The device has the memory again when no rank reads it any more. For ranks of which one has replicas
// that another has not, and for a group that needs the memory: before the next change all ranks do so.
// FB_INVALID_STATE before the parts were shared. FB_BUSY while a step is open or a change is there. An error of the
// device names the layer, which keeps its replicas; where the device has failed, every later call for it returns that
// error.
//
// Requires:
// No work that is enqueued or runs uses a window.
fb_status fb_weights_drop_replicas(struct fb_weights *weights);

// Reads around the ranks that were lost (fb_weights_lost), on this rank alone, between steps: where another rank has
// the same bytes, pulls read them there from now on. A layer that still needs a rank that was lost is FB_PEER_LOST as
// before. Blocks until the pulls that were enqueued have run. FB_INVALID_STATE before the parts were shared. FB_BUSY
// while a step is open or a change is there. After an error of the device each part is read where it was before or
// where it is anew, and the bytes of both are the same; where the device has failed, every later call for the layer
// returns that error.
//
// Requires:
// No work that is enqueued or runs uses a window.
fb_status fb_weights_reroute(struct fb_weights *weights);

// Begins a request trace in the new file `path`, which must not exist. Its prompts are recorded as blocks of
// `block_tokens` tokens. On failure, `text` receives the reason.
//
// Requires:
// `path` ends with a zero byte; `text` has `text_bytes` bytes; `requests` has room for the result.
fb_status fb_requests_create(const char *path,
                             uint32_t block_tokens,
                             char *text,
                             size_t text_bytes,
                             struct fb_requests **requests);

// Records one request. Record requests in the order of their arrival. On FB_OUT_OF_RANGE nothing is recorded and the
// caller may continue with a corrected call. After FB_IO the file ends with the last line that was written before, and
// every later call but fb_requests_destroy fails.
//
// Requires:
// `arrival` states its real size, and its blocks are valid.
fb_status fb_requests_record(struct fb_requests *requests,
                             const struct fb_arrival *arrival);

// Writes the buffered lines. Written lines survive the process.
fb_status fb_requests_flush(struct fb_requests *requests);

// Flushes, and syncs the file to disk, so that it survives a loss of power.
fb_status fb_requests_sync(struct fb_requests *requests);

// Ends the trace: writes the buffered lines and syncs the file. `count`, which may be NULL, receives the number of
// recorded requests. Readers reject a file without any request. Whatever the result, the handle can then only be
// destroyed.
//
// Requires:
// `count` is NULL or has room for the result.
fb_status fb_requests_finish(struct fb_requests *requests,
                             uint64_t *count);

// Destroys the handle. All recorded lines are in the file, unless writing fails or a call returned FB_IO before.
fb_status fb_requests_destroy(struct fb_requests *requests);

// Begins a step of so many micro-batches and draft passes, and enqueues the pulls of the first layers that are
// missing. Call it before the first layer, and before a capture begins. FB_BUSY while a step is open. FB_INVALID_STATE
// before the parts were shared. FB_OUT_OF_RANGE for no micro-batch, or more than the configuration has. FB_PEER_LOST
// for a layer that is pulled from a rank that was lost, with both. The error of a layer whose memory could not be
// mapped, also of one that this step does not pull.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_begin(struct fb_weights *weights,
                           uint32_t micro_batches,
                           uint32_t draft_passes);

// A micro-batch's use of a layer begins: the work that is enqueued on `stream` from here on finds the layer whole. A
// micro-batch has one compute stream. Sharded layers are entered in their order, each once, then the draft layers in
// each draft pass; with several micro-batches, each layer by all of them in turn. Nothing happens for a layer that is
// not sharded. FB_INVALID_STATE for a layer out of order, without a step, or on another stream. FB_OUT_OF_RANGE for a
// layer or micro-batch that there is not. After an error call fb_weights_abandon.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_enter(struct fb_weights *weights,
                           uint32_t layer,
                           uint32_t micro_batch,
                           void *stream);

// A micro-batch's use of a layer ends with the work that is enqueued on `stream` now: behind the output projection,
// not behind the experts. When the last micro-batch has left the layer, the pull of the buffer's next layer begins.
// FB_INVALID_STATE for a layer that was not entered. FB_PEER_LOST with the next layer and the rank. After an error
// call fb_weights_abandon.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_leave(struct fb_weights *weights,
                           uint32_t layer,
                           uint32_t micro_batch,
                           void *stream);

// Enqueues a further part of each pull that is cut into parts (`parts` of fb_weights_config), behind the work that
// `stream` has now. For an engine whose collectives need the link: call it behind a collective.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_advance(struct fb_weights *weights,
                             void *stream);

// Ends a step whose layers are all enqueued. In a capture, `stream` is the stream on which the capture began: the
// pulls' streams are joined to it. FB_INVALID_STATE without a step, or with a layer that a micro-batch has not left.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_end(struct fb_weights *weights,
                         void *stream);

// Abandons an open step, as after an error. What was enqueued runs; the next fb_weights_begin pulls the first layers
// again, behind it. Discard a capture first. Without an open step nothing happens.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_abandon(struct fb_weights *weights);

// Launches a graph that contains a captured step of these weights: `launch(data, stream)` enqueues it on `stream`. The
// launch is ordered after the pulls before it, and the pulls behind it after the launch. The result of `launch` if it
// is not 0; no step is open then. FB_BUSY while a step is open. FB_PEER_LOST before anything is launched, as for
// fb_weights_begin; other errors are those of fb_weights_begin. FB_CLOSED in a child process that the callback forked.
//
// Requires:
// `launch` may be called with `data`, and returns normally, without a throw or a longjmp.
fb_status fb_weights_launch(struct fb_weights *weights,
                            void *stream,
                            fb_launch_graph launch,
                            void *data);

// Tells the weights that a rank was lost (FB_LINKS_LOST): its memory stays mapped, and nothing else tells. From then
// on a call that would pull a layer from it returns FB_PEER_LOST, and layers that are resident go on. Abandon an open
// step. Then wait for the rank's new process (fb_links_readmit, fb_weights_reattach), or make every layer resident;
// fb_weights_reroute reads replicas instead, where there are such.
// FB_OUT_OF_RANGE for one's own rank and for one that the group does not have.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_lost(struct fb_weights *weights,
                          uint32_t rank);

// Reads the selection trace in the file `path`, compressed or not. A recording that fb_trace_create began can be read
// whether it was finished or not. On failure, `text` receives the reason.
//
// Requires:
// `path` ends with a zero byte; `text` has `text_bytes` bytes; `selections` has room for the result.
fb_status fb_selections_open(const char *path,
                             char *text,
                             size_t text_bytes,
                             struct fb_selections **selections);

// Copies the numbers of the trace's header.
//
// Requires:
// `header` states its real size.
fb_status fb_selections_header(const struct fb_selections *selections, struct fb_trace_header *header);

// Copies one of the strings of the trace's header to `text`. An FB_SELECTIONS_ constant names it. The string is empty
// if the trace does not have it.
//
// Requires:
// `text` has `text_bytes` bytes.
fb_status fb_selections_text(const struct fb_selections *selections,
                             uint32_t which,
                             char *text,
                             size_t text_bytes);

// Copies the model's own numbers of the recorded layers, as many as `room` allows, to `ids`. `count` receives how many
// there are. `ids` may be NULL with a `room` of 0.
//
// Requires:
// `ids` has room for `room` numbers; `count` has room for the result.
fb_status fb_selections_layer_ids(const struct fb_selections *selections,
                                  uint32_t *ids,
                                  uint32_t room,
                                  uint32_t *count);

// Copies the selections of `steps` steps from `first_step` on: `[steps][layers][k]` positions. The positions of one
// step and layer ascend; if they are fewer than k, -1 fills the rest.
//
// Requires:
// `positions` has room for `steps` x layers x k numbers.
fb_status fb_selections_read(const struct fb_selections *selections,
                             uint32_t first_step,
                             uint32_t steps,
                             int32_t *positions);

// Destroys the handle.
fb_status fb_selections_destroy(struct fb_selections *selections);

// Creates a sender: its memory, its end of the fabric, and the thread that drives them. It connects to no receiver
// yet. FB_INVALID_CONFIG names a field; FB_OUT_OF_MEMORY, FB_OS_REFUSED for memory, sockets or a thread that cannot
// be.
//
// Requires:
// All structs state their real sizes, and have as many entries as they say; `text` is NULL or has `text_bytes` bytes;
// `sender` has room for the result.
fb_status fb_sender_create(const struct fb_transfer_config *config,
                           const struct fb_transfer_side *side,
                           const struct fb_send_memory *memory,
                           char *text,
                           size_t text_bytes,
                           struct fb_sender **sender);

// Writes where the sender's memory is, and its bytes. It is zero at first and stays there until fb_sender_destroy. The
// engine, or a copy of a device, writes rows there before fb_sender_computed, and again only after
// FB_TRANSFER_RELEASED of the rows' origin or FB_TRANSFER_ENDED of their request. A device that writes there may have
// to register the memory first.
//
// Requires:
// `address` and `bytes` have room for the results.
fb_status fb_sender_memory(const struct fb_sender *sender,
                           void **address,
                           uint64_t *bytes);

// Copies fallback number `index`, from 0, to `text`, as fb_cache_fallback does: each is an option of the memory that
// the system refused.
//
// Requires:
// `text` is NULL or has `text_bytes` bytes.
fb_status fb_sender_fallback(const struct fb_sender *sender,
                             size_t index,
                             char *text,
                             size_t text_bytes);

// Connects to the receiver at `address`, an address as fb_transfer_config has it, again and again until
// fb_sender_remove or the end. A process that does not listen yet is no error. FB_INVALID_CONFIG for a text that is no
// address; one that the sender may not use comes out as FB_TRANSFER_REFUSED.
//
// Requires:
// `address` ends with a zero.
fb_status fb_sender_add(const struct fb_sender *sender,
                        const char *address);

// Connects to the receiver at `address` no longer. A connection to it is lost.
//
// Requires:
// `address` ends with a zero.
fb_status fb_sender_remove(const struct fb_sender *sender, const char *address);

// A request of `tokens` tokens is computed here. `request` is the number of this try at it: no other try has the same,
// here or at any receiver. If a receiver has given it up already, it ends at once. It fails if it is not over within
// `within_ms` milliseconds; 0: it may take any time, and the engine gives up by fb_sender_abort what no receiver
// wants. Like all calls up to fb_sender_abort it waits for nothing: the sender's thread carries it out, and
// FB_TRANSFER_REFUSED says if it could not, as for a request that has begun already. A call for a request that is over
// does nothing.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_sender_begin(const struct fb_sender *sender,
                          uint64_t request,
                          uint32_t tokens,
                          uint32_t within_ms);

// Says that `count` parts, at most 16,384, are computed and written. Call it when the copies into the memory have run,
// not before: rows are read from now on. They stay as they are until FB_TRANSFER_RELEASED or FB_TRANSFER_ENDED.
// FB_OUT_OF_RANGE for tokens that no request has. Waits for nothing (fb_sender_begin).
//
// Requires:
// `parts` has `count` entries, each of which states its real size.
fb_status fb_sender_computed(const struct fb_sender *sender,
                             const struct fb_computed *parts,
                             uint32_t count);

// Adds a payload of a kind below 256, such as the first token, which reaches each receiver whole. FB_OUT_OF_RANGE for
// a larger kind, and for bytes that no frame holds: about 64 KiB. Waits for nothing (fb_sender_begin).
//
// Requires:
// `bytes` has `count` bytes.
fb_status fb_sender_payload(const struct fb_sender *sender,
                            uint64_t request,
                            uint32_t kind,
                            const uint8_t *bytes,
                            size_t count);

// Says that all of a request is computed. FB_TRANSFER_ENDED follows when its receivers have it. Waits for nothing
// (fb_sender_begin).
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_sender_finish(const struct fb_sender *sender,
                           uint64_t request);

// Gives a request up. Its rows are free when FB_TRANSFER_ENDED has come, and not before. Waits for nothing
// (fb_sender_begin).
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_sender_abort(const struct fb_sender *sender, uint64_t request);

// Takes the next event, or FB_TRANSFER_NOTHING after `at_most_ms` milliseconds; 0 looks once and never waits. `text`
// receives the error of an event that has one; otherwise it is empty. Other calls go on while one waits; but
// fb_sender_destroy is then FB_BUSY. If the thread has ended by an error, that error is returned after all events, and
// no row is read any more. An engine that takes no events is lost to receivers when 65,536 wait.
//
// Requires:
// `event` states its real size; `text` is NULL or has `text_bytes` bytes.
fb_status fb_sender_poll(const struct fb_sender *sender,
                         uint32_t at_most_ms,
                         char *text,
                         size_t text_bytes,
                         struct fb_transfer_event *event);

// Writes a descriptor that is readable while there are events, for poll, epoll or asyncio. It is the sender's own:
// only wait for it. It is closed by fb_sender_destroy.
//
// Requires:
// `descriptor` has room for the result.
fb_status fb_sender_descriptor(const struct fb_sender *sender,
                               int32_t *descriptor);

// Writes what the sender has seen.
//
// Requires:
// `stats` states its real size.
fb_status fb_sender_stats(const struct fb_sender *sender, struct fb_sent *stats);

// Writes how long rows of a layer of the model were held; zeros if none were released.
//
// Requires:
// `lag` states its real size.
fb_status fb_sender_lag(const struct fb_sender *sender, uint32_t layer, struct fb_lag *lag);

// Ends the thread and closes all connections; the memory stays. Requests that are not over fail at their receivers. No
// event comes any more: from now on all calls but this one, fb_sender_memory, fb_sender_fallback and fb_sender_destroy
// are FB_CLOSED. FB_BUSY while another thread waits in fb_sender_poll.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_sender_end(struct fb_sender *sender);

// Ends the thread, closes all connections, and frees the memory. Requests that are not over fail at their receivers.
// FB_BUSY while another thread waits in fb_sender_poll.
//
// Requires:
// Nothing writes to the sender's memory any more.
fb_status fb_sender_destroy(struct fb_sender *sender);

// Begins a step. It enqueues, on `stream`, the wait for earlier work, the copy of the step descriptor, and the commit
// of the accepted rows among those that the sequences' previous steps left in their landing slots. The call returns
// FB_BUSY when every step descriptor is in use or a sequence has `steps_in_flight` steps in flight (retire a step),
// when the micro-batch's last step is not finished (fb_finish), or when another call is inside the cache (see Threads
// at the top). FB_INVALID_STATE for a sequence that is not running yet, whose first step was in another micro-batch (a
// sequence keeps it), or whose step failed. FB_OUT_OF_RANGE for too many batch rows, query rows or accepted rows, and
// for a sequence that could then have more tokens than its prompt, its promised tokens and an allowance for rows in
// flight (the cache's `query_rows` x `steps_in_flight`). FB_INVALID_CONFIG for a sequence that is named twice, and for
// FB_ACCEPTED_ON_DEVICE without `accepted`. FB_DEVICE_FAILED if a sequence's warm-up failed. On an error no step
// begins. In a cache with a `share` the call first resizes sequences of its micro-batch, if there is cause; their new
// budgets hold even if the call then fails. If the device refuses the call half-way, its step descriptor becomes free
// once the stream has passed what was enqueued.
//
// Requires:
// `config` states its real size. Its `rows` are valid for the call, and its `accepted` until the stream has passed
// this call. `step` has room for the result.
fb_status fb_prepare(struct fb_cache *cache,
                     const struct fb_step_config *config,
                     void *stream,
                     fb_step *step);

// Ends the enqueueing of a step: it enqueues the report and records the step's event on `stream`. The call orders
// `stream` after what fb_overlap, fb_overlap_steps or fb_launch enqueued. If the engine orders layers itself, `stream`
// must already be ordered after that work.
//
// A step is complete when every query row of its batch rows was resolved, gathered in each attention wave, and
// scattered, in every layer, draft layers included. With residency_only, resolving is enough. While a call is missing,
// fb_finish returns FB_INVALID_STATE, and the error text names the call, its layer, batch row and query row. It then
// enqueues nothing and the step stays open: make the missing call, or abandon the step with fb_abandon. A missing
// gather may still be enqueued until any layer's next resolve of these batch rows. After that, fb_finish accepts the
// step only if the layer with the missing gather is resolved and gathered again. If its first resolve had misses,
// fb_retire returns FB_DEVICE_FAILED even so. FB_INVALID_STATE also for a step that is already finished.
fb_status fb_finish(struct fb_cache *cache,
                    fb_step step,
                    void *stream);

// Abandons an open step, for an engine that fails between layers. The step must still be finished and retired;
// fb_retire then returns FB_CANCELLED. Truncate its sequences (fb_truncate) or close them afterwards.
// FB_INVALID_STATE for a finished step.
fb_status fb_abandon(struct fb_cache *cache,
                     fb_step step);

// Ends a step whose work has ended, and sets `*step` to 0. FB_BUSY means that the step's work is still running, or
// that fb_finish was not called for it: the caller retires it later. After an error the step has ended if and only if
// `*step` is 0. FB_BUSY, FB_CLOSED and FB_INVALID_CONFIG leave the step and `*step` as they were. So does an error
// with which the driver does not say whether the work has ended: retire the step again later. After FB_INTERNAL from a
// panic the cache is unusable. FB_DEVICE_FAILED means that the device failed, a selection was invalid, missed rows
// were not gathered, or a launched graph lacked a call. FB_CANCELLED means that the step was abandoned. After any
// error that sets `*step` to 0, discard the step's tokens, and truncate (fb_truncate) or close its sequences. If a
// later step of one of these sequences was already enqueued, it fails too: retire it as well, then truncate to at most
// the length that was committed before the first failed step. `retired` may be NULL. If the call frees closed
// sequences, it enqueues the operations that empty their lanes on `stream`.
//
// Requires:
// `step` points to a step's number; `retired` is NULL or states its real size.
fb_status fb_retire(struct fb_cache *cache,
                    fb_step *step,
                    void *stream,
                    struct fb_retired *retired);

// Copies the hits and misses of each layer of the step that was retired last, as many as `room` allows, to `counts`.
// `count` receives how many layers there are; it is 0 if that step failed. `counts` may be NULL with a `room` of 0.
//
// Requires:
// `counts` has room for `room` entries; `count` has room for the result.
fb_status fb_retired_counts(const struct fb_cache *cache,
                            struct fb_layer_count *counts,
                            uint32_t room,
                            uint32_t *count);

// Copies the committed length, in tokens, of each batch row's sequence, as the report of the step that was retired
// last gives it: after the step's own commit, without its new rows. It copies in the same way as fb_retired_counts.
//
// Requires:
// `lengths` has room for `room` numbers; `count` has room for the result.
fb_status fb_retired_lengths(const struct fb_cache *cache,
                             uint32_t *lengths,
                             uint32_t room,
                             uint32_t *count);

// Returns the state of a ticket's work: FB_TICKET_PENDING, FB_TICKET_DONE, FB_TICKET_FAILED or FB_TICKET_CANCELLED.
// `status`, which may be NULL, receives the error of failed work; otherwise FB_OK, or FB_CANCELLED for cancelled work.
//
// Requires:
// `outcome` has room for the result; `status` is NULL or has room for one.
fb_status fb_ticket_outcome(const struct fb_ticket *ticket,
                            uint32_t *outcome,
                            uint32_t *status);

// Destroys a ticket, whether or not its work has ended. The work continues.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_ticket_destroy(struct fb_ticket *ticket);

// Creates the file `path`, which must not exist, and writes the recording's header. On failure, it leaves no new
// file, and `text` receives the reason.
//
// Requires:
// `path` ends with a zero byte. `config` states its real size, and everything it points to is valid. `text` has
// `text_bytes` bytes. `trace` has room for the result.
fb_status fb_trace_create(const char *path,
                          const struct fb_trace_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_trace **trace);

// Records the selection of the query at `position`: for each layer that selects for itself, in order, k positions in
// any order, -1 for none. `selected` has `count` numbers in host memory. Record each accepted position once, in order,
// from first_position on. On FB_OUT_OF_RANGE nothing is recorded and the caller may continue with a corrected call.
// After FB_IO the file ends with the last group of steps that was written before, and every later call but
// fb_trace_destroy fails.
//
// Requires:
// `selected` has `count` numbers.
fb_status fb_trace_record(struct fb_trace *trace,
                          uint32_t position,
                          const int32_t *selected,
                          size_t count);

// Writes the buffered steps. Written steps survive the process.
fb_status fb_trace_flush(struct fb_trace *trace);

// Flushes, and syncs the file to disk, so that it survives a loss of power.
fb_status fb_trace_sync(struct fb_trace *trace);

// Ends the recording: writes the buffered steps and the end, and syncs the file. `steps`, which may be NULL, receives
// the number of recorded steps. Readers reject a file without any step. Whatever the result, the handle can then only
// be destroyed. After FB_IO the file is an unfinished recording, readable up to what was written.
//
// Requires:
// `steps` is NULL or has room for the result.
fb_status fb_trace_finish(struct fb_trace *trace,
                          uint32_t *steps);

// Destroys the handle. A recording that was not finished keeps all its steps, unless writing fails or a call returned
// FB_IO before, and readers report it as unfinished.
fb_status fb_trace_destroy(struct fb_trace *trace);

// Checks that rows can go from one side to the other, and writes how many bytes `tokens` tokens take on all ranks of
// one replica of the receiver. Both sides have to agree on the layers, and on names, types and sizes of components;
// they may differ in pages, strides, stages, ranks and replicas. FB_INVALID_CONFIG names what is wrong in a side, or
// differs; FB_UNSUPPORTED for a receiver that divides requests by tokens.
//
// Requires:
// Both sides state their real sizes, and have as many entries as they say; `text` is NULL or has `text_bytes` bytes;
// `bytes` has room for the result.
fb_status fb_transfer_plan(const struct fb_transfer_side *sender,
                           const struct fb_transfer_side *receiver,
                           uint32_t tokens,
                           char *text,
                           size_t text_bytes,
                           uint64_t *bytes);

// Begins an update of `layers` to `version`: takes the memory of this rank's new parts, and nothing else changes.
// Steps go on with the old version. All ranks begin it with the same version and layers. `version` is above all that
// were begun before, also those that failed; otherwise FB_OUT_OF_RANGE. `at_most` bounds the bytes of device memory
// that it takes; FB_OUT_OF_MEMORY says how many it needs. Errors are texts of `weights`. FB_INVALID_STATE before the
// parts were shared. FB_BUSY while another update of these weights, or a change of their replicas, is there: destroy
// it first, unless it was committed or aborted. FB_UNSUPPORTED with FB_WEIGHTS_FROM_HOST. FB_INVALID_CONFIG for no
// layers, or one twice. An error of the device, also one that keeps an update or a change that was destroyed from
// giving its memory back: the call may be made again.
//
// Requires:
// `layers` has `layer_count` entries; `update` has room for the result.
fb_status fb_update_create(struct fb_weights *weights,
                           uint32_t version,
                           const uint32_t *layers,
                           uint32_t layer_count,
                           uint64_t at_most,
                           struct fb_update **update);

// Does what fb_weights_fill does, for the new version; on any thread, while steps go on. FB_OUT_OF_RANGE also for a
// layer that the update does not name. FB_INVALID_STATE once fb_update_share was called.
//
// Requires:
// As fb_weights_fill.
fb_status fb_update_fill(struct fb_update *update,
                         uint32_t layer,
                         const char *name,
                         const void *from,
                         uint64_t bytes,
                         void *stream);

// Gives the new parts to the other ranks and takes theirs, while steps go on. Call it when every tensor of the layers
// is filled, on a thread that serves the sessions meanwhile. Blocks until the copies into the update have run and this
// rank's part is hashed, and then until all ranks have shared, for at most `at_most_ms` milliseconds. Errors are texts
// of `update`. FB_INVALID_STATE for an update that is not filled or was shared before, and while a rank that has come
// back is not attached again; the error of a rank that is lost; FB_INVALID_CONFIG for `links` that is NULL or has
// sessions of another group or plan; FB_BUSY while another call is inside one of the two; FB_CLOSED. Then nothing was
// said to any rank, and the call may be made again.
//
// After other errors the update cannot be committed by any rank, and is begun again, under a higher version.
// FB_INVALID_CONFIG for a rank that updates other layers or to a later version. FB_CANCELLED for a rank whose own call
// has failed. FB_TIMED_OUT and FB_PEER_LOST name the rank.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_update_share(struct fb_update *update,
                          struct fb_links *links,
                          void *stream,
                          uint32_t at_most_ms);

// Does what fb_weights_verify does, for a layer of an update that was shared.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_update_verify(struct fb_update *update, uint32_t layer, void *stream);

// Takes the new version, at a border between two steps at which all ranks do, or at which none does: then the old
// version stays, on every rank. `step` is a number of the border, the same on all ranks. `stream` is ordered after all
// steps. Waits until all ranks are there, for at most `at_most_ms` milliseconds. `outcome` receives
// FB_UPDATE_COMMITTED or FB_UPDATE_ABORTED; an abort is no failure of this call, and `reason` receives why, as far as
// this rank knows; after a commit `reason` is empty, and after an error it is not written. Addresses and captured
// graphs hold; replicas of the layers are dropped on all ranks. Destroy the update afterwards.
//
// Errors are texts of `weights`. With an error, too, `outcome` is written. FB_UPDATE_OPEN: nothing was decided in this
// call, and it may be called again. So it is with FB_BUSY while a step is open or if `stream` is being captured, with
// FB_INVALID_STATE for an update that was not shared, is over, or is of other weights or sessions, and with every
// error of handles, streams and the device before the decision. FB_INTERNAL is the exception: a panic behind the
// decision leaves FB_UPDATE_OPEN too, and the weights can only be destroyed. FB_UPDATE_FAILED: the ranks have decided.
// A layer whose new memory cannot be mapped returns the error from then on (fb_weights_layer), no step begins, and
// this process is ended and started again with the new weights; so it is with FB_CORRUPT. If every layer of the update
// has its version (fb_layer_weights), only old memory could not be given back, and steps go on.
//
// Requires:
// No work that is enqueued or runs uses a window, except on `stream`. `outcome` has room for the result; `reason` is
// NULL or has `reason_bytes` bytes.
fb_status fb_weights_commit(struct fb_weights *weights,
                            struct fb_update *update,
                            struct fb_links *links,
                            uint64_t step,
                            void *stream,
                            uint32_t at_most_ms,
                            uint32_t *outcome,
                            char *reason,
                            size_t reason_bytes);

// Destroys an update. One that was not committed is aborted: the others then abort too, and its memory is given back.
// Blocks until the copies into it have run. What the device refuses is left to the next fb_update_create or other call
// that needs the update to be over.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_update_destroy(struct fb_update *update);

// Computes what the weights of this configuration take on `device` for their rank, and takes nothing. The call refuses
// every configuration that fb_weights_create refuses before it asks for memory. On failure, `text` receives the
// reason. FB_OUT_OF_MEMORY with the least bytes for a budget that no number of sharded layers satisfies.
// FB_OUT_OF_RANGE for a rank outside its group, and for a tensor of a layer that the model does not have.
//
// Requires:
// Both structs state their real sizes. `tensors` has `tensor_count` entries, which state their real size, and
// `patterns` has `pattern_count`; names and patterns end with a zero. `text` has `text_bytes` bytes.
fb_status fb_weights_plan(const struct fb_device *device,
                          const struct fb_weights_config *config,
                          char *text,
                          size_t text_bytes,
                          struct fb_weights_footprint *footprint);

// Makes one rank's weights on a device: takes their memory and their addresses, which belong to the device until
// fb_device_destroy. A creation that fails because the device lacks memory leaves it as it was; one that fails because
// it lacks streams or events keeps the memory until then. Then fill every tensor (fb_weights_fill), meet the other
// ranks (fb_links_meet) and share (fb_weights_share). On failure, `text` receives the reason. Errors for the
// configuration are those of fb_weights_plan.
//
// Requires:
// As fb_weights_plan; `weights` has room for the result.
fb_status fb_weights_create(const struct fb_device *device,
                            const struct fb_weights_config *config,
                            char *text,
                            size_t text_bytes,
                            struct fb_weights **weights);

// Ends weights. Pulls that were enqueued still run. All addresses stay valid, and their memory stays taken, until
// fb_device_destroy; to replace weights, make another device. Other ranks that pull from this one keep its memory
// mapped for as long as they need it.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_destroy(struct fb_weights *weights);

// Enqueues on `stream` the copy of this rank's part of a tensor from `from`, which holds the whole tensor as the
// engine uses it. Every tensor that the patterns chose has to be filled. The tensor counts as filled when its copy is
// enqueued. fb_links_meet waits for one stream alone: fill on that one, or order it behind the others
// (fb_stream_order). A GPU copies from registered host memory in words of 4 bytes, so a tensor that does not begin
// and end on words comes from device memory. FB_OUT_OF_RANGE for a layer or tensor that was not chosen, for another
// length than the planned one, and for memory that the device does not reach. FB_INVALID_STATE once the parts were
// shared: fb_update_create is for a new version. FB_BUSY for a stream that is being captured.
//
// Requires:
// `name` ends with a zero. `from` has `bytes` bytes that the device reaches and that nothing changes until the copy
// has run.
fb_status fb_weights_fill(struct fb_weights *weights,
                          uint32_t layer,
                          const char *name,
                          const void *from,
                          uint64_t bytes,
                          void *stream);

// Reads the parts of one layer that the other ranks gave, and compares them with what these ranks said that they
// filled. Steps go on meanwhile. Blocks for as long as reading takes and serves no session, so call fb_links_poll
// between two layers. FB_CORRUPT names rank and layer. FB_INVALID_STATE for a layer whose parts are missing.
//
// Requires:
// Nothing beyond the conventions at the top of the header.
fb_status fb_weights_verify(struct fb_weights *weights,
                            uint32_t layer,
                            void *stream);

// Describes a layer: its window, and how it is kept. The window may only be read. It shows the layer from the
// fb_weights_enter of a step to the fb_weights_leave, and always while the layer is resident. Its address never
// changes and stays valid until fb_device_destroy, so kernels and captured graphs may hold it. FB_OUT_OF_RANGE for a
// layer of which nothing was chosen. FB_INVALID_STATE while a tensor is not filled or the part of another rank is
// missing.
//
// Requires:
// `described` states its real size.
fb_status fb_weights_layer(const struct fb_weights *weights,
                           uint32_t layer,
                           struct fb_layer_weights *described);

// Returns the address and length of one tensor in its layer's window. What fb_weights_layer says of windows is true of
// it. FB_OUT_OF_RANGE for a tensor that was not chosen; other errors are those of fb_weights_layer.
//
// Requires:
// `name` ends with a zero; `address` and `bytes` have room for the results.
fb_status fb_weights_tensor(const struct fb_weights *weights,
                            uint32_t layer,
                            const char *name,
                            void **address,
                            uint64_t *bytes);

// Returns the bytes of device memory that the weights take at present: the plan's, those of layers that were made
// resident, and those of this rank's replicas.
//
// Requires:
// `bytes` has room for the result.
fb_status fb_weights_bytes(const struct fb_weights *weights,
                           uint64_t *bytes);

// Makes a sharded layer resident, between steps: it gets memory of its own, which is mapped at its addresses. Steps
// find it whole without a pull; graphs pull it all the same. `stream` is ordered after all steps that used the layer.
// Blocks until the work on `stream` has run. Nothing happens to a layer that is resident. It reads the memory of a
// rank that was lost, too: the way to go on without that rank. FB_BUSY while a step is open or `stream` is being
// captured. FB_OUT_OF_MEMORY if the device has no memory for it; the layer is sharded as before then.
//
// Requires:
// No work that is enqueued or runs uses the layer's window, except on `stream`.
fb_status fb_weights_make_resident(struct fb_weights *weights,
                                   uint32_t layer,
                                   void *stream);

// Makes a layer that was made resident sharded again, between steps, when all steps that used it have run, and gives
// its memory back. Blocks. Nothing happens to other layers. FB_BUSY while a step is open. FB_PEER_LOST for a layer
// that would need a rank that was lost.
//
// Requires:
// No work that is enqueued or runs uses the layer's window.
fb_status fb_weights_make_sharded(struct fb_weights *weights,
                                  uint32_t layer);

// Makes layers sharded until the weights take at most `most` bytes of device memory, between steps, when all steps
// that used them have run. `bytes`, which may be NULL, receives what they take then. Blocks. FB_OUT_OF_MEMORY with the
// least bytes if the plan takes more, and nothing changes. FB_BUSY while a step is open. Errors of a layer are those
// of fb_weights_make_sharded; layers before it stay sharded then.
//
// Requires:
// No work that is enqueued or runs uses a window. `bytes` is NULL or has room for the result.
fb_status fb_weights_shrink(struct fb_weights *weights,
                            uint64_t most,
                            uint64_t *bytes);

// Makes layers resident, in one order, as long as the weights take at most `most` bytes of device memory; a layer that
// does not fit is left out. Between steps; `stream` is ordered after all steps that used the layers. `bytes`, which
// may be NULL, receives what they take then. Blocks. FB_BUSY while a step is open. Errors of a layer are those of
// fb_weights_make_resident; layers before it stay resident then.
//
// Requires:
// No work that is enqueued or runs uses a window, except on `stream`. `bytes` is NULL or has room for the result.
fb_status fb_weights_grow(struct fb_weights *weights,
                          uint64_t most,
                          void *stream,
                          uint64_t *bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FB_FOREBAY_H */
