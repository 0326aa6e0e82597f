//! Leading pages that a request shares, in the list of pages that writers from afar write to.
//!
//! The list has a page for every token of the prompt, those that are there already included. Nothing writes to these.
//! The receiver says which pages are free by their numbers. By then a shared page may have left the prefix cache and be
//! another request's, whose writers still reach it. So it is not said to be free.

use std::time::Duration;

use forebay::Result;
use forebay::transfer::sender::{self, Source};
use forebay::transfer::{Fence, Rank, Receiver, Run, Sender, receiver};

use crate::model::Model;
use crate::net::Draw;

struct Nothing;

impl Source for Nothing {
    fn read(&mut self, _: u64, _: &Run, _: &mut [u8]) -> Result<()> {
        unreachable!("nothing is computed")
    }
}

impl receiver::Mover for Nothing {
    fn fetch(&mut self, _: u32, _: Fence, _: receiver::Where, _: &Run, _: &mut [u8]) -> Result<()> {
        unreachable!("nothing is told")
    }

    fn store(&mut self, _: Fence, _: &Run, _: &[u8]) -> Result<()> {
        unreachable!("nothing is told")
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

/// A prefill and a decode rank with one connection, whose other end writes from afar.
struct Two(Sender, Receiver);

impl Two {
    /// Gives each end what the other one says, until both are silent. Returns the landing pages that are free.
    fn talk(&mut self) -> Vec<u32> {
        let (mut frame, mut free, mut quiet) = (Vec::new(), Vec::new(), false);
        while !std::mem::replace(&mut quiet, true) {
            while let Some(action) = self.1.poll(Duration::ZERO, &mut frame) {
                quiet = false;
                match action {
                    receiver::Action::Frame { link } => self.0.frame(link, &frame).unwrap(),
                    receiver::Action::Event(receiver::Event::Free { landing }) => free.extend(landing),
                    _ => {}
                }
            }
            while let Some(action) = self.0.poll(Duration::ZERO, &mut Nothing, &mut frame).unwrap() {
                quiet = false;
                if let sender::Action::Frame { link } = action {
                    self.1.frame(link, &frame, &mut Nothing).unwrap();
                }
            }
        }
        free
    }

    fn grant(&mut self, fence: Fence, (tokens, first): (u32, u32), landing: &[u32]) {
        let payloads = &[];
        let wanted =
            receiver::Wanted { fence, tokens, first, sender: (0, 0), payloads, landing, deadline: None };
        self.1.grant(&wanted).unwrap();
    }
}

/// Of a request that is given up and whose first page, which it shares, is 5; another one has page 5 before the first
/// one's writer is done. Returns the pages that are free then, when the other one's writer is not.
fn free_pages() -> Vec<u32> {
    let model = Model::new(&mut Draw::new(1));
    let (page, side) = (model.page, model.target(1, 64));
    let rank = Rank { instance: 0, replica: 0, stage: 0, lane: 0 };
    let sender = Sender::new(side.clone(), rank, sender::Options::default()).unwrap();
    let receiver = Receiver::new(side, rank, receiver::Options::default()).unwrap();
    let mut two = Two(sender, receiver);
    two.0.connect(1, true).unwrap();
    two.1.connect(1, true).unwrap();
    (1..3).for_each(|request| two.0.begin(request, 2 * page, None).unwrap());
    two.talk();
    let [first, second] = [0, 1].map(|generation| Fence { request: generation + 1, generation });
    two.grant(first, (2 * page, page), &[9]);
    two.talk();
    // Its end is not heard before the other one has pages.
    two.1.abort(first).unwrap();
    two.grant(second, (2 * page, 0), &[5, 6]);
    let free = two.talk();
    let mut reached = two.1.quarantine().outstanding();
    assert!(reached.any(|(fence, ..)| fence == second), "its writer is not done");
    free
}

#[test]
fn a_page_that_a_request_shares_is_not_said_to_be_free() {
    assert_eq!(free_pages(), [9]);
}
