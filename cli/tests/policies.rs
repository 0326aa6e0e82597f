//! Tests of the policies for study. Simulated LRU equals the production pools to the last miss, the optimum equals a
//! search over all choices, FIFO equals a list, and S3-FIFO equals a count by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/policy/mod.rs"]
mod policy;
#[path = "../src/study"]
mod study {
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod pools;
    pub mod reserve;
    pub mod s3fifo_queues;
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod threads;
}
#[path = "../../tests/support/traces.rs"]
mod traces;

use std::collections::HashMap;
use std::path::Path;

use forebay::Shape;
use forebay::trace::SelectionTrace;
use policy::steps::Steps;
use policy::{Job, Policy, run};
use proptest::prelude::*;
use study::pools::{self, Setting};

/// Every study policy except LRU.
const ALL: [Policy; 5] = [Policy::Lru, Policy::Fifo, Policy::S3Fifo, Policy::Decay, Policy::DecayTokens];

fn compare(path: &Path) {
    let trace = SelectionTrace::read(path).unwrap();
    let header = trace.header();
    let ratio = |r: f64| (r * f64::from(header.decode_start) + 0.5) as u32;
    // One query row and two, cold and warm; half of k, and fewer slots than two query rows select: scratch slots.
    for (mtp, warmup, slots) in
        [(1, 32, vec![ratio(0.2), header.k / 2]), (2, 32, vec![ratio(0.1)]), (2, 0, vec![header.k * 3 / 2])]
    {
        let setting = |slots| Setting { slots, warmup, mtp, steps: header.decode_steps() / mtp };
        let jobs = slots.into_iter().map(setting);
        let jobs: Vec<Job> = jobs.map(|setting| Job { policy: Policy::Lru, setting, slots: None }).collect();
        let studied = policy::replay(&trace, &jobs, |_| ()).unwrap();
        for (Job { setting, .. }, studied) in jobs.into_iter().zip(studied) {
            let produced = pools::replay(&trace, &Shape::DEEPSEEK_V3_2, setting, || ()).unwrap();
            assert!(produced.steps.iter().sum::<u64>() > 0, "a replay without misses shows nothing");
            assert_eq!(studied, produced, "{path:?} {setting:?}");
        }
    }
}

#[test]
fn the_simulators_lru_is_the_production_rule_on_every_trace() {
    let Some(directory) = traces::directory("topk") else { return };
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let paths: Vec<_> = paths.filter(|path| path.to_string_lossy().ends_with(".topk.zst")).collect();
    assert!(!paths.is_empty(), "no trace in the directory");
    paths.iter().for_each(|path| compare(path));
}

#[test]
fn the_simulators_lru_is_the_production_rule_on_the_demo_trace() {
    compare(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst"));
}

/// Steps over so few positions that the test can try every choice.
#[derive(Clone, Debug)]
struct Small {
    prompt: u32,
    warm: u32,
    mtp: u32,
    slots: u32,
    /// By step, in any order, with repetitions.
    selections: Vec<Vec<u32>>,
}

impl Small {
    fn groups(&self) -> u32 {
        self.selections.len() as u32 - self.warm
    }

    fn steps(&self) -> Steps {
        Steps::of(self.selections.iter().cloned(), self.prompt, self.warm, self.mtp, self.groups()).unwrap()
    }

    fn misses(&self, policy: Policy) -> u64 {
        self.misses_of(policy, self.steps().mean_rows())
    }

    /// The misses of pools that expect a step to select `rows` rows: with few they keep a heap, with many they scan.
    fn misses_of(&self, policy: Policy, rows: u32) -> u64 {
        let setting = Setting { slots: self.slots, warmup: self.warm, mtp: self.mtp, steps: self.groups() };
        let steps = self.steps();
        let mut pool = policy.pool(self.slots, steps.positions(), rows).unwrap();
        let (hits, misses) = run(&steps, setting, pool.as_mut());
        let selected: u64 =
            (self.warm..self.warm + self.groups()).map(|s| steps.selected(s).len() as u64).sum();
        assert_eq!(hits + misses.iter().sum::<u64>(), selected);
        misses.iter().sum()
    }

    /// The positions of a step as bits.
    fn bits(&self, step: usize) -> u32 {
        self.selections[step].iter().fold(0, |set, position| set | 1 << position)
    }

    /// The least misses of decode steps from `step` on, with `resident` before them, over all choices that the module
    /// head of `policy` allows.
    fn least(&self, step: usize, resident: u32, seen: &mut HashMap<(usize, u32), u64>) -> u64 {
        if step == self.selections.len() {
            return 0;
        }
        if let Some(least) = seen.get(&(step, resident)) {
            return *least;
        }
        let selected = self.bits(step);
        let fits = selected.count_ones() <= self.slots;
        let kept = if fits { selected } else { 0 };
        let from = if fits { selected | resident } else { selected };
        let group = step as u32 - self.warm.min(step as u32);
        let born = match step as u32 >= self.warm {
            true => ((1 << self.mtp) - 1) << (self.prompt + group * self.mtp),
            false => 0,
        };
        let mut best = u64::MAX;
        for after in subsets(from).filter(|set| set & kept == kept && self.holds(*set)) {
            // A warm-up step adds no row, so there is no choice after it.
            let choices = if born == 0 { after } else { after | born };
            for next in subsets(choices).filter(|set| self.holds(*set) && (born != 0 || *set == after)) {
                best = best.min(self.least(step + 1, next, seen));
            }
        }
        let missed = u64::from((selected & !resident).count_ones());
        let best = best + if step as u32 >= self.warm { missed } else { 0 };
        seen.insert((step, resident), best);
        best
    }

    fn holds(&self, set: u32) -> bool {
        set.count_ones() <= self.slots
    }
}

/// All subsets of a set of bits.
fn subsets(of: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(of), move |set| (*set != 0).then(|| (set - 1) & of))
}

/// Steps of at most three rows, pools of at least `least_slots`.
fn small(least_slots: u32) -> impl Strategy<Value = Small> {
    (2..7_u32, 0..5_u32, 1..3_u32, 1..4_usize).prop_flat_map(move |(prompt, warm, mtp, groups)| {
        let steps: Vec<_> = (0..warm as usize + groups)
            .map(|step| {
                let group = step.saturating_sub(warm as usize) as u32;
                prop::collection::vec(0..prompt + group * mtp, 1..=3)
            })
            .collect();
        (steps, least_slots..5).prop_map(move |(selections, slots)| Small {
            prompt,
            warm,
            mtp,
            slots,
            selections,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Includes pools that the rows of a step exceed.
    #[test]
    fn belady_misses_the_least_of_all_choices(small in small(1)) {
        let misses = small.misses(Policy::Belady);
        prop_assert_eq!(misses, small.least(0, 0, &mut HashMap::new()));
        for policy in ALL {
            prop_assert!(misses <= small.misses(policy), "{}", policy.name());
        }
    }

    #[test]
    fn a_heap_evicts_the_same_rows_as_a_scan(small in small(1)) {
        for policy in [Policy::Lru, Policy::Fifo, Policy::Belady] {
            let [heap, scan] = [0, u32::MAX].map(|rows| small.misses_of(policy, rows));
            prop_assert_eq!(heap, scan, "{}", policy.name());
        }
    }

    #[test]
    fn fifo_is_a_list(small in small(3)) {
        let slots = small.slots as usize;
        let (mut list, mut misses): (Vec<u32>, u64) = (Vec::new(), 0);
        for step in 0..small.selections.len() {
            let selected = small.bits(step);
            let missed: Vec<u32> = (0..32).filter(|p| selected >> p & 1 == 1 && !list.contains(p)).collect();
            while list.len() + missed.len() > slots {
                let oldest = list.iter().position(|p| selected >> p & 1 == 0).unwrap();
                list.remove(oldest);
            }
            list.extend(&missed);
            if step as u32 >= small.warm {
                misses += missed.len() as u64;
                let first = small.prompt + (step as u32 - small.warm) * small.mtp;
                list.extend(first..first + small.mtp);
                list.drain(..list.len().saturating_sub(slots));
            }
        }
        prop_assert_eq!(small.misses(Policy::Fifo), misses);
    }
}

#[test]
fn s3_fifo_counts_as_computed_by_hand() {
    // Ten slots: one of the small queue, nine of the main one, nine remembered. Rows 0 to 4 are hit twice.
    //   step 0: 0 to 9 enter, all small            1, 2: 0 to 4 are hit
    //   3: 10 is fetched: 0 to 4 move to the main queue, 5 leaves and is remembered
    //   4: 5 is fetched: 6 leaves, 5 enters the main queue
    //   5: 11 to 14 are fetched: 7, 8, 9, 10 leave; small: 11 to 14, main: 0 to 5
    //   6: all of 0 to 5 hit; then 20 (never seen) is fetched: 11 leaves, not 5
    //   7: 11 is remembered and enters the main queue, 12 leaves
    //   8: 0 to 5 and 11 are still there, 12 is not
    let steps: [&[u32]; 9] = [
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        &[0, 1, 2, 3, 4],
        &[0, 1, 2, 3, 4],
        &[10],
        &[5],
        &[11, 12, 13, 14],
        &[0, 1, 2, 3, 4, 5, 20],
        &[11],
        &[0, 1, 2, 3, 4, 5, 11, 12],
    ];
    let steps = Steps::of(steps.iter().map(|step| step.to_vec()), 21, 9, 1, 0).unwrap();
    let mut pool = Policy::S3Fifo.pool(10, steps.positions(), steps.mean_rows()).unwrap();
    let misses: Vec<u32> = (0..9).map(|step| pool.select(step, steps.selected(step))).collect();
    assert_eq!(misses, [10, 0, 0, 1, 1, 4, 1, 1, 1]);
}
