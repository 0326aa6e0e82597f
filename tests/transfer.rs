//! The plan of a transfer against a map of every byte.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "transfer/ledger.rs"]
mod ledger;
#[path = "transfer/map.rs"]
mod map;
#[path = "transfer/models.rs"]
mod models;
#[path = "transfer/quarantine.rs"]
mod quarantine;
#[path = "transfer/random.rs"]
mod random;
#[path = "transfer/refused.rs"]
mod refused;
#[path = "support/side_bytes.rs"]
mod side_bytes;
#[path = "transfer/staging.rs"]
mod staging;
#[path = "transfer/wire.rs"]
mod wire;
#[path = "transfer/world/mod.rs"]
mod world;
