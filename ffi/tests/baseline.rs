//! Compares the interface with the one that programs were built against: symbols, layouts and numbers, recorded in
//! `abi/baseline.txt`.
//!
//! The symbols are those that the installed shared library exports, so that nothing else leaks out of it. Layouts and
//! numbers come from a C compiler: the test writes a program from the header's names, compiles it and runs it.
//! `FOREBAY_BLESS=1 cargo test -p forebay-ffi --test baseline` records a change.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::process::Command;

#[path = "support/gcc.rs"]
mod gcc;
#[path = "support/library.rs"]
mod library;

use library::{installed, root, succeed, target};

const FILE: &str = "ffi/abi/baseline.txt";

fn header() -> String {
    std::fs::read_to_string(root().join("ffi/include/forebay.h")).unwrap()
}

/// The header's text without comments and preprocessor lines other than `#define`.
fn code(header: &str) -> Vec<&str> {
    let mut inside = false;
    let plain = header.lines().filter(|line| {
        let line = line.trim_start();
        let comment = inside || line.starts_with("/*");
        inside = comment && !line.contains("*/");
        !comment && !line.starts_with("//")
    });
    plain.map(|line| line.split(" //").next().unwrap_or(line).trim_end()).collect()
}

/// The declarations of the header.
#[derive(Default)]
struct Names {
    /// Structs with their fields.
    structs: Vec<(String, Vec<String>)>,
    /// Enumerators and constants.
    numbers: Vec<String>,
    functions: BTreeSet<String>,
    /// Types that are another type's name.
    aliases: Vec<String>,
}

/// The name at the end of a declaration: `uint32_t row_bytes[2];` declares `row_bytes`, and `fb_status (*enqueue)(void
/// *data);` declares `enqueue`.
fn declared(line: &str) -> Option<String> {
    let line = line.trim().trim_end_matches([';', ',']);
    let name = match line.split_once("(*") {
        Some((_, rest)) => rest.split(')').next()?,
        None => line.split('[').next()?.rsplit([' ', '*']).next()?,
    };
    let word = |c: char| c.is_alphanumeric() || c == '_';
    (!name.is_empty() && name.chars().all(word)).then(|| name.to_owned())
}

fn names(header: &str) -> Names {
    let mut names = Names::default();
    let lines = code(header);
    let mut at = 0;
    while let Some(line) = lines.get(at) {
        at += 1;
        let line = line.trim();
        if let Some(define) = line.strip_prefix("#define FB_") {
            // The include guard has no value.
            names.numbers.extend(define.split_once(' ').map(|(name, _)| format!("FB_{name}")));
        } else if let Some(rest) = line.strip_prefix("typedef struct ").filter(|rest| rest.ends_with('{')) {
            let body = lines[at..].iter().take_while(|line| !line.starts_with('}'));
            let fields: Vec<&str> = body.map(|line| line.trim()).collect();
            at += fields.len();
            let text = fields.join(" ");
            let fields = text.split_inclusive(';').filter_map(declared).collect();
            names.structs.push((rest.trim_end_matches([' ', '{']).to_owned(), fields));
        } else if line.starts_with("enum ") {
            let body: Vec<&str> =
                lines[at..].iter().take_while(|line| !line.starts_with("};")).copied().collect();
            at += body.len();
            let listed = body.iter().filter(|line| line.trim().starts_with("FB_"));
            names.numbers.extend(listed.filter_map(|line| line.split_whitespace().next()).map(str::to_owned));
        } else if line.starts_with("typedef uint") {
            names.aliases.extend(declared(line));
        } else if let Some((before, _)) = line.split_once('(')
            && let Some(name) = before.rsplit([' ', '*']).next().filter(|name| name.starts_with("fb_"))
            && !line.starts_with("typedef")
        {
            names.functions.insert(name.to_owned());
        }
    }
    names
}

/// A program that prints how a C compiler lays out all structs.
fn program(names: &Names) -> String {
    let mut text = String::from("#include <forebay.h>\n#include <stdio.h>\nint main(void) {\n");
    for number in names.numbers.iter().collect::<BTreeSet<_>>() {
        let _ = writeln!(text, "    printf(\"number {number} = %llu\\n\", (unsigned long long)({number}));");
    }
    for alias in names.aliases.iter().collect::<BTreeSet<_>>() {
        let _ = writeln!(text, "    printf(\"type {alias}: %zu bytes\\n\", sizeof({alias}));");
    }
    for (name, fields) in &names.structs {
        let _ = writeln!(
            text,
            "    printf(\"struct {name}: %zu bytes, aligned %zu\\n\", sizeof({name}), _Alignof({name}));"
        );
        for field in fields {
            let size = format!("sizeof((({name} *)0)->{field})");
            let _ = writeln!(
                text,
                "    printf(\"    {field} at %zu, %zu bytes\\n\", offsetof({name}, {field}), {size});"
            );
        }
    }
    text + "    return 0;\n}\n"
}

/// The symbols that the shared library exports.
fn exported() -> BTreeSet<String> {
    let mut nm = Command::new("nm");
    nm.args(["--dynamic", "--defined-only"]).arg(installed().join("lib/libforebay.so"));
    succeed(nm).lines().filter_map(|line| line.split_whitespace().last().map(str::to_owned)).collect()
}

fn layouts(names: &Names) -> String {
    let (source, built) = (target().join("layout.c"), target().join("layout"));
    std::fs::create_dir_all(target()).unwrap();
    std::fs::write(&source, program(names)).unwrap();
    let mut compiler = Command::new("gcc");
    compiler.args(["-std=c11", "-Wall", "-Werror"]).arg("-I").arg(root().join("ffi/include"));
    compiler.arg(&source).arg("-o").arg(&built);
    succeed(compiler);
    succeed(Command::new(&built))
}

fn now() -> String {
    let names = names(&header());
    let symbols: String = exported().iter().fold(String::new(), |mut text, symbol| {
        let _ = writeln!(text, "symbol {symbol}");
        text
    });
    format!("{symbols}{}", layouts(&names))
}

/// The lines that one side has and the other lacks; a field belongs to its struct.
fn changes(recorded: &str, found: &str) -> Vec<String> {
    let lines = |text: &str| {
        let mut owner = String::new();
        text.lines()
            .map(|line| {
                if !line.starts_with(' ') {
                    owner = line.split(':').next().unwrap_or(line).to_owned();
                    return line.to_owned();
                }
                format!("{owner}: {}", line.trim())
            })
            .collect::<Vec<String>>()
    };
    let (old, new) = (lines(recorded), lines(found));
    let gone = old.iter().filter(|line| !new.contains(line)).map(|line| format!("- {line}"));
    let come = new.iter().filter(|line| !old.contains(line)).map(|line| format!("+ {line}"));
    gone.chain(come).collect()
}

#[test]
fn the_interface_is_the_recorded_one() {
    if !["gcc", "nm"].into_iter().all(gcc::is_there) {
        return;
    }
    let (file, found) = (root().join(FILE), now());
    if std::env::var_os("FOREBAY_BLESS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &found).unwrap();
    }
    let changes = changes(&std::fs::read_to_string(&file).unwrap_or_default(), &found);
    assert!(
        changes.is_empty(),
        "the C interface differs from {FILE}:\n{}\nRaise FB_ABI_VERSION for what is gone or has changed, then \
         record it: FOREBAY_BLESS=1 cargo test -p forebay-ffi --test baseline",
        changes.join("\n")
    );
}

#[test]
fn the_library_exports_what_the_header_declares_and_nothing_else() {
    if !gcc::is_there("nm") {
        return;
    }
    let declared = names(&header()).functions;
    assert!(declared.len() > 20, "{declared:?}");
    assert_eq!(exported(), declared);
}

#[test]
fn a_changed_declaration_is_named() {
    let old = "symbol fb_a\nnumber FB_X = 1\nstruct fb_s: 16 bytes, aligned 8\n    a at 0, 8 bytes\n";
    let new = "symbol fb_b\nnumber FB_X = 2\nstruct fb_s: 16 bytes, aligned 8\n    a at 8, 8 bytes\n";
    let wanted = [
        "- symbol fb_a",
        "- number FB_X = 1",
        "- struct fb_s: a at 0, 8 bytes",
        "+ symbol fb_b",
        "+ number FB_X = 2",
        "+ struct fb_s: a at 8, 8 bytes",
    ];
    assert_eq!(changes(old, new), wanted);
    assert_eq!(changes(old, old), Vec::<String>::new());
}

#[test]
fn the_headers_names_are_read() {
    let header = "\
/* fb_not(a call) */
#ifndef FB_GUARD_H
#define FB_GUARD_H
#define FB_ONE 1
// fb_neither(this)
enum fb_status
#if 1
  : uint32_t
#endif // 1
 {
    // Fine.
    FB_OK = 0,
    FB_BAD = 1,
};
typedef uint32_t fb_status;
typedef struct fb_cache fb_cache;
typedef struct fb_batch_row {
    uint32_t bytes[2];
    const struct fb_batch_row *next;
    fb_status (*call)(void *data,
                      void *stream);
} fb_batch_row;
typedef uint64_t fb_step;
fb_status fb_open(struct fb_cache *cache);
const char *fb_text(uint32_t a,
                    uint32_t b);
";
    let names = names(header);
    assert_eq!(names.numbers, ["FB_ONE", "FB_OK", "FB_BAD"]);
    let fields = ["bytes", "next", "call"].map(str::to_owned).to_vec();
    assert_eq!(names.structs, [("fb_batch_row".to_owned(), fields)]);
    assert_eq!(names.aliases, ["fb_status", "fb_step"]);
    assert_eq!(names.functions.into_iter().collect::<Vec<_>>(), ["fb_open", "fb_text"]);
}

/// Calls without a handle and a pointer, which a caller cannot misuse.
const HARMLESS: [&str; 4] = ["fb_abi_version", "fb_plan_note_text", "fb_status_text", "fb_version"];

/// The programs of misuse use a table of calls, which must list all of them.
#[test]
fn every_call_is_misused() {
    let table = std::fs::read_to_string(root().join("ffi/c-tests/calls.h")).unwrap();
    let listed = |name: &str| table.contains(&format!("CALL({}, ", name.trim_start_matches("fb_")));
    let calls = names(&header()).functions;
    let missing: Vec<&String> = calls.iter().filter(|name| !listed(name)).collect();
    assert_eq!(missing, HARMLESS);
}
