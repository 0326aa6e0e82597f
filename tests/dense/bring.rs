//! Pages that come back layer by layer: what a step has to do, and what it gains.

use std::sync::Arc;

use crate::device::TestDevice;
use forebay::dense::{Cache, Config, Group, Open, Shape};
use forebay::device::clock::{ClockDevice, ClockOptions, Costs, Demand, Label};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Kind, Memory, MicroBatch, Sequence, Tokens};

const LAYERS: u32 = 6;

fn config(bring_layers: u32) -> Config {
    let shape = Shape {
        page_tokens: 16,
        groups: vec![Group { layers: (0..LAYERS).collect(), runs: [2048, 2048], window: None }],
    };
    let mut config = Config::new(shape, 2, 256);
    config.memory = Memory { huge: false, populate: false, lock: false, node: None };
    (config.device_pages, config.host_pages, config.bring_layers) = (vec![17], vec![16], bring_layers);
    config
}

fn row(sequence: Sequence, query_rows: u32) -> [BatchRow; 1] {
    [BatchRow { sequence, accepted: Accepted::Rows(0), query_rows }]
}

/// A cache whose first sequence was published and saved, and whose pages another one has taken and left.
fn saved(config: Config, device: Arc<dyn Device>, stream: Stream, run: impl Fn()) -> (Cache, Vec<u32>) {
    let ids: Vec<u32> = (0..240).collect();
    let mut cache = Cache::new(config, device).unwrap();
    let none = cache.names(b"", Tokens::new(&[])).unwrap();
    let open = Open { prompt: 240, promised: 8 };
    for times in 0..2 {
        let sequence = cache.open_shared(&open, &none, stream).unwrap().sequence;
        if times == 0 {
            let mut step = cache.prepare(MicroBatch(0), &row(sequence, 240), None, stream).unwrap();
            cache.arrived(&step, LAYERS - 1, stream).unwrap();
            cache.finish(&mut step, stream).unwrap();
            run();
            cache.retire(step, stream).map(drop).map_err(|unretired| unretired.error).unwrap();
            assert_eq!(cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 240);
            assert!(cache.save(stream, u64::MAX).unwrap() > 0);
        }
        cache.close(sequence, stream).unwrap();
        run();
    }
    (cache, ids)
}

/// The time from opening to the end of the first step, and what the copies take alone, in nanoseconds.
fn first_step(bring_layers: u32, layer_ns: f64) -> (f64, f64) {
    // A slow link: the copies take about as long as the layers.
    let costs = Costs { launch_ns: 0.0, ..Costs::default() };
    let host = HostDevice::new(HostOptions::default());
    let options = ClockOptions { costs, record: true, ..ClockOptions::default() };
    let clock = ClockDevice::over(host, options).unwrap();
    let [main, side] = [(); 2].map(|()| clock.stream().unwrap());
    let run = || assert!(clock.run().is_ok());
    let (mut cache, ids) = saved(config(bring_layers), clock.clone(), main, run);
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    let began = clock.now();
    let opened = cache.open_shared(&Open { prompt: 241, promised: 8 }, &names, side).unwrap();
    assert_eq!((opened.found.tokens, opened.found.host_tokens), (240, 240));
    let mut step = cache.prepare(MicroBatch(0), &row(opened.sequence, 1), None, main).unwrap();
    for layer in 0..LAYERS {
        cache.arrived(&step, layer, main).unwrap();
        clock
            .compute(
                main,
                Label { name: "layer", layer: None, micro_batch: None },
                Demand { ns: layer_ns, sm: 0.5 },
            )
            .unwrap();
    }
    cache.finish(&mut step, main).unwrap();
    let ended = clock.run().unwrap();
    let copies = clock.spans().into_iter().filter(|span| span.start_ns >= began && span.name == "copy pages");
    (ended - began, copies.map(|span| span.end_ns - span.start_ns).sum())
}

/// On a clock: with all pages first, a step takes the copies and its layers; layer by layer it takes the longer of the
/// two and one layer of the other.
#[test]
fn copies_of_later_layers_run_beside_earlier_ones() {
    let (_, copies) = first_step(0, 1000.0);
    let layer = copies / f64::from(LAYERS);
    let (whole, _) = first_step(0, layer);
    let (by_layer, parts) = first_step(1, layer);
    let (by_two, _) = first_step(2, layer);
    let overhead = whole - 2.0 * copies;
    let fixed = parts - copies;
    assert!(overhead >= 0.0 && overhead < 0.5 * copies, "{whole} {copies}");
    assert!(by_layer <= parts + layer + overhead + 1.0, "{by_layer} {parts} {layer}");
    assert!(by_layer + fixed < by_two && by_two < whole, "{by_layer} {by_two} {whole} {fixed}");
}

#[test]
fn a_step_that_does_not_wait_for_a_layer_is_not_finished() {
    let test = TestDevice::new(HostOptions::default());
    let stream = test.stream().unwrap();
    let (mut cache, _) = saved(config(2), test.device(), stream, || {});
    // No pages are coming, and the engine learns it even so.
    let sequence = cache.open(&Open { prompt: 1, promised: 8 }).unwrap();
    let mut step = cache.prepare(MicroBatch(0), &row(sequence, 1), None, stream).unwrap();
    cache.arrived(&step, 3, stream).unwrap();
    let error = cache.finish(&mut step, stream).unwrap_err();
    assert_eq!((error.kind(), error.number("first layer")), (Kind::InvalidState, Some(4)), "{error}");
    let error = cache.arrived(&step, LAYERS, stream).unwrap_err();
    assert_eq!((error.kind(), error.number("layers")), (Kind::OutOfRange, Some(LAYERS.into())));
    cache.arrived(&step, LAYERS - 1, stream).unwrap();
    cache.finish(&mut step, stream).unwrap();
    assert_eq!(cache.arrived(&step, 0, stream).unwrap_err().kind(), Kind::InvalidState);
    cache.retire(step, stream).map(drop).map_err(|unretired| unretired.error).unwrap();
    // The engine cannot enqueue the next one.
    let mut step = cache.prepare(MicroBatch(0), &row(sequence, 1), None, stream).unwrap();
    cache.abandon(&mut step).unwrap();
    cache.finish(&mut step, stream).unwrap();
}

/// A sequence that shares pages on their way has them when its own ticket ends.
#[test]
fn the_ticket_of_a_sharing_sequence_ends_after_the_copies_of_another() {
    let host = HostDevice::new(HostOptions::default());
    let clock = ClockDevice::over(host, ClockOptions::default()).unwrap();
    let [main, side, other] = [(); 3].map(|()| clock.stream().unwrap());
    let config = Config { device_pages: vec![18], ..config(1) };
    let (mut cache, ids) = saved(config, clock.clone(), main, || assert!(clock.run().is_ok()));
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    clock.hold(side).unwrap();
    let open = Open { prompt: 240, promised: 8 };
    let [first, second] = [side, other].map(|stream| cache.open_shared(&open, &names, stream).unwrap());
    assert_eq!((first.found.host_tokens, second.found.host_tokens), (224, 0));
    let (late, label) = (clock.event().unwrap(), Label { name: "late", layer: None, micro_batch: None });
    clock.compute(main, label, Demand { ns: 1e9, sm: 0.5 }).unwrap();
    clock.record(late, main).unwrap();
    clock.synchronize(late).unwrap();
    assert!(first.ticket.poll().is_none() && second.ticket.poll().is_none());
    clock.let_go(side).unwrap();
    clock.run().unwrap();
    assert!(first.ticket.poll().is_some() && second.ticket.poll().is_some());
}
