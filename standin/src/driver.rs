//! The driver of a test's device: a stand-in of the test's own, or the driver that was named for all tests.

use crate::{Calls, Given, Hold, Options, Resources, Standin};

/// A driver. A named driver counts nothing and does not report what it holds: those methods return 0 for it.
#[derive(Debug)]
pub enum Driver {
    /// A stand-in of the test's own.
    Own(Box<Standin>),
    /// The driver that `FOREBAY_TEST_DRIVER` names.
    Given(&'static Given),
}

/// A stream that is held until this is dropped.
#[derive(Debug)]
pub enum Held<'a> {
    /// A stand-in holds it.
    Own(&'a Standin, u64),
    /// A wait on the device holds it.
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
    /// Returns the named driver, or else a stand-in with these options; `None` if that could not be built.
    ///
    /// # Errors
    /// The named driver does not start: the call that it refused.
    pub fn new(options: Options) -> Result<Option<Driver>, String> {
        Ok(match Given::named()? {
            Some(given) => Some(Driver::Given(given)),
            None => Standin::new(options).map(|own| Driver::Own(Box::new(own))),
        })
    }

    /// The test's own stand-in.
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

    /// The driver's API, for tests that act as the engine.
    pub fn api(&self) -> &Calls {
        match self {
            Driver::Own(standin) => standin.api(),
            Driver::Given(given) => given.api(),
        }
    }

    /// Until the result is dropped, nothing runs that is enqueued on the stream from now on. On a stand-in nothing of
    /// the stream runs at all.
    ///
    /// # Errors
    /// The refused call, in words.
    pub fn hold(&self, stream: u64) -> Result<Held<'_>, String> {
        match self {
            Driver::Own(standin) => {
                standin.hold(stream);
                Ok(Held::Own(standin, stream))
            }
            Driver::Given(given) => given.hold(stream).map(Held::Given),
        }
    }

    /// Reads memory: on a stand-in its current bytes, on a named driver by a copy. Returns false if that is refused.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        match self {
            Driver::Own(standin) => standin.read(address, bytes),
            Driver::Given(given) => given.copy(bytes.as_mut_ptr() as u64, address, bytes.len()),
        }
    }

    /// Changes memory, by the same way as [`Driver::read`].
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
