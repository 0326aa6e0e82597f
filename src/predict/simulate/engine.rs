//! The engine of the simulator: callbacks that enqueue works at a setup's costs.
//!
//! With a ring, the rest of a layer is two works: the output projection, behind which the use of the layer's attention
//! weights ends, and all else.

use super::batch::Batch;
use super::sharded::OnClock;
use crate::device::clock::{ClockDevice, Demand, Label};
use crate::device::{Device, Event, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::overlap::{Attended, Engine, EngineCall, Work};
use crate::predict::cost::Load;
use crate::predict::setup::{Setup, Term};
use crate::weights::Ring;

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
    /// By layer, how many times longer its works take; nothing beyond its end.
    slower: &'a [f64],
    /// What the hooks call, if weights are pulled.
    ring: Option<&'a mut Ring<OnClock>>,
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
        Costed {
            clock,
            setup,
            batch,
            misses,
            share,
            ends,
            ended: [0; 2],
            known: Vec::new(),
            slower: &[],
            ring: None,
            busy_us: 0.0,
        }
    }

    /// The same, with works so many times longer by layer, and the hooks of a ring.
    pub fn beside(mut self, slower: &'a [f64], ring: Option<&'a mut Ring<OnClock>>) -> Costed<'a> {
        (self.slower, self.ring) = (slower, ring);
        self
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
        let us = us * self.slower.get(call.layer.index()).copied().unwrap_or(1.0);
        self.busy_us += us;
        self.clock.compute(stream, label, Demand { ns: us * 1e3, sm })
    }
}

/// The part of [`Term::Rest`] up to the end of the output projection.
fn output_share(setup: &Setup, call: &EngineCall) -> f64 {
    setup.roofline().output_share(f64::from(call.count) * f64::from(call.rows.count))
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
        let mut us = self.us(term, call, width)?;
        if call.work == Work::Rest && self.ring.is_some() {
            us *= 1.0 - output_share(self.setup, call);
        }
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

    fn enter(&mut self, layer: Layer, micro_batch: MicroBatch, stream: Stream) -> Result<()> {
        match &mut self.ring {
            Some(ring) => ring.enter(layer.index(), micro_batch.index(), stream),
            None => Ok(()),
        }
    }

    fn enqueue_output(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        if self.ring.is_none() {
            return Ok(());
        }
        let us = self.us(Term::Rest, call, f64::from(self.setup.shape().top_k))?;
        self.charge(call, stream, "output", us * output_share(self.setup, call), 1.0)
    }

    fn leave(&mut self, layer: Layer, micro_batch: MicroBatch, stream: Stream) -> Result<()> {
        match &mut self.ring {
            Some(ring) => ring.leave(layer.index(), micro_batch.index(), stream),
            None => Ok(()),
        }
    }
}

fn lost(micro_batch: usize) -> Error {
    Error::new(Kind::Internal, "simulate")
        .at("more layers than were planned")
        .with("micro_batch", micro_batch as u64)
}
