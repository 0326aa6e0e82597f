//! The body of the fuzz target `trace_bytes`, which `tests/world.rs` replays.

use forebay::trace::SelectionTrace;

/// Positions that a trace may hold here: enough for every branch, few enough for thousands of runs.
const MEMBERS: u64 = 1 << 16;

/// The header of a small trace.
pub const HEADER: &[u8] =
    br#"{"layers":1,"k":2,"steps":2,"warm_steps":1,"first_position":5,"decode_start":6,"context":7}"#;

/// The header of a small recording.
pub const RECORDING: &[u8] =
    br#"{"layers":3,"shares":[0,1,0],"k":2,"first_position":1,"decode_start":2,"context":99}"#;

/// A content: the format's name, a header, and the rest.
pub fn content(name: &[u8; 8], header: &[u8], rest: &[u8]) -> Vec<u8> {
    [&name[..], &(header.len() as u32).to_le_bytes(), header, rest].concat()
}

/// A zstd frame that holds `bytes` unpacked, at most 128 KiB: packing them would be the costliest part of a run.
pub fn frame(bytes: &[u8]) -> Vec<u8> {
    let length = bytes.len() as u32;
    let block = (length << 3 | 1).to_le_bytes();
    [&[0x28, 0xB5, 0x2F, 0xFD, 0xA0][..], &length.to_le_bytes(), &block[..3], bytes].concat()
}

/// A recording of `groups`, each a frame after its mark.
pub fn recording(groups: &[&[u8]]) -> Vec<u8> {
    groups.iter().fold(frame(&content(b"TOPKTRC2", RECORDING, &[])), |file, group| {
        let frame = frame(group);
        let length = frame.len() as u32;
        let mark = [0x184D_2A5A, 8, length, !length].map(u32::to_le_bytes).concat();
        [file, mark, frame].concat()
    })
}

/// Inputs that no fuzzer finds by itself, chosen by the first byte: the others as a header after a format's name, as
/// the sets or groups after a header, as the frames after a recording's first one, or as a group in a frame of its own.
/// Packed parts take a hundred times as long and are rarer.
pub fn trace_parts(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    trace_bytes(&match choice {
        0..=49 => content(b"TOPKTRC1", bytes, &[]),
        50..=99 => content(b"TOPKTRC1", HEADER, bytes),
        100..=149 => content(b"TOPKTRC2", bytes, &[]),
        150..=199 => content(b"TOPKTRC2", RECORDING, bytes),
        200..=219 => [&recording(&[])[..], bytes].concat(),
        220..=239 => recording(&[bytes]),
        240..=255 => recording(&[GROUP, bytes]),
    });
}

/// The first group of a recording: one step, which selects positions 0 and 1 in both layers that have sets.
pub const GROUP: &[u8] = &[0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0];

/// Any bytes are a trace, or an error in one line. A trace keeps the rules of its sets and is the same after it is
/// written and read again. Returns whether it was a trace.
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
    let written = trace.encode().unwrap();
    assert_eq!(SelectionTrace::from_bytes(&written).unwrap().encode().unwrap(), written);
    true
}
