//! In place of a model: rows that a layer would compute, and the time that it would take.

use std::hint::spin_loop;
use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use forebay::Result;
use forebay::transfer::memory::SendMemory;

use super::shape::Shape;

/// Lets the rest of a layer's time since its beginning pass.
pub fn pass(begin: Instant, time: Duration, spins: bool) {
    if spins {
        while begin.elapsed() < time {
            spin_loop();
        }
    } else {
        sleep(time.saturating_sub(begin.elapsed()));
    }
}

/// Writes rows of a request's layer where a part of the memory has them.
///
/// # Errors
/// Those of the memory.
pub fn write(
    memory: &SendMemory,
    shape: &Shape,
    (request, layer): (u64, u32),
    tokens: Range<u32>,
    origin: u64,
    rows: &mut Vec<u8>,
) -> Result<()> {
    for (component, plane) in (0..).zip(memory.planes().0.iter().take(2)) {
        let bytes = if component == 0 { shape.row_bytes[0] } else { shape.row_bytes[1] };
        let mut first = tokens.start;
        while first < tokens.end {
            // A page at a time, so that the buffer stays small. The rows of pages are next to each other.
            let next = tokens.end.min((first / shape.page + 1).saturating_mul(shape.page));
            shape.rows(request, layer, component, first..next, rows);
            let at = origin + plane.offset + u64::from(first) * u64::from(bytes);
            memory.map().copy_in(at, rows)?;
            first = next;
        }
    }
    Ok(())
}
