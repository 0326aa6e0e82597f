//! The listings of the page about embedding are programs that run: this tests the Rust one; `ffi/tests/listings.rs`
//! compiles the others. All print the same line, so the page's loop does the same in every language.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../examples/integration.rs"]
mod integration;

/// The output that the page gives for the programs.
fn printed() -> String {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/integration.md")).unwrap();
    let (_, shown) = page.split_once("```text\n").unwrap();
    shown.split_once("```").unwrap().0.trim().to_owned()
}

#[test]
fn the_rust_listing_prints_the_output_on_the_page() {
    assert_eq!(integration::decode().unwrap(), printed());
    integration::main().unwrap();
}
