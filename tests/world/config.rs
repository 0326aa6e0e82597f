//! The configurations of a world, by variant: three row formats, half of them with shares of the slots, two thirds of
//! them with index groups, three quarters of them with room for one or two parked sequences.
//!
//! The model has its own list of the layers of every group. What it tracks by group it tracks once: budgets, blocks, an
//! oracle. Rows are each layer's own.

use super::run::World;
use super::share::share;
use forebay::{Budget, Config, IndexGroup, Memory, SLOT_BLOCK, Shape, Slots};
use std::ops::Range;

/// The layers that share a selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// None.
    Alone,
    /// Layers 1 and 2, as the shape says. All layers have the same row format.
    ByShape,
    /// Layers 0 to 2, which the configuration names. Each has a row format of its own.
    ByName,
}

/// The grouping of a variant. Every row format has each of them, and so has every share.
pub fn grouping(variant: u8) -> Grouping {
    [Grouping::Alone, Grouping::ByShape, Grouping::ByName][usize::from(variant / 6 + variant % 3) % 3]
}

/// The layers of every group, draft layers last.
pub fn groups(variant: u8) -> Vec<Range<u32>> {
    match grouping(variant) {
        Grouping::Alone => vec![0..1, 1..2, 2..3],
        Grouping::ByShape => vec![0..1, 1..3, 3..4],
        Grouping::ByName => vec![0..3, 3..4],
    }
}

/// The config of a world: budgets below k, below k x q and above, pools that run out.
pub fn config(variant: u8) -> Config {
    let (runs, device_block_align) = match variant % 3 {
        0 => ([32, 8], 1024),
        1 => ([48, 0], 1),
        _ => ([656, 0], 1),
    };
    let (grouping, groups) = (grouping(variant), groups(variant));
    let layers = groups.iter().map(ExactSizeIterator::len).sum::<usize>() as u32;
    let (lone_layers, group_layers) = if grouping == Grouping::ByShape { (1, 2) } else { (0, 0) };
    let shape = Shape {
        layers: layers - 1,
        draft_layers: 1,
        runs,
        device_block_align,
        index_key_bytes: 8,
        page_tokens: 16,
        top_k: 12,
        lone_layers,
        group_layers,
        ..Shape::DEEPSEEK_V3_2
    };
    let (rows, index_groups) = match grouping {
        // The draft layer may be left out.
        Grouping::ByName => {
            (vec![runs, [24, 20], [64, 0], [36, 8]], vec![IndexGroup { first: 0, layers: 3, top_k: 0 }])
        }
        _ => (Vec::new(), Vec::new()),
    };
    let row_bytes = if rows.is_empty() { vec![runs; layers as usize] } else { rows.clone() };
    let slots = [448, 384, 320].into_iter().zip(&groups);
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config {
        share: share(variant, row_bytes.into_iter().flatten().sum()),
        rows,
        index_groups,
        host_pages: 40,
        index_pages: 38,
        slots: Slots::ByLayer(slots.flat_map(|(slots, group)| group.clone().map(move |_| slots)).collect()),
        min_budget: 4,
        batch: 3,
        query_rows: 3,
        micro_batches: 2,
        parked: [1, 2, 0, 2][usize::from(variant / 18) % 4],
        memory,
        ..Config::new(shape, 4, 160, 64)
    }
}

impl World {
    /// The number of layers, draft layers included.
    pub fn layers(&self) -> u32 {
        self.groups.last().unwrap().end
    }

    /// The number of a layer's group.
    pub fn group_of(&self, layer: u32) -> usize {
        self.groups.iter().position(|group| group.contains(&layer)).unwrap()
    }

    /// Whether a layer selects for its group.
    pub fn selects(&self, layer: u32) -> bool {
        self.groups.iter().any(|group| group.start == layer)
    }

    /// The slots of blocks by group, in all layers together.
    pub fn slots(&self, blocks: &[u32]) -> u64 {
        let slots =
            |(blocks, group): (&u32, &Range<u32>)| u64::from(blocks * SLOT_BLOCK) * group.len() as u64;
        blocks.iter().zip(&self.groups).map(slots).sum()
    }

    /// Bytes of a row in all layers together.
    pub fn row_bytes(&self) -> u64 {
        (0..self.layers()).map(|layer| u64::from(self.format(layer).row_bytes())).sum()
    }

    /// A budget by layer, from those of three groups. Where layers share a selection and `uneven`, it is one that no
    /// sequence may have: the last layer of a group has another budget than the first.
    pub fn by_layer(&self, budgets: [u32; 3], uneven: bool) -> Budget {
        let groups = budgets.into_iter().zip(&self.groups);
        let mut table: Vec<u32> =
            groups.flat_map(|(budget, group)| group.clone().map(move |_| budget)).collect();
        if let Some(group) = self.groups.iter().find(|group| uneven && group.len() > 1) {
            table[group.end as usize - 1] += 1;
        }
        Budget::ByLayer(table)
    }
}
