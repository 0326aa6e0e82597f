//! A prefill rank: its machine, and the memory that its rows are in.

use std::ops::Range;
use std::rc::Rc;

use forebay::transfer::sender::Source;
use forebay::transfer::{Chunk, Rank, Run, Sender, Side};
use forebay::{Error, Kind, Result};

use crate::model::{Tag, component};

/// Rows of one layer, until their memory is used for something else.
pub struct Origin {
    /// Whose row each token of the request has.
    pub tags: Rc<Vec<Tag>>,
    pub layer: u32,
    pub tokens: Range<u32>,
    /// Of a sender that divides tokens.
    pub chunk: Option<Chunk>,
    pub released: bool,
}

pub struct Prefill {
    pub rank: Rank,
    pub machine: Sender,
    pub origins: Vec<Origin>,
}

impl Origin {
    /// The byte at an offset of a rank's page: which place it is in, and which token's.
    fn byte(&self, side: &Side, lane: u32, (page, plane, offset): (u32, u32, u64)) -> Option<u8> {
        let places = &side.stages[0].layers.iter().find(|of| of.layer == self.layer)?.places;
        places.iter().filter(|place| place.plane == plane).find_map(|place| {
            let of = &side.components[place.component as usize];
            let from = offset.checked_sub(place.offset)?;
            let (at, byte) = (from / place.token_stride, from % place.token_stride);
            if byte >= of.head_bytes || at >= u64::from(side.page_tokens) {
                return None;
            }
            let own = page * side.page_tokens + at as u32;
            let token = match &self.chunk {
                None => own,
                Some(chunk) if own < chunk.slice => {
                    chunk.first + (lane * chunk.slice + own).checked_sub(chunk.at)?
                }
                Some(_) => return None,
            };
            let tag = self.tags.get(token as usize).filter(|_| self.tokens.contains(&token))?;
            Some(component(&of.name, *tag, self.layer, token)[byte as usize])
        })
    }
}

/// The bytes of a run in a rank's memory. What is not there, or not there any more, reads as other bytes.
pub fn read(origins: &[Origin], side: &Side, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
    let place = usize::try_from(origin).ok().and_then(|at| origins.get(at));
    let Some(held) = place else { return Err(Error::new(Kind::OutOfRange, "read")) };
    for (at, to) in (0_u64..).zip(into) {
        let offset = run.from.offset + at / run.bytes * run.from.stride + at % run.bytes;
        let found = held.byte(side, run.from.lane, (run.from.page, run.from.plane, offset));
        *to = match found {
            Some(byte) if held.released => byte ^ 0x5A,
            Some(byte) => byte,
            None => 0xEE,
        };
    }
    Ok(())
}

pub struct Reader<'a>(pub &'a [Origin], pub &'a Side);

impl Source for Reader<'_> {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        assert!(!self.0[origin as usize].released, "rows are read that were released");
        read(self.0, self.1, origin, run, into)
    }
}
