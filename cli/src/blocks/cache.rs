//! The interface of a cache of blocks under every policy.

/// A cache under one policy.
pub trait Cache {
    /// Whether the block is resident.
    fn contains(&self, block: u32) -> bool;

    /// Uses the next request's blocks, in the prompt's order. Returns how many blocks were evicted.
    fn serve(&mut self, blocks: &[u32]) -> u64;
}
