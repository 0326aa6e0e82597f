//! The index against a plain list, and names that must not meet.

use proptest::prelude::*;

use super::*;

const SECRET: [u8; 32] = [7; 32];

fn namer(salt: &[u8]) -> Namer {
    Namer::new(&SECRET, &Shape::DEEPSEEK_V3_2, salt)
}

/// The blocks of a prompt.
fn chain(namer: &Namer, tokens: &[[u32; 3]]) -> Vec<Block> {
    let mut parent = namer.root();
    let mut blocks = Vec::new();
    for tokens in tokens {
        parent = namer.block(&parent, tokens);
        blocks.push(parent);
    }
    blocks
}

/// One entry of the list.
#[derive(Clone, Copy)]
struct Listed {
    block: Block,
    page: HostPage,
    users: u32,
}

/// What the index is to be: a list, the entries touched last at its end.
#[derive(Default)]
struct List {
    all: Vec<Listed>,
}

impl List {
    fn position(&self, block: &Block) -> Option<usize> {
        self.all.iter().position(|listed| listed.block == *block)
    }

    fn renew(&mut self, i: usize) {
        let listed = self.all.remove(i);
        self.all.push(listed);
    }

    fn share(&mut self, blocks: &[Block]) -> usize {
        let run = blocks.iter().take_while(|block| self.position(block).is_some()).count();
        for block in &blocks[..run] {
            let i = self.position(block).unwrap();
            self.all[i].users += 1;
        }
        run
    }

    fn release(&mut self, blocks: &[Block]) -> bool {
        for block in blocks.iter().rev() {
            let Some(i) = self.position(block).filter(|i| self.all[*i].users > 0) else { return false };
            self.all[i].users -= 1;
            if self.all[i].users == 0 {
                self.renew(i);
            }
        }
        true
    }

    fn touch(&mut self, blocks: &[Block]) {
        for block in blocks.iter().rev() {
            if let Some(i) = self.position(block).filter(|i| self.all[*i].users == 0) {
                self.renew(i);
            }
        }
    }

    fn evict(&mut self) -> Option<(Block, HostPage)> {
        let i = self.all.iter().position(|listed| listed.users == 0)?;
        let Listed { block, page, .. } = self.all.remove(i);
        Some((block, page))
    }
}

/// Few names that crowd: two keys, checks whose places begin at the same two spots.
fn crowded(i: u8) -> Block {
    let mut check = [0; 16];
    (check[0], check[15]) = (if i.is_multiple_of(2) { 0 } else { 0xFF }, i);
    Block { key: [i % 2; 16], check }
}

proptest! {
    #[test]
    fn it_answers_as_a_plain_list_does(
        capacity in 0..9_u32,
        ops in prop::collection::vec((0..5_u8, prop::collection::vec(0..14_u8, 0..4)), 0..200),
    ) {
        let mut index = PrefixIndex::new(capacity).unwrap();
        let mut list = List::default();
        for (n, (op, names)) in ops.into_iter().enumerate() {
            let blocks: Vec<Block> = names.into_iter().map(crowded).collect();
            match op {
                0 => for block in &blocks {
                    let page = HostPage(n as u32);
                    let answer = index.insert(block, page);
                    match list.position(block) {
                        Some(i) => {
                            prop_assert_eq!(answer, Ok(Inserted::Present(list.all[i].page)));
                            list.all[i].users += 1;
                        }
                        None if list.all.len() == capacity as usize => {
                            prop_assert_eq!(answer.unwrap_err().kind(), Kind::Exhausted);
                        }
                        None => {
                            prop_assert_eq!(answer, Ok(Inserted::New));
                            list.all.push(Listed { block: *block, page, users: 1 });
                        }
                    }
                },
                1 => {
                    prop_assert_eq!(index.leading_run(&blocks), index.share(&blocks).unwrap());
                    let run = index.leading_run(&blocks);
                    prop_assert_eq!(run, list.share(&blocks));
                }
                2 => prop_assert_eq!(index.release(&blocks).is_ok(), list.release(&blocks)),
                3 => { index.touch(&blocks); list.touch(&blocks); }
                _ => prop_assert_eq!(index.evict(), list.evict()),
            }
            prop_assert_eq!(index.len() as usize, list.all.len());
            prop_assert_eq!(index.unused() as usize, list.all.iter().filter(|l| l.users == 0).count());
            for block in (0..14).map(crowded) {
                let listed = list.position(&block).map(|i| list.all[i]);
                prop_assert_eq!(index.page(&block), listed.map(|l| l.page));
                prop_assert_eq!(index.users(&block), listed.map(|l| l.users));
            }
        }
    }
}

#[test]
fn the_same_tokens_behind_the_same_prefix_are_one_block() {
    let mut index = PrefixIndex::new(8).unwrap();
    let first = chain(&namer(b"a"), &[[1, 2, 3], [4, 5, 6], [7, 8, 9]]);
    for (i, block) in first.iter().enumerate() {
        assert_eq!(index.insert(block, HostPage(i as u32)), Ok(Inserted::New));
    }
    let second = chain(&namer(b"a"), &[[1, 2, 3], [4, 5, 6], [0, 8, 9]]);
    assert_eq!(index.share(&second), Ok(2));
    assert_eq!(second[..2], first[..2]);
    // The same tokens behind another prefix are another block.
    let moved = chain(&namer(b"a"), &[[4, 5, 6], [1, 2, 3]]);
    assert_eq!(index.leading_run(&moved), 0);
    assert!(index.page(&moved[1]).is_none());
}

#[test]
fn another_tenants_salt_secret_or_geometry_never_shares() {
    let tokens = [[1, 2, 3], [4, 5, 6]];
    let mut index = PrefixIndex::new(8).unwrap();
    let own = chain(&namer(b"a"), &tokens);
    for block in &own {
        index.insert(block, HostPage(1)).unwrap();
    }
    let shape = Shape { index_key_bytes: 128, ..Shape::DEEPSEEK_V3_2 };
    for other in [
        namer(b"b"),
        namer(b""),
        namer(b"a\0"),
        Namer::new(&[8; 32], &Shape::DEEPSEEK_V3_2, b"a"),
        Namer::new(&SECRET, &shape, b"a"),
    ] {
        let theirs = chain(&other, &tokens);
        assert_eq!(index.leading_run(&theirs), 0);
        assert!(theirs.iter().all(|block| index.page(block).is_none()));
        // Not even by a key that was overheard.
        let stolen = other.supplied(own[0].key(), &other.root(), &tokens[0]);
        assert_eq!(stolen.key(), own[0].key());
        assert_eq!(index.share(&[stolen]), Ok(0));
    }
}

#[test]
fn a_key_that_collides_finds_only_its_own() {
    let namer = namer(b"a");
    let key = [9; 16];
    let one = namer.supplied(key, &namer.root(), &[1, 2, 3]);
    let other = namer.supplied(key, &namer.root(), &[1, 2, 4]);
    let deeper = namer.supplied(key, &one, &[1, 2, 3]);
    let mut index = PrefixIndex::new(8).unwrap();
    assert_eq!(index.insert(&one, HostPage(1)), Ok(Inserted::New));
    assert_eq!((index.leading_run(&[other]), index.leading_run(&[deeper])), (0, 0));
    assert_eq!(index.insert(&other, HostPage(2)), Ok(Inserted::New));
    assert_eq!((index.page(&one), index.page(&other)), (Some(HostPage(1)), Some(HostPage(2))));
    let again = namer.supplied(key, &namer.root(), &[1, 2, 3]);
    assert_eq!(index.insert(&again, HostPage(3)), Ok(Inserted::Present(HostPage(1))));
}

#[test]
fn nothing_is_allocated_after_construction() {
    let mut index = PrefixIndex::new(5).unwrap();
    let tables = |index: &PrefixIndex| {
        let free = (index.free.as_ptr() as usize, index.free.capacity());
        (free, index.entries.as_ptr() as usize, index.places.as_ptr() as usize)
    };
    let before = tables(&index);
    for round in 0..50 {
        let blocks = [crowded(round % 14), crowded((round + 3) % 14)];
        for block in &blocks {
            if index.len() == 5 {
                index.evict().unwrap();
            }
            index.insert(block, HostPage(0)).unwrap();
        }
        index.release(&blocks).unwrap();
    }
    assert_eq!(index.len(), 5);
    assert_eq!(tables(&index), before);
}

#[test]
fn a_prefix_outlives_its_continuations() {
    let mut index = PrefixIndex::new(3).unwrap();
    let blocks = chain(&namer(b""), &[[1; 3], [2; 3], [3; 3]]);
    for block in &blocks {
        index.insert(block, HostPage(0)).unwrap();
    }
    assert_eq!(index.evict(), None, "all are in use");
    index.release(&blocks).unwrap();
    let gone: Vec<Block> = std::iter::from_fn(|| index.evict()).map(|(block, _)| block).collect();
    assert_eq!(gone, [blocks[2], blocks[1], blocks[0]]);
    assert!(PrefixIndex::new(CAPACITY_MAX + 1).is_err());
}
