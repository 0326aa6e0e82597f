//! Maps block ids to dense numbers: 0, 1, 2... in order of first appearance.
//!
//! A replay's tables are then plain arrays. Small ids, as in all published traces, use a table
//! instead of a hash map. Ids that are valid within one line only get a new scope for each line, at no cost.

use std::collections::HashMap;

use super::ledger::{Ledger, Part, doubled, no_room};
use crate::error::Result;

/// Ids below this use the table: 12 bytes each, up to the largest id.
const TABLE_MAX: u64 = 1 << 22;

/// The state of an id.
#[derive(Clone, Copy, Default)]
struct Known {
    scope: u32,
    dense: u32,
    request: u32,
}

/// The map; see the module's head.
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
    /// Its first appearance.
    pub new: bool,
    /// Already seen in the same request.
    pub again: bool,
}

impl Interner {
    pub fn new() -> Self {
        Interner { table: Vec::new(), others: HashMap::new(), scope: 1, request: 0, count: 0 }
    }

    /// Begins a scope in which the same ids name other blocks. A trace has fewer scopes than requests.
    pub fn next_scope(&mut self) {
        self.scope += 1;
        // Clearing costs time for the capacity, so one long scope must not slow down all short ones after it.
        match self.others.capacity() > 1024 && self.others.len() < self.others.capacity() / 8 {
            true => self.others = HashMap::new(),
            false => self.others.clear(),
        }
    }

    /// Begins a request: ids before it do not count as repetitions.
    pub fn next_request(&mut self) {
        self.request += 1;
    }

    /// The number of distinct blocks so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Reports to the ledger the size of a table that is about to grow.
    fn tell(&self, ledger: &Ledger<'_>, table: usize, others: u64) -> Result<()> {
        ledger.set(Part::Ids, (table * size_of::<Known>()) as u64 + others)
    }

    /// The number of `id` in this scope.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind) for a new id; errors of the ledger.
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
