//! Rules about places in the tree: the direction between modules, and where atomics and `unsafe` are allowed.

use crate::source::{Path, has_word, paths, split, test_lines};
use crate::{Fault, fault};

/// The modules of `src/`, top to bottom: a module uses itself and the modules before it (docs/design.md, "Modules").
const MODULES: &[&str] = &[
    "text",
    "error",
    "fallible",
    "ids",
    "geometry",
    "sync",
    "stats",
    "os",
    "peer",
    "residency",
    "device",
    "trace",
    "total",
    "sparse",
    "step",
    "sequence",
    "overlap",
    "weights",
    "transfer",
    "cache",
    "dense",
    "predict",
    "study",
    "measure",
    "check",
];

/// Modules that are one file each: words and small tools, nothing to divide.
const LEAVES: [&str; 7] = ["text", "error", "fallible", "ids", "geometry", "sync", "stats"];

/// The devices; each knows the contract in `device`'s root and none of the others.
const BACKENDS: [&str; 3] = ["host", "clock", "cuda"];

/// What `src/sync.rs` alone may name of the standard library's concurrency.
const PRIMITIVES: [&str; 12] = [
    "atomic",
    "Barrier",
    "Condvar",
    "LazyLock",
    "Mutex",
    "MutexGuard",
    "Once",
    "OnceLock",
    "RwLock",
    "mpsc",
    "mpmc",
    "*",
];

/// Where `unsafe` is allowed.
const UNSAFE_FOLDERS: [&str; 5] = ["src/os/", "src/device/", "ffi/", "standin/", "cudarc/"];

/// Files outside those folders that need `unsafe`, each with the reason.
const UNSAFE_FILES: &[&str] = &[
    // A race that a sanitizer must find.
    "ci/race.rs",
    // A device around another one: the trait has an unsafe method.
    "src/check/watch/mod.rs",
    "tests/loom_arrival/rig.rs",
    // A global allocator that counts.
    "tests/allocation.rs",
    // An engine that takes its memory back, and a driver loaded by name.
    "ci/embedder/src/decode.rs",
    "ci/embedder/tests/cudarc.rs",
    // A memcpy between two mappings, as the measure.
    "benches/fabrics.rs",
    // An engine's memory with no address.
    "tests/edges.rs",
    // Others.
    "tests/failures/sizes.rs",
    "tests/support/faulty.rs",
    "tests/support/forgets.rs",
    "tests/support/given.rs",
    "tests/pulls.rs",
];

fn place(name: &str) -> Option<usize> {
    MODULES.iter().position(|module| *module == name)
}

/// The module that a file under `src/` belongs to, or the file's own name where it belongs to none.
fn module_of(file: &str) -> Option<&str> {
    let inside = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    let module = inside.split('/').next()?;
    (module != "lib").then_some(module)
}

/// A module names only itself and modules above it, by their full paths.
pub fn directions(file: &str, text: &str) -> Vec<Fault> {
    let Some(module) = module_of(file) else {
        return Vec::new();
    };
    let Some(own) = place(module) else {
        return vec![fault(
            file,
            1,
            format!("`{module}` is no module of the list; see MODULES in tests/tidy/layout.rs"),
        )];
    };
    let mut faults = Vec::new();
    if LEAVES.contains(&module) && file != format!("src/{module}.rs") {
        faults.push(fault(file, 1, format!("`{module}` is a module of one file")));
    }
    for Path { names, line, .. } in paths(file, &split(text).code) {
        let [root, name, ..] = names.as_slice() else {
            continue;
        };
        if root != "crate" || name == "*" && names.len() == 2 && module_of(file).is_none() {
            continue;
        }
        match place(name) {
            Some(n) if n <= own => {}
            Some(_) => faults.push(fault(file, line, format!("`{module}` uses `{name}`, a module below it"))),
            None => faults.push(fault(
                file,
                line,
                format!("`crate::{name}` is no module; name the module it is in"),
            )),
        }
    }
    faults
}

/// A device does not name another device.
pub fn backends(file: &str, text: &str) -> Vec<Fault> {
    let inside = file.strip_prefix("src/device/").unwrap_or_default();
    let own = inside.split(['/', '.']).next().unwrap_or_default();
    if !BACKENDS.contains(&own) {
        return Vec::new();
    }
    let others = paths(file, &split(text).code).into_iter().filter(|path| match path.names.as_slice() {
        [root, device, other, ..] => {
            root == "crate" && device == "device" && other != own && BACKENDS.contains(&other.as_str())
        }
        _ => false,
    });
    others.map(|p| fault(file, p.line, format!("device `{own}` names device `{}`", p.names[2]))).collect()
}

/// The command and the C side take nothing of the library but what it publishes.
pub fn public_only(file: &str, text: &str) -> Vec<Fault> {
    if !(file.starts_with("cli/") || file.starts_with("ffi/")) || !file.ends_with(".rs") {
        return Vec::new();
    }
    let code = split(text).code;
    let lines = code.lines().zip(text.lines()).enumerate();
    // A test one folder down may share its own crate's source; the library's is two folders up.
    let own = file.matches('/').count() == 2;
    let inward = lines.filter(|(_, (code, text))| {
        let source = text.contains("../../src") || (text.contains("../src") && !own);
        (code.contains("#[path") || has_word(code, "include")) && source
    });
    inward.map(|(n, _)| fault(file, n + 1, "takes a source file of the library in".to_owned())).collect()
}

/// Atomics, locks and threads are named in `src/sync.rs` alone, so that loom can replace them all.
pub fn primitives(file: &str, text: &str) -> Vec<Fault> {
    let exempt = file == "src/sync.rs" || file.ends_with("/tests.rs") || file.contains("/tests/");
    if !file.starts_with("src/") || exempt {
        return Vec::new();
    }
    let code = split(text).code;
    let tests = test_lines(&code);
    let named = paths(file, &code).into_iter().filter(|path| match path.names.as_slice() {
        [root, ..] if root == "loom" || root == "parking_lot" => true,
        [root, module, ..] if root == "std" && module == "thread" => true,
        [root, module] if (root == "std" || root == "core") && module == "sync" => true,
        [root, module, name, ..] if (root == "std" || root == "core") && module == "sync" => {
            PRIMITIVES.contains(&name.as_str())
        }
        _ => false,
    });
    let outside = named.filter(|path| !tests.get(path.line - 1).copied().unwrap_or(false));
    outside
        .map(|p| fault(file, p.line, format!("`{}`: take it from crate::sync", p.names.join("::"))))
        .collect()
}

/// `unsafe` is in its folders only, and each site says which fact allows it.
pub fn unsafety(file: &str, text: &str) -> Vec<Fault> {
    if !file.ends_with(".rs") {
        return Vec::new();
    }
    let parts = split(text);
    let comments: Vec<&str> = parts.comments.lines().collect();
    let code: Vec<&str> = parts.code.lines().collect();
    let allowed =
        UNSAFE_FOLDERS.iter().any(|folder| file.starts_with(folder)) || UNSAFE_FILES.contains(&file);
    let mut faults = Vec::new();
    for (n, line) in code.iter().enumerate().filter(|(_, line)| has_word(line, "unsafe")) {
        if !allowed {
            faults.push(fault(
                file,
                n + 1,
                "`unsafe` outside os, device, ffi, standin and cudarc".to_owned(),
            ));
        } else if needs_reason(line) && !has_reason(&comments, &code, n) {
            faults.push(fault(file, n + 1, "`unsafe` without a SAFETY comment above it".to_owned()));
        }
    }
    faults
}

/// The usual ways to a reference into memory that other threads, devices or processes may write, and to accesses of the
/// language that race them: `host/words.rs`, `os::Region` and `os::move_bytes` do without.
const REFERENCES: [&str; 9] = [
    "from_raw_parts",
    "copy_nonoverlapping",
    "ptr::copy",
    "ptr::read",
    "ptr::write(",
    "read_volatile",
    "write_volatile",
    ".copy_to(",
    ".copy_from(",
];

/// The one file that has a use for them: the bytes of its own values.
const OWN_BYTES: &str = "src/device/cuda/abi.rs";

/// No reference into a mapping is ever made.
pub fn references(file: &str, text: &str) -> Vec<Fault> {
    let mapped = ["src/os/", "src/device/", "src/check/"].iter().any(|folder| file.starts_with(folder));
    if !mapped || file == OWN_BYTES {
        return Vec::new();
    }
    let parts = split(text);
    let lines = parts.code.lines().enumerate();
    let found = lines.filter_map(|(n, line)| Some((n, REFERENCES.iter().find(|word| line.contains(*word))?)));
    let told = |word: &str| {
        format!("`{word}`: memory that others may write is reached by words, regions or move_bytes")
    };
    found.map(|(n, word)| fault(file, n + 1, told(word))).collect()
}

/// Whether this `unsafe` opens a site of its own: not an attribute, not the type of a function pointer.
fn needs_reason(line: &str) -> bool {
    let after = line.split("unsafe").nth(1).unwrap_or_default().trim_start();
    let abi = after.strip_prefix("extern").map_or(after, |rest| {
        let rest = rest.trim_start();
        rest.split_once('"').and_then(|(_, r)| r.split_once('"')).map_or(rest, |(_, r)| r).trim_start()
    });
    let pointer = abi.strip_prefix("fn").is_some_and(|rest| rest.trim_start().starts_with('('));
    !after.starts_with('(') && !pointer
}

/// Whether a comment on the line, within the six above it, or in the comments and attributes that lead up
/// to it, gives the reason.
fn has_reason(comments: &[&str], code: &[&str], n: usize) -> bool {
    let says = |i: usize| comments[i].contains("SAFETY:") || comments[i].contains("# Safety");
    if (n.saturating_sub(6)..=n).any(says) {
        return true;
    }
    let leads = |i: &usize| code[*i].trim().is_empty() || code[*i].trim().starts_with("#[");
    (0..n).rev().take_while(leads).any(says)
}

/// Whether the files that may hold `unsafe` by exception are still there.
pub fn exceptions(exists: impl Fn(&str) -> bool) -> Vec<Fault> {
    let gone = UNSAFE_FILES.iter().filter(|file| !exists(file));
    gone.map(|file| fault(file, 1, "listed in UNSAFE_FILES and not there".to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(faults: &[Fault]) -> Vec<usize> {
        faults.iter().map(|f| f.line).collect()
    }

    #[test]
    fn a_module_below_is_reported_however_it_is_named() {
        let text = "use crate::error::Error;\n\
                    use crate::{ids::Layer, cache::{Cache, open}};\n\
                    use super::super::step;\n\
                    fn f() { crate::sparse::g() }\n\
                    // crate::predict\n\
                    use crate::Error;\n\
                    mod tests { use super::super::super::total; use super::x; }\n";
        assert_eq!(lines(&directions("src/os/map.rs", text)), [2, 2, 3, 4, 6, 7]);
        assert_eq!(directions("src/error.rs", "use super::ids;").len(), 1);
        assert_eq!(directions("src/ids.rs", "use super::error;").len(), 0);
        assert_eq!(directions("src/misc.rs", "").len(), 1);
        assert_eq!(directions("src/stats/a.rs", "").len(), 1);
        assert_eq!(directions("src/lib.rs", "use crate::predict;").len(), 0);
    }

    #[test]
    fn a_device_that_names_another_is_reported() {
        let text = "use crate::device::Device;\nuse super::super::clock::Clock;\nuse crate::device::{cuda, rates};\n";
        assert_eq!(lines(&backends("src/device/host/mod.rs", "use super::clock;")), [1]);
        assert_eq!(lines(&backends("src/device/host/stream.rs", text)), [2, 3]);
        assert_eq!(backends("src/device/mod.rs", "pub mod host; use self::host::Host;").len(), 0);
    }

    #[test]
    fn a_source_taken_in_from_outside_is_reported() {
        assert_eq!(lines(&public_only("ffi/src/a.rs", "\n#[path = \"../../src/os/map.rs\"]\nmod m;")), [2]);
        assert_eq!(public_only("cli/src/a.rs", "include_str!(\"../src/a.txt\")").len(), 0);
    }

    #[test]
    fn primitives_outside_sync_are_reported_tests_aside() {
        let text = "use std::sync::{Arc, Mutex};\n\
                    use std::sync::atomic::AtomicU32;\n\
                    fn f() { std::thread::yield_now() }\n\
                    #[cfg(test)]\n\
                    mod tests {\n    use std::sync::Barrier;\n}\n\
                    use std::sync;\n\
                    // std::thread\n\
                    use std::sync::PoisonError;\n";
        assert_eq!(lines(&primitives("src/os/map.rs", text)), [1, 2, 3, 8]);
        assert_eq!(primitives("src/sync.rs", text).len(), 0);
        assert_eq!(primitives("cli/src/main.rs", text).len(), 0);
    }

    #[test]
    fn references_into_mappings_are_found() {
        let slice = "fn f() {\n    unsafe { std::slice::from_raw_parts_mut(at, 4) }\n}";
        for module in ["src/os/map.rs", "src/device/host/pools.rs"] {
            assert_eq!(lines(&references(module, slice)), [2]);
            assert_eq!(lines(&references(module, "fn f() { unsafe { std::ptr::copy(a, b, 1) } }")), [1]);
            assert_eq!(references(module, "// from_raw_parts is not used\nfn f() {}").len(), 0);
        }
        assert_eq!(references(OWN_BYTES, slice).len() + references("ffi/src/cast.rs", slice).len(), 0);
    }

    #[test]
    fn unsafe_without_place_or_reason_is_reported() {
        let bare = "\n\n\n\n\n\n\n\nfn f() { unsafe { g() } }\n";
        assert_eq!(lines(&unsafety("src/step/layer.rs", "fn f() { unsafe { g() } }")), [1]);
        assert_eq!(lines(&unsafety("src/os/map.rs", bare)), [9]);
        assert_eq!(lines(&unsafety("src/os/map.rs", "unsafe impl Send for X {}")), [1]);
        assert_eq!(lines(&unsafety("ffi/src/a.rs", "pub unsafe extern \"C\" fn f() {}")), [1]);
        let good = "// SAFETY: the range is ours.\nunsafe { g() }\n\
                    type F = unsafe extern \"C\" fn(u32);\n\
                    #[unsafe(no_mangle)]\n// unsafe { }\nlet s = \"unsafe { }\";\n";
        assert_eq!(unsafety("src/os/map.rs", good).len(), 0);
        let long = format!("/// # Safety\n{}#[inline]\nunsafe fn f() {{}}\n", "/// Long.\n".repeat(9));
        assert_eq!(unsafety("src/os/map.rs", &long).len(), 0);
    }

    #[test]
    fn an_exception_that_is_gone_is_reported() {
        assert_eq!(exceptions(|_| false).len(), UNSAFE_FILES.len());
    }
}
