//! Findings about one device: what it is, its node, its abilities, and the speed of its link.

use std::sync::Arc;
use std::time::Instant;

use forebay::Footprint;
use forebay::device::rates::{Rates, RowRates};
use forebay::measure::{Ability, Ceilings, Facts, GpuFacts, Probe};
use forebay::os::{Fallback, Map, MemoryState, NoFaults, Request};

use super::finding::{Finding, State};
use crate::input::numa_nodes::{Node, Nodes};
use crate::input::system_files::Files;
use crate::present::numbers::{counted, size};
use crate::present::output::harmless;

/// An ability: its name, the state if it is missing, the consequence if it is there, and if it is missing.
const ABILITIES: [(&str, State, &str, &str); 6] = [
    (
        "virtual memory",
        State::Problem,
        "the scratch slots of all layers share memory",
        "no sparse pool can be created",
    ),
    (
        "memory descriptors",
        State::Note,
        "other processes of this host can map the memory",
        "other processes cannot map the memory",
    ),
    (
        "fabric handles",
        State::Note,
        "other hosts of the fabric can map the memory",
        "other hosts cannot map the memory",
    ),
    (
        "host memory of the driver's",
        State::Note,
        "rows can use pages of 2 MiB, if requested: page tables of 4 KiB a GiB",
        "rows use registered memory, which the GPU maps in pages of 4 KiB",
    ),
    (
        "graphs",
        State::Warning,
        "a step is launched by one call",
        "every operation of a step is launched separately",
    ),
    (
        "conditional nodes",
        State::Note,
        "a captured step can choose between widths of attention",
        "a captured step has one width of attention",
    ),
];

/// The oldest CUDA version of a driver that supports programmatic launches.
const EARLY_LAUNCH_DRIVER: (u32, u32) = (12, 3);

/// Below this share of its link's speed something slows a copy engine down.
const LITTLE_OF_LINK: f64 = 0.7;

/// Below this share of its ceiling a gather or scatter needs other parameters.
const LITTLE_OF_CEILING: f64 = 0.75;

/// What the device is.
pub fn identity(facts: &Facts) -> Vec<Finding> {
    let Some(gpu) = &facts.gpu else {
        let value = format!("{}, {}", facts.name, counted(facts.processors, "thread"));
        return vec![Finding::ok(
            "device",
            value,
            "the host device: the default, and the reference for others",
        )];
    };
    let value =
        [facts.name.clone(), counted(facts.processors, "SM"), counted(facts.copy_engines, "copy engine")]
            .join(", ");
    let mut found = vec![Finding::ok("GPU", value, format!("on the bus at {}", gpu.bus))];
    found.push(capability(gpu));
    let (total, free) = (facts.memory_total, facts.memory_free);
    let value = format!("{} free of {}", size(free as f64), size(total as f64));
    found.push(Finding::ok("device memory", value, "weights, slots and index keys share it").but_if(
        free < total / 4 * 3,
        State::Note,
        "see which processes hold the rest: nvidia-smi",
    ));
    found
}

fn capability(gpu: &GpuFacts) -> Finding {
    let (major, minor) = gpu.capability;
    let means = if major < 9 {
        "all kernels run; programmatic launches and bulk copies need 9.0"
    } else if gpu.driver < EARLY_LAUNCH_DRIVER {
        "bulk copies can be used; programmatic launches need a driver of CUDA 12.3 or newer"
    } else {
        "programmatic launches and bulk copies can be used"
    };
    Finding::ok("compute capability", format!("{major}.{minor}"), means)
}

/// The device's abilities.
pub fn abilities(abilities: &[Ability]) -> Vec<Finding> {
    let finding = |ability: &Ability| {
        let known = ABILITIES.iter().find(|(name, ..)| *name == ability.name);
        let (_, state, with, without) = known.copied().unwrap_or(("", State::Note, "", ""));
        match &ability.usable {
            Ok(()) => Finding::ok(ability.name, "usable", with),
            Err(error) => {
                let refused = Finding::refused(ability.name, state, "not usable", error);
                Finding { means: format!("{without} ({})", refused.means), ..refused }
            }
        }
    };
    abilities.iter().map(finding).collect()
}

/// The driver's variable for the priorities of all graphs (CUDA Programming Guide, 5.2.3.5).
pub const PRIORITIES: &str = "CUDA_GRAPHS_USE_NODE_PRIORITY";

/// Whether the gathers of a captured step precede the engine's kernels. `said` is the value of [`PRIORITIES`] here.
/// Forebay's own graphs request it, and so does torch from 2.10 on (pytorch#167346).
pub fn priorities(said: Option<&str>) -> Finding {
    const NAME: &str = "priorities in graphs";
    let value = said.map_or("not set".to_owned(), |said| format!("{PRIORITIES}={}", harmless(said)));
    match said {
        Some("1") => {
            Finding::ok(NAME, value, "the gathers of a captured step run before the engine's kernels")
        }
        Some("0") => Finding::ok(NAME, value, "the gathers of a captured step wait for the engine's kernels")
            .but(State::Warning, format!("set {PRIORITIES}=1 for the engine, or unset it")),
        _ => {
            Finding::ok(NAME, value, "a step captured by torch before 2.10 loses the priority of its gathers")
                .but(State::Note, format!("with such a torch set {PRIORITIES}=1 for the engine"))
        }
    }
}

/// Bytes of host memory that are registered as a trial.
const PINNED: u64 = 64 << 20;

/// Whether the driver can pin memory of the total pool's kind in one piece, and how fast. The device keeps it.
pub fn pinned(device: &dyn Probe) -> Finding {
    const NAME: &str = "pinned memory, tried";
    let request = Request { bytes: PINNED, huge: true, populate: true, lock: true, node: None, shared: true };
    let tried = Map::new(&request, &NoFaults).and_then(|(map, _)| {
        let started = Instant::now();
        device.register(&Arc::new(map))?;
        Ok(started.elapsed().as_secs_f64())
    });
    match tried {
        Ok(seconds) => {
            let rate = gb(PINNED as f64 / seconds.max(1e-9));
            let value = format!("{} at {rate}", size(PINNED as f64));
            Finding::ok(NAME, value, "the driver can pin shared memory, and kernels can read it")
        }
        Err(error) => Finding::refused(NAME, State::Problem, "refused", &error),
    }
}

/// The GPU memory that page tables of registered host memory take: for one GiB, and for all available memory.
pub fn page_tables(state: &MemoryState) -> Finding {
    let of = |bytes: u64| size(Footprint::page_tables(bytes) as f64);
    let most = state.available.map_or(String::new(), |most| {
        format!("; for all available memory, {}, {}", size(most as f64), of(most))
    });
    let means = format!("the GPU maps them in pages of 4 KiB; forebay plan counts it{most}");
    Finding::ok("page tables of pinned rows", format!("{} of the GPU's memory a GiB", of(1 << 30)), means)
}

/// The file that names the GPU's node.
fn node_file(bus: &str) -> String {
    format!("sys/bus/pci/devices/{bus}/numa_node")
}

/// The GPU's node, if the system reports it and has it.
pub fn node<'a>(bus: &str, files: &Files, nodes: &'a Nodes) -> Option<&'a Node> {
    nodes.node(files.word(&node_file(bus))?.parse().ok()?)
}

/// The GPU's NUMA node, and the findings about it.
pub fn place(bus: &str, files: &Files, nodes: &Nodes) -> Vec<Finding> {
    const NAME: &str = "NUMA node";
    let file = node_file(bus);
    let Some(number) = files.word(&file).and_then(|text| text.parse::<i64>().ok()) else {
        return vec![Finding::unknown(NAME, &file)];
    };
    let several = nodes.all.as_ref().is_some_and(|all| all.len() > 1);
    let Ok(number) = u32::try_from(number) else {
        let unsaid = Finding::ok(NAME, "not reported", "the firmware does not report the GPU's node");
        let fix = "see nvidia-smi topo -m, and bind the pool to that node (Memory::node)";
        return vec![unsaid.but_if(several, State::Note, fix)];
    };
    let Some(node) = nodes.node(number) else {
        let means = "this node is not online";
        return vec![
            Finding::ok(NAME, number.to_string(), means)
                .but(State::Note, "look from outside the container, if this is one"),
        ];
    };
    let (mut found, mut here) =
        (Vec::new(), Finding::ok(NAME, number.to_string(), "bind the pool to it (Memory::node)"));
    if nodes.may_take.as_ref().is_some_and(|may| !may.contains(&number)) {
        here.means = "this process may not use the node's memory: rows cross to another socket".to_owned();
        here = here.but(State::Warning, format!("put node {number} in cpuset.mems (docker: --cpuset-mems)"));
    }
    found.push(here);
    found.extend(memory_beside(node, files, nodes));
    found.extend(threads_beside(node, nodes));
    found
}

/// The memory that a pool on the node can use.
fn memory_beside(node: &Node, files: &Files, nodes: &Nodes) -> Vec<Finding> {
    let (number, mut found) = (node.number, Vec::new());
    let page = MemoryState::under(files.root()).huge_page;
    let held = node.huge_free.saturating_mul(page);
    if let (Some(free), Some(total)) = (node.free, node.total) {
        let free = free.saturating_add(held);
        let value = format!("{} free of {}", size(free as f64), size(total as f64));
        let fix = format!("see what holds memory of node {number} (numastat -m), or plan a smaller pool");
        found.push(
            Finding::ok("memory beside the GPU", value, "a larger pool would cross to another node").but_if(
                free < total / 8,
                State::Warning,
                fix,
            ),
        );
    }
    let of_all: u64 = nodes.all.iter().flatten().map(|node| node.huge_free).sum();
    if of_all > 0 {
        let value = format!("{} free, {}", node.huge_free, size(held as f64));
        let means = "a pool that is bound to the node can use only these";
        let kib = page / 1024;
        let fix = format!(
            "reserve them there: echo N > \
             /sys/devices/system/node/node{number}/hugepages/hugepages-{kib}kB/nr_hugepages"
        );
        found.push(Finding::ok("huge pages beside the GPU", value, means).but_if(
            node.huge_free == 0,
            State::Warning,
            fix,
        ));
    }
    found
}

/// The node's threads that this process may use.
fn threads_beside(node: &Node, nodes: &Nodes) -> Option<Finding> {
    let (beside, may) = (node.processors.as_ref()?, nodes.may_run.as_ref()?);
    let count = beside.iter().filter(|number| may.contains(number)).count();
    let value = format!("{count} of {}", beside.len());
    let number = node.number;
    let fix = format!("start on node {number}: numactl --cpunodebind={number} (docker: --cpuset-cpus)");
    let means = "threads of the node on which this process may run";
    let none = count == 0 && !beside.is_empty();
    Some(Finding::ok("threads beside the GPU", value, means).but_if(none, State::Warning, fix))
}

/// The thread and memory that measured the link, and why they were not of the GPU's node.
pub fn measured_from(node: Option<&Node>, lost: &[Fallback], nodes: &Nodes, device: &str) -> Option<Finding> {
    const NAME: &str = "measured from";
    let several = nodes.all.as_ref().is_some_and(|all| all.len() > 1);
    let Some(number) = node.map(|node| node.number) else {
        let fix = format!(
            "measure from each node: numactl --cpunodebind=N --membind=N forebay doctor --device {device}; the fastest \
             is the GPU's node"
        );
        let unknown =
            Finding::ok(NAME, "any node", "the GPU's node is unknown: rates may be those of a distant node");
        return several.then(|| unknown.but(State::Note, fix));
    };
    if lost.is_empty() {
        let means = "a thread of the GPU's node, with memory of that node as far as available";
        return Some(Finding::ok(NAME, format!("node {number}"), means));
    }
    let causes: Vec<String> = lost.iter().map(|lost| format!("{}: {}", lost.what, lost.cause)).collect();
    let fix = format!(
        "allow this process to run on node {number} and to use its memory: \
         docker --cap-add SYS_NICE, --cpuset-cpus, --cpuset-mems"
    );
    let far = Finding::ok(NAME, format!("not wholly node {number}"), causes.join("; "));
    Some(far.but_if(several, State::Warning, fix))
}

fn gb(bytes_per_s: f64) -> String {
    let giga = bytes_per_s / 1e9;
    if giga < 0.1 { format!("{:.1} MB/s", 1e3 * giga) } else { format!("{giga:.1} GB/s") }
}

fn share(of: f64, most: f64) -> String {
    format!("{:.0}%", 100.0 * of / most)
}

/// The measured rates. `peak` is the link's capacity in bytes a second, if it is known.
pub fn speeds(measured: &Ceilings, rates: Option<&Rates>, peak: Option<f64>, device: &str) -> Vec<Finding> {
    let of_link = |speed: f64| match peak {
        Some(peak) => format!("{} of the link's capacity ({})", share(speed, peak), gb(peak)),
        None => "one large block".to_owned(),
    };
    let copy = |name: &str, speed: f64| {
        Finding::ok(name, gb(speed), of_link(speed)).but_if(
            peak.is_some_and(|peak| speed < LITTLE_OF_LINK * peak),
            State::Warning,
            "run again with nothing else on the link; if that does not help, boot with iommu=pt (skips the IOMMU)",
        )
    };
    let Ceilings { copy_up, copy_down, both_up, both_down, read, write, read_blocks, launch_us, .. } =
        *measured;
    let both = format!("{} up, {} down", gb(both_up), gb(both_down));
    let alone = copy_up + copy_down;
    let mut found = vec![
        copy("copies up", copy_up),
        copy("copies down", copy_down),
        Finding::ok(
            "copies both ways",
            both,
            format!("{} of the two alone", share(both_up + both_down, alone)),
        ),
        Finding::ok(
            "reads of host memory",
            gb(read),
            format!(
                "one long run of processors: a gather's ceiling; {} reach nine tenths of it",
                counted(read_blocks, "block")
            ),
        ),
        Finding::ok("writes of host memory", gb(write), "one long run of processors: a scatter's ceiling"),
    ];
    if let Some(rates) = rates {
        let [gather, scatter] = rows_fixes(device, read_blocks);
        found.push(rows("gather of rows", &rates.gather, read, &gather));
        found.push(rows("scatter of rows", &rates.scatter, write, &scatter));
    }
    found.push(Finding::ok(
        "launch",
        format!("{launch_us:.1} us"),
        "an operation that does nothing, from its start to its end",
    ));
    found
}

/// What to do about slow gathers and scatters, as commands for the device; only a GPU has thread blocks.
fn rows_fixes(device: &str, blocks: u32) -> [String; 2] {
    let bench = |group: &str| format!("forebay bench --device {device} --only {group}");
    match device {
        "host" => ["gather", "scatter"].map(|group| {
            format!("end other programs that use memory, then see where the time goes: {}", bench(group))
        }),
        _ => [
            format!("see whether more blocks help: {} --gather-blocks {blocks}", bench("gather")),
            format!("see whether more threads help: {} --threads 512", bench("scatter")),
        ],
    }
}

/// The rate with the most rows that were measured.
fn rows(name: &str, rates: &RowRates, ceiling: f64, fix: &str) -> Finding {
    let Some(most) = rates.points.last() else {
        return Finding::ok(name, "unknown", "not measured").but(State::Note, "run without --no-rates");
    };
    let value = format!("{} of {} x {} B", gb(most.bytes_per_s), most.rows, rates.row_bytes);
    let caches = match most.bytes_per_s > ceiling {
        true => ", which is one long run over memory; caches hold some of these rows",
        false => "",
    };
    let means = format!("{} of its ceiling{caches}", share(most.bytes_per_s, ceiling));
    Finding::ok(name, value, means).but_if(most.bytes_per_s < LITTLE_OF_CEILING * ceiling, State::Note, fix)
}

#[cfg(test)]
mod tests {
    use forebay::{Error, Kind};

    use super::*;

    fn ability(name: &'static str, hint: &'static str) -> Ability {
        let refused = Error::new(Kind::DeviceFailed, "try").at("cuTry: CUDA_ERROR_X").hint(hint);
        Ability { name, usable: Err(refused) }
    }

    #[test]
    fn a_missing_ability_is_reported_with_consequence_cause_and_fix() {
        let all = ABILITIES.map(|(name, ..)| ability(name, "take another driver"));
        for (found, (name, state, _, without)) in abilities(&all).iter().zip(ABILITIES) {
            assert_eq!(
                (found.name.as_str(), found.state, found.fix.as_str()),
                (name, state, "take another driver")
            );
            assert!(
                found.means.starts_with(without) && found.means.contains("cuTry: CUDA_ERROR_X"),
                "{found:?}"
            );
            assert!(!found.means.contains("take another"), "what to do appears once: {found:?}");
        }
        let unknown = &abilities(&[ability("time travel", "wait")])[0];
        assert_eq!((unknown.name.as_str(), unknown.state), ("time travel", State::Note));
    }

    fn facts(capability: (u32, u32), memory_free: u64) -> Facts {
        let gpu = GpuFacts { driver: (13, 0), capability, bus: "0000:01:00.0".to_owned() };
        let name = "NVIDIA H200".to_owned();
        Facts { name, memory_total: 140 << 30, memory_free, processors: 132, copy_engines: 3, gpu: Some(gpu) }
    }

    #[test]
    fn memory_that_other_processes_hold_is_noted() {
        let state = |free: u64| identity(&facts((9, 0), free << 30))[2].state;
        assert_eq!((state(139), state(105), state(104)), (State::Ok, State::Ok, State::Note));
        let old = &identity(&facts((8, 0), 0))[1];
        assert!(old.state == State::Ok && old.means.contains("need 9.0"), "{old:?}");
        let GpuFacts { bus, .. } = facts((9, 0), 0).gpu.unwrap();
        let older = capability(&GpuFacts { driver: (12, 2), capability: (9, 0), bus });
        assert!(older.means.ends_with("need a driver of CUDA 12.3 or newer"), "{older:?}");
    }

    #[test]
    fn page_tables_are_reported_for_a_gib_and_for_all_available_memory() {
        let state = MemoryState { available: Some(300 << 30), ..MemoryState::default() };
        let found = page_tables(&state);
        assert_eq!(found.value, "2.00 MiB of the GPU's memory a GiB");
        assert!(found.means.ends_with("for all available memory, 300 GiB, 600 MiB"), "{}", found.means);
        assert!(page_tables(&MemoryState::default()).means.ends_with("counts it"));
    }

    #[test]
    fn advice_names_the_device_and_blocks_only_for_a_gpu() {
        let [gather, scatter] = rows_fixes("cuda:1", 48);
        assert!(
            gather.ends_with("forebay bench --device cuda:1 --only gather --gather-blocks 48"),
            "{gather}"
        );
        assert!(scatter.ends_with("forebay bench --device cuda:1 --only scatter --threads 512"), "{scatter}");
        for fix in rows_fixes("host", 48) {
            assert!(fix.contains("forebay bench --device host") && !fix.contains("blocks"), "{fix}");
        }
    }

    #[test]
    fn a_share_above_the_ceiling_comes_with_its_reason() {
        let rates = |speed| rows("gather of rows", &RowRates::flat(656, speed), 36e9, "").means;
        assert!(rates(47e9).starts_with("131% of its ceiling") && rates(47e9).contains("caches"));
        assert_eq!(rates(18e9), "50% of its ceiling");
    }

    #[test]
    fn speeds_are_judged_by_the_link_and_by_their_ceilings() {
        let ceilings = Ceilings {
            copy_up: 53e9,
            copy_down: 20e9,
            both_up: 40e9,
            both_down: 33e9,
            read: 36e9,
            write: 50e9,
            read_blocks: 16,
            memory: 3e12,
            launch_us: 2.0,
        };
        let rates = Rates {
            gather: RowRates::flat(656, 35e9),
            scatter: RowRates::flat(656, 30e9),
            ..Rates::preset("pcie5").unwrap()
        };
        let states = |found: Vec<Finding>| -> Vec<(String, State)> {
            let wanting = found.into_iter().filter(|finding| finding.state != State::Ok);
            wanting.map(|finding| (finding.name, finding.state)).collect()
        };
        let scatter = ("scatter of rows".to_owned(), State::Note);
        let down = ("copies down".to_owned(), State::Warning);
        assert_eq!(states(speeds(&ceilings, Some(&rates), Some(63e9), "cuda:0")), [down, scatter.clone()]);
        // An unknown link is not judged.
        assert_eq!(states(speeds(&ceilings, Some(&rates), None, "cuda:0")), [scatter]);
        // Missing rates do not remove the findings of the link.
        assert_eq!(speeds(&ceilings, None, None, "cuda:0").len(), 6);
        let none = Rates { gather: RowRates { row_bytes: 656, points: vec![] }, ..rates };
        assert_eq!(states(speeds(&ceilings, Some(&none), None, "cuda:0")).len(), 2);
    }
}
