//! The doctor's findings about a GPU: the stand-in driver's GPU, on machines that are made of files.

use std::path::Path;

use crate::command::{forebay, refuses, succeeds};
use crate::machine::Machine;
use crate::{entries, finding, is, skip};
use forebay_standin::{Options, Standin};
use serde_json::Value;

/// A driver's library for the command to load; `None` without a C++ compiler, after a message that the test skips.
fn driver() -> Option<Standin> {
    let standin = Standin::new(Options::default());
    if standin.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    standin
}

/// The GPU's entry, without measurements.
fn gpu(driver: &Standin, machine: &Machine) -> Value {
    let found = entries(&["--no-rates", "--driver", driver.library(), "--root", machine.root()]);
    assert_eq!(found.len(), 2, "one GPU and the machine");
    assert_eq!((&found[0]["device"], &found[1]["device"]), (&"cuda:0".into(), &"host".into()));
    found[0].clone()
}

#[test]
fn a_sound_gpu_has_nothing_to_fix() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-sound");
    let found = gpu(&driver, &machine);
    is(&found, "GPU", "ok", &[crate::machine::BUS, "SM, "]);
    is(&found, "compute capability", "ok", &[]);
    is(&found, "device memory", "ok", &["free of"]);
    is(&found, "PCIe link", "ok", &["gen 5 x16 now, gen 5 x16 at most", "63 GB/s"]);
    is(&found, "NUMA node", "ok", &["\"1\""]);
    is(&found, "memory beside the GPU", "ok", &["440 GiB free of 512 GiB"]);
    is(&found, "threads beside the GPU", "ok", &["4 of 4"]);
    is(&found, "pinned memory, tried", "ok", &["64.0 MiB at ", "B/s"]);
    is(&found, "page tables of pinned rows", "ok", &["2.00 MiB of the GPU's memory a GiB"]);
    let abilities = [
        "virtual memory",
        "memory descriptors",
        "fabric handles",
        "host memory of the driver's",
        "graphs",
        "conditional nodes",
    ];
    for ability in abilities {
        let state = &finding(&found, ability)["state"];
        assert!(["ok", "note"].contains(&state.as_str().unwrap()), "{ability}: {state}");
    }
    let all = entries(&["--no-rates", "--driver", driver.library(), "--root", machine.root()]);
    is(&all[1], "driver", "ok", &["580.65.06", "CUDA "]);
    is(&all[1], "GPUs", "ok", &["\"1\""]);
}

#[test]
fn captures_that_lose_their_priorities_are_reported() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-priorities");
    let line =
        ["doctor", "--json", "-", "--no-rates", "--driver", driver.library(), "--root", machine.root()];
    for (said, state, parts) in [
        (None, "note", &["not set", "torch before 2.10", "CUDA_GRAPHS_USE_NODE_PRIORITY=1"][..]),
        (Some("1"), "ok", &["run before"]),
        (Some("0"), "warning", &["wait for", "unset it"]),
        (Some("yes\u{1b}"), "note", &["torch before 2.10"]),
    ] {
        let mut command = forebay(&line);
        command.env_remove("CUDA_GRAPHS_USE_NODE_PRIORITY");
        if let Some(said) = said {
            command.env("CUDA_GRAPHS_USE_NODE_PRIORITY", said);
        }
        let found: Vec<Value> = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        is(&found[0], "priorities in graphs", state, parts);
    }
}

#[test]
fn a_slow_link_is_distinguished_from_an_idle_link() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-link");
    machine.link("current", "8.0 GT/s PCIe", "8");
    is(&gpu(&driver, &machine), "PCIe link", "warning", &["gen 3 x8 now", "8 GB/s", "fewer lanes"]);
    machine.link("current", "2.5 GT/s PCIe", "16");
    is(&gpu(&driver, &machine), "PCIe link", "note", &["lower speed", "--no-rates"]);
    // The system's values for "unknown".
    for (speed, width) in [("Unknown", "16"), ("32.0 GT/s PCIe", "63"), ("32.0 GT/s PCIe", "x")] {
        machine.link("current", speed, width);
        is(&gpu(&driver, &machine), "PCIe link", "note", &["unknown"]);
    }
}

/// Reserved huge pages count as memory of their node, and serve no other node.
#[test]
fn huge_pages_count_on_the_node_that_has_them() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-huge");
    let memory = |node: u32, free: u64, pages: u32| {
        let text = format!(
            "Node {node} MemTotal: 536870912 kB\nNode {node} MemFree: {} kB\nNode {node} HugePages_Free: {pages}\n",
            free << 20
        );
        machine.write(&format!("sys/devices/system/node/node{node}/meminfo"), &text);
    };
    memory(0, 400, 0);
    memory(1, 10, 200_000);
    let found = gpu(&driver, &machine);
    is(&found, "memory beside the GPU", "ok", &["401 GiB free of 512 GiB"]);
    is(&found, "huge pages beside the GPU", "ok", &["200000 free, 391 GiB"]);
    memory(0, 10, 200_000);
    memory(1, 400, 0);
    let found = gpu(&driver, &machine);
    let file = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
    is(&found, "huge pages beside the GPU", "warning", &["0 free", &format!("echo N > {file}")]);
}

#[test]
fn gpus_hidden_from_this_process_are_noted() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-hidden");
    for (bus, class) in
        [(crate::machine::BUS, "0x030200"), ("0000:5e:00.0", "0x030200"), ("0000:05:00.0", "0x068000")]
    {
        machine.write(&format!("sys/bus/pci/devices/{bus}/vendor"), "0x10de\n");
        machine.write(&format!("sys/bus/pci/devices/{bus}/class"), &format!("{class}\n"));
    }
    let all = entries(&["--no-rates", "--driver", driver.library(), "--root", machine.root()]);
    is(&all[1], "GPUs", "note", &["1 of 2", "CUDA_VISIBLE_DEVICES"]);
}

/// The bus as the system shows it: the GPU's folder is a link into the tree, below its port.
#[test]
fn a_bus_slot_slower_than_its_card_is_found() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-slot");
    let port = "sys/devices/pci0000:3a/0000:3a:01.0";
    machine.write(&format!("{port}/max_link_speed"), "16.0 GT/s PCIe\n");
    machine.write(&format!("{port}/max_link_width"), "16\n");
    let (own, inside) =
        (machine.path(&format!("sys/bus/pci/devices/{}", crate::machine::BUS)), machine.path(port));
    std::fs::rename(&own, inside.join(crate::machine::BUS)).unwrap();
    std::os::unix::fs::symlink(inside.join(crate::machine::BUS), &own).unwrap();
    machine.link("current", "16.0 GT/s PCIe", "16");
    let found = gpu(&driver, &machine);
    is(&found, "PCIe link", "ok", &["gen 4 x16 now, gen 5 x16 at most", "32 GB/s"]);
    is(&found, "PCIe slot", "warning", &["gen 4 x16 at most", "move the card"]);
}

#[test]
fn a_process_barred_from_the_gpus_node_gets_a_warning() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-node");
    machine.write("proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n");
    machine.memory_of(1, 20);
    let found = gpu(&driver, &machine);
    is(&found, "NUMA node", "warning", &["\"1\"", "cpuset.mems"]);
    is(&found, "memory beside the GPU", "warning", &["20.0 GiB free of 512 GiB", "numastat"]);
    is(&found, "threads beside the GPU", "warning", &["0 of 4", "--cpunodebind=1"]);
    machine.gpu("numa_node", "-1");
    is(&gpu(&driver, &machine), "NUMA node", "note", &["not reported", "topo"]);
    machine.gpu("numa_node", "7");
    is(&gpu(&driver, &machine), "NUMA node", "note", &["not online"]);
    machine.gpu("numa_node", "garbage");
    is(&gpu(&driver, &machine), "NUMA node", "note", &["unknown"]);
    // With one socket there is no choice of node, and the firmware need not report one.
    machine.gpu("numa_node", "-1");
    machine.write("sys/devices/system/node/online", "0\n");
    is(&gpu(&driver, &machine), "NUMA node", "ok", &[]);
}

#[test]
fn a_gpu_is_examined_in_a_container_without_system_files() {
    let Some(driver) = driver() else { return };
    let found = gpu(&driver, &Machine::bare("gpu-bare"));
    is(&found, "GPU", "ok", &[]);
    is(&found, "PCIe link", "note", &["unknown"]);
    is(&found, "NUMA node", "note", &["unknown"]);
}

#[test]
fn every_gpu_is_examined_unless_one_is_named() {
    let Some(driver) = driver() else { return };
    let named = |name: &str| entries(&["--no-rates", "--driver", driver.library(), "--device", name]);
    assert_eq!(named("cuda:0").len(), 2);
    let error = refuses(&["doctor", "--no-rates", "--driver", driver.library(), "--device", "cuda:7"]);
    assert!(error.contains("device 7") && error.contains("devices 1"), "{error}");
}

/// The keys of an object, sorted.
fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn measured_rates_are_accepted_by_fit() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-rates");
    // The stand-in copies in the processor's caches, faster than many links: this one is wider than that.
    for which in ["current", "max"] {
        machine.link(which, "64.0 GT/s PCIe", "32");
    }
    let file = machine.path("doctor.json");
    let asked = ["doctor", "--quick", "--driver", driver.library(), "--root", machine.root(), "--json"];
    let text = succeeds(&[&asked[..], &[file.to_str().unwrap()]].concat());
    let found: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let entry = &found[0];
    assert_eq!(
        keys(entry),
        ["ceilings", "device", "facts", "findings", "forebay", "kind", "rates", "schema"]
    );
    let facts = &entry["facts"];
    assert_eq!((&facts["bus"], &facts["numa_node"]), (&crate::machine::BUS.into(), &1.into()), "{facts:#}");
    assert_eq!((&facts["cuda"], &facts["capability"]), (&"12.8".into(), &"9.0".into()), "{facts:#}");
    assert!(facts["memory_free"].as_u64().unwrap() <= facts["memory_total"].as_u64().unwrap(), "{facts:#}");
    assert_eq!(facts["link"]["now"], serde_json::json!({"generation": 6, "width": 32}));
    assert_eq!((&entry["kind"], &entry["schema"]), (&"doctor".into(), &2.into()));
    assert_eq!(
        keys(&found[1]),
        ["device", "facts", "findings", "forebay", "kind", "schema"],
        "the machine was not measured"
    );
    assert_eq!(keys(&entry["findings"][0]), ["fix", "means", "name", "state", "value"]);
    assert_eq!(
        keys(&entry["rates"]),
        ["copy_down", "copy_engines", "copy_up", "gather", "gather_sm", "launch_ns", "scatter"]
    );
    assert_eq!(
        keys(&entry["ceilings"]),
        [
            "both_down",
            "both_up",
            "copy_down",
            "copy_up",
            "launch_us",
            "memory",
            "read",
            "read_blocks",
            "write"
        ]
    );
    for name in
        ["copies up", "copies down", "copies both ways", "gather of rows", "scatter of rows", "launch"]
    {
        assert!(text.contains(name) && finding(entry, name)["value"] != "", "{name}: {text}");
    }
    assert!(finding(entry, "copies up")["means"].as_str().unwrap().contains("242.0 GB/s"), "{entry:#}");
    // `fit` accepts the list's rates unchanged. This link cannot explain overlap costs measured elsewhere.
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/setups/ess-measurements.json");
    let mut measured: Value = serde_json::from_str(&std::fs::read_to_string(published).unwrap()).unwrap();
    measured.as_object_mut().unwrap().remove("overlap");
    // The stand-in takes most of a millisecond for a gather of any size, so its work determines the length of a step.
    for step in measured["steps"].as_array_mut().unwrap() {
        step["ms"] = (10.0 * step["ms"].as_f64().unwrap()).into();
    }
    let measurements = machine.path("measurements.json");
    std::fs::write(&measurements, measured.to_string()).unwrap();
    let setup = machine.path("setup.json");
    let fit = ["fit", measurements.to_str().unwrap(), "--rates", file.to_str().unwrap()];
    succeeds(&[&fit[..], &["--output", setup.to_str().unwrap()]].concat());
    let setup: Value = serde_json::from_str(&std::fs::read_to_string(setup).unwrap()).unwrap();
    assert_eq!(setup["link"]["rates"], entry["rates"]);
}

/// With the stand-in's GPU on node 0, which every machine has, and on a node that no machine has.
#[test]
fn a_gpu_is_measured_from_its_node_or_the_other_node_is_reported() {
    let Some(driver) = driver() else { return };
    let machine = Machine::sound("gpu-near");
    machine.link("current", "2.5 GT/s PCIe", "16");
    machine.gpu("numa_node", "0");
    machine.write("sys/devices/system/node/node0/cpulist", "0-1023\n");
    let measured =
        || entries(&["--quick", "--driver", driver.library(), "--root", machine.root()])[0].clone();
    let found = measured();
    match finding(&found, "measured from")["state"].as_str() {
        Some("ok") => is(&found, "measured from", "ok", &["node 0"]),
        // A container may forbid the policy, and the finding reports that.
        _ => is(&found, "measured from", "warning", &["set_mempolicy", "SYS_NICE"]),
    }
    // The link was just used, so it is not asleep.
    assert!(!finding(&found, "PCIe link").to_string().contains("--no-rates"), "{found:#}");
    machine.write("sys/devices/system/node/online", "0,900\n");
    machine.write("sys/devices/system/node/node900/cpulist", "1020-1023\n");
    machine.gpu("numa_node", "900");
    is(&measured(), "measured from", "warning", &["sched_setaffinity", "set_mempolicy", "--cpuset-mems"]);
    machine.gpu("numa_node", "-1");
    is(&measured(), "measured from", "note", &["any node", "--membind=N"]);
}

#[test]
fn the_host_device_is_measured_if_named() {
    let found = entries(&["--quick", "--device", "host"]);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0]["device"], "host");
    assert!(found[0]["rates"]["copy_up"].as_f64().unwrap() > 1e6, "{:#}", found[0]);
    is(&found[0], "device", "ok", &["host device"]);
    let without = entries(&["--no-rates", "--device", "host"]);
    assert!(without[0].get("rates").is_none());
    let output = forebay(&["doctor", "--quick", "--device", "host"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
}
