//! A device around a device that checks the order of everything that is enqueued.
//!
//! Each call is passed on as it is, and an [`Order`] is told what it touches. A call that may run beside
//! one that it conflicts with is refused with the order's error, whichever way the device underneath would have
//! run the two: an inline host device, which never runs anything in the wrong order, does for the check.
//!
//! **What is told apart.** By lane and layer, what a step reads, what it brings up and what it writes: rows
//! that are resident, slots that are being fetched, landing slots (each query row's), rows of the total pool
//! and those that the step adds to it. By lane the tables, the page table, and the scratch slots, which all
//! layers share. By micro-batch the step's block, its counts, and each batch row's list of fetches. Beyond
//! that, bytes: selections, answers, index lists, accepted counts, pinned blocks and reports, each by its
//! address; those of a range by their place in its backing, which other ranges may have too. Which lanes a step
//! has is read from its pinned block, when it begins.
//!
//! What is given out again: pages and slot blocks are what a lane holds from its join until its leave, or the
//! roll-back that cuts a page off, has ended. So a copy into a page that was given back, and a join with blocks
//! that were, has to be behind that; likewise the next join or roll-back of a lane, which the host stages,
//! behind the last one that was staged for it: the host must have seen that end.
//!
//! | operation | reads | writes |
//! |---|---|---|
//! | begin | pinned block, accepted counts | block, counts, all of its lanes |
//! | resolve | block, selection, head | answer, lists of fetches, tables, which slots are resident or fetched |
//! | gather | block, list, rows of the total pool | fetched and scratch slots |
//! | scatter | block, head, landing slots | the step's rows of the total pool |
//! | report | block, lists | counts, report |
//! | join | staged arguments, pages | all of the lane, its slot blocks |
//! | truncate | staged arguments, pages that it had and has | all of the lane |
//! | leave | pages, slot blocks | all of the lane |
//! | warm | selections | all of the lane, but for its page table |
//! | raise | rows of the total pool | resident rows |
//! | copy | from | to; where they are pages of the total pool, the rows of the lane that has them alone |
//!
//! The engine's own launches are invisible to a device. What they touch is declared beside them:
//! [`Watch::index`], [`Watch::land`], [`Watch::attend`], and [`Watch::engine`] for anything else.
//!
//! **What it proves.** Of the calls that were made: that each two that touch the same of the above, one of
//! them writing, run in one order, however fast each stream is. So one run of a schedule stands for all its
//! timings; of other batches and lengths it says nothing, but schedules do not depend on them.
//!
//! Beside the order, that each landing slot is written ([`Watch::land`]) between its step's begin and the scatter that
//! stores it: no device can see that a scatter came too early.
//!
//! **What it does not.** Inside of one operation, and of what the engine does not declare, it knows
//! nothing. The host is taken to have seen what [`Device::query`] and [`Device::synchronize`] told it, not
//! what a ticket did: who polls tickets calls [`Watch::ended`]. Lanes stand for their pages: two lanes that
//! share pages share nothing here, since nobody writes a shared page; that is for the tests of the cache to
//! check. Nor does it see what the host writes by itself to the total pool.

mod touched;

use crate::check::order::{Access, Order};
use crate::device::descriptor::step;
use crate::device::{
    Answer, Backing, Completer, Device, DeviceId, Event, Join, Mapped, PoolLayout, PoolOp, Pools, Slice,
    StepRange, Stream, Truncate,
};
use crate::error::{Error, Kind, Result};
use crate::ids::Lane;
use crate::os::Map;
use crate::sync::{Arc, Mutex};

pub use touched::bytes;
use touched::{FETCHED, Mappings, RESIDENT, SCRATCH, STAGED, Watched};

/// What attention reads of a layer's selected rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// All of them, by the answer's slots.
    All,
    /// What was resident or is born in this step, by list 0.
    Resident,
    /// What wave `wave` fetched, by list `1 + wave`.
    Fetched {
        /// The wave.
        wave: u32,
    },
    /// Nothing: the counts that a merge takes validity from.
    Merged,
}

/// A wait that was left out: see [`Watch::without_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The stream that was to wait.
    pub stream: Stream,
    /// For what.
    pub event: Event,
    /// Whether it would have ordered anything that nothing else did.
    pub ordering: bool,
}

/// See the module's head.
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
                let error = Error::new(Kind::InvalidConfig, "enqueue").at("not the stream that was given");
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

    /// The host stages what an operation on a lane takes over when it runs; answers that it reads it.
    fn stage(&mut self, pools: Pools, lane: Lane) -> Result<Access> {
        let space = self.pools(pools)?.space(STAGED, lane.0);
        let verdict = self.order.host("staging", &[Access::write(space, 0, 1)]);
        self.judged(verdict)?;
        Ok(Access::read(space, 0, 1))
    }

    /// The lanes of a pinned block's rows.
    fn lanes_of(&self, block: &Slice, batch: u32) -> Result<Vec<u32>> {
        let place = self.maps.iter().find_map(|(slice, map)| {
            let offset = block.address().checked_sub(slice.address())?;
            (offset + block.bytes() <= slice.bytes()).then_some((offset, map))
        });
        let (offset, map) = place
            .ok_or_else(|| unknown("the step descriptor is not in registered memory", block.address()))?;
        let mut words = vec![0; step::words(batch)];
        map.copy_out_words(offset, &mut words)?;
        let (_, rows) = step::header(&words);
        Ok((0..rows.min(batch as usize)).map(|row| step::entry(&words, row).lane).collect())
    }
}

impl Watch {
    /// Watches `device`, from its beginning on.
    pub fn new(device: Arc<dyn Device>) -> Arc<Watch> {
        Watch::with(device, None)
    }

    /// For controls: as if the caller had left out its wait of this number, counted from 0 over all streams.
    /// The device still waits; the order is not told.
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

    /// The wait that was left out, once the schedule has come to it.
    pub fn left_out(&self) -> Option<LeftOut> {
        self.state.lock().left_out
    }

    /// Stretches that the order remembers: bounded, however many steps there were.
    pub fn remembered(&self) -> usize {
        self.state.lock().order.remembered()
    }

    /// The host has learned, by a ticket, that what was enqueued on `stream` by now has ended.
    pub fn ended(&self, stream: Stream) {
        self.state.lock().order.ended(stream);
    }

    /// The engine's own work, enqueued now: what it touches that other operations touch too.
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

    /// I: writes a selection.
    ///
    /// # Errors
    /// As [`Watch::engine`].
    pub fn index(&self, stream: Stream, selection: &Slice) -> Result<()> {
        self.engine(stream, "indexer", &[bytes(selection, true)])
    }

    /// P: writes the landing slots of a part's query rows. Whoever declares this once is taken to declare it always: a
    /// scatter in front of it stores what an earlier step has left there, and is an error.
    ///
    /// # Errors
    /// As [`Watch::engine`]; [`Kind::InvalidConfig`] behind the scatter that stores them; [`Kind::OutOfRange`] for
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

    /// A: reads a part's answer and the slots that it names.
    ///
    /// # Errors
    /// As [`Watch::land`].
    pub fn attend(
        &self,
        pools: Pools,
        stream: Stream,
        range: &StepRange,
        reads: Attention,
        answer: &Answer,
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
                Attention::All => list.push(bytes(&answer.slots, false)),
                Attention::Merged => list.extend(
                    answer.split_indices.iter().map(|split_indices| bytes(&split_indices.counts, false)),
                ),
                _ => watched.split_indices(range, answer, lists, false, &mut list),
            }
            what
        };
        self.engine(stream, what, &list)
    }

    /// Checks an operation, hands it on, and counts it as enqueued if the device took it.
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

/// Methods that enqueue nothing, handed on as they are.
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
        stream() -> Result<Stream>;
        event() -> Result<Event>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
    }

    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        let slice = self.device.register(map)?;
        self.state.lock().maps.push((slice, Arc::clone(map)));
        Ok(slice)
    }

    fn range(&self, pieces: &[Mapped]) -> Result<Slice> {
        let slice = self.device.range(pieces)?;
        self.state.lock().mappings.add(&slice, pieces);
        Ok(slice)
    }

    // SAFETY: the caller vouches for the bytes, as the trait demands; they are only handed on.
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
        } else {
            state.order.wait(stream, event);
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
            let mut list = vec![bytes(&from, false), bytes(&to, true)];
            for watched in &state.pools {
                watched.copied(&from, false, &mut list);
                watched.copied(&to, true, &mut list);
            }
            Ok(list)
        };
        self.pass(stream, "copy", accesses, || self.device.copy(stream, from, to))
    }

    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()> {
        self.state.lock().stays(stream)?;
        self.device.call(stream, work)
    }

    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        self.state.lock().stays(stream)?;
        self.device.complete(stream, completer)
    }

    fn attach(&self, plan: PoolLayout) -> Result<Pools> {
        let mut watched = Watched::new(&plan);
        let pools = self.device.attach(plan)?;
        let mut state = self.state.lock();
        // A device numbers its pools from 0, and this one has seen them all.
        watched.id = pools.of(state.device)? as u32;
        state.pools.push(watched);
        Ok(pools)
    }

    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        let mut lanes = Vec::new();
        let accesses = |state: &mut State| {
            if let PoolOp::Begin(begin) = &op {
                // The host wrote the block before it called.
                let block = state.mappings.behind(vec![bytes(&begin.block, true)]);
                let verdict = state.order.host("prepare", &block);
                state.judged(verdict)?;
                lanes = state.lanes_of(&begin.block, state.pools(pools)?.batch)?;
            }
            let mut list = state.pools(pools)?.touched(&op, &lanes);
            if let PoolOp::Join(Join { lane, .. }) | PoolOp::Truncate(Truncate { lane, .. }) = &op {
                list.push(state.stage(pools, *lane)?);
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
