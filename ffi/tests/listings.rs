//! Tests that the programs on the page about embedding run: here those in C and C++, compiled against an installed
//! library. `tests/integration.rs` tests the Rust one; the Python package's tests have theirs.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::process::Command;

#[path = "support/gcc.rs"]
mod gcc;
#[path = "support/library.rs"]
mod library;

use library::{installed, root, succeed, target};

/// The programs' output as the page shows it.
fn printed() -> String {
    let page = std::fs::read_to_string(root().join("docs/integration.md")).unwrap();
    let (_, shown) = page.split_once("```text\n").expect("the page shows the output");
    shown.split_once("```").unwrap().0.to_owned()
}

fn run(compiler: &str, standard: &str, source: &str) {
    if !gcc::is_there(compiler) {
        return;
    }
    let (prefix, program) = (installed(), target().join(format!("listing-{source}")));
    let mut build = Command::new(compiler);
    build.arg(standard).args(["-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]).arg(&program);
    build.arg(root().join("examples/integration").join(source)).arg("-I").arg(prefix.join("include"));
    build.arg("-L").arg(prefix.join("lib")).arg("-lforebay");
    build.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    succeed(build);
    assert_eq!(succeed(Command::new(program)), printed());
}

#[test]
fn the_listing_in_c_prints_the_output_of_the_page() {
    run("gcc", "-std=c11", "decode.c");
}

#[test]
fn the_listing_in_cpp_prints_the_output_of_the_page() {
    run("g++", "-std=c++17", "decode.cpp");
}
