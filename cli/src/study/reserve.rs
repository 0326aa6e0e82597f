//! Fallible allocation for a study's tables: vectors and queues, or an out-of-memory error.

use std::collections::VecDeque;

use forebay::{Error, Kind, Result};

fn too_much<T>(count: usize) -> Error {
    let bytes = (size_of::<T>() as u64).saturating_mul(count as u64);
    Error::new(Kind::OutOfMemory, "study policies").at("tables").with("bytes", bytes)
}

/// An empty vector with capacity for `count`.
pub fn vector<T>(count: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(count).map_err(|_| too_much::<T>(count))?;
    Ok(room)
}

/// An empty queue with capacity for `count`.
pub fn queue<T>(count: usize) -> Result<VecDeque<T>> {
    let mut room = VecDeque::new();
    room.try_reserve_exact(count).map_err(|_| too_much::<T>(count))?;
    Ok(room)
}

/// `count` times `value`.
pub fn filled<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    let mut all = vector(count)?;
    all.resize(count, value);
    Ok(all)
}

/// Reserves `more` in a growing vector.
pub fn grow<T>(all: &mut Vec<T>, more: usize) -> Result<()> {
    all.try_reserve(more).map_err(|_| too_much::<T>(all.len().saturating_add(more)))
}
