//! The runs of a request: bytes of the sender's pages, and the bytes of the receiver's pages that they become.
//!
//! **Every byte once.** Each byte of the receiver's rows is in exactly one run. What several ranks of the sender have,
//! one of them sends: copies take turns by page and layer, so that all of them send equally. What several ranks of the
//! receiver keep, each of them gets.
//!
//! **Cuts.** A run ends where a page of either side ends, where the sender's tokens change their rank, and where a
//! chunk of the prompt ends. Padding is in no run. Runs that touch each other within a page are one.
//!
//! **Order.** Runs come by layer, then by component, rank and page of the receiver. Both sides compute them alike.
//!
//! **Cost.** A visit of a layer's runs allocates nothing.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::transfer::plan::{Pair, Plan};
use crate::transfer::side::{OPERATION, Place, Shape, Split};

/// A chunk of a prompt, as a sender that divides tokens computed it: a part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The chunk's first token in its request. A chunk ends where the next one begins.
    pub first: u32,
    /// The place of that token among the tokens of the batch: how many the requests before it have.
    pub at: u32,
    /// Tokens of the batch, without padding. Each rank of a stage has `tokens / width` of them, rounded up.
    pub batch: u32,
}

/// A request whose rows are sent.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its tokens.
    pub tokens: u32,
    /// The replica that computed it, and the one that will decode it.
    pub replicas: [u32; 2],
    /// Its chunks, of a sender that divides tokens; otherwise none.
    pub chunks: &'a [Chunk],
}

/// One end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The rank.
    pub rank: u32,
    /// The page: its index among the rank's pages of the request. Of a sender that divides tokens, its index among the
    /// rank's pages of the chunk's batch.
    pub page: u32,
    /// The plane.
    pub plane: u32,
    /// The first byte in the page.
    pub offset: u64,
    /// Bytes from a piece to the next one.
    pub stride: u64,
}

/// Bytes that go from a page to a page: `pieces` pieces of `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The layer's number in the model.
    pub layer: u32,
    /// The component: its index in the receiver's list.
    pub component: u32,
    /// The chunk that it is a part of; 0 where there are none.
    pub chunk: u32,
    /// The run's first token in the request, and how many it has.
    pub token: u32,
    /// Tokens of the run.
    pub tokens: u32,
    /// Where the bytes are.
    pub from: End,
    /// Where they go.
    pub to: End,
    /// Bytes of a piece.
    pub bytes: u64,
    /// Pieces.
    pub pieces: u32,
}

/// Where consecutive tokens of the sender are.
struct Stretch {
    lane: u32,
    chunk: u32,
    page: u32,
    /// The first one's place in the page.
    at: u32,
    count: u32,
}

/// The heads of a pair that one rank of the sender has and one of the receiver gets.
struct Heads {
    /// By their places among the rank's own heads.
    from: u32,
    to: u32,
    count: u32,
}

impl Plan {
    /// Visits the runs of some tokens of a request in one layer, and stops at the first error of `visit`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer that is not sent, a replica or tokens that are not there, and chunks that do
    /// not cover the request; errors of `visit`.
    pub fn runs(
        &self,
        request: &Request<'_>,
        layer: u32,
        tokens: Range<u32>,
        mut visit: impl FnMut(Run) -> Result<()>,
    ) -> Result<()> {
        self.check(request, &tokens)?;
        let first = self.pairs.partition_point(|pair| pair.layer < layer);
        let of_layer = || self.pairs.iter().skip(first).take_while(|pair| pair.layer == layer);
        if of_layer().next().is_none() {
            return Err(out_of_range("layer").with("layer", layer));
        }
        for pair in of_layer() {
            for lane in 0..self.target.width {
                self.runs_to(request, pair, lane, tokens.clone(), &mut visit)?;
            }
        }
        Ok(())
    }

    /// The bytes that a request's tokens take on the receiver's ranks, in all layers: what its runs carry.
    pub fn bytes(&self, tokens: u32) -> u64 {
        let of_pair = |pair: &Pair| {
            let lanes = u64::from(self.target.width) * u64::from(self.target.heads(pair.heads));
            lanes * pair.head_bytes * u64::from(tokens)
        };
        self.pairs.iter().map(of_pair).fold(0, u64::saturating_add)
    }

    fn check(&self, request: &Request<'_>, tokens: &Range<u32>) -> Result<()> {
        for (replica, side) in request.replicas.iter().zip([&self.source, &self.target]) {
            if *replica >= side.replicas {
                return Err(out_of_range("replica").with("given", *replica).with("replicas", side.replicas));
            }
        }
        if tokens.start > tokens.end || tokens.end > request.tokens {
            return Err(out_of_range("tokens").with("end", tokens.end).with("tokens", request.tokens));
        }
        if self.source.split == Split::Heads {
            return match request.chunks {
                [] => Ok(()),
                _ => Err(out_of_range("chunks of a sender that does not divide tokens")),
            };
        }
        let mut next = 0;
        for (index, chunk) in request.chunks.iter().enumerate() {
            let end = request.chunks.get(index + 1).map_or(request.tokens, |chunk| chunk.first);
            let begins = if index == 0 { chunk.first == 0 } else { chunk.first == next && chunk.first > 0 };
            let count = end.checked_sub(chunk.first).filter(|count| *count > 0 || request.tokens == 0);
            let inside =
                count.and_then(|count| chunk.at.checked_add(count)).is_some_and(|end| end <= chunk.batch);
            if !begins || !inside {
                return Err(out_of_range("chunk")
                    .with("chunk", index as u64)
                    .with("first", chunk.first)
                    .with("at", chunk.at)
                    .with("batch", chunk.batch));
            }
            next = end;
        }
        match next == request.tokens {
            true => Ok(()),
            false => Err(out_of_range("chunks that do not cover the request").with("tokens", request.tokens)),
        }
    }

    /// The runs of a component to one rank of the receiver's stage.
    fn runs_to(
        &self,
        request: &Request<'_>,
        pair: &Pair,
        lane: u32,
        tokens: Range<u32>,
        visit: &mut impl FnMut(Run) -> Result<()>,
    ) -> Result<()> {
        let mut token = tokens.start;
        while token < tokens.end {
            let (page, at) = (token / self.target.page_tokens, token % self.target.page_tokens);
            let stretch = self.stretch(request, token);
            let count = stretch.count.min(self.target.page_tokens - at).min(tokens.end - token);
            self.heads(pair, &stretch, (lane, page), |from_lane, heads| {
                let end =
                    |shape: &Shape, replica, stage, lane, page| (shape.rank(replica, stage, lane), page);
                let [from, to] = request.replicas;
                let from = end(&self.source, from, pair.from_stage, from_lane, stretch.page);
                let to = end(&self.target, to, pair.to_stage, lane, page);
                let places = [stretch.at, at];
                pieces(pair, &heads, places, count, |(from_offset, to_offset), strides, bytes, pieces| {
                    let ends = [
                        (from, pair.from.plane, from_offset, strides[0]),
                        (to, pair.to.plane, to_offset, strides[1]),
                    ];
                    let [from, to] = ends.map(|((rank, page), plane, offset, stride)| End {
                        rank,
                        page,
                        plane,
                        offset,
                        stride,
                    });
                    let (layer, component, chunk) = (pair.layer, pair.component, stretch.chunk);
                    visit(Run { layer, component, chunk, token, tokens: count, from, to, bytes, pieces })
                })
            })?;
            token += count;
        }
        Ok(())
    }

    /// The tokens from `token` on that the sender has in one page of one rank; of any lane, if it divides heads.
    fn stretch(&self, request: &Request<'_>, token: u32) -> Stretch {
        let Shape { width, split, page_tokens, .. } = self.source;
        if split == Split::Heads {
            let (page, at) = (token / page_tokens, token % page_tokens);
            return Stretch { lane: 0, chunk: 0, page, at, count: page_tokens - at };
        }
        let index = request.chunks.partition_point(|chunk| chunk.first <= token).saturating_sub(1);
        let end = request.chunks.get(index + 1).map_or(request.tokens, |chunk| chunk.first);
        let Some(chunk) = request.chunks.get(index) else {
            return Stretch { lane: 0, chunk: 0, page: 0, at: 0, count: end - token };
        };
        let slice = chunk.batch.div_ceil(width);
        let place = chunk.at + (token - chunk.first);
        let (lane, local) = (place / slice, place % slice);
        let (page, at) = (local / page_tokens, local % page_tokens);
        let count = (slice - local).min(page_tokens - at).min(end - token);
        Stretch { lane, chunk: index as u32, page, at, count }
    }

    /// Visits the sender's ranks that have the heads of a rank of the receiver, and which heads these are.
    fn heads(
        &self,
        pair: &Pair,
        stretch: &Stretch,
        (lane, page): (u32, u32),
        mut visit: impl FnMut(u32, Heads) -> Result<()>,
    ) -> Result<()> {
        let first = self.target.first_head(pair.heads, lane);
        let end = first + self.target.heads(pair.heads);
        let (group, copies) = (self.source.heads(pair.heads), self.source.copies(pair.heads));
        let mut head = first;
        while head < end {
            let next = (head / group + 1).saturating_mul(group).min(end);
            let from_lane = match self.source.split {
                Split::Tokens => stretch.lane,
                // Of several copies one sends: they take turns.
                Split::Heads => {
                    head / group * copies + page.wrapping_add(pair.layer).wrapping_add(lane) % copies
                }
            };
            visit(from_lane, Heads { from: head % group, to: head - first, count: next - head })?;
            head = next;
        }
        Ok(())
    }
}

/// Visits the bytes of some heads of `count` tokens, in as few runs as the strides allow: the two offsets, the two
/// strides, the bytes of a piece and the number of pieces.
fn pieces(
    pair: &Pair,
    heads: &Heads,
    [from_at, to_at]: [u32; 2],
    count: u32,
    mut visit: impl FnMut((u64, u64), [u64; 2], u64, u32) -> Result<()>,
) -> Result<()> {
    let Pair { from, to, head_bytes, .. } = pair;
    let close = heads.count == 1 || (from.head_stride == *head_bytes && to.head_stride == *head_bytes);
    let (parts, bytes) = match close {
        true => (1, head_bytes * u64::from(heads.count)),
        false => (heads.count, *head_bytes),
    };
    for part in 0..parts {
        let offset = |place: &Place, at: u32, head: u32| {
            place.offset + u64::from(at) * place.token_stride + u64::from(head + part) * place.head_stride
        };
        let offsets = (offset(from, from_at, heads.from), offset(to, to_at, heads.to));
        match from.token_stride == bytes && to.token_stride == bytes {
            true => {
                let all = bytes * u64::from(count);
                visit(offsets, [all, all], all, 1)?;
            }
            false => visit(offsets, [from.token_stride, to.token_stride], bytes, count)?,
        }
    }
    Ok(())
}

fn out_of_range(place: &'static str) -> Error {
    Error::new(Kind::OutOfRange, OPERATION).at(place)
}
