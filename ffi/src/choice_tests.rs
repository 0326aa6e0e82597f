//! Tests of tables, prices and choosers through C: they equal those of Rust, and each bad number is refused.

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use super::*;
use crate::testing::*;

const TEXT: &CStr = c"forebay overlap table 1\nversion 7\nlayers 4\n0 none\n1 da\n2 dba\n3 ahead\n";

fn from_text(text: &CStr) -> (FbStatus, String, (u32, Vec<u32>)) {
    let (mut version, mut orders, mut layers) = (99, [99; 8], 99);
    let (status, said) = reason(|reason, bytes| {
        // SAFETY: as much room as stated, and room for the outputs.
        unsafe {
            let orders = orders.as_mut_ptr();
            fb_table_from_text(text.as_ptr(), reason, bytes, &mut version, orders, 8, &mut layers)
        }
    });
    if status != FbStatus::FbOk {
        assert_eq!((version, orders, layers), (99, [99; 8], 99), "written on success only");
        return (status, said, (0, Vec::new()));
    }
    (status, said, (version, orders[..layers as usize].to_vec()))
}

#[test]
fn a_table_survives_the_way_to_text_and_back() {
    let (status, _, (version, orders)) = from_text(TEXT);
    ok(status);
    let wanted = [FB_OVERLAP_NONE, FB_OVERLAP_DA, FB_OVERLAP_DBA, FB_OVERLAP_AHEAD];
    assert_eq!((version, orders.as_slice()), (7, &wanted[..]));
    let table = FbTable { version, layers: 4, orders: orders.as_ptr() };
    let mut bytes = 0;
    let (status, said) = reason(|text, room| {
        // SAFETY: a text of that many bytes, and room for the output.
        unsafe { fb_table_to_text(&table, null_mut(), 0, text, room, &mut bytes) }
    });
    ok(status);
    assert_eq!((said.as_bytes(), bytes), (TEXT.to_bytes(), TEXT.count_bytes() + 1));
    // Shortened output, and only the size.
    let mut short = [9; 5];
    // SAFETY: as much room as stated, and room for the output.
    unsafe {
        ok(fb_table_to_text(&table, null_mut(), 0, short.as_mut_ptr(), 4, &mut bytes));
        ok(fb_table_to_text(&table, null_mut(), 0, null_mut(), 0, &mut bytes));
    }
    assert_eq!((short.map(|c| c as u8), bytes), ([b'f', b'o', b'r', 0, 9], TEXT.count_bytes() + 1));
    for (layer, order) in (0..).zip(Overlap::ALL.map(number)) {
        assert_eq!(super::order(layer, order).map(number), Ok(order));
    }
}

#[test]
fn a_text_that_is_no_table_is_refused_with_its_line_number() {
    use FbStatus::*;
    for (text, wanted, said) in [
        (c"", FbBadFormat, "its title"),
        (c"forebay overlap table 9\n", FbBadVersion, "format"),
        (c"forebay overlap table 1\nversion 7\nlayers 2\n0 none\n1 dab\n", FbBadFormat, "dab"),
        (c"forebay overlap table 1\nversion 7\nlayers 2\n0 none\n", FbBadFormat, "layer 1"),
        (c"\xFF", FbInvalidConfig, "UTF-8"),
    ] {
        let (status, text, _) = from_text(text);
        assert!(status == wanted && text.contains(said), "{said}: {text}");
    }
    let (mut version, mut layers, mut bytes) = (0, 0, 0);
    let table = FbTable { version: 1, layers: 1, orders: &4 };
    // SAFETY: null is refused, and room for the outputs.
    unsafe {
        let read =
            |text, version, layers| fb_table_from_text(text, null_mut(), 0, version, null_mut(), 0, layers);
        assert_eq!(read(null(), &mut version, &mut layers), FbInvalidConfig);
        assert_eq!(read(TEXT.as_ptr(), null_mut(), &mut layers), FbInvalidConfig);
        assert_eq!(read(TEXT.as_ptr(), &mut version, null_mut()), FbInvalidConfig);
        ok(read(TEXT.as_ptr(), &mut version, &mut layers));
        assert_eq!((version, layers), (7, 4));
        assert_eq!(fb_table_to_text(null(), null_mut(), 0, null_mut(), 0, &mut bytes), FbInvalidConfig);
        assert_eq!(fb_table_to_text(&table, null_mut(), 0, null_mut(), 0, &mut bytes), FbInvalidConfig);
        let none = FbTable { orders: null(), ..table };
        assert_eq!(fb_table_to_text(&none, null_mut(), 0, null_mut(), 0, &mut bytes), FbInvalidConfig);
        let wrong = FbTable { orders: &7, layers: 1, ..table };
        let (status, said) =
            reason(|text, room| fb_table_to_text(&wrong, text, room, null_mut(), 0, &mut bytes));
        assert_eq!(status, FbInvalidConfig);
        assert!(said.contains("value 7"), "{said}");
        let right = FbTable { orders: &2, ..table };
        assert_eq!(fb_table_to_text(&right, null_mut(), 0, null_mut(), 0, null_mut()), FbInvalidConfig);
    }
}

/// DA costs 40 and hides everything; DBA costs 90 and hides no more; none exposes 1 ns a miss.
const MISSES: [f64; 2] = [0.0, 100.0];
const EXPOSED: [f64; 6] = [0.0, 100.0, 40.0, 40.0, 90.0, 90.0];

fn prices() -> FbPrices {
    FbPrices {
        misses: MISSES.as_ptr(),
        miss_count: 2,
        layers: 1,
        exposed: EXPOSED.as_ptr(),
        orders: 3,
        reserved: 0,
    }
}

const ORDERS: [u32; 2] = [FB_OVERLAP_NONE; 2];
const TABLE: FbTable = FbTable { version: 1, layers: 2, orders: ORDERS.as_ptr() };

fn bucket() -> FbBucket {
    FbBucket { batch: 4, table_count: 1, tables: &TABLE, prices: prices() }
}

fn eager() -> FbHysteresis {
    FbHysteresis { smoothing: 1.0, share: 0.1, least_ns: 1.0, steps: 2, ..blank() }
}

fn create_chooser(config: &FbChooserConfig) -> (*mut FbChooser, FbStatus, String) {
    let mut chooser = null_mut();
    let (status, said) = reason(|text, bytes| {
        // SAFETY: a text of that many bytes, and room for the output.
        unsafe { fb_chooser_create(config, text, bytes, &mut chooser) }
    });
    (chooser, status, said)
}

#[test]
fn the_best_table_equals_rusts() {
    let mut orders = [99; 3];
    let misses = [10.0, 60.0, 1e9];
    // SAFETY: as many misses and as much room as stated.
    ok(unsafe { fb_table_best(&prices(), misses.as_ptr(), 3, null_mut(), 0, orders.as_mut_ptr()) });
    assert_eq!(orders, [FB_OVERLAP_NONE, FB_OVERLAP_DA, FB_OVERLAP_DA]);
    for wrong in [f64::NAN, f64::INFINITY, -1.0, 2e9] {
        let (status, said) = reason(|text, bytes| {
            // SAFETY: the same, and a text of that many bytes.
            unsafe { fb_table_best(&prices(), [0.0, wrong].as_ptr(), 2, text, bytes, orders.as_mut_ptr()) }
        });
        assert_eq!(status, FbStatus::FbInvalidConfig, "{wrong}");
        assert!(said.contains("layer 1"), "{said}");
    }
    // SAFETY: null is refused.
    unsafe {
        assert_eq!(
            fb_table_best(null(), misses.as_ptr(), 3, null_mut(), 0, orders.as_mut_ptr()),
            FbStatus::FbInvalidConfig
        );
        assert_eq!(
            fb_table_best(&prices(), null(), 3, null_mut(), 0, orders.as_mut_ptr()),
            FbStatus::FbInvalidConfig
        );
        assert_eq!(
            fb_table_best(&prices(), misses.as_ptr(), 3, null_mut(), 0, null_mut()),
            FbStatus::FbInvalidConfig
        );
    }
}

#[test]
fn an_order_whose_entries_are_all_minus_one_has_no_price() {
    let first = [0.0, 100.0, 40.0, 40.0, 30.0, 30.0, -1.0, -1.0];
    let follower = [0.0, 100.0, 40.0, 40.0, -1.0, -1.0, 5.0, 5.0];
    let exposed = [first, follower].concat();
    let all = FbPrices { exposed: exposed.as_ptr(), layers: 2, orders: 4, ..prices() };
    // SAFETY: its numbers are as many as it states.
    let declared = unsafe { all.declare() }.unwrap();
    let lists = |layer: [f64; 8], left_out: usize| {
        let mut lists: [Vec<f64>; 4] = std::array::from_fn(|order| layer[2 * order..][..2].to_vec());
        lists[left_out].clear();
        lists
    };
    assert_eq!(declared, Prices::new(MISSES.to_vec(), vec![lists(first, 3), lists(follower, 2)]).unwrap());
    let mut orders = [99; 2];
    // SAFETY: as many misses and as much room as stated.
    ok(unsafe { fb_table_best(&all, [90.0; 2].as_ptr(), 2, null_mut(), 0, orders.as_mut_ptr()) });
    assert_eq!(orders, [FB_OVERLAP_DBA, FB_OVERLAP_AHEAD]);
}

#[test]
fn a_chooser_switches_like_rusts() {
    let (buckets, hysteresis) = ([bucket(), FbBucket { batch: 8, ..bucket() }], eager());
    let config = FbChooserConfig {
        buckets: buckets.as_ptr(),
        bucket_count: 2,
        tables_max: 2,
        hysteresis: &hysteresis,
        ..blank()
    };
    let (chooser, status, said) = create_chooser(&config);
    assert_eq!((status, said.as_str()), (FbStatus::FbOk, ""));
    // SAFETY: its pointers are valid.
    let mut twin = unsafe { config.declare() }.unwrap();
    let mut changed = 0;
    for step in 0..12_u32 {
        let misses = if step < 6 { 400 } else { 4 };
        let counts = [misses, misses / 2].map(|misses| FbLayerCount { hits: 1, misses, scratch: 0 });
        let own = counts.map(|of| LayerCount { hits: of.hits, misses: of.misses, scratch: of.scratch });
        let next = if step % 5 == 4 { 6 } else { 3 };
        let mut choice: FbChoice = blank();
        // SAFETY: that many counters, and room for the output.
        ok(unsafe { fb_choose(chooser, counts.as_ptr(), 2, 4, next, &mut choice) });
        let wanted = twin.choose(&own, 4, next).unwrap();
        assert_eq!((choice.bucket as usize, choice.index as usize), (wanted.bucket, wanted.index));
        assert_eq!((choice.version, choice.changed != 0), (wanted.version, wanted.changed));
        changed += choice.changed;
        let (mut orders, mut layers, mut version) = ([99; 2], 0, 0);
        // SAFETY: room for two, and room for the outputs.
        ok(unsafe {
            let orders = orders.as_mut_ptr();
            fb_chooser_table(chooser, choice.bucket, choice.index, orders, 2, &mut layers, &mut version)
        });
        let table = twin.table(wanted.bucket, wanted.index).unwrap();
        assert_eq!((orders.map(|one| order(0, one).unwrap()).as_slice(), layers), (&table.by_layer[..], 2));
        assert_eq!(version, table.version);
    }
    assert!(changed > 0, "the chooser never switched");
    ok(fb_chooser_destroy(chooser));
    assert_eq!(fb_chooser_destroy(chooser), FbStatus::FbClosed);
}

#[test]
fn a_chooser_refuses_invalid_numbers() {
    let right = FbChooserConfig { bucket_count: 1, tables_max: 2, ..blank() };
    let made = |bucket: FbBucket, hysteresis: Option<FbHysteresis>, config: FbChooserConfig| {
        let hysteresis = hysteresis.as_ref().map_or(null(), |of| &raw const *of);
        create_chooser(&FbChooserConfig { buckets: &bucket, hysteresis, ..config })
    };
    let with = |prices: FbPrices| FbBucket { prices, ..bucket() };
    let (bad_orders, unpriced) = ([0, 4], [0, FB_OVERLAP_AHEAD]);
    let bad_table = FbTable { orders: bad_orders.as_ptr(), ..TABLE };
    let unpriced = FbTable { orders: unpriced.as_ptr(), ..TABLE };
    let not_finite = [0.0, f64::NAN, 0.0, 0.0, 0.0, 0.0];
    let negative = [0.0, 0.0, 0.0, -1.0, 0.0, 0.0];
    let no_none = [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0];
    for (bucket, said) in [
        (FbBucket { batch: 0, ..bucket() }, "batches"),
        (FbBucket { table_count: 0, ..bucket() }, "no table"),
        (FbBucket { tables: null(), ..bucket() }, "tables"),
        (FbBucket { tables: &bad_table, ..bucket() }, "an order of a layer"),
        (FbBucket { tables: &unpriced, ..bucket() }, "an order without a price"),
        (with(FbPrices { orders: 2, ..prices() }), "orders"),
        (with(FbPrices { orders: 5, ..prices() }), "orders"),
        (with(FbPrices { reserved: 1, ..prices() }), "reserved"),
        (with(FbPrices { misses: null(), ..prices() }), "misses"),
        (with(FbPrices { exposed: null(), ..prices() }), "exposed"),
        (with(FbPrices { miss_count: 0, ..prices() }), "miss_count"),
        (with(FbPrices { miss_count: u32::MAX, ..prices() }), "miss_count"),
        (with(FbPrices { layers: 0, ..prices() }), "no layer"),
        (with(FbPrices { layers: u32::MAX, ..prices() }), "layers"),
        (with(FbPrices { misses: [1.0, 2.0].as_ptr(), ..prices() }), "misses"),
        (with(FbPrices { misses: [0.0, 0.0].as_ptr(), ..prices() }), "ascend"),
        (with(FbPrices { misses: [0.0, f64::NAN].as_ptr(), ..prices() }), "ascend"),
        (with(FbPrices { exposed: not_finite.as_ptr(), ..prices() }), "exposed time of none"),
        (with(FbPrices { exposed: negative.as_ptr(), ..prices() }), "exposed time of da"),
        (with(FbPrices { exposed: no_none.as_ptr(), ..prices() }), "exposed time of none"),
    ] {
        let (chooser, status, text) = made(bucket, None, right);
        assert!(text.contains(said), "`{said}` is not in `{text}`");
        assert_eq!((status, chooser), (FbStatus::FbInvalidConfig, null_mut()), "{said}");
    }
    for hysteresis in [
        FbHysteresis { smoothing: 0.0, ..eager() },
        FbHysteresis { smoothing: f64::NAN, ..eager() },
        FbHysteresis { share: 1.5, ..eager() },
        FbHysteresis { least_ns: f64::INFINITY, ..eager() },
        FbHysteresis { steps: 0, ..eager() },
        FbHysteresis { reserved: 1, ..eager() },
        sized(8, eager()),
    ] {
        assert_eq!(made(bucket(), Some(hysteresis), right).1, FbStatus::FbInvalidConfig, "{hysteresis:?}");
    }
    for config in [
        FbChooserConfig { bucket_count: 0, ..right },
        FbChooserConfig { tables_max: 0, ..right },
        FbChooserConfig { tables_max: u32::MAX, ..right },
        sized(8, right),
    ] {
        assert_eq!(made(bucket(), None, config).1, FbStatus::FbInvalidConfig, "{config:?}");
    }
    // SAFETY: null is refused.
    unsafe {
        assert_eq!(fb_chooser_create(null(), null_mut(), 0, &mut null_mut()), FbStatus::FbInvalidConfig);
        assert_eq!(fb_chooser_create(&right, null_mut(), 0, null_mut()), FbStatus::FbInvalidConfig);
    }
}

#[test]
fn calls_of_a_chooser_refuse_layers_rows_and_tables_it_lacks() {
    let hysteresis = FbHysteresis { steps: 0, ..eager() };
    let config = FbChooserConfig {
        buckets: &bucket(),
        bucket_count: 1,
        tables_max: 2,
        hysteresis: &hysteresis,
        // An older caller's config ends before the hysteresis.
        size: std::mem::offset_of!(FbChooserConfig, hysteresis),
    };
    let (chooser, status, _) = create_chooser(&config);
    ok(status);
    let counts = [FbLayerCount::default(); 3];
    let (mut choice, mut layers, mut version): (FbChoice, _, _) = (blank(), 0, 0);
    // SAFETY: that many counters, null, and room for the outputs.
    unsafe {
        let mut choose =
            |layers, rows, next| fb_choose(chooser, counts.as_ptr(), layers, rows, next, &mut choice);
        for (layers, rows, next) in [(1, 4, 4), (3, 4, 4), (0, 4, 4), (2, 0, 4), (2, 4, 5)] {
            assert_eq!(choose(layers, rows, next), FbStatus::FbOutOfRange, "{layers} {rows} {next}");
        }
        assert_eq!(fb_choose(chooser, null(), 2, 4, 4, &mut choice), FbStatus::FbInvalidConfig);
        assert_eq!(fb_choose(chooser, counts.as_ptr(), 2, 4, 4, null_mut()), FbStatus::FbInvalidConfig);
        choice.size = 0;
        assert_eq!(fb_choose(chooser, counts.as_ptr(), 2, 4, 4, &mut choice), FbStatus::FbInvalidConfig);
        let table = |bucket, index, room, layers, version| {
            fb_chooser_table(chooser, bucket, index, null_mut(), room, layers, version)
        };
        ok(table(0, 0, 0, &mut layers, &mut version));
        assert_eq!((layers, version), (2, 1));
        assert_eq!(table(1, 0, 0, &mut layers, &mut version), FbStatus::FbOutOfRange);
        assert_eq!(table(0, 1, 0, &mut layers, &mut version), FbStatus::FbOutOfRange);
        assert_eq!(table(u32::MAX, u32::MAX, 0, &mut layers, &mut version), FbStatus::FbOutOfRange);
        assert_eq!(table(0, 0, 1, &mut layers, &mut version), FbStatus::FbInvalidConfig);
        assert_eq!(table(0, 0, 0, null_mut(), &mut version), FbStatus::FbInvalidConfig);
        assert_eq!(table(0, 0, 0, &mut layers, null_mut()), FbStatus::FbInvalidConfig);
    }
    ok(fb_chooser_destroy(chooser));
}
