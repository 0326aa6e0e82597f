//! What sharded weights cost and give: resident steps against the simulator, waits against those of a step of the same
//! times, the better way, and verdicts. `tests/pulls.rs` has the waits themselves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use forebay::Kind;
use forebay::device::clock::{ClockDevice, ClockOptions, Costs, Peer};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped};
use forebay::os::Protection;
use forebay::predict::plan::{Batch, Demand};
use forebay::predict::pulls::{Cycle, End, Fill, Layer, exposed};
use forebay::predict::setup::{File, Setup};
use forebay::predict::sharded::{Asked, Compared, Verdict, Way};
use forebay::predict::simulate::{Options, Point, Simulator};
use forebay::predict::weights::{Attention, Checkpoint, Division};
use forebay::weights::{Group, Patterns, Plan, Sharding, Source, Wrap};

fn near(found: f64, wanted: f64, what: &str) {
    assert!((found - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "{what}: {found} for {wanted}");
}

#[test]
fn over_a_device_with_memory_a_peers_bytes_arrive_at_the_links_rate() {
    let [ours, theirs] = [(); 2].map(|()| HostDevice::new(HostOptions::default()));
    let costs = Costs {
        launch_ns: 0.0,
        copy_ns: 0.0,
        device_copy: 1e9,
        peer: Peer { rate: 4e9, copy_engines: 1 },
        ..Costs::default()
    };
    let clock = ClockDevice::over(ours.clone(), ClockOptions { costs, ..ClockOptions::default() }).unwrap();
    let grain = theirs.granularity();
    let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
    let backing = theirs.backing(grain).unwrap();
    let shard = theirs.range(&[piece(backing)], Protection::ReadWrite).unwrap();
    theirs.write(shard, &vec![7; grain as usize]).unwrap();
    let exported = theirs.export(backing, Protection::Read).unwrap();
    let seen = clock.import_backing(exported, grain, Protection::Read).unwrap();
    let from = clock.range(&[piece(seen)], Protection::Read).unwrap();
    let (to, own) = (clock.allocate(grain).unwrap(), clock.allocate(grain).unwrap());
    let stream = clock.stream().unwrap();
    clock.copy(stream, from, to).unwrap();
    assert_eq!(clock.run().unwrap(), grain as f64 / 4.0);
    // A copy inside the device has another rate: it is read and written.
    clock.copy(stream, to, own).unwrap();
    assert_eq!(clock.run().unwrap(), grain as f64 / 4.0 + 2.0 * grain as f64);
    let mut bytes = vec![0; grain as usize];
    ours.read(own, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
}

/// The plan of `names` on this setup's GPUs, over `ranks`.
fn plan(setup: &Setup, names: &str, ranks: u32, source: Source) -> Plan {
    let checkpoint = setup.checkpoint().unwrap().unwrap();
    let patterns = Patterns::new(&checkpoint.patterns(names)).unwrap();
    let gpus = setup.file().deployment.gpus;
    let (division, dtype) = (Division::of(gpus, Attention::Data), setup.file().model.weights());
    let sharding = Sharding { source, ..Sharding::new(patterns) };
    let group = Group { id: 0, rank: 0, ranks };
    checkpoint.sharded((&division, dtype, false), gpus, group, &sharding).unwrap()
}

fn named(name: &str) -> Setup {
    Setup::named(name).unwrap().unwrap()
}

/// What `o_proj` over 8 ranks gives with so many bytes of memory, of which whole weights take `unsharded`.
fn compare(setup: &Setup, gpu: u64, unsharded: u64, batch: Batch) -> forebay::Result<Compared> {
    let plan = plan(setup, "o_proj", 8, Source::Peers);
    let weights = unsharded - u64::try_from(plan.bytes().saved(plan.whole())).unwrap();
    let demand = Demand { weights, batch, ..Demand::new(*setup.shape(), gpu, 4096) };
    Asked { setup, plan: &plan, demand: &demand, unsharded, by_heads: None, accept: 1.0 }.compare()
}

#[test]
fn a_resident_step_is_the_simulators_without_misses() {
    let setup = named("ess");
    let mut simulator = Simulator::new(setup.clone());
    for (batch, context) in [(1, 32_768), (13, 131_072), (60, 32_768), (61, 32_768)] {
        let found = {
            let demand =
                Demand { batch: Batch::Sequences(batch), ..Demand::new(*setup.shape(), 1 << 42, context) };
            let plan = plan(&setup, "o_proj", 8, Source::Peers);
            let asked = Asked {
                setup: &setup,
                plan: &plan,
                demand: &demand,
                unsharded: 0,
                by_heads: None,
                accept: 1.0,
            };
            asked.compare().unwrap().resident.unwrap()
        };
        let point = Point { context, batch, mtp: 1, accept: 1.0, ratio: 1.0 };
        let wanted = simulator.run(&point, &Options::default()).unwrap();
        near(found.step_us / 1e3, wanted.step_ms, "step");
        near(found.throughput, wanted.throughput / 8.0, "throughput");
    }
}

/// Weights of 10 GB, and room for so many GB of rows beside them.
fn room(gb: u64) -> u64 {
    (10 + gb) << 30
}

#[test]
fn it_pays_where_a_pull_is_hidden_and_not_over_a_slow_link() {
    let (whole, h20) = (10 << 30, named("r1-h20"));
    let fast = compare(&h20, room(1), whole, Batch::Most).unwrap();
    let (pulled, resident) = (fast.sharded.clone().unwrap(), fast.resident.unwrap());
    assert_eq!((fast.verdict, pulled.exposed.us()), (Verdict::Pays, 0.0));
    assert!(pulled.pull_us < pulled.step.layer_us && pulled.step.batch > 5 * resident.batch);
    // PCIe: a pull takes longer than several layers.
    let mut file = h20.file().clone();
    file.deployment.nvlink_gb_s = Some(20.0);
    let slow = compare(&Setup::new(file).unwrap(), room(8), whole, Batch::Most).unwrap();
    let pulled = slow.sharded.clone().unwrap();
    assert_eq!(slow.verdict, Verdict::Exposed);
    assert!(pulled.pull_us > 3.0 * pulled.step.layer_us && slow.gain().unwrap() < 0.0, "{slow:?}");
    // The same batch either way: nothing is won.
    let same = compare(&h20, room(8), whole, Batch::Sequences(4)).unwrap();
    assert_eq!((same.verdict, same.gain().unwrap() < 0.0), (Verdict::LittleGain, true));
    // Only sharded weights fit, or none.
    let only = compare(&h20, whole, whole, Batch::Most).unwrap();
    assert_eq!((only.verdict, only.resident, only.gain()), (Verdict::OnlyWay, None, None));
    let none = compare(&h20, 1 << 30, whole, Batch::Most).unwrap();
    assert_eq!((none.verdict, none.sharded), (Verdict::NoRoom, None));
}

/// Each way is the better one somewhere, and sharding somewhere.
#[test]
fn the_better_way_is_the_one_with_the_most_tokens_a_second() {
    let (h20, whole) = (named("r1-h20"), 10 << 30);
    let better = |found: &Compared| found.better().map(|(way, _)| way);
    // Collectives of few tokens are short, and the memory holds as many sequences.
    let divided = compare(&h20, room(1), whole, Batch::Most).unwrap();
    let (moved, pulled) = (divided.moved.unwrap(), divided.sharded.clone().unwrap());
    assert_eq!((better(&divided), divided.verdict), (Some(Way::Activations), Verdict::Pays));
    assert!(moved.step.throughput > pulled.step.throughput);
    assert_eq!(divided.better().unwrap().1, moved.step);
    // Without neighbours' rates the collectives have no price, and whole weights need no pulls.
    let mut file = h20.file().clone();
    file.deployment.nvlink_gb_s = None;
    let alone = Setup::new(file).unwrap();
    let host = |batch, gpu: u64| {
        let plan = plan(&alone, "o_proj", 8, Source::Host);
        let weights = whole - u64::try_from(plan.bytes().saved(plan.whole())).unwrap();
        let demand = Demand { weights, batch, ..Demand::new(*alone.shape(), gpu, 4096) };
        let asked = Asked {
            setup: &alone,
            plan: &plan,
            demand: &demand,
            unsharded: whole,
            by_heads: None,
            accept: 1.0,
        };
        asked.compare().unwrap()
    };
    assert_eq!(better(&host(Batch::Sequences(4), room(8))), Some(Way::Resident));
    let only = host(Batch::Most, whole);
    assert_eq!((better(&only), only.verdict), (None, Verdict::OnlyWay));
    // By heads, with room for the cache of all sequences.
    let plan = plan(&h20, "o_proj", 8, Source::Peers);
    let demand = Demand { weights: 9 << 30, ..Demand::new(*h20.shape(), 10 << 30, 4096) };
    let asked = Asked {
        setup: &h20,
        plan: &plan,
        demand: &demand,
        unsharded: 20 << 30,
        by_heads: Some(1 << 20),
        accept: 1.0,
    };
    let heads = asked.compare().unwrap();
    assert_eq!((better(&heads), heads.verdict), (Some(Way::ByHeads), Verdict::ByHeads), "{heads:?}");
}

/// Another way to the same waits: all layers alike, from the step's printed times.
#[test]
fn exposed_time_is_that_of_a_ring_of_its_own_times() {
    let setup = named("r1-h800");
    let found = compare(&setup, 80 << 30, 60 << 30, Batch::Most).unwrap();
    let pulled = found.sharded.unwrap();
    assert!(pulled.pull_us > pulled.step.layer_us);
    // 60 layers wait in pairs for what two pulls take longer than two layers.
    let late: Vec<f64> = pulled.exposed.layers_us[20..40].chunks(2).map(|two| two.iter().sum()).collect();
    let wanted = 2.0 * (pulled.pull_us - pulled.step.layer_us);
    assert!(late.iter().all(|two| (two / wanted - 1.0).abs() < 0.01), "{late:?} for {wanted}");
    assert_eq!(pulled.exposed.layers_us.len(), 61);
    let works = pulled.step.step_us - pulled.exposed.us();
    let layer = pulled.step.layer_us;
    assert!((works / (61.0 * layer) - 1.0).abs() < 0.01, "{works} {layer}");
    let layers = (0..61).map(|index| {
        let pull = Fill { buffer: (index % 2) as u8, us: pulled.pull_us };
        Layer { uses_us: 0.5 * layer, rest_us: 0.5 * layer, pull: Some(pull).filter(|_| index > 0) }
    });
    let other = exposed(&Cycle {
        layers: layers.collect(),
        tail_us: 0.0,
        between_us: 0.0,
        at_once: 2,
        end: End::Graph(Wrap::Joined),
    });
    // The border inside a layer moves waits by less than a layer.
    assert!((other.us() - pulled.exposed.us()).abs() < layer, "{} {}", other.us(), pulled.exposed.us());
}

#[test]
fn from_the_host_a_pull_crosses_the_hosts_link() {
    let mut file = named("r1-h20").file().clone();
    file.deployment.nvlink_gb_s = None;
    let setup = Setup::new(file).unwrap();
    let plan = plan(&setup, "o_proj", 8, Source::Host);
    let demand = Demand { batch: Batch::Sequences(8), ..Demand::new(*setup.shape(), 80 << 30, 4096) };
    let asked = Asked {
        setup: &setup,
        plan: &plan,
        demand: &demand,
        unsharded: 20 << 30,
        by_heads: Some(10 << 30),
        accept: 1.0,
    };
    let found = asked.compare().unwrap();
    let pulled = found.sharded.unwrap();
    // 112 MiB at 53 GB/s.
    near(pulled.pull_us, f64::from(112 << 20) / 53e3, "pull");
    // Without the rate of neighbours no collective has a time.
    assert_eq!((found.moved, found.by_heads), (None, None));
}

#[test]
fn what_a_setup_does_not_have_is_named() {
    let refused = |change: fn(&mut File), ranks: u32| {
        let mut file = named("r1-h800").file().clone();
        change(&mut file);
        let setup = Setup::new(file).unwrap();
        let plan = plan(&setup, "o_proj", ranks, Source::Peers);
        let demand = Demand::new(*setup.shape(), 80 << 30, 4096);
        let asked =
            Asked { setup: &setup, plan: &plan, demand: &demand, unsharded: 0, by_heads: None, accept: 1.0 };
        let error = asked.compare().unwrap_err();
        (error.kind(), error.to_string())
    };
    let (kind, text) = refused(|file| file.deployment.nvlink_gb_s = None, 8);
    assert!(kind == Kind::InvalidConfig && text.contains("deployment.nvlink_gb_s: missing"), "{text}");
    let (kind, text) = refused(|_| (), 16);
    assert!(kind == Kind::InvalidConfig && text.contains("on one node of the setup"), "{text}");
    let dense = Simulator::new(named("r1-h20"))
        .run(&Point { context: 4096, batch: 1, mtp: 1, accept: 1.0, ratio: 1.0 }, &Options::default());
    assert!(dense.unwrap_err().to_string().contains("dense attention selects nothing"));
    let parsed = |change: fn(&mut serde_json::Value)| {
        let mut value = serde_json::to_value(named("r1-h800").file()).unwrap();
        change(&mut value);
        Setup::parse(&value.to_string()).unwrap_err().to_string()
    };
    let old = parsed(|value| value["forebay_setup"] = 2.into());
    assert!(old.contains("model.weight_dtype: a field of version 3, but forebay_setup is 2"), "{old}");
    let other = parsed(|value| value["model"]["weight_dtype"] = "int4".into());
    assert!(other.contains("model.weight_dtype: a roofline has fp8 and bf16 alone"), "{other}");
    assert!(Checkpoint::of("deepseek-r1").unwrap().is_some());
}
