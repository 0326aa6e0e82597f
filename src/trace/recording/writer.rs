//! Selections as they are made, into a file that is good at every moment.

use std::path::Path;
use std::sync::Arc;

use zstd::zstd_safe::{CParameter, compress_bound};

use super::super::header::{CONTEXT_MAX, Header, MEMBERS_MAX};
use super::super::writer::gaps;
use super::bits::{Bits, no_memory, room};
use super::{Frames, RECORDING, Recording, mark};
use crate::error::{Error, Kind, Result};
use crate::os::{Appender, Faults, NoFaults};

/// zstd's fastest: on these differences the higher levels take longer and gain nothing.
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

/// Records the selections of one sequence; see the module's head. Dropped without [`finish`](Self::finish) it
/// leaves a recording that is not finished, with all its steps.
pub struct TraceWriter {
    file: Appender,
    recording: Recording,
    /// What a reader makes of it, without steps.
    header: Header,
    frames: Frames,
    own_layers: usize,
    /// Positions of all sets that there can be.
    most: u64,
    steps: u32,
    /// Those of them that are in the file.
    stored: u32,
    /// The sets of the last step, by layer, as they were emitted.
    before: Vec<u32>,
    /// Those of the step at hand.
    now: Vec<u32>,
    bits: Bits,
    added: Vec<u32>,
    dropped: Vec<u32>,
    /// The group at hand, its own count of steps left open.
    group: Vec<u8>,
    group_steps: u32,
    packed: Vec<u8>,
    compressor: zstd::bulk::Compressor<'static>,
}

impl TraceWriter {
    /// Creates the file at `path`, which must not be there, and writes the recording's beginning.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names what `recording` or `frames` contradict; [`Kind::Io`] with the path;
    /// [`Kind::OutOfMemory`]. No file is left.
    pub fn create(path: impl AsRef<Path>, recording: &Recording, frames: Frames) -> Result<TraceWriter> {
        TraceWriter::with_faults(path, recording, frames, Arc::new(NoFaults))
    }

    /// As [`TraceWriter::create`], every call to the system asking `faults` first.
    ///
    /// # Errors
    /// As there.
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

    /// Records what the query at `position` selected: for each layer that has sets of its own, in order, `k`
    /// positions as a kernel emits them: in any order, -1 where there is none. Positions come one by one,
    /// from `first_position` on, once they are accepted.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a position out of order or beyond the context, for another count than
    /// `layers` x `k`, and for a layer whose distinct positions are not min(k, position + 1), or that names
    /// one beyond its query's own: nothing is recorded, and the next call may be right.
    /// [`Kind::Exhausted`] when the recording is as large as a reader takes; [`Kind::Io`] when a group could
    /// not be written, or [`Kind::OutOfMemory`] when it could not be packed: its steps are lost, the file ends
    /// with the group before, and every later call fails.
    pub fn record(&mut self, position: u32, selected: &[i32]) -> Result<()> {
        self.file.check()?;
        let size = self.expect(position, selected.len())?;
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

    /// Writes the steps that are held, as a group of their own. What is written survives the process.
    ///
    /// # Errors
    /// [`Kind::Io`], as of [`TraceWriter::record`].
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

    /// [Flushes](TraceWriter::flush), and stores the file on the disk: it survives a loss of power. So does its
    /// name in the folder, where that can be opened and stored; one that cannot is no failure.
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        self.file.sync()
    }

    /// Ends the recording: writes what is held and the end, and stores the file. Returns the steps recorded;
    /// a recording without any is one that no reader takes.
    ///
    /// # Errors
    /// [`Kind::Io`]; the file is then readable as far as it was written, and not finished.
    pub fn finish(mut self) -> Result<u32> {
        self.flush()?;
        // An empty group is the end.
        self.pack()?;
        self.file.sync()?;
        Ok(self.steps)
    }

    /// Steps recorded, those still held included; after a failure those that are in the file.
    pub fn steps(&self) -> u32 {
        self.file.check().map_or(self.stored, |()| self.steps)
    }

    /// Bytes of the file so far.
    pub fn file_bytes(&self) -> u64 {
        self.file.length()
    }

    /// Bytes of memory held: taken at creation and never more. The compressor's own are not among them, which
    /// it takes with the first groups, up to some MB.
    pub fn memory(&self) -> u64 {
        let numbers = [&self.before, &self.now, &self.added, &self.dropped];
        let numbers: usize = numbers.iter().map(|n| n.capacity() * size_of::<u32>()).sum();
        (numbers + self.group.capacity() + self.packed.capacity()) as u64 + Bits::BYTES
    }

    /// Size of a set of the step at `position`, when that is the next and `count` positions come with it.
    fn expect(&self, position: u32, count: usize) -> Result<usize> {
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
                .at("the recording is as large as a reader takes")
                .with("steps", self.steps)
                .with("positions", self.most)
                .hint("finish it and begin another file"));
        }
        Ok(k.min(position as usize + 1))
    }

    /// Appends the step to the group, as differences from the step before.
    fn encode(&mut self, position: u32, size: usize, selected: &[i32]) -> Result<()> {
        // Sets grow by one a step until they hold k; before the first step there are none.
        let old_size = self.before.len() / self.own_layers;
        self.now.clear();
        for (layer, emitted) in selected.chunks_exact(self.recording.k as usize).enumerate() {
            let old = self.before.get(layer * old_size..(layer + 1) * old_size).unwrap_or_default();
            let start = self.now.len();
            // A negative number other than -1 comes out above every position.
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

    /// Begins a group, its own count of steps 0 so far.
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
        if json.len() as u64 > u64::from(super::super::selection::HEADER_MAX) {
            return Err(invalid("the header's texts are too long").with("bytes", json.len() as u64));
        }
        let start = [RECORDING.as_bytes(), &(json.len() as u32).to_le_bytes(), &json].concat();
        self.packed.reserve(compress_bound(start.len()));
        self.compress(&start)?;
        self.file.append(&[&self.packed])?;
        self.open_group();
        Ok(())
    }

    /// Writes the group, or the end, behind its mark.
    fn pack(&mut self) -> Result<()> {
        let group = std::mem::take(&mut self.group);
        let packed = self.compress(&group);
        self.group = group;
        // Groups count the steps before them, so none may be left out.
        packed.map_err(|e| self.file.fail(e))?;
        self.file.append(&[&mark(self.packed.len() as u32), &self.packed])?;
        self.stored = self.steps;
        Ok(())
    }

    /// Takes the file away again.
    fn discard(&mut self) {
        self.group_steps = 0;
        self.file.remove();
    }
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        // There is nobody to tell, and the file is good as it stands.
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
        // Folder, file, beginning, a mark and a frame; the second frame fails.
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
