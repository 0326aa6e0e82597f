//! Calls that a cache refuses: the error names kind, place and numbers, and nothing has changed.

use std::fmt::Debug;
use std::sync::Arc;

use crate::device::TestDevice;
use forebay::dense::{Cache, Config, Found, Group, Open, Shape};
use forebay::device::host::HostOptions;
use forebay::device::{Slice, Stream};
use forebay::{Accepted, BatchRow, Kind, Memory, MicroBatch, Result, Sequence, Step, Tokens};

type Change = fn(&mut Config);
pub type Numbers<'a> = &'a [(&'static str, u64)];

/// Two groups, the second with a window of 17 tokens, for three sequences.
pub fn config() -> Config {
    let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
    let groups = vec![group(&[1], [32, 16], None), group(&[0, 2], [16, 0], Some(17))];
    let mut config = Config {
        batch: 2,
        step_tokens: 40,
        query_rows: 2,
        micro_batches: 2,
        memory: Memory { huge: false, populate: false, lock: false, node: None },
        ..Config::new(Shape { page_tokens: 16, groups }, 3, 96)
    };
    config.device_pages = config.pages_for(2, 96);
    config.host_pages = vec![6, 6];
    config
}

pub struct Rig {
    pub device: Arc<TestDevice>,
    pub cache: Cache,
    pub stream: Stream,
    accepted: Slice,
}

impl Rig {
    pub fn new(config: Config) -> Rig {
        let device = TestDevice::new(HostOptions::default());
        let cache = Cache::new(config, device.device()).unwrap();
        let (stream, accepted) = (device.stream().unwrap(), device.allocate(8).unwrap());
        Rig { device, cache, stream, accepted }
    }

    pub fn open(&mut self, prompt: u32, promised: u32) -> Sequence {
        self.cache.open(&Open { prompt, promised }).unwrap()
    }

    /// Everything that a caller can see of the cache, and of `sequences`.
    fn seen(&self, sequences: &[Sequence]) -> String {
        self.cache.validate().unwrap();
        let seen = sequences.iter().map(|sequence| {
            let pages = (0..2).map(|group| self.cache.pages(*sequence, group).ok());
            (self.cache.length(*sequence), pages.collect::<Vec<_>>())
        });
        format!("{:?} {:?}", self.cache.stats(), seen.collect::<Vec<_>>())
    }

    #[track_caller]
    pub fn refuses<T: Debug>(
        &mut self,
        sequences: &[Sequence],
        call: impl FnOnce(&mut Rig) -> Result<T>,
        kind: Kind,
        place: &str,
        numbers: Numbers<'_>,
    ) {
        let before = self.seen(sequences);
        let error = call(self).unwrap_err();
        assert_eq!((error.kind(), error.place(), error.numbers()), (kind, place, numbers));
        assert_eq!(self.seen(sequences), before, "{error}");
    }

    pub fn prepare(&mut self, micro: u32, rows: &[BatchRow]) -> Result<Step> {
        self.cache.prepare(MicroBatch(micro), rows, None, self.stream)
    }

    /// Prepares and finishes.
    fn begin(&mut self, micro: u32, rows: &[BatchRow]) -> Step {
        let mut step = self.prepare(micro, rows).unwrap();
        self.cache.finish(&mut step, self.stream).unwrap();
        step
    }

    fn step(&mut self, rows: &[BatchRow]) {
        let step = self.begin(0, rows);
        self.retire(step);
    }

    fn retire(&mut self, step: Step) {
        self.cache.retire(step, self.stream).map(drop).map_err(|unretired| unretired.error).unwrap();
    }
}

pub fn row(sequence: Sequence, accepted: u32, query_rows: u32) -> BatchRow {
    BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows }
}

#[test]
fn configurations_that_no_cache_can_have_are_refused_before_anything_is_taken() {
    let cases: [(Change, &str, Numbers<'_>); 17] = [
        (|c| c.shape.page_tokens = 8, "page_tokens", &[("value", 8)]),
        (|c| c.shape.page_tokens = 24, "page_tokens", &[("value", 24)]),
        (|c| c.shape.page_tokens = 512, "page_tokens", &[("value", 512)]),
        (|c| c.shape.groups[1].window = Some(0), "window", &[("value", 0), ("group", 1)]),
        (
            |c| c.shape.groups[1].window = Some(97),
            "window",
            &[("value", 97), ("max_tokens", 96), ("group", 1)],
        ),
        (|c| c.sequences = 0, "sequences", &[("value", 0)]),
        (|c| c.max_tokens = 0, "max_tokens", &[("value", 0)]),
        (|c| c.batch = 0, "batch", &[("value", 0)]),
        (|c| c.query_rows = 0, "query_rows", &[("value", 0)]),
        (|c| c.steps_in_flight = 0, "steps_in_flight", &[("value", 0)]),
        (|c| c.micro_batches = 0, "micro_batches", &[("value", 0)]),
        (|c| c.step_tokens = 3, "step_tokens", &[("value", 3), ("least", 4)]),
        (|c| c.device_pages[1] = 1, "device_pages", &[("given", 1), ("group", 1), ("least", 2)]),
        (|c| c.device_pages.push(9), "device_pages", &[("given", 3), ("wanted", 2)]),
        (|c| c.host_pages[0] = 5, "host_pages", &[("given", 5), ("least", 6), ("group", 0)]),
        (|c| c.host_pages[1] = 0, "host_pages", &[("given", 0), ("least", 6), ("group", 1)]),
        (|c| c.host_pages = vec![6], "host_pages", &[("given", 1), ("wanted", 2)]),
    ];
    for (change, place, numbers) in cases {
        let mut wrong = config();
        change(&mut wrong);
        // A device with no byte to give: the numbers are checked first.
        let device = TestDevice::host(HostOptions { memory: Some(0), ..HostOptions::default() });
        let error = Cache::new(wrong, device.device()).unwrap_err();
        assert_eq!((error.kind(), error.place(), error.numbers()), (Kind::InvalidConfig, place, numbers));
        assert_ne!(error.advice(), error.kind().hint(), "it says what to pass");
    }
}

#[test]
fn an_opening_that_does_not_fit_takes_nothing() {
    let mut rig = Rig::new(config());
    let place = "prompt and promised tokens";
    let open = |prompt, promised| move |rig: &mut Rig| rig.cache.open(&Open { prompt, promised });
    let most = |prompt: u64, promised: u64| [("prompt", prompt), ("promised", promised), ("most", 96)];
    rig.refuses(&[], open(90, 7), Kind::OutOfRange, place, &most(90, 7));
    rig.refuses(&[], open(0, 0), Kind::OutOfRange, place, &most(0, 0));
    let all = u64::from(u32::MAX);
    rig.refuses(&[], open(u32::MAX, 1), Kind::OutOfRange, place, &most(all, 1));
    // 96 tokens and 4 rows in flight are 7 pages, and there are 14.
    let whole = rig.open(90, 6);
    let short = rig.open(1, 1);
    let pages = "device pages of a group";
    let numbers = [("wanted", 7), ("free", 6), ("group", 0)];
    rig.refuses(&[whole, short], open(96, 0), Kind::Exhausted, pages, &numbers);
    let names = rig.cache.names(b"", Tokens::new(&[1; 64])).unwrap();
    let stream = rig.stream;
    let shared = |rig: &mut Rig| rig.cache.open_shared(&Open { prompt: 96, promised: 0 }, &names, stream);
    rig.refuses(&[whole, short], shared, Kind::Exhausted, pages, &numbers);
    let shared = |rig: &mut Rig| rig.cache.open_shared(&Open { prompt: 63, promised: 9 }, &names, stream);
    let longer = "names of more tokens than the prompt has";
    rig.refuses(&[whole], shared, Kind::OutOfRange, longer, &[("pages", 4), ("prompt", 63)]);
    // The window's promise can be the one that is missing: the first group has pages enough.
    let last = rig.open(80, 12);
    rig.refuses(&[last], open(1, 1), Kind::Exhausted, "sequences", &[("wanted", 1), ("free", 0)]);
    let extend = |prompt, promised| move |rig: &mut Rig| rig.cache.extend(short, prompt, promised);
    let numbers = [("wanted", 1), ("free", 0), ("group", 0)];
    rig.refuses(&[whole, short, last], extend(1, 20), Kind::Exhausted, pages, &numbers);
    for (prompt, promised) in [(0, 20), (1, 0)] {
        let given = [("prompt", prompt.into()), ("promised", promised.into())];
        let numbers = [given[0], given[1], ("least prompt", 1), ("least sum", 2)];
        rig.refuses(&[short], extend(prompt, promised), Kind::OutOfRange, place, &numbers);
    }
    for (prompt, promised) in [(50, 47), (u32::MAX, 1)] {
        let numbers = most(prompt.into(), promised.into());
        rig.refuses(&[short], extend(prompt, promised), Kind::OutOfRange, place, &numbers);
    }
}

#[test]
fn a_promise_of_a_window_is_refused_by_its_group() {
    let mut tight = config();
    tight.device_pages[1] = 8;
    let mut rig = Rig::new(tight);
    let open = |rig: &mut Rig| rig.cache.open(&Open { prompt: 90, promised: 6 });
    let first = open(&mut rig).unwrap();
    let numbers = [("wanted", 7), ("free", 0), ("group", 1)];
    rig.refuses(&[first], open, Kind::Exhausted, "device pages of a group", &numbers);
    assert_eq!(rig.cache.stats().free_pages[..2], [7, 0]);
}

#[test]
fn handles_of_closed_sequences_are_refused_by_every_call() {
    let mut rig = Rig::new(config());
    let gone = rig.open(10, 5);
    rig.cache.close(gone, rig.stream).unwrap();
    // Its record has another sequence now. And a larger cache has a sequence beyond this one's records.
    let other = rig.open(10, 5);
    let mut larger = Rig::new(Config { sequences: 9, ..config() });
    let strange = (0..4).map(|_| larger.open(1, 1)).last().unwrap();
    let stream = rig.stream;
    for gone in [gone, strange] {
        let place = gone.to_string();
        let mut closed = |call: &mut dyn FnMut(&mut Rig) -> Result<()>| {
            rig.refuses(&[other], call, Kind::Closed, &place, &[]);
        };
        closed(&mut |rig| rig.cache.length(gone).map(drop));
        closed(&mut |rig| rig.cache.pages(gone, 0).map(drop));
        closed(&mut |rig| rig.cache.extend(gone, 20, 5));
        closed(&mut |rig| rig.cache.fork(gone, 5, stream).map(drop));
        closed(&mut |rig| rig.cache.truncate(gone, 0, stream).map(drop));
        closed(&mut |rig| rig.cache.publish(gone, 0, Tokens::new(&[])).map(drop));
        closed(&mut |rig| rig.cache.close(gone, stream));
        closed(&mut |rig| rig.prepare(0, &[row(gone, 0, 1)]).map(drop));
        closed(&mut |rig| rig.prepare(0, &[row(other, 0, 1), row(gone, 0, 1)]).map(drop));
    }
}

#[test]
fn a_prepare_that_is_wrong_begins_no_step() {
    let mut rig = Rig::new(config());
    let (one, two, tail) = (rig.open(40, 10), rig.open(4, 4), rig.open(1, 1));
    let of = [one, two, tail];
    let prepare = |micro, rows: Vec<BatchRow>| move |rig: &mut Rig| rig.prepare(micro, &rows);
    let range = |value, most| [("value", value), ("most", most)];
    let bad = Kind::OutOfRange;
    rig.refuses(&of, prepare(2, vec![row(one, 0, 1)]), bad, "micro-batch", &range(2, 1));
    rig.refuses(&of, prepare(0, vec![]), bad, "rows of the batch", &range(0, 2));
    let three = of.map(|sequence| row(sequence, 0, 1));
    rig.refuses(&of, prepare(0, three.to_vec()), bad, "rows of the batch", &range(3, 2));
    let all = "query rows of all batch rows";
    rig.refuses(&of, prepare(0, vec![row(one, 0, 39), row(two, 0, 2)]), bad, all, &range(41, 40));
    rig.refuses(&of, prepare(0, vec![row(one, 0, u32::MAX); 2]), bad, all, &range(8_589_934_590, 40));
    let rows = "query rows of a batch row";
    rig.refuses(&of, prepare(0, vec![row(one, 0, 0)]), bad, rows, &[("value", 0)]);
    let twice = vec![row(one, 0, 1), row(one, 0, 1)];
    let named = "a sequence is named twice";
    rig.refuses(&of, prepare(0, twice), Kind::InvalidConfig, named, &[("batch row", 1)]);
    let device = BatchRow { accepted: Accepted::OnDevice, ..row(one, 0, 1) };
    let none = "no tensor of accepted counts";
    rig.refuses(&of, prepare(0, vec![device]), Kind::InvalidConfig, none, &[("value", 0)]);
    rig.refuses(&of, prepare(0, vec![row(one, 1, 1)]), bad, "accepted rows", &[("value", 1)]);
    // 8 tokens and 4 rows in flight.
    let grows = "the sequence outgrows its admitted tokens";
    rig.refuses(&of, prepare(0, vec![row(two, 0, 13)]), bad, grows, &[("tokens", 13), ("admitted", 8)]);
    // A tensor of another size.
    let (stream, wrong) = (rig.stream, rig.accepted.part(0, 4).unwrap());
    let call = |rig: &mut Rig| rig.cache.prepare(MicroBatch(0), &[device], Some(wrong), stream);
    let before = rig.seen(&of);
    assert_eq!(call(&mut rig).unwrap_err().kind(), bad);
    assert_eq!(rig.seen(&of), before);

    let step = rig.prepare(0, &[row(one, 0, 20)]).unwrap();
    let open = "the micro-batch's last step is not finished";
    rig.refuses(&of, prepare(0, vec![row(two, 0, 1)]), Kind::Busy, open, &[("micro-batch", 0)]);
    let mut step = step;
    rig.cache.finish(&mut step, stream).unwrap();
    let home = "a sequence of another micro-batch";
    rig.refuses(&of, prepare(1, vec![row(one, 20, 1)]), Kind::InvalidState, home, &[("value", 1)]);
    // A prompt's chunk is accepted whole.
    let chunk = "accepted rows of a chunk of a prompt";
    let numbers = [("rows", 20), ("query rows", 2)];
    rig.refuses(&of, prepare(0, vec![row(one, 19, 1)]), bad, chunk, &numbers);
    let counted = |rig: &mut Rig| rig.cache.prepare(MicroBatch(0), &[device], Some(rig.accepted), stream);
    rig.refuses(&of, counted, bad, chunk, &numbers);
    let later = rig.begin(0, &[row(one, 20, 20)]);
    let flights = "steps of one sequence in flight";
    rig.refuses(&of, prepare(0, vec![row(one, 20, 1)]), Kind::Busy, flights, &[("value", 2)]);
    rig.retire(step);
    rig.retire(later);
    rig.step(&[row(one, 20, 1), row(two, 0, 8)]);
}

#[test]
fn steps_that_are_not_this_caches_or_not_at_their_end_are_refused() {
    let (mut rig, mut other) = (Rig::new(config()), Rig::new(config()));
    let (own, foreign) = (rig.open(4, 4), other.open(4, 4));
    let mut step = rig.prepare(0, &[row(own, 0, 4)]).unwrap();
    let mut strange = other.prepare(0, &[row(foreign, 0, 4)]).unwrap();
    let (stream, number) = (rig.stream, [("step", strange.number())]);
    let place = "a step of another cache";
    rig.refuses(&[own], |rig| rig.cache.finish(&mut strange, stream), Kind::OutOfRange, place, &number);
    rig.refuses(&[own], |rig| rig.cache.abandon(&mut strange), Kind::OutOfRange, place, &number);
    let before = rig.seen(&[own]);
    let unretired = rig.cache.retire(strange, stream).unwrap_err();
    assert_eq!((unretired.error.kind(), unretired.error.place()), (Kind::OutOfRange, place));
    assert_eq!(rig.seen(&[own]), before);
    // Before its finish.
    let unretired = rig.cache.retire(step, stream).unwrap_err();
    assert_eq!(unretired.error.kind(), Kind::Busy);
    step = unretired.step.unwrap();
    assert_eq!(rig.seen(&[own]), before);
    rig.cache.finish(&mut step, stream).unwrap();
    let ended = "the step is finished";
    rig.refuses(&[own], |rig| rig.cache.finish(&mut step, stream), Kind::InvalidState, ended, &[]);
    rig.refuses(&[own], |rig| rig.cache.abandon(&mut step), Kind::InvalidState, ended, &[]);
    rig.retire(step);
}

#[test]
fn a_sequence_goes_back_only_to_rows_that_it_has() {
    let mut rig = Rig::new(config());
    let (sequence, stream) = (rig.open(80, 10), rig.stream);
    rig.step(&[row(sequence, 0, 40)]);
    rig.step(&[row(sequence, 40, 40)]);
    let to = |length| move |rig: &mut Rig| rig.cache.truncate(sequence, length, stream);
    let numbers = [("length", 81), ("committed", 40), ("landed", 40)];
    rig.refuses(&[sequence], to(81), Kind::OutOfRange, "length", &numbers);
    let step = rig.begin(0, &[row(sequence, 40, 2)]);
    let busy = "work of the sequence is in flight";
    rig.refuses(&[sequence], to(80), Kind::Busy, busy, &[("steps", 1)]);
    rig.refuses(&[sequence], |rig| rig.cache.fork(sequence, 1, stream), Kind::Busy, busy, &[("steps", 1)]);
    rig.retire(step);
    // Queries from position 80 on read from position 64 on: the window begins in page 4.
    let gone = "a sliding window whose pages were given back";
    let numbers = [("length", 40), ("group", 1), ("wanted page", 1), ("first page", 4)];
    rig.refuses(&[sequence], to(40), Kind::OutOfRange, gone, &numbers);
    let fork = |rig: &mut Rig| rig.cache.fork(sequence, 1, stream);
    let landed = "rows of the last step are neither accepted nor rejected";
    rig.refuses(&[sequence], fork, Kind::InvalidState, landed, &[("landed", 2)]);
    drop(rig.cache.truncate(sequence, 81, stream).unwrap());
    let fork = |rig: &mut Rig| rig.cache.fork(sequence, 16, stream);
    let numbers = [("prompt", 81), ("promised", 16), ("most", 96)];
    rig.refuses(&[sequence], fork, Kind::OutOfRange, "prompt and promised tokens", &numbers);
    // A step that is abandoned fails its sequence.
    let mut step = rig.prepare(0, &[row(sequence, 0, 1)]).unwrap();
    rig.cache.abandon(&mut step).unwrap();
    rig.cache.finish(&mut step, stream).unwrap();
    let failed = "a step of the sequence failed";
    let prepare = |rig: &mut Rig| rig.prepare(0, &[row(sequence, 0, 1)]);
    rig.refuses(&[sequence], prepare, Kind::InvalidState, failed, &[]);
    let unretired = rig.cache.retire(step, stream).unwrap_err();
    assert_eq!((unretired.error.kind(), unretired.step.is_none()), (Kind::Cancelled, true));
    rig.refuses(&[sequence], |rig| rig.cache.fork(sequence, 1, stream), Kind::InvalidState, failed, &[]);
    rig.refuses(&[sequence], |rig| rig.cache.extend(sequence, 80, 11), Kind::InvalidState, failed, &[]);
    let publish = |rig: &mut Rig| rig.cache.publish(sequence, 0, Tokens::new(&[]));
    rig.refuses(&[sequence], publish, Kind::InvalidState, failed, &[]);
    // The row that the failed step wrote cannot be accepted.
    let numbers = [("length", 82), ("committed", 81), ("landed", 1)];
    let error = rig.cache.truncate(sequence, 82, stream).unwrap_err();
    assert_eq!((error.kind(), &error.numbers()[..2]), (Kind::OutOfRange, &numbers[..2]));
    drop(rig.cache.truncate(sequence, 81, stream).unwrap());
    rig.step(&[row(sequence, 0, 1)]);
}

#[test]
fn names_and_publishing_are_checked() {
    let mut rig = Rig::new(config());
    let (stream, ids) = (rig.stream, (0..96).collect::<Vec<u32>>());
    let plain = rig.open(20, 4);
    let publish = |from, ids: &[u32]| {
        let ids = ids.to_vec();
        move |rig: &mut Rig, sequence| rig.cache.publish(sequence, from, Tokens::new(&ids))
    };
    let nameless = "the sequence was opened without names";
    let call = publish(0, &[]);
    rig.refuses(&[plain], |rig| call(rig, plain), Kind::InvalidState, nameless, &[]);
    let too_long = [ids.as_slice(), &[1]].concat();
    let names = |rig: &mut Rig| rig.cache.names(b"", Tokens::new(&too_long)).map(drop);
    rig.refuses(&[], names, Kind::OutOfRange, "token ids", &[("ids", 97), ("most", 96)]);
    let keys = "keys: as many as full pages, or none";
    let keyed = Tokens { ids: &ids[..40], keys: &[None] };
    let names = |rig: &mut Rig| rig.cache.names(b"", keyed).map(drop);
    rig.refuses(&[], names, Kind::OutOfRange, keys, &[("keys", 1), ("pages", 2)]);

    let empty = rig.cache.names(b"tenant", Tokens::new(&[])).unwrap();
    let open = Open { prompt: 40, promised: 4 };
    let named = rig.cache.open_shared(&open, &empty, stream).unwrap().sequence;
    rig.step(&[row(named, 0, 40)]);
    rig.step(&[row(named, 40, 1)]);
    let call = |rig: &mut Rig| rig.cache.publish(named, 0, keyed);
    rig.refuses(&[named], call, Kind::OutOfRange, keys, &[("keys", 1), ("pages", 2)]);
    let place = "`from` is not the number of published tokens";
    let call = publish(16, &ids[16..]);
    let numbers = [("from", 16), ("published", 0)];
    rig.refuses(&[named], |rig| call(rig, named), Kind::OutOfRange, place, &numbers);
    // 44 tokens and 4 rows in flight.
    let call = publish(0, &ids[..49]);
    let numbers = [("ids", 49), ("most", 48)];
    rig.refuses(&[named], |rig| call(rig, named), Kind::OutOfRange, "token ids", &numbers);
    assert_eq!(publish(0, &ids[..40])(&mut rig, named).unwrap(), 32);
    let numbers = [("from", 0), ("published", 32)];
    let call = publish(0, &ids[..40]);
    rig.refuses(&[named], |rig| call(rig, named), Kind::OutOfRange, place, &numbers);
}

#[test]
fn names_of_another_tenant_or_of_another_cache_find_nothing() {
    let (mut rig, mut other) = (Rig::new(config()), Rig::new(config()));
    let ids: Vec<u32> = (0..40).collect();
    let open = Open { prompt: 41, promised: 4 };
    let names = |rig: &Rig, salt: &[u8]| rig.cache.names(salt, Tokens::new(&ids)).unwrap();
    for rig in [&mut rig, &mut other] {
        let own = names(rig, b"a");
        let sequence = rig.cache.open_shared(&open, &own, rig.stream).unwrap().sequence;
        rig.step(&[row(sequence, 0, 40)]);
        rig.step(&[row(sequence, 40, 1)]);
        assert_eq!(rig.cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 32);
        assert_eq!(rig.cache.find(&names(rig, b"a")), Found { tokens: 32, host_tokens: 0 });
        rig.cache.close(sequence, rig.stream).unwrap();
    }
    let foreign = [names(&rig, b"b"), names(&rig, b""), names(&other, b"a"), names(&other, b"b")];
    for foreign in foreign {
        assert_eq!(rig.cache.find(&foreign), Found::default());
        let before = rig.cache.stats();
        let opened = rig.cache.open_shared(&open, &foreign, rig.stream).unwrap();
        assert_eq!(opened.found, Found::default());
        // All of its pages are its own: those of 45 tokens and 4 rows in flight.
        assert_eq!(before.free_pages[0] - rig.cache.stats().free_pages[0], 4);
        rig.cache.close(opened.sequence, rig.stream).unwrap();
    }
    assert_eq!(rig.cache.find(&names(&rig, b"a")).tokens, 32);
}

#[test]
fn a_cache_with_sequences_does_not_shut_down_and_one_without_a_hosts_tier_saves_nothing() {
    let mut rig = Rig::new(Config { host_pages: Vec::new(), ..config() });
    let ids: Vec<u32> = (0..40).collect();
    let names = rig.cache.names(b"", Tokens::new(&ids)).unwrap();
    let open = Open { prompt: 40, promised: 4 };
    let sequence = rig.cache.open_shared(&open, &names, rig.stream).unwrap().sequence;
    rig.step(&[row(sequence, 0, 40)]);
    let step = rig.begin(0, &[row(sequence, 40, 1)]);
    let before = rig.seen(&[sequence]);
    let Rig { device, cache, stream, accepted } = rig;
    let (cache, error) = cache.shut_down().unwrap_err();
    let numbers: Numbers<'_> = &[("sequences", 1), ("steps", 1), ("withheld", 0)];
    assert_eq!((error.kind(), error.place()), (Kind::Busy, "sequences, steps or withheld pages are left"));
    assert_eq!(error.numbers(), numbers);
    let mut rig = Rig { device, cache: *cache, stream, accepted };
    assert_eq!(rig.seen(&[sequence]), before);
    rig.retire(step);
    rig.cache.publish(sequence, 0, Tokens::new(&ids)).unwrap();
    let before = rig.seen(&[sequence]);
    assert_eq!(rig.cache.save(rig.stream, u64::MAX).unwrap(), 0);
    assert_eq!(rig.seen(&[sequence]), before);
    rig.cache.close(sequence, rig.stream).unwrap();
    assert_eq!(rig.cache.shut_down().unwrap().sequences, 0);
}
