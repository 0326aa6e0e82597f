//! Encodes a trace as the bytes of a file.

use super::header::FORMAT;
use super::selection::SelectionTrace;
use crate::error::{Error, Kind, Result};

impl SelectionTrace {
    /// The trace as plain TOPKTRC1 content.
    ///
    /// # Errors
    /// [`Kind::Overflow`] if the header's JSON exceeds 4 GiB.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let header = self.header();
        let json = serde_json::to_vec(header)
            .map_err(|e| Error::new(Kind::Internal, "encode trace").at(e.to_string()))?;
        let length =
            u32::try_from(json.len()).map_err(|_| Error::new(Kind::Overflow, "encode trace").at("header"))?;
        let mut out = Vec::with_capacity(FORMAT.len() + 4 + json.len() + self.members() as usize);
        out.extend_from_slice(FORMAT.as_bytes());
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&json);
        let (mut added, mut dropped) = (Vec::new(), Vec::new());
        for step in 0..header.steps {
            for layer in 0..header.layers {
                let old = match step.checked_sub(1) {
                    None => &[][..],
                    Some(prior) => self.selection(prior, layer),
                };
                difference(old, self.selection(step, layer), &mut added, &mut dropped);
                // Both counts are at most k, which the header's check keeps within 16 bits.
                out.extend_from_slice(&(added.len() as u16).to_le_bytes());
                out.extend_from_slice(&(dropped.len() as u16).to_le_bytes());
                gaps(&added, &mut out);
                gaps(&dropped, &mut out);
            }
        }
        Ok(out)
    }

    /// The trace as one zstd frame with a checksum, at zstd's `level` (1 to 22).
    ///
    /// # Errors
    /// As [`SelectionTrace::encode`]; [`Kind::OutOfMemory`] if the compressor fails.
    pub fn compress(&self, level: i32) -> Result<Vec<u8>> {
        let content = self.encode()?;
        let compress = || {
            let mut frame = zstd::stream::write::Encoder::new(Vec::new(), level)?;
            frame.include_checksum(true)?;
            frame.set_pledged_src_size(Some(content.len() as u64))?;
            std::io::Write::write_all(&mut frame, &content)?;
            frame.finish()
        };
        compress()
            .map_err(|e: std::io::Error| Error::new(Kind::OutOfMemory, "encode trace").at(e.to_string()))
    }
}

/// The positions that `new` adds to `old`, and the ranks in `old` of those that it drops; all ascending.
fn difference(old: &[u32], new: &[u32], added: &mut Vec<u32>, dropped: &mut Vec<u32>) {
    added.clear();
    dropped.clear();
    let mut coming = new.iter().copied().peekable();
    for (rank, position) in (0_u32..).zip(old.iter().copied()) {
        while let Some(fresh) = coming.next_if(|p| *p < position) {
            added.push(fresh);
        }
        if coming.next_if_eq(&position).is_none() {
            dropped.push(rank);
        }
    }
    added.extend(coming);
}

/// Appends ascending `values` as gaps.
pub(super) fn gaps(values: &[u32], out: &mut Vec<u8>) {
    let mut least = 0;
    for value in values {
        let mut gap = value - least;
        while gap >= 0x80 {
            out.push(gap as u8 | 0x80);
            gap >>= 7;
        }
        out.push(gap as u8);
        least = value + 1;
    }
}
