//! The staging ring against a map of its bytes.

use forebay::Kind;
use forebay::transfer::{Part, StagingRing};
use proptest::prelude::*;

const BYTES: u64 = 96;
const ALIGN: u64 = 8;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]
    #[test]
    fn parts_share_no_byte_and_are_refused_only_without_room(
        ops in prop::collection::vec((any::<bool>(), 1_u64..50, any::<u8>()), 1..120),
    ) {
        let mut ring = StagingRing::new(BYTES, ALIGN).unwrap();
        // Parts in their order, and whether each was given back. The bytes from the oldest one on are taken.
        let mut parts: Vec<(Part, bool)> = Vec::new();
        for (takes, bytes, pick) in ops {
            // The oldest part that is held, and the place behind the newest.
            parts.drain(..parts.iter().take_while(|(_, back)| *back).count());
            let next = |part: &Part| (part.offset + part.bytes.next_multiple_of(ALIGN)) % BYTES;
            if takes {
                let wanted = bytes.next_multiple_of(ALIGN);
                // From behind the newest to before the oldest, or the whole ring; in at most two stretches.
                let free: Vec<(u64, u64)> = match (parts.first(), parts.last()) {
                    (Some((first, _)), Some((last, _))) => match (next(last), first.offset) {
                        (from, to) if from < to => vec![(from, to)],
                        // Full, because a part was taken last.
                        (from, to) if from == to => vec![],
                        (from, to) => vec![(from, BYTES), (0, to)],
                    },
                    _ => vec![(0, BYTES)],
                };
                let place = free.iter().find(|(from, to)| from + wanted <= *to);
                match (ring.take(bytes), place) {
                    (Ok(part), Some((from, _))) => {
                        prop_assert_eq!((part.offset, part.bytes), (*from, bytes));
                        let end = part.offset + wanted;
                        let meets = |other: &Part| other.offset < end && part.offset < other.offset + other.bytes;
                        prop_assert!(!parts.iter().any(|(other, _)| meets(other)));
                        parts.push((part, false));
                    }
                    (Err(error), None) => prop_assert_eq!(error.kind(), Kind::Exhausted),
                    (found, place) => prop_assert!(false, "{found:?}, not {place:?}"),
                }
            } else if !parts.is_empty() {
                let at = usize::from(pick) % parts.len();
                let (part, back) = parts[at];
                prop_assert_eq!(ring.give_back(part).is_err(), back);
                parts[at].1 = true;
            }
            // From the oldest part that is held to behind the newest, and all of the ring if these meet.
            parts.drain(..parts.iter().take_while(|(_, back)| *back).count());
            let used = match (parts.first(), parts.last()) {
                (Some((first, _)), Some((last, _))) => match next(last).checked_sub(first.offset) {
                    Some(0) => BYTES,
                    Some(used) => used,
                    None => BYTES - first.offset + next(last),
                },
                _ => 0,
            };
            prop_assert_eq!(ring.used(), used);
        }
        for (part, _) in parts.iter().filter(|(_, back)| !back) {
            ring.give_back(*part).unwrap();
        }
        prop_assert_eq!((ring.used(), ring.take(BYTES).map(|part| part.offset)), (0, Ok(0)));
    }
}

#[test]
fn parts_that_no_ring_has_are_refused() {
    for (bytes, align) in [(0, 8), (96, 0), (96, 12), (100, 8)] {
        assert_eq!(
            StagingRing::new(bytes, align).unwrap_err().kind(),
            Kind::InvalidConfig,
            "{bytes} {align}"
        );
    }
    let mut ring = StagingRing::new(BYTES, ALIGN).unwrap();
    for bytes in [0, BYTES + 1, u64::MAX] {
        assert_eq!(ring.take(bytes).unwrap_err().kind(), Kind::OutOfRange, "{bytes}");
    }
    let part = ring.take(50).unwrap();
    let error = ring.take(41).unwrap_err();
    assert_eq!((error.kind(), error.number("free")), (Kind::Exhausted, Some(40)));
    let wrong = [Part { number: 1, ..part }, Part { offset: 8, ..part }, Part { bytes: 51, ..part }];
    for part in wrong {
        assert_eq!(ring.give_back(part).unwrap_err().kind(), Kind::InvalidState);
    }
    ring.give_back(part).unwrap();
    assert_eq!(ring.give_back(part).unwrap_err().kind(), Kind::InvalidState);
}
