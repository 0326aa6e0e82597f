//! The call that reads an object's last error text, for an object of any kind.
//!
//! Every call returns a status, so `handle` and `cast` use `status`. This call uses all three, so it has its own file.

use std::ffi::{c_char, c_void};

use crate::status::FbStatus;
use crate::{cast, handle};

/// Copies the error text of the last call that failed on the object of `handle`, a handle of any kind. The error text
/// says what failed, where, with which numbers, and what to do. It is empty before the first failure. A call that
/// returns FB_CLOSED or FB_BUSY for the handle itself, or whose handle is NULL or of another kind, leaves no error
/// text.
///
/// # Safety
/// `text` is NULL, or has `text_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_error_text(
    handle: *const c_void,
    text: *mut c_char,
    text_bytes: usize,
) -> FbStatus {
    // SAFETY: this call's contract.
    handle::text(handle, |said| unsafe { cast::write_text(text, text_bytes, said) })
}
