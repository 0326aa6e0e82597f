//! Layers that change from sharded to resident and back while a window is brought into L2.

use std::sync::Arc;

use forebay::Result;
use forebay::check::watch::Watch;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::weights::{Prefetch, Ring, RingOptions, Sharding, Source, Windows};

use crate::faulty::Faulty;
use crate::windows::{Rank, sharding};
use crate::{alone_on, grain};

/// A rank's ring that is at its border, with a prefetch of layer 1's window under way, and nothing else; the caller of
/// a change waits for it, or not.
fn under_way(waits: bool, resident: bool) -> (Arc<Watch>, Ring<Windows>, Stream) {
    let watch = Watch::new(HostDevice::new(HostOptions::default()));
    let faulty = Faulty::new(watch.clone(), false);
    let device: Arc<dyn Device> = faulty.clone();
    let sharding = Sharding { source: Source::Host, ..sharding(grain()) };
    let Rank { windows, stream, .. } = alone_on(&device, &vec![vec![9 * grain()]; 6], &sharding);
    let prefetch = Some(Prefetch { bytes: 4 * grain(), rate: 1 << 30 });
    let mut ring = Ring::new(&device, windows, RingOptions { prefetch, ..RingOptions::default() }).unwrap();
    if resident {
        ring.make_resident(1, stream).unwrap();
    }
    ring.begin(1, 0).unwrap();
    ring.enter(0, 0, stream).unwrap();
    ring.leave(0, 0, stream).unwrap();
    ring.abandon().unwrap();
    if !waits {
        faulty.forget_stream(ring.prefetch_stream().unwrap());
    }
    (watch, ring, stream)
}

/// Each call that maps a layer's addresses anew, sharded before or resident. The control is a ring that waits for its
/// pulls alone.
#[test]
fn nothing_is_mapped_anew_under_a_prefetch() {
    type Change = fn(&mut Ring<Windows>, Stream) -> Result<()>;
    let changes: [(bool, Change); 4] = [
        (false, |ring, stream| ring.make_resident(1, stream)),
        (false, |ring, stream| ring.grow(u64::MAX, stream).map(drop)),
        (true, |ring, _| ring.make_sharded(1)),
        (true, |ring, _| ring.shrink(ring.pulls().plan().bytes().device()).map(drop)),
    ];
    for (number, (resident, change)) in changes.into_iter().enumerate() {
        let (watch, mut ring, stream) = under_way(true, resident);
        change(&mut ring, stream).unwrap();
        assert_eq!((watch.conflict(), ring.pulls().is_resident(1)), (None, Ok(!resident)));
        let (_, mut ring, stream) = under_way(false, resident);
        let error = change(&mut ring, stream).unwrap_err().to_string();
        assert!(error.contains("remap") && error.contains("prefetch"), "{number}: {error}");
    }
}
