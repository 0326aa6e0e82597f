//! The command `forebay`: replays traces, plans and simulates deployments, measures devices, and checks machines.
//!
//! Every command obeys one contract. Results go to standard output or to the file of `--json`. Progress goes to
//! standard error if that is a terminal. An error is one line on standard error and exit status 2; a call without
//! arguments prints the help there, with the same status. Status 1 is reserved for `doctor`, which found problems, and
//! for `transfer`, which failed. A command prints nothing before all its work has succeeded, so bad input never leaves
//! half a result. If the reader closes the pipe early, the command ends quietly. A signal ends the command as it ends
//! any program (130 and 143 in a shell), and leaves no partial file.

mod bench;
mod blocks;
mod doctor;
mod fit;
mod input;
mod plan;
mod policy;
mod present;
mod replay;
mod simulate;
mod study;
mod transfer;

use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, UnknownArgumentValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use forebay::predict::setup::Setup;
use forebay::{Result, os};

use self::present::{output, terminal};

/// Plans, simulates and measures KV-cache offload under sparse attention
#[derive(Parser)]
#[command(name = "forebay", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replays selection or request traces and counts the misses of a pool or cache of each size
    Replay(Box<replay::Arguments>),
    /// Computes what fits on a GPU: sequences, slots, bytes, and whether offload is needed at all
    Plan(Box<plan::Arguments>),
    /// Computes the time of a decode step at an operating point, with the production schedule on a virtual clock
    Simulate(Box<simulate::Arguments>),
    /// Makes a setup from measurements, and reports the residuals
    Fit(Box<fit::Arguments>),
    /// Measures how close a device comes to its ceilings: rows, the rule, steps
    Bench(Box<bench::Arguments>),
    /// Reports what this machine and its GPUs can do, what is missing, and how to fix it
    Doctor(Box<doctor::Arguments>),
    /// Sends a prompt's rows from one process to another, layer by layer, and compares every byte
    Transfer(Box<transfer::Arguments>),
    /// Prints the completion script of a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Doctor(arguments) => return doctor::command(arguments),
        Command::Transfer(arguments) => return transfer::command(arguments),
        Command::Replay(arguments) => replay::command(arguments),
        Command::Plan(arguments) => plan::command(arguments),
        Command::Simulate(arguments) => simulate::command(arguments),
        Command::Fit(arguments) => fit::command(arguments),
        Command::Bench(arguments) => bench::command(arguments),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut completed(), "forebay", &mut text);
            output::print(&text)
        }
    }
    .map(|()| ExitCode::SUCCESS)
}

/// The command for completion scripts: the argument of `--setup` completes to the names of built-in setups; a shell
/// that finds no match completes it to files.
fn completed() -> clap::Command {
    let setup = |command: clap::Command| {
        let names = PossibleValuesParser::new(Setup::names());
        command.mut_arg("setup", |argument| argument.value_parser(names))
    };
    Arguments::command().mut_subcommand("plan", setup).mut_subcommand("simulate", setup)
}

/// Whether clap's answer is an error, and not requested output such as a help.
fn is_mistake(answer: &clap::Error) -> bool {
    answer.use_stderr() && answer.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// Parses the command line. Help is as wide as a report. `replay --ratio` gets a hint to `--prompt-share`, because in
/// the other commands a ratio is a share of the context at its end.
fn parse() -> std::result::Result<Arguments, clap::Error> {
    let meant = UnknownArgumentValueParser::suggest_arg("--prompt-share");
    let ratio = clap::Arg::new("ratio").long("ratio").hide(true).value_parser(meant);
    let command =
        Arguments::command().term_width(terminal::width()).mut_subcommand("replay", |it| it.arg(ratio));
    Arguments::from_arg_matches(&command.try_get_matches()?)
}

fn main() -> ExitCode {
    // Exceeding the limit on a file's size is an error for every file, including a redirected standard output.
    os::unsignalled(obey)
}

/// Parses the command line and runs the command.
fn obey() -> ExitCode {
    let arguments = match parse() {
        Ok(arguments) => arguments,
        Err(mistake) if is_mistake(&mistake) => {
            output::complain_of_arguments(&mistake);
            return ExitCode::from(output::BAD_INPUT);
        }
        Err(answer) => {
            // --help, --version, and the help for a call without arguments. A closed pipe is the reader's choice.
            return match output::forgive_closed_pipe(answer.print()) {
                Ok(()) => ExitCode::from(u8::try_from(answer.exit_code()).unwrap_or(output::BAD_INPUT)),
                Err(_) => ExitCode::from(output::BAD_INPUT),
            };
        }
    };
    match run(&arguments.command) {
        Ok(status) => status,
        Err(e) => {
            output::complain(&e);
            ExitCode::from(output::BAD_INPUT)
        }
    }
}
