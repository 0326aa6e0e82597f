//! Divides a total of slots over the layers so that the step takes the least time.
//!
//! Layers differ in their misses: with the same slots one misses ten times as many rows as another, and an order hides
//! a certain number of misses at no cost. So slots move from layers whose misses are hidden anyway to layers that wait
//! for them. Every layer begins with the fewest slots for which the misses are known. The next pieces go to the layer
//! whose time each of them shortens most, until the total is given out. A layer's time as a function of its slots has
//! plateaus, where an order hides all misses at its fixed cost; so the search for a gain extends to the whole context,
//! along the lower convex hull. If a uniform division is better, it is the result.

use super::Simulator;
use super::point::{Options, Point, bad};
use super::price::Role;
use crate::error::Result;
use crate::predict::misses::{Misses, Place, Table};

/// A division of slots.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// Slots over context, by layer.
    pub ratios: Vec<f64>,
    /// Rows that a request misses by layer, for [`Options::misses`].
    pub misses: Misses,
}

/// The size of a piece, as a ratio.
const PIECE: f64 = 1.0 / 256.0;

/// A layer's slots over context with `pieces` pieces beyond `first`; the last piece may be partial.
fn ratio_of(first: f64, pieces: usize) -> f64 {
    (first + pieces as f64 * PIECE).min(1.0)
}

/// The next corner of the lower convex hull of `times` after `given` pieces, at most `most` ahead: its distance in
/// pieces, and the gain of each piece. None if nothing is gained.
fn corner(times: &[f64], given: usize, most: usize) -> Option<(usize, f64)> {
    let (now, ahead) = (times.get(given)?, times.get(given + 1..)?);
    let gains = ahead.iter().take(most).zip(1_usize..);
    let gains = gains.map(|(time, ahead)| (ahead, (now - time) / ahead as f64));
    gains.filter(|(_, gain)| *gain > 0.0).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// Gives `left` pieces to layers whose times by pieces are `times`; returns the pieces of each.
fn deal(times: &[Vec<f64>], mut left: usize) -> Vec<usize> {
    let mut given = vec![0; times.len()];
    let mut corners: Vec<_> = times.iter().map(|times| corner(times, 0, left)).collect();
    while left > 0 {
        let gains = corners.iter().enumerate().filter_map(|(layer, c)| c.map(|(n, gain)| (layer, n, gain)));
        let Some((layer, pieces, _)) = gains.max_by(|a, b| a.2.total_cmp(&b.2)) else { break };
        // A corner found when more was left may be out of reach now.
        if pieces <= left {
            given[layer] += pieces;
            left -= pieces;
        }
        corners[layer] = corner(&times[layer], given[layer], left);
    }
    given
}

/// Gives the rest of `total` to the layers in turn, each up to the whole context.
fn fill(ratios: &mut [f64], total: f64) {
    let mut left = total - ratios.iter().sum::<f64>();
    for ratio in ratios {
        let more = left.clamp(0.0, 1.0 - *ratio);
        *ratio += more;
        left -= more;
    }
}

impl Simulator {
    /// Divides all of `point`'s slots over the layers; the step is never longer than with a uniform division.
    ///
    /// # Errors
    /// Errors of [`Simulator::run`]; [`crate::Kind::InvalidConfig`] for misses that are not a curve, or a setup with
    /// draft layers or index groups.
    pub fn split(&mut self, point: &Point, options: &Options) -> Result<Split> {
        point.check(&self.setup)?;
        let Misses::Curve(curve) = self.misses(options)?.clone() else {
            return Err(bad("misses: a split needs a curve, which has the misses of other slots"));
        };
        if self.setup.shape().draft_layers > 0 {
            return Err(bad("model.draft_layers: a split needs a setup without draft layers"));
        }
        if self.setup.shape().group_layers > 1 {
            return Err(bad("model: a split needs a model whose layers each select for themselves"));
        }
        let first = curve.least(point.context);
        if point.ratio < first || point.ratio >= 1.0 {
            return Err(bad(format!("ratio: a split needs {first:.4} or more, and less than 1")));
        }
        let times = self.times_by_pieces(point, options, first)?;
        let total = point.ratio * times.len() as f64;
        let given = deal(&times, ((total - first * times.len() as f64) / PIECE + 1e-9) as usize);
        let mut ratios: Vec<f64> = given.iter().map(|pieces| ratio_of(first, *pieces)).collect();
        fill(&mut ratios, total);
        let misses = Misses::Curve(curve);
        let split = self.split_of(&misses, point, ratios)?;
        let alike = self.split_of(&misses, point, vec![point.ratio; times.len()])?;
        let mut step_ms = |split: &Split| -> Result<f64> {
            let options = Options { misses: Some(split.misses.clone()), spans: false, ..options.clone() };
            Ok(self.run(point, &options)?.step_ms)
        };
        Ok(if step_ms(&split)? < step_ms(&alike)? { split } else { alike })
    }

    fn split_of(&self, misses: &Misses, point: &Point, ratios: Vec<f64>) -> Result<Split> {
        let mut rows = Vec::with_capacity(ratios.len());
        for (layer, ratio) in ratios.iter().enumerate() {
            rows.push(self.layer_misses(misses, point, *ratio)?[layer]);
        }
        let (query_rows, query_rows_power) = (f64::from(point.mtp), misses.query_rows_power());
        Ok(Split { ratios, misses: Misses::Table(Table { query_rows, query_rows_power, rows }) })
    }

    fn layer_misses(&self, misses: &Misses, point: &Point, ratio: f64) -> Result<Vec<f64>> {
        let most = f64::from(self.setup.shape().top_k) * f64::from(point.mtp);
        let place = Place { context: point.context, ratio, query_rows: point.mtp, step: 0 };
        Ok(misses.by_layer(&place)?.into_iter().map(|rows| rows.min(most)).collect())
    }

    /// By layer, then by pieces beyond `first`: the time of the layer's best order.
    fn times_by_pieces(&mut self, point: &Point, options: &Options, first: f64) -> Result<Vec<Vec<f64>>> {
        let (batch, share) = (self.batch(point, options), self.share(point, options));
        let misses = self.misses(options)?.clone();
        let mut times = vec![Vec::new(); self.setup.shape().layers as usize];
        for piece in 0..=((1.0 - first) / PIECE).ceil() as usize {
            let rows = self.layer_misses(&misses, point, ratio_of(first, piece))?;
            for (times, rows) in times.iter_mut().zip(rows) {
                times.push(self.prices.best(&self.setup, &batch, share, Role::First, rows)?.1.ns);
            }
        }
        Ok(times)
    }
}
