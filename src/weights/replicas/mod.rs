//! Replicas: copies of hot ranges on ranks that do not own them, whose number and place change at a step border.
//!
//! A hot range, such as a hot expert's weights, is read by every rank from the one that owns it, and that rank's link
//! is as hot as the range. A *replica* is a copy of one tensor's whole granules in the memory of another rank. A rank
//! reads its own replica, so its link carries nothing, and ranks without one divide owner and holders among themselves
//! (expert load balancing, as EPLB does it, moves weights like this while it serves).
//!
//! **States** of a change ([`Replication`]): *filling*, from [`super::Windows::replicate`] on, which takes the memory
//! of the replicas that this rank gains; [`Replication::advance`] fills them, so many bytes a step; *shared*, when the
//! ranks have given each other the new replicas ([`Replication::share`]); *over*, when it was committed
//! ([`super::Ring::commit_replicas`]) or given up. One that is dropped gives up. The decision is that of an update
//! ([`super::update`]): all ranks have the new set between the same two steps, or none does.
//!
//! **The flip** ([`commit`]) maps pieces at the addresses of other ranks' parts, from which pulls read, captured ones
//! too: a rank's own replica, or the owner's memory, or another holder's ([`set`]). So addresses and graphs hold. Then
//! the memory of replicas that are gone is given back.
//!
//! **No mixture.** Replicas hold the bytes of the owner, which the ranks compare by digests before they decide. So a
//! pull finds the layer's bytes whatever set its rank has, and what a rank maps is always memory that it holds: it
//! keeps what it imported until it maps it no longer. A mapping that is refused leaves its layer unusable, as in an
//! update.
//!
//! **A new version** of a layer drops the layer's replicas on all ranks: they have the old bytes. **A rank that comes
//! back** has none, so each rank that attaches it again drops all replicas then ([`super::Windows::reattach`]); while
//! another rank is missing, only those that the returned one held or owned. Either way the engine makes them anew. A
//! rank can also drop them on its own ([`super::Ring::drop_replicas`]), or read around ranks that ended
//! ([`super::Ring::reroute`]), because neither changes a byte.
//!
//! **Costs.** A replica takes as many bytes as its tensor has whole granules that its rank does not own. A change takes
//! the new ones before the old ones are given back, hashes each once at its owner and once at its holder, and sends a
//! message of each rank for each. A flip remaps each part of another rank that changes, once. On the host device a
//! rank holds an open file for each replica of the group. A rank keeps addresses for the most bytes that it gained at a
//! time, and for the most that it owned of what others gained, parked between changes ([`super::spares`]), each of up
//! to twice that length: a change that needs more makes a new range, and the device keeps the shorter one.
//!
//! **Not measured:** a copy of a pull can cross memory of several ranks' devices, which no machine with several GPUs
//! has run yet. Nor has a captured pull whose source is mapped to memory of another device after the capture.
//!
//! **What it does not do.** It does not decide what is hot. It replicates no part of a granule, so ends of a tensor
//! that share a granule with another one stay with the owner alone. It needs a driver that maps memory from any granule
//! on.

mod change;
mod commit;
mod set;
mod wanted;

pub use change::Replication;
pub(super) use set::{Held, bytes_of};
pub use wanted::Replica;
