//! Budgets: how a caller states one, the calls by which the engine changes those of a sequence between its steps, and
//! those of a cache that changes them itself.

use std::ffi::c_void;

use forebay::{Budget, Error, Kind, Result};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::status::FbStatus;

/// A budget for fb_resize. Set one of `slots`, `ratio` and `slots_by_layer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbBudget {
    /// sizeof(fb_budget).
    pub size: usize,
    /// Slots in each layer, or 0.
    pub slots: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Slots in each layer as a fraction of prompt plus promised tokens, above 0 and at most 1; at least the cache's
    /// min_budget. Or 0.
    pub ratio: f64,
    /// Slots of each layer, draft layers included, or NULL.
    pub slots_by_layer: *const u32,
}

// SAFETY: words and a pointer, two of 4 bytes between words of 8; any bytes are an `f64`.
unsafe impl Plain for FbBudget {}
impl Versioned for FbBudget {
    const NAME: &'static str = "fb_budget";
    const REQUIRED: usize = std::mem::offset_of!(FbBudget, slots_by_layer) + 8;
}

/// The three fields in which a caller states a budget.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stated {
    pub(crate) slots: u32,
    pub(crate) ratio: f64,
    pub(crate) slots_by_layer: *const u32,
}

impl Stated {
    /// The budget that these fields state; none if all of them are 0.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] if more than one is set.
    ///
    /// # Safety
    /// `slots_by_layer` is null, or has `layers` values.
    pub(crate) unsafe fn budget(&self, layers: u32, operation: &'static str) -> Result<Option<Budget>> {
        match (self.slots, self.ratio == 0.0, self.slots_by_layer.is_null()) {
            (0, true, true) => Ok(None),
            (slots, true, true) => Ok(Some(Budget::Slots(slots))),
            (0, false, true) => Ok(Some(Budget::Ratio(self.ratio))),
            (0, true, false) => {
                // SAFETY: the same contract.
                let table = unsafe { cast::slice(self.slots_by_layer, layers as usize, "slots_by_layer") }?;
                Ok(Some(Budget::ByLayer(table.to_vec())))
            }
            _ => Err(one_of(operation)),
        }
    }
}

fn one_of(operation: &'static str) -> Error {
    let error = Error::new(Kind::InvalidConfig, operation).at("slots, ratio and slots_by_layer");
    error.hint("set one of them")
}

impl FbBudget {
    /// # Safety
    /// `slots_by_layer` is null, or has as many values as the cache has layers.
    unsafe fn declare(&self, cache: &FbCache) -> Result<Budget> {
        if self.reserved != 0 {
            return Err(Error::new(Kind::InvalidConfig, "resize").at("reserved"));
        }
        let stated = Stated { slots: self.slots, ratio: self.ratio, slots_by_layer: self.slots_by_layer };
        // SAFETY: the same contract.
        let budget = unsafe { stated.budget(cache.cache.geometry().layers(), "resize") }?;
        budget.ok_or_else(|| one_of("resize"))
    }
}

/// Changes the budget of a sequence between two of its steps, layer by layer. A smaller budget keeps the rows that were
/// selected last; a larger one adds empty slots, which misses fill. Nothing crosses the link. On the device the call
/// moves the rows that stay but whose slots go, and enqueues that on `stream`; the sequence's next step waits for it by
/// itself. Captured graphs stay valid. The slots that go are free at once for fb_open and fb_resize. Slots are taken
/// and freed in whole blocks of 64, and slots beyond the tokens that the sequence may have are not taken.
///
/// FB_INVALID_CONFIG in a cache with `share` (fb_cache_config), which sets the budgets itself, and for fewer slots than
/// the cache's min_budget. FB_INVALID_STATE for a sequence that is not running, or whose step failed. FB_BUSY while a
/// step of the sequence is prepared and not finished, or before earlier work of the sequence that the library enqueued
/// outside of steps, such as its last resize, has ended. FB_OUT_OF_RANGE for more slots than a layer has. FB_EXHAUSTED
/// for more than are free. FB_DEVICE_FAILED if work of the sequence failed. After these nothing has changed. If the
/// device refuses the call half-way, the sequence has its old budgets or its new ones (fb_budgets), and the call may be
/// repeated on any stream.
///
/// # Safety
/// `budget` states its real size, and its `slots_by_layer` is NULL or has an entry for each layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_resize(
    cache: *mut FbCache,
    sequence: u64,
    budget: *const FbBudget,
    stream: *mut c_void,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let budget = cast::versioned(budget)?.declare(cache)?;
            let sequence = cache.sequence(sequence)?;
            cache.cache.resize(sequence, &budget, cast::stream(stream))
        })
    }
}

/// Copies the slots that a sequence has in each layer, draft layers included. FB_OUT_OF_RANGE if `layers` is not the
/// cache's number of layers (`layers` of fb_info).
///
/// # Safety
/// `slots` has `layers` places.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_budgets(
    cache: *const FbCache,
    sequence: u64,
    slots: *mut u32,
    layers: u32,
) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(cache, |cache| {
            let wanted = cache.cache.geometry().layers();
            if layers != wanted {
                let error = Error::new(Kind::OutOfRange, "budgets").at("layers");
                return Err(error.with("layers", layers).with("wanted", wanted));
            }
            let room = cast::room(slots, layers as usize, "slots")?;
            let budgets = cache.cache.budgets(cache.sequence(sequence)?)?;
            for (layer, place) in room.iter_mut().enumerate() {
                let group = cache.cache.geometries().group_of(layer);
                place.write(budgets.get(group).copied().unwrap_or(0));
            }
            Ok(())
        })
    }
}

/// Moves the budgets of all sequences towards their shares, in a cache with `share` (fb_cache_config) and within its
/// limits for one step. fb_prepare does this by itself for the sequences of its micro-batch; this call is for an engine
/// that wants it at a time of its own. Sequences in an open step stay as they are, and so do those that have retired no
/// step since they joined or were last resized or truncated. `resized`, which may be NULL, receives the number of
/// sequences that the call has resized: 0 when there is nothing left to do. FB_INVALID_CONFIG in a cache without
/// `share`.
///
/// # Safety
/// `resized` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_share_slots(
    cache: *mut FbCache,
    stream: *mut c_void,
    resized: *mut u32,
) -> FbStatus {
    change(cache, |cache| {
        // SAFETY: this call's contract.
        let resized = unsafe { cast::out_or_none(resized, "resized") }?;
        let count = cache.cache.share_slots(cast::stream(stream))?;
        if let Some(resized) = resized {
            resized.set(count);
        }
        Ok(())
    })
}

/// Returns a digest of the budgets of all open sequences. Ranks that made the same calls with the same results have
/// equal digests. The call waits for no device.
///
/// # Safety
/// `digest` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_budgets_digest(cache: *const FbCache, digest: *mut u64) -> FbStatus {
    // SAFETY: this call's contract.
    unsafe {
        read(cache, |cache| {
            cast::out(digest, "digest")?.set(cache.cache.budgets_digest());
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null;

    use super::*;

    #[test]
    fn a_budget_is_one_of_three_fields() {
        let table = [7, 8];
        let slots_by_layer = table.as_ptr();
        let none = Stated { slots: 0, ratio: 0.0, slots_by_layer: null() };
        // SAFETY: the table has a value for each of two layers.
        let budget = |stated: Stated| unsafe { stated.budget(2, "open") };
        assert_eq!(budget(none), Ok(None));
        assert_eq!(budget(Stated { slots: 5, ..none }), Ok(Some(Budget::Slots(5))));
        assert_eq!(budget(Stated { ratio: 0.5, ..none }), Ok(Some(Budget::Ratio(0.5))));
        assert_eq!(budget(Stated { slots_by_layer, ..none }), Ok(Some(Budget::ByLayer(table.to_vec()))));
        for two in [
            Stated { slots: 5, ratio: 0.5, ..none },
            Stated { slots: 5, slots_by_layer, ..none },
            Stated { slots: 0, ratio: f64::NAN, slots_by_layer },
            Stated { slots: 5, ratio: 0.5, slots_by_layer },
        ] {
            let error = budget(two).unwrap_err();
            assert_eq!((error.kind(), error.operation()), (Kind::InvalidConfig, "open"), "{two:?}");
        }
    }
}
