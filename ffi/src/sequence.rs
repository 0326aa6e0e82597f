//! The calls for one sequence, from open to close.

use std::ffi::c_void;

use forebay::{BringUp, Budget, Error, Kind, Layer, Open, Result, WarmUp};

use crate::budget::Stated;
use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::status::FbStatus;
use crate::ticket::{self, FbTicket};

/// In each layer, the join loads every row into slots, if all of them fit the sequence's slots there.
pub const FB_BRING_UP_WHOLE: u32 = 0;
/// The join loads no rows except those that the warm-up's selections name.
pub const FB_BRING_UP_NOTHING: u32 = 1;

/// What a new sequence needs. An optional field that is 0 gets the default that its comment names. In a cache with
/// `share` (fb_cache_config) the budget is the least that the sequence ever has.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbOpenConfig {
    /// sizeof(fb_open_config).
    pub size: usize,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens that the sequence may decode after the prompt.
    pub promised: u32,
    /// Optional: slots in each layer. Set it or `ratio`, not both. Default, if none of `slots`, `ratio` and
    /// `slots_by_layer` is set: the cache's min_budget.
    pub slots: u32,
    /// Optional: the rows that the join loads, an FB_BRING_UP_ constant. Default: FB_BRING_UP_WHOLE.
    pub bring_up: u32,
    /// Optional: slots in each layer as a fraction of prompt plus promised tokens, above 0 and at most 1; at least the
    /// cache's min_budget. Default: `slots` applies.
    pub ratio: f64,
    /// Optional: slots of each layer, draft layers included. Set it or `slots` or `ratio`, only one of them. Default:
    /// every layer has the same number of slots.
    pub slots_by_layer: *const u32,
}

// SAFETY: words and a pointer, four of 4 bytes between words of 8; any bytes are an `f64`.
unsafe impl Plain for FbOpenConfig {}
impl Versioned for FbOpenConfig {
    const NAME: &'static str = "fb_open_config";
    const REQUIRED: usize = std::mem::offset_of!(FbOpenConfig, slots);
}

impl FbOpenConfig {
    /// # Safety
    /// `slots_by_layer` is null, or has as many values as the cache has layers.
    pub(crate) unsafe fn declare(&self, cache: &FbCache) -> Result<Open> {
        let stated = Stated { slots: self.slots, ratio: self.ratio, slots_by_layer: self.slots_by_layer };
        // SAFETY: the same contract.
        let budget = unsafe { stated.budget(cache.cache.geometry().layers(), "open") }?;
        let budget = budget.unwrap_or_else(|| Budget::Slots(cache.cache.config().min_budget));
        let bring_up = match self.bring_up {
            FB_BRING_UP_WHOLE => BringUp::Whole,
            FB_BRING_UP_NOTHING => BringUp::Nothing,
            other => {
                return Err(Error::new(Kind::InvalidConfig, "open").at("bring_up").with("value", other));
            }
        };
        Ok(Open { prompt: self.prompt, promised: self.promised, budget, bring_up })
    }
}

/// The warm-up of a joining sequence.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbWarmUp {
    /// sizeof(fb_warm_up).
    pub size: usize,
    /// Optional: the selections (top-k indices) of the last prompt positions, oldest first, on the device: token
    /// positions, -1 for none, `[index_groups of fb_info][steps][top_k]`: one for each layer that selects.
    pub selections: *const i32,
    /// Optional: the number of prompt positions in `selections`; 0 without selections.
    pub steps: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional: the most bytes of rows that one call gathers; fb_join_more gathers the rest. Default: no bound.
    pub bytes_a_call: u64,
}

// SAFETY: words and a pointer, two of 4 bytes between words of 8.
unsafe impl Plain for FbWarmUp {}
impl Versioned for FbWarmUp {
    const NAME: &'static str = "fb_warm_up";
    const REQUIRED: usize = std::mem::offset_of!(FbWarmUp, bytes_a_call);
}

impl FbWarmUp {
    /// The warm-up of as many index groups as it selects for.
    ///
    /// # Safety
    /// The selections are valid device memory until the stream has passed the call.
    pub(crate) unsafe fn declare(&self, cache: &FbCache, groups: usize) -> Result<WarmUp> {
        let bad = |place| Err(Error::new(Kind::InvalidConfig, "join").at(place));
        if self.reserved != 0 {
            return bad("reserved");
        }
        if self.selections.is_null() != (self.steps == 0) {
            return bad("selections and steps: both or none");
        }
        let geometry = cache.cache.geometries();
        let rows = groups as u64 * u64::from(self.steps);
        let words = rows.checked_mul(u64::from(geometry.shape().top_k));
        let words = words.ok_or_else(|| Error::new(Kind::Overflow, "join").at("selections"))?;
        let selections = match self.selections.is_null() {
            true => None,
            // SAFETY: the same contract.
            false => Some(unsafe { cast::buffer(cache.device(), self.selections, words, "selections") }?),
        };
        Ok(WarmUp { selections, steps: self.steps, bytes_a_call: self.bytes_a_call })
    }
}

/// The lengths of a sequence.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbSequenceLength {
    /// sizeof(fb_sequence_length), set by the caller.
    pub size: usize,
    /// Committed tokens, as far as the host can see from retired steps and from work that the library enqueued.
    pub committed: u32,
    /// Rows that the last retired step wrote after the committed ones and that are neither accepted nor rejected yet.
    pub landed: u32,
    /// Tokens of the sequence's published pages. The next fb_publish starts after them.
    pub published: u32,
    /// 1 if the sequence has joined and may take part in steps, otherwise 0.
    pub running: u32,
    /// 1 if the sequence is parked (fb_park), otherwise 0.
    pub parked: u32,
    /// Prompt rows that every layer has. While the sequence is parked, all its tokens are a prompt.
    pub filled: u32,
    /// 1 if the sequence is arriving (fb_arrive): it has pages, and neither a lane nor slots. Otherwise 0.
    pub arriving: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: words, eight of 4 bytes after one of 8.
unsafe impl Plain for FbSequenceLength {}
impl Versioned for FbSequenceLength {
    const NAME: &'static str = "fb_sequence_length";
    const REQUIRED: usize = std::mem::offset_of!(FbSequenceLength, running) + 4;
}

/// A page of a sequence. This struct never grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FbPage {
    /// The number of the page of rows in the total pool.
    pub host: u32,
    /// The number of the page of index keys, the same in every layer (fb_index_keys). The engine may use it as an entry
    /// of its own block table.
    pub index_keys: u32,
}

// SAFETY: two words of 4 bytes.
unsafe impl Plain for FbPage {}

/// Admits a sequence: it takes the sequence's pages, slots and lane. FB_EXHAUSTED when a pool has too little left: the
/// error text names the pool, and the call has taken nothing. In a cache with `share` (fb_cache_config) the call only
/// promises the slots, and fb_join takes them. FB_EXHAUSTED then means that the pool cannot keep all promises.
///
/// # Safety
/// `config` states its real size, and its `slots_by_layer` is NULL or has an entry for each layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_open(
    cache: *mut FbCache,
    config: *const FbOpenConfig,
    sequence: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract, for all three.
    unsafe {
        change(cache, |cache| {
            let (config, sequence) = (cast::versioned(config)?, cast::out(sequence, "sequence")?);
            let open = FbOpenConfig::declare(&config, cache)?;
            let opened = cache.cache.open(&open)?;
            sequence.set(cache.number_of(opened));
            Ok(())
        })
    }
}

/// Appends `count` packed prompt rows to one layer, each of row_bytes[0] + row_bytes[1] bytes. Layers fill
/// independently, each in token order. FB_INVALID_STATE once fb_join has decided the resident rows. On an error nothing
/// is written.
///
/// # Safety
/// `rows` has `count` rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_append(
    cache: *mut FbCache,
    sequence: u64,
    layer: u32,
    rows: *const c_void,
    count: u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let row_bytes = u64::from(cache.cache.geometry().row_bytes());
            // A u64 holds the product of two u32, and a usize is as wide.
            let bytes = cast::slice(rows.cast::<u8>(), (row_bytes * u64::from(count)) as usize, "rows")?;
            cache.cache.append(cache.sequence(sequence)?, Layer(layer), bytes)
        })
    }
}

/// Declares that `count` prompt rows of every layer are already in the total pool (fb_rows), because a prefill or a
/// transfer wrote them there, or that nothing needs their bytes because only residency is replayed. It returns the same
/// errors as fb_append.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_append_in_place(cache: *mut FbCache, sequence: u64, count: u32) -> FbStatus {
    change(cache, |cache| {
        let sequence = cache.sequence(sequence)?;
        cache.cache.append_in_place(sequence, count)
    })
}

/// Declares that `count` more prompt rows of one layer are already in the total pool, as fb_append_in_place does for
/// every layer: for a transfer that brings a sequence layer by layer.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_append_layer_in_place(
    cache: *mut FbCache,
    sequence: u64,
    layer: u32,
    count: u32,
) -> FbStatus {
    change(cache, |cache| {
        let sequence = cache.sequence(sequence)?;
        cache.cache.append_layer_in_place(sequence, Layer(layer), count)
    })
}

/// Admits more tokens to a sequence that has not joined or is parked, for prompts that arrive in chunks: its prompt
/// gets `prompt` tokens in all, and after them it may decode `promised`. Neither the prompt nor the sum may become
/// smaller. A budget that was given as a ratio is that ratio of the new sum. FB_OUT_OF_RANGE for a smaller number or
/// more than the cache's max_tokens; FB_EXHAUSTED names the pool that has too little left; FB_INVALID_STATE once the
/// sequence has joined. After any of these nothing has changed.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_extend(
    cache: *mut FbCache,
    sequence: u64,
    prompt: u32,
    promised: u32,
) -> FbStatus {
    change(cache, |cache| {
        let sequence = cache.sequence(sequence)?;
        cache.cache.extend(sequence, prompt, promised)
    })
}

/// Parks a sequence, for example to preempt it: its lane and slots are free for others when the call returns, and its
/// pages stay. `accepted` is how many rows of its last step count, as in fb_batch_row; the others are rejected. A
/// sequence that has not joined is parked with 0. Until fb_resume brings it back, the sequence is a prompt: fb_extend,
/// fb_append and fb_truncate accept it. The device notes the rows that the sequence selected last, in `stream`'s order.
/// FB_EXHAUSTED if as many sequences are parked as `parked` of fb_cache_config; FB_BUSY while work of the sequence is
/// in flight; FB_INVALID_STATE while it is joining or after a failed step; FB_OUT_OF_RANGE for more accepted rows than
/// landed. After any of these nothing has changed.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_park(
    cache: *mut FbCache,
    sequence: u64,
    accepted: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(cache, |cache| {
        let sequence = cache.sequence(sequence)?;
        cache.cache.park(sequence, accepted, cast::stream(stream))
    })
}

/// Resumes a parked sequence: takes a lane and slots, and joins with the rows that it selected last before it was
/// parked. `bytes_a_call` is the most bytes of rows that the call gathers, 0 for no bound; fb_join_more gathers the
/// rest. `ticket` may be NULL; otherwise it receives the ticket of the enqueued work. FB_EXHAUSTED names lanes or slot
/// blocks; FB_INVALID_STATE for a sequence that is not parked, or whose prompt is incomplete in a layer; FB_BUSY as in
/// fb_join. After any of these nothing has changed. If the device refuses the call half-way, fb_join does the rest.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_resume(
    cache: *mut FbCache,
    sequence: u64,
    bytes_a_call: u64,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = cache.sequence(sequence)?;
        let ended = cache.cache.resume(sequence, cast::stream(stream), bytes_a_call)?;
        wanted.give(ended, &cache.tenant);
        Ok(())
    })
}

/// Joins a sequence to its lane, once every layer has its whole prompt. The call decides which rows are resident. In
/// each layer where `bring_up` of fb_open_config asks for all rows and they fit, it begins with all of them, otherwise
/// with none. It then applies the selections of `warm_up` in order by exact LRU, as if they were steps. It gathers the
/// rows that are then resident, up to the warm-up's bound. Steps wait for this work by themselves; with a bound, call
/// fb_join_more until the sequence is running. `warm_up` may be NULL. `ticket` may be NULL; otherwise it receives the
/// ticket of the enqueued work. FB_INVALID_STATE while a layer's prompt is incomplete, or when an earlier fb_join has
/// decided the resident rows; if the device refused its gather, call fb_join_more. In a cache with `share`
/// (fb_cache_config) the call first takes slots, also from other sequences. It is FB_BUSY, and nothing has changed,
/// while the slots that it needs belong to sequences in open steps, or to some whose last resize has not run.
///
/// # Safety
/// `warm_up` states its real size. The device may read its selections until the stream has passed this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_join(
    cache: *mut FbCache,
    sequence: u64,
    warm_up: *const FbWarmUp,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let wanted = ticket::wanted(ticket)?;
            let warm_up = match warm_up.is_null() {
                true => WarmUp::default(),
                false => {
                    let groups = cache.cache.geometries().groups().len();
                    FbWarmUp::declare(&cast::versioned(warm_up)?, cache, groups)?
                }
            };
            let sequence = cache.sequence(sequence)?;
            let ended = cache.cache.join(sequence, cast::stream(stream), warm_up)?;
            wanted.give(ended, &cache.tenant);
            Ok(())
        })
    }
}

/// Gathers the next portion of a bounded warm-up. After the last portion the sequence is running (fb_length).
/// FB_INVALID_STATE for a sequence that is not joining.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_join_more(
    cache: *mut FbCache,
    sequence: u64,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = cache.sequence(sequence)?;
        let ended = cache.cache.join_more(sequence, cast::stream(stream))?;
        wanted.give(ended, &cache.tenant);
        Ok(())
    })
}

/// Opens a sequence that begins as a copy of `parent`. The parent's committed tokens are its prompt, and the call
/// ignores the config's `prompt`. The two share full pages; the call copies the partial page on the stream. The child
/// is running. FB_BUSY while work of the parent is in flight, and as in fb_join. FB_INVALID_STATE while the parent is
/// not running yet, when its step failed, or while it has rows that were neither accepted nor rejected: truncate it to
/// the intended length first. Other errors are those of fb_open.
///
/// # Safety
/// `config` states its real size, and its `slots_by_layer` is NULL or has an entry for each layer. `child` has room for
/// the result. `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_fork(
    cache: *mut FbCache,
    parent: u64,
    config: *const FbOpenConfig,
    stream: *mut c_void,
    child: *mut u64,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        change(cache, |cache| {
            let (child, wanted) = (cast::out(child, "child")?, ticket::wanted(ticket)?);
            let open = FbOpenConfig::declare(&cast::versioned(config)?, cache)?;
            let parent = cache.sequence(parent)?;
            let (forked, ended) = cache.cache.fork(parent, &open, cast::stream(stream))?;
            child.set(cache.number_of(forked));
            wanted.give(ended, &cache.tenant);
            Ok(())
        })
    }
}

/// Truncates a sequence to `length` tokens. Landed rows below the length are accepted, landed rows from it on are
/// rejected. Landed rows of a failed step cannot be accepted: a length beyond the committed one is then
/// FB_OUT_OF_RANGE. The call removes rejected rows, and committed tokens beyond the length, from every layer's
/// residency. A page that other sequences share is replaced before it can be written again. After the call a sequence
/// whose step failed may take part in steps again. A sequence that has not joined, or is parked, drops the prompt rows
/// beyond the length, and FB_INVALID_STATE means that other sequences share their pages. FB_BUSY while work of the
/// sequence is in flight. FB_OUT_OF_RANGE for a length beyond the committed and landed rows. FB_INVALID_STATE while the
/// sequence is joining. FB_EXHAUSTED when shared pages cannot be replaced. After any of these nothing has changed.
///
/// # Safety
/// `ticket` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_truncate(
    cache: *mut FbCache,
    sequence: u64,
    length: u32,
    stream: *mut c_void,
    ticket: *mut *mut FbTicket,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let wanted = unsafe { ticket::wanted(ticket) }?;
        let sequence = cache.sequence(sequence)?;
        let ended = cache.cache.truncate(sequence, length, cast::stream(stream))?;
        wanted.give(ended, &cache.tenant);
        Ok(())
    })
}

/// Reads the lengths of a sequence, as far as the host has them.
///
/// # Safety
/// `length` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_length(
    cache: *const FbCache,
    sequence: u64,
    length: *mut FbSequenceLength,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(cache, |cache| {
            let length = cast::versioned_out(length)?;
            let sequence = cache.sequence(sequence)?;
            let now = cache.cache.length(sequence)?;
            length.set(&FbSequenceLength {
                size: size_of::<FbSequenceLength>(),
                committed: now.committed,
                landed: now.landed,
                published: now.published,
                running: u32::from(cache.cache.is_running(sequence)?),
                parked: u32::from(cache.cache.is_parked(sequence)?),
                filled: now.filled,
                arriving: u32::from(cache.cache.is_arriving(sequence)?),
                reserved: 0,
            });
            Ok(())
        })
    }
}

/// Copies the pages of a sequence, in token order, as many as `room` allows. `*count` receives how many there are.
///
/// # Safety
/// `pages` has `room` places; `count` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_pages(
    cache: *const FbCache,
    sequence: u64,
    pages: *mut FbPage,
    room: u32,
    count: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        read(cache, |cache| {
            let all = cache.cache.pages(cache.sequence(sequence)?)?;
            let all = all.map(|(host, keys)| FbPage { host: host.0, index_keys: keys.0 });
            cast::write_list(all, pages, room, "pages", count, "count")
        })
    }
}

/// Copies one row of the total pool, packed, with its present content. `bytes` must be row_bytes[0] + row_bytes[1]. It
/// is for checks, and for engines that move rows themselves. FB_OUT_OF_RANGE for an unknown layer, a position beyond
/// the sequence's pages, or another size.
///
/// # Safety
/// `row` has `bytes` bytes. No step or append is writing the row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_read_row(
    cache: *const FbCache,
    sequence: u64,
    layer: u32,
    position: u32,
    row: *mut c_void,
    bytes: u64,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(cache, |cache| {
            let wanted = cache.cache.geometry().row_bytes();
            if bytes != u64::from(wanted) {
                let error = Error::new(Kind::OutOfRange, "read row").at("bytes");
                return Err(error.with("bytes", bytes).with("wanted", wanted));
            }
            let room = cast::room(row.cast::<u8>(), wanted as usize, "row")?;
            let mut read = vec![0; wanted as usize];
            cache.cache.read_row(cache.sequence(sequence)?, Layer(layer), position, &mut read)?;
            for (place, byte) in room.iter_mut().zip(read) {
                place.write(byte);
            }
            Ok(())
        })
    }
}

/// Returns the residency digest of a sequence over all layers. Ranks that made the same calls for the sequence (slots,
/// bring-up, warm-up, accepted counts, truncations) and got the same selections in every step have equal digests. On a
/// GPU the call waits for the device, so call it between steps. docs/integration.md (Ranks) says what to do when ranks
/// differ.
///
/// # Safety
/// `digest` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_digest(cache: *const FbCache, sequence: u64, digest: *mut u64) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(cache, |cache| {
            let digest = cast::out(digest, "digest")?;
            digest.set(cache.cache.digest(cache.sequence(sequence)?)?);
            Ok(())
        })
    }
}

/// Returns the landing slot of query row number `query_row`, from 0: the engine writes there the row of that query
/// row's own token, at position L + `query_row`, where L is the committed length after this step's commit
/// (fb_retired_lengths returns it). The slot is the same in every layer's slab and in every step of the sequence, so
/// ask once after the opening. Inside a callback this call is FB_BUSY.
///
/// # Safety
/// `slot` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_landing_slot(
    cache: *const FbCache,
    sequence: u64,
    query_row: u32,
    slot: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        read(cache, |cache| {
            let slot = cast::out(slot, "slot")?;
            slot.set(cache.cache.landing_slot(cache.sequence(sequence)?, query_row)?);
            Ok(())
        })
    }
}

/// Ends a sequence, also to abort a request. Its number is closed at once. Its pages, slots and lane become free when
/// the last step that uses them has been retired and every ticket of the sequence has ended: in this call, in that
/// fb_retire, or in fb_cache_reap. The call that frees them enqueues the operation that empties the lane, on its own
/// stream.
///
/// # Safety
/// `stream` is ordered after the work that the engine has enqueued for the sequence outside of steps: a prefill may
/// still be writing index keys to the sequence's pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_close(cache: *mut FbCache, sequence: u64, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| cache.cache.close(cache.sequence(sequence)?, cast::stream(stream)))
}
