//! Ranks that fail: a call of the system that is refused, or at which the process is killed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use forebay::os::{Call, Faults};
use forebay::peer::{Hello, Links};

use crate::children::die;
use crate::no_faults;
use crate::windows::patient;

/// Refuses one call of those that follow [`Nth::aim`].
#[derive(Debug)]
pub struct Nth {
    left: AtomicU64,
    reached: AtomicU32,
}

pub const UNAIMED: u64 = u64::MAX;

impl Nth {
    pub fn unaimed() -> Nth {
        Nth { left: UNAIMED.into(), reached: AtomicU32::new(0) }
    }

    pub fn aim(&self, n: u64) {
        self.left.store(n, Ordering::Relaxed);
    }

    /// Whether a call was refused.
    pub fn reached(&self) -> bool {
        self.reached.load(Ordering::Relaxed) == 1
    }
}

impl Faults for Nth {
    fn before(&self, call: Call) -> Option<i32> {
        // How often a rank waits, receives and sends depends on time.
        let timed = matches!(call, Call::Poll | Call::Receive | Call::Send);
        if timed || self.left.load(Ordering::Relaxed) == UNAIMED {
            return None;
        }
        let hit = self.left.fetch_sub(1, Ordering::Relaxed) == 0;
        self.reached.fetch_add(u32::from(hit), Ordering::Relaxed);
        if hit {
            self.aim(UNAIMED);
        }
        hit.then_some(libc::ENOMEM)
    }
}

/// Sessions of no other rank.
pub fn alone() -> Links {
    let hello = Hello { group: 0, rank: 0, ranks: 1, geometry: [0; 32], plan: [0; 32], content: [0; 32] };
    Links::over(vec![], hello, patient(), no_faults()).unwrap()
}

/// Kills the process at a call of this kind, once it was armed with how many pass before.
#[derive(Debug)]
pub struct DiesAt(Call, AtomicU32);

const NEVER: u32 = u32::MAX;

impl DiesAt {
    pub fn unarmed(call: Call) -> DiesAt {
        DiesAt(call, AtomicU32::new(NEVER))
    }

    pub fn arm(&self, passing: u32) {
        self.1.store(passing, Ordering::Relaxed);
    }
}

impl Faults for DiesAt {
    fn before(&self, call: Call) -> Option<i32> {
        if call == self.0
            && self.1.load(Ordering::Relaxed) != NEVER
            && self.1.fetch_sub(1, Ordering::Relaxed) == 0
        {
            die();
        }
        None
    }
}
