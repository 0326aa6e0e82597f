//! Measures what a prefetch of a window's beginning spares the work that reads it, on a GPU.
//!
//! The work copies the window by processors. Before each of its runs the timer empties the caches; then nothing, a
//! prefetch, or the same copy comes before it. So the ceiling is a window that was read just before, as far as L2 has
//! room for it and its copy, and beside it is the time from memory. A copy writes as many bytes as it reads, and a
//! prefetch spares the reads alone.
//!
//! The prefetch asks for half of what the memory moves. Beside the figure is how long it takes, and how long its rate
//! says at least: if it takes less, the bound does not hold.

use std::sync::Arc;

use forebay::Result;
use forebay::device::Stream;
use forebay::measure::{Ceilings, Probe};

use super::asked::Asked;
use super::oracle::differs;
use super::result::{Figure, Parameter, Spread};
use super::timer::Timer;

/// Bytes of the window, and in quick runs: with the copy less than the L2 of every GPU since 8.0 of 40 MB or more.
const WINDOW: u64 = 12 << 20;
const WINDOW_QUICK: u64 = 1 << 18;
/// Thread blocks of the work.
const BLOCKS: u32 = 256;
/// Rounds before the timed ones.
const WARM_UP: u32 = 2;

/// The figure.
///
/// # Errors
/// Errors of the device, and of a byte that differs.
pub fn figure(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Figure> {
    let bytes = if asked.quick { WINDOW_QUICK } else { WINDOW };
    let rate = (ceilings.memory / 2.0).max(1.0) as u64;
    let timer = Timer::new(device, asked.quick)?;
    let (from, to) = (device.mark()?, device.mark()?);
    let (window, copy) = (device.allocate(bytes)?, device.allocate(bytes)?);
    let filled: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect();
    device.write(window, &filled)?;
    let reads = |stream: Stream| device.carry(stream, window, copy, BLOCKS);
    let prefetches = |stream: Stream| device.prefetch(stream, window, rate);
    let behind = |before: &dyn Fn(Stream) -> Result<()>| {
        timer.time(|stream| {
            before(stream)?;
            device.stamp(from, stream)?;
            reads(stream)?;
            device.stamp(to, stream)
        })?;
        device.elapsed_us(from, to)
    };
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..asked.rounds + WARM_UP {
        let us = [behind(&prefetches)?, behind(&reads)?, behind(&|_| Ok(()))?, timer.time(prefetches)?];
        if round >= WARM_UP {
            times.iter_mut().zip(us).for_each(|(times, us)| times.push(us));
        }
    }
    let mut found = vec![0; bytes as usize];
    device.read(copy, &mut found)?;
    if let Some((at, (found, wanted))) = found.iter().zip(&filled).enumerate().find(|(_, (a, b))| a != b) {
        let place = format!("byte {at} of a window behind a prefetch");
        return Err(differs(place, u64::from(*wanted), u64::from(*found)));
    }
    let [ahead, again, memory, prefetch] = times;
    let ceiling = ("read just before", Spread::of(again).us);
    let mut figure = Figure::new("pull", "behind a prefetch", ahead, ceiling, bytes)
        .with("window", Parameter::Bytes(bytes))
        .with("prefetch GB/s", rate as f64 / 1e9);
    figure.bytes = Some(bytes);
    figure.beside = vec![
        ("from memory", Spread::of(memory).us),
        ("the prefetch", Spread::of(prefetch).us),
        ("at its rate", bytes as f64 / rate as f64 * 1e6),
    ];
    asked.progress.inc(1);
    asked.known(figure)
}
