//! Tests of the calls that concern a whole cache.

use super::*;

#[test]
fn a_preset_fills_in_the_model_fields_only() {
    let mut config = FbCacheConfig { lanes: 5, numa_node: 2, ..sized() };
    // SAFETY: the names end with a zero byte, and the config states its size.
    unsafe {
        assert_eq!(fb_preset(c"deepseek-v3.2".as_ptr(), null_mut(), 0, &raw mut config), FbOk);
        assert_eq!((config.layers, config.row_bytes, config.index_key_bytes), (61, [656, 0], 132));
        assert_eq!((config.page_tokens, config.top_k, config.lanes, config.numa_node), (64, 2048, 5, 2));
        let before = config.layers;
        assert_eq!(fb_preset(c"gpt".as_ptr(), null_mut(), 0, &raw mut config), FbOutOfRange);
        assert_eq!(fb_preset(null(), null_mut(), 0, &raw mut config), FbInvalidConfig);
        let mut text = [0; 512];
        let status = fb_preset(c"gpt".as_ptr(), text.as_mut_ptr(), text.len(), &raw mut config);
        assert_eq!(status, FbOutOfRange);
        assert!(text_in(&text).contains("\"gpt\""), "{}", text_in(&text));
        assert_eq!(config.layers, before);
        for (name, _) in forebay::Shape::PRESETS {
            let name = std::ffi::CString::new(name).unwrap();
            assert_eq!(fb_preset(name.as_ptr(), null_mut(), 0, &raw mut config), FbOk, "{name:?}");
        }
    }
}

#[test]
fn a_footprint_equals_the_memory_of_the_cache() {
    let mut footprint: FbCacheFootprint = sized();
    // SAFETY: both state their size.
    unsafe {
        assert_eq!(fb_footprint(&declared(), null_mut(), 0, &raw mut footprint), FbOk);
        let pages = u64::from(3 * (200_u32.div_ceil(PAGE) + 1));
        assert_eq!(footprint.rows, pages * u64::from(PAGE * ROW * LAYERS));
        assert_eq!(footprint.index_keys, pages * u64::from(PAGE * 8 * LAYERS));
        assert!(footprint.tables > 0 && footprint.landing > 0 && footprint.step_descriptors > 0);
        let host = footprint.rows + footprint.step_descriptors;
        assert_eq!(footprint.host_page_tables, 8 * host.div_ceil(4096));
        let mapped = footprint.slots + footprint.landing + footprint.scratch + footprint.padding;
        assert_eq!(mapped % (2 << 20), 0);
        let dense = FbCacheConfig { top_k: 0, ..declared() };
        let mut text = [0; 512];
        let (said, bytes) = (text.as_mut_ptr(), text.len());
        assert_eq!(fb_footprint(&raw const dense, said, bytes, &raw mut footprint), FbInvalidConfig);
        assert!(text_in(&text).contains("top_k"), "{}", text_in(&text));
    }
}

#[test]
fn info_and_stats_report_the_config_and_the_pools() {
    let device = host();
    let config =
        FbCacheConfig { draft_layers: 1, layers: 1, batch: 2, device_block_align: 4096, ..declared() };
    let cache = make_cache(device, &config);
    let (mut info, mut stats): (FbInfo, FbStats) = (sized(), sized());
    // SAFETY: both state their size.
    unsafe {
        assert_eq!(fb_cache_info(cache, &raw mut info), FbOk);
        assert_eq!((info.layers, info.draft_layers, info.row_bytes, info.host_stride), (2, 1, ROW, 64));
        assert_eq!((info.block_bytes, info.top_k, info.query_rows, info.batch), (4096, TOP_K, 2, 2));
        assert_eq!((info.attention_waves, info.page_tokens, info.lanes), (1, PAGE, 3));
        let sequence = fill(cache, 20, 10);
        assert_eq!(fb_cache_stats(cache, &raw mut stats), FbOk);
        assert_eq!((stats.sequences, stats.free_lanes), (1, 2));
        assert!(stats.free_host_pages < info.host_pages && stats.free_index_pages < info.index_pages);
        close(cache, sequence);
        assert_eq!(fb_cache_stats(cache, &raw mut stats), FbOk);
        assert_eq!((stats.sequences, stats.free_host_pages), (0, info.host_pages));
        // An older caller's struct is written as far as its size.
        info = FbInfo { size: 8, ..info };
        assert_eq!(fb_cache_info(cache, &raw mut info), FbInvalidConfig);
    }
    destroy(cache, device);
}

#[test]
fn layers_of_the_cache_have_memory_and_others_have_none() {
    let device = host();
    let cache = make_cache(device, &declared());
    let without = make_cache(device, &FbCacheConfig { index_key_bytes: 0, ..declared() });
    let (mut address, mut bytes) = (null_mut(), 0);
    // SAFETY: both have room.
    unsafe {
        assert_eq!(fb_slab(cache, 1, &raw mut address, &raw mut bytes), FbOk);
        assert!(!address.is_null() && bytes >= 64 * u64::from(ROW));
        assert_eq!(fb_index_keys(cache, 1, &raw mut address, &raw mut bytes), FbOk);
        let pages = 3 * (200_u32.div_ceil(PAGE) + 1);
        assert_eq!(bytes, u64::from(pages * PAGE * 8));
        (address, bytes) = (null_mut(), 7);
        assert_eq!(fb_slab(cache, LAYERS, &raw mut address, &raw mut bytes), FbOutOfRange);
        assert_eq!(fb_index_keys(cache, LAYERS, &raw mut address, &raw mut bytes), FbOutOfRange);
        assert_eq!(fb_index_keys(without, 0, &raw mut address, &raw mut bytes), FbOutOfRange);
        assert_eq!(fb_slab(cache, 0, &raw mut address, null_mut()), FbInvalidConfig);
        assert_eq!((address.is_null(), bytes), (true, 7));
        assert_eq!(fb_cache_destroy(without), FbOk);
    }
    destroy(cache, device);
}

#[test]
fn slots_by_layer_are_those_of_the_pool() {
    let device = host();
    let table = [192, 256];
    let cache = make_cache(device, &FbCacheConfig { slots_by_layer: table.as_ptr(), ..declared() });
    let mut stats: FbStats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_cache_stats(cache, &raw mut stats) }, FbOk);
    assert_eq!(stats.free_slots, 192);
    destroy(cache, device);
}

#[test]
fn a_cache_with_sequences_is_kept_and_a_closed_waiting_one_is_reaped() {
    let device = make_device(&FbDeviceConfig { kind: FB_DEVICE_HOST_THREADS, ..sized() });
    let cache = make_cache(device, &declared());
    let sequence = join(cache, 20, 10);
    let mut waiting = 77;
    // SAFETY: the output has room.
    unsafe {
        assert_eq!(fb_cache_destroy(cache), FbBusy);
        assert!(text_of(cache).contains("sequences 1"), "{}", text_of(cache));
        close(cache, sequence);
        assert_eq!(fb_stream_wait(device, null_mut()), FbOk);
        assert_eq!(fb_cache_reap(cache, null_mut(), &raw mut waiting), FbOk);
        assert_eq!(waiting, 0);
        assert_eq!(fb_cache_reap(cache, null_mut(), null_mut()), FbOk);
    }
    destroy(cache, device);
}

/// The promise of the header: the pools belong to the device until it ends.
#[test]
fn the_memory_of_a_cache_comes_from_its_device() {
    let device = make_device(&FbDeviceConfig { memory: 1 << 20, ..sized() });
    let mut made = Vec::new();
    while made.len() < 100 && made.last().is_none_or(|status| *status == FbOk) {
        let mut cache = null_mut();
        // SAFETY: all pointers are valid, and no call is running in the cache.
        unsafe {
            made.push(fb_cache_create(device, &declared(), null_mut(), 0, &raw mut cache));
            let ended = fb_cache_destroy(cache);
            assert_eq!(ended, if made.last() == Some(&FbOk) { FbOk } else { FbInvalidConfig });
        }
    }
    assert_eq!((made.first(), made.last()), (Some(&FbOk), Some(&FbOutOfMemory)), "{}", made.len());
    // SAFETY: no call is running.
    assert_eq!(unsafe { fb_device_destroy(device) }, FbOk);
}

#[test]
fn a_cache_in_which_a_call_panicked_can_only_be_destroyed() {
    let device = host();
    let cache = make_cache(device, &declared());
    let sequence = join(cache, 20, 10);
    let panicked = crate::handle::change(cache, |_| panic!("shown on standard error: this test means to"));
    assert_eq!(panicked, FbInternal);
    let mut stats: FbStats = sized();
    // SAFETY: it states its size.
    unsafe {
        assert_eq!(fb_cache_stats(cache, &raw mut stats), FbInternal);
        assert_eq!(fb_close(cache, sequence, null_mut()), FbInternal);
        assert!(text_of(cache).contains("internal error"), "{}", text_of(cache));
        assert_eq!(fb_device_destroy(device), FbBusy);
        assert_eq!(fb_cache_destroy(cache), FbOk);
        assert_eq!(fb_cache_destroy(cache), FbClosed);
        assert_eq!(fb_device_destroy(device), FbOk, "{}", text_of(device));
    }
}

#[test]
fn layers_of_several_attention_waves_are_called_by_step_ranges() {
    let device = host();
    let scarce = FbCacheConfig { attention_waves: 2, query_rows: 40, min_budget: 4, slots: 4, ..declared() };
    let cache = make_cache(device, &scarce);
    let mut info: FbInfo = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_cache_info(cache, &raw mut info) }, FbOk);
    assert_eq!(info.attention_waves, 2);
    let sequence = join(cache, 20, 10);
    let row = FbBatchRow { sequence, accepted: 0, query_rows: 1 };
    let config = FbStepConfig { rows: &raw const row, row_count: 1, query_rows: 1, ..sized() };
    let (selection, mut slots) = ([-1; (LAYERS * TOP_K) as usize], [-7; (LAYERS * TOP_K) as usize]);
    let (mut step, from, to, stream) = (0, selection.as_ptr(), slots.as_mut_ptr(), null_mut());
    // SAFETY: all pointers are valid and as long as stated; the inline stream has passed each call when it returns.
    unsafe {
        assert_eq!(fb_prepare(cache, &raw const config, stream, &raw mut step), FbOk, "{}", text_of(cache));
        for refused in [fb_layer(cache, step, 0, from, to, stream), fb_layers(cache, step, from, to, stream)]
        {
            assert_eq!(refused, FbInvalidConfig);
            assert!(text_of(cache).contains("attention_waves 2"), "{}", text_of(cache));
        }
        assert_eq!(fb_abandon(cache, step), FbOk);
        assert_eq!(fb_finish(cache, step, stream), FbOk);
        assert_eq!(fb_retire(cache, &raw mut step, stream, null_mut()), FbCancelled);
    }
    assert_eq!(slots, [-7; (LAYERS * TOP_K) as usize]);
    close(cache, sequence);
    destroy(cache, device);
}
