//! What the calls of shared weights refuse, and what their configurations choose.

use super::*;

#[test]
fn a_configuration_that_no_rank_can_have_is_refused_by_name_and_takes_nothing() {
    let model = Model::new();
    let device = host();
    let unknown = [c"v_proj".as_ptr()];
    let crooked = [FbTensor { name: c"o_proj".as_ptr(), bytes: 64, align: 3, ..sized() }];
    let nameless = [FbTensor { bytes: 64, ..sized() }];
    let of = |tensors: &[FbTensor], config: FbWeightsConfig| FbWeightsConfig {
        tensors: tensors.as_ptr(),
        tensor_count: tensors.len() as u32,
        pattern_count: 1,
        ..config
    };
    let config = model.config(0);
    let wrong = [
        (FbWeightsConfig { reserved: 1, ..config }, FbInvalidConfig, "reserved (value 1)"),
        (FbWeightsConfig { layers: 4097, ..config }, FbInvalidConfig, "layers (value 4097)"),
        (
            FbWeightsConfig { layers: MODEL - 1, ..config },
            FbOutOfRange,
            "layer of a tensor (layer 5, layers 5)",
        ),
        (FbWeightsConfig { draft_layers: MODEL + 1, ..config }, FbInvalidConfig, "draft_layers (value 7)"),
        (FbWeightsConfig { micro_batches: 1025, ..config }, FbInvalidConfig, "micro_batches"),
        (FbWeightsConfig { parts: 1025, ..config }, FbInvalidConfig, "parts"),
        (FbWeightsConfig { source: 2, ..config }, FbInvalidConfig, "FB_WEIGHTS_FROM_"),
        (FbWeightsConfig { odd: 4, ..config }, FbInvalidConfig, "FB_ODD_"),
        (FbWeightsConfig { wrap: 2, ..config }, FbInvalidConfig, "FB_WRAP_"),
        (FbWeightsConfig { prefetch_bytes: 8, ..config }, FbInvalidConfig, "prefetch_bytes (value 8)"),
        (FbWeightsConfig { prefetch_rate: 9, ..config }, FbInvalidConfig, "prefetch_rate (value 9)"),
        (FbWeightsConfig { ranks: 0, ..config }, FbInvalidConfig, "ranks"),
        (FbWeightsConfig { rank: 2, ..config }, FbOutOfRange, "rank 2"),
        (FbWeightsConfig { budget: 1, ..config }, FbOutOfMemory, "least"),
        (
            FbWeightsConfig { patterns: unknown.as_ptr(), pattern_count: 1, ..config },
            FbInvalidConfig,
            "v_proj",
        ),
        (FbWeightsConfig { patterns: null(), ..config }, FbInvalidConfig, "patterns"),
        (FbWeightsConfig { tensors: null(), ..config }, FbInvalidConfig, "fb_tensor"),
        (of(&crooked, config), FbInvalidConfig, "align 3"),
        (of(&nameless, config), FbInvalidConfig, "name"),
    ];
    for (config, status, words) in wrong {
        for found in [plan(device, &config).unwrap_err(), create(device, &config).unwrap_err()] {
            assert_eq!(found.0, status, "{}", found.1);
            assert!(found.1.contains(words), "{}, not {words}", found.1);
        }
    }
    // SAFETY: no call is running, and nothing is left on the device.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk, "{}", text_of(device));
    let small = make_device(&FbDeviceConfig { memory: 100_000, ..sized() });
    assert_eq!(create(small, &config).unwrap_err().0, FbOutOfMemory);
    // SAFETY: as above.
    assert_eq!(unsafe { fb_device_destroy(small) }, FbOk, "{}", text_of(small));
}

#[test]
fn each_choice_of_a_configuration_reaches_the_plan() {
    let (model, device) = (Model::new(), host());
    // An odd number of layers: the last one has no tensors.
    let odd = |odd| {
        let tensor_count = (model.tensors.len() - 3) as u32;
        plan(device, &FbWeightsConfig { odd, tensor_count, layers: MODEL - 1, ..model.config(0) }).unwrap()
    };
    let closing = |found: FbWeightsFootprint| (found.closing, found.resident_layer, found.buffers[2] > 0);
    assert_eq!(closing(odd(FB_ODD_CHEAPEST)), (FB_CLOSING_RESIDENT, 0, false));
    assert_eq!(closing(odd(FB_ODD_RESIDENT_FIRST)), (FB_CLOSING_RESIDENT, 0, false));
    assert_eq!(closing(odd(FB_ODD_RESIDENT_LAST)), (FB_CLOSING_RESIDENT, MODEL - 2, false));
    assert_eq!(closing(odd(FB_ODD_THIRD_BUFFER)), (FB_CLOSING_THIRD_BUFFER, 0, true));
    assert!(odd(FB_ODD_RESIDENT_LAST).resident > 0);
    let all = plan(device, &model.config(0)).unwrap();
    let host = plan(device, &FbWeightsConfig { source: FB_WEIGHTS_FROM_HOST, ..model.config(0) }).unwrap();
    assert_eq!((host.shards, host.host > host.whole, host.pulled), (0, true, host.host));
    // Four of six layers sharded: two whole, four halves and two buffers of a half, which is up to a page more.
    let layer = (all.shards + all.pulled) / u64::from(MODEL);
    let most = 5 * layer + 2 * all.granule;
    let budget = plan(device, &FbWeightsConfig { budget: most, ..model.config(0) }).unwrap();
    assert_eq!((budget.sharded_layers, budget.resident, budget.device <= most), (4, 2 * layer, true));
    let eight = plan(device, &FbWeightsConfig { ranks: 8, rank: 7, ..model.config(0) }).unwrap();
    assert!(eight.shards < all.shards && eight.pulled > all.pulled);
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk);
}

#[test]
fn a_prefetch_of_a_configuration_reaches_the_ring() {
    let folder = Folder::new();
    let model = Model::new();
    assert_eq!(model.config(0).options().unwrap().prefetch, None);
    let config = FbWeightsConfig { prefetch_bytes: 4096, prefetch_rate: 1 << 30, ..model.config(0) };
    let wanted = forebay::weights::Prefetch { bytes: 4096, rate: 1 << 30 };
    assert_eq!(config.options().unwrap().prefetch, Some(wanted));
    let mut rank = alone(config);
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    (0..2).for_each(|_| rank.step(0));
    rank.close();
}

#[test]
fn weights_from_the_host_and_copies_of_one_granule_show_the_same_bytes() {
    let folder = Folder::new();
    let model = Model::new();
    let config = FbWeightsConfig { source: FB_WEIGHTS_FROM_HOST, copy_bytes: 1, ..model.config(0) };
    let mut rank = alone(config);
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let (layer, granule) = (rank.layer(2), plan(rank.device, &config).unwrap().granule);
    assert_eq!(u64::from(layer.copies) * granule, layer.pulled);
    rank.step(0);
    let mut update = null_mut();
    // SAFETY: everything is valid.
    let refused = unsafe { fb_update_create(rank.weights, 1, [0].as_ptr(), 1, u64::MAX, &raw mut update) };
    assert_eq!(refused, FbUnsupported, "{}", text_of(rank.weights));
    rank.close();
}

#[test]
fn micro_batches_and_draft_passes_are_entered_in_their_order() {
    let folder = Folder::new();
    let model = Model::new();
    let config = FbWeightsConfig { micro_batches: 2, draft_layers: 1, parts: 3, ..model.config(0) };
    let mut rank = alone(config);
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let mut other = null_mut();
    // SAFETY: room for the result.
    rank.ok(unsafe { fb_stream_create(rank.device, &raw mut other) });
    // SAFETY: nothing is passed.
    let begin = |batches, passes| unsafe { fb_weights_begin(rank.weights, batches, passes) };
    assert_eq!((begin(0, 0), begin(3, 0)), (FbOutOfRange, FbOutOfRange));
    rank.ok(begin(2, 3));
    let once = (0..MODEL - 1).chain([MODEL - 1; 3]);
    for layer in once {
        for (batch, stream) in [(0, null_mut()), (1, other)] {
            // SAFETY: as above.
            unsafe {
                rank.ok(fb_weights_enter(rank.weights, layer, batch, stream));
                rank.ok(fb_weights_leave(rank.weights, layer, batch, stream));
            }
        }
    }
    // SAFETY: as above.
    let last = unsafe { fb_weights_enter(rank.weights, MODEL - 1, 0, null_mut()) };
    assert_eq!(last, FbInvalidState, "a fourth draft pass");
    rank.ok(rank.end());
    rank.close();
}

#[test]
fn each_call_out_of_its_order_is_a_status_with_a_text() {
    let folder = Folder::new();
    let said = |rank: &Rank, status: FbStatus, wanted: FbStatus, words: &str| {
        let text = text_of(rank.weights);
        assert!(status == wanted && text.contains(words), "{status:?}: {text}, not {words}");
    };
    let mut rank = alone(Model::new().config(0));
    let (name, from, none) = (c"o_proj".as_ptr(), whole(0, 0, 0), null_mut());
    let weights = rank.weights;
    let fill = |name, from: *const u8, bytes| {
        // SAFETY: the memory is as long as stated, or refused.
        unsafe { fb_weights_fill(weights, 0, name, from.cast(), bytes, none) }
    };
    said(&rank, fill(name, from.as_ptr(), 39_999), FbOutOfRange, "planned 40000");
    said(&rank, fill(name, null(), 40_000), FbInvalidConfig, "from");
    said(&rank, fill(null(), from.as_ptr(), 40_000), FbInvalidConfig, "name");
    said(&rank, fill(c"q_norm".as_ptr(), from.as_ptr(), 64), FbOutOfRange, "q_norm");
    said(&rank, rank.begin(), FbInvalidState, "not shared");
    said(&rank, rank.enter(0), FbInvalidState, "not shared");
    // SAFETY: nothing is passed, or a null that is refused.
    unsafe {
        said(&rank, fb_weights_make_resident(rank.weights, 0, none), FbInvalidState, "not shared");
        said(&rank, fb_weights_launch(rank.weights, none, None, none), FbInvalidConfig, "launch");
        said(&rank, fb_weights_lost(rank.weights, 0), FbOutOfRange, "no other rank");
        said(&rank, fb_weights_share(rank.weights, null_mut(), none, 0), FbInvalidConfig, "fb_links");
        said(
            &rank,
            fb_weights_share(rank.weights, rank.device.cast(), none, 0),
            FbInvalidConfig,
            "of this kind",
        );
    }
    let nowhere = rank.meet(&Folder("/nowhere/at/all".into()));
    said(&rank, nowhere, FbIo, "/nowhere/at/all");
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    said(&rank, rank.share(), FbInvalidState, "not filled any more");
    said(&rank, fill(name, from.as_ptr(), 40_000), FbInvalidState, "not filled any more");
    said(&rank, rank.end(), FbInvalidState, "no step has begun");
    rank.ok(rank.begin());
    said(&rank, rank.enter(1), FbInvalidState, "expected 0");
    // SAFETY: nothing is passed; the stream is none of the device's.
    let strange = unsafe { fb_weights_enter(rank.weights, 0, 0, std::ptr::without_provenance_mut(77)) };
    said(&rank, strange, FbOutOfRange, "stream");
    // SAFETY: nothing is passed.
    said(&rank, unsafe { fb_weights_shrink(rank.weights, u64::MAX, null_mut()) }, FbBusy, "a step is open");
    rank.abandon();
    rank.close();
}

#[test]
fn an_update_that_cannot_be_is_refused_and_one_that_is_left_keeps_its_device() {
    let folder = Folder::new();
    let mut rank = alone(Model::new().config(0));
    let met = rank.meet(&folder);
    rank.ok(met);
    rank.ok(rank.share());
    let begin = |version, layers: &[u32], at_most| {
        let mut update = null_mut();
        let (list, count) = (layers.as_ptr(), layers.len() as u32);
        // SAFETY: everything is valid.
        let status =
            unsafe { fb_update_create(rank.weights, version, list, count, at_most, &raw mut update) };
        (status, update)
    };
    let refused = [
        ((0, &[0][..], u64::MAX), FbOutOfRange, "version 0"),
        ((1, &[], u64::MAX), FbInvalidConfig, "no layers"),
        ((1, &[2, 2], u64::MAX), FbInvalidConfig, "twice"),
        ((1, &[MODEL], u64::MAX), FbOutOfRange, "layer 6"),
        ((1, &[0], 5), FbOutOfMemory, "allowed 5"),
    ];
    for ((version, layers, at_most), status, words) in refused {
        assert_eq!(begin(version, layers, at_most), (status, null_mut()));
        assert!(text_of(rank.weights).contains(words), "{}", text_of(rank.weights));
    }
    let (status, update) = begin(1, &[0], u64::MAX);
    rank.ok(status);
    assert_eq!(begin(2, &[1], u64::MAX).0, FbBusy);
    let (mut outcome, step) = (77, null_mut());
    // SAFETY: everything is valid, or refused.
    unsafe {
        let commit = |update, links, outcome| {
            fb_weights_commit(rank.weights, update, links, 1, step, 0, outcome, null_mut(), 0)
        };
        assert_eq!(commit(update, rank.links, &raw mut outcome), FbInvalidState, "it is not shared");
        assert_eq!(commit(null_mut(), rank.links, &raw mut outcome), FbInvalidConfig);
        assert_eq!(commit(update, null_mut(), &raw mut outcome), FbInvalidConfig);
        assert_eq!(commit(update, rank.links, null_mut()), FbInvalidConfig);
        assert_eq!(outcome, FB_UPDATE_OPEN);
        assert_eq!(fb_update_share(update, rank.links, step, 0), FbInvalidState, "it is not filled");
        assert!(text_of(update).contains("o_proj"), "{}", text_of(update));
        assert_eq!(fb_update_verify(update, 0, step), FbInvalidState);
        let from = whole(1, 1, 0);
        let fill = |layer| {
            let from = from.as_ptr().cast();
            fb_update_fill(update, layer, c"o_proj".as_ptr(), from, 40_000, step)
        };
        assert_eq!((fill(0), fill(1)), (FbOk, FbOutOfRange));
        assert_eq!(fb_links_destroy(rank.links), FbOk);
        assert_eq!(fb_weights_destroy(rank.weights), FbOk);
        assert_eq!(fb_device_destroy(rank.device), FbBusy);
        assert!(text_of(rank.device).contains("left 1"), "{}", text_of(rank.device));
        assert_eq!(fb_update_destroy(update), FbOk);
        assert_eq!(fb_device_destroy(rank.device), FbOk);
    }
}

#[test]
fn a_rank_that_does_not_come_or_differs_is_named_and_the_weights_stay_filled() {
    let folder = Folder::new();
    let mut rank = Rank::filled(0, 0);
    let path = CString::new(folder.0.to_str().unwrap()).unwrap();
    let config = FbLinksConfig { folder: path.as_ptr(), hello_ms: 20, ..sized() };
    let meet = |rank: &Rank, config: &FbLinksConfig| {
        let mut links = null_mut();
        // SAFETY: everything is valid.
        unsafe { fb_links_meet(rank.weights, config, null_mut(), &raw mut links) }
    };
    assert_eq!(meet(&rank, &config), FbTimedOut);
    assert!(text_of(rank.weights).contains("rank 1"), "{}", text_of(rank.weights));
    let crooked = |geometry| FbLinksConfig { folder: path.as_ptr(), geometry, hello_ms: SOON, ..sized() };
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut rank = Rank::filled(1, 0);
            let status = meet(&rank, &crooked([9; 32]));
            assert!(matches!(status, FbInvalidConfig | FbPeerLost), "{}", text_of(rank.weights));
            rank.destroy();
        });
        let status = meet(&rank, &crooked([8; 32]));
        assert!(matches!(status, FbInvalidConfig | FbPeerLost), "{}", text_of(rank.weights));
        other.join().unwrap();
    });
    thread::scope(|scope| {
        let other = scope.spawn(|| Rank::shared(&folder, 1).close());
        let met = rank.meet(&folder);
        rank.ok(met);
        rank.ok(rank.share());
        rank.step(0);
        rank.close();
        other.join().unwrap();
    });
}
