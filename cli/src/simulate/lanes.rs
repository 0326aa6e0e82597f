//! A simulated step as lanes, and as a file for Perfetto and Chromium's tracing page.
//!
//! The file has the Trace Event Format in JSON: one complete event (`X`) for each span, in microseconds, and one
//! thread for each stream. Spans of one stream follow each other, so nothing overlaps on a track. Times are truncated
//! to whole nanoseconds before they are subtracted, so that rounding cannot cause an overlap.

use forebay::device::Stream;
use forebay::device::clock::Span;
use forebay::predict::simulate::PULLS;
use forebay::{Error, Kind, Result};
use serde::Serialize;

use crate::present::json;

/// The spans of one stream, in order of time.
pub struct Lane {
    /// The stream's name.
    pub name: String,
    /// Its spans.
    pub spans: Vec<Span>,
}

/// Names that make a stream one of forebay's own, or one of background traffic.
const OWN: [&str; 8] =
    ["resolve", "gather", "scatter", PULLS[0], PULLS[1], PULLS[2], "traffic up", "traffic down"];

/// The spans of each stream; streams in which nothing takes time are omitted.
pub fn lanes(spans: &[Span]) -> Vec<Lane> {
    let mut streams: Vec<Stream> = Vec::new();
    for span in spans.iter().filter(|span| span.end_ns > span.start_ns) {
        if !streams.contains(&span.stream) {
            streams.push(span.stream);
        }
    }
    let micro_batches = spans.iter().filter_map(|span| span.micro_batch).max().map_or(0, |last| last.0);
    let mut lanes: Vec<Lane> = streams
        .into_iter()
        .map(|stream| {
            let mut own: Vec<Span> = spans.iter().filter(|span| span.stream == stream).copied().collect();
            own.sort_by(|a, b| a.start_ns.total_cmp(&b.start_ns));
            Lane { name: name(&own, micro_batches > 0), spans: own }
        })
        .collect();
    let place =
        |lane: &Lane| OWN.iter().position(|own| lane.name.starts_with(own)).map_or(0, |place| place + 1);
    lanes.sort_by_key(place);
    lanes
}

/// The name of a stream: forebay's own work or the engine's, and the micro-batch if there are two.
fn name(spans: &[Span], several: bool) -> String {
    let own = OWN.iter().find(|own| spans.iter().any(|span| span.name == **own));
    let engine = spans.iter().any(|span| !OWN.contains(&span.name));
    let what = match own {
        Some(own) if !engine => own,
        _ => "compute",
    };
    let first = spans.iter().find_map(|span| span.micro_batch);
    let one = spans.iter().all(|span| span.micro_batch.is_none() || span.micro_batch == first);
    match first {
        Some(micro_batch) if several && one => format!("{what}, micro-batch {}", micro_batch.0 + 1),
        _ => what.to_owned(),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    trace_events: Vec<Event<'a>>,
    display_time_unit: &'static str,
}

#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    ph: &'static str,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Arguments<'a>,
}

#[derive(Default, Serialize)]
struct Arguments<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sort_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batch: Option<u32>,
}

/// The process that all lanes belong to.
const PROCESS: u32 = 1;

fn named<'a>(what: &'a str, tid: Option<usize>, args: Arguments<'a>) -> Event<'a> {
    Event { name: what, cat: None, ph: "M", pid: PROCESS, tid, ts: None, dur: None, args }
}

fn complete<'a>(span: &'a Span, lane: &'a Lane, tid: usize) -> Event<'a> {
    let (start, end) = (span.start_ns.round(), span.end_ns.round());
    Event {
        name: span.name,
        cat: Some(&lane.name),
        ph: "X",
        pid: PROCESS,
        tid: Some(tid),
        ts: Some(start / 1e3),
        dur: Some((end - start) / 1e3),
        args: Arguments {
            layer: span.layer.map(|layer| layer.0),
            micro_batch: span.micro_batch.map(|micro_batch| micro_batch.0),
            ..Arguments::default()
        },
    }
}

/// The whole file; `title` names the process.
///
/// # Errors
/// [`Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn perfetto(lanes: &[Lane], title: &str) -> Result<Vec<u8>> {
    let mut events =
        vec![named("process_name", None, Arguments { name: Some(title), ..Arguments::default() })];
    for (lane, tid) in lanes.iter().zip(1..) {
        let args = Arguments { name: Some(&lane.name), ..Arguments::default() };
        events.push(named("thread_name", Some(tid), args));
        let args = Arguments { sort_index: Some(tid), ..Arguments::default() };
        events.push(named("thread_sort_index", Some(tid), args));
        events.extend(lane.spans.iter().map(|span| complete(span, lane, tid)));
    }
    let trace = Trace { trace_events: events, display_time_unit: "ns" };
    let mut text = serde_json::to_vec(&trace)
        .map_err(|e| Error::new(Kind::Internal, "write trace events").at(e.to_string()))?;
    text.push(b'\n');
    Ok(json::escaped(text))
}

#[cfg(test)]
mod tests {
    use forebay::{Layer, MicroBatch};

    use super::*;

    fn span(stream: u64, name: &'static str, micro_batch: u32, start_ns: f64, end_ns: f64) -> Span {
        let (layer, micro_batch) = (Some(Layer(3)), Some(MicroBatch(micro_batch)));
        Span { stream: Stream(stream), name, layer, micro_batch, start_ns, end_ns }
    }

    #[test]
    fn streams_are_lanes_named_after_their_work() {
        let spans = [
            span(7, "gather", 1, 50.0, 90.0),
            span(0, "project", 0, 0.0, 10.0),
            span(0, "index", 1, 10.0, 20.0),
            span(2, "resolve", 0, 20.0, 30.0),
            span(9, "scatter", 0, 4.0, 4.0),
            Span { micro_batch: None, ..span(12, PULLS[1], 0, 30.0, 80.0) },
            Span { micro_batch: None, ..span(11, PULLS[0], 0, 31.0, 90.0) },
        ];
        let lanes = lanes(&spans);
        let names: Vec<&str> = lanes.iter().map(|lane| lane.name.as_str()).collect();
        let pulls = ["pull, buffer 0", "pull, buffer 1"];
        assert_eq!(names[..3], ["compute", "resolve, micro-batch 1", "gather, micro-batch 2"]);
        assert_eq!(names[3..], pulls);
        assert_eq!(lanes[0].spans.len(), 2);
    }

    #[test]
    fn events_of_a_track_may_touch_but_do_not_overlap() {
        // Ends and starts that no decimal fraction represents exactly.
        let third = 100.0 / 3.0;
        let spans: Vec<Span> =
            (0..50).map(|i| span(0, "rest", 0, f64::from(i) * third, f64::from(i + 1) * third)).collect();
        let text = perfetto(&lanes(&spans), "a \"title\"").unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(trace["displayTimeUnit"], "ns");
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!((&events[0]["ph"], &events[0]["args"]["name"]), (&"M".into(), &"a \"title\"".into()));
        let ns =
            |event: &serde_json::Value, field: &str| (event[field].as_f64().unwrap() * 1e3).round() as i64;
        let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(complete.len(), 50);
        for pair in complete.windows(2) {
            assert_eq!(ns(pair[0], "ts") + ns(pair[0], "dur"), ns(pair[1], "ts"));
        }
        assert_eq!((&complete[0]["args"]["layer"], &complete[0]["tid"]), (&3.into(), &1.into()));
    }
}
