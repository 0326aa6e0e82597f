//! A device's memory and pinned memory, with a model of both as arrays of bytes.

use std::sync::Arc;

use forebay::device::clock::{ClockDevice, ClockOptions};
#[cfg(feature = "cuda")]
use forebay::device::cuda::CudaOptions;
use forebay::device::host::HostOptions;
use forebay::device::{Device, Event, PageOp, Slice, Stream};
use forebay::os::{Map, NoFaults, Request};
use proptest::prelude::ProptestConfig;

use crate::device::TestDevice;

/// The memories.
pub const DEVICE: usize = 0;
pub const PINNED: usize = 1;

/// Bytes of each memory.
pub const BYTES: usize = 1 << 16;

/// Bytes of a registration.
const PAGE: usize = 4096;

/// A place in one of the memories.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub side: usize,
    pub at: usize,
    pub bytes: usize,
}

impl At {
    /// Its parts in pages of 4 KiB: no test's access crosses the end of a registration.
    fn parts(self) -> impl Iterator<Item = At> {
        let end = self.at + self.bytes;
        (self.at / PAGE..end.div_ceil(PAGE)).map(move |page| {
            let at = self.at.max(page * PAGE);
            At { at, bytes: end.min((page + 1) * PAGE) - at, ..self }
        })
    }

    /// The place of 4-byte word `index`.
    pub fn word(self, index: usize) -> std::ops::Range<usize> {
        assert!(4 * index + 4 <= self.bytes);
        self.at + 4 * index..self.at + 4 * index + 4
    }
}

/// Both memories as the model has them.
pub type Model = [Vec<u8>; 2];

/// A word of the model.
pub fn word(model: &Model, at: At, index: usize) -> i32 {
    i32::from_le_bytes(model[at.side][at.word(index)].try_into().unwrap())
}

pub fn set_word(model: &mut Model, at: At, index: usize, value: u32) {
    model[at.side][at.word(index)].copy_from_slice(&value.to_le_bytes());
}

/// Devices that all run the same cases.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Inline,
    Threaded,
    /// A clock over an inline device, with this seed.
    Clocked(u64),
    #[cfg(feature = "check")]
    Watched,
    /// The CUDA device, with this seed of its stand-in, and from how many bytes on copy engines copy.
    #[cfg(feature = "cuda")]
    Cuda(Option<u64>, u64),
}

pub struct World {
    device: Arc<TestDevice>,
    /// What operations are enqueued on.
    pub queue: Arc<dyn Device>,
    pub stream: Stream,
    event: Event,
    memory: [Slice; 2],
    taken: [usize; 2],
    pub model: Model,
}

impl World {
    /// A world whose memory is full of other bytes; none where there is no such device.
    pub fn new(kind: Kind) -> Option<World> {
        let inline = || TestDevice::host(HostOptions::default());
        let (device, queue): (_, Option<Arc<dyn Device>>) = match kind {
            Kind::Inline => (inline(), None),
            Kind::Threaded => {
                (TestDevice::new(HostOptions { threaded: true, ..HostOptions::default() }), None)
            }
            Kind::Clocked(seed) => {
                let device = inline();
                let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
                let clock = ClockDevice::over(device.device(), options).unwrap();
                (device, Some(clock))
            }
            #[cfg(feature = "check")]
            Kind::Watched => {
                let device = inline();
                let watch = forebay::check::watch::Watch::new(device.device());
                (device, Some(watch))
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda(seed, copy_engine_bytes) => {
                // Registrations of a page each, so that planes cross their ends.
                let own = CudaOptions {
                    copy_engine_bytes,
                    registration_chunk: PAGE as u64,
                    ..CudaOptions::default()
                };
                (TestDevice::cuda_with(&HostOptions::default(), seed, own)?, None)
            }
        };
        let queue = queue.unwrap_or_else(|| device.device());
        let bytes = BYTES as u64;
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: false };
        let pinned = queue.register(&Arc::new(Map::new(&request, &NoFaults).unwrap().0)).unwrap();
        let memory = [queue.allocate(bytes).unwrap(), pinned.part(0, bytes).unwrap()];
        let mut seed = 1_u32;
        let (stream, event) = (queue.stream().unwrap(), queue.event().unwrap());
        let model = [vec![0; BYTES], vec![0; BYTES]];
        let mut world = World { device, queue, stream, event, memory, taken: [64; 2], model };
        for side in [DEVICE, PINNED] {
            let byte = |_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 24) as u8
            };
            let bytes: Vec<u8> = (0..BYTES).map(byte).collect();
            world.write(At { side, at: 0, bytes: BYTES }, &bytes);
        }
        Some(world)
    }

    /// A place of its own, with some bytes before and after it.
    pub fn take(&mut self, side: usize, bytes: usize, align: usize) -> At {
        let at = (self.taken[side] + 12).next_multiple_of(align);
        self.taken[side] = at + bytes;
        assert!(at + bytes <= BYTES, "the memory is too small");
        At { side, at, bytes }
    }

    pub fn slice(&self, at: At) -> Slice {
        self.memory[at.side].part(at.at as u64, at.bytes as u64).unwrap()
    }

    /// A slice as long as `slice` that begins where `other` does.
    pub fn over(&self, slice: Slice, other: Slice) -> Slice {
        let inside = |memory: &&Slice| memory.overlaps(&other);
        let memory = self.memory.iter().find(inside).unwrap();
        memory.part(other.address() - memory.address(), slice.bytes()).unwrap()
    }

    /// Writes bytes to both the model and the device.
    pub fn write(&mut self, at: At, bytes: &[u8]) {
        self.model[at.side][at.at..at.at + bytes.len()].copy_from_slice(bytes);
        for part in (At { bytes: bytes.len(), ..at }).parts() {
            self.device.write(self.slice(part), &bytes[part.at - at.at..][..part.bytes]).unwrap();
        }
    }

    pub fn write_words(&mut self, at: At, words: impl IntoIterator<Item = u32>) {
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        assert!(bytes.len() <= at.bytes);
        self.write(at, &bytes);
    }

    /// Runs an operation and waits for its end.
    pub fn run(&self, op: PageOp<'_>) -> forebay::Result<()> {
        self.queue.enqueue_pages(self.stream, op)?;
        self.queue.record(self.event, self.stream)?;
        self.queue.synchronize(self.event)
    }

    /// Where device and model differ.
    pub fn difference(&self) -> Option<String> {
        for (side, name) in [(DEVICE, "device"), (PINNED, "pinned")] {
            let mut found = vec![0; BYTES];
            for part in (At { side, at: 0, bytes: BYTES }).parts() {
                self.device.read(self.slice(part), &mut found[part.at..][..part.bytes]).unwrap();
            }
            let differs = (0..BYTES).find(|at| found[*at] != self.model[side][*at]);
            if let Some(at) = differs {
                let near = at / 4 * 4..at / 4 * 4 + 16;
                let wanted = &self.model[side][near.clone()];
                return Some(format!("{name} memory at {at}: {:?}, not {wanted:?}", &found[near]));
            }
        }
        None
    }
}

/// The number of cases of a property.
pub fn cases(usual: u32) -> ProptestConfig {
    ProptestConfig { cases: crate::device::few(usual), ..ProptestConfig::default() }
}
