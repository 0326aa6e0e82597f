//! Tests that the programs on the pages about embedding and about sharded weights run: here those in C and C++,
//! compiled against an installed library. `tests/integration.rs` tests those in Rust; the Python package's tests have
//! theirs.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::process::Command;

#[path = "support/gcc.rs"]
mod gcc;
#[path = "support/library.rs"]
mod library;

use library::{installed, root, succeed, target};

/// The output of programs as a page shows it: the first listing of plain text behind a heading.
fn printed(page: &str, heading: &str) -> String {
    let page = std::fs::read_to_string(root().join("docs").join(page)).unwrap();
    let (_, section) = page.split_once(heading).expect("the page has the section");
    let (_, shown) = section.split_once("```text\n").expect("the page shows the output");
    shown.split_once("```").unwrap().0.to_owned()
}

fn run(compiler: &str, standard: &str, source: &str, wanted: &str) {
    if !gcc::is_there(compiler) {
        return;
    }
    let (prefix, program) = (installed(), target().join(format!("listing-{source}")));
    let mut build = Command::new(compiler);
    build.arg(standard).args(["-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]).arg(&program);
    build.arg(root().join("examples/integration").join(source)).arg("-I").arg(prefix.join("include"));
    build.arg("-L").arg(prefix.join("lib")).args(["-lforebay", "-lpthread"]);
    build.arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    succeed(build);
    assert_eq!(succeed(Command::new(program)), wanted);
}

#[test]
fn the_listing_in_c_prints_the_output_of_the_page() {
    run("gcc", "-std=c11", "decode.c", &printed("integration.md", "# "));
}

#[test]
fn the_listing_in_cpp_prints_the_output_of_the_page() {
    run("g++", "-std=c++17", "decode.cpp", &printed("integration.md", "# "));
}

#[test]
fn the_program_of_a_dense_model_in_c_prints_the_output_of_its_section() {
    run("gcc", "-std=c11", "dense.c", &printed("integration.md", "## Dense models\n"));
}

#[test]
fn the_program_of_a_dense_model_in_cpp_prints_the_output_of_its_section() {
    run("g++", "-std=c++17", "dense.cpp", &printed("integration.md", "## Dense models\n"));
}

#[test]
fn the_program_of_sharded_weights_in_c_prints_the_table_of_the_page() {
    run("gcc", "-std=c11", "weights.c", &printed("weights.md", "### From C and Python\n"));
}
