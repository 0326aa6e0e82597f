//! The memory of a ring's weights, made smaller and larger between steps: which layers change, against a naive list,
//! the bytes that they take, and every byte of every layer after it; and ranks that ended.

use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::weights::{Odd, Place, Pulls, Ring, RingOptions, Sharding, Source, Windows};
use forebay::{Kind, Result};

use crate::faulty::Faulty;
use crate::windows::{group, layers, sharding};
use crate::{alone, alone_on, devices, grain};

const LAYERS: usize = 11;

/// A ring over layers of different sizes, and what they have to show.
struct Rig {
    host: Arc<HostDevice>,
    faulty: Arc<Faulty>,
    ring: Ring<Windows>,
    stream: Stream,
    windows: Vec<(Slice, Vec<Option<u8>>)>,
}

impl Rig {
    fn new() -> Rig {
        let host = HostDevice::new(HostOptions::default());
        let faulty = Faulty::new(host.clone(), false);
        let device: Arc<dyn Device> = faulty.clone();
        let bytes: Vec<Vec<u64>> = (0..LAYERS as u64).map(|layer| vec![(1 + layer % 4) * grain()]).collect();
        let sharding = Sharding { odd: Odd::ThirdBuffer, source: Source::Host, ..sharding(grain()) };
        let rank = alone_on(&device, &bytes, &sharding);
        let window = |layer| (rank.windows.layer(layer).unwrap(), rank.expected(layer));
        let windows = (0..LAYERS).map(window).collect();
        let stream = rank.stream;
        let options = RingOptions { draft_layers: 1, ..RingOptions::default() };
        let ring = Ring::new(&device, rank.windows, options).unwrap();
        Rig { host, faulty, ring, stream, windows }
    }

    fn step(&mut self) -> Result<()> {
        self.ring.begin(1, 2)?;
        for layer in (0..LAYERS).chain([LAYERS - 1]) {
            self.ring.enter(layer, 0, self.stream)?;
            let (window, expected) = &self.windows[layer];
            assert_eq!(self.ring.pulls().layer(layer), Ok(*window), "the addresses stay");
            let mut shown = vec![0; expected.len()];
            self.host.read(*window, &mut shown).unwrap();
            let right =
                shown.iter().zip(expected).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown));
            assert!(right, "layer {layer} shows other bytes");
            self.ring.leave(layer, 0, self.stream)?;
        }
        self.ring.end(self.stream)
    }

    fn resident(&self) -> Vec<usize> {
        (0..LAYERS).filter(|layer| self.ring.pulls().is_resident(*layer).unwrap()).collect()
    }
}

/// What should be resident: a list and sums.
struct Naive {
    /// In the order of becoming resident, with the bytes of each.
    order: Vec<(usize, u64)>,
    least: u64,
    resident: Vec<usize>,
}

impl Naive {
    fn new(rig: &Rig) -> Naive {
        let plan = rig.ring.pulls().plan();
        // Under the host as the source a sharded layer has buffers alone, each as large as its largest layer.
        let mut buffers = [0; 3];
        for one in plan.layers() {
            let Place::Buffer(buffer) = one.place else { panic!("all are sharded") };
            let bytes = one.layout.pages() * plan.grain();
            buffers[usize::from(buffer)] = bytes.max(buffers[usize::from(buffer)]);
        }
        let bits = |layer: usize| format!("{layer:08b}").chars().rev().collect::<String>();
        let mut order: Vec<(usize, u64)> =
            (0..LAYERS).map(|layer| (layer, (1 + layer as u64 % 4) * grain())).collect();
        order.sort_by_key(|(layer, _)| bits(*layer));
        Naive { order, least: buffers.iter().sum(), resident: Vec::new() }
    }

    fn bytes(&self) -> u64 {
        let own = self.order.iter().filter(|(layer, _)| self.resident.contains(layer));
        self.least + own.map(|(_, bytes)| bytes).sum::<u64>()
    }

    fn grow(&mut self, most: u64) {
        for (layer, bytes) in self.order.clone() {
            if !self.resident.contains(&layer) && self.bytes() + bytes <= most {
                self.resident.push(layer);
            }
        }
    }

    fn shrink(&mut self, most: u64) {
        for (layer, _) in self.order.iter().rev() {
            if self.bytes() <= most {
                break;
            }
            self.resident.retain(|other| other != layer);
        }
    }

    fn check(&self, rig: &Rig, said: u64) {
        let mut wanted = self.resident.clone();
        wanted.sort_unstable();
        assert_eq!((rig.resident(), said), (wanted, self.bytes()));
        assert_eq!(rig.ring.pulls().device_bytes(), said);
    }
}

#[test]
fn any_budgets_move_as_few_layers_as_they_can_and_every_layer_is_found() {
    let mut rig = Rig::new();
    let mut naive = Naive::new(&rig);
    assert_eq!(
        naive.order.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(),
        [0, 8, 4, 2, 10, 6, 1, 9, 5, 3, 7]
    );
    let backings = rig.faulty.backings();
    let mut state = 5_u64;
    let mut changed = 0;
    for _ in 0..60 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let most = naive.least + (state >> 33) % 30 * grain();
        let before = naive.resident.clone();
        let said = if state >> 63 == 0 {
            naive.shrink(most);
            rig.ring.shrink(most).unwrap()
        } else {
            naive.grow(most);
            rig.ring.grow(most, rig.stream).unwrap()
        };
        naive.check(&rig, said);
        changed += u32::from(before != naive.resident);
        rig.step().unwrap();
    }
    assert!(changed > 20, "{changed} changes");
    naive.shrink(naive.least);
    let said = rig.ring.shrink(naive.least).unwrap();
    naive.check(&rig, said);
    assert_eq!(rig.faulty.backings(), backings, "the device has all memory back");
    rig.step().unwrap();
}

#[test]
fn a_budget_below_the_plan_and_one_within_a_step_change_nothing() {
    let mut rig = Rig::new();
    let naive = Naive::new(&rig);
    rig.ring.grow(u64::MAX, rig.stream).unwrap();
    let all: Vec<usize> = (0..LAYERS).collect();
    assert_eq!(rig.resident(), all);
    let error = rig.ring.shrink(naive.least - 1).unwrap_err();
    let says = (error.kind(), error.number("least"), error.number("rank"));
    assert_eq!((says, rig.resident()), ((Kind::OutOfMemory, Some(naive.least), Some(0)), all.clone()));
    rig.ring.begin(1, 2).unwrap();
    let place = "the budget cannot change while a step is open or captured";
    for error in [rig.ring.shrink(naive.least), rig.ring.grow(u64::MAX, rig.stream)].map(Result::unwrap_err) {
        assert_eq!((error.kind(), error.place(), error.number("rank")), (Kind::Busy, place, Some(0)));
    }
    rig.ring.abandon().unwrap();
    assert_eq!(rig.resident(), all);
    rig.step().unwrap();
}

/// A change that is refused on its way names its layer. What changed before it stays, and the next steps find every
/// layer.
#[test]
fn a_refused_layer_ends_a_change_where_it_is() {
    let (passes, refused) = (None, Some(Kind::OsRefused));
    let mut rig = Rig::new();
    let naive = Naive::new(&rig);
    // A layer that becomes resident is mapped twice.
    rig.faulty.remaps(&[passes, passes, passes, refused]);
    let error = rig.ring.grow(u64::MAX, rig.stream).unwrap_err();
    rig.faulty.remaps(&[]);
    assert_eq!((error.kind(), error.number("layer")), (Kind::OsRefused, Some(8)));
    assert_eq!(rig.resident(), [0]);
    rig.step().unwrap();
    rig.ring.grow(u64::MAX, rig.stream).unwrap();
    rig.faulty.remaps(&[passes, passes, refused]);
    let error = rig.ring.shrink(naive.least).unwrap_err();
    rig.faulty.remaps(&[]);
    // The last of the order is sharded, the one before it is as it was.
    let left: Vec<usize> = (0..LAYERS).filter(|layer| *layer != 7).collect();
    assert_eq!((error.kind(), error.number("layer")), (Kind::OsRefused, Some(3)));
    assert_eq!(rig.resident(), left);
    rig.step().unwrap();
    rig.ring.shrink(naive.least).unwrap();
    rig.step().unwrap();
}

/// Layers that went on without a rank that ended stay resident: none is chosen that would need the rank.
#[test]
fn no_budget_makes_a_layer_need_a_rank_that_ended() {
    let bytes: Vec<Vec<u64>> = (0..4).map(|layer| vec![5 * grain() + layer]).collect();
    group(&devices(3), &layers(&bytes), &sharding(grain()), Pulls::default(), |rank| {
        if rank.rank() != 2 {
            return;
        }
        let (device, stream) = (Arc::clone(&rank.device), rank.stream);
        // The windows go into the ring; the rank keeps others, of one page.
        let one = alone(&[vec![grain()]], &sharding(grain()));
        let windows = std::mem::replace(&mut rank.windows, one.windows);
        let mut ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
        ring.lost(1);
        let most = ring.grow(u64::MAX, stream).unwrap();
        let least = ring.pulls().plan().bytes().device();
        let error = ring.shrink(least).unwrap_err();
        let says = (error.kind(), error.number("rank"), error.number("layer").is_some());
        assert_eq!((says, ring.pulls().device_bytes()), ((Kind::PeerLost, Some(1), true), most));
        assert_eq!(ring.make_sharded(0).unwrap_err().kind(), Kind::PeerLost);
    });
}
