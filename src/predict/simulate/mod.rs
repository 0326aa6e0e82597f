//! The simulator: the production schedule of a whole step on the virtual clock, with a setup's costs.
//!
//! A step is enqueued by [`enqueue_step`](crate::overlap::enqueue_step), as an engine's is, on a
//! [`ClockDevice`](crate::device::clock::ClockDevice) without memory. The engine's callbacks enqueue what the
//! setup says that each work costs; gathers take what the link takes for the rows that each layer misses.
//! Nothing about overlap is computed here: what is hidden is what the schedule's edges hide.
//!
//! **Exposed time** is what a step takes beyond the same step with no misses in the order none: waits for
//! rows, and what attention in parts costs more than attention in one.
//!
//! **Two micro-batches** share one compute stream, as engines launch them: layer by layer, one after the
//! other, each the other's cover for the exchange of experts' tokens, which then is not charged. With
//! [`Options::fill`] each has a compute stream of its own, and one computes while the other waits for rows.
//!
//! **The host** enqueues a step while the device runs the one before, so its time counts only where it is the longer of
//! the two ([`HostTime`]): it is no part of the step's.
//!
//! **Order by layer** is the order of least time, found by running one layer on the clock for each order and
//! some numbers of misses. [`Simulator::run`] then simulates the step whole, [`Simulator::estimate`] adds up
//! those prices: faster, the same to a percent, without spans.

mod engine;
mod host;
mod price;
mod split;
mod world;

use std::collections::HashMap;

use super::misses::{Misses, Place};
use super::outside;
use super::setup::Setup;
use crate::device::clock::Span;
use crate::error::{Error, Kind, Result};
use crate::overlap::Overlap;

pub use host::{Bound, HostTime};
pub use split::Split;

pub(super) use price::grid;
use price::{Price, Priced};
use world::{Batch, Times, World};

/// An operating point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Tokens of context of each request.
    pub context: u32,
    /// Requests of one GPU.
    pub batch: u32,
    /// Query rows of a step: 1 is no drafts.
    pub mtp: u32,
    /// Tokens that a step yields for each request, 1 to `mtp`.
    pub accept: f64,
    /// Slots over context, above 0; at 1 nothing is missed.
    pub ratio: f64,
}

/// The order of each layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Order {
    /// For each layer the one of least time.
    #[default]
    ByLayer,
    /// The same for all.
    All(Overlap),
    /// As given, one for each layer, draft layers last.
    Table(Vec<Overlap>),
}

/// Bytes that cross the link beside the step: warm-up, transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Host to device, bytes a second.
    pub to_device: f64,
    /// Device to host, bytes a second.
    pub to_host: f64,
}

impl Traffic {
    fn check(&self, setup: &Setup) -> Result<()> {
        let rates = setup.rates();
        for (name, rate, most) in
            [("to_device", self.to_device, rates.copy_up), ("to_host", self.to_host, rates.copy_down)]
        {
            if !(0.0..=most).contains(&rate) {
                return Err(bad(format!("traffic.{name}: {rate} bytes a second, the link copies {most}")));
            }
        }
        Ok(())
    }
}

/// How a step is simulated.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The order of each layer.
    pub order: Order,
    /// Two micro-batches; none takes the setup's word.
    pub two_batch: Option<bool>,
    /// Micro-batches have compute streams of their own.
    pub fill: bool,
    /// What else crosses the link.
    pub traffic: Traffic,
    /// Misses, instead of the setup's.
    pub misses: Option<Misses>,
    /// The step of a replay's misses.
    pub step: u32,
    /// Keep the spans.
    pub spans: bool,
}

/// What a step takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The point.
    pub point: Point,
    /// Milliseconds of the step.
    pub step_ms: f64,
    /// Milliseconds beyond the same step without misses in the order none.
    pub exposed_ms: f64,
    /// Of these the milliseconds that are not works of the engine at their full speed: waits for rows, and, where
    /// a gather takes SMs, what works run slower beside it. The others are what attention in parts costs more.
    pub wait_ms: f64,
    /// By layer, draft layers last where they have a pass, the exposed microseconds; 0 or below where an order
    /// hides more than the order none would without misses.
    pub exposed_us: Vec<f64>,
    /// By layer the rows that a request misses.
    pub misses: Vec<f64>,
    /// By layer the order that was taken.
    pub overlap: Vec<Overlap>,
    /// Layers in the orders of [`Overlap::ALL`].
    pub counts: [u32; 3],
    /// Tokens a second of a node of 8 GPUs.
    pub throughput: f64,
    /// Tokens a second of one request.
    pub otps: f64,
    /// Whether two micro-batches ran.
    pub two_batch: bool,
    /// What enqueueing the step takes of the host.
    pub host: HostTime,
    /// The timeline of the step, where it was asked for.
    pub spans: Vec<Span>,
}

/// GPUs of a node, for [`Outcome::throughput`]: throughputs of all setups are told alike. A setup's
/// `deployment.node_gpus` concerns the exchange.
pub const NODE_GPUS: f64 = 8.0;

/// The most requests and query rows of a simulated step.
const BATCH_MAX: u32 = 1 << 14;
const MTP_MAX: u32 = 64;

fn bad(place: impl Into<String>) -> Error {
    Error::new(Kind::InvalidConfig, "simulate").at(place.into())
}

impl Point {
    /// Whether the point can be simulated on `setup`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field; [`Kind::OutOfRange`] for a larger batch than is simulated.
    pub fn check(&self, setup: &Setup) -> Result<()> {
        let most = setup.dims().context_max;
        if self.context == 0 || self.context > most {
            let hint = "the context is what the model was made for, at most";
            return Err(bad("context").with("tokens", self.context).with("most", most).hint(hint));
        }
        if self.batch == 0 {
            return Err(bad("batch").with("requests", 0_u32).with("most", BATCH_MAX));
        }
        if self.batch > BATCH_MAX {
            let hint = "ask for a smaller batch";
            return Err(outside("batch").with("requests", self.batch).with("most", BATCH_MAX).hint(hint));
        }
        if self.mtp == 0 || self.mtp > MTP_MAX {
            return Err(bad("mtp").with("query_rows", self.mtp).with("most", MTP_MAX));
        }
        if !(1.0..=f64::from(self.mtp)).contains(&self.accept) {
            return Err(bad(format!("accept: {} is not from 1 to mtp", self.accept)));
        }
        if !(self.ratio.is_finite() && self.ratio > 0.0) {
            return Err(bad(format!("ratio: {} is not above 0", self.ratio)));
        }
        Ok(())
    }
}

/// Simulates steps of one setup, and remembers what layers cost.
#[derive(Debug)]
pub struct Simulator {
    setup: Setup,
    /// Layers without misses, in the order none, by what the batch is.
    baselines: HashMap<Batch, Times>,
    prices: HashMap<Priced, Price>,
}

impl Simulator {
    /// For a setup.
    pub fn new(setup: Setup) -> Simulator {
        Simulator { setup, baselines: HashMap::new(), prices: HashMap::new() }
    }

    /// The setup.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Simulates one whole step.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field of the point or of the setup; [`Kind::OutOfRange`] what the setup
    /// does not reach: costs or misses there are not known.
    pub fn run(&mut self, point: &Point, options: &Options) -> Result<Outcome> {
        let (batch, misses) = self.prepare(point, options)?;
        let overlap = self.orders(&batch, &misses, options)?;
        let baseline = self.baseline(&batch)?;
        options.traffic.check(&self.setup)?;
        // Traffic that ends before the step would be traffic beside a part of it.
        let mut enough_ns = 2.0 * baseline.total_ns;
        let times = loop {
            let mut world = World::new(&self.setup, &batch, options.spans)?;
            world.background(options.traffic, enough_ns)?;
            let times = world.step(&self.setup, &misses.rows, misses.share, &overlap)?;
            if options.traffic == Traffic::default() || times.total_ns <= enough_ns {
                break times;
            }
            enough_ns *= 2.0;
        };
        let exposed_us =
            times.layers_ns.iter().zip(&baseline.layers_ns).map(|(a, b)| (a - b) / 1e3).collect();
        let exposed_ns = times.total_ns - baseline.total_ns;
        let sums = Sums {
            step_ms: times.total_ns / 1e6,
            exposed_ms: exposed_ns / 1e6,
            wait_ms: (exposed_ns - (times.busy_ns - baseline.busy_ns)) / 1e6,
            exposed_us,
        };
        Ok(outcome(&self.setup, point, &batch, sums, misses.rows, overlap, times.spans))
    }

    /// Estimates one step from the prices of its layers.
    ///
    /// # Errors
    /// As [`Simulator::run`]; [`Kind::InvalidConfig`] for traffic and for micro-batches that fill each other's
    /// waits, which only a whole step meets.
    pub fn estimate(&mut self, point: &Point, options: &Options) -> Result<Outcome> {
        if options.traffic != Traffic::default() || options.spans || options.fill {
            return Err(bad("options: traffic, spans and fill are a whole step's; an estimate has none"));
        }
        let (batch, misses) = self.prepare(point, options)?;
        let overlap = self.orders(&batch, &misses, options)?;
        let total_ns = self.baseline(&batch)?.total_ns;
        let mut exposed_us = Vec::with_capacity(misses.rows.len());
        let mut more_ns = 0.0;
        for (layer, (rows, order)) in misses.rows.iter().zip(&overlap).enumerate() {
            let (batch, share, passes) = self.layer_batch(&batch, misses.share, layer);
            let nothing = self.price(&batch, share, 0.0, Overlap::None)?;
            let price = self.price(&batch, share, *rows, *order)?;
            exposed_us.push(passes * (price.ns - nothing.ns) / 1e3);
            more_ns += passes * (price.busy_ns - nothing.busy_ns);
        }
        let exposed_ms = exposed_us.iter().sum::<f64>() / 1e3;
        let (step_ms, wait_ms) = (total_ns / 1e6 + exposed_ms, exposed_ms - more_ns / 1e6);
        let sums = Sums { step_ms, exposed_ms, wait_ms, exposed_us };
        Ok(outcome(&self.setup, point, &batch, sums, misses.rows, overlap, Vec::new()))
    }

    /// Microseconds that one layer takes in an order, all its micro-batches together, when each request
    /// misses `misses` rows in it. For [`fit`](super::fit) and for tables of orders.
    ///
    /// # Errors
    /// As [`Simulator::run`].
    pub fn layer_us(&mut self, point: &Point, options: &Options, misses: f64, order: Overlap) -> Result<f64> {
        point.check(&self.setup)?;
        let batch = self.batch(point, options);
        let share = self.share(point, options);
        price::layer(&self.setup, &batch, share, misses, order).map(|price| price.ns / 1e3)
    }

    /// What runs, and what it misses.
    fn prepare(&self, point: &Point, options: &Options) -> Result<(Batch, Missing)> {
        point.check(&self.setup)?;
        let batch = self.batch(point, options);
        let shape = self.setup.shape();
        let most = f64::from(shape.top_k) * f64::from(point.mtp);
        let share = self.share(point, options);
        let mut rows = match point.ratio >= 1.0 {
            true => vec![0.0; shape.layers as usize],
            false => {
                let place = Place {
                    context: point.context,
                    ratio: point.ratio,
                    query_rows: point.mtp,
                    step: options.step,
                };
                self.misses(options)?.by_layer(&place)?
            }
        };
        if rows.len() != shape.layers as usize {
            return Err(bad("misses: not one number for each layer").with("numbers", rows.len() as u64));
        }
        // A draft layer's pass is one query row of an average layer.
        let mean = rows.iter().sum::<f64>() / rows.len().max(1) as f64;
        rows.iter_mut().for_each(|rows| *rows = rows.min(most));
        let draft = (mean * share).min(shape.top_k.into());
        rows.resize(self.layers(&batch), draft);
        Ok((batch, Missing { rows, share }))
    }

    fn misses<'a>(&'a self, options: &'a Options) -> Result<&'a Misses> {
        match &options.misses {
            Some(misses) => {
                misses.check_at(options.step, self.setup.shape())?;
                Ok(misses)
            }
            None => self.setup.misses(),
        }
    }

    fn share(&self, point: &Point, options: &Options) -> f64 {
        let misses = options.misses.as_ref().or(self.setup.file().misses.as_ref());
        misses.map_or(1.0, |misses| misses.share(point.mtp))
    }

    fn batch(&self, point: &Point, options: &Options) -> Batch {
        let two = options.two_batch.unwrap_or_else(|| self.setup.two_batch(point.batch, point.context));
        let two = two && point.batch >= 2;
        let first = if two { point.batch.div_ceil(2) } else { point.batch };
        Batch {
            rows: [first, point.batch - first],
            query_rows: point.mtp,
            context: point.context,
            fill: options.fill && two,
        }
    }

    /// Layers that run: draft layers only where there is something to draft.
    fn layers(&self, batch: &Batch) -> usize {
        let shape = self.setup.shape();
        (shape.layers + if world::draft_passes(batch) > 0 { shape.draft_layers } else { 0 }) as usize
    }

    fn baseline(&mut self, batch: &Batch) -> Result<Times> {
        if let Some(known) = self.baselines.get(batch) {
            return Ok(known.clone());
        }
        let layers = self.layers(batch);
        let (rows, orders) = (vec![0.0; layers], vec![Overlap::None; layers]);
        let times = World::new(&self.setup, batch, false)?.step(&self.setup, &rows, 1.0, &orders)?;
        self.baselines.insert(*batch, times.clone());
        Ok(times)
    }

    fn orders(&mut self, batch: &Batch, misses: &Missing, options: &Options) -> Result<Vec<Overlap>> {
        // A table may be of draft layers too that have no pass at this point.
        let all = (self.setup.shape().layers + self.setup.shape().draft_layers) as usize;
        match &options.order {
            Order::All(order) => Ok(vec![*order; misses.rows.len()]),
            Order::Table(table) if table.len() == misses.rows.len() || table.len() == all => {
                Ok(table.iter().copied().take(misses.rows.len()).collect())
            }
            Order::Table(table) => {
                Err(bad("order: not one for each layer").with("orders", table.len() as u64))
            }
            Order::ByLayer => {
                let layers = misses.rows.iter().enumerate();
                let best = layers.map(|(layer, rows)| {
                    let (batch, share, _) = self.layer_batch(batch, misses.share, layer);
                    self.best(&batch, share, *rows).map(|best| best.0)
                });
                best.collect()
            }
        }
    }

    /// What runs in a layer, the share of a request's misses that a query row reads there, and how often: a
    /// draft layer has passes of one query row.
    fn layer_batch(&self, batch: &Batch, share: f64, layer: usize) -> (Batch, f64, f64) {
        match layer < self.setup.shape().layers as usize {
            true => (*batch, share, 1.0),
            false => (Batch { query_rows: 1, ..*batch }, 1.0, f64::from(world::draft_passes(batch))),
        }
    }
}

/// Rows that a request misses by layer, and the share of them that one query row reads.
struct Missing {
    rows: Vec<f64>,
    share: f64,
}

/// A step's times.
struct Sums {
    step_ms: f64,
    exposed_ms: f64,
    wait_ms: f64,
    exposed_us: Vec<f64>,
}

fn outcome(
    setup: &Setup,
    point: &Point,
    batch: &Batch,
    Sums { step_ms, exposed_ms, wait_ms, exposed_us }: Sums,
    misses: Vec<f64>,
    overlap: Vec<Overlap>,
    spans: Vec<Span>,
) -> Outcome {
    let counts = Overlap::ALL.map(|order| overlap.iter().filter(|o| **o == order).count() as u32);
    let otps = point.accept / step_ms * 1e3;
    let throughput = NODE_GPUS * f64::from(point.batch) * otps;
    let two_batch = batch.rows[1] > 0;
    let host = HostTime::of(setup, batch, &overlap);
    Outcome {
        point: *point,
        step_ms,
        exposed_ms,
        wait_ms,
        exposed_us,
        misses,
        overlap,
        counts,
        throughput,
        otps,
        two_batch,
        host,
        spans,
    }
}
