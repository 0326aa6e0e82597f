//! Tests with input of any content: random command lines and files, text that would control a terminal, endless text.
//!
//! Whatever the input, the command gives a result or one line of error: no panic, no signal, no line from the input.
//! Each run has a limit on its address space and on its processor time, which a defect would exceed. `FOREBAY_SOAK`
//! tries more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use command::{forebay, refuses, succeeds};
use forebay::text::{ECHO, steers};
use serde_json::{Value, json};

/// The longest error line: a few texts from the input, and our own words.
const LINE: usize = 1_500;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name)
}

/// A plan that succeeds.
const PLAN: [&str; 5] = ["plan", "--gpu", "141GB", "--weights", "38GB"];

/// A point that is simulated.
const POINT: [&str; 9] =
    ["simulate", "--setup", "ess", "--context", "32768", "--batch", "8", "--ratio", "0.2"];

/// A folder for one test only.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hostile-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs the command in `folder`, within limits.
fn run(folder: &Path, arguments: &[String]) -> Output {
    let mut command = Command::new("sh");
    let script = "ulimit -v 4000000; ulimit -t 20; exec \"$@\"";
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_forebay")]).args(arguments);
    command.env("LC_ALL", "C.UTF-8").current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

/// Checks the limits that hold for every output, whatever the input.
fn check(output: &Output, asked: &dyn std::fmt::Debug) {
    let errors = String::from_utf8(output.stderr.clone()).unwrap();
    let status = output.status.code();
    assert!(matches!(status, Some(0..=2)), "{asked:?}: {}: {errors}", output.status);
    assert!(!errors.contains("panicked"), "{asked:?}: {errors}");
    let lines = usize::from(status == Some(2));
    assert_eq!(errors.lines().count(), lines, "{asked:?}: {errors}");
    assert!(
        errors.is_empty() || errors.starts_with("error: ") && errors.len() <= LINE,
        "{asked:?}: {errors}"
    );
    assert!(status != Some(2) || output.stdout.is_empty(), "{asked:?} printed something");
    for text in [errors.as_str(), &String::from_utf8_lossy(&output.stdout)] {
        let steering = text.chars().find(|c| steers(*c) && *c != '\n');
        assert_eq!(steering, None, "{asked:?}: {text}");
    }
}

/// Random numbers from a seed (xorshift).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 20) as usize % end.max(1)
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// Runs `body` for so many seeds, or many more in a soak, two at a time. It returns whether a run succeeded: neither
/// all runs nor next to none may succeed.
fn seeds(count: u64, body: impl Fn(&mut Chance) -> bool + Sync) {
    let count = if std::env::var_os("FOREBAY_SOAK").is_some() { 20 * count } else { count };
    let answered: u64 = std::thread::scope(|scope| {
        let start = |start: u64| {
            let body = &body;
            let one = move |seed: u64| body(&mut Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
            scope.spawn(move || (start..=count).step_by(2).map(|seed| u64::from(one(seed))).sum::<u64>())
        };
        [start(1), start(2)].into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("{answered} of {count} were answered");
    assert!(answered > count / 20 && answered < count, "{answered} of {count}");
}

/// A selection trace of two layers and three steps, with any label and any model name.
fn trace(label: &str) -> Vec<u8> {
    let header = json!({"label": label, "model": label, "layers": 2, "k": 2, "steps": 3, "warm_steps": 0,
        "first_position": 5, "decode_start": 5, "context": 8})
    .to_string();
    let mut bytes = [b"TOPKTRC1", &(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat();
    bytes.extend([2, 0, 0, 0, 0, 0].repeat(2));
    bytes.extend([1, 0, 1, 0, 3, 0].repeat(2));
    bytes.extend([0; 4].repeat(2));
    bytes
}

/// Requests with shared prefixes.
const REQUESTS: &str = r#"{"timestamp":0,"input_length":1024,"output_length":3,"hash_ids":[0,1]}
{"timestamp":5,"input_length":1500,"output_length":3,"hash_ids":[0,1,2]}
{"timestamp":9,"input_length":512,"output_length":3,"hash_ids":[0]}
"#;

/// A valid file of each kind, by its file name.
fn files() -> BTreeMap<&'static str, Vec<u8>> {
    let setup = fs::read(data("setups/ess.json")).unwrap();
    let whole: Value = serde_json::from_slice(&setup).unwrap();
    BTreeMap::from([
        ("measured", fs::read(data("setups/ess-measurements.json")).unwrap()),
        ("misses", whole["misses"].to_string().into_bytes()),
        ("rates", whole["link"]["rates"].to_string().into_bytes()),
        ("requests", REQUESTS.as_bytes().to_vec()),
        ("setup", setup),
        ("table", succeeds(&[&POINT[..], &["--write-table", "-"]].concat()).into_bytes()),
        ("trace", trace("small")),
    ])
}

/// The options of a command, and whether each takes a value, read from its help, so that new ones are found too.
fn options(command: &str) -> Vec<(String, bool)> {
    let help = succeeds(&[command, "--help"]);
    let named = help.lines().filter_map(|line| {
        let line = line.trim_start();
        let option = line.starts_with('-').then(|| line.find("--").and_then(|at| line.get(at..)))??;
        let end = option.find(|c: char| c != '-' && !c.is_ascii_alphanumeric()).unwrap_or(option.len());
        let (name, rest) = option.split_at(end);
        Some((name.to_owned(), rest.starts_with(" <")))
    });
    let found: Vec<(String, bool)> = named.filter(|(name, _)| name.len() > 2 && name != "--help").collect();
    assert!(found.len() > 2 && found.iter().any(|(_, valued)| *valued), "{command}: {found:?}");
    found
}

/// A value that no option expects, or one for another option.
const WORDS: &str = "0 1 2 3 8 64 512 4096 32768 131072 -1 -0.5 0.1 0.999 1.5 37 4294967295 4294967296 \
                     18446744073709551615 18446744073709551616 1e308 1e-308 1e400 NaN inf -inf 0x10 1_000 , 1,2 \
                     1,,2 0.1,0.2,0.5 max auto ess glm-9 pcie4 -1GB/s NaNGB/s none best on lru,belady cuda:0 \
                     cuda:99999999999 --json - -- \u{202e}evil \u{1b}]0;evil\u{7} é漢🦀 /dev/null /dev/full \
                     /nowhere/x trace requests setup misses rates table measured out folder missing";

/// Values that options expect; for unlisted options none are known.
const GOOD: [(&str, &str); 24] = [
    ("--batch", "1 8 52 4,8"),
    ("--capacity", "1 2 8"),
    ("--context", "4096 32768 8K"),
    ("--gpu", "80GiB 141GB"),
    ("--host", "1TB 64GiB"),
    ("--html", "page -"),
    ("--json", "out - /dev/null"),
    ("--link", "pcie4 pcie5 37GB/s"),
    ("--misses", "misses"),
    ("--model", "deepseek-v3.2 glm-5.2"),
    ("--mtp", "1 2 4"),
    ("--output", "made -"),
    ("--overlap", "none da dba best"),
    ("--perfetto", "events -"),
    ("--policy", "lru belady lru,fifo,s3-fifo"),
    ("--pool-slots", "64 65536 1085440"),
    ("--prompt-share", "0.2 0.5 1 0.2,0.5"),
    ("--rates", "rates"),
    ("--ratio", "0.2 0.5 1 0.2,0.5"),
    ("--setup", "ess setup"),
    ("--slots", "2 3 4"),
    ("--table", "table"),
    ("--trace", "trace"),
    ("--warmup", "0 2"),
];

/// A value for the option: one that it expects, or one that no option expects.
fn value(option: &str, chance: &mut Chance) -> String {
    let of = |words: &str, chance: &mut Chance| {
        let words: Vec<&str> = words.split_whitespace().collect();
        (*chance.one(&words)).to_owned()
    };
    match GOOD.iter().find(|(name, _)| *name == option) {
        Some((_, good)) if chance.below(4) > 0 => of(good, chance),
        _ => match chance.below(10) {
            0 => chance.one(&["x", "9", "é", "\u{202e}"]).repeat(1 << chance.below(14)),
            1 => (*chance.one(&["", " ", "a\nb"])).to_owned(),
            _ => of(WORDS, chance),
        },
    }
}

/// A command line: mostly options that its command has, with expected and unexpected values.
fn line(command: &str, first: &[&str], options: &[(String, bool)], chance: &mut Chance) -> Vec<String> {
    let mut line = vec![command];
    line.extend((!first.is_empty()).then(|| *chance.one(first)));
    // Most commands need these.
    match command {
        "doctor" => line.extend(["--no-rates", "--device", "host"]),
        "plan" if chance.below(8) > 0 => line.extend(&PLAN[1..]),
        "simulate" if chance.below(8) > 0 => line.extend(&POINT[1..]),
        _ => {}
    }
    let mut line: Vec<String> = line.into_iter().map(str::to_owned).collect();
    for _ in 0..chance.below(4) {
        let (option, valued) = chance.one(options);
        if line.contains(option) && chance.below(8) > 0 {
            continue;
        }
        match valued {
            true if chance.below(4) == 0 => line.push(format!("{option}={}", value(option, chance))),
            true => line.extend([option.clone(), value(option, chance)]),
            false => line.push(option.clone()),
        }
    }
    line.extend((chance.below(8) == 0).then(|| value("", chance)));
    line
}

#[test]
fn any_command_line_gives_a_result_or_one_line() {
    let folder = folder("lines");
    fs::create_dir(folder.join("folder")).unwrap();
    let files = files();
    // Options that measure the machine take long and are left out.
    let known = [
        ("replay", &["trace", "trace", "requests", "setup"][..]),
        ("plan", &[]),
        ("simulate", &[]),
        ("fit", &["measured", "measured", "trace"]),
        ("doctor", &[]),
    ]
    .map(|(command, first)| (command, first, options(command)));
    seeds(120, |chance| {
        let own = folder.join(format!("{}", chance.0));
        fs::create_dir(&own).unwrap();
        for (name, content) in &files {
            fs::write(own.join(name), content).unwrap();
        }
        let (command, first, options) = chance.one(&known);
        let line = line(command, first, options, chance);
        let output = run(&own, &line);
        check(&output, &line);
        fs::remove_dir_all(&own).unwrap();
        output.status.success()
    });
}

/// Changes a few places of a content.
fn mutated(content: &[u8], chance: &mut Chance) -> Vec<u8> {
    const PIECES: [&str; 24] = [
        "1",
        "2",
        "64",
        "0.5",
        "0",
        "-1",
        "1e308",
        "1e999",
        "4294967296",
        "18446744073709551616",
        "NaN",
        "null",
        "true",
        "\"\"",
        "[]",
        "{}",
        "[[",
        ",",
        "}",
        "\n\n\n",
        "\u{202e}",
        "\u{1b}[2J",
        "\u{0}",
        "999999999999999999999999999999",
    ];
    let mut bytes = content.to_vec();
    if chance.below(2) == 0 {
        // Changes one digit: mostly still valid for the format.
        let digits: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at].is_ascii_digit()).collect();
        bytes[*chance.one(&digits)] = b'0' + chance.below(10) as u8;
        return bytes;
    }
    for _ in 0..=chance.below(2) {
        let at = chance.below(bytes.len());
        let end = (at + 1 + chance.below(6)).min(bytes.len());
        match chance.below(12) {
            0 => bytes.truncate(at),
            1 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << chance.below(8)),
            2 => bytes.splice(at..at, PIECES[chance.below(PIECES.len())].bytes()).for_each(drop),
            3 => {
                let again = bytes[at..(at + chance.below(200)).min(bytes.len())].to_vec();
                bytes.splice(at..at, again).for_each(drop);
            }
            4 => bytes.splice(at..at, vec![b'['; 1 << chance.below(16)]).for_each(drop),
            _ => {
                // A whole number in the text, from its beginning.
                let digit = |byte: &u8| byte.is_ascii_digit();
                let from = bytes.iter().skip(at).position(digit).map_or(at, |next| at + next);
                let length = bytes.iter().skip(from).take_while(|byte| digit(byte)).count();
                let end = if length > 0 { from + length } else { end.max(from) };
                bytes.splice(from..end, PIECES[chance.below(PIECES.len())].bytes()).for_each(drop);
            }
        }
    }
    bytes
}

#[test]
fn any_file_gives_a_result_or_one_line() {
    let folder = folder("files");
    let files = files();
    let commands = [
        ("trace", vec!["replay", "FILE", "--prompt-share", "0.5", "--policy", "lru,belady"]),
        ("trace", vec!["replay", "FILE", "--curve"]),
        ("trace", vec!["replay", "FILE", "--html", "-"]),
        ("trace", [&POINT[..], &["--trace", "FILE"]].concat()),
        ("requests", vec!["replay", "FILE", "--capacity", "2"]),
        ("requests", vec!["replay", "FILE", "--html", "-"]),
        ("setup", [&PLAN[..], &["--setup", "FILE", "--context", "32768"]].concat()),
        (
            "setup",
            vec!["simulate", "--setup", "FILE", "--context", "32768", "--batch", "8", "--ratio", "0.2"],
        ),
        ("misses", [&POINT[..], &["--misses", "FILE"]].concat()),
        ("table", [&POINT[..], &["--table", "FILE"]].concat()),
        ("measured", vec!["fit", "FILE", "-o", "-"]),
        ("rates", vec!["fit", "measured", "--rates", "FILE", "--json", "-"]),
    ];
    fs::write(folder.join("measured"), &files["measured"]).unwrap();
    seeds(120, |chance| {
        let (kind, command) = chance.one(&commands);
        let name = format!("{}", chance.0);
        fs::write(folder.join(&name), mutated(&files[kind], chance)).unwrap();
        let line: Vec<String> = command
            .iter()
            .map(|word| if *word == "FILE" { name.clone() } else { (*word).to_owned() })
            .collect();
        let output = run(&folder, &line);
        check(&output, &line);
        fs::remove_file(folder.join(&name)).unwrap();
        output.status.success()
    });
}

/// Reverses the line, clears the screen, sets the title, ends the line.
const STEERING: &str = "A\u{202e}\u{2066}\u{200f}\u{61c}\u{1b}[2J\u{9b}31m\u{7}\u{7f}\n\u{2028}Z";

#[test]
fn foreign_text_never_controls_terminal_or_page() {
    let folder = folder("steering");
    let text = |text: &str| text.to_owned();
    let named = |name: &str| text(name);
    let mut setup: Value = serde_json::from_slice(&fs::read(data("setups/ess.json")).unwrap()).unwrap();
    setup["name"] = json!(STEERING);
    let mut measured: Value =
        serde_json::from_slice(&fs::read(data("setups/ess-measurements.json")).unwrap()).unwrap();
    measured["setup"]["name"] = json!(STEERING);
    fs::write(folder.join("setup"), setup.to_string()).unwrap();
    fs::write(folder.join("measured"), measured.to_string()).unwrap();
    fs::write(folder.join(STEERING), trace(STEERING)).unwrap();
    fs::write(folder.join(format!("{STEERING}.requests")), REQUESTS).unwrap();
    let point = ["--context", "32768", "--batch", "8", "--ratio", "0.2"].map(text);
    let point = |first: &[&str]| [first.iter().map(|word| text(word)).collect(), point.to_vec()].concat();
    let mut lines: Vec<Vec<String>> = vec![
        vec![text("replay"), named(STEERING)],
        vec![text("replay"), named(STEERING), text("--curve")],
        vec![text("replay"), format!("{STEERING}.requests"), text("--capacity"), text("2")],
        point(&["simulate", "--setup", "setup"]),
        point(&["simulate", "--setup", "ess", "--trace", STEERING]),
        [&PLAN[..], &["--setup", "setup", "--context", "32768"]].concat().into_iter().map(text).collect(),
        ["fit", "measured"].map(text).to_vec(),
    ];
    for line in lines.clone() {
        // A page, if there is one, agrees; JSON keeps the text, in escapes.
        let fit = line[0] == "fit";
        lines.push([&line[..], &[text("--json"), text("-")]].concat());
        if !fit && !line.contains(&text("--curve")) {
            lines.push([&line[..], &[text("--html"), text("-")]].concat());
        }
    }
    lines.push(["fit", "measured", "-o", "-"].map(text).to_vec());
    lines.push([&point(&["simulate", "--setup", "setup"])[..], &["--perfetto", "-"].map(text)].concat());
    lines.push([&point(&["simulate", "--setup", "setup"])[..], &["--timeline", "-"].map(text)].concat());
    for line in &lines {
        let output = run(&folder, line);
        check(&output, line);
        assert_eq!(output.status.code(), Some(0), "{line:?}: {output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        if line.ends_with(&[text("--json"), text("-")]) && line[0] == "replay" {
            let entries: Vec<Value> = serde_json::from_str(&printed).unwrap();
            assert!(entries[0]["trace"].as_str().unwrap().starts_with(STEERING), "the text itself");
        }
    }
    // Every refusal names its cause in one line.
    for line in [
        vec![text("replay"), format!("{STEERING}.none")],
        vec![text("fit"), named(STEERING)],
        vec![text("plan"), text("--setup"), named(STEERING)],
        vec![text("plan"), format!("--{STEERING}")],
        vec![text("plan"), text("--model"), named(STEERING)],
        vec![text("plan"), text("--json"), format!("{STEERING}/none")],
        vec![named(STEERING)],
    ] {
        let output = run(&folder, &line);
        check(&output, &line);
        assert_eq!(output.status.code(), Some(2), "{line:?}");
    }
}

/// Each command with a long option, and each option with a long value.
fn long_arguments(long: &str) -> Vec<Vec<String>> {
    let mut lines = Vec::new();
    for command in ["replay", "plan", "simulate", "fit", "bench", "doctor", "completions"] {
        lines.push(vec![command.to_owned(), format!("--{long}")]);
        lines.push([command, long, "--no-such-option"].map(str::to_owned).to_vec());
        let known = if command == "completions" { Vec::new() } else { options(command) };
        for (option, _) in known.into_iter().filter(|(_, valued)| *valued) {
            let mut line = vec![command, &option, long];
            match command {
                "plan" => line.extend(PLAN[1..].chunks(2).filter(|pair| pair[0] != option).flatten()),
                "replay" | "fit" => line.push("missing"),
                "bench" | "doctor" => line.push("--none"),
                _ => {}
            }
            lines.push(line.into_iter().map(str::to_owned).collect());
        }
    }
    lines.extend([vec![long], vec!["replay", long], vec!["fit", long]].map(owned));
    lines
}

fn owned(line: Vec<&str>) -> Vec<String> {
    line.into_iter().map(str::to_owned).collect()
}

/// Setups whose fields have long names or values.
fn long_setups(folder: &Path, long: &str) -> Vec<Vec<String>> {
    let whole: Value = serde_json::from_slice(&fs::read(data("setups/ess.json")).unwrap()).unwrap();
    let mut lines = Vec::new();
    for (number, pointer) in ["", "/model", "/gpu", "/link"].into_iter().enumerate() {
        for (case, change) in [json!({long: 1}), json!({"preset": long, "name": [long]})].iter().enumerate() {
            let mut setup = whole.clone();
            let place = setup.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
            place.extend(change.as_object().unwrap().clone());
            let file = folder.join(format!("setup-{number}-{case}"));
            fs::write(&file, setup.to_string()).unwrap();
            lines.push(owned([&PLAN[..], &["--setup", file.to_str().unwrap()]].concat()));
        }
    }
    lines
}

/// Every kind of input with the text in some place of it.
fn long_files(folder: &Path, long: &str) -> Vec<Vec<String>> {
    let mut header = trace("small");
    header.splice(12..12, format!("{{\"layers\":\"{long}\",").into_bytes());
    let request = format!("{{\"timestamp\":\"{long}\",\"input_length\":1,\"hash_ids\":[\"{long}\"]}}\n");
    let contents = [
        format!("{{\"{long}\":1}}").into_bytes(),
        format!("\"{long}\"").into_bytes(),
        format!("{{\"kind\":\"{long}\"}}").into_bytes(),
        format!("{{\"forebay_measurements\":1,\"setup\":\"{long}\"}}").into_bytes(),
        format!("{{\"forebay_setup\":\"{long}\"}}").into_bytes(),
        request.into_bytes(),
        format!("table 1\n0 {long}\n").into_bytes(),
        long.as_bytes().to_vec(),
        header,
    ];
    let mut lines = Vec::new();
    for (number, content) in contents.iter().enumerate() {
        let path = folder.join(format!("text-{number}"));
        fs::write(&path, content).unwrap();
        let file = path.to_str().unwrap();
        for line in [
            vec!["replay", file],
            [&PLAN[..], &["--setup", file]].concat(),
            vec!["fit", file],
            [&POINT[..], &["--misses", file]].concat(),
            [&POINT[..], &["--table", file]].concat(),
            [&POINT[..], &["--trace", file]].concat(),
        ] {
            lines.push(owned(line));
        }
    }
    lines
}

#[test]
fn an_error_shows_at_most_200_bytes_of_its_input() {
    let folder = folder("echo");
    let long = "A".repeat(10_000);
    let mut refusals = 0;
    let lines = [long_arguments(&long), long_setups(&folder, &long), long_files(&folder, &long)].concat();
    for line in &lines {
        let arguments: Vec<&str> = line.iter().map(String::as_str).collect();
        let output = forebay(&arguments).current_dir(&folder).output().unwrap();
        let shown: Vec<&str> = arguments.iter().map(|word| word.get(..40).unwrap_or(word)).collect();
        check(&output, &shown);
        let error = String::from_utf8(output.stderr).unwrap();
        let echoed = error.bytes().filter(|byte| *byte == b'A').count();
        assert!(echoed <= ECHO, "{shown:?}: {echoed} bytes of it: {error}");
        refusals += usize::from(echoed > 50);
    }
    assert!(refusals > lines.len() / 4, "{refusals} of {} say what they were given", lines.len());
    // The control: a short text is shown whole.
    let short = "A".repeat(ECHO - 1);
    assert!(refuses(&["replay", &short]).contains(&short));
}

/// A trace of 65,536 steps in a context of millions, with as many positions. Pools would visit over a million slots in
/// each step, minutes of work. The limit on processor time is that of every run in this file.
#[test]
fn many_steps_over_many_slots_take_time_by_their_selected_rows() {
    let folder = folder("steps");
    let (k, steps, context) = (64_u32, 1_u32 << 16, 1_u32 << 22);
    let start = context - steps;
    let header = format!(
        r#"{{"layers":1,"k":{k},"steps":{steps},"warm_steps":1,"first_position":{start},
        "decode_start":{},"context":{context}}}"#,
        start + 1
    );
    let mut bytes = [b"TOPKTRC1", &(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat();
    bytes.extend([(k as u16).to_le_bytes(), [0, 0]].concat());
    bytes.resize(bytes.len() + k as usize, 0);
    // Each step except the first replaces its lowest position by the one after its highest, once around.
    for step in 1..steps {
        bytes.extend([1, 0, 1, 0]);
        let mut position = k + step - 1;
        while position >= 0x80 {
            bytes.push(position as u8 | 0x80);
            position >>= 7;
        }
        bytes.extend([position as u8, 0]);
    }
    fs::write(folder.join("long.topk"), bytes).unwrap();
    let call = |more: &str| {
        let words = format!("replay long.topk --memory 3GB --json - {more}");
        let output = run(&folder, &words.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(0), "{more}: {}", String::from_utf8_lossy(&output.stderr));
        let entries: Value = serde_json::from_slice(&output.stdout).unwrap();
        entries
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["total"]["misses"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    // In each step except the first, the warm-up of decoding misses the one new position.
    let misses = u64::from(steps) - 1;
    assert_eq!(call("--slots 300000,1000000"), [misses; 2]);
    assert_eq!(call("--slots 60000 --policy fifo,s3-fifo,belady").len(), 3);
    // Policies that visit every slot in every step are refused by name.
    let words = "replay long.topk --slots 4000000 --memory 3GB --policy decay";
    let output = run(&folder, &words.split(' ').map(str::to_owned).collect::<Vec<_>>());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("decay-tokens scan every slot in every step") && error.contains("most 137438953472"),
        "{error}"
    );
}
