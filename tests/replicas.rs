//! Replicas of hot ranges while ranks serve: all ranks of a group have the new set at one border or none has, each pull
//! finds the owner's bytes, and reads them where a naive map of pages to holders says. Every byte is a stamp of owner,
//! layer, version and place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "replicas/borders.rs"]
mod borders;
#[expect(dead_code, reason = "what other tests use of it")]
#[path = "support/children.rs"]
mod children;
#[path = "replicas/deaths.rs"]
mod deaths;
#[path = "support/engine.rs"]
mod engine;
#[path = "support/failing.rs"]
mod failing;
#[path = "support/faulty.rs"]
mod faulty;
#[path = "replicas/naive.rs"]
mod naive;
#[path = "replicas/order.rs"]
mod order;
#[path = "replicas/refusals.rs"]
mod refusals;
#[path = "replicas/returns.rs"]
mod returns;
#[path = "support/windows.rs"]
mod windows;
#[path = "replicas/world.rs"]
mod world;

use forebay::Result;
use forebay::weights::{Border, Outcome, Replica, Replication};

pub use engine::*;
pub use faulty::Faulty;
use windows::PATIENCE;

/// Five layers: tensors that begin and end inside pages, one with no whole page, and the first one resident.
pub fn model() -> Vec<Vec<u64>> {
    let grain = grain();
    vec![
        vec![3 * grain, 3 * grain],
        vec![grain, 5 * grain],
        vec![100, 200],
        vec![7 * grain + 5, 4 * grain],
        vec![2 * grain, 3 * grain + 100, 90, 4 * grain],
    ]
}

/// A replica of the tensor of this number in its layer.
pub fn replica(layer: usize, tensor: usize, rank: u32) -> Replica {
    Replica { layer, tensor: format!("model.layers.{layer}.weight.{tensor}"), rank }
}

/// A change whose replicas are filled, with a step after each part of it.
pub fn filled(engine: &mut Engine, number: u32, wanted: &[Replica]) -> Result<Replication> {
    let mut change = engine.ring.replicate(number, wanted, u64::MAX)?;
    while change.advance(grain() + 1000, engine.stream())? > 0 {
        engine.step()?;
    }
    Ok(change)
}

/// A change up to its border.
pub fn shared(engine: &mut Engine, number: u32, wanted: &[Replica]) -> Result<Replication> {
    let mut change = filled(engine, number, wanted)?;
    let stream = engine.stream();
    change.share(&mut engine.links, stream, PATIENCE)?;
    engine.step()?;
    Ok(change)
}

pub fn commit(engine: &mut Engine, change: &mut Replication) -> Result<Outcome> {
    let border = Border { step: change.number().into(), ..engine.border() };
    engine.ring.commit_replicas(change, &mut engine.links, border)
}

/// A whole change.
pub fn changed(engine: &mut Engine, number: u32, wanted: &[Replica]) -> Result<Outcome> {
    let mut change = shared(engine, number, wanted)?;
    commit(engine, &mut change)
}
