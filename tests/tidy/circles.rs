//! The rule that files of a member do not import each other in a circle. A reader can then begin with the imports of a
//! file, and a part can move elsewhere without the rest.
//!
//! **What counts.** File A imports file B if A names an item that B defines, in a `use` or by a path in its code. The
//! rule follows a name to the file that defines it, through every `use` and `pub use`. So a parent that declares
//! `mod b;` and publishes `pub use b::Item` does not import `b`, but a sibling that takes `Item` from the parent does.
//! If a parent uses its child, and the child takes an item that the parent defines, they form a circle. The name of a
//! module imports nothing; the names of its items do.
//!
//! **What does not count.** Code that only tests compile: no other file imports it. Methods that are called without the
//! name of their type, which the text does not show. Names that a macro assembles. If a parent publishes a name, it
//! uses the name itself only where it calls a function, or names a type, of that name.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::source::{Name, Site, names, split, test_lines};
use crate::{Fault, fault};

/// The sources of the members, each a crate of its own.
const MEMBERS: [&str; 5] = ["src/", "cli/src/", "ffi/src/", "standin/src/", "cudarc/src/"];

/// A module's name from its crate's root on, without `crate`.
type Module = Vec<String>;

/// A file of a member.
struct File<'a> {
    name: &'a str,
    module: Module,
    /// The names in it outside tests.
    names: Vec<Name>,
    /// The meaning of each name from a `use` or a `mod`: its path from the crate's root; none in another crate.
    known: BTreeMap<String, Option<Module>>,
}

/// The member that a file belongs to, and its module there.
fn place(file: &str) -> Option<(&'static str, Module)> {
    let member = MEMBERS.into_iter().find(|member| file.starts_with(member))?;
    let inside = file.strip_prefix(member)?.strip_suffix(".rs")?;
    let names = inside.split('/').filter(|name| !matches!(*name, "mod" | "lib" | "main"));
    Some((member, names.map(str::to_owned).collect()))
}

/// Reads a file. `modules` are all of its member.
fn read<'a>(name: &'a str, text: &str, module: Module, modules: &BTreeSet<Module>) -> File<'a> {
    let code = split(text).code;
    let tests = test_lines(&code);
    let mut names = names(&module, &code);
    names.retain(|name| !tests.get(name.line - 1).copied().unwrap_or(false));
    // A single word may be anything, except a name that the file both publishes and uses itself.
    let passed = |name: &&Name| name.site == Site::Passed;
    let passed: BTreeSet<String> = names.iter().filter(passed).map(|name| name.bound.clone()).collect();
    names.retain(|name| name.site != Site::Code || name.path.len() > 1 || passed.contains(&name.bound));
    let mut known = BTreeMap::new();
    for child in modules.iter().filter(|it| it.len() == module.len() + 1 && it.starts_with(&module)) {
        known.extend(child.last().map(|last| (last.clone(), Some(child.clone()))));
    }
    for used in names.iter().filter(|name| name.site != Site::Code && !name.inside) {
        let path = absolute(used, &known);
        known.insert(used.bound.clone(), path);
    }
    File { name, module, names, known }
}

/// A name's path from the crate's root; none if it leads out of the crate, or is not imported.
fn absolute(name: &Name, known: &BTreeMap<String, Option<Module>>) -> Option<Module> {
    let (first, rest) = name.path.split_first()?;
    if first == "crate" {
        return Some(rest.to_vec());
    }
    Some([known.get(first)?.as_deref()?, rest].concat())
}

/// The module of the file that defines the item at `path`; none for a module, and for items of other crates.
fn owner(path: &[String], files: &BTreeMap<Module, File<'_>>) -> Option<Module> {
    let mut path = path.to_vec();
    // No chain of `use` is longer; one that leads back to itself ends here.
    for _ in 0..16 {
        let depth = (0..=path.len()).rev().find(|depth| files.contains_key(&path[..*depth]))?;
        let file = files.get(&path[..depth])?;
        match file.known.get(path.get(depth)?) {
            Some(None) => return None,
            Some(Some(from)) if *from != path[..=depth] => path = [from, &path[depth + 1..]].concat(),
            _ => return Some(file.module.clone()),
        }
    }
    None
}

/// The files that `file` imports, each with the first line that does.
fn imports(file: &File<'_>, files: &BTreeMap<Module, File<'_>>) -> BTreeMap<Module, usize> {
    let mut found = BTreeMap::new();
    for name in file.names.iter().filter(|name| name.site != Site::Passed) {
        let target = absolute(name, &file.known).and_then(|path| owner(&path, files));
        if let Some(target) = target.filter(|target| *target != file.module) {
            found.entry(target).or_insert(name.line);
        }
    }
    found
}

/// The shortest way of imports from a file back to itself: the files on it, each with the line that imports the next.
fn way_round(
    start: &Module,
    edges: &BTreeMap<Module, BTreeMap<Module, usize>>,
) -> Option<Vec<(Module, usize)>> {
    let mut ways: VecDeque<Vec<(Module, usize)>> = VecDeque::from([vec![(start.clone(), 0)]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop_front() {
        let (last, before) = way.split_last()?;
        for (next, line) in edges.get(&last.0).into_iter().flatten() {
            let mut longer = before.to_vec();
            longer.push((last.0.clone(), *line));
            if next == start {
                return Some(longer);
            }
            if seen.insert(next.clone()) {
                longer.push((next.clone(), 0));
                ways.push_back(longer);
            }
        }
    }
    None
}

/// All files that can be reached from a file.
fn reached(start: &Module, edges: &BTreeMap<Module, BTreeMap<Module, usize>>) -> BTreeSet<Module> {
    let (mut all, mut open) = (BTreeSet::new(), vec![start]);
    while let Some(file) = open.pop() {
        for next in edges.get(file).into_iter().flat_map(|it| it.keys()) {
            if all.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    all
}

/// Circles among the files of each member.
pub fn circles(tree: &[(String, String)]) -> Vec<Fault> {
    let (mut faults, mut found) = (Vec::new(), BTreeSet::new());
    for member in MEMBERS {
        let own =
            || tree.iter().filter_map(|file| Some((file, place(&file.0).filter(|it| it.0 == member)?.1)));
        let modules: BTreeSet<Module> = own().map(|(_, module)| module).collect();
        let files: BTreeMap<Module, File<'_>> = own()
            .map(|((name, text), module)| (module.clone(), read(name, text, module, &modules)))
            .collect();
        let edges = files.iter().map(|(module, file)| (module.clone(), imports(file, &files))).collect();
        let reach: BTreeMap<&Module, BTreeSet<Module>> =
            files.keys().map(|module| (module, reached(module, &edges))).collect();
        for (module, file) in &files {
            let both = |it: &&Module| reach[module].contains(*it) && reach[*it].contains(module);
            let circle: Vec<&str> = files.keys().filter(both).map(|module| files[module].name).collect();
            if circle.is_empty() || !found.insert(circle.clone()) {
                continue;
            }
            let way = way_round(module, &edges).unwrap_or_default();
            let line = way.first().map_or(1, |(_, line)| *line);
            let step = |(module, line): &(Module, usize)| format!("{}:{line}", files[module].name);
            let way: Vec<String> = way.iter().map(step).chain([file.name.to_owned()]).collect();
            let (count, way, all) = (circle.len(), way.join(" -> "), circle.join(" "));
            let what = format!("{count} files import each other: {way}; all of them: {all}");
            faults.push(fault(file.name, line, what));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults of a member `cli` with these files.
    fn of(files: &[(&str, &str)]) -> Vec<String> {
        let tree: Vec<(String, String)> =
            files.iter().map(|(name, text)| (format!("cli/src/{name}"), (*text).to_owned())).collect();
        circles(&tree).iter().map(Fault::to_string).collect()
    }

    #[test]
    fn files_that_import_each_other_are_reported_with_the_way() {
        let files = [
            ("main.rs", "mod a;\nmod b;\nmod c;"),
            ("a.rs", "use crate::b::{self, f};\npub fn g() {}"),
            ("b.rs", "pub fn f() {\n    super::c::h()\n}"),
            ("c.rs", "use crate::b;\nuse crate::a;\npub fn h() { a::g() }"),
        ];
        let told = of(&files);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with("cli/src/a.rs:1: 3 files"), "{told:?}");
        assert!(
            told[0].contains("cli/src/a.rs:1 -> cli/src/b.rs:2 -> cli/src/c.rs:3 -> cli/src/a.rs;"),
            "{told:?}"
        );
        assert!(told[0].ends_with("all of them: cli/src/a.rs cli/src/b.rs cli/src/c.rs"), "{told:?}");
        // Without the last import back there is no circle.
        let open = [files[0], files[1], files[2], ("c.rs", "use crate::a;\npub fn h() {}")];
        assert_eq!(of(&open), [""; 0]);
        // `crate` is the file's own member.
        let two = [("src/a.rs", "use crate::b::f;"), ("ffi/src/b.rs", "use crate::a::g;")];
        let two = two.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(circles(&two).len(), 0);
    }

    #[test]
    fn a_child_takes_nothing_from_a_parent_that_takes_it() {
        let parent = "mod child;\nuse child::g;\npub fn f() { g() }";
        let taking = "use super::f;\npub fn g() { f() }";
        assert_eq!(of(&[("a/mod.rs", parent), ("a/child.rs", taking)]).len(), 1);
        assert_eq!(of(&[("a.rs", parent), ("a/child.rs", taking)]).len(), 1);
        for called in ["mod child;\npub fn f() { child::g() }", "mod child;\npub fn f() { self::child::g() }"]
        {
            assert_eq!(of(&[("a/mod.rs", called), ("a/child.rs", taking)]).len(), 1, "{called}");
        }
        // The parent may declare the child, and publish its items.
        for declared in ["mod child;\npub fn f() {}", "mod child;\npub use child::g;\npub fn f() {}"] {
            assert_eq!(of(&[("a/mod.rs", declared), ("a/child.rs", taking)]).len(), 0, "{declared}");
        }
        // But it may not use them at the same time.
        let used = "mod child;\npub use child::g;\npub fn f() { g() }";
        assert_eq!(of(&[("a/mod.rs", used), ("a/child.rs", taking)]).len(), 1);
        assert_eq!(of(&[("a/mod.rs", parent), ("a/child.rs", "use super::*;\npub fn g() {}")]).len(), 1);
    }

    #[test]
    fn a_name_is_followed_to_the_file_that_defines_it() {
        let parent =
            ("a/mod.rs", "mod b;\nmod c;\npub use b::f;\npub use self::c::g as h;\npub use std::mem::swap;");
        let through = [
            parent,
            ("a/b.rs", "use super::h;\npub fn f() {}"),
            ("a/c.rs", "use crate::a::f;\npub fn g() {}"),
        ];
        let told = of(&through);
        assert!(told.len() == 1 && told[0].contains("a/b.rs:1 -> cli/src/a/c.rs:1"), "{told:?}");
        let out = [
            parent,
            ("a/b.rs", "use super::swap;\npub fn f() {}"),
            ("a/c.rs", "use super::f;\npub fn g() {}"),
        ];
        assert_eq!(of(&out), [""; 0]);
    }

    #[test]
    fn tests_comments_and_texts_import_nothing() {
        let a = ("a.rs", "use crate::b::f;\npub fn g() {}");
        for b in [
            "pub fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::a::g;\n}",
            "pub fn f() {}\n#[cfg(test)]\nuse crate::a::g;",
            "//! [`crate::a::g`]\npub fn f() -> &'static str { \"crate::a::g\" }",
            "mod inner {\n    pub fn g() { super::f() }\n}\npub fn f() { inner::g() }",
        ] {
            assert_eq!(of(&[a, ("b.rs", b)]), [""; 0], "{b}");
        }
        let inner = "pub fn f() {}\nmod inner {\n    use super::super::a::g;\n}";
        assert_eq!(of(&[a, ("b.rs", inner)]).len(), 1);
    }
}
