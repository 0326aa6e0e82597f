//! Host memory that is registered with the driver: pinned, and reached by the device at the host's address.
//!
//! **Once a process.** A driver refuses to register memory twice, whichever device asks, and all devices reach what
//! one of them registered. So devices of a process that register the same mapping share one registration: the first
//! makes it, each has its own view of it, and the last to go removes it. Memory that an engine or another library
//! registered is still an error, and so is a mapping that overlaps a registered one without being equal to it.
//!
//! **Contexts.** A driver may remove a registration with the context in which it was made. So that context is
//! retained until the last user has gone, and devices may be dropped in any order. The last one removes the
//! registration in that context.
//!
//! **In chunks**, because drivers refuse very large registrations. A chunk ends on a page border. Devices that share
//! a registration share its chunks. The driver takes a chunk for one allocation, so no driver copy may cross the end
//! of a chunk; [`pieces`] divides copies. Kernels may cross it, because the addresses continue. A copy looks only at
//! a [`Stretch`] of each registration, so that it does not wait for a thread that is registering memory.
//!
//! **Waiting.** Registering takes about a second for 10 GB. A second device that wants the same memory waits for the
//! first; one that wants other memory does not.

use super::driver::{Context, Current, Handle, Refusal, code, flag};
use crate::error::{Error, Kind, Result};
use crate::os::Map;
use crate::sync::{Arc, Mutex};

const OPERATION: &str = "register host memory";

/// Whether the device sees host memory where the host does: every address here may then be used by both.
pub(super) fn same_address(current: &Current<'_>, address: Handle) -> Result<()> {
    let mut seen = 0;
    current.host_device_address(&mut seen, address, 0).map_err(|refusal| refusal.error(OPERATION))?;
    match seen == address {
        true => Ok(()),
        false => Err(Error::new(Kind::DeviceFailed, OPERATION)
            .at("the device sees the memory at another address")
            .with("host", address)
            .with("device", seen)
            .hint("use a device with unified addresses")),
    }
}

/// The addresses of registered host memory, and the bytes of its chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub start: Handle,
    pub bytes: u64,
    chunk: u64,
}

impl Stretch {
    /// The stretch of a mapping, divided into chunks of at most `chunk` bytes: whole pages, at least one.
    pub fn of(map: &Map, chunk: u64) -> Stretch {
        let page = map.page_bytes();
        let chunk = (chunk / page).max(1) * page;
        Stretch { start: map.as_ptr() as Handle, bytes: map.len(), chunk }
    }

    /// The bytes left of the chunk that contains `address`; `None` if it is outside.
    fn left(&self, address: Handle) -> Option<u64> {
        let at = address.checked_sub(self.start).filter(|at| *at < self.bytes)?;
        Some((self.chunk - at % self.chunk).min(self.bytes - at))
    }

    /// Each chunk's address and bytes.
    pub fn chunks(self) -> impl Iterator<Item = (Handle, u64)> {
        let count = self.bytes.div_ceil(self.chunk);
        (0..count).map(move |number| {
            let at = number * self.chunk;
            (self.start + at, self.chunk.min(self.bytes - at))
        })
    }
}

/// Chunks that are registered, until they are dropped.
#[derive(Debug)]
struct Chunks {
    /// The context in which they were registered and will be removed.
    context: Arc<Context>,
    stretch: Stretch,
    /// The number of registered chunks.
    count: usize,
    _map: Arc<Map>,
}

impl Chunks {
    /// Registers all of `map` in the current context, which is `context`, or nothing of it.
    fn register(
        current: &Current<'_>,
        context: &Arc<Context>,
        map: &Arc<Map>,
        stretch: Stretch,
    ) -> Result<Chunks> {
        let failed = |refusal: Refusal| {
            let already = refusal.code == code::ALREADY_REGISTERED;
            let error = refusal.error(OPERATION).with("chunk", stretch.chunk);
            error.hint(match already {
                true => "register memory once, by one owner",
                false => "lower the registration chunk, or raise the limit of locked memory (ulimit -l)",
            })
        };
        let (context, map) = (Arc::clone(context), Arc::clone(map));
        let mut taken = Chunks { context, stretch, count: 0, _map: map };
        for (address, bytes) in stretch.chunks() {
            current.host_register(address, bytes, flag::HOST_PORTABLE_MAPPED).map_err(failed)?;
            taken.count += 1;
        }
        Ok(taken)
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        for (address, _) in self.stretch.chunks().take(self.count) {
            self.context.give_back(|driver| driver.host_unregister(address));
        }
    }
}

/// A mapping that devices of this process have registered.
#[derive(Debug)]
struct Shared {
    /// The driver's library, first byte and length.
    of: (usize, Handle, u64),
    users: Mutex<Users>,
}

#[derive(Debug, Default)]
struct Users {
    count: u32,
    /// The chunks, while any device uses them.
    chunks: Option<Chunks>,
}

/// All registrations. An entry that only this list holds is obsolete.
static ALL: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

impl Shared {
    /// The entry of a mapping, shared by all callers that ask for it at the same time.
    fn find(of: (usize, Handle, u64)) -> Arc<Shared> {
        let mut all = ALL.lock();
        all.retain(|shared| Arc::strong_count(shared) > 1);
        if let Some(shared) = all.iter().find(|shared| shared.of == of) {
            return Arc::clone(shared);
        }
        let shared = Arc::new(Shared { of, users: Mutex::new(Users::default()) });
        all.push(Arc::clone(&shared));
        shared
    }
}

/// A device's use of registered host memory.
#[derive(Debug)]
pub(super) struct Registration {
    shared: Arc<Shared>,
    pub stretch: Stretch,
}

impl Registration {
    /// Registers `map` in chunks of at most `chunk` bytes, unless another device of this process has.
    pub fn new(context: &Arc<Context>, map: &Arc<Map>, chunk: u64) -> Result<Registration> {
        let stretch = Stretch::of(map, chunk);
        let shared = Shared::find((context.library(), stretch.start, stretch.bytes));
        let current = context.relaxed().map_err(|refusal| refusal.error(OPERATION))?;
        let mut users = shared.users.lock();
        let chunks = match users.chunks.take() {
            Some(chunks) => chunks,
            None => Chunks::register(&current, context, map, stretch)?,
        };
        let stretch = chunks.stretch;
        let seen = stretch.chunks().try_for_each(|(address, _)| same_address(&current, address));
        // A registration without users is removed here.
        if seen.is_ok() || users.count > 0 {
            users.chunks = Some(chunks);
        }
        seen?;
        users.count += 1;
        drop(users);
        Ok(Registration { shared, stretch })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut users = self.shared.users.lock();
        users.count -= 1;
        if users.count == 0 {
            users.chunks = None;
        }
    }
}

/// The bytes left of the registered chunk that contains `address`; `None` if there is none.
pub(super) fn left(registered: &[Stretch], address: Handle) -> Option<u64> {
    registered.iter().find_map(|stretch| stretch.left(address))
}

/// Divides a copy where a registered chunk ends, and says whether both ends are registered host memory.
pub(super) fn pieces<E>(
    registered: &[Stretch],
    from: Handle,
    to: Handle,
    bytes: u64,
    mut copy: impl FnMut(u64, u64, bool) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = 0;
    while at < bytes {
        let ends = [left(registered, from + at), left(registered, to + at)];
        let count = ends.iter().flatten().fold(bytes - at, |count, left| count.min(*left));
        copy(at, count, ends.iter().all(Option::is_some))?;
        at += count;
    }
    Ok(())
}
