//! The simulator's prediction for an operating point, at the rates of this run.
//!
//! The engine's works are the setup's, scaled by a factor, which the simulator does not support. Instead, the link is
//! made faster or slower by that factor, and all times are multiplied by it. The result is the same, because a step
//! consists only of times.

use forebay::Result;
use forebay::device::rates::{Rates, RowRate, RowRates};
use forebay::overlap::{Overlap, Prices};
use forebay::predict::misses::{Misses, Table};
use forebay::predict::setup::{Link, Setup};
use forebay::predict::simulate::{Options, Point as Place, Simulator};

use super::point::Point;

/// Microseconds of a layer that each order exposes, compared with the same layer without misses in the order none.
///
/// # Errors
/// Errors of the simulator for points that it does not reach.
pub fn exposed(setup: &Setup, rates: &Rates, point: &Point, scale: f64) -> Result<Vec<(Overlap, f64)>> {
    let setup = setup.on_link(Link::Rates(scaled(rates, scale)))?;
    let misses = Misses::Table(Table {
        query_rows: f64::from(point.query_rows),
        query_rows_power: setup.misses()?.query_rows_power(),
        rows: vec![f64::from(point.misses); point.layers as usize],
    });
    let place = Place {
        context: point.context,
        batch: point.batch,
        mtp: point.query_rows,
        accept: 1.0,
        ratio: f64::from(point.budget) / f64::from(point.context),
    };
    let options = Options { two_batch: Some(false), misses: Some(misses), ..Options::default() };
    let prices = Simulator::new(setup).prices(&place, &options)?;
    Ok(Overlap::FIRST.map(|order| (order, added_us(&prices, order, point.misses) * scale)).into())
}

/// The time that an order adds to a layer without misses in the order none.
fn added_us(prices: &Prices, order: Overlap, misses: u32) -> f64 {
    let ns = prices.exposed(0, order, f64::from(misses)) - prices.exposed(0, Overlap::None, 0.0);
    ns / 1e3
}

/// A link that relates to the setup's works as the measured one to works `scale` times as long.
fn scaled(rates: &Rates, scale: f64) -> Rates {
    let faster = |rows: &RowRates| RowRates {
        row_bytes: rows.row_bytes,
        points: rows
            .points
            .iter()
            .map(|point| RowRate { rows: point.rows, bytes_per_s: point.bytes_per_s * scale })
            .collect(),
    };
    Rates {
        gather: faster(&rates.gather),
        scatter: faster(&rates.scatter),
        copy_up: rates.copy_up * scale,
        copy_down: rates.copy_down * scale,
        launch_ns: rates.launch_ns / scale,
        ..*rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup::named("ess").unwrap().unwrap()
    }

    #[test]
    fn twice_the_work_on_half_the_link_exposes_twice_as_much() {
        let rates = Rates::preset("pcie5").unwrap();
        let slow = scaled(&rates, 0.5);
        let once = exposed(&setup(), &rates, &Point::ESS, 1.0).unwrap();
        let twice = exposed(&setup(), &slow, &Point::ESS, 2.0).unwrap();
        for ((order, once), (other, twice)) in once.iter().zip(&twice) {
            assert_eq!(order, other);
            assert!((2.0 * once - twice).abs() < 1e-3 * twice.abs().max(1.0), "{once} {twice}");
        }
    }

    #[test]
    fn the_gather_is_what_the_order_none_exposes_and_da_hides() {
        let rates = Rates::preset("pcie5").unwrap();
        let orders = exposed(&setup(), &rates, &Point::ESS, 1.0).unwrap();
        let gather = rates.gather.ns(190.0 * 160.0, 656) / 1e3;
        let none = orders[0].1;
        assert!(none > 0.9 * gather && none < 1.2 * gather, "{none} of {gather}");
        assert!(orders[1].1 < 0.7 * none, "{orders:?}");
    }
}
