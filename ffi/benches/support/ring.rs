//! The calls of a step that sharded weights need, on both sides: begin, enter and leave of each layer, and end. The
//! rank is alone, so a pull has no copies and only the calls are timed.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use forebay::Result;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::os::{Faults, NoFaults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Patterns, Plan, Pulls, Ring, RingOptions, Sharding, Tensor, Windows};

use super::clock::Lap;
use super::{DeviceConfig, Handle, function, refused};

const LAYERS: u32 = 64;
const BYTES: usize = 4096;
const NAME: &CStr = c"o_proj";
/// Steps of a pass.
const STEPS: u32 = 64;
/// Calls of a pass.
pub const CALLS: u64 = (STEPS * (2 * LAYERS + 2)) as u64;

pub struct InRust {
    ring: Ring,
    stream: Stream,
}

impl InRust {
    pub fn new() -> Result<InRust> {
        let host: Arc<dyn Device> = HostDevice::new(HostOptions::default());
        let faults: Arc<dyn Faults> = Arc::new(NoFaults);
        let name = NAME.to_string_lossy();
        let tensor = Tensor { name: name.clone().into_owned(), bytes: BYTES as u64, align: 256 };
        let sharding = Sharding { grain: host.granularity(), ..Sharding::new(Patterns::new(&[&name])?) };
        let layers = vec![vec![tensor]; LAYERS as usize];
        let plan = Plan::new(&layers, Group { id: 0, rank: 0, ranks: 1 }, &sharding)?;
        let mut windows = Windows::new(&host, plan, Pulls::default(), &faults)?;
        let (stream, from) = (host.stream()?, host.allocate(BYTES as u64)?);
        (0..LAYERS as usize).try_for_each(|layer| windows.fill(layer, &name, from, stream))?;
        let hello = windows.hello([0; 32], stream)?;
        let mut links = Links::over(Vec::new(), hello, Limits::default(), faults)?;
        windows.share(&mut links, stream, Duration::ZERO)?;
        Ok(InRust { ring: Ring::new(&host, windows, RingOptions::default())?, stream })
    }

    pub fn pass(&mut self) -> Result<Duration> {
        let lap = Lap::begin();
        for _ in 0..STEPS {
            self.ring.begin(1, 0)?;
            for layer in 0..LAYERS as usize {
                self.ring.enter(layer, 0, self.stream)?;
                self.ring.leave(layer, 0, self.stream)?;
            }
            self.ring.end(self.stream)?;
        }
        Ok(lap.end())
    }
}

/// `fb_tensor`.
#[repr(C)]
struct TensorInC {
    size: usize,
    name: *const c_char,
    bytes: u64,
    layer: u32,
    align: u32,
}

/// `fb_weights_config` up to `source`.
#[repr(C)]
struct WeightsConfig {
    size: usize,
    tensors: *const TensorInC,
    patterns: *const *const c_char,
    /// tensors, patterns, layers, rank, ranks, source.
    words: [u32; 6],
}

/// The required fields of `fb_links_config`.
#[repr(C)]
struct LinksConfig {
    size: usize,
    folder: *const c_char,
}

type Layer = unsafe extern "C" fn(Handle, u32, u32, *mut c_void) -> u32;
type Create = unsafe extern "C" fn(Handle, *const WeightsConfig, *mut c_char, usize, *mut Handle) -> u32;
type Fill = unsafe extern "C" fn(Handle, u32, *const c_char, *const c_void, u64, *mut c_void) -> u32;
type Meet = unsafe extern "C" fn(Handle, *const LinksConfig, *mut c_void, *mut Handle) -> u32;
type Share = unsafe extern "C" fn(Handle, Handle, *mut c_void, u32) -> u32;
type Made = unsafe extern "C" fn(*const DeviceConfig, *mut c_char, usize, *mut Handle) -> u32;

pub struct ThroughC {
    begin: unsafe extern "C" fn(Handle, u32, u32) -> u32,
    enter: Layer,
    leave: Layer,
    end: unsafe extern "C" fn(Handle, *mut c_void) -> u32,
    weights: Handle,
}

impl ThroughC {
    /// Its objects live as long as the process.
    pub fn new(library: *mut c_void, folder: &CStr) -> Result<ThroughC> {
        let (mut device, mut weights, mut links) = (null_mut(), null_mut(), null_mut());
        let tensor = |layer| TensorInC {
            size: size_of::<TensorInC>(),
            name: NAME.as_ptr(),
            bytes: BYTES as u64,
            layer,
            align: 0,
        };
        let tensors: Vec<TensorInC> = (0..LAYERS).map(tensor).collect();
        let (patterns, from) = ([NAME.as_ptr()], vec![0_u8; BYTES]);
        let config = WeightsConfig {
            size: size_of::<WeightsConfig>(),
            tensors: tensors.as_ptr(),
            patterns: patterns.as_ptr(),
            words: [LAYERS, 1, LAYERS, 0, 1, 0],
        };
        let (none, at) = (null_mut(), DeviceConfig { size: size_of::<DeviceConfig>(), kind: [0; 2] });
        let meeting = LinksConfig { size: size_of::<LinksConfig>(), folder: folder.as_ptr() };
        // SAFETY: an open library whose functions are of these types; everything is valid and as long as stated.
        unsafe {
            let made: Made = function(library, c"fb_device_create")?;
            let create: Create = function(library, c"fb_weights_create")?;
            let fill: Fill = function(library, c"fb_weights_fill")?;
            let meet: Meet = function(library, c"fb_links_meet")?;
            let share: Share = function(library, c"fb_weights_share")?;
            refused("device", made(&at, null_mut(), 0, &mut device))?;
            refused("weights", create(device, &config, null_mut(), 0, &mut weights))?;
            for layer in 0..LAYERS {
                let from = from.as_ptr().cast();
                refused("fill", fill(weights, layer, NAME.as_ptr(), from, BYTES as u64, none))?;
            }
            refused("meet", meet(weights, &meeting, none, &mut links))?;
            refused("share", share(weights, links, none, 0))?;
            Ok(ThroughC {
                begin: function(library, c"fb_weights_begin")?,
                enter: function(library, c"fb_weights_enter")?,
                leave: function(library, c"fb_weights_leave")?,
                end: function(library, c"fb_weights_end")?,
                weights,
            })
        }
    }

    pub fn pass(&mut self) -> Result<Duration> {
        let lap = Lap::begin();
        // SAFETY: the weights of this side, whose stream runs inside its calls.
        unsafe {
            for _ in 0..STEPS {
                refused("begin", (self.begin)(self.weights, 1, 0))?;
                for layer in 0..LAYERS {
                    refused("enter", (self.enter)(self.weights, layer, 0, null_mut()))?;
                    refused("leave", (self.leave)(self.weights, layer, 0, null_mut()))?;
                }
                refused("end", (self.end)(self.weights, null_mut()))?;
            }
        }
        Ok(lap.end())
    }
}
