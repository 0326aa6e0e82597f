//! `forebay doctor`: reports what this machine and its GPUs can do for a cache, what is missing, and how to fix it.
//!
//! No finding is an error: a machine without a GPU, a refused call and a missing file are findings. Something that
//! does not work is a problem, and makes the command's status 1, like a failing test. The command changes nothing. For
//! a moment it makes a small mapping in the way of the total pool and, to measure a device, a few large ones.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::rates::Rates;
use forebay::measure::{Ceilings, Facts, Probe};
use forebay::os::{Fallback, MemoryState, NoFaults, near};
use forebay::{Error, Kind, Result};
use indicatif::ProgressBar;

use super::args::Arguments;
use super::facts::{GpuEntry, MachineEntry};
use super::finding::{Finding, State};
use super::link::Link;
use super::result::{Checked, FactsEntry, Measured};
use super::{gpu, json, machine, text};
use crate::bench::rows;
use crate::input::device::{DeviceName, ProbeOptions, Target};
use crate::input::numa_nodes::{Node, Nodes};
use crate::input::system_files::Files;
use crate::present::output::{self, Results};
use crate::present::progress;

/// The exit status if something does not work.
const PROBLEMS: u8 = 1;

/// Bytes of a run, and rounds: long enough that start-up does not count.
const RUN: (u64, u32) = (256 << 20, 8);
const QUICK: (u64, u32) = (1 << 16, 1);

/// How often the bar is redrawn while no piece of work ends.
const TICK: Duration = Duration::from_millis(200);

/// PCI's number of NVIDIA, and the class of display and 3D controllers.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

impl Arguments {
    fn target(&self, name: DeviceName) -> Target {
        Target { name, driver: self.driver.clone() }
    }

    fn open(&self, number: u32) -> Result<Arc<dyn Probe>> {
        self.target(DeviceName::Cuda(number)).probe(ProbeOptions::of("doctor"))
    }

    /// The driver's number of GPUs.
    #[cfg(feature = "cuda")]
    fn count(&self) -> Result<u32> {
        CudaDevice::count(&CudaOptions { library: self.driver.clone(), ..CudaOptions::default() })
    }

    #[cfg(not(feature = "cuda"))]
    fn count(&self) -> Result<u32> {
        self.open(0).map(|_| 0)
    }

    /// Whether a GPU is requested or present, which makes a missing driver a problem.
    fn wants_driver(&self, files: &Files) -> bool {
        on_bus(files) > 0 || self.device.is_some() || self.driver.is_some()
    }
}

/// The number of NVIDIA GPUs on the bus.
fn on_bus(files: &Files) -> usize {
    let is = |device: &str, file: &str, start: &str| {
        files
            .word(&format!("sys/bus/pci/devices/{device}/{file}"))
            .is_some_and(|word| word.starts_with(start))
    };
    let devices = files.names("sys/bus/pci/devices");
    devices.iter().filter(|device| is(device, "vendor", NVIDIA) && is(device, "class", DISPLAY)).count()
}

/// A bus address in the form of the system's folders: four digits of the domain, where tools may write eight.
fn folder_of(bus: &str) -> &str {
    let cut = bus.len().saturating_sub("0000:00:00.0".len());
    match bus.split_at_checked(cut) {
        Some((zeros, rest)) if zeros.bytes().all(|digit| digit == b'0') => rest,
        _ => bus,
    }
}

/// The release of the running driver: the first word of its line with two or three numbers.
fn release(files: &Files) -> Option<String> {
    let text = files.text("proc/driver/nvidia/version")?;
    let numbers = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        (2..=3).contains(&parts.len()) && parts.iter().all(|part| part.parse::<u32>().is_ok())
    };
    text.lines().next()?.split_whitespace().find(numbers).map(str::to_owned)
}

/// Measured rates. On a busy machine more rows may seem to take no longer; then they are measured again.
fn sound_rates(
    device: &Arc<dyn Probe>,
    ceilings: &Ceilings,
    quick: bool,
    bar: &ProgressBar,
) -> Result<Rates> {
    let once = || {
        bar.set_position(1);
        let rates = rows::rates(device, ceilings, quick, &|| bar.inc(1))?;
        rates.check().map(|()| rates)
    };
    let again = |error: Error| if error.kind() == Kind::InvalidConfig { once() } else { Err(error) };
    once().or_else(again).or_else(again)
}

/// Measures a device; a refusal becomes a finding and keeps everything measured before it.
fn measured(device: &Arc<dyn Probe>, name: &str, quick: bool, found: &mut Vec<Finding>) -> Option<Measured> {
    let (bytes, rounds) = if quick { QUICK } else { RUN };
    let bar = progress::bar(&format!("measuring {name}"), 1 + rows::rate_pieces(quick));
    // The ceilings are one piece of some seconds; meanwhile the bar shows the elapsed time.
    bar.enable_steady_tick(TICK);
    let measure = || -> Result<(Ceilings, Result<Rates>)> {
        let ceilings = Ceilings::measure(&**device, bytes, rounds)?;
        bar.inc(1);
        Ok((ceilings, sound_rates(device, &ceilings, quick, &bar)))
    };
    let result = measure();
    bar.finish_and_clear();
    let mut failed = |error: Error| found.push(not_measured(&error));
    let (ceilings, rates) = result.map_err(&mut failed).ok()?;
    Some(Measured { ceilings, rates: rates.map_err(failed).ok() })
}

fn not_measured(error: &Error) -> Finding {
    let finding = Finding::refused("rates", State::Warning, "not measured", error);
    match error.kind() {
        Kind::InvalidConfig => finding.but(State::Warning, "run again while nothing else uses the machine"),
        Kind::OutOfMemory => {
            finding.but(State::Warning, "free some gigabytes of host and device memory, then run again")
        }
        _ => finding,
    }
}

/// Measures a GPU from a thread and memory of its node; reports which parts of that were not possible.
fn measured_near(
    node: Option<&Node>,
    measure: impl FnOnce() -> Option<Measured> + Send,
) -> (Option<Measured>, Vec<Fallback>) {
    let there = || {
        let processors = |node: &Node| node.processors.clone().unwrap_or_default();
        let lost = node.map(|node| near(node.number, &processors(node), &NoFaults));
        (measure(), lost.unwrap_or_default())
    };
    let ended = std::thread::scope(|scope| scope.spawn(there).join());
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A GPU that can be opened.
fn gpu(
    arguments: &Arguments,
    number: u32,
    device: &Arc<dyn Probe>,
    facts: &Facts,
    around: &Around,
) -> Checked {
    let name = format!("cuda:{number}");
    let bus = folder_of(facts.gpu.as_ref().map(|gpu| gpu.bus.as_str()).unwrap_or_default());
    let node = gpu::node(bus, around.files, around.nodes);
    let mut rates_found = Vec::new();
    let (measured, lost) = match arguments.no_rates {
        true => (None, Vec::new()),
        false => measured_near(node, || measured(device, &name, arguments.quick, &mut rates_found)),
    };
    // The link is read now, just after its use.
    let link = Link::read(around.files, bus);
    let copied = measured.as_ref().map(|measured| measured.ceilings.copy_up.max(measured.ceilings.copy_down));
    let mut findings = gpu::identity(facts);
    findings.extend(link.findings(bus, copied));
    findings.extend(gpu::place(bus, around.files, around.nodes));
    findings.push(gpu::pinned(&**device));
    findings.push(gpu::page_tables(&MemoryState::under(around.files.root())));
    findings.extend(gpu::abilities(&device.abilities()));
    findings.push(gpu::priorities(std::env::var(gpu::PRIORITIES).ok().as_deref()));
    if let Some(Measured { ceilings, rates }) = &measured {
        findings.extend(gpu::measured_from(node, &lost, around.nodes, &name));
        findings.extend(gpu::speeds(ceilings, rates.as_ref(), link.peak(copied), &name));
    }
    findings.extend(rates_found);
    let facts = FactsEntry::Gpu(GpuEntry::of(facts, &link, node.map(|node| node.number)));
    Checked { device: name, facts, findings, measured }
}

/// The surroundings of a device.
struct Around<'a> {
    files: &'a Files,
    nodes: &'a Nodes,
}

/// The requested GPUs, and the findings about the driver and the number of GPUs.
fn gpus(arguments: &Arguments, around: &Around) -> Result<(Vec<Checked>, Vec<Finding>)> {
    let count = match arguments.count() {
        Ok(count) => count,
        Err(error) => {
            let state = if arguments.wants_driver(around.files) { State::Problem } else { State::Note };
            let driver = in_container(Finding::refused("driver", state, "not usable", &error), around.files);
            let none = Finding::ok(
                "GPUs",
                "0",
                "forebay uses the host device: replay, plan and simulate need no GPU",
            );
            return Ok((Vec::new(), vec![driver, none.but(state, "see the driver")]));
        }
    };
    let numbers = match arguments.device {
        Some(DeviceName::Cuda(number)) => number..number.saturating_add(1),
        _ => 0..count,
    };
    let (mut checked, mut newest) = (Vec::new(), None);
    for number in numbers {
        let opened = arguments.open(number).and_then(|device| Ok((device.facts()?, device)));
        match opened {
            Ok((facts, device)) => {
                newest = facts.gpu.as_ref().map(|gpu| gpu.driver).or(newest);
                checked.push(gpu(arguments, number, &device, &facts, around));
            }
            Err(error) if error.number("devices").is_some() => return Err(error),
            Err(error) => {
                let findings = vec![Finding::refused("GPU", State::Problem, "not usable", &error)];
                let (device, facts) = (format!("cuda:{number}"), FactsEntry::Unknown);
                checked.push(Checked { device, facts, findings, measured: None });
            }
        }
    }
    let release = release(around.files).unwrap_or_else(|| "of unknown release".to_owned());
    let cuda = newest.map_or(String::new(), |(major, minor)| format!(", CUDA {major}.{minor}"));
    let driver = Finding::ok("driver", format!("{release}{cuda}"), "loaded, and new enough");
    Ok((checked, vec![driver, counted(count, on_bus(around.files))]))
}

/// Adds a hint for containers: if the kernel has a driver whose library is missing, the container may lack it.
fn in_container(finding: Finding, files: &Files) -> Finding {
    if release(files).is_none() {
        return finding;
    }
    let fix = format!("{}; in a container: docker --gpus all (NVIDIA Container Toolkit)", finding.fix);
    Finding { fix, ..finding }
}

/// Compares the driver's number of GPUs with the bus's.
fn counted(count: u32, on_bus: usize) -> Finding {
    if count as usize >= on_bus {
        return Finding::ok("GPUs", count.to_string(), "as the driver counts them");
    }
    Finding::ok(
        "GPUs",
        format!("{count} of {on_bus}"),
        "the machine has more GPUs than the driver shows to this process",
    )
    .but(State::Note, "if that was not intended, check CUDA_VISIBLE_DEVICES and docker --gpus")
}

/// The host as a device.
fn host(arguments: &Arguments) -> Result<(Vec<Finding>, Option<Measured>)> {
    let device = {
        // Both directions at once need one thread each.
        let options = ProbeOptions { threaded: true, ..ProbeOptions::of("doctor") };
        arguments.target(DeviceName::Host).probe(options)?
    };
    let mut findings = gpu::identity(&device.facts()?);
    if arguments.no_rates {
        return Ok((findings, None));
    }
    let measured = measured(&device, "host", arguments.quick, &mut findings);
    if let Some(Measured { ceilings, rates }) = &measured {
        findings.extend(gpu::speeds(ceilings, rates.as_ref(), None, "host"));
    }
    Ok((findings, measured))
}

/// `forebay doctor`; its status reports whether there are problems.
///
/// # Errors
/// [`Kind::InvalidConfig`] for a GPU number that the driver does not have, or a driver without a GPU;
/// [`Kind::Io`] for a missing folder, and for errors of writing.
pub fn command(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(root) = arguments.root.as_deref().filter(|root| !root.is_dir()) {
        return Err(no_folder(root));
    }
    let files = Files::under(arguments.root.as_deref());
    let nodes = Nodes::read(&files);
    let machine = machine::findings(&files, &nodes);
    let (mut devices, findings, measured) = if arguments.device == Some(DeviceName::Host) {
        let (of_device, measured) = host(arguments)?;
        (Vec::new(), [machine, of_device].concat(), measured)
    } else {
        let (devices, of_driver) = gpus(arguments, &Around { files: &files, nodes: &nodes })?;
        (devices, [of_driver, machine].concat(), None)
    };
    let facts = FactsEntry::Machine(MachineEntry::read(&files, &nodes));
    devices.push(Checked { device: "host".to_owned(), facts, findings, measured });
    let problem = |device: &Checked| device.findings.iter().any(|found| found.state == State::Problem);
    let status = if devices.iter().any(problem) { ExitCode::from(PROBLEMS) } else { ExitCode::SUCCESS };
    let mut results = Results::default();
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&devices)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        // Its lines fit already, and colours have no width.
        results.print(text::report(&devices, look, text::coloured()));
    }
    results.deliver().map(|()| status)
}

fn no_folder(root: &Path) -> Error {
    Error::new(Kind::Io, "doctor").at(format!("--root {}: no such folder", output::echo(root.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bus_address_is_found_whatever_the_length_of_its_domain() {
        for (bus, folder) in [
            ("0000:3b:00.0", "0000:3b:00.0"),
            ("00000000:3b:00.0", "0000:3b:00.0"),
            ("00010000:3b:00.0", "00010000:3b:00.0"),
            ("", ""),
        ] {
            assert_eq!(folder_of(bus), folder);
        }
    }

    #[test]
    fn rates_that_could_not_be_measured_come_with_a_fix() {
        let told = |kind| not_measured(&Error::new(kind, "rates").at("gather.points"));
        let found = told(Kind::InvalidConfig);
        assert!(found.means.contains("gather.points") && found.fix.contains("nothing else"), "{found:?}");
        assert!(told(Kind::OutOfMemory).fix.contains("gigabytes"));
        assert_eq!(told(Kind::DeviceFailed).fix, Kind::DeviceFailed.hint());
    }
}
