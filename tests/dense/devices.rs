//! The devices that a world runs on.

use std::sync::Arc;

use crate::device::TestDevice;
use forebay::device::Device;
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;

/// The device that runs a world.
#[derive(Clone, Copy, Debug)]
pub enum On {
    /// The device that tests run on, in order.
    Inline,
    /// The same with a thread for each stream.
    Threads,
    /// A clock over it, which delays and reorders by this seed everything that no edge orders.
    Clock(u64),
}

/// The device with the memory, the clock over it, if there is one, and the device that the cache gets.
pub type Devices = (Arc<TestDevice>, Option<Arc<ClockDevice>>, Arc<dyn Device>);

impl On {
    /// Makes the devices.
    pub fn devices(self) -> Devices {
        let threaded = matches!(self, On::Threads);
        let test = TestDevice::new(HostOptions { threaded, ..HostOptions::default() });
        match self {
            On::Clock(seed) => over(test, ClockOptions { seed: Some(seed), ..ClockOptions::default() }),
            On::Inline | On::Threads => {
                let device = test.device();
                (test, None, device)
            }
        }
    }
}

/// A clock over a device.
pub fn over(test: Arc<TestDevice>, options: ClockOptions) -> Devices {
    let clock = ClockDevice::over(test.device(), options).unwrap();
    (test, Some(Arc::clone(&clock)), clock)
}
