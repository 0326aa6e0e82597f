//! The command `forebay`: replays recorded selections, and says what fits and what it would cost.
//!
//! Every command obeys one contract: results go to standard output or to the file of `--json`, progress
//! to standard error when that is a terminal, an error is one line on standard error and exit status 2 (a
//! bare call gets the help there, with the same status). Status 1 is the doctor's alone: it found problems. A command
//! prints nothing before all its work has succeeded, so bad input never leaves half a result; a reader that closes the
//! pipe early ends the command quietly. A signal ends it as it ends any program (130 and 143 in a shell), and leaves
//! no half of a file.

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

use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, UnknownArgumentValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use forebay::predict::setup::Setup;
use forebay::{Result, os};

use self::present::{output, terminal};

/// What a small KV-cache pool on the device misses under sparse attention, from recorded selections
#[derive(Parser)]
#[command(name = "forebay", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replays selection or request traces and counts what a pool or cache of each size misses
    Replay(Box<replay::Arguments>),
    /// Says what fits on a GPU: sequences, slots, bytes, and whether offload is needed at all
    Plan(Box<plan::Arguments>),
    /// Says what a decode step takes at an operating point, by the production schedule on a virtual clock
    Simulate(Box<simulate::Arguments>),
    /// Makes a setup from measurements, and says what it leaves unexplained
    Fit(Box<fit::Arguments>),
    /// Measures what a device reaches of its ceilings: rows, the rule, steps
    Bench(Box<bench::Arguments>),
    /// Says what this machine and its GPUs can do, what stands in the way, and what to fix
    Doctor(Box<doctor::Arguments>),
    /// Prints the completion script of a shell
    Completions {
        /// Whose script
        shell: clap_complete::Shell,
    },
}

fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Doctor(arguments) => return doctor::command(arguments),
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

/// The command as shells complete it: what names a built-in setup or a file is completed to the names, where a shell
/// finds none of them to files.
fn completed() -> clap::Command {
    let setup = |command: clap::Command| {
        let names = PossibleValuesParser::new(Setup::names());
        command.mut_arg("setup", |argument| argument.value_parser(names))
    };
    Arguments::command().mut_subcommand("plan", setup).mut_subcommand("simulate", setup)
}

/// Whether clap's answer is an error, and not a text that was asked for.
fn is_mistake(answer: &clap::Error) -> bool {
    answer.use_stderr() && answer.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// What the command line says. Helps are as wide as reports. A `--ratio` of replay is told its name there: elsewhere a
/// ratio is of the context at its end.
fn parse() -> std::result::Result<Arguments, clap::Error> {
    let meant = UnknownArgumentValueParser::suggest_arg("--prompt-share");
    let ratio = clap::Arg::new("ratio").long("ratio").hide(true).value_parser(meant);
    let command =
        Arguments::command().term_width(terminal::width()).mut_subcommand("replay", |it| it.arg(ratio));
    Arguments::from_arg_matches(&command.try_get_matches()?)
}

fn main() -> ExitCode {
    // The limit on a file's size is an error, wherever the file is written: behind standard output too.
    os::unsignalled(obey)
}

/// Reads the command line and does what it says.
fn obey() -> ExitCode {
    let arguments = match parse() {
        Ok(arguments) => arguments,
        Err(mistake) if is_mistake(&mistake) => {
            output::complain_of_arguments(&mistake);
            return ExitCode::from(output::BAD_INPUT);
        }
        Err(answer) => {
            // --help, --version, and the help that a bare call gets; a closed pipe is their reader's choice.
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
