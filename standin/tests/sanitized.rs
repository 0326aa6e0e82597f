//! Runs the driver and the kernels under the address and the undefined-behaviour sanitizer, in a program of their own:
//! correct use reports nothing, and every planted fault is reported.

#[path = "../../tests/support/skip.rs"]
mod skip;

use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const FLAGS: [&str; 9] = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-Wall",
    "-Wextra",
    "-DFOREBAY_CPU",
];

/// The number of seeds with which the clean part runs, in addition to none.
const SEEDS: u32 = 20;

fn sources() -> Result<Vec<PathBuf>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let driver = std::fs::read_dir(here.join("driver"))?;
    let mut files: Vec<PathBuf> = driver.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cpp"));
    files.extend(["main", "kernel"].map(|name| here.join(format!("tests/asan/{name}.cpp"))));
    files.push(here.join("../src/device/cuda/kernels/forebay.cu"));
    Ok(files)
}

fn finished(status: Result<std::process::ExitStatus>) -> Result<()> {
    if status?.success() { Ok(()) } else { Err(Error::other("g++ failed")) }
}

/// Compiles two files at a time, and links.
fn program() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sanitized");
    std::fs::create_dir_all(&out)?;
    let mut objects = Vec::new();
    for some in sources()?.chunks(2) {
        let mut running = Vec::new();
        for source in some {
            let object = out.join(source.file_stem().unwrap_or_default()).with_extension("o");
            let mut command = Command::new("g++");
            command.args(FLAGS).arg(format!("-I{}", here.join("include").display()));
            command.arg(format!("-I{}", here.join("../src/device/cuda/kernels").display()));
            command.args(["-x", "c++", "-c"]).arg(source).arg("-o").arg(&object);
            running.push(command.spawn()?);
            objects.push(object);
        }
        for mut child in running {
            finished(child.wait())?;
        }
    }
    let program = out.join("sanitized");
    finished(Command::new("g++").args(&FLAGS[3..4]).args(&objects).arg("-o").arg(&program).status())?;
    Ok(program)
}

fn run(program: &Path, words: &[&str]) -> Result<Output> {
    Command::new(program).args(words).output()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_driver_and_the_kernels_are_clean_and_planted_accesses_are_found() {
    if Command::new("g++").arg("--version").output().is_err() {
        return skip::skip("g++");
    }
    let program = program().unwrap();
    let seeds: Vec<String> = (0..SEEDS).map(|seed| seed.to_string()).collect();
    let seeded = seeds.iter().map(|seed| vec!["clean", seed]);
    for words in seeded.chain([vec!["clean"]]) {
        let output = run(&program, &words).unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output));
    }
    for (word, report) in [
        ("beyond", "heap-buffer-overflow"),
        ("freed", "heap-use-after-free"),
        ("misaligned", "misaligned address"),
        ("dynamic", "heap-buffer-overflow"),
        ("static", "index 8 out of bounds"),
        ("frame", "stack-buffer-overflow"),
    ] {
        let output = run(&program, &[word]).unwrap();
        assert!(!output.status.success(), "{word} was not found");
        assert!(text(&output).contains(report), "{word}: {}", text(&output));
    }
}
