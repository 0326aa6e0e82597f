//! A group of ranks, each with windows of its own, that fill, meet and share. What a window has to show is counted byte
//! by byte: each byte is a stamp of the rank that owns its page, of the layer, and of its place.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use forebay::device::{Device, Event, Slice, Stream};
use forebay::os::{Faults, Map, NoFaults, Request};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Patterns, Place, Plan, Pulls, Sharding, Source, Tensor, Windows};
use forebay::{Error, Result};

/// How long an answer may take. Far longer than any does: it ends a test that hangs, and decides nothing else.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The digest of the model that all ranks have.
pub const MODEL: [u8; 32] = [3; 32];

/// Limits that no busy machine exceeds.
pub fn patient() -> Limits {
    Limits { hello: PATIENCE, lost: PATIENCE, ..Limits::default() }
}

/// The byte at a place of a layer that a rank filled.
pub fn stamp(rank: u32, layer: usize, at: u64) -> u8 {
    let seed = u64::from(rank) << 56 | (layer as u64) << 40 | at;
    let mixed = (seed ^ (seed >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    ((mixed ^ (mixed >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53) >> 56) as u8
}

pub fn tensor(name: &str, bytes: u64, align: u64) -> Tensor {
    Tensor { name: name.to_owned(), bytes, align }
}

/// Layers with tensors of so many bytes each, all of them chosen.
pub fn layers(bytes: &[Vec<u64>]) -> Vec<Vec<Tensor>> {
    let name = |layer: usize, index: usize| format!("model.layers.{layer}.weight.{index}");
    let own = |(layer, all): (usize, &Vec<u64>)| {
        all.iter().enumerate().map(|(index, bytes)| tensor(&name(layer, index), *bytes, 256)).collect()
    };
    bytes.iter().enumerate().map(own).collect()
}

/// What is sharded: everything, in granules of `grain` bytes.
pub fn sharding(grain: u64) -> Sharding {
    Sharding { grain, ..Sharding::new(Patterns::new(&["*"]).unwrap()) }
}

/// The rank whose stamps this rank fills: its own, but in a layer that all ranks have whole, where they fill the same.
pub fn filler(plan: &Plan, layer: usize) -> u32 {
    let found = plan.layers().iter().find(|one| one.layer == layer).unwrap();
    if found.place == Place::Resident { 0 } else { plan.group().rank }
}

/// The rank whose stamps a page shows.
fn owner(plan: &Plan, layer: usize, page: u64) -> u32 {
    let found = plan.layers().iter().find(|one| one.layer == layer).unwrap();
    if found.place == Place::Resident || plan.source() == Source::Host {
        return filler(plan, layer);
    }
    let mut owners = (0..plan.group().ranks).filter(|rank| plan.part(layer, *rank).unwrap().contains(&page));
    let owner = owners.next().unwrap();
    assert_eq!(owners.next(), None);
    owner
}

/// The stamp of a version of the weights; the first one is 0.
pub fn stamp_of(rank: u32, version: u32, layer: usize, at: u64) -> u8 {
    stamp(rank + 16 * version, layer, at)
}

/// The bytes that a layer of a version has to show to this rank, and for each whether it is a tensor's.
pub fn expected(plan: &Plan, layer: usize, version: u32) -> Vec<Option<u8>> {
    let grain = plan.grain();
    let found = plan.layers().iter().find(|one| one.layer == layer).unwrap();
    let mut bytes = vec![None; (found.layout.pages() * grain) as usize];
    let owners: Vec<u32> = (0..found.layout.pages()).map(|page| owner(plan, layer, page)).collect();
    for tensor in found.layout.tensors() {
        for at in tensor.offset..tensor.offset + tensor.bytes {
            bytes[at as usize] = Some(stamp_of(owners[(at / grain) as usize], version, layer, at));
        }
    }
    bytes
}

/// A rank of a group in this process.
pub struct Rank {
    pub device: Arc<dyn Device>,
    pub windows: Windows,
    pub stream: Stream,
    event: Event,
    /// The engine's own memory on the host and on the device, as large as the largest window.
    map: Arc<Map>,
    host: Slice,
    buffer: Slice,
}

impl Rank {
    pub fn new(device: &Arc<dyn Device>, plan: Plan, pulls: Pulls, faults: &Arc<dyn Faults>) -> Result<Rank> {
        let most = plan.layers().iter().map(|layer| layer.layout.pages()).max().unwrap_or(1) * plan.grain();
        let request =
            Request { bytes: most, huge: false, populate: false, lock: false, node: None, shared: false };
        let map = match device.host_memory(most, None)? {
            Some(map) => map,
            None => Arc::new(Map::new(&request, &NoFaults)?.0),
        };
        let (host, buffer) = (device.register(&map)?, device.allocate(most)?);
        let (stream, event) = (device.stream()?, device.event()?);
        let windows = Windows::new(device, plan, pulls, faults)?;
        Ok(Rank { device: Arc::clone(device), windows, stream, event, map, host, buffer })
    }

    pub fn plan(&self) -> &Plan {
        self.windows.plan()
    }

    pub fn rank(&self) -> u32 {
        self.plan().group().rank
    }

    pub fn wait(&self) -> Result<()> {
        self.device.record(self.event, self.stream)?;
        self.device.synchronize(self.event)
    }

    pub fn read(&self, slice: Slice) -> Vec<u8> {
        self.device.copy(self.stream, slice, self.host.part(0, slice.bytes()).unwrap()).unwrap();
        self.wait().unwrap();
        let mut bytes = vec![0; slice.bytes() as usize];
        self.map.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    /// An engine's buffer on the device with these bytes.
    pub fn holds(&self, bytes: &[u8]) -> Slice {
        self.map.copy_in(0, bytes).unwrap();
        let words = (bytes.len() as u64).next_multiple_of(4);
        let [from, to] = [self.host, self.buffer].map(|memory| memory.part(0, words).unwrap());
        self.device.copy(self.stream, from, to).unwrap();
        self.wait().unwrap();
        self.buffer.part(0, bytes.len() as u64).unwrap()
    }

    /// Fills a tensor with this rank's stamps.
    pub fn fill_one(&mut self, layer: usize, index: usize) -> Result<()> {
        let plan = self.plan().layers().iter().find(|one| one.layer == layer).unwrap();
        let placed = plan.layout.tensors()[index].clone();
        let rank = filler(self.plan(), layer);
        let bytes: Vec<u8> =
            (placed.offset..placed.offset + placed.bytes).map(|at| stamp(rank, layer, at)).collect();
        let from = self.holds(&bytes);
        self.windows.fill(layer, &placed.name, from, self.stream)?;
        self.wait()
    }

    pub fn fill(&mut self) -> Result<()> {
        let all: Vec<(usize, usize)> =
            self.plan().layers().iter().map(|layer| (layer.layer, layer.layout.tensors().len())).collect();
        for (layer, tensors) in all {
            (0..tensors).try_for_each(|index| self.fill_one(layer, index))?;
        }
        Ok(())
    }

    /// Meets the group in `folder` and shares.
    pub fn share(&mut self, folder: &Path, limits: Limits, faults: &Arc<dyn Faults>) -> Result<Links> {
        let hello = self.windows.hello(MODEL, self.stream)?;
        let mut links = Links::meet(folder, hello, limits, Arc::clone(faults))?;
        self.windows.share(&mut links, self.stream, PATIENCE)?;
        Ok(links)
    }

    /// The bytes that a layer has to show, and for each whether it is a tensor's.
    pub fn expected(&self, layer: usize) -> Vec<Option<u8>> {
        expected(self.plan(), layer, 0)
    }

    /// Whether a layer's window shows what it has to.
    pub fn is_whole(&self, layer: usize) -> bool {
        let shown = self.read(self.windows.layer(layer).unwrap());
        let expected = self.expected(layer);
        assert_eq!(shown.len(), expected.len());
        shown.iter().zip(expected).all(|(shown, expected)| expected.is_none_or(|byte| byte == *shown))
    }

    /// Pulls a layer and compares every byte.
    pub fn pull(&self, layer: usize) {
        self.windows.pull(layer, self.stream).unwrap();
        self.wait().unwrap();
        assert!(self.is_whole(layer), "rank {} shows other bytes in layer {layer}", self.rank());
    }

    pub fn layers(&self) -> Vec<usize> {
        self.plan().layers().iter().map(|layer| layer.layer).collect()
    }
}

/// A folder that is removed with its owner.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forebay-windows-{}-{next}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes a rank on each device, in a thread of its own, fills and shares, and does `work`. The sessions live as long as
/// the slowest rank.
#[allow(dead_code, reason = "a test takes what it needs")]
pub fn group(
    devices: &[Arc<dyn Device>],
    layers: &[Vec<Tensor>],
    sharding: &Sharding,
    pulls: Pulls,
    work: impl Fn(&mut Rank) + Sync,
) {
    let folder = Folder::new();
    let one = |device: &Arc<dyn Device>, rank: u32| -> Result<Links, Error> {
        let plan = Plan::new(layers, Group { id: 5, rank, ranks: devices.len() as u32 }, sharding)?;
        let faults: Arc<dyn Faults> = Arc::new(NoFaults);
        let mut rank = Rank::new(device, plan, pulls, &faults)?;
        rank.fill()?;
        let links = rank.share(&folder.0, patient(), &faults)?;
        work(&mut rank);
        Ok(links)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .zip(0..)
            .map(|(device, rank)| (rank, scope.spawn(move || one(device, rank))))
            .collect();
        let links: Vec<_> = threads.into_iter().map(|(rank, thread)| (rank, thread.join())).collect();
        for (rank, result) in &links {
            assert!(matches!(result, Ok(Ok(_))), "rank {rank}: {result:?}");
        }
    });
}
