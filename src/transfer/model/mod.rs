//! A fabric in memory, driven by a seed: it behaves as shared memory, as a stream, or as a writer from afar, and goes
//! wrong in each way that a real one does.
//!
//! It is for tests. [`Net::sender`] and [`Net::receiver`] make ends, which connect to all ends of the other side, and
//! again when a connection is lost. An end that is dropped is a process that has crashed. Time is virtual: nothing
//! moves but in [`Net::advance`], and [`Net::next`] says when something will.
//!
//! **Memory** is the caller's: a [`Memory`] for each sender, a [`Landing`] for each receiver. The net calls them while
//! it holds its own state, so they must not call the net.
//!
//! **Faults** ([`Faults`]) are drawn from the seed until [`Net::calm`]. Without faults this fabric is one that
//! `conformance` accepts. A hello is never lost, because a connection that loses it is none.
//!
//! **Times.** A message takes up to 2 ms, a late one up to 300 ms; a connection that breaks is known at
//! its ends after up to 60 ms, and what was written over it is out of reach up to 300 ms later.

mod draw;
mod ends;
mod faults;
mod memory;
mod net;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use net::State;

pub use draw::Draw;
pub use ends::{ModelReceiver, ModelSender};
pub use faults::{Faults, Seen, Way};
pub use memory::{By, Landing, Memory};
pub use net::Message;

/// The fabric. Its clones and its ends are one fabric, of one thread.
#[derive(Clone, Debug)]
pub struct Net(Rc<RefCell<State>>);

impl Net {
    /// A fabric without ends at time 0.
    pub fn new(seed: u64, way: Way, faults: Faults) -> Net {
        Net(Rc::new(RefCell::new(State::new(seed, way, faults))))
    }

    /// No fault is drawn from this time on.
    pub fn calm(&self, from: Duration) {
        self.0.borrow_mut().calm = from;
    }

    /// A sender's end: a new process.
    pub fn sender(&self, memory: Rc<RefCell<dyn Memory>>) -> ModelSender {
        let index = self.0.borrow_mut().add_sender(memory);
        ModelSender { net: Rc::clone(&self.0), index }
    }

    /// A receiver's end: a new process.
    pub fn receiver(&self, landing: Rc<RefCell<dyn Landing>>) -> ModelReceiver {
        let index = self.0.borrow_mut().add_receiver(landing);
        ModelReceiver { net: Rc::clone(&self.0), index, carried: None }
    }

    /// Breaks a connection.
    pub fn cut(&self, link: u32) {
        self.0.borrow_mut().cut(link);
    }

    /// The messages that were sent and have not left yet. The caller may change them, and posts them again.
    pub fn take_sent(&self) -> Vec<Message> {
        std::mem::take(&mut self.0.borrow_mut().sent)
    }

    /// Gives back what [`Net::take_sent`] took.
    pub fn post(&self, messages: Vec<Message>) {
        let mut state = self.0.borrow_mut();
        messages.into_iter().for_each(|message| state.post(message));
    }

    /// When something happens next; none if nothing is on its way.
    pub fn next(&self) -> Option<Duration> {
        self.0.borrow().next()
    }

    /// Lets all happen that happens until `now`.
    pub fn advance(&self, now: Duration) {
        self.0.borrow_mut().advance(now);
    }

    /// The time that it was advanced to.
    pub fn now(&self) -> Duration {
        self.0.borrow().now
    }

    /// What has gone wrong so far.
    pub fn seen(&self) -> Seen {
        self.0.borrow().seen
    }

    /// The numbers of a connection's ends, in the order in which senders and receivers were made.
    pub fn ends(&self, link: u32) -> Option<(usize, usize)> {
        self.0.borrow().ends(link)
    }
}
