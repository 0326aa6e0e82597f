//! Tests of `forebay replay --device-blocks`: request by request it equals a naive cache of two tiers, on generated and
//! on recorded traces. With blocks saved when they are published, both tiers hit as one LRU cache of the larger. The
//! output, and the errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/blocks/mod.rs"]
#[expect(dead_code, unused_imports, reason = "one cache and its curve have tests of their own")]
mod blocks;
#[path = "support/command.rs"]
mod command;
#[path = "../src/study"]
mod study {
    pub mod reserve;
    pub mod s3fifo_queues;
}
#[path = "../../tests/support/traces.rs"]
mod traces;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::PathBuf;

use blocks::Policy;
use blocks::tiers::{self, Save, Served, Tiers};
use forebay::trace::requests::{Options, RequestTrace};
use proptest::prelude::*;
use serde_json::Value;

/// Blocks by their last use.
trait Order: Default {
    fn has(&self, block: u32) -> bool;
    fn put_last(&mut self, block: u32);
    fn take(&mut self, block: u32);
    fn first(&self) -> Option<u32>;
}

/// A plain list: every answer is a scan.
#[derive(Default)]
struct List(Vec<u32>);

impl Order for List {
    fn has(&self, block: u32) -> bool {
        self.0.contains(&block)
    }

    fn put_last(&mut self, block: u32) {
        self.take(block);
        self.0.push(block);
    }

    fn take(&mut self, block: u32) {
        self.0.retain(|other| *other != block);
    }

    fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }
}

/// Dates in trees, for traces that are too long for scans.
#[derive(Default)]
struct Dates {
    next: u64,
    of: HashMap<u32, u64>,
    by_date: BTreeMap<u64, u32>,
}

impl Order for Dates {
    fn has(&self, block: u32) -> bool {
        self.of.contains_key(&block)
    }

    fn put_last(&mut self, block: u32) {
        self.next += 1;
        if let Some(before) = self.of.insert(block, self.next) {
            self.by_date.remove(&before);
        }
        self.by_date.insert(self.next, block);
    }

    fn take(&mut self, block: u32) {
        if let Some(date) = self.of.remove(&block) {
            self.by_date.remove(&date);
        }
    }

    fn first(&self) -> Option<u32> {
        self.by_date.first_key_value().map(|(_, block)| *block)
    }
}

/// How a naive cache differs from the rule.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    AsStated,
    /// A hit on the device is no use of the host's copy.
    HostForgetsDeviceHits,
    /// A prefix is released before its continuations.
    FirstToLast,
}

/// Hits on the device and on the host, blocks up and down, evicted from the device and from the host.
type Counts = [u64; 6];

/// Two tiers, from the description alone.
struct Naive<O> {
    tiers: Tiers,
    rule: Rule,
    /// On the device, not of the request that is served.
    device: O,
    /// Of that request.
    used: HashSet<u32>,
    /// On the host, not coming back.
    host: O,
    coming: Vec<u32>,
    on_device: usize,
    on_host: usize,
}

impl<O: Order> Naive<O> {
    fn new(tiers: Tiers, rule: Rule) -> Naive<O> {
        Naive {
            tiers,
            rule,
            device: O::default(),
            used: HashSet::new(),
            host: O::default(),
            coming: Vec::new(),
            on_device: 0,
            on_host: 0,
        }
    }

    fn use_on_host(&mut self, block: u32) {
        if self.rule != Rule::HostForgetsDeviceHits && self.host.has(block) {
            self.host.put_last(block);
        }
    }

    /// Copies a block to the host, if there is room or some can be made.
    fn copy_down(&mut self, block: u32, counts: &mut Counts) {
        if self.on_host == self.tiers.host as usize {
            let Some(gone) = self.host.first() else { return };
            self.host.take(gone);
            self.on_host -= 1;
            counts[5] += 1;
        }
        self.host.put_last(block);
        self.on_host += 1;
        counts[3] += 1;
    }

    fn room_on_device(&mut self, counts: &mut Counts) {
        if self.on_device < self.tiers.device as usize {
            return;
        }
        let gone = self.device.first().unwrap();
        if self.tiers.save == Save::Evicted && !self.host.has(gone) {
            self.copy_down(gone, counts);
        }
        self.device.take(gone);
        self.on_device -= 1;
        counts[4] += 1;
    }

    fn serve(&mut self, blocks: &[u32]) -> Counts {
        let mut counts = [0; 6];
        let run =
            blocks.iter().take_while(|block| self.device.has(**block) || self.host.has(**block)).count();
        counts[0] = blocks[..run].iter().filter(|block| self.device.has(**block)).count() as u64;
        counts[1] = run as u64 - counts[0];
        let held: Vec<bool> = blocks.iter().map(|block| self.device.has(*block)).collect();
        for (block, held) in blocks.iter().zip(&held) {
            if *held {
                self.device.take(*block);
                self.used.insert(*block);
                self.use_on_host(*block);
            } else if self.host.has(*block) || self.coming.contains(block) {
                self.host.take(*block);
                self.coming.push(*block);
            }
        }
        let mut new = Vec::new();
        for (place, block) in blocks.iter().enumerate().filter(|(place, _)| !held[*place]) {
            let coming = self.coming.iter().position(|other| other == block);
            if self.used.insert(*block) {
                self.room_on_device(&mut counts);
                self.on_device += 1;
                match coming {
                    Some(_) => counts[2] += u64::from(place < run),
                    None => new.push(*block),
                }
            }
            if let Some(first) = coming {
                self.coming.remove(first);
                if !self.coming.contains(block) {
                    self.host.put_last(*block);
                }
            }
        }
        if self.tiers.save == Save::Published && self.tiers.host > 0 {
            new.iter().for_each(|block| self.copy_down(*block, &mut counts));
        }
        let order: Vec<u32> = match self.rule {
            Rule::FirstToLast => blocks.to_vec(),
            _ => blocks.iter().rev().copied().collect(),
        };
        for block in order {
            self.use_on_host(block);
            self.device.put_last(block);
        }
        self.used.clear();
        counts
    }
}

fn counts(served: &Served) -> Counts {
    let Served { device, host, up, down } = served;
    let hits = [device.hits.blocks, host.hits.blocks];
    [hits[0], hits[1], up.blocks, down.blocks, device.evicted_blocks, host.evicted_blocks]
}

/// Compares all requests. Returns the hits of both tiers, and of the naive cache.
fn compare<O: Order>(trace: &RequestTrace, tiers: Tiers, rule: Rule) -> Result<[u64; 2], TestCaseError> {
    let mut naive = Naive::<O>::new(tiers, rule);
    let (mut hits, mut first) = ([0; 2], None);
    tiers::replay(trace, tiers, |i, served| {
        let expected = naive.serve(trace.blocks(i));
        let run = (expected[0] + expected[1]) as usize;
        let tokens = served.device.hits.tokens + served.host.hits.tokens;
        if (counts(served), tokens) != (expected, trace.tokens_of_run(i, run)) && first.is_none() {
            first = Some(format!("request {i}: {served:?}, not {expected:?} and {run} blocks of tokens"));
        }
        hits[0] += served.device.hits.blocks + served.host.hits.blocks;
        hits[1] += run as u64;
    })
    .unwrap();
    match first.filter(|_| rule == Rule::AsStated) {
        Some(different) => Err(TestCaseError::fail(format!("{tiers:?}, {different}"))),
        None => Ok(hits),
    }
}

/// The hits of one LRU cache.
fn one_lru(trace: &RequestTrace, capacity: u32) -> u64 {
    blocks::replay(trace, Policy::Lru, capacity, 0, || ()).unwrap().hit_blocks
}

/// A Mooncake trace; the last block of a prompt holds 200 tokens.
fn mooncake(prompts: &[Vec<u64>]) -> RequestTrace {
    let line = |ids: &Vec<u64>| {
        let tokens = (512 * ids.len()).saturating_sub(312);
        format!("{{\"timestamp\":0,\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
    };
    let text: String = prompts.iter().map(line).collect();
    RequestTrace::from_bytes(text.as_bytes(), &Options::default()).unwrap()
}

/// A RAGPulse trace: ids name pieces, which may repeat in a request and have no known length.
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

/// Prompts over three words: a block's id is its prefix as digits.
fn prefixes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let named = |words: Vec<u64>| -> Vec<u64> {
        let longer = |id: &mut u64, word: u64| {
            *id = *id * 4 + 1 + word;
            Some(*id)
        };
        words.into_iter().scan(0, longer).collect()
    };
    let prompt = prop::collection::vec(0..3_u64, 0..7).prop_map(named);
    prop::collection::vec(prompt, 1..60)
}

fn save() -> impl Strategy<Value = Save> {
    prop_oneof![Just(Save::Published), Just(Save::Evicted)]
}

proptest! {
    #[test]
    fn generated_prompts_are_served_as_by_plain_lists(
        prompts in prefixes(), device in 0..24_u32, host in 0..40_u32, save in save(),
    ) {
        let trace = mooncake(&prompts);
        // Often the least that the largest request needs.
        let device = device.max(tiers::least_device_blocks(&trace).unwrap().1).max(1);
        let [hits, _] = compare::<List>(&trace, Tiers { device, host, save }, Rule::AsStated)?;
        if save == Save::Published || host == 0 {
            prop_assert_eq!(hits, one_lru(&trace, device.max(host)));
        }
    }

    #[test]
    fn pieces_that_repeat_are_served_as_by_plain_lists(
        prompts in prop::collection::vec(prop::collection::vec(0..12_u64, 0..6), 1..60),
        device in 0..12_u32, host in 0..12_u32, save in save(),
    ) {
        let trace = pieces(&prompts);
        let least = tiers::least_device_blocks(&trace).unwrap().1;
        let distinct = |prompt: &Vec<u64>| prompt.iter().collect::<HashSet<_>>().len();
        prop_assert_eq!(least as usize, prompts.iter().map(distinct).max().unwrap());
        compare::<List>(&trace, Tiers { device: device.max(least).max(1), host, save }, Rule::AsStated)?;
    }

    #[test]
    fn both_orders_of_the_naive_cache_are_one(
        ops in prop::collection::vec((0..2_u8, 0..9_u32), 0..200),
    ) {
        let (mut list, mut dates) = (List::default(), Dates::default());
        for (op, block) in ops {
            match op {
                0 => (list.put_last(block), dates.put_last(block)),
                _ => (list.take(block), dates.take(block)),
            };
            prop_assert_eq!((list.first(), list.has(block)), (dates.first(), dates.has(block)));
        }
    }
}

/// Every setting with both times of saving, and the hits of one LRU cache.
fn compare_settings(trace: &RequestTrace, settings: &[(u32, u32)]) {
    for (device, host) in settings.iter().copied() {
        for save in [Save::Published, Save::Evicted] {
            let [hits, _] = compare::<Dates>(trace, Tiers { device, host, save }, Rule::AsStated).unwrap();
            assert!(hits > 0, "a replay without hits proves nothing");
            if save == Save::Published {
                assert_eq!(hits, one_lru(trace, device.max(host)), "{device} and {host} blocks");
            }
        }
    }
}

fn conversation() -> Option<RequestTrace> {
    let path = traces::directory("mooncake")?.join("conversation_trace.jsonl.zst");
    Some(RequestTrace::read(&path, &Options::default()).unwrap())
}

#[test]
fn mooncake_is_served_as_by_a_naive_cache() {
    let Some(trace) = conversation() else { return };
    assert_eq!(tiers::least_device_blocks(&trace).unwrap(), (11_192, 247));
    compare_settings(
        &trace,
        &[(250, 5000), (1000, 10_000), (3125, 25_003), (12_501, 50_006), (50_006, 182_790)],
    );
}

#[test]
fn a_naive_cache_with_another_order_has_other_hits() {
    let Some(trace) = conversation() else { return };
    let tiers = Tiers { device: 1000, host: 10_000, save: Save::Published };
    for rule in [Rule::HostForgetsDeviceHits, Rule::FirstToLast] {
        let [hits, theirs] = compare::<Dates>(&trace, tiers, rule).unwrap();
        assert_ne!(hits, theirs);
    }
}

/// Four sessions of a coding agent at once: half a million references.
#[test]
fn sessions_are_served_as_by_a_naive_cache() {
    let Some(directory) = traces::directory("kv-cache-tester") else { return };
    let text = zstd::decode_all(fs::File::open(directory.join("agentic_A.jsonl.zst")).unwrap()).unwrap();
    let end = text.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(3).unwrap().0;
    let trace = RequestTrace::from_bytes(&text[..=end], &Options::default()).unwrap();
    assert_eq!((trace.notes().sessions, trace.references().len()), (4, 527_926));
    assert_eq!(tiers::least_device_blocks(&trace).unwrap().1, 3075);
    compare_settings(&trace, &[(3075, 0), (3125, 1000), (3125, 10_000), (12_501, 5000), (12_501, 25_003)]);
}

/// All 173 sessions: 21.5 million references. `make soak` runs it.
#[test]
fn all_sessions_are_served_as_by_a_naive_cache() {
    if std::env::var("FOREBAY_SOAK").as_deref() != Ok("1") {
        return;
    }
    let Some(directory) = traces::directory("kv-cache-tester") else { return };
    let trace = RequestTrace::read(&directory.join("agentic_A.jsonl.zst"), &Options::default()).unwrap();
    assert_eq!(trace.notes().sessions, 173);
    assert_eq!(tiers::least_device_blocks(&trace).unwrap().1, 13_757);
    let settings = [(13_757, 0), (13_757, 25_003), (25_003, 50_006), (50_006, 100_012), (100_012, 1_000_000)];
    compare_settings(&trace, &settings);
}

/// `forebay replay` with these arguments.
fn replay<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    std::iter::once("replay").chain(arguments.iter().copied()).collect()
}

fn succeeds(arguments: &[&str]) -> String {
    command::succeeds(&replay(arguments))
}

fn refuses(arguments: &[&str]) -> String {
    command::refuses(&replay(arguments))
}

/// A file for one test only.
fn file(name: &str, text: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("tiers");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// By hand, 2 blocks on the device and 3 on the host: 1, 2 are saved; 3, 4 take their pages, are saved, and 2 leaves
/// the host; 1 comes back and hits, 2 is computed again, in the pages of 4 and 3, and 4 leaves the host for 2.
fn tiny() -> String {
    let line = |length: u32, ids: &str| {
        format!("{{\"timestamp\":0,\"input_length\":{length},\"output_length\":9,\"hash_ids\":[{ids}]}}\n")
    };
    line(1024, "1,2") + &line(600, "3,4") + &line(1000, "1,2")
}

const TIERS: [&str; 4] = ["--device-blocks", "2", "--host-blocks", "3"];
const RATES: [&str; 4] = ["--prefill-rate", "100", "--link-rate", "0.001"];

fn entry(arguments: &[&str]) -> Value {
    let text = succeeds(&[arguments, &["--json", "-"]].concat());
    let [entry] = <[Value; 1]>::try_from(serde_json::from_str::<Vec<Value>>(&text).unwrap()).unwrap();
    entry
}

#[test]
fn the_json_has_the_counts_made_by_hand() {
    let path = file("tiny.jsonl", &tiny());
    let priced = [&[path.as_str()], &TIERS[..], &RATES, &["--block-bytes", "1000000"]].concat();
    let entry = entry(&priced);
    let at = |pointer: &str| entry.pointer(pointer).unwrap_or_else(|| panic!("{pointer} in {entry}"));
    for (pointer, expected) in [
        ("/device_blocks", 2),
        ("/host_blocks", 3),
        ("/requests", 3),
        ("/blocks", 6),
        ("/input_tokens", 2624),
        ("/device/hit_blocks", 0),
        ("/host/hit_blocks", 1),
        ("/host/hit_tokens", 512),
        ("/both/hit_blocks", 1),
        ("/device/evicted_blocks", 4),
        ("/host/evicted_blocks", 2),
        ("/up/blocks", 1),
        ("/down/blocks", 5),
        ("/block_bytes", 1_000_000),
        ("/time_saved/slower_requests", 0),
    ] {
        assert_eq!(at(pointer), expected, "{pointer}");
    }
    // 512 tokens at 100 a second, less a megabyte at a megabyte a second.
    for (pointer, expected) in [
        ("/down/bytes", 5e6),
        ("/up/bytes_per_request", 1e6 / 3.0),
        ("/both/hit_ratio", 1.0 / 6.0),
        ("/time_saved/device_seconds", 0.0),
        ("/time_saved/host_seconds", 4.12),
        ("/time_saved/percentiles/3/seconds", 4.12),
        ("/time_saved/percentiles/1/seconds", 0.0),
    ] {
        assert!((at(pointer).as_f64().unwrap() - expected).abs() < 1e-9, "{pointer}: {}", at(pointer));
    }
    let texts = ["/kind", "/save", "/trace"].map(|pointer| at(pointer).as_str().unwrap());
    assert_eq!(texts, ["requests-tiers", "published", path.as_str()]);
    let skipped = self::entry(&[&priced[..], &["--skip", "2"]].concat());
    assert_eq!((&skipped["requests"], &skipped["down"]["blocks"]), (&1.into(), &1.into()));
}

#[test]
fn bytes_and_times_are_left_out_where_they_are_unknown() {
    let path = file("unknown.jsonl", &tiny());
    let plain = entry(&[&[path.as_str()], &TIERS[..]].concat());
    for field in ["block_bytes", "token_bytes", "row_model", "time_saved"] {
        assert!(plain[field].is_null(), "{field}");
    }
    assert!(plain["up"]["bytes"].is_null());
    let text = succeeds(&[&[path.as_str()], &TIERS[..]].concat());
    assert!(
        text.contains("--block-bytes or --model gives the bytes") && !text.contains("first token"),
        "{text}"
    );
    // 32 layers of 4,096 bytes; the last block of a prompt is moved whole.
    let model =
        entry(&[&[path.as_str()], &TIERS[..], &["--model", "gqa-8x128", "--save", "evicted"]].concat());
    assert_eq!((&model["token_bytes"], &model["block_bytes"]), (&131_072.into(), &67_108_864.into()));
    assert_eq!(model["up"]["bytes"], model["up"]["blocks"].as_f64().unwrap() * 67_108_864.0);
    assert_eq!((&model["row_model"], &model["save"]), (&"gqa-8x128".into(), &"evicted".into()));
}

#[test]
fn the_table_has_a_line_for_each_tier_and_says_what_is_counted() {
    let path = file("table.jsonl", &tiny());
    let text = succeeds(&[&[path.as_str()], &TIERS[..], &RATES, &["--block-bytes", "1000000"]].concat());
    for line in ["device", "host", "both"] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{line} in {text}");
    }
    for words in ["Up: 1 block, 977 KiB", "Down: 5 blocks, 4.77 MiB", "first token saved at 100", "p99 4.120"]
    {
        assert!(text.contains(words), "{words} in {text}");
    }
    let alone = succeeds(&[&path, "--device-blocks", "2", "--host-blocks", "0"]);
    assert!(alone.contains("no host tier") && alone.contains("Down: 0 blocks"), "{alone}");
}

#[test]
fn what_does_not_fit_is_refused_with_the_way_out() {
    let path = file("refused.jsonl", &tiny());
    let refused = |more: &[&str]| refuses(&[&[path.as_str()], more].concat());
    let said = refused(&["--device-blocks", "1", "--host-blocks", "9"]);
    assert!(said.contains("the least is 2") && said.contains("request 1, blocks 2"), "{said}");
    for (more, words) in [
        (&["--device-blocks", "0", "--host-blocks", "3"][..], "0 is not in 1..="),
        (&["--device-blocks", "2"], "--host-blocks <M>"),
        (&["--host-blocks", "2"], "--device-blocks <N>"),
        (&["--save", "evicted"], "--device-blocks <N>"),
        (&["--link-rate", "9"], "--device-blocks <N>|--html <FILE>"),
    ] {
        let said = refused(more);
        assert!(said.contains(words), "{said}");
    }
    for (more, words) in [
        (&["--prefill-rate", "0"][..], "tokens a second from 0.001"),
        (&["--prefill-rate", "5"], "without --link-rate"),
        (&["--link-rate", "5"], "without --prefill-rate"),
        (&RATES, "the bytes of a block: --block-bytes or --model"),
        (&["--block-bytes", "0"], "from 1 to 2^60"),
        (&["--block-bytes", "12XB"], "not a size such as"),
        (&["--block-bytes", "5", "--model", "glm-5"], "cannot be used with"),
        (&["--capacity", "5"], "cannot be used with"),
        (&["--policy", "lru"], "cannot be used with"),
        (&["--curve"], "cannot be used with"),
        (&["--html", "-"], "cannot be used with"),
        (&["--mtp", "2"], "--mtp is for selection traces"),
    ] {
        let said = refused(&[&TIERS[..], more].concat());
        assert!(said.contains(words), "{more:?}: {said}");
    }
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
    let said = refuses(&[&[demo.to_str().unwrap()], &TIERS[..]].concat());
    assert!(said.contains("--device-blocks is for request traces"), "{said}");
    let lengths =
        file("lengths.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n");
    let said = refuses(&[&[lengths.as_str()], &TIERS[..]].concat());
    assert!(said.contains("names no blocks"), "{said}");
    assert!(refused(&[&TIERS[..], &["--memory", "1MB"]].concat()).contains("--memory SIZE"));
}
