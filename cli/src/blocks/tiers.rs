//! Replays request traces through a prefix cache of two tiers, device pages and host pages, over the library's own
//! directory ([`Directory`]).
//!
//! A request's hits are its leading run of blocks that are in a tier when it arrives (*prefix rule*). A block on the
//! device counts there, also if it is on the host too. Requests are served one after the other, in four passes over
//! their blocks:
//!
//! 1. Every block that is in a tier is used, first to last: on the device it gets a user; a block on the host alone is
//!    pinned there.
//! 2. Every other block gets a device page, first to last. A block of the run comes back from the host; the rest are
//!    computed. If no page is free, the least recently used block of the others goes; with [`Save::Evicted`] it is
//!    saved first, if the host does not have it.
//! 3. With [`Save::Published`] every new block is saved, first to last. On the host too the least recently used block
//!    goes.
//! 4. The blocks are released, last to first, so that a prefix outlives its continuations.
//!
//! So all blocks of a request are on the device at once, as a model with full attention needs them, and a device tier
//! with fewer pages cannot serve it ([`least_device_blocks`]). Generated tokens are in no block of a trace, and take no
//! page. The copies of a request are done before the next one arrives.

use forebay::total::{BlockHash, BlockHasher, DevicePage, Directory, Secret};
use forebay::trace::requests::RequestTrace;
use forebay::{Error, HostPage, Kind, Result};

use crate::study::reserve;

/// When a block is saved to the host tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Save {
    /// When it is published, in the background (write-through): an eviction copies nothing.
    #[default]
    Published,
    /// When its device page goes to another block (write-back).
    Evicted,
}

impl Save {
    /// Its name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Save::Published => "published",
            Save::Evicted => "evicted",
        }
    }
}

/// The tiers of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Blocks that the device holds.
    pub device: u32,
    /// Blocks that the host holds; 0 for a device alone.
    pub host: u32,
    pub save: Save,
}

/// Blocks, and the tokens in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub blocks: u64,
    /// 0 if the lengths of blocks are unknown.
    pub tokens: u64,
}

impl Amount {
    /// Adds a block.
    fn add(&mut self, tokens: u64) {
        self.blocks += 1;
        self.tokens += tokens;
    }
}

/// One tier's part in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tier {
    /// Its blocks in the leading run; tokens of the prompt.
    pub hits: Amount,
    /// Blocks that lost their page of this tier.
    pub evicted_blocks: u64,
}

/// What happened for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    pub device: Tier,
    pub host: Tier,
    /// Blocks copied from the host to the device; tokens of whole blocks.
    pub up: Amount,
    /// Blocks copied from the device to the host; tokens of whole blocks.
    pub down: Amount,
}

/// Where a block was when its request arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Device,
    Host,
    Nowhere,
}

/// The request with the most distinct blocks, from 0, and their number: the fewest device blocks that serve the trace.
///
/// # Errors
/// [`Kind::OutOfMemory`].
pub fn least_device_blocks(trace: &RequestTrace) -> Result<(usize, u32)> {
    // By block: the last request that had it, plus 1. Ids that name prefixes do not repeat inside a request.
    let repeats = trace.block_tokens().is_none();
    let mut last = reserve::filled(if repeats { trace.distinct() as usize } else { 0 }, 0_usize)?;
    let (mut request, mut most) = (0, 0);
    for i in 0..trace.requests() {
        let blocks = trace.blocks(i);
        let distinct = match repeats {
            true => {
                blocks.iter().filter(|b| std::mem::replace(&mut last[**b as usize], i + 1) != i + 1).count()
            }
            false => blocks.len(),
        };
        if distinct > most {
            (request, most) = (i, distinct);
        }
    }
    Ok((request, u32::try_from(most).unwrap_or(u32::MAX)))
}

/// The most bytes that [`replay`] holds in addition to the trace.
pub fn bytes(trace: &RequestTrace, tiers: Tiers) -> u64 {
    let Tiers { device, host, .. } = fitted(trace, tiers);
    let [device, host, distinct] = [device, host, trace.distinct()].map(u64::from);
    (device + host) * (Directory::ENTRY_BYTES + 4) + 4 * device + 40 * distinct
}

/// Tiers of at most the trace's blocks: larger ones would never fill.
fn fitted(trace: &RequestTrace, tiers: Tiers) -> Tiers {
    let most = trace.distinct().max(1);
    Tiers { device: tiers.device.min(most), host: tiers.host.min(most), ..tiers }
}

/// Replays all requests, and calls `each` after each one with its number from 0.
///
/// # Errors
/// [`Kind::OutOfMemory`]; [`Kind::Exhausted`] below [`least_device_blocks`]; [`Kind::OutOfRange`] for more blocks than
/// a directory takes.
pub fn replay(trace: &RequestTrace, tiers: Tiers, mut each: impl FnMut(usize, &Served)) -> Result<()> {
    let mut cache = Cache::new(trace, fitted(trace, tiers))?;
    for i in 0..trace.requests() {
        let served = cache.serve(trace.blocks(i), trace.input_tokens(i))?;
        each(i, &served);
    }
    Ok(())
}

/// The cache during a replay.
struct Cache<'a> {
    trace: &'a RequestTrace,
    save: Save,
    directory: Directory,
    /// By block.
    hashes: Vec<BlockHash>,
    free_device: Vec<u32>,
    free_host: Vec<u32>,
    /// By device page: the block that has it.
    on_page: Vec<u32>,
    /// By place in the request that is served.
    found: Vec<Found>,
}

impl<'a> Cache<'a> {
    fn new(trace: &'a RequestTrace, tiers: Tiers) -> Result<Cache<'a>> {
        // A block's id stands for its tokens and all tokens before them.
        let hasher = BlockHasher::of(&Secret([0; 32]), &[], &[]);
        let mut hashes = reserve::vector(trace.distinct() as usize)?;
        hashes.extend((0..trace.distinct()).map(|block| hasher.block(None, None, &[block])));
        let pages = |count: u32| -> Result<Vec<u32>> {
            let mut pages = reserve::vector(count as usize)?;
            pages.extend((0..count).rev());
            Ok(pages)
        };
        Ok(Cache {
            trace,
            save: tiers.save,
            directory: Directory::new(tiers.device, tiers.host)?,
            hashes,
            free_device: pages(tiers.device)?,
            free_host: pages(tiers.host)?,
            on_page: reserve::filled(tiers.device as usize, 0)?,
            found: Vec::new(),
        })
    }

    fn serve(&mut self, blocks: &[u32], input_tokens: u64) -> Result<Served> {
        let mut served = Served::default();
        self.found.clear();
        reserve::grow(&mut self.found, blocks.len())?;
        for block in blocks {
            let hash = &self.hashes[*block as usize];
            self.found.push(if self.directory.share(hash)?.is_some() {
                Found::Device
            } else if self.directory.pin(hash)?.is_some() {
                Found::Host
            } else {
                Found::Nowhere
            });
        }
        let run = self.found.iter().take_while(|found| **found != Found::Nowhere).count();
        let mut left = input_tokens;
        for (block, found) in blocks[..run].iter().zip(&self.found) {
            // The prompt may end in the last block.
            let tokens = self.trace.tokens_of_block(*block).min(left);
            left -= tokens;
            let tier = if *found == Found::Device { &mut served.device } else { &mut served.host };
            tier.hits.add(tokens);
        }
        for (place, block) in blocks.iter().enumerate() {
            self.admit(*block, self.found[place], place < run, &mut served)?;
        }
        if self.save == Save::Published {
            self.save_new(&mut served)?;
        }
        blocks.iter().rev().try_for_each(|block| self.directory.release(&self.hashes[*block as usize]))?;
        Ok(served)
    }

    /// Gives a block a device page if it has none.
    fn admit(&mut self, block: u32, found: Found, in_run: bool, served: &mut Served) -> Result<()> {
        if found == Found::Device {
            return Ok(());
        }
        let hash = self.hashes[block as usize];
        // A piece that a request repeats has a page from its first place.
        if self.directory.share(&hash)?.is_none() {
            let page = self.device_page(served)?;
            self.directory.insert(&hash, DevicePage(page))?;
            self.on_page[page as usize] = block;
            if found == Found::Host && in_run {
                served.up.add(self.trace.tokens_of_block(block));
            }
        }
        if found == Found::Host {
            self.directory.unpin(&hash)?;
        }
        Ok(())
    }

    /// A free device page, if need be that of the least recently used block without users.
    fn device_page(&mut self, served: &mut Served) -> Result<u32> {
        if let Some(page) = self.free_device.pop() {
            return Ok(page);
        }
        let victim = self.directory.victim().filter(|victim| self.save == Save::Evicted && !victim.saved);
        if let Some(victim) = victim
            && let Some(page) = self.host_page(served)
        {
            self.directory.save(&victim.block, HostPage(page))?;
            served.down.add(self.trace.tokens_of_block(self.on_page[victim.page.index()]));
        }
        let victim = self.directory.evict_device().ok_or_else(|| {
            Error::new(Kind::Exhausted, "replay").at("device blocks: the request's own fill the tier")
        })?;
        served.device.evicted_blocks += 1;
        Ok(victim.page.0)
    }

    /// A free host page, if need be that of the least recently used block without pins. None if there is none.
    fn host_page(&mut self, served: &mut Served) -> Option<u32> {
        self.free_host.pop().or_else(|| {
            let (_, page) = self.directory.evict_host()?;
            served.host.evicted_blocks += 1;
            Some(page.0)
        })
    }

    /// Saves every block that was published and is not saved.
    fn save_new(&mut self, served: &mut Served) -> Result<()> {
        loop {
            let next = self.directory.unsaved().next();
            let Some((hash, page)) = next else { return Ok(()) };
            let Some(host) = self.host_page(served) else { return Ok(()) };
            self.directory.save(&hash, HostPage(host))?;
            served.down.add(self.trace.tokens_of_block(self.on_page[page.index()]));
        }
    }
}
