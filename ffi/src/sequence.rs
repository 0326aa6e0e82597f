//! The calls that concern one sequence: open, append, join, where its new rows land, close.

use std::ffi::c_void;

use forebay::{BringUp, Budget, Error, Kind, Layer, Open, Result, WarmUp};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::status::FbStatus;

/// Every row is brought up when the sequence joins, if they all fit its slots.
pub const FB_BRING_UP_WHOLE: u32 = 0;
/// Nothing is brought up.
pub const FB_BRING_UP_NOTHING: u32 = 1;

/// What a sequence asks for. What is optional and 0 gets its default.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbOpenConfig {
    /// sizeof(fb_open_config).
    pub size: usize,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens that it may decode.
    pub promised: u32,
    /// Optional: slots in each layer; the cache's min_budget. Not beside a ratio.
    pub slots: u32,
    /// Optional: FB_BRING_UP_WHOLE or FB_BRING_UP_NOTHING.
    pub bring_up: u32,
    /// Optional: slots in each layer as a share of prompt and promised tokens, above 0 and at most 1.
    pub ratio: f64,
}

// SAFETY: words, four of 4 bytes between words of 8; any bytes are an `f64`.
unsafe impl Plain for FbOpenConfig {}
impl Versioned for FbOpenConfig {
    const NAME: &'static str = "fb_open_config";
    const REQUIRED: usize = std::mem::offset_of!(FbOpenConfig, slots);
}

impl FbOpenConfig {
    fn declare(&self, default: u32) -> Result<Open> {
        let bad = |place| Error::new(Kind::InvalidConfig, "open").at(place);
        let budget = match (self.slots, self.ratio == 0.0) {
            (0, true) => Budget::Slots(default),
            (slots, true) => Budget::Slots(slots),
            (0, false) => Budget::Ratio(self.ratio),
            (_, false) => return Err(bad("slots and ratio").hint("set one of them")),
        };
        let bring_up = match self.bring_up {
            FB_BRING_UP_WHOLE => BringUp::Whole,
            FB_BRING_UP_NOTHING => BringUp::Nothing,
            other => return Err(bad("bring_up").with("value", other)),
        };
        Ok(Open { prompt: self.prompt, promised: self.promised, budget, bring_up })
    }
}

/// Admits a sequence: takes its pages, slots and lane. FB_EXHAUSTED names the pool that has too little
/// left; nothing is taken then.
///
/// # Safety
/// `config` states its size truly.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_open(
    cache: *mut FbCache,
    config: *const FbOpenConfig,
    sequence: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract, for all three.
    unsafe {
        change(cache, |cache| {
            let (config, sequence) = (cast::versioned(config)?, cast::out(sequence, "sequence")?);
            let open = config.declare(cache.cache.config().min_budget)?;
            let opened = cache.cache.open(&open)?;
            sequence.set(cache.number_of(opened));
            Ok(())
        })
    }
}

/// Appends prompt rows in one layer: `count` packed rows, each row_bytes[0] + row_bytes[1] bytes. Layers
/// fill independently, each in order. Nothing is written on an error.
///
/// # Safety
/// `rows` has `count` rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_append(
    cache: *mut FbCache,
    sequence: u64,
    layer: u32,
    rows: *const c_void,
    count: u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let row_bytes = u64::from(cache.cache.geometry().row_bytes());
            // A u64 holds the product of two u32, and a usize is as wide.
            let bytes = cast::slice(rows.cast::<u8>(), (row_bytes * u64::from(count)) as usize, "rows")?;
            cache.cache.append(cache.sequence(sequence), Layer(layer), bytes)
        })
    }
}

/// Enters the sequence into its lane once every layer has its whole prompt, and brings up what it was
/// opened for. Steps wait for it by themselves.
///
/// # Safety
/// What the library enqueues on `stream` may be enqueued there now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_join(cache: *mut FbCache, sequence: u64, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| {
        // Later steps wait for the work by an edge, and report its failure.
        let _ready = cache.cache.join(cache.sequence(sequence), cast::stream(stream), WarmUp::default())?;
        Ok(())
    })
}

/// The slot to which the row of a step's query row is to be written, the same in every layer's slab.
///
/// # Safety
/// `slot` has room for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_landing_slot(
    cache: *const FbCache,
    sequence: u64,
    query_row: u32,
    slot: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        read(cache, |cache| {
            let slot = cast::out(slot, "slot")?;
            slot.set(cache.cache.landing_slot(cache.sequence(sequence), query_row)?);
            Ok(())
        })
    }
}

/// Ends a sequence, also as an abort. Its handle is closed at once; what it holds comes back when the last
/// step that names it has been retired.
///
/// # Safety
/// What the library enqueues on `stream` may be enqueued there now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_close(cache: *mut FbCache, sequence: u64, stream: *mut c_void) -> FbStatus {
    change(cache, |cache| cache.cache.close(cache.sequence(sequence), cast::stream(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_slots_or_a_ratio() {
        let config = FbOpenConfig {
            size: size_of::<FbOpenConfig>(),
            prompt: 3,
            promised: 4,
            slots: 0,
            bring_up: FB_BRING_UP_WHOLE,
            ratio: 0.0,
        };
        let open = config.declare(9).unwrap();
        assert_eq!((open.prompt, open.promised, open.bring_up), (3, 4, BringUp::Whole));
        assert_eq!(open.budget, Budget::Slots(9));
        let budget = |config: FbOpenConfig| config.declare(9).map(|open| open.budget);
        assert_eq!(budget(FbOpenConfig { slots: 5, ..config }), Ok(Budget::Slots(5)));
        assert_eq!(budget(FbOpenConfig { ratio: 0.5, ..config }), Ok(Budget::Ratio(0.5)));
        assert!(budget(FbOpenConfig { slots: 5, ratio: 0.5, ..config }).is_err());
        let nothing = FbOpenConfig { bring_up: FB_BRING_UP_NOTHING, ..config };
        assert_eq!(nothing.declare(9).unwrap().bring_up, BringUp::Nothing);
        assert!(FbOpenConfig { bring_up: 2, ..config }.declare(9).is_err());
    }
}
