//! Operations on pages: the arguments of a step's begin, and the ways of a copy's pieces.
//!
//! **Three ways.** A copy engine moves long pieces: it takes no multiprocessor, but each of its copies begins anew.
//! Runs of pages that touch each other on both sides are one copy, and runs whose pages are apart on one side are one
//! copy of two dimensions. Single copies wait in a [`Batch`], which one driver call enqueues. Short pieces are gathered
//! by a kernel, many planes and pages in one launch. Pieces of at least
//! [`CudaOptions::copy_engine_bytes`](super::CudaOptions::copy_engine_bytes) go by an engine. Pieces from host memory
//! to host memory go by the copy kernel, because the driver's own copy would block the host.
//!
//! **What it keeps.** Nothing: planes and pages go by value into a kernel's arguments, as many as these have room for,
//! or into the arguments of a driver's copies. The lists are the caller's again when the call returns.

use super::abi::{self, PAGE_LIST, PAGE_PLANES};
use super::batch::Batch;
use super::driver::{Copy2d, DriverResult, Handle};
use super::pools::{Enqueueing, Launches};
use super::registration::{Stretch, left, pieces};
use crate::device::pages::{Run, StepPages, StepTables, merged, runs};
use crate::device::{CopyPages, Plane, Slice};
use crate::sync::AtomicU32;

/// Blocks of a launch that copies inside the device's memory.
const DEVICE_BLOCKS: u32 = 32;

/// From this distance of two rows on not every device copies in two dimensions (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const PITCH_MAX: u64 = 1 << 31;

/// The most words of a launch: the kernel counts them in 32 bits.
const MOST_WORDS: u64 = 1 << 31;

/// The arguments of a step's begin.
pub(super) fn begin_args(step: &StepPages) -> abi::BeginPagesArgs {
    let tables = step.tables.map(|StepTables { lanes, table, slots, columns, page_tokens, pages }| {
        abi::PageTables { lanes, table, slots, columns, page_tokens, pages, unused: 0 }
    });
    abi::BeginPagesArgs {
        descriptor: step.descriptor,
        lanes: step.lanes,
        accepted: step.accepted,
        lengths: step.lengths,
        starts: step.starts,
        positions: step.positions,
        report: step.report,
        lane_count: step.lane_count,
        batch: step.batch,
        step_tokens: step.step_tokens,
        wide: step.wide.into(),
        group_count: step.groups,
        unused: 0,
        tables,
    }
}

/// A piece of every page, and how its pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ways {
    bytes: u64,
    /// Pages that follow each other touch each other on both sides.
    whole: bool,
    /// An end is host memory.
    link: bool,
}

impl Ways {
    /// The bytes that are copied at once of a run.
    fn at_once(&self, run: &Run) -> u64 {
        if self.whole { self.bytes * u64::from(run.count) } else { self.bytes }
    }
}

/// A plane on both sides.
struct Pair {
    source: Plane,
    target: Plane,
    ways: Ways,
}

/// The copies of one call.
pub(super) struct Copies<'a> {
    pub e: &'a Enqueueing<'a>,
    pub launches: &'a Launches,
    pub stretches: &'a [Stretch],
    pub engine_bytes: u64,
    /// Whether one driver call may enqueue several copies: see [`Batch`].
    pub batches: &'a AtomicU32,
}

/// Planes that wait for a launch, all with the same ways.
struct Waiting {
    ways: Ways,
    args: abi::PagesArgs,
}

impl Copies<'_> {
    /// Enqueues the copies of checked planes and pages.
    pub fn run(&self, copy: &CopyPages<'_>) -> DriverResult {
        let mut waiting: Option<Waiting> = None;
        let mut batch = Batch::new(self.e.stream, self.batches);
        for (source, target) in merged(copy.planes) {
            let ends = [source.memory, target.memory].map(|memory| self.is_host(&memory));
            let pair = Pair { source, target, ways: self.ways(&source, &target, ends) };
            if ends == [true, true] {
                runs(copy.pages).try_for_each(|run| self.by_parts(&mut batch, &pair, &run))?;
                continue;
            }
            let mut short = false;
            for run in runs(copy.pages) {
                match pair.ways.at_once(&run) < self.engine_bytes {
                    true => short = true,
                    false => self.by_engine(&mut batch, &pair, &run)?,
                }
            }
            if short {
                self.gather(&mut waiting, &pair, copy.pages)?;
            }
        }
        batch.enqueue(self.e)?;
        waiting.map_or(Ok(()), |mut full| self.launch(&mut full, copy.pages))
    }

    fn is_host(&self, memory: &Slice) -> bool {
        let (from, to) = (memory.address(), memory.address().saturating_add(memory.bytes()));
        self.stretches.iter().any(|it| from < it.start.saturating_add(it.bytes) && it.start < to)
    }

    fn ways(&self, source: &Plane, target: &Plane, [from, to]: [bool; 2]) -> Ways {
        let whole = source.stride == source.bytes && target.stride == target.bytes;
        Ways { bytes: source.bytes, whole, link: from || to }
    }

    /// Adds a plane to those that wait for a launch.
    fn gather(
        &self,
        waiting: &mut Option<Waiting>,
        &Pair { source, target, ways }: &Pair,
        pages: &[(u32, u32)],
    ) -> DriverResult {
        if let Some(full) = waiting
            && (full.ways != ways || full.args.plane_count as usize == PAGE_PLANES)
        {
            self.launch(full, pages)?;
            *waiting = None;
        }
        let empty = || Waiting {
            ways,
            args: abi::PagesArgs {
                planes: [abi::PagePlane::default(); PAGE_PLANES],
                from: [0; PAGE_LIST],
                to: [0; PAGE_LIST],
                plane_count: 0,
                page_count: 0,
                words: 0,
                word_bytes: 16,
            },
        };
        let args = &mut waiting.get_or_insert_with(empty).args;
        // The longest word that all planes of the launch allow.
        let places = source.memory.address() | target.memory.address() | source.stride | target.stride;
        args.word_bytes = match places | source.bytes {
            all if all.is_multiple_of(16) => args.word_bytes,
            all if all.is_multiple_of(8) => args.word_bytes.min(8),
            _ => 4,
        };
        args.words = (ways.bytes / u64::from(args.word_bytes)) as u32;
        if let Some(place) = args.planes.get_mut(args.plane_count as usize) {
            *place = abi::PagePlane {
                from: source.memory.address(),
                to: target.memory.address(),
                from_stride: source.stride,
                to_stride: target.stride,
            };
            args.plane_count += 1;
        }
        Ok(())
    }

    /// Launches the kernel for the pages of all runs that are too short for an engine.
    fn launch(&self, waiting: &mut Waiting, pages: &[(u32, u32)]) -> DriverResult {
        let Waiting { ways, args } = waiting;
        let blocks = if ways.link { self.launches.gather_blocks } else { DEVICE_BLOCKS };
        let of_page = u64::from(args.plane_count) * u64::from(args.words);
        let room = (MOST_WORDS / of_page.max(1)).clamp(1, PAGE_LIST as u64) as usize;
        for run in runs(pages).filter(|run| ways.at_once(run) < self.engine_bytes) {
            for page in 0..run.count {
                if args.page_count as usize == room {
                    self.launches.pages(self.e, blocks, args)?;
                    args.page_count = 0;
                }
                let place = args.page_count as usize;
                if let (Some(from), Some(to)) = (args.from.get_mut(place), args.to.get_mut(place)) {
                    (*from, *to) = (run.from + page, run.to + page);
                    args.page_count += 1;
                }
            }
        }
        let last = self.launches.pages(self.e, blocks, args);
        args.page_count = 0;
        last
    }

    /// Copies a run by a copy engine: in one copy, where no end crosses the end of a registration.
    fn by_engine(&self, batch: &mut Batch<'_>, pair: &Pair, run: &Run) -> DriverResult {
        let Pair { source, target, ways } = pair;
        let (from, to) = (place(source, run.from), place(target, run.to));
        let strides = [source.stride, target.stride];
        let extent = |stride: u64| stride * u64::from(run.count - 1) + ways.bytes;
        let fits =
            |at: Handle, stride: u64| left(self.stretches, at).is_none_or(|left| extent(stride) <= left);
        let narrow = strides.iter().all(|stride| *stride < PITCH_MAX);
        if ways.whole || run.count == 1 || !narrow || !fits(from, source.stride) || !fits(to, target.stride) {
            return self.by_parts(batch, pair, run);
        }
        let copy = Copy2d::new([from, to], strides, ways.bytes, run.count.into());
        self.e.current.copy_2d(&copy, self.e.stream)
    }

    /// Copies a run in as few parts as pages and registrations allow.
    fn by_parts(&self, batch: &mut Batch<'_>, pair: &Pair, run: &Run) -> DriverResult {
        let Pair { source, target, ways } = pair;
        let (count, bytes) = if ways.whole { (1, ways.at_once(run)) } else { (run.count, ways.bytes) };
        for page in 0..count {
            let (from, to) = (place(source, run.from + page), place(target, run.to + page));
            pieces(self.stretches, from, to, bytes, |at, bytes, host| match host {
                true => {
                    let args = abi::CopyArgs { from: from + at, to: to + at, bytes };
                    self.launches.copy(self.e, &args)
                }
                false => batch.add(self.e, from + at, to + at, bytes),
            })?;
        }
        Ok(())
    }
}

/// The address of a page's piece.
fn place(plane: &Plane, page: u32) -> Handle {
    plane.memory.address() + u64::from(page) * plane.stride
}
