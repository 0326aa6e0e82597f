//! Published pages, shared by sequences with the same beginning: which pages a lookup finds, for which sequence, when,
//! and which are evicted. `tests/world.rs` checks every row in random runs; this file tests each promise by itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[cfg(feature = "trace")]
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "support/traces.rs"]
mod traces;

use device::{Held, TestDevice};
use forebay::device::Stream;
use forebay::device::host::HostOptions;
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Kind, Layer, LayerCall, Memory};
use forebay::{BatchRow, MicroBatch, Open, Sequence, Shape, Step, Streams, Tokens, WarmUp};
use std::sync::Arc;

const K: u32 = 8;
const PAGE: u32 = 16;

fn config(lanes: u32, pages: u32) -> Config {
    let shape = Shape {
        layers: 2,
        runs: [32, 0],
        index_key_bytes: 8,
        page_tokens: PAGE,
        top_k: K,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let config = Config::new(shape, lanes, 160, 16);
    Config { host_pages: pages, index_pages: pages, steps_in_flight: 2, memory, ..config }
}

/// The bytes of a fresh page that no row was written to.
const UNWRITTEN: u8 = if cfg!(debug_assertions) { 0xFF } else { 0 };

struct Engine {
    cache: Cache,
    device: Arc<TestDevice>,
    stream: Stream,
    buffers: Buffers,
    /// Of every sequence.
    promised: u32,
}

fn engine(config: Config, threaded: bool) -> Engine {
    let device = TestDevice::new(HostOptions { threaded, ..HostOptions::default() });
    let buffer = || device.allocate(u64::from(4 * K)).unwrap();
    let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
    let cache = Cache::new(config, device.device()).unwrap();
    Engine { cache, stream: device.stream().unwrap(), device, buffers, promised: 0 }
}

/// Because of the rows in flight, a prompt of whole pages takes one page more.
fn asks(prompt: u32) -> Open {
    Open { prompt, promised: 0, budget: Budget::Slots(16), bring_up: BringUp::Nothing }
}

/// The tokens of a text: equal texts are equal as far as both reach.
fn text(name: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|position| name << 16 | position).collect()
}

impl Engine {
    fn begin(&mut self, ids: &[u32], salt: &[u8]) -> (Sequence, u32) {
        let open = Open { promised: self.promised, ..asks(ids.len() as u32) };
        self.cache.open_shared(&open, salt, Tokens::new(ids)).unwrap()
    }

    /// Opens, fills and joins.
    fn start(&mut self, ids: &[u32], salt: &[u8]) -> (Sequence, u32) {
        let (sequence, shared) = self.begin(ids, salt);
        self.cache.append_in_place(sequence, ids.len() as u32 - shared).unwrap();
        let _ticket = self.cache.join(sequence, self.stream, WarmUp::default()).unwrap();
        (sequence, shared)
    }

    /// As `start`, and publishes the sequence's pages.
    fn serve(&mut self, ids: &[u32], salt: &[u8]) -> (Sequence, u32) {
        let (sequence, shared) = self.start(ids, salt);
        let published = self.cache.publish(sequence, shared, Tokens::new(&ids[shared as usize..])).unwrap();
        assert_eq!(published, ids.len() as u32 / PAGE * PAGE);
        (sequence, shared)
    }

    fn close(&mut self, sequence: Sequence) {
        self.cache.close(sequence, self.stream).unwrap();
        self.cache.validate().unwrap();
    }

    /// A step of one query row that selects nothing, enqueued.
    fn step(&mut self, sequence: Sequence, accepted: u32) -> Step {
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 1 };
        let mut step = self.cache.prepare(MicroBatch(0), 1, &[row], None, self.stream).unwrap();
        let streams = Streams { resolve: self.stream, gather: self.stream };
        for layer in [0, 1].map(Layer) {
            self.cache.layer(&step, LayerCall::whole(layer), streams, self.buffers).unwrap();
            self.cache.scatter(&step, LayerCall::whole(layer), self.stream).unwrap();
        }
        self.cache.finish(&mut step, self.stream).unwrap();
        step
    }

    /// Sets all entries of the selection to `position`.
    fn select(&self, position: i32) {
        let bytes: Vec<u8> = (0..K).flat_map(|_| position.to_le_bytes()).collect();
        self.device.write(self.buffers.selection, &bytes).unwrap();
    }

    /// Holds the stream until the result is dropped.
    fn hold(&self) -> Held {
        self.device.hold(self.stream)
    }

    fn settle(&self) {
        let event = self.device.event().unwrap();
        self.device.record(event, self.stream).unwrap();
        self.device.synchronize(event).unwrap();
    }
}

#[test]
fn a_prefix_is_found_while_it_is_used_and_after() {
    let mut e = engine(config(3, 40), false);
    let ids = text(1, 70);
    let (first, shared) = e.serve(&ids, b"");
    assert_eq!(shared, 0);
    // As far as the texts are equal, in whole pages; then as far as tokens are given.
    let other = [&ids[..40], &text(2, 70)[40..]].concat();
    let (second, shared) = e.serve(&other, b"");
    assert_eq!(shared, 32);
    e.close(first);
    e.close(second);
    let (third, shared) = e.cache.open_shared(&asks(70), b"", Tokens::new(&ids[..63])).unwrap();
    assert_eq!(shared, 48);
    let rows = |e: &Engine, sequence, position| {
        let mut row = [0; 32];
        e.cache.read_row(sequence, Layer(1), position, &mut row).unwrap();
        row
    };
    e.cache.append(third, Layer(1), &[9; 32]).unwrap();
    assert_eq!(
        (rows(&e, third, 48), rows(&e, third, 47)),
        ([9; 32], [UNWRITTEN; 32]),
        "appended after the shared pages"
    );
    e.close(third);
    let stats = e.cache.stats();
    assert_eq!((stats.prompt_tokens, stats.shared_tokens), (70 + 70 + 63, 32 + 48));
    // Four pages of each text, two of them the same.
    assert_eq!((stats.published_pages, stats.unused_pages), (6, 6));
}

#[test]
fn another_tenant_or_a_forced_collision_never_shares() {
    let mut e = engine(config(8, 80), false);
    let ids = text(1, 64);
    e.serve(&ids, b"one");
    for salt in [&b"two"[..], b"", b"one\0"] {
        assert_eq!(e.cache.find_shared(salt, Tokens::new(&ids)), Ok(0));
        assert_eq!(e.begin(&ids, salt).1, 0, "{salt:?}");
    }
    // The same key for every page, of this text and of another.
    let keys = [Some([5; 16]); 4];
    let keyed = |ids: &'static [u32]| Tokens { ids, keys: &keys };
    let (one, two) = (text(1, 64).leak(), text(2, 64).leak());
    let (first, shared) = e.cache.open_shared(&asks(64), b"one", keyed(one)).unwrap();
    assert_eq!(shared, 0, "without its keys it is another");
    e.cache.append_in_place(first, 64).unwrap();
    let _ticket = e.cache.join(first, e.stream, WarmUp::default()).unwrap();
    assert_eq!(e.cache.publish(first, 0, keyed(one)), Ok(64));
    assert_eq!(e.cache.open_shared(&asks(64), b"one", keyed(two)).unwrap().1, 0);
    assert_eq!(e.cache.open_shared(&asks(64), b"one", keyed(one)).unwrap().1, 64);
    // Another image for the same ids: the second page's key tells, and separates all later pages.
    let seen = [keys[0], Some([6; 16]), keys[2], None];
    let other = Tokens { ids: one, keys: &seen };
    assert_eq!(e.cache.open_shared(&asks(64), b"one", other).unwrap().1, 16);
}

#[test]
fn admission_counts_shared_and_evictable_pages() {
    // A prompt of 64 tokens takes 4 pages, and one for the rows in flight.
    let mut e = engine(config(4, 9), false);
    let ids = text(1, 64);
    let (first, _) = e.serve(&ids, b"");
    let refused = e.cache.open(&asks(64)).unwrap_err();
    assert_eq!(
        (refused.kind(), refused.number("wanted"), refused.number("free")),
        (Kind::Exhausted, Some(5), Some(4))
    );
    let (second, shared) = e.serve(&ids, b"");
    assert_eq!((shared, e.cache.stats().free_host_pages), (64, 3));
    e.close(first);
    e.close(second);
    assert_eq!((e.cache.stats().free_host_pages, e.cache.stats().unused_pages), (5, 4));
    // Nine pages are available, but not ten; a refusal evicts no page.
    assert_eq!(e.cache.open(&asks(9 * PAGE)).unwrap_err().number("free"), Some(9));
    // The pages that it shares cannot be evicted for its own rest: four shared, six wanted, five free.
    let longer = text(1, 9 * PAGE);
    let refused = e.cache.open_shared(&asks(9 * PAGE), b"", Tokens::new(&longer)).unwrap_err();
    assert_eq!(
        (refused.kind(), refused.number("wanted"), refused.number("free")),
        (Kind::Exhausted, Some(6), Some(5))
    );
    assert_eq!((e.cache.stats().evicted_pages, e.cache.stats().unused_pages), (0, 4));
    let (third, shared) = e.begin(&text(1, 8 * PAGE), b"");
    assert_eq!((shared, e.cache.stats().free_host_pages), (64, 0));
    e.close(third);
    // Six pages need one of the four; the last one is evicted, not the one before it.
    let fourth = e.cache.open(&asks(5 * PAGE)).unwrap();
    assert_eq!(e.cache.stats().evicted_pages, 1);
    e.close(fourth);
    assert_eq!(e.begin(&ids, b"").1, 48);
}

#[test]
fn the_least_recently_used_prefix_is_evicted_first_and_from_its_end() {
    let mut e = engine(config(2, 12), false);
    for name in [1, 2] {
        let (sequence, _) = e.serve(&text(name, 64), b"");
        e.close(sequence);
    }
    // The first is used again, so the second is now the least recently used.
    let (again, shared) = e.begin(&text(1, 64), b"");
    assert_eq!(shared, 64);
    e.close(again);
    let (other, _) = e.serve(&text(3, 80), b"");
    e.close(other);
    assert_eq!(e.cache.stats().evicted_pages, 2);
    for (name, left) in [(1, 64), (3, 64), (2, 32)] {
        let (sequence, shared) = e.begin(&text(name, 64), b"");
        assert_eq!(shared, left, "text {name}");
        e.close(sequence);
    }
}

/// A step whose new row is not yet scattered: whether the total pool has the row, before and after.
#[test]
fn f7_control_a_page_published_when_its_rows_are_enqueued_lacks_their_bytes() {
    let mut e = Engine { promised: 40, ..engine(config(3, 40), true) };
    let (first, _) = e.start(&text(1, 15), b"");
    e.select(-1);
    e.settle();
    let slot = e.cache.landing_slot(first, 0).unwrap();
    let place = e.cache.geometry().pieces(slot)[0].slab;
    e.device.write(e.cache.slab(Layer(0)).unwrap().part(place, 32).unwrap(), &[7; 32]).unwrap();
    let held = e.hold();
    let step = e.step(first, 0);
    let read = |e: &Engine| {
        let mut row = [0; 32];
        e.cache.read_row(first, Layer(0), 15, &mut row).unwrap();
        row
    };
    assert_eq!(
        read(&e),
        [UNWRITTEN; 32],
        "a sequence that found this page now would read it without its last row"
    );
    drop(held);
    e.settle();
    assert_eq!(read(&e), [7; 32]);
    e.cache.retire(step, e.stream).unwrap();
}

#[test]
fn f7_nothing_is_published_before_the_work_that_wrote_it_has_ended() {
    let mut e = Engine { promised: 40, ..engine(config(3, 40), true) };
    let ids = text(1, 40);
    let held = e.hold();
    let (first, _) = e.start(&ids, b"");
    assert_eq!(e.cache.publish(first, 0, Tokens::new(&ids)).unwrap_err().kind(), Kind::Busy);
    assert_eq!(e.begin(&ids, b"").1, 0);
    drop(held);
    e.settle();
    assert_eq!(e.cache.publish(first, 0, Tokens::new(&ids)), Ok(32));
    // Tokens that the cache has are not rows that it stores: eight more rows fill the page.
    let ids = text(1, 80);
    for accepted in [0, 1, 1, 1, 1, 1, 1, 1, 1] {
        assert_eq!(e.cache.publish(first, 32, Tokens::new(&ids[32..])), Ok(32));
        let step = e.step(first, accepted);
        e.settle();
        e.cache.retire(step, e.stream).unwrap();
    }
    assert_eq!(e.cache.publish(first, 32, Tokens::new(&ids[32..])), Ok(48));
    // As far as the tokens are given.
    assert_eq!(e.cache.publish(first, 48, Tokens::new(&[])), Ok(48));
}

#[test]
fn f7_rows_of_a_step_are_not_published_while_it_may_still_fail() {
    let mut e = Engine { promised: 40, ..engine(config(2, 40), false) };
    let ids = text(1, 60);
    let (first, _) = e.serve(&ids[..31], b"");
    e.select(-1);
    // The older one's only row is the page's last. The younger one has committed it, and ends first.
    let older = e.step(first, 0);
    let younger = e.step(first, 1);
    assert_eq!(e.cache.retire(younger, e.stream).unwrap().lengths(), [32]);
    assert_eq!(e.cache.publish(first, 16, Tokens::new(&ids[16..])), Ok(16));
    e.cache.retire(older, e.stream).unwrap();
    assert_eq!(e.cache.publish(first, 16, Tokens::new(&ids[16..])), Ok(32));
    // With one always in flight, the rows that the older ones committed are still published.
    let mut ahead = e.step(first, 1);
    for _ in 0..17 {
        let next = e.step(first, 1);
        e.cache.retire(std::mem::replace(&mut ahead, next), e.stream).unwrap();
    }
    assert_eq!(e.cache.publish(first, 32, Tokens::new(&ids[32..])), Ok(48));
    // A step that fails: nothing is published until the remaining length is decided.
    e.select(100);
    let failing = e.step(first, 1);
    e.cache.retire(ahead, e.stream).unwrap();
    assert!(e.cache.retire(failing, e.stream).is_err());
    assert_eq!(e.cache.publish(first, 48, Tokens::new(&ids[48..])).unwrap_err().kind(), Kind::InvalidState);
    let _ticket = e.cache.truncate(first, 33, e.stream).unwrap();
    // Thirty-three tokens remain, and two published pages.
    assert_eq!(e.cache.length(first).unwrap().published, 32);
    assert_eq!(e.cache.publish(first, 48, Tokens::new(&ids[48..])).unwrap_err().kind(), Kind::OutOfRange);
    assert_eq!(e.cache.publish(first, 32, Tokens::new(&ids[32..])), Ok(32));
    e.cache.validate().unwrap();
}

#[test]
fn f7_a_truncation_inside_a_page_copies_a_shared_page_and_keeps_an_unshared_one() {
    let mut e = engine(config(2, 9), false);
    let ids = text(1, 48);
    let (first, _) = e.serve(&ids, b"");
    let own: Vec<_> = e.cache.pages(first).unwrap().collect();
    let (second, _) = e.begin(&ids, b"");
    e.cache.append_in_place(second, 0).unwrap();
    let _ticket = e.cache.join(second, e.stream, WarmUp::default()).unwrap();
    // Both have three pages in common: the truncation takes two fresh ones.
    let _ticket = e.cache.truncate(second, 20, e.stream).unwrap();
    assert_eq!(e.cache.pages(first).unwrap().collect::<Vec<_>>(), own);
    let cut: Vec<_> = e.cache.pages(second).unwrap().collect();
    assert!(cut[0] == own[0] && cut[1..].iter().all(|page| !own.contains(page)));
    e.cache.validate().unwrap();
    e.close(second);
    // No other sequence uses the first one's page: it is truncated in place, and not found any more.
    let free = e.cache.stats().free_host_pages;
    let _ticket = e.cache.truncate(first, 20, e.stream).unwrap();
    assert_eq!(e.cache.pages(first).unwrap().collect::<Vec<_>>(), own);
    assert_eq!(e.cache.stats().free_host_pages, free);
    assert_eq!(e.begin(&ids, b"").1, 16);
    e.cache.validate().unwrap();
}

#[test]
fn a_page_that_a_copy_still_reads_is_not_evictable() {
    let mut e = engine(config(3, 6), true);
    let ids = text(1, 16);
    let (first, _) = e.serve_settled(&ids);
    let (second, shared) = e.start(&ids, b"");
    assert_eq!(shared, 16);
    e.settle();
    let held = e.hold();
    let copied = e.cache.truncate(second, 8, e.stream).unwrap();
    e.close(first);
    // The shared page has no user now, but the copy still reads it.
    let refused = e.cache.open(&asks(3 * PAGE)).unwrap_err();
    assert_eq!((refused.number("wanted"), refused.number("free")), (Some(4), Some(3)));
    assert_eq!((e.cache.stats().evicted_pages, e.cache.find_shared(b"", Tokens::new(&ids))), (0, Ok(16)));
    drop(held);
    e.settle();
    assert!(copied.poll().is_some());
    e.cache.reap(e.stream).unwrap();
    e.cache.open(&asks(3 * PAGE)).unwrap();
    assert_eq!(e.cache.stats().evicted_pages, 1);
    e.cache.validate().unwrap();
}

#[test]
fn pages_that_a_fork_owns_are_not_evictable_and_are_still_found() {
    let mut e = engine(config(4, 12), false);
    let hot = text(9, 16);
    let (other, _) = e.serve(&hot, b"");
    e.close(other);
    let ids = text(1, 64);
    let (parent, _) = e.start(&ids, b"");
    let (child, _ticket) = e.cache.fork(parent, &asks(0), e.stream).unwrap();
    assert_eq!(e.cache.publish(parent, 0, Tokens::new(&ids)), Ok(64));
    e.close(parent);
    // Four pages are in the index and unused, but the fork owns them; one is hot. Six are free.
    let refused = e.cache.open(&asks(7 * PAGE)).unwrap_err();
    assert_eq!((refused.number("wanted"), refused.number("free")), (Some(8), Some(7)));
    assert_eq!(e.cache.stats().evicted_pages, 0);
    assert_eq!(e.cache.find_shared(b"", Tokens::new(&hot)), Ok(16));
    // A truncation of the fork leaves the pages of the index in place.
    let _ticket = e.cache.truncate(child, 16, e.stream).unwrap();
    assert_eq!(e.cache.find_shared(b"", Tokens::new(&ids)), Ok(64));
    e.cache.validate().unwrap();
}

/// Two sequences compute the same pages at once. The one whose pages are found is closed, and its pages are evicted.
#[test]
fn pages_after_a_duplicate_page_are_found_when_the_duplicate_is_gone() {
    let mut e = engine(config(3, 15), false);
    let ids = text(1, 96);
    let (first, _) = e.start(&ids[..32], b"");
    let (second, _) = e.start(&ids, b"");
    assert_eq!(e.cache.publish(first, 0, Tokens::new(&ids[..32])), Ok(32));
    assert_eq!(e.cache.publish(second, 0, Tokens::new(&ids)), Ok(96));
    assert_eq!(e.cache.stats().published_pages, 6);
    e.close(first);
    let all = e.cache.stats().free_host_pages + 2;
    let fill = e.cache.open(&asks(PAGE * all - 2)).unwrap();
    assert_eq!((e.cache.stats().evicted_pages, e.cache.find_shared(b"", Tokens::new(&ids))), (2, Ok(0)));
    assert_eq!(e.cache.publish(second, 96, Tokens::default()), Ok(96));
    assert_eq!(e.cache.find_shared(b"", Tokens::new(&ids)), Ok(96));
    e.cache.validate().unwrap();
    e.close(second);
    e.close(fill);
    assert_eq!(e.begin(&ids, b"").1, 96);
}

/// A prefill that is aborted while its index keys are still to be written keeps its pages until they are.
#[test]
fn f7_an_aborted_prefill_keeps_its_pages_until_its_stream_has_reached_the_abort() {
    let mut e = engine(config(2, 4), true);
    let ids = text(1, 32);
    let (first, _) = e.begin(&ids, b"");
    let held = e.hold();
    e.close(first);
    assert_eq!(
        e.cache.open(&asks(32)).unwrap_err().kind(),
        Kind::Exhausted,
        "its pages are still written to"
    );
    assert_eq!(e.cache.reap(e.stream).unwrap(), 1);
    drop(held);
    e.settle();
    assert_eq!(e.cache.reap(e.stream).unwrap(), 0);
    e.cache.open(&asks(32)).unwrap();
}

/// Forks that publish the same pages with different tokens: the index has them under one block hash, and frees them.
#[test]
fn pages_have_one_block_hash_and_are_freed() {
    let mut e = engine(config(8, 9), false);
    let (parent, _) = e.start(&text(1, 32), b"");
    let forks = (0..6).map(|_| e.cache.fork(parent, &asks(0), e.stream).unwrap().0);
    let all: Vec<Sequence> = std::iter::once(parent).chain(forks.collect::<Vec<_>>()).collect();
    for (name, one) in (0..).zip(&all) {
        assert_eq!(e.cache.publish(*one, 0, Tokens::new(&text(name, 32))), Ok(32));
        e.cache.validate().unwrap();
    }
    assert_eq!(e.cache.stats().published_pages, 2);
    let found = |e: &Engine, name| e.cache.find_shared(b"", Tokens::new(&text(name, 32)));
    assert_eq!([found(&e, 0), found(&e, 1)], [Ok(32), Ok(0)]);
    e.close(all[0]);
    assert_eq!(e.cache.publish(all[1], 32, Tokens::default()), Ok(32));
    assert_eq!([found(&e, 0), found(&e, 1)], [Ok(32), Ok(0)], "by another name they are not published again");
    all[1..].iter().for_each(|one| e.close(*one));
    let stats = e.cache.stats();
    assert_eq!((stats.free_host_pages, stats.unused_pages), (7, 2));
    e.cache.open(&asks(8 * PAGE)).unwrap();
    assert_eq!(e.cache.stats().evicted_pages, 2);
}

impl Engine {
    /// As `serve`, on a device whose work takes its time.
    fn serve_settled(&mut self, ids: &[u32]) -> (Sequence, u32) {
        let (sequence, shared) = self.start(ids, b"");
        self.settle();
        let published = self.cache.publish(sequence, shared, Tokens::new(&ids[shared as usize..]));
        assert_eq!(published, Ok(ids.len() as u32));
        (sequence, shared)
    }
}

#[test]
fn invalid_calls_are_refused_and_take_nothing() {
    let mut e = engine(config(2, 40), false);
    let (ids, start) = (text(1, 64), e.cache.stats());
    let keys = [Some([1; 16]); 3];
    for prompt in [Tokens::new(&ids[..41]), Tokens { ids: &ids[..40], keys: &keys }] {
        let refused = e.cache.open_shared(&asks(40), b"", prompt).unwrap_err();
        assert_eq!(refused.kind(), Kind::OutOfRange, "{refused}");
    }
    assert_eq!(e.cache.stats(), start);
    let plain = e.cache.open(&asks(40)).unwrap();
    let refused = e.cache.publish(plain, 0, Tokens::new(&ids)).unwrap_err();
    assert_eq!(refused.place(), "the prompt is not complete, or the sequence has not joined");
    e.cache.append_in_place(plain, 40).unwrap();
    let _ticket = e.cache.join(plain, e.stream, WarmUp::default()).unwrap();
    let refused = e.cache.publish(plain, 0, Tokens::new(&ids)).unwrap_err();
    assert_eq!(refused.kind(), Kind::InvalidState);
    assert!(refused.to_string().contains("open_shared"), "{refused}");
    let (shared, _) = e.serve(&ids[..40], b"");
    let refused = e.cache.publish(shared, 32, Tokens::new(&text(1, 200))).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfRange);
    let keyed = Tokens { ids: &ids[32..], keys: &keys };
    assert_eq!(e.cache.publish(shared, 32, keyed).unwrap_err().kind(), Kind::OutOfRange);
    e.close(shared);
    assert_eq!(e.cache.publish(shared, 32, Tokens::default()).unwrap_err().kind(), Kind::Closed);
}

/// The first requests of a real trace, each a sequence that is opened, filled, published and closed: the cache finds
/// the same blocks as a plain list of blocks in order of use.
#[cfg(feature = "trace")]
#[test]
fn a_real_trace_has_the_hits_of_a_plain_list() {
    use forebay::trace::requests::{Options, RequestTrace};
    let Some(path) = traces::directory("mooncake") else { return };
    let path = path.join("conversation_trace.jsonl.zst");
    let trace = RequestTrace::read(&path, &Options::default()).unwrap();
    // A block of the trace is a page here.
    let pages = 1_000;
    let config = Config { max_tokens: 300 * PAGE, residency_only: true, ..config(1, pages) };
    let mut e = engine(config, false);
    let (mut list, mut hits, mut evicted): (Vec<u32>, u64, u64) = Default::default();
    for request in 0..1_500 {
        let blocks = trace.blocks(request);
        let ids: Vec<u32> = blocks.iter().flat_map(|block| [*block; PAGE as usize]).collect();
        let run = blocks.iter().take_while(|block| list.contains(block)).count();
        hits += run as u64;
        let (sequence, _) = e.serve(&ids, b"");
        e.close(sequence);
        // One page more than the blocks was taken, for the rows in flight.
        let fresh: Vec<u32> = blocks[run..].to_vec();
        list.retain(|block| !blocks[..run].contains(block));
        while list.len() + blocks.len() + 1 > pages as usize {
            list.remove(0);
            evicted += 1;
        }
        list.retain(|block| !fresh.contains(block));
        list.extend(blocks.iter().rev());
    }
    let stats = e.cache.stats();
    assert_eq!((stats.shared_tokens / u64::from(PAGE), stats.evicted_pages), (hits, evicted));
    assert!(hits > 1_000 && evicted > 10_000, "{hits} {evicted}: it says something");
}
