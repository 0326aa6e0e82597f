//! Decides whether offload pays: compares a GPU's yield with all rows on the device to that of more sequences with
//! fewer resident rows.
//!
//! Up to [`Planned::resident_batch`] sequences offload is not needed; their yield is the baseline that offload has
//! to beat. Beyond, each batch is planned at the largest ratio that fits, and simulated. The best batch is searched,
//! not solved for: throughput by batch has steps, because captured widths and blocks have.
//!
//! If a sequence has to decode at some rate ([`Aim::least_otps`]), slower batches are excluded, with
//! offload or without. The baseline is then the largest batch without offload that is fast enough.

use std::collections::BTreeMap;

use super::plan::{Batch, Demand, Note, Planned, Ratio, plan};
use super::simulate::{Options, Outcome, Point, Simulator};
use crate::error::{Error, Kind, Result};

/// Batches tried before the search narrows.
const COARSE: u32 = 32;

/// The tokens that a step yields for each sequence, and the required rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aim {
    /// Tokens that a step yields for each sequence, from 1 to the query rows.
    pub accept: f64,
    /// The fewest tokens a second that each sequence has to decode; 0 for any.
    pub least_otps: f64,
}

impl From<f64> for Aim {
    fn from(accept: f64) -> Aim {
        Aim { accept, least_otps: 0.0 }
    }
}

/// The yield of the most sequences with all rows on the device: the baseline that offload has to beat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baseline {
    /// Sequences.
    pub batch: u32,
    /// Milliseconds of a step.
    pub step_ms: f64,
    /// Tokens a second of one sequence.
    pub otps: f64,
    /// Tokens a second of a node of 8 GPUs.
    pub throughput: f64,
}

impl Baseline {
    const fn of(outcome: &Outcome) -> Baseline {
        let Outcome { step_ms, otps, throughput, .. } = *outcome;
        Baseline { batch: outcome.point.batch, step_ms, otps, throughput }
    }
}

/// A plan and its yield.
#[derive(Clone, Debug)]
pub struct Priced {
    /// The plan.
    pub planned: Planned,
    /// Its step.
    pub outcome: Outcome,
    /// The yield of the most sequences with all rows on the device that are fast enough; none if not
    /// even one fits or is fast enough, or if the yield is unknown.
    pub without: Option<Baseline>,
}

/// The value of offload on one GPU, for one context and number of query rows.
#[derive(Clone, Debug)]
pub struct Worth {
    /// The most sequences with all rows on the device that are fast enough; none if not even one fits,
    /// or is fast enough.
    pub without: Option<Priced>,
    /// The tried batches with offload, ascending.
    pub with: Vec<Priced>,
    /// The batch with offload that yields most, among those that are fast enough.
    pub best: Option<u32>,
    /// The smallest batch that with offload yields more than [`Worth::without`], and is fast enough.
    pub pays_from: Option<u32>,
    /// Whether batches with offload yield more than [`Worth::without`], but none of them is fast enough.
    pub more_too_slow: bool,
    /// Tokens a second of a single sequence, if no batch is fast enough.
    pub alone: Option<f64>,
}

impl Worth {
    /// The best one, with offload or without.
    pub fn most(&self) -> Option<&Priced> {
        let best = self.with.iter().find(|priced| Some(priced.planned.batch) == self.best);
        best.filter(|best| yields(best) > self.floor()).or(self.without.as_ref())
    }

    /// Tokens a second of a node of 8 GPUs without offload; 0 if not even one sequence fits.
    pub fn floor(&self) -> f64 {
        self.without.as_ref().map_or(0.0, yields)
    }
}

fn yields(priced: &Priced) -> f64 {
    priced.outcome.throughput
}

/// Makes and simulates a plan. [`Note::Slower`] marks a plan that offloads and yields no more than the most sequences
/// with all rows on the device; [`Note::TooSlow`] marks one that is not fast enough.
///
/// # Errors
/// Errors of [`plan`] and of [`Simulator::run`].
pub fn price(
    demand: &Demand,
    aim: impl Into<Aim>,
    options: &Options,
    simulator: &mut Simulator,
) -> Result<Priced> {
    let mut ask = Ask { demand, aim: aim.into(), options, simulator };
    let mut priced = ask.run(plan(demand)?)?;
    priced.without = match ask.baseline(priced.planned.resident_batch) {
        Ok(without) => without.map(|without| Baseline::of(&without.outcome)),
        Err(error) if is_unknown(&error) => None,
        Err(error) => return Err(error),
    };
    priced.judge(ask.aim);
    Ok(priced)
}

impl Priced {
    /// Adds notes if offload does not pay, and if a sequence decodes too slowly.
    fn judge(&mut self, aim: Aim) {
        let floor = self.without.map_or(0.0, |without| without.throughput);
        if self.planned.offloads() && self.without.is_some() && self.outcome.throughput <= floor {
            self.planned.notes.push(Note::Slower);
        }
        if self.outcome.otps < aim.least_otps {
            self.planned.notes.push(Note::TooSlow);
        }
    }
}

/// The demand, and the simulator.
struct Ask<'a> {
    demand: &'a Demand,
    aim: Aim,
    options: &'a Options,
    simulator: &'a mut Simulator,
}

impl Ask<'_> {
    fn run(&mut self, planned: Planned) -> Result<Priced> {
        let Demand { context, query_rows: mtp, .. } = *self.demand;
        let Aim { accept, .. } = self.aim;
        let point = Point { context, batch: planned.batch, mtp, accept, ratio: planned.ratio };
        let outcome = self.simulator.run(&point, self.options)?;
        Ok(Priced { planned, outcome, without: None })
    }

    /// A plan for this many sequences, at the largest ratio that fits.
    fn at(&mut self, batch: u32) -> Result<Priced> {
        let demand = Demand { batch: Batch::Sequences(batch), ratio: Ratio::Auto, ..self.demand.clone() };
        self.run(plan(&demand)?)
    }

    fn fast_enough(&self, priced: &Priced) -> bool {
        priced.outcome.otps >= self.aim.least_otps
    }

    /// The most of `resident` sequences, all with their rows on the device, that are fast enough.
    fn baseline(&mut self, resident: u32) -> Result<Option<Priced>> {
        if resident == 0 {
            return Ok(None);
        }
        let all = self.at(resident)?;
        if self.fast_enough(&all) {
            return Ok(Some(all));
        }
        // More sequences make a longer step.
        let (mut found, mut beyond) = (None, resident);
        let mut most = 0;
        while beyond - most > 1 {
            let middle = most + (beyond - most) / 2;
            let priced = self.at(middle)?;
            if self.fast_enough(&priced) {
                (found, most) = (Some(priced), middle);
            } else {
                beyond = middle;
            }
        }
        Ok(found)
    }
}

/// Finds the value of offload: the best batch, and the smallest one from which it pays. Batch and ratio of
/// `demand` are ignored.
///
/// # Errors
/// Errors of [`price`]. Ratios with unknown misses and batches with unknown costs are not tried; if nothing
/// remains, the error says so ([`is_unknown`]).
pub fn worth(
    demand: &Demand,
    aim: impl Into<Aim>,
    options: &Options,
    simulator: &mut Simulator,
) -> Result<Worth> {
    let frame = plan(&Demand { batch: Batch::Most, ratio: Ratio::Auto, ..demand.clone() })?;
    let (resident, most) = (frame.resident_batch, frame.most_batch);
    let mut ask = Ask { demand, aim: aim.into(), options, simulator };
    let mut without = ask.baseline(resident)?;
    let floor = without.as_ref().map(|without| Baseline::of(&without.outcome));
    let beat = floor.map_or(0.0, |floor| floor.throughput);
    let mut tried = Tried { ask, known: BTreeMap::new(), most, end: None };
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
    if let Some(first) = tried.first_above(beat) {
        for batch in first.saturating_sub(stride).max(resident + 1)..first {
            tried.at(batch)?;
        }
    }
    let end = tried.end.take();
    if let (Some(error), None, true) = (&end, &without, tried.known.is_empty()) {
        return Err(error.clone());
    }
    let (best, pays_from) = (tried.best(), tried.first_above(beat));
    let more_too_slow = pays_from.is_none() && tried.known.values().any(|priced| yields(priced) > beat);
    let alone = match (&without, best) {
        (None, None) => Some(tried.ask.at(1)?.outcome.otps),
        _ => None,
    };
    let aim = tried.ask.aim;
    let mut with: Vec<Priced> = tried.known.into_values().collect();
    with.iter_mut().for_each(|priced| {
        priced.without = floor;
        priced.judge(aim);
        priced.planned.notes.extend(end.is_some().then_some(Note::Untried));
    });
    let never = pays_from.is_none() && !more_too_slow && !with.is_empty();
    if let Some(without) = &mut without {
        without.without = floor;
        let notes = &mut without.planned.notes;
        notes.extend((end.is_some() && with.is_empty()).then_some(Note::Untried));
        notes.extend(never.then_some(Note::Slower));
        notes.extend(more_too_slow.then_some(Note::MoreTooSlow));
    }
    Ok(Worth { without, best, pays_from, with, more_too_slow, alone })
}

/// Batches beyond those whose rows all fit.
struct Tried<'a> {
    ask: Ask<'a>,
    known: BTreeMap<u32, Priced>,
    /// The limit beyond which costs or misses are unknown, or nothing fits.
    most: u32,
    /// The error that says what is unknown there.
    end: Option<Error>,
}

impl Tried<'_> {
    fn at(&mut self, batch: u32) -> Result<()> {
        if self.known.contains_key(&batch) || batch > self.most {
            return Ok(());
        }
        match self.ask.at(batch) {
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

    /// Those that are fast enough.
    fn fast(&self) -> impl Iterator<Item = (&u32, &Priced)> {
        self.known.iter().filter(|(_, priced)| self.ask.fast_enough(priced))
    }

    fn best(&self) -> Option<u32> {
        self.fast().max_by(|a, b| yields(a.1).total_cmp(&yields(b.1))).map(|(batch, _)| *batch)
    }

    fn first_above(&self, floor: f64) -> Option<u32> {
        self.fast().find(|(_, priced)| yields(priced) > floor).map(|(batch, _)| *batch)
    }
}

/// Whether an error of [`price`] or [`worth`] says that costs or misses are unknown at that batch, ratio or
/// context, so that the plan is valid and only its time is unknown.
pub fn is_unknown(error: &Error) -> bool {
    error.kind() == Kind::OutOfRange
}
