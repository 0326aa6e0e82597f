//! The handle table of the process, in which every call looks up its handle.
//!
//! A handle is a token that looks like a pointer and contains kind, generation and place ([`crate::word`]). The library
//! never follows it. So each of these mistakes gives a status and touches nothing of the object: a null, a second
//! destroy, a use after the end, a handle of another kind, two threads in an exclusive call, a callback that calls
//! back, and a parent's handle in a forked child.
//!
//! **Readers.** An exclusive call retries for a moment while readers are inside, so a thread that scrapes statistics
//! does not make the decode thread's calls fail. An exclusive call that meets another exclusive call is refused at
//! once, and so is a reader that meets one.
//!
//! **Costs.** Entering exclusively is a compare-and-swap and leaving is a store; entering to read and leaving are a
//! compare-and-swap each. Objects are in boxes, and the table has their addresses: 64 bytes a place, so that two
//! handles share no cache line. The number of places is fixed; when they run out, the call fails. Making and ending a
//! handle take no lock either.
//!
//! **Forks.** The whole table is in memory that a fork wipes in the child. There every handle of the parent has ended,
//! whatever the parent's threads were doing. The child does not free the objects, which are copies; pools of rows are
//! shared memory and must not be written from the child. The generations of a process begin at a random number, so a
//! child's new handles differ from the parent's old ones.
//!
//! **Failures.** Every call runs inside the panic boundary (`panic`). A panic in a call that may change an object
//! breaks the object: it returns [`Kind::Internal`] from then on, and its destruction leaks it, on purpose, because
//! its state may be inconsistent. A call that changes several objects breaks all of them. An object keeps the text of
//! the last failed call that was admitted; a call that its handle refused leaves no text.

use std::any::TypeId;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay::os::{NoFaults, random};
use forebay::{Error, Kind, Result};

use crate::panic::{caught, panicked};
use crate::status::{FbStatus, Text};
use crate::word::{self, Refused};

/// An object that C may hold by a handle.
pub(crate) trait Object: Send + Sync + 'static {
    /// The number of the type, not 0: device 1, cache 2, ticket 3, weights 4, links 5, update 6, replication 7, dense
    /// cache 8, names of a dense cache 9, chooser 10, captured 11, trace 12, requests 13, selections 14, sender 15,
    /// receiver 16. Tests use numbers from 200 on.
    const KIND: u8;
    /// The type's C name, for error texts.
    const NAME: &'static str;

    /// Called for a broken object, which is not freed: settles what other objects would wait for in vain.
    fn give_up(&self) {}
}

/// The most handles at a time.
const PLACES: usize = 1 << 16;

/// The part that every object has.
struct Common {
    /// The object's type. It shows if two types claim one kind.
    type_id: TypeId,
    /// Whether a call that may change it panicked.
    broken: AtomicBool,
    text: Mutex<Text>,
}

/// An object in its box. The common part comes first, so a pointer to the whole is a pointer to it.
#[repr(C)]
struct Held<T> {
    common: Common,
    object: UnsafeCell<T>,
}

/// A place of the table, in a cache line of its own. All zero is a place that was never used.
#[repr(C, align(64))]
struct Place {
    word: AtomicU64,
    object: AtomicPtr<Common>,
    /// The next free place + 1, while it is free.
    next: AtomicU32,
}

/// The table. All zero is an empty one.
#[repr(C)]
struct Table {
    /// The list of places that became free again.
    free: AtomicU64,
    /// The number of places that were ever used.
    used: AtomicU32,
    /// The generation at which places begin; 0 until it is drawn.
    base: AtomicU64,
    places: [Place; PLACES],
}

static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());

impl Table {
    /// The table, if a handle was ever made.
    fn get() -> Option<&'static Table> {
        let table = TABLE.load(Ordering::Acquire);
        // SAFETY: null, or what `make` mapped, which stays mapped for the life of the process and of its children.
        unsafe { table.as_ref() }
    }

    fn make() -> Result<&'static Table> {
        if let Some(table) = Table::get() {
            return Ok(table);
        }
        let mine = map(size_of::<Table>())?.cast::<Table>();
        let first = TABLE.compare_exchange(null_mut(), mine.as_ptr(), Ordering::AcqRel, Ordering::Acquire);
        if first.is_err() {
            // SAFETY: mapped above with this size, and no one else has seen it.
            unsafe { libc::munmap(mine.as_ptr().cast(), size_of::<Table>()) };
        }
        Table::get().ok_or_else(|| Error::new(Kind::Internal, "handles"))
    }

    /// The generation at which places begin.
    fn base(&self) -> Result<u64> {
        let base = self.base.load(Ordering::Relaxed);
        if base != 0 {
            return Ok(base);
        }
        let mut drawn = [0; 8];
        random(&mut drawn, &NoFaults)?;
        let drawn = u64::from_ne_bytes(drawn) | 1;
        let first = self.base.compare_exchange(0, drawn, Ordering::Relaxed, Ordering::Relaxed);
        Ok(first.err().unwrap_or(drawn))
    }

    /// A free place, taken off the list.
    fn take(&self) -> Result<u32> {
        if let Some(place) = word::pop(&self.free, |place| &self.places[place as usize].next) {
            return Ok(place);
        }
        let more = |used| (used < PLACES as u32).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| {
            Error::new(Kind::Exhausted, "create")
                .at("handles")
                .with("most", PLACES as u64)
                .hint("destroy handles that you no longer need")
        })
    }
}

/// Zeroed memory that a fork wipes in the child.
fn map(bytes: usize) -> Result<NonNull<c_void>> {
    let refused = |call: &str| {
        let said = std::io::Error::last_os_error();
        Error::new(Kind::OsRefused, "handles").at(format!("{call}: {said}")).with("bytes", bytes as u64)
    };
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping at an address of the system's choice.
    let mapped = unsafe { libc::mmap(null_mut(), bytes, protection, flags, -1, 0) };
    let Some(start) = NonNull::new(mapped).filter(|_| mapped != libc::MAP_FAILED) else {
        return Err(refused("mmap"));
    };
    // SAFETY: the mapping made above, whole.
    if unsafe { libc::madvise(mapped, bytes, libc::MADV_WIPEONFORK) } == 0 {
        return Ok(start);
    }
    let error = refused("madvise(MADV_WIPEONFORK)");
    // SAFETY: the mapping made above, which nothing has seen.
    unsafe { libc::munmap(mapped, bytes) };
    Err(error)
}

/// A call inside an object. Dropping it leaves, also after a panic.
struct Inside {
    place: &'static Place,
    /// In the object's box. In a child that was forked inside the call the place no longer names it.
    common: NonNull<Common>,
    index: u32,
    name: u64,
    alone: bool,
}

impl Drop for Inside {
    fn drop(&mut self) {
        match self.alone {
            true => word::unalone(&self.place.word, self.name),
            false => word::unread(&self.place.word, self.name),
        }
    }
}

/// Why a handle refused a call. It is small, because every call returns it.
#[derive(Clone, Copy, Debug)]
struct Shut {
    kind: Kind,
    why: &'static str,
}

impl Shut {
    const NULL: Shut = Shut { kind: Kind::InvalidConfig, why: "pass a handle that is not null" };
    const OTHER: Shut = Shut { kind: Kind::InvalidConfig, why: "pass a handle of this kind" };
    const ENDED: Shut =
        Shut { kind: Kind::Closed, why: "it was destroyed, never created, or created before a fork" };
    const IN_USE: Shut = Shut {
        kind: Kind::Busy,
        why: "another call is inside the object; only calls through const pointers run together",
    };
    const BROKEN: Shut = Shut { kind: Kind::Internal, why: "an earlier call panicked: destroy the object" };
    const TWINS: Shut = Shut { kind: Kind::Internal, why: "two types claim one kind" };

    fn error(self, name: &'static str) -> Error {
        Error::new(self.kind, "handle").at(name).hint(self.why)
    }

    fn status(self) -> FbStatus {
        self.kind.into()
    }
}

impl From<Refused> for Shut {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Ended => Shut::ENDED,
            Refused::InUse => Shut::IN_USE,
        }
    }
}

/// How often an exclusive call retries while readers are inside. Readers are short, so a thread that reads statistics
/// delays the decode thread instead of making it fail. All retries take under a millisecond, so a read that lasts, or
/// that the caller itself is in, ends in a refusal.
const LOOKS: u32 = 1024;
/// The number of retries after which the call yields to other threads.
const SPINS: u32 = 64;

/// Enters exclusively, after readers that leave soon.
fn alone(word: &AtomicU64, name: u64) -> Result<(), Refused> {
    for look in 0..LOOKS {
        match word::alone(word, name) {
            Err(Refused::InUse) if word::is_shared(word) && look < SPINS => std::hint::spin_loop(),
            Err(Refused::InUse) if word::is_shared(word) => std::thread::yield_now(),
            entered => return entered,
        }
    }
    Err(Refused::InUse)
}

impl Inside {
    fn enter(handle: u64, alone: bool) -> Result<Inside, Shut> {
        // A free place has a name too, with kind 0.
        let table = Table::get().filter(|_| word::kind(handle) != 0).ok_or(Shut::ENDED)?;
        let index = (handle & word::USE) as u32;
        let (place, name) = (&table.places[index as usize], handle & !word::USE);
        match alone {
            true => self::alone(&place.word, name),
            false => word::read(&place.word, name),
        }?;
        // An occupied place has an object.
        let common = NonNull::new(place.object.load(Ordering::Relaxed)).ok_or(Shut::ENDED)?;
        Ok(Inside { place, common, index, name, alone })
    }

    fn common(&self) -> &Common {
        // SAFETY: the place was occupied when the call came in, so the address is that of a box, which is live as
        // long as the call is inside, and whose beginning is a `Common`, which is only shared. A child that was
        // forked inside has a copy of it, which nothing frees.
        unsafe { self.common.as_ref() }
    }

    /// Whether the place still has the name. It does not in a child that was forked inside the call.
    fn is_named(&self) -> bool {
        self.place.word.load(Ordering::Relaxed) & !word::USE == self.name
    }

    /// Keeps the text of a failed call.
    #[cold]
    fn keep(&self, error: &Error) -> FbStatus {
        self.common().text.lock().unwrap_or_else(PoisonError::into_inner).set(error);
        error.kind().into()
    }

    /// Runs a call inside the panic boundary; returns nothing if it panicked. The result is a status, because errors
    /// are large. In a child that was forked inside the call the handle has ended, whatever the call returned.
    fn run(&self, call: impl FnOnce() -> Result<()>) -> Option<FbStatus> {
        let ended = caught(|| match call() {
            _ if !self.is_named() => FbStatus::FbClosed,
            Ok(()) => FbStatus::FbOk,
            Err(error) => self.keep(&error),
        });
        if ended.is_none() {
            self.keep(&panicked());
        }
        ended
    }
}

/// A call inside an object whose type was checked.
struct Typed<T> {
    inside: Inside,
    held: NonNull<Held<T>>,
}

impl<T: Object> Typed<T> {
    fn enter(handle: *const T, alone: bool) -> Result<Typed<T>, Shut> {
        let handle = handle.addr() as u64;
        if word::kind(handle) != T::KIND {
            return Err(if handle == 0 { Shut::NULL } else { Shut::OTHER });
        }
        let inside = Inside::enter(handle, alone)?;
        match inside.common().type_id == TypeId::of::<T>() {
            true => Ok(Typed { held: inside.common.cast(), inside }),
            false => Err(Shut::TWINS),
        }
    }

    /// As [`Typed::enter`], and refuses a broken object.
    fn enter_sound(handle: *const T, alone: bool) -> Result<Typed<T>, Shut> {
        let typed = Typed::enter(handle, alone)?;
        if typed.is_broken() { Err(Shut::BROKEN) } else { Ok(typed) }
    }

    fn is_broken(&self) -> bool {
        self.inside.common().broken.load(Ordering::Relaxed)
    }

    fn object(&self) -> &T {
        // SAFETY: the box is live while a call is inside, its type was compared, and a changing call is exclusive.
        unsafe { &*self.held.as_ref().object.get() }
    }

    /// Runs `call` on the object of an exclusive call. A panic breaks the object.
    fn change(&mut self, call: impl FnOnce(&mut T) -> Result<()>) -> FbStatus {
        // SAFETY: as above, and this call is exclusive: `Typed` was entered so, and is borrowed mutably here.
        let object = unsafe { &mut *self.held.as_ref().object.get() };
        self.inside.run(|| call(object)).unwrap_or_else(|| {
            self.inside.common().broken.store(true, Ordering::Relaxed);
            FbStatus::FbInternal
        })
    }

    /// The same inside another object's call, which a panic reaches too.
    fn change_inside<R>(&mut self, call: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        /// Breaks the object when a panic drops it.
        struct Breaks<'a>(&'a Inside);
        impl Drop for Breaks<'_> {
            fn drop(&mut self) {
                self.0.common().broken.store(true, Ordering::Relaxed);
                self.0.keep(&panicked());
            }
        }
        // SAFETY: as in `change`.
        let object = unsafe { &mut *self.held.as_ref().object.get() };
        let breaks = Breaks(&self.inside);
        let result = call(object);
        std::mem::forget(breaks);
        result
    }
}

/// A place that is taken before its object is made, so that making the handle cannot fail any more. If it is dropped
/// unfilled, the place is free again.
pub(crate) struct Reserved {
    table: &'static Table,
    index: u32,
    base: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        word::push(&self.table.free, &self.table.places[self.index as usize].next, self.index);
    }
}

/// Takes a place.
///
/// # Errors
/// [`Kind::Exhausted`] when the table is full; [`Kind::OsRefused`] when the system gives no memory for the table.
pub(crate) fn reserve() -> Result<Reserved> {
    let table = Table::make()?;
    Ok(Reserved { base: table.base()?, index: table.take()?, table })
}

impl Reserved {
    /// Gives an object to C.
    pub(crate) fn fill<T: Object>(self, object: T) -> *mut T {
        const { assert!(T::KIND != 0) };
        let (type_id, broken, text) = (TypeId::of::<T>(), AtomicBool::new(false), Mutex::new(Text::new()));
        let common = Common { type_id, broken, text };
        let held = Box::into_raw(Box::new(Held { common, object: UnsafeCell::new(object) }));
        let place = &self.table.places[self.index as usize];
        place.object.store(held.cast(), Ordering::Relaxed);
        let name = word::occupy(&place.word, T::KIND, self.base);
        let handle = without_provenance_mut((name | u64::from(self.index)) as usize);
        std::mem::forget(self);
        handle
    }
}

/// Makes an object and gives it to C. Its place is taken first, so that anything `make` leaves behind, such as a file,
/// always has its handle.
///
/// # Errors
/// Those of [`reserve`] and of `make`.
pub(crate) fn give<T: Object>(make: impl FnOnce() -> Result<T>) -> Result<*mut T> {
    let place = reserve()?;
    Ok(place.fill(make()?))
}

/// A number that differs between this process and its forked children: the generation drawn for the table, 0 before the
/// first handle. It is compared before and after a callback, which may return in a child.
pub(crate) fn process() -> u64 {
    Table::get().map_or(0, |table| table.base.load(Ordering::Relaxed))
}

/// Runs a call that may run at the same time as other reading calls.
pub(crate) fn read<T: Object>(handle: *const T, call: impl FnOnce(&T) -> Result<()>) -> FbStatus {
    match Typed::enter_sound(handle, false) {
        Ok(typed) => typed.inside.run(|| call(typed.object())).unwrap_or(FbStatus::FbInternal),
        Err(shut) => shut.status(),
    }
}

/// As [`read`], for a second handle inside a call: a refusal becomes that call's error.
pub(crate) fn with<T: Object, R>(handle: *const T, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
    let typed = Typed::enter_sound(handle, false).map_err(|shut| shut.error(T::NAME))?;
    call(typed.object())
}

/// As [`with`], with exclusive access to the second object. A panic breaks it, and the call's own object too.
pub(crate) fn with_changed<T: Object, R>(
    handle: *mut T,
    call: impl FnOnce(&mut T) -> Result<R>,
) -> Result<R> {
    let mut typed = Typed::enter_sound(handle, true).map_err(|shut| shut.error(T::NAME))?;
    typed.change_inside(call)
}

/// Runs a call with exclusive access to the object.
pub(crate) fn change<T: Object>(handle: *mut T, call: impl FnOnce(&mut T) -> Result<()>) -> FbStatus {
    match Typed::enter_sound(handle, true) {
        Ok(mut typed) => typed.change(call),
        Err(shut) => shut.status(),
    }
}

/// Ends an object, unless `check` refuses: then the handle stays valid. A broken object is neither checked nor freed.
pub(crate) fn end<T: Object>(handle: *mut T, check: impl FnOnce(&mut T) -> Result<()>) -> FbStatus {
    let mut typed = match Typed::enter(handle, true) {
        Ok(typed) => typed,
        Err(shut) => return shut.status(),
    };
    if !typed.is_broken() {
        let checked = typed.change(check);
        if checked != FbStatus::FbOk && !typed.is_broken() {
            return checked;
        }
    }
    let (broken, held) = (typed.is_broken(), typed.held);
    if broken {
        typed.object().give_up();
    }
    let (place, index) = (typed.inside.place, typed.inside.index);
    let table = Table::get().filter(|_| word::vacate(&place.word, typed.inside.name));
    // Only a fork inside `check` removes the name during an exclusive call.
    let Some(table) = table else { return Shut::ENDED.status() };
    drop(typed);
    word::push(&table.free, &place.next, index);
    if broken {
        return FbStatus::FbOk;
    }
    // SAFETY: `give` made it from a box, and no handle leads to it any more.
    let object = unsafe { Box::from_raw(held.as_ptr()) };
    caught(|| drop(object)).map_or(FbStatus::FbInternal, |()| FbStatus::FbOk)
}

/// Passes `show` the text of the last call that failed on the object of a handle of any kind.
pub(crate) fn text(handle: *const c_void, show: impl FnOnce(&[u8])) -> FbStatus {
    let handle = handle.addr() as u64;
    if handle == 0 {
        return Shut::NULL.status();
    }
    match Inside::enter(handle, false) {
        Ok(inside) => {
            show(inside.common().text.lock().unwrap_or_else(PoisonError::into_inner).with_end());
            FbStatus::FbOk
        }
        Err(shut) => shut.status(),
    }
}

#[cfg(test)]
#[path = "handle_tests.rs"]
pub(crate) mod tests;
