//! Frames of sessions between processes, for tests and the bodies of fuzz targets.

use std::time::Duration;

use forebay::peer::{Hello, Limits, Session};

/// This side of a session that bytes are fed to.
pub const OWN: Hello =
    Hello { group: 7, rank: 1, ranks: 2, geometry: [1; 32], plan: [2; 32], content: [0; 32] };

/// A hello, as a frame.
pub fn hello(hello: Hello) -> Vec<u8> {
    let session: Session<()> = Session::new(hello, Limits::default(), Duration::ZERO).unwrap();
    session.outgoing().unwrap().bytes.to_vec()
}

/// A frame of this kind around `content`.
pub fn frame(kind: u8, descriptor: u8, content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u32).to_le_bytes();
    [&length[..], &[kind, descriptor, 0, 0], content].concat()
}
