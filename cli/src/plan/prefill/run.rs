//! Plans every combination of the options. A plan of a sweep that does not fit becomes a line that says so; a single
//! plan that does not fit is an error, and so is an invalid one.

use forebay::predict::plan::Batch;
use forebay::predict::prefill::{ACKNOWLEDGE_US, Demand, LINK_RATE, plan};
use forebay::predict::weights::Attention;
use forebay::{Error, Kind, Result, Shape};

use super::super::args::Arguments;
use super::super::deployment::Deployed;
use super::super::subject::{Subject, fit, or};
use super::args::Role;
use super::result::Point;
use super::{html, json, text};
use crate::input::sizes::Size;
use crate::present::output::{self, Results};

/// The most plans of one sweep.
const POINTS: usize = 10_000;

/// Refuses options of the role that is not planned.
///
/// # Errors
/// [`Kind::InvalidConfig`] names the option.
pub fn check_role(arguments: &Arguments) -> Result<()> {
    let (option, other) = match arguments.prefill.role {
        Role::Decode => (arguments.prefill.given(), "prefill"),
        Role::Prefill => (arguments.given_for_decode(), "decode"),
    };
    match option {
        Some(option) => Err(Error::new(Kind::InvalidConfig, "plan")
            .at(format!("{option}: an option of --role {other}"))
            .hint(match other {
                "prefill" => "leave it out, or plan with --role prefill",
                _ => "leave it out, or plan with --role decode, the default",
            })),
        None => Ok(()),
    }
}

impl Arguments {
    /// The given option that means something for decode alone, if any.
    fn given_for_decode(&self) -> Option<&'static str> {
        let all = [
            ("--dense", !self.dense.is_empty()),
            ("--setup", self.machine.setup.is_some()),
            ("--shard", !self.modules.shard.is_empty()),
            ("--ratio", !self.ratio.is_empty()),
            ("--mtp", !self.mtp.is_empty()),
            ("--micro-batches", self.micro_batches.is_some()),
            ("--least-slots", self.least_slots.is_some()),
            ("--tables", self.tables.is_some()),
            ("--batch max", self.batch.contains(&Batch::Most)),
        ];
        all.into_iter().find(|(_, given)| *given).map(|(option, _)| option)
    }

    /// Every combination, up to a limit, in the order of the command line.
    fn prefill_points(&self) -> Result<Vec<Point>> {
        let subjects = self.subjects()?;
        let (chunks, batches) = (self.prefill.chunk.len().max(1), self.batch.len().max(1));
        let lists = [subjects.len(), self.gpu.len(), self.context.len(), chunks, batches];
        let points = lists.iter().try_fold(1_usize, |all, list| all.checked_mul(*list));
        if points.is_none_or(|points| points > POINTS) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("the sweep has too many combinations")
                .with("most", POINTS as u64)
                .hint("pass fewer values"));
        }
        let mut points = Vec::new();
        for subject in &subjects {
            let deployed = self.deployed(subject)?;
            let ranks = self.prefill.sp.unwrap_or(1);
            if !deployed.gpus.is_multiple_of(ranks) {
                return Err(Error::new(Kind::InvalidConfig, "plan")
                    .at("--sp does not divide the GPUs")
                    .with("sp", ranks)
                    .with("gpus", deployed.gpus)
                    .hint("pass a divisor of --gpus"));
            }
            if ranks > 1 && deployed.attention == Attention::Tensor {
                return Err(Error::new(Kind::InvalidConfig, "plan")
                    .at("--attention tp: heads and tokens are not divided over the same GPUs")
                    .with("sp", ranks)
                    .hint("plan with --attention dp, or without --sp"));
            }
            let weights = match &self.weights {
                Some(given) => given.bytes,
                None => subject.weigh(&self.modules, &deployed, 1)?.on_gpu,
            };
            for (gpu, context) in
                self.gpu.iter().flat_map(|gpu| self.context.iter().map(move |it| (gpu, *it)))
            {
                let demand = Demand { weights, ranks, ..self.prefill_demand(subject, gpu, context) };
                for chunk in or(&self.prefill.chunk, demand.chunk) {
                    for batch in or(&self.batch, Batch::Sequences(1)) {
                        let Batch::Sequences(batch) = batch else { continue };
                        let demand = Demand { chunk, batch, ..demand.clone() };
                        points.push(point(subject, gpu, &deployed, demand)?);
                    }
                }
            }
        }
        Ok(points)
    }

    /// The demand of one context, with the default chunk and batch.
    fn prefill_demand(&self, subject: &Subject, gpu: &Size, context: u32) -> Demand {
        let bytes = |size: &Option<Size>| size.as_ref().map(|size| size.bytes);
        let host_stride = self.host_stride.unwrap_or(subject.shape.host_stride);
        let given = &self.prefill;
        Demand {
            longest: subject.longest,
            activations: bytes(&self.activations),
            workspace: bytes(&self.workspace).unwrap_or(0),
            host: bytes(&self.host),
            link_rate: given.send_rate.unwrap_or(LINK_RATE),
            layer_us: given.layer_ms.map(|ms| ms * 1e3),
            acknowledge_us: given.acknowledge_ms.map_or(ACKNOWLEDGE_US, |ms| ms * 1e3),
            depth: given.ring_parts,
            ..Demand::new(Shape { host_stride, ..subject.shape }, gpu.bytes, context)
        }
    }
}

fn point(subject: &Subject, gpu: &Size, deployed: &Deployed, demand: Demand) -> Result<Point> {
    let planned = fit(plan(&demand))?;
    let whole = Demand { chunk: demand.context, ..demand.clone() };
    // Given activations are those of the given chunk.
    let known = demand.activations.is_none() && !demand.in_one_pass();
    let in_one_pass = known.then(|| fit(plan(&whole))).transpose()?;
    let (model, gpu, deployed) = (subject.name.clone(), gpu.clone(), deployed.clone());
    Ok(Point { model, gpu, deployed, demand, planned, in_one_pass })
}

/// `forebay plan --role prefill`.
///
/// # Errors
/// Errors of the library's plan, of a sweep that is too large, of plans of which none fits, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    let targets = [("--json", arguments.json.as_deref()), ("--html", arguments.html.as_deref())];
    output::check_targets("plan", &targets, &[])?;
    let points = arguments.prefill_points()?;
    let fits = points.iter().any(|point| point.planned.is_ok());
    if let Some(error) = points.iter().find_map(|point| point.planned.as_ref().err()).filter(|_| !fits) {
        return Err(error.clone());
    }
    let mut results = Results::default();
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&points)?);
    }
    if let Some(path) = &arguments.html {
        results.write(path, html::page(&points));
    } else if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&points, look)));
    }
    results.deliver()
}
