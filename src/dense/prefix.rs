//! Prefix caching in two tiers: published pages that sequences with the same prefix share.
//!
//! A *published* page is a full page whose block hash other sequences can find (vLLM: a cached full block). Its rows
//! are accepted, and the steps that wrote them have ended. [`Cache::publish`] hashes such pages by their contents.
//! [`Cache::open_shared`] finds and uses them, so that a prompt's prefix is neither computed nor stored twice. Pages
//! that no sequence uses stay until their memory is needed: admission counts them as free, and evicts the page used
//! longest ago. With a host's tier their copies are found there, and come back to the device.
//!
//! **What a prefix needs.** Each group of layers has its own directory. A group with full attention needs all pages of
//! the prefix; one with a sliding window needs those that a query behind the prefix reads. The prefix is as long as all
//! groups allow.
//!
//! **Users.** A shared page belongs to the directory and to each sequence that uses it. No sequence writes to it: new
//! rows come after it, and truncating inside it gives the sequence a copy. A sequence that closes gives its last block
//! back first, so a prefix outlives its continuations.
//!
//! **What it does not do.** When two sequences compute the same page at the same time, both keep theirs, and others
//! find one of them. When that one is evicted, the next [`Cache::publish`] names the other.

use crate::dense::Cache;
use crate::dense::admit::Open;
use crate::dense::held::Held;
use crate::dense::line::Coming;
use crate::dense::named::Named;
use crate::dense::pool::Pool;
use crate::dense::record::{Record, State, Way};
use crate::dense::shape::{GROUPS_MAX, Shape};
use crate::device::{Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::ids::Sequence;
use crate::sequence::Tokens;
use crate::total::{BlockHash, BlockHasher};

/// The block hashes of a prompt's full pages, for [`Cache::find`] and [`Cache::open_shared`]. Hashing takes longer than
/// finding, so an engine that asks again (a queue, a router) keeps them.
#[derive(Clone, Debug)]
pub struct Names {
    hasher: BlockHasher,
    blocks: Vec<BlockHash>,
}

/// How much of a prompt is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Leading tokens of which no page is needed any more but what is in a tier, in whole pages. In a model whose
    /// groups all have sliding windows that includes tokens before the windows, of which there are no pages at all.
    pub tokens: u32,
    /// Tokens of those of these pages that are in the host's tier alone in some group, and have to come back.
    pub host_tokens: u32,
}

/// A sequence that was opened for a prompt with known tokens.
#[derive(Debug)]
pub struct Opened {
    /// Its handle.
    pub sequence: Sequence,
    /// The tokens that it has already. Its first step continues after them.
    pub found: Found,
    /// Done when all of its pages have come back. Steps need not wait for it on the host: they do on the device.
    pub ticket: Ticket,
}

/// The numbers of a shape that tell its rows from others', always as many.
fn fields(shape: &Shape) -> [u32; 1 + 5 * GROUPS_MAX] {
    let mut fields = [0; 1 + 5 * GROUPS_MAX];
    fields[0] = shape.page_tokens;
    for (to, group) in fields[1..].chunks_exact_mut(5).zip(&shape.groups) {
        // Layers by their number and sum: two shapes of one cache never meet, so this tells apart mistakes alone.
        let sum = group.layers.iter().fold(0, |sum: u32, layer| sum.wrapping_mul(31).wrapping_add(*layer));
        let [first, second] = group.runs;
        to.copy_from_slice(&[group.layers.len() as u32, sum, first, second, group.window.unwrap_or(0)]);
    }
    fields
}

impl Cache {
    /// Hashes the full pages of a prompt. `salt` separates sequences whose equal tokens have different rows: tenants,
    /// adapters, versions of the weights. Names are of this cache alone: other caches find nothing by them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for more ids than a sequence may have, and for a number of keys that is neither 0 nor the
    /// number of full pages.
    pub fn names(&self, salt: &[u8], prompt: Tokens<'_>) -> Result<Names> {
        let page_tokens = self.config.shape.page_tokens;
        prompt.check(page_tokens, self.config.max_tokens, "names")?;
        let hasher = BlockHasher::of(&self.secret, &fields(&self.config.shape), salt);
        let full = prompt.ids.len() / page_tokens as usize;
        let mut blocks = vector(full, "names", "block hashes of pages")?;
        for (ids, key) in prompt.pages(page_tokens) {
            blocks.push(hasher.block(blocks.last(), key, ids));
        }
        Ok(Names { hasher, blocks })
    }

    /// How much of a prompt [`Cache::open_shared`] would find now. Changes nothing, not even the order of use.
    pub fn find(&self, names: &Names) -> Found {
        self.find_before(names, 0)
    }

    /// How much of a prompt of `prompt` tokens [`Cache::arrive_shared`] would find now. It may be more than
    /// [`Cache::find`] says: a group with a sliding window needs only the pages that a query behind the prompt reads.
    pub fn find_arriving(&self, names: &Names, prompt: u32) -> Found {
        self.find_before(names, prompt)
    }

    /// What is found for a sequence none of whose queries is before `floor`, nor before the end of what is found.
    fn find_before(&self, names: &Names, floor: u32) -> Found {
        let page_tokens = self.config.shape.page_tokens;
        let pages = self.found_pages(&names.blocks, floor);
        let of_host = (0..pages).filter(|block| {
            let first = |group: &usize| self.first_needed(*group, pages, floor);
            let needed = (0..self.pools.len()).filter(|group| *block >= first(group));
            let name = names.blocks.get(*block as usize);
            needed.into_iter().any(|group| {
                let found = name.and_then(|name| self.pools[group].find(name));
                found.is_some_and(|found| found.device.is_none())
            })
        });
        Found { tokens: pages * page_tokens, host_tokens: of_host.count() as u32 * page_tokens }
    }

    /// The first page of a group that a query behind `pages` pages and not before `floor` reads.
    fn first_needed(&self, group: usize, pages: u32, floor: u32) -> u32 {
        let behind = pages.saturating_mul(self.config.shape.page_tokens);
        self.config.first_block(group, behind.max(floor)).min(pages)
    }

    /// The most leading pages that every group has, or those of its window.
    fn found_pages(&self, blocks: &[BlockHash], floor: u32) -> u32 {
        let (mut runs, mut most) = ([0_u32; GROUPS_MAX], 0);
        for (pages, block) in (1_u32..).zip(blocks) {
            let mut all = true;
            for (group, (run, pool)) in runs.iter_mut().zip(&self.pools).enumerate() {
                *run = if pool.find(block).is_some() { *run + 1 } else { 0 };
                if *run == 0 && !self.config.slides(group) {
                    return most;
                }
                all &= *run >= pages - self.first_needed(group, pages, floor);
            }
            if all {
                most = pages;
            }
        }
        most
    }

    /// Opens a sequence like [`Cache::open`], for a prompt whose names are known. The sequence shares the leading pages
    /// that were published before and are still in a tier; those that are on the host alone come back on `stream`. Its
    /// steps wait for them on the device. Admission counts only the pages that are not shared.
    ///
    /// Name the leading ids that may be shared: leave out the last id of the prompt if its row must be computed again
    /// for its logits. Caches of several ranks share the same pages only if every rank passes the names that the rank
    /// with the fewest can find: call [`Cache::find`] on each rank first.
    ///
    /// # Errors
    /// As [`Cache::open`]; [`Kind::OutOfRange`] for names of more tokens than the prompt has. An error takes nothing.
    /// If the device refuses the call half-way, [`Cache::reap`] frees the pages later.
    pub fn open_shared(&mut self, open: &Open, names: &Names, stream: Stream) -> Result<Opened> {
        self.open_as(open, Some(names), None, stream)
    }

    /// Opens a sequence whose steps compute its prompt, or one that arrives in a way.
    pub(super) fn open_as(
        &mut self,
        open: &Open,
        names: Option<&Names>,
        way: Option<Way>,
        stream: Stream,
    ) -> Result<Opened> {
        let page_tokens = self.config.shape.page_tokens;
        let blocks = names.map_or(&[][..], |names| names.blocks.as_slice());
        if blocks.len() as u64 * u64::from(page_tokens) > u64::from(open.prompt) {
            return Err(Error::new(Kind::OutOfRange, "open")
                .at("names of more tokens than the prompt has")
                .with("pages", blocks.len() as u64)
                .with("prompt", open.prompt));
        }
        let (index, tokens) = self.admit(open)?;
        let reach = self.config.reach(tokens)?;
        // Its first query comes behind the prompt if that arrives, else behind the prefix.
        let before = if way.is_some() { open.prompt } else { 0 };
        let found = names.map_or(Found::default(), |names| self.find_before(names, before));
        let (pages, floor) = (found.tokens / page_tokens, before.max(found.tokens));
        let blocks = &blocks[..pages as usize];
        let held = self.admit_shared(blocks, floor, reach)?;
        let mut named = names.map(|names| Named::new(names.hasher, self.config.pages(reach))).transpose()?;
        named.iter_mut().for_each(|named| named.blocks.extend(blocks.iter().map(|block| (*block, 0))));
        let mut pairs = vector(self.pools.len(), "open", "copies of pages")?;
        for _ in 0..self.pools.len() {
            pairs.push(vector(pages as usize, "open", "copies of pages")?);
        }
        let arriving = way.map(|way| self.admit_arriving(way, open.prompt, pages)).transpose()?;
        self.flush(stream)?;
        let sequence = self.enter(index, (open.prompt, tokens), held);
        let record = &mut self.records[index];
        record.names = named;
        (record.rows.committed, record.rows.stored, record.rows.upper) =
            (found.tokens, found.tokens, found.tokens);
        (record.start, record.floor) = (Some(found.tokens), floor);
        if let Some(arriving) = arriving {
            (record.arriving, record.state) = (arriving, State::Arriving);
        }
        let brought = self.share_blocks(index, pages, &mut pairs, stream);
        let brought = self.unpin(index).and(brought);
        let settled = brought.and_then(|number| match self.records[index].state {
            State::Arriving => self.settle_arriving(index, number, stream),
            _ => self.settle_coming(index, number, stream),
        });
        match settled.and_then(|ticket| self.name_pages(index).map(|()| ticket)) {
            Ok(ticket) => Ok(Opened { sequence, found, ticket }),
            Err(error) => {
                self.records[index].state = State::Closing;
                // If the device refuses this, `reap` frees the sequence later.
                let _ = self.release_closed(index, stream);
                Err(error)
            }
        }
    }

    /// Checks that a sequence of `reach` tokens that shares `blocks` can be admitted, if no query is before `floor`.
    fn admit_shared(&self, blocks: &[BlockHash], floor: u32, reach: u32) -> Result<Vec<Held>> {
        let mut held = vector(self.pools.len(), "open", "page tables")?;
        for (group, pool) in self.pools.iter().enumerate() {
            let need = self.need(group, reach);
            let first = self.config.first_block(group, floor) as usize;
            // A page that is shared is not taken; nor can it be evicted for another one.
            let on_device = blocks.iter().skip(first).filter_map(|block| pool.find(block)?.device);
            let (shared, idle) = on_device
                .fold((0, 0), |(shared, idle), page| (shared + 1, idle + u32::from(pool.is_idle(page.0))));
            pool.check(&self.config, need, need.whole - shared + idle)?;
            held.push(Held::new(need)?);
        }
        Ok(held)
    }

    /// Gives a sequence the first `pages` pages, from the device or from the host, and all others that admission takes
    /// at once. `pairs` lists what comes from the host. Returns the batch of copies that its pages come with.
    fn share_blocks(
        &mut self,
        index: usize,
        pages: u32,
        pairs: &mut [Vec<(u32, u32)>],
        stream: Stream,
    ) -> Result<u64> {
        // First those that are there, so that no other page evicts them.
        let (mut filled, floor) = (0, self.records[index].floor);
        for group in 0..self.pools.len() {
            let (first, pool) = (self.config.first_block(group, floor), &mut self.pools[group]);
            let Some(named) = &mut self.records[index].names else { continue };
            for (name, groups) in named.blocks.iter_mut().skip(first as usize) {
                match pool.use_block(name)? {
                    Some(page) => {
                        *groups |= 1 << group;
                        filled = pool.filled(page).max(filled);
                    }
                    None => drop(pool.pin(name)?),
                }
            }
        }
        for (group, pairs) in pairs.iter_mut().enumerate() {
            let first = self.config.first_block(group, floor);
            for block in 0..pages {
                self.take_block(index, group, block, block < first, pairs)?;
            }
        }
        self.take_whole(index)?;
        if self.records[index].state == State::Arriving {
            self.take_arriving(index)?;
        }
        for (group, held) in self.records[index].held.iter().enumerate() {
            self.tables.write(group, index, 0, held.pages())?;
        }
        self.bring(index, filled, pairs, stream)
    }

    /// Enqueues the copies of a sequence's pages from the host. Batch `filled` brings those of its pages that are on
    /// the device, or on their way. Returns the batch with which the last of its pages comes; 0 if all are there.
    pub(super) fn bring(
        &mut self,
        index: usize,
        filled: u64,
        pairs: &[Vec<(u32, u32)>],
        stream: Stream,
    ) -> Result<u64> {
        let comes = pairs.iter().any(|pairs| !pairs.is_empty());
        let late = !self.moves.up.has_passed(filled, &*self.device);
        if comes || late {
            self.unsettle(index, stream)?;
            self.flush(stream)?;
            self.moves.up.wait(filled, stream, &*self.device)?;
        }
        if comes {
            // The sequences that had the pages before.
            self.device.wait(stream, self.left)?;
            return self.moves.bring(pairs, &mut self.pools, stream, &*self.device);
        }
        Ok(if late { filled } else { 0 })
    }

    /// Ends the copies of a sequence whose pages come with batch `number`: its next step waits for that batch.
    pub(super) fn settle_coming(&mut self, index: usize, number: u64, stream: Stream) -> Result<Ticket> {
        if number == 0 {
            return Ok(Ticket::done());
        }
        let ticket = self.settle(index, stream)?;
        self.records[index].coming = Coming::batch(number);
        Ok(ticket)
    }

    /// Appends the page of a found block: the block's, or a fresh one for its copy on the host.
    fn take_block(
        &mut self,
        index: usize,
        group: usize,
        block: u32,
        before_window: bool,
        pairs: &mut Vec<(u32, u32)>,
    ) -> Result<()> {
        let Self { records, pools, moves, .. } = self;
        let (record, pool) = (&mut records[index], &mut pools[group]);
        let name = record.names.as_ref().and_then(|named| named.blocks.get(block as usize));
        let Some((name, groups)) = name.copied().filter(|_| !before_window) else {
            record.held[group].push(None);
            return Ok(());
        };
        let missing = || Error::new(Kind::Internal, "open").at("a missing block");
        let found = pool.find(&name).ok_or_else(missing)?;
        if groups & 1 << group != 0 {
            record.held[group].push(Some(found.device.ok_or_else(missing)?.0));
            return Ok(());
        }
        let host = found.host.ok_or_else(missing)?.0;
        let end = record.held[group].end() + 1;
        let (fresh, touched) = record.held[group].grow(end, pool, moves)?;
        pairs.extend(fresh.iter().map(|page| (host, *page)));
        record.after = record.after.max(touched);
        Ok(())
    }

    /// Ends the keeping of host pages whose copies are enqueued, or never will be.
    fn unpin(&mut self, index: usize) -> Result<()> {
        for group in 0..self.pools.len() {
            let Record { names, floor, .. } = &self.records[index];
            let Some(named) = names else { continue };
            let first = self.config.first_block(group, *floor);
            for (name, groups) in named.blocks.iter().skip(first as usize) {
                if groups & 1 << group == 0 {
                    self.pools[group].unpin(name)?;
                }
            }
        }
        Ok(())
    }

    /// Names the pages of a sequence whose blocks have no page on the device: those that come back, which others may
    /// share from now on behind the copies, and those that were computed twice and whose first page was evicted since.
    fn name_pages(&mut self, index: usize) -> Result<()> {
        let Record { names, held, .. } = &mut self.records[index];
        let Some(named) = names else { return Ok(()) };
        named.tried = self.pools.iter().map(Pool::lost).sum();
        for (group, (held, pool)) in held.iter().zip(&mut self.pools).enumerate() {
            let pages = named.blocks.iter_mut().zip(held.pages()).skip(held.first() as usize);
            for ((name, groups), page) in pages.filter(|((_, groups), _)| groups & 1 << group == 0) {
                *groups |= u8::from(pool.publish(name, *page)?) << group;
            }
        }
        Ok(())
    }

    /// Publishes the full pages after the first `from` tokens whose rows are accepted and stored. `from` is the number
    /// of tokens in the pages that are published already. `next` has the known token ids of the sequence from there on.
    /// Returns the number of tokens in the sequence's published pages. Call it again when more steps have been retired,
    /// and at the end, before [`Cache::close`].
    ///
    /// In a group with a sliding window the pages before the window are gone, and only those behind are published: call
    /// it after each chunk of a prompt.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence whose step failed, that is parked, or that was opened
    /// without names; [`Kind::DeviceFailed`] if its last copy failed; [`Kind::Busy`] while it may still run;
    /// [`Kind::OutOfRange`] if `from` is not [`Length::published`](Cache::length), for more ids than were admitted, and
    /// for a number of keys that is neither 0 nor the number of full pages.
    pub fn publish(&mut self, sequence: Sequence, from: u32, next: Tokens<'_>) -> Result<u32> {
        let page_tokens = self.config.shape.page_tokens;
        let record = self.record(sequence)?;
        record.check_state(&[State::Running], "publish")?;
        record.check_ticket("publish")?;
        let Some(named) = &record.names else {
            return Err(Error::new(Kind::InvalidState, "publish")
                .at("the sequence was opened without names")
                .hint("open it with open_shared, with the names of no tokens if none are known yet"));
        };
        let published = named.pages() * page_tokens;
        if from != published {
            return Err(Error::new(Kind::OutOfRange, "publish")
                .at("`from` is not the number of published tokens")
                .with("from", from)
                .with("published", published)
                .hint("begin after the published tokens: a truncate may have reduced their number"));
        }
        next.check(page_tokens, self.config.reach(record.tokens)? - published, "publish")?;
        if record.has_ticket() {
            return Err(Error::new(Kind::Busy, "publish").at("work of the sequence is in flight"));
        }
        let pages = record.rows.stored.saturating_sub(published) / page_tokens;
        let index = sequence.index as usize;
        for (ids, key) in next.pages(page_tokens).take(pages as usize) {
            self.publish_page(index, ids, key)?;
        }
        // A page is found only where all pages before it are.
        let lost = self.pools.iter().map(Pool::lost).sum();
        if self.records[index].names.as_ref().is_some_and(|names| names.tried < lost) {
            self.name_pages(index)?;
        }
        self.length(sequence).map(|length| length.published)
    }

    fn publish_page(&mut self, index: usize, ids: &[u32], key: Option<&[u8; 16]>) -> Result<()> {
        let Record { names, held, .. } = &mut self.records[index];
        let Some(named) = names else { return Ok(()) };
        let block = named.pages();
        let name = named.hasher.block(named.blocks.last().map(|(name, _)| name), key, ids);
        let mut groups = 0;
        for (group, (held, pool)) in held.iter().zip(&mut self.pools).enumerate() {
            // Before a window there is no page.
            if let Some(page) = held.page(block) {
                groups |= u8::from(pool.publish(&name, page)?) << group;
            }
        }
        named.blocks.push((name, groups));
        Ok(())
    }

    /// Forgets the names of a sequence's pages from `first` on: their rows may change.
    pub(super) fn unname(&mut self, index: usize, first: u32) -> Result<()> {
        let Record { names, held, .. } = &mut self.records[index];
        let Some(named) = names else { return Ok(()) };
        while named.pages() > first {
            let Some((name, groups)) = named.blocks.pop() else { break };
            let block = named.pages();
            for (group, pool) in
                self.pools.iter_mut().enumerate().filter(|(group, _)| groups & 1 << group != 0)
            {
                pool.unname(&name, held[group].page(block).unwrap_or_default())?;
            }
        }
        Ok(())
    }

    /// Ends the uses of a closed sequence, the last block first.
    pub(super) fn leave_blocks(&mut self, named: Option<&Named>) -> Result<()> {
        for (name, groups) in named.iter().flat_map(|named| named.blocks.iter().rev()) {
            for (group, pool) in self.pools.iter_mut().enumerate() {
                if groups & 1 << group != 0 {
                    pool.leave_block(name)?;
                }
            }
        }
        Ok(())
    }

    /// Enqueues the copies to the host that are due, before anything else on `stream`.
    pub(super) fn flush(&mut self, stream: Stream) -> Result<()> {
        self.moves.flush(&mut self.pools, stream, &*self.device)
    }

    /// Copies published pages that are not yet in the host's tier to it, the oldest first, at most `bytes` bytes in
    /// this call: so the caller bounds the bytes a second. `stream` should have a low priority, and be no stream of
    /// steps. Returns the bytes; 0 if nothing is left to copy, `bytes` is less than a page, or there is no such tier.
    ///
    /// # Errors
    /// The device's errors: the copies that it refused are enqueued by the next call that copies or begins a step.
    pub fn save(&mut self, stream: Stream, bytes: u64) -> Result<u64> {
        let (mut saved, mut passed) = (0, 0);
        // In turn over all calls: a prefix is found only where all groups have it.
        while passed < self.pools.len() {
            let own = self.pools[self.saves].save_oldest(bytes - saved, &mut self.moves)?;
            self.saves = (self.saves + 1) % self.pools.len();
            (saved, passed) = (saved + own, if own > 0 { 0 } else { passed + 1 });
        }
        self.flush(stream)?;
        Ok(saved)
    }
}
