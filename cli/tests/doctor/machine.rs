//! A made-up machine: a folder with the files that the doctor reads.

use std::fs;
use std::path::{Path, PathBuf};

/// The stand-in driver's first GPU.
pub const BUS: &str = "0000:3b:00.0";

pub struct Machine {
    root: PathBuf,
}

/// `/proc/self/limits` with this limit of locked memory.
pub fn limits(locked: &str) -> String {
    format!(
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max open files            1024                 524288               files     \n\
         Max locked memory         {locked:<20} {locked:<20} bytes     \n\
         Max address space         unlimited            unlimited            bytes     \n"
    )
}

impl Machine {
    /// A machine without any files.
    pub fn bare(name: &str) -> Machine {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor").join(name);
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        Machine { root }
    }

    /// Two sockets, everything in order; the stand-in's GPU on the second one, in a slot as fast as the card.
    pub fn sound(name: &str) -> Machine {
        let machine = Machine::bare(name);
        let processor = |n: u32| {
            let flags = "fpu sse2 avx2 avx512f avx512bw avx512_vbmi2";
            format!("processor\t: {n}\nmodel name\t: Intel(R) Xeon(R) Platinum\nflags\t\t: {flags}\n\n")
        };
        machine.write("proc/cpuinfo", &(0..8).map(processor).collect::<String>());
        machine.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n");
        machine.write(
            "proc/meminfo",
            "MemTotal:       1073741824 kB\nMemFree:        9 kB\nMemAvailable:   104857600 kB\n\
             HugePages_Total:  409600\nHugePages_Free:   400000\nHugePages_Rsvd:        0\n\
             Hugepagesize:       2048 kB\n",
        );
        machine.write("proc/self/limits", &limits("unlimited"));
        machine.write(
            "proc/self/status",
            "Name:\tforebay\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1\n",
        );
        machine.write("proc/self/cgroup", "0::/a\n");
        machine.write("sys/fs/cgroup/a/memory.max", "max\n");
        machine.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n",
        );
        machine.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        machine.write(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always within_size advise [never] deny force\n",
        );
        machine.write("sys/devices/system/node/online", "0-1\n");
        for (node, threads, free) in [(0, "0-3", 450_u64), (1, "4-7", 440)] {
            let folder = format!("sys/devices/system/node/node{node}");
            machine.write(&format!("{folder}/cpulist"), &format!("{threads}\n"));
            machine.memory_of(node, free);
        }
        machine.link("current", "32.0 GT/s PCIe", "16");
        machine.link("max", "32.0 GT/s PCIe", "16");
        machine.gpu("numa_node", "1");
        machine
    }

    pub fn root(&self) -> &str {
        self.root.to_str().unwrap()
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    pub fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Sets a node's free memory in GiB, of 512; one of them holds files.
    pub fn memory_of(&self, node: u32, free: u64) {
        let line = |name: &str, gib: u64| format!("Node {node} {name}:  {} kB\n", gib << 20);
        let text = line("MemTotal", 512) + &line("MemFree", free - 1) + &line("Inactive(file)", 1);
        self.write(&format!("sys/devices/system/node/node{node}/meminfo"), &text);
    }

    /// A file of the GPU's.
    pub fn gpu(&self, file: &str, text: &str) {
        self.write(&format!("sys/bus/pci/devices/{BUS}/{file}"), &format!("{text}\n"));
    }

    /// The GPU's link, `current` or `max`.
    pub fn link(&self, which: &str, speed: &str, width: &str) {
        self.gpu(&format!("{which}_link_speed"), speed);
        self.gpu(&format!("{which}_link_width"), width);
    }

    /// Every file.
    pub fn files(&self) -> Vec<PathBuf> {
        let (mut folders, mut files) = (vec![self.root.clone()], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { folders.push(path) } else { files.push(path) }
            }
        }
        files
    }
}
