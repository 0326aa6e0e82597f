//! The ends of the model fabric.

use std::cell::RefCell;
use std::rc::Rc;

use crate::error::{Error, Kind, Result};
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric, Told};
use crate::transfer::model::faults::Way;
use crate::transfer::model::memory::By;
use crate::transfer::model::net::{Carried, State};

use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::Where;
use crate::transfer::runs::Run;
use crate::transfer::sender::Source;

/// A sender's end. Its process crashes when it is dropped.
#[derive(Debug)]
pub struct ModelSender {
    pub(super) net: Rc<RefCell<State>>,
    pub(super) index: usize,
}

/// A receiver's end. Its process crashes when it is dropped.
#[derive(Debug)]
pub struct ModelReceiver {
    pub(super) net: Rc<RefCell<State>>,
    pub(super) index: usize,
    /// What came with the last frame.
    pub(super) carried: Option<Rc<Carried>>,
}

impl Drop for ModelSender {
    fn drop(&mut self) {
        self.net.borrow_mut().crash(true, self.index);
    }
}

impl Drop for ModelReceiver {
    fn drop(&mut self) {
        self.net.borrow_mut().crash(false, self.index);
    }
}

impl Fabric for ModelSender {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        Ok(self.net.borrow_mut().poll(true, self.index).map(|(happened, message)| {
            if let Some(message) = message {
                *frame = message.bytes;
            }
            happened
        }))
    }

    fn close(&mut self, link: u32) {
        self.net.borrow_mut().close(true, self.index, link);
    }
}

impl Source for ModelSender {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        let memory = self.net.borrow().memory(self.index)?;
        memory.borrow_mut().read(By::Machine, origin, run, into)
    }
}

impl SenderFabric for ModelSender {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        let memory = {
            let mut state = self.net.borrow_mut();
            state.check_room(true, self.index, link, frame.len())?;
            (state.way == Way::Stream).then(|| state.memory(self.index)).transpose()?
        };
        let mut carried = Carried::new();
        if let Some(memory) = memory {
            runs.each(|Told { origin, run, .. }| {
                let mut bytes = vec![0; usize::try_from(run.total()).unwrap_or(0)];
                // What cannot be read is carried as zeros, which have not its digest.
                let _ = memory.borrow_mut().read(By::Fabric, *origin, run, &mut bytes);
                carried.push((*origin, *run, bytes));
                Ok(())
            })?;
        }
        self.net.borrow_mut().send((true, self.index), link, frame, carried)
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        let mut writes = Vec::new();
        self.net.borrow_mut().check_room(true, self.index, link, 0)?;
        runs.each(|Told { origin, page, run }| {
            let page = page.ok_or_else(|| Error::new(Kind::OutOfRange, "model write").at("landing page"))?;
            writes.push((page, *origin, *run));
            Ok(())
        })?;
        self.net.borrow_mut().write(self.index, (link, write), fence, writes)
    }
}

impl Fabric for ModelReceiver {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.carried = None;
        Ok(self.net.borrow_mut().poll(false, self.index).map(|(happened, message)| {
            if let Some(message) = message {
                (*frame, self.carried) = (message.bytes, Some(message.carried));
            }
            happened
        }))
    }

    fn close(&mut self, link: u32) {
        self.net.borrow_mut().close(false, self.index, link);
    }
}

impl ReceiverFabric for ModelReceiver {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.net.borrow_mut().check_room(false, self.index, link, frame.len())?;
        self.net.borrow_mut().send((false, self.index), link, frame, Carried::new())
    }

    fn holds(&mut self, link: u32) -> bool {
        let state = self.net.borrow();
        state.way != Way::Shared || state.is_held(link)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        let mut state = self.net.borrow_mut();
        if state.refuses() {
            return Err(Error::new(Kind::Io, "model fetch"));
        }
        match (at, state.way) {
            (Where::Landing(page), _) => {
                let landing = state.landing(self.index)?;
                landing.borrow_mut().read(page, run, into)?;
                // A late write lands between the fetch and the store.
                if state.spoils() {
                    let mut other = into.to_vec();
                    other.iter_mut().take(1).for_each(|byte| *byte ^= 1);
                    landing.borrow_mut().write(fence, page, run, &other);
                }
            }
            (Where::Origin { origin, nth }, Way::Stream) => {
                let place = usize::try_from(nth).unwrap_or(usize::MAX);
                let carried = self.carried.as_ref().and_then(|carried| carried.get(place));
                let same = carried.filter(|(of, other, _)| (*of, other) == (origin, run));
                let (.., bytes) = same
                    .ok_or_else(|| Error::new(Kind::Closed, "model fetch").at("what came with the notice"))?;
                into.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            }
            (Where::Origin { origin, .. }, _) => {
                let memory = state.memory_over(link)?;
                memory.borrow_mut().read(By::Fabric, origin, run, into)?;
            }
        }
        if state.spoils() {
            into.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
        Ok(())
    }
}
