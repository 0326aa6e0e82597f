//! Tests that `include/forebay.h` is generated from the present sources, and compiles as C and as C++.
//!
//! `FOREBAY_BLESS=1 cargo test -p forebay-ffi --test header` regenerates it after a change.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use cbindgen::{Config, DocumentationStyle, ExportConfig, Language, RenameRule, SortKey, Style};

#[path = "support/gcc.rs"]
mod gcc;

const HEAD: &str = "\
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
 */";

/// The files that the header shows first, in this order. The others follow by name.
const FIRST: [&str; 8] =
    ["status", "error_text", "device", "config", "cache", "sequence", "budget", "prefix"];

fn here(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The source files that declare something for C, and their text.
fn sources() -> Vec<(PathBuf, String)> {
    let all = std::fs::read_dir(here("src")).unwrap().map(|entry| entry.unwrap().path());
    let files = all.filter(|file| file.extension().is_some_and(|end| end == "rs"));
    let texts = files.map(|file| (std::fs::read_to_string(&file).unwrap(), file));
    let ours = texts.filter(|(text, _)| text.contains("\n#[unsafe(no_mangle)]\n"));
    let mut ours: Vec<_> = ours.map(|(text, file)| (file, text)).collect();
    ours.sort_by_key(|(file, _)| {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        (FIRST.iter().position(|first| *first == name).unwrap_or(FIRST.len()), name)
    });
    ours
}

/// `FbCacheConfig` as C writes it: `fb_cache_config`.
fn snake(name: &str) -> String {
    let word = |c: char| if c.is_uppercase() { format!("_{}", c.to_lowercase()) } else { c.to_string() };
    name.chars().map(word).collect::<String>()[1..].to_owned()
}

/// Every type that is declared for C, by its name in Rust and in C.
fn names(sources: &[(PathBuf, String)]) -> HashMap<String, String> {
    let declares = ["pub struct ", "pub enum ", "pub type ", "pub union "];
    let lines = sources.iter().flat_map(|(_, text)| text.lines());
    let named = lines.filter_map(|line| declares.iter().find_map(|word| line.strip_prefix(word)));
    let names = named.map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default());
    names.filter(|name| name.starts_with("Fb")).map(|name| (name.to_owned(), snake(name))).collect()
}

fn generate() -> String {
    let sources = sources();
    let mut config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Both,
        header: Some(HEAD.to_owned()),
        include_guard: Some("FB_FOREBAY_H".to_owned()),
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        usize_is_size_t: true,
        documentation_style: DocumentationStyle::C99,
        line_length: 110,
        tab_width: 4,
        sort_by: SortKey::None,
        export: ExportConfig { rename: names(&sources), ..ExportConfig::default() },
        ..Config::default()
    };
    config.enumeration.rename_variants = RenameRule::ScreamingSnakeCase;
    config.function.sort_by = Some(SortKey::None);
    let builder = sources.iter().fold(cbindgen::Builder::new(), |builder, (file, _)| builder.with_src(file));
    let mut text = Vec::new();
    builder.with_config(config).generate().unwrap().write(&mut text);
    // A reader of C does not know Rust's heading.
    String::from_utf8(text).unwrap().replace("// # Safety\n", "// Requires:\n")
}

#[test]
fn the_header_is_what_the_sources_say() {
    let file = here("include/forebay.h");
    let wanted = generate();
    if std::env::var_os("FOREBAY_BLESS").is_some() {
        std::fs::write(&file, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = found.lines().zip(wanted.lines()).position(|(f, w)| f != w);
    assert!(
        found == wanted,
        "include/forebay.h is stale from line {}: run this test with FOREBAY_BLESS=1",
        differs.map_or(found.lines().count().min(wanted.lines().count()), |line| line) + 1
    );
}

#[test]
fn nothing_is_left_with_its_rust_name() {
    let header = generate();
    let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
    let rust: Vec<&str> = words.filter(|w| w.starts_with("Fb")).collect();
    assert_eq!(rust, Vec::<&str>::new());
}

#[test]
fn it_compiles_as_c_and_as_cpp() {
    let flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"];
    for (compiler, language, standard) in [("gcc", "c", "-std=c11"), ("g++", "c++", "-std=c++17")] {
        if !gcc::is_there(compiler) {
            continue;
        }
        let mut command = Command::new(compiler);
        command.arg(standard).args(flags).args(["-x", language]).arg(here("include/forebay.h"));
        let ended = command.output().unwrap();
        assert!(ended.status.success(), "{compiler}: {}", String::from_utf8_lossy(&ended.stderr));
    }
}

#[test]
fn names_are_found_and_made() {
    assert_eq!(snake("FbCacheConfig"), "fb_cache_config");
    let names = names(&sources());
    for (rust, c) in [("FbStatus", "fb_status"), ("FbCache", "fb_cache"), ("FbStep", "fb_step")] {
        assert_eq!(names.get(rust).map(String::as_str), Some(c));
    }
}
