//! Claim: the runs of a request of 4,096 tokens and 61 layers, from 16 prefill ranks to one of 144 decode ranks, are
//! planned in at most 5 ms.
//!
//! Every run of every layer is visited, and its bytes are summed. "divided tokens" is a request in the middle of a
//! batch that 16 ranks divide by tokens; "equal copies" is one whose latents all of 16 ranks have; "heads" goes from 32
//! ranks to 8, with 8 KV heads in pages of other sizes and layouts. "pairing" is the plan itself, once for two
//! instances.

#[path = "support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "no side is compared with another")]
#[path = "support/race.rs"]
mod race;

use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::transfer::{Chunk, Component, LayerPlaces, Of, Place, Plan, Request, Side as End, Split, Stage};
use race::{Side, claim, done, race, record};

const LAYERS: u32 = 61;
const TOKENS: u32 = 4_096;

/// An instance whose layers have a plane each; a token's components are side by side.
fn end(components: &[(&str, u32, u64)], width: u32, split: Split, replicas: u32, page_tokens: u32) -> End {
    let own =
        |heads: u32| if split == Split::Heads { u64::from((heads / width).max(1)) } else { heads.into() };
    let row: u64 = components.iter().map(|(_, heads, bytes)| own(*heads) * bytes).sum();
    let places = |layer: u32| {
        let mut offset = 0;
        let place = |(component, (_, heads, bytes)): (u32, &(&str, u32, u64))| {
            let place = Place { component, plane: layer, offset, token_stride: row, head_stride: *bytes };
            offset += own(*heads) * bytes;
            place
        };
        LayerPlaces { layer, places: (0..).zip(components).map(place).collect() }
    };
    let named = |(name, heads, head_bytes): &(&str, u32, u64)| Component {
        name: (*name).to_owned(),
        dtype: "bf16".to_owned(),
        heads: *heads,
        head_bytes: *head_bytes,
    };
    End {
        components: components.iter().map(named).collect(),
        stages: vec![Stage {
            layers: (0..LAYERS).map(places).collect(),
            page_bytes: vec![row * u64::from(page_tokens); LAYERS as usize],
        }],
        width,
        split,
        replicas,
        page_tokens,
    }
}

/// Visits all runs of a request.
fn pass(plan: &Plan, request: &Request<'_>) -> (Duration, u64) {
    let lap = Lap::begin();
    let mut bytes = 0;
    for layer in plan.layers() {
        done(plan.runs(request, (layer, 0..TOKENS), Of::All, |run| {
            bytes += std::hint::black_box(run).bytes * u64::from(run.pieces);
            Ok(())
        }));
    }
    let spent = lap.end();
    assert_eq!(bytes, plan.bytes(TOKENS));
    (spent, 1)
}

fn main() {
    let latents = [("nope", 1, 512), ("rope", 1, 144), ("index", 1, 132)];
    let heads = [("k", 8, 256), ("v", 8, 256)];
    let (divided, copies) =
        (end(&latents, 16, Split::Tokens, 1, 128), end(&latents, 16, Split::Heads, 1, 128));
    let decode = end(&latents, 1, Split::Heads, 144, 64);
    let (wide, narrow) = (end(&heads, 32, Split::Heads, 1, 16), end(&heads, 8, Split::Heads, 1, 256));
    let [from_divided, from_copies, of_heads] = [(&divided, &decode), (&copies, &decode), (&wide, &narrow)]
        .map(|(from, to)| done(Plan::new(from, to)));
    let chunks = [Chunk { first: 0, at: 3_000, slice: 1_000 }];
    let request = Request { tokens: TOKENS, replicas: [0, 100], chunks: &chunks };
    let (whole, single) =
        (Request { chunks: &[], ..request }, Request { chunks: &[], replicas: [0, 0], ..request });
    let mut sides = [
        Side::new("divided tokens, 16 to 144", || pass(&from_divided, &request)),
        Side::new("equal copies, 16 to 144", || pass(&from_copies, &whole)),
        Side::new("heads, 32 to 8", || pass(&of_heads, &single)),
        Side::new("pairing, 16 to 144", || {
            let lap = Lap::begin();
            std::hint::black_box(done(Plan::new(&divided, &decode)));
            (lap.end(), 1)
        }),
    ];
    let mut criterion = Criterion::default().configure_from_args();
    record(&mut criterion, "transfer", &mut sides);
    let names =
        ["divided tokens, 16 to 144", "equal copies, 16 to 144", "heads, 32 to 8", "pairing, 16 to 144"];
    let rounds = race(31, &mut sides);
    for side in names {
        println!("{side}: {:.2} ms", 1e3 / rounds.rate(side));
    }
    for side in &names[..2] {
        claim(&format!("5 ms against a request's runs, {side}"), 5e-3 * rounds.rate(side), 1.0);
    }
    criterion.final_summary();
}
