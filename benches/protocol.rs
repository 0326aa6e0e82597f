//! Claim: both machines of a transfer together take at most 20 us of one core for a layer of a prompt, bytes apart.
//!
//! A pass is a request's life: grant, 61 layers of 4,096 tokens one by one, each computed, told, moved and answered,
//! and the end. Time is by layer. A component has one byte of a token, so that copies and digests cost next to nothing;
//! the numbers of runs are those of V3.2, with latents, rope keys and index keys in pages of 64. "one to one" is one
//! rank to one rank: 192 runs a layer. "16 to one" are 16 ranks that have equal copies and take turns, and the
//! receiver: the work of 17 cores. "four requests" have 1,024 tokens each, in one notice a layer.

#[path = "support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "no side is compared with another")]
#[path = "support/race.rs"]
mod race;

use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::transfer::receiver::{self, Mover, Wanted, Where};
use forebay::transfer::sender::{self, Computed, Source};
use forebay::transfer::{
    Component, Fence, LayerPlaces, Place, Rank, Receiver, Run, Sender, Side as End, Split, Stage,
};
use race::{Side, claim, done, race, record};

const LAYERS: u32 = 61;

/// An instance whose layers have a plane for each component of one byte.
fn end(width: u32, page_tokens: u32) -> End {
    let names = ["nope", "rope", "index"];
    let places = |layer: u32| LayerPlaces {
        layer,
        places: (0..3)
            .map(|component| {
                let plane = layer * 3 + component;
                Place { component, plane, offset: 0, token_stride: 1, head_stride: 1 }
            })
            .collect(),
    };
    End {
        components: names
            .map(|name| Component { name: name.to_owned(), dtype: "u8".to_owned(), heads: 1, head_bytes: 1 })
            .to_vec(),
        stages: vec![Stage {
            layers: (0..LAYERS).map(places).collect(),
            page_bytes: vec![page_tokens.into(); 3 * LAYERS as usize],
        }],
        width,
        split: Split::Heads,
        replicas: 1,
        page_tokens,
    }
}

/// Rows that are all equal, and pages that keep nothing.
struct Nothing;

impl Source for Nothing {
    fn read(&mut self, _: u64, _: &Run, into: &mut [u8]) -> forebay::Result<()> {
        into.fill(7);
        Ok(())
    }
}

impl Mover for Nothing {
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

/// Ranks of a sender, one receiver, and what they say to each other.
struct Pair {
    senders: Vec<Sender>,
    receiver: Receiver,
    frame: Vec<u8>,
    generation: u64,
    whole: u32,
}

impl Pair {
    fn new(width: u32) -> Pair {
        let (source, target) = (end(width, 64), end(1, 64));
        let rank = |lane| Rank { instance: 1, replica: 0, stage: 0, lane };
        let mut receiver = done(Receiver::new(target, rank(0), receiver::Options::default()));
        let mut senders = Vec::new();
        for lane in 0..width {
            let mut sender = done(Sender::new(source.clone(), rank(lane), sender::Options::default()));
            done(sender.connect(lane, false));
            done(receiver.connect(lane, false));
            senders.push(sender);
        }
        let mut pair = Pair { senders, receiver, frame: Vec::new(), generation: 0, whole: 0 };
        pair.talk();
        pair
    }

    /// Carries frames until neither side has anything to say.
    fn talk(&mut self) {
        let mut quiet = false;
        while !quiet {
            quiet = true;
            for sender in &mut self.senders {
                while let Some(action) = done(sender.poll(Duration::ZERO, &mut Nothing, &mut self.frame)) {
                    if let sender::Action::Frame { link } = action {
                        quiet = false;
                        done(self.receiver.frame(link, &self.frame, &mut Nothing));
                    }
                }
            }
            while let Some(action) = self.receiver.poll(Duration::ZERO, &mut self.frame) {
                match action {
                    receiver::Action::Frame { link } => {
                        quiet = false;
                        done(self.senders[link as usize].frame(link, &self.frame));
                    }
                    receiver::Action::Event(receiver::Event::Whole { .. }) => self.whole += 1,
                    receiver::Action::Event(_) | receiver::Action::Close { .. } => {}
                }
            }
        }
    }

    /// Sends requests, layer by layer. Returns the time by layer.
    fn pass(&mut self, requests: u32, tokens: u32) -> (Duration, u64) {
        let lap = Lap::begin();
        for request in 0..requests {
            self.senders.iter_mut().for_each(|sender| done(sender.begin(request.into(), tokens, None)));
            let fence = Fence { request: request.into(), generation: self.generation };
            self.generation += 1;
            let (payloads, landing) = (&[][..], &[][..]);
            let wanted =
                Wanted { fence, tokens, first: 0, sender: (1, 0), payloads, landing, deadline: None };
            done(self.receiver.grant(&wanted));
        }
        let mut parts = Vec::new();
        for layer in 0..LAYERS {
            parts.clear();
            parts.extend((0..requests).map(|request| {
                let origin = u64::from(layer * requests + request);
                Computed { request: request.into(), layer, tokens: 0..tokens, chunk: None, origin }
            }));
            self.senders.iter_mut().for_each(|sender| done(sender.computed(&parts)));
            self.talk();
        }
        for request in 0..requests {
            self.senders.iter_mut().for_each(|sender| done(sender.finish(request.into())));
        }
        self.talk();
        let spent = lap.end();
        assert_eq!(std::mem::take(&mut self.whole), requests);
        (spent, LAYERS.into())
    }
}

fn main() {
    let (mut one, mut several, mut four) = (Pair::new(1), Pair::new(16), Pair::new(1));
    let names = ["one to one", "16 to one", "four requests"];
    let mut sides = [
        Side::new(names[0], || one.pass(1, 4_096)),
        Side::new(names[1], || several.pass(1, 4_096)),
        Side::new(names[2], || four.pass(4, 1_024)),
    ];
    let mut criterion = Criterion::default().configure_from_args();
    record(&mut criterion, "protocol", &mut sides);
    let rounds = race(31, &mut sides);
    for side in names {
        println!("{side}: {:.1} us a layer", 1e6 / rounds.rate(side));
    }
    for side in [names[0], names[2]] {
        claim(&format!("20 us against a layer, {side}"), 20e-6 * rounds.rate(side), 1.0);
    }
    criterion.final_summary();
}
