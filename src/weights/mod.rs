//! Weights that are sharded over the ranks of a host: what each rank keeps of each layer, decided before anything is
//! allocated.
//!
//! Data-parallel ranks hold the same attention weights, once each. With sharding each of n ranks of one host keeps 1/n
//! of every sharded layer, and the whole layer appears in a *window*, one range of addresses, while the layer is in
//! use: the rank's own part in place, and the other parts pulled into a *buffer* that several layers use in turn
//! (FlowMLA and DWDP shard over peers; engines that offload weights to the host do the same from their own memory).
//!
//! A [`Plan`] says all of that in numbers: which ranges are sharded ([`Patterns`]), how they lie in a window
//! ([`Layout`]), which rank owns which pages ([`Cut`]), which buffer a layer uses ([`Place`]), and the bytes of it all
//! ([`Bytes`]). Every rank makes it for itself from the same description, and ranks compare [`Plan::digest`].
//!
//! **What it does not do.** It is arithmetic: it allocates nothing on a device, maps no window, copies no byte and
//! knows no process. It does not interpret weights; a tensor is a name, a length and an alignment.

mod choose;
mod cut;
mod layer;
mod plan;

pub use choose::Patterns;
pub use cut::{Cut, RANKS_MAX};
pub use layer::{Layout, Placed, Tensor};
pub use plan::{Bytes, Closing, Group, LayerPlan, Odd, Place, Plan, Sharding, Source};
