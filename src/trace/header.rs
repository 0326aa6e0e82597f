//! The header of a selection trace: its fields, their checks, and the limits on the size of a trace.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// The most layers of a trace.
pub const LAYERS_MAX: u32 = 1 << 12;

/// The most positions of one set: the format counts them in 16 bits.
pub const K_MAX: u32 = u16::MAX as u32;

/// The longest context in tokens.
pub const CONTEXT_MAX: u32 = 1 << 24;

/// The most positions of a whole trace, all sets together: 1 GiB decoded, 2148 steps of 61 layers at k 2048.
pub const MEMBERS_MAX: u64 = 1 << 28;

/// The name of the format, in the magic and in the header field.
pub(super) const FORMAT: &str = "TOPKTRC1";

/// The longest header in bytes.
pub(super) const HEADER_MAX: u32 = 1 << 20;

/// The description of a trace. The numbers are checked; the texts are only shown. Unknown JSON fields are ignored on
/// reading and not written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The format's name, TOPKTRC1, also after reading a recording, which is written in that format. If absent, the
    /// magic's name is used.
    #[serde(default = "format_name")]
    pub format: String,
    /// A short name of the recording.
    #[serde(default)]
    pub label: String,
    /// The model that was run.
    #[serde(default)]
    pub model: String,
    /// Its architecture.
    #[serde(default)]
    pub arch: String,
    /// Recorded layers, 1 to [`LAYERS_MAX`].
    pub layers: u32,
    /// The model's own numbers of the recorded layers, ascending; 0, 1, 2... if absent.
    #[serde(default)]
    pub layer_ids: Vec<u32>,
    /// Positions that one query selects, 1 to [`K_MAX`]; fewer while the context is shorter.
    pub k: u32,
    /// Recorded positions, warm ones included.
    pub steps: u32,
    /// How many of the first steps belong to the prompt.
    pub warm_steps: u32,
    /// Position of the query of step 0.
    pub first_position: u32,
    /// Position of the first decode step: `first_position + warm_steps`.
    pub decode_start: u32,
    /// Context length in tokens, at least `first_position + steps`, at most [`CONTEXT_MAX`].
    pub context: u32,
    /// The score by which the selector ranked positions.
    #[serde(default)]
    pub score: String,
    /// How the steps were generated: teacher-forced, sampled.
    #[serde(default)]
    pub mode: String,
    /// The text that the model read.
    #[serde(default)]
    pub text: String,
    /// For an unfinished recording: bytes after its last whole group, which were ignored.
    #[serde(skip)]
    pub unfinished: Option<u64>,
}

fn format_name() -> String {
    FORMAT.to_owned()
}

fn bad(place: &'static str) -> Error {
    Error::new(Kind::BadFormat, "read trace").at(place)
}

/// The JSON text of a header.
pub(super) fn object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T> {
    // Otherwise a JSON array of the right length would pass for a header.
    if json.trim_ascii_start().first() != Some(&b'{') {
        return Err(bad("header: not a JSON object"));
    }
    serde_json::from_slice(json)
        .map_err(|e| Error::new(Kind::BadFormat, "read trace").at(format!("header: {}", echo(e))))
}

impl Header {
    /// Reads and checks the JSON text of a header.
    pub(super) fn parse(json: &[u8], members_max: u64) -> Result<Header> {
        let mut header: Header = object(json)?;
        if header.layer_ids.is_empty() && header.layers <= LAYERS_MAX {
            header.layer_ids = (0..header.layers).collect();
        }
        header.check(members_max)?;
        Ok(header)
    }

    /// Checks that the numbers match each other and the limits of this build.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] names the field and its value.
    pub(super) fn check(&self, members_max: u64) -> Result<()> {
        if self.format != FORMAT {
            return Err(bad("header: format is not TOPKTRC1"));
        }
        for (place, value, limit) in [
            ("header: layers", self.layers, LAYERS_MAX),
            ("header: k", self.k, K_MAX),
            ("header: steps", self.steps, CONTEXT_MAX),
            ("header: context", self.context, CONTEXT_MAX),
        ] {
            if value == 0 || value > limit {
                return Err(bad(place).with("value", value).with("least", 1_u32).with("most", limit));
            }
        }
        if self.layer_ids.len() as u64 != u64::from(self.layers) {
            return Err(bad("header: layer_ids and layers disagree")
                .with("ids", self.layer_ids.len() as u64)
                .with("layers", self.layers));
        }
        if let Some([a, b]) = self.layer_ids.array_windows().find(|[a, b]| a >= b) {
            return Err(bad("header: layer_ids do not ascend").with("id", *b).with("after", *a));
        }
        if self.warm_steps > self.steps {
            return Err(bad("header: more warm_steps than steps")
                .with("warm_steps", self.warm_steps)
                .with("steps", self.steps));
        }
        if self.first_position.checked_add(self.warm_steps) != Some(self.decode_start) {
            return Err(bad("header: decode_start is not first_position + warm_steps")
                .with("decode_start", self.decode_start)
                .with("first_position", self.first_position)
                .with("warm_steps", self.warm_steps));
        }
        let end = u64::from(self.first_position) + u64::from(self.steps);
        if end > u64::from(self.context) {
            return Err(bad("header: the steps end beyond the context")
                .with("end", end)
                .with("context", self.context));
        }
        let members = self.members_before(self.steps);
        if members > members_max {
            return Err(bad("header: the trace is too large")
                .with("members", members)
                .with("most", members_max)
                .hint("cut the trace to fewer steps or layers"));
        }
        Ok(())
    }

    /// Decode steps: those after the warm steps.
    pub fn decode_steps(&self) -> u32 {
        self.steps - self.warm_steps.min(self.steps)
    }

    /// Position of the query of `step`.
    pub fn position(&self, step: u32) -> u32 {
        self.first_position.saturating_add(step)
    }

    /// Positions selected at `step` in one layer: min(k, position + 1).
    pub fn set_size(&self, step: u32) -> u32 {
        self.k.min(self.position(step).saturating_add(1))
    }

    /// Positions of all sets together; the decoded trace takes four bytes for each.
    pub fn members(&self) -> u64 {
        self.members_before(self.steps)
    }

    /// Positions selected before `step`, all layers together: the index at which the step's sets begin.
    pub(super) fn members_before(&self, step: u32) -> u64 {
        let first = u64::from(self.first_position) + 1;
        let step = u64::from(step);
        // Sets grow by one position per step until they have k.
        let growing = step.min(u64::from(self.k).saturating_sub(first));
        let in_growth = growing * first + growing * growing.saturating_sub(1) / 2;
        (in_growth + (step - growing) * u64::from(self.k)) * u64::from(self.layers)
    }
}

#[cfg(test)]
impl Header {
    /// A small header for tests; `first` is the first position, `warm` of the `steps` belong to the prompt.
    pub(super) fn example(layers: u32, k: u32, first: u32, warm: u32, steps: u32) -> Header {
        Header {
            format: format_name(),
            label: "test".to_owned(),
            model: "none".to_owned(),
            arch: String::new(),
            layers,
            layer_ids: (0..layers).map(|l| 2 * l + 1).collect(),
            k,
            steps,
            warm_steps: warm,
            first_position: first,
            decode_start: first + warm,
            context: first + steps,
            score: String::new(),
            mode: String::new(),
            text: String::new(),
            unfinished: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_before_is_the_sum_of_the_set_sizes() {
        for (k, first) in [(1, 0), (5, 0), (5, 2), (5, 4), (5, 5), (5, 90), (64, 60)] {
            let h = Header::example(3, k, first, 2, 20);
            let mut sum = 0;
            for step in 0..20 {
                assert_eq!(h.members_before(step), sum, "k {k}, first {first}, step {step}");
                sum += 3 * u64::from(h.set_size(step));
            }
        }
    }

    #[test]
    fn invalid_values_are_refused_by_field() {
        let base = Header::example(2, 8, 100, 4, 10);
        assert!(base.check(MEMBERS_MAX).is_ok());
        type Change = fn(&mut Header);
        let cases: [(&str, Change); 14] = [
            ("layers", |h| h.layers = 0),
            ("layers", |h| h.layers = LAYERS_MAX + 1),
            ("k", |h| h.k = 0),
            ("k", |h| h.k = K_MAX + 1),
            ("steps", |h| h.steps = 0),
            ("context", |h| h.context = CONTEXT_MAX + 1),
            ("layer_ids and layers", |h| h.layer_ids.push(9)),
            ("layer_ids do not ascend", |h| h.layer_ids = vec![3, 3]),
            ("more warm_steps", |h| h.warm_steps = 11),
            ("decode_start", |h| h.decode_start += 1),
            ("decode_start", |h| h.first_position = u32::MAX),
            ("beyond the context", |h| h.context = 109),
            ("too large", |h| {
                (h.layers, h.k) = (LAYERS_MAX, K_MAX);
                h.layer_ids = (0..LAYERS_MAX).collect();
                (h.steps, h.context) = (CONTEXT_MAX / 2, CONTEXT_MAX);
            }),
            ("format", |h| h.format = "TOPKTRC2".to_owned()),
        ];
        for (field, change) in cases {
            let mut h = base.clone();
            change(&mut h);
            let e = h.check(MEMBERS_MAX).unwrap_err();
            assert_eq!(e.kind(), Kind::BadFormat, "{field}");
            assert!(e.place().starts_with("header: ") && e.place().contains(field), "{e}");
        }
    }

    #[test]
    fn unknown_fields_are_ignored_and_missing_ones_named() {
        let json = br#"{"layers":2,"k":4,"steps":3,"warm_steps":1,"first_position":9,"decode_start":10,
            "context":12,"temperature":0.8}"#;
        let h = Header::parse(json, MEMBERS_MAX).unwrap();
        assert_eq!((h.layer_ids.as_slice(), h.decode_steps()), (&[0, 1][..], 2));
        let e = Header::parse(br#"{"layers":2}"#, MEMBERS_MAX).unwrap_err();
        assert!(e.place().contains("missing field `k`"), "{e}");
        let e = Header::parse(&json.replace_once(b"\"k\":4", b"\"k\":-4"), MEMBERS_MAX).unwrap_err();
        assert!(e.place().contains("-4"), "{e}");
    }

    trait ReplaceOnce {
        fn replace_once(&self, from: &[u8], to: &[u8]) -> Vec<u8>;
    }

    impl ReplaceOnce for [u8] {
        fn replace_once(&self, from: &[u8], to: &[u8]) -> Vec<u8> {
            let at = self.windows(from.len()).position(|w| w == from).unwrap();
            [&self[..at], to, &self[at + from.len()..]].concat()
        }
    }
}
