//! Sides in bytes: the same again, as documented, and whatever else comes is refused without a large allocation.

use forebay::Kind;
use forebay::transfer::{Component, LayerPlaces, Place, Side, Split, Stage};
use proptest::prelude::*;

use crate::random::case;
use crate::side_bytes::side_bytes;

fn small() -> Side {
    Side {
        components: vec![Component {
            name: "kv".to_owned(),
            dtype: "bf16".to_owned(),
            heads: 2,
            head_bytes: 0x0102,
        }],
        stages: vec![Stage {
            layers: vec![LayerPlaces {
                layer: 9,
                places: vec![Place {
                    component: 0,
                    plane: 0,
                    offset: 3,
                    token_stride: 0x0204,
                    head_stride: 0x0102,
                }],
            }],
            page_bytes: vec![0x4000],
        }],
        width: 1,
        split: Split::Tokens,
        replicas: 5,
        page_tokens: 16,
    }
}

#[test]
fn the_bytes_are_as_documented() {
    let bytes = small().encode().unwrap();
    let places =
        [&[0, 0, 0][..], &[3, 0, 0, 0, 0, 0, 0, 0], &[4, 2, 0, 0, 0, 0, 0, 0], &[2, 1, 0, 0, 0, 0, 0, 0]];
    let parts = [
        &b"FOREBAYT\x02\0\0\0"[..],
        &[1, 0, 0, 0, 5, 0, 0, 0, 16, 0, 0, 0],
        &[1, 1],
        b"\x02kv\x04bf16",
        &[2, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0],
        &[1, 0],
        &[1, 0, 0, 0x40, 0, 0, 0, 0, 0, 0],
        &[1, 0],
        &[9, 0, 0, 0, 1],
        &places.concat(),
    ];
    assert_eq!(bytes, parts.concat());
    assert_eq!(Side::decode(&bytes), Ok(small()));
    for length in 0..bytes.len() {
        assert_eq!(Side::decode(&bytes[..length]).unwrap_err().kind(), Kind::BadFormat, "{length}");
    }
    let mut other = bytes.clone();
    other.push(0);
    assert_eq!(Side::decode(&other).unwrap_err().kind(), Kind::BadFormat);
    other = bytes.clone();
    other[8] = 1;
    let error = Side::decode(&other).unwrap_err();
    assert_eq!(
        (error.kind(), error.number("own"), error.number("theirs")),
        (Kind::BadVersion, Some(2), Some(1))
    );
    for (at, value) in [(0, b'f'), (24, 2), (27, 0xFF)] {
        other = bytes.clone();
        other[at] = value;
        assert_eq!(Side::decode(&other).unwrap_err().kind(), Kind::BadFormat, "{at}");
    }
    // A side that no plan takes is not sent.
    let wrong = Side { page_tokens: 0, ..small() };
    assert_eq!(wrong.encode().unwrap_err().place(), "page_tokens");
    let planes = Side {
        stages: vec![Stage { page_bytes: vec![0x4000; 1 << 16], ..small().stages[0].clone() }],
        ..small()
    };
    assert_eq!(planes.encode().unwrap_err().place(), "planes of a stage");
}

/// Counts that the bytes do not hold take no memory for them.
#[test]
fn a_claimed_count_is_refused_before_anything_is_taken() {
    let mut bytes = small().encode().unwrap();
    // Stages, planes, layers, and places.
    for (behind, count) in [(46, 2), (44, 2), (34, 2), (28, 1)] {
        let (at, good) = (bytes.len() - behind, bytes.clone());
        bytes[at..at + count].fill(0xFF);
        assert_eq!(Side::decode(&bytes).unwrap_err().kind(), Kind::BadFormat, "{behind}");
        bytes = good;
    }
    // The body of the fuzz target `side_bytes`.
    let mut seen = std::collections::BTreeSet::new();
    let bytes = small().encode().unwrap();
    for (at, value) in (0..bytes.len()).flat_map(|at| [0, 1, 2, 17, 128, 255].map(|value| (at, value))) {
        let mut other = bytes.clone();
        other[at] = value;
        seen.extend(side_bytes(&other).map(|error| error.place().to_owned()));
    }
    assert!(seen.len() > 8, "{seen:?}");
    let whole = Side { split: Split::Heads, ..small() };
    assert_eq!(side_bytes(&whole.encode().unwrap()), None);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]
    #[test]
    fn a_side_is_the_same_from_its_bytes_and_others_are_refused_or_sides(
        case in case(),
        changes in prop::collection::vec((any::<u16>(), any::<u8>()), 0..4),
    ) {
        for side in case.sides() {
            let mut bytes = side.encode().unwrap();
            prop_assert_eq!(Side::decode(&bytes), Ok(side));
            for (at, value) in &changes {
                let place = usize::from(*at) % bytes.len();
                bytes[place] = *value;
            }
            side_bytes(&bytes);
        }
    }
}
