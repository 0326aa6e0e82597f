//! The directory against plain maps with dates, and its invariants broken by hand.

use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::*;
use crate::total::CAPACITY_MAX;

/// What the model knows of a block. A date is the number of the operation.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    device: Option<u32>,
    host: Option<u32>,
    users: u32,
    pins: u32,
    /// When the last user left.
    left: u64,
    /// The last use, save or end of a pin.
    used: u64,
    /// When it was published; none once it was saved.
    unsaved: Option<u64>,
}

/// The oracle: it looks at every block for each answer.
struct Model {
    blocks: HashMap<u8, Known>,
    pages: [usize; 2],
    date: u64,
}

impl Model {
    fn on_device(&self) -> usize {
        self.blocks.values().filter(|known| known.device.is_some()).count()
    }

    fn on_host(&self) -> usize {
        self.blocks.values().filter(|known| known.host.is_some()).count()
    }

    /// The lowest page that no block has.
    fn free_page(&self, of: fn(&Known) -> Option<u32>) -> u32 {
        (0..).find(|page| self.blocks.values().all(|known| of(known) != Some(*page))).unwrap()
    }

    /// The block with the earliest `date` of those that have one.
    fn earliest(&self, date: impl Fn(&Known) -> Option<u64>) -> Option<u8> {
        let dated = self.blocks.iter().filter_map(|(name, known)| Some((date(known)?, *name)));
        dated.min().map(|(_, name)| name)
    }

    fn victim(&self) -> Option<u8> {
        self.earliest(|known| known.device.filter(|_| known.users == 0).map(|_| known.left))
    }

    fn host_victim(&self) -> Option<u8> {
        self.earliest(|known| known.host.filter(|_| known.pins == 0).map(|_| known.used))
    }

    fn unsaved(&self) -> Vec<u8> {
        let mut all: Vec<_> =
            self.blocks.iter().filter_map(|(name, known)| Some((known.unsaved?, *name))).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, name)| name).collect()
    }

    fn forget_if_gone(&mut self, name: u8) {
        if self.blocks[&name].device.is_none() && self.blocks[&name].host.is_none() {
            self.blocks.remove(&name);
        }
    }

    fn insert(&mut self, name: u8, page: u32) -> Option<Inserted> {
        let date = self.date;
        let full = self.on_device() == self.pages[0];
        match self.blocks.get_mut(&name) {
            Some(known) if known.device == Some(page) => {
                (known.users, known.used) = (known.users + 1, date);
                Some(Inserted::Known)
            }
            Some(Known { device: Some(_), .. }) => Some(Inserted::Twin),
            _ if full => None,
            Some(known) => {
                (known.device, known.users, known.used) = (Some(page), 1, date);
                Some(Inserted::New)
            }
            None => {
                let unsaved = (self.pages[1] > 0).then_some(date);
                self.blocks.insert(name, Known { device: Some(page), users: 1, unsaved, ..Known::default() });
                Some(Inserted::New)
            }
        }
    }

    fn save(&mut self, name: u8, page: u32) -> std::result::Result<(), Kind> {
        let full = self.on_host() == self.pages[1];
        match self.blocks.get_mut(&name) {
            Some(known @ Known { device: Some(_), host: None, .. }) => {
                if full {
                    return Err(Kind::Exhausted);
                }
                (known.host, known.unsaved, known.used) = (Some(page), None, self.date);
                Ok(())
            }
            _ => Err(Kind::InvalidState),
        }
    }
}

/// A few hashes that collide: their place in the table has only two values, one of them the last.
fn crowded(i: u8) -> BlockHash {
    let mut name = [if i.is_multiple_of(2) { 0 } else { 0xFF }; 32];
    name[31] = i;
    BlockHash(name)
}

const NAMES: u8 = 12;

fn apply(directory: &mut Directory, model: &mut Model, op: u8, name: u8, other: u32) -> TestCaseResult {
    let block = crowded(name);
    let known = model.blocks.get(&name).copied();
    match op {
        0..=2 => {
            // Its own page, a free one, or one that may be another's.
            let page = match (known.and_then(|known| known.device), other) {
                (Some(page), 0) => page,
                (Some(_), _) => 100 + other,
                (None, _) => model.free_page(|known| known.device),
            };
            let inserted = directory.insert(&block, DevicePage(page));
            let expected = model.insert(name, page);
            prop_assert_eq!(inserted.map_err(|e| e.kind()), expected.ok_or(Kind::Exhausted));
        }
        3 => {
            let shared = known.and_then(|known| known.device);
            if let Some(known) = model.blocks.get_mut(&name).filter(|known| known.device.is_some()) {
                (known.users, known.used) = (known.users + 1, model.date);
            }
            prop_assert_eq!(directory.share(&block), Ok(shared.map(DevicePage)));
        }
        4..=6 => {
            let used = model.blocks.get_mut(&name).filter(|known| known.users > 0);
            prop_assert_eq!(directory.release(&block).is_ok(), used.is_some());
            if let Some(known) = used {
                (known.users, known.used) = (known.users - 1, model.date);
                known.left = model.date;
            }
        }
        7 | 8 => {
            let page = model.free_page(|known| known.host);
            prop_assert_eq!(
                directory.save(&block, HostPage(page)).map_err(|e| e.kind()),
                model.save(name, page)
            );
        }
        9 => {
            let pinned = known.and_then(|known| known.host);
            if let Some(known) = model.blocks.get_mut(&name).filter(|known| known.host.is_some()) {
                known.pins += 1;
            }
            prop_assert_eq!(directory.pin(&block), Ok(pinned.map(HostPage)));
        }
        10 | 11 => {
            let pinned = model.blocks.get_mut(&name).filter(|known| known.pins > 0);
            prop_assert_eq!(directory.unpin(&block).is_ok(), pinned.is_some());
            if let Some(known) = pinned {
                (known.pins, known.used) = (known.pins - 1, model.date);
            }
        }
        _ => evict(directory, model, op == 12)?,
    }
    Ok(())
}

/// Evicts from the device, or from the host.
fn evict(directory: &mut Directory, model: &mut Model, device: bool) -> TestCaseResult {
    if device {
        let victim = model.victim();
        let expected = victim.map(|name| Victim {
            block: crowded(name),
            page: DevicePage(model.blocks[&name].device.unwrap()),
            saved: model.blocks[&name].host.is_some(),
        });
        prop_assert_eq!(directory.victim(), expected);
        prop_assert_eq!(directory.evict_device(), expected);
        if let Some(name) = victim {
            let known = model.blocks.get_mut(&name).unwrap();
            (known.device, known.unsaved) = (None, None);
            model.forget_if_gone(name);
        }
        return Ok(());
    }
    let victim = model.host_victim();
    let expected = victim.map(|name| (crowded(name), HostPage(model.blocks[&name].host.unwrap())));
    prop_assert_eq!(directory.evict_host(), expected);
    if let Some(name) = victim {
        model.blocks.get_mut(&name).unwrap().host = None;
        model.forget_if_gone(name);
    }
    Ok(())
}

fn compare(directory: &Directory, model: &Model) -> TestCaseResult {
    prop_assert_eq!(directory.validate(), Ok(()));
    prop_assert_eq!(directory.on_device() as usize, model.on_device());
    prop_assert_eq!(directory.on_host() as usize, model.on_host());
    let unused = |known: &&Known| known.device.is_some() && known.users == 0;
    prop_assert_eq!(directory.unused() as usize, model.blocks.values().filter(unused).count());
    let listed = model.unsaved().into_iter().map(|name| {
        let page = model.blocks[&name].device.unwrap();
        (crowded(name), DevicePage(page))
    });
    prop_assert_eq!(directory.unsaved().collect::<Vec<_>>(), listed.collect::<Vec<_>>());
    for name in 0..NAMES {
        let located = model.blocks.get(&name).map(|known| Located {
            device: known.device.map(DevicePage),
            host: known.host.map(HostPage),
            users: known.users,
            kept: known.pins > 0,
        });
        prop_assert_eq!(directory.find(&crowded(name)), located);
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_directory_agrees_with_plain_maps(
        device in 0..5_u32,
        host in 0..5_u32,
        ops in prop::collection::vec((0..14_u8, 0..NAMES, 0..2_u32), 0..400),
    ) {
        let mut directory = Directory::new(device, host).unwrap();
        let mut model = Model { blocks: HashMap::new(), pages: [device as usize, host as usize], date: 0 };
        for (op, name, other) in ops {
            model.date += 1;
            apply(&mut directory, &mut model, op, name, other)?;
            compare(&directory, &model)?;
        }
    }
}

/// A directory with a block in each state.
fn of_each_state() -> Directory {
    let mut directory = Directory::new(3, 3).unwrap();
    for (name, page) in [(0, 0), (1, 1), (2, 2)] {
        assert_eq!(directory.insert(&crowded(name), DevicePage(page)), Ok(Inserted::New));
    }
    directory.save(&crowded(1), HostPage(7)).unwrap();
    directory.save(&crowded(2), HostPage(8)).unwrap();
    [1, 2].into_iter().for_each(|name| directory.release(&crowded(name)).unwrap());
    assert_eq!(directory.evict_device().map(|victim| (victim.block, victim.saved)), Some((crowded(1), true)));
    directory.validate().unwrap();
    directory
}

/// What breaks a rule, given the entries of a block in use, one on the host only and an unused one.
type Break = fn(&mut Directory, [u32; 3]);

#[test]
fn each_broken_invariant_is_found() {
    let entry = |directory: &Directory, name: u8| directory.table.find(&crowded(name)).unwrap();
    let breaks: [(&str, Break); 9] = [
        ("a block has no page", |d, [_, gone, _]| d.entries[gone as usize].host = NONE),
        ("a block with users has no device page", |d, [_, gone, _]| d.entries[gone as usize].users = 1),
        ("a block with pins has no host page", |d, [used, ..]| d.entries[used as usize].pins = 1),
        ("the device's order is wrong", |d, [used, ..]| _ = d.unused.touch(used)),
        ("the host's order is wrong", |d, [_, gone, _]| _ = d.host.remove(gone)),
        ("an unsaved block is none", |d, [_, _, unused]| _ = d.unsaved.touch(unused)),
        ("an entry without a block is in use", |d, _| _ = d.unsaved.touch(5)),
        ("the blocks of a tier are not counted", |d, _| d.on_host += 1),
        ("two blocks have one page", |d, [_, gone, _]| d.entries[gone as usize].host = 8),
    ];
    for (rule, breaks) in breaks {
        let mut directory = of_each_state();
        let entries = [0, 1, 2].map(|name| entry(&directory, name));
        breaks(&mut directory, entries);
        let e = directory.validate().unwrap_err();
        assert_eq!((e.kind(), e.operation()), (Kind::Internal, rule));
    }
}

#[test]
fn a_block_comes_back_from_the_host_and_its_next_eviction_needs_no_copy() {
    let mut directory = of_each_state();
    let back = crowded(1);
    assert_eq!(directory.share(&back), Ok(None), "it is on the host only");
    assert_eq!(directory.pin(&back), Ok(Some(HostPage(7))));
    assert_eq!(directory.insert(&back, DevicePage(1)), Ok(Inserted::New));
    assert_eq!(directory.unsaved().map(|(block, _)| block).collect::<Vec<_>>(), [crowded(0)]);
    // A pinned page stays, though others are newer.
    assert_eq!(directory.evict_host(), Some((crowded(2), HostPage(8))));
    assert_eq!(directory.evict_host(), None);
    directory.unpin(&back).unwrap();
    directory.release(&back).unwrap();
    assert_eq!(
        directory.evict_device().map(|victim| (victim.block, victim.saved)),
        Some((crowded(2), false))
    );
    assert_eq!(directory.find(&crowded(2)), None, "a block without any page is forgotten");
    assert_eq!(directory.evict_device().map(|victim| (victim.block, victim.saved)), Some((back, true)));
    directory.validate().unwrap();
}

#[test]
fn refused_calls_name_the_tier_and_change_nothing() {
    let mut directory = of_each_state();
    let before = format!("{directory:?}");
    let full = {
        let mut full = of_each_state();
        full.insert(&crowded(3), DevicePage(1)).unwrap();
        full.insert(&crowded(4), DevicePage(4)).unwrap_err()
    };
    assert_eq!((full.kind(), full.place(), full.number("pages")), (Kind::Exhausted, "device pages", Some(3)));
    for (kind, refused) in [
        (Kind::OutOfRange, directory.insert(&crowded(3), DevicePage(NONE)).map(drop)),
        (Kind::OutOfRange, directory.save(&crowded(0), HostPage(NONE))),
        (Kind::InvalidState, directory.save(&crowded(1), HostPage(9))),
        (Kind::InvalidState, directory.save(&crowded(2), HostPage(9))),
        (Kind::InvalidState, directory.save(&crowded(9), HostPage(9))),
        (Kind::Internal, directory.release(&crowded(2))),
        (Kind::Internal, directory.unpin(&crowded(2))),
    ] {
        assert_eq!(refused.unwrap_err().kind(), kind);
    }
    assert_eq!(format!("{directory:?}"), before);
    for (device, host) in [(CAPACITY_MAX, 1), (u32::MAX, u32::MAX)] {
        assert_eq!(Directory::new(device, host).unwrap_err().kind(), Kind::OutOfRange);
    }
}

/// Serves a prompt of `names` as a caller does that saves each block when it is published. Returns the hits.
fn serve(directory: &mut Directory, free: &mut [Vec<u32>; 2], names: &[u8]) -> usize {
    let blocks: Vec<BlockHash> = names.iter().map(|name| crowded(*name)).collect();
    let hits = blocks.iter().take_while(|block| directory.find(block).is_some()).count();
    for block in &blocks {
        if directory.share(block).unwrap().is_some() {
            continue;
        }
        directory.pin(block).unwrap();
    }
    for block in &blocks {
        if directory.find(block).is_some_and(|located| located.device.is_some()) {
            continue;
        }
        let page = free[0].pop().unwrap_or_else(|| directory.evict_device().unwrap().page.0);
        assert_eq!(directory.insert(block, DevicePage(page)), Ok(Inserted::New));
        if directory.find(block).unwrap().host.is_some() {
            directory.unpin(block).unwrap();
        }
    }
    let unsaved: Vec<_> = directory.unsaved().collect();
    for (block, _) in unsaved {
        let page = free[1].pop().unwrap_or_else(|| directory.evict_host().unwrap().1.0);
        directory.save(&block, HostPage(page)).unwrap();
    }
    blocks.iter().rev().for_each(|block| directory.release(block).unwrap());
    hits
}

proptest! {
    #[test]
    fn saved_when_published_both_tiers_hit_as_one_lru_of_the_larger(
        device in 4..8_u32,
        host in 1..14_u32,
        prompts in prop::collection::vec((0..6_u8, 1..5_u8), 1..60),
    ) {
        let mut directory = Directory::new(device, host).unwrap();
        let mut free = [(0..device).collect(), (0..host).collect()];
        let (capacity, mut order) = (device.max(host) as usize, Vec::new());
        for (first, blocks) in prompts {
            // Prompts that begin with the same words, or with others, over 18 blocks.
            let names: Vec<u8> = (0..blocks).map(|n| (first * 3 + n) % 18).collect();
            let expected = names.iter().take_while(|name| order.contains(*name)).count();
            prop_assert_eq!(serve(&mut directory, &mut free, &names), expected);
            order.retain(|name| !names.contains(name));
            order.extend(names.iter().rev());
            let surplus = order.len().saturating_sub(capacity);
            order.drain(..surplus);
            prop_assert_eq!(directory.validate(), Ok(()));
        }
    }
}

#[test]
fn nothing_is_allocated_after_construction() {
    let mut directory = Directory::new(3, 4).unwrap();
    let tables = |d: &Directory| (d.table.tables(), d.entries.as_ptr() as usize);
    let (before, mut free) = (tables(&directory), [vec![0, 1, 2], vec![0, 1, 2, 3]]);
    for round in 0..50 {
        serve(&mut directory, &mut free, &[round % NAMES, (round + 3) % NAMES]);
    }
    assert_eq!((directory.on_device(), directory.on_host()), (3, 4));
    assert_eq!(tables(&directory), before);
}
