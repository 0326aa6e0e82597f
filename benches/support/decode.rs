//! Sequences of a dense cache that decode, all in one batch: what a step of it costs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::dense::{Cache, Config, Open, Shape};
use forebay::device::{Device, Stream};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Result};

pub const BATCH: u32 = 160;
const STEPS: u32 = 64;

pub struct Decode {
    cache: Cache,
    stream: Stream,
    rows: Vec<BatchRow>,
    left: u32,
}

impl Decode {
    /// Sequences of a model whose rows are tiny: they are no part of the figure.
    pub fn new(device: Arc<dyn Device>, mut shape: Shape, memory: Memory) -> Result<Decode> {
        shape.groups.iter_mut().for_each(|group| group.runs = group.runs.map(|run| run.min(16)));
        let config = Config { memory, batch: BATCH, ..Config::new(shape, BATCH, 1 << 16) };
        let config = Config { device_pages: config.pages_for(BATCH, 4096), ..config };
        let stream = device.stream()?;
        let mut decode = Decode { cache: Cache::new(config, device)?, stream, rows: Vec::new(), left: 0 };
        decode.open()?;
        Ok(decode)
    }

    /// Opens all sequences, and computes one token of each.
    fn open(&mut self) -> Result<()> {
        for row in self.rows.drain(..) {
            self.cache.close(row.sequence, self.stream)?;
        }
        for _ in 0..BATCH {
            let sequence = self.cache.open(&Open { prompt: 1, promised: 4095 })?;
            self.rows.push(BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 });
        }
        self.step()?;
        self.rows.iter_mut().for_each(|row| row.accepted = Accepted::Rows(1));
        self.left = 4000;
        Ok(())
    }

    /// Prepare, finish and retire.
    fn step(&mut self) -> Result<()> {
        let mut step = self.cache.prepare(MicroBatch(0), &self.rows, None, self.stream)?;
        self.cache.finish(&mut step, self.stream)?;
        self.cache.retire(step, self.stream).map(drop).map_err(|unretired| unretired.error)
    }

    /// The time of some steps, and their number.
    pub fn pass(&mut self) -> Result<(Duration, u64)> {
        if self.left < STEPS {
            self.open()?;
        }
        self.left -= STEPS;
        let begun = Instant::now();
        (0..STEPS).try_for_each(|_| self.step())?;
        Ok((begun.elapsed(), u64::from(STEPS)))
    }
}
