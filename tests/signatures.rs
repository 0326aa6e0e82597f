//! Compares the driver's functions, as the library calls them and as the stand-in declares them, with the official
//! `cuda.h`, by a compiler. No other test would find a difference: a symbol is found by its name, whatever its type,
//! and library and stand-in could have the same mistake.
//!
//! Names, numbers and types come from the sources, so a newly added function is compared too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

#[path = "support/tools.rs"]
mod tools;

use tools::root;

const HEADER: &str = "cubin/nvidia/cuda_runtime/include/cuda.h";
const TABLE: &str = "src/device/cuda/driver.rs";
const STRUCTS: &str = "src/device/cuda/structs.rs";
const STANDIN: &str = "standin/driver/cuda_driver.h";

/// The name of a number of [`TABLE`] there and in the header.
const NUMBERS: [(&str, &str); 47] = [
    ("INVALID_VALUE", "CUDA_ERROR_INVALID_VALUE"),
    ("OUT_OF_MEMORY", "CUDA_ERROR_OUT_OF_MEMORY"),
    ("STUB_LIBRARY", "CUDA_ERROR_STUB_LIBRARY"),
    ("NO_DEVICE", "CUDA_ERROR_NO_DEVICE"),
    ("PEER_ACCESS", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    ("INVALID_HANDLE", "CUDA_ERROR_INVALID_HANDLE"),
    ("NOT_READY", "CUDA_ERROR_NOT_READY"),
    ("CAPTURE_FORBIDS", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    ("NOT_SUPPORTED", "CUDA_ERROR_NOT_SUPPORTED"),
    ("ILLEGAL_STATE", "CUDA_ERROR_ILLEGAL_STATE"),
    ("ALREADY_REGISTERED", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    ("CAPTURE_WRONG_THREAD", "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    ("HOST_PORTABLE_MAPPED", "CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP"),
    ("STREAM_NON_BLOCKING", "CU_STREAM_NON_BLOCKING"),
    ("EVENT_DEFAULT", "CU_EVENT_DEFAULT"),
    ("EVENT_DISABLE_TIMING", "CU_EVENT_DISABLE_TIMING"),
    ("CAPTURE_THREAD_LOCAL", "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"),
    ("CAPTURE_RELAXED", "CU_STREAM_CAPTURE_MODE_RELAXED"),
    ("GRAPH_NODE_PRIORITIES", "CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY"),
    ("MEMORY_PINNED", "CU_MEM_ALLOCATION_TYPE_PINNED"),
    ("MEMORY_UNIFIED", "CU_MEMORYTYPE_UNIFIED"),
    ("LOCATION_DEVICE", "CU_MEM_LOCATION_TYPE_DEVICE"),
    ("LOCATION_HOST_NUMA", "CU_MEM_LOCATION_TYPE_HOST_NUMA"),
    ("HANDLE_DESCRIPTOR", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
    ("HANDLE_FABRIC", "CU_MEM_HANDLE_TYPE_FABRIC"),
    ("ACCESS_READ", "CU_MEM_ACCESS_FLAGS_PROT_READ"),
    ("ACCESS_READ_WRITE", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
    ("LAUNCH_PROGRAMMATIC", "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"),
    ("FUNCTION_THREADS", "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"),
    ("FUNCTION_SHARED", "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"),
    ("FUNCTION_MORE_SHARED", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"),
    ("WARP_SIZE", "CU_DEVICE_ATTRIBUTE_WARP_SIZE"),
    ("CAN_MAP_HOST_MEMORY", "CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY"),
    ("UNIFIED_ADDRESSING", "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING"),
    ("CAPABILITY_MAJOR", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
    ("CAPABILITY_MINOR", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    ("VIRTUAL_MEMORY", "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    ("DESCRIPTOR_HANDLES", "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
    ("HOST_NUMA_ID", "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID"),
    ("HOST_NUMA_MEMORY", "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    ("SHARED_BYTES", "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    ("PROCESSORS", "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
    ("COPY_ENGINES", "CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT"),
    ("COPY_IN_STREAM_ORDER", "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"),
    ("COPY_BESIDE_COMPUTE", "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE"),
    ("CLOCK_RATE", "CU_DEVICE_ATTRIBUTE_CLOCK_RATE"),
    ("L2_BYTES", "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE"),
];

/// Which types match, as a call sees them. Handles of the header are pointers and 8 bytes here; enumerations are
/// integers; the target of a pointer has the same size, if the header gives one, is a fraction if it is one there, and
/// is written only if the header allows it.
const RULES: &str = r#"
#include <cstddef>
#include <cstdint>
#include <type_traits>
typedef uint8_t u8; typedef uint32_t u32; typedef uint64_t u64; typedef int32_t i32; typedef float f32;
template <class T, class = void> struct Size { static const size_t value = 0; };
template <class T> struct Size<T, decltype(void(sizeof(T)))> { static const size_t value = sizeof(T); };
template <class Ours, class Theirs> struct Fits {
    static const bool value = sizeof(Ours) == sizeof(Theirs) && !std::is_class<Theirs>::value &&
                              !std::is_floating_point<Theirs>::value;
};
template <class Ours, class Theirs> struct Fits<Ours*, Theirs*> {
    static const bool value = std::is_function<Ours>::value ? std::is_same<Ours, Theirs>::value :
        (std::is_void<Theirs>::value || Size<Theirs>::value == sizeof(Ours)) &&
        std::is_floating_point<Ours>::value == std::is_floating_point<Theirs>::value &&
        (std::is_const<Ours>::value || !std::is_const<Theirs>::value);
};
template <class Ours, class Theirs> struct Same { static const bool value = false; };
template <class... Ours, class... Theirs> struct Same<i32(Ours...), CUresult(Theirs...)> {
    template <bool... all> struct And { static const bool value = true; };
    template <bool first, bool... rest> struct And<first, rest...> {
        static const bool value = first && And<rest...>::value;
    };
    template <size_t ours, size_t theirs, class = void> struct All { static const bool value = false; };
    template <size_t count, class None> struct All<count, count, None> {
        static const bool value = And<Fits<Ours, Theirs>::value...>::value;
    };
    static const bool value = All<sizeof...(Ours), sizeof...(Theirs)>::value;
};
"#;

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap()
}

/// The structures that the driver's functions take, and the functions.
fn read_table() -> String {
    read(STRUCTS) + &read(TABLE)
}

/// A type of the table in C++.
fn translated(rust: &str) -> String {
    let rust = rust.trim();
    let pointer = |prefix: &str, to: &str| {
        let inner = rust.strip_prefix(prefix)?;
        Some(to.replace('T', &translated(inner)))
    };
    if let Some(array) = rust.strip_prefix('[') {
        return translated(array.split(';').next().unwrap());
    }
    let found = pointer("&mut ", "T*").or_else(|| pointer("*mut ", "T*"));
    let found = found.or_else(|| pointer("*const ", "T const*")).or_else(|| pointer("&", "T const*"));
    found.unwrap_or_else(|| rust.replace("Handle", "u64").replace("c_", ""))
}

/// The pieces of `text` between `open` and `close`.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open).skip(1).filter_map(move |rest| Some(rest.split_once(close)?.0))
}

/// The structures of the table, in its order.
fn structures(table: &str) -> String {
    let mut all = String::new();
    for part in between(table, "#[repr(C)]\npub(super) struct ", "\n}") {
        let (name, fields) = part.split_once(" {").unwrap();
        let fields = fields.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.strip_suffix(','));
        all += &format!("struct {name} {{");
        for (field, kind) in fields.filter_map(|field| field.split_once(": ")) {
            let count = kind.split_once("; ").map_or("1", |(_, count)| count.trim_end_matches(']'));
            all += &format!(" {} {field}[{count}];", translated(kind));
        }
        all += " };\n";
    }
    all
}

/// Functions of the table: the symbol, and the types of its arguments.
fn functions(table: &str) -> Vec<(String, Vec<String>)> {
    let macro_call = between(table, "\nfunctions! {", "\n}").next().unwrap();
    let mut all = Vec::new();
    for entry in macro_call.split(");").filter(|entry| entry.contains('"')) {
        let (symbol, arguments) = entry.split_once("\"(").expect("a symbol and its arguments");
        let symbol = symbol.rsplit('"').next().unwrap();
        let kinds = arguments.split(',').filter_map(|argument| argument.split_once(':'));
        all.push((symbol.to_owned(), kinds.map(|(_, kind)| translated(kind)).collect()));
    }
    all
}

/// The comparison of the table with the header, as a program that compiles where they agree.
fn of_table(table: &str) -> String {
    let mut program = String::from("#include <cuda.h>\n");
    program += RULES;
    program +=
        "typedef void HostFunctionOf(void*);\ntypedef HostFunctionOf* HostFunction;\nnamespace ours {\n";
    program += &structures(table);
    for (symbol, arguments) in functions(table) {
        let shape = format!("Same<i32({}), decltype(::{symbol})>", arguments.join(", "));
        program += &format!("static_assert({shape}::value, \"{symbol}\");\n");
    }
    program + "}\n" + &numbers(table)
}

fn numbers(table: &str) -> String {
    let named = |line: &str| {
        let (name, rest) = line.trim().strip_prefix("pub const ")?.split_once(": ")?;
        let (kind, value) = rest.split_once(" = ")?;
        let number = matches!(kind, "i32" | "u32" | "u64").then_some(value.trim_end_matches(';'))?;
        Some((name.to_owned(), number.to_owned()))
    };
    let mut all = String::new();
    for (name, number) in table.lines().filter_map(named) {
        let known = NUMBERS.iter().find(|known| known.0 == name);
        let official = known.unwrap_or_else(|| panic!("{name}: add the name in cuda.h to NUMBERS")).1;
        all += &format!("static_assert((long long)({official}) == {number}, \"{name}\");\n");
    }
    all
}

/// The comparison of the stand-in's header with the official one: its functions declared again, in the official types,
/// and its own types and enumerators next to the official ones.
fn of_standin(header: &str) -> String {
    let (types, functions) = header.split_once("extern \"C\" {").unwrap();
    let types = types.replace("#pragma once", "").replace("#pragma GCC visibility push(default)", "");
    let functions = functions.split("\n}\n").next().unwrap();
    let mut program = String::from("#include <cstddef>\n#include <cstdint>\nnamespace ours {\n");
    program += &format!("{types}\n}}\n#include <cuda.h>\nextern \"C\" {{{functions}\n}}\n");
    for name in enumerators(header) {
        program += &format!("static_assert((int)ours::{name} == (int)::{name}, \"{name}\");\n");
    }
    for name in between(header, "\nstruct ", " {") {
        program += &format!("static_assert(sizeof(ours::{name}) == sizeof(::{name}), \"{name}\");\n");
    }
    program
}

fn symbols(header: &str) -> BTreeSet<&str> {
    between(header, "\nCUresult ", "(").collect()
}

/// Enumerators and their values; the ends of enumerations are the stand-in's own.
fn enumerators(header: &str) -> Vec<&str> {
    let enums = between(header, "\nenum ", "};");
    let all =
        enums.flat_map(|body| body.split(['{', ',']).filter_map(|one| Some(one.split_once('=')?.0.trim())));
    all.filter(|name| !name.ends_with("_LAST")).collect()
}

/// The errors of a compiler about a comparison; empty if it agrees.
fn faults(name: &str, program: &str, cuda_h: &Path) -> Option<String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("signatures");
    std::fs::create_dir_all(&folder).unwrap();
    let source = folder.join(name).with_extension("cpp");
    std::fs::write(&source, program).unwrap();
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-fsyntax-only", "-fmax-errors=20", "-I"]).arg(cuda_h.parent().unwrap());
    let compiled = compiler.arg(&source).output().unwrap();
    (!compiled.status.success()).then(|| String::from_utf8_lossy(&compiled.stderr).into_owned())
}

#[test]
fn the_library_calls_the_driver_as_its_header_says() {
    let Some(cuda_h) = tools::installed(HEADER) else { return };
    let table = read_table();
    assert!(functions(&table).len() >= 40, "functions are found");
    assert_eq!(faults("table", &of_table(&table), &cuda_h), None);
    // Controls: a size, a missing argument, a pointer for a number, a written argument that is only read, a number.
    for (name, from, to, said) in [
        ("size", "(out: &mut Handle, bytes: u64)", "(out: &mut Handle, bytes: u32)", "cuMemAlloc_v2"),
        (
            "missing",
            "(stream: Handle, event: Handle, flags: u32)",
            "(stream: Handle, event: Handle)",
            "cuStreamWaitEvent",
        ),
        ("pointee", "(out: &mut i32, ordinal: i32)", "(out: &mut u64, ordinal: i32)", "cuDeviceGet"),
        (
            "structure",
            "property: &Property, option",
            "property: &Access, option",
            "cuMemGetAllocationGranularity",
        ),
        ("copy", "copy: &Copy2d", "copy: &CopyEnd", "cuMemcpy2DAsync_v2"),
        ("written", "access: &Access", "access: &mut Access", "cuMemSetAccess"),
        ("fraction", "milliseconds: &mut f32", "milliseconds: &mut u32", "cuEventElapsedTime"),
        (
            "optional",
            "context: Handle, default: u32",
            "context: u32, default: u32",
            "cuGraphConditionalHandleCreate",
        ),
        ("batch", "attributes: &CopyAttributes", "attributes: &Copy2d", "cuMemcpyBatchAsync"),
        ("number", "UNIFIED_ADDRESSING: i32 = 41", "UNIFIED_ADDRESSING: i32 = 40", "UNIFIED_ADDRESSING"),
    ] {
        let changed = table.replace(from, to);
        assert_ne!(changed, table, "{name}: the table has changed, and the control with it");
        let found = faults(name, &of_table(&changed), &cuda_h).unwrap_or_default();
        assert!(found.contains(said), "{name}: {found}");
    }
}

#[test]
fn the_stand_in_declares_the_driver_as_its_header_does() {
    let Some(cuda_h) = tools::installed(HEADER) else { return };
    let header = read(STANDIN);
    assert!(symbols(&header).len() >= 60 && enumerators(&header).len() >= 60, "the declarations are found");
    assert_eq!(faults("standin", &of_standin(&header), &cuda_h), None);
    for (name, from, to, said) in [
        ("argument", "cuMemFree_v2(CUdeviceptr dptr)", "cuMemFree_v2(CUevent dptr)", "cuMemFree_v2"),
        ("const", "const CUmemAccessDesc* desc", "CUmemAccessDesc* desc", "cuMemSetAccess"),
        ("value", "CUDA_ERROR_NOT_READY = 600", "CUDA_ERROR_NOT_READY = 601", "CUDA_ERROR_NOT_READY"),
        ("field", "    CUmemAccess_flags flags;\n", "", "CUmemAccessDesc"),
    ] {
        let changed = header.replace(from, to);
        assert_ne!(changed, header, "{name}: the header has changed, and the control with it");
        let found = faults(&format!("standin-{name}"), &of_standin(&changed), &cuda_h).unwrap_or_default();
        assert!(found.contains(said), "{name}: {found}");
    }
}

#[test]
fn the_library_uses_only_functions_that_the_stand_in_has() {
    let (table, header) = (read_table(), read(STANDIN));
    let provided = symbols(&header);
    let missing: Vec<_> =
        functions(&table).into_iter().filter(|(name, _)| !provided.contains(&**name)).collect();
    assert_eq!(missing, []);
}
