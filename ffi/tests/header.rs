//! `include/forebay.h` is what the sources say, and compiles as C and as C++.
//!
//! `FOREBAY_BLESS=1 cargo test -p forebay-ffi --test header` writes it again after a change.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use cbindgen::{Config, DocumentationStyle, ExportConfig, Language, RenameRule, SortKey, Style};

#[path = "support/gcc.rs"]
mod gcc;

const HEAD: &str = "\
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
 */";

/// The files whose declarations the header shows, in its order. Those not named follow by name.
const FIRST: [&str; 6] = ["status", "device", "config", "cache", "sequence", "share"];

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
    // The heading that Rust asks for says nothing to a reader of C.
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
