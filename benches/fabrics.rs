//! Claims: over shared memory a prompt's rows go at 0.45 of a memcpy's rate or more with digests, and at 0.8 without.
//! 95% of the transfer is hidden behind the computation, over TCP 90%. 256 tokens layer by layer take at most 1.3 times
//! as long as in one post.
//!
//! 61 layers of 4,096 tokens of V3.2 in pages of 64: latents of 704 bytes and index keys of 132, 209 MB. This process
//! sends, and starts itself once more for each receiver. A receiver keeps the rows and grants the next request when the
//! one before is over. The memcpy is of one core between two memfds, run by run, page by page.
//!
//! "alone" is all layers told at once, with nothing to compute. Layered, a thread computes for 2 ms a layer, asleep or
//! busy, and the transfer's thread tells each layer. Exposed is the time from the last layer's end until the sender has
//! heard that the receiver has everything. Hidden is the share of "alone" that is not exposed. "slower" is what the
//! computation took beyond its 2 ms a layer. With `--quick` there are three rounds.
//!
//! Both ends work at the same time, so the figures need two free cores. What each core worked for, by the system's
//! account, is told besides: it does not depend on other load. The busier end bounds the rate.

#[allow(dead_code, reason = "criterion measures nothing here: each side needs two processes")]
#[path = "support/race.rs"]
mod race;

use std::cell::RefCell;
use std::hint::{black_box, spin_loop};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread::sleep;
use std::time::{Duration, Instant};

use forebay::os::{Map, NoFaults, Request};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
use forebay::transfer::receiver::{self, Wanted};
use forebay::transfer::sender::{self, Computed, Event};
use forebay::transfer::socket::{Address, Options, Socket, SocketReceiver, SocketSender, Way};
use forebay::transfer::{
    Component, Fence, LayerPlaces, Place, Polled, Rank, Reason, Receiver, ReceivingEnd, Run, Sender,
    SendingEnd, Side as End, Split, Stage, Store,
};
use race::{Rounds, Side, claim, done, race};

const LAYERS: u32 = 61;
const TOKENS: u32 = 4_096;
const SHORT: u32 = 256;
const PAGE: u32 = 64;
const ROWS: [u64; 2] = [704, 132];
const COMPUTE: Duration = Duration::from_millis(2);
/// How long the transfer's thread waits at most before it looks for a layer.
const LOOK: Duration = Duration::from_micros(100);

/// Bytes of a layer's pages, latents and index keys.
const fn layer_bytes(tokens: u32) -> [u64; 2] {
    [ROWS[0] * tokens as u64, ROWS[1] * tokens as u64]
}

fn bytes(tokens: u32) -> u64 {
    u64::from(LAYERS) * layer_bytes(tokens).iter().sum::<u64>()
}

/// Where the planes of both ends are in their memories: layer after layer, latents and then index keys.
fn planes(tokens: u32) -> Vec<Plane> {
    let [latents, keys] = layer_bytes(tokens);
    let of = |layer: u32| {
        let offset = u64::from(layer) * (latents + keys);
        let page = u64::from(PAGE);
        [
            Plane { offset, page_bytes: page * ROWS[0] },
            Plane { offset: offset + latents, page_bytes: page * ROWS[1] },
        ]
    };
    (0..LAYERS).flat_map(of).collect()
}

fn side() -> End {
    let component = |(name, head_bytes): (&str, u64)| Component {
        name: name.to_owned(),
        dtype: "bytes".to_owned(),
        heads: 1,
        head_bytes,
    };
    let place = |layer: u32, component: u32| {
        let row = ROWS[component as usize];
        Place { component, plane: 2 * layer + component, offset: 0, token_stride: row, head_stride: row }
    };
    let places = |layer| LayerPlaces { layer, places: vec![place(layer, 0), place(layer, 1)] };
    End {
        components: [("latent", ROWS[0]), ("index key", ROWS[1])].map(component).to_vec(),
        stages: vec![Stage {
            layers: (0..LAYERS).map(places).collect(),
            page_bytes: (0..LAYERS).flat_map(|_| ROWS.map(|row| row * u64::from(PAGE))).collect(),
        }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens: PAGE,
    }
}

const fn rank(instance: u64) -> Rank {
    Rank { instance, replica: 0, stage: 0, lane: 0 }
}

const fn shared(bytes: u64) -> Request {
    Request { bytes, huge: false, populate: true, lock: false, node: None, shared: true }
}

/// The receiver's pages, in a memfd too: as a cache's pinned memory, and with pages of the same kind.
struct Pages {
    planes: Vec<Plane>,
    map: Map,
}

impl Store for Pages {
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> forebay::Result<()> {
        let place = self.place(fence, run).filter(|place| place.len() == bytes.len());
        done(place.ok_or("a run without a place")).copy_from_slice(bytes);
        Ok(())
    }

    fn place(&mut self, _: Fence, run: &Run) -> Option<&mut [u8]> {
        let plane = self.planes.get(run.to.plane as usize)?;
        let first = plane.offset + u64::from(run.to.page) * plane.page_bytes + run.to.offset;
        first.checked_add(run.bytes).filter(|end| *end <= self.map.len())?;
        // SAFETY: the bytes are in the map, as was checked. It is borrowed as long as the slice, and no other thread or
        // process has it.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.map.as_ptr().add(first as usize), run.bytes as usize)
        })
    }
}

/// The second process. It ends when its sender does.
fn receive(fabric: SocketReceiver, (digests, tokens): (bool, u32)) {
    let options = receiver::Options { digests, ..receiver::Options::default() };
    let mut end = ReceivingEnd::new(done(Receiver::new(side(), rank(2), options)), fabric);
    let map = done(Map::new(&shared(bytes(tokens)), &NoFaults)).0;
    let mut pages = Pages { planes: planes(tokens), map };
    let (start, mut connected, mut granted, mut generation) = (Instant::now(), false, false, 1);
    while connected || start.elapsed() < Duration::from_secs(60) {
        while let Some(polled) = done(end.poll(start.elapsed(), &mut pages)) {
            match polled {
                Polled::Connected { .. } => connected = true,
                Polled::Lost { .. } => return,
                Polled::Event(receiver::Event::Failed { error, .. }) => done(Err(error)),
                Polled::Event(receiver::Event::Drained { .. }) => {
                    (granted, generation) = (false, generation + 1)
                }
                _ => {}
            }
        }
        if !granted {
            let fence = Fence { request: generation, generation };
            let (payloads, landing) = (&[][..], &[][..]);
            let wanted =
                Wanted { fence, tokens, first: 0, sender: (1, 0), payloads, landing, deadline: None };
            // Not before the sender has said hello.
            granted = end.machine.grant(&wanted).is_ok();
        }
        let most = end.machine.due().map_or(LOOK * 1000, |due| due.saturating_sub(start.elapsed()));
        done(end.fabric.wait(most.min(LOOK * 1000)));
    }
}

fn second_process(words: &[String]) {
    let [fabric, at, digests, tokens] = words else { return };
    let how = (digests == "true", done(tokens.parse()));
    let end = done(SocketReceiver::bind(Options::default(), &done(Address::new(way(fabric), at))));
    println!("{}", done(end.address().ok_or("no address")));
    receive(end, how);
}

fn way(fabric: &str) -> Way {
    if fabric == "shm" { Way::Shm } else { Way::Tcp }
}

/// A sender, and the process of its receiver.
struct Pair {
    end: SendingEnd<SocketSender>,
    child: Child,
    at: PathBuf,
    tokens: u32,
    request: u64,
    start: Instant,
    /// Seconds of a core that the receiver and this thread have worked for in each post.
    worked: Vec<[f64; 2]>,
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.at);
    }
}

impl Pair {
    fn new(fabric: &str, digests: bool, bulk_tokens: u32, memory: &Arc<SendMemory>, tokens: u32) -> Pair {
        let place = format!("forebay-{}-{fabric}-{digests}-{bulk_tokens}-{tokens}", std::process::id());
        let path = std::env::temp_dir().join(place);
        let at = if fabric == "shm" { path.display().to_string() } else { "127.0.0.1:0".to_owned() };
        let mut child = done(
            Command::new(done(std::env::current_exe()))
                .args(["--receive", fabric, &at, &digests.to_string(), &tokens.to_string()])
                .stdout(Stdio::piped())
                .spawn(),
        );
        let mut listens = String::new();
        if let Some(out) = child.stdout.take() {
            done(BufReader::new(out).read_line(&mut listens));
        }
        let options = sender::Options { digests, bulk_tokens, ..sender::Options::default() };
        let machine = done(Sender::new(side(), rank(1), options));
        let (memory, listens) = (Arc::clone(memory), listens.trim());
        let at = done(Address::new(way(fabric), listens));
        let mut fabric = done(SocketSender::new(at.way(), Options::default(), memory));
        done(fabric.add(at));
        let end = SendingEnd::new(machine, fabric);
        Pair { end, child, at: path, tokens, request: 0, start: Instant::now(), worked: Vec::new() }
    }

    /// Polls until there is nothing to do. Whether the request was granted, and whether it has ended.
    fn poll(&mut self) -> (bool, bool) {
        let (mut granted, mut ended) = (false, false);
        loop {
            let now = self.start.elapsed();
            match done(self.end.poll(now)) {
                None => return (granted, ended),
                Some(Polled::Event(Event::Granted { .. })) => granted = true,
                Some(Polled::Event(Event::Ended { reason: Reason::Done, .. })) => ended = true,
                Some(Polled::Event(Event::Ended { reason, .. })) => done(Err(format!("{reason:?}"))),
                Some(Polled::Lost { why, .. }) => done(Err(format!("a lost connection: {why:?}"))),
                Some(_) => {}
            }
        }
    }

    /// Waits until there may be something to poll for.
    fn wait(&mut self, most: Duration) {
        let now = self.start.elapsed();
        let due = self.end.machine.due().map_or(most, |due| due.saturating_sub(now));
        done(self.end.fabric.wait(due.min(most)));
    }

    /// A request that is granted, and its parts.
    fn begin(&mut self) -> Vec<Computed> {
        self.request += 1;
        let (request, tokens) = (self.request, self.tokens);
        done(self.end.machine.begin(request, tokens, None));
        while !self.poll().0 {
            self.wait(LOOK * 1000);
        }
        let part = |layer| Computed { request, layer, tokens: 0..tokens, chunk: None, origin: 0 };
        (0..LAYERS).map(part).collect()
    }

    fn end(&mut self) {
        let request = self.request;
        done(self.end.machine.finish(request));
        while !self.poll().1 {
            self.wait(LOOK * 1000);
        }
    }

    /// All layers at once, or one call for each, with nothing to compute.
    fn post(&mut self, at_once: bool) -> (Duration, u64) {
        let parts = self.begin();
        let before = self.work();
        let start = Instant::now();
        for some in parts.chunks(if at_once { parts.len() } else { 1 }) {
            done(self.end.machine.computed(some));
            self.poll();
        }
        self.end();
        let took = start.elapsed();
        let after = self.work();
        self.worked.push([after[0] - before[0], after[1] - before[1]]);
        (took, bytes(self.tokens))
    }

    /// Seconds that the receiver and this thread have worked for.
    fn work(&self) -> [f64; 2] {
        // The system counts when it takes a thread off its core.
        sleep(Duration::from_millis(2));
        [worked(&self.child.id().to_string()), worked("thread-self")]
    }

    /// Layer by layer behind a computation: the time after its end. Adds the computation's own time to `computed`.
    fn layered(&mut self, spin: bool, computed: &RefCell<Vec<f64>>) -> (Duration, u64) {
        let parts = self.begin();
        let (say, said) = mpsc::channel();
        let begin = Instant::now();
        std::thread::spawn(move || {
            for part in parts {
                let start = Instant::now();
                while spin && start.elapsed() < COMPUTE {
                    spin_loop();
                }
                sleep(COMPUTE.saturating_sub(start.elapsed()));
                let _ = say.send((part, Instant::now()));
            }
        });
        let mut last = begin;
        loop {
            match said.try_recv() {
                Ok((part, at)) => {
                    last = at;
                    done(self.end.machine.computed(&[part]));
                }
                Err(mpsc::TryRecvError::Empty) => self.wait(LOOK),
                Err(mpsc::TryRecvError::Disconnected) => break,
            }
            self.poll();
        }
        self.end();
        let exposed = last.elapsed();
        let slower = last.duration_since(begin).as_secs_f64() / (COMPUTE * LAYERS).as_secs_f64() - 1.0;
        computed.borrow_mut().push(slower);
        (exposed, bytes(self.tokens))
    }
}

/// Seconds that a process of one thread, or this thread, has worked for.
fn worked(who: &str) -> f64 {
    let account = done(std::fs::read_to_string(format!("/proc/{who}/schedstat")));
    done(account.split_whitespace().next().unwrap_or_default().parse::<f64>()) / 1e9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// One core's memcpy of all runs between two memfds. Adds what it worked for.
fn memcpy(from: &Map, to: &Map, work: &RefCell<Vec<f64>>) -> (Duration, u64) {
    sleep(Duration::from_micros(1));
    let (start, before) = (Instant::now(), worked("thread-self"));
    for plane in planes(TOKENS) {
        for page in 0..u64::from(TOKENS / PAGE) {
            let at = (plane.offset + page * plane.page_bytes) as usize;
            let bytes = plane.page_bytes as usize;
            assert!((at + bytes) as u64 <= from.len().min(to.len()));
            // SAFETY: both maps are as long as was checked, no other thread uses them now, and they are two.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr().add(at), to.as_ptr().add(at), bytes);
            }
        }
    }
    black_box(to.as_ptr());
    let took = start.elapsed();
    sleep(Duration::from_micros(1));
    work.borrow_mut().push(worked("thread-self") - before);
    (took, bytes(TOKENS))
}

fn memory(tokens: u32) -> Arc<SendMemory> {
    let planes = Planes(planes(tokens));
    let memory = done(SendMemory::new(&shared(bytes(tokens)), planes, &NoFaults)).0;
    let rows: Vec<u8> = (0..bytes(tokens)).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
    done(memory.map().copy_in(0, &rows));
    Arc::new(memory)
}

fn report(rounds: &Rounds, slower: &[RefCell<Vec<f64>>; 4]) {
    for name in ["memcpy", "shm", "shm without digests", "tcp", "tcp without digests"] {
        let (rate, ratio) = (rounds.rate(name) / 1e9, rounds.ratio(name, "memcpy"));
        println!("{name}: {rate:.2} GB/s, {ratio:.2} of memcpy");
    }
    let sides = ["shm, asleep", "shm, busy", "tcp, asleep", "tcp, busy"];
    for (name, slower) in sides.into_iter().zip(slower) {
        let alone = &name[..3];
        let ms = |side| 1e3 * bytes(TOKENS) as f64 / rounds.rate(side);
        let hidden = 1.0 - rounds.ratio(alone, name);
        println!(
            "{name}: exposed {:.2} ms of {:.2} ms alone: {:.1}% hidden; the computation {:.1}% slower",
            ms(name),
            ms(alone),
            1e2 * hidden,
            1e2 * median(slower.borrow().clone()),
        );
        claim(&format!("hidden, {name}"), hidden, if alone == "shm" { 0.95 } else { 0.90 });
    }
    claim("shm without digests against memcpy", rounds.ratio("shm without digests", "memcpy"), 0.80);
    claim("shm with digests against memcpy", rounds.ratio("shm", "memcpy"), 0.45);
    let short = [
        ["shm, 256 in one post", "shm, 256 by layer", "shm, 256 by layer with the cut-over"],
        ["tcp, 256 in one post", "tcp, 256 by layer", "tcp, 256 by layer with the cut-over"],
    ];
    for [post, by_layer, cut_over] in short {
        for side in [post, by_layer, cut_over] {
            println!("{side}: {:.2} ms", 1e3 * bytes(SHORT) as f64 / rounds.rate(side));
        }
        claim(&format!("1.3 times the post against {by_layer}"), 1.3 * rounds.ratio(by_layer, post), 1.0);
        claim(&format!("the post against {cut_over}"), rounds.ratio(cut_over, post), 0.95);
    }
}

/// What the cores worked for, whatever else ran: the busier end against a memcpy.
fn cores(pairs: &[(&str, RefCell<Pair>)], copied: &RefCell<Vec<f64>>) {
    let copy = median(copied.borrow().clone());
    println!("memcpy: {:.2} ms of a core", 1e3 * copy);
    for (name, pair) in pairs {
        let pair = pair.borrow();
        let [to, from] = [0, 1].map(|end| median(pair.worked.iter().map(|worked| worked[end]).collect()));
        let ratio = copy / to.max(from);
        println!("{name}: receiver {:.2} ms, sender {:.2} ms: {ratio:.2} of memcpy", 1e3 * to, 1e3 * from);
    }
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let Some(at) = words.iter().position(|word| word == "--receive") {
        return second_process(&words[at + 1..]);
    }
    let rounds = if words.iter().any(|word| word == "--quick") { 3 } else { 11 };
    let (long, brief) = (memory(TOKENS), memory(SHORT));
    let target = done(Map::new(&shared(bytes(TOKENS)), &NoFaults)).0;
    let pair = |fabric, digests, bulk, memory, tokens| {
        RefCell::new(Pair::new(fabric, digests, bulk, memory, tokens))
    };
    let [shm, tcp] = ["shm", "tcp"].map(|fabric| pair(fabric, true, 0, &long, TOKENS));
    let [shm_bare, tcp_bare] = ["shm", "tcp"].map(|fabric| pair(fabric, false, 0, &long, TOKENS));
    let [shm_short, tcp_short] = ["shm", "tcp"].map(|fabric| pair(fabric, true, 0, &brief, SHORT));
    let [shm_cut, tcp_cut] = ["shm", "tcp"].map(|fabric| pair(fabric, true, SHORT, &brief, SHORT));
    let slower: [RefCell<Vec<f64>>; 4] = Default::default();
    let copied = RefCell::new(Vec::new());
    let mut sides = [
        Side::new("memcpy", || memcpy(long.map(), &target, &copied)),
        Side::new("shm", || shm.borrow_mut().post(true)),
        Side::new("shm without digests", || shm_bare.borrow_mut().post(true)),
        Side::new("tcp", || tcp.borrow_mut().post(true)),
        Side::new("tcp without digests", || tcp_bare.borrow_mut().post(true)),
        Side::new("shm, asleep", || shm.borrow_mut().layered(false, &slower[0])),
        Side::new("shm, busy", || shm.borrow_mut().layered(true, &slower[1])),
        Side::new("tcp, asleep", || tcp.borrow_mut().layered(false, &slower[2])),
        Side::new("tcp, busy", || tcp.borrow_mut().layered(true, &slower[3])),
        Side::new("shm, 256 in one post", || shm_short.borrow_mut().post(true)),
        Side::new("shm, 256 by layer", || shm_short.borrow_mut().post(false)),
        Side::new("shm, 256 by layer with the cut-over", || shm_cut.borrow_mut().post(false)),
        Side::new("tcp, 256 in one post", || tcp_short.borrow_mut().post(true)),
        Side::new("tcp, 256 by layer", || tcp_short.borrow_mut().post(false)),
        Side::new("tcp, 256 by layer with the cut-over", || tcp_cut.borrow_mut().post(false)),
    ];
    // The first requests of a connection touch memory for the first time.
    let _ = race(1, &mut sides);
    slower.iter().for_each(|slower| slower.borrow_mut().clear());
    copied.borrow_mut().clear();
    [&shm, &shm_bare, &tcp, &tcp_bare].into_iter().for_each(|pair| pair.borrow_mut().worked.clear());
    let rounds = race(rounds, &mut sides);
    drop(sides);
    report(&rounds, &slower);
    cores(
        &[("shm", shm), ("shm without digests", shm_bare), ("tcp", tcp), ("tcp without digests", tcp_bare)],
        &copied,
    );
}
