//! Tests of `forebay replay --together`: every count equals a naive counter's with the same budgets, the budgets keep
//! their promises, and the command refuses what does not fit together.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/study"]
mod study {
    #[expect(dead_code, reason = "other studies use the rest")]
    pub mod reserve;
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod together;
}
#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/oracle.rs"]
#[expect(dead_code, reason = "no trace truncates")]
mod oracle;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use command::{refuses, succeeds};
use forebay::trace::{Header, SelectionTrace};
use forebay::{Share, ShareBy};
use oracle::Oracle;
use serde_json::Value;
use study::together::{Budgets, Cell, Member, Outcome, Together};

const LAYERS: u32 = 2;
const K: usize = 40;

/// A trace of `prompt` tokens and `steps` decode steps, whose sets change by about a fifth from step to step.
fn trace(seed: u64, prompt: u32, steps: u32) -> SelectionTrace {
    let (warm, k) = (6, K);
    let json = format!(
        r#"{{"layers":{LAYERS},"k":{k},"steps":{},"warm_steps":{warm},"first_position":{},"decode_start":{prompt},
        "context":{}}}"#,
        warm + steps,
        prompt - warm,
        prompt + steps
    );
    let header: Header = serde_json::from_str(&json).unwrap();
    let mut state = seed;
    let mut chance = |below: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % below
    };
    let mut members = Vec::new();
    let mut sets = vec![BTreeSet::new(); LAYERS as usize];
    for step in 0..warm + steps {
        for set in &mut sets {
            set.retain(|_| chance(5) > 0);
            while set.len() < K {
                set.insert(chance(prompt - warm + step + 1));
            }
            members.extend(set.iter().copied());
        }
    }
    SelectionTrace::new(Header { layer_ids: (0..LAYERS).collect(), ..header }, members).unwrap()
}

fn policies() -> [Budgets; 4] {
    let share = |by| Budgets::Shared(Share { by, ..Share::default() });
    [Budgets::Fixed, share(ShareBy::Equal), share(ShareBy::Length), share(ShareBy::Misses)]
}

/// The counts of one sequence in one layer with the given budgets, by a list of positions.
fn counted(member: &Member<'_>, mtp: u32, layer: u32, cells: &[Cell]) -> Vec<(u32, u32)> {
    let (trace, header) = (member.trace, member.trace.header());
    let mut oracle = Oracle::new(cells[0].slots as usize, header.decode_start);
    oracle.bring_up();
    for step in header.warm_steps - member.warmup..header.warm_steps {
        oracle.select(trace.selection(step, layer).iter().copied());
    }
    let mut counts = Vec::new();
    for (group, cell) in (0..).zip(cells) {
        oracle.resize(cell.slots as usize);
        oracle.commit(if group == 0 { 0 } else { mtp }, mtp);
        let sets = (0..mtp).flat_map(|row| trace.selection(header.warm_steps + group * mtp + row, layer));
        let step = oracle.select(sets.copied());
        counts.push((step.hits.len() as u32, step.misses.len() as u32));
    }
    counts
}

fn of_sequence(outcome: &Outcome, sequence: u32) -> Vec<Cell> {
    outcome.steps.iter().flatten().filter(|cell| cell.sequence == sequence).copied().collect()
}

fn misses(outcome: &Outcome) -> u64 {
    outcome.steps.iter().flatten().map(|cell| u64::from(cell.misses)).sum()
}

/// Replays every layer with every kind of budgets, and compares each count.
fn compare(together: &Together<'_>) -> Vec<u64> {
    let mut all = Vec::new();
    for budgets in policies() {
        let mut sum = 0;
        for layer in 0..LAYERS {
            let outcome = together.layer(layer, budgets, || ()).unwrap();
            for (sequence, member) in (0..).zip(&together.members) {
                let cells = of_sequence(&outcome, sequence);
                assert_eq!(cells.len(), member.steps as usize);
                let found: Vec<_> = cells.iter().map(|cell| (cell.hits, cell.misses)).collect();
                assert_eq!(found, counted(member, together.mtp, layer, &cells), "{budgets:?}, {sequence}");
            }
            for cells in &outcome.steps {
                let blocks: u32 = cells.iter().map(|cell| cell.slots.div_ceil(64)).sum();
                assert!(blocks <= together.blocks, "{cells:?}");
            }
            sum += misses(&outcome);
        }
        all.push(sum);
    }
    all
}

fn members<'a>(traces: &'a [SelectionTrace], gap: u32, warmup: u32, mtp: u32) -> Vec<Member<'a>> {
    let member = |(index, trace): (u32, &'a SelectionTrace)| {
        let steps = trace.header().decode_steps() / mtp;
        Member { trace, arrives: index * gap, warmup, steps }
    };
    (0..).zip(traces).map(member).collect()
}

#[test]
fn every_count_equals_a_naive_counter() {
    let traces = [trace(1, 700, 90), trace(2, 300, 60), trace(3, 1500, 120)];
    for (mtp, gap, warmup, blocks) in
        [(1, 30, 6, 16), (2, 11, 0, 9), (1, 0, 3, 30), (3, 7, 6, 3), (1, 20, 6, 60)]
    {
        let together = Together { members: members(&traces, gap, warmup, mtp), mtp, blocks };
        let misses = compare(&together);
        assert!(misses[0] > 0, "budgets without misses show nothing");
    }
}

/// While it is alone, a sequence has all slots that it can use, and misses nothing if all its rows fit; then all
/// shrink, and the rest grow again.
#[test]
fn budgets_follow_the_sequences_that_are_alive() {
    let traces = [trace(4, 700, 100), trace(5, 600, 100), trace(6, 800, 100)];
    let together = Together { members: members(&traces, 30, 6, 1), mtp: 1, blocks: 15 };
    for budgets in &policies()[1..] {
        let outcome = together.layer(0, *budgets, || ()).unwrap();
        assert!(outcome.resizes > 0 && outcome.moved > 0);
        let first = of_sequence(&outcome, 0);
        assert!(first[..30].iter().all(|cell| cell.slots == 800 && cell.misses == 0), "{budgets:?}");
        let slots = |step: usize| outcome.steps[step].iter().map(|cell| cell.slots).collect::<Vec<_>>();
        assert_eq!((slots(59).len(), slots(99).len(), slots(129).len(), slots(159).len()), (2, 3, 2, 1));
        assert!(slots(30)[0] < 800 && slots(60)[0] < slots(30)[0], "{budgets:?}");
        assert!(slots(130)[0] > slots(129)[1] && slots(159) == [900]);
        // All slots are in use while not all rows fit, but for the changes that are not worth a resize.
        for step in 60..100 {
            let used: u32 = slots(step).iter().map(|slots| slots.div_ceil(64)).sum();
            assert!(used >= 14, "{budgets:?} {step}: {used}");
        }
    }
}

#[test]
fn shared_slots_miss_less_than_fixed_ones() {
    let traces = [trace(7, 700, 100), trace(8, 600, 100), trace(9, 800, 100)];
    let together = Together { members: members(&traces, 30, 6, 1), mtp: 1, blocks: 15 };
    let [fixed, shared @ ..] = &compare(&together)[..] else { panic!("no replay") };
    assert!(shared.iter().all(|shared| shared < fixed), "{fixed} {shared:?}");
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

#[test]
fn the_command_reports_each_kind_of_budgets() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let arguments =
        ["replay", demo, demo, "--together", "2100", "--share", "equal,misses,equal", "--gap", "200"];
    let json = succeeds(&[&arguments[..], &["--json", "-"]].concat());
    let entries: Vec<Value> = serde_json::from_str(&json).unwrap();
    let kinds: Vec<_> = entries.iter().map(|entry| entry["budgets"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["fixed", "equal", "misses"]);
    for entry in &entries {
        assert_eq!((&entry["kind"], &entry["slots"]), (&"together".into(), &2048.into()));
        let steps: Vec<_> =
            entry["by_alive"].as_array().unwrap().iter().map(|one| one["steps"].clone()).collect();
        assert_eq!(steps, [400, 312]);
        let sum = |list: &str| -> u64 {
            entry[list].as_array().unwrap().iter().map(|one| one["misses"].as_u64().unwrap()).sum()
        };
        assert_eq!(
            (sum("by_alive"), sum("sequences")),
            (sum("sequences"), entry["total"]["misses"].as_u64().unwrap())
        );
    }
    assert_eq!(entries[0]["resizes"], 0);
    assert_eq!(entries[1]["slots_over_time"][0]["slots"].as_array().unwrap(), &[2048, 0]);
    let text = succeeds(&arguments);
    assert!(text.contains("2 sequences") && text.contains("misses/step"), "{text}");
}

#[test]
fn the_page_shows_the_slots_over_time() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let page =
        succeeds(&["replay", demo, demo, "--together", "2048", "--share", "equal,length", "--html", "-"]);
    for (part, count) in
        [("Slots over time, fixed budgets</h3>", 1), ("Slots over time, ", 6), ("<path class=\"q5\"", 3)]
    {
        assert_eq!(page.matches(part).count(), count, "{part}");
    }
    assert!(page.contains("Fixed or shared budgets?") && page.contains("fewer rows than fixed ones"));
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let two = ["replay", demo, demo, "--together"];
    for (more, part) in [
        (&["63"][..], "63"),
        (&["0"], "0"),
        (&["-1"], "-1"),
        (&["64"], "less than a block of 64 slots for each sequence"),
        (&["4096", "--gap", "513"], "no sequence is alive"),
        (&["4096", "--gap", "4294967295"], "no sequence is alive"),
        (&["4096", "--gap", "-1"], "-1"),
        (&["4096", "--share", "most"], "most"),
        (&["4096", "--slots", "9"], "--slots"),
        (&["4096", "--prompt-share", "0.1"], "--prompt-share"),
        (&["4096", "--curve"], "--curve"),
        (&["4096", "--policy", "fifo"], "--policy"),
        (&["4096", "--split", "by-layer"], "--split"),
        (&["4096", "--prefetch", "inter-layer"], "--prefetch"),
        (&["4096", "--html", "x.html", "--link-rate", "9"], "--link-rate"),
        (&["4096", "--device", "cuda:0"], "--together works on the host only"),
        (&["4096", "--mtp", "513"], "mtp"),
        (&["4096", "--warmup", "4000000000"], "--warmup"),
        (&["4096", "--memory", "1MiB"], "--memory"),
        (&["1073741824"], "memory"),
    ] {
        let error = refuses(&[&two[..], more].concat());
        assert!(error.contains(part), "{more:?}: {error}");
    }
    assert!(refuses(&["replay", demo, "--share", "equal"]).contains("--together"));
    assert!(refuses(&["replay", demo, "--gap", "3"]).contains("--together"));
}
