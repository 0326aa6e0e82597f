//! forebay: the KV and latent cache of large-language-model serving.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("forebay needs Linux on x86-64: it maps, locks and binds host memory by Linux system calls");

mod cache;
pub mod device;
mod error;
mod geometry;
mod ids;
pub mod os;
pub mod residency;
mod sparse;
mod stats;
mod step;
mod sync;
pub mod total;
#[cfg(feature = "trace")]
pub mod trace;

pub use cache::{Accepted, Cache, Config, Length, Memory, Open, Row, Slots};
pub use error::{Error, Kind, Result};
pub use geometry::{Geometry, LINE, Piece, SLOT_BLOCK, Shape};
pub use ids::{HostPage, IndexPage, Lane, Layer, MicroBatch, Sequence};
pub use sparse::{BringUp, Budget, WarmUp};
pub use stats::Stats;
pub use step::{Buffers, LayerCall, Retired, Step, Streams, Unretired};
