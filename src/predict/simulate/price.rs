//! The prices of one layer in each order, by its misses: run on the clock, cached, interpolated.

use std::collections::HashMap;

use super::batch::Batch;
use super::world::World;
use crate::error::Result;
use crate::geometry::Shape;
use crate::overlap::Overlap;
use crate::predict::setup::Setup;

/// Rows a request at which layers are priced, dense where the orders cross; in between the price is
/// interpolated. [`grid`] gives the points for an operating point.
const GRID: [f64; 24] = [
    0.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 160.0, 192.0, 224.0, 256.0, 320.0, 384.0, 448.0,
    512.0, 640.0, 768.0, 1024.0, 1536.0, 2048.0, 4096.0, 8192.0,
];

/// The points below `most` rows, the most that a request can miss in a layer, and `most` itself.
pub fn grid(most: f64) -> impl Iterator<Item = f64> + Clone {
    GRID.into_iter().filter(move |rows| *rows < most).chain([most])
}

/// Layers of a run if micro-batches fill each other's waits: enough that the first and the last, which
/// have no neighbour, hardly matter.
const FILL_LAYERS: u32 = 8;

/// What a layer does for others, which decides what it runs and what hides its gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It selects, for itself and perhaps others.
    First,
    /// Another layer selects for it. Its price is what it adds to the group's time, as the mean over the layers behind
    /// the first, which all run in the same order.
    Follower {
        /// The layers of the group.
        layers: u32,
        /// The order of the first.
        first: Overlap,
    },
}

impl Role {
    /// The role of a layer of a model, if the one that selects for it runs in the order `first`.
    pub fn of(shape: &Shape, layer: u32, first: Overlap) -> Role {
        match shape.group_of(layer) {
            (selects, _) if selects == layer => Role::First,
            (_, layers) => Role::Follower { layers, first },
        }
    }

    /// The orders that such a layer can run in, the simplest first.
    pub const fn orders(self) -> [Overlap; 3] {
        match self {
            Role::First => Overlap::FIRST,
            Role::Follower { .. } => Overlap::FOLLOWER,
        }
    }
}

/// A layer of a step: its role, its order, and the rows that each request misses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerAt {
    pub role: Role,
    pub order: Overlap,
    pub rows: f64,
}

/// The key of a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Priced {
    batch: Batch,
    role: Role,
    /// The bits of the fraction of a request's misses that a query row reads.
    share: u64,
    order: Overlap,
    /// The bits of the rows that a request misses.
    rows: u64,
}

/// The price of one layer, all micro-batches together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    /// Nanoseconds.
    pub ns: f64,
    /// The nanoseconds of these in which the engine computes.
    pub busy_ns: f64,
}

impl Price {
    fn between(a: Price, b: Price, part: f64) -> Price {
        let of = |a: f64, b: f64| a * (1.0 - part) + b * part;
        Price { ns: of(a.ns, b.ns), busy_ns: of(a.busy_ns, b.busy_ns) }
    }
}

/// Runs one layer, or the group of a layer that another one selects for.
pub fn layer_price(setup: &Setup, batch: &Batch, share: f64, at: LayerAt) -> Result<Price> {
    let LayerAt { role, order, rows } = at;
    let least = if batch.fill { FILL_LAYERS } else { 1 };
    let (group, first) = match role {
        Role::First => (1, order),
        Role::Follower { layers, first } => (layers, first),
    };
    let groups = least.div_ceil(group);
    let layers = groups * group;
    let orders: Vec<Overlap> =
        (0..layers).map(|layer| if layer.is_multiple_of(group) { first } else { order }).collect();
    let mut world = World::of_layers(setup, batch, layers, group)?;
    let times = world.step(setup, &vec![rows; layers as usize], share, &orders)?;
    let whole = Price { ns: times.layers_ns.iter().sum(), busy_ns: times.busy_ns };
    let (others, parts) = match role {
        Role::First => (Price { ns: 0.0, busy_ns: 0.0 }, layers),
        Role::Follower { .. } => {
            let alone = layer_price(setup, batch, share, LayerAt { role: Role::First, order: first, rows })?;
            let times = f64::from(groups);
            (Price { ns: times * alone.ns, busy_ns: times * alone.busy_ns }, layers - groups)
        }
    };
    let of = |whole: f64, others: f64| (whole - others) / f64::from(parts);
    Ok(Price { ns: of(whole.ns, others.ns), busy_ns: of(whole.busy_ns, others.busy_ns) })
}

/// The prices of one setup's layers so far.
#[derive(Debug, Default)]
pub struct Prices {
    known: HashMap<Priced, Price>,
}

impl Prices {
    /// The price of one layer. `setup` is the same in every call.
    pub fn price(&mut self, setup: &Setup, batch: &Batch, share: f64, at: LayerAt) -> Result<Price> {
        let rows = at.rows;
        let most = f64::from(setup.shape().top_k) * f64::from(batch.query_rows);
        let grid = grid(most);
        let low = grid.clone().take_while(|point| *point <= rows).last().unwrap_or(0.0);
        let above = grid.clone().find(|point| *point > rows).unwrap_or(most);
        let part = if above > low { (rows - low) / (above - low) } else { 0.0 };
        let a = self.priced(setup, batch, share, LayerAt { rows: low, ..at })?;
        if part == 0.0 {
            return Ok(a);
        }
        let b = self.priced(setup, batch, share, LayerAt { rows: above, ..at })?;
        Ok(Price::between(a, b, part))
    }

    fn priced(&mut self, setup: &Setup, batch: &Batch, share: f64, at: LayerAt) -> Result<Price> {
        let LayerAt { role, order, rows } = at;
        let key = Priced { batch: *batch, role, share: share.to_bits(), order, rows: rows.to_bits() };
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let price = layer_price(setup, batch, share, at)?;
        self.known.insert(key, price);
        Ok(price)
    }

    /// The order of least time of a layer with this role, and its price; among equals the simpler one.
    pub fn best(
        &mut self,
        setup: &Setup,
        batch: &Batch,
        share: f64,
        role: Role,
        rows: f64,
    ) -> Result<(Overlap, Price)> {
        let [none, others @ ..] = role.orders();
        let mut best = (none, self.price(setup, batch, share, LayerAt { role, order: none, rows })?);
        for order in others {
            let price = self.price(setup, batch, share, LayerAt { role, order, rows })?;
            if price.ns < best.1.ns {
                best = (order, price);
            }
        }
        Ok(best)
    }
}
