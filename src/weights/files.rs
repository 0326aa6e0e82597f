//! Filling the windows from safetensors files, for weights that an engine uses as they are stored.
//!
//! A file is 8 bytes of length, a JSON header of that length, and the tensors' bytes
//! (<https://github.com/huggingface/safetensors>, "Format"). The crate `safetensors` reads the header; the bytes are
//! read by `pread` at their offsets, and only those that this rank owns. So n ranks read each byte once together, and a
//! file that is cut off or that shrinks while it is read is an error, where a mapping of it would end the process.
//!
//! **What it does not do.** It converts nothing: a tensor's bytes in the file are those of the plan. An engine that
//! absorbs, fuses or quantises weights fills from its own buffers ([`Windows::fill`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::fill::{Fills, chunks, not_captured, within};
use super::window::{Stored, Windows, refused};
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::fallible;
use crate::os::io_text;
use crate::sync::Arc;
use crate::text::echo;

const OPERATION: &str = "read weights";
/// The longest header, as the format says.
const HEADER_MAX: u64 = 100_000_000;

/// Tensors in safetensors files.
#[derive(Debug)]
pub struct Files {
    files: Vec<(PathBuf, File)>,
    /// By name: the file, and the bytes in it.
    tensors: HashMap<String, (usize, Range<u64>)>,
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    let kind = if error.kind() == io::ErrorKind::UnexpectedEof { Kind::BadFormat } else { Kind::Io };
    let error = Error::new(kind, OPERATION).at(format!("{}: {}", echo(path.display()), io_text(error)));
    match kind {
        Kind::BadFormat => error.hint("the file is cut off: fetch it again"),
        _ => error,
    }
}

fn foreign(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::new(Kind::BadFormat, OPERATION)
        .at(format!("{}: {}", echo(path.display()), echo(what)))
        .hint("pass whole safetensors files")
}

/// The header of a file, and where its tensors' bytes begin.
fn header(path: &Path, file: &File) -> Result<(Metadata, u64)> {
    let unreadable = |error: io::Error| unreadable(path, &error);
    let length = file.metadata().map_err(unreadable)?.len();
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(unreadable)?;
    let bytes = u64::from_le_bytes(prefix);
    if bytes > HEADER_MAX || bytes > length {
        return Err(foreign(path, "a header longer than the file or the format allows").with("bytes", bytes));
    }
    let mut text = fallible::filled(bytes as usize, 0, OPERATION, "a file's header")?;
    file.read_exact_at(&mut text, 8).map_err(unreadable)?;
    // Reading it checks that the tensors follow each other, each as long as its shape and dtype say.
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| foreign(path, error))?;
    let begin = 8 + bytes;
    let planned = begin.saturating_add(metadata.data_len() as u64);
    if planned != length {
        return Err(foreign(path, "not as long as its header says")
            .with("bytes", length)
            .with("planned", planned));
    }
    Ok((metadata, begin))
}

impl Files {
    /// Opens files and reads their headers.
    ///
    /// # Errors
    /// [`Kind::Io`] with the path; [`Kind::BadFormat`] for a file that is cut off or no safetensors file, and for a
    /// tensor that is in two of them.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Files> {
        let mut all = Files { files: Vec::new(), tensors: HashMap::new() };
        for path in paths {
            let path = path.as_ref();
            let file = File::open(path).map_err(|error| unreadable(path, &error))?;
            let (metadata, begin) = header(path, &file)?;
            for name in metadata.offset_keys() {
                let Some(info) = metadata.info(&name) else { continue };
                let (from, to) = info.data_offsets;
                match all.tensors.entry(name) {
                    Entry::Occupied(entry) => {
                        return Err(foreign(path, format!("{} is in another file too", entry.key())));
                    }
                    Entry::Vacant(entry) => {
                        entry.insert((all.files.len(), begin + from as u64..begin + to as u64));
                    }
                }
            }
            all.files.push((path.to_owned(), file));
        }
        Ok(all)
    }

    /// Where a tensor of a layer is, of the bytes that the plan says.
    fn find(&self, layer: usize, name: &str, bytes: u64) -> Result<(&Path, &File, u64)> {
        let found = self.tensors.get(name).and_then(|(file, at)| Some((self.files.get(*file)?, at)));
        let wrong = |what| refused(Kind::BadFormat, layer, format!("{}: {what}", echo(name)));
        let Some(((path, file), at)) = found else {
            return Err(wrong("none of the files has it").hint("pass the files of the planned model"));
        };
        if at.end - at.start != bytes {
            return Err(wrong("its bytes in the file")
                .with("bytes", at.end - at.start)
                .with("planned", bytes)
                .hint("pass the files of the planned model"));
        }
        Ok((path, file, at.start))
    }
}

/// As [`Windows::fill_from`], for the layers of these indices.
pub(super) fn fill_from(
    to: &mut impl Fills,
    files: &Files,
    layers: impl Iterator<Item = usize>,
    stream: Stream,
) -> Result<()> {
    let mut all = Vec::new();
    for layer in layers {
        let (ordinal, plan, Stored { pages, slice, .. }) = to.fillable(layer)?;
        not_captured(to, layer, stream)?;
        for tensor in plan.layout.tensors() {
            files.find(layer, &tensor.name, tensor.bytes)?;
        }
        all.push((ordinal, plan.clone(), pages.clone(), *slice));
    }
    let (device, grain) = (Arc::clone(to.device()), to.plan().grain());
    let (map, staged) = to.staged()?;
    let mut bytes = fallible::filled(staged.bytes() as usize, 0, OPERATION, "bytes of files")?;
    for (ordinal, plan, pages, slice) in all {
        let tensors = 0..plan.layout.tensors().len();
        // From its first copy on until its last the layer is neither the old one nor the new one.
        tensors.clone().for_each(|tensor| to.note_filled(ordinal, tensor, false));
        for (begin, part) in chunks(&pages, slice, grain, staged.bytes())? {
            for tensor in plan.layout.tensors() {
                let Some(place) = within(tensor, &(begin..begin + part.bytes())) else { continue };
                let (path, file, at) = files.find(plan.layer, &tensor.name, tensor.bytes)?;
                let read = bytes.get_mut(..(place.end - place.start) as usize).unwrap_or_default();
                let failed = |error: io::Error| unreadable(path, &error);
                file.read_exact_at(read, at + (place.start - tensor.offset)).map_err(failed)?;
                map.copy_in(place.start - begin, read)?;
            }
            device.copy(stream, staged.part(0, part.bytes())?, part)?;
            to.uses(stream);
            to.drain(stream)?;
        }
        tensors.for_each(|tensor| to.note_filled(ordinal, tensor, true));
    }
    Ok(())
}

impl Windows {
    /// Fills all windows from files, in which each tensor has the plan's name. Blocks until the bytes are there.
    ///
    /// Names and lengths are all that is compared. Files of another model with the same ones are taken for this one's
    /// (DeepSeek-V3 and R1 have the same), so which checkpoint it is belongs into the digest that the caller gives to
    /// [`Windows::hello`].
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a tensor that no file has, or that is of other bytes there, with layer and tensor,
    /// before anything is filled; for a file that is cut off meanwhile; [`Kind::Io`] with the path;
    /// [`Kind::InvalidState`] once the parts were shared; [`Kind::Busy`] for a stream that is being captured; those of
    /// [`crate::device::Device::copy`]. The layer at which it failed counts as not filled then, and the layers before
    /// it as filled from the files.
    pub fn fill_from(&mut self, files: &Files, stream: Stream) -> Result<()> {
        let layers: Vec<usize> = self.plan().layers().iter().map(|plan| plan.layer).collect();
        fill_from(self, files, layers.into_iter(), stream)
    }
}
