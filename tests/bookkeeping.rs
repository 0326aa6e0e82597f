//! The memory of residency in addition to the rows: at 128K tokens, a ratio of 0.1 and rows of 656 bytes, all tables
//! take at most 8% of the sparse pool's bytes. Arithmetic on declared extents, no timing.
#![allow(clippy::unwrap_used, missing_docs)]

use forebay::residency::{Fetch, LaneHead, LayerTables, TableShape, Workspace};
use forebay::{Geometries, Geometry, SLOT_BLOCK, Shape};

const TOKENS: u32 = 128 * 1024;
const QUERY_ROWS: u32 = 2;

/// Bytes of book-keeping, by purpose, over all layers.
#[derive(Debug, Default)]
struct Books {
    /// `slot_of`, `position_of`, `stamp_of`, blocks and heads of every index group.
    tables: u64,
    /// Host page and index-key page of every page, and the device's copy of the host pages.
    page_tables: u64,
    /// Rows to fetch: one list for each batch row, used by one layer after the other.
    lists: u64,
    /// The work room of a micro-batch's resolve: bits of missed positions, indices, victims, ties and their positions,
    /// and two sets of the lane's slots.
    work: u64,
}

impl Books {
    fn sum(&self) -> u64 {
        self.tables + self.page_tables + self.lists + self.work
    }
}

fn slots() -> u32 {
    (0.1 * f64::from(TOKENS) + 0.5) as u32
}

fn shape(lanes: u32) -> TableShape {
    let landing = (1 + lanes * QUERY_ROWS).next_multiple_of(SLOT_BLOCK);
    TableShape {
        lanes,
        // The rows in flight of two steps are after the admitted tokens.
        tokens: TOKENS + 2 * QUERY_ROWS,
        query_rows: QUERY_ROWS,
        scratch: 0,
        waves: 1,
        scratch_base: 1,
        landing_base: 1,
        budget_base: landing,
        budget_blocks: lanes * slots().div_ceil(SLOT_BLOCK),
    }
}

/// Book-keeping as a share of the sparse pool's bytes (budget slots times row bytes, all layers).
fn share(model: Shape, lanes: u32) -> (Books, f64) {
    let geometry = Geometry::new(model).unwrap();
    let groups = Geometries::from(geometry).groups().len() as u64;
    let (layers, shape) = (u64::from(geometry.layers()), shape(lanes));
    let lanes = u64::from(lanes);
    let pages = u64::from(geometry.pages(shape.tokens));
    let selected = u64::from(QUERY_ROWS * geometry.shape().top_k);
    let books = Books {
        tables: groups * LayerTables::new(shape).unwrap().bytes(),
        page_tables: lanes * pages * 3 * 4,
        lists: lanes * selected * size_of::<Fetch>() as u64,
        work: Workspace::new(&shape, selected as u32).unwrap().bytes(),
    };
    let pool = layers * lanes * u64::from(slots()) * u64::from(geometry.row_bytes());
    let share = books.sum() as f64 / pool as f64;
    println!("{lanes} lanes: {books:?}, pool {pool}: {:.3}%", 100.0 * share);
    (books, share)
}

#[test]
fn book_keeping_is_at_most_8_percent_of_the_pool_at_128k_and_a_tenth() {
    for lanes in [1, 2, 8, 32] {
        let (books, share) = share(Shape::DEEPSEEK_V3_2, lanes);
        assert!(share <= 0.08, "{lanes} lanes: {books:?} are {:.3}%", 100.0 * share);
    }
}

/// GLM-5.2 has 21 selections for 78 layers.
#[test]
fn layers_that_share_a_selection_share_its_book_keeping() {
    let alone = Shape { group_layers: 0, ..Shape::GLM_5_2 };
    for lanes in [1, 2, 8, 32] {
        let ((before, from), (books, to)) = (share(alone, lanes), share(Shape::GLM_5_2, lanes));
        assert_eq!(books.tables * 78, before.tables * 21, "3.7 times less");
        assert!(from > 0.071 && to <= 0.022, "{lanes} lanes: {:.3}% to {:.3}%", 100.0 * from, 100.0 * to);
    }
}

#[test]
fn the_tables_are_four_bytes_a_token_and_eight_a_slot() {
    let shape = shape(1);
    let blocks = u64::from(shape.budget_blocks);
    // In addition four bytes for each landing slot and each block that the lane can have, and the head.
    let expected = 4 * u64::from(shape.tokens)
        + 8 * blocks * u64::from(SLOT_BLOCK)
        + 4 * u64::from(shape.budget_base)
        + 4 * blocks
        + size_of::<LaneHead>() as u64;
    assert_eq!(LayerTables::new(shape).unwrap().bytes(), expected);
    assert_eq!(shape.bytes(), expected, "computed before they are made");
    assert_eq!((size_of::<LaneHead>(), size_of::<Fetch>()), (32, 8));
}
