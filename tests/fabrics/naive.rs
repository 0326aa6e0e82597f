//! A receiver as engines have built them: the control of the tests that use pages again. It sees the frames of a
//! receiver that it is wrapped around, and has pages of its own. It stores what a notice names, whatever its fence and
//! digests say, and takes a request as whole when it has counted so many rows.

use forebay::Result;
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric};
use forebay::transfer::receiver::Where;
use forebay::transfer::{Fence, Run, Store};

use crate::ranks::{LAYERS, Pages, TOKENS, rows, told};

pub struct Naive<F> {
    pub inner: F,
    pages: Pages,
    /// Whose rows the pages are for, and how many have come.
    request: u64,
    rows: u32,
    /// Rows of other requests that it has stored.
    pub foreign: u32,
    /// The requests that it took as whole, and how many of their rows were wrong then.
    pub whole: Vec<(u64, usize)>,
}

impl<F: ReceiverFabric> Naive<F> {
    pub fn new(inner: F) -> Naive<F> {
        Naive { inner, pages: Pages::default(), request: 0, rows: 0, foreign: 0, whole: Vec::new() }
    }

    /// The pages are for another request from now on.
    pub const fn grant(&mut self, request: u64) {
        (self.request, self.rows) = (request, 0);
    }

    fn take(&mut self, link: u32, frame: &[u8]) {
        told(frame, |fence, at, run| {
            let mut bytes = vec![0; run.total() as usize];
            if self.inner.fetch(link, fence, at, run, &mut bytes).is_ok() {
                self.pages.store(fence, run, &bytes).unwrap();
                self.rows += run.tokens;
                if bytes != rows(self.request, run.layer, run.token..run.token + run.tokens) {
                    self.foreign += run.tokens;
                }
            }
            if self.rows == LAYERS * TOKENS {
                self.whole.push((self.request, self.pages.wrong(self.request)));
                self.rows = 0;
            }
        });
    }
}

impl<F: ReceiverFabric> Fabric for Naive<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        let happened = self.inner.poll(frame)?;
        if let Some(Happened::Frame { link }) = happened {
            self.take(link, frame);
        }
        Ok(happened)
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl<F: ReceiverFabric> ReceiverFabric for Naive<F> {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.inner.send(link, frame)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.fetch(link, fence, at, run, into)
    }

    fn holds(&mut self, link: u32) -> bool {
        self.inner.holds(link)
    }
}
