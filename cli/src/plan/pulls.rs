//! What sharding gives on a setup, in words: pulls against layers, what a step waits, and the batch and tokens a second
//! beside those of resident weights and of activations that move.

use forebay::predict::sharded::{Compared, Pulled, Step, Verdict, Way};
use forebay::weights::Source;

use super::result::Point;
use super::shards::Sharded;
use crate::present::numbers::{counted, grouped, number, signed_percent, size};
use crate::present::output::harmless;
use crate::present::terminal::{Look, Spare, align_right};

/// Waits below this are rounding, in microseconds.
const WAIT_LEAST: f64 = 0.5;

/// A sharded plan whose times are known.
fn priced(point: &Point) -> Option<(&Sharded, &Compared)> {
    let sharded = point.weighed.as_ref()?.sharded.as_ref()?;
    Some((sharded, point.compared.as_ref()?.as_ref().ok()?))
}

/// Microseconds, from a thousand on milliseconds.
fn time(us: f64) -> String {
    if us < 1e3 { format!("{} us", number(us)) } else { format!("{} ms", number(us / 1e3)) }
}

/// What a way is called in JSON.
pub const fn way(way: Way) -> &'static str {
    match way {
        Way::Resident => "resident",
        Way::Activations => "activations",
        Way::ByHeads => "by_heads",
    }
}

/// What a verdict is called in JSON.
pub const fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pays => "pays",
        Verdict::OnlyWay => "only way",
        Verdict::ByHeads => "by heads",
        Verdict::Exposed => "exposed",
        Verdict::LittleGain => "little gain",
        Verdict::NoRoom => "no room",
    }
}

/// Whether sharding is worth it.
pub const fn pays(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Pays | Verdict::OnlyWay)
}

fn sequences(count: u32) -> String {
    counted(count, "sequence")
}

/// A pull beside a layer, and what a step waits for it.
fn waits(pulled: &Pulled) -> String {
    let (pull, layer, waits) = (time(pulled.pull_us), time(pulled.step.layer_us), pulled.exposed.us());
    if waits < WAIT_LEAST {
        return format!("a pull of {pull} is hidden beside layers of {layer}");
    }
    format!(
        "a pull takes {pull} and a layer {layer}, so a step of {} waits {}",
        time(pulled.step.step_us),
        time(waits)
    )
}

fn rate(step: &Step) -> String {
    format!("{} tokens/s of a GPU", grouped(step.throughput))
}

/// Attention by heads and its figures.
fn by_heads(step: &Step) -> String {
    format!("attention by heads (--attention tp) yields {} with {} on all", rate(step), sequences(step.batch))
}

/// The way that yields more than sharding, if the sentence does not name it anyway.
fn better(sharded: &Sharded, compared: &Compared) -> Option<String> {
    let (way, step) = compared.better()?;
    match way {
        Way::Resident => None,
        Way::ByHeads => compared.resident.map(|_| by_heads(&step)),
        Way::Activations => Some(format!(
            "o_proj divided over {}, so that activations move, yields {} with {} on each",
            counted(sharded.plan.group().ranks, "rank"),
            rate(&step),
            sequences(step.batch)
        )),
    }
}

/// Whether to shard, and what is better, in one sentence.
pub fn sentence(sharded: &Sharded, compared: &Compared) -> String {
    let names = harmless(&sharded.names.join(", "));
    let better = better(sharded, compared);
    let also = better.as_ref().map_or(String::new(), |better| format!("; {better}"));
    let Some(pulled) = &compared.sharded else {
        return format!("Do not shard {names}: it leaves no room for these sequences either{also}.");
    };
    let (step, waits) = (&pulled.step, waits(pulled));
    let own = format!("{} on each GPU and {}", sequences(step.batch), rate(step));
    let pays = match &better {
        None => format!("Shard {names}: "),
        Some(better) => format!("Sharding {names} pays, but {better}; sharded, "),
    };
    let Some(resident) = &compared.resident else {
        let heads = compared.by_heads.map_or(String::new(), |heads| format!("; {}", by_heads(&heads)));
        let nothing = format!("with whole weights on each GPU nothing fits{heads}");
        return match (compared.verdict, better) {
            (Verdict::ByHeads, _) => {
                format!("Do not shard {names}: {nothing}{also}; sharded, {own}; {waits}.")
            }
            (_, Some(_)) => format!("{pays}{own}; {nothing}; {waits}."),
            (_, None) => format!("{pays}{nothing}; sharded, {own}; {waits}."),
        };
    };
    let gain = compared.gain().map_or(String::new(), |gain| format!(" ({})", signed_percent(gain)));
    let theirs = format!("{} and {}", resident.batch, grouped(resident.throughput));
    if compared.verdict == Verdict::Pays {
        return format!("{pays}{own}, instead of {theirs}{gain}; {waits}.");
    }
    format!("Do not shard {names}: {waits}; {own}, where whole weights have {theirs}{gain}{also}.")
}

/// What a step waits, layer by layer.
fn exposed(pulled: &Pulled) -> String {
    let waiting = || pulled.exposed.layers_us.iter().enumerate().filter(|(_, us)| **us >= WAIT_LEAST);
    let most = waiting().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    let layers = match most {
        None => "no layer waits".to_owned(),
        Some((layer, us)) => format!(
            "{} of {} layers wait, at most {} (layer {layer})",
            waiting().count(),
            pulled.exposed.layers_us.len(),
            time(*us)
        ),
    };
    let end = match pulled.exposed.wrap_us {
        wrap if wrap < WAIT_LEAST => "its end does not".to_owned(),
        wrap => format!("its end waits {} for the next step's first layers", time(wrap)),
    };
    format!("Exposed: {layers}; {end}")
}

/// Lines about the pulls of a plan; none without a setup or shards.
pub fn lines(point: &Point) -> Vec<String> {
    let unknown = point.compared.as_ref().and_then(|compared| compared.as_ref().err());
    if let Some(error) = unknown {
        return vec![format!("The time of pulls is not known: {}", harmless(&error.to_string()))];
    }
    let Some((sharded, compared)) = priced(point) else { return Vec::new() };
    let mut lines = Vec::new();
    if let Some(pulled) = &compared.sharded {
        let from = if sharded.source == Source::Host { "the host" } else { "its neighbours" };
        lines.push(format!(
            "A pull from {from} takes {}, a layer of {} takes {}",
            time(pulled.pull_us),
            sequences(pulled.step.batch),
            time(pulled.step.layer_us)
        ));
        lines.push(exposed(pulled));
    }
    if let Some(moved) = &compared.moved {
        lines.push(format!(
            "Instead, activations can move: o_proj divided over {} saves {} and sends {} a layer; its two \
             collectives take {} of each layer",
            counted(sharded.plan.group().ranks, "rank"),
            point.memory.size(moved.saved as f64),
            size(moved.bytes),
            time(moved.collectives_us)
        ));
    }
    lines
}

/// The ways to keep the weights of one plan: name, step, and what a step waits.
fn ways(compared: &Compared) -> Vec<(&'static str, Option<Step>, Option<f64>)> {
    let pulled = compared.sharded.as_ref();
    let mut ways = vec![
        ("resident", compared.resident, None),
        ("sharded", pulled.map(|pulled| pulled.step), pulled.map(|pulled| pulled.exposed.us())),
        ("activations move", compared.moved.map(|moved| moved.step), None),
    ];
    ways.extend(compared.by_heads.map(|step| ("by heads (tp)", Some(step), None)));
    ways
}

/// A table of the ways, for each plan; none if no plan has one.
pub fn table(points: &[Point], name: impl Fn(&Point) -> String, look: Look) -> Option<String> {
    let mut table = look.table();
    let heads =
        ["weights", "batch,\na GPU", "layer", "exposed,\na step", "step\nms", "tok/s,\na GPU", "gain"];
    let mut all = points.iter().filter_map(|point| Some((point, priced(point)?.1))).peekable();
    all.peek()?;
    table.set_header(heads);
    for (point, compared) in all {
        let setting = name(point);
        for (way, step, waits) in ways(compared) {
            let way = if setting.is_empty() { way.to_owned() } else { format!("{setting}: {way}") };
            let Some(step) = step else {
                table.add_row([way.as_str(), "does not fit", "", "", "", "", ""]);
                continue;
            };
            let gain =
                compared.resident.filter(|resident| *resident != step).map_or("-".to_owned(), |resident| {
                    signed_percent(step.throughput / resident.throughput - 1.0)
                });
            table.add_row([
                way,
                step.batch.to_string(),
                time(step.layer_us),
                waits.filter(|us| *us >= WAIT_LEAST).map_or("-".to_owned(), time),
                number(step.step_us / 1e3),
                grouped(step.throughput),
                gain,
            ]);
        }
    }
    align_right(&mut table, |column| column > 0);
    let spared = ["exposed, a step", "layer", "step ms"];
    Some(look.fit(table, &Spare { columns: &spared, keys: 2, text: None }))
}

/// The sentences of all plans that shard: the setting's name and whether to.
pub fn sentences(points: &[Point]) -> impl Iterator<Item = (&Point, String)> {
    points
        .iter()
        .filter_map(|point| priced(point).map(|(sharded, compared)| (point, sentence(sharded, compared))))
}
