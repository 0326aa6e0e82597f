//! Policies for study: other eviction rules than the production one, over the same steps.
//!
//! `forebay replay --policy` compares them with LRU, which runs through the production pools. No device runs
//! these policies; they only count how many rows another rule would have fetched.
//!
//! **Steps** are those of a replay. First `warmup` prompt steps, in which nothing is born; then decode steps of `mtp`
//! query rows, with their selections united; an incomplete last group is dropped. A row that a step selects and that
//! was resident when the step began is a hit, any other selected row a miss; a row born in the step is neither. The
//! rows of a step are born after it, before the next one.
//!
//! **A pool** of `slots` rows per layer is empty at the beginning. A step may evict rows that it does not select, and
//! no others; it takes every miss into a slot. If its rows alone exceed the slots, all hits stay, all other rows are
//! evicted, and the policy decides which misses take the remaining slots (the others are read from scratch slots and
//! forgotten); only the optimum may evict a hit as well (`belady`). Between steps the policy chooses freely among
//! resident and born rows; leaving out a born row costs nothing. A row returns only by a miss.
//!
//! **Implementation**: layer by layer. A layer's steps are united and sorted once for all sizes and policies, each
//! selection with the step that selects the row next ([`Selected::next`], which only the optimum uses). A
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
    /// Evicts the least recently selected row: the production rule.
    Lru,
    /// Evicts the row that has been resident longest.
    Fifo,
    /// Evicts rows fetched once early, and rows hit again later, with three queues.
    S3Fifo,
    /// Evicts the row with the least fading counts of selections.
    Decay,
    /// The same, with counts that survive a row's eviction.
    DecayTokens,
    /// The optimum: evicts the row whose next selection is farthest in the future.
    Belady,
}

impl Policy {
    /// Its name on the command line and in JSON.
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

    /// Whether it scans every slot in every step, because its ranks fade. The work of the other policies is
    /// proportional to the steps' selections.
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

/// Runs one layer's steps through `pool`. Returns its hits, and its misses by decode step.
pub fn run(steps: &Steps, setting: Setting, pool: &mut dyn Pool) -> (u64, Vec<u64>) {
    run_watched(steps, setting, pool, |_, _| ())
}

/// As [`run`]. Calls `watch` with each decode step, counted from the first warm-up step, and the pool before it.
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
    /// The eviction policy.
    pub policy: Policy,
    /// The replayed setting.
    pub setting: Setting,
    /// Slots of each layer; if empty, every layer has the setting's.
    pub slots: Option<&'a [u32]>,
}

impl Job<'_> {
    /// An empty pool of a layer with these steps.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn pool(&self, layer: usize, steps: &Steps) -> Result<Box<dyn Pool>> {
        let divided = self.slots.and_then(|slots| slots.get(layer));
        let slots = divided.copied().unwrap_or(self.setting.slots);
        self.policy.pool(slots, steps.positions(), steps.mean_rows())
    }

    /// Slots that it scans in all steps of all layers, if its policy does.
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

/// The most slots that fading policies may scan, all sizes, layers and steps together.
pub const FADING_MAX: u64 = 1 << 37;

/// Slots that fading policies scan in these jobs.
pub fn fading(header: &Header, jobs: &[Job<'_>]) -> u64 {
    jobs.iter().map(|job| job.scanned(header)).fold(0, u64::saturating_add)
}

/// Refuses fading policies over more slots than [`FADING_MAX`].
///
/// # Errors
/// [`Kind::OutOfRange`] with their number.
pub fn check_fading(header: &Header, jobs: &[Job<'_>]) -> Result<()> {
    let scanned = fading(header, jobs);
    if scanned <= FADING_MAX {
        return Ok(());
    }
    Err(Error::new(Kind::OutOfRange, "study policies")
        .at("decay and decay-tokens scan every slot in every step, which is too many here")
        .with("slots scanned", scanned)
        .with("most", FADING_MAX)
        .hint("pass a smaller --slots or --prompt-share, other policies, or a trace of fewer steps"))
}

/// The most bytes that one pool holds for each position, and a layer's steps for each member.
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

/// Replays the trace for every job; jobs share `mtp` and may differ in slots, warm-up and steps. Layers run on
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
