//! Where the bytes of a page are: the planes of a group, and the place of each layer's runs in them.
//!
//! A *plane* is device memory with one piece of every page of a group: page `p` begins at `p` times the bytes of the
//! piece. What a plane has of a page follows from [`Layout`] and [`Runs`]:
//!
//! | layout | runs | planes of a group | a plane's piece of a page |
//! |---|---|---|---|
//! | `LayerFirst` | `Apart` | two for each layer | one run of one layer |
//! | `LayerFirst` | `Together` | one for each layer | both runs of one layer, K first |
//! | `PageFirst` | `Apart` | two | one run of all layers, by layer |
//! | `PageFirst` | `Together` | one | both runs of all layers, by layer, K of a layer before its V |
//!
//! An MLA latent has one run, so the first and the second line of each layout are the same for it.
//!
//! A page that is stored whole, as in the host's tier, has the pieces of its planes one after the other.

use crate::dense::config::{Config, Layout, Runs};
use crate::dense::shape::Group;

/// One plane of a group: device memory with one piece of every page, page after page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneShape {
    /// The layer, or `None`: all layers of the group.
    pub layer: Option<u32>,
    /// The run (0 or 1), or `None`: both, or the only one.
    pub run: Option<usize>,
    /// Where the piece begins in a page that is stored whole: one after the other, in the order of the planes.
    pub offset: u64,
    /// Bytes of the piece, and from one page of the plane to the next.
    pub bytes: u64,
}

/// Where one run of one layer is: row `t` of page `p` begins at byte `p * stride + offset + t * row` of its plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The layer's group.
    pub group: usize,
    /// The index of the plane in [`Config::planes`].
    pub plane: usize,
    /// Where the run begins in the plane's first page.
    pub offset: u64,
    /// Bytes from one page to the next.
    pub stride: u64,
    /// Bytes of a row: a token's K, V or latent.
    pub row: u64,
}

impl Config {
    /// Whether K and V of a group are in planes of their own.
    fn is_apart(&self, group: &Group) -> bool {
        self.runs == Runs::Apart && group.runs[1] > 0
    }

    /// Bytes that a page has of a layer in one plane: of one run, or of both.
    fn piece(&self, group: &Group, run: Option<usize>) -> u64 {
        let row =
            run.and_then(|run| group.runs.get(run)).map_or(group.row_bytes(), |bytes| u64::from(*bytes));
        row.saturating_mul(self.shape.page_tokens.into())
    }

    /// The planes of a group, in the order of [`View::plane`]: by layer with [`Layout::LayerFirst`], then by run with
    /// [`Runs::Apart`]. None if there is no such group.
    pub fn planes(&self, group: usize) -> Vec<PlaneShape> {
        let Some(group) = self.shape.groups.get(group) else { return Vec::new() };
        let runs: &[Option<usize>] = if self.is_apart(group) { &[Some(0), Some(1)] } else { &[None] };
        let (layers, times): (Vec<Option<u32>>, u64) = match self.layout {
            Layout::LayerFirst => (group.layers.iter().copied().map(Some).collect(), 1),
            Layout::PageFirst => (vec![None], group.layers.len() as u64),
        };
        let mut end = 0_u64;
        let pieces = layers.into_iter().flat_map(|layer| runs.iter().map(move |run| (layer, *run)));
        let planes = pieces.map(|(layer, run)| {
            let bytes = self.piece(group, run).saturating_mul(times);
            let offset = end;
            end = end.saturating_add(bytes);
            PlaneShape { layer, run, offset, bytes }
        });
        planes.collect()
    }

    /// Where a run of a layer is: run 0 is K or the latent, run 1 is V. `None` if the model has no such layer, or the
    /// layer no such run. An engine makes its tensors of it: `[pages][page_tokens][row]` with these strides.
    pub fn view(&self, layer: u32, run: usize) -> Option<View> {
        let mut groups = self.shape.groups.iter().enumerate();
        let (index, group, place) = groups.find_map(|(index, group)| {
            Some((index, group, group.layers.iter().position(|l| *l == layer)?))
        })?;
        let row = u64::from(*group.runs.get(run).filter(|bytes| **bytes > 0)?);
        let apart = self.is_apart(group);
        let piece = self.piece(group, apart.then_some(run));
        let (within, beside) = match (apart, run) {
            (true, _) => (0, run),
            (false, 0) => (0, 0),
            (false, _) => (self.piece(group, Some(0)), 0),
        };
        let planes = if apart { 2 } else { 1 };
        let (plane, offset, stride) = match self.layout {
            Layout::LayerFirst => (place * planes + beside, within, piece),
            Layout::PageFirst => {
                let layers = group.layers.len() as u64;
                (
                    beside,
                    within.saturating_add(piece.saturating_mul(place as u64)),
                    piece.saturating_mul(layers),
                )
            }
        };
        Some(View { group: index, plane, offset, stride, row })
    }
}

impl Config {
    /// Where a run of a layer is in the group's host pages, which are stored whole
    /// ([`Cache::host_memory`](crate::dense::Cache::host_memory)): as [`Config::view`], in a plane of its own.
    pub fn host_view(&self, layer: u32, run: usize) -> Option<View> {
        let view = self.view(layer, run)?;
        let plane = self.planes(view.group).get(view.plane).copied()?;
        let stride = self.shape.page_bytes(view.group);
        Some(View { plane: 0, offset: plane.offset.saturating_add(view.offset), stride, ..view })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dense::shape::Shape;

    fn configs() -> impl Iterator<Item = Config> {
        let group = |layers: &[u32], runs| Group { layers: layers.to_vec(), runs, window: None };
        let groups = vec![group(&[1, 3, 4], [48, 16]), group(&[0, 2], [32, 0])];
        let base = Config::new(Shape { page_tokens: 16, groups }, 2, 40);
        let layouts = [Layout::LayerFirst, Layout::PageFirst];
        let all =
            layouts.into_iter().flat_map(|layout| [Runs::Apart, Runs::Together].map(|runs| (layout, runs)));
        all.map(move |(layout, runs)| Config { layout, runs, ..base.clone() })
    }

    /// Every byte of every plane belongs to one row: what the rows of all views write is there once, and leaves no gap.
    #[test]
    fn rows_of_all_views_tile_the_planes() {
        const PAGES: u64 = 3;
        for config in configs() {
            for (index, group) in config.shape.groups.iter().enumerate() {
                let bytes = |plane: &PlaneShape| vec![false; (PAGES * plane.bytes) as usize];
                let mut memory: Vec<Vec<bool>> = config.planes(index).iter().map(bytes).collect();
                for (layer, run) in group.layers.iter().flat_map(|layer| [(*layer, 0), (*layer, 1)]) {
                    let Some(view) = config.view(layer, run) else {
                        assert_eq!((index, run), (1, 1));
                        continue;
                    };
                    assert_eq!((view.group, view.row), (index, group.runs[run].into()));
                    for (page, token) in (0..PAGES).flat_map(|page| (0..16).map(move |token| (page, token))) {
                        let at = (page * view.stride + view.offset + token * view.row) as usize;
                        for byte in &mut memory[view.plane][at..at + view.row as usize] {
                            assert!(!std::mem::replace(byte, true), "{config:?}: written twice");
                        }
                    }
                }
                assert!(memory.iter().flatten().all(|byte| *byte), "{config:?}: a gap");
            }
        }
    }

    #[test]
    fn rows_of_all_host_views_tile_a_page_that_is_stored_whole() {
        for config in configs() {
            for (index, group) in config.shape.groups.iter().enumerate() {
                let mut page = vec![0_u8; config.shape.page_bytes(index) as usize];
                for (layer, run) in group.layers.iter().flat_map(|layer| [(*layer, 0), (*layer, 1)]) {
                    let Some(view) = config.host_view(layer, run) else { continue };
                    assert_eq!((view.group, view.plane, view.stride), (index, 0, page.len() as u64));
                    let at = view.offset as usize;
                    page[at..at + 16 * view.row as usize].iter_mut().for_each(|byte| *byte += 1);
                }
                assert!(page.iter().all(|byte| *byte == 1), "{config:?}");
            }
        }
    }

    #[test]
    fn pieces_of_a_page_tile_a_page_that_is_stored_whole() {
        for config in configs() {
            for group in 0..2 {
                let mut end = 0;
                for plane in config.planes(group) {
                    assert_eq!(plane.offset, end);
                    end += plane.bytes;
                }
                assert_eq!(end, config.shape.page_bytes(group));
            }
            assert_eq!(config.planes(2), []);
        }
    }

    #[test]
    fn planes_follow_the_table() {
        let planes = |config: &Config, group| {
            let planes = config.planes(group).into_iter();
            planes.map(|plane| (plane.layer, plane.run, plane.bytes)).collect::<Vec<_>>()
        };
        let [apart, together, page_apart, page_together] = configs().collect::<Vec<_>>().try_into().unwrap();
        let layers = [1, 3, 4].map(Some);
        let by_run = layers.map(|layer| [(layer, Some(0), 768), (layer, Some(1), 256)]);
        assert_eq!(planes(&apart, 0), by_run.concat());
        assert_eq!(planes(&together, 0), layers.map(|layer| (layer, None, 1024)));
        assert_eq!(planes(&page_apart, 0), [(None, Some(0), 3 * 768), (None, Some(1), 3 * 256)]);
        assert_eq!(planes(&page_together, 0), [(None, None, 3 * 1024)]);
        for config in [&apart, &together] {
            assert_eq!(planes(config, 1), [(Some(0), None, 512), (Some(2), None, 512)]);
        }
        for config in [&page_apart, &page_together] {
            assert_eq!(planes(config, 1), [(None, None, 1024)]);
        }
        let view = together.view(3, 1).unwrap();
        assert_eq!((view.plane, view.offset, view.stride), (1, 768, 1024));
        let view = page_together.view(3, 1).unwrap();
        assert_eq!((view.plane, view.offset, view.stride), (0, 1024 + 768, 3 * 1024));
        assert_eq!((apart.view(5, 0), apart.view(0, 1), apart.view(1, 2)), (None, None, None));
    }
}
