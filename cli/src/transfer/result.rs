//! What a demo found: the reports of both ends, put together.

use super::report::{Failure, Received, Sent};
use super::shape::Shape;

/// When a layer of the first request was computed, told and stored, in milliseconds since the computation began.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerTimes {
    pub computed: Option<f64>,
    pub told: Option<f64>,
    pub stored: Option<f64>,
}

/// The figures of a transfer that was done.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// From the beginning of the computation to its end.
    pub compute_ms: f64,
    /// From the first notice until the receiver had everything.
    pub transfer_ms: f64,
    /// From the end of the computation until the receiver had everything.
    pub exposed_ms: f64,
    /// What as many bytes took with nothing to compute.
    pub alone_ms: f64,
    /// Of the time that the transfer takes alone the share that was not exposed.
    pub hidden: f64,
    /// Of the transfer alone.
    pub gb_s: f64,
}

/// A demo's result.
#[derive(Debug)]
pub struct Outcome {
    /// Why it failed.
    pub failure: Option<Failure>,
    /// Whether every byte was compared and is the one that was sent.
    pub verified: bool,
    /// Bytes and runs that were stored of the first request.
    pub bytes: u64,
    pub runs: u64,
    /// Runs that were told again.
    pub resent: u64,
    pub figures: Option<Figures>,
    pub layers: Vec<LayerTimes>,
}

fn ms(from: u64, to: u64) -> f64 {
    (i128::from(to) - i128::from(from)) as f64 / 1e6
}

impl Outcome {
    /// From what the ends have reported; an end that was lost has reported nothing.
    pub fn of(shape: &Shape, sent: Option<&Sent>, received: Option<&Received>) -> Outcome {
        let known = sent.is_some() && received.is_some();
        let verified = known && received.is_some_and(|received| received.verified);
        let own = [received.and_then(|end| end.failure.as_ref()), sent.and_then(|end| end.failure.as_ref())];
        let failures = || own.into_iter().flatten();
        // An end whose other end has failed may know only that it is gone.
        let told = failures().find(|failure| failure.reason != "peer lost").or_else(|| failures().next());
        let missing = (!known).then(|| Failure::new("peer lost"));
        let wrong = (!verified).then(|| Failure::new("wrong bytes"));
        let failure = told.cloned().or(missing).or(wrong);
        let (bytes, runs) = received.map_or((0, 0), |end| (end.bytes, end.runs));
        let both = sent.zip(received).filter(|_| failure.is_none());
        let resent = both.map_or(0, |(sent, _)| sent.runs.saturating_sub(runs));
        let figures = both.and_then(|(sent, received)| figures(shape, sent, received));
        Outcome { failure, verified, bytes, runs, resent, figures, layers: layers(shape, sent, received) }
    }
}

fn layers(shape: &Shape, sent: Option<&Sent>, received: Option<&Received>) -> Vec<LayerTimes> {
    let Some(began) = sent.and_then(|sent| sent.began) else { return Vec::new() };
    let at = |times: Option<&Vec<Option<u64>>>, layer: usize| {
        let time = times.and_then(|times| times.get(layer).copied().flatten());
        time.map(|time| ms(began, time))
    };
    let of = |layer| LayerTimes {
        computed: at(sent.map(|sent| &sent.computed), layer),
        told: at(sent.map(|sent| &sent.told), layer),
        stored: at(received.map(|received| &received.stored), layer),
    };
    (0..shape.layers as usize).map(of).collect()
}

fn figures(shape: &Shape, sent: &Sent, received: &Received) -> Option<Figures> {
    let [Some(whole), Some(again)] = received.whole else { return None };
    let computed = sent.computed.iter().copied().collect::<Option<Vec<u64>>>()?.into_iter().max()?;
    let told = sent.told.iter().flatten().copied().min()?;
    let exposed_ms = ms(computed, whole).max(0.0);
    // No clock ticks finer than this.
    let alone_ms = ms(sent.alone?, again).max(1e-6);
    Some(Figures {
        compute_ms: ms(sent.began?, computed),
        transfer_ms: ms(told, whole),
        exposed_ms,
        alone_ms,
        hidden: (1.0 - exposed_ms / alone_ms).max(0.0),
        gb_s: shape.bytes() as f64 / alone_ms / 1e6,
    })
}
