//! Input that several commands share, from a command line and its files: sizes, devices, kinds of files, traces,
//! misses, and how much memory they may use.

pub mod allowance;
pub mod device;
pub mod file_kind;
pub mod machine;
pub mod misses;
pub mod numa_nodes;
pub mod selection_trace;
pub mod sizes;
pub mod system_files;
