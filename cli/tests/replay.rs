//! Tests of `forebay replay`, run as its users run it: its output, its files, its errors and its exit status.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use command::{forebay, refused, refuses, succeeds};
use forebay::trace::SelectionTrace;
use serde_json::Value;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

/// A folder for one test only.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs the command with `kib` KiB of address space.
fn confined(kib: u32, arguments: &[&str]) -> Output {
    let script = "ulimit -v $1 || exit 9; shift; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", &kib.to_string(), env!("CARGO_BIN_EXE_forebay")]).args(arguments);
    command.env("LC_ALL", "C").stdin(Stdio::null()).output().unwrap()
}

fn entries(arguments: &[&str]) -> Vec<Value> {
    let text = succeeds(&[arguments, &["--json", "-"]].concat());
    match serde_json::from_str(&text).unwrap() {
        Value::Array(entries) => entries,
        other => panic!("no list: {other}"),
    }
}

/// A trace of one layer with every set written out: k 2, warm positions 2 and 3, decode from 4.
fn tiny(name: &str) -> PathBuf {
    let json = br#"{"label":"tiny\u001b[31m","layers":1,"layer_ids":[7],"k":2,"steps":7,"warm_steps":2,
        "first_position":2,"decode_start":4,"context":9}"#;
    let mut bytes = b"TOPKTRC1".to_vec();
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend(json);
    let sets = [[0, 1], [2, 3], [0, 4], [1, 5], [0, 1], [4, 7], [6, 8]];
    let mut old: &[u8] = &[];
    for set in &sets {
        let added: Vec<u8> = set.iter().copied().filter(|p| !old.contains(p)).collect();
        let dropped: Vec<u8> =
            (0..).zip(old).filter(|(_, p)| !set.contains(p)).map(|(rank, _)| rank).collect();
        bytes.extend([added.len() as u8, 0, dropped.len() as u8, 0]);
        for list in [added, dropped] {
            let mut least = 0;
            for value in list {
                bytes.push(value - least);
                least = value + 1;
            }
        }
        old = set;
    }
    let path = folder(name).join("tiny.topk");
    fs::write(&path, bytes).unwrap();
    path
}

/// A small file that unpacks to a large one: one layer, k 65535, all `steps` sets equal, without prompt positions.
fn unfolding(name: &str, steps: u32) -> PathBuf {
    let json = format!(
        r#"{{"layers":1,"k":65535,"steps":{steps},"warm_steps":0,"first_position":65535,
        "decode_start":65535,"context":{}}}"#,
        65535 + steps
    );
    let mut bytes = b"TOPKTRC1".to_vec();
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend(json.as_bytes());
    bytes.extend([0xFF, 0xFF, 0, 0]);
    bytes.resize(bytes.len() + 65535 + 4 * (steps as usize - 1), 0);
    let path = folder(name).join("unfolding.topk");
    fs::write(&path, bytes).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_tiny_trace_counts_as_computed_by_hand() {
    let path = tiny("by-hand");
    // Two slots, warmed with {0,1} and {2,3}: resident 2, 3.
    //   4: {0}: miss, resident 3 0, born 4: 0 4      5: {1}: miss: 4 1, born 5: 1 5
    //   6: {0,1}: 1 hit, 0 missed: 0 1, born 6: 1 6  7: {4}: miss: 6 4, born 7: 4 7
    //   8: {6}: miss
    let warm = entries(&["replay", text(&path), "--slots", "2", "--warmup", "2"]);
    let layer = &warm[0]["per_layer"][0];
    assert_eq!((&layer["layer"], &layer["hits"], &layer["misses"]), (&7.into(), &1.into(), &5.into()));
    assert_eq!(warm[0]["total"]["misses_per_step"], 1.0);
    assert_eq!(warm[0]["total"]["miss_ratio"], 5.0 / 6.0);
    // Eight slots hold all rows. Cold: 0 and 1 are fetched once, 4 and 6 were new here.
    let cold = entries(&["replay", text(&path), "--slots", "8", "--warmup", "0"]);
    assert_eq!((&cold[0]["total"]["hits"], &cold[0]["total"]["misses"]), (&4.into(), &2.into()));
    let warm = entries(&["replay", text(&path), "--slots", "8", "--warmup", "2"]);
    assert_eq!(warm[0]["total"]["misses"], 0);
    assert_eq!(warm[0]["first_steps"], serde_json::json!({"steps": 5, "misses": 0, "misses_cold": 2}));
    // Two query rows: {0,1} of 4 and 5, {0,1,4} of 6 and 7; 8 is an incomplete group.
    let pairs = entries(&["replay", text(&path), "--slots", "8", "--warmup", "0", "--mtp", "2"]);
    assert_eq!(pairs[0]["steps"], 2);
    assert_eq!((&pairs[0]["total"]["hits"], &pairs[0]["total"]["misses"]), (&3.into(), &2.into()));
    assert_eq!(pairs[0]["host_to_device_bytes"], 2 * 656);
    assert_eq!(pairs[0]["device_to_host_bytes"], 4 * 656);
}

#[test]
fn json_has_the_documented_fields_one_entry_for_each_size() {
    let path = demo();
    let all =
        entries(&["replay", text(&path), "--prompt-share", "0.1,0.2", "--prompt-share", "0.3", "--mtp", "2"]);
    assert_eq!(all.len(), 3);
    let trace = SelectionTrace::read(&path).unwrap();
    let header = trace.header();
    for (entry, share) in all.iter().zip([0.1, 0.2, 0.3]) {
        assert_eq!((&entry["schema"], &entry["kind"]), (&2.into(), &"selection".into()));
        assert_eq!(entry["forebay"], env!("CARGO_PKG_VERSION"));
        assert_eq!(entry["trace"], text(&path));
        assert_eq!(entry["layers"], header.layers);
        assert_eq!(entry["k"], header.k);
        assert_eq!(entry["context"], header.context);
        assert_eq!(entry["steps"], header.decode_steps() / 2);
        assert_eq!(entry["prompt_share"], share);
        assert_eq!(entry["slots"], (share * f64::from(header.decode_start) + 0.5).floor() as u32);
        assert_eq!((&entry["policy"], &entry["warmup"]), (&"lru".into(), &32.into()));
        assert_eq!(entry["mtp"], 2);
        let layers = entry["per_layer"].as_array().unwrap();
        assert_eq!(layers.len(), header.layer_ids.len());
        for (layer, id) in layers.iter().zip(&header.layer_ids) {
            assert_eq!(layer["layer"], *id);
            let mean = layer["misses"].as_f64().unwrap() / entry["steps"].as_f64().unwrap();
            assert_eq!(layer["misses_per_step"], mean);
        }
        for field in ["hits", "misses"] {
            let sum: u64 = layers.iter().map(|l| l[field].as_u64().unwrap()).sum();
            assert_eq!(entry["total"][field], sum);
        }
        let (hits, misses) = (&entry["total"]["hits"], &entry["total"]["misses"]);
        let (hits, misses) = (hits.as_f64().unwrap(), misses.as_f64().unwrap());
        assert_eq!(entry["total"]["miss_ratio"], misses / (hits + misses));
        assert_eq!(entry["total"]["misses_per_step"], misses / entry["steps"].as_f64().unwrap());
    }
    let misses: Vec<u64> = all.iter().map(|e| e["total"]["misses"].as_u64().unwrap()).collect();
    assert!(misses.is_sorted_by(|a, b| a > b), "{misses:?}");
}

#[test]
fn policies_are_printed_side_by_side_at_each_size() {
    let path = demo();
    let (policies, slots) = (["belady", "lru", "fifo", "s3-fifo", "decay", "decay-tokens"], ["614", "1229"]);
    let named = policies.join(",");
    let all = entries(&["replay", text(&path), "--slots", &slots.join(","), "--policy", &named]);
    let alone = entries(&["replay", text(&path), "--slots", &slots.join(",")]);
    assert_eq!(all.len(), policies.len() * slots.len());
    for (size, alone) in all.chunks(policies.len()).zip(&alone) {
        assert_eq!(&size[1], alone, "the production pools' entry does not change");
        let looked_up =
            |e: &Value| e["total"]["hits"].as_u64().unwrap() + e["total"]["misses"].as_u64().unwrap();
        for (entry, policy) in size.iter().zip(policies) {
            assert_eq!((&entry["policy"], &entry["slots"]), (&policy.into(), &alone["slots"]));
            assert_eq!(looked_up(entry), looked_up(alone));
            assert!(entry["total"]["misses"].as_u64() >= size[0]["total"]["misses"].as_u64(), "{policy}");
            let first = &entry["first_steps"];
            assert!(first["misses"].as_u64() < first["misses_cold"].as_u64(), "{policy} was warmed");
        }
    }
    let out = succeeds(&["replay", text(&path), "--slots", "614", "--policy", "lru,belady,lru"]);
    let lines = |policy: &str| out.lines().filter(|l| l.trim_start().starts_with(policy)).count();
    assert_eq!((lines("lru "), lines("belady ")), (1, 1), "each policy once:\n{out}");
    let e = refuses(&["replay", text(&path), "--policy", "lru,clock"]);
    assert!(e.contains("'clock'") && e.contains("--policy"), "{e}");
}

#[test]
fn the_text_has_a_heading_one_line_for_each_size_and_the_definitions() {
    let path = demo();
    let out = succeeds(&["replay", text(&path), "--prompt-share", "0.1,0.2"]);
    assert!(out.starts_with(text(&path)), "{out}");
    for part in ["SmolLM2-135M-Instruct", "proxy", "0.100", "0.200", "614 slots", "1229 slots", "656 bytes"] {
        assert!(out.contains(part), "{part} is missing:\n{out}");
    }
    assert!(out.contains("misses / (hits + misses)"));
    assert!(out.is_ascii(), "the locale C was asked for");
    let wide = forebay(&["replay", text(&path)]).env("LC_ALL", "en_US.UTF-8").output().unwrap();
    assert!(String::from_utf8(wide.stdout).unwrap().contains('█'));
    let glm = succeeds(&["replay", text(&path), "--model", "gqa-8x128", "--slots", "100", "--warmup", "0"]);
    assert!(glm.contains("4096 bytes") && glm.contains("no warm-up"), "{glm}");
}

#[test]
fn texts_from_a_trace_cannot_control_the_terminal() {
    let path = tiny("steer");
    let out = succeeds(&["replay", text(&path), "--slots", "2", "--warmup", "0"]);
    assert!(out.contains("tiny?[31m") && !out.contains('\u{1b}'), "{out}");
}

#[test]
fn no_colour_is_printed_if_none_is_wanted() {
    let demo = demo();
    let coloured = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = forebay(arguments).envs(variables.iter().copied()).output().unwrap();
        output.stdout.contains(&0x1B) || output.stderr.contains(&0x1B)
    };
    let force = ("CLICOLOR_FORCE", "1");
    assert!(coloured(&["replay", "--help"], &[force]), "the control: it can print colours");
    for arguments in
        [&["replay", "--help"][..], &["replay"], &["replay", text(&demo), "--prompt-share", "0.2"]]
    {
        assert!(!coloured(arguments, &[force, ("NO_COLOR", "1")]), "{arguments:?}");
    }
}

#[test]
fn the_largest_pool_and_the_longest_step_are_replayed() {
    let demo = demo();
    let misses = |slots: &str| {
        let all = entries(&["replay", text(&demo), "--slots", slots, "--warmup", "0"]);
        (all[0]["slots"].clone(), all[0]["total"]["misses"].clone())
    };
    let (context, whole) = misses("6656");
    assert_eq!(context, 6656);
    assert_eq!(misses("4294967295"), (u32::MAX.into(), whole.clone()));
    assert_eq!(misses("7000").1, whole);
    for (mtp, steps) in [("512", 1), ("300", 1), ("100", 5)] {
        let all = entries(&["replay", text(&demo), "--slots", "9", "--mtp", mtp]);
        assert_eq!(all[0]["steps"], steps);
    }
}

#[test]
fn several_traces_are_replayed_in_the_given_order() {
    let (one, two) = (tiny("several"), demo());
    let all = entries(&["replay", text(&one), text(&two), "--slots", "4,9", "--warmup", "2"]);
    let names: Vec<_> = all.iter().map(|e| (e["layers"].clone(), e["slots"].clone())).collect();
    assert_eq!(names, [(1, 4), (1, 9), (10, 4), (10, 9)].map(|(l, s)| (l.into(), s.into())));
}

#[test]
fn a_json_file_is_written_in_addition_to_the_tables() {
    let file = folder("json-file").join("out.json");
    let out = succeeds(&["replay", text(&demo()), "--prompt-share", "0.2", "--json", text(&file)]);
    assert!(out.contains("Misses per step"));
    let list: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 1);
}

#[test]
fn json_that_cannot_be_written_is_an_error_and_leaves_nothing() {
    let demo = demo();
    let replay = |file: &str| refuses(&["replay", text(&demo), "--prompt-share", "0.2", "--json", file]);
    let e = replay("/dev/full");
    assert!(e.contains("/dev/full") && e.contains("No space left"), "{e}");
    assert!(replay("/no-such-folder/out.json").contains("No such file or directory"));
    let folder = folder("unwritable");
    assert!(replay(text(&folder)).contains("Is a directory"));
    // Bad input is detected before anything is written: the old file is kept.
    let old = folder.join("old.json");
    fs::write(&old, "old").unwrap();
    refuses(&["replay", text(&demo), "no-such-trace", "--json", text(&old)]);
    assert_eq!(fs::read_to_string(&old).unwrap(), "old");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn full_standard_output_is_an_error() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let demo = demo();
    let out = forebay(&["replay", text(&demo), "--prompt-share", "0.2"]).stdout(full).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    let error = String::from_utf8(out.stderr).unwrap();
    assert!(error.contains("standard output: No space left on device;"), "{error}");
}

#[test]
fn bad_traces_are_named_with_their_fault() {
    let folder = folder("bad-traces");
    let whole = fs::read(demo()).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0x10;
    for (path, what) in [
        (write("empty.zst", b""), "the file is empty"),
        (write("cut.zst", &whole[..whole.len() / 2]), "truncated: the file ends early (unpacked byte "),
        (write("flipped.zst", &flipped), "malformed input"),
        (write("tail.zst", &[&whole[..], b"x"].concat()), "bytes follow"),
        (write("version", b"TOPKTRC3\0\0\0\0"), "unsupported version"),
        (write("text.json", b"{}"), "neither `hash_ids` nor `requests`"),
        (write("text", b"x,y"), "the file holds text of no known kind"),
        (folder.clone(), "is a directory"),
        (folder.join("missing"), "No such file or directory;"),
    ] {
        let e = refuses(&["replay", text(&path)]);
        assert!(e.contains(what) && e.contains(text(&path)), "{what}: {e}");
    }
}

#[test]
fn values_out_of_range_are_named_with_the_allowed_range() {
    let demo = demo();
    let replay = |more: &[&str]| refuses(&[&["replay", text(&demo)], more].concat());
    for value in ["0", "7", "nan", "-0.5", "inf", "x", "0.2,0"] {
        let e = replay(&["--prompt-share", value]);
        let named = value.rsplit(',').next().unwrap();
        assert!(e.contains(&format!("'{named}'")) && e.contains("--prompt-share"), "{e}");
        assert!(e.contains("above 0 and at most 1") || e.contains("0 < S <= 1"), "{e}");
    }
    assert!(replay(&["--prompt-share", "0.00001"]).contains("leaves no slot"));
    // Default ratios are left out where they leave no slot.
    let small = tiny("values_without_sense");
    assert_eq!(entries(&["replay", text(&small)]).len(), 2, "0.1 of four tokens is no slot");
    assert!(refuses(&["replay", text(&small), "--prompt-share", "0.1"]).contains("leaves no slot"));
    for (name, least, values) in [
        ("--slots", "1", ["0", "-3", "abc", "4294967296"]),
        ("--mtp", "1", ["0", "-1", "1.5", "4294967296"]),
        ("--warmup", "0", ["-1", "-32", "x", "4294967296"]),
    ] {
        for value in values {
            let e = replay(&[name, value]);
            assert!(e.contains(&format!("'{value}'")) && e.contains(name), "{e}");
            assert!(e.contains(&format!("not a whole number from {least} to 4294967295")), "{e}");
        }
    }
    assert!(replay(&["--slots", "9", "--prompt-share", "0.1"]).contains("cannot be used with"));
    // A ratio is a share of the final context, and replay has no such option.
    let e = replay(&["--ratio", "0.1"]);
    assert!(e.contains("'--ratio") && e.contains("similar") && e.contains("'--prompt-share'"), "{e}");
    assert!(replay(&["--warmup", "65"]).contains("warmup 65, warm_steps 64"));
    assert!(replay(&["--mtp", "513"]).contains("mtp 513, decode_steps 512); pass --mtp up to decode_steps"));
    assert!(replay(&["--policy", "best"]).contains("lru"));
    assert!(replay(&["--model", "gpt-2"]).contains("deepseek-v3.2"));
    assert!(replay(&["--device", "gpu"]).contains("cuda:0"));
    assert!(refuses(&["replay"]).ends_with("<TRACE>... (see --help)\n"));
    assert!(refuses(&["reply"]).contains("reply"));
}

#[test]
fn a_failed_allocation_is_an_error_that_names_the_trace() {
    // 1 GiB of sets and a limit of 300 MiB.
    let path = unfolding("too-large", 4096);
    let arguments = ["replay", text(&path)];
    let e = refused(confined(300 << 10, &arguments), &arguments);
    assert!(e.contains("out of memory") && e.contains(text(&path)) && e.contains("cut the trace"), "{e}");
    let more = unfolding("beyond-the-limit", 4097);
    let e = refuses(&["replay", text(&more)]);
    assert!(e.contains("too large") && e.contains("most 268435456"), "{e}");
    // Rows of 4096 bytes for 10 layers of 6656 tokens are 270 MB, which a replay neither allocates nor maps.
    let demo = demo();
    let arguments = ["replay", text(&demo), "--model", "gqa-8x128", "--prompt-share", "1"];
    assert_eq!(confined(200 << 10, &arguments).status.code(), Some(0));
    let arguments = [&arguments[..], &["--memory", "60MB"]].concat();
    let e = refuses(&arguments);
    assert!(e.contains("out of memory") && e.contains(text(&demo)), "{e}");
    assert!(e.contains("of memory, but the limit is 57.2 MiB; allow more with --memory SIZE"), "{e}");
}

#[test]
fn a_replay_keeps_one_copy_of_the_trace() {
    // 250 MiB of sets; the limit has room for the program and the pools, but not for a second copy.
    let path = unfolding("one-copy", 1000);
    let arguments = ["replay", text(&path), "--slots", "65536", "--json", "-"];
    let output = confined(480 << 10, &arguments);
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Every row is fetched once and stays.
    let total = &list[0]["total"];
    assert_eq!((&total["hits"], &total["misses"]), (&(999 * 65535).into(), &65535.into()));
}

#[test]
fn a_study_that_does_not_fit_is_an_error_that_names_the_trace() {
    // 100 MiB of sets, twice that for one layer's steps, and a limit of 250 MiB.
    let path = unfolding("study-too-large", 400);
    let arguments = ["replay", text(&path), "--slots", "65536", "--policy", "fifo"];
    let e = refused(confined(250 << 10, &arguments), &arguments);
    assert!(e.contains("study policies: out of memory") && e.contains(text(&path)), "{e}");
    let lru = ["replay", text(&path), "--slots", "65536"];
    assert_eq!(confined(250 << 10, &lru).status.code(), Some(0), "the trace itself fits");
}

#[test]
fn a_share_of_an_empty_prompt_is_refused_with_a_hint_at_slots() {
    let json =
        r#"{"layers":1,"k":1,"steps":2,"warm_steps":0,"first_position":0,"decode_start":0,"context":2}"#;
    let mut bytes = b"TOPKTRC1".to_vec();
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend(json.as_bytes());
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 0]);
    let path = folder("empty-context").join("empty.topk");
    fs::write(&path, bytes).unwrap();
    for more in [&[][..], &["--prompt-share", "1"], &["--curve"]] {
        let e = refuses(&[&["replay", text(&path)], more].concat());
        assert!(e.contains("pass --slots") && !e.contains("larger share"), "{e}");
    }
    assert_eq!(entries(&["replay", text(&path), "--slots", "1"])[0]["total"]["hits"], 1);
}

#[test]
fn a_json_output_never_replaces_a_trace() {
    let path = tiny("replaces");
    let before = fs::read(&path).unwrap();
    let (link, hard) = (path.with_file_name("link"), path.with_file_name("hard"));
    std::os::unix::fs::symlink(&path, &link).unwrap();
    fs::hard_link(&path, &hard).unwrap();
    for name in [&path, &link, &hard] {
        let e = refuses(&["replay", text(&demo()), text(&path), "--slots", "2", "--json", text(name)]);
        assert!(e.contains("would replace the trace") && e.contains(text(&path)), "{e}");
    }
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn without_warmup_a_short_prompt_warms_up_with_all_its_rows() {
    let path = tiny("short-prompt");
    let all = entries(&["replay", text(&path), "--slots", "2"]);
    assert_eq!(all, entries(&["replay", text(&path), "--slots", "2", "--warmup", "2"]));
    assert_eq!(all[0]["warmup"], 2);
    let out = succeeds(&["replay", text(&path), "--slots", "2", "--wide"]);
    assert!(out.contains("warm-up with the last 2 prompt positions"), "{out}");
    assert!(out.contains("\n1 layer, k 2, ") && out.contains("5 decode steps of 1 query row "), "{out}");
    assert!(refuses(&["replay", text(&path), "--warmup", "3"]).contains("warmup 3, warm_steps 2"));
}

#[test]
fn a_share_of_the_context_is_shown_where_it_is_meaningful() {
    let demo = demo();
    let out = succeeds(&["replay", text(&demo), "--slots", "1,614,6145"]);
    let shown: Vec<_> = out
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let ratio = words.next()?;
            matches!(words.next()?, "1" | "614" | "6145").then_some(ratio)
        })
        .take(3)
        .collect();
    assert_eq!(shown, ["0.00016", "0.100", "-"], "{out}");
    assert!(out.contains("  1 slot  ") && out.contains("  614 slots  "), "{out}");
}

#[test]
fn a_trace_without_decode_steps_is_named() {
    let path = tiny("all-warm");
    let bytes = fs::read(&path).unwrap();
    let text_of = String::from_utf8_lossy(&bytes[12..]).into_owned();
    let header = &text_of[..=text_of.find('}').unwrap()];
    let all_warm = header.replace("\"warm_steps\":2", "\"warm_steps\":7").replace(":4,", ":9,");
    let mut changed = b"TOPKTRC1".to_vec();
    changed.extend((all_warm.len() as u32).to_le_bytes());
    changed.extend(all_warm.as_bytes());
    changed.extend(&bytes[12 + header.len()..]);
    fs::write(&path, changed).unwrap();
    let e = refuses(&["replay", text(&path), "--slots", "2"]);
    assert!(e.contains("has no decode steps") && !e.contains("--mtp"), "{e}");
}

/// A reader that closes the pipe at once ends every command quietly.
#[test]
fn a_closed_pipe_ends_the_command_quietly() {
    let demo = demo();
    for arguments in [
        &["replay", text(&demo), "--prompt-share", "0.2"][..],
        &["replay", text(&demo), "--prompt-share", "0.2", "--json", "-"],
        &["completions", "bash"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = forebay(arguments).stdout(writer).output().unwrap();
        let errors = String::from_utf8(out.stderr).unwrap();
        assert_eq!((out.status.code(), errors.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn version_help_and_completions() {
    assert_eq!(succeeds(&["--version"]), format!("forebay {}\n", env!("CARGO_PKG_VERSION")));
    assert!(succeeds(&["replay", "--help"]).contains("misses / (hits + misses)"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(succeeds(&["completions", shell]).contains("replay"), "{shell}");
    }
    assert!(refuses(&["completions", "cmd"]).contains("bash"));
    assert!(succeeds(&["--help"]).starts_with("Plans, simulates and measures KV-cache offload"));
    // A call without arguments prints the help.
    let bare = forebay(&[]).output().unwrap();
    assert_eq!(bare.status.code(), Some(2));
}
