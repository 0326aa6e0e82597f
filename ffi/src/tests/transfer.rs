//! Tests of transfers by C's calls: a sender and a receiver, whose bytes are computed here, one by one, from request,
//! layer, component and token. The receiver's pages have gaps between them and pages that no use has: canaries.

mod refused;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::receiver::*;
use crate::sender::*;
use crate::transfer::*;

const TOKENS: u32 = 40;
/// Bytes of a token: a latent and an index key.
const TOKEN: [u64; 2] = [40, 12];
/// Pages of a request.
const OWN: u64 = TOKENS.div_ceil(PAGE) as u64;
/// Pages of the receiver, and the bytes between two of them.
const ALL: u64 = 9;
const GAP: u64 = 24;
const CANARY: u8 = 0xEE;
const PART: u64 = OWN * PAGE as u64 * (TOKEN[0] + TOKEN[1]);
const SOON: Duration = Duration::from_secs(30);
const SECRET: &[u8] = b"0123456789abcdef";

fn page_bytes(component: usize) -> u64 {
    u64::from(PAGE) * TOKEN[component]
}

fn byte(request: u64, layer: u32, component: usize, token: u32, at: u64) -> u8 {
    (request * 89 + u64::from(layer) * 31 + 7 * component as u64 + u64::from(token) * 13 + at * 5) as u8
}

/// The arrays of a side: each layer has a plane of latents and one of index keys.
struct Model {
    components: Vec<FbTransferComponent>,
    places: Vec<FbTransferPlace>,
    page_bytes: Vec<u64>,
}

impl Model {
    fn new() -> Model {
        let component = |name: &CStr, head_bytes| FbTransferComponent {
            name: name.as_ptr(),
            dtype: c"bytes".as_ptr(),
            heads: 1,
            head_bytes,
        };
        let place = |layer, component| FbTransferPlace {
            stage: 0,
            layer,
            component,
            plane: 2 * layer + component,
            offset: 0,
            token_stride: TOKEN[component as usize],
            head_stride: TOKEN[component as usize],
        };
        Model {
            components: vec![component(c"latent", 40), component(c"index_key", 12)],
            places: (0..LAYERS).flat_map(|layer| [place(layer, 0), place(layer, 1)]).collect(),
            page_bytes: (0..LAYERS).flat_map(|_| [page_bytes(0), page_bytes(1)]).collect(),
        }
    }

    fn side(&self) -> FbTransferSide {
        FbTransferSide {
            components: self.components.as_ptr(),
            places: self.places.as_ptr(),
            page_bytes: self.page_bytes.as_ptr(),
            component_count: self.components.len() as u32,
            place_count: self.places.len() as u32,
            plane_count: self.page_bytes.len() as u32,
            page_tokens: PAGE,
            ..sized()
        }
    }
}

/// An address that no other test has.
fn address(fabric: u32) -> CString {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("forebay-c-transfer-{}-{next}", std::process::id()));
    let text =
        if fabric == FB_TRANSFER_SHM { path.to_str().unwrap().to_owned() } else { "127.0.0.1:0".to_owned() };
    CString::new(text).unwrap()
}

fn config(fabric: u32, instance: u64) -> FbTransferConfig {
    FbTransferConfig {
        instance,
        fabric,
        token: SECRET.as_ptr(),
        token_bytes: SECRET.len(),
        bulk_tokens: 1,
        ..sized()
    }
}

fn send_planes() -> Vec<FbSendPlane> {
    let plane = |component| FbSendPlane {
        offset: if component == 0 { 0 } else { OWN * page_bytes(0) },
        page_bytes: page_bytes(component),
    };
    (0..LAYERS).flat_map(|_| [plane(0), plane(1)]).collect()
}

fn send_memory(planes: &[FbSendPlane]) -> FbSendMemory {
    FbSendMemory {
        bytes: 4 * u64::from(LAYERS) * PART,
        planes: planes.as_ptr(),
        plane_count: planes.len() as u32,
        memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
        ..sized()
    }
}

type Made<T> = std::result::Result<*mut T, (FbStatus, String)>;

fn make_sender(config: &FbTransferConfig, side: &FbTransferSide, memory: &FbSendMemory) -> Made<FbSender> {
    let (mut text, mut made) = ([0; 512], null_mut());
    // SAFETY: everything is valid and as long as stated, or refused.
    let status =
        unsafe { fb_sender_create(config, side, memory, text.as_mut_ptr(), text.len(), &raw mut made) };
    if status == FbOk { Ok(made) } else { Err((status, text_in(&text))) }
}

fn make_receiver(
    config: &FbTransferConfig,
    side: &FbTransferSide,
    planes: &[FbReceivePlane],
) -> Made<FbReceiver> {
    let (mut text, mut made) = ([0; 512], null_mut());
    let (first, count) = (planes.as_ptr(), planes.len() as u32);
    // SAFETY: everything is valid and as long as stated, or refused.
    let status = unsafe {
        fb_receiver_create(config, side, first, count, text.as_mut_ptr(), text.len(), &raw mut made)
    };
    if status == FbOk { Ok(made) } else { Err((status, text_in(&text))) }
}

/// The receiver's memory: pages with gaps between them, all of it canaries at first.
struct Memory(Vec<Vec<u8>>);

impl Memory {
    fn new() -> Memory {
        let plane = |component: usize| vec![CANARY; (ALL * (page_bytes(component) + GAP)) as usize];
        Memory((0..LAYERS).flat_map(|_| [plane(0), plane(1)]).collect())
    }

    fn planes(&mut self) -> Vec<FbReceivePlane> {
        let plane = |(index, bytes): (usize, &mut Vec<u8>)| FbReceivePlane {
            address: bytes.as_mut_ptr().cast(),
            bytes: bytes.len() as u64,
            page_bytes: page_bytes(index % 2) + GAP,
        };
        self.0.iter_mut().enumerate().map(plane).collect()
    }

    /// What it has to be when these requests are in these pages, from a token on.
    fn check(&self, uses: &BTreeMap<u64, (Vec<u32>, u32)>) {
        let mut wanted = Memory::new();
        for (request, (pages, first)) in uses {
            for (layer, component) in (0..LAYERS).flat_map(|layer| [(layer, 0), (layer, 1)]) {
                for token in *first..TOKENS {
                    let page = u64::from(pages[(token / PAGE) as usize]);
                    let start =
                        page * (page_bytes(component) + GAP) + u64::from(token % PAGE) * TOKEN[component];
                    for at in 0..TOKEN[component] {
                        wanted.0[2 * layer as usize + component][(start + at) as usize] =
                            byte(*request, layer, component, token, at);
                    }
                }
            }
        }
        for (plane, (own, wanted)) in self.0.iter().zip(&wanted.0).enumerate() {
            let differs = own.iter().zip(wanted).position(|(own, wanted)| own != wanted);
            assert_eq!(differs, None, "a byte of plane {plane}");
        }
    }
}

/// What an end has told: the event, and its text.
type Told = Vec<(FbTransferEvent, String)>;

fn poll(
    at_most: u32,
    call: impl Fn(u32, *mut c_char, usize, *mut FbTransferEvent) -> FbStatus,
    told: &mut Told,
) {
    loop {
        let (mut event, mut text) = (sized::<FbTransferEvent>(), [0; 512]);
        assert_eq!(call(at_most, text.as_mut_ptr(), text.len(), &raw mut event), FbOk);
        if event.kind == FB_TRANSFER_NOTHING {
            return;
        }
        told.push((event, text_in(&text)));
    }
}

struct Pair {
    sender: *mut FbSender,
    receiver: *mut FbReceiver,
    memory: Memory,
    at: CString,
    sent: Told,
    received: Told,
}

impl Pair {
    fn new(fabric: u32) -> Pair {
        let at = address(fabric);
        let receiving = FbTransferConfig { address: at.as_ptr(), ..config(fabric, 2) };
        Pair::of(&config(fabric, 1), &receiving)
    }

    fn of(sending: &FbTransferConfig, receiving: &FbTransferConfig) -> Pair {
        let (model, mut memory, planes) = (Model::new(), Memory::new(), send_planes());
        let receiver = make_receiver(receiving, &model.side(), &memory.planes()).unwrap();
        let sender = make_sender(sending, &model.side(), &send_memory(&planes)).unwrap();
        let mut text = [0; 512];
        // SAFETY: as long as stated.
        assert_eq!(unsafe { fb_receiver_address(receiver, text.as_mut_ptr(), text.len()) }, FbOk);
        let at = CString::new(text_in(&text)).unwrap();
        // SAFETY: it ends with a zero.
        assert_eq!(unsafe { fb_sender_add(sender, at.as_ptr()) }, FbOk);
        Pair { sender, receiver, memory, at, sent: Vec::new(), received: Vec::new() }
    }

    fn met(mut self) -> Pair {
        self.until("a sender", |pair| count(&pair.received, FB_TRANSFER_MET, None) == 1);
        let met = self.received.iter().find(|(event, _)| event.kind == FB_TRANSFER_MET).unwrap().0;
        assert_eq!((met.instance, met.replica, met.stage, met.lane), (1, 0, 0, 0));
        self
    }

    fn take(&mut self) {
        let (sender, receiver) = (self.sender, self.receiver);
        // SAFETY: everything is valid and as long as stated, for both.
        poll(
            0,
            |ms, text, room, event| unsafe { fb_sender_poll(sender, ms, text, room, event) },
            &mut self.sent,
        );
        let of_receiver = |ms, text, room, event| {
            // SAFETY: the same.
            unsafe { fb_receiver_poll(receiver, ms, text, room, event) }
        };
        poll(1, of_receiver, &mut self.received);
    }

    fn until(&mut self, what: &str, holds: impl Fn(&Pair) -> bool) {
        let start = Instant::now();
        loop {
            self.take();
            if holds(self) {
                return;
            }
            assert!(start.elapsed() < SOON, "{what}: {:?} {:?}", self.sent, self.received);
        }
    }

    fn wanted(request: u64) -> FbWanted {
        FbWanted { request, generation: request, instance: 1, tokens: TOKENS, ..sized() }
    }

    fn grant(&self, wanted: &FbWanted, pages: &[u32]) -> FbStatus {
        // SAFETY: everything is valid and as long as stated.
        unsafe { fb_receiver_grant(self.receiver, wanted, pages.as_ptr(), pages.len() as u32) }
    }

    /// Writes the rows of all layers, and says that they are computed.
    fn compute(&self, request: u64) {
        let (mut memory, mut bytes) = (null_mut(), 0);
        // SAFETY: both have room.
        assert_eq!(unsafe { fb_sender_memory(self.sender, &raw mut memory, &raw mut bytes) }, FbOk);
        assert!(bytes >= 4 * u64::from(LAYERS) * PART);
        for layer in 0..LAYERS {
            let origin = (request % 4 * u64::from(LAYERS) + u64::from(layer)) * PART;
            for (component, bytes) in TOKEN.into_iter().enumerate() {
                let start = origin + if component == 0 { 0 } else { OWN * page_bytes(0) };
                for (token, at) in (0..TOKENS).flat_map(|token| (0..bytes).map(move |at| (token, at))) {
                    let to = start + u64::from(token) * bytes + at;
                    // SAFETY: inside of the memory, of which nothing is told.
                    unsafe {
                        memory
                            .cast::<u8>()
                            .add(to as usize)
                            .write(byte(request, layer, component, token, at));
                    }
                }
            }
            let part = FbComputed { request, origin, layer, first: 0, tokens: TOKENS, ..sized() };
            // SAFETY: one part.
            assert_eq!(unsafe { fb_sender_computed(self.sender, &part, 1) }, FbOk);
        }
    }

    fn begin(&self, request: u64) {
        // SAFETY: a handle.
        assert_eq!(unsafe { fb_sender_begin(self.sender, request, TOKENS, 60_000) }, FbOk);
    }

    fn finish(&self, request: u64) {
        // SAFETY: a handle.
        assert_eq!(unsafe { fb_sender_finish(self.sender, request) }, FbOk);
    }

    fn end(self) -> Memory {
        // SAFETY: handles.
        unsafe {
            assert_eq!(fb_receiver_destroy(self.receiver), FbOk);
            assert_eq!(fb_sender_destroy(self.sender), FbOk);
        }
        self.memory
    }
}

/// How many events of a kind there are, of a request or of any.
fn count(told: &Told, kind: u32, request: Option<u64>) -> usize {
    let own =
        |event: &FbTransferEvent| request.is_none_or(|of| event.request == of && event.is_of_request == 1);
    told.iter().filter(|(event, _)| event.kind == kind && own(event)).count()
}

/// The status and the text of the only event of a kind of a request.
fn only(told: &Told, kind: u32, request: u64) -> (u32, &str) {
    let mut own = told.iter().filter(|(event, _)| event.kind == kind && event.request == request);
    let (event, text) = own.next().unwrap();
    assert!(own.next().is_none(), "{told:?}");
    (event.status, text)
}

fn both(test: fn(u32)) {
    test(FB_TRANSFER_TCP);
    test(FB_TRANSFER_SHM);
}

#[test]
fn a_request_moves_into_its_pages_and_nowhere_else() {
    both(|fabric| {
        let mut pair = Pair::new(fabric).met();
        let mut uses = BTreeMap::new();
        for (request, pages, first) in [(1, vec![5, 2, 7], 0), (2, vec![0, 8, 3], 20), (3, vec![4, 1, 6], 39)]
        {
            let kinds = [7_u8, 9];
            let payloads = (kinds.as_ptr(), kinds.len() as u32);
            let wanted =
                FbWanted { first, payloads: payloads.0, payload_count: payloads.1, ..Pair::wanted(request) };
            assert_eq!(pair.grant(&wanted, &pages), FbOk);
            pair.begin(request);
            pair.compute(request);
            for kind in kinds {
                let said = [kind; 100];
                // SAFETY: as long as stated.
                let status = unsafe {
                    fb_sender_payload(pair.sender, request, kind.into(), said.as_ptr(), said.len())
                };
                assert_eq!(status, FbOk);
            }
            pair.finish(request);
            pair.until("both payloads", |pair| {
                count(&pair.received, FB_TRANSFER_PAYLOAD, Some(request)) == 2
            });
            pair.until("the end", |pair| count(&pair.sent, FB_TRANSFER_ENDED, Some(request)) == 1);
            assert_eq!(only(&pair.received, FB_TRANSFER_WHOLE, request), (0, ""));
            assert_eq!(only(&pair.sent, FB_TRANSFER_ENDED, request), (0, ""));
            assert_eq!(count(&pair.received, FB_TRANSFER_READY, Some(request)), LAYERS as usize);
            assert_eq!(count(&pair.sent, FB_TRANSFER_RELEASED, Some(request)), LAYERS as usize);
            uses.insert(request, (pages, first));
            pair.memory.check(&uses);
        }
        let (mut sent, mut received, mut lag) = (sized::<FbSent>(), sized::<FbReceived>(), sized::<FbLag>());
        pair.until("all senders know", |pair| count(&pair.received, FB_TRANSFER_DRAINED, None) == 3);
        // SAFETY: they state their sizes.
        unsafe {
            assert_eq!(fb_sender_stats(pair.sender, &raw mut sent), FbOk);
            assert_eq!(fb_receiver_stats(pair.receiver, &raw mut received), FbOk);
            assert_eq!(fb_sender_lag(pair.sender, 1, &raw mut lag), FbOk);
        }
        let tokens = u64::from(3 * TOKENS - 20 - 39);
        assert_eq!((sent.done, sent.failed, sent.held), (3, 0, 0));
        assert!(sent.exposed_ns >= sent.exposed_longest_ns && sent.exposed_longest_ns > 0);
        assert_eq!((received.whole, received.failed, received.wrong), (3, 0, 0));
        assert_eq!(received.bytes, tokens * u64::from(LAYERS) * (TOKEN[0] + TOKEN[1]));
        assert!(lag.count == 3 && lag.total_ns >= lag.longest_ns && lag.longest_ns > 0);
        pair.end();
    });
}

/// Takes the events of the receiver alone, and reads a payload between them.
#[test]
fn a_payload_is_read_once_with_room_for_it_and_before_its_use_has_ended() {
    let mut pair = Pair::new(FB_TRANSFER_SHM).met();
    let kind = [7_u8];
    let wanted = FbWanted { payloads: kind.as_ptr(), payload_count: 1, ..Pair::wanted(1) };
    assert_eq!(pair.grant(&wanted, &[1, 2, 3]), FbOk);
    pair.begin(1);
    let said: Vec<u8> = (0..200).collect();
    // SAFETY: as long as stated.
    assert_eq!(unsafe { fb_sender_payload(pair.sender, 1, 7, said.as_ptr(), said.len()) }, FbOk);
    pair.until("the payload", |pair| count(&pair.received, FB_TRANSFER_PAYLOAD, Some(1)) == 1);
    let of = pair.received.iter().find(|(event, _)| event.kind == FB_TRANSFER_PAYLOAD).unwrap().0;
    assert_eq!((of.payload, of.payload_bytes), (7, 200));
    let receiver = pair.receiver;
    let read = |generation, kind, room: usize| {
        let mut bytes = vec![CANARY; 200];
        // SAFETY: at least as long as stated.
        (unsafe { fb_receiver_payload(receiver, 1, generation, kind, bytes.as_mut_ptr(), room) }, bytes)
    };
    let nothing = vec![CANARY; 200];
    assert_eq!(read(1, 7, 199), (FbOutOfRange, nothing.clone()));
    assert_eq!(read(1, 8, 200), (FbClosed, nothing.clone()));
    assert_eq!(read(1, 300, 200), (FbClosed, nothing.clone()));
    assert_eq!(read(2, 7, 200), (FbClosed, nothing.clone()));
    assert_eq!(read(1, 7, 200), (FbOk, said));
    assert_eq!(read(1, 7, 200), (FbClosed, nothing.clone()));
    // One that nothing reads ends with its use.
    let wanted = FbWanted { payloads: kind.as_ptr(), payload_count: 1, ..Pair::wanted(2) };
    assert_eq!(pair.grant(&wanted, &[4, 5, 6]), FbOk);
    pair.begin(2);
    // SAFETY: one byte.
    assert_eq!(unsafe { fb_sender_payload(pair.sender, 2, 7, kind.as_ptr(), 1) }, FbOk);
    pair.until("the payload", |pair| count(&pair.received, FB_TRANSFER_PAYLOAD, Some(2)) == 1);
    // SAFETY: a handle.
    assert_eq!(unsafe { fb_receiver_abort(pair.receiver, 2, 2) }, FbOk);
    pair.until("the end", |pair| count(&pair.received, FB_TRANSFER_FAILED, Some(2)) == 1);
    let mut byte = 0;
    // SAFETY: one byte.
    assert_eq!(unsafe { fb_receiver_payload(pair.receiver, 2, 2, 7, &raw mut byte, 1) }, FbClosed);
    pair.end().check(&BTreeMap::new());
}

#[test]
fn pages_that_are_not_there_are_refused_at_once_and_change_nothing() {
    let mut pair = Pair::new(FB_TRANSFER_TCP).met();
    let wanted = Pair::wanted(1);
    assert_eq!(pair.grant(&wanted, &[1, 2]), FbOutOfRange);
    assert!(text_of(pair.receiver).contains("pages of a request"));
    for beyond in [ALL as u32, u32::MAX] {
        assert_eq!(pair.grant(&wanted, &[1, beyond, 2]), FbOutOfRange);
        assert!(text_of(pair.receiver).contains("a page that a plane does not have"));
    }
    let reserved = FbWanted { reserved: 1, ..wanted };
    assert_eq!(pair.grant(&reserved, &[1, 2, 3]), FbInvalidConfig);
    assert_eq!(pair.grant(&FbWanted { payload_count: 257, ..wanted }, &[1, 2, 3]), FbInvalidConfig);
    // The same use with right pages is new; once more it is not.
    assert_eq!(pair.grant(&wanted, &[1, 2, 3]), FbOk);
    assert_eq!(pair.grant(&wanted, &[4, 5, 6]), FbInvalidState);
    assert!(text_of(pair.receiver).contains("a generation that is not above those of all grants before"));
    // A page that another use writes, also as one whose rows are there already.
    let next = Pair::wanted(2);
    let behind = FbWanted { first: PAGE, ..next };
    for (wanted, pages) in [(&next, [4, 3, 5]), (&next, [4, 5, 4]), (&behind, [3, 4, 5])] {
        assert_eq!(pair.grant(wanted, &pages), FbInvalidState);
        assert!(text_of(pair.receiver).contains("a page that is in use already"));
    }
    assert_eq!(pair.grant(&behind, &[6, 4, 5]), FbOk);
    assert_eq!(pair.grant(&FbWanted { generation: 3, request: 3, ..behind }, &[6, 7, 8]), FbOk);
    for request in [2, 3] {
        // SAFETY: a handle.
        assert_eq!(unsafe { fb_receiver_abort(pair.receiver, request, request) }, FbOk);
        pair.until("the end", |pair| count(&pair.received, FB_TRANSFER_FAILED, Some(request)) == 1);
    }
    pair.begin(1);
    pair.compute(1);
    pair.finish(1);
    pair.until("the end", |pair| count(&pair.received, FB_TRANSFER_WHOLE, Some(1)) == 1);
    assert_eq!(count(&pair.received, FB_TRANSFER_FAILED, None), 2);
    pair.end().check(&BTreeMap::from([(1, (vec![1, 2, 3], 0))]));
}

#[test]
fn what_is_refused_later_comes_out_of_a_poll() {
    let mut pair = Pair::new(FB_TRANSFER_SHM).met();
    // SAFETY: a handle.
    assert_eq!(unsafe { fb_sender_begin(pair.sender, 5, 0, 0) }, FbOk);
    pair.until("a refusal", |pair| count(&pair.sent, FB_TRANSFER_REFUSED, Some(5)) == 1);
    let (status, text) = only(&pair.sent, FB_TRANSFER_REFUSED, 5);
    assert!(status == FbOutOfRange as u32 && text.contains("tokens"), "{text}");
    // A sender that is not there: the use fails.
    assert_eq!(pair.grant(&FbWanted { instance: 9, ..Pair::wanted(5) }, &[1, 2, 3]), FbOk);
    pair.until("a failure", |pair| count(&pair.received, FB_TRANSFER_FAILED, Some(5)) == 1);
    assert_eq!(only(&pair.received, FB_TRANSFER_FAILED, 5).0, FbInvalidState as u32);
    // Calls that are wrong in themselves.
    let part = FbComputed { request: 1, first: u32::MAX, tokens: 1, ..sized() };
    // SAFETY: as long as stated, or refused before it is looked at.
    unsafe {
        assert_eq!(fb_sender_computed(pair.sender, &part, 1), FbOutOfRange);
        assert_eq!(fb_sender_computed(pair.sender, &part, 1 << 20), FbInvalidConfig);
        assert_eq!(fb_sender_payload(pair.sender, 1, 256, [0].as_ptr(), 1), FbOutOfRange);
        let large = vec![0; 1 << 20];
        assert_eq!(fb_sender_payload(pair.sender, 1, 1, large.as_ptr(), large.len()), FbOutOfRange);
        let mut text = [0; 4];
        assert_eq!(fb_receiver_address(pair.receiver, text.as_mut_ptr(), text.len()), FbOutOfRange);
    }
    pair.end().check(&BTreeMap::new());
}

#[test]
fn an_abort_of_either_side_ends_both() {
    both(|fabric| {
        let mut pair = Pair::new(fabric).met();
        for request in 1..=2 {
            assert_eq!(pair.grant(&Pair::wanted(request), &[1, 2, 3]), FbOk);
            pair.begin(request);
            // SAFETY: handles.
            let status = unsafe {
                match request {
                    1 => fb_receiver_abort(pair.receiver, request, request),
                    _ => fb_sender_abort(pair.sender, request),
                }
            };
            assert_eq!(status, FbOk);
            pair.until("both ends", |pair| {
                count(&pair.received, FB_TRANSFER_FAILED, Some(request)) == 1
                    && count(&pair.sent, FB_TRANSFER_ENDED, Some(request)) == 1
            });
            let (own, text) = only(&pair.received, FB_TRANSFER_FAILED, request);
            assert!(own == FbCancelled as u32 && !text.is_empty(), "{text}");
            let (own, text) = only(&pair.sent, FB_TRANSFER_ENDED, request);
            assert!(own == FbCancelled as u32 && text.contains("gave the request up"), "{text}");
        }
        pair.end().check(&BTreeMap::new());
    });
}

#[test]
fn a_sender_that_is_gone_fails_its_requests() {
    both(|fabric| {
        let mut pair = Pair::new(fabric).met();
        assert_eq!(pair.grant(&Pair::wanted(1), &[1, 2, 3]), FbOk);
        pair.begin(1);
        pair.until("the grant", |pair| count(&pair.sent, FB_TRANSFER_GRANTED, Some(1)) == 1);
        let gone = pair.sender;
        // SAFETY: handles, or what was one.
        unsafe {
            let (mut before, mut after, mut bytes) = (null_mut(), null_mut(), 0);
            assert_eq!(fb_sender_memory(gone, &raw mut before, &raw mut bytes), FbOk);
            assert_eq!((fb_sender_end(gone), fb_sender_end(gone)), (FbOk, FbOk));
            // Its memory is still there.
            assert_eq!(fb_sender_memory(gone, &raw mut after, &raw mut bytes), FbOk);
            assert_eq!(before, after);
            before.cast::<u8>().add(bytes as usize - 1).write(1);
            assert_eq!(fb_sender_begin(gone, 2, 1, 0), FbClosed);
            assert!(text_of(gone).contains("it was ended"));
            assert_eq!(fb_sender_destroy(gone), FbOk);
            assert_eq!(fb_sender_begin(gone, 2, 1, 0), FbClosed);
            assert_eq!(fb_sender_destroy(gone), FbClosed);
        }
        // Another one takes its place.
        let (model, planes) = (Model::new(), send_planes());
        pair.sender = make_sender(&config(fabric, 7), &model.side(), &send_memory(&planes)).unwrap();
        pair.until("the loss", |pair| count(&pair.received, FB_TRANSFER_FAILED, Some(1)) == 1);
        assert_eq!(only(&pair.received, FB_TRANSFER_FAILED, 1).0, FbPeerLost as u32);
        assert_eq!(count(&pair.received, FB_TRANSFER_LOST, None), 1);
        // SAFETY: it ends with a zero.
        assert_eq!(unsafe { fb_sender_add(pair.sender, pair.at.as_ptr()) }, FbOk);
        pair.until("the other one", |pair| count(&pair.received, FB_TRANSFER_MET, None) == 2);
        // SAFETY: the same.
        assert_eq!(unsafe { fb_sender_remove(pair.sender, pair.at.as_ptr()) }, FbOk);
        pair.until("its loss", |pair| count(&pair.received, FB_TRANSFER_LOST, None) == 2);
        pair.end().check(&BTreeMap::new());
    });
}

#[test]
fn another_token_opens_no_connection() {
    both(|fabric| {
        let at = address(fabric);
        let receiving = FbTransferConfig { address: at.as_ptr(), ..config(fabric, 2) };
        let other = b"fedcba9876543210";
        let sending =
            FbTransferConfig { token: other.as_ptr(), token_bytes: other.len(), ..config(fabric, 1) };
        let mut pair = Pair::of(&sending, &receiving);
        pair.until("a refusal", |pair| count(&pair.received, FB_TRANSFER_UNOPENED, None) > 0);
        let why = pair.received.iter().find(|(event, _)| event.kind == FB_TRANSFER_UNOPENED).unwrap();
        assert!(why.0.status != 0 && !why.1.is_empty());
        assert_eq!(count(&pair.received, FB_TRANSFER_MET, None), 0);
        pair.end();
    });
}

/// Whether a thread of this process sleeps in a call of the system.
fn sleeps(thread: i32) -> bool {
    let said = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    said.rsplit(") ").next().unwrap().starts_with('S')
}

#[test]
fn a_thread_waits_while_others_call_and_only_the_end_is_refused() {
    let at = address(FB_TRANSFER_SHM);
    let receiving = FbTransferConfig { address: at.as_ptr(), ..config(FB_TRANSFER_SHM, 2) };
    let (model, mut memory) = (Model::new(), Memory::new());
    // Nothing happens at a receiver without a sender.
    let receiver = make_receiver(&receiving, &model.side(), &memory.planes()).unwrap();
    let mut event = FbTransferEvent { kind: 99, ..sized() };
    // SAFETY: as long as stated.
    let status = unsafe { fb_receiver_poll(receiver, 5, null_mut(), 0, &raw mut event) };
    assert_eq!((status, event.kind), (FbOk, FB_TRANSFER_NOTHING));
    let inside = std::sync::Arc::new(std::sync::atomic::AtomicI32::new(0));
    let (handle, own) = (receiver as usize, inside.clone());
    let waits = thread::spawn(move || {
        let mut event = sized::<FbTransferEvent>();
        // SAFETY: it has no arguments.
        own.store(unsafe { libc::gettid() }, Ordering::SeqCst);
        // SAFETY: as long as stated.
        let status =
            unsafe { fb_receiver_poll(handle as *mut FbReceiver, 600_000, null_mut(), 0, &raw mut event) };
        (status, event.kind)
    });
    let start = Instant::now();
    while inside.load(Ordering::SeqCst) == 0 || !sleeps(inside.load(Ordering::SeqCst)) {
        assert!(start.elapsed() < SOON);
        thread::sleep(Duration::from_millis(1));
    }
    let (mut stats, mut descriptor) = (sized::<FbReceived>(), -1);
    // SAFETY: as long as stated.
    unsafe {
        assert_eq!(fb_receiver_stats(receiver, &raw mut stats), FbOk);
        assert_eq!(fb_receiver_descriptor(receiver, &raw mut descriptor), FbOk);
        assert_eq!(fb_receiver_destroy(receiver), FbBusy);
    }
    assert!(descriptor >= 0);
    let (wanted, pages) = (Pair::wanted(1), [1, 2, 3]);
    // SAFETY: as long as stated.
    assert_eq!(unsafe { fb_receiver_grant(receiver, &wanted, pages.as_ptr(), 3) }, FbOk);
    assert_eq!(waits.join().unwrap(), (FbOk, FB_TRANSFER_FAILED));
    // SAFETY: a handle.
    assert_eq!(unsafe { fb_receiver_destroy(receiver) }, FbOk);
    memory.check(&BTreeMap::new());
}
