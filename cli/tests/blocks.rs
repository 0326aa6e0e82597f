//! Tests of replays of request traces. LRU equals a naive cache to the last hit. LRU, FIFO and the optimum equal
//! published results. The optimum equals a search over all choices, S3-FIFO equals a count by hand, and every capacity
//! of the curve equals a replay of that capacity.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/blocks/mod.rs"]
#[expect(dead_code, reason = "only the command uses the memory estimates")]
mod blocks;
#[path = "../src/study"]
mod study {
    pub mod reserve;
    pub mod s3fifo_queues;
}
#[path = "../../tests/support/traces.rs"]
mod traces;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use blocks::{BlockCurve, Outcome, Policy};
use forebay::trace::requests::{Options, RequestTrace};
use proptest::prelude::*;
use serde_json::Value;

/// A block as named in the file: the line, if ids are local to it, and the id.
type Block = (usize, u64);

/// A request of the file: tokens of the prompt, and its blocks.
type Asked = (u64, Vec<Block>);

fn ids(line: usize, list: &Value) -> Vec<Block> {
    list.as_array().unwrap().iter().map(|id| (line, id.as_u64().unwrap())).collect()
}

/// The requests of a JSON trace, read independently: each line as a tree.
fn asked(path: &Path, interleaved: bool) -> Vec<Asked> {
    let text = zstd::decode_all(fs::File::open(path).unwrap()).unwrap();
    let (mut all, mut times) = (Vec::new(), Vec::new());
    for (number, line) in text.split(|b| *b == b'\n').enumerate().filter(|(_, l)| !l.is_empty()) {
        let value: Value = serde_json::from_slice(line).unwrap();
        if let Some(requests) = value["requests"].as_array() {
            let request = |r: &Value| match r["hash_ids"].is_array() {
                true => (r["in"].as_u64().unwrap(), ids(number, &r["hash_ids"])),
                false => (0, Vec::new()),
            };
            all.extend(requests.iter().map(request));
            times.extend(requests.iter().map(|r| r["t"].as_f64().unwrap()));
            continue;
        }
        let tokens = value["input_length"].as_u64().unwrap();
        let blocks = match &value["hash_ids"] {
            Value::Object(parts) => ["sys_prompt", "passages_ids", "history", "web_search", "user_input"]
                .iter()
                .flat_map(|part| ids(0, &parts[*part]))
                .collect(),
            list => ids(0, list),
        };
        all.push((tokens, blocks));
    }
    if interleaved {
        // A stable sort keeps the order of sessions and turns among equal times.
        let mut dated: Vec<(f64, Asked)> = times.into_iter().zip(all).collect();
        dated.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap());
        return dated.into_iter().map(|(_, request)| request).collect();
    }
    all
}

/// A cache with dates of last use: hits of each request's leading run, and evicted blocks.
fn naive(requests: &[Asked], capacity: usize) -> (u64, u64) {
    let (mut used, mut by_date) = (HashMap::new(), BTreeMap::new());
    let (mut date, mut hits, mut evicted) = (0_u64, 0, 0);
    for (_, blocks) in requests {
        hits += blocks.iter().take_while(|block| used.contains_key(*block)).count() as u64;
        for block in blocks.iter().rev() {
            date += 1;
            if let Some(before) = used.insert(*block, date) {
                by_date.remove(&before);
            }
            by_date.insert(date, *block);
        }
        while by_date.len() > capacity {
            used.remove(&by_date.pop_first().unwrap().1);
            evicted += 1;
        }
    }
    (hits, evicted)
}

fn compare(kind: &str, file: &str, options: &Options, capacities: &[u32]) {
    let Some(directory) = traces::directory(kind) else { return };
    let path = directory.join(file);
    let trace = RequestTrace::read(&path, options).unwrap();
    let asked = asked(&path, trace.interleaved());
    for capacity in capacities {
        let outcome = blocks::replay(&trace, Policy::Lru, *capacity, 0, || ()).unwrap();
        let counted = (outcome.hit_blocks, outcome.evicted_blocks);
        assert_eq!(counted, naive(&asked, *capacity as usize), "{file} at {capacity}");
        assert!(outcome.hit_blocks > 0, "a replay without hits proves nothing");
        assert_eq!(outcome.requests, asked.len() as u64);
        assert_eq!(outcome.blocks, asked.iter().map(|(_, blocks)| blocks.len() as u64).sum::<u64>());
        assert_eq!(outcome.input_tokens, asked.iter().map(|(tokens, _)| tokens).sum::<u64>());
    }
}

#[test]
fn mooncake_replays_as_in_a_naive_cache() {
    let capacities = [1, 7, 24, 1000, 10_000, 50_000, 182_790];
    compare("mooncake", "conversation_trace.jsonl.zst", &Options::default(), &capacities);
}

#[test]
fn ragpulse_replays_as_in_a_naive_cache() {
    compare("ragpulse", "0_trace.jsonl.zst", &Options::default(), &[3, 100, 2000, 30_000]);
}

#[test]
fn sessions_replay_as_in_a_naive_cache() {
    let in_turn = Options { one_after_another: true, ..Options::default() };
    compare("kv-cache-tester", "agentic_A.jsonl.zst", &in_turn, &[781, 10_000]);
}

/// The default order: sessions interleaved by time.
#[test]
fn interleaved_sessions_replay_as_in_a_naive_cache() {
    compare("kv-cache-tester", "agentic_A.jsonl.zst", &Options::default(), &[12_501, 100_000]);
}

/// Tokens in hit blocks and all input tokens, measured over the second half of the requests.
fn second_half(trace: &RequestTrace, policy: Policy, capacity: u64) -> (u64, u64) {
    let capacity = u32::try_from(capacity).unwrap();
    let outcome = blocks::replay(trace, policy, capacity, trace.requests() / 2, || ()).unwrap();
    (outcome.hit_tokens, outcome.input_tokens)
}

/// The counts of `kvcache-simulator` 0.1.3, equal to the last token.
#[test]
fn mooncake_replays_as_in_another_simulator() {
    let Some(directory) = traces::directory("mooncake") else {
        return;
    };
    let trace =
        RequestTrace::read(&directory.join("conversation_trace.jsonl.zst"), &Options::default()).unwrap();
    let theirs = directory.join("conversation_trace.kvcache-simulator-0.1.3.deepseek-v3.2.json");
    let theirs: Value = serde_json::from_slice(&fs::read(theirs).unwrap()).unwrap();
    let points = theirs["points"].as_array().unwrap();
    assert_eq!(points.len(), 13);
    for point in points {
        let capacity = point["cacheBlocks"].as_u64().unwrap();
        for (policy, name) in [(Policy::Fifo, "fifo"), (Policy::Belady, "optimal"), (Policy::Lru, "lru")] {
            let result = &point["results"][name];
            let theirs = result["hitTokens"].as_u64().unwrap();
            let (ours, all) = second_half(&trace, policy, capacity);
            assert_eq!(all, result["totalTokens"].as_u64().unwrap());
            assert_eq!(ours, theirs, "{name}, {capacity} blocks");
        }
    }
    let ceiling = theirs["ceiling"]["hitTokens"].as_u64().unwrap();
    for policy in Policy::ALL {
        assert_eq!(second_half(&trace, policy, u64::from(trace.distinct())).0, ceiling, "{}", policy.name());
    }
}

#[test]
fn sessions_replay_as_published() {
    let Some(directory) = traces::directory("kv-cache-tester") else {
        return;
    };
    let path = directory.join("agentic_A.jsonl.zst");
    // The published figures run the sessions one after another.
    let in_turn = Options { one_after_another: true, ..Options::default() };
    let trace = RequestTrace::read(&path, &in_turn).unwrap();
    let notes = trace.notes();
    assert_eq!((notes.sessions, notes.subagents, notes.subagent_requests), (173, 21, 225));
    assert_eq!((trace.requests(), trace.references().len()), (11_309, 21_510_193));
    for (capacity, percent) in [(195, 10.0), (781, 37.9), (3125, 84.4), (6250, 95.6), (12_501, 96.9)] {
        let (hits, all) = second_half(&trace, Policy::Lru, capacity);
        let ours = 100.0 * hits as f64 / all as f64;
        assert!((ours - percent).abs() <= 0.1, "{capacity} blocks: {ours}");
    }
    let options = Options { subagents: true, ..Options::default() };
    let with = RequestTrace::read(&path, &options).unwrap();
    assert_eq!(with.requests(), 11_309 - 21 + 225);
}

/// Visits every change of the curve: between two of them no hit is gained or lost. Returns the last capacity.
fn changes(curve: &BlockCurve) -> u32 {
    let mut below = 0;
    for capacity in curve.changes() {
        assert!(capacity > below);
        let [before, at] = [capacity - 1, capacity].map(|capacity| curve.at(capacity).hit_blocks);
        assert!(before == curve.at(below).hit_blocks && before < at);
        below = capacity;
    }
    below
}

/// Compares eight capacities of the curve, and one beyond it, with replays.
fn compare_curve(kind: &str, file: &str, options: &dyn Fn(&Path) -> Options) {
    let Some(directory) = traces::directory(kind) else { return };
    let trace = RequestTrace::read(&directory.join(file), &options(&directory)).unwrap();
    let all = trace.distinct();
    for skip in [0, trace.requests() / 2] {
        let curve = blocks::curve(&trace, skip, || ()).unwrap();
        let flat = curve.flat_from();
        assert_eq!(changes(&curve), flat);
        for capacity in [1, 24, all / 1000, all / 100, all / 20, all / 3, flat - 1, flat, all, u32::MAX] {
            let replayed = blocks::replay(&trace, Policy::Lru, capacity, skip, || ()).unwrap();
            assert_eq!(curve.at(capacity), replayed, "{file}, {capacity} blocks, skip {skip}");
        }
    }
}

#[test]
fn the_curve_of_mooncake_equals_its_replays() {
    compare_curve("mooncake", "conversation_trace.jsonl.zst", &|_| Options::default());
}

#[test]
fn the_curve_of_sessions_equals_their_replays() {
    compare_curve("kv-cache-tester", "agentic_A.jsonl.zst", &|_| Options::default());
}

#[test]
fn the_curve_of_ragpulse_equals_its_replays() {
    compare_curve("ragpulse", "0_trace.jsonl.zst", &|directory| {
        let files = ["1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search"];
        let piece_lengths = files.map(|name| directory.join(format!("{name}.jsonl.zst"))).to_vec();
        Options { piece_lengths, ..Options::default() }
    });
}

/// Requests by the ids of their blocks.
type Prompts = Vec<Vec<u64>>;

/// A Mooncake trace; the last block of a prompt holds 200 tokens.
fn mooncake(prompts: &[Vec<u64>]) -> RequestTrace {
    let line = |ids: &Vec<u64>| {
        let tokens = (512 * ids.len()).saturating_sub(312);
        format!("{{\"timestamp\":0,\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
    };
    let text: String = prompts.iter().map(line).collect();
    RequestTrace::from_bytes(text.as_bytes(), &Options::default()).unwrap()
}

/// A RAGPulse trace; the lengths of its pieces are unknown.
fn pieces(prompts: &[Vec<u64>]) -> RequestTrace {
    let line = |ids: &Vec<u64>| {
        format!(
            "{{\"timestamp\":\"0\",\"input_length\":9,\"output_length\":1,\"hash_ids\":{{\"sys_prompt\":{ids:?},\
             \"passages_ids\":[],\"history\":[],\"web_search\":[],\"user_input\":[]}},\"session_id\":\"x\"}}\n"
        )
    };
    let text: String = prompts.iter().map(line).collect();
    RequestTrace::from_bytes(text.as_bytes(), &Options::default()).unwrap()
}

/// Prompts over two words: a block's id is its prefix as binary digits after a 1.
fn prefixes(words: &[u64]) -> Vec<u64> {
    let longer = |id: &mut u64, word: &u64| {
        *id = *id * 2 + word;
        Some(*id)
    };
    words.iter().scan(1, longer).collect()
}

fn prompts(most: usize, longest: usize) -> impl Strategy<Value = Prompts> {
    let prompt = prop::collection::vec(0..2_u64, 0..=longest);
    prop::collection::vec(prompt, 1..=most).prop_map(|all| all.iter().map(|words| prefixes(words)).collect())
}

/// A plain list, the newest last; returns hits and evictions from request `skip` on.
fn list(prompts: &[Vec<u64>], capacity: usize, skip: usize) -> (u64, u64) {
    let (mut list, mut hits, mut evicted): (Vec<u64>, _, _) = (Vec::new(), 0, 0);
    for (i, prompt) in prompts.iter().enumerate() {
        let run = prompt.iter().take_while(|id| list.contains(id)).count() as u64;
        for id in prompt.iter().rev() {
            list.retain(|other| other != id);
            list.push(*id);
        }
        let surplus = list.len().saturating_sub(capacity);
        list.drain(..surplus);
        if i >= skip {
            hits += run;
            evicted += surplus as u64;
        }
    }
    (hits, evicted)
}

/// A queue, the newest last.
fn queue(prompts: &[Vec<u64>], capacity: usize) -> u64 {
    let (mut queue, mut hits): (Vec<u64>, _) = (Vec::new(), 0);
    for prompt in prompts {
        hits += prompt.iter().take_while(|id| queue.contains(id)).count() as u64;
        for id in prompt {
            if queue.contains(id) {
                continue;
            }
            if queue.len() == capacity {
                queue.remove(0);
            }
            queue.push(*id);
        }
    }
    hits
}

/// The most hits of the requests from `at` on over all choices, with `resident` before them: after a request the cache
/// keeps at most `capacity` of the blocks that were resident or that the request used.
fn most(
    prompts: &[Vec<u64>],
    at: usize,
    resident: u64,
    capacity: u32,
    seen: &mut HashMap<(usize, u64), u64>,
) -> u64 {
    let Some(prompt) = prompts.get(at) else { return 0 };
    if let Some(most) = seen.get(&(at, resident)) {
        return *most;
    }
    let from = prompt.iter().fold(resident, |set, id| set | 1 << id);
    let mut best = 0;
    let mut kept = from;
    loop {
        if kept.count_ones() <= capacity {
            best = best.max(most(prompts, at + 1, kept, capacity, seen));
        }
        if kept == 0 {
            break;
        }
        kept = (kept - 1) & from;
    }
    let best = best + run(prompt, resident);
    seen.insert((at, resident), best);
    best
}

/// Hits by the prefix rule.
fn run(prompt: &[u64], resident: u64) -> u64 {
    prompt.iter().take_while(|id| resident >> **id & 1 == 1).count() as u64
}

fn replayed(trace: &RequestTrace, policy: Policy, capacity: u32, skip: usize) -> Outcome {
    blocks::replay(trace, policy, capacity, skip, || ()).unwrap()
}

fn every_capacity(prompts: &[Vec<u64>], trace: &RequestTrace) {
    for skip in [0, prompts.len() / 2, prompts.len()] {
        let curve = blocks::curve(trace, skip, || ()).unwrap();
        assert_eq!(changes(&curve).max(1), curve.flat_from());
        for capacity in 1..trace.distinct() + 2 {
            let at = curve.at(capacity);
            let naive = list(prompts, capacity as usize, skip);
            assert_eq!((at.hit_blocks, at.evicted_blocks), naive, "{capacity} blocks, skip {skip}");
            assert_eq!(at, replayed(trace, Policy::Lru, capacity, skip), "{capacity} blocks, skip {skip}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn the_curve_equals_a_naive_list_at_every_capacity(prompts in prompts(30, 7)) {
        every_capacity(&prompts, &mooncake(&prompts));
    }

    /// Ids that claim to name prefixes but occur after different ones, as in some published files.
    #[test]
    fn the_curve_of_shuffled_ids_equals_a_naive_list_at_every_capacity(
        prompts in prop::collection::vec(
            prop::sample::subsequence((0..12_u64).collect::<Vec<_>>(), 0..8).prop_shuffle(), 1..30)
    ) {
        every_capacity(&prompts, &mooncake(&prompts));
    }

    /// The same piece after different ones, and twice in a request.
    #[test]
    fn the_curve_of_pieces_equals_a_naive_list_at_every_capacity(
        prompts in prop::collection::vec(prop::collection::vec(0..12_u64, 0..8), 1..30)
    ) {
        every_capacity(&prompts, &pieces(&prompts));
    }

    #[test]
    fn belady_hits_the_most_of_all_choices(prompts in prompts(8, 4), capacity in 1..5_u32) {
        let trace = mooncake(&prompts);
        let hits = |policy| replayed(&trace, policy, capacity, 0).hit_blocks;
        let belady = hits(Policy::Belady);
        prop_assert_eq!(belady, most(&prompts, 0, 0, capacity, &mut HashMap::new()));
        for policy in Policy::ALL {
            prop_assert!(hits(policy) <= belady, "{}", policy.name());
        }
    }

    #[test]
    fn fifo_is_a_queue(prompts in prompts(30, 6), capacity in 1..20_u32) {
        let fifo = replayed(&mooncake(&prompts), Policy::Fifo, capacity, 0).hit_blocks;
        prop_assert_eq!(fifo, queue(&prompts, capacity as usize));
    }
}

/// The counts of request `i`.
fn one(prompts: &[Vec<u64>], policy: Policy, capacity: u32, i: usize) -> Outcome {
    replayed(&mooncake(&prompts[..=i]), policy, capacity, i)
}

#[test]
fn s3_fifo_counts_as_computed_by_hand() {
    // Ten blocks: one in the small queue, nine in the main one, nine remembered.
    let prompts: [&[u64]; 14] = [
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], // 9 to 0 enter, the last one first, all small
        &[0, 1, 2, 3, 4],                // hit
        &[0, 1, 2, 3, 4],                // hit twice
        &[10],                           // 9 leaves and is remembered
        &[9],                            // 8 leaves, 9 enters the main queue
        &[11],                           // 7 leaves
        &[12],                           // 6 leaves
        &[13],                           // 5 leaves
        &[14],                           // 4 to 0 move to the main queue, 10 leaves
        &[0, 1, 2, 3, 4],                // hit in the main queue
        &[5],                            // remembered: 11 leaves, 5 enters the main queue
        &[10],                           // remembered: 12 leaves
        &[9, 5, 10, 13],                 // hit
        &[14, 12],                       // 14 is hit, 12 is not there
    ];
    let prompts: Prompts = prompts.iter().map(|prompt| prompt.to_vec()).collect();
    let counted = (0..prompts.len()).map(|i| one(&prompts, Policy::S3Fifo, 10, i));
    let (hits, evicted): (Vec<_>, Vec<_>) = counted.map(|o| (o.hit_blocks, o.evicted_blocks)).unzip();
    assert_eq!(hits, [0, 5, 5, 0, 0, 0, 0, 0, 0, 5, 0, 0, 4, 1]);
    assert_eq!(evicted, [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1]);
}

#[test]
fn where_ids_name_pieces_belady_is_no_bound() {
    // One block: 1 is requested sooner than 5, but after 2, which is not resident.
    let prompts: Prompts = vec![vec![5, 1], vec![2, 1], vec![5]];
    assert_eq!(replayed(&pieces(&prompts), Policy::Belady, 1, 0).hit_blocks, 0);
    assert_eq!(most(&prompts, 0, 0, 1, &mut HashMap::new()), 1);
}
