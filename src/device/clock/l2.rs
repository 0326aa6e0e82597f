//! What the cache before the device's memory (L2) holds.
//!
//! All bytes that operations move in the device's memory pass through it: those that moved last are there, as many as
//! it has room for, and the oldest leave first. Of most operations the clock knows how many bytes they move, and not
//! which: these push others out, and no work finds them. Bytes that have a name, by their addresses, are those of a
//! prefetch and of works that say what they read
//! ([`compute_reading`](super::ClockDevice::compute_reading)). An operation looks at its start, and its bytes are there
//! from its end on.
//!
//! **What it leaves out.** Sets and ways, lines, the two halves of some GPUs' caches, bytes that a device keeps on
//! purpose, and the time of a hit: it counts as a part of the work's own demand. Works whose bytes the clock is not
//! told push nothing out.

use std::collections::VecDeque;

/// Addresses from the first to before the last.
pub(super) type Addresses = (u64, u64);

/// Bytes that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    bytes: u64,
    /// Where they are in memory, if that is known.
    from: Option<u64>,
}

/// See the [module](self) page.
#[derive(Debug)]
pub(super) struct L2 {
    capacity: u64,
    /// The oldest first.
    held: VecDeque<Held>,
    bytes: u64,
}

fn shared(held: &Held, (from, to): Addresses) -> Option<Addresses> {
    let own = held.from?;
    let (first, last) = (own.max(from), own.saturating_add(held.bytes).min(to));
    (first < last).then_some((first, last))
}

impl L2 {
    /// An empty one of `capacity` bytes.
    pub(super) const fn new(capacity: u64) -> L2 {
        L2 { capacity, held: VecDeque::new(), bytes: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.bytes = 0;
    }

    /// How many bytes of these addresses are there.
    pub(super) fn found(&self, addresses: Addresses) -> u64 {
        self.held.iter().filter_map(|held| shared(held, addresses)).map(|(from, to)| to - from).sum()
    }

    /// Forgets these addresses: they are no part of it, or other memory now.
    pub(super) fn forget(&mut self, addresses: Addresses) {
        for place in (0..self.held.len()).rev() {
            let Some(held) = self.held.get(place).copied() else { continue };
            let (Some(own), Some((from, to))) = (held.from, shared(&held, addresses)) else { continue };
            self.bytes -= to - from;
            self.held.remove(place);
            // What is left behind the addresses, and before them.
            for (from, to) in [(to, own.saturating_add(held.bytes)), (own, from)] {
                if from < to {
                    self.held.insert(place, Held { bytes: to - from, from: Some(from) });
                }
            }
        }
    }

    /// The bytes of these addresses have passed.
    pub(super) fn pass(&mut self, addresses: Addresses) {
        self.forget(addresses);
        let (from, to) = addresses;
        self.push(Held { bytes: to.saturating_sub(from), from: Some(from) });
    }

    /// So many bytes have passed, without a name.
    pub(super) fn pass_others(&mut self, bytes: u64) {
        match self.held.back_mut() {
            Some(last) if last.from.is_none() => {
                last.bytes = last.bytes.saturating_add(bytes);
                self.bytes = self.bytes.saturating_add(bytes);
                self.evict();
            }
            _ => self.push(Held { bytes, from: None }),
        }
    }

    fn push(&mut self, held: Held) {
        if held.bytes > 0 {
            self.held.push_back(held);
            self.bytes = self.bytes.saturating_add(held.bytes);
            self.evict();
        }
    }

    fn evict(&mut self) {
        while let (Some(oldest), true) = (self.held.front_mut(), self.bytes > self.capacity) {
            let gone = oldest.bytes.min(self.bytes - self.capacity);
            oldest.bytes -= gone;
            oldest.from = oldest.from.map(|from| from + gone);
            self.bytes -= gone;
            if oldest.bytes == 0 {
                self.held.pop_front();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The same by single bytes: the last `capacity` of those that passed, each once.
    #[derive(Default)]
    struct Bytes(Vec<Option<u64>>);

    impl Bytes {
        fn pass(&mut self, byte: Option<u64>, capacity: usize) {
            self.0.retain(|other| byte.is_none() || *other != byte);
            self.0.push(byte);
            if self.0.len() > capacity {
                self.0.remove(0);
            }
        }

        fn found(&self, (from, to): Addresses) -> u64 {
            self.0.iter().flatten().filter(|byte| (from..to).contains(*byte)).count() as u64
        }
    }

    #[test]
    fn it_holds_the_last_bytes_that_passed() {
        let mut state = 5_u64;
        let mut next = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        let mut partly = 0;
        for capacity in [0, 1, 7, 40, 200] {
            let (mut l2, mut bytes) = (L2::new(capacity), Bytes::default());
            for step in 0..3000 {
                let from = next(100);
                let addresses = (from, from + next(30));
                match next(8) {
                    0 => {
                        let count = next(12);
                        l2.pass_others(count);
                        (0..count).for_each(|_| bytes.pass(None, capacity as usize));
                    }
                    1 => {
                        l2.forget(addresses);
                        bytes
                            .0
                            .retain(|byte| byte.is_none_or(|it| !(addresses.0..addresses.1).contains(&it)));
                    }
                    2 if step % 50 == 0 => {
                        l2.clear();
                        bytes.0.clear();
                    }
                    _ => {
                        l2.pass(addresses);
                        (addresses.0..addresses.1).for_each(|byte| bytes.pass(Some(byte), capacity as usize));
                    }
                }
                let asked = (next(100), 60 + next(70));
                assert_eq!(l2.found(asked), bytes.found(asked), "step {step}, {capacity} bytes: {l2:?}");
                assert_eq!(l2.bytes, bytes.0.len() as u64);
                partly += u64::from((1..asked.1.saturating_sub(asked.0)).contains(&l2.found(asked)));
            }
        }
        assert!(partly > 1000, "{partly}");
    }
}
