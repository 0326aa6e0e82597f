//! cudarc's memory for forebay's calls, and memory of forebay's device for cudarc's calls.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr};
use forebay::device::cuda::CudaDevice;
use forebay::device::{Device, Slice};
use forebay::{Error, Kind, Result};

use crate::{Bridge, refused};

mod sealed {
    pub trait Sealed {}
}

/// Number types for which every bit pattern is a value, so forebay may write any bytes into such memory.
pub trait Plain: DeviceRepr + sealed::Sealed {}

macro_rules! plain {
    ($($number:ty),*) => { $(
        impl sealed::Sealed for $number {}
        impl Plain for $number {}
    )* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// cudarc's memory, lent to forebay: selections, slots, staged rows.
///
/// Dropping this does not free the memory, because a [`Slice`] can be copied and a step may still use it; the memory
/// then stays allocated. [`LentSlice::take_back`] returns it to cudarc.
#[derive(Debug)]
pub struct LentSlice<T> {
    memory: ManuallyDrop<CudaSlice<T>>,
    slice: Slice,
}

impl<T: Plain> LentSlice<T> {
    /// Returns all of the memory, for forebay's calls; [`Slice::part`] takes a part of it.
    pub fn slice(&self) -> Slice {
        self.slice
    }

    /// Returns a view for cudarc's calls that read the memory.
    pub fn view(&self) -> CudaView<'_, T> {
        self.memory.as_view()
    }

    /// Returns a view for cudarc's calls that write the memory.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.as_view_mut()
    }

    /// Returns the memory as it was lent; dropping that frees it.
    ///
    /// # Safety
    /// No operation of forebay's that uses the memory is enqueued from now on, and the enqueued ones have ended: their
    /// steps are retired, and graphs captured with the memory are not launched again.
    pub unsafe fn take_back(self) -> CudaSlice<T> {
        ManuallyDrop::into_inner(self.memory)
    }
}

/// Memory of forebay's device for cudarc's calls: slabs, slots, tables. It keeps the device alive and frees nothing.
///
/// cudarc treats it like its own memory: if the context tracks events, each call that uses it waits for an event and
/// records one, and dropping it makes its stream wait for the last one. An event recorded outside a capture invalidates
/// the capture. So an engine that captures makes its views with the tracking off, as cudarc's documentation says of its
/// memory.
#[derive(Debug)]
pub struct DeviceView<T> {
    /// Only `drop` takes this out.
    memory: ManuallyDrop<CudaSlice<T>>,
    _device: Arc<CudaDevice>,
}

impl<T: Plain> DeviceView<T> {
    /// Returns a view for cudarc's calls that read the memory.
    pub fn view(&self) -> CudaView<'_, T> {
        self.memory.as_view()
    }

    /// Returns a view for cudarc's calls that write the memory.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.as_view_mut()
    }
}

impl<T> Drop for DeviceView<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not touched again.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        // Destroys its events and does not free the memory, which belongs to the device.
        memory.leak();
    }
}

impl Bridge {
    /// Lends cudarc's memory to forebay. Waits until the work enqueued so far on the memory's stream is done, including
    /// the allocation.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for memory of another context, and for memory without elements; [`Kind::DeviceFailed`].
    /// On an error the memory is freed.
    pub fn lend<T: Plain>(&self, memory: CudaSlice<T>) -> Result<LentSlice<T>> {
        const OPERATION: &str = "lend memory";
        self.check(OPERATION, "memory", memory.context())?;
        if memory.is_empty() {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("memory of no elements"));
        }
        let owner = Arc::clone(memory.stream());
        let (address, reading) = memory.device_ptr(&owner);
        drop(reading);
        owner.synchronize().map_err(|error| refused(OPERATION, error))?;
        // SAFETY: memory of this device's context. From here on only `take_back` frees it, whose caller promises that
        // no operation uses it.
        let slice = unsafe { self.device.import(address, memory.num_bytes() as u64) };
        Ok(LentSlice { memory: ManuallyDrop::new(memory), slice })
    }

    /// Returns memory of forebay's device for cudarc's calls, as numbers of type `T`. Make a view once and keep it,
    /// because each one makes events. `stream` is the stream that uses the view; cudarc orders the view's end by it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a slice of another device; [`Kind::InvalidConfig`] for a slice of lent memory, which
    /// [`LentSlice::view`] shows, for one that is not a whole number of `T`s or is not aligned for `T`, and for a
    /// stream of another context; [`Kind::DeviceFailed`].
    pub fn view<T: Plain>(&self, slice: Slice, stream: &Arc<CudaStream>) -> Result<DeviceView<T>> {
        const OPERATION: &str = "view memory";
        self.check(OPERATION, "stream", stream.context())?;
        if !self.device.owns(&slice) {
            return Err(Error::new(Kind::OutOfRange, OPERATION).at("a slice of another device"));
        }
        if !self.device.keeps(&slice) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("a slice of memory that is not the device's own")
                .hint("use LentSlice::view for lent memory"));
        }
        let size = size_of::<T>() as u64;
        if !slice.bytes().is_multiple_of(size) || !slice.address().is_multiple_of(size) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("the slice is not a whole number of aligned elements")
                .with("bytes", slice.bytes())
                .with("bytes of an element", size));
        }
        // cudarc ends the program if the driver refuses the events that it makes below, so this makes one first.
        self.context.new_event(None).map_err(|error| refused(OPERATION, error))?;
        // SAFETY: this many bytes of the device's own memory, which live as long as the device, and the view holds the
        // device; every bit pattern is a `T`. The view is leaked and never freed.
        let memory = unsafe { stream.upgrade_device_ptr(slice.address(), (slice.bytes() / size) as usize) };
        Ok(DeviceView { memory: ManuallyDrop::new(memory), _device: Arc::clone(&self.device) })
    }
}
