//! Claim: the directory of prefix blocks takes at most 50 ns to give a new block a device page and 50 ns to evict
//! another block, and at most 100 us to look up the 512 blocks of a prompt of 32K tokens.
//!
//! The directory has 12,501 device pages and 50,006 host pages, all with blocks. The blocks' hashes are random, so
//! every look-up begins at a place of its own. "hash" is the time for the block hashes of the same prompt, which a
//! look-up needs first.

#[path = "support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "no side is compared with another")]
#[path = "support/race.rs"]
mod race;

use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::HostPage;
use forebay::total::{BlockHash, BlockHasher, DevicePage, Directory, Secret};
use race::{Side, claim, done, race, record};

const DEVICE: u32 = 12_501;
const HOST: u32 = 50_006;
/// The blocks of a prompt.
const PROMPT: usize = 512;
/// Blocks that come and go in one pass: more than both tiers hold.
const BLOCKS: u32 = 3 * (DEVICE + HOST);

fn hasher() -> BlockHasher {
    BlockHasher::of(&Secret([7; 32]), &[64], b"")
}

/// A directory to which blocks come in turn, and the last of them.
struct Churn {
    directory: Directory,
    next: usize,
}

impl Churn {
    /// A directory whose pages all have a block.
    fn new(blocks: &[BlockHash]) -> Churn {
        let mut directory = done(Directory::new(DEVICE, HOST));
        for (page, block) in (0..HOST).zip(blocks) {
            let free = directory.on_device() < DEVICE;
            let freed = if free { None } else { directory.evict_device() };
            done(directory.insert(block, freed.map_or(DevicePage(page), |victim| victim.page)));
            done(directory.save(block, HostPage(page)));
            done(directory.release(block));
        }
        Churn { directory, next: HOST as usize }
    }

    /// Evicts a block, inserts one in its page, and releases it.
    fn turn(&mut self, blocks: &[BlockHash]) {
        let page = self.directory.evict_device().map_or(DevicePage(0), |victim| victim.page);
        self.next = if self.next + 1 < blocks.len() { self.next + 1 } else { 0 };
        done(self.directory.insert(&blocks[self.next], page));
        done(self.directory.release(&blocks[self.next]));
    }

    /// The same, and the new block is saved to the host page of another one.
    fn turn_of_both(&mut self, blocks: &[BlockHash]) {
        self.turn(blocks);
        if let Some((_, page)) = self.directory.evict_host() {
            done(self.directory.save(&blocks[self.next], page));
        }
    }
}

/// A turn for each block.
fn pass(churn: &mut Churn, blocks: &[BlockHash], turn: fn(&mut Churn, &[BlockHash])) -> (Duration, u64) {
    let lap = Lap::begin();
    for _ in blocks {
        turn(churn, blocks);
    }
    (lap.end(), blocks.len() as u64)
}

fn main() {
    let hasher = hasher();
    let blocks: Vec<BlockHash> = (0..BLOCKS).map(|n| hasher.block(None, None, &[n])).collect();
    let tokens: Vec<u32> = (0..64 * PROMPT as u32).collect();
    let (mut one, mut both) = (Churn::new(&blocks), Churn::new(&blocks));
    let full = Churn::new(&blocks);
    let mut from = 0;
    let mut sides = [
        Side::new("insert and evict", || pass(&mut one, &blocks, Churn::turn)),
        Side::new("insert, save and evict", || pass(&mut both, &blocks, Churn::turn_of_both)),
        Side::new("look up", || {
            from = (from + 7_919 * PROMPT) % (HOST as usize - PROMPT);
            let lap = Lap::begin();
            let found =
                blocks[from..from + PROMPT].iter().filter(|block| full.directory.find(block).is_some());
            assert_eq!(std::hint::black_box(found.count()), PROMPT);
            (lap.end(), 1)
        }),
        Side::new("hash", || {
            let lap = Lap::begin();
            let mut last = None;
            for tokens in tokens.chunks(64) {
                last = Some(hasher.block(last.as_ref(), None, std::hint::black_box(tokens)));
            }
            std::hint::black_box(last);
            (lap.end(), 1)
        }),
    ];
    let mut criterion = Criterion::default().configure_from_args();
    record(&mut criterion, "directory", &mut sides);
    let rounds = race(31, &mut sides);
    for side in ["insert and evict", "insert, save and evict"] {
        println!("{side}: {:.1} ns a block", 1e9 / rounds.rate(side));
    }
    for side in ["look up", "hash"] {
        println!("{side}: {:.1} us for {PROMPT} blocks", 1e6 / rounds.rate(side));
    }
    claim("100 ns against a new block and an eviction", 100e-9 * rounds.rate("insert and evict"), 1.0);
    claim("100 us against looking up 512 blocks", 100e-6 * rounds.rate("look up"), 1.0);
    criterion.final_summary();
}
