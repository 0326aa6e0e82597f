//! Tests of budgets that a sequence is opened with, and of resizes.

use std::sync::mpsc;

use super::*;

/// Two lanes, budgets from 16 slots on, and 192 slots in each layer.
fn elastic() -> FbCacheConfig {
    FbCacheConfig { lanes: 2, min_budget: 16, pool_slots: 192, ..declared() }
}

fn slots(slots: u32) -> FbBudget {
    FbBudget { slots, ..sized() }
}

fn resize(cache: *mut FbCache, sequence: u64, budget: &FbBudget) -> FbStatus {
    // SAFETY: the budget states its size; a table has a value for each layer.
    unsafe { fb_resize(cache, sequence, budget, null_mut()) }
}

fn budgets(cache: *const FbCache, sequence: u64) -> [u32; LAYERS as usize] {
    let mut slots = [7; LAYERS as usize];
    // SAFETY: as many places as stated.
    let status = unsafe { fb_budgets(cache, sequence, slots.as_mut_ptr(), LAYERS) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
    slots
}

fn stats(cache: *const FbCache) -> FbStats {
    let mut stats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_cache_stats(cache, &raw mut stats) }, FbOk);
    stats
}

#[test]
fn a_sequence_is_opened_with_the_stated_budget_or_the_least() {
    let device = host();
    let cache = make_cache(device, &elastic());
    let table = [40, 64];
    for (config, wanted) in [
        (opening(100, 20), [16, 16]),
        (FbOpenConfig { slots: 50, ..opening(100, 20) }, [50, 50]),
        (FbOpenConfig { ratio: 0.5, ..opening(100, 20) }, [60, 60]),
        (FbOpenConfig { slots_by_layer: table.as_ptr(), ..opening(100, 20) }, table),
    ] {
        let mut sequence = 0;
        // SAFETY: the config states its size, and its table has a value for each layer.
        let status = unsafe { fb_open(cache, &raw const config, &raw mut sequence) };
        assert_eq!(status, FbOk, "{}", text_of(cache));
        assert_eq!(budgets(cache, sequence), wanted);
        close(cache, sequence);
    }
    let mut none = 0;
    for wrong in [
        FbOpenConfig { slots: 50, ratio: 0.5, ..opening(100, 20) },
        FbOpenConfig { slots: 50, slots_by_layer: table.as_ptr(), ..opening(100, 20) },
        FbOpenConfig { ratio: f64::NAN, ..opening(100, 20) },
        FbOpenConfig { bring_up: 2, ..opening(100, 20) },
    ] {
        // SAFETY: as above.
        assert_eq!(unsafe { fb_open(cache, &raw const wrong, &raw mut none) }, FbInvalidConfig, "{wrong:?}");
    }
    assert_eq!(none, 0);
    destroy(cache, device);
}

#[test]
fn a_resize_changes_the_budgets_and_the_pool() {
    let device = host();
    let cache = make_cache(device, &elastic());
    let sequence = join(cache, 100, 20);
    assert_eq!((budgets(cache, sequence), stats(cache).slots_in_use), ([16; 2], 2 * 64));
    let table = [150, 17];
    for (budget, wanted, blocks) in [
        (slots(70), [70, 70], 4),
        (FbBudget { ratio: 0.5, ..sized() }, [60, 60], 2),
        // Slots beyond the 120 tokens and the four rows in flight are not taken.
        (FbBudget { slots_by_layer: table.as_ptr(), ..sized() }, [124, 17], 3),
        (slots(16), [16, 16], 2),
    ] {
        let before = stats(cache).resizes;
        assert_eq!(resize(cache, sequence, &budget), FbOk, "{}", text_of(cache));
        assert_eq!(budgets(cache, sequence), wanted);
        let now = stats(cache);
        assert_eq!((now.resizes, now.slots_in_use), (before + 1, blocks * 64), "{budget:?}");
        assert_eq!(now.free_slots, 192 - wanted[0].div_ceil(64) * 64);
        // A repeated call changes nothing.
        assert_eq!(resize(cache, sequence, &budget), FbOk);
        assert_eq!(stats(cache).resizes, before + 1);
        let slots = step(cache, sequence, 0, null_mut());
        let (mut slab, mut bytes) = (null_mut(), 0);
        // SAFETY: the outputs have room, and the slot is in the slab.
        unsafe {
            assert_eq!(fb_slab(cache, 1, &raw mut slab, &raw mut bytes), FbOk);
            let row = slab.cast::<[u8; ROW as usize]>().add(usize::try_from(slots[1]).unwrap());
            assert_eq!(row.read(), row_of(1, 0));
            assert_eq!(fb_cache_validate(cache), FbOk, "{}", text_of(cache));
        }
    }
    close(cache, sequence);
    assert_eq!(stats(cache).slots_in_use, 0);
    destroy(cache, device);
}

/// A join brings all 100 rows up. A budget of 70 keeps the newest: positions 30 to 99. Those beyond its slots move.
#[test]
fn a_retired_step_reports_the_rows_that_a_resize_has_moved() {
    let device = host();
    let cache =
        make_cache(device, &FbCacheConfig { slots: 124, min_budget: 70, pool_slots: 192, ..declared() });
    let mut sequence = 0;
    let config = FbOpenConfig { slots: 124, ..opening(100, 20) };
    // SAFETY: the config states its size, the output has room, and else nothing is passed.
    unsafe {
        assert_eq!(fb_open(cache, &raw const config, &raw mut sequence), FbOk, "{}", text_of(cache));
        append(cache, sequence, 0..100);
        assert_eq!(fb_join(cache, sequence, null(), null_mut(), null_mut()), FbOk);
    }
    assert_eq!(resize(cache, sequence, &slots(70)), FbOk, "{}", text_of(cache));
    assert_eq!(stats(cache).moved_rows, 0, "no step has reported");
    step(cache, sequence, 0, null_mut());
    assert_eq!(stats(cache).moved_rows, u64::from(LAYERS) * 30);
    close(cache, sequence);
    destroy(cache, device);
}

#[test]
fn invalid_resizes_are_refused_and_change_nothing() {
    let device = host();
    let cache = make_cache(device, &elastic());
    let sequence = fill(cache, 190, 10);
    assert_eq!(resize(cache, sequence, &slots(64)), FbInvalidState, "it has not joined");
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_join(cache, sequence, null(), null_mut(), null_mut()) }, FbOk);
    assert_eq!(resize(cache, sequence, &slots(128)), FbOk, "{}", text_of(cache));
    let other = join(cache, 100, 20);
    let (few, many) = ([16, 15], [193, 16]);
    for (budget, status, says) in [
        (sized(), FbInvalidConfig, "set one of them"),
        (FbBudget { reserved: 1, ..slots(64) }, FbInvalidConfig, "reserved"),
        (FbBudget { ratio: 0.5, ..slots(64) }, FbInvalidConfig, "set one of them"),
        (FbBudget { slots_by_layer: few.as_ptr(), ..slots(64) }, FbInvalidConfig, "set one of them"),
        (FbBudget { ratio: f64::NAN, ..sized() }, FbInvalidConfig, "ratio"),
        (FbBudget { ratio: 1.5, ..sized() }, FbInvalidConfig, "ratio"),
        (slots(15), FbInvalidConfig, "least 16"),
        (FbBudget { slots_by_layer: few.as_ptr(), ..sized() }, FbInvalidConfig, "least 16"),
        (slots(u32::MAX), FbOutOfRange, "most 192"),
        (FbBudget { slots_by_layer: many.as_ptr(), ..sized() }, FbOutOfRange, "wanted 193"),
        (slots(129), FbExhausted, "free"),
    ] {
        assert_eq!(resize(cache, sequence, &budget), status, "{budget:?}");
        assert!(text_of(cache).contains(says), "{says}: {}", text_of(cache));
        assert_eq!((budgets(cache, sequence), stats(cache).resizes), ([128; 2], 1));
    }
    assert_eq!(resize(cache, 77, &slots(64)), FbClosed);
    let mut room = [7; 3];
    // SAFETY: as many places as stated, or a refusal before anything is written.
    unsafe {
        assert_eq!(fb_resize(cache, sequence, null(), null_mut()), FbInvalidConfig);
        let small = FbBudget { size: 16, ..slots(64) };
        assert_eq!(fb_resize(cache, sequence, &raw const small, null_mut()), FbInvalidConfig);
        let unknown = fb_resize(cache, sequence, &raw const small, device.cast());
        assert_eq!(unknown, FbInvalidConfig, "the struct is read before the stream");
        assert_eq!(fb_resize(cache, sequence, &slots(64), device.cast()), FbOutOfRange);
        for layers in [0, LAYERS - 1, LAYERS + 1, u32::MAX] {
            assert_eq!(fb_budgets(cache, sequence, room.as_mut_ptr(), layers), FbOutOfRange);
            assert!(text_of(cache).contains("wanted 2"), "{}", text_of(cache));
        }
        assert_eq!(fb_budgets(cache, sequence, null_mut(), LAYERS), FbInvalidConfig);
        assert_eq!(fb_budgets(cache, 77, room.as_mut_ptr(), LAYERS), FbClosed);
    }
    assert_eq!((room, budgets(cache, sequence)), ([7; 3], [128; 2]));
    close(cache, sequence);
    close(cache, other);
    destroy(cache, device);
}

/// A step that is prepared and not finished, and a resize that has not run.
#[test]
fn a_resize_is_busy_inside_a_step_and_behind_the_last_one() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let cache = make_cache(device, &elastic());
    let sequence = join(cache, 100, 20);
    let (open, gate) = mpsc::channel::<()>();
    let row = FbBatchRow { sequence, accepted: 0, query_rows: 1 };
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let mut number = 0;
    // SAFETY: all pointers are valid, and the gate outlives the device.
    unsafe {
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(fb_prepare(cache, &raw const config, null_mut(), &raw mut number), FbOk);
        assert_eq!(resize(cache, sequence, &slots(70)), FbBusy);
        assert!(text_of(cache).contains("open"), "{}", text_of(cache));
        assert_eq!(fb_abandon(cache, number), FbOk);
        assert_eq!(fb_finish(cache, number, null_mut()), FbOk);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(fb_retire(cache, &raw mut number, null_mut(), null_mut()), FbCancelled);
        assert_eq!(resize(cache, sequence, &slots(70)), FbInvalidState, "its step failed");
        assert_eq!(fb_truncate(cache, sequence, 100, null_mut(), null_mut()), FbOk);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);

        let held = (&raw const gate).cast_mut().cast();
        assert_eq!(fb_stream_call(device, null_mut(), Some(wait), held), FbOk);
        assert_eq!(resize(cache, sequence, &slots(70)), FbOk, "{}", text_of(cache));
        assert_eq!(resize(cache, sequence, &slots(16)), FbBusy);
        assert_eq!(budgets(cache, sequence), [70; 2]);
        open.send(()).unwrap();
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
    }
    assert_eq!(resize(cache, sequence, &slots(16)), FbOk, "{}", text_of(cache));
    // SAFETY: nothing is passed.
    unsafe {
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        close(cache, sequence);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(fb_cache_reap(cache, null_mut(), null_mut()), FbOk);
    }
    destroy(cache, device);
}

/// Waits for the gate.
///
/// # Safety
/// `data` is a gate that outlives the device.
pub(super) unsafe extern "C" fn wait(data: *mut c_void) {
    // SAFETY: the same contract.
    unsafe { &*data.cast::<mpsc::Receiver<()>>() }.recv().unwrap();
}

fn budgets_digest(cache: *const FbCache) -> u64 {
    let mut digest = 0;
    // SAFETY: the output has room.
    assert_eq!(unsafe { fb_budgets_digest(cache, &raw mut digest) }, FbOk);
    digest
}

fn share_slots(cache: *mut FbCache) -> (FbStatus, u32) {
    let mut resized = 77;
    // SAFETY: the output has room.
    (unsafe { fb_share_slots(cache, null_mut(), &raw mut resized) }, resized)
}

/// A lone sequence has all its rows in slots. When another joins, both have a part, and the engine sets no budgets.
#[test]
fn a_cache_with_a_share_divides_its_slots() {
    let device = host();
    let caches = [0, 1].map(|_| make_cache(device, &FbCacheConfig { share: FB_SHARE_EQUAL, ..elastic() }));
    let [cache, twin] = caches;
    let [alone, same] = caches.map(|cache| join(cache, 190, 10));
    // What is not promised can be promised to others, although all of it is in use.
    assert_eq!((budgets(cache, alone), stats(cache).free_slots), ([192; 2], 128));
    assert_eq!(budgets_digest(cache), budgets_digest(twin));
    assert_eq!(resize(cache, alone, &slots(64)), FbInvalidConfig);
    assert!(text_of(cache).contains("shares its slots"), "{}", text_of(cache));
    step(cache, alone, 0, null_mut());
    let other = fill(cache, 100, 20);
    assert_eq!(budgets(cache, other), [0; 2], "promised, and not taken");
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_join(cache, other, null(), null_mut(), null_mut()) }, FbOk, "{}", text_of(cache));
    assert_eq!((budgets(cache, alone), budgets(cache, other)), ([128; 2], [64; 2]));
    assert_ne!(budgets_digest(cache), budgets_digest(twin));
    assert_eq!((stats(cache).resizes, stats(cache).slots_in_use), (1, 2 * 192));
    close(cache, other);
    assert_eq!(share_slots(cache), (FbOk, 0), "it has retired no step since its last resize");
    step(cache, alone, 1, null_mut());
    assert_eq!(share_slots(cache), (FbOk, 1));
    assert_eq!(budgets(cache, alone), [192; 2]);
    assert_eq!(share_slots(cache), (FbOk, 0), "nothing is left to do");
    close(cache, alone);
    close(twin, same);
    let plain = make_cache(device, &elastic());
    assert_eq!(share_slots(plain), (FbInvalidConfig, 77));
    assert!(text_of(plain).contains("no share"), "{}", text_of(plain));
    // SAFETY: null is refused or means no result, and no call is running.
    unsafe {
        assert_eq!(fb_share_slots(twin, null_mut(), null_mut()), FbOk);
        assert_eq!(fb_budgets_digest(plain, null_mut()), FbInvalidConfig);
        assert_eq!(fb_cache_destroy(plain), FbOk);
        assert_eq!(fb_cache_destroy(twin), FbOk);
    }
    destroy(cache, device);
}

#[test]
fn layers_that_share_a_selection_have_one_budget_and_keys_in_the_first() {
    let device = host();
    let grouped = FbCacheConfig { group_layers: LAYERS, index_key_bytes: 8, ..elastic() };
    let cache = make_cache(device, &grouped);
    let mut info: FbInfo = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_cache_info(cache, &raw mut info) }, FbOk);
    assert_eq!((info.layers, info.index_groups, info.group_layers), (LAYERS, 1, LAYERS));
    let sequence = join(cache, 100, 20);
    assert_eq!(resize(cache, sequence, &slots(100)), FbOk, "{}", text_of(cache));
    assert_eq!(budgets(cache, sequence), [100; LAYERS as usize]);
    let unlike = [64, 100];
    let budget = FbBudget { slots_by_layer: unlike.as_ptr(), ..sized() };
    assert_eq!(resize(cache, sequence, &budget), FbInvalidConfig);
    close(cache, sequence);
    destroy(cache, device);
    let listed = |table: &[u32; LAYERS as usize]| {
        let selects_by_layer = table.as_ptr();
        let config = FbCacheConfig { selects_by_layer, group_layers: 0, ..grouped };
        let (device, mut cache, mut info) = (host(), std::ptr::null_mut(), sized::<FbInfo>());
        // SAFETY: the structs state their sizes, and the table has an entry for each layer.
        unsafe {
            let made = fb_cache_create(device, &raw const config, null_mut(), 0, &raw mut cache);
            if made != FbOk {
                assert_eq!(fb_device_destroy(device), FbOk);
                return Err(made);
            }
            assert_eq!(fb_cache_info(cache, &raw mut info), FbOk);
        }
        destroy(cache, device);
        Ok((info.index_groups, info.group_layers))
    };
    assert_eq!([listed(&[1, 1]), listed(&[1, 0])], [Ok((2, 0)), Ok((1, 0))]);
    assert_eq!([listed(&[0, 1]), listed(&[1, 2])], [Err(FbInvalidConfig); 2]);
    // SAFETY: the names end with a zero; the configuration states its size.
    let preset = |name: &CStr| unsafe {
        let mut config: FbCacheConfig = sized();
        assert_eq!(fb_preset(name.as_ptr(), null_mut(), 0, &raw mut config), FbOk);
        (config.layers, config.lone_layers, config.group_layers)
    };
    assert_eq!((preset(c"glm-5.2"), preset(c"glm-5")), ((78, 2, 4), (78, 0, 0)));
}
