//! Measures pulls of sharded weights: the time until a layer's window is whole.
//!
//! Two ranks share two layers, each as large as the o_proj of DeepSeek-R1 in FP8 (7168 x 16384 bytes), and one of them
//! pulls the two in turn. Both ranks are on the measured device, so on a GPU a peer's memory is the GPU's own: the
//! figure shows what cutting and enqueueing cost next to one copy, and no link between GPUs. From the host the bytes
//! come over the GPU's link.
//!
//! The ceiling is one copy of the same bytes between memory of the same kind, in turn with the pulls. Every byte of
//! both windows is compared with what its owner filled, after the last round.
//!
//! The last figure is the host's time for a layer that becomes resident, and sharded again: new memory, one pull, and
//! mappings. Its ceiling is the pull in it.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay::device::{Device, Mapped, Slice, Stream};
use forebay::measure::{Ceilings, Probe};
use forebay::os::{Faults, NoFaults, Protection};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Patterns, Plan, Pulls, Sharding, Source, Tensor, Windows};
use forebay::{Error, Kind, Result};

use super::ahead;
use super::asked::Asked;
use super::oracle::differs;
use super::result::{Figure, Parameter, Spread};
use super::timer::Timer;

/// Bytes of a layer, and in quick runs.
const LAYER: u64 = 7168 * 16384;
const LAYER_QUICK: u64 = 1 << 20;
const LAYERS: usize = 2;
const RANKS: u32 = 2;
const NAME: &str = "o_proj";
/// Rounds before the timed ones.
const WARM_UP: u32 = 2;
/// How long the ranks may take to share. Both are threads of this process.
const PATIENCE: Duration = Duration::from_secs(60);

/// The word at a place of a layer that a rank filled.
fn word(rank: u32, layer: usize, at: u64) -> u64 {
    (u64::from(rank) << 48 | (layer as u64) << 32 | (at / 8)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Bytes of a layer on a device.
pub fn layer_bytes(device: &dyn Probe, quick: bool) -> u64 {
    let grain = device.granularity();
    if quick { LAYER_QUICK.next_multiple_of(2 * grain) } else { LAYER }
}

fn words(rank: u32, layer: usize, bytes: u64) -> Vec<u8> {
    (0..bytes).step_by(8).flat_map(|at| word(rank, layer, at).to_le_bytes()).collect()
}

/// The windows of a rank, filled: so many layers, each as large as the buffer that they are filled from.
pub fn filled(
    device: &Arc<dyn Probe>,
    rank: u32,
    source: Source,
    pulls: Pulls,
    (layers, buffer): (usize, Slice),
    stream: Stream,
) -> Result<Windows> {
    let (bytes, align) = (buffer.bytes(), 256);
    let tensors = vec![vec![Tensor { name: NAME.to_owned(), bytes, align }]; layers];
    let patterns = Patterns::new(&[NAME])?;
    let sharding = Sharding { source, grain: device.granularity(), ..Sharding::new(patterns) };
    let plan = Plan::new(&tensors, Group { id: 0, rank, ranks: RANKS }, &sharding)?;
    let (base, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (Arc::clone(device) as _, Arc::new(NoFaults));
    let mut windows = Windows::new(&base, plan, pulls, &faults)?;
    for layer in 0..layers {
        device.write(buffer, &words(rank, layer, bytes))?;
        windows.fill(layer, NAME, buffer, stream)?;
        wait(&**device, stream)?;
    }
    Ok(windows)
}

/// Waits for everything enqueued on the stream.
pub fn wait(device: &dyn Probe, stream: Stream) -> Result<()> {
    let event = device.event()?;
    device.record(event, stream)?;
    device.synchronize(event)
}

/// Both ranks give each other their parts.
pub fn share(ranks: [&mut Windows; 2], stream: Stream) -> Result<()> {
    let failed = |error: std::io::Error| Error::new(Kind::Io, "bench").at(forebay::os::io_text(&error));
    let (a, b) = UnixStream::pair().map_err(failed)?;
    let results = thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .zip([a, b])
            .map(|(windows, socket)| {
                scope.spawn(move || {
                    let hello = windows.hello([0; 32], stream)?;
                    let faults: Arc<dyn Faults> = Arc::new(NoFaults);
                    let mut links = Links::over(vec![socket], hello, Limits::default(), faults)?;
                    windows.share(&mut links, stream, PATIENCE).map(|()| links)
                })
            })
            .collect();
        // Both sessions live until both ranks have shared.
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    for result in results {
        result.map_err(|_| Error::new(Kind::InvalidState, "bench").at("a rank's thread ended early"))??;
    }
    Ok(())
}

/// Two stretches of memory of the same kind as parts and buffers.
fn stretches(device: &dyn Probe, bytes: u64) -> Result<[Slice; 2]> {
    let make = || {
        let backing = device.backing(bytes)?;
        device.range(&[Mapped { backing, offset: 0, bytes }], Protection::ReadWrite)
    };
    Ok([make()?, make()?])
}

/// Compares every byte of a layer's window with what its owner filled. Returns the number of words.
pub fn compared(device: &dyn Probe, windows: &Windows, source: Source, layer: usize) -> Result<u64> {
    let own = windows.plan().group().rank;
    let window = windows.tensor(layer, NAME)?;
    let mut bytes = vec![0; window.bytes() as usize];
    device.read(window, &mut bytes)?;
    let parts: Vec<_> = (0..RANKS).map(|rank| windows.plan().part(layer, rank).unwrap_or_default()).collect();
    let grain = windows.plan().grain();
    let mut checked = 0;
    for (found, at) in bytes.as_chunks().0.iter().zip((0..).step_by(8)) {
        let owner = match source {
            Source::Host => own,
            Source::Peers => {
                (0..RANKS).zip(&parts).find(|(_, part)| part.contains(&(at / grain))).map_or(0, |it| it.0)
            }
        };
        let (found, wanted) = (u64::from_le_bytes(*found), word(owner, layer, at));
        if found != wanted {
            return Err(differs(format!("layer {layer}, byte {at} of its window"), wanted, found));
        }
        checked += 1;
    }
    Ok(checked)
}

/// Pulls every layer and compares its window. Returns the number of words.
fn all_compared(device: &dyn Probe, windows: &Windows, source: Source, stream: Stream) -> Result<u64> {
    let one = |layer| {
        windows.pull(layer, stream)?;
        wait(device, stream)?;
        compared(device, windows, source, layer)
    };
    (0..LAYERS).map(one).sum()
}

/// One figure: the pulls of a rank, in turn with single copies of as many bytes.
fn figure(
    device: &Arc<dyn Probe>,
    ceilings: &Ceilings,
    asked: &Asked,
    source: Source,
    slice: Option<u64>,
) -> Result<Figure> {
    let layer = layer_bytes(&**device, asked.quick);
    let timer = Timer::new(device, asked.quick)?;
    let (stream, buffer) = (timer.stream(), device.allocate(layer)?);
    let pulls = slice.map_or(Pulls { copy: u64::MAX }, |copy| Pulls { copy });
    let make = |rank| filled(device, rank, source, pulls, (LAYERS, buffer), stream);
    let mut windows = make(0)?;
    match source {
        Source::Host => (),
        Source::Peers => share([&mut windows, &mut make(1)?], stream)?,
    }
    let bytes = windows.plan().layers().first().map_or(0, |layer| windows.plan().pulled(layer));
    let [from, to] = stretches(&**device, bytes)?;
    let (mut times, mut copies) = (Vec::new(), Vec::new());
    for round in 0..asked.rounds + WARM_UP {
        let us = timer.time(|stream| windows.pull(round as usize % LAYERS, stream))?;
        let copy = timer.time(|stream| device.copy(stream, from, to))?;
        if round >= WARM_UP {
            times.push(us);
            copies.push(copy);
        }
    }
    let checked = all_compared(&**device, &windows, source, stream)?;
    let gpu = device.facts()?.gpu.is_some();
    let ceiling = match source {
        Source::Host if gpu => ("copy engine", bytes as f64 / ceilings.copy_up * 1e6),
        _ => ("one copy", Spread::of(copies).us),
    };
    let name = match source {
        Source::Peers => "from a peer",
        Source::Host => "from the host",
    };
    let mut figure = Figure::new("pull", name, times, ceiling, checked)
        .with("layer", Parameter::Bytes(layer))
        .with("copies", windows.copies(0)? as u32);
    figure.bytes = Some(bytes);
    asked.progress.inc(1);
    asked.known(figure)
}

/// One figure: a layer that becomes resident and sharded again, in turn with its pull.
fn switched(device: &Arc<dyn Probe>, asked: &Asked) -> Result<Figure> {
    let layer = layer_bytes(&**device, asked.quick);
    let timer = Timer::new(device, asked.quick)?;
    let (stream, buffer) = (timer.stream(), device.allocate(layer)?);
    let make = |rank| filled(device, rank, Source::Peers, Pulls::default(), (LAYERS, buffer), stream);
    let mut windows = make(0)?;
    share([&mut windows, &mut make(1)?], stream)?;
    let us = |start: Instant| start.elapsed().as_secs_f64() * 1e6;
    let (mut resident, mut sharded, mut pulls) = (Vec::new(), Vec::new(), Vec::new());
    let mut checked = 0;
    for round in 0..asked.rounds + WARM_UP {
        let pull = timer.time(|stream| windows.pull(0, stream))?;
        let start = Instant::now();
        windows.make_resident(0, stream)?;
        let made = us(start);
        if round == 0 {
            // The other layer takes the buffer, which the resident one must not show.
            windows.pull(1, stream)?;
            wait(&**device, stream)?;
            checked += compared(&**device, &windows, Source::Peers, 0)?;
        }
        let start = Instant::now();
        windows.make_sharded(0)?;
        if round >= WARM_UP {
            sharded.push(us(start));
            resident.push(made);
            pulls.push(pull);
        }
    }
    checked += all_compared(&**device, &windows, Source::Peers, stream)?;
    let ceiling = ("the pull", Spread::of(pulls).us);
    let mut figure = Figure::new("pull", "made resident", resident, ceiling, checked)
        .with("layer", Parameter::Bytes(layer))
        .with("copies", windows.copies(0)? as u32);
    figure.beside = vec![("sharded again", Spread::of(sharded).us)];
    asked.progress.inc(1);
    asked.known(figure)
}

/// The pulls: from a peer in slices and in one piece, and from the host; and a layer that becomes resident. On a GPU
/// also a window behind a prefetch.
///
/// # Errors
/// Errors of the device, of memory, and of a byte that differs.
pub fn pull(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let slice = Some(Pulls::default().copy);
    let gpu = device.facts()?.gpu.is_some();
    asked.progress.inc_length(4 + u64::from(gpu));
    [(Source::Peers, slice), (Source::Peers, None), (Source::Host, slice)]
        .into_iter()
        .map(|(source, slice)| figure(device, ceilings, asked, source, slice))
        .chain([switched(device, asked)])
        .chain(gpu.then(|| ahead::figure(device, ceilings, asked)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::host::{HostDevice, HostOptions};

    #[test]
    fn bytes_of_another_rank_than_the_owner_give_no_figure() {
        let device: Arc<dyn Probe> = HostDevice::new(HostOptions::default());
        let (stream, layer) = (device.stream().unwrap(), 4 * device.granularity());
        let buffer = device.allocate(layer).unwrap();
        let make =
            |rank| filled(&device, rank, Source::Peers, Pulls::default(), (LAYERS, buffer), stream).unwrap();
        let (mut first, mut second) = (make(0), make(1));
        share([&mut first, &mut second], stream).unwrap();
        let words = layer / 8 * LAYERS as u64;
        for windows in [&first, &second] {
            assert_eq!(all_compared(&*device, windows, Source::Peers, stream), Ok(words));
        }
        let error = compared(&*device, &second, Source::Host, 0).unwrap_err();
        assert_eq!(error.place(), "layer 0, byte 0 of its window");
    }
}
