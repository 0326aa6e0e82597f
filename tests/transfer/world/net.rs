//! The model fabric: connections that lose, repeat, reorder, damage and delay messages, and writes from afar that land
//! late. All from one seed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::{Fence, Run};

use super::nodes::Origins;
use crate::frame_bytes::sum;

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

/// Numbers from a seed (SplitMix64).
#[derive(Clone)]
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x6A09_E667_F3BC_C909)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True `of` times in a thousand.
    pub fn often(&mut self, of: u64) -> bool {
        self.below(1000) < of
    }

    pub fn millis(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most * 1000 + 1))
    }
}

/// How often of a thousand messages something happens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub lost: u64,
    pub twice: u64,
    pub late: u64,
    /// A message arrives with a bit flipped.
    pub damaged: u64,
    /// A notice arrives with another use's fence, and with a sum that fits: what a confused sender would say.
    pub misnamed: u64,
    /// Any bytes of a message are others, with a sum that fits.
    pub nonsense: u64,
    /// A run is fetched wrong.
    pub fetched: u64,
    pub cut: u64,
    pub crash: u64,
    pub abort: u64,
}

/// A message, with the sender's memory as it was when a stream sent it.
#[derive(Clone)]
pub struct Message {
    pub bytes: Vec<u8>,
    pub carried: Option<Rc<Origins>>,
}

/// What happens at a time.
#[derive(Clone)]
pub enum Happens {
    ToReceiver(u32, Message),
    ToSender(u32, Message),
    /// A run of a write lands.
    Lands {
        link: u32,
        write: u64,
        fence: Fence,
        page: u32,
        origin: u64,
        run: Run,
        last: bool,
    },
    /// One end learns that the connection is gone.
    SenderLost(u32),
    ReceiverLost(u32),
    /// What the sender could write through no longer exists.
    Destroyed(u32),
    Connect(usize, usize),
    RestartSender(usize),
    RestartReceiver(usize),
    /// An attempt at a request begins, or is granted at a receiver, or goes on.
    Attempt(usize),
    Grant(usize, usize),
    Compute(usize),
    Abort(usize),
    /// A decode instance is done with a whole request.
    Close(usize, Fence),
    Nothing,
}

/// What will happen, in order of time.
#[derive(Default)]
pub struct Future {
    heap: BinaryHeap<Reverse<(Duration, u64)>>,
    what: std::collections::HashMap<u64, Happens>,
    count: u64,
}

impl Future {
    pub fn at(&mut self, time: Duration, happens: Happens) {
        self.heap.push(Reverse((time, self.count)));
        self.what.insert(self.count, happens);
        self.count += 1;
    }

    pub fn first(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse((time, _))| *time)
    }

    pub fn take(&mut self) -> Option<(Duration, Happens)> {
        let Reverse((time, number)) = self.heap.pop()?;
        Some((time, self.what.remove(&number).unwrap()))
    }

    /// Forgets what was to land over a connection.
    pub fn forget_writes(&mut self, link: u32) {
        for happens in self.what.values_mut() {
            if matches!(happens, Happens::Lands { link: of, .. } if *of == link) {
                *happens = Happens::Nothing;
            }
        }
    }
}

/// Gives a changed frame a sum that fits.
pub fn add_sum(bytes: &mut Vec<u8>) {
    let end = bytes.len() - 4;
    let sum = sum(&bytes[..end]);
    bytes.truncate(end);
    bytes.extend(sum.to_le_bytes());
}
