//! The cost of one work of an engine, measured at points: a grid, its interpolation, and the rules outside the grid.
//!
//! **Between points** the cost is multilinear in the grid's axes, and exact at a point. **Below the first
//! point** of an axis the first point's cost applies: launches and weights bound small work, and they do not
//! shrink. **Above the last** point the increase of the roofline from there is added, up to [`BEYOND`] times the last
//! point. Farther out the cost is unknown, which is an error, as is a hole in the grid.

use serde::{Deserialize, Serialize};

use super::{finite, outside, wrong};
use crate::error::Result;

/// How far beyond its last point an axis may be evaluated, as a factor.
pub const BEYOND: f64 = 2.0;

/// The size of a work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Batch rows.
    pub rows: f64,
    /// Query rows of each.
    pub query_rows: f64,
    /// Tokens of context of each request.
    pub context: f64,
    /// Keys that attention reads for each query row.
    pub width: f64,
}

impl Load {
    /// Query rows of the whole batch.
    pub fn tokens(&self) -> f64 {
        self.rows * self.query_rows
    }
}

/// A quantity that a cost depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AxisName {
    /// Batch rows.
    Rows,
    /// Query rows of a batch row.
    QueryRows,
    /// Batch rows times query rows.
    Tokens,
    /// Tokens of context.
    Context,
    /// Keys of one query row.
    Width,
}

impl AxisName {
    fn of(self, load: &Load) -> f64 {
        match self {
            AxisName::Rows => load.rows,
            AxisName::QueryRows => load.query_rows,
            AxisName::Tokens => load.tokens(),
            AxisName::Context => load.context,
            AxisName::Width => load.width,
        }
    }

    fn set(self, load: &mut Load, value: f64) {
        match self {
            AxisName::Rows => load.rows = value,
            AxisName::QueryRows => load.query_rows = value,
            AxisName::Tokens => load.rows = value / load.query_rows,
            AxisName::Context => load.context = value,
            AxisName::Width => load.width = value,
        }
    }

    const fn text(self) -> &'static str {
        match self {
            AxisName::Rows => "rows",
            AxisName::QueryRows => "query_rows",
            AxisName::Tokens => "tokens",
            AxisName::Context => "context",
            AxisName::Width => "width",
        }
    }
}

/// One axis of a grid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Its quantity.
    pub name: AxisName,
    /// The points, ascending, positive.
    pub at: Vec<f64>,
}

/// The costs of one work at the points of a grid, in microseconds for one micro-batch and layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// The axes; none for a constant.
    pub axes: Vec<Axis>,
    /// The values, with the last axis fastest. None is a hole.
    pub us: Vec<Option<f64>>,
}

/// The most values of a grid.
const VALUES_MAX: usize = 1 << 16;

impl Cost {
    /// A grid over `axes` filled by `us`.
    pub fn filled(axes: Vec<Axis>, us: impl Fn(&Load) -> f64) -> Cost {
        let count = axes.iter().map(|axis| axis.at.len()).product();
        let value = |index: usize| {
            let mut load = Load { rows: 1.0, query_rows: 1.0, context: 1.0, width: 1.0 };
            let mut left = index;
            for axis in axes.iter().rev() {
                axis.name.set(&mut load, axis.at[left % axis.at.len()]);
                left /= axis.at.len();
            }
            Some(us(&load))
        };
        let us = (0..count).map(value).collect();
        Cost { axes, us }
    }

    /// Checks that the grid is complete; `place` is its field path.
    ///
    /// # Errors
    /// [`crate::Kind::InvalidConfig`] names the field: an axis without points or not ascending, an axis that appears
    /// twice, missing values, a hole, a negative value, or NaN.
    pub fn check(&self, place: &str) -> Result<()> {
        let mut count = 1_usize;
        for (i, axis) in self.axes.iter().enumerate() {
            let at = format!("{place}.axes[{i}].at");
            if self.axes[..i].iter().any(|other| other.name == axis.name) {
                return Err(wrong(format!("{place}.axes[{i}].name: appears twice")));
            }
            if axis.at.is_empty() || !axis.at.array_windows().all(|[a, b]| a < b) {
                return Err(wrong(format!("{at}: no points, or not ascending")));
            }
            for (j, point) in axis.at.iter().enumerate() {
                finite(*point, || format!("{at}[{j}]"))?;
                if *point <= 0.0 {
                    return Err(wrong(format!("{at}[{j}]: not above 0")));
                }
            }
            count = count.saturating_mul(axis.at.len());
        }
        let has = |name| self.axes.iter().any(|axis| axis.name == name);
        if has(AxisName::Tokens) && (has(AxisName::Rows) || has(AxisName::QueryRows)) {
            return Err(wrong(format!(
                "{place}.axes: tokens are rows times query_rows; use one or the other"
            )));
        }
        if count > VALUES_MAX || self.us.len() != count {
            return Err(wrong(format!("{place}.us: not one value for each point of the axes"))
                .with("values", self.us.len() as u64)
                .with("points", count as u64));
        }
        for (i, value) in self.us.iter().enumerate() {
            let field = || format!("{place}.us[{i}] ({})", self.point(i));
            match value {
                None => return Err(wrong(format!("{}: a hole", field()))),
                Some(us) => finite(*us, field)?,
            }
        }
        Ok(())
    }

    /// The point of value `index`, in words.
    fn point(&self, index: usize) -> String {
        let mut left = index;
        let mut words: Vec<String> = Vec::new();
        for axis in self.axes.iter().rev() {
            words.push(format!("{} {}", axis.name.text(), axis.at[left % axis.at.len()]));
            left /= axis.at.len();
        }
        words.reverse();
        words.join(", ")
    }

    /// The cost of `load` in microseconds; `roofline` gives the increase beyond the last points, `place` is
    /// the field of `costs`.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfRange`] for a load more than [`BEYOND`] times beyond an axis's last point.
    pub fn us(&self, load: &Load, roofline: impl Fn(&Load) -> f64, place: &str) -> Result<f64> {
        let mut inside = *load;
        let mut beyond = false;
        for axis in &self.axes {
            let (asked, last) = (axis.name.of(load), axis.at[axis.at.len() - 1]);
            if asked > BEYOND * last {
                return Err(outside(format!(
                    "costs.{place}: {} beyond twice the last point",
                    axis.name.text()
                ))
                .with("asked", asked as u64)
                .with("last", last as u64));
            }
            if asked > last {
                axis.name.set(&mut inside, last);
                beyond = true;
            }
        }
        let measured = self.inside(&inside);
        match beyond {
            true => Ok(measured + (roofline(load) - roofline(&inside)).max(0.0)),
            false => Ok(measured),
        }
    }

    /// Multilinear interpolation; every axis is clamped to its ends.
    fn inside(&self, load: &Load) -> f64 {
        // The cell's corners, as (index into `us`, weight), axis by axis: at most 2^5.
        let mut corners = [(0_usize, 0.0_f64); 32];
        corners[0].1 = 1.0;
        let mut count = 1;
        for axis in &self.axes {
            let x = axis.name.of(load);
            let above = axis.at.partition_point(|point| *point <= x);
            let low = above.saturating_sub(1);
            let high = above.min(axis.at.len() - 1);
            let width = axis.at[high] - axis.at[low];
            let share = if width > 0.0 && above > 0 { (x - axis.at[low]) / width } else { 0.0 };
            let before = count;
            for i in 0..before {
                let (index, weight) = corners[i];
                corners[i] = (index * axis.at.len() + low, weight * (1.0 - share));
                if share > 0.0 {
                    corners[count] = (index * axis.at.len() + high, weight * share);
                    count += 1;
                }
            }
        }
        corners[..count].iter().map(|(index, weight)| self.us[*index].unwrap_or(0.0) * weight).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(name: AxisName, at: &[f64]) -> Axis {
        Axis { name, at: at.to_vec() }
    }

    fn load(rows: f64, context: f64) -> Load {
        Load { rows, query_rows: 2.0, context, width: 64.0 }
    }

    fn grid() -> Cost {
        let axes = vec![axis(AxisName::Rows, &[1.0, 4.0, 8.0]), axis(AxisName::Context, &[10.0, 30.0])];
        Cost::filled(axes, |at| at.rows * at.rows + 7.0 * at.context)
    }

    #[test]
    fn a_point_is_exact_and_between_points_it_is_linear_in_each_axis() {
        let grid = grid();
        grid.check("g").unwrap();
        for (rows, context) in [(1.0, 10.0), (4.0, 30.0), (8.0, 10.0), (8.0, 30.0)] {
            assert_eq!(grid.us(&load(rows, context), |_| 0.0, "g").unwrap(), rows * rows + 7.0 * context);
        }
        assert_eq!(grid.us(&load(6.0, 15.0), |_| 0.0, "g").unwrap(), 40.0 + 105.0);
    }

    #[test]
    fn below_the_first_point_it_holds_and_above_the_last_the_roofline_rises() {
        let grid = grid();
        let roof = |at: &Load| 3.0 * at.rows;
        assert_eq!(grid.us(&load(0.5, 10.0), roof, "g").unwrap(), 71.0);
        assert_eq!(grid.us(&load(10.0, 30.0), roof, "g").unwrap(), 274.0 + 6.0);
        let far = grid.us(&load(16.5, 30.0), roof, "index").unwrap_err();
        assert!(far.to_string().contains("costs.index: rows beyond twice"), "{far}");
    }

    #[test]
    fn tokens_are_rows_times_query_rows() {
        let grid = Cost::filled(vec![axis(AxisName::Tokens, &[2.0, 8.0])], |at| at.tokens());
        assert_eq!(grid.us(&load(3.0, 1.0), |_| 0.0, "g").unwrap(), 6.0);
        assert_eq!(grid.us(&load(6.0, 1.0), |at| at.rows, "g").unwrap(), 8.0 + 2.0);
    }

    #[test]
    fn holes_and_wrong_numbers_are_named() {
        let refused = |change: fn(&mut Cost), words: &str| {
            let mut grid = grid();
            change(&mut grid);
            let text = grid.check("costs.index").unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        };
        refused(|g| g.us[3] = None, "costs.index.us[3] (rows 4, context 30): a hole");
        refused(|g| g.us[0] = Some(-1.0), "costs.index.us[0]");
        refused(|g| g.us[5] = Some(f64::NAN), "costs.index.us[5]");
        refused(|g| g.us[5] = Some(f64::INFINITY), "costs.index.us[5]");
        refused(|g| g.us.truncate(5), "costs.index.us");
        refused(|g| g.axes[0].at[1] = 1.0, "costs.index.axes[0].at");
        refused(|g| g.axes[1].at.clear(), "costs.index.axes[1].at");
        refused(|g| g.axes[1].name = AxisName::Rows, "costs.index.axes[1].name");
        refused(|g| g.axes[1].name = AxisName::Tokens, "use one or the other");
        refused(|g| g.axes[1].at[0] = f64::NAN, "costs.index.axes[1].at");
    }
}
