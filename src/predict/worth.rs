//! Whether offload pays: what a GPU yields with all rows on the device, and with more sequences at less than that.
//!
//! Up to [`Planned::resident_batch`] sequences nothing needs to be offloaded; what they yield is what offload has
//! to beat. Beyond, each batch is planned at the largest ratio that fits and simulated there. The curve is searched,
//! not solved: throughput by batch has steps, because captured widths and blocks have.

use std::collections::BTreeMap;

use super::plan::{Batch, Demand, Note, Planned, Ratio, plan};
use super::simulate::{Options, Outcome, Point, Simulator};
use crate::error::{Error, Kind, Result};

/// Batches tried before the search narrows.
const COARSE: u32 = 32;

/// A plan and what it yields.
#[derive(Clone, Debug)]
pub struct Priced {
    /// The plan.
    pub planned: Planned,
    /// Its step.
    pub outcome: Outcome,
    /// Tokens a second, of a node of 8 GPUs, of the most sequences with all rows on the device; none where not
    /// even one fits so, or what they yield is not known.
    pub without: Option<f64>,
}

/// What offload is worth on one GPU, for one context and number of query rows.
#[derive(Clone, Debug)]
pub struct Worth {
    /// The most sequences with all rows on the device; none where not even one fits so.
    pub without: Option<Priced>,
    /// With offload: by ascending batch those that were tried.
    pub with: Vec<Priced>,
    /// The batch with offload that yields most.
    pub best: Option<u32>,
    /// The smallest batch that with offload yields more than [`Worth::without`].
    pub pays_from: Option<u32>,
}

impl Worth {
    /// The best one, with offload or without.
    pub fn most(&self) -> Option<&Priced> {
        let best = self.with.iter().find(|priced| Some(priced.planned.batch) == self.best);
        best.filter(|best| yields(best) > self.floor()).or(self.without.as_ref())
    }

    /// Tokens a second of a node of 8 GPUs that need no offload; 0 where not even one sequence fits so.
    pub fn floor(&self) -> f64 {
        self.without.as_ref().map_or(0.0, yields)
    }
}

fn yields(priced: &Priced) -> f64 {
    priced.outcome.throughput
}

/// Plans and simulates what is asked. A plan that offloads and yields no more than the most sequences with all
/// rows on the device is told so, by [`Note::Slower`].
///
/// # Errors
/// Those of [`plan`] and of [`Simulator::run`].
pub fn price(demand: &Demand, accept: f64, options: &Options, simulator: &mut Simulator) -> Result<Priced> {
    let mut priced = run(plan(demand)?, demand, accept, options, simulator)?;
    if priced.planned.resident_batch > 0 {
        priced.without = match at(demand, priced.planned.resident_batch, accept, options, simulator) {
            Ok(without) => Some(yields(&without)),
            Err(error) if is_unknown(&error) => None,
            Err(error) => return Err(error),
        };
    }
    priced.judge();
    Ok(priced)
}

impl Priced {
    /// Says so where offload does not pay.
    fn judge(&mut self) {
        if self.planned.offloads() && self.without.is_some_and(|without| self.outcome.throughput <= without) {
            self.planned.notes.push(Note::Slower);
        }
    }
}

fn run(
    planned: Planned,
    demand: &Demand,
    accept: f64,
    options: &Options,
    simulator: &mut Simulator,
) -> Result<Priced> {
    let (context, mtp) = (demand.context, demand.query_rows);
    let point = Point { context, batch: planned.batch, mtp, accept, ratio: planned.ratio };
    let outcome = simulator.run(&point, options)?;
    Ok(Priced { planned, outcome, without: None })
}

/// So many sequences, at the largest ratio that fits.
fn at(
    demand: &Demand,
    batch: u32,
    accept: f64,
    options: &Options,
    simulator: &mut Simulator,
) -> Result<Priced> {
    let demand = Demand { batch: Batch::Sequences(batch), ratio: Ratio::Auto, ..demand.clone() };
    run(plan(&demand)?, &demand, accept, options, simulator)
}

/// Finds what offload is worth: the best batch, and the smallest one from which it pays. Batch and ratio of
/// `demand` are not looked at.
///
/// # Errors
/// Those of [`price`]. Beyond the ratios that misses are known for, and the batches that costs are known for,
/// nothing is tried; where that leaves nothing at all, the error that says so ([`is_unknown`]).
pub fn worth(demand: &Demand, accept: f64, options: &Options, simulator: &mut Simulator) -> Result<Worth> {
    let frame = plan(&Demand { batch: Batch::Most, ratio: Ratio::Auto, ..demand.clone() })?;
    let (resident, most) = (frame.resident_batch, frame.most_batch);
    let mut without = match resident {
        0 => None,
        batch => {
            let mut priced = at(demand, batch, accept, options, simulator)?;
            priced.without = Some(yields(&priced));
            Some(priced)
        }
    };
    let floor = without.as_ref().map(yields);
    let mut tried = Tried { demand, accept, options, simulator, known: BTreeMap::new(), most, end: None };
    let stride = (most - resident).div_ceil(COARSE).max(1);
    let coarse = (resident + 1..=most).step_by(stride as usize).chain((most > resident).then_some(most));
    for batch in coarse {
        tried.at(batch)?;
    }
    if let Some(best) = tried.best() {
        for batch in best.saturating_sub(stride).max(resident + 1)..=(best + stride).min(most) {
            tried.at(batch)?;
        }
    }
    if let Some(first) = tried.first_above(floor.unwrap_or(0.0)) {
        for batch in first.saturating_sub(stride).max(resident + 1)..first {
            tried.at(batch)?;
        }
    }
    let end = tried.end.take();
    if let (Some(error), None, true) = (&end, &without, tried.known.is_empty()) {
        return Err(error.clone());
    }
    let (best, pays_from) = (tried.best(), tried.first_above(floor.unwrap_or(0.0)));
    let mut with: Vec<Priced> = tried.known.into_values().collect();
    with.iter_mut().for_each(|priced| {
        priced.without = floor;
        priced.judge();
        priced.planned.notes.extend(end.is_some().then_some(Note::Unknown));
    });
    if let Some(without) = without.as_mut().filter(|_| end.is_some() && with.is_empty()) {
        without.planned.notes.push(Note::Unknown);
    }
    let never = pays_from.is_none() && !with.is_empty();
    if let Some(without) = without.as_mut().filter(|_| never) {
        without.planned.notes.push(Note::Slower);
    }
    Ok(Worth { without, best, pays_from, with })
}

/// Batches beyond those that fit whole.
struct Tried<'a> {
    demand: &'a Demand,
    accept: f64,
    options: &'a Options,
    simulator: &'a mut Simulator,
    known: BTreeMap<u32, Priced>,
    /// Beyond it costs or misses are not known, or nothing fits.
    most: u32,
    /// What is not known there.
    end: Option<Error>,
}

impl Tried<'_> {
    fn at(&mut self, batch: u32) -> Result<()> {
        if self.known.contains_key(&batch) || batch > self.most {
            return Ok(());
        }
        match at(self.demand, batch, self.accept, self.options, self.simulator) {
            Ok(priced) => {
                self.known.insert(batch, priced);
                Ok(())
            }
            Err(error) if is_unknown(&error) => {
                self.most = batch - 1;
                self.end = Some(error);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn best(&self) -> Option<u32> {
        let by_yield = |a: &(&u32, &Priced), b: &(&u32, &Priced)| yields(a.1).total_cmp(&yields(b.1));
        self.known.iter().max_by(by_yield).map(|(batch, _)| *batch)
    }

    fn first_above(&self, floor: f64) -> Option<u32> {
        self.known.iter().find(|(_, priced)| yields(priced) > floor).map(|(batch, _)| *batch)
    }
}

/// Whether an error of [`price`] or [`worth`] says that costs or misses are not known at that batch, ratio or
/// context, so that the plan stands and only its time is not known.
pub fn is_unknown(error: &Error) -> bool {
    error.kind() == Kind::OutOfRange
}
