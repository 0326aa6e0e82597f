//! The C programs of `c-tests`, linked with the static library by gcc, both under AddressSanitizer.
//!
//! The library is built by a cargo of its own into a folder of this test's: with the sanitizer, and where the test
//! finds it without a guess about the running build. Rust's and gcc's sanitizers share their interface, so
//! that gcc's run time serves both. The modes of the program that must be reported are the control: without
//! them a sanitizer that does not work would look like a program without errors.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[path = "support/gcc.rs"]
mod gcc;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The folder of what these tests build.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-tests")
}

/// The library whose file ends in `end`: `a` for the static one, `so` for the shared one. Both are built once.
fn library(end: &str) -> &'static Path {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let files = BUILT.get_or_init(build);
    let name = format!("libforebay.{end}");
    files.iter().find(|file| file.ends_with(&name)).expect("cargo names what it built")
}

fn build() -> Vec<PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root()).args(["build", "--offline", "-p", "forebay-ffi", "--lib"]);
    cargo.args(["--target", "x86_64-unknown-linux-gnu", "--message-format=json"]);
    // Only lets the stable compiler take the sanitizer's flag; nothing built so is shipped.
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    cargo.env("CARGO_TARGET_DIR", target()).env_remove("CARGO_ENCODED_RUSTFLAGS");
    let built = cargo.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let messages = String::from_utf8(built.stdout).unwrap();
    let files = messages.lines().flat_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let files = message["filenames"].as_array().cloned().unwrap_or_default();
        files.into_iter().filter_map(|file| file.as_str().map(PathBuf::from))
    });
    files.collect()
}

/// The program, compiled once; nothing without a compiler.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    if !gcc::is_there("gcc") {
        return None;
    }
    Some(PROGRAM.get_or_init(|| {
        let library = library("a");
        let program = target().join("decode");
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-O1"]);
        gcc.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]);
        gcc.arg(root().join("ffi/c-tests/decode.c")).arg(library);
        // What a static Rust library asks of its linker.
        gcc.args(["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc", "-o"]).arg(&program);
        let ended = gcc.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        program
    }))
}

fn run(program: &Path, mode: &str) -> (Output, String) {
    let mut command = Command::new(program);
    command.arg(mode).env("ASAN_OPTIONS", "detect_leaks=1:exitcode=66");
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    (ended, said)
}

#[test]
fn the_shared_library_is_named_with_its_version() {
    if !gcc::is_there("readelf") {
        return;
    }
    let library = library("so");
    let ended = Command::new("readelf").arg("-d").arg(library).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    let header = std::fs::read_to_string(root().join("ffi/include/forebay.h")).unwrap();
    let version = header.lines().find_map(|line| line.strip_prefix("#define FB_ABI_VERSION ")).unwrap();
    assert!(said.contains(&format!("[libforebay.so.{version}]")), "{}: {said}", library.display());
}

#[test]
fn a_hundred_steps_decode_from_c() {
    let Some(program) = program() else { return };
    let (ended, said) = run(program, "all");
    assert!(ended.status.success(), "{said}");
    assert_eq!(said, "", "a clean program says nothing");
    // 100 steps and 25 of a second sequence, and four that are there for their errors.
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "129 steps, 15000 rows compared\n");
}

#[test]
fn a_forgotten_cache_is_reported() {
    let Some(program) = program() else { return };
    let (ended, said) = run(program, "leak");
    assert_eq!(ended.status.code(), Some(66), "{said}");
    assert!(said.contains("LeakSanitizer: detected memory leaks"), "{said}");
}

#[test]
fn a_batch_with_fewer_rows_than_stated_is_reported() {
    let Some(program) = program() else { return };
    let (ended, said) = run(program, "overrun");
    assert_eq!(ended.status.code(), Some(66), "{said}");
    assert!(said.contains("heap-buffer-overflow"), "{said}");
}

#[test]
fn rows_that_were_never_stored_are_noticed() {
    let Some(program) = program() else { return };
    let (ended, said) = run(program, "unstored");
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("memcmp(slot_address("), "{said}");
}
