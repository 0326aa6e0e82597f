//! Figures as text and as JSON. `docs/json.md` describes the entries.

use forebay::measure::{Ceilings, Facts};

use super::json::LinkEntry;
use super::pages;
use super::result::{Figure, Measured, gb, parameter};
use crate::present::numbers::{counted, number};
use crate::present::output::harmless;
use crate::present::terminal::{Look, Spare, align_right};

/// The device in one line.
pub fn device_line(device: &str, facts: &Facts) -> String {
    let memory = crate::present::numbers::size(facts.memory_total as f64);
    let name = harmless(&facts.name);
    match &facts.gpu {
        Some(gpu) => format!(
            "{device}: {name}, compute capability {}.{}, CUDA {}.{}, {} multiprocessors, {memory}, bus {}",
            gpu.capability.0,
            gpu.capability.1,
            gpu.driver.0,
            gpu.driver.1,
            facts.processors,
            harmless(&gpu.bus),
        ),
        None => format!("{device}: {name}, {}, {memory}", counted(facts.processors, "thread")),
    }
}

/// Its ceilings in one line.
pub fn ceilings_line(ceilings: &Ceilings) -> String {
    let Ceilings { copy_up, copy_down, read, write, memory, launch_us, .. } = *ceilings;
    let [copy_up, copy_down, read, write, memory] =
        [copy_up, copy_down, read, write, memory].map(|rate| number(gb(rate)));
    format!(
        "copy engine {copy_up} GB/s up, {copy_down} down; processors read {read}, write {write}; \
         memory {memory} read and written; a launch takes {} us",
        number(launch_us)
    )
}

/// The figures by group, and within groups by ceiling, in order.
pub fn groups(figures: &[Figure]) -> Vec<&[Figure]> {
    figures.chunk_by(|a, b| (a.group, a.ceiling.0) == (b.group, b.ceiling.0)).collect()
}

/// Every name once, in order of appearance.
fn once<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut once = Vec::new();
    for name in names {
        if !once.contains(&name) {
            once.push(name);
        }
    }
    once
}

/// The names of a group's parameters.
pub fn parameters(figures: &[Figure]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for (name, _) in figures.iter().flat_map(|figure| &figure.parameters) {
        if !names.contains(name) {
            names.push(*name);
        }
    }
    names
}

/// A share as percent, with two digits if it is small.
pub fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent < 9.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// Heads of the link columns: lines of a row, and the shares of the link's rate for lines and for sectors.
const LINK_HEADS: [&str; 3] = ["lines a row", "of lines", "of sectors"];

fn link_cells(figure: &Figure) -> [String; 3] {
    let cells = LinkEntry::of(figure)
        .map(|link| [number(link.requests_a_row), percent(link.of_requests), percent(link.of_sectors)]);
    cells.unwrap_or_default()
}

/// The pool's size, if all rows of a group have the same; it gets no column then.
fn pool(figures: &[Figure]) -> Option<String> {
    let pool = parameter(figures.first()?, "pool");
    let same = figures.iter().all(|figure| parameter(figure, "pool") == pool);
    (same && !pool.is_empty()).then_some(pool)
}

fn of_group(figures: &[Figure], look: Look) -> String {
    let mut names = parameters(figures);
    names.retain(|name| match *name {
        "pool" => pool(figures).is_none(),
        // As many prompts as sequences, unless the pool is too small.
        "prompts" => figures.iter().any(has_few_prompts),
        _ => true,
    });
    let beside = once(figures.iter().flat_map(|figure| figure.beside.iter().map(|(name, _)| *name)));
    let [has_rate, has_link, has_target, named] = [
        figures.iter().any(|figure| figure.bytes.is_some()),
        figures.iter().any(|figure| figure.link.is_some()),
        figures.iter().any(|figure| figure.target.is_some()),
        figures.iter().any(|figure| figure.name != figure.group),
    ];
    let mut table = look.table();
    let us = if look.utf8 { "µs" } else { "us" };
    let mut header: Vec<String> = Vec::new();
    header.extend(named.then(|| "what".to_owned()));
    header.extend(names.iter().map(|name| name.replace('_', " ")));
    header.extend([us.to_owned(), "quartiles".to_owned()]);
    header.extend(has_rate.then(|| "GB/s".to_owned()));
    header.extend(["of ceiling".to_owned(), "ceiling".to_owned()]);
    header.extend(has_link.then_some(LINK_HEADS).into_iter().flatten().map(str::to_owned));
    header.extend(beside.iter().map(|name| (*name).to_owned()));
    header.extend(has_target.then(|| "target".to_owned()));
    table.set_header(header);
    for figure in figures {
        let mut row: Vec<String> = Vec::new();
        row.extend(named.then(|| figure.name.clone()));
        row.extend(names.iter().map(|name| parameter(figure, name)));
        row.extend([number(figure.us), format!("{} - {}", number(figure.us_low), number(figure.us_high))]);
        row.extend(has_rate.then(|| figure.rate().map(|rate| number(gb(rate))).unwrap_or_default()));
        row.extend([percent(figure.fraction()), number(figure.ceiling.1)]);
        row.extend(has_link.then(|| link_cells(figure)).into_iter().flatten());
        row.extend(beside.iter().map(|name| {
            let found = figure.beside.iter().find(|(key, _)| key == name);
            found.map(|(_, us)| number(*us)).unwrap_or_default()
        }));
        let met = |met| if met { "met" } else { "missed" };
        row.extend(
            has_target
                .then(|| figure.target.map(|t| format!("{}: {}", met(t.met), t.text)).unwrap_or_default()),
        );
        table.add_row(row);
    }
    align_right(&mut table, |column| column >= usize::from(named));
    let keys = usize::from(named) + names.len();
    look.fit(table, &Spare { columns: &["ceiling", "quartiles"], keys, text: Some("target") }) + "\n"
}

/// An explanation if a share is above 100%.
pub fn above(figures: &[Figure]) -> Option<&'static str> {
    // The rounding of a share.
    let above = |figure: &Figure| figure.fraction() >= 1.005;
    figures.iter().any(above).then_some(
        "Above 100%: a ceiling is the rate of one long run over memory, or the time of a launch that does nothing; \
         data in caches, or a difference between two launches, can beat it.",
    )
}

/// The meaning of the shares of lines and sectors, if there are any.
fn asked_of_links(figures: &[Figure]) -> Option<&'static str> {
    figures.iter().any(|figure| figure.link.is_some()).then_some(
        "Of lines, of sectors: the least time of a call by its requests for lines of 128 bytes, and by the sectors of \
         32 bytes that they name, each at the rate of one long run, / the median. The share near 100% shows what \
         limits the link. Both are counted from the rows' shape.",
    )
}

/// Whether sequences share prompts.
fn has_few_prompts(figure: &Figure) -> bool {
    let few = |prompts| figure.number("batch").is_some_and(|batch| prompts < batch);
    figure.number("prompts").is_some_and(few)
}

/// A note if sequences share prompts.
fn few_prompts(figures: &[Figure]) -> Option<&'static str> {
    figures.iter().any(has_few_prompts).then_some(
        "Fewer prompts than sequences: --pool holds no more prompts, so the other sequences are forks, which read the \
         same host memory.",
    )
}

/// The notes below the tables.
fn notes(figures: &[Figure], look: Look) -> String {
    let all = [asked_of_links(figures), few_prompts(figures), above(figures)];
    let all = all.into_iter().flatten().map(str::to_owned).chain(pages::crossings(figures));
    all.map(|note| look.wrap(&note) + "\n").collect()
}

/// The whole report.
pub fn tables(measured: &Measured, look: Look) -> String {
    let Measured { device, facts, ceilings, figures, rounds, quick, options: _ } = measured;
    let mut out = format!("{}\nCeilings: {}\n", device_line(device, facts), ceilings_line(ceilings));
    if *quick {
        out += "Quick: tiny shapes, which show that everything works, and nothing about speed.\n";
    }
    for figures in groups(figures) {
        let Some(first) = figures.first() else { continue };
        let pool = pool(figures).map(|pool| format!("; pool: {pool}")).unwrap_or_default();
        out += &format!("\n{} (ceiling: {}{pool})\n", first.group, first.ceiling.0);
        out += &of_group(figures, look);
    }
    let checked: u64 = figures.iter().map(|figure| figure.checked).sum();
    let steps = match rounds {
        1 => "1 step".to_owned(),
        rounds => format!("at most {rounds} different steps"),
    };
    out += &format!(
        "\nMedian and quartiles of {steps}; times and ceilings in\n\
         microseconds. Of ceiling: its time / the median.\n{}\
         Compared with the rule, and equal: {checked} slots, rows, reports and\n\
         digests.\n",
        notes(figures, look),
    );
    if look.utf8 { out } else { out.replace('µ', "u") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_above_the_ceiling_comes_with_its_reason() {
        let figure = |ceiling| Figure::new("gather", "a", vec![20.0], ("read", ceiling), 1);
        assert!(above(&[figure(15.0), figure(26.2)]).unwrap().contains("caches"));
        assert_eq!(above(&[figure(15.0), figure(20.0)]), None);
    }

    #[test]
    fn shares_have_two_digits() {
        assert_eq!([0.0012, 0.034, 0.0996, 0.5, 1.04].map(percent), ["0.1%", "3.4%", "10%", "50%", "104%"]);
    }
}
