//! The overlap order of each layer: tables of orders, prices, and the chooser that changes from one table of orders to
//! another.
//!
//! A table of orders is a version and one order for each layer, draft layers last. Its text form is that of
//! `forebay::overlap::Table`. A chooser has its own handle. A choice allocates nothing and depends only on the
//! counters that it was given, so all ranks choose alike.

use std::ffi::{CString, c_char};

use forebay::device::descriptor::LayerCount;
use forebay::overlap::{Bucket, Chooser, Hysteresis, Overlap, Prices, Table};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::handle::{self, Object, change, read};
use crate::status::FbStatus;
use crate::step::FbLayerCount;

/// Attention waits for the gather; nothing hides it.
pub const FB_OVERLAP_NONE: u32 = 0;
/// The preparation of attention, and attention over the resident and new rows, hide the gather.
pub const FB_OVERLAP_DA: u32 = 1;
/// In addition to FB_OVERLAP_DA, the indexer of the second half of the batch hides the gather.
pub const FB_OVERLAP_DBA: u32 = 2;
/// The layers before hide the gather. Only for a layer that another one selects for, behind fb_overlap of that one or
/// in calls for all layers at once. Attention is not split.
pub const FB_OVERLAP_AHEAD: u32 = 3;

/// The order with this number.
///
/// # Errors
/// [`Kind::InvalidConfig`] names the layer.
pub(crate) fn order(layer: usize, number: u32) -> Result<Overlap> {
    let found = Overlap::ALL.get(number as usize).copied();
    found.ok_or_else(|| {
        Error::new(Kind::InvalidConfig, "overlap")
            .at("an order of a layer")
            .with("layer", layer as u64)
            .with("value", number)
            .hint("pass FB_OVERLAP_NONE, FB_OVERLAP_DA, FB_OVERLAP_DBA or FB_OVERLAP_AHEAD")
    })
}

/// The number of an order.
const fn number(overlap: Overlap) -> u32 {
    match overlap {
        Overlap::None => FB_OVERLAP_NONE,
        Overlap::Da => FB_OVERLAP_DA,
        Overlap::Dba => FB_OVERLAP_DBA,
        Overlap::Ahead => FB_OVERLAP_AHEAD,
    }
}

/// A table of orders: the overlap order of each layer. This struct never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTable {
    /// Rises whenever the orders change.
    pub version: u32,
    /// Layers, draft layers included.
    pub layers: u32,
    /// FB_OVERLAP_ orders, one for each layer, draft layers last.
    pub orders: *const u32,
}

// SAFETY: words, two of 4 bytes before a pointer.
unsafe impl Plain for FbTable {}

impl FbTable {
    /// # Safety
    /// Its orders are valid.
    unsafe fn declare(&self) -> Result<Table> {
        // SAFETY: this function's contract.
        let orders = unsafe { cast::slice(self.orders, self.layers as usize, "orders") }?;
        let by_layer =
            orders.iter().enumerate().map(|(layer, one)| order(layer, *one)).collect::<Result<_>>()?;
        Ok(Table { version: self.version, by_layer })
    }
}

/// The price of each order: the nanoseconds by which it makes a layer longer, for each number of misses per batch row.
/// The baseline is the same layer without misses and without the costs of any order. So a price includes the order's
/// own costs (split attention, merge). A draft layer's price is the sum over its draft passes of a step. The price of a
/// layer's order is the layer's exposed time: the time of the gather and of these costs that nothing hides. This struct
/// never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbPrices {
    /// Numbers of misses per batch row, ascending from 0.
    pub misses: *const f64,
    /// The number of entries in `misses`.
    pub miss_count: u32,
    /// The number of layers in `exposed`: all layers, or 1 if all layers have the same prices. Where layers share a
    /// selection, all layers.
    pub layers: u32,
    /// Nanoseconds, `[layers][orders][miss_count]`, the orders by their FB_OVERLAP_ numbers, finite and not negative. A
    /// layer that cannot run in an order has -1 in all of that order's entries: FB_OVERLAP_AHEAD in a layer that
    /// selects for itself, FB_OVERLAP_DBA in the others.
    pub exposed: *const f64,
    /// The number of orders in `exposed`: 3, or 4 with FB_OVERLAP_AHEAD.
    pub orders: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: pointers, which are words, and pairs of words of 4 bytes between and behind them.
unsafe impl Plain for FbPrices {}

/// More prices than any model has.
const PRICES_MAX: u64 = 1 << 28;

impl FbPrices {
    /// # Safety
    /// Its numbers are valid.
    unsafe fn declare(&self) -> Result<Prices> {
        let count = self.miss_count as usize;
        let orders = self.orders as usize;
        if !(Overlap::FIRST.len()..=Overlap::ALL.len()).contains(&orders) || self.reserved != 0 {
            return Err(Error::new(Kind::InvalidConfig, "overlap prices")
                .at("orders or reserved")
                .with("orders", self.orders)
                .hint("pass 3 orders, or 4 with FB_OVERLAP_AHEAD, and 0"));
        }
        let all = (u64::from(self.layers) * u64::from(self.orders)).saturating_mul(self.miss_count.into());
        if all > PRICES_MAX || count == 0 && self.layers > 0 {
            return Err(Error::new(Kind::InvalidConfig, "overlap prices")
                .at("miss_count or layers")
                .with("miss_count", self.miss_count)
                .with("layers", self.layers));
        }
        // SAFETY: this function's contract.
        let (misses, exposed) = unsafe {
            (cast::slice(self.misses, count, "misses")?, cast::slice(self.exposed, all as usize, "exposed")?)
        };
        let none = |list: &&[f64]| list.iter().all(|ns| *ns == -1.0);
        let lists = exposed.chunks_exact(count.max(1));
        let mut lists = lists.map(|list| if none(&list) { Vec::new() } else { list.to_vec() });
        let mut next =
            |order: usize| if order < orders { lists.next().unwrap_or_default() } else { Vec::new() };
        let exposed = (0..self.layers).map(|_| [next(0), next(1), next(2), next(3)]).collect();
        Prices::new(misses.to_vec(), exposed)
    }
}

/// A captured batch size. This struct never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbBucket {
    /// The batch rows that it was captured for.
    pub batch: u32,
    /// The number of tables of orders that are captured at the start.
    pub table_count: u32,
    /// These tables of orders. The chooser starts with the first one.
    pub tables: *const FbTable,
    /// The price of each order at this batch size.
    pub prices: FbPrices,
}

// SAFETY: words, two of 4 bytes before a pointer, and a struct of words.
unsafe impl Plain for FbBucket {}

impl FbBucket {
    /// # Safety
    /// Its tables of orders and prices are valid.
    unsafe fn declare(&self) -> Result<Bucket> {
        // SAFETY: this function's contract.
        let (prices, tables) = unsafe {
            (self.prices.declare()?, cast::slice(self.tables, self.table_count as usize, "tables")?)
        };
        // SAFETY: the same.
        let tables = tables.iter().map(|table| unsafe { table.declare() }).collect::<Result<_>>()?;
        Ok(Bucket { batch: self.batch, prices, tables })
    }
}

/// The conditions under which a chooser changes to another table of orders.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbHysteresis {
    /// sizeof(fb_hysteresis).
    pub size: usize,
    /// The weight of a new step's misses in the running average, above 0 and at most 1.
    pub smoothing: f64,
    /// The fraction of the exposed time, over all layers (fb_prices), that another table of orders must save, 0 to 1.
    pub share: f64,
    /// The nanoseconds per step that it must save as well.
    pub least_ns: f64,
    /// The number of consecutive steps in which it must save both, at least 1.
    pub steps: u32,
    /// Must be 0.
    pub reserved: u32,
}

// SAFETY: words, two of 4 bytes at the end; any bytes are an `f64`.
unsafe impl Plain for FbHysteresis {}
impl Versioned for FbHysteresis {
    const NAME: &'static str = "fb_hysteresis";
    const REQUIRED: usize = std::mem::offset_of!(FbHysteresis, reserved) + 4;
}

/// The configuration of a chooser.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbChooserConfig {
    /// sizeof(fb_chooser_config).
    pub size: usize,
    /// The captured batch sizes, ascending.
    pub buckets: *const FbBucket,
    /// The number of buckets.
    pub bucket_count: u32,
    /// The most tables of orders of one bucket that may be captured at the same time.
    pub tables_max: u32,
    /// Optional: when the chooser changes to another table of orders. Default: when it saves a tenth of the exposed
    /// time and 50 us per step, in 32 consecutive steps, with a `smoothing` of 0.1.
    pub hysteresis: *const FbHysteresis,
}

// SAFETY: words and pointers, which are words; two of 4 bytes between them.
unsafe impl Plain for FbChooserConfig {}
impl Versioned for FbChooserConfig {
    const NAME: &'static str = "fb_chooser_config";
    const REQUIRED: usize = std::mem::offset_of!(FbChooserConfig, hysteresis);
}

/// What the next step runs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbChoice {
    /// sizeof(fb_choice), set by the caller.
    pub size: usize,
    /// The index of the bucket.
    pub bucket: u32,
    /// The index of the table of orders in that bucket: see fb_chooser_table.
    pub index: u32,
    /// The version of that table of orders.
    pub version: u32,
    /// 1 if this call has changed that table of orders: capture it again before you launch it.
    pub changed: u32,
}

// SAFETY: words, four of 4 bytes after one of 8.
unsafe impl Plain for FbChoice {}
impl Versioned for FbChoice {
    const NAME: &'static str = "fb_choice";
    const REQUIRED: usize = std::mem::offset_of!(FbChoice, changed) + 4;
}

/// A chooser of tables of orders.
pub struct FbChooser {
    chooser: Chooser,
    /// Room for a step's counters.
    counts: Vec<LayerCount>,
}

impl Object for FbChooser {
    const KIND: u8 = 10;
    const NAME: &'static str = "fb_chooser";
}

impl FbChooserConfig {
    /// # Safety
    /// Its buckets and its hysteresis are valid.
    unsafe fn declare(&self) -> Result<Chooser> {
        // SAFETY: this function's contract.
        let buckets = unsafe { cast::slice(self.buckets, self.bucket_count as usize, "buckets") }?;
        let hysteresis = match self.hysteresis.is_null() {
            true => Hysteresis::default(),
            false => {
                // SAFETY: this function's contract.
                let given = unsafe { cast::versioned(self.hysteresis) }?;
                if given.reserved != 0 {
                    return Err(Error::new(Kind::InvalidConfig, "overlap chooser").at("reserved"));
                }
                let FbHysteresis { smoothing, share, least_ns, steps, .. } = given;
                Hysteresis { smoothing, share, least_ns, steps }
            }
        };
        // SAFETY: this function's contract.
        let buckets = buckets.iter().map(|bucket| unsafe { bucket.declare() }).collect::<Result<_>>()?;
        Chooser::new(buckets, self.tables_max, hysteresis)
    }
}

/// Reads a table of orders from its text form, the one used in files: the version, the number of layers, and as many
/// orders as `room` allows. `orders` may be NULL with a `room` of 0. On failure, `reason` receives the reason.
///
/// # Safety
/// `text` ends with a zero byte. `orders` has room for `room` numbers. `version` and `layers` have room for the
/// results. `reason` has `reason_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_table_from_text(
    text: *const c_char,
    reason: *mut c_char,
    reason_bytes: usize,
    version: *mut u32,
    orders: *mut u32,
    room: u32,
    layers: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(reason, reason_bytes, || {
            let version = cast::out(version, "version")?;
            let table = Table::from_text(cast::text(text, "text")?)?;
            let numbers = table.by_layer.iter().copied().map(number);
            cast::write_list(numbers, orders, room, "orders", layers, "layers")?;
            version.set(table.version);
            Ok(())
        })
    }
}

/// Writes a table of orders to `text` in its text form. `bytes` receives the size of the whole text, its ending zero
/// included. On failure, `reason` receives the reason.
///
/// # Safety
/// `table` and its orders are valid. `text` has `text_bytes` bytes and `reason` has `reason_bytes`. `bytes` has room
/// for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_table_to_text(
    table: *const FbTable,
    reason: *mut c_char,
    reason_bytes: usize,
    text: *mut c_char,
    text_bytes: usize,
    bytes: *mut usize,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(reason, reason_bytes, || {
            let bytes = cast::out(bytes, "bytes")?;
            let table = cast::value(table, "table")?.declare()?;
            let said = CString::new(table.to_text()).unwrap_or_default();
            cast::write_text(text, text_bytes, said.as_bytes_with_nul());
            bytes.set(said.as_bytes_with_nul().len());
            Ok(())
        })
    }
}

/// Returns, for each layer, the order with the lowest price at that layer's number of misses per batch row. `misses`
/// and `orders` have `layers` entries. On failure, `text` receives the reason.
///
/// # Safety
/// `prices` and its numbers are valid. `misses` has `layers` numbers and `orders` has room for as many. `text` has
/// `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_table_best(
    prices: *const FbPrices,
    misses: *const f64,
    layers: u32,
    text: *mut c_char,
    text_bytes: usize,
    orders: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let prices = cast::value(prices, "prices")?.declare()?;
            let misses = cast::slice(misses, layers as usize, "misses")?;
            let room = cast::room(orders, layers as usize, "orders")?;
            if let Some(layer) = misses.iter().position(|count| !(0.0..=1e9).contains(count)) {
                return Err(Error::new(Kind::InvalidConfig, "overlap table")
                    .at("misses of a layer: a number from 0 to 1e9")
                    .with("layer", layer as u64));
            }
            let table = Table::best(&prices, misses)?;
            for (place, overlap) in room.iter_mut().zip(table.by_layer) {
                place.write(number(overlap));
            }
            Ok(())
        })
    }
}

/// Makes a chooser. On failure, `text` receives the reason.
///
/// # Safety
/// `config` states its real size, and everything it points to is valid. `text` has `text_bytes` bytes. `chooser` has
/// room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_chooser_create(
    config: *const FbChooserConfig,
    text: *mut c_char,
    text_bytes: usize,
    chooser: *mut *mut FbChooser,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let chooser = cast::out(chooser, "chooser")?;
            let config = cast::versioned::<FbChooserConfig>(config)?;
            chooser.set(handle::give(|| {
                let chooser = config.declare()?;
                Ok(FbChooser { counts: Vec::with_capacity(chooser.misses().len()), chooser })
            })?);
            Ok(())
        })
    }
}

/// Adds `counts`, the result of fb_retired_counts for a step of `rows` batch rows, to the averages, and chooses the
/// table of orders for a step of `next_rows` batch rows. It allocates nothing.
///
/// # Safety
/// `counts` has `layers` entries; `choice` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_choose(
    chooser: *mut FbChooser,
    counts: *const FbLayerCount,
    layers: u32,
    rows: u32,
    next_rows: u32,
    choice: *mut FbChoice,
) -> FbStatus {
    change(chooser, |chooser| {
        // SAFETY: this call's contract, for both.
        let (counts, choice) =
            unsafe { (cast::slice(counts, layers as usize, "counts")?, cast::versioned_out(choice)?) };
        chooser.counts.clear();
        chooser.counts.extend(counts.iter().map(|count| LayerCount {
            hits: count.hits,
            misses: count.misses,
            scratch: count.scratch,
        }));
        let chosen = chooser.chooser.choose(&chooser.counts, rows, next_rows)?;
        choice.set(&FbChoice {
            size: size_of::<FbChoice>(),
            // A configuration counts buckets in 32 bits, and a bucket has at most 256 tables.
            bucket: chosen.bucket as u32,
            index: chosen.index as u32,
            version: chosen.version,
            changed: chosen.changed.into(),
        });
        Ok(())
    })
}

/// Copies the table of orders that a choice names: as many orders as `room` allows to `orders`, the number of layers
/// to `layers`, and the version to `version`. `orders` may be NULL with a `room` of 0.
///
/// # Safety
/// `orders` has room for `room` numbers; `layers` and `version` have room for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_chooser_table(
    chooser: *const FbChooser,
    bucket: u32,
    index: u32,
    orders: *mut u32,
    room: u32,
    layers: *mut u32,
    version: *mut u32,
) -> FbStatus {
    read(chooser, |chooser| {
        let table = chooser.chooser.table(bucket as usize, index as usize).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "overlap table")
                .at("bucket or index")
                .with("bucket", bucket)
                .with("index", index)
        })?;
        let numbers = table.by_layer.iter().copied().map(number);
        // SAFETY: this call's contract, for all of them.
        unsafe {
            let version = cast::out(version, "version")?;
            cast::write_list(numbers, orders, room, "orders", layers, "layers")?;
            version.set(table.version);
        }
        Ok(())
    })
}

/// Destroys a chooser.
#[unsafe(no_mangle)]
pub extern "C" fn fb_chooser_destroy(chooser: *mut FbChooser) -> FbStatus {
    handle::end(chooser, |_| Ok(()))
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
