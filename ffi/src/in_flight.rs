//! The steps of a cache between prepare and retire, and room for the lists that their calls need.
//!
//! A cache object takes this room when it is made, for as many steps as can be in flight. So no call of a step
//! allocates, even where it borrows several steps at once. The calls themselves are in `step`, `layer`, `overlap` and
//! `capture`.

use forebay::device::descriptor::LayerCount;
use forebay::overlap::Overlap;
use forebay::{BatchRow, Cache, Error, Kind, Layers, Result, Step};

/// The steps of a cache between prepare and retire, and room for what their calls need.
#[derive(Debug)]
pub(crate) struct Steps {
    /// In no particular order.
    pub(crate) open: Vec<Step>,
    /// Of the step that is being prepared.
    pub(crate) rows: Vec<BatchRow>,
    /// Empty between calls, like `with_layers`.
    several: Vec<&'static mut Step>,
    with_layers: Vec<(&'static mut Step, Layers)>,
    pub(crate) orders: Vec<Overlap>,
    /// Of the step that was retired last.
    pub(crate) counts: Vec<LayerCount>,
    pub(crate) lengths: Vec<u32>,
}

impl Steps {
    /// Makes room for the steps of `cache`.
    pub(crate) fn of(cache: &Cache) -> Steps {
        let config = cache.config();
        // The cache has a step descriptor for each of them, so these are not too many.
        let steps = config.steps_in_flight.saturating_mul(config.micro_batches) as usize;
        Steps {
            open: Vec::with_capacity(steps),
            rows: Vec::with_capacity(config.batch as usize),
            several: Vec::with_capacity(config.micro_batches as usize),
            with_layers: Vec::with_capacity(config.micro_batches as usize),
            orders: Vec::with_capacity(cache.geometry().layers() as usize),
            counts: Vec::with_capacity(cache.geometry().layers() as usize),
            lengths: Vec::with_capacity(config.batch as usize),
        }
    }

    /// The index of the step with this number.
    pub(crate) fn place(&self, number: u64) -> Result<usize> {
        self.open.iter().position(|step| step.number() == number).ok_or_else(closed)
    }

    /// Moves the steps with these numbers to the start of `open`, in their order.
    fn bring(&mut self, numbers: impl Iterator<Item = u64>) -> Result<()> {
        for (front, number) in numbers.enumerate() {
            let place = self.place(number)?;
            if place < front {
                return Err(Error::new(Kind::InvalidConfig, "steps").at("a step is named twice"));
            }
            self.open.swap(front, place);
        }
        Ok(())
    }

    /// Calls `what` with the steps that have these numbers.
    pub(crate) fn with_several(
        &mut self,
        numbers: impl ExactSizeIterator<Item = u64>,
        what: impl FnOnce(&mut [&mut Step]) -> Result<()>,
    ) -> Result<()> {
        let count = numbers.len();
        self.bring(numbers)?;
        let mut several: Vec<&mut Step> = std::mem::take(&mut self.several);
        several.extend(self.open.iter_mut().take(count));
        let ended = what(&mut several);
        self.several = emptied(several);
        ended
    }

    /// Calls `what` with the steps of these numbers, each with its layers.
    pub(crate) fn with_layers(
        &mut self,
        numbers: impl ExactSizeIterator<Item = u64>,
        mut layers: impl FnMut(&Step) -> Result<Layers>,
        what: impl FnOnce(&mut [(&mut Step, Layers)]) -> Result<()>,
    ) -> Result<()> {
        let count = numbers.len();
        self.bring(numbers)?;
        let mut room: Vec<(&mut Step, Layers)> = std::mem::take(&mut self.with_layers);
        let filled = self.open.iter_mut().take(count).try_for_each(|step| {
            let layers = layers(step)?;
            room.push((step, layers));
            Ok(())
        });
        let ended = filled.and_then(|()| what(&mut room));
        self.with_layers = emptied(room);
        ended
    }

    /// Keeps the counts of the step that was retired last.
    pub(crate) fn remember(&mut self, layers: &[LayerCount], lengths: &[u32]) {
        self.counts.clear();
        self.counts.extend_from_slice(layers);
        self.lengths.clear();
        self.lengths.extend_from_slice(lengths);
    }
}

/// Reuses the allocation of a list for values of another lifetime: the collection takes over the allocation that it
/// consumes.
fn emptied<T, U>(mut list: Vec<T>) -> Vec<U> {
    list.clear();
    list.into_iter().map_while(|_| None).collect()
}

/// The error for a number that names no step.
pub(crate) fn closed() -> Error {
    Error::new(Kind::Closed, "step")
        .at("the step was retired, or never prepared in this cache")
        .hint("prepare a new step")
}

#[cfg(test)]
mod tests {
    use super::emptied;

    #[test]
    fn emptied_lists_keep_their_memory() {
        let mut list = Vec::with_capacity(5);
        let mut step = 1;
        list.push(&mut step);
        let (memory, capacity) = (list.as_ptr().addr(), list.capacity());
        let again: Vec<&'static mut i32> = emptied(list);
        assert_eq!((again.len(), again.capacity(), again.as_ptr().addr()), (0, capacity, memory));
    }
}
