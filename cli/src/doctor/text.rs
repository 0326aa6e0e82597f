//! The findings as text: a table for each device, then what to fix, most severe first.

use std::io::{IsTerminal, stdout};

use super::finding::{Finding, State};
use super::result::Checked;
use crate::present::numbers::counted;
use crate::present::output::harmless;
use crate::present::terminal::{self, Look, Spare};

/// Whether states are coloured: on a terminal or if forced, unless NO_COLOR is set.
pub fn coloured() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let forced = std::env::var_os("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0");
    !set("NO_COLOR") && (forced || stdout().is_terminal())
}

/// The most characters of a line, however wide the report may be.
const PROSE: usize = 120;

/// The terminal code for the colour of a state.
fn colour(state: State) -> &'static str {
    match state {
        State::Ok => "32",
        State::Note => "36",
        State::Warning => "33",
        State::Problem => "31",
    }
}

/// The whole report.
pub fn report(devices: &[Checked], look: Look, colours: bool) -> String {
    let mut out = String::new();
    for device in devices {
        out += &device.device;
        out += "\n";
        for (line, state) in lines(&device.findings, look) {
            out += &painted(&line, state.filter(|_| colours));
            out += "\n";
        }
        out += "\n";
    }
    out + &fixes(devices, look, colours)
}

/// The lines of a device's table, each with the state at its beginning.
fn lines(findings: &[Finding], look: Look) -> Vec<(String, Option<State>)> {
    let mut table = look.table();
    table.set_header(["state", "finding", "found, and what it means"]);
    // The header, and the line below it.
    let mut states = vec![None, None];
    let names = findings.iter().map(|finding| finding.name.chars().count()).max().unwrap_or(0);
    let before = "problem".len() + names.max("finding".len()) + 2 * terminal::GAP;
    let width = look.width.unwrap_or(PROSE).min(PROSE).saturating_sub(before).max(terminal::TEXT);
    for Finding { name, state, value, means, .. } in findings {
        let said = [value, means].into_iter().flat_map(|text| terminal::lines(&harmless(text), width, 0));
        let (mut word, mut name, mut state) = (state.word(), name.as_str(), Some(*state));
        for line in said {
            table.add_row([word, name, line.as_str()]);
            states.push(state.take());
            (word, name) = ("", "");
        }
    }
    let text = look.fit(table, &Spare { keys: 2, ..Spare::default() });
    text.lines().map(str::to_owned).zip(states).collect()
}

/// The line with its first word, the state, in colour.
fn painted(line: &str, state: Option<State>) -> String {
    let word = state.map(|state| (state, state.word()));
    match word.and_then(|(state, word)| Some((state, line.split_once(word)?, word))) {
        Some((state, (before, after), word)) => {
            format!("{before}\u{1b}[{}m{word}\u{1b}[0m{after}", colour(state))
        }
        None => line.to_owned(),
    }
}

/// Characters before a fix.
const FIX: usize = 11;

/// What to fix; one paragraph for each fix, which several devices may share.
fn fixes(devices: &[Checked], look: Look, colours: bool) -> String {
    let mut wanting: Vec<(&Finding, Vec<&str>)> = Vec::new();
    for device in devices {
        for finding in device.findings.iter().filter(|finding| finding.state != State::Ok) {
            let same = |(other, _): &&mut (&Finding, _)| {
                (other.state, &other.name, &other.fix) == (finding.state, &finding.name, &finding.fix)
            };
            match wanting.iter_mut().find(same) {
                Some((_, named)) => named.push(&device.device),
                None => wanting.push((finding, vec![&device.device])),
            }
        }
    }
    if wanting.is_empty() {
        return "Nothing to fix.\n".to_owned();
    }
    // A stable sort: findings of one state keep the order of the tables.
    wanting.sort_by_key(|(finding, _)| std::cmp::Reverse(finding.state));
    let count = |state: State| wanting.iter().filter(|(finding, _)| finding.state == state).count() as u32;
    let of = |state: State| counted(count(state), state.word());
    let mut out =
        format!("What to fix: {}, {}, {}\n", of(State::Problem), of(State::Warning), of(State::Note));
    for (Finding { name, state, fix, .. }, named) in wanting {
        let line = format!("{}: {name}: {}", named.join(", "), harmless(fix));
        let lines = terminal::lines(&line, look.width.unwrap_or(PROSE).min(PROSE), FIX);
        let text = lines.join("\n");
        let line = format!("  {:<8} {}", state.word(), text.trim_start());
        out += &format!("{}\n", painted(&line, colours.then_some(*state)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_meaning_is_broken_between_words_and_states_stay_with_their_findings() {
        let long = "word ".repeat(40);
        let finding = |state, means: &str| Finding::ok("name", "value", means).but_if(true, state, "fix");
        let look = Look { utf8: false, width: Some(60) };
        let lines = lines(&[finding(State::Warning, &long), finding(State::Note, "short")], look);
        let states: Vec<Option<State>> = lines.iter().filter_map(|(_, state)| *state).map(Some).collect();
        assert_eq!(states, [Some(State::Warning), Some(State::Note)]);
        let at = |state| lines.iter().position(|(_, of)| *of == Some(state)).unwrap();
        assert!(
            lines[at(State::Warning)].0.starts_with("warning")
                && lines[at(State::Note)].0.starts_with("note")
        );
        assert_eq!(lines.iter().map(|(line, _)| line.matches("word").count()).sum::<usize>(), 40);
        assert!(lines.iter().all(|(line, _)| line.chars().count() <= 60), "{lines:?}");
    }
}
