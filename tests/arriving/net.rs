//! Numbers from a seed, and what will happen, in order of time.

use std::collections::BTreeMap;
use std::time::Duration;

/// Numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xBB67_AE85_84CA_A73B)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    pub fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end.max(1))) as u32
    }

    /// A number from `least` to `most`.
    pub fn of(&mut self, least: u32, most: u32) -> u32 {
        least + self.below(most - least + 1)
    }

    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }

    /// True `of` times in a thousand.
    pub fn often(&mut self, of: u32) -> bool {
        self.below(1000) < of
    }

    pub fn millis(&mut self, most: u32) -> Duration {
        Duration::from_micros(u64::from(self.below(most * 1000 + 1)))
    }
}

/// Other bits for each word.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// How often of a thousand something goes wrong.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Messages that do not arrive, arrive twice, or late. Writes from afar that land late.
    pub lost: u32,
    pub twice: u32,
    pub late: u32,
    /// A run is fetched wrong.
    pub fetched: u32,
    /// A connection breaks, at any time or when a request has become whole.
    pub cut: u32,
    pub cut_whole: u32,
    /// A request is given up, or has a deadline that it does not keep.
    pub abort: u32,
}

impl Faults {
    pub const NONE: Faults =
        Faults { lost: 0, twice: 0, late: 0, fetched: 0, cut: 0, cut_whole: 0, abort: 0 };

    /// Those of a seed: often none of a kind.
    pub fn of(seed: u64) -> Faults {
        let mut draw = Draw::new(seed ^ 0xF00D);
        let mut some = |most: u32| if draw.often(500) { draw.below(most) } else { 0 };
        Faults {
            lost: some(150),
            twice: some(150),
            late: some(250),
            fetched: some(100),
            cut: some(10),
            cut_whole: some(100),
            abort: some(400),
        }
    }
}

/// What will happen, in order of time, and at one time in the order in which it was planned.
#[derive(Debug)]
pub struct Future<T> {
    what: BTreeMap<(Duration, u64), T>,
    count: u64,
}

impl<T> Future<T> {
    pub fn new() -> Future<T> {
        Future { what: BTreeMap::new(), count: 0 }
    }

    pub fn at(&mut self, time: Duration, what: T) {
        self.what.insert((time, self.count), what);
        self.count += 1;
    }

    pub fn first(&self) -> Option<Duration> {
        self.what.keys().next().map(|(time, _)| *time)
    }

    pub fn take(&mut self) -> Option<(Duration, T)> {
        self.what.pop_first().map(|((time, _), what)| (time, what))
    }

    pub fn keep(&mut self, keeps: impl Fn(&T) -> bool) {
        self.what.retain(|_, what| keeps(what));
    }
}
