//! What a replay of several traces found, with all layers together.

use std::path::PathBuf;

use forebay::trace::Header;

use crate::replay::result::Count;
use crate::study::together::Outcome;

/// One sequence.
pub struct Sequence {
    /// The trace's file, as named.
    pub path: PathBuf,
    /// The trace's header.
    pub header: Header,
    /// The engine's step at which it arrived.
    pub arrives: u32,
    /// Its prompt steps of warm-up.
    pub warmup: u32,
    /// Its decode steps.
    pub steps: u32,
}

/// The steps in which a number of sequences were alive.
#[derive(Clone, Copy, Default)]
pub struct Alive {
    /// The number of such steps.
    pub steps: u32,
    /// Their counts.
    pub count: Count,
}

/// The replay with one kind of budgets.
pub struct Run {
    /// The kind's name.
    pub budgets: &'static str,
    /// By number of living sequences, from 0 on.
    pub alive: Vec<Alive>,
    /// Counts of each sequence.
    pub sequences: Vec<Count>,
    /// Slots of each sequence, as a mean over the layers, at every step at which one changed.
    pub slots: Vec<(u32, Vec<u64>)>,
    /// Changes of a budget, in the layer with the most.
    pub resizes: u64,
    /// Rows that got another slot by that, in all layers.
    pub moved: u64,
}

/// All replays, and what they have in common.
pub struct Replayed {
    /// The sequences in the order of their arrival.
    pub sequences: Vec<Sequence>,
    /// Slots of each layer.
    pub slots: u32,
    /// Steps between arrivals.
    pub gap: u32,
    /// Query rows of a step.
    pub mtp: u32,
    /// One replay for each kind of budgets, the fixed ones first.
    pub runs: Vec<Run>,
}

impl Run {
    /// Sums up the layers of a replay of `sequences` sequences.
    pub fn new(budgets: &'static str, sequences: usize, layers: &[Outcome]) -> Run {
        let mut run = Run {
            budgets,
            alive: vec![Alive::default(); sequences + 1],
            sequences: vec![Count::default(); sequences],
            slots: Vec::new(),
            resizes: layers.iter().map(|layer| layer.resizes).max().unwrap_or(0),
            moved: layers.iter().map(|layer| layer.moved).sum(),
        };
        let steps = layers.first().map_or(0, |layer| layer.steps.len());
        for step in 0..steps {
            let cells = || layers.iter().filter_map(|layer| layer.steps.get(step));
            let mut slots = vec![0_u64; sequences];
            let mut sum = Count::default();
            for cell in cells().flatten() {
                let (hits, misses) = (u64::from(cell.hits), u64::from(cell.misses));
                sum = Count { hits: sum.hits + hits, misses: sum.misses + misses };
                let sequence = cell.sequence as usize;
                if let (Some(count), Some(slots)) = (run.sequences.get_mut(sequence), slots.get_mut(sequence))
                {
                    *count = Count { hits: count.hits + hits, misses: count.misses + misses };
                    *slots += u64::from(cell.slots);
                }
            }
            slots.iter_mut().for_each(|slots| *slots /= layers.len() as u64);
            if run.slots.last().is_none_or(|(_, last)| *last != slots) {
                run.slots.push((step as u32, slots));
            }
            if let Some(alive) = cells().next().and_then(|cells| run.alive.get_mut(cells.len())) {
                alive.steps += 1;
                let count = alive.count;
                alive.count = Count { hits: count.hits + sum.hits, misses: count.misses + sum.misses };
            }
        }
        run
    }

    /// Its budgets in words.
    pub fn words(&self) -> String {
        match self.budgets {
            "fixed" => "fixed budgets".to_owned(),
            "equal" => "budgets shared equally".to_owned(),
            by => format!("budgets shared by {by}"),
        }
    }

    /// Counts of all steps.
    pub fn total(&self) -> Count {
        self.alive.iter().fold(Count::default(), |sum, alive| Count {
            hits: sum.hits + alive.count.hits,
            misses: sum.misses + alive.count.misses,
        })
    }
}

impl Alive {
    /// Misses of a step, all layers and sequences together; 0 without steps.
    pub fn misses_per_step(&self) -> f64 {
        self.count.misses as f64 / f64::from(self.steps.max(1))
    }
}
