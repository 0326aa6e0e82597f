//! Sharing: sequences that follow one of a few scripts of tokens, and a naive index of what they have published. The
//! key of a block is everything before it, written out; the index is a list in order of use.

use super::model::{Origin, State};
use super::run::World;
use forebay::{BringUp, Kind, Open, Tokens};

/// The content that identifies a page: salt, whether keys were supplied, and every token up to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    script: Script,
    ids: Vec<u32>,
}

/// The tokens of a sequence, and its tenant.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    number: u32,
    salt: u8,
    keyed: bool,
}

impl PartialEq for Script {
    /// The number is in the tokens.
    fn eq(&self, other: &Script) -> bool {
        (self.salt, self.keyed) == (other.salt, other.keyed)
    }
}

impl Eq for Script {}

impl Script {
    /// The script of a wish: three beginnings in common with others, often another tenant or keys of the caller's.
    pub fn new(wish: u8) -> Script {
        Script {
            number: u32::from(wish) % 3,
            salt: (wish / 3 % 8).saturating_sub(3),
            keyed: wish / 24 % 4 == 3,
        }
    }

    /// The tokens before `end`. Scripts diverge at 37, in the middle of a page, and at 70.
    fn ids(self, end: u32) -> Vec<u32> {
        let id = |position| match position {
            0..37 => position,
            37..70 => position + 1000 * (self.number / 2),
            _ => position + 1000 * self.number,
        };
        (0..end).map(id).collect()
    }

    fn name(self, end: u32) -> Name {
        Name { script: self, ids: self.ids(end) }
    }
}

/// The key of every page of a keyed script: all collide.
const KEYS: [Option<[u8; 16]>; 64] = [Some([7; 16]); 64];

/// A page that the index holds.
#[derive(Clone, Debug)]
struct Shared {
    name: Name,
    page: usize,
    /// Its rows by layer.
    rows: Vec<Vec<Origin>>,
    users: u32,
}

/// Blocks, least recently used first.
#[derive(Debug, Default)]
pub struct Index(Vec<Shared>);

impl Index {
    fn find(&mut self, name: &Name) -> Option<&mut Shared> {
        self.0.iter_mut().find(|shared| shared.name == *name)
    }

    /// Blocks without a user.
    pub fn unused(&self) -> u32 {
        self.0.iter().filter(|shared| shared.users == 0).count() as u32
    }

    fn release(&mut self, name: &Name) {
        let place = self.0.iter().position(|shared| shared.name == *name).unwrap();
        self.0[place].users -= 1;
        if self.0[place].users == 0 {
            let newest = self.0.remove(place);
            self.0.push(newest);
        }
    }
}

impl World {
    /// Pages that are free on both sides.
    fn free_pages(&self) -> u32 {
        self.config.host_pages.min(self.config.index_pages) - self.pages.taken()
    }

    /// Whether a shared page is unused and has no other owner.
    fn gives(&self, shared: &Shared) -> bool {
        shared.users == 0 && self.pages.owners(shared.page) == 1
    }

    /// Whether `count` pages are available; unused shared pages without another owner count as available.
    pub fn has_room(&self, count: u32) -> bool {
        let giving = self.index.0.iter().filter(|shared| self.gives(shared)).count();
        count <= self.free_pages() + giving as u32
    }

    /// Makes `count` pages free, if they are available.
    pub fn room(&mut self, count: u32) -> bool {
        if !self.has_room(count) {
            return false;
        }
        while self.free_pages() < count {
            let place = self.index.0.iter().position(|shared| self.gives(shared)).unwrap();
            let gone = self.index.0.remove(place);
            self.pages.release(gone.page);
            self.counted.evicted_pages += 1;
            self.note("evict a shared page");
        }
        true
    }

    /// Opens a sequence with its tokens given, appends the part that is not shared, joins.
    pub fn start_shared(&mut self, prompt: u8, promised: u8, budget: u8, wish: u8) {
        let script = Script::new(wish);
        let bring_up = if wish & 1 == 0 { BringUp::Whole } else { BringUp::Nothing };
        let open = Open {
            prompt: u32::from(prompt) % 110,
            promised: u32::from(promised) % 60,
            budget: self.wished(budget),
            bring_up,
        };
        // Sometimes fewer tokens are given than the prompt has, or more, or keys that do not fit.
        let offered = match budget {
            250.. => open.prompt + 1,
            200..250 => open.prompt.saturating_sub(1),
            _ => open.prompt,
        };
        let (ids, page) = (script.ids(offered), self.page_tokens());
        let keys = match script.keyed {
            true => &KEYS[..(offered / page) as usize + usize::from(promised > 240)],
            false => &[][..],
        };
        let names: Vec<Name> = (1..=offered / page).map(|n| script.name(n * page)).collect();
        let run: Vec<Name> = names.into_iter().take_while(|name| self.index.find(name).is_some()).collect();
        // During its admission it uses the pages that it shares: eviction must skip them.
        run.iter().for_each(|name| self.index.find(name).unwrap().users += 1);
        let admitted = match offered > open.prompt || keys.len() > (offered / page) as usize {
            true => Err(Kind::OutOfRange),
            false => self.admit(&open, run.len() as u32, false),
        };
        run.iter().for_each(|name| self.index.find(name).unwrap().users -= 1);
        let before = self.snapshot();
        if admitted.is_ok() {
            let found = self.cache.find_shared(&[script.salt], Tokens { ids: &ids, keys });
            assert_eq!(found, Ok(run.len() as u32 * page));
        }
        let result = self.cache.open_shared(&open, &[script.salt], Tokens { ids: &ids, keys });
        let Some((handle, shared)) = self.expect(before, result, admitted.as_ref().err().copied()) else {
            return;
        };
        assert_eq!(shared, run.len() as u32 * page);
        let (table, count) = admitted.unwrap();
        let mut rows = vec![Vec::new(); self.layers() as usize];
        let mut pages = Vec::new();
        for name in &run {
            let shared = self.index.find(name).unwrap();
            shared.users += 1;
            pages.push(shared.page);
            rows.iter_mut().zip(&shared.rows).for_each(|(all, some)| all.extend(some));
        }
        pages.iter().for_each(|page| self.pages.share(*page));
        pages.extend(self.pages.take(count));
        let seq = self.enter(handle, &open, table, pages);
        (self.seqs[seq].rows, self.seqs[seq].script) = (rows, Some(script));
        self.seqs[seq].names = run.into_iter().map(|name| (name, true)).collect();
        self.counted.prompt_tokens += u64::from(offered);
        self.counted.shared_tokens += u64::from(shared);
        self.note(if shared > 0 { "open with shared pages" } else { "open to be shared" });
        self.fill(seq);
        self.join(seq, 0, 0, 0);
    }

    /// Publishes a sequence's pages, up to `by` tokens after those that are published.
    pub fn publish(&mut self, wish: u8, by: u8) {
        let Some(seq) = self.pick(wish) else { return };
        let page = self.page_tokens();
        let s = &self.seqs[seq];
        let (handle, published, stored) = (s.handle, s.names.len() as u32, s.stored);
        let most = super::model::reach(&self.config, s.admitted) - published * page;
        let known = if by > 250 { most + 1 } else { u32::from(by).min(most) };
        let script = s.script.unwrap_or(Script::new(0));
        let ids = script.ids(published * page + known).split_off((published * page) as usize);
        let keys = if script.keyed { &KEYS[..(known / page) as usize] } else { &[][..] };
        // Sometimes the ids begin elsewhere.
        let from = if by == 250 { published * page + page } else { published * page };
        let expected = match s.state {
            State::Running if s.script.is_none() => Some(Kind::InvalidState),
            State::Running if known > most || by == 250 => Some(Kind::OutOfRange),
            State::Running => None,
            _ => Some(Kind::InvalidState),
        };
        let before = self.snapshot();
        let result = self.cache.publish(handle, from, Tokens { ids: &ids, keys });
        let Some(answer) = self.expect(before, result, expected) else { return };
        let end = ((published * page + known) / page).min(stored / page).max(published);
        assert_eq!(answer, end * page, "published {published} of {stored} stored, {known} more known");
        self.find_twins(seq);
        for n in published..end {
            let s = &self.seqs[seq];
            let (own, name) = (s.pages[n as usize], script.name((n + 1) * page));
            let (what, used) = match self.index.find(&name) {
                Some(shared) if shared.page == own => {
                    shared.users += 1;
                    ("publish a page that is shared", true)
                }
                Some(_) => ("publish a twin", false),
                None => {
                    self.enter_index(seq, n, name.clone());
                    ("publish a page", true)
                }
            };
            let born = (n + 1) * page > self.seqs[seq].prompt;
            self.note(if born && used { "publish a page with decoded rows" } else { what });
            self.seqs[seq].names.push((name, used));
        }
    }

    /// A sequence's own page becomes the one that others find.
    fn enter_index(&mut self, seq: usize, n: u32, name: Name) {
        let (s, page) = (&self.seqs[seq], self.page_tokens() as usize);
        let range = n as usize * page..(n as usize + 1) * page;
        let rows = s.rows.iter().map(|rows| rows[range.clone()].to_vec()).collect();
        let own = s.pages[n as usize];
        self.index.0.push(Shared { name, page: own, rows, users: 1 });
        self.pages.share(own);
        self.counted.published_pages += 1;
    }

    /// Pages whose duplicates are gone take their places.
    fn find_twins(&mut self, seq: usize) {
        for n in 0..self.seqs[seq].names.len() {
            let (name, used) = self.seqs[seq].names[n].clone();
            if !used && self.index.find(&name).is_none() {
                self.enter_index(seq, n as u32, name);
                self.seqs[seq].names[n].1 = true;
                self.note("publish a page whose duplicate is gone");
            }
        }
    }

    /// A fork uses what its parent uses.
    pub fn share_names(&mut self, parent: usize, child: usize, full: u32) {
        let names: Vec<_> = self.seqs[parent].names.iter().take(full as usize).cloned().collect();
        for (name, _) in names.iter().filter(|(_, used)| *used) {
            self.index.find(name).unwrap().users += 1;
            self.note("fork of shared pages");
        }
        (self.seqs[child].names, self.seqs[child].script) = (names, self.seqs[parent].script);
    }

    /// By page of a sequence, whether the index holds it for this sequence alone.
    pub fn held_alone(&mut self, seq: usize, page: usize) -> bool {
        let name = self.seqs[seq].names.get(page).filter(|(_, used)| *used).cloned();
        name.is_some_and(|(name, _)| self.index.find(&name).unwrap().users == 1)
    }

    /// A truncation removes the block hashes of all pages from `first` on; pages that only this sequence uses, and
    /// keeps, leave the index.
    pub fn remove_block_hashes(&mut self, seq: usize, first: usize, replaced: &[usize]) {
        while self.seqs[seq].names.len() > first {
            let page = self.seqs[seq].names.len() - 1;
            let alone = self.held_alone(seq, page) && !replaced.contains(&page);
            let (name, used) = self.seqs[seq].names.pop().unwrap();
            if alone {
                let place = self.index.0.iter().position(|shared| shared.name == name).unwrap();
                let gone = self.index.0.remove(place);
                self.pages.release(gone.page);
                self.note("truncate published pages");
            } else if used {
                self.index.release(&name);
                self.note("truncate shared pages");
            }
        }
    }

    /// A sequence that ends uses no page any more.
    pub fn drop_names(&mut self, seq: usize) {
        for (name, used) in std::mem::take(&mut self.seqs[seq].names).into_iter().rev() {
            if used {
                self.index.release(&name);
            }
        }
    }
}
