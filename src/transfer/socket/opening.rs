//! The opening of a connection: what both ends say before a frame goes over it.
//!
//! 1. The sender says hello, and then the receiver. A hello has 48 bytes: the mark `FOREBAYC`; the version (4, 1); the
//!    side (1: 1 sender, 2 receiver); the way (1: 1 a stream, 2 shared memory); whether it has a token (1); 0 (1); 32
//!    random bytes, the nonce. The first 12 bytes never change, so that another version is told as such.
//! 2. The sender proves that it knows the token, and then the receiver. A proof is the keyed BLAKE3 hash of a text, the
//!    way, the prover's side and both nonces, the sender's first. Without tokens it is 32 zeros. So a proof is good for
//!    one side of one connection, and a stranger that only connects gets none to guess at.
//! 3. Over shared memory the sender hands over its memory.
//!
//! An end that refuses says why in a byte, if the other one said hello ([`refusal`]). Anything else ends the
//! connection, as soon as a record's header shows it. A proof is compared as a whole, so that the time tells nothing of
//! it. A receiver that has as many connections as it may says so before its proof.
//!
//! **What a stranger learns.** One that listens at a receiver's address gets a sender's proof, and may try tokens
//! against it for as long as it likes. So a token has to be long and random: a word or a phrase would be found.
//!
//! **What it does not do.** It hides nothing, and binds no byte that follows to the token. Over a network that others
//! can read or change, a tunnel (WireGuard, TLS) has to.

use std::os::fd::OwnedFd;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults, Map, Protection};
use crate::transfer::frames::FRAME_MAX;
use crate::transfer::memory::{Plane, Planes, SendMemory};
use crate::transfer::socket::address::Way;
use crate::transfer::socket::connection::Connection;
use crate::transfer::socket::options::{Options, Token};
use crate::transfer::socket::record::{HEADER, Header, PROOF, Says};
use crate::transfer::socket::refusal;

/// The version of connections: of the opening and of records.
pub const VERSION: u32 = 1;

const MARK: [u8; 8] = *b"FOREBAYC";
const HELLO: usize = 48;
const TEXT: &[u8] = b"forebay transfer opening 1";
const OPERATION: &str = "transfer connection";

/// Which side an end is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Sender = 1,
    Receiver = 2,
}

/// What is awaited next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Hello,
    Proof,
    Memory,
    Open,
}

/// A sender's memory, as a receiver has mapped it.
pub type Adopted = (Map, Planes);

#[derive(Debug)]
pub struct Opening {
    side: Side,
    way: Way,
    token: Option<Token>,
    nonces: [[u8; 32]; 2],
    stage: Stage,
    /// At a receiver over shared memory, once it is open.
    pub adopted: Option<Adopted>,
}

fn foreign() -> Error {
    Error::new(Kind::BadFormat, OPERATION)
        .at("bytes that no end of a fabric sends")
        .hint("let only instances that use forebay connect to this address")
}

/// Whether both are the same. Takes as long for any two.
fn is_same(one: &[u8; PROOF], other: &[u8; PROOF]) -> bool {
    std::hint::black_box(one.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b))) == 0
}

fn record(says: Says, own: &[u8]) -> Vec<u8> {
    [&Header { says, own: own.len(), behind: 0 }.encode()[..], own].concat()
}

impl Opening {
    /// Begins one.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] if the system gives no random bytes.
    pub fn new(side: Side, way: Way, connection: &mut Connection, options: &Options) -> Result<Opening> {
        let mut nonces = [[0; 32]; 2];
        let own = if side == Side::Sender { &mut nonces[0] } else { &mut nonces[1] };
        os::random(own, &*options.faults)?;
        let (token, stage) = (options.token.clone(), Stage::Hello);
        let opening = Opening { side, way, token, nonces, stage, adopted: None };
        if side == Side::Sender {
            connection.outgoing.push(opening.hello().to_vec());
        }
        Ok(opening)
    }

    /// Whether the other end has said nothing yet.
    pub fn is_silent(&self) -> bool {
        self.stage == Stage::Hello
    }

    fn hello(&self) -> [u8; HELLO] {
        let nonce = if self.side == Side::Sender { self.nonces[0] } else { self.nonces[1] };
        let tail = [self.side as u8, self.way as u8, u8::from(self.token.is_some()), 0];
        let all = MARK.into_iter().chain(VERSION.to_le_bytes()).chain(tail).chain(nonce);
        let mut hello = [0; HELLO];
        hello.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        hello
    }

    /// The proof of a side.
    fn proof(&self, side: Side) -> [u8; PROOF] {
        let Some(token) = &self.token else { return [0; PROOF] };
        let mut hash = blake3::Hasher::new_keyed(token.key());
        hash.update(TEXT).update(&[self.way as u8, side as u8]);
        hash.update(&self.nonces[0]).update(&self.nonces[1]);
        *hash.finalize().as_bytes()
    }

    const fn theirs(&self) -> Side {
        match self.side {
            Side::Sender => Side::Receiver,
            Side::Receiver => Side::Sender,
        }
    }

    /// Goes on as far as what came allows. Returns whether the connection is open.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for other bytes or memory, [`Kind::BadVersion`], [`Kind::InvalidConfig`] for another token,
    /// [`Kind::Exhausted`] where an end is `full`; those of the connection. It is of no use after any.
    pub fn advance(
        &mut self,
        connection: &mut Connection,
        memory: Option<&SendMemory>,
        options: &Options,
        now: Instant,
        full: bool,
    ) -> Result<bool> {
        connection.step(None, options, now)?;
        let done = self.take(connection, memory, options, full);
        if let Err(error) = &done
            && self.stage != Stage::Hello
        {
            let why = match error.kind() {
                Kind::InvalidConfig => refusal::TOKEN,
                Kind::Exhausted => refusal::FULL,
                _ if self.stage == Stage::Memory => refusal::MEMORY,
                _ => refusal::OTHER,
            };
            connection.outgoing.push(record(Says::Refused, &[why]));
        }
        // Of an end that is refused the socket takes the byte, or it learns nothing.
        let flushed = connection.flush(None, options, now);
        done?;
        flushed.map(|()| self.stage == Stage::Open)
    }

    fn take(
        &mut self,
        connection: &mut Connection,
        memory: Option<&SendMemory>,
        options: &Options,
        full: bool,
    ) -> Result<()> {
        if self.stage == Stage::Hello && !self.take_hello(connection)? {
            return Ok(());
        }
        while self.stage != Stage::Open
            && let Some(header) = connection.incoming.head(0)?
        {
            // Before all of it is there: of a stranger no more is kept than a proof.
            if !matches!(
                (header.says, self.stage),
                (Says::Refused, _) | (Says::Proof, Stage::Proof) | (Says::Memory, Stage::Memory)
            ) {
                return Err(foreign());
            }
            let Some(found) = connection.incoming.record(0)? else { break };
            let own = connection.incoming.bytes(found.own).to_vec();
            connection.incoming.consume(found.behind.end);
            match found.says {
                Says::Proof => {
                    self.take_proof(&own, connection, memory, options, full)?;
                }
                Says::Memory => {
                    let descriptor = connection.incoming.descriptor.take();
                    self.adopted = Some(adopt(&own, descriptor, &*options.faults)?);
                    self.stage = Stage::Open;
                }
                _ => return Err(refusal::error(own.first().copied().unwrap_or(0))),
            }
        }
        match connection.incoming.descriptor {
            Some(_) if self.stage != Stage::Memory => {
                Err(Error::new(Kind::BadFormat, OPERATION).at("a descriptor that no record announces"))
            }
            _ => Ok(()),
        }
    }

    /// Takes the other end's hello, if it is there.
    fn take_hello(&mut self, connection: &mut Connection) -> Result<bool> {
        let came = connection.incoming.arrived();
        // Of a stranger the first byte is enough.
        if came.iter().zip(MARK).any(|(came, mark)| *came != mark) {
            return Err(foreign());
        }
        let Some(hello) = connection.incoming.take::<HELLO>() else { return Ok(false) };
        self.stage = Stage::Proof;
        if self.side == Side::Receiver {
            connection.outgoing.push(self.hello().to_vec());
        }
        let [_, _, _, _, _, _, _, _, a, b, c, d, side, way, token, zero, nonce @ ..] = hello;
        let version = u32::from_le_bytes([a, b, c, d]);
        if version != VERSION {
            return Err(Error::new(Kind::BadVersion, OPERATION)
                .at("hello")
                .with("own", VERSION)
                .with("theirs", version)
                .hint("use the same forebay release in all instances"));
        }
        if side != self.theirs() as u8 || way != self.way as u8 || zero != 0 {
            return Err(Error::new(Kind::BadFormat, OPERATION)
                .at("an end that is no other side of this fabric")
                .hint("connect prefill instances to decode instances, over the same fabric"));
        }
        if token != u8::from(self.token.is_some()) {
            return Err(refusal::token());
        }
        self.nonces[usize::from(self.side == Side::Sender)] = nonce;
        if self.side == Side::Sender {
            connection.outgoing.push(record(Says::Proof, &self.proof(self.side)));
        }
        Ok(true)
    }

    fn take_proof(
        &mut self,
        own: &[u8],
        connection: &mut Connection,
        memory: Option<&SendMemory>,
        options: &Options,
        full: bool,
    ) -> Result<()> {
        let expected = self.proof(self.theirs());
        if !own.first_chunk().is_some_and(|proof| is_same(proof, &expected)) {
            return Err(refusal::token());
        }
        if full {
            return Err(refusal::full(options.links));
        }
        self.stage = Stage::Open;
        match (self.side, self.way) {
            (Side::Receiver, way) => {
                connection.outgoing.push(record(Says::Proof, &self.proof(self.side)));
                if way == Way::Shm {
                    self.stage = Stage::Memory;
                }
                Ok(())
            }
            (Side::Sender, Way::Tcp) => Ok(()),
            (Side::Sender, Way::Shm) => {
                let memory = memory.ok_or_else(|| Error::new(Kind::Internal, OPERATION))?;
                let descriptor = memory.map().export(Protection::Read, &*options.faults)?;
                connection.outgoing.push_with(record(Says::Memory, &told(memory)?), descriptor);
                Ok(())
            }
        }
    }
}

/// What a sender says of its memory.
///
/// # Errors
/// [`Kind::InvalidConfig`] for more planes than a record takes.
pub fn told(memory: &SendMemory) -> Result<Vec<u8>> {
    let planes = &memory.planes().0;
    let numbers = planes.iter().flat_map(|plane| [plane.offset, plane.page_bytes]);
    let told: Vec<u8> = [memory.map().len()].into_iter().chain(numbers).flat_map(u64::to_le_bytes).collect();
    match told.len() <= FRAME_MAX - HEADER {
        true => Ok(told),
        false => Err(Error::new(Kind::InvalidConfig, OPERATION)
            .at("planes of the memory")
            .with("planes", planes.len() as u64)),
    }
}

/// Maps what a sender handed over.
fn adopt(told: &[u8], descriptor: Option<OwnedFd>, faults: &dyn Faults) -> Result<Adopted> {
    let descriptor = descriptor
        .ok_or_else(|| Error::new(Kind::BadFormat, OPERATION).at("memory without its descriptor"))?;
    let (numbers, rest) = told.as_chunks::<8>();
    let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
    let bytes = numbers.next().unwrap_or(0);
    let planes: Vec<u64> = numbers.collect();
    let (planes, odd) = planes.as_chunks::<2>();
    if !rest.is_empty() || !odd.is_empty() {
        return Err(foreign());
    }
    let planes = planes.iter().map(|[offset, page_bytes]| Plane { offset: *offset, page_bytes: *page_bytes });
    Ok((Map::adopt(descriptor, bytes, Protection::Read, faults)?, Planes(planes.collect())))
}
