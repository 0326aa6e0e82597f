//! Plans as text: the given values, a line for each plan, notes, and the advice.

use forebay::Geometry;
use forebay::predict::plan::{Demand, Note, Planned};
use forebay::predict::stride::Stride;
use forebay::predict::weights::Attention;
use forebay::weights::{Bytes, Closing, Source};

use super::deployment::Deployed;
use super::pulls;
use super::result::{Gain, Point, Slow};
use super::settings::{Advised, Settings};
use super::shards::{Counted, Sharded, Weighed};
use crate::present::numbers::{counted, grouped, number, ratio, signed_percent, tokens};
use crate::present::output::harmless;
use crate::present::provenance;
use crate::present::terminal::{Look, Spare, align_right};
use crate::simulate::result::exposed_share;

/// The rank of columns that a table drops first.
const WIDE: u8 = 9;

/// The whole report.
pub fn report(points: &[Point], least_otps: f64, look: Look) -> String {
    let mut out = String::new();
    let mut say = |line: &str| out += &format!("{line}\n");
    let rests = || points.iter().filter_map(|point| Some(&point.on.as_ref()?.provenance));
    provenance::sentences(rests()).iter().for_each(|sentence| say(sentence));
    let shared = points.first().map(|first| given(first, points)).unwrap_or_default();
    shared.iter().for_each(|line| say(line));
    say("");
    say(&plans(points, look));
    say("");
    let settings = Settings::of(points);
    if let Some(table) = pulls::table(points, |point| settings.name(point), look) {
        say(&table);
        say("");
        let beside = if points.iter().any(|point| point.gain.is_some()) { NOT_INCLUDED } else { "" };
        say(&format!("{SHARDED}{beside}"));
    }
    for note in notes(points) {
        say(&format!("[{}] {}.", letter(note), capital(note.describe())));
    }
    if Settings::of(points).mixed {
        say(&format!("[{ROOFLINE}] {}.", capital(BY_ROOFLINE)));
    }
    misses_notes(points).iter().for_each(|note| say(note));
    let advised = Advised::of(points, least_otps);
    advised.elastic().for_each(|(setting, sentence)| say(&of_setting(setting, sentence)));
    say(&definitions(points.iter().any(|point| point.gain.is_some())));
    provenance::assumptions(rests()).iter().for_each(|assumed| say(&format!("Assumed: {assumed}.")));
    say("");
    advised.all().for_each(|(setting, advice)| say(&of_setting(setting, &advice.sentence)));
    pulls::sentences(points).for_each(|(point, sentence)| say(&of_setting(&settings.name(point), &sentence)));
    out
}

/// A sentence about a setting; the name of the only setting is empty.
pub fn of_setting(setting: &str, sentence: &str) -> String {
    if setting.is_empty() { sentence.to_owned() } else { format!("{setting}: {sentence}") }
}

/// The meanings of the columns.
fn definitions(priced: bool) -> String {
    let own = if priced {
        "OTPS: output tokens a second of each sequence. Gain: tokens a second above those of the most sequences with \
         all rows on the device. Exposed: how much longer the step takes than without misses, as a share of the step. \
         Pays from: the smallest batch with offload that yields more than the largest without."
    } else {
        "Most: the most sequences with --least-slots slots each. Other: landing and scratch slots, and memory that \
         whole mappings leave unused."
    };
    format!(
        "Ratio: slots of a sequence and layer as a share of its context at its end, prompt and promised tokens. Whole: \
         the most sequences with all rows on the device; up to it offload is not needed. Misses from: with elastic \
         budgets (`Config::share`), the smallest batch whose rows do not all have slots; misses after a change of \
         budget are not counted. {own}"
    )
}

/// The meaning of the table of ways to keep weights.
const SHARDED: &str = "Weights: whole on each GPU; sharded, the parts of other ranks pulled; or whole but for o_proj, \
    which the ranks divide, so that activations move; or by heads (--attention tp), with a batch of all GPUs. Batch: \
    the most sequences with all rows on the device. Gain: tokens a second beyond those of resident weights.";
const NOT_INCLUDED: &str = " Tokens a second of the first table do not include what a step waits for pulls.";

/// The mark of a plan whose costs come from a roofline, and its meaning.
const ROOFLINE: char = 'r';
pub const BY_ROOFLINE: &str = "by roofline: not comparable with fitted rows";

/// Notes about the misses, each sentence once.
pub fn misses_notes(points: &[Point]) -> Vec<&str> {
    let mut once = Vec::new();
    for note in points.iter().filter_map(|point| point.on.as_ref()?.misses_note.as_deref()) {
        if !once.contains(&note) {
            once.push(note);
        }
    }
    once
}

/// A note's mark: the letter at the end of its lines.
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
        Note::Untried => 'l',
        Note::TooSlow => 'o',
        Note::MoreTooSlow => 'm',
        _ => '?',
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// The notes of all plans, each once, in order of appearance.
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

/// How attention is divided, and what that means for the cache.
pub fn attention(deployed: &Deployed) -> &'static str {
    match deployed.attention {
        Attention::Data => "DP attention: each GPU has the cache of its own sequences",
        Attention::Tensor if deployed.heads == deployed.node_gpus() => {
            "TP attention: each GPU of a node has the cache of all its sequences"
        }
        Attention::Tensor => "TP attention: each GPU of a --tp group has the cache of all its sequences",
    }
}

/// What the experts are divided over, and what becomes of everything else.
fn divided(point: &Point) -> (String, String) {
    let deployed = &point.deployed;
    let division = point.weighed.as_ref().map(|weighed| weighed.division);
    let experts = match division.map(|division| division.experts) {
        Some(experts) if experts != deployed.gpus => counted(experts, "GPU"),
        _ => "all GPUs".to_owned(),
    };
    let dense = division.map_or(deployed.heads, |division| division.dense);
    let rest = match deployed.attention {
        Attention::Tensor if dense == deployed.node_gpus() => {
            "everything else divided by heads over a node".to_owned()
        }
        Attention::Tensor => format!("everything else divided by heads over {}", counted(dense, "GPU")),
        Attention::Data if dense > 1 => {
            format!("dense parts, embedding and head over {}, everything else on each", counted(dense, "GPU"))
        }
        Attention::Data => "everything else on each".to_owned(),
    };
    (experts, rest)
}

/// The source of the weights.
pub fn weights(point: &Point) -> String {
    match &point.deployed.checkpoint {
        Some(checkpoint) => {
            let each = point.memory.size(point.demand.weights as f64);
            let (experts, rest) = divided(point);
            format!(
                "Weights: {each} on each GPU, from the checkpoint {checkpoint}; experts divided over {experts}, {rest}"
            )
        }
        None => {
            let given = point.memory.weights.as_ref().map_or("none".to_owned(), ToString::to_string);
            format!("Weights: {given} on each GPU, from --weights")
        }
    }
}

/// The weights on a GPU by module, and what sharding saves.
fn weighed(point: &Point, weighed: &Weighed) -> Vec<String> {
    let size = |bytes: u64| point.memory.size(bytes as f64);
    let modules = weighed.modules.iter().filter(|bytes| bytes.on_gpu > 0);
    let modules: Vec<String> = modules
        .map(|bytes| match (bytes.module.describe(), bytes.on_gpu == bytes.whole) {
            (name, true) => format!("{name} {}", size(bytes.on_gpu)),
            (name, false) => format!("{name} {} of {}", size(bytes.on_gpu), size(bytes.whole)),
        })
        .collect();
    let mut lines = vec![format!("Weights by module, in {}: {}", weighed.dtype, modules.join(", "))];
    let Some(sharded) = &weighed.sharded else { return lines };
    let Sharded { plan, rounded, exact, .. } = sharded;
    let ranks = plan.group().ranks;
    let from = match sharded.source {
        Source::Peers => format!("over {}", counted(ranks, "rank")),
        Source::Host => "from each rank's pinned host memory".to_owned(),
    };
    let rest = match plan.closing() {
        Closing::Resident(layer) => format!("; layer {layer} stays whole"),
        Closing::ThirdBuffer => "; the last has a third buffer".to_owned(),
        Closing::Even => String::new(),
    };
    let names = harmless(&sharded.names.join(", "));
    lines.push(format!(
        "Sharded {from}: {names} in {} of {} layers{rest}",
        plan.sharded(),
        plan.layers().len()
    ));
    let saved = |of: &Counted| {
        let sign = if of.saved < 0 { "-" } else { "" };
        format!("{sign}{}", size(of.saved.unsigned_abs()))
    };
    let Bytes { resident, shards, buffers, host } = &rounded.bytes;
    let host = if *host > 0 { format!(", and {} of host memory", size(*host)) } else { String::new() };
    lines.push(format!(
        "Of {} a GPU holds {}: resident {}, own parts {}, {} {}{host}",
        size(plan.whole()),
        size(rounded.bytes.device()),
        size(*resident),
        size(*shards),
        counted(buffers.len() as u64, "buffer"),
        size(buffers.iter().sum()),
    ));
    lines.push(format!(
        "Saved: {} a GPU ({} before rounding), the latent rows of {} tokens. A pull moves up to {} of a layer's {} \
         ({} of {} before rounding){}",
        saved(rounded),
        saved(exact),
        grouped(rounded.tokens as f64),
        size(rounded.pull),
        size(rounded.layer),
        size(exact.pull),
        size(exact.layer),
        if point.on.is_none() { "; its time needs --setup" } else { "" },
    ));
    lines.extend(pulls::lines(point));
    lines
}

/// The values that all plans share, line by line.
pub fn given(first: &Point, points: &[Point]) -> Vec<String> {
    let Demand { gpu, weights: on_gpu, activations, workspace, .. } = first.demand;
    let memory = &first.memory;
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
            first.demand.shape.top_k
        ));
    }
    let (gpus, one) = (first.deployed.gpus, same(|point| point.demand.gpu));
    let of = if one { format!(" of {}", memory.gpu) } else { String::new() };
    let plural = if gpus == 1 { "" } else { "s" };
    lines.push(format!("{gpus} GPU{plural}{of}, {}", attention(&first.deployed)));
    if same(|point| point.demand.weights) && points.iter().all(|point| point.deployed == first.deployed) {
        lines.push(weights(first));
        lines.extend(first.weighed.iter().flat_map(|own| weighed(first, own)));
    }
    let taken: Vec<String> = [(&memory.activations, "activations"), (&memory.workspace, "workspace")]
        .into_iter()
        .filter_map(|(given, what)| Some((given.as_ref().filter(|given| given.bytes > 0)?, what)))
        .map(|(given, what)| format!("{given} of {what}"))
        .collect();
    let beside = match taken.is_empty() {
        true => "nothing (no --workspace, no --activations)".to_owned(),
        false => taken.join(" and "),
    };
    if one && same(|point| point.demand.weights) {
        let left = gpu.saturating_sub(on_gpu).saturating_sub(activations).saturating_sub(workspace);
        lines.push(format!(
            "Other memory on each GPU: {beside}; {} remain for the cache",
            memory.size(left as f64)
        ));
    } else {
        lines.push(format!("Other memory on each GPU: {beside}"));
    }
    if let Some(on) = &first.on {
        let link = match (points.iter().all(|point| point.link() == first.link()), first.link()) {
            (true, Some(link)) => format!(", link {}", harmless(link)),
            (true, None) => ", its own link".to_owned(),
            (false, _) => String::new(),
        };
        let setup = harmless(&on.provenance.setup);
        let tokens = if on.accept == 1.0 { "token" } else { "tokens" };
        lines.push(format!("Setup {setup}{link}; {} {tokens} a step and sequence", on.accept));
    }
    lines.extend(asked(first, points));
    lines
}

/// The values that were asked of all plans alike, and the memory that is counted.
fn asked(first: &Point, points: &[Point]) -> Vec<String> {
    let same = |get: fn(&Point) -> u64| points.iter().all(|point| get(point) == get(first));
    let one = same(|point| point.demand.gpu);
    let mut lines = Vec::new();
    let same_context = same(|point| u64::from(point.demand.context));
    let same_mtp = same(|point| u64::from(point.demand.query_rows));
    let context = same_context.then(|| format!("Context: {}", tokens(first.demand.context)));
    let mtp = same_mtp.then(|| format!("Query rows of a step: {}", first.demand.query_rows));
    let both: Vec<String> = context.into_iter().chain(mtp).collect();
    lines.extend((!both.is_empty()).then(|| both.join(". ")));
    let host = first.memory.host.as_ref();
    let host = host.map_or("as much as the pool needs".to_owned(), |given| format!("{given} a GPU"));
    let tables = if first.demand.count_tables { "counted" } else { "only reported" };
    let mut micro_batches: Vec<u32> = points.iter().map(|point| point.demand.micro_batches).collect();
    micro_batches.sort_unstable();
    micro_batches.dedup();
    let micro_batches: Vec<String> = micro_batches.iter().map(u32::to_string).collect();
    let micro_batches = micro_batches.join(" or ");
    lines.push(format!("Host memory: {host}. Micro-batches: {micro_batches}. Residency tables: {tables}"));
    lines.extend(strides(first, points));
    if let Ok(Planned { live_tokens: Some(tokens), .. }) = &first.planned
        && same_context
        && one
        && same(|point| point.demand.weights)
    {
        lines.push(format!(
            "All index keys stay on the device: at most {} live tokens a GPU, {} sequences, at any ratio",
            grouped(*tokens as f64),
            tokens / u64::from(first.demand.context.max(1)),
        ));
    }
    lines
}

/// The stride of rows in host memory, and the cost of an alternative, for plans of one model that offload.
fn strides(first: &Point, points: &[Point]) -> Option<String> {
    let offloads = |point: &&Point| point.planned.as_ref().is_ok_and(Planned::offloads);
    let shape = first.demand.shape;
    let point =
        points.iter().find(offloads).filter(|_| points.iter().all(|one| one.demand.shape == shape))?;
    let geometry = Geometry::new(shape).ok()?;
    let (own, other) = (Stride::of(&geometry), Stride::other(&geometry)?);
    let rows = point.planned.as_ref().ok()?.bytes.rows;
    let (now, then) = (rows as f64, other.host_bytes(rows, own.bytes) as f64);
    let size = match points {
        [_] => format!(", {} a GPU instead of {}", point.memory.size(then), point.memory.size(now)),
        _ => String::new(),
    };
    Some(format!(
        "Host stride: {} bytes, {} requests of 128 bytes a row. At {} (--host-stride): {} requests, {} of the rows' \
         host memory{size}",
        own.bytes,
        number(own.requests),
        other.bytes,
        number(other.requests),
        signed_percent(f64::from(other.bytes) / f64::from(own.bytes) - 1.0),
    ))
}

/// One line for each plan.
fn plans(points: &[Point], look: Look) -> String {
    let differ = |get: &dyn Fn(&Point) -> String| {
        let first = points.first().map(get);
        points.iter().any(|point| Some(get(point)) != first)
    };
    let priced = points.iter().any(|point| point.gain.is_some());
    let mixed = Settings::of(points).mixed;
    let mut columns: Vec<(&str, u8, Vec<String>)> = Vec::new();
    let mut add = |head: &'static str, rank: u8, cell: &dyn Fn(&Point) -> String| {
        columns.push((head, rank, points.iter().map(cell).collect()));
    };
    // Ranks: 0 is always shown; of the others, the highest are dropped first if a line is too long.
    if differ(&|point| point.model.clone()) {
        add("model", 0, &|point| harmless(&point.model));
    }
    if differ(&|point| point.link().unwrap_or_default().to_owned()) {
        add("link", 0, &|point| point.link().unwrap_or_default().to_owned());
    }
    if differ(&|point| point.demand.gpu.to_string()) {
        add("GPU", 0, &|point| point.memory.gpu.to_string());
    }
    let wide = look.width.is_none();
    if wide || differ(&|point| point.demand.context.to_string()) {
        add("context", 0, &|point| tokens(point.demand.context));
    }
    if wide || differ(&|point| point.demand.query_rows.to_string()) {
        add("mtp", 0, &|point| point.demand.query_rows.to_string());
    }
    add("batch,\na GPU", 0, &batch);
    add("batch,\nin all", 2, &|point| {
        fitting(point, |planned| point.deployed.sequences(planned.batch).to_string())
    });
    add("ratio", 0, &|point| match &point.planned {
        Ok(planned) => ratio(planned.ratio),
        Err(_) => "does not fit".to_owned(),
    });
    add("slots", if priced { WIDE } else { 1 }, &|point| fitting(point, |planned| planned.slots.to_string()));
    add("misses\nfrom", WIDE, &|point| {
        fitting(point, |planned| planned.misses_from.map_or("-".to_owned(), |first| first.to_string()))
    });
    if priced {
        of_time(&mut add);
    } else {
        of_bytes(&mut add);
    }
    let marks: Vec<String> = points.iter().map(|point| marks(point, mixed)).collect();
    let marked = marks.iter().any(|marks| !marks.is_empty());
    columns.extend(marked.then_some(("", 0, marks)));
    drawn(&columns, marked, look)
}

/// The table of these columns: heads, ranks and cells. Marks come last, and are aligned to the left as names are.
fn drawn(columns: &[(&str, u8, Vec<String>)], marked: bool, look: Look) -> String {
    let mut table = look.table();
    table.set_header(columns.iter().map(|(head, ..)| *head));
    for line in 0..columns.first().map_or(0, |(_, _, cells)| cells.len()) {
        table.add_row(columns.iter().map(|(_, _, cells)| cells.get(line).map_or("", String::as_str)));
    }
    let names = columns.iter().take_while(|(head, ..)| matches!(*head, "model" | "link")).count();
    align_right(&mut table, |column| (names..columns.len() - usize::from(marked)).contains(&column));
    let mut spared: Vec<(u8, String)> =
        columns.iter().map(|(head, rank, _)| (*rank, head.replace('\n', " "))).collect();
    spared.retain(|(rank, _)| *rank > 0);
    spared.sort_by_key(|(rank, _)| std::cmp::Reverse(*rank));
    let spared: Vec<&str> = spared.iter().map(|(_, head)| head.as_str()).collect();
    // The columns that identify a line, up to the batch.
    let keys = columns.iter().position(|(head, ..)| head.starts_with("batch")).map_or(0, |batch| batch + 1);
    look.fit(table, &Spare { columns: &spared, keys, text: None })
}

/// Adds a column: head, rank, and the text of a plan's cell.
type Add<'a> = dyn FnMut(&'static str, u8, &dyn Fn(&Point) -> String) + 'a;

/// Columns for the cache's memory on a GPU, and on the host.
fn of_memory(add: &mut Add<'_>, rank: u8) {
    add("cache,\na GPU", rank, &|point| {
        fitting(point, |planned| {
            let part = &planned.bytes;
            let counted = if point.demand.count_tables { part.device() } else { part.data() };
            point.memory.size(counted as f64)
        })
    });
    add("host,\na GPU", WIDE, &|point| {
        fitting(point, |planned| point.memory.size(planned.bytes.host() as f64))
    });
    add("host,\na node", 1, &|point| fitting(point, |planned| point.host_of_node(planned)));
}

/// Columns of simulated plans.
fn of_time(add: &mut Add<'_>) {
    of_memory(add, WIDE);
    add("step\nms", WIDE, &|point| yielding(point, |gain| number(gain.outcome.step_ms)));
    add("exposed", WIDE, &|point| {
        yielding(point, |gain| format!("{:.1}%", 100.0 * exposed_share(&gain.outcome)))
    });
    add("tok/s,\na GPU", 3, &|point| {
        yielding(point, |gain| format!("{:.0}", Deployed::of_gpu(gain.outcome.throughput)))
    });
    add("tok/s,\na node", 0, &|point| {
        yielding(point, |gain| format!("{:.0}", point.deployed.of_node(gain.outcome.throughput)))
    });
    add("OTPS", 0, &|point| yielding(point, |gain| number(gain.outcome.otps)));
    add("gain", 0, &|point| point.gain().map_or("-".to_owned(), signed_percent));
    add("whole,\na GPU", WIDE, &|point| fitting(point, |planned| planned.resident_batch.to_string()));
    add("whole,\ntok/s, a node", WIDE, &|point| {
        let without = point.gain.as_ref().and_then(|gain| gain.without);
        without.map_or("-".to_owned(), |it| format!("{:.0}", point.deployed.of_node(it.throughput)))
    });
    add("pays\nfrom", WIDE, &|point| match point.gain.as_ref().and_then(|gain| gain.pays_from) {
        Some(Some(batch)) => batch.to_string(),
        Some(None) if point.gain.as_ref().is_some_and(|gain| gain.slow != Slow::Nothing) => {
            "too slow".to_owned()
        }
        Some(None) => "never".to_owned(),
        None => String::new(),
    });
}

/// Columns of plans without a setup.
fn of_bytes(add: &mut Add<'_>) {
    let bytes = |get: fn(&Planned) -> u64| {
        move |point: &Point| fitting(point, |it| point.memory.size(get(it) as f64))
    };
    of_memory(add, 3);
    add("index\nkeys", WIDE, &bytes(|it| it.bytes.index_keys));
    add("slots,\nbytes", WIDE, &bytes(|it| it.bytes.slots));
    add("other", WIDE, &bytes(|it| it.bytes.landing + it.bytes.scratch + it.bytes.padding));
    add("page\ntables", WIDE, &bytes(|it| it.bytes.host_page_tables));
    add("tables", WIDE, &bytes(|it| it.bytes.tables));
    add("free", WIDE, &|point| {
        fitting(point, |planned| {
            let part = &planned.bytes;
            let counted = if point.demand.count_tables { part.device() } else { part.data() };
            point.memory.size(planned.available.saturating_sub(counted) as f64)
        })
    });
    add("whole,\na GPU", 2, &|point| fitting(point, |planned| planned.resident_batch.to_string()));
    add("most,\na GPU", 2, &|point| fitting(point, |planned| planned.most_batch.to_string()));
}

/// Sequences of a GPU; for a plan that does not fit, the batch that was too large.
fn batch(point: &Point) -> String {
    match &point.planned {
        Ok(planned) => planned.batch.to_string(),
        Err(error) => error.number("batch").map_or("-".to_owned(), |batch| batch.to_string()),
    }
}

/// A plan's cell; empty if it does not fit.
fn fitting(point: &Point, cell: impl Fn(&Planned) -> String) -> String {
    point.planned.as_ref().map_or(String::new(), cell)
}

/// A simulated plan's cell.
fn yielding(point: &Point, cell: impl Fn(&Gain) -> String) -> String {
    match (&point.planned, &point.gain) {
        (Ok(_), Some(gain)) => cell(gain),
        (Ok(_), None) => "-".to_owned(),
        (Err(_), _) => String::new(),
    }
}

fn marks(point: &Point, mixed: bool) -> String {
    let Ok(planned) = &point.planned else { return String::new() };
    let mut marks: String = planned.notes.iter().map(|note| format!("[{}]", letter(*note))).collect();
    if mixed && point.on.as_ref().is_some_and(|on| on.by_roofline) {
        marks += &format!("[{ROOFLINE}]");
    }
    marks
}
