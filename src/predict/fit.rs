//! Fits a setup to measurements: finds the unknowns by least squares, and reports the residual of each row.
//!
//! The measurements are whole steps without misses and, optionally, the costs of the orders of overlap in one layer.
//! Costs that were measured work by work are in the setup that comes with the measurements, and are kept. The other
//! costs are found in this order:
//!
//! 1. From `overlap`: the indexer's time and the part of it that does not shrink with the batch, the preparation's
//!    time, and the fixed cost of a call of attention. These four decide how much an order hides and costs. The model
//!    is the production schedule on the clock; the method is damped Gauss-Newton.
//! 2. From `steps` of the most frequent kind (query rows, two micro-batches or not): the part of a step that remains
//!    after the other works is the rest of a layer, by the tokens of a micro-batch. The fit meets steps of that kind
//!    exactly, so their noise is in the setup.
//! 3. From `steps` with other query rows, if 1 was found: which part of the indexer's time scales with batch rows
//!    and which with query rows.
//! 4. From `steps` with and without two micro-batches: the cost of the exchange of experts' tokens if
//!    nothing hides it, beyond its bytes over the network.
//! 5. From `misses_by_query_rows`: the power by which misses grow.
//!
//! A missing kind of measurement keeps the setup's own numbers, or the roofline's.

use serde::{Deserialize, Serialize};

use super::cost::{Axis, AxisName, Cost, Load};
use super::misses::Misses;
use super::model::Deployment;
use super::setup::{self, File, Link, Setup, Term};
use super::simulate::{Options, Order, Point, Simulator};
use super::{parse, positive, within, wrong};
use crate::device::rates::Rates;
use crate::error::Result;
use crate::overlap::Overlap;
use crate::text::echo;

/// The version of the measurements that is read.
pub const VERSION: u64 = 1;

/// The most rows of a list of measurements, because each is simulated.
pub const ROWS_MAX: usize = 1 << 12;

/// The most rows of `overlap`, because each is simulated five times a round.
pub const OVERLAP_ROWS_MAX: usize = 1 << 7;

/// Limits beyond any real measurement: milliseconds of a step, and microseconds of an order's cost in a layer.
const STEP_MS_MAX: f64 = 1e6;
const OVERLAP_US_MAX: f64 = 1e6;

/// The time of a whole step without misses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRow {
    /// Requests of a GPU.
    pub batch: u32,
    /// Tokens of context.
    pub context: u32,
    /// Query rows of a step.
    pub query_rows: u32,
    /// Whether it ran as two micro-batches.
    pub two_batch: bool,
    /// Milliseconds.
    pub ms: f64,
}

/// The cost of an order in one layer, beyond the same layer without misses in the order none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlapRow {
    /// Requests of a GPU.
    pub batch: u32,
    /// Tokens of context.
    pub context: u32,
    /// Query rows of a step.
    pub query_rows: u32,
    /// Whether it ran as two micro-batches; `us` is of one of them.
    pub two_batch: bool,
    /// "none", "da", "dba".
    pub order: String,
    /// Rows that a request missed.
    pub misses: f64,
    /// Microseconds of one micro-batch.
    pub us: f64,
}

/// Misses at a number of query rows, all else equal; only their ratios matter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrowthRow {
    /// Query rows of a step.
    pub query_rows: u32,
    /// Rows of a request.
    pub rows: f64,
}

/// The file that `forebay fit` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurements {
    /// The version: [`VERSION`].
    pub forebay_measurements: u64,
    /// The known and assumed values: a setup, without the costs to be found.
    pub setup: File,
    /// The link's measured rates, which replace the setup's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// Whole steps.
    #[serde(default)]
    pub steps: Vec<StepRow>,
    /// Costs of overlap.
    #[serde(default)]
    pub overlap: Vec<OverlapRow>,
    /// How misses grow.
    #[serde(default)]
    pub misses_by_query_rows: Vec<GrowthRow>,
}

/// A measurement next to the fitted setup's value.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual {
    /// The row's field path.
    pub row: String,
    /// The row in words.
    pub what: String,
    /// "ms" or "us".
    pub unit: &'static str,
    /// The measured value.
    pub measured: f64,
    /// The fitted setup's value.
    pub fitted: f64,
}

/// A number that the fit found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Its name.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Its value.
    pub value: f64,
}

/// The result of a fit.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// The setup.
    pub setup: Setup,
    /// The numbers found.
    pub found: Vec<Found>,
    /// Every row of `steps` and `overlap`, in order.
    pub residuals: Vec<Residual>,
}

impl Measurements {
    /// Reads the text of a file of measurements.
    ///
    /// # Errors
    /// Errors of [`Setup::parse`], with the paths of this file.
    pub fn parse(text: &str) -> Result<Measurements> {
        let measured: Measurements = parse(text, "forebay_measurements", VERSION..=VERSION)?;
        measured.check()?;
        Ok(measured)
    }

    fn check(&self) -> Result<()> {
        let lists = [
            ("steps", self.steps.len(), ROWS_MAX),
            ("overlap", self.overlap.len(), OVERLAP_ROWS_MAX),
            ("misses_by_query_rows", self.misses_by_query_rows.len(), ROWS_MAX),
        ];
        if let Some((name, rows, most)) = lists.into_iter().find(|(_, rows, most)| rows > most) {
            return Err(wrong(format!("{name}: too many rows"))
                .with("rows", rows as u64)
                .with("most", most as u64)
                .hint("keep fewer rows: average those measured under the same conditions"));
        }
        let setup = Setup::new(self.setup.clone())?;
        for (i, row) in self.steps.iter().enumerate() {
            positive(row.ms, || format!("steps[{i}].ms"))?;
            if row.ms > STEP_MS_MAX {
                return Err(wrong(format!("steps[{i}].ms: {} is longer than any step", row.ms)));
            }
        }
        if (1..UNKNOWNS).contains(&self.overlap.len()) {
            return Err(wrong("overlap: fewer rows than unknowns found from them")
                .with("rows", self.overlap.len() as u64)
                .with("least", UNKNOWNS as u64));
        }
        for (i, row) in self.overlap.iter().enumerate() {
            order_of(row, i)?;
            if !(-OVERLAP_US_MAX..=OVERLAP_US_MAX).contains(&row.us) {
                return Err(wrong(format!("overlap[{i}].us: {} is longer than any layer", row.us)));
            }
            let most = f64::from(setup.shape().top_k) * f64::from(row.query_rows);
            if !(0.0..=most).contains(&row.misses) {
                return Err(wrong(format!(
                    "overlap[{i}].misses: {}, but a request selects {most} rows at most",
                    row.misses
                )));
            }
        }
        for (i, row) in self.misses_by_query_rows.iter().enumerate() {
            positive(row.rows, || format!("misses_by_query_rows[{i}].rows"))?;
            positive(row.query_rows.into(), || format!("misses_by_query_rows[{i}].query_rows"))?;
        }
        Ok(())
    }
}

fn order_of(row: &OverlapRow, i: usize) -> Result<Overlap> {
    let order = Overlap::FIRST.into_iter().find(|order| order.name() == row.order);
    order.ok_or_else(|| {
        wrong(format!("overlap[{i}].order: {:?} is not one of none, da, dba", echo(&row.order)))
    })
}

/// The numbers found from `overlap`.
#[derive(Clone, Copy, Debug)]
struct Unknowns {
    /// The indexer's microseconds for one batch row and token of context: by batch row and by query row.
    index_row: f64,
    index_query_row: f64,
    index_fixed: f64,
    /// As a factor on the roofline.
    prepare: f64,
    attend_fixed: f64,
}

/// Fits a setup.
///
/// # Errors
/// [`crate::Kind::InvalidConfig`] names the measurement that no setup can meet: a step shorter than its works, a
/// row that the setup does not reach.
pub fn fit(measured: &Measurements) -> Result<Fitted> {
    measured.check()?;
    let mut file = stated(measured)?;
    if let Some(rates) = &measured.rates {
        file.link = Link::Rates(rates.clone());
    }
    let power = grow(&mut file, &measured.misses_by_query_rows);
    let mut found = Vec::new();
    if !measured.overlap.is_empty() {
        let mut unknowns = hidden(&file, measured)?;
        split_index(&mut file, measured, &mut unknowns)?;
        unknowns.write(&mut file)?;
        found.extend(unknowns.found(measured));
    }
    rests(&mut file, &measured.steps)?;
    if let Some(us) = exchange(&mut file, &measured.steps)? {
        found.push(Found { name: "exchange, beyond its bytes", unit: "us", value: us });
    }
    let name = "misses, the power of the query rows";
    found.extend(power.map(|value| Found { name, unit: "", value }));
    let setup = Setup::new(file)?;
    let residuals = residuals(&setup, measured)?;
    Ok(Fitted { setup, found, residuals })
}

/// The setup to be fitted, with its provenance: its costs are of its own GPUs, and its origin is what the measurements
/// state, or that they state none.
fn stated(measured: &Measurements) -> Result<File> {
    let version = measured.setup.forebay_setup.max(setup::STATED);
    let mut file = File { forebay_setup: version, ..measured.setup.clone() };
    let gpus = file.deployment.gpus;
    if file.deployment.costs_gpus.is_some_and(|own| own != gpus) {
        return Err(wrong(
            "setup.deployment.costs_gpus: differs from gpus; measurements are of one number of GPUs",
        ));
    }
    file.deployment.costs_gpus = Some(gpus);
    file.origin.get_or_insert_with(|| {
        let (steps, overlap) = (measured.steps.len(), measured.overlap.len());
        format!("fitted to {steps} steps and {overlap} costs of overlap whose origin is not stated")
    });
    Ok(file)
}

fn point(batch: u32, context: u32, query_rows: u32) -> Point {
    Point { context, batch, mtp: query_rows, accept: 1.0, ratio: 1.0 }
}

/// Milliseconds of a step without misses.
fn step_ms(setup: &Setup, row: &StepRow, place: &str) -> Result<f64> {
    let options =
        Options { order: Order::All(Overlap::None), two_batch: Some(row.two_batch), ..Options::default() };
    let run = Simulator::new(setup.clone()).run(&point(row.batch, row.context, row.query_rows), &options);
    run.map(|outcome| outcome.step_ms).map_err(|e| within(place, &e))
}

/// Microseconds of one micro-batch beyond the same layer without misses.
fn overhead_us(setup: &Setup, row: &OverlapRow, i: usize) -> Result<f64> {
    let order = order_of(row, i)?;
    let options = Options { two_batch: Some(row.two_batch), ..Options::default() };
    let point = point(row.batch, row.context, row.query_rows);
    let mut simulator = Simulator::new(setup.clone());
    let mut layer = |misses, order| {
        simulator.layer_us(&point, &options, misses, order).map_err(|e| within(&format!("overlap[{i}]"), &e))
    };
    let micro_batches = if row.two_batch { 2.0 } else { 1.0 };
    Ok((layer(row.misses, order)? - layer(0.0, Overlap::None)?) / micro_batches)
}

/// How many numbers are found from `overlap`.
const UNKNOWNS: usize = 4;

impl Unknowns {
    /// The initial values: the roofline at the load of the first row.
    fn start(setup: &Setup, row: &OverlapRow) -> Unknowns {
        let load = load(setup, row);
        let us = setup.roofline().us(Term::Index, &load);
        Unknowns {
            index_row: 0.0,
            index_query_row: us / (load.tokens() * load.context),
            index_fixed: 2.0 * setup.file().gpu.kernel_us,
            prepare: 1.0,
            attend_fixed: 2.0 * setup.file().gpu.kernel_us,
        }
    }

    fn list(&self) -> [f64; 4] {
        [self.index_query_row, self.index_fixed, self.prepare, self.attend_fixed]
    }

    fn with(&self, list: [f64; 4]) -> Unknowns {
        let [index_query_row, index_fixed, prepare, attend_fixed] = list.map(|value| value.max(0.0));
        Unknowns { index_row: self.index_row, index_query_row, index_fixed, prepare, attend_fixed }
    }

    /// Writes the resulting costs into a setup.
    fn write(&self, file: &mut File) -> Result<()> {
        let setup = Setup::new(File { costs: Default::default(), ..file.clone() })?;
        let roofline = setup.roofline();
        let axis = |name, at: &[f64]| Axis { name, at: at.to_vec() };
        let context = f64::from(setup.dims().context_max);
        let k = f64::from(setup.shape().top_k);
        let axes = vec![
            axis(AxisName::Rows, &[1.0, 512.0]),
            axis(AxisName::QueryRows, &[1.0, 8.0]),
            axis(AxisName::Context, &[64.0, context]),
        ];
        file.costs.index = Some(Cost::filled(axes, |load| {
            let by_row = self.index_row + self.index_query_row * load.query_rows;
            self.index_fixed + load.rows * load.context * by_row
        }));
        let kernels = 2.0 * setup.file().gpu.kernel_us;
        let axes = vec![axis(AxisName::Tokens, &[1.0, 1024.0]), axis(AxisName::Width, &[64.0, k])];
        // One wave of attention contains the fixed part once; split attention contains it twice.
        file.costs.attend =
            Some(Cost::filled(axes, |load| self.attend_fixed + roofline.us(Term::Attend, load) - kernels));
        let tokens = [1.0, 32.0, 64.0, 96.0, 128.0, 160.0, 192.0, 256.0, 384.0, 512.0, 1024.0];
        file.costs.prepare = Some(Cost::filled(vec![axis(AxisName::Tokens, &tokens)], |load| {
            self.prepare * roofline.us(Term::Prepare, load)
        }));
        for cost in [&mut file.costs.index, &mut file.costs.attend, &mut file.costs.prepare] {
            cost.iter_mut().flat_map(|cost| &mut cost.us).flatten().for_each(|us| *us = rounded(*us));
        }
        Ok(())
    }

    /// Checks that the rows of `overlap` determine the numbers.
    fn check(self, errors: &[f64], measured: &Measurements) -> Result<Unknowns> {
        let us: Vec<f64> = measured.overlap.iter().map(|row| row.us).collect();
        let rows = us.len() as f64;
        let (off, most) = (squares(errors) / rows, HALF * HALF * squares(&us) / rows + READ_US * READ_US);
        if !off.is_finite() || off > most {
            return Err(wrong(format!(
                "overlap: no engine on this link has such times; the closest fit is {:.0} us off",
                off.sqrt()
            )));
        }
        // Rounded as in the file: a smaller value would be written as 0.
        if rounded(1024.0 * (self.index_row + self.index_query_row)) == 0.0 {
            return Err(wrong(
                "overlap: by these times the indexer takes no time, so DBA has nothing to hide behind",
            ));
        }
        Ok(self)
    }

    fn found(&self, measured: &Measurements) -> Vec<Found> {
        let query_rows = measured.overlap.first().map_or(1.0, |row| f64::from(row.query_rows));
        let row = self.index_row + query_rows * self.index_query_row;
        let found = |name, unit, value| Found { name, unit, value };
        vec![
            found("index, a row and 1024 tokens", "us", 1024.0 * row),
            found("index, the share by query row", "", query_rows * self.index_query_row / row),
            found("index, whatever its rows", "us", self.index_fixed),
            found("prepare, over the roofline", "x", self.prepare),
            found("attend, whatever its width", "us", self.attend_fixed),
        ]
    }
}

/// The file stores numbers found with four decimals.
fn rounded(found: f64) -> f64 {
    (found * 1e4).round() / 1e4
}

fn load(setup: &Setup, row: &OverlapRow) -> Load {
    let rows = if row.two_batch { row.batch.div_ceil(2) } else { row.batch };
    Load {
        rows: rows.into(),
        query_rows: row.query_rows.into(),
        context: row.context.into(),
        width: setup.shape().top_k.into(),
    }
}

/// The most rounds of the descent; it ends earlier when a round gains nothing.
const ROUNDS: usize = 60;

/// The fit must meet overlap within half of its root mean square, plus this many microseconds.
const HALF: f64 = 0.5;
const READ_US: f64 = 10.0;

/// The part of the costs that decides what an order hides and costs, from the rows of `overlap`.
fn hidden(file: &File, measured: &Measurements) -> Result<Unknowns> {
    let Some(first) = measured.overlap.first() else { return Err(wrong("overlap: no rows")) };
    let start = Unknowns::start(&Setup::new(file.clone())?, first);
    let errors = |unknowns: &Unknowns| -> Result<Vec<f64>> {
        let mut file = file.clone();
        unknowns.write(&mut file)?;
        let setup = Setup::new(file)?;
        let rows = measured.overlap.iter().enumerate();
        rows.map(|(i, row)| Ok(overhead_us(&setup, row, i)? - row.us)).collect()
    };
    let scale = start.list().map(|value| value.max(1e-9));
    let mut at = start;
    let mut now = errors(&at)?;
    let mut damping = 1e-3;
    for _ in 0..ROUNDS {
        // Columns of the derivative, in units of the start.
        let mut columns = Vec::with_capacity(4);
        for i in 0..4 {
            let mut list = at.list();
            list[i] += 1e-4 * scale[i];
            let moved = errors(&at.with(list))?;
            columns.push(moved.iter().zip(&now).map(|(b, a)| (b - a) / 1e-4).collect::<Vec<f64>>());
        }
        let step = normal(&columns, &now, damping);
        let mut list = at.list();
        (0..4).for_each(|i| list[i] += step[i] * scale[i]);
        let next = at.with(list);
        // A step that leaves the range of valid setups counts as one that gains nothing.
        let then = errors(&next).unwrap_or_else(|_| vec![f64::INFINITY]);
        let gain = squares(&now) - squares(&then);
        if gain > 0.0 {
            let small = gain < 1e-9 * squares(&now);
            (at, now, damping) = (next, then, damping * 0.3);
            if small {
                break;
            }
        } else {
            damping *= 10.0;
        }
    }
    at.check(&now, measured)
}

fn squares(errors: &[f64]) -> f64 {
    errors.iter().map(|e| e * e).sum()
}

/// Solves the damped normal equations of four columns for the step that reduces the errors.
fn normal(columns: &[Vec<f64>], errors: &[f64], damping: f64) -> [f64; 4] {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut m = [[0.0_f64; 5]; 4];
    for i in 0..4 {
        for j in 0..4 {
            m[i][j] = dot(&columns[i], &columns[j]);
        }
        m[i][i] += damping * m[i][i] + 1e-12;
        m[i][4] = -dot(&columns[i], errors);
    }
    for i in 0..4 {
        let pivot = (i..4).max_by(|a, b| m[*a][i].abs().total_cmp(&m[*b][i].abs())).unwrap_or(i);
        m.swap(i, pivot);
        let row = m[i];
        for (_, of) in m.iter_mut().enumerate().filter(|(other, _)| *other != i) {
            let factor = of[i] / row[i];
            (i..5).for_each(|column| of[column] -= factor * row[column]);
        }
    }
    [0, 1, 2, 3].map(|i| m[i][4] / m[i][i])
}

/// The most frequent kind of step: query rows, two micro-batches.
fn main_kind(steps: &[StepRow]) -> Option<(u32, bool)> {
    let kind = |row: &StepRow| (row.query_rows, row.two_batch);
    let count = |of: (u32, bool)| steps.iter().filter(|row| kind(row) == of).count();
    // Among equals the first.
    steps.iter().map(kind).rev().max_by_key(|of| count(*of))
}

fn micro_batch_tokens(row: &StepRow) -> f64 {
    let rows = if row.two_batch { row.batch.div_ceil(2) } else { row.batch };
    f64::from(rows) * f64::from(row.query_rows)
}

/// The rest of a layer: what remains of the steps of the main kind.
fn rests(file: &mut File, steps: &[StepRow]) -> Result<()> {
    let Some(kind) = main_kind(steps) else { return Ok(()) };
    file.costs.rest = Some(Cost { axes: Vec::new(), us: vec![Some(0.0)] });
    let setup = Setup::new(file.clone())?;
    let mut points: Vec<(f64, f64, u32)> = Vec::new();
    for (i, row) in steps.iter().enumerate().filter(|(_, row)| (row.query_rows, row.two_batch) == kind) {
        let place = format!("steps[{i}]");
        let without = step_ms(&setup, row, &place)?;
        if row.ms <= without {
            return Err(wrong(format!(
                "{place}.ms: {} ms, its works without the rest take {without:.3}",
                row.ms
            )));
        }
        let layers = f64::from(setup.shape().layers) * if row.two_batch { 2.0 } else { 1.0 };
        let (tokens, us) = (micro_batch_tokens(row), (row.ms - without) * 1e3 / layers);
        match points.iter_mut().find(|(at, ..)| *at == tokens) {
            Some((_, sum, count)) => (*sum, *count) = (*sum + us, *count + 1),
            None => points.push((tokens, us, 1)),
        }
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let at = points.iter().map(|(tokens, ..)| *tokens).collect();
    let us = points.iter().map(|(_, sum, count)| Some(rounded(sum / f64::from(*count)))).collect();
    file.costs.rest = Some(Cost { axes: vec![Axis { name: AxisName::Tokens, at }], us });
    Ok(())
}

/// The part of the indexer's time that scales with batch rows, from steps with other query rows than the main kind's.
/// The total at the query rows of `overlap` does not change.
fn split_index(file: &mut File, measured: &Measurements, unknowns: &mut Unknowns) -> Result<()> {
    let Some((main, two_batch)) = main_kind(&measured.steps) else { return Ok(()) };
    let reference = measured.overlap.first().map_or(1.0, |row| f64::from(row.query_rows));
    let whole = unknowns.index_row + reference * unknowns.index_query_row;
    let others: Vec<(usize, &StepRow)> = measured.steps.iter().enumerate().collect();
    let others: Vec<_> =
        others.into_iter().filter(|(_, row)| row.query_rows != main && row.two_batch == two_batch).collect();
    if others.is_empty() {
        return Ok(());
    }
    // The step is linear in the share, so two evaluations give the best one.
    let mut errors = |share: f64| -> Result<Vec<f64>> {
        unknowns.index_row = whole * share;
        unknowns.index_query_row = whole * (1.0 - share) / reference;
        unknowns.write(file)?;
        rests(file, &measured.steps)?;
        let setup = Setup::new(file.clone())?;
        others.iter().map(|(i, row)| Ok(step_ms(&setup, row, &format!("steps[{i}]"))? - row.ms)).collect()
    };
    let (none, all) = (errors(0.0)?, errors(1.0)?);
    let slope: Vec<f64> = all.iter().zip(&none).map(|(b, a)| b - a).collect();
    let dot: f64 = slope.iter().zip(&none).map(|(s, e)| s * e).sum();
    let share = if squares(&slope) > 0.0 { (-dot / squares(&slope)).clamp(0.0, 1.0) } else { 0.0 };
    errors(share)?;
    Ok(())
}

/// The cost of the exchange beyond its bytes, from steps that differ from the main kind in their micro-batches.
fn exchange(file: &mut File, steps: &[StepRow]) -> Result<Option<f64>> {
    let Some((_, true)) = main_kind(steps) else { return Ok(None) };
    if file.costs.exchange.is_some() {
        return Ok(None);
    }
    file.deployment = Deployment { exchange_us: 0.0, ..file.deployment.clone() };
    let setup = Setup::new(file.clone())?;
    let layers = f64::from(setup.shape().layers);
    let mut left = Vec::new();
    for (i, row) in steps.iter().enumerate().filter(|(_, row)| !row.two_batch) {
        left.push((row.ms - step_ms(&setup, row, &format!("steps[{i}]"))?) * 1e3 / layers);
    }
    if left.is_empty() {
        file.deployment.exchange_us = setup.file().deployment.exchange_us;
        return Ok(None);
    }
    let us = (left.iter().sum::<f64>() / left.len() as f64).max(0.0);
    let us = rounded(us);
    file.deployment.exchange_us = us;
    Ok(Some(us))
}

/// The power by which misses grow: the slope of their logarithms.
fn grow(file: &mut File, rows: &[GrowthRow]) -> Option<f64> {
    let points: Vec<(f64, f64)> =
        rows.iter().map(|row| (f64::from(row.query_rows).ln(), row.rows.ln())).collect();
    let count = points.len().max(1) as f64;
    let (x, y) =
        (points.iter().map(|p| p.0).sum::<f64>() / count, points.iter().map(|p| p.1).sum::<f64>() / count);
    let spread: f64 = points.iter().map(|p| (p.0 - x) * (p.0 - x)).sum();
    if spread == 0.0 {
        return None;
    }
    let power = (points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / spread).clamp(0.0, 1.0);
    let power = rounded(power);
    match &mut file.misses {
        Some(Misses::Curve(curve)) => curve.query_rows_power = power,
        Some(Misses::Table(table)) => table.query_rows_power = power,
        Some(Misses::Steps(steps)) => steps.query_rows_power = power,
        None => return None,
    }
    Some(power)
}

fn residuals(setup: &Setup, measured: &Measurements) -> Result<Vec<Residual>> {
    let mut rows = Vec::with_capacity(measured.steps.len() + measured.overlap.len());
    for (i, row) in measured.steps.iter().enumerate() {
        let place = format!("steps[{i}]");
        rows.push(Residual {
            what: format!("batch {}, {} tokens, {} query rows", row.batch, row.context, row.query_rows),
            unit: "ms",
            measured: row.ms,
            fitted: step_ms(setup, row, &place)?,
            row: place,
        });
    }
    for (i, row) in measured.overlap.iter().enumerate() {
        rows.push(Residual {
            row: format!("overlap[{i}]"),
            what: format!("{}, {} misses", row.order, row.misses),
            unit: "us",
            measured: row.us,
            fitted: overhead_us(setup, row, i)?,
        });
    }
    Ok(rows)
}
