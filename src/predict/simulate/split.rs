//! A total of slots divided over the layers, so that the step takes the least time.
//!
//! Layers miss unlike: with the same slots one misses ten times what another does, and an order hides a
//! certain number of misses for nothing. So slots are taken where misses are hidden anyway and given where
//! they are waited for: every layer begins with the fewest slots that the misses are known for, and the next
//! piece goes to the layer whose time it shortens most, until the total is given out.

use super::{Options, Point, Simulator, bad};
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

/// The piece that is given out at a time, as a ratio.
const PIECE: f64 = 1.0 / 256.0;

/// How many pieces ahead a gain is looked for: a piece may gain nothing where its successors do.
const AHEAD: usize = 16;

impl Simulator {
    /// Divides `point`'s slots over the layers.
    ///
    /// # Errors
    /// As [`Simulator::run`]; [`crate::Kind::InvalidConfig`] for misses that are not a curve's, or a setup with
    /// draft layers.
    pub fn split(&mut self, point: &Point, options: &Options) -> Result<Split> {
        point.check(&self.setup)?;
        let Misses::Curve(curve) = self.misses(options)?.clone() else {
            return Err(bad("misses: only a curve says what other slots would miss"));
        };
        if self.setup.shape().draft_layers > 0 {
            return Err(bad("model.draft_layers: a split is of the layers that a curve has"));
        }
        let first = curve.least(point.context);
        if point.ratio < first || point.ratio >= 1.0 {
            return Err(bad(format!("ratio: a split needs {first:.4} or more, and less than 1")));
        }
        let times = self.times_by_pieces(point, options, first)?;
        let mut given = vec![0_usize; times.len()];
        let mut left = ((point.ratio - first) / PIECE * times.len() as f64 + 1e-9) as usize;
        while left > 0 {
            // The layer, how many pieces, and what each of them gains.
            let mut best = (0, 0, 0.0);
            for (layer, (of, given)) in times.iter().zip(&given).enumerate() {
                for ahead in 1..=AHEAD.min(left).min(of.len() - 1 - given) {
                    let gain = (of[*given] - of[given + ahead]) / ahead as f64;
                    if gain > best.2 {
                        best = (layer, ahead, gain);
                    }
                }
            }
            // What no layer gains from is given to none.
            if best.1 == 0 {
                break;
            }
            given[best.0] += best.1;
            left -= best.1;
        }
        let ratios: Vec<f64> = given.iter().map(|pieces| first + *pieces as f64 * PIECE).collect();
        let misses = Misses::Curve(curve);
        let mut rows = Vec::with_capacity(ratios.len());
        for (layer, ratio) in ratios.iter().enumerate() {
            rows.push(self.layer_misses(&misses, point, *ratio)?[layer]);
        }
        let (query_rows, query_rows_power) = (f64::from(point.mtp), misses.query_rows_power());
        Ok(Split { ratios, misses: Misses::Table(Table { query_rows, query_rows_power, rows }) })
    }

    fn layer_misses(&self, misses: &Misses, point: &Point, ratio: f64) -> Result<Vec<f64>> {
        let most = f64::from(self.setup.shape().top_k) * f64::from(point.mtp);
        let place = Place { context: point.context, ratio, query_rows: point.mtp, step: 0 };
        Ok(misses.by_layer(&place)?.into_iter().map(|rows| rows.min(most)).collect())
    }

    /// By layer, then by pieces beyond `first`, the time of the layer's best order.
    fn times_by_pieces(&mut self, point: &Point, options: &Options, first: f64) -> Result<Vec<Vec<f64>>> {
        let (batch, share) = (self.batch(point, options), self.share(point, options));
        let misses = self.misses(options)?.clone();
        let mut times = vec![Vec::new(); self.setup.shape().layers as usize];
        for piece in 0..=((1.0 - first) / PIECE) as usize {
            let rows = self.layer_misses(&misses, point, first + piece as f64 * PIECE)?;
            for (times, rows) in times.iter_mut().zip(rows) {
                times.push(self.best(&batch, share, rows)?.1.ns);
            }
        }
        Ok(times)
    }
}
