//! A shared library loaded at run time, and its symbols.
//!
//! forebay does not link the driver's library, so the same program runs on a machine without a GPU. A missing library
//! and a missing symbol (an older driver) are errors; [`Library::MISSING_LIBRARY`] and [`Library::MISSING_SYMBOL`] at
//! the beginning of the error's place distinguish them.

use std::error::Error as _;
use std::ffi::c_void;
use std::ptr::NonNull;

use libloading::os::unix::{self as loader, RTLD_LOCAL, RTLD_NOW};

use super::refusal::{ask, errno_text};
use super::{Call, Faults};
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// A loaded library. Its symbols are valid while it lives, and forever after [`Library::stay`].
#[derive(Debug)]
pub struct Library {
    loaded: loader::Library,
    name: String,
}

impl Library {
    /// The beginning of an error's place when a library could not be loaded.
    pub const MISSING_LIBRARY: &'static str = "missing library ";
    /// The beginning of an error's place when a library lacks a symbol.
    pub const MISSING_SYMBOL: &'static str = "missing symbol ";

    /// Loads a library by path (with a slash) or by soname (without one, found by the loader). All its own symbols
    /// are bound now, not at their first use.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] with the loader's text; [`Kind::InvalidConfig`] for a name with a zero byte.
    ///
    /// # Safety
    /// The library's initialisers run in this process, and its finalisers when it is dropped. The caller must know
    /// that this code is safe to run.
    pub unsafe fn open(name: &str, faults: &dyn Faults) -> Result<Library> {
        const OPERATION: &str = "load library";
        whole_name(OPERATION, name)?;
        let missing = |why: String| {
            Error::new(Kind::OsRefused, OPERATION)
                .at(format!("{}{}: {}", Self::MISSING_LIBRARY, echo(name), echo(why)))
                .hint("install it, or name its path")
        };
        ask(faults, Call::OpenLibrary, "dlopen").map_err(|refusal| missing(errno_text(refusal.errno)))?;
        // SAFETY: the caller promises that the library's code is safe to run.
        let loaded = unsafe { loader::Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
        let loaded = loaded.map_err(|error| missing(loader_text(&error)))?;
        Ok(Library { loaded, name: name.to_owned() })
    }

    /// The address of `symbol`, to be cast to the type in the library's header. It is valid while this library lives.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] when the library has none, [`Kind::InvalidConfig`] for a zero byte in it.
    pub fn symbol(&self, symbol: &str, faults: &dyn Faults) -> Result<NonNull<c_void>> {
        const OPERATION: &str = "find symbol";
        whole_name(OPERATION, symbol)?;
        let missing = |why: String| {
            Error::new(Kind::OsRefused, OPERATION)
                .at(format!("{}{symbol} in {}: {why}", Self::MISSING_SYMBOL, self.name))
                .hint("install a newer release of that library")
        };
        ask(faults, Call::FindSymbol, "dlsym").map_err(|refusal| missing(errno_text(refusal.errno)))?;
        // SAFETY: only the address is read; the caller gives it the right type.
        let found = unsafe { self.loaded.get::<*mut c_void>(symbol) };
        let address = found.map_err(|error| missing(loader_text(&error)))?.into_raw();
        NonNull::new(address).ok_or_else(|| missing("no reason given".to_owned()))
    }

    /// Never unloads the library: threads or handlers that it has started would return to unmapped code.
    pub fn stay(self) {
        // The raw handle is forgotten, so the library stays open.
        let _ = self.loaded.into_raw();
    }
}

/// Rejects a name with a zero byte, which the loader would read as a shorter one.
fn whole_name(operation: &'static str, name: &str) -> Result<()> {
    let zero = || Error::new(Kind::InvalidConfig, operation).at("name with a zero byte");
    if name.contains('\0') { Err(zero()) } else { Ok(()) }
}

/// The loader's text, which is the source of libloading's error.
fn loader_text(error: &libloading::Error) -> String {
    error.source().map_or_else(|| "no reason given".to_owned(), ToString::to_string)
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
    fn a_missing_library_or_function_is_named() {
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
    fn a_refused_call_is_an_error_that_names_what_is_missing() {
        let e = open("libm.so.6", &Inject::call(Call::OpenLibrary, libc::EACCES)).unwrap_err();
        assert_eq!(e.place(), "missing library libm.so.6: Permission denied");
        let library = open("libm.so.6", &NoFaults).unwrap();
        let e = library.symbol("cos", &Inject::call(Call::FindSymbol, libc::ENOENT)).unwrap_err();
        assert_eq!(e.place(), "missing symbol cos in libm.so.6: No such file or directory");
    }
}
