//! The control of `ci/tsan`: an earlier fault of the host device, a reference into memory that another thread writes.
//! The sanitizer must report it.

use std::thread;

/// Memory that two threads access.
#[derive(Clone, Copy)]
struct Shared(*mut u32);

// SAFETY: it is not safe; this is what the program shows.
unsafe impl Send for Shared {}

fn main() {
    let mut memory = vec![0_u32; 1 << 16];
    let shared = Shared(memory.as_mut_ptr());
    let writer = thread::spawn(move || {
        let Shared(words) = { shared };
        for at in 0..1 << 16 {
            // SAFETY: inside the vector, which outlives the thread.
            unsafe { *words.add(at) = 1 };
        }
    });
    // SAFETY: as above, except for the race.
    let read = unsafe { std::slice::from_raw_parts(shared.0, 1 << 16) };
    let sum: u32 = read.iter().sum();
    let _ = writer.join();
    println!("{sum}");
}
