//! Measures steps whose layers are sharded and pulled by the ring: how much of the pulls the engine's work hides.
//!
//! Layers and ranks are those of the group pull, and so is the peer's memory: on a GPU its own. The engine's work is
//! matrix products, in two equal parts of a layer: attention and output projection, which end the use of the layer's
//! window, and the experts. Layers are twice as long as a pull, which should hide it, and half as long, which cannot:
//! of these about max(0, pull - layer) is exposed where two pulls share a link. Some steps run back to back, captured
//! if the device has graphs: a launch for each step, which ends behind the pulls of the next step's first layers. On
//! the host each stream has a thread here, since nothing overlaps in inline streams.
//!
//! The ceiling is the same steps resident, in turn: the same products, and no ring. Every byte of every window is
//! compared with what its owner filled, in a step after the last round.

use std::sync::Arc;

use forebay::Result;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Graph, Slice, Stream};
use forebay::measure::{Ceilings, Probe};
use forebay::weights::{Pulls, Ring, RingOptions, Source};

use super::asked::Asked;
use super::pull::{compared, filled, layer_bytes, share, wait};
use super::result::{Figure, Parameter, Spread};
use super::step::engine::calibrate;
use super::timer::Timer;

const LAYERS: usize = 4;
/// Steps of a time.
const STEPS: usize = 3;
/// Rounds before the timed ones.
const WARM_UP: u32 = 2;

/// A figure's steps.
struct Steps<'a> {
    device: &'a Arc<dyn Probe>,
    timer: &'a Timer,
    ring: Ring,
    drained: Event,
    /// Rounds of products of half a layer.
    rounds: u32,
    /// Captured steps, sharded and resident, if the device has graphs.
    graphs: Option<[Graph; 2]>,
}

impl Steps<'_> {
    /// Waits for all pulls, so that the next time begins without them.
    fn drain(&self) -> Result<()> {
        for stream in (0..2).filter_map(|buffer| self.ring.stream(buffer)) {
            self.device.record(self.drained, stream)?;
            self.device.synchronize(self.drained)?;
        }
        Ok(())
    }

    /// The layers of a step.
    fn layers(&mut self, stream: Stream, sharded: bool) -> Result<()> {
        for layer in 0..LAYERS {
            if sharded {
                self.ring.enter(layer, 0, stream)?;
            }
            self.device.compute(stream, self.rounds)?;
            if sharded {
                self.ring.leave(layer, 0, stream)?;
            }
            self.device.compute(stream, self.rounds)?;
        }
        if sharded { self.ring.end(stream) } else { Ok(()) }
    }

    fn captured(&mut self, sharded: bool) -> Result<Graph> {
        let stream = self.timer.stream();
        if sharded {
            self.ring.begin(1, 0)?;
        }
        self.device.capture(stream)?;
        let enqueued = self.layers(stream, sharded);
        // The capture ends even after an error.
        let graph = self.device.captured(stream);
        enqueued?;
        graph
    }

    /// The time of some steps back to back.
    fn time(&mut self, sharded: bool) -> Result<f64> {
        let timer = self.timer;
        let us = timer.time(|stream| {
            for _ in 0..STEPS {
                match (self.graphs, sharded) {
                    (Some([graph, _]), true) => {
                        let device = self.device;
                        self.ring.launch(stream, || device.launch(graph, stream))?;
                    }
                    (Some([_, graph]), false) => self.device.launch(graph, stream)?,
                    (None, true) => {
                        self.ring.begin(1, 0)?;
                        self.layers(stream, true)?;
                    }
                    (None, false) => self.layers(stream, false)?,
                }
            }
            Ok(())
        })?;
        self.drain().map(|()| us)
    }

    /// Compares every byte of every window in a step. Returns the number of words.
    fn compared(&mut self) -> Result<u64> {
        let (device, stream) = (&**self.device, self.timer.stream());
        let mut checked = 0;
        self.ring.begin(1, 0)?;
        for layer in 0..LAYERS {
            self.ring.enter(layer, 0, stream)?;
            wait(device, stream)?;
            checked += compared(device, self.ring.pulls(), Source::Peers, layer)?;
            self.ring.leave(layer, 0, stream)?;
        }
        self.ring.end(stream)?;
        self.drain().map(|()| checked)
    }
}

/// One figure: sharded steps in turn with resident ones.
fn figure(steps: &mut Steps<'_>, asked: &Asked, name: &str, pull_us: f64) -> Result<Figure> {
    if steps.device.facts()?.gpu.is_some() {
        steps.graphs = Some([steps.captured(true)?, steps.captured(false)?]);
    }
    let (mut times, mut resident, mut exposed) = (Vec::new(), Vec::new(), Vec::new());
    let layers = (STEPS * LAYERS) as f64;
    for round in 0..asked.rounds + WARM_UP {
        let (sharded, alone) = (steps.time(true)?, steps.time(false)?);
        if round >= WARM_UP {
            times.push(sharded);
            resident.push(alone);
            exposed.push((sharded - alone) / layers);
        }
    }
    let checked = steps.compared()?;
    let enqueued = if steps.graphs.is_some() { "graph" } else { "calls" };
    for graph in steps.graphs.take().into_iter().flatten() {
        steps.device.release(graph)?;
    }
    let resident = Spread::of(resident).us;
    let bytes = layer_bytes(&**steps.device, asked.quick);
    let mut figure = Figure::new("ring", name, times, ("the same, resident", resident), checked)
        .with("layers", LAYERS as u32)
        .with("steps", STEPS as u32)
        .with("layer", Parameter::Bytes(bytes))
        .with("enqueued", enqueued);
    let layer_us = resident / layers;
    figure.beside =
        vec![("a pull", pull_us), ("a layer", layer_us), ("exposed, a layer", Spread::of(exposed).us)];
    asked.progress.inc(1);
    asked.known(figure)
}

/// The median time of a pull, alone on a stream of the ring's.
fn pull_us(ring: &Ring, timer: &Timer, rounds: u32) -> Result<f64> {
    // The last two are those that the ring has in its buffers between steps.
    let all = (2..LAYERS).chain([0, 1]);
    let time = |layer| timer.time(|stream| ring.pulls().pull(layer, stream));
    let times = (0..rounds.max(1)).flat_map(|_| all.clone()).map(time).collect::<Result<Vec<_>>>()?;
    Ok(Spread::of(times).us)
}

/// A ring of one of two ranks that have shared their layers, each as large as `buffer`.
fn sharded(device: &Arc<dyn Probe>, stream: Stream, buffer: Slice) -> Result<Ring> {
    let make = |rank| filled(device, rank, Source::Peers, Pulls::default(), (LAYERS, buffer), stream);
    let mut windows = make(0)?;
    // The other rank's memory lives as long as the device.
    share([&mut windows, &mut make(1)?], stream)?;
    let base: Arc<dyn Device> = Arc::clone(device) as _;
    Ring::new(&base, windows, RingOptions::default())
}

/// The ring: steps with layers twice as long as a pull, and half as long.
///
/// # Errors
/// Errors of the device, of memory, and of a byte that differs.
pub fn ring(device: &Arc<dyn Probe>, _: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let threads: Arc<dyn Probe>;
    let device = match device.facts()?.gpu {
        Some(_) => device,
        None => {
            threads = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
            &threads
        }
    };
    let timer = Timer::new(device, asked.quick)?;
    let (stream, buffer) = (timer.stream(), device.allocate(layer_bytes(&**device, asked.quick))?);
    let ring = sharded(device, stream, buffer)?;
    let pull_us = pull_us(&ring, &timer, asked.rounds.min(5))?;
    let line = calibrate(pull_us, |rounds| timer.time(|stream| device.compute(stream, rounds)))?;
    let mut steps = Steps { device, timer: &timer, ring, drained: device.event()?, rounds: 1, graphs: None };
    asked.progress.inc_length(2);
    let lengths = [("layers twice a pull", 2.0), ("layers half a pull", 0.5)];
    let one = |(name, pulls): (&str, f64)| {
        steps.rounds = line.rounds(pulls * pull_us / 2.0).max(1);
        figure(&mut steps, asked, name, pull_us)
    };
    lengths.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_shows_another_layer_gives_no_figure() {
        let device: Arc<dyn Probe> =
            HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let timer = Timer::new(&device, true).unwrap();
        let (stream, buffer) = (timer.stream(), device.allocate(4 * device.granularity()).unwrap());
        let ring = sharded(&device, stream, buffer).unwrap();
        let drained = device.event().unwrap();
        let mut steps = Steps { device: &device, timer: &timer, ring, drained, rounds: 1, graphs: None };
        assert!(steps.time(true).unwrap() > 0.0);
        assert_eq!(steps.compared(), Ok(LAYERS as u64 * buffer.bytes() / 8));
        // The ring takes it that the first layer is still there.
        steps.ring.pulls().pull(2, stream).unwrap();
        let error = steps.compared().unwrap_err();
        let word = "layer 0, byte ";
        assert!(error.place().starts_with(word), "{error}");
    }
}
