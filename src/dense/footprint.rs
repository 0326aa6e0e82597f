//! The memory of a dense cache, computed before any of it is taken.

use crate::dense::config::{Config, Width};
use crate::device::descriptor::Report;
use crate::device::{Device, host_page_tables};
use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults};
use crate::total::memory::check_available;

/// The bytes of a dense cache, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Device: the rows of all pages of all groups, the null pages included.
    pub pages: u64,
    /// Device: the page tables of the batch rows, of each micro-batch and group, `[batch][pages]` i32; and for each
    /// sequence its committed length and landed rows.
    pub tables: u64,
    /// Device: the other tensors that a step reads, of each micro-batch: slots of each group, positions, lengths and
    /// starts.
    pub tensors: u64,
    /// GPU: its page tables for the registered host memory, 8 bytes for each page of 4 KiB, which the driver takes from
    /// the GPU's memory. A host device has none.
    pub host_page_tables: u64,
    /// Host, pinned: the pages of the host's tier, of all groups.
    pub host_pages: u64,
    /// Host, pinned: the page tables of all sequences, of each group, `[sequences][pages]` i32.
    pub host_tables: u64,
    /// Host, pinned: the ring of step descriptors and reports.
    pub step_descriptors: u64,
}

impl Footprint {
    /// All bytes of a GPU's memory that a cache uses.
    pub const fn device(&self) -> u64 {
        self.pages + self.tables + self.tensors + self.host_page_tables
    }

    /// All bytes of pinned host memory.
    pub const fn host(&self) -> u64 {
        self.host_pages + self.host_tables + self.step_descriptors
    }
}

/// Words of a step descriptor's header; of a batch row's entry: lane, length, accepted, query rows; and of each group
/// in it: first changed entry of the page table, count.
const HEADER: u64 = 4;
const ROW: u64 = 4;
const CHANGED: u64 = 2;

/// A report begins on a line of its own, so that the device and the host never write to the same line.
const LINE: u64 = 64;

impl Config {
    /// The bytes of a cache with this configuration. The call takes no memory.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] and [`Kind::Overflow`] name the field: every number is checked.
    pub fn footprint(&self) -> Result<Footprint> {
        self.check()?;
        let groups = self.shape.groups.len() as u64;
        let (batch, rows) = (u64::from(self.batch), u64::from(self.step_tokens));
        let micro_batches = u64::from(self.micro_batches);
        let table = product([4, self.entries()?.into(), groups])?;
        let table_of = |rows: u32| product([table, rows.into()]);
        let tables = sum([product([table_of(self.batch)?, micro_batches])?, 8 * u64::from(self.sequences)])?;
        let width = if self.width == Width::I32 { 4 } else { 8 };
        let integers = product([width, rows, groups + 1])?;
        let tensors = product([sum([integers, 4 * batch, 4 * (batch + 1)])?, micro_batches])?;
        let host_tables = table_of(self.sequences)?;
        let step_descriptors = self.ring_bytes()?;
        let host_pages = self.bytes_of(&self.host_pages)?;
        let host_page_tables = host_page_tables(sum([host_pages, host_tables, step_descriptors])?);
        let footprint = Footprint {
            pages: self.bytes_of(&self.device_pages)?,
            tables,
            tensors,
            host_page_tables,
            host_pages,
            host_tables,
            step_descriptors,
        };
        sum([footprint.pages, tables, tensors, host_page_tables])?;
        Ok(footprint)
    }

    /// Rejects a cache that the machine has no memory for, before anything is taken. It counts:
    ///
    /// - page tables and step descriptors;
    /// - the host's tier, if its memory is allocated from the start (`populate`, `lock`, or a device that pins host
    ///   memory);
    /// - where device memory is the machine's memory, the tensors, and with `populate` or `lock` the pages.
    ///
    /// If the system does not report its memory, nothing is rejected.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::Kind::OutOfMemory) with `wanted` and `available`.
    pub(super) fn check_machine(&self, device: &dyn Device, faults: &dyn Faults) -> Result<()> {
        let Footprint { pages, tables, tensors, host_pages, host_tables, step_descriptors, .. } =
            self.footprint()?;
        let state = os::memory_state(faults);
        let resident = self.memory.populate || self.memory.lock;
        let tier = if resident || device.pins_host_memory() { host_pages } else { 0 };
        let own = match (device.takes_host_memory(), resident) {
            (false, _) => [0; 3],
            (true, false) => [0, tables, tensors],
            (true, true) => [pages, tables, tensors],
        };
        let all = own.into_iter().chain([tier, host_tables, step_descriptors]);
        check_available(all.fold(0, u64::saturating_add), &state)
    }

    /// Bytes of so many pages of each group.
    fn bytes_of(&self, pages: &[u32]) -> Result<u64> {
        let groups = pages.iter().enumerate();
        let planes =
            groups.flat_map(|(group, pages)| self.planes(group).into_iter().map(move |of| (of, *pages)));
        planes
            .into_iter()
            .try_fold(0, |all, (plane, pages)| sum([all, product([plane.bytes, pages.into()])?]))
    }

    /// Bytes of the ring: a descriptor and a report of each step in flight, each in whole lines.
    fn ring_bytes(&self) -> Result<u64> {
        let entry = ROW + CHANGED * self.shape.groups.len() as u64;
        let descriptor = 4 * (HEADER + entry * u64::from(self.batch));
        let report = 4 * Report::words(0, self.batch) as u64;
        let step = descriptor.next_multiple_of(LINE) + report.next_multiple_of(LINE);
        product([step, self.steps_in_flight.into(), self.micro_batches.into()])
    }
}

fn overflow() -> Error {
    Error::new(Kind::Overflow, "footprint").at("bytes of a dense cache")
}

/// The product, which has to be a size of memory.
fn product<const N: usize>(factors: [u64; N]) -> Result<u64> {
    let all = factors.into_iter().try_fold(1_u64, u64::checked_mul);
    all.filter(|bytes| *bytes <= isize::MAX as u64).ok_or_else(overflow)
}

fn sum<const N: usize>(parts: [u64; N]) -> Result<u64> {
    let all = parts.into_iter().try_fold(0_u64, u64::checked_add);
    all.filter(|bytes| *bytes <= isize::MAX as u64).ok_or_else(overflow)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dense::config::{Layout, Runs};
    use crate::dense::shape::{Group, Shape};

    /// A machine that reports so many bytes.
    #[derive(Debug)]
    struct Reports(u64);

    impl Faults for Reports {
        fn before(&self, _call: os::Call) -> Option<i32> {
            None
        }

        fn memory(&self, read: os::MemoryState) -> os::MemoryState {
            os::MemoryState { available: Some(self.0), huge_free: 0, ..read }
        }
    }

    #[test]
    fn a_machine_without_the_memory_refuses_before_anything_is_taken() {
        use crate::device::host::{HostDevice, HostOptions};
        use crate::total::memory::Memory;
        let group = Group { layers: vec![0], runs: [1024, 0], window: None };
        let mut config = Config::new(Shape { page_tokens: 16, groups: vec![group] }, 2, 512);
        config.host_pages = vec![1000];
        let footprint = config.footprint().unwrap();
        for (populate, wanted) in [
            (true, footprint.device() - footprint.host_page_tables + footprint.host()),
            (false, footprint.tables + footprint.tensors + footprint.host() - footprint.host_pages),
        ] {
            config.memory = Memory { huge: false, populate, lock: false, node: None };
            let made = |config: &Config, bytes| {
                let device = HostDevice::new(HostOptions::default());
                let made = crate::dense::Cache::with_faults(config.clone(), device, &Reports(bytes));
                made.map(drop)
                    .map_err(|error| (error.kind(), error.number("wanted"), error.number("available")))
            };
            assert_eq!(made(&config, wanted), Ok(()));
            assert_eq!(made(&config, wanted - 1), Err((Kind::OutOfMemory, Some(wanted), Some(wanted - 1))));
            let more = Config { overcommit: true, ..config.clone() };
            assert_eq!(made(&more, wanted - 1), Ok(()));
        }
    }

    /// Counts the memory integer by integer and row by row.
    fn counted(config: &Config) -> Footprint {
        let mut all = Footprint::default();
        let integer = if config.width == Width::I32 { 4 } else { 8 };
        // Positions that a table names, and the pages that hold them.
        let positions = config.max_tokens + config.query_rows * config.steps_in_flight;
        let entries = (0..positions).step_by(config.shape.page_tokens as usize).count() as u64;
        for (group, pages) in config.shape.groups.iter().zip(&config.device_pages) {
            for (_page, _token) in
                (0..*pages).flat_map(|p| (0..config.shape.page_tokens).map(move |t| (p, t)))
            {
                all.pages += group.layers.iter().map(|_| group.row_bytes()).sum::<u64>();
            }
            (0..config.sequences).for_each(|_| all.host_tables += 4 * entries);
        }
        for (group, pages) in config.shape.groups.iter().zip(&config.host_pages) {
            let tokens = (0..*pages).map(|_| u64::from(config.shape.page_tokens));
            let rows = tokens.map(|tokens| tokens * group.row_bytes());
            all.host_pages += rows.flat_map(|rows| group.layers.iter().map(move |_| rows)).sum::<u64>();
        }
        (0..config.sequences).for_each(|_| all.tables += 4 + 4);
        for _ in 0..config.micro_batches {
            for _ in &config.shape.groups {
                (0..config.batch).for_each(|_| all.tables += 4 * entries);
                (0..config.step_tokens).for_each(|_| all.tensors += integer);
            }
            (0..config.step_tokens).for_each(|_| all.tensors += integer);
            (0..config.batch).for_each(|_| all.tensors += 4);
            (0..=config.batch).for_each(|_| all.tensors += 4);
            for _ in 0..config.steps_in_flight {
                let row = 4 + 2 * config.shape.groups.len() as u64;
                let words = (0..config.batch).fold(4, |words, _| words + row);
                all.step_descriptors += (4 * words).div_ceil(64) * 64;
                all.step_descriptors += (4 * Report::words(0, config.batch) as u64).div_ceil(64) * 64;
            }
        }
        let registered = all.host_pages + all.host_tables + all.step_descriptors;
        all.host_page_tables = (0..registered).step_by(4096).map(|_| 8).sum();
        all
    }

    fn config() -> Config {
        let group = |layers: &[u32], runs, window| Group { layers: layers.to_vec(), runs, window };
        let groups = vec![group(&[1, 3], [48, 16], None), group(&[0, 2, 4], [32, 0], Some(20))];
        let shape = Shape { page_tokens: 16, groups };
        let mut config = Config { step_tokens: 37, query_rows: 3, batch: 5, ..Config::new(shape, 7, 200) };
        (config.micro_batches, config.steps_in_flight) = (2, 3);
        config.device_pages = config.pages_for(7, 200);
        config.host_pages = vec![20, 31];
        config
    }

    #[test]
    fn bytes_are_those_that_a_naive_count_gives() {
        for (layout, runs) in [(Layout::LayerFirst, Runs::Apart), (Layout::PageFirst, Runs::Together)] {
            for width in [Width::I32, Width::I64] {
                let config = Config { layout, runs, width, ..config() };
                assert_eq!(config.footprint().unwrap(), counted(&config));
            }
        }
        let config = Config::new(Shape { page_tokens: 256, ..Shape::smollm2_135m(2) }, 3, 1000);
        let footprint = config.footprint().unwrap();
        assert_eq!(footprint, counted(&config));
        assert_eq!(footprint.host(), footprint.host_tables + footprint.step_descriptors);
        let device = footprint.pages + footprint.tables + footprint.tensors + footprint.host_page_tables;
        assert_eq!(footprint.device(), device);
    }

    #[test]
    fn a_wrong_field_is_named_and_bytes_that_do_not_fit_are_refused() {
        assert_eq!(Config { batch: 0, ..config() }.footprint().unwrap_err().place(), "batch");
        let large = |change: fn(&mut Config)| {
            let mut config = config();
            config.shape = Shape { page_tokens: 256, ..Shape::llama_3_1_70b(2) };
            (config.device_pages, config.host_pages) = (vec![1 << 20], Vec::new());
            change(&mut config);
            config.footprint().map_err(|error| error.kind())
        };
        assert!(large(|_| ()).is_ok());
        assert_eq!(
            large(|config| config.device_pages = vec![i32::MAX as u32]).map(|f| f.pages > 1 << 57),
            Ok(true)
        );
        let pages = large(|config| {
            config.shape.groups[0] = Group { layers: (0..4096).collect(), runs: [1 << 20; 2], window: None };
            config.device_pages = vec![i32::MAX as u32];
        });
        assert_eq!(pages, Err(Kind::Overflow));
        let host = large(|config| (config.sequences, config.max_tokens) = (u32::MAX, i32::MAX as u32 - 100));
        assert!(host.is_ok_and(|footprint| footprint.host_tables > 1 << 56));
        assert_eq!(
            large(|config| (config.step_tokens, config.micro_batches) = (1 << 30, u32::MAX)),
            Err(Kind::Overflow)
        );
    }
}
