//! Checks of frames and connections, without the machines.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::error::{Kind, Result};
use crate::transfer::conformance::rig::machine;
use crate::transfer::conformance::subject::{Checked, Subject, told};
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use crate::transfer::frames::{FRAME_MAX, Frame, PAYLOAD_MAX, Payload};
use crate::transfer::quarantine::Fence;
use crate::transfer::sender::Sender;

/// The most bytes that a fabric keeps for an end that is not polled.
const KEPT: usize = 64 << 20;

/// Two ends, and what has come at each.
struct Two<S: Subject> {
    /// None while another one is made.
    sender: Option<S::Sender>,
    receiver: Option<S::Receiver>,
    /// Frames are sent with the runs that a machine knows: this one knows no connection, so there are none.
    machine: Sender,
    frame: Vec<u8>,
    now: Duration,
    /// Connections that were lost, at the sender and at the receiver.
    lost: [BTreeSet<u32>; 2],
    /// Connections that were there.
    links: [Vec<u32>; 2],
    came: [Vec<Vec<u8>>; 2],
}

/// A frame of so many bytes, which says its number.
fn frame(number: u64, bytes: usize) -> Vec<u8> {
    let body: Vec<u8> = (0..bytes.min(PAYLOAD_MAX)).map(|at| (at as u64 ^ number) as u8).collect();
    let fence = Fence { request: number, generation: 1 };
    let mut frame = Vec::new();
    Frame::Payload(Payload { number, fence, kind: 1, digest: 0, bytes: &body }).encode(&mut frame);
    frame
}

impl<S: Subject> Two<S> {
    fn new(subject: &mut S) -> Checked<Two<S>> {
        let mut two = Two {
            sender: Some(subject.sender().map_err(told)?),
            receiver: Some(subject.receiver().map_err(told)?),
            machine: machine(1, true).map_err(told)?,
            frame: Vec::new(),
            now: subject.wait(),
            lost: Default::default(),
            links: Default::default(),
            came: Default::default(),
        };
        two.until(subject, "a connection", |two| two.links.iter().all(|links| !links.is_empty()))?;
        Ok(two)
    }

    fn poll(&mut self, end: usize) -> Checked<bool> {
        let happened = match (end, &mut self.sender, &mut self.receiver) {
            (0, Some(sender), _) => sender.poll(&mut self.frame),
            (_, _, Some(receiver)) => receiver.poll(&mut self.frame),
            _ => Ok(None),
        };
        let Some(happened) = happened.map_err(told)? else { return Ok(false) };
        let known = |link: u32| self.links[end].contains(&link) && !self.lost[end].contains(&link);
        match happened {
            Happened::Connected { link, .. } if self.links[end].contains(&link) => {
                return Err(format!("connection {link} twice"));
            }
            Happened::Connected { link, .. } => self.links[end].push(link),
            Happened::Frame { link } if known(link) => self.came[end].push(self.frame.clone()),
            Happened::Alive { link } | Happened::Room { link } if known(link) => {}
            Happened::Lost { link } if known(link) => drop(self.lost[end].insert(link)),
            Happened::Destroyed { link } if self.lost[end].contains(&link) && end == 1 => {}
            other => return Err(format!("{other:?} on a connection that is not there")),
        }
        Ok(true)
    }

    /// Polls both ends, and lets time pass until something holds.
    fn until(&mut self, subject: &mut S, what: &str, holds: impl Fn(&Two<S>) -> bool) -> Checked {
        let (limit, end) = (subject.limit(), self.now + subject.limit());
        loop {
            while self.poll(0)? | self.poll(1)? {}
            if holds(self) {
                return Ok(());
            }
            if self.now > end {
                return Err(format!("{what} did not come within {limit:?}"));
            }
            self.now = subject.wait();
        }
    }

    fn last(&self, end: usize) -> Checked<u32> {
        self.links[end].last().copied().ok_or_else(|| "no connection".to_owned())
    }

    fn send(&mut self, end: usize, bytes: &[u8]) -> Checked<Result<()>> {
        let link = self.last(end)?;
        let runs = Runs::of_frame(&self.machine, link, bytes);
        Ok(match (end, &mut self.sender, &mut self.receiver) {
            (0, Some(sender), _) => sender.send(link, bytes, &runs),
            (_, _, Some(receiver)) => receiver.send(link, bytes),
            _ => Ok(()),
        })
    }

    /// Sends a frame once there is room for it.
    fn send_in_time(&mut self, subject: &mut S, end: usize, bytes: &[u8]) -> Checked {
        let limit = self.now + subject.limit();
        while let Err(error) = self.send(end, bytes)? {
            if error.kind() != Kind::Exhausted || self.now > limit {
                return Err(format!("a frame of {} bytes: {error}", bytes.len()));
            }
            while self.poll(0)? | self.poll(1)? {}
            self.now = subject.wait();
        }
        Ok(())
    }

    fn close(&mut self, end: usize) -> Checked {
        let link = self.last(end)?;
        match (end, &mut self.sender, &mut self.receiver) {
            (0, Some(sender), _) => sender.close(link),
            (_, _, Some(receiver)) => receiver.close(link),
            _ => {}
        }
        self.lost[end].insert(link);
        Ok(())
    }
}

/// What has come is what was sent.
fn same(came: &[Vec<u8>], sent: &[Vec<u8>]) -> Checked {
    if let Some(at) = (0..came.len().min(sent.len())).find(|at| came.get(*at) != sent.get(*at)) {
        return Err(format!("frame {at} of {} is another one", sent.len()));
    }
    match came.len() == sent.len() {
        true => Ok(()),
        false => Err(format!("{} frames came of {}", came.len(), sent.len())),
    }
}

pub(super) fn whole_and_in_order<S: Subject>(subject: &mut S) -> Checked {
    let mut two = Two::<S>::new(subject)?;
    let sizes = [0, 1, 3, 60, 255, 256, 4095, 4096, 65_535, 65_536, FRAME_MAX / 2, PAYLOAD_MAX];
    let mut sent = [Vec::new(), Vec::new()];
    for number in 0..60 {
        for (end, sent) in sent.iter_mut().enumerate() {
            // The large ones are few.
            let size = sizes.get(number as usize % sizes.len()).copied().unwrap_or(0);
            let bytes = frame(number, if number < 24 { size } else { size.min(300) });
            two.send_in_time(subject, end, &bytes)?;
            sent.push(bytes);
        }
    }
    let all = sent[0].len();
    two.until(subject, "the last frame", |two| two.came.iter().all(|came| came.len() >= all))?;
    same(&two.came[1], &sent[0])?;
    same(&two.came[0], &sent[1])
}

pub(super) fn silence<S: Subject>(subject: &mut S) -> Checked {
    let mut two = Two::<S>::new(subject)?;
    for end in 0..2 {
        let other = 1 - end;
        let (mut sent, mut kept, size) = (Vec::new(), 0, FRAME_MAX / 4);
        loop {
            let bytes = frame(sent.len() as u64, size);
            match two.send(end, &bytes)? {
                Ok(()) => kept += bytes.len(),
                Err(error) if error.kind() == Kind::Exhausted => break,
                Err(error) => return Err(error.to_string()),
            }
            sent.push(bytes);
            if kept > KEPT {
                return Err(format!("{kept} bytes are kept for an end that is not polled"));
            }
            // The sending end is polled, the other one is not.
            while two.poll(end)? {}
            two.now = subject.wait();
        }
        let before = two.came[other].len();
        let all = before + sent.len();
        two.until(subject, "what was taken", |two| two.came[other].len() >= all)?;
        same(two.came[other].get(before..).unwrap_or_default(), &sent)?;
        two.send_in_time(subject, end, &frame(0, 1))?;
        two.until(subject, "a frame after the silence", |two| two.came[other].len() > all)?;
    }
    Ok(())
}

pub(super) fn closes<S: Subject>(subject: &mut S) -> Checked {
    let mut two = Two::<S>::new(subject)?;
    for round in 0..6 {
        let (end, other) = (round % 2, 1 - round % 2);
        let links = [two.last(0)?, two.last(1)?];
        if let Err(error) = two.send(other, &frame(7, 100))? {
            return Err(error.to_string());
        }
        two.close(end)?;
        match two.send(end, &frame(8, 100))? {
            Err(error) if error.kind() == Kind::PeerLost => {}
            sent => return Err(format!("a frame on a closed connection: {sent:?}")),
        }
        let lost = |two: &Two<S>| two.lost[other].contains(&links[other]);
        two.until(subject, "the other end's loss", lost)?;
        let again = |two: &Two<S>| (0..2).all(|end| two.links[end].last() != Some(&links[end]));
        two.until(subject, "the next connection", again)?;
        for end in 0..2 {
            let bytes = frame(100 + round as u64, 300 + end);
            two.send_in_time(subject, end, &bytes)?;
            two.until(subject, "a frame over the next connection", |two| {
                two.came[1 - end].last() == Some(&bytes)
            })?;
        }
    }
    Ok(())
}

pub(super) fn crashes<S: Subject>(subject: &mut S) -> Checked {
    let mut two = Two::<S>::new(subject)?;
    for round in 0..4 {
        let (end, other) = (round % 2, 1 - round % 2);
        let old = two.last(other)?;
        match end {
            0 => {
                two.sender = None;
                two.sender = Some(subject.sender().map_err(told)?);
            }
            _ => {
                two.receiver = None;
                two.receiver = Some(subject.receiver().map_err(told)?);
            }
        }
        // The new end counts by itself.
        (two.links[end], two.lost[end]) = (Vec::new(), BTreeSet::new());
        two.until(subject, "the loss of an end that is gone", |two| two.lost[other].contains(&old))?;
        let again = |two: &Two<S>| !two.links[end].is_empty() && two.links[other].last() != Some(&old);
        two.until(subject, "the connection of its successor", again)?;
        let bytes = frame(9 + round as u64, 100);
        two.send_in_time(subject, end, &bytes)?;
        two.until(subject, "a successor's frame", |two| two.came[other].last() == Some(&bytes))?;
    }
    Ok(())
}
