//! Layers that change from sharded to resident and back while other work runs, on devices that run a copy as late as
//! streams allow, under the order checker, and with each remap and copy refused. The controls leave out the waits.

use std::sync::Arc;

use forebay::check::watch::{Watch, bytes};
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::weights::{Plan, Pulls, Sharding, Source};
use forebay::{Kind, Result};

use crate::faulty::Faulty;
use crate::windows::{Rank, group, layers, sharding};
use crate::{alone_on, grain};

/// Four layers over two buffers: layers 1 and 3 use the same one.
fn model() -> Vec<Vec<u64>> {
    vec![vec![9 * grain()]; 4]
}

/// Three ranks on such devices, each of which does `work` with its own.
fn each<D>(devices: &[(Arc<Faulty>, D)], work: impl Fn(&mut Rank, &Faulty, &D) + Sync)
where
    D: Sync,
{
    let all: Vec<Arc<dyn Device>> = devices.iter().map(|(faulty, _)| faulty.clone() as _).collect();
    group(&all, &layers(&model()), &sharding(grain()), Pulls::default(), |rank| {
        let (faulty, inner) = &devices[rank.rank() as usize];
        work(rank, faulty, inner);
    });
}

/// Devices whose copies run when the host waits, and no sooner.
fn slow() -> Vec<(Arc<Faulty>, Arc<HostDevice>)> {
    let device = |_| {
        let host = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        (Faulty::new(host.clone(), true), host)
    };
    (0..3).map(device).collect()
}

fn watched() -> Vec<(Arc<Faulty>, Arc<Watch>)> {
    let device = |_| {
        let watch = Watch::new(HostDevice::new(HostOptions::default()));
        (Faulty::new(watch.clone(), false), watch)
    };
    (0..3).map(device).collect()
}

/// Whether a window shows its layer at this moment, whatever has still to run.
fn shows_now(rank: &Rank, host: &HostDevice, layer: usize) -> bool {
    let window = rank.windows.layer(layer).unwrap();
    let mut shown = vec![0; window.bytes() as usize];
    host.read(window, &mut shown).unwrap();
    shown.iter().zip(rank.expected(layer)).all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown))
}

#[test]
fn pulls_and_changes_are_right_on_streams_that_run_late() {
    each(&slow(), |rank, _, _| {
        for _ in 0..2 {
            rank.layers().iter().for_each(|layer| rank.pull(*layer));
            rank.windows.make_resident(1, rank.stream).unwrap();
            rank.pull(3);
            assert!(rank.is_whole(1));
            rank.windows.make_sharded(1).unwrap();
        }
        rank.windows.verify(rank.stream).unwrap();
    });
}

/// Nothing is enqueued behind the change, so only its own wait can have completed it.
#[test]
fn a_layer_is_whole_when_it_has_become_resident() {
    each(&slow(), |rank, faulty, host| {
        rank.windows.make_resident(1, rank.stream).unwrap();
        assert!(shows_now(rank, host, 1));
        rank.windows.make_sharded(1).unwrap();
        // The control.
        faulty.forget(true);
        rank.windows.make_resident(1, rank.stream).unwrap();
        assert!(!shows_now(rank, host, 1));
        faulty.forget(false);
        rank.wait().unwrap();
        assert!(shows_now(rank, host, 1));
    });
}

/// A pull is refused at its second copy, when the first has not run. It must not run into the buffer, which holds
/// another layer.
#[test]
fn copies_of_a_refused_change_reach_no_other_layer() {
    for forgets in [false, true] {
        each(&slow(), |rank, faulty, _| {
            rank.pull(3);
            let before = faulty.backings();
            faulty.refuse_copy(1);
            faulty.forget(forgets);
            let error = rank.windows.make_resident(1, rank.stream).unwrap_err();
            assert_eq!((error.kind(), error.number("layer")), (Kind::Exhausted, Some(1)));
            faulty.forget(false);
            rank.wait().unwrap();
            assert_eq!(rank.is_whole(3), !forgets);
            assert_eq!((faulty.backings(), faulty.unmapped()), (before, 0));
            assert_eq!(rank.windows.is_resident(1), Ok(false));
            rank.pull(1);
        });
    }
}

#[test]
fn the_order_checker_accepts_changes_and_finds_those_under_work() {
    each(&watched(), |rank, faulty, watch| {
        let (window, second) = (rank.windows.layer(1).unwrap(), watch.stream().unwrap());
        let event = watch.event().unwrap();
        let attends = |stream| watch.engine(stream, "attention", &[bytes(&window, false)]);
        let ends = |stream| watch.record(event, stream).and_then(|()| watch.synchronize(event)).unwrap();
        for refused in [None, Some(0), Some(1)] {
            if let Some(passing) = refused {
                faulty.refuse_copy(passing);
                rank.windows.make_resident(1, rank.stream).unwrap_err();
            }
            rank.windows.make_resident(1, rank.stream).unwrap();
            // Another stream may read the layer with no edge.
            attends(second).unwrap();
            ends(second);
            rank.windows.make_sharded(1).unwrap();
            rank.pull(1);
        }
        assert_eq!(watch.conflict(), None);
        // The engine still reads the window, on a stream that the change does not wait for.
        attends(second).unwrap();
        let error = rank.windows.make_resident(1, rank.stream).unwrap_err().to_string();
        assert!(error.contains("remap") && error.contains("attention"), "{error}");
        assert_eq!(rank.windows.is_resident(1), Ok(false));
        ends(second);
        rank.windows.make_resident(1, rank.stream).unwrap();
        attends(second).unwrap();
        let error = rank.windows.make_sharded(1).unwrap_err().to_string();
        assert!(error.contains("remap") && error.contains("attention"), "{error}");
        assert_eq!(rank.windows.is_resident(1), Ok(true));
        ends(second);
        rank.windows.make_sharded(1).unwrap();
        // A pull that was not waited for, on another stream than the change.
        rank.windows.pull(1, second).unwrap();
        let error = rank.windows.make_resident(1, rank.stream).unwrap_err().to_string();
        assert!(error.contains("remap") && error.contains("copy"), "{error}");
        ends(second);
        rank.pull(1);
    });
}

/// The controls of the test above: a change that does not wait for its copies.
#[test]
fn the_order_checker_finds_a_change_that_does_not_wait() {
    each(&watched(), |rank, faulty, watch| {
        let (window, second) = (rank.windows.layer(1).unwrap(), watch.stream().unwrap());
        faulty.forget(true);
        match rank.rank() {
            0 => {
                rank.windows.make_resident(1, rank.stream).unwrap();
                let read = watch.engine(second, "attention", &[bytes(&window, false)]);
                assert!(read.unwrap_err().to_string().contains("copy"));
            }
            _ => {
                faulty.refuse_copy(1);
                let error = rank.windows.make_resident(1, rank.stream).unwrap_err();
                assert_eq!(error.kind(), Kind::Exhausted);
                // The remap that would have restored the window.
                let error = rank.windows.layer(1).unwrap_err().to_string();
                assert!(error.contains("remap") && error.contains("copy"), "{error}");
            }
        }
    });
}

/// Each remap of a change refused, with what restores it, and failing the device.
#[test]
fn a_refused_remap_leaves_the_layer_as_it_was_or_unusable() {
    use Kind::{DeviceFailed, OsRefused, OutOfMemory};
    let (passes, memory, os, dies) = (None, Some(OutOfMemory), Some(OsRefused), Some(DeviceFailed));
    for source in [Source::Peers, Source::Host] {
        for resident in [false, true] {
            for (outcomes, kind, then) in [
                (&[memory][..], OutOfMemory, None),
                (&[dies], DeviceFailed, Some(DeviceFailed)),
                (&[passes, memory, passes], OutOfMemory, None),
                (&[passes, dies], DeviceFailed, Some(DeviceFailed)),
                (&[passes, memory, os], OutOfMemory, Some(OsRefused)),
                (&[passes, memory, dies], OutOfMemory, Some(DeviceFailed)),
            ] {
                let case = format!("{source:?}, resident: {resident}, {outcomes:?}");
                let work = |rank: &mut Rank, faulty: &Faulty, _: &Arc<HostDevice>| {
                    let change = |rank: &mut Rank, resident: bool| -> Result<()> {
                        match resident {
                            false => rank.windows.make_resident(1, rank.stream),
                            true => rank.windows.make_sharded(1),
                        }
                    };
                    if resident {
                        change(rank, false).unwrap();
                    }
                    rank.pull(3);
                    let before = faulty.backings();
                    faulty.remaps(outcomes);
                    let error = change(rank, resident).unwrap_err();
                    assert_eq!((error.kind(), faulty.remaps_left()), (kind, 0), "{case}");
                    let after = rank.windows.layer(1).map_err(|error| error.kind());
                    assert_eq!(after.err(), then, "{case}");
                    assert_eq!(rank.windows.pull(1, rank.stream).err().map(|error| error.kind()), then);
                    rank.wait().unwrap();
                    if then.is_none() {
                        assert_eq!(rank.windows.is_resident(1), Ok(resident), "{case}");
                        assert_eq!((faulty.backings(), faulty.unmapped()), (before, 0), "{case}");
                        change(rank, resident).unwrap();
                        rank.pull(1);
                    }
                    // Other layers are as they were.
                    rank.pull(3);
                };
                let devices = match source {
                    Source::Peers => plain(3),
                    Source::Host => plain(1),
                };
                match source {
                    Source::Peers => each(&devices, work),
                    Source::Host => {
                        let sharding = Sharding { source, ..sharding(grain()) };
                        let device: Arc<dyn Device> = devices[0].0.clone();
                        work(&mut alone_on(&device, &model(), &sharding), &devices[0].0, &devices[0].1);
                    }
                }
            }
        }
    }
}

fn plain(count: usize) -> Vec<(Arc<Faulty>, Arc<HostDevice>)> {
    let device = |_| {
        let host = HostDevice::new(HostOptions::default());
        (Faulty::new(host.clone(), false), host)
    };
    (0..count).map(device).collect()
}

/// A stream that the device does not know is refused before anything is mapped anew.
#[test]
fn a_change_on_an_unknown_stream_changes_nothing() {
    each(&plain(3), |rank, faulty, _| {
        let before = faulty.backings();
        let foreign = forebay::device::Stream(u64::MAX);
        let error = rank.windows.make_resident(1, foreign).unwrap_err();
        assert_eq!((error.kind(), error.number("layer")), (Kind::OutOfRange, Some(1)));
        assert_eq!(faulty.backings(), before);
        rank.pull(1);
        rank.windows.make_resident(1, rank.stream).unwrap();
    });
}

/// A device that has too little memory for a plan, by any number of granules, has as much as before.
#[test]
fn a_construction_without_enough_memory_holds_nothing() {
    let plan = || {
        let group = forebay::weights::Group { id: 0, rank: 1, ranks: 3 };
        Plan::new(&layers(&model()), group, &sharding(grain())).unwrap()
    };
    let needed = plan().bytes().device();
    for memory in (0..=needed).step_by(grain() as usize) {
        let host = HostDevice::new(HostOptions { memory: Some(memory), ..HostOptions::default() });
        let faulty = Faulty::new(host, false);
        let device: Arc<dyn Device> = faulty.clone();
        let made = forebay::weights::Windows::new(&device, plan(), Pulls::default(), &crate::no_faults());
        match made {
            Ok(_) => assert_eq!((memory, faulty.unmapped()), (needed, 0)),
            Err(error) => {
                assert_eq!((error.kind(), faulty.backings()), (Kind::OutOfMemory, 0), "{memory}");
                if memory > 0 {
                    // Every byte of it is there again.
                    device.backing(memory).unwrap();
                }
            }
        }
    }
}
