//! The findings for people: a table for each device, then what to fix, the most pressing first.

use std::io::{IsTerminal, stdout};

use super::Checked;
use super::finding::{Finding, State};
use crate::output::harmless;
use crate::report::{counted, table};

/// Whether states are coloured: on a terminal, or where that is forced, unless nobody wants colours.
pub fn coloured() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let forced = std::env::var_os("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0");
    !set("NO_COLOR") && (forced || stdout().is_terminal())
}

/// How a terminal is told the colour of a state.
fn colour(state: State) -> &'static str {
    match state {
        State::Ok => "32",
        State::Note => "36",
        State::Warning => "33",
        State::Problem => "31",
    }
}

/// All of it.
pub fn text(devices: &[Checked], utf8: bool, colours: bool) -> String {
    let mut out = String::new();
    for device in devices {
        out += &device.device;
        out += "\n";
        for (line, state) in lines(&device.findings, utf8) {
            out += &painted(&line, state.filter(|_| colours));
            out += "\n";
        }
        out += "\n";
    }
    out + &fixes(devices, colours)
}

/// Characters of what a finding means that stand in one line.
const LINE: usize = 84;

/// A text in lines of whole words; a word that is longer than a line has one of its own.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= LINE => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The lines of a device's table, each with the state that it begins with.
fn lines(findings: &[Finding], utf8: bool) -> Vec<(String, Option<State>)> {
    let mut table = table(utf8);
    table.set_header(["state", "finding", "found", "what it means"]);
    // The header, and the line below it.
    let mut states = vec![None, None];
    for Finding { name, state, value, means, .. } in findings {
        let mut means = wrapped(&harmless(means)).into_iter();
        let first = means.next().unwrap_or_default();
        table.add_row([state.word().to_owned(), name.clone(), harmless(value), first]);
        states.push(Some(*state));
        for more in means {
            table.add_row(["", "", "", more.as_str()]);
            states.push(None);
        }
    }
    table.trim_fmt().lines().map(str::to_owned).zip(states).collect()
}

/// The line with its first word, the state, in its colour.
fn painted(line: &str, state: Option<State>) -> String {
    let word = state.map(|state| (state, state.word()));
    match word.and_then(|(state, word)| Some((state, line.split_once(word)?, word))) {
        Some((state, (before, after), word)) => {
            format!("{before}\u{1b}[{}m{word}\u{1b}[0m{after}", colour(state))
        }
        None => line.to_owned(),
    }
}

/// What to fix; one line for what several devices share.
fn fixes(devices: &[Checked], colours: bool) -> String {
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
    // Stable: of one state in the order of the tables.
    wanting.sort_by_key(|(finding, _)| std::cmp::Reverse(finding.state));
    let count = |state: State| wanting.iter().filter(|(finding, _)| finding.state == state).count() as u32;
    let of = |state: State| counted(count(state), state.word());
    let mut out =
        format!("What to fix: {}, {}, {}\n", of(State::Problem), of(State::Warning), of(State::Note));
    for (Finding { name, state, fix, .. }, named) in wanting {
        let line = format!("{:<8} {}: {name}: {}", state.word(), named.join(", "), harmless(fix));
        out += &format!("  {}\n", painted(&line, colours.then_some(*state)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_meaning_stands_in_lines_of_whole_words_and_states_stay_with_their_findings() {
        let long = "word ".repeat(40);
        let finding = |state, means: &str| Finding::ok("name", "value", means).but_if(true, state, "fix");
        let lines = lines(&[finding(State::Warning, &long), finding(State::Note, "short")], false);
        let states: Vec<Option<State>> = lines.iter().map(|(_, state)| *state).collect();
        let [warning, note] = [Some(State::Warning), Some(State::Note)];
        assert_eq!(states, [None, None, warning, None, None, note]);
        assert_eq!(lines.iter().map(|(line, _)| line.matches("word").count()).sum::<usize>(), 40);
        assert!(lines.iter().all(|(line, _)| line.chars().count() < 120), "{lines:?}");
        assert_eq!(wrapped(&"x".repeat(200)).len(), 1);
        assert!(wrapped("").is_empty());
    }
}
