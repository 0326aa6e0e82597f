//! Claim: a layer call through C costs at most 100 ns more than the Rust call, for a whole batch at once. So does a
//! call of a step of sharded weights.
//!
//! The C side is the shared library, built in release and opened as any program opens it; the Rust side is the crate
//! itself. Both make the same calls on an inline host device: `fb_layer` and `Cache::layer` for every layer of a step,
//! at batch 1, 8 and 64, k 64 and 2,048, with every row resident and with an eighth of the rows missed. The bench times
//! only these calls, by the thread's CPU time, and alternates the sides. The figure is the median difference over the
//! rounds. The calls of sharded weights are begin, enter and leave of 64 layers, and end, of a rank that is alone.
//!
//! For machines too noisy for nanoseconds, `FOREBAY_COUNT_SIDE=c` or `=rust` makes `FOREBAY_COUNT_STEPS` steps of the
//! smallest shape on one side alone and prints the number of calls, for a count of instructions under callgrind.

#[path = "../../benches/support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "a bench takes what it needs")]
#[path = "../../benches/support/race.rs"]
mod race;
#[path = "support/ring.rs"]
mod ring;

use std::ffi::{CStr, CString, c_char, c_void};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Error, Kind, Layer, LayerCall, Memory,
    MicroBatch, Open, Result, Sequence, Shape, Streams, WarmUp,
};
use race::{Side, done, record};

const LAYERS: u32 = 4;
const ROW_BYTES: u32 = 64;
/// The nanoseconds that a call through C may cost more.
const MOST_NS: f64 = 100.0;
const ROUNDS: usize = 31;
/// The approximate number of selected positions in a repetition.
const POSITIONS: u32 = 1 << 20;

/// One shape to measure: batch rows, positions of each, and whether some miss.
#[derive(Clone, Copy)]
struct Point {
    batch: u32,
    k: u32,
    misses: bool,
}

impl Point {
    /// Tokens of a sequence: four times the rows that a step selects.
    const fn tokens(self) -> u32 {
        4 * self.k
    }

    /// The selections of the steps in turn: windows that move on by an eighth, or one window.
    fn selections(self) -> Vec<Vec<i32>> {
        let moves = if self.misses { self.tokens() / (self.k / 8) } else { 1 };
        let window = |at: u32| (0..self.k).map(move |j| ((at * (self.k / 8) + j) % self.tokens()) as i32);
        (0..moves).map(|at| (0..self.batch).flat_map(|_| window(at)).collect()).collect()
    }

    /// Calls of each layer in a step: more than one only if all rows are resident.
    fn repeats(self) -> u32 {
        if self.misses { 1 } else { (POSITIONS / (8 * LAYERS * self.batch * self.k)).clamp(1, 64) }
    }

    fn steps(self) -> u32 {
        (POSITIONS / (self.repeats() * LAYERS * self.batch * self.k)).clamp(4, 400)
    }
}

fn refused(what: &'static str, status: u32) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(Error::new(Kind::Internal, "bench").at(what).with("status", status)),
    }
}

/// One side: its steps, and the time of the layer calls in them.
trait Steps {
    fn step(&mut self, selection: &[i32], repeats: u32) -> Result<Duration>;
}

struct InRust {
    device: Arc<HostDevice>,
    cache: Cache,
    stream: Stream,
    rows: Vec<BatchRow>,
    slots: Vec<i32>,
}

impl InRust {
    fn new(point: Point) -> Result<InRust> {
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream()?;
        let shape = Shape {
            layers: LAYERS,
            draft_layers: 0,
            runs: [ROW_BYTES, 0],
            host_stride: 0,
            device_block_align: 0,
            index_key_bytes: 0,
            page_tokens: 64,
            top_k: point.k,
            lone_layers: 0,
            group_layers: 0,
        };
        let config = Config {
            memory: Memory { huge: false, populate: false, lock: false, node: None },
            ..Config::new(shape, point.batch, point.tokens() + 64, point.k)
        };
        let mut cache = Cache::new(config, device.clone())?;
        let prompt = vec![0; (point.tokens() * ROW_BYTES) as usize];
        let open = Open {
            prompt: point.tokens(),
            promised: 64,
            budget: Budget::Slots(point.k),
            bring_up: BringUp::Nothing,
        };
        let mut join = |_| {
            let sequence: Sequence = cache.open(&open)?;
            (0..LAYERS).try_for_each(|layer| cache.append(sequence, Layer(layer), &prompt))?;
            let _ready = cache.join(sequence, stream, WarmUp::default())?;
            Ok(BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 })
        };
        let rows = (0..point.batch).map(&mut join).collect::<Result<_>>()?;
        Ok(InRust { device, cache, stream, rows, slots: vec![0; (point.batch * point.k) as usize] })
    }

    fn slice(&self, words: &[i32]) -> Slice {
        // SAFETY: memory of this process, and the stream runs inside its calls.
        unsafe { self.device.import(words.as_ptr() as u64, 4 * words.len() as u64) }
    }
}

impl Steps for InRust {
    fn step(&mut self, selection: &[i32], repeats: u32) -> Result<Duration> {
        let stream = self.stream;
        let mut step = self.cache.prepare(MicroBatch(0), 1, &self.rows, None, stream)?;
        let lap = Lap::begin();
        for layer in (0..LAYERS).flat_map(|layer| (0..repeats).map(move |_| layer)) {
            let buffers = Buffers {
                selection: self.slice(selection),
                slots: self.slice(&self.slots),
                split_indices: None,
            };
            let streams = Streams { resolve: stream, gather: stream };
            self.cache.layer(&step, LayerCall::whole(Layer(layer)), streams, buffers)?;
        }
        let time = lap.end();
        (0..LAYERS)
            .try_for_each(|layer| self.cache.scatter(&step, LayerCall::whole(Layer(layer)), stream))?;
        self.cache.finish(&mut step, stream)?;
        match self.cache.retire(step, stream) {
            Ok(_) => Ok(time),
            Err(unretired) => Err(unretired.error),
        }
    }
}

/// The required fields of `fb_device_config`.
#[repr(C)]
struct DeviceConfig {
    size: usize,
    kind: [u32; 2],
}

/// `fb_cache_config` up to `memory`, in 32-bit words.
#[repr(C)]
struct CacheConfig {
    size: usize,
    /// layers, draft layers, index key bytes, row bytes (2), page tokens, top_k, lanes, max tokens, slots, query rows;
    /// ten optional ones; memory.
    words: [u32; 22],
}

/// The required fields of `fb_open_config`, and its budget.
#[repr(C)]
struct OpenConfig {
    size: usize,
    prompt: u32,
    promised: u32,
    slots: u32,
    bring_up: u32,
}

#[repr(C)]
struct RowInC {
    sequence: u64,
    accepted: u32,
    query_rows: u32,
}

/// The required fields of `fb_step_config`.
#[repr(C)]
struct StepConfig {
    size: usize,
    rows: *const RowInC,
    row_count: u32,
    query_rows: u32,
}

type Handle = *mut c_void;

/// The calls, as `include/forebay.h` declares them.
#[derive(Clone, Copy)]
struct Calls {
    library: *mut c_void,
    device_create: unsafe extern "C" fn(*const DeviceConfig, *mut c_char, usize, *mut Handle) -> u32,
    cache_create: unsafe extern "C" fn(Handle, *const CacheConfig, *mut c_char, usize, *mut Handle) -> u32,
    open: unsafe extern "C" fn(Handle, *const OpenConfig, *mut u64) -> u32,
    append: unsafe extern "C" fn(Handle, u64, u32, *const c_void, u32) -> u32,
    join: unsafe extern "C" fn(Handle, u64, *const c_void, *mut c_void, *mut Handle) -> u32,
    prepare: unsafe extern "C" fn(Handle, *const StepConfig, *mut c_void, *mut u64) -> u32,
    layer: unsafe extern "C" fn(Handle, u64, u32, *const i32, *mut i32, *mut c_void) -> u32,
    scatter: unsafe extern "C" fn(Handle, u64, u32, *mut c_void) -> u32,
    finish: unsafe extern "C" fn(Handle, u64, *mut c_void) -> u32,
    retire: unsafe extern "C" fn(Handle, *mut u64, *mut c_void, *mut c_void) -> u32,
    close: unsafe extern "C" fn(Handle, u64, *mut c_void) -> u32,
    cache_destroy: unsafe extern "C" fn(Handle) -> u32,
    device_destroy: unsafe extern "C" fn(Handle) -> u32,
}

/// Builds the shared library, and returns its path.
fn build() -> Option<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--offline", "--release", "-p", "forebay-ffi", "--lib", "--message-format=json"]);
    let built = cargo.stderr(std::process::Stdio::inherit()).output().ok()?;
    let messages = String::from_utf8(built.stdout).ok()?;
    let mut files = messages.lines().flat_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        message["filenames"].as_array().cloned().unwrap_or_default()
    });
    files.find_map(|file| file.as_str().filter(|file| file.ends_with("libforebay.so")).map(str::to_owned))
}

/// The address of a symbol, as a function of the field's type.
///
/// # Safety
/// `library` is open, and the symbol is a function of type `F`.
unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is open, the name ends in a zero byte.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        return Err(missing(&name.to_string_lossy()));
    }
    // SAFETY: a function of type F, of the size of a pointer, and not null.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

fn missing(what: &str) -> Error {
    Error::new(Kind::Io, "bench").at(what.to_owned())
}

impl Calls {
    fn load() -> Result<Calls> {
        let path = build().and_then(|path| CString::new(path).ok());
        let path = path.ok_or_else(|| missing("libforebay.so: cargo did not build it"))?;
        // SAFETY: the library just built, whose initialisers are Rust's own; it stays open.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(missing("libforebay.so: dlopen"));
        }
        // SAFETY: an open library, and each field's type is what the header declares.
        unsafe {
            Ok(Calls {
                library,
                device_create: function(library, c"fb_device_create")?,
                cache_create: function(library, c"fb_cache_create")?,
                open: function(library, c"fb_open")?,
                append: function(library, c"fb_append")?,
                join: function(library, c"fb_join")?,
                prepare: function(library, c"fb_prepare")?,
                layer: function(library, c"fb_layer")?,
                scatter: function(library, c"fb_scatter")?,
                finish: function(library, c"fb_finish")?,
                retire: function(library, c"fb_retire")?,
                close: function(library, c"fb_close")?,
                cache_destroy: function(library, c"fb_cache_destroy")?,
                device_destroy: function(library, c"fb_device_destroy")?,
            })
        }
    }
}

struct ThroughC {
    calls: Calls,
    device: Handle,
    cache: Handle,
    rows: Vec<RowInC>,
    slots: Vec<i32>,
}

impl ThroughC {
    fn new(calls: Calls, point: Point) -> Result<ThroughC> {
        let (mut device, mut cache) = (null_mut(), null_mut());
        let asked = DeviceConfig { size: size_of::<DeviceConfig>(), kind: [0; 2] };
        let (tokens, k) = (point.tokens(), point.k);
        let mut words = [0; 22];
        let declared = [LAYERS, 0, 0, ROW_BYTES, 0, 64, k, point.batch, tokens + 64, k, 1];
        words[..declared.len()].copy_from_slice(&declared);
        // Small pages, lazy, unlocked.
        words[20] = 7;
        let config = CacheConfig { size: size_of::<CacheConfig>(), words };
        // SAFETY: room for the outputs.
        unsafe {
            refused("device", (calls.device_create)(&asked, null_mut(), 0, &mut device))?;
            refused("cache", (calls.cache_create)(device, &config, null_mut(), 0, &mut cache))?;
        }
        let prompt = vec![0_u8; (tokens * ROW_BYTES) as usize];
        let open =
            OpenConfig { size: size_of::<OpenConfig>(), prompt: tokens, promised: 64, slots: k, bring_up: 1 };
        let join = |_| {
            let mut sequence = 0;
            // SAFETY: as many rows as stated, and room for the output.
            unsafe {
                refused("open", (calls.open)(cache, &open, &mut sequence))?;
                for layer in 0..LAYERS {
                    let rows = prompt.as_ptr().cast();
                    refused("append", (calls.append)(cache, sequence, layer, rows, tokens))?;
                }
                refused("join", (calls.join)(cache, sequence, null(), null_mut(), null_mut()))?;
            }
            Ok(RowInC { sequence, accepted: 0, query_rows: 1 })
        };
        let rows = (0..point.batch).map(join).collect::<Result<_>>()?;
        Ok(ThroughC { calls, device, cache, rows, slots: vec![0; (point.batch * k) as usize] })
    }
}

impl Steps for ThroughC {
    fn step(&mut self, selection: &[i32], repeats: u32) -> Result<Duration> {
        let (Calls { prepare, layer: call, scatter, finish, retire, .. }, none) = (self.calls, null_mut());
        let config = StepConfig {
            size: size_of::<StepConfig>(),
            rows: self.rows.as_ptr(),
            row_count: self.rows.len() as u32,
            query_rows: 1,
        };
        let mut step = 0;
        // SAFETY: buffers of the step's shape, and room for the outputs.
        unsafe {
            refused("prepare", prepare(self.cache, &config, none, &mut step))?;
            let lap = Lap::begin();
            for layer in (0..LAYERS).flat_map(|layer| (0..repeats).map(move |_| layer)) {
                let slots = self.slots.as_mut_ptr();
                refused("layer", call(self.cache, step, layer, selection.as_ptr(), slots, none))?;
            }
            let time = lap.end();
            for layer in 0..LAYERS {
                refused("scatter", scatter(self.cache, step, layer, none))?;
            }
            refused("finish", finish(self.cache, step, none))?;
            refused("retire", retire(self.cache, &mut step, none, none))?;
            Ok(time)
        }
    }
}

impl Drop for ThroughC {
    fn drop(&mut self) {
        // SAFETY: handles of this side's own.
        unsafe {
            for row in &self.rows {
                (self.calls.close)(self.cache, row.sequence, null_mut());
            }
            (self.calls.cache_destroy)(self.cache);
            (self.calls.device_destroy)(self.device);
        }
    }
}

/// Makes some steps; returns the number of layer calls.
fn pass(side: &mut dyn Steps, point: Point, selections: &[Vec<i32>], next: &mut usize) -> (Duration, u64) {
    let mut time = Duration::ZERO;
    for _ in 0..point.steps() {
        time += done(side.step(&selections[*next % selections.len()], point.repeats()));
        *next += 1;
    }
    (time, u64::from(point.steps() * point.repeats() * LAYERS))
}

/// Nanoseconds a call that the C side takes longer: the median over the rounds; and the nanoseconds of a Rust call.
fn difference(rust: &mut Side<'_>, c: &mut Side<'_>) -> (f64, f64) {
    let ns = |side: &mut Side<'_>| {
        let (time, calls) = (side.pass)();
        time.as_nanos() as f64 / calls as f64
    };
    let mut rounds: Vec<(f64, f64)> = (0..ROUNDS)
        .map(|_| {
            let (rust, c) = (ns(rust), ns(c));
            (c - rust, rust)
        })
        .collect();
    rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let more = rounds[ROUNDS / 2].0;
    rounds.sort_by(|a, b| a.1.total_cmp(&b.1));
    (more, rounds[ROUNDS / 2].1)
}

fn measure(criterion: &mut Criterion, calls: Calls, point: Point) {
    let selections = point.selections();
    let (mut rust, mut c) = (done(InRust::new(point)), done(ThroughC::new(calls, point)));
    let (mut next_rust, mut next_c) = (0, 0);
    let mut sides = [
        Side::new("rust", || pass(&mut rust, point, &selections, &mut next_rust)),
        Side::new("c", || pass(&mut c, point, &selections, &mut next_c)),
    ];
    let Point { batch, k, misses } = point;
    let what =
        format!("layer, batch {batch}, k {k}, {}", if misses { "an eighth missed" } else { "all hits" });
    compare(criterion, &what, &mut sides);
}

/// The calls of a step of sharded weights.
fn measure_ring(criterion: &mut Criterion, calls: Calls) {
    let folder = std::env::temp_dir().join(format!("forebay-bench-{}", std::process::id()));
    done(std::fs::create_dir_all(&folder));
    let path = done(CString::new(folder.as_os_str().as_encoded_bytes()));
    let (mut rust, mut c) = (done(ring::InRust::new()), done(ring::ThroughC::new(calls.library, &path)));
    let mut sides = [
        Side::new("rust", || (done(rust.pass()), ring::CALLS)),
        Side::new("c", || (done(c.pass()), ring::CALLS)),
    ];
    compare(criterion, "step of sharded weights", &mut sides);
    done(std::fs::remove_dir_all(&folder));
}

fn compare(criterion: &mut Criterion, what: &str, sides: &mut [Side<'_>; 2]) {
    record(criterion, what, sides);
    let [rust, c] = sides;
    let (more, ns) = difference(rust, c);
    let verdict = if more <= MOST_NS { "met" } else { "MISSED" };
    println!("claim: {what}: C {more:+.0} ns to Rust's {ns:.0} (target {MOST_NS:.0}, {verdict})");
}

/// Steps of one side for a program that counts instructions.
fn count(side: &str, calls: Calls) {
    let steps = std::env::var("FOREBAY_COUNT_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(100);
    let point = Point { batch: 1, k: 64, misses: false };
    let mut side: Box<dyn Steps> = match side {
        "c" => Box::new(done(ThroughC::new(calls, point))),
        _ => Box::new(done(InRust::new(point))),
    };
    let selections = point.selections();
    for _ in 0..steps {
        done(side.step(&selections[0], point.repeats()));
    }
    println!("calls {}", steps * point.repeats() * LAYERS);
}

fn main() {
    let calls = done(Calls::load());
    if let Ok(side) = std::env::var("FOREBAY_COUNT_SIDE") {
        return count(&side, calls);
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args();
    for misses in [false, true] {
        for k in [64, 2048] {
            for batch in [1, 8, 64] {
                measure(&mut criterion, calls, Point { batch, k, misses });
            }
        }
    }
    measure_ring(&mut criterion, calls);
    criterion.final_summary();
}
