//! [`Probe`] for the host device: times by the system's clock, long runs by one memcpy, matrix products in plain
//! Rust.

use std::hint::black_box;
use std::time::Instant;

use super::errors::unknown;
use super::{HostDevice, Stamped};
use crate::device::probe::{Ability, Facts, Mark, Probe};
use crate::device::{Device, Slice, Stream};
use crate::error::Result;
use crate::os;
use crate::sync::{Arc, Mutex};

/// Rows and columns of the product that one round makes.
const SIDE: usize = 32;

/// One round of an engine's work.
fn product(a: &[[f32; SIDE]; SIDE], b: &[[f32; SIDE]; SIDE]) -> [[f32; SIDE]; SIDE] {
    let mut c = [[0.0; SIDE]; SIDE];
    for (row, out) in a.iter().zip(&mut c) {
        for (scale, line) in row.iter().zip(b) {
            for (sum, value) in out.iter_mut().zip(line) {
                *sum += scale * value;
            }
        }
    }
    c
}

impl HostDevice {
    fn stamped(&self, mark: Mark) -> Result<Stamped> {
        let marks = self.marks.lock();
        let found = usize::try_from(mark.0).ok().and_then(|place| marks.get(place));
        found.cloned().ok_or_else(|| unknown("mark", mark.0))
    }

    fn time(&self, mark: Mark) -> Result<Instant> {
        let stamped = self.stamped(mark)?;
        self.synchronize(stamped.reached)?;
        let time = *stamped.time.lock();
        time.ok_or_else(|| unknown("mark that was not stamped", mark.0))
    }
}

impl Probe for HostDevice {
    fn facts(&self) -> Result<Facts> {
        let (memory_total, memory_free) = os::memory();
        Ok(Facts {
            name: os::processor(),
            memory_total,
            memory_free,
            processors: os::threads(),
            copy_engines: 0,
            gpu: None,
        })
    }

    fn abilities(&self) -> Vec<Ability> {
        Vec::new()
    }

    fn mark(&self) -> Result<Mark> {
        let stamped = Stamped { reached: self.event()?, time: Arc::new(Mutex::new(None)) };
        let mut marks = self.marks.lock();
        marks.push(stamped);
        Ok(Mark(marks.len() as u64 - 1))
    }

    fn stamp(&self, mark: Mark, stream: Stream) -> Result<()> {
        let stamped = self.stamped(mark)?;
        let time = Arc::clone(&stamped.time);
        self.call(stream, Arc::new(move || *time.lock() = Some(Instant::now())))?;
        self.record(stamped.reached, stream)
    }

    fn elapsed_us(&self, from: Mark, to: Mark) -> Result<f64> {
        let (from, to) = (self.time(from)?, self.time(to)?);
        Ok(to.saturating_duration_since(from).as_nanos() as f64 / 1e3)
    }

    fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()> {
        HostDevice::read(self, slice, bytes)
    }

    fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()> {
        HostDevice::write(self, slice, bytes)
    }

    fn carry(&self, stream: Stream, from: Slice, to: Slice, _blocks: u32) -> Result<()> {
        let all = from.address() | to.address() | from.bytes();
        match all.is_multiple_of(16) {
            true => self.copy(stream, from, to),
            false => Err(unknown("run that is not a multiple of 16 bytes", from.bytes())),
        }
    }

    fn compute(&self, stream: Stream, rounds: u32) -> Result<()> {
        self.call(
            stream,
            Arc::new(move || {
                let (a, mut b) = ([[0.999; SIDE]; SIDE], [[1.0 / SIDE as f32; SIDE]; SIDE]);
                for _ in 0..rounds {
                    b = product(black_box(&a), black_box(&b));
                }
                black_box(&b);
            }),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::HostOptions;
    use crate::error::Kind;

    #[test]
    fn marks_tell_the_time_between_them_on_streams_of_either_kind() {
        for threaded in [false, true] {
            let device = HostDevice::new(HostOptions { threaded, ..HostOptions::default() });
            let stream = device.stream().unwrap();
            let (a, b, c) = (device.mark().unwrap(), device.mark().unwrap(), device.mark().unwrap());
            device.stamp(a, stream).unwrap();
            device.compute(stream, 1).unwrap();
            device.stamp(b, stream).unwrap();
            device.compute(stream, 2000).unwrap();
            device.stamp(c, stream).unwrap();
            let (short, long) = (device.elapsed_us(a, b).unwrap(), device.elapsed_us(a, c).unwrap());
            assert!(0.0 <= short && short < long, "{short} {long}");
            assert_eq!(device.elapsed_us(c, a).unwrap(), 0.0);
        }
    }

    #[test]
    fn a_mark_that_was_never_stamped_or_does_not_exist_is_refused() {
        let device = HostDevice::new(HostOptions::default());
        let mark = device.mark().unwrap();
        for (from, to) in [(mark, mark), (Mark(7), mark)] {
            assert_eq!(device.elapsed_us(from, to).unwrap_err().kind(), Kind::OutOfRange);
        }
    }

    #[test]
    fn a_run_is_copied_whole_and_only_in_words_of_16_bytes() {
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream().unwrap();
        let (from, to) = (device.allocate(64).unwrap(), device.allocate(64).unwrap());
        let bytes: Vec<u8> = (1..=64).collect();
        device.write(from, &bytes).unwrap();
        device.carry(stream, from, to, 3).unwrap();
        let mut read = vec![0; 64];
        Probe::read(&*device, to, &mut read).unwrap();
        assert_eq!(read, bytes);
        for (offset, count) in [(8, 16), (0, 24)] {
            let part = |slice: Slice| slice.part(offset, count).unwrap();
            assert!(device.carry(stream, part(from), part(to), 1).is_err(), "{offset} {count}");
        }
    }

    #[test]
    fn products_are_products() {
        let (mut a, mut b) = ([[0.0; SIDE]; SIDE], [[0.0; SIDE]; SIDE]);
        (a[3][5], a[3][6], b[5][9], b[6][9]) = (2.0, 3.0, 7.0, 11.0);
        let c = product(&a, &b);
        assert_eq!((c[3][9], c[3][8], c[4][9]), (47.0, 0.0, 0.0));
    }
}
