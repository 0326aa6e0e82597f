//! The engine of the simulator: callbacks that enqueue works at a setup's costs.

use super::batch::Batch;
use crate::device::clock::{ClockDevice, Demand, Label};
use crate::device::{Device, Event, Stream};
use crate::error::{Error, Kind, Result};
use crate::overlap::{Attended, Engine, EngineCall, Work};
use crate::predict::cost::Load;
use crate::predict::setup::{Setup, Term};

/// The key of a price: the term, batch rows, query rows, width.
type Asked = (Term, u32, u32, u32);

/// Charges the setup's costs.
pub struct Costed<'a> {
    clock: &'a ClockDevice,
    setup: &'a Setup,
    batch: &'a Batch,
    /// By layer, the rows that a request misses, and the fraction of them that one query row reads.
    misses: &'a [f64],
    share: f64,
    /// By micro-batch, the events that end its layers, and how many have ended.
    ends: &'a [Vec<Event>],
    ended: [usize; 2],
    /// Prices computed so far: only a few, because layers are alike.
    known: Vec<(Asked, f64)>,
    /// Microseconds of all works together.
    pub busy_us: f64,
}

impl<'a> Costed<'a> {
    pub fn new(
        clock: &'a ClockDevice,
        setup: &'a Setup,
        batch: &'a Batch,
        misses: &'a [f64],
        share: f64,
        ends: &'a [Vec<Event>],
    ) -> Costed<'a> {
        Costed { clock, setup, batch, misses, share, ends, ended: [0; 2], known: Vec::new(), busy_us: 0.0 }
    }

    fn us(&mut self, term: Term, call: &EngineCall, width: f64) -> Result<f64> {
        let asked = (term, call.count, call.rows.count, width as u32);
        if let Some((_, us)) = self.known.iter().find(|(known, _)| *known == asked) {
            return Ok(*us);
        }
        let load = Load {
            rows: call.count.into(),
            query_rows: call.rows.count.into(),
            context: self.batch.context.into(),
            width,
        };
        let us = self.setup.us(term, &load)?;
        self.known.push((asked, us));
        Ok(us)
    }

    /// The width for which a call of attention is captured.
    fn width(&self, call: &EngineCall, keys: Attended) -> f64 {
        let k = self.setup.shape().top_k;
        // Draft passes have one query row, and their misses are given for one.
        let share = if call.rows.count == self.batch.query_rows { self.share } else { 1.0 };
        let misses = self.misses.get(call.layer.index()).map_or(0.0, |rows| rows * share);
        let (resident, fetched) = self.setup.file().captured.widths(k, misses);
        match keys {
            Attended::All => f64::from(k),
            Attended::Resident => resident,
            Attended::Fetched { .. } => fetched,
        }
    }

    fn charge(
        &mut self,
        call: &EngineCall,
        stream: Stream,
        name: &'static str,
        us: f64,
        sm: f64,
    ) -> Result<()> {
        let label = Label { name, layer: Some(call.layer), micro_batch: Some(call.micro_batch) };
        self.busy_us += us;
        self.clock.compute(stream, label, Demand { ns: us * 1e3, sm })
    }
}

/// Microseconds of one layer's works for a micro-batch, in the order none.
pub fn layer_us(setup: &Setup, batch: &Batch, rows: u32) -> Result<f64> {
    let load = Load {
        rows: rows.into(),
        query_rows: batch.query_rows.into(),
        context: batch.context.into(),
        width: setup.shape().top_k.into(),
    };
    let terms = [Term::Project, Term::Index, Term::Prepare, Term::Attend, Term::Rest];
    terms.into_iter().map(|term| setup.us(term, &load)).sum()
}

impl Engine for Costed<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let all = f64::from(self.setup.shape().top_k);
        let (term, name, width) = match call.work {
            Work::Project => (Term::Project, "project", all),
            Work::Index => (Term::Index, "index", all),
            Work::Prepare => (Term::Prepare, "prepare", all),
            Work::Attend(keys) => {
                let name = match keys {
                    Attended::All => "attend",
                    Attended::Resident => "attend resident",
                    Attended::Fetched { .. } => "attend fetched",
                };
                (Term::Attend, name, self.width(call, keys))
            }
            Work::Merge => (Term::Merge, "merge", all),
            Work::Rest => (Term::Rest, "rest", all),
        };
        let us = self.us(term, call, width)?;
        self.charge(call, stream, name, us, 1.0)?;
        if call.work != Work::Rest {
            return Ok(());
        }
        if self.batch.exchanges() {
            let us = self.us(Term::Exchange, call, all)?;
            self.charge(call, stream, "exchange", us, 0.0)?;
        }
        let place = call.micro_batch.index();
        let ended = self.ended.get_mut(place).ok_or_else(|| lost(place))?;
        let end = self.ends.get(place).and_then(|ends| ends.get(*ended)).ok_or_else(|| lost(place))?;
        *ended += 1;
        self.clock.record(*end, stream)
    }
}

fn lost(micro_batch: usize) -> Error {
    Error::new(Kind::Internal, "simulate")
        .at("more layers than were planned")
        .with("micro_batch", micro_batch as u64)
}
