//! Claims: the ring hides the pulls of sharded weights behind layers that are twice as long as a pull, up to 3% of the
//! step; where layers are half as long, the part that is not hidden is the closed form, within 10%; and a layer costs
//! the host at most 2 us beside the pull's own copies.
//!
//! **Hidden pulls.** Two processes share layers of the bytes of DeepSeek-R1's o_proj in FP8, so a pull brings 56 MiB
//! from the other one's memory: milliseconds, beyond the last cache. An engine's compute is sleep on the compute stream
//! of a threaded host device: one half is attention and output projection, which the window's use ends behind, one half
//! the experts. A time is from the second step to the last, by layer; the first fills the ring. Resident steps are the
//! same sleeps without the ring.
//!
//! Two pulls are on their way at once where layers are short, and a rank has one link. So the threads of the ring's
//! streams share one processor, and the compute stream has the others.
//!
//! **The closed form.** In two buffers a layer's pull begins at the release by the layer two before, and is exposed by
//! what is left of it when the layer is due: max(0, pull - (due - released)). The link is never idle in short layers:
//! before a pull ends, the next buffer's has begun. So a layer lasts as long as the link takes for its pull, and
//! max(0, pull - layer) of that is exposed, whatever part of the layer the attention is. The pull is measured in the
//! same rounds, alone on the same processor.
//!
//! **Time** is the wall's here, not a thread's: nothing of a sleep is CPU time, and what is asked is when a step ends.
//! Other programs delay pulls, and no sleep, so a machine without two free processors shows their load and not the
//! ring: there, run it as `chrt -r 5 cargo bench --bench ring -- nothing`, for which they wait. The host's cost is CPU
//! time, which the kernel does not count for such a run, so it has no figure of it.
//!
//! **Bytes.** Each word is a stamp of its rank, layer and place. In every timed use the engine reads the first and the
//! last word of what was pulled, before its sleep and behind it; and all bytes of all windows are compared in a step
//! at the end.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use clock::Lap;
use criterion::Criterion;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, Stream};
use forebay::os::{Faults, NoFaults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Patterns, Plan, Pulls, Ring, RingOptions, Sharding, Tensor, Windows};
use forebay::{Error, Kind, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use race::{Rounds, Side, claim, done, race, record};

/// The folder in which the ranks meet; set for rank 1, which this bench starts.
const FOLDER: &str = "FOREBAY_BENCH_RING";
const RANKS: u32 = 2;
const NAME: &str = "o_proj";
const PATIENCE: Duration = Duration::from_secs(60);

/// The model whose pulls are hidden: bytes of a layer, 7168 x 16384; layers; steps that are timed.
const LAYER: u64 = 7168 * 16384;
const LAYERS: usize = 6;
const STEPS: usize = 4;

/// The model whose host cost is measured: V3.2's layers and the next one, all sharded, with little to copy.
const COST_LAYERS: usize = 62;
const COST_STEPS: usize = 40;
/// The most microseconds of a layer.
const MOST_US: f64 = 2.0;

/// The word at a place of a layer that a rank filled.
fn stamp(rank: u32, layer: usize, at: u64) -> u64 {
    let seed = u64::from(rank) << 56 | (layer as u64) << 40 | at;
    (seed ^ (seed >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

fn wrong(what: impl Into<String>) -> Error {
    Error::new(Kind::Internal, "bench").at(what.into())
}

/// A rank of a group on a device of its own, filled.
struct Rank {
    device: Arc<HostDevice>,
    windows: Windows,
    stream: Stream,
}

fn wait(device: &HostDevice, stream: Stream) -> Result<()> {
    let event = device.event()?;
    device.record(event, stream)?;
    device.synchronize(event)
}

impl Rank {
    fn new(group: u64, rank: u32, layers: usize, bytes: u64, threaded: bool) -> Result<Rank> {
        let device = HostDevice::new(HostOptions { threaded, ..HostOptions::default() });
        let tensors = vec![vec![Tensor { name: NAME.to_owned(), bytes, align: 256 }]; layers];
        let sharding = Sharding { grain: device.granularity(), ..Sharding::new(Patterns::new(&[NAME])?) };
        let plan = Plan::new(&tensors, Group { id: group, rank, ranks: RANKS }, &sharding)?;
        let (base, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (device.clone(), Arc::new(NoFaults));
        let mut windows = Windows::new(&base, plan, Pulls::default(), &faults)?;
        let (stream, buffer) = (device.stream()?, device.allocate(bytes)?);
        for layer in 0..layers {
            let stamps = (0..bytes).step_by(8).flat_map(|at| stamp(rank, layer, at).to_le_bytes());
            device.write(buffer, &stamps.collect::<Vec<u8>>())?;
            windows.fill(layer, NAME, buffer, stream)?;
            wait(&device, stream)?;
        }
        Ok(Rank { device, windows, stream })
    }

    /// Meets the other rank and shares. The session has to live as long as the memory is used.
    fn share(&mut self, folder: &Path) -> Result<Links> {
        let hello = self.windows.hello([0; 32], self.stream)?;
        // No thread serves the session while passes run.
        let limits = Limits { hello: PATIENCE, lost: Duration::from_secs(3600), ..Limits::default() };
        let mut links = Links::meet(folder, hello, limits, Arc::new(NoFaults))?;
        self.windows.share(&mut links, self.stream, PATIENCE).map(|()| links)
    }
}

/// The ranks of both models.
fn ranks(rank: u32) -> Result<[Rank; 2]> {
    let little = 2 * u64::from(RANKS) * forebay::os::page_size();
    Ok([Rank::new(0, rank, LAYERS, LAYER, true)?, Rank::new(1, rank, COST_LAYERS, little, false)?])
}

fn shared(ranks: &mut [Rank; 2], folder: &Path) -> Result<Vec<Links>> {
    ranks.iter_mut().map(|rank| rank.share(folder)).collect()
}

/// Rank 1: it shares, and waits until rank 0 is gone.
fn peer(folder: &Path) -> Result<()> {
    let mut ranks = ranks(1)?;
    let mut links = shared(&mut ranks, folder)?;
    let Some(first) = links.first_mut() else { return Ok(()) };
    while first.event(PATIENCE).is_ok() {}
    Ok(())
}

/// The process of rank 1 and the folder, which are gone when the bench is.
struct Peer {
    child: Child,
    folder: PathBuf,
}

impl Peer {
    fn start() -> Result<Peer> {
        let folder = std::env::temp_dir().join(format!("forebay-ring-{}", std::process::id()));
        let failed = |error: std::io::Error| Error::new(Kind::Io, "bench").at(error.to_string());
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let program = std::env::current_exe().map_err(failed)?;
        let child = Command::new(program).env(FOLDER, &folder).spawn().map_err(failed)?;
        Ok(Peer { child, folder })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Makes something whose threads run on processors of this process that `choose` names by number and count.
fn on<T>(choose: impl Fn(usize, usize) -> bool, make: impl FnOnce() -> T) -> T {
    let this = Pid::from_raw(0);
    let Ok(all) = sched_getaffinity(this) else { return make() };
    let ours: Vec<usize> = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false)).collect();
    let mut chosen = CpuSet::new();
    for (number, cpu) in ours.iter().enumerate() {
        if ours.len() == 1 || choose(number, ours.len()) {
            let _ = chosen.set(*cpu);
        }
    }
    let _ = sched_setaffinity(this, &chosen);
    let made = make();
    let _ = sched_setaffinity(this, &all);
    made
}

/// An engine whose compute is sleep, and its ring.
struct Engine {
    device: Arc<HostDevice>,
    ring: Ring,
    compute: Stream,
    /// By layer: the first and the last word that a pull writes, and what they have to be.
    ends: Vec<[(Slice, u64); 2]>,
    /// Words that were read, and that were others.
    read: Arc<AtomicU64>,
    differ: Arc<AtomicU64>,
    /// When the timed steps began and ended.
    begun: Arc<Mutex<Instant>>,
    ended: Arc<Mutex<Instant>>,
    events: [Event; 3],
}

impl Engine {
    fn new(rank: Rank) -> Result<Engine> {
        let Rank { device, windows, .. } = rank;
        let grain = windows.plan().grain();
        let ends = (0..LAYERS).map(|layer| {
            let (window, part) = (windows.layer(layer)?, windows.plan().part(layer, 1).unwrap_or_default());
            let word = |at: u64| Ok::<_, Error>((window.part(at, 8)?, stamp(1, layer, at)));
            Ok([word(part.start * grain)?, word(part.end * grain - 8)?])
        });
        let ends = ends.collect::<Result<Vec<_>>>()?;
        let base: Arc<dyn Device> = device.clone();
        let ring = on(|cpu, all| cpu + 1 == all, || Ring::new(&base, windows, RingOptions::default()))?;
        let compute = on(|cpu, all| cpu + 1 < all, || device.stream())?;
        let events = [device.event()?, device.event()?, device.event()?];
        let now = || Arc::new(Mutex::new(Instant::now()));
        let (read, differ) = Default::default();
        Ok(Engine { ring, compute, ends, read, differ, begun: now(), ended: now(), events, device })
    }

    fn sleep(&self, time: Duration) -> Result<()> {
        self.device.call(self.compute, Arc::new(move || thread::sleep(time)))
    }

    /// Attention and output projection: they look at their weights, when they begin and when they end.
    fn attention(&self, layer: usize, time: Duration, sharded: bool) -> Result<()> {
        let (device, ends) = (self.device.clone(), self.ends[layer]);
        let (read, differ) = (self.read.clone(), self.differ.clone());
        let look = move || {
            for (word, wanted) in ends {
                let mut bytes = [0; 8];
                let found = device.read(word, &mut bytes).map(|()| u64::from_le_bytes(bytes));
                read.fetch_add(1, Ordering::Relaxed);
                differ.fetch_add(u64::from(sharded && found != Ok(wanted)), Ordering::Relaxed);
            }
        };
        let work = move || {
            look();
            thread::sleep(time);
            look();
        };
        self.device.call(self.compute, Arc::new(work))
    }

    fn stamp(&self, at: &Arc<Mutex<Instant>>) -> Result<()> {
        let at = at.clone();
        let note = move || *at.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Instant::now();
        self.device.call(self.compute, Arc::new(note))
    }

    fn took(&self) -> Duration {
        let [begun, ended] =
            [&self.begun, &self.ended].map(|at| *at.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        ended.saturating_duration_since(begun)
    }

    /// Waits for everything that is enqueued.
    fn drain(&self) -> Result<()> {
        let pulls = (0..2).filter_map(|buffer| self.ring.stream(buffer));
        for (stream, event) in std::iter::once(self.compute).chain(pulls).zip(self.events) {
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
        }
        Ok(())
    }

    fn step(&mut self, layer_time: Duration, sharded: bool) -> Result<()> {
        if sharded {
            self.ring.begin(1, 0)?;
        }
        for layer in 0..LAYERS {
            if sharded {
                self.ring.enter(layer, 0, self.compute)?;
            }
            self.attention(layer, layer_time / 2, sharded)?;
            if sharded {
                self.ring.leave(layer, 0, self.compute)?;
            }
            self.sleep(layer_time / 2)?;
        }
        if sharded { self.ring.end(self.compute) } else { Ok(()) }
    }

    /// Steps back to back: the time of all but the first, and their layers.
    fn steps(&mut self, layer_time: Duration, sharded: bool) -> Result<(Duration, u64)> {
        self.step(layer_time, sharded)?;
        self.stamp(&self.begun)?;
        (0..STEPS).try_for_each(|_| self.step(layer_time, sharded))?;
        self.stamp(&self.ended)?;
        self.drain()?;
        Ok((self.took(), (STEPS * LAYERS) as u64))
    }

    /// Pulls all layers one after another on a stream of the ring's. The last two are those that the ring has in its
    /// buffers between steps.
    fn pulls(&self) -> Result<(Duration, u64)> {
        let Some(stream) = self.ring.stream(0) else { return Err(wrong("no buffer")) };
        let at = |at: &Arc<Mutex<Instant>>| {
            self.stamp(at)?;
            self.device.record(self.events[0], self.compute)
        };
        at(&self.begun)?;
        self.device.wait(stream, self.events[0])?;
        for layer in (2..LAYERS).chain([0, 1]) {
            self.ring.pulls().pull(layer, stream)?;
        }
        self.device.edge(self.events[1], stream, self.compute)?;
        at(&self.ended)?;
        self.drain()?;
        Ok((self.took(), LAYERS as u64))
    }

    /// Compares every byte that the windows show in a step of the ring. Returns the words.
    fn compared(&mut self) -> Result<u64> {
        let mut words = 0;
        self.ring.begin(1, 0)?;
        for layer in 0..LAYERS {
            self.ring.enter(layer, 0, self.compute)?;
            wait(&self.device, self.compute)?;
            let window = self.ring.pulls().layer(layer)?;
            let mut bytes = vec![0; window.bytes() as usize];
            self.device.read(window, &mut bytes)?;
            self.ring.leave(layer, 0, self.compute)?;
            let plan = self.ring.pulls().plan();
            for rank in 0..RANKS {
                let part = plan.part(layer, rank).unwrap_or_default();
                let part = part.start * plan.grain()..part.end * plan.grain();
                let own = bytes[part.start as usize..part.end as usize].as_chunks().0;
                for (found, at) in own.iter().zip(part.step_by(8)) {
                    if u64::from_le_bytes(*found) != stamp(rank, layer, at) {
                        return Err(wrong(format!("layer {layer}, byte {at}: not rank {rank}'s")));
                    }
                    words += 1;
                }
            }
        }
        self.ring.end(self.compute)?;
        match (words == LAYERS as u64 * LAYER / 8, self.differ.load(Ordering::Relaxed)) {
            (true, 0) => Ok(words + self.read.load(Ordering::Relaxed)),
            (false, _) => Err(wrong("the parts are not the whole windows")),
            (true, others) => Err(wrong(format!("{others} words of timed steps were others"))),
        }
    }
}

/// Microseconds of a unit.
fn us(rounds: &Rounds, side: &str) -> f64 {
    1e6 / rounds.rate(side)
}

fn hidden(criterion: &mut Criterion, rank: Rank) -> Result<()> {
    let engine = Mutex::new(Engine::new(rank)?);
    let with = |work: &dyn Fn(&mut Engine) -> Result<(Duration, u64)>| {
        done(work(&mut engine.lock().unwrap_or_else(|poisoned| poisoned.into_inner())))
    };
    let pull = || with(&|engine| engine.pulls());
    let mut times: Vec<Duration> = (0..9).map(|_| pull()).map(|(time, pulls)| time / pulls as u32).collect();
    times.sort();
    let (long, short) = (2 * times[4], times[4] / 2);
    let steps = |time, sharded| move || with(&|engine| engine.steps(time, sharded));
    // The pull runs next to what it is compared with, since other programs take changing parts of the memory's speed.
    let mut sides = [
        Side::new("long resident", steps(long, false)),
        Side::new("long sharded", steps(long, true)),
        Side::new("short resident", steps(short, false)),
        Side::new("pull", pull),
        Side::new("short sharded", steps(short, true)),
    ];
    record(criterion, "ring", &mut sides);
    let rounds = race(25, &mut sides);
    drop(sides);
    let words = engine.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).compared()?;
    let [long, long_sharded, layer, pull] =
        ["long resident", "long sharded", "short resident", "pull"].map(|side| us(&rounds, side));
    println!("{words} words compared; a pull takes {pull:.0} us");
    println!("layers twice a pull: {long:.0} us resident, {long_sharded:.0} us sharded");
    let hidden = rounds.ratio("long sharded", "long resident");
    claim("resident against sharded, layers twice a pull", hidden, 1.0 / 1.03);
    // By the quotient of each round.
    let sharded = pull / rounds.ratio("short sharded", "pull");
    let (exposed, expected) = (sharded - layer, (pull - layer).max(0.0));
    println!(
        "layers half a pull: {layer:.0} us resident, {exposed:.0} us exposed, {expected:.0} us by the closed form"
    );
    let words = "exposed time and the closed form, layers half a pull: the less against the greater";
    claim(words, (exposed / expected).min(expected / exposed), 0.9);
    Ok(())
}

/// Steps of a ring that moves little, call by call on an inline device; in CPU time.
fn uses(ring: &mut Ring, micro_batches: usize, streams: &[Stream]) -> Result<(Duration, u64)> {
    let lap = Lap::begin();
    for _ in 0..COST_STEPS {
        ring.begin(micro_batches, 0)?;
        for layer in 0..COST_LAYERS {
            for (micro_batch, stream) in streams.iter().take(micro_batches).enumerate() {
                ring.enter(layer, micro_batch, *stream)?;
                ring.leave(layer, micro_batch, *stream)?;
            }
        }
        let [first, ..] = streams else { return Err(wrong("no stream")) };
        ring.end(*first)?;
    }
    Ok((lap.end(), (COST_STEPS * COST_LAYERS) as u64))
}

/// The pulls of as many steps, without the ring.
fn bare(ring: &Ring, stream: Stream) -> Result<(Duration, u64)> {
    let lap = Lap::begin();
    for _ in 0..COST_STEPS {
        (0..COST_LAYERS).try_for_each(|layer| ring.pulls().pull(layer, stream))?;
    }
    Ok((lap.end(), (COST_STEPS * COST_LAYERS) as u64))
}

fn cost(criterion: &mut Criterion, rank: Rank) -> Result<()> {
    let Rank { device, windows, stream } = rank;
    let base: Arc<dyn Device> = device.clone();
    let options = RingOptions { micro_batches: 2, ..RingOptions::default() };
    let ring = Mutex::new(Ring::new(&base, windows, options)?);
    let streams = [stream, device.stream()?];
    let locked = || ring.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut sides = [
        Side::new("one micro-batch", || done(uses(&mut locked(), 1, &streams))),
        Side::new("two micro-batches", || done(uses(&mut locked(), 2, &streams))),
        Side::new("pulls alone", || done(bare(&locked(), stream))),
    ];
    record(criterion, "ring's host cost", &mut sides);
    let rounds = race(41, &mut sides);
    let pulls = us(&rounds, "pulls alone");
    if pulls <= 0.0 {
        println!("the kernel counts no CPU time of this run: no figure of the host's cost");
        return Ok(());
    }
    println!("the pull alone: {pulls:.2} us of the host, with its copy of 8 KiB");
    for side in ["one micro-batch", "two micro-batches"] {
        let own = us(&rounds, side) - pulls;
        println!("{side}: {own:.2} us of the host a layer beside the pull");
        claim(&format!("2 us of the host against the ring's own, a layer, {side}"), MOST_US / own, 1.0);
    }
    Ok(())
}

fn both(criterion: &mut Criterion) -> Result<()> {
    let peer = Peer::start()?;
    let mut ranks = ranks(0)?;
    let links = shared(&mut ranks, &peer.folder)?;
    let [large, small] = ranks;
    cost(criterion, small)?;
    hidden(criterion, large)?;
    drop(links);
    Ok(())
}

fn main() {
    if let Ok(folder) = std::env::var(FOLDER) {
        return done(peer(Path::new(&folder)));
    }
    let mut criterion = Criterion::default().configure_from_args();
    let result = both(&mut criterion);
    done(result);
    criterion.final_summary();
}
