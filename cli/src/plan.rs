//! `forebay plan`: computes what fits on a GPU, at which ratio, for how many sequences, and whether to offload.
//!
//! A plan is for one GPU of a deployment ([`Deployed`]); the figures of all its GPUs and of a node follow from it.
//! Lists of values make a sweep: one plan for each combination. A plan of a sweep that does not fit becomes a line
//! that says so. An invalid plan is an error, and so is a single plan that does not fit.

use std::path::PathBuf;
use std::rc::Rc;

use clap::ValueEnum;
use forebay::predict::plan::{self, Batch, Demand, FEW_SLOTS, Note, Planned, Ratio};
use forebay::predict::provenance::Provenance;
use forebay::predict::setup::{Costs, Setup};
use forebay::predict::simulate::{Options, Outcome};
use forebay::predict::weights::{self, Attention, Checkpoint, NODE_GPUS};
use forebay::predict::worth::{self, Aim, Baseline, Priced};
use forebay::{Error, Kind, Result, Shape};

use crate::deployment::{AttentionName, Deployed};
use crate::look::LookArguments;
use crate::miss_source::Source;
use crate::output::Results;
use crate::simulate::{self, Linked, Machine};
use crate::sizes::{self, Model, Size};
use crate::{html, output, plan_json, plan_report, replay, steps};

/// The most plans of one sweep.
const POINTS: usize = 100_000;

const AFTER_HELP: &str = "\
A node of 8 H200 serves DeepSeek-V3.2 at 64K. Does offload pay, at which batch and ratio, and how much?

  forebay plan --setup ess --gpus 8 --gpu 141GB --workspace 8GB \\
      --context 64K --mtp 2 --accept 1.7

Lists, separated by commas, make a sweep: one plan for each combination.
Sizes have a unit: 80GiB, 141GB. Tokens: 4096, 32K (of 1024 each).
A batch that fits with all rows on the device needs no offload; the plan says so. With --setup each plan is simulated, \
and --batch max is the batch of most tokens a second; without, the one that leaves --least-slots.";

/// The arguments of `forebay plan`.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// The model whose cache is planned [default: the setup's, or deepseek-v3.2].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = sizes::model)]
    model: Vec<Model>,
    /// Memory of one GPU.
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = sizes::some_size, required = true)]
    gpu: Vec<Size>,
    /// GPUs that serve together: whole nodes, or a part of one. The setup says how many GPUs a node has, 8 without one
    /// [default: the setup's, or 8].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, allow_negative_numbers = true)]
    gpus: Option<u32>,
    /// How attention is divided over a node's GPUs: by sequences (dp), or by heads (tp). With tp each GPU holds the
    /// cache of all sequences [default: dp].
    #[arg(long, value_enum)]
    attention: Option<AttentionName>,
    /// Weights on each GPU; 0 for none [default: the model's published checkpoint, divided over --gpus].
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    weights: Option<Size>,
    /// Activations on each GPU [default: 0].
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    activations: Option<Size>,
    /// Other memory that the engine takes on each GPU: workspace, graphs, communication buffers [default: 0].
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    workspace: Option<Size>,
    /// Host memory for one GPU's total pool [default: as much as the pool needs].
    #[arg(long, value_name = "SIZE", value_parser = sizes::some_size)]
    host: Option<Size>,
    /// Bytes from one row to the next in host memory [default: the model's row, rounded up to a multiple of 64].
    #[arg(long, value_name = "BYTES", value_parser = sizes::count, allow_negative_numbers = true)]
    host_stride: Option<u32>,
    /// Tokens of a sequence at its end: the prompt and the tokens that it may decode.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = sizes::tokens, required = true)]
    context: Vec<u32>,
    /// Tokens of the longest sequence that the model takes, at most the setup's [default: the setup's, or the
    /// preset's].
    #[arg(long, value_name = "TOKENS", value_parser = sizes::tokens)]
    longest: Option<u32>,
    /// Sequences on one GPU, or max for as many as pay or fit [default: max].
    #[arg(long, value_name = "N|max", value_delimiter = ',', value_parser = sizes::batch,
          allow_negative_numbers = true)]
    batch: Vec<Batch>,
    /// Slots per sequence and layer as a share of the context at its end, 0 < R <= 1, or auto for the largest ratio
    /// that fits [default: auto].
    #[arg(long, value_name = "R|auto", value_delimiter = ',', value_parser = sizes::ratio,
          allow_negative_numbers = true)]
    ratio: Vec<Ratio>,
    /// Query rows per decode step: 1 without drafts [default: 1].
    #[arg(long, value_name = "Q", value_delimiter = ',', value_parser = sizes::count,
          allow_negative_numbers = true)]
    mtp: Vec<u32>,
    /// Micro-batches that the batch is divided into; with --setup 1 or 2 [default: as the setup says, or 2].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    micro_batches: Option<u32>,
    /// Slots that each sequence keeps in each layer when the plan maximises sequences [default: 6400].
    #[arg(long, value_name = "N", value_parser = sizes::count, allow_negative_numbers = true)]
    least_slots: Option<u32>,
    /// Whether residency tables, and the GPU's page tables of host memory, count as memory that has to fit
    /// [default: counted].
    #[arg(long, value_enum)]
    tables: Option<Tables>,
    /// Tokens that a step yields for each sequence, from 1 to --mtp: one value for all, or one for each --mtp
    /// [default: 1].
    #[arg(long, value_name = "A", value_delimiter = ',', value_parser = sizes::positive, requires = "setup",
          allow_negative_numbers = true)]
    accept: Vec<f64>,
    /// The fewest tokens a second that each sequence must decode: slower batches are not recommended [default: any].
    #[arg(long, value_name = "N", value_parser = sizes::positive, requires = "setup",
          allow_negative_numbers = true)]
    min_otps: Option<f64>,
    #[command(flatten)]
    machine: Machine,
    /// Writes a report with pictures instead of tables as one HTML file; `-` prints it.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Writes the result as JSON, atomically; `-` prints it instead of the tables.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    look: LookArguments,
}

/// How the residency tables and the GPU's page tables of host memory count.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tables {
    /// They have to fit with everything else.
    Counted,
    /// They are only reported.
    Beside,
}

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

    /// Bytes of weights on each GPU, from the published checkpoint.
    fn weights(&self, deployed: &Deployed, query_rows: u32) -> Result<u64> {
        let drafts = query_rows > 1 || self.shape.draft_layers > 0;
        let Some(checkpoint) = &self.checkpoint else {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at(format!("--weights is not given, and no checkpoint of {} is known", self.name))
                .hint("pass --weights with the bytes on each GPU, or 0"));
        };
        Ok(checkpoint.on_gpu(deployed.gpus, deployed.attention, drafts))
    }
}

/// The given sizes of a GPU's memory and of the host's, in the form in which they were given.
pub struct Memory {
    /// Memory of one GPU. All computed sizes are shown in its unit.
    pub gpu: Size,
    /// Weights, if they are not the checkpoint's.
    pub weights: Option<Size>,
    /// Activations.
    pub activations: Option<Size>,
    /// Other memory that the engine takes.
    pub workspace: Option<Size>,
    /// Host memory for one GPU's total pool.
    pub host: Option<Size>,
}

impl Memory {
    /// A computed size.
    pub fn size(&self, bytes: f64) -> String {
        self.gpu.unit().size(bytes)
    }
}

/// What one plan of the sweep is asked for.
struct Job {
    memory: Rc<Memory>,
    demand: Demand,
    accept: f64,
}

/// One plan of the sweep.
pub struct Point {
    /// The model.
    pub model: String,
    /// The GPUs.
    pub deployed: Deployed,
    /// The demand.
    pub demand: Demand,
    /// The given sizes of memory.
    pub memory: Rc<Memory>,
    /// The setup that it is to be simulated on; none without one.
    pub on: Option<On>,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
    /// Why its yield is not known.
    pub unknown: Option<Error>,
    /// Its yield, with a setup.
    pub gain: Option<Gain>,
    /// Tokens a second of a single sequence, if no batch is fast enough.
    pub alone: Option<f64>,
}

impl Point {
    /// Keeps the plan, with an unknown yield.
    fn unknown_by(mut self, error: Error) -> Point {
        if let Ok(planned) = &mut self.planned {
            planned.notes.push(Note::Unknown);
        }
        self.unknown = Some(error);
        self
    }

    /// The link, if one was named.
    pub fn link(&self) -> Option<&str> {
        self.on.as_ref()?.link.as_deref()
    }

    /// Host memory of a node's total pools.
    pub fn host_of_node(&self, planned: &Planned) -> String {
        self.memory.size(planned.bytes.host() as f64 * f64::from(self.deployed.node_gpus()))
    }

    /// Whether it offloads, and thereby yields more than the best plan without offload.
    pub fn pays(&self) -> bool {
        let offloads = self.planned.as_ref().is_ok_and(Planned::offloads);
        let more = |gain: &Gain| gain.outcome.throughput > gain.without.map_or(0.0, |it| it.throughput);
        offloads && self.gain.as_ref().is_some_and(more)
    }

    /// The gain in tokens a second over no offload, as a share.
    pub fn gain(&self) -> Option<f64> {
        let gain = self.gain.as_ref()?;
        let without = gain.without.filter(|without| without.throughput > 0.0)?;
        Some(gain.outcome.throughput / without.throughput - 1.0)
    }
}

/// The setup, on one link, that plans are simulated on.
#[derive(Clone)]
pub struct On {
    /// The provenance of its figures.
    pub provenance: Provenance,
    /// The link, if one was named.
    pub link: Option<String>,
    /// Tokens that a step yields for each sequence.
    pub accept: f64,
    /// Bytes of memory of the GPU whose costs the setup holds.
    pub gpu: f64,
    /// Whether all costs of the setup come from a roofline, and none was measured with this model.
    pub by_roofline: bool,
    /// What a reader should know about the misses.
    pub misses_note: Option<String>,
}

/// Which batches with offload the minimum speed rules out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// No batch that matters.
    Nothing,
    /// The batches that yield more than no offload; others are fast enough.
    More,
    /// All of them.
    All,
}

/// The yield of a plan.
#[derive(Clone)]
pub struct Gain {
    /// The plan's step.
    pub outcome: Outcome,
    /// The step without offload.
    pub without: Option<Baseline>,
    /// Which batches with offload were too slow.
    pub slow: Slow,
    /// The smallest batch from which offload pays, if the best one was searched: none if offload never pays.
    pub pays_from: Option<Option<u32>>,
    /// For each batch, if the best one was searched: ratio, and tokens a second.
    pub curve: Vec<(u32, f64, f64)>,
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
                sizes::model(replay::MODEL).map_err(|what| Error::new(Kind::Internal, "plan").at(what))?;
            let models = or(&self.model, preset);
            return models.iter().map(|model| Subject::preset(model, self.longest)).collect();
        };
        if self.attention == Some(AttentionName::Tp) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("--attention tp: the costs of a setup are for dp attention")
                .hint("plan without --setup, or with --attention dp"));
        }
        let setup = simulate::read_setup(name)?;
        if self.micro_batches.is_some_and(|micro_batches| micro_batches > 2) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("--micro-batches: the simulator runs a step as one or two micro-batches")
                .hint("pass 1 or 2, or plan without --setup"));
        }
        // The setup's costs are for its own GPUs. For others the library prices the differences, or refuses.
        let on_gpus = |setup: Setup| match self.gpus {
            Some(gpus) => setup.on_gpus(gpus),
            None => Ok(setup),
        };
        if self.model.is_empty() {
            return Ok(vec![Subject::of(on_gpus(setup)?, self.longest)?]);
        }
        let of = |model: &Model| Subject::of(on_gpus(setup.of_model(model.name)?)?, self.longest);
        self.model.iter().map(of).collect()
    }

    /// The GPUs that serve a model together.
    fn deployed(&self, subject: &Subject) -> Result<Deployed> {
        let fitted = subject.setup.as_ref().map(|setup| &setup.file().deployment);
        let checkpoint = subject.checkpoint.as_ref().filter(|_| self.weights.is_none());
        let node = fitted.map_or(NODE_GPUS, |fitted| fitted.node_gpus);
        let gpus = self.gpus.or(fitted.map(|fitted| fitted.gpus)).unwrap_or(NODE_GPUS);
        if !weights::is_deployment(gpus, node) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at(format!(
                    "--gpus {gpus}: not a multiple of a node's {node} GPUs, and not a divisor of them"
                ))
                .hint("pass whole nodes, or half of one, a quarter and so on"));
        }
        Ok(Deployed {
            gpus,
            node,
            attention: match self.attention {
                Some(AttentionName::Tp) => Attention::Tensor,
                Some(AttentionName::Dp) | None => Attention::Data,
            },
            checkpoint: checkpoint.map(|checkpoint| checkpoint.name().to_owned()),
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
        let accepts = simulate::accepts("plan", &self.accept, &mtps)?;
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
                    demand.weights = match &memory.weights {
                        Some(given) => given.bytes,
                        None => subject.weights(&deployed, *mtp)?,
                    };
                    jobs.push(Job { memory: memory.clone(), demand, accept: *accept });
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
        on: None,
        planned: fit(plan::plan(&job.demand))?,
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
    let by_layer = misses.as_ref().or(setup.file().misses.as_ref()).and_then(steps::mean);
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
            provenance: source.provenance(linked.simulator.setup()),
            link: linked.link.clone(),
            accept: 1.0,
            gpu: setup.file().gpu.memory_gib * f64::from(1 << 30),
            by_roofline: setup.file().costs == Costs::default(),
            misses_note: note.clone(),
        };
        for job in jobs {
            done(priced(arguments, subject, &deployed, job, &on, &mut linked, &mut source)?);
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
    let bar = output::progress("plan", all as u64);
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
    let targets = [("--json", arguments.json.as_deref()), ("--html", arguments.html.as_deref())];
    output::check_targets("plan", &targets, &arguments.machine.inputs())?;
    let points = sweep(arguments)?;
    let least_otps = arguments.min_otps.unwrap_or(0.0);
    let mut results = Results::default();
    if let Some(path) = &arguments.json {
        results.write(path, plan_json::text(&points, least_otps)?);
    }
    if let Some(path) = &arguments.html {
        results.write(path, html::plans::page(&points, least_otps));
    } else if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&plan_report::text(&points, least_otps, look)));
    }
    results.deliver()
}
