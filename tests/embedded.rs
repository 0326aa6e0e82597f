//! The compiled kernels that the library embeds match the sources next to them.
//!
//! `kernels/built/manifest.txt`, which ci/kernels writes, has the SHA-256 of every source and of every file made from
//! them, in the format of `sha256sum --check`. So this test needs no compiler for kernels and runs on every machine
//! where a source may be edited. `make kernels-check` tests that the compilers produce exactly these bytes, and what
//! the kernels cost; the last test here is its control.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "support/tools.rs"]
mod tools;

use tools::root;

const KERNELS: &str = "src/device/cuda/kernels";
const CURE: &str = "run `make kernels` and commit src/device/cuda/kernels/built";

fn names(folder: &Path) -> BTreeSet<String> {
    let files = fs::read_dir(folder).unwrap().map(Result::unwrap).filter(|file| file.path().is_file());
    files.map(|file| file.file_name().into_string().unwrap()).collect()
}

/// Compares `kernels` with its manifest. Returns nothing, or the difference and what to do.
fn stale(kernels: &Path) -> Option<String> {
    let built = kernels.join("built");
    let manifest = fs::read_to_string(built.join("manifest.txt")).unwrap();
    let sums = Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet", "manifest.txt"])
        .current_dir(&built)
        .output()
        .unwrap();
    let listed =
        manifest.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once("  "));
    let listed: BTreeSet<String> = listed.map(|(_, name)| name.to_owned()).collect();
    let mut there: BTreeSet<String> = names(kernels).into_iter().map(|name| format!("../{name}")).collect();
    there.extend(names(&built).into_iter().filter(|name| name != "manifest.txt"));
    let said = [sums.stdout, sums.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    let unlisted: Vec<_> = there.symmetric_difference(&listed).collect();
    let sound = sums.status.success() && unlisted.is_empty();
    (!sound).then(|| format!("{said}not in both the folder and the manifest: {unlisted:?}; {CURE}"))
}

/// The kernels in a folder of one test's own.
fn copied(name: &str) -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&copy);
    fs::create_dir_all(copy.join("built")).unwrap();
    for folder in ["", "built"] {
        let from = root().join(KERNELS).join(folder);
        for name in names(&from) {
            fs::copy(from.join(&name), copy.join(folder).join(&name)).unwrap();
        }
    }
    copy
}

#[test]
fn the_embedded_images_were_made_from_these_sources() {
    assert_eq!(stale(&root().join(KERNELS)), None);
}

#[test]
fn control_a_source_or_an_image_that_was_changed_alone_is_reported() {
    let copy = copied("changed");
    assert_eq!(stale(&copy), None);
    for file in ["forebay.cu", "abi.h", "built/forebay_sm90.cubin", "built/forebay.ptx"] {
        let (path, was) = (copy.join(file), fs::read(copy.join(file)).unwrap());
        fs::write(&path, [&was[..], b"\n"].concat()).unwrap();
        let said = stale(&copy).expect("reported");
        assert!(said.contains(file.trim_start_matches("built/")) && said.contains("make kernels"), "{said}");
        fs::write(&path, was).unwrap();
    }
    fs::write(copy.join("more.cuh"), "").unwrap();
    assert!(stale(&copy).unwrap().contains("more.cuh"));
    fs::remove_file(copy.join("more.cuh")).unwrap();
    fs::remove_file(copy.join("built/forebay.ptx")).unwrap();
    assert!(stale(&copy).unwrap().contains("forebay.ptx"));
}

#[test]
fn every_kernel_that_the_device_looks_up_is_in_every_image() {
    let source = fs::read_to_string(root().join("src/device/cuda/module.rs")).unwrap();
    let wanted: BTreeSet<&str> =
        source.split("c\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0)).collect();
    let built = root().join(KERNELS).join("built");
    let manifest = fs::read_to_string(built.join("manifest.txt")).unwrap();
    // Bulk copies exist from 9.0 on.
    let older: BTreeSet<&str> =
        wanted.iter().copied().filter(|name| *name != "forebay_gather_bulk").collect();
    assert_eq!((wanted.len(), older.len()), (20, 19));
    for architecture in ["80", "90", "100", "120"] {
        let rows = manifest.lines().map(|line| line.split_whitespace().skip(1).collect::<Vec<_>>());
        let found: BTreeSet<&str> =
            rows.filter(|row| row.get(1) == Some(&architecture)).map(|row| row[0]).collect();
        assert_eq!(found, if architecture == "80" { older.clone() } else { wanted.clone() });
    }
    let ptx = fs::read_to_string(built.join("forebay.ptx")).unwrap();
    let entries = ptx.split(".visible .entry ").skip(1).filter_map(|rest| Some(rest.split_once('(')?.0));
    assert_eq!(entries.collect::<BTreeSet<_>>(), older);
}

#[cfg(feature = "cuda")]
#[test]
fn every_device_gets_an_image_that_its_driver_loads() {
    use forebay::device::cuda::{CudaDevice, CudaOptions};
    use forebay_standin::{Options, Standin};
    if !tools::own_driver("is of every generation") {
        return;
    }
    let capabilities =
        [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)];
    for capability in capabilities {
        let Some(driver) = Standin::new(Options { capability, ..Options::default() }) else {
            return tools::skip("g++");
        };
        let library = Some(driver.library().to_owned());
        let device = CudaDevice::new(CudaOptions { library, ..CudaOptions::default() });
        assert!(device.is_ok(), "{capability:?}: {device:?}");
    }
}

/// Runs ci/kernels over a folder. Returns whether it passes, and its output.
fn kernels(arguments: &[&str], folder: &Path) -> (bool, String) {
    let mut command = Command::new("python3");
    command.arg("ci/kernels.py").arg("target/kernels").arg("--kernels").arg(folder);
    let run = command.args(arguments).current_dir(root()).output().unwrap();
    let said = [run.stdout, run.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    (run.status.success(), said)
}

/// A kernel of `threads` threads with `shared` words of shared memory, and `body`.
fn kernel(threads: u32, shared: u32, body: &str) -> String {
    format!(
        "extern \"C\" __global__ __launch_bounds__({threads}) void forebay_one(unsigned* words, unsigned n) {{\n\
         __shared__ unsigned shared[{shared}];\n\
         shared[threadIdx.x % {shared}] = words[threadIdx.x];\n\
         __syncthreads();\n{body}\n\
         words[threadIdx.x] = shared[n % {shared}];\n}}\n"
    )
}

/// More live values than a thread has registers.
fn greedy() -> String {
    let (mut loads, mut stores) = (String::new(), String::new());
    for i in 0..100 {
        loads += &format!("unsigned v{i} = words[n * {i} + threadIdx.x];\n");
        stores += &format!("words[n * {i} + 7 * threadIdx.x] = v{i} * v{};\n", (i + 50) % 100);
    }
    format!("{loads}__syncthreads();\n{stores}")
}

#[test]
fn control_the_check_fails_on_planted_faults() {
    if tools::installed("cubin/requirements.txt").is_none() {
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bounds");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let write = |text: &str| fs::write(folder.join("forebay.cu"), text).unwrap();
    let bounds = folder.join("bounds.txt");
    fs::write(&bounds, "* 64 8192 512\n").unwrap();
    let bounds = ["--bounds", bounds.to_str().unwrap()];
    let local = "unsigned local[64];\nfor (unsigned i = 0; i < 64; ++i) local[i] = i;\n\
                 for (unsigned i = 0; i < n; ++i) local[words[i] % 64] += words[i + n];\n\
                 words[0] = local[words[n] % 64];";
    for (source, said) in [
        (kernel(512, 64, ""), "within their bounds: 1 kernel"),
        (kernel(256, 64, ""), "blocks of 256 threads"),
        (kernel(512, 2049, ""), "8196 bytes of static shared memory"),
        (kernel(512, 64, local), "stack 256 bytes"),
        (kernel(512, 64, &greedy()), "registers, at most 64"),
        (kernel(1024, 64, &greedy()), "spills"),
        ("not a kernel".to_owned(), "expected a declaration"),
    ] {
        write(&source);
        let (passes, output) = kernels(&bounds, &folder);
        assert!(output.contains(said) && passes == said.ends_with(" kernel"), "{said}: {output}");
    }

    write(&kernel(512, 64, ""));
    assert!(kernels(&bounds, &folder).0);
    let check = [&bounds[..], &["--check"]].concat();
    assert!(kernels(&check, &folder).0);
    // The same bytes in another folder.
    let other = folder.join("other");
    fs::create_dir_all(&other).unwrap();
    fs::copy(folder.join("forebay.cu"), other.join("forebay.cu")).unwrap();
    assert!(kernels(&bounds, &other).0);
    let names = names(&folder.join("built"));
    assert_eq!(names.len(), 6);
    for name in names {
        let [here, there] =
            [&folder, &other].map(|folder| fs::read(folder.join("built").join(&name)).unwrap());
        assert!(here == there, "{name}");
    }

    write(&kernel(512, 64, "words[0] = 1;"));
    let (passes, output) = kernels(&check, &folder);
    assert!(!passes && output.contains("forebay_sm100.cubin: not what the sources make"), "{output}");
}
