//! What a receiver wants done next.

use std::time::Duration;

use crate::error::{Error, Kind};
use crate::transfer::frames::{Frame, Grant, Reason, list};
use crate::transfer::receiver::{Event, Receiver};

/// What a receiver wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send the frame, whose bytes are in the buffer of the call.
    Frame {
        /// On this connection.
        link: u32,
    },
    /// Something has happened.
    Event(Event),
}

impl Receiver {
    /// What is to be done next; none for nothing before [`Receiver::due`], or before something comes. A frame's bytes
    /// are in `frame` then.
    pub fn poll(&mut self, now: Duration, frame: &mut Vec<u8>) -> Option<Action> {
        let late = |deadline: &Option<Duration>| deadline.is_some_and(|deadline| now >= deadline);
        while let Some(arriving) = self.arriving.iter().find(|arriving| late(&arriving.deadline)) {
            let fence = arriving.fence;
            let mut missing = None;
            for layer in arriving.ledger.layers() {
                arriving.ledger.missing(layer, |tokens| {
                    missing.get_or_insert((layer, tokens.start));
                });
            }
            let error = Error::new(Kind::TimedOut, "transfer receiver").at("deadline of a request");
            let error = match missing {
                Some((layer, token)) => error.with("layer", layer).with("token", token),
                None => error,
            };
            self.fail(fence, Reason::TimedOut, error);
        }
        if let Some(event) = self.events.pop_front() {
            return Some(Action::Event(event));
        }
        for _ in 0..self.lines.len() {
            self.turn = (self.turn + 1) % self.lines.len();
            if let Some(link) = self.poll_line(self.turn, now, frame) {
                return Some(Action::Frame { link });
            }
        }
        None
    }

    /// When [`Receiver::poll`] has something to do, if nothing comes before; none for never.
    pub fn due(&self) -> Option<Duration> {
        let again = |told: Option<Duration>| told.map_or(Duration::ZERO, |told| told + self.options.resend);
        let deadlines = self.arriving.iter().filter_map(|arriving| arriving.deadline);
        let grants = self.arriving.iter().flat_map(|arriving| &arriving.from).filter(|from| !from.heard);
        let ends = self.endings.iter().flat_map(|ending| &ending.links);
        let small = !self.events.is_empty() || self.lines.iter().any(|line| !line.frames.is_empty());
        let times =
            deadlines.chain(grants.map(|from| again(from.told))).chain(ends.map(|(_, told)| again(*told)));
        times.chain(small.then_some(Duration::ZERO)).min()
    }

    /// The next frame of a connection, if there is one.
    fn poll_line(&mut self, index: usize, now: Duration, frame: &mut Vec<u8>) -> Option<u32> {
        let line = self.lines.get_mut(index)?;
        let link = line.link;
        frame.clear();
        if let Some((bytes, parts)) = line.frames.pop_front() {
            line.answers -= parts;
            frame.extend(bytes);
            return Some(link);
        }
        let due = |told: Option<Duration>| told.is_none_or(|told| now >= told + self.options.resend);
        for arriving in &mut self.arriving {
            let waits = arriving.from.iter_mut().find(|from| from.link == link && !from.heard);
            if let Some(from) = waits.filter(|from| due(from.told)) {
                from.told = Some(now);
                let mut pages = Vec::new();
                let grant = Grant {
                    fence: arriving.fence,
                    tokens: arriving.tokens,
                    first: arriving.first,
                    replica: arriving.replica,
                    landing: list(&mut pages, if line.far { &arriving.landing } else { &[] }),
                };
                Frame::Grant(grant).encode(frame);
                return Some(link);
            }
        }
        for ending in &mut self.endings {
            let waits = ending.links.iter_mut().find(|(other, _)| *other == link);
            if let Some((_, told)) = waits.filter(|(_, told)| due(*told)) {
                *told = Some(now);
                Frame::End { fence: ending.fence, reason: ending.reason }.encode(frame);
                return Some(link);
            }
        }
        None
    }
}
