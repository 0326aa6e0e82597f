//! What an engine names to be brought into L2 beside a step: behind its work, and before the step's end.

use std::sync::Arc;

use forebay::check::watch::{Watch, bytes};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::overlap::Overlap;
use forebay::{Kind, Layer, MicroBatch, Result};

use crate::rig::{QUERY_ROWS, Rig, Sharing};

/// A step beside which index keys are touched that were written before it, and that are written again when it has
/// ended; its waits are those from the first number to before the second. `abandons` gives it up first.
fn run(abandons: bool, without: Option<u64>) -> (Arc<Watch>, [Stream; 2], [u64; 2], Result<()>) {
    let mut rig = Rig::new(1, Sharing::None, without);
    rig.fill().unwrap();
    let (watch, compute) = (rig.watch.clone(), rig.micro[0].streams.compute);
    let side = watch.stream().unwrap();
    let rows = rig.rows(0, 0);
    let mut step = rig.cache.prepare(MicroBatch(0), QUERY_ROWS, &rows, None, compute).unwrap();
    let keys = rig.cache.index_keys(Layer(1)).unwrap().part(0, 64).unwrap();
    let first = watch.waits();
    let mut body = || {
        watch.engine(compute, "index keys", &[bytes(&keys, true)])?;
        if abandons {
            rig.cache.abandon(&mut step)?;
        } else {
            let (layers, mut caller) = (rig.micro[0].layers(), rig.caller());
            let mut open = [(&mut step, layers)];
            rig.cache.overlap_steps(&mut open, &[Overlap::None; 3], QUERY_ROWS, &mut caller)?;
        }
        rig.cache.prefetch(&step, &[keys], 1 << 30, compute, side)?;
        rig.cache.finish(&mut step, compute)?;
        watch.engine(compute, "index keys", &[bytes(&keys, true)])
    };
    let result = body();
    let waits = watch.waits();
    (watch, [compute, side], [first, waits], result)
}

#[test]
fn a_prefetch_beside_a_step_runs_behind_its_work_and_before_its_end() {
    for abandons in [false, true] {
        let (watch, [compute, side], [first, waits], result) = run(abandons, None);
        result.unwrap();
        assert_eq!(watch.conflict(), None);
        let mut missed = Vec::new();
        for wait in first..waits {
            let (watch, _, _, result) = run(abandons, Some(wait));
            if result.is_err_and(|error| error.to_string().contains("prefetch")) {
                missed.push(watch.left_out().unwrap().stream);
            }
        }
        assert_eq!(missed, [side, compute], "abandoned: {abandons}");
    }
}

#[test]
fn a_prefetch_beside_a_step_is_refused_by_its_streams_ranges_and_step() {
    let mut rig = Rig::new(1, Sharing::None, None);
    rig.fill().unwrap();
    let compute = rig.micro[0].streams.compute;
    let [side, other] = [(); 2].map(|()| rig.watch.stream().unwrap());
    let rows = rig.rows(0, 0);
    let mut step = rig.cache.prepare(MicroBatch(0), QUERY_ROWS, &rows, None, compute).unwrap();
    let keys = rig.cache.index_keys(Layer(0)).unwrap();
    let foreign = HostDevice::new(HostOptions::default()).allocate(64).unwrap();
    let mut kind = |ranges: &[_], rate, stream| {
        let result = rig.cache.prefetch(&step, ranges, rate, compute, stream);
        result.err().map(|error| error.kind())
    };
    assert_eq!(kind(&[keys], 1, Stream(1 << 40)), Some(Kind::OutOfRange));
    assert_eq!(kind(&[keys, foreign], 1, side), Some(Kind::OutOfRange));
    assert_eq!(kind(&[keys], 0, side), Some(Kind::OutOfRange));
    assert_eq!(kind(&[keys, keys], 1, side), None);
    assert_eq!(kind(&[keys], 1, other), Some(Kind::InvalidConfig));
    rig.cache.abandon(&mut step).unwrap();
    assert_eq!(rig.cache.prefetch(&step, &[keys], 1, compute, side), Ok(()));
    rig.cache.finish(&mut step, compute).unwrap();
    let error = rig.cache.prefetch(&step, &[keys], 1, compute, side).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidState);
    assert_eq!(rig.watch.conflict(), None);
}
