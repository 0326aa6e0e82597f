//! A transfer: its runs are visited and noted without allocating, and no count on the wire makes its readers allocate.
//! A notice of many runs takes as many allocations as one of few, at both ends.

use std::time::Duration;

use forebay::transfer::receiver::{self, Mover, Wanted, Where};
use forebay::transfer::sender::{self, Computed, Source};
use forebay::transfer::{
    Component, Fence, Frame, LayerPlaces, Ledger, Of, Place, Plan, Rank, Receiver, Request, Run, Sender,
    Side, Split, Stage,
};

use crate::frame_bytes::sum;
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

/// Rows that are all alike, read and stored without allocating.
struct Rows;

impl Source for Rows {
    fn read(&mut self, _: u64, _: &Run, into: &mut [u8]) -> forebay::Result<()> {
        into.fill(7);
        Ok(())
    }
}

impl Mover for Rows {
    fn fetch(&mut self, _: u32, _: Fence, _: Where, _: &Run, into: &mut [u8]) -> forebay::Result<()> {
        into.fill(7);
        Ok(())
    }

    fn store(&mut self, _: Fence, _: &Run, _: &[u8]) -> forebay::Result<()> {
        Ok(())
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

const NOW: Duration = Duration::ZERO;

/// Both machines with a connection over which a request of so many tokens was granted, each token a run.
fn machines(tokens: u32) -> (Sender, Receiver) {
    let rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };
    let sending = sender::Options { bulk_tokens: 0, ..sender::Options::default() };
    let mut sender = Sender::new(side(1), rank, sending).unwrap();
    let mut receiver = Receiver::new(side(1), rank, receiver::Options::default()).unwrap();
    sender.connect(1, false).unwrap();
    receiver.connect(1, false).unwrap();
    let mut frame = Vec::new();
    sender.poll(NOW, &mut Rows, &mut frame).unwrap();
    receiver.frame(1, &frame, &mut Rows).unwrap();
    assert!(matches!(receiver.event(), Some(receiver::Event::Met { link: 1, .. })));
    sender.begin(9, tokens, None).unwrap();
    let fence = Fence { request: 9, generation: 0 };
    let (payloads, landing, deadline) = (&[][..], &[][..], None);
    let wanted = Wanted { fence, tokens, first: 0, sender: (1, 0), payloads, landing, deadline };
    receiver.grant(&wanted).unwrap();
    // The hello and the grant.
    for _ in 0..2 {
        receiver.poll(NOW, &mut frame).unwrap();
        sender.frame(1, &frame).unwrap();
    }
    // That it knows the grant.
    let mut granted = 0;
    while let Some(action) = sender.poll(NOW, &mut Rows, &mut frame).unwrap() {
        granted += u32::from(matches!(action, sender::Action::Event(sender::Event::Granted { .. })));
    }
    assert_eq!(granted, 1);
    (sender, receiver)
}

/// The allocations of a notice of a layer, after one of another layer, and their largest: while the sender makes it in
/// the same buffer, and while the receiver takes it.
pub fn notice(tokens: u32) -> [(u64, u64); 2] {
    let (mut sender, mut receiver) = machines(tokens);
    let (mut frame, mut seen) = (Vec::new(), [(0, 0); 2]);
    for layer in 0..2 {
        let part = Computed { request: 9, layer, tokens: 0..tokens, chunk: None, origin: layer.into() };
        sender.computed(&[part]).unwrap();
        let mut calls = 0;
        let most = largest(|| {
            calls = counted(|| drop(sender.poll(NOW, &mut Rows, &mut frame).unwrap()));
        });
        seen[0] = (calls, most);
        let Ok(Frame::Notice(told)) = Frame::decode(&frame) else { panic!("a notice was to come") };
        assert_eq!(told.parts().map(|part| part.digests.iter().count()).sum::<usize>(), tokens as usize);
        let most = largest(|| {
            calls = counted(|| receiver.frame(1, &frame, &mut Rows).unwrap());
        });
        seen[1] = (calls, most);
        assert!(receiver.is_ready(Fence { request: 9, generation: 0 }, layer));
    }
    seen
}

/// The allocations while frames of each kind are read and all that they list is visited: whole, cut, and with counts
/// of which nothing follows.
pub fn frames() -> u64 {
    let (mut sender, mut receiver) = machines(300);
    let mut frames = Vec::new();
    let part = Computed { request: 9, layer: 0, tokens: 0..300, chunk: None, origin: 0 };
    sender.computed(&[part]).unwrap();
    sender.payload(9, 1, b"token").unwrap();
    let mut frame = Vec::new();
    while let Some(action) = sender.poll(NOW, &mut Rows, &mut frame).unwrap() {
        assert!(matches!(action, sender::Action::Frame { .. }));
        receiver.frame(1, &frame, &mut Rows).unwrap();
        frames.push(frame.clone());
    }
    receiver.abort(Fence { request: 9, generation: 0 }).unwrap();
    while let Some(action) = receiver.poll(NOW, &mut frame) {
        frames.extend(matches!(action, receiver::Action::Frame { .. }).then(|| frame.clone()));
    }
    let mut kinds: Vec<u8> = frames.iter().map(|frame| frame[0]).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [3, 4, 4, 5, 6]);
    // Counts of 65,535 and more, with sums that fit: pages, parts, digests, runs.
    let claims = [
        [&[2][..], &[0; 28], &[0xFF; 4]].concat(),
        [&[3][..], &[0; 8], &[0xFF; 2]].concat(),
        [&[3][..], &[0; 8], &[1, 0], &[0; 48], &[0], &[0xFF; 4]].concat(),
        [&[4][..], &[0; 8], &[1, 0, 0, 0], &[0xFF; 4]].concat(),
    ];
    for claim in claims {
        let sum = sum(&claim).to_le_bytes();
        frames.push([claim, sum.to_vec()].concat());
    }
    let mut visited = 0;
    let calls = counted(|| {
        for bytes in &frames {
            for length in [bytes.len(), bytes.len() - 1, bytes.len() / 2] {
                visited += match std::hint::black_box(Frame::decode(&bytes[..length])) {
                    Ok(Frame::Notice(notice)) => notice.parts().map(|part| part.digests.iter().count()).sum(),
                    Ok(Frame::Answer(answer)) => answer.failed().map(|(_, runs)| runs.iter().count()).sum(),
                    _ => 0,
                }
            }
        }
    });
    assert_eq!(visited, 300);
    calls
}
