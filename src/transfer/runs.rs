//! The runs of a request: bytes of the sender's pages, and the bytes of the receiver's pages that they become.
//!
//! **Every byte once.** Each byte of the receiver's rows is in exactly one run. What several ranks of the sender have,
//! one of them sends: copies take turns by page and layer, so that all of them send equally. What several ranks of the
//! receiver keep, each of them gets.
//!
//! **Cuts.** A run is of one component. It ends where a page of either side ends, where the sender's tokens change
//! their rank, and where a chunk of the prompt ends. Padding is in no run. Heads and tokens that touch each other on
//! both sides are in one piece.
//!
//! **Order.** The runs of a layer come by the receiver's places, in the order in which its side lists them, then by its
//! lane and page. Both sides compute them alike.
//!
//! **Cost.** A visit allocates nothing. It takes as long as there are runs, at least one for each page, lane and
//! component: who does not trust the other side bounds its requests first.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::fallible::reserve;
use crate::transfer::plan::{Pair, Plan};
use crate::transfer::side::{OPERATION, Place, Shape, Split};

/// A chunk of a prompt, as a sender that divides tokens computed it: a part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The chunk's first token in its request. A chunk ends where the next one begins.
    pub first: u32,
    /// The place of that token among the tokens of the batch: how many the requests before it have.
    pub at: u32,
    /// Tokens of the batch that each rank of the stage has, padding included.
    pub slice: u32,
}

/// A request whose rows are sent.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its tokens.
    pub tokens: u32,
    /// The replica that computed it, and the one that will decode it.
    pub replicas: [u32; 2],
    /// Of a sender that divides tokens the chunks of the tokens that are sent, ascending; otherwise none. The last one
    /// ends with `tokens`, so these may be the tokens that are computed so far.
    pub chunks: &'a [Chunk],
}

/// Whose runs are visited. A rank is given by its stage and its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// Those of all ranks.
    All,
    /// Those that a rank of the sender sends.
    Sender(u32, u32),
    /// Those that a rank of the receiver gets.
    Receiver(u32, u32),
    /// Those that the first rank, of the sender, sends to the second one.
    Between((u32, u32), (u32, u32)),
}

/// One end of a run, in the request's replica of its side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The stage of the rank.
    pub stage: u32,
    /// The rank's place in its stage.
    pub lane: u32,
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
    /// The chunk that it is a part of: its index in [`Request::chunks`]; 0 where there are none.
    pub chunk: u32,
    /// The run's first token in the request.
    pub token: u32,
    /// Tokens of the run.
    pub tokens: u32,
    /// The first of its heads, counted among those that the receiver's rank has.
    pub head: u32,
    /// Heads of the run.
    pub heads: u32,
    /// Where the bytes are.
    pub from: End,
    /// Where they go.
    pub to: End,
    /// Bytes of a piece.
    pub bytes: u64,
    /// Pieces. Of one piece the strides mean nothing.
    pub pieces: u32,
}

impl Run {
    /// All its bytes.
    pub fn total(&self) -> u64 {
        self.bytes.saturating_mul(self.pieces.into())
    }
}

/// The first bytes of a buffer, as many as a run has; it grows if it is too small.
pub(super) fn room<'a>(buffer: &'a mut Vec<u8>, run: &Run) -> Result<&'a mut [u8]> {
    let bytes = usize::try_from(run.total()).unwrap_or(usize::MAX);
    if buffer.len() < bytes {
        let more = bytes - buffer.len();
        reserve(buffer, more, OPERATION, "bytes of a run")?;
        buffer.resize(bytes, 0);
    }
    Ok(buffer.get_mut(..bytes).unwrap_or_default())
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
    /// [`Kind::OutOfRange`] for a layer that is not sent, a replica, rank or tokens that are not there, and chunks that
    /// do not cover the tokens; errors of `visit`.
    pub fn runs(
        &self,
        request: &Request<'_>,
        (layer, tokens): (u32, Range<u32>),
        of: Of,
        mut visit: impl FnMut(Run) -> Result<()>,
    ) -> Result<()> {
        self.check(request, &tokens)?;
        match of {
            Of::All => {}
            Of::Sender(stage, lane) => self.source.check_rank(stage, lane)?,
            Of::Receiver(stage, lane) => self.target.check_rank(stage, lane)?,
            Of::Between(from, to) => {
                self.source.check_rank(from.0, from.1)?;
                self.target.check_rank(to.0, to.1)?;
            }
        }
        let first = self.pairs.partition_point(|pair| pair.layer < layer);
        let of_layer = || self.pairs.iter().skip(first).take_while(|pair| pair.layer == layer);
        if of_layer().next().is_none() {
            return Err(out_of_range("layer").with("layer", layer));
        }
        let mut visit = |run: Run| match of {
            Of::Sender(_, lane) | Of::Between((_, lane), _) if run.from.lane != lane => Ok(()),
            _ => visit(run),
        };
        for pair in of_layer() {
            let (stage, own) = match of {
                Of::Receiver(stage, lane) => (pair.to_stage == stage, Some(lane)),
                Of::Sender(stage, _) => (pair.from_stage == stage, None),
                Of::Between((from, _), (to, lane)) => {
                    (pair.from_stage == from && pair.to_stage == to, Some(lane))
                }
                Of::All => (true, None),
            };
            for lane in (0..self.target.width).filter(|lane| stage && own.is_none_or(|own| own == *lane)) {
                self.runs_to(request, pair, lane, tokens.clone(), &mut visit)?;
            }
        }
        Ok(())
    }

    /// The bytes that a request's tokens take on the receiver's ranks, in all layers: what its runs carry.
    pub fn bytes(&self, tokens: u32) -> u64 {
        let of_pair = |pair: &Pair| {
            let heads = u64::from(self.target.width) * u64::from(self.target.heads(pair.heads));
            heads.saturating_mul(pair.head_bytes).saturating_mul(tokens.into())
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
        for (index, chunk) in request.chunks.iter().enumerate() {
            let end = request.chunks.get(index + 1).map_or(request.tokens, |chunk| chunk.first);
            let count = end.checked_sub(chunk.first).filter(|count| *count > 0);
            let last = count.and_then(|count| chunk.at.checked_add(count));
            let all = u64::from(chunk.slice) * u64::from(self.source.width);
            if last.is_none_or(|last| u64::from(last) > all) {
                return Err(out_of_range("chunk")
                    .with("chunk", index as u64)
                    .with("first", chunk.first)
                    .with("at", chunk.at)
                    .with("slice", chunk.slice));
            }
        }
        match request.chunks.first().map_or(request.tokens, |chunk| chunk.first) <= tokens.start {
            true => Ok(()),
            false => Err(out_of_range("chunks that do not cover the tokens").with("first", tokens.start)),
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
                pieces(
                    pair,
                    &heads,
                    [stretch.at, at],
                    count,
                    |(head, heads), offsets, strides, bytes, pieces| {
                        let end = |end: usize, stage, lane, page, place: &Place| {
                            let (offset, stride) = (offsets[end], strides[end]);
                            End { stage, lane, page, plane: place.plane, offset, stride }
                        };
                        visit(Run {
                            layer: pair.layer,
                            component: pair.component,
                            chunk: stretch.chunk,
                            token,
                            tokens: count,
                            head,
                            heads,
                            from: end(0, pair.from_stage, from_lane, stretch.page, &pair.from),
                            to: end(1, pair.to_stage, lane, page, &pair.to),
                            bytes,
                            pieces,
                        })
                    },
                )
            })?;
            token += count;
        }
        Ok(())
    }

    /// The tokens from `token` on that the sender has in one page of one rank; of any lane, if it divides heads.
    fn stretch(&self, request: &Request<'_>, token: u32) -> Stretch {
        let Shape { split, page_tokens, .. } = self.source;
        if split == Split::Heads {
            let (page, at) = (token / page_tokens, token % page_tokens);
            return Stretch { lane: 0, chunk: 0, page, at, count: page_tokens - at };
        }
        let index = request.chunks.partition_point(|chunk| chunk.first <= token).saturating_sub(1);
        let end = request.chunks.get(index + 1).map_or(request.tokens, |chunk| chunk.first);
        let Some(chunk) = request.chunks.get(index) else {
            return Stretch { lane: 0, chunk: 0, page: 0, at: 0, count: end - token };
        };
        let (place, slice) = (chunk.at + (token - chunk.first), chunk.slice.max(1));
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

/// Visits the bytes of some heads of `count` tokens, in one run where the strides allow it, else in one for each head:
/// the receiver's heads, the two offsets, the two strides, the bytes of a piece and the number of pieces.
fn pieces(
    pair: &Pair,
    heads: &Heads,
    at: [u32; 2],
    count: u32,
    mut visit: impl FnMut((u32, u32), [u64; 2], [u64; 2], u64, u32) -> Result<()>,
) -> Result<()> {
    let ends = [pair.from, pair.to];
    let (token_strides, head_strides) =
        (ends.map(|place| place.token_stride), ends.map(|place| place.head_stride));
    let offset = |place: &Place, at: u32, head: u32| {
        place.offset + u64::from(at) * place.token_stride + u64::from(head) * place.head_stride
    };
    // From head `first` on; one piece, where the pieces touch each other on both sides.
    let mut strided = |(first, heads_of): (u32, u32), strides: [u64; 2], bytes: u64, pieces: u32| {
        let offsets =
            [offset(&pair.from, at[0], heads.from + first), offset(&pair.to, at[1], heads.to + first)];
        let (own, all) = ((heads.to + first, heads_of), bytes * u64::from(pieces));
        match pieces == 1 || strides == [bytes; 2] {
            true => visit(own, offsets, [all; 2], all, 1),
            false => visit(own, offsets, strides, bytes, pieces),
        }
    };
    let (bytes, all) = (pair.head_bytes, (0, heads.count));
    if heads.count == 1 || head_strides == [bytes; 2] {
        return strided(all, token_strides, bytes * u64::from(heads.count), count);
    }
    if count == 1 || token_strides == [bytes; 2] {
        return strided(all, head_strides, bytes * u64::from(count), heads.count);
    }
    (0..heads.count).try_for_each(|head| strided((head, 1), token_strides, bytes, count))
}

fn out_of_range(place: &'static str) -> Error {
    Error::new(Kind::OutOfRange, OPERATION).at(place)
}
