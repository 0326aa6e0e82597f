//! The ceilings of a device and its link, measured on this machine in this run: the best speeds, which other figures
//! are compared with.
//!
//! A figure without its ceiling says little. On several hosts, processors that read host memory reach about 35 GB/s
//! where the copy engine reaches 52, so 34 is either two thirds or the maximum. Each ceiling is one long run of
//! bytes, the best of several rounds: the attainable speed, not the usual one.
//!
//! **A head start.** On an idle GPU, the mark before an operation is reached while the operation is still on its way
//! from the host, so the time between marks would be the host's. A host function before the first mark therefore
//! blocks the stream while the host enqueues. Host memory is **on the GPU's NUMA node**, where the system reports it.

use std::time::{Duration, Instant};

use crate::device::{Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::measure::{Mark, Probe};
use crate::os::{self, Fallback, Map, NoFaults, Request};
use crate::sync::Arc;

/// The ceilings. Speeds are in bytes per second, times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "predict", derive(serde::Serialize))]
pub struct Ceilings {
    /// Host to device by a copy engine.
    pub copy_up: f64,
    /// Device to host by a copy engine.
    pub copy_down: f64,
    /// Host to device while as much goes from device to host. On a host device with inline streams, one after the
    /// other.
    pub both_up: f64,
    /// Device to host while as much goes from host to device.
    pub both_down: f64,
    /// Host to device by processors that read host memory, with the best number of blocks.
    pub read: f64,
    /// Device to host by processors that write host memory, with the best number of blocks.
    pub write: f64,
    /// The fewest blocks that read at nine tenths of [`Ceilings::read`]; 1 on the host.
    pub read_blocks: u32,
    /// Inside device memory by processors: bytes read and bytes written.
    pub memory: f64,
    /// An operation that does nothing, from the mark before it to the mark after it, without the host's part.
    pub launch_us: f64,
}

/// Bytes of the operation that does nothing.
const NOTHING: u64 = 16;

/// How long the stream is blocked, while the host enqueues a few operations.
const HEAD_START: Duration = Duration::from_micros(100);

/// The fraction of the best speed that counts as enough blocks.
const ENOUGH: f64 = 0.9;

/// One stream, two marks, and a run of memory on either side of the link.
struct Track {
    stream: Stream,
    from: Mark,
    to: Mark,
    host: Slice,
    device: Slice,
}

impl Track {
    fn new(device: &dyn Probe, host: Slice, own: Slice) -> Result<Track> {
        Ok(Track { stream: device.stream()?, from: device.mark()?, to: device.mark()?, host, device: own })
    }

    /// The shortest time of `rounds` rounds of `work`, in microseconds.
    fn least(&self, device: &dyn Probe, rounds: u32, work: impl Fn(&Track) -> Result<()>) -> Result<f64> {
        let mut least = f64::INFINITY;
        // One round more, because the first pays for one-time costs.
        for _ in 0..=rounds {
            head_start(device, self.stream)?;
            device.stamp(self.from, self.stream)?;
            work(self)?;
            device.stamp(self.to, self.stream)?;
            least = least.min(device.elapsed_us(self.from, self.to)?);
        }
        // A coarse clock may measure no time at all.
        Ok(least.max(1e-3))
    }
}

/// Blocks the stream while the host enqueues the next operations.
fn head_start(device: &dyn Probe, stream: Stream) -> Result<()> {
    let wait = || {
        let begun = Instant::now();
        while begun.elapsed() < HEAD_START {
            std::hint::spin_loop();
        }
    };
    device.call(stream, Arc::new(wait))
}

/// Bytes a second.
fn speed(bytes: u64, us: f64) -> f64 {
    bytes as f64 / us * 1e6
}

/// The request for host memory as a total pool should have it: huge pages, locked, and on the GPU's NUMA node where
/// the system reports it.
///
/// # Errors
/// [`Kind::DeviceFailed`].
pub fn host_request(device: &dyn Probe, bytes: u64) -> Result<Request> {
    let node = device.facts()?.gpu.and_then(|gpu| os::node_beside(&gpu.bus));
    Ok(Request { bytes, huge: true, populate: true, lock: true, node, shared: true })
}

/// Registered host memory as [`host_request`] asks for it, and the options that the system refused.
///
/// # Errors
/// As [`Map::new`] and [`Device::register`](crate::device::Device::register).
fn host_memory(device: &dyn Probe, bytes: u64) -> Result<(Slice, Vec<Fallback>)> {
    let (map, fallbacks) = Map::new(&host_request(device, bytes)?, &NoFaults)?;
    Ok((device.register(&Arc::new(map))?.part(0, bytes)?, fallbacks))
}

impl Ceilings {
    /// Measures with runs of `bytes` bytes (rounded down to 16), the best of `rounds` rounds each. Allocates twice
    /// `bytes` on either side, for as long as the device lives.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for no rounds, or runs too short to be meaningful; the device's errors.
    pub fn measure(device: &dyn Probe, bytes: u64, rounds: u32) -> Result<Ceilings> {
        const LEAST: u64 = 1 << 16;
        if rounds == 0 || bytes < LEAST {
            let error = Error::new(Kind::InvalidConfig, "measure ceilings").at("rounds or bytes of a run");
            return Err(error.with("bytes", bytes).with("least", LEAST).with("rounds", rounds));
        }
        let bytes = bytes / NOTHING * NOTHING;
        let (host, _) = host_memory(device, 2 * bytes)?;
        let own = device.allocate(2 * bytes)?;
        let half = |of: Slice, number: u64| of.part(number * bytes, bytes);
        let up = Track::new(device, half(host, 0)?, half(own, 0)?)?;
        let down = Track::new(device, half(host, 1)?, half(own, 1)?)?;
        let copied_up = |t: &Track| device.copy(t.stream, t.host, t.device);
        let copied_down = |t: &Track| device.copy(t.stream, t.device, t.host);
        let copy_up = speed(bytes, up.least(device, rounds, copied_up)?);
        let copy_down = speed(bytes, down.least(device, rounds, copied_down)?);
        let (both_up, both_down) = both(device, &up, &down, rounds)?;
        let candidates = blocks(device.facts()?.processors, device.facts()?.gpu.is_some());
        let (mut reads, mut write) = (Vec::new(), 0.0_f64);
        for blocks in candidates {
            let read = up.least(device, rounds, |t| device.carry(t.stream, t.host, t.device, blocks))?;
            let written = up.least(device, rounds, |t| device.carry(t.stream, t.device, t.host, blocks))?;
            reads.push((blocks, speed(bytes, read)));
            write = write.max(speed(bytes, written));
        }
        let read = reads.iter().map(|(_, speed)| *speed).fold(0.0, f64::max);
        let enough = reads.iter().find(|(_, speed)| *speed >= ENOUGH * read);
        let most = reads.last().map_or(1, |(blocks, _)| *blocks);
        let inside = up.least(device, rounds, |t| device.carry(t.stream, t.device, down.device, most))?;
        let little =
            |t: &Track| device.carry(t.stream, t.device.part(0, NOTHING)?, down.device.part(0, NOTHING)?, 1);
        Ok(Ceilings {
            copy_up,
            copy_down,
            both_up,
            both_down,
            read,
            write,
            read_blocks: enough.map_or(1, |(blocks, _)| *blocks),
            memory: speed(2 * bytes, inside),
            launch_us: up.least(device, rounds.max(32), little)?,
        })
    }
}

/// The numbers of blocks to try: up to two for each multiprocessor, which are then all in flight.
fn blocks(processors: u32, gpu: bool) -> Vec<u32> {
    let most = if gpu { 2 * processors.max(1) } else { 1 };
    let mut tried: Vec<u32> = std::iter::successors(Some(1_u32), |blocks| blocks.checked_mul(2))
        .skip_while(|blocks| gpu && *blocks < 4)
        .take_while(|blocks| *blocks < most)
        .collect();
    tried.push(most);
    tried
}

/// Both directions at once: the best round's speeds. Each speed is that of its own copy; the other copy runs at the
/// same time until one of them ends.
fn both(device: &dyn Probe, up: &Track, down: &Track, rounds: u32) -> Result<(f64, f64)> {
    let (begun, mut best) = (device.event()?, (0.0, 0.0));
    for _ in 0..=rounds {
        head_start(device, up.stream)?;
        device.record(begun, up.stream)?;
        device.wait(down.stream, begun)?;
        for (track, from, to) in [(up, up.host, up.device), (down, down.device, down.host)] {
            device.stamp(track.from, track.stream)?;
            device.copy(track.stream, from, to)?;
            device.stamp(track.to, track.stream)?;
        }
        let us = |track: &Track| device.elapsed_us(track.from, track.to).map(|us| us.max(1e-3));
        let (of_up, of_down) = (us(up)?, us(down)?);
        let speeds = (speed(up.host.bytes(), of_up), speed(down.host.bytes(), of_down));
        if speeds.0 + speeds.1 > best.0 + best.1 {
            best = speeds;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::host::{HostDevice, HostOptions};

    #[test]
    fn every_ceiling_of_the_host_is_a_speed() {
        for threaded in [false, true] {
            let device = HostDevice::new(HostOptions { threaded, ..HostOptions::default() });
            let found = Ceilings::measure(&*device, 1 << 20, 2).unwrap();
            let Ceilings { copy_up, copy_down, both_up, both_down, read, write, memory, .. } = found;
            for speed in [copy_up, copy_down, both_up, both_down, read, write, memory] {
                assert!(speed.is_finite() && speed > 1e6, "{found:?}");
            }
            assert!(found.read_blocks == 1 && found.launch_us > 0.0, "{found:?}");
        }
    }

    #[test]
    fn the_timed_work_has_a_head_start() {
        let device = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let slice = || device.allocate(NOTHING).unwrap();
        let track = || Track::new(&*device, slice(), slice()).unwrap();
        let (begun, up, down) = (device.mark().unwrap(), track(), track());
        let twice = 2.0 * HEAD_START.as_micros() as f64;
        device.stamp(begun, up.stream).unwrap();
        up.least(&*device, 1, |t| device.copy(t.stream, t.host, t.device)).unwrap();
        assert!(device.elapsed_us(begun, up.from).unwrap() >= twice, "before the first mark");
        device.stamp(begun, up.stream).unwrap();
        both(&*device, &up, &down, 1).unwrap();
        for track in [up, down] {
            assert!(device.elapsed_us(begun, track.from).unwrap() >= twice, "both ways");
        }
    }

    #[test]
    fn invalid_sizes_and_rounds_are_refused() {
        let device = HostDevice::new(HostOptions::default());
        for (bytes, rounds) in [(1 << 20, 0), (100, 3)] {
            let refused = Ceilings::measure(&*device, bytes, rounds).unwrap_err();
            assert_eq!(refused.kind(), Kind::InvalidConfig);
        }
    }

    #[test]
    fn blocks_are_tried_up_to_two_for_each_multiprocessor() {
        assert_eq!(blocks(132, true), [4, 8, 16, 32, 64, 128, 256, 264]);
        assert_eq!(blocks(1, true), [2]);
        assert_eq!(blocks(16, false), [1]);
    }
}
