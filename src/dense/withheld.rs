//! The pages of aborted sequences to which others may still write: see `abort`.

/// The pages of one abort, each with its group.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) device: Vec<(usize, u32)>,
    pub(super) host: Vec<(usize, u32)>,
}

impl Pages {
    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        (self.device.len() + self.host.len()) as u32
    }

    /// The device pages of a group.
    pub(super) fn device_of(&self, group: usize) -> impl Iterator<Item = u32> + '_ {
        self.device.iter().filter(move |(of, _)| *of == group).map(|(_, page)| *page)
    }

    /// The host pages of a group.
    pub(super) fn host_of(&self, group: usize) -> impl Iterator<Item = u32> + '_ {
        self.host.iter().filter(move |(of, _)| *of == group).map(|(_, page)| *page)
    }
}
