//! An LRU list of dense numbers.
//!
//! It is a doubly linked list. One flat table holds the links, a pair of words for each number, and a head closes the
//! ring. Every operation is a few array accesses, without hashing, without branches for the ends, and without
//! allocation after construction.

/// Both links of a number that is not in the list.
const ABSENT: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

/// See the module's head.
#[derive(Clone, Debug)]
pub struct Recency {
    /// One pair for each number, then the head. The head's `older` is the newest number, its `newer` the oldest.
    links: Vec<Link>,
    head: u32,
    len: u32,
}

impl Recency {
    /// An empty list for the numbers below `numbers`, which is at most 2^32 - 2. It takes 8 bytes for each number.
    ///
    /// # Errors
    /// The table's bytes, if there is no memory for them.
    pub fn new(numbers: u32) -> Result<Recency, u64> {
        let mut links = Vec::new();
        let bytes = (u64::from(numbers) + 1) * 8;
        links.try_reserve_exact(numbers as usize + 1).map_err(|_| bytes)?;
        links.resize(numbers as usize, Link { newer: ABSENT, older: ABSENT });
        links.push(Link { newer: numbers, older: numbers });
        Ok(Recency { links, head: numbers, len: 0 })
    }

    /// The number of entries in the list.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `number` is in the list.
    #[inline]
    pub fn contains(&self, number: u32) -> bool {
        self.links[number as usize].newer != ABSENT
    }

    /// Makes `number` the newest. Returns whether it was in the list before.
    #[inline]
    pub fn touch(&mut self, number: u32) -> bool {
        let Link { newer, older } = self.links[number as usize];
        let there = newer != ABSENT;
        if newer == self.head {
            return true;
        }
        if there {
            self.links[newer as usize].older = older;
            self.links[older as usize].newer = newer;
        } else {
            self.len += 1;
        }
        let newest = self.links[self.head as usize].older;
        self.links[newest as usize].newer = number;
        self.links[self.head as usize].older = number;
        self.links[number as usize] = Link { newer: self.head, older: newest };
        there
    }

    /// Removes `number`. Returns whether it was in the list.
    #[inline]
    pub fn remove(&mut self, number: u32) -> bool {
        let Link { newer, older } = self.links[number as usize];
        if newer == ABSENT {
            return false;
        }
        self.links[newer as usize].older = older;
        self.links[older as usize].newer = newer;
        self.links[number as usize] = Link { newer: ABSENT, older: ABSENT };
        self.len -= 1;
        true
    }

    /// The least recently used number.
    pub fn oldest(&self) -> Option<u32> {
        Some(self.links[self.head as usize].newer).filter(|oldest| *oldest != self.head)
    }

    /// All numbers, the least recently used first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let newer = |number: &u32| Some(self.links[*number as usize].newer).filter(|next| *next != self.head);
        std::iter::successors(self.oldest(), newer)
    }

    /// Removes the least recently used number.
    #[inline]
    pub fn pop_oldest(&mut self) -> Option<u32> {
        let oldest = self.oldest()?;
        self.remove(oldest);
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Recency;

    proptest! {
        #[test]
        fn the_recency_list_orders_as_a_plain_list_does(ops in prop::collection::vec((0..3_u32, 0..9_u32), 0..200)) {
            let mut order = Recency::new(9).unwrap();
            let mut list: Vec<u32> = Vec::new();
            for (op, number) in ops {
                let there = list.contains(&number);
                prop_assert_eq!(order.contains(number), there);
                match op {
                    0 => {
                        prop_assert_eq!(order.touch(number), there);
                        list.retain(|n| *n != number);
                        list.push(number);
                    }
                    1 => {
                        prop_assert_eq!(order.remove(number), there);
                        list.retain(|n| *n != number);
                    }
                    _ => {
                        let oldest = (!list.is_empty()).then(|| list.remove(0));
                        prop_assert_eq!(order.pop_oldest(), oldest);
                    }
                }
                prop_assert_eq!(order.len() as usize, list.len());
                prop_assert_eq!(order.oldest(), list.first().copied());
                prop_assert_eq!(&order.iter().collect::<Vec<_>>(), &list);
            }
        }
    }
}
