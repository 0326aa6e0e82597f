//! The command, run as a user runs it.

use std::process::{Command, Output, Stdio};

pub fn forebay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null());
    command
}

/// Runs the command, which must succeed, and returns standard output; standard error must be empty.
pub fn succeeds(arguments: &[&str]) -> String {
    let output = forebay(arguments).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the command, which must exit with 2, and returns the error, one line; standard output must be empty.
pub fn refuses(arguments: &[&str]) -> String {
    refused(forebay(arguments).output().unwrap(), arguments)
}

pub fn refused(output: Output, arguments: &[&str]) -> String {
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed something");
    assert!(errors.starts_with("error: ") && !errors.contains("panicked"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    errors
}
