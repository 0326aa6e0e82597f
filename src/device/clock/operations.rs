//! The operations of the trait: checked, priced, enqueued.

use crate::device::clock::checks::{Extents, bad};
use crate::device::clock::costs::{Direction, Work};
use crate::device::clock::effect::{Effect, PoolEffect};
use crate::device::clock::timeline::{Label, Until};
use crate::device::clock::{ClockDevice, chance, slice_of, unknown};
use crate::device::{
    Answer, Backing, Begin, Completer, Cut, Device, Event, Join, Mapped, Part, Plan, Pools, Raise, Slice,
    Stream, Warm, check_device,
};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, MicroBatch};
use crate::os::Map;
use crate::sync::{Arc, MutexGuard};

/// Where memory of a device without memory begins: no slice is empty of address.
const LINE: u64 = 4096;

fn label(name: &'static str) -> Label {
    Label { name, layer: None, micro_batch: None }
}

fn label_of(name: &'static str, part: &Part) -> Label {
    Label { name, layer: Some(part.layer), micro_batch: Some(part.micro_batch) }
}

impl ClockDevice {
    fn check_slice(&self, slice: &Slice) -> Result<()> {
        match &self.beneath {
            None => check_device(slice, self.tag),
            Some(beneath) if beneath.device.owns(slice) => Ok(()),
            Some(_) => Err(Error::new(Kind::OutOfRange, "slice").at("a slice of another device")),
        }
    }

    /// Takes addresses.
    fn place(&self, bytes: u64) -> Result<Slice> {
        let mut state = self.state.lock();
        let address = state.next_address;
        let end = bytes.checked_next_multiple_of(LINE).and_then(|bytes| address.checked_add(bytes));
        state.next_address =
            end.ok_or_else(|| Error::new(Kind::OutOfMemory, "clock device").at("addresses"))?;
        Ok(slice_of(self.tag, address, bytes))
    }

    /// Enqueues an operation on pools: `price` checks it, and says what it costs.
    fn enqueue_pool(
        &self,
        (pools, stream): (Pools, Stream),
        label: Label,
        effect: PoolEffect,
        price: impl FnOnce(&mut Extents, &[f64]) -> Result<Work>,
    ) -> Result<()> {
        let (mut state, place) = self.room(stream)?;
        let state_ref = &mut *state;
        let extents = state_ref.pools.get_mut(pools.0 as usize);
        let extents = extents.ok_or_else(|| unknown("pools", u64::from(pools.0)))?;
        let work = price(extents, &state_ref.misses)?.check(&self.costs)?;
        let effect = self.beneath.is_some().then_some(Effect::Pool(pools, effect));
        self.push(state, place, (label, work, effect));
        Ok(())
    }

    fn lane_work(&self, extents: &Extents) -> Work {
        Work::kernel(&self.costs.lane, f64::from(extents.layers))
    }
}

impl Device for ClockDevice {
    fn allocate(&self, bytes: u64) -> Result<Slice> {
        match &self.beneath {
            None => self.place(bytes),
            Some(beneath) => beneath.device.allocate(bytes),
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
            None => slice_of(self.tag, address, bytes),
            // SAFETY: what the caller vouches for here is what the device beneath asks for.
            Some(beneath) => unsafe { beneath.device.import(address, bytes) },
        }
    }

    fn owns(&self, slice: &Slice) -> bool {
        self.check_slice(slice).is_ok()
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
        if let Some(beneath) = &self.beneath {
            return beneath.device.backing(bytes);
        }
        let mut state = self.state.lock();
        state.backings.push(bytes);
        Ok(Backing(state.backings.len() as u32 - 1))
    }

    fn range(&self, pieces: &[Mapped]) -> Result<Slice> {
        if let Some(beneath) = &self.beneath {
            return beneath.device.range(pieces);
        }
        let mut bytes = 0_u64;
        for piece in pieces {
            let whole = self.state.lock().backings.get(piece.backing.0 as usize).copied();
            let whole = whole.ok_or_else(|| unknown("backing", u64::from(piece.backing.0)))?;
            if piece.offset.checked_add(piece.bytes).is_none_or(|end| end > whole) {
                return Err(bad("a piece of a backing", piece.offset).with("bytes", piece.bytes));
            }
            bytes = bytes.saturating_add(piece.bytes);
        }
        self.place(bytes)
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
        // A callback that looks sees what is, and moves nothing.
        let inside = state.driver.is_some_and(|driver| driver == crate::sync::thread::current().id());
        if !inside {
            drop(state);
            state = self.drive(until)?;
        }
        // A failed device goes on reaching its events; until then operations may still be running.
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
        self.check_slice(&from)?;
        self.check_slice(&to)?;
        if from.bytes() != to.bytes() {
            return Err(unknown("copy of another length", to.bytes()));
        }
        let bytes = from.bytes() as f64;
        let sides: MutexGuard<'_, _> = self.state.lock();
        let (from_host, to_host) = (sides.is_host(from.address()), sides.is_host(to.address()));
        drop(sides);
        let work = match (from_host, to_host) {
            (true, false) => Work::copy(&self.costs, Direction::ToDevice, bytes),
            // Within the host a copy goes through the device, and down again.
            (_, true) => Work::copy(&self.costs, Direction::ToHost, bytes),
            (false, false) => Work::inside(&self.costs, bytes),
        };
        let effect = self.beneath.is_some().then_some(Effect::Copy { from, to });
        self.enqueue(stream, label("copy"), work, effect)
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

    fn attach(&self, plan: Plan) -> Result<Pools> {
        plan.slabs.iter().chain(&plan.rows).try_for_each(|slice| self.check_slice(slice))?;
        let extents = Extents::new(&plan, self.beneath.is_some());
        let attached = self.beneath.as_ref().map(|beneath| beneath.device.attach(plan)).transpose()?;
        let mut state = self.state.lock();
        let pools = Pools(state.pools.len() as u32);
        if attached.is_some_and(|attached| attached != pools) {
            return Err(
                Error::new(Kind::InvalidConfig, "attach").at("the device beneath has pools of others")
            );
        }
        state.pools.push(extents);
        Ok(pools)
    }

    fn join(&self, pools: Pools, stream: Stream, join: Join<'_>) -> Result<()> {
        self.enqueue_pool((pools, stream), label("join"), PoolEffect::Join(join.lane), |extents, _| {
            extents.stage_join(&join)?;
            Ok(self.lane_work(extents))
        })
    }

    fn truncate(&self, pools: Pools, stream: Stream, cut: Cut<'_>) -> Result<()> {
        let Cut { lane, settle, length, pages } = cut;
        let effect = PoolEffect::Truncate { lane, settle, length };
        self.enqueue_pool((pools, stream), label("truncate"), effect, |extents, _| {
            extents.stage_pages(lane, pages)?;
            Ok(self.lane_work(extents))
        })
    }

    fn leave(&self, pools: Pools, stream: Stream, lane: Lane) -> Result<()> {
        self.enqueue_pool((pools, stream), label("leave"), PoolEffect::Leave(lane), |extents, _| {
            extents.lane(lane)?;
            Ok(self.lane_work(extents))
        })
    }

    fn warm(&self, pools: Pools, stream: Stream, warm: Warm) -> Result<()> {
        self.enqueue_pool((pools, stream), label("warm"), PoolEffect::Warm(warm), |extents, _| {
            extents.lane(warm.lane)?;
            if let Some(selections) = &warm.selections {
                self.check_slice(selections)?;
                extents.warm(selections, warm.steps)?;
            }
            let rows = f64::from(warm.steps + u32::from(warm.whole)) * f64::from(extents.layers);
            Ok(Work::kernel(&self.costs.warm, rows))
        })
    }

    fn raise(&self, pools: Pools, stream: Stream, raise: Raise) -> Result<()> {
        self.enqueue_pool((pools, stream), label("raise"), PoolEffect::Raise(raise), |extents, _| {
            extents.lane(raise.lane)?;
            let bytes = raise.count as f64 * extents.row_bytes;
            Ok(Work::rows(&self.costs.gather, Direction::ToDevice, bytes))
        })
    }

    fn begin(&self, pools: Pools, stream: Stream, begin: Begin) -> Result<()> {
        let label = Label { micro_batch: Some(begin.micro_batch), ..label("begin") };
        self.enqueue_pool((pools, stream), label, PoolEffect::Begin(begin), |extents, _| {
            extents.micro_batch(begin.micro_batch)?;
            self.check_slice(&begin.block)?;
            extents.step_block(&begin.block)?;
            if let Some(accepted) = &begin.accepted {
                self.check_slice(accepted)?;
                extents.words(accepted, extents.batch.into())?;
            }
            let rows = f64::from(extents.batch) * f64::from(extents.layers);
            Ok(Work::kernel(&self.costs.begin, rows))
        })
    }

    fn resolve(
        &self,
        pools: Pools,
        stream: Stream,
        part: Part,
        selection: Slice,
        answer: Answer,
    ) -> Result<()> {
        let effect = PoolEffect::Resolve { part, selection, answer };
        self.enqueue_pool((pools, stream), label_of("resolve", &part), effect, |extents, _| {
            self.check_slice(&selection)?;
            self.check_slice(&answer.slots)?;
            if let Some(parts) = &answer.parts {
                self.check_slice(&parts.lists)?;
                self.check_slice(&parts.counts)?;
            }
            extents.resolve(&part, &selection, &answer)?;
            let rows = f64::from(part.count) * f64::from(part.rows.count);
            Ok(Work::kernel(&self.costs.resolve, rows))
        })
    }

    fn gather(&self, pools: Pools, stream: Stream, part: Part, pass: u32) -> Result<()> {
        let effect = PoolEffect::Gather { part, pass };
        self.enqueue_pool((pools, stream), label_of("gather", &part), effect, |extents, misses| {
            extents.gather(&part, pass)?;
            let rows = misses.get(part.layer.index()).map_or(0.0, |rows| rows * f64::from(part.count));
            // The first pass moves what was declared; further ones are there, and move nothing.
            let bytes = if pass == 0 { rows * extents.row_bytes } else { 0.0 };
            Ok(Work::rows(&self.costs.gather, Direction::ToDevice, bytes))
        })
    }

    fn scatter(&self, pools: Pools, stream: Stream, part: Part) -> Result<()> {
        let effect = PoolEffect::Scatter(part);
        self.enqueue_pool((pools, stream), label_of("scatter", &part), effect, |extents, _| {
            extents.part(&part)?;
            let rows = f64::from(part.count) * f64::from(part.rows.count);
            Ok(Work::rows(&self.costs.scatter, Direction::ToHost, rows * extents.row_bytes))
        })
    }

    fn report(&self, pools: Pools, stream: Stream, micro_batch: MicroBatch, slot: Slice) -> Result<()> {
        let label = Label { micro_batch: Some(micro_batch), ..label("report") };
        let effect = PoolEffect::Report { micro_batch, slot };
        self.enqueue_pool((pools, stream), label, effect, |extents, _| {
            extents.micro_batch(micro_batch)?;
            self.check_slice(&slot)?;
            extents.report(&slot)?;
            Ok(Work::kernel(&self.costs.report, f64::from(extents.layers)))
        })
    }

    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64> {
        match &self.beneath {
            // Nothing is resident on a device without memory.
            None => Ok(0),
            Some(beneath) => beneath.device.digest(pools, lane),
        }
    }

    fn validate(&self, pools: Pools) -> Result<()> {
        self.beneath.as_ref().map_or(Ok(()), |beneath| beneath.device.validate(pools))
    }
}
