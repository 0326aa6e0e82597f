//! Tests of the places to which results are written. A file has its old or its new content, whichever process writes
//! it, whatever the limits, and whenever the command is killed. Results also go to pipes, devices, and files with
//! several names.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/skip.rs"]
mod skip;

use std::fs::{self, File, OpenOptions, Permissions};
use std::hint::spin_loop;
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use command::{forebay, refused, refuses, succeeds};
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, Uid, mkfifo};

/// A command that ends soon and writes little.
const PLAN: [&str; 7] = ["plan", "--gpu", "141GB", "--weights", "38GB", "--context", "8192"];

/// A command that reads files of many kinds.
const POINT: [&str; 9] =
    ["simulate", "--setup", "ess", "--context", "32768", "--batch", "8", "--ratio", "0.2"];

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name).display().to_string()
}

/// A folder for one test only.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder::at(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("outputs-{name}")))
    }

    fn at(path: PathBuf) -> Folder {
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn name(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// The file names in it, in order.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn fifo(&self, name: &str) -> String {
        let path = self.name(name);
        mkfifo(Path::new(&path), Mode::S_IRWXU).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The plan's JSON.
fn plan() -> String {
    succeeds(&[&PLAN[..], &["--json", "-"]].concat())
}

/// Runs the command after a shell command.
fn with_limits(limits: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("{limits}; exec \"$@\"");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_forebay")]).args(arguments);
    command.env("LC_ALL", "C").stdin(Stdio::null());
    command
}

#[test]
fn exceeding_the_file_size_limit_is_an_error_and_no_signal() {
    let folder = Folder::new("limit");
    let out = folder.name("out");
    for old in [None, Some("old")] {
        if let Some(old) = old {
            fs::write(&out, old).unwrap();
        }
        let arguments = [&PLAN[..], &["--html", &out]].concat();
        let error = refused(with_limits("ulimit -f 1", &arguments).output().unwrap(), &arguments);
        assert!(error.contains("write: File too large"), "{error}");
        assert_eq!(fs::read_to_string(&out).ok().as_deref(), old);
        assert_eq!(folder.names().len(), usize::from(old.is_some()));
    }
    // A file is also at standard output; its content is the shell's to remove.
    for arguments in [&PLAN[..], &["--help"], &["completions", "bash"]] {
        let printed = File::create(folder.name("printed")).unwrap();
        let status = with_limits("ulimit -f 0", arguments).stdout(printed).output().unwrap().status;
        assert_eq!(status.code(), Some(2), "{arguments:?}: {status}");
    }
    // Shared memory counts as a file.
    let arguments = ["replay", &data("demo.topk.zst"), "--prompt-share", "0.5", "--json", "-"];
    let error = refused(with_limits("ulimit -f 1", &arguments).output().unwrap(), &arguments);
    assert!(error.contains("ftruncate: File too large") && error.contains("raise the limit"), "{error}");
}

#[test]
fn a_files_name_may_be_as_long_as_the_system_allows() {
    let folder = Folder::new("names");
    let longest = "n".repeat(255);
    succeeds(&[&PLAN[..], &["--json", &folder.name(&longest), "--html", "-"]].concat());
    assert_eq!(folder.names(), [longest]);
    let error = refuses(&[&PLAN[..], &["--json", &folder.name(&"n".repeat(256))]].concat());
    assert!(error.contains("File name too long") && error.len() < 400, "{error}");
    assert_eq!(folder.names().len(), 1);
}

/// Ends a run by a signal after a number of turns; returns its exit status.
fn killed(arguments: &[&str], signal: Signal, turns: u32) -> Output {
    let child = forebay(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    (0..turns).for_each(|_| spin_loop());
    // Not waited for yet: the process id is still its own.
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn whenever_the_command_is_killed_the_file_is_old_or_new_and_nothing_else_is_left() {
    let folder = Folder::new("killed");
    let out = folder.name("out");
    let new = plan();
    let arguments = [&PLAN[..], &["--json", &out]].concat();
    let (mut ended, mut left) = (0, 0);
    let mut runs = 0;
    // On a busy machine many runs end before they are killed, so the test makes more of them.
    while runs < 40 || runs < 400 && ended <= 5 {
        let run = runs % 40;
        runs += 1;
        fs::write(&out, "old").unwrap();
        let signal = if run % 2 == 0 { Signal::SIGINT } else { Signal::SIGTERM };
        let output = killed(&arguments, signal, run * run * 4_000);
        match output.status.signal() {
            Some(number) => {
                assert_eq!(number, signal as i32);
                assert!(output.stderr.is_empty(), "{output:?}");
                ended += 1;
            }
            None => assert_eq!(output.status.code(), Some(0), "{output:?}"),
        }
        let found = fs::read_to_string(&out).unwrap();
        assert!(found == "old" || found == new, "run {run}: {found}");
        left += folder.names().len() - 1;
    }
    println!("{ended} of {runs} were killed; temporary files seen: {left}");
    assert!(ended > 5, "the kills came too late");
    succeeds(&arguments);
    assert_eq!(folder.names(), ["out"]);
    assert_eq!(fs::read_to_string(&out).unwrap(), new);
}

/// Two places where the command waits for another process: it is killed there, at a known moment.
#[test]
fn the_command_can_be_killed_while_it_waits_for_a_pipe() {
    let folder = Folder::new("waits");
    let (input, output, out) = (folder.fifo("in"), folder.fifo("out"), folder.name("file"));
    // More than a pipe holds: the command waits for a reader that reads nothing.
    for (arguments, pipe) in [
        (vec!["fit", &input, "-o", &out], &input),
        ([&POINT[..], &["--perfetto", &output, "--json", &out]].concat(), &output),
    ] {
        let child = forebay(&arguments).stdout(Stdio::null()).spawn().unwrap();
        // Opening the pipe meets the child, whichever side the child opens.
        let met = OpenOptions::new().read(pipe == &output).write(pipe == &input).open(pipe).unwrap();
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        let ended = child.wait_with_output().unwrap().status;
        assert_eq!(ended.signal(), Some(Signal::SIGTERM as i32), "{arguments:?}: {ended}");
        drop(met);
    }
    assert_eq!(folder.names(), ["in", "out"]);
}

#[test]
fn files_of_a_dead_process_are_removed_by_the_next_write() {
    let folder = Folder::new("left");
    fs::write(folder.name(".forebay-1-0.partial"), "half").unwrap();
    // A process that is alive holds its lock.
    let alive = File::create(folder.name(".forebay-1-1.partial")).unwrap();
    alive.lock().unwrap();
    let write = || succeeds(&[&PLAN[..], &["--json", &folder.name("out")]].concat());
    write();
    assert_eq!(folder.names(), [".forebay-1-1.partial", "out"]);
    drop(alive);
    write();
    assert_eq!(folder.names(), ["out"]);
}

#[test]
fn concurrent_writers_of_one_file_leave_one_whole_result() {
    let folder = Folder::new("several");
    let out = folder.name("out");
    fn asked<'a>(context: &'a str, target: &'a str) -> Vec<&'a str> {
        [&PLAN[..5], &["--context", context, "--json", target]].concat()
    }
    let contents = ["4096", "8192"].map(|context| succeeds(&asked(context, "-")));
    for _ in 0..5 {
        let start = |context: &&str| forebay(&asked(context, &out)).stdout(Stdio::null()).spawn().unwrap();
        let children: Vec<_> = ["4096", "8192", "4096", "8192"].iter().map(start).collect();
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        assert!(contents.contains(&fs::read_to_string(&out).unwrap()));
        assert_eq!(folder.names(), ["out"]);
    }
}

/// Runs the command with the content of `input` in a pipe, which is abandoned if the command never reads it.
fn fed(arguments: &[&str], pipe: &str, input: &[u8]) -> Output {
    std::thread::scope(|scope| {
        // A reader may close the pipe early; the test looks at the output, not at the writer.
        let writer = scope.spawn(|| {
            let _ = fs::write(pipe, input);
        });
        let output = forebay(arguments).output().unwrap();
        let mut met =
            OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(pipe).unwrap();
        // It is emptied, because a writer that has not yet seen that the command has left goes on waiting for room.
        while !writer.is_finished() {
            let _ = met.read(&mut [0; 4096]);
            std::thread::yield_now();
        }
        writer.join().unwrap();
        output
    })
}

#[test]
fn a_pipe_is_read_like_a_file_or_refused_in_one_line() {
    let folder = Folder::new("fed");
    let pipe = folder.fifo("pipe");
    let setup = fs::read_to_string(data("setups/ess.json")).unwrap();
    let whole: serde_json::Value = serde_json::from_str(&setup).unwrap();
    for (name, text) in [
        ("setup", setup.clone()),
        ("misses", whole["misses"].to_string()),
        ("rates", whole["link"]["rates"].to_string()),
    ] {
        fs::write(folder.name(name), text).unwrap();
    }
    let (trace, measured) = (data("demo.topk.zst"), data("setups/ess-measurements.json"));
    let table = folder.name("table");
    succeeds(&[&POINT[..], &["--write-table", &table]].concat());
    let (setup, misses, rates) = (folder.name("setup"), folder.name("misses"), folder.name("rates"));
    for (arguments, file) in [
        (vec!["replay", &trace, "--json", "-"], &trace),
        (vec!["replay", &trace, "--curve", "--json", "-"], &trace),
        ([&PLAN[..5], &["--setup", &setup, "--context", "32768", "--json", "-"]].concat(), &setup),
        ([&POINT[..], &["--misses", &misses, "--json", "-"]].concat(), &misses),
        ([&POINT[..], &["--trace", &trace, "--json", "-"]].concat(), &trace),
        ([&POINT[..], &["--table", &table, "--json", "-"]].concat(), &table),
        (vec!["fit", &measured, "-o", "-"], &measured),
        (vec!["fit", &measured, "--rates", &rates, "-o", "-"], &rates),
    ] {
        let piped: Vec<&str> =
            arguments.iter().map(|word| if word == file { pipe.as_str() } else { word }).collect();
        let content = fs::read(file).unwrap();
        let output = fed(&piped, &pipe, &content);
        assert_eq!(output.status.code(), Some(0), "{piped:?}: {output:?}");
        let printed = String::from_utf8(output.stdout).unwrap().replace(&pipe, file);
        assert_eq!(printed, succeeds(&arguments), "{piped:?}");
        for cut in [0, content.len() / 2] {
            refused(fed(&piped, &pipe, &content[..cut]), &piped);
        }
    }
    // Request traces are recognised by their first bytes, which a pipe gives only once.
    let requests = br#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[0]}"#;
    refused(fed(&["replay", &pipe], &pipe, requests), &["replay"]);
    refused(fed(&["doctor", "--root", &pipe], &pipe, b""), &["doctor"]);
}

/// Runs the command, and reads its output from a pipe.
fn read_from(pipe: &str, arguments: &[&str]) -> (Output, String) {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| fs::read_to_string(pipe).unwrap());
        let output = forebay(arguments).output().unwrap();
        (output, reader.join().unwrap())
    })
}

#[test]
fn results_are_written_to_pipes_devices_and_link_targets() {
    let folder = Folder::new("kinds");
    let (pipe, new) = (folder.fifo("pipe"), plan());
    let (output, read) = read_from(&pipe, &[&PLAN[..], &["--json", &pipe]].concat());
    assert!(output.status.success() && read == new, "{output:?}");
    let (measured, setup) = (data("setups/ess-measurements.json"), folder.name("setup"));
    succeeds(&["fit", &measured, "-o", &setup]);
    let (output, read) = read_from(&pipe, &["fit", &measured, "-o", &pipe]);
    assert!(output.status.success() && read == fs::read_to_string(&setup).unwrap(), "{output:?}");
    assert_eq!(folder.names(), ["pipe", "setup"]);

    symlink("made", folder.name("dangling")).unwrap();
    succeeds(&[&PLAN[..], &["--json", &folder.name("dangling")]].concat());
    assert_eq!(fs::read_to_string(folder.name("made")).unwrap(), new);
    assert_eq!(folder.names(), ["dangling", "made", "pipe", "setup"]);

    for (target, why) in [(folder.name("."), "Is a directory"), ("/dev/full".to_owned(), "No space left")] {
        for option in ["--json", "--html"] {
            let error = refuses(&[&PLAN[..], &[option, &target]].concat());
            assert!(error.contains(why), "{error}");
        }
    }
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = forebay(&PLAN).stdout(full).output().unwrap();
    assert!(output.status.code() == Some(2) && output.stderr.ends_with(b"free space\n"), "{output:?}");
    assert_eq!(folder.names(), ["dangling", "made", "pipe", "setup"]);
}

#[test]
fn nothing_is_printed_if_a_file_of_the_same_call_cannot_be_written() {
    let folder = Folder::new("order");
    let (demo, measured) = (data("demo.topk.zst"), data("setups/ess-measurements.json"));
    let requests = folder.name("requests");
    let line = r#"{"timestamp":0,"input_length":1000,"output_length":10,"hash_ids":[1,2]}"#;
    fs::write(&requests, format!("{line}\n")).unwrap();
    let nowhere = folder.name("missing/out");
    let replay = ["replay", &demo, "--slots", "1024"];
    let bench = ["bench", "--quick", "--only", "commit"];
    for (call, printed, file) in [
        (&PLAN[..], Some("--json"), "--html"),
        (&PLAN[..], Some("--html"), "--json"),
        (&PLAN[..], None, "--json"),
        (&POINT[..], Some("--json"), "--html"),
        (&POINT[..], Some("--write-table"), "--json"),
        (&POINT[..], Some("--perfetto"), "--timeline"),
        (&POINT[..], None, "--timeline"),
        (&replay[..], Some("--html"), "--json"),
        (&replay[..], None, "--json"),
        (&["replay", &demo, "--curve", "--slots", "1024"], None, "--json"),
        (&["replay", &requests], Some("--html"), "--json"),
        (&["replay", &requests], Some("--json"), "--html"),
        (&["replay", &requests], None, "--json"),
        (&bench[..], Some("--picture"), "--json"),
        (&["fit", &measured], Some("--output"), "--json"),
        (&["fit", &measured], Some("--json"), "--output"),
        (&["doctor", "--device", "host", "--no-rates"], None, "--json"),
    ] {
        let printed: Vec<&str> = printed.into_iter().flat_map(|option| [option, "-"]).collect();
        let call = [call, &printed, &[file, &nowhere]].concat();
        let error = refuses(&call);
        assert!(error.contains("missing/out") && error.contains("No such file"), "{call:?}: {error}");
    }
    assert_eq!(folder.names(), ["requests"]);
}

#[test]
fn standard_output_is_recognised_under_every_name() {
    let folder = Folder::new("stdout");
    let new = plan();
    for name in ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"] {
        assert_eq!(succeeds(&[&PLAN[..], &["--json", name]].concat()), new, "{name}");
        let error = refuses(&[&PLAN[..], &["--json", "-", "--html", name]].concat());
        assert!(error.contains("name the same file"), "{error}");
    }
    // Also as a file: a file that the shell opened keeps everything written to it.
    let out = folder.name("out");
    for name in ["/dev/stdout", &out] {
        let printed = File::create(&out).unwrap();
        let arguments = [&PLAN[..], &["--json", name]].concat();
        assert!(forebay(&arguments).stdout(printed).status().unwrap().success());
        assert_eq!(fs::read_to_string(&out).unwrap(), new, "{name}");
    }
}

#[test]
fn two_results_in_one_file_are_refused_under_every_name() {
    let folder = Folder::new("same");
    fs::create_dir(folder.name("under")).unwrap();
    fs::write(folder.name("there"), "dear").unwrap();
    fs::hard_link(folder.name("there"), folder.name("second")).unwrap();
    symlink("there", folder.name("link")).unwrap();
    symlink("under/new", folder.name("dangling")).unwrap();
    let trace = data("demo.topk.zst");
    for (one, other) in [
        ("new", "new"),
        ("new", "./new"),
        ("new", "under/../new"),
        ("there", "second"),
        ("there", "link"),
        ("dangling", "under/new"),
    ] {
        let (one, other) = (folder.name(one), folder.name(other));
        for arguments in [
            [&PLAN[..], &["--json", &one, "--html", &other]].concat(),
            [&POINT[..], &["--json", &one, "--perfetto", &other]].concat(),
            vec!["replay", &trace, "--json", &one, "--html", &other],
            vec!["bench", "--json", &one, "--picture", &other],
            vec!["fit", &trace, "-o", &one, "--json", &other],
        ] {
            let error = refuses(&arguments);
            assert!(error.contains("name the same file"), "{arguments:?}: {error}");
        }
    }
    assert_eq!(folder.names(), ["dangling", "link", "second", "there", "under"]);
    assert_eq!(fs::read_to_string(folder.name("second")).unwrap(), "dear");
}

#[test]
fn no_result_replaces_an_input() {
    let folder = Folder::new("input");
    let input = folder.name("input");
    let demo = data("demo.topk.zst");
    fs::copy(&demo, &input).unwrap();
    fs::hard_link(&input, folder.name("second")).unwrap();
    symlink("input", folder.name("link")).unwrap();
    for name in ["input", "./input", "second", "link"] {
        let out = folder.name(name);
        for arguments in [
            vec!["fit", &input, "-o", &out],
            vec!["fit", &input, "--json", &out],
            vec!["fit", &demo, "--rates", &input, "-o", &out],
            vec!["replay", &input, "--json", &out],
            vec!["replay", &input, "--html", &out],
            vec!["replay", &demo, "--block-lengths", &input, "--json", &out],
            [&PLAN[..], &["--setup", &input, "--json", &out]].concat(),
            [&PLAN[..], &["--setup", "ess", "--misses", &input, "--html", &out]].concat(),
            [&PLAN[..], &["--setup", "ess", "--trace", &input, "--json", &out]].concat(),
            [&POINT[..1], &["--setup", &input], &POINT[3..], &["--json", &out]].concat(),
            [&POINT[..], &["--misses", &input, "--perfetto", &out]].concat(),
            [&POINT[..], &["--trace", &input, "--timeline", &out]].concat(),
            [&POINT[..], &["--table", &input, "--write-table", &out]].concat(),
            [&POINT[..], &["--table", &input, "--html", &out]].concat(),
        ] {
            let error = refuses(&arguments);
            assert!(error.contains("would replace the "), "{arguments:?}: {error}");
        }
    }
    // Appending to the file is writing to it.
    let appended = OpenOptions::new().append(true).open(&input).unwrap();
    let output = forebay(&["replay", &input, "--json", "-"]).stdout(appended).output().unwrap();
    assert!(output.status.code() == Some(2) && output.stderr.starts_with(b"error: "), "{output:?}");
    assert_eq!(fs::read(&input).unwrap(), fs::read(&demo).unwrap());
    assert_eq!(folder.names(), ["input", "link", "second"]);
}

/// The kernel's overflow id, of a user that owns nothing.
const OVERFLOW_UID: u32 = 65534;

#[test]
fn a_user_without_permissions_gets_errors_and_leaves_nothing() {
    let folder =
        Folder::at(std::env::temp_dir().join(format!("forebay-{}-unprivileged", std::process::id())));
    let everybody = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    everybody(&folder.0, 0o755);
    let (program, trace) = (folder.name("program"), folder.name("trace"));
    fs::copy(env!("CARGO_BIN_EXE_forebay"), &program).unwrap();
    fs::copy(data("demo.topk.zst"), &trace).unwrap();
    everybody(Path::new(&trace), 0o644);
    let open = folder.0.join("open");
    fs::create_dir(&open).unwrap();
    everybody(&open, 0o1777);
    let run = |limits: &str, arguments: &[&str]| {
        let mut command = Command::new("sh");
        let script = format!("{limits}; exec \"$@\"");
        command.args(["-c", &script, "sh", &program]).args(arguments).env("LC_ALL", "C").current_dir("/");
        if Uid::effective().is_root() {
            command.uid(OVERFLOW_UID).gid(OVERFLOW_UID);
        } else {
            everybody(&folder.0, 0o555);
        }
        command.stdin(Stdio::null()).output().unwrap()
    };
    // For example a file system that is mounted without execute permission.
    if run("true", &["--version"]).status.code() != Some(0) {
        everybody(&folder.0, 0o755);
        return skip::skip("a folder for all users");
    }
    let closed = folder.name("out");
    let written = [&PLAN[..], &["--json", &closed]].concat();
    let error = refused(run("true", &written), &written);
    assert!(error.contains("Permission denied"), "{error}");
    let hidden = folder.name("hidden");
    fs::write(open.join("hidden"), "x").unwrap();
    everybody(&open.join("hidden"), 0o000);
    let hidden_one = open.join("hidden").display().to_string();
    for read in [["replay", &hidden_one], ["replay", &hidden], ["fit", &hidden_one]] {
        refused(run("true", &read), &read);
    }
    // Files of another user cannot be removed, which is no reason to fail.
    fs::write(open.join(".forebay-1-0.partial"), "left").unwrap();
    let out = open.join("out").display().to_string();
    let output = run("true", &[&PLAN[..], &["--json", &out]].concat());
    assert!(output.status.success() && fs::read_to_string(&out).unwrap() == plan(), "{output:?}");
    // Without locked memory, and without threads besides its own: the same result, or an error in one line.
    let replay = ["replay", &trace, "--prompt-share", "0.5", "--json", "-"];
    let printed = succeeds(&replay);
    let output = run("ulimit -l 0", &replay);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), printed, "{:?}", output.stderr);
    everybody(&folder.0, 0o755);
    assert_eq!(folder.names(), ["open", "program", "trace"]);
}
