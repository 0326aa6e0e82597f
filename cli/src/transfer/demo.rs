//! `forebay transfer demo`: starts both ends as processes, and collects what they report.
//!
//! **Nothing is left.** The ends are killed and reaped when the demo ends, however it does: a child is killed when its
//! owner goes, and by the system when the demo's process itself is killed, even one that is stopped. The folder with
//! the socket and the token goes as soon as the two are connected.

use std::fs::{DirBuilder, OpenOptions, remove_dir_all};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use forebay::os::{self, NoFaults};
use forebay::{Error, Kind, Result};

use super::args::{DemoArguments, Fabric, PromptArguments};
use super::fault::Fault;
use super::report::{Line, Received, Sent};
use super::result::Outcome;
use super::shape::Shape;
use crate::present::output::BAD_INPUT;

/// What an error of the system becomes.
fn io(what: &str, error: &std::io::Error) -> Error {
    Error::new(Kind::Io, "transfer demo").at(format!("{what}: {}", os::io_text(error)))
}

/// A folder that only this user can read, until it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder> {
        let mut bytes = [0; 8];
        os::random(&mut bytes, &NoFaults)?;
        let path = std::env::temp_dir().join(format!("forebay-{:016x}", u64::from_le_bytes(bytes)));
        DirBuilder::new().mode(0o700).create(&path).map_err(|e| io("a private folder", &e))?;
        Ok(Folder(path))
    }

    /// A file with a new token.
    fn token(&self) -> Result<PathBuf> {
        let mut bytes = [0; 32];
        os::random(&mut bytes, &NoFaults)?;
        let path = self.0.join("token");
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|e| io("a token", &e))?;
        file.write_all(&bytes).map_err(|e| io("a token", &e))?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = remove_dir_all(&self.0);
    }
}

/// A process of an end. It is killed and reaped when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Sender,
    Receiver,
}

/// A line of an end, or none when it has ended.
type Heard = (Who, Option<Line>);

/// Starts an end.
fn start(who: Who, arguments: Vec<String>, heard: &Sender<Heard>) -> Result<Process> {
    let program = std::env::current_exe().map_err(|e| io("this program", &e))?;
    let mut command = Command::new(program);
    command.arg("transfer").arg(if who == Who::Sender { "send" } else { "receive" }).args(arguments);
    command.arg("--parent").arg(std::process::id().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| io("a process", &e))?;
    let out = child.stdout.take();
    let process = Process(child);
    if let Some(out) = out {
        let heard = heard.clone();
        std::thread::spawn(move || listen(who, out, &heard));
    }
    Ok(process)
}

/// Passes an end's lines on until it has ended.
fn listen(who: Who, out: ChildStdout, heard: &Sender<Heard>) {
    for line in BufReader::new(out).lines().map_while(|line| line.ok()) {
        if let Ok(line) = serde_json::from_str(&line)
            && heard.send((who, Some(line))).is_err()
        {
            return;
        }
    }
    let _ = heard.send((who, None));
}

/// The arguments of an end.
fn words(prompt: &PromptArguments, at: &str, token: Option<&Path>) -> Vec<String> {
    let PromptArguments { layers, tokens, row_bytes: [latent, key], page, seed, .. } = prompt;
    let us = |time: Duration| format!("{}us", time.as_micros());
    let mut words = vec![
        format!("--fabric={}", prompt.fabric.name()),
        format!("--at={at}"),
        format!("--layers={layers}"),
        format!("--tokens={tokens}"),
        format!("--row-bytes={latent},{key}"),
        format!("--page={page}"),
        format!("--seed={seed}"),
        format!("--compute={}", us(prompt.compute)),
        format!("--timeout={}", us(prompt.timeout)),
    ];
    words.extend(prompt.chunk.map(|chunk| format!("--chunk={chunk}")));
    words.extend(prompt.spin.then(|| "--spin".to_owned()));
    words.extend(prompt.no_digests.then(|| "--no-digests".to_owned()));
    words.extend(prompt.fault.map(|fault| format!("--fault={fault}")));
    words.extend(token.map(|token| format!("--token-file={}", token.display())));
    words
}

/// Runs both ends. None if one of them could not even begin, and has said why.
///
/// # Errors
/// [`Kind::Io`] for a process, a folder or a token that cannot be made.
pub fn run(arguments: &DemoArguments) -> Result<Option<Outcome>> {
    let prompt = &arguments.prompt;
    let folder = Folder::new()?;
    let token = folder.token()?;
    let at = match prompt.fabric {
        Fabric::Shm => folder.0.join("socket").display().to_string(),
        Fabric::Tcp => "127.0.0.1:0".to_owned(),
    };
    let (say, heard) = mpsc::channel();
    let receiver = start(Who::Receiver, words(prompt, &at, Some(&token)), &say)?;
    let Ok((_, Some(Line::Listening { at }))) = heard.recv() else { return Ok(None) };
    let sender = start(Who::Sender, words(prompt, &at, Some(&token)), &say)?;
    drop(say);
    let mut ends =
        Ends { folder: Some(folder), receiver: Some(receiver), sender: Some(sender), ..Ends::default() };
    ends.collect(&heard, prompt);
    if ends.broken() {
        return Ok(None);
    }
    Ok(Some(Outcome::of(&Shape::of(prompt), ends.sent.as_ref(), ends.received.as_ref())))
}

/// Both processes, and what they have reported.
#[derive(Default)]
struct Ends {
    folder: Option<Folder>,
    receiver: Option<Process>,
    sender: Option<Process>,
    sent: Option<Sent>,
    received: Option<Received>,
}

impl Ends {
    /// Collects reports until both processes have ended. When one has, the other one has the time in which it finds
    /// that out.
    fn collect(&mut self, heard: &Receiver<Heard>, prompt: &PromptArguments) {
        let mut until: Option<Instant> = None;
        let mut open = 2;
        while open > 0 {
            let next = match until {
                Some(until) => heard.recv_timeout(until.saturating_duration_since(Instant::now())),
                None => heard.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok((_, Some(Line::Connected))) => self.folder = None,
                Ok((_, Some(Line::Sent(sent)))) => {
                    // A receiver that was stopped reports nothing.
                    if sent.failure.is_some() && matches!(prompt.fault, Some(Fault::StopReceiver(_))) {
                        self.receiver = None;
                    }
                    self.sent = Some(sent);
                }
                Ok((_, Some(Line::Received(received)))) => self.received = Some(received),
                Ok((_, Some(Line::Listening { .. } | Line::Unopened { .. }))) => {}
                Ok((_, None)) => {
                    open -= 1;
                    until = Some(Instant::now() + 2 * prompt.timeout);
                }
                Err(_) => return,
            }
        }
    }

    /// Whether an end had an error, of which it has told.
    fn broken(&mut self) -> bool {
        let bad = i32::from(BAD_INPUT);
        let ends = [(&mut self.sender, self.sent.is_some()), (&mut self.receiver, self.received.is_some())];
        ends.into_iter().any(|(end, reported)| {
            // One that has ended by itself keeps its status.
            let status = end.as_mut().and_then(|process| {
                let _ = process.0.kill();
                process.0.wait().ok()
            });
            !reported && status.is_some_and(|status| status.code() == Some(bad))
        })
    }
}
