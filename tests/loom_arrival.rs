//! Sequences that arrive: the whole cache on the host device, in every interleaving of up to two preemptions of the
//! owner's thread, the threads of two streams, and a writer.
//!
//! Nothing is imitated: cache, streams, events, tickets and tables are the library's, built with loom's locks and
//! threads. The owner makes the cache, and loom explores from the first call that enqueues work. A sequence's keys are
//! placed on the stream `side`, and it joins and steps on `main`, so each hand-over crosses two threads. The pools have
//! the pages, slots and lane of one sequence: what the next one gets was the first one's.
//!
//! loom does not see the bytes of rows and keys. It sees the device's count of operations, which each copy changes, and
//! the tickets. Where two threads of a model write the same bytes, [`Turn`] is next to each write, so that loom tries
//! both orders.
//!
//! Each control is the same model with a planted fault, which loom must find: in the device below the cache
//! ([`Fault`]), or in what the owner does. A model returns what is wrong. The test says it when all threads have ended,
//! because a panic of the owner would leave streams behind.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "loom_arrival/rig.rs"]
mod rig;

use std::sync::OnceLock;

use forebay::device::host::{EventState, HostDevice, HostOptions, Queue};
use forebay::device::{Device, Outcome, Ticket};
use forebay::{Kind, Layer, WarmUp};
use loom::sync::Arc;
use loom::sync::atomic::Ordering;
use loom::thread;
use rig::{Both, Fault, ROW, Rig, TOKENS, Turn, Wrong, is_same, model};

/// A sequence whose keys are placed on one stream joins and steps on another one.
fn arrives(fault: Fault, digest: &OnceLock<u64>) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(1, fault);
    let own = rig.arrive().unwrap();
    rig.append(own, 0, 7);
    let keys = rig.keys(7);
    loom::explore();
    let _ticket = rig.place(own, 0, keys, rig.side);
    let _ticket = rig.cache.join(own, rig.main, WarmUp::default()).unwrap();
    let (wrong, number) = rig.step(own, 1, 7);
    loom::stop_exploring();
    wrong.or_else(|| is_same(digest, number))
}

#[test]
fn a_step_reads_the_keys_and_rows_that_were_placed_before_it() {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    model(|| arrives(Fault::None, &DIGEST));
}

#[test]
#[should_panic = "the indexer read other keys"]
fn control_a_step_that_waits_for_nothing_reads_keys_before_they_are_placed() {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    model(|| arrives(Fault::NoWaits, &DIGEST));
}

/// A sequence joins early: the keys of layer 1 are placed while layer 0 is warmed up.
fn joins_early(fault: Fault, digest: &OnceLock<u64>) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(2, fault);
    let own = rig.arrive().unwrap();
    (0..2).for_each(|layer| rig.append(own, layer, 7));
    let keys = rig.keys(7);
    loom::explore();
    let _ticket = rig.place(own, 0, keys, rig.side);
    let _ticket = rig.cache.join_early(own, rig.main).unwrap();
    let _ticket = rig.cache.warm_layer(own, Layer(0), WarmUp::default(), rig.main).unwrap();
    let _ticket = rig.place(own, 1, keys, rig.side);
    let _ticket = rig.cache.warm_layer(own, Layer(1), WarmUp::default(), rig.main).unwrap();
    let reads = [0, 1].map(|layer| rig.index(layer));
    rig.sync(rig.main);
    loom::stop_exploring();
    if reads.into_iter().any(|read| !rig.are_keys(own, read, 7)) {
        return Some("the indexer read other keys");
    }
    let (wrong, number) = rig.step(own, 2, 7);
    wrong.or_else(|| is_same(digest, number))
}

#[test]
fn an_early_join_warms_up_each_layer_behind_its_keys() {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    model(|| joins_early(Fault::None, &DIGEST));
}

#[test]
#[should_panic = "the indexer read other keys"]
fn control_an_early_join_that_waits_for_nothing_reads_keys_before_they_are_placed() {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    model(|| joins_early(Fault::NoWaits, &DIGEST));
}

/// A writer writes the rows of a sequence that has joined early. The owner declares them when it is `told` that they
/// are there, or without a word.
fn rows_are_declared(told: bool, both: &Both) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(1, Fault::None);
    let own = rig.arrive().unwrap();
    rig.write_keys(own, 7);
    rig.cache.index_keys_in_place(own, Layer(0), TOKENS).unwrap();
    let (rows, device) = (rig.rows(own, 0), Arc::clone(&rig.device));
    let (written, completer) = Ticket::new();
    loom::explore();
    let writer = thread::spawn(move || {
        rows.into_iter().for_each(|row| device.write(row, &[7; ROW]).unwrap());
        drop(device);
        completer.done();
    });
    let mut writer = Some(writer);
    let _ticket = rig.cache.join_early(own, rig.main).unwrap();
    let done = written.poll() == Some(Outcome::Done);
    both.count(done);
    if told && !done {
        writer.take().into_iter().for_each(|writer| writer.join().unwrap());
    }
    rig.cache.append_layer_in_place(own, Layer(0), TOKENS).unwrap();
    let _ticket = rig.cache.warm_layer(own, Layer(0), WarmUp::default(), rig.main).unwrap();
    rig.sync(rig.main);
    writer.take().into_iter().for_each(|writer| writer.join().unwrap());
    loom::stop_exploring();
    rig.step(own, 1, 7).0
}

#[test]
fn rows_that_are_declared_when_they_are_written_are_gathered_whole() {
    static BOTH: Both = Both::new();
    model(|| rows_are_declared(true, &BOTH));
    BOTH.check();
}

#[test]
#[should_panic = "attention read other rows"]
fn control_rows_that_are_declared_before_they_are_written_are_gathered_too_early() {
    static BOTH: Both = Both::new();
    model(|| rows_are_declared(false, &BOTH));
}

/// How a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Close,
    /// Aborted, and released when the writer has said that it is done.
    Abort,
    /// Aborted, and released at once.
    AbortAndRelease,
}

/// The stream on which a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum On {
    /// That of its keys.
    Side,
    /// The other one, which has to wait for the keys.
    Main,
}

/// A sequence ends while its keys are being copied on `side`. The next sequence gets its pages, and a writer writes its
/// keys there at once: nothing but the ticket of the first sequence's end keeps the two apart.
fn ends_while_keys_come(end: End, on: On, fault: Fault, both: &Both) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(1, fault);
    let own = rig.arrive().unwrap();
    let keys = rig.keys(7);
    let on = if on == On::Side { rig.side } else { rig.main };
    loom::explore();
    let _ticket = rig.place(own, 0, keys, rig.side);
    if end == End::Close {
        rig.cache.close(own, on).unwrap();
    } else {
        let withheld = rig.cache.abort(own, on).unwrap();
        rig.cache.release(withheld).unwrap();
        if rig.cache.release(withheld).map_err(|error| error.kind()) != Err(Kind::Closed) {
            return Some("released twice");
        }
    }
    let next = rig.next(on, both);
    rig.write_keys(next, 9);
    rig.sync(rig.side);
    loom::stop_exploring();
    if !rig.are_keys(next, rig.cache.index_keys(Layer(0)).unwrap(), 9) {
        return Some("the keys of another sequence");
    }
    rig.cache.close(next, rig.main).unwrap();
    rig.check_free()
}

#[test]
fn no_other_sequence_gets_pages_while_keys_are_copied_to_them() {
    for end in [End::Close, End::AbortAndRelease] {
        for on in [On::Side, On::Main] {
            static BOTH: Both = Both::new();
            model(move || ends_while_keys_come(end, on, Fault::None, &BOTH));
            BOTH.check();
        }
    }
}

#[test]
#[should_panic = "the keys of another sequence"]
fn control_a_ticket_that_ends_early_gives_pages_to_another_sequence() {
    static BOTH: Both = Both::new();
    model(|| ends_while_keys_come(End::AbortAndRelease, On::Side, Fault::EarlyTickets, &BOTH));
}

#[test]
#[should_panic = "the keys of another sequence"]
fn control_an_end_that_waits_for_nothing_gives_pages_to_another_sequence() {
    static BOTH: Both = Both::new();
    model(|| ends_while_keys_come(End::Close, On::Main, Fault::NoWaits, &BOTH));
}

/// A writer from afar writes two rows of a sequence that ends. The next sequence gets its pages.
fn ends_while_rows_come(end: End, both: &Both) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(1, Fault::None);
    let own = rig.arrive().unwrap();
    let (rows, device, turn) = (rig.rows(own, 0), Arc::clone(&rig.device), Turn::new());
    let (written, completer) = Ticket::new();
    let writes = turn.clone();
    loom::explore();
    let writer = thread::spawn(move || {
        for row in [rows[0], rows[19]] {
            writes.take();
            device.write(row, &[7; ROW]).unwrap();
        }
        drop((device, writes));
        completer.done();
    });
    let mut writer = Some(writer);
    if end == End::Close {
        rig.cache.close(own, rig.main).unwrap();
    } else {
        let withheld = rig.cache.abort(own, rig.main).unwrap();
        if end == End::Abort && written.poll() != Some(Outcome::Done) {
            rig.sync(rig.main);
            rig.cache.reap(rig.main).unwrap();
            if rig.arrive().is_ok() {
                return Some("pages that are withheld");
            }
            writer.take().into_iter().for_each(|writer| writer.join().unwrap());
        }
        rig.cache.release(withheld).unwrap();
    }
    let next = rig.next(rig.main, both);
    turn.take();
    rig.append(next, 0, 9);
    turn.take();
    writer.take().into_iter().for_each(|writer| writer.join().unwrap());
    loom::stop_exploring();
    if !rig.has_rows(next, 0, 9) {
        return Some("the rows of another sequence");
    }
    rig.cache.close(next, rig.main).unwrap();
    rig.check_free()
}

#[test]
fn no_other_sequence_gets_withheld_pages_until_their_writer_is_done() {
    static BOTH: Both = Both::new();
    model(|| ends_while_rows_come(End::Abort, &BOTH));
    BOTH.check();
}

#[test]
#[should_panic = "the rows of another sequence"]
fn control_a_close_gives_pages_to_another_sequence_before_their_writer_is_done() {
    static BOTH: Both = Both::new();
    model(|| ends_while_rows_come(End::Close, &BOTH));
}

#[test]
#[should_panic = "the rows of another sequence"]
fn control_a_release_without_the_writers_word_gives_pages_to_another_sequence() {
    static BOTH: Both = Both::new();
    model(|| ends_while_rows_come(End::AbortAndRelease, &BOTH));
}

/// A sequence that has joined on `main` is aborted on `side` while its rows come to its slots. The next sequence gets
/// its pages, slots and lane, and joins on `side`. The lane is left on `main`.
fn ends_while_rows_are_gathered(fault: Fault, both: &Both) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(1, fault);
    let own = rig.arrive().unwrap();
    rig.append(own, 0, 7);
    rig.cache.index_keys_in_place(own, Layer(0), TOKENS).unwrap();
    loom::explore();
    let _ticket = rig.cache.join(own, rig.main, WarmUp::default()).unwrap();
    let withheld = rig.cache.abort(own, rig.side).unwrap();
    rig.cache.release(withheld).unwrap();
    let next = rig.next(rig.main, both);
    rig.append(next, 0, 9);
    rig.write_keys(next, 9);
    rig.cache.index_keys_in_place(next, Layer(0), TOKENS).unwrap();
    let _ticket = rig.cache.join(next, rig.side, WarmUp::default()).unwrap();
    let sound = rig.sync(rig.side);
    loom::stop_exploring();
    if !sound {
        return Some("the lane was joined before it was left");
    }
    let (wrong, _) = rig.step(next, 1, 9);
    rig.cache.close(next, rig.main).unwrap();
    wrong.or_else(|| rig.check_free())
}

#[test]
fn no_other_sequence_gets_slots_and_lane_while_rows_are_gathered() {
    static BOTH: Both = Both::new();
    model(|| ends_while_rows_are_gathered(Fault::None, &BOTH));
    BOTH.check();
}

#[test]
#[should_panic = "the lane was joined before it was left"]
fn control_a_lane_that_waits_for_nothing_is_joined_before_it_is_left() {
    static BOTH: Both = Both::new();
    model(|| ends_while_rows_are_gathered(Fault::NoWaits, &BOTH));
}

/// The device fails at a copy of keys, while the sequence joins and is aborted.
fn fails(fault: Fault) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::failing(1, fault, Some(0));
    let own = rig.arrive().unwrap();
    rig.append(own, 0, 7);
    let keys = rig.keys(7);
    loom::explore();
    let ticket = rig.place(own, 0, keys, rig.side);
    let joined = rig.cache.join(own, rig.main, WarmUp::default()).map_err(|error| error.kind());
    if joined.as_ref().is_err_and(|kind| *kind != Kind::DeviceFailed) {
        return Some("another error");
    }
    let withheld = rig.cache.abort(own, rig.main).unwrap();
    rig.cache.release(withheld).unwrap();
    rig.sync(rig.main);
    loom::stop_exploring();
    let outcomes = [Some(ticket), joined.ok()].into_iter().flatten().map(|ticket| ticket.poll());
    if outcomes.into_iter().any(|outcome| outcome != Some(Outcome::Failed(Kind::DeviceFailed))) {
        return Some("a ticket whose work did not run is not Failed");
    }
    rig.check_free()
}

#[test]
fn a_device_that_fails_while_keys_come_fails_their_ticket_and_frees_everything() {
    model(|| fails(Fault::None));
}

#[test]
#[should_panic = "a ticket whose work did not run is not Failed"]
fn control_a_ticket_that_ends_early_hides_the_failure() {
    model(|| fails(Fault::EarlyTickets));
}

/// Cache and device are dropped with work in flight, and a writer has the device too: either is the last.
fn is_dropped(fault: Fault, both: &Both) -> Wrong {
    loom::stop_exploring();
    let mut rig = Rig::new(1, fault);
    let own = rig.arrive().unwrap();
    let (keys, ran) = (rig.keys(7), Turn::new());
    let (work, device, row) = (ran.clone(), Arc::clone(&rig.device), rig.rows(own, 0)[0]);
    let work: std::sync::Arc<dyn Fn() + Send + Sync> = std::sync::Arc::new(move || _ = work.take());
    let work = Arc::from_std(work);
    loom::explore();
    let writer = thread::spawn(move || device.write(row, &[7; ROW]).unwrap());
    rig.device.call(rig.side, work).unwrap();
    let ticket = rig.place(own, 0, keys, rig.side);
    let _withheld = rig.cache.abort(own, rig.main).unwrap();
    drop(rig);
    both.count(ticket.poll().is_some());
    if ticket.poll() == Some(Outcome::Done) && ran.0.load(Ordering::Relaxed) == 0 {
        return Some("a ticket ended before its work");
    }
    writer.join().unwrap();
    let ended = ticket.poll() == Some(Outcome::Done) && ran.0.load(Ordering::Relaxed) == 1;
    (!ended).then_some("the device is gone, and its work has not run")
}

#[test]
fn a_device_that_is_dropped_with_work_in_flight_runs_it_first() {
    static BOTH: Both = Both::new();
    model(|| is_dropped(Fault::None, &BOTH));
    BOTH.check();
}

#[test]
#[should_panic = "a ticket ended before its work"]
fn control_a_ticket_that_ends_early_ends_before_the_work_of_a_dropped_device() {
    static BOTH: Both = Both::new();
    model(|| is_dropped(Fault::EarlyTickets, &BOTH));
}

/// Work on `side` has the last handle of the device, and `main` waits for a record behind it.
fn is_dropped_by_its_own_work() -> Wrong {
    let device = HostDevice::new(HostOptions { threaded: true, queue: 4, ..HostOptions::default() });
    let (side, main) = (device.stream().unwrap(), device.stream().unwrap());
    let (event, held) = (device.event().unwrap(), Arc::clone(&device));
    let (ticket, completer) = Ticket::new();
    let work: std::sync::Arc<dyn Fn() + Send + Sync> = std::sync::Arc::new(move || _ = held.operations());
    device.call(side, Arc::from_std(work)).unwrap();
    device.record(event, side).unwrap();
    device.wait(main, event).unwrap();
    device.complete(main, completer).unwrap();
    drop(device);
    // The ticket may be pending, but the model ends only if every thread does.
    (ticket.poll().is_some_and(|outcome| outcome != Outcome::Done)).then_some("work was lost")
}

#[test]
fn a_device_that_its_own_work_drops_ends_its_streams() {
    model(is_dropped_by_its_own_work);
}

/// Two streams are closed while one has a record, and the other waits for it. The record runs, or is `lost`.
fn closes(lost: bool) {
    // The standard library's counts: loom's own would panic once more while a panic unwinds.
    let event = std::sync::Arc::new(EventState::new());
    let queues = [0, 1].map(|_| std::sync::Arc::new(Queue::new(2)));
    let number = event.record();
    let [records, waits] = [0, 1].map(|stream: usize| {
        let (queue, event) = (queues[stream].clone(), event.clone());
        thread::spawn(move || {
            while let Some(waits) = queue.pop() {
                if waits { event.wait(number) } else { event.reach(number) }
            }
        })
    });
    queues[1].push(true).unwrap();
    if !lost {
        queues[0].push(false).unwrap();
    }
    queues.iter().for_each(|queue| queue.close());
    waits.join().unwrap();
    records.join().unwrap();
}

#[test]
fn streams_that_are_closed_run_what_the_others_wait_for() {
    model(|| {
        closes(false);
        None
    });
}

#[test]
#[should_panic = "deadlock"]
fn control_a_stream_whose_work_is_lost_at_the_close_hangs_the_other_one() {
    model(|| {
        closes(true);
        None
    });
}
