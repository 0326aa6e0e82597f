//! Tests of `forebay doctor`: every finding on machines that are made of files, the findings of a GPU, and that
//! `forebay fit` accepts the measured rates.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;
#[path = "doctor/gpu.rs"]
mod gpu;
#[path = "doctor/machine.rs"]
mod machine;
#[path = "../../tests/support/skip.rs"]
mod skip;

use command::{forebay, refuses, succeeds};
use machine::Machine;
use serde_json::Value;

/// Runs the command, which must exit with 0 or 1 (problems found) and leave standard error empty.
fn diagnoses(arguments: &[&str]) -> (i32, String) {
    let output = forebay(arguments).output().unwrap();
    let (status, errors) = (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!((0..=1).contains(&status) && errors.is_empty(), "{arguments:?}: {status}: {errors}");
    (status, String::from_utf8(output.stdout).unwrap())
}

/// The findings with the arguments `more`, by device. The status shows whether one of them is a problem.
fn entries(more: &[&str]) -> Vec<Value> {
    let (status, out) = diagnoses(&[&["doctor", "--json", "-"], more].concat());
    let entries = serde_json::from_str::<Value>(&out).unwrap().as_array().unwrap().clone();
    let findings = entries.iter().flat_map(|entry| entry["findings"].as_array().unwrap());
    let problems = findings.filter(|finding| finding["state"] == "problem").count();
    assert_eq!(status, i32::from(problems > 0), "{out}");
    entries
}

/// The findings about a machine, without measurements and without a driver.
fn host(machine: &Machine) -> Value {
    let found = entries(&["--no-rates", "--driver", "no-such-folder/libcuda.so.1", "--root", machine.root()]);
    assert_eq!(found.len(), 1, "no GPU, no entry of one");
    found[0].clone()
}

fn finding<'a>(entry: &'a Value, name: &str) -> &'a Value {
    let all = entry["findings"].as_array().unwrap();
    let mut found = all.iter().filter(|finding| finding["name"] == name);
    let one = found.next().unwrap_or_else(|| panic!("no {name} in {entry:#}"));
    assert!(found.next().is_none(), "{name} twice");
    one
}

/// Checks state, value and the remaining texts of a finding about a machine.
fn is(entry: &Value, name: &str, state: &str, parts: &[&str]) {
    let found = finding(entry, name);
    assert_eq!(found["state"], state, "{found:#}");
    for part in parts {
        assert!(found.to_string().contains(part), "{part}: {found:#}");
    }
}

#[test]
fn a_sound_machine_has_nothing_to_fix() {
    let found = host(&Machine::sound("sound"));
    is(&found, "Linux", "ok", &["6.8.0-45-generic"]);
    is(&found, "processors", "ok", &["Xeon", "8 threads"]);
    is(&found, "AVX-512", "ok", &["VBMI2"]);
    is(&found, "memory", "ok", &["100 GiB available of 1024 GiB, 781 GiB on reserved huge pages"]);
    is(&found, "memory limit", "ok", &["none"]);
    is(&found, "locked-memory limit", "ok", &["unlimited"]);
    is(&found, "memory to pin now", "ok", &["881 GiB"]);
    is(&found, "huge pages for the pool", "ok", &["400000 of 409600 free", "2.00 MiB", "781 GiB"]);
    is(&found, "transparent huge pages", "ok", &["madvise"]);
    is(&found, "NUMA nodes", "ok", &["2, 440 GiB to 450 GiB free on each"]);
}

#[test]
fn a_missing_resource_is_found_and_comes_with_a_fix() {
    let machine = Machine::sound("lacking");
    let no = |file: &str, text: &str| machine.write(file, text);
    no("proc/sys/kernel/osrelease", "5.4.0-150\n");
    no("proc/cpuinfo", "processor\t: 0\nmodel name\t: Old\nflags\t\t: fpu avx2 avx512f\n");
    no(
        "proc/meminfo",
        "MemTotal: 1073741824 kB\nMemAvailable: 50331648 kB\nHugePages_Total: 0\nHugePages_Free: 0\n\
         Hugepagesize: 2048 kB\n",
    );
    no("proc/self/limits", &machine::limits("65536"));
    no("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    no("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n");
    no("sys/fs/cgroup/a/memory.max", "34359738368\n");
    no("sys/fs/cgroup/a/memory.current", "1073741824\n");
    no("proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\nCapEff:\t0000000000000000\n");
    let found = host(&machine);
    is(&found, "Linux", "note", &["5.14"]);
    is(&found, "processors", "ok", &["Old"]);
    is(&found, "AVX-512", "note", &["without VBMI2"]);
    is(&found, "memory", "warning", &["31.0 GiB available", "forebay plan --host "]);
    is(&found, "memory limit", "note", &["32.0 GiB"]);
    is(&found, "locked-memory limit", "warning", &["64.0 KiB", "memlock", "--ulimit"]);
    is(&found, "memory to pin now", "ok", &["31.0 GiB"]);
    is(
        &found,
        "huge pages for the pool",
        "warning",
        &["none reserved", "never", "nr_hugepages", "shmem_enabled"],
    );
    is(&found, "transparent huge pages", "note", &["never", "madvise"]);
    is(&found, "NUMA nodes", "note", &["not use the memory of node 1", "cpuset.mems"]);
    for one in found["findings"].as_array().unwrap() {
        assert_eq!(one["state"] == "ok", one["fix"] == "", "{one:#}");
        assert!(!one["means"].as_str().unwrap().is_empty() && one["value"] != "", "{one:#}");
    }
}

#[test]
fn limits_bind_unless_a_capability_lifts_them() {
    let machine = Machine::sound("limits");
    machine.write("proc/self/limits", &machine::limits("8388608"));
    machine.write("proc/self/status", "CapEff:\t000001ffffffffff\n");
    is(&host(&machine), "locked-memory limit", "ok", &["8.00 MiB, lifted by CAP_IPC_LOCK"]);
    // All capabilities but the relevant one.
    machine.write("proc/self/status", "CapEff:\t000001ffffffbfff\n");
    is(&host(&machine), "locked-memory limit", "warning", &["8.00 MiB"]);
    // A limit above the machine's memory.
    machine.write("proc/self/limits", &machine::limits("2199023255552"));
    is(&host(&machine), "locked-memory limit", "ok", &["2048 GiB"]);
    // A cgroup of version 1, seen from a container.
    machine.write("proc/self/cgroup", "4:cpu,memory:/docker/x\n");
    machine.write("sys/fs/cgroup/memory/memory.stat", "cache 1\nhierarchical_memory_limit 34359738368\n");
    is(&host(&machine), "memory limit", "warning", &["32.0 GiB", "version 1"]);
    machine.write(
        "sys/fs/cgroup/memory/docker/x/memory.stat",
        "hierarchical_memory_limit 9223372036854771712\n",
    );
    is(&host(&machine), "memory limit", "ok", &["none"]);
}

#[test]
fn the_pools_page_size_is_that_of_shared_memory() {
    let machine = Machine::sound("pages");
    let meminfo = |total: u32, free: u32| {
        let pages = format!("HugePages_Total: {total}\nHugePages_Free: {free}\nHugepagesize: 2048 kB\n");
        machine
            .write("proc/meminfo", &format!("MemTotal: 1073741824 kB\nMemAvailable: 943718400 kB\n{pages}"));
    };
    const NAME: &str = "huge pages for the pool";
    meminfo(1000, 1000);
    is(&host(&machine), NAME, "note", &["1000 of 1000 free", "1.95 GiB", "nr_hugepages"]);
    meminfo(1000, 0);
    is(&host(&machine), NAME, "warning", &["all 1000 reserved ones in use"]);
    for switch in ["always", "within_size", "advise", "force"] {
        let text = "always within_size advise never deny force\n".replace(switch, &format!("[{switch}]"));
        machine.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", &text);
        is(&host(&machine), NAME, "note", &[&format!("transparent ones: {switch}")]);
    }
}

#[test]
fn long_pages_are_reserved_at_boot_and_those_of_another_size_are_lost() {
    let machine = Machine::sound("long-pages");
    let long = "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
    machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "409600\n");
    machine.write(long, "0\n");
    let none = host(&machine);
    assert!(none["findings"].as_array().unwrap().iter().all(|one| one["name"] != "other huge pages"));
    machine.write(long, "8\n");
    is(
        &host(&machine),
        "other huge pages",
        "note",
        &["8 of 1.00 GiB", "2.00 MiB", &format!("echo 0 > /{long}")],
    );
    let memory = "MemTotal: 1073741824 kB\nMemAvailable: 943718400 kB\n";
    let pages = "HugePages_Total: 4\nHugePages_Free: 4\nHugepagesize: 1048576 kB\n";
    machine.write("proc/meminfo", &format!("{memory}{pages}"));
    is(
        &host(&machine),
        "huge pages for the pool",
        "note",
        &["4 of 4 free, of 1.00 GiB", "boot: hugepages=N"],
    );
    is(&host(&machine), "other huge pages", "note", &["409600 of 2.00 MiB"]);
}

/// The facts for programs.
#[test]
fn the_json_has_the_facts_of_the_machine_as_numbers() {
    let machine = Machine::sound("numbers");
    let facts = |machine: &Machine| host(machine)["facts"].clone();
    let gib = |n: u64| n << 30;
    let mut wanted = serde_json::json!({
        "memory_total": gib(1024), "memory_available": gib(100), "memory_limit": null, "lock_limit": null,
        "huge_page": 2 << 20, "huge_pages_free": 400_000, "numa_nodes": 2,
    });
    assert_eq!(facts(&machine), wanted);
    machine.write("proc/self/limits", &machine::limits("65536"));
    wanted["lock_limit"] = 65536.into();
    assert_eq!(facts(&machine), wanted);
}

#[test]
fn files_that_are_missing_or_garbage_are_notes() {
    let bare = Machine::bare("bare");
    let garbage = Machine::sound("garbage");
    for file in garbage.files() {
        std::fs::write(&file, b"\xFF\x00garbage: -1 [\nMemTotal: x kB\nflags").unwrap();
    }
    // A folder in place of a file.
    let folders = Machine::bare("folders");
    std::fs::create_dir_all(folders.path("proc/meminfo")).unwrap();
    for machine in [bare, garbage, folders] {
        let found = host(&machine);
        for name in [
            "Linux",
            "processors",
            "AVX-512",
            "memory",
            "memory limit",
            "locked-memory limit",
            "memory to pin now",
            "huge pages for the pool",
            "transparent huge pages",
            "NUMA nodes",
        ] {
            is(&found, name, "note", &["unknown", "container"]);
        }
    }
}

#[test]
fn text_that_could_steer_the_terminal_is_harmless() {
    let machine = Machine::sound("steer");
    machine.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: \u{1b}[31mX\nflags\t: a\n");
    let (_, out) = diagnoses(&["doctor", "--no-rates", "--driver", "none.so", "--root", machine.root()]);
    assert!(out.contains("?[31mX") && !out.contains('\u{1b}'), "{out}");
}

#[test]
fn without_a_requested_driver_the_status_is_1_and_the_fix_is_printed() {
    let machine = Machine::sound("driver");
    let asked = ["--no-rates", "--driver", "no-such-folder/libcuda.so.1", "--root", machine.root()];
    for more in [&[][..], &["--device", "cuda:0"]] {
        let found = entries(&[&asked[..], more].concat());
        is(&found[0], "driver", "problem", &["no-such-folder/libcuda.so.1", "525"]);
        is(&found[0], "GPUs", "problem", &["\"0\""]);
    }
    // The kernel has a driver, but no library is found.
    is(&host(&machine), "driver", "problem", &["docker --gpus all"]);
    std::fs::remove_file(machine.path("proc/driver/nvidia/version")).unwrap();
    let without = host(&machine);
    assert!(!finding(&without, "driver")["fix"].as_str().unwrap().contains("docker"), "{without:#}");
    let (status, text) = diagnoses(&[&["doctor"], &asked[..]].concat());
    assert_eq!(status, 1);
    assert!(text.contains("What to fix: 2 problems"), "{text}");
    let first = text.lines().find(|line| line.starts_with("  problem  host: driver: ")).unwrap();
    assert!(first.contains("525"), "{first}");
}

/// On a host without GPUs a missing driver is only a note, because nothing depends on it.
#[test]
fn warnings_and_notes_leave_the_status_0() {
    let machine = Machine::sound("no-problem");
    machine.write("proc/self/limits", &machine::limits("65536"));
    std::fs::remove_dir_all(machine.path("sys/bus")).unwrap();
    let (status, text) = diagnoses(&["doctor", "--no-rates", "--device", "host", "--root", machine.root()]);
    assert!(status == 0 && text.contains("What to fix: 0 problems, 1 warning"), "{status}: {text}");
}

/// A command in a finding names the requested device, and runs there.
#[test]
fn advice_runs_on_the_requested_device() {
    let machine = Machine::sound("advice");
    let found = entries(&["--device", "host", "--quick", "--root", machine.root()]);
    let fixes = found[0]["findings"].as_array().unwrap().iter().map(|found| found["fix"].as_str().unwrap());
    for fix in fixes.filter(|fix| fix.contains("forebay bench")) {
        let words: Vec<&str> = fix.split_once("forebay ").unwrap().1.split_whitespace().collect();
        assert!(words.windows(2).any(|pair| pair == ["--device", "host"]), "{fix}");
        succeeds(&[&words[..], &["--quick", "--json", "-"]].concat());
    }
}

#[test]
fn bad_input_is_refused_in_one_line() {
    assert!(refuses(&["doctor", "--device", "gpu"]).contains("cuda:0"));
    assert!(refuses(&["doctor", "--root", "no-such-folder"]).contains("no-such-folder"));
    assert!(refuses(&["doctor", "--no-rates", "--json", "no-such-folder/x"]).contains("no-such-folder/x"));
    assert!(refuses(&["doctor", "--device", "host", "--driver", "x"]).contains("--device cuda:N"));
    assert!(succeeds(&["completions", "bash"]).contains("doctor"));
}

#[test]
fn colours_are_for_terminals_and_a_closed_pipe_is_no_error() {
    let machine = Machine::sound("colours");
    let asked = ["doctor", "--no-rates", "--driver", "none.so", "--root", machine.root()];
    let coloured = |variables: &[(&str, &str)]| {
        let output = forebay(&asked).envs(variables.iter().copied()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let force = ("CLICOLOR_FORCE", "1");
    let plain = coloured(&[]);
    assert!(!plain.contains('\u{1b}'), "{plain}");
    assert_eq!(coloured(&[force, ("NO_COLOR", "1")]), plain);
    let painted = coloured(&[force]);
    assert!(
        painted.contains("\u{1b}[31mproblem\u{1b}[0m") && painted.contains("\u{1b}[32mok\u{1b}[0m"),
        "{painted}"
    );
    let stripped = ["31", "32", "33", "36", "0"]
        .iter()
        .fold(painted, |text, n| text.replace(&format!("\u{1b}[{n}m"), ""));
    assert_eq!(stripped, plain, "colours change nothing else");
    for more in [&[][..], &["--json", "-"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = forebay(&[&asked[..], more].concat()).stdout(writer).output().unwrap();
        assert_eq!(
            (out.status.code(), String::from_utf8(out.stderr).unwrap().as_str()),
            (Some(1), ""),
            "{more:?}"
        );
    }
}
