//! Simulates a point on a replay's steps: every step is run, in one order by layer, and their mean is the point's
//! result.
//!
//! An engine loads one table of orders, so the order is chosen once, for the mean misses of each layer. A choice for
//! each step would need the step's misses before it begins.

use forebay::Result;
use forebay::predict::misses::{self, Misses};
use forebay::predict::simulate::{NODE_GPUS, Options, Order, Outcome, Point, Simulator};

/// The result of a point.
pub struct Run {
    /// The step, or the mean of all steps.
    pub outcome: Outcome,
    /// The longest of a replay's steps.
    pub worst: Option<Worst>,
}

/// The longest of a replay's steps.
pub struct Worst {
    /// Its index, from 0.
    pub step: u32,
    /// The number of steps that were run.
    pub steps: u32,
    /// Its outcome.
    pub outcome: Outcome,
}

/// The means by layer of a replay's steps; other misses are used unchanged.
pub fn mean(misses: &Misses) -> Option<Misses> {
    let Misses::Steps(steps) = misses else { return None };
    let layers = steps.rows.first().map_or(0, Vec::len);
    let of = |layer: usize| {
        let rows = steps.rows.iter().filter_map(|step| step.get(layer));
        rows.sum::<f64>() / steps.rows.len().max(1) as f64
    };
    Some(Misses::Table(misses::Table {
        query_rows: steps.query_rows,
        query_rows_power: steps.query_rows_power,
        rows: (0..layers).map(of).collect(),
    }))
}

/// Simulates a point: one step, or all of a replay's.
///
/// # Errors
/// Errors of [`Simulator::run`].
pub fn run(simulator: &mut Simulator, point: &Point, mut options: Options) -> Result<Run> {
    let own = options.misses.as_ref().or(simulator.setup().file().misses.as_ref());
    let several = match own {
        Some(Misses::Steps(steps)) if point.ratio < 1.0 && steps.rows.len() > 1 => steps.rows.len() as u32,
        _ => return Ok(Run { outcome: simulator.run(point, &options)?, worst: None }),
    };
    if options.order == Order::ByLayer {
        let of_mean = Options { misses: own.and_then(mean), spans: false, ..options.clone() };
        options.order = Order::Table(simulator.run(point, &of_mean)?.overlap);
    }
    let mut sum: Option<Outcome> = None;
    let mut worst: Option<Worst> = None;
    for step in 0..several {
        options.step = step;
        let outcome = simulator.run(point, &options)?;
        match &mut sum {
            Some(sum) => add(sum, &outcome),
            None => sum = Some(Outcome { spans: Vec::new(), ..outcome.clone() }),
        }
        if worst.as_ref().is_none_or(|worst| outcome.step_ms > worst.outcome.step_ms) {
            worst = Some(Worst { step, steps: several, outcome });
        }
    }
    match sum {
        Some(sum) => Ok(Run { outcome: divided(sum, f64::from(several)), worst }),
        None => Ok(Run { outcome: simulator.run(point, &options)?, worst: None }),
    }
}

fn add(sum: &mut Outcome, one: &Outcome) {
    sum.step_ms += one.step_ms;
    sum.exposed_ms += one.exposed_ms;
    sum.wait_ms += one.wait_ms;
    if let (Some(sum), Some(one)) = (&mut sum.pulls, &one.pulls) {
        sum.exposed_ms += one.exposed_ms;
        sum.slower_ms += one.slower_ms;
        sum.exposed_us.iter_mut().zip(&one.exposed_us).for_each(|(sum, one)| *sum += one);
    }
    sum.exposed_us.iter_mut().zip(&one.exposed_us).for_each(|(sum, one)| *sum += one);
    sum.misses.iter_mut().zip(&one.misses).for_each(|(sum, one)| *sum += one);
}

fn divided(mut sum: Outcome, steps: f64) -> Outcome {
    sum.step_ms /= steps;
    sum.exposed_ms /= steps;
    sum.wait_ms /= steps;
    if let Some(pulls) = &mut sum.pulls {
        pulls.exposed_ms /= steps;
        pulls.slower_ms /= steps;
        pulls.exposed_us.iter_mut().for_each(|value| *value /= steps);
    }
    sum.exposed_us.iter_mut().chain(&mut sum.misses).for_each(|value| *value /= steps);
    sum.otps = sum.point.accept / sum.step_ms * 1e3;
    sum.throughput = NODE_GPUS * f64::from(sum.point.batch) * sum.otps;
    sum
}
