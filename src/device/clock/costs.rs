//! The cost table of a clock device.
//!
//! An operation first waits its launch gap, then takes a fixed time, then works at a rate that depends on what else
//! runs. If the SM fractions of running operations add up to more than 1, all of them slow down in proportion.
//! Transfers in one direction divide the link's rate. The table's rates are those of an operation that runs alone.
//!
//! **Peers.** Copies from and to other GPUs' memory cross a link of their own ([`Peer`]), which they divide with the
//! engine's collectives ([`collective`](super::ClockDevice::collective)). Its two directions are one number: every rank
//! of a group pulls as much as it serves, so that both directions carry the same, and each has the rate of one.
//!
//! **Memory.** With [`Costs::memory`] the operations that run divide the device's memory too: copies and gathers by
//! their bytes, and engines' works that say how many they move
//! ([`compute_in_memory`](super::ClockDevice::compute_in_memory)). A peer copy counts twice: it is written here, and
//! the other ranks read as much for their pulls. That half is counted while this rank pulls, which is when they read
//! only if all are at the same layer. A collective counts twice as well. Other works and kernels use no memory: a
//! demand's time says nothing of its bytes.
//!
//! **L2.** With [`Costs::l2`] work that names what it reads ([`compute_reading`](super::ClockDevice::compute_reading))
//! needs no memory for bytes that a prefetch, or work before it, has brought there, until later bytes have pushed them
//! out (`l2`). A prefetch itself needs the memory for its bytes, at its own rate at most.
//!
//! The default table is computed from the terms of the kernels (`kernels`).

use crate::error::{Error, Kind, Result};

/// Nanoseconds in a second: rates are per second, times in nanoseconds.
const NS: f64 = 1e9;

/// The largest cost in nanoseconds, also of an operation that runs alone: eleven days. Sums of thousands of these
/// still resolve one nanosecond in an f64.
const MOST_NS: f64 = 1e15;

/// The allowed rates in bytes per second.
const RATES: std::ops::RangeInclusive<f64> = 1.0..=1e18;

/// The most rows that a batch row can miss.
const MOST_MISSES: f64 = 1e9;

/// The smallest allowed [`Link::duplex`].
const LEAST_DUPLEX: f64 = 1e-3;

/// The direction in which bytes cross a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Host to device.
    ToDevice,
    /// Device to host.
    ToHost,
    /// To this device from another GPU's memory, or to that memory.
    Peer,
}

impl Direction {
    pub(super) const ALL: [Direction; 3] = [Direction::ToDevice, Direction::ToHost, Direction::Peer];
}

/// The cost of a piece of an engine's work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Nanoseconds when nothing else uses the SMs.
    pub ns: f64,
    /// Share of the SMs, 0 to 1.
    pub sm: f64,
}

/// The link between host and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second, host to device.
    pub to_device: f64,
    /// Bytes per second, device to host.
    pub to_host: f64,
    /// The fraction of its rate that a direction keeps while the other direction is busy too, 0.001 to 1.
    pub duplex: f64,
    /// The number of copies that the copy engines of one direction run at once. Further copies wait in the order in
    /// which they became ready.
    pub copy_engines: u32,
}

/// The link between GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peer {
    /// Bytes per second of all that crosses it in one direction at once.
    pub rate: f64,
    /// The number of copies from and to peers that run at once. Further copies wait in the order in which they became
    /// ready; an engine's collectives need no copy engine.
    pub copy_engines: u32,
}

/// The cache before the device's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct L2 {
    /// Bytes that it holds.
    pub bytes: u64,
    /// Fixed nanoseconds of a prefetch.
    pub fixed_ns: f64,
    /// Share of the SMs of a prefetch, 0 to 1.
    pub sm: f64,
}

/// The cost of a kernel whose time grows with the rows that it examines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kernel {
    /// Fixed nanoseconds, independent of the rows.
    pub fixed_ns: f64,
    /// Nanoseconds per row.
    pub row_ns: f64,
    /// Share of the SMs while it works through the rows, 0 to 1.
    pub sm: f64,
}

/// The cost of a kernel that moves rows over the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mover {
    /// Fixed nanoseconds, independent of the rows.
    pub fixed_ns: f64,
    /// Bytes per second when it has the link and its SMs to itself; at most the link's.
    pub rate: f64,
    /// Share of the SMs while it moves rows, 0 to 1.
    pub sm: f64,
}

/// The costs of forebay's own operations, and of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Nanoseconds from the end of everything that an operation waits for until it starts.
    pub launch_ns: f64,
    /// Nanoseconds by which one [`crate::device::Device::query`] advances the clock.
    pub poll_ns: f64,
    /// The link.
    pub link: Link,
    /// The link to other GPUs.
    pub peer: Peer,
    /// Bytes per second of copies within the device, reads and writes together.
    pub device_copy: f64,
    /// Bytes per second of the device's memory, reads and writes together, at least [`Costs::device_copy`]. Operations
    /// that need more than that at once are all slowed by the same factor. `None`: enough for all.
    pub memory: Option<f64>,
    /// The cache before the device's memory. `None`: a prefetch does nothing, and no work finds bytes there.
    pub l2: Option<L2>,
    /// Fixed nanoseconds of a copy by a copy engine.
    pub copy_ns: f64,
    /// R; a row is a query row of a batch row.
    pub resolve: Kernel,
    /// The number of batch rows that R processes at once, in the time of one; every further group of this size takes
    /// that time again. `None`: rows take their time one after another, as a line through measured times has it.
    pub resolve_wave: Option<u32>,
    /// The beginning of a step, load and commit; a row is a batch row in one layer.
    pub begin: Kernel,
    /// The report at a step's end; a row is a layer.
    pub report: Kernel,
    /// Join, truncate, resize, newest and leave; a row is a layer. A resize also moves rows inside the device.
    pub lane: Kernel,
    /// A warm-up's residency; a row is one step's selection in one layer.
    pub warm: Kernel,
    /// G, and the gather of a warm-up.
    pub gather: Mover,
    /// S.
    pub scatter: Mover,
}

/// A number of the table with its name.
type Named = (&'static str, f64);

fn refuse(place: &'static str, value: f64) -> Error {
    // The text shows the number itself, because the error's number fields hold integers only.
    Error::new(Kind::InvalidConfig, "costs").at(format!("{place} {value}"))
}

impl Costs {
    /// # Errors
    /// [`Kind::InvalidConfig`] names the first time that lies outside 0 to 1e15 ns (a poll: 1 to 1e15), rate outside 1
    /// to 1e18 bytes per second, or fraction outside 0 to 1.
    pub fn check(&self) -> Result<()> {
        let kernels = [
            (self.resolve, ["resolve.fixed_ns", "resolve.row_ns", "resolve.sm"]),
            (self.begin, ["begin.fixed_ns", "begin.row_ns", "begin.sm"]),
            (self.report, ["report.fixed_ns", "report.row_ns", "report.sm"]),
            (self.lane, ["lane.fixed_ns", "lane.row_ns", "lane.sm"]),
            (self.warm, ["warm.fixed_ns", "warm.row_ns", "warm.sm"]),
        ];
        let movers = [
            (self.gather, ["gather.fixed_ns", "gather.rate", "gather.sm"]),
            (self.scatter, ["scatter.fixed_ns", "scatter.rate", "scatter.sm"]),
        ];
        let times = [("launch_ns", self.launch_ns), ("copy_ns", self.copy_ns)];
        let times = times
            .into_iter()
            .chain(self.l2.map(|l2| ("l2.fixed_ns", l2.fixed_ns)))
            .chain(kernels.iter().flat_map(|(k, n)| [(n[0], k.fixed_ns), (n[1], k.row_ns)]))
            .chain(movers.iter().map(|(m, n)| (n[0], m.fixed_ns)));
        first(times, is_time)?;
        // A poll must take time: otherwise a polling loop would never end.
        first([("poll_ns", self.poll_ns)], |ns| is_time(ns) && ns >= 1.0)?;
        let rates = [
            ("link.to_device", self.link.to_device),
            ("link.to_host", self.link.to_host),
            ("peer.rate", self.peer.rate),
            ("device_copy", self.device_copy),
        ];
        let rates = rates.into_iter().chain(movers.iter().map(|(m, n)| (n[1], m.rate)));
        first(rates, |rate| RATES.contains(&rate))?;
        let memory = self.memory.map(|rate| ("memory", rate));
        first(memory, |rate| RATES.contains(&rate) && rate >= self.device_copy)?;
        let shares =
            kernels.iter().map(|(k, n)| (n[2], k.sm)).chain(movers.iter().map(|(m, n)| (n[2], m.sm)));
        first(shares.chain(self.l2.map(|l2| ("l2.sm", l2.sm))), is_share)?;
        first([("link.duplex", self.link.duplex)], |d| (LEAST_DUPLEX..=1.0).contains(&d))?;
        let counts = [
            ("link.copy_engines", f64::from(self.link.copy_engines)),
            ("peer.copy_engines", f64::from(self.peer.copy_engines)),
            ("resolve_wave", self.resolve_wave.map_or(1.0, f64::from)),
        ];
        first(counts, |n| n > 0.0)
    }

    /// A link's rate in one direction, bytes per nanosecond.
    pub(super) fn link_rate(&self, direction: Direction) -> f64 {
        match direction {
            Direction::ToDevice => self.link.to_device / NS,
            Direction::ToHost => self.link.to_host / NS,
            Direction::Peer => self.peer.rate / NS,
        }
    }

    /// The memory's rate, bytes per nanosecond.
    pub(super) fn memory_rate(&self) -> f64 {
        self.memory.map_or(f64::INFINITY, |rate| rate / NS)
    }

    /// Copies of one direction that run at once.
    pub(super) const fn copy_engines(&self, direction: Direction) -> u32 {
        match direction {
            Direction::ToDevice | Direction::ToHost => self.link.copy_engines,
            Direction::Peer => self.peer.copy_engines,
        }
    }
}

fn is_time(ns: f64) -> bool {
    (0.0..=MOST_NS).contains(&ns)
}

/// # Errors
/// [`Kind::InvalidConfig`] for an impossible number of missed rows.
pub(super) fn check_misses(rows: f64) -> Result<()> {
    first([("misses", rows)], |rows| (0.0..=MOST_MISSES).contains(&rows))
}

fn is_share(share: f64) -> bool {
    (0.0..=1.0).contains(&share)
}

fn first(numbers: impl IntoIterator<Item = Named>, good: impl Fn(f64) -> bool) -> Result<()> {
    match numbers.into_iter().find(|(_, value)| !good(*value)) {
        Some((place, value)) => Err(refuse(place, value)),
        None => Ok(()),
    }
}

/// One operation's demand on the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Fixed nanoseconds.
    pub(super) fixed_ns: f64,
    /// Nanoseconds of the rest when alone on the machine; 0 if only the link bounds a transfer.
    pub(super) ns: f64,
    /// Share of the SMs during the rest.
    pub(super) sm: f64,
    /// Bytes that the rest moves over a link.
    pub(super) bytes: f64,
    pub(super) direction: Option<Direction>,
    /// Whether it needs one of the direction's copy engines.
    pub(super) copy_engine: bool,
    /// Bytes that the rest reads and writes in the device's memory.
    pub(super) traffic: f64,
}

/// Bytes in this device's memory for each byte that crosses a link. While a rank's copy from a peer is written here,
/// the other ranks read as much for theirs; a collective reads what it sends and writes what it gets.
const fn traffic(direction: Direction, bytes: f64) -> f64 {
    match direction {
        Direction::ToDevice | Direction::ToHost => bytes,
        Direction::Peer => 2.0 * bytes,
    }
}

impl Work {
    /// An engine's work.
    pub(super) fn demand(demand: Demand) -> Result<Work> {
        first([("demand.ns", demand.ns)], is_time)?;
        first([("demand.sm", demand.sm)], is_share)?;
        Ok(Work { ns: demand.ns, sm: demand.sm, ..Work::default() })
    }

    /// An engine's work that reads and writes `bytes` bytes of the device's memory.
    pub(super) fn in_memory(costs: &Costs, demand: Demand, bytes: f64) -> Result<Work> {
        let work = Work::demand(demand)?;
        Ok(Work { ns: work.ns.max(bytes / costs.memory_rate()), traffic: bytes, ..work })
    }

    /// An engine's work that reads and writes `bytes` bytes of the device's memory, as far as they are not in L2. What
    /// the memory adds to its time is known when it starts.
    pub(super) fn reading(demand: Demand, bytes: f64) -> Result<Work> {
        Ok(Work { traffic: bytes, ..Work::demand(demand)? })
    }

    /// A prefetch of `bytes` bytes at `rate` bytes per second.
    pub(super) fn prefetch(l2: &L2, bytes: f64, rate: f64) -> Work {
        let ns = bytes / rate * NS;
        Work { fixed_ns: l2.fixed_ns, ns, sm: l2.sm, traffic: bytes, ..Work::default() }
    }

    /// An engine's work that moves `bytes` bytes over the link between GPUs.
    pub(super) fn collective(demand: Demand, bytes: f64) -> Result<Work> {
        let (direction, traffic) = (Some(Direction::Peer), traffic(Direction::Peer, bytes));
        Ok(Work { bytes, direction, traffic, ..Work::demand(demand)? })
    }

    pub(super) fn kernel(kernel: &Kernel, rows: f64) -> Work {
        Work { fixed_ns: kernel.fixed_ns, ns: kernel.row_ns * rows, sm: kernel.sm, ..Work::default() }
    }

    /// The begin of a dense cache's step: `words` bytes over the link, and `tensors` bytes that it writes.
    pub(super) fn begin_pages(costs: &Costs, words: f64, tensors: f64) -> Work {
        Work {
            fixed_ns: costs.begin.fixed_ns,
            ns: tensors / costs.device_copy * NS,
            sm: costs.begin.sm,
            bytes: words,
            direction: Some(Direction::ToDevice),
            traffic: tensors,
            ..Work::default()
        }
    }

    /// R of `batch_rows` batch rows.
    pub(super) fn resolve(costs: &Costs, batch_rows: u32, query_rows: u32) -> Work {
        let Costs { resolve, resolve_wave, .. } = costs;
        let Some(wave) = resolve_wave else {
            return Work::kernel(resolve, f64::from(batch_rows) * f64::from(query_rows));
        };
        // Each further wave begins when the previous one ends, and takes as long as the first.
        let (waves, one) = (f64::from(batch_rows.div_ceil(*wave)), Work::kernel(resolve, query_rows.into()));
        Work { ns: one.ns * waves + one.fixed_ns * (waves - 1.0).max(0.0), ..one }
    }

    pub(super) fn rows(mover: &Mover, direction: Direction, bytes: f64) -> Work {
        Work {
            fixed_ns: mover.fixed_ns,
            ns: bytes / mover.rate * NS,
            sm: mover.sm,
            bytes,
            direction: Some(direction),
            copy_engine: false,
            traffic: traffic(direction, bytes),
        }
    }

    /// A copy by a copy engine over a link.
    pub(super) fn copy(costs: &Costs, direction: Direction, bytes: f64) -> Work {
        let (traffic, direction) = (traffic(direction, bytes), Some(direction));
        Work { fixed_ns: costs.copy_ns, bytes, direction, copy_engine: true, traffic, ..Work::default() }
    }

    /// A copy inside device memory.
    pub(super) fn inside(costs: &Costs, bytes: f64) -> Work {
        let traffic = 2.0 * bytes;
        Work { fixed_ns: costs.copy_ns, ns: traffic / costs.device_copy * NS, traffic, ..Work::default() }
    }

    /// A resize in `layers` layers that moves `bytes` bytes inside device memory.
    pub(super) fn resize(costs: &Costs, layers: f64, bytes: f64) -> Work {
        let (lane, inside) = (Work::kernel(&costs.lane, layers), Work::inside(costs, bytes));
        Work { ns: lane.ns + inside.ns, traffic: inside.traffic, ..lane }
    }

    /// # Errors
    /// [`Kind::InvalidConfig`] when it takes too long even alone: sums of such times would lose precision.
    pub(super) fn check(self, costs: &Costs) -> Result<Work> {
        let link = self.direction.map_or(0.0, |direction| self.bytes / costs.link_rate(direction));
        let memory = self.traffic / costs.memory_rate();
        first([("operation.ns", self.fixed_ns + self.ns.max(link).max(memory))], is_time)?;
        Ok(self)
    }

    /// Whether there is work after the fixed time.
    pub(super) fn has_rest(&self) -> bool {
        self.ns > 0.0 || self.bytes > 0.0
    }

    /// The same when so many bytes of its traffic are found in L2: it takes the time of the others where they take
    /// longer than the rest of it.
    pub(super) fn without(self, found: f64, memory_rate: f64) -> Work {
        let traffic = f64::max(0.0, self.traffic - found);
        Work { ns: self.ns.max(traffic / memory_rate), traffic, ..self }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_number_is_refused_by_its_name() {
        type Spoil = fn(&mut Costs);
        const L2: super::L2 = super::L2 { bytes: 1, fixed_ns: 0.0, sm: 0.0 };
        let spoiled: [(&str, Spoil); 24] = [
            ("resolve_wave", |c| c.resolve_wave = Some(0)),
            ("launch_ns", |c| c.launch_ns = -1.0),
            ("copy_ns", |c| c.copy_ns = f64::INFINITY),
            ("poll_ns", |c| c.poll_ns = 0.0),
            ("link.to_host", |c| c.link.to_host = f64::NAN),
            ("link.duplex", |c| c.link.duplex = 1.5),
            ("link.copy_engines", |c| c.link.copy_engines = 0),
            ("peer.rate", |c| c.peer.rate = 0.0),
            ("peer.copy_engines", |c| c.peer.copy_engines = 0),
            ("gather.rate", |c| c.gather.rate = 0.0),
            ("scatter.sm", |c| c.scatter.sm = -0.1),
            ("begin.row_ns", |c| c.begin.row_ns = f64::NAN),
            ("warm.sm", |c| c.warm.sm = 1.01),
            ("launch_ns", |c| c.launch_ns = 1e300),
            ("resolve.row_ns", |c| c.resolve.row_ns = 1.1e15),
            ("poll_ns", |c| c.poll_ns = 1e-320),
            ("link.to_device", |c| c.link.to_device = 1e-320),
            ("device_copy", |c| c.device_copy = 1e19),
            ("device_copy", |c| (c.memory, c.device_copy) = (Some(1e12), f64::NAN)),
            ("memory", |c| c.memory = Some(f64::INFINITY)),
            ("memory", |c| c.memory = Some(0.9 * c.device_copy)),
            ("link.duplex", |c| c.link.duplex = 1e-320),
            ("l2.fixed_ns", |c| c.l2 = Some(super::L2 { fixed_ns: f64::NAN, ..L2 })),
            ("l2.sm", |c| c.l2 = Some(super::L2 { sm: 1.5, ..L2 })),
        ];
        assert_eq!(Costs::default().check(), Ok(()));
        for (name, spoil) in spoiled {
            let mut costs = Costs::default();
            spoil(&mut costs);
            let error = costs.check().unwrap_err();
            assert_eq!((error.kind(), error.operation()), (Kind::InvalidConfig, "costs"));
            assert_eq!(error.place().split(' ').next(), Some(name));
        }
    }

    #[test]
    fn lanes_of_a_wave_take_the_time_of_one_and_rows_of_a_line_add_up() {
        let mut costs = Costs { resolve_wave: Some(100), ..Costs::default() };
        (costs.resolve.fixed_ns, costs.resolve.row_ns) = (7.0, 2.0);
        let time = |costs: &Costs, batch_rows| {
            let work = Work::resolve(costs, batch_rows, 3);
            work.fixed_ns + work.ns
        };
        let waves = [0, 1, 100, 101, 200, 201].map(|batch_rows| time(&costs, batch_rows));
        assert_eq!(waves, [7.0, 13.0, 13.0, 26.0, 26.0, 39.0]);
        costs.resolve_wave = None;
        assert_eq!([0, 1, 100].map(|batch_rows| time(&costs, batch_rows)), [7.0, 13.0, 607.0]);
    }

    #[test]
    fn an_operation_that_takes_too_long_is_refused() {
        let mut costs = Costs::default();
        costs.link.to_device = 1.0;
        let copy = |bytes| Work::copy(&costs, Direction::ToDevice, bytes).check(&costs);
        assert!(copy(0.9e6).is_ok());
        let rows = Work::kernel(&Kernel { row_ns: 1e15, ..costs.warm }, 2.0).check(&costs);
        for error in [copy(1.1e6).unwrap_err(), rows.unwrap_err()] {
            assert_eq!(error.place().split(' ').next(), Some("operation.ns"));
        }
        for rows in [-1.0, f64::NAN, 1e308] {
            assert_eq!(check_misses(rows).unwrap_err().place(), format!("misses {rows}"));
        }
    }

    #[test]
    fn an_invalid_demand_is_refused() {
        for (ns, sm) in [(-1.0, 0.5), (f64::NAN, 0.5), (1.0, 1.1), (1.0, f64::NAN), (1.5e308, 1.0)] {
            assert_eq!(Work::demand(Demand { ns, sm }).unwrap_err().kind(), Kind::InvalidConfig);
        }
    }
}
