//! Its edges order every schedule, and every edge is needed. With the device watched (`check::watch`), steps of two
//! micro-batches run in every order of work, with attention waves; leaving out any wait that orders something gives a
//! conflict.
//!
//! The tests time nothing and hold no stream back: they check what the edges allow, not what one run happened to do.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "order/prefetch.rs"]
mod prefetch;
#[path = "order/reuse.rs"]
mod reuse;
#[path = "order/rig.rs"]
mod rig;
#[path = "order/ring.rs"]
mod ring;

use forebay::device::{Device, Stream};
use forebay::overlap::{Attended, Engine, EngineCall, Overlap, OverlapStreams, Work};
use forebay::residency::QueryRange;
use forebay::{Budget, Buffers, Config, Kind, Layer, LayerCall, MicroBatch, Result, SLOT_BLOCK, Shape};
use forebay::{Slots, Streams};
use rig::{BATCH, Caller, PROMPT, Rig, Sharing, config, grouped};

const ORDERS: [[Overlap; 3]; 5] = [
    [Overlap::None; 3],
    [Overlap::Da; 3],
    [Overlap::Dba; 3],
    [Overlap::Dba, Overlap::None, Overlap::Da],
    [Overlap::Da, Overlap::Dba, Overlap::None],
];

#[test]
fn every_order_of_a_step_is_ordered_by_its_edges() {
    for (orders, sharing, waves) in cases() {
        let mut rig = Rig::new(waves, sharing, None);
        rig.fill().unwrap();
        rig.run(orders, 3).unwrap_or_else(|error| panic!("{orders:?} {sharing:?} {waves}: {error}"));
        rig.retire();
        rig.run(orders, 3).unwrap();
        rig.retire();
        assert_eq!(rig.watch.conflict(), None);
        rig.cache.validate().unwrap();
    }
}

/// Orders of three layers that share a selection, and of a draft layer.
const GROUPED: [[Overlap; 4]; 6] = [
    [Overlap::None; 4],
    [Overlap::Da; 4],
    [Overlap::Dba, Overlap::Ahead, Overlap::Ahead, Overlap::Dba],
    [Overlap::None, Overlap::Ahead, Overlap::Da, Overlap::None],
    [Overlap::Da, Overlap::None, Overlap::Ahead, Overlap::Da],
    [Overlap::None, Overlap::None, Overlap::Ahead, Overlap::Dba],
];

/// A layer that another one selects for has fewer edges. Its gather follows R, which the gather before it on that
/// stream may already do; its attention follows the gather, and S the preparation.
#[test]
fn each_edge_of_layers_that_share_a_selection_is_needed() {
    let cases = GROUPED.into_iter().flat_map(|orders| KINDS.map(|(sharing, waves)| (orders, sharing, waves)));
    for (orders, sharing, waves) in cases {
        let found = each_wait_left_out(
            |without| Rig::with(grouped(waves), sharing, without),
            Rig::fill,
            |rig| rig.run(orders, 2),
            |rig| rig.step(orders, 1),
        );
        let early = |order: &&Overlap| **order != Overlap::None;
        let gathers = orders[1..3].iter().filter(early).count();
        // S of the first layer follows R too.
        let follows = sharing == Sharing::Two || orders[0] != Overlap::None;
        let first_on_stream = usize::from(!follows && gathers > 0);
        let followers = 2 + gathers * (1 + 2 * (waves as usize - 1)) + first_on_stream;
        let [first, draft] = [orders[0], orders[3]].map(|order| edges(order, sharing, waves));
        let step = 2 * (first + followers + 2 * draft + join(orders[3], sharing));
        assert_eq!(found[0], 2 * step + 6, "{orders:?}, {sharing:?}, {waves} waves: {found:?}");
    }
}

/// By micro-batch, layer call and order: the edges that the schedule's head draws.
fn edges(order: Overlap, sharing: Sharing, waves: u32) -> usize {
    match (order, sharing) {
        (Overlap::None, _) => 1,
        (Overlap::Da, Sharing::Two) => 3 + 2 * (waves as usize - 1),
        (Overlap::Da, _) => 5 + 2 * (waves as usize - 1),
        (Overlap::Dba, Sharing::Two) => 4 + 2 * (waves as usize - 1),
        (Overlap::Dba, _) => 7 + 2 * (waves as usize - 1),
        (Overlap::Ahead, _) => panic!("a layer that selects for itself cannot run ahead"),
    }
}

/// Where S shares G's stream, it already follows the last gather.
fn join(last: Overlap, sharing: Sharing) -> usize {
    usize::from(sharing != Sharing::Two || last == Overlap::None)
}

/// Leaves out, one by one, each wait that `run` makes after `setup`, and checks that `run` is refused as often as the
/// wait ordered something. Returns how many waits did, and how many did not.
fn each_wait_left_out(
    new: impl Fn(Option<u64>) -> Rig,
    setup: impl Fn(&mut Rig) -> Result<()>,
    run: impl Fn(&mut Rig) -> Result<()>,
    witness: impl Fn(&mut Rig) -> Result<()>,
) -> [usize; 2] {
    let mut whole = new(None);
    setup(&mut whole).unwrap();
    let first = whole.watch.waits();
    run(&mut whole).unwrap();
    let last = whole.watch.waits();
    witness(&mut whole).unwrap();
    assert_eq!(whole.watch.conflict(), None);
    let mut found = [0; 2];
    for number in first..last {
        let mut rig = new(Some(number));
        setup(&mut rig).unwrap();
        let ran = run(&mut rig).and_then(|()| witness(&mut rig));
        let left_out = rig.watch.left_out().unwrap();
        assert_eq!(
            ran.is_err(),
            left_out.ordering,
            "wait {} of {}: {left_out:?} {ran:?}",
            number - first,
            last - first
        );
        found[usize::from(!left_out.ordering)] += 1;
    }
    found
}

/// Which streams are one, and waves.
const KINDS: [(Sharing, u32); 5] =
    [(Sharing::None, 1), (Sharing::None, 2), (Sharing::Two, 1), (Sharing::Two, 2), (Sharing::Copies, 1)];

/// Orders, which streams are one, and waves.
fn cases() -> impl Iterator<Item = ([Overlap; 3], Sharing, u32)> {
    ORDERS.into_iter().flat_map(|orders| KINDS.map(|(sharing, waves)| (orders, sharing, waves)))
}

/// Two steps, and a third one that stands for any later work. A wait that orders nothing is for work of the same
/// stream, or of one that another wait covers: it is there for engines that use other streams.
#[test]
fn each_edge_left_out_is_caught() {
    for (orders, sharing, waves) in cases() {
        let found = each_wait_left_out(
            |without| Rig::new(waves, sharing, without),
            Rig::fill,
            |rig| rig.run(orders, 2),
            |rig| rig.step(orders, 1),
        );
        let [first, second, draft] = orders.map(|order| edges(order, sharing, waves));
        let step = 2 * (first + second + 2 * draft + join(orders[2], sharing));
        assert_eq!(found[0], 2 * step + 6, "{orders:?}, {sharing:?}, {waves} waves: {found:?}");
    }
}

/// What the host issues for a sequence, each on a stream of its own: a warm-up in stretches, a truncation, a fork, a
/// close, and a join of a used lane; with steps between them.
fn lives<const LAYERS: usize>(rig: &mut Rig, orders: [Overlap; LAYERS]) -> Result<()> {
    let stream = |rig: &Rig| rig.watch.stream().unwrap();
    rig.step(orders, 0)?;
    rig.retire();
    let (first, second) = (rig.sequences[0], rig.sequences[1]);
    let _ticket = rig.cache.truncate(first, PROMPT + 1, stream(rig))?;
    rig.step(orders, 0)?;
    rig.retire();
    let _ticket = rig.cache.truncate(first, PROMPT - 5, stream(rig))?;
    let (child, _ticket) = rig.cache.fork(first, &Rig::asks(4), stream(rig))?;
    rig.cache.close(second, stream(rig))?;
    rig.cache.close(rig.sequences[2], stream(rig))?;
    // Both lanes have new sequences.
    rig.sequences[1] = rig.admit_warm(5)?;
    rig.sequences[2] = rig.admit(6)?;
    rig.step(orders, 0)?;
    rig.step(orders, 1)?;
    rig.retire();
    // The parent and its fork continue to decode in one batch.
    rig.cache.close(rig.sequences[1], stream(rig))?;
    rig.sequences[1] = child;
    rig.step(orders, 0)
}

#[test]
fn operations_of_the_host_are_ordered_by_their_edges() {
    let new = |without| Rig::new(1, Sharing::None, without);
    let run = |rig: &mut Rig| lives(rig, [Overlap::Dba; 3]);
    let found = each_wait_left_out(new, Rig::fill, run, |rig| rig.step([Overlap::None; 3], 1));
    assert!(found[0] > 2 * found[1] && found[1] > 0, "{found:?}");
    let new = |without| Rig::with(grouped(1), Sharing::None, without);
    let run = |rig: &mut Rig| lives(rig, GROUPED[2]);
    let found = each_wait_left_out(new, Rig::fill, run, |rig| rig.step(GROUPED[0], 1));
    assert!(found[0] > 2 * found[1] && found[1] > 0, "{found:?}");
}

/// Sequences that park and resume, each call on a stream of its own. Places are written again after a close, so that no
/// one has read them, and after a resume, which has.
fn parks_and_resumes(rig: &mut Rig) -> Result<()> {
    let stream = |rig: &Rig| rig.watch.stream().unwrap();
    let ([first, second, third], fourth) = ([0, 1, 2].map(|row| rig.sequences[row]), rig.sequences[3]);
    let held = stream(rig);
    rig.clock.iter().try_for_each(|clock| clock.hold(held))?;
    rig.cache.park(first, 1, held)?;
    rig.cache.close(first, rig.stream)?;
    rig.settle()?;
    assert_eq!(rig.cache.reap(rig.stream)?, 0);
    rig.cache.park(second, 0, stream(rig))?;
    rig.sequences[0] = rig.admit(4)?;
    rig.cache.park(third, 2, stream(rig))?;
    let _ticket = rig.cache.resume(second, stream(rig), 0)?;
    rig.cache.park(fourth, 1, stream(rig))?;
    let _ticket = rig.cache.resume(third, stream(rig), 0)?;
    // Both places again, which two streams have read.
    let last = stream(rig);
    let _ticket = rig.cache.resume(fourth, last, 0)?;
    for row in [4, 5] {
        rig.cache.park(rig.sequences[row], 1, stream(rig))?;
    }
    for row in [4, 5] {
        let _ticket = rig.cache.resume(rig.sequences[row], last, 0)?;
    }
    // One has another micro-batch than before.
    rig.sequences.swap(0, 5);
    rig.step([Overlap::Dba; 3], 0)
}

#[test]
fn each_wait_left_out_of_a_park_or_resume_is_caught() {
    let new = |without| Rig::on_clock(Config { parked: 2, ..config(1) }, Sharing::None, without);
    let setup = |rig: &mut Rig| -> Result<()> {
        rig.fill()?;
        rig.step([Overlap::None; 3], 0)?;
        rig.settle()?;
        rig.retire();
        Ok(())
    };
    let mut whole = new(None);
    setup(&mut whole).unwrap();
    let first = whole.watch.waits();
    parks_and_resumes(&mut whole).unwrap();
    let last = whole.watch.waits();
    assert_eq!(whole.watch.conflict(), None);
    // Waits without which something goes wrong, and waits that a later one covers. The others order nothing.
    let [mut needed, mut covered] = [Vec::new(), Vec::new()];
    for number in first..last {
        let mut rig = new(Some(number));
        setup(&mut rig).unwrap();
        let ran = parks_and_resumes(&mut rig).and_then(|()| rig.step([Overlap::None; 3], 1));
        match (ran.is_err(), rig.watch.left_out().unwrap().ordering) {
            (true, true) => needed.push(number - first),
            (false, true) => covered.push(number - first),
            (false, false) => (),
            (true, false) => panic!("wait {} orders nothing, and is needed: {ran:?}", number - first),
        }
    }
    assert_eq!([needed.len(), covered.len()], [72, 4], "{needed:?} {covered:?}");
}

/// A rig in which one slot block is free. Its operations end late, so that no query tells the host of an order that it
/// has not made itself.
fn late(without: Option<u64>) -> Rig {
    let slots = Slots::Uniform((2 * BATCH + 1) * SLOT_BLOCK);
    Rig::on_clock(Config { slots, ..config(1) }, Sharing::None, without)
}

/// The first sequence takes the free block; then steps of both micro-batches are in flight.
fn take_the_last_block(rig: &mut Rig) -> Result<()> {
    let stream = rig.stream;
    rig.fill()?;
    rig.step([Overlap::None; 3], 0)?;
    rig.settle()?;
    rig.retire();
    rig.cache.resize(rig.sequences[0], &Budget::Slots(100), stream)?;
    let full = rig.cache.resize(rig.sequences[BATCH as usize], &Budget::Slots(100), stream).unwrap_err();
    assert_eq!(full.kind(), Kind::Exhausted);
    rig.settle()?;
    rig.step([Overlap::None; 3], 1)
}

/// The first sequence gives its second block up, and one of the other micro-batch takes it, each on a stream of its
/// own. A step of both follows.
fn pass_a_block_on(rig: &mut Rig) -> Result<()> {
    let [gives, takes] = [rig.watch.stream()?, rig.watch.stream()?];
    rig.clock.iter().try_for_each(|clock| clock.hold(gives))?;
    rig.cache.resize(rig.sequences[0], &Budget::Slots(5), gives)?;
    rig.cache.resize(rig.sequences[BATCH as usize], &Budget::Slots(100), takes)?;
    rig.step([Overlap::Dba; 3], 1)
}

#[test]
fn each_wait_left_out_of_a_resize_is_caught() {
    let witness = |rig: &mut Rig| rig.step([Overlap::None; 3], 1);
    let step = |rig: &mut Rig| rig.step([Overlap::Dba; 3], 1);
    let alone = each_wait_left_out(late, take_the_last_block, step, witness);
    let found = each_wait_left_out(late, take_the_last_block, pass_a_block_on, witness);
    // By sequence its last step before the resize, and the resize before its next step; and the block that passes on.
    // Before the first resize no block was given up that it could take.
    assert_eq!([found[0] - alone[0], found[1] - alone[1]], [5, 1], "{found:?} {alone:?}");
}

/// An edge that the steps below leave out.
#[derive(Clone, Copy, PartialEq)]
enum Missing {
    Nothing,
    /// The work after a layer does not wait for its attention.
    Attended,
    /// Nor for its gather.
    Gathered,
    /// The scatter runs before the write of its landing slots, and is ordered there.
    Written,
}

/// A step of one micro-batch in the order `none`, enqueued by hand, attention on a stream of its own.
fn step_by_hand(rig: &mut Rig, missing: Missing, accepted: u32) -> Result<()> {
    let OverlapStreams { compute, resolve, gather, scatter } = rig.micro[0].streams;
    let (mut caller, attention) = (rig.caller(), rig.stream);
    let watch = rig.watch.clone();
    let edge = |from, to| {
        let event = watch.event()?;
        watch.record(event, from)?;
        watch.wait(to, event)
    };
    let rows = rig.rows(0, accepted);
    let (width, buffers) = (rows[0].query_rows, rig.micro[0].layers().buffers);
    let buffers = Buffers { split_indices: None, ..buffers };
    let mut step = rig.cache.prepare(MicroBatch(0), width, &rows, None, compute)?;
    for layer in [Layer(0), Layer(1)] {
        let mut call = |work, stream| {
            let rows = QueryRange { first: 0, count: width };
            let call = EngineCall { work, micro_batch: MicroBatch(0), layer, first: 0, count: BATCH, rows };
            caller.enqueue(&call, stream)
        };
        // A layer that another one selects for is gathered whenever that one is resolved: it has scratch slots of its
        // own, so its gather need not follow the attention of the layer before.
        let selects = |layer: u32| rig.cache.geometries().first_of(layer as usize) == layer as usize;
        if selects(layer.0) {
            call(Work::Index, compute)?;
            edge(compute, resolve)?;
        }
        rig.cache.layer(&step, LayerCall::whole(layer), Streams { resolve, gather }, buffers)?;
        let store = || {
            edge(compute, scatter)?;
            rig.cache.scatter(&step, LayerCall::whole(layer), scatter)
        };
        if missing == Missing::Written {
            store()?;
            edge(scatter, compute)?;
        }
        call(Work::Prepare, compute)?;
        if missing != Missing::Written {
            store()?;
        }
        if missing == Missing::Gathered {
            // R is waited for; what it finds missing is left alone.
            edge(resolve, compute)?;
            continue;
        }
        edge(gather, compute)?;
        edge(compute, attention)?;
        call(Work::Attend(Attended::All), attention)?;
        if missing != Missing::Attended && (layer.0 == 1 || selects(1)) {
            edge(attention, compute)?;
        }
    }
    edge(scatter, compute)?;
    rig.cache.finish(&mut step, compute)?;
    rig.flights.push(step);
    Ok(())
}

/// A rig whose layers are enqueued by hand: it has no draft layer.
fn hand(without: Option<u64>) -> Rig {
    let config = config(1);
    Rig::with(Config { shape: Shape { draft_layers: 0, ..config.shape }, ..config }, Sharing::None, without)
}

fn by_hand(missing: Missing) -> Result<()> {
    let mut rig = hand(None);
    rig.fill()?;
    step_by_hand(&mut rig, missing, 0)?;
    step_by_hand(&mut rig, missing, 1)?;
    rig.retire();
    Ok(())
}

/// A step may fetch into slots of rows that the attention before it still reads.
#[test]
fn f2_nothing_is_fetched_into_slots_that_attention_still_reads() {
    by_hand(Missing::Nothing).unwrap();
    let error = by_hand(Missing::Attended).unwrap_err().to_string();
    assert!(
        error.contains("which attention (stream") && error.contains("reads, and is not ordered"),
        "{error}"
    );
}

/// No stream and no event is missing here: the stored rows are wrong.
#[test]
fn a_scatter_before_the_write_of_its_landing_slots_is_found() {
    by_hand(Missing::Nothing).unwrap();
    let error = by_hand(Missing::Written).unwrap_err();
    assert_eq!(error.place(), "a landing slot is written after the scatter that stores it");
    // From the second step on, the watch has seen that the engine declares its writes.
    let mut rig = hand(None);
    rig.fill().unwrap();
    step_by_hand(&mut rig, Missing::Nothing, 0).unwrap();
    let error = step_by_hand(&mut rig, Missing::Written, 1).unwrap_err();
    assert_eq!(error.place(), "a scatter comes before the write of its landing slots");
}

/// A victim's slot whose row is still being fetched: the next use of the slot waits for that fetch.
#[test]
fn p4_a_victim_is_not_given_out_while_its_row_is_being_fetched() {
    let error = by_hand(Missing::Gathered).unwrap_err().to_string();
    assert!(
        error.contains("which gather (stream") && error.contains("writes, and is not ordered"),
        "{error}"
    );
    // The same holds in every order of the schedule, though no attention reads the fetched rows.
    for orders in ORDERS {
        let mut rig = Rig { attends: false, ..Rig::new(2, Sharing::None, None) };
        rig.fill().unwrap();
        rig.run(orders, 3).unwrap();
        assert_eq!(rig.watch.conflict(), None);
    }
}

/// An engine that enqueues some of its work on another stream than the one it was given.
struct Stray<'a>(Caller, Stream, &'a mut bool);

impl Engine for Stray<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        if call.work == Work::Prepare && call.layer == Layer(1) {
            *self.2 = true;
            // The engine ignores the result.
            let _ = self.0.enqueue(call, self.1);
            return Ok(());
        }
        self.0.enqueue(call, stream)
    }
}

#[test]
fn an_engine_that_strays_to_another_stream_is_refused() {
    let mut rig = Rig::new(1, Sharing::None, None);
    rig.fill().unwrap();
    let (rows, micro) = (rig.rows(0, 0), rig.micro[0]);
    let (compute, mut strayed) = (micro.streams.compute, false);
    let mut step = rig.cache.prepare(MicroBatch(0), rows[0].query_rows, &rows, None, compute).unwrap();
    let mut stray = Stray(rig.caller(), rig.stream, &mut strayed);
    let mut open = [(&mut step, micro.layers())];
    let error = rig.cache.overlap_steps(&mut open, &[Overlap::Da; 3], 1, &mut stray).unwrap_err();
    assert_eq!((error.kind(), error.number("given")), (Kind::InvalidConfig, Some(compute.0)), "{error}");
    assert!(strayed);
    rig.cache.finish(&mut step, compute).unwrap();
    assert_eq!(rig.cache.retire(step, compute).unwrap_err().error.kind(), Kind::Cancelled);
}

#[test]
fn the_checkers_memory_does_not_grow_with_the_steps() {
    let mut rig = Rig::with(
        Config { max_tokens: 1000, host_pages: 600, index_pages: 600, ..config(1) },
        Sharing::None,
        None,
    );
    rig.fill().unwrap();
    let mut most = [0; 2];
    for round in 0..300 {
        rig.step([Overlap::Dba, Overlap::Da, Overlap::None], 0).unwrap();
        rig.retire();
        let half = &mut most[usize::from(round >= 150)];
        *half = rig.watch.remembered().max(*half);
    }
    assert!((100..1000).contains(&most[0]) && most[1] <= most[0], "{most:?}");
}

/// An engine that orders its layers itself, around `Cache::layer`.
#[test]
fn every_edge_of_an_engine_that_enqueues_by_itself_is_needed() {
    let steps = |rig: &mut Rig| {
        step_by_hand(rig, Missing::Nothing, 0)?;
        step_by_hand(rig, Missing::Nothing, 1)
    };
    let witness = |rig: &mut Rig| step_by_hand(rig, Missing::Nothing, 1);
    // By step and layer I to R, R to G, G to A, P to S, and A to the next layer, once directly and once through the
    // compute stream; S at the step's end, and the three joins before the first step.
    assert_eq!(each_wait_left_out(hand, Rig::fill, steps, witness)[0], 2 * (2 * 6 + 1) + 3);
}

/// The same for layers that share a selection.
fn grouped_hand(without: Option<u64>) -> Rig {
    let config = config(1);
    let shape = Shape { draft_layers: 0, group_layers: 2, ..config.shape };
    Rig::with(Config { shape, ..config }, Sharing::None, without)
}

#[test]
fn every_edge_of_an_engine_that_enqueues_a_group_by_itself_is_needed() {
    let steps = |rig: &mut Rig| {
        step_by_hand(rig, Missing::Nothing, 0)?;
        step_by_hand(rig, Missing::Nothing, 1)
    };
    let witness = |rig: &mut Rig| step_by_hand(rig, Missing::Nothing, 1);
    // Three less a step: the second layer has no I and no R, and need not follow the attention of the first.
    assert_eq!(each_wait_left_out(grouped_hand, Rig::fill, steps, witness)[0], 2 * (5 + 4 + 1) + 3);
}

/// A step of one micro-batch by `Cache::layers`, with R and G on streams of their own.
fn step_of_all_layers(rig: &mut Rig) -> Result<()> {
    let OverlapStreams { compute, resolve, gather, scatter } = rig.micro[0].streams;
    let watch = rig.watch.clone();
    let edge = |from, to| {
        let event = watch.event()?;
        watch.record(event, from)?;
        watch.wait(to, event)
    };
    let rows = rig.rows(0, 0);
    let mut step = rig.cache.prepare(MicroBatch(0), rows[0].query_rows, &rows, None, compute)?;
    let words = 2 * BATCH * rows[0].query_rows * rig.cache.config().shape.top_k;
    let (selection, slots) = (watch.allocate(4 * u64::from(words))?, watch.allocate(4 * u64::from(words))?);
    rig.host.write(selection, &(0..words).flat_map(|word| (word % 30).to_le_bytes()).collect::<Vec<u8>>())?;
    edge(compute, resolve)?;
    rig.cache.layers(&step, Streams { resolve, gather }, selection, slots)?;
    edge(compute, scatter)?;
    for layer in 0..rig.cache.geometries().layers() {
        rig.cache.scatter(&step, LayerCall::whole(Layer(layer)), scatter)?;
    }
    edge(gather, compute)?;
    edge(scatter, compute)?;
    rig.cache.finish(&mut step, compute)?;
    rig.flights.push(step);
    Ok(())
}

/// The resolve of a group overwrites the list that every layer of the group before still gathers from: also the last
/// one, behind which a group of one layer comes.
#[test]
fn a_call_for_all_layers_orders_each_resolve_after_the_gathers_before_it() {
    let new = |without| {
        let config = config(1);
        let shape = Shape { layers: 4, draft_layers: 0, group_layers: 3, ..config.shape };
        Rig::with(Config { shape, ..config }, Sharing::None, without)
    };
    let fill = |rig: &mut Rig| {
        for _ in 0..BATCH {
            let sequence = rig.admit(60)?;
            rig.sequences.push(sequence);
        }
        Ok(())
    };
    let steps = |rig: &mut Rig| (0..2).try_for_each(|_| step_of_all_layers(rig));
    // Begin to R, R to G, G to the next R, that to G, begin to S, and the step's end after G and S.
    assert_eq!(each_wait_left_out(new, fill, steps, step_of_all_layers)[0], 2 * 7 + 3);
}

/// Only the last layer of the group gathers beside the engine's stream; the group behind it has one layer.
#[test]
fn a_resolve_beside_the_last_gather_of_the_group_before_is_found() {
    let config = config(1);
    let shape = Shape { layers: 4, draft_layers: 0, group_layers: 3, ..config.shape };
    let mut rig = Rig::with(Config { shape, ..config }, Sharing::None, None);
    rig.fill().unwrap();
    let OverlapStreams { compute, gather, .. } = rig.micro[0].streams;
    let rows = rig.rows(0, 0);
    let step = rig.cache.prepare(MicroBatch(0), rows[0].query_rows, &rows, None, compute).unwrap();
    let buffers = Buffers { split_indices: None, ..rig.micro[0].layers().buffers };
    for (layer, gather) in [(0, compute), (1, compute), (2, gather)] {
        let streams = Streams { resolve: compute, gather };
        rig.cache.layer(&step, LayerCall::whole(Layer(layer)), streams, buffers).unwrap();
    }
    let error =
        rig.cache.resolve(&step, LayerCall::whole(Layer(3)), compute, buffers).unwrap_err().to_string();
    assert!(error.contains("lists of fetches") && error.contains("not ordered"), "{error}");
}

#[test]
fn streams_of_a_group_may_be_the_same_in_any_way() {
    for (orders, sharing) in
        GROUPED.into_iter().flat_map(|orders| [(orders, Sharing::One), (orders, Sharing::Fetch)])
    {
        for waves in [1, 2] {
            let mut rig = Rig::with(grouped(waves), sharing, None);
            rig.fill().unwrap();
            rig.run(orders, 3).unwrap_or_else(|error| panic!("{orders:?} {sharing:?} {waves}: {error}"));
            rig.retire();
            rig.cache.validate().unwrap();
        }
    }
}

/// An engine that fails at its n-th call.
struct Fails {
    caller: Caller,
    left: u32,
}

impl Engine for Fails {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => return Err(forebay::Error::new(Kind::Cancelled, "engine")),
        }
        self.caller.enqueue(call, stream)
    }
}

/// Gathers of a step that an engine gives up may still run ahead of their layers. What follows the step comes after
/// them.
#[test]
fn a_step_that_is_given_up_between_the_layers_of_a_group_ends_after_its_gathers() {
    let mut calls = 0;
    for failing in 0.. {
        let mut rig = Rig::with(grouped(1), Sharing::None, None);
        rig.fill().unwrap();
        let mut engine = Fails { caller: rig.caller(), left: failing };
        let rows = rig.rows(0, 0);
        let compute = rig.micro[0].streams.compute;
        let mut step = rig.cache.prepare(MicroBatch(0), rows[0].query_rows, &rows, None, compute).unwrap();
        let layers = rig.micro[0].layers();
        let made = rig.cache.overlap_steps(&mut [(&mut step, layers)], &GROUPED[2], 2, &mut engine);
        rig.cache.finish(&mut step, compute).unwrap();
        rig.settle().unwrap();
        let retired = rig.cache.retire(step, compute).map(drop);
        assert_eq!(made.is_ok(), retired.is_ok());
        if made.is_ok() {
            break;
        }
        calls += 1;
        for sequence in &rig.sequences[..BATCH as usize] {
            let _ticket = rig.cache.truncate(*sequence, PROMPT, compute).unwrap();
        }
        rig.settle().unwrap();
        rig.step(GROUPED[2], 0).unwrap();
        rig.retire();
        assert_eq!(rig.watch.conflict(), None, "failing at call {failing}");
        rig.cache.validate().unwrap();
    }
    assert!(calls > 20, "{calls}");
}
