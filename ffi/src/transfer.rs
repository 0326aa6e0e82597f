//! What both ends of a transfer have in common: where rows are, who meets whom, and what has happened.
//!
//! C's lists are flat. Here they become the library's sides, which it checks. No count is trusted before it is compared
//! with a bound.

use std::ffi::c_char;
use std::time::{Duration, Instant};

use forebay::transfer::socket::{Address, Options, Token, Way};
use forebay::transfer::thread::News;
use forebay::transfer::{Component, LayerPlaces, Place, Plan, Rank, Side, Split, Stage};
use forebay::{Error, Kind, Result};

use crate::cast::{self, Plain, Versioned, create};
use crate::config::or;
use crate::status::{FbStatus, Text};

/// Frames and rows go over TCP: between hosts, or between processes of one that share no memory.
pub const FB_TRANSFER_TCP: u32 = 1;
/// Rows are read from shared memory, and frames go over a Unix socket: between processes of one host and user.
pub const FB_TRANSFER_SHM: u32 = 2;

/// Each rank of a stage has all tokens of its heads (tensor parallel).
pub const FB_TRANSFER_SPLIT_HEADS: u32 = 0;
/// Each rank of a stage has all heads of its tokens (sequence parallel prefill). A receiver cannot be divided so.
pub const FB_TRANSFER_SPLIT_TOKENS: u32 = 1;

/// Nothing has happened for the given time.
pub const FB_TRANSFER_NOTHING: u32 = 0;
/// A rank of the other side has said hello, on connection `link`: `instance`, `replica`, `stage` and `lane` say which.
pub const FB_TRANSFER_MET: u32 = 1;
/// Connection `link` is there.
pub const FB_TRANSFER_CONNECTED: u32 = 2;
/// Connection `link` is gone. `status` and the text say why, if this end knows it. A sender connects again by itself.
pub const FB_TRANSFER_LOST: u32 = 3;
/// A connection did not open; `status` and the text say why. A sender tries again by itself.
pub const FB_TRANSFER_UNOPENED: u32 = 4;
/// A call was refused when it was carried out, and has changed nothing. `status` and the text say why; `request` is the
/// request that the call was about, if `is_of_request` is 1. Of several parts of fb_sender_computed each is taken or
/// refused by itself; the text has the layer and origin of one that was refused, whose memory is the engine's.
pub const FB_TRANSFER_REFUSED: u32 = 5;
/// Sender: a receiver has given pages to `request`, and wants its tokens from `first` on.
pub const FB_TRANSFER_GRANTED: u32 = 6;
/// Sender: nothing reads the rows of `request` at `origin` any more. Their memory may be written again.
pub const FB_TRANSFER_RELEASED: u32 = 7;
/// Sender: `request` is over, and nothing reads its rows any more. `status` is FB_OK if its receivers have everything;
/// FB_CANCELLED if a side gave it up; FB_CORRUPT, FB_TIMED_OUT, FB_PEER_LOST or FB_BAD_FORMAT; FB_CLOSED if this rank
/// held its rows no longer.
pub const FB_TRANSFER_ENDED: u32 = 8;
/// Receiver: all rows of `layer` are stored.
pub const FB_TRANSFER_READY: u32 = 9;
/// Receiver: a payload has come. fb_receiver_payload reads it.
pub const FB_TRANSFER_PAYLOAD: u32 = 10;
/// Receiver: all rows and payloads of the use are there. Nothing is written to its pages any more.
pub const FB_TRANSFER_WHOLE: u32 = 11;
/// Receiver: the use will not become whole; `status` and the text say why. Nothing is written to its pages any more.
pub const FB_TRANSFER_FAILED: u32 = 12;
/// Receiver: all senders of the use know that it has ended, or are gone.
pub const FB_TRANSFER_DRAINED: u32 = 13;

/// The most components, places, planes and stages that are looked at. A side may have fewer.
const COMPONENTS_MAX: u32 = 64;
const LIST_MAX: u32 = 1 << 14;
const STAGES_MAX: u32 = 1 << 10;

/// What every token has under one name in a layer: latents, rope keys, index keys, K or V.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTransferComponent {
    /// The name in UTF-8, at most 64 bytes, which both sides use.
    pub name: *const c_char,
    /// The type of the numbers in UTF-8, at most 64 bytes, which both sides call the same. Rows are never converted.
    pub dtype: *const c_char,
    /// KV heads of the model; 1 for what all heads share, such as MLA's latents and index keys.
    pub heads: u32,
    /// Bytes of one head of a token.
    pub head_bytes: u32,
}

// SAFETY: pointers, which are words, and two words of 4 bytes.
unsafe impl Plain for FbTransferComponent {}

/// Where a component of a layer is in the pages of a rank: head `h` of the rank's own heads of the page's token `t` is
/// at byte `offset` + `t` * `token_stride` + `h` * `head_stride` of the page.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTransferPlace {
    /// The pipeline stage that has the layer.
    pub stage: u32,
    /// The layer's number in the model, draft layers included. A layer is in one stage.
    pub layer: u32,
    /// The component, by its place in `components`.
    pub component: u32,
    /// The plane, by its place among those of the stage.
    pub plane: u32,
    /// The first byte of the page's first token.
    pub offset: u64,
    /// Bytes from a token to the next one.
    pub token_stride: u64,
    /// Bytes from a head to the next one.
    pub head_stride: u64,
}

// SAFETY: four words of 4 bytes, then words.
unsafe impl Plain for FbTransferPlace {}

/// Where an instance keeps the rows of a request. A plane is a list of pages; a page is one number in all planes of a
/// rank. All ranks of an instance pass the same.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTransferSide {
    /// sizeof(fb_transfer_side).
    pub size: usize,
    /// What tokens have. The other side may list it in another order.
    pub components: *const FbTransferComponent,
    /// Where it is, in any order.
    pub places: *const FbTransferPlace,
    /// For each plane the bytes of a page: first the planes of stage 0.
    pub page_bytes: *const u64,
    /// Optional: for each stage the number of its planes. NULL: there is one stage, which has all.
    pub stage_planes: *const u32,
    /// The number of components, at most 64.
    pub component_count: u32,
    /// The number of places, at most 16,384.
    pub place_count: u32,
    /// The number of planes of all stages together, at most 16,384.
    pub plane_count: u32,
    /// Tokens of a page, at most 65,536.
    pub page_tokens: u32,
    /// Optional: pipeline stages, at most 1,024. Default: 1.
    pub stages: u32,
    /// Optional: ranks of a stage. Default: 1.
    pub width: u32,
    /// Optional: how they divide a request, FB_TRANSFER_SPLIT_HEADS or FB_TRANSFER_SPLIT_TOKENS. Default:
    /// FB_TRANSFER_SPLIT_HEADS.
    pub split: u32,
    /// Optional: independent copies of all of this, each with requests of its own (data parallel attention). Default:
    /// 1.
    pub replicas: u32,
}

// SAFETY: words and pointers, which are words; eight of 4 bytes at the end.
unsafe impl Plain for FbTransferSide {}
impl Versioned for FbTransferSide {
    const NAME: &'static str = "fb_transfer_side";
    const REQUIRED: usize = std::mem::offset_of!(FbTransferSide, stages);
}

/// Who this end is, how it meets the other ones, and its times. An optional field that is 0 gets the default that its
/// comment names.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTransferConfig {
    /// sizeof(fb_transfer_config).
    pub size: usize,
    /// This rank's instance: a number that its ranks share, and that no other instance has. An instance that starts
    /// again has another one.
    pub instance: u64,
    /// What carries frames and rows, FB_TRANSFER_TCP or FB_TRANSFER_SHM.
    pub fabric: u32,
    /// This rank's replica, below `replicas` of the side.
    pub replica: u32,
    /// Its stage.
    pub stage: u32,
    /// Its place in the stage, below `width`.
    pub lane: u32,
    /// Receivers: where it listens: an IP address and a port, such as "127.0.0.1:7000", or the path of a Unix socket.
    /// Of port 0 the system chooses the port. Senders: NULL.
    pub address: *const c_char,
    /// Optional: a secret that both sides have, of at least 16 random bytes. NULL: none; then only addresses of this
    /// host are taken. It says who opens a connection, and hides nothing: on a network use a tunnel.
    pub token: *const u8,
    /// The bytes of `token`.
    pub token_bytes: usize,
    /// Optional: after how long without another byte to send a sign of life is sent, in milliseconds. Default: 1
    /// second.
    pub alive_ms: u32,
    /// Optional: after how long without a byte from the other end a connection is lost; more than the other end's
    /// `alive_ms`. Default: 10 seconds.
    pub lost_ms: u32,
    /// Optional: how long an opening may take. Default: 5 seconds.
    pub opening_ms: u32,
    /// Optional: after how long a message that was not answered is sent again, each time after twice as long. Default:
    /// 200 milliseconds.
    pub resend_ms: u32,
    /// Optional: after how long a connection is closed on which nothing comes, although something is owed. Default: 5
    /// seconds.
    pub patience_ms: u32,
    /// Optional: the most open connections. Default: 1024.
    pub links: u32,
    /// Optional: the most bytes that wait to be sent on a connection, rows included; one frame with its rows may be
    /// longer. Default: 4 MiB.
    pub queue_bytes: u32,
    /// Optional: receivers: the most bytes of rows behind a frame over TCP, above `notice_bytes` of every sender.
    /// Default: 64 MiB.
    pub rows_max: u32,
    /// Optional: the most requests at a time. Default: 4096.
    pub requests: u32,
    /// Optional: senders: the most bytes of rows that one notice tells, if they are more than one token's. Default: 32
    /// MiB.
    pub notice_bytes: u32,
    /// Optional: senders: prompts of at most so many tokens are told at once when they are finished, longer ones layer
    /// by layer. Default: 256.
    pub bulk_tokens: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional: senders: the most bytes of rows a second that are told for the first time. Default: no limit.
    pub bytes_per_second: u64,
}

// SAFETY: words and pointers, which are words; four of 4 bytes, and twelve before the last word.
unsafe impl Plain for FbTransferConfig {}
impl Versioned for FbTransferConfig {
    const NAME: &'static str = "fb_transfer_config";
    const REQUIRED: usize = std::mem::offset_of!(FbTransferConfig, token);
}

/// What has happened at an end. A field that the kind's comment does not name is 0.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTransferEvent {
    /// sizeof(fb_transfer_event), set by the caller.
    pub size: usize,
    /// An FB_TRANSFER_ constant.
    pub kind: u32,
    /// The fb_status of the event's error, FB_OK where there is none.
    pub status: u32,
    /// The request.
    pub request: u64,
    /// With `request` the use of pages, of the events of a receiver and of FB_TRANSFER_GRANTED.
    pub generation: u64,
    /// FB_TRANSFER_RELEASED: where the rows are.
    pub origin: u64,
    /// FB_TRANSFER_MET: the rank.
    pub instance: u64,
    /// Its replica.
    pub replica: u32,
    /// Its stage.
    pub stage: u32,
    /// Its lane.
    pub lane: u32,
    /// The connection's number, of FB_TRANSFER_MET, FB_TRANSFER_CONNECTED, FB_TRANSFER_LOST and FB_TRANSFER_GRANTED.
    pub link: u32,
    /// FB_TRANSFER_READY: the layer's number in the model.
    pub layer: u32,
    /// FB_TRANSFER_GRANTED: the first token that is wanted.
    pub first: u32,
    /// FB_TRANSFER_PAYLOAD: its kind.
    pub payload: u32,
    /// FB_TRANSFER_PAYLOAD: its bytes.
    pub payload_bytes: u32,
    /// 1 if `request` names a request.
    pub is_of_request: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: words; two of 4 bytes, and ten at the end.
unsafe impl Plain for FbTransferEvent {}
impl Versioned for FbTransferEvent {
    const NAME: &'static str = "fb_transfer_event";
    const REQUIRED: usize = std::mem::offset_of!(FbTransferEvent, reserved);
}

/// The error of a wrong value of an argument.
pub(crate) fn refuse(place: &'static str, value: u64) -> Error {
    Error::new(Kind::InvalidConfig, "transfer").at(place).with("given", value)
}

/// A bounded count.
pub(crate) fn counted(count: u32, most: u32, place: &'static str) -> Result<usize> {
    match count <= most {
        true => Ok(count as usize),
        false => Err(refuse(place, count.into()).with("most", most)),
    }
}

/// A time of a configuration.
pub(crate) const fn time_or(given: u32, default: Duration) -> Duration {
    if given == 0 { default } else { Duration::from_millis(given as u64) }
}

/// A time of a call, where 0 is none.
pub(crate) fn within(given: u32) -> Option<Duration> {
    (given != 0).then(|| Duration::from_millis(given.into()))
}

impl FbTransferSide {
    /// The library's side. It is checked where an end or a plan is made of it.
    ///
    /// # Safety
    /// The pointers name as many entries as the counts beside them say, and the names of components end with a zero.
    pub(crate) unsafe fn side(&self) -> Result<Side> {
        let component_count = counted(self.component_count, COMPONENTS_MAX, "component_count")?;
        let place_count = counted(self.place_count, LIST_MAX, "place_count")?;
        let plane_count = counted(self.plane_count, LIST_MAX, "plane_count")?;
        let stage_count = counted(or(self.stages, 1), STAGES_MAX, "stages")?;
        // SAFETY: this call's contract, for all of them.
        let (listed, places, page_bytes) = unsafe {
            (
                cast::slice(self.components, component_count, "components")?,
                cast::slice(self.places, place_count, "places")?,
                cast::slice(self.page_bytes, plane_count, "page_bytes")?,
            )
        };
        let planes = match self.stage_planes.is_null() {
            true if stage_count > 1 => return Err(cast::null("stage_planes")),
            true => &[self.plane_count],
            // SAFETY: the same.
            false => unsafe { cast::slice(self.stage_planes, stage_count, "stage_planes") }?,
        };
        let mut components = Vec::with_capacity(component_count);
        for component in listed {
            // SAFETY: the same.
            let (name, dtype) = unsafe {
                (
                    cast::text(component.name, "name")?.to_owned(),
                    cast::text(component.dtype, "dtype")?.to_owned(),
                )
            };
            let (heads, head_bytes) = (component.heads, component.head_bytes.into());
            components.push(Component { name, dtype, heads, head_bytes });
        }
        Ok(Side {
            components,
            stages: stages(planes, page_bytes, places)?,
            width: or(self.width, 1),
            split: match self.split {
                FB_TRANSFER_SPLIT_HEADS => Split::Heads,
                FB_TRANSFER_SPLIT_TOKENS => Split::Tokens,
                other => return Err(refuse("split", other.into())),
            },
            replicas: or(self.replicas, 1),
            page_tokens: self.page_tokens,
        })
    }
}

/// The stages of a side, from C's flat lists.
fn stages(planes: &[u32], page_bytes: &[u64], places: &[FbTransferPlace]) -> Result<Vec<Stage>> {
    let mut stages = Vec::with_capacity(planes.len());
    let mut left = page_bytes;
    for count in planes {
        let (own, others) = left
            .split_at_checked(*count as usize)
            .ok_or_else(|| refuse("stage_planes: more planes than page_bytes has", (*count).into()))?;
        stages.push(Stage { layers: Vec::new(), page_bytes: own.to_vec() });
        left = others;
    }
    if !left.is_empty() {
        return Err(refuse("stage_planes: fewer planes than page_bytes has", left.len() as u64));
    }
    for place in places {
        let FbTransferPlace { component, plane, offset, token_stride, head_stride, .. } = *place;
        let stage = stages
            .get_mut(place.stage as usize)
            .ok_or_else(|| refuse("stage of a place", place.stage.into()))?;
        let place_of = Place { component, plane, offset, token_stride, head_stride };
        match stage.layers.iter_mut().find(|of| of.layer == place.layer) {
            Some(of) => of.places.push(place_of),
            None => stage.layers.push(LayerPlaces { layer: place.layer, places: vec![place_of] }),
        }
    }
    Ok(stages)
}

impl FbTransferConfig {
    pub(crate) fn way(&self) -> Result<Way> {
        match self.fabric {
            FB_TRANSFER_TCP => Ok(Way::Tcp),
            FB_TRANSFER_SHM => Ok(Way::Shm),
            other => Err(refuse("fabric", other.into())),
        }
    }

    pub(crate) const fn rank(&self) -> Rank {
        let FbTransferConfig { instance, replica, stage, lane, .. } = *self;
        Rank { instance, replica, stage, lane }
    }

    /// The options of the fabric.
    ///
    /// # Safety
    /// `token` is null, or names `token_bytes` bytes.
    pub(crate) unsafe fn options(&self) -> Result<Options> {
        if self.reserved != 0 {
            return Err(refuse("reserved", self.reserved.into()));
        }
        // SAFETY: the same contract.
        let secret = unsafe { cast::slice(self.token, self.token_bytes, "token") }?;
        let token = match self.token.is_null() {
            true => None,
            false => Some(Token::new(secret)?),
        };
        let defaults = Options::default();
        let size = |given: u32, default| if given == 0 { default } else { given as usize };
        Ok(Options {
            token,
            alive: time_or(self.alive_ms, defaults.alive),
            lost: time_or(self.lost_ms, defaults.lost),
            opening: time_or(self.opening_ms, defaults.opening),
            links: size(self.links, defaults.links),
            queue: size(self.queue_bytes, defaults.queue),
            rows_max: size(self.rows_max, defaults.rows_max),
            ..defaults
        })
    }

    pub(crate) fn requests_or(&self, default: u32) -> u32 {
        or(self.requests, default)
    }
}

/// The bytes of a page in each plane of a stage.
pub(crate) fn page_bytes(side: &Side, stage: u32) -> Result<Vec<u64>> {
    let of = side.stages.get(stage as usize).ok_or_else(|| refuse("stage", stage.into()))?;
    Ok(of.page_bytes.clone())
}

/// An address of a fabric: a path byte by byte as given, or an IP address and a port.
///
/// # Safety
/// `text` is null, or names bytes up to one that is zero.
pub(crate) unsafe fn address(way: Way, text: *const c_char) -> Result<Address> {
    // SAFETY: the same contract, for both.
    unsafe {
        match way {
            Way::Shm => Ok(Address::Shm(cast::path(text, "address")?.to_owned())),
            Way::Tcp => Address::new(way, cast::text(text, "address")?),
        }
    }
}

/// The next thing that has happened, after at most a time. Threads may wait together: one of them gets it.
pub(crate) fn next<E>(
    at_most_ms: u32,
    poll: impl Fn() -> Result<Option<News<E>>>,
    wait: impl Fn(Duration) -> Result<()>,
) -> Result<Option<News<E>>> {
    let (start, at_most) = (Instant::now(), Duration::from_millis(at_most_ms.into()));
    loop {
        let news = poll()?;
        let left = at_most.saturating_sub(start.elapsed());
        if news.is_some() || left.is_zero() {
            return Ok(news);
        }
        wait(left)?;
    }
}

/// An event for C, and its error as a text.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) event: FbTransferEvent,
    text: Text,
}

impl Seen {
    pub(crate) const fn new(kind: u32) -> Seen {
        let event = FbTransferEvent {
            size: size_of::<FbTransferEvent>(),
            kind,
            status: 0,
            request: 0,
            generation: 0,
            origin: 0,
            instance: 0,
            replica: 0,
            stage: 0,
            lane: 0,
            link: 0,
            layer: 0,
            first: 0,
            payload: 0,
            payload_bytes: 0,
            is_of_request: 0,
            reserved: 0,
        };
        Seen { event, text: Text::new() }
    }

    pub(crate) const fn of(mut self, request: u64) -> Seen {
        (self.event.request, self.event.is_of_request) = (request, 1);
        self
    }

    pub(crate) fn why(mut self, error: &Error) -> Seen {
        self.event.status = FbStatus::from(error.kind()) as u32;
        self.text.set(error);
        self
    }

    pub(crate) const fn on(mut self, link: u32) -> Seen {
        self.event.link = link;
        self
    }

    pub(crate) const fn met(link: u32, rank: Rank) -> Seen {
        let mut seen = Seen::new(FB_TRANSFER_MET).on(link);
        let event = &mut seen.event;
        (event.instance, event.replica, event.stage, event.lane) =
            (rank.instance, rank.replica, rank.stage, rank.lane);
        seen
    }

    /// What both ends may say; an event of a machine is turned by `of`.
    pub(crate) fn news<E>(news: Option<News<E>>, of: impl FnOnce(E) -> Seen) -> Seen {
        match news {
            None => Seen::new(FB_TRANSFER_NOTHING),
            Some(News::Event(event)) => of(event),
            Some(News::Connected { link }) => Seen::new(FB_TRANSFER_CONNECTED).on(link),
            Some(News::Lost { link, why }) => {
                let seen = Seen::new(FB_TRANSFER_LOST).on(link);
                why.iter().fold(seen, Seen::why)
            }
            Some(News::Unopened { why }) => Seen::new(FB_TRANSFER_UNOPENED).why(&why),
            Some(News::Refused { request, why }) => {
                let seen = Seen::new(FB_TRANSFER_REFUSED).why(&why);
                request.into_iter().fold(seen, Seen::of)
            }
        }
    }

    /// Writes the event, and its error to `text`.
    ///
    /// # Safety
    /// `text` is null, or names `text_bytes` bytes that nothing else uses during the call.
    pub(crate) unsafe fn write(
        &self,
        event: cast::VersionedOut<'_, FbTransferEvent>,
        text: *mut c_char,
        text_bytes: usize,
    ) {
        // SAFETY: the same contract.
        unsafe { cast::write_text(text, text_bytes, self.text.with_end()) };
        event.set(&self.event);
    }
}

/// Checks that rows can go from one side to the other, and writes how many bytes `tokens` tokens take on all ranks of
/// one replica of the receiver. Both sides have to agree on the layers, and on names, types and sizes of components;
/// they may differ in pages, strides, stages, ranks and replicas. FB_INVALID_CONFIG names what is wrong in a side, or
/// differs; FB_UNSUPPORTED for a receiver that divides requests by tokens.
///
/// # Safety
/// Both sides state their real sizes, and have as many entries as they say; `text` is NULL or has `text_bytes` bytes;
/// `bytes` has room for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_transfer_plan(
    sender: *const FbTransferSide,
    receiver: *const FbTransferSide,
    tokens: u32,
    text: *mut c_char,
    text_bytes: usize,
    bytes: *mut u64,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        create(text, text_bytes, || {
            let (from, to) = (cast::versioned(sender)?, cast::versioned(receiver)?);
            let bytes = cast::out(bytes, "bytes")?;
            let plan = Plan::new(&FbTransferSide::side(&from)?, &FbTransferSide::side(&to)?)?;
            bytes.set(plan.bytes(tokens));
            Ok(())
        })
    }
}
