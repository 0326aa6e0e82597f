//! How the model fabric behaves, and what goes wrong in it.

/// How rows cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The receiver reads the sender's memory.
    Shared,
    /// Rows come with the notice.
    Stream,
    /// The sender writes to landing pages.
    Far,
}

/// How often of a thousand times something happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A message does not come.
    pub lost: u64,
    /// A message comes twice.
    pub twice: u64,
    /// A message overtakes others of its connection.
    pub reordered: u64,
    /// A message, or a write, comes much later.
    pub late: u64,
    /// A message comes with a bit flipped.
    pub damaged: u64,
    /// A run is fetched or written wrong, or changes after it was fetched.
    pub fetched: u64,
    /// A run cannot be fetched.
    pub refused: u64,
    /// A frame or a write finds no room, for up to 20 ms.
    pub full: u64,
    /// A write from afar ends without having written everything.
    pub unwritten: u64,
    /// A connection breaks, for each message or write that arrives.
    pub cut: u64,
    /// Two connections are made instead of one.
    pub doubled: u64,
}

/// What has gone wrong so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Messages that were lost or came twice.
    pub lost_or_twice: u32,
    /// Connections that broke or were closed.
    pub cut: u32,
    /// Frames and writes that found no room.
    pub full: u32,
    /// Writes of which something did not land.
    pub unwritten: u32,
    /// Second connections between the same ends.
    pub doubled: u32,
}
