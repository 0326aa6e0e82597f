//! Turns the measurements of a step into figures: which times are compared with which.

use forebay::overlap::Overlap;

use super::engine::Line;
use super::interference::Turn;
use super::machine::Took;
use super::measured::{Measured, Ordered, Selecting};
use super::point::{Aim, LAYER_US, SHARE};
use crate::bench::result::{Figure, Parameter, Spread, Target};

const GROUP: &str = "step";
/// The target for forebay's own nodes in a step on a GPU, microseconds.
const NODES_US: f64 = 150.0;

/// The largest deviation of the engine's work from its requested length, as a share.
const LENGTH_OFF: f64 = 0.05;

fn median(times: impl Iterator<Item = f64>) -> f64 {
    Spread::of(times.collect()).us
}

/// By round, how much longer steps took than others.
fn added<'a>(steps: impl Iterator<Item = f64> + 'a, others: impl Iterator<Item = f64> + 'a) -> Vec<f64> {
    steps.zip(others).map(|(step, other)| step - other).collect()
}

fn us(steps: &[Took]) -> impl Iterator<Item = f64> + '_ {
    steps.iter().map(|took| took.us)
}

/// The resident steps that others are compared with: those in the order none, which come first.
fn resident(measured: &Measured) -> &[Took] {
    measured.orders.first().map_or(&[], |ordered| &ordered.resident)
}

/// By round, the exposed time of a step in an order.
fn exposed(measured: &Measured, ordered: &Ordered) -> Vec<f64> {
    added(us(&ordered.missing), us(resident(measured)))
}

/// Whether the host was ahead of the device in the steps that an order is judged by.
fn ahead(measured: &Measured, ordered: &Ordered) -> bool {
    ordered.missing.iter().chain(resident(measured)).all(|took| took.ahead)
}

/// Rounds to four decimals: more are not significant.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// All figures of a point, with targets if `aims` is set.
pub fn figures(measured: &Measured, aims: bool) -> Vec<Figure> {
    // With fewer sequences, or next to persistent kernels, it is not the point of the target.
    let aims = aims && measured.asked == measured.point.batch && measured.persistent.is_none();
    let mut figures = vec![engine(measured)];
    figures.extend(measured.orders.iter().map(|ordered| step(measured, ordered)));
    figures.extend(best(measured, aims));
    figures.push(nodes(measured, aims));
    figures.extend([host(measured), calls(measured)]);
    figures.extend(beside(measured).into_iter().flatten());
    figures
}

/// The engine's longest works: their measured times, and those of the line.
pub fn work(line: &Line, times: Vec<f64>, rounds: u32) -> Figure {
    let figure = Figure::new(GROUP, "rounds of products", times, ("by the line", line.us(rounds)), 0);
    let figure = figure.with("rounds", rounds).with("round_us", rounded(line.round_us));
    figure.with("fixed_us", rounded(line.fixed_us)).with("off_the_line", rounded(line.off))
}

/// A figure with the parameters of the point.
fn of_point(
    measured: &Measured,
    name: impl Into<String>,
    times: Vec<f64>,
    ceiling: (&'static str, f64),
) -> Figure {
    let point = &measured.point;
    let figure = Figure::new(GROUP, name, times, ceiling, measured.checked)
        .with("batch", point.batch)
        .with("query_rows", point.query_rows)
        .with("context", point.context)
        .with("budget", point.budget)
        .with("layers", point.layers)
        .with("misses", point.misses)
        .with("captured", if measured.captured { "yes" } else { "no" })
        .with("prompts", measured.prompts)
        .with("pool", Parameter::Bytes(measured.pool));
    let figure = match measured.persistent {
        Some(left) => figure.with("persistent", "yes").with("left_sms", left),
        None => figure,
    };
    // The device has no memory for more.
    if measured.asked > point.batch { figure.with("batch_asked", measured.asked) } else { figure }
}

fn engine(measured: &Measured) -> Figure {
    let times = measured.alone.iter().map(|(us, _)| *us).collect();
    of_point(measured, "engine alone", times, ("asked for", measured.point.step_us))
}

/// A step in one order.
fn step(measured: &Measured, ordered: &Ordered) -> Figure {
    let point = &measured.point;
    let ceiling = ("resident step", median(us(resident(measured))));
    let name = format!("step, {}", ordered.order.name());
    let mut figure = of_point(measured, name, us(&ordered.missing).collect(), ceiling);
    let (exposed, layers) = (Spread::of(exposed(measured, ordered)), f64::from(point.layers));
    figure = figure
        .with("exposed_share", rounded(exposed.us / ceiling.1.max(1e-9)))
        .with("host_ahead", if ahead(measured, ordered) { "yes" } else { "no" });
    let alone = measured.alone.iter().map(|(us, _)| *us);
    let rows = u64::from(point.misses) * u64::from(point.batch) * u64::from(point.layers);
    figure.bytes = Some(rows * u64::from(point.shape().runs[0]));
    figure.beside = vec![
        ("exposed", exposed.us),
        ("exposed, lower quartile", exposed.low),
        ("exposed, upper quartile", exposed.high),
        ("exposed a layer", exposed.us / layers),
        ("a layer beyond the engine alone", median(added(us(&ordered.missing), alone).into_iter()) / layers),
        ("the same order, resident", median(us(&ordered.resident))),
    ];
    let predicted = measured.predicted.iter().flatten().find(|(order, _)| *order == ordered.order);
    figure.beside.extend(predicted.map(|(_, us)| ("exposed a layer, by the simulator", *us)));
    figure
}

/// Among the orders that may be chosen, the one with the least exposed time. If this much of a step is to be hidden,
/// none hides nothing and is not considered.
fn best(measured: &Measured, aims: bool) -> Option<Figure> {
    let point = &measured.point;
    let may = |ordered: &&Ordered| point.aim != Aim::Share || ordered.order != Overlap::None;
    let exposes = |ordered: &Ordered| Spread::of(exposed(measured, ordered)).us;
    let best = measured.orders.iter().filter(may).min_by(|a, b| exposes(a).total_cmp(&exposes(b)))?;
    let mut figure = step(measured, best);
    figure.name = "step, best order".to_owned();
    figure = figure.with("order", best.order.name());
    let chosen = measured.predicted.iter().flatten().min_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((order, _)) = chosen {
        figure = figure.with("order_by_the_simulator", order.name());
    }
    let us = exposes(best);
    // For works of another length, or steps that wait for the host, the target is undecided.
    let alone = median(measured.alone.iter().map(|(us, _)| *us));
    let counts = ahead(measured, best) && (alone / point.step_us - 1.0).abs() <= LENGTH_OFF;
    figure.target = match point.aim {
        _ if !aims => None,
        Aim::None => None,
        Aim::Share => Some(Target {
            text: "at most 1.5% of the step exposed",
            met: counts && us <= SHARE * figure.ceiling.1,
        }),
        Aim::Layer => Some(Target {
            text: "at most 7 us a layer exposed",
            met: counts && us <= LAYER_US * f64::from(point.layers),
        }),
    };
    Some(figure)
}

/// Operations of a step on the compute stream: load, commit, report, and each layer's R and G. Its S runs on another.
pub const fn operations(layers: u32) -> u32 {
    3 + 2 * layers
}

/// The cost of forebay's own operations when they find nothing to fetch. Measured with an engine that only selects:
/// the difference of two long steps cannot resolve a thousandth of them.
fn nodes(measured: &Measured, aims: bool) -> Figure {
    let operations = operations(measured.point.layers);
    let Selecting { steps, alone, empty_us } = &measured.selecting;
    let times = added(us(steps), alone.iter().copied());
    let mut figure = of_point(measured, "forebay's nodes", times, ("empty operations", *empty_us));
    let working = added(us(resident(measured)), measured.alone.iter().map(|(us, _)| *us));
    figure.beside = vec![
        ("between the engine's works", median(working.into_iter())),
        ("begin", median(resident(measured).iter().map(|took| took.begin_us))),
        ("end", median(resident(measured).iter().map(|took| took.end_us))),
    ];
    let met = figure.us < NODES_US;
    figure.target = aims.then_some(Target { text: "under 150 us a step", met });
    figure.with("operations", operations)
}

/// The host's time of a step's calls.
fn host(measured: &Measured) -> Figure {
    let layers = |steps: &[Took]| steps.iter().map(|took| took.layers_host_us).collect();
    let engine = median(measured.alone.iter().map(|(_, host_us)| *host_us));
    let name = if measured.captured { "host: launch" } else { "host: layers, with the engine's calls" };
    let steps = resident(measured);
    let mut figure = of_point(measured, name, layers(steps), ("engine alone", engine));
    figure.beside = vec![
        ("prepare", median(steps.iter().map(|took| took.prepare_host_us))),
        ("finish and retire", median(steps.iter().map(|took| took.finish_host_us))),
    ];
    figure
}

/// The host's time to enqueue a step's layers call by call.
fn calls(measured: &Measured) -> Figure {
    let times = measured.calls.iter().map(|took| took.layers_host_us).collect();
    let once = median(resident(measured).iter().map(|took| took.layers_host_us));
    let once = (if measured.captured { "a launch" } else { "with the engine's calls" }, once);
    let mut figure = of_point(measured, "host: layers call by call", times, once);
    figure.beside = vec![("on the device", median(us(&measured.calls)))];
    figure
}

/// The engine's work with a gather beside it, and a gather that begins after the work.
fn beside(measured: &Measured) -> Option<[Figure; 2]> {
    let point = &measured.point;
    let of = |turn: Turn| measured.beside.iter().filter(move |layer| layer.turn == turn);
    let work = |turn: Turn| of(turn).map(|layer| layer.work_us);
    let gather = |turn: Turn| of(turn).map(|layer| layer.gather_us);
    if measured.beside.is_empty() {
        return None;
    }
    let (alone, rows) = (median(gather(Turn::Alone)), u64::from(point.misses) * u64::from(point.batch));
    let figure = |name, times, ceiling, beside| {
        let bytes = Some(rows * u64::from(point.shape().runs[0]));
        Figure { bytes, beside, ..of_point(measured, name, times, ceiling) }
    };
    Some([
        figure(
            "work beside a gather",
            work(Turn::Both).collect(),
            ("work alone", median(work(Turn::Alone))),
            vec![("gather alone", alone), ("gather beside work", median(gather(Turn::Both)))],
        ),
        figure(
            "gather behind work",
            gather(Turn::Behind).collect(),
            ("gather alone", alone),
            vec![("the work", median(work(Turn::Behind)))],
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::step::interference::Layered;
    use crate::bench::step::point::Point;

    fn took(us: f64) -> Took {
        Took { us, layers_host_us: 10.0, ahead: true, ..Took::default() }
    }

    /// Two rounds, of which the second is slower in all its steps.
    fn measured() -> Measured {
        let steps = |us: f64| vec![took(us), took(us + 500.0)];
        let ordered =
            |order, missing, resident| Ordered { order, missing: steps(missing), resident: steps(resident) };
        Measured {
            point: Point { layers: 10, ..Point::ESS },
            alone: vec![(99_900.0, 5.0), (100_400.0, 5.0)],
            orders: vec![
                ordered(Overlap::None, 120_000.0, 100_000.0),
                ordered(Overlap::Da, 101_000.0, 100_300.0),
                ordered(Overlap::Dba, 102_000.0, 100_400.0),
            ],
            calls: steps(900.0),
            selecting: Selecting {
                steps: vec![took(500.0), took(540.0)],
                alone: vec![400.0, 440.0],
                empty_us: 46.0,
            },
            asked: Point::ESS.batch,
            prompts: 45,
            pool: 64 << 30,
            persistent: None,
            beside: vec![
                Layered { turn: Turn::Alone, work_us: 30.0, gather_us: 40.0 },
                Layered { turn: Turn::Both, work_us: 33.0, gather_us: 44.0 },
                Layered { turn: Turn::Behind, work_us: 31.0, gather_us: 70.0 },
            ],
            predicted: Some(vec![(Overlap::None, 1900.0), (Overlap::Da, 110.0), (Overlap::Dba, 90.0)]),
            checked: 77,
            captured: true,
        }
    }

    fn named(all: &[Figure], name: &str) -> Figure {
        all.iter().find(|figure| figure.name == name).unwrap().clone()
    }

    fn beside_of(figure: &Figure, name: &str) -> f64 {
        figure.beside.iter().find(|(key, _)| *key == name).unwrap().1
    }

    #[test]
    fn exposed_time_is_a_step_minus_the_resident_step_of_its_round() {
        let all = figures(&measured(), true);
        let da = named(&all, "step, da");
        // The baseline is neither the resident steps of the same order nor the difference of the medians.
        assert_eq!((beside_of(&da, "exposed"), beside_of(&da, "exposed a layer")), (1000.0, 100.0));
        assert_eq!(da.ceiling, ("resident step", 100_250.0));
        assert_eq!(beside_of(&da, "the same order, resident"), 100_550.0);
        assert_eq!(da.number("exposed_share"), Some(0.01));
        assert_eq!(da.bytes, Some(190 * 160 * 10 * 656));
        assert_eq!((da.checked, da.target), (77, None));
        assert_eq!(beside_of(&named(&all, "step, none"), "exposed"), 20_000.0);
        assert_eq!(beside_of(&da, "a layer beyond the engine alone"), 110.0);
    }

    #[test]
    fn a_smaller_batch_and_a_lagging_host_are_reported() {
        let text = |figure: &Figure, name: &str| {
            figure.parameters.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        };
        let mut measured = measured();
        let da = |measured: &Measured| named(&figures(measured, true), "step, da");
        assert_eq!(text(&da(&measured), "batch_asked"), None);
        assert_eq!(text(&da(&measured), "host_ahead").as_deref(), Some("yes"));
        measured.point.batch = 70;
        measured.orders[1].missing[1].ahead = false;
        assert_eq!(text(&da(&measured), "batch_asked").as_deref(), Some("160"));
        assert_eq!(text(&da(&measured), "host_ahead").as_deref(), Some("no"));
        let all = figures(&measured, true);
        assert!(all.iter().all(|figure| figure.target.is_none()), "another point than the target's");
        let beside = Measured { persistent: Some(4), ..self::measured() };
        assert!(figures(&beside, true).iter().all(|figure| figure.target.is_none()), "persistent kernels");
        assert!(figures(&self::measured(), true).iter().any(|figure| figure.target.is_some()), "the control");
    }

    #[test]
    fn the_best_order_meets_the_target_or_does_not() {
        let best = |measured: &Measured| named(&figures(measured, true), "step, best order");
        let mut measured = measured();
        let figure = best(&measured);
        assert!(figure.target.unwrap().met && figure.us == 101_250.0, "{figure:?}");
        let text = |name: &str| figure.parameters.iter().find(|(key, _)| *key == name).unwrap().1.to_string();
        assert_eq!((text("order").as_str(), text("order_by_the_simulator").as_str()), ("da", "dba"));
        // 1.5% of 100,250 us is 1503.75.
        for ordered in &mut measured.orders[1..] {
            ordered.missing.iter_mut().for_each(|took| took.us += 504.0);
        }
        assert!(!best(&measured).target.unwrap().met);
        // Seven microseconds a layer, in any order.
        measured.point.aim = Aim::Layer;
        assert!(!best(&measured).target.unwrap().met);
        measured.orders[0].missing = vec![took(100_070.0), took(100_570.0)];
        assert!(best(&measured).target.unwrap().met);
        measured.point.step_us = 110_000.0;
        assert!(!best(&measured).target.unwrap().met, "the work is shorter than it was asked to be");
        measured.point.step_us = 100_000.0;
        measured.orders[0].missing[1].ahead = false;
        assert!(!best(&measured).target.unwrap().met, "the device has waited for the host");
        assert_eq!(figures(&measured, false).iter().find(|f| f.target.is_some()), None);
    }

    #[test]
    fn node_time_is_a_resident_step_minus_the_engines_work() {
        let mut measured = measured();
        let nodes = |measured: &Measured| named(&figures(measured, true), "forebay's nodes");
        let figure = nodes(&measured);
        assert_eq!((figure.us, figure.ceiling), (100.0, ("empty operations", 46.0)));
        assert!(figure.target.unwrap().met);
        assert_eq!(beside_of(&figure, "between the engine's works"), 100.0);
        measured.selecting.alone.iter_mut().for_each(|us| *us -= 50.0);
        assert!(!nodes(&measured).target.unwrap().met, "150 us are not under 150 us");
    }

    #[test]
    fn work_during_a_gather_is_compared_with_work_alone() {
        let mut measured = measured();
        let figure = named(&figures(&measured, true), "work beside a gather");
        assert_eq!((figure.us, figure.ceiling), (33.0, ("work alone", 30.0)));
        assert_eq!(beside_of(&figure, "gather alone"), 40.0);
        let figure = named(&figures(&measured, true), "gather behind work");
        assert_eq!(
            (figure.us, figure.ceiling, figure.number("left_sms")),
            (70.0, ("gather alone", 40.0), None)
        );
        assert_eq!((beside_of(&figure, "the work"), figure.number("prompts")), (31.0, Some(45.0)));
        measured.persistent = Some(4);
        assert_eq!(named(&figures(&measured, true), "gather behind work").number("left_sms"), Some(4.0));
        measured.beside.clear();
        assert_eq!(figures(&measured, true).len(), 8);
    }
}
