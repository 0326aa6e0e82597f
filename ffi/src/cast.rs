//! The one file that turns a caller's pointers into references and values.
//!
//! It checks everything that can be checked: null, alignment, lengths, the sizes of structs. What it cannot check is in
//! each function's `# Safety`, and the header requires it of callers. Handles, sequences and steps do not pass through
//! this file: the handle table and the cache look them up.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay::device::{Device, Slice, Stream};
use forebay::{Error, Kind, Result};

use crate::panic::wall;
use crate::status::{FbStatus, Text};

/// The largest plausible struct: a larger size was never set.
const STRUCT_MAX: usize = 4096;

fn bad(name: &'static str, why: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "argument").at(name).hint(why)
}

/// The error of a pointer that must not be null.
pub(crate) fn null(name: &'static str) -> Error {
    bad(name, "pass a pointer that is not null")
}

fn checked<T>(pointer: *const T, name: &'static str) -> Result<()> {
    match (pointer.is_null(), pointer.is_aligned()) {
        (true, _) => Err(null(name)),
        (_, false) => Err(bad(name, "pass an aligned pointer")),
        _ => Ok(()),
    }
}

/// A reference to a value that nothing else uses.
///
/// # Safety
/// `pointer` is null, or names a `T` that nothing else reads, changes or ends during `'a`.
pub(crate) unsafe fn exclusive<'a, T>(pointer: *mut T, name: &'static str) -> Result<&'a mut T> {
    checked(pointer, name)?;
    // SAFETY: not null, aligned; the rest is the caller's contract.
    Ok(unsafe { &mut *pointer })
}

/// A slice of `count` values; the pointer may be null if `count` is 0.
///
/// # Safety
/// `pointer` is null, or names `count` values that nothing changes or ends during `'a`.
pub(crate) unsafe fn slice<'a, T: Plain>(
    pointer: *const T,
    count: usize,
    name: &'static str,
) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    checked(pointer, name)?;
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Error::new(Kind::OutOfRange, "argument").at(name).with("count", count as u64));
    }
    // SAFETY: not null, aligned, no longer than an object can be; the rest is the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// A result's destination. Nothing is read from it, so it need not be initialised.
pub(crate) struct Out<'a, T>(*mut T, PhantomData<&'a mut T>);

/// # Safety
/// `pointer` is null, or names memory for a `T` that nothing else uses during `'a`.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T, name: &'static str) -> Result<Out<'a, T>> {
    checked(pointer, name)?;
    Ok(Out(pointer, PhantomData))
}

impl<T> Out<'_, T> {
    /// Writes the result.
    pub(crate) fn set(self, value: T) {
        // SAFETY: memory for a `T` during the lifetime, by the contract of `out`.
        unsafe { self.0.write(value) };
    }
}

/// The same for a result that the caller may decline with a null.
///
/// # Safety
/// As [`out`].
pub(crate) unsafe fn out_or_none<'a, T>(pointer: *mut T, name: &'static str) -> Result<Option<Out<'a, T>>> {
    // SAFETY: the same contract.
    (!pointer.is_null()).then(|| unsafe { out(pointer, name) }).transpose()
}

/// The address of a word that is written after the call, exposed: neither null nor misaligned.
pub(crate) fn word(pointer: *mut u32, name: &'static str) -> Result<usize> {
    checked(pointer, name)?;
    Ok(pointer.expose_provenance())
}

/// The destination of `count` values, which need not be initialised.
///
/// # Safety
/// `pointer` is null, or names memory for `count` values that nothing else uses during `'a`.
pub(crate) unsafe fn room<'a, T: Plain>(
    pointer: *mut T,
    count: usize,
    name: &'static str,
) -> Result<&'a mut [MaybeUninit<T>]> {
    if count == 0 {
        return Ok(&mut []);
    }
    checked(pointer, name)?;
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Error::new(Kind::OutOfRange, "argument").at(name).with("count", count as u64));
    }
    // SAFETY: not null, aligned, no longer than an object can be; the rest is the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), count) })
}

/// Writes as many entries of `list` as there are places, and the length of the list. Allocates nothing.
///
/// # Safety
/// `pointer` has `places` places and `count` one, which nothing else uses during the call; null is refused.
pub(crate) unsafe fn write_list<T: Plain>(
    list: impl Iterator<Item = T>,
    pointer: *mut T,
    places: u32,
    name: &'static str,
    count: *mut u32,
    count_name: &'static str,
) -> Result<()> {
    // SAFETY: the same contract, for both.
    let (places, count) = unsafe { (room(pointer, places as usize, name)?, out(count, count_name)?) };
    let mut written = 0;
    for value in list {
        if let Some(place) = places.get_mut(written) {
            place.write(value);
        }
        written += 1;
    }
    // Lists of layers, lengths and pages: their numbers are `u32`.
    count.set(u32::try_from(written).unwrap_or(u32::MAX));
    Ok(())
}

/// A copy of a value.
///
/// # Safety
/// `pointer` is null, or names a value that nothing changes during the call.
pub(crate) unsafe fn value<T: Plain>(pointer: *const T, name: &'static str) -> Result<T> {
    checked(pointer, name)?;
    // SAFETY: not null, aligned; the rest is the caller's contract.
    Ok(unsafe { pointer.read() })
}

/// The bytes of a caller's text.
///
/// # Safety
/// `pointer` is null, or names bytes up to one that is zero, which nothing changes or ends during `'a`.
unsafe fn bytes<'a>(pointer: *const c_char, name: &'static str) -> Result<&'a [u8]> {
    checked(pointer, name)?;
    // SAFETY: not null; the rest is the caller's contract.
    Ok(unsafe { CStr::from_ptr(pointer) }.to_bytes())
}

/// A text in UTF-8.
///
/// # Safety
/// `pointer` is null, or names bytes up to one that is zero, which nothing changes or ends during `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &'static str) -> Result<&'a str> {
    // SAFETY: the same contract.
    let bytes = unsafe { bytes(pointer, name) }?;
    std::str::from_utf8(bytes)
        .map_err(|e| bad(name, "pass a text in UTF-8").with("byte", e.valid_up_to() as u64))
}

/// A path, byte by byte as given.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn path<'a>(pointer: *const c_char, name: &'static str) -> Result<&'a Path> {
    // SAFETY: the same contract.
    let bytes = unsafe { bytes(pointer, name) }?;
    match bytes.is_empty() {
        true => Err(bad(name, "pass a path that is not empty")),
        false => Ok(Path::new(OsStr::from_bytes(bytes))),
    }
}

/// Writes as much of `text` as `bytes` bytes hold, and a zero byte at the end. `text` is UTF-8 and ends with a zero
/// byte; it is cut between characters.
///
/// # Safety
/// `pointer` is null, or names `bytes` bytes that nothing else uses during the call.
pub(crate) unsafe fn write_text(pointer: *mut c_char, bytes: usize, text: &[u8]) {
    let mut count = text.len().min(bytes);
    if pointer.is_null() || count == 0 {
        return;
    }
    // The cut is not in the middle of a character.
    while count > 1 && text[count - 1] & 0xC0 == 0x80 {
        count -= 1;
    }
    // SAFETY: `count` bytes are inside both, and the text is the library's own.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), pointer.cast(), count);
        pointer.add(count - 1).write(0);
    }
}

/// Runs a creation inside the panic boundary. If it fails, the reason is written to `text`, which may be null.
///
/// # Safety
/// `text` is null, or names `bytes` bytes that nothing else uses during the call.
pub(crate) unsafe fn create(text: *mut c_char, bytes: usize, make: impl FnOnce() -> Result<()>) -> FbStatus {
    let Err(error) = wall(make) else { return FbStatus::FbOk };
    let mut reason = Text::new();
    reason.set(&error);
    // SAFETY: the same contract.
    unsafe { write_text(text, bytes, reason.with_end()) };
    error.kind().into()
}

/// The address of device memory as a C pointer.
pub(crate) fn address(slice: &Slice) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(slice.address() as usize)
}

/// A stream as its device identifies it. The device rejects an unknown one.
pub(crate) fn stream(stream: *mut c_void) -> Stream {
    Stream(stream.addr() as u64)
}

/// The reverse of [`stream`].
pub(crate) fn stream_pointer(stream: Stream) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

/// Types for which any bytes are a value.
///
/// # Safety
/// Every pattern of bytes is a value, and there is no padding.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: bytes.
unsafe impl Plain for u8 {}
// SAFETY: a word.
unsafe impl Plain for i32 {}
// SAFETY: a word.
unsafe impl Plain for u32 {}
// SAFETY: a word.
unsafe impl Plain for u64 {}
// SAFETY: any bytes are an `f64`, if perhaps no number.
unsafe impl Plain for f64 {}
// SAFETY: a word; what it points to is another matter.
unsafe impl<T> Plain for *const T {}

/// A struct that begins with its size, so that callers built for another version still work.
pub(crate) trait Versioned: Plain {
    /// The struct's name in error texts.
    const NAME: &'static str;
    /// Bytes that every version has: up to the end of the last required field. It never rises, so it is the offset
    /// of a field, which appended fields do not change.
    const REQUIRED: usize;
}

/// The size that the struct at `pointer` states.
///
/// # Safety
/// `pointer` is null, or names a `size_t` that nothing changes during the call.
unsafe fn stated<T: Versioned>(pointer: *const T) -> Result<usize> {
    checked(pointer, T::NAME)?;
    // SAFETY: not null, aligned for a struct that begins with a `usize`; the rest is the contract.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size < T::REQUIRED || size > STRUCT_MAX {
        return Err(bad(T::NAME, "set size to sizeof the struct")
            .with("size", size as u64)
            .with("least", T::REQUIRED as u64));
    }
    Ok(size)
}

/// Reads a caller's struct. Fields that an older caller does not have are 0; fields that this version does not have
/// must be 0.
///
/// # Safety
/// `pointer` is null, or names a struct that begins with its size and has that many bytes.
pub(crate) unsafe fn versioned<T: Versioned>(pointer: *const T) -> Result<T> {
    // SAFETY: the same contract.
    let size = unsafe { stated(pointer) }?;
    // SAFETY: by the contract `size` bytes are there; any bytes are `u8`.
    let bytes: &[u8] = unsafe { slice(pointer.cast(), size, T::NAME) }?;
    let (known, unknown) = bytes.split_at(size.min(size_of::<T>()));
    if let Some(at) = unknown.iter().position(|byte| *byte != 0) {
        return Err(bad(T::NAME, "zero what this version does not know, or use a matching library")
            .with("size", size as u64)
            .with("known", size_of::<T>() as u64)
            .with("byte", (known.len() + at) as u64));
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `known` is no longer than a `T`, and every byte of `value` is set: any bytes are a `T`.
    unsafe {
        std::ptr::copy_nonoverlapping(known.as_ptr(), value.as_mut_ptr().cast(), known.len());
        Ok(value.assume_init())
    }
}

/// An iterator over structs that begin with their size, one after the other.
pub(crate) struct VersionedList<'a, T> {
    next: *const T,
    left: usize,
    size: Option<usize>,
    lives: PhantomData<&'a T>,
}

/// Structs that begin with their size, one after the other. All state the same size, which is also the stride of the
/// array.
///
/// # Safety
/// `pointer` is null, or names `count` structs that begin with their size, as many bytes each, which nothing changes
/// or ends during `'a`.
pub(crate) unsafe fn versioned_list<'a, T: Versioned>(
    pointer: *const T,
    count: usize,
) -> VersionedList<'a, T> {
    VersionedList { next: pointer, left: count, size: None, lives: PhantomData }
}

impl<T: Versioned> Iterator for VersionedList<'_, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        self.left = self.left.checked_sub(1)?;
        // SAFETY: the contract of `versioned_list`: one more is there.
        let read = unsafe { stated(self.next).and_then(|size| Ok((size, versioned(self.next)?))) };
        let read = read.and_then(|(size, value)| match *self.size.get_or_insert(size) == size {
            true => Ok((size, value)),
            false => Err(bad(T::NAME, "state the same size in every struct of an array")),
        });
        match read {
            Ok((size, value)) => {
                // After the last struct it points to nothing and is not read.
                self.next = self.next.wrapping_byte_add(size);
                Some(Ok(value))
            }
            Err(error) => {
                self.left = 0;
                Some(Err(error))
            }
        }
    }
}

/// The destination of a struct that begins with its size.
pub(crate) struct VersionedOut<'a, T> {
    pointer: *mut T,
    size: usize,
    lives: PhantomData<&'a mut T>,
}

/// # Safety
/// As [`versioned`], and nothing else uses those bytes during `'a`.
pub(crate) unsafe fn versioned_out<'a, T: Versioned>(pointer: *mut T) -> Result<VersionedOut<'a, T>> {
    // SAFETY: the same contract.
    let size = unsafe { stated(pointer) }?;
    Ok(VersionedOut { pointer, size, lives: PhantomData })
}

impl<T: Versioned> VersionedOut<'_, T> {
    /// Writes the fields that the caller has, except its size; zeroes fields that only the caller has.
    pub(crate) fn set(self, value: &T) {
        let (from, to) = ((&raw const *value).cast::<u8>(), self.pointer.cast::<u8>());
        let (head, end) = (size_of::<usize>(), self.size.min(size_of::<T>()));
        // SAFETY: `head..end` is inside both structs, `end..size` inside the caller's, which is `size`
        // bytes long by the contract of `versioned_out`.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(head), to.add(head), end - head);
            to.add(end).write_bytes(0, self.size - end);
        }
    }
}

/// An engine's buffer of `words` 4-byte words, as the device identifies it.
///
/// # Safety
/// `pointer` is null, or names `words` words that the device may read and write until every operation that uses
/// the slice has ended.
pub(crate) unsafe fn buffer<T>(
    device: &dyn Device,
    pointer: *const T,
    words: u64,
    name: &'static str,
) -> Result<Slice> {
    checked(pointer, name)?;
    let bytes = words.checked_mul(4).ok_or_else(|| Error::new(Kind::Overflow, "argument").at(name))?;
    // SAFETY: the caller's contract.
    Ok(unsafe { device.import(pointer as u64, bytes) })
}

/// An engine's memory of `bytes` bytes, as the device identifies it.
///
/// # Safety
/// As [`buffer`], with bytes in place of words.
pub(crate) unsafe fn memory(
    device: &dyn Device,
    pointer: *const c_void,
    bytes: u64,
    name: &'static str,
) -> Result<Slice> {
    checked(pointer, name)?;
    // SAFETY: the caller's contract.
    Ok(unsafe { device.import(pointer as u64, bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Two {
        size: usize,
        first: u64,
        second: u64,
    }
    // SAFETY: three words without padding.
    unsafe impl Plain for Two {}
    impl Versioned for Two {
        const NAME: &'static str = "two";
        const REQUIRED: usize = 16;
    }

    fn read(words: &[u64]) -> Result<Two> {
        // SAFETY: each test states no more bytes than it passes, or a size that is refused before.
        unsafe { versioned(words.as_ptr().cast::<Two>()) }
    }

    #[test]
    fn struct_sizes_of_other_versions_are_read_or_refused() {
        assert_eq!(read(&[24, 1, 2]), Ok(Two { size: 24, first: 1, second: 2 }));
        assert_eq!(read(&[16, 1, 99]), Ok(Two { size: 16, first: 1, second: 0 }), "an older caller");
        assert_eq!(read(&[32, 1, 2, 0]), Ok(Two { size: 32, first: 1, second: 2 }), "a newer one");
        let newer = read(&[40, 1, 2, 0, 1 << 8]).unwrap_err();
        assert_eq!((newer.kind(), newer.number("byte")), (Kind::InvalidConfig, Some(33)));
        for size in [0, 8, 15, STRUCT_MAX as u64 + 1, u64::MAX] {
            assert_eq!(read(&[size, 1, 2]).unwrap_err().kind(), Kind::InvalidConfig, "{size}");
        }
    }

    #[test]
    fn structs_of_an_array_have_their_stated_size_as_stride() {
        let list = |words: &[u64], count| {
            // SAFETY: each test states no more bytes than it passes, or a size that is refused before.
            let read: Vec<_> = unsafe { versioned_list(words.as_ptr().cast::<Two>(), count) }.collect();
            read.into_iter().map(|one| one.map(|one| (one.first, one.second))).collect::<Result<Vec<_>>>()
        };
        assert_eq!(list(&[24, 1, 2, 24, 3, 4], 2), Ok(vec![(1, 2), (3, 4)]));
        assert_eq!(list(&[16, 1, 16, 3], 2), Ok(vec![(1, 0), (3, 0)]), "an older caller");
        assert_eq!(list(&[32, 1, 2, 0, 32, 3, 4, 0], 2), Ok(vec![(1, 2), (3, 4)]), "a newer one");
        assert_eq!(list(&[24, 1, 2], 0), Ok(vec![]));
        let uneven = list(&[32, 1, 2, 0, 24, 3, 4], 2).unwrap_err();
        assert!(uneven.to_string().contains("same size"), "{uneven}");
        // SAFETY: null is refused, and no more is read after it.
        assert_eq!(unsafe { versioned_list(std::ptr::null::<Two>(), 3) }.count(), 1);
    }

    #[test]
    fn texts_and_paths_are_bytes_up_to_a_zero_byte() {
        // SAFETY: literals that end with a zero, and null.
        unsafe {
            assert_eq!(text(c"\u{e4}".as_ptr(), "x"), Ok("\u{e4}"));
            assert_eq!(text(c"a\xFF".as_ptr(), "x").unwrap_err().number("byte"), Some(1));
            assert_eq!(path(c"a\xFF".as_ptr(), "x").unwrap().as_os_str().as_bytes(), b"a\xFF");
            assert!(path(c"".as_ptr(), "x").is_err() && path(std::ptr::null(), "x").is_err());
        }
    }

    #[test]
    fn a_list_never_exceeds_its_capacity() {
        for room in 0..4 {
            let (mut places, mut count) = ([9; 4], 0);
            let list = [1_u32, 2].into_iter();
            // SAFETY: `room` is at most the places there are.
            unsafe { write_list(list, places.as_mut_ptr(), room, "list", &mut count, "count") }.unwrap();
            let written = 2.min(room as usize);
            assert!(places[..written] == [1, 2][..written] && places[written..].iter().all(|p| *p == 9));
            assert_eq!(count, 2);
        }
        let none = std::ptr::null_mut::<u32>();
        // SAFETY: null is refused.
        let refused = unsafe { write_list([1_u32].into_iter(), none, 1, "pages", none, "count") };
        assert_eq!(refused.unwrap_err().place(), "pages");
    }

    #[test]
    fn an_output_struct_fits_callers_of_other_versions() {
        let answer = Two { size: 24, first: 1, second: 2 };
        for (size, wanted) in [(16, [16, 1, 9, 9]), (24, [24, 1, 2, 9]), (32, [32, 1, 2, 0])] {
            let mut words = [size, 9, 9, 9_u64];
            // SAFETY: `size` is at most the size of `words`.
            unsafe { versioned_out(words.as_mut_ptr().cast::<Two>()) }.unwrap().set(&answer);
            assert_eq!(words, wanted);
        }
    }

    #[test]
    fn null_and_misaligned_pointers_are_refused() {
        let words = [0_u32; 4];
        let odd = words.as_ptr().cast::<u8>().wrapping_add(1).cast_mut();
        // SAFETY: all are null or misaligned, and refused before they are followed.
        unsafe {
            assert_eq!(exclusive::<u64>(std::ptr::null_mut(), "x").unwrap_err().place(), "x");
            assert!(exclusive::<u32>(odd.cast(), "x").is_err());
            assert!(out::<u32>(std::ptr::null_mut(), "x").is_err());
            assert!(slice::<u8>(std::ptr::null(), 1, "x").is_err());
            assert!(slice::<u8>(odd, usize::MAX, "x").is_err());
            assert!(slice::<u8>(std::ptr::null(), 0, "x").unwrap().is_empty());
            assert!(versioned::<Two>(std::ptr::null()).is_err());
        }
    }

    #[test]
    fn a_text_never_leaves_its_buffer() {
        for room in 0..8 {
            let mut bytes = [9_u8; 8];
            // SAFETY: `room` is at most the buffer's size.
            unsafe { write_text(bytes.as_mut_ptr().cast(), room, b"abcde\0") };
            assert!(bytes[room..].iter().all(|b| *b == 9), "{room}");
            assert!(room == 0 || bytes[..room].contains(&0), "{room}");
        }
        for (room, wanted) in
            [(1, ""), (2, ""), (3, ""), (4, "\u{20ac}"), (5, "\u{20ac}"), (6, "\u{20ac}\u{e4}")]
        {
            let mut bytes = [9_u8; 8];
            // SAFETY: `room` is at most the buffer's size.
            let written = unsafe {
                write_text(bytes.as_mut_ptr().cast(), room, "\u{20ac}\u{e4}\0".as_bytes());
                CStr::from_ptr(bytes.as_ptr().cast())
            };
            assert_eq!(written.to_str(), Ok(wanted), "{room}");
        }
        // SAFETY: null is allowed.
        unsafe { write_text(std::ptr::null_mut(), 4, b"abc\0") };
    }
}
