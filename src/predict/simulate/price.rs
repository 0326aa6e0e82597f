//! The prices of one layer in each order, by its misses: run on the clock, cached, interpolated.

use std::collections::HashMap;

use super::batch::Batch;
use super::world::World;
use crate::error::Result;
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

/// The key of a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Priced {
    batch: Batch,
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

/// Runs one layer in an order.
pub fn layer(setup: &Setup, batch: &Batch, share: f64, misses: f64, order: Overlap) -> Result<Price> {
    let layers = if batch.fill { FILL_LAYERS } else { 1 };
    let mut world = World::of_layers(setup, batch, layers)?;
    let (rows, orders) = (vec![misses; layers as usize], vec![order; layers as usize]);
    let times = world.step(setup, &rows, share, &orders)?;
    let layers = f64::from(layers);
    Ok(Price { ns: times.layers_ns.iter().sum::<f64>() / layers, busy_ns: times.busy_ns / layers })
}

/// The prices of one setup's layers so far.
#[derive(Debug, Default)]
pub struct Prices {
    known: HashMap<Priced, Price>,
}

impl Prices {
    /// The price of one layer with `rows` misses per request. `setup` is the same in every call.
    pub fn price(
        &mut self,
        setup: &Setup,
        batch: &Batch,
        share: f64,
        rows: f64,
        order: Overlap,
    ) -> Result<Price> {
        let most = f64::from(setup.shape().top_k) * f64::from(batch.query_rows);
        let grid = grid(most);
        let low = grid.clone().take_while(|point| *point <= rows).last().unwrap_or(0.0);
        let above = grid.clone().find(|point| *point > rows).unwrap_or(most);
        let part = if above > low { (rows - low) / (above - low) } else { 0.0 };
        let a = self.priced(setup, batch, share, low, order)?;
        if part == 0.0 {
            return Ok(a);
        }
        let b = self.priced(setup, batch, share, above, order)?;
        Ok(Price::between(a, b, part))
    }

    fn priced(
        &mut self,
        setup: &Setup,
        batch: &Batch,
        share: f64,
        rows: f64,
        order: Overlap,
    ) -> Result<Price> {
        let key = Priced { batch: *batch, share: share.to_bits(), order, rows: rows.to_bits() };
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let price = layer(setup, batch, share, rows, order)?;
        self.known.insert(key, price);
        Ok(price)
    }

    /// The order of least time and its price; among equals the simpler one.
    pub fn best(&mut self, setup: &Setup, batch: &Batch, share: f64, rows: f64) -> Result<(Overlap, Price)> {
        let mut best = (Overlap::None, self.price(setup, batch, share, rows, Overlap::None)?);
        for order in [Overlap::Da, Overlap::Dba] {
            let price = self.price(setup, batch, share, rows, order)?;
            if price.ns < best.1.ns {
                best = (order, price);
            }
        }
        Ok(best)
    }
}
