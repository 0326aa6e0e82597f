//! What a gather takes from the engine's work beside it: the same work alone, and while a layer's rows are fetched.
//!
//! In one step, whose layers are enqueued call by call, layers take turns: the gather runs alone, and the work behind
//! it; both begin at once, behind the layer's resolve, on two streams; the work begins, and the gather a launch behind
//! it. That launch does nothing and is timed with the gather: a work that keeps the gather waiting keeps it waiting as
//! well. The work is three quarters as long as the gather, so it ends first: all of it has the gather beside it. Beside
//! short blocks a gather comes to run as they end, whoever began. A persistent kernel keeps its multiprocessors: the
//! gather behind it waits for its end, unless some are left free, and a gather in front of it keeps its blocks from
//! theirs.

use forebay::device::{Event, Slice, Stream};
use forebay::measure::Mark;
use forebay::{Layer, LayerCall, Result, Step};

use super::engine::{Line, Works};
use super::machine::Machine;
use super::selections::Picks;

/// Of a gather's time, the engine's work beside it.
const WORK: f64 = 0.75;

/// Bytes of an operation that does nothing.
const NOTHING: u64 = 16;

/// Which of gather and work comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The gather, and the work behind its end.
    Alone,
    /// Both at once.
    Both,
    /// The work, and the gather when it has begun.
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
    /// How it ran.
    pub turn: Turn,
    /// The engine's work.
    pub work_us: f64,
    /// The gather.
    pub gather_us: f64,
}

/// Marks and events of the layers, made once.
#[derive(Debug)]
pub struct Beside {
    marks: Vec<[Mark; 4]>,
    edges: [Event; 2],
    /// Of an operation that does nothing: from here to there.
    nothing: [Slice; 2],
}

impl Beside {
    /// For so many layers.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(machine: &Machine, layers: u32) -> Result<Beside> {
        let device = &machine.device;
        let marks = || Ok([device.mark()?, device.mark()?, device.mark()?, device.mark()?]);
        let marks = (0..layers).map(|_| marks()).collect::<Result<_>>()?;
        let room = device.allocate(2 * NOTHING)?;
        let nothing = [room.part(0, NOTHING)?, room.part(NOTHING, NOTHING)?];
        Ok(Beside { marks, edges: [device.event()?, device.event()?], nothing })
    }

    /// One step, each of its layers timed; `gather_us` is what a gather takes, as far as it is known.
    ///
    /// # Errors
    /// As [`Machine::step`].
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

    /// A layer behind its resolve: the gather with the work beside it, behind it or in front, then the scatter.
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
                // As long as a launch takes, in which the work's blocks are handed out. Where these leave it no room,
                // it waits for their end: that is part of what the gather waits for.
                gathers(&|| device.carry(streams.gather, self.nothing[0], self.nothing[1], 1))?;
            }
        }
        edge(self.edges[1], streams.gather, streams.compute)?;
        machine.cache.scatter(step, LayerCall::whole(layer), streams.compute)
    }
}
