//! Claim: pulling a layer of sharded weights from another rank's memory takes at most 1/0.8 of the time of one memcpy
//! of as many bytes, with everything beyond the last cache.
//!
//! Two ranks share two layers of the bytes of DeepSeek-R1's o_proj in FP8, and one of them pulls both in turn, 56 MiB
//! each, in copies of 2 MiB and in one. There are two memcpys: the standard library's between vectors, which knows
//! nothing of forebay, and one copy of the same device between memfds. The bench compares every byte of the windows at
//! the end, each a stamp of its rank, layer and place. It ends with an error where the bytes of a side may fit in the
//! last cache.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;

use std::hint::black_box;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped, Slice, Stream};
use forebay::os::{Faults, NoFaults, Protection};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Patterns, Plan, Pulls, Sharding, Tensor, Windows};
use forebay::{Error, Kind, Result};
use race::{Side, claim, done, race, record};

/// Bytes of a layer: 7168 x 16384.
const LAYER: u64 = 7168 * 16384;
const LAYERS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(60);

/// The bytes of a layer as a rank fills them: each 8 say whose they are and where they lie.
fn stamps(rank: u32, layer: usize) -> Vec<u8> {
    let seed = (u64::from(rank) + 1) << 40 | (layer as u64 + 1) << 32;
    (0..LAYER / 8).flat_map(|place| (seed | place).to_le_bytes()).collect()
}

/// The bytes of the last cache of a processor, as the system says; 0 where it does not.
fn last_cache() -> u64 {
    let size = |index| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(path).ok()?;
        text.trim().strip_suffix('K')?.parse::<u64>().ok()
    };
    (0..8).filter_map(size).max().unwrap_or(0) << 10
}

/// A rank on a device of its own, filled.
fn filled(rank: u32, pulls: Pulls) -> Result<(Arc<HostDevice>, Windows, Stream)> {
    let device = HostDevice::new(HostOptions::default());
    let layers = vec![vec![Tensor { name: "o_proj".to_owned(), bytes: LAYER, align: 256 }]; LAYERS];
    let sharding = Sharding { grain: device.granularity(), ..Sharding::new(Patterns::new(&["*"])?) };
    let plan = Plan::new(&layers, Group { id: 0, rank, ranks: 2 }, &sharding)?;
    let (base, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (device.clone(), Arc::new(NoFaults));
    let mut windows = Windows::new(&base, plan, pulls, &faults)?;
    let (stream, buffer) = (device.stream()?, device.allocate(LAYER)?);
    for layer in 0..LAYERS {
        device.write(buffer, &stamps(rank, layer))?;
        windows.fill(layer, "o_proj", buffer, stream)?;
    }
    Ok((device, windows, stream))
}

/// Rank 0 of a pair, which has shared with rank 1, and that rank.
type Pair = (Arc<HostDevice>, Windows, Stream, Windows);

fn pair(pulls: Pulls) -> Result<Pair> {
    let (a, b) = UnixStream::pair().map_err(|_| Error::new(Kind::Io, "bench").at("socketpair"))?;
    let share = |windows: &mut Windows, socket, stream| -> Result<Links> {
        let hello = windows.hello([0; 32], stream)?;
        let mut links = Links::over(vec![socket], hello, Limits::default(), Arc::new(NoFaults))?;
        windows.share(&mut links, stream, PATIENCE).map(|()| links)
    };
    let (device, mut first, stream) = filled(0, pulls)?;
    let (_, mut second, other) = filled(1, pulls)?;
    thread::scope(|scope| {
        let peer = scope.spawn(|| share(&mut second, b, other));
        let own = share(&mut first, a, stream);
        let peer = peer.join().unwrap_or_else(|_| Err(Error::new(Kind::InvalidState, "bench")));
        own.and(peer)
    })?;
    Ok((device, first, stream, second))
}

/// Pulls the layers in turn.
fn pulls<'a>((_, windows, stream, _): &'a Pair, bytes: u64) -> impl FnMut() -> (Duration, u64) + 'a {
    let mut next = 0;
    move || {
        let lap = Lap::begin();
        done(windows.pull(next % LAYERS, *stream));
        next += 1;
        (lap.end(), bytes)
    }
}

fn stretch(device: &HostDevice, bytes: u64) -> Result<Slice> {
    let range = device
        .range(&[Mapped { backing: device.backing(bytes)?, offset: 0, bytes }], Protection::ReadWrite)?;
    device.write(range, &vec![1; bytes as usize])?;
    Ok(range)
}

/// Every byte of a layer is its owner's.
fn check((device, windows, ..): &Pair, layer: usize) -> Result<()> {
    let mut bytes = vec![0; LAYER as usize];
    device.read(windows.layer(layer)?, &mut bytes)?;
    let grain = windows.plan().grain();
    for rank in 0..2 {
        let part = windows.plan().part(layer, rank).unwrap_or_default();
        let own = (part.start * grain) as usize..(part.end * grain) as usize;
        if own.is_empty() || bytes[own.clone()] != stamps(rank, layer)[own] {
            return Err(Error::new(Kind::Internal, "bench").at("a window shows other bytes"));
        }
    }
    Ok(())
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let sliced = done(pair(Pulls::default()));
    let whole = done(pair(Pulls { copy: u64::MAX }));
    let bytes = sliced.1.plan().layers().first().map_or(0, |layer| sliced.1.plan().pulled(layer));
    let (device, stream) = (&sliced.0, sliced.2);
    // As many stretches as the pulls touch, so that no side finds more of them in a cache.
    let pairs = [(); LAYERS].map(|()| (done(stretch(device, bytes)), done(stretch(device, bytes))));
    let touched = 2 * bytes * LAYERS as u64;
    if touched <= 2 * last_cache() {
        let error = Error::new(Kind::InvalidConfig, "bench").at("layers that the last cache holds");
        done(Err::<(), _>(error.with("bytes", touched).with("cache", last_cache())));
    }
    let mut vectors = [(); LAYERS].map(|()| (vec![1_u8; bytes as usize], vec![2_u8; bytes as usize]));
    let mut turn = 0;
    let memcpy = || {
        let (from, to) = &mut vectors[turn % LAYERS];
        let lap = Lap::begin();
        to.copy_from_slice(black_box(from));
        black_box(to);
        turn += 1;
        (lap.end(), bytes)
    };
    let mut next = 0;
    let copy = || {
        let (from, to) = pairs[next % LAYERS];
        let lap = Lap::begin();
        done(device.copy(stream, from, to));
        next += 1;
        (lap.end(), bytes)
    };
    let mut sides = [
        Side::new("slices", pulls(&sliced, bytes)),
        Side::new("whole", pulls(&whole, bytes)),
        Side::new("memcpy", memcpy),
        Side::new("device copy", copy),
    ];
    record(&mut criterion, "pull", &mut sides);
    let rounds = race(41, &mut sides);
    drop(sides);
    for pair in [&sliced, &whole] {
        for layer in 0..LAYERS {
            done(pair.1.pull(layer, pair.2));
            done(check(pair, layer));
        }
    }
    claim("pull of a layer in copies of 2 MiB against one memcpy", rounds.ratio("slices", "memcpy"), 0.8);
    claim("pull of a layer in one piece against one memcpy", rounds.ratio("whole", "memcpy"), 0.8);
    claim(
        "pull of a layer in one piece against one copy of the device",
        rounds.ratio("whole", "device copy"),
        0.8,
    );
    for side in ["memcpy", "device copy"] {
        println!("{side}: {:.2} GB/s", rounds.rate(side) / 1e9);
    }
    criterion.final_summary();
}
