//! Records requests as they arrive, as Mooncake lines, which the common tools read.
//!
//! Whole lines are written, several in one append, and after a failure the file ends with the last line written
//! whole. Only a process killed during a write may leave a part of a line. A reader refuses it, and it has to
//! be removed. All other input that a reader would refuse is refused before it is written. A line has
//! `block_size` if a block does not have 512 tokens.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use super::parse::MOONCAKE_BLOCK;
use super::{LINE_MAX, REFERENCES_MAX, REQUESTS_MAX};
use crate::error::{Error, Kind, Result};
use crate::os::{Appender, Faults, NoFaults};

/// Lines are held until they reach this many bytes.
const BATCH: usize = 1 << 16;

/// The most bytes of a block id and its comma, and of the rest of a line.
const ID_BYTES: usize = 22;
const LINE_BYTES: usize = 160;

/// The latest time that a JSON number represents exactly.
const MILLISECONDS_MAX: u64 = 1 << 53;

/// A request as it arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival<'a> {
    /// Arrival, in milliseconds since the recording's start.
    pub milliseconds: u64,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens generated; 0 if unknown when the request is recorded.
    pub output_tokens: u32,
    /// Ids of the prompt's blocks from its beginning; the last block may be partial. An id names the block
    /// and everything before it.
    pub blocks: &'a [u64],
}

/// Records the requests of a service. If it is dropped without [`finish`](Self::finish), all its lines are written and
/// form a valid trace.
///
/// It holds 64 KiB of lines, and 30 bytes for each block of the longest request.
pub struct RequestWriter {
    file: Appender,
    block_tokens: u32,
    held: Vec<u8>,
    sorted: Vec<u64>,
    last: u64,
    requests: u64,
    /// The requests of these that are in the file.
    stored: u64,
    references: u64,
}

fn wrong(place: &'static str) -> Error {
    Error::new(Kind::OutOfRange, "record").at(place)
}

impl RequestWriter {
    /// Creates the file at `path`, which must not exist, for blocks of `block_tokens` tokens.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for blocks of 0 tokens; [`Kind::Io`] with the path.
    pub fn create(path: impl AsRef<Path>, block_tokens: u32) -> Result<RequestWriter> {
        RequestWriter::with_faults(path, block_tokens, Arc::new(NoFaults))
    }

    /// As [`RequestWriter::create`]; `faults` is asked before every system call.
    ///
    /// # Errors
    /// As [`RequestWriter::create`].
    pub fn with_faults(
        path: impl AsRef<Path>,
        block_tokens: u32,
        faults: Arc<dyn Faults>,
    ) -> Result<RequestWriter> {
        if block_tokens == 0 {
            return Err(Error::new(Kind::InvalidConfig, "record").at("block_tokens").with("value", 0_u32));
        }
        Ok(RequestWriter {
            file: Appender::create(path.as_ref(), faults)?,
            block_tokens,
            held: Vec::new(),
            sorted: Vec::new(),
            last: 0,
            requests: 0,
            stored: 0,
            references: 0,
        })
    }

    /// Records one request. Requests are recorded in order of arrival: an engine that records the final
    /// output length, and finishes requests in another order, must hold them until their turn.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an earlier time than the last, more blocks than the prompt has, a block that repeats,
    /// and a line that no reader accepts. Then nothing is recorded, and the next call may succeed. [`Kind::Exhausted`]
    /// if the trace has reached the largest size that a reader accepts. [`Kind::Io`] if lines could not be written:
    /// the held lines are lost, the file ends with the previous line, and every later call fails.
    pub fn record(&mut self, request: &Arrival<'_>) -> Result<()> {
        self.file.check()?;
        self.check_order(request)?;
        let full = |_| Error::new(Kind::OutOfMemory, "record").at("a line").hint("free memory");
        self.held.try_reserve_exact(LINE_BYTES + ID_BYTES * request.blocks.len()).map_err(full)?;
        let start = self.held.len();
        let written = self.line(request);
        let length = self.held.len() - start;
        if written.is_err() || length > LINE_MAX {
            self.held.truncate(start);
            return Err(wrong("the line is longer than a reader accepts").with("bytes", length as u64));
        }
        self.last = request.milliseconds;
        self.requests += 1;
        self.references += request.blocks.len() as u64;
        if self.held.len() >= BATCH {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the held lines. Written lines survive the process.
    ///
    /// # Errors
    /// [`Kind::Io`], as for [`RequestWriter::record`].
    pub fn flush(&mut self) -> Result<()> {
        let written = self.file.append(&[&self.held]);
        self.held.clear();
        written?;
        self.stored = self.requests;
        Ok(())
    }

    /// [Flushes](RequestWriter::flush), and syncs the file to disk, so that it survives a loss of power. The folder is
    /// synced as well; if it cannot be opened or synced, that is not an error.
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        self.file.sync()
    }

    /// Ends the trace: writes the held lines and syncs the file. Returns the number of recorded requests; without
    /// requests the file is empty, and no reader accepts it.
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn finish(mut self) -> Result<u64> {
        self.sync()?;
        Ok(self.requests)
    }

    /// Recorded requests, including those still held; after a failure, those that are in the file.
    pub fn requests(&self) -> u64 {
        self.file.check().map_or(self.stored, |()| self.requests)
    }

    /// Refuses what a reader would refuse.
    fn check_order(&mut self, request: &Arrival<'_>) -> Result<()> {
        let Arrival { milliseconds, input_tokens, blocks, .. } = *request;
        if milliseconds < self.last || milliseconds > MILLISECONDS_MAX {
            return Err(wrong("the time is earlier than the one before, or too late")
                .with("milliseconds", milliseconds)
                .with("last", self.last)
                .hint("record requests in the order of their arrival"));
        }
        let most = u64::from(input_tokens.div_ceil(self.block_tokens));
        if blocks.len() as u64 > most {
            return Err(wrong("more blocks than the prompt has")
                .with("blocks", blocks.len() as u64)
                .with("most", most)
                .with("input tokens", input_tokens)
                .with("block tokens", self.block_tokens));
        }
        let full = |_| Error::new(Kind::OutOfMemory, "record").at("a request's blocks").hint("free memory");
        self.sorted.clear();
        self.sorted.try_reserve_exact(blocks.len()).map_err(full)?;
        self.sorted.extend_from_slice(blocks);
        self.sorted.sort_unstable();
        if let Some([id, _]) = self.sorted.array_windows().find(|[a, b]| a == b) {
            return Err(wrong("a block repeats inside the request").with("id", *id));
        }
        if self.requests >= REQUESTS_MAX || self.references + blocks.len() as u64 > REFERENCES_MAX {
            return Err(Error::new(Kind::Exhausted, "record")
                .at("the trace has reached the largest size that a reader accepts")
                .with("requests", self.requests)
                .with("blocks", self.references)
                .hint("finish it and begin another file"));
        }
        Ok(())
    }

    /// Appends the line to the held ones.
    fn line(&mut self, request: &Arrival<'_>) -> std::io::Result<()> {
        let Arrival { milliseconds, input_tokens, output_tokens, blocks } = *request;
        let out = &mut self.held;
        write!(out, "{{\"timestamp\": {milliseconds}, \"input_length\": {input_tokens}, ")?;
        write!(out, "\"output_length\": {output_tokens}, ")?;
        if self.block_tokens != MOONCAKE_BLOCK {
            write!(out, "\"block_size\": {}, ", self.block_tokens)?;
        }
        out.extend_from_slice(b"\"hash_ids\": [");
        for (i, id) in blocks.iter().enumerate() {
            write!(out, "{}{id}", if i == 0 { "" } else { ", " })?;
        }
        out.extend_from_slice(b"]}\n");
        Ok(())
    }
}

impl Drop for RequestWriter {
    fn drop(&mut self) {
        // An error cannot be returned here, and the file is valid up to the last line written.
        let _ = self.flush();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::{Options, RequestTrace};
    use super::*;
    use crate::os::{Call, Inject};

    /// A path of one test's own; the file is removed at the end.
    struct Fresh(PathBuf);

    impl Fresh {
        fn new() -> Fresh {
            static NUMBER: AtomicU64 = AtomicU64::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            Fresh(std::env::temp_dir().join(format!("forebay-{}-requests-{number}", std::process::id())))
        }
    }

    impl Drop for Fresh {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn arrival(milliseconds: u64, input_tokens: u32, blocks: &[u64]) -> Arrival<'_> {
        Arrival { milliseconds, input_tokens, output_tokens: 3, blocks }
    }

    /// Requests with `i % 50` blocks of 16 tokens, the last one partial.
    fn many(writer: &mut RequestWriter, requests: u64) -> Result<()> {
        for i in writer.requests()..requests {
            let blocks: Vec<u64> = (0..i % 50).map(|b| b << (i % 40)).collect();
            let tokens = (16 * blocks.len() as u32).saturating_sub(5);
            writer.record(&arrival(i / 3, tokens, &blocks))?;
        }
        Ok(())
    }

    #[test]
    fn recorded_requests_are_read_back_and_published_blocks_are_left_out() {
        for (block_tokens, said) in [(16, true), (512, false)] {
            let path = Fresh::new();
            let mut writer = RequestWriter::create(&path.0, block_tokens).unwrap();
            writer.record(&arrival(0, 3 * block_tokens, &[7, u64::MAX, 9])).unwrap();
            writer.record(&arrival(4, 0, &[])).unwrap();
            assert_eq!(fs::read(&path.0).unwrap(), b"", "lines are held");
            writer.flush().unwrap();
            assert_eq!(RequestTrace::read(&path.0, &Options::default()).unwrap().requests(), 2);
            writer.record(&arrival(4, 1, &[7])).unwrap();
            assert_eq!(writer.finish(), Ok(3));
            let trace = RequestTrace::read(&path.0, &Options::default()).unwrap();
            let blocks: Vec<&[u32]> = (0..3).map(|i| trace.blocks(i)).collect();
            assert_eq!((blocks, trace.block_tokens()), (vec![&[0, 1, 2][..], &[], &[0]], Some(block_tokens)));
            assert_eq!((trace.input_tokens(2), trace.output_tokens(2)), (1, 3));
            let text = fs::read_to_string(&path.0).unwrap();
            assert_eq!(text.lines().filter(|line| line.contains("\"block_size\": 16, ")).count() == 3, said);
        }
    }

    #[test]
    fn content_that_a_reader_refuses_is_refused_before_it_is_written() {
        let path = Fresh::new();
        assert_eq!(RequestWriter::create(&path.0, 0).err().unwrap().kind(), Kind::InvalidConfig);
        let mut writer = RequestWriter::create(&path.0, 16).unwrap();
        writer.record(&arrival(5, 40, &[1, 2, 3])).unwrap();
        for (request, what) in [
            (arrival(4, 16, &[1]), "earlier"),
            (arrival(MILLISECONDS_MAX + 1, 16, &[1]), "too late"),
            (arrival(5, 32, &[1, 2, 3]), "more blocks"),
            (arrival(5, 0, &[1]), "more blocks"),
            (arrival(5, 64, &[3, 1, 3]), "repeats"),
        ] {
            let e = writer.record(&request).unwrap_err();
            assert!(e.kind() == Kind::OutOfRange && e.place().contains(what), "{e}");
        }
        let long: Vec<u64> = (0..LINE_MAX as u64 / 20).map(|b| u64::MAX - b).collect();
        let e = writer.record(&arrival(5, u32::MAX, &long)).unwrap_err();
        assert!(e.place().contains("longer than a reader accepts"), "{e}");
        drop(writer);
        let trace = RequestTrace::read(&path.0, &Options::default()).unwrap();
        assert_eq!((trace.requests(), trace.references()), (1, &[0, 1, 2][..]));
        assert!(RequestWriter::create(&path.0, 16).err().unwrap().place().ends_with("File exists"));
    }

    #[test]
    fn after_any_failed_call_the_file_ends_with_a_whole_line() {
        let through = |faults: Arc<dyn Faults>| {
            let path = Fresh::new();
            let ends = || {
                let mut writer = RequestWriter::with_faults(&path.0, 16, faults)?;
                if let Err(e) = many(&mut writer, 3000).and_then(|()| writer.sync()) {
                    let again = [writer.record(&arrival(0, 0, &[])), writer.flush(), writer.sync()];
                    assert!(again.iter().all(|again| again.as_ref() == Err(&e)), "it stays failed");
                    let lines = fs::read_to_string(&path.0).unwrap().lines().count();
                    assert_eq!(writer.requests(), lines as u64);
                    return writer.finish();
                }
                writer.finish()
            };
            (ends(), fs::read(&path.0).ok())
        };
        let counted = Arc::new(Inject::nth(u64::MAX, 0));
        let (ended, whole) = through(counted.clone());
        let whole = whole.unwrap();
        assert_eq!(ended, Ok(3000));
        assert!(counted.count() > 10, "{}", counted.count());
        // The first call opens the folder and the second last stores it; the file counts.
        for n in 0..counted.count() {
            let (ended, file) = through(Arc::new(Inject::nth(n, libc::ENOSPC)));
            if [0, counted.count() - 2].contains(&n) {
                assert_eq!((ended, file), (Ok(3000), Some(whole.clone())), "call {n}");
                continue;
            }
            assert_eq!(ended.unwrap_err().kind(), Kind::Io);
            let file = file.unwrap_or_default();
            assert!(whole.starts_with(&file) && file.last().is_none_or(|byte| *byte == b'\n'), "call {n}");
        }
        /// Writes a part of the third batch, then fails to write more.
        #[derive(Debug)]
        struct Short(AtomicU64);
        impl Faults for Short {
            fn before(&self, call: Call) -> Option<i32> {
                (call == Call::Write && self.0.load(Ordering::Relaxed) == 3).then_some(libc::ENOSPC)
            }
            fn passes(&self, bytes: usize) -> usize {
                if self.0.fetch_add(1, Ordering::Relaxed) == 2 { 777 } else { bytes }
            }
        }
        let file = through(Arc::new(Short(AtomicU64::new(0)))).1.unwrap();
        assert!(whole.starts_with(&file) && file.ends_with(b"\n") && file.len() > 2 * BATCH);
        assert!(RequestTrace::from_bytes(&file, &Options::default()).is_ok());
    }

    #[test]
    fn a_trace_as_large_as_a_reader_takes_is_full_and_good() {
        let path = Fresh::new();
        let mut writer = RequestWriter::create(&path.0, 16).unwrap();
        writer.record(&arrival(0, 32, &[1, 2])).unwrap();
        writer.references = REFERENCES_MAX - 1;
        let full = |writer: &mut RequestWriter, blocks: &[u64]| {
            let e = writer.record(&arrival(0, 32, blocks)).unwrap_err();
            assert_eq!(e.kind(), Kind::Exhausted, "{e}");
        };
        full(&mut writer, &[3, 4]);
        writer.record(&arrival(0, 32, &[3])).unwrap();
        full(&mut writer, &[5]);
        writer.requests = REQUESTS_MAX;
        full(&mut writer, &[]);
        writer.finish().unwrap();
        assert_eq!(RequestTrace::read(&path.0, &Options::default()).unwrap().requests(), 2);
    }

    #[test]
    fn the_writers_memory_does_not_grow() {
        let path = Fresh::new();
        let mut writer = RequestWriter::create(&path.0, 16).unwrap();
        many(&mut writer, 500).unwrap();
        let held = |writer: &RequestWriter| (writer.held.capacity(), writer.sorted.capacity());
        let before = held(&writer);
        many(&mut writer, 20_000).unwrap();
        let most = BATCH + LINE_BYTES + ID_BYTES * 49;
        assert!(held(&writer).0 <= most && held(&writer).1 == before.1, "{:?}", held(&writer));
        assert!(writer.file.length() > 2_000_000);
    }
}
