//! Counts how much selections overlap: of one layer from position to position, and of two layers at the same position.
//!
//! Both figures are shares of a selection. Decode steps are counted by position, for any number of query rows.

use forebay::trace::SelectionTrace;

use crate::present::html::chart::Grid;

/// The most positions sampled for the similarity of layers, evenly spread over the decode steps.
const SAMPLES: u32 = 512;

/// The similarity of a layer to itself one position earlier.
#[derive(Default)]
pub struct Within {
    /// By layer and stretch of positions: the mean share that was also selected one position earlier.
    pub grid: Grid,
    /// By layer: the mean over all positions.
    pub means: Vec<f64>,
}

/// Counts the given layers in at most `columns` stretches of nearly equal length; none if no decode position has a
/// predecessor.
pub fn within(trace: &SelectionTrace, layers: &[u32], columns: usize) -> Option<Within> {
    let header = trace.header();
    let steps = header.decode_steps() as usize;
    let columns = columns.min(steps).max(1);
    if header.decode_steps() + header.warm_steps.min(1) < 2 {
        return None;
    }
    let (mut values, mut means) = (Vec::new(), Vec::new());
    for layer in layers {
        let mut last = vec![u32::MAX; header.context as usize];
        let mut stretches = vec![(0.0, 0u32); columns];
        let first = header.warm_steps.saturating_sub(1);
        for step in first..header.steps {
            let (mut common, selection) = (0u32, trace.selection(step, *layer));
            for position in selection {
                let Some(seen) = last.get_mut(*position as usize) else { continue };
                common += u32::from(step > first && *seen == step - 1);
                *seen = step;
            }
            // The last warm step only serves as a predecessor; so does the first step of a trace without warm steps.
            if step == first {
                continue;
            }
            let Some(decoded) = step.checked_sub(header.warm_steps) else { continue };
            if let Some(stretch) = stretches.get_mut(decoded as usize * columns / steps) {
                *stretch = (stretch.0 + share(common, selection.len()), stretch.1 + 1);
            }
        }
        let (sum, count) = stretches.iter().fold((0.0, 0), |all, s| (all.0 + s.0, all.1 + s.1));
        means.push(sum / f64::from(count));
        values.extend(stretches.iter().map(|(sum, count)| sum / f64::from(*count)));
    }
    Some(Within { grid: Grid { columns, values }, means })
}

/// The sampling interval of decode positions for the similarity of layers.
pub fn sampled(steps: u32) -> u32 {
    steps.div_ceil(SAMPLES).max(1)
}

/// The mean share of common positions for each pair of the given layers. A layer's similarity to itself is left
/// empty.
pub fn between(trace: &SelectionTrace, layers: &[u32]) -> Grid {
    let header = trace.header();
    let count = layers.len();
    let every = sampled(header.decode_steps()) as usize;
    let mut sums = vec![0.0; count * count];
    let mut samples = 0u32;
    // A position is marked with the number of the last selection that contained it.
    let (mut marks, mut mark) = (vec![0u32; header.context as usize], 0);
    for step in (header.warm_steps..header.steps).step_by(every) {
        samples += 1;
        for (a, layer) in layers.iter().enumerate() {
            mark += 1;
            let selection = trace.selection(step, *layer);
            for position in selection {
                if let Some(place) = marks.get_mut(*position as usize) {
                    *place = mark;
                }
            }
            for (b, other) in layers.iter().enumerate().skip(a + 1) {
                let others = trace.selection(step, *other);
                let marked = |position: &&u32| marks.get(**position as usize) == Some(&mark);
                let common = share(others.iter().filter(marked).count() as u32, selection.len());
                for place in [a * count + b, b * count + a] {
                    if let Some(sum) = sums.get_mut(place) {
                        *sum += common;
                    }
                }
            }
        }
    }
    let itself = |i: usize| i.is_multiple_of(count + 1);
    let mean = |(i, sum): (usize, f64)| if itself(i) { f64::NAN } else { sum / f64::from(samples) };
    Grid { columns: count, values: sums.into_iter().enumerate().map(mean).collect() }
}

fn share(part: u32, whole: usize) -> f64 {
    f64::from(part) / whole.max(1) as f64
}
