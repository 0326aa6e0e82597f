//! Memory of cudarc's in forebay's calls, and memory of forebay's device in cudarc's.

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

/// Numbers of which any bits are one: what forebay writes into such memory is a value.
pub trait Plain: DeviceRepr + sealed::Sealed {}

macro_rules! plain {
    ($($number:ty),*) => { $(
        impl sealed::Sealed for $number {}
        impl Plain for $number {}
    )* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// cudarc's memory, lent to forebay for good: selections, slots, staged rows.
///
/// It is not freed when this is dropped, since a [`Slice`] can be copied and a step may still name it; as memory of the
/// device's own it then stays taken. [`LentSlice::take_back`] gives it back to cudarc.
#[derive(Debug)]
pub struct LentSlice<T> {
    memory: ManuallyDrop<CudaSlice<T>>,
    slice: Slice,
}

impl<T: Plain> LentSlice<T> {
    /// What forebay's calls take: all of it. Parts are [`Slice::part`]'s.
    pub fn slice(&self) -> Slice {
        self.slice
    }

    /// For cudarc's calls that read it.
    pub fn view(&self) -> CudaView<'_, T> {
        self.memory.as_view()
    }

    /// For cudarc's calls that write it.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.as_view_mut()
    }

    /// The memory as it was lent; dropping it frees it.
    ///
    /// # Safety
    /// No operation of forebay's that names it is still to be enqueued, and those that were enqueued have ended: their
    /// steps are retired, and graphs captured with it are not launched again.
    pub unsafe fn take_back(self) -> CudaSlice<T> {
        ManuallyDrop::into_inner(self.memory)
    }
}

/// Memory of forebay's device, as cudarc sees it: slabs, answers, tables. It keeps the device, and frees nothing.
///
/// It is to cudarc what memory of its own is: where the context tracks events, each call that uses it records one and
/// waits for one, and dropping it makes its stream wait for the last. A capture breaks by an event that was recorded
/// outside of it, so an engine that captures makes its views with the tracking off, as cudarc says of its memory.
#[derive(Debug)]
pub struct DeviceView<T> {
    /// Taken out by `drop` alone.
    memory: ManuallyDrop<CudaSlice<T>>,
    _device: Arc<CudaDevice>,
}

impl<T: Plain> DeviceView<T> {
    /// For cudarc's calls that read it.
    pub fn view(&self) -> CudaView<'_, T> {
        self.memory.as_view()
    }

    /// For cudarc's calls that write it.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.as_view_mut()
    }
}

impl<T> Drop for DeviceView<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not touched again.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        // Its events are destroyed, and the memory, which is the device's, is not freed.
        memory.leak();
    }
}

impl Bridge {
    /// Lends memory of cudarc's to forebay; waits until what its stream was to do before is done, the allocation among
    /// it.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for memory of another context, and for none; [`Kind::DeviceFailed`]. The memory is then
    /// freed.
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
        // SAFETY: memory of this device's context, which from here on is freed by `take_back` alone, whose caller
        // vouches that nothing names it.
        let slice = unsafe { self.device.import(address, memory.num_bytes() as u64) };
        Ok(LentSlice { memory: ManuallyDrop::new(memory), slice })
    }

    /// Memory of forebay's device for cudarc's calls, as numbers of type `T`: to be made once, since it makes events.
    /// `stream` is what cudarc orders its end by, the one that uses it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a slice of another device; [`Kind::InvalidConfig`] for one of lent memory, which
    /// [`LentSlice::view`] shows, for one that is no whole number of `T`s, or does not begin where a `T` may, and for a
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
                .hint("lent memory is seen by LentSlice::view"));
        }
        let size = size_of::<T>() as u64;
        if !slice.bytes().is_multiple_of(size) || !slice.address().is_multiple_of(size) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("a slice that is no whole elements")
                .with("bytes", slice.bytes())
                .with("bytes of an element", size));
        }
        // What cudarc makes below ends the program where it is refused: asked for once before.
        self.context.new_event(None).map_err(|error| refused(OPERATION, error))?;
        // SAFETY: so many bytes of the device's own, which live as long as it, and it is held beside them; any bits are
        // a `T`. It is leaked and never freed.
        let memory = unsafe { stream.upgrade_device_ptr(slice.address(), (slice.bytes() / size) as usize) };
        Ok(DeviceView { memory: ManuallyDrop::new(memory), _device: Arc::clone(&self.device) })
    }
}
