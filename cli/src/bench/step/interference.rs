//! Measures how a gather slows the engine's work: the work alone, and while a layer's rows are fetched.
//!
//! In one step, whose layers are enqueued call by call, layers alternate between three variants. The gather runs
//! alone, and the work after it. Both begin at once, after the layer's resolve, on two streams. The work begins, and
//! the gather follows after a launch that does nothing and is timed with the gather, so a work that delays the gather
//! delays that launch as well. The work is three quarters as long as the gather, so the gather runs during all of it.
//! If the work has short blocks, a gather gets processors as these end, whichever began first. A persistent kernel
//! keeps its multiprocessors: a later gather waits for its end unless some are left free, and an earlier gather keeps
//! the kernel's blocks waiting.

use forebay::device::{Event, Slice, Stream};
use forebay::measure::Mark;
use forebay::{Layer, LayerCall, Result, Step};

use super::engine::{Line, Works};
use super::machine::Machine;
use super::selections::Picks;

/// The length of the engine's work beside it, as a share of a gather's time.
const WORK: f64 = 0.75;

/// Bytes of an empty operation.
const NOTHING: u64 = 16;

/// The order of gather and work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The gather, and the work after its end.
    Alone,
    /// Both at once.
    Both,
    /// The work, and the gather once the work has begun.
    Behind,
}

impl Turn {
    const fn of(layer: u32) -> Turn {
        match layer % 3 {
            0 => Turn::Alone,
            1 => Turn::Both,
            _ => Turn::Behind,
        }
    }
}

/// Times of one layer, microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Layered {
    /// The order.
    pub turn: Turn,
    /// The engine's work.
    pub work_us: f64,
    /// The gather.
    pub gather_us: f64,
}

/// Marks and events of the layers, created once.
#[derive(Debug)]
pub struct Beside {
    marks: Vec<[Mark; 4]>,
    edges: [Event; 2],
    /// Source and destination of an empty operation.
    nothing: [Slice; 2],
}

impl Beside {
    /// For `layers` layers.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(machine: &Machine, layers: u32) -> Result<Beside> {
        let device = &machine.device;
        let marks = || Ok([device.mark()?, device.mark()?, device.mark()?, device.mark()?]);
        let marks = (0..layers).map(|_| marks()).collect::<Result<_>>()?;
        let room = device.allocate(2 * NOTHING)?;
        let nothing = [room.part(0, NOTHING)?, room.part(NOTHING, NOTHING)?];
        Ok(Beside { marks, edges: [device.event()?, device.event()?], nothing })
    }

    /// Times each layer of one step; `gather_us` is the gather's time, as far as it is known.
    ///
    /// # Errors
    /// Errors of [`Machine::step`].
    pub fn step(
        &self,
        machine: &mut Machine,
        picks: &Picks,
        works: &Works,
        line: &Line,
        gather_us: f64,
    ) -> Result<Vec<Layered>> {
        let rounds = line.rounds(WORK * gather_us).max(1);
        let step = machine.begins(picks)?;
        let bytes = 4 * picks.selections[0].len() as u64;
        let slots = machine.layers.buffers.slots.part(0, bytes)?;
        for (layer, marks) in (0..).map(Layer).zip(&self.marks) {
            machine.resolve(&step, layer, works, slots, picks.batch)?;
            self.layer(machine, &step, layer, marks, &|stream| works.products(stream, rounds))?;
        }
        machine.ends(step, picks)?;
        let device = &machine.device;
        let layers = (0..).zip(&self.marks).map(|(layer, [work, worked, gather, gathered])| {
            Ok(Layered {
                turn: Turn::of(layer),
                work_us: device.elapsed_us(*work, *worked)?,
                gather_us: device.elapsed_us(*gather, *gathered)?,
            })
        });
        layers.collect()
    }

    /// A layer after its resolve: the gather, with the work during, after or before it, then the scatter.
    fn layer(
        &self,
        machine: &Machine,
        step: &Step,
        layer: Layer,
        marks: &[Mark; 4],
        products: &dyn Fn(Stream) -> Result<()>,
    ) -> Result<()> {
        let [work, worked, gather, gathered] = marks;
        let (device, streams) = (&machine.device, machine.layers.streams);
        let edge = |event: Event, from, to| {
            device.record(event, from)?;
            device.wait(to, event)
        };
        let gathers = |ahead: &dyn Fn() -> Result<()>| {
            device.stamp(*gather, streams.gather)?;
            ahead()?;
            machine.cache.gather(step, LayerCall::whole(layer), 0, streams.gather)?;
            device.stamp(*gathered, streams.gather)
        };
        let works = || {
            device.stamp(*work, streams.compute)?;
            products(streams.compute)?;
            device.stamp(*worked, streams.compute)
        };
        edge(self.edges[0], streams.compute, streams.gather)?;
        match Turn::of(layer.0) {
            Turn::Alone => {
                gathers(&|| Ok(()))?;
                edge(self.edges[1], streams.gather, streams.compute)?;
                works()?;
            }
            Turn::Both => {
                gathers(&|| Ok(()))?;
                works()?;
            }
            Turn::Behind => {
                works()?;
                // The delay of one launch, in which the work's blocks are assigned. If they leave it no room, it waits
                // for their end, which counts as part of the gather's wait.
                gathers(&|| device.carry(streams.gather, self.nothing[0], self.nothing[1], 1))?;
            }
        }
        edge(self.edges[1], streams.gather, streams.compute)?;
        machine.cache.scatter(step, LayerCall::whole(layer), streams.compute)
    }
}
