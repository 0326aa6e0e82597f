//! Recordings cut and damaged at every byte, written through faults, and compared with what was recorded.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::os::{Call, Faults, Inject};
use crate::trace::SelectionTrace;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A directory of one test, removed at its end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forebay-{}-{name}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("a.topk")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// The declaration of an engine for `header`'s trace.
fn recording_of(header: &Header) -> Recording {
    Recording {
        layers: header.layers,
        layer_ids: header.layer_ids.clone(),
        k: header.k,
        first_position: header.first_position,
        decode_start: header.decode_start,
        context: Some(header.context),
        label: header.label.clone(),
        model: header.model.clone(),
        ..Recording::default()
    }
}

/// A trace whose sets drift: each step replaces about a third of each set.
fn drifting(header: Header, mut seed: u64) -> SelectionTrace {
    seed |= 1;
    let mut members = Vec::new();
    let mut sets = vec![BTreeSet::new(); header.layers as usize];
    for step in 0..header.steps {
        for set in &mut sets {
            set.retain(|_| !next(&mut seed).is_multiple_of(3));
            while set.len() < header.set_size(step) as usize {
                set.insert((next(&mut seed) % (u64::from(header.position(step)) + 1)) as u32);
            }
            members.extend(set.iter().copied());
        }
    }
    SelectionTrace::new(header, members).unwrap()
}

fn small() -> SelectionTrace {
    drifting(Header::example(3, 9, 4, 6, 40), 7)
}

/// A step's sets as a kernel emits them: shuffled, with -1 for missing entries.
fn emitted(trace: &SelectionTrace, step: u32, seed: &mut u64) -> Vec<i32> {
    let header = trace.header();
    let mut all = Vec::new();
    for layer in 0..header.layers {
        let mut set: Vec<i32> = trace.selection(step, layer).iter().map(|p| *p as i32).collect();
        set.resize(header.k as usize, -1);
        for i in (1..set.len()).rev() {
            set.swap(i, next(seed) as usize % (i + 1));
        }
        all.extend(set);
    }
    all
}

/// Records steps of `trace` until all are recorded or one is refused.
fn record(writer: &mut TraceWriter, trace: &SelectionTrace) -> Result<()> {
    let mut seed = 5;
    for step in writer.steps()..trace.header().steps {
        writer.record(trace.header().position(step), &emitted(trace, step, &mut seed))?;
    }
    Ok(())
}

/// The bytes of a recording of `trace`, groups of `steps`; with its end, or dropped without.
fn recorded(trace: &SelectionTrace, steps: u32, finish: bool) -> Vec<u8> {
    let directory = Directory::new("recorded");
    let frames = Frames { steps, ..Frames::default() };
    let mut writer = TraceWriter::create(directory.file(), &recording_of(trace.header()), frames).unwrap();
    record(&mut writer, trace).unwrap();
    if finish {
        assert_eq!(writer.finish().unwrap(), trace.header().steps);
    } else {
        drop(writer);
    }
    fs::read(directory.file()).unwrap()
}

/// Where the pieces of a file end, by its marks: the first frame's end, each group's, the end's.
fn borders(file: &[u8]) -> Vec<usize> {
    let mut at = file.windows(8).position(|w| w == MARK).unwrap();
    let mut all = vec![at];
    while at < file.len() {
        let length = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap());
        at += MARK_BYTES + length as usize;
        all.push(at);
    }
    assert_eq!(at, file.len());
    all
}

/// Whether `part` holds the first sets of `whole`, and nothing more.
fn begins(part: &SelectionTrace, whole: &SelectionTrace) -> bool {
    let (a, b) = (part.header(), whole.header());
    let same = (a.layers, a.k, a.first_position) == (b.layers, b.k, b.first_position) && a.steps <= b.steps;
    let mut cells = (0..a.steps).flat_map(|step| (0..a.layers).map(move |layer| (step, layer)));
    let whole_sets = part.members() == a.members_before(a.steps);
    same && whole_sets
        && cells.all(|(step, layer)| part.selection(step, layer) == whole.selection(step, layer))
}

#[test]
fn a_recording_is_the_trace_and_unpacks_as_zstd_does() {
    let trace = small();
    for steps in [1, 7, 40, 64] {
        let file = recorded(&trace, steps, true);
        assert_eq!(SelectionTrace::from_bytes(&file).as_ref(), Ok(&trace));
        let plain = zstd::decode_all(&file[..]).unwrap();
        assert!(plain.starts_with(RECORDING.as_bytes()));
        assert_eq!(SelectionTrace::from_bytes(&plain).as_ref(), Ok(&trace));
        for cut in 0..plain.len() {
            assert!(SelectionTrace::from_bytes(&plain[..cut]).is_err(), "nothing protects plain groups");
        }
        assert!(SelectionTrace::from_bytes(&[&plain[..], &[0]].concat()).is_err());
    }
}

#[test]
fn a_cut_anywhere_leaves_the_whole_groups() {
    let trace = small();
    for finish in [true, false] {
        let file = recorded(&trace, 7, finish);
        let borders = borders(&file);
        assert_eq!(borders.len(), 1 + 6 + usize::from(finish));
        for cut in 0..=file.len() {
            let read = SelectionTrace::from_bytes(&file[..cut]);
            let pieces = borders.iter().filter(|border| **border <= cut).count();
            if pieces <= 1 {
                let e = read.unwrap_err();
                assert_eq!(e.kind(), Kind::BadFormat, "{cut}: {e}");
                continue;
            }
            let read = read.unwrap();
            assert!(begins(&read, &trace), "{cut}");
            assert_eq!(u64::from(read.header().steps), 40.min(7 * (pieces as u64 - 1)), "{cut}");
            let left = (cut - borders[pieces - 1]) as u64;
            assert_eq!(read.header().unfinished, (pieces < 8).then_some(left), "{cut}");
            // The part that was read is a trace like any other.
            assert!(SelectionTrace::from_bytes(&read.encode().unwrap()).is_ok());
        }
    }
}

#[test]
fn damage_is_an_error_or_left_off_at_the_end() {
    let trace = small();
    for finish in [true, false] {
        let file = recorded(&trace, 7, finish);
        let borders = borders(&file);
        let last = borders[borders.len() - 2];
        let (mut errors, mut left) = (0, 0);
        for at in 0..file.len() {
            for bit in 0..8 {
                let mut damaged = file.clone();
                damaged[at] ^= 1 << bit;
                match SelectionTrace::from_bytes(&damaged) {
                    Err(e) => {
                        errors += 1;
                        assert_ne!(e.kind(), Kind::Internal);
                    }
                    Ok(read) => {
                        assert!(begins(&read, &trace), "byte {at}: a wrong set");
                        // A bit of zstd's without meaning (there are some) changes nothing.
                        let whole = read.header().steps == 40;
                        assert!(at >= last || whole && read.header().unfinished.is_some() != finish, "{at}");
                        left += u32::from(at >= last && read.header().unfinished.is_some());
                    }
                }
            }
        }
        assert!(left > 50 && errors > 5000, "{left} left off, {errors} errors of {} bytes", file.len());
    }
}

#[test]
fn bursts_of_damage_and_cuts_never_make_a_wrong_set() {
    let trace = small();
    let file = recorded(&trace, 3, true);
    let (mut seed, mut taken, mut whole) = (41, 0, 0);
    for _ in 0..1500 {
        let mut damaged = file.clone();
        let from = next(&mut seed) as usize % file.len();
        let to = file.len().min(from + 1 + next(&mut seed) as usize % 64);
        damaged[from..to].iter_mut().for_each(|byte| *byte = next(&mut seed) as u8);
        if next(&mut seed).is_multiple_of(2) {
            damaged.truncate(next(&mut seed) as usize % file.len());
        }
        if let Ok(read) = SelectionTrace::from_bytes(&damaged) {
            assert!(begins(&read, &trace), "bytes {from} to {to}: a wrong set");
            taken += 1;
            // The part before the damage and the cut is there.
            let kept = damaged.len().min(from);
            whole += u32::from(read.header().unfinished.is_none());
            let good = borders(&file).into_iter().filter(|border| *border <= kept).count() as u32;
            assert!(
                read.header().steps >= (3 * (good - 1)).min(40),
                "whole groups before byte {kept} are kept"
            );
        }
    }
    assert!(taken > 150 && whole < 5, "{taken} taken, {whole} of them for whole");
}

#[test]
fn damage_before_a_good_group_is_never_a_cut() {
    let file = recorded(&small(), 7, false);
    let borders = borders(&file);
    // A whole group missing, duplicated, or in the wrong place; a mark overwritten by zeros.
    let piece = |n: usize| &file[borders[n - 1]..borders[n]];
    let start = &file[..borders[0]];
    let chain = |order: &[usize]| {
        let bytes = order.iter().fold(start.to_vec(), |all, n| [&all[..], piece(*n)].concat());
        SelectionTrace::from_bytes(&bytes)
    };
    assert_eq!(chain(&[1, 2, 3]).unwrap().header().steps, 21, "the control");
    for order in [&[1, 3, 4][..], &[1, 1, 2], &[2, 1, 3], &[2, 3]] {
        let e = chain(order).unwrap_err();
        assert!(e.place().contains("wrong count of the steps"), "{e}");
        assert_eq!(e.number("whole steps before"), Some(if order[0] == 1 { 7 } else { 0 }));
    }
    let mut zeros = file.clone();
    zeros[borders[2]..borders[2] + MARK_BYTES].fill(0);
    let e = SelectionTrace::from_bytes(&zeros).unwrap_err();
    assert!(e.place().contains("neither a group") && e.to_string().contains("use an unchanged copy"), "{e}");
    assert_eq!(e.number("whole steps before"), Some(14));
}

#[test]
fn a_last_mark_that_is_damaged_is_left_off_with_its_frame() {
    for finish in [true, false] {
        let file = recorded(&small(), 7, finish);
        let borders = borders(&file);
        // Of the last piece, the end if there is one; then of the one before it, with a good mark after it.
        for (last, behind) in [(borders.len() - 1, false), (borders.len() - 2, true)] {
            let (start, steps) = (borders[last - 1], 7 * (last as u64 - 1));
            for at in start..start + MARK_BYTES {
                let mut damaged = file.clone();
                damaged[at] ^= 4;
                let read = SelectionTrace::from_bytes(&damaged);
                if behind {
                    assert_eq!(read.unwrap_err().number("whole steps before"), Some(steps), "byte {at}");
                } else {
                    let header = read.unwrap().header().clone();
                    assert_eq!(header.unfinished, Some((file.len() - start) as u64), "byte {at}");
                    assert_eq!(u64::from(header.steps), steps.min(40));
                }
            }
        }
    }
}

#[test]
fn no_more_than_64_mib_are_left_off_and_a_mark_is_found_anywhere() {
    let file = recorded(&small(), 7, false);
    let last = file[borders(&file)[5]..].to_vec();
    let read = |zeros: u64, behind: &[u8]| {
        let mut bytes = std::io::repeat(0).take(zeros).chain(behind);
        let recording = recording_of(small().header());
        let mut whole = std::io::BufReader::new(file[borders(&file)[0]..].chain(&mut bytes));
        reader::packed(&mut whole, 0, &recording, 1 << 20, &|_| Ok(())).map(|trace| trace.header().unfinished)
    };
    let most = 1 << 26;
    assert_eq!(read(most, &[]), Ok(Some(most)));
    assert_eq!(read(most + 1, &[]).unwrap_err().number("whole steps before"), Some(40));
    assert_eq!(read(1 << 50, &[]).unwrap_err().number("whole steps before"), Some(40));
    for zeros in [1, 15, 16, 17, (1 << 18) - 8, (1 << 18) - 1, 1 << 18, (1 << 19) + 9] {
        assert!(read(zeros, &last).is_err(), "{zeros}");
        assert_eq!(read(zeros, &last[1..]), Ok(Some(zeros + last.len() as u64 - 1)), "{zeros}");
    }
}

/// A recording by hand, one layer and k 2: its first frame and a step that selects 0 and 3.
fn by_hand() -> Vec<u8> {
    let recording = Recording {
        layers: 1,
        k: 2,
        first_position: 5,
        decode_start: 6,
        context: Some(9),
        ..Recording::default()
    };
    let json = serde_json::to_vec(&recording).unwrap();
    let start = packed(&[RECORDING.as_bytes(), &(json.len() as u32).to_le_bytes(), &json].concat());
    [start, framed(&packed(&[0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 2]))].concat()
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
    compressor.set_parameter(zstd::zstd_safe::CParameter::ChecksumFlag(true)).unwrap();
    compressor.compress(bytes).unwrap()
}

fn framed(frame: &[u8]) -> Vec<u8> {
    [&mark(frame.len() as u32), frame].concat()
}

/// A group after `before` steps, of `steps` steps, each of which changes nothing.
fn idle(before: u8, steps: u8) -> Vec<u8> {
    let mut group = vec![before, 0, 0, 0, steps, 0, 0, 0];
    group.resize(8 + 4 * usize::from(steps), 0);
    group
}

#[test]
fn a_frame_that_is_not_just_its_group_is_damage() {
    let (first, next) = (by_hand(), idle(1, 1));
    let end = framed(&packed(&idle(2, 0)));
    let read = |second: &[u8], end: &[u8]| {
        SelectionTrace::from_bytes(&[&first, second, end].concat()).map(|trace| trace.header().clone())
    };
    assert_eq!(read(&framed(&packed(&next)), &end).unwrap().unfinished, None, "the control");
    let mut wrong_sum = packed(&[&next[..], &[0]].concat());
    *wrong_sum.last_mut().unwrap() ^= 1;
    for (second, what) in [
        (framed(&[&packed(&next)[..], &[0]].concat()), "shorter than its mark"),
        (framed(&[&packed(&next)[..], &packed(&next)].concat()), "shorter than its mark"),
        (framed(&packed(&next)[..9]), "truncated"),
        (framed(&next), "damaged"),
        (framed(&wrong_sum), "damaged"),
    ] {
        let e = read(&second, &end).unwrap_err();
        assert!(e.place().contains(what), "{what}: {e}");
        let last = read(&second, &[]).unwrap();
        assert_eq!((last.steps, last.unfinished), (1, Some(second.len() as u64)), "{what}");
    }
}

#[test]
fn a_whole_frame_with_an_impossible_content_is_an_error_also_at_the_end() {
    let first = by_hand();
    let behind = |second: &[u8]| SelectionTrace::from_bytes(&[&first, second].concat());
    assert_eq!(behind(&framed(&packed(&idle(1, 3)))).unwrap().header().steps, 4, "the control");
    for (second, what) in [
        (idle(2, 1), "wrong count of the steps"),
        (idle(3, 0), "wrong count of the steps"),
        (idle(1, 4), "beyond the context"),
        (vec![1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0], "wrong size"),
        (vec![1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 3, 0], "in the set already"),
        ([idle(1, 1), vec![0]].concat(), "bytes follow the steps"),
        (idle(1, 1)[..11].to_vec(), "truncated"),
    ] {
        let e = behind(&framed(&packed(&second))).unwrap_err();
        assert!(e.place().contains(what), "{what}: {e}");
        assert_eq!((e.kind(), e.number("whole steps before")), (Kind::BadFormat, Some(1)), "{what}");
    }
}

#[test]
fn zeros_of_a_lost_power_are_left_off() {
    let trace = small();
    let file = recorded(&trace, 7, false);
    let borders = borders(&file);
    // The last group's tail, all of it, and blocks after it, were never stored.
    for (from, behind) in [(borders[5] + 20, 0), (borders[5] + 40, 4096), (borders[5], 512), (file.len(), 9)]
    {
        let mut torn = file.clone();
        torn[from..].fill(0);
        torn.resize(file.len() + behind, 0);
        let read = SelectionTrace::from_bytes(&torn).unwrap();
        assert!(begins(&read, &trace));
        let groups = if from == file.len() { 6 } else { 5 };
        let left = (torn.len() - borders[groups]) as u64;
        assert_eq!(
            (read.header().unfinished, read.header().steps),
            (Some(left), (7 * groups as u32).min(40))
        );
        torn.extend_from_slice(&file[borders[0]..borders[1]]);
        assert!(SelectionTrace::from_bytes(&torn).is_err(), "a group follows");
    }
}

#[test]
fn a_recording_cut_in_its_prompt_has_warm_steps_only() {
    let file = recorded(&small(), 2, false);
    let read = SelectionTrace::from_bytes(&file[..borders(&file)[2]]).unwrap();
    let header = read.header();
    assert_eq!((header.steps, header.warm_steps, header.decode_start), (4, 4, 8));
    assert_eq!(header.decode_steps(), 0);
}

/// A disk that takes so many bytes per write, and no more than `room` in total.
#[derive(Debug)]
struct Narrow {
    most: usize,
    room: AtomicU64,
}

impl Faults for Narrow {
    fn before(&self, call: Call) -> Option<i32> {
        (call == Call::Write && self.room.load(Ordering::Relaxed) == 0).then_some(libc::ENOSPC)
    }

    fn passes(&self, bytes: usize) -> usize {
        let now = bytes.min(self.most).min(self.room.load(Ordering::Relaxed) as usize);
        self.room.fetch_sub(now as u64, Ordering::Relaxed);
        now
    }
}

/// Records through `faults`. Returns the first error, if there is one, and the file's contents.
fn through(trace: &SelectionTrace, faults: Arc<dyn Faults>) -> (Option<Error>, Option<Vec<u8>>) {
    let directory = Directory::new("faults");
    let frames = Frames { steps: 7, ..Frames::default() };
    let ends = || {
        let recording = recording_of(trace.header());
        let mut writer = TraceWriter::with_faults(directory.file(), &recording, frames, faults.clone())?;
        let mut recorded = record(&mut writer, trace);
        if recorded.is_ok() {
            recorded = writer.sync();
        }
        if let Err(e) = recorded {
            let again = [writer.record(0, &[]), writer.flush(), writer.sync()];
            assert!(again.iter().all(|again| again.as_ref() == Err(&e)), "it stays failed: {again:?}");
            return writer.finish().map(|_| ());
        }
        writer.finish().map(|_| ())
    };
    (ends().err(), fs::read(directory.file()).ok())
}

#[test]
fn after_any_failed_call_the_file_ends_with_a_whole_group() {
    let trace = small();
    let whole = recorded(&trace, 7, true);
    let borders = borders(&whole);
    let counted = Arc::new(Inject::nth(u64::MAX, 0));
    assert_eq!(through(&trace, counted.clone()), (None, Some(whole.clone())));
    let calls = counted.count();
    assert_eq!(calls, 2 + 1 + 7 * 2 + 3, "folder, create, marks and frames, file and folder stored");
    // The first call opens the folder and the fourth last stores it; the file counts.
    for n in (1..calls).filter(|n| *n != calls - 4) {
        let (e, file) = through(&trace, Arc::new(Inject::nth(n, libc::ENOSPC)));
        let e = e.unwrap();
        assert!(e.kind() == Kind::Io && e.place().ends_with("No space left on device"), "{e}");
        match file {
            None => assert!(n < 3, "{n}: the start could not be written"),
            Some(file) => {
                assert!(whole.starts_with(&file) && borders.contains(&file.len()), "call {n}");
                let read = SelectionTrace::from_bytes(&file);
                assert!(read.is_err() == (file.len() == borders[0]));
            }
        }
        let interrupted = through(&trace, Arc::new(Inject::nth(n, libc::EINTR)));
        let is_write = (2..2 + 1 + 6 * 2).contains(&n);
        assert!(!is_write || interrupted == (None, Some(whole.clone())), "call {n}");
    }
}

#[test]
fn a_disk_that_fills_up_leaves_whole_groups() {
    let trace = small();
    let whole = recorded(&trace, 7, true);
    let borders = borders(&whole);
    let narrow = |room: usize| Arc::new(Narrow { most: 11, room: AtomicU64::new(room as u64) });
    assert_eq!(through(&trace, narrow(usize::MAX >> 1)), (None, Some(whole.clone())));
    for room in (0..whole.len()).step_by(13) {
        let (e, file) = through(&trace, narrow(room));
        assert!(e.unwrap().place().contains("write: No space left"));
        let wanted = borders.iter().rfind(|border| **border <= room);
        assert_eq!(file.map(|f| f.len()), wanted.copied(), "room for {room} bytes");
    }
    // If even the truncation of the part fails, the part is read as a cut.
    #[derive(Debug)]
    struct Stuck(Narrow);
    impl Faults for Stuck {
        fn before(&self, call: Call) -> Option<i32> {
            if call == Call::Truncate { Some(libc::EIO) } else { self.0.before(call) }
        }
        fn passes(&self, bytes: usize) -> usize {
            self.0.passes(bytes)
        }
    }
    let room = borders[3] + 20;
    let (e, file) = through(&trace, Arc::new(Stuck(Narrow { most: 50, room: AtomicU64::new(room as u64) })));
    assert!(e.unwrap().to_string().contains("could not be removed"));
    let read = SelectionTrace::from_bytes(&file.unwrap()).unwrap();
    assert_eq!((read.header().steps, read.header().unfinished), (21, Some(20)));
}

#[test]
fn nothing_is_overwritten_and_a_failed_start_leaves_no_file() {
    let directory = Directory::new("new");
    let recording = recording_of(small().header());
    fs::write(directory.file(), "dear").unwrap();
    let e = TraceWriter::create(directory.file(), &recording, Frames::default()).err().unwrap();
    assert!(
        e.to_string().contains("a.topk: create: File exists") && e.to_string().contains("new file"),
        "{e}"
    );
    assert_eq!(fs::read(directory.file()).unwrap(), b"dear");
    let e = TraceWriter::create(directory.0.join("none/a"), &recording, Frames::default()).err().unwrap();
    assert!(e.place().ends_with("create: No such file or directory"), "{e}");
    for bad in [Frames { steps: 0, bytes: 1 }, Frames { steps: 1, bytes: 0 }, Frames { steps: 1, bytes: !0 }]
    {
        let e = TraceWriter::create(directory.0.join("b"), &recording, bad).err().unwrap();
        assert_eq!(e.kind(), Kind::InvalidConfig);
    }
    type Change = fn(&mut Recording);
    let cases: [(&str, Change); 8] = [
        ("layers", |r| r.layers = 0),
        ("k", |r| r.k = 65536),
        ("decode_start", |r| r.decode_start = 3),
        ("decode_start", |r| r.decode_start = 45),
        ("context", |r| r.context = Some(4)),
        ("shares and layers", |r| r.shares = vec![0]),
        ("shares", |r| r.shares = vec![0, 2, 2]),
        ("shares", |r| r.shares = vec![0, 0, 1]),
    ];
    for (field, change) in cases {
        let mut wrong = recording.clone();
        change(&mut wrong);
        let e = TraceWriter::create(directory.0.join("b"), &wrong, Frames::default()).err().unwrap();
        assert!(e.kind() == Kind::InvalidConfig && e.place().contains(field), "{field}: {e}");
    }
    assert!(!directory.0.join("b").exists());
}

#[test]
fn an_impossible_set_is_refused_and_not_recorded() {
    let directory = Directory::new("refused");
    let recording = Recording {
        layers: 2,
        k: 4,
        first_position: 2,
        decode_start: 3,
        context: Some(6),
        ..Recording::default()
    };
    let mut writer = TraceWriter::create(directory.file(), &recording, Frames::default()).unwrap();
    let whole = [0, 1, 2, -1, -1, 2, 0, 1];
    let mut refuses = |position, selected: &[i32], what: &str| {
        let e = writer.record(position, selected).unwrap_err();
        assert!(e.kind() == Kind::OutOfRange && e.place().contains(what), "{e}");
        e
    };
    refuses(3, &whole, "not the next one");
    refuses(1, &whole, "not the next one");
    refuses(2, &whole[..7], "layers x k");
    refuses(2, &[], "layers x k");
    let e = refuses(2, &[0, 1, 2, -1, 0, 1, -1, -1], "too few positions");
    assert_eq!((e.number("layer"), e.number("distinct"), e.number("wanted")), (Some(1), Some(2), Some(3)));
    refuses(2, &[0, 1, 1, 1, 0, 1, 2, -1], "too few positions");
    refuses(2, &[0, 1, 3, -1, 0, 1, 2, -1], "beyond its query's own");
    refuses(2, &[0, 1, -2, -1, 0, 1, 2, -1], "beyond its query's own");
    // The same position twice is one.
    writer.record(2, &[0, 1, 2, 2, -1, 2, 0, 1]).unwrap();
    writer.record(3, &[3, 1, 2, 0, 0, 1, 2, 3]).unwrap();
    writer.record(4, &[4, 1, 2, 0, 0, 1, 2, 3]).unwrap();
    assert!(writer.record(5, &[-1; 8]).unwrap_err().place().contains("too few"));
    writer.record(5, &[4, 1, 2, 5, 0, 1, 2, 3]).unwrap();
    assert!(writer.record(6, &[4, 1, 2, 5, 0, 1, 2, 3]).unwrap_err().place().contains("beyond the context"));
    assert_eq!(writer.finish().unwrap(), 4);
    let read = SelectionTrace::read(&directory.file()).unwrap();
    assert_eq!(
        (read.header().steps, read.selection(0, 1), read.selection(3, 0)),
        (4, &[0, 1, 2][..], &[1, 2, 4, 5][..])
    );
}

#[test]
fn layers_that_share_a_set_are_recorded_once_and_read_each() {
    let directory = Directory::new("shares");
    let own = drifting(Header::example(2, 5, 9, 1, 20), 3);
    let recording = Recording {
        layers: 5,
        layer_ids: vec![0, 1, 2, 3, 7],
        shares: vec![0, 0, 2, 0, 2],
        ..recording_of(own.header())
    };
    let frames = Frames { steps: 3, ..Frames::default() };
    let mut writer = TraceWriter::create(directory.file(), &recording, frames).unwrap();
    record(&mut writer, &own).unwrap();
    writer.finish().unwrap();
    let read = SelectionTrace::read(&directory.file()).unwrap();
    assert_eq!((read.header().layers, read.header().layer_ids.as_slice()), (5, &[0, 1, 2, 3, 7][..]));
    for step in 0..20 {
        for (layer, from) in [0, 0, 1, 0, 1].into_iter().enumerate() {
            assert_eq!(read.selection(step, layer as u32), own.selection(step, from));
        }
    }
    assert!(SelectionTrace::from_bytes(&read.encode().unwrap()).is_ok());
}

#[test]
fn a_writer_crosses_threads() {
    fn crosses<T: Send + 'static>() {}
    crosses::<TraceWriter>();
    crosses::<crate::trace::requests::RequestWriter>();
}

/// The writer's memory does not depend on how much was recorded.
#[test]
fn memory_is_taken_at_creation_and_never_more() {
    let directory = Directory::new("memory");
    let recording =
        Recording { layers: 3, k: 64, first_position: 0, decode_start: 0, ..Recording::default() };
    let frames = Frames { steps: 1000, bytes: 1 << 14 };
    let mut writer = TraceWriter::create(directory.file(), &recording, frames).unwrap();
    let before = writer.memory();
    let mut selected = vec![0; 3 * 64];
    for position in 0..12_000_u32 {
        // Every set differs from the last one, the most that a step can cost: all members of the old set leave.
        let base = if position % 2 == 0 || position < 200 { position } else { position - 100 };
        for (i, place) in selected.iter_mut().enumerate() {
            *place = (base as i32 - (i % 64) as i32).max(-1);
        }
        writer.record(position, &selected).unwrap();
        assert_eq!(writer.memory(), before, "step {position}");
    }
    let before = before - bits::Bits::BYTES;
    assert!(before < 1 << 16 && writer.file_bytes() > before, "{before}, {}", writer.file_bytes());
    writer.finish().unwrap();
    assert_eq!(SelectionTrace::read(&directory.file()).unwrap().header().steps, 12_000);
}

#[test]
fn a_group_with_an_impossible_content_is_refused() {
    let recording = br#"{"layers":1,"k":2,"first_position":5,"decode_start":6,"context":7}"#;
    let plain = |groups: &[u8]| {
        let start = [RECORDING.as_bytes(), &(recording.len() as u32).to_le_bytes(), recording];
        SelectionTrace::from_bytes(&[&start.concat(), groups].concat())
    };
    let group = [0, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0];
    let end = [2, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(plain(&[&group[..], &end].concat()).unwrap().header().steps, 2);
    let place = |groups: &[u8]| plain(groups).unwrap_err().place().to_owned();
    assert!(place(&end).contains("wrong count of the steps"));
    assert!(place(&[0; 8]).contains("no whole group"));
    let mut three = group.to_vec();
    three[4] = 3;
    assert!(place(&[&three[..], &[0; 4], &end].concat()).contains("beyond the context"));
    assert!(place(&[&group[..], &end, &[1]].concat()).contains("bytes follow the end"));
    let e = SelectionTrace::from_bytes_within(&recorded(&small(), 7, true), 500).unwrap_err();
    assert_eq!((e.kind(), e.number("most")), (Kind::Overflow, Some(500)), "too large is no cut");
}

proptest! {
    #[test]
    fn a_recorded_trace_is_read_back(
        layers in 1_u32..5, k in 1_u32..40, first in 0_u32..400, warm in 0_u32..5, decode in 1_u32..30,
        steps in 1_u32..9, bytes in 1_u32..500, seed in any::<u64>(),
    ) {
        let directory = Directory::new("property");
        let trace = drifting(Header::example(layers, k, first, warm, warm + decode), seed);
        let frames = Frames { steps, bytes };
        let mut writer =
            TraceWriter::create(directory.file(), &recording_of(trace.header()), frames).unwrap();
        record(&mut writer, &trace).unwrap();
        writer.finish().unwrap();
        let read = SelectionTrace::read(&directory.file());
        prop_assert_eq!(read.as_ref(), Ok(&trace));
    }
}
