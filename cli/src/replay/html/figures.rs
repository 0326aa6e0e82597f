//! Counts all figures of a report about a selection trace; draws nothing.
//!
//! LRU's misses come from the production pools and from the miss-ratio curve, which is exact; below the curve's least
//! size the pools replay size by size. The other policies run at the sizes of [`SHARES`]. Memory in addition to the
//! trace: one layer's steps, or one pool, for each core.

use std::path::Path;

use forebay::trace::Header;
use forebay::{Error, Kind, Result, Shape};

use super::similarity::{self, Within};
use crate::input::allowance::{Allowance, Replayed};
use crate::input::selection_trace::{self, Recorded};
use crate::policy::{self, Policy};
use crate::present::html::chart::Grid;
use crate::present::html::scale::geometric;
use crate::present::progress;
use crate::replay::args::{self, Arguments};
use crate::replay::result::Count;
use crate::study::curve::{self, Curves};
use crate::study::pools::{Outcome, Setting};
use crate::study::{lru_stack, split, threads};

/// The size for misses by layer and by step if none is named.
const SHARE: f64 = 0.2;

/// The sizes at which the other policies are compared with LRU.
pub const SHARES: [f64; 9] = [0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6];

/// The approximate number of points of LRU's line.
const POINTS: u32 = 80;

/// The policies that are compared with LRU.
const STUDIED: [Policy; 5] =
    [Policy::DecayTokens, Policy::Decay, Policy::Belady, Policy::Fifo, Policy::S3Fifo];

/// Columns of the heat map over steps, at most.
const STRETCHES: usize = 90;

/// The most layers of the heat maps; of more layers an even selection is shown.
const LAYERS: u32 = 128;

/// Misses of all layers at one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Slots as a share of the prompt.
    pub prompt_share: f64,
    /// Slots per layer.
    pub slots: u32,
    /// Misses over all decode steps.
    pub misses: u64,
}

/// Slots divided over the layers by what each gains.
#[derive(Clone, Debug, Default)]
pub struct Divided {
    /// By layer at the size shown: slots, misses with the same slots in every layer, misses with these.
    pub layers: Vec<(u32, u64, u64)>,
    /// All layers, by slots a layer: misses.
    pub sizes: Vec<(u32, u64)>,
}

/// Everything that the report says about a trace.
pub struct Figures {
    /// The file, as named.
    pub path: String,
    /// The trace's header.
    pub header: Header,
    /// The size shown by layer and by step.
    pub setting: Setting,
    /// Its slots as a share of the prompt.
    pub prompt_share: f64,
    /// By layer at that size.
    pub layers: Vec<Count>,
    /// By step at that size: misses of all layers.
    pub warm: Vec<u64>,
    /// The same without warm-up.
    pub cold: Vec<u64>,
    /// LRU by size, ascending.
    pub lru: Vec<Size>,
    /// The other policies by size, ascending; without fading ones if these would take too long.
    pub policies: Vec<(Policy, Vec<Size>)>,
    /// The least size at which LRU misses no more than the optimum at the size shown.
    pub reached: Option<Size>,
    /// The least number of slots at which the curves are exact.
    pub exact_from: u32,
    /// Slots of each layer; none if the size shown is below the curves.
    pub divided: Option<Divided>,
    /// The layers of the heat maps, by index in the trace.
    pub shown: Vec<u32>,
    /// The similarity of a layer to itself one position earlier; none if no position has a predecessor.
    pub within: Option<Within>,
    /// The similarity of layers to each other.
    pub between: Grid,
}

impl Figures {
    /// A count over all steps and layers as a mean of one.
    pub fn mean(&self, count: u64) -> f64 {
        count as f64 / f64::from(self.setting.steps) / self.layers.len().max(1) as f64
    }

    /// Tokens of the sequence at the end of its last step, and so the most slots that it can fill.
    pub fn tokens(&self) -> u32 {
        self.header.decode_start + self.setting.steps * self.setting.mtp
    }

    /// Misses of a policy at the size shown.
    pub fn shown_misses(&self, policy: Policy) -> Option<u64> {
        let sizes = match policy {
            Policy::Lru => return Some(self.layers.iter().map(|count| count.misses).sum()),
            other => &self.policies.iter().find(|(policy, _)| *policy == other)?.1,
        };
        sizes.iter().find(|size| size.slots == self.setting.slots).map(|size| size.misses)
    }
}

enum Job {
    Pools(Setting),
    Curve,
    Similar,
}

enum Answer {
    Pools(Setting, Outcome),
    Curve(Curves),
    Similar(Option<Within>, Grid),
}

/// The size for the pictures by layer and by step.
fn shown(header: &Header, path: &Path, arguments: &Arguments) -> Result<(Setting, f64)> {
    let settings = args::settings(header, path, arguments)?;
    let usual = settings.iter().find(|(_, share)| *share == SHARE);
    match (arguments.sizes(), settings.as_slice(), usual) {
        (0, _, Some(usual)) => Ok(*usual),
        (_, [one], _) => Ok(*one),
        _ => Err(Error::new(Kind::InvalidConfig, "replay")
            .at("--html shows one size by layer and by step, but several are named")
            .with("sizes", arguments.sizes() as u64)
            .hint(
                "pass one with --prompt-share or --slots; the report shows the misses of every size anyway",
            )),
    }
}

/// The sizes at which policies are compared, including the one shown, ascending.
fn sizes(prompt: u32, slots: u32, share: f64) -> Vec<(u32, f64)> {
    let prompt = f64::from(prompt);
    let mut sizes: Vec<(u32, f64)> =
        SHARES.iter().map(|share| ((share * prompt + 0.5).floor() as u32, *share)).collect();
    sizes.insert(0, (slots, share));
    sizes.retain(|(slots, _)| *slots > 0);
    sizes.sort_by_key(|(slots, _)| *slots);
    sizes.dedup_by_key(|(slots, _)| *slots);
    sizes
}

/// An even selection of layers, by index.
fn picked(layers: u32) -> Vec<u32> {
    (0..layers).step_by(layers.div_ceil(LAYERS).max(1) as usize).collect()
}

/// The most bytes that a job holds: a pool, the curves, or marks for each position.
fn needs(header: &Header, shape: &Shape, jobs: &[Job], setting: Setting) -> Result<u64> {
    let settings = jobs.iter().filter_map(|job| if let Job::Pools(at) = job { Some(*at) } else { None });
    settings
        .map(|at| lru_stack::needs(header, shape, at))
        .try_fold(curve::bytes(header, setting), |most, one| one.map(|one| most.max(one)))
}

/// The sizes at which policies are compared, for a prompt as recorded, and what is counted besides the policies. Small
/// sizes that were not named are left out if the trace is too long for such pools.
fn jobs(header: &Header, prompt: u32, setting: Setting, share: f64) -> (Vec<(u32, f64)>, Vec<Job>) {
    let mut sizes = sizes(prompt, setting.slots, share);
    sizes.retain(|(slots, _)| {
        *slots == setting.slots || lru_stack::can_count(header, Setting { slots: *slots, ..setting })
    });
    // The curve is not exact below the most rows that a step selects; above k x mtp it always is.
    let least = u64::from(header.k) * u64::from(setting.mtp);
    let at_sizes = sizes.iter().map(|(slots, _)| Setting { slots: *slots, ..setting });
    let low = at_sizes.filter(|s| u64::from(s.slots) < least && *s != setting);
    let cold = Setting { warmup: 0, ..setting };
    let mut jobs = vec![Job::Curve, Job::Similar, Job::Pools(setting), Job::Pools(cold)];
    jobs.extend(low.map(Job::Pools));
    (sizes, jobs)
}

/// The peak memory of [`gather`] in bytes, in addition to the trace.
fn peak(recorded: &Header, header: &Header, shape: &Shape, setting: Setting, share: f64) -> Result<u64> {
    let (_, jobs) = jobs(header, recorded.decode_start, setting, share);
    let one = needs(header, shape, &jobs, setting)?;
    let others = policy::bytes(header, setting.steps * setting.mtp);
    Ok(threads::held(jobs.len(), one).max(threads::held(header.layers as usize, others)))
}

/// Counts everything about the trace at `path`.
///
/// # Errors
/// Errors of reading the trace, of a size that does not fit it, and [`Kind::OutOfMemory`].
pub fn gather(path: &Path, shape: &Shape, arguments: &Arguments) -> Result<Figures> {
    let allowance = Allowance { of: Replayed::Selections, memory: arguments.memory.memory };
    let Recorded { header, trace } = selection_trace::read(path, &allowance, |recorded, header| {
        let (setting, share) = shown(recorded, path, arguments)?;
        peak(recorded, header, shape, setting, share).map_err(|e| selection_trace::named(e, path))
    })?;
    let (setting, prompt_share) = shown(&header, path, arguments)?;
    let picked = picked(header.layers);
    let (sizes, jobs) = jobs(trace.header(), header.decode_start, setting, prompt_share);
    let at_sizes = sizes.iter().map(|(slots, _)| Setting { slots: *slots, ..setting });
    let of = |policy: &Policy| {
        let policy = *policy;
        at_sizes.clone().map(move |setting| policy::Job { policy, setting, slots: None })
    };
    let mut policies = STUDIED.to_vec();
    let all: Vec<policy::Job<'_>> = policies.iter().flat_map(of).collect();
    if policy::fading(trace.header(), &all) > policy::FADING_MAX {
        policies.retain(|policy| !policy.fades());
    }
    let studied: Vec<policy::Job<'_>> = policies.iter().flat_map(of).collect();

    let layers = u64::from(header.layers);
    let unit = u64::from(setting.steps) * layers;
    let bar = progress::of_trace(path, unit * (jobs.len() + studied.len()) as u64);
    let bytes = needs(trace.header(), shape, &jobs, setting).map_err(|e| selection_trace::named(e, path))?;
    let answers = threads::each(jobs.len(), bytes, |index| {
        Ok(match jobs[index] {
            Job::Pools(at) => Answer::Pools(at, lru_stack::replay(&trace, shape, at, || bar.inc(layers))?),
            Job::Curve => Answer::Curve(curve::curves(&trace, setting, || bar.inc(unit / layers))?),
            Job::Similar => {
                let within = similarity::within(&trace, &picked, STRETCHES);
                let between = similarity::between(&trace, &picked);
                bar.inc(unit);
                Answer::Similar(within, between)
            }
        })
    })
    .map_err(|e| selection_trace::named(e, path))?;
    let outcomes = policy::replay(&trace, &studied, |steps| bar.inc(steps))
        .map_err(|e| selection_trace::named(e, path))?;
    bar.finish_and_clear();
    let mut figures = Figures::nothing(path, header, setting, prompt_share, picked);
    for (policy, outcomes) in policies.iter().zip(outcomes.chunks(sizes.len())) {
        let points = sizes.iter().zip(outcomes).map(|((slots, prompt_share), outcome)| Size {
            prompt_share: *prompt_share,
            slots: *slots,
            misses: total(outcome),
        });
        figures.policies.push((*policy, points.collect()));
    }
    for answer in answers {
        figures.take(answer, &sizes)?;
    }
    figures.lru.sort_by_key(|size| size.slots);
    figures.lru.dedup_by_key(|size| size.slots);
    Ok(figures)
}

fn total(outcome: &Outcome) -> u64 {
    outcome.layers.iter().map(|(_, misses)| misses).sum()
}

impl Figures {
    /// The figures before anything is counted.
    fn nothing(path: &Path, header: Header, setting: Setting, prompt_share: f64, shown: Vec<u32>) -> Figures {
        Figures {
            path: path.display().to_string(),
            header,
            setting,
            prompt_share,
            layers: Vec::new(),
            warm: Vec::new(),
            cold: Vec::new(),
            lru: Vec::new(),
            policies: Vec::new(),
            reached: None,
            exact_from: 1,
            divided: None,
            shown,
            within: None,
            between: Grid::default(),
        }
    }

    /// Stores a job's result.
    fn take(&mut self, answer: Answer, sizes: &[(u32, f64)]) -> Result<()> {
        let prompt = self.header.decode_start;
        let size = |slots: u32, misses| {
            let asked = sizes.iter().find(|(s, _)| *s == slots).map(|(_, share)| *share);
            let prompt_share = asked.unwrap_or(f64::from(slots) / f64::from(prompt.max(1)));
            Size { prompt_share, slots, misses }
        };
        match answer {
            Answer::Pools(at, outcome) => {
                if at.warmup == self.setting.warmup {
                    self.lru.push(size(at.slots, total(&outcome)));
                }
                if at == self.setting {
                    let count = |(hits, misses): &(u64, u64)| Count { hits: *hits, misses: *misses };
                    self.layers = outcome.layers.iter().map(count).collect();
                    self.warm.clone_from(&outcome.steps);
                }
                if at == (Setting { warmup: 0, ..self.setting }) {
                    self.cold = outcome.steps;
                }
            }
            Answer::Curve(curves) => {
                let named = sizes.iter().map(|(slots, _)| *slots);
                let line = geometric(curves.exact_from(), prompt, POINTS).into_iter().chain(named);
                let exact = line.filter(|slots| *slots >= curves.exact_from());
                self.lru.extend(exact.map(|slots| size(slots, curves.total(slots).1)));
                let optimum = self.shown_misses(Policy::Belady).unwrap_or(0);
                self.reached = reached(&curves, optimum).map(|slots| size(slots, curves.total(slots).1));
                self.exact_from = curves.exact_from();
                self.divided = self.divide(&curves, sizes)?;
            }
            Answer::Similar(within, between) => (self.within, self.between) = (within, between),
        }
        Ok(())
    }

    fn divide(&self, curves: &Curves, sizes: &[(u32, f64)]) -> Result<Option<Divided>> {
        let shown = self.setting.slots;
        if shown < curves.exact_from() || curves.layers.len() < 2 {
            return Ok(None);
        }
        let most = self.tokens();
        let slots = split::by_layer(curves, shown, most)?;
        let by_layer = curves.layers.iter().zip(slots);
        let layers = by_layer.map(|(curve, slots)| (slots, curve.misses(shown), curve.misses(slots)));
        let mut divided = Divided { layers: layers.collect(), sizes: Vec::new() };
        for (slots, _) in sizes.iter().filter(|(slots, _)| *slots >= curves.exact_from()) {
            let misses = split::misses(curves, &split::by_layer(curves, *slots, most)?);
            divided.sizes.push((*slots, misses));
        }
        Ok(Some(divided))
    }
}

/// The least number of slots at which the curves are exact and miss at most `misses`.
fn reached(curves: &Curves, misses: u64) -> Option<u32> {
    let (mut least, mut enough) = (curves.exact_from(), curves.flat_from().max(curves.exact_from()));
    if curves.total(enough).1 > misses {
        return None;
    }
    while least < enough {
        let middle = least + (enough - least) / 2;
        if curves.total(middle).1 <= misses { enough = middle } else { least = middle + 1 }
    }
    Some(enough)
}
