//! The report of `--together`.

use forebay::text::harmless;

use super::result::{Replayed, Run};
use crate::present::numbers::{counted, number, size};
use crate::present::terminal::{Look, Spare, align_right};
use crate::replay::result::{RowSize, miss_ratio};

const NOTES: &str = "\
Fixed: the slots divided by the most sequences alive at a time. The other budgets are shares: they are set anew when \
a sequence arrives, ends or outgrows its own.
Misses: selected rows that were fetched, of all layers and sequences together. Least and most slots: of a sequence in \
one layer. Resizes: in the layer with the most. Moved: rows that changed their slot by a resize x row bytes.
";

/// The report.
pub fn report(replayed: &Replayed, row: &RowSize, look: Look) -> String {
    format!("{}\n{}\n\n{}\n\n{NOTES}", heading(replayed), alive(replayed, look), runs(replayed, row, look))
}

/// The sequences.
fn heading(replayed: &Replayed) -> String {
    let count = counted(replayed.sequences.len() as u32, "sequence");
    let slots = counted(replayed.slots, "slot");
    let rows = counted(replayed.mtp, "query row");
    let arrivals = match (replayed.sequences.len(), replayed.gap) {
        (..=1, _) => String::new(),
        (_, 0) => ", all at once".to_owned(),
        (_, gap) => format!(", one every {}", counted(gap, "step")),
    };
    let mut out = format!("{count} of {slots} a layer together{arrivals}, {rows} a step\n");
    for sequence in &replayed.sequences {
        out += &format!(
            "  {}: {} tokens, steps {} to {}\n",
            harmless(&sequence.path.display().to_string()),
            sequence.header.decode_start,
            sequence.arrives,
            sequence.arrives + sequence.steps,
        );
    }
    out
}

/// Misses of a step by number of living sequences: a line for each number, a column for each kind of budgets.
fn alive(replayed: &Replayed, look: Look) -> String {
    let mut table = look.table();
    let heads = replayed.runs.iter().map(|run| format!("misses/step,\n{}", run.budgets));
    table.set_header(["sequences\nalive".to_owned(), "steps".to_owned()].into_iter().chain(heads));
    let steps = |run: &Run, alive: usize| run.alive.get(alive).map_or(0, |alive| alive.steps);
    for count in 0..=replayed.sequences.len() {
        let Some(steps) = replayed.runs.first().map(|run| steps(run, count)).filter(|steps| *steps > 0)
        else {
            continue;
        };
        let misses = replayed.runs.iter().filter_map(|run| run.alive.get(count));
        let cells = misses.map(|alive| number(alive.misses_per_step()));
        table.add_row([count.to_string(), steps.to_string()].into_iter().chain(cells));
    }
    align_right(&mut table, |_| true);
    look.fit(table, &Spare { keys: 2, ..Spare::default() })
}

/// A line for each kind of budgets.
fn runs(replayed: &Replayed, row: &RowSize, look: Look) -> String {
    let mut table = look.table();
    table.set_header(["budgets", "misses", "miss\nratio", "least\nslots", "most\nslots", "resizes", "moved"]);
    for run in &replayed.runs {
        let total = run.total();
        let slots = || run.slots.iter().flat_map(|(_, slots)| slots).filter(|slots| **slots > 0);
        table.add_row([
            run.budgets.to_owned(),
            total.misses.to_string(),
            format!("{:.1}%", 100.0 * miss_ratio(total)),
            slots().min().unwrap_or(&0).to_string(),
            slots().max().unwrap_or(&0).to_string(),
            run.resizes.to_string(),
            size(run.moved as f64 * f64::from(row.bytes)),
        ]);
    }
    align_right(&mut table, |i| i > 0);
    look.fit(table, &Spare { keys: 1, ..Spare::default() })
}
