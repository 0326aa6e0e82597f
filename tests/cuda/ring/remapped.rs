//! Layers that are remapped around captured steps: never while a step is open or captured, nor under a pull.

use std::sync::Arc;

use forebay::weights::{RingOptions, Wrap};
use forebay::{Cache, Config, Kind, Memory, Shape};
use forebay_standin::Options;

use super::{AHEAD, Engine, SMALL, Setup, delayed};
use crate::rig::{driver, own};

#[test]
fn no_layer_is_remapped_while_a_step_is_open_or_captured() {
    let Some(driver) = driver(delayed(None)) else { return };
    let mut engine = SMALL.alone(driver.library());
    let (device, first) = (Arc::clone(&engine.device), engine.streams[0]);
    let refused = |engine: &mut Engine| {
        let resident = engine.ring.make_resident(2, first).unwrap_err();
        let sharded = engine.ring.make_sharded(3).unwrap_err();
        assert_eq!([resident.kind(), sharded.kind()], [Kind::Busy; 2]);
        assert_eq!([resident.number("rank"), sharded.number("rank")], [Some(0); 2]);
        let budgets = [engine.ring.shrink(u64::MAX), engine.ring.grow(u64::MAX, first)];
        assert!(budgets.iter().all(|it| it.as_ref().is_err_and(|error| error.kind() == Kind::Busy)));
        assert!(resident.place().starts_with("layer 2: ") && sharded.place().starts_with("layer 3: "));
        [resident.place().to_owned(), sharded.place().to_owned()]
    };
    let is =
        |places: [String; 2], what: &str| assert!(places.iter().all(|it| it.ends_with(what)), "{places:?}");
    engine.begin().unwrap();
    is(refused(&mut engine), "while a step is open");
    engine.use_all(0, 3).unwrap();
    is(refused(&mut engine), "while a step is open");
    engine.ring.abandon().unwrap();
    engine.begin().unwrap();
    device.capture(first).unwrap();
    engine.use_all(0, 3).unwrap();
    is(refused(&mut engine), "while a step is captured");
    engine.use_all(3, 6).unwrap();
    is(refused(&mut engine), "while a step is captured");
    // The capture is as it was.
    engine.ring.end(first).unwrap();
    engine.graph = Some(device.captured(first).unwrap());
    engine.turn(2);
    engine.launch();
    engine.compare().unwrap();
}

/// A remap cannot be a part of a graph: the call says so, and the capture goes on.
#[test]
fn no_layer_is_remapped_on_a_stream_that_is_captured() {
    let Some(driver) = driver(delayed(None)) else { return };
    let mut engine = SMALL.alone(driver.library());
    let (device, first) = (Arc::clone(&engine.device), engine.streams[0]);
    engine.capture().unwrap();
    device.capture(first).unwrap();
    let error = engine.ring.make_resident(2, first).unwrap_err();
    let place = "layer 2: it cannot be remapped on a stream that is captured";
    assert_eq!((error.kind(), error.place(), error.number("rank")), (Kind::Busy, place, Some(0)));
    assert!(device.is_capturing(first).unwrap() && !engine.is_resident(2));
    device.release(device.captured(first).unwrap()).unwrap();
    engine.turn(2);
    engine.launch();
    engine.compare().unwrap();
}

/// A driver gives no order to a change of mappings: the pulls behind a launch have to be over.
#[test]
fn a_layer_is_remapped_behind_the_pulls_that_are_under_way() {
    for waits in [true, false] {
        let Some(standin) = own(delayed(None), "tells of a wait that never ends") else { return };
        let mut engine = SMALL.wrapped(Wrap::Behind).alone(standin.library());
        engine.capture().unwrap();
        let (own, first) = (engine.ring.stream(0).unwrap(), engine.streams[0]);
        if waits {
            standin.hold(own.0);
        }
        engine.launch();
        engine.compare().unwrap();
        // The pull behind the launch is on the stream that is held. The call ends before it changes a mapping.
        let before = standin.calls_of(c"cuMemUnmap");
        let refused = engine.ring.make_resident(engine.first_layers()[1], first).is_err();
        let unmapped = standin.calls_of(c"cuMemUnmap") > before;
        standin.let_go(own.0);
        assert_eq!((refused, unmapped), (waits, !waits));
    }
}

/// Nor to a change under a prefetch: it has to be over, when all pulls are.
#[test]
fn a_layer_is_remapped_behind_the_prefetch_that_is_under_way() {
    for waits in [true, false] {
        let Some(standin) = own(delayed(None), "tells of a wait that never ends") else { return };
        let ring = RingOptions { prefetch: AHEAD, ..SMALL.ring };
        let mut engine = Setup { ring, ..SMALL }.alone(standin.library());
        let (ahead, first) = (engine.ring.prefetch_stream().unwrap(), engine.streams[0]);
        if waits {
            standin.hold(ahead.0);
        }
        engine.begin().unwrap();
        engine.enter(0, 0).unwrap();
        engine.leave(0, 0).unwrap();
        engine.ring.abandon().unwrap();
        let before = standin.calls_of(c"cuMemUnmap");
        let refused = engine.ring.make_resident(1, first).is_err();
        let unmapped = standin.calls_of(c"cuMemUnmap") > before;
        standin.let_go(ahead.0);
        assert_eq!((refused, unmapped), (waits, !waits));
    }
}

/// A device that is full of resident weights has room for a cache when some layers are sharded again, and for some of
/// them again beside the cache. A step that was captured before goes on in between.
#[test]
fn weights_that_become_sharded_leave_their_memory_to_a_cache() {
    let options = Options { granule: 1 << 17, memory: 64 << 20, ..delayed(None) };
    let Some(standin) = own(options, "has little memory") else { return };
    let mut engine = SMALL.alone(standin.library());
    engine.capture().unwrap();
    let (device, first) = (Arc::clone(&engine.device), engine.streams[0]);
    let least = engine.ring.pulls().device_bytes();
    let most = engine.ring.grow(u64::MAX, first).unwrap();
    let rest: Vec<_> = std::iter::from_fn(|| device.backing(device.granularity()).ok()).collect();
    assert!(most > least + (1 << 20) && !rest.is_empty(), "{least} {most}");
    let cache = || {
        let shape =
            Shape { layers: 2, draft_layers: 0, runs: [64, 0], page_tokens: 16, top_k: 8, ..Shape::GLM_5 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        Cache::new(Config { memory, ..Config::new(shape, 1, 64, 16) }, device.clone())
    };
    engine.launch();
    engine.compare().unwrap();
    assert_eq!(cache().unwrap_err().kind(), Kind::OutOfMemory);
    assert_eq!(engine.ring.shrink(least), Ok(least));
    let cache = cache().unwrap();
    engine.launch();
    engine.compare().unwrap();
    // The device has less left than the budget.
    let error = engine.ring.grow(u64::MAX, first).unwrap_err();
    let layer = error.number("layer").unwrap() as usize;
    assert_eq!((error.kind(), engine.is_resident(layer)), (Kind::OutOfMemory, false));
    // Layers before it in the order stay resident, and nothing behind it.
    let resident: Vec<usize> = (0..SMALL.layers).filter(|layer| engine.is_resident(*layer)).collect();
    let order = [0, 4, 2, 1, 5, 3];
    let before = order.iter().position(|it| *it == layer).unwrap();
    assert!(before > 0 && order[..before].iter().all(|it| resident.contains(it)), "{layer}: {resident:?}");
    assert_eq!(resident.len(), before);
    assert!(engine.ring.pulls().device_bytes() > least);
    engine.launch();
    engine.compare().unwrap();
    drop(cache);
}
