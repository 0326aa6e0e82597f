//! The selections of a warm-up as ages: for each position, how long ago it was last selected.
//!
//! A transfer brings the selections of the last prompt positions, so that a sequence joins with the rows that its first
//! step is likely to read. As positions they are `[steps][k]` i32 for each index group: 256 KB for 32 steps of 2048,
//! and 16 MB for 61 groups, more than the rows of 256 tokens. But LRU keeps the rows that were selected most recently,
//! and their order is the last selection of each, then the position. So one byte for each position says the same: its
//! *age*, 0 if the newest step selected it, 1 if the one before did and the newest did not, and so on, [`NEVER`] if
//! none did.
//!
//! [`to_selections`] lists each position once, in the step that selected it last, and a warm-up takes the result as any
//! other. After it the same rows are resident, in the same order of the rule, and later victims are the same
//! (`tests/ages.rs`). They may be in other slots, which the residency digest shows: all ranks of a sequence take ages,
//! or all take selections.
//!
//! **When they do not say enough.** A budget smaller than the rows of one step makes the rule choose among the rows of
//! that step, and hits of the step keep their slots: then also earlier selections count. [`suffice`] finds this, and
//! the selections themselves are sent then. It needs no more than the counts of each step.

use crate::error::{Error, Kind, Result};

/// The age of a position that none of the steps selected.
pub const NEVER: u8 = u8::MAX;

/// The most steps whose ages a byte holds.
pub const STEPS_MAX: usize = NEVER as usize;

/// Whether a warm-up from ages ends as one from the selections themselves, `[steps][top_k]` i32, for a sequence of
/// `length` tokens: no step selects more rows than `budget`, and a byte holds the age of every step.
///
/// `budget` is the smallest that the sequence may have when it joins. With shared budgets
/// ([`Config::share`](crate::Config::share)) that is what it was promised, and not its share.
///
/// # Errors
/// [`Kind::OutOfRange`] for selections that are not whole steps.
pub fn suffice(selections: &[i32], top_k: usize, length: u32, budget: u32) -> Result<bool> {
    let steps = steps_of(selections, top_k)?;
    let rows = |step: &[i32]| step.iter().filter(|position| is_below(**position, length)).count();
    Ok(steps <= STEPS_MAX && selections.chunks_exact(top_k.max(1)).all(|step| rows(step) <= budget as usize))
}

/// Writes the age of each position: of selections `[steps][top_k]` i32, oldest first, -1 for none. Positions beyond
/// `ages` are left out, as a warm-up leaves them out.
///
/// # Errors
/// [`Kind::OutOfRange`] for selections that are not whole steps, or of more than [`STEPS_MAX`] steps. Nothing is
/// written then.
pub fn from_selections(selections: &[i32], top_k: usize, ages: &mut [u8]) -> Result<()> {
    let steps = steps_of(selections, top_k)?;
    check_steps(steps)?;
    ages.fill(NEVER);
    // Oldest first: a later step overwrites what an earlier one wrote.
    for (step, positions) in selections.chunks_exact(top_k.max(1)).enumerate() {
        for position in positions {
            let age = usize::try_from(*position).ok().and_then(|position| ages.get_mut(position));
            age.into_iter().for_each(|age| *age = (steps - 1 - step) as u8);
        }
    }
    Ok(())
}

/// Writes selections `[steps][top_k]` i32, oldest first, that have these ages: each position once, in the step that
/// selected it last, by ascending position, then -1.
///
/// # Errors
/// [`Kind::OutOfRange`] for room that is not whole steps, or for more than [`STEPS_MAX`] steps; also for an age of none
/// of the steps, and for more than `top_k` positions of one age: what comes from another machine may say anything. The
/// selections may hold anything then.
pub fn to_selections(ages: &[u8], top_k: usize, selections: &mut [i32]) -> Result<()> {
    let steps = steps_of(selections, top_k)?;
    check_steps(steps)?;
    selections.fill(-1);
    let mut counts = [0_usize; STEPS_MAX];
    for (position, age) in (0_i32..).zip(ages).filter(|(_, age)| **age != NEVER) {
        let wrong = |place| Error::new(Kind::OutOfRange, "ages").at(place).with("position", position as u64);
        let (age, count) = (usize::from(*age), &mut counts[usize::from(*age)]);
        if age >= steps {
            return Err(wrong("an age of none of the steps")
                .with("age", age as u64)
                .with("steps", steps as u64));
        }
        if *count >= top_k {
            return Err(wrong("more positions of one age than a step selects").with("top_k", top_k as u64));
        }
        let place = (steps - 1 - age) * top_k + *count;
        selections.get_mut(place).into_iter().for_each(|to| *to = position);
        *count += 1;
    }
    Ok(())
}

fn is_below(position: i32, length: u32) -> bool {
    u32::try_from(position).is_ok_and(|position| position < length)
}

fn steps_of(selections: &[i32], top_k: usize) -> Result<usize> {
    match selections.len().checked_rem(top_k) {
        Some(0) => Ok(selections.len() / top_k),
        _ => Err(Error::new(Kind::OutOfRange, "ages")
            .at("selections that are not whole steps")
            .with("words", selections.len() as u64)
            .with("top_k", top_k as u64)),
    }
}

fn check_steps(steps: usize) -> Result<()> {
    match steps > STEPS_MAX {
        true => Err(Error::new(Kind::OutOfRange, "ages")
            .at("steps")
            .with("steps", steps as u64)
            .with("most", STEPS_MAX as u64)),
        false => Ok(()),
    }
}
