//! `forebay replay`: replays selection traces through pools of several sizes; [`crate::replay::requests::run`] handles
//! request traces.
//!
//! A trace is read once and replayed at every requested size. First the last `--warmup` prompt steps are replayed, in
//! which no row is born; then decode steps of `--mtp` consecutive positions each. The selections of a step are united,
//! and every draft is accepted; an incomplete last group is dropped. Nothing is resident before the first step.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay::device::Device;
use forebay::{Error, Geometry, Kind, Result, Shape};

use super::args::{Arguments, Split, settings};
use super::requests::run::{self, Asked, Traces};
use super::result::{Replayed, RowSize};
use super::study::Study;
use super::{curve, html, json, requests, text, tiers, together};
use crate::input::allowance::{self, Allowance};
use crate::input::device::DeviceName;
use crate::input::file_kind::{self, FileKind};
use crate::input::selection_trace::{self, Recorded};
use crate::input::sizes::MODEL;
use crate::policy::Policy;
use crate::present::output::{self, Input, Results, echo};
use crate::present::progress;

/// Replays the trace at `path` at every size.
fn replay(path: &Path, shape: &Shape, arguments: &Arguments) -> Result<Replayed> {
    let study = Study {
        policies: arguments.policies(),
        by_layer: arguments.split == Some(Split::ByLayer),
        prefetch: arguments.prefetch.is_some(),
        target: arguments.target(),
    };
    let allowance = Allowance { of: allowance::Replayed::Selections, memory: arguments.memory.memory };
    let Recorded { header, trace } = selection_trace::read(path, &allowance, |recorded, header| {
        let settings = settings(recorded, path, arguments)?;
        study.needs(header, shape, &settings).map_err(|e| selection_trace::named(e, path))
    })?;
    let settings = settings(&header, path, arguments)?;
    let bar = progress::of_trace(path, study.work(&trace, &settings));
    let replays = study
        .run(&trace, header.decode_start, shape, &settings, &bar)
        .map_err(|e| selection_trace::named(e, path))?;
    bar.finish_and_clear();
    Ok(Replayed { path: path.to_owned(), header, replays })
}

/// Refuses to read a trace twice that can be read only once: report and JSON each read their own.
fn check_twice(arguments: &Arguments) -> Result<()> {
    let both = arguments.report.html.is_some() && arguments.json.is_some();
    let once = |path: &&PathBuf| std::fs::metadata(path).is_ok_and(|file| !file.is_file() && !file.is_dir());
    match arguments.traces.iter().find(once).filter(|_| both) {
        None => Ok(()),
        Some(path) => Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!(
                "--html and --json read a trace twice, but {} is not a regular file",
                echo(path.display())
            ))
            .hint("leave one of the two out, or pass a file")),
    }
}

/// The requested device, which supports the other requested options.
fn open(arguments: &Arguments) -> Result<Arc<dyn Device>> {
    let target = arguments.target();
    match arguments.for_the_host() {
        Some(option) if target.name != DeviceName::Host => Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{option} works on the host only, but --device names a GPU, which replays lru"))
            .hint("leave one of the two out")),
        _ => target.open(),
    }
}

/// Refuses options that `--curve` cannot count.
fn check_curve(arguments: &Arguments) -> Result<()> {
    if arguments.policies() != [Policy::Lru] {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--curve counts the production rule, lru, but --policy names another")
            .hint("replay the other policies at named sizes, without --curve"));
    }
    if arguments.split == Some(Split::ByLayer) {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--split by-layer replays named sizes, but --curve counts all")
            .hint("pass one of the two"));
    }
    if arguments.prefetch.is_some() {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--prefetch needs pools of named sizes, but --curve builds none")
            .hint("pass one of the two"));
    }
    Ok(())
}

/// `forebay replay`.
///
/// # Errors
/// Errors of reading a trace, of settings that do not fit it, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    let model = arguments.model.as_deref().unwrap_or(MODEL);
    let shape =
        Shape::preset(model).ok_or_else(|| Error::new(Kind::InvalidConfig, "replay").at("--model"))?;
    let row = RowSize { model: model.to_owned(), bytes: Geometry::new(shape)?.row_bytes() };
    let html = arguments.report.html.as_deref();
    check_twice(arguments)?;
    let traces = arguments.traces.iter().map(|path| ("trace", path.as_path()));
    let sides = arguments.requests.side_files().iter().map(|path| ("side file", path.as_path()));
    let inputs: Vec<Input<'_>> = traces.chain(sides).collect();
    output::check_targets("replay", &[("--html", html), ("--json", arguments.json.as_deref())], &inputs)?;
    for path in &arguments.traces {
        file_kind::expect("replay", path, &[FileKind::Selections, FileKind::Requests], "a trace")?;
    }
    let mut results = Results::default();
    match run::kind_of(&arguments.traces)? {
        Traces::Requests => of_requests(arguments, &mut results)?,
        kind => {
            if kind == Traces::Selections {
                arguments.requests.refuse(arguments.tiers.given())?;
            }
            of_selections(arguments, &shape, &row, &mut results)?;
        }
    }
    results.deliver()
}

/// Replays request traces.
fn of_requests<'a>(arguments: &'a Arguments, results: &mut Results<'a>) -> Result<()> {
    run::check_option(arguments.for_selections())?;
    if let Some(device) = arguments.tiers.device_blocks {
        return tiers::run::command(arguments, device, results);
    }
    let memory = arguments.memory.memory;
    let html = arguments.report.html.as_deref();
    if let Some(target) = html {
        results.write(target, requests::html::page(&arguments.traces, &arguments.requests, memory)?);
        if arguments.json.is_none() {
            return Ok(());
        }
    }
    let asked = Asked { policies: arguments.policies(), curve: arguments.curve, memory };
    let tables = html.is_none().then(|| arguments.look.look());
    let json = arguments.json.as_deref();
    run::command(&arguments.requests, &asked, &arguments.traces, json, tables, results)
}

/// Replays selection traces.
fn of_selections<'a>(
    arguments: &'a Arguments,
    shape: &Shape,
    row: &RowSize,
    results: &mut Results<'a>,
) -> Result<()> {
    // Stays open to the end, so that the replays' own devices share the GPU's context.
    let _device = open(arguments)?;
    if arguments.together.together.is_some() {
        return together::run::command(arguments, row, results);
    }
    let html = arguments.report.html.as_deref();
    if let Some(target) = html {
        results.write(target, html::selections(arguments, shape, row)?);
        if arguments.json.is_none() {
            return Ok(());
        }
    }
    if arguments.curve {
        check_curve(arguments)?;
        return curve::command(arguments, shape, row, results);
    }
    let replayed =
        arguments.traces.iter().map(|path| replay(path, shape, arguments)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&replayed, row)?);
    }
    if html.is_none() && !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&replayed, row, look)));
    }
    Ok(())
}
