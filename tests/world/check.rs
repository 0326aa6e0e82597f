//! The checks after every operation: invariants, gauges and counters against the model, lengths, digests, and every
//! committed row and index key; and that a rejected call changed nothing.

use super::engine::{Found, StepDigest, key};
use super::model::{Seq, State};
use super::run::World;
use forebay::{Error, Kind, Layer, Length, SLOT_BLOCK, Sequence, Stats};
use std::collections::BTreeMap;
use std::io::Write;

/// The state that a refused call must not change.
#[derive(Debug, PartialEq, Eq)]
pub struct Snapshot {
    counters: [u64; 6],
    budgets: Vec<Vec<u32>>,
    sequences: Vec<(Sequence, u64, Length)>,
}

/// The outcomes of a run: equal on every device.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcomes {
    pub log: Vec<u64>,
    pub digests: Vec<StepDigest>,
    /// The number of times that a run reached each listed outcome.
    pub reached: BTreeMap<String, u64>,
}

impl Outcomes {
    /// Appends a sum over the outcomes of the run, if `FOREBAY_WORLD_DIGESTS` names a file: to compare two builds.
    fn record(&self) {
        let Some(path) = std::env::var_os("FOREBAY_WORLD_DIGESTS") else { return };
        let text = format!("{:?} {:?}", self.log, self.digests);
        let sum = text.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(format!("{sum:016x}\n").as_bytes()).unwrap();
    }
}

impl World {
    /// Counts an outcome that a run should reach.
    pub fn note(&mut self, what: &str) {
        *self.reached.entry(what.to_owned()).or_default() += 1;
    }

    /// Whether a sequence's tables and bytes are at rest.
    fn is_still(&self, seq: &Seq) -> bool {
        let host = self.tickets.last().is_none_or(|ticket| ticket.poll().is_some());
        seq.is_open() && (!self.asynchronous || seq.in_flight == 0 && seq.resizing.is_none() && host)
    }

    /// Whether reading the tables is not an operation that may be the one to fail.
    fn can_look(&self) -> bool {
        !(self.faulty && self.engine.device.is_remote())
    }

    fn digest(&self, s: &Seq) -> u64 {
        if self.can_look() { self.cache.digest(s.handle).unwrap() } else { 0 }
    }

    pub fn snapshot(&self) -> Snapshot {
        let s = self.cache.stats();
        let still = self.seqs.iter().filter(|s| self.is_still(s));
        // A lane that a sequence has not joined may still belong to its last sequence.
        let digest = |s: &Seq| if s.state == State::Filling { 0 } else { self.digest(s) };
        let of = |s: &Seq| (s.handle, digest(s), self.cache.length(s.handle).unwrap());
        let open = self.seqs.iter().filter(|s| s.is_open());
        Snapshot {
            counters: [s.steps, s.hits, s.misses, s.scratch, s.bytes_up, s.resizes],
            budgets: open.map(|s| self.cache.budgets(s.handle).unwrap().to_vec()).collect(),
            sequences: still.map(of).collect(),
        }
    }

    /// The value, if no refusal was expected; otherwise checks the refusal's kind and that nothing changed. Gauges are
    /// compared with the model's after every operation.
    pub fn expect<T>(
        &mut self,
        before: Snapshot,
        result: Result<T, Error>,
        refused: Option<Kind>,
    ) -> Option<T> {
        match (result, refused) {
            (Ok(value), None) => Some(value),
            (Err(error), refused) if refused != Some(error.kind()) && self.failed() => {
                let known = [Kind::DeviceFailed, Kind::OutOfRange].contains(&error.kind());
                assert!(known, "{error}");
                self.note("refused on a failed device");
                None
            }
            (Err(error), Some(kind)) => {
                assert_eq!(error.kind(), kind, "{error}");
                assert_eq!(self.snapshot(), before, "refused, and changed all the same: {error}");
                self.note(&format!("{} {kind:?}", error.operation()));
                None
            }
            (Ok(_), Some(kind)) => panic!("not refused as {kind:?}"),
            (Err(error), None) => panic!("refused: {error}"),
        }
    }

    /// Invariants, gauges, counters, lengths, digests, and every committed row of the total pool.
    pub fn check(&mut self) {
        let failed = self.failed();
        // A GPU's tables are read by copies, while it works on them.
        if !self.engine.device.is_remote() || !self.asynchronous && self.can_look() {
            self.cache.validate().unwrap();
        }
        self.check_stats();
        if failed {
            return;
        }
        self.log.push(self.cache.budgets_digest());
        for index in 0..self.seqs.len() {
            let s = &self.seqs[index];
            if !self.is_still(s) {
                continue;
            }
            if s.state != State::Filling && s.in_flight == 0 {
                let published = s.names.len() as u32 * self.page_tokens();
                let length = Length {
                    committed: s.length(),
                    landed: s.landed.len() as u32,
                    published,
                    filled: s.prompt,
                };
                assert_eq!(self.cache.length(s.handle).unwrap(), length);
                assert_eq!(self.cache.is_running(s.handle).unwrap(), s.state == State::Running);
                // Not all devices have run a resize that was not waited for.
                if s.resizing.is_none() {
                    self.log.push(self.digest(s));
                }
            }
            self.check_rows(s);
        }
        let found = self.engine.found.lock().unwrap();
        assert!(found.wrong.is_empty() || self.failed(), "{:?}", found.wrong);
    }

    fn check_rows(&self, s: &Seq) {
        for (layer, rows) in (0..).zip(&s.rows) {
            let mut row = vec![0; self.format(layer).row_bytes() as usize];
            for (position, origin) in (0..).zip(rows) {
                self.cache.read_row(s.handle, Layer(layer), position, &mut row).unwrap();
                assert!(row == self.row(layer, position, *origin), "row {position} of layer {layer}");
                if !self.selects(layer) {
                    continue;
                }
                let offset = self.key_offset(&s.key_pages, position);
                let found = self.engine.read_key(&self.cache, Layer(layer), offset);
                assert!(
                    found == key(self.format(layer), layer, position, *origin),
                    "index key of {position}"
                );
            }
        }
    }

    fn check_stats(&self) {
        let stats = self.cache.stats();
        let taken: Vec<&Seq> = self.seqs.iter().filter(|s| s.state != State::Gone).collect();
        let used: u64 = taken.iter().map(|s| self.slots(&s.blocks)).sum();
        let sequences = taken.len() as u32;
        let open = self.open.iter().flatten().count();
        let gauges = [
            (stats.sequences, sequences),
            (stats.steps_in_flight, (self.flights.len() + open) as u32),
            (stats.free_host_pages, self.config.host_pages - self.pages.taken()),
            (stats.free_index_pages, self.config.index_pages - self.pages.taken()),
            (stats.unused_pages, self.index.unused()),
            (stats.free_slots, SLOT_BLOCK * self.room_to_promise().into_iter().min().unwrap()),
            (stats.slots_in_use as u32, used as u32),
            (stats.free_lanes, self.config.lanes - sequences),
        ];
        assert!(gauges.iter().all(|(is, wanted)| is == wanted), "gauges (is, wanted): {gauges:?}");
        let c = self.counted;
        let counters = [stats.steps, stats.hits, stats.misses, stats.scratch, stats.bytes_up, stats.resizes];
        assert_eq!(counters, [c.steps, c.hits, c.misses, c.scratch, c.bytes_up, c.resizes]);
        for s in taken.iter().filter(|s| s.is_open()) {
            assert_eq!(self.cache.budgets(s.handle).unwrap(), s.budgets);
        }
        let sharing = |s: &Stats| [s.prompt_tokens, s.shared_tokens, s.published_pages, s.evicted_pages];
        assert_eq!(sharing(&stats), sharing(&c));
    }

    /// Closes and retires everything; every gauge is back at its start.
    pub fn end(mut self) -> Outcomes {
        self.close_all();
        self.forget();
        let stats = self.cache.stats();
        self.log.extend([stats.steps, stats.hits, stats.misses, stats.scratch]);
        self.engine.settle();
        let failed = self.failed();
        if self.can_look() {
            self.cache.validate().unwrap();
        }
        self.cache.shut_down().unwrap();
        let mut found = self.engine.found.lock().unwrap();
        let Found { wrong, digests } = &mut *found;
        assert!(wrong.is_empty() || failed, "{wrong:?}");
        digests.sort_unstable();
        let outcomes = Outcomes { log: self.log, digests: std::mem::take(digests), reached: self.reached };
        outcomes.record();
        outcomes
    }

    /// Finishes open steps, closes every sequence (so that some are closed in flight), retires the rest.
    pub fn close_all(&mut self) {
        (0..self.open.len()).for_each(|micro| self.finish(micro as u8));
        while let Some(seq) = self.pick(0) {
            self.close(seq);
        }
        while !self.flights.is_empty() {
            self.retire(0);
        }
        self.check();
    }

    /// With everything closed, every gauge except shared pages is at its start. Forgets the sequences.
    pub fn forget(&mut self) {
        let gauges = |s: Stats| {
            [
                s.sequences,
                s.steps_in_flight,
                s.free_host_pages + s.unused_pages,
                s.free_index_pages + s.unused_pages,
                s.free_slots,
                s.free_lanes,
            ]
        };
        assert_eq!(gauges(self.cache.stats()), gauges(self.start));
        assert_eq!(self.pages.taken(), self.index.unused());
        assert!(self.tickets.iter().all(|ticket| ticket.poll().is_some()), "a ticket never ended");
        self.tickets.clear();
        self.seqs.clear();
    }
}
