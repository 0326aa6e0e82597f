//! The section of a selection trace: its head, and the pictures of misses by size, policy, layer and step.
//!
//! Every sentence is made from the trace's own figures. If a figure does not exist (nothing was missed, one layer,
//! one step), the sentence says that instead, and a picture without data is left out.

use forebay::trace::Header;

use super::figures::{Figures, Size};
use super::view::View;
use super::{similarity_cards, slots, steps};
use crate::policy::Policy;
use crate::present::html::chart::{self, Axis, Bar, HERO, Line, Plot, WIDTH};
use crate::present::html::numbers::{median, percent, ratio, share, short, tile};
use crate::present::html::page::{Card, Section, Table, Tile};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::{Anchor, Svg};
use crate::present::numbers::{counted, number, size};
use crate::replay::result::{Count, FIRST_STEPS, RowSize, miss_ratio};
use crate::replay::text::extent;

/// The largest share of LRU's misses that is drawn, in percent, for policies that miss more than LRU.
const FRAME: f64 = 120.0;

/// Sizes written below them.
const SIZES: [f64; 14] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 2.0, 5.0];

/// The whole section.
pub fn section(view: &View<'_>) -> Section {
    let header = &view.figures.header;
    let title = if header.label.is_empty() { &view.figures.path } else { &header.label };
    let mut cards = vec![by_size(view), by_policy(view), by_layer(view), steps::by_step(view), moved(view)];
    cards.extend(slots::divided(view.figures));
    cards.extend(similarity_cards::within(view.figures));
    cards.extend(similarity_cards::between(view.figures));
    Section {
        title: title.clone(),
        warning: warning(header, view.row),
        facts: facts(view),
        tiles: tiles(view),
        cards,
    }
}

/// Whether a trace's model is the preset's: its name begins with the preset's, up to the end of a number.
/// `deepseek-v3` is not the beginning of `DeepSeek-V3.2`, whose version continues.
fn is_model(model: &str, preset: &str) -> bool {
    let plain = |text: &str| -> Vec<char> {
        text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
    };
    // The name may begin with an organisation.
    let is_word = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    let model = model.split_once('/').filter(|(owner, _)| is_word(owner)).map_or(model, |(_, name)| name);
    let name = ["-bf16", "-int8"].iter().fold(preset, |name, width| name.strip_suffix(width).unwrap_or(name));
    let (model_plain, name) = (plain(model), plain(name));
    if !model_plain.starts_with(&name) {
        return false;
    }
    let letters = model.char_indices().filter(|(_, c)| c.is_ascii_alphanumeric());
    let rest = letters.map(|(i, _)| i).nth(name.len()).map_or("", |next| model.get(next..).unwrap_or(""));
    let joined = model.len() - rest.len();
    let between = model.get(..joined).and_then(|text| text.chars().next_back());
    // Directly after the name, or after a point: `V3x`, `V3.2`.
    let goes_on = rest.starts_with(|c: char| c.is_ascii_digit()) && matches!(between, Some('.' | '_'));
    let runs_on = !rest.is_empty() && between.is_some_and(|c| c.is_ascii_alphanumeric());
    !goes_on && !runs_on
}

/// Names the recorded model, unless it is the one whose row size is used.
fn warning(header: &Header, row: &RowSize) -> Option<String> {
    if is_model(&header.model, &row.model) {
        return None;
    }
    let model = if header.model.is_empty() { "a model that the trace does not name" } else { &header.model };
    Some(format!(
        "Proxy for {}: recorded from {model}. The misses are the recorded model's, not {}'s; only the row size is \
         that model's.",
        row.model, row.model
    ))
}

fn facts(view: &View<'_>) -> Vec<String> {
    let Figures { header, setting, .. } = view.figures;
    let or_unnamed = |text: &str| if text.is_empty() { "unnamed".to_owned() } else { text.to_owned() };
    let mut facts = vec![
        format!("Text: {}.", or_unnamed(&header.text)),
        format!("{}.", extent(header, setting)),
        format!(
            "Shown by layer and step: {} ({} a layer). A row: {} bytes ({}). Link to the device: {}.",
            view.here(),
            counted(setting.slots, "slot"),
            view.row.bytes,
            view.row.model,
            view.rate(),
        ),
    ];
    if !view.figures.policies.iter().any(|(policy, _)| policy.fades()) {
        facts.push(
            "decay and decay-tokens are left out: they scan every slot in every step, which would take too long here."
                .to_owned(),
        );
    }
    if let Some(bytes) = header.unfinished {
        let bytes = counted(bytes, "byte");
        facts.insert(
            0,
            format!("The recording was not finished: {bytes} after its last whole group were left out."),
        );
    }
    if !header.score.is_empty() || !header.mode.is_empty() {
        facts.insert(
            facts.len() - 2,
            format!("Selected by: {}; {}.", or_unnamed(&header.score), or_unnamed(&header.mode)),
        );
    }
    facts
}

fn tiles(view: &View<'_>) -> Vec<Tile> {
    let figures = view.figures;
    let total = figures.layers.iter().fold(Count::default(), |sum, count| Count {
        hits: sum.hits + count.hits,
        misses: sum.misses + count.misses,
    });
    let (lru, optimum) = (view.missed(Policy::Lru), view.missed(Policy::Belady));
    let bytes = view.bytes(lru);
    let first = |steps: &[u64]| {
        let steps = steps.get(..steps.len().min(FIRST_STEPS as usize)).unwrap_or_default();
        steps.iter().sum::<u64>() as f64 / (steps.len() * figures.layers.len()).max(1) as f64
    };
    vec![
        tile(
            number(figures.mean(lru)),
            "rows missed a step and layer",
            format!("{} of those selected, {}", percent(miss_ratio(total)), view.here()),
        ),
        tile(
            number(figures.mean(optimum)),
            "missed by the optimum",
            format!("{} of LRU's", percent(share(optimum as f64, lru as f64))),
        ),
        tile(
            size(bytes),
            "to the device a step",
            format!("all layers; {} at {}", view.time(bytes), view.rate()),
        ),
        tile(
            match figures.setting.warmup {
                0 => number(first(&figures.cold)),
                _ => format!("{} → {}", number(first(&figures.cold)), number(first(&figures.warm))),
            },
            "missed at the start",
            format!(
                "first {}, {}",
                counted(FIRST_STEPS.min(figures.setting.steps), "step"),
                if figures.setting.warmup == 0 { "cold" } else { "cold → warmed" }
            ),
        ),
    ]
}

/// A policy's name and colour.
fn style(policy: Policy) -> (&'static str, &'static str) {
    match policy {
        Policy::Belady => ("optimum", "optimum"),
        Policy::DecayTokens => (policy.name(), "tokens"),
        Policy::S3Fifo => (policy.name(), "s3"),
        other => (other.name(), other.name()),
    }
}

fn policy_or_working_set(view: &View<'_>) -> String {
    let (lru, optimum) = (view.missed(Policy::Lru), view.missed(Policy::Belady));
    let mean = |misses| number(view.figures.mean(misses));
    if lru == 0 {
        return format!("At {} nothing is missed: the pool holds the whole working set.", view.here());
    }
    let of = share(optimum as f64, lru as f64);
    let reached = match view.figures.reached {
        _ if optimum >= lru => "No other policy can miss less.".to_owned(),
        Some(Size { slots, prompt_share, .. }) => format!(
            "LRU needs prompt share {}{} ({}) to miss as little.",
            ratio(prompt_share),
            // Below that size the curves are not exact.
            if slots > view.figures.exact_from { "" } else { " at most" },
            counted(slots, "slot"),
        ),
        None => "LRU misses more at every size.".to_owned(),
    };
    format!(
        "At {}, LRU misses {} rows a step and layer, the optimum {}: {} of the misses are due to the working set, {} \
         to the policy. {reached}",
        view.here(),
        mean(lru),
        mean(optimum),
        percent(of),
        percent(1.0 - of),
    )
}

/// Misses by size of LRU and the optimum, and of every policy as a share of LRU's.
fn by_size(view: &View<'_>) -> Card {
    let figures = view.figures;
    let sentence = policy_or_working_set(view);
    let compared = figures.policies.first().map_or(&[][..], |(_, sizes)| sizes);
    let mut pictures = Vec::new();
    if let (Some(least), Some(most)) = (compared.first(), compared.last()) {
        let plot = Plot::new(HERO, 124.0);
        let (least, most) = (least.prompt_share, most.prompt_share);
        let x = Scale::exact(Spread::Factors, least, most, &SIZES, plot.left, plot.right);
        pictures.extend(misses_by_size(figures, &plot, &x, &sentence));
        pictures.extend(shares_by_size(figures, &plot, &x));
    }
    let name = "Misses by size of the pool".to_owned();
    Card { name, sentence, pictures, table: sizes_table(figures), wide: true }
}

/// Labels the axis of pool sizes below a plot, with a dashed line at the one shown.
fn size_frame(svg: &mut Svg, plot: &Plot, x: &Scale, y: &Axis<'_>, shown: f64) {
    plot.frame(svg, &Axis { scale: x, name: "slots / prompt (log)", write: short }, y);
    svg.line("rule", (x.place(shown), plot.top), (x.place(shown), plot.bottom));
}

/// LRU and the optimum; none if neither misses anything.
fn misses_by_size(figures: &Figures, plot: &Plot, x: &Scale, sentence: &str) -> Option<String> {
    let points = |sizes: &[Size]| -> Vec<(f64, f64)> {
        let inside = sizes.iter().filter(|s| x.holds(s.prompt_share) && s.misses > 0);
        inside.map(|s| (s.prompt_share, figures.mean(s.misses))).collect()
    };
    let optimum = figures.policies.iter().find(|(policy, _)| *policy == Policy::Belady);
    let optimum = optimum.map_or(&[][..], |(_, sizes)| sizes);
    let lines = [
        Line { name: "lru".to_owned(), class: "lru", points: points(&figures.lru) },
        Line { name: "optimum".to_owned(), class: "optimum", points: points(optimum) },
    ];
    let values = || lines.iter().flat_map(|line| line.points.iter().map(|(_, y)| *y));
    values().next()?;
    let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max));
    let y = Scale::factors(low, high, plot.bottom, plot.top);
    let mut svg = Svg::new(WIDTH, HERO, "Misses by size of the pool", sentence);
    let axis = Axis { scale: &y, name: "rows missed a step and layer (log)", write: short };
    size_frame(&mut svg, plot, x, &axis, figures.prompt_share);
    let [lru, best] = &lines;
    let on_paper = |line: &Line| -> Vec<(f64, f64)> {
        line.points.iter().map(|(a, b)| (x.place(*a), y.place(*b))).collect()
    };
    chart::area(&mut svg, "gap", &on_paper(lru), &on_paper(best));
    chart::lines(&mut svg, plot, x, &y, &lines);
    chart::dots(&mut svg, best.class, x, &y, &best.points);
    Some(svg.finish())
}

/// Each policy's misses as a share of LRU's, if close enough; none if LRU misses nothing.
fn shares_by_size(figures: &Figures, plot: &Plot, x: &Scale) -> Option<String> {
    let of_lru = |size: &Size| {
        let lru = figures.lru.iter().find(|lru| lru.slots == size.slots).map_or(0, |lru| lru.misses);
        (lru > 0).then(|| (size.prompt_share, 100.0 * size.misses as f64 / lru as f64))
    };
    let mut lines: Vec<Line> = figures
        .policies
        .iter()
        .map(|(policy, sizes)| {
            let (name, class) = style(*policy);
            Line { name: name.to_owned(), class, points: sizes.iter().filter_map(of_lru).collect() }
        })
        .collect();
    let flat = lines.first().map(|line| line.points.iter().map(|(x, _)| (*x, 100.0)).collect());
    lines.insert(0, Line { name: "lru".to_owned(), class: "lru", points: flat.unwrap_or_default() });
    let values = || lines.iter().flat_map(|line| line.points.iter().map(|(_, share)| *share));
    values().next()?;
    // A policy far above LRU would squeeze the others together, so its line leaves the frame.
    let most = if values().all(|share| share <= 100.0) { 100.0 } else { FRAME };
    let least = (values().fold(most - 20.0, f64::min) / 20.0).floor() * 20.0;
    let ticks: Vec<f64> = (0..=6).map(|i| f64::from(i) * 20.0).collect();
    let y = Scale::exact(Spread::Even, least, most, &ticks, plot.bottom, plot.top);
    let lines: Vec<Line> = lines.into_iter().flat_map(|line| inside(line, most)).collect();
    let mut svg = Svg::new(WIDTH, HERO, "Misses by size, as shares of LRU's", "One line for each policy");
    let axis = Axis { scale: &y, name: "share of LRU's misses, %", write: short };
    size_frame(&mut svg, plot, x, &axis, figures.prompt_share);
    chart::lines(&mut svg, plot, x, &y, &lines);
    Some(svg.finish())
}

/// The pieces of a line up to `most`. The last piece has the name; a line that ends above is named there, with its
/// value.
fn inside(line: Line, most: f64) -> Vec<Line> {
    let Line { name, class, points } = line;
    let piece = |points| Line { name: String::new(), class, points };
    let (mut pieces, mut open) = (Vec::new(), Vec::new());
    for (i, (x, y)) in points.iter().copied().enumerate() {
        let before = i.checked_sub(1).and_then(|before| points.get(before)).copied();
        if let Some((x0, y0)) = before.filter(|(_, y0)| (*y0 > most) != (y > most)) {
            let share = (most - y0) / (y - y0);
            open.push((x0 * (x / x0).powf(share), most));
        }
        if y <= most {
            open.push((x, y));
        } else if !open.is_empty() {
            pieces.push(piece(std::mem::take(&mut open)));
        }
    }
    match (points.last(), open.is_empty()) {
        (Some((x, y)), true) => {
            let name = format!("{name} ↑ {y:.0}%");
            pieces.push(Line { name, class, points: vec![(*x, most)] });
        }
        _ => pieces.push(Line { name, class, points: open }),
    }
    pieces
}

/// Every policy at every compared size, and LRU up to the whole context.
fn sizes_table(figures: &Figures) -> Table {
    let mut head = vec!["prompt share".to_owned(), "slots".to_owned(), "lru".to_owned()];
    head.extend(figures.policies.iter().map(|(policy, _)| style(*policy).0.to_owned()));
    let compared = figures.policies.first().map_or(&[][..], |(_, sizes)| sizes);
    let rows = figures.lru.iter().filter_map(|at| {
        let place = compared.iter().position(|size| size.slots == at.slots);
        let last = figures.lru.last().is_some_and(|last| last.slots == at.slots);
        if place.is_none() && !last {
            return None;
        }
        let mut row = vec![ratio(at.prompt_share), at.slots.to_string(), number(figures.mean(at.misses))];
        row.extend(figures.policies.iter().map(|(_, sizes)| {
            let there = place.and_then(|place| sizes.get(place));
            there.map_or("–".to_owned(), |size| number(figures.mean(size.misses)))
        }));
        Some(row)
    });
    Table { head, rows: rows.collect() }
}

/// The policies at the size shown.
fn by_policy(view: &View<'_>) -> Card {
    let figures = view.figures;
    let lru = view.missed(Policy::Lru);
    let mut all = vec![(Policy::Lru, lru)];
    all.extend(figures.policies.iter().map(|(policy, _)| (*policy, view.missed(*policy))));
    all.sort_by_key(|(_, misses)| std::cmp::Reverse(*misses));
    let rule = |policy: Policy| !matches!(policy, Policy::Lru | Policy::Belady);
    let best = all.iter().filter(|(policy, _)| rule(*policy)).min_by_key(|(_, misses)| *misses);
    let sentence = match best {
        _ if lru == 0 => {
            let worse = all.iter().filter(|(_, misses)| *misses > 0);
            let worse: Vec<String> = worse
                .map(|(policy, misses)| {
                    format!("{} misses {}", style(*policy).0, number(figures.mean(*misses)))
                })
                .collect();
            match worse.as_slice() {
                [] => "No policy misses anything.".to_owned(),
                worse => format!("LRU misses nothing; {}.", worse.join(", ")),
            }
        }
        Some((policy, misses)) if *misses < lru => {
            let gain = (lru - misses) as f64;
            let open = lru.saturating_sub(view.missed(Policy::Belady)) as f64;
            format!(
                "Of the policies that do not know the future, {} misses least: {} less than LRU, {} of the way to the \
                 optimum. Production runs LRU.",
                policy.name(),
                percent(share(gain, lru as f64)),
                percent(share(gain, open)),
            )
        }
        _ => "No other policy that does not know the future misses less than LRU.".to_owned(),
    };
    let bars: Vec<Bar> = all
        .iter()
        .map(|(policy, misses)| Bar {
            name: style(*policy).0.to_owned(),
            value: figures.mean(*misses),
            mark: None,
            text: match lru {
                0 => number(figures.mean(*misses)),
                lru => format!(
                    "{} · {}",
                    number(figures.mean(*misses)),
                    percent(share(*misses as f64, lru as f64))
                ),
            },
            class: style(*policy).1,
        })
        .collect();
    let name = format!("Policies at {}", view.here());
    let mut svg = Svg::new(WIDTH, chart::bars_height(bars.len()), &name, &sentence);
    chart::bars(&mut svg, &bars, "rows missed a step and layer · share of LRU's");
    let missed = all.iter().any(|(_, misses)| *misses > 0);
    let pictures = if missed { vec![svg.finish()] } else { Vec::new() };
    Card { name, sentence, pictures, table: Table::default(), wide: false }
}

/// Misses by layer at the size shown.
fn by_layer(view: &View<'_>) -> Card {
    let figures = view.figures;
    let steps = f64::from(figures.setting.steps);
    let means: Vec<f64> = figures.layers.iter().map(|count| count.misses as f64 / steps).collect();
    let ids = &figures.header.layer_ids;
    let id = |place: usize| ids.get(place).copied().unwrap_or(0);
    let middle = median(&means);
    let by_value = |a: &(usize, &f64), b: &(usize, &f64)| a.1.total_cmp(b.1);
    let worst = means.iter().enumerate().max_by(by_value).map_or(0, |(place, _)| place);
    let best = means.iter().enumerate().min_by(by_value).map_or(0, |(place, _)| place);
    let (most, least) = (means.get(worst).copied().unwrap_or(0.0), means.get(best).copied().unwrap_or(0.0));
    let sum: f64 = means.iter().sum();
    let sentence = if sum == 0.0 {
        format!("No layer misses anything at {}.", view.here())
    } else if means.len() == 1 {
        format!("The only layer recorded, {}, misses {} rows a step.", id(0), number(most))
    } else if number(most) == number(least) {
        format!("All layers miss the same: {} rows a step.", number(most))
    } else {
        let times = if middle > 0.0 {
            format!(", {:.1} times the median layer", most / middle)
        } else {
            String::new()
        };
        format!(
            "Layer {} misses most, {} rows a step{times}; layer {} least, {}. The worst layer alone has {} of all \
             misses.",
            id(worst),
            number(most),
            id(best),
            number(least),
            percent(most / sum),
        )
    };
    let name = format!("Misses by layer at {}", view.here());
    let plot = Plot::new(240.0, 8.0);
    let y = Scale::from_zero(most, 4, plot.bottom, plot.top);
    let mut svg = Svg::new(WIDTH, 240.0, &name, &sentence);
    let nothing = Scale::exact(Spread::Even, 0.0, 1.0, &[], plot.left, plot.right);
    plot.frame(
        &mut svg,
        &Axis { scale: &nothing, name: "", write: short },
        &Axis { scale: &y, name: "rows missed a step", write: short },
    );
    let hint = |(place, mean): (usize, &f64)| {
        (*mean, format!("layer {}: {} rows missed a step", id(place), number(*mean)))
    };
    let values: Vec<(f64, String)> = means.iter().enumerate().map(hint).collect();
    chart::columns(&mut svg, &plot, &y, &values, Some(worst).filter(|_| number(most) != number(least)));
    chart::names_below(&mut svg, &plot, ids, "layer");
    if means.len() > 2 && most > 0.0 {
        svg.line("rule", (plot.left, y.place(middle)), (plot.right, y.place(middle)));
        svg.text("note", Anchor::End, (plot.right, 12.0), &format!("dashed: median {}", number(middle)));
    }
    let rows = figures.layers.iter().zip(&means).enumerate().map(|(place, (count, mean))| {
        let cells = [count.hits.to_string(), count.misses.to_string(), number(*mean)];
        std::iter::once(id(place).to_string()).chain(cells).chain([percent(miss_ratio(*count))]).collect()
    });
    let head = ["layer", "hits", "misses", "misses a step", "miss ratio"].map(str::to_owned).to_vec();
    Card {
        name,
        sentence,
        pictures: if most > 0.0 { vec![svg.finish()] } else { Vec::new() },
        table: Table { head, rows: rows.collect() },
        wide: false,
    }
}

/// Bytes to the device by size, and the time to transfer them.
fn moved(view: &View<'_>) -> Card {
    let figures = view.figures;
    let optimum = figures.policies.iter().find(|(policy, _)| *policy == Policy::Belady);
    let compared = optimum.map_or(&[][..], |(_, sizes)| sizes);
    let rows: Vec<(Size, u64)> = compared
        .iter()
        .filter_map(|best| {
            let lru = figures.lru.iter().find(|size| size.slots == best.slots)?;
            Some((*lru, best.misses))
        })
        .collect();
    let bars: Vec<Bar> = rows
        .iter()
        .map(|(lru, best)| {
            let bytes = view.bytes(lru.misses);
            let here = lru.slots == figures.setting.slots;
            Bar {
                name: ratio(lru.prompt_share),
                value: bytes,
                mark: Some(view.bytes(*best)),
                text: format!("{} · {}", size(bytes), view.time(bytes)),
                class: if here { "here" } else { "plain" },
            }
        })
        .collect();
    let bytes = view.bytes(view.missed(Policy::Lru));
    let best = view.bytes(view.missed(Policy::Belady));
    let born = f64::from(figures.setting.mtp) * figures.layers.len() as f64 * f64::from(view.row.bytes);
    let layers = figures.layers.len().max(1) as f64;
    let sentence = format!(
        "At {} a step of one sequence copies {} to the device, {} at {}: {} a layer to hide. The optimum would \
         copy {}. Each step stores {} to the host: the new rows.",
        view.here(),
        size(bytes),
        view.time(bytes),
        view.rate(),
        view.time(bytes / layers),
        size(best),
        size(born),
    );
    let name = "Bytes moved a step, and their time".to_owned();
    let mut svg = Svg::new(WIDTH, chart::bars_height(bars.len()), &name, &sentence);
    chart::ranges(&mut svg, &bars, "share · bytes to the device a step (log): optimum to lru");
    let table = rows.iter().map(|(lru, best)| {
        let (bytes, best) = (view.bytes(lru.misses), view.bytes(*best));
        vec![
            ratio(lru.prompt_share),
            format!("{bytes:.0}"),
            view.time(bytes),
            format!("{best:.0}"),
            view.time(best),
        ]
    });
    let head = ["prompt share", "bytes, lru", "time, lru", "bytes, optimum", "time, optimum"]
        .map(str::to_owned)
        .to_vec();
    let missed = rows.iter().any(|(lru, _)| lru.misses > 0);
    Card {
        name,
        sentence,
        pictures: missed.then(|| svg.finish()).into_iter().collect(),
        table: Table { head, rows: table.collect() },
        wide: false,
    }
}
