//! The body of the fuzz target `dense_ops`, which `tests/dense.rs` replays.

use super::calls::dense_calls;
use super::world::{DONE, On, World};

/// Any bytes are a run of a world, or calls with any numbers.
pub fn dense_ops(bytes: &[u8]) {
    match bytes.split_first() {
        Some((first, bytes)) if first % 2 == 1 => {
            dense_calls(bytes);
        }
        _ => {
            dense_world(bytes.get(1..).unwrap_or(&[]));
        }
    }
}

/// A world: its configuration, its device, and then all numbers that the world draws. Returns how often each operation
/// did something.
pub fn dense_world(bytes: &[u8]) -> [u32; DONE] {
    let mut head = bytes.iter();
    let (variant, order) = (*head.next().unwrap_or(&0), *head.next().unwrap_or(&0));
    let on = if order.is_multiple_of(4) { On::Inline } else { On::Clock(order.into()) };
    let mut world = World::new(variant.into(), on);
    world.run_bytes(head.as_slice());
    world.done
}
