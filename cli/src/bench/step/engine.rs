//! The stand-in for an engine: rounds of matrix products on the compute stream, for as long as a setup says that each
//! work of a layer takes.
//!
//! The time of a round is measured in the same run, and a check confirms that times are proportional to rounds
//! ([`Line`]). The lengths are those of the setup, all scaled by one factor, so that a step has the requested length
//! and the works keep their proportions. A short work is not a whole number of rounds: its layers alternate between
//! one more and one less, so that the total over all layers is right. Every work with any time in the setup is at
//! least one round, since an engine's shortest call is a launch, too; the setup's merge has no time. The memory
//! accesses of a work are not imitated, except for top-k's result: [`Work::Index`] copies the selection prepared for
//! the layer to the place where a top-k writes it.

use std::sync::Arc;

use forebay::device::{Slice, Stream};
use forebay::measure::Probe;
use forebay::overlap::{Attended, Engine, EngineCall, Work};
use forebay::predict::cost::Load;
use forebay::predict::setup::{Setup, Term};
use forebay::residency::QueryRange;
use forebay::{Error, Kind, Layer, MicroBatch, Result};

use super::point::Point;
use super::selections::{PATTERNS, Picks};
#[cfg(doc)]
use crate::bench::asked::Asked;

/// The time of rounds: a fixed time, and a time for each round, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// The fixed time.
    pub fixed_us: f64,
    /// The time of each round.
    pub round_us: f64,
    /// The largest deviation of a measured time from the line, as a share of that time.
    pub off: f64,
}

/// More rounds than any work has.
const ROUNDS_MAX: f64 = 1e6;
/// More rounds than a short work has.
const ROUNDS_TRIED: u32 = 1 << 16;

impl Line {
    /// The least-squares line through times in microseconds by rounds, the longest last. It minimises squares of
    /// relative errors, so that a work of microseconds is as exact as one of milliseconds. If times do not grow with
    /// the rounds, as on a busy machine, it is the line through the last time, with its deviation.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`] if the products take no time.
    pub fn through(points: &[(u32, f64)]) -> Result<Line> {
        let weighed = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            points.iter().map(|(rounds, us)| of(f64::from(*rounds), *us) / us.max(1e-3).powi(2)).sum()
        };
        let all = weighed(&|_, _| 1.0);
        let (x, y) = (weighed(&|x, _| x) / all, weighed(&|_, y| y) / all);
        let sum = |of: &dyn Fn(f64, f64) -> f64| weighed(&|rounds, us| of(rounds - x, us - y));
        let slope = sum(&|x, y| x * y) / sum(&|x, _| x * x);
        let line = match points.last() {
            _ if slope.is_finite() && slope > 0.0 => {
                Line { fixed_us: y - slope * x, round_us: slope, off: 0.0 }
            }
            Some((rounds, us)) if *us > 0.0 && *rounds > 0 => {
                Line { fixed_us: 0.0, round_us: us / f64::from(*rounds), off: 0.0 }
            }
            _ => return Err(Error::new(Kind::DeviceFailed, "bench step").at("matrix products took no time")),
        };
        let off = |(rounds, us): &(u32, f64)| (line.us(*rounds) - us).abs() / us.max(1e-9);
        Ok(Line { off: points.iter().map(off).fold(0.0, f64::max), ..line })
    }

    /// The time of this many rounds.
    pub fn us(&self, rounds: u32) -> f64 {
        self.fixed_us + self.round_us * f64::from(rounds)
    }

    /// The rounds whose time is nearest to `us`; none for a work shorter than a round.
    pub fn rounds(&self, us: f64) -> u32 {
        self.exactly(us).round() as u32
    }

    fn exactly(&self, us: f64) -> f64 {
        ((us - self.fixed_us.max(0.0)) / self.round_us).clamp(0.0, ROUNDS_MAX)
    }

    /// The rounds of a layer's work of `us`, such that `layers` layers together come nearest to their time; at least
    /// one, unless the work takes no time.
    pub fn rounds_of(&self, us: f64, layer: Layer) -> u32 {
        if us <= 0.0 {
            return 0;
        }
        let up_to = |layers: f64| (self.exactly(us).max(1.0) * layers).round();
        (up_to(f64::from(layer.0) + 1.0) - up_to(f64::from(layer.0))) as u32
    }
}

/// Measures the line, up to works of about `most_us`; `time` measures a number of rounds.
///
/// # Errors
/// Errors of `time` and of [`Line::through`].
pub fn calibrate(most_us: f64, time: impl Fn(u32) -> Result<f64>) -> Result<Line> {
    // Disturbances only make a time longer.
    let least = |rounds: u32, times: u32| -> Result<f64> {
        (0..times).try_fold(f64::INFINITY, |least, _| Ok(time(rounds)?.min(least)))
    };
    // The first use of the products includes the setup of their memory.
    least(1, 2)?;
    let mut rounds = 1;
    while rounds < ROUNDS_TRIED && least(rounds, 1)? < most_us / 8.0 {
        rounds *= 2;
    }
    // Starts at one round: a line through long works alone would not show the fixed time of short ones.
    let timed =
        std::iter::successors(Some(1), |timed| Some(2 * timed)).take_while(|timed| *timed <= 8 * rounds);
    Line::through(&timed.map(|rounds| Ok((rounds, least(rounds, 5)?))).collect::<Result<Vec<_>>>()?)
}

/// The lengths of the works of one operating point.
#[derive(Clone, Debug)]
pub struct Lengths {
    setup: Setup,
    point: Point,
    /// The factor on the setup's times.
    pub scale: f64,
}

impl Lengths {
    /// The lengths for a step without misses of the requested time.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a point that the setup does not reach.
    pub fn new(setup: &Setup, point: &Point) -> Result<Lengths> {
        let mut lengths = Lengths { setup: setup.clone(), point: point.clone(), scale: 1.0 };
        let mut layer = 0.0;
        for work in RESIDENT {
            layer += lengths.us(work, point.batch)?;
        }
        lengths.scale = point.step_us / (layer * f64::from(point.layers));
        Ok(lengths)
    }

    /// Scales the works after steps that took these times in microseconds. Disturbances only make a time longer, and
    /// works fitted to a long time would be too short, so the least time counts.
    pub fn fit(&mut self, times: &[f64]) {
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        self.scale *= (self.point.step_us / least.max(1.0)).clamp(0.25, 4.0);
    }

    /// Microseconds of a work over this many batch rows.
    ///
    /// # Errors
    /// Errors of [`Lengths::new`].
    pub fn us(&self, work: Work, rows: u32) -> Result<f64> {
        let Point { top_k, query_rows, context, misses, .. } = self.point;
        // The setup's selection widths are those of its model's k.
        let k = self.setup.shape().top_k;
        let wide = f64::from(k) / f64::from(top_k);
        let share = self.setup.misses()?.share(query_rows);
        let (resident, fetched) = self.setup.file().captured.widths(k, f64::from(misses) * wide * share);
        let (term, width) = match work {
            Work::Project => (Term::Project, f64::from(k)),
            Work::Index => (Term::Index, f64::from(k)),
            Work::Prepare => (Term::Prepare, f64::from(k)),
            Work::Attend(Attended::All) => (Term::Attend, f64::from(k)),
            Work::Attend(Attended::Resident) => (Term::Attend, resident),
            Work::Attend(Attended::Fetched { .. }) => (Term::Attend, fetched),
            Work::Merge => (Term::Merge, f64::from(k)),
            Work::Rest => (Term::Rest, f64::from(k)),
        };
        let (rows, query_rows) = (f64::from(rows), f64::from(query_rows));
        let load = Load { rows, query_rows, context: f64::from(context), width };
        Ok(self.setup.us(term, &load)? * self.scale)
    }
}

/// Rounds of products in blocks of microseconds, or by a persistent kernel that leaves some multiprocessors free.
///
/// # Errors
/// Errors of the device.
pub fn products(device: &dyn Probe, stream: Stream, rounds: u32, persistent: Option<u32>) -> Result<()> {
    match persistent {
        None => device.compute(stream, rounds),
        Some(left) => device.compute_persistent(stream, rounds, left),
    }
}

/// The works of a layer with unsplit attention, in order.
const RESIDENT: [Work; 5] =
    [Work::Project, Work::Index, Work::Prepare, Work::Attend(Attended::All), Work::Rest];

/// See the module's head.
#[derive(Debug)]
pub struct Works {
    /// The device.
    pub device: Arc<dyn Probe>,
    /// The times of rounds; none for an engine that only selects.
    pub line: Option<Line>,
    /// The lengths of works.
    pub lengths: Lengths,
    /// By pattern, the prepared selections; each layer copies its own.
    pub staging: Slice,
    /// The destination of that copy.
    pub selection: Slice,
    /// As [`Asked::persistent`].
    pub persistent: Option<u32>,
}

impl Works {
    /// Bytes of a pattern's part of the staging buffer.
    pub fn part_bytes(staging: &Slice) -> u64 {
        staging.bytes() / u64::from(PATTERNS)
    }

    /// Enqueues this many rounds of products.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn products(&self, stream: Stream, rounds: u32) -> Result<()> {
        products(&*self.device, stream, rounds, self.persistent)
    }

    /// The copy that stands for a top-k's writes, for some batch rows.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn select(&self, layer: Layer, first: u32, count: u32, stream: Stream) -> Result<()> {
        let Point { top_k, query_rows, .. } = self.lengths.point;
        let row = 4 * u64::from(top_k) * u64::from(query_rows);
        let (at, bytes) = (u64::from(first) * row, u64::from(count) * row);
        let pattern = Picks::pattern(layer.0) as u64 * Works::part_bytes(&self.staging);
        self.device.copy(stream, self.staging.part(pattern + at, bytes)?, self.selection.part(at, bytes)?)
    }

    /// A step of the engine alone: its operations with everything resident, and none of forebay's.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn alone(&mut self, stream: Stream) -> Result<()> {
        let Point { batch, query_rows, layers, .. } = self.lengths.point;
        for layer in (0..layers).map(Layer) {
            for work in RESIDENT {
                let rows = QueryRange { first: 0, count: query_rows };
                let call =
                    EngineCall { work, micro_batch: MicroBatch(0), layer, first: 0, count: batch, rows };
                self.enqueue(&call, stream)?;
            }
        }
        Ok(())
    }
}

impl Engine for Works {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        if let Some(line) = self.line {
            let rounds = line.rounds_of(self.lengths.us(call.work, call.count)?, call.layer);
            if rounds > 0 {
                self.products(stream, rounds)?;
            }
        }
        match call.work {
            Work::Index => self.select(call.layer, call.first, call.count, stream),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point() -> Point {
        Point { step_us: 100_000.0, ..Point::ESS }
    }

    #[test]
    fn the_fitted_line_reports_its_distance_from_the_measured_times() {
        let line = Line::through(&[(10, 25.0), (20, 45.0), (40, 85.0), (80, 165.0)]).unwrap();
        assert!((line.fixed_us - 5.0).abs() < 1e-9 && (line.round_us - 2.0).abs() < 1e-9, "{line:?}");
        assert!(line.off < 1e-9);
        assert_eq!((line.rounds(105.0), line.rounds(5.9), line.rounds(0.0)), (50, 0, 0));
        assert!((line.us(line.rounds(1234.0)) - 1234.0).abs() <= 1.0);
        // A curve is not accepted as a line.
        let curve = Line::through(&[(10, 25.0), (20, 45.0), (40, 125.0), (80, 165.0)]).unwrap();
        assert!(curve.off > 0.1, "{curve:?}");
        let disturbed = Line::through(&[(1, 5.0), (2, 4.0)]).unwrap();
        assert_eq!(disturbed, Line { fixed_us: 0.0, round_us: 2.0, off: 0.6 });
        for nothing in [&[(1, 0.0), (2, 0.0)][..], &[]] {
            assert_eq!(Line::through(nothing).unwrap_err().kind(), Kind::DeviceFailed);
        }
    }

    #[test]
    fn engine_work_is_fitted_to_the_least_disturbed_step() {
        let mut lengths = Lengths::new(&Setup::named("ess").unwrap().unwrap(), &point()).unwrap();
        let before = lengths.scale;
        lengths.fit(&[400_000.0, 125_000.0, 330_000.0]);
        assert!((lengths.scale / before - 0.8).abs() < 1e-9, "{}", lengths.scale / before);
    }

    #[test]
    fn short_engine_work_has_the_requested_length_over_all_layers() {
        // Rounds as long as most engine work of a small batch.
        let line = Line { fixed_us: 1.5, round_us: 2.5, off: 0.0 };
        for us in [4.2, 5.1, 6.0, 59.0, 275.3] {
            let all = (0..61).map(|layer| line.us(line.rounds_of(us, Layer(layer)))).sum::<f64>();
            assert!((all - 61.0 * us).abs() < 2.5, "{all} of {us}");
        }
        assert!((0..61).all(|layer| line.rounds_of(0.5, Layer(layer)) == 1), "a launch is a round");
        assert_eq!(line.rounds_of(0.0, Layer(3)), 0);
    }

    #[test]
    fn short_and_long_engine_work_weigh_equally_in_the_fit() {
        // Work of milliseconds is a hundredth off; work of one round is 4 us.
        let time = |rounds: u32| match rounds {
            0..64 => 1.5 + 2.5 * f64::from(rounds),
            _ => (1.5 + 2.5 * f64::from(rounds)) * if rounds < 300 { 1.01 } else { 0.99 },
        };
        let line = calibrate(2000.0, |rounds| Ok(time(rounds))).unwrap();
        assert!((line.us(1) - 4.0).abs() < 0.1 && (line.us(4) - 11.5).abs() < 0.2, "{line:?}");
    }

    #[test]
    fn the_work_of_a_step_takes_the_requested_time_in_the_proportions_of_the_setup() {
        let setup = Setup::named("ess").unwrap().unwrap();
        for (point, step) in [(point(), 100_000.0), (Point { batch: 1, ..point() }, 100_000.0)] {
            let lengths = Lengths::new(&setup, &point).unwrap();
            let us = |work| lengths.us(work, point.batch).unwrap();
            let layer: f64 = RESIDENT.into_iter().map(us).sum();
            assert!((layer * 61.0 - step).abs() < 1e-6 * step, "{layer}");
            assert!(us(Work::Attend(Attended::Resident)) < us(Work::Attend(Attended::All)));
            let load = |width| Load { rows: point.batch.into(), query_rows: 2.0, context: 32768.0, width };
            let of_setup = setup.us(Term::Attend, &load(2048.0)).unwrap();
            assert!((us(Work::Attend(Attended::All)) / lengths.scale - of_setup).abs() < 1e-9);
            // 109 of 190 misses for each query row: two widths of 64.
            let fetched = setup.us(Term::Attend, &load(128.0)).unwrap();
            let ours = us(Work::Attend(Attended::Fetched { wave: 0 })) / lengths.scale;
            assert!((ours - fetched).abs() < 1e-9);
        }
    }
}
