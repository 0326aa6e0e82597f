//! `forebay simulate --kernels`: the expected value of each GPU figure, before it is measured.

use std::path::Path;

use forebay::device::clock::{Between, KernelCosts, SOURCES};
use forebay::predict::kernels::{Estimate, Figure, range, table};
use forebay::{Error, Kind, Result};
use serde::Serialize;

use crate::present::json::{self, Head};
use crate::present::output::{Results, echo};
use crate::present::terminal::{Look, Spare};

/// A price or a figure as JSON: its least and its greatest value.
#[derive(Serialize)]
struct Range {
    low: f64,
    high: f64,
}

impl From<Between> for Range {
    fn from(Between { low, high }: Between) -> Range {
        Range { low, high }
    }
}

#[derive(Serialize)]
struct Term {
    name: &'static str,
    count: f64,
    us: Range,
}

#[derive(Serialize)]
struct Value {
    value: Range,
    by: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    terms: Vec<Term>,
}

#[derive(Serialize)]
struct Price {
    name: &'static str,
    #[serde(flatten)]
    value: Range,
    source: &'static str,
}

#[derive(Serialize)]
struct Entry {
    #[serde(flatten)]
    head: Head,
    figure: String,
    unit: &'static str,
    before: Value,
    now: Value,
}

#[derive(Serialize)]
struct Prices {
    #[serde(flatten)]
    head: Head,
    measured: bool,
    prices: Vec<Price>,
}

/// One of the entries.
#[derive(Serialize)]
#[serde(untagged)]
enum Line {
    Prices(Prices),
    Figure(Box<Entry>),
}

/// A price on the command line: NAME=VALUE or NAME=LOW..HIGH.
fn assumed(costs: &mut KernelCosts, text: &str) -> Result<()> {
    let wrong = || {
        let error = Error::new(Kind::InvalidConfig, "simulate").at(format!("--assume {}", echo(text)));
        error.hint("pass NAME=VALUE or NAME=LOW..HIGH, such as round_trip_us=1.2..1.8")
    };
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let (low, high) = value.split_once("..").unwrap_or((value, value));
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| wrong());
    let price = Between { low: number(low)?, high: number(high)? };
    costs.set(name, price).map_err(|error| wrong().at(format!("--assume {}", error.place())))
}

fn value(of: &Estimate) -> Value {
    let terms = of.costs.iter().map(|cost| Term { name: cost.name, count: cost.count, us: cost.us.into() });
    Value { value: of.value.into(), by: of.by(), terms: terms.collect() }
}

fn as_json(costs: &KernelCosts, figures: &[Figure]) -> Result<Vec<u8>> {
    let prices = SOURCES
        .iter()
        .filter_map(|(name, source)| Some(Price { name, value: costs.get(name)?.into(), source }));
    let head = Head::new("kernel-prices");
    let prices = Prices { head, measured: false, prices: prices.collect() };
    let entry = |figure: &Figure| {
        let (before, now) = (value(&figure.before), value(&figure.now));
        Line::Figure(Box::new(Entry {
            head: Head::new("kernel"),
            figure: figure.name.clone(),
            unit: figure.unit,
            before,
            now,
        }))
    };
    json::list(&std::iter::once(Line::Prices(prices)).chain(figures.iter().map(entry)).collect::<Vec<_>>())
}

fn text(costs: &KernelCosts, figures: &[Figure], look: Look) -> String {
    let mut prices = look.table();
    prices.set_header(["price", "value", "source"]);
    for (name, source) in SOURCES {
        let price = costs.get(name).map(range).unwrap_or_default();
        prices.add_row([name.to_owned(), price, source.to_owned()]);
    }
    let mut table = look.table();
    table.set_header(["before", "now", "unit", "figure"]);
    let mut terms = String::new();
    for Figure { name, unit, before, now } in figures {
        table.add_row([range(before.value), range(now.value), (*unit).to_owned(), name.clone()]);
        terms += &format!("\n  {name}: {}", now.by());
    }
    let prices = look.fit(prices, &Spare { columns: &[], keys: 1, text: Some("source") });
    let table = look.fit(table, &Spare { columns: &["unit"], keys: 0, text: Some("figure") });
    format!(
        "What forebay's kernels should take of a GPU. Nothing here was measured: sums of prices, from the least to the \
         greatest.\n\n{prices}\n\n{table}\n\nBefore: the kernels as they were first analysed for a GPU. Times of \
         kernels exclude their own launch. The sums of the present kernels:\n{terms}\n"
    )
}

/// `forebay simulate --kernels`.
///
/// # Errors
/// [`Kind::InvalidConfig`] for an invalid price; errors of writing the result.
pub fn command(assume: &[String], json: Option<&Path>, look: Look) -> Result<()> {
    let mut costs = KernelCosts::default();
    assume.iter().try_for_each(|price| assumed(&mut costs, price))?;
    let figures = table(&costs);
    let mut results = Results::default();
    if let Some(path) = json {
        results.write(path, as_json(&costs, &figures)?);
    }
    if !results.take_stdout() {
        results.print(look.wrap(&text(&costs, &figures, look)));
    }
    results.deliver()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page has every line of the table, and every price.
    #[test]
    fn the_pages_predictions_equal_the_commands() {
        let page = include_str!("../../../docs/gpu-notes.md");
        let costs = KernelCosts::default();
        let figures = table(&costs).into_iter().map(|Figure { name, unit, before, now }| {
            format!("| {name} | {unit} | {} | {} | {} |", range(before.value), range(now.value), now.by())
        });
        let prices = SOURCES.iter().map(|(name, source)| {
            format!("| `{name}` | {} | {source} |", costs.get(name).map(range).unwrap_or_default())
        });
        let lines: Vec<String> = prices.chain(figures).collect();
        let missing = lines.iter().filter(|line| !page.lines().any(|on| on == line.as_str())).count();
        assert_eq!(missing, 0, "docs/gpu-notes.md should have:\n{}", lines.join("\n"));
        // The page has no other prices.
        let table = page.lines().skip_while(|line| !line.starts_with("| figure | unit |")).skip(2);
        let count = table.take_while(|line| line.starts_with('|')).count();
        assert_eq!(count, super::table(&costs).len());
    }

    #[test]
    fn a_printed_price_parses_back_and_a_wrong_one_is_refused() {
        let mut costs = KernelCosts::default();
        assumed(&mut costs, "round_trip_us=1.2..1.8").unwrap();
        assumed(&mut costs, "read_gb_s=25").unwrap();
        assert_eq!(costs.round_trip_us, Between { low: 1.2, high: 1.8 });
        assert_eq!(costs.read_gb_s, Between::just(25.0));
        for text in ["read_gb_s", "read_gb_s=", "read_gb_s=2..1", "read_gb_s=x", "other=1"] {
            let error = assumed(&mut costs, text).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidConfig);
            assert!(error.place().starts_with("--assume"), "{error}");
        }
    }
}
