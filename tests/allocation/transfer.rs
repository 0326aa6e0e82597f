//! A transfer: its runs are visited and noted without allocating, and no count on the wire makes its reader allocate.

use forebay::transfer::{Component, LayerPlaces, Ledger, Of, Place, Plan, Request, Side, Split, Stage};

use crate::{counted, largest};

fn side(page_tokens: u32) -> Side {
    let place = Place { component: 0, plane: 0, offset: 0, token_stride: 64, head_stride: 32 };
    Side {
        components: vec![Component {
            name: "kv".to_owned(),
            dtype: "bf16".to_owned(),
            heads: 2,
            head_bytes: 32,
        }],
        stages: vec![Stage {
            layers: (0..4)
                .map(|layer| LayerPlaces {
                    layer,
                    places: vec![Place { offset: u64::from(layer) * 4096, ..place }],
                })
                .collect(),
            page_bytes: vec![4 * 4096],
        }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens,
    }
}

/// The allocations of a request's runs, once a ledger is made.
pub fn runs() -> u64 {
    let plan = Plan::new(&side(64), &side(24)).unwrap();
    let request = Request { tokens: 1000, replicas: [0, 0], chunks: &[] };
    let mut ledger = Ledger::new(&plan, (0, 0), 0..1000).unwrap();
    let calls = counted(|| {
        for layer in 0..4 {
            let note = |run| ledger.note(&run).map(drop);
            plan.runs(&request, (layer, 0..1000), Of::Receiver(0, 0), note).unwrap();
        }
    });
    assert!(ledger.is_whole());
    calls
}

/// The bytes of the largest allocation while a side is read whose stages are said to be 65,535, and of one that is
/// read.
pub fn claimed() -> [u64; 2] {
    let bytes = side(64).encode().unwrap();
    let stages = bytes.len() - 2 - 2 - 8 - 2 - 4 * (5 + 27);
    let mut claims = bytes.clone();
    claims[stages..stages + 2].fill(0xFF);
    [claims, bytes].map(|bytes| largest(|| drop(std::hint::black_box(Side::decode(&bytes)))))
}
