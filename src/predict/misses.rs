//! Models how many rows a request fetches in a layer and step.
//!
//! There are three sources, each of which gives rows by layer. A **curve** has means over the layers by ratio and
//! context, and each layer's misses relative to the mean. A **table** has rows by layer for one operating point.
//! **Steps** are the counts of a replay, by step and layer. A *miss* is counted once for each request, even if several
//! of its query rows select the row, because the gather fetches it once.
//!
//! # The curve between and beyond its points
//! Misses fall about exponentially with the ratio, so their logarithm is interpolated: linearly in the ratio,
//! and linearly in the logarithm of the context. Above the last ratio they fall linearly to none at 1. Below
//! the first ratio they are unknown, which is an error. A context outside the measured ones has the misses of the
//! nearest measured one at the same number of slots, up to twice or down to half; farther out is an error.
//!
//! # Query rows
//! A step of more query rows fetches more, but not in proportion, because they select some of the same rows. The curve
//! was measured at one number of query rows, and is scaled by a power of their number.

use serde::{Deserialize, Serialize};

use super::{finite, outside, positive, wrong};
use crate::error::Result;
use crate::geometry::Shape;

/// Means by ratio and context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mean {
    /// Tokens of context, ascending.
    pub context: Vec<f64>,
    /// Slots over context, ascending, above 0 and below 1.
    pub ratio: Vec<f64>,
    /// Rows a request, mean over the layers; by context, then by ratio. None is a hole.
    pub rows: Vec<Vec<Option<f64>>>,
}

/// The distribution of misses over the layers at one context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// Tokens of context.
    pub context: f64,
    /// Rows by layer; only their ratios to the mean matter.
    pub rows: Vec<f64>,
}

/// See the module's head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// The query rows at which it was measured.
    pub query_rows: f64,
    /// Misses grow with this power of the query rows, 0 to 1.
    pub query_rows_power: f64,
    /// The means.
    pub mean: Mean,
    /// By ascending context, one or more; between two of them the logarithm of the context interpolates.
    pub layers: Vec<LayerShape>,
}

/// Rows by layer of one operating point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The query rows at which it was measured.
    pub query_rows: f64,
    /// As in [`Curve`].
    pub query_rows_power: f64,
    /// Rows a request by layer.
    pub rows: Vec<f64>,
}

/// The counts of a replay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Steps {
    /// Query rows of the replay's steps.
    pub query_rows: f64,
    /// As in [`Curve`].
    pub query_rows_power: f64,
    /// Rows a request, by step and layer.
    pub rows: Vec<Vec<f64>>,
}

/// The source of misses; see the module's head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Misses {
    /// By ratio and context.
    Curve(Curve),
    /// Of one operating point.
    Table(Table),
    /// Of a replay.
    Steps(Steps),
}

/// An operating point for misses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Tokens of context.
    pub context: u32,
    /// Slots over context.
    pub ratio: f64,
    /// Query rows of a step.
    pub query_rows: u32,
    /// The step; beyond a replay's last step it continues with the first.
    pub step: u32,
}

/// The most steps of a replay, because each is simulated separately.
pub const STEPS_MAX: usize = 1 << 14;

/// How far beyond a measured context another may use its misses, as a factor.
const CONTEXT_BEYOND: f64 = 2.0;

fn of_layers(rows: &[f64], layers: u32, most: f64, place: impl Fn() -> String) -> Result<()> {
    if rows.len() != layers as usize {
        return Err(wrong(format!("{}: not one number for each layer of the model", place()))
            .with("numbers", rows.len() as u64)
            .with("layers", layers));
    }
    rows.iter().enumerate().try_for_each(|(i, rows)| {
        finite(*rows, || format!("{}[{i}]", place()))?;
        // A mean may exceed it by decimal rounding.
        match *rows <= most * (1.0 + 1e-6) {
            true => Ok(()),
            false => Err(wrong(format!("{}[{i}]: {rows}, but a request selects {most} at most", place()))),
        }
    })
}

fn query_rows(rows: f64, power: f64, kind: &str) -> Result<()> {
    positive(rows, || format!("misses.{kind}.query_rows"))?;
    match (0.0..=1.0).contains(&power) {
        true => Ok(()),
        false => Err(wrong(format!("misses.{kind}.query_rows_power: {power} is not from 0 to 1"))),
    }
}

impl Misses {
    /// Checks that the numbers are complete and match the model's layers. In a table and in steps no number exceeds
    /// the rows that a request selects, top-k times query rows; a curve's larger values are limited to that.
    ///
    /// # Errors
    /// [`crate::Kind::InvalidConfig`] names the field.
    pub fn check(&self, shape: &Shape) -> Result<()> {
        let (layers, top_k) = (shape.layers, f64::from(shape.top_k));
        match self {
            Misses::Curve(curve) => curve.check(layers),
            Misses::Table(table) => {
                query_rows(table.query_rows, table.query_rows_power, "table")?;
                of_layers(&table.rows, layers, top_k * table.query_rows, || "misses.table.rows".to_owned())
            }
            Misses::Steps(steps) => {
                query_rows(steps.query_rows, steps.query_rows_power, "steps")?;
                if steps.rows.is_empty() {
                    return Err(wrong("misses.steps.rows: no steps"));
                }
                if steps.rows.len() > STEPS_MAX {
                    return Err(wrong("misses.steps.rows: too many steps to simulate each")
                        .with("steps", steps.rows.len() as u64)
                        .with("most", STEPS_MAX as u64));
                }
                (0..steps.rows.len()).try_for_each(|i| steps.check(i, shape))
            }
        }
    }

    /// As [`Misses::check`] for the data that [`Misses::by_layer`] uses: of a replay only the given step. So a check
    /// before every step costs a step, and not all of them.
    pub(super) fn check_at(&self, step: u32, shape: &Shape) -> Result<()> {
        match self {
            Misses::Steps(steps) if !steps.rows.is_empty() => {
                query_rows(steps.query_rows, steps.query_rows_power, "steps")?;
                steps.check(step as usize % steps.rows.len(), shape)
            }
            other => other.check(shape),
        }
    }

    /// Rows that a request fetches in each layer.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfRange`] for a ratio or a context that the curve does not reach.
    pub fn by_layer(&self, place: &Place) -> Result<Vec<f64>> {
        let scale = self.growth(place.query_rows);
        let scaled = |rows: &[f64]| rows.iter().map(|rows| rows * scale).collect();
        match self {
            Misses::Table(table) => Ok(scaled(&table.rows)),
            Misses::Steps(steps) => Ok(scaled(&steps.rows[place.step as usize % steps.rows.len()])),
            Misses::Curve(curve) => {
                let mean = curve.mean(f64::from(place.context), place.ratio)?;
                let layers = curve.layers.first().map_or(0, |shape| shape.rows.len());
                let mut rows = vec![mean * scale; layers];
                for (layer, rows) in rows.iter_mut().enumerate() {
                    *rows *= curve.weight(layer, f64::from(place.context));
                }
                Ok(rows)
            }
        }
    }

    /// The mean over the layers.
    ///
    /// # Errors
    /// Errors of [`Misses::by_layer`].
    pub fn mean(&self, place: &Place) -> Result<f64> {
        if let Misses::Curve(curve) = self {
            return Ok(curve.mean(f64::from(place.context), place.ratio)? * self.growth(place.query_rows));
        }
        let rows = self.by_layer(place)?;
        Ok(rows.iter().sum::<f64>() / rows.len().max(1) as f64)
    }

    /// The same misses for a model of `layers` layers: each takes the numbers of the layer at its relative depth.
    pub(super) fn spread(&self, layers: u32) -> Misses {
        let deal = |rows: &Vec<f64>| -> Vec<f64> {
            let depth = |layer: u32| u64::from(layer) * rows.len() as u64 / u64::from(layers.max(1));
            (0..layers).filter_map(|layer| rows.get(depth(layer) as usize).copied()).collect()
        };
        let mut spread = self.clone();
        match &mut spread {
            Misses::Curve(curve) => curve.layers.iter_mut().for_each(|shape| shape.rows = deal(&shape.rows)),
            Misses::Table(table) => table.rows = deal(&table.rows),
            Misses::Steps(steps) => steps.rows.iter_mut().for_each(|rows| *rows = deal(rows)),
        }
        spread
    }

    /// The fraction of a request's misses that one of its query rows reads.
    pub fn share(&self, query_rows: u32) -> f64 {
        f64::from(query_rows.max(1)).powf(-self.query_rows_power())
    }

    /// The power of the query rows by which misses grow.
    pub fn query_rows_power(&self) -> f64 {
        self.power().1
    }

    fn power(&self) -> (f64, f64) {
        match self {
            Misses::Curve(curve) => (curve.query_rows, curve.query_rows_power),
            Misses::Table(table) => (table.query_rows, table.query_rows_power),
            Misses::Steps(steps) => (steps.query_rows, steps.query_rows_power),
        }
    }

    fn growth(&self, query_rows: u32) -> f64 {
        let (measured, power) = self.power();
        (f64::from(query_rows) / measured).powf(power)
    }
}

/// The interval of `x` among ascending points: the lower index, the upper index, and the upper one's weight.
fn between(points: impl ExactSizeIterator<Item = f64> + Clone, x: f64) -> (usize, usize, f64) {
    let last = points.len() - 1;
    let above = points.clone().take_while(|point| *point <= x).count();
    let (low, high) = (above.saturating_sub(1), above.min(last));
    if low == high || above == 0 {
        return (low, low, 0.0);
    }
    let at = |index: usize| points.clone().nth(index).unwrap_or(x);
    (low, high, (x - at(low)) / (at(high) - at(low)))
}

impl Steps {
    /// Checks that the rows of a step match the model.
    fn check(&self, step: usize, shape: &Shape) -> Result<()> {
        let most = f64::from(shape.top_k) * self.query_rows;
        let rows = self.rows.get(step).map_or(&[][..], Vec::as_slice);
        of_layers(rows, shape.layers, most, || format!("misses.steps.rows[{step}]"))
    }
}

impl Curve {
    fn check(&self, layers: u32) -> Result<()> {
        query_rows(self.query_rows, self.query_rows_power, "curve")?;
        let Mean { context, ratio, rows } = &self.mean;
        for (name, points) in [("context", context), ("ratio", ratio)] {
            let place = format!("misses.curve.mean.{name}");
            if points.is_empty() || !points.array_windows().all(|[a, b]| a < b) {
                return Err(wrong(format!("{place}: no points, or not ascending")));
            }
            points.iter().enumerate().try_for_each(|(i, p)| positive(*p, || format!("{place}[{i}]")))?;
        }
        if ratio.last().is_some_and(|last| *last >= 1.0) {
            return Err(wrong("misses.curve.mean.ratio: 1 or above, where nothing is missed"));
        }
        let whole = rows.len() == context.len() && rows.iter().all(|row| row.len() == ratio.len());
        if !whole {
            return Err(wrong(
                "misses.curve.mean.rows: not one list for each context, of one number for each ratio",
            ));
        }
        for (i, row) in rows.iter().enumerate() {
            for (j, value) in row.iter().enumerate() {
                let place = || format!("misses.curve.mean.rows[{i}][{j}]");
                match value {
                    None => return Err(wrong(format!("{}: a hole", place()))),
                    Some(value) => positive(*value, place)?,
                }
            }
        }
        if !self.layers.array_windows().all(|[a, b]| a.context < b.context) {
            return Err(wrong("misses.curve.layers: contexts do not ascend"));
        }
        for (i, shape) in self.layers.iter().enumerate() {
            let place = format!("misses.curve.layers[{i}]");
            positive(shape.context, || format!("{place}.context"))?;
            of_layers(&shape.rows, layers, f64::INFINITY, || format!("{place}.rows"))?;
            positive(shape.rows.iter().sum(), || format!("{place}.rows: their sum"))?;
        }
        match self.layers.is_empty() {
            true => Err(wrong("misses.curve.layers: empty")),
            false => Ok(()),
        }
    }

    /// The least measured ratio at a context.
    pub(super) fn least(&self, context: u32) -> f64 {
        let all = &self.mean.context;
        let near = f64::from(context).clamp(all[0], all[all.len() - 1]);
        self.mean.ratio[0] * near / f64::from(context)
    }

    /// Mean rows at the curve's own number of query rows.
    fn mean(&self, context: f64, ratio: f64) -> Result<f64> {
        if ratio >= 1.0 {
            return Ok(0.0);
        }
        let all = &self.mean.context;
        let (first, last) = (all[0], all[all.len() - 1]);
        if context > last * CONTEXT_BEYOND || context * CONTEXT_BEYOND < first {
            return Err(outside("misses.curve.mean.context: too far outside the measured contexts")
                .with("asked", context as u64)
                .with("first", first as u64)
                .with("last", last as u64));
        }
        let near = context.clamp(first, last);
        let ratio = (ratio * context / near).min(1.0);
        let (low, high, share) = between(all.iter().map(|c| c.ln()), near.ln());
        let (a, b) = (self.at(low, ratio)?, self.at(high, ratio)?);
        // Above the last ratio both may be 0.
        Ok(if a > 0.0 && b > 0.0 { (a.ln() * (1.0 - share) + b.ln() * share).exp() } else { 0.0 })
    }

    /// Mean rows at a measured context.
    fn at(&self, context: usize, ratio: f64) -> Result<f64> {
        let (ratios, rows) = (&self.mean.ratio, &self.mean.rows[context]);
        let value = |index: usize| rows[index].unwrap_or(0.0);
        let last = ratios.len() - 1;
        if ratio < ratios[0] * (1.0 - 1e-9) {
            return Err(outside(format!(
                "misses.curve.mean.ratio: {ratio:.4} is below the first measured one, {}",
                ratios[0]
            )));
        }
        if ratio > ratios[last] {
            return Ok(value(last) * (1.0 - ratio) / (1.0 - ratios[last]));
        }
        let (low, high, share) = between(ratios.iter().copied(), ratio);
        Ok((value(low).ln() * (1.0 - share) + value(high).ln() * share).exp())
    }

    /// A layer's misses relative to the mean.
    fn weight(&self, layer: usize, context: f64) -> f64 {
        let (low, high, share) = between(self.layers.iter().map(|shape| shape.context.ln()), context.ln());
        let of = |index: usize| {
            let rows = &self.layers[index].rows;
            rows[layer] * rows.len() as f64 / rows.iter().sum::<f64>()
        };
        of(low) * (1.0 - share) + of(high) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve() -> Curve {
        Curve {
            query_rows: 2.0,
            query_rows_power: 0.5,
            mean: Mean {
                context: vec![1000.0, 4000.0],
                ratio: vec![0.1, 0.3, 0.9],
                rows: vec![
                    vec![Some(400.0), Some(100.0), Some(10.0)],
                    vec![Some(100.0), Some(25.0), Some(10.0)],
                ],
            },
            layers: vec![
                LayerShape { context: 1000.0, rows: vec![1.0, 3.0] },
                LayerShape { context: 4000.0, rows: vec![2.0, 2.0] },
            ],
        }
    }

    fn shape(layers: u32) -> Shape {
        Shape { layers, ..Shape::DEEPSEEK_V3_2 }
    }

    /// A step is checked by itself where it is run, so that a replay of n steps checks n and not n times n.
    #[test]
    fn each_step_is_checked_alone_and_their_number_is_bounded() {
        let of = |rows| Misses::Steps(Steps { query_rows: 1.0, query_rows_power: 1.0, rows });
        let mut rows = vec![vec![1.0, 2.0]; 9];
        rows[5] = vec![1.0, f64::NAN];
        let misses = of(rows);
        assert!([0, 4, 6, 8, 9].iter().all(|step| misses.check_at(*step, &shape(2)).is_ok()));
        let e = misses.check_at(14, &shape(2)).unwrap_err();
        assert!(e.place().starts_with("misses.steps.rows[5][1]"), "{e}");
        assert_eq!(misses.check(&shape(2)), Err(e));
        let most = of(vec![vec![1.0; 2]; STEPS_MAX]);
        assert!(most.check(&shape(2)).is_ok());
        let e = of(vec![vec![1.0; 2]; STEPS_MAX + 1]).check(&shape(2)).unwrap_err();
        assert_eq!((e.number("steps"), e.number("most")), (Some(16385), Some(16384)), "{e}");
    }

    fn place(context: u32, ratio: f64, query_rows: u32) -> Place {
        Place { context, ratio, query_rows, step: 0 }
    }

    #[test]
    fn a_curve_is_exact_at_its_points_and_logarithmic_between() {
        let misses = Misses::Curve(curve());
        misses.check(&shape(2)).unwrap();
        let mean = |context, ratio, q| misses.mean(&place(context, ratio, q)).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9 * b.max(1.0), "{a} {b}");
        near(mean(1000, 0.1, 2), 400.0);
        near(mean(4000, 0.3, 2), 25.0);
        near(mean(1000, 0.2, 2), 200.0);
        near(mean(2000, 0.3, 2), 50.0);
        near(mean(1000, 0.95, 2), 5.0);
        near(mean(1000, 1.0, 2), 0.0);
        near(mean(1000, 0.3, 8), 200.0);
        // The same slots as 0.3 of 4000.
        near(mean(8000, 0.15, 2), 25.0);
        near(mean(500, 0.6, 2), 100.0);
    }

    #[test]
    fn layers_keep_their_shape_and_the_mean() {
        let misses = Misses::Curve(curve());
        assert_eq!(misses.by_layer(&place(1000, 0.3, 2)).unwrap().map_round(), [50.0, 150.0]);
        assert_eq!(misses.by_layer(&place(4000, 0.3, 2)).unwrap().map_round(), [25.0, 25.0]);
        assert_eq!(misses.by_layer(&place(2000, 0.3, 2)).unwrap().map_round(), [38.0, 63.0]);
    }

    trait Round {
        fn map_round(self) -> Vec<f64>;
    }

    impl Round for Vec<f64> {
        fn map_round(self) -> Vec<f64> {
            self.into_iter().map(f64::round).collect()
        }
    }

    #[test]
    fn another_models_layers_take_those_at_their_depth() {
        let spread = Misses::Curve(curve()).spread(4);
        spread.check(&shape(4)).unwrap();
        assert_eq!(spread.by_layer(&place(1000, 0.3, 2)).unwrap().map_round(), [50.0, 50.0, 150.0, 150.0]);
        let table =
            Misses::Table(Table { query_rows: 1.0, query_rows_power: 1.0, rows: vec![5.0, 7.0, 9.0] });
        assert_eq!(table.spread(2).by_layer(&place(9, 0.5, 1)).unwrap(), [5.0, 7.0]);
    }

    #[test]
    fn tables_and_steps_are_taken_as_they_are() {
        let table = Misses::Table(Table { query_rows: 1.0, query_rows_power: 1.0, rows: vec![5.0, 7.0] });
        table.check(&shape(2)).unwrap();
        assert_eq!(table.by_layer(&place(9, 0.5, 2)).unwrap(), [10.0, 14.0]);
        assert_eq!(table.share(4), 0.25);
        let rows = vec![vec![1.0, 2.0], vec![3.0, 4.0]];
        let steps = Misses::Steps(Steps { query_rows: 2.0, query_rows_power: 1.0, rows });
        steps.check(&shape(2)).unwrap();
        let at = |step| steps.by_layer(&Place { step, ..place(9, 0.5, 2) }).unwrap();
        assert_eq!((at(1), at(2)), (vec![3.0, 4.0], vec![1.0, 2.0]));
    }

    #[test]
    fn points_beyond_the_curve_and_holes_are_named() {
        let refused = |misses: Misses, context, ratio, words: &str| {
            let checked = misses.check(&shape(2)).and_then(|()| misses.mean(&place(context, ratio, 2)));
            let text = checked.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        };
        refused(Misses::Curve(curve()), 1000, 0.05, "misses.curve.mean.ratio: 0.0500 is below");
        refused(Misses::Curve(curve()), 9000, 0.5, "misses.curve.mean.context");
        refused(Misses::Curve(curve()), 400, 0.5, "misses.curve.mean.context");
        let with = |change: fn(&mut Curve)| {
            let mut curve = curve();
            change(&mut curve);
            Misses::Curve(curve)
        };
        refused(with(|c| c.mean.rows[1][2] = None), 1000, 0.5, "misses.curve.mean.rows[1][2]: a hole");
        refused(with(|c| c.mean.rows[1][2] = Some(f64::NAN)), 1000, 0.5, "misses.curve.mean.rows[1][2]");
        refused(with(|c| c.layers[1].rows[1] = -1.0), 1000, 0.5, "misses.curve.layers[1].rows[1]");
        refused(with(|c| _ = c.layers[1].rows.pop()), 1000, 0.5, "misses.curve.layers[1].rows");
        refused(with(|c| c.query_rows_power = 1.5), 1000, 0.5, "misses.curve.query_rows_power");
        let rows = vec![1.0, 4097.0];
        let table = Misses::Table(Table { query_rows: 2.0, query_rows_power: 1.0, rows: rows.clone() });
        refused(table, 9, 0.5, "misses.table.rows[1]: 4097, but a request selects 4096 at most");
        let steps = Misses::Steps(Steps { query_rows: 2.0, query_rows_power: 1.0, rows: vec![rows] });
        refused(steps, 9, 0.5, "misses.steps.rows[0][1]");
        refused(with(|c| c.layers.clear()), 1000, 0.5, "misses.curve.layers");
        refused(with(|c| c.mean.ratio[2] = 1.0), 1000, 0.5, "misses.curve.mean.ratio");
        refused(
            Misses::Steps(Steps { query_rows: 1.0, query_rows_power: 1.0, rows: vec![] }),
            9,
            0.5,
            "no steps",
        );
    }
}
