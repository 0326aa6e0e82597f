//! Copies against a vector, bounds, alignment.

use crate::error::Kind;
use crate::os::{NoFaults, Protection, Region, page_size};

fn region() -> Region {
    Region::new(None, page_size(), &NoFaults).unwrap()
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut all = vec![0; region.len() as usize];
    region.copy_out(0, &mut all).unwrap();
    all
}

#[test]
fn copies_within_agree_with_a_vector() {
    for (from, to, bytes) in [(0, 100, 50), (0, 7, 90), (7, 0, 90), (5, 5, 9), (0, 1, 33), (9, 9, 0)] {
        let region = region();
        let mut model: Vec<u8> = (0..region.len()).map(|i| i as u8).collect();
        region.copy_in(0, &model).unwrap();
        region.copy_within(from, to, bytes).unwrap();
        model.copy_within(from as usize..(from + bytes) as usize, to as usize);
        assert_eq!(bytes_of(&region), model, "{from} to {to}, {bytes} bytes");
    }
}

#[test]
fn fill_touches_its_bytes_alone() {
    let region = region();
    region.fill(3, 5, 0xAB).unwrap();
    let all = bytes_of(&region);
    assert!(all.iter().enumerate().all(|(i, b)| *b == if (3..8).contains(&i) { 0xAB } else { 0 }));
}

#[test]
fn a_copy_that_does_not_fit_names_the_numbers() {
    let region = region();
    let length = region.len();
    for (offset, bytes) in [(length, 1_usize), (length - 1, 2), (u64::MAX, 1), (u64::MAX, 2)] {
        let e = region.copy_in(offset, &vec![1; bytes]).unwrap_err();
        assert_eq!(e.kind(), Kind::OutOfRange);
        assert_eq!(
            (e.number("offset"), e.number("bytes"), e.number("length")),
            (Some(offset), Some(bytes as u64), Some(length))
        );
        assert!(region.copy_out(offset, &mut vec![0; bytes]).is_err());
        assert!(region.copy_within(offset, 0, bytes as u64).is_err());
        assert!(region.copy_within(0, offset, bytes as u64).is_err());
        assert!(region.fill(offset, bytes as u64, 1).is_err());
    }
    assert!(bytes_of(&region).iter().all(|b| *b == 0));
    region.copy_in(length, &[]).unwrap();
}

#[test]
fn a_reservation_is_aligned() {
    let region = Region::reserve(3 * page_size(), 2 << 20, Protection::ReadWrite, &NoFaults).unwrap();
    assert_eq!((region.as_ptr() as u64 % (2 << 20), region.len()), (0, 3 * page_size()));
}
