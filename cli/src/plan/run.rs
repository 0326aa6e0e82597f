//! `forebay plan`: computes what fits on a GPU, at which ratio, for how many sequences, and whether to offload.
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
use forebay::predict::weights::{self, Attention, Checkpoint, NODE_GPUS};
use forebay::predict::worth::{self, Aim, Priced};
use forebay::{Error, Kind, Result, Shape};

use super::args::{Arguments, Tables};
use super::deployment::{AttentionName, Deployed};
use super::result::{Gain, Memory, On, Point, Slow};
use super::shards::{Weighed, WeightArguments, fewest_nodes};
use super::{dense, html, json, text};
use crate::input::machine::{self, Linked};
use crate::input::misses::Source;
use crate::input::sizes::{self, Model, Size};
use crate::present::output::{self, Results};
use crate::present::progress;
use crate::study::mean_step;

/// The most plans of one sweep.
const POINTS: usize = 100_000;

/// The model whose cache is planned.
struct Subject {
    /// The preset's name, or the setup's if the setup has a geometry of its own.
    name: String,
    shape: Shape,
    longest: Option<u32>,
    setup: Option<Setup>,
    /// Its published checkpoint; none if there is none.
    checkpoint: Option<Checkpoint>,
}

impl Subject {
    fn preset(model: &Model, longest: Option<u32>) -> Result<Subject> {
        let longest = longest.or_else(|| plan::longest_context(model.name));
        let checkpoint = Checkpoint::of(model.name)?;
        Ok(Subject { name: model.name.to_owned(), shape: model.shape, longest, setup: None, checkpoint })
    }

    /// The model of a setup. The longest context is limited to the setup's.
    fn of(setup: Setup, longest: Option<u32>) -> Result<Subject> {
        let most = setup.dims().context_max;
        if let Some(longest) = longest.filter(|longest| *longest > most) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("--longest is beyond the longest context of the setup's model")
                .with("longest", longest)
                .with("most", most)
                .hint("leave it out, or raise context_max in the setup's dims"));
        }
        let model = &setup.file().model;
        let own = model.shape.is_some() || model.dims.is_some();
        let name = model.preset.as_deref().filter(|_| !own).unwrap_or(setup.name()).to_owned();
        Ok(Subject {
            checkpoint: setup.checkpoint()?,
            name,
            shape: *setup.shape(),
            longest: Some(longest.unwrap_or(most)),
            setup: Some(setup),
        })
    }

    /// The weights on each GPU, from the published checkpoint.
    fn weigh(&self, arguments: &WeightArguments, deployed: &Deployed, query_rows: u32) -> Result<Weighed> {
        let drafts = query_rows > 1 || self.shape.draft_layers > 0;
        match &self.checkpoint {
            Some(checkpoint) => {
                let of_setup = self.setup.as_ref().map(|setup| setup.file().model.weights());
                arguments.weigh(checkpoint, deployed, of_setup, (self.shape, drafts))
            }
            None => Err(Error::new(Kind::InvalidConfig, "plan")
                .at(match arguments.need_checkpoint() {
                    Some(option) => format!("{option}: no checkpoint of {} is known", self.name),
                    None => format!("--weights is not given, and no checkpoint of {} is known", self.name),
                })
                .hint(
                    "pass --weights with the bytes on each GPU, or 0, without options that divide weights",
                )),
        }
    }
}

/// What one plan of the sweep is asked for.
struct Job {
    memory: Rc<Memory>,
    weighed: Option<Rc<Weighed>>,
    demand: Demand,
    accept: f64,
}

/// The values, or the default if there are none.
fn or<T: Clone>(values: &[T], otherwise: T) -> Vec<T> {
    if values.is_empty() { vec![otherwise] } else { values.to_vec() }
}

impl Arguments {
    /// The models whose caches are planned. Without a named model it is the setup's.
    fn subjects(&self) -> Result<Vec<Subject>> {
        let Some(name) = &self.machine.setup else {
            let preset =
                sizes::model(sizes::MODEL).map_err(|what| Error::new(Kind::Internal, "plan").at(what))?;
            let models = or(&self.model, preset);
            return models.iter().map(|model| Subject::preset(model, self.longest)).collect();
        };
        if self.attention == Some(AttentionName::Tp) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("--attention tp: the costs of a setup are for dp attention")
                .hint("plan without --setup, or with --attention dp"));
        }
        let setup = machine::read_setup(name)?;
        if self.micro_batches.is_some_and(|micro_batches| micro_batches > 2) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("--micro-batches: the simulator runs a step as one or two micro-batches")
                .hint("pass 1 or 2, or plan without --setup"));
        }
        let dense_alone = |setup: &Setup| setup.is_dense() && self.modules.shard.is_empty();
        let checked = |setup: Setup| {
            match dense_alone(&setup) {
            true => Err(Error::new(Kind::InvalidConfig, "plan")
                .at("--setup: attention of this model is dense, so that nothing can be offloaded and simulated")
                .hint("pass --shard to plan sharded weights on it, or plan without --setup")),
            false => Ok(setup),
        }
        };
        // The setup's costs are for its own GPUs. For others the library prices the differences, or refuses.
        let on_gpus = |setup: Setup| match self.gpus {
            Some(gpus) => setup.on_gpus(gpus),
            None => Ok(setup),
        };
        if self.model.is_empty() {
            return Ok(vec![Subject::of(checked(on_gpus(setup)?)?, self.longest)?]);
        }
        let of = |model: &Model| Subject::of(checked(on_gpus(setup.of_model(model.name)?)?)?, self.longest);
        self.model.iter().map(of).collect()
    }

    /// The GPUs that serve a model together.
    fn deployed(&self, subject: &Subject) -> Result<Deployed> {
        let fitted = subject.setup.as_ref().map(|setup| &setup.file().deployment);
        let checkpoint = subject.checkpoint.as_ref().filter(|_| self.weights.is_none());
        let node = fitted.map_or(NODE_GPUS, |fitted| fitted.node_gpus);
        let attention = match self.attention {
            Some(AttentionName::Tp) => Attention::Tensor,
            Some(AttentionName::Dp) | None => Attention::Data,
        };
        let checkpoint = checkpoint.map(|checkpoint| checkpoint.name().to_owned());
        let of = |gpus: u32| {
            let heads = self.modules.heads(attention, gpus.min(node));
            Deployed { gpus, node, attention, heads, checkpoint: checkpoint.clone() }
        };
        let gpus = match self.gpus.or(fitted.map(|fitted| fitted.gpus)) {
            Some(gpus) => gpus,
            None => self.default_gpus(subject, node, of)?,
        };
        if !weights::is_deployment(gpus, node) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at(format!(
                    "--gpus {gpus}: not a multiple of a node's {node} GPUs, and not a divisor of them"
                ))
                .hint("pass whole nodes, or half of one, a quarter and so on"));
        }
        Ok(of(gpus))
    }

    /// Without `--gpus` and a setup: one node, or the fewest on which the model's weights leave room for a cache on the
    /// largest GPU that was given.
    fn default_gpus(&self, subject: &Subject, node: u32, of: impl Fn(u32) -> Deployed) -> Result<u32> {
        if self.weights.is_some() || subject.checkpoint.is_none() {
            return Ok(NODE_GPUS);
        }
        let bytes = |size: &Option<Size>| size.as_ref().map_or(0, |size| size.bytes);
        let beside = bytes(&self.activations).saturating_add(bytes(&self.workspace));
        let most = self.gpu.iter().map(|gpu| gpu.bytes).max().unwrap_or(0).saturating_sub(beside);
        let rows = self.mtp.iter().copied().max().unwrap_or(1);
        let least = self.modules.least_gpus(of(node).attention).max(1);
        fewest_nodes(node, least, |gpus| {
            subject.weigh(&self.modules, &of(gpus), rows).map(|weighed| weighed.on_gpu < most)
        })
    }

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

/// A plan that does not fit is a result; an invalid one is an error.
fn fit<T>(planned: Result<T>) -> Result<Result<T>> {
    match planned {
        Err(error) if error.kind() != Kind::OutOfMemory => Err(error),
        planned => Ok(planned),
    }
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
/// Errors of the library's plan, of a sweep that is too large, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
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
