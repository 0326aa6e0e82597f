//! The kernels of a device: loaded once and all looked up at construction, so that no launch lacks one.
//!
//! A driver may defer loading a kernel until its first launch, and the load may wait for the device or break a
//! capture. Querying a kernel's launch limits at construction forces the load.

use std::ffi::CStr;

use super::driver::{Context, Current, DriverResult, Handle, Refusal, flag};
use super::image::image;
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, Mutex};

/// The operation's name in errors of this file.
const OPERATION: &str = "load kernels";

/// Names each kernel once.
macro_rules! kernels {
    ($($name:ident = $symbol:literal),* $(,)?) => {
        /// A kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kernel { $($name),* }

        const KERNELS: &[(Kernel, &CStr)] = &[$((Kernel::$name, $symbol)),*];
    };
}

kernels! {
    Load = c"forebay_load",
    Commit = c"forebay_commit",
    Resolve = c"forebay_resolve",
    Gather = c"forebay_gather",
    Scatter = c"forebay_scatter",
    Report = c"forebay_report",
    Join = c"forebay_join",
    Resize = c"forebay_resize",
    Truncate = c"forebay_truncate",
    Leave = c"forebay_leave",
    Warm = c"forebay_warm",
    Newest = c"forebay_newest",
    WarmGather = c"forebay_warm_gather",
    Digest = c"forebay_digest",
    Copy = c"forebay_copy",
    Prefetch = c"forebay_prefetch",
    BeginPages = c"forebay_begin_pages",
    Pages = c"forebay_pages",
    GatherBulk = c"forebay_gather_bulk",
    Work = c"forebay_work",
}

/// A resolve and a warm-up take their working memory from a block's shared memory, up to this many bytes and as far
/// as the device allows: enough for 256K tokens. Two such blocks fit the 228 KiB of an SM of compute capability 9.0.
const SHARED_MAX: u32 = 96 << 10;

/// The loaded kernels.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    raw: Handle,
    functions: [Handle; KERNELS.len()],
    /// The function of [`Kernel::Work`]; 0 until it is first used.
    work: Mutex<Handle>,
    /// The most dynamic shared memory that a resolve and a warm-up can be launched with, in bytes.
    pub shared_bytes: u32,
}

impl Module {
    /// Whether the device gets kernels compiled for 9.0 or later. These wait by themselves for the end of the
    /// previous kernel (programmatic dependent launch), and use bulk copies. Kernels compiled for less, which newer
    /// devices may also get, do neither.
    pub fn is_new(context: &Context) -> bool {
        context.capability >= (9, 0) && image(context.capability).starts_with(b"\x7FELF")
    }

    /// Loads the kernels for the device; those with bulk copies only if `bulk`. [`Module::load_work`] loads the
    /// kernel that only tools use.
    ///
    /// # Errors
    /// The driver's errors; [`Kind::InvalidConfig`] if a kernel takes fewer than `threads` threads.
    pub fn load(context: &Arc<Context>, threads: u32, bulk: bool) -> Result<Module> {
        let current = context.relaxed().map_err(|refusal| failed(refusal, None))?;
        let mut raw = 0;
        current
            .module_load(&mut raw, image(context.capability).as_ptr())
            .map_err(|refusal| failed(refusal, None))?;
        let mut module = Module {
            context: Arc::clone(context),
            raw,
            functions: [0; KERNELS.len()],
            work: Mutex::new(0),
            shared_bytes: SHARED_MAX,
        };
        for ((kernel, name), function) in KERNELS.iter().zip(&mut module.functions) {
            if *kernel == Kernel::Work || (*kernel == Kernel::GatherBulk && !bulk) {
                continue;
            }
            *function = look_up(&current, raw, name, threads)?;
            if matches!(kernel, Kernel::Resolve | Kernel::Warm) {
                let more = ask_for_shared(&current, context.shared_bytes, SHARED_MAX, *function)
                    .map_err(|refusal| failed(refusal, Some(name)))?;
                module.shared_bytes = module.shared_bytes.min(more);
            }
        }
        Ok(module)
    }

    /// Loads [`Kernel::Work`]; returns the most shared memory that it can be launched with, in bytes. That is also
    /// all that a multiprocessor has for one block.
    ///
    /// # Errors
    /// As [`Module::load`].
    #[cfg(feature = "measure")]
    pub fn load_work(&self, threads: u32) -> Result<u32> {
        let mut work = self.work.lock();
        let current = self.context.relaxed().map_err(|refusal| failed(refusal, None))?;
        let Some((_, name)) = KERNELS.iter().find(|(kernel, _)| *kernel == Kernel::Work) else {
            return Ok(0);
        };
        *work = look_up(&current, self.raw, name, threads)?;
        ask_for_shared(&current, self.context.shared_bytes, u32::MAX, *work)
            .map_err(|refusal| failed(refusal, Some(name)))
    }

    /// A kernel of the module.
    pub fn function(&self, kernel: Kernel) -> Handle {
        match kernel {
            Kernel::Work => *self.work.lock(),
            _ => self.functions.get(kernel as usize).copied().unwrap_or(0),
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.give_back(|driver| driver.module_unload(self.raw));
    }
}

/// Finds a kernel, and forces its load.
fn look_up(current: &Current<'_>, module: Handle, name: &CStr, threads: u32) -> Result<Handle> {
    let (mut function, mut most) = (0, 0);
    current
        .module_function(&mut function, module, name.as_ptr())
        .and_then(|()| current.function_attribute(&mut most, flag::FUNCTION_THREADS, function))
        .map_err(|refusal| failed(refusal, Some(name)))?;
    if most.unsigned_abs() < threads {
        return Err(Error::new(Kind::InvalidConfig, OPERATION)
            .at(format!("threads of {}", name.to_string_lossy()))
            .with("wanted", threads)
            .with("most", most.unsigned_abs()));
    }
    Ok(function)
}

/// Lets a kernel take as much shared memory at launch as possible, of the `most` that a block can have and up to
/// `limit`; returns the bytes.
fn ask_for_shared(current: &Current<'_>, most: u32, limit: u32, function: Handle) -> DriverResult<u32> {
    let mut own = 0;
    current.function_attribute(&mut own, flag::FUNCTION_SHARED, function)?;
    let more = most.saturating_sub(own.unsigned_abs()).min(limit);
    current.set_function_attribute(function, flag::FUNCTION_MORE_SHARED, more as i32)?;
    Ok(more)
}

fn failed(refusal: Refusal, kernel: Option<&CStr>) -> Error {
    let error = refusal.error(OPERATION);
    let place = match kernel {
        None => error.place().to_owned(),
        Some(name) => format!("{} ({})", error.place(), name.to_string_lossy()),
    };
    error.at(place).hint("install the driver's newest release for this device")
}
