//! A device around another one that refuses what a test says, counts what is held, and can be slow: then no copy runs
//! before the host waits for it, which is the latest that streams allow.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};

use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Graph, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice,
    Stream,
};
use forebay::os::{Map, Protection};
use forebay::{Error, Kind, Lane, Result};

/// How many copies may run.
type Gate = Arc<(Mutex<u64>, Condvar)>;

/// The names of the devices that exported memory, by the number of its file.
static GIVERS: LazyLock<Mutex<HashMap<u64, u32>>> = LazyLock::new(Mutex::default);

/// See the file's head.
#[derive(Debug)]
pub struct Faulty {
    device: Arc<dyn Device>,
    /// None: copies run as the other device runs them.
    gate: Option<Gate>,
    copies: AtomicU64,
    /// Whether waits of the host end at once, and nothing learns of them: a caller that forgot them.
    forgets: AtomicBool,
    /// The stream whose end no wait of the host is for, and each event's last stream.
    forgotten: Mutex<Option<Stream>>,
    recorded: Mutex<Vec<(Event, Stream)>>,
    /// The copies that pass before one is refused.
    copies_left: AtomicU64,
    /// What becomes of the next remaps; all others pass.
    remaps: Mutex<VecDeque<Option<Kind>>>,
    /// Whether remaps are left out: a caller that forgot them.
    leaves_out: AtomicBool,
    /// Whether memory that is given back is refused.
    keeps: AtomicBool,
    /// The calls of any kind that pass before one is refused, and the one that was.
    aimed: Mutex<(u64, Option<&'static str>)>,
    backings: Mutex<Vec<Backing>>,
    imported: Mutex<Vec<Backing>>,
    ranges: Mutex<Vec<(Slice, Vec<Mapped>)>>,
    /// The number by which others know what it exports, such as its rank.
    name: AtomicU64,
    /// The number of the file behind what was exported or imported.
    files: Mutex<Vec<(Backing, u64)>>,
    /// The copies that were enqueued, from where to where, while they are traced.
    traced: Mutex<Option<Vec<(Slice, Slice)>>>,
    /// Whether the next copy is left out: what it should have written stays as it was.
    leaves_out_copy: AtomicBool,
}

#[allow(dead_code, reason = "a test takes what it needs")]
impl Faulty {
    pub fn new(device: Arc<dyn Device>, slow: bool) -> Arc<Faulty> {
        Arc::new(Faulty {
            device,
            gate: slow.then(Gate::default),
            copies: AtomicU64::new(0),
            forgets: AtomicBool::new(false),
            forgotten: Mutex::default(),
            recorded: Mutex::default(),
            copies_left: AtomicU64::new(u64::MAX),
            remaps: Mutex::default(),
            leaves_out: AtomicBool::new(false),
            keeps: AtomicBool::new(false),
            aimed: Mutex::new((u64::MAX, None)),
            backings: Mutex::default(),
            imported: Mutex::default(),
            ranges: Mutex::default(),
            name: AtomicU64::new(0),
            files: Mutex::default(),
            traced: Mutex::default(),
            leaves_out_copy: AtomicBool::new(false),
        })
    }

    pub fn named(&self, name: u32) {
        self.name.store(name.into(), Ordering::Relaxed);
    }

    /// The name of the device whose memory is at an address, if it was exported.
    pub fn giver(&self, address: u64) -> Option<u32> {
        let ranges = self.ranges.lock().unwrap();
        let holds = |range: &Slice| (range.address()..range.address() + range.bytes()).contains(&address);
        let (range, pieces) = ranges.iter().find(|(range, _)| holds(range))?;
        let mut end = range.address();
        let piece = pieces.iter().find(|piece| {
            end += piece.bytes;
            address < end
        })?;
        let files = self.files.lock().unwrap();
        let (_, file) = files.iter().find(|(backing, _)| *backing == piece.backing)?;
        GIVERS.lock().unwrap().get(file).copied()
    }

    /// Traces copies from here on.
    pub fn trace(&self) {
        *self.traced.lock().unwrap() = Some(Vec::new());
    }

    /// The copies that were traced, from where to where.
    pub fn traced(&self) -> Vec<(Slice, Slice)> {
        self.traced.lock().unwrap().take().unwrap()
    }

    pub fn leave_out_copy(&self) {
        self.leaves_out_copy.store(true, Ordering::Relaxed);
    }

    fn note_file(&self, backing: Backing, descriptor: &OwnedFd) -> u64 {
        let file = File::from(descriptor.try_clone().unwrap()).metadata().unwrap().ino();
        self.files.lock().unwrap().push((backing, file));
        file
    }

    pub fn forget(&self, forgets: bool) {
        self.forgets.store(forgets, Ordering::Relaxed);
    }

    /// Waits of the host for this stream end at once.
    pub fn forget_stream(&self, stream: Stream) {
        *self.forgotten.lock().unwrap() = Some(stream);
    }

    /// Refuses one copy, after `passing` others.
    pub fn refuse_copy(&self, passing: u64) {
        self.copies_left.store(passing, Ordering::Relaxed);
    }

    /// Copies that were enqueued.
    pub fn copied(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// Decides the next remaps.
    pub fn remaps(&self, outcomes: &[Option<Kind>]) {
        *self.remaps.lock().unwrap() = outcomes.iter().copied().collect();
    }

    /// Leaves remaps out, or no longer.
    pub fn leave_out_remaps(&self, leaves_out: bool) {
        self.leaves_out.store(leaves_out, Ordering::Relaxed);
    }

    /// Refuses to take memory back, or no longer.
    pub fn take_nothing_back(&self, keeps: bool) {
        self.keeps.store(keeps, Ordering::Relaxed);
    }

    /// Refuses one call of any kind after `passing` others, or none. Returns which one was refused by the last aim.
    pub fn aim(&self, passing: Option<u64>) -> Option<&'static str> {
        let mut aimed = self.aimed.lock().unwrap();
        std::mem::replace(&mut *aimed, (passing.unwrap_or(u64::MAX), None)).1
    }

    fn asks(&self, call: &'static str) -> Result<()> {
        let (passing, refused) = &mut *self.aimed.lock().unwrap();
        let left = *passing;
        *passing = if left == u64::MAX { left } else { left.checked_sub(1).unwrap_or(u64::MAX) };
        if left > 0 {
            return Ok(());
        }
        *refused = Some(call);
        Err(Error::new(Kind::OutOfMemory, "device").at("refused by the test"))
    }

    /// How many decided remaps have not been asked for.
    pub fn remaps_left(&self) -> usize {
        self.remaps.lock().unwrap().len()
    }

    /// Backings that were made or imported and not given back.
    pub fn backings(&self) -> usize {
        self.backings.lock().unwrap().len()
    }

    /// The backing that was made or imported last, of those that were not given back.
    pub fn newest(&self) -> Backing {
        *self.backings.lock().unwrap().last().unwrap()
    }

    /// Backings that were imported, in their order.
    pub fn imported(&self) -> Vec<Backing> {
        self.imported.lock().unwrap().clone()
    }

    /// The range that maps a backing, if one does.
    pub fn mapped(&self, backing: Backing) -> Option<Slice> {
        let ranges = self.ranges.lock().unwrap();
        let maps = |pieces: &[Mapped]| pieces.iter().any(|piece| piece.backing == backing);
        ranges.iter().find(|(_, pieces)| maps(pieces)).map(|(range, _)| *range)
    }

    /// Ranges, and the pieces that they map.
    pub fn ranges(&self) -> (usize, usize) {
        let ranges = self.ranges.lock().unwrap();
        (ranges.len(), ranges.iter().map(|(_, pieces)| pieces.len()).sum())
    }

    /// The bytes of each range, in the order in which they were made.
    pub fn lengths(&self) -> Vec<u64> {
        self.ranges.lock().unwrap().iter().map(|(range, _)| range.bytes()).collect()
    }

    /// Backings that no range maps.
    pub fn unmapped(&self) -> usize {
        let ranges = self.ranges.lock().unwrap();
        let mapped = |backing: &Backing| {
            ranges.iter().any(|(_, pieces)| pieces.iter().any(|piece| piece.backing == *backing))
        };
        self.backings.lock().unwrap().iter().filter(|backing| !mapped(backing)).count()
    }

    fn keep(&self, made: Result<Backing>) -> Result<Backing> {
        made.inspect(|backing| self.backings.lock().unwrap().push(*backing))
    }
}

impl Drop for Faulty {
    /// Lets all copies run, so that a test that failed meanwhile ends.
    fn drop(&mut self) {
        if let Some(gate) = &self.gate {
            if let Ok(mut open) = gate.0.lock() {
                *open = u64::MAX;
            }
            gate.1.notify_all();
        }
    }
}

/// The pieces of a range of which those from `at` on, so many bytes, are others now.
fn replaced(old: &[Mapped], at: u64, new: &[Mapped]) -> Vec<Mapped> {
    let (mut place, mut pieces) = (0, Vec::new());
    let end = at + new.iter().map(|piece| piece.bytes).sum::<u64>();
    for piece in old {
        if place == at {
            pieces.extend_from_slice(new);
        }
        if place < at || place >= end {
            pieces.push(*piece);
        }
        place += piece.bytes;
    }
    pieces
}

/// Methods that can be refused, forwarded.
macro_rules! ask {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> Result<$result> {
            self.asks(stringify!($name))?;
            self.device.$name($($argument),*)
        })*
    };
}

/// The other methods, forwarded.
macro_rules! hand_on {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $result { self.device.$name($($argument),*) })*
    };
}

impl Device for Faulty {
    fn backing(&self, bytes: u64) -> Result<Backing> {
        self.asks("backing")?;
        self.keep(self.device.backing(bytes))
    }

    fn import_backing(&self, descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing> {
        self.asks("import_backing")?;
        let copy = descriptor.try_clone().unwrap();
        let imported = self.keep(self.device.import_backing(descriptor, bytes, protection));
        imported.inspect(|backing| {
            self.note_file(*backing, &copy);
            self.imported.lock().unwrap().push(*backing);
        })
    }

    fn export(&self, backing: Backing, protection: Protection) -> Result<OwnedFd> {
        self.asks("export")?;
        let exported = self.device.export(backing, protection)?;
        let file = self.note_file(backing, &exported);
        GIVERS.lock().unwrap().insert(file, self.name.load(Ordering::Relaxed) as u32);
        Ok(exported)
    }

    fn give_back(&self, backing: Backing) -> Result<()> {
        if self.keeps.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::OsRefused, "give memory back").at("refused by the test"));
        }
        self.asks("give_back")?;
        self.device.give_back(backing)?;
        self.backings.lock().unwrap().retain(|held| *held != backing);
        Ok(())
    }

    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        self.asks("range")?;
        let range = self.device.range(pieces, protection)?;
        self.ranges.lock().unwrap().push((range, pieces.to_vec()));
        Ok(range)
    }

    fn remap(&self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        if let Some(Some(kind)) = self.remaps.lock().unwrap().pop_front() {
            return Err(Error::new(kind, "remap").at("refused by the test"));
        }
        self.asks("remap")?;
        if self.leaves_out.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.device.remap(part, pieces)?;
        let mut ranges = self.ranges.lock().unwrap();
        let inside = |range: &Slice| (0..range.bytes()).contains(&(part.address() - range.address()));
        let found = ranges.iter_mut().find(|(range, _)| range.address() <= part.address() && inside(range));
        let (range, mapped) = found.unwrap();
        *mapped = replaced(mapped, part.address() - range.address(), pieces);
        Ok(())
    }

    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()> {
        self.asks("copy")?;
        let left = self.copies_left.load(Ordering::Relaxed);
        // One refusal, and no other.
        self.copies_left.store(left.checked_sub(1).unwrap_or(u64::MAX), Ordering::Relaxed);
        if left == 0 {
            return Err(Error::new(Kind::Exhausted, "copy").at("refused by the test"));
        }
        let number = self.copies.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(traced) = &mut *self.traced.lock().unwrap() {
            traced.push((from, to));
        }
        if self.leaves_out_copy.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(gate) = &self.gate {
            let gate = Arc::clone(gate);
            let wait = move || {
                let (open, changed) = &*gate;
                drop(changed.wait_while(open.lock().unwrap(), |open| *open < number).unwrap());
            };
            self.device.call(stream, Arc::new(wait))?;
        }
        self.device.copy(stream, from, to)
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        self.asks("record")?;
        self.recorded.lock().unwrap().push((event, stream));
        self.device.record(event, stream)
    }

    fn synchronize(&self, event: Event) -> Result<()> {
        self.asks("synchronize")?;
        let recorded = self.recorded.lock().unwrap();
        let stream = recorded.iter().rfind(|(known, _)| *known == event).map(|(_, stream)| *stream);
        drop(recorded);
        let forgotten = *self.forgotten.lock().unwrap();
        if self.forgets.load(Ordering::Relaxed) || (stream.is_some() && stream == forgotten) {
            return Ok(());
        }
        if let Some(gate) = &self.gate {
            *gate.0.lock().unwrap() = self.copies.load(Ordering::Relaxed);
            gate.1.notify_all();
        }
        self.device.synchronize(event)
    }

    // SAFETY: asks of its caller what the trait's method asks.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: the caller of this method vouches for what the inner device asks.
        unsafe { self.device.import(address, bytes) }
    }

    ask! {
        allocate(bytes: u64) -> Slice;
        host_memory(bytes: u64, node: Option<u32>) -> Option<Arc<Map>>;
        register(map: &Arc<Map>) -> Slice;
        maps_offsets() -> bool;
        stream() -> Stream;
        event() -> Event;
        wait(stream: Stream, event: Event) -> ();
        is_capturing(stream: Stream) -> bool;
        enqueue(pools: Pools, stream: Stream, op: PoolOp<'_>) -> ();
        enqueue_pages(stream: Stream, op: PageOp<'_>) -> ();
        complete(stream: Stream, completer: Completer) -> ();
    }

    hand_on! {
        id() -> DeviceId;
        granularity() -> u64;
        takes_host_memory() -> bool;
        pins_host_memory() -> bool;
        query(event: Event) -> Result<bool>;
        prefetch(stream: Stream, slice: Slice, rate: u64) -> Result<()>;
        call(stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;
        attach(layout: PoolLayout) -> Result<Pools>;
        capture(stream: Stream) -> Result<()>;
        captured(stream: Stream) -> Result<Graph>;
        launch(graph: Graph, stream: Stream) -> Result<()>;
        release(graph: Graph) -> Result<()>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
        confine(stream: Option<Stream>) -> Result<()>;
    }
}
