//! A small model: what its rows hold, and where a prefill and a decode instance keep them.

use forebay::transfer::{Component, LayerPlaces, Place, Side, Split, Stage};
use forebay::{Config, IndexGroup, Memory, Shape, Share, Slots};

use crate::net::{Draw, mix};

pub const K: u32 = 8;
/// A row of a token: a part without positions and a part with them.
pub const ROW: usize = 32;
pub const NOPE: usize = 24;
pub const KEY: usize = 8;
/// Selections of the last prompt positions that a warm-up has at most.
pub const WARM: u32 = 5;
/// Tokens that a turn decodes at most.
pub const DECODED: u32 = 5;
/// The longest sequence.
pub const TOKENS: u32 = 160;
pub const LANES: u32 = 2;

/// Whose a row is: the try at a request that computed it, or the prompt that several requests begin with.
pub type Tag = u64;

fn stamp(tag: Tag, layer: u32, position: u32, (salt, bytes): (u64, usize)) -> Vec<u8> {
    let name = mix(tag ^ mix(u64::from(layer) << 32 | u64::from(position)) ^ salt);
    (0..bytes as u64 / 8).flat_map(|word| mix(name ^ word).to_le_bytes()).collect()
}

pub fn row(tag: Tag, layer: u32, position: u32) -> Vec<u8> {
    stamp(tag, layer, position, (1, ROW))
}

pub fn key(tag: Tag, layer: u32, position: u32) -> Vec<u8> {
    stamp(tag, layer, position, (2, KEY))
}

/// The id of a token, which says what it says of whose row it has.
pub fn id(tag: Tag, position: u32) -> u32 {
    mix(tag << 20 | u64::from(position)) as u32
}

/// The components' names, and the bytes of a token that they have.
fn components(keyed: bool) -> Vec<(&'static str, usize)> {
    let mut all = vec![("nope", NOPE), ("rope", ROW - NOPE)];
    all.extend(keyed.then_some(("keys", KEY)));
    all
}

/// The bytes of a component of a token.
pub fn component(name: &str, tag: Tag, layer: u32, position: u32) -> Vec<u8> {
    match name {
        "nope" => row(tag, layer, position)[..NOPE].to_vec(),
        "rope" => row(tag, layer, position)[NOPE..].to_vec(),
        _ => key(tag, layer, position),
    }
}

/// The decode instance's cache.
#[derive(Clone, Debug)]
pub struct Model {
    pub page: u32,
    /// First layer and layers of each index group: only the first layer has index keys.
    pub groups: Vec<(u32, u32)>,
    /// Whether it has an indexer at all.
    pub keyed: bool,
    /// Whether sequences share their budgets. Then they change as others come and go.
    pub shares: bool,
    runs: [u32; 2],
    pages: u32,
}

impl Model {
    pub fn new(draw: &mut Draw) -> Model {
        let groups = [vec![(0, 1), (1, 2)], vec![(0, 2), (2, 1)], vec![(0, 1), (1, 1), (2, 2)]];
        let page = draw.one(&[16, 16, 32]);
        Model {
            page,
            groups: groups[draw.below(3) as usize].clone(),
            keyed: draw.often(850),
            shares: draw.often(150),
            runs: draw.one(&[[ROW as u32, 0], [NOPE as u32, (ROW - NOPE) as u32]]),
            // Few, so that they are used again.
            pages: TOKENS / page + 2 + draw.below(5),
        }
    }

    pub fn layers(&self) -> u32 {
        self.groups.iter().map(|(_, layers)| layers).sum()
    }

    /// The index of the group that a layer is the first of, if it has keys.
    pub fn keyed_group(&self, layer: u32) -> Option<usize> {
        self.groups.iter().position(|(first, _)| self.keyed && *first == layer)
    }

    pub fn group_of(&self, layer: u32) -> usize {
        self.groups.iter().rposition(|(first, _)| *first <= layer).unwrap()
    }

    pub fn config(&self) -> Config {
        let shape = Shape {
            layers: self.layers(),
            runs: self.runs,
            index_key_bytes: if self.keyed { KEY as u32 } else { 0 },
            page_tokens: self.page,
            top_k: K,
            ..Shape::DEEPSEEK_V3_2
        };
        let group = |(first, layers): &(u32, u32)| IndexGroup { first: *first, layers: *layers, top_k: K };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        Config {
            index_groups: self.groups.iter().map(group).collect(),
            host_pages: self.pages,
            index_pages: self.pages,
            slots: Slots::Uniform(64 * LANES),
            min_budget: 4,
            parked: 2,
            arriving: 3,
            share: self.shares.then(Share::default),
            memory,
            ..Config::new(shape, LANES, TOKENS, 64)
        }
    }

    /// Where a decode rank has a request's rows: a plane for each layer's rows, in their places of the cache's pages,
    /// then one for each group's keys on their way, whose pages go with those of the rows.
    pub fn target(&self, width: u32, stride: u64) -> Side {
        let all = components(self.keyed);
        let mut stage = Stage { layers: Vec::new(), page_bytes: Vec::new() };
        let place = |component, plane, offset, token_stride| Place {
            component,
            plane,
            offset,
            token_stride,
            head_stride: token_stride,
        };
        let (page, layers) = (u64::from(self.page), self.layers());
        for layer in 0..layers {
            stage.page_bytes.push(page * stride);
            let mut places = vec![place(0, layer, 0, stride), place(1, layer, NOPE as u64, stride)];
            if let Some(group) = self.keyed_group(layer) {
                places.push(place(2, layers + group as u32, 0, KEY as u64));
            }
            stage.layers.push(LayerPlaces { layer, places });
        }
        stage.page_bytes.extend(self.groups.iter().filter(|_| self.keyed).map(|_| page * KEY as u64));
        side(&all, stage, (width, Split::Heads, self.page))
    }

    /// Where prefill ranks have them. They may have layers and keys that decode does not keep, in another order.
    pub fn source(&self, draw: &mut Draw) -> Side {
        let mut all = components(true);
        if draw.often(500) {
            all.reverse();
        }
        let split = draw.one(&[Split::Heads, Split::Tokens]);
        let (width, page) = (draw.one(&[2, 4]), draw.one(&[4, 7, 16, 32, 64]));
        let (beside, padding, more) = (draw.often(500), 8 * u64::from(draw.below(2)), draw.below(2));
        let mut stage = Stage { layers: Vec::new(), page_bytes: Vec::new() };
        for layer in 0..self.layers() + more {
            let has = |name| name != "keys" || self.keyed_group(layer).is_some() || more == 1;
            let own: Vec<(u32, u64)> = (0..)
                .zip(&all)
                .filter(|(_, (name, _))| has(*name))
                .map(|(number, (_, bytes))| (number, *bytes as u64 + padding))
                .collect();
            let stride: u64 = own.iter().map(|(_, bytes)| bytes).sum();
            let (mut places, mut offset) = (Vec::new(), 0);
            if beside {
                stage.page_bytes.push(stride * u64::from(page));
            }
            for (component, bytes) in own {
                let token_stride = if beside { stride } else { bytes };
                if !beside {
                    stage.page_bytes.push(bytes * u64::from(page));
                }
                let plane = stage.page_bytes.len() as u32 - 1;
                let at = if beside { offset } else { 0 };
                places.push(Place { component, plane, offset: at, token_stride, head_stride: token_stride });
                offset += bytes;
            }
            stage.layers.push(LayerPlaces { layer, places });
        }
        side(&all, stage, (width, split, page))
    }
}

fn side(all: &[(&str, usize)], stage: Stage, (width, split, page_tokens): (u32, Split, u32)) -> Side {
    let component = |(name, bytes): &(&str, usize)| Component {
        name: (*name).to_owned(),
        dtype: "fp8_e4m3".to_owned(),
        heads: 1,
        head_bytes: *bytes as u64,
    };
    let components = all.iter().map(component).collect();
    Side { components, stages: vec![stage], width, split, replicas: 1, page_tokens }
}
