//! The simulator: runs the production schedule of a whole step on the virtual clock, with a setup's costs.
//!
//! [`enqueue_step`](crate::overlap::enqueue_step) enqueues a step, as in an engine, on a
//! [`ClockDevice`](crate::device::clock::ClockDevice) without memory. The engine's callbacks enqueue works at the
//! setup's costs; a gather takes the link's time for the rows that its layer misses. The simulator computes nothing
//! about overlap itself: the schedule's edges decide what is hidden.
//!
//! **Exposed time** is how much longer a step takes than the same step without misses in the order none: waits for
//! rows, and the extra cost of split attention.
//!
//! **Two micro-batches** use one compute stream, as engines launch them: layer by layer, one after the other. Each
//! hides the other's exchange of experts' tokens, which then is not charged. With [`Options::fill`] each has a compute
//! stream of its own, and one computes while the other waits for rows.
//!
//! **The host** enqueues a step while the device runs the previous one, so its time matters only if it is longer than
//! the device's ([`HostTime`]). It is not part of the step's time.
//!
//! **Sharded weights** ([`Options::sharded`]) are pulled by the production [`Ring`](crate::weights::Ring), on streams
//! of its own. The same step runs without pulls too: what it takes less is what they expose ([`Pulls`]), apart from
//! what gathers expose.
//!
//! **Order by layer** is the order of least time, found by running one layer on the clock for each order and
//! some numbers of misses. [`Simulator::run`] then simulates the whole step. [`Simulator::estimate`] adds up
//! those prices instead: it is faster, agrees to a percent, and has no spans.

mod batch;
mod engine;
mod host;
mod point;
mod price;
mod sharded;
mod split;
mod world;

use std::collections::HashMap;

pub use host::{Bound, HostTime};
pub use point::{Options, Order, Point, Traffic};
pub use sharded::{PULL_ASSUMPTIONS, PULLS, Pulls};
pub use split::Split;

pub(super) use price::{LayerAt, Role, grid};

use super::misses::{Misses, Place};
use super::setup::Setup;
use crate::device::clock::Span;
use crate::error::Result;
use crate::overlap::Overlap;
use batch::{Batch, draft_passes};
use point::bad;
use price::Prices;
use sharded::Sharded;
use world::{Times, World};

/// The result of a simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The point.
    pub point: Point,
    /// Milliseconds of the step, with all that it waits for.
    pub step_ms: f64,
    /// Milliseconds more than the same step without misses in the order none, if no weights are pulled in either.
    pub exposed_ms: f64,
    /// The milliseconds of these that are not works of the engine at full speed: waits for rows, and, if
    /// a gather takes SMs, the slowdown of concurrent works. The others are the extra cost of split attention.
    pub wait_ms: f64,
    /// By layer, draft layers with a pass last, the exposed microseconds; 0 or negative if an order
    /// hides more than the order none would without misses.
    pub exposed_us: Vec<f64>,
    /// What pulls of sharded weights add; none if no weights are sharded.
    pub pulls: Option<Pulls>,
    /// By layer the rows that a request misses.
    pub misses: Vec<f64>,
    /// By layer, the chosen order.
    pub overlap: Vec<Overlap>,
    /// Layers in the orders of [`Overlap::ALL`].
    pub counts: [u32; 4],
    /// Tokens a second of a node of 8 GPUs.
    pub throughput: f64,
    /// Tokens a second of one request.
    pub otps: f64,
    /// Whether two micro-batches ran.
    pub two_batch: bool,
    /// The host time of enqueueing the step.
    pub host: HostTime,
    /// The timeline of the step, if requested.
    pub spans: Vec<Span>,
}

/// GPUs of a node for [`Outcome::throughput`], the same for all setups. A setup's
/// `deployment.node_gpus` is for the exchange.
pub const NODE_GPUS: f64 = 8.0;

/// Simulates steps of one setup, and caches the costs of layers.
#[derive(Debug)]
pub struct Simulator {
    setup: Setup,
    /// Layers without misses in the order none, by the kind of batch.
    baselines: HashMap<Batch, Times>,
    prices: Prices,
}

impl Simulator {
    /// For a setup.
    pub fn new(setup: Setup) -> Simulator {
        Simulator { setup, baselines: HashMap::new(), prices: Prices::default() }
    }

    /// The setup.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Simulates one whole step.
    ///
    /// # Errors
    /// [`crate::Kind::InvalidConfig`] names the field of the point or of the setup; [`crate::Kind::OutOfRange`] names
    /// what the setup does not reach: the costs or misses there are unknown.
    pub fn run(&mut self, point: &Point, options: &Options) -> Result<Outcome> {
        let (batch, misses) = self.prepare(point, options)?;
        let overlap = self.orders(&batch, &misses, options)?;
        let baseline = self.baseline(&batch)?;
        options.traffic.check(&self.setup)?;
        let sharded =
            options.sharded.as_ref().map(|plan| Sharded::of(&self.setup, plan, &batch)).transpose()?;
        let step = Whole { batch: &batch, misses: &misses, overlap: &overlap, least_ns: baseline.total_ns };
        let spans = options.spans && sharded.is_none();
        let times = self.whole(&step, options.traffic, None, spans)?;
        let exposed_us = differences_us(&times, &baseline);
        let exposed_ns = times.total_ns - baseline.total_ns;
        let mut sums = Sums {
            step_ms: times.total_ns / 1e6,
            exposed_ms: exposed_ns / 1e6,
            wait_ms: (exposed_ns - (times.busy_ns - baseline.busy_ns)) / 1e6,
            exposed_us,
            pulls: None,
        };
        let Some(sharded) = sharded else {
            return Ok(outcome(&self.setup, point, &batch, sums, misses.rows, overlap, times.spans));
        };
        let slower = self.whole(&step, options.traffic, Some((&sharded, false)), false)?;
        let pulled = self.whole(&step, options.traffic, Some((&sharded, true)), options.spans)?;
        sums.step_ms = pulled.total_ns / 1e6;
        sums.pulls = Some(Pulls {
            exposed_ms: (pulled.total_ns - slower.total_ns) / 1e6,
            slower_ms: (slower.total_ns - times.total_ns) / 1e6,
            pull_us: sharded.pull_us,
            exposed_us: differences_us(&pulled, &slower),
        });
        Ok(outcome(&self.setup, point, &batch, sums, misses.rows, overlap, pulled.spans))
    }

    /// Runs a whole step on the clock, beside other traffic. With sharded weights the works are as slow as beside their
    /// pulls, and with `true` these run too.
    fn whole(
        &self,
        step: &Whole<'_>,
        traffic: Traffic,
        sharded: Option<(&Sharded, bool)>,
        spans: bool,
    ) -> Result<Times> {
        // Traffic must last as long as the step; otherwise it would affect only a part of it.
        let mut enough_ns = 2.0 * step.least_ns;
        loop {
            let mut world = World::new(&self.setup, step.batch, spans)?;
            if let Some((sharded, pulls)) = sharded {
                world.shard(sharded, pulls)?;
            }
            world.background(traffic, enough_ns)?;
            let Missing { rows, share } = step.misses;
            let times = world.step(&self.setup, rows, *share, step.overlap)?;
            if traffic == Traffic::default() || times.total_ns <= enough_ns {
                return Ok(times);
            }
            enough_ns *= 2.0;
        }
    }

    /// Estimates one step from the prices of its layers.
    ///
    /// # Errors
    /// Errors of [`Simulator::run`]; [`crate::Kind::InvalidConfig`] for traffic, for micro-batches that fill each
    /// other's waits and for sharded weights, which only a whole step models.
    pub fn estimate(&mut self, point: &Point, options: &Options) -> Result<Outcome> {
        let whole = options.spans || options.fill || options.sharded.is_some();
        if options.traffic != Traffic::default() || whole {
            return Err(bad(
                "options: traffic, spans, fill and sharded need a whole step; an estimate has none",
            ));
        }
        let (batch, misses) = self.prepare(point, options)?;
        let overlap = self.orders(&batch, &misses, options)?;
        let total_ns = self.baseline(&batch)?.total_ns;
        let mut exposed_us = Vec::with_capacity(misses.rows.len());
        let mut more_ns = 0.0;
        for (layer, (rows, order)) in misses.rows.iter().zip(&overlap).enumerate() {
            let (batch, share, passes) = self.layer_batch(&batch, misses.share, layer);
            let at = LayerAt { role: self.role(layer, &overlap), order: *order, rows: *rows };
            let bare = LayerAt { order: Overlap::None, rows: 0.0, ..at };
            let nothing = self.prices.price(&self.setup, &batch, share, bare)?;
            let price = self.prices.price(&self.setup, &batch, share, at)?;
            exposed_us.push(passes * (price.ns - nothing.ns) / 1e3);
            more_ns += passes * (price.busy_ns - nothing.busy_ns);
        }
        let exposed_ms = exposed_us.iter().sum::<f64>() / 1e3;
        let (step_ms, wait_ms) = (total_ns / 1e6 + exposed_ms, exposed_ms - more_ns / 1e6);
        let sums = Sums { step_ms, exposed_ms, wait_ms, exposed_us, pulls: None };
        Ok(outcome(&self.setup, point, &batch, sums, misses.rows, overlap, Vec::new()))
    }

    /// Microseconds of one layer that selects for itself, in an order, all its micro-batches together, if each request
    /// misses `misses` rows in it. For [`fit`](super::fit).
    ///
    /// # Errors
    /// Errors of [`Simulator::run`]; [`crate::Kind::InvalidConfig`] for the order ahead.
    pub fn layer_us(&mut self, point: &Point, options: &Options, misses: f64, order: Overlap) -> Result<f64> {
        self.us_at(point, options, LayerAt { role: Role::First, order, rows: misses })
    }

    /// As [`Simulator::layer_us`], for a layer with any role.
    pub(super) fn us_at(&mut self, point: &Point, options: &Options, at: LayerAt) -> Result<f64> {
        point.check(&self.setup)?;
        let batch = self.batch(point, options);
        let share = self.share(point, options);
        price::layer_price(&self.setup, &batch, share, at).map(|price| price.ns / 1e3)
    }

    /// The step's content and its misses.
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
        // The layers of a group have the same rows resident, and so the misses of the first.
        for layer in 0..rows.len() {
            rows[layer] = rows[shape.group_of(layer as u32).0 as usize];
        }
        // A draft pass is one query row of an average layer.
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

    /// Layers that run: draft layers only if there are drafts.
    fn layers(&self, batch: &Batch) -> usize {
        let shape = self.setup.shape();
        (shape.layers + if draft_passes(batch) > 0 { shape.draft_layers } else { 0 }) as usize
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
        // A table may include draft layers that have no pass at this point.
        let all = (self.setup.shape().layers + self.setup.shape().draft_layers) as usize;
        match &options.order {
            Order::All(Overlap::Ahead) => {
                let selects = |layer: u32| self.setup.shape().group_of(layer).0 == layer;
                let order = |layer| if selects(layer) { Overlap::Da } else { Overlap::Ahead };
                let orders: Vec<Overlap> = (0..misses.rows.len() as u32).map(order).collect();
                match orders.contains(&Overlap::Ahead) {
                    true => Ok(orders),
                    false => Err(bad("order: ahead needs layers that another one selects for")
                        .hint("choose a model with index groups, such as glm-5.2")),
                }
            }
            Order::All(order) => Ok(vec![*order; misses.rows.len()]),
            Order::Table(table) if table.len() == misses.rows.len() || table.len() == all => {
                Ok(table.iter().copied().take(misses.rows.len()).collect())
            }
            Order::Table(table) => {
                Err(bad("order: not one for each layer").with("orders", table.len() as u64))
            }
            Order::ByLayer => {
                let mut orders = Vec::with_capacity(misses.rows.len());
                for (layer, rows) in misses.rows.iter().enumerate() {
                    let (batch, share, _) = self.layer_batch(batch, misses.share, layer);
                    let role = self.role(layer, &orders);
                    orders.push(self.prices.best(&self.setup, &batch, share, role, *rows)?.0);
                }
                Ok(orders)
            }
        }
    }

    /// A layer's role, behind layers in these orders.
    fn role(&self, layer: usize, orders: &[Overlap]) -> Role {
        let shape = self.setup.shape();
        let first = orders.get(shape.group_of(layer as u32).0 as usize).copied().unwrap_or_default();
        Role::of(shape, layer as u32, first)
    }

    /// The step's content for one layer, the fraction of a request's misses that a query row reads there, and its
    /// passes: a draft layer has draft passes of one query row.
    fn layer_batch(&self, batch: &Batch, share: f64, layer: usize) -> (Batch, f64, f64) {
        match layer < self.setup.shape().layers as usize {
            true => (*batch, share, 1.0),
            false => (Batch { query_rows: 1, ..*batch }, 1.0, f64::from(draft_passes(batch))),
        }
    }
}

/// Rows that a request misses by layer, and the fraction of them that one query row reads.
struct Missing {
    rows: Vec<f64>,
    share: f64,
}

/// A whole step to run on the clock: its content, and the least that it takes.
struct Whole<'a> {
    batch: &'a Batch,
    misses: &'a Missing,
    overlap: &'a [Overlap],
    least_ns: f64,
}

/// By layer, how many microseconds longer a step takes than another one.
fn differences_us(longer: &Times, shorter: &Times) -> Vec<f64> {
    longer.layers_ns.iter().zip(&shorter.layers_ns).map(|(a, b)| (a - b) / 1e3).collect()
}

/// The times of a step.
struct Sums {
    step_ms: f64,
    exposed_ms: f64,
    wait_ms: f64,
    exposed_us: Vec<f64>,
    pulls: Option<Pulls>,
}

fn outcome(
    setup: &Setup,
    point: &Point,
    batch: &Batch,
    Sums { step_ms, exposed_ms, wait_ms, exposed_us, pulls }: Sums,
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
        pulls,
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
