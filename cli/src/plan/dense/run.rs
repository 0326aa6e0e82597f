//! Plans every combination of the options. A plan of a sweep that does not fit becomes a line that says so; a single
//! plan that does not fit is an error, and so is an invalid one.

use forebay::dense::{Config, Shape};
use forebay::predict::dense::{Demand, plan};
use forebay::predict::plan::Batch;
use forebay::{Error, Kind, Result};

use super::super::args::Arguments;
use super::super::subject::{fit, or};
use super::result::Point;
use super::{json, text};
use crate::input::sizes::{DenseModel, Size};
use crate::present::output::{self, Results};

/// The most plans of one sweep.
const POINTS: usize = 10_000;

/// Query rows of a step, micro-batches: the values without options.
const QUERY_ROWS: u32 = 1;
const MICRO_BATCHES: u32 = 1;

/// The shape without windows that are larger than the context, and those windows.
fn within(mut shape: Shape, context: u32) -> (Shape, Vec<u32>) {
    let groups = shape.groups.iter_mut();
    let too_large = groups.filter(|group| group.window.is_some_and(|window| window > context));
    let dropped = too_large.filter_map(|group| group.window.take()).collect();
    (shape, dropped)
}

impl Arguments {
    /// The demand of one combination, and the windows that it drops.
    fn dense_demand(&self, model: DenseModel, gpu: &Size, context: u32, mtp: u32) -> (Demand, Vec<u32>) {
        let bytes = |size: &Option<Size>| size.as_ref().map_or(0, |size| size.bytes);
        let mut shape = (model.shape)(self.pages.value_bytes());
        shape.page_tokens = self.pages.page_tokens.unwrap_or(shape.page_tokens);
        let (shape, dropped) = within(shape, context);
        let mut config = Config::new(shape, 1, context);
        config.query_rows = mtp;
        config.micro_batches = self.micro_batches.unwrap_or(MICRO_BATCHES);
        config.step_tokens = self.pages.step_tokens.unwrap_or(config.step_tokens);
        let demand = Demand {
            weights: bytes(&self.weights),
            activations: bytes(&self.activations),
            workspace: bytes(&self.workspace),
            host: self.host.as_ref().map(|host| host.bytes),
            ..Demand::new(config, gpu.bytes)
        };
        (demand, dropped)
    }

    /// Every combination, up to a limit, in the order of the command line.
    fn dense_points(&self) -> Result<Vec<Point>> {
        let (mtps, batches) = (or(&self.mtp, QUERY_ROWS), or(&self.batch, Batch::Most));
        let lists = [self.dense.len(), self.gpu.len(), self.context.len(), mtps.len(), batches.len()];
        let points = lists.iter().try_fold(1_usize, |all, list| all.checked_mul(*list));
        if points.is_none_or(|points| points > POINTS) {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("the sweep has too many combinations")
                .with("most", POINTS as u64)
                .hint("pass fewer values"));
        }
        let mut points = Vec::new();
        for (model, gpu) in self.dense.iter().flat_map(|model| self.gpu.iter().map(move |gpu| (*model, gpu)))
        {
            for (context, mtp) in
                self.context.iter().flat_map(|context| mtps.iter().map(|mtp| (*context, *mtp)))
            {
                let (demand, dropped) = self.dense_demand(model, gpu, context, mtp);
                for batch in &batches {
                    points.push(self.dense_point(
                        model,
                        gpu,
                        Demand { batch: *batch, ..demand.clone() },
                        &dropped,
                    )?);
                }
            }
        }
        Ok(points)
    }

    fn dense_point(&self, model: DenseModel, gpu: &Size, demand: Demand, dropped: &[u32]) -> Result<Point> {
        let planned = fit(plan(&demand))?;
        let more = planned.as_ref().ok().map(|planned| planned.most.saturating_add(1));
        let one_more =
            more.and_then(|more| plan(&Demand { batch: Batch::Sequences(more), ..demand.clone() }).err());
        Ok(Point {
            model: model.name,
            gpu: gpu.clone(),
            value_bytes: self.pages.value_bytes(),
            demand,
            dropped: dropped.to_vec(),
            planned,
            one_more,
        })
    }
}

/// `forebay plan --dense`.
///
/// # Errors
/// Errors of the library's plan, of a sweep that is too large, of plans of which none fits, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<()> {
    output::check_targets("plan", &[("--json", arguments.json.as_deref())], &[])?;
    let points = arguments.dense_points()?;
    let fits = points.iter().any(|point| point.planned.is_ok());
    if let Some(error) = points.iter().find_map(|point| point.planned.as_ref().err()).filter(|_| !fits) {
        return Err(error.clone());
    }
    let mut results = Results::default();
    if let Some(path) = &arguments.json {
        results.write(path, json::text(&points)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::report(&points, look)));
    }
    results.deliver()
}
