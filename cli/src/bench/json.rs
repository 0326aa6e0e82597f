//! Figures as JSON. `docs/json.md` describes the entries.

use forebay::Result;
use forebay::measure::Ceilings;
use serde::{Serialize, Serializer};

use super::result::{Figure, Measured, Options, Parameter, gb};
use crate::present::json::{self, Head};

/// Names with values, in order.
struct Named<'a, T>(Vec<(&'a str, T)>);

impl<T: Serialize> Serialize for Named<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl Serialize for Parameter {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Parameter::Text(text) => serializer.serialize_str(text),
            Parameter::Bytes(bytes) => serializer.serialize_u64(*bytes),
            Parameter::Number(whole) if whole.fract() == 0.0 && whole.abs() < 1e15 => {
                serializer.serialize_i64(*whole as i64)
            }
            Parameter::Number(number) => serializer.serialize_f64(*number),
        }
    }
}

#[derive(Serialize)]
struct DeviceEntry<'a> {
    #[serde(flatten)]
    head: Head,
    device: &'a str,
    name: &'a str,
    memory_total: u64,
    memory_free: u64,
    processors: u32,
    copy_engines: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuEntry<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    options: Option<&'a Options>,
    rounds: u32,
    quick: bool,
    ceilings: &'a Ceilings,
}

#[derive(Serialize)]
struct GpuEntry<'a> {
    cuda: String,
    capability: String,
    bus: &'a str,
    /// Hardware queues to the device, as the environment asks the driver.
    connections: String,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    device: &'a str,
    group: &'static str,
    name: &'a str,
    parameters: Named<'a, &'a Parameter>,
    us: f64,
    us_low: f64,
    us_high: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gb_s: Option<f64>,
    ceiling: &'static str,
    ceiling_us: f64,
    fraction: f64,
    beside: Named<'a, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<LinkEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
    checked: u64,
}

/// What a figure's rows demand of the link, with the ceilings of both kinds.
#[derive(Serialize)]
pub struct LinkEntry {
    pub requests_a_row: f64,
    requests_s: f64,
    requests_ceiling_s: f64,
    pub of_requests: f64,
    sector_bytes_a_row: f64,
    sectors_gb_s: f64,
    ceiling_gb_s: f64,
    pub of_sectors: f64,
}

impl LinkEntry {
    pub fn of(figure: &Figure) -> Option<LinkEntry> {
        let link = figure.link?;
        let a_second = |count: f64| count / figure.us.max(1e-3) * 1e6;
        Some(LinkEntry {
            requests_a_row: link.asks.requests,
            requests_s: a_second(link.requests()),
            requests_ceiling_s: link.most_requests(),
            of_requests: figure.share(link.requests_us()),
            sector_bytes_a_row: link.asks.bytes,
            sectors_gb_s: gb(a_second(link.bytes())),
            ceiling_gb_s: gb(link.ceiling),
            of_sectors: figure.share(link.bytes_us()),
        })
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Any<'a> {
    Device(DeviceEntry<'a>),
    Figure(Entry<'a>),
}

fn device_entry(measured: &Measured) -> Any<'_> {
    let Measured { device, options, facts, ceilings, rounds, quick, figures: _ } = measured;
    let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    Any::Device(DeviceEntry {
        head: Head::new("bench-device"),
        device,
        name: &facts.name,
        memory_total: facts.memory_total,
        memory_free: facts.memory_free,
        processors: facts.processors,
        copy_engines: facts.copy_engines,
        gpu: facts.gpu.as_ref().map(|gpu| GpuEntry {
            cuda: dotted(gpu.driver),
            capability: dotted(gpu.capability),
            bus: &gpu.bus,
            connections: std::env::var("CUDA_DEVICE_MAX_CONNECTIONS")
                .unwrap_or_else(|_| "default".to_owned()),
        }),
        options: options.as_ref(),
        rounds: *rounds,
        quick: *quick,
        ceilings,
    })
}

fn figure_entry<'a>(device: &'a str, figure: &'a Figure) -> Any<'a> {
    Any::Figure(Entry {
        head: Head::new("bench"),
        device,
        group: figure.group,
        name: &figure.name,
        parameters: Named(figure.parameters.iter().map(|(name, value)| (*name, value)).collect()),
        us: figure.us,
        us_low: figure.us_low,
        us_high: figure.us_high,
        bytes: figure.bytes,
        gb_s: figure.rate().map(gb),
        ceiling: figure.ceiling.0,
        ceiling_us: figure.ceiling.1,
        fraction: figure.fraction(),
        beside: Named(figure.beside.clone()),
        link: LinkEntry::of(figure),
        target: figure.target.map(|target| target.text),
        met: figure.target.map(|target| target.met),
        checked: figure.checked,
    })
}

/// All entries as text: the device, then each figure.
///
/// # Errors
/// Errors of [`json::list`].
pub fn text(measured: &Measured) -> Result<Vec<u8>> {
    let mut entries = vec![device_entry(measured)];
    entries.extend(measured.figures.iter().map(|figure| figure_entry(&measured.device, figure)));
    json::list(&entries)
}

/// The entry of the device as a line.
///
/// # Errors
/// Errors of [`json::list`].
pub fn device(measured: &Measured) -> Result<Vec<u8>> {
    json::line(&device_entry(measured))
}

/// The entry of a figure as a line.
///
/// # Errors
/// Errors of [`json::list`].
pub fn figure(device: &str, figure: &Figure) -> Result<Vec<u8>> {
    json::line(&figure_entry(device, figure))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_parameters_are_written_as_integers() {
        let named = Named(vec![
            ("rows", Parameter::from(41_000_u32)),
            ("misses", Parameter::from(0.134)),
            ("order", Parameter::from("none")),
        ]);
        let text = serde_json::to_string(&named).unwrap();
        assert_eq!(text, r#"{"rows":41000,"misses":0.134,"order":"none"}"#);
    }
}
