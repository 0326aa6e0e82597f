//! The listings of the page about embedding are programs that run: this tests the Rust one; `ffi/tests/listings.rs`
//! compiles the others. All print the same line, so the page's loop does the same in every language. The programs of
//! dense models and of the page about sharded weights are tested in the same way.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../examples/dense.rs"]
mod dense;
#[path = "../examples/integration.rs"]
mod integration;
#[path = "../examples/sharded_weights.rs"]
mod sharded_weights;

/// The output that a page gives for its programs: the first listing of plain text behind a heading.
fn printed(page: &str, heading: &str) -> String {
    let page = std::fs::read_to_string(format!("{}/docs/{page}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (_, section) = page.split_once(heading).unwrap();
    let (_, shown) = section.split_once("```text\n").unwrap();
    shown.split_once("```").unwrap().0.to_owned()
}

#[test]
fn the_rust_listing_prints_the_output_on_the_page() {
    assert_eq!(integration::decode().unwrap(), printed("integration.md", "# ").trim());
    integration::main().unwrap();
}

#[test]
fn the_rust_program_of_a_dense_model_prints_the_output_of_its_section() {
    assert_eq!(dense::serve().unwrap(), printed("integration.md", "## Dense models\n").trim());
    dense::main().unwrap();
}

#[test]
fn the_rust_program_of_sharded_weights_prints_the_table_on_the_page() {
    assert_eq!(sharded_weights::table().unwrap(), printed("weights.md", "### From C and Python\n"));
    sharded_weights::main().unwrap();
}
