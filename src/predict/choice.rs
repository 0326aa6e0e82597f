//! Fills the prices from which orders are chosen: runs the schedule of one layer on the clock, at a setup's rates in
//! each order, over a grid of misses.
//!
//! The layers of a model differ only in their misses and in whether they select, so the same prices apply to all that
//! select, and others to the rest of each index group, behind a first layer in DA. Draft layers have others, of one
//! query row per draft pass and all their passes together. A price covers all micro-batches of the batch, because a
//! table is chosen for the whole step.

use crate::error::Result;
use crate::overlap::{Overlap, Prices};
use crate::predict::simulate::{LayerAt, Options, Point, Role, Simulator, grid};

impl Simulator {
    /// The prices of the orders at an operating point, whose own misses are not used; for
    /// [`Table::best`](crate::overlap::Table::best) and a [`Chooser`](crate::overlap::Chooser)'s buckets.
    /// The least time of a layer, over all misses and orders, counts as not exposed.
    ///
    /// # Errors
    /// Errors of [`Simulator::run`].
    pub fn prices(&mut self, point: &Point, options: &Options) -> Result<Prices> {
        let shape = *self.setup().shape();
        let most = f64::from(shape.top_k) * f64::from(point.mtp);
        let grid: Vec<f64> = grid(most).collect();
        let mut known: Vec<(Role, [Vec<f64>; 4])> = Vec::new();
        let mut layers = Vec::with_capacity(shape.layers as usize);
        for layer in 0..shape.layers {
            let role = Role::of(&shape, layer, Overlap::Da);
            if let Some((_, list)) = known.iter().find(|(other, _)| *other == role) {
                layers.push(list.clone());
                continue;
            }
            let list = self.price_list(point, options, &grid, role, 1)?;
            known.push((role, list.clone()));
            layers.push(list);
        }
        if shape.draft_layers > 0 {
            let passes = point.mtp.saturating_sub(1);
            let one = Point { mtp: 1, accept: 1.0, ..*point };
            let drafts = self.price_list(&one, options, &grid, Role::First, passes)?;
            layers.resize((shape.layers + shape.draft_layers) as usize, drafts);
        }
        Prices::new(grid, layers)
    }

    /// One layer's nanoseconds in each order, in `passes` passes over which the misses are divided.
    fn price_list(
        &mut self,
        point: &Point,
        options: &Options,
        grid: &[f64],
        role: Role,
        passes: u32,
    ) -> Result<[Vec<f64>; 4]> {
        let times = f64::from(passes);
        let mut list = [const { Vec::new() }; 4];
        for (prices, order) in list.iter_mut().zip(Overlap::ALL) {
            for misses in grid.iter().filter(|_| role.orders().contains(&order)) {
                let at = LayerAt { role, order, rows: misses / times.max(1.0) };
                let us = self.us_at(point, options, at)?;
                prices.push(us * times * 1e3);
            }
        }
        let least = list.iter().flatten().copied().fold(f64::INFINITY, f64::min);
        list.iter_mut().flatten().for_each(|ns| *ns -= least);
        Ok(list)
    }
}
