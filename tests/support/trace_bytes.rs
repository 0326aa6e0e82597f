//! The body of the fuzz target `trace_bytes`, which `tests/world.rs` replays.

use forebay::trace::SelectionTrace;

/// Positions that a trace may hold here: enough for every branch, little enough for thousands of runs.
const MEMBERS: u64 = 1 << 16;

/// The header of a small trace.
pub const HEADER: &[u8] =
    br#"{"layers":1,"k":2,"steps":2,"warm_steps":1,"first_position":5,"decode_start":6,"context":7}"#;

/// What no fuzzer finds by itself: the same bytes as a header behind the format's name, and as the sets behind a
/// header.
pub fn trace_parts(bytes: &[u8]) {
    for (header, sets) in [(bytes, &[][..]), (HEADER, bytes)] {
        trace_bytes(&[&b"TOPKTRC1"[..], &(header.len() as u32).to_le_bytes(), header, sets].concat());
    }
}

/// Any bytes are a trace, or an error in one line. A trace keeps the rules of its sets and survives being
/// written and read again. Answers whether it was one.
pub fn trace_bytes(bytes: &[u8]) -> bool {
    let trace = match SelectionTrace::from_bytes_within(bytes, MEMBERS) {
        Ok(trace) => trace,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains('\n'), "{text}");
            return false;
        }
    };
    let header = trace.header();
    for step in 0..header.steps {
        for layer in 0..header.layers {
            let set = trace.selection(step, layer);
            assert_eq!(set.len() as u32, header.set_size(step));
            assert!(set.array_windows().all(|[a, b]| a < b));
            assert!(set.last().is_none_or(|last| *last <= header.position(step)));
        }
    }
    assert_eq!(SelectionTrace::from_bytes(&trace.encode().unwrap()).unwrap(), trace);
    true
}
