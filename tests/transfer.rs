//! The plan of a transfer against a map of every byte.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "transfer/bad.rs"]
mod bad;
#[path = "transfer/conformance.rs"]
mod conformance;
#[path = "transfer/driven.rs"]
mod driven;
#[path = "transfer/ends.rs"]
mod ends;
#[path = "transfer/failures.rs"]
mod failures;
#[path = "support/frame_bytes.rs"]
mod frame_bytes;
#[path = "transfer/frames.rs"]
mod frames;
#[path = "transfer/ledger.rs"]
mod ledger;
#[path = "transfer/machines.rs"]
mod machines;
#[path = "transfer/map.rs"]
mod map;
#[path = "transfer/memory.rs"]
mod memory;
#[path = "transfer/models.rs"]
mod models;
#[path = "transfer/pair.rs"]
mod pair;
#[path = "transfer/quarantine.rs"]
mod quarantine;
#[path = "transfer/random.rs"]
mod random;
#[path = "transfer/refused.rs"]
mod refused;
#[path = "transfer/replays.rs"]
mod replays;
#[path = "support/side_bytes.rs"]
mod side_bytes;
#[path = "transfer/staging.rs"]
mod staging;
#[path = "support/transfer_ops.rs"]
mod transfer_ops;
#[path = "transfer/unchecked.rs"]
mod unchecked;
#[path = "transfer/wire.rs"]
mod wire;
#[path = "transfer/world/mod.rs"]
mod world;
