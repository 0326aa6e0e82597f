//! Weights that are sharded over the ranks of a host: what each rank keeps of each layer, and how the whole layer
//! comes to be where the engine reads it.
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
//! [`Windows`] are the plan made real on one device: the memory, the addresses, the bytes that the engine fills
//! ([`Windows::fill`], or [`Files`] for weights that are used as they are stored), the parts that ranks give each
//! other ([`Windows::share`], over the sessions of [`crate::peer::Links`]), and the pull that brings a layer together
//! ([`Windows::pull`]). A rank that died and was started again takes its place at the same addresses
//! ([`Windows::reattach`]).
//!
//! A [`Ring`] orders the pulls against the engine's work: when the use of a layer ends, the pull of the next layer of
//! its buffer begins.
//!
//! An [`Update`] is a new version of the weights beside the one in use. All ranks of the group take it at one border
//! between two steps, or none does. A [`Replication`] changes in the same way which hot ranges have copies on other
//! ranks, and where ([`Replica`]).
//!
//! **What it does not do.** It does not interpret weights; a tensor is a name, a length and an alignment.

mod beside;
mod choose;
mod cut;
mod exchange;
#[cfg(feature = "safetensors")]
mod files;
mod fill;
mod layer;
mod left;
mod parked;
mod plan;
mod rejoin;
mod replicas;
mod ring;
mod share;
mod spares;
mod staging;
mod taken;
mod update;
mod window;

pub use choose::Patterns;
pub use cut::{Cut, RANKS_MAX};
#[cfg(feature = "safetensors")]
pub use files::Files;
pub use layer::{Layout, Placed, Tensor};
pub use plan::{Bytes, Closing, Group, LAYERS_MAX, LayerPlan, Odd, Place, Plan, Sharding, Source};
pub use replicas::{Replica, Replication};
pub use ring::{Prefetch, Pull, Ring, RingOptions, Wrap};
pub use update::{Border, Outcome, Update};
pub use window::{Pulls, Windows};
