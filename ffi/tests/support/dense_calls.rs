//! Calls of a dense cache for the fuzz target `ffi_calls`: any bytes decode to a run of them, with any numbers.
//!
//! As in `calls`, pointers are valid and as long as stated, and every other argument may be invalid. After every call
//! the status is one that a caller can cause, and the cache passes its checks. At the end the run closes whatever is
//! open, and every page is free again.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use super::calls::{self, Numbers, sized, zero};
use super::config::{FB_MEMORY_LAZY, FB_MEMORY_SMALL_PAGES, FB_MEMORY_UNLOCKED};
use super::dense::{self, FbDense, FbDenseCacheStats, FbDenseLayerView, FbDensePlane, FbDenseStepTensors};
use super::dense_config::{self, FB_DENSE_GROUPS_MAX, FbDenseConfig, FbDenseGroup};
use super::dense_prefix::{self, FbDenseFound, FbDenseNames};
use super::dense_sequence::{self, FbDenseSequenceLength};
use super::dense_step;
use super::device::{self, FbDevice, FbDeviceConfig};
use super::prefix::FbTokens;
use super::status::FbStatus::{self, *};
use super::step::{FB_ACCEPTED_ON_DEVICE, FbBatchRow, FbStep};
use super::ticket::{self, FbTicket};

const SEQUENCES: usize = 3;
const TOKENS: u32 = 90;
const LAYERS: u32 = 3;
const PAGE: u32 = 16;

/// How often each of some calls was not refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reached {
    pub steps: u64,
    pub parked: u64,
    pub resumed: u64,
    pub came_back: u64,
    pub arrived: u64,
    pub forked: u64,
    pub truncated: u64,
    pub extended: u64,
    pub saved: u64,
    pub found: u64,
    pub found_on_host: u64,
    pub failed: u64,
}

struct World {
    device: *mut FbDevice,
    dense: *mut FbDense,
    /// 0 for none, and one more than the cache has.
    sequences: [u64; SEQUENCES + 1],
    /// The last one that was closed.
    closed: u64,
    steps: [FbStep; 3],
    ids: Vec<u32>,
    /// Accepted counts "on the device", which is the host.
    counts: [u32; SEQUENCES],
    /// Whether a step was given such counts, which may be wrong: then a device fails by the caller's fault.
    counted: bool,
    reached: Reached,
}

fn config_of(variant: u32) -> FbDenseConfig {
    const ALL: [u32; LAYERS as usize] = [0, 2, 1];
    let group = |layers: &'static [u32], window| FbDenseGroup {
        layers: layers.as_ptr(),
        layer_count: layers.len() as u32,
        window,
        row_bytes: [16, 0],
    };
    let mut groups = [zero(); FB_DENSE_GROUPS_MAX];
    (groups[0], groups[1]) = (group(&ALL.as_slice()[..2], 0), group(&ALL.as_slice()[2..], variant % 2 * 20));
    let mut config = sized!(FbDenseConfig {
        groups,
        group_count: 2,
        page_tokens: PAGE,
        sequences: SEQUENCES as u32,
        max_tokens: TOKENS,
        step_tokens: 40,
        query_rows: 2,
        micro_batches: 2,
        bring_layers: variant / 2 % 3,
        save: variant / 6 % 2,
        width: variant / 12 % 2,
        memory: FB_MEMORY_SMALL_PAGES | FB_MEMORY_LAZY | FB_MEMORY_UNLOCKED,
    });
    if !variant.is_multiple_of(5) {
        config.host_pages = [8, 6, 0, 0];
    }
    config
}

impl World {
    fn new(variant: u32) -> World {
        let (mut config, mut pages) = (config_of(variant), [0; FB_DENSE_GROUPS_MAX]);
        let (mut device, mut dense) = (null_mut(), null_mut());
        let host = sized!(FbDeviceConfig { kind: device::FB_DEVICE_HOST });
        // SAFETY: the configs state their sizes, and the outputs have room.
        unsafe {
            let many = 1 + variant / 3 % SEQUENCES as u32;
            let counted =
                dense_config::fb_dense_pages_for(&config, many, TOKENS, null_mut(), 0, pages.as_mut_ptr());
            assert_eq!(counted, FbOk);
            config.device_pages = pages;
            assert_eq!(device::fb_device_create(&host, null_mut(), 0, &mut device), FbOk);
            assert_eq!(dense::fb_dense_create(device, &config, null_mut(), 0, &mut dense), FbOk);
        }
        World {
            device,
            dense,
            sequences: [0; SEQUENCES + 1],
            closed: 0,
            steps: [0; 3],
            ids: (0..TOKENS).collect(),
            counts: [0; SEQUENCES],
            counted: false,
            reached: Reached::default(),
        }
    }

    fn stats(&self) -> FbDenseCacheStats {
        let mut stats = sized!(FbDenseCacheStats {});
        // SAFETY: the size is stated.
        assert_eq!(unsafe { dense::fb_dense_stats(self.dense, &mut stats) }, FbOk);
        stats
    }

    /// Counts a call that was not refused. No caller causes some statuses.
    fn sound(&self, status: FbStatus, call: &str) -> u64 {
        assert_ne!(status, FbOutOfMemory, "{call}");
        assert!(self.counted || status != FbDeviceFailed, "{call}");
        calls::sound(status, call).into()
    }

    fn length(&self, sequence: u64) -> FbDenseSequenceLength {
        let mut length = sized!(FbDenseSequenceLength {});
        // SAFETY: the size is stated.
        self.sound(unsafe { dense_sequence::fb_dense_length(self.dense, sequence, &mut length) }, "length");
        length
    }

    /// A sequence that is open, if there is one. Rarely one that was closed, or a number that never was one.
    fn sequence(&self, numbers: &mut Numbers<'_>) -> u64 {
        match numbers.byte() {
            wild @ 250.. => u64::MAX >> (wild % 8 * 8),
            244..250 => self.closed,
            place => {
                let mut all = self.sequences;
                all.rotate_left(place as usize % self.sequences.len());
                all.into_iter().find(|sequence| *sequence != 0).unwrap_or(0)
            }
        }
    }

    /// A place for a sequence. One that is in it is closed first.
    fn place(&mut self, numbers: &mut Numbers<'_>) -> *mut u64 {
        let free = self.sequences.iter().position(|sequence| *sequence == 0);
        let place = free.unwrap_or(numbers.byte() as usize % self.sequences.len());
        self.close(self.sequences[place]);
        &mut self.sequences[place]
    }

    fn close(&mut self, sequence: u64) {
        // SAFETY: no pointer is read.
        let closed = unsafe { dense_sequence::fb_dense_close(self.dense, sequence, null_mut()) };
        if self.sound(closed, "close") == 1 {
            self.closed = sequence;
            self.sequences.iter_mut().filter(|own| **own == sequence).for_each(|own| *own = 0);
        }
    }

    fn tokens(&self, from: u32, count: u32) -> FbTokens {
        let ids = &self.ids[from.min(TOKENS) as usize..];
        sized!(FbTokens { ids: ids.as_ptr(), count: count.min(ids.len() as u32) })
    }

    /// A ticket that a call has given, if any, has an outcome, and ends.
    fn end_ticket(&self, given: *mut FbTicket) {
        if !given.is_null() {
            let (mut outcome, mut status) = (77, 77);
            // SAFETY: the outputs have room.
            let read = unsafe { ticket::fb_ticket_outcome(given, &mut outcome, &mut status) };
            assert_eq!((read, outcome), (FbOk, ticket::FB_TICKET_DONE), "everything has ended");
            // SAFETY: no call is running.
            assert_eq!(unsafe { ticket::fb_ticket_destroy(given) }, FbOk);
        }
    }

    fn open(&mut self, kind: u8, numbers: &mut Numbers<'_>) {
        let (prompt, promised) = (numbers.below(70), numbers.below(20));
        let place = self.place(numbers);
        if kind == 0 {
            // SAFETY: the output has room.
            let status = unsafe { dense_sequence::fb_dense_open(self.dense, prompt, promised, place) };
            self.sound(status, "open");
            return;
        }
        let named = self.tokens((numbers.byte() / 224).into(), prompt.min(numbers.below(TOKENS)));
        let (mut names, mut found): (*mut FbDenseNames, _) = (null_mut(), sized!(FbDenseFound {}));
        let (mut again, mut given) = (sized!(FbDenseFound {}), null_mut());
        // SAFETY: sizes are stated; ids and outputs are valid.
        let status = unsafe {
            let made = dense_prefix::fb_dense_names_create(self.dense, null(), 0, &named, &mut names);
            assert_eq!(made, FbOk);
            assert_eq!(dense_prefix::fb_dense_find(self.dense, names, &mut again), FbOk);
            let (cache, found, given) = (self.dense, &mut found, &mut given);
            let stream = null_mut();
            dense_prefix::fb_dense_open_shared(cache, prompt, promised, names, stream, place, found, given)
        };
        if self.sound(status, "open shared") == 1 {
            assert_eq!((found.tokens, found.host_tokens), (again.tokens, again.host_tokens));
            self.reached.found += u64::from(found.tokens);
            self.reached.found_on_host += u64::from(found.host_tokens);
        }
        self.end_ticket(given);
        // SAFETY: no call is running.
        assert_eq!(unsafe { dense_prefix::fb_dense_names_destroy(names) }, FbOk);
    }

    /// One call on a sequence.
    fn on_sequence(&mut self, kind: u8, numbers: &mut Numbers<'_>) {
        let (dense, sequence, stream) = (self.dense, self.sequence(numbers), null_mut::<c_void>());
        let (mut given, length) = (null_mut(), self.length(sequence));
        let wanted = if numbers.byte().is_multiple_of(2) { null_mut() } else { &raw mut given };
        // SAFETY: sizes are stated, and outputs have room.
        let (status, count): (_, fn(&mut Reached) -> &mut u64) = unsafe {
            match kind {
                0 => {
                    let (prompt, promised) = (numbers.below(TOKENS), numbers.below(30));
                    let status = dense_sequence::fb_dense_extend(dense, sequence, prompt, promised);
                    (status, |reached| &mut reached.extended)
                }
                1 => {
                    let (promised, child) = (numbers.below(20), self.place(numbers));
                    let status =
                        dense_sequence::fb_dense_fork(dense, sequence, promised, stream, child, wanted);
                    (status, |reached| &mut reached.forked)
                }
                2 => {
                    let to = if numbers.byte() < 160 { length.committed } else { numbers.below(TOKENS) };
                    let to = to.saturating_add(if numbers.byte() < 160 { length.landed } else { 0 });
                    let status = dense_sequence::fb_dense_truncate(dense, sequence, to, stream, wanted);
                    (status, |reached| &mut reached.truncated)
                }
                3 => {
                    let accepted = if numbers.byte() < 200 { length.landed } else { numbers.below(3) };
                    let status = dense_sequence::fb_dense_park(dense, sequence, accepted, stream, wanted);
                    (status, |reached| &mut reached.parked)
                }
                _ => {
                    let status = dense_sequence::fb_dense_resume(dense, sequence, stream, wanted);
                    (status, |reached| &mut reached.resumed)
                }
            }
        };
        *count(&mut self.reached) += self.sound(status, "on a sequence");
        self.end_ticket(given);
    }

    /// Publishes a sequence's tokens from one on.
    fn publish(&mut self, sequence: u64, (from, count): (u32, u32)) {
        let (next, mut published) = (self.tokens(from, count), 0);
        // SAFETY: the size is stated, and the output has room.
        let status =
            unsafe { dense_prefix::fb_dense_publish(self.dense, sequence, from, &next, &mut published) };
        self.sound(status, "publish");
    }

    /// Begins a step. Returns its place if it was not refused.
    fn begin(&mut self, micro: u32, rows: &[FbBatchRow], counts: bool) -> Option<usize> {
        let free = self.steps.iter().position(|step| *step == 0)?;
        let given = if counts { self.counts.as_ptr() } else { null() };
        self.counted |= counts && rows.iter().any(|row| row.accepted == FB_ACCEPTED_ON_DEVICE);
        let (dense, stream, step) = (self.dense, null_mut(), &raw mut self.steps[free]);
        // SAFETY: rows and counts are valid, and the output has room.
        let status = unsafe {
            let count = rows.len() as u32;
            dense_step::fb_dense_prepare(dense, micro, rows.as_ptr(), count, given, stream, step)
        };
        (self.sound(status, "prepare") == 1).then_some(free)
    }

    fn prepare(&mut self, numbers: &mut Numbers<'_>) {
        let mut rows = Vec::new();
        for _ in 0..1 + numbers.byte() % 4 / 2 {
            let sequence = self.sequence(numbers);
            let accepted = match numbers.byte() {
                0..180 => self.length(sequence).landed,
                180..230 => FB_ACCEPTED_ON_DEVICE,
                _ => numbers.below(4),
            };
            // A decoding sequence, with a draft or without; or a chunk of a prompt.
            let query_rows = if numbers.byte() < 128 { 1 + numbers.below(2) % 2 } else { numbers.below(24) };
            rows.push(FbBatchRow { sequence, accepted, query_rows });
        }
        self.counts = self.counts.map(|_| numbers.below(3));
        let counts = numbers.byte() < 128;
        let micro = if numbers.byte() < 200 { 0 } else { numbers.below(3) };
        if let Some(place) = self.begin(micro, &rows, counts).filter(|_| numbers.byte() < 160) {
            (0..LAYERS).for_each(|layer| self.arrive(place, layer));
            self.finish(place);
        }
    }

    /// A chunk of a prompt, with nothing left out, and its pages for others: so runs get far.
    fn serve(&mut self, numbers: &mut Numbers<'_>) {
        let (sequence, rows) = (self.sequence(numbers), 17 + numbers.below(20) % 20);
        let row = FbBatchRow { sequence, accepted: self.length(sequence).landed, query_rows: rows };
        let Some(place) = self.begin(0, &[row], false) else { return };
        (0..LAYERS).for_each(|layer| self.arrive(place, layer));
        self.end_step(place);
        let now = self.length(sequence);
        let (dense, to) = (self.dense, now.committed + now.landed);
        // SAFETY: no ticket is asked for.
        let status =
            unsafe { dense_sequence::fb_dense_truncate(dense, sequence, to, null_mut(), null_mut()) };
        self.sound(status, "truncate");
        self.publish(sequence, (now.published, to.saturating_sub(now.published)));
    }

    fn arrive(&mut self, place: usize, layer: u32) {
        let status = dense_step::fb_dense_arrived(self.dense, self.steps[place], layer, null_mut());
        self.reached.arrived += self.sound(status, "arrived");
    }

    fn finish(&self, place: usize) -> u64 {
        let status = dense_step::fb_dense_finish(self.dense, self.steps[place], null_mut());
        self.sound(status, "finish")
    }

    fn retire(&mut self, place: usize, room: u32) {
        let (mut lengths, mut count) = ([77; SEQUENCES], 77);
        let (step, to) = (&raw mut self.steps[place], lengths.as_mut_ptr());
        // SAFETY: the number is this world's, and the outputs have the stated room.
        let status = unsafe {
            dense_step::fb_dense_retire(self.dense, step, null_mut(), to, room % 4, &raw mut count)
        };
        self.reached.failed += u64::from(status == FbDeviceFailed);
        if self.sound(status, "retire") == 1 {
            assert!(
                count >= 1 && lengths.iter().skip(room.min(count) as usize % 4).all(|length| *length == 77)
            );
        }
    }

    /// Ends a step in any state, unless one before it is not retired.
    fn end_step(&mut self, place: usize) {
        if self.finish(place) == 0 {
            // A layer was left out; or it is finished already.
            let abandoned = dense_step::fb_dense_abandon(self.dense, self.steps[place]);
            self.sound(abandoned, "abandon");
            self.finish(place);
        }
        self.retire(place, 0);
    }

    /// One call on a step.
    fn on_step(&mut self, numbers: &mut Numbers<'_>) {
        let place = numbers.byte() as usize % self.steps.len();
        match numbers.byte() % 6 {
            0 | 1 => self.arrive(place, numbers.below(LAYERS + 1)),
            2 => drop(self.finish(place)),
            3 => {
                let status = dense_step::fb_dense_abandon(self.dense, self.steps[place]);
                self.sound(status, "abandon");
            }
            4 => self.retire(place, numbers.byte().into()),
            _ => self.end_step(place),
        }
    }

    /// One call that only reads.
    fn read(&mut self, numbers: &mut Numbers<'_>) {
        let (dense, sequence, mut count) = (self.dense.cast_const(), self.sequence(numbers), 0);
        let (mut pages, mut planes) = ([0; 4], [zero::<FbDensePlane>(); 2]);
        let (mut view, mut tensors) = (sized!(FbDenseLayerView {}), sized!(FbDenseStepTensors {}));
        let number = numbers.below(4);
        // SAFETY: sizes are stated, and every output has the stated room.
        let status = unsafe {
            match numbers.byte() % 4 {
                0 => {
                    let pages = pages.as_mut_ptr();
                    dense_sequence::fb_dense_pages(dense, sequence, number, pages, 4, &mut count)
                }
                1 => dense::fb_dense_view(dense, number, numbers.below(2), &mut view),
                2 => dense::fb_dense_planes(dense, number, planes.as_mut_ptr(), 2, &mut count),
                _ => dense::fb_dense_tensors(dense, number, &mut tensors),
            }
        };
        self.sound(status, "read");
    }

    fn call(&mut self, numbers: &mut Numbers<'_>) {
        match numbers.byte() % 40 {
            kind @ 0..=4 => self.open(kind, numbers),
            5 => self.on_sequence(0, numbers),
            6 => self.on_sequence(1, numbers),
            7..=8 => self.on_sequence(2, numbers),
            9..=10 => self.on_sequence(3, numbers),
            11..=15 => self.on_sequence(4, numbers),
            16..=17 => {
                let sequence = self.sequence(numbers);
                let published = self.length(sequence).published;
                let from = if numbers.byte() < 200 { published } else { numbers.below(TOKENS) };
                self.publish(sequence, (from, numbers.below(TOKENS)));
            }
            18..=20 => {
                let (mut saved, bytes) = (0, u64::from(numbers.below(128)) << 6);
                // SAFETY: the output has room.
                let status =
                    unsafe { dense_prefix::fb_dense_save(self.dense, null_mut(), bytes, &mut saved) };
                self.sound(status, "save");
                assert!(saved <= bytes);
                self.reached.saved += saved;
            }
            21 => {
                let sequence = self.sequence(numbers);
                self.close(sequence);
            }
            22..=25 => self.serve(numbers),
            26..=29 => self.prepare(numbers),
            30..=36 => self.on_step(numbers),
            37..=38 => self.read(numbers),
            _ => {
                // SAFETY: the number of those that wait is not asked for.
                let status = unsafe { dense::fb_dense_reap(self.dense, null_mut(), null_mut()) };
                self.sound(status, "reap");
            }
        }
        // SAFETY: a handle alone.
        assert_eq!(unsafe { dense::fb_dense_validate(self.dense) }, FbOk);
    }

    /// Closes what is open.
    fn end(&mut self) {
        // Each round ends the oldest step at least.
        for place in [0, 1, 2].repeat(self.steps.len()) {
            if self.steps[place] != 0 {
                self.end_step(place);
            }
        }
        assert_eq!(self.steps, [0; 3], "steps that have ended");
        for sequence in self.sequences {
            if sequence != 0 {
                self.close(sequence);
            }
        }
        assert_eq!(self.sequences, [0; SEQUENCES + 1]);
        let mut waiting = 77;
        // SAFETY: the output has room.
        let reaped = unsafe { dense::fb_dense_reap(self.dense, null_mut(), &mut waiting) };
        assert_eq!((reaped, waiting), (FbOk, 0));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // SAFETY: handles alone; nothing is left on them.
        let ended = unsafe { [dense::fb_dense_destroy(self.dense), device::fb_device_destroy(self.device)] };
        if !std::thread::panicking() {
            assert_eq!(ended, [FbOk; 2]);
        }
    }
}

/// The first byte chooses a configuration; the others are calls. Returns what was reached.
pub fn dense_calls(bytes: &[u8]) -> Reached {
    let mut numbers = Numbers::of(bytes);
    let mut world = World::new(numbers.byte().into());
    let start = world.stats();
    while !numbers.is_empty() {
        world.call(&mut numbers);
    }
    world.end();
    let end = world.stats();
    assert_eq!((end.sequences, end.parked, end.steps_in_flight), (0, 0, 0));
    assert_eq!((end.free_pages, end.parked_pages), (start.free_pages, [0; FB_DENSE_GROUPS_MAX]));
    // A page of the host's tier is free, or one of a block that can be evicted.
    let on_host =
        |stats: &FbDenseCacheStats| -> u32 { stats.free_host_pages.iter().chain(&stats.saved).sum() };
    assert_eq!(on_host(&end), on_host(&start));
    (world.reached.steps, world.reached.came_back) = (end.steps, end.bytes_up);
    world.reached
}

/// Bytes that begin with 255 are calls of a dense cache, others those of a cache with sparse attention.
pub fn any_calls(bytes: &[u8]) {
    match bytes {
        [255, bytes @ ..] => drop(dense_calls(bytes)),
        bytes => drop(calls::ffi_calls(bytes)),
    }
}
