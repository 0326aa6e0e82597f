//! Construction: invalid declarations, and systems that refuse memory.

use crate::device::TestDevice;
use crate::{K, asks, config, engine, refused, row};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Fallback, Faults, Inject, MemoryState};
use forebay::{Buffers, Cache, Config, Error, Kind, Layer, LayerCall, Memory, MicroBatch, Shape, Slots};
use forebay::{Streams, WarmUp};
use std::sync::atomic::{AtomicU32, Ordering};

type Change = fn(&mut Config);

fn made(config: Config) -> Result<Cache, Error> {
    Cache::new(config, TestDevice::new(HostOptions::default()).device())
}

#[test]
fn every_count_that_is_zero_is_named() {
    let zero: [(&str, Change); 10] = [
        ("host_pages", |c| c.host_pages = 0),
        ("index_pages", |c| c.index_pages = 0),
        ("lanes", |c| c.lanes = 0),
        ("max_tokens", |c| c.max_tokens = 0),
        ("batch", |c| c.batch = 0),
        ("query_rows", |c| c.query_rows = 0),
        ("steps_in_flight", |c| c.steps_in_flight = 0),
        ("micro_batches", |c| c.micro_batches = 0),
        ("min_budget", |c| c.min_budget = 0),
        ("top_k (dense attention needs no sparse pool)", |c| c.shape.top_k = 0),
    ];
    for (place, set) in zero {
        let mut config = config();
        set(&mut config);
        refused(made(config), Kind::InvalidConfig, place);
    }
}

#[test]
fn invalid_shapes_and_pools_are_refused_by_name() {
    let shape = |change: fn(&mut Shape)| {
        let mut config = config();
        change(&mut config.shape);
        config
    };
    let invalid = [
        ("layers", shape(|s| s.layers = 0)),
        ("runs", shape(|s| s.runs = [0, 32])),
        ("runs", shape(|s| s.runs = [30, 0])),
        ("host_stride", shape(|s| s.host_stride = 28)),
        ("page_tokens", shape(|s| s.page_tokens = 17)),
        ("index_key_bytes", shape(|s| s.index_key_bytes = 2)),
        ("slots by layer", Config { slots: Slots::ByLayer(vec![64]), ..config() }),
        ("slots", Config { slots: Slots::Uniform(15), ..config() }),
        ("slots", Config { slots: Slots::ByLayer(vec![64, 0]), ..config() }),
        ("host_pages", Config { steps_in_flight: 8, host_pages: 1, ..config() }),
        ("index_pages", Config { steps_in_flight: 8, index_pages: 1, ..config() }),
    ];
    for (place, config) in invalid {
        refused(made(config), Kind::InvalidConfig, place);
    }
}

/// A report names a batch row in 15 bits.
#[test]
fn a_batch_too_wide_for_the_row_numbers_of_a_report_is_refused_before_anything_is_taken() {
    let wide = |batch| Config { batch, ..config() };
    for batch in [32_768, u32::MAX] {
        let error = refused(made(wide(batch)), Kind::InvalidConfig, "batch");
        assert_eq!((error.number("value"), error.number("most")), (Some(batch.into()), Some(32_767)));
        assert_eq!(wide(batch).footprint(4096).unwrap_err(), error, "a plan says so too");
    }
    wide(32_767).footprint(4096).unwrap();
}

#[test]
fn overflowing_products_and_too_little_memory_are_errors() {
    let base = config();
    let layers = Shape { layers: u32::MAX, draft_layers: 1, ..base.shape };
    refused(made(Config { shape: layers, ..base.clone() }), Kind::Overflow, "layers");
    let wide = Shape { layers: 4096, runs: [1 << 20, 1 << 20], page_tokens: 1024, ..base.shape };
    let all = Config { shape: wide, host_pages: u32::MAX, ..base.clone() };
    refused(made(all), Kind::Overflow, "total pool");
    let keys = Shape { layers: 4096, index_key_bytes: 1 << 16, page_tokens: 1024, ..base.shape };
    let all = Config { shape: keys, index_pages: u32::MAX, ..base.clone() };
    let error = made(all).unwrap_err();
    assert!(matches!(error.kind(), Kind::Overflow | Kind::OutOfMemory), "{error}");
    let rows = Config { query_rows: u32::MAX, ..base.clone() };
    assert_eq!(made(rows).unwrap_err().kind(), Kind::Overflow);
    let reach = Config { max_tokens: u32::MAX, host_pages: 64, index_pages: 64, ..base.clone() };
    assert_eq!(made(reach).unwrap_err().kind(), Kind::Overflow);
    // More than any machine has: populated memory is compared with the free memory.
    let memory = Memory { populate: true, ..base.memory };
    let shape = Shape { runs: [1 << 20, 0], page_tokens: 1024, ..base.shape };
    let huge = Config { shape, memory, host_pages: 1 << 20, ..base.clone() };
    let error = refused(made(huge), Kind::OutOfMemory, "memory of the machine");
    assert!(error.number("wanted") > error.number("available"));
    // The tables of so many tokens fit no address space; the process goes on.
    let tables = Config { lanes: 1 << 16, max_tokens: 1 << 30, host_pages: 64, index_pages: 64, ..base };
    let error = made(tables).unwrap_err();
    assert!(
        error.kind() == Kind::OutOfMemory && error.number("bytes").or(error.number("wanted")).is_some(),
        "{error}"
    );
}

#[test]
fn positions_of_a_budget_by_layer_reach_every_layer() {
    let mut e = engine(Config { slots: Slots::ByLayer(vec![64, 128]), ..config() });
    let open = forebay::Open { budget: forebay::Budget::ByLayer(vec![16, 40]), ..asks(40, 8) };
    let sequence = e.cache.open(&open).unwrap();
    e.cache.append_in_place(sequence, 40).unwrap();
    let _ticket = e.cache.join(sequence, e.stream, WarmUp::default()).unwrap();
    // Layer 0 is too small for the whole, layer 1 holds it.
    let every: Vec<u8> = (0..2 * K as i32).flat_map(i32::to_le_bytes).collect();
    e.device.write(e.buffers.selection, &every).unwrap();
    let rows = [row(sequence, 0)];
    let mut step = e.cache.prepare(MicroBatch(0), 2, &rows, None, e.stream).unwrap();
    for layer in [0, 1].map(forebay::Layer) {
        let call = forebay::LayerCall::whole(layer);
        e.cache.layer(&step, call, e.streams(), e.buffers).unwrap();
        e.cache.scatter(&step, call, e.stream).unwrap();
    }
    e.cache.finish(&mut step, e.stream).unwrap();
    let retired = e.cache.retire(step, e.stream).unwrap();
    assert_eq!([0, 1].map(|l| retired.layers()[l].misses), [16, 0]);
}

/// Whether a cache decodes, with any kind of memory.
fn decodes(cache: &mut Cache, device: &TestDevice) -> bool {
    let stream = device.stream().unwrap();
    let sequence = cache.open(&asks(20, 8)).unwrap();
    cache.append_in_place(sequence, 20).unwrap();
    let _ticket = cache.join(sequence, stream, WarmUp::default()).unwrap();
    let mut step = cache.prepare(MicroBatch(0), 2, &[row(sequence, 0)], None, stream).unwrap();
    let buffer = || device.allocate(2 * K * 4).unwrap();
    let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
    for call in [0, 1].map(|layer| LayerCall::whole(Layer(layer))) {
        cache.layer(&step, call, Streams { resolve: stream, gather: stream }, buffers).unwrap();
        cache.scatter(&step, call, stream).unwrap();
    }
    cache.finish(&mut step, stream).unwrap();
    cache.retire(step, stream).unwrap().lengths() == [20]
}

#[test]
fn options_that_the_system_refuses_are_listed_and_the_cache_works_without_them() {
    let memory = Memory { huge: false, populate: true, lock: false, node: None };
    let (huge, lock) = (Memory { huge: true, ..memory }, Memory { lock: true, ..memory });
    let node = |node| Memory { node: Some(node), ..memory };
    let cases = [
        (Call::MemfdHuge, huge, Fallback::HUGE_PAGES),
        (Call::MemoryState, huge, Fallback::HUGE_PAGES),
        (Call::Memfd, memory, Fallback::SHARED_MEMORY),
        (Call::Lock, lock, Fallback::LOCKED_MEMORY),
        (Call::Bind, node(0), Fallback::NUMA_BINDING),
        // The machine reports node 0 alone.
        (Call::Nodes, node(3), Fallback::NUMA_BINDING),
    ];
    for (call, memory, what) in cases {
        // Where there are reserved huge pages, these refusals need base pages.
        let device = TestDevice::new(HostOptions::default());
        let fault = Inject::call(call, EPERM);
        let mut cache = Cache::with_faults(Config { memory, ..config() }, device.device(), &fault).unwrap();
        let listed: Vec<String> = cache.fallbacks().iter().map(ToString::to_string).collect();
        assert!(
            listed.iter().any(|line| line.starts_with(what) && line.contains(": ")),
            "{call:?}: {listed:?}"
        );
        assert!(decodes(&mut cache, &device), "{call:?}");
    }
    let device = TestDevice::new(HostOptions::default());
    let cache =
        Cache::new(Config { memory: Memory { populate: false, ..memory }, ..config() }, device.device())
            .unwrap();
    assert_eq!(cache.fallbacks(), [], "the control: nothing asked for, nothing missed");
}

/// "Operation not permitted".
const EPERM: i32 = 1;

/// "Cannot allocate memory".
const ENOMEM: i32 = 12;

#[test]
fn a_refused_allocation_of_memory_is_an_error() {
    let with = |call, errno| {
        let memory = Memory { huge: false, populate: true, lock: false, node: None };
        let device = TestDevice::new(HostOptions::default());
        Cache::with_faults(Config { memory, ..config() }, device.device(), &Inject::call(call, errno))
            .unwrap_err()
    };
    let out = with(Call::Map, ENOMEM);
    assert_eq!((out.kind(), out.operation()), (Kind::OutOfMemory, "map host memory"));
    assert!(out.number("wanted") > Some(0) && out.to_string().contains("mmap: "), "{out}");
    assert_eq!(with(Call::Map, EPERM).kind(), Kind::OsRefused);
    assert_eq!(with(Call::Truncate, ENOMEM).kind(), Kind::OutOfMemory);
    assert_eq!(with(Call::Truncate, EPERM).kind(), Kind::OsRefused);
}

#[test]
fn after_any_failed_call_the_cache_decodes_or_the_error_says_why_not() {
    let config = Config { memory: Memory::default(), ..config() };
    let mut outcomes = (0, 0);
    for errno in [EPERM, ENOMEM] {
        for n in 0.. {
            let (device, fault) = (TestDevice::new(HostOptions::default()), Inject::nth(n, errno));
            match Cache::with_faults(config.clone(), device.device(), &fault) {
                Ok(mut cache) => {
                    outcomes.0 += 1;
                    assert!(decodes(&mut cache, &device), "call {n}");
                }
                Err(error) => {
                    outcomes.1 += 1;
                    assert!(matches!(error.kind(), Kind::OutOfMemory | Kind::OsRefused), "{error}");
                    assert!(!error.place().is_empty(), "{error}");
                }
            }
            if fault.count() <= n {
                break;
            }
        }
    }
    assert!(outcomes.0 > 4 && outcomes.1 > 2, "{outcomes:?} (caches, errors)");
}

/// A machine that has so much memory left, and so many huge pages reserved.
#[derive(Debug)]
struct Has(u64, u64);

impl Faults for Has {
    fn before(&self, _: Call) -> Option<i32> {
        None
    }

    fn memory(&self, read: MemoryState) -> MemoryState {
        MemoryState { available: Some(self.0), huge_page: 2 << 20, huge_free: self.1, ..read }
    }
}

/// A cache of `config` where the machine has `available` bytes: the wanted and found bytes of its error.
fn on_a_machine(config: Config, available: u64) -> Result<(), (u64, u64)> {
    let device = TestDevice::new(HostOptions::default());
    let made = Cache::with_faults(config, device.device(), &Has(available, 0));
    made.map(drop).map_err(|error| {
        assert_eq!((error.kind(), error.place()), (Kind::OutOfMemory, "memory of the machine"), "{error}");
        assert!(error.to_string().contains("overcommit"), "{error}");
        (error.number("wanted").unwrap(), error.number("available").unwrap())
    })
}

#[test]
fn a_cache_larger_than_the_machines_memory_is_refused_before_anything_is_taken() {
    let memory = Memory { huge: false, populate: true, lock: false, node: None };
    let resident = Config { memory, ..config() };
    let (wanted, available) = on_a_machine(resident.clone(), 1).unwrap_err();
    let footprint = resident.footprint(4096).unwrap();
    // A host device's memory is the machine's too; the lists take memory in addition.
    let on_host = TestDevice::new(HostOptions::default()).device().takes_host_memory();
    let least = footprint.host() + if on_host { footprint.data() + footprint.tables } else { 0 };
    assert!((least..least + 100_000).contains(&wanted) && available == 1, "{wanted} of {least}");
    assert_eq!(on_a_machine(resident.clone(), wanted - 1), Err((wanted, wanted - 1)));
    on_a_machine(resident.clone(), wanted).unwrap();
    let locked = Config { memory: Memory { populate: false, lock: true, ..memory }, ..config() };
    assert_eq!(on_a_machine(locked, 1), Err((wanted, 1)));
    // Petabytes are an error at once: the machine's memory is untouched.
    let huge = Config { host_pages: u32::MAX, ..resident.clone() };
    assert!(on_a_machine(huge, 1 << 40).unwrap_err().0 > 1 << 40);
}

/// Reserved memory is not available to others, and the rows use it: it is not counted a second time.
#[test]
fn rows_on_reserved_huge_pages_are_not_counted_as_other_memory() {
    let memory = Memory { huge: true, populate: true, lock: false, node: None };
    let reserved = Config { memory, ..config() };
    let wanted = |huge_free: u64| {
        let device = TestDevice::new(HostOptions::default());
        let made = Cache::with_faults(reserved.clone(), device.device(), &Has(1, huge_free));
        made.unwrap_err().number("wanted").unwrap()
    };
    let rows = reserved.footprint(4096).unwrap().rows;
    let pages = rows.div_ceil(2 << 20);
    assert_eq!(wanted(pages - 1) - wanted(pages), rows);
}

#[test]
fn memory_that_is_lazy_or_overcommitted_is_not_counted() {
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let lazy = Config { memory, ..config() };
    let (wanted, _) = on_a_machine(lazy.clone(), 1).unwrap_err();
    let footprint = lazy.footprint(4096).unwrap();
    // A driver makes rows resident even if the configuration does not.
    let pinned = TestDevice::new(HostOptions::default()).device().pins_host_memory();
    // The tables of a host device are written when they are made.
    let on_host = TestDevice::new(HostOptions::default()).device().takes_host_memory();
    let ring = footprint.step_descriptors.next_multiple_of(4096);
    let least = ring + if pinned { footprint.rows } else { 0 } + if on_host { footprint.tables } else { 0 };
    assert!((least..least + 100_000).contains(&wanted), "{wanted}");
    on_a_machine(lazy.clone(), wanted).unwrap();
    // Lists are not lazy: a pool of so many pages has some gigabytes of them.
    let many = Config { host_pages: 1 << 30, index_pages: 1 << 30, ..lazy.clone() };
    assert!(on_a_machine(many, 1 << 30).unwrap_err().0 > 64 << 30);
    let long = Config { max_tokens: 1 << 28, ..lazy.clone() };
    assert!(!on_host || on_a_machine(long, 1 << 30).unwrap_err().0 > 4 << 28, "4 bytes a token and lane");
    on_a_machine(Config { overcommit: true, ..lazy }, 1).unwrap();
}

/// Notes how often memory is made resident.
#[derive(Debug, Default)]
struct Populated(AtomicU32);

impl Faults for Populated {
    fn before(&self, call: Call) -> Option<i32> {
        self.0.fetch_add(u32::from(call == Call::Populate), Ordering::Relaxed);
        None
    }
}

#[test]
fn a_cache_without_row_bytes_takes_addresses_for_its_rows_and_no_memory() {
    let memory = Memory { huge: false, populate: true, lock: false, node: None };
    let populated = |residency_only| {
        let (device, calls) = (HostDevice::new(HostOptions::default()), Populated::default());
        let config = Config { residency_only, memory, ..config() };
        Cache::with_faults(config.clone(), device.clone(), &calls).unwrap();
        let refused = Cache::with_faults(config, device, &Has(1, 0)).unwrap_err();
        (calls.0.into_inner(), refused.number("wanted").unwrap())
    };
    let ((with_rows, all), (without, rest)) = (populated(false), populated(true));
    assert_eq!((with_rows, without), (2, 1), "rows and the ring of step descriptors");
    assert_eq!(all - rest, config().footprint(4096).unwrap().rows);
}

/// A driver makes all rows of a pool resident when it registers them, even if the pool is neither populated nor locked.
#[cfg(feature = "cuda")]
#[test]
fn rows_that_a_driver_pins_are_counted_whatever_the_configuration_says() {
    if !crate::device::driver_is_there() {
        return;
    }
    let wanted = |memory, device: &TestDevice| {
        let made = Cache::with_faults(Config { memory, ..config() }, device.device(), &Has(1, 0));
        made.unwrap_err().number("wanted").unwrap()
    };
    let lazy = Memory { huge: false, populate: false, lock: false, node: None };
    let cuda = TestDevice::cuda(&HostOptions::default(), None).unwrap();
    let footprint = config().footprint(4096).unwrap();
    assert_eq!(wanted(lazy, &cuda), wanted(Memory { populate: true, ..lazy }, &cuda), "pinned in both cases");
    let host = TestDevice::host(HostOptions::default());
    // The host device pins nothing, and its tables are the machine's.
    assert_eq!(wanted(lazy, &cuda) + footprint.tables, wanted(lazy, &host) + footprint.rows);
}

/// Tells a child process of a test that it is the child.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// The memory that a construction takes besides the pools is an error too if it is not available, and does not end the
/// process.
#[test]
fn book_keeping_without_memory_for_it_is_an_error() {
    let test = "construction::book_keeping_without_memory_for_it_is_an_error";
    if std::env::var_os(CHILD).is_none() {
        let script = "ulimit -v 700000 || exit 9; exec \"$0\" --exact --nocapture \"$@\"";
        let exe = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new("sh");
        let output = child.args(["-c", script]).arg(exe).arg(test).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
        assert!(output.status.success() && ran, "{}: {said}", output.status);
        return;
    }
    let base = Config { overcommit: true, index_pages: 1024, host_pages: 1024, ..config() };
    let slots = Slots::Uniform(4096);
    let (keyless, wide) = (Shape { index_key_bytes: 0, ..base.shape }, Shape { top_k: 2048, ..base.shape });
    for (place, config) in [
        // 8 bytes for each selected row of each batch row.
        (
            "a batch row's list",
            Config { batch: 32_767, shape: wide, slots, min_budget: 4096, ..base.clone() },
        ),
        // 4 bytes for each token and lane.
        ("a layer", Config { max_tokens: 1 << 28, ..base.clone() }),
        ("index-key pages", Config { index_pages: 1 << 28, shape: keyless, ..base.clone() }),
        ("marks of steps", Config { query_rows: 4096, batch: 32_767, ..base.clone() }),
    ] {
        let device = HostDevice::new(HostOptions::default());
        let error = Cache::new(config, device).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::OutOfMemory, place), "{error}");
    }
}
