//! The bounds of `reserve` against sequences that hold pages one by one.
//!
//! The model knows no bound. It keeps, for each sequence, the steps in flight and *every* length at which each may have
//! begun, as far as the host can know. A page is in use if a step in flight may read or write one of its positions. The
//! real acceptances are drawn when a step begins, and the host learns them with the step's report.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::dense::shape::{Group, Shape};

/// A step of one sequence: the length at which it really began, its query rows, and the lengths at which it may have
/// begun.
#[derive(Clone, Debug)]
struct Step {
    length: u32,
    rows: u32,
    may: BTreeSet<u32>,
}

#[derive(Clone, Debug)]
struct Model {
    /// Rows of the prompt that no step has, and all tokens that were promised.
    prompt: u32,
    promised: u32,
    /// The newest retired step.
    retired: Option<Step>,
    /// The steps in flight, the oldest first.
    flight: VecDeque<Step>,
}

/// The lengths after a step that may have begun at one of `may`.
fn after(config: &Config, may: &BTreeSet<u32>, rows: u32) -> BTreeSet<u32> {
    let least = if rows > config.query_rows { rows } else { 0 };
    may.iter().flat_map(|length| (least..=rows).map(move |accepted| length + accepted)).collect()
}

impl Model {
    fn new(prompt: u32, promised: u32) -> Self {
        Model { prompt, promised, retired: None, flight: VecDeque::new() }
    }

    fn newest(&self) -> Option<&Step> {
        self.flight.back().or(self.retired.as_ref())
    }

    /// The lengths at which the next step may begin.
    fn may(&self, config: &Config) -> BTreeSet<u32> {
        self.newest().map_or_else(|| BTreeSet::from([0]), |step| after(config, &step.may, step.rows))
    }

    /// Begins a step, of which `draw` says how many of the rows before it were accepted.
    fn begin(&mut self, config: &Config, rows: u32, draw: u32) {
        let length = self.newest().map_or(0, |step| {
            let accepted = if step.rows > config.query_rows { step.rows } else { draw % (step.rows + 1) };
            (step.length + accepted).min(self.promised)
        });
        let may = self.may(config);
        self.flight.push_back(Step { length, rows, may });
        self.prompt = self.prompt.saturating_sub(rows);
    }

    /// Retires the oldest step: its report says where it began, which narrows what the later ones may be.
    fn retire(&mut self, config: &Config) {
        let Some(mut step) = self.flight.pop_front() else { return };
        step.may = BTreeSet::from([step.length]);
        let mut may = after(config, &step.may, step.rows);
        self.retired = Some(step);
        for later in &mut self.flight {
            later.may = may;
            may = after(config, &later.may, later.rows);
        }
    }

    /// The pages that are in use, position by position.
    fn pages(&self, config: &Config, window: u32) -> BTreeSet<u32> {
        let mut positions = BTreeSet::new();
        for step in &self.flight {
            for length in &step.may {
                positions.extend(length.saturating_sub(window - 1)..length + step.rows);
            }
        }
        for length in self.may(config) {
            positions.extend(length.saturating_sub(window - 1)..length);
        }
        let reach = config.reach(self.promised).unwrap();
        positions.into_iter().filter(|p| *p < reach).map(|p| p / config.shape.page_tokens).collect()
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A step of one micro-batch: of some sequences, the rows that are wanted, and the draw of accepted rows.
    Step(Vec<(usize, u32, u32)>),
    /// The oldest step in flight ends.
    Retire,
}

fn ops(sequences: usize) -> impl Strategy<Value = Vec<Op>> {
    let rows = proptest::collection::vec((0..sequences, 1_u32..40, any::<u32>()), 1..6);
    proptest::collection::vec(prop_oneof![3 => rows.prop_map(Op::Step), 2 => Just(Op::Retire)], 1..60)
}

fn config(window: u32, tokens: u32, rows: u32, steps: u32, micro_batches: u32) -> Config {
    let group = Group { layers: vec![0], runs: [16, 16], window: Some(window) };
    let mut config = Config::new(Shape { page_tokens: tokens, groups: vec![group] }, 4, 200);
    (config.query_rows, config.steps_in_flight, config.micro_batches) = (rows, steps, micro_batches);
    (config.batch, config.step_tokens) = (3, 24);
    config
}

/// Runs the operations. After each, a sequence without a chunk holds at most its reserve, and all together at most the
/// demand.
fn run(config: &Config, window: u32, ops: &[Op], sizes: &[(u32, u32)]) -> Result<(), TestCaseError> {
    let mut models: Vec<Model> =
        sizes.iter().map(|(prompt, more)| Model::new(*prompt, prompt + more)).collect();
    let mut steps: VecDeque<Vec<usize>> = VecDeque::new();
    let reach = |model: &Model| config.reach(model.promised).unwrap();
    let reserved: u64 = models.iter().map(|model| u64::from(config.reserve(0, reach(model)))).sum();
    let whole: u64 = models.iter().map(|model| u64::from(config.pages(reach(model)))).sum();
    for op in ops {
        match op {
            Op::Retire => {
                for index in steps.pop_front().unwrap_or_default() {
                    models[index].retire(config);
                }
            }
            Op::Step(rows) if steps.len() < (config.steps_in_flight * config.micro_batches) as usize => {
                let mut members: Vec<usize> = Vec::new();
                let mut left = config.step_tokens;
                for (index, wanted, draw) in rows {
                    let model = &mut models[*index];
                    let most = if model.prompt > 0 { model.prompt } else { config.query_rows };
                    let rows = (*wanted).min(most).min(left);
                    let is_full = model.flight.len() == config.steps_in_flight as usize;
                    if rows == 0
                        || is_full
                        || members.contains(index)
                        || members.len() == config.batch as usize
                    {
                        continue;
                    }
                    model.begin(config, rows, *draw);
                    left -= rows;
                    members.push(*index);
                }
                steps.push_back(members);
            }
            Op::Step(_) => {}
        }
        let mut all = 0;
        for model in &models {
            let held = model.pages(config, window).len() as u64;
            let seen = model.flight.iter().chain(&model.retired);
            let bound = match seen.into_iter().all(|step| step.rows <= config.query_rows) {
                true => config.reserve(0, reach(model)),
                false => config.pages(reach(model)),
            };
            prop_assert!(held <= bound.into(), "{held} pages of {model:?}, at most {bound}");
            all += held;
        }
        let bound = config.demand(0, reserved, whole);
        prop_assert!(all <= bound, "{all} pages of all, at most {bound}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn no_sequence_holds_more_than_its_reserve_and_all_hold_no_more_than_the_demand(
        window in 1_u32..40,
        shift in 0_u32..5,
        rows in 1_u32..5,
        steps in 1_u32..4,
        micro_batches in 1_u32..3,
        sizes in proptest::collection::vec((0_u32..90, 1_u32..90), 1..=4),
        ops in ops(4),
    ) {
        let config = config(window, 1 << shift, rows, steps, micro_batches);
        let ops: Vec<Op> = ops.into_iter().map(|op| match op {
            Op::Step(rows) => Op::Step(rows.into_iter().map(|(i, r, d)| (i % sizes.len(), r, d)).collect()),
            Op::Retire => Op::Retire,
        }).collect();
        run(&config, window, &ops, &sizes)?;
    }
}

/// A decoding sequence whose drafts are all accepted, and whose host learns that late, holds all of its reserve where
/// its window begins with the last token of a page. So one page fewer would not do.
#[test]
fn a_decoding_sequence_comes_to_hold_all_of_its_reserve() {
    for (window, tokens, rows, steps) in
        [(1, 1, 1, 1), (128, 64, 1, 2), (20, 16, 3, 2), (33, 8, 4, 3), (7, 16, 2, 1)]
    {
        let config = config(window, tokens, rows, steps, 1);
        let mut model = Model::new(0, 4096);
        let mut most = 0;
        for _ in 0..600 {
            while model.flight.len() < steps as usize {
                // One row more is accepted in some steps, so that all places in a page come by.
                model.begin(&config, rows, if most % 2 == 0 { rows } else { 1 });
            }
            most = most.max(model.pages(&config, window).len());
            model.retire(&config);
        }
        let reach = config.reach(4096).unwrap();
        assert_eq!(
            most,
            config.reserve(0, reach) as usize,
            "window {window}, {tokens} tokens, {rows} x {steps}"
        );
        assert!(config.reserve(0, reach) < config.pages(reach));
    }
}

/// Chunks in flight take pages beyond the reserves of their sequences, so pages for reserves alone would not do.
#[test]
fn chunks_hold_more_than_the_reserves_and_no_more_than_the_demand() {
    // Windows of one token: a sequence holds what its steps write, and the page of its newest token.
    let mut config = config(1, 8, 1, 1, 1);
    (config.sequences, config.batch, config.step_tokens) = (3, 3, 3 * 18);
    let mut models = [(); 3].map(|()| Model::new(7 + 18, 125));
    for model in &mut models {
        model.begin(&config, 7, 0);
        model.retire(&config);
        model.begin(&config, 18, 0);
    }
    // Positions 7 to 24 are in pages 0 to 3.
    let held: usize = models.iter().map(|model| model.pages(&config, 1).len()).sum();
    let reserve = u64::from(config.reserve(0, 126));
    assert_eq!((held, reserve, config.chunk_pages(0)), (3 * 4, 2, 9));
    assert_eq!(config.demand(0, 3 * reserve, 3 * 16), 6 + 9);
}

#[test]
fn a_sequence_is_charged_no_more_than_its_reach_fills() {
    let config = config(100, 16, 1, 2, 1);
    let naive = |reach: u32| (0..reach).map(|position| position / 16).collect::<BTreeSet<_>>().len() as u32;
    for reach in 1..=300 {
        assert_eq!(config.pages(reach), naive(reach));
        assert_eq!(config.reserve(0, reach), naive(reach).min(8));
        // 48 rows of chunks in flight, of four sequences, touch (48 + 4 x 15) / 16 pages more.
        let demand = config.demand(0, config.reserve(0, reach).into(), naive(reach).into());
        assert_eq!(demand, u64::from(naive(reach).min(8 + 6)));
    }
    let mut full = config;
    full.shape.groups[0].window = None;
    assert_eq!((full.reserve(0, 300), full.chunk_pages(0), full.demand(0, 57, 57)), (19, 0, 57));
}
