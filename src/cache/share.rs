//! Published pages that sequences with the same beginning share.
//!
//! A page is *published* when it is full, its rows are accepted, and all of them, with their index keys, are
//! where they are said to be: the work that wrote them has ended. [`Cache::publish`] names such pages by what
//! they hold; [`Cache::open_shared`] finds them again and uses them, so that a prompt's beginning is neither
//! computed nor stored twice. Pages that no sequence uses any more stay until their memory is needed:
//! admission counts them as free, and takes the one used longest ago.
//!
//! A shared page belongs to the index and to each sequence that uses it, and nobody writes it: new rows
//! follow behind it, and a cut inside it gives the sequence a copy.
//!
//! What it does not do: a page and its index keys go together, so a prefix is not kept longer than there
//! are device pages for its keys; of two sequences that compute the same page at the same time both keep
//! theirs, and others find one of them, or the other once that is gone and the sequence publishes again.

use std::collections::HashMap;

use crate::cache::Cache;
use crate::cache::admit::Open;
use crate::cache::record::{Owned, State};
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::ids::{HostPage, IndexPage, Sequence};
use crate::total::{BlockHash, BlockHasher, Inserted, Pages};

/// What pages hold, so that they can be found again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokens<'a> {
    /// Token ids, from the beginning of a page. A rest that fills no page is passed over.
    pub ids: &'a [u32],
    /// For each full page among them a key of the caller's or none; or nothing at all, where no page has one. A key
    /// says what ids do not, which image they stand for, for example: pages are one only if keys and ids are the
    /// same, and so is all that stands before them.
    pub keys: &'a [Option<[u8; 16]>],
}

impl<'a> Tokens<'a> {
    /// Ids alone.
    pub const fn new(ids: &'a [u32]) -> Self {
        Tokens { ids, keys: &[] }
    }

    /// Each full page's ids, and its key.
    fn pages(self, page_tokens: u32) -> impl Iterator<Item = (&'a [u32], Option<&'a [u8; 16]>)> {
        let keys = self.keys.iter().map(Option::as_ref).chain(std::iter::repeat(None));
        self.ids.chunks_exact(page_tokens as usize).zip(keys)
    }

    fn check(self, page_tokens: u32, most: u32, operation: &'static str) -> Result<()> {
        let full = self.ids.len() / page_tokens as usize;
        if self.ids.len() > most as usize {
            return Err(Error::new(Kind::OutOfRange, operation)
                .at("token ids")
                .with("ids", self.ids.len() as u64)
                .with("most", most));
        }
        if !self.keys.is_empty() && self.keys.len() != full {
            return Err(Error::new(Kind::OutOfRange, operation)
                .at("keys: as many as full pages, or none")
                .with("keys", self.keys.len() as u64)
                .with("pages", full as u64));
        }
        Ok(())
    }
}

/// Whether an unused block's pages would be free without it: a fork may own them that does not use the block,
/// and so may a copy that is still to be made.
fn is_room(host: &Pages, keys: &Pages, pages: (HostPage, IndexPage)) -> bool {
    host.owners(pages.0.0) == 1 && keys.owners(pages.1.0) == 1
}

/// The names of a sequence's published pages.
#[derive(Debug)]
pub(super) struct Names {
    namer: BlockHasher,
    /// From the first page on; whether the sequence uses the block, or has a page of its own beside it.
    blocks: Vec<(BlockHash, bool)>,
}

impl Names {
    /// Names for at most `pages` pages.
    fn new(namer: BlockHasher, pages: u32) -> Result<Names> {
        let blocks = vector(pages as usize, "open", "names of pages")?;
        Ok(Names { namer, blocks })
    }

    /// How many pages are named.
    pub(super) fn pages(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// The name of the next page.
    fn next(&self, ids: &[u32], key: Option<&[u8; 16]>) -> BlockHash {
        self.namer.block(self.blocks.last().map(|(block, _)| block), key, ids)
    }

    /// The blocks that the sequence uses, from page `first` on, the last one first.
    pub(super) fn used_from(&self, first: usize) -> impl Iterator<Item = (usize, BlockHash)> + '_ {
        let blocks = self.blocks.iter().enumerate().skip(first).rev();
        blocks.filter(|(_, (_, used))| *used).map(|(page, (block, _))| (page, *block))
    }
}

impl Cache {
    /// As [`Cache::open`], for a prompt whose token ids are known: its leading pages that were published
    /// before, under the same `salt`, are taken over. Answers how many tokens those are, whole pages;
    /// [`Cache::append`] goes on behind them. Admission counts only what is not shared.
    ///
    /// `salt` tells apart what equal tokens do not: tenants, adapters, versions of the weights. `prompt`
    /// has the prompt's ids, or as many leading ones as may be shared: leave out the last one where its
    /// row is to be computed anew, for the logits behind it, and a page where a draft layer's rows depend on
    /// the token that follows.
    ///
    /// Caches of several ranks share alike only if each is offered what the one that finds least would find:
    /// ask them by [`Cache::find_shared`] first.
    ///
    /// # Errors
    /// As [`Cache::open`]; [`Kind::OutOfRange`] for more ids than the prompt has tokens, and for keys that
    /// are neither one a full page nor none. Nothing is taken then.
    pub fn open_shared(&mut self, open: &Open, salt: &[u8], prompt: Tokens<'_>) -> Result<(Sequence, u32)> {
        let page_tokens = self.geometry.page_tokens();
        prompt.check(page_tokens, open.prompt, "open")?;
        let (index, admitted) = self.admit(open)?;
        let pages = self.geometry.pages(self.config.reach(admitted)?);
        let names = self.find_names(salt, prompt, pages)?;
        let shared = names.pages() * page_tokens;
        let slots = self.take_slots(open, admitted)?;
        let mut owned = Owned { slots, names: Some(names), ..Owned::default() };
        if let Err(error) = self.take_shared_pages(pages, &mut owned) {
            self.release_all(&owned)?;
            return Err(error);
        }
        self.stats.prompt_tokens += prompt.ids.len() as u64;
        self.stats.shared_tokens += u64::from(shared);
        Ok((self.enter(index, open, admitted, owned, shared), shared))
    }

    /// How many tokens [`Cache::open_shared`] would take over now. Changes nothing, the order of use included.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] as there.
    pub fn find_shared(&self, salt: &[u8], prompt: Tokens<'_>) -> Result<u32> {
        let page_tokens = self.geometry.page_tokens();
        prompt.check(page_tokens, self.config.max_tokens, "find shared pages")?;
        let pages = self.geometry.pages(prompt.ids.len() as u32);
        Ok(self.find_names(salt, prompt, pages)?.pages() * page_tokens)
    }

    /// The names of the leading pages that are there, none of them used yet; room for `pages`.
    fn find_names(&self, salt: &[u8], prompt: Tokens<'_>, pages: u32) -> Result<Names> {
        let mut names = Names::new(BlockHasher::new(&self.secret, self.geometry.shape(), salt), pages)?;
        for (ids, key) in prompt.pages(self.geometry.page_tokens()) {
            let block = names.next(ids, key);
            if self.prefix.users(&block).is_none() {
                break;
            }
            names.blocks.push((block, false));
        }
        Ok(names)
    }

    /// Takes `pages` pages: those that are named from the index, the others fresh.
    fn take_shared_pages(&mut self, pages: u32, owned: &mut Owned) -> Result<()> {
        let Owned { names, table, .. } = owned;
        let named = names.as_mut().map_or(&mut [][..], |names| &mut names.blocks[..]);
        let fresh = pages - named.len() as u32;
        // What is taken over cannot make room for the rest.
        let spared = named.iter().filter(|(block, _)| self.prefix.users(block) == Some(0));
        let spared = spared.filter_map(|(block, _)| self.prefix.pages(block));
        let spared = spared.filter(|pages| is_room(&self.total.pages, &self.index.pages, *pages)).count();
        self.check_room(fresh, spared as u32)?;
        for (block, used) in named {
            let pages = self.prefix.share(block)?;
            let (host, keys) = pages.ok_or_else(|| Error::new(Kind::Internal, "open").at("a lost block"))?;
            *used = true;
            self.total.pages.share(host.0)?;
            self.index.pages.share(keys.0)?;
            table.host.push(host.0);
            table.index.push(keys.0);
        }
        self.take_pages(fresh, table)
    }

    /// Publishes what can be published: full pages behind the `from` tokens that are, whose rows are accepted and
    /// stored. `next` are the sequence's token ids from there on, as far as they are known. Answers how many
    /// tokens are published now, whole pages; call it again when more steps have been retired, and at the end,
    /// before [`Cache::close`]. The index keys of these tokens must have been written in order before the
    /// sequence's join, or in its steps.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidConfig`] for a sequence that was not opened by
    /// [`Cache::open_shared`], or is not running; [`Kind::Busy`] while work that the host issued for it is in
    /// flight, [`Kind::DeviceFailed`] when that failed; [`Kind::OutOfRange`] when `from` is not the published
    /// [length](Cache::length), for more ids than were admitted, and for keys that are neither one a full page
    /// nor none.
    pub fn publish(&mut self, sequence: Sequence, from: u32, next: Tokens<'_>) -> Result<u32> {
        let page_tokens = self.geometry.page_tokens();
        let record = self.record(sequence)?;
        record.check_state(&[State::Running], "publish")?;
        record.check_ticket("publish")?;
        let Some(names) = &record.owned.names else {
            return Err(Error::new(Kind::InvalidState, "publish")
                .at("the sequence was opened without token ids")
                .hint("open it by open_shared, with no ids if none are known yet"));
        };
        let published = names.pages() * page_tokens;
        if from != published {
            return Err(Error::new(Kind::OutOfRange, "publish")
                .at("where the ids begin")
                .with("from", from)
                .with("published", published)
                .hint("begin behind the published tokens; a roll-back may have taken some back"));
        }
        next.check(page_tokens, self.config.reach(record.admitted.tokens)? - published, "publish")?;
        if record.has_ticket() {
            return Err(Error::new(Kind::Busy, "publish").at("work of the sequence is in flight"));
        }
        let pages = record.rows.stored.saturating_sub(published) / page_tokens;
        self.find_twins(sequence)?;
        for (ids, key) in next.pages(page_tokens).take(pages as usize) {
            self.publish_page(sequence, ids, key)?;
        }
        self.length(sequence).map(|length| length.published)
    }

    /// A page whose twin has gone meanwhile takes its place, so that what stands behind can still be found.
    fn find_twins(&mut self, sequence: Sequence) -> Result<()> {
        let pages = self.record(sequence)?.owned.names.as_ref().map_or(0, Names::pages) as usize;
        for page in 0..pages {
            let record = self.record(sequence)?;
            let named = record.owned.names.as_ref().and_then(|names| names.blocks.get(page));
            let Some(((block, false), own)) = named.copied().zip(record.owned.table.get(page)) else {
                continue;
            };
            if self.prefix.users(&block).is_none() && self.insert(&block, own)? {
                let names = self.record_mut(sequence)?.owned.names.as_mut();
                names
                    .and_then(|names| names.blocks.get_mut(page))
                    .into_iter()
                    .for_each(|named| named.1 = true);
            }
        }
        Ok(())
    }

    /// Names one more page.
    fn publish_page(&mut self, sequence: Sequence, ids: &[u32], key: Option<&[u8; 16]>) -> Result<()> {
        let record = self.record(sequence)?;
        let next = record
            .owned
            .names
            .as_ref()
            .and_then(|names| Some((names.next(ids, key), record.owned.table.get(names.blocks.len())?)));
        let (block, pages) = next.ok_or_else(|| Error::new(Kind::Internal, "publish").at("a page"))?;
        let used = self.insert(&block, pages)?;
        if let Some(names) = &mut self.record_mut(sequence)?.owned.names {
            names.blocks.push((block, used));
        }
        Ok(())
    }

    /// Puts a block with a sequence's own pages into the index: whether the sequence uses it now, or it is
    /// there with others. Pages have one name: what a fork calls otherwise stays its own. So the index, made for as
    /// many blocks as there are pages, has room.
    fn insert(&mut self, block: &BlockHash, pages: (HostPage, IndexPage)) -> Result<bool> {
        if self.prefix.users(block).is_none() && self.is_named(pages) {
            return Ok(false);
        }
        let inserted = self.prefix.insert(block, pages)?;
        if inserted == Inserted::New {
            self.total.pages.share(pages.0.0)?;
            self.index.pages.share(pages.1.0)?;
            self.stats.published_pages += 1;
        }
        Ok(inserted != Inserted::Twin)
    }

    /// Whether pages stand in the index. Only those of a fork, which others own too, are looked for.
    fn is_named(&self, pages: (HostPage, IndexPage)) -> bool {
        self.total.pages.owners(pages.0.0) > 1 && self.prefix.iter().any(|(_, named, _)| named == pages)
    }

    /// The names of a fork's first `shared` pages, of at most `pages`.
    pub(super) fn fork_names(&self, parent: Sequence, pages: u32, shared: usize) -> Result<Option<Names>> {
        let Some(names) = &self.record(parent)?.owned.names else { return Ok(None) };
        let mut own = Names::new(names.namer, pages)?;
        own.blocks.extend(names.blocks.iter().take(shared));
        Ok(Some(own))
    }

    /// Forgets the names of a sequence's pages from `first` on, of which `replaced` are not its own any more. What
    /// it used alone and keeps is forgotten; the others' blocks keep their pages.
    pub(super) fn unname(&mut self, sequence: Sequence, first: usize, replaced: &[usize]) -> Result<()> {
        let Some(mut names) = self.record_mut(sequence)?.owned.names.take() else { return Ok(()) };
        for (page, block) in names.used_from(first) {
            if self.prefix.users(&block) != Some(1) || replaced.contains(&page) {
                self.prefix.release(&block)?;
            } else if let Some((host, keys)) = self.prefix.remove(&block) {
                self.release_pair(host, keys)?;
            }
        }
        names.blocks.truncate(first);
        self.record_mut(sequence)?.owned.names = Some(names);
        Ok(())
    }

    /// By page of a sequence whether the index owns it for this sequence alone.
    pub(super) fn uses_alone(&self, owned: &Owned) -> Vec<bool> {
        let mut alone = vec![false; owned.table.len()];
        for (page, block) in owned.names.iter().flat_map(|names| names.used_from(0)) {
            alone[page] = self.prefix.users(&block) == Some(1);
        }
        alone
    }

    fn release_pair(&mut self, host: HostPage, keys: IndexPage) -> Result<()> {
        self.total.pages.release(host.0)?;
        self.index.pages.release(keys.0)
    }

    /// Whether so many pages are free on both sides, or can be made so without `spared` of the unused ones.
    pub(super) fn check_room(&self, count: u32, spared: u32) -> Result<()> {
        let least = self.total.pages.free().min(self.index.pages.free());
        if count <= least {
            return Ok(());
        }
        let wanted = (count - least).saturating_add(spared);
        let unused = self
            .prefix
            .evictable(wanted, |pages| is_room(&self.total.pages, &self.index.pages, pages))
            .saturating_sub(spared);
        for pages in [&self.total.pages, &self.index.pages] {
            let free = pages.free().saturating_add(unused);
            if count > free {
                return Err(pages.exhausted(count, free));
            }
        }
        Ok(())
    }

    /// Evicts unused pages until `count` are free on both sides.
    pub(super) fn make_room(&mut self, count: u32) -> Result<()> {
        while self.total.pages.free().min(self.index.pages.free()) < count && self.evict_one()? {}
        Ok(())
    }

    /// Evicts the block used longest ago of those whose pages become free; whether there was one.
    fn evict_one(&mut self) -> Result<bool> {
        let room = |pages| is_room(&self.total.pages, &self.index.pages, pages);
        let Some((host, keys)) = self.prefix.evict(room) else { return Ok(false) };
        self.release_pair(host, keys)?;
        self.stats.evicted_pages += 1;
        Ok(true)
    }

    /// Adds what the index owns to the owners of pages; checks that its users are the sequences that say so,
    /// and have its pages.
    pub(super) fn count_shared(&self, host: &mut [u32], keys: &mut [u32]) -> Result<()> {
        let wrong = |place| Err(Error::new(Kind::Internal, "validate pages").at(place));
        let mut users: HashMap<BlockHash, u32> = HashMap::new();
        for record in &self.records {
            for (page, block) in record.owned.names.iter().flat_map(|names| names.used_from(0)) {
                if self.prefix.pages(&block) != record.owned.table.get(page) {
                    return wrong("pages of a shared block");
                }
                *users.entry(block).or_default() += 1;
            }
        }
        for (block, (page, key_page), count) in self.prefix.iter() {
            host[page.0 as usize] += 1;
            keys[key_page.0 as usize] += 1;
            if count != users.remove(&block).unwrap_or(0) {
                return wrong("users of a shared block");
            }
        }
        if users.is_empty() { Ok(()) } else { wrong("a shared block that is not there") }
    }
}
