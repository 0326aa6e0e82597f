//! Tests of the handle table from outside: the status of each wrong use of a handle, also between threads and across a
//! fork.
//!
//! The process has one table, so a test that needs all of it runs in a forked child, which has its own table.

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Barrier};
use std::thread;

use super::*;
use crate::error_text::fb_error_text;

/// Two numbers that are equal unless an exclusive call is running; it counts the ends.
struct Pair {
    one: u64,
    other: u64,
    ended: Arc<AtomicUsize>,
}
pub(crate) struct Pear;
struct Twin;

impl Object for Pair {
    const KIND: u8 = 201;
    const NAME: &'static str = "pair";
}
impl Object for Pear {
    const KIND: u8 = 202;
    const NAME: &'static str = "pear";
}
/// Has the kind of another type.
impl Object for Twin {
    const KIND: u8 = 202;
    const NAME: &'static str = "twin";
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// A handle that threads can share.
#[derive(Clone, Copy)]
struct Sent(usize);

impl Sent {
    fn pair(self) -> *mut Pair {
        without_provenance_mut(self.0)
    }
}

fn pair() -> (*mut Pair, Arc<AtomicUsize>) {
    let ended = Arc::new(AtomicUsize::new(0));
    (give(|| Ok(Pair { one: 0, other: 0, ended: Arc::clone(&ended) })).unwrap(), ended)
}

fn text_of<T>(handle: *const T) -> String {
    let mut text = [0x55_u8; 512];
    // SAFETY: the buffer is as long as stated.
    let status = unsafe { fb_error_text(handle.cast(), text.as_mut_ptr().cast(), text.len()) };
    assert_eq!(status, FbStatus::FbOk);
    let end = text.iter().position(|byte| *byte == 0).unwrap();
    String::from_utf8(text[..end].to_vec()).unwrap()
}

fn look<T>(_: &T) -> Result<()> {
    Ok(())
}

fn touch<T>(_: &mut T) -> Result<()> {
    Ok(())
}

/// Runs `call` in a forked child, which exits with its result; returns that result.
pub(crate) fn in_child(call: impl FnOnce() -> u8) -> i32 {
    // SAFETY: the child runs `call`, which takes no lock that another thread may hold, and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // A failed child must not continue as a second test process.
        let code = caught(call).unwrap_or(99);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(code)) };
    }
    assert!(child > 0);
    let mut state = 0;
    // SAFETY: a child of this process, which nothing else waits for.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut state, 0) }, child);
    assert!(libc::WIFEXITED(state), "{state:#x}");
    libc::WEXITSTATUS(state)
}

/// The number of the first false condition, from 1; 0 if all hold. For children, which cannot fail a test.
pub(crate) fn first_wrong(holds: &[bool]) -> u8 {
    holds.iter().position(|holds| !holds).map_or(0, |at| at as u8 + 1)
}

#[test]
fn an_unknown_handle_is_a_status() {
    let (apple, ended) = pair();
    assert_eq!(change(null_mut::<Pair>(), touch), FbStatus::FbInvalidConfig);
    assert_eq!(read(std::ptr::null::<Pair>(), look), FbStatus::FbInvalidConfig);
    assert_eq!(end(null_mut::<Pair>(), touch), FbStatus::FbInvalidConfig);
    assert_eq!(change(apple.cast::<Pear>(), touch), FbStatus::FbInvalidConfig);
    assert_eq!(end(apple.cast::<Pear>(), touch), FbStatus::FbInvalidConfig);
    assert_eq!(text(std::ptr::null(), |_| ()), FbStatus::FbInvalidConfig);
    // An address of the caller's, a number without a kind, and a place that never had a handle.
    for number in [&raw const ended as usize, 0x10_0000, u64::from(Pair::KIND) as usize * (1 << 56) + 0xFFFF]
    {
        let forged = without_provenance_mut::<Pair>(number);
        assert_ne!(read(forged, look), FbStatus::FbOk);
        assert_eq!(text(forged.cast(), |_| ()), FbStatus::FbClosed);
    }
    assert_eq!(end(apple, |_| Err(Error::new(Kind::Busy, "x"))), FbStatus::FbBusy);
    assert_eq!(ended.load(Ordering::Relaxed), 0);
    assert_eq!(end(apple, touch), FbStatus::FbOk);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
    for status in [end(apple, touch), read(apple, look), change(apple, touch)] {
        assert_eq!(status, FbStatus::FbClosed);
    }
    assert_eq!(with(apple, look).unwrap_err().kind(), Kind::Closed);
    assert_eq!(text(apple.cast(), |_| ()), FbStatus::FbClosed);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
}

#[test]
fn a_stale_handle_is_closed_even_if_its_place_is_reused() {
    // In a child no other thread takes places.
    let code = in_child(|| {
        let place = |handle: *mut Pair| handle.addr() as u64 & word::USE;
        let stale = pair().0;
        let ended = end(stale, touch) == FbStatus::FbOk;
        let again = pair().0;
        let closed = change(stale, touch) == FbStatus::FbClosed;
        first_wrong(&[
            ended,
            place(again) == place(stale) && again != stale,
            closed,
            end(again, touch) == FbStatus::FbOk,
        ])
    });
    assert_eq!(code, 0);
}

#[test]
fn a_running_call_excludes_others_and_readers_share() {
    let (handle, ended) = pair();
    let inside = change(handle, |_| {
        assert_eq!(change(handle, touch), FbStatus::FbBusy, "a callback that calls back");
        assert_eq!(read(handle, look), FbStatus::FbBusy);
        assert_eq!(end(handle, touch), FbStatus::FbBusy);
        assert_eq!(with(handle, look).unwrap_err().kind(), Kind::Busy);
        Ok(())
    });
    assert_eq!(inside, FbStatus::FbOk);
    let inside = read(handle, |_| {
        assert_eq!(read(handle, |_| with(handle, look)), FbStatus::FbOk);
        assert_eq!(change(handle, touch), FbStatus::FbBusy);
        assert_eq!(end(handle, touch), FbStatus::FbBusy);
        Ok(())
    });
    assert_eq!((inside, ended.load(Ordering::Relaxed)), (FbStatus::FbOk, 0));
    let ends = end(handle, |_| {
        assert_eq!(end(handle, touch), FbStatus::FbBusy);
        Ok(())
    });
    assert_eq!(ends, FbStatus::FbOk);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
}

#[test]
fn readers_never_see_a_half_made_change() {
    const TURNS: u64 = 20_000;
    let handle = Sent(pair().0.addr());
    let start = Barrier::new(4);
    let seen = thread::scope(|scope| {
        let reader = || {
            start.wait();
            let compare = |pair: &Pair| match pair.one == pair.other {
                true => Ok(()),
                false => Err(Error::new(Kind::Internal, "torn")),
            };
            let tries = (0..TURNS).map(|_| read(handle.pair(), compare));
            tries.filter(|status| !matches!(status, FbStatus::FbOk | FbStatus::FbBusy)).count()
        };
        let readers: Vec<_> = (0..3).map(|_| scope.spawn(reader)).collect();
        start.wait();
        let mut changed = 0;
        for _ in 0..TURNS {
            let status = change(handle.pair(), |pair| {
                pair.one += 1;
                std::hint::spin_loop();
                pair.other += 1;
                Ok(())
            });
            changed += u64::from(status == FbStatus::FbOk);
        }
        let torn: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        (torn, changed)
    });
    assert_eq!(seen.0, 0);
    let mut counted = (0, 0);
    let count = |pair: &mut Pair| {
        counted = (pair.one, pair.other);
        Ok(())
    };
    assert_eq!((change(handle.pair(), count), counted), (FbStatus::FbOk, (seen.1, seen.1)));
    assert_eq!(end(handle.pair(), touch), FbStatus::FbOk);
}

#[test]
fn short_readers_do_not_starve_an_exclusive_call() {
    const READS: usize = 2_000;
    let handle = Sent(pair().0.addr());
    let reads = AtomicUsize::new(0);
    let refused = thread::scope(|scope| {
        scope.spawn(|| {
            while reads.load(Ordering::Relaxed) < READS {
                let served = read(handle.pair(), look) == FbStatus::FbOk;
                reads.fetch_add(usize::from(served), Ordering::Relaxed);
            }
        });
        let mut refused = 0;
        while reads.load(Ordering::Relaxed) < READS {
            refused += usize::from(change(handle.pair(), touch) != FbStatus::FbOk);
        }
        refused
    });
    assert_eq!(refused, 0);
    assert_eq!(end(handle.pair(), touch), FbStatus::FbOk);
}

#[test]
fn one_of_two_destroying_threads_succeeds() {
    for _ in 0..500 {
        let (handle, ended) = pair();
        let (handle, start) = (Sent(handle.addr()), Barrier::new(3));
        let statuses = thread::scope(|scope| {
            let destroy = || {
                start.wait();
                end(handle.pair(), touch)
            };
            let visit = || {
                start.wait();
                read(handle.pair(), look)
            };
            let (one, reader) = (scope.spawn(destroy), scope.spawn(visit));
            let other = destroy();
            reader.join().unwrap();
            [one.join().unwrap(), other]
        });
        let done = statuses.iter().filter(|status| **status == FbStatus::FbOk).count();
        // Both may have met the reader; then the object still exists.
        let left = end(handle.pair(), touch);
        assert_eq!(done + usize::from(left == FbStatus::FbOk), 1, "{statuses:?} {left:?}");
        assert_eq!(ended.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn a_full_table_is_an_error_and_places_are_reused() {
    let code = in_child(|| {
        let all: Vec<*mut Pear> = (0..PLACES).map_while(|_| give(|| Ok(Pear)).ok()).collect();
        let full = give(|| Ok(Pear)).map_err(|error| error.kind()) == Err(Kind::Exhausted);
        let last = all[PLACES - 1];
        let first_free = end(all[7], touch) == FbStatus::FbOk;
        let again = give(|| Ok(Pear));
        let reserved =
            end(last, touch) == FbStatus::FbOk && reserve().map(drop).is_ok() && give(|| Ok(Pear)).is_ok();
        let stale = read(all[7], look) == FbStatus::FbClosed && read(last, look) == FbStatus::FbClosed;
        first_wrong(&[
            all.len() == PLACES,
            full,
            first_free,
            again.is_ok(),
            reserved,
            stale,
            give(|| Ok(Pear)).is_err(),
        ])
    });
    assert_eq!(code, 0);
}

#[test]
fn a_forked_child_has_none_of_its_parents_handles() {
    let (handle, ended) = pair();
    let base = || Table::get().map_or(0, |table| table.base.load(Ordering::Relaxed));
    let before = base();
    let code = in_child(|| {
        let closed = [
            change(handle, touch) == FbStatus::FbClosed,
            read(handle, look) == FbStatus::FbClosed,
            end(handle, touch) == FbStatus::FbClosed,
            text(handle.cast(), |_| ()) == FbStatus::FbClosed,
        ];
        // The child's own handles work, and equal none of the parent's, although they use the same places.
        let own = give(|| Ok(Pear)).unwrap_or(null_mut());
        let other = ![0, before].contains(&base());
        let good = own.addr() != handle.addr() && end(own, touch) == FbStatus::FbOk;
        first_wrong(&[closed[0], closed[1], closed[2], closed[3], good, other])
    });
    assert_eq!(code, 0);
    assert_eq!((end(handle, touch), ended.load(Ordering::Relaxed)), (FbStatus::FbOk, 1));
}

#[test]
fn a_fork_inside_a_call_leaves_the_childs_table_alone() {
    let (handle, _ended) = pair();
    for alone in [true, false] {
        let mut child = -1;
        let mut fork = || {
            // SAFETY: the child returns from the call, looks at its table, and ends below.
            child = unsafe { libc::fork() };
            Ok(())
        };
        let status = if alone { change(handle, |_| fork()) } else { read(handle, |_| fork()) };
        if child == 0 {
            let closed = read(handle, look) == FbStatus::FbClosed;
            let own = give(|| Ok(Pear)).unwrap_or(null_mut());
            let good = read(own, look) == FbStatus::FbOk && change(own, touch) == FbStatus::FbOk;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(first_wrong(&[closed, good]))) };
        }
        let mut state = 0;
        // SAFETY: the child of the call above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut state, 0) }, child);
        assert_eq!((status, state), (FbStatus::FbOk, 0), "alone: {alone}");
    }
    assert_eq!(end(handle, touch), FbStatus::FbOk);
}

#[test]
fn a_panic_breaks_the_object_in_a_change_but_not_in_a_read() {
    let (handle, ended) = pair();
    let panicked = read(handle, |_| panic!("shown on standard error: this test means to"));
    assert_eq!((panicked, read(handle, look)), (FbStatus::FbInternal, FbStatus::FbOk));
    assert_eq!(change(handle, |_| panic!("as above")), FbStatus::FbInternal);
    let ran = Cell::new(false);
    let run = || {
        ran.set(true);
        Ok(())
    };
    assert_eq!(change(handle, |_| run()), FbStatus::FbInternal);
    assert_eq!(read(handle, |_| run()), FbStatus::FbInternal);
    assert!(text_of(handle).starts_with("call: internal error: the library broke"), "{}", text_of(handle));
    assert_eq!((end(handle, |_| run()), ran.get()), (FbStatus::FbOk, false));
    assert_eq!(ended.load(Ordering::Relaxed), 0, "an object that a panic left is not ended");
    assert_eq!(end(handle, touch), FbStatus::FbClosed);
}

#[test]
fn a_call_on_two_objects_has_both_alone() {
    let ((one, _), (other, ended)) = (pair(), pair());
    let pear = give(|| Ok(Pear)).unwrap();
    let both = change(one, |one| {
        one.one += 1;
        let inside = with_changed(pear, |_| {
            assert_eq!((read(pear, look), change(pear, touch)), (FbStatus::FbBusy, FbStatus::FbBusy));
            assert_eq!(change(other, touch), FbStatus::FbOk, "a third one is free");
            with_changed(other, |other| {
                other.one = one.one + 6;
                Ok(other.one)
            })
        });
        assert_eq!((inside, read(pear, look)), (Ok(7), FbStatus::FbOk));
        Ok(())
    });
    assert_eq!(both, FbStatus::FbOk);
    // One that is in use, ended, null or of another kind is the call's error, and nothing is done.
    let refused = |handle: *mut Pair, kind, words: &str| {
        let found = change(pear, |_| with_changed(handle, |_: &mut Pair| -> Result<()> { panic!("called") }));
        assert_eq!(found, kind);
        assert!(text_of(pear).contains(words), "{}", text_of(pear));
    };
    let read_by = read(other, |_| {
        refused(other, FbStatus::FbBusy, "pair; another call is inside");
        Ok(())
    });
    assert_eq!(read_by, FbStatus::FbOk);
    refused(null_mut(), FbStatus::FbInvalidConfig, "not null");
    refused(pear.cast(), FbStatus::FbInvalidConfig, "of this kind");
    assert_eq!((end(other, touch), ended.load(Ordering::Relaxed)), (FbStatus::FbOk, 1));
    refused(other, FbStatus::FbClosed, "destroyed");
    assert_eq!((end(one, touch), end(pear, touch)), (FbStatus::FbOk, FbStatus::FbOk));
}

#[test]
fn an_error_inside_a_second_object_breaks_none_and_a_panic_breaks_both() {
    let ((one, one_ended), pear) = (pair(), give(|| Ok(Pear)).unwrap());
    let failed = change(pear, |_| with_changed(one, |_| Err::<(), _>(Error::new(Kind::Io, "inside"))));
    assert_eq!((failed, read(one, look), read(pear, look)), (FbStatus::FbIo, FbStatus::FbOk, FbStatus::FbOk));
    assert!(text_of(pear).starts_with("inside") && text_of(one).is_empty(), "the text is the first one's");
    let panicked = change(pear, |_| {
        with_changed(one, |_| -> Result<()> { panic!("shown on standard error: this test means to") })
    });
    assert_eq!(panicked, FbStatus::FbInternal);
    assert_eq!((change(one, touch), change(pear, touch)), (FbStatus::FbInternal, FbStatus::FbInternal));
    for text in [text_of(one), text_of(pear)] {
        assert!(text.starts_with("call: internal error: the library broke"), "{text}");
    }
    assert_eq!((end(one, touch), end(pear, touch)), (FbStatus::FbOk, FbStatus::FbOk));
    assert_eq!(one_ended.load(Ordering::Relaxed), 0, "an object that a panic left is not ended");
}

#[test]
fn an_object_keeps_the_text_of_its_own_last_failure() {
    let (one, other) = (pair().0, pair().0);
    assert_eq!(text_of(one), "");
    let failed = change(one, |_| Err(Error::new(Kind::Busy, "first")));
    assert_eq!(failed, FbStatus::FbBusy);
    assert_eq!(read(one, look), FbStatus::FbOk);
    assert!(text_of(one).starts_with("first: busy"), "a call that succeeds leaves it");
    assert_eq!(read(one, |_| Err(Error::new(Kind::Io, "second"))), FbStatus::FbIo);
    assert!(text_of(one).starts_with("second: "), "a const call leaves one too");
    let second = change(one, |_| {
        assert_eq!(read(one, look), FbStatus::FbBusy);
        Ok(())
    });
    assert_eq!(second, FbStatus::FbOk);
    assert!(text_of(one).starts_with("second: "), "a refused call leaves none");
    assert_eq!(text_of(other), "");
    for handle in [one, other] {
        assert_eq!(end(handle, touch), FbStatus::FbOk);
    }
}

#[test]
fn two_types_with_one_kind_are_detected() {
    let pear = give(|| Ok(Pear)).unwrap();
    assert_eq!(read(pear.cast::<Twin>(), look), FbStatus::FbInternal);
    assert_eq!(end(pear, touch), FbStatus::FbOk);
}
