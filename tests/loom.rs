//! The state that threads share, in every interleaving of up to three preemptions: `make loom`.
//!
//! Each model has two or three threads and a few operations. The controls at the end are the same models with planted
//! faults: loom must find them, or it has checked nothing.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use forebay::device::host::{EventState, PageTables, Queue};
use forebay::device::{Outcome, Ticket};
use forebay::{Kind, Lane};
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

fn model(scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(scenario);
}

#[test]
fn p3_a_ticket_that_has_ended_stays_as_it_ended() {
    model(|| {
        let (ticket, completer) = Ticket::new();
        let worker = thread::spawn(move || completer.fail(Kind::Io));
        let seen = ticket.poll();
        worker.join().unwrap();
        assert_eq!(ticket.poll(), Some(Outcome::Failed(Kind::Io)));
        assert!(seen.is_none() || seen == ticket.poll(), "an end was taken back");
    });
}

#[test]
fn p3_a_completer_that_is_dropped_cancels_its_ticket_and_ends_every_wait() {
    model(|| {
        let (ticket, completer) = Ticket::new();
        let worker = thread::spawn(move || drop(completer));
        worker.join().unwrap();
        assert_eq!(ticket.poll(), Some(Outcome::Cancelled));
    });
}

#[test]
fn a_thread_that_sees_done_sees_the_bytes() {
    model(|| {
        let (ticket, completer) = Ticket::new();
        let bytes = Arc::new(AtomicU32::new(0));
        let written = Arc::clone(&bytes);
        let worker = thread::spawn(move || {
            // Relaxed, as the bytes of a copy are: only the ticket orders them.
            written.store(7, Ordering::Relaxed);
            completer.done();
        });
        if ticket.poll() == Some(Outcome::Done) {
            assert_eq!(bytes.load(Ordering::Relaxed), 7);
        }
        worker.join().unwrap();
    });
}

#[test]
fn a_queue_of_one_place_delivers_every_item_in_order_and_then_ends() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
        let taken = Arc::clone(&queue);
        let stream = thread::spawn(move || std::iter::from_fn(|| taken.pop()).collect::<Vec<u32>>());
        for item in 1..=3 {
            queue.push(item).unwrap();
        }
        queue.close();
        assert_eq!(stream.join().unwrap(), [1, 2, 3]);
        assert_eq!(queue.push(4), Err(4), "a closed queue gives the item back");
    });
}

#[test]
fn two_producers_lose_no_item_and_none_arrives_twice() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
        let others = [1, 2].map(|item| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.push(item).unwrap())
        });
        let mut got = [queue.pop(), queue.pop()];
        got.sort_unstable();
        assert_eq!(got, [Some(1), Some(2)]);
        for other in others {
            other.join().unwrap();
        }
        queue.close();
        assert_eq!(queue.pop(), None);
    });
}

#[test]
fn an_item_enqueued_during_the_close_is_run_or_returned() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
        let (pushing, taking) = (Arc::clone(&queue), Arc::clone(&queue));
        let pusher = thread::spawn(move || [pushing.push(1), pushing.push(2)].map(|r| r.is_ok()));
        let stream = thread::spawn(move || std::iter::from_fn(|| taking.pop()).count());
        queue.close();
        let accepted = pusher.join().unwrap().iter().filter(|ok| **ok).count();
        assert_eq!(stream.join().unwrap(), accepted);
    });
}

#[test]
fn a_wait_is_for_its_own_record_whatever_later_ones_do() {
    model(|| {
        let event = Arc::new(EventState::new());
        let (first, second) = (event.record(), event.record());
        let reached = Arc::new(AtomicBool::new(false));
        let (waited, before) = (Arc::clone(&event), Arc::clone(&reached));
        let waiter = thread::spawn(move || {
            waited.wait(first);
            assert!(before.load(Ordering::SeqCst), "a later record ended the wait");
        });
        event.reach(second);
        reached.store(true, Ordering::SeqCst);
        event.reach(first);
        waiter.join().unwrap();
        assert!(event.is_complete());
    });
}

#[test]
fn an_event_is_recorded_again_while_a_thread_waits_for_its_older_record() {
    model(|| {
        let event = Arc::new(EventState::new());
        let bytes = Arc::new(AtomicU32::new(0));
        let number = event.record();
        let (reached, written) = (Arc::clone(&event), Arc::clone(&bytes));
        let stream = thread::spawn(move || {
            written.store(7, Ordering::Relaxed);
            reached.reach(number);
        });
        let (waited, read) = (Arc::clone(&event), Arc::clone(&bytes));
        let waiter = thread::spawn(move || {
            waited.wait(number);
            assert_eq!(read.load(Ordering::Relaxed), 7);
        });
        // Recorded again, and never reached: the older wait ends nevertheless.
        event.record();
        stream.join().unwrap();
        waiter.join().unwrap();
        assert!(!event.is_complete());
    });
}

#[test]
fn records_reached_out_of_order_do_not_undo_each_other() {
    model(|| {
        let event = Arc::new(EventState::new());
        let numbers = [event.record(), event.record()];
        let streams = numbers.map(|number| {
            let event = Arc::clone(&event);
            thread::spawn(move || event.reach(number))
        });
        event.wait(numbers[1]);
        assert!(event.is_complete());
        for stream in streams {
            stream.join().unwrap();
        }
        assert!(event.is_complete());
    });
}

/// A page table that one thread replaces while another looks a page up, as a forgotten edge allows it.
#[test]
fn a_page_read_is_the_old_or_the_new_one_and_after_an_edge_the_new_one() {
    model(|| {
        let (tables, event) = (Arc::new(PageTables::new(1, 2).unwrap()), Arc::new(EventState::new()));
        tables.take(Lane(0), &[7, 8]);
        let number = event.record();
        let (taking, reached) = (Arc::clone(&tables), Arc::clone(&event));
        let join = thread::spawn(move || {
            taking.take(Lane(0), &[9]);
            reached.reach(number);
        });
        let seen = [0, 1].map(|index| tables.page(Lane(0), index));
        assert!([Some(7), Some(9)].contains(&seen[0]), "{seen:?}");
        assert!([Some(8), None].contains(&seen[1]), "{seen:?}");
        event.wait(number);
        assert_eq!([0, 1].map(|index| tables.page(Lane(0), index)), [Some(9), None]);
        join.join().unwrap();
    });
}

/// The words of device memory, each atomic and none ordered, as `host/words.rs` moves them.
fn words_during_a_write(waits: bool) {
    let (words, event) = (Arc::new([0, 0].map(AtomicU32::new)), Arc::new(EventState::new()));
    let number = event.record();
    let (written, reached) = (Arc::clone(&words), Arc::clone(&event));
    let writer = thread::spawn(move || {
        written.iter().for_each(|word| word.store(7, Ordering::Relaxed));
        reached.reach(number);
    });
    if waits {
        event.wait(number);
    }
    let read = words.each_ref().map(|word| word.load(Ordering::Relaxed));
    writer.join().unwrap();
    drop((words, event));
    assert!(read.iter().all(|word| [0, 7].contains(word)), "{read:?}");
    assert_eq!(read, [7, 7], "the old words");
}

#[test]
fn words_read_after_an_edge_are_the_new_ones() {
    model(|| words_during_a_write(true));
}

#[test]
#[should_panic = "the old words"]
fn control_words_read_without_the_edge_can_be_the_old_ones() {
    model(|| words_during_a_write(false));
}

/// A ticket that checks first and sets then.
fn end_by_check_then_set(word: &AtomicU32, code: u32) -> bool {
    let pending = word.load(Ordering::Acquire) == 0;
    if pending {
        word.store(code, Ordering::Release);
    }
    pending
}

#[test]
#[should_panic = "two ends"]
fn control_a_ticket_that_checks_and_then_sets_ends_twice() {
    model(|| {
        let word = Arc::new(AtomicU32::new(0));
        let other = Arc::clone(&word);
        let worker = thread::spawn(move || end_by_check_then_set(&other, 1));
        let mine = end_by_check_then_set(&word, 2);
        assert!(!(worker.join().unwrap() && mine), "two ends");
    });
}

#[test]
#[should_panic = "the bytes are not there"]
fn control_a_ticket_without_release_shows_done_before_the_bytes() {
    model(|| {
        let (done, bytes) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (ended, written) = (Arc::clone(&done), Arc::clone(&bytes));
        let worker = thread::spawn(move || {
            written.store(7, Ordering::Relaxed);
            ended.store(1, Ordering::Relaxed);
        });
        if done.load(Ordering::Acquire) == 1 {
            assert_eq!(bytes.load(Ordering::Relaxed), 7, "the bytes are not there");
        }
        worker.join().unwrap();
    });
}

/// An event that checks before it takes the lock it waits with.
#[derive(Default)]
struct LossyEvent {
    reached: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

#[test]
#[should_panic = "deadlock"]
fn control_an_event_that_looks_outside_its_lock_loses_the_wake_up() {
    model(|| {
        // The standard library's count: loom's own would panic once more while this panic unwinds.
        let event = std::sync::Arc::new(LossyEvent::default());
        let other = std::sync::Arc::clone(&event);
        let stream = thread::spawn(move || {
            other.reached.store(true, Ordering::SeqCst);
            other.changed.notify_all();
        });
        if !event.reached.load(Ordering::SeqCst) {
            drop(event.changed.wait(event.lock.lock().unwrap()).unwrap());
        }
        stream.join().unwrap();
    });
}

/// A queue that checks its room before it takes the lock.
#[test]
#[should_panic = "more than the queue holds"]
fn control_a_queue_that_checks_its_room_outside_its_lock_overflows() {
    model(|| {
        let queue = Arc::new((Mutex::new(Vec::with_capacity(1)), AtomicU32::new(0)));
        let push = |queue: &(Mutex<Vec<u32>>, AtomicU32), item| {
            if queue.1.load(Ordering::SeqCst) < 1 {
                queue.0.lock().unwrap().push(item);
                queue.1.fetch_add(1, Ordering::SeqCst);
            }
        };
        let other = Arc::clone(&queue);
        let pusher = thread::spawn(move || push(&other, 1));
        push(&queue, 2);
        pusher.join().unwrap();
        assert!(queue.0.lock().unwrap().len() <= 1, "more than the queue holds");
    });
}
