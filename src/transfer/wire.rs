//! A side in bytes: what instances tell each other before they pair.
//!
//! The first 12 bytes, a mark and the version, never change, so that an instance of another version is told as such.
//! The rest is of the version. Numbers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 8 | `FOREBAYT` |
//! | 4 | version, 1 |
//! | 4, 4, 4 | width, replicas, tokens of a page |
//! | 1 | split: 0 heads, 1 tokens |
//! | 1 | components, and then of each: |
//! | 1, n, 1, n | length and UTF-8 of the name, and of the type |
//! | 4, 8 | heads, bytes of a head |
//! | 2 | stages, and then of each: |
//! | 2, 8 n | planes, and bytes of a page of each |
//! | 2 | layers, and then of each: |
//! | 4, 1 | number in the model; places, and then of each: |
//! | 1, 2, 8, 8, 8 | component, plane, offset, token stride, head stride |
//!
//! **Trust.** Reading takes no more memory than a small multiple of the bytes that are there, whatever counts they
//! claim. What is read is a side, not a sensible one: [`Plan::new`](crate::transfer::Plan::new) checks it. Names may
//! hold any character; errors never print them.

use crate::error::{Error, Kind, Result};
use crate::fallible::{reserve, vector};
use crate::transfer::side::{Component, LayerPlaces, Place, Side, Split, Stage};

/// The version of a side's bytes, of the runs that two sides have, of frames and of digests.
pub const VERSION: u32 = 2;

const MARK: [u8; 8] = *b"FOREBAYT";
const OPERATION: &str = "transfer side";
/// The fewest bytes of a component, stage, layer and place.
const COMPONENT: usize = 14;
const STAGE: usize = 4;
const LAYER: usize = 5;
const PLACE: usize = 27;

impl Side {
    /// The side's bytes.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a side that no plan takes, by the field, and for one with more stages or planes than
    /// their counts can say; [`Kind::OutOfMemory`].
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let mut bytes = Vec::new();
        let places = self.stages.iter().flat_map(|stage| &stage.layers).map(|of| of.places.len());
        let pages = self.stages.iter().map(|stage| stage.page_bytes.len());
        let layers = self.stages.iter().map(|stage| stage.layers.len());
        let names = self.components.iter().map(|own| own.name.len() + own.dtype.len() + COMPONENT);
        let all = 28 + names.sum::<usize>() + self.stages.len() * STAGE + layers.sum::<usize>() * LAYER;
        reserve(
            &mut bytes,
            all + places.sum::<usize>() * PLACE + pages.sum::<usize>() * 8,
            OPERATION,
            "bytes",
        )?;
        bytes.extend(MARK);
        for number in [VERSION, self.width, self.replicas, self.page_tokens] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.push(u8::from(self.split == Split::Tokens));
        count(&mut bytes, "components", self.components.len(), 1)?;
        for Component { name, dtype, heads, head_bytes } in &self.components {
            for text in [name, dtype] {
                count(&mut bytes, "a name of a component", text.len(), 1)?;
                bytes.extend(text.as_bytes());
            }
            bytes.extend(heads.to_le_bytes());
            bytes.extend(head_bytes.to_le_bytes());
        }
        count(&mut bytes, "stages", self.stages.len(), 2)?;
        for stage in &self.stages {
            count(&mut bytes, "planes of a stage", stage.page_bytes.len(), 2)?;
            stage.page_bytes.iter().for_each(|page| bytes.extend(page.to_le_bytes()));
            count(&mut bytes, "layers of a stage", stage.layers.len(), 2)?;
            for LayerPlaces { layer, places } in &stage.layers {
                bytes.extend(layer.to_le_bytes());
                count(&mut bytes, "places of a layer", places.len(), 1)?;
                for place in places {
                    count(&mut bytes, "component of a place", place.component as usize, 1)?;
                    count(&mut bytes, "plane of a place", place.plane as usize, 2)?;
                    for number in [place.offset, place.token_stride, place.head_stride] {
                        bytes.extend(number.to_le_bytes());
                    }
                }
            }
        }
        Ok(bytes)
    }

    /// Reads a side's bytes.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for bytes that are no side; [`Kind::BadVersion`]; [`Kind::OutOfMemory`].
    pub fn decode(bytes: &[u8]) -> Result<Side> {
        let mut rest = bytes;
        let foreign = |rest: &[u8]| {
            Error::new(Kind::BadFormat, OPERATION).at("side").with("byte", (bytes.len() - rest.len()) as u64)
        };
        if take::<8>(&mut rest) != Some(MARK) {
            return Err(foreign(bytes));
        }
        let version = number(&mut rest).ok_or_else(|| foreign(bytes))?;
        if version != VERSION {
            return Err(Error::new(Kind::BadVersion, OPERATION)
                .at("side")
                .with("own", VERSION)
                .with("theirs", version)
                .hint("use the same forebay release in all instances"));
        }
        match side(&mut rest)? {
            Some(side) if rest.is_empty() => Ok(side),
            _ => Err(foreign(rest)),
        }
    }
}

/// Appends a count as so many bytes.
fn count(bytes: &mut Vec<u8>, what: &'static str, count: usize, size: usize) -> Result<()> {
    match u16::try_from(count).ok().filter(|count| size == 2 || *count <= u8::MAX.into()) {
        Some(count) => {
            bytes.extend(count.to_le_bytes().iter().take(size));
            Ok(())
        }
        None => Err(Error::new(Kind::InvalidConfig, OPERATION).at(what).with("given", count as u64)),
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*first)
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    take(rest).map(u32::from_le_bytes)
}

fn long(rest: &mut &[u8]) -> Option<u64> {
    take(rest).map(u64::from_le_bytes)
}

fn short(rest: &mut &[u8]) -> Option<usize> {
    take(rest).map(|bytes| u16::from_le_bytes(bytes).into())
}

fn byte(rest: &mut &[u8]) -> Option<usize> {
    take(rest).map(|[byte]| byte.into())
}

/// Reads `count` items of at least `least` bytes each; none if the bytes are too few or an item is none.
fn items<T>(
    rest: &mut &[u8],
    count: usize,
    least: usize,
    mut item: impl FnMut(&mut &[u8]) -> Result<Option<T>>,
) -> Result<Option<Vec<T>>> {
    if count.saturating_mul(least) > rest.len() {
        return Ok(None);
    }
    let mut items = vector(count, OPERATION, "items")?;
    for _ in 0..count {
        match item(rest)? {
            Some(item) => items.push(item),
            None => return Ok(None),
        }
    }
    Ok(Some(items))
}

/// `?` of an option in a function of a result of an option.
macro_rules! some {
    ($read:expr) => {
        match $read {
            Some(value) => value,
            None => return Ok(None),
        }
    };
}

fn side(rest: &mut &[u8]) -> Result<Option<Side>> {
    let (width, replicas, page_tokens) = (some!(number(rest)), some!(number(rest)), some!(number(rest)));
    let split = match byte(rest) {
        Some(0) => Split::Heads,
        Some(1) => Split::Tokens,
        _ => return Ok(None),
    };
    let count = some!(byte(rest));
    let components = some!(items(rest, count, COMPONENT, component)?);
    let count = some!(short(rest));
    let stages = some!(items(rest, count, STAGE, stage)?);
    Ok(Some(Side { components, stages, width, split, replicas, page_tokens }))
}

fn component(rest: &mut &[u8]) -> Result<Option<Component>> {
    let (name, dtype) = (some!(text(rest)?), some!(text(rest)?));
    let (heads, head_bytes) = (some!(number(rest)), some!(long(rest)));
    Ok(Some(Component { name, dtype, heads, head_bytes }))
}

fn text(rest: &mut &[u8]) -> Result<Option<String>> {
    let length = some!(byte(rest));
    let bytes = some!(items(rest, length, 1, |rest| Ok(take(rest).map(|[byte]| byte)))?);
    Ok(String::from_utf8(bytes).ok())
}

fn stage(rest: &mut &[u8]) -> Result<Option<Stage>> {
    let count = some!(short(rest));
    let page_bytes = some!(items(rest, count, 8, |rest| Ok(long(rest)))?);
    let count = some!(short(rest));
    let layers = some!(items(rest, count, LAYER, layer)?);
    Ok(Some(Stage { layers, page_bytes }))
}

fn layer(rest: &mut &[u8]) -> Result<Option<LayerPlaces>> {
    let (layer, count) = (some!(number(rest)), some!(byte(rest)));
    let places = some!(items(rest, count, PLACE, |rest| Ok(place(rest)))?);
    Ok(Some(LayerPlaces { layer, places }))
}

fn place(rest: &mut &[u8]) -> Option<Place> {
    let (component, plane) = (byte(rest)? as u32, short(rest)? as u32);
    Some(Place { component, plane, offset: long(rest)?, token_stride: long(rest)?, head_stride: long(rest)? })
}
