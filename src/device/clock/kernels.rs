//! The cost of forebay's kernels as a sum of terms: launches, dependent loads, line requests over the link, bytes in
//! flight, barriers, and passes over a lane's slots.
//!
//! **What it is for.** No kernel has been timed yet. A sum of named terms can be checked term by term against a
//! measurement; a single estimate cannot. So the terms of each kernel are counted in its source ([`Design`]), and
//! each term has a price with a source ([`KernelCosts`]). Both are ranges, and so is the result. The clock's default
//! [`Costs`](super::Costs) are the middles of these ranges, so the clock's times lie within them. `forebay simulate
//! --kernels` prints the table.
//!
//! **What it leaves out**: queues before L2, page walks of the GPU over host memory, and other kernels on the same
//! multiprocessors. A chain of loads is that of the slowest thread; work of other threads at the same time costs
//! nothing.

use super::costs::{Costs, Kernel, Link, Mover, Peer};
use crate::device::pieces::{LINE, Pieces};
use crate::error::{Error, Kind, Result};

/// A range of values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Between {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Between {
    /// A range of one known number.
    pub const fn just(value: f64) -> Between {
        Between { low: value, high: value }
    }

    const fn of(low: f64, high: f64) -> Between {
        Between { low, high }
    }

    /// The range times `count`.
    pub const fn times(self, count: f64) -> Between {
        Between { low: self.low * count, high: self.high * count }
    }

    /// The sum of two ranges.
    pub const fn plus(self, other: Between) -> Between {
        Between { low: self.low + other.low, high: self.high + other.high }
    }

    /// The middle.
    pub const fn middle(self) -> f64 {
        (self.low + self.high) / 2.0
    }
}

/// One term of a cost: a count times a price.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// The term's name.
    pub name: &'static str,
    /// The count.
    pub count: f64,
    /// The price of each, in microseconds.
    pub us: Between,
}

impl Cost {
    const fn new(name: &'static str, count: f64, us: Between) -> Cost {
        Cost { name, count, us }
    }
}

/// The sum of the terms in microseconds.
pub fn sum(costs: &[Cost]) -> Between {
    costs.iter().fold(Between::default(), |all, cost| all.plus(cost.us.times(cost.count)))
}

/// The price of each term. Each price has a name, by which [`KernelCosts::set`] changes it, and a source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelCosts {
    /// GB/s at which the multiprocessors read host memory.
    pub read_gb_s: Between,
    /// GB/s at which the multiprocessors write host memory.
    pub write_gb_s: Between,
    /// Microseconds of one read of host memory (round trip).
    pub round_trip_us: Between,
    /// Microseconds of a load that the next one depends on: from L2, or from device memory after weights have evicted
    /// it from L2.
    pub load_us: Between,
    /// Microseconds of one turn of a loop over slots that waits for its load, from L2, where the lane's tables are.
    pub turn_us: Between,
    /// Microseconds of one turn that loads nothing: an atomic in shared memory.
    pub shared_us: Between,
    /// Microseconds of a barrier of a thread block.
    pub barrier_us: Between,
    /// Microseconds from a kernel's end to the beginning of the next one of its stream.
    pub launch_us: Between,
    /// Microseconds from a kernel's end to the beginning of the next one inside a graph.
    pub node_us: Between,
    /// Multiprocessors.
    pub processors: Between,
}

/// The names of the prices, with their sources.
pub const SOURCES: [(&str, &str); 10] = [
    ("read_gb_s", "NVIDIA/nvbandwidth#24, of an H100: 35.2 GB/s"),
    ("write_gb_s", "NVIDIA/nvbandwidth#24"),
    ("round_trip_us", "assumed: PCIe 5 and the host's memory"),
    ("load_us", "assumed: L2 0.3 us, device memory 0.6 us after a sweep of L2"),
    ("turn_us", "assumed: L2 and an atomic, by the machine code's loop"),
    ("shared_us", "assumed: 35 to 50 cycles"),
    ("barrier_us", "assumed: 35 to 50 cycles of 16 warps"),
    ("launch_us", "assumed"),
    ("node_us", "assumed"),
    ("processors", "an H200's"),
];

impl Default for KernelCosts {
    /// The assumed prices of an H200 on PCIe 5 x16: [`SOURCES`].
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

/// The structure of the kernels, as counted in their sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Design {
    /// The number of dependent loads before a resolve looks up its first selection, before a gather loads its first
    /// row, and before a scatter loads its first row.
    pub heads: [u32; 3],
    /// Turns of a loop over slots whose loads are in flight at once.
    pub ahead: u32,
    /// Whether the positions of equally old slots are loaded once; otherwise every pass over them loads them.
    pub positions_kept: bool,
    /// Whether a lane's slot blocks are in shared memory; otherwise each look at a slot first loads its block's
    /// number.
    pub blocks_shared: bool,
    /// Whether a step without misses counts its hits by position; otherwise it reads the lane's stamps, as a step with
    /// misses does.
    pub hits_counted: bool,
    /// Whether pieces of a row are numbered by its lines, where that leaves few gaps; otherwise from its first byte.
    pub by_lines: bool,
    /// Default thread blocks of a gather.
    pub gather_blocks: u32,
}

impl Design {
    /// The design before the first review for GPUs: `Pools`, `Layer` and `Micro` are looked up in device memory.
    pub const BEFORE: Design = Design {
        heads: [5, 5, 5],
        ahead: 1,
        positions_kept: false,
        blocks_shared: false,
        hits_counted: false,
        by_lines: false,
        gather_blocks: 16,
    };
    /// The present design: `Pools`, `Layer` and `Micro` are passed by value, and the list of rows to fetch holds host
    /// offsets.
    pub const NOW: Design = Design {
        heads: [3, 2, 3],
        ahead: 4,
        positions_kept: true,
        blocks_shared: true,
        hits_counted: true,
        by_lines: true,
        gather_blocks: 4,
    };

    /// Line requests over the link that a gather makes for a row of `row` bytes at a stride of `stride` bytes.
    pub fn requests(&self, row: u32, stride: u32) -> f64 {
        let now = Pieces::of(row, stride, 0, 0);
        // Rows that begin at a sector take whole sectors.
        let sectors = match stride.is_multiple_of(SECTOR) {
            true => row.next_multiple_of(SECTOR),
            false => row,
        };
        let before = Pieces { numbers: sectors / now.bytes, mask: 0, ..now };
        let pieces = if self.by_lines { now } else { before };
        pieces.requests(row, stride)
    }
}

/// The size of a resolve of one lane. All lanes are alike and run in parallel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolve {
    /// Query rows.
    pub query_rows: u32,
    /// Positions that each query row selects.
    pub top_k: u32,
    /// Slots of the lane.
    pub budget: u32,
    /// Rows that it misses.
    pub misses: u32,
}

/// Threads of a block.
const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Look-ups, and loads of stamps, that a thread has in flight at once in either design.
const AHEAD: u32 = 4;
/// Bytes of a piece.
const PIECE: u32 = 16;
/// The sectors that a line comes in.
const SECTOR: u32 = 64;
/// Bytes that a block has in flight.
pub const BLOCK_BYTES: f64 = (THREADS * PIECE * AHEAD) as f64;
/// Histogram passes over the ties, and the pass by ballots after them.
const TIE_PASSES: f64 = 3.0;
/// Barriers of a resolve, and of each pass over the ties.
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

    /// The price of this name, for display.
    pub fn get(&self, name: &str) -> Option<Between> {
        let mut own = *self;
        own.named(name).map(|price| *price)
    }

    /// Changes a price.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an unknown name, a bound that is not above 0, or a lower end above the upper end.
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

    /// The terms of a resolve.
    pub fn resolve(&self, design: &Design, of: &Resolve) -> Vec<Cost> {
        let slots = of.budget.div_ceil(64) * 64;
        let per_slot = if design.blocks_shared { 1 } else { 2 };
        let look_ups = of.query_rows * of.top_k.div_ceil(AHEAD * THREADS);
        // The head includes the first round's selection.
        let looked = 2 * look_ups - 1;
        // One load brings the slot blocks to shared memory.
        let looked = looked + u32::from(design.blocks_shared);
        let [head, ..] = design.heads;
        let mut costs = vec![
            Cost::new("loads in front", head.into(), self.load_us),
            Cost::new("loads of look-ups", looked.into(), self.load_us),
        ];
        if of.misses == 0 && design.hits_counted {
            // All query rows' selections as one, and a bit in shared memory for each position.
            let selected = of.query_rows * of.top_k;
            let [loads, turns] = [AHEAD * THREADS, THREADS].map(|at_once| selected.div_ceil(at_once));
            costs.push(Cost::new("loads of hits", loads.into(), self.load_us));
            costs.push(Cost::new("turns over hits", turns.into(), self.shared_us));
        } else {
            let split = per_slot * (slots / 32).div_ceil(AHEAD * WARPS);
            costs.push(Cost::new("loads of stamps", split.into(), self.load_us));
        }
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

    /// The terms of a gather of `rows` rows of `row` bytes at a stride of `stride` bytes on the host.
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

    /// The row GB/s of a gather in progress: the lower end if the link is bound by requests, each of a line, the
    /// upper end if by bytes.
    pub fn payload(&self, design: &Design, row: u32, stride: u32) -> Between {
        let by_requests = design.requests(row, stride) * f64::from(LINE);
        let Between { low, high } = self.read_gb_s;
        Between::of(low * f64::from(row) / by_requests, high * f64::from(row) / fetched(row, stride))
    }

    /// The row GB/s of a scatter in progress: the lower end if each touched line is written whole, the upper end if
    /// by sectors.
    pub fn stored(&self, row: u32, stride: u32) -> Between {
        let lines = Design::NOW.requests(row, stride) * f64::from(LINE);
        let Between { low, high } = self.write_gb_s;
        Between::of(low * f64::from(row) / lines, high * f64::from(row) / fetched(row, stride))
    }

    /// The clock's default costs: the middles, for rows of 656 bytes at a stride of 704 and lanes that miss 13.4%;
    /// round guesses for operations that this table does not cover.
    fn of_clock(&self, design: &Design) -> Costs {
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
            peer: Peer { rate: 305e9, copy_engines: 2 },
            device_copy: 2e12,
            memory: None,
            l2: None,
            copy_ns: 1_000.0,
            // The cost of each query row after the first.
            resolve: kernel(one - (two - one), two - one),
            // Two blocks share a multiprocessor.
            resolve_wave: Some((2.0 * self.processors.middle()) as u32),
            // The descriptor comes from host memory; then come a commit's head and the next victim's slot and stamp.
            begin: kernel(ns(self.round_trip_us.plus(self.load_us.times(4.0))), 1.0),
            report: kernel(ns(self.load_us.times(2.0)), 5.0),
            lane: kernel(3_000.0, 20.0),
            warm: kernel(4_000.0, 200.0),
            gather: mover(front.plus(self.round_trip_us), self.payload(design, row, stride)),
            scatter: mover(self.load_us.times(scatter), self.stored(row, stride)),
        }
    }
}

impl Default for Costs {
    /// An H200-class GPU on PCIe 5. Its kernels' costs come from their terms ([`KernelCosts`]); its NVLink has the rate
    /// of an all-gather of 8 H100 (Megatron-LM#5596); the other numbers are round guesses of the right magnitude. A
    /// setup replaces all of them.
    fn default() -> Self {
        KernelCosts::default().of_clock(&Design::NOW)
    }
}

/// Bytes that cross the link for a row: its touched sectors of 64 bytes, as a mean over the rows' places.
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
    fn a_resolve_costs_the_sum_of_its_parts() {
        let costs = KernelCosts::default();
        let of = Resolve { query_rows: 1, top_k: 2048, budget: 6_881, misses: 274 };
        // 108 blocks: 216 words in 4 rounds of 16 warps with 4 words each; 14 turns of 512 threads.
        let (loads, turns) = (5.0 + 1.0 + 8.0 + 3.0 + 2.0, 42.0);
        let (least, most) =
            (loads * 0.3 + turns * 0.17 + 23.0 * 0.02, loads * 0.6 + turns * 0.21 + 23.0 * 0.03);
        let found = sum(&costs.resolve(&Design::BEFORE, &of));
        assert!((found.low - least).abs() < 1e-9 && (found.high - most).abs() < 1e-9, "{found:?}");
        // The blocks once, a load per round, two per victim, ties four ahead and then in registers.
        let loads = 3.0 + 1.0 + 5.0 + 2.0 + 4.0 + 2.0;
        let (least, most) =
            (loads * 0.3 + 42.0 * 0.02 + 23.0 * 0.02, loads * 0.6 + 42.0 * 0.03 + 23.0 * 0.03);
        let found = sum(&costs.resolve(&Design::NOW, &of));
        assert!((found.low - least).abs() < 1e-9 && (found.high - most).abs() < 1e-9, "{found:?}");
        // Without misses 2,048 positions are counted, four turns of 512 threads in one load, whatever the lane's size.
        let (loads, turns) = (3.0 + 1.0 + 1.0 + 1.0 + 2.0, 4.0);
        let (least, most) = (loads * 0.3 + (turns + 14.0) * 0.02, loads * 0.6 + (turns + 14.0) * 0.03);
        for budget in [64, of.budget, 131_072] {
            let hits = sum(&costs.resolve(&Design::NOW, &Resolve { misses: 0, budget, ..of }));
            assert!((hits.low - least).abs() < 1e-9 && (hits.high - most).abs() < 1e-9, "{hits:?}");
        }
        // Before, they were found by the pass over the stamps.
        let hits = sum(&costs.resolve(&Design::BEFORE, &Resolve { misses: 0, ..of }));
        let (least, most) = (16.0 * 0.3 + 14.0 * 0.02, 16.0 * 0.6 + 14.0 * 0.03);
        assert!((hits.low - least).abs() < 1e-9 && (hits.high - most).abs() < 1e-9, "{hits:?}");
    }

    #[test]
    fn a_gather_costs_its_chain_a_round_trip_and_its_bytes() {
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
