//! Measures the fixed cost of forebay's graph nodes: resolve, gather and scatter of every layer, without a step.
//!
//! If no step has begun, these operations find no rows: a resolve reports that there are none, the others do nothing.
//! So the time is that of the launches, captured into one graph if the device has graphs, and of the edges between
//! them. One variant uses one stream. The other uses three, like a step in the order none without the engine's part: a
//! layer's gather follows its resolve, its scatter follows the gather and runs alongside the next layer's resolve. The
//! ceiling is the same graph of operations that do nothing at all.
//!
//! This is not the figure of forebay's nodes in a step: there they run between the engine's work, and resolve rows.

use std::sync::Arc;
use std::time::Instant;

use forebay::Result;
use forebay::device::{Event, Graph, PoolOp, Slice, Stream};
use forebay::measure::{Ceilings, Probe};

use super::asked::Asked;
use super::host_memory::Memory;
use super::oracle::differs;
use super::result::{Figure, Spread, Target};
use super::rig::{Extents, Places, Rig};

/// Nodes of a layer.
const EACH: [Node; 3] = [Node::Resolve, Node::Gather, Node::Scatter];

/// Runs before the timed ones.
const WARM_UP: u32 = 2;

/// Bytes of an operation that does nothing.
const NOTHING: u64 = 16;

#[derive(Clone, Copy, Debug)]
enum Node {
    Resolve,
    Gather,
    Scatter,
}

/// The stream of each kind of node, and the events for the edges between them. A single stream needs no edges.
struct Lines {
    streams: [Stream; 3],
    resolved: Event,
    gathered: Event,
    scattered: Event,
}

impl Lines {
    /// On `first` alone, or on two more streams.
    fn new(device: &dyn Probe, first: Stream, more: bool) -> Result<Lines> {
        let other = || if more { device.stream() } else { Ok(first) };
        Ok(Lines {
            streams: [first, other()?, other()?],
            resolved: device.event()?,
            gathered: device.event()?,
            scattered: device.event()?,
        })
    }

    /// Enqueues the nodes of all layers; later work on the first stream runs after all of them.
    fn enqueue(
        &self,
        device: &dyn Probe,
        layers: u32,
        node: impl Fn(Node, u32, Stream) -> Result<()>,
    ) -> Result<()> {
        let [resolve, gather, scatter] = self.streams;
        for layer in 0..layers {
            node(Node::Resolve, layer, resolve)?;
            device.record(self.resolved, resolve)?;
            device.wait(gather, self.resolved)?;
            node(Node::Gather, layer, gather)?;
            device.record(self.gathered, gather)?;
            device.wait(scatter, self.gathered)?;
            device.wait(resolve, self.gathered)?;
            node(Node::Scatter, layer, scatter)?;
        }
        device.record(self.scattered, scatter)?;
        device.wait(resolve, self.scattered)
    }
}

/// Pools whose nodes are enqueued without a step, and memory for the empty operations.
struct Nodes {
    rig: Rig,
    nothing: [Slice; 2],
    graphs: bool,
}

impl Nodes {
    fn new(device: &Arc<dyn Probe>, quick: bool) -> Result<Nodes> {
        let (layers, lanes, k) = if quick { (3, 4, 64) } else { (61, 160, 2048) };
        let extents = Extents {
            row: 656,
            stride: 704,
            page: 64,
            layers,
            lanes,
            length: 63,
            shorter: 0,
            growth: 0,
            k,
            query_rows: 1,
            budget: k,
        };
        // No row is read or written, so all layers share their rows.
        let (rows, slab) =
            (Memory::new(&**device, extents.layer_bytes())?, device.allocate(extents.slab_bytes())?);
        let room = device.allocate(2 * NOTHING)?;
        Ok(Nodes {
            rig: Rig::new(device, extents, Places::HostInto(rows, slab), quick)?,
            nothing: [room.part(0, NOTHING)?, room.part(NOTHING, NOTHING)?],
            graphs: device.facts()?.gpu.is_some(),
        })
    }

    /// Enqueues a layer's node for `batch` batch rows.
    fn node(&self, node: Node, layer: u32, stream: Stream, batch: u32) -> Result<()> {
        let (device, pools) = (&self.rig.device, self.rig.pools);
        let (range, selection, output) = self.rig.unbegun(layer, batch)?;
        match node {
            Node::Resolve => device.enqueue(pools, stream, PoolOp::Resolve { range, selection, output }),
            Node::Gather => device.enqueue(pools, stream, PoolOp::Gather { range, wave: 0 }),
            Node::Scatter => device.enqueue(pools, stream, PoolOp::Scatter(range)),
        }
    }

    /// Device and host times of all layers' nodes: as a graph if the device has graphs.
    fn times(
        &self,
        lines: &Lines,
        rounds: u32,
        node: impl Fn(Node, u32, Stream) -> Result<()> + Copy,
    ) -> Result<[Spread; 2]> {
        let (device, stream) = (&self.rig.device, self.rig.stream());
        let all = || lines.enqueue(&**device, self.rig.extents.layers, node);
        // First uses happen here, and not during the capture.
        all()?;
        self.rig.wait()?;
        let graph: Option<Graph> = match self.graphs {
            true => {
                device.capture(stream)?;
                let enqueued = all();
                // The capture ends even after an error.
                let graph = device.captured(stream);
                enqueued?;
                Some(graph?)
            }
            false => None,
        };
        let (mut times, mut host) = (Vec::new(), Vec::new());
        for round in 0..rounds + WARM_UP {
            let mut host_us = 0.0;
            let us = self.rig.timer.time(|stream| {
                let begun = Instant::now();
                match graph {
                    Some(graph) => device.launch(graph, stream)?,
                    None => all()?,
                }
                host_us = begun.elapsed().as_nanos() as f64 / 1e3;
                Ok(())
            })?;
            if round >= WARM_UP {
                times.push(us);
                host.push(host_us);
            }
        }
        if let Some(graph) = graph {
            device.release(graph)?;
        }
        Ok([Spread::of(times), Spread::of(host)])
    }

    /// Writes values that no resolve without a step returns.
    fn forget(&self, batch: u32) -> Result<()> {
        let (_, _, output) = self.rig.unbegun(0, batch)?;
        self.rig.device.write(output.slots, &vec![0; output.slots.bytes() as usize])
    }

    /// Checks that every entry was answered with no slot. Returns the number of entries.
    fn check(&self, batch: u32) -> Result<u64> {
        let (_, _, output) = self.rig.unbegun(0, batch)?;
        let mut bytes = vec![0; output.slots.bytes() as usize];
        self.rig.device.read(output.slots, &mut bytes)?;
        let mut words = bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).enumerate();
        match words.find(|(_, slot)| *slot != -1) {
            None => Ok(bytes.len() as u64 / 4),
            Some((entry, slot)) => {
                let place = format!("entry {entry} of an answer without a step: slot");
                Err(differs(place, u64::from(u32::MAX), u64::from(slot as u32)))
            }
        }
    }

    fn figure(&self, batch: u32, streams: u32, asked: &Asked, launch_us: f64) -> Result<Figure> {
        let (rig, device) = (&self.rig, &self.rig.device);
        let lines = Lines::new(&**device, rig.stream(), streams > 1)?;
        let [from, to] = self.nothing;
        let [least, _] =
            self.times(&lines, asked.rounds, |_, _, stream| device.carry(stream, from, to, 1))?;
        self.forget(batch)?;
        let [own, host] =
            self.times(&lines, asked.rounds, |node, layer, stream| self.node(node, layer, stream, batch))?;
        let ceiling = ("as many empty operations", least.us);
        let figure = Figure::new("nodes", "nodes", vec![own.us], ceiling, self.check(batch)?)
            .with("nodes", EACH.len() as u32 * rig.extents.layers)
            .with("layers", rig.extents.layers)
            .with("batch", batch)
            .with("streams", streams)
            .with("enqueued", if self.graphs { "graph" } else { "calls" });
        let beside = vec![("one operation", launch_us), ("the host's launch", host.us)];
        let target = Target { text: "under 150 us", met: own.us < 150.0 };
        let target = Some(target).filter(|_| self.graphs && !asked.quick);
        Ok(Figure { us_low: own.low, us_high: own.high, beside, target, ..figure })
    }
}

/// Figures of the nodes of a step of one sequence, and of a full batch.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a node that found a row.
pub fn nodes(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let mut nodes = Nodes::new(device, asked.quick)?;
    // Without graphs a stream's operations run within the calls, so several streams would measure the same.
    let streams: &[u32] = if nodes.graphs { &[1, 3] } else { &[1] };
    asked.progress.inc_length(2 * streams.len() as u64);
    let mut figures = Vec::new();
    for batch in [1, nodes.rig.extents.lanes] {
        for streams in streams {
            figures.push(asked.known(nodes.figure(batch, *streams, asked, ceilings.launch_us)?)?);
            asked.progress.inc(1);
        }
    }
    nodes.rig.finish()?;
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::host::{HostDevice, HostOptions};

    #[test]
    fn graph_nodes_that_did_not_run_give_no_figure() {
        let device: Arc<dyn Probe> = HostDevice::new(HostOptions::default());
        let mut nodes = Nodes::new(&device, true).unwrap();
        let resolve = |nodes: &Nodes| nodes.node(Node::Resolve, 1, nodes.rig.stream(), 2).unwrap();
        nodes.forget(2).unwrap();
        assert!(nodes.check(2).is_err(), "nothing was resolved");
        resolve(&nodes);
        assert_eq!(nodes.check(2).unwrap(), 2 * 64);
        nodes.rig.begin(&[0, 1], 0, 1, |_, _, _| {}).unwrap();
        resolve(&nodes);
        let text = nodes.check(2).unwrap_err().to_string();
        assert!(text.contains("entry 0 of an answer without a step"), "{text}");
    }
}
