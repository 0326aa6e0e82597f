//! The processes of the world: ends of the fabric, and the memory that they send from and receive in.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric};
use forebay::transfer::model::{By, Landing, Memory, ModelReceiver, ModelSender};
use forebay::transfer::receiver::Where;
use forebay::transfer::{Chunk, Fence, Rank, ReceivingEnd, Request, Run, SendingEnd, Side, Store};
use forebay::{Error, Kind, Result};

use crate::map::{Key, each};

/// What an attempt's rows hold besides their names, so that no two attempts have the same bytes.
pub type Salt = u8;

/// All rows of an attempt at the sender's ranks, byte by byte.
pub type Rows = HashMap<Key, Vec<Option<((u32, u32), u8)>>>;

/// The rows of an attempt by their names.
pub fn rows(side: &Side, request: &Request<'_>, salt: Salt) -> Rows {
    let mut rows = Rows::new();
    each(side, request, |key, at, row, holds| {
        let page = rows
            .entry(key)
            .or_insert_with(|| vec![None; side.stages[key.0 as usize].page_bytes[key.4 as usize] as usize]);
        page[at as usize] = Some((row, holds ^ salt));
    });
    rows
}

/// A part of a sender's memory: rows of one layer and chunk, until it is used for something else.
pub struct Origin {
    pub rows: Rc<Rows>,
    pub layer: u32,
    pub tokens: std::ops::Range<u32>,
    /// The index of the chunk in its request, and the chunk where tokens are divided.
    pub chunk: u32,
    pub released: bool,
}

/// A sender's memory.
#[derive(Default)]
pub struct Origins {
    pub parts: Vec<Origin>,
    /// Whether the machine's next read fails.
    pub refuses: bool,
    /// Whether one did.
    pub refused: bool,
    /// What was done that must never be.
    pub broken: Option<String>,
}

impl Memory for Origins {
    /// What is not there, or not there any more, reads as other bytes.
    fn read(&mut self, by: By, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        let place = usize::try_from(origin).ok().and_then(|at| self.parts.get(at));
        let Some(held) = place else { return Err(Error::new(Kind::OutOfRange, "read")) };
        if by == By::Machine {
            if held.released {
                self.broken = Some("rows are read that were released".to_owned());
            }
            if std::mem::take(&mut self.refuses) {
                self.refused = true;
                return Err(Error::new(Kind::Io, "read"));
            }
        }
        let key = (run.from.stage, run.from.lane, held.chunk, run.from.page, run.from.plane);
        let page = held.rows.get(&key);
        for (at, to) in (0_u64..).zip(into) {
            let (piece, byte) = (at / run.bytes, at % run.bytes);
            let offset = run.from.offset + piece * run.from.stride + byte;
            let found = page.and_then(|page| page.get(offset as usize)).copied().flatten();
            let own = found.filter(|((layer, token), _)| *layer == held.layer && held.tokens.contains(token));
            *to = match own {
                Some((_, holds)) if !held.released => holds,
                Some((_, holds)) => holds ^ 0x5A,
                None => 0xEE,
            };
        }
        Ok(())
    }
}

pub struct SenderNode {
    pub rank: Rank,
    /// The process's number in the fabric; its end is none while it is dead.
    pub process: usize,
    pub end: Option<SendingEnd<ModelSender>>,
    pub memory: Rc<RefCell<Origins>>,
}

/// Pages of a pool: what they hold by plane, and whose they are.
pub struct Pool {
    pub pages: Vec<Vec<Vec<u8>>>,
    pub owner: Vec<Option<Fence>>,
}

impl Pool {
    pub fn new(count: usize, page_bytes: &[u64]) -> Pool {
        let page: Vec<Vec<u8>> = page_bytes.iter().map(|bytes| vec![0xDD; *bytes as usize]).collect();
        Pool { pages: vec![page; count], owner: vec![None; count] }
    }

    /// Takes free pages, and spoils what they held.
    pub fn take(&mut self, fence: Fence, count: usize) -> Option<Vec<u32>> {
        let free: Vec<u32> = (0..)
            .zip(&self.owner)
            .filter(|(_, owner)| owner.is_none())
            .map(|(page, _)| page)
            .take(count)
            .collect();
        if free.len() < count {
            return None;
        }
        for page in &free {
            self.owner[*page as usize] = Some(fence);
            self.pages[*page as usize].iter_mut().for_each(|plane| plane.fill(0xDD));
        }
        Some(free)
    }

    pub fn free(&mut self, fence: Fence) {
        self.owner.iter_mut().filter(|owner| **owner == Some(fence)).for_each(|owner| *owner = None);
    }

    pub fn is_free(&self) -> bool {
        self.owner.iter().all(Option::is_none)
    }

    /// Writes a run's bytes at its receiver's end.
    fn write(&mut self, page: u32, run: &Run, bytes: &[u8]) {
        for (at, byte) in (0_u64..).zip(bytes) {
            let offset = run.to.offset + at / run.bytes * run.to.stride + at % run.bytes;
            let plane = &mut self.pages[page as usize][run.to.plane as usize];
            plane[offset as usize] = *byte;
        }
    }

    fn read(&self, page: u32, run: &Run, into: &mut [u8]) {
        for (at, byte) in (0_u64..).zip(into) {
            let offset = run.to.offset + at / run.bytes * run.to.stride + at % run.bytes;
            *byte = self.pages[page as usize][run.to.plane as usize][offset as usize];
        }
    }
}

/// What a receiver holds for a use of pages.
pub struct Table {
    pub attempt: usize,
    pub pages: Vec<u32>,
    /// From the page of the first wanted token on.
    pub landing: Vec<u32>,
    pub whole: bool,
    pub ended: bool,
}

/// A receiver's memory.
pub struct Pages {
    pub cache: Pool,
    pub landing: Pool,
    pub tables: HashMap<Fence, Table>,
    /// Writes for a use of pages that had ended.
    pub late_writes: u32,
    /// A control: what is stored is read again after the check.
    pub reads_twice: bool,
    /// Whether the next run cannot be stored, and whether one could not.
    pub refuses: bool,
    pub refused: bool,
    /// What was done that must never be.
    pub broken: Option<String>,
}

impl Pages {
    pub fn new(count: usize, bytes: &[u64], reads_twice: bool) -> Pages {
        Pages {
            cache: Pool::new(count, bytes),
            landing: Pool::new(count, bytes),
            tables: HashMap::new(),
            late_writes: 0,
            reads_twice,
            refuses: false,
            refused: false,
            broken: None,
        }
    }
}

impl Landing for Pages {
    fn write(&mut self, fence: Fence, page: u32, run: &Run, bytes: &[u8]) {
        if self.landing.owner[page as usize] != Some(fence) {
            self.broken.get_or_insert(format!("{fence:?} writes page {page}, which is not its own"));
            return;
        }
        let late = self.tables.get(&fence).is_none_or(|table| table.ended || table.whole);
        self.late_writes += u32::from(late);
        self.landing.write(page, run, bytes);
    }

    fn read(&mut self, page: u32, run: &Run, into: &mut [u8]) -> Result<()> {
        self.landing.read(page, run, into);
        Ok(())
    }
}

/// Stores rows in a receiver's memory.
pub struct Hands(pub Rc<RefCell<Pages>>);

impl Store for Hands {
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let memory = &mut *self.0.borrow_mut();
        if std::mem::take(&mut memory.refuses) {
            memory.refused = true;
            return Err(Error::new(Kind::Io, "store"));
        }
        let Some(table) = memory.tables.get(&fence).filter(|table| !table.ended) else {
            memory.broken = Some(format!("{fence:?} is stored after its end"));
            return Ok(());
        };
        let mut bytes = bytes.to_vec();
        if memory.reads_twice {
            let leading = table.pages.len() - table.landing.len();
            memory.landing.read(table.landing[run.to.page as usize - leading], run, &mut bytes);
        }
        memory.cache.write(table.pages[run.to.page as usize], run, &bytes);
        Ok(())
    }
}

/// A receiver's end of the fabric, and the frames that have come at it if a control listens.
pub struct Listening {
    pub inner: ModelReceiver,
    pub listens: bool,
    pub heard: Vec<(u32, Vec<u8>)>,
}

impl Fabric for Listening {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        let happened = self.inner.poll(frame)?;
        if let (Some(Happened::Frame { link }), true) = (happened, self.listens) {
            self.heard.push((link, frame.clone()));
        }
        Ok(happened)
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl ReceiverFabric for Listening {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.inner.send(link, frame)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.fetch(link, fence, at, run, into)
    }

    fn holds(&mut self, link: u32) -> bool {
        self.inner.holds(link)
    }
}

pub struct ReceiverNode {
    pub rank: Rank,
    pub process: usize,
    pub end: Option<ReceivingEnd<Listening>>,
    pub memory: Rc<RefCell<Pages>>,
    /// Connections that are alive at this end.
    pub links: Vec<u32>,
    /// Generations are kept across processes.
    pub generation: u64,
}

impl ReceiverNode {
    /// What is wrong with the rows of a layer of a use of pages, from its first wanted token on; of all layers, if none
    /// is given.
    pub fn wrong_row(
        &self,
        side: &Side,
        request: &Request<'_>,
        (fence, first, salt): (Fence, u32, Salt),
        layer: Option<u32>,
    ) -> Option<String> {
        let memory = self.memory.borrow();
        let table = &memory.tables[&fence];
        let mut wrong = None;
        each(side, request, |(stage, lane, _, page, plane), at, (of, token), holds| {
            let own = (stage, lane) == (self.rank.stage, self.rank.lane);
            if own && token >= first && layer.is_none_or(|layer| layer == of) {
                let physical = table.pages[page as usize];
                let found = memory.cache.pages[physical as usize][plane as usize][at as usize];
                if found != holds ^ salt {
                    wrong.get_or_insert(format!("{fence:?} layer {of} token {token}: {found:#x}"));
                }
            }
        });
        wrong
    }
}

/// The chunks of a prompt, of which a sender that divides tokens has places in batches.
#[derive(Clone)]
pub struct Prompt {
    pub tokens: u32,
    pub chunks: Vec<Chunk>,
    /// Where each chunk ends.
    pub ends: Vec<u32>,
}
