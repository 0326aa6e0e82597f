//! What a cache of blocks is under every policy.

/// A cache under one policy.
pub trait Cache {
    /// Whether the block is resident.
    fn contains(&self, block: u32) -> bool;

    /// The next request's blocks are used, in the prompt's order. Answers how many blocks went.
    fn serve(&mut self, blocks: &[u32]) -> u64;
}
