//! A group's layers by `Cache::overlap`, beside an engine's own calls.

use forebay::device::host::HostOptions;
use forebay::device::{SplitIndices, Stream};
use forebay::overlap::{EngineCall, Overlap, OverlapStreams};
use forebay::{BringUp, Buffers, Kind, Layer, LayerCall, Layers, Step, Streams};

use crate::device::TestDevice;
use crate::{Engine, K, LAYERS, config, refused};

/// An engine that enqueues nothing: its selection is in the buffer.
struct Idle;

impl forebay::overlap::Engine for Idle {
    fn enqueue(&mut self, _: &EngineCall, _: Stream) -> forebay::Result<()> {
        Ok(())
    }
}

/// The schedule resolves a group in its first layer, also for layers that the engine gathers itself.
#[test]
fn a_first_layer_of_the_schedule_resolves_for_layers_that_the_engine_calls() {
    let mut e = Engine::new(config(), TestDevice::new(HostOptions::default()));
    e.start(200, 40, BringUp::Nothing);
    let (mut step, buffers) = e.begin();
    let own = e.stream;
    let streams = OverlapStreams { compute: own, resolve: own, gather: own, scatter: own };
    let layers = Layers { streams, batch: 1, half: 1, buffers };
    for layer in 0..LAYERS {
        let call = LayerCall::whole(Layer(layer));
        if layer == 1 {
            e.cache.overlap(&mut step, Layer(1), None, Overlap::None, &layers, &mut Idle).unwrap();
            continue;
        }
        e.cache.layer(&step, call, Streams { resolve: own, gather: own }, buffers).unwrap();
        e.cache.scatter(&step, call, own).unwrap();
    }
    e.cache.finish(&mut step, own).unwrap();
    e.settle();
    let counts = e.cache.retire(step, own).unwrap().total();
    assert_eq!(counts, (0, u64::from(K * LAYERS)));
}

/// Ends a step whose layers are not all enqueued, so that its sequence can take part in another one.
fn give_up(e: &mut Engine, mut step: Step) {
    e.cache.abandon(&mut step).unwrap();
    e.cache.finish(&mut step, e.stream).unwrap();
    e.settle();
    assert!(e.cache.retire(step, e.stream).is_err());
    e.truncate(0, 0);
}

/// In the orders da and ahead, a layer's gather follows an event of the schedule that resolved for it.
#[test]
fn a_layer_hides_its_gather_only_behind_a_layer_that_the_schedule_resolved() {
    let mut e = Engine::new(config(), TestDevice::new(HostOptions::default()));
    e.start(200, 40, BringUp::Nothing);
    let (mut step, buffers) = e.begin();
    let (own, gather) = (e.stream, e.device.stream().unwrap());
    let streams = OverlapStreams { compute: own, resolve: own, gather, scatter: own };
    let words = |count: u32| e.device.allocate(4 * u64::from(count)).unwrap();
    let lists = SplitIndices { lists: words(2 * K), counts: words(2), batch: 1 };
    let buffers = Buffers { split_indices: Some(lists), ..buffers };
    let layers = Layers { streams, batch: 1, half: 1, buffers };
    let mut overlap = |e: &mut Engine, layer, order| {
        e.cache.overlap(&mut step, Layer(layer), None, order, &layers, &mut Idle).map_err(refused)
    };
    let lone = (Kind::InvalidConfig, "the order ahead in a layer that selects for itself".to_owned());
    let early = "the schedule has not resolved the layer that selects for this one".to_owned();
    let early = Err((Kind::InvalidState, early));
    for layer in [0, 1, 4] {
        assert_eq!(overlap(&mut e, layer, Overlap::Ahead), Err(lone.clone()));
    }
    overlap(&mut e, 0, Overlap::Da).unwrap();
    for order in [Overlap::Da, Overlap::Dba, Overlap::Ahead] {
        assert_eq!(overlap(&mut e, 2, order), early);
    }
    overlap(&mut e, 1, Overlap::None).unwrap();
    overlap(&mut e, 2, Overlap::Ahead).unwrap();
    overlap(&mut e, 3, Overlap::Da).unwrap();
    overlap(&mut e, 4, Overlap::Dba).unwrap();
    e.cache.finish(&mut step, own).unwrap();
    e.settle();
    assert_eq!(e.cache.retire(step, own).unwrap().total(), (0, u64::from(K * LAYERS)));
    // Attention is split by index lists, which the layer that selects has not written here.
    let (mut step, _) = e.begin();
    let plain = Layers { buffers: Buffers { split_indices: None, ..buffers }, ..layers };
    e.cache.overlap(&mut step, Layer(1), None, Overlap::None, &plain, &mut Idle).unwrap();
    let error = e.cache.overlap(&mut step, Layer(2), None, Overlap::Da, &layers, &mut Idle).unwrap_err();
    let lists = "the layer that selects for this one has written no index lists".to_owned();
    assert_eq!(refused(error), (Kind::InvalidState, lists));
    e.cache.overlap(&mut step, Layer(2), None, Overlap::Ahead, &plain, &mut Idle).unwrap();
    // The engine has resolved another layer since.
    e.cache.layer(&step, LayerCall::whole(Layer(4)), Streams { resolve: own, gather: own }, buffers).unwrap();
    let error = e.cache.overlap(&mut step, Layer(3), None, Overlap::Ahead, &layers, &mut Idle).unwrap_err();
    assert_eq!(Err(refused(error)), early);
    give_up(&mut e, step);
    // A first layer that the engine resolves has no event of the schedule, whatever order other layers ran in.
    let (mut step, _) = e.begin();
    e.cache.layer(&step, LayerCall::whole(Layer(1)), Streams { resolve: own, gather: own }, buffers).unwrap();
    e.cache.overlap(&mut step, Layer(2), None, Overlap::None, &layers, &mut Idle).unwrap();
    for order in [Overlap::Da, Overlap::Ahead] {
        let error = e.cache.overlap(&mut step, Layer(3), None, order, &layers, &mut Idle).unwrap_err();
        assert_eq!(Err(refused(error)), early);
    }
    give_up(&mut e, step);
    // For all layers at once, nothing is enqueued either.
    let (mut step, _) = e.begin();
    let orders = [Overlap::None, Overlap::Ahead, Overlap::Ahead, Overlap::Ahead, Overlap::None];
    let steps = &mut [(&mut step, layers)];
    let error = e.cache.overlap_steps(steps, &orders, 0, &mut Idle).unwrap_err();
    assert_eq!((error.number("layer"), refused(error)), (Some(1), lone));
    let orders = [Overlap::None, Overlap::None, Overlap::Ahead, Overlap::Ahead, Overlap::None];
    e.cache.overlap_steps(steps, &orders, 0, &mut Idle).unwrap();
    e.cache.finish(&mut step, own).unwrap();
    e.settle();
    assert_eq!(e.cache.retire(step, own).unwrap().total().0, u64::from(K * LAYERS));
}
