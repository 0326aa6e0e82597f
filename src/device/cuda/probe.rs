//! [`Probe`] for a GPU. A cache uses none of it and pays nothing for it: the kernel of [`Probe::compute`] is loaded,
//! and its operands are allocated, at the first use (`work`).
//!
//! **Abilities are tried**, each by using it once and freeing everything. Drivers advertise fabric handles even where
//! none can be made.
//!
//! **Times** come from the GPU's own clock, with a resolution of half a microsecond or better, through events with
//! timing. The device's other events have none.

use std::ffi::CStr;

use super::driver::attribute;
use super::memory::Range;
use super::work::Extent;
use super::*;
use crate::device::probe::{Ability, Facts, GpuFacts, Mark, Probe};

/// The driver's text, up to its zero byte.
fn text(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

impl Inner {
    /// Reads an attribute of the device.
    fn ask(&self, attribute: i32) -> DriverResult<u32> {
        let mut value = 0;
        self.context.relaxed()?.attribute(&mut value, attribute, self.context.device)?;
        Ok(value.unsigned_abs())
    }

    fn facts(&self) -> DriverResult<Facts> {
        let current = self.context.relaxed()?;
        let (mut name, mut bus) = ([0; 256], [0; 256]);
        current.device_name(&mut name, 256, self.context.device)?;
        current.device_bus(&mut bus, 256, self.context.device)?;
        let (mut memory_free, mut memory_total) = (0, 0);
        current.memory_info(&mut memory_free, &mut memory_total)?;
        let version = current.version.unsigned_abs();
        Ok(Facts {
            name: text(&name),
            memory_total,
            memory_free,
            processors: self.ask(attribute::PROCESSORS)?,
            copy_engines: self.ask(attribute::COPY_ENGINES)?,
            gpu: Some(GpuFacts {
                driver: (version / 1000, version % 1000 / 10),
                capability: self.context.capability,
                bus: text(&bus).to_ascii_lowercase(),
            }),
        })
    }

    /// The sizes of the work. Allocates the operands at the first use.
    fn work_extent(&self) -> Result<Extent> {
        let mut held = self.work.lock();
        if let Some(work) = &*held {
            return Ok(work.extent);
        }
        let processors = self.ask(attribute::PROCESSORS).map_err(|refusal| refusal.error("compute"));
        let (context, threads) = (&self.context, self.launches.threads);
        let made = processors
            .and_then(|processors| Work::new(context, &self.worker, &self.module, threads, processors));
        let made = made.map(|work| {
            let extent = work.extent;
            *held = Some(work);
            extent
        });
        drop(held);
        self.told(made)
    }

    /// Enqueues `rounds` rounds of the work: one block per panel, or one for each multiprocessor but `left` of them.
    fn multiply(&self, stream: Stream, rounds: u32, left: Option<u32>) -> Result<()> {
        self.known(stream)?;
        if self.health.failed().is_some() {
            return Ok(());
        }
        let extent = self.work_extent()?;
        let panels = extent.round.checked_mul(rounds).filter(|panels| *panels <= i32::MAX as u32);
        let panels = panels.ok_or_else(|| bad("rounds", rounds))?;
        let (blocks, shared_bytes) = match left {
            None => (panels, 0),
            Some(left) if left < extent.processors => {
                ((extent.processors - left).min(panels), extent.shared_bytes)
            }
            Some(left) => return Err(bad("multiprocessors left, of all of them", left)),
        };
        self.enqueue_pool("compute", stream, |e| {
            self.launches.work(e, blocks, shared_bytes, &extent.args(panels))
        })
    }

    fn try_range(&self) -> Result<()> {
        let backing = Physical::new(&self.context, &self.worker, self.grain, self.grain)?;
        let range = Range::over(&self.context, &[(&backing, 0, self.grain)]);
        range.map(drop).map_err(|refusal| refusal.error("map range"))
    }

    fn try_descriptor(&self) -> Result<()> {
        let backing = Physical::new(&self.context, &self.worker, self.grain, self.grain)?;
        let descriptor = backing.export()?;
        Physical::import(&self.context, &descriptor, self.grain).map(drop)
    }

    fn try_hosted(&self) -> Result<()> {
        hosted::check(&self.context)?;
        hosted::make(&self.context, &self.worker, 1, None, self.grain).map(drop)
    }

    /// A known mark's event.
    fn mark(&self, mark: Mark) -> Result<Handle> {
        let index = self.index("mark", mark.0)?;
        let marks = self.marks.lock();
        marks.get(index).map(|event| event.raw).ok_or_else(|| bad("mark", mark.0))
    }
}

impl Probe for CudaDevice {
    fn facts(&self) -> Result<Facts> {
        self.inner.check()?;
        self.inner.facts().map_err(|refusal| self.inner.refused("facts", refusal))
    }

    fn abilities(&self) -> Vec<Ability> {
        let inner = &*self.inner;
        let (context, worker) = (&inner.context, &inner.worker);
        let driven = |answer: DriverResult| answer.map_err(|refusal| refusal.error("try"));
        [
            ("virtual memory", inner.try_range(), "use a driver and a device with virtual memory management"),
            ("memory descriptors", inner.try_descriptor(), "only sharing between processes needs them"),
            (
                "fabric handles",
                driven(memory::try_fabric(context)),
                "only sharing between hosts needs them: an NVLink fabric, and one of its IMEX channels for this user",
            ),
            ("host memory of the driver's", inner.try_hosted(), hosted::INSTEAD),
            ("graphs", graph::try_graph(context, worker), "see that no other tool intercepts the driver"),
            (
                "conditional nodes",
                driven(graph::try_conditional(context)),
                "install NVIDIA's driver of release 545 or newer; without them split attention has one width",
            ),
        ]
        .map(|(name, tried, hint)| {
            let usable = inner.told(tried).map_err(|error| match error.kind() {
                Kind::OutOfMemory => error,
                _ => error.hint(hint),
            });
            Ability { name, usable }
        })
        .into()
    }

    fn engine_stream(&self) -> Result<Stream> {
        self.inner.keep(KnownStream::usual(&self.inner.context))
    }

    fn mark(&self) -> Result<Mark> {
        let inner = &*self.inner;
        let own = OwnEvent::timed(&inner.context).map_err(|refusal| inner.refused("new mark", refusal))?;
        let mut marks = inner.marks.lock();
        marks.push(own);
        Ok(Mark(inner.handle(marks.len() - 1)))
    }

    fn stamp(&self, mark: Mark, stream: Stream) -> Result<()> {
        const OPERATION: &str = "stamp";
        let inner = &*self.inner;
        let (mark, raw) = (inner.mark(mark)?, inner.known(stream)?);
        if inner.health.failed().is_none() && inner.capture_of(OPERATION, raw)?.is_some() {
            return Err(Error::new(Kind::InvalidState, OPERATION)
                .at("the stream is being captured")
                .hint("stamp before a graph's launch and after it"));
        }
        inner.enqueue(OPERATION, stream, |current, stream| current.event_record(mark, stream))
    }

    fn elapsed_us(&self, from: Mark, to: Mark) -> Result<f64> {
        let inner = &*self.inner;
        let (first, last) = (inner.mark(from)?, inner.mark(to)?);
        for event in [first, last] {
            let waited = inner.context.relaxed().and_then(|current| current.event_synchronize(event));
            inner.synchronized(waited)?;
        }
        let mut milliseconds = 0.0;
        let asked = inner.context.relaxed().and_then(|c| c.event_elapsed(&mut milliseconds, first, last));
        match asked {
            Ok(()) => Ok(f64::from(milliseconds.max(0.0)) * 1e3),
            // Both are events of this device with timing.
            Err(refusal) if refusal.code == code::INVALID_HANDLE => {
                let error = Error::new(Kind::OutOfRange, NAME).at("a mark that was never stamped");
                Err(error
                    .with("from", from.0)
                    .with("to", to.0)
                    .hint("stamp both marks before you read the time"))
            }
            Err(refusal) => Err(inner.refused("elapsed time", refusal)),
        }
    }

    fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()> {
        CudaDevice::read(self, slice, bytes)
    }

    fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()> {
        CudaDevice::write(self, slice, bytes)
    }

    fn carry(&self, stream: Stream, from: Slice, to: Slice, blocks: u32) -> Result<()> {
        let inner = &*self.inner;
        inner.id.check(&from)?;
        inner.id.check(&to)?;
        let all = from.address() | to.address() | from.bytes();
        if from.bytes() != to.bytes() || !all.is_multiple_of(16) {
            return Err(bad("run of another length, or not a multiple of 16 bytes", to.bytes()));
        }
        if blocks == 0 || blocks > i32::MAX as u32 {
            return Err(bad("blocks of a run", blocks));
        }
        let args = abi::CopyArgs { from: from.address(), to: to.address(), bytes: from.bytes() };
        let blocks = if args.bytes == 0 { 0 } else { blocks };
        inner.enqueue_pool("carry", stream, |e| inner.launches.carry(e, blocks, &args))
    }

    fn compute(&self, stream: Stream, rounds: u32) -> Result<()> {
        self.inner.multiply(stream, rounds, None)
    }

    fn compute_persistent(&self, stream: Stream, rounds: u32, left: u32) -> Result<()> {
        self.inner.multiply(stream, rounds, Some(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::options::THREADS_MAX;
    use crate::device::cuda::tests::skip;
    use crate::device::cuda::work::{OPERANDS, RESULT_BYTES};
    use forebay_standin::{Options, Standin};

    const SIDE: usize = 128;

    /// A device on the given driver, or on a stand-in. Only a real GPU shows what the tensor cores compute from the
    /// operands.
    fn device(threads: u32) -> Option<(Arc<CudaDevice>, Option<Standin>)> {
        let options = CudaOptions { threads, ..CudaOptions::default() };
        if let Ok(library) = std::env::var("FOREBAY_TEST_DRIVER") {
            let given = CudaOptions { library: Some(library), ..options };
            return Some((CudaDevice::new(given).unwrap(), None));
        }
        let Some(standin) = Standin::new(Options::default()) else {
            skip::skip("g++, which builds the stand-in driver");
            return None;
        };
        let library = Some(standin.library().to_owned());
        let options = CudaOptions { library, unload: true, ..options };
        Some((CudaDevice::new(options).unwrap(), Some(standin)))
    }

    /// An operand of a pair, as a matrix: the left one by rows, the right one by columns.
    fn panel(operands: &[u8], pair: usize, right: bool) -> Vec<[f32; SIDE]> {
        let mut matrix = vec![[0.0; SIDE]; SIDE];
        for (line, k) in (0..SIDE).flat_map(|line| (0..SIDE).map(move |k| (line, k))) {
            // A tile has 16 lines and 16 of `k`, of which a lane has four pairs: two lines eight apart, in each
            // of which two of `k` eight apart. Of a left tile the lines come first, of a right one `k`.
            let (half, far) = (line % 16 / 8, k % 16 / 8);
            let pair_of = if right { half * 2 + far } else { far * 2 + half };
            let lane = line % 8 * 4 + k % 8 / 2;
            let tile = (pair * 8 + k / 16) * 2 + usize::from(right);
            let at = ((tile * 8 + line / 16) * 32 + lane) * 8 + pair_of * 2 + k % 2;
            let word = u16::from_le_bytes([operands[2 * at], operands[2 * at + 1]]);
            matrix[line][k] = f32::from_bits(u32::from(word) << 16);
        }
        matrix
    }

    /// The sum that a thread should have written: its own part of its warp's 32 x 32 sums, added up.
    fn expected(left: &[[f32; SIDE]], right: &[[f32; SIDE]], thread: usize) -> [f32; 4] {
        let (warp, lane) = (thread / 32, thread % 32);
        let mut folded = [0.0; 4];
        for (place, sum) in folded.iter_mut().enumerate() {
            for (tile_row, tile_column) in (0..2).flat_map(|row| (0..4).map(move |column| (row, column))) {
                let row = warp / 4 * 32 + tile_row * 16 + lane / 4 + place / 2 * 8;
                let column = warp % 4 * 32 + tile_column * 8 + lane % 4 * 2 + place % 2;
                *sum += left[row].iter().zip(&right[column]).map(|(a, b)| a * b).sum::<f32>();
            }
        }
        folded
    }

    fn synchronize(device: &CudaDevice, stream: Stream) {
        let event = device.event().unwrap();
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
    }

    /// Whether the results of these pairs match the operands.
    fn is_product(device: &CudaDevice, pairs: &[usize]) -> bool {
        let inner = &*device.inner;
        let args = inner.work.lock().as_ref().unwrap().extent.args(0);
        let (mut operands, mut results) = (vec![0; 2 * OPERANDS], vec![0; RESULT_BYTES as usize]);
        inner.worker.download(args.operands, &mut operands).unwrap();
        inner.worker.download(args.results, &mut results).unwrap();
        let threads = inner.launches.threads as usize;
        pairs.iter().all(|pair| {
            let (left, right) = (panel(&operands, *pair, false), panel(&operands, *pair, true));
            (0..threads).all(|thread| {
                let at = (pair * THREADS_MAX as usize + thread) * 16;
                let word = |place: usize| results[at + 4 * place..][..4].try_into().unwrap();
                let found = [0, 1, 2, 3].map(|place| f32::from_le_bytes(word(place)));
                found == expected(&left, &right, thread)
            })
        })
    }

    #[test]
    fn the_result_is_the_product_of_the_operands_also_in_a_graph() {
        for (threads, rounds) in [(512, 8), (64, 1)] {
            let Some((device, _standin)) = device(threads) else { return };
            let stream = device.stream().unwrap();
            device.compute(stream, rounds).unwrap();
            synchronize(&device, stream);
            assert!(is_product(&device, &[0, 7, 15]), "{threads} threads");
            device.capture(stream).unwrap();
            device.compute(stream, rounds).unwrap();
            let graph = device.captured(stream).unwrap();
            forget(&device);
            assert!(!is_product(&device, &[7]), "the control: nothing has run");
            device.launch(graph, stream).unwrap();
            synchronize(&device, stream);
            assert!(is_product(&device, &[0, 15]), "{threads} threads, in a graph");
        }
    }

    /// Zeroes the results.
    fn forget(device: &CudaDevice) {
        let args = device.inner.work.lock().as_ref().unwrap().extent.args(0);
        let zero = |current: &Current<'_>, raw| current.fill_bytes(args.results, 0, RESULT_BYTES, raw);
        device.inner.worker.run(zero).unwrap();
    }

    #[test]
    fn a_persistent_kernel_computes_the_same_products_with_any_number_of_blocks() {
        let Some((device, _standin)) = device(512) else { return };
        let stream = device.stream().unwrap();
        let processors = device.facts().unwrap().processors;
        // Enough rounds to use all pairs.
        let rounds = 16_u32.div_ceil(device.inner.work_extent().unwrap().round);
        for left in [0, processors - 1] {
            device.compute_persistent(stream, rounds, left).unwrap();
            synchronize(&device, stream);
            assert!(is_product(&device, &(0..16).collect::<Vec<usize>>()), "all but {left}");
            forget(&device);
        }
        let none = device.compute_persistent(stream, 1, processors).unwrap_err();
        assert_eq!((none.kind(), none.number("value")), (Kind::OutOfRange, Some(u64::from(processors))));
    }

    #[test]
    fn a_text_ends_at_its_zero() {
        assert_eq!((text(b"GPU\0rest"), text(b"none")), ("GPU".to_owned(), String::new()));
    }
}
