//! An order of use over dense numbers: who was used last, who longest ago.
//!
//! A doubly linked list whose links stand in one flat table, a pair of words for each number, and a head
//! that closes the ring: every operation is a few array accesses, without hashing, branches for the ends,
//! or allocation after construction.

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
    /// One for each number, then the head: its `older` is the newest, its `newer` the oldest.
    links: Vec<Link>,
    head: u32,
    len: u32,
}

impl Recency {
    /// An empty order over the numbers below `numbers`, which is at most 2^32 - 2. Takes 8 bytes a number.
    ///
    /// # Errors
    /// The table's bytes, when there is no memory for them.
    pub fn new(numbers: u32) -> Result<Recency, u64> {
        let mut links = Vec::new();
        let bytes = (u64::from(numbers) + 1) * 8;
        links.try_reserve_exact(numbers as usize + 1).map_err(|_| bytes)?;
        links.resize(numbers as usize, Link { newer: ABSENT, older: ABSENT });
        links.push(Link { newer: numbers, older: numbers });
        Ok(Recency { links, head: numbers, len: 0 })
    }

    /// How many numbers are in the order.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `number` is in the order.
    #[inline]
    pub fn contains(&self, number: u32) -> bool {
        self.links[number as usize].newer != ABSENT
    }

    /// Makes `number` the newest; answers whether it was there before.
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

    /// Takes `number` out; answers whether it was there.
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

    /// The one used longest ago.
    pub fn oldest(&self) -> Option<u32> {
        Some(self.links[self.head as usize].newer).filter(|oldest| *oldest != self.head)
    }

    /// All of them, the one used longest ago first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let newer = |number: &u32| Some(self.links[*number as usize].newer).filter(|next| *next != self.head);
        std::iter::successors(self.oldest(), newer)
    }

    /// Takes out the one used longest ago.
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
        fn it_orders_as_a_plain_list_does(ops in prop::collection::vec((0..3_u32, 0..9_u32), 0..200)) {
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
