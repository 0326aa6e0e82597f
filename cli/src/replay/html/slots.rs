//! The picture of a split by layer: one total of slots, divided by what each layer gains from it.

use super::figures::Figures;
use crate::present::html::chart::{self, Axis, Bar, Plot, WIDTH};
use crate::present::html::numbers::{percent, ratio, share, short};
use crate::present::html::page::{Card, Table};
use crate::present::html::scale::{Scale, Spread};
use crate::present::html::svg::{Anchor, Svg};
use crate::present::numbers::{counted, number};

/// Slots of each layer at the size shown, and what the split saves by size; the reason if the curves are not
/// exact there, and none for a single layer.
pub fn divided(figures: &Figures) -> Option<Card> {
    if figures.setting.slots < figures.exact_from && figures.layers.len() > 1 {
        return Some(too_small(figures));
    }
    let divided = figures.divided.as_ref()?;
    let ids = &figures.header.layer_ids;
    let uniform: u64 = divided.layers.iter().map(|(_, uniform, _)| uniform).sum();
    let misses: u64 = divided.layers.iter().map(|(.., misses)| misses).sum();
    let slots: Vec<f64> = divided.layers.iter().map(|(slots, ..)| f64::from(*slots)).collect();
    let by_value = |a: &(usize, &f64), b: &(usize, &f64)| a.1.total_cmp(b.1);
    let (worst, most) = slots.iter().enumerate().max_by(by_value)?;
    let (best, least) = slots.iter().enumerate().min_by(by_value)?;
    let id = |place: usize| ids.get(place).copied().unwrap_or(0);
    let saved = share(uniform.saturating_sub(misses) as f64, uniform as f64);
    let even = figures.setting.slots.min(figures.tokens());
    let saves = format!(
        "The same total of slots, divided by what each layer gains, misses {} rows a step and layer instead of {}: \
         {} fewer.",
        number(figures.mean(misses)),
        number(figures.mean(uniform)),
        percent(saved),
    );
    let gets = format!(
        "Layer {} gets most, {most} slots, {:.1} times the {even} of a uniform split; layer {} least, {least}.",
        id(worst),
        most / f64::from(even),
        id(best),
    );
    let sentence = match uniform {
        0 => "A uniform split misses nothing, so no other split can be better.".to_owned(),
        _ if most == least => {
            format!("{saves} All layers get {}. Production splits uniformly.", counted(*most as u32, "slot"))
        }
        _ => format!("{saves} {gets} Production splits uniformly."),
    };
    let name = format!("Split by layer at prompt share {}", ratio(figures.prompt_share));
    let plot = Plot::new(220.0, 8.0);
    let y = Scale::from_zero(most.max(f64::from(even)), 4, plot.bottom, plot.top);
    let mut svg = Svg::new(WIDTH, 220.0, &name, &sentence);
    let nothing = Scale::exact(Spread::Even, 0.0, 1.0, &[], plot.left, plot.right);
    plot.frame(
        &mut svg,
        &Axis { scale: &nothing, name: "", write: short },
        &Axis { scale: &y, name: "slots", write: short },
    );
    let values: Vec<(f64, String)> = slots
        .iter()
        .enumerate()
        .map(|(place, slots)| (*slots, format!("layer {}: {}", id(place), counted(*slots as u32, "slot"))))
        .collect();
    chart::columns(&mut svg, &plot, &y, &values, None);
    chart::names_below(&mut svg, &plot, ids, "layer");
    let level = y.place(f64::from(even));
    svg.line("rule", (plot.left, level), (plot.right, level));
    svg.text("note", Anchor::End, (plot.right, 12.0), &format!("dashed: uniform, {even}"));
    let head = ["layer", "slots", "misses, uniform", "misses, split"].map(str::to_owned).to_vec();
    let steps = f64::from(figures.setting.steps);
    let row = |(place, (slots, uniform, misses)): (usize, &(u32, u64, u64))| {
        let a_step = |misses: u64| number(misses as f64 / steps);
        vec![id(place).to_string(), slots.to_string(), a_step(*uniform), a_step(*misses)]
    };
    let rows = divided.layers.iter().enumerate().map(row).collect();
    let pictures =
        if uniform > 0 { vec![svg.finish(), by_size(figures, &divided.sizes)] } else { Vec::new() };
    Some(Card { name, sentence, pictures, table: Table { head, rows }, wide: false })
}

/// The reason why there is no split.
fn too_small(figures: &Figures) -> Card {
    let sentence = format!(
        "Not counted: a step of a layer may need {}, and the curves that divide the slots are not exact below \
         that. The size shown is {}.",
        counted(figures.exact_from, "slot"),
        counted(figures.setting.slots, "slot"),
    );
    let name = format!("Split by layer at prompt share {}", ratio(figures.prompt_share));
    Card { name, sentence, pictures: Vec::new(), table: Table::default(), wide: false }
}

/// The misses that the split avoids at every size for which the curves are exact.
fn by_size(figures: &Figures, sizes: &[(u32, u64)]) -> String {
    let bar = |(slots, misses): &(u32, u64)| {
        let uniform = figures.lru.iter().find(|size| size.slots == *slots)?;
        let here = *slots == figures.setting.slots;
        let saved = share(uniform.misses.saturating_sub(*misses) as f64, uniform.misses as f64);
        Some(Bar {
            name: ratio(uniform.prompt_share),
            value: 100.0 * saved,
            mark: None,
            text: format!(
                "{} · {} → {}",
                percent(saved),
                number(figures.mean(uniform.misses)),
                number(figures.mean(*misses))
            ),
            class: if here { "here" } else { "plain" },
        })
    };
    let bars: Vec<Bar> = sizes.iter().filter_map(bar).collect();
    let name = "What the split saves, by size of the pool";
    let mut svg = Svg::new(WIDTH, chart::bars_height(bars.len()), name, "");
    chart::bars(&mut svg, &bars, "share · misses saved · rows missed, uniform → split");
    svg.finish()
}
