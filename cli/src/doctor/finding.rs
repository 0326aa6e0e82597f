//! A finding: what was checked, what was found, what it means, and what to do about it.

use forebay::Error;
use serde::Serialize;

/// The severity of a finding; later states are more severe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Worth knowing: something is missing or could not be determined, and forebay works without it.
    Note,
    /// It costs speed or memory.
    Warning,
    /// Something does not work.
    Problem,
}

impl State {
    /// The state's word.
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
    /// What was checked; unique for each device.
    pub name: String,
    /// Its state.
    pub state: State,
    /// What was found.
    pub value: String,
    /// What that means for forebay.
    pub means: String,
    /// What to do; empty only if there is nothing to do.
    pub fix: String,
}

impl Finding {
    /// A finding without a problem.
    pub fn ok(name: impl Into<String>, value: impl Into<String>, means: impl Into<String>) -> Finding {
        let (name, value, means) = (name.into(), value.into(), means.into());
        Finding { name, state: State::Ok, value, means, fix: String::new() }
    }

    /// A file that is missing or makes no sense, and what it would have told; a container may hide it.
    pub fn unknown(name: &str, file: &str) -> Finding {
        let means = format!("/{file} does not report it");
        Finding::ok(name, "unknown", means)
            .but(State::Note, "look from outside the container, if this is one")
    }

    /// An error of the library, with its text and its hint.
    pub fn refused(name: impl Into<String>, state: State, value: &str, error: &Error) -> Finding {
        let text = error.to_string();
        let said = text.strip_suffix(error.advice()).and_then(|text| text.strip_suffix("; "));
        Finding::ok(name, value, said.unwrap_or(&text)).but(state, error.advice())
    }

    /// The finding in another state, with what to do.
    pub fn but(self, state: State, fix: impl Into<String>) -> Finding {
        Finding { state, fix: fix.into(), ..self }
    }

    /// As [`Finding::but`], if the condition holds.
    pub fn but_if(self, so: bool, state: State, fix: impl Into<String>) -> Finding {
        if so { self.but(state, fix) } else { self }
    }
}
