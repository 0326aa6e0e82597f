//! The choice of overlap: which order (none, DA, DBA or ahead) each layer runs in, and when to change it.
//!
//! No order is best everywhere. Split attention costs launches, a merge, and index lists that are padded to a captured
//! width. DBA runs two smaller indexers, one for each half of the batch. With few misses these costs exceed the time
//! that they hide. So a table of orders ([`Table`]) gives the order of each layer. It follows from [`Prices`]: the
//! time by which each order lengthens a layer (its *exposed* time), by the number of misses per batch row. Running the
//! schedule on the virtual clock with measured rates gives the prices; this module only looks them up.
//!
//! A captured graph fixes one table of orders. A [`Chooser`] keeps a few of them for each captured batch. Between
//! steps it says which table of orders the next step uses, from the counters of an earlier step. The misses of single
//! steps vary widely, and a capture costs more than many steps gain. So the chooser changes to another table of orders
//! only if, at the smoothed misses, it saves a sufficient fraction of the exposed time in several consecutive steps
//! ([`Hysteresis`]). If no kept table of orders is near the best possible one, the chooser replaces the least recently
//! used one by the best and raises its version.
//!
//! A choice costs a few multiplications for each layer and table of orders, and allocates nothing. It depends only on
//! the given counters and their order, so all ranks make the same choice. The chooser measures no time: it takes the
//! cost of a layer from the prices only.

use std::fmt::Write;

use crate::device::descriptor::LayerCount;
use crate::error::{Error, Kind, Result};
use crate::overlap::schedule::Overlap;

/// The version of the text form of a table of orders.
const FORMAT: u32 = 1;

/// The first line of the text form of a table of orders, before the version.
const TITLE: &str = "forebay overlap table";

/// A table of orders: the order of each layer, draft layers last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The version, which rises whenever the orders change. A graph captured for an older version does not belong to
    /// this table.
    pub version: u32,
    /// The order of each layer.
    pub by_layer: Vec<Overlap>,
}

/// A line of a table's text that is neither empty nor a comment, with its number from 1.
struct Line<'a> {
    number: usize,
    text: &'a str,
}

/// A fault in a table's text.
fn bad(line: usize, what: impl Into<String>) -> Error {
    Error::new(Kind::BadFormat, "load overlap table").at(what.into()).with("line", line as u64).hint(
        "after its title a table has `version N`, `layers N`, and `LAYER none|da|dba|ahead` for each layer",
    )
}

impl Table {
    /// A table with all layers in one order, version 1.
    pub fn fixed(layers: u32, overlap: Overlap) -> Table {
        Table { version: 1, by_layer: vec![overlap; layers as usize] }
    }

    /// A table with the best order of each layer: the one that exposes it least, at `misses` for each batch row (one
    /// entry for each layer). Version 1.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] if the prices and `misses` have different numbers of layers.
    pub fn best(prices: &Prices, misses: &[f64]) -> Result<Table> {
        prices.check(misses.len())?;
        let best = |(layer, misses): (usize, &f64)| prices.best(layer, *misses).0;
        Ok(Table { version: 1, by_layer: misses.iter().enumerate().map(best).collect() })
    }

    /// The table as plain text: see [`Table::from_text`].
    pub fn to_text(&self) -> String {
        let (version, layers) = (self.version, self.by_layer.len());
        let mut text = format!("{TITLE} {FORMAT}\nversion {version}\nlayers {layers}\n");
        for (layer, overlap) in self.by_layer.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{layer} {}", overlap.name());
        }
        text
    }

    /// Reads a text that [`Table::to_text`] has written. It ignores empty lines and lines that begin with `#`.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] names the line: an unknown word, an invalid number, or a layer that is missing, appears
    /// twice or is not declared. [`Kind::BadVersion`] for a text of another format version.
    pub fn from_text(text: &str) -> Result<Table> {
        let lines = (1..).zip(text.lines()).map(|(number, text)| Line { number, text: text.trim() });
        let mut lines = lines.filter(|line| !line.text.is_empty() && !line.text.starts_with('#'));
        let end = text.lines().count() + 1;
        let mut next =
            |wanted: &str| lines.next().ok_or_else(|| bad(end, format!("the text ends before {wanted}")));

        let format = field(&next("its title")?, TITLE)?;
        if format != FORMAT {
            return Err(Error::new(Kind::BadVersion, "load overlap table")
                .at("format")
                .with("found", format)
                .with("read", FORMAT));
        }
        let version = field(&next("`version`")?, "version")?;
        let line = next("`layers`")?;
        let layers = field(&line, "layers")?;
        if layers == 0 || layers > MOST_LAYERS {
            return Err(bad(line.number, format!("layers: {layers} is not in 1 to {MOST_LAYERS}")));
        }
        let mut by_layer = Vec::with_capacity(layers as usize);
        for layer in 0..layers {
            let Line { number: line, text } = next(&format!("layer {layer}"))?;
            let Some((own, order)) = text.split_once(char::is_whitespace) else {
                return Err(bad(
                    line,
                    format!("layer {layer}: `{}` is not a layer and its order", clip(text)),
                ));
            };
            if number(line, own, "a layer")? != layer {
                return Err(bad(line, format!("layer {} where layer {layer} belongs", clip(own))));
            }
            let order = order.trim();
            let known = Overlap::ALL.into_iter().find(|overlap| overlap.name() == order);
            let unknown = || bad(line, format!("layer {layer}: unknown order `{}`", clip(order)));
            by_layer.push(known.ok_or_else(unknown)?);
        }
        match lines.next() {
            None => Ok(Table { version, by_layer }),
            Some(Line { number, text }) => Err(bad(number, format!("`{}` after the last layer", clip(text)))),
        }
    }
}

/// More layers than any model has. The limit keeps a damaged number from taking memory.
const MOST_LAYERS: u32 = 4096;

/// The beginning of a wrong word, as an error shows it.
fn clip(word: &str) -> &str {
    word.char_indices().nth(40).map_or(word, |(end, _)| &word[..end])
}

fn number(line: usize, word: &str, what: &str) -> Result<u32> {
    // Reject a sign, which the standard parser would accept.
    let digits = word.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = word.parse().ok().filter(|_| digits);
    parsed.ok_or_else(|| bad(line, format!("{what}: `{}` is not a number", clip(word))))
}

/// The number after `name`, in a line that has both.
fn field(line: &Line<'_>, name: &str) -> Result<u32> {
    let value = line.text.strip_prefix(name).filter(|value| value.starts_with(char::is_whitespace));
    let value =
        value.ok_or_else(|| bad(line.number, format!("`{}` where `{name}` belongs", clip(line.text))))?;
    number(line.number, value.trim(), name)
}

/// The time for which each order exposes a layer, by misses for each batch row. The exposed time is the difference, in
/// nanoseconds, to a step without misses in which no order costs anything. For a draft layer it is the sum over all
/// its draft passes in a step. `forebay::predict` (feature `predict`) computes prices by running the schedule on the
/// virtual clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Prices {
    /// Numbers of misses for each batch row, ascending from 0.
    misses: Vec<f64>,
    /// Exposed times for each layer, or once for all layers: by order, then by `misses`. Empty for an order that the
    /// layer cannot run in.
    exposed: Vec<[Vec<f64>; 4]>,
}

/// The largest number of misses for each batch row, more than any step selects. Larger numbers count as this one.
const MOST_MISSES: f64 = 1e9;

/// The smallest distance between two numbers of misses from which a slope is computed.
const LEAST_GAP: f64 = 1e-3;

fn place(overlap: Overlap) -> usize {
    match overlap {
        Overlap::None => 0,
        Overlap::Da => 1,
        Overlap::Dba => 2,
        Overlap::Ahead => 3,
    }
}

impl Prices {
    /// Prices at the given numbers of misses for each batch row, which ascend from 0. `exposed` holds, for each layer
    /// or once for all layers, the nanoseconds of the orders of [`Overlap::ALL`] at each of these numbers. An order
    /// without nanoseconds is never chosen: ahead in a layer that selects for itself, DBA in the others. None has them
    /// in every layer, and ahead only where each layer has a list of its own.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names what is missing, out of order, negative or not finite, and refuses the order ahead
    /// in a list for all layers.
    pub fn new(misses: Vec<f64>, exposed: Vec<[Vec<f64>; 4]>) -> Result<Prices> {
        let refuse = |place: &'static str, index: usize| {
            Err(Error::new(Kind::InvalidConfig, "overlap prices").at(place).with("index", index as u64))
        };
        if misses.first() != Some(&0.0) {
            return refuse("the first count of misses is not 0", 0);
        }
        let ascending = |pair: &[f64]| pair[1] - pair[0] >= LEAST_GAP && pair[1] <= MOST_MISSES;
        if let Some(index) = misses.windows(2).position(|pair| !ascending(pair)) {
            return refuse("counts of misses do not ascend", index + 1);
        }
        if exposed.is_empty() {
            return refuse("no layer", 0);
        }
        if exposed.len() == 1 && !exposed[0][place(Overlap::Ahead)].is_empty() {
            return refuse("the order ahead in prices for all layers, of which the first selects", 0);
        }
        for (layer, orders) in exposed.iter().enumerate() {
            for (overlap, exposed) in Overlap::ALL.iter().zip(orders) {
                let sound = exposed.iter().all(|ns| ns.is_finite() && (0.0..1e18).contains(ns));
                let left_out = exposed.is_empty() && *overlap != Overlap::None;
                if exposed.len() != misses.len() && !left_out || !sound {
                    return Err(Error::new(Kind::InvalidConfig, "overlap prices")
                        .at(format!(
                            "exposed time of {}: one finite time for each count of misses",
                            overlap.name()
                        ))
                        .with("layer", layer as u64)
                        .with("given", exposed.len() as u64)
                        .with("wanted", misses.len() as u64));
                }
            }
        }
        Ok(Prices { misses, exposed })
    }

    fn check(&self, layers: usize) -> Result<()> {
        if self.exposed.len() == 1 || self.exposed.len() == layers {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidConfig, "overlap prices")
            .at("layers")
            .with("given", self.exposed.len() as u64)
            .with("wanted", layers as u64))
    }

    /// The nanoseconds for which `overlap` exposes a layer at `misses` for each batch row. Between two given numbers
    /// of misses the price is linear; beyond the last one it continues the last segment. The result is never negative,
    /// and finite unless the order has no price. An invalid number of misses counts as 0, an unknown layer as the last
    /// layer.
    pub fn exposed(&self, layer: usize, overlap: Overlap, misses: f64) -> f64 {
        let layer = if self.exposed.len() == 1 { 0 } else { layer.min(self.exposed.len() - 1) };
        let times = &self.exposed[layer][place(overlap)];
        let misses = if misses > 0.0 { misses.min(MOST_MISSES) } else { 0.0 };
        let above = self.misses.partition_point(|count| *count <= misses).clamp(1, times.len().max(2) - 1);
        let (Some(from), Some(to)) = (times.get(above - 1), times.get(above)) else {
            return times.first().copied().unwrap_or(f64::INFINITY);
        };
        let (first, last) = (self.misses[above - 1], self.misses[above]);
        (from + (to - from) * ((misses - first) / (last - first))).max(0.0)
    }

    /// The order that exposes a layer least, and its nanoseconds. If orders are equal, it returns the simplest.
    pub fn best(&self, layer: usize, misses: f64) -> (Overlap, f64) {
        let none = (Overlap::None, self.exposed(layer, Overlap::None, misses));
        Overlap::ALL[1..].iter().fold(none, |best, &overlap| {
            let exposed = self.exposed(layer, overlap, misses);
            if exposed < best.1 { (overlap, exposed) } else { best }
        })
    }

    /// The nanoseconds for which a table exposes a step.
    fn of_table(&self, by_layer: &[Overlap], misses: &[f64]) -> f64 {
        let layers = by_layer.iter().zip(misses).enumerate();
        layers.map(|(layer, (overlap, misses))| self.exposed(layer, *overlap, *misses)).sum()
    }
}

/// The most tables for one batch size.
const MOST_TABLES: u32 = 256;

/// The conditions under which a chooser changes to another table of orders. All of them must hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hysteresis {
    /// The weight of a new step's misses in the smoothed misses, above 0 and at most 1.
    pub smoothing: f64,
    /// The fraction of the exposed time that the other table of orders must save, from 0 to 1.
    pub share: f64,
    /// The nanoseconds per step that it must save as well.
    pub least_ns: f64,
    /// The number of consecutive steps in which it must save that much, at least 1.
    pub steps: u32,
}

impl Default for Hysteresis {
    /// A tenth of the exposed time and 50 us, in 32 steps. At 50 ms per step, 32 steps take less than two seconds.
    fn default() -> Self {
        Hysteresis { smoothing: 0.1, share: 0.1, least_ns: 50_000.0, steps: 32 }
    }
}

/// A captured batch size, with its prices and its first tables of orders.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// The number of batch rows for which it is captured.
    pub batch: u32,
    /// The prices of the orders at this size.
    pub prices: Prices,
    /// The tables of orders to capture at the start. The first one is used first.
    pub tables: Vec<Table>,
}

/// The bucket and the table of orders for the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The index of the bucket.
    pub bucket: usize,
    /// The index of the table of orders in the bucket: see [`Chooser::table`].
    pub index: usize,
    /// The version of the table of orders.
    pub version: u32,
    /// Whether this call has changed that table of orders. Then the engine must capture it before using it.
    pub changed: bool,
}

/// The table that a chooser prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Stay,
    /// Another of its tables.
    Table(usize),
    /// The best table, which it does not have.
    New,
}

#[derive(Debug)]
struct BucketState {
    batch: u32,
    prices: Prices,
    /// All places for tables. The first `taken` of them are in use.
    tables: Vec<Table>,
    taken: usize,
    /// For each table, the number of the choice that used it last.
    used: Vec<u64>,
    current: usize,
    wish: Wish,
    /// For how many consecutive steps the preference has been the same.
    steps: u32,
}

/// See the module's head.
#[derive(Debug)]
pub struct Chooser {
    hysteresis: Hysteresis,
    buckets: Vec<BucketState>,
    /// The smoothed misses for each batch row, by layer.
    misses: Vec<f64>,
    choices: u64,
}

impl Chooser {
    /// A chooser with at most `most` tables in each bucket. Buckets ascend by batch size.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the wrong argument: no bucket, buckets that do not ascend, no table or more than
    /// `most`, tables or prices with different numbers of layers, a table with an order that has no price in its layer,
    /// or a hysteresis outside its bounds.
    pub fn new(buckets: Vec<Bucket>, most: u32, hysteresis: Hysteresis) -> Result<Chooser> {
        let refuse = |place: &'static str, value: u64| {
            Err(Error::new(Kind::InvalidConfig, "overlap chooser").at(place).with("value", value))
        };
        let Hysteresis { smoothing, share, least_ns, steps } = hysteresis;
        if !(smoothing > 0.0 && smoothing <= 1.0) {
            return refuse("smoothing, above 0 and at most 1", 0);
        }
        if !(0.0..=1.0).contains(&share) || !(0.0..1e18).contains(&least_ns) || steps == 0 {
            return refuse("share, least_ns or steps of the hysteresis", steps.into());
        }
        let layers = buckets.first().and_then(|bucket| bucket.tables.first()).map_or(0, |t| t.by_layer.len());
        if layers == 0 {
            return refuse("no bucket, no table or no layer", 0);
        }
        if most > MOST_TABLES {
            return refuse("tables captured at most", most.into());
        }
        for (index, bucket) in buckets.iter().enumerate() {
            if bucket.batch == 0 || index > 0 && buckets[index - 1].batch >= bucket.batch {
                return refuse("batches of the buckets do not ascend", bucket.batch.into());
            }
            if bucket.tables.is_empty() || bucket.tables.len() > most as usize {
                return refuse("tables of a bucket", bucket.tables.len() as u64);
            }
            if let Some(other) = bucket.tables.iter().find(|table| table.by_layer.len() != layers) {
                return refuse("layers of a table", other.by_layer.len() as u64);
            }
            bucket.prices.check(layers)?;
            let unpriced = |table: &Table| {
                let mut orders = table.by_layer.iter().enumerate();
                orders.position(|(layer, order)| bucket.prices.exposed(layer, *order, 0.0).is_infinite())
            };
            if let Some(layer) = bucket.tables.iter().find_map(unpriced) {
                return refuse("a table has an order without a price in layer", layer as u64);
            }
        }
        let state = |bucket: Bucket| {
            let Bucket { batch, prices, mut tables } = bucket;
            let taken = tables.len();
            // Capacity for all tables, so that choosing allocates nothing.
            let spare = || Table { version: 0, by_layer: vec![Overlap::None; layers] };
            tables.resize_with(most as usize, spare);
            let used = vec![0; tables.len()];
            BucketState { batch, prices, tables, taken, used, current: 0, wish: Wish::Stay, steps: 0 }
        };
        let buckets = buckets.into_iter().map(state).collect();
        Ok(Chooser { hysteresis, buckets, misses: vec![0.0; layers], choices: 0 })
    }

    /// The table that a choice names.
    pub fn table(&self, bucket: usize, index: usize) -> Option<&Table> {
        self.buckets.get(bucket)?.tables[..self.buckets[bucket].taken].get(index)
    }

    /// The smoothed misses for each batch row, by layer, from which the chooser decides.
    pub fn misses(&self) -> &[f64] {
        &self.misses
    }

    /// Adds the counters of a retired step of `rows` batch rows, and chooses the table for a step of `next` batch rows.
    /// Steps may come late, as long as the counters of each step are passed once.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for counters with another number of layers, a step without rows, and more rows than the
    /// largest bucket has. An error changes nothing.
    pub fn choose(&mut self, counts: &[LayerCount], rows: u32, next: u32) -> Result<Choice> {
        let range = |place: &'static str, value: u64, most: u64| {
            let error = Error::new(Kind::OutOfRange, "choose overlap").at(place);
            Err(error.with("value", value).with("most", most))
        };
        if counts.len() != self.misses.len() {
            return range("layers of the counters", counts.len() as u64, self.misses.len() as u64);
        }
        let largest = self.buckets.last().map_or(0, |bucket| bucket.batch);
        let found = self.buckets.iter().position(|bucket| bucket.batch >= next);
        let Some(bucket) = found.filter(|_| rows > 0) else {
            return range("batch rows", if rows == 0 { 0 } else { next.into() }, largest.into());
        };
        for (known, count) in self.misses.iter_mut().zip(counts) {
            let new = f64::from(count.misses) / f64::from(rows);
            let weight = if self.choices == 0 { 1.0 } else { self.hysteresis.smoothing };
            *known += weight * (new - *known);
        }
        self.choices += 1;
        let state = &mut self.buckets[bucket];
        let changed = state.choose(&self.misses, &self.hysteresis);
        state.used[state.current] = self.choices;
        let version = state.tables[state.current].version;
        Ok(Choice { bucket, index: state.current, version, changed })
    }
}

impl BucketState {
    /// Changes the current table if the conditions hold. Returns whether it replaced a table.
    fn choose(&mut self, misses: &[f64], hysteresis: &Hysteresis) -> bool {
        let wish = self.wish(misses, hysteresis);
        self.steps = if wish == self.wish { self.steps.saturating_add(1) } else { 1 };
        self.wish = wish;
        if wish == Wish::Stay || self.steps < hysteresis.steps {
            return false;
        }
        self.steps = 0;
        match wish {
            Wish::Table(index) => self.current = index,
            _ => self.replace(misses),
        }
        wish == Wish::New
    }

    fn wish(&self, misses: &[f64], hysteresis: &Hysteresis) -> Wish {
        let saves = |from: f64, to: f64| {
            let saved = from - to;
            saved > 0.0 && saved >= hysteresis.share * from && saved >= hysteresis.least_ns
        };
        let cost = |index: usize| self.prices.of_table(&self.tables[index].by_layer, misses);
        let now = cost(self.current);
        let nearest = (0..self.taken).fold((self.current, now), |nearest, index| {
            let cost = cost(index);
            if cost < nearest.1 { (index, cost) } else { nearest }
        });
        let best = misses.iter().enumerate().map(|(layer, misses)| self.prices.best(layer, *misses).1).sum();
        match nearest {
            (_, cost) if saves(cost, best) => Wish::New,
            (index, cost) if saves(now, cost) => Wish::Table(index),
            _ => Wish::Stay,
        }
    }

    /// Makes the best table for `misses` the current one. It takes an empty place, or the place of the least recently
    /// used table.
    fn replace(&mut self, misses: &[f64]) {
        let place = if self.taken < self.tables.len() {
            self.taken += 1;
            self.taken - 1
        } else {
            let others = (0..self.taken).filter(|index| *index != self.current);
            others.min_by_key(|index| self.used[*index]).unwrap_or(self.current)
        };
        let table = &mut self.tables[place];
        for (layer, (overlap, misses)) in table.by_layer.iter_mut().zip(misses).enumerate() {
            *overlap = self.prices.best(layer, *misses).0;
        }
        table.version = table.version.wrapping_add(1);
        self.current = place;
    }
}

#[cfg(all(test, not(loom)))]
#[path = "choice_tests.rs"]
mod tests;
