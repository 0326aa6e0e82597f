//! Benchmarks of gather and scatter: many small rows in one call, from a few to a hundred thousand.
//!
//! Rows are at random places of more host memory than any cache holds, and every call has different ones. In addition
//! to the processors' ceiling, the copy engine's is shown; [`super::packed`] tries to approach it.

use std::sync::Arc;

use forebay::device::PoolOp;
use forebay::device::rates::{GATHER_BLOCKS, Rates, RowRate, RowRates};
use forebay::measure::{Ceilings, Probe};
use forebay::residency::Fetch;
use forebay::{Error, Kind, Result};

use super::asked::Asked;
use super::host_memory::{self, Memory};
use super::link::{Asks, Link};
use super::oracle::{Numbers, Wanted, compare_row};
use super::packed;
use super::result::{Figure, Parameter, Spread, Target};
use super::rig::{Extents, Places, Rig};
use super::row_shape::RowShape;

/// Rows of a call.
const ROWS: [u32; 10] = [1, 16, 64, 256, 410, 1024, 4096, 16_384, 41_000, 100_000];

/// The same if only the code path is tested.
const QUICK: [u32; 4] = [1, 16, 64, 200];

/// The shapes of moved rows.
const SHAPES: [RowShape; 4] = [
    RowShape { row: 656, stride: 704 },
    RowShape { row: 656, stride: 768 },
    RowShape { row: 656, stride: 656 },
    RowShape { row: 1152, stride: 1152 },
];

/// Steps before the timed ones.
const WARM_UP: u32 = 2;

/// Targets apply to calls of at least this many rows.
const MANY: u32 = 4096;

/// The rows of the calls to make.
fn counts(quick: bool) -> &'static [u32] {
    if quick { &QUICK } else { &ROWS }
}

/// Pools for gathers, and the next lane.
struct Gather {
    rig: Rig,
    order: Vec<u32>,
    turn: usize,
}

impl Gather {
    fn new(device: &Arc<dyn Probe>, shape: RowShape, memory: &Memory, quick: bool) -> Result<Gather> {
        let (lanes, k) = if quick { (4, 64) } else { (64, 2048) };
        let RowShape { row, stride } = shape;
        let page = 64;
        let lane_bytes = memory.slice.bytes() / u64::from(lanes);
        let pages = (lane_bytes / (u64::from(page) * u64::from(stride))) as u32;
        let extents = Extents {
            row,
            stride,
            page,
            layers: 1,
            lanes,
            length: pages * page - 1,
            shorter: 0,
            growth: 0,
            k,
            query_rows: 1,
            budget: k,
        };
        let rig = Rig::new(device, extents, Places::Host(memory.clone()), quick)?;
        rig.touch()?;
        Ok(Gather { rig, order: Numbers::new(4).shuffled(lanes), turn: 0 })
    }

    /// Checks that a call for `rows` has enough lanes.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] otherwise.
    fn takes(&self, rows: Option<u32>) -> Result<()> {
        let Extents { lanes, k, .. } = self.rig.extents;
        match rows {
            Some(rows) if rows > lanes * k => {
                let error = Error::new(Kind::InvalidConfig, "bench").at("--rows exceeds the rows of a call");
                Err(error.with("rows", rows).with("most", lanes * k).hint("pass fewer, or leave --quick out"))
            }
            _ => Ok(()),
        }
    }

    /// Compares all resident rows, which gathers fetched, to find writes outside a gather's own slots. Then compares
    /// all digests.
    fn finish(&mut self) -> Result<()> {
        for lane in 0..self.rig.extents.lanes {
            let residents = self.rig.oracle.residents(0, lane);
            let wanted = |row: &Fetch, bytes: &mut [u8]| self.rig.host_row(0, lane, row.position, bytes);
            self.rig.checked += self.rig.compare_rows(0, lane, &residents, wanted)?;
        }
        self.rig.finish()
    }

    /// Microseconds of a call for `rows` rows that are not resident, of other lanes than the previous call's if there
    /// are any.
    fn call(&mut self, rows: u32) -> Result<f64> {
        let lanes = rows.div_ceil(self.rig.extents.k);
        let lanes = next(&self.order, &mut self.turn, lanes as usize);
        self.rig.begin(&lanes, 0, 1, |_, _, _| {})?;
        let count = lanes.len() as u32;
        let share = |row: usize| rows / count + u32::from((row as u32) < rows % count);
        self.rig.select(0, |row| Wanted { query: 1, misses: share(row), hits: 0 })?;
        self.rig.timer.time(|stream| self.rig.resolve(0, stream))?;
        self.rig.check_answers(0)?;
        let us = self.rig.timer.time(|stream| self.rig.gather(0, stream))?;
        self.rig.check_rows(0)?;
        self.rig.end()?;
        Ok(us)
    }
}

/// Pools for scatters: one lane for each row, or for up to four if there are more rows than lanes. A batch has at most
/// 32,767 lanes.
struct Scatter {
    rig: Rig,
    order: Vec<u32>,
    turn: usize,
    /// The contents of the landing slots.
    landing: Vec<u8>,
    generation: u32,
}

/// Query rows of a lane.
const LANDING: u32 = 4;

impl Scatter {
    fn new(device: &Arc<dyn Probe>, shape: RowShape, memory: &Memory, quick: bool) -> Result<Scatter> {
        let RowShape { row, stride } = shape;
        let page = 16;
        let fit = (memory.slice.bytes() / (u64::from(page) * u64::from(stride))) as u32;
        let lanes = fit.min(counts(quick).iter().max().map_or(1, |rows| rows.div_ceil(LANDING)));
        let extents = Extents {
            row,
            stride,
            page,
            layers: 1,
            lanes,
            length: page - LANDING,
            // A row may be at any place of its page.
            shorter: page - LANDING - 1,
            growth: 0,
            k: 1,
            query_rows: LANDING,
            budget: 1,
        };
        let landing = vec![0; (lanes * LANDING * row) as usize];
        let rig = Rig::new(device, extents, Places::Host(memory.clone()), quick)?;
        Ok(Scatter { rig, order: Numbers::new(5).shuffled(lanes), turn: 0, landing, generation: 0 })
    }

    /// Writes rows into the landing slots of `lanes` that differ from the previous ones.
    fn land(&mut self, lanes: &[u32], query: u32) -> Result<()> {
        self.generation += 1;
        let row = self.rig.extents.row as usize;
        for slot in lanes.iter().flat_map(|lane| (0..query).map(move |query| lane * LANDING + query)) {
            let word = self.generation << 18 ^ slot;
            let landed = self.landing.get_mut(slot as usize * row..).and_then(|rows| rows.get_mut(..row));
            // Every piece of a row differs from the row's other pieces and from its previous contents.
            for (bytes, piece) in landed.unwrap_or_default().as_chunks_mut().0.iter_mut().zip(0_u32..) {
                *bytes = word.wrapping_mul(0x9E37_79B1).wrapping_add(piece).to_le_bytes();
            }
        }
        let first = self.rig.landing(0);
        if lanes.len() > 256 {
            let all = self.rig.slot_rows(0, first, self.rig.extents.lanes * LANDING)?;
            return self.rig.device.write(all, &self.landing);
        }
        lanes.iter().try_for_each(|lane| {
            let rows = self.rig.slot_rows(0, self.rig.landing(*lane), LANDING)?;
            self.rig.device.write(rows, self.landed(*lane, LANDING))
        })
    }

    /// The landed rows of a lane.
    fn landed(&self, lane: u32, count: u32) -> &[u8] {
        let row = self.rig.extents.row as usize;
        let rows = self.landing.get((lane * LANDING) as usize * row..).unwrap_or_default();
        rows.get(..count as usize * row).unwrap_or_default()
    }

    fn call(&mut self, rows: u32) -> Result<f64> {
        let query = rows.div_ceil(self.rig.extents.lanes);
        let count = rows.div_ceil(query) as usize;
        let lanes = next(&self.order, &mut self.turn, count);
        self.land(&lanes, query)?;
        self.rig.begin(&lanes, 0, query, |_, _, _| {})?;
        let us = self.rig.timer.time(|stream| {
            self.rig.device.enqueue(self.rig.pools, stream, PoolOp::Scatter(self.rig.range(0)))
        })?;
        let size = self.rig.extents.row as usize;
        let (mut found, mut compared) = (vec![0; size], 0);
        for lane in &lanes {
            for (place, wanted) in self.landed(*lane, query).chunks_exact(size).enumerate() {
                let position = self.rig.oracle.length(*lane) + place as u32;
                self.rig.host_row(0, *lane, position, &mut found)?;
                compared += compare_row(&found, wanted, || {
                    format!("scattered row of lane {lane}, position {position}")
                })?;
            }
        }
        self.rig.checked += compared;
        self.rig.end()?;
        Ok(us)
    }
}

/// The next `count` lanes of a cyclic order.
fn next(order: &[u32], turn: &mut usize, count: usize) -> Vec<u32> {
    let lanes = order.iter().cycle().skip(*turn % order.len().max(1)).take(count).copied().collect();
    *turn += count;
    lanes
}

/// Times of `rounds` calls, after those that warm up.
fn times(rounds: u32, mut call: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    for _ in 0..WARM_UP {
        call()?;
    }
    (0..rounds).map(|_| call()).collect()
}

/// Whether the payload's rate is at least 90% of the ceiling's, and above `known`, which another system reached, if
/// the link allows it.
fn reaches(rate: Option<f64>, ceiling: f64, known: f64) -> bool {
    rate.is_some_and(|rate| rate >= 0.9 * ceiling && (rate > known || ceiling <= known))
}

/// Figures of gathers.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a wrong row.
pub fn gather(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let memory = asked.pool.on(&**device)?;
    let gpu = device.facts()?.gpu.is_some();
    let mut figures = Vec::new();
    // A profiler needs a single one, without other launches of its kernel.
    let alone = asked.rows.as_ref().map(std::slice::from_ref);
    let (shapes, counts) = match alone {
        Some(rows) => (&SHAPES[..1], rows),
        None => (&SHAPES[..], counts(asked.quick)),
    };
    asked.progress.inc_length((shapes.len() * counts.len()) as u64);
    for &shape in shapes {
        let mut pools = Gather::new(device, shape, &memory, asked.quick)?;
        pools.takes(asked.rows)?;
        let mut packer = match shape == SHAPES[0] && alone.is_none() {
            true => Some(packed::Packed::new(device, shape, &memory, asked.quick)?),
            false => None,
        };
        for rows in counts {
            let before = pools.rig.checked;
            let times = times(asked.rounds, || pools.call(*rows))?;
            let bytes = u64::from(rows * shape.row);
            let least = |rate: f64| ceilings.launch_us + bytes as f64 / rate * 1e6;
            let checked = pools.rig.checked - before;
            let ceiling = ("processors read", least(ceilings.read));
            let mut figure = of_rows("gather", *rows, shape, times, ceiling, bytes, checked)
                .with("pool", Parameter::Bytes(asked.pool.bytes));
            // Bulk copies are not loads of warps, so their requests are not counted.
            figure.link = (gpu && !asked.bulk).then(|| link(*rows, shape, ceilings.read, ceilings));
            figure.beside.push(("copy engine", least(ceilings.copy_up)));
            if let Some(packer) = packer.as_mut().filter(|packer| packer.takes(*rows)) {
                let before = packer.checked();
                let packed = Spread::of(self::times(asked.rounds, || packer.call(*rows))?);
                figure.checked += packer.checked() - before;
                figure.beside.push(("packed on the host", packed.us));
            }
            if gpu && *rows >= MANY && shape == SHAPES[0] {
                let met = reaches(figure.rate(), ceilings.read, 37e9);
                figure.target = Some(Target { text: "90% of what processors read, above 37 GB/s", met });
            }
            figures.push(asked.known(figure)?);
            asked.progress.inc(1);
        }
        pools.finish()?;
        if let Some(packer) = &mut packer {
            packer.finish()?;
        }
    }
    Ok(figures)
}

/// Figures of scatters.
///
/// # Errors
/// As [`gather`].
pub fn scatter(device: &Arc<dyn Probe>, ceilings: &Ceilings, asked: &Asked) -> Result<Vec<Figure>> {
    let memory = asked.pool.on(&**device)?;
    let gpu = device.facts()?.gpu.is_some();
    let mut figures = Vec::new();
    asked.progress.inc_length((SHAPES.len() * counts(asked.quick).len()) as u64);
    for shape in SHAPES {
        let mut pools = Scatter::new(device, shape, &memory, asked.quick)?;
        for rows in counts(asked.quick) {
            asked.progress.inc(1);
            // Smaller memory has fewer lanes.
            if *rows > pools.rig.extents.lanes * LANDING {
                continue;
            }
            let before = pools.rig.checked;
            let times = times(asked.rounds, || pools.call(*rows))?;
            let bytes = u64::from(rows * shape.row);
            let least = |rate: f64| ceilings.launch_us + bytes as f64 / rate * 1e6;
            let ceiling = ("processors write", least(ceilings.write));
            let checked = pools.rig.checked - before;
            let mut figure = of_rows("scatter", *rows, shape, times, ceiling, bytes, checked)
                .with("pool", Parameter::Bytes(asked.pool.bytes));
            figure.link = gpu.then(|| link(*rows, shape, ceilings.write, ceilings));
            figure.beside.push(("copy engine", least(ceilings.copy_down)));
            if gpu && *rows >= MANY && shape == SHAPES[0] {
                let met = reaches(figure.rate(), ceilings.write, 43e9);
                figure.target = Some(Target { text: "90% of what processors write, above 43 GB/s", met });
            }
            figures.push(asked.known(figure)?);
        }
        pools.rig.finish()?;
    }
    Ok(figures)
}

/// The demand of a call's rows on a link with this rate in one long run.
fn link(rows: u32, shape: RowShape, ceiling: f64, ceilings: &Ceilings) -> Link {
    Link { asks: Asks::of(shape), rows, ceiling, launch_us: ceilings.launch_us }
}

/// A figure of rows of one shape.
fn of_rows(
    group: &'static str,
    rows: u32,
    shape: RowShape,
    times: Vec<f64>,
    ceiling: (&'static str, f64),
    bytes: u64,
    checked: u64,
) -> Figure {
    let figure = Figure::new(group, group, times, ceiling, checked);
    let figure = Figure { bytes: Some(bytes), ..figure };
    figure.with("rows", rows).with("row_bytes", shape.row).with("stride", shape.stride)
}

/// Rounds of each point of [`rates`].
const RATE_ROUNDS: u32 = 7;

/// The rows of the calls that [`rates`] measures.
fn rate_counts(quick: bool) -> impl Iterator<Item = &'static u32> {
    counts(quick).iter().filter(|rows| **rows <= 16_384)
}

/// How often [`rates`] reports progress.
pub fn rate_pieces(quick: bool) -> u64 {
    2 * rate_counts(quick).count() as u64
}

/// The rates of a machine for planning: rows of 656 bytes at a stride of 704, in a small pool, and plain copies.
///
/// # Errors
/// Errors of the device; [`forebay::Kind::Internal`] for a wrong row.
pub fn rates(device: &Arc<dyn Probe>, ceilings: &Ceilings, quick: bool, done: &dyn Fn()) -> Result<Rates> {
    let memory = Memory::filled(&**device, host_memory::little(quick)?)?;
    let (shape, facts) = (SHAPES[0], device.facts()?);
    let (blocks, processors) = (if facts.gpu.is_some() { GATHER_BLOCKS } else { 1 }, facts.processors.max(1));
    let points = |call: &mut dyn FnMut(u32) -> Result<f64>| -> Result<RowRates> {
        let mut points = Vec::new();
        for rows in rate_counts(quick) {
            let us = Spread::of(times(RATE_ROUNDS, || call(*rows))?).us.max(1e-3);
            done();
            points.push(RowRate { rows: *rows, bytes_per_s: f64::from(rows * shape.row) / us * 1e6 });
        }
        Ok(RowRates { row_bytes: shape.row, points })
    };
    let mut gather = Gather::new(device, shape, &memory, quick)?;
    let gathered = points(&mut |rows| gather.call(rows))?;
    // Compared before the scatter writes to the memory of the gather.
    gather.finish()?;
    let mut scatter = Scatter::new(device, shape, &memory, quick)?;
    let scattered = points(&mut |rows| scatter.call(rows))?;
    scatter.rig.finish()?;
    Ok(Rates {
        gather: gathered,
        scatter: scattered,
        copy_up: ceilings.copy_up,
        copy_down: ceilings.copy_down,
        launch_ns: ceilings.launch_us * 1e3,
        gather_sm: f64::from(blocks.min(processors)) / f64::from(processors),
        copy_engines: facts.copy_engines.max(1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::host::{HostDevice, HostOptions};

    #[test]
    fn a_row_that_a_call_wrote_outside_its_own_is_found() {
        let device: Arc<dyn Probe> = HostDevice::new(HostOptions::default());
        let memory = Memory::filled(&*device, host_memory::QUICK).unwrap();
        let mut pools = Gather::new(&device, SHAPES[0], &memory, true).unwrap();
        pools.call(64).unwrap();
        let before = pools.rig.checked;
        pools.finish().unwrap();
        assert_eq!(pools.rig.checked - before, 64 + 4, "the rows and the digests");
        let lane = pools.order[0];
        let slot = pools.rig.oracle.residents(0, lane)[7].slot;
        let place = pools.rig.slot_rows(0, slot, 1).unwrap().part(640, 16).unwrap();
        device.write(place, &[0; 16]).unwrap();
        let text = pools.finish().unwrap_err().to_string();
        assert!(text.contains(&format!("slot {slot}, byte 640 of the row")), "{text}");
    }

    #[test]
    fn every_piece_of_a_landed_row_differs_at_the_next_call() {
        let device: Arc<dyn Probe> = HostDevice::new(HostOptions::default());
        let memory = Memory::filled(&*device, host_memory::QUICK).unwrap();
        let mut pools = Scatter::new(&device, SHAPES[0], &memory, true).unwrap();
        let mut land = || {
            pools.land(&[3], LANDING).unwrap();
            pools.landed(3, LANDING).as_chunks::<16>().0.to_vec()
        };
        let (first, second) = (land(), land());
        assert!(first.iter().zip(&second).all(|(first, second)| first != second));
    }
}
