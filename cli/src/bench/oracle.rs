//! The reference for every figure: the rule on the host, which performs the same steps, and the comparisons with it.
//!
//! It runs [`LayerTables`] with the portable scan, so on every device a figure compares two implementations.
//! Selections are drawn from its state. It has the list of resident rows, so each step misses exactly as many rows as
//! requested without a reset in between. It has each row's age since its last selection, so each step hits rows of
//! each age as often as a model does ([`reuse`]).

use forebay::device::descriptor::LayerCount;
use forebay::residency::{Fetch, LayerTables, Moved, Portable, QueryRange, Selected, TableShape, Workspace};
use forebay::{Error, Kind, Result};

use super::reuse;

/// Pseudo-random numbers from a fixed seed.
#[derive(Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// The numbers of `seed`.
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed)
    }

    /// The next number below `end`; 0 where there is none.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        (mix(self.0) >> 32) as usize % end.max(1)
    }

    /// Shuffles so that the first `count` of `all` are a random sample, in random order.
    pub fn draw<T>(&mut self, all: &mut [T], count: usize) {
        for at in 0..count.min(all.len()) {
            let other = at + self.below(all.len() - at);
            all.swap(at, other);
        }
    }

    /// All numbers below `count`, in random order.
    pub fn shuffled(&mut self, count: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count).collect();
        self.draw(&mut all, count as usize);
        all
    }
}

/// Mixes a word, so that similar inputs have different outputs.
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// The selection of one lane in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Query rows.
    pub query: u32,
    /// Distinct rows that are not resident.
    pub misses: u32,
    /// Entries that name resident rows, over all query rows; the remaining entries are -1.
    pub hits: u32,
}

impl Wanted {
    /// `query` rows of `k` entries each, all of them valid, of which a share names rows that are not resident.
    pub fn share(k: u32, query: u32, share: f64) -> Wanted {
        let misses = (f64::from(k * query) * share).round() as u32;
        Wanted { query, misses, hits: k * query - misses }
    }
}

/// The rule's own tables for a rig.
#[derive(Debug)]
pub struct Oracle {
    layers: Vec<LayerTables>,
    work: Workspace,
    k: usize,
    numbers: Numbers,
    /// One bit per position: already drawn for this lane.
    drawn: Vec<u64>,
    /// Positions by age.
    residents: [Vec<u32>; reuse::CLASSES],
    room: Vec<Fetch>,
    /// Result of the last resolve, `[batch][query][k]`.
    pub slots: Vec<i32>,
    /// By batch row: the misses of the last resolve.
    pub fetches: Vec<Vec<Fetch>>,
    /// By layer: the counts of the step.
    pub counts: Vec<LayerCount>,
}

/// A difference that a comparison found.
pub fn differs(place: String, wanted: u64, found: u64) -> Error {
    Error::new(Kind::Internal, "bench")
        .at(place)
        .with("wanted", wanted)
        .with("found", found)
        .hint("the device is wrong, so it gets no figure: run its tests")
}

/// Compares a device's resolve with the rule's, `[batch][query][k]`, `per_row` entries for each batch row.
///
/// # Errors
/// [`Kind::Internal`] names the first entry that differs.
pub fn compare_slots(layer: u32, per_row: usize, found: &[i32], wanted: &[i32]) -> Result<u64> {
    if found.len() != wanted.len() {
        return Err(differs(format!("answers of layer {layer}"), wanted.len() as u64, found.len() as u64));
    }
    match found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        None => Ok(wanted.len() as u64),
        Some(at) => {
            let word = |slots: &[i32]| slots.get(at).copied().unwrap_or_default() as u32 as u64;
            let (row, entry) = (at / per_row.max(1), at % per_row.max(1));
            let place = format!("layer {layer}, batch row {row}, entry {entry}: slot");
            Err(differs(place, word(wanted), word(found)))
        }
    }
}

/// Compares one row's bytes with the expected ones; `place` names the row.
///
/// # Errors
/// [`Kind::Internal`] names the first byte that differs.
pub fn compare_row(found: &[u8], wanted: &[u8], place: impl Fn() -> String) -> Result<u64> {
    if found == wanted {
        return Ok(1);
    }
    let at = found.iter().zip(wanted).position(|(found, wanted)| found != wanted).unwrap_or(found.len());
    let byte = |bytes: &[u8]| bytes.get(at).copied().map_or(u64::MAX, u64::from);
    Err(differs(format!("{}, byte {at} of the row", place()), byte(wanted), byte(found)))
}

impl Oracle {
    /// Tables of `layers` layers, for steps of at most `batch` lanes.
    ///
    /// # Errors
    /// Errors of [`LayerTables::new`].
    pub fn new(shape: TableShape, layers: u32, batch: u32, k: u32) -> Result<Oracle> {
        let selected = (shape.query_rows * k) as usize;
        Ok(Oracle {
            layers: (0..layers).map(|_| LayerTables::new(shape)).collect::<Result<_>>()?,
            work: Workspace::new(&shape, shape.query_rows * k)?,
            k: k as usize,
            numbers: Numbers::new(2),
            drawn: vec![0; (shape.tokens as usize).div_ceil(64)],
            residents: std::array::from_fn(|_| Vec::new()),
            room: vec![Fetch { position: 0, slot: 0 }; selected],
            slots: Vec::new(),
            fetches: vec![Vec::new(); batch as usize],
            counts: vec![LayerCount::default(); layers as usize],
        })
    }

    fn layer(&mut self, layer: u32) -> Result<&mut LayerTables> {
        let missing = || Error::new(Kind::OutOfRange, "bench").at("layer").with("layer", layer);
        self.layers.get_mut(layer as usize).ok_or_else(missing)
    }

    /// The device's join, in every layer.
    ///
    /// # Errors
    /// Errors of [`LayerTables::join`].
    pub fn join(&mut self, lane: u32, blocks: &[u32], budget: u32, length: u32) -> Result<()> {
        self.layers.iter_mut().try_for_each(|tables| tables.join(lane, blocks, budget, length))
    }

    /// The device's leave.
    pub fn leave(&mut self, lane: u32) {
        self.layers.iter_mut().for_each(|tables| tables.leave(lane));
    }

    /// The device's warm-up, by `[layers][steps][k]` selections.
    ///
    /// # Errors
    /// Errors of [`LayerTables::warm`].
    pub fn warm(&mut self, lane: u32, whole: bool, selections: &[i32]) -> Result<()> {
        let layers = self.layers.len();
        let per_layer = selections.len() / layers.max(1);
        for layer in 0..layers {
            if let Some(tables) = self.layers.get_mut(layer).filter(|_| whole) {
                tables.bring_up(lane);
            }
            let steps = selections.get(layer * per_layer..(layer + 1) * per_layer).unwrap_or_default();
            self.warm_layer(layer as u32, lane, steps)?;
        }
        Ok(())
    }

    /// Part of a warm-up: some `[steps][k]` selections of one layer.
    ///
    /// # Errors
    /// Errors of [`LayerTables::warm`].
    pub fn warm_layer(&mut self, layer: u32, lane: u32, selections: &[i32]) -> Result<()> {
        self.slots.resize(self.slots.len().max(self.k), 0);
        let Some(tables) = self.layers.get_mut(layer as usize) else { return Ok(()) };
        for selection in selections.chunks_exact(self.k) {
            let slots = self.slots.get_mut(..self.k).unwrap_or_default();
            let selected = Selected { selection, slots, fetches: &mut self.room };
            tables.warm(&Portable, lane, selected, &mut self.work)?;
        }
        Ok(())
    }

    /// The device's begin of a step; calls `moved` with layer, lane and move of each landed row that got a slot.
    ///
    /// # Errors
    /// Errors of [`LayerTables::commit`].
    pub fn begin(
        &mut self,
        lanes: &[u32],
        accepted: u32,
        query: u32,
        mut moved: impl FnMut(u32, u32, Moved),
    ) -> Result<()> {
        self.counts.fill(LayerCount::default());
        for (index, tables) in self.layers.iter_mut().enumerate() {
            for lane in lanes {
                tables.commit(&Portable, *lane, accepted, query, |m| moved(index as u32, *lane, m))?;
            }
        }
        Ok(())
    }

    /// Resolves `[lanes][query][k]` positions: slots in `slots`, misses in `fetches`.
    ///
    /// # Errors
    /// Errors of [`LayerTables::resolve`]; [`Kind::Internal`] for a selection beyond the length, which is never drawn.
    pub fn resolve(&mut self, layer: u32, lanes: &[u32], query: u32, selection: &[i32]) -> Result<()> {
        let per_row = query as usize * self.k;
        self.slots.clear();
        self.slots.resize(selection.len(), 0);
        let tables = self.layers.get_mut(layer as usize);
        let (Some(tables), Some(counts)) = (tables, self.counts.get_mut(layer as usize)) else {
            return Err(Error::new(Kind::OutOfRange, "bench").at("layer").with("layer", layer));
        };
        let rows = QueryRange { first: 0, count: query };
        let answers = selection.chunks_exact(per_row).zip(self.slots.chunks_exact_mut(per_row));
        for ((lane, list), (selection, slots)) in lanes.iter().zip(&mut self.fetches).zip(answers) {
            let selected = Selected { selection, slots, fetches: &mut self.room };
            let done = tables.resolve(&Portable, *lane, rows, selected, &mut self.work)?;
            if let Some(beyond) = done.beyond {
                return Err(differs(format!("position drawn for lane {lane}"), 0, beyond.position.into()));
            }
            counts.add(&done.counts);
            list.clear();
            list.extend(self.room.iter().take(done.counts.misses as usize));
        }
        Ok(())
    }

    /// Draws the next selection of `lane` in `layer`, `[query][k]`, and appends it to `out`. The misses are all
    /// different and divided evenly over the query rows. The hits of each row are all different, and have the ages of
    /// [`reuse`]. Each row is in random order.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] if fewer rows are resident, or not resident, than requested.
    pub fn select(&mut self, layer: u32, lane: u32, wanted: Wanted, out: &mut Vec<i32>) -> Result<()> {
        let few = |place: &'static str, rows: u32| {
            Err(Error::new(Kind::InvalidConfig, "bench").at(place).with("rows", rows))
        };
        let mut residents = std::mem::take(&mut self.residents);
        residents.iter_mut().for_each(Vec::clear);
        let tables = self.layer(layer)?;
        let head = tables.head(lane).copied().unwrap_or_default();
        let (length, next, stamps) = (head.length, head.stamp + 1, tables.words().stamp_of);
        for row in tables.residents(lane, 0, head.budget) {
            let stamp = stamps.get(row.slot as usize).copied().unwrap_or_default();
            if let Some(class) = residents.get_mut(reuse::class(next.saturating_sub(stamp))) {
                class.push(row.position);
            }
        }
        let classes = residents.each_ref().map(Vec::len);
        let resident = classes.iter().sum::<usize>() as u32;
        let Wanted { query, misses, hits } = wanted;
        if misses > length - resident {
            return few("rows that are not resident", length - resident);
        }
        if hits.div_ceil(query.max(1)) > resident {
            return few("resident rows", resident);
        }
        let missed = self.draw_missed(layer, lane, length, misses)?;
        let mut missed = missed.into_iter();
        for row in 0..query {
            let of_row = |all: u32| (all / query + u32::from(row < all % query)) as usize;
            let (first, hits) = (out.len(), of_row(misses + hits) - of_row(misses));
            out.extend(missed.by_ref().take(of_row(misses)).map(|position| position as i32));
            for (rows, hits) in residents.iter_mut().zip(reuse::divided(classes, hits)) {
                self.numbers.draw(rows, hits);
                out.extend(rows.iter().take(hits).map(|position| *position as i32));
            }
            let drawn = out.get_mut(first..).unwrap_or_default();
            let count = drawn.len();
            self.numbers.draw(drawn, count);
            out.resize(first + self.k, -1);
        }
        self.residents = residents;
        Ok(())
    }

    /// `count` different positions of a lane that are not resident.
    fn draw_missed(&mut self, layer: u32, lane: u32, length: u32, count: u32) -> Result<Vec<u32>> {
        let mut missed = Vec::with_capacity(count as usize);
        let mut drawn = std::mem::take(&mut self.drawn);
        while missed.len() < count as usize {
            let position = self.numbers.below(length as usize) as u32;
            let bit = 1 << (position % 64);
            let Some(word) = drawn.get_mut(position as usize / 64) else { break };
            if *word & bit == 0 && self.layer(layer)?.slot(lane, position).is_none() {
                *word |= bit;
                missed.push(position);
            }
        }
        for position in &missed {
            if let Some(word) = drawn.get_mut(*position as usize / 64) {
                *word = 0;
            }
        }
        self.drawn = drawn;
        Ok(missed)
    }

    /// The device's digest of a lane.
    pub fn digest(&self, lane: u32) -> u64 {
        let digests = self.layers.iter().map(|tables| tables.digest(lane)).enumerate();
        digests
            .fold(0, |sum: u64, (layer, digest)| sum.wrapping_add(digest.wrapping_mul(2 * layer as u64 + 1)))
    }

    /// Committed tokens of a lane.
    pub fn length(&self, lane: u32) -> u32 {
        self.layers.first().and_then(|tables| tables.head(lane)).map_or(0, |head| head.length)
    }

    /// The resident rows of a lane in a layer: position and slot, in the lane's order.
    pub fn residents(&self, layer: u32, lane: u32) -> Vec<Fetch> {
        let tables = self.layers.get(layer as usize);
        let of = |tables: &LayerTables| {
            let budget = tables.head(lane).map_or(0, |head| head.budget);
            tables.residents(lane, 0, budget).collect()
        };
        tables.map(of).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Oracle {
        /// Stamps of a lane's resident rows, in the order of their slots.
        pub fn stamps(&self, layer: u32, lane: u32) -> Vec<u32> {
            let stamps = self.layers[layer as usize].words().stamp_of;
            self.residents(layer, lane).iter().map(|row| stamps[row.slot as usize]).collect()
        }
    }

    const SHAPE: TableShape = TableShape {
        lanes: 2,
        tokens: 1100,
        query_rows: 4,
        scratch: 64,
        waves: 1,
        scratch_base: 1,
        landing_base: 192,
        budget_base: 256,
        budget_blocks: 6,
    };

    #[test]
    fn every_step_misses_exactly_the_requested_rows() {
        let mut oracle = Oracle::new(SHAPE, 1, 2, 64).unwrap();
        oracle.join(0, &[0, 1, 2], 192, 1024).unwrap();
        let fill: Vec<i32> = (0..192).map(|position| position * 5).collect();
        oracle.warm(0, false, &fill).unwrap();
        // Of two query rows 17 misses are nine and eight.
        let steps = [(1, 0.067), (4, 0.3), (2, 0.134), (4, 0.067), (1, 1.0)];
        for (step, (query, share)) in steps.into_iter().enumerate() {
            oracle.begin(&[0], u32::from(step > 0), query, |_, _, _| {}).unwrap();
            let wanted = Wanted::share(64, query, share);
            assert_eq!(wanted.misses + wanted.hits, 64 * query);
            let mut selection = Vec::new();
            oracle.select(0, 0, wanted, &mut selection).unwrap();
            oracle.resolve(0, &[0], query, &selection).unwrap();
            assert_eq!(
                (oracle.counts[0].misses, oracle.fetches[0].len() as u32),
                (wanted.misses, wanted.misses)
            );
            for row in selection.chunks(64) {
                let mut row = row.to_vec();
                row.sort_unstable();
                row.dedup();
                assert_eq!(row.len(), 64, "a query row selects a position once");
            }
        }
        let mut selection = Vec::new();
        let few = Wanted { query: 1, misses: 0, hits: 200 };
        assert_eq!(oracle.select(0, 0, few, &mut selection).unwrap_err().kind(), Kind::InvalidConfig);
        let few = Wanted { query: 1, misses: 1000, hits: 0 };
        assert_eq!(oracle.select(0, 0, few, &mut selection).unwrap_err().kind(), Kind::InvalidConfig);
    }

    #[test]
    fn entries_beyond_the_wanted_rows_have_no_position() {
        let mut oracle = Oracle::new(SHAPE, 1, 2, 64).unwrap();
        oracle.join(1, &[3], 64, 500).unwrap();
        let mut selection = Vec::new();
        oracle.select(0, 1, Wanted { query: 1, misses: 3, hits: 0 }, &mut selection).unwrap();
        assert!(selection[..3].iter().all(|position| (0..500).contains(position)));
        assert_eq!(selection[3..], [-1; 61]);
    }

    #[test]
    fn a_planted_wrong_slot_and_a_planted_wrong_byte_are_found() {
        let wanted: Vec<i32> = (0..32).collect();
        assert_eq!(compare_slots(3, 8, &wanted, &wanted).unwrap(), 32);
        let mut found = wanted.clone();
        found[21] = 7;
        let text = compare_slots(3, 8, &found, &wanted).unwrap_err().to_string();
        for part in ["layer 3, batch row 2, entry 5", "wanted 21", "found 7"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(compare_slots(0, 8, &found[1..], &wanted).is_err());

        let row: Vec<u8> = (0..200).collect();
        assert_eq!(compare_row(&row, &row, || unreachable!()).unwrap(), 1);
        let mut other = row.clone();
        other[199] ^= 1;
        let text = compare_row(&other, &row, || "lane 4, position 9".to_owned()).unwrap_err().to_string();
        for part in ["lane 4, position 9, byte 199 of the row", "wanted 199", "found 198"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
