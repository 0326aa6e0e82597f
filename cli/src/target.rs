//! The devices that replay.

use std::sync::Arc;

use forebay::Result;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};

/// Where the pools of a replay live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// This machine's memory and processors.
    Host,
}

impl Target {
    /// A device of one replay's own.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        match self {
            Target::Host => Ok(HostDevice::new(HostOptions::default())),
        }
    }
}
