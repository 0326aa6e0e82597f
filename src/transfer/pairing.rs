//! What two ends agree on when they connect: their sides, and the plan of the two.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::transfer::frames::{Frame, Greeting, PAYLOAD_MAX, Rank};
use crate::transfer::plan::Plan;
use crate::transfer::runs::Chunk;
use crate::transfer::side::{Side, Split};

const OPERATION: &str = "transfer hello";

/// Which end of a transfer a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Sender,
    Receiver,
}

/// A side of the other end, and the plan with it.
#[derive(Debug)]
pub(super) struct Paired {
    side: Vec<u8>,
    pub plan: Plan,
    replicas: u32,
    /// Of a sender: how many ranks of a replica get rows from this one.
    pub receivers: u32,
}

impl Paired {
    /// Whether both are of the same side.
    pub fn is_as(&self, other: &Paired) -> bool {
        self.side == other.side
    }

    /// Whether the sender divides tokens.
    pub fn divides(&self) -> bool {
        self.plan.source.split == Split::Tokens
    }
}

/// A connection's other end, once it has said hello.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub rank: Rank,
    /// The most parts that it takes before it has answered.
    pub window: u32,
    pub paired: Arc<Paired>,
}

/// This end.
#[derive(Debug)]
pub(super) struct Own {
    side: Side,
    bytes: Vec<u8>,
    pub rank: Rank,
    role: Role,
}

impl Own {
    /// # Errors
    /// Those of [`Side::encode`]; [`Kind::OutOfRange`] for a rank that the side does not have.
    pub fn new(side: Side, rank: Rank, role: Role) -> Result<Own> {
        let bytes = side.encode()?;
        side.shape().check_rank(rank.stage, rank.lane)?;
        if rank.replica >= side.replicas {
            return Err(Error::new(Kind::OutOfRange, OPERATION).at("replica").with("given", rank.replica));
        }
        if bytes.len() > PAYLOAD_MAX {
            let error = Error::new(Kind::Unsupported, OPERATION).at("a side that no frame has room for");
            return Err(error.with("bytes", bytes.len() as u64).with("most", PAYLOAD_MAX as u64));
        }
        Ok(Own { side, bytes, rank, role })
    }

    /// Whether a chunk of a sender that divides tokens covers some tokens.
    pub fn covers(&self, chunk: &Chunk, tokens: &Range<u32>) -> bool {
        let last = tokens.end.checked_sub(chunk.first).and_then(|count| chunk.at.checked_add(count));
        let all = u64::from(chunk.slice) * u64::from(self.side.width);
        chunk.first <= tokens.start && last.is_some_and(|last| u64::from(last) <= all)
    }

    /// Whether this side divides tokens.
    pub fn divides(&self) -> bool {
        self.side.split == Split::Tokens
    }

    /// This end's hello.
    pub fn hello(&self, window: u32) -> Frame<'_> {
        Frame::Hello(Greeting { rank: self.rank, window, side: &self.bytes })
    }

    /// Checks the other end's hello. `known` are the pairings of other connections: ranks of one instance share one.
    ///
    /// # Errors
    /// Those of [`Side::decode`] and [`Plan::new`]: both ends find the same; [`Kind::OutOfRange`] for a rank that its
    /// side does not have, and a window of nothing.
    pub fn meet<'a>(
        &self,
        greeting: &Greeting<'_>,
        mut known: impl Iterator<Item = &'a Arc<Paired>>,
    ) -> Result<Peer> {
        let paired = match known.find(|paired| paired.side == greeting.side) {
            Some(paired) => Arc::clone(paired),
            None => {
                let theirs = Side::decode(greeting.side)?;
                let plan = match self.role {
                    Role::Sender => Plan::new(&self.side, &theirs)?,
                    Role::Receiver => Plan::new(&theirs, &self.side)?,
                };
                let mut side = vector(greeting.side.len(), OPERATION, "side")?;
                side.extend(greeting.side);
                let mut receivers = 0;
                if self.role == Role::Sender {
                    plan.receivers((self.rank.stage, self.rank.lane), |_| receivers += 1)?;
                }
                Arc::new(Paired { side, plan, replicas: theirs.replicas, receivers })
            }
        };
        let Rank { replica, stage, lane, .. } = greeting.rank;
        let shape = match self.role {
            Role::Sender => paired.plan.target,
            Role::Receiver => paired.plan.source,
        };
        shape.check_rank(stage, lane)?;
        if replica >= paired.replicas || greeting.window == 0 {
            return Err(Error::new(Kind::OutOfRange, OPERATION)
                .at("replica and window")
                .with("replica", replica)
                .with("window", greeting.window));
        }
        Ok(Peer { rank: greeting.rank, window: greeting.window, paired })
    }
}
