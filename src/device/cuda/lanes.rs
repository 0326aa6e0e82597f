//! What the operations on a lane need besides a cache's tables: the lists that they bring, and their turns at the
//! working memory that all lanes share.
//!
//! **Lists.** A join, a truncation and a resize bring lists (pages, budgets, slot blocks). They are in pinned host
//! memory, one place per lane, where the kernel reads them when it runs. The caller brings no new list for a lane
//! before that.
//!
//! **Turns.** Warm-ups, lists of newest rows and resizes of all lanes work in one room on the device. An event of the
//! device's own lets those of different streams run one after another: each waits for the event, and records it again
//! after its launch. No capture may wait for that event, so a captured stream rejects them.
//!
//! A driver may refuse the record after it took the launch. The work is then enqueued and the call succeeds; the
//! stream is remembered, and the next turn makes the record good before it enqueues anything. So a refused call has
//! enqueued no work, which is what lets a caller undo what it prepared for the call.

use super::abi::{self, STAGED_PAGES};
use super::driver::{Context, Current, DriverResult, Handle, code};
use super::graph::{Capturing, capturing};
use super::memory::Pinned;
use super::stream::OwnEvent;
use crate::device::{PoolLayout, PoolOp};
use crate::error::{Error, Kind, Result};
use crate::ids::Lane;
use crate::residency::TableShape;
use crate::sync::{Arc, Mutex};

/// The staged lists of all lanes.
#[derive(Debug)]
pub(super) struct Lists {
    memory: Pinned,
    /// The words of a lane's place, and of the page table in it.
    lane_words: usize,
    page_words: usize,
    /// Slot blocks of each table in a place.
    blocks: u32,
}

impl Lists {
    /// Allocates every lane's place.
    pub fn new(context: &Arc<Context>, layout: &PoolLayout, lanes: u32) -> Result<Lists> {
        let too_much = |what| move || Error::new(Kind::Overflow, "attach").at(what);
        let blocks = layout.tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0);
        let page_words = layout.lane_pages as usize;
        let layers = layout.tables.len().checked_mul(1 + blocks as usize);
        let lane_words = layers.and_then(|words| words.checked_add(STAGED_PAGES + page_words));
        let lane_words = lane_words.ok_or_else(too_much("words of a lane's lists"))?;
        let words = lane_words.checked_mul(lanes as usize).ok_or_else(too_much("words of all lists"))?;
        Ok(Lists { memory: Pinned::new(context, words)?, lane_words, page_words, blocks })
    }

    /// Writes the lists of an operation to its lane's place.
    pub fn stage(&self, op: &PoolOp<'_>) {
        match op {
            PoolOp::Join(join) => {
                self.pages(join.lane, join.length, join.pages);
                self.slots(join.lane, join.budgets, join.blocks.iter().map(Vec::as_slice));
            }
            PoolOp::Truncate(truncate) => self.pages(truncate.lane, truncate.length, truncate.pages),
            PoolOp::Resize(resize) => self.slots(resize.lane, resize.budgets, resize.needed()),
            _ => {}
        }
    }

    fn place(&self, lane: Lane) -> usize {
        lane.index() * self.lane_words
    }

    fn pages(&self, lane: Lane, length: u32, pages: &[u32]) {
        let at = self.place(lane);
        self.memory.write(at, &[length, pages.len() as u32]);
        self.memory.write(at + STAGED_PAGES, pages);
    }

    fn slots<'a>(&self, lane: Lane, budgets: &[u32], blocks: impl Iterator<Item = &'a [u32]>) {
        let at = self.place(lane) + STAGED_PAGES + self.page_words;
        self.memory.write(at, budgets);
        let at = at + budgets.len();
        for (layer, own) in blocks.enumerate() {
            self.memory.write(at + layer * self.blocks as usize, own);
        }
    }

    /// The address of a lane's place.
    pub fn at(&self, lane: Lane) -> Handle {
        self.memory.at(self.place(lane))
    }

    /// The arguments of a join.
    pub fn join(&self, pools: abi::Pools, lane: Lane) -> abi::JoinArgs {
        abi::JoinArgs { pools, staged: self.at(lane), lane: lane.0, staged_blocks: self.blocks }
    }

    /// The arguments of a resize, which adds its moved rows to the device's word at `moved`.
    pub fn resize(&self, pools: abi::Pools, moved: Handle, lane: Lane) -> abi::ResizeArgs {
        let (staged, staged_blocks) = (self.at(lane), self.blocks);
        abi::ResizeArgs { pools, staged, moved, lane: lane.0, staged_blocks }
    }
}

/// The turns at the shared room.
#[derive(Debug)]
pub(super) struct Turns(Mutex<Last>);

/// The last turn.
#[derive(Debug)]
struct Last {
    /// The event after it.
    event: OwnEvent,
    /// Its stream, if the driver refused the event's record there.
    unrecorded: Option<Handle>,
}

impl Turns {
    pub fn new(context: &Arc<Context>) -> DriverResult<Turns> {
        Ok(Turns(Mutex::new(Last { event: OwnEvent::new(context)?, unrecorded: None })))
    }

    /// Enqueues a launch on `stream` after those of all earlier turns. If it is refused, nothing was launched.
    pub fn take(
        &self,
        current: &Current<'_>,
        stream: Handle,
        launch: impl FnOnce() -> DriverResult,
    ) -> DriverResult {
        let mut last = self.0.lock();
        if let Some(owing) = last.unrecorded {
            // A capture would take the record for its own.
            if capturing(current, owing)? != Capturing::No {
                return current.judge("cuEventRecord", code::CAPTURE_FORBIDS);
            }
            current.event_record(last.event.raw, owing)?;
            last.unrecorded = None;
        }
        current.stream_wait(stream, last.event.raw, 0)?;
        launch()?;
        match current.event_record(last.event.raw, stream) {
            Err(refusal) if !code::is_sticky(refusal.code) => last.unrecorded = Some(stream),
            recorded => recorded?,
        }
        Ok(())
    }

    /// Forgets a stream whose work was waited for: nothing need wait for it any more.
    pub fn forget(&self, stream: Handle) {
        let mut last = self.0.lock();
        last.unrecorded = last.unrecorded.filter(|owing| *owing != stream);
    }
}
