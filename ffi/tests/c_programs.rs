//! Compiles the C programs of `c-tests` by gcc, one for each noun of the interface, and runs each of them twice.
//!
//! | | library | detects |
//! |---|---|---|
//! | `sanitized` | static, with AddressSanitizer; the program also with UBSan | bad accesses and leaks, both sides |
//! | `under_valgrind` | shared, as installed | errors in code without instrumentation |
//!
//! The test builds the sanitized library by its own cargo into its own folder. Rust's and gcc's sanitizers share their
//! interface, so gcc's run time serves both. In the sanitized run `capture` gets a stand-in driver. The programs of
//! `controls` must be reported: without them a broken tool would look like programs without errors.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[path = "support/gcc.rs"]
mod gcc;
#[path = "support/library.rs"]
mod library;

use forebay_standin::{Driver, Options};
use library::{root, succeed, target};

/// The exit status of a program that a tool has reported.
const REPORTED: i32 = 66;

/// The libraries that the static library needs from its linker.
const STATIC: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// The static library under AddressSanitizer, built once.
fn sanitized_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root()).args(["rustc", "--offline", "-p", "forebay-ffi", "--lib"]);
        cargo.args([
            "--crate-type",
            "staticlib",
            "--target",
            "x86_64-unknown-linux-gnu",
            "--message-format=json",
        ]);
        // Only makes the stable compiler accept the sanitizer's flag; no such build is shipped.
        cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
        cargo.env("CARGO_TARGET_DIR", target()).env_remove("CARGO_ENCODED_RUSTFLAGS");
        let messages = succeed(cargo);
        let files = messages.lines().flat_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            message["filenames"].as_array().cloned().unwrap_or_default()
        });
        let mut files = files.filter_map(|file| file.as_str().map(PathBuf::from));
        let archive = |file: &PathBuf| file.file_name().is_some_and(|name| name == "libforebay.a");
        files.find(archive).expect("cargo names what it built")
    })
}

/// A compiler with the options of all programs.
fn compiler(language: &str) -> Command {
    let mut compiler = match language {
        "c" => Command::new("gcc"),
        _ => Command::new("g++"),
    };
    compiler.arg(if language == "c" { "-std=c11" } else { "-std=c++17" });
    compiler.args(["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-g", "-O1"]);
    compiler
}

/// The sources of a program: `NAME.c`, or `NAME.cpp`, or all of the folder `NAME`.
fn sources(name: &str) -> (&'static str, Vec<PathBuf>) {
    let folder = root().join("ffi/c-tests");
    let single = ["c", "cpp"].map(|end| (end, folder.join(format!("{name}.{end}"))));
    if let Some((language, file)) = single.into_iter().find(|(_, file)| file.is_file()) {
        return (language, vec![file]);
    }
    let files = std::fs::read_dir(folder.join(name)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|end| end == "cpp")).collect();
    files.sort();
    ("cpp", files)
}

/// A program with the sanitized static library, its own code under AddressSanitizer and UBSan.
fn sanitized(name: &str) -> PathBuf {
    let (language, files) = sources(name);
    let program = target().join(format!("{name}-sanitized"));
    let mut compiler = compiler(language);
    compiler.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]);
    compiler.arg("-I").arg(root().join("ffi/include"));
    compiler.args(files).arg(sanitized_library()).args(STATIC).arg("-o").arg(&program);
    succeed(compiler);
    program
}

/// A program with the installed shared library.
fn shared(name: &str) -> PathBuf {
    let (language, files) = sources(name);
    let program = target().join(format!("{name}-shared"));
    let prefix = library::installed();
    let mut compiler = compiler(language);
    compiler.arg("-I").arg(prefix.join("include")).args(files);
    compiler.arg("-L").arg(prefix.join("lib")).args(["-lforebay", "-lpthread", "-ldl"]);
    compiler.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display())).arg("-o").arg(&program);
    succeed(compiler);
    program
}

/// Runs a program in a folder of its own.
fn run(mut command: Command, name: &str) -> (Output, String) {
    let folder = target().join(format!("in-{name}"));
    std::fs::create_dir_all(&folder).unwrap();
    let options = format!("detect_leaks=1:exitcode={REPORTED}");
    command
        .current_dir(folder)
        .env("ASAN_OPTIONS", options)
        .env("UBSAN_OPTIONS", format!("exitcode={REPORTED}"));
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    (ended, said)
}

fn under_valgrind(program: &Path) -> Command {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect,possible"]);
    valgrind.arg("--fair-sched=yes");
    valgrind.arg(format!("--suppressions={}", root().join("ffi/c-tests/valgrind.supp").display()));
    valgrind.arg(format!("--error-exitcode={REPORTED}")).arg(program);
    valgrind
}

/// A program without errors exits with 0, prints no error, and has made at least one check.
fn is_clean(mut program: Command, name: &str, built: &str) {
    // Kept until the program has ended, because the library is a file that is removed with it. Its kernels' threads
    // have stacks that valgrind takes for wild pointers.
    let captures = (name, built) == ("capture", "sanitized");
    let driver = if captures { Driver::new(Options::default()).unwrap() } else { None };
    program.args(driver.iter().map(Driver::library));
    let (ended, said) = run(program, &format!("{name}-{built}"));
    assert!(ended.status.success(), "{}: {said}", ended.status);
    assert_eq!(said, "", "a program without errors prints nothing");
    let said = String::from_utf8_lossy(&ended.stdout);
    let checks: u64 =
        said.trim_end().strip_suffix(" checks").and_then(|count| count.parse().ok()).expect(&said);
    assert!(checks > 10, "{said}");
}

macro_rules! programs {
    ($($name:ident),* $(,)?) => {
        const PROGRAMS: &[&str] = &[$(stringify!($name)),*];

        mod sanitized {
            $(
                #[test]
                fn $name() {
                    let name = stringify!($name);
                    if super::gcc::is_there("gcc") && super::gcc::is_there("g++") {
                        super::is_clean(super::Command::new(super::sanitized(name)), name, "sanitized");
                    }
                }
            )*
        }

        mod under_valgrind {
            $(
                #[test]
                fn $name() {
                    let name = stringify!($name);
                    if ["gcc", "g++", "valgrind"].into_iter().all(super::gcc::is_there) {
                        super::is_clean(super::under_valgrind(&super::shared(name)), name, "shared");
                    }
                }
            )*
        }
    };
}

programs!(
    status, device, cache, sequence, resize, share, ticket, step, forgotten, overlap, choice, capture, trace,
    plan, weights, dense, misuse, sizes, threads, forked, holders, two_units,
);

#[test]
fn every_c_program_is_run() {
    let entries = std::fs::read_dir(root().join("ffi/c-tests")).unwrap().map(|entry| entry.unwrap().path());
    let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let is_program = |path: &PathBuf| path.extension().is_none_or(|end| end != "h" && end != "supp");
    let mut found: Vec<String> = entries.filter(is_program).map(stem).collect();
    let mut wanted: Vec<String> =
        PROGRAMS.iter().chain(&["controls"]).map(|name| (*name).to_owned()).collect();
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted);
}

/// A program that AddressSanitizer or UBSan must report, in these words.
fn is_reported(mode: &str, words: &str) {
    if !gcc::is_there("gcc") {
        return;
    }
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let mut command = Command::new(PROGRAM.get_or_init(|| sanitized("controls")));
    command.arg(mode);
    let (ended, said) = run(command, "controls-sanitized");
    assert_eq!(ended.status.code(), Some(REPORTED), "{said}");
    assert!(said.contains(words), "{said}");
}

/// The same by valgrind.
fn valgrind_reports(mode: &str, words: &str) {
    if !["gcc", "valgrind"].into_iter().all(gcc::is_there) {
        return;
    }
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let mut command = under_valgrind(PROGRAM.get_or_init(|| shared("controls")));
    command.arg(mode);
    let (ended, said) = run(command, "controls-shared");
    assert_eq!(ended.status.code(), Some(REPORTED), "{said}");
    assert!(said.contains(words), "{said}");
}

#[test]
fn lost_memory_is_reported() {
    is_reported("leak", "LeakSanitizer: detected memory leaks");
    valgrind_reports("leak", "definitely lost");
}

#[test]
fn a_forgotten_cache_is_reported() {
    is_reported("forgotten", "LeakSanitizer: detected memory leaks");
}

#[test]
fn a_batch_with_fewer_rows_than_stated_is_reported() {
    is_reported("overrun", "heap-buffer-overflow");
    valgrind_reports("overrun", "Invalid read");
}

#[test]
fn missing_prompt_rows_are_reported() {
    // The copy into the total pool is machine code without instrumentation.
    valgrind_reports("short-rows", "Invalid read");
}

#[test]
fn undefined_arithmetic_is_reported() {
    is_reported("undefined", "signed integer overflow");
}

#[test]
fn rows_that_were_never_stored_are_detected() {
    if !gcc::is_there("gcc") {
        return;
    }
    let mut command = Command::new(sanitized("controls"));
    command.arg("unstored");
    let (ended, said) = run(command, "controls-unstored");
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("memcmp(row_at("), "{said}");
}
