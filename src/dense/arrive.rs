//! Arrival: a sequence whose prompt another instance computes, and whose rows a transfer brings.
//!
//! A decode instance grants pages to a request while prefill still computes it, and its rows come layer by layer. Such
//! a sequence has all its pages from the beginning, because admission takes all pages, and takes part in no step until
//! it joins. It is one of [`Config::sequences`](crate::dense::Config::sequences): a record costs as much as that of a
//! running one, so there is no bound of its own as in the sparse cache.
//!
//! | call | device | host |
//! |---|---|---|
//! | [`Cache::arrive`], [`Cache::arrive_shared`] | waits for uses of the pages, then a ticket | takes the pages |
//! | [`Cache::store`] | nothing | writes bytes to a host page |
//! | [`Cache::append_layer_in_place`] | nothing | counts a layer's rows |
//! | [`Cache::bring_layer`] | copies a whole layer up | |
//! | [`Cache::join`] | copies the layers up that were not | the sequence runs; its host pages are free |
//! | [`Cache::close`] | a ticket, if copies are in flight | gives the pages back when it is Done |
//! | [`Cache::abort`] | the same | withholds the pages that the transfer writes to, until [`Cache::release`] |
//!
//! **Two ways.** With [`Way::Direct`] the transfer writes to the device pages: RDMA to a GPU, a copy by a peer, the
//! engine's own copies. With [`Way::Host`] it writes to pages of the host's tier, which the sequence takes for as long
//! as it arrives, and each layer goes up as soon as it is whole.
//!
//! **When a page may be written.** A page that is free may have work in flight: steps and copies leave pages to others
//! behind an event. A transfer is on no stream, so it waits on the host: for the ticket of `arrive`. Work on a stream
//! that is ordered after the one of `arrive` need not. Through the host the cache itself checks the ticket.
//!
//! **When a layer may be read.** Copies up are one line, with the copies of prefixes and parked sequences (`moves`).
//! Each layer has a number there, so the first step waits for each layer by itself ([`Cache::arrived`]), whatever the
//! order in which the layers came. The host has seen the end of all earlier work on the pages, by the ticket. So these
//! copies wait for nothing but the line.
//!
//! **Windows.** In a group with a sliding window a sequence has the pages that a query behind the prompt reads.
//! [`Cache::pages`] names page 0 for the blocks before them. Nothing may be written to page 0: rows of these blocks are
//! dropped, and count as rows in place. [`Cache::store`] drops them itself.
//!
//! **Costs.** An arrival allocates for each layer and page. The calls between it and the join, and the first step,
//! allocate nothing (`tests/allocation.rs`). A layer is one copy operation and one event.
//!
//! **What it does not do.** It moves no bytes between machines, and does not know what rows mean. It does not check
//! that rows are there which the caller declares. A prompt that arrives has a fixed length: it cannot be extended,
//! truncated, forked, published or parked before it has joined.

use crate::dense::Cache;
use crate::dense::admit::Open;
use crate::dense::line::Coming;
use crate::dense::prefix::{Names, Opened};
use crate::dense::record::{Arriving, Record, State, Way};
use crate::device::{Slice, Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::fallible::{filled, vector};
use crate::ids::Sequence;

impl Cache {
    /// Opens a sequence whose rows a transfer brings: takes its pages, as [`Cache::open`] does, and with [`Way::Host`]
    /// a page of the host's tier for each page that is to be filled. It takes part in steps once it has joined
    /// ([`Cache::join`]).
    ///
    /// The ticket is Done when nothing uses the pages any more: only then may a transfer write to them. `stream` should
    /// be the one of copies; work that is enqueued there behind this call may write to the pages without the ticket.
    ///
    /// # Errors
    /// As [`Cache::open`]; also [`Kind::Exhausted`] with the group for host pages, and [`Kind::InvalidState`] for
    /// [`Way::Host`] in a cache that has none. An error takes nothing. If the device refuses the call half-way,
    /// [`Cache::reap`] frees the pages later.
    pub fn arrive(&mut self, open: &Open, way: Way, stream: Stream) -> Result<(Sequence, Ticket)> {
        let opened = self.open_as(open, None, Some(way), stream)?;
        Ok((opened.sequence, opened.ticket))
    }

    /// Opens such a sequence for a prompt whose names are known, as [`Cache::open_shared`] does. The leading pages that
    /// the cache has ([`Cache::find_arriving`]) are shared, and come back on `stream` if they are on the host alone.
    /// The transfer leaves their tokens out: they count as rows in place. The sequence can be published when it has
    /// joined.
    ///
    /// # Errors
    /// As [`Cache::arrive`] and [`Cache::open_shared`].
    pub fn arrive_shared(&mut self, open: &Open, names: &Names, way: Way, stream: Stream) -> Result<Opened> {
        self.open_as(open, Some(names), Some(way), stream)
    }

    /// The first block of a group to which a transfer writes, behind `shared` pages.
    fn first_arriving(&self, group: usize, prompt: u32, shared: u32) -> u32 {
        self.config.first_block(group, prompt).max(shared).min(self.config.pages(prompt))
    }

    /// Checks that the host has the pages of a sequence that arrives through it, and makes room for what comes.
    pub(super) fn admit_arriving(&self, way: Way, prompt: u32, shared: u32) -> Result<Arriving> {
        let layers = self.config.shape.layers();
        let rows = shared.saturating_mul(self.config.shape.page_tokens);
        let rows = filled(layers, rows, "arrive", "rows of layers")?;
        let mut arriving = Arriving { way, shared, filled: rows, ..Arriving::default() };
        if way == Way::Host {
            if self.config.host_pages.is_empty() {
                return Err(Error::new(Kind::InvalidState, "arrive")
                    .at("a cache without pages on the host")
                    .hint("set Config::host_pages, or let the transfer write to device pages"));
            }
            arriving.brought = filled(layers, None, "arrive", "copies of layers")?;
            arriving.pairs = vector(self.pools.len(), "arrive", "host pages")?;
            for (group, pool) in self.pools.iter().enumerate() {
                let wanted = self.config.pages(prompt) - self.first_arriving(group, prompt, shared);
                pool.check_host(wanted, 0)?;
                arriving.pairs.push(vector(wanted as usize, "arrive", "host pages")?);
            }
        }
        Ok(arriving)
    }

    /// In the groups with a sliding window, takes the pages that a query behind the prompt reads.
    pub(super) fn take_arriving(&mut self, index: usize) -> Result<()> {
        let prompt = self.records[index].prompt;
        let end = self.config.pages(prompt);
        for group in 0..self.pools.len() {
            if !self.config.slides(group) {
                continue;
            }
            let first = self.config.first_block(group, prompt).min(end);
            let held = &mut self.records[index].held[group];
            while held.end() < first {
                held.push(None);
            }
            self.take_pages(index, group, end)?;
        }
        Ok(())
    }

    /// Takes the host pages of a sequence that arrives through them, and orders `stream` after all that uses its pages.
    /// Batch `number` brings shared pages back, if it is not 0.
    pub(super) fn settle_arriving(&mut self, index: usize, number: u64, stream: Stream) -> Result<Ticket> {
        let (prompt, mut down, mut up) = (self.records[index].prompt, self.records[index].after, 0);
        for group in 0..self.records[index].arriving.pairs.len() {
            let first = self.first_arriving(group, prompt, self.records[index].arriving.shared);
            let Self { records, pools, moves, config, .. } = self;
            let (Record { arriving, held, .. }, pool) = (&mut records[index], &mut pools[group]);
            for block in first..config.pages(prompt) {
                let host = pool.take_host(moves)?;
                let Some((host, page)) = host.zip(held[group].page(block)) else {
                    return Err(Error::new(Kind::Internal, "arrive").at("host pages that were free"));
                };
                let touched = pool.host_touched(host);
                (down, up) = (touched.0.max(down), touched.1.max(up));
                arriving.pairs[group].push((host, page));
            }
        }
        self.flush(stream)?;
        self.device.wait(stream, self.left)?;
        self.moves.down.wait(down, stream, &*self.device)?;
        self.moves.up.wait(up, stream, &*self.device)?;
        let ticket = self.settle(index, stream)?;
        self.records[index].coming = Coming::batch(number);
        Ok(ticket)
    }

    /// Gives back the host pages of a sequence that has arrived, or does no more.
    pub(super) fn leave_host_pages(&mut self, index: usize) -> Result<()> {
        let Self { records, pools, moves, .. } = self;
        for (pairs, pool) in records[index].arriving.pairs.iter_mut().zip(pools) {
            pairs.drain(..).try_for_each(|(host, _)| pool.give_host_back(host, moves))?;
        }
        Ok(())
    }

    /// Whether a sequence is arriving: it has pages, and takes part in no step.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn is_arriving(&self, sequence: Sequence) -> Result<bool> {
        Ok(self.record(sequence)?.state == State::Arriving)
    }

    /// The memory of a group's pages in the host's tier, if the cache has one: page `p` begins at `p` times
    /// [`Shape::page_bytes`](crate::dense::Shape::page_bytes).
    /// [`Config::host_view`](crate::dense::Config::host_view) says where a layer's rows are in them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an unknown group.
    pub fn host_memory(&self, group: usize) -> Result<Option<Slice>> {
        match group < self.pools.len() {
            true => Ok(self.tier.pages(group)),
            false => Err(crate::dense::no_group(group, self.pools.len())),
        }
    }

    /// The host pages of a sequence that arrives through them, each with its block. A transfer that writes to them by
    /// itself waits for the ticket of the arrival first. Those with [`Way::Direct`] have none: [`Cache::pages`] names
    /// their device pages.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::OutOfRange`] for an unknown group.
    pub fn host_pages(
        &self,
        sequence: Sequence,
        group: usize,
    ) -> Result<impl ExactSizeIterator<Item = (u32, u32)> + '_> {
        let record = self.record(sequence)?;
        if group >= self.pools.len() {
            return Err(crate::dense::no_group(group, self.pools.len()));
        }
        let first = self.first_arriving(group, record.prompt, record.arriving.shared);
        let pairs = record.arriving.pairs.get(group).map_or(&[][..], Vec::as_slice);
        Ok(pairs.iter().enumerate().map(move |(at, (host, _))| (first + at as u32, *host)))
    }

    /// Copies bytes of a sequence that arrives through the host to a host page. They go to `offset` in what block
    /// `block` has of run `run` of a layer: with rows one after the other, token `t` of the block begins at `t` times
    /// the row's bytes. What comes before a window is dropped. [`Cache::append_layer_in_place`] says when rows are
    /// whole.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that does not arrive through the host, and for a layer
    /// that has all rows: it may be on its way up; [`Kind::Busy`] before the ticket of the arrival is Done;
    /// [`Kind::DeviceFailed`] if that failed; [`Kind::OutOfRange`] for an unknown layer or run, a block that is shared
    /// or behind the prompt, and bytes beyond the block. An error writes nothing.
    pub fn store(
        &mut self,
        sequence: Sequence,
        (layer, run): (u32, usize),
        block: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let record = self.arriving(sequence, layer, "store")?;
        self.check_host_way(record, "store")?;
        let Arriving { shared, pairs, filled, .. } = &record.arriving;
        let wrong = |kind, place| Error::new(kind, "store").at(place).with("layer", layer);
        let groups = &self.config.shape.groups;
        let group = groups.iter().position(|group| group.layers.contains(&layer)).unwrap_or(0);
        let Some((plane, _)) = self.pools[group].of_layer(layer).get(run) else {
            return Err(wrong(Kind::OutOfRange, "run of a layer").with("run", run as u64));
        };
        if filled.get(layer as usize).is_some_and(|filled| *filled >= record.prompt) {
            return Err(wrong(Kind::InvalidState, "a layer that has all rows"));
        }
        let end = self.config.pages(record.prompt);
        if block < *shared || block >= end {
            let error = wrong(Kind::OutOfRange, "a block that the transfer does not bring");
            return Err(error.with("block", block).with("first", *shared).with("end", end));
        }
        if offset.saturating_add(bytes.len() as u64) > plane.bytes {
            let error = wrong(Kind::OutOfRange, "bytes beyond what a block has of a layer");
            let error = error.with("offset", offset).with("bytes", bytes.len() as u64);
            return Err(error.with("most", plane.bytes));
        }
        let first = self.first_arriving(group, record.prompt, *shared);
        let place = block.checked_sub(first).and_then(|at| pairs.get(group)?.get(at as usize));
        // Before a window it has no page.
        let Some((host, _)) = place else { return Ok(()) };
        self.tier.write(&plane.memory, u64::from(*host) * plane.stride + offset, bytes)
    }

    /// Declares that `count` more rows of a layer are in place, in the order of their tokens: in the device pages of
    /// the sequence ([`Cache::pages`]), or with [`Way::Host`] in its host pages. Rows before a window count too.
    ///
    /// Work on streams that writes such rows need not have ended, but the stream of [`Cache::join`] is ordered after
    /// it. Rows on the host are there.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not arriving; [`Kind::OutOfRange`] for an
    /// unknown layer and for rows beyond the prompt; through the host [`Kind::Busy`] before the ticket of the arrival
    /// is Done, and [`Kind::DeviceFailed`] if that failed. An error changes nothing.
    pub fn append_layer_in_place(&mut self, sequence: Sequence, layer: u32, count: u32) -> Result<()> {
        let record = self.arriving(sequence, layer, "append")?;
        if record.arriving.way == Way::Host {
            self.check_host_way(record, "append")?;
        }
        let prompt = record.prompt;
        let Some(filled) = self.records[sequence.index as usize].arriving.filled.get_mut(layer as usize)
        else {
            return Ok(());
        };
        if count > prompt - *filled {
            return Err(Error::new(Kind::OutOfRange, "append")
                .at("rows beyond the prompt")
                .with("layer", layer)
                .with("rows", count)
                .with("filled", *filled)
                .with("prompt", prompt));
        }
        *filled += count;
        Ok(())
    }

    /// Brings a layer that has all rows up, from the host pages of a sequence that arrives through them: enqueues the
    /// copy on `stream`, which should be the one of copies. Call it when a layer is whole, in any order of the layers.
    /// [`Cache::join`] brings those that are left.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that does not arrive through the host, for a layer
    /// without all rows, and for one that was brought before; [`Kind::OutOfRange`] for an unknown layer;
    /// [`Kind::DeviceFailed`] if an earlier copy failed. These errors change nothing. If the device refuses the call
    /// half-way, call it again, on any stream.
    pub fn bring_layer(&mut self, sequence: Sequence, layer: u32, stream: Stream) -> Result<()> {
        let record = self.arriving(sequence, layer, "bring_layer")?;
        self.check_host_way(record, "bring_layer")?;
        self.check_layer_rows(record, layer, "bring_layer")?;
        if record.arriving.brought.get(layer as usize).is_some_and(Option::is_some) {
            return Err(Error::new(Kind::InvalidState, "bring_layer")
                .at("a layer that was brought before")
                .with("layer", layer));
        }
        self.bring_up(sequence.index as usize, layer, stream)
    }

    /// Enqueues the copy of a whole layer.
    fn bring_up(&mut self, index: usize, layer: u32, stream: Stream) -> Result<()> {
        let groups = &self.config.shape.groups;
        let Some(group) = groups.iter().position(|group| group.layers.contains(&layer)) else {
            return Ok(());
        };
        let mut number = 0;
        if self.records[index].arriving.host_pages(group) > 0 {
            self.unsettle(index, stream)?;
            let Self { records, pools, moves, device, .. } = self;
            let pages = records[index].arriving.pairs[group].as_slice();
            number = moves.bring_layer((layer, pages), &mut pools[group], stream, &**device)?;
        }
        let brought = self.records[index].arriving.brought.get_mut(layer as usize);
        brought.into_iter().for_each(|brought| *brought = Some(number));
        Ok(())
    }

    /// Ends the arrival of a sequence whose layers have all rows: it may take part in steps from now on, in any
    /// micro-batch. With [`Way::Direct`] `stream` is ordered after the work on streams that wrote its rows. With
    /// [`Way::Host`] it copies up the layers that [`Cache::bring_layer`] did not, and the host pages go back. The
    /// first step waits for the copies on the device, layer by layer if
    /// [`Config::bring_layers`](crate::dense::Config::bring_layers) says so. The ticket ends when all rows are there.
    ///
    /// No one may write to the pages of the arrival any more: while a writer still may, do not join, but
    /// [`Cache::abort`].
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not arriving, and while a layer lacks rows, with
    /// the layer; [`Kind::DeviceFailed`] if the work of the arrival failed. These errors change nothing. If the device
    /// refuses the call half-way, the sequence still arrives: call it again, on any stream.
    pub fn join(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        let record = self.record(sequence)?;
        record.check_state(&[State::Arriving], "join")?;
        let layers = 0..self.config.shape.layers() as u32;
        layers.clone().try_for_each(|layer| self.check_layer_rows(record, layer, "join"))?;
        record.check_ticket("join")?;
        let (index, way) = (sequence.index as usize, record.arriving.way);
        if way == Way::Host {
            for layer in layers {
                if self.records[index].arriving.brought.get(layer as usize).is_some_and(Option::is_none) {
                    self.bring_up(index, layer, stream)?;
                }
            }
        }
        let coming = self.arrived_by(index)?;
        self.order_behind(index, stream)?;
        let ticket = self.settle(index, stream)?;
        self.leave_host_pages(index)?;
        let record = &mut self.records[index];
        let (rows, prompt) = (&mut record.rows, record.prompt);
        (rows.committed, rows.stored, rows.upper) = (prompt, prompt, prompt);
        (record.start, record.state, record.coming) = (Some(prompt), State::Running, coming);
        record.arriving = Arriving::default();
        Ok(ticket)
    }

    /// The copies with which the pages of a sequence come that arrived through the host; none for another one, whose
    /// first step follows the join.
    fn arrived_by(&self, index: usize) -> Result<Coming> {
        let Record { arriving, coming, .. } = &self.records[index];
        if arriving.way == Way::Direct {
            return Ok(Coming::default());
        }
        let parts = self.config.parts() as usize;
        let mut numbers = vector(parts, "join", "copies of layers")?;
        numbers.extend((0..parts).map(|part| if coming.last > 0 { coming.part(part, parts) } else { 0 }));
        for (layer, number) in (0..).zip(&arriving.brought) {
            if let Some(of_part) = numbers.get_mut(self.config.part(layer) as usize) {
                *of_part = number.unwrap_or(0).max(*of_part);
            }
        }
        Ok(Coming { last: numbers.iter().copied().max().unwrap_or(0), parts: numbers })
    }

    /// The record of a sequence that is arriving, in a call that names a layer.
    fn arriving(&self, sequence: Sequence, layer: u32, operation: &'static str) -> Result<&Record> {
        let layers = self.config.shape.layers() as u32;
        if layer >= layers {
            let error = Error::new(Kind::OutOfRange, operation).at("layer");
            return Err(error.with("layer", layer).with("layers", layers));
        }
        let record = self.record(sequence)?;
        record.check_state(&[State::Arriving], operation)?;
        Ok(record)
    }

    /// Checks that rows of a sequence may be on the host now.
    fn check_host_way(&self, record: &Record, operation: &'static str) -> Result<()> {
        if record.arriving.way != Way::Host {
            return Err(Error::new(Kind::InvalidState, operation)
                .at("the transfer writes to the device pages")
                .hint("let the sequence arrive with Way::Host"));
        }
        record.check_ticket(operation)?;
        match record.has_ticket() {
            true => Err(Error::new(Kind::Busy, operation)
                .at("the pages of the sequence are still used")
                .hint("wait for the ticket of the arrival")),
            false => Ok(()),
        }
    }

    /// Checks that a layer has all rows.
    fn check_layer_rows(&self, record: &Record, layer: u32, operation: &'static str) -> Result<()> {
        let filled = record.arriving.filled.get(layer as usize).copied().unwrap_or(0);
        match filled == record.prompt {
            true => Ok(()),
            false => Err(Error::new(Kind::InvalidState, operation)
                .at("a layer without all rows")
                .with("layer", layer)
                .with("filled", filled)
                .with("prompt", record.prompt)),
        }
    }
}
