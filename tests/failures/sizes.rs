//! Admission, sizes, and a soak.

use crate::rig::{Rig, config};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice, Stream,
};
use forebay::os::{Map, Protection, page_size};
use forebay::{Cache, Config, Kind, Lane, Result, Shape};
use std::sync::{Arc, Mutex};

#[test]
fn f14_admission_counts_promised_tokens_and_rows_in_flight() {
    // 32 tokens of prompt fill two pages; the rows in flight of two steps need a third one.
    for (pages, promised, fits) in [(2, 0, false), (3, 0, true), (3, 14, true), (3, 15, false), (4, 15, true)]
    {
        let mut rig = Rig::new(Config { host_pages: pages, ..config(1, 64) }, false);
        let wanted = (32 + promised + 2_u32).div_ceil(16);
        let start = rig.gauges();
        match rig.cache.open(&Rig::asks(32, promised)) {
            Ok(_) => assert!(fits, "{pages} pages, {promised} promised"),
            Err(error) => {
                assert!(!fits, "{pages} pages, {promised} promised: {error}");
                assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "host pages"));
                let numbers = (error.number("wanted"), error.number("free"));
                assert_eq!(numbers, (Some(wanted.into()), Some(pages.into())));
                assert_eq!(rig.gauges(), start, "a refused opening takes nothing");
            }
        }
    }
    // The same for index keys; the host pages that were taken first are free again.
    let mut rig = Rig::new(Config { index_pages: 2, ..config(1, 64) }, false);
    let start = rig.gauges();
    let error = rig.cache.open(&Rig::asks(32, 8)).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "index-key pages"));
    assert_eq!(rig.gauges(), start);
}

#[test]
fn f14_admitted_sequences_decode_though_the_pool_is_full() {
    // Pages for exactly two sequences of 20 + 25 tokens and their rows in flight.
    let mut rig = Rig::new(Config { query_rows: 2, host_pages: 8, ..config(3, 64) }, false);
    let sequences = [rig.open(20, 25, 1), rig.open(20, 25, 2)];
    assert_eq!(rig.cache.open(&Rig::asks(1, 0)).unwrap_err().place(), "host pages");
    assert_eq!(rig.cache.stats().free_host_pages, 0);
    for tag in 0..50 {
        for sequence in sequences {
            let length = rig.cache.length(sequence).unwrap();
            let accepted = length.landed.min(45 - length.committed);
            rig.decode(sequence, accepted, 100 + tag).unwrap();
        }
    }
    for sequence in sequences {
        assert_eq!(rig.cache.length(sequence).unwrap().committed, 45);
        rig.check_total(sequence);
    }
    rig.cache.validate().unwrap();
}

/// A host device that notes the sizes of the host memory that is registered with it.
#[derive(Debug)]
struct Scale {
    device: Arc<HostDevice>,
    sizes: Mutex<Vec<u64>>,
}

/// The other methods, forwarded.
macro_rules! hand_on {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $result { self.device.$name($($argument),*) })*
    };
}

impl Device for Scale {
    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        self.sizes.lock().unwrap().push(map.len());
        self.device.register(map)
    }

    // SAFETY: asks of its caller what the trait's method asks.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: the caller of this method vouches for what the inner device asks.
        unsafe { self.device.import(address, bytes) }
    }

    hand_on! {
        allocate(bytes: u64) -> Result<Slice>;
        id() -> DeviceId;
        granularity() -> u64;
        takes_host_memory() -> bool;
        pins_host_memory() -> bool;
        backing(bytes: u64) -> Result<Backing>;
        range(pieces: &[Mapped], protection: Protection) -> Result<Slice>;
        stream() -> Result<Stream>;
        event() -> Result<Event>;
        record(event: Event, stream: Stream) -> Result<()>;
        wait(stream: Stream, event: Event) -> Result<()>;
        query(event: Event) -> Result<bool>;
        synchronize(event: Event) -> Result<()>;
        copy(stream: Stream, from: Slice, to: Slice) -> Result<()>;
        prefetch(stream: Stream, slice: Slice, rate: u64) -> Result<()>;
        enqueue_pages(stream: Stream, op: PageOp<'_>) -> Result<()>;
        call(stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;
        complete(stream: Stream, completer: Completer) -> Result<()>;
        attach(layout: PoolLayout) -> Result<Pools>;
        enqueue(pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
    }
}

#[test]
fn f18_host_memory_is_rounded_to_a_page_and_no_further() {
    // 61 layers x pages x 64 tokens x 704 bytes: just above and far above powers of two.
    for pages in [3, 7, 25, 98, 195] {
        let inner = HostDevice::new(HostOptions::default());
        let device = Arc::new(Scale { device: inner, sizes: Mutex::new(Vec::new()) });
        let small = config(1, 128);
        let shape = Shape { top_k: 8, ..Shape::DEEPSEEK_V3_2 };
        let cache = Cache::new(Config { shape, host_pages: pages, ..small }, device.clone()).unwrap();
        let exact = 61 * u64::from(pages) * 64 * 704;
        let [rows, steps] = device.sizes.lock().unwrap()[..] else { panic!("rows and step descriptors") };
        assert_eq!(rows, exact.next_multiple_of(page_size()), "{pages} pages");
        assert!(rows < exact.next_power_of_two(), "{pages} pages would not tell the two apart");
        assert_eq!(steps, page_size(), "step descriptors and reports of two steps");
        drop(cache);
    }
}

#[test]
fn f20_two_thousand_requests_leave_every_gauge_as_it_was() {
    let mut rig = Rig::new(Config { query_rows: 2, ..config(4, 64) }, false);
    let start = rig.gauges();
    let mut waiting = Vec::new();
    for request in 0..2000_u32 {
        let tag = request + 1;
        let sequence = rig.open(1 + request * 7 % 40, 12, tag);
        for step in 0..1 + request % 3 {
            let landed = rig.cache.length(sequence).unwrap().landed;
            rig.decode(sequence, landed.min(step), tag).unwrap();
        }
        let committed = rig.cache.length(sequence).unwrap().committed;
        match request % 7 {
            0 => rig.truncate(sequence, committed / 2),
            1 | 2 => {
                rig.truncate(sequence, committed);
                let child = rig.fork(sequence, 6);
                rig.decode(child, 0, tag + 5000).unwrap();
                waiting.push(child);
            }
            3 => {
                // An abort in the middle of a step.
                let mut step = rig.prepare(sequence, 0);
                rig.all(&step);
                rig.cache.close(sequence, rig.stream).unwrap();
                rig.cache.finish(&mut step, rig.stream).unwrap();
                rig.cache.retire(step, rig.stream).unwrap();
            }
            4 => {
                let refused = rig.cache.open(&Rig::asks(60, 60)).unwrap_err();
                assert_eq!(refused.kind(), Kind::OutOfRange);
            }
            _ => {}
        }
        if request % 7 != 3 {
            rig.check_total(sequence);
            rig.cache.close(sequence, rig.stream).unwrap();
        }
        rig.tags.remove(&sequence);
        if waiting.len() == 2 {
            for child in waiting.drain(..) {
                rig.check_total(child);
                rig.cache.close(child, rig.stream).unwrap();
                rig.tags.remove(&child);
            }
            assert_eq!(rig.gauges(), start, "after request {request}");
        }
    }
    for child in waiting {
        rig.cache.close(child, rig.stream).unwrap();
    }
    assert_eq!(rig.gauges(), start);
    rig.cache.validate().unwrap();
}
