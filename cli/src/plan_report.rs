//! Plans for people: what was given, a line for each plan, what to know about them.

use forebay::Geometry;
use forebay::predict::plan::{Demand, Note, Planned};

use crate::look::{Look, Spare, align_right};
use crate::output::harmless;
use crate::plan::Point;
use crate::report::{number, ratio, size};
use crate::simulate_report::exposed_share;

/// The whole report.
pub fn text(points: &[Point], look: Look) -> String {
    let mut out = String::new();
    if let Some(first) = points.first() {
        out += &given(first, points);
        out += "\n\n";
    }
    out += &plans(points, look);
    out += "\n\n";
    for note in notes(points) {
        out += &format!("[{}] {}.\n", letter(note), capital(note.describe()));
    }
    if mixed(points) {
        out += &format!("[{ROOFLINE}] {}.\n", capital(BY_ROOFLINE));
    }
    for note in misses_notes(points) {
        out += &format!("{note}\n");
    }
    out += "Ratio: slots of a sequence and layer / context. Whole: the most sequences with\n\
            all rows on the device: up to there nothing needs to be offloaded.\n";
    out + if points.iter().any(|point| point.gain.is_some()) {
        "Tokens/s: of a node of 8 GPUs. Exposed: what the step takes beyond the same\n\
         step without misses, as a share. Pays from: the smallest batch with offload\n\
         that yields more than the most without.\n"
    } else {
        "Most: the most with as few slots as --least-slots says. Other: landing and\n\
         scratch slots, and what whole mappings leave unused.\n"
    }
}

/// The mark of a plan whose costs are a roofline's, and what is to be known about it.
const ROOFLINE: char = 'r';
pub const BY_ROOFLINE: &str = "by roofline: not to be compared with fitted rows";

/// Whether a roofline's costs stand among measured ones.
pub fn mixed(points: &[Point]) -> bool {
    let is = |by_roofline| {
        points.iter().any(|point| point.on.as_ref().is_some_and(|on| on.by_roofline == by_roofline))
    };
    is(true) && is(false)
}

/// What is to be known about the misses, each sentence once.
pub fn misses_notes(points: &[Point]) -> Vec<&str> {
    let mut once = Vec::new();
    for note in points.iter().filter_map(|point| point.on.as_ref()?.misses_note.as_deref()) {
        if !once.contains(&note) {
            once.push(note);
        }
    }
    once
}

/// A note's mark: the letter that stands behind its lines.
fn letter(note: Note) -> char {
    match note {
        Note::AllResident => 'a',
        Note::Dense => 'd',
        Note::FewSlots => 'f',
        Note::Scratch => 's',
        Note::HostBound => 'h',
        Note::NoRoom => 'n',
        Note::Slower => 't',
        Note::Unknown => 'u',
        _ => '?',
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Every note of any plan, once, in the order they come up.
fn notes(points: &[Point]) -> Vec<Note> {
    let mut once = Vec::new();
    for note in
        points.iter().filter_map(|point| point.planned.as_ref().ok()).flat_map(|planned| &planned.notes)
    {
        if !once.contains(note) {
            once.push(*note);
        }
    }
    once
}

/// What all plans share.
fn given(first: &Point, points: &[Point]) -> String {
    let Demand { gpu, weights, activations, workspace, host, .. } = first.demand;
    let same = |get: fn(&Point) -> u64| points.iter().all(|point| get(point) == get(first));
    let mut lines = Vec::new();
    if points.iter().all(|point| point.model == first.model)
        && let Ok(geometry) = Geometry::new(first.demand.shape)
    {
        lines.push(format!(
            "{}: {} layers, rows of {} bytes, index keys of {} bytes, k {}",
            harmless(&first.model),
            geometry.layers(),
            geometry.row_bytes(),
            first.demand.shape.index_key_bytes,
            first.demand.shape.top_k,
        ));
    }
    let taken = [(weights, "weights"), (activations, "activations"), (workspace, "workspace")];
    let taken: Vec<String> = taken
        .iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(|(bytes, what)| format!("{} {what}", size(*bytes as f64)))
        .collect();
    let without = if taken.is_empty() { String::new() } else { format!(" without {}", taken.join(", ")) };
    if same(|point| point.demand.gpu) {
        let left = gpu.saturating_sub(weights).saturating_sub(activations).saturating_sub(workspace);
        lines.push(format!("A GPU of {}{without}: {} for the cache", size(gpu as f64), size(left as f64)));
    } else if !taken.is_empty() {
        lines.push(format!("GPUs{without}"));
    }
    let host = host.map_or("as much as it takes".to_owned(), |bytes| size(bytes as f64));
    let tables = if first.demand.count_tables { "counted" } else { "beside" };
    let mut micro_batches: Vec<u32> = points.iter().map(|point| point.demand.micro_batches).collect();
    micro_batches.sort_unstable();
    micro_batches.dedup();
    let micro_batches: Vec<String> = micro_batches.iter().map(u32::to_string).collect();
    let micro_batches = micro_batches.join(" or ");
    lines.push(format!("Host memory: {host}. Micro-batches: {micro_batches}. Residency tables: {tables}"));
    if same(|point| u64::from(point.demand.context))
        && let Ok(Planned { live_tokens: Some(tokens), .. }) = &first.planned
        && same(|point| point.demand.gpu)
    {
        lines.push(format!(
            "Index keys stay on the device whole: at most {tokens} live tokens, {} sequences, whatever the ratio",
            tokens / u64::from(first.demand.context.max(1)),
        ));
    }
    lines.join("\n")
}

/// One line for each plan.
fn plans(points: &[Point], look: Look) -> String {
    let differ = |get: fn(&Point) -> String| {
        let first = points.first().map(get);
        points.iter().any(|point| Some(get(point)) != first)
    };
    let (models, gpus) = (differ(|p| p.model.clone()), differ(|p| p.demand.gpu.to_string()));
    let priced = points.iter().any(|point| point.gain.is_some());
    let links = points.iter().any(|point| point.link().is_some());
    let mixed = mixed(points);
    let mut head = Vec::new();
    head.extend(models.then_some("model"));
    head.extend(links.then_some("link"));
    head.extend(gpus.then_some("GPU"));
    head.extend(["context", "mtp", "batch", "ratio", "slots"]);
    head.extend(if priced { &PRICED[..] } else { &BYTES[..] });
    let columns = head.len();
    let mut table = look.table();
    table.set_header(head);
    for point in points {
        let mut row = Vec::new();
        row.extend(models.then(|| harmless(&point.model)));
        row.extend(links.then(|| point.link().unwrap_or_default().to_owned()));
        row.extend(gpus.then(|| size(point.demand.gpu as f64)));
        row.extend([tokens(point.demand.context), point.demand.query_rows.to_string()]);
        row.extend(line(point, priced));
        row.resize(columns, String::new());
        if mixed
            && point.on.as_ref().is_some_and(|on| on.by_roofline)
            && let Some(marks) = row.last_mut()
        {
            *marks += &format!("[{ROOFLINE}]");
        }
        table.add_row(row);
    }
    let names = usize::from(models) + usize::from(links);
    align_right(&mut table, |column| column + 1 != columns && column >= names);
    let spare = ["exposed", "whole, tokens/s", "OTPS", "index", "other", "tables", "free"];
    // The context, query rows, batch and ratio tell lines apart, too.
    look.fit(table, &Spare { columns: &spare, keys: names + usize::from(gpus) + 4, text: None })
}

/// Columns behind the slots: of plans alone, and of simulated ones.
const BYTES: [&str; 9] =
    ["index\nkeys", "slots,\nbytes", "other", "tables", "free", "host", "whole", "most", ""];
const PRICED: [&str; 10] = [
    "device",
    "host",
    "step\nms",
    "exposed",
    "OTPS",
    "tokens/s",
    "whole",
    "whole,\ntokens/s",
    "pays\nfrom",
    "",
];

/// A plan's figures; of one that does not fit the batch, and that it does not.
fn line(point: &Point, priced: bool) -> Vec<String> {
    let bytes = |bytes: u64| size(bytes as f64);
    let planned = match &point.planned {
        Ok(planned) => planned,
        Err(error) => {
            let batch = error.number("batch").map_or("-".to_owned(), |batch| batch.to_string());
            return [batch, "does not fit".to_owned()].into();
        }
    };
    let part = &planned.bytes;
    let marks: Vec<String> = planned.notes.iter().map(|note| format!("[{}]", letter(*note))).collect();
    let counted = if point.demand.count_tables { part.device() } else { part.data() };
    let mut row = vec![planned.batch.to_string(), ratio(planned.ratio), planned.slots.to_string()];
    match &point.gain {
        Some(gain) => {
            let outcome = &gain.outcome;
            row.extend([bytes(counted), bytes(part.host()), number(outcome.step_ms)]);
            row.extend([format!("{:.1}%", 100.0 * exposed_share(outcome)), number(outcome.otps)]);
            row.extend([format!("{:.0}", outcome.throughput), planned.resident_batch.to_string()]);
            row.push(gain.without.map_or("-".to_owned(), |without| format!("{without:.0}")));
            row.push(match gain.pays_from {
                Some(Some(batch)) => batch.to_string(),
                Some(None) => "never".to_owned(),
                None => String::new(),
            });
        }
        None if priced => {
            row.extend([bytes(counted), bytes(part.host())]);
            row.extend(["-", "-", "-", "-"].map(str::to_owned));
            row.extend([planned.resident_batch.to_string(), "-".to_owned(), String::new()]);
        }
        None => row.extend([
            bytes(part.index_keys),
            bytes(part.slots),
            bytes(part.landing + part.scratch + part.padding),
            bytes(part.tables),
            bytes(planned.available.saturating_sub(counted)),
            bytes(part.host()),
            planned.resident_batch.to_string(),
            planned.most_batch.to_string(),
        ]),
    }
    row.push(marks.join(""));
    row
}

/// Tokens in 1024s where they are.
pub fn tokens(tokens: u32) -> String {
    if tokens.is_multiple_of(1024) { format!("{}K", tokens / 1024) } else { tokens.to_string() }
}
