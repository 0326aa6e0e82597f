//! Frames: what the two ends of a transfer tell each other.
//!
//! A frame is one message of a connection. The connection frames it: as a message of a
//! [`Session`](crate::peer::Session), or as a length and its bytes on a stream. Each side says hello once, first. The
//! first byte is the frame's kind. The last 4 are the CRC32C of those before. Numbers are little-endian. A *fence* is a
//! request and a generation, 8 bytes each; *tokens* are a first one and an end, 4 bytes each.
//!
//! | kind | from | then |
//! |---|---|---|
//! | 1 hello | both | instance (8); replica, stage, lane (4 each); the most parts before it answers (4); its side |
//! | 2 grant | receiver | fence; tokens, first that is wanted, sender's replica (4 each); list of landing pages |
//! | 3 notice | sender | number (8); count of parts (2), and the parts |
//! | 4 answer | receiver | number (8); count of parts with runs that failed (2), and of each: index (2), list of runs |
//! | 5 payload | sender | number (8); fence; kind (1); digest (4); bytes |
//! | 6 end | receiver | fence; reason (1): it reads nothing of this use any more |
//! | 7 failed | sender | fence; reason (1): no more will come |
//! | 8 drained | sender | fence: nothing that was enqueued under it will land any more |
//! | 9 known | sender | fence: its grant has come |
//!
//! A side is in its own bytes ([`Side::encode`](crate::transfer::Side::encode)). A *list*, of pages or of runs, is a
//! count (4) and so many numbers (4 each). A part of a notice is:
//!
//! | bytes | field |
//! |---|---|
//! | 16, 4, 8 | fence; layer; tokens |
//! | 4, 4, 4 | chunk: its first token, that one's place in the batch, a rank's tokens; zeros without chunks |
//! | 8 | origin |
//! | 1, 4 | 0: digests of all its runs; 1: of some; 2: all its runs without digests; 3: some without. How many |
//! | 4 n, 8 n, 0 or 4 n | digests, or for each an index and a digest; nothing, or indices |
//!
//! **Trust.** Reading a frame allocates nothing. A list is borrowed from the frame, whose bytes are there.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::peer::MESSAGE_MAX;
use crate::transfer::digest::crc;
use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Chunk;

/// The most bytes of a frame.
pub const FRAME_MAX: usize = MESSAGE_MAX;
/// The most bytes of a payload.
pub const PAYLOAD_MAX: usize = FRAME_MAX - 64;
/// The most landing pages of a grant.
pub const LANDING_MAX: usize = (FRAME_MAX - 64) / 4;
/// The bytes of a notice besides its parts, and of a part before its digests.
pub(super) const NOTICE: usize = 15;
pub(super) const PART: usize = 53;

/// The most runs of a part: some of them may be sent again, each with its index and its digest.
pub(super) const RUNS_MAX: usize = (FRAME_MAX - NOTICE - PART) / 8;

const OPERATION: &str = "transfer frame";

/// A rank of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank {
    /// The instance: a number that its ranks share and no other instance has. One that starts again has another.
    pub instance: u64,
    /// The replica.
    pub replica: u32,
    /// The pipeline stage.
    pub stage: u32,
    /// The place in the stage.
    pub lane: u32,
}

/// Why a use of pages ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// All rows and payloads are there.
    Done,
    /// One side gave the request up.
    Aborted,
    /// Runs did not have their digests, time after time.
    Corrupt,
    /// A deadline passed.
    TimedOut,
    /// A rank is gone.
    PeerLost,
    /// The other side sent what no side of this version sends.
    BadFormat,
    /// The sender no longer holds the rows, or does not keep the grant: too many wait, or it is too old.
    Gone,
}

impl Reason {
    const ALL: [Reason; 7] = [
        Reason::Done,
        Reason::Aborted,
        Reason::Corrupt,
        Reason::TimedOut,
        Reason::PeerLost,
        Reason::BadFormat,
        Reason::Gone,
    ];

    /// As an error's kind.
    pub const fn kind(self) -> Kind {
        match self {
            Reason::Done | Reason::Aborted => Kind::Cancelled,
            Reason::Corrupt => Kind::Corrupt,
            Reason::TimedOut => Kind::TimedOut,
            Reason::PeerLost => Kind::PeerLost,
            Reason::BadFormat => Kind::BadFormat,
            Reason::Gone => Kind::Closed,
        }
    }
}

/// A frame.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame<'a> {
    /// What each side says first.
    Hello(Greeting<'a>),
    /// A receiver's pages for a request.
    Grant(Grant<'a>),
    /// Rows that the sender has.
    Notice(Notice<'a>),
    /// What became of a notice or payload.
    Answer(Answer<'a>),
    /// Bytes that are sent in the frame itself.
    Payload(Payload<'a>),
    /// The receiver reads nothing of this use any more.
    End {
        /// The use.
        fence: Fence,
        /// Why.
        reason: Reason,
    },
    /// The sender sends no more for this use.
    Failed {
        /// The use.
        fence: Fence,
        /// Why.
        reason: Reason,
    },
    /// Nothing lands under this fence any more.
    Drained {
        /// The use.
        fence: Fence,
    },
    /// A grant has come.
    Known {
        /// The use.
        fence: Fence,
    },
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting<'a> {
    /// Who speaks.
    pub rank: Rank,
    /// The most parts that it takes on this connection before it has answered. Of a sender it means nothing.
    pub window: u32,
    /// Its [`Side`](crate::transfer::Side) in bytes.
    pub side: &'a [u8],
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant<'a> {
    /// The use of pages.
    pub fence: Fence,
    /// Tokens of the request.
    pub tokens: u32,
    /// The first token that is wanted: the receiver has those before.
    pub first: u32,
    /// The sender's replica that computes the request.
    pub replica: u32,
    /// Pages to which a writer from afar writes, from that of the first wanted token on.
    pub landing: List<'a>,
}

/// Numbers of 4 bytes in a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct List<'a>(&'a [u8]);

impl<'a> List<'a> {
    /// The numbers.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u32> + Clone + 'a {
        self.0.chunks_exact(4).map(|bytes| bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)))
    }

    /// How many they are.
    pub const fn len(self) -> usize {
        self.0.len() / 4
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The number at an index.
    pub fn get(self, index: usize) -> Option<u32> {
        let bytes = self.0.get(index.checked_mul(4)?..)?.first_chunk()?;
        Some(u32::from_le_bytes(*bytes))
    }
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice<'a> {
    /// Its number on this connection.
    pub number: u64,
    parts: &'a [u8],
}

/// Rows of a layer of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows<'a> {
    /// The use of pages.
    pub fence: Fence,
    /// The layer's number in the model.
    pub layer: u32,
    /// The tokens.
    pub tokens: Range<u32>,
    /// Of a sender that divides tokens, the chunk that they are of; else zeros.
    pub chunk: Chunk,
    /// Where the sender has them: a number that the fabric understands.
    pub origin: u64,
    /// The digests of its runs.
    pub digests: Digests<'a>,
}

/// Digests of a part's runs, which both sides compute in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digests<'a> {
    /// One for each run.
    All(List<'a>),
    /// For some runs an index and a digest, ascending: those that are sent again.
    Some(List<'a>),
    /// None, of all runs: how many these are.
    Without(u32),
    /// None, of some runs: their indices, ascending.
    SomeWithout(List<'a>),
}

impl<'a> Digests<'a> {
    /// Indices of the runs, ascending, and their digests if they have them.
    pub fn iter(self) -> impl Iterator<Item = (u32, Option<u32>)> + 'a {
        (0..self.count()).filter_map(move |at| match self {
            Digests::All(list) => Some((at as u32, Some(list.get(at)?))),
            Digests::Some(list) => Some((list.get(2 * at)?, Some(list.get(2 * at + 1)?))),
            Digests::Without(_) => Some((at as u32, None)),
            Digests::SomeWithout(list) => Some((list.get(at)?, None)),
        })
    }

    /// How many runs there are.
    pub const fn count(self) -> usize {
        match self {
            Digests::All(list) | Digests::SomeWithout(list) => list.len(),
            Digests::Some(list) => list.len() / 2,
            Digests::Without(count) => count as usize,
        }
    }

    /// Whether these are all runs of the part.
    pub const fn are_all(self) -> bool {
        matches!(self, Digests::All(_) | Digests::Without(_))
    }

    /// Whether the runs have digests.
    pub const fn are_there(self) -> bool {
        matches!(self, Digests::All(_) | Digests::Some(_))
    }
}

impl<'a> Notice<'a> {
    /// The parts.
    pub fn parts(self) -> impl Iterator<Item = Rows<'a>> {
        let mut rest = self.parts;
        std::iter::from_fn(move || part(&mut rest))
    }
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// The number of the notice or payload.
    pub number: u64,
    failed: &'a [u8],
}

impl<'a> Answer<'a> {
    /// The parts with runs that failed: the part's index and the indices of its runs. The rest is stored.
    pub fn failed(self) -> impl Iterator<Item = (u16, List<'a>)> {
        let mut rest = self.failed;
        std::iter::from_fn(move || failed(&mut rest))
    }
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload<'a> {
    /// Its number on this connection.
    pub number: u64,
    /// The use of pages that it belongs to.
    pub fence: Fence,
    /// What it is, in the engine's numbers.
    pub kind: u8,
    /// Its digest.
    pub digest: u32,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl Frame<'_> {
    /// Appends the frame's bytes.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let begin = bytes.len();
        let head = |bytes: &mut Vec<u8>, kind: u8, fence: &Fence| {
            bytes.push(kind);
            write_fence(bytes, *fence);
        };
        match self {
            Frame::Hello(Greeting { rank, window, side }) => {
                bytes.push(1);
                bytes.extend(rank.instance.to_le_bytes());
                words(bytes, &[rank.replica, rank.stage, rank.lane, *window]);
                bytes.extend(*side);
            }
            Frame::Grant(Grant { fence, tokens, first, replica, landing }) => {
                head(bytes, 2, fence);
                words(bytes, &[*tokens, *first, *replica, landing.len() as u32]);
                bytes.extend(landing.0);
            }
            Frame::Notice(Notice { number, parts }) => {
                bytes.push(3);
                bytes.extend(number.to_le_bytes());
                bytes.extend((self::parts(parts) as u16).to_le_bytes());
                bytes.extend(*parts);
            }
            Frame::Answer(Answer { number, failed }) => {
                bytes.push(4);
                bytes.extend(number.to_le_bytes());
                bytes.extend((answers(failed) as u16).to_le_bytes());
                bytes.extend(*failed);
            }
            Frame::Payload(Payload { number, fence, kind, digest, bytes: own }) => {
                bytes.push(5);
                bytes.extend(number.to_le_bytes());
                write_fence(bytes, *fence);
                bytes.push(*kind);
                bytes.extend(digest.to_le_bytes());
                bytes.extend(*own);
            }
            Frame::End { fence, reason } => {
                head(bytes, 6, fence);
                bytes.push(*reason as u8);
            }
            Frame::Failed { fence, reason } => {
                head(bytes, 7, fence);
                bytes.push(*reason as u8);
            }
            Frame::Drained { fence } => head(bytes, 8, fence),
            Frame::Known { fence } => head(bytes, 9, fence),
        }
        add_sum(bytes, begin);
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for bytes that no side of this version sends.
    pub fn decode(bytes: &[u8]) -> Result<Frame<'_>> {
        let summed = bytes.split_last_chunk().filter(|_| bytes.len() <= FRAME_MAX);
        let summed = summed.filter(|(own, sum)| crc(own).to_le_bytes() == **sum);
        let mut rest = summed.map_or(&[][..], |(own, _)| own);
        match frame(&mut rest).filter(|_| rest.is_empty()) {
            Some(frame) => Ok(frame),
            None => Err(Error::new(Kind::BadFormat, OPERATION)
                .at("frame")
                .with("kind", bytes.first().copied().map_or(u64::MAX, u64::from))
                .with("bytes", bytes.len() as u64)),
        }
    }
}

/// Appends the sum of a frame that begins at `begin`.
fn add_sum(bytes: &mut Vec<u8>, begin: usize) {
    let sum = crc(bytes.get(begin..).unwrap_or_default());
    words(bytes, &[sum]);
}

fn words(bytes: &mut Vec<u8>, words: &[u32]) {
    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
}

fn write_fence(bytes: &mut Vec<u8>, fence: Fence) {
    bytes.extend(fence.request.to_le_bytes());
    bytes.extend(fence.generation.to_le_bytes());
}

/// The landing pages of a grant, in `bytes`.
pub(super) fn list<'a>(bytes: &'a mut Vec<u8>, numbers: &[u32]) -> List<'a> {
    bytes.clear();
    words(bytes, numbers);
    List(bytes)
}

/// Makes a notice, part by part and run by run.
pub(super) struct NoticeWriter<'a> {
    bytes: &'a mut Vec<u8>,
    parts: u16,
    /// Where the count of the last part's runs is.
    count: usize,
    runs: u32,
}

impl<'a> NoticeWriter<'a> {
    /// A notice without parts.
    pub fn new(bytes: &'a mut Vec<u8>, number: u64) -> NoticeWriter<'a> {
        bytes.clear();
        bytes.push(3);
        bytes.extend(number.to_le_bytes());
        bytes.extend(0_u16.to_le_bytes());
        NoticeWriter { bytes, parts: 0, count: 0, runs: 0 }
    }

    /// Begins a part; its own digests are ignored. `some` says whether the runs' indices come, `without` that their
    /// digests do not.
    pub fn part(&mut self, part: &Rows<'_>, some: bool, without: bool) {
        self.end_part();
        write_fence(self.bytes, part.fence);
        let Chunk { first, at, slice } = part.chunk;
        words(self.bytes, &[part.layer, part.tokens.start, part.tokens.end, first, at, slice]);
        self.bytes.extend(part.origin.to_le_bytes());
        self.bytes.push(u8::from(some) + 2 * u8::from(without));
        self.count = self.bytes.len();
        words(self.bytes, &[0]);
        (self.parts, self.runs) = (self.parts.saturating_add(1), 0);
    }

    /// Adds a run: its index if the part is of some runs, and its digest if they have them.
    pub fn run(&mut self, index: Option<u32>, digest: Option<u32>) {
        index.into_iter().chain(digest).for_each(|number| words(self.bytes, &[number]));
        self.runs += 1;
    }

    fn end_part(&mut self) {
        if self.parts > 0 {
            let count = self.runs.to_le_bytes();
            self.bytes.iter_mut().skip(self.count).zip(count).for_each(|(to, from)| *to = from);
        }
    }

    /// Ends the notice.
    pub fn end(mut self) {
        self.end_part();
        self.bytes.iter_mut().skip(9).zip(self.parts.to_le_bytes()).for_each(|(to, from)| *to = from);
        add_sum(self.bytes, 0);
    }
}

/// Makes an answer: `failed` are runs by part and index, in order. It is shorter than the notice that it answers.
pub(super) fn answer(bytes: &mut Vec<u8>, number: u64, failed: &[(u16, u32)]) {
    bytes.clear();
    bytes.push(4);
    bytes.extend(number.to_le_bytes());
    let groups = failed.chunk_by(|a, b| a.0 == b.0);
    bytes.extend((groups.clone().count() as u16).to_le_bytes());
    for group in groups {
        let part = group.first().map_or(0, |(part, _)| *part);
        bytes.extend(part.to_le_bytes());
        words(bytes, &[group.len() as u32]);
        group.iter().for_each(|(_, run)| words(bytes, &[*run]));
    }
    add_sum(bytes, 0);
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*first)
}

fn word(rest: &mut &[u8]) -> Option<u32> {
    take(rest).map(u32::from_le_bytes)
}

fn long(rest: &mut &[u8]) -> Option<u64> {
    take(rest).map(u64::from_le_bytes)
}

fn byte(rest: &mut &[u8]) -> Option<u8> {
    take(rest).map(|[byte]| byte)
}

fn fence(rest: &mut &[u8]) -> Option<Fence> {
    Some(Fence { request: long(rest)?, generation: long(rest)? })
}

/// So many numbers, if their bytes are there.
fn numbers<'a>(rest: &mut &'a [u8], count: usize) -> Option<List<'a>> {
    let (list, after) = rest.split_at_checked(count.checked_mul(4)?)?;
    *rest = after;
    Some(List(list))
}

fn reason(rest: &mut &[u8]) -> Option<Reason> {
    Reason::ALL.get(usize::from(byte(rest)?)).copied()
}

fn part<'a>(rest: &mut &'a [u8]) -> Option<Rows<'a>> {
    let fence = fence(rest)?;
    let layer = word(rest)?;
    let tokens = word(rest)?..word(rest)?;
    let chunk = Chunk { first: word(rest)?, at: word(rest)?, slice: word(rest)? };
    let origin = long(rest)?;
    let (some, count) = (byte(rest)?, word(rest)? as usize);
    let digests = match some {
        0 => Digests::All(numbers(rest, count)?),
        1 => Digests::Some(numbers(rest, count.checked_mul(2)?)?),
        // There are no bytes that would bound them.
        2 if count <= RUNS_MAX => Digests::Without(count as u32),
        3 => Digests::SomeWithout(numbers(rest, count)?),
        _ => return None,
    };
    Some(Rows { fence, layer, tokens, chunk, origin, digests })
}

fn failed<'a>(rest: &mut &'a [u8]) -> Option<(u16, List<'a>)> {
    let (part, count) = (take(rest).map(u16::from_le_bytes)?, word(rest)? as usize);
    Some((part, numbers(rest, count)?))
}

/// How many parts some bytes are.
fn parts(mut bytes: &[u8]) -> usize {
    std::iter::from_fn(|| part(&mut bytes)).count()
}

fn answers(mut bytes: &[u8]) -> usize {
    std::iter::from_fn(|| failed(&mut bytes)).count()
}

/// Reads `count` items that are the rest of a frame. Returns their bytes.
fn items<'a, T>(
    rest: &mut &'a [u8],
    count: u16,
    item: impl Fn(&mut &'a [u8]) -> Option<T>,
) -> Option<&'a [u8]> {
    let all = *rest;
    for _ in 0..count {
        item(rest)?;
    }
    Some(all)
}

fn frame<'a>(rest: &mut &'a [u8]) -> Option<Frame<'a>> {
    Some(match byte(rest)? {
        1 => {
            let instance = long(rest)?;
            let rank = Rank { instance, replica: word(rest)?, stage: word(rest)?, lane: word(rest)? };
            let window = word(rest)?;
            Frame::Hello(Greeting { rank, window, side: std::mem::take(rest) })
        }
        2 => {
            let fence = fence(rest)?;
            let (tokens, first, replica) = (word(rest)?, word(rest)?, word(rest)?);
            let count = word(rest)? as usize;
            Frame::Grant(Grant { fence, tokens, first, replica, landing: numbers(rest, count)? })
        }
        3 => {
            let (number, count) = (long(rest)?, take(rest).map(u16::from_le_bytes)?);
            Frame::Notice(Notice { number, parts: items(rest, count, part)? })
        }
        4 => {
            let (number, count) = (long(rest)?, take(rest).map(u16::from_le_bytes)?);
            Frame::Answer(Answer { number, failed: items(rest, count, failed)? })
        }
        5 => {
            let (number, fence) = (long(rest)?, fence(rest)?);
            let (kind, digest) = (byte(rest)?, word(rest)?);
            Frame::Payload(Payload { number, fence, kind, digest, bytes: std::mem::take(rest) })
        }
        6 => Frame::End { fence: fence(rest)?, reason: reason(rest)? },
        7 => Frame::Failed { fence: fence(rest)?, reason: reason(rest)? },
        8 => Frame::Drained { fence: fence(rest)? },
        9 => Frame::Known { fence: fence(rest)? },
        _ => return None,
    })
}
