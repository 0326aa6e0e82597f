//! `forebay replay --together`: reads the traces, replays them with each kind of budgets, and writes the result.

use std::path::Path;

use forebay::trace::{Header, Promise, SelectionTrace};
use forebay::{Error, Kind, Result, SLOT_BLOCK};

use super::result::{Replayed, Run, Sequence};
use super::{html, json, text};
use crate::input::allowance::{self, Allowance};
use crate::input::selection_trace::named;
use crate::present::output::{Results, echo};
use crate::present::progress;
use crate::replay::args::{self, Arguments};
use crate::replay::result::RowSize;
use crate::study::threads;
use crate::study::together::{Budgets, Member, Together};

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Kind::InvalidConfig, "replay").at(what.into())
}

/// Reads the traces with all their positions: a prompt that fits is resident as a whole, named rows or not.
fn read(arguments: &Arguments, allowance: &Allowance) -> Result<Vec<SelectionTrace>> {
    let mut traces: Vec<SelectionTrace> = Vec::with_capacity(arguments.traces.len());
    let mut held = 0_u64;
    for path in &arguments.traces {
        let ask = |promise: Promise<'_>| match promise {
            Promise::Trace(header) => {
                allowance.check(held + 4 * header.members(), 4 * u64::from(header.context))
            }
            Promise::Recording(positions) => allowance.check(held + 4 * positions, 0),
        };
        let trace = SelectionTrace::read_asking(path, ask)?;
        held += 4 * trace.members();
        if let Some((first, first_path)) =
            traces.first().map(SelectionTrace::header).zip(arguments.traces.first())
        {
            check_alike((first, first_path), (trace.header(), path))?;
        }
        traces.push(trace);
    }
    Ok(traces)
}

/// Refuses traces of different models.
fn check_alike(first: (&Header, &Path), other: (&Header, &Path)) -> Result<()> {
    let counts = [("layers", first.0.layers, other.0.layers), ("k", first.0.k, other.0.k)];
    match counts.into_iter().find(|(_, a, b)| a != b) {
        None => Ok(()),
        Some((what, a, b)) => {
            let [first, other] = [first.1, other.1].map(|path| echo(path.display()));
            let what = format!(
                "--together needs traces of one model, but {first} has {what} {a} and {other} has {b}"
            );
            Err(invalid(what).hint("name traces with equal layers and k"))
        }
    }
}

/// The sequences, in the order of the traces, and the steps between their arrivals.
fn sequences(traces: &[SelectionTrace], arguments: &Arguments) -> Result<(Vec<Sequence>, u32)> {
    let mut sequences = Vec::with_capacity(traces.len());
    for (trace, path) in traces.iter().zip(&arguments.traces) {
        let (warmup, steps) = args::steps(trace.header(), path, arguments)?;
        let (path, header) = (path.clone(), trace.header().clone());
        sequences.push(Sequence { path, header, arrives: 0, warmup, steps });
    }
    let shortest = sequences.iter().map(|sequence| sequence.steps).min().unwrap_or(0);
    let gap = arguments.together.gap.unwrap_or(shortest / traces.len().max(1) as u32);
    let mut end = 0_u64;
    for (index, sequence) in (0_u64..).zip(&mut sequences) {
        let arrives = index * u64::from(gap);
        if arrives > end {
            return Err(invalid("--gap leaves steps in which no sequence is alive")
                .with("gap", gap)
                .hint("pass a smaller --gap"));
        }
        end = end.max(arrives + u64::from(sequence.steps));
        // No more than the steps of all traces, which memory holds.
        sequence.arrives =
            u32::try_from(arrives).map_err(|_| Error::new(Kind::Overflow, "replay").at("--gap"))?;
    }
    Ok((sequences, gap))
}

/// Replays the traces with each kind of budgets.
fn replay(arguments: &Arguments, slots: u32) -> Result<Replayed> {
    let memory = arguments.memory.memory;
    let allowance = Allowance { of: allowance::Replayed::Together, memory };
    let traces = read(arguments, &allowance)?;
    let (sequences, gap) = sequences(&traces, arguments)?;
    let members = traces.iter().zip(&sequences).map(|(trace, sequence)| {
        let Sequence { arrives, warmup, steps, .. } = *sequence;
        Member { trace, arrives, warmup, steps }
    });
    let mtp = arguments.mtp();
    let together = Together { members: members.collect(), mtp, blocks: slots / SLOT_BLOCK };
    if together.fixed() == 0 {
        return Err(invalid("--together has less than a block of 64 slots for each sequence")
            .with("slots", slots)
            .with("sequences", together.most_alive())
            .hint("pass more slots, fewer traces or a larger --gap"));
    }
    let layers = sequences.first().map_or(0, |sequence| sequence.header.layers) as usize;
    let of = |e| match arguments.traces.first() {
        Some(path) => named(e, path),
        None => e,
    };
    let bytes = together.bytes().map_err(of)?;
    let outcomes = together.outcome_bytes().saturating_mul(layers as u64);
    let decoded = traces.iter().map(|trace| 4 * trace.members()).sum();
    allowance.check(decoded, threads::held(layers, bytes).saturating_add(outcomes))?;
    let shares = arguments.together.shares();
    let kinds = shares.iter().map(|by| (by.name(), Budgets::Shared(by.policy())));
    let kinds: Vec<_> = std::iter::once(("fixed", Budgets::Fixed)).chain(kinds).collect();
    let work = u64::from(together.steps()) * layers as u64 * kinds.len() as u64;
    let bar = progress::bar("--together", work);
    let mut runs = Vec::with_capacity(kinds.len());
    for (name, budgets) in kinds {
        let layer = |layer: usize| together.layer(layer as u32, budgets, || bar.inc(1));
        runs.push(Run::new(name, traces.len(), &threads::each(layers, bytes, layer)?));
    }
    bar.finish_and_clear();
    Ok(Replayed { sequences, slots: together.blocks * SLOT_BLOCK, gap, mtp, runs })
}

/// `forebay replay --together`.
///
/// # Errors
/// Errors of reading the traces, of options that do not fit them, and of writing the result.
pub fn command<'a>(arguments: &'a Arguments, row: &RowSize, results: &mut Results<'a>) -> Result<()> {
    let Some(slots) = arguments.together.together else { return Ok(()) };
    let replayed = replay(arguments, slots)?;
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&replayed, row)?);
    }
    let page = arguments.report.html.as_deref();
    if let Some(target) = page {
        results.write(target, html::page(&replayed, row));
    }
    if page.is_none() && !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&replayed, row, look)));
    }
    Ok(())
}
