//! Reads what the system reports about itself in `/proc` and `/sys`.
//!
//! Any of these files may be missing, unreadable or, in a container, made up. So nothing that is read here is an
//! error, and nothing is assumed to be short or to be text. Tests put another root folder before both paths to
//! describe any machine.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most bytes of a file that are read: one or two kilobytes for each of a thousand processors.
const MOST: u64 = 4 << 20;

/// The root of the files.
#[derive(Clone, Debug)]
pub struct Files {
    root: PathBuf,
}

impl Files {
    /// The files of this machine, or under another root.
    pub fn under(root: Option<&Path>) -> Files {
        Files { root: root.unwrap_or(Path::new("/")).to_owned() }
    }

    /// The folder that contains `proc` and `sys`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A file's text, by its path from the root.
    pub fn text(&self, path: &str) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.root.join(path)).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
        String::from_utf8(bytes).ok()
    }

    /// A file's text without surrounding spaces; none if it is empty.
    pub fn word(&self, path: &str) -> Option<String> {
        self.text(path).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// The names in a folder, ascending; none if there is no such folder.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// The text after `name` and a colon in the first line that has it, in `/proc/meminfo` and similar files.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| Some(line.trim_start().strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}

/// Such a field as a number of bytes, given in kB.
pub fn kib(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Such a field as a number.
pub fn count(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.parse().ok()
}

/// The word in brackets: the current value of a switch.
pub fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

/// The most entries of a list of processors or nodes.
const LONGEST: usize = 1 << 16;

/// A list such as `0-3,8`, ascending as written. None for any other text; an empty list is a list.
pub fn list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || numbers.len() + (last - first) as usize >= LONGEST {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_switches_and_lists_are_read_and_garbage_is_ignored() {
        let text = "MemTotal:  16 kB\nNode 1 MemFree: 2 kB\nmodel name\t: A B\nHugePages_Total:    7\n";
        assert_eq!(kib(text, "MemTotal"), Some(16384));
        assert_eq!(kib(text, "Node 1 MemFree"), Some(2048));
        assert_eq!((field(text, "model name"), count(text, "HugePages_Total")), (Some("A B"), Some(7)));
        for wrong in
            ["", "MemTotal: x kB", "MemTotal: 16", "MemTotal 16 kB", "MemTotal: 99999999999999999999 kB"]
        {
            assert_eq!(kib(wrong, "MemTotal"), None, "{wrong}");
        }
        assert_eq!(kib("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("always madvise never] ["), None);
        assert_eq!(list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(list("\n"), Some(vec![]));
        for wrong in ["a", "3-1", "0-", "0-4000000000", "-1", "0x"] {
            assert_eq!(list(wrong), None, "{wrong}");
        }
    }
}
