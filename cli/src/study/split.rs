//! `--split by-layer`: divides one total of slots over the layers by what each gains.
//!
//! Layers differ: some select the same rows step after step, others select ever-changing rows. A uniform split gives
//! both the same slots. Here the layers' miss-ratio curves ([`crate::study::curve`]) say how many misses another slot
//! avoids in each layer, and the slots go where they avoid most.
//!
//! # How
//!
//! Every layer begins with the slots that one of its steps may need ([`MissRatioCurve::exact_from`]): its curve is not
//! exact below them. The remaining slots are given out greedily over the *lower convex hulls* of the curves. A curve
//! need not be convex: a layer that cycles over n rows gains nothing before the n-th slot and everything with it, and
//! a greedy choice of single slots would never give it the first. A segment of the hull is such a jump as a whole: a
//! number of slots, and the misses that they avoid together. Along one hull segments get flatter, so the steepest
//! segment of all layers comes next, and the segments of any layer come in order.
//!
//! **Why that is optimal.** No curve lies below its hull, so no division misses less than the hulls' least sum at
//! its total. Hulls are convex, and a sum of convex functions under a fixed total is least if each unit goes where
//! the slope is steepest: that is the greedy choice. If it ends with whole segments, every layer is at a corner of its
//! hull, where curve and hull are equal, and no division of that total misses less.
//!
//! **The last segment** may be longer than the slots left. It is not cut, because the curve lies above the hull there.
//! The layer's hull over the slots left replaces it, and the choice continues until no layer gains anything. So the
//! result may miss more than the best division, by less than what the segment that did not fit would have avoided. It
//! never misses more than the uniform split, which is taken if it is better.
//!
//! Slots from which no layer gains are not given out. Among equal slopes the lower layer comes first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use forebay::study::MissRatioCurve;
use forebay::{Error, Kind, Result};

use super::curve::Curves;

/// A piece of a layer's hull: a number of slots, and the misses that they avoid.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Segment {
    slots: u32,
    gain: u64,
    layer: usize,
}

impl Ord for Segment {
    /// Ordered by slope, then by layer from the last to the first.
    fn cmp(&self, other: &Segment) -> Ordering {
        let across = |a: &Segment, b: &Segment| u128::from(a.gain) * u128::from(b.slots);
        across(self, other).cmp(&across(other, self)).then(other.layer.cmp(&self.layer))
    }
}

impl PartialOrd for Segment {
    fn partial_cmp(&self, other: &Segment) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The state of a layer during the division.
struct Hull<'a> {
    curve: &'a MissRatioCurve,
    layer: usize,
    held: u32,
    /// Corners beyond `held` whose segments gain something, the nearest last.
    corners: Vec<u32>,
}

impl Hull<'_> {
    /// The hull of the curve from the slots held to at most `room` more.
    fn build(&mut self, room: u64, most: u32) -> Result<()> {
        let end = self.curve.flat_from().min(most);
        let last = u32::try_from(room).map_or(end, |room| self.held.saturating_add(room).min(end));
        let misses = |slots: u32| i128::from(self.curve.misses(slots));
        // Whether b lies on or above the line from a to c.
        let above = |a: u32, b: u32, c: u32| {
            (misses(b) - misses(a)) * i128::from(c - a) >= (misses(c) - misses(a)) * i128::from(b - a)
        };
        let corners = &mut self.corners;
        corners.clear();
        corners.push(self.held);
        for slots in self.held + 1..=last {
            while let [.., a, b] = corners[..]
                && above(a, b, slots)
            {
                corners.pop();
            }
            corners.try_reserve(1).map_err(|_| {
                let bytes = 4 * (corners.len() as u64 + 1);
                Error::new(Kind::OutOfMemory, "split slots").at("a layer's hull").with("bytes", bytes)
            })?;
            corners.push(slots);
        }
        while let [.., a, b] = corners[..]
            && misses(a) == misses(b)
        {
            corners.pop();
        }
        corners.reverse();
        corners.pop();
        Ok(())
    }

    fn next(&self) -> Option<Segment> {
        let corner = *self.corners.last()?;
        let gain = self.curve.misses(self.held) - self.curve.misses(corner);
        Some(Segment { slots: corner - self.held, gain, layer: self.layer })
    }
}

/// Misses of all layers together, each with its own slots.
pub fn misses(curves: &Curves, slots: &[u32]) -> u64 {
    curves.layers.iter().zip(slots).map(|(curve, slots)| curve.misses(*slots)).sum()
}

/// Divides `slots` a layer over the layers by what each gains; no layer gets more than `most`, the tokens of the
/// longest sequence. If the total cannot give every layer the slots from which its curve is exact, the curves cannot
/// divide it, and every layer gets `slots`.
///
/// # Errors
/// [`Kind::OutOfMemory`].
pub fn by_layer(curves: &Curves, slots: u32, most: u32) -> Result<Vec<u32>> {
    let uniform = vec![slots.min(most); curves.layers.len()];
    let total: u64 = uniform.iter().map(|slots| u64::from(*slots)).sum();
    let least = curves.layers.iter().map(|curve| u64::from(curve.exact_from())).sum();
    let Some(mut room) = total.checked_sub(least) else { return Ok(uniform) };
    let mut hulls = Vec::with_capacity(curves.layers.len());
    let mut segments = BinaryHeap::with_capacity(curves.layers.len());
    for (layer, curve) in curves.layers.iter().enumerate() {
        let mut hull = Hull { curve, layer, held: curve.exact_from(), corners: Vec::new() };
        hull.build(u64::MAX, most)?;
        segments.extend(hull.next());
        hulls.push(hull);
    }
    while let Some(segment) = segments.pop() {
        let hull = &mut hulls[segment.layer];
        if u64::from(segment.slots) > room {
            hull.build(room, most)?;
        } else {
            hull.held += segment.slots;
            hull.corners.pop();
            room -= u64::from(segment.slots);
        }
        segments.extend(hull.next());
    }
    let divided: Vec<u32> = hulls.iter().map(|hull| hull.held).collect();
    let exact = uniform.iter().zip(&curves.layers).all(|(slots, curve)| *slots >= curve.exact_from());
    Ok(if exact && misses(curves, &uniform) < misses(curves, &divided) { uniform } else { divided })
}
