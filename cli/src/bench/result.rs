//! A figure: a time between two points of a stream, the least time that it could take, and how many outcomes were
//! compared with the rule's.

use forebay::measure::{Ceilings, Facts};

use super::link::Link;
use crate::present::numbers;
use crate::present::output::harmless;

/// A parameter's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Parameter {
    /// A number, whose unit is in its name if it has one.
    Number(f64),
    /// A number of bytes.
    Bytes(u64),
    /// A name.
    Text(String),
}

impl From<u32> for Parameter {
    fn from(value: u32) -> Parameter {
        Parameter::Number(value.into())
    }
}

impl From<f64> for Parameter {
    fn from(value: f64) -> Parameter {
        Parameter::Number(value)
    }
}

impl From<&str> for Parameter {
    fn from(value: &str) -> Parameter {
        Parameter::Text(value.to_owned())
    }
}

impl std::fmt::Display for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Parameter::Number(value) => write!(f, "{value}"),
            Parameter::Bytes(bytes) => f.write_str(&numbers::size(*bytes as f64)),
            Parameter::Text(text) => f.write_str(text),
        }
    }
}

/// A target on a GPU, and whether it was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its text, with number and unit.
    pub text: &'static str,
    /// Whether the figure meets it.
    pub met: bool,
}

/// Median and quartiles, microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub us: f64,
    /// The lower quartile.
    pub low: f64,
    /// The upper quartile.
    pub high: f64,
}

impl Spread {
    /// Of the times of all rounds; zeros if there are none. Quartiles are the nearest measured times.
    pub fn of(mut times: Vec<f64>) -> Spread {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = times.len().saturating_sub(1) as f64;
            times.get((last * share).round() as usize).copied().unwrap_or_default()
        };
        let middle = match times.len() {
            count if count > 0 && count.is_multiple_of(2) => {
                let half = times.get(count / 2 - 1..=count / 2).unwrap_or_default();
                half.iter().sum::<f64>() / 2.0
            }
            _ => at(0.5),
        };
        Spread { us: middle, low: at(0.25), high: at(0.75) }
    }
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The group, as `--only` names it.
    pub group: &'static str,
    /// What is timed, in short.
    pub name: String,
    /// Its parameters.
    pub parameters: Vec<(&'static str, Parameter)>,
    /// Median of the rounds, microseconds.
    pub us: f64,
    /// Lower quartile, microseconds.
    pub us_low: f64,
    /// Upper quartile, microseconds.
    pub us_high: f64,
    /// Payload bytes, if bytes are moved.
    pub bytes: Option<u64>,
    /// The name of its ceiling, and the least time by it, in microseconds.
    pub ceiling: (&'static str, f64),
    /// Other times of the same work, in microseconds: other ceilings, other methods.
    pub beside: Vec<(&'static str, f64)>,
    /// The demand of its rows on a GPU's link.
    pub link: Option<Link>,
    /// The target on a GPU; none if there is none, or if the device is not a GPU.
    pub target: Option<Target>,
    /// Rows, slots and digests that were compared.
    pub checked: u64,
}

impl Figure {
    /// A figure from the times of all rounds.
    pub fn new(
        group: &'static str,
        name: impl Into<String>,
        times: Vec<f64>,
        ceiling: (&'static str, f64),
        checked: u64,
    ) -> Figure {
        let Spread { us, low: us_low, high: us_high } = Spread::of(times);
        Figure {
            group,
            name: name.into(),
            parameters: Vec::new(),
            us,
            us_low,
            us_high,
            bytes: None,
            ceiling,
            beside: Vec::new(),
            link: None,
            target: None,
            checked,
        }
    }

    /// Adds a parameter.
    pub fn with(mut self, name: &'static str, value: impl Into<Parameter>) -> Figure {
        self.parameters.push((name, value.into()));
        self
    }

    /// The number of the parameter `name`.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.parameters.iter().find_map(|(key, value)| match value {
            Parameter::Number(number) if *key == name => Some(*number),
            _ => None,
        })
    }

    /// Payload in bytes a second; none if no bytes move.
    pub fn rate(&self) -> Option<f64> {
        self.bytes.filter(|_| self.us > 0.0).map(|bytes| bytes as f64 / self.us * 1e6)
    }

    /// The share of the ceiling that is reached: the ceiling's time over the figure's.
    pub fn fraction(&self) -> f64 {
        self.share(self.ceiling.1)
    }

    /// The share of another ceiling.
    pub fn share(&self, least_us: f64) -> f64 {
        if self.us > 0.0 { least_us / self.us } else { 0.0 }
    }
}

/// How a GPU was opened, and what ran next to it; none is the device's default.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Options {
    /// The pinned memory of the rows.
    pub pinned: &'static str,
    /// Thread blocks of a gather.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gather_blocks: Option<u32>,
    /// Threads of a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Gathers by bulk copies.
    pub bulk: bool,
    /// Kernels launched before the preceding ones have ended.
    pub programmatic: bool,
    /// Steps next to persistent kernels.
    pub persistent: bool,
    /// Multiprocessors that the persistent kernels leave free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_sms: Option<u32>,
}

/// The measured figures, and the device.
pub struct Measured {
    /// Its name on the command line.
    pub device: String,
    /// The options of a GPU.
    pub options: Option<Options>,
    /// Its facts.
    pub facts: Facts,
    /// Its ceilings.
    pub ceilings: Ceilings,
    /// All figures, group by group.
    pub figures: Vec<Figure>,
    /// Steps timed for each figure, at most.
    pub rounds: u32,
    /// Tiny shapes.
    pub quick: bool,
}

/// A parameter as text; empty if the figure does not have it.
pub fn parameter(figure: &Figure, name: &str) -> String {
    let found = figure.parameters.iter().find(|(key, _)| *key == name);
    found.map(|(_, value)| harmless(&value.to_string())).unwrap_or_default()
}

/// Gigabytes (1e9) a second.
pub fn gb(rate: f64) -> f64 {
    rate / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_the_median_of_its_rounds() {
        let spread = |times: &[f64]| Spread::of(times.to_vec());
        assert_eq!(spread(&[5.0, 1.0, 3.0, 2.0, 4.0]), Spread { us: 3.0, low: 2.0, high: 4.0 });
        assert_eq!(spread(&[4.0, 1.0]).us, 2.5);
        assert_eq!(spread(&[7.0]), Spread { us: 7.0, low: 7.0, high: 7.0 });
        assert_eq!(spread(&[]).us, 0.0);
    }

    #[test]
    fn a_figure_is_a_share_of_its_ceiling() {
        let figure = Figure::new("gather", "a", vec![20.0], ("read", 15.0), 1).with("rows", 64_u32);
        assert_eq!((figure.fraction(), figure.rate(), figure.number("rows")), (0.75, None, Some(64.0)));
        assert_eq!(Figure { bytes: Some(40_000), ..figure }.rate(), Some(2e9));
    }
}
