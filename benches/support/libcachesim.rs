//! libCacheSim's LRU, started from Python.

use std::path::Path;
use std::process::Command;

/// Runs it once over a file of little-endian u64s: returns seconds without reading, accesses, misses.
pub fn lru(file: &Path, objects: u32) -> Result<(f64, u64, u64), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python =
        std::env::var_os("FOREBAY_PYTHON").map_or_else(|| root.join("target/venv/bin/python"), Into::into);
    let run = Command::new(python)
        .arg(root.join("benches/libcachesim_lru.py"))
        .arg(file)
        .arg(objects.to_string())
        .output()
        .map_err(|e| format!("python does not start ({e}); `make bench-setup` builds its environment"))?;
    if !run.status.success() {
        return Err(String::from_utf8_lossy(&run.stderr).into_owned());
    }
    let text = String::from_utf8_lossy(&run.stdout);
    let mut fields = text.split_whitespace();
    let mut next = || fields.next().unwrap_or_default();
    let parsed = (next().parse().ok(), next().parse().ok(), next().parse().ok());
    match parsed {
        (Some(seconds), Some(accesses), Some(misses)) => Ok((seconds, accesses, misses)),
        _ => Err(format!("no figures in {text:?}")),
    }
}
