//! Findings about the machine without its GPUs: kernel, processors, memory, nodes.

use forebay::os::{self, NoFaults};

use super::finding::{Finding, State};
use super::{memory, nodes};
use crate::input::numa_nodes::Nodes;
use crate::input::system_files::{Files, field, list};
use crate::present::numbers::counted;

/// The first Linux that can populate memory by one call.
const POPULATES: (u32, u32) = (5, 14);

/// The instructions of the host device's fastest resolve, as Linux names them.
const AVX512: [&str; 3] = ["avx512f", "avx512bw", "avx512_vbmi2"];

/// Everything about the machine.
pub fn findings(files: &Files, placed: &Nodes) -> Vec<Finding> {
    let mut found = vec![kernel(files)];
    found.extend(processors(files));
    found.extend(memory::findings(files));
    // With several nodes it matters whether memory can be bound; a trial on any permitted node shows it.
    let online = os::nodes(&NoFaults);
    let may = |node: &&u32| placed.may_take.as_ref().is_none_or(|may| may.contains(node));
    let node = online.iter().find(may).copied().filter(|_| online.len() > 1);
    found.extend(memory::tried(node, &NoFaults));
    found.push(nodes::finding(placed));
    found
}

fn kernel(files: &Files) -> Finding {
    const NAME: &str = "Linux";
    const FILE: &str = "proc/sys/kernel/osrelease";
    let Some(release) = files.word(FILE) else {
        return Finding::unknown(NAME, FILE);
    };
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => {
            Finding::ok(NAME, release.clone(), "one call populates a pool").but_if_older(major, minor)
        }
        _ => Finding::unknown(NAME, FILE),
    }
}

impl Finding {
    fn but_if_older(self, major: u32, minor: u32) -> Finding {
        if (major, minor) >= POPULATES {
            return self;
        }
        let means = "a pool is populated page by page: creating it is slower".to_owned();
        Finding { means, ..self }.but(State::Note, "use Linux 5.14 or newer")
    }
}

fn processors(files: &Files) -> [Finding; 2] {
    const FILE: &str = "proc/cpuinfo";
    let text = files.text(FILE).unwrap_or_default();
    let threads = text.lines().filter(|line| field(line, "processor").is_some()).count();
    let status = files.text("proc/self/status").unwrap_or_default();
    let allowed = field(&status, "Cpus_allowed_list").and_then(list).map(|allowed| allowed.len());
    let named = field(&text, "model name").filter(|_| threads > 0);
    let model = named.map_or_else(
        || Finding::unknown("processors", FILE),
        |model| {
            let value = format!("{model}, {}", counted(threads as u64, "thread"));
            match allowed {
                Some(some) if some < threads => {
                    let means = format!("this process may run on {some} of them");
                    Finding::ok("processors", value, means)
                        .but(State::Note, "widen cpuset.cpus (docker: --cpuset-cpus), if that was not meant")
                }
                _ => Finding::ok("processors", value, "this process may run on all of them"),
            }
        },
    );
    let flags: Option<Vec<&str>> = field(&text, "flags").map(|flags| flags.split_whitespace().collect());
    let vectors = match flags {
        None => Finding::unknown("AVX-512", FILE),
        Some(flags) if AVX512.iter().all(|wanted| flags.contains(wanted)) => {
            Finding::ok("AVX-512", "with VBMI2", "the host device's resolve uses it")
        }
        Some(flags) => {
            let value = if flags.contains(&"avx512f") { "without VBMI2" } else { "none" };
            Finding::ok("AVX-512", value, "the host device's resolve is slower without it; no effect on GPUs")
                .but(State::Note, "for the host device use a processor with AVX-512 VBMI2")
        }
    };
    [model, vectors]
}
