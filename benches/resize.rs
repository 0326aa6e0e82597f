//! Claim: a resize of one sequence of 128K tokens in 61 layers, from 13,107 to 9,830 slots, takes at most as long as a
//! memcpy of the rows that it moves, and 50 us.
//!
//! The rows have 656 bytes, and their ages are mixed: 40 selections of 2,048 rows out of 20,000 fill the slots before
//! each pass, so the tables and the slabs are colder than they are in a server. The other side is the bare loop: the
//! same rows between the same slots of other slabs, in the same order, by `copy_within`.
//!
//! There is no pass of criterion's own: the slots are filled again before each pass, which takes a hundred times as
//! long as the resize.

#[path = "support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "this bench does not use criterion")]
#[path = "support/race.rs"]
mod race;

use std::time::Duration;

use clock::Lap;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::residency::{Fetch, LayerTables, Moved, Portable, Selected, TableShape, Workspace};
use forebay::{BringUp, Budget, Cache, Config, Memory, Open, Result, Sequence, Shape, WarmUp};
use race::{Side, claim, done, race};

const TOKENS: u32 = 131_072;
const LAYERS: u32 = 61;
const K: usize = 2_048;
const STEPS: u32 = 40;
/// The rows that the selections choose from: the first ones of each eighth of the sequence.
const POPULAR: u32 = 20_000;
const FROM: u32 = 13_107;
const TO: u32 = 9_830;
const ROUNDS: usize = 9;

/// A generator of selections: SplitMix64, seeded.
struct Draw(u64);

impl Draw {
    fn next(&mut self, below: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (((word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) % u64::from(below)) as u32
    }

    /// K distinct positions.
    fn selection(&mut self) -> Vec<i32> {
        let mut taken = vec![false; POPULAR as usize];
        let mut selection = Vec::with_capacity(K);
        while selection.len() < K {
            let one = self.next(POPULAR);
            if !std::mem::replace(&mut taken[one as usize], true) {
                selection.push((one / (POPULAR / 8) * (TOKENS / 8) + one % (POPULAR / 8)) as i32);
            }
        }
        selection
    }
}

/// A cache with one sequence, which is opened anew before each pass.
struct Elastic {
    cache: Cache,
    stream: Stream,
    selections: Slice,
    sequence: Option<Sequence>,
}

impl Elastic {
    fn new(selections: &[i32]) -> Result<Elastic> {
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream()?;
        let bytes: Vec<u8> = selections.iter().flat_map(|p| p.to_le_bytes()).collect();
        let place = device.allocate(bytes.len() as u64)?;
        device.write(place, &bytes)?;
        let shape = Shape { layers: LAYERS, draft_layers: 0, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, min_budget: K as u32, ..Config::new(shape, 1, TOKENS, FROM) };
        Ok(Elastic { cache: Cache::new(config, device)?, stream, selections: place, sequence: None })
    }

    /// Fills the slots and shrinks them.
    fn pass(&mut self) -> Result<Duration> {
        let Elastic { cache, stream, selections, sequence } = self;
        if let Some(before) = sequence.take() {
            cache.close(before, *stream)?;
        }
        let (budget, bring_up) = (Budget::Slots(FROM), BringUp::Nothing);
        let own = cache.open(&Open { prompt: TOKENS, promised: 0, budget, bring_up })?;
        cache.append_in_place(own, TOKENS)?;
        let warm_up = WarmUp { selections: Some(*selections), steps: STEPS, ..WarmUp::default() };
        let _ticket = cache.join(own, *stream, warm_up)?;
        *sequence = Some(own);
        let begin = Lap::begin();
        cache.resize(own, &Budget::Slots(TO), *stream)?;
        Ok(begin.end())
    }
}

/// The copies of a resize of one layer, from tables of its own with the same rows.
fn moves(shape: TableShape, selections: &[i32]) -> Result<Vec<Moved>> {
    let blocks: Vec<u32> = (0..FROM.div_ceil(64)).collect();
    let (mut tables, mut work) = (LayerTables::new(shape)?, Workspace::new(&shape, K as u32)?);
    tables.join(0, &blocks, FROM, TOKENS)?;
    let (mut slots, mut fetches) = (vec![0; K], vec![Fetch { position: 0, slot: 0 }; K]);
    for selection in selections.chunks_exact(K) {
        let selected = Selected { selection, slots: &mut slots, fetches: &mut fetches };
        tables.warm(&Portable, 0, selected, &mut work)?;
    }
    let mut moved = Vec::new();
    let blocks = &blocks[..TO.div_ceil(64) as usize];
    tables.resize(&Portable, 0, blocks, TO, &mut work, |one| moved.push(one))?;
    Ok(moved)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut draw = Draw(0x5EED_F0EB);
    let selections: Vec<i32> = (0..LAYERS * STEPS).flat_map(|_| draw.selection()).collect();
    let mut elastic = Elastic::new(&selections)?;
    let shape = TableShape {
        lanes: 1,
        tokens: TOKENS,
        query_rows: 1,
        scratch: 0,
        waves: 1,
        scratch_base: 64,
        landing_base: 64,
        budget_base: 128,
        budget_blocks: FROM.div_ceil(64),
    };
    let row = elastic.cache.geometry().row_bytes() as usize;
    let moved: Vec<Vec<Moved>> = selections
        .chunks_exact(STEPS as usize * K)
        .map(|selections| moves(shape, selections))
        .collect::<Result<_>>()?;
    let rows: usize = moved.iter().map(Vec::len).sum();
    println!("rows moved: {rows}, {:.1} MB", (rows * row) as f64 / 1e6);
    let mut slabs: Vec<Vec<u8>> = (0..LAYERS).map(|_| vec![1; shape.slots() as usize * row]).collect();
    let mut sides = [
        Side::new("resize", || (done(elastic.pass()), 1)),
        Side::new("memcpy", || {
            let begin = Lap::begin();
            for (slab, moved) in slabs.iter_mut().zip(&moved) {
                for one in moved {
                    let from = one.from as usize * row;
                    slab.copy_within(from..from + row, one.to as usize * row);
                }
            }
            (begin.end(), 1)
        }),
    ];
    let rounds = race(ROUNDS, &mut sides);
    drop(sides);
    let [own, bare] = ["resize", "memcpy"].map(|side| 1e6 / rounds.rate(side));
    println!(
        "resize {own:.0} us, memcpy {bare:.0} us, {:.1} us more in each layer",
        (own - bare) / f64::from(LAYERS)
    );
    claim("resize of 61 layers against the memcpy of its rows and 50 us", (bare + 50.0) / own, 1.0);
    Ok(())
}
