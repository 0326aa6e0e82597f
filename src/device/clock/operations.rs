//! The clock device's [`Device`] implementation: it checks each operation, prices it, and enqueues it.

use std::os::fd::OwnedFd;

use crate::device::checks::{self, Asker};
use crate::device::clock::checks::{Extents, NAME};
use crate::device::clock::costs::{Direction, Work};
use crate::device::clock::effect::Effect;
use crate::device::clock::timeline::{Label, Until};
use crate::device::clock::{ClockDevice, LINE, State, addresses, chance, unknown};
use crate::device::pages::{self, Kept};
use crate::device::{
    Backing, Completer, CopyPages, Device, DeviceId, Event, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice,
    StepRange, Stream, Warm, fixed,
};
use crate::error::{Error, Kind, Result};
use crate::ids::Lane;
use crate::os::{Map, Protection};
use crate::sync::{Arc, MutexGuard};

impl ClockDevice {
    /// Reserves a range of addresses.
    fn place(&self, bytes: u64) -> Result<Slice> {
        let mut state = self.state.lock();
        let address = state.next_address;
        let end = bytes.checked_next_multiple_of(LINE).and_then(|bytes| address.checked_add(bytes));
        state.next_address =
            end.ok_or_else(|| Error::new(Kind::OutOfMemory, "clock device").at("addresses"))?;
        Ok(self.id.slice(address, bytes))
    }

    /// The cost of a copy of `bytes` bytes between memories where these slices are.
    fn moving(&self, from: Slice, to: Slice, bytes: f64) -> Work {
        let sides: MutexGuard<'_, _> = self.state.lock();
        let (from_host, to_host) = (sides.is_host(from.address()), sides.is_host(to.address()));
        let peer = sides.peers.has(from) || sides.peers.has(to);
        drop(sides);
        match (from_host, to_host) {
            (true, false) => Work::copy(&self.costs, Direction::ToDevice, bytes),
            // A copy inside host memory goes to the device and back.
            (_, true) => Work::copy(&self.costs, Direction::ToHost, bytes),
            (false, false) if peer => Work::copy(&self.costs, Direction::Peer, bytes),
            (false, false) => Work::inside(&self.costs, bytes),
        }
    }

    /// The cost of an operation on pages. All pieces of a copy go the way of the first, and a copy engine begins once.
    fn price_pages(&self, op: &PageOp<'_>) -> Work {
        match op {
            PageOp::Begin(begin) => {
                let words = begin.descriptor.bytes() as f64 + begin.report.bytes() as f64;
                let slots = begin.groups.iter().map(|group| group.slots.bytes() as f64).sum::<f64>();
                let own = [begin.lengths, begin.starts, begin.positions].map(|slice| slice.bytes() as f64);
                Work::begin_pages(&self.costs, words, slots + own.iter().sum::<f64>())
            }
            PageOp::Copy(CopyPages { planes, pages }) => {
                let bytes =
                    planes.iter().map(|(source, _)| source.bytes as f64).sum::<f64>() * pages.len() as f64;
                let first = planes.iter().find(|(source, _)| source.bytes > 0 && !pages.is_empty());
                first.map_or(Work::default(), |(from, to)| self.moving(from.memory, to.memory, bytes))
            }
        }
    }

    /// The cost of an operation on pools, given each batch row's misses in each layer.
    fn price(&self, extents: &Extents, misses: &[f64], op: &PoolOp<'_>) -> Work {
        let costs = &self.costs;
        let batch = f64::from(extents.checks.batch);
        let (layers, groups) =
            (f64::from(extents.checks.layers), extents.checks.geometry.groups().len() as f64);
        let rows = |range: &StepRange| f64::from(range.count) * f64::from(range.rows.count);
        match op {
            PoolOp::Join(_) | PoolOp::Truncate(_) | PoolOp::Newest(_) | PoolOp::Leave(_) => {
                Work::kernel(&costs.lane, groups)
            }
            PoolOp::Resize(resize) => Work::resize(costs, groups, extents.moved_bytes(resize)),
            PoolOp::Warm(warm @ Warm { steps, whole, .. }) => {
                let groups = warm.range(extents.checks.geometry.groups().len()).1 as f64;
                Work::kernel(&costs.warm, f64::from(steps + u32::from(*whole)) * groups)
            }
            PoolOp::WarmGather(range) => {
                let bytes = range.count as f64 * extents.mean_row_bytes();
                Work::rows(&costs.gather, Direction::ToDevice, bytes)
            }
            PoolOp::Begin(_) => Work::kernel(&costs.begin, batch * groups),
            PoolOp::Resolve { range, .. } => Work::resolve(costs, range.count, range.rows.count),
            PoolOp::Gather { range, wave } => {
                let rows = misses.get(range.layer.index()).map_or(0.0, |rows| rows * f64::from(range.count));
                // The first wave moves the declared rows; later waves run, but move nothing.
                let bytes = if *wave == 0 { rows * extents.row_bytes(range.layer) } else { 0.0 };
                Work::rows(&costs.gather, Direction::ToDevice, bytes)
            }
            PoolOp::Scatter(range) => {
                Work::rows(&costs.scatter, Direction::ToHost, rows(range) * extents.row_bytes(range.layer))
            }
            PoolOp::Report { .. } => Work::kernel(&costs.report, layers),
        }
    }
}

/// The timeline's label of an operation on pools.
fn label_of(op: &PoolOp<'_>) -> Label {
    let micro_batch = match op {
        PoolOp::Begin(begin) => Some(begin.micro_batch),
        PoolOp::Report { micro_batch, .. } => Some(*micro_batch),
        _ => op.range().map(|range| range.micro_batch),
    };
    Label { name: op.name(), layer: op.range().map(|range| range.layer), micro_batch }
}

impl Device for ClockDevice {
    fn allocate(&self, bytes: u64) -> Result<Slice> {
        match &self.beneath {
            None => self.place(bytes),
            Some(beneath) => beneath.device.allocate(bytes),
        }
    }

    fn host_memory(&self, bytes: u64, node: Option<u32>) -> Result<Option<Arc<Map>>> {
        match &self.beneath {
            None => Ok(None),
            Some(beneath) => beneath.device.host_memory(bytes, node),
        }
    }

    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        let slice = match &self.beneath {
            None => self.place(map.len())?,
            Some(beneath) => beneath.device.register(map)?,
        };
        self.state.lock().host.push((slice.address(), slice.address() + slice.bytes()));
        Ok(slice)
    }

    // SAFETY: the caller vouches for the bytes, as the trait demands; nothing is read or written here.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        match &self.beneath {
            None => self.id.slice(address, bytes),
            // SAFETY: what the caller vouches for here is what the device beneath asks for.
            Some(beneath) => unsafe { beneath.device.import(address, bytes) },
        }
    }

    fn id(&self) -> DeviceId {
        self.id
    }

    fn granularity(&self) -> u64 {
        self.beneath.as_ref().map_or(LINE, |beneath| beneath.device.granularity())
    }

    fn takes_host_memory(&self) -> bool {
        self.beneath.as_ref().is_some_and(|beneath| beneath.device.takes_host_memory())
    }

    fn pins_host_memory(&self) -> bool {
        self.beneath.as_ref().is_some_and(|beneath| beneath.device.pins_host_memory())
    }

    fn backing(&self, bytes: u64) -> Result<Backing> {
        match &self.beneath {
            Some(beneath) => beneath.device.backing(bytes),
            None => Ok(self.state.lock().ranges.add_backing(bytes, Protection::ReadWrite)),
        }
    }

    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        let slice = if let Some(beneath) = &self.beneath {
            beneath.device.range(pieces, protection)?
        } else {
            let bytes = self.state.lock().ranges.check("map range", pieces, protection)?;
            let address = self.place(bytes)?.address();
            self.state.lock().ranges.add(address, pieces, protection)
        };
        self.state.lock().peers.map(slice, pieces);
        Ok(slice)
    }

    fn remap(&self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        if let Some(beneath) = &self.beneath {
            beneath.device.remap(part, pieces)?;
        } else {
            let mut state = self.state.lock();
            let place = state.ranges.replaceable("remap", part, pieces)?;
            state.ranges.replaced(&place, pieces);
        }
        let mut state = self.state.lock();
        state.peers.map(part, pieces);
        state.timeline.remapped(addresses(&part));
        Ok(())
    }

    fn maps_offsets(&self) -> Result<bool> {
        self.beneath.as_ref().map_or(Ok(true), |beneath| beneath.device.maps_offsets())
    }

    fn export(&self, backing: Backing, protection: Protection) -> Result<OwnedFd> {
        match &self.beneath {
            Some(beneath) => beneath.device.export(backing, protection),
            None => Err(fixed("export memory")),
        }
    }

    fn import_backing(&self, descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing> {
        let backing = match &self.beneath {
            Some(beneath) => beneath.device.import_backing(descriptor, bytes, protection)?,
            // Nothing is stored: only addresses count, and the descriptor is closed.
            None => {
                let mut state = self.state.lock();
                state.ranges.importable(bytes)?;
                state.ranges.add_backing(bytes, protection)
            }
        };
        self.state.lock().peers.import(backing);
        Ok(backing)
    }

    fn give_back(&self, backing: Backing) -> Result<()> {
        match &self.beneath {
            Some(beneath) => beneath.device.give_back(backing)?,
            None => drop(self.state.lock().ranges.give_back("give memory back", backing)?),
        }
        self.state.lock().peers.give_back(backing);
        Ok(())
    }

    fn stream(&self) -> Result<Stream> {
        let mut state = self.state.lock();
        state.enqueued.push(0);
        Ok(state.timeline.stream())
    }

    fn event(&self) -> Result<Event> {
        Ok(self.state.lock().timeline.event())
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let (mut state, stream) = self.room(stream)?;
        let event = state.event(event)?;
        state.timeline.record(event, stream);
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let (mut state, stream) = self.room(stream)?;
        let event = state.event(event)?;
        state.waits += 1;
        let number = state.waits - 1;
        if !state.without.contains(&number) {
            state.timeline.wait(stream, event);
        }
        Ok(())
    }

    fn query(&self, event: Event) -> Result<bool> {
        let mut state = self.state.lock();
        let place = state.event(event)?;
        state.polls += 1;
        let passes = self.seed.map_or(self.costs.poll_ns, |seed| chance::poll(seed, state.polls));
        let until = Until::Time(state.timeline.now() + passes);
        // A callback that polls sees the present state and does not advance time.
        let inside = state.driver.is_some_and(|driver| driver == crate::sync::thread::current().id());
        if !inside {
            drop(state);
            state = self.drive(until)?;
        }
        // A failed device still reaches its events. Before that, operations may still be running.
        if !state.timeline.is_complete(place) {
            return Ok(false);
        }
        state.check().map(|()| true)
    }

    fn synchronize(&self, event: Event) -> Result<()> {
        let state = self.state.lock();
        let number = state.timeline.recorded(state.event(event)?);
        drop(state);
        self.drive(Until::Reached(event, number))?.check()
    }

    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()> {
        self.id.check(&from)?;
        self.id.check_target(&to)?;
        if from.bytes() != to.bytes() {
            return Err(unknown("copy of another length", to.bytes()));
        }
        let work = self.moving(from, to, from.bytes() as f64);
        let effect = self.beneath.is_some().then_some(Effect::Copy { from, to });
        self.append(stream, Label { name: "copy", layer: None, micro_batch: None }, work, effect)
    }

    fn prefetch(&self, stream: Stream, slice: Slice, rate: u64) -> Result<()> {
        checks::prefetch(self.id, &slice, rate)?;
        let state = self.state.lock();
        let kept_here = !state.is_host(slice.address()) && !state.peers.has(slice);
        drop(state);
        match self.costs.l2.filter(|_| kept_here && slice.bytes() > 0) {
            None => self.room(stream).map(drop),
            Some(l2) => {
                let work = Work::prefetch(&l2, slice.bytes() as f64, rate as f64);
                let label = Label { name: "prefetch", layer: None, micro_batch: None };
                self.append_at(stream, label, work, vec![addresses(&slice)])
            }
        }
    }

    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()> {
        self.point(stream, Effect::Call(work))
    }

    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        self.point(stream, Effect::Complete(completer))
    }

    fn confine(&self, stream: Option<Stream>) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(stream) = stream {
            state.stream(stream)?;
        }
        state.confined = stream;
        state.refusal.take().map_or(Ok(()), Err)
    }

    fn attach(&self, layout: PoolLayout) -> Result<Pools> {
        let extents = Extents::new(&layout, self.id, self.beneath.is_some())?;
        let attached = self.beneath.as_ref().map(|beneath| beneath.device.attach(layout)).transpose()?;
        let mut state = self.state.lock();
        let pools = self.id.pools(state.pools.len());
        if attached.is_some_and(|attached| attached != pools) {
            return Err(Error::new(Kind::InvalidConfig, "attach")
                .at("the device beneath has pools that this clock device did not attach"));
        }
        state.pools.push(extents);
        Ok(pools)
    }

    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        let (mut state, place) = self.room(stream)?;
        let State { pools: all, misses, .. } = &mut *state;
        let index = pools.of(self.id())?;
        let extents = all.get_mut(index).ok_or_else(|| unknown("pools", index as u64))?;
        // Price it before staging it: an invalid cost then changes nothing.
        extents.checks.check(&op)?;
        let work = self.price(extents, misses, &op).check(&self.costs)?;
        extents.stage(&op);
        let effect = self.beneath.is_some().then_some(Effect::Pool(pools, op.detached()));
        self.push(state, place, label_of(&op), work, Vec::new(), effect);
        Ok(())
    }

    fn enqueue_pages(&self, stream: Stream, op: PageOp<'_>) -> Result<()> {
        let exact = self.beneath.is_some();
        let asker = Asker { name: NAME, device: self.id, exact, top_k_max: u32::MAX };
        pages::check(&asker, &op)?;
        let effect = if exact { Some(Effect::Pages(Kept::of(op, NAME)?)) } else { None };
        let label = Label { name: op.name(), layer: None, micro_batch: None };
        self.append(stream, label, self.price_pages(&op), effect)
    }

    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64> {
        match &self.beneath {
            // Nothing is resident on a device without memory.
            None => pools.of(self.id).map(|_| 0),
            Some(beneath) => beneath.device.digest(pools, lane),
        }
    }

    fn validate(&self, pools: Pools) -> Result<()> {
        match &self.beneath {
            None => pools.of(self.id).map(drop),
            Some(beneath) => beneath.device.validate(pools),
        }
    }
}
