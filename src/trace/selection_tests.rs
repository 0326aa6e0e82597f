//! Traces read, refused and written back, against a decoder of another structure.

use std::collections::BTreeSet;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::trace::source::BYTE;

#[path = "../../tests/support/traces.rs"]
mod traces;

/// A small stream of numbers for seeded damage.
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// A trace whose sets drift: each step replaces about a third of each set.
fn drifting(header: Header, mut seed: u64) -> SelectionTrace {
    seed |= 1;
    let mut members = Vec::new();
    let mut sets = vec![BTreeSet::new(); header.layers as usize];
    for step in 0..header.steps {
        let (own, size) = (u64::from(header.position(step)), header.set_size(step) as usize);
        for set in &mut sets {
            set.retain(|_| !next(&mut seed).is_multiple_of(3));
            while set.len() < size {
                set.insert((next(&mut seed) % (own + 1)) as u32);
            }
            members.extend(set.iter().copied());
        }
    }
    SelectionTrace::new(header, members).unwrap()
}

fn small() -> SelectionTrace {
    drifting(Header::example(3, 9, 30, 4, 40), 7)
}

/// TOPKTRC1 content of `json` and a body, for broken files.
fn content_of(json: &str, body: &[u8]) -> Vec<u8> {
    let length = (json.len() as u32).to_le_bytes();
    [FORMAT.as_bytes(), &length, json.as_bytes(), body].concat()
}

/// One layer, k 2, two steps at positions 5 and 6.
fn tiny(body: &[u8]) -> Vec<u8> {
    let json =
        r#"{"layers":1,"k":2,"steps":2,"warm_steps":1,"first_position":5,"decode_start":6,"context":7}"#;
    content_of(json, body)
}

fn refusal(bytes: &[u8]) -> Error {
    SelectionTrace::from_bytes(bytes).unwrap_err()
}

/// The format's page followed word by word: sets of a tree, no merge, no buffer, content in one piece.
fn naive(content: &[u8]) -> Vec<Vec<Vec<u32>>> {
    let length = u32::from_le_bytes(content[8..12].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&content[12..12 + length]).unwrap();
    let (layers, steps) = (header["layers"].as_u64().unwrap(), header["steps"].as_u64().unwrap());
    let mut at = 12 + length;
    let mut byte = || {
        at += 1;
        content[at - 1]
    };
    let mut sets = vec![BTreeSet::<u32>::new(); layers as usize];
    let mut all = Vec::new();
    for _ in 0..steps {
        for set in &mut sets {
            let counts: Vec<usize> = (0..2).map(|_| byte() as usize + 256 * byte() as usize).collect();
            let mut lists = Vec::new();
            for count in counts {
                let (mut list, mut value) = (Vec::new(), -1_i64);
                for _ in 0..count {
                    let (mut gap, mut scale) = (0, 1);
                    loop {
                        let b = i64::from(byte());
                        gap += (b % 128) * scale;
                        scale *= 128;
                        if b < 128 {
                            break;
                        }
                    }
                    value += 1 + gap;
                    list.push(value as u32);
                }
                lists.push(list);
            }
            let before: Vec<u32> = set.iter().copied().collect();
            for rank in &lists[1] {
                assert!(set.remove(&before[*rank as usize]));
            }
            for position in &lists[0] {
                assert!(set.insert(*position));
            }
        }
        all.push(sets.iter().map(|s| s.iter().copied().collect()).collect());
    }
    assert_eq!(at, content.len());
    all
}

fn assert_equals_naive(trace: &SelectionTrace, content: &[u8]) {
    let sets = naive(content);
    assert_eq!(sets.len() as u64, u64::from(trace.header().steps));
    for (step, layers) in (0..).zip(&sets) {
        assert_eq!(layers.len() as u64, u64::from(trace.header().layers));
        for (layer, set) in (0..).zip(layers) {
            assert_eq!(trace.selection(step, layer), set, "step {step}, layer {layer}");
        }
    }
}

#[test]
fn recorded_traces_decode_and_two_equal_a_naive_decoder() {
    let Some(directory) = traces::directory("topk") else { return };
    let mut read = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.ends_with(".topk.zst") {
            continue;
        }
        let trace = SelectionTrace::read(&path).unwrap();
        assert_eq!(trace.header().label, name.trim_end_matches(".topk.zst"));
        if name.starts_with("smollm2-4k") || name.starts_with("gemma3-32k-agent") {
            let content = zstd::decode_all(&std::fs::read(&path).unwrap()[..]).unwrap();
            assert_equals_naive(&trace, &content);
            // Except for the header (unknown fields are not kept) the writer makes exactly the recorder's bytes.
            let again = trace.encode().unwrap();
            let body =
                |c: &[u8]| c[12 + u32::from_le_bytes(c[8..12].try_into().unwrap()) as usize..].to_vec();
            assert!(body(&content) == body(&again), "{name}: another encoding");
        }
        read += 1;
    }
    assert!(read >= 5, "only {read} traces");
}

#[test]
fn the_shipped_trace_is_a_labelled_cut() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/demo.topk.zst");
    assert!(std::fs::metadata(&path).unwrap().len() < 1_000_000, "the demo trace ships");
    let trace = SelectionTrace::read(&path).unwrap();
    assert!(trace.header().label.contains("cut"), "{}", trace.header().label);
    assert!(trace.header().model.contains("SmolLM2"));
    assert!(trace.header().warm_steps >= 32);
}

#[test]
fn sets_grow_with_the_context_until_they_hold_k() {
    let trace = drifting(Header::example(2, 6, 0, 2, 12), 3);
    assert_eq!(trace.selection(0, 1), [0]);
    assert_eq!(trace.selection(3, 0).len(), 4);
    assert_eq!(trace.selection(11, 1).len(), 6);
    assert!(trace.selection(12, 0).is_empty() && trace.selection(0, 2).is_empty());
    let bytes = trace.encode().unwrap();
    assert_eq!(SelectionTrace::from_bytes(&bytes).as_ref(), Ok(&trace));
    assert_equals_naive(&trace, &bytes);
}

#[test]
fn every_truncation_is_an_error() {
    let content = small().encode().unwrap();
    let frame = small().compress(3).unwrap();
    for bytes in [&content, &frame] {
        assert!(SelectionTrace::from_bytes(bytes).is_ok());
        for length in 0..bytes.len() {
            let e = refusal(&bytes[..length]);
            assert_eq!(e.kind(), Kind::BadFormat, "{length}: {e}");
        }
    }
    assert_eq!(refusal(&[]).place(), "the file is empty");
}

#[test]
fn damaged_bytes_never_panic_and_a_checksum_finds_them() {
    let content = small().encode().unwrap();
    let frame = small().compress(3).unwrap();
    let mut seed = 99;
    let mut refused = 0;
    for round in 0..20_000 {
        let whole = if round % 2 == 0 { &content } else { &frame };
        let mut bytes = whole.clone();
        for _ in 0..=next(&mut seed) % 3 {
            let at = next(&mut seed) as usize % bytes.len();
            bytes[at] ^= 1 << (next(&mut seed) % 8);
        }
        if round % 5 == 0 {
            bytes.truncate(next(&mut seed) as usize % bytes.len());
        }
        // Small limits keep a header whose numbers were damaged from costing memory.
        match SelectionTrace::from_bytes_within(&bytes, 1 << 16) {
            Err(_) => refused += 1,
            Ok(trace) => assert!(round % 2 == 0 || trace == small(), "a damaged frame was taken"),
        }
    }
    assert!(refused > 15_000, "only {refused}");
}

#[test]
fn bytes_after_the_trace_are_an_error() {
    let content = [small().encode().unwrap(), vec![0]].concat();
    assert!(refusal(&content).place().contains("follow the last step"));
    let packed = zstd::encode_all(&content[..], 3).unwrap();
    assert!(refusal(&packed).place().contains("follow the last step"));
    let frame = small().compress(3).unwrap();
    for tail in [&[0][..], &frame[..]] {
        let e = refusal(&[&frame[..], tail].concat());
        assert!(e.place().contains("follow the zstd frame"), "{e}");
    }
}

#[test]
fn other_versions_and_other_files_are_told_apart() {
    let e = refusal(b"TOPKTRC3....");
    assert_eq!((e.kind(), e.number("version")), (Kind::BadVersion, Some(3)));
    let packed = zstd::encode_all(&b"TOPKTRC7"[..], 3).unwrap();
    assert_eq!(refusal(&packed).kind(), Kind::BadVersion);
    let packed = zstd::encode_all(&b"something else"[..], 3).unwrap();
    assert_eq!(refusal(&packed).place(), "the file holds text of no known kind");
    for (bytes, place, hint) in [
        (&b"\x1f\x8b\x08\0"[..], "the file is gzip", "unpack it"),
        (b"{\"timestamp\":1}", "the file holds a request trace", "not through a pipe"),
        (b"\xEF\xBB\xBF {\"timestamp\":1}", "the file holds a request trace", "not through a pipe"),
        (b"TIMESTAMP,ContextTokens", "the file holds a request trace", "not through a pipe"),
        (b" [{\"timestamp\":1}]", "the file holds a JSON array", "one object a line"),
        (b"ids,time\r\n1,2\r\n", "the file holds text of no known kind", "Mooncake"),
        (b"T", "truncated: the file ends early", ""),
        (b"\x7FELF\x02\x01", "the file is neither text nor a zstd frame", "TOPKTRC2"),
    ] {
        for bytes in [bytes, &zstd::encode_all(bytes, 1).unwrap()] {
            let e = refusal(bytes);
            let short = e.place().starts_with("truncated") && bytes.starts_with(&ZSTD_MAGIC);
            assert!(short || e.place().starts_with(place) && e.to_string().contains(hint), "{e}");
        }
    }
}

#[test]
fn contradictions_in_the_body_name_step_layer_and_byte() {
    let first = [2, 0, 0, 0, 0, 2];
    let place = |body: &[u8]| {
        let e = refusal(&tiny(&[&first[..], body].concat()));
        assert_eq!(e.kind(), Kind::BadFormat);
        assert!(e.place().starts_with("step 1, layer 0: "), "{e}");
        assert!(e.number(BYTE).is_some());
        e.place()["step 1, layer 0: ".len()..].to_owned()
    };
    assert!(SelectionTrace::from_bytes(&tiny(&[&first[..], &[0, 0, 0, 0]].concat())).is_ok());
    assert_eq!(place(&[1, 0, 1, 0, 3, 0]), "an added position was in the set already");
    // A member that is both added and dropped in one step is refused too: members that stay are not listed.
    assert_eq!(place(&[1, 0, 1, 0, 0, 0]), "an added position was in the set already");
    assert_eq!(place(&[1, 0, 1, 0, 7, 0]), "a position lies beyond the query's own");
    assert_eq!(place(&[1, 0, 1, 0, 5, 2]), "a rank lies beyond the set");
    assert_eq!(place(&[1, 0, 0, 0, 5]), "the set has the wrong size");
    assert_eq!(place(&[0, 0, 1, 0, 0]), "the set has the wrong size");
    assert_eq!(place(&[3, 0, 3, 0]), "the set has the wrong size");
    assert_eq!(place(&[1, 0, 1, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F]), "a varint is longer than 32 bits");
    assert_eq!(
        place(&[2, 0, 2, 0, 4, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]),
        "a position lies beyond the query's own"
    );
    assert_eq!(place(&[1, 0, 1, 0, 5]), "truncated: the file ends early");
    let e = refusal(&tiny(&[&first[..], &[1, 0, 1, 0, 7, 0]].concat()));
    assert_eq!((e.number("value"), e.number("most")), (Some(7), Some(6)));
}

#[test]
fn false_headers_cost_nothing() {
    let json = |steps: u64, context: u64| {
        format!(
            r#"{{"layers":4096,"k":65535,"steps":{steps},"warm_steps":0,"first_position":70000,
            "decode_start":70000,"context":{context}}}"#
        )
    };
    let e = refusal(&content_of(&json(4_000_000, 4_100_000), &[]));
    assert!(e.place().contains("too large"), "{e}");
    let e = refusal(&content_of(&json(1, 80_000), &[]));
    assert!(e.place().contains("ends early"), "{e}");
    let mut long = content_of("{}", &[]);
    long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(refusal(&long).place().contains("header is too long"));
    for (json, place) in [("[1]", "header: not a JSON object"), ("{\"k\":", "header: EOF")] {
        assert!(refusal(&content_of(json, &[])).place().starts_with(place));
    }
    let e = SelectionTrace::from_bytes_within(&small().encode().unwrap(), 100).unwrap_err();
    assert_eq!(e.number("members"), Some(small().members()));
}

/// A gigabyte of zeros in a few kilobytes: reading ends at the first wrong set.
#[test]
fn a_frame_that_decompresses_to_much_more_is_an_error() {
    let body = [&[2, 0, 0, 0, 0, 2][..], &[0, 0, 0, 0]].concat();
    let content = tiny(&body);
    let mut frame = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    std::io::Write::write_all(&mut frame, &content).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(1 << 30), &mut frame).unwrap();
    let e = refusal(&frame.finish().unwrap());
    assert!(e.place().contains("follow the last step"), "{e}");
    assert_eq!(e.number(BYTE), Some(content.len() as u64));
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let e = SelectionTrace::read(&here).unwrap_err();
    assert_eq!(e.kind(), Kind::Io);
    assert!(e.to_string().contains("directory; pass a trace file"), "{e}");
    let e = SelectionTrace::read(&here.join("no-such.zst")).unwrap_err();
    assert_eq!(e.kind(), Kind::Io);
    assert!(e.place().contains("no-such.zst: No such file"), "{e}");
    let e = SelectionTrace::read(&here.join("Cargo.toml")).unwrap_err();
    assert_eq!(e.kind(), Kind::BadFormat);
    assert!(e.place().contains("Cargo.toml: the file holds text of no known kind"), "{e}");
}

#[test]
fn members_that_break_the_rules_make_no_trace() {
    let h = || Header::example(1, 2, 5, 0, 2);
    assert!(SelectionTrace::new(h(), vec![0, 5, 1, 6]).is_ok());
    for members in [vec![0, 5, 1], vec![5, 0, 1, 6], vec![3, 3, 1, 6], vec![0, 6, 1, 6]] {
        assert_eq!(SelectionTrace::new(h(), members).unwrap_err().kind(), Kind::BadFormat);
    }
}

proptest! {
    #[test]
    fn a_written_trace_is_read_back(
        layers in 1_u32..5, k in 1_u32..40, first in 0_u32..400, warm in 0_u32..5, decode in 1_u32..12,
        seed in any::<u64>(),
    ) {
        let trace = drifting(Header::example(layers, k, first, warm, warm + decode), seed);
        let bytes = trace.encode().unwrap();
        for file in [&bytes, &trace.compress(3).unwrap()] {
            let read = SelectionTrace::from_bytes(file);
            prop_assert_eq!(read.as_ref(), Ok(&trace));
        }
        assert_equals_naive(&trace, &bytes);
    }

    #[test]
    fn no_bytes_make_the_reader_panic(body in proptest::collection::vec(any::<u8>(), 0..60)) {
        let _ = SelectionTrace::from_bytes(&body);
        let _ = SelectionTrace::from_bytes(&tiny(&body));
    }
}

/// A file that changes between its opening and the end of its reading is refused, whatever its content.
#[test]
fn a_file_that_changes_while_it_is_read_is_an_error_and_a_replaced_one_is_read_whole() {
    let folder = std::env::temp_dir().join(format!("forebay-changing-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (path, other) = (folder.join("trace.topk"), folder.join("other.topk"));
    let bytes = small().encode().unwrap();
    type Change = fn(&std::path::Path, &std::path::Path);
    let cases: [(Change, bool); 5] = [
        (|_, _| (), true),
        (|path, _| drop(File::options().write(true).open(path).unwrap().set_len(40)), false),
        (|path, _| drop(File::options().write(true).open(path).unwrap().set_len(1 << 20)), false),
        (|path, _| std::fs::write(path, b"another content").unwrap(), false),
        (|path, other| std::fs::rename(other, path).unwrap(), true),
    ];
    for (i, (change, good)) in cases.into_iter().enumerate() {
        std::fs::write(&path, &bytes).unwrap();
        std::fs::write(&other, b"not a trace").unwrap();
        let read = of_file(File::open(&path).unwrap(), &|_| Ok(()), || change(&path, &other));
        match good {
            true => assert_eq!(read.unwrap(), small(), "case {i}"),
            false => {
                let e = read.unwrap_err();
                assert_eq!(
                    (e.kind(), e.place()),
                    (Kind::Io, "the file was changed while it was read"),
                    "case {i}"
                );
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
