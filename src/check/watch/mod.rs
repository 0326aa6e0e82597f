//! A device that wraps another device and checks the order of everything that is enqueued.
//!
//! It passes each call on unchanged, and reports to an [`Order`] what the call touches. A call that can run at the
//! same time as one that it conflicts with is rejected with the order's error, even if the wrapped device would have
//! run the two in the right order. The same is done to a call that reads bytes which hold something else than it
//! expects. So an inline host device is enough for the check.
//!
//! **What it distinguishes.** For each lane and layer: resident rows, slots being fetched, landing slots (for each
//! query row), rows of the total pool, and those that the step adds to it. For each lane: the tables, the page table,
//! and for each place in an index group the scratch slots, which the layers at that place share. For each
//! micro-batch: the step descriptor, its counts, and each batch row's list of fetches, for each place in a group.
//! Everything else is bytes by address: selections, slots, index lists, accepted counts, pinned descriptors and
//! reports. Bytes of a mapped range count by their place in its backing, which other ranges may share; in addition each
//! access to them reads the mapping, which a remap writes. It reads a step's lanes from its pinned descriptor when
//! the step begins.
//!
//! **Reuse.** A lane holds pages and slot blocks from its join until its leave, the truncation that removes a page or
//! the resize that gives up a block has ended. So a copy into a freed page, or a join or resize with freed slot
//! blocks, must come after that. Likewise the next join, truncation or resize of a lane, whose lists the host stages,
//! must come after the last one that was staged for it: the host must have seen that one end.
//!
//! | operation | reads | writes |
//! |---|---|---|
//! | begin | pinned descriptor, accepted counts | step descriptor, counts, all of its lanes |
//! | resolve | step descriptor, selection, head | answer, lists of fetches, tables, resident and fetched slots |
//! | gather | step descriptor, list, rows of the total pool | fetched and scratch slots |
//! | scatter | step descriptor, head, landing slots | the step's rows of the total pool |
//! | report | step descriptor, lists | counts, report |
//! | join | staged arguments, pages | all of the lane, its slot blocks |
//! | truncate | staged arguments, its old and new pages | all of the lane |
//! | resize | staged arguments, head, slot blocks that go | tables, resident and fetched slots, slot blocks that come |
//! | leave | pages, slot blocks | all of the lane |
//! | warm | selections | all of the lane except its page table |
//! | warm gather | rows of the total pool | resident rows |
//! | copy | source | target; in pages of the total pool, the rows of the lane that owns the page alone |
//! | prefetch | the bytes, whatever they hold | |
//! | begin pages | pinned words that it names, accepted counts, its rows of tables | its lanes, tensors, report |
//! | copy pages | each piece of a page | each target of one |
//!
//! | [`Watch::holds`] | | the bytes, by the host; they hold the stated content |
//! | [`Watch::uses`] | the bytes, and expects the stated content in all of them | |
//!
//! A device does not see the engine's own launches. The engine declares what they touch: [`Watch::index`],
//! [`Watch::land`], [`Watch::attend`], and [`Watch::engine`] for anything else.
//!
//! **Contents.** Nor does a device know what bytes mean, and reading the wrong layer's weights is no race. So a test
//! says what bytes hold where they are filled ([`Watch::holds`]), and what the engine expects where it reads them
//! ([`Watch::uses`]). Between the two the watch follows the copies: the target of a copy holds afterwards what its
//! source held, part by part, known or not. A content belongs to memory, not to addresses: all ranges that map a part
//! of a backing see the same, and after a remap a range shows what the other backing holds. Any other write leaves
//! bytes that hold nothing that is known, and a backing that is given back holds nothing either.
//!
//! **What it proves.** For the calls that were made: any two that touch the same memory of the above, at least one of
//! them writing, run in one fixed order, at any speeds of the streams. So one run of a schedule covers all its
//! timings. It says nothing of other batches and lengths, but schedules do not depend on them. And each use that was
//! declared reads what it expects, at any speeds too.
//!
//! It also checks that each landing slot is written ([`Watch::land`]) between its step's begin and the scatter that
//! stores it, because no device can see that a scatter came too early.
//!
//! **What it does not see.** It sees nothing inside an operation, and no engine work that is not declared. It assumes
//! that the host has seen what [`Device::query`] and [`Device::synchronize`] reported, but not what a ticket
//! reported: a caller that polls tickets calls [`Watch::ended`]. A lane stands for its pages: two lanes that share
//! pages share nothing here, since shared pages are never written; the cache's tests check that. It does not see the
//! host's own writes to the total pool, nor that two backings are the same memory, once exported and once imported.

mod paged;
mod touched;

use std::os::fd::OwnedFd;

use crate::check::order::{Access, Content, Order};
use crate::device::descriptor::step;
use crate::device::{
    Backing, Completer, Device, DeviceId, Event, Mapped, PageOp, PoolLayout, PoolOp, Pools, ResolveOutput,
    Slice, StepRange, Stream,
};
use crate::error::{Error, Kind, Result};
use crate::ids::Lane;
use crate::os::{Map, Protection};
use crate::sync::{Arc, Mutex};

pub use touched::bytes;
use touched::{FETCHED, Mappings, RESIDENT, SCRATCH, STAGED, Watched};

/// The part of a layer's selected rows that attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// All of them, through the answer's slots.
    All,
    /// The rows that were resident or are new in this step, through list 0.
    Resident,
    /// The rows that wave `wave` fetched, through list `1 + wave`.
    Fetched {
        /// The wave.
        wave: u32,
    },
    /// No rows: only the counts that the merge reads.
    Merged,
}

/// A wait that was left out: see [`Watch::without_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The stream that would have waited.
    pub stream: Stream,
    /// The event that it would have waited for.
    pub event: Event,
    /// Whether the wait would have ordered anything new.
    pub ordering: bool,
}

/// The watching device. See the [module](self) page.
#[derive(Debug)]
pub struct Watch {
    device: Arc<dyn Device>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    device: DeviceId,
    order: Order,
    maps: Vec<(Slice, Arc<Map>)>,
    mappings: Mappings,
    pools: Vec<Watched>,
    confined: Option<Stream>,
    strayed: Option<Error>,
    conflict: Option<Error>,
    waits: u64,
    /// The numbers of the waits that ordered anything new.
    ordering: Vec<u64>,
    without: Option<u64>,
    left_out: Option<LeftOut>,
}

fn unknown(place: &'static str, value: u64) -> Error {
    Error::new(Kind::OutOfRange, "watch").at(place).with("value", value)
}

impl State {
    fn pools(&self, pools: Pools) -> Result<&Watched> {
        let index = pools.of(self.device)?;
        self.pools.get(index).ok_or_else(|| unknown("pools", index as u64))
    }

    fn pools_mut(&mut self, pools: Pools) -> Result<&mut Watched> {
        let index = pools.of(self.device)?;
        self.pools.get_mut(index).ok_or_else(|| unknown("pools", index as u64))
    }

    fn stays(&mut self, stream: Stream) -> Result<()> {
        match self.confined {
            Some(only) if only != stream => {
                let error = Error::new(Kind::InvalidConfig, "enqueue")
                    .at("not the stream that was given to this callback");
                let error = error.with("stream", stream.0).with("given", only.0);
                self.strayed.get_or_insert_with(|| error.clone());
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Keeps the first conflict.
    fn judged(&mut self, verdict: Result<()>) -> Result<()> {
        verdict.inspect_err(|error| {
            self.conflict.get_or_insert_with(|| error.clone());
        })
    }

    /// Notes that the host stages the lists of an operation on a lane; returns the operation's read of them.
    fn stage(&mut self, pools: Pools, lane: Lane) -> Result<Access> {
        let space = self.pools(pools)?.space(STAGED, lane.0);
        let verdict = self.order.host("staging", &[Access::write(space, 0, 1)]);
        self.judged(verdict)?;
        Ok(Access::read(space, 0, 1))
    }

    /// The accesses of a copy to bytes. The target holds afterwards what the source held, part by part.
    fn moved(&self, from: &Slice, to: &Slice) -> Vec<Access> {
        let (read, mut write) = (bytes(from, false), bytes(to, true));
        let (mut list, end) = (vec![read], write.range.to);
        for (place, _) in self.mappings.places(read.range) {
            let mut start = place.from;
            for (stop, content) in self.order.contents(place) {
                write.range.to = write.range.from.saturating_add(stop - start).min(end);
                match list.last_mut() {
                    Some(last) if last.write && last.content == content => last.range.to = write.range.to,
                    _ => list.push(Access { content, ..write }),
                }
                (start, write.range.from) = (stop, write.range.to);
            }
        }
        // The device refuses slices of different lengths, after this check. None of the target is left out of it.
        write.range.to = end;
        list.push(write);
        list
    }

    /// The words of a pinned step descriptor.
    fn words_of(&self, descriptor: &Slice, count: usize) -> Result<Vec<u32>> {
        let place = self.maps.iter().find_map(|(slice, map)| {
            let offset = descriptor.address().checked_sub(slice.address())?;
            (offset + descriptor.bytes() <= slice.bytes()).then_some((offset, map))
        });
        let (offset, map) = place.ok_or_else(|| {
            unknown("the step descriptor is not in registered memory", descriptor.address())
        })?;
        let mut words = vec![0; count];
        map.copy_out_words(offset, &mut words)?;
        Ok(words)
    }

    /// The lanes in a pinned step descriptor.
    fn lanes_of(&self, descriptor: &Slice, batch: u32) -> Result<Vec<u32>> {
        let words = self.words_of(descriptor, step::words(batch))?;
        let (_, rows) = step::header(&words);
        Ok((0..rows.min(batch as usize)).map(|row| step::entry(&words, row).lane).collect())
    }
}

impl Watch {
    /// Watches `device`, which has no work enqueued yet.
    pub fn new(device: Arc<dyn Device>) -> Arc<Watch> {
        Watch::with(device, None)
    }

    /// As [`Watch::new`], but hides the wait of this number, counted from 0 over all streams, from the order. The
    /// device still waits. Tests use it to show that a missing wait is found.
    pub fn without_wait(device: Arc<dyn Device>, number: u64) -> Arc<Watch> {
        Watch::with(device, Some(number))
    }

    fn with(device: Arc<dyn Device>, without: Option<u64>) -> Arc<Watch> {
        let state = State {
            device: device.id(),
            order: Order::new(),
            maps: Vec::new(),
            mappings: Mappings::default(),
            pools: Vec::new(),
            confined: None,
            strayed: None,
            conflict: None,
            waits: 0,
            ordering: Vec::new(),
            without,
            left_out: None,
        };
        Arc::new(Watch { device, state: Mutex::new(state) })
    }

    /// The first conflict, if there was one.
    pub fn conflict(&self) -> Option<Error> {
        self.state.lock().conflict.clone()
    }

    /// Waits enqueued so far.
    pub fn waits(&self) -> u64 {
        self.state.lock().waits
    }

    /// The numbers of the waits so far that ordered anything new, in order. Only these can be missed. The watch keeps
    /// them for as long as it lives.
    pub fn ordering(&self) -> Vec<u64> {
        self.state.lock().ordering.clone()
    }

    /// The hidden wait, once the schedule has reached it.
    pub fn left_out(&self) -> Option<LeftOut> {
        self.state.lock().left_out
    }

    /// The number of stretches that the order remembers: bounded, however many steps there were.
    pub fn remembered(&self) -> usize {
        self.state.lock().order.remembered()
    }

    /// Notes that the host has learned, by a ticket, that everything enqueued on `stream` so far has ended.
    pub fn ended(&self, stream: Stream) {
        self.state.lock().order.ended(stream);
    }

    /// Declares engine work that is enqueued now: the memory that it shares with other operations.
    ///
    /// # Errors
    /// As [`Order::access`]; [`Kind::InvalidConfig`] on another stream than the one that the work was
    /// confined to.
    pub fn engine(&self, stream: Stream, what: &'static str, accesses: &[Access]) -> Result<()> {
        let mut state = self.state.lock();
        state.stays(stream)?;
        let accesses = state.mappings.behind(accesses.to_vec());
        let verdict = state.order.access(stream, what, &accesses);
        state.judged(verdict)
    }

    /// Declares what `slice` holds now that others have filled it: another process the parts that this one imports, or
    /// the host its memory. It counts as a write by the host, which must therefore have seen the end of all that used
    /// the bytes. For bytes that work on a stream fills, [`Watch::engine`] takes a write of a content.
    ///
    /// # Errors
    /// As [`Order::host`].
    pub fn holds(&self, slice: &Slice, content: Content) -> Result<()> {
        let mut state = self.state.lock();
        let accesses = state.mappings.behind(vec![bytes(slice, true).of(content)]);
        let verdict = state.order.host("filling by others", &accesses);
        state.judged(verdict)
    }

    /// Declares engine work that is enqueued now, reads `slice` and expects `content` in all of it.
    ///
    /// # Errors
    /// As [`Watch::engine`], and so a stale read where a part of the slice holds something else.
    pub fn uses(&self, stream: Stream, what: &'static str, slice: &Slice, content: Content) -> Result<()> {
        self.engine(stream, what, &[bytes(slice, false).of(content)])
    }

    /// Declares I, the indexer: it writes a selection.
    ///
    /// # Errors
    /// As [`Watch::engine`].
    pub fn index(&self, stream: Stream, selection: &Slice) -> Result<()> {
        self.engine(stream, "indexer", &[bytes(selection, true)])
    }

    /// Declares P, the preparation of attention: it writes the landing slots of the query rows of `range`. An engine
    /// that declares this once must always declare it: a scatter before it stores an earlier step's data, and is an
    /// error.
    ///
    /// # Errors
    /// As [`Watch::engine`]; [`Kind::InvalidState`] after the scatter that stores them; [`Kind::OutOfRange`] for
    /// unknown pools.
    pub fn land(&self, pools: Pools, stream: Stream, range: &StepRange) -> Result<()> {
        let mut list = Vec::new();
        {
            let mut state = self.state.lock();
            let watched = state.pools_mut(pools)?;
            watched.landing(range, true, true, &mut list);
            let verdict = watched.lands(range);
            state.judged(verdict)?;
        }
        self.engine(stream, "preparation", &list)
    }

    /// Declares A, attention: it reads the answer of `range` and the slots that the answer names.
    ///
    /// # Errors
    /// As [`Watch::land`].
    pub fn attend(
        &self,
        pools: Pools,
        stream: Stream,
        range: &StepRange,
        reads: Attention,
        output: &ResolveOutput,
    ) -> Result<()> {
        let mut list = Vec::new();
        let what = {
            let state = self.state.lock();
            let watched = state.pools(pools)?;
            let (what, names, lists): (_, &[(&str, bool)], _) = match reads {
                Attention::All => {
                    ("attention", &[(RESIDENT, false), (FETCHED, false), (SCRATCH, false)], (0, 0))
                }
                Attention::Resident => ("attention over what was resident", &[(RESIDENT, false)], (0, 1)),
                Attention::Fetched { wave } => {
                    let index = 1 + u64::from(wave);
                    let names: &[_] = match wave {
                        0 => &[(FETCHED, false), (SCRATCH, false)],
                        _ => &[(SCRATCH, false)],
                    };
                    ("attention over what was fetched", names, (index, index + 1))
                }
                Attention::Merged => ("merge", &[], (0, 0)),
            };
            list.extend(watched.range(range, names));
            if matches!(reads, Attention::All | Attention::Resident) {
                watched.landing(range, false, false, &mut list);
            }
            match reads {
                Attention::All => list.push(bytes(&output.slots, false)),
                Attention::Merged => list.extend(
                    output.split_indices.iter().map(|split_indices| bytes(&split_indices.counts, false)),
                ),
                _ => watched.split_indices(range, output, lists, false, &mut list),
            }
            what
        };
        self.engine(stream, what, &list)
    }

    /// Checks an operation, passes it on, and counts it as enqueued if the device accepted it.
    fn pass(
        &self,
        stream: Stream,
        what: &'static str,
        accesses: impl FnOnce(&mut State) -> Result<Vec<Access>>,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let accesses = {
            let mut state = self.state.lock();
            state.stays(stream)?;
            let accesses = accesses(&mut state)?;
            let accesses = state.mappings.behind(accesses);
            let verdict = state.order.check(stream, what, &accesses);
            state.judged(verdict)?;
            accesses
        };
        enqueue()?;
        let mut state = self.state.lock();
        let verdict = state.order.access(stream, what, &accesses);
        state.judged(verdict)
    }
}

/// Methods that enqueue nothing, passed on unchanged.
macro_rules! hand_on {
    ($($name:ident($($argument:ident: $of:ty),*) -> $answer:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $answer { self.device.$name($($argument),*) })*
    };
}

impl Device for Watch {
    hand_on! {
        allocate(bytes: u64) -> Result<Slice>;
        host_memory(bytes: u64, node: Option<u32>) -> Result<Option<Arc<Map>>>;
        id() -> DeviceId;
        granularity() -> u64;
        takes_host_memory() -> bool;
        pins_host_memory() -> bool;
        backing(bytes: u64) -> Result<Backing>;
        maps_offsets() -> Result<bool>;
        export(backing: Backing, protection: Protection) -> Result<OwnedFd>;
        import_backing(descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing>;
        stream() -> Result<Stream>;
        event() -> Result<Event>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
    }

    fn give_back(&self, backing: Backing) -> Result<()> {
        self.device.give_back(backing)?;
        let mut state = self.state.lock();
        if let Some(space) = touched::backed(state.device, backing) {
            state.order.gone(space);
        }
        Ok(())
    }

    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        let slice = self.device.register(map)?;
        self.state.lock().maps.push((slice, Arc::clone(map)));
        Ok(slice)
    }

    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        let slice = self.device.range(pieces, protection)?;
        self.state.lock().mappings.add(&slice, pieces);
        Ok(slice)
    }

    fn remap(&self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        let mut state = self.state.lock();
        let verdict = state.order.host("remap", &[touched::mapping(&part)]);
        state.judged(verdict)?;
        self.device.remap(part, pieces)?;
        state.mappings.replace(&part, pieces);
        Ok(())
    }

    // SAFETY: the caller vouches for the bytes, as the trait demands; they are only passed on.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: as above.
        unsafe { self.device.import(address, bytes) }
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        self.state.lock().stays(stream)?;
        self.device.record(event, stream)?;
        self.state.lock().order.record(event, stream);
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.state.lock().stays(stream)?;
        self.device.wait(stream, event)?;
        let mut state = self.state.lock();
        let number = state.waits;
        state.waits += 1;
        if state.without == Some(number) {
            let ordering = state.order.would_order(stream, event);
            state.left_out = Some(LeftOut { stream, event, ordering });
        } else if state.order.wait(stream, event) {
            state.ordering.push(number);
        }
        Ok(())
    }

    fn query(&self, event: Event) -> Result<bool> {
        let reached = self.device.query(event);
        if !matches!(reached, Ok(false)) {
            self.state.lock().order.observed(event);
        }
        reached
    }

    fn synchronize(&self, event: Event) -> Result<()> {
        let reached = self.device.synchronize(event);
        self.state.lock().order.observed(event);
        reached
    }

    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()> {
        let accesses = |state: &mut State| {
            let mut list = state.moved(&from, &to);
            for watched in &state.pools {
                watched.copied(&from, false, &mut list);
                watched.copied(&to, true, &mut list);
            }
            Ok(list)
        };
        self.pass(stream, "copy", accesses, || self.device.copy(stream, from, to))
    }

    fn prefetch(&self, stream: Stream, slice: Slice, rate: u64) -> Result<()> {
        let accesses = |_: &mut State| Ok(vec![bytes(&slice, false)]);
        self.pass(stream, "prefetch", accesses, || self.device.prefetch(stream, slice, rate))
    }

    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()> {
        self.state.lock().stays(stream)?;
        self.device.call(stream, work)
    }

    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        self.state.lock().stays(stream)?;
        self.device.complete(stream, completer)
    }

    fn attach(&self, layout: PoolLayout) -> Result<Pools> {
        let mut watched = Watched::new(&layout);
        let pools = self.device.attach(layout)?;
        let mut state = self.state.lock();
        // A device numbers its pools from 0, and this wrapper has seen all of them.
        watched.id = pools.of(state.device)? as u32;
        state.pools.push(watched);
        Ok(pools)
    }

    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        let mut lanes = Vec::new();
        let accesses = |state: &mut State| {
            if let PoolOp::Begin(begin) = &op {
                // The host wrote the descriptor before the call.
                let descriptor = state.mappings.behind(vec![bytes(&begin.descriptor, true)]);
                let verdict = state.order.host("prepare", &descriptor);
                state.judged(verdict)?;
                lanes = state.lanes_of(&begin.descriptor, state.pools(pools)?.batch)?;
            }
            let mut list = state.pools(pools)?.touched(&op, &lanes);
            if let Some(lane) = op.staged_lane() {
                list.push(state.stage(pools, lane)?);
            }
            if let PoolOp::Scatter(range) = &op {
                let verdict = state.pools_mut(pools)?.stores(range);
                state.judged(verdict)?;
            }
            Ok(list)
        };
        self.pass(stream, op.name(), accesses, || self.device.enqueue(pools, stream, op))?;
        self.state.lock().pools_mut(pools)?.enqueued(&op, lanes);
        Ok(())
    }

    fn enqueue_pages(&self, stream: Stream, op: PageOp<'_>) -> Result<()> {
        let accesses = |state: &mut State| match &op {
            PageOp::Begin(begin) => state.begun(begin),
            PageOp::Copy(copy) => state.paged(copy),
        };
        self.pass(stream, op.name(), accesses, || self.device.enqueue_pages(stream, op))
    }

    fn confine(&self, stream: Option<Stream>) -> Result<()> {
        let strayed = {
            let mut state = self.state.lock();
            state.confined = stream;
            state.strayed.take()
        };
        self.device.confine(stream)?;
        strayed.map_or(Ok(()), Err)
    }
}
