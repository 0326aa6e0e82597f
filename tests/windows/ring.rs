//! The ring over real windows on the virtual clock, whose seeds delay and reorder whatever no edge orders: each use of
//! a window compares every byte, at the time at which the use runs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Odd, Plan, Pulls, Ring, RingOptions, Sharding, Source};
use forebay::{Kind, Result};

use crate::faulty::Faulty;
use crate::windows::{Rank, group, layers, sharding};
use crate::{alone, alone_on, devices, grain, no_faults};

/// Steps of a run.
const STEPS: usize = 3;

/// A rank's clock and the memory beneath it.
struct Timed {
    clock: Arc<ClockDevice>,
    host: Arc<HostDevice>,
}

fn timed(seed: u64) -> Timed {
    let host = HostDevice::new(HostOptions::default());
    let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
    Timed { clock: ClockDevice::over(host.clone(), options).unwrap(), host }
}

/// Enqueues a use of a layer, which counts itself in `wrong` if the window shows another byte than the owner's.
fn uses(
    rank: &Rank,
    host: &Arc<HostDevice>,
    (layer, expected): (usize, &Arc<Vec<Option<u8>>>),
    stream: Stream,
    wrong: &Arc<AtomicU32>,
) {
    let window = rank.windows.layer(layer).unwrap();
    let (host, wrong, expected) = (Arc::clone(host), Arc::clone(wrong), Arc::clone(expected));
    let compare = move || {
        let mut shown = vec![0; expected.len()];
        host.read(window, &mut shown).unwrap();
        let right =
            shown.iter().zip(&*expected).all(|(shown, wanted)| wanted.is_none_or(|byte| byte == *shown));
        wrong.fetch_add(u32::from(!right), Ordering::Relaxed);
    };
    rank.device.call(stream, Arc::new(compare)).unwrap();
}

/// Runs steps of both ranks and returns how many uses of rank 0 found other bytes, with the waits of its last steps. Of
/// its waits after the first step those in `without` are left out.
fn wrong_uses(seed: u64, options: RingOptions, sharding: &Sharding, without: Range<u64>) -> (u32, u64) {
    let bytes: Vec<Vec<u64>> = (0..5).map(|layer| vec![3 * grain() + 10 * layer, 77]).collect();
    let all = [timed(2 * seed), timed(2 * seed + 1)];
    let devices: Vec<Arc<dyn Device>> = all.iter().map(|it| Arc::clone(&it.clock) as _).collect();
    let (wrong, waits) = (Arc::new(AtomicU32::new(0)), AtomicU32::new(0));
    group(&devices, &layers(&bytes), sharding, Pulls::default(), |rank| {
        let Timed { clock, host } = &all[rank.rank() as usize];
        let device = Arc::clone(&rank.device);
        let mut ring = Ring::new(&device, &rank.windows, options).unwrap();
        let streams: Vec<Stream> = (0..options.micro_batches).map(|_| device.stream().unwrap()).collect();
        let own = Arc::new(AtomicU32::new(0));
        let expected: Vec<_> = (0..bytes.len()).map(|layer| Arc::new(rank.expected(layer))).collect();
        let mut first = 0;
        for step in 0..STEPS {
            if step == 1 {
                first = clock.waits();
                clock.without_waits(first + without.start..first + without.end);
            }
            ring.begin(streams.len(), 2).unwrap();
            // Four layers, and a draft layer in two passes.
            for layer in [0, 1, 2, 3, 4, 4] {
                for (micro_batch, stream) in streams.iter().enumerate() {
                    ring.enter(layer, micro_batch, *stream).unwrap();
                    for _ in 0..2 {
                        uses(rank, host, (layer, &expected[layer]), *stream, &own);
                    }
                    ring.leave(layer, micro_batch, *stream).unwrap();
                }
            }
            ring.end(streams[0]).unwrap();
        }
        waits.fetch_max((clock.waits() - first) as u32, Ordering::Relaxed);
        clock.run().unwrap();
        match rank.rank() {
            0 => wrong.fetch_add(own.load(Ordering::Relaxed), Ordering::Relaxed),
            _ => own.load(Ordering::Relaxed),
        };
        clock.without_waits(0..0);
    });
    (wrong.load(Ordering::Relaxed), waits.load(Ordering::Relaxed).into())
}

fn options(seed: u64) -> RingOptions {
    let micro_batches = 1 + seed as usize % 2;
    RingOptions { draft_layers: 1, micro_batches, parts: 1 + seed as usize % 3, ..RingOptions::default() }
}

fn kinds(seed: u64) -> Sharding {
    let odd = [Odd::Cheapest, Odd::ThirdBuffer, Odd::ResidentLast][seed as usize % 3];
    let source = if seed % 5 == 4 { Source::Host } else { Source::Peers };
    Sharding { odd, source, ..sharding(grain()) }
}

#[test]
fn every_use_shows_the_owners_bytes_for_every_seed() {
    // Ranks wait for each other while they meet, so several seeds at once are quicker.
    std::thread::scope(|scope| {
        for part in 0..8 {
            scope.spawn(move || {
                for seed in (part..200).step_by(8) {
                    let (wrong, _) = wrong_uses(seed, options(seed), &kinds(seed), 0..0);
                    assert_eq!(wrong, 0, "seed {seed}");
                }
            });
        }
    });
}

/// Each arrival and each release that is left out shows as wrong bytes for some seed; with one micro-batch and pulls in
/// one part, a step has no other waits. Of the last layer's two passes in a row, the second arrival orders nothing.
#[test]
fn control_waits_that_are_left_out_show_for_some_seed() {
    let sharding = sharding(grain());
    let options = RingOptions { draft_layers: 1, ..RingOptions::default() };
    let (_, waits) = wrong_uses(0, options, &sharding, 0..0);
    let shows = |wait: u64| (0..40).any(|seed| wrong_uses(seed, options, &sharding, wait..wait + 1).0 > 0);
    // Of the second of three steps, so that each wait has uses behind it.
    let unseen: Vec<u64> = (0..waits / 2).filter(|wait| !shows(*wait)).collect();
    // Layer 0 is resident: an arrival and a release of layers 1, 2 and 3, then layer 4's arrival, the same again, and
    // its release.
    assert_eq!((unseen, waits / 2), (vec![7], 9));
}

/// A change of a layer that fails, at each remap and where its memory is not taken back: the next steps find every
/// layer, or an error says that its addresses show what is not known.
#[test]
fn a_failed_change_shows_no_other_layer() {
    use Kind::{DeviceFailed, OsRefused};
    let (passes, refused, dies) = (None, Some(OsRefused), Some(DeviceFailed));
    let outcomes: [&[Option<Kind>]; 8] = [
        &[],
        &[refused],
        &[dies],
        &[passes, refused],
        &[passes, dies],
        &[passes, refused, refused],
        &[passes, refused, dies],
        &[passes, passes],
    ];
    let mut errors = 0;
    for (layer, resident, keeps, outcomes) in (0..4)
        .flat_map(|layer| [false, true].map(|resident| (layer, resident)))
        .flat_map(|(layer, resident)| [false, true].map(|keeps| (layer, resident, keeps)))
        .flat_map(|(layer, resident, keeps)| outcomes.map(|outcomes| (layer, resident, keeps, outcomes)))
    {
        let case = format!("layer {layer}, resident: {resident}, memory kept: {keeps}, {outcomes:?}");
        let host = HostDevice::new(HostOptions::default());
        let faulty = Faulty::new(host.clone(), false);
        let device: Arc<dyn Device> = faulty.clone();
        let bytes: Vec<Vec<u64>> = (0..4).map(|layer| vec![3 * grain() + layer]).collect();
        let rank = alone_on(&device, &bytes, &Sharding { source: Source::Host, ..sharding(grain()) });
        let expected: Vec<_> = (0..4).map(|layer| rank.expected(layer)).collect();
        let (stream, Rank { windows, .. }) = (rank.stream, rank);
        let mut ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
        let step = |ring: &mut Ring| -> Result<()> {
            ring.begin(1, 0)?;
            for (layer, expected) in expected.iter().enumerate() {
                ring.enter(layer, 0, stream)?;
                let window = ring.pulls().layer(layer)?;
                let mut shown = vec![0; window.bytes() as usize];
                host.read(window, &mut shown).unwrap();
                let right =
                    shown.iter().zip(expected).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown));
                assert!(right, "{case}: layer {layer} shows other bytes");
                ring.leave(layer, 0, stream)?;
            }
            ring.end(stream)
        };
        step(&mut ring).unwrap();
        if resident {
            ring.make_resident(layer, stream).unwrap();
            step(&mut ring).unwrap();
        }
        faulty.remaps(outcomes);
        faulty.take_nothing_back(keeps);
        let changed = match resident {
            false => ring.make_resident(layer, stream),
            true => ring.make_sharded(layer),
        };
        faulty.remaps(&[]);
        faulty.take_nothing_back(false);
        for _ in 0..2 {
            if let Err(error) = step(&mut ring) {
                assert!(changed.is_err(), "{case}: {error}");
                assert_eq!(ring.pulls().layer(layer).unwrap_err(), error, "{case}");
                assert_eq!(ring.pulls().copies(layer).unwrap_err(), error, "{case}");
                errors += 1;
                ring.abandon().unwrap();
            }
        }
    }
    assert!(errors > 20, "{errors} steps that a broken layer refused");
}

/// No step begins where it is not known what a layer's addresses show, and none is launched.
#[test]
fn no_step_begins_over_a_broken_layer() {
    let faulty = Faulty::new(HostDevice::new(HostOptions::default()), false);
    let device: Arc<dyn Device> = faulty.clone();
    let bytes: Vec<Vec<u64>> = (0..4).map(|layer| vec![3 * grain() + layer]).collect();
    let rank = alone_on(&device, &bytes, &Sharding { source: Source::Host, ..sharding(grain()) });
    let (stream, Rank { windows, .. }) = (rank.stream, rank);
    let mut ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
    let launches = AtomicU32::new(0);
    let launch = || {
        launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    ring.launch(stream, launch).unwrap();
    // Layer 2 is the first of no buffer, so that only the launch itself looks at it. It was resident, and is not
    // mapped as before.
    ring.make_resident(2, stream).unwrap();
    faulty.remaps(&[None, Some(Kind::DeviceFailed)]);
    ring.make_sharded(2).unwrap_err();
    faulty.remaps(&[]);
    let error = ring.launch(stream, launch).unwrap_err();
    assert_eq!((error.kind(), launches.into_inner()), (Kind::DeviceFailed, 1), "{error}");
    assert_eq!(ring.begin(1, 0), Err(error));
}

/// A caller that keeps windows and ring as one makes the ring first, and fills and shares the windows in it.
#[test]
fn a_ring_is_made_before_its_windows_are_filled_and_shared() {
    let bytes: Vec<Vec<u64>> = (0..4).map(|_| vec![grain()]).collect();
    let refused = |ring: &mut Ring, words: &str| {
        let error = ring.filling().map(|_| ()).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::InvalidState, Some(0)));
        assert!(error.place().contains(words), "{error}");
    };
    for begun in [false, true] {
        let plan =
            Plan::new(&layers(&bytes), Group { id: 0, rank: 0, ranks: 1 }, &sharding(grain())).unwrap();
        let mut rank = Rank::new(&devices(1)[0], plan, Pulls::default(), &no_faults()).unwrap();
        let one = alone(&[vec![grain()]], &sharding(grain()));
        let (device, stream) = (Arc::clone(&rank.device), rank.stream);
        let windows = std::mem::replace(&mut rank.windows, one.windows);
        let mut ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
        for layer in 0..4 {
            let name = ring.pulls().plan().layers()[layer].layout.tensors()[0].name.clone();
            let from = rank.holds(&vec![layer as u8 + 1; grain() as usize]);
            ring.filling().unwrap().fill(layer, &name, from, stream).unwrap();
            rank.wait().unwrap();
            assert!(
                rank.read(ring.pulls().layer(layer).unwrap()).iter().all(|byte| *byte == layer as u8 + 1)
            );
        }
        if begun {
            ring.begin(1, 0).unwrap();
            refused(&mut ring, "a step has begun");
            ring.abandon().unwrap();
            refused(&mut ring, "a step has begun");
            continue;
        }
        let hello = ring.filling().unwrap().hello([0; 32], stream).unwrap();
        let mut links = Links::over(Vec::new(), hello, Limits::default(), no_faults()).unwrap();
        assert!(!ring.pulls().is_shared());
        ring.filling().unwrap().share(&mut links, stream, Duration::ZERO).unwrap();
        assert!(ring.pulls().is_shared());
        refused(&mut ring, "shared");
    }
}

/// A rank that ended: its memory stays mapped, so the others make its layers resident and go on.
#[test]
fn ranks_go_on_without_one_that_ended() {
    let bytes: Vec<Vec<u64>> = (0..4).map(|layer| vec![5 * grain() + layer]).collect();
    group(&devices(3), &layers(&bytes), &sharding(grain()), Pulls::default(), |rank| {
        if rank.rank() == 1 {
            return;
        }
        let expected: Vec<_> = (0..4).map(|layer| rank.expected(layer)).collect();
        let (device, stream) = (Arc::clone(&rank.device), rank.stream);
        // The windows go into the ring; the rank keeps others, of one page.
        let one = alone(&[vec![grain()]], &sharding(grain()));
        let windows = std::mem::replace(&mut rank.windows, one.windows);
        let mut ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
        ring.begin(1, 0).unwrap();
        ring.enter(0, 0, stream).unwrap();
        ring.lost(1);
        let error = ring.leave(0, 0, stream).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)));
        ring.abandon().unwrap();
        (0..4).for_each(|layer| ring.make_resident(layer, stream).unwrap());
        for _ in 0..2 {
            ring.begin(1, 0).unwrap();
            for (layer, expected) in expected.iter().enumerate() {
                ring.enter(layer, 0, stream).unwrap();
                let shown = rank.read(ring.pulls().layer(layer).unwrap());
                assert!(
                    shown.iter().zip(expected).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown))
                );
                ring.leave(layer, 0, stream).unwrap();
            }
            ring.end(stream).unwrap();
        }
    });
}
