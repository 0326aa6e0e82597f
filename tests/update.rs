//! New versions of sharded weights while ranks serve: all ranks of a group take a version at one border or none does,
//! and no use of a window finds another version than its rank has. Every byte is a stamp of owner, layer, version and
//! place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "update/borders.rs"]
mod borders;
#[path = "support/children.rs"]
mod children;
#[path = "support/engine.rs"]
mod engine;
#[path = "support/failing.rs"]
mod failing;
#[path = "update/faults.rs"]
mod faults;
#[path = "support/faulty.rs"]
mod faulty;
#[expect(dead_code, reason = "what other tests use of it")]
#[path = "support/frames.rs"]
mod frames;
#[path = "update/messages.rs"]
mod messages;
#[path = "update/order.rs"]
mod order;
#[path = "update/processes.rs"]
mod processes;
#[path = "update/refusals.rs"]
mod refusals;
#[path = "update/returns.rs"]
mod returns;
#[path = "update/sessions.rs"]
mod sessions;
#[path = "support/update_bytes.rs"]
mod update_bytes;
#[path = "update/whole.rs"]
mod whole;
#[path = "support/windows.rs"]
mod windows;
#[path = "update/world.rs"]
mod world;

pub use engine::*;
pub use faulty::Faulty;

/// Five layers, of which one is resident, one has two tensors, and one has too few pages for three ranks.
pub fn model() -> Vec<Vec<u64>> {
    let grain = grain();
    vec![vec![5 * grain + 10], vec![7 * grain, 90], vec![3 * grain], vec![grain], vec![6 * grain + 5]]
}
