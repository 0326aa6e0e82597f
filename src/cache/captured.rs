//! Captured steps: a CUDA graph of all layers of a step, captured once and launched as one operation.
//!
//! Each launch from the host costs microseconds, and a step has thousands of launches. A graph needs one. The capture
//! fixes the streams, the buffers, the batch rows of the bucket and the order of each layer. Only data changes from
//! step to step: [`Cache::prepare`] copies the step descriptor to the device outside the graph. The descriptor names
//! the lanes of the batch and the number of real rows; the other rows of the bucket are inert. After the graph,
//! [`Cache::finish`] enqueues the report into the slot of that step. So no part of a graph names a sequence, and any
//! number of steps may be in flight on one graph.
//!
//! | task | done by |
//! |---|---|
//! | capture a bucket's layers, once for each table of orders and version | [`Cache::capture`] |
//! | keep the captured graphs by bucket, table of orders and version of the choice | the engine |
//! | launch a graph for the open steps of its micro-batches | [`Cache::launch`] |
//!
//! **An engine that captures the whole model itself** (a framework's graph) calls [`Cache::capture_into`] during its
//! own capture. It launches its graph, and then reports the steps of that launch with [`Cache::launched`].
//!
//! **Edges.** The graph begins and ends on the compute stream of its first micro-batch. Inside the graph, the compute
//! streams of the other micro-batches fork from it and join it. A launch comes after their earlier work and before
//! their later work. Every scatter is joined before the graph ends.
//!
//! **Priorities.** When two kernels wait for a GPU's multiprocessors, the blocks of the older kernel run first. So
//! without priorities a gather would begin only when the matrix product enqueued before it ends. Give the streams of
//! R, G and S (resolve, gather, scatter) a higher priority than `compute`. A graph keeps the priorities of the streams
//! that its kernels were captured on only if it is instantiated with
//! `CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY`. The cache does so; the engine should do so for its own graphs.
//!
//! This module does not choose tables of orders ([`crate::overlap::Chooser`]), and it does not capture work that
//! engines enqueue outside their callbacks.

use std::sync::Arc;

use crate::cache::{Cache, Layers};
use crate::device::{Device, Graph, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::overlap::{Engine, Overlap, Run, enqueue_step};
use crate::step::Step;

/// The arguments of [`Cache::capture`].
#[derive(Clone, Copy, Debug)]
pub struct Capture<'a> {
    /// The micro-batches whose steps run in one graph, each with its streams, its buffers and the batch rows of the
    /// bucket.
    pub micro_batches: &'a [(MicroBatch, Layers)],
    /// Query rows of the steps.
    pub query_rows: u32,
    /// The order of each layer, draft layers last.
    pub by_layer: &'a [Overlap],
    /// The number of draft passes of each draft layer.
    pub draft_passes: u32,
}

/// The captured layers of steps, for the batch rows of one bucket. Dropping it does not wait: launches in progress
/// still run.
#[derive(Debug)]
pub struct Captured {
    ring: u32,
    device: Arc<dyn Device>,
    /// None if the engine has the graph.
    graph: Option<Graph>,
    micro_batches: Vec<(MicroBatch, Layers)>,
    query_rows: u32,
    draft_passes: u32,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if let Some(graph) = self.graph {
            // The graph was made on this device and is released once, so a refusal is impossible here.
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

/// A capture in progress. Dropping it ends the capture and discards the graph.
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
    /// A callback failed or panicked. The caller gets the callback's own error.
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
    /// Captures a step's layers into a graph, for the batch rows of one bucket: the engine's work, through its
    /// callbacks, and R, G and S between the callbacks. Nothing runs. Steps may be in flight during the capture, but
    /// none of the captured micro-batches may have an open step.
    ///
    /// For an engine that captures nothing itself and launches a step's layers as one operation with
    /// [`Cache::launch`].
    ///
    /// # Errors
    /// As [`Cache::overlap_steps`]; [`Kind::Busy`] while a step of these micro-batches is open;
    /// [`Kind::InvalidConfig`] for no micro-batch, or one named twice; [`Kind::Unsupported`] on a device without
    /// graphs; [`Kind::InvalidState`] for an operation that cannot be captured, with the driver's error name. After an
    /// error the capture has ended, and no graph is left.
    pub fn capture(&mut self, bucket: &Capture<'_>, engine: &mut dyn Engine) -> Result<Captured> {
        let runs = self.bucket_runs(bucket)?;
        let under_way = UnderWay::begin(&*self.device, first_stream(bucket)?)?;
        self.enqueue_bucket(bucket, &runs, engine)?;
        Ok(self.captured(bucket, Some(under_way.end()?)))
    }

    /// Enqueues the layers of a bucket into the engine's own capture. For an engine that captures the whole model and
    /// launches the graph itself ([`Cache::launched`]). The engine's capture must be in progress on the compute stream
    /// of the first micro-batch. The other streams fork from that stream and join it. The engine's graph uses this
    /// device's memory and kernels, so the engine must destroy the graph before the device.
    ///
    /// # Errors
    /// As [`Cache::capture`]; [`Kind::InvalidState`] if that stream is not being captured, before anything is
    /// enqueued. After any later error the engine must discard its capture.
    pub fn capture_into(&mut self, bucket: &Capture<'_>, engine: &mut dyn Engine) -> Result<Captured> {
        let runs = self.bucket_runs(bucket)?;
        if !self.device.is_capturing(first_stream(bucket)?)? {
            return Err(refuse(
                Kind::InvalidState,
                "capture",
                "no capture is in progress on the first compute stream",
            )
            .hint("begin the engine's capture on that stream, or call `capture`"));
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
            self.check_each(&run, bucket.by_layer)?;
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
        runs.iter().try_for_each(|run| run.schedule.join(&*self.device, &run.streams, first))?;
        engine.end(first)
    }

    /// Launches captured layers for the open steps of their micro-batches. `steps` has the order of the captured
    /// micro-batches. Call [`Cache::finish`] next, on any stream.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for layers that another cache captured (a cache that was shut down included), and for steps
    /// with more rows than the bucket; [`Kind::InvalidConfig`] for steps of other micro-batches or with another number
    /// of query rows; [`Kind::InvalidState`] for finished, abandoned or already launched steps, for steps that were
    /// prepared on another stream, and if the engine has the graph. These errors enqueue nothing. A later error
    /// abandons the steps.
    pub fn launch(&mut self, captured: &Captured, steps: &mut [&mut Step]) -> Result<()> {
        self.check_captured("launch", captured, steps)?;
        for (step, (_, layers)) in steps.iter().zip(&captured.micro_batches) {
            self.check_prepared("launch", step, layers)?;
        }
        let Some(graph) = captured.graph else {
            return Err(refuse(Kind::InvalidState, "launch", "the graph is the engine's")
                .hint("launch the graph, then call `launched`"));
        };
        let first = captured.micro_batches[0].1.streams.compute;
        for (step, (_, layers)) in steps.iter_mut().zip(&captured.micro_batches) {
            step.begin_layers(layers.streams);
            // Until all streams are ordered after the launch, only the stream of the launch is.
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

    /// Reports that the engine has launched a graph that contains [`Cache::capture_into`], for these open steps. The
    /// launch must be ordered after the [`Cache::prepare`] of each step. Call [`Cache::finish`] next, on a stream that
    /// is ordered after the launch.
    ///
    /// # Errors
    /// As [`Cache::launch`], but for the stream that a step was prepared on; [`Kind::InvalidState`] if the cache has
    /// the graph.
    pub fn launched(&mut self, captured: &Captured, steps: &mut [&mut Step]) -> Result<()> {
        self.check_captured("launched", captured, steps)?;
        if captured.graph.is_some() {
            return Err(
                refuse(Kind::InvalidState, "launched", "the graph is the cache's").hint("call `launch`")
            );
        }
        for step in steps.iter_mut() {
            self.schedule_layers(step, captured.draft_passes)?;
            step.launch();
        }
        Ok(())
    }

    /// Calls `order` for each micro-batch, with its compute stream.
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
                return Err(refuse(Kind::InvalidState, operation, "the step's layers have been launched")
                    .hint("finish the step"));
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
