//! The operations on pages of a dense cache, on every device, against arrays of bytes: a step's begin, and copies.
//! After each operation all bytes of device memory and of pinned memory are compared, those between the slices too.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "pages/begins.rs"]
mod begins;
#[path = "pages/copies.rs"]
mod copies;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[cfg(feature = "check")]
#[path = "pages/order.rs"]
mod order;
#[path = "pages/refused.rs"]
mod refused;
#[path = "pages/world.rs"]
mod world;
