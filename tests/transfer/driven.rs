//! Ends over fabrics that go wrong: what an end does by itself.

use std::collections::VecDeque;

use forebay::transfer::ends::FRAMES;
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use forebay::transfer::receiver::{self, Wanted, Where};
use forebay::transfer::sender::{self, Computed, Source};
use forebay::transfer::{
    Fence, Frame, Polled, Rank, Reason, Receiver, ReceivingEnd, Run, Sender, SendingEnd, Store,
};
use forebay::{Error, Kind, Result};

use crate::pair::{LAYERS, LINK, RANK, RECEIVING, SENDING, millis, side};

/// A fabric by hand: what happens, what was sent and written, and how calls end.
#[derive(Default)]
struct Hand {
    happens: VecDeque<(Happened, Vec<u8>)>,
    /// Whether the last thing goes on happening.
    floods: bool,
    sent: Vec<Vec<u8>>,
    writes: u32,
    closed: Vec<u32>,
    sends: Option<Kind>,
    write: Option<Kind>,
}

fn ends(kind: Option<Kind>) -> Result<()> {
    kind.map_or(Ok(()), |kind| Err(Error::new(kind, "hand")))
}

impl Hand {
    fn takes(&mut self, frame: &[u8]) -> Result<()> {
        ends(self.sends)?;
        self.sent.push(frame.to_vec());
        Ok(())
    }
}

impl Fabric for Hand {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        let next = if self.floods { self.happens.front().cloned() } else { self.happens.pop_front() };
        Ok(next.map(|(happened, bytes)| {
            *frame = bytes;
            happened
        }))
    }

    fn close(&mut self, link: u32) {
        self.closed.push(link);
    }
}

impl Source for Hand {
    fn read(&mut self, _: u64, _: &Run, into: &mut [u8]) -> Result<()> {
        into.fill(7);
        Ok(())
    }
}

impl SenderFabric for Hand {
    fn send(&mut self, _: u32, frame: &[u8], _: &Runs<'_>) -> Result<()> {
        self.takes(frame)
    }

    fn write(&mut self, _: u32, _: u64, _: Fence, runs: &Runs<'_>) -> Result<()> {
        ends(self.write)?;
        runs.each(|told| {
            assert!(told.page.is_some());
            Ok(())
        })?;
        self.writes += 1;
        Ok(())
    }
}

impl ReceiverFabric for Hand {
    fn send(&mut self, _: u32, frame: &[u8]) -> Result<()> {
        self.takes(frame)
    }

    fn fetch(&mut self, _: u32, _: Fence, _: Where, _: &Run, into: &mut [u8]) -> Result<()> {
        into.fill(7);
        Ok(())
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

struct Nowhere;

impl Store for Nowhere {
    fn store(&mut self, _: Fence, _: &Run, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// Both ends, connected, with a writer from afar; the hands carry frames when told to.
struct Two {
    sender: SendingEnd<Hand>,
    receiver: ReceivingEnd<Hand>,
    at_sender: Vec<Polled<sender::Event>>,
    at_receiver: Vec<Polled<receiver::Event>>,
}

impl Two {
    fn new() -> Two {
        let rank = Rank { instance: 2, ..RANK };
        let mut two = Two {
            sender: SendingEnd::new(Sender::new(side(LAYERS), RANK, SENDING).unwrap(), Hand::default()),
            receiver: ReceivingEnd::new(
                Receiver::new(side(LAYERS), rank, RECEIVING).unwrap(),
                Hand::default(),
            ),
            at_sender: Vec::new(),
            at_receiver: Vec::new(),
        };
        let connected = || (Happened::Connected { link: LINK, far: true }, Vec::new());
        two.sender.fabric.happens.push_back(connected());
        two.receiver.fabric.happens.push_back(connected());
        two.settle();
        two
    }

    /// Polls both, and carries what they send, until nothing moves.
    fn settle(&mut self) {
        loop {
            while let Some(polled) = self.sender.poll(millis(1)).unwrap() {
                self.at_sender.push(polled);
            }
            while let Some(polled) = self.receiver.poll(millis(1), &mut Nowhere).unwrap() {
                self.at_receiver.push(polled);
            }
            let frame = |bytes| (Happened::Frame { link: LINK }, bytes);
            let (from, to) = (&mut self.sender.fabric, &mut self.receiver.fabric);
            if from.sent.is_empty() && to.sent.is_empty() {
                return;
            }
            to.happens.extend(from.sent.drain(..).map(frame));
            from.happens.extend(to.sent.drain(..).map(frame));
        }
    }

    /// A request of one layer is on its way.
    fn request(&mut self) -> Fence {
        let fence = Fence { request: 4, generation: 1 };
        let wanted = Wanted {
            fence,
            tokens: 4,
            first: 0,
            sender: (RANK.instance, 0),
            payloads: &[],
            landing: &[9],
            deadline: None,
        };
        self.receiver.machine.grant(&wanted).unwrap();
        self.sender.machine.begin(4, 4, None).unwrap();
        self.settle();
        let part = Computed { request: 4, layer: 0, tokens: 0..4, chunk: None, origin: 1 };
        self.sender.machine.computed(&[part]).unwrap();
        fence
    }

    fn ended(&self) -> Vec<Reason> {
        let ended = self.at_sender.iter().filter_map(|polled| match polled {
            Polled::Event(sender::Event::Ended { reason, .. }) => Some(*reason),
            _ => None,
        });
        ended.collect()
    }
}

#[test]
fn a_write_that_the_fabric_refuses_fails_its_request_at_both_ends() {
    let mut two = Two::new();
    two.sender.fabric.write = Some(Kind::Io);
    let fence = two.request();
    two.settle();
    assert_eq!(two.ended(), [Reason::PeerLost]);
    let failed = |polled: &Polled<receiver::Event>| match polled {
        Polled::Event(receiver::Event::Failed { fence: of, .. }) => *of == fence,
        _ => false,
    };
    assert!(two.at_receiver.iter().any(failed), "{:?}", two.at_receiver);
    assert!(two.sender.fabric.closed.is_empty(), "its connection stays");
}

#[test]
fn a_write_without_room_is_asked_for_again_when_there_is_some() {
    let mut two = Two::new();
    two.sender.fabric.write = Some(Kind::Exhausted);
    two.request();
    two.settle();
    assert_eq!((two.sender.fabric.writes, two.ended()), (0, vec![]));
    two.sender.fabric.write = None;
    two.settle();
    assert_eq!(two.sender.fabric.writes, 0, "nothing is asked for before there is room");
    two.sender.fabric.happens.push_back((Happened::Room { link: LINK }, Vec::new()));
    two.settle();
    assert_eq!(two.sender.fabric.writes, 1);
}

#[test]
fn frames_without_room_wait_in_their_order_and_go_once() {
    let mut two = Two::new();
    two.receiver.fabric.sends = Some(Kind::Exhausted);
    let fence = Fence { request: 4, generation: 1 };
    let wanted = |request, generation| Wanted {
        fence: Fence { request, generation },
        tokens: 4,
        first: 0,
        sender: (RANK.instance, 0),
        payloads: &[],
        landing: &[9],
        deadline: None,
    };
    two.receiver.machine.grant(&wanted(4, 1)).unwrap();
    two.receiver.machine.grant(&Wanted { landing: &[8], ..wanted(5, 2) }).unwrap();
    two.settle();
    assert!(two.receiver.machine.due().is_some(), "the other end owes an answer to the first grant");
    two.receiver.fabric.sends = None;
    two.receiver.fabric.happens.push_back((Happened::Room { link: LINK }, Vec::new()));
    while two.receiver.poll(millis(2), &mut Nowhere).unwrap().is_some() {}
    let sent: Vec<u8> = two.receiver.fabric.sent.iter().map(|frame| frame[0]).collect();
    assert_eq!(sent, [2, 2], "each grant once");
    assert_eq!(two.receiver.fabric.sent[0][1..9], fence.request.to_le_bytes());
}

#[test]
fn what_waited_for_room_is_told_again_only_after_the_whole_time() {
    let mut two = Two::new();
    two.request();
    while two.sender.poll(millis(1)).unwrap().is_some() {}
    // Its rows are written, and the notice finds no room.
    two.sender.fabric.sends = Some(Kind::Exhausted);
    let written = Happened::Written { link: LINK, write: 0, failed: false };
    two.sender.fabric.happens.push_back((written, Vec::new()));
    while two.sender.poll(millis(1)).unwrap().is_some() {}
    two.sender.fabric.sends = None;
    let later = millis(1) + SENDING.resend * 3;
    two.sender.fabric.happens.push_back((Happened::Room { link: LINK }, Vec::new()));
    while two.sender.poll(later).unwrap().is_some() {}
    assert_eq!(two.sender.fabric.sent.len(), 1);
    while two.sender.poll(later + SENDING.resend - millis(1)).unwrap().is_some() {}
    assert_eq!(two.sender.fabric.sent.len(), 1);
    while two.sender.poll(later + SENDING.resend).unwrap().is_some() {}
    assert_eq!(two.sender.fabric.sent.len(), 2);
}

#[test]
fn an_error_of_a_frame_or_of_sending_closes_its_connection_and_says_why() {
    let why = |polled: &[Polled<sender::Event>]| {
        let mut lost = polled.iter().filter_map(|polled| match polled {
            Polled::Lost { link: LINK, why } => why.as_ref().map(Error::kind),
            _ => None,
        });
        (lost.next(), lost.next())
    };
    let mut two = Two::new();
    two.sender.fabric.happens.push_back((Happened::Frame { link: LINK }, vec![200, 1]));
    two.settle();
    assert_eq!(
        (why(&two.at_sender), two.sender.fabric.closed.clone()),
        ((Some(Kind::BadFormat), None), vec![LINK])
    );

    let mut two = Two::new();
    two.request();
    two.sender.fabric.sends = Some(Kind::Io);
    two.sender.machine.abort(4).unwrap();
    two.settle();
    assert_eq!((why(&two.at_sender), two.sender.fabric.closed.clone()), ((Some(Kind::Io), None), vec![LINK]));

    // A connection that is gone is told by the fabric, with what came before.
    let mut two = Two::new();
    two.request();
    two.sender.fabric.sends = Some(Kind::PeerLost);
    two.settle();
    assert!(two.sender.fabric.closed.is_empty());
    two.sender.fabric.happens.push_back((Happened::Lost { link: LINK }, Vec::new()));
    two.settle();
    assert_eq!(two.ended(), [Reason::PeerLost]);

    // A number twice.
    let mut two = Two::new();
    two.sender.fabric.happens.push_back((Happened::Connected { link: LINK, far: true }, Vec::new()));
    two.settle();
    assert_eq!(
        (why(&two.at_sender), two.sender.fabric.closed.clone()),
        ((Some(Kind::InvalidState), None), vec![LINK])
    );
}

#[test]
fn an_end_that_is_flooded_still_keeps_its_deadlines_and_says_that_there_is_more() {
    let mut two = Two::new();
    two.sender.machine.begin(4, 4, Some(millis(5))).unwrap();
    two.sender.fabric.happens.push_back((Happened::Alive { link: LINK }, Vec::new()));
    two.sender.fabric.floods = true;
    let ended = sender::Event::Ended { request: 4, reason: Reason::TimedOut };
    assert_eq!(two.sender.poll(millis(6)).unwrap(), Some(Polled::Event(ended)));
    assert_eq!(two.sender.poll(millis(6)).unwrap(), Some(Polled::More));
    two.sender.fabric.floods = false;
    two.sender.fabric.happens.clear();
    assert_eq!(two.sender.poll(millis(6)).unwrap(), None);

    // Frames move rows: a receiver answers after some of them.
    let mut two = Two::new();
    let mut known = Vec::new();
    Frame::Known { fence: Fence { request: 9, generation: 9 } }.encode(&mut known);
    let frame = || (Happened::Frame { link: LINK }, known.clone());
    two.receiver.fabric.happens.extend((0..FRAMES + 1).map(|_| frame()));
    assert_eq!(two.receiver.poll(millis(6), &mut Nowhere).unwrap(), Some(Polled::More));
    assert_eq!(two.receiver.fabric.happens.len(), 1);
    assert_eq!(two.receiver.poll(millis(6), &mut Nowhere).unwrap(), None);
}

/// A connection without room takes nothing. It is closed in time, even if nothing was told on it before, and even if
/// its other end says that it lives: requests must end.
#[test]
fn a_connection_that_never_has_room_again_is_closed() {
    for alive in [false, true] {
        // A write finds no room, and its request is aborted.
        let mut two = Two::new();
        two.sender.fabric.write = Some(Kind::Exhausted);
        two.request();
        two.settle();
        two.sender.machine.abort(4).unwrap();
        for time in 0..20 {
            if alive {
                two.sender.fabric.happens.push_back((Happened::Alive { link: LINK }, Vec::new()));
            }
            while let Some(polled) = two.sender.poll(SENDING.patience / 10 * time).unwrap() {
                two.at_sender.push(polled);
            }
        }
        assert_eq!((two.sender.fabric.closed.clone(), two.ended()), (vec![LINK], vec![Reason::Aborted]));

        // An answer finds no room, and its request is aborted.
        let mut two = Two::new();
        let fence = two.request();
        two.receiver.fabric.sends = Some(Kind::Exhausted);
        two.sender
            .fabric
            .happens
            .push_back((Happened::Written { link: LINK, write: 0, failed: false }, Vec::new()));
        two.settle();
        two.receiver.machine.abort(fence).unwrap();
        for time in 0..20 {
            if alive {
                two.receiver.fabric.happens.push_back((Happened::Alive { link: LINK }, Vec::new()));
            }
            while let Some(polled) = two.receiver.poll(RECEIVING.patience / 10 * time, &mut Nowhere).unwrap()
            {
                two.at_receiver.push(polled);
            }
        }
        assert_eq!(two.receiver.fabric.closed, [LINK]);
        let drained = Polled::Event(receiver::Event::Drained { fence });
        assert!(two.at_receiver.contains(&drained), "{:?}", two.at_receiver);
    }
}

#[test]
fn time_without_room_is_no_silence() {
    let mut two = Two::new();
    two.request();
    while two.sender.poll(millis(1)).unwrap().is_some() {}
    two.sender.fabric.sends = Some(Kind::Exhausted);
    let written = Happened::Written { link: LINK, write: 0, failed: false };
    two.sender.fabric.happens.push_back((written, Vec::new()));
    while two.sender.poll(millis(1)).unwrap().is_some() {}
    two.sender.fabric.sends = None;
    let late = SENDING.patience - millis(10);
    two.sender.fabric.happens.push_back((Happened::Room { link: LINK }, Vec::new()));
    while two.sender.poll(late).unwrap().is_some() {}
    while two.sender.poll(late + SENDING.patience - millis(1)).unwrap().is_some() {}
    assert!(two.sender.fabric.closed.is_empty(), "it had the notice for a short time");
    while two.sender.poll(late + SENDING.patience).unwrap().is_some() {}
    assert_eq!(two.sender.fabric.closed, [LINK]);
}

#[test]
fn a_sign_of_life_keeps_a_connection_that_owes_an_answer() {
    for alive in [false, true] {
        let mut two = Two::new();
        two.request();
        // A write that never ends: nothing is owed. An aborted request owes its end.
        two.sender.machine.abort(4).unwrap();
        let mut lost = false;
        for time in 0..40 {
            if alive {
                two.sender.fabric.happens.push_back((Happened::Alive { link: LINK }, Vec::new()));
            }
            let now = SENDING.patience / 10 * time;
            while let Some(polled) = two.sender.poll(now).unwrap() {
                lost |= matches!(polled, Polled::Lost { .. });
            }
        }
        assert_eq!(lost, !alive);
    }
}

/// A layer that is ready by its grant alone is said to be so before the abort, as everything that happened before.
#[test]
fn what_happened_before_an_abort_is_said_before_it() {
    let mut two = Two::new();
    let fence = Fence { request: 4, generation: 1 };
    let wanted = Wanted {
        fence,
        tokens: 4,
        first: 4,
        sender: (RANK.instance, 0),
        payloads: &[1],
        landing: &[],
        deadline: None,
    };
    two.receiver.machine.grant(&wanted).unwrap();
    two.receiver.abort(fence).unwrap();
    two.at_receiver.clear();
    two.settle();
    let said = two.at_receiver.iter().filter_map(|polled| match polled {
        Polled::Event(receiver::Event::Ready { layer, .. }) => Some(Ok(*layer)),
        Polled::Event(receiver::Event::Failed { error, .. }) => Some(Err(error.kind())),
        _ => None,
    });
    let ready = (0..LAYERS).map(Ok);
    assert_eq!(said.collect::<Vec<_>>(), ready.chain([Err(Kind::Cancelled)]).collect::<Vec<_>>());
}
