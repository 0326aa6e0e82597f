//! Records selections as they are made, into a file that is readable at every moment.

use std::path::Path;
use std::sync::Arc;

use zstd::zstd_safe::{CParameter, compress_bound};

use super::super::header::{CONTEXT_MAX, HEADER_MAX, Header, MEMBERS_MAX};
use super::super::writer::gaps;
use super::bits::{Bits, no_memory, room};
use super::{Frames, RECORDING, Recording, mark};
use crate::error::{Error, Kind, Result};
use crate::os::{Appender, Faults, NoFaults};

/// zstd's fastest level: on these differences higher levels take longer and gain nothing.
const LEVEL: i32 = 1;

/// The most bytes of one member in the two lists of a set: positions are below 2^24 and ranks below 2^16.
const MEMBER_BYTES: usize = 4 + 3;

/// Bytes of the two counts of a set, and of a group.
const SET_COUNTS: usize = 4;
const GROUP_COUNTS: usize = 8;

fn invalid(place: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "record").at(place)
}

fn wrong(place: &'static str) -> Error {
    Error::new(Kind::OutOfRange, "record").at(place)
}

/// Records the selections of one sequence; see the module's head. If it is dropped without [`finish`](Self::finish),
/// the recording is unfinished, but has all its steps.
pub struct TraceWriter {
    file: Appender,
    recording: Recording,
    /// The header that a reader will see, without steps.
    header: Header,
    frames: Frames,
    own_layers: usize,
    /// Possible positions of all sets.
    most: u64,
    steps: u32,
    /// The steps of these that are in the file.
    stored: u32,
    /// The sets of the last step, by layer, in the kernel's order.
    before: Vec<u32>,
    /// The sets of the current step.
    now: Vec<u32>,
    bits: Bits,
    added: Vec<u32>,
    dropped: Vec<u32>,
    /// The current group, with its own count of steps still open.
    group: Vec<u8>,
    group_steps: u32,
    packed: Vec<u8>,
    compressor: zstd::bulk::Compressor<'static>,
}

impl TraceWriter {
    /// Creates the file at `path`, which must not exist, and writes the recording's beginning.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names an invalid field of `recording` or `frames`; [`Kind::Io`] with the path;
    /// [`Kind::OutOfMemory`]. No file remains.
    pub fn create(path: impl AsRef<Path>, recording: &Recording, frames: Frames) -> Result<TraceWriter> {
        TraceWriter::with_faults(path, recording, frames, Arc::new(NoFaults))
    }

    /// As [`TraceWriter::create`]; `faults` is asked before every system call.
    ///
    /// # Errors
    /// As [`TraceWriter::create`].
    pub fn with_faults(
        path: impl AsRef<Path>,
        recording: &Recording,
        frames: Frames,
        faults: Arc<dyn Faults>,
    ) -> Result<TraceWriter> {
        recording.check().map_err(|e| {
            let error = invalid("").at(e.place().to_owned()).hint("correct the named field");
            e.numbers().iter().fold(error, |error, (name, value)| error.with(name, *value))
        })?;
        if frames.steps == 0 || frames.bytes == 0 || frames.bytes > Frames::BYTES_MAX {
            return Err(invalid("frames: a group of no steps or bytes, or of too many")
                .with("steps", frames.steps)
                .with("bytes", frames.bytes)
                .with("most", Frames::BYTES_MAX));
        }
        let (own_layers, k) = (recording.own_layers() as usize, recording.k as usize);
        let step = own_layers * (SET_COUNTS + MEMBER_BYTES * k);
        let group = room(GROUP_COUNTS + frames.bytes as usize + step)?;
        let mut compressor = zstd::bulk::Compressor::new(LEVEL).map_err(|_| no_memory())?;
        compressor.set_parameter(CParameter::ChecksumFlag(true)).map_err(|_| no_memory())?;
        let mut writer = TraceWriter {
            header: recording.header(0),
            recording: recording.clone(),
            frames,
            own_layers,
            most: MEMBERS_MAX,
            steps: 0,
            stored: 0,
            before: room(own_layers * k)?,
            now: room(own_layers * k)?,
            bits: Bits::new()?,
            added: room(k)?,
            dropped: room(k)?,
            packed: room(compress_bound(group.capacity()))?,
            group,
            group_steps: 0,
            compressor,
            file: Appender::create(path.as_ref(), faults)?,
        };
        match writer.begin() {
            Ok(()) => Ok(writer),
            Err(e) => {
                writer.discard();
                Err(e)
            }
        }
    }

    /// Records the selection of the query at `position`: for each layer with sets of its own, in order, `k`
    /// positions as a kernel returns them, in any order, with -1 for no position. Positions are recorded one by one,
    /// from `first_position` on, once they are accepted.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a position out of order or beyond the context, for a length other than `layers` x `k`,
    /// and for a layer whose distinct positions are not min(k, position + 1) or include one beyond its query's own.
    /// Then nothing is recorded, and the next call may succeed. [`Kind::Exhausted`] if the recording has reached the
    /// largest size that a reader accepts. [`Kind::Io`] if a group could not be written, or [`Kind::OutOfMemory`] if
    /// it could not be packed: its steps are lost, the file ends with the previous group, and every later call fails.
    pub fn record(&mut self, position: u32, selected: &[i32]) -> Result<()> {
        self.file.check()?;
        let size = self.check_step(position, selected.len())?;
        let start = self.group.len();
        let encoded = self.encode(position, size, selected);
        if encoded.is_err() {
            self.group.truncate(start);
            return encoded;
        }
        std::mem::swap(&mut self.before, &mut self.now);
        self.steps += 1;
        self.group_steps += 1;
        if self.group_steps >= self.frames.steps || self.group.len() >= self.frames.bytes as usize {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the held steps as a group. Written groups survive the process.
    ///
    /// # Errors
    /// [`Kind::Io`], as for [`TraceWriter::record`].
    pub fn flush(&mut self) -> Result<()> {
        self.file.check()?;
        if self.group_steps == 0 {
            return Ok(());
        }
        let counts = self.group.iter_mut().skip(size_of::<u32>());
        counts.zip(self.group_steps.to_le_bytes()).for_each(|(place, byte)| *place = byte);
        let written = self.pack();
        self.open_group();
        written
    }

    /// [Flushes](TraceWriter::flush), and syncs the file to disk, so that it survives a loss of power. The folder is
    /// synced as well; if it cannot be opened or synced, that is not an error.
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        self.file.sync()
    }

    /// Ends the recording: writes the held steps and the end, and syncs the file. Returns the number of recorded
    /// steps; no reader accepts a recording without steps.
    ///
    /// # Errors
    /// [`Kind::Io`]; the file is then readable as far as it was written, but unfinished.
    pub fn finish(mut self) -> Result<u32> {
        self.flush()?;
        // An empty group is the end.
        self.pack()?;
        self.file.sync()?;
        Ok(self.steps)
    }

    /// Recorded steps, including those still held; after a failure, those that are in the file.
    pub fn steps(&self) -> u32 {
        self.file.check().map_or(self.stored, |()| self.steps)
    }

    /// Bytes of the file so far.
    pub fn file_bytes(&self) -> u64 {
        self.file.length()
    }

    /// Bytes of memory held: taken at creation and never more. The compressor's own memory is not included; it
    /// allocates up to some MB with the first groups.
    pub fn memory(&self) -> u64 {
        let numbers = [&self.before, &self.now, &self.added, &self.dropped];
        let numbers: usize = numbers.iter().map(|n| n.capacity() * size_of::<u32>()).sum();
        (numbers + self.group.capacity() + self.packed.capacity()) as u64 + Bits::BYTES
    }

    /// The size of a set of the step at `position`, if that is the next and `count` positions come with it.
    fn check_step(&self, position: u32, count: usize) -> Result<usize> {
        let wanted = self.recording.first_position.saturating_add(self.steps);
        if position != wanted {
            return Err(wrong("the position is not the next one")
                .with("position", position)
                .with("wanted", wanted)
                .hint("record accepted positions, one by one"));
        }
        if position >= self.recording.end().min(CONTEXT_MAX) {
            return Err(wrong("the position lies beyond the context")
                .with("position", position)
                .with("context", self.recording.end()));
        }
        let k = self.recording.k as usize;
        if count != self.own_layers * k {
            return Err(wrong("the selection is not of layers x k positions")
                .with("count", count as u64)
                .with("layers", self.own_layers as u64)
                .with("k", k as u64));
        }
        if self.header.members_before(self.steps + 1) > self.most {
            return Err(Error::new(Kind::Exhausted, "record")
                .at("the recording has reached the largest size that a reader accepts")
                .with("steps", self.steps)
                .with("positions", self.most)
                .hint("finish it and begin another file"));
        }
        Ok(k.min(position as usize + 1))
    }

    /// Appends the step to the group, as differences from the previous step.
    fn encode(&mut self, position: u32, size: usize, selected: &[i32]) -> Result<()> {
        // Sets grow by one position per step until they have k; before the first step they are empty.
        let old_size = self.before.len() / self.own_layers;
        self.now.clear();
        for (layer, emitted) in selected.chunks_exact(self.recording.k as usize).enumerate() {
            let old = self.before.get(layer * old_size..(layer + 1) * old_size).unwrap_or_default();
            let start = self.now.len();
            // A negative number other than -1 becomes larger than every position.
            let emitted = emitted.iter().filter(|p| **p != -1).map(|p| p.cast_unsigned());
            let beyond = self.bits.fill(old, emitted, position, &mut self.now).err();
            let distinct = self.bits.difference(position, &mut self.added, &mut self.dropped);
            if let Some(beyond) = beyond {
                return Err(wrong("a selected position lies beyond its query's own")
                    .with("layer", layer as u64)
                    .with("selected", beyond)
                    .with("position", position));
            }
            if distinct != size || self.now.len() - start != size {
                return Err(wrong("a layer selected too few positions, or too many")
                    .with("layer", layer as u64)
                    .with("distinct", distinct as u64)
                    .with("wanted", size as u64)
                    .with("position", position)
                    .hint("pass min(k, position + 1) distinct positions of each layer, the rest -1"));
            }
            // Both counts are at most k, which the check of the recording keeps within 16 bits.
            self.group.extend_from_slice(&(self.added.len() as u16).to_le_bytes());
            self.group.extend_from_slice(&(self.dropped.len() as u16).to_le_bytes());
            gaps(&self.added, &mut self.group);
            gaps(&self.dropped, &mut self.group);
        }
        Ok(())
    }

    /// Begins a group, with its own count of steps at 0.
    fn open_group(&mut self) {
        self.group_steps = 0;
        self.group.clear();
        self.group.extend_from_slice(&self.steps.to_le_bytes());
        self.group.extend_from_slice(&0_u32.to_le_bytes());
    }

    /// Packs `bytes` into one frame.
    fn compress(&mut self, bytes: &[u8]) -> Result<()> {
        self.packed.clear();
        self.compressor.compress_to_buffer(bytes, &mut self.packed).map_err(|_| no_memory())?;
        Ok(())
    }

    /// The first frame.
    fn begin(&mut self) -> Result<()> {
        let json = serde_json::to_vec(&self.recording)
            .map_err(|e| Error::new(Kind::Internal, "record").at(e.to_string()))?;
        if json.len() as u64 > u64::from(HEADER_MAX) {
            return Err(invalid("the header's texts are too long").with("bytes", json.len() as u64));
        }
        let start = [RECORDING.as_bytes(), &(json.len() as u32).to_le_bytes(), &json].concat();
        self.packed.reserve(compress_bound(start.len()));
        self.compress(&start)?;
        self.file.append(&[&self.packed])?;
        self.open_group();
        Ok(())
    }

    /// Writes the group, or the end, after its mark.
    fn pack(&mut self) -> Result<()> {
        let group = std::mem::take(&mut self.group);
        let packed = self.compress(&group);
        self.group = group;
        // Groups count the steps before them, so none may be missing.
        packed.map_err(|e| self.file.fail(e))?;
        self.file.append(&[&mark(self.packed.len() as u32), &self.packed])?;
        self.stored = self.steps;
        Ok(())
    }

    /// Deletes the file.
    fn discard(&mut self) {
        self.group_steps = 0;
        self.file.remove();
    }
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        // An error cannot be returned here, and the file is valid up to the last group.
        let _ = self.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::Inject;
    use crate::trace::SelectionTrace;

    /// One layer of k 2 from position 5 on, groups of two steps, in a file of the test's own.
    fn writer(name: &str, faults: Arc<dyn Faults>) -> (std::path::PathBuf, TraceWriter) {
        let path = std::env::temp_dir().join(format!("forebay-{}-writer-{name}", std::process::id()));
        let recording =
            Recording { layers: 1, k: 2, first_position: 5, decode_start: 5, ..Recording::default() };
        let frames = Frames { steps: 2, ..Frames::default() };
        let writer = TraceWriter::with_faults(&path, &recording, frames, faults).unwrap();
        (path, writer)
    }

    #[test]
    fn a_recording_as_large_as_a_reader_takes_is_full_and_good() {
        let (path, mut writer) = writer("full", Arc::new(NoFaults));
        assert_eq!(writer.most, MEMBERS_MAX);
        writer.most = 11;
        (5..10).for_each(|position| writer.record(position, &[0, position as i32]).unwrap());
        for _ in 0..2 {
            let e = writer.record(10, &[0, 1]).unwrap_err();
            assert_eq!(
                (e.kind(), e.number("steps"), e.number("positions")),
                (Kind::Exhausted, Some(5), Some(11))
            );
        }
        assert_eq!(writer.finish(), Ok(5));
        let read = SelectionTrace::read(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read.unwrap().members(), 10);
    }

    #[test]
    fn steps_are_those_recorded_and_after_a_failure_those_in_the_file() {
        // Folder, file, start, a mark and a frame; the second frame fails.
        let (path, mut writer) = writer("lost", Arc::new(Inject::nth(6, libc::ENOSPC)));
        for position in 5..8 {
            writer.record(position, &[0, 1]).unwrap();
            assert_eq!(writer.steps(), position - 4);
        }
        let e = writer.record(8, &[0, 1]).unwrap_err();
        assert_eq!((e.kind(), writer.steps()), (Kind::Io, 2));
        let read = SelectionTrace::read(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read.unwrap().header().steps, 2);
    }
}
