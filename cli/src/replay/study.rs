//! Replays a selection trace at every size, under every requested policy and split, on all cores.
//!
//! LRU runs through the production pools, one job a thread. The other policies and the prefetch are simulated
//! layer by layer, one layer a thread. Every count is a sum over layers or steps in a fixed order, so the
//! result does not depend on the threads.

use forebay::trace::{Header, SelectionTrace};
use forebay::{Result, Shape};
use indicatif::ProgressBar;

use super::result::{Count, Divided, FIRST_STEPS, Replay};
use crate::input::device::{DeviceName, Target};
use crate::policy::{self, Policy};
use crate::study::curve::{self, Curves};
use crate::study::lru_stack::{self, How};
use crate::study::pools::{self, Outcome, Setting};
use crate::study::prefetch::{self, Prefetched};
use crate::study::{split, threads};

/// What is counted at every size.
pub struct Study {
    /// The policies, each once.
    pub policies: Vec<Policy>,
    /// Whether to compare slots divided by gain with the uniform split.
    pub by_layer: bool,
    /// The inter-layer prefetch to count.
    pub prefetch: bool,
    /// The device of the pools.
    pub target: Target,
}

/// One size under one policy.
struct Job {
    policy: Policy,
    setting: Setting,
    prompt_share: f64,
    /// Slots of each layer, if they are divided by gain.
    divided: Option<Vec<u32>>,
}

/// The first steps separately: a short replay that starts cold.
fn beginning(setting: Setting) -> Setting {
    Setting { warmup: 0, steps: setting.steps.min(FIRST_STEPS), ..setting }
}

/// A whole replay, and its first steps from a cold start.
type Outcomes = (Outcome, Outcome);

impl Study {
    /// The steps of one layer that [`Study::run`] processes, which its bar counts.
    pub fn work(&self, trace: &SelectionTrace, settings: &[(Setting, f64)]) -> u64 {
        let Some((setting, _)) = settings.first() else { return 0 };
        let (whole, cold) = (u64::from(setting.steps), u64::from(beginning(*setting).steps));
        let jobs = (settings.len() * self.policies.len()) as u64 * if self.by_layer { 2 } else { 1 };
        let a_job = whole + cold + if self.prefetch { whole } else { 0 };
        (jobs * a_job + if self.by_layer { whole } else { 0 }) * u64::from(trace.header().layers)
    }

    /// The peak memory of [`Study::run`] in bytes, in addition to the trace.
    ///
    /// # Errors
    /// Errors of invalid pools.
    pub fn needs(&self, header: &Header, shape: &Shape, settings: &[(Setting, f64)]) -> Result<u64> {
        let Some((setting, _)) = settings.first() else { return Ok(0) };
        let layers = header.layers as usize;
        let one_policy = policy::bytes(header, setting.steps * setting.mtp);
        let mut needs = 0;
        if self.by_layer {
            needs = needs.max(curve::bytes(header, *setting));
        }
        if self.policies.contains(&Policy::Lru) {
            let jobs = settings.len() * if self.by_layer { 2 } else { 1 };
            needs = needs.max(threads::held(jobs, self.of_lru(header, shape, settings)?));
        }
        // Divided slots have the same total: the same work again.
        let times = if self.by_layer { 2 } else { 1 };
        let of = |policy: &Policy| {
            let policy = *policy;
            let job = move |setting| policy::Job { policy, setting, slots: None };
            let both = |(setting, _): &(Setting, f64)| [*setting, beginning(*setting)];
            settings.iter().flat_map(both).flat_map(move |one| std::iter::repeat_n(one, times)).map(job)
        };
        policy::check_fading(header, &self.policies.iter().flat_map(of).collect::<Vec<_>>())?;
        if self.policies.iter().any(|policy| *policy != Policy::Lru) {
            needs = needs.max(threads::held(layers, one_policy));
        }
        if self.prefetch {
            needs = needs.max(threads::held(layers, prefetch::bytes(header, *setting)));
        }
        Ok(needs)
    }

    /// Bytes that the largest replay of the production rule holds.
    fn of_lru(&self, header: &Header, shape: &Shape, settings: &[(Setting, f64)]) -> Result<u64> {
        let layers = header.layers as usize;
        let uniform = |setting: Setting| match self.target.name {
            DeviceName::Host => lru_stack::needs(header, shape, setting),
            DeviceName::Cuda(_) => pools::needs(header, shape, setting, &vec![setting.slots; layers]),
        };
        // The slots of each layer are not known yet. Their total is, and no layer gets more than it can fill, so they
        // are counted like uniform ones.
        let divided = |setting: Setting| {
            let uniform = vec![setting.slots; layers];
            let most = setting.slots.saturating_mul(header.layers);
            match (self.target.name, How::of(header, setting, &uniform)) {
                (DeviceName::Host, How::Stack) => lru_stack::needs(header, shape, setting),
                _ => pools::needs(header, shape, setting, &vec![most; layers]),
            }
        };
        settings.iter().try_fold(0, |most: u64, (setting, _)| {
            let divided = if self.by_layer { divided(*setting)? } else { 0 };
            Ok(most.max(uniform(*setting)?).max(divided))
        })
    }

    /// Runs every replay, in order of size, policy and split. The prompt was recorded with `prompt` tokens; the
    /// replayed one may be shorter.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`]; any other error is a defect.
    pub fn run(
        &self,
        trace: &SelectionTrace,
        prompt: u32,
        shape: &Shape,
        settings: &[(Setting, f64)],
        bar: &ProgressBar,
    ) -> Result<Vec<Replay>> {
        let jobs = self.jobs(trace, prompt, settings, bar)?;
        let mut produced = self.produce(trace, shape, &jobs, bar)?.into_iter();
        let mut simulated = simulate(trace, &jobs, bar)?.into_iter();
        let mut prefetched =
            if self.prefetch { prefetch(trace, &jobs, bar)? } else { Vec::new() }.into_iter();
        let mut replays: Vec<Replay> = Vec::with_capacity(jobs.len());
        for Job { policy, setting, prompt_share, divided } in jobs {
            let outcomes = if policy == Policy::Lru { produced.next() } else { simulated.next() };
            let Some((outcome, cold)) = outcomes else { continue };
            let layers = outcome.layers.into_iter().map(|(hits, misses)| Count { hits, misses }).collect();
            let uniform_misses = replays.last().map_or(0, |uniform| uniform.total().misses);
            let divided = divided.map(|slots| Divided { slots, uniform_misses });
            let mut first = outcome.steps;
            first.truncate(FIRST_STEPS as usize);
            let (prefetched, cold) = (prefetched.next(), cold.steps);
            replays.push(Replay { setting, policy, divided, prompt_share, layers, prefetched, first, cold });
        }
        Ok(replays)
    }

    fn jobs(
        &self,
        trace: &SelectionTrace,
        prompt: u32,
        settings: &[(Setting, f64)],
        bar: &ProgressBar,
    ) -> Result<Vec<Job>> {
        let curves = match settings.first() {
            Some((setting, _)) if self.by_layer => {
                curve::curves(trace, *setting, || bar.inc(u64::from(setting.steps)))?
            }
            _ => Curves::default(),
        };
        let mut jobs = Vec::new();
        for (setting, share) in settings {
            let most = prompt + setting.steps * setting.mtp;
            let divided = match self.by_layer {
                true => Some(split::by_layer(&curves, setting.slots, most)?),
                false => None,
            };
            for policy in &self.policies {
                let job = |divided| Job { policy: *policy, setting: *setting, prompt_share: *share, divided };
                jobs.push(job(None));
                jobs.extend(divided.clone().map(|slots| job(Some(slots))));
            }
        }
        Ok(jobs)
    }

    /// The jobs of the production rule, in order.
    fn produce(
        &self,
        trace: &SelectionTrace,
        shape: &Shape,
        jobs: &[Job],
        bar: &ProgressBar,
    ) -> Result<Vec<Outcomes>> {
        let jobs: Vec<&Job> = jobs.iter().filter(|job| job.policy == Policy::Lru).collect();
        let layers = trace.header().layers;
        let settings: Vec<_> = jobs.iter().map(|job| (job.setting, job.prompt_share)).collect();
        let bytes = self.of_lru(trace.header(), shape, &settings)?;
        threads::each(jobs.len(), bytes, |index| {
            let Job { setting, divided, .. } = jobs[index];
            let slots = divided.clone().unwrap_or_else(|| vec![setting.slots; layers as usize]);
            let step = || bar.inc(u64::from(layers));
            // The first steps use the implementation of the whole replay, divided slots that of uniform ones: the
            // memory was computed for it.
            let how = How::of(trace.header(), *setting, &vec![setting.slots; layers as usize]);
            let run = |setting| match self.target.name {
                DeviceName::Host => lru_stack::replay_by_layer(how, trace, shape, setting, &slots, step),
                DeviceName::Cuda(_) => {
                    pools::replay_on(self.target.open()?, trace, shape, setting, &slots, step)
                }
            };
            Ok((run(*setting)?, run(beginning(*setting))?))
        })
    }
}

impl Job {
    /// The job as a simulator runs it.
    fn simulated(&self, setting: Setting) -> policy::Job<'_> {
        policy::Job { policy: self.policy, setting, slots: self.divided.as_deref() }
    }
}

/// The jobs of the other policies, in order.
fn simulate(trace: &SelectionTrace, jobs: &[Job], bar: &ProgressBar) -> Result<Vec<Outcomes>> {
    let jobs = jobs.iter().filter(|job| job.policy != Policy::Lru);
    let both: Vec<_> =
        jobs.flat_map(|job| [job.simulated(job.setting), job.simulated(beginning(job.setting))]).collect();
    let mut outcomes = policy::replay(trace, &both, |steps| bar.inc(steps))?.into_iter();
    Ok(std::iter::from_fn(|| outcomes.next().zip(outcomes.next())).collect())
}

/// The prefetch counts of each layer of each job.
fn prefetch(trace: &SelectionTrace, jobs: &[Job], bar: &ProgressBar) -> Result<Vec<Vec<Prefetched>>> {
    let jobs: Vec<_> = jobs.iter().map(|job| job.simulated(job.setting)).collect();
    prefetch::inter_layer(trace, &jobs, |steps| bar.inc(steps))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Sets of 8 distant positions, some of which stay selected from step to step, in layers that share some.
    fn sparse(seed: u64) -> SelectionTrace {
        let (layers, steps, first, k) = (3_u32, 60_u32, 1_000_000_u32, 8_usize);
        let json = format!(
            r#"{{"layers":{layers},"k":{k},"steps":{steps},"warm_steps":10,"first_position":{first},
            "decode_start":{},"context":{}}}"#,
            first + 10,
            first + steps
        );
        let mut state = seed;
        let mut chance = |below: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % below
        };
        let mut members = Vec::new();
        let mut sets = vec![std::collections::BTreeSet::new(); layers as usize];
        for step in 0..steps {
            for set in &mut sets {
                set.retain(|_| chance(3) > 0);
                while set.len() < k {
                    let far = chance(40) * 24_989;
                    set.insert(if chance(4) == 0 { first + chance(step + 1) } else { far });
                }
                members.extend(set.iter().copied());
            }
        }
        SelectionTrace::new(serde_json::from_str(&json).map(numbered).unwrap(), members).unwrap()
    }

    fn numbered(header: forebay::trace::Header) -> forebay::trace::Header {
        forebay::trace::Header { layer_ids: (0..header.layers).collect(), ..header }
    }

    /// Every policy, split, curve and prefetch over a prompt of a million positions, and over only the forty selected
    /// ones.
    #[test]
    fn a_compact_trace_gives_the_same_counts() {
        use clap::ValueEnum;
        for seed in [1, 2] {
            let whole = sparse(seed);
            let prompt = whole.header().decode_start;
            let compact = whole.clone().compact().unwrap();
            assert!(compact.header().decode_start < 60);
            for mtp in [1, 3] {
                let setting = |slots| Setting { slots, warmup: 5, mtp, steps: 50 / mtp };
                let settings = [(setting(5), 0.0), (setting(20), 0.0), (setting(45), 0.0)];
                let policies = Policy::value_variants().to_vec();
                let study = Study { policies, by_layer: true, prefetch: true, target: Target::default() };
                let [a, b] = [&whole, &compact].map(|trace| {
                    let bar = ProgressBar::hidden();
                    study.run(trace, prompt, &Shape::DEEPSEEK_V3_2, &settings, &bar).unwrap()
                });
                assert_eq!(a.len(), b.len());
                for (a, b) in a.iter().zip(&b) {
                    let name = (a.policy.name(), a.setting.slots, a.divided.is_some());
                    assert_eq!((&a.layers, &a.first, &a.cold), (&b.layers, &b.first, &b.cold), "{name:?}");
                    assert_eq!(a.prefetched, b.prefetched, "{name:?}");
                    let slots = |replay: &Replay| replay.divided.as_ref().map(|d| d.slots.clone());
                    assert_eq!(slots(a), slots(b), "{name:?}");
                }
                let [a, b] = [&whole, &compact].map(|t| curve::curves(t, setting(9), || ()).unwrap());
                assert_eq!(a, b);
            }
        }
    }

    #[test]
    fn the_progress_bar_ends_with_the_work() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
        let trace = SelectionTrace::read(&path).unwrap();
        let setting = |slots| Setting { slots, warmup: 32, mtp: 2, steps: 20 };
        let settings = [(setting(1000), 0.1), (setting(1200), 0.2)];
        for (policies, by_layer, prefetch) in [
            (vec![Policy::Lru], false, false),
            (vec![Policy::Lru, Policy::Fifo, Policy::Belady], false, true),
            (vec![Policy::Lru, Policy::Decay], true, true),
        ] {
            let (target, prompt) = (Target::default(), trace.header().decode_start);
            let study = Study { policies, by_layer, prefetch, target };
            let bar = ProgressBar::hidden();
            let replays = study.run(&trace, prompt, &Shape::DEEPSEEK_V3_2, &settings, &bar).unwrap();
            assert_eq!(replays.len(), 2 * study.policies.len() * if by_layer { 2 } else { 1 });
            assert_eq!(bar.position(), study.work(&trace, &settings));
        }
    }
}
