//! Calls that are refused half-way while their stream is held: what they have enqueued runs late, and reaches nothing
//! that was given out meanwhile.

use std::sync::Arc;

use forebay::device::cuda::CudaDevice;
use forebay::device::{Device, Stream, Ticket};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Kind, Layer, LayerCall, MicroBatch, Open, Result,
    Sequence, Stats, Streams, WarmUp,
};
use forebay_standin::{Options, Standin};

use super::{K, OUT_OF_MEMORY, config, device, standin};

/// Calls that are refused half-way while their stream is held.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Join,
    JoinMore,
    Fork,
    Truncate,
    Close,
    Prepare,
    Shrink,
    Grow,
    Park,
    Resume,
}

impl Call {
    /// Tokens of the prompt of the sequence that is named.
    const fn prompt(self) -> u32 {
        if matches!(self, Call::Shrink | Call::Grow) { 70 } else { PROMPT }
    }

    /// The budget that a sequence has before and after a resize.
    const fn budgets(self) -> Option<[u32; 2]> {
        match self {
            // One block goes, and rows of it move into the other one.
            Call::Shrink => Some([78, 20]),
            Call::Grow => Some([20, 78]),
            _ => None,
        }
    }
}

/// A cache with one held stream.
struct Held {
    standin: Standin,
    device: Arc<CudaDevice>,
    cache: Cache,
    /// The held stream, on which the refused call goes on, and the stream of all other work.
    streams: [Stream; 3],
    forked: Vec<Sequence>,
}

const PROMPT: u32 = 40;

impl Held {
    fn new() -> Option<Held> {
        Held::of(false)
    }

    fn of(shared: bool) -> Option<Held> {
        let standin = standin(Options::default())?;
        let device = device(&standin).unwrap();
        let streams = [0; 3].map(|_| device.stream().unwrap());
        Some(Held {
            cache: Cache::new(config(shared), device.clone()).unwrap(),
            standin,
            device,
            streams,
            forked: Vec::new(),
        })
    }

    fn open_of(prompt: u32) -> Open {
        Open { prompt, promised: 10, budget: Budget::Slots(40), bring_up: BringUp::Whole }
    }

    /// A sequence whose rows are all of one byte; none if it does not fit.
    fn fill(&mut self, with: u8) -> Option<Sequence> {
        self.fill_of(&Held::open_of(PROMPT), with)
    }

    fn fill_of(&mut self, open: &Open, with: u8) -> Option<Sequence> {
        let sequence = self.cache.open(open).ok()?;
        let rows = vec![with; (open.prompt * self.cache.geometry().row_bytes()) as usize];
        (0..2).for_each(|layer| self.cache.append(sequence, Layer(layer), &rows).unwrap());
        Some(sequence)
    }

    fn join(&mut self, sequence: Sequence, stream: Stream, bytes_a_call: u64) -> Result<Ticket> {
        self.cache.join(sequence, stream, WarmUp { bytes_a_call, ..WarmUp::default() })
    }

    /// The sequences that a call names, ready for it.
    fn ready(&mut self, call: Call) -> Vec<Sequence> {
        let [one, ..] = self.streams;
        let open = match call.budgets() {
            Some([slots, _]) => {
                Open { promised: 8, budget: Budget::Slots(slots), ..Held::open_of(call.prompt()) }
            }
            None => Held::open_of(call.prompt()),
        };
        let first = self.fill_of(&open, 1).unwrap();
        let bytes = if call == Call::JoinMore { 64 } else { u64::MAX };
        if call != Call::Join {
            let _ticket = self.join(first, one, bytes).unwrap();
        }
        let mut all = vec![first];
        if call == Call::Resume {
            self.cache.park(first, 0, one).unwrap();
        }
        if call == Call::Truncate {
            all.push(self.cache.fork(first, &Held::open_of(0), one).unwrap().0);
        }
        all
    }

    fn call(&mut self, call: Call, sequence: Sequence, stream: Stream) -> Result<()> {
        match call {
            Call::Join => self.join(sequence, stream, u64::MAX).map(drop),
            Call::JoinMore => self.cache.join_more(sequence, stream).map(drop),
            Call::Fork => {
                self.forked.push(self.cache.fork(sequence, &Held::open_of(0), stream)?.0);
                Ok(())
            }
            Call::Truncate => self.cache.truncate(sequence, 20, stream).map(drop),
            Call::Close => self.cache.close(sequence, stream),
            Call::Park => self.cache.park(sequence, 0, stream),
            Call::Resume => self.cache.resume(sequence, stream, 0).map(drop),
            Call::Shrink | Call::Grow => {
                let slots = call.budgets().unwrap()[1];
                self.cache.resize(sequence, &Budget::Slots(slots), stream)
            }
            Call::Prepare => {
                let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
                self.cache.prepare(MicroBatch(0), 1, &[row], None, stream).map(drop)
            }
        }
    }

    /// The call on the held stream, with its `n`-th driver call refused; none if it makes fewer, or if the refusal
    /// fails the device.
    fn refuse(&mut self, call: Call, sequence: Sequence, n: u64) -> Option<Option<Result<()>>> {
        let [one, ..] = self.streams;
        self.standin.hold(one.0);
        self.standin.fail_call(n, OUT_OF_MEMORY);
        let refused = self.call(call, sequence, one);
        let name = self.standin.failed_call();
        self.standin.fail_call(u64::MAX, OUT_OF_MEMORY);
        let event = self.device.event().unwrap();
        // A refused query fails the device for good: no work runs any more.
        let sound = self.device.query(event).is_ok();
        name.map(|_| sound.then_some(refused))
    }

    fn rows_are(&self, sequence: Sequence, count: u32, byte: u8) -> bool {
        let mut row = vec![0; self.cache.geometry().row_bytes() as usize];
        (0..2).all(|layer| {
            (0..count).all(|position| {
                self.cache.read_row(sequence, Layer(layer), position, &mut row).unwrap();
                row.iter().all(|b| *b == byte)
            })
        })
    }

    /// Whether a sequence has the budgets of a resize, if the call is one.
    fn is_resized(&self, call: Call, sequence: Sequence) -> bool {
        call.budgets().is_none_or(|[_, slots]| self.cache.budgets(sequence).unwrap() == [slots; 2])
    }

    /// The number of bytes of all slots that belong to other sequences than the refused call's.
    fn bytes_of_others(&self) -> usize {
        let count = |layer| {
            let slab = self.cache.slab(Layer(layer)).unwrap();
            let mut bytes = vec![0; slab.bytes() as usize];
            assert!(self.standin.read(slab.address(), &mut bytes));
            bytes.iter().filter(|b| **b == 9).count()
        };
        count(0) + count(1)
    }

    /// Everything is freed once the stream has gone on.
    fn end(mut self, all: &[Sequence], mut start: Stats) {
        let [_, _, third] = self.streams;
        for sequence in all.iter().chain(&self.forked) {
            if let Err(error) = self.cache.close(*sequence, third) {
                assert_eq!(error.kind(), Kind::Closed);
            }
        }
        (0..2).for_each(|_| assert!(self.cache.reap(third).is_ok()));
        self.cache.validate().unwrap();
        start.resizes = self.cache.stats().resizes;
        assert_eq!(self.cache.stats(), start);
    }
}

const CALLS: [Call; 9] = [
    Call::Join,
    Call::JoinMore,
    Call::Fork,
    Call::Truncate,
    Call::Close,
    Call::Shrink,
    Call::Grow,
    Call::Park,
    Call::Resume,
];

#[test]
fn work_enqueued_by_a_refused_call_reaches_no_other_sequence() {
    let Some(mut held) = Held::new() else { return };
    let new = held.fill(9).unwrap();
    let _ticket = held.join(new, held.streams[2], u64::MAX).unwrap();
    let alone = (held.cache.digest(new).unwrap(), held.bytes_of_others());
    let (mut waited, mut others) = (0, 0);
    let mut over = None;
    for (call, n) in CALLS.iter().flat_map(|call| (0..200).map(move |n| (*call, n))) {
        if over == Some(call) {
            continue;
        }
        let Some(mut held) = Held::new() else { return };
        let [one, other, third] = held.streams;
        let start = held.cache.stats();
        let mut all = held.ready(call);
        let Some(refused) = held.refuse(call, all[0], n) else {
            over = Some(call);
            continue;
        };
        if refused.is_none() {
            continue;
        }
        for sequence in &all {
            let _ = held.cache.close(*sequence, other);
        }
        waited += held.cache.reap(other).unwrap();
        let mut news = Vec::new();
        while let Some(new) = held.fill(9) {
            let _ticket = held.join(new, third, u64::MAX).unwrap();
            news.push(new);
        }
        held.standin.let_go(one.0);
        let bytes = held.bytes_of_others();
        assert_eq!(bytes, alone.1 * news.len(), "{call:?}, call {n}: bytes in slots");
        let resident = |new: &Sequence| held.cache.digest(*new).unwrap() == alone.0;
        assert!(news.iter().all(resident), "{call:?}, call {n}: residency");
        assert!(news.iter().all(|new| held.rows_are(*new, PROMPT, 9)), "{call:?}, call {n}: rows");
        others += news.len();
        all.extend(news);
        held.end(&all, start);
    }
    assert!(waited > 20 && others > 20, "{waited} {others}");
}

#[test]
fn a_refused_call_is_made_again_on_another_stream() {
    let (mut again, mut queued, mut truncating) = (0, 0, 0);
    let (mut prompts, mut over) = (0, None);
    for (call, n) in CALLS.iter().flat_map(|call| (0..200).map(move |n| (*call, n))) {
        if over == Some(call) {
            continue;
        }
        let Some(mut held) = Held::new() else { return };
        let [one, other, _] = held.streams;
        let all = held.ready(call);
        let Some(refused) = held.refuse(call, all[0], n) else {
            over = Some(call);
            continue;
        };
        let Some(refused) = refused else { continue };
        if let Err(error) = refused {
            assert_eq!(error.kind(), Kind::OutOfMemory, "{call:?}, call {n}");
            if call == Call::Truncate && !held.cache.is_running(all[0]).unwrap() {
                let error = held.cache.resize(all[0], &Budget::Slots(20), other).unwrap_err();
                assert_eq!(error.place(), "the device refused a truncate half-way");
                truncating += 1;
            }
            let running = held.cache.is_running(all[0]).is_ok_and(|running| running);
            let done = match held.call(call, all[0], other) {
                // It has its lane again, and perhaps the tables there.
                Err(error) if call == Call::Resume && error.kind() == Kind::InvalidState => {
                    prompts += 1;
                    match held.call(Call::Join, all[0], other) {
                        Err(_) => held.call(Call::JoinMore, all[0], other),
                        done => done,
                    }
                }
                done if call == Call::Park => {
                    prompts += u32::from(!running);
                    done
                }
                // Its lane has the tables already.
                Err(error) if call == Call::Join && error.kind() == Kind::InvalidState => {
                    held.call(Call::JoinMore, all[0], other)
                }
                // It is enqueued, and its lists are still staged.
                Err(error) if call.budgets().is_some() && error.kind() == Kind::Busy => {
                    queued += 1;
                    assert!(held.is_resized(call, all[0]), "{call:?}, call {n}");
                    held.standin.let_go(one.0);
                    held.call(call, all[0], other)
                }
                done => done,
            };
            match done {
                Err(error) if call == Call::Close => assert_eq!(error.kind(), Kind::Closed),
                done => done.unwrap(),
            }
            again += 1;
        }
        held.standin.let_go(one.0);
        if call != Call::Close {
            let count = if call == Call::Truncate { 20 } else { call.prompt() };
            assert!(held.is_resized(call, all[0]), "{call:?}, call {n}");
            assert_eq!(held.cache.length(all[0]).unwrap().committed, count, "{call:?}, call {n}");
            assert_eq!(held.cache.is_parked(all[0]).unwrap(), call == Call::Park, "{call:?}, call {n}");
            assert!(call != Call::Resume || held.cache.is_running(all[0]).unwrap(), "{call:?}, call {n}");
            assert!(held.rows_are(all[0], count, 1), "{call:?}, call {n}");
        }
        held.cache.validate().unwrap();
    }
    assert!(
        again > 30 && queued > 1 && truncating > 0 && prompts > 2,
        "{again} {queued} {truncating} {prompts}"
    );
}

/// A step after the refused call takes its stream over. That does not mean that the device has read the lists.
#[test]
fn lists_of_a_refused_resize_stay_staged_while_a_step_follows_it() {
    let (mut queued, mut over) = (0, None);
    let calls = [Call::Shrink, Call::Grow].into_iter().flat_map(|call| (0..200).map(move |n| (call, n)));
    for (call, n) in calls {
        if over == Some(call) {
            continue;
        }
        let Some(mut held) = Held::new() else { return };
        let [one, other, _] = held.streams;
        let all = held.ready(call);
        let [selection, slots] = [(); 2].map(|()| held.device.allocate(4 * u64::from(K)).unwrap());
        assert!(held.standin.write(selection.address(), &[0xFF; 4 * K as usize]), "nothing is selected");
        let buffers = Buffers { selection, slots, split_indices: None };
        let Some(refused) = held.refuse(call, all[0], n) else {
            over = Some(call);
            continue;
        };
        if refused.is_some_and(|refused| refused.is_err()) && held.is_resized(call, all[0]) {
            let row = BatchRow { sequence: all[0], accepted: Accepted::Rows(0), query_rows: 1 };
            let mut step = held.cache.prepare(MicroBatch(0), 1, &[row], None, one).unwrap();
            let streams = Streams { resolve: one, gather: one };
            for call in [0, 1].map(|layer| LayerCall::whole(Layer(layer))) {
                held.cache.layer(&step, call, streams, buffers).unwrap();
                held.cache.scatter(&step, call, one).unwrap();
            }
            held.cache.finish(&mut step, one).unwrap();
            let error = held.cache.resize(all[0], &Budget::Slots(20), other).unwrap_err();
            assert_eq!(error.place(), "the last resize of the sequence is in flight", "{call:?}, call {n}");
            queued += 1;
            held.standin.let_go(one.0);
            held.cache.retire(step, other).unwrap();
            held.cache.resize(all[0], &Budget::Slots(20), other).unwrap();
            held.cache.validate().unwrap();
        }
    }
    assert!(queued > 1, "{queued}");
}

#[test]
fn a_step_descriptor_is_not_written_while_a_refused_prepare_may_read_it() {
    let mut busy = 0;
    for n in 0.. {
        let Some(mut held) = Held::new() else { return };
        let [one, other, _] = held.streams;
        let mut start = held.cache.stats();
        let all = held.ready(Call::Prepare);
        let Some(refused) = held.refuse(Call::Prepare, all[0], n) else { break };
        if refused.is_some_and(|refused| refused.is_err()) {
            // One descriptor may still be read: of two, one is left.
            let row = BatchRow { sequence: all[0], accepted: Accepted::Rows(0), query_rows: 1 };
            let prepare = |held: &mut Held| held.cache.prepare(MicroBatch(0), 1, &[row], None, other);
            let mut step = prepare(&mut held).unwrap();
            held.cache.abandon(&mut step).unwrap();
            held.cache.finish(&mut step, other).unwrap();
            busy += held.cache.stats().steps_in_flight - 1;
            held.standin.let_go(one.0);
            assert_eq!(held.cache.retire(step, other).unwrap_err().error.kind(), Kind::Cancelled);
            start.steps = 1;
            held.end(&all, start);
        }
    }
    assert!(busy > 0, "none was refused after the reader was enqueued");
}

/// A sequence that was promised slots gets them, whatever call of the join that takes them back is refused.
#[test]
fn a_join_that_was_refused_half_way_finds_its_slots_later() {
    let (mut refusals, mut shrunk) = (0, 0);
    for n in 0..200 {
        let Some(mut held) = Held::of(true) else { return };
        let [one, _, third] = held.streams;
        let start = held.cache.stats();
        let lone = held.fill_of(&Open { promised: 120, ..Held::open_of(70) }, 1).unwrap();
        let _ticket = held.join(lone, third, u64::MAX).unwrap();
        // All but the block that the first one was promised.
        let open = Open { promised: 100, budget: Budget::Slots(4 * 64), ..Held::open_of(100) };
        let second = held.fill_of(&open, 9).unwrap();
        let other = held.fill_of(&Open { promised: 10, budget: Budget::Slots(6), ..Held::open_of(20) }, 5);
        assert!(other.is_none(), "no block is left to promise");
        held.standin.fail_call(n, OUT_OF_MEMORY);
        let refused = held.join(second, one, u64::MAX);
        let over = held.standin.failed_call().is_none();
        held.standin.fail_call(u64::MAX, OUT_OF_MEMORY);
        let event = held.device.event().unwrap();
        if over || held.device.query(event).is_err() {
            if over {
                break;
            }
            continue;
        }
        if refused.is_err() {
            refusals += 1;
            shrunk += u32::from(held.cache.budgets(lone).unwrap() == [64; 2]);
            held.cache.validate().unwrap();
            let again = match held.join(second, one, u64::MAX) {
                Err(error) if error.kind() == Kind::InvalidState => held.cache.join_more(second, one),
                again => again,
            };
            assert!(again.is_ok(), "call {n}: {:?}", again.err());
        }
        assert!(held.cache.budgets(second).unwrap().iter().all(|slots| *slots == 202));
        held.cache.validate().unwrap();
        assert!(held.rows_are(lone, 70, 1) && held.rows_are(second, 100, 9), "call {n}");
        held.end(&[lone, second], start);
    }
    assert!(refusals > 10 && shrunk > 3, "{refusals} {shrunk}");
}
