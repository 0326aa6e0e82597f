//! Plans of dense models as JSON: one entry for each plan, as `docs/json.md` describes.

use forebay::Result;
use forebay::predict::dense::Planned;
use forebay::predict::plan::Batch;
use serde::Serialize;
use serde_json::Value;

use super::result::Point;
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    head: Head,
    model: &'a str,
    gpu_bytes: u64,
    context: u32,
    mtp: u32,
    asked_batch: Value,
    page_tokens: u32,
    value_bytes: u32,
    token_bytes: u64,
    dropped_windows: &'a [u32],
    fits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(flatten)]
    planned: Option<Fits>,
}

#[derive(Serialize)]
struct Fits {
    sequences: u32,
    most_sequences: u32,
    one_more: Option<String>,
    available_bytes: u64,
    bytes: u64,
    host_bytes: u64,
    bytes_by_part: Parts,
    groups: Vec<Group>,
    host_tier: Option<Tier>,
}

#[derive(Serialize)]
struct Parts {
    pages: u64,
    tables: u64,
    tensors: u64,
    host_page_tables: u64,
    host_tables: u64,
    host_step_descriptors: u64,
}

#[derive(Serialize)]
struct Group {
    layers: usize,
    window: Option<u32>,
    page_bytes: u64,
    device_pages: u32,
}

#[derive(Serialize)]
struct Tier {
    bytes: u64,
    tokens: u64,
    sequences: u64,
}

fn fits(point: &Point, planned: &Planned) -> Fits {
    let (bytes, shape) = (&planned.bytes, &planned.config.shape);
    let groups = shape.groups.iter().zip(&planned.config.device_pages).enumerate();
    Fits {
        sequences: planned.config.sequences,
        most_sequences: planned.most,
        one_more: point.one_more.as_ref().map(ToString::to_string),
        available_bytes: planned.available,
        bytes: bytes.device(),
        host_bytes: bytes.host(),
        bytes_by_part: Parts {
            pages: bytes.pages,
            tables: bytes.tables,
            tensors: bytes.tensors,
            host_page_tables: bytes.host_page_tables,
            host_tables: bytes.host_tables,
            host_step_descriptors: bytes.step_descriptors,
        },
        groups: groups
            .map(|(index, (group, pages))| Group {
                layers: group.layers.len(),
                window: group.window,
                page_bytes: shape.page_bytes(index),
                device_pages: *pages,
            })
            .collect(),
        host_tier: planned.host.map(|tier| Tier {
            bytes: tier.bytes,
            tokens: tier.tokens,
            sequences: tier.sequences,
        }),
    }
}

/// All entries as text, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(points: &[Point]) -> Result<Vec<u8>> {
    let entries = points.iter().map(|point| {
        let config = &point.demand.config;
        Entry {
            head: Head::new("plan-dense"),
            model: point.model,
            gpu_bytes: point.demand.gpu,
            context: config.max_tokens,
            mtp: config.query_rows,
            asked_batch: match point.demand.batch {
                Batch::Sequences(batch) => batch.into(),
                Batch::Most => "max".into(),
            },
            page_tokens: config.shape.page_tokens,
            value_bytes: point.value_bytes,
            token_bytes: config.shape.token_bytes(),
            dropped_windows: &point.dropped,
            fits: point.planned.is_ok(),
            why: point.planned.as_ref().err().map(ToString::to_string),
            planned: point.planned.as_ref().ok().map(|planned| fits(point, planned)),
        }
    });
    json::list(&entries.collect::<Vec<_>>())
}
