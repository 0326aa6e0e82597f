//! Plans of dense models as text: a line for each plan, then what each says in a sentence.

use forebay::predict::dense::Planned;

use super::result::Point;
use crate::present::numbers::{counted, grouped, tokens};
use crate::present::terminal::{Look, Spare, align_right};

/// Columns that a narrow table leaves out first.
const SPARED: [&str; 3] = ["tensors", "tables", "host, a GPU"];

/// The heads of the columns.
const HEADS: [&str; 10] =
    ["model", "GPU", "context", "mtp", "sequences", "most", "pages", "tables", "tensors", "host, a GPU"];

/// The whole report.
pub fn report(points: &[Point], look: Look) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut say = |line: String| {
        if !lines.contains(&line) {
            lines.push(line);
        }
    };
    points.iter().for_each(|point| say(shape(point)));
    points.iter().flat_map(dropped).for_each(&mut say);
    lines.push(String::new());
    lines.push(table(points, look));
    lines.push(String::new());
    lines.push(MEANING.to_owned());
    lines.push(String::new());
    lines.extend(points.iter().map(sentence));
    lines.join("\n") + "\n"
}

/// The meaning of the columns.
const MEANING: &str = "Sequences: of the whole context, prompt and promised tokens, each with all its pages on the \
    device. Most: the most that fit. Pages: rows of all layers, with the rows in flight and the null page of each \
    group. Tables: page tables of the batch. Tensors: slots, positions, lengths and starts of a step. Host: pinned \
    page tables and step descriptors, without the second tier.";

/// The model's shape.
fn shape(point: &Point) -> String {
    let shape = &point.demand.config.shape;
    let windows = shape.groups.iter().filter_map(|group| {
        group.window.map(|window| {
            format!("{} of them read a window of {} tokens", group.layers.len(), grouped(window.into()))
        })
    });
    let windows: String = windows.map(|window| format!(", {window}")).collect();
    format!(
        "{}: {} layers{windows}; {} bytes a token, {} a value; pages of {} tokens",
        point.model,
        shape.layers(),
        grouped(shape.token_bytes() as f64),
        point.value_bytes,
        shape.page_tokens,
    )
}

/// Windows that no sequence fills.
fn dropped(point: &Point) -> Vec<String> {
    let context = tokens(point.demand.config.max_tokens);
    let line = |window: &u32| {
        format!(
            "{}: a window of {} tokens is larger than a context of {context}, so its layers keep all tokens",
            point.model,
            grouped((*window).into())
        )
    };
    point.dropped.iter().map(line).collect()
}

fn table(points: &[Point], look: Look) -> String {
    let mut table = look.table();
    table.set_header(HEADS);
    for point in points {
        let config = &point.demand.config;
        let own = [
            point.model.to_owned(),
            point.gpu.to_string(),
            tokens(config.max_tokens),
            config.query_rows.to_string(),
        ];
        let rest = match &point.planned {
            Ok(Planned { config, bytes, most, .. }) => [
                config.sequences.to_string(),
                most.to_string(),
                point.size(bytes.pages),
                point.size(bytes.tables),
                point.size(bytes.tensors),
                point.size(bytes.host()),
            ],
            Err(error) => {
                let most = error.number("most").map_or("-".to_owned(), |most| most.to_string());
                ["does not fit", &most, "-", "-", "-", "-"].map(str::to_owned)
            }
        };
        table.add_row(own.into_iter().chain(rest));
    }
    align_right(&mut table, |column| column > 0);
    look.fit(table, &Spare { columns: &SPARED, keys: 5, text: None })
}

/// What a plan says: how many sequences fit and why no more, and what the second tier holds.
fn sentence(point: &Point) -> String {
    let config = &point.demand.config;
    let name = format!(
        "{} on {}, {} tokens, mtp {}",
        point.model,
        point.gpu,
        tokens(config.max_tokens),
        config.query_rows
    );
    match &point.planned {
        Err(error) => format!("{name}: {error}."),
        Ok(planned) => {
            let sequences = counted(planned.config.sequences, "sequence");
            let (bytes, available) = (point.size(planned.bytes.device()), point.size(planned.available));
            let more = point.one_more.as_ref().map_or_else(String::new, |error| {
                let wanted = error.number("wanted").map_or_else(String::new, |wanted| {
                    format!(
                        ": {} would take {}",
                        counted(planned.most.saturating_add(1), "sequence"),
                        point.size(wanted)
                    )
                });
                format!(" At most {} fit{wanted}.", planned.most)
            });
            let tier = planned.host.map_or_else(String::new, |tier| {
                format!(
                    " The second tier of {} holds {} tokens of prefixes, or {} parked at full length.",
                    point.size(tier.bytes),
                    grouped(tier.tokens as f64),
                    counted(tier.sequences, "sequence")
                )
            });
            format!("{name}: {sequences} in {bytes} of {available}.{more}{tier}")
        }
    }
}
