//! The models that are planned, and the GPUs that serve them: what plans of both roles take from the command line.

use forebay::predict::plan;
use forebay::predict::setup::Setup;
use forebay::predict::weights::{self, Attention, Checkpoint, NODE_GPUS};
use forebay::{Error, Kind, Result, Shape};

use super::args::Arguments;
use super::deployment::{AttentionName, Deployed};
use super::shards::{Weighed, WeightArguments, fewest_nodes};
use crate::input::machine;
use crate::input::sizes::{self, Model, Size};

/// The model whose cache is planned.
pub struct Subject {
    /// The preset's name, or the setup's if the setup has a geometry of its own.
    pub name: String,
    /// Its cache.
    pub shape: Shape,
    /// Tokens of the longest sequence that it takes; none if unknown.
    pub longest: Option<u32>,
    /// The setup that it is planned on; none without one.
    pub setup: Option<Setup>,
    /// Its published checkpoint; none if there is none.
    pub checkpoint: Option<Checkpoint>,
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
    pub fn weigh(
        &self,
        arguments: &WeightArguments,
        deployed: &Deployed,
        query_rows: u32,
    ) -> Result<Weighed> {
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

/// The values, or the default if there are none.
pub fn or<T: Clone>(values: &[T], otherwise: T) -> Vec<T> {
    if values.is_empty() { vec![otherwise] } else { values.to_vec() }
}

/// A plan that does not fit is a result; an invalid one is an error.
pub fn fit<T>(planned: Result<T>) -> Result<Result<T>> {
    match planned {
        Err(error) if error.kind() != Kind::OutOfMemory => Err(error),
        planned => Ok(planned),
    }
}

impl Arguments {
    /// The models whose caches are planned. Without a named model it is the setup's.
    pub fn subjects(&self) -> Result<Vec<Subject>> {
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
    pub fn deployed(&self, subject: &Subject) -> Result<Deployed> {
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
}
