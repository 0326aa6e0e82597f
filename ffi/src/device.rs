//! The device: what caches, streams and buffers stand on.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned};
use crate::handle::{self, Object};
use crate::status::FbStatus;

/// Host memory; each operation runs in the call that enqueues it.
pub const FB_DEVICE_HOST: u32 = 0;

/// How a device is made. What is optional and 0 gets its default.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbDeviceConfig {
    /// sizeof(fb_device_config).
    pub size: usize,
    /// FB_DEVICE_HOST.
    pub kind: u32,
    /// Optional: the device's number.
    pub number: u32,
}

// SAFETY: words, two of 4 bytes behind one of 8.
unsafe impl Plain for FbDeviceConfig {}
impl Versioned for FbDeviceConfig {
    const NAME: &'static str = "fb_device_config";
    const REQUIRED: usize = std::mem::offset_of!(FbDeviceConfig, number);
}

/// A device.
#[derive(Debug)]
pub struct FbDevice {
    device: Arc<dyn Device>,
    /// Caches that stand on it.
    caches: Arc<AtomicU32>,
}

impl Object for FbDevice {
    const KIND: u8 = 1;
    const NAME: &'static str = "fb_device";
}

/// A cache's place on its device: the device cannot be destroyed before it.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) device: Arc<dyn Device>,
    caches: Arc<AtomicU32>,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        self.caches.fetch_sub(1, Ordering::Release);
    }
}

impl FbDevice {
    fn create(config: &FbDeviceConfig) -> Result<FbDevice> {
        if config.kind != FB_DEVICE_HOST {
            return Err(Error::new(Kind::InvalidConfig, "create")
                .at("kind")
                .with("value", config.kind)
                .hint("pass an FB_DEVICE_ constant"));
        }
        let device = HostDevice::new(HostOptions::default());
        // The host device's first stream is number 0: NULL.
        device.stream()?;
        Ok(FbDevice { device, caches: Arc::new(AtomicU32::new(0)) })
    }

    pub(crate) fn tenant(&self) -> Tenant {
        self.caches.fetch_add(1, Ordering::Relaxed);
        Tenant { device: Arc::clone(&self.device), caches: Arc::clone(&self.caches) }
    }

    fn check_ended(&mut self) -> Result<()> {
        match self.caches.load(Ordering::Acquire) {
            0 => Ok(()),
            caches => Err(Error::new(Kind::Busy, "destroy")
                .at("caches are left")
                .with("caches", caches)
                .hint("destroy the caches first")),
        }
    }
}

/// Makes a device. When that fails, the reason is written to `text`, cut to `text_bytes` bytes with its ending zero;
/// `text` may be NULL.
///
/// # Safety
/// `config` states its size truly; `text` has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_device_create(
    config: *const FbDeviceConfig,
    text: *mut c_char,
    text_bytes: usize,
    device: *mut *mut FbDevice,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        cast::create(text, text_bytes, || {
            let (config, device) = (cast::versioned(config)?, cast::out(device, "device")?);
            device.set(handle::give(FbDevice::create(&config)?)?);
            Ok(())
        })
    }
}

/// Ends a device and frees its memory. FB_BUSY while caches are left.
///
/// # Safety
/// No operation that was enqueued on it is at work in the caller's buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_device_destroy(device: *mut FbDevice) -> FbStatus {
    handle::end(device, FbDevice::check_ended)
}
