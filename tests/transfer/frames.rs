//! Frames in bytes: written here by hand, from the table of the frames' documentation, and compared with what the
//! library reads and writes.

use forebay::Kind;
use forebay::transfer::{
    Digests, FRAME_MAX, Fence, Frame, Grant, Greeting, PAYLOAD_MAX, Payload, Rank, Reason,
};
use proptest::prelude::*;

use crate::frame_bytes::{frame_bytes, sum};
use crate::pair::{LAYERS, Pair, RECEIVING, SENDING, row, side};

/// The most runs of a part, each with an index and a digest, in a notice of this part alone.
const RUNS_MAX: u32 = (FRAME_MAX as u32 - 15 - 53) / 8;

/// Bytes of a frame, field by field.
#[derive(Clone, Default)]
pub struct Bytes(Vec<u8>);

impl Bytes {
    pub fn kind(kind: u8) -> Bytes {
        Bytes(vec![kind])
    }

    pub fn put(mut self, bytes: &[u8]) -> Bytes {
        self.0.extend(bytes);
        self
    }

    pub fn short(self, number: u16) -> Bytes {
        self.put(&number.to_le_bytes())
    }

    pub fn words(self, numbers: &[u32]) -> Bytes {
        numbers.iter().fold(self, |bytes, number| bytes.put(&number.to_le_bytes()))
    }

    pub fn longs(self, numbers: &[u64]) -> Bytes {
        numbers.iter().fold(self, |bytes, number| bytes.put(&number.to_le_bytes()))
    }

    /// With the sum.
    pub fn end(self) -> Vec<u8> {
        let sum = sum(&self.0);
        self.words(&[sum]).0
    }
}

/// A frame without the library's types.
#[derive(Clone, Debug, PartialEq)]
enum Plain {
    Hello(u64, [u32; 3], u32, Vec<u8>),
    Grant([u64; 2], [u32; 3], Vec<u32>),
    Notice(u64, Vec<Part>),
    Answer(u64, Vec<(u16, Vec<u32>)>),
    Payload(u64, [u64; 2], u8, u32, Vec<u8>),
    End([u64; 2], u8),
    Failed([u64; 2], u8),
    Drained([u64; 2]),
    Known([u64; 2]),
}

/// Fence, layer and tokens, chunk, origin; and the runs.
type Part = ([u64; 2], [u32; 3], [u32; 3], u64, Runs);

/// Runs of a part.
#[derive(Clone, Debug, PartialEq)]
enum Runs {
    /// The digests of all.
    All(Vec<u32>),
    /// Indices and digests of some.
    Some(Vec<(u32, u32)>),
    /// How many all are, without digests.
    Without(u32),
    /// Indices of some, without digests.
    SomeWithout(Vec<u32>),
}

impl Plain {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Plain::Hello(instance, rank, window, side) => {
                Bytes::kind(1).longs(&[*instance]).words(rank).words(&[*window]).put(side)
            }
            Plain::Grant(fence, numbers, landing) => {
                Bytes::kind(2).longs(fence).words(numbers).words(&[landing.len() as u32]).words(landing)
            }
            Plain::Notice(number, parts) => {
                let head = Bytes::kind(3).longs(&[*number]).short(parts.len() as u16);
                parts.iter().fold(head, |bytes, (fence, rows, chunk, origin, digests)| {
                    let bytes = bytes.longs(fence).words(rows).words(chunk).longs(&[*origin]);
                    match digests {
                        Runs::All(all) => bytes.put(&[0]).words(&[all.len() as u32]).words(all),
                        Runs::Some(some) => some
                            .iter()
                            .fold(bytes.put(&[1]).words(&[some.len() as u32]), |bytes, (index, digest)| {
                                bytes.words(&[*index, *digest])
                            }),
                        Runs::Without(count) => bytes.put(&[2]).words(&[*count]),
                        Runs::SomeWithout(some) => bytes.put(&[3]).words(&[some.len() as u32]).words(some),
                    }
                })
            }
            Plain::Answer(number, failed) => {
                let head = Bytes::kind(4).longs(&[*number]).short(failed.len() as u16);
                failed.iter().fold(head, |bytes, (part, runs)| {
                    bytes.short(*part).words(&[runs.len() as u32]).words(runs)
                })
            }
            Plain::Payload(number, fence, kind, digest, bytes) => {
                Bytes::kind(5).longs(&[*number]).longs(fence).put(&[*kind]).words(&[*digest]).put(bytes)
            }
            Plain::End(fence, reason) => Bytes::kind(6).longs(fence).put(&[*reason]),
            Plain::Failed(fence, reason) => Bytes::kind(7).longs(fence).put(&[*reason]),
            Plain::Drained(fence) => Bytes::kind(8).longs(fence),
            Plain::Known(fence) => Bytes::kind(9).longs(fence),
        }
        .end()
    }

    fn read(frame: &Frame<'_>) -> Plain {
        let fence = |fence: Fence| [fence.request, fence.generation];
        match frame {
            Frame::Hello(Greeting { rank, window, side }) => {
                Plain::Hello(rank.instance, [rank.replica, rank.stage, rank.lane], *window, side.to_vec())
            }
            Frame::Grant(of) => {
                assert_eq!(of.landing.get(of.landing.len()), None);
                let landing = (0..of.landing.len()).map(|at| of.landing.get(at).unwrap());
                Plain::Grant(fence(of.fence), [of.tokens, of.first, of.replica], landing.collect())
            }
            Frame::Notice(notice) => {
                let parts = notice.parts().map(|of| {
                    let indices: Vec<u32> = of.digests.iter().map(|(index, _)| index).collect();
                    let told: Vec<u32> = of.digests.iter().filter_map(|(_, digest)| digest).collect();
                    let all = of.digests.are_all();
                    assert_eq!(indices.len(), of.digests.count());
                    assert!(!all || indices.iter().copied().eq(0..indices.len() as u32));
                    assert_eq!(told.len(), if of.digests.are_there() { indices.len() } else { 0 });
                    let digests = match of.digests {
                        Digests::All(_) => Runs::All(told),
                        Digests::Some(_) => Runs::Some(indices.into_iter().zip(told).collect()),
                        Digests::Without(count) => Runs::Without(count),
                        Digests::SomeWithout(_) => Runs::SomeWithout(indices),
                    };
                    assert_eq!(all, matches!(digests, Runs::All(_) | Runs::Without(_)));
                    let chunk = [of.chunk.first, of.chunk.at, of.chunk.slice];
                    (fence(of.fence), [of.layer, of.tokens.start, of.tokens.end], chunk, of.origin, digests)
                });
                Plain::Notice(notice.number, parts.collect())
            }
            Frame::Answer(answer) => {
                let failed = answer.failed().map(|(part, runs)| (part, runs.iter().collect()));
                Plain::Answer(answer.number, failed.collect())
            }
            Frame::Payload(of) => {
                Plain::Payload(of.number, fence(of.fence), of.kind, of.digest, of.bytes.to_vec())
            }
            Frame::End { fence: of, reason } => Plain::End(fence(*of), *reason as u8),
            Frame::Failed { fence: of, reason } => Plain::Failed(fence(*of), *reason as u8),
            Frame::Drained { fence: of } => Plain::Drained(fence(*of)),
            Frame::Known { fence: of } => Plain::Known(fence(*of)),
        }
    }
}

fn plain() -> impl Strategy<Value = Plain> {
    let fence = any::<[u64; 2]>;
    let list = || prop::collection::vec(any::<u32>(), 0..5);
    let digests = prop_oneof![
        prop::collection::vec(any::<(u32, u32)>(), 0..5).prop_map(Runs::Some),
        list().prop_map(Runs::All),
        (0..=RUNS_MAX).prop_map(Runs::Without),
        list().prop_map(Runs::SomeWithout),
    ];
    let part = (fence(), any::<[u32; 3]>(), any::<[u32; 3]>(), any::<u64>(), digests);
    let bytes = || prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        (any::<u64>(), any::<[u32; 3]>(), any::<u32>(), bytes())
            .prop_map(|(a, b, c, d)| Plain::Hello(a, b, c, d)),
        (fence(), any::<[u32; 3]>(), list()).prop_map(|(a, b, c)| Plain::Grant(a, b, c)),
        (any::<u64>(), prop::collection::vec(part, 0..4)).prop_map(|(a, b)| Plain::Notice(a, b)),
        (any::<u64>(), prop::collection::vec((any::<u16>(), list()), 0..4))
            .prop_map(|(a, b)| Plain::Answer(a, b)),
        (any::<u64>(), fence(), any::<u8>(), any::<u32>(), bytes())
            .prop_map(|(a, b, c, d, e)| Plain::Payload(a, b, c, d, e)),
        (fence(), 0_u8..7).prop_map(|(a, b)| Plain::End(a, b)),
        (fence(), 0_u8..7).prop_map(|(a, b)| Plain::Failed(a, b)),
        fence().prop_map(Plain::Drained),
        fence().prop_map(Plain::Known),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]
    #[test]
    fn a_frame_is_read_as_it_was_written_and_written_as_it_was_read(
        frame in plain(),
        changes in prop::collection::vec((any::<u16>(), any::<u8>()), 1..4),
    ) {
        let bytes = frame.bytes();
        let read = Frame::decode(&bytes).unwrap();
        prop_assert_eq!(Plain::read(&read), frame);
        // It is appended.
        let mut again = vec![1, 2, 3];
        read.encode(&mut again);
        prop_assert_eq!(&again[..3], &[1, 2, 3]);
        prop_assert_eq!(&again[3..], &bytes);
        // Any changes, with a sum that fits: the body of the fuzz target `frame_bytes`.
        let mut other = bytes[..bytes.len() - 4].to_vec();
        for (at, value) in changes {
            let place = usize::from(at) % other.len();
            other[place] = value;
        }
        frame_bytes(&other);
    }
}

const FENCE: Fence = Fence { request: 0x0102_0304_0506_0708, generation: 9 };
const FENCE_BYTES: [u8; 16] = [8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 0, 0, 0, 0];

/// A frame of each kind, byte by byte, without its sum. These bytes are what `VERSION` means.
fn golden() -> [Vec<u8>; 9] {
    let number = [3, 0, 0, 0, 0, 0, 0, 0x80];
    let rows = [
        &FENCE_BYTES[..],
        // Layer, tokens, chunk, origin.
        &[5, 0, 0, 0, 0, 1, 0, 0, 2, 1, 0, 0],
        &[0xF0, 0, 0, 0, 0x11, 0, 0, 0, 0x22, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0x10, 0],
    ]
    .concat();
    [
        [&[1][..], &[5, 0, 0, 0, 0, 0, 0, 0x40], &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 4, 0, 0], b"side"]
            .concat(),
        [
            &[2][..],
            &FENCE_BYTES,
            &[0x10, 0x27, 0, 0, 64, 0, 0, 0, 1, 0, 0, 0],
            &[2, 0, 0, 0, 7, 0, 0, 0, 0xFF, 0xFF, 0, 0],
        ]
        .concat(),
        [
            &[3][..],
            &number,
            &[4, 0],
            &rows,
            &[0, 2, 0, 0, 0, 0xAA, 0, 0, 0, 0xBB, 0, 0, 0],
            &rows,
            &[1, 1, 0, 0, 0, 6, 0, 0, 0, 0xCC, 0, 0, 0],
            &rows,
            &[2, 5, 0, 0, 0],
            &rows,
            &[3, 1, 0, 0, 0, 6, 0, 0, 0],
        ]
        .concat(),
        [&[4][..], &number, &[1, 0], &[1, 0], &[2, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0]].concat(),
        [&[5][..], &number, &FENCE_BYTES, &[7], &[1, 2, 3, 4], b"logits"].concat(),
        [&[6][..], &FENCE_BYTES, &[0]].concat(),
        [&[7][..], &FENCE_BYTES, &[6]].concat(),
        [&[8][..], &FENCE_BYTES].concat(),
        [&[9][..], &FENCE_BYTES].concat(),
    ]
}

fn summed(bytes: &[u8]) -> Vec<u8> {
    Bytes::default().put(bytes).end()
}

fn kind_of(bytes: &[u8]) -> Option<Kind> {
    Frame::decode(bytes).err().map(|error| error.kind())
}

#[test]
fn the_bytes_of_each_kind_are_as_documented() {
    let fence = [FENCE.request, FENCE.generation];
    let (number, chunk, origin) = (0x8000_0000_0000_0003, [0xF0, 0x11, 0x22], 1 << 52);
    let rows = [5, 256, 258];
    let meant = [
        Plain::Hello(5 | 1 << 62, [1, 2, 3], 1024, b"side".to_vec()),
        Plain::Grant(fence, [10_000, 64, 1], vec![7, 0xFFFF]),
        Plain::Notice(
            number,
            vec![
                (fence, rows, chunk, origin, Runs::All(vec![0xAA, 0xBB])),
                (fence, rows, chunk, origin, Runs::Some(vec![(6, 0xCC)])),
                (fence, rows, chunk, origin, Runs::Without(5)),
                (fence, rows, chunk, origin, Runs::SomeWithout(vec![6])),
            ],
        ),
        Plain::Answer(number, vec![(1, vec![0, 6])]),
        Plain::Payload(number, fence, 7, 0x0403_0201, b"logits".to_vec()),
        Plain::End(fence, 0),
        Plain::Failed(fence, 6),
        Plain::Drained(fence),
        Plain::Known(fence),
    ];
    for (bytes, meant) in golden().iter().zip(meant) {
        let bytes = summed(bytes);
        let frame = Frame::decode(&bytes).unwrap();
        assert_eq!(Plain::read(&frame), meant);
        let mut again = Vec::new();
        frame.encode(&mut again);
        assert_eq!(again, bytes);
    }
    // Those that a caller can make.
    let rank = Rank { instance: 5 | 1 << 62, replica: 1, stage: 2, lane: 3 };
    let made = [
        (Frame::Hello(Greeting { rank, window: 1024, side: b"side" }), 0),
        (Frame::Payload(Payload { number, fence: FENCE, kind: 7, digest: 0x0403_0201, bytes: b"logits" }), 4),
        (Frame::End { fence: FENCE, reason: Reason::Done }, 5),
        (Frame::Failed { fence: FENCE, reason: Reason::Gone }, 6),
        (Frame::Drained { fence: FENCE }, 7),
        (Frame::Known { fence: FENCE }, 8),
    ];
    for (frame, of) in made {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(bytes, summed(&golden()[of]));
    }
    let mut bytes = Vec::new();
    let landing = forebay::transfer::List::default();
    Frame::Grant(Grant { fence: FENCE, tokens: 10_000, first: 64, replica: 1, landing }).encode(&mut bytes);
    assert_eq!(bytes, summed(&[&golden()[1][..29], &[0; 4]].concat()));
    // The sum is CRC32C: its check value in the catalogue of CRC algorithms.
    assert_eq!(sum(b"123456789"), 0xE306_9283);
    let reasons = ["Done", "Aborted", "Corrupt", "TimedOut", "PeerLost", "BadFormat", "Gone"];
    for (byte, name) in (0..).zip(reasons) {
        let bytes = summed(&[&[6][..], &FENCE_BYTES, &[byte]].concat());
        let Ok(Frame::End { reason, .. }) = Frame::decode(&bytes) else { panic!("{name}") };
        assert_eq!(format!("{reason:?}"), name);
    }
}

#[test]
fn a_frame_that_is_cut_or_damaged_or_has_more_is_none() {
    for (of, own) in (1..).zip(golden()) {
        let bytes = summed(&own);
        // The rest of a hello and of a payload is theirs, however long it is.
        let open = of == 1 || of == 5;
        let least = if of == 1 { 25 } else { 30 };
        for length in 0..bytes.len() {
            assert_eq!(kind_of(&bytes[..length]), Some(Kind::BadFormat), "kind {of}, {length} bytes");
        }
        for length in 0..own.len() {
            let fits = open && length >= least;
            let wanted = (!fits).then_some(Kind::BadFormat);
            assert_eq!(kind_of(&summed(&own[..length])), wanted, "kind {of}, {length} bytes and a sum");
        }
        for bit in 0..8 * bytes.len() {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(kind_of(&other), Some(Kind::BadFormat), "kind {of}, bit {bit}");
        }
        let more = [own.as_slice(), &[0]].concat();
        assert_eq!(kind_of(&summed(&more)), (!open).then_some(Kind::BadFormat), "kind {of} and a byte");
        assert_eq!(kind_of(&[bytes.as_slice(), &[0]].concat()), Some(Kind::BadFormat));
    }
    assert_eq!(kind_of(&summed(&[])), Some(Kind::BadFormat));
}

#[test]
fn numbers_that_no_frame_has_are_refused() {
    let golden = golden();
    // The frame, the place of the number, its bytes, and the values that are refused: kinds, counts, flags, reasons.
    let counts: &[u32] = &[0, 1, 3, 0x4000_0002, 0x8000_0002, u32::MAX];
    let wrong: [(usize, usize, usize, &[u32]); 10] = [
        (1, 0, 1, &[0, 10, 255]),
        (1, 29, 4, counts),
        (2, 9, 2, &[0, 1, 3, 5, 0xFFFF]),
        (2, 11 + 48, 1, &[1, 2, 4, 255]),
        (2, 11 + 49, 4, counts),
        (2, 11 + 2 * 61 + 49, 4, &[RUNS_MAX + 1, 0x4000_0002, u32::MAX]),
        (3, 9, 2, &[0, 2, 0xFFFF]),
        (3, 13, 4, counts),
        (5, 17, 1, &[7, 255]),
        (6, 17, 1, &[7, 255]),
    ];
    for (of, at, length, values) in wrong {
        assert_eq!(kind_of(&summed(&golden[of])), None);
        for value in values {
            let mut other = golden[of].clone();
            other[at..at + length].copy_from_slice(&value.to_le_bytes()[..length]);
            let error = Frame::decode(&summed(&other)).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::BadFormat, "frame"), "{of}, {at}: {value}");
            assert_eq!(error.number("kind"), Some(other[0].into()));
            assert_eq!(error.number("bytes"), Some(other.len() as u64 + 4));
        }
    }
}

#[test]
fn a_frame_has_at_most_its_most_bytes() {
    let bytes = vec![7; PAYLOAD_MAX];
    let mut frame = Vec::new();
    Frame::Payload(Payload { number: 1, fence: FENCE, kind: 7, digest: 0, bytes: &bytes }).encode(&mut frame);
    assert!(Frame::decode(&frame).is_ok() && frame.len() <= FRAME_MAX);
    let longest = [&golden()[4][..], &vec![0; FRAME_MAX - 4 - golden()[4].len()]].concat();
    assert_eq!(kind_of(&summed(&longest)), None);
    assert_eq!(kind_of(&summed(&[&longest[..], &[0]].concat())), Some(Kind::BadFormat));
}

/// What the machines say, byte by byte, in a transfer of one request of six tokens. A run of layer 1 is wrong once.
#[test]
fn the_machines_frames_are_as_documented() {
    let mut pair = Pair::usual();
    let fence = pair.grant_with(0x99, 6, |wanted| wanted.payloads = &[7]).unwrap();
    pair.memory.wrong.insert((1, 4), 1);
    pair.sender.begin(0x99, 6, None).unwrap();
    (0..LAYERS).for_each(|layer| pair.compute(0x99, layer, 6).unwrap());
    pair.sender.payload(0x99, 7, b"token").unwrap();
    pair.sender.finish(0x99).unwrap();
    pair.settle();
    assert!(pair.is_whole(fence));
    let fence = [0x99, 0];
    // A run's name: layer, component, token, tokens, head, heads, stage, lane. Its rows follow.
    let digest_of = |layer: u32, token: u32, tokens: u32| {
        let name = Bytes::default().longs(&fence).words(&[layer, 0, token, tokens, 0, 1, 0, 0]);
        let rows = (token..token + tokens).flat_map(|token| row(0x99, layer, token));
        sum(&name.words(&[sum(&rows.collect::<Vec<u8>>())]).0)
    };
    let part = |layer| {
        let digests = vec![digest_of(layer, 0, 4), digest_of(layer, 4, 2)];
        (fence, [layer, 0, 6], [0; 3], u64::from(layer) + 1, Runs::All(digests))
    };
    let again = (fence, [1, 0, 6], [0; 3], 2, Runs::Some(vec![(1, digest_of(1, 4, 2))]));
    let payload = sum(&Bytes::default().longs(&fence).put(&[7]).words(&[sum(b"token")]).0);
    let hello = |window| Plain::Hello(1, [0; 3], window, side(LAYERS).encode().unwrap());
    let mut sent = vec![
        hello(1),
        Plain::Payload(0, fence, 7, payload, b"token".to_vec()),
        Plain::Notice(1, vec![part(0), part(1), part(2)]),
        Plain::Notice(2, vec![again]),
        Plain::Drained(fence),
        Plain::Known(fence),
    ];
    let mut answered = vec![
        hello(64),
        Plain::Grant(fence, [6, 0, 0], vec![]),
        Plain::Answer(0, vec![]),
        Plain::Answer(1, vec![(1, vec![1])]),
        Plain::Answer(2, vec![]),
        Plain::End(fence, 0),
    ];
    let read = |frames: &[(std::time::Duration, Vec<u8>)]| -> Vec<Plain> {
        frames.iter().map(|(_, frame)| Plain::read(&Frame::decode(frame).unwrap())).collect()
    };
    // In which order the machines say it is theirs: numbers alone are given in order.
    let order = |of: &Plain| of.bytes();
    let (mut own, mut theirs) = (read(&pair.sent), read(&pair.answered));
    for list in [&mut own, &mut theirs, &mut sent, &mut answered] {
        list.sort_by_key(order);
    }
    assert_eq!(own, sent);
    assert_eq!(theirs, answered);
    let bytes = |frames: &[(std::time::Duration, Vec<u8>)]| {
        let mut bytes: Vec<Vec<u8>> = frames.iter().map(|(_, frame)| frame.clone()).collect();
        bytes.sort();
        bytes
    };
    assert!(bytes(&pair.sent).into_iter().eq(sent.iter().map(Plain::bytes)));
    assert!(bytes(&pair.answered).into_iter().eq(answered.iter().map(Plain::bytes)));
    // A receiver that is written to from afar names pages.
    let mut pair = Pair::new(true, SENDING, RECEIVING);
    pair.grant(0x99, 6);
    pair.poll_receiver();
    let grant = Plain::Grant(fence, [6, 0, 0], vec![100, 101]);
    assert_eq!(pair.answered.last().map(|(_, bytes)| bytes), Some(&grant.bytes()));
}
