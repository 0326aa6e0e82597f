//! How long a step waits for the pulls of sharded weights, layer by layer.
//!
//! Layers that are sharded share two buffers, or three ([`Plan`](crate::weights::Plan)). A layer's weights are used
//! until its output projection has ended, not until its experts have. Then the pull of the next layer of that buffer
//! begins, and runs beside the rest of this layer and all of the next one. So the first pulls come first, the use of a
//! layer follows its pull, and the pull of the layer after the next follows its use.
//!
//! **The recurrence** ([`exposed`]). In the order of the step, for a layer `l` whose buffer the layer `before(l)` had:
//!
//! - the pull of `l` is ready when the use of `before(l)` ends, and ends at `P(l)`, by the link below;
//! - `l` begins at `U(l) = max(N(l-1), P(l))`, and what it waits is `U(l) - N(l-1)`;
//! - its use ends at `E(l) = U(l) + uses(l)`, and the layer at `N(l) = E(l) + rest(l)`.
//!
//! **The link** serves a number of pulls at once ([`Cycle::at_once`]), which divide its rate evenly; others wait in the
//! order in which they became ready. This is the rule of the [clock](crate::device::clock) without its other traffic: a
//! pull's time is given as what it takes alone beside the engine's collectives.
//!
//! **Resident layers** have no pull, and a buffer that one layer alone uses keeps it: it is pulled once, never again.
//!
//! **From one step to the next** ([`End`]) the first layer of each buffer is pulled too. A captured graph has to join
//! these pulls before it ends, or they are launched behind it. Then every step begins with its first layers there, so
//! one step is as any other. Without a graph the next step's layers wait themselves, and steps differ until they
//! settle.
//!
//! **What it does not know**: the launches of pulls and waits, and ranks that are not at the same layer. A pull needs
//! no other rank to be anywhere, so ranks that drift apart do not slow each other.

use std::collections::VecDeque;

use crate::weights::Wrap;

/// Steps after which a ring without a graph has settled: what is not settled by then differs by less than a wait of a
/// layer in so many steps.
const SETTLED: usize = 16;

/// The time of a pull, for which its layer waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fill {
    /// The buffer that it fills.
    pub buffer: u8,
    /// Microseconds, alone on the link.
    pub us: f64,
}

/// A layer of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Microseconds from its beginning to the end of its output projection, of all micro-batches.
    pub uses_us: f64,
    /// Microseconds from there to its end.
    pub rest_us: f64,
    /// Its pull; none if it is resident.
    pub pull: Option<Fill>,
}

impl Layer {
    /// Microseconds of the whole layer, without waits.
    pub const fn us(&self) -> f64 {
        self.uses_us + self.rest_us
    }
}

/// How a step ends, and with it how the pulls of the next step's first layers come before that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// No graph: they run when their buffers are free, and the next step's layers wait for them.
    Open,
    /// A graph, which joins them or has them behind it.
    Graph(Wrap),
}

/// A step that follows itself, and the link that its pulls divide.
#[derive(Clone, Debug, PartialEq)]
pub struct Cycle {
    /// The layers, in the order of the step.
    pub layers: Vec<Layer>,
    /// Microseconds of what follows the last layer inside the graph.
    pub tail_us: f64,
    /// Microseconds of the device between one graph and the next.
    pub between_us: f64,
    /// Pulls that run at once, above 0.
    pub at_once: u32,
    /// How it ends.
    pub end: End,
}

/// What a step waits, in microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposed {
    /// By layer, what the step waits before it.
    pub layers_us: Vec<f64>,
    /// What the end of the step waits for the next one's first layers.
    pub wrap_us: f64,
    /// From this step's beginning to the next one's.
    pub step_us: f64,
    /// By layer, the beginning and the end of the pull that follows its use, from the step's beginning; of the layer
    /// that is next in the buffer. None where nothing follows.
    pub pulls_us: Vec<Option<(f64, f64)>>,
}

impl Exposed {
    /// All of it.
    pub fn us(&self) -> f64 {
        self.layers_us.iter().sum::<f64>() + self.wrap_us
    }
}

/// A pull that has not ended: the layer that its buffer was last used by, and how much of it is left.
#[derive(Clone, Copy, Debug)]
struct Running {
    after: usize,
    ready: f64,
    start: f64,
    left: f64,
}

/// The link, up to `now`.
#[derive(Debug)]
struct Link {
    at_once: usize,
    now: f64,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    /// By the layer that the buffer was last used by, the last pull that ended.
    ended: Vec<Option<(f64, f64)>>,
}

impl Link {
    fn new(at_once: u32, layers: usize) -> Link {
        let at_once = at_once.max(1) as usize;
        Link { at_once, now: 0.0, waiting: VecDeque::new(), running: Vec::new(), ended: vec![None; layers] }
    }

    /// A pull is ready; none was ready later.
    fn ready(&mut self, after: usize, ready: f64, us: f64) {
        self.ended.iter_mut().skip(after).take(1).for_each(|ended| *ended = None);
        self.waiting.push_back(Running { after, ready, start: ready, left: us });
    }

    /// When the pull that follows the use of this layer ends. Pulls that become ready later begin after that, because
    /// nothing is used before it: so what is known now decides it.
    fn end(&mut self, after: usize) -> Option<f64> {
        loop {
            if let Some((_, end)) = self.ended.get(after).copied().flatten() {
                return Some(end);
            }
            while self.running.len() < self.at_once
                && let Some(first) = self.waiting.front().copied()
                && first.ready <= self.now
            {
                self.waiting.pop_front();
                self.running.push(Running { start: self.now, ..first });
            }
            let first = self.waiting.front().map(|first| first.ready);
            let Some(least) = self.running.iter().map(|one| one.left).min_by(f64::total_cmp) else {
                self.now = f64::max(self.now, first?);
                continue;
            };
            let parts = self.running.len() as f64;
            let next = first.filter(|_| self.running.len() < self.at_once).unwrap_or(f64::INFINITY);
            if next - self.now < least * parts {
                let each = (next - self.now) / parts;
                self.running.iter_mut().for_each(|one| one.left -= each);
                self.now = next;
                continue;
            }
            self.now += least * parts;
            for one in &self.running {
                if one.left <= least {
                    let ended = self.ended.iter_mut().skip(one.after).take(1);
                    ended.for_each(|ended| *ended = Some((one.start, self.now)));
                }
            }
            self.running.retain(|one| one.left > least);
            self.running.iter_mut().for_each(|one| one.left -= least);
        }
    }
}

/// What a layer's pull follows, and what follows its use.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The layer that had its buffer before it.
    before: usize,
    /// Whether that layer is in the step before.
    wraps_before: bool,
    /// The time of the pull that follows its use, and whether it is of the next step.
    next_us: f64,
    wraps: bool,
}

/// By layer; none for a layer that no pull precedes.
fn places(layers: &[Layer]) -> Vec<Option<Place>> {
    let pull = |index: usize| layers.get(index).and_then(|layer| layer.pull);
    let place = |index: usize| {
        let own = pull(index)?;
        let same = |other: &usize| pull(*other).is_some_and(|pull| pull.buffer == own.buffer);
        let (earlier, later) = ((0..index).rfind(same), (index + 1..layers.len()).find(same));
        // The step is a circle.
        let before = earlier.or_else(|| (index..layers.len()).rfind(same))?;
        let next = later.or_else(|| (0..=index).find(same))?;
        let next_us = pull(next)?.us;
        let wraps_before = earlier.is_none();
        (before != index).then_some(Place { before, wraps_before, next_us, wraps: later.is_none() })
    };
    (0..layers.len()).map(place).collect()
}

/// What a step waits, by the recurrence of the [module](self). Times are not negative.
pub fn exposed(cycle: &Cycle) -> Exposed {
    let Cycle { layers, tail_us, between_us, at_once, end: ends } = cycle;
    let places = places(layers);
    let mut link = Link::new(*at_once, layers.len());
    let mut exposed = Exposed::default();
    let mut now = 0.0_f64;
    let steps = if *ends == End::Open { SETTLED } else { 1 };
    for step in 0..steps {
        let start = now;
        exposed.layers_us = Vec::with_capacity(layers.len());
        let mut last = Vec::new();
        for (index, (layer, place)) in layers.iter().zip(&places).enumerate() {
            // The first layers of the first step are there; so they are in every step of a graph.
            let pulled = place.filter(|place| !place.wraps_before || (step > 0 && *ends == End::Open));
            let begin = pulled.and_then(|place| link.end(place.before)).map_or(now, |end| end.max(now));
            exposed.layers_us.push(begin - now);
            now = begin + layer.uses_us;
            match place {
                Some(place) if place.wraps && *ends == End::Graph(Wrap::Behind) => {
                    last.push((index, place.next_us))
                }
                Some(place) => link.ready(index, now, place.next_us),
                None => {}
            }
            now += layer.rest_us;
        }
        let end = now + tail_us;
        last.iter().for_each(|(index, us)| link.ready(*index, end, *us));
        let wraps = places.iter().enumerate().filter(|(_, place)| place.is_some_and(|place| place.wraps));
        let wraps: Vec<usize> = wraps.map(|(index, _)| index).collect();
        let mut pulled = |at: f64| wraps.iter().filter_map(|index| link.end(*index)).fold(at, f64::max);
        now = match ends {
            End::Open => end + between_us,
            End::Graph(Wrap::Joined) => pulled(end) + between_us,
            End::Graph(Wrap::Behind) => pulled(end + between_us),
        };
        exposed.wrap_us = now - end - between_us;
        exposed.step_us = now - start;
        let since = |times: &Option<(f64, f64)>| times.map(|(begin, end)| (begin - start, end - start));
        exposed.pulls_us = link.ended.iter().map(since).collect();
    }
    exposed
}

/// The better of a graph's two wraps, for an engine that knows its time between graphs; [`Wrap::Joined`] where they are
/// equal.
pub fn better(cycle: &Cycle) -> (Wrap, Exposed) {
    let of = |wrap| (wrap, exposed(&Cycle { end: End::Graph(wrap), ..cycle.clone() }));
    let (joined, behind) = (of(Wrap::Joined), of(Wrap::Behind));
    if joined.1.step_us <= behind.1.step_us { joined } else { behind }
}

/// What a step of `layers` equal layers waits in all, in closed form: an even number of layers from 4 on, all sharded
/// over two buffers, and one pull at once. Two layers keep their buffers and wait for nothing. The arguments are a
/// layer, the pull of each, and [`Cycle::tail_us`] and [`Cycle::between_us`].
///
/// **Derivation.** Let a layer use its weights for `u` and go on for `r`, `L = u + r`, and a pull take `p`. Layers 0
/// and 1 are there, and `U(0) = 0`.
///
/// *The link is fast enough*, `p <= L`. The pull after layer `l`'s use begins at once, since the one before began `L`
/// earlier. It ends at `U(l) + u + p`, and its layer is due at `U(l) + 2L`, later by `L - p + r`. So no layer waits.
/// The last pull begins with `r` of the last layer left: a graph that joins it, with a tail of `t`, waits `p - r - t`,
/// if that is above 0.
///
/// *The link is too slow*, `p > L`. From the end of the first use on it never rests: pull `k` (of layer `k + 2`) ends
/// at `u + (k + 1) p`. So layer `l` begins at the later of `l L` and `u + (l - 1) p`, and all waits up to the last
/// layer, `n - 1`, are `u + (n - 2) p - (n - 1) L = (n - 2)(p - L) - r`, if that is above 0. The last pull ends at `u +
/// n p`, so that a graph that joins it takes `n (p - L) + L - r - t` longer than its works, or as long as its layers
/// waited.
///
/// Both cases in one, with `d = max(0, p - L)` and `w = max(0, (n - 2) d - r)`:
///
/// | end | a step waits |
/// |---|---|
/// | joined | `max(w, n d + min(p, L) - r - t)` |
/// | behind | `w + max(0, 2p - g)`: two pulls behind the graph, beside `g` between graphs |
/// | open | `max(w, n d - t - g)`: the link rests only while both buffers are full |
///
/// In a long step each layer waits `max(0, p - L)`, whatever part of it is rest: the rest decides only how far pulls
/// may run ahead. With a link for each buffer, pulls would not wait for each other, and a layer would wait half of
/// `max(0, p - (L + r))`.
pub fn uniform_us(layers: u32, layer: &Layer, pull_us: f64, (tail, between): (f64, f64), end: End) -> f64 {
    let (count, rest, whole) = (f64::from(layers), layer.rest_us, layer.us());
    let slow = f64::max(0.0, pull_us - whole);
    let inside = f64::max(0.0, (count - 2.0) * slow - rest);
    match end {
        End::Graph(Wrap::Joined) => inside.max(count * slow + pull_us.min(whole) - rest - tail),
        End::Graph(Wrap::Behind) => inside + f64::max(0.0, 2.0 * pull_us - between),
        End::Open => inside.max(count * slow - tail - between),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOINED: End = End::Graph(Wrap::Joined);
    const BEHIND: End = End::Graph(Wrap::Behind);

    fn cycle(layers: Vec<Layer>, end: End) -> Cycle {
        Cycle { layers, tail_us: 0.0, between_us: 0.0, at_once: 1, end }
    }

    fn equal(count: u32, uses_us: f64, rest_us: f64, us: f64) -> Vec<Layer> {
        let layer =
            |index: u32| Layer { uses_us, rest_us, pull: Some(Fill { buffer: (index % 2) as u8, us }) };
        (0..count).map(layer).collect()
    }

    fn near(found: f64, wanted: f64, what: &str) {
        assert!((found - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "{what}: {found} for {wanted}");
    }

    #[test]
    fn equal_layers_wait_as_the_closed_form_says() {
        let (mut waited, mut hidden) = (0, 0);
        for (count, (uses, rest)) in
            [4, 6, 60, 62].into_iter().flat_map(|n| [(3.0, 7.0), (8.0, 2.0), (10.0, 0.0)].map(|l| (n, l)))
        {
            for pull in [0.0, 1.0, 6.9, 9.9, 10.0, 10.5, 13.0, 29.0, 90.0] {
                for (tail, between) in [(0.0, 0.0), (5.0, 0.0), (0.0, 4.0), (3.0, 25.0), (400.0, 0.0)] {
                    for end in [End::Open, JOINED, BEHIND] {
                        let layers = equal(count, uses, rest, pull);
                        let wanted = uniform_us(count, &layers[0], pull, (tail, between), end);
                        let cycle = Cycle { tail_us: tail, between_us: between, ..cycle(layers, end) };
                        let found = exposed(&cycle);
                        let what = format!("{count} {uses}+{rest} {pull} {tail} {between} {end:?}");
                        near(found.us(), wanted, &what);
                        let works = f64::from(count) * (uses + rest) + tail + between;
                        near(found.step_us, works + wanted, &what);
                        if wanted > 0.0 { waited += 1 } else { hidden += 1 }
                    }
                }
            }
        }
        assert!(waited > 300 && hidden > 300, "{waited} {hidden}");
    }

    #[test]
    fn in_a_long_step_each_layer_waits_what_its_pull_is_longer() {
        for at_once in [1, 2] {
            let cycle = Cycle { at_once, ..cycle(equal(60, 8.0, 2.0, 14.0), End::Open) };
            let found = exposed(&cycle);
            near(found.us(), 60.0 * 4.0, "all");
            // One pull at once: every layer alike. Two share the link and end in turns.
            let late: Vec<f64> = found.layers_us[20..40].chunks(2).map(|two| two.iter().sum()).collect();
            assert!(late.iter().all(|two| (two - 8.0).abs() < 1e-6), "{late:?}");
        }
    }

    /// The published order of four layers: pulls 0 and 1 come first, a use follows its pull, and the pull of the layer
    /// after the next follows the use, beside this layer's experts and the next layer.
    #[test]
    fn pulls_follow_uses_as_published() {
        let found = exposed(&cycle(equal(4, 3.0, 7.0, 12.0), JOINED));
        // Uses end at 3, 13 (then 15 + 3 for layer 2), and each pull follows one, when the link is free.
        assert_eq!(found.layers_us, [0.0, 0.0, 0.0, 0.0]);
        let pulls: Vec<(f64, f64)> = found.pulls_us.iter().map(|pull| pull.unwrap()).collect();
        assert_eq!(pulls, [(3.0, 15.0), (15.0, 27.0), (27.0, 39.0), (39.0, 51.0)]);
        assert_eq!((found.wrap_us, found.step_us), (11.0, 51.0));
        // If the window were used until the experts end, pulls would begin later.
        let late = exposed(&cycle(equal(4, 10.0, 0.0, 12.0), JOINED));
        assert!(late.step_us > found.step_us, "{}", late.step_us);
    }

    #[test]
    fn resident_layers_and_buffers_of_one_layer_need_no_pull() {
        let mut layers = equal(5, 5.0, 5.0, 8.0);
        layers[0].pull = None;
        let found = exposed(&cycle(layers, JOINED));
        // Layers 1 and 3 have buffer 1, layers 2 and 4 buffer 0; nothing follows layer 0.
        assert!(found.pulls_us[0].is_none() && found.pulls_us[1..].iter().all(Option::is_some));
        // The last use ends at 45, so its pull at 53; the graph's works at 50.
        assert_eq!((found.us(), found.wrap_us), (3.0, 3.0));
        let mut third = equal(5, 5.0, 5.0, 8.0);
        third[4].pull = Some(Fill { buffer: 2, us: 8.0 });
        let found = exposed(&cycle(third, JOINED));
        assert_eq!((found.pulls_us[4], found.us()), (None, 0.0));
        // Two layers keep their buffers.
        assert_eq!(exposed(&cycle(equal(2, 5.0, 5.0, 800.0), BEHIND)).us(), 0.0);
    }

    #[test]
    fn a_graph_takes_the_wrap_that_waits_less() {
        // Little rest behind the last use, and much between graphs: the pulls go behind it.
        let behind = Cycle { between_us: 100.0, ..cycle(equal(6, 9.0, 1.0, 8.0), JOINED) };
        let (wrap, found) = better(&behind);
        assert_eq!((wrap, found.us()), (Wrap::Behind, 0.0));
        let joined = Cycle { tail_us: 100.0, between_us: 0.0, ..behind };
        let (wrap, found) = better(&joined);
        assert_eq!((wrap, found.us()), (Wrap::Joined, 0.0));
    }

    /// Another structure: time in small ticks, each buffer's content a layer's number, each pull's bytes moved a little
    /// at a time.
    fn by_ticks(cycle: &Cycle, steps: usize) -> Vec<f64> {
        const TICK: f64 = 0.01;
        let count = cycle.layers.len();
        let sharded: Vec<usize> = (0..count).filter(|l| cycle.layers[*l].pull.is_some()).collect();
        let buffer = |layer: usize| cycle.layers[layer].pull.unwrap().buffer as usize;
        let firsts = |b: usize| sharded.iter().copied().find(|l| buffer(*l) == b);
        let mut holds: Vec<Option<usize>> = (0..3).map(firsts).collect();
        let mut pulls: Vec<(usize, f64)> = Vec::new();
        let (mut ends, mut time, mut at) = (Vec::new(), 0.0, (0, 0, 0.0));
        while ends.len() < steps {
            let (layer, phase, left): (usize, usize, f64) = at;
            if left <= 0.0 {
                at = match phase {
                    // Waits for its content, then uses it, then goes on.
                    0 if cycle.layers[layer].pull.is_none() || holds[buffer(layer)] == Some(layer) => {
                        (layer, 1, cycle.layers[layer].uses_us)
                    }
                    0 => at,
                    1 => {
                        let turn: Vec<usize> =
                            (layer + 1..count).chain(0..=layer).filter(|l| sharded.contains(l)).collect();
                        if sharded.contains(&layer) {
                            let next = turn.into_iter().find(|l| buffer(*l) == buffer(layer)).unwrap();
                            if next != layer {
                                holds[buffer(layer)] = None;
                                pulls.push((next, cycle.layers[next].pull.unwrap().us));
                            }
                        }
                        (layer, 2, cycle.layers[layer].rest_us)
                    }
                    2 if layer + 1 < count => (layer + 1, 0, 0.0),
                    2 => (0, 3, cycle.tail_us + cycle.between_us),
                    _ => {
                        ends.push(time);
                        (0, 0, 0.0)
                    }
                };
                if at.1 != 0 || phase != 0 {
                    continue;
                }
            }
            time += TICK;
            at.2 -= TICK;
            let served = pulls.len().min(cycle.at_once as usize);
            pulls[..served].iter_mut().for_each(|pull| pull.1 -= TICK / served as f64);
            for (layer, _) in pulls.iter().filter(|pull| pull.1 <= 0.0) {
                holds[buffer(*layer)] = Some(*layer);
            }
            pulls.retain(|pull| pull.1 > 0.0);
        }
        ends
    }

    #[test]
    fn unequal_layers_wait_as_in_a_simulation_in_small_ticks() {
        let mut random = 7_u64;
        let mut draw = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 40) % most
        };
        for case in 0..40 {
            let count = 3 + draw(6) as usize;
            let resident = draw(count as u64) as usize;
            let layers: Vec<Layer> = (0..count)
                .map(|index| {
                    let pull = Fill { buffer: (index % 2) as u8, us: 1.0 + draw(200) as f64 / 10.0 };
                    let pull = Some(pull).filter(|_| count.is_multiple_of(2) || index != resident);
                    Layer { uses_us: 0.5 + draw(90) as f64 / 10.0, rest_us: draw(60) as f64 / 10.0, pull }
                })
                .collect();
            let (tail_us, between_us) = (draw(50) as f64 / 10.0, draw(50) as f64 / 10.0);
            let at_once = 1 + draw(2) as u32;
            let cycle = Cycle { layers, tail_us, between_us, at_once, end: End::Open };
            let ends = by_ticks(&cycle, SETTLED);
            let wanted = ends[SETTLED - 1] - ends[SETTLED - 2];
            let found = exposed(&cycle).step_us;
            assert!((found - wanted).abs() < 0.5, "{case}: {found} for {wanted} {cycle:?}");
        }
    }
}
