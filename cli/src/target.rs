//! The devices that replay: this machine's memory and processors, or a GPU.

use std::sync::Arc;

use forebay::device::Device;
#[cfg(feature = "cuda")]
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::{Error, Kind, Result, Shape};

/// A device as the command line names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// This machine's memory and processors.
    #[default]
    Host,
    /// The GPU of this number, as the driver counts them.
    Cuda(u32),
}

impl DeviceName {
    /// `host`, or `cuda:N`.
    pub fn parse(text: &str) -> std::result::Result<DeviceName, String> {
        let number = |digits: &str| digits.parse().ok().filter(|_| !digits.starts_with('+'));
        match (text, text.strip_prefix("cuda:").and_then(number)) {
            ("host", _) => Ok(DeviceName::Host),
            (_, Some(number)) => Ok(DeviceName::Cuda(number)),
            _ => Err("neither host, nor cuda:N with a GPU's number, as cuda:0".to_owned()),
        }
    }
}

/// Where the pools of a replay live.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The device.
    pub name: DeviceName,
    /// The driver's library; none for the system's.
    pub driver: Option<String>,
}

impl Target {
    /// A device of one replay's own, which gives back what the replay took.
    ///
    /// # Errors
    /// Why there is no such device.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        match self.name {
            DeviceName::Host if self.driver.is_some() => {
                let error = Error::new(Kind::InvalidConfig, "replay").at("--driver, and no GPU");
                Err(error.hint("pass --device cuda:N with it"))
            }
            DeviceName::Host => Ok(HostDevice::new(HostOptions::default())),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(device) => {
                let options = CudaOptions { device, library: self.driver.clone(), ..CudaOptions::default() };
                Ok(CudaDevice::new(options)?)
            }
            #[cfg(not(feature = "cuda"))]
            DeviceName::Cuda(_) => Err(Error::new(Kind::InvalidConfig, "replay")
                .at("--device names a GPU, and this build has no CUDA device")
                .hint("build with the feature cuda, or replay on the host")),
        }
    }

    /// The shape that is replayed for `shape`. A replay moves no rows, and what is resident does not depend on
    /// their size; but what a GPU reads is pinned whole, so there rows are as small as they may be.
    pub fn shape(&self, shape: &Shape) -> Shape {
        match self.name {
            DeviceName::Host => *shape,
            DeviceName::Cuda(_) => Shape { runs: [4, 0], host_stride: 4, device_block_align: 1, ..*shape },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_the_host_or_a_gpus_number() {
        assert_eq!(DeviceName::parse("host"), Ok(DeviceName::Host));
        assert_eq!(DeviceName::parse("cuda:0"), Ok(DeviceName::Cuda(0)));
        assert_eq!(DeviceName::parse("cuda:17"), Ok(DeviceName::Cuda(17)));
        for wrong in
            ["", "cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "cuda:4294967296", "Host", "gpu", "cuda:0 "]
        {
            assert!(DeviceName::parse(wrong).is_err(), "{wrong}");
        }
    }
}
