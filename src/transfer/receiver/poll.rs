//! What a receiver wants done next.

use std::time::Duration;

use crate::error::{Error, Kind};
use crate::transfer::frames::{Frame, Grant, Reason, list};
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::arriving::{Line, Saying, Says};
use crate::transfer::receiver::{Event, Receiver};

/// What a receiver wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send the frame, whose bytes are in the buffer of the call.
    Frame {
        /// On this connection.
        link: u32,
    },
    /// Close a connection whose other end has not answered in time, and say [`Receiver::disconnect`].
    Close {
        /// The connection.
        link: u32,
    },
    /// Something has happened.
    Event(Event),
}

impl Receiver {
    /// What is to be done next; none for nothing before [`Receiver::due`], or before something comes. A frame's bytes
    /// are in `frame` then.
    pub fn poll(&mut self, now: Duration, frame: &mut Vec<u8>) -> Option<Action> {
        while let Some((_, fence)) = self.deadlines.first().copied().filter(|(deadline, _)| now >= *deadline)
        {
            self.deadlines.pop_first();
            self.time_out(fence);
        }
        if let Some(event) = self.events.pop_front() {
            return Some(Action::Event(event));
        }
        for _ in 0..self.lines.len() {
            self.turn = (self.turn + 1) % self.lines.len();
            if let Some(action) = self.poll_line(self.turn, now, frame) {
                return Some(action);
            }
        }
        None
    }

    /// A request's deadline has passed. The error names the first layer that is not whole.
    fn time_out(&mut self, fence: Fence) {
        let mut error = Error::new(Kind::TimedOut, "transfer receiver").at("deadline of a request");
        if let Some(arriving) = self.arriving.get(&fence) {
            let layer = arriving.ledger.layers().find(|layer| !arriving.ledger.is_ready(*layer));
            let mut first = None;
            layer.into_iter().for_each(|layer| {
                arriving.ledger.missing(layer, |tokens| {
                    first.get_or_insert((layer, tokens.start));
                });
            });
            if let Some((layer, token)) = first {
                error = error.with("layer", layer).with("token", token);
            }
        }
        self.fail(fence, Reason::TimedOut, error);
    }

    /// When [`Receiver::poll`] has something to do, if nothing comes before; none for never.
    pub fn due(&self) -> Option<Duration> {
        let lines = self.lines.iter().flat_map(|line| {
            let told = line.sayings.iter().map(|saying| self.again(saying));
            let small = (!line.frames.is_empty()).then_some(Duration::ZERO);
            let frames = told.chain(small).filter(|_| !line.blocked);
            let noted = line.blocked && line.blocked_at.is_none() && !line.closing;
            let heard = (line.heard || line.unblocked || noted).then_some(Duration::ZERO);
            frames.chain(heard).chain(self.patience_of(line))
        });
        let events = (!self.events.is_empty()).then_some(Duration::ZERO);
        lines.chain(events).chain(self.deadlines.first().map(|(deadline, _)| *deadline)).min()
    }

    /// When something is told again.
    fn again(&self, saying: &Saying) -> Duration {
        let wait = self.options.resend.saturating_mul(1 << saying.times.saturating_sub(1).min(6));
        saying.told.map_or(Duration::ZERO, |(_, last)| last.saturating_add(wait))
    }

    /// When a connection has been silent for too long; none if nothing is owed on it, or if that was said.
    fn patience_of(&self, line: &Line) -> Option<Duration> {
        if line.closing {
            return None;
        }
        // One without room for so long takes nothing, even if it says that it lives.
        let silent = line.owed_since().map(|owed| Some(owed.max(line.heard_at?)));
        let since = silent.flatten().into_iter().chain(line.blocked_at).min()?;
        Some(since.saturating_add(self.options.patience))
    }

    fn poll_line(&mut self, index: usize, now: Duration, frame: &mut Vec<u8>) -> Option<Action> {
        let line = self.lines.get_mut(index)?;
        let link = line.link;
        if std::mem::take(&mut line.heard) {
            line.heard_at = Some(now);
        }
        if std::mem::take(&mut line.unblocked) {
            line.wait_anew(now);
        }
        if line.blocked {
            line.blocked_at.get_or_insert(now);
        }
        frame.clear();
        if let Some(waiting) = line.frames.pop_front_if(|_| !line.blocked) {
            line.parts -= waiting.parts;
            frame.extend(waiting.bytes);
            return Some(Action::Frame { link });
        }
        let line = self.lines.get(index)?;
        if self.patience_of(line).is_some_and(|patience| now >= patience) {
            self.lines.iter_mut().skip(index).take(1).for_each(|line| line.closing = true);
            return Some(Action::Close { link });
        }
        let again = |saying: &Saying| !line.blocked && now >= self.again(saying);
        let place = line.sayings.iter().position(again)?;
        let line = self.lines.get_mut(index)?;
        let saying = line.sayings.get_mut(place)?;
        saying.told = Some((saying.told.map_or(now, |(first, _)| first), now));
        saying.times = saying.times.saturating_add(1);
        let fence = saying.fence;
        match saying.says {
            Says::Grant => {
                let arriving = self.arriving.get(&fence)?;
                let mut pages = Vec::new();
                let grant = Grant {
                    fence,
                    tokens: arriving.tokens,
                    first: arriving.first,
                    replica: arriving.replica,
                    landing: list(&mut pages, if line.far { &arriving.landing } else { &[] }),
                };
                Frame::Grant(grant).encode(frame);
            }
            Says::End(reason) => Frame::End { fence, reason }.encode(frame),
        }
        Some(Action::Frame { link })
    }
}
