//! Cuts a selection trace to fewer layers and steps; `data/README.md` names the cut that ships.
//!
//! `cargo run --release -p forebay-cli --example cut_trace -- IN OUT EVERY STEPS` keeps every
//! `EVERY`-th layer, from the first, and the first `STEPS` steps, warm ones included.

use std::error::Error;
use std::path::Path;

use forebay::trace::SelectionTrace;

/// Compression at zstd's second-highest effort before windows grow: a cut is made once.
const LEVEL: i32 = 19;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [from, to, every, steps] = arguments.as_slice() else {
        return Err("usage: cut_trace IN OUT EVERY STEPS".into());
    };
    let (every, steps) = (every.parse::<usize>()?, steps.parse::<u32>()?);
    let whole = SelectionTrace::read(Path::new(from))?;
    let mut header = whole.header().clone();
    if every == 0 || steps <= header.warm_steps || steps > header.steps {
        return Err("EVERY is at least 1; STEPS is more than the warm steps and at most all".into());
    }
    let layers: Vec<u32> = (0..header.layers).step_by(every).collect();
    let members = (0..steps)
        .flat_map(|step| layers.iter().map(move |layer| (step, *layer)))
        .flat_map(|(step, layer)| whole.selection(step, layer).iter().copied())
        .collect();
    header.label =
        format!("{} (cut: every {every}th layer, first {steps} of {} steps)", header.label, header.steps);
    header.layer_ids = header.layer_ids.iter().copied().step_by(every).collect();
    header.layers = layers.len() as u32;
    header.steps = steps;
    header.context = header.first_position + steps;
    std::fs::write(to, SelectionTrace::new(header, members)?.compress(LEVEL)?)?;
    Ok(())
}
