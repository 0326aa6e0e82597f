//! `forebay plan` of a decode instance: computes what fits on a GPU, at which ratio, for how many sequences, and
//! whether to offload.
//!
//! A plan is for one GPU of a deployment ([`Deployed`]); the figures of all its GPUs and of a node follow from it.
//! Lists of values make a sweep: one plan for each combination. A plan of a sweep that does not fit becomes a line
//! that says so. An invalid plan is an error, and so is a single plan that does not fit.

use std::collections::HashMap;
use std::rc::Rc;

use forebay::predict::plan::{self, Batch, Demand, FEW_SLOTS, Note, Ratio};
use forebay::predict::setup::{Costs, Setup};
use forebay::predict::sharded::{self, Asked, Compared};
use forebay::predict::simulate::Options;
use forebay::predict::worth::{self, Aim, Priced};
use forebay::{Error, Kind, Result, Shape};

use super::args::{Arguments, Tables};
use super::deployment::Deployed;
use super::prefill::args::Role;
use super::result::{Gain, Memory, On, Point, Slow};
use super::shards::Weighed;
use super::subject::{Subject, fit, or};
use super::{dense, html, json, prefill, text};
use crate::input::machine::{self, Linked};
use crate::input::misses::Source;
use crate::input::sizes::Size;
use crate::present::output::{self, Results};
use crate::present::progress;
use crate::study::mean_step;

/// The most plans of one sweep.
const POINTS: usize = 100_000;

/// What one plan of the sweep is asked for.
struct Job {
    memory: Rc<Memory>,
    weighed: Option<Rc<Weighed>>,
    demand: Demand,
    accept: f64,
}

impl Arguments {
    /// The given sizes of memory, for one of the GPUs.
    fn memory(&self, gpu: &Size) -> Rc<Memory> {
        Rc::new(Memory {
            gpu: gpu.clone(),
            weights: self.weights.clone(),
            activations: self.activations.clone(),
            workspace: self.workspace.clone(),
            host: self.host.clone(),
        })
    }

    /// Every combination for one model, up to a limit, in the order of the command line.
    fn jobs(&self, subject: &Subject, subjects: usize) -> Result<Vec<Job>> {
        let mtps = or(&self.mtp, 1);
        let accepts = machine::accepts("plan", &self.accept, &mtps)?;
        let (batches, ratios) = (or(&self.batch, Batch::Most), or(&self.ratio, Ratio::Auto));
        let lists = [subjects, self.gpu.len(), self.context.len(), mtps.len(), batches.len(), ratios.len()];
        let points = lists.iter().try_fold(1_usize, |all, list| all.checked_mul(*list));
        if points.is_none_or(|points| points > POINTS) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("the sweep has too many combinations")
                .with("most", POINTS as u64)
                .hint("pass fewer values"));
        }
        let deployed = self.deployed(subject)?;
        let mut weighed = HashMap::new();
        for mtp in mtps.iter().filter(|_| self.weights.is_none()) {
            weighed.insert(*mtp, Rc::new(subject.weigh(&self.modules, &deployed, *mtp)?));
        }
        let mut jobs = Vec::new();
        for memory in self.gpu.iter().map(|gpu| self.memory(gpu)) {
            for (context, (mtp, accept)) in self
                .context
                .iter()
                .flat_map(|context| mtps.iter().zip(&accepts).map(move |mtp| (*context, mtp)))
            {
                for (batch, ratio) in
                    batches.iter().flat_map(|b| ratios.iter().map(move |ratio| (*b, *ratio)))
                {
                    let mut demand = self.demand(subject, &memory, context, batch);
                    (demand.query_rows, demand.ratio) = (*mtp, ratio);
                    let weighed = weighed.get(mtp).cloned();
                    demand.weights = match (&memory.weights, &weighed) {
                        (Some(given), _) => given.bytes,
                        (None, weighed) => weighed.as_ref().map_or(0, |weighed| weighed.on_gpu),
                    };
                    jobs.push(Job { memory: memory.clone(), weighed, demand, accept: *accept });
                }
            }
        }
        Ok(jobs)
    }

    fn demand(&self, subject: &Subject, memory: &Memory, context: u32, batch: Batch) -> Demand {
        let bytes = |size: &Option<Size>| size.as_ref().map(|size| size.bytes);
        let host_stride = self.host_stride.unwrap_or(subject.shape.host_stride);
        let shape = Shape { host_stride, ..subject.shape };
        Demand {
            longest: subject.longest,
            batch,
            activations: bytes(&memory.activations).unwrap_or(0),
            workspace: bytes(&memory.workspace).unwrap_or(0),
            host: bytes(&memory.host),
            micro_batches: self.micro_batches.unwrap_or_else(|| micro_batches(subject, context, batch)),
            least_slots: self.least_slots.unwrap_or(FEW_SLOTS),
            count_tables: self.tables != Some(Tables::Beside),
            ..Demand::new(shape, memory.gpu.bytes, context)
        }
    }
}

/// The number of micro-batches: as many as the setup ever runs at that context, or as it runs at a given batch.
fn micro_batches(subject: &Subject, context: u32, batch: Batch) -> u32 {
    let Some(setup) = &subject.setup else { return 2 };
    let batch = match batch {
        Batch::Sequences(batch) => batch,
        Batch::Most => u32::MAX,
    };
    if setup.two_batch(batch, context) { 2 } else { 1 }
}

/// Makes the plans, without their times.
fn plain(subject: &Subject, deployed: &Deployed, job: &Job) -> Result<Point> {
    Ok(Point {
        model: subject.name.clone(),
        deployed: deployed.clone(),
        demand: job.demand.clone(),
        memory: job.memory.clone(),
        weighed: job.weighed.clone(),
        on: None,
        planned: fit(plan::plan(&job.demand))?,
        compared: None,
        unknown: None,
        gain: None,
        alone: None,
    })
}

/// Makes and simulates the plans. If the yield is unknown, the plan remains without a time.
fn priced(
    arguments: &Arguments,
    subject: &Subject,
    deployed: &Deployed,
    job: &Job,
    on: &On,
    linked: &mut Linked,
    source: &mut Source,
) -> Result<Point> {
    let Job { demand, accept, .. } = job;
    let simulator = &mut linked.simulator;
    let mut point =
        Point { on: Some(On { accept: *accept, ..on.clone() }), ..plain(subject, deployed, job)? };
    // A replayed trace counts at one ratio, and a search for the best batch does not know the ratio in advance.
    let Ok(frame) = &point.planned else { return Ok(point) };
    let setup = simulator.setup();
    let misses = match source.at(setup, frame.ratio, demand.query_rows) {
        Err(error) if worth::is_unknown(&error) => return Ok(point.unknown_by(error)),
        misses => misses?,
    };
    let by_layer = misses.as_ref().or(setup.file().misses.as_ref()).and_then(mean_step::mean);
    let options = Options {
        misses: by_layer.or(misses),
        two_batch: arguments.micro_batches.map(|micro_batches| micro_batches > 1),
        ..Options::default()
    };
    let aim = Aim { accept: *accept, least_otps: arguments.min_otps.unwrap_or(0.0) };
    let search = (demand.batch, demand.ratio) == (Batch::Most, Ratio::Auto) && !source.is_trace();
    let (mut curve, mut pays_from, mut slow) = (Vec::new(), None, Slow::Nothing);
    let found = if search {
        worth::worth(demand, aim, &options, simulator).map(|worth| {
            let of =
                |priced: &Priced| (priced.planned.batch, priced.planned.ratio, priced.outcome.throughput);
            curve = worth.without.iter().chain(&worth.with).map(of).collect();
            let most = worth.most().cloned();
            point.alone = worth.alone;
            slow = match worth.best {
                None if !worth.with.is_empty() => Slow::All,
                _ if worth.more_too_slow => Slow::More,
                _ => Slow::Nothing,
            };
            // If the search ended early, larger batches might pay.
            let ended = |most: &Priced| most.planned.notes.contains(&Note::Untried);
            pays_from = match worth.pays_from {
                None if most.as_ref().is_some_and(ended) => None,
                known => Some(known),
            };
            most
        })
    } else {
        worth::price(demand, aim, &options, simulator).map(Some)
    };
    match found {
        Ok(Some(Priced { planned, outcome, without })) => {
            point.planned = Ok(planned);
            point.gain = Some(Gain { outcome, without, slow, pays_from, curve });
        }
        // Not even one sequence is fast enough, so no batch is.
        Ok(None) => {
            if let Ok(planned) = &mut point.planned {
                planned.notes.push(Note::TooSlow);
            }
        }
        Err(error) if worth::is_unknown(&error) => return Ok(point.unknown_by(error)),
        Err(error) => return Err(error),
    }
    Ok(point)
}

/// What sharding gives on `setup`; none without shards. Costs that do not reach are a result.
fn compared(setup: &Setup, job: &Job) -> Result<Option<Result<Compared>>> {
    let Some(weighed) = &job.weighed else { return Ok(None) };
    let Some(sharded) = &weighed.sharded else { return Ok(None) };
    let Job { demand, accept, .. } = job;
    let asked = Asked {
        setup,
        plan: &sharded.plan,
        demand,
        unsharded: weighed.unsharded,
        by_heads: Some(weighed.by_heads),
        accept: *accept,
    };
    match asked.compare() {
        Err(error) if !worth::is_unknown(&error) => Err(error),
        compared => Ok(Some(compared)),
    }
}

/// All plans of one model.
fn planned(
    arguments: &Arguments,
    subject: &Subject,
    jobs: &[Job],
    mut done: impl FnMut(Point),
) -> Result<()> {
    let deployed = arguments.deployed(subject)?;
    let Some(setup) = &subject.setup else {
        return jobs.iter().try_for_each(|job| plain(subject, &deployed, job).map(&mut done));
    };
    let mut source = arguments.machine.source(setup)?;
    let note = source.note(setup, jobs.iter().map(|job| job.demand.context));
    for mut linked in arguments.machine.of(setup)? {
        let on = On {
            provenance: match arguments.modules.shard.is_empty() {
                true => source.provenance(linked.simulator.setup()),
                false => source.provenance(linked.simulator.setup()).with_assumptions(&sharded::ASSUMPTIONS),
            },
            link: linked.link.clone(),
            accept: 1.0,
            gpu: setup.file().gpu.memory_gib * f64::from(1 << 30),
            by_roofline: setup.file().costs == Costs::default(),
            misses_note: note.clone(),
        };
        for job in jobs {
            let compared = compared(linked.simulator.setup(), job)?;
            let point = match setup.is_dense() {
                // The simulator has no step that selects nothing.
                true => Point {
                    on: Some(On { accept: job.accept, ..on.clone() }),
                    ..plain(subject, &deployed, job)?
                },
                false => priced(arguments, subject, &deployed, job, &on, &mut linked, &mut source)?,
            };
            done(Point { compared, ..point });
        }
    }
    Ok(())
}

/// Plans every combination. A plan that does not fit is an error only if none fits.
fn sweep(arguments: &Arguments) -> Result<Vec<Point>> {
    let subjects = arguments.subjects()?;
    let mut points = Vec::new();
    let jobs: Vec<Vec<Job>> =
        subjects.iter().map(|subject| arguments.jobs(subject, subjects.len())).collect::<Result<_>>()?;
    let all = jobs.iter().map(Vec::len).sum::<usize>() * arguments.machine.links();
    let bar = progress::bar("plan", all as u64);
    for (subject, jobs) in subjects.iter().zip(&jobs) {
        planned(arguments, subject, jobs, |point| {
            points.push(point);
            bar.inc(1);
        })?;
    }
    bar.finish_and_clear();
    let fits = points.iter().any(|point| point.planned.is_ok());
    match points.iter().find_map(|point| point.planned.as_ref().err()) {
        Some(error) if !fits => Err(error.clone()),
        _ => Ok(points),
    }
}

/// `forebay plan`.
///
/// # Errors
/// Errors of the library's plan, of options of the other role, of a sweep that is too large, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    prefill::check_role(arguments)?;
    if arguments.prefill.role == Role::Prefill {
        return prefill::command(arguments);
    }
    if !arguments.dense.is_empty() {
        return dense::command(arguments);
    }
    let targets = [("--json", arguments.json.as_deref()), ("--html", arguments.html.as_deref())];
    output::check_targets("plan", &targets, &arguments.machine.inputs())?;
    let points = sweep(arguments)?;
    let least_otps = arguments.min_otps.unwrap_or(0.0);
    let mut results = Results::default();
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&points, least_otps)?);
    }
    if let Some(path) = &arguments.html {
        results.write(path, html::page(&points, least_otps));
    } else if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&points, least_otps, look)));
    }
    results.deliver()
}
