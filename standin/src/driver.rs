//! What a test's device is on: a stand-in of the test's own, or the driver that was named for all tests.

use crate::{Calls, Given, Hold, Options, Resources, Standin};

/// A driver. One that was given counts nothing and tells nothing of what it holds: what is asked of it is 0, always.
#[derive(Debug)]
pub enum Driver {
    /// A stand-in of the test's own.
    Own(Box<Standin>),
    /// The one that `FOREBAY_TEST_DRIVER` names.
    Given(&'static Given),
}

/// A stream that is held until this is dropped.
#[derive(Debug)]
pub enum Held<'a> {
    /// By a stand-in.
    Own(&'a Standin, u64),
    /// On the device.
    Given(Hold),
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Held::Own(standin, stream) = self {
            standin.let_go(*stream);
        }
    }
}

impl Driver {
    /// The driver that was named, or a stand-in of these options; none where that could not be built.
    ///
    /// # Errors
    /// The driver that was named does not start: what was refused.
    pub fn new(options: Options) -> Result<Option<Driver>, String> {
        Ok(match Given::named()? {
            Some(given) => Some(Driver::Given(given)),
            None => Standin::new(options).map(|own| Driver::Own(Box::new(own))),
        })
    }

    /// The test's own.
    pub fn own(&self) -> Option<&Standin> {
        if let Driver::Own(standin) = self { Some(standin) } else { None }
    }

    /// The library's path or name.
    pub fn library(&self) -> &str {
        match self {
            Driver::Own(standin) => standin.library(),
            Driver::Given(given) => given.library(),
        }
    }

    /// The driver's API, for tests that play the engine.
    pub fn api(&self) -> &Calls {
        match self {
            Driver::Own(standin) => standin.api(),
            Driver::Given(given) => given.api(),
        }
    }

    /// Nothing that is enqueued on the stream from now on runs, until the answer is dropped. On a stand-in nothing of
    /// it at all.
    ///
    /// # Errors
    /// What was refused, in words.
    pub fn hold(&self, stream: u64) -> Result<Held<'_>, String> {
        match self {
            Driver::Own(standin) => {
                standin.hold(stream);
                Ok(Held::Own(standin, stream))
            }
            Driver::Given(given) => given.hold(stream).map(Held::Given),
        }
    }

    /// Memory as it is now; on a driver that was given, behind a copy. False where that is refused.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        match self {
            Driver::Own(standin) => standin.read(address, bytes),
            Driver::Given(given) => given.copy(bytes.as_mut_ptr() as u64, address, bytes.len()),
        }
    }

    /// Changes memory, as [`Driver::read`] reads it.
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        match self {
            Driver::Own(standin) => standin.write(address, bytes),
            Driver::Given(given) => given.copy(address, bytes.as_ptr() as u64, bytes.len()),
        }
    }

    /// See [`Standin::calls`].
    pub fn calls(&self) -> u64 {
        self.own().map_or(0, Standin::calls)
    }

    /// See [`Standin::synchronizations`].
    pub fn synchronizations(&self) -> u64 {
        self.own().map_or(0, Standin::synchronizations)
    }

    /// See [`Standin::held_resources`].
    pub fn held_resources(&self) -> Resources {
        self.own().map_or_else(Resources::default, Standin::held_resources)
    }
}
