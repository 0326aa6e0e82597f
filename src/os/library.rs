//! A shared library loaded while the program runs, and its symbols.
//!
//! The driver's library is not linked: a machine without a device runs the same program. Both ways to
//! lack something are values: a missing library and a missing symbol (an older driver), told apart by
//! [`Library::MISSING_LIBRARY`] and [`Library::MISSING_SYMBOL`] at the beginning of the error's place.

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

use super::{Call, Faults, ask, errno_text};
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// A loaded library; its symbols are valid while it lives, and for ever once it has been told to stay.
#[derive(Debug)]
pub struct Library {
    handle: NonNull<c_void>,
    name: String,
}

// SAFETY: a handle is a name for the loader, which locks itself; any thread may use or close it.
unsafe impl Send for Library {}
// SAFETY: as above; dlsym may be called by many threads.
unsafe impl Sync for Library {}

impl Library {
    /// How the place of an error begins when a library could not be loaded.
    pub const MISSING_LIBRARY: &'static str = "missing library ";
    /// How the place of an error begins when a library has no such symbol.
    pub const MISSING_SYMBOL: &'static str = "missing symbol ";

    /// Loads the library of this path (with a slash) or soname (without one, looked up by the loader).
    /// All its own references are resolved now, not at their first use.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] with the loader's words, [`Kind::InvalidConfig`] for a name with a zero byte.
    ///
    /// # Safety
    /// The library's initialisers run in this process, and its finalisers when it is dropped. The caller
    /// knows the library to be one whose code may.
    pub unsafe fn open(name: &str, faults: &dyn Faults) -> Result<Library> {
        const OPERATION: &str = "load library";
        let c_name = c_string(OPERATION, name)?;
        let missing = |why: String| {
            Error::new(Kind::OsRefused, OPERATION)
                .at(format!("{}{}: {}", Self::MISSING_LIBRARY, echo(name), echo(why)))
                .hint("install it, or name its path")
        };
        ask(faults, Call::OpenLibrary, "dlopen").map_err(|refusal| missing(errno_text(refusal.errno)))?;
        // SAFETY: a C string; what the library runs is the caller's promise.
        let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Library { handle, name: name.to_owned() }),
            None => Err(missing(loader_text())),
        }
    }

    /// The address of `symbol`, to be cast to the type that the library's header gives it; valid while
    /// this library lives.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] when the library has none, [`Kind::InvalidConfig`] for a zero byte in it.
    pub fn symbol(&self, symbol: &str, faults: &dyn Faults) -> Result<NonNull<c_void>> {
        const OPERATION: &str = "find symbol";
        let c_name = c_string(OPERATION, symbol)?;
        let missing = |why: String| {
            Error::new(Kind::OsRefused, OPERATION)
                .at(format!("{}{symbol} in {}: {why}", Self::MISSING_SYMBOL, self.name))
                .hint("install a newer release of that library")
        };
        ask(faults, Call::FindSymbol, "dlsym").map_err(|refusal| missing(errno_text(refusal.errno)))?;
        // SAFETY: the handle is open while this library lives, and the name is a C string.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), c_name.as_ptr()) };
        NonNull::new(address).ok_or_else(|| missing(loader_text()))
    }
}

impl Library {
    /// Never unloads it: what has started threads, or left handlers with the process, would come back to code that
    /// is gone.
    pub fn stay(mut self) {
        // The handle stays open; the name is the caller's to have no more.
        drop(std::mem::take(&mut self.name));
        std::mem::forget(self);
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle was opened once and is closed once.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

fn c_string(operation: &'static str, name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| Error::new(Kind::InvalidConfig, operation).at("name with a zero byte"))
}

/// The loader's words for this thread's last failure.
fn loader_text() -> String {
    // SAFETY: the text, if there is one, belongs to this thread until its next call of the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "no reason given".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Inject, NoFaults};
    use super::*;

    fn open(name: &str, faults: &dyn Faults) -> Result<Library> {
        // SAFETY: the tests load the mathematics library of the system, or nothing.
        unsafe { Library::open(name, faults) }
    }

    #[test]
    fn a_function_is_found_and_called() {
        let library = open("libm.so.6", &NoFaults).unwrap();
        let address = library.symbol("cos", &NoFaults).unwrap();
        // SAFETY: `double cos(double)` by the system's header; the library lives.
        let cos = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(f64) -> f64>(address.as_ptr()) };
        assert_eq!(cos(0.0), 1.0);
    }

    #[test]
    fn what_is_missing_is_named() {
        let place = |e: Error| (e.kind(), e.place().to_owned());
        let (kind, text) = place(open("libforebay-none.so.9", &NoFaults).unwrap_err());
        assert!(text.starts_with("missing library libforebay-none.so.9: "), "{text}");
        assert_eq!(kind, Kind::OsRefused);
        let (_, text) = place(open("/nonexistent/libm.so.6", &NoFaults).unwrap_err());
        assert!(text.contains("No such file"), "{text}");
        let library = open("libm.so.6", &NoFaults).unwrap();
        let (kind, text) = place(library.symbol("forebay_none", &NoFaults).unwrap_err());
        assert!(text.starts_with("missing symbol forebay_none in libm.so.6: "), "{text}");
        assert_eq!(kind, Kind::OsRefused);
        assert_eq!(library.symbol("c\0s", &NoFaults).unwrap_err().kind(), Kind::InvalidConfig);
        assert_eq!(open("a\0b", &NoFaults).unwrap_err().kind(), Kind::InvalidConfig);
    }

    #[test]
    fn a_refused_call_is_a_missing_thing() {
        let e = open("libm.so.6", &Inject::call(Call::OpenLibrary, libc::EACCES)).unwrap_err();
        assert_eq!(e.place(), "missing library libm.so.6: Permission denied");
        let library = open("libm.so.6", &NoFaults).unwrap();
        let e = library.symbol("cos", &Inject::call(Call::FindSymbol, libc::ENOENT)).unwrap_err();
        assert_eq!(e.place(), "missing symbol cos in libm.so.6: No such file or directory");
    }
}
