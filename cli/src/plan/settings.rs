//! The settings of a sweep of plans: the values that differ among them apart from batch and ratio, and the advice for
//! each setting.
//!
//! The differing values are determined once, so that a sweep costs as much as its plans together, and not their
//! square.

use std::collections::HashMap;

use super::advice::{self, Advice};
use super::result::Point;
use crate::present::numbers::tokens;
use crate::present::output::harmless;

/// The values that distinguish the plans of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    model: bool,
    link: bool,
    gpu: bool,
    context: bool,
    query_rows: bool,
    /// Whether the sweep mixes costs from a roofline with measured ones.
    pub mixed: bool,
}

impl Settings {
    /// The settings of these plans.
    pub fn of(points: &[Point]) -> Settings {
        let Some(first) = points.first() else { return Settings::default() };
        let differ = |same: &dyn Fn(&Point) -> bool| !points.iter().all(same);
        let by_roofline =
            |is: bool| points.iter().any(|point| point.on.as_ref().is_some_and(|on| on.by_roofline == is));
        Settings {
            model: differ(&|point| point.model == first.model),
            link: differ(&|point| point.link() == first.link()),
            gpu: differ(&|point| point.demand.gpu == first.demand.gpu),
            context: differ(&|point| point.demand.context == first.demand.context),
            query_rows: differ(&|point| point.demand.query_rows == first.demand.query_rows),
            mixed: by_roofline(true) && by_roofline(false),
        }
    }

    /// The setting of a plan in words; empty if there is only one.
    pub fn name(&self, point: &Point) -> String {
        self.words(point, self.link)
    }

    /// The setting without its link, which no ratio depends on.
    pub fn name_without_link(&self, point: &Point) -> String {
        self.words(point, false)
    }

    fn words(&self, point: &Point, link: bool) -> String {
        let words: [(bool, &dyn Fn() -> String); 5] = [
            (self.model, &|| point.model.clone()),
            (link, &|| point.link().unwrap_or_default().to_owned()),
            (self.gpu, &|| point.memory.gpu.to_string()),
            (self.context, &|| tokens(point.demand.context)),
            (self.query_rows, &|| format!("mtp {}", point.demand.query_rows)),
        ];
        let words: Vec<String> =
            words.into_iter().filter(|(differ, _)| *differ).map(|(_, word)| word()).collect();
        harmless(&words.join(", "))
    }
}

/// The advice for each setting.
pub struct Advised<'a> {
    settings: Vec<(String, Vec<&'a Point>, Advice)>,
    /// By setting, where misses begin with elastic budgets.
    elastic: Vec<Option<String>>,
    /// The setting of each plan.
    of: Vec<usize>,
}

impl<'a> Advised<'a> {
    /// The advice for these plans. A plan slower than `least_otps` tokens a second for each sequence is not
    /// considered; 0 sets no minimum.
    pub fn of(points: &'a [Point], least_otps: f64) -> Advised<'a> {
        let told = Settings::of(points);
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut settings: Vec<(String, Vec<&Point>)> = Vec::new();
        let mut of = Vec::with_capacity(points.len());
        for point in points {
            let name = told.name(point);
            let place = *known.entry(name.clone()).or_insert(settings.len());
            match settings.get_mut(place) {
                Some((_, plans)) => plans.push(point),
                None => settings.push((name, vec![point])),
            }
            of.push(place);
        }
        let advised = |(name, plans): (String, Vec<&'a Point>)| {
            let advice = advice::of(&plans, least_otps);
            (name, plans, advice)
        };
        let elastic = settings.iter().map(|(_, plans)| advice::elastic(plans, least_otps)).collect();
        Advised { settings: settings.into_iter().map(advised).collect(), elastic, of }
    }

    /// Each setting's name (empty if there is only one), and its advice.
    pub fn all(&self) -> impl Iterator<Item = (&str, &Advice)> {
        self.settings.iter().map(|(name, _, advice)| (name.as_str(), advice))
    }

    /// For each setting whose advised plan cannot keep all rows on the device: its name, and where misses begin with
    /// elastic budgets.
    pub fn elastic(&self) -> impl Iterator<Item = (&str, &str)> {
        let names = self.settings.iter().map(|(name, ..)| name.as_str());
        names.zip(&self.elastic).filter_map(|(name, sentence)| Some((name, sentence.as_deref()?)))
    }

    /// The advice for the setting of the plan at index `place`.
    pub fn of_point(&self, place: usize) -> Option<&Advice> {
        self.of.get(place).and_then(|setting| self.settings.get(*setting)).map(|(_, _, advice)| advice)
    }

    /// The plans of the only setting, and its advice; none if there are several.
    pub fn only(&self) -> Option<(&[&'a Point], &Advice)> {
        match &self.settings[..] {
            [(_, plans, advice)] => Some((plans, advice)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use forebay::Shape;
    use forebay::predict::plan::{Batch, Demand, plan};
    use forebay::predict::weights::Attention;

    use super::*;
    use crate::input::sizes;
    use crate::plan::deployment::Deployed;
    use crate::plan::result::Memory;
    use crate::plan::{html, json, text};
    use crate::present::terminal::Look;

    /// `plans` plans that differ by `change`, which gets the number of the plan.
    fn sweep(plans: u32, change: impl Fn(u32, &mut Demand)) -> Vec<Point> {
        let demand =
            Demand { batch: Batch::Sequences(60), ..Demand::new(Shape::DEEPSEEK_V3_2, 80 << 30, 32768) };
        let planned = plan(&demand).unwrap();
        let memory = Rc::new(Memory {
            gpu: sizes::size("80GiB").unwrap(),
            weights: None,
            activations: None,
            workspace: None,
            host: None,
        });
        let deployed = Deployed { gpus: 8, node: 8, attention: Attention::Data, heads: 1, checkpoint: None };
        let point = |number| {
            let mut demand = demand.clone();
            change(number, &mut demand);
            Point {
                model: "deepseek-v3.2".to_owned(),
                deployed: deployed.clone(),
                demand,
                memory: memory.clone(),
                weighed: None,
                on: None,
                planned: Ok(planned.clone()),
                compared: None,
                unknown: None,
                gain: None,
                alone: None,
            }
        };
        (0..plans).map(point).collect()
    }

    /// A comparison of every plan with every other would take over 10^9 comparisons for each output. This takes
    /// seconds.
    #[test]
    fn outputs_of_a_sweep_take_linear_time() {
        const PLANS: u32 = 40_000;
        let batches = sweep(PLANS, |number, demand| demand.batch = Batch::Sequences(number + 1));
        let text = String::from_utf8(json::text(&batches, 0.0).unwrap()).unwrap();
        assert_eq!(text.matches("\"kind\": \"plan\"").count(), PLANS as usize);
        assert_eq!(text.matches("With offload the 8 GPUs hold").count(), PLANS as usize);
        // Each context is its own setting, with its own sentence.
        let contexts = sweep(PLANS, |number, demand| demand.context = 32768 + number);
        let advised = Advised::of(&contexts, 0.0);
        assert!(advised.all().count() == PLANS as usize && advised.only().is_none());
        assert_eq!(advised.all().nth(5), Some(("32773", advised.of_point(5).unwrap())));
        // Tables and pages have a line for each plan: with fewer plans here, because comfy-table is slow.
        let some = sweep(PLANS / 10, |number, demand| demand.batch = Batch::Sequences(number + 1));
        let look = Look { utf8: false, width: Some(80) };
        assert!(text::report(&some, 0.0, look).lines().count() > some.len());
        assert!(html::page(&some, 0.0).matches("<tr>").count() > some.len());
    }

    #[test]
    fn a_setting_is_named_by_its_differences() {
        let one = sweep(3, |number, demand| demand.batch = Batch::Sequences(number + 1));
        let told = Settings::of(&one);
        assert_eq!((told, told.name(&one[0]).as_str()), (Settings::default(), ""));
        assert!(Advised::of(&one, 0.0).only().is_some_and(|(plans, _)| plans.len() == 3));
        let two = sweep(4, |number, demand| {
            (demand.context, demand.query_rows) = (1024 * (1 + number % 2), 1 + number / 2);
        });
        let told = Settings::of(&two);
        let names: Vec<String> = two.iter().map(|point| told.name(point)).collect();
        assert_eq!(names, ["1K, mtp 1", "2K, mtp 1", "1K, mtp 2", "2K, mtp 2"]);
        assert!(Settings::of(&[]) == Settings::default() && Advised::of(&[], 0.0).all().count() == 0);
    }
}
