//! Ranks: each process of a tensor-parallel engine decides by itself which rows are resident, and all must reach the
//! same result. Two processes run the same steps and send the digests of their sequences through a pipe (promise P9).
//! They find a rank that selects other rows, and correct it (failure F15), as docs/integration.md describes. They find
//! a rank that resizes a sequence otherwise too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use device::TestDevice;
use forebay::device::host::HostOptions;
use forebay::device::{Event, Slice, Stream};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Sequence, Shape, Streams, WarmUp};

/// Gives a test's child process its rank.
const CHILD: &str = "FOREBAY_TEST_CHILD";

const LAYERS: u32 = 2;
const BATCH: usize = 3;
const WIDTH: u32 = 2;
const K: u32 = 16;
const PROMPT: u32 = 300;

fn random(seed: &mut u64) -> u32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as u32
}

/// The number of accepted rows of the step before this one.
fn accepted(step: u32) -> u32 {
    step % (WIDTH + 1)
}

/// The selection of all ranks' indexers for a query row: positions around some that wander, each once.
fn select(step: u32, layer: u32, sequence: u32, length: u32) -> Vec<i32> {
    let mut seed = u64::from((step * LAYERS + layer) * BATCH as u32 + sequence) + 77;
    let mut positions: Vec<i32> = Vec::new();
    while positions.len() < K as usize {
        let wander = (7 * step + 60 * (random(&mut seed) % 3) + random(&mut seed) % 30) % length;
        if !positions.contains(&(wander as i32)) {
            positions.push(wander as i32);
        }
    }
    positions
}

/// A rank: a cache of its own on a device of its own.
struct Rank {
    /// The order in which its top-k kernel emits the selection, and the order of its batch.
    number: u32,
    cache: Cache,
    device: Arc<TestDevice>,
    stream: Stream,
    done: Event,
    sequences: Vec<Sequence>,
    selection: Slice,
    slots: Slice,
    /// For each sequence: committed rows, and rows of the last step after them.
    lengths: Vec<(u32, u32)>,
}

impl Rank {
    fn new(number: u32) -> Rank {
        // One works at once, in plain Rust; the other later, on its own thread, with vectors.
        let options = HostOptions { threaded: number == 1, portable: number == 0, ..HostOptions::default() };
        let device = TestDevice::new(options);
        let shape =
            Shape { layers: LAYERS, runs: [32, 0], page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        // One lane more than sequences, with its pages and slots: a fork exists next to its parent for a moment.
        let lanes = BATCH as u32 + 1;
        let config = Config { query_rows: WIDTH, parked: 2, memory, ..Config::new(shape, lanes, 600, 70) };
        let cache = Cache::new(config, device.device()).unwrap();
        let (stream, done) = (device.stream().unwrap(), device.event().unwrap());
        let words = || device.allocate(u64::from(4 * BATCH as u32 * WIDTH * K)).unwrap();
        let (selection, slots) = (words(), words());
        let mut rank = Rank {
            number,
            cache,
            stream,
            done,
            selection,
            slots,
            device,
            sequences: Vec::new(),
            lengths: vec![(PROMPT, 0); BATCH],
        };
        rank.sequences = (0..BATCH).map(|_| rank.open(PROMPT)).collect();
        rank
    }

    fn asks(prompt: u32) -> Open {
        let promised = 600 - prompt;
        Open { prompt, promised, budget: Budget::Slots(70), bring_up: BringUp::Nothing }
    }

    fn open(&mut self, prompt: u32) -> Sequence {
        let sequence = self.cache.open(&Rank::asks(prompt)).unwrap();
        self.cache.append_in_place(sequence, prompt).unwrap();
        let _ticket = self.cache.join(sequence, self.stream, WarmUp::default()).unwrap();
        sequence
    }

    fn sync(&self) {
        self.device.record(self.done, self.stream).unwrap();
        self.device.synchronize(self.done).unwrap();
    }

    /// The sequences in the order of this rank's batch.
    fn batch(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..BATCH).collect();
        order.rotate_left(self.number as usize % BATCH);
        order
    }

    /// A step. If a sequence is named, it selects another position in one layer.
    fn step(&mut self, number: u32, wrong: Option<usize>) {
        let batch = self.batch();
        let row = |s: usize| {
            let (_, landed) = self.lengths[s];
            let accepted = Accepted::Rows(accepted(number).min(landed));
            BatchRow { sequence: self.sequences[s], accepted, query_rows: WIDTH }
        };
        let rows: Vec<BatchRow> = batch.iter().map(|s| row(*s)).collect();
        let mut step = self.cache.prepare(MicroBatch(0), WIDTH, &rows, None, self.stream).unwrap();
        for (length, landed) in &mut self.lengths {
            *length += accepted(number).min(*landed);
            *landed = WIDTH;
        }
        let streams = Streams { resolve: self.stream, gather: self.stream };
        for layer in 0..LAYERS {
            let mut all: Vec<i32> = Vec::new();
            for sequence in &batch {
                let length = self.lengths[*sequence].0;
                for query in 0..WIDTH {
                    let mut positions = select(number, layer, *sequence as u32, length);
                    // All ranks' top-k kernels find the same rows, but not in the same order.
                    let mut seed = u64::from(self.number * 1000 + number + query);
                    (1..positions.len())
                        .for_each(|at| positions.swap(at, random(&mut seed) as usize % (at + 1)));
                    if wrong == Some(*sequence) && (layer, query) == (1, 0) {
                        let last = length as i32 - 1;
                        let other = (0..last).rev().find(|position| !positions.contains(position));
                        positions[3] = other.unwrap();
                    }
                    all.extend(positions);
                }
            }
            self.sync();
            let bytes: Vec<u8> = all.iter().flat_map(|position| position.to_le_bytes()).collect();
            self.device.write(self.selection, &bytes).unwrap();
            let buffers = Buffers { selection: self.selection, slots: self.slots, split_indices: None };
            let call = LayerCall::whole(Layer(layer));
            self.cache.layer(&step, call, streams, buffers).unwrap();
            self.cache.scatter(&step, call, self.stream).unwrap();
        }
        self.cache.finish(&mut step, self.stream).unwrap();
        self.sync();
        self.cache.retire(step, self.stream).unwrap();
    }

    /// Gives up the rows of the last step: the length is the committed one at its start.
    fn truncate(&mut self, sequence: usize) {
        let (length, landed) = &mut self.lengths[sequence];
        *landed = 0;
        let _ticket = self.cache.truncate(self.sequences[sequence], *length, self.stream).unwrap();
        self.sync();
    }

    /// A fork begins with an empty lane: it does not take over its parent's resident rows.
    fn fork(&mut self, sequence: usize) {
        self.truncate(sequence);
        let (parent, asks) = (self.sequences[sequence], Rank::asks(self.lengths[sequence].0));
        let (child, _ticket) = self.cache.fork(parent, &asks, self.stream).unwrap();
        self.cache.close(parent, self.stream).unwrap();
        self.sequences[sequence] = child;
        self.sync();
    }

    fn resize(&mut self, sequence: usize, slots: u32) {
        self.cache.resize(self.sequences[sequence], &Budget::Slots(slots), self.stream).unwrap();
        self.sync();
    }

    /// Parks a sequence with the rows of its last step rejected, and resumes it with its newest rows.
    fn park(&mut self, sequence: usize) {
        self.lengths[sequence].1 = 0;
        self.cache.park(self.sequences[sequence], 0, self.stream).unwrap();
        let _ticket = self.cache.resume(self.sequences[sequence], self.stream, 0).unwrap();
        self.sync();
    }

    fn reopen(&mut self, sequence: usize) {
        self.truncate(sequence);
        self.cache.close(self.sequences[sequence], self.stream).unwrap();
        self.sequences[sequence] = self.open(self.lengths[sequence].0);
        self.sync();
    }

    /// The parent's commands, one per line; the replies are the digests of all sequences.
    fn serve(mut self) {
        for line in std::io::stdin().lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            let sequence = || words[1].parse().unwrap();
            match words[0] {
                "step" => self.step(words[1].parse().unwrap(), words[2].parse().ok()),
                "back" => self.truncate(sequence()),
                "fork" => self.fork(sequence()),
                "park" => self.park(sequence()),
                "reopen" => self.reopen(sequence()),
                "resize" => self.resize(sequence(), words[2].parse().unwrap()),
                other => panic!("{other}"),
            }
            self.cache.validate().unwrap();
            let digests = self.sequences.iter().map(|s| self.cache.digest(*s).unwrap().to_string());
            let digests: Vec<String> = digests.collect();
            println!("\nDIGESTS {}", digests.join(" "));
            std::io::stdout().flush().unwrap();
        }
    }
}

/// The digests of a rank's sequences.
type Digests = [u64; BATCH];

/// How long a rank may be silent. Far longer than any rank needs: it ends a test that hangs, and decides nothing else.
const SILENT: Duration = Duration::from_secs(120);

/// A rank's process, the pipe to it, and the lines that a thread reads from it.
struct Process {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<String>,
}

impl Process {
    fn start(rank: u32, test: &str) -> Process {
        let exe = std::env::current_exe().unwrap();
        let mut child = Command::new(exe)
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, rank.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, lines) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()).lines());
        let (says, from) = mpsc::channel();
        // It ends with its pipe, or with the process at the other end.
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| says.send(line)));
        Process { child, to, from }
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.to.as_mut().unwrap(), "{what}").unwrap();
    }

    fn reply(&mut self) -> Digests {
        let said = loop {
            let line = self.from.recv_timeout(SILENT).expect("a rank has ended, or hangs");
            if let Some(said) = line.strip_prefix("DIGESTS ") {
                break said.to_owned();
            }
        };
        let digests: Vec<u64> = said.split(' ').map(|digest| digest.parse().unwrap()).collect();
        digests.try_into().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Its input ends, and so the process ends; a process that does not end, or that belongs to a failed test, is
        // killed.
        self.to = None;
        let silent = if std::thread::panicking() { Duration::ZERO } else { SILENT };
        loop {
            match self.from.recv_timeout(silent) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let _ended_by_itself = self.child.kill();
                    break;
                }
            }
        }
        let ended = self.child.wait();
        if !std::thread::panicking() {
            assert!(ended.unwrap().success());
        }
    }
}

/// Two ranks in processes of their own, and the next step's number.
struct Ranks {
    processes: Vec<Process>,
    next: u32,
}

impl Ranks {
    /// Starts them. A child process follows its parent's commands, and the function returns nothing there.
    fn start(test: &str) -> Option<Ranks> {
        if let Ok(rank) = std::env::var(CHILD) {
            Rank::new(rank.parse().unwrap()).serve();
            return None;
        }
        Some(Ranks { processes: [0, 1].map(|rank| Process::start(rank, test)).into(), next: 0 })
    }

    /// Sends each a command; both run it at the same time.
    fn each(&mut self, what: [&str; 2]) -> [Digests; 2] {
        self.processes.iter_mut().zip(what).for_each(|(process, what)| process.tell(what));
        [0, 1].map(|rank| self.processes[rank].reply())
    }

    fn both(&mut self, what: &str) -> [Digests; 2] {
        self.each([what; 2])
    }

    /// The next step; rank 1 selects another position for a sequence, if one is named.
    fn step(&mut self, wrong: Option<usize>) -> [Digests; 2] {
        let number = self.next;
        self.next += 1;
        let right = format!("step {number} -");
        let other = wrong.map_or_else(|| right.clone(), |sequence| format!("step {number} {sequence}"));
        self.each([&right, &other])
    }

    /// So many steps in which both ranks select the same: all of their digests.
    fn agree(&mut self, steps: u32) -> Vec<Digests> {
        let step = |_| {
            let [ours, theirs] = self.step(None);
            assert_eq!(ours, theirs, "step {}", self.next - 1);
            ours
        };
        (0..steps).map(step).collect()
    }
}

/// The sequences whose residency differs between the two ranks.
fn apart([ours, theirs]: [Digests; 2]) -> Vec<usize> {
    (0..BATCH).filter(|sequence| ours[*sequence] != theirs[*sequence]).collect()
}

#[test]
fn p9_two_processes_that_select_the_same_rows_in_any_order_agree_step_by_step() {
    let test = "p9_two_processes_that_select_the_same_rows_in_any_order_agree_step_by_step";
    let Some(mut ranks) = Ranks::start(test) else { return };
    let digests = ranks.agree(60);
    for sequence in 0..BATCH {
        let changes = digests.windows(2).filter(|two| two[0][sequence] != two[1][sequence]).count();
        assert_eq!(changes, 59, "a digest changes with every step");
    }
    // The control: one position of one query row in one layer.
    assert_eq!(apart(ranks.step(Some(1))), [1]);
}

#[test]
fn f15_a_rank_with_another_selection_is_found_at_that_step_and_in_that_sequence() {
    let test = "f15_a_rank_with_another_selection_is_found_at_that_step_and_in_that_sequence";
    let Some(mut ranks) = Ranks::start(test) else { return };
    for (steps, sequence) in [(1, 0), (6, 2), (9, 1)] {
        ranks.agree(steps);
        assert_eq!(apart(ranks.step(Some(sequence))), [sequence]);
        // The difference does not go away by itself, nor by a truncation, which empties no slot of an older row.
        for _ in 0..5 {
            assert_eq!(apart(ranks.step(None)), [sequence]);
        }
        assert_eq!(apart(ranks.both(&format!("back {sequence}"))), [sequence]);
        assert!(apart(ranks.both(&format!("fork {sequence}"))).is_empty());
    }
    ranks.agree(10);
}

#[test]
fn f15_ranks_agree_again_after_a_fork_or_reopening_of_a_diverged_sequence() {
    let test = "f15_ranks_agree_again_after_a_fork_or_reopening_of_a_diverged_sequence";
    let Some(mut ranks) = Ranks::start(test) else { return };
    ranks.agree(4);
    for (round, remedy) in ["fork", "reopen", "fork", "reopen"].into_iter().enumerate() {
        let sequence = round % BATCH;
        let before = ranks.agree(1)[0];
        let after = ranks.step(Some(sequence));
        assert_eq!(apart(after), [sequence], "{remedy}");
        let healed = ranks.both(&format!("{remedy} {sequence}"));
        assert!(apart(healed).is_empty(), "{remedy}");
        assert_ne!(healed[0][sequence], before[sequence], "its slots are empty, as they were not before");
        // All ranks make the given-up step again.
        ranks.next -= 1;
        ranks.agree(15);
    }
}

#[test]
fn ranks_that_resize_alike_agree_and_a_rank_that_resizes_otherwise_is_found() {
    let test = "ranks_that_resize_alike_agree_and_a_rank_that_resizes_otherwise_is_found";
    let Some(mut ranks) = Ranks::start(test) else { return };
    for (sequence, slots) in [(0, 200), (0, 100), (1, 256), (1, 128), (2, 129), (2, 70), (1, 71)] {
        let before = ranks.agree(3)[2];
        let after = ranks.both(&format!("resize {sequence} {slots}"));
        assert!(apart(after).is_empty(), "{sequence} {slots}");
        assert_eq!(apart([before, after[0]]), [sequence], "a digest covers the budget");
    }
    ranks.agree(3);
    // One slot more, in a block that it holds anyway.
    assert_eq!(apart(ranks.each(["resize 2 100", "resize 2 101"])), [2]);
    assert_eq!(apart(ranks.both("resize 2 90")), [] as [usize; 0], "no row has come or gone in between");
    // A step earlier than the other rank, and a step later.
    for (sequence, slots) in [(0, 170), (2, 70)] {
        let (resize, step) = (format!("resize {sequence} {slots}"), format!("step {} -", ranks.next));
        ranks.next += 1;
        assert_eq!(apart(ranks.each([&resize, &step])), [0, 1, 2]);
        assert_eq!(apart(ranks.each([&step, &resize])), [sequence], "{slots} slots, at another step");
        assert!(apart(ranks.both(&format!("reopen {sequence}"))).is_empty());
    }
    ranks.agree(3);
}

/// The newest rows are the same on every rank, so that a parked sequence resumes with the same.
#[test]
fn ranks_agree_after_a_park_and_a_diverged_sequence_stays_so() {
    let test = "ranks_agree_after_a_park_and_a_diverged_sequence_stays_so";
    let Some(mut ranks) = Ranks::start(test) else { return };
    for round in 0..6 {
        let sequence = round % BATCH;
        let before = ranks.agree(7)[6];
        let after = ranks.both(&format!("park {sequence}"));
        assert!(apart(after).is_empty(), "{sequence}");
        assert_eq!(apart([before, after[0]]), [sequence], "it keeps the newest rows only");
        ranks.agree(2);
    }
    // The row that only one rank selected last is one of the newest.
    assert_eq!(apart(ranks.step(Some(1))), [1]);
    assert_eq!(apart(ranks.both("park 1")), [1]);
    assert!(apart(ranks.both("fork 1")).is_empty());
    ranks.agree(3);
}
