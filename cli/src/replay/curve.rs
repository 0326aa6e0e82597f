//! `forebay replay --curve`: misses at every size, as text and as JSON.
//!
//! Sizes that hold every step's selected rows are read from the curves. A smaller size that was asked for is replayed
//! through the pools by itself, and marked.

use std::path::{Path, PathBuf};

use forebay::trace::Header;
use forebay::{Error, Kind, Result, Shape};
use serde::Serialize;

use super::args::{self, Arguments};
use super::json::Heading;
use super::result::{Count, RowSize, miss_ratio};
use super::text;
use crate::input::allowance::{Allowance, Replayed};
use crate::input::selection_trace::{self, Recorded};
use crate::policy::Policy;
use crate::present::output::Results;
use crate::present::terminal::{self, Look, Spare, align_right};
use crate::present::{json, numbers, progress};
use crate::study::curve::{self, Curves};
use crate::study::lru_stack;
use crate::study::pools::Setting;

/// Hits and misses of all layers at one size.
#[derive(Clone, Copy, Serialize)]
struct Point {
    slots: u32,
    hits: u64,
    misses: u64,
    /// Replayed by itself, because the curve is not exact at this size.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replayed: bool,
}

/// One trace at every size.
struct Curved {
    path: PathBuf,
    header: Header,
    /// The setting that all sizes share; its slots are the first size's.
    setting: Setting,
    curves: Curves,
    /// The requested sizes, each with its prompt share.
    asked: Vec<(f64, Point)>,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    heading: Heading<'a>,
    decode_start: u32,
    exact_from: u32,
    flat_from: u32,
    curve: Points<'a>,
}

/// The points of a trace, written as they are counted, so only their text is ever in memory as a whole.
struct Points<'a>(&'a Curved);

impl Serialize for Points<'_> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_seq(self.0.replayed().into_iter().chain(self.0.steps()))
    }
}

impl Curved {
    /// The curve's point at `slots`.
    fn point(&self, slots: u32) -> Point {
        let (hits, misses) = self.curves.total(slots);
        Point { slots, hits, misses, replayed: false }
    }

    /// Requested sizes below the curve, ascending.
    fn replayed(&self) -> Vec<Point> {
        let asked = self.asked.iter().map(|(_, point)| *point);
        let mut points: Vec<Point> = asked.filter(|point| point.replayed).collect();
        points.sort_unstable_by_key(|point| point.slots);
        points.dedup_by_key(|point| point.slots);
        points
    }

    /// The curve's first size, and every larger size with fewer misses than the one before it.
    fn steps(&self) -> impl Iterator<Item = Point> {
        let (first, last) = (self.curves.exact_from(), self.curves.flat_from());
        let mut before = None;
        (first..=last.max(first))
            .map(|slots| self.point(slots))
            .filter(move |point| before.replace(point.misses) != Some(point.misses))
    }

    fn entry(&self) -> Entry<'_> {
        let Curved { header, setting, curves, .. } = self;
        Entry {
            heading: Heading::new("selection-curve", &self.path, header, setting, Policy::Lru),
            decode_start: header.decode_start,
            exact_from: curves.exact_from(),
            flat_from: curves.flat_from(),
            curve: Points(self),
        }
    }
}

/// Bytes of a point's text.
const POINT: u64 = 128;

/// Bytes that [`curved`] holds in addition to the trace: the curves and their text, and a pool of the largest size
/// that the curves may not cover.
fn needs(
    header: &Header,
    path: &Path,
    shape: &Shape,
    settings: &[(Setting, f64)],
    arguments: &Arguments,
) -> Result<u64> {
    let Some((setting, _)) = settings.first() else { return Ok(0) };
    let Header { decode_start, k, .. } = *header;
    let rows = setting.steps * setting.mtp;
    let text = if arguments.json.is_some() { POINT * u64::from(decode_start + rows) } else { 0 };
    let below = settings.iter().filter(|(at, _)| u64::from(at.slots) < u64::from(k) * u64::from(at.mtp));
    let mut pools = below.map(|(at, _)| lru_stack::needs(header, shape, *at));
    let pools = pools.try_fold(text, |most, one| one.map(|one| most.max(one)));
    Ok(curve::bytes(header, *setting) + pools.map_err(|e| selection_trace::named(e, path))?)
}

/// Curves of the trace at `path`, and replays of the requested sizes that the curves do not cover.
fn curved(path: &Path, shape: &Shape, arguments: &Arguments) -> Result<Curved> {
    let allowance = Allowance { of: Replayed::Selections, memory: arguments.memory.memory };
    let Recorded { header, trace } = selection_trace::read(path, &allowance, |recorded, header| {
        needs(header, path, shape, &args::settings(recorded, path, arguments)?, arguments)
    })?;
    let settings = args::settings(&header, path, arguments)?;
    let Some((setting, _)) = settings.first().copied() else {
        return Err(Error::new(Kind::Internal, "replay").at("no size"));
    };
    // A pass over all layers counts as a replay of one size.
    let (steps, layers) = (u64::from(setting.steps), u64::from(header.layers));
    let bar = progress::of_trace(path, steps * layers * (settings.len() as u64 + 1));
    let counted = curve::curves(&trace, setting, || bar.inc(steps));
    let curves = counted.map_err(|e| selection_trace::named(e, path))?;
    let mut curved = Curved { path: path.to_owned(), header, setting, curves, asked: Vec::new() };
    for (setting, share) in settings {
        let point = if setting.slots >= curved.curves.exact_from() {
            bar.inc(steps * layers);
            curved.point(setting.slots)
        } else {
            let outcome = lru_stack::replay(&trace, shape, setting, || bar.inc(layers));
            let layers = match outcome {
                // A default size, in a trace too long for so small a pool.
                Err(error) if error.kind() == Kind::OutOfRange && arguments.sizes() == 0 => continue,
                outcome => outcome.map_err(|e| selection_trace::named(e, path))?.layers,
            };
            let (hits, misses) = layers.iter().fold((0, 0), |sum, layer| (sum.0 + layer.0, sum.1 + layer.1));
            Point { slots: setting.slots, hits, misses, replayed: true }
        };
        curved.asked.push((share, point));
    }
    bar.finish_and_clear();
    Ok(curved)
}

/// One line for each size asked for.
fn table(curved: &Curved, row: &RowSize, look: Look) -> String {
    let steps = f64::from(curved.setting.steps);
    let mut table = look.table();
    table.set_header([
        "prompt\nshare",
        "slots",
        "misses/step\nand layer",
        "",
        "miss\nratio",
        "to device\nper step",
    ]);
    let per_layer = |point: &Point| point.misses as f64 / steps / curved.curves.layers.len() as f64;
    let longest = curved.asked.iter().map(|(_, point)| per_layer(point)).fold(0.0, f64::max);
    for (share, point) in &curved.asked {
        let count = Count { hits: point.hits, misses: point.misses };
        table.add_row([
            numbers::ratio(*share),
            format!("{}{}", point.slots, if point.replayed { "*" } else { " " }),
            numbers::number(per_layer(point)),
            terminal::bar(per_layer(point), longest, terminal::BAR, look.utf8),
            format!("{:.1}%", 100.0 * miss_ratio(count)),
            numbers::size(point.misses as f64 / steps * f64::from(row.bytes)),
        ]);
    }
    align_right(&mut table, |column| column != 3);
    look.fit(table, &Spare { keys: 2, ..Spare::default() })
}

/// The whole report.
fn text(traces: &[Curved], row: &RowSize, look: Look) -> String {
    let mut out = String::new();
    for curved in traces {
        let (exact, flat) = (curved.curves.exact_from(), curved.curves.flat_from());
        let rest = curved.point(flat.max(exact)).misses;
        out += &text::heading(&curved.path, &curved.header, curved.setting, row);
        out += "\n\n";
        out += &table(curved, row, look);
        out +=
            &format!("\n\nOne pass counts every size from {} up exactly.", numbers::counted(exact, "slot"));
        if curved.asked.iter().any(|(_, point)| point.replayed) {
            out += " A size with * cannot hold the rows of every step and was replayed by itself.";
        }
        out += &format!(
            "\nMore than {} gain nothing: the other {rest} misses are rows neither selected nor written before.\n\n",
            numbers::counted(flat, "slot"),
        );
    }
    out + "Hit: a selected row that was resident when its step began. Miss: one fetched\n\
         from host memory. Rows written in a step are neither. A step's query rows are\n\
         united first. Miss ratio: misses / (hits + misses). To the device: misses x row\n\
         bytes. Means are over all decode steps. --json writes all sizes.\n\
         Prompt share: slots over the tokens at decode start.\n"
}

/// All entries as JSON, with a line end.
fn json(traces: &[Curved]) -> Result<Vec<u8>> {
    let entries: Vec<Entry<'_>> = traces.iter().map(Curved::entry).collect();
    json::list(&entries)
}

/// `forebay replay --curve`, into `results`.
///
/// # Errors
/// Errors of reading a trace, and of settings that do not fit it.
pub fn command<'a>(
    arguments: &'a Arguments,
    shape: &Shape,
    row: &RowSize,
    results: &mut Results<'a>,
) -> Result<()> {
    let curved =
        arguments.traces.iter().map(|path| curved(path, shape, arguments)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &arguments.json {
        results.write(path, json(&curved)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text(&curved, row, look)));
    }
    Ok(())
}
