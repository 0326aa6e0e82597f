//! The word of a handle's place and the list of free places (`ffi/src/word.rs`), in every interleaving of up to three
//! preemptions. The test includes that source file directly, because the C interface is not built for loom.
//!
//! Each model has a control with a planted fault, which loom must find.
#![cfg(loom)]
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../ffi/src/word.rs"]
mod word;

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;

const KIND: u8 = 3;

fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

fn assert_found(run: impl Fn() + Send + Sync + 'static) {
    assert!(catch_unwind(AssertUnwindSafe(|| model(run))).is_err(), "the planted mistake was not found");
}

/// A place with an object that its word protects: a number that is read and written without any order of its own, so
/// that loom shows an old value to a thread that is not ordered after the last change.
struct Place {
    word: AtomicU64,
    object: AtomicU32,
    next: AtomicU32,
}

impl Place {
    fn free() -> Place {
        Place { word: AtomicU64::new(0), object: AtomicU32::new(0), next: AtomicU32::new(0) }
    }

    fn named() -> (Arc<Place>, u64) {
        let place = Place::free();
        let name = word::occupy(&place.word, KIND, 1);
        assert_eq!(word::kind(name), KIND);
        (Arc::new(place), name)
    }

    fn get(&self) -> u32 {
        self.object.load(Ordering::Relaxed)
    }

    fn set(&self, value: u32) {
        self.object.store(value, Ordering::Relaxed);
    }

    fn look(&self, name: u64) -> Option<u32> {
        word::read(&self.word, name).ok()?;
        let seen = self.get();
        assert_eq!(self.get(), seen, "it changes under a reader");
        word::unread(&self.word, name);
        Some(seen)
    }

    fn add(&self, name: u64) -> bool {
        let entered = word::alone(&self.word, name).is_ok();
        if entered {
            self.set(self.get() + 1);
            word::unalone(&self.word, name);
        }
        entered
    }

    fn end(&self, name: u64) -> bool {
        let entered = word::alone(&self.word, name).is_ok();
        if entered {
            self.set(u32::MAX);
            assert!(word::vacate(&self.word, name));
        }
        entered
    }
}

#[test]
fn an_owner_is_alone_and_its_writes_are_seen_by_the_next_reader() {
    model(|| {
        let (place, name) = Place::named();
        let (one, other) = (Arc::clone(&place), Arc::clone(&place));
        let reader = thread::spawn(move || one.look(name));
        let writer = thread::spawn(move || other.add(name));
        let added = place.add(name);
        let seen = reader.join().unwrap();
        let added = u32::from(added) + u32::from(writer.join().unwrap());
        assert!(seen.is_none_or(|seen| seen <= added));
        assert_eq!(place.look(name), Some(added));
    });
}

#[test]
fn an_ended_name_admits_no_thread_and_ends_once() {
    model(|| {
        let (place, name) = Place::named();
        let (one, other) = (Arc::clone(&place), Arc::clone(&place));
        let reader = thread::spawn(move || one.look(name));
        let second = thread::spawn(move || other.end(name));
        let ended = u32::from(place.end(name)) + u32::from(second.join().unwrap());
        let seen = reader.join().unwrap();
        assert!(ended <= 1 && seen.is_none_or(|seen| seen == 0));
        assert_eq!(place.look(name).is_none(), ended == 1);
        let again = (ended == 1).then(|| word::occupy(&place.word, KIND, 1));
        assert!(again.is_none_or(|again| again != name && place.look(again).is_some() && !place.add(name)));
    });
}

#[test]
fn a_reader_that_does_not_count_itself_is_found() {
    assert_found(|| {
        let (place, name) = Place::named();
        let other = Arc::clone(&place);
        let reader = thread::spawn(move || {
            let named = other.word.load(Ordering::Acquire) & !word::USE == name;
            named.then(|| other.get())
        });
        place.end(name);
        assert_ne!(reader.join().unwrap(), Some(u32::MAX));
    });
}

/// Two places on the list, which three threads borrow and return.
struct List {
    head: AtomicU64,
    places: [Place; 2],
}

impl List {
    fn new() -> Arc<List> {
        let list = List { head: AtomicU64::new(0), places: [Place::free(), Place::free()] };
        (0..2).for_each(|place| list.push(place));
        Arc::new(list)
    }

    fn push(&self, place: u32) {
        word::push(&self.head, &self.places[place as usize].next, place);
    }

    fn pop(&self) -> Option<u32> {
        word::pop(&self.head, |place| &self.places[place as usize].next)
    }

    /// Owns a place for a while. Returns whether there was one.
    fn borrow(&self) -> bool {
        let popped = self.pop();
        if let Some(place) = popped {
            let owned = &self.places[place as usize];
            assert_eq!(owned.word.swap(1, Ordering::Relaxed), 0, "two owners");
            owned.set(owned.get() + 1);
            owned.word.store(0, Ordering::Relaxed);
            self.push(place);
        }
        popped.is_some()
    }
}

#[test]
fn a_place_has_one_owner_and_none_is_lost() {
    model(|| {
        let list = List::new();
        let other = Arc::clone(&list);
        let thread = thread::spawn(move || u32::from(other.borrow()));
        // One place returns at once while the other stays away: the head is the same, and its successor is not.
        let (first, second) = (list.pop(), list.pop());
        first.into_iter().for_each(|place| list.push(place));
        second.into_iter().for_each(|place| {
            let owned = &list.places[place as usize];
            assert_eq!(owned.word.load(Ordering::Relaxed), 0, "two owners");
            owned.set(owned.get() + 1);
            list.push(place);
        });
        let borrowed = u32::from(second.is_some()) + thread.join().unwrap();
        let (first, second) = (list.pop().unwrap(), list.pop().unwrap());
        assert!(first != second && list.pop().is_none());
        assert_eq!(list.places.iter().map(Place::get).sum::<u32>(), borrowed);
    });
}

#[test]
fn a_list_that_does_not_count_its_changes_is_found() {
    /// Like the list's own, but a head that is the same place again passes for unchanged.
    fn pop(list: &List) -> Option<u32> {
        let now = list.head.load(Ordering::Acquire);
        let place = (now as u32).checked_sub(1)?;
        let successor = u64::from(list.places[place as usize].next.load(Ordering::Relaxed));
        let head = list.head.load(Ordering::Acquire);
        let same = head as u32 == now as u32;
        let swapped = list.head.compare_exchange(head, successor, Ordering::AcqRel, Ordering::Acquire);
        (same && swapped.is_ok()).then_some(place)
    }
    assert_found(|| {
        let list = List::new();
        let other = Arc::clone(&list);
        let thread = thread::spawn(move || pop(&other));
        let (first, held) = (list.pop(), list.pop());
        first.into_iter().for_each(|place| list.push(place));
        let theirs = thread.join().unwrap();
        // A place that is kept here is not on the list, and does not belong to the others.
        assert!(theirs.is_none() || theirs != held);
        assert!(held.is_none() || list.pop() != held);
    });
}
