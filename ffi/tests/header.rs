//! `include/forebay.h` is what the sources say, and compiles as C and as C++.
//!
//! `FOREBAY_BLESS=1 cargo test -p forebay-ffi --test header` writes it again after a change.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use cbindgen::{Config, DocumentationStyle, ExportConfig, Language, RenameRule, SortKey, Style};

#[path = "support/gcc.rs"]
mod gcc;

const HEAD: &str = "\
/* forebay: the KV and latent cache of large-language-model serving.
 *
 * Generated from ffi/src; do not edit. Not yet a stable interface: version 0 promises nothing.
 *
 * Status      Every fallible call answers an fb_status: FB_OK is 0, the others are the library's kinds of
 *             error. A NULL that is not allowed is FB_INVALID_CONFIG. A panic inside the library is
 *             FB_INTERNAL; that cache then answers nothing else, and its destruction gives its memory up.
 * Answers     Out-parameters are written on FB_OK only, reasons of a failed creation on failure only.
 *             fb_retire's step is the exception: it is set to 0 whenever the step has ended.
 * Handles     fb_cache is created and destroyed. A sequence is a number, a step is an fb_step; 0 is none of
 *             either. One that was closed or retired, or never given, is FB_CLOSED. Both belong to the
 *             cache that gave them: another cache may have given the same number.
 * Threads     Calls on one cache through a const pointer may run at the same time. A call through a pointer
 *             without const must be alone. Different caches may be used by different threads; no call
 *             depends on global state.
 * Structs     A struct that begins with `size` is set to zero, then `size` to its sizeof. The library
 *             takes the size of an older header, reading what is missing as 0; it takes a larger size if
 *             what it does not know is 0. Of a struct that it fills it writes what both sides know, and
 *             zeroes the rest.
 * Streams     A stream is the engine's own; the library never synchronises it. The host device has one
 *             stream, NULL, on which each call's work has ended when the call returns.
 * Memory      Buffers stay the caller's. The library reads no environment variable, installs no signal
 *             handler, and writes to no log; only a panic shows on standard error.
 */";

const NAMES: [(&str, &str); 9] = [
    ("FbStatus", "fb_status"),
    ("FbCache", "fb_cache"),
    ("FbCacheConfig", "fb_cache_config"),
    ("FbStats", "fb_stats"),
    ("FbOpenConfig", "fb_open_config"),
    ("FbRow", "fb_row"),
    ("FbStep", "fb_step"),
    ("FbStepConfig", "fb_step_config"),
    ("FbRetired", "fb_retired"),
];

fn here(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn generate() -> String {
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
        export: ExportConfig {
            rename: NAMES
                .map(|(rust, c)| (rust.to_owned(), c.to_owned()))
                .into_iter()
                .collect::<HashMap<_, _>>(),
            ..ExportConfig::default()
        },
        ..Config::default()
    };
    config.enumeration.rename_variants = RenameRule::ScreamingSnakeCase;
    config.function.sort_by = Some(SortKey::None);
    let sources = ["status", "cache", "sequence", "step"];
    let builder = sources
        .iter()
        .fold(cbindgen::Builder::new(), |builder, file| builder.with_src(here(&format!("src/{file}.rs"))));
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
