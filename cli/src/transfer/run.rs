//! `forebay transfer`: checks the arguments, runs an end or a demo, and reports.

use std::os::unix::process::parent_id;
use std::process::ExitCode;

use forebay::{Error, Kind, Result, os};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

use super::args::{Arguments, Command, DemoArguments, EndArguments, PromptArguments};
use super::report::Line;
use super::shape::{RING_LAYERS, Shape};
use super::{demo, json, picture, receive, send, text};
use crate::present::html::page;
use crate::present::output::{self, BAD_INPUT, Results};

/// The exit status of a transfer that failed.
const FAILED: u8 = 1;

/// `forebay transfer`. The status says whether every byte arrived.
///
/// # Errors
/// Errors of arguments, of making an end, and of writing the result.
pub fn command(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::Demo(arguments) => demo(arguments),
        Command::Receive(arguments) => receive(arguments),
        Command::Send(arguments) => send(arguments),
    }
}

const fn status(done: bool) -> u8 {
    if done { 0 } else { FAILED }
}

/// Checks arguments of a process that needs memory for so many layers.
fn check(prompt: &PromptArguments, layers: u32) -> Result<()> {
    if let Some(fault) = prompt.fault
        && fault.layer().is_some_and(|layer| layer >= prompt.layers)
    {
        return Err(Error::new(Kind::InvalidConfig, "transfer")
            .at(format!("--fault {fault}"))
            .with("layers", prompt.layers)
            .hint("layers count from 0"));
    }
    let wanted = Shape::of(prompt).layer_bytes().saturating_mul(layers.into());
    let (_, available) = os::memory();
    // The system would promise memory that it does not have.
    if available > 0 && wanted > available {
        return Err(Error::new(Kind::OutOfMemory, "transfer")
            .at("pages of all layers")
            .with("wanted", wanted)
            .with("available", available)
            .hint("send fewer tokens or layers"));
    }
    Ok(())
}

fn demo(arguments: &DemoArguments) -> Result<ExitCode> {
    let prompt = &arguments.prompt;
    check(prompt, prompt.layers + RING_LAYERS)?;
    let (json, picture) = (arguments.json.as_deref(), arguments.picture.as_deref());
    output::check_targets("transfer demo", &[("--json", json), ("--picture", picture)], &[])?;
    let Some(outcome) = demo::run(arguments)? else { return Ok(ExitCode::from(BAD_INPUT)) };
    let mut results = Results::default();
    if let Some(path) = json {
        results.write(path, json::text(prompt, &outcome)?);
    }
    if let Some(path) = picture {
        let words = (text::title(prompt, &outcome), text::line(&outcome));
        results.write(path, picture::picture(&outcome.layers, (&words.0, &words.1), page::STYLE));
    }
    if !results.take_stdout() {
        results.print(text::report(prompt, &outcome, arguments.look.look()));
    }
    results.deliver()?;
    Ok(ExitCode::from(status(outcome.failure.is_none())))
}

/// A process that another one has started ends with it.
fn follow(arguments: &EndArguments) -> Result<bool> {
    let Some(parent) = arguments.parent else { return Ok(false) };
    set_pdeathsig(Signal::SIGKILL)
        .map_err(|errno| Error::new(Kind::OsRefused, "transfer").at(errno.to_string()))?;
    // One that had ended before is not noticed.
    match parent_id() == parent {
        true => Ok(true),
        false => Err(Error::new(Kind::PeerLost, "transfer").at("the process that started this one")),
    }
}

fn receive(arguments: &EndArguments) -> Result<ExitCode> {
    check(&arguments.prompt, arguments.prompt.layers)?;
    let follows = follow(arguments)?;
    let mut tell = |line: Line| match (follows, line) {
        (true, line) => line.print(),
        (false, Line::Listening { at }) => output::print(format!("listening at {at}\n").as_bytes()),
        (false, Line::Unopened { why }) => {
            output::print(format!("a connection did not open: {why}\n").as_bytes())
        }
        (false, _) => Ok(()),
    };
    let received = receive::receive(arguments, &mut tell)?;
    let done = received.failure.is_none() && received.verified;
    match follows {
        true => Line::Received(received).print()?,
        false => output::print(text::received(&received).as_bytes())?,
    }
    Ok(ExitCode::from(status(done)))
}

fn send(arguments: &EndArguments) -> Result<ExitCode> {
    check(&arguments.prompt, RING_LAYERS)?;
    let follows = follow(arguments)?;
    let sent = send::send(arguments)?;
    let done = sent.failure.is_none();
    match follows {
        true => Line::Sent(sent).print()?,
        false => output::print(text::sent(&sent).as_bytes())?,
    }
    Ok(ExitCode::from(status(done)))
}
