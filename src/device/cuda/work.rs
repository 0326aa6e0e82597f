//! The work that a probe computes in place of an engine's: the operands of its matrix products, and the sizes of its
//! launches. A device makes them when a tool first asks for the work. Nothing is enqueued here.
//!
//! The work is the kernel of `kernels/work.cuh`. A round has as many panels as the GPU runs blocks at once. With one
//! block per panel, no block runs longer than a few microseconds. As with an engine's products, a gather then gets
//! multiprocessors whenever blocks end. A persistent launch has one block per multiprocessor for all rounds, each
//! with all shared memory that a block can have, so only one fits on a multiprocessor. From compute capability 8.0
//! on, every block reserves 1 KB of shared memory, so no other kernel can run next to it. Before 8.0 a kernel without
//! shared memory can; a gather uses some.

use super::abi;
use super::driver::{Context, Refusal};
use super::memory::{Allocation, Worker};
use super::module::Module;
use super::options::THREADS_MAX;
use crate::error::Result;
use crate::sync::Arc;

/// Threads of a multiprocessor that run the work: as many as the registers allow.
const WORK_THREADS: u32 = 2 * THREADS_MAX;
/// Elements of all operands, and bytes of all results, as `abi.h` has them.
pub(super) const OPERANDS: usize = abi::WORK_PANELS * abi::WORK_STEPS * 2 * 4 * 2 * 32 * 8;
pub(super) const RESULT_BYTES: u64 = abi::WORK_PANELS as u64 * THREADS_MAX as u64 * 16;

/// The memory that the work needs.
#[derive(Debug)]
pub(super) struct Work {
    /// Operands, then results: freed with the device.
    _room: Allocation,
    pub(super) extent: Extent,
}

/// The sizes of the work's launches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    operands: u64,
    pub(super) processors: u32,
    /// Panels of a round.
    pub(super) round: u32,
    /// The most shared memory of a block.
    pub(super) shared_bytes: u32,
}

impl Extent {
    pub(super) fn args(&self, panels: u32) -> abi::WorkArgs {
        let operands = self.operands;
        abi::WorkArgs { operands, results: operands + 2 * OPERANDS as u64, panels, unused: 0 }
    }
}

impl Work {
    /// Loads the kernel, and writes its operands to memory of the device.
    ///
    /// # Errors
    /// As [`Module::load`]; [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
    pub(super) fn new(
        context: &Arc<Context>,
        worker: &Worker,
        module: &Module,
        threads: u32,
        processors: u32,
    ) -> Result<Work> {
        const OPERATION: &str = "compute";
        let failed = |refusal: Refusal| refusal.error(OPERATION);
        let shared_bytes = module.load_work(threads)?;
        let processors = processors.max(1);
        let operands: Vec<u8> = (0..OPERANDS).flat_map(|index| operand(index).to_le_bytes()).collect();
        let bytes = operands.len() as u64 + RESULT_BYTES;
        let room = Allocation::new(context, worker, bytes)?;
        worker.upload(room.address, &operands).map_err(failed)?;
        let round = processors.saturating_mul(WORK_THREADS.div_ceil(threads));
        let extent = Extent { operands: room.address, processors, round, shared_bytes };
        Ok(Work { _room: room, extent })
    }
}

/// A random whole number from 1 to 255 of either sign, as bf16, which represents it exactly (the upper half of an
/// f32). The numbers are random because a multiplier's speed depends on its operands.
fn operand(index: usize) -> u16 {
    let word = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ word >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32;
    let value = (word % 255 + 1) as f32;
    let value = if word & 1 << 31 == 0 { value } else { -value };
    (value.to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_whole_numbers_and_none_is_zero() {
        let all: Vec<f32> = (0..OPERANDS).map(|i| f32::from_bits(u32::from(operand(i)) << 16)).collect();
        assert!(all.iter().all(|value| value.fract() == 0.0 && (1.0..=255.0).contains(&value.abs())));
        let sum: f32 = all.iter().sum();
        assert!((sum / OPERANDS as f32).abs() < 1.0, "as many of either sign");
    }
}
