//! forebay fits into a program that uses other GPU crates with any features: cudarc's features for versions of CUDA
//! exclude each other, so no dependency of the library may be cudarc. `make embedder` builds such a program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::process::Command;

/// The crates that a build of `package`, in `manifest`, with all its features depends on.
fn crates(package: &str, manifest: &str) -> String {
    let manifest = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest);
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--all-features", "--edges", "normal", "--prefix", "none"])
        .args(["--package", package, "--manifest-path"])
        .arg(manifest)
        .output()
        .unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    String::from_utf8(tree.stdout).unwrap()
}

#[test]
fn the_embedder_chooses_the_version_of_cudarc() {
    let names = |tree: &str| tree.lines().any(|line| line.starts_with("cudarc "));
    let library = crates("forebay", "Cargo.toml");
    let embedder = crates("forebay-embedder", "ci/embedder/Cargo.toml");
    assert!(library.starts_with("forebay v") && !names(&library), "{library}");
    assert!(embedder.contains("\nforebay v") && names(&embedder), "{embedder}");
    // The conversions of cudarc's streams and memory leave the choice too: they use only its driver part.
    let manifest = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("cudarc/Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    let asked: Vec<&str> = manifest.lines().filter(|line| line.starts_with("cudarc = ")).collect();
    let only = r#"default-features = false, features = ["driver"]"#;
    assert!(asked.len() == 1 && asked[0].contains(only), "{asked:?}");
    assert!(embedder.contains("\nforebay-cudarc v"), "{embedder}");
}
