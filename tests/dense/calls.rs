//! Calls of a dense cache in any order, with any numbers: the half of the fuzz target `dense_ops` that no model guides.
//!
//! Numbers are small, or as large as possible, and handles may be closed ones. After each call the cache is valid, and
//! an error is one that a caller can cause. At the end everything is closed, and every page is free again.

use forebay::dense::{Cache, Config, Group, Open, Shape, Way};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::{
    Accepted, BatchRow, Error, Kind, Memory, MicroBatch, Result, Sequence, Step, Tokens, Withheld,
};

/// The bytes as numbers.
struct Numbers<'a>(std::slice::Iter<'a, u8>);

impl Numbers<'_> {
    fn byte(&mut self) -> u32 {
        self.0.next().copied().unwrap_or(0).into()
    }

    /// Mostly below `most`, sometimes anything.
    fn below(&mut self, most: u32) -> u32 {
        match self.byte() {
            wild @ 244.. => {
                [u32::MAX, u32::MAX - 1, 1 << 31, (1 << 31) - 1, 1 << 16, most][wild as usize % 6]
            }
            small => small % most,
        }
    }
}

struct Caller {
    cache: Cache,
    stream: Stream,
    sequences: Vec<Sequence>,
    steps: Vec<Step>,
    /// Aborts, those that were released too.
    withheld: Vec<Withheld>,
    /// Calls that were not refused.
    done: u32,
}

const IDS: [u32; 96] = [3; 96];

impl Caller {
    fn new(variant: u32) -> Caller {
        let group = |layers: &[u32], window| Group { layers: layers.to_vec(), runs: [16, 0], window };
        let groups = vec![group(&[0, 2], None), group(&[1], variant.is_multiple_of(2).then_some(20))];
        let base = Config::new(Shape { page_tokens: 16, groups }, 3, 90);
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { step_tokens: 40, query_rows: 2, micro_batches: 2, memory, ..base };
        let host_pages = if variant.is_multiple_of(3) { Vec::new() } else { vec![6, 6] };
        let config = Config { host_pages, bring_layers: variant % 3, ..config };
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream().unwrap();
        let cache = Cache::new(config, device).unwrap();
        Caller { cache, stream, sequences: Vec::new(), steps: Vec::new(), withheld: Vec::new(), done: 0 }
    }

    fn sequence(&self, numbers: &mut Numbers<'_>) -> Option<Sequence> {
        self.sequences.get(numbers.byte() as usize % self.sequences.len().max(1)).copied()
    }

    /// One call. Its sequence is one that was opened, though it may be closed.
    fn call(&mut self, numbers: &mut Numbers<'_>) -> Result<()> {
        let (kind, stream) = (numbers.byte() % 34, self.stream);
        let Some(sequence) = self.sequence(numbers).filter(|_| kind > 2) else {
            let open = Open { prompt: numbers.below(80), promised: numbers.below(30) };
            let names = self.cache.names(b"", Tokens::new(&IDS[..80]))?;
            let sequence = match kind {
                0 => self.cache.open(&open)?,
                _ => self.cache.open_shared(&open, &names, stream)?.sequence,
            };
            self.sequences.push(sequence);
            return Ok(());
        };
        if kind > 23 {
            return self.arrive(kind, sequence, numbers);
        }
        match kind {
            3 => self.cache.extend(sequence, numbers.below(90), numbers.below(20)),
            4 => {
                let (child, _) = self.cache.fork(sequence, numbers.below(30), stream)?;
                self.sequences.push(child);
                Ok(())
            }
            5 => self.cache.truncate(sequence, numbers.below(90), stream).map(drop),
            6 => self.cache.park(sequence, numbers.below(3), stream).map(drop),
            7 => self.cache.resume(sequence, stream).map(drop),
            8 | 9 => {
                let length = self.cache.length(sequence)?;
                let from = if numbers.byte() < 200 { length.published } else { numbers.below(90) };
                let ids = &IDS[..(numbers.byte() as usize).min(96)];
                self.cache.publish(sequence, from, Tokens::new(ids)).map(drop)
            }
            10 => self.cache.save(stream, u64::from(numbers.below(255)) << 8).map(drop),
            11 => self.cache.close(sequence, stream),
            12 => self.cache.pages(sequence, numbers.below(3) as usize).map(drop),
            13 => self.cache.reap(stream).map(drop),
            14..=17 => self.prepare(sequence, numbers),
            18 => self.cache.abandon(self.steps.last_mut().ok_or_else(none)?),
            19 => self.cache.arrived(self.steps.last().ok_or_else(none)?, numbers.below(4), stream),
            20 => self.cache.finish(self.steps.last_mut().ok_or_else(none)?, stream),
            _ => self.retire(numbers.byte() as usize),
        }
    }

    /// A call of an arrival.
    fn arrive(&mut self, kind: u32, sequence: Sequence, numbers: &mut Numbers<'_>) -> Result<()> {
        let stream = self.stream;
        match kind {
            24 | 25 => {
                let open = Open { prompt: numbers.below(80), promised: numbers.below(30) };
                let names = self.cache.names(b"", Tokens::new(&IDS[..80]))?;
                let way = if numbers.byte() < 128 { Way::Direct } else { Way::Host };
                let arrived = match kind {
                    24 => self.cache.arrive(&open, way, stream)?.0,
                    _ => self.cache.arrive_shared(&open, &names, way, stream)?.sequence,
                };
                self.sequences.push(arrived);
                // Mostly it is whole at once.
                let rows = open.prompt - self.cache.length(arrived)?.filled;
                let whole = (0..3).filter(|_| numbers.byte() < 220);
                whole.into_iter().try_for_each(|layer| self.cache.append_layer_in_place(arrived, layer, rows))
            }
            26 => {
                let (layer, count) = (numbers.below(4), numbers.below(40));
                self.cache.append_layer_in_place(sequence, layer, count)
            }
            27 => {
                let of = (numbers.below(4), numbers.below(3) as usize);
                let bytes = [7; 256];
                let bytes = &bytes[..numbers.byte() as usize];
                self.cache.store(sequence, of, numbers.below(6), numbers.below(256).into(), bytes)
            }
            28 => self.cache.bring_layer(sequence, numbers.below(4), stream),
            29 | 30 => self.cache.join(sequence, stream).map(drop),
            31 => {
                self.withheld.push(self.cache.abort(sequence, stream)?);
                Ok(())
            }
            32 => self.cache.host_pages(sequence, numbers.below(3) as usize).map(drop),
            _ => {
                let which = numbers.byte() as usize % self.withheld.len().max(1);
                let withheld = self.withheld.get(which).copied().ok_or_else(none)?;
                self.cache.release(withheld).map(drop)
            }
        }
    }

    fn prepare(&mut self, sequence: Sequence, numbers: &mut Numbers<'_>) -> Result<()> {
        let landed = self.cache.length(sequence)?.landed;
        let accepted = if numbers.byte() < 200 { landed } else { numbers.below(4) };
        let row = |sequence, accepted, query_rows| {
            // Without a tensor this is refused.
            let by_device = accepted == u32::MAX - 1;
            let accepted = if by_device { Accepted::OnDevice } else { Accepted::Rows(accepted) };
            BatchRow { sequence, accepted, query_rows }
        };
        let mut rows = vec![row(sequence, accepted, numbers.below(24))];
        if let Some(other) = self.sequence(numbers).filter(|_| numbers.byte() < 128) {
            rows.push(row(other, numbers.below(3), numbers.below(4)));
        }
        let micro = MicroBatch(if numbers.byte() < 230 { 0 } else { numbers.below(3) });
        let mut step = self.cache.prepare(micro, &rows, None, self.stream)?;
        if numbers.byte() < 200 {
            (0..3).try_for_each(|layer| self.cache.arrived(&step, layer, self.stream))?;
            self.cache.finish(&mut step, self.stream)?;
        }
        self.steps.push(step);
        Ok(())
    }

    fn retire(&mut self, which: usize) -> Result<()> {
        if self.steps.is_empty() {
            return Err(none());
        }
        let step = self.steps.remove(which % self.steps.len());
        match self.cache.retire(step, self.stream) {
            Ok(_) => Ok(()),
            Err(unretired) => {
                self.steps.extend(unretired.step);
                Err(unretired.error)
            }
        }
    }

    /// Ends what is open.
    fn end(&mut self) {
        for step in &mut self.steps {
            if self.cache.abandon(step).is_ok() {
                self.cache.finish(step, self.stream).unwrap();
            }
        }
        let mut which = 0;
        while !self.steps.is_empty() {
            // In their order, which is not known here: a step that is refused comes later.
            drop(self.retire(which));
            which += 1;
        }
        for sequence in std::mem::take(&mut self.sequences) {
            if self.cache.length(sequence).is_ok() {
                self.cache.close(sequence, self.stream).unwrap();
            }
        }
        for withheld in std::mem::take(&mut self.withheld) {
            // It may have been released before.
            drop(self.cache.release(withheld));
        }
        assert_eq!(self.cache.reap(self.stream).unwrap(), 0);
        self.cache.validate().unwrap();
    }
}

fn none() -> Error {
    Error::new(Kind::InvalidState, "test").at("there is no step")
}

/// Any bytes are calls. Returns how many were not refused.
pub fn dense_calls(bytes: &[u8]) -> u32 {
    let mut numbers = Numbers(bytes.iter());
    let mut caller = Caller::new(numbers.byte());
    let free = caller.cache.stats().free_pages;
    while numbers.0.len() > 0 {
        match caller.call(&mut numbers) {
            Ok(()) => caller.done += 1,
            Err(error) => {
                let no_callers = [Kind::Internal, Kind::DeviceFailed, Kind::OutOfMemory];
                assert!(!no_callers.contains(&error.kind()), "{error}");
            }
        }
        caller.cache.validate().unwrap();
    }
    caller.end();
    let stats = caller.cache.stats();
    assert_eq!((stats.sequences, stats.steps_in_flight, stats.free_pages), (0, 0, free));
    caller.done
}
