//! Deployments of real models.

use std::collections::BTreeMap;

use crate::map::{faults, runs_of};
use crate::random::{Layout, Tokens, side};
use forebay::transfer::{Chunk, Of, Plan, Request, Run, Side, Split, VERSION};

fn runs(plan: &Plan, request: &Request<'_>) -> Vec<Run> {
    let of_layer = |layer| runs_of(plan, request, (layer, 0..request.tokens), Of::All).unwrap();
    plan.layers().flat_map(of_layer).collect()
}

fn total(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.bytes * u64::from(run.pieces)).sum()
}

/// DeepSeek's latents, with rope keys apart, and with index keys in the first `indexed` layers.
fn deepseek(indexed: u32, layers: u32) -> (Tokens, Vec<(u32, Vec<usize>)>) {
    let tokens =
        vec![("nope".to_owned(), 1, 1024), ("rope".to_owned(), 1, 128), ("index".to_owned(), 1, 132)];
    let has = |layer| if layer < indexed { vec![0, 1, 2] } else { vec![0, 1] };
    (tokens, (0..layers).map(|layer| (layer, has(layer))).collect())
}

/// DeepSeek-R1 in BF16 from 16 ranks that all have a request's latents to one of 32 ranks that decode: every row is
/// sent once, and each of the 16 sends as much.
#[test]
fn r1_goes_from_16_prefill_ranks_to_32_decode_ranks() {
    let (tokens, layers) = deepseek(0, 61);
    let source =
        side(&tokens, std::slice::from_ref(&layers), (16, Split::Heads, 1, 128), (Layout::Rows, 0, false));
    let target = side(&tokens, &[layers], (1, Split::Heads, 32, 64), (Layout::Separate, 0, false));
    let plan = Plan::new(&source, &target).unwrap();
    let request = Request { tokens: 4096, replicas: [0, 19], chunks: &[] };
    let runs = runs(&plan, &request);
    assert_eq!(total(&runs), 4096 * 1152 * 61);
    assert_eq!(plan.bytes(4096), total(&runs));
    assert!(runs.iter().all(|run| (run.to.stage, run.to.lane) == (0, 0)));
    let mut sent = BTreeMap::<u32, u64>::new();
    runs.iter().for_each(|run| *sent.entry(run.from.lane).or_default() += run.bytes * u64::from(run.pieces));
    assert_eq!(sent.len(), 16);
    assert_eq!(sent.values().max(), sent.values().min());
    // Which copy sends is a part of the version: instances of two releases must agree.
    let senders = |layer: u32| {
        let own = runs.iter().filter(|run| run.layer == layer && run.component == 1 && run.to.page < 4);
        own.map(|run| run.from.lane).collect::<Vec<_>>()
    };
    assert_eq!((VERSION, senders(0), senders(14)), (2, vec![0, 1, 2, 3], vec![14, 15, 0, 1]));
}

/// DeepSeek-V3.2 from 16 ranks that divide a batch by tokens to one of 144: a request in the middle of the batch is on
/// some of them, their tokens end inside pages, and padding is not sent.
#[test]
fn v32_goes_from_a_divided_batch_to_144_ranks() {
    let (tokens, layers) = deepseek(61, 62);
    let source =
        side(&tokens, std::slice::from_ref(&layers), (16, Split::Tokens, 1, 64), (Layout::Rows, 0, false));
    let target = side(&tokens, &[layers], (1, Split::Heads, 144, 64), (Layout::Rows, 52, true));
    let plan = Plan::new(&source, &target).unwrap();
    // 16,000 tokens are 1,000 of each rank: 15 pages and 40 tokens.
    let chunks = [Chunk { first: 0, at: 3_000, slice: 1_000 }];
    let request = Request { tokens: 4_096, replicas: [0, 143], chunks: &chunks };
    let runs = runs(&plan, &request);
    assert_eq!(total(&runs), 4096 * (62 * 1152 + 61 * 132));
    let of_page = |page: u32| {
        let runs = runs.iter().filter(move |run| run.layer == 3 && run.component == 0 && run.to.page == page);
        runs.map(|run| (run.from.lane, run.from.page, run.tokens)).collect::<Vec<_>>()
    };
    // Ranks 3 to 7. Token 1,000 is the first of rank 4: the target's page 15 has 40 tokens of rank 3 and 24 of rank 4.
    assert_eq!(of_page(0), [(3, 0, 64)]);
    assert_eq!(of_page(15), [(3, 15, 40), (4, 0, 24)]);
    assert_eq!(runs.iter().map(|run| run.from.lane).max(), Some(7));
    assert!(runs.iter().all(|run| run.layer < 61 || run.component != 0), "layer 61 has no index keys");
}

/// A receiver without the layer of multi-token prediction and without index keys gets neither.
#[test]
fn what_the_receiver_does_not_keep_is_not_sent() {
    let (tokens, layers) = deepseek(3, 4);
    let kept: Vec<_> = layers[..3].iter().map(|(layer, _)| (*layer, vec![0, 1])).collect();
    let source = side(&tokens, &[layers], (1, Split::Heads, 1, 64), (Layout::Rows, 0, false));
    let target = side(&tokens, &[kept], (1, Split::Heads, 1, 64), (Layout::Rows, 0, false));
    let plan = Plan::new(&source, &target).unwrap();
    assert_eq!((plan.layers().collect::<Vec<_>>(), plan.bytes(1)), (vec![0, 1, 2], 3 * 1152));
    let request = Request { tokens: 100, replicas: [0, 0], chunks: &[] };
    assert_eq!(faults([&source, &target], &request, (0, 100), |_| ()).unwrap(), None);
}

fn qwen(width: u32, page: u32, layout: Layout, stages: usize) -> Side {
    let tokens = vec![("k".to_owned(), 8, 256), ("v".to_owned(), 8, 256)];
    let layers: Vec<_> = (0..4).map(|layer| (layer, vec![0, 1])).collect();
    let stages: Vec<_> = layers.chunks(4 / stages).map(<[_]>::to_vec).collect();
    side(&tokens, &stages, (width, Split::Heads, 1, page), (layout, 0, false))
}

/// 8 KV heads from 32 ranks, four of which have each head, to 8 ranks; and back to 2 pipeline stages of 16.
#[test]
fn heads_go_from_32_ranks_to_8_and_back() {
    let (wide, narrow) = (qwen(32, 16, Layout::Separate, 1), qwen(8, 256, Layout::Whole, 1));
    let request = Request { tokens: 300, replicas: [0, 0], chunks: &[] };
    assert_eq!(faults([&wide, &narrow], &request, (0, 16), |_| ()).unwrap(), None);
    let plan = Plan::new(&wide, &narrow).unwrap();
    let all = runs(&plan, &request);
    let turn = all.iter().find(|run| (run.layer, run.to.lane, run.to.page) == (1, 3, 1)).unwrap();
    assert_eq!((turn.from.lane, turn.from.page), (3 * 4 + 1, 16));
    let mut senders: Vec<u32> = all.iter().map(|run| run.from.lane).collect();
    senders.sort_unstable();
    senders.dedup();
    assert_eq!(senders, (0..32).collect::<Vec<_>>(), "all copies take turns");
    let staged = qwen(16, 32, Layout::Rows, 2);
    assert_eq!(faults([&narrow, &staged], &request, (32, 40), |_| ()).unwrap(), None);
    // Each of two ranks that have a head gets it.
    assert_eq!(Plan::new(&narrow, &staged).unwrap().bytes(1), 2 * 4 * 8 * 512);
}

/// Pages of one layout and size, whole: a run for each page.
#[test]
fn equal_pages_are_one_run_each() {
    let (tokens, layers) = deepseek(0, 2);
    let layers = [layers];
    for layout in [Layout::Separate, Layout::Whole] {
        let tokens = if matches!(layout, Layout::Whole) {
            vec![("k".to_owned(), 8, 64), ("v".to_owned(), 8, 64)]
        } else {
            tokens.clone()
        };
        let one = side(&tokens, &layers, (1, Split::Heads, 1, 64), (layout, 0, false));
        equal(&one);
    }
}

fn equal(one: &Side) {
    let plan = Plan::new(one, one).unwrap();
    let request = Request { tokens: 640, replicas: [0, 0], chunks: &[] };
    let runs = runs(&plan, &request);
    assert_eq!(runs.len(), 2 * 2 * 10);
    assert!(runs.iter().all(|run| run.pieces == 1 && run.from == run.to));
}
