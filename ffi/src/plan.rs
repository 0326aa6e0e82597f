//! The planner: what fits on a GPU and in its part of the host's memory, and at which ratio, before a cache is made.

use std::ffi::{CStr, c_char};

use forebay::predict::plan::{Batch, Demand, Note, Planned, Ratio, plan};
use forebay::{Error, Kind, Result, Slots};

use crate::cast::{self, Plain, Versioned, create};
use crate::config::{self, FbCacheConfig};
use crate::status::FbStatus;

/// All rows of the whole batch fit on the device: offload moves bytes without any gain.
pub const FB_NOTE_ALL_RESIDENT: u32 = 1;
/// Dense attention reads every row in every step, so every row would be fetched in every step: offload is impossible.
pub const FB_NOTE_DENSE: u32 = 2;
/// There are so few slots for each sequence and layer that many misses are likely.
pub const FB_NOTE_FEW_SLOTS: u32 = 4;
/// A sequence has fewer slots in a layer than a step may select there: the rows beyond them are in scratch slots.
pub const FB_NOTE_SCRATCH: u32 = 8;
/// Host memory, and not the GPU's memory, limits the batch.
pub const FB_NOTE_HOST_BOUND: u32 = 16;
/// Offload fits no more sequences than fit with all rows resident.
pub const FB_NOTE_NO_ROOM: u32 = 32;

/// The notes of a plan and their bits. `forebay::predict::worth` has further notes, which need a setup.
const NOTES: [(u32, Note); 6] = [
    (FB_NOTE_ALL_RESIDENT, Note::AllResident),
    (FB_NOTE_DENSE, Note::Dense),
    (FB_NOTE_FEW_SLOTS, Note::FewSlots),
    (FB_NOTE_SCRATCH, Note::Scratch),
    (FB_NOTE_HOST_BOUND, Note::HostBound),
    (FB_NOTE_NO_ROOM, Note::NoRoom),
];

/// The question for the planner. All byte counts are per GPU; those of host memory are of the part that belongs to this
/// GPU. An optional field that is 0 gets the default that its comment names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbPlanConfig {
    /// sizeof(fb_plan_config).
    pub size: usize,
    /// The model. The planner reads only the fields that fb_preset fills, and refuses a `selects_by_layer`.
    pub model: *const FbCacheConfig,
    /// Bytes of the GPU's memory.
    pub gpu: u64,
    /// Tokens of a sequence at its end: prompt plus promised tokens.
    pub context: u32,
    /// Optional: sequences on the GPU at the same time. Default: as many as fit.
    pub batch: u32,
    /// Optional: slots as a fraction of the context, above 0 and at most 1. Default: the largest ratio that fits; if
    /// `batch` is 0, the ratio that gives each sequence `least_slots` slots in a layer, or its whole context if that is
    /// less.
    pub ratio: f64,
    /// Optional: bytes of weights on the GPU. Default: 0.
    pub weights: u64,
    /// Optional: bytes of activations. Default: 0.
    pub activations: u64,
    /// Optional: bytes that the engine takes for anything else. Default: 0.
    pub workspace: u64,
    /// Optional: bytes of host memory for the total pool. Default: as many as the plan needs.
    pub host: u64,
    /// Optional: bytes of the device's mapping granularity. Default: 2 MiB.
    pub grain: u64,
    /// Optional: tokens of the longest sequence that the model supports. Default: not checked.
    pub longest: u32,
    /// Optional: query rows of a step. Default: 1.
    pub query_rows: u32,
    /// Optional: the most steps of one sequence in flight. Default: 2.
    pub steps_in_flight: u32,
    /// Optional: micro-batches of the batch. Default: 1.
    pub micro_batches: u32,
    /// Optional: the fewest slots of a sequence when the plan fits as many sequences as possible. Default: 6400.
    pub least_slots: u32,
    /// Optional: 1 leaves `table_bytes` and `host_page_table_bytes` of fb_planned out of the sum that has to fit. The
    /// plan reports them all the same.
    pub tables_beside: u32,
}

// SAFETY: words and pointers, which are words; those of 4 bytes come in twos; any bytes are an `f64`.
unsafe impl Plain for FbPlanConfig {}
impl Versioned for FbPlanConfig {
    const NAME: &'static str = "fb_plan_config";
    const REQUIRED: usize = std::mem::offset_of!(FbPlanConfig, batch);
}

/// The result of the planner.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbPlanned {
    /// sizeof(fb_planned), set by the caller.
    pub size: usize,
    /// The number of sequences.
    pub batch: u32,
    /// Slots of each sequence in each layer.
    pub slots: u32,
    /// Slots as a fraction of the context.
    pub ratio: f64,
    /// 1 if rows are in host memory; 0 if all rows stay on the device.
    pub offloads: u32,
    /// FB_NOTE_ bits.
    pub notes: u32,
    /// The largest batch with all rows on the device.
    pub resident_batch: u32,
    /// The largest batch with `least_slots` slots for each sequence, or `resident_batch` if that is more.
    pub most_batch: u32,
    /// Bytes of the GPU that remain after weights, activations and workspace.
    pub available: u64,
    /// The most tokens, of all open sequences together, whose index keys fit in `available` if no row takes any of it;
    /// 0 for a model without index keys.
    pub live_tokens: u64,
    /// Device: bytes of index keys.
    pub index_key_bytes: u64,
    /// Device: bytes of the slots for the budgets of all sequences.
    pub slot_bytes: u64,
    /// Device: bytes of landing slots.
    pub landing_bytes: u64,
    /// Device: bytes of scratch slots.
    pub scratch_bytes: u64,
    /// Device: bytes that whole mappings leave unused.
    pub padding_bytes: u64,
    /// Device: bytes of residency tables, page tables, lists of fetches, the device's copies of step descriptors, and
    /// the working memory of resolves.
    pub table_bytes: u64,
    /// Pinned host memory: bytes of rows.
    pub row_bytes: u64,
    /// Pinned host memory: bytes of step descriptors.
    pub step_descriptor_bytes: u64,
    /// For fb_cache_config: pages of the total pool; 0 without offload.
    pub host_pages: u32,
    /// For fb_cache_config: pages of index keys; 0 without offload.
    pub index_pages: u32,
    /// For fb_cache_config: slots of each layer's pool; 0 without offload.
    pub pool_slots: u32,
    /// For fb_cache_config: batch rows of one micro-batch; 0 without offload.
    pub batch_rows: u32,
    /// Device: bytes of the GPU's own page tables, which the driver takes so that the GPU can reach pinned host memory.
    pub host_page_table_bytes: u64,
}

// SAFETY: words; those of 4 bytes come in twos; any bytes are an `f64`.
unsafe impl Plain for FbPlanned {}
impl Versioned for FbPlanned {
    const NAME: &'static str = "fb_planned";
    const REQUIRED: usize = std::mem::offset_of!(FbPlanned, batch_rows) + 4;
}

const fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

impl FbPlanConfig {
    /// # Safety
    /// Its model is valid, and states its real size.
    unsafe fn declare(&self) -> Result<Demand> {
        let wrong = |place: &'static str, value: u32| {
            Error::new(Kind::InvalidConfig, "plan").at(place).with("value", value)
        };
        if self.tables_beside > 1 {
            return Err(wrong("tables_beside", self.tables_beside).hint("pass 0 or 1"));
        }
        // SAFETY: this function's contract.
        let model = unsafe { cast::versioned(self.model) }?;
        if !model.selects_by_layer.is_null() {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("selects_by_layer")
                .hint("name the model's groups by lone_layers and group_layers"));
        }
        let shape = model.shape();
        let usual = Demand::new(shape, self.gpu, self.context);
        Ok(Demand {
            longest: (self.longest != 0).then_some(self.longest),
            weights: self.weights,
            activations: self.activations,
            workspace: self.workspace,
            host: (self.host != 0).then_some(self.host),
            query_rows: or(self.query_rows, usual.query_rows),
            steps_in_flight: or(self.steps_in_flight, usual.steps_in_flight),
            micro_batches: or(self.micro_batches, usual.micro_batches),
            batch: if self.batch == 0 { Batch::Most } else { Batch::Sequences(self.batch) },
            ratio: if self.ratio == 0.0 { Ratio::Auto } else { Ratio::Share(self.ratio) },
            least_slots: or(self.least_slots, usual.least_slots),
            count_tables: self.tables_beside == 0,
            grain: if self.grain == 0 { usual.grain } else { self.grain },
            ..usual
        })
    }
}

impl FbPlanned {
    fn of(planned: &Planned) -> FbPlanned {
        let config = planned.config.as_ref();
        let pool_slots = match config.map(|config| &config.slots) {
            Some(Slots::Uniform(slots)) => *slots,
            _ => 0,
        };
        let notes = NOTES.iter().filter(|(_, note)| planned.notes.contains(note));
        let bytes = &planned.bytes;
        FbPlanned {
            size: size_of::<FbPlanned>(),
            batch: planned.batch,
            slots: planned.slots,
            ratio: planned.ratio,
            offloads: planned.offloads().into(),
            notes: notes.fold(0, |bits, (bit, _)| bits | bit),
            resident_batch: planned.resident_batch,
            most_batch: planned.most_batch,
            available: planned.available,
            live_tokens: planned.live_tokens.unwrap_or(0),
            index_key_bytes: bytes.index_keys,
            slot_bytes: bytes.slots,
            landing_bytes: bytes.landing,
            scratch_bytes: bytes.scratch,
            padding_bytes: bytes.padding,
            table_bytes: bytes.tables,
            row_bytes: bytes.rows,
            step_descriptor_bytes: bytes.step_descriptors,
            host_pages: config.map_or(0, |config| config.host_pages),
            index_pages: config.map_or(0, |config| config.index_pages),
            pool_slots,
            batch_rows: config.map_or(0, |config| config.batch),
            host_page_table_bytes: bytes.host_page_tables,
        }
    }
}

/// Computes a plan. On failure, `text` receives the reason: for FB_OUT_OF_MEMORY it names what does not fit, with the
/// wanted and the available bytes.
///
/// # Safety
/// `config`, its model and `planned` state their real sizes; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_plan(
    config: *const FbPlanConfig,
    text: *mut c_char,
    text_bytes: usize,
    planned: *mut FbPlanned,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (config, answer) = (cast::versioned(config)?, cast::versioned_out(planned)?);
            answer.set(&FbPlanned::of(&plan(&config.declare()?).map_err(config::in_words)?));
            Ok(())
        })
    }
}

const fn note_text(bit: u32) -> &'static CStr {
    match bit {
        FB_NOTE_ALL_RESIDENT => c"does not pay here: all rows of this batch fit on the device",
        FB_NOTE_DENSE => c"does not pay here: dense attention reads every row in every step",
        FB_NOTE_FEW_SLOTS => c"fewer than 6400 slots a sequence and layer: expect many misses",
        FB_NOTE_SCRATCH => c"fewer slots than a step selects: the other rows use scratch slots for that step",
        FB_NOTE_HOST_BOUND => c"host memory limits the batch",
        FB_NOTE_NO_ROOM => {
            c"does not pay here: index keys and slots leave room for no more sequences than whole rows"
        }
        _ => c"",
    }
}

/// Returns the sentence for a note, given its one bit, as a constant string. It is empty for a bit without a note.
#[unsafe(no_mangle)]
pub extern "C" fn fb_plan_note_text(bit: u32) -> *const c_char {
    note_text(bit).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ptr::{null, null_mut};

    use forebay::Shape;

    use super::*;
    use crate::testing::*;

    fn model() -> FbCacheConfig {
        let shape = Shape::DEEPSEEK_V3_2;
        FbCacheConfig {
            layers: shape.layers,
            draft_layers: shape.draft_layers,
            index_key_bytes: shape.index_key_bytes,
            row_bytes: shape.runs,
            page_tokens: shape.page_tokens,
            top_k: shape.top_k,
            host_stride: shape.host_stride,
            device_block_align: shape.device_block_align,
            // No field of the model: not read.
            memory: 99,
            ..blank()
        }
    }

    fn asked(model: &FbCacheConfig) -> FbPlanConfig {
        FbPlanConfig { model, gpu: 60 << 30, context: 32768, ..blank() }
    }

    fn planned(config: &FbPlanConfig) -> (FbStatus, String, FbPlanned) {
        let mut planned = blank();
        let (status, said) = reason(|text, bytes| {
            // SAFETY: a text of so many bytes, and a place for the answer.
            unsafe { fb_plan(config, text, bytes, &mut planned) }
        });
        (status, said, planned)
    }

    #[test]
    fn a_plan_equals_rusts() {
        let model = model();
        let shape = model.shape();
        assert_eq!(shape, Shape::DEEPSEEK_V3_2);
        let usual = Demand::new(shape, 60 << 30, 32768);
        let (status, said, most) = planned(&asked(&model));
        assert_eq!((status, said.as_str()), (FbStatus::FbOk, ""));
        let wanted = FbPlanned::of(&plan(&usual).unwrap());
        assert_eq!(format!("{most:?}"), format!("{wanted:?}"));
        assert!(most.offloads == 1 && most.batch == most.most_batch && most.pool_slots > 0, "{most:?}");
        let config = FbPlanConfig {
            batch: 20,
            ratio: 0.2,
            weights: 1 << 30,
            activations: 2 << 30,
            workspace: 3 << 30,
            host: 500 << 30,
            grain: 1 << 16,
            longest: 40_000,
            query_rows: 2,
            steps_in_flight: 3,
            micro_batches: 2,
            least_slots: 5000,
            tables_beside: 1,
            ..asked(&model)
        };
        let demand = Demand {
            longest: Some(40_000),
            weights: 1 << 30,
            activations: 2 << 30,
            workspace: 3 << 30,
            host: Some(500 << 30),
            query_rows: 2,
            steps_in_flight: 3,
            micro_batches: 2,
            batch: Batch::Sequences(20),
            ratio: Ratio::Share(0.2),
            least_slots: 5000,
            count_tables: false,
            grain: 1 << 16,
            ..usual
        };
        let (status, said, all) = planned(&config);
        assert_eq!((status, said.as_str()), (FbStatus::FbOk, ""));
        let wanted = FbPlanned::of(&plan(&demand).unwrap());
        assert_eq!(format!("{all:?}"), format!("{wanted:?}"));
        assert_eq!((all.batch, all.batch_rows), (20, 10));
        // An older caller's config ends before the batch.
        let older = sized(std::mem::offset_of!(FbPlanConfig, batch), config);
        assert_eq!(planned(&older).2.batch, most.batch);
    }

    #[test]
    fn a_plan_names_invalid_fields_and_what_does_not_fit() {
        use FbStatus::*;
        let model = model();
        let right = asked(&model);
        let (dense, empty) = (FbCacheConfig { top_k: 0, ..model }, FbCacheConfig { layers: 0, ..model });
        for (config, wanted, said) in [
            (FbPlanConfig { model: null(), ..right }, FbInvalidConfig, "fb_cache_config"),
            (FbPlanConfig { model: &sized(8, model), ..right }, FbInvalidConfig, "fb_cache_config"),
            (FbPlanConfig { model: &empty, ..right }, FbInvalidConfig, "layers"),
            (FbPlanConfig { model: &dense, ratio: 0.5, ..right }, FbInvalidConfig, "dense"),
            (FbPlanConfig { context: 0, ..right }, FbInvalidConfig, "context"),
            (FbPlanConfig { longest: 1000, ..right }, FbInvalidConfig, "context"),
            (FbPlanConfig { ratio: f64::NAN, ..right }, FbInvalidConfig, "ratio"),
            (FbPlanConfig { ratio: f64::INFINITY, ..right }, FbInvalidConfig, "ratio"),
            (FbPlanConfig { ratio: -0.5, ..right }, FbInvalidConfig, "ratio"),
            (FbPlanConfig { ratio: 1.5, ..right }, FbInvalidConfig, "ratio"),
            (FbPlanConfig { tables_beside: 2, ..right }, FbInvalidConfig, "tables_beside"),
            (FbPlanConfig { query_rows: u32::MAX, ..right }, FbInvalidConfig, "query_rows"),
            (FbPlanConfig { gpu: 0, ..right }, FbInvalidConfig, "gpu"),
            (FbPlanConfig { weights: 61 << 30, ..right }, FbOutOfMemory, "weights"),
            (FbPlanConfig { weights: u64::MAX, activations: 1, ..right }, FbOutOfMemory, ""),
            (FbPlanConfig { batch: 4000, ..right }, FbOutOfMemory, "gpu"),
            (FbPlanConfig { host: 1, batch: 60, ratio: 0.1, ..right }, FbOutOfMemory, "host"),
            (sized(16, right), FbInvalidConfig, "fb_plan_config"),
        ] {
            let (status, text, _) = planned(&config);
            assert!(text.contains(said), "`{said}` is not in `{text}`");
            assert_eq!(status, wanted, "{text}");
        }
        let mut answer = blank();
        // SAFETY: null is refused.
        unsafe {
            assert_eq!(fb_plan(null(), null_mut(), 0, &mut answer), FbInvalidConfig);
            assert_eq!(fb_plan(&right, null_mut(), 0, null_mut()), FbInvalidConfig);
            answer.size = 24;
            assert_eq!(fb_plan(&right, null_mut(), 0, &mut answer), FbInvalidConfig);
        }
    }

    #[test]
    fn notes_are_bits_with_their_texts() {
        for (at, (bit, note)) in NOTES.iter().enumerate() {
            assert_eq!(*bit, 1 << at);
            assert_eq!(note_text(*bit).to_str(), Ok(note.describe()));
        }
        for none in [0, 3, 64, u32::MAX] {
            assert_eq!(note_text(none), c"");
        }
        let model = model();
        let small = planned(&FbPlanConfig { batch: 1, ..asked(&model) }).2;
        assert_eq!((small.notes & FB_NOTE_ALL_RESIDENT, small.offloads), (FB_NOTE_ALL_RESIDENT, 0));
        assert_eq!((small.host_pages, small.pool_slots, small.batch_rows), (0, 0, 0));
    }
}
