//! Kernels called as functions, for tests of the kernels alone, without a driver or a device.

use crate::{Options, Standin};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ffi::{CStr, CString, c_char, c_void};

/// The number of guard words before and after each [`Memory`], which no kernel may write.
const FENCE: usize = 32;
const FENCE_WORD: u32 = 0x5AFE_C0DE;

/// Memory whose address kernels take: words, zero at first, that begin at a multiple of 128 bytes plus some words.
#[derive(Debug)]
pub struct Memory {
    start: *mut u32,
    /// Guard words before the memory's own words.
    lead: usize,
    words: usize,
}

impl Memory {
    /// Returns zeroed memory of `count` words.
    pub fn new(words: usize) -> Memory {
        Memory::skewed(words, 0)
    }

    /// Returns zeroed memory that begins `skew` words after a multiple of 128 bytes.
    pub fn skewed(words: usize, skew: usize) -> Memory {
        let lead = FENCE + skew;
        let layout = Memory::layout(lead + words + FENCE);
        // SAFETY: the layout has a size above zero, as the fences do.
        let start = unsafe { alloc(layout) }.cast::<u32>();
        if start.is_null() {
            handle_alloc_error(layout);
        }
        let memory = Memory { start, lead, words };
        for index in 0..lead + words + FENCE {
            let inside = (lead..lead + words).contains(&index);
            // SAFETY: the allocation has as many words.
            unsafe { start.add(index).write(if inside { 0 } else { FENCE_WORD }) };
        }
        memory
    }

    /// Returns memory that holds these words.
    pub fn of(words: &[u32]) -> Memory {
        let memory = Memory::new(words.len());
        memory.write(0, words);
        memory
    }

    /// The layout of an allocation of this many words.
    fn layout(words: usize) -> Layout {
        Layout::array::<u32>(words).and_then(|l| l.align_to(128)).unwrap_or(Layout::new::<u32>())
    }

    /// The address that a kernel takes.
    pub fn address(&self) -> u64 {
        self.start as u64 + 4 * self.lead as u64
    }

    /// The words as they are now, to be looked at before a kernel runs.
    fn now(&self) -> &[u32] {
        // SAFETY: the allocation has the words and its fences, all written; no kernel writes while a test reads.
        unsafe { std::slice::from_raw_parts(self.start.add(self.lead), self.words) }
    }

    /// The words as they are now.
    pub fn read(&self) -> Vec<u32> {
        self.now().to_vec()
    }

    /// Whether the words are now these. For large memory: it copies nothing.
    pub fn holds(&self, words: &[u32]) -> bool {
        self.now() == words
    }

    /// Changes the words from `first` on.
    pub fn write(&self, first: usize, words: &[u32]) {
        assert!(first + words.len() <= self.words, "{first} + {} > {}", words.len(), self.words);
        for (index, word) in words.iter().enumerate() {
            // SAFETY: just checked.
            unsafe { self.start.add(self.lead + first + index).write(*word) };
        }
    }

    /// Whether nothing was written before or after the words.
    pub fn is_fenced(&self) -> bool {
        let end = self.lead + self.words;
        let fences = (0..self.lead).chain(end..end + FENCE);
        // SAFETY: the allocation has the words and its fences.
        fences.into_iter().all(|index| unsafe { self.start.add(index).read() } == FENCE_WORD)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.start.cast(), Memory::layout(self.lead + self.words + FENCE)) };
    }
}

type Asked = unsafe extern "C" fn(*mut [u64; 2], u64) -> u64;
type Run = unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, *const c_void, u32, u64) -> bool;

/// The kernels of one [`Standin`].
#[derive(Debug)]
pub struct Kernels {
    run: Run,
    asked: Asked,
    // Keeps the library loaded.
    _standin: Standin,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The seed of the order of blocks and threads.
    pub seed: u64,
}

impl Kernels {
    /// Returns `None` if this crate was built without g++.
    pub fn new() -> Option<Kernels> {
        let standin = Standin::new(Options::default())?;
        let path = CString::new(standin.library()).ok()?;
        // SAFETY: loaded already; this gives the same handle once more.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        // SAFETY: a handle, or null for the program itself, which has no such symbols.
        let [run, asked] =
            [c"standin_run", c"standin_asked"].map(|name| unsafe { libc::dlsym(handle, name.as_ptr()) });
        if run.is_null() || asked.is_null() {
            return None;
        }
        // SAFETY: direct.cpp declares it with this type.
        let run = unsafe { std::mem::transmute::<*mut c_void, Run>(run) };
        // SAFETY: as above.
        let asked = unsafe { std::mem::transmute::<*mut c_void, Asked>(asked) };
        Some(Kernels { run, asked, _standin: standin })
    }

    /// The lines that the last kernel asked the L2 for, in the order in which it did: each line's address, and the
    /// cycle.
    pub fn asked(&self) -> Vec<[u64; 2]> {
        // SAFETY: nothing is copied.
        let count = unsafe { (self.asked)(std::ptr::null_mut(), 0) };
        let mut lines = vec![[0; 2]; count as usize];
        // SAFETY: there is room for as many as are asked for.
        unsafe { (self.asked)(lines.as_mut_ptr(), count) };
        lines
    }

    /// Runs a kernel to its end; returns false if no kernel has this name or its argument has another size. `args` is
    /// its by-value argument; the addresses in it are those of [`Memory`] that outlives the call.
    pub fn run(&self, name: &CStr, launch: Launch, args: &[u32]) -> bool {
        let block = [launch.threads, 1, 1];
        // A copy at an address that is aligned for 64-bit words.
        let args: Vec<u64> =
            args.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32).collect();
        let bytes = 8 * args.len() as u32;
        // SAFETY: the library is loaded; what the kernels may touch is what the addresses in `args` lead to,
        // and that memory's fences tell when one touched more.
        unsafe {
            (self.run)(
                name.as_ptr(),
                launch.grid.as_ptr(),
                block.as_ptr(),
                launch.shared,
                args.as_ptr().cast(),
                bytes,
                launch.seed,
            )
        }
    }
}
