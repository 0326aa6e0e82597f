//! What forebay's own kernels cost by what they are made of: launches, loads that depend on each other, requests of
//! lines over the link, bytes in flight, barriers, passes over a lane's slots.
//!
//! **What it is for.** No kernel has been timed yet. A prediction as prose cannot be refuted; a sum of named terms can,
//! term by term. So each kernel is counted from its source ([`Design`]), each term has a price with a source
//! ([`KernelCosts`]), and both are ranges: what comes out is from the least to the most. The clock's default
//! [`Costs`](super::Costs) are the middles of these ranges, so that a clock's times lie within them, and `forebay
//! simulate --kernels` prints the table.
//!
//! **What it does not know**: queues in front of L2, page walks of the GPU over host memory, other kernels on the same
//! multiprocessors. Chains are those of the slowest thread; what other threads do beside it costs nothing.

use super::costs::{Costs, Kernel, Link, Mover};
use crate::device::pieces::{LINE, Pieces};
use crate::error::{Error, Kind, Result};

/// From the least to the most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Between {
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

impl Between {
    /// A number that is known.
    pub const fn just(value: f64) -> Between {
        Between { low: value, high: value }
    }

    const fn of(low: f64, high: f64) -> Between {
        Between { low, high }
    }

    /// So many of them.
    pub const fn times(self, count: f64) -> Between {
        Between { low: self.low * count, high: self.high * count }
    }

    /// One behind the other.
    pub const fn plus(self, other: Between) -> Between {
        Between { low: self.low + other.low, high: self.high + other.high }
    }

    /// The middle.
    pub const fn middle(self) -> f64 {
        (self.low + self.high) / 2.0
    }
}

/// So many of something that has a price.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// What.
    pub name: &'static str,
    /// How many.
    pub count: f64,
    /// Microseconds of each.
    pub us: Between,
}

impl Cost {
    const fn new(name: &'static str, count: f64, us: Between) -> Cost {
        Cost { name, count, us }
    }
}

/// Their sum in microseconds.
pub fn sum(costs: &[Cost]) -> Between {
    costs.iter().fold(Between::default(), |all, cost| all.plus(cost.us.times(cost.count)))
}

/// The prices. Each has a name, by which it can be changed, and a source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelCosts {
    /// GB/s at which processors read host memory.
    pub read_gb_s: Between,
    /// GB/s at which they write it.
    pub write_gb_s: Between,
    /// Microseconds from a read of host memory to its answer.
    pub round_trip_us: Between,
    /// Microseconds of a load that the next one waits for: from L2, or from device memory once weights swept it.
    pub load_us: Between,
    /// Microseconds of a turn of a loop over slots, whose load is waited for: from L2, where the lane's tables are.
    pub turn_us: Between,
    /// Microseconds of a turn of which nothing is loaded: an atomic in shared memory.
    pub shared_us: Between,
    /// Microseconds of a barrier of a block.
    pub barrier_us: Between,
    /// Microseconds from a kernel's end to the beginning of the next one of its stream.
    pub launch_us: Between,
    /// The same in a graph.
    pub node_us: Between,
    /// Multiprocessors.
    pub processors: Between,
}

/// The names of the prices, with their sources.
pub const SOURCES: [(&str, &str); 10] = [
    ("read_gb_s", "NVIDIA/nvbandwidth#24, of an H100: 35.2 GB/s"),
    ("write_gb_s", "NVIDIA/nvbandwidth#24"),
    ("round_trip_us", "assumed: PCIe 5 and the host's memory"),
    ("load_us", "assumed: L2 0.3 us, device memory 0.6 us behind a sweep of L2"),
    ("turn_us", "assumed: L2 and an atomic, by the machine code's loop"),
    ("shared_us", "assumed: 35 to 50 cycles"),
    ("barrier_us", "assumed: 35 to 50 cycles of 16 warps"),
    ("launch_us", "assumed"),
    ("node_us", "assumed"),
    ("processors", "an H200's"),
];

impl Default for KernelCosts {
    /// What is assumed of an H200 behind PCIe 5 x16: [`SOURCES`].
    fn default() -> Self {
        KernelCosts {
            read_gb_s: Between::just(35.2),
            write_gb_s: Between::just(52.8),
            round_trip_us: Between::of(1.5, 2.0),
            load_us: Between::of(0.3, 0.6),
            turn_us: Between::of(0.17, 0.21),
            shared_us: Between::of(0.02, 0.03),
            barrier_us: Between::of(0.02, 0.03),
            launch_us: Between::just(2.0),
            node_us: Between::of(0.8, 1.2),
            processors: Between::just(132.0),
        }
    }
}

/// What kernels are made of, as counted from their sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Design {
    /// Loads that depend on each other before a resolve looks its first selection up, before a gather loads its first
    /// row, and before a scatter loads its first.
    pub heads: [u32; 3],
    /// Turns of a loop over slots whose loads are under way at once.
    pub ahead: u32,
    /// Where equally old slots are chosen among, their positions are loaded once; otherwise in each pass.
    pub positions_kept: bool,
    /// A lane's slot blocks stand in shared memory; otherwise each look at a slot loads its block first.
    pub blocks_shared: bool,
    /// Pieces of a row are numbered by its own lines, where these are not too many; otherwise from its first byte.
    pub by_lines: bool,
    /// Blocks of a gather, unless an engine asks for others.
    pub gather_blocks: u32,
}

impl Design {
    /// As it was when it was first read for a GPU: `Pools`, `Layer` and `Micro` looked up in device memory.
    pub const BEFORE: Design = Design {
        heads: [5, 5, 5],
        ahead: 1,
        positions_kept: false,
        blocks_shared: false,
        by_lines: false,
        gather_blocks: 16,
    };
    /// As it is: these by value, and host offsets in the list of what is fetched.
    pub const NOW: Design = Design {
        heads: [3, 2, 3],
        ahead: 4,
        positions_kept: true,
        blocks_shared: true,
        by_lines: true,
        gather_blocks: 4,
    };

    /// Requests of lines over the link that a gather makes for a row of `row` bytes that stands `stride` from the next.
    pub fn requests(&self, row: u32, stride: u32) -> f64 {
        let now = Pieces::of(row, stride, 0, 0);
        // Whole sectors, where rows begin with one.
        let sectors = match stride.is_multiple_of(SECTOR) {
            true => row.next_multiple_of(SECTOR),
            false => row,
        };
        let before = Pieces { numbers: sectors / now.bytes, mask: 0, ..now };
        let pieces = if self.by_lines { now } else { before };
        pieces.requests(row, stride)
    }
}

/// A resolve of one lane; all lanes are alike and run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolve {
    /// Query rows.
    pub query_rows: u32,
    /// Positions that each selects.
    pub top_k: u32,
    /// Slots of the lane.
    pub budget: u32,
    /// Rows that it misses.
    pub misses: u32,
}

/// Threads of a block.
const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Look-ups, and loads of stamps, that a thread has under way at once in either design.
const AHEAD: u32 = 4;
/// Bytes of a piece.
const PIECE: u32 = 16;
/// The sectors that a line comes in.
const SECTOR: u32 = 64;
/// Bytes that a block has under way.
pub const BLOCK_BYTES: f64 = (THREADS * PIECE * AHEAD) as f64;
/// Passes of histograms over the ties, and the one by ballots behind them.
const TIE_PASSES: f64 = 3.0;
/// Barriers of a resolve, and of each pass over ties.
const BARRIERS: f64 = 14.0;
const TIE_BARRIERS: f64 = 3.0;
/// Barriers of a gather before its first row: the scan of its batch rows, and the staged rows.
const GATHER_BARRIERS: f64 = 4.0;

impl KernelCosts {
    /// The price of a name.
    fn named(&mut self, name: &str) -> Option<&mut Between> {
        Some(match name {
            "read_gb_s" => &mut self.read_gb_s,
            "write_gb_s" => &mut self.write_gb_s,
            "round_trip_us" => &mut self.round_trip_us,
            "load_us" => &mut self.load_us,
            "turn_us" => &mut self.turn_us,
            "shared_us" => &mut self.shared_us,
            "barrier_us" => &mut self.barrier_us,
            "launch_us" => &mut self.launch_us,
            "node_us" => &mut self.node_us,
            "processors" => &mut self.processors,
            _ => return None,
        })
    }

    /// The price of a name, to show it.
    pub fn get(&self, name: &str) -> Option<Between> {
        let mut own = *self;
        own.named(name).map(|price| *price)
    }

    /// Changes a price.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a name that is none, numbers that are not above 0, or a least above the most.
    pub fn set(&mut self, name: &str, price: Between) -> Result<()> {
        let wrong = |place: String| Error::new(Kind::InvalidConfig, "kernel costs").at(place);
        let good = |value: f64| (1e-6..=1e9).contains(&value);
        if !good(price.low) || !good(price.high) || price.low > price.high {
            return Err(wrong(format!("{name}: {} to {} is no range above 0", price.low, price.high)));
        }
        match self.named(name) {
            Some(own) => *own = price,
            None => {
                let names: Vec<&str> = SOURCES.iter().map(|(name, _)| *name).collect();
                return Err(wrong(format!("no price is called {name}: {}", names.join(", "))));
            }
        }
        Ok(())
    }

    /// A resolve: where its time goes.
    pub fn resolve(&self, design: &Design, of: &Resolve) -> Vec<Cost> {
        let slots = of.budget.div_ceil(64) * 64;
        let per_slot = if design.blocks_shared { 1 } else { 2 };
        let look_ups = of.query_rows * of.top_k.div_ceil(AHEAD * THREADS);
        // The first round's selection is in the head.
        let looked = 2 * look_ups - 1;
        // Slot blocks come to shared memory by one load.
        let split = per_slot * (slots / 32).div_ceil(AHEAD * WARPS) + u32::from(design.blocks_shared);
        let [head, ..] = design.heads;
        let mut costs = vec![
            Cost::new("loads in front", head.into(), self.load_us),
            Cost::new("loads of look-ups and stamps", (looked + split).into(), self.load_us),
        ];
        if of.misses > 0 {
            let victims = (1 + per_slot) * of.misses.div_ceil(THREADS);
            costs.push(Cost::new("loads of victims", victims.into(), self.load_us));
            let turns = slots.div_ceil(THREADS);
            match design.positions_kept {
                false => {
                    costs.push(Cost::new("turns over ties", TIE_PASSES * f64::from(turns), self.turn_us))
                }
                true => {
                    let loads = turns.div_ceil(design.ahead);
                    costs.push(Cost::new("loads of ties", loads.into(), self.load_us));
                    costs.push(Cost::new("turns over ties", TIE_PASSES * f64::from(turns), self.shared_us));
                }
            }
            costs.push(Cost::new("barriers of ties", TIE_PASSES * TIE_BARRIERS, self.barrier_us));
        }
        costs.push(Cost::new("loads of answers", (2 * of.query_rows).into(), self.load_us));
        costs.push(Cost::new("barriers", BARRIERS, self.barrier_us));
        costs
    }

    /// A gather of so many rows of `row` bytes that stand `stride` apart on the host: where its time goes.
    pub fn gather(&self, design: &Design, rows: f64, row: u32, stride: u32) -> Vec<Cost> {
        let [_, head, _] = design.heads;
        let rate = self.payload(design, row, stride);
        let row_us = f64::from(row) / 1e3;
        let us = Between::of(row_us / rate.high, row_us / rate.low);
        vec![
            Cost::new("loads in front", head.into(), self.load_us),
            Cost::new("barriers", GATHER_BARRIERS, self.barrier_us),
            Cost::new("round trip", 1.0, self.round_trip_us),
            Cost::new("rows", rows, us),
        ]
    }

    /// GB/s of rows that a gather brings while it is under way: the least if the link's limit is requests, each of a
    /// line, the most if it is bytes.
    pub fn payload(&self, design: &Design, row: u32, stride: u32) -> Between {
        let by_requests = design.requests(row, stride) * f64::from(LINE);
        let Between { low, high } = self.read_gb_s;
        Between::of(low * f64::from(row) / by_requests, high * f64::from(row) / fetched(row, stride))
    }

    /// GB/s of rows that a scatter stores: the least if each line that it touches takes a whole one, the most if
    /// sectors.
    pub fn stored(&self, row: u32, stride: u32) -> Between {
        let lines = Design::NOW.requests(row, stride) * f64::from(LINE);
        let Between { low, high } = self.write_gb_s;
        Between::of(low * f64::from(row) / lines, high * f64::from(row) / fetched(row, stride))
    }

    /// The default costs of a clock: the middles, for rows of 656 bytes at a stride of 704 and lanes that miss 13.4%,
    /// and round guesses of what is no kernel of this table.
    pub(super) fn of_clock(&self, design: &Design) -> Costs {
        let ns = |us: Between| us.middle() * 1e3;
        let [_, gather, scatter] = design.heads.map(f64::from);
        let (row, stride) = (656, 704);
        let lane = |query_rows, misses| Resolve { query_rows, top_k: 2048, budget: 6_881, misses };
        let [one, two] = [lane(1, 274), lane(2, 548)].map(|lane| ns(sum(&self.resolve(design, &lane))));
        let kernel = |fixed_ns, row_ns| Kernel { fixed_ns, row_ns, sm: 0.2 };
        let share = f64::from(design.gather_blocks) / self.processors.middle();
        let mover = |us: Between, gb_s: Between| Mover {
            fixed_ns: ns(us),
            rate: gb_s.middle() * 1e9,
            sm: share.min(1.0),
        };
        let front = self.load_us.times(gather).plus(self.barrier_us.times(GATHER_BARRIERS));
        Costs {
            launch_ns: ns(self.node_us),
            poll_ns: 1_000.0,
            link: Link { to_device: 55e9, to_host: 55e9, duplex: 0.9, copy_engines: 1 },
            device_copy: 2e12,
            copy_ns: 1_000.0,
            // A query row more is what it takes beyond the first.
            resolve: kernel(one - (two - one), two - one),
            // Two blocks share a multiprocessor.
            resolve_wave: Some((2.0 * self.processors.middle()) as u32),
            // The block comes from host memory; a commit's head and an next_victim's slot and stamp follow.
            begin: kernel(ns(self.round_trip_us.plus(self.load_us.times(4.0))), 1.0),
            report: kernel(ns(self.load_us.times(2.0)), 5.0),
            lane: kernel(3_000.0, 20.0),
            warm: kernel(4_000.0, 200.0),
            gather: mover(front.plus(self.round_trip_us), self.payload(design, row, stride)),
            scatter: mover(self.load_us.times(scatter), self.stored(row, stride)),
        }
    }
}

/// Bytes that cross the link for a row: sectors of 64 bytes that it touches, mean over where rows stand.
pub fn fetched(row: u32, stride: u32) -> f64 {
    let phases = (0..SECTOR / PIECE).map(|at| at * stride % SECTOR);
    let sectors: u32 = phases.map(|phase| (phase + row).div_ceil(SECTOR)).sum();
    f64::from(sectors * SECTOR) / f64::from(SECTOR / PIECE)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_row_are_those_of_its_numbers() {
        let before = |stride| Design::BEFORE.requests(656, stride);
        let now = |stride| Design::NOW.requests(656, stride);
        // What the review of the kernels found.
        assert_eq!((before(704), before(768), now(704), now(656)), (6.625, 6.625, 6.0, 6.0));
        assert!((before(656) - 7.09).abs() < 0.01);
        assert_eq!((fetched(656, 704), fetched(656, 768), fetched(656, 656)), (704.0, 704.0, 704.0));
    }

    #[test]
    fn a_resolve_is_the_sum_of_what_its_source_has() {
        let costs = KernelCosts::default();
        let of = Resolve { query_rows: 1, top_k: 2048, budget: 6_881, misses: 274 };
        // 108 blocks: 216 words in 4 rounds of 16 warps with 4 words each; 14 turns of 512 threads.
        let (loads, turns) = (5.0 + 1.0 + 8.0 + 3.0 + 2.0, 42.0);
        let (least, most) =
            (loads * 0.3 + turns * 0.17 + 23.0 * 0.02, loads * 0.6 + turns * 0.21 + 23.0 * 0.03);
        let found = sum(&costs.resolve(&Design::BEFORE, &of));
        assert!((found.low - least).abs() < 1e-9 && (found.high - most).abs() < 1e-9, "{found:?}");
        // The blocks once, a load a round, two a victim, ties four ahead and then in registers.
        let loads = 3.0 + 1.0 + 5.0 + 2.0 + 4.0 + 2.0;
        let (least, most) =
            (loads * 0.3 + 42.0 * 0.02 + 23.0 * 0.02, loads * 0.6 + 42.0 * 0.03 + 23.0 * 0.03);
        let found = sum(&costs.resolve(&Design::NOW, &of));
        assert!((found.low - least).abs() < 1e-9 && (found.high - most).abs() < 1e-9, "{found:?}");
        let hits = sum(&costs.resolve(&Design::NOW, &Resolve { misses: 0, ..of }));
        assert!(hits.high < found.high - 6.0 * 0.6);
    }

    #[test]
    fn a_gather_is_its_chain_a_round_trip_and_its_bytes() {
        let costs = KernelCosts::default();
        let found = sum(&costs.gather(&Design::NOW, 410.0, 656, 704));
        let bytes = 410.0 * 704.0 / 35.2e3;
        assert!((found.low - (2.0 * 0.3 + 4.0 * 0.02 + 1.5 + bytes)).abs() < 1e-9, "{found:?}");
        let requests = 410.0 * 6.0 * 128.0 / 35.2e3;
        assert!((found.high - (2.0 * 0.6 + 4.0 * 0.03 + 2.0 + requests)).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn a_price_is_changed_by_its_name_and_a_wrong_one_is_refused() {
        let mut costs = KernelCosts::default();
        for (name, _) in SOURCES {
            costs.set(name, Between::of(3.0, 4.0)).unwrap();
            assert_eq!(costs.get(name), Some(Between::of(3.0, 4.0)));
        }
        for (name, low, high) in
            [("load_us", 2.0, 1.0), ("load_us", 0.0, 1.0), ("load_us", f64::NAN, 1.0), ("other", 1.0, 2.0)]
        {
            assert_eq!(costs.set(name, Between::of(low, high)).unwrap_err().kind(), Kind::InvalidConfig);
        }
    }
}
