//! The pictures of misses by step: the start-up cost of a sequence, and all its steps.

use super::view::View;
use crate::present::html::chart::{self, Axis, Line, Plot, WIDTH};
use crate::present::html::numbers::{mean, short};
use crate::present::html::page::{Card, Table};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::Svg;
use crate::present::numbers::{counted, number};
use crate::replay::result::FIRST_STEPS;

/// Steps drawn individually; all steps are drawn in stretches.
const CLOSE: usize = 32;

/// Stretches of the line over all steps, at most.
const STRETCHES: usize = 150;

/// The start-up cost of a sequence, and all its steps.
pub fn by_step(view: &View<'_>) -> Card {
    let figures = view.figures;
    let layers = figures.layers.len().max(1) as f64;
    let per_layer = |misses: &[u64]| -> Vec<f64> { misses.iter().map(|m| *m as f64 / layers).collect() };
    let (warm, cold) = (per_layer(&figures.warm), per_layer(&figures.cold));
    let sentence = start_sentence(&warm, &cold, figures.setting.warmup);
    let mut pictures = Vec::new();
    let missed = warm.iter().chain(&cold).any(|misses| *misses > 0.0);
    if missed && warm.len() > 1 {
        pictures.push(close(&warm, &cold, figures.setting.warmup, &sentence));
    }
    if missed && warm.len() > CLOSE {
        pictures.push(far(&warm, figures.setting.warmup));
    }
    let count = warm.len().min(CLOSE);
    let rows = (0..count).map(|i| {
        let of = |values: &[f64]| values.get(i).map_or(String::new(), |value| number(*value));
        let warmed = (figures.setting.warmup > 0).then(|| of(&warm));
        [(i + 1).to_string(), of(&cold)].into_iter().chain(warmed).collect()
    });
    let head = ["step", "cold"].into_iter().chain((figures.setting.warmup > 0).then_some("warmed"));
    let head = head.map(str::to_owned).collect();
    let name = format!("Misses by step at {}", view.here());
    Card { name, sentence, pictures, table: Table { head, rows: rows.collect() }, wide: false }
}

fn start_sentence(warm: &[f64], cold: &[f64], warmup: u32) -> String {
    let first = (FIRST_STEPS as usize).min(warm.len());
    let start = |values: &[f64]| mean(values.iter().take(first).copied());
    let (all, warmed, cold_start) = (mean(warm.iter().copied()), start(warm), start(cold));
    let steps =
        if first == 1 { "The first step misses".to_owned() } else { format!("The first {first} steps miss") };
    let mut out = match warmup {
        0 => format!(
            "{steps} {} rows a layer from a cold pool, all steps {}.",
            number(cold_start),
            number(all)
        ),
        w => format!(
            "{steps} {} rows a layer from a cold pool, {} after a warm-up with {}; all steps {}.",
            number(cold_start),
            number(warmed),
            counted(w, "prompt position"),
            number(all),
        ),
    };
    let near =
        |(cold, warm): (&[f64], &[f64])| mean(cold.iter().copied()) <= 1.1 * mean(warm.iter().copied());
    let mut windows = cold.windows(first.max(1)).zip(warm.windows(first.max(1)));
    let last = windows.len();
    // The first step from which all later ones are close, too.
    let together = windows.rposition(|both| !near(both)).map(|step| step + 1);
    if let Some(step) = together.filter(|step| warmup > 0 && *step < last) {
        out += &format!(" From step {} on the cold start is within 10% of the warmed one.", step + 1);
    }
    let peak = warm.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    if let Some((step, most)) = peak.filter(|(_, most)| all > 0.0 && **most > 1.5 * all) {
        out += &format!(
            " The worst, step {}, misses {}: {:.1} times the mean.",
            step + 1,
            number(*most),
            most / all
        );
    }
    out
}

/// The first steps, one by one.
fn close(warm: &[f64], cold: &[f64], warmup: u32, sentence: &str) -> String {
    let count = warm.len().min(CLOSE);
    let points = |values: &[f64]| -> Vec<(f64, f64)> {
        values.iter().take(count).enumerate().map(|(i, value)| (i as f64 + 1.0, *value)).collect()
    };
    let mut lines = vec![Line { name: "cold".to_owned(), class: "cold", points: points(cold) }];
    if warmup > 0 {
        lines.insert(0, Line { name: "warmed".to_owned(), class: "warmed", points: points(warm) });
    }
    let most = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    let plot = Plot::new(200.0, 82.0);
    let y = Scale::from_zero(most, 3, plot.bottom, plot.top);
    let ticks = [1.0, 8.0, 16.0, 24.0, 32.0];
    let x = Scale::exact(Spread::Even, 1.0, count as f64, &ticks, plot.left, plot.right);
    let mut svg = Svg::new(WIDTH, 200.0, "Misses of the first steps", sentence);
    plot.frame(
        &mut svg,
        &Axis { scale: &x, name: "decode step, the first ones", write: short },
        &Axis { scale: &y, name: "rows missed a layer", write: short },
    );
    chart::lines(&mut svg, &plot, &x, &y, &lines);
    svg.finish()
}

/// All steps in stretches: the mean of each, and its least and greatest.
fn far(warm: &[f64], warmup: u32) -> String {
    let long = warm.len().div_ceil(STRETCHES);
    let at = |i: usize| (i * long) as f64 + 1.0 + (long - 1) as f64 / 2.0;
    let stretches: Vec<(f64, &[f64])> = warm.chunks(long).enumerate().map(|(i, s)| (at(i), s)).collect();
    let most = warm.iter().copied().fold(0.0, f64::max);
    let plot = Plot::new(200.0, 82.0);
    let y = Scale::from_zero(most, 3, plot.bottom, plot.top);
    let count = warm.len() as f64;
    let round = Scale::from_zero(count, 4, 0.0, 1.0).ticks;
    let x = Scale::exact(Spread::Even, 0.0, count, &round, plot.left, plot.right);
    let mut svg =
        Svg::new(WIDTH, 200.0, "Misses of all steps", "The mean of each stretch, and its least and most");
    let name = match long {
        1 => "decode step, all".to_owned(),
        long => format!("decode step, all; band: least to most of {long}"),
    };
    plot.frame(
        &mut svg,
        &Axis { scale: &x, name: &name, write: short },
        &Axis { scale: &y, name: "rows missed a layer", write: short },
    );
    let edge = |pick: fn(f64, f64) -> f64, from: f64| -> Vec<(f64, f64)> {
        let of = |values: &[f64]| y.place(values.iter().copied().fold(from, pick));
        stretches.iter().map(|(step, values)| (x.place(*step), of(values))).collect()
    };
    if long > 1 {
        chart::area(&mut svg, "band", &edge(f64::max, f64::MIN), &edge(f64::min, f64::MAX));
    }
    let points = stretches.iter().map(|(step, values)| (*step, mean(values.iter().copied()))).collect();
    let (name, class) = if warmup == 0 { ("cold", "cold") } else { ("warmed", "warmed") };
    let name = if long > 1 { "mean" } else { name }.to_owned();
    let line = Line { name, class, points };
    chart::lines(&mut svg, &plot, &x, &y, &[line]);
    svg.finish()
}
