//! The index against a plain list, and block hashes that must differ.

use proptest::prelude::*;

use super::*;
use crate::geometry::Shape;
use crate::total::{BlockHasher, CAPACITY_MAX, Secret};

const SECRET: Secret = Secret([7; 32]);

fn hasher(salt: &[u8]) -> BlockHasher {
    BlockHasher::new(&SECRET, &Shape::DEEPSEEK_V3_2, salt)
}

/// The blocks of a prompt.
fn chain(hasher: &BlockHasher, tokens: &[[u32; 3]]) -> Vec<BlockHash> {
    let mut blocks = Vec::new();
    for tokens in tokens {
        blocks.push(hasher.block(blocks.last(), None, tokens));
    }
    blocks
}

fn pages(n: u32) -> (HostPage, IndexPage) {
    (HostPage(n), IndexPage(n + 100))
}

/// One entry of the list.
#[derive(Clone, Copy)]
struct Listed {
    block: BlockHash,
    pages: (HostPage, IndexPage),
    users: u32,
}

/// The oracle: a list with the entries used last at its end.
#[derive(Default)]
struct List {
    all: Vec<Listed>,
}

impl List {
    fn position(&self, block: &BlockHash) -> Option<usize> {
        self.all.iter().position(|listed| listed.block == *block)
    }

    fn insert(&mut self, block: &BlockHash, pages: (HostPage, IndexPage), capacity: u32) -> Option<Inserted> {
        match self.position(block) {
            Some(i) if self.all[i].pages == pages => {
                self.all[i].users += 1;
                Some(Inserted::Known)
            }
            Some(_) => Some(Inserted::Twin),
            None if self.all.len() == capacity as usize => None,
            None => {
                self.all.push(Listed { block: *block, pages, users: 1 });
                Some(Inserted::New)
            }
        }
    }

    fn release(&mut self, block: &BlockHash) -> bool {
        let Some(i) = self.position(block).filter(|i| self.all[*i].users > 0) else { return false };
        let mut listed = self.all.remove(i);
        listed.users -= 1;
        let place = if listed.users == 0 { self.all.len() } else { i };
        self.all.insert(place, listed);
        true
    }

    fn evict(&mut self, kept: u32) -> Option<(HostPage, IndexPage)> {
        let i = self.all.iter().position(|listed| listed.users == 0 && listed.pages.0.0 != kept)?;
        Some(self.all.remove(i).pages)
    }
}

/// A few hashes that collide: their first 128 bits, which include their place in the table, have only two values.
fn crowded(i: u8) -> BlockHash {
    let mut name = [if i.is_multiple_of(2) { 0 } else { 0xFF }; 32];
    name[31] = i;
    BlockHash(name)
}

proptest! {
    #[test]
    fn the_prefix_index_agrees_with_a_plain_list(
        capacity in 0..9_u32,
        ops in prop::collection::vec((0..6_u8, 0..14_u8, 0..3_u32), 0..400),
    ) {
        let mut index = PrefixIndex::new(capacity).unwrap();
        let mut list = List::default();
        for (op, name, page) in ops {
            let block = crowded(name);
            match op {
                0 | 1 => match index.insert(&block, pages(page)) {
                    Ok(inserted) => prop_assert_eq!(Some(inserted), list.insert(&block, pages(page), capacity)),
                    Err(e) => {
                        prop_assert_eq!(e.kind(), Kind::Exhausted);
                        prop_assert_eq!(list.insert(&block, pages(page), capacity), None);
                    }
                },
                2 => {
                    let listed = list.position(&block);
                    listed.into_iter().for_each(|i| list.all[i].users += 1);
                    prop_assert_eq!(index.share(&block), Ok(listed.map(|i| list.all[i].pages)));
                }
                3 => prop_assert_eq!(index.release(&block).is_ok(), list.release(&block)),
                4 => {
                    let removed = list.position(&block).map(|i| list.all.remove(i).pages);
                    prop_assert_eq!(index.remove(&block), removed);
                }
                _ => {
                    let room = |pages: (HostPage, IndexPage)| pages.0.0 != page;
                    let unused = list.all.iter().filter(|l| l.users == 0 && room(l.pages)).count() as u32;
                    prop_assert_eq!(index.evictable(u32::MAX, room), unused);
                    prop_assert_eq!(index.evictable(1, room), unused.min(1));
                    prop_assert_eq!(index.evict(room), list.evict(page));
                }
            }
            prop_assert_eq!(index.len() as usize, list.all.len());
            prop_assert_eq!(index.unused() as usize, list.all.iter().filter(|l| l.users == 0).count());
            let mut all: Vec<_> = index.iter().collect();
            let mut wanted: Vec<_> = list.all.iter().map(|l| (l.block, l.pages, l.users)).collect();
            all.sort_unstable_by_key(|(block, ..)| block.0);
            wanted.sort_unstable_by_key(|(block, ..)| block.0);
            prop_assert_eq!(all, wanted);
            for block in (0..14).map(crowded) {
                let listed = list.position(&block).map(|i| list.all[i]);
                prop_assert_eq!(index.users(&block), listed.map(|l| l.users));
                prop_assert_eq!(index.pages(&block), listed.map(|l| l.pages));
            }
        }
    }
}

#[test]
fn the_same_tokens_after_the_same_prefix_are_one_block() {
    let mut index = PrefixIndex::new(8).unwrap();
    let first = chain(&hasher(b"a"), &[[1, 2, 3], [4, 5, 6], [7, 8, 9]]);
    for (i, block) in (0..).zip(&first) {
        assert_eq!(index.insert(block, pages(i)), Ok(Inserted::New));
    }
    let second = chain(&hasher(b"a"), &[[1, 2, 3], [4, 5, 6], [0, 8, 9]]);
    assert_eq!(second[..2], first[..2]);
    assert_eq!(index.share(&second[1]), Ok(Some(pages(1))));
    assert_eq!(index.share(&second[2]), Ok(None));
    // The same tokens after another prefix, or a hash taken as tokens, are another block.
    let moved = chain(&hasher(b"a"), &[[4, 5, 6], [1, 2, 3]]);
    assert!(moved.iter().all(|block| index.users(block).is_none()));
    let words = first[0].0.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let name: Vec<u32> = words.chain([4, 5, 6]).collect();
    assert_ne!(hasher(b"a").block(None, None, &name), first[1]);
}

#[test]
fn another_tenants_salt_secret_or_geometry_never_shares() {
    let tokens = [[1, 2, 3], [4, 5, 6]];
    let mut index = PrefixIndex::new(8).unwrap();
    let own = chain(&hasher(b"a"), &tokens);
    for block in &own {
        index.insert(block, pages(1)).unwrap();
    }
    let shape = Shape { index_key_bytes: 128, ..Shape::DEEPSEEK_V3_2 };
    for other in [
        hasher(b"b"),
        hasher(b""),
        hasher(b"a\0"),
        BlockHasher::new(&Secret([8; 32]), &Shape::DEEPSEEK_V3_2, b"a"),
        BlockHasher::new(&SECRET, &shape, b"a"),
    ] {
        let theirs = chain(&other, &tokens);
        assert!(theirs.iter().all(|block| index.users(block).is_none()));
    }
}

#[test]
fn a_callers_key_separates_its_block_and_all_blocks_after_it() {
    let hasher = hasher(b"a");
    let (key, tokens) = ([9; 16], [1, 2, 3]);
    let plain = hasher.block(None, None, &tokens);
    let keyed = hasher.block(None, Some(&key), &tokens);
    let mut hashes = vec![plain, keyed, hasher.block(None, Some(&[8; 16]), &tokens)];
    // The same key again: other tokens, another place.
    hashes.push(hasher.block(None, Some(&key), &[1, 2, 4]));
    hashes.push(hasher.block(Some(&keyed), Some(&key), &tokens));
    hashes.extend([&plain, &keyed].map(|parent| hasher.block(Some(parent), None, &tokens)));
    // Tokens that look like a key, or like a hash and a key.
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    };
    hashes.push(hasher.block(None, None, &[words(&key), tokens.to_vec()].concat()));
    hashes.push(hasher.block(None, Some(&key), &[words(&plain.0[16..]), tokens.to_vec()].concat()));
    for (i, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..i].contains(hash), "{i}");
    }
    assert_eq!(hasher.block(None, Some(&key), &tokens), keyed);
}

#[test]
fn block_hashes_that_collide_in_the_table_find_only_their_own_pages() {
    let mut index = PrefixIndex::new(8).unwrap();
    let [one, other] = [2, 4].map(crowded);
    assert_eq!(one.0[..16], other.0[..16]);
    assert_eq!(index.insert(&one, pages(1)), Ok(Inserted::New));
    assert_eq!((index.users(&other), index.share(&other)), (None, Ok(None)));
    assert_eq!(index.insert(&other, pages(2)), Ok(Inserted::New));
    assert_eq!((index.share(&one), index.share(&other)), (Ok(Some(pages(1))), Ok(Some(pages(2)))));
    assert_eq!(index.insert(&one, pages(3)), Ok(Inserted::Twin));
    assert_eq!(index.insert(&one, pages(1)), Ok(Inserted::Known));
    assert_eq!(index.users(&one), Some(3));
}

#[test]
fn nothing_is_allocated_after_construction() {
    let mut index = PrefixIndex::new(5).unwrap();
    let tables = |index: &PrefixIndex| (index.table.tables(), index.entries.as_ptr() as usize);
    let before = tables(&index);
    for round in 0..50 {
        for block in [crowded(round % 14), crowded((round + 3) % 14)] {
            if index.len() == 5 {
                index.evict(|_| true).unwrap();
            }
            index.insert(&block, pages(0)).unwrap();
            index.release(&block).unwrap();
        }
    }
    assert_eq!(index.len(), 5);
    assert_eq!(tables(&index), before);
}

#[test]
fn pages_released_first_are_evicted_first() {
    let mut index = PrefixIndex::new(3).unwrap();
    let blocks = chain(&hasher(b""), &[[1; 3], [2; 3], [3; 3]]);
    for (i, block) in (0..).zip(&blocks) {
        index.insert(block, pages(i)).unwrap();
    }
    assert_eq!(index.evict(|_| true), None, "all are in use");
    for block in blocks.iter().rev() {
        index.release(block).unwrap();
    }
    assert_eq!(index.release(&blocks[0]).unwrap_err().kind(), Kind::Internal);
    assert_eq!([2, 1, 0].map(|_| index.evict(|_| true)), [2, 1, 0].map(|page| Some(pages(page))));
    assert!(PrefixIndex::new(CAPACITY_MAX + 1).is_err());
}
