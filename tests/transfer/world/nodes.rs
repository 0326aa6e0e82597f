//! The processes of the world: machines, and the memory that they send from and receive in.

use std::collections::HashMap;
use std::rc::Rc;

use forebay::transfer::sender::Source;
use forebay::transfer::{Chunk, Fence, Rank, Receiver, Request, Run, Sender, Side, receiver};
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
#[derive(Clone)]
pub struct Origin {
    pub rows: Rc<Rows>,
    pub layer: u32,
    pub tokens: std::ops::Range<u32>,
    /// The index of the chunk in its request, and the chunk where tokens are divided.
    pub chunk: u32,
    pub released: bool,
}

/// A sender's memory.
pub type Origins = Vec<Origin>;

/// The bytes of a run in a sender's memory. What is not there, or not there any more, reads as other bytes.
pub fn read(origins: &Origins, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
    let place = usize::try_from(origin).ok().and_then(|at| origins.get(at));
    let Some(held) = place else { return Err(Error::new(Kind::OutOfRange, "read")) };
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

pub struct Reader<'a>(pub &'a Origins);

impl Source for Reader<'_> {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        assert!(!self.0[origin as usize].released, "rows are read that were released");
        read(self.0, origin, run, into)
    }
}

pub struct SenderNode {
    pub rank: Rank,
    /// None while its process is dead.
    pub machine: Option<Sender>,
    pub origins: Origins,
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
    pub fn write(&mut self, page: u32, run: &Run, bytes: &[u8]) {
        for (at, byte) in (0_u64..).zip(bytes) {
            let offset = run.to.offset + at / run.bytes * run.to.stride + at % run.bytes;
            let plane = &mut self.pages[page as usize][run.to.plane as usize];
            plane[offset as usize] = *byte;
        }
    }

    pub fn read(&self, page: u32, run: &Run, into: &mut [u8]) {
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
    pub landing: Vec<u32>,
    pub whole: bool,
    pub ended: bool,
}

pub struct ReceiverNode {
    pub rank: Rank,
    pub machine: Option<Receiver>,
    pub cache: Pool,
    pub landing: Pool,
    pub tables: HashMap<Fence, Table>,
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
        let table = &self.tables[&fence];
        let mut wrong = None;
        each(side, request, |(stage, lane, _, page, plane), at, (of, token), holds| {
            let own = (stage, lane) == (self.rank.stage, self.rank.lane);
            if own && token >= first && layer.is_none_or(|layer| layer == of) {
                let physical = table.pages[page as usize];
                let found = self.cache.pages[physical as usize][plane as usize][at as usize];
                if found != holds ^ salt {
                    wrong.get_or_insert(format!("{fence:?} layer {of} token {token}: {found:#x}"));
                }
            }
        });
        wrong
    }
}

/// Where a receiver's rows come from: the sender's memory, what came with the notice, or landing pages.
pub enum From<'a> {
    Shared(&'a Origins),
    Stream(&'a Origins),
    Landing,
}

/// A receiver's mover. It may damage what it fetches, and a write from afar may race with it.
pub struct Hands<'a> {
    pub from: From<'a>,
    pub cache: &'a mut Pool,
    pub landing: &'a mut Pool,
    pub tables: &'a HashMap<Fence, Table>,
    /// Draws whether a fault happens.
    pub faults: &'a mut dyn FnMut() -> bool,
    /// A control: what is stored is read again after the check.
    pub reads_twice: bool,
    origin: u64,
    /// What was done that must never be.
    pub broken: Option<String>,
}

impl<'a> Hands<'a> {
    pub fn new(
        from: From<'a>,
        (cache, landing, tables): (&'a mut Pool, &'a mut Pool, &'a HashMap<Fence, Table>),
        faults: &'a mut dyn FnMut() -> bool,
        reads_twice: bool,
    ) -> Hands<'a> {
        Hands { from, cache, landing, tables, faults, reads_twice, origin: 0, broken: None }
    }

    fn get(&mut self, fence: Fence, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        match self.from {
            From::Shared(origins) | From::Stream(origins) => read(origins, origin, run, into),
            From::Landing => {
                let table = self.tables.get(&fence).ok_or_else(|| Error::new(Kind::Closed, "fetch"))?;
                let page = table.landing.get(run.to.page as usize).copied();
                self.landing.read(page.ok_or_else(|| Error::new(Kind::Closed, "fetch"))?, run, into);
                Ok(())
            }
        }
    }
}

impl receiver::Mover for Hands<'_> {
    fn fetch(&mut self, _: u32, fence: Fence, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.origin = origin;
        self.get(fence, origin, run, into)?;
        if (self.faults)() {
            into[0] ^= 1;
        }
        // A late write from afar lands between the fetch and the store.
        if let (From::Landing, Some(table)) = (&self.from, self.tables.get(&fence))
            && (self.faults)()
        {
            let mut other = into.to_vec();
            other[0] ^= 1;
            self.landing.write(table.landing[run.to.page as usize], run, &other);
        }
        Ok(())
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let mut bytes = bytes.to_vec();
        if self.reads_twice {
            let origin = self.origin;
            self.get(fence, origin, run, &mut bytes)?;
        }
        match self.tables.get(&fence).filter(|table| !table.ended) {
            Some(table) => self.cache.write(table.pages[run.to.page as usize], run, &bytes),
            None => self.broken = Some(format!("{fence:?} is stored after its end")),
        }
        Ok(())
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
