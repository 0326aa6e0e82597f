//! Policies for study: other rules than the production one, over the same steps.
//!
//! `forebay replay --policy` sets them beside LRU, which runs through the production pools. No device runs
//! anything that stands here; the question is only how many rows another rule would have fetched.
//!
//! **Steps** are those of a replay. First `warmup` prompt steps, in which nothing is born; then decode steps
//! of `mtp` query rows, selections united, an incomplete last group dropped. A row that a step selects and
//! that was resident when the step began is a hit, any other a miss; a row born in the step is neither. After
//! the step, before the next one, its rows are born.
//!
//! **A pool** of `slots` rows per layer is empty at the beginning. A step may drop rows that it does not
//! select, never one that it does; it takes every miss into a slot. When its rows alone exceed the slots,
//! all hits stay, nothing else does, and the policy says which misses take the slots left (the others are
//! read from scratch and forgotten); only the optimum may let a hit go as well (`belady`). Between steps the
//! policy chooses freely among resident and born rows; that a born row stays out costs nothing. Rows come back
//! only by being missed.
//!
//! **How**: layer by layer; a layer's steps are united and sorted once for all sizes and policies, each
//! selection with the step that selects the row next ([`Selected::next`], which only the optimum looks at). A
//! ranked pool finds victims by one scan over its slots, as a kernel would.

pub mod belady;
pub mod decay;
pub mod fifo;
pub mod pool;
pub mod ranked;
pub mod s3fifo;
pub mod steps;

use forebay::trace::{Header, SelectionTrace};
use forebay::{Error, Kind, Result};

use self::belady::Belady;
use self::decay::{Decay, Memory};
use self::fifo::Fifo;
use self::pool::Pool;
use self::ranked::{Lru, Rank, Ranked};
use self::s3fifo::S3Fifo;
use self::steps::Steps;
use crate::study::pools::{Outcome, Setting};
use crate::study::threads;

/// The policies of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// The least recently selected row leaves: the production rule.
    Lru,
    /// The row leaves that has been resident longest.
    Fifo,
    /// Three queues: rows fetched once leave early, those hit again later.
    S3Fifo,
    /// The row leaves whose counts of selections, fading by steps, are least.
    Decay,
    /// The same with counts that outlive a row's stay.
    DecayTokens,
    /// The optimum: the row leaves whose next selection is farthest in the future.
    Belady,
}

impl Policy {
    /// As it is written on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Fifo => "fifo",
            Policy::S3Fifo => "s3-fifo",
            Policy::Decay => "decay",
            Policy::DecayTokens => "decay-tokens",
            Policy::Belady => "belady",
        }
    }

    /// Whether it looks at every slot in every step, because what it ranks rows by fades: the others' work is in
    /// proportion to what steps select.
    pub const fn fades(self) -> bool {
        matches!(self, Policy::Decay | Policy::DecayTokens)
    }

    /// An empty pool of `slots` rows, for positions below `positions`, of which a step selects about `rows`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn pool(self, slots: u32, positions: u32, rows: u32) -> Result<Box<dyn Pool>> {
        fn ranked(of: [usize; 3], rank: Result<impl Rank + 'static>) -> Result<Box<dyn Pool>> {
            let [slots, positions, rows] = of;
            Ok(Box::new(Ranked::new(slots, positions, rows, rank?)?))
        }
        let of = [slots, positions, rows].map(|count| count as usize);
        let [slots, positions, _] = of;
        match self {
            Policy::Lru => ranked(of, Lru::new(positions)),
            Policy::Fifo => ranked(of, Fifo::new(positions)),
            Policy::S3Fifo => Ok(Box::new(S3Fifo::new(slots, positions)?)),
            Policy::Decay => ranked(of, Decay::new(positions, Memory::Slots)),
            Policy::DecayTokens => ranked(of, Decay::new(positions, Memory::Tokens)),
            Policy::Belady => ranked(of, Belady::new(positions)),
        }
    }
}

/// Runs one layer's steps through `pool`: its hits, and its misses by decode step.
pub fn run(steps: &Steps, setting: Setting, pool: &mut dyn Pool) -> (u64, Vec<u64>) {
    run_watched(steps, setting, pool, |_, _| ())
}

/// The same. Calls `watch` with each decode step, counted from the first warm-up step, and the pool before it.
pub fn run_watched(
    steps: &Steps,
    setting: Setting,
    pool: &mut dyn Pool,
    mut watch: impl FnMut(u32, &dyn Pool),
) -> (u64, Vec<u64>) {
    for step in steps.warm() - setting.warmup..steps.warm() {
        pool.select(step, steps.selected(step));
    }
    let (mut hits, mut misses) = (0, Vec::with_capacity(setting.steps as usize));
    for group in 0..setting.steps {
        if group > 0 {
            pool.bear(steps.warm() + group - 1, steps.born(group - 1));
        }
        let step = steps.warm() + group;
        watch(step, pool);
        let rows = steps.selected(step);
        let missed = u64::from(pool.select(step, rows));
        hits += rows.len() as u64 - missed;
        misses.push(missed);
    }
    (hits, misses)
}

/// One replay under one policy.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Who leaves a full pool.
    pub policy: Policy,
    /// What is replayed.
    pub setting: Setting,
    /// Slots by layer; the setting's in every layer where there are none.
    pub slots: Option<&'a [u32]>,
}

impl Job<'_> {
    /// An empty pool of a layer, whose steps are `steps`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn pool(&self, layer: usize, steps: &Steps) -> Result<Box<dyn Pool>> {
        let divided = self.slots.and_then(|slots| slots.get(layer));
        let slots = divided.copied().unwrap_or(self.setting.slots);
        self.policy.pool(slots, steps.positions(), steps.mean_rows())
    }

    /// Slots that it passes over in all steps of all layers, where its policy does.
    fn scanned(&self, header: &Header) -> u64 {
        if !self.policy.fades() {
            return 0;
        }
        let Setting { slots, warmup, mtp, steps } = self.setting;
        let most = positions(header, steps * mtp);
        let layers = u64::from(header.layers);
        let slots = match self.slots {
            None => layers * u64::from(slots).min(most),
            Some(slots) => slots.iter().map(|slots| u64::from(*slots).min(most)).sum(),
        };
        (u64::from(steps) + u64::from(warmup)).saturating_mul(slots)
    }
}

/// Slots that fading policies may pass over, all sizes, layers and steps together.
pub const FADING_MAX: u64 = 1 << 37;

/// Slots that fading policies pass over in these jobs.
pub fn fading(header: &Header, jobs: &[Job<'_>]) -> u64 {
    jobs.iter().map(|job| job.scanned(header)).fold(0, u64::saturating_add)
}

/// Refuses fading policies over more slots than [`FADING_MAX`].
///
/// # Errors
/// [`Kind::OutOfRange`] says how many they are.
pub fn check_fading(header: &Header, jobs: &[Job<'_>]) -> Result<()> {
    let scanned = fading(header, jobs);
    if scanned <= FADING_MAX {
        return Ok(());
    }
    Err(Error::new(Kind::OutOfRange, "study policies")
        .at("decay and decay-tokens look at every slot in every step, and these are too many")
        .with("slots looked at", scanned)
        .with("most", FADING_MAX)
        .hint("pass a smaller --slots or --prompt-share, other policies, or a trace of fewer steps"))
}

/// Bytes that one pool holds for each position, and a layer's steps for each member, at most.
const POSITION: u64 = 64;
const MEMBER: u64 = 8;

/// Bytes that the steps of a layer and one pool hold, for `rows` decode rows.
pub fn bytes(header: &Header, rows: u32) -> u64 {
    let members = header.members() / u64::from(header.layers.max(1));
    POSITION * positions(header, rows) + MEMBER * members
}

/// Positions that a sequence reaches in `rows` decode rows.
pub fn positions(header: &Header, rows: u32) -> u64 {
    u64::from(header.decode_start) + u64::from(rows)
}

/// Replays the trace under every job, which agree on `mtp` and may differ in slots, warm-up and steps; layers on
/// all cores. Calls `progress` with the steps of each job and layer.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`].
pub fn replay(
    trace: &SelectionTrace,
    jobs: &[Job<'_>],
    progress: impl Fn(u64) + Sync,
) -> Result<Vec<Outcome>> {
    let empty = |setting: &Setting| Outcome { layers: Vec::new(), steps: vec![0; setting.steps as usize] };
    let mut outcomes: Vec<Outcome> = jobs.iter().map(|job| empty(&job.setting)).collect();
    let Some(mtp) = jobs.first().map(|job| job.setting.mtp) else { return Ok(outcomes) };
    let warm = jobs.iter().map(|job| job.setting.warmup).max().unwrap_or(0);
    let groups = jobs.iter().map(|job| job.setting.steps).max().unwrap_or(0);
    check_fading(trace.header(), jobs)?;
    let layers =
        threads::each(trace.header().layers as usize, bytes(trace.header(), groups * mtp), |layer| {
            let steps = Steps::new(trace, layer as u32, warm, mtp, groups)?;
            let run = |job: &Job<'_>| {
                let mut pool = job.pool(layer, &steps)?;
                let found = run(&steps, job.setting, pool.as_mut());
                progress(u64::from(job.setting.steps));
                Ok(found)
            };
            jobs.iter().map(run).collect::<Result<Vec<_>>>()
        })?;
    for layer in layers {
        for ((hits, misses), outcome) in layer.into_iter().zip(&mut outcomes) {
            outcome.layers.push((hits, misses.iter().sum()));
            outcome.steps.iter_mut().zip(misses).for_each(|(sum, step)| *sum += step);
        }
    }
    Ok(outcomes)
}
