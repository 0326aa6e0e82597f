//! One thing that was looked at: what was found, what it means, and what to do about it.

use forebay::Error;
use serde::Serialize;

/// How a finding is to be taken; a later one is more pressing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Worth knowing: something is not there, or could not be found out, and forebay does without.
    Note,
    /// It costs speed or room.
    Warning,
    /// Something does not work.
    Problem,
}

impl State {
    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Note => "note",
            State::Warning => "warning",
            State::Problem => "problem",
        }
    }
}

/// A finding. Its texts are one line each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at; once for each device.
    pub name: String,
    /// How to take it.
    pub state: State,
    /// What was found.
    pub value: String,
    /// What that means for forebay.
    pub means: String,
    /// What to do; empty only where nothing is to be done.
    pub fix: String,
}

impl Finding {
    /// As it should be.
    pub fn ok(name: impl Into<String>, value: impl Into<String>, means: impl Into<String>) -> Finding {
        let (name, value, means) = (name.into(), value.into(), means.into());
        Finding { name, state: State::Ok, value, means, fix: String::new() }
    }

    /// What a file would have told that is not there or makes no sense: a container may hide it.
    pub fn unknown(name: &str, file: &str) -> Finding {
        let means = format!("/{file} does not say");
        Finding::ok(name, "unknown", means)
            .but(State::Note, "look from outside the container, if this is one")
    }

    /// What the library refused, in its own words, with its own advice.
    pub fn refused(name: impl Into<String>, state: State, value: &str, error: &Error) -> Finding {
        let text = error.to_string();
        let said = text.strip_suffix(error.advice()).and_then(|text| text.strip_suffix("; "));
        Finding::ok(name, value, said.unwrap_or(&text)).but(state, error.advice())
    }

    /// In another state, with what to do.
    pub fn but(self, state: State, fix: impl Into<String>) -> Finding {
        Finding { state, fix: fix.into(), ..self }
    }

    /// Likewise, if that is so.
    pub fn but_if(self, so: bool, state: State, fix: impl Into<String>) -> Finding {
        if so { self.but(state, fix) } else { self }
    }
}
