//! The C side of forebay: what `include/forebay.h` declares, which is generated from these files.
//!
//! | file | holds |
//! |---|---|
//! | `status` | status codes, one for each [`forebay::Kind`], and message texts |
//! | `cache`, `sequence`, `step` | the calls, by noun |
//! | `cast` | the one place where a caller's pointers become references and values |
//! | `panic` | the wall: no unwinding leaves the library |
//!
//! Nothing is decided here. A call casts its arguments, calls the library behind the wall, and turns the
//! answer into a status and out-parameters. The conventions for callers stand at the head of the header;
//! `tests/header.rs` writes that head and compares the whole file.
//!
//! What it does not do yet: warm-up selections, forks and roll-backs, parts of a layer's call, devices
//! other than the host's.

mod cache;
mod cast;
mod panic;
mod sequence;
mod status;
mod step;

pub use cache::{FB_DEVICE_HOST, FB_MEMORY_LAZY, FB_MEMORY_SMALL_PAGES, FB_MEMORY_UNLOCKED};
pub use cache::{FbCache, FbCacheConfig, FbStats};
pub use cache::{fb_cache_create, fb_cache_destroy, fb_cache_error_text, fb_cache_fallback};
pub use cache::{fb_cache_stats, fb_slab};
pub use sequence::{FB_BRING_UP_NOTHING, FB_BRING_UP_WHOLE, FbOpenConfig};
pub use sequence::{fb_append, fb_close, fb_join, fb_landing_slot, fb_open};
pub use status::{FB_ABI_VERSION, FbStatus, fb_abi_version, fb_status_text};
pub use step::{FB_ACCEPTED_ON_DEVICE, FbRetired, FbRow, FbStep, FbStepConfig};
pub use step::{fb_finish, fb_layer, fb_prepare, fb_retire, fb_scatter};
