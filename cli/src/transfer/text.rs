//! Results as text: what was found, and the timeline by layer.

use super::args::PromptArguments;
use super::report::{Received, Sent};
use super::result::{LayerTimes, Outcome};
use crate::present::numbers::{counted, fixed, number, size};
use crate::present::output::harmless;
use crate::present::terminal::{Look, Spare, align_right};

/// Characters of the timeline's picture.
const PICTURE: usize = 36;

/// The whole report of a demo.
pub fn report(prompt: &PromptArguments, outcome: &Outcome, look: Look) -> String {
    let head = format!("{}\n\n", title(prompt, outcome));
    let mut out = look.wrap(&head);
    let mut table = look.table();
    table.set_header(["found", "value", "meaning"]);
    for (name, value, meaning) in rows(outcome) {
        table.add_row([name, value.as_str(), meaning]);
    }
    align_right(&mut table, |column| column == 1);
    out += &look.fit(table, &Spare { keys: 2, text: Some("meaning"), ..Spare::default() });
    out += "\n";
    if outcome.layers.iter().any(|layer| layer.computed.is_some()) {
        out += "\n";
        out += &timeline(&outcome.layers, look);
    }
    out
}

/// What was sent, and how it ended.
pub fn title(prompt: &PromptArguments, outcome: &Outcome) -> String {
    let (tokens, layers) = (counted(prompt.tokens, "token"), counted(prompt.layers, "layer"));
    format!("{tokens} in {layers} over {}: {}", prompt.fabric.name(), end(outcome))
}

/// What was found, in a line.
pub fn line(outcome: &Outcome) -> String {
    let bytes = size(outcome.bytes as f64);
    match outcome.figures {
        Some(of) => format!(
            "{bytes}; exposed {} ms of {} ms that the transfer takes alone: {}% hidden; alone {} GB/s",
            fixed(of.exposed_ms, 2),
            fixed(of.alone_ms, 2),
            fixed(100.0 * of.hidden, 1),
            number(of.gb_s)
        ),
        None => format!("{bytes} were stored"),
    }
}

fn end(outcome: &Outcome) -> String {
    match &outcome.failure {
        None => "done, every byte compared".to_owned(),
        Some(failure) => match &failure.detail {
            Some(detail) => format!("failed: {} ({})", harmless(&failure.reason), harmless(detail)),
            None => format!("failed: {}", harmless(&failure.reason)),
        },
    }
}

/// Names, values and meanings.
fn rows(outcome: &Outcome) -> Vec<(&'static str, String, &'static str)> {
    let mut rows = vec![
        ("bytes", size(outcome.bytes as f64), "rows of all layers"),
        ("runs", outcome.runs.to_string(), "pieces with a digest each"),
        ("resent", outcome.resent.to_string(), "runs that were told again"),
        (
            "verified",
            if outcome.verified { "yes" } else { "no" }.to_owned(),
            "every byte, against what was sent",
        ),
    ];
    if let Some(of) = outcome.figures {
        let ms = |time: f64| format!("{} ms", fixed(time, 2));
        rows.extend([
            ("compute", ms(of.compute_ms), "all layers"),
            ("transfer", ms(of.transfer_ms), "from the first notice until all is stored"),
            ("exposed", ms(of.exposed_ms), "after the last layer was computed"),
            ("alone", ms(of.alone_ms), "as many bytes again, with nothing to compute"),
            ("hidden", format!("{}%", fixed(100.0 * of.hidden, 1)), "of the time alone"),
            ("rate", format!("{} GB/s", number(of.gb_s)), "of the transfer alone"),
        ]);
    }
    rows
}

/// The layers' times, each with a line of the picture: `.` computes, `=` waits to be told, `#` is on its way.
fn timeline(layers: &[LayerTimes], look: Look) -> String {
    let last = layers.iter().flat_map(|of| [of.computed, of.told, of.stored]).flatten().fold(0.0, f64::max);
    let place = |time: Option<f64>| {
        let share = time.unwrap_or(0.0) / last.max(f64::MIN_POSITIVE);
        ((share * PICTURE as f64).round() as usize).min(PICTURE)
    };
    let mut table = look.table();
    table.set_header(["layer", "computed ms", "told ms", "stored ms", ". computes, = waits, # crosses"]);
    let shown = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |time| fixed(time, 2));
    for (layer, of) in layers.iter().enumerate() {
        let computed = place(of.computed);
        let told = place(of.told.or(of.computed)).max(computed);
        let stored = place(of.stored.or(of.told)).max(told);
        // What has crossed is seen, however short it took.
        let crossed = (stored - told).max(usize::from(of.stored.is_some()));
        let picture = ".".repeat(computed) + &"=".repeat(told - computed) + &"#".repeat(crossed);
        table.add_row([layer.to_string(), shown(of.computed), shown(of.told), shown(of.stored), picture]);
    }
    align_right(&mut table, |column| column < 4);
    look.fit(table, &Spare { keys: 1, columns: &["told", "computed"], text: None }) + "\n"
}

/// What a sender by itself says.
pub fn sent(sent: &Sent) -> String {
    match &sent.failure {
        None => format!("done: {} told\n", counted(sent.runs, "run")),
        Some(failure) => failed(&failure.reason, failure.detail.as_deref()),
    }
}

/// What a receiver by itself says.
pub fn received(received: &Received) -> String {
    match (&received.failure, received.verified) {
        (Some(failure), _) => failed(&failure.reason, failure.detail.as_deref()),
        (None, true) => format!(
            "done: {} in {}, every byte compared\n",
            size(received.bytes as f64),
            counted(received.runs, "run")
        ),
        (None, false) => {
            "failed: wrong bytes (the rows are not those of this --seed; give both ends the same)\n"
                .to_owned()
        }
    }
}

fn failed(reason: &str, detail: Option<&str>) -> String {
    let detail = detail.map(|detail| format!(" ({})", harmless(detail))).unwrap_or_default();
    format!("failed: {}{detail}\n", harmless(reason))
}
