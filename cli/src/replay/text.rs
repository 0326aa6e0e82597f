//! The result of a replay as text: a heading, one line for each size and policy, misses by layer, definitions.
//!
//! Plain text without colours. Lines and bars are drawn with Unicode if the locale has it, otherwise with ASCII;
//! [`crate::present::terminal`] decides the width.

use std::path::Path;

use forebay::trace::Header;

use super::result::{Replay, Replayed, RowSize, bytes, miss_ratio};
use crate::policy::Policy;
use crate::present::numbers::{counted, fixed, number, ratio, size};
use crate::present::output::harmless;
use crate::present::terminal::{BAR, Look, Spare, align_right, bar};
use crate::study::pools::Setting;
use crate::study::prefetch::Prefetched;

/// The least length of the longest bar: a shorter one shows nothing.
const SHORT_BAR: usize = 6;

/// The whole report.
pub fn report(traces: &[Replayed], row: &RowSize, look: Look) -> String {
    let mut out = String::new();
    for trace in traces {
        let setting = trace.replays.first().map(|r| r.setting);
        out += &setting.map(|setting| heading(&trace.path, &trace.header, setting, row)).unwrap_or_default();
        out += "\n\n";
        out += &sizes(trace, row, look);
        out += "\n\nMisses per step, by layer\n";
        out += &layers(trace, look);
        out += "\n\n";
    }
    if traces.iter().flat_map(|trace| &trace.replays).any(|r| r.divided.is_some()) {
        out += "By layer: the same total of slots, divided by what each layer gains by its lru\n\
             miss-ratio curve. A layer has at least the slots that one of its steps may\n\
             need; if the total is too small for that, the split stays uniform.\n";
    }
    if traces.iter().flat_map(|trace| &trace.replays).any(|r| r.prefetched.is_some()) {
        out += "Prefetched: rows that a layer lacks and the layer before it selected in the\n\
             same step, fetched into a separate buffer. Covered: misses among them. Extra:\n\
             the others. Misses are counted as without prefetching.\n";
        for trace in traces.iter().filter(|trace| apart(&trace.header.layer_ids)) {
            let path = harmless(&trace.path.display().to_string());
            out += &format!(
                "The layers of {path} are not adjacent in the model: adjacent layers may agree more.\n"
            );
        }
    }
    out + "Hit: a selected row that was resident when its step began. Miss: one fetched\n\
         from host memory. Rows written in a step are neither. A step's query rows are\n\
         united first. Miss ratio: misses / (hits + misses). To the device: misses x row\n\
         bytes. To the host: rows written x row bytes. Means are over all decode steps.\n\
         Prompt share: slots over the tokens at decode start.\n"
}

/// Whether the model has other layers between these.
fn apart(ids: &[u32]) -> bool {
    ids.array_windows().any(|[a, b]| a.checked_add(1) != Some(*b))
}

/// The size of the trace, and the replayed part of it.
pub fn extent(header: &Header, setting: &Setting) -> String {
    let warm_up = match setting.warmup {
        0 => "no warm-up".to_owned(),
        w => format!("warm-up with the last {}", counted(w, "prompt position")),
    };
    format!(
        "{}, k {}, context {}; {} of {} from position {}; {warm_up}",
        counted(header.layers, "layer"),
        header.k,
        header.context,
        counted(setting.steps, "decode step"),
        counted(setting.mtp, "query row"),
        header.decode_start,
    )
}

/// The replayed traces.
pub fn heading(path: &Path, header: &Header, setting: Setting, row: &RowSize) -> String {
    let or_unnamed = |text: &str| if text.is_empty() { "unnamed".to_owned() } else { harmless(text) };
    let unfinished = header.unfinished.map_or(String::new(), |bytes| {
        let bytes = counted(bytes, "byte");
        format!("The recording was not finished: {bytes} after its last whole group were left out.\n")
    });
    format!(
        "{}: {}\n{unfinished}\
         Selections of {} on {}\n\
         {}\n\
         Bytes moved assume rows of {} ({} bytes); the misses are those of the recorded model.",
        harmless(&path.display().to_string()),
        or_unnamed(&header.label),
        or_unnamed(&header.model),
        or_unnamed(&header.text),
        extent(header, &setting),
        row.model,
        row.bytes,
    )
}

/// What identifies a replay in addition to its size: its policy and split, or the split alone if all have the same
/// policy.
fn name(replay: &Replay, all: &[Replay]) -> String {
    let divided = replay.divided.is_some();
    if !is_split(all) || all.iter().any(|r| r.policy != replay.policy) {
        return format!("{}{}", replay.policy.name(), if divided { ", by layer" } else { "" });
    }
    if divided { "by layer" } else { "uniform" }.to_owned()
}

fn is_split(all: &[Replay]) -> bool {
    all.iter().any(|r| r.divided.is_some())
}

/// `least..most` of the slots by layer, or the uniform slots.
fn slots(replay: &Replay) -> String {
    let divided = replay.divided.as_ref().map(|divided| divided.slots.iter());
    match divided.and_then(|slots| slots.clone().min().zip(slots.max())) {
        Some((least, most)) => format!("{least}..{most}"),
        None => replay.setting.slots.to_string(),
    }
}

/// One line for each size, policy and split.
fn sizes(trace: &Replayed, row: &RowSize, look: Look) -> String {
    let mut table = look.table();
    let first = trace.replays.first().map_or(0, |r| r.first.len());
    let warmed = trace.replays.iter().any(|r| r.setting.warmup > 0);
    let split = is_split(&trace.replays);
    let named = split || trace.replays.iter().any(|r| r.policy != Policy::Lru);
    let header = [
        "prompt\nshare".to_owned(),
        "slots".to_owned(),
        "misses/step\nand layer".to_owned(),
        "least..most\nlayer".to_owned(),
        "miss\nratio".to_owned(),
        "to device\nper step".to_owned(),
        "to host\nper step".to_owned(),
        format!(
            "first {},\n{}",
            counted(first as u32, "step"),
            if warmed { "cold -> warmed" } else { "cold" }
        ),
    ];
    let kind = if trace.replays.iter().all(|r| r.policy == Policy::Lru) { "split" } else { "policy" };
    let gain = split.then(|| "fewer misses\nthan uniform".to_owned());
    let prefetch = trace.replays.iter().any(|r| r.prefetched.is_some());
    let covered = prefetch.then(|| ["prefetched:\ncovered".to_owned(), "\nextra".to_owned()]);
    let more = gain.into_iter().chain(covered.into_iter().flatten());
    table.set_header(named.then(|| kind.to_owned()).into_iter().chain(header).chain(more));
    for replay in &trace.replays {
        let gain = replay.gain().map(|gain| fixed(100.0 * gain, 1) + "%");
        let gain = split.then(|| gain.unwrap_or_default());
        let cells = cells(replay, row, trace.header.decode_start);
        let mean = |count| number(replay.per_step(count) / replay.layers.len() as f64);
        let prefetched = replay.prefetched.as_deref().map(Prefetched::total);
        let covered = prefetched.map(|all| [mean(all.covered), mean(all.extra)]);
        let more = gain.into_iter().chain(covered.into_iter().flatten());
        table.add_row(named.then(|| name(replay, &trace.replays)).into_iter().chain(cells).chain(more));
    }
    align_right(&mut table, |i| i > 0 || !named);
    let columns = &["to host", "first", "least..most", "to device"];
    look.fit(table, &Spare { columns, keys: 2 + usize::from(named), text: None })
}

/// A line of the table of sizes.
fn cells(replay: &Replay, row: &RowSize, decode_start: u32) -> [String; 8] {
    let total = replay.total();
    let by_layer = replay.layers.iter().map(|c| c.misses);
    let least = replay.per_step(by_layer.clone().min().unwrap_or(0));
    let most = replay.per_step(by_layer.max().unwrap_or(0));
    let (to_device, to_host) = bytes(replay, row);
    let cold = number(replay.first_mean(&replay.cold));
    [
        share(replay, decode_start),
        slots(replay),
        number(replay.per_step(total.misses) / replay.layers.len() as f64),
        format!("{}..{}", number(least), number(most)),
        format!("{:.1}%", 100.0 * miss_ratio(total)),
        size(replay.per_step(to_device)),
        size(replay.per_step(to_host)),
        match replay.setting.warmup {
            0 => cold,
            _ => format!("{cold} -> {}", number(replay.first_mean(&replay.first))),
        },
    ]
}

/// Misses per step: a line for each layer, a number for each size and policy, and a bar if all have one policy and
/// split; with the slots next to them if they were divided.
fn layers(trace: &Replayed, look: Look) -> String {
    let mut table = look.table();
    let alike = !is_split(&trace.replays) && trace.replays.iter().all(|r| r.policy == Policy::Lru);
    let bar_length = if alike { bar_length(trace, look) } else { 0 };
    let bars = bar_length > 0;
    let header = trace.replays.iter().flat_map(|replay| {
        let size = counted(replay.setting.slots, "slot");
        match &replay.divided {
            None if bars => vec![size, String::new()],
            None => vec![format!("{}\n{size}", name(replay, &trace.replays))],
            Some(_) => vec![name(replay, &trace.replays), "slots".to_owned()],
        }
    });
    table.set_header(std::iter::once("layer".to_owned()).chain(header));
    let all = trace.replays.iter().flat_map(|r| r.layers.iter().map(|c| r.per_step(c.misses)));
    let longest = all.fold(0.0, f64::max);
    for (i, id) in trace.header.layer_ids.iter().enumerate() {
        let cells = trace.replays.iter().flat_map(|replay| {
            let misses = replay.layers.get(i).map_or(0, |c| c.misses);
            let value = replay.per_step(misses);
            let mut cells = vec![number(value)];
            cells.extend(bars.then(|| bar(value, longest, bar_length, look.utf8)));
            let slots = replay.divided.as_ref().and_then(|divided| divided.slots.get(i));
            cells.extend(slots.map(u32::to_string));
            cells
        });
        table.add_row(std::iter::once(id.to_string()).chain(cells));
    }
    align_right(&mut table, |i| i == 0 || i % 2 == 1 || !bars);
    look.fit(table, &Spare { keys: 1, ..Spare::default() })
}

/// The longest bar's characters, such that a number and a bar of every size fit in one line; none if they cannot.
fn bar_length(trace: &Replayed, look: Look) -> usize {
    let Some(width) = look.width else { return BAR };
    // Each is at most as wide as its heading, or a number of four digits; two spaces separate columns.
    let number = |r: &Replay| counted(r.setting.slots, "slot").len().max(6) + 4;
    let taken = "layer".len() + trace.replays.iter().map(number).sum::<usize>();
    let each = width.saturating_sub(taken) / trace.replays.len().max(1);
    if each < SHORT_BAR { 0 } else { each.min(BAR) }
}

/// Slots as a share of the prompt; empty if they exceed it.
fn share(replay: &Replay, decode_start: u32) -> String {
    if replay.setting.slots > decode_start {
        return "-".to_owned();
    }
    ratio(replay.prompt_share)
}
