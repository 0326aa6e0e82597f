//! The device pages of one group of layers: their owners, and how many of them are promised.
//!
//! **Full attention.** A sequence takes all its pages when it is opened, so its steps take none. Sequences may share
//! pages: a fork shares full pages, and admission counts only the pages that it takes afresh.
//!
//! **Sliding windows.** A sequence takes a page when a step first writes to it, and gives a page back when no query
//! can read it any more. Admission promises it the pages that it needs; `reserve` computes how many that are, and what
//! prompt chunks need in addition. Sequences that share a page each count it in their own promise, so the pages that
//! they hold together are never more than what was promised, whichever sequence gives a page back first. A page that a
//! copy still reads is promised to the sequence that the copy was made for. So a step finds a free page whenever it
//! needs one.
//!
//! **Published pages.** The directory names the pages that other sequences can find, and owns each of them as one more
//! owner. A page that no sequence uses any more stays until its memory is needed: taking a page evicts the one that was
//! used longest ago. So such pages count as free.
//!
//! **The host's tier** has whole pages in pinned memory, `[pages][planes][bytes]`: a page is one piece there. `moves`
//! has the copies and their order; the pool remembers for each page the last copy that touched it.
//!
//! **The null page.** Page 0 belongs to the pool for good. Its bytes are 0. Entries of a page table that name no page
//! of the sequence name it, as in vLLM's block tables.

use crate::dense::config::{Config, Save};
use crate::dense::line::Moves;
use crate::dense::planes::View;
use crate::device::{Plane, Slice};
use crate::error::{Error, Kind, Result};
use crate::fallible::{filled, vector};
use crate::ids::{DevicePage, HostPage};
use crate::total::{BlockHash, Directory, Inserted, Located, Pages};

/// The page that no sequence owns.
pub(super) const NULL_PAGE: u32 = 0;

/// The names of the pages in errors.
const NAME: &str = "device pages of a group";
const HOST_NAME: &str = "host pages of a group";

/// The numbers of the last copies that touched a page: down and up.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    down: u64,
    up: u64,
}

/// What a sequence needs of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    /// The pages that it is charged: all that it may hold in steps that decode ([`Config::reserve`]).
    pub(super) reserve: u32,
    /// The pages that its tokens and its rows in flight fill.
    pub(super) whole: u32,
}

impl Need {
    /// A page that a copy reads.
    pub(super) const COPIED: Need = Need { reserve: 1, whole: 1 };

    /// What it and `other` need together.
    pub(super) const fn and(self, other: Need) -> Need {
        Need {
            reserve: self.reserve.saturating_add(other.reserve),
            whole: self.whole.saturating_add(other.whole),
        }
    }

    /// What it needs more than `other`, which needs no more.
    pub(super) const fn beyond(self, other: Need) -> Need {
        Need {
            reserve: self.reserve.saturating_sub(other.reserve),
            whole: self.whole.saturating_sub(other.whole),
        }
    }
}

/// The sum of all needs that were promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Promised {
    reserve: u64,
    whole: u64,
}

impl Promised {
    pub(super) fn add(&mut self, need: Need) {
        self.reserve = self.reserve.saturating_add(need.reserve.into());
        self.whole = self.whole.saturating_add(need.whole.into());
    }

    fn remove(&mut self, need: Need) {
        self.reserve = self.reserve.saturating_sub(need.reserve.into());
        self.whole = self.whole.saturating_sub(need.whole.into());
    }
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Pool {
    group: usize,
    pages: Pages,
    /// The device memory of every page, piece by piece, as source and as target of copies on the device.
    planes: Vec<(Plane, Plane)>,
    /// With a sliding window what its sequences were promised.
    promised: Option<Promised>,
    /// Pages that the directory alone owns: evicting one frees it.
    idle: u32,
    directory: Directory,
    /// For each device page whether the directory names it.
    named: Vec<bool>,
    /// How many blocks have lost their device page so far.
    lost: u64,
    touched: Vec<Touched>,
    host: Host,
}

/// A layer, and for each of its runs where its rows are in the host pages and in the device pages.
type OfLayer = (u32, Vec<(Plane, Plane)>);

/// The host's pages of a group; none without a host's tier.
#[derive(Debug)]
struct Host {
    pages: Pages,
    down: Vec<(Plane, Plane)>,
    /// By part.
    up: Vec<Vec<(Plane, Plane)>>,
    /// Of each layer of the group.
    layers: Vec<OfLayer>,
    touched: Vec<Touched>,
    save: Save,
}

impl Pool {
    /// The pool of a group, for at least one page. `host` is the memory of the group's host pages.
    pub(super) fn new(
        config: &Config,
        group: usize,
        planes: Vec<Plane>,
        host: Option<Slice>,
    ) -> Result<Pool> {
        let count = config.device_pages.get(group).copied().unwrap_or(1);
        let mut pages = Pages::new(NAME, count)?;
        pages.allocate(1, &mut Vec::with_capacity(1))?;
        let slides = config.slides(group);
        let host = Host::new(config, group, &planes, host)?;
        Ok(Pool {
            group,
            pages,
            planes: planes.into_iter().map(|plane| (plane, plane)).collect(),
            promised: slides.then(Promised::default),
            idle: 0,
            directory: Directory::new(count, host.pages.count())?,
            named: filled(count as usize, false, "cache", NAME)?,
            lost: 0,
            touched: filled(count as usize, Touched::default(), "cache", NAME)?,
            host,
        })
    }

    /// The planes, as source and target of a copy on the device.
    pub(super) fn planes(&self) -> &[(Plane, Plane)] {
        &self.planes
    }

    /// The planes of copies to the host.
    pub(super) fn down(&self) -> &[(Plane, Plane)] {
        &self.host.down
    }

    /// The planes of a part of copies from the host: see [`Config::bring_layers`].
    pub(super) fn up(&self, part: usize) -> &[(Plane, Plane)] {
        self.host.up.get(part).map_or(&[], Vec::as_slice)
    }

    /// The planes of one layer of copies from the host; none for another group's layer.
    pub(super) fn of_layer(&self, layer: u32) -> &[(Plane, Plane)] {
        let found = self.host.layers.iter().find(|(own, _)| *own == layer);
        found.map_or(&[], |(_, planes)| planes.as_slice())
    }

    /// Bytes of a page.
    pub(super) fn page_bytes(&self) -> u64 {
        self.planes.iter().map(|(plane, _)| plane.bytes).sum()
    }

    /// All pages, the null page included.
    pub(super) fn count(&self) -> u32 {
        self.pages.count()
    }

    /// The pages that a new sequence may still take, or be promised.
    pub(super) fn free(&self, config: &Config) -> u32 {
        match self.promised {
            Some(Promised { reserve, whole }) => {
                let all = u64::from(self.pages.count().saturating_sub(1));
                let free = all.saturating_sub(config.demand(self.group, reserve, whole));
                // At most the number of pages.
                free as u32
            }
            // Evicting a page that a copy reads frees nothing.
            None => self.pages.free().saturating_add(self.idle),
        }
    }

    /// Checks that a sequence can have what it needs: `fresh` pages now where attention is full, or a promise.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with the group, `wanted` and `free`.
    pub(super) fn check(&self, config: &Config, need: Need, fresh: u32) -> Result<()> {
        let free = self.free(config);
        let wanted = match self.promised {
            None => u64::from(fresh),
            Some(mut promised) => {
                let before = config.demand(self.group, promised.reserve, promised.whole);
                promised.add(need);
                config.demand(self.group, promised.reserve, promised.whole).saturating_sub(before)
            }
        };
        self.suffices(wanted, free)
    }

    fn suffices(&self, wanted: u64, free: u32) -> Result<()> {
        match wanted <= u64::from(free) {
            true => Ok(()),
            false => {
                let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
                Err(self.pages.exhausted(wanted, free).with("group", self.group as u64))
            }
        }
    }

    /// Checks that a sequence could have what it needs, if it were alone.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with the group, `wanted` and `free`.
    pub(super) fn check_alone(&self, config: &Config, need: Need) -> Result<()> {
        let all = self.pages.count().saturating_sub(1);
        let wanted = match self.promised {
            None => need.whole.into(),
            Some(_) => config.demand(self.group, need.reserve.into(), need.whole.into()),
        };
        self.suffices(wanted, all)
    }

    /// Promises what [`Pool::check`] found. A pool without a window promises nothing.
    pub(super) fn promise(&mut self, need: Need) {
        if let Some(promised) = &mut self.promised {
            promised.add(need);
        }
    }

    /// Takes back a promise.
    pub(super) fn forgo(&mut self, need: Need) {
        if let Some(promised) = &mut self.promised {
            promised.remove(need);
        }
    }

    /// Takes `count` pages and appends them to `pages`, and evicts published pages that no sequence uses, if needed.
    /// Returns the number of the last copy down that touched one of the pages.
    ///
    /// # Errors
    /// [`Kind::Exhausted`]; never for pages that were checked or promised.
    pub(super) fn take(&mut self, count: u32, pages: &mut Vec<u32>, moves: &mut Moves) -> Result<u64> {
        while self.pages.free() < count && self.evict(moves)? {}
        let before = pages.len();
        self.pages.allocate(count, pages)?;
        Ok(pages[before..].iter().map(|page| self.touched[*page as usize].down).max().unwrap_or(0))
    }

    /// Evicts the published page that was used longest ago. Returns whether there was one.
    fn evict(&mut self, moves: &mut Moves) -> Result<bool> {
        let Some(victim) = self.directory.victim() else { return Ok(false) };
        if self.host.save == Save::Evicted && !victim.saved {
            self.save(&victim.block, victim.page, moves)?;
        }
        self.directory.evict_device();
        self.lost += 1;
        self.idle -= u32::from(self.is_idle(victim.page.0));
        self.named[victim.page.index()] = false;
        self.pages.release(victim.page.0)?;
        Ok(true)
    }

    /// Gives a block a host page, and notes the copy. It evicts the host page that was used longest ago, if needed.
    /// Returns whether there was a page.
    fn save(&mut self, block: &BlockHash, page: DevicePage, moves: &mut Moves) -> Result<bool> {
        let Some(host) = self.move_out(page.0, moves)? else { return Ok(false) };
        self.directory.save(block, HostPage(host))?;
        Ok(true)
    }

    /// Takes a host page and notes the copy of a device page to it. It evicts the host page that was used longest ago,
    /// if needed.
    pub(super) fn move_out(&mut self, page: u32, moves: &mut Moves) -> Result<Option<u32>> {
        let Some(host) = self.take_host(moves)? else { return Ok(None) };
        moves.note(self.group, page, host);
        let number = moves.down.next();
        (self.host.touched[host as usize].down, self.touched[page as usize].down) = (number, number);
        Ok(Some(host))
    }

    /// Takes a host page. It evicts the one that was used longest ago, if needed.
    pub(super) fn take_host(&mut self, moves: &mut Moves) -> Result<Option<u32>> {
        if self.host.pages.free() == 0 {
            let Some((_, host)) = self.directory.evict_host() else { return Ok(None) };
            self.give_host_back(host.0, moves)?;
        }
        Ok(self.host.pages.take())
    }

    /// The last copies that touched a host page: down and up.
    pub(super) fn host_touched(&self, host: u32) -> (u64, u64) {
        let Touched { down, up } = self.host.touched[host as usize];
        (down, up)
    }

    /// Gives back a host page, and forgets a copy to it that is noted.
    pub(super) fn give_host_back(&mut self, host: u32, moves: &mut Moves) -> Result<()> {
        if self.host.touched[host as usize].down == moves.down.next() {
            moves.forget(self.group, host);
        }
        self.host.pages.release(host)
    }

    /// Saves a block that has no host page, and keeps that page.
    pub(super) fn save_kept(
        &mut self,
        block: &BlockHash,
        page: u32,
        moves: &mut Moves,
    ) -> Result<Option<u32>> {
        match self.save(block, DevicePage(page), moves)? {
            true => self.pin(block),
            false => Ok(None),
        }
    }

    /// Checks that the host has `wanted` pages, if `kept` of the blocks that can be evicted are not.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with the group, `wanted` and `free`.
    pub(super) fn check_host(&self, wanted: u32, kept: u32) -> Result<()> {
        let free = self.host.pages.free() + self.directory.evictable().saturating_sub(kept);
        match wanted <= free {
            true => Ok(()),
            false => Err(self.host.pages.exhausted(wanted, free).with("group", self.group as u64)),
        }
    }

    /// Gives a host page to the oldest published block that has none, and notes its copy, if a page is at most `bytes`
    /// bytes. Returns the bytes.
    pub(super) fn save_oldest(&mut self, bytes: u64, moves: &mut Moves) -> Result<u64> {
        let page_bytes = self.page_bytes();
        let next = self.directory.unsaved().next().filter(|_| page_bytes <= bytes);
        let Some((block, page)) = next else { return Ok(0) };
        Ok(if self.save(&block, page, moves)? { page_bytes } else { 0 })
    }

    /// The last copy up that touched a device page or a host page.
    pub(super) fn ups(&self, page: u32, host: u32) -> u64 {
        self.touched[page as usize].up.max(self.host.touched[host as usize].up)
    }

    /// The last copy down that touched a device page or a host page.
    pub(super) fn downs(&self, page: u32, host: u32) -> u64 {
        self.touched[page as usize].down.max(self.host.touched[host as usize].down)
    }

    /// The last copy down that touched a device page.
    pub(super) fn drained(&self, page: u32) -> u64 {
        self.touched.get(page as usize).map_or(0, |touched| touched.down)
    }

    /// The last copy up that touched a device page.
    pub(super) fn filled(&self, page: u32) -> u64 {
        self.touched[page as usize].up
    }

    /// Notes that who takes a device page waits for batch `number` of the copies down.
    pub(super) fn note_down(&mut self, page: u32, number: u64) {
        self.touched[page as usize].down = number;
    }

    /// Notes the number of a copy up.
    pub(super) fn note_up(&mut self, page: u32, host: u32, number: u64) {
        (self.touched[page as usize].up, self.host.touched[host as usize].up) = (number, number);
    }

    pub(super) fn find(&self, block: &BlockHash) -> Option<Located> {
        self.directory.find(block)
    }

    /// Shares a block that is on the device: its page gets one more owner.
    pub(super) fn use_block(&mut self, block: &BlockHash) -> Result<Option<u32>> {
        let Some(page) = self.directory.share(block)? else { return Ok(None) };
        self.share(page.0)?;
        Ok(Some(page.0))
    }

    /// Adds a user to a block whose page the user has already.
    pub(super) fn join_block(&mut self, block: &BlockHash) -> Result<()> {
        self.directory.share(block).map(drop)
    }

    /// Ends a sequence's use of a block. The sequence gives its page back itself.
    pub(super) fn leave_block(&mut self, block: &BlockHash) -> Result<()> {
        self.directory.release(block)
    }

    /// Names a sequence's own page: a published one, or one that comes back. Returns whether the sequence uses the
    /// block now; if not, the directory has the block with another page, or names the page by another block.
    pub(super) fn publish(&mut self, block: &BlockHash, page: u32) -> Result<bool> {
        if self.named[page as usize] && self.directory.find(block).is_none_or(|found| found.device.is_none())
        {
            return Ok(false);
        }
        let inserted = self.directory.insert(block, DevicePage(page))?;
        if inserted == Inserted::New {
            self.pages.share(page)?;
            self.named[page as usize] = true;
        }
        Ok(inserted != Inserted::Twin)
    }

    /// Ends a sequence's use of a block whose rows it is about to change. If it is the only user and keeps the page,
    /// the block's device page is forgotten; a copy on the host stays.
    pub(super) fn unname(&mut self, block: &BlockHash, page: u32) -> Result<()> {
        let alone = self.uses_alone(block, page);
        self.directory.release(block)?;
        if alone && self.directory.forget_device(block).is_some() {
            self.named[page as usize] = false;
            self.lost += 1;
            self.pages.release(page)?;
        }
        Ok(())
    }

    /// How many blocks have lost their device page so far. While this is the same, no twin of a page can be named.
    pub(super) const fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether the directory names `page` by a block that one sequence alone uses.
    pub(super) fn uses_alone(&self, block: &BlockHash, page: u32) -> bool {
        let found = self.directory.find(block);
        found.is_some_and(|found| found.users == 1 && found.device == Some(DevicePage(page)))
    }

    /// Keeps a block's host page, and returns it.
    pub(super) fn pin(&mut self, block: &BlockHash) -> Result<Option<u32>> {
        Ok(self.directory.pin(block)?.map(|page| page.0))
    }

    pub(super) fn unpin(&mut self, block: &BlockHash) -> Result<()> {
        self.directory.unpin(block)
    }

    /// What the tiers hold.
    pub(super) fn tiers(&self) -> TierStats {
        TierStats {
            published: self.directory.on_device(),
            unused: self.directory.unused(),
            saved: self.directory.on_host(),
            free_host_pages: self.host.pages.free(),
            parked: self.host.pages.count() - self.host.pages.free() - self.directory.on_host(),
        }
    }

    /// Keeps a page for a copy that reads it, or for a writer from afar.
    pub(super) fn keep(&mut self, page: u32) -> Result<()> {
        self.share(page)?;
        self.promise(Need::COPIED);
        Ok(())
    }

    /// Gives back a page that a copy has read, or that no writer reaches any more.
    pub(super) fn let_go(&mut self, page: u32) -> Result<()> {
        self.forgo(Need::COPIED);
        self.release(page)
    }

    pub(super) fn owners(&self, page: u32) -> u32 {
        self.pages.owners(page)
    }

    /// Whether the directory alone owns a page.
    pub(super) fn is_idle(&self, page: u32) -> bool {
        self.named.get(page as usize).is_some_and(|named| *named) && self.pages.owners(page) == 1
    }

    pub(super) fn share(&mut self, page: u32) -> Result<()> {
        let idle = self.is_idle(page);
        self.pages.share(page)?;
        self.idle -= u32::from(idle);
        Ok(())
    }

    pub(super) fn release(&mut self, page: u32) -> Result<()> {
        self.pages.release(page)?;
        self.idle += u32::from(self.is_idle(page));
        Ok(())
    }

    /// Checks the owners of every page against `owners`, which the sequences' pages were counted in, what was
    /// promised, and that sequences and aborts have `own_pages` host pages for themselves.
    ///
    /// # Errors
    /// [`Kind::Internal`].
    pub(super) fn validate(&self, owners: &[u32], promised: Promised, own_pages: u32) -> Result<()> {
        self.pages.validate()?;
        self.host.pages.validate()?;
        self.directory.validate()?;
        let wrong = |rule: &'static str| {
            Err(Error::new(Kind::Internal, "validate").at(rule).with("group", self.group as u64))
        };
        if self.promised.is_some_and(|own| own != promised) {
            return wrong("the sum of promised pages");
        }
        let named = |page: u32| u32::from(self.named.get(page as usize).copied().unwrap_or(false));
        let counted = |(page, owners): (u32, &u32)| self.pages.owners(page) == *owners + named(page);
        let blocks = self.named.iter().filter(|named| **named).count() as u32;
        let host = self.host.pages.count() - self.host.pages.free();
        let idle = (0..self.pages.count()).filter(|page| self.is_idle(*page)).count() as u32;
        if idle != self.idle {
            return wrong("the pages that the directory alone owns");
        }
        if (blocks, host) != (self.directory.on_device(), self.directory.on_host() + own_pages) {
            return wrong("the pages that the directory names");
        }
        match (0..).zip(owners).all(counted) {
            true => Ok(()),
            false => wrong("owners of a page"),
        }
    }
}

impl Host {
    /// The host pages of a group in `memory`, page by page.
    fn new(config: &Config, group: usize, planes: &[Plane], memory: Option<Slice>) -> Result<Host> {
        let count = config.host_pages.get(group).copied().unwrap_or(0);
        let stride: u64 = planes.iter().map(|plane| plane.bytes).sum();
        let mut down = vector(planes.len(), "cache", "planes")?;
        let mut up = vec![Vec::new(); config.parts() as usize];
        for (plane, shape) in planes.iter().zip(config.planes(group)) {
            if let Some(memory) = memory {
                // Its last page ends with the memory, whatever piece of it the plane has.
                let own = memory.part(shape.offset, memory.bytes() - shape.offset)?;
                let own = Plane { memory: own, stride, bytes: plane.bytes };
                down.push((*plane, own));
                up[config.part(shape.layer.unwrap_or(0)) as usize].push((own, *plane));
            }
        }
        Ok(Host {
            pages: Pages::new(HOST_NAME, count)?,
            down,
            up,
            layers: layers(config, group, planes, memory)?,
            touched: filled(count as usize, Touched::default(), "cache", HOST_NAME)?,
            save: config.save,
        })
    }
}

/// Of each layer of a group where its rows are in the host pages, and where they are in the device pages.
fn layers(config: &Config, group: usize, planes: &[Plane], memory: Option<Slice>) -> Result<Vec<OfLayer>> {
    let own = config.shape.groups.get(group).map_or(&[][..], |group| group.layers.as_slice());
    let mut layers = vector(own.len(), "cache", "planes")?;
    for layer in own.iter().filter(|_| memory.is_some()) {
        let mut of_layer = vector(2, "cache", "planes")?;
        for run in 0..2 {
            let (Some(to), Some(from)) = (config.view(*layer, run), config.host_view(*layer, run)) else {
                continue;
            };
            let bytes = to.row * u64::from(config.shape.page_tokens);
            let plane = |memory: Slice, view: View| {
                let memory = memory.part(view.offset, memory.bytes() - view.offset)?;
                Ok(Plane { memory, stride: view.stride, bytes })
            };
            if let (Some(memory), Some(target)) = (memory, planes.get(to.plane)) {
                of_layer.push((plane(memory, from)?, plane(target.memory, to)?));
            }
        }
        layers.push((*layer, of_layer));
    }
    Ok(layers)
}

/// What a group's tiers hold, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Gauge: published pages on the device.
    pub published: u32,
    /// Gauge: those of them that no sequence uses. Admission counts them as free.
    pub unused: u32,
    /// Gauge: published pages in the host's tier, whether or not they are on the device too.
    pub saved: u32,
    /// Gauge: free pages of the host's tier.
    pub free_host_pages: u32,
    /// Gauge: pages of the host's tier that sequences have for themselves: those of parked ones that are not published,
    /// those of arriving ones, and those that are withheld after an abort.
    pub parked: u32,
}
