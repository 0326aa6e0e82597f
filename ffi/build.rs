//! Gives the shared library a soname with the version of its interface, so that the loader never takes one that was
//! built for another version.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libforebay.so.2");
}
