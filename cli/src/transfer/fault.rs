//! What `--fault` makes go wrong.

use std::fmt;

/// A fault. A layer is one of the prompt's, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The receiver fetches so many runs with a wrong byte, each once.
    Flip(u32),
    /// So many notices of the sender are lost.
    Drop(u32),
    /// The sender is killed when it has computed this layer.
    KillSender(u32),
    /// The receiver stops when it has stored this layer.
    StopReceiver(u32),
    /// The sender's engine gives the request up when it has computed this layer.
    Abort(u32),
}

impl Fault {
    /// A fault from its name and number.
    pub fn parse(text: &str) -> Result<Fault, String> {
        let wanted = "flip:N, drop:N, kill-sender:LAYER, stop-receiver:LAYER or abort:LAYER";
        let number = |number: &str| number.parse().map_err(|_| format!("not a number; wanted: {wanted}"));
        match text.split_once(':') {
            Some(("flip", count)) => number(count).map(Fault::Flip),
            Some(("drop", count)) => number(count).map(Fault::Drop),
            Some(("kill-sender", layer)) => number(layer).map(Fault::KillSender),
            Some(("stop-receiver", layer)) => number(layer).map(Fault::StopReceiver),
            Some(("abort", layer)) => number(layer).map(Fault::Abort),
            _ => Err(format!("not a fault; wanted: {wanted}")),
        }
    }

    /// The layer at which it happens, if it does so at one.
    pub const fn layer(self) -> Option<u32> {
        match self {
            Fault::Flip(_) | Fault::Drop(_) => None,
            Fault::KillSender(layer) | Fault::StopReceiver(layer) | Fault::Abort(layer) => Some(layer),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Flip(count) => write!(f, "flip:{count}"),
            Fault::Drop(count) => write!(f, "drop:{count}"),
            Fault::KillSender(layer) => write!(f, "kill-sender:{layer}"),
            Fault::StopReceiver(layer) => write!(f, "stop-receiver:{layer}"),
            Fault::Abort(layer) => write!(f, "abort:{layer}"),
        }
    }
}
