//! Operating points: the parameters of a measured step.

use forebay::Shape;

use super::selections::Extent;

/// One operating point.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Layers.
    pub layers: u32,
    /// Sequences of a step.
    pub batch: u32,
    /// Tokens of each one's prompt.
    pub context: u32,
    /// Slots of a sequence and layer.
    pub budget: u32,
    /// Query rows of a step.
    pub query_rows: u32,
    /// Positions that a query row selects.
    pub top_k: u32,
    /// Rows that a sequence misses in a layer.
    pub misses: u32,
    /// The target length of the engine's work of a step with everything resident, in microseconds.
    pub step_us: f64,
    /// The target on a GPU.
    pub aim: Aim,
}

/// The target on a GPU for the best order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// None: the point is no measure.
    None,
    /// At most this share of the resident step's time is added.
    Share,
    /// At most this many microseconds a layer are added.
    Layer,
}

/// The share of a step's time that may be exposed.
pub const SHARE: f64 = 0.015;
/// The microseconds of a layer that may be exposed.
pub const LAYER_US: f64 = 7.0;

impl Point {
    /// The ESS report's point with the most sequences.
    pub const ESS: Point = Point {
        layers: 61,
        batch: 160,
        context: 32_768,
        budget: 6881,
        query_rows: 2,
        top_k: 2048,
        misses: 190,
        step_us: 100_000.0,
        aim: Aim::Share,
    };

    /// Few sequences, where a step is short.
    const FEW: Point = Point {
        batch: 4,
        budget: 4096,
        query_rows: 1,
        misses: 137,
        step_us: 21_000.0,
        aim: Aim::Layer,
        ..Point::ESS
    };

    /// As many layers and sequences as a host computes in milliseconds.
    const HOST: Point = Point {
        layers: 8,
        batch: 16,
        context: 16_384,
        budget: 4096,
        query_rows: 1,
        misses: 190,
        step_us: 24_000.0,
        aim: Aim::None,
        ..Point::ESS
    };

    /// For devices whose speed does not matter.
    const QUICK: Point = Point {
        layers: 3,
        batch: 4,
        context: 512,
        budget: 192,
        query_rows: 2,
        top_k: 32,
        misses: 6,
        step_us: 2000.0,
        aim: Aim::None,
    };

    /// The points of a device, in groups that share one cache; each group's first point is its largest.
    pub fn groups(gpu: bool, quick: bool) -> Vec<Vec<Point>> {
        let of = |first: Point, batches: &[u32], query_rows: &[u32]| -> Vec<Point> {
            let each = batches.iter().flat_map(|batch| query_rows.iter().map(move |rows| (*batch, *rows)));
            each.map(|(batch, query_rows)| Point { batch, query_rows, ..first.clone() }).collect()
        };
        match (gpu, quick) {
            (_, true) => vec![of(Point::QUICK, &[4], &[2, 1]), of(Point::QUICK, &[2, 1], &[1])],
            (true, false) => vec![of(Point::ESS, &[160], &[2, 1]), of(Point::FEW, &[4, 2, 1], &[1])],
            (false, false) => {
                let few = Point { misses: 137, step_us: 8000.0, ..Point::HOST };
                vec![of(Point::HOST, &[16], &[1]), of(few, &[2, 1], &[1])]
            }
        }
    }

    /// The geometry of a cache of the point's size.
    pub fn shape(&self) -> Shape {
        // No index keys: the stand-in has no indexer.
        Shape { layers: self.layers, top_k: self.top_k, index_key_bytes: 0, ..Shape::DEEPSEEK_V3_2 }
    }

    /// The limits for the sequences of a cache of the point's size, which may decode `promised` tokens.
    pub fn extent(&self, promised: u32, share: f64) -> Extent {
        Extent {
            lanes: self.batch,
            prompt: self.context,
            tokens: self.context + promised + self.query_rows,
            budget: self.budget,
            query_rows: self.query_rows,
            top_k: self.top_k,
            share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_point_of_a_group_is_at_least_as_large_as_the_others() {
        for (gpu, quick) in [(false, false), (false, true), (true, false), (true, true)] {
            for group in Point::groups(gpu, quick) {
                let first = &group[0];
                for point in &group {
                    assert!(point.batch <= first.batch && point.query_rows <= first.query_rows);
                    let same = Point { batch: first.batch, query_rows: first.query_rows, ..point.clone() };
                    assert_eq!(&same, first);
                }
            }
        }
    }
}
