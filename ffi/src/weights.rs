//! Weights that the ranks of a host share: their plan, their memory, and where they are.
//!
//! The object has windows and ring from its creation on, so that all that may be refused is refused before anything is
//! filled. It is filled until its parts are shared (`links`); from then on it serves steps (`ring`). Only calls that
//! belong to one of the two are refused in the other.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use forebay::device::{Device, Slice};
use forebay::os::{Faults, NoFaults};
use forebay::weights::{
    Closing, Group, LAYERS_MAX, Odd, Patterns, Place, Plan, Prefetch, Pulls, Ring, RingOptions, Sharding,
    Source, Tensor, Windows, Wrap,
};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::device::{FbDevice, Tenant};
use crate::handle::{self, Object, change, read};
use crate::status::FbStatus;

/// A rank pulls what it does not hold from the device memory of the other ranks.
pub const FB_WEIGHTS_FROM_PEERS: u32 = 0;
/// A rank pulls from its own pinned host memory, which holds every sharded layer whole.
pub const FB_WEIGHTS_FROM_HOST: u32 = 1;

/// For an odd number of layers: what costs the fewest bytes. The first layer or the last stays resident.
pub const FB_ODD_CHEAPEST: u32 = 0;
/// For an odd number of layers: the last one has a third buffer.
pub const FB_ODD_THIRD_BUFFER: u32 = 1;
/// For an odd number of layers: the first one stays resident.
pub const FB_ODD_RESIDENT_FIRST: u32 = 2;
/// For an odd number of layers: the last one stays resident.
pub const FB_ODD_RESIDENT_LAST: u32 = 3;

/// The pulls of the next step's first layers are in the graph of a captured step, which ends behind them.
pub const FB_WRAP_JOINED: u32 = 0;
/// They are enqueued behind the launch, and the next launch waits for them.
pub const FB_WRAP_BEHIND: u32 = 1;

/// The plan keeps the last layer and the first one apart without further means.
pub const FB_CLOSING_EVEN: u32 = 0;
/// The last layer has a third buffer.
pub const FB_CLOSING_THIRD_BUFFER: u32 = 1;
/// One layer, `resident_layer`, stays resident.
pub const FB_CLOSING_RESIDENT: u32 = 2;

/// The most micro-batches and parts of a pull that a configuration may name.
const EACH_MAX: u32 = 1 << 10;

/// One named byte range of a layer's weights, as the engine uses it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTensor {
    /// sizeof(fb_tensor), the same in all entries of an array.
    pub size: usize,
    /// The engine's name in UTF-8, by which patterns choose the tensor; unique in its layer.
    pub name: *const c_char,
    /// Its length in bytes, above 0.
    pub bytes: u64,
    /// The layer, below `layers` of the configuration.
    pub layer: u32,
    /// Optional: its alignment in bytes, a power of two, at most the granule. Default: 256.
    pub align: u32,
}

// SAFETY: words and a pointer, which is one; two of 4 bytes at the end.
unsafe impl Plain for FbTensor {}
impl Versioned for FbTensor {
    const NAME: &'static str = "fb_tensor";
    const REQUIRED: usize = std::mem::offset_of!(FbTensor, align);
}

/// What the ranks of a group share, and how. All ranks pass the same, but for `rank`. An optional field that is 0 gets
/// the default that its comment names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbWeightsConfig {
    /// sizeof(fb_weights_config).
    pub size: usize,
    /// The tensors of all layers. Those of one layer lie in its window in the order of the array.
    pub tensors: *const FbTensor,
    /// Globs of names in UTF-8, in which `*` stands for any characters, also dots. Each tensor that one of them matches
    /// is shared; each has to match a tensor, and no two the same. Without patterns nothing is shared.
    pub patterns: *const *const c_char,
    /// The number of tensors.
    pub tensor_count: u32,
    /// The number of patterns.
    pub pattern_count: u32,
    /// Layers of the model, draft layers and layers without tensors included, at most 4096.
    pub layers: u32,
    /// This rank in its group, below `ranks`.
    pub rank: u32,
    /// Ranks of the group, at most 4096: those of one host that hold the same bytes. With tensor parallelism these are
    /// the data-parallel ranks of one tensor-parallel rank.
    pub ranks: u32,
    /// Optional: where pulled bytes come from, FB_WEIGHTS_FROM_PEERS or FB_WEIGHTS_FROM_HOST. Default:
    /// FB_WEIGHTS_FROM_PEERS.
    pub source: u32,
    /// Optional: which group of the host this is. Groups have different bytes: with tensor parallelism the
    /// tensor-parallel rank. Default: 0.
    pub group: u64,
    /// Optional: the most bytes that the chosen tensors may take on a rank's device, buffers included. The fewest
    /// layers are sharded that satisfy it. Default: all layers are sharded.
    pub budget: u64,
    /// Optional: the most bytes of one copy of a pull. Default: 2 MiB.
    pub copy_bytes: u64,
    /// Optional: what becomes of an odd number of layers, an FB_ODD_ constant. Default: FB_ODD_CHEAPEST.
    pub odd: u32,
    /// Optional: the last layers, which run once for each draft pass. Default: 0.
    pub draft_layers: u32,
    /// Optional: the most micro-batches of a step. Default: 1.
    pub micro_batches: u32,
    /// Optional: parts of a pull. The first begins with the pull, a further one at each later fb_weights_enter,
    /// fb_weights_leave and fb_weights_advance. Default: 1.
    pub parts: u32,
    /// Optional: how a captured step ends, FB_WRAP_JOINED or FB_WRAP_BEHIND. Default: FB_WRAP_JOINED.
    pub wrap: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional: when a layer is left, the first bytes of the next layer's window that are brought into the device's
    /// L2, behind their arrival, on a stream of its own. With `prefetch_rate`. Default: nothing is.
    pub prefetch_bytes: u64,
    /// Optional: their rate in bytes per second: what other work leaves of the memory's rate. With `prefetch_bytes`.
    pub prefetch_rate: u64,
}

// SAFETY: words and pointers, which are words; six of 4 bytes between those of 8, and six before the last two.
unsafe impl Plain for FbWeightsConfig {}
impl Versioned for FbWeightsConfig {
    const NAME: &'static str = "fb_weights_config";
    const REQUIRED: usize = std::mem::offset_of!(FbWeightsConfig, source);
}

/// What a plan takes for its rank, in bytes and in whole granules, and what it decides.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbWeightsFootprint {
    /// sizeof(fb_weights_footprint), set by the caller.
    pub size: usize,
    /// Layers that stay resident, whole.
    pub resident: u64,
    /// The rank's own parts of sharded layers.
    pub shards: u64,
    /// The buffers. One that there is not has 0.
    pub buffers: [u64; 3],
    /// All of these: what the device holds.
    pub device: u64,
    /// Pinned host memory, with FB_WEIGHTS_FROM_HOST.
    pub host: u64,
    /// The chosen tensors themselves, which a rank would hold without sharding; not rounded.
    pub whole: u64,
    /// `whole` without `device`: what sharding saves. It is negative where rounding or a small model costs more.
    pub saved: i64,
    /// What the rank pulls in one step.
    pub pulled: u64,
    /// A granule: the device maps memory in multiples of it.
    pub granule: u64,
    /// Layers with chosen tensors, resident ones included.
    pub layers: u32,
    /// Layers that are sharded.
    pub sharded_layers: u32,
    /// How the last layer of a step and the first one of the next are kept apart: an FB_CLOSING_ constant.
    pub closing: u32,
    /// For FB_CLOSING_RESIDENT: the layer that stays resident for it. Otherwise 0.
    pub resident_layer: u32,
}

// SAFETY: words; four of 4 bytes at the end.
unsafe impl Plain for FbWeightsFootprint {}
impl Versioned for FbWeightsFootprint {
    const NAME: &'static str = "fb_weights_footprint";
    const REQUIRED: usize = std::mem::offset_of!(FbWeightsFootprint, resident_layer) + 4;
}

/// A layer of shared weights.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbLayerWeights {
    /// sizeof(fb_layer_weights), set by the caller.
    pub size: usize,
    /// Its window: all its chosen tensors. It may only be read.
    pub address: *mut c_void,
    /// Bytes of the window, in whole granules.
    pub bytes: u64,
    /// Bytes that a pull of the layer moves; 0 for one that the plan keeps resident.
    pub pulled: u64,
    /// The number of copies that a pull has.
    pub copies: u32,
    /// The version of its weights: 0 until an update of it was committed.
    pub version: u32,
    /// 1 if the plan shards it.
    pub is_sharded: u32,
    /// 1 if it is whole without a pull: by the plan, or because it was made resident.
    pub is_resident: u32,
    /// The buffer that it is pulled into, from 0. For a layer that the plan keeps resident 0.
    pub buffer: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: words and a pointer, which is one; six of 4 bytes at the end.
unsafe impl Plain for FbLayerWeights {}
impl Versioned for FbLayerWeights {
    const NAME: &'static str = "fb_layer_weights";
    const REQUIRED: usize = std::mem::offset_of!(FbLayerWeights, buffer) + 4;
}

/// One rank's weights, of which other ranks hold parts.
#[derive(Debug)]
pub struct FbWeights {
    pub(crate) ring: Ring<Windows>,
    /// The names of its tensors, in order, for C to read. The device has them too: another thread may destroy the
    /// weights while C still reads.
    pub(crate) names: Arc<[CString]>,
    /// After the ring: it ends before the device counts it out.
    pub(crate) tenant: Tenant,
}

impl Object for FbWeights {
    const KIND: u8 = 4;
    const NAME: &'static str = "fb_weights";

    fn give_up(&self) {
        self.tenant.leave();
    }
}

fn refuse(place: &'static str, value: u64, why: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "weights").at(place).with("value", value).hint(why)
}

/// The names of a plan's tensors as C reads them, in order, each once.
fn names(windows: &Windows) -> Arc<[CString]> {
    let tensors = windows.plan().layers().iter().flat_map(|layer| layer.layout.tensors());
    // They came from C, so no zero is inside.
    let mut names: Vec<CString> =
        tensors.filter_map(|tensor| CString::new(tensor.name.as_str()).ok()).collect();
    names.sort_unstable();
    names.dedup();
    names.into()
}

/// An engine's memory that holds `bytes` bytes of weights.
///
/// # Safety
/// `from` is null, or names `bytes` bytes that the device may read until every operation that uses the slice has ended.
pub(crate) unsafe fn source(device: &dyn Device, from: *const c_void, bytes: u64) -> Result<Slice> {
    if from.is_null() {
        return Err(cast::null("from"));
    }
    // SAFETY: the caller's contract.
    Ok(unsafe { device.import(from.expose_provenance() as u64, bytes) })
}

impl FbWeightsConfig {
    fn check(&self) -> Result<()> {
        if self.reserved != 0 {
            return Err(refuse("reserved", self.reserved.into(), "leave it 0"));
        }
        if self.layers as usize > LAYERS_MAX {
            return Err(refuse("layers", self.layers.into(), "pass at most 4096"));
        }
        if self.draft_layers > self.layers {
            return Err(refuse("draft_layers", self.draft_layers.into(), "pass at most `layers`"));
        }
        for (place, value) in [("micro_batches", self.micro_batches), ("parts", self.parts)] {
            if value > EACH_MAX {
                return Err(refuse(place, value.into(), "pass at most 1024"));
            }
        }
        Ok(())
    }

    /// The tensors, by layer.
    ///
    /// # Safety
    /// As `fb_weights_plan`.
    unsafe fn tensors(&self) -> Result<Vec<Vec<Tensor>>> {
        let mut layers = vec![Vec::new(); self.layers as usize];
        // SAFETY: this function's contract.
        let given = unsafe { cast::versioned_list(self.tensors, self.tensor_count as usize) };
        for tensor in given {
            let FbTensor { name, bytes, align, layer, .. } = tensor?;
            // SAFETY: this function's contract.
            let name = unsafe { cast::text(name, "name") }?.to_owned();
            let Some(own) = layers.get_mut(layer as usize) else {
                return Err(Error::new(Kind::OutOfRange, "weights")
                    .at("the layer of a tensor")
                    .with("layer", layer)
                    .with("layers", self.layers));
            };
            own.push(Tensor { name, bytes, align: if align == 0 { 256 } else { align.into() } });
        }
        Ok(layers)
    }

    fn sharding(&self, patterns: Patterns, grain: u64) -> Result<Sharding> {
        let source = match self.source {
            FB_WEIGHTS_FROM_PEERS => Source::Peers,
            FB_WEIGHTS_FROM_HOST => Source::Host,
            other => return Err(refuse("source", other.into(), "pass an FB_WEIGHTS_FROM_ constant")),
        };
        let odd = match self.odd {
            FB_ODD_CHEAPEST => Odd::Cheapest,
            FB_ODD_THIRD_BUFFER => Odd::ThirdBuffer,
            FB_ODD_RESIDENT_FIRST => Odd::ResidentFirst,
            FB_ODD_RESIDENT_LAST => Odd::ResidentLast,
            other => return Err(refuse("odd", other.into(), "pass an FB_ODD_ constant")),
        };
        let budget = Some(self.budget).filter(|bytes| *bytes != 0);
        Ok(Sharding { patterns, budget, odd, source, grain })
    }

    pub(crate) fn options(&self) -> Result<RingOptions> {
        let wrap = match self.wrap {
            FB_WRAP_JOINED => Wrap::Joined,
            FB_WRAP_BEHIND => Wrap::Behind,
            other => return Err(refuse("wrap", other.into(), "pass an FB_WRAP_ constant")),
        };
        let prefetch = match (self.prefetch_bytes, self.prefetch_rate) {
            (0, 0) => None,
            (0, rate) => return Err(refuse("prefetch_rate", rate, "pass `prefetch_bytes` too")),
            (bytes, 0) => return Err(refuse("prefetch_bytes", bytes, "pass `prefetch_rate` too")),
            (bytes, rate) => Some(Prefetch { bytes, rate }),
        };
        Ok(RingOptions {
            draft_layers: self.draft_layers as usize,
            micro_batches: self.micro_batches.max(1) as usize,
            parts: self.parts.max(1) as usize,
            wrap,
            prefetch,
        })
    }

    /// The plan, and what the ring is made for.
    ///
    /// # Safety
    /// As `fb_weights_plan`.
    unsafe fn plan(&self, grain: u64) -> Result<(Plan, RingOptions)> {
        self.check()?;
        let options = self.options()?;
        let mut patterns = Vec::new();
        // SAFETY: this function's contract, for all of them.
        let layers = unsafe {
            for pattern in cast::slice(self.patterns, self.pattern_count as usize, "patterns")? {
                patterns.push(cast::text(*pattern, "pattern")?);
            }
            self.tensors()
        }?;
        let sharding = self.sharding(Patterns::new(&patterns)?, grain)?;
        let group = Group { id: self.group, rank: self.rank, ranks: self.ranks };
        Ok((Plan::new(&layers, group, &sharding)?, options))
    }

    /// # Safety
    /// As `fb_weights_plan`.
    unsafe fn create(&self, device: &FbDevice) -> Result<FbWeights> {
        let tenant = device.tenant();
        // SAFETY: this function's contract.
        let (plan, options) = unsafe { self.plan(tenant.device.granularity()) }?;
        let pulls = match self.copy_bytes {
            0 => Pulls::default(),
            copy => Pulls { copy },
        };
        let faults: Arc<dyn Faults> = Arc::new(NoFaults);
        let windows = Windows::new(&tenant.device, plan, pulls, &faults)?;
        let names = names(&windows);
        let ring = Ring::new(&tenant.device, windows, options)?;
        device.keep(Arc::clone(&names));
        Ok(FbWeights { ring, names, tenant })
    }
}

impl FbWeightsFootprint {
    fn of(plan: &Plan) -> FbWeightsFootprint {
        let bytes = plan.bytes();
        let mut buffers = [0; 3];
        buffers.iter_mut().zip(&bytes.buffers).for_each(|(to, bytes)| *to = *bytes);
        let sharded = plan.layers().iter().filter(|layer| layer.place != Place::Resident);
        let (closing, resident_layer) = match plan.closing() {
            Closing::Even => (FB_CLOSING_EVEN, 0),
            Closing::ThirdBuffer => (FB_CLOSING_THIRD_BUFFER, 0),
            // A plan has at most 4096 layers.
            Closing::Resident(layer) => (FB_CLOSING_RESIDENT, layer as u32),
        };
        FbWeightsFootprint {
            size: size_of::<FbWeightsFootprint>(),
            resident: bytes.resident,
            shards: bytes.shards,
            buffers,
            device: bytes.device(),
            host: bytes.host,
            whole: plan.whole(),
            saved: bytes.saved(plan.whole()),
            pulled: sharded.map(|layer| plan.pulled(layer)).sum(),
            granule: plan.grain(),
            layers: plan.layers().len() as u32,
            sharded_layers: plan.sharded() as u32,
            closing,
            resident_layer,
        }
    }
}

impl FbWeights {
    /// The ring of weights whose parts are shared.
    pub(crate) fn serving(&mut self) -> Result<&mut Ring<Windows>> {
        if self.ring.pulls().is_shared() {
            return Ok(&mut self.ring);
        }
        Err(Error::new(Kind::InvalidState, "weights")
            .at("parts that were not shared")
            .hint("fill every tensor, then call fb_links_meet and fb_weights_share"))
    }

    fn layer(&self, layer: u32) -> Result<FbLayerWeights> {
        let (windows, at) = (self.ring.pulls(), layer as usize);
        let window = windows.layer(at)?;
        let plan = windows.plan();
        let found = plan.layers().iter().find(|one| one.layer == at);
        let (pulled, buffer) = match found.map(|one| (one.place, plan.pulled(one))) {
            Some((Place::Buffer(buffer), pulled)) => (pulled, Some(buffer)),
            _ => (0, None),
        };
        Ok(FbLayerWeights {
            size: size_of::<FbLayerWeights>(),
            address: cast::address(&window),
            bytes: window.bytes(),
            pulled,
            copies: windows.copies(at)? as u32,
            version: windows.version(at)?,
            is_sharded: buffer.is_some().into(),
            is_resident: windows.is_resident(at)?.into(),
            buffer: buffer.unwrap_or(0).into(),
            reserved: 0,
        })
    }
}

/// Computes what the weights of this configuration take on `device` for their rank, and takes nothing. The call refuses
/// every configuration that fb_weights_create refuses before it asks for memory. On failure, `text` receives the
/// reason. FB_OUT_OF_MEMORY with the least bytes for a budget that no number of sharded layers satisfies.
/// FB_OUT_OF_RANGE for a rank outside its group, and for a tensor of a layer that the model does not have.
///
/// # Safety
/// Both structs state their real sizes. `tensors` has `tensor_count` entries, which state their real size, and
/// `patterns` has `pattern_count`; names and patterns end with a zero. `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_plan(
    device: *const FbDevice,
    config: *const FbWeightsConfig,
    text: *mut c_char,
    text_bytes: usize,
    footprint: *mut FbWeightsFootprint,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (config, footprint) = (cast::versioned(config)?, cast::versioned_out(footprint)?);
            let grain = handle::with(device, |device| Ok(device.tenant().device.granularity()))?;
            let (plan, _) = FbWeightsConfig::plan(&config, grain)?;
            footprint.set(&FbWeightsFootprint::of(&plan));
            Ok(())
        })
    }
}

/// Makes one rank's weights on a device: takes their memory and their addresses, which belong to the device until
/// fb_device_destroy. A creation that fails because the device lacks memory leaves it as it was; one that fails because
/// it lacks streams or events keeps the memory until then. Then fill every tensor (fb_weights_fill), meet the other
/// ranks (fb_links_meet) and share (fb_weights_share). On failure, `text` receives the reason. Errors for the
/// configuration are those of fb_weights_plan.
///
/// # Safety
/// As fb_weights_plan; `weights` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_create(
    device: *const FbDevice,
    config: *const FbWeightsConfig,
    text: *mut c_char,
    text_bytes: usize,
    weights: *mut *mut FbWeights,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (config, weights) = (cast::versioned(config)?, cast::out(weights, "weights")?);
            let make = |device: &FbDevice| FbWeightsConfig::create(&config, device);
            weights.set(handle::give(|| handle::with(device, make))?);
            Ok(())
        })
    }
}

/// Ends weights. Pulls that were enqueued still run. All addresses stay valid, and their memory stays taken, until
/// fb_device_destroy; to replace weights, make another device. Other ranks that pull from this one keep its memory
/// mapped for as long as they need it.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_destroy(weights: *mut FbWeights) -> FbStatus {
    handle::end(weights, |_| Ok(()))
}

/// Enqueues on `stream` the copy of this rank's part of a tensor from `from`, which holds the whole tensor as the
/// engine uses it. Every tensor that the patterns chose has to be filled. The tensor counts as filled when its copy is
/// enqueued. fb_links_meet waits for one stream alone: fill on that one, or order it behind the others
/// (fb_stream_order). A GPU copies from registered host memory in words of 4 bytes, so a tensor that does not begin
/// and end on words comes from device memory. FB_OUT_OF_RANGE for a layer or tensor that was not chosen, for another
/// length than the planned one, and for memory that the device does not reach. FB_INVALID_STATE once the parts were
/// shared: fb_update_create is for a new version. FB_BUSY for a stream that is being captured.
///
/// # Safety
/// `name` ends with a zero. `from` has `bytes` bytes that the device reaches and that nothing changes until the copy
/// has run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_fill(
    weights: *mut FbWeights,
    layer: u32,
    name: *const c_char,
    from: *const c_void,
    bytes: u64,
    stream: *mut c_void,
) -> FbStatus {
    change(weights, |weights| {
        // SAFETY: this call's contract, for both.
        let (name, from) =
            unsafe { (cast::text(name, "name")?, source(&*weights.tenant.device, from, bytes)?) };
        weights.ring.filling()?.fill(layer as usize, name, from, cast::stream(stream))
    })
}

/// Reads the parts of one layer that the other ranks gave, and compares them with what these ranks said that they
/// filled. Steps go on meanwhile. Blocks for as long as reading takes and serves no session, so call fb_links_poll
/// between two layers. FB_CORRUPT names rank and layer. FB_INVALID_STATE for a layer whose parts are missing.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_verify(
    weights: *mut FbWeights,
    layer: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(weights, |weights| weights.ring.verify_layer(layer as usize, cast::stream(stream)))
}

/// Describes a layer: its window, and how it is kept. The window may only be read. It shows the layer from the
/// fb_weights_enter of a step to the fb_weights_leave, and always while the layer is resident. Its address never
/// changes and stays valid until fb_device_destroy, so kernels and captured graphs may hold it. FB_OUT_OF_RANGE for a
/// layer of which nothing was chosen. FB_INVALID_STATE while a tensor is not filled or the part of another rank is
/// missing.
///
/// # Safety
/// `described` states its real size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_layer(
    weights: *const FbWeights,
    layer: u32,
    described: *mut FbLayerWeights,
) -> FbStatus {
    read(weights, |weights| {
        // SAFETY: this call's contract.
        let described = unsafe { cast::versioned_out(described) }?;
        described.set(&weights.layer(layer)?);
        Ok(())
    })
}

/// Returns the address and length of one tensor in its layer's window. What fb_weights_layer says of windows is true of
/// it. FB_OUT_OF_RANGE for a tensor that was not chosen; other errors are those of fb_weights_layer.
///
/// # Safety
/// `name` ends with a zero; `address` and `bytes` have room for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_tensor(
    weights: *const FbWeights,
    layer: u32,
    name: *const c_char,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    read(weights, |weights| {
        // SAFETY: this call's contract, for all of them.
        let (name, address, bytes) = unsafe {
            (cast::text(name, "name")?, cast::out(address, "address")?, cast::out(bytes, "bytes")?)
        };
        let found = weights.ring.pulls().tensor(layer as usize, name)?;
        address.set(cast::address(&found));
        bytes.set(found.bytes());
        Ok(())
    })
}

/// Returns the bytes of device memory that the weights take at present: the plan's, those of layers that were made
/// resident, and those of this rank's replicas.
///
/// # Safety
/// `bytes` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_bytes(weights: *const FbWeights, bytes: *mut u64) -> FbStatus {
    read(weights, |weights| {
        // SAFETY: this call's contract.
        unsafe { cast::out(bytes, "bytes") }?.set(weights.ring.pulls().device_bytes());
        Ok(())
    })
}

/// Makes a sharded layer resident, between steps: it gets memory of its own, which is mapped at its addresses. Steps
/// find it whole without a pull; graphs pull it all the same. `stream` is ordered after all steps that used the layer.
/// Blocks until the work on `stream` has run. Nothing happens to a layer that is resident. It reads the memory of a
/// rank that was lost, too: the way to go on without that rank. FB_BUSY while a step is open or `stream` is being
/// captured. FB_OUT_OF_MEMORY if the device has no memory for it; the layer is sharded as before then.
///
/// # Safety
/// No work that is enqueued or runs uses the layer's window, except on `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_make_resident(
    weights: *mut FbWeights,
    layer: u32,
    stream: *mut c_void,
) -> FbStatus {
    change(weights, |weights| weights.serving()?.make_resident(layer as usize, cast::stream(stream)))
}

/// Makes a layer that was made resident sharded again, between steps, when all steps that used it have run, and gives
/// its memory back. Blocks. Nothing happens to other layers. FB_BUSY while a step is open. FB_PEER_LOST for a layer
/// that would need a rank that was lost.
///
/// # Safety
/// No work that is enqueued or runs uses the layer's window.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_make_sharded(weights: *mut FbWeights, layer: u32) -> FbStatus {
    change(weights, |weights| weights.serving()?.make_sharded(layer as usize))
}

/// Makes layers sharded until the weights take at most `most` bytes of device memory, between steps, when all steps
/// that used them have run. `bytes`, which may be NULL, receives what they take then. Blocks. FB_OUT_OF_MEMORY with the
/// least bytes if the plan takes more, and nothing changes. FB_BUSY while a step is open. Errors of a layer are those
/// of fb_weights_make_sharded; layers before it stay sharded then.
///
/// # Safety
/// No work that is enqueued or runs uses a window. `bytes` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_shrink(weights: *mut FbWeights, most: u64, bytes: *mut u64) -> FbStatus {
    change(weights, |weights| {
        // SAFETY: this call's contract.
        let bytes = unsafe { cast::out_or_none(bytes, "bytes") }?;
        let taken = weights.serving()?.shrink(most)?;
        if let Some(bytes) = bytes {
            bytes.set(taken);
        }
        Ok(())
    })
}

/// Makes layers resident, in one order, as long as the weights take at most `most` bytes of device memory; a layer that
/// does not fit is left out. Between steps; `stream` is ordered after all steps that used the layers. `bytes`, which
/// may be NULL, receives what they take then. Blocks. FB_BUSY while a step is open. Errors of a layer are those of
/// fb_weights_make_resident; layers before it stay resident then.
///
/// # Safety
/// No work that is enqueued or runs uses a window, except on `stream`. `bytes` is NULL or has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_weights_grow(
    weights: *mut FbWeights,
    most: u64,
    stream: *mut c_void,
    bytes: *mut u64,
) -> FbStatus {
    change(weights, |weights| {
        // SAFETY: this call's contract.
        let bytes = unsafe { cast::out_or_none(bytes, "bytes") }?;
        let taken = weights.serving()?.grow(most, cast::stream(stream))?;
        if let Some(bytes) = bytes {
            bytes.set(taken);
        }
        Ok(())
    })
}
