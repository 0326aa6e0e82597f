//! How selections reuse rows: by how many steps ago a row was last selected.
//!
//! The work of a resolve depends on the places of equally old rows. After a prompt they are adjacent, as they were
//! fetched; after some dozen decode steps they are scattered over the lane's slots. So the steps of a benchmark select
//! as a model does: resident rows of each age as often as in a recorded trace. Within an age the choice is random; a
//! model also prefers neighbours, which the rule ignores.

/// Age limits in steps, each with the share of such rows that the next step selects. Counted over all selections of
/// `data/demo.topk.zst` (512 of some 6,400 positions, 10 layers) from decode step 64 on; a test counts them again.
/// Older rows behave like the last class.
pub const RETURNS: [(u32, f64); CLASSES] = [
    (1, 0.7468),
    (2, 0.3026),
    (3, 0.2093),
    (4, 0.1590),
    (6, 0.1191),
    (8, 0.0872),
    (12, 0.0734),
    (16, 0.0603),
    (24, 0.0347),
    (32, 0.0251),
    (48, 0.0189),
    (64, 0.0138),
    (96, 0.0092),
    (128, 0.0066),
    (256, 0.0037),
];

/// Classes of age.
pub const CLASSES: usize = 15;

/// Decode steps of a lane before a measurement, and fewer if only the code path is tested. After some 30 steps no row
/// of the prompt is as old as the oldest class.
pub const DECODED: u32 = 64;
pub const DECODED_QUICK: u32 = 8;

/// The share of a decode step's selections that is not resident: ESS's report at a budget of 6,881.
pub const MISSED: f64 = 0.134;

/// The class of a row that was last selected this many steps before the next one.
pub fn class(age: u32) -> usize {
    RETURNS.iter().position(|(most, _)| age <= *most).unwrap_or(CLASSES - 1)
}

/// Divides `hits` over the classes, given each class's number of rows; a class never gets more than its rows.
pub fn divided(rows: [usize; CLASSES], hits: usize) -> [usize; CLASSES] {
    let weights = || rows.iter().zip(RETURNS).map(|(rows, (_, share))| *rows as f64 * share);
    let (all, mut left, mut taken) = (weights().sum::<f64>().max(1e-9), hits, [0; CLASSES]);
    for ((taken, rows), weight) in taken.iter_mut().zip(rows).zip(weights()) {
        *taken = ((hits as f64 * weight / all) as usize).min(rows).min(left);
        left -= *taken;
    }
    // The newest rows make up for rounding and for classes with too few rows.
    for (taken, rows) in taken.iter_mut().zip(rows) {
        let more = left.min(rows - *taken);
        *taken += more;
        left -= more;
    }
    taken
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use forebay::device::host::{HostDevice, HostOptions};
    use forebay::measure::Probe;
    use forebay::trace::SelectionTrace;

    use super::*;
    use crate::bench::rig::{Extents, Places, Rig};

    /// Decodes so many steps in one lane. Returns the number of rows that share the stamp of the next step's last
    /// victim, among which the rule chooses by position, and the number of stretches of slots that they occupy.
    fn ties(decoded: u32) -> (usize, usize) {
        let device: Arc<dyn Probe> = HostDevice::new(HostOptions::default());
        let mut rig = Rig::new(&device, Extents::ONE_LANE, Places::Tables, true).unwrap();
        rig.fill(decoded).unwrap();
        // The device got the same state.
        rig.finish().unwrap();
        let stamps = rig.oracle.stamps(0, 0);
        let mut oldest = stamps.clone();
        oldest.sort_unstable();
        let bound = oldest[(2048.0 * MISSED) as usize];
        let tied = |stamp: &u32| *stamp == bound;
        let stretches = stamps.chunk_by(|a, b| tied(a) == tied(b)).filter(|stretch| tied(&stretch[0]));
        (stamps.iter().filter(|stamp| tied(stamp)).count(), stretches.count())
    }

    #[test]
    fn after_a_decode_rows_of_one_age_are_spread_over_the_slots() {
        let (rows, stretches) = ties(DECODED);
        assert!(rows > 30 && stretches * 10 > rows * 9, "{rows} in {stretches}");
        // The control: after a prompt they are adjacent.
        let (rows, stretches) = ties(0);
        assert!(rows > 500 && stretches * 20 < rows, "{rows} in {stretches}");
    }

    #[test]
    fn rows_of_each_age_are_reused_as_often_as_in_the_recorded_trace() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
        let trace = SelectionTrace::read(&path).unwrap();
        let header = trace.header();
        let (mut rows, mut back) = ([0_u32; CLASSES], [0_u32; CLASSES]);
        for layer in 0..header.layers {
            let mut last = vec![None; header.context as usize];
            for step in 0..header.steps {
                let selection = trace.selection(step, layer);
                if step >= header.warm_steps + 64 {
                    let age = |last: &Option<u32>| last.map(|last| class(step - last));
                    last.iter().filter_map(age).for_each(|class| rows[class] += 1);
                    let of = selection.iter().filter_map(|position| age(&last[*position as usize]));
                    of.for_each(|class| back[class] += 1);
                }
                selection.iter().for_each(|position| last[*position as usize] = Some(step));
            }
        }
        for (class, (age, share)) in RETURNS.into_iter().enumerate().take(CLASSES - 1) {
            let found = f64::from(back[class]) / f64::from(rows[class]);
            assert!((found / share - 1.0).abs() < 0.01, "up to {age} steps: {found}");
        }
    }

    #[test]
    fn all_hits_are_divided_and_no_class_gives_more_rows_than_it_has() {
        let mut rows = [0; CLASSES];
        (rows[0], rows[1], rows[9]) = (2048, 500, 3000);
        let taken = divided(rows, 1774);
        assert_eq!(taken.iter().sum::<usize>(), 1774);
        // 1529, 151 and 75 by their shares are 1755 in all, so each gets a little more.
        assert!(
            taken[0].abs_diff(1546) < 5 && taken[1].abs_diff(152) < 3 && taken[9].abs_diff(76) < 3,
            "{taken:?}"
        );
        assert_eq!(divided(rows, 5548), rows);
        assert_eq!(divided([0; CLASSES], 0), [0; CLASSES]);
        (rows[0], rows[1]) = (10, 0);
        assert_eq!(divided(rows, 400)[..10], [10, 0, 0, 0, 0, 0, 0, 0, 0, 390]);
    }
}
