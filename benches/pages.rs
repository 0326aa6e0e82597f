//! Claim: a page is allocated and freed in at most 50 ns, uncontended.
//!
//! The pool has a server's size (1,048,576 pages). Half of it is owned and freed in shuffled order, so that the free
//! pages are scattered. The bench takes one page per call, and 64 in one call.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;

use std::cell::RefCell;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::Result;
use forebay::total::Pages;
use race::{Side, claim, done, race, record};

const PAGES: u32 = 1 << 20;
const CALLS: u64 = 1 << 20;
/// The most nanoseconds of one page.
const MOST: f64 = 50.0;

/// Returns a pool whose free pages are scattered all over it.
fn scattered() -> Result<Pages> {
    let mut pages = Pages::new("bench", PAGES)?;
    let mut all = Vec::new();
    pages.allocate(PAGES, &mut all)?;
    // A walk with an odd step visits every page once.
    (0..PAGES / 2).try_for_each(|i| pages.release(all[(i.wrapping_mul(0x9E37_79B1) % PAGES) as usize]))?;
    Ok(pages)
}

/// Takes `batch` pages per call, and frees them once `held` are out.
fn pass(pages: &mut Pages, batch: u32, held: &mut Vec<u32>) -> Result<(Duration, u64)> {
    let lap = Lap::begin();
    for _ in 0..CALLS / u64::from(batch) / 64 {
        for _ in 0..64 {
            pages.allocate(batch, held)?;
        }
        held.drain(..).try_for_each(|page| pages.release(page))?;
    }
    Ok((lap.end(), CALLS))
}

fn main() -> Result<()> {
    let pages = RefCell::new((scattered()?, Vec::with_capacity(64 * 64)));
    let run = |batch: u32| {
        let (pages, held) = &mut *pages.borrow_mut();
        done(pass(pages, batch, held))
    };
    let mut sides = [Side::new("one a call", || run(1)), Side::new("64 a call", || run(64))];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "pages", &mut sides);
    let rounds = race(9, &mut sides);
    drop(sides);
    criterion.final_summary();
    for side in ["one a call", "64 a call"] {
        println!("allocate and free, {side}: {:.1} ns a page", 1e9 / rounds.rate(side));
    }
    println!("64 a call against one: {:.2}", rounds.ratio("64 a call", "one a call"));
    claim("50 ns against a page's allocate and free", MOST * rounds.rate("one a call") / 1e9, 1.0);
    Ok(())
}
