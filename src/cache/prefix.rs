//! Prefix caching: published pages that sequences with the same prefix share.
//!
//! A *published* page is a full page whose block hash other sequences can find (vLLM: a cached full block). Its rows
//! are accepted, and the work that wrote the rows and their index keys has ended. [`Cache::publish`] hashes such pages
//! by their contents. [`Cache::open_shared`] finds and uses them, so that a prompt's prefix is neither computed nor
//! stored twice. Pages that no sequence uses stay until their memory is needed: admission counts them as free, and
//! evicts the page used longest ago.
//!
//! A shared page belongs to the index and to each sequence that uses it. No sequence writes to it: new rows come after
//! it, and truncating inside it gives the sequence a copy.
//!
//! Limits: a page and its index keys are kept and evicted together, so the device pages for index keys limit how many
//! prefixes stay. When two sequences compute the same page at the same time, both keep theirs and other sequences find
//! one of them. When that one is gone, they find the other one after its sequence publishes again.

use std::collections::HashMap;

use crate::cache::Cache;
use crate::cache::admit::Open;
use crate::cache::record::{Owned, State};
use crate::error::{Error, Kind, Result};
use crate::ids::{HostPage, IndexPage, Sequence};
use crate::sequence::{BlockHashes, Tokens};
use crate::total::{BlockHash, BlockHasher, Inserted, Pages};

/// Whether evicting an unused block would free its pages. A fork may own the pages without using the block, and so may
/// a copy that has not run yet.
fn is_room(host: &Pages, keys: &Pages, pages: (HostPage, IndexPage)) -> bool {
    host.owners(pages.0.0) == 1 && keys.owners(pages.1.0) == 1
}

impl Cache {
    /// Opens a sequence like [`Cache::open`], for a prompt whose token ids are known. The sequence shares the leading
    /// pages that were published before under the same `salt`. Returns the sequence and the number of shared tokens
    /// (whole pages); [`Cache::append`] continues after them. Admission counts only the pages that are not shared.
    ///
    /// `salt` separates sequences whose equal tokens have different rows: tenants, adapters, versions of the weights.
    /// `prompt` has the prompt's ids, or the leading ids that may be shared. Leave out the last id if its row must be
    /// computed again for its logits. Leave out the last page if the rows of a draft layer depend on the next token.
    ///
    /// The caches of several ranks share the same pages only if every rank passes the ids that the rank with the fewest
    /// shared tokens can find. Call [`Cache::find_shared`] on each rank first.
    ///
    /// # Errors
    /// As [`Cache::open`]; [`Kind::OutOfRange`] for more ids than the prompt has tokens, and for a number of keys that
    /// is neither 0 nor the number of full pages. An error takes nothing.
    pub fn open_shared(&mut self, open: &Open, salt: &[u8], prompt: Tokens<'_>) -> Result<(Sequence, u32)> {
        self.open_shared_as(State::Filling, open, salt, prompt)
    }

    /// Opens such a sequence, which begins as `state`: filling, or arriving.
    pub(super) fn open_shared_as(
        &mut self,
        state: State,
        open: &Open,
        salt: &[u8],
        prompt: Tokens<'_>,
    ) -> Result<(Sequence, u32)> {
        let page_tokens = self.geometry.page_tokens();
        prompt.check(page_tokens, open.prompt, "open")?;
        let (index, tokens) = self.admit(state, open)?;
        let pages = self.geometry.pages(self.config.reach(tokens)?);
        let hashes = self.find_hashes(salt, prompt, pages)?;
        let shared = hashes.pages() * page_tokens;
        let admitted = self.admitted(open, tokens)?;
        let (slots, least) = self.first_slots(state, &admitted)?;
        let mut owned = Owned { slots, least, hashes: Some(hashes), ..Owned::default() };
        if let Err(error) = self.take_shared_pages(pages, &mut owned) {
            self.release_all(&owned)?;
            return Err(error);
        }
        self.stats.prompt_tokens += prompt.ids.len() as u64;
        self.stats.shared_tokens += u64::from(shared);
        Ok((self.enter(state, index, admitted, owned, shared), shared))
    }

    /// The number of tokens that [`Cache::open_shared`] would share now. Changes nothing, not even the order of use.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] as in [`Cache::open_shared`].
    pub fn find_shared(&self, salt: &[u8], prompt: Tokens<'_>) -> Result<u32> {
        let page_tokens = self.geometry.page_tokens();
        prompt.check(page_tokens, self.config.max_tokens, "find shared pages")?;
        let pages = self.geometry.pages(prompt.ids.len() as u32);
        Ok(self.find_hashes(salt, prompt, pages)?.pages() * page_tokens)
    }

    /// The block hashes of the leading pages that are in the index, not yet marked as used, with capacity for `pages`.
    fn find_hashes(&self, salt: &[u8], prompt: Tokens<'_>, pages: u32) -> Result<BlockHashes> {
        let mut hashes =
            BlockHashes::new(BlockHasher::new(&self.secret, self.geometry.shape(), salt), pages)?;
        for (ids, key) in prompt.pages(self.geometry.page_tokens()) {
            let block = hashes.next(ids, key);
            if self.prefix.users(&block).is_none() {
                break;
            }
            hashes.blocks.push((block, false));
        }
        Ok(hashes)
    }

    /// Takes `pages` pages: the shared ones from the index, and fresh pages for the rest.
    fn take_shared_pages(&mut self, pages: u32, owned: &mut Owned) -> Result<()> {
        let Owned { hashes, table, .. } = owned;
        let named = hashes.as_mut().map_or(&mut [][..], |hashes| &mut hashes.blocks[..]);
        let fresh = pages - named.len() as u32;
        // The shared pages cannot be evicted to make room for the fresh ones.
        let spared = named.iter().filter(|(block, _)| self.prefix.users(block) == Some(0));
        let spared = spared.filter_map(|(block, _)| self.prefix.pages(block));
        let spared = spared.filter(|pages| is_room(&self.total.pages, &self.index.pages, *pages)).count();
        self.check_room(fresh, spared as u32)?;
        for (block, used) in named {
            let pages = self.prefix.share(block)?;
            let (host, keys) =
                pages.ok_or_else(|| Error::new(Kind::Internal, "open").at("a missing block"))?;
            *used = true;
            self.total.pages.share(host.0)?;
            self.index.pages.share(keys.0)?;
            table.host.push(host.0);
            table.index.push(keys.0);
        }
        self.take_pages(fresh, table)
    }

    /// Publishes the full pages after the first `from` tokens whose rows are accepted and stored. `from` is the number
    /// of tokens in the pages that are published already. `next` has the known token ids of the sequence from there
    /// on. Returns the number of tokens in the sequence's published pages. Call it again when more steps have been
    /// retired, and at the end, before [`Cache::close`]. The engine must have written the index keys of these tokens
    /// before the sequence joined (in stream order), or in its steps.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not running, or was not opened with
    /// [`Cache::open_shared`]; [`Kind::Busy`] while work that the host issued for the sequence is in flight;
    /// [`Kind::DeviceFailed`] if that work failed; [`Kind::OutOfRange`] if `from` is not
    /// [`Length::published`](Cache::length), for more ids than were admitted, and for a number of keys that is neither
    /// 0 nor the number of full pages.
    pub fn publish(&mut self, sequence: Sequence, from: u32, next: Tokens<'_>) -> Result<u32> {
        let page_tokens = self.geometry.page_tokens();
        let record = self.record(sequence)?;
        record.check_state(&[State::Running], "publish")?;
        record.check_ticket("publish")?;
        let Some(hashes) = &record.owned.hashes else {
            return Err(Error::new(Kind::InvalidState, "publish")
                .at("the sequence was opened without token ids")
                .hint("open it with open_shared, without ids if none are known yet"));
        };
        let published = hashes.pages() * page_tokens;
        if from != published {
            return Err(Error::new(Kind::OutOfRange, "publish")
                .at("`from` is not the number of published tokens")
                .with("from", from)
                .with("published", published)
                .hint("begin after the published tokens: a truncate may have reduced their number"));
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

    /// Puts the sequence's own page into the index where the equal page of another sequence has been evicted, so that
    /// the blocks after it can still be found.
    fn find_twins(&mut self, sequence: Sequence) -> Result<()> {
        let pages = self.record(sequence)?.owned.hashes.as_ref().map_or(0, BlockHashes::pages) as usize;
        for page in 0..pages {
            let record = self.record(sequence)?;
            let named = record.owned.hashes.as_ref().and_then(|hashes| hashes.blocks.get(page));
            let Some(((block, false), own)) = named.copied().zip(record.owned.table.get(page)) else {
                continue;
            };
            if self.prefix.users(&block).is_none() && self.insert(&block, own)? {
                let hashes = self.record_mut(sequence)?.owned.hashes.as_mut();
                hashes
                    .and_then(|hashes| hashes.blocks.get_mut(page))
                    .into_iter()
                    .for_each(|named| named.1 = true);
            }
        }
        Ok(())
    }

    /// Publishes one more page.
    fn publish_page(&mut self, sequence: Sequence, ids: &[u32], key: Option<&[u8; 16]>) -> Result<()> {
        let record = self.record(sequence)?;
        let next =
            record.owned.hashes.as_ref().and_then(|hashes| {
                Some((hashes.next(ids, key), record.owned.table.get(hashes.blocks.len())?))
            });
        let (block, pages) = next.ok_or_else(|| Error::new(Kind::Internal, "publish").at("no such page"))?;
        let used = self.insert(&block, pages)?;
        if let Some(hashes) = &mut self.record_mut(sequence)?.owned.hashes {
            hashes.blocks.push((block, used));
        }
        Ok(())
    }

    /// Puts a block with a sequence's own pages into the index. Returns whether the sequence uses the block now; if
    /// not, the index has the block with other pages. A page has one block hash: if a fork has another hash for a page,
    /// the page is not inserted again. So the index, which has an entry for each page, always has room.
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

    /// Whether the index has these pages. It searches only if the pages have other owners, as those of a fork do.
    fn is_named(&self, pages: (HostPage, IndexPage)) -> bool {
        self.total.pages.owners(pages.0.0) > 1 && self.prefix.iter().any(|(_, named, _)| named == pages)
    }

    /// The block hashes of a fork's first `shared` pages, with capacity for `pages`.
    pub(super) fn fork_hashes(
        &self,
        parent: Sequence,
        pages: u32,
        shared: usize,
    ) -> Result<Option<BlockHashes>> {
        let Some(hashes) = &self.record(parent)?.owned.hashes else { return Ok(None) };
        let mut own = BlockHashes::new(hashes.hasher, pages)?;
        own.blocks.extend(hashes.blocks.iter().take(shared));
        Ok(Some(own))
    }

    /// Forgets the block hashes of a sequence's pages from `first` on. `replaced` lists the pages that the sequence has
    /// replaced. A block that the sequence used alone and whose page it keeps leaves the index; other blocks keep their
    /// pages.
    pub(super) fn unname(&mut self, sequence: Sequence, first: usize, replaced: &[usize]) -> Result<()> {
        let Some(mut hashes) = self.record_mut(sequence)?.owned.hashes.take() else { return Ok(()) };
        for (page, block) in hashes.used_from(first) {
            if self.prefix.users(&block) != Some(1) || replaced.contains(&page) {
                self.prefix.release(&block)?;
            } else if let Some((host, keys)) = self.prefix.remove(&block) {
                self.release_pair(host, keys)?;
            }
        }
        hashes.blocks.truncate(first);
        self.record_mut(sequence)?.owned.hashes = Some(hashes);
        Ok(())
    }

    /// For each page of a sequence, whether the index owns it for this sequence alone.
    pub(super) fn uses_alone(&self, owned: &Owned) -> Vec<bool> {
        let mut alone = vec![false; owned.table.len()];
        for (page, block) in owned.hashes.iter().flat_map(|hashes| hashes.used_from(0)) {
            alone[page] = self.prefix.users(&block) == Some(1);
        }
        alone
    }

    fn release_pair(&mut self, host: HostPage, keys: IndexPage) -> Result<()> {
        self.total.pages.release(host.0)?;
        self.index.pages.release(keys.0)
    }

    /// Checks that `count` pages of rows and of index keys are free, or can be freed without evicting `spared` of the
    /// unused pages.
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

    /// Evicts unused pages until `count` pages of rows and of index keys are free.
    pub(super) fn make_room(&mut self, count: u32) -> Result<()> {
        while self.total.pages.free().min(self.index.pages.free()) < count && self.evict_one()? {}
        Ok(())
    }

    /// Evicts the least recently used block whose pages become free. Returns whether there was one.
    fn evict_one(&mut self) -> Result<bool> {
        let room = |pages| is_room(&self.total.pages, &self.index.pages, pages);
        let Some((host, keys)) = self.prefix.evict(room) else { return Ok(false) };
        self.release_pair(host, keys)?;
        self.stats.evicted_pages += 1;
        Ok(true)
    }

    /// Adds the index to the counts of page owners. Checks that the users of each block are the sequences that list it
    /// and have its pages.
    pub(super) fn count_shared(&self, host: &mut [u32], keys: &mut [u32]) -> Result<()> {
        let wrong = |place| Err(Error::new(Kind::Internal, "validate pages").at(place));
        let mut users: HashMap<BlockHash, u32> = HashMap::new();
        for record in &self.records {
            for (page, block) in record.owned.hashes.iter().flat_map(|hashes| hashes.used_from(0)) {
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
