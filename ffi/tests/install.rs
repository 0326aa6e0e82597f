//! Tests that the files of `make install` suffice for programs outside this tree: `examples-c`, copied elsewhere, is
//! built by make with pkg-config and by CMake, with both libraries, and run.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "support/gcc.rs"]
mod gcc;
#[path = "support/library.rs"]
mod library;

use library::{installed, root, succeed, target};

fn abi() -> String {
    let header = std::fs::read_to_string(root().join("ffi/include/forebay.h")).unwrap();
    header.lines().find_map(|line| line.strip_prefix("#define FB_ABI_VERSION ")).unwrap().to_owned()
}

/// A copy of the examples, in a folder outside this tree.
struct Outside(PathBuf);

impl Outside {
    fn new(name: &str) -> Outside {
        let folder = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for entry in std::fs::read_dir(root().join("ffi/examples-c")).unwrap() {
            let file = entry.unwrap().path();
            std::fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
        }
        Outside(folder)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.0).env_remove("MAKEFLAGS").env_remove("MFLAGS");
        command.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig"));
        command.env("CFLAGS", "-O1 -Wall -Wextra -Wpedantic -Werror");
        command
    }

    /// Runs a program that was built there, which must use the expected libraries.
    fn check(&self, program: &str, shared: bool) {
        let program = self.0.join(program);
        let said = succeed(Command::new(&program));
        assert!(said.starts_with("forebay ") && said.trim_end().ends_with(", 0 wrong"), "{said}");
        let mut readelf = Command::new("readelf");
        readelf.arg("-d").arg(&program);
        let needs = succeed(readelf).contains(&format!("Shared library: [libforebay.so.{}]", abi()));
        assert_eq!(needs, shared, "{}", program.display());
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn are_there(tools: &[&str]) -> bool {
    tools.iter().copied().all(gcc::is_there)
}

#[test]
fn the_shared_library_is_named_with_its_version() {
    if !are_there(&["readelf"]) {
        return;
    }
    let lib = installed().join("lib");
    let mut readelf = Command::new("readelf");
    readelf.arg("-d").arg(lib.join("libforebay.so"));
    let said = succeed(readelf);
    let name = format!("libforebay.so.{}", abi());
    assert!(said.contains(&format!("Library soname: [{name}]")), "{said}");
    assert_eq!(std::fs::read_link(lib.join("libforebay.so")).unwrap(), Path::new(&name));
}

#[test]
fn make_builds_with_both_libraries() {
    if !are_there(&["make", "gcc", "pkg-config", "readelf"]) {
        return;
    }
    let outside = Outside::new("make");
    succeed(outside.command("make"));
    outside.check("hello", true);
    outside.check("hello-static", false);
}

#[test]
fn cmake_builds_with_both_libraries() {
    if !are_there(&["cmake", "gcc", "readelf"]) {
        return;
    }
    let outside = Outside::new("cmake");
    let mut configure = outside.command("cmake");
    configure.args(["-S", ".", "-B", "build"]).arg(format!("-DCMAKE_PREFIX_PATH={}", installed().display()));
    succeed(configure);
    let mut build = outside.command("cmake");
    build.args(["--build", "build"]);
    succeed(build);
    outside.check("build/hello", true);
    outside.check("build/hello-static", false);
}

/// CMake does not accept another version than the installed one.
#[test]
fn cmake_refuses_another_version() {
    if !are_there(&["cmake", "gcc"]) {
        return;
    }
    let outside = Outside::new("version");
    let list = outside.0.join("CMakeLists.txt");
    let text = std::fs::read_to_string(&list).unwrap();
    assert!(text.contains("forebay 0.1 REQUIRED"));
    std::fs::write(&list, text.replace("forebay 0.1 REQUIRED", "forebay 0.0 REQUIRED")).unwrap();
    let mut configure = outside.command("cmake");
    configure.args(["-S", ".", "-B", "build"]).arg(format!("-DCMAKE_PREFIX_PATH={}", installed().display()));
    let ended = configure.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && said.contains("version"), "{said}");
}

#[test]
fn pkg_config_knows_the_version_and_what_static_programs_need() {
    if !are_there(&["pkg-config"]) {
        return;
    }
    let ask = |arguments: &[&str]| {
        let mut command = Command::new("pkg-config");
        command.args(arguments).arg("forebay").env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig"));
        succeed(command)
    };
    assert_eq!(ask(&["--modversion"]).trim(), env!("CARGO_PKG_VERSION"));
    assert_eq!(ask(&["--variable=prefix"]).trim(), installed().to_str().unwrap());
    assert!(!ask(&["--libs"]).contains("-lpthread"));
    assert!(ask(&["--static", "--libs"]).contains("-lpthread"));
}

/// Packagers stage into a folder, but the files name the final prefix.
#[test]
fn a_staged_installation_names_its_prefix() {
    let stage = target().join("staged");
    let _ = std::fs::remove_dir_all(&stage);
    let mut install = library::install(Path::new("/usr/forebay"));
    install.env("DESTDIR", &stage);
    succeed(install);
    let at = stage.join("usr/forebay");
    let config = std::fs::read_to_string(at.join("lib/pkgconfig/forebay.pc")).unwrap();
    assert!(config.starts_with("prefix=/usr/forebay\n") && !config.contains('@'), "{config}");
    for file in ["forebayConfig.cmake", "forebayConfigVersion.cmake"] {
        let text = std::fs::read_to_string(at.join("lib/cmake/forebay").join(file)).unwrap();
        assert!(!text.contains('@') && !text.contains(stage.to_str().unwrap()), "{text}");
    }
    for file in ["include/forebay.h", "lib/libforebay.a", "lib/libforebay.so"] {
        assert!(at.join(file).is_file(), "{file}");
    }
}

#[test]
fn a_relative_prefix_is_refused() {
    for prefix in ["", "here", "./here"] {
        let ended = library::install(Path::new(prefix)).output().unwrap();
        assert_eq!(ended.status.code(), Some(2), "{prefix}");
        assert!(String::from_utf8_lossy(&ended.stderr).starts_with("usage: "));
    }
}
