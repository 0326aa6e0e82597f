//! Copies of pages, byte by byte: random planes, of pages that lie side by side and of pages that have a plane for each
//! piece, in all directions. A copy is refused where a byte that it writes is another piece's as well.

use std::collections::BTreeMap;

use forebay::device::{CopyPages, PageOp, Plane};
use proptest::prelude::*;

use crate::world::{At, Kind, World, cases};

/// Pages of a memory: its side, and the bytes of a page; planes take parts of it.
#[derive(Clone, Debug)]
struct Memory {
    side: usize,
    pages: usize,
    stride: usize,
}

/// A plane's place in a page of a memory, in words.
#[derive(Clone, Copy, Debug)]
struct Piece {
    memory: usize,
    at: usize,
}

#[derive(Clone, Debug)]
struct Copies {
    planes: Vec<(Piece, Piece, usize)>,
    pages: Vec<(u32, u32)>,
}

fn memory() -> impl Strategy<Value = Memory> {
    (0..2_usize, 2..12_usize, 1..40_usize).prop_map(|(side, pages, words)| Memory {
        side,
        pages,
        stride: 4 * words,
    })
}

fn piece() -> impl Strategy<Value = Piece> {
    (0..3_usize, 0..40_usize).prop_map(|(memory, at)| Piece { memory, at })
}

fn copies() -> impl Strategy<Value = Copies> {
    let whole = prop_oneof![Just(0_usize), 0..40_usize];
    let planes = prop::collection::vec((piece(), piece(), whole), 0..4);
    // Runs of pages, so that some follow each other.
    let runs = prop::collection::vec((0..12_u32, 0..12_u32, 1..4_u32), 0..4);
    (planes, runs).prop_map(|(planes, runs)| {
        let pages =
            runs.into_iter().flat_map(|(from, to, count)| (0..count).map(move |n| (from + n, to + n)));
        Copies { planes, pages: pages.collect() }
    })
}

/// The place of a piece of page `page`.
fn place(memories: &[(Memory, At)], piece: Piece, bytes: usize, page: u32) -> At {
    let (Memory { stride, .. }, at) = &memories[piece.memory];
    At { at: at.at + page as usize * stride + piece.at, bytes, ..*at }
}

/// Runs copies on a device: bytes are as the model says, or the copy is refused and nothing has changed.
fn run(world: &mut World, memories: &[(Memory, At)], copies: &Copies) -> Result<(), TestCaseError> {
    let fits = |piece: &mut Piece| {
        let (Memory { stride, .. }, _) = &memories[piece.memory];
        piece.at = 4 * piece.at % stride;
        stride - piece.at
    };
    let planes: Vec<(Piece, Piece, usize)> = copies
        .planes
        .iter()
        .map(|(from, to, words)| {
            let (mut from, mut to) = (*from, *to);
            let most = fits(&mut from).min(fits(&mut to));
            // None stands for as many as fit, so that pages touch each other.
            let bytes = if *words == 0 { most } else { 4 * words % (most + 1) / 4 * 4 };
            (from, to, bytes)
        })
        .collect();
    let pages = |plane: &(Piece, Piece, usize)| {
        (memories[plane.0.memory].0.pages as u32, memories[plane.1.memory].0.pages as u32)
    };
    let inside =
        |(from, to): &(u32, u32)| planes.iter().map(pages).all(|most| *from < most.0 && *to < most.1);
    let list: Vec<(u32, u32)> = copies.pages.iter().copied().filter(inside).collect();
    // Which piece has a byte: a number for each piece that reads it, and whether one writes it.
    let (mut written, mut read) = (BTreeMap::new(), BTreeMap::new());
    let mut overlaps = false;
    let mut after = world.model.clone();
    for (from, to) in &list {
        for (source, target, bytes) in &planes {
            let (source, target) =
                (place(memories, *source, *bytes, *from), place(memories, *target, *bytes, *to));
            for byte in 0..*bytes {
                read.insert((source.side, source.at + byte), ());
                overlaps |= written.insert((target.side, target.at + byte), ()).is_some();
                after[target.side][target.at + byte] = world.model[source.side][source.at + byte];
            }
        }
    }
    // A page that is copied to twice is refused, whatever has bytes.
    overlaps |= (1..list.len()).any(|index| list[..index].iter().any(|page| page.1 == list[index].1));
    overlaps |= written.keys().any(|byte| read.contains_key(byte));
    let plane = |piece: Piece, bytes: usize| {
        let (Memory { stride, .. }, at) = &memories[piece.memory];
        let memory = world.slice(At { at: at.at + piece.at, bytes: at.bytes - piece.at, ..*at });
        Plane { memory, stride: *stride as u64, bytes: bytes as u64 }
    };
    let planes: Vec<(Plane, Plane)> =
        planes.iter().map(|(from, to, bytes)| (plane(*from, *bytes), plane(*to, *bytes))).collect();
    let result = world.run(PageOp::Copy(CopyPages { planes: &planes, pages: &list }));
    prop_assert_eq!(result.is_err(), overlaps, "{:?}", result);
    if !overlaps {
        world.model = after;
    }
    prop_assert_eq!(world.difference(), None);
    Ok(())
}

fn live(kind: Kind, memories: &[Memory], all: &[Copies]) -> Result<(), TestCaseError> {
    let Some(mut world) = World::new(kind) else { return Ok(()) };
    let memories: Vec<(Memory, At)> = memories
        .iter()
        .map(|memory| (memory.clone(), world.take(memory.side, memory.pages * memory.stride, 4)))
        .collect();
    all.iter().try_for_each(|copies| run(&mut world, &memories, copies))
}

proptest! {
    #![proptest_config(cases(1500))]
    #[test]
    fn pages_are_copied_byte_by_byte_or_refused(
        memories in prop::collection::vec(memory(), 3),
        all in prop::collection::vec(copies(), 1..5),
    ) {
        live(Kind::Inline, &memories, &all)?;
    }
}

proptest! {
    #![proptest_config(cases(60))]
    #[test]
    fn pages_are_copied_alike_on_every_device(
        memories in prop::collection::vec(memory(), 3),
        all in prop::collection::vec(copies(), 1..5),
        seed: u64,
    ) {
        live(Kind::Threaded, &memories, &all)?;
        live(Kind::Clocked(seed), &memories, &all)?;
        #[cfg(feature = "check")]
        live(Kind::Watched, &memories, &all)?;
    }
}

#[cfg(feature = "cuda")]
proptest! {
    #![proptest_config(cases(40))]
    #[test]
    fn pages_are_copied_alike_on_the_cuda_device(
        memories in prop::collection::vec(memory(), 3),
        all in prop::collection::vec(copies(), 1..5),
        seed: u64,
    ) {
        if crate::device::driver_is_there() {
            // By copy engines alone, by both, and by the kernel alone.
            for bytes in [0, 60, 1 << 20] {
                live(Kind::Cuda(None, bytes), &memories, &all)?;
            }
            live(Kind::Cuda(Some(seed), seed % 200), &memories, &all)?;
        }
    }
}
