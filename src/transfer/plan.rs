//! The pairing of two sides: what every rank of the receiver gets from which ranks of the sender, or why it cannot.
//!
//! **What is refused.** Components of other types, heads or sizes; layers or components that the receiver keeps and the
//! sender does not have; heads that ranks cannot divide; places that overlap or leave their page. What the sender has
//! and the receiver does not keep is not sent: layers of multi-token prediction, index keys.
//!
//! **Cost.** A plan is made once for two instances. It takes memory for each layer and component, whatever the number
//! of ranks and tokens.

use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::transfer::side::{Component, OPERATION, Place, Shape, Side, Split, invalid};

/// A component of a layer on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// The layer's number in the model.
    pub layer: u32,
    /// The receiver's component.
    pub component: u32,
    pub heads: u32,
    pub head_bytes: u64,
    /// The sender's stage and place.
    pub from_stage: u32,
    pub from: Place,
    pub to_stage: u32,
    pub to: Place,
}

/// How the rows of a sender's ranks become the rows of a receiver's. See the [module](crate::transfer) page.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) source: Shape,
    pub(super) target: Shape,
    /// By layer.
    pub(super) pairs: Vec<Pair>,
}

impl Plan {
    /// Pairs a sender and a receiver.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field of a side that is wrong in itself, or what the two sides do not agree
    /// on; [`Kind::Unsupported`] for a receiver that divides requests by tokens; [`Kind::OutOfMemory`].
    pub fn new(source: &Side, target: &Side) -> Result<Plan> {
        source.check()?;
        target.check()?;
        if target.split == Split::Tokens {
            return Err(Error::new(Kind::Unsupported, OPERATION)
                .at("a receiver whose ranks divide tokens")
                .hint("let each rank of the receiver have all tokens of its heads"));
        }
        let count = target.stages.iter().flat_map(|stage| &stage.layers).map(|of| of.places.len()).sum();
        let mut pairs = vector(count, OPERATION, "pairs of places")?;
        for (to_stage, stage) in (0..).zip(&target.stages) {
            for of in &stage.layers {
                let found = (0..).zip(&source.stages).find_map(|(number, stage)| {
                    Some((number, stage.layers.iter().find(|other| other.layer == of.layer)?))
                });
                let Some((from_stage, from)) = found else {
                    return Err(invalid("a layer that the sender does not have").with("layer", of.layer));
                };
                for to in &of.places {
                    let (place, own) = agreed(source, target, &from.places, to)
                        .map_err(|error| error.with("layer", of.layer))?;
                    pairs.push(Pair {
                        layer: of.layer,
                        component: to.component,
                        heads: own.heads,
                        head_bytes: own.head_bytes,
                        from_stage,
                        from: place,
                        to_stage,
                        to: *to,
                    });
                }
            }
        }
        pairs.sort_by_key(|pair| pair.layer);
        Ok(Plan { source: source.shape(), target: target.shape(), pairs })
    }

    /// Visits the ranks of the sender of which a rank of the receiver gets rows of a long enough request, by stage and
    /// lane.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a rank that is not there.
    pub fn senders(&self, (stage, lane): (u32, u32), mut visit: impl FnMut((u32, u32))) -> Result<()> {
        self.target.check_rank(stage, lane)?;
        self.each_rank(&self.source, |from| self.meet(from, (stage, lane)), &mut visit);
        Ok(())
    }

    /// Visits the ranks of the receiver that get rows from a rank of the sender, by stage and lane.
    ///
    /// # Errors
    /// As [`Plan::senders`].
    pub fn receivers(&self, (stage, lane): (u32, u32), mut visit: impl FnMut((u32, u32))) -> Result<()> {
        self.source.check_rank(stage, lane)?;
        self.each_rank(&self.target, |to| self.meet((stage, lane), to), &mut visit);
        Ok(())
    }

    /// Whether a layer is sent.
    pub(super) fn sends(&self, layer: u32) -> bool {
        self.pairs.binary_search_by_key(&layer, |pair| pair.layer).is_ok()
    }

    /// A number of runs that some tokens of a layer do not exceed between any two ranks.
    pub(super) fn most_runs(&self, layer: u32, tokens: u32) -> u64 {
        let first = self.pairs.partition_point(|pair| pair.layer < layer);
        let pairs = self.pairs.iter().skip(first).take_while(|pair| pair.layer == layer);
        // A run begins where tokens begin, where a page of either side does, and where the sender's rank changes.
        let pages = |side: &Shape| u64::from(tokens / side.page_tokens.max(1)) + 1;
        let cuts = pages(&self.source) + pages(&self.target) + 2;
        pairs.map(|pair| cuts * u64::from(self.target.heads(pair.heads))).sum()
    }

    /// The bytes that some tokens of a layer take on a rank of the receiver: no rank of the sender has more of them.
    pub(super) fn most_bytes(&self, layer: u32, tokens: u32) -> u64 {
        let first = self.pairs.partition_point(|pair| pair.layer < layer);
        let pairs = self.pairs.iter().skip(first).take_while(|pair| pair.layer == layer);
        let of_token = |pair: &Pair| pair.head_bytes.saturating_mul(self.target.heads(pair.heads).into());
        pairs.map(of_token).fold(0, u64::saturating_add).saturating_mul(tokens.into())
    }

    fn each_rank(
        &self,
        side: &Shape,
        meets: impl Fn((u32, u32)) -> bool,
        visit: &mut impl FnMut((u32, u32)),
    ) {
        for stage in 0..side.stages {
            (0..side.width).map(|lane| (stage, lane)).filter(|rank| meets(*rank)).for_each(&mut *visit);
        }
    }

    /// Whether a rank of the sender has heads of a pair that a rank of the receiver gets.
    pub(super) fn meet(&self, from: (u32, u32), to: (u32, u32)) -> bool {
        self.pairs.iter().filter(|pair| (pair.from_stage, pair.to_stage) == (from.0, to.0)).any(|pair| {
            let heads = |side: &Shape, lane| {
                let first = side.first_head(pair.heads, lane);
                first..first + side.heads(pair.heads)
            };
            let (from, to) = (heads(&self.source, from.1), heads(&self.target, to.1));
            from.start < to.end && to.start < from.end
        })
    }

    /// The numbers of the layers that are sent, ascending.
    pub fn layers(&self) -> impl Iterator<Item = u32> + '_ {
        self.pairs.chunk_by(|a, b| a.layer == b.layer).filter_map(|pairs| Some(pairs.first()?.layer))
    }
}

/// The sender's place of a receiver's component, and the component, if both sides mean the same.
fn agreed<'a>(
    source: &Side,
    target: &'a Side,
    places: &[Place],
    to: &Place,
) -> Result<(Place, &'a Component)> {
    let number = u64::from(to.component);
    let wrong = |what| invalid(what).with("component", number);
    let Some(own) = target.components.get(to.component as usize) else {
        return Err(wrong("component of a place"));
    };
    let other = (0..).zip(&source.components).find(|(_, other)| other.name == own.name);
    let Some((index, other)) = other else {
        return Err(wrong("a component that the sender does not have"));
    };
    if other.dtype != own.dtype {
        return Err(
            wrong("the type of a component").hint("rows are not converted: both sides must store one type")
        );
    }
    if other.heads != own.heads {
        return Err(wrong("heads of a component").with("sender", other.heads).with("receiver", own.heads));
    }
    if other.head_bytes != own.head_bytes {
        return Err(wrong("bytes of a component")
            .with("sender", other.head_bytes)
            .with("receiver", own.head_bytes));
    }
    match places.iter().find(|place| place.component == index) {
        Some(place) => Ok((*place, own)),
        None => Err(wrong("a component of a layer that the sender does not have")),
    }
}
