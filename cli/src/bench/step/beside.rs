//! What a gather takes from the engine's work beside it: the same work alone, and while a layer's rows are fetched.
//!
//! In one step, whose layers are enqueued call by call, every second layer's gather runs alone, and the work behind
//! it; in the others both begin at once, behind the layer's resolve, on two streams. The work is three quarters as
//! long as the gather, so it ends first: all of it has the gather beside it.

use forebay::device::Event;
use forebay::measure::Mark;
use forebay::{Layer, LayerCall, Result, Step};

use super::machine::Machine;
use super::picks::Picks;
use super::works::{Line, Works};

/// Of a gather's time, the engine's work beside it.
const WORK: f64 = 0.75;

/// Times of one layer, microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layered {
    /// Whether work and gather ran at once.
    pub both: bool,
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
        Ok(Beside { marks, edges: [device.event()?, device.event()?] })
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
            self.layer(machine, &step, layer, marks, rounds)?;
        }
        machine.ends(step, picks)?;
        let device = &machine.device;
        let layers = (0..).zip(&self.marks).map(|(layer, [work, worked, gather, gathered])| {
            Ok(Layered {
                both: both(layer),
                work_us: device.elapsed_us(*work, *worked)?,
                gather_us: device.elapsed_us(*gather, *gathered)?,
            })
        });
        layers.collect()
    }

    /// A layer behind its resolve: the gather with so many rounds of work beside it or behind it, then the scatter.
    fn layer(
        &self,
        machine: &Machine,
        step: &Step,
        layer: Layer,
        marks: &[Mark; 4],
        rounds: u32,
    ) -> Result<()> {
        let [work, worked, gather, gathered] = marks;
        let (device, streams) = (&machine.device, machine.layers.streams);
        let edge = |event: Event, from, to| {
            device.record(event, from)?;
            device.wait(to, event)
        };
        edge(self.edges[0], streams.compute, streams.gather)?;
        device.stamp(*gather, streams.gather)?;
        machine.cache.gather(step, LayerCall::whole(layer), 0, streams.gather)?;
        device.stamp(*gathered, streams.gather)?;
        if !both(layer.0) {
            edge(self.edges[1], streams.gather, streams.compute)?;
        }
        device.stamp(*work, streams.compute)?;
        device.compute(streams.compute, rounds)?;
        device.stamp(*worked, streams.compute)?;
        edge(self.edges[1], streams.gather, streams.compute)?;
        machine.cache.scatter(step, LayerCall::whole(layer), streams.compute)
    }
}

const fn both(layer: u32) -> bool {
    layer % 2 == 1
}
