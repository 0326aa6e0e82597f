//! Captured steps: all layers of a step, recorded once, then launched as one operation.
//!
//! A launch from the host costs microseconds, and a step has thousands of them; a graph has one. What it holds
//! is fixed when it is captured: streams, buffers, the batch rows of its bucket, the order of each layer. What
//! changes from step to step is data: the step descriptor that [`Cache::prepare`] copies to the device, outside the
//! graph, says which lanes the batch has and how many of its rows are real; the others are inert. The report
//! goes out behind the graph, by [`Cache::finish`], into the slot of that step. So any number of steps may be
//! in flight on one graph, and nothing in it names a sequence.
//!
//! | | who |
//! |---|---|
//! | captures a bucket's layers, once a table and version | [`Cache::capture`] |
//! | keeps what was captured, by the choice's bucket, table and version | the engine |
//! | launches them for the open steps of its micro-batches | [`Cache::launch`] |
//!
//! **An engine that captures by itself** (a framework's graph of the whole model) enqueues by
//! [`Cache::capture_into`] while its own capture is under way, launches its graph, and tells
//! [`Cache::launched`] which steps that was for.
//!
//! **Edges.** The graph begins and ends on the compute stream of its first micro-batch. The others' are forked
//! from it and joined to it inside; at a launch, they are ordered before and behind it. Every scatter is joined
//! before the end.
//!
//! **Priorities.** Of two kernels that wait for a GPU's multiprocessors the older one's blocks go first, so a gather
//! would begin when the product in front of it ends. The streams of R, G and S are to have a greater priority than
//! `compute`. A graph keeps the priorities of the streams that its kernels were captured on only where it is
//! instantiated so: the cache's are, the engine's own should be (`CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY`).
//!
//! It does not choose tables ([`crate::overlap::Chooser`]), and does not capture what engines enqueue outside
//! their callbacks.

use std::sync::Arc;

use crate::cache::{Cache, Layers};
use crate::device::{Device, Graph, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::overlap::{Engine, Overlap, Run, enqueue_step};
use crate::step::Step;

/// What to capture: see [`Cache::capture`].
#[derive(Clone, Copy, Debug)]
pub struct Capture<'a> {
    /// The micro-batches whose steps run in one graph, each with its streams, the batch rows of the bucket, and
    /// its buffers.
    pub micro_batches: &'a [(MicroBatch, Layers)],
    /// Query rows of the steps.
    pub query_rows: u32,
    /// The order of each layer, draft layers last.
    pub by_layer: &'a [Overlap],
    /// Passes of the draft layers.
    pub draft_passes: u32,
}

/// The layers of a bucket, captured. Giving it up waits for nothing: launches under way still run.
#[derive(Debug)]
pub struct Captured {
    ring: u32,
    device: Arc<dyn Device>,
    /// None where the engine has the graph.
    graph: Option<Graph>,
    micro_batches: Vec<(MicroBatch, Layers)>,
    query_rows: u32,
    draft_passes: u32,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if let Some(graph) = self.graph {
            // The device has it: it was made there, and is given up once.
            let _ = self.device.release(graph);
        }
    }
}

impl Captured {
    /// The micro-batches and their bucket.
    pub fn micro_batches(&self) -> &[(MicroBatch, Layers)] {
        &self.micro_batches
    }
}

/// A capture that was begun: it ends in any case, and what it made is worth nothing unless all was enqueued.
struct UnderWay<'a> {
    device: &'a dyn Device,
    stream: Stream,
    ended: bool,
}

impl<'a> UnderWay<'a> {
    fn begin(device: &'a dyn Device, stream: Stream) -> Result<Self> {
        device.capture(stream)?;
        Ok(UnderWay { device, stream, ended: false })
    }

    fn end(mut self) -> Result<Graph> {
        self.ended = true;
        self.device.captured(self.stream)
    }
}

impl Drop for UnderWay<'_> {
    /// A callback has failed, or panicked: its own error is what is told.
    fn drop(&mut self) {
        if !self.ended
            && let Ok(graph) = self.device.captured(self.stream)
        {
            let _ = self.device.release(graph);
        }
    }
}

fn refuse(kind: Kind, operation: &'static str, place: &'static str) -> Error {
    Error::new(kind, operation).at(place)
}

impl Cache {
    /// Captures the layers of a bucket into a graph: the engine's work by its callbacks, R, G and S between
    /// them. Nothing runs. Steps may be in flight meanwhile; none of the bucket's micro-batches may be open.
    ///
    /// For an engine that captures nothing by itself and wants a step's layers launched as one operation, by
    /// [`Cache::launch`].
    ///
    /// # Errors
    /// As [`Cache::overlap_steps`]; [`Kind::Busy`] while a step of these micro-batches is open;
    /// [`Kind::InvalidConfig`] for no micro-batch or one named twice, on a device without graphs, and for what
    /// may not be captured, with the driver's word for it. The capture has ended then, and nothing is left of it.
    pub fn capture(&mut self, bucket: &Capture<'_>, engine: &mut dyn Engine) -> Result<Captured> {
        let runs = self.bucket_runs(bucket)?;
        let under_way = UnderWay::begin(&*self.device, first_stream(bucket)?)?;
        self.enqueue_bucket(bucket, &runs, engine)?;
        Ok(self.captured(bucket, Some(under_way.end()?)))
    }

    /// The same for an engine that captures the whole model, and launches it by itself ([`Cache::launched`]): its
    /// capture is under way on the compute stream of the first micro-batch, and everything is enqueued there, forked
    /// from it and joined to it. The engine's graph names this device's memory and its kernels: it must be gone
    /// before the device is.
    ///
    /// # Errors
    /// As [`Cache::capture`]; [`Kind::InvalidConfig`] where that stream is not being captured, before anything is
    /// enqueued. Afterwards the engine's capture is worth nothing.
    pub fn capture_into(&mut self, bucket: &Capture<'_>, engine: &mut dyn Engine) -> Result<Captured> {
        let runs = self.bucket_runs(bucket)?;
        if !self.device.is_capturing(first_stream(bucket)?)? {
            return Err(refuse(
                Kind::InvalidState,
                "capture",
                "no capture is under way on the first compute stream",
            )
            .hint("begin the engine's capture there, or let the cache capture"));
        }
        self.enqueue_bucket(bucket, &runs, engine)?;
        Ok(self.captured(bucket, None))
    }

    fn captured(&self, bucket: &Capture<'_>, graph: Option<Graph>) -> Captured {
        Captured {
            ring: self.ring.tag(),
            device: Arc::clone(&self.device),
            graph,
            micro_batches: bucket.micro_batches.to_vec(),
            query_rows: bucket.query_rows,
            draft_passes: bucket.draft_passes,
        }
    }

    fn bucket_runs(&self, bucket: &Capture<'_>) -> Result<Vec<Run>> {
        self.check_orders(bucket.by_layer)?;
        self.check_draft_passes(bucket.query_rows, bucket.draft_passes)?;
        if bucket.query_rows == 0 || bucket.query_rows > self.config.query_rows {
            return Err(Error::new(Kind::OutOfRange, "capture")
                .at("query rows")
                .with("value", bucket.query_rows)
                .with("most", self.config.query_rows));
        }
        let mut runs = Vec::with_capacity(bucket.micro_batches.len());
        for (index, (micro_batch, layers)) in bucket.micro_batches.iter().enumerate() {
            if bucket.micro_batches[..index].iter().any(|(other, _)| other == micro_batch) {
                return Err(refuse(Kind::InvalidConfig, "capture", "a micro-batch is named twice"));
            }
            if micro_batch.0 >= self.config.micro_batches {
                return Err(Error::new(Kind::OutOfRange, "capture")
                    .at("micro-batch")
                    .with("value", micro_batch.0)
                    .with("most", self.config.micro_batches - 1));
            }
            self.ring.check_closed(*micro_batch)?;
            let run = self.layers_run(*micro_batch, 1, bucket.query_rows, layers)?;
            bucket.by_layer.iter().try_for_each(|overlap| run.check(&*self.device, *overlap))?;
            runs.push(run);
        }
        Ok(runs)
    }

    fn enqueue_bucket(&self, bucket: &Capture<'_>, runs: &[Run], engine: &mut dyn Engine) -> Result<()> {
        let first = first_stream(bucket)?;
        for run in runs {
            run.schedule.fork(&*self.device, first, run.streams.compute)?;
        }
        let (draft_layers, draft_passes) = (self.geometry.shape().draft_layers, bucket.draft_passes);
        let orders = bucket.by_layer;
        enqueue_step(&*self.device, self.pools, runs, orders, draft_layers, draft_passes, engine)?;
        runs.iter().try_for_each(|run| run.schedule.join(&*self.device, &run.streams, first))
    }

    /// Launches captured layers for the open steps of its micro-batches, in its order of them.
    /// [`Cache::finish`] comes next, on any stream.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for what another cache has captured, as one that was closed, and for steps with more
    /// rows than the bucket; [`Kind::InvalidConfig`] for steps of other micro-batches or another number of query
    /// rows or prepared on another stream, finished or abandoned steps, and layers whose graph the engine has.
    /// Nothing is enqueued then. What is refused afterwards abandons the steps.
    pub fn launch(&mut self, captured: &Captured, steps: &mut [&mut Step]) -> Result<()> {
        self.check_captured("launch", captured, steps)?;
        for (step, (_, layers)) in steps.iter().zip(&captured.micro_batches) {
            self.check_prepared(step, layers)?;
        }
        let Some(graph) = captured.graph else {
            return Err(refuse(
                Kind::InvalidState,
                "launch",
                "the graph is the engine's: launch it, then call `launched`",
            ));
        };
        let first = captured.micro_batches[0].1.streams.compute;
        for (step, (_, layers)) in steps.iter_mut().zip(&captured.micro_batches) {
            step.begin_layers(layers.streams);
            // Until all is ordered behind the launch, only the stream of the launch is.
            step.work.beside = Some(first);
        }
        self.around(captured, |schedule, device, own| schedule.fork(device, own, first))?;
        self.device.launch(graph, first)?;
        self.around(captured, |schedule, device, own| schedule.fork(device, first, own))?;
        for step in steps.iter_mut() {
            self.schedule_layers(step, captured.draft_passes)?;
            step.launch();
            step.work.beside = None;
        }
        Ok(())
    }

    /// The engine has launched a graph that it captured around [`Cache::capture_into`], for these open steps,
    /// ordered behind each one's [`Cache::prepare`]. [`Cache::finish`] comes next, on a stream that is ordered
    /// behind the launch.
    ///
    /// # Errors
    /// As [`Cache::launch`].
    pub fn launched(&mut self, captured: &Captured, steps: &mut [&mut Step]) -> Result<()> {
        self.check_captured("launched", captured, steps)?;
        if captured.graph.is_some() {
            return Err(refuse(
                Kind::InvalidState,
                "launched",
                "the graph is the cache's: it launches it by `launch`",
            ));
        }
        for step in steps.iter_mut() {
            self.schedule_layers(step, captured.draft_passes)?;
            step.launch();
        }
        Ok(())
    }

    /// Calls `order` for each micro-batch with its compute stream.
    fn around(
        &self,
        captured: &Captured,
        order: impl Fn(&crate::overlap::Schedule, &dyn Device, Stream) -> Result<()>,
    ) -> Result<()> {
        captured.micro_batches.iter().try_for_each(|(micro, layers)| {
            order(&self.schedules[micro.index()], &*self.device, layers.streams.compute)
        })
    }

    fn check_captured(
        &self,
        operation: &'static str,
        captured: &Captured,
        steps: &[&mut Step],
    ) -> Result<()> {
        if captured.ring != self.ring.tag() {
            return Err(Error::new(Kind::OutOfRange, operation).at("layers that another cache has captured"));
        }
        if steps.len() != captured.micro_batches.len() {
            return Err(refuse(Kind::InvalidConfig, operation, "one step for each captured micro-batch")
                .with("steps", steps.len() as u64)
                .with("micro-batches", captured.micro_batches.len() as u64));
        }
        for (step, (micro_batch, layers)) in steps.iter().zip(&captured.micro_batches) {
            self.check_step(step, Layer(0))?;
            if step.is_launched() {
                return Err(refuse(Kind::InvalidState, operation, "the step's layers have been launched"));
            }
            if step.micro_batch != *micro_batch || step.query_rows != captured.query_rows {
                return Err(refuse(
                    Kind::InvalidConfig,
                    operation,
                    "a step of another micro-batch or of other query rows",
                )
                .with("query rows", step.query_rows)
                .with("captured", captured.query_rows));
            }
            self.check_layers(step, layers)?;
        }
        Ok(())
    }
}

/// The stream that a bucket's graph begins on.
fn first_stream(bucket: &Capture<'_>) -> Result<Stream> {
    let first = bucket
        .micro_batches
        .first()
        .ok_or_else(|| refuse(Kind::InvalidConfig, "capture", "no micro-batch"))?;
    Ok(first.1.streams.compute)
}
