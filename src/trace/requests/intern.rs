//! Block ids to dense numbers: 0, 1, 2... in the order of first sight.
//!
//! A replay's tables are then plain arrays. Small ids, which all published traces have, go through a table
//! and not a hash; ids that hold only within one line get a new scope for each line, at no cost.

use std::collections::HashMap;

use super::ledger::{Ledger, Part, doubled};
use super::no_room;
use crate::error::Result;

/// Ids below this go through the table: 12 bytes each, as far as ids reach.
const TABLE_MAX: u64 = 1 << 22;

/// What is known of an id.
#[derive(Clone, Copy, Default)]
struct Known {
    scope: u32,
    dense: u32,
    request: u32,
}

/// See the module's head.
pub(super) struct Interner {
    table: Vec<Known>,
    others: HashMap<u64, Known>,
    scope: u32,
    request: u32,
    count: u32,
}

/// An id's dense number.
pub(super) struct Named {
    pub dense: u32,
    /// It was never seen before.
    pub new: bool,
    /// It was seen in this very request.
    pub again: bool,
}

impl Interner {
    pub fn new() -> Self {
        Interner { table: Vec::new(), others: HashMap::new(), scope: 1, request: 0, count: 0 }
    }

    /// From here on the same ids name other blocks. A trace has fewer scopes than requests.
    pub fn next_scope(&mut self) {
        self.scope += 1;
        // Clearing costs the room, and one long scope must not make all short ones behind it dear.
        match self.others.capacity() > 1024 && self.others.len() < self.others.capacity() / 8 {
            true => self.others = HashMap::new(),
            false => self.others.clear(),
        }
    }

    /// From here on an id is not a repetition.
    pub fn next_request(&mut self) {
        self.request += 1;
    }

    /// Distinct blocks so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Tells the ledger what a table will hold that is about to grow.
    fn tell(&self, ledger: &Ledger<'_>, table: usize, others: u64) -> Result<()> {
        ledger.set(Part::Ids, (table * size_of::<Known>()) as u64 + others)
    }

    /// The number of `id` in this scope.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind) for one more; those of the ledger.
    pub fn name(&mut self, id: u64, ledger: &Ledger<'_>) -> Result<Named> {
        let full = |_| no_room("the distinct ids");
        let entry = size_of::<(u64, Known)>();
        let known = if id < TABLE_MAX {
            let place = id as usize;
            if place >= self.table.len() {
                if place >= self.table.capacity() {
                    let others = doubled(self.others.capacity() / 2, entry);
                    self.tell(ledger, (place + 1).max(2 * self.table.capacity()), others)?;
                }
                self.table.try_reserve(place + 1 - self.table.len()).map_err(full)?;
                self.table.resize(place + 1, Known::default());
            }
            &mut self.table[place]
        } else {
            if self.others.len() == self.others.capacity() {
                self.tell(ledger, self.table.capacity(), doubled(self.others.capacity(), entry))?;
            }
            self.others.try_reserve(1).map_err(full)?;
            self.others.entry(id).or_default()
        };
        let new = known.scope != self.scope;
        if new {
            *known = Known { scope: self.scope, dense: self.count, request: 0 };
            self.count += 1;
        }
        let again = known.request == self.request;
        known.request = self.request;
        Ok(Named { dense: known.dense, new, again })
    }
}
