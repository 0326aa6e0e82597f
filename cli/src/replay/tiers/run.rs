//! `forebay replay --device-blocks`: replays request traces through two tiers.

use std::path::Path;

use forebay::trace::requests::RequestTrace;
use forebay::{Error, Kind, Result};

use super::result::{Replayed, Saved, Sums, saved};
use super::{json, text};
use crate::blocks::tiers::{self, Tiers};
use crate::input::allowance::{self, Allowance};
use crate::present::output::{Results, echo};
use crate::replay::args::Arguments;
use crate::replay::requests::result::about;
use crate::replay::requests::run::bar;
use crate::study::reserve;

fn invalid(path: &Path, what: &str) -> Error {
    Error::new(Kind::InvalidConfig, "replay").at(format!("{}: {what}", echo(path.display())))
}

/// Replays the trace at `path`.
fn replay(path: &Path, arguments: &Arguments, tiers: Tiers) -> Result<Replayed> {
    let bytes = arguments.tiers.block_bytes(arguments.model.as_deref())?;
    let rates = arguments.tiers.rates(arguments.report.link_rate, bytes.as_ref())?;
    let allowance = Allowance { of: allowance::Replayed::Requests, memory: arguments.memory.memory };
    let options = arguments.requests.options();
    let trace = RequestTrace::read_asking(path, &options, |taken| allowance.reading(taken))?;
    let about = about(path, &arguments.requests, &trace)?;
    if about.distinct == 0 {
        return Err(invalid(path, "the trace names no blocks, so no tier has an effect")
            .hint("pass a trace with block ids, or leave out --device-blocks"));
    }
    if !about.knows_block_lengths && (arguments.model.is_some() || rates.is_some()) {
        return Err(invalid(
            path,
            "the blocks' lengths are unknown, so --model and --prefill-rate have no tokens",
        )
        .hint("pass the lengths with --block-lengths, or leave these options out"));
    }
    let (request, least) = tiers::least_device_blocks(&trace)?;
    if tiers.device < least {
        let what =
            format!("--device-blocks {} cannot hold the largest request; the least is {least}", tiers.device);
        return Err(invalid(path, &what)
            .with("request", request as u64 + 1)
            .with("blocks", least)
            .hint("pass at least as many: the blocks of a running request are all on the device"));
    }
    let seconds_bytes = if rates.is_some() { 8 * trace.requests() as u64 } else { 0 };
    allowance.check_of(path, trace.bytes(), tiers::bytes(&trace, tiers).saturating_add(seconds_bytes))?;
    let mut seconds = reserve::vector(if rates.is_some() { trace.requests() - about.skipped } else { 0 })?;
    let mut sums = Sums::default();
    let bar = bar(path, trace.requests() as u64);
    tiers::replay(&trace, tiers, |request, served| {
        bar.inc(1);
        if request < about.skipped {
            return;
        }
        sums.add(trace.blocks(request).len(), trace.input_tokens(request), served);
        if let Some((rates, bytes)) = rates.zip(bytes.as_ref()) {
            seconds.push(saved(served, rates, bytes).iter().sum());
        }
    })?;
    bar.finish_and_clear();
    let saved =
        rates.zip(bytes.as_ref()).map(|(rates, bytes)| Saved::new(rates, bytes, &sums.served, seconds));
    Ok(Replayed { about, tiers, sums, bytes, saved })
}

/// Replays every trace through tiers of `device` blocks and the host blocks that `arguments` name, into `results`.
///
/// # Errors
/// Errors of reading a trace, and of settings that do not fit it.
pub fn command<'a>(arguments: &'a Arguments, device: u32, results: &mut Results<'a>) -> Result<()> {
    let host = arguments.tiers.host_blocks.unwrap_or(0);
    let tiers = Tiers { device, host, save: arguments.tiers.save.unwrap_or_default() };
    let replayed =
        arguments.traces.iter().map(|path| replay(path, arguments, tiers)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&replayed)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&replayed, look)));
    }
    Ok(())
}
