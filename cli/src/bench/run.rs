//! `forebay bench`: measures how close a device comes to its ceilings, and compares every outcome with the rule.
//!
//! A figure is the time that a stream takes for one of the device's own calls, next to the least time that this
//! machine allows for it, measured in the same run ([`Ceilings`]). Its steps differ: each has other rows and other
//! lanes, and nothing is reset in between. The rule on the host performs the same steps ([`super::oracle`]). A slot,
//! row or digest that differs is an error, and there is no figure.

use std::sync::Arc;

use clap::ValueEnum;
use forebay::measure::{Ceilings, Facts, Probe};
use forebay::{Error, Kind, Result, os};

use super::args::{Arguments, Group};
use super::asked::Asked;
use super::host_memory::{self, Pool};
use super::json_lines::Lines;
use super::result::{Figure, Measured, Options};
use super::{fetch, json, nodes, pages, picture, pull, ring, rows, rule, step, text, timer};
use crate::input::device::{DeviceName, Pinned, ProbeOptions, Target};
use crate::present::html::page;
use crate::present::output::{self, Results};
use crate::present::progress;

/// The function that measures a group's figures.
type Figures = fn(&Arc<dyn Probe>, &Ceilings, &Asked) -> Result<Vec<Figure>>;

impl Group {
    /// The function that measures its figures.
    fn figures(self) -> Figures {
        match self {
            Group::Gather => rows::gather,
            Group::Scatter => rows::scatter,
            Group::Resolve => rule::resolve,
            Group::ResolveGather => fetch::resolve_gather,
            Group::Commit => rule::commit,
            Group::WarmUp => fetch::warm_up,
            Group::Nodes => nodes::nodes,
            Group::Pages => pages::pages,
            Group::Pull => pull::pull,
            Group::Ring => ring::ring,
            Group::Step => step::figures,
        }
    }

    /// The fewest bytes of host memory for its rows; none for groups that choose how much they need.
    fn least(self) -> u64 {
        match self {
            Group::Gather | Group::Scatter | Group::WarmUp => host_memory::LEAST,
            Group::ResolveGather => fetch::SEQUENCES_LEAST,
            Group::Resolve
            | Group::Commit
            | Group::Nodes
            | Group::Pages
            | Group::Pull
            | Group::Ring
            | Group::Step => 0,
        }
    }
}

/// Bytes of a ceiling's run: on a GPU a short run would include its launch, and much of it would fit in caches.
fn run_bytes() -> u64 {
    (os::memory().1 / 32).clamp(128 << 20, 512 << 20)
}

impl Arguments {
    fn target(&self) -> Target {
        Target { name: self.device.unwrap_or_default(), driver: self.driver.clone() }
    }

    /// How the device is opened.
    fn probe_options(&self) -> ProbeOptions {
        let Arguments { gather_blocks, threads, bulk, programmatic, pinned, .. } = *self;
        ProbeOptions { gather_blocks, threads, bulk, programmatic, pinned, ..ProbeOptions::of("bench") }
    }

    fn open(&self) -> Result<Arc<dyn Probe>> {
        self.target().probe(self.probe_options())
    }

    /// The named groups, each once, in the fixed order.
    fn groups(&self) -> Vec<Group> {
        let named = |group: &Group| self.only.is_empty() || self.only.contains(group);
        Group::value_variants().iter().copied().filter(named).collect()
    }

    /// Refuses options that no named group would use.
    fn check(&self) -> Result<()> {
        let wrong = |place: &'static str| Error::new(Kind::InvalidConfig, "bench").at(place);
        let (groups, gpu) = (self.groups(), self.target().name != DeviceName::Host);
        if !gpu && self.persistent {
            let place = if self.leave_sms.is_some() {
                "--leave-sms without a GPU"
            } else {
                "--persistent without a GPU"
            };
            return Err(wrong(place).hint("pass --device cuda:N with it"));
        }
        let without = [
            (self.persistent, Group::Step, "--persistent without the group step", "pass --only step"),
            (self.rows.is_some(), Group::Gather, "--rows without the group gather", "pass --only gather"),
            (
                self.batch.is_some(),
                Group::Resolve,
                "--batch without the group resolve",
                "pass --only resolve",
            ),
        ];
        let unused = without.into_iter().find(|(set, group, ..)| *set && !groups.contains(group));
        unused.map_or(Ok(()), |(.., place, hint)| Err(wrong(place).hint(hint)))
    }

    /// Refuses `--leave-sms` if it leaves no multiprocessor for the work.
    fn check_left(&self, facts: &Facts) -> Result<()> {
        match self.leave_sms {
            Some(left) if left >= facts.processors => {
                let error = Error::new(Kind::InvalidConfig, "bench")
                    .at("--leave-sms leaves no multiprocessor for the work")
                    .with("value", left)
                    .with("multiprocessors", facts.processors);
                Err(error.hint("pass fewer than the GPU has"))
            }
            _ => Ok(()),
        }
    }

    fn options(&self) -> Options {
        let Arguments { gather_blocks, threads, bulk, programmatic, persistent, leave_sms, .. } = *self;
        let pinned = match self.pinned {
            Pinned::Registered => "registered",
            Pinned::Driver => "driver",
        };
        let left_sms = persistent.then(|| leave_sms.unwrap_or_default());
        Options { pinned, gather_blocks, threads, bulk, programmatic, persistent, left_sms }
    }

    /// The memory of the groups' rows, computed before any of it is taken.
    fn pool(&self, facts: &Facts) -> Result<Pool> {
        let least = self.groups().into_iter().map(Group::least).max().unwrap_or_default();
        let wanted =
            host_memory::For { asked: self.pool, quick: self.quick, gpu: facts.gpu.is_some(), least };
        let bytes = host_memory::bytes(wanted, host_memory::Free::beside(facts))?;
        Ok(Pool::new(bytes).of_driver(self.pinned == Pinned::Driver))
    }

    /// Opens the device and what the groups share. The ceilings are measured before the first group takes memory.
    fn begin(&self) -> Result<(Measured, Asked)> {
        self.check()?;
        let (quick, name) = (self.quick, self.target().name.to_string());
        let rounds = self.rounds.unwrap_or(if quick { 3 } else { 15 });
        let device = self.open()?;
        let facts = device.facts()?;
        self.check_left(&facts)?;
        let asked = Asked {
            rounds,
            quick,
            progress: progress::bar("bench", 0),
            target: self.target(),
            options: self.probe_options(),
            pool: self.pool(&facts)?,
            lines: Lines::create(name.clone(), self.json_lines.as_deref())?,
            persistent: self.persistent.then(|| self.leave_sms.unwrap_or_default()),
            bulk: self.bulk,
            rows: self.rows,
            batch: self.batch,
        };
        let (bytes, runs) = if quick { (1 << 20, 2) } else { (run_bytes(), 10) };
        let ceilings = Ceilings::measure(&*device, bytes, runs)?;
        let launch_us = timer::Timer::new(&device, quick)?.launch_us()?;
        let ceilings = Ceilings { launch_us, ..ceilings };
        let options = facts.gpu.is_some().then(|| self.options());
        Ok((Measured { device: name, options, facts, ceilings, figures: Vec::new(), rounds, quick }, asked))
    }

    fn measure(&self) -> Result<Measured> {
        let (mut measured, asked) = self.begin()?;
        asked.lines.begin(&measured)?;
        for group in self.groups() {
            if group == Group::Step {
                asked.pool.give_back();
            }
            let figures = group.figures()(&self.open()?, &measured.ceilings, &asked)?;
            measured.figures.extend(figures);
        }
        Ok(measured)
    }
}

/// `forebay bench`.
///
/// # Errors
/// Errors of opening the device, of memory, of a wrong outcome, and of writing the results.
pub fn command(arguments: &Arguments) -> Result<()> {
    let Arguments { json, json_lines, picture, .. } = arguments;
    let targets = [
        ("--json", json.as_deref()),
        ("--json-lines", json_lines.as_deref()),
        ("--picture", picture.as_deref()),
    ];
    output::check_targets("bench", &targets, &[])?;
    let measured = arguments.measure()?;
    let mut results = Results::default();
    if let Some(path) = picture {
        results.write(path, picture::picture(&measured, page::STYLE));
    }
    if let Some(path) = json {
        results.write(path, json::text(&measured)?);
    }
    if !results.take_stdout() {
        let look = arguments.look.look();
        results.print(look.wrap(&text::tables(&measured, look)));
    }
    results.deliver()
}
