//! Compiles the stand-in driver and the kernels in it with plain g++ into `OUT_DIR`. The crate also builds without g++
//! or with `FOREBAY_STANDIN=0`, for builds that run none of its tests; it then reports at run time that it has no
//! driver.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Flags of the compiler and the linker. A unique symbol would be shared between copies of the library, and each copy
/// needs its own globals. Without `-z defs` an undefined symbol would show only when a test loads the library.
const COMPILE: [&str; 9] = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
    "-DFOREBAY_CPU",
];
const LINK: [&str; 4] = ["-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-z,defs", "-Wl,--as-needed"];

fn main() -> Result<(), String> {
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(variable("OUT_DIR")?);
    let kernels = here.join("../src/device/cuda/kernels");
    for folder in [here.join("driver"), here.join("include"), kernels.clone()] {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    println!("cargo::rerun-if-env-changed=FOREBAY_STANDIN");
    if env::var("FOREBAY_STANDIN").is_ok_and(|value| value == "0") {
        return Ok(());
    }
    if Command::new("g++").arg("--version").output().is_err() {
        println!("cargo::warning=no g++: tests on the stand-in driver are skipped");
        // This file never exists, so cargo runs this script again at the next build, when g++ may be installed.
        println!("cargo::rerun-if-changed={}", out.join("no-compiler").display());
        return Ok(());
    }
    let mut sources = sources(&here.join("driver"))?;
    sources.extend(Some(kernels.join("forebay.cu")).filter(|kernels| kernels.exists()));
    let objects = compile(&sources, &out, &[here.join("include"), kernels])?;
    let library = out.join("libcuda.so.1");
    let mut link = Command::new("g++");
    link.args(LINK).arg("-o").arg(&library).args(&objects);
    finish(link.spawn().map_err(|error| error.to_string())?, "the link")?;
    println!("cargo::rustc-env=STANDIN_LIBRARY={}", library.display());
    Ok(())
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}

/// The driver's own source files, sorted by name.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cpp"));
    files.sort();
    Ok(files)
}

/// Compiles each file, with as many compilers at a time as cargo allows jobs.
fn compile(sources: &[PathBuf], out: &Path, include: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    let jobs = variable("NUM_JOBS")?.parse().unwrap_or(1).max(1);
    let mut objects = Vec::new();
    for some in sources.chunks(jobs) {
        let mut running = Vec::new();
        for source in some {
            let name = source.file_stem().unwrap_or_default().to_string_lossy();
            let object = out.join(format!("{name}.o"));
            let mut command = Command::new("g++");
            command.args(COMPILE).args(include.iter().map(|folder| format!("-I{}", folder.display())));
            command.args(["-x", "c++", "-c"]).arg(source).arg("-o").arg(&object);
            running.push((source, command.spawn().map_err(|error| error.to_string())?));
            objects.push(object);
        }
        for (source, child) in running {
            finish(child, &source.display().to_string())?;
        }
    }
    Ok(objects)
}

fn finish(mut child: Child, what: &str) -> Result<(), String> {
    let status = child.wait().map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("g++ failed: {what}")) }
}
