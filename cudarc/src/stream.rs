//! Streams of the engine's that forebay's device knows.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use forebay::Result;
use forebay::device::Stream;
use forebay::device::cuda::CudaDevice;

use crate::{Borrowed, lock};

/// A stream of cudarc's in forebay's calls, until the last of those who borrow it goes: then the device waits for what
/// was enqueued on it, and knows it no more.
#[derive(Debug)]
pub struct BorrowedStream {
    device: Arc<CudaDevice>,
    borrowed: Arc<Borrowed>,
    stream: Arc<CudaStream>,
    known: Stream,
}

impl BorrowedStream {
    pub(crate) fn new(
        device: &Arc<CudaDevice>,
        borrowed: &Arc<Borrowed>,
        stream: &Arc<CudaStream>,
    ) -> Result<BorrowedStream> {
        let mut count = lock(borrowed);
        // SAFETY: a stream of cudarc's, which its `Arc` keeps: this value has one until the device has given the stream
        // back, and for ever where it does not.
        let known = unsafe { device.borrow_stream(stream.cu_stream() as u64) }?;
        *count.entry(known.0).or_default() += 1;
        drop(count);
        let (device, borrowed, stream) = (Arc::clone(device), Arc::clone(borrowed), Arc::clone(stream));
        Ok(BorrowedStream { device, borrowed, stream, known })
    }

    /// What forebay's calls take.
    pub fn stream(&self) -> Stream {
        self.known
    }

    /// What it is to cudarc.
    pub fn cuda(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl Drop for BorrowedStream {
    fn drop(&mut self) {
        let mut count = lock(&self.borrowed);
        let left = count.get_mut(&self.known.0).map(|count| {
            *count -= 1;
            *count
        });
        if left != Some(0) {
            return;
        }
        count.remove(&self.known.0);
        if self.device.return_stream(self.known).is_err() {
            // One that is being captured, or a device that failed: it knows the stream on, which therefore stays.
            std::mem::forget(Arc::clone(&self.stream));
        }
    }
}
