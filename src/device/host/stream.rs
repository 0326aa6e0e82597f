//! Streams and events of the host device: one thread per stream, or inline streams without threads.
//!
//! A threaded stream is a queue of operations that its thread runs in order. The queue is allocated at construction.
//! While it is full, enqueueing waits for room, as with a driver's launch queue. An inline stream runs each operation
//! in the call that enqueues it: the same order, no threads, and the fastest way to use the device from one thread
//! (trace replay does).
//!
//! An event counts its records and remembers which of them were reached. A wait refers to the last record enqueued
//! before it, and only to that. So an event can be recorded again while another thread waits for an older record, and
//! a record in a fast stream does not end a wait for one in a slow stream.

use std::collections::VecDeque;

use crate::sync::{Arc, Condvar, Mutex};

/// An event's counts.
#[derive(Debug)]
pub struct EventState {
    counts: Mutex<EventCounts>,
    changed: Condvar,
}

#[derive(Debug)]
struct EventCounts {
    recorded: u64,
    /// All records up to this one have been reached.
    reached: u64,
    /// Later records that have been reached. Records of one stream arrive in order, so these are few.
    ahead: Vec<u64>,
    /// The number of threads in `wait`. If it is 0, reaching a record needs no system call.
    waiting: u32,
}

impl EventCounts {
    fn has(&self, number: u64) -> bool {
        number <= self.reached || self.ahead.contains(&number)
    }
}

impl EventState {
    /// An event that was never recorded and so counts as complete.
    pub fn new() -> Self {
        let counts = EventCounts { recorded: 0, reached: 0, ahead: Vec::with_capacity(16), waiting: 0 };
        EventState { counts: Mutex::new(counts), changed: Condvar::new() }
    }

    /// Counts a record that is about to be enqueued; returns its number.
    pub fn record(&self) -> u64 {
        let mut counts = self.counts.lock();
        counts.recorded += 1;
        counts.recorded
    }

    /// The number of the last record.
    pub fn recorded(&self) -> u64 {
        self.counts.lock().recorded
    }

    /// Notes that the stream has reached record `number`.
    pub fn reach(&self, number: u64) {
        let mut counts = self.counts.lock();
        counts.ahead.push(number);
        while let Some(next) = counts.ahead.iter().position(|n| *n == counts.reached + 1) {
            counts.ahead.swap_remove(next);
            counts.reached += 1;
        }
        if counts.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Whether the last record has been reached.
    pub fn is_complete(&self) -> bool {
        let counts = self.counts.lock();
        counts.has(counts.recorded)
    }

    /// Blocks until record `number` has been reached.
    pub fn wait(&self, number: u64) {
        let mut counts = self.counts.lock();
        while !counts.has(number) {
            counts.waiting += 1;
            counts = self.changed.wait(counts);
            counts.waiting -= 1;
        }
    }
}

/// A bounded queue between the host and a stream's thread.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<QueueState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState<T> {
    waiting: VecDeque<T>,
    room: usize,
    closed: bool,
}

impl<T> Queue<T> {
    /// A queue with `room` places, all allocated at once.
    pub fn new(room: usize) -> Self {
        let room = room.max(1);
        let state = QueueState { waiting: VecDeque::with_capacity(room), room, closed: false };
        Queue { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Appends `item`, waiting for room. Returns the item as an error when the queue is closed.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.state.lock();
        while state.waiting.len() >= state.room && !state.closed {
            state = self.changed.wait(state);
        }
        if state.closed {
            return Err(item);
        }
        state.waiting.push_back(item);
        self.changed.notify_all();
        Ok(())
    }

    /// Removes the oldest item, waiting for one. Returns `None` once the queue is closed and empty.
    pub fn pop(&self) -> Option<T> {
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.waiting.pop_front() {
                self.changed.notify_all();
                return Some(item);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state);
        }
    }

    /// Closes the queue: the queued items are still processed, and no new ones are accepted.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

/// A shared event.
pub(crate) type SharedEvent = Arc<EventState>;
