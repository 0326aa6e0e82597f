//! Status codes, the interface's version, and message texts that need no allocation.

use std::ffi::{CStr, c_char};
use std::fmt::{self, Write};

use forebay::Kind;

/// The version of this header's interface. docs/versions.md says what each version changed.
pub const FB_ABI_VERSION: u32 = 2;

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FbStatus {
    /// Success: the out-parameters are written.
    FbOk = 0,
    /// A configuration value, an argument or a pointer is invalid, alone or in combination with another.
    FbInvalidConfig = 1,
    /// A size or a product does not fit its type.
    FbOverflow = 2,
    /// The operating system or the device has no more memory.
    FbOutOfMemory = 3,
    /// The operating system, or the GPU's driver, refused a call or is missing.
    FbOsRefused = 4,
    /// A pool whose size was fixed at creation has too little left.
    FbExhausted = 5,
    /// Work in flight, another call, or something that the caller must end first is using the object. Call again when
    /// that has ended.
    FbBusy = 6,
    /// The sequence, step or object has ended, or the handle never named one.
    FbClosed = 7,
    /// A position, layer, slot or count is outside the configured range.
    FbOutOfRange = 8,
    /// The device failed, a step's selections were invalid, its missed rows were not gathered, or its launched graph
    /// lacked a call. Discard the tokens of that step.
    FbDeviceFailed = 9,
    /// A file does not follow its format.
    FbBadFormat = 10,
    /// This build does not read this version of the format.
    FbBadVersion = 11,
    /// Reading or writing a file failed.
    FbIo = 12,
    /// A step was abandoned, the work of a ticket never ran, or a callback returned a number that is no status.
    FbCancelled = 13,
    /// The library broke one of its own rules. This is always a defect of forebay.
    FbInternal = 14,
    /// The call does not fit the current state of the sequence, step or stream that it names.
    FbInvalidState = 15,
    /// The device, its driver, or this build lacks the requested feature.
    FbUnsupported = 16,
    /// Another process of the group has ended, or no sign of life has come from it in time.
    FbPeerLost = 17,
    /// A deadline passed before the call was done.
    FbTimedOut = 18,
    /// Bytes do not have the digest that was stated for them.
    FbCorrupt = 19,
}

impl From<Kind> for FbStatus {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::InvalidConfig => FbStatus::FbInvalidConfig,
            Kind::Overflow => FbStatus::FbOverflow,
            Kind::OutOfMemory => FbStatus::FbOutOfMemory,
            Kind::OsRefused => FbStatus::FbOsRefused,
            Kind::Exhausted => FbStatus::FbExhausted,
            Kind::Busy => FbStatus::FbBusy,
            Kind::Closed => FbStatus::FbClosed,
            Kind::OutOfRange => FbStatus::FbOutOfRange,
            Kind::DeviceFailed => FbStatus::FbDeviceFailed,
            Kind::BadFormat => FbStatus::FbBadFormat,
            Kind::BadVersion => FbStatus::FbBadVersion,
            Kind::Io => FbStatus::FbIo,
            Kind::Cancelled => FbStatus::FbCancelled,
            Kind::InvalidState => FbStatus::FbInvalidState,
            Kind::Unsupported => FbStatus::FbUnsupported,
            Kind::PeerLost => FbStatus::FbPeerLost,
            Kind::TimedOut => FbStatus::FbTimedOut,
            Kind::Corrupt => FbStatus::FbCorrupt,
            // The library may have more kinds than this match; a test compares it with all of them.
            _ => FbStatus::FbInternal,
        }
    }
}

const fn text_of(status: u32) -> &'static CStr {
    match status {
        0 => c"ok",
        1 => c"invalid configuration",
        2 => c"size overflow",
        3 => c"out of memory",
        4 => c"refused by the operating system",
        5 => c"pool exhausted",
        6 => c"busy",
        7 => c"closed",
        8 => c"out of range",
        9 => c"device failed",
        10 => c"malformed input",
        11 => c"unsupported version",
        12 => c"input or output failed",
        13 => c"cancelled",
        14 => c"internal error",
        15 => c"wrong state",
        16 => c"not supported",
        17 => c"peer lost",
        18 => c"timed out",
        19 => c"corrupt data",
        _ => c"unknown status",
    }
}

/// Returns the version of the loaded library's interface. Compare it with FB_ABI_VERSION before any other call.
#[unsafe(no_mangle)]
pub extern "C" fn fb_abi_version() -> u32 {
    FB_ABI_VERSION
}

/// Returns a status in words, as a constant string. Any number is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn fb_status_text(status: u32) -> *const c_char {
    text_of(status).as_ptr()
}

/// Returns the library's own version as a constant string, for example "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn fb_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Bytes of a message, including its ending zero. Longer messages are cut.
const TEXT_BYTES: usize = 512;

/// A message that C can read. It ends with a zero byte, is cut between characters, and is never allocated.
#[derive(Debug)]
pub(crate) struct Text {
    bytes: [u8; TEXT_BYTES],
    length: usize,
}

impl Text {
    pub(crate) const fn new() -> Self {
        Text { bytes: [0; TEXT_BYTES], length: 0 }
    }

    /// Replaces the message.
    pub(crate) fn set(&mut self, said: &impl fmt::Display) {
        (self.bytes, self.length) = ([0; TEXT_BYTES], 0);
        // Writing to a `Text` cannot fail; what does not fit is cut.
        let _ = write!(self, "{said}");
    }

    /// The message with its zero byte.
    pub(crate) fn with_end(&self) -> &[u8] {
        &self.bytes[..=self.length]
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let taken = text.floor_char_boundary(TEXT_BYTES - 1 - self.length);
        self.bytes[self.length..][..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay::Error;

    use super::*;

    #[test]
    fn every_error_kind_has_a_number_and_a_text() {
        for kind in Kind::ALL {
            assert_eq!(FbStatus::from(kind) as u32, kind as u32);
            assert_eq!(text_of(kind as u32).to_str(), Ok(kind.describe()));
        }
        assert_eq!(text_of(FbStatus::FbOk as u32), c"ok");
        assert_eq!(text_of(Kind::ALL.len() as u32 + 1), c"unknown status");
        assert_eq!(text_of(u32::MAX), c"unknown status");
    }

    const HEADER: &str = include_str!("../include/forebay.h");

    #[test]
    fn the_header_has_this_version() {
        assert!(HEADER.contains(&format!("\n#define FB_ABI_VERSION {}\n", fb_abi_version())));
    }

    #[test]
    fn the_header_declares_exactly_the_statuses() {
        let shout = |name: String| {
            let word =
                |c: char| if c.is_uppercase() { format!("_{c}") } else { c.to_uppercase().to_string() };
            name.chars().map(word).collect::<String>()
        };
        let line = |status| format!("    {} = {},", &shout(format!("{status:?}"))[1..], status as u32);
        let statuses = Kind::ALL.map(FbStatus::from).into_iter();
        let wanted: Vec<String> = std::iter::once(FbStatus::FbOk).chain(statuses).map(line).collect();
        let start = HEADER.find("enum fb_status").unwrap();
        let body = HEADER[start..].split("};").next().unwrap();
        let found: Vec<&str> = body.lines().filter(|line| line.contains(" = ")).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_text_is_replaced_and_shortened_between_characters() {
        let mut text = Text::new();
        assert_eq!(text.with_end(), b"\0");
        text.set(&Error::new(Kind::Io, "x").at("\u{e4}".repeat(TEXT_BYTES)));
        let long = CStr::from_bytes_with_nul(text.with_end()).unwrap().to_str().unwrap();
        assert!(long.len() >= TEXT_BYTES - 2 && long.ends_with('\u{e4}'), "{long}");
        let short = Error::new(Kind::Busy, "retire");
        text.set(&short);
        assert_eq!(text.with_end(), format!("{short}\0").as_bytes());
    }
}
