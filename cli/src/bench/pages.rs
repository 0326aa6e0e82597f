//! Measures copies of a dense cache's pages between pinned host memory and the device, either way.
//!
//! A call copies about the same bytes whatever the piece is, so a longer piece means fewer pages. Pages are contiguous,
//! scattered on both sides, or strided: contiguous, but with their pieces apart on the host, as in the layout page
//! first. The pieces of a page are one, or one for each of several layers, which are a plane each.
//!
//! A GPU copies by its copy engine or by a kernel, and `CudaOptions::copy_engine_bytes` is the piece from which on it
//! takes the engine. So the bench opens the GPU once for each way: with 0 every piece goes by the engine, a strided run
//! by one copy of two dimensions; with the most that the option allows, more than a call copies, every piece goes by
//! the kernel. The engine is measured twice: with its copies in batches of one driver call, and one by one
//! (`CudaOptions::batch_copies`). The ways run in turn, and the report names the piece at which engine and kernel
//! cross. The host has one way.
//!
//! The ceiling is one copy of as many bytes on the same device, between the same two memories, in turn with the pages.
//! A memcpy between two vectors of the process is shown beside it. Every copied byte is compared with its source, in a
//! copy after the last round: each figure has other bytes, so that none is left over from the one before.

use std::sync::Arc;
use std::time::Instant;

use forebay::Result;
use forebay::device::{CopyPages, PageOp, Plane, Slice};
use forebay::measure::{Ceilings, Probe};

use super::asked::Asked;
use super::host_memory::Memory;
use super::oracle::{Numbers, differs, mix};
use super::result::{Figure, Parameter, Spread, parameter};
use super::timer::Timer;
use crate::input::device::ProbeOptions;

/// Bytes of a piece; and in quick runs.
const PIECES: [u64; 7] = [4 << 10, 8 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10, 1 << 20];
const PIECES_QUICK: [u64; 3] = [4 << 10, 28 << 10, 256 << 10];
/// Bytes of a call, about; at least two pages.
const CALL: u64 = 32 << 20;
const CALL_QUICK: u64 = 1 << 20;
/// Planes of a call.
const PLANES: [u32; 2] = [1, 16];
/// Rounds before the timed ones.
const WARM_UP: u32 = 2;
/// Bytes written at a time.
const CHUNK: u64 = 1 << 20;
/// The option with which a GPU's pieces all go by the kernel: the most that it allows, and more than [`CALL`].
const NO_ENGINE: u64 = 64 << 20;

/// How a device copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Engine,
    /// The engine, with a driver call for each copy.
    OneByOne,
    Kernel,
    Host,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Way::Engine => "copy engine",
            Way::OneByOne => "one by one",
            Way::Kernel => "kernel",
            Way::Host => "host",
        }
    }

    /// The option that makes a GPU take this way.
    const fn copy_engine_bytes(self) -> Option<u64> {
        match self {
            Way::Engine | Way::OneByOne => Some(0),
            Way::Kernel => Some(NO_ENGINE),
            Way::Host => None,
        }
    }
}

/// Where a call's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Places {
    Contiguous,
    Scattered,
    Strided,
}

impl Places {
    const ALL: [Places; 3] = [Places::Contiguous, Places::Scattered, Places::Strided];

    const fn name(self) -> &'static str {
        match self {
            Places::Contiguous => "contiguous",
            Places::Scattered => "scattered",
            Places::Strided => "strided",
        }
    }
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

impl Direction {
    const fn name(self) -> &'static str {
        match self {
            Direction::Up => "to the device",
            Direction::Down => "to the host",
        }
    }
}

/// A call.
#[derive(Clone, Copy, Debug)]
struct Call {
    direction: Direction,
    places: Places,
    planes: u32,
    piece: u64,
    pages: u32,
}

impl Call {
    /// All calls, those that differ by the piece alone one after the other.
    fn all(quick: bool) -> Vec<Call> {
        let (pieces, bytes) = if quick { (&PIECES_QUICK[..], CALL_QUICK) } else { (&PIECES[..], CALL) };
        let mut all = Vec::new();
        for direction in [Direction::Up, Direction::Down] {
            for places in Places::ALL {
                for planes in PLANES {
                    all.extend(pieces.iter().map(|piece| {
                        let pages = (bytes / (piece * u64::from(planes))).max(2) as u32;
                        Call { direction, places, planes, piece: *piece, pages }
                    }));
                }
            }
        }
        all
    }

    fn bytes(&self) -> u64 {
        self.piece * u64::from(self.planes) * u64::from(self.pages)
    }

    /// Bytes of either memory: twice those of the call, for scattered pages and for gaps.
    fn room(&self) -> u64 {
        2 * self.bytes()
    }

    /// The pages to copy from and to. Of scattered ones no two touch each other.
    fn pages(&self) -> Vec<(u32, u32)> {
        match self.places {
            Places::Contiguous | Places::Strided => (0..self.pages).map(|page| (page, page)).collect(),
            Places::Scattered => {
                let mut numbers = Numbers::new(self.piece);
                let (from, to) = (numbers.shuffled(self.pages), numbers.shuffled(self.pages));
                from.into_iter().zip(to).map(|(from, to)| (2 * from, 2 * to)).collect()
            }
        }
    }

    /// The planes of a memory: each by itself, or, if `apart`, side by side in every page.
    fn side(&self, memory: Slice, apart: bool) -> Result<Vec<Plane>> {
        let (piece, pages) = (self.piece, u64::from(self.pages));
        let of = |plane: u64| {
            let (at, stride, bytes) = match apart {
                true => {
                    let stride = piece * u64::from(self.planes.max(2));
                    (plane * piece, stride, (pages - 1) * stride + piece)
                }
                false => (plane * 2 * pages * piece, piece, 2 * pages * piece),
            };
            Ok(Plane { memory: memory.part(at, bytes)?, stride, bytes: piece })
        };
        (0..u64::from(self.planes)).map(of).collect()
    }

    /// The planes to copy from and to.
    fn planes(&self, host: Slice, device: Slice) -> Result<Vec<(Plane, Plane)>> {
        let (host, device) = (self.side(host, self.places == Places::Strided)?, self.side(device, false)?);
        Ok(match self.direction {
            Direction::Up => host.into_iter().zip(device).collect(),
            Direction::Down => device.into_iter().zip(host).collect(),
        })
    }
}

/// A device that copies in one way, with memory on both sides: for pages, and for one copy.
struct Rig {
    way: Way,
    device: Arc<dyn Probe>,
    timer: Timer,
    host: Memory,
    room: Slice,
    /// Bytes for pages; those for one copy follow.
    pages: u64,
}

impl Rig {
    fn new(way: Way, device: Arc<dyn Probe>, calls: &[Call], quick: bool) -> Result<Rig> {
        let pages = calls.iter().map(Call::room).max().unwrap_or_default();
        let bytes = pages + pages / 2;
        let (timer, host) = (Timer::new(&device, quick)?, Memory::filled(&*device, bytes)?);
        let room = device.allocate(bytes)?;
        let rig = Rig { way, device, timer, host, room, pages };
        // No figure includes first touches.
        rig.fill(Direction::Down, 0, bytes)?;
        Ok(rig)
    }

    /// Fills the memory to copy from with words that no other seed has at their place.
    fn fill(&self, direction: Direction, seed: u64, bytes: u64) -> Result<()> {
        for at in (0..bytes).step_by(CHUNK as usize) {
            let words: Vec<u64> = (at..bytes.min(at + CHUNK)).step_by(8).map(|at| word(seed, at)).collect();
            match direction {
                Direction::Up => {
                    let words: Vec<u32> =
                        words.iter().flat_map(|word| [*word as u32, (word >> 32) as u32]).collect();
                    self.host.map.copy_in_words(at, &words)?;
                }
                Direction::Down => {
                    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    self.device.write(self.room.part(at, bytes.len() as u64)?, &bytes)?;
                }
            }
        }
        Ok(())
    }

    /// The words of the memory that was copied to.
    fn copied(&self, direction: Direction, bytes: u64) -> Result<Vec<u64>> {
        match direction {
            Direction::Up => {
                let mut copied = vec![0; bytes as usize];
                self.device.read(self.room.part(0, bytes)?, &mut copied)?;
                Ok(copied.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
            }
            Direction::Down => {
                let mut words = vec![0; bytes as usize / 4];
                self.host.map.copy_out_words(0, &mut words)?;
                let pairs = words.as_chunks().0.iter();
                Ok(pairs.map(|[low, high]: &[u32; 2]| u64::from(*high) << 32 | u64::from(*low)).collect())
            }
        }
    }

    /// Copies pages, and waits for them.
    fn copy(&self, copy: &CopyPages<'_>) -> Result<()> {
        self.device.enqueue_pages(self.timer.stream(), PageOp::Copy(*copy))?;
        self.timer.wait()
    }

    /// Compares every byte of a call's pages, which were copied, with its source. Returns the number of words.
    fn compared(&self, call: &Call, copy: &CopyPages<'_>, seed: u64) -> Result<u64> {
        let [host, device] = [self.host.slice.address(), self.room.address()];
        let [from, to] = match call.direction {
            Direction::Up => [host, device],
            Direction::Down => [device, host],
        };
        let words = self.copied(call.direction, call.room())?;
        let mut checked = 0;
        for (plane, (source, target)) in copy.planes.iter().enumerate() {
            for (page, (first, second)) in copy.pages.iter().enumerate() {
                let first = source.memory.address() - from + u64::from(*first) * source.stride;
                let second = target.memory.address() - to + u64::from(*second) * target.stride;
                for at in (0..call.piece).step_by(8) {
                    let (wanted, found) =
                        (word(seed, first + at), words.get(((second + at) / 8) as usize).copied());
                    if found != Some(wanted) {
                        let place = format!("plane {plane}, copy {page}, byte {at} of its piece");
                        return Err(differs(place, wanted, found.unwrap_or_default()));
                    }
                    checked += 1;
                }
            }
        }
        Ok(checked)
    }

    /// Microseconds of one copy of as many bytes.
    fn one_copy(&self, call: &Call) -> Result<f64> {
        let part = |memory: Slice| memory.part(self.pages, call.bytes());
        let (host, room) = (part(self.host.slice)?, part(self.room)?);
        let (from, to) = match call.direction {
            Direction::Up => (host, room),
            Direction::Down => (room, host),
        };
        self.timer.time(|stream| self.device.copy(stream, from, to))
    }
}

/// The word at a byte of the memory to copy from.
fn word(seed: u64, at: u64) -> u64 {
    mix((seed << 40) | (at / 8))
}

/// The times of a way.
#[derive(Default)]
struct Times {
    pages: Vec<f64>,
    /// The host's, in the call.
    call: Vec<f64>,
}

/// Figures of a call, one for each way. `vectors` hold as many bytes at least.
fn figures(
    rigs: &[Rig],
    asked: &Asked,
    call: &Call,
    seed: u64,
    vectors: &mut [Vec<u8>; 2],
) -> Result<Vec<Figure>> {
    let pages = call.pages();
    let mut planes = Vec::new();
    for rig in rigs {
        rig.fill(call.direction, seed, call.room())?;
        planes.push(call.planes(rig.host.slice, rig.room)?);
    }
    let mut times: Vec<Times> = rigs.iter().map(|_| Times::default()).collect();
    let (mut copies, mut memcpys) = (Vec::new(), Vec::new());
    for round in 0..asked.rounds + WARM_UP {
        let timed = round >= WARM_UP;
        for ((rig, planes), times) in rigs.iter().zip(&planes).zip(&mut times) {
            let (mut spent, op) = (0.0, PageOp::Copy(CopyPages { planes, pages: &pages }));
            let us = rig.timer.time(|stream| {
                let begun = Instant::now();
                rig.device.enqueue_pages(stream, op)?;
                spent = begun.elapsed().as_secs_f64() * 1e6;
                Ok(())
            })?;
            if timed {
                times.pages.push(us);
                times.call.push(spent);
            }
        }
        let one = rigs.first().map_or(Ok(0.0), |rig| rig.one_copy(call))?;
        let memcpy = memcpy(vectors, call.bytes() as usize);
        if timed {
            copies.push(one);
            memcpys.push(memcpy);
        }
    }
    let ceiling = ("one copy", Spread::of(copies).us);
    let memcpy = Spread::of(memcpys).us;
    let mut figures = Vec::new();
    for ((rig, planes), times) in rigs.iter().zip(&planes).zip(times) {
        let copy = CopyPages { planes, pages: &pages };
        rig.copy(&copy)?;
        let checked = rig.compared(call, &copy, seed)?;
        let mut figure = Figure::new("pages", call.direction.name(), times.pages, ceiling, checked)
            .with("piece", Parameter::Bytes(call.piece))
            .with("planes", call.planes)
            .with("pages", call.pages)
            .with("places", call.places.name())
            .with("way", rig.way.name());
        figure.bytes = Some(call.bytes());
        figure.beside = vec![("memcpy", memcpy)];
        if rig.way != Way::Host {
            figure.beside.push(("the host's call", Spread::of(times.call).us));
        }
        asked.progress.inc(1);
        figures.push(asked.known(figure)?);
    }
    Ok(figures)
}

/// Microseconds of a memcpy between two vectors.
fn memcpy([from, to]: &mut [Vec<u8>; 2], bytes: usize) -> f64 {
    let begun = Instant::now();
    if let (Some(to), Some(from)) = (to.get_mut(..bytes), from.get(..bytes)) {
        to.copy_from_slice(from);
    }
    std::hint::black_box(&to);
    begun.elapsed().as_secs_f64() * 1e6
}

/// Copies of pages, of all pieces, places and numbers of planes, both ways.
///
/// # Errors
/// Errors of the device, of memory, and of a byte that differs.
pub fn pages(device: &Arc<dyn Probe>, _: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let calls = Call::all(asked.quick);
    let new = |way: Way, device| Rig::new(way, device, &calls, asked.quick);
    let forced = |way: Way| {
        let (copy_engine_bytes, batch_copies) = (way.copy_engine_bytes(), way != Way::OneByOne);
        let options = ProbeOptions { copy_engine_bytes, batch_copies, ..asked.options };
        new(way, asked.target.probe(options)?)
    };
    let rigs = match device.facts()?.gpu {
        Some(_) => vec![forced(Way::Engine)?, forced(Way::OneByOne)?, forced(Way::Kernel)?],
        None => vec![new(Way::Host, Arc::clone(device))?],
    };
    asked.progress.inc_length((calls.len() * rigs.len()) as u64);
    let most = calls.iter().map(Call::bytes).max().unwrap_or_default() as usize;
    let mut vectors = [vec![1; most], vec![2; most]];
    let mut all = Vec::new();
    for (call, seed) in calls.iter().zip(1..) {
        all.extend(figures(&rigs, asked, call, seed, &mut vectors)?);
    }
    Ok(all)
}

/// Where the ways of copying pages cross, a line for each kind of call; none without two ways.
pub fn crossings(figures: &[Figure]) -> Option<String> {
    let of_way = |figure: &&Figure, way: Way| parameter(figure, "way") == way.name();
    let kind = |figure: &Figure| {
        (figure.name.clone(), parameter(figure, "places"), figure.number("planes").unwrap_or_default() as u32)
    };
    let engine: Vec<&Figure> =
        figures.iter().filter(|figure| figure.group == "pages" && of_way(figure, Way::Engine)).collect();
    let line = |engine: &[&Figure]| {
        let first = engine.first()?;
        let (name, places, planes) = kind(first);
        let faster = |engine: &&&Figure| {
            let same = |other: &&Figure| {
                kind(other) == kind(engine) && parameter(other, "piece") == parameter(engine, "piece")
            };
            let kernel = figures.iter().filter(|figure| of_way(figure, Way::Kernel)).find(same);
            kernel.is_none_or(|kernel| engine.us <= kernel.us)
        };
        let ahead = engine.iter().rev().take_while(faster).count();
        let from = match engine.len() - ahead {
            0 => "all".to_owned(),
            at => match engine.get(at) {
                Some(figure) => format!("from {} on", parameter(figure, "piece")),
                None => "not the longest".to_owned(),
            },
        };
        let planes = if planes == 1 { "1 plane".to_owned() } else { format!("{planes} planes") };
        Some(format!("\n  {name}, {places}, {planes}: {from}"))
    };
    let lines: String = engine.chunk_by(|a, b| kind(a) == kind(b)).filter_map(line).collect();
    (!lines.is_empty()).then(|| {
        format!("Pieces of pages that the copy engine copies at least as fast as the kernel:{lines}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::host::{HostDevice, HostOptions};

    fn call(direction: Direction, places: Places) -> Call {
        Call { direction, places, planes: 3, piece: 4096, pages: 5 }
    }

    #[test]
    fn bytes_of_another_page_give_no_figure() {
        for direction in [Direction::Up, Direction::Down] {
            for places in Places::ALL {
                let call = call(direction, places);
                let device: Arc<dyn Probe> = HostDevice::new(HostOptions::default());
                let rig = Rig::new(Way::Host, device, &[call], true).unwrap();
                rig.fill(direction, 1, call.room()).unwrap();
                let planes = call.planes(rig.host.slice, rig.room).unwrap();
                let pages = call.pages();
                let copy = |pages| CopyPages { planes: &planes, pages };
                rig.copy(&copy(&pages)).unwrap();
                assert_eq!(rig.compared(&call, &copy(&pages), 1), Ok(call.bytes() / 8));
                let place = |error: forebay::Error| error.place().to_owned();
                let error = rig.compared(&call, &copy(&pages), 2).unwrap_err();
                assert_eq!(place(error), "plane 0, copy 0, byte 0 of its piece");
                // The last page comes from where the one before does.
                let mut wrong = pages.clone();
                wrong[4].0 = pages[3].0;
                rig.copy(&copy(&wrong)).unwrap();
                let error = rig.compared(&call, &copy(&pages), 1).unwrap_err();
                assert_eq!(place(error), "plane 0, copy 4, byte 0 of its piece");
            }
        }
    }

    #[test]
    fn no_two_scattered_pages_touch_each_other() {
        let pages = Call { pages: 64, ..call(Direction::Up, Places::Scattered) }.pages();
        let sorted = |side: fn(&(u32, u32)) -> u32| {
            let mut side: Vec<u32> = pages.iter().map(side).collect();
            assert!(!side.is_sorted());
            side.sort_unstable();
            side
        };
        let wanted: Vec<u32> = (0..64).map(|page| 2 * page).collect();
        assert_eq!([sorted(|page| page.0), sorted(|page| page.1)], [wanted.clone(), wanted]);
    }

    #[test]
    fn ways_cross_at_the_piece_from_which_on_the_engine_is_not_slower() {
        let figure = |name: &str, piece: u64, way: Way, us: f64| {
            Figure::new("pages", name, vec![us], ("one copy", 1.0), 1)
                .with("piece", Parameter::Bytes(piece))
                .with("planes", 16_u32)
                .with("places", "scattered")
                .with("way", way.name())
        };
        let figures = |name, times: [(f64, f64); 3]| -> Vec<Figure> {
            let pieces = [4096, 8192, 65536].into_iter().zip(times);
            let both = |(piece, (engine, kernel))| {
                [figure(name, piece, Way::Engine, engine), figure(name, piece, Way::Kernel, kernel)]
            };
            pieces.flat_map(both).collect()
        };
        let all = [
            // Once ahead by chance is not ahead.
            figures("a", [(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)]),
            figures("b", [(1.0, 2.0); 3]),
            figures("c", [(1.0, 2.0), (1.0, 2.0), (3.0, 2.0)]),
        ];
        let text = crossings(&all.concat()).unwrap();
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  a, scattered, 16 planes: from 64.0 KiB on",
                "  b, scattered, 16 planes: all",
                "  c, scattered, 16 planes: not the longest",
            ]
        );
        assert_eq!(crossings(&[figure("a", 4096, Way::Host, 1.0)]), None);
    }
}
