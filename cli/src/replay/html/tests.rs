//! Pages made of figures that no trace has given: the ends of what there can be.

use forebay::trace::requests::{Format, Notes};
use forebay::trace::{Header, SelectionTrace};

use super::figures::{Divided, Figures, Size};
use super::selection;
use super::similarity::{self, Within};
use super::view::View;
use crate::blocks::{self, Outcome};
use crate::policy::Policy;
use crate::present::html::chart::{self, Grid};
use crate::present::html::numbers;
use crate::present::html::page::{self, Section};
use crate::replay::requests::html::{self, Hits};
use crate::replay::requests::result::About;
use crate::replay::result::{Count, RowSize};
use crate::study::pools::Setting;

fn header(layers: u32, steps: u32) -> Header {
    serde_json::from_value(serde_json::json!({
        "label": "made up", "model": "unknown", "layers": layers, "k": 4, "steps": steps, "warm_steps": 0,
        "first_position": 100, "decode_start": 100, "context": 100 + steps,
        "layer_ids": (0..layers).collect::<Vec<_>>(),
    }))
    .unwrap()
}

/// Figures of `layers` layers and `steps` steps; each step selects 4 rows and misses `missed(layer, step)` of them.
fn figures(layers: u32, steps: u32, missed: impl Fn(u32, u32) -> u64) -> Figures {
    let of_layer = |layer| (0..steps).map(|step| missed(layer, step)).sum::<u64>();
    let counts: Vec<Count> = (0..layers)
        .map(|layer| Count { hits: 4 * u64::from(steps) - of_layer(layer), misses: of_layer(layer) })
        .collect();
    let by_step: Vec<u64> =
        (0..steps).map(|step| (0..layers).map(|layer| missed(layer, step)).sum()).collect();
    let all = by_step.iter().sum::<u64>();
    let sizes: Vec<Size> = [(0.1, 10, all + all / 4), (0.2, 20, all), (0.3, 30, all / 2)]
        .map(|(prompt_share, slots, misses)| Size { prompt_share, slots, misses })
        .into();
    let columns = steps.min(90) as usize;
    Figures {
        path: "made-up.topk".to_owned(),
        header: header(layers, steps),
        setting: Setting { slots: 20, warmup: 0, mtp: 1, steps },
        prompt_share: 0.2,
        layers: counts,
        warm: by_step.clone(),
        cold: by_step,
        lru: sizes.clone(),
        policies: vec![(Policy::Belady, sizes.clone()), (Policy::DecayTokens, sizes)],
        reached: Some(Size { prompt_share: 0.3, slots: 30, misses: all / 2 }),
        exact_from: 4,
        divided: (layers > 1).then(|| Divided {
            layers: (0..layers).map(|layer| (10 + layer, of_layer(layer), of_layer(layer) / 2)).collect(),
            sizes: vec![(20, all / 2), (30, all / 4)],
        }),
        shown: (0..layers).collect(),
        within: Some(Within {
            grid: Grid { columns, values: vec![0.5; columns * layers as usize] },
            means: vec![0.5; layers as usize],
        }),
        between: Grid {
            columns: layers as usize,
            values: (0..layers * layers)
                .map(|i| if i % (layers + 1) == 0 { f64::NAN } else { 0.5 })
                .collect(),
        },
    }
}

fn section(figures: &Figures) -> Section {
    let row = RowSize { model: "deepseek-v3.2".to_owned(), bytes: 656 };
    selection::section(&View { figures, row: &row, link: 37e9 })
}

fn page(figures: &Figures) -> String {
    page::document(&[section(figures)], "", &[])
}

/// Checks that every opened element is closed, in order, that the page fetches nothing, and that every number is one.
fn sound(page: &str) {
    let (mut open, mut rest) = (Vec::new(), page);
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("an end of a tag");
        let tag = &rest[start + 1..end];
        let name = tag.trim_start_matches('/').split([' ', '\n']).next().unwrap();
        match tag {
            _ if ["!DOCTYPE", "meta"].contains(&name) || tag.ends_with('/') => {}
            _ if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "{tag}"),
            _ => open.push(name),
        }
        rest = &rest[end + 1..];
    }
    assert_eq!(open, Vec::<&str>::new());
    for word in ["NaN", "inf ", "inf\"", "://", "<script", "javascript:", "@import", "url("] {
        assert!(!page.contains(word), "{word}");
    }
}

#[test]
fn pages_of_the_smallest_and_largest_inputs_are_well_formed() {
    for (layers, steps) in [(1, 1), (1, 2), (2, 33), (61, 1), (61, 2048), (200, 8)] {
        for missed in [0, 1, 4] {
            let page = page(&figures(layers, steps, |_, _| missed));
            sound(&page);
            assert!(page.len() < 400_000, "{layers} layers, {steps} steps: {} bytes", page.len());
        }
    }
}

#[test]
fn sentences_agree_with_the_figures() {
    let figures = figures(5, 10, |layer, _| [0, 1, 1, 1, 4][layer as usize]);
    let section = section(&figures);
    let sentence = |name: &str| {
        let card = section.cards.iter().find(|card| card.name.starts_with(name)).expect("a card");
        card.sentence.clone()
    };
    assert_eq!(
        sentence("Misses by layer"),
        "Layer 4 misses most, 4.00 rows a step, 4.0 times the median layer; layer 0 least, 0.00. The worst layer \
         alone has 57% of all misses."
    );
    assert_eq!(
        sentence("Misses by size"),
        "At prompt share 0.2, LRU misses 1.40 rows a step and layer, the optimum 1.40: 100% of the misses are \
         due to the working set, 0% to the policy. No other policy can miss less."
    );
    assert!(
        sentence("Bytes moved").contains("4.48 KiB to the device, 124 ns at 37 GB/s"),
        "{}",
        sentence("Bytes")
    );
    assert_eq!(
        sentence("Misses by step"),
        "The first 8 steps miss 1.40 rows a layer from a cold pool, all steps 1.40."
    );
}

#[test]
fn zero_misses_are_stated_and_not_drawn() {
    let figures = figures(3, 10, |_, _| 0);
    let section = section(&figures);
    assert!(section.cards[0].sentence.contains("nothing is missed"), "{}", section.cards[0].sentence);
    assert!(section.cards.iter().any(|card| card.sentence.contains("No layer misses anything")));
}

#[test]
fn texts_from_a_trace_are_never_markup() {
    let attack = "</title></style><script>alert(1)</script><img src=x onerror='a()'>\"&\u{1b}[31m";
    let mut figures = figures(2, 3, |_, _| 1);
    figures.header.label = attack.to_owned();
    figures.header.model = attack.to_owned();
    figures.header.text = attack.to_owned();
    figures.header.score = attack.to_owned();
    figures.header.mode = attack.to_owned();
    figures.path = attack.to_owned();
    let two = page::document(&[section(&figures), section(&figures)], attack, &[attack.to_owned()]);
    sound(&two);
    assert!(!two.contains("<img") && !two.contains('\u{1b}'));
    assert!(two.contains("&lt;script&gt;alert(1)"));
}

#[test]
fn misses_of_another_model_are_never_attributed_to_the_model_of_the_rows() {
    let mut figures = figures(1, 1, |_, _| 1);
    assert!(section(&figures).warning.is_some_and(|text| text.starts_with("Proxy for deepseek-v3.2")));
    figures.header.model = String::new();
    assert!(section(&figures).warning.is_some());
    let mut marked = |model: &str, preset: &str| {
        figures.header.model = model.to_owned();
        let row = RowSize { model: preset.to_owned(), bytes: 656 };
        selection::section(&View { figures: &figures, row: &row, link: 37e9 }).warning.is_some()
    };
    let cases = [
        ("DeepSeek-V3.2-Exp (FP8)", "deepseek-v3.2", false),
        ("DeepSeek V3.2", "deepseek-v3.2-bf16", false),
        ("deepseek-v3.2", "deepseek-v3.2-int8", false),
        ("DeepSeek-V3-0324", "deepseek-v3", false),
        ("GLM-5", "glm-5", false),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2", false),
        ("proxies/of/DeepSeek-V3.2-like", "deepseek-v3.2", true),
        ("SmolLM2 (stand-in for DeepSeek-V3.2)", "deepseek-v3.2", true),
        ("DeepSeek-V3.2", "deepseek-v3", true),
        ("deepseek_v3_2", "deepseek-v3", true),
        ("DeepSeek-V3", "deepseek-v3.2", true),
        ("GLM-5.1", "glm-5", true),
        ("GLM-50", "glm-5", true),
    ];
    for (model, preset, proxy) in cases {
        assert_eq!(marked(model, preset), proxy, "{model} with {preset}");
    }
}

/// The sentence of the card whose name begins with `name`.
fn said(figures: &Figures, name: &str) -> String {
    let cards = section(figures).cards;
    cards.into_iter().find(|card| card.name.starts_with(name)).expect("a card").sentence
}

#[test]
fn equal_values_are_not_ranked() {
    let mut alike = figures(3, 10, |_, _| 2);
    alike.setting.slots = 1000;
    alike.divided.as_mut().unwrap().layers = vec![(110, 20, 20); 3];
    assert_eq!(said(&alike, "Misses by layer"), "All layers miss the same: 2.00 rows a step.");
    let split = said(&alike, "Split by layer");
    assert!(split.contains("All layers get 110 slots") && !split.contains("times"), "{split}");
    assert!(said(&alike, "Similarity between").contains("All pairs are equally similar."));
    assert!(said(&alike, "Similarity within").ends_with("the same in all layers."));
    // A sequence of 110 tokens uses no more than 110 slots of a layer.
    alike.divided.as_mut().unwrap().layers = vec![(110, 20, 10), (55, 20, 20), (55, 20, 20)];
    let split = said(&alike, "Split by layer");
    assert!(split.contains("110 slots, 1.0 times the 110 of a uniform split"), "{split}");
}

#[test]
fn a_cold_start_counts_as_close_only_where_it_stays_close() {
    let mut figures = figures(1, 40, |_, _| 2);
    figures.setting.warmup = 4;
    figures.cold = (0..40).map(|step| if step < 5 || (20..25).contains(&step) { 4 } else { 2 }).collect();
    let sentence = said(&figures, "Misses by step");
    assert!(sentence.contains("From step 26 on"), "{sentence}");
    figures.cold = vec![4; 40];
    assert!(!said(&figures, "Misses by step").contains("within 10%"));
    figures.setting.warmup = 0;
    let card = section(&figures).cards.into_iter().find(|card| card.name.starts_with("Misses by step"));
    assert!(!page::document(&[section(&figures)], "", &[]).contains(">warmed<") && card.is_some());
}

#[test]
fn time_is_given_in_positions_and_skipped_layers_are_reported() {
    let mut figures = figures(200, 4, |_, _| 1);
    figures.header.steps = 1100;
    figures.shown = (0..200).step_by(2).collect();
    let columns = 4;
    let grid = Grid { columns, values: [f64::NAN, 0.5, 0.25, 0.75].repeat(100) };
    figures.within = Some(Within { grid, means: vec![0.5; 100] });
    figures.between = Grid { columns: 100, values: vec![0.5; 10_000] };
    let within = said(&figures, "Similarity within");
    assert!(
        within.contains(
            "Over time, least: 25%, at decode positions 551 to 825; most: 75%, at decode positions 826 to 1100."
        ),
        "{within}"
    );
    let picked = "The picture shows one of every 2 of the 200 recorded layers.";
    assert!(within.ends_with(picked), "{within}");
    let between = said(&figures, "Similarity between");
    assert!(between.contains("Adjacent layers shown here (at least 2 apart)"), "{between}");
    assert!(
        between.contains("Counted at one of every 3 decode positions.") && between.ends_with(picked),
        "{between}"
    );
}

#[test]
fn a_split_without_counts_comes_with_its_reason() {
    let mut figures = figures(2, 10, |_, _| 2);
    (figures.exact_from, figures.divided) = (64, None);
    let sentence = said(&figures, "Split by layer");
    assert!(
        sentence.contains("may need 64 slots") && sentence.contains("The size shown is 20 slots"),
        "{sentence}"
    );
    sound(&page(&figures));
}

#[test]
fn policies_are_not_shown_as_shares_of_zero() {
    let mut figures = figures(2, 10, |_, _| 0);
    figures.policies[1].1[1].misses = 20;
    assert_eq!(said(&figures, "Policies"), "LRU misses nothing; decay-tokens misses 1.00.");
    assert!(!page(&figures).contains("1.00 · "));
}

#[test]
fn an_unfinished_recording_is_reported() {
    let mut figures = figures(2, 10, |_, _| 0);
    assert!(!page(&figures).contains("not finished"));
    figures.header.unfinished = Some(7);
    let said = "The recording was not finished: 7 bytes after its last whole group were left out.";
    assert_eq!(section(&figures).facts[0], said);
}

#[test]
fn repeated_titles_include_their_paths() {
    let (figures, mut other) = (figures(1, 2, |_, _| 1), figures(1, 2, |_, _| 1));
    other.header.label = "another".to_owned();
    let mut sections = [section(&figures), section(&other), section(&figures)];
    page::tell_apart(&mut sections, &["a/x".into(), "a/y".into(), "b/x".into()]);
    assert_eq!(sections.map(|section| section.title), ["made up (a/x)", "another", "made up (b/x)"]);
}

/// A cache with hits for `blocks` of 100 references at 8 blocks, which is all, and for half of them at 2 blocks.
fn hits(blocks: u64, format: Format, distinct: u32) -> Hits {
    let of = |hit_blocks| Outcome {
        requests: 10,
        blocks: 100,
        hit_blocks,
        input_tokens: 1000,
        hit_tokens: hit_blocks * 9,
        evicted_blocks: 0,
    };
    let lru = vec![(1, of(0)), (2, of(blocks / 2)), (8, of(blocks))];
    let best = vec![(1, of(0)), (2, of(blocks)), (8, of(blocks))];
    let policies = vec![(blocks::Policy::Lru, lru.clone()), (blocks::Policy::Belady, best)];
    Hits {
        about: About {
            path: "<b>made-up</b>.jsonl".into(),
            format,
            requests: 12,
            skipped: 2,
            distinct,
            block_tokens: None,
            knows_block_lengths: format != Format::RagPulse,
            notes: Notes::default(),
            subagents: false,
            sessions: None,
        },
        shown: 2,
        named: true,
        lru,
        needed: if blocks > 0 { vec![(0.5, 2), (0.99, 8)] } else { Vec::new() },
        policies: if distinct > 0 { policies } else { Vec::new() },
    }
}

#[test]
fn hits_are_given_by_capacity_with_their_denominator() {
    let section = html::section(&hits(40, Format::Mooncake, 8));
    assert_eq!(
        section.cards[0].sentence,
        "With 2 blocks, LRU hits 18.0% of the input tokens, the optimum 36.0%; a cache that keeps everything hits \
         36.0%, and the rest cannot be hit. Of the hits that LRU loses there, 100% are lost to its policy and 0% to \
         the capacity."
    );
    assert_eq!(section.cards[0].pictures.len(), 2);
    let pieces = html::section(&hits(40, Format::RagPulse, 8));
    let sentence = &pieces.cards[0].sentence;
    assert!(sentence.contains("LRU hits 20.0% of the block references, Belady's rule 40.0%"), "{sentence}");
    assert!(!pieces.cards.iter().any(|card| card.pictures.concat().contains("optimum</text>")));
    let none = html::section(&hits(0, Format::Mooncake, 8));
    assert!(none.cards[0].sentence.contains("no cache helps"), "{}", none.cards[0].sentence);
    let nameless = html::section(&hits(0, Format::Azure, 0));
    assert!(nameless.cards.is_empty() && nameless.facts.concat().contains("names no blocks"));
    sound(&page::document(&[section, pieces, none, nameless], "", &html::notes(true)));
}

#[test]
fn a_default_capacity_comes_with_its_reason() {
    let why = "With 2 blocks, where LRU has half of the possible block hits, LRU hits";
    let mut hits = hits(40, Format::Mooncake, 8);
    assert!(!html::section(&hits).cards[0].sentence.contains("half of"));
    hits.named = false;
    assert!(html::section(&hits).cards[0].sentence.starts_with(why));
    // A capacity beyond all blocks does not stretch the axis, and the optimum's points are dots.
    let beyond = hits.lru[2].1;
    hits.policies.iter_mut().for_each(|(_, sizes)| sizes.push((1_000_000, beyond)));
    let picture = &html::section(&hits).cards[0].pictures[0];
    assert!(
        picture.contains(">5</text>") && !picture.contains(">100</text>") && !picture.contains("M</text>")
    );
    assert_eq!(picture.matches("r=\"2.6\"").count(), 3);
}

#[test]
fn a_policy_far_above_lru_leaves_the_frame_and_keeps_its_name() {
    let mut figures = figures(1, 10, |_, _| 2);
    let worse = figures.lru.iter().map(|size| Size { misses: size.misses * 2, ..*size }).collect();
    figures.policies.push((Policy::Fifo, worse));
    let page = page(&figures);
    assert!(page.contains(">fifo ↑ 200%</text>") && page.contains(">120</text>"));
    assert!(!page.contains(">150</text>") && !page.contains(">200</text>"));
}

#[test]
fn pictures_without_misses_are_left_out() {
    let figures = figures(2, 40, |_, _| 0);
    for card in section(&figures).cards.iter().filter(|card| !card.name.starts_with("Similarity")) {
        assert_eq!(card.pictures.len(), 0, "{}", card.name);
    }
}

#[test]
fn rounding_never_turns_a_share_into_0_or_1() {
    assert_eq!(
        [0.0, 0.006, 0.5, 0.994, 0.996, 0.99996, 1.0].map(numbers::percent),
        ["0%", "0.60%", "50%", "99%", "99.6%", ">99.9%", "100%"]
    );
    assert_eq!([1e-300, 0.0005, 0.2, 1.0].map(numbers::ratio), ["1e-300", "0.0005", "0.2", "1"]);
}

/// The contrast of two colours by WCAG.
fn contrast(one: &str, other: &str) -> f64 {
    let light = |colour: &str| {
        let part = |i: usize| f64::from(u8::from_str_radix(&colour[i..i + 2], 16).unwrap()) / 255.0;
        let linear = |c: f64| if c <= 0.03928 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) };
        0.2126 * linear(part(1)) + 0.7152 * linear(part(3)) + 0.0722 * linear(part(5))
    };
    let (a, b) = (light(one), light(other));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[test]
fn digits_are_readable_on_every_shade() {
    let style = page::STYLE;
    let (day, night) = style.split_once("prefers-color-scheme").unwrap();
    for theme in [day, night] {
        let colour = |name: &str| {
            let start = theme.find(&format!("--{name}: ")).expect("a colour") + name.len() + 4;
            &theme[start..start + 7]
        };
        for shade in 0..10 {
            let digits = if shade < chart::STRONG { "on-pale" } else { "on-strong" };
            let contrast = contrast(colour(&format!("q{shade}")), colour(digits));
            assert!(contrast >= 4.5, "q{shade} under {digits}: {contrast}");
        }
    }
}

/// Two layers, k 2, three decode steps after one warm-up step.
fn small() -> SelectionTrace {
    let header: Header = serde_json::from_value(serde_json::json!({
        "layers": 2, "layer_ids": [3, 9], "k": 2, "steps": 4, "warm_steps": 1, "first_position": 4,
        "decode_start": 5, "context": 8
    }))
    .unwrap();
    let sets = [[0, 1], [0, 2], [1, 2], [0, 2], [3, 4], [3, 4], [3, 4], [0, 1]];
    SelectionTrace::new(header, sets.concat()).unwrap()
}

#[test]
fn similarity_is_counted_position_by_position() {
    let trace = small();
    // Layer 0: {0,1} {1,2} {3,4} {3,4}; layer 1: {0,2} {0,2} {3,4} {0,1}.
    let within = similarity::within(&trace, &[0, 1], 3).unwrap();
    assert_eq!(within.grid, Grid { columns: 3, values: vec![0.5, 0.0, 1.0, 1.0, 0.0, 0.0] });
    assert_eq!(within.means, [0.5, 1.0 / 3.0]);
    assert_eq!(similarity::within(&trace, &[1], 1).unwrap().grid.values, [1.0 / 3.0]);
    let between = similarity::between(&trace, &[0, 1]);
    assert_eq!(between.values[1..3], [0.5, 0.5]);
    assert!(between.values[0].is_nan() && between.values[3].is_nan());
}
