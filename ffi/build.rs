//! Names the shared library as programs ask for it: with the version of its interface, so that one built
//! for another version is not loaded in its place.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libforebay.so.1");
}
