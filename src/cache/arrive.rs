//! Arrival: a sequence whose pages a transfer fills, from prefill to decode.
//!
//! A decode instance grants pages to a request long before it can run it: rows and index keys come layer by layer,
//! while prefill still computes the next ones. So a request that arrives has pages and nothing else. Its lane and
//! slots, of which there are far fewer, serve sequences that run until [`Cache::join`] takes them.
//!
//! | call | device | host |
//! |---|---|---|
//! | [`Cache::arrive`] | nothing | takes the pages of prompt, promise and rows in flight, and a record |
//! | [`Cache::append`], [`Cache::append_layer_in_place`] | nothing | counts a layer's rows |
//! | [`Cache::place_index_keys`] | copies keys to the sequence's pages | counts a layer's keys |
//! | [`Cache::join`], [`Cache::join_early`] | joins a lane | takes a lane and slots |
//! | [`Cache::close`] | a ticket, on a stream behind all work on its pages | gives the pages back when it is Done |
//! | [`Cache::abort`] | the same | withholds the pages until [`Cache::release`] |
//!
//! **Index keys are counted.** A join is refused while a layer lacks keys: an indexer that scores what an earlier
//! sequence left in the pages selects nonsense, and no row shows it. Keys that come to device pages without a copy of
//! this module are declared ([`Cache::index_keys_in_place`]). Keys may be placed again, but not behind a gap, so that a
//! count says which are there. The next turn of a conversation comes to a parked sequence in the same way. A sequence
//! that was opened for an engine's own prefill counts no keys, nor does a fork: the engine's kernels write them. If
//! they write those of a turn of a sequence that arrived, the engine declares them.
//!
//! **Order.** A page that is free has no work in flight, because pages are given back only when the host has seen the
//! end of what names them. So a copy of keys is ordered after the sequence's own earlier copies alone, and the join
//! after all of them, by the event of the record (`settle`).
//!
//! **Who writes.** If the receiver itself brings rows and keys, [`Cache::close`] ends the sequence at any time. If
//! others write to its pages on their own, a write may land after the end: then [`Cache::abort`] ends it. A write may
//! land after rows were checked too: such a sequence runs when its writers are done, and is given up if one is lost.
//!
//! **Pages.** [`Cache::arrive_shared`] finds leading pages by their token ids, and the receiver tells the sender how
//! many tokens it need not send. Nothing writes to those pages, neither the sender nor this module.

use crate::cache::Cache;
use crate::cache::admit::Open;
use crate::cache::record::{Record, State};
use crate::device::{Slice, Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::ids::{Layer, Sequence};
use crate::sequence::Tokens;

/// Keys of a call that places some.
#[derive(Clone, Copy, Debug)]
struct Keys {
    group: usize,
    /// In bytes of the sequence's keys, where they begin.
    at: u64,
    /// Keys of the prompt that are in place afterwards.
    placed: u32,
}

impl Cache {
    /// Opens a sequence whose rows and index keys a transfer brings: takes its pages, but no slots and no lane.
    /// [`Cache::join`] takes those once every layer is whole. At most [`Config::arriving`](crate::Config::arriving)
    /// sequences arrive at a time. With [`Config::share`](crate::Config::share) its budget is promised when it joins.
    ///
    /// # Errors
    /// As [`Cache::open`]; also [`Kind::Exhausted`] if as many sequences arrive as may, and for a budget that is larger
    /// than the pool. An error takes nothing.
    pub fn arrive(&mut self, open: &Open) -> Result<Sequence> {
        self.open_as(State::Arriving, open)
    }

    /// Opens such a sequence for a prompt whose token ids are known, as [`Cache::open_shared`] does. Returns the
    /// sequence and the number of leading tokens that the cache has: the transfer brings those that follow.
    ///
    /// # Errors
    /// As [`Cache::arrive`] and [`Cache::open_shared`]. An error takes nothing.
    pub fn arrive_shared(&mut self, open: &Open, salt: &[u8], prompt: Tokens<'_>) -> Result<(Sequence, u32)> {
        self.open_shared_as(State::Arriving, open, salt, prompt)
    }

    /// Checks that one more sequence may arrive.
    pub(super) fn check_arrivals(&self) -> Result<()> {
        let taken = self.records.iter().filter(|record| record.is_arrival()).count() as u32;
        if taken >= self.config.arriving {
            return Err(Error::new(Kind::Exhausted, "arrive")
                .at("arriving sequences")
                .with("wanted", 1_u32)
                .with("free", 0_u32)
                .hint("wait for others to join or end, or make the cache with a larger `arriving`"));
        }
        Ok(())
    }

    /// Checks that the budgets of a sequence without slots could ever be given.
    pub(super) fn check_budgets(&self, budgets: &[u32], operation: &'static str) -> Result<()> {
        for (group, budget) in budgets.iter().enumerate() {
            let (wanted, most) = (budget.div_ceil(SLOT_BLOCK), self.sparse.slots().blocks(group));
            if wanted > most {
                return Err(Error::new(Kind::Exhausted, operation)
                    .at("slot blocks")
                    .with("wanted", wanted)
                    .with("free", most)
                    .with("layer", self.geometry.members(group).start as u64));
            }
        }
        Ok(())
    }

    /// Whether a sequence is arriving: it has pages, and neither a lane nor slots.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn is_arriving(&self, sequence: Sequence) -> Result<bool> {
        Ok(self.record(sequence)?.state == State::Arriving)
    }

    /// Copies index keys of a layer to the pages of a sequence that arrives, or that arrived and is parked, on
    /// `stream`. `keys` holds the keys of the tokens from `first` on, packed: `[n][key bytes]`. It is memory that the
    /// device reaches, and stays as it is until the ticket is Done. Keys in place may be placed again, but not those of
    /// tokens that the sequence shares or had when it was parked; `first` may not be beyond those in place. The last
    /// page may be given whole, with what is behind the prompt.
    ///
    /// Where the engine's pages are not `[page tokens][key bytes]` inside, such as with all scales behind all keys,
    /// pass whole pages, and a `first` that begins one. The call copies bytes and knows nothing of what they are.
    ///
    /// It is one copy for each run of pages that follow each other in the pool. The join waits for it.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that did not arrive, or that has joined and is not
    /// parked; [`Kind::OutOfRange`] for a layer without index keys of its own ([`Cache::index_keys`]), for bytes that
    /// are not whole keys, for keys beyond the last page of the prompt, for another `first`, and for memory of another
    /// device or that does not begin at a multiple of 4; [`Kind::DeviceFailed`] if an earlier copy failed. These errors
    /// change nothing. If the device refuses the call half-way, some keys may be copied. Then those from `first` on
    /// count no more: place them again, on any stream. The memory of the refused call stays in use until a later ticket
    /// of the sequence is Done.
    pub fn place_index_keys(
        &mut self,
        sequence: Sequence,
        layer: Layer,
        first: u32,
        keys: Slice,
        stream: Stream,
    ) -> Result<Ticket> {
        let to = self.index_keys(layer)?;
        let Keys { group, at, placed } = self.keys_to_place(sequence, layer, first, &keys)?;
        let index = sequence.index as usize;
        self.take_over(index, stream)?;
        // Until all copies are enqueued, some of these keys may be the former ones and some the new ones.
        self.count_keys(index, group, first);
        let table = &self.records[index].owned.table.index;
        for (from, at, bytes) in self.index.copies(table, at, keys.bytes()) {
            self.device.copy(stream, keys.part(from, bytes)?, to.part(at, bytes)?)?;
        }
        let ticket = self.settle(index, stream)?;
        self.count_keys(index, group, placed);
        Ok(ticket)
    }

    /// Declares that the index keys of `count` more tokens of a layer are in place in the pages of such a sequence
    /// ([`Cache::index_keys`]). A transfer or a kernel of the engine wrote them there, and the stream that joins the
    /// sequence is ordered after that.
    ///
    /// # Errors
    /// As [`Cache::place_index_keys`], for keys beyond the prompt. An error changes nothing.
    pub fn index_keys_in_place(&mut self, sequence: Sequence, layer: Layer, count: u32) -> Result<()> {
        self.index_keys(layer)?;
        let (group, record) = (self.geometry.group_of(layer.index()), self.counted(sequence)?);
        let placed = record.keys.get(group).copied().unwrap_or(0);
        let prompt = record.admitted.prompt;
        if count > prompt - placed {
            return Err(beyond("index keys beyond the prompt", count.into(), placed, prompt));
        }
        self.count_keys(sequence.index as usize, group, placed + count);
        Ok(())
    }

    /// Checks a call that places keys.
    fn keys_to_place(&self, sequence: Sequence, layer: Layer, first: u32, keys: &Slice) -> Result<Keys> {
        let (group, record) = (self.geometry.group_of(layer.index()), self.counted(sequence)?);
        let wrong = |place| Error::new(Kind::OutOfRange, "place_index_keys").at(place);
        let key_bytes = u64::from(self.geometry.shape().index_key_bytes);
        let (count, bytes) = (keys.bytes() / key_bytes, keys.bytes());
        if !bytes.is_multiple_of(key_bytes) {
            return Err(wrong("bytes that are not whole keys").with("bytes", bytes).with("key", key_bytes));
        }
        if !self.device.owns(keys) || !keys.address().is_multiple_of(4) {
            return Err(wrong("memory of the keys").with("bytes", bytes));
        }
        let placed = record.keys.get(group).copied().unwrap_or(0);
        // Others may share the pages of tokens that it had when it was parked.
        let fixed = record.shared.max(record.rows.committed);
        if first > placed || first < fixed {
            return Err(wrong("the first token")
                .with("first", first)
                .with("least", fixed)
                .with("placed", placed)
                .hint("leave no gap behind the keys in place, and place those of shared or decoded tokens no more"));
        }
        let prompt = record.admitted.prompt;
        let end = u64::from(prompt).next_multiple_of(self.geometry.page_tokens().into());
        if count > end - u64::from(first) {
            return Err(beyond("index keys beyond the last page of the prompt", count, first, prompt));
        }
        // Keys after a failed copy must not look done.
        record.check_ticket("place_index_keys")?;
        let behind = (u64::from(first) + count).min(prompt.into()) as u32;
        Ok(Keys { group, at: u64::from(first) * key_bytes, placed: placed.max(behind) })
    }

    fn count_keys(&mut self, index: usize, group: usize, placed: u32) {
        self.records[index].keys.get_mut(group).into_iter().for_each(|keys| *keys = placed);
    }

    /// The record of a sequence whose index keys are counted, and may come now.
    fn counted(&self, sequence: Sequence) -> Result<&Record> {
        let record = self.record(sequence)?;
        if record.keys.is_empty() {
            return Err(Error::new(Kind::InvalidState, "place_index_keys")
                .at("the index keys of the sequence are not counted")
                .hint("it did not arrive: the engine's own kernels write its keys"));
        }
        record.check_state(&State::FILLED, "place_index_keys")?;
        Ok(record)
    }
}

fn beyond(place: &'static str, keys: u64, first: u32, prompt: u32) -> Error {
    let error = Error::new(Kind::OutOfRange, "place_index_keys").at(place);
    error.with("keys", keys).with("first", first).with("prompt", prompt)
}
