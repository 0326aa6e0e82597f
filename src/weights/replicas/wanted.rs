//! Replicas as an engine names them.

use super::set::Segment;
use crate::error::{Error, Kind, Result};
use crate::weights::exchange::REPLICAS;
use crate::weights::plan::{Place, Plan, Source};
use crate::weights::window::{find, refused};

/// A copy of a range of a sharded layer, on a rank that does not own all of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// The layer of the model.
    pub layer: usize,
    /// The range's name.
    pub tensor: String,
    /// The rank that holds the copy.
    pub rank: u32,
}

/// The replica that segments are of.
pub(super) fn replica(plan: &Plan, segment: Segment) -> Option<Replica> {
    let layer = plan.layers().get(segment.ordinal)?;
    let tensor = layer.layout.tensors().get(segment.tensor)?;
    Some(Replica { layer: layer.layer, tensor: tensor.name.clone(), rank: segment.holder })
}

/// The segments of replicas, in order.
///
/// # Errors
/// [`Kind::OutOfRange`] for a layer, tensor or rank that is not there; [`Kind::InvalidConfig`] for a replica that is
/// named twice, or of which no whole granule is another rank's.
pub(super) fn segments(plan: &Plan, wanted: &[Replica]) -> Result<Vec<Segment>> {
    let ranks = plan.group().ranks;
    let mut all = Vec::new();
    for Replica { layer, tensor, rank } in wanted {
        let wrong = |kind, what: &str| refused(kind, *layer, what).with("rank", *rank);
        let layers = plan.layers();
        let found = layers.binary_search_by_key(layer, |one| one.layer).ok();
        let Some((ordinal, own)) = found.and_then(|ordinal| Some((ordinal, layers.get(ordinal)?))) else {
            return Err(wrong(Kind::OutOfRange, "no tensor of it was chosen"));
        };
        let (index, _) = find(own, tensor)?;
        if *rank >= ranks {
            return Err(wrong(Kind::OutOfRange, "no rank of the group").with("ranks", ranks));
        }
        let before = all.len();
        let sharded = own.place != Place::Resident && plan.source() == Source::Peers;
        let owners = (0..ranks).filter(|owner| sharded && owner != rank);
        let of = |owner| Segment { ordinal, tensor: index, owner, holder: *rank };
        all.extend(owners.map(of).filter(|segment| segment.bytes(plan) > 0));
        if all.len() == before {
            return Err(wrong(Kind::InvalidConfig, "a replica of no bytes")
                .hint("replicate tensors of sharded layers, of which other ranks own whole granules"));
        }
    }
    all.sort_unstable();
    if all.windows(2).any(|two| two.first() == two.last()) {
        return Err(Error::new(Kind::InvalidConfig, REPLICAS.operation).at("a replica that is named twice"));
    }
    Ok(all)
}
