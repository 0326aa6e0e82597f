//! Opens the device that a command names: this machine's memory and processors, or a GPU.

use std::sync::Arc;

use clap::ValueEnum;
use forebay::device::Device;
#[cfg(feature = "cuda")]
use forebay::device::cuda::{CudaDevice, CudaOptions, HostMemory};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::measure::Probe;
use forebay::{Error, Kind, Result};

/// A device name on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceName {
    /// This machine's memory and processors.
    #[default]
    Host,
    /// The GPU with this number in the driver's order.
    Cuda(u32),
}

impl DeviceName {
    /// `host`, or `cuda:N`.
    pub fn parse(text: &str) -> std::result::Result<DeviceName, String> {
        let number = |digits: &str| digits.parse().ok().filter(|_| !digits.starts_with('+'));
        match (text, text.strip_prefix("cuda:").and_then(number)) {
            ("host", _) => Ok(DeviceName::Host),
            (_, Some(number)) => Ok(DeviceName::Cuda(number)),
            _ => Err("neither host nor cuda:N with a GPU's number, such as cuda:0".to_owned()),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceName::Host => f.write_str("host"),
            DeviceName::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// The device of a replay's pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The device.
    pub name: DeviceName,
    /// The driver's library; none for the system's.
    pub driver: Option<String>,
}

/// How a device is opened for measurement.
#[derive(Clone, Copy, Debug)]
pub struct ProbeOptions {
    /// The operation that errors name.
    pub operation: &'static str,
    /// Host: a thread for each stream; otherwise streams are inline.
    pub threaded: bool,
    /// Thread blocks of a GPU's gather; none for the device's default.
    pub gather_blocks: Option<u32>,
    /// Threads of a GPU's block; none for the device's default.
    pub threads: Option<u32>,
    /// GPU: gathers by bulk copies.
    pub bulk: bool,
    /// GPU: launches kernels before the preceding ones have ended.
    pub programmatic: bool,
    /// The piece of a page from which on a GPU's copy engine copies it, in bytes; none for the device's default.
    pub copy_engine_bytes: Option<u64>,
    /// GPU: one driver call enqueues several copies of a copy engine.
    pub batch_copies: bool,
    /// The owner of the pinned memory that holds the rows of a GPU's caches.
    pub pinned: Pinned,
}

/// The owner of the pinned memory that holds the rows of a GPU's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pinned {
    /// The system's, registered with the driver.
    Registered,
    /// The driver's own, in pages of 2 MiB.
    Driver,
}

impl ProbeOptions {
    /// The defaults, for `operation`.
    pub fn of(operation: &'static str) -> ProbeOptions {
        ProbeOptions {
            operation,
            threaded: false,
            gather_blocks: None,
            threads: None,
            bulk: false,
            programmatic: false,
            copy_engine_bytes: None,
            batch_copies: true,
            pinned: Pinned::Registered,
        }
    }

    /// The first given option that only a GPU supports.
    fn of_a_gpu(&self) -> Option<&'static str> {
        let options = [
            ("--gather-blocks", self.gather_blocks.is_some()),
            ("--threads", self.threads.is_some()),
            ("--bulk", self.bulk),
            ("--programmatic", self.programmatic),
            ("--pinned", self.pinned == Pinned::Driver),
        ];
        options.into_iter().find_map(|(name, set)| set.then_some(name))
    }
}

impl Target {
    /// Opens a device for one replay, which releases what the replay took when it is dropped.
    ///
    /// # Errors
    /// The reason why the device cannot be opened.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        match self.name {
            DeviceName::Host if self.driver.is_some() => {
                let error = Error::new(Kind::InvalidConfig, "replay").at("--driver without a GPU");
                Err(error.hint("pass --device cuda:N with it"))
            }
            DeviceName::Host => Ok(HostDevice::new(HostOptions::default())),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(device) => {
                let options = CudaOptions { device, library: self.driver.clone(), ..CudaOptions::default() };
                Ok(CudaDevice::new(options)?)
            }
            #[cfg(not(feature = "cuda"))]
            DeviceName::Cuda(_) => Err(Error::new(Kind::Unsupported, "replay")
                .at("--device names a GPU, and this build has no CUDA device")
                .hint("build with the feature cuda, or replay on the host")),
        }
    }

    /// Opens a device for measurement, which releases what was taken when it is dropped.
    ///
    /// # Errors
    /// The reason why the device cannot be opened; [`Kind::InvalidConfig`] for options that it does not support.
    pub fn probe(&self, options: ProbeOptions) -> Result<Arc<dyn Probe>> {
        let only_gpu = |option: &str| {
            let error = Error::new(Kind::InvalidConfig, options.operation);
            Err(error.at(format!("{option} without a GPU")).hint("pass --device cuda:N with it"))
        };
        match self.name {
            DeviceName::Host if self.driver.is_some() => only_gpu("--driver"),
            DeviceName::Host => match options.of_a_gpu() {
                Some(option) => only_gpu(option),
                None => {
                    let host = HostOptions { threaded: options.threaded, ..HostOptions::default() };
                    Ok(HostDevice::new(host))
                }
            },
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(device) => {
                let own = CudaOptions::default();
                Ok(CudaDevice::new(CudaOptions {
                    device,
                    library: self.driver.clone(),
                    gather_blocks: options.gather_blocks.unwrap_or(own.gather_blocks),
                    threads: options.threads.unwrap_or(own.threads),
                    bulk: options.bulk,
                    programmatic: options.programmatic,
                    copy_engine_bytes: options.copy_engine_bytes.unwrap_or(own.copy_engine_bytes),
                    batch_copies: options.batch_copies,
                    host_memory: match options.pinned {
                        Pinned::Registered => HostMemory::Registered,
                        Pinned::Driver => HostMemory::Driver,
                    },
                    ..own
                })?)
            }
            #[cfg(not(feature = "cuda"))]
            DeviceName::Cuda(_) => {
                let error = Error::new(Kind::Unsupported, options.operation);
                Err(error
                    .at("--device names a GPU, and this build has no CUDA device")
                    .hint("build with the feature cuda, or use the host"))
            }
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
