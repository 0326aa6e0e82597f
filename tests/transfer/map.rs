//! The naive way to move a request: every byte of both sides' pages by its name, filled and compared one by one.

use std::collections::HashMap;
use std::ops::Range;

use forebay::Result;
use forebay::transfer::{Component, Of, Place, Plan, Request, Run, Side, Split};

/// A page of a rank of the request's replica: stage, lane, chunk (of a side that divides tokens), page, plane.
pub type Key = (u32, u32, u32, u32, u32);
pub type Pages = HashMap<Key, Vec<u8>>;

/// What a byte of a row holds, by its whole name.
fn stamp(layer: u32, name: &str, head: usize, token: u32, byte: u64) -> u8 {
    let name = name.bytes().fold(7_u64, |sum, byte| sum * 31 + u64::from(byte));
    let words = [u64::from(layer), name, head as u64, u64::from(token), byte];
    let sum = words
        .iter()
        .fold(1_u64, |sum, word| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29));
    (sum >> 40) as u8
}

/// The heads of each lane.
fn heads(side: &Side, component: &Component) -> Vec<Vec<usize>> {
    let (all, width) = ((0..component.heads as usize).collect::<Vec<_>>(), side.width as usize);
    match side.split {
        Split::Tokens => vec![all; width],
        Split::Heads if all.len() >= width => all.chunks(all.len() / width).map(<[_]>::to_vec).collect(),
        Split::Heads => all.iter().flat_map(|head| vec![vec![*head]; width / all.len()]).collect(),
    }
}

/// For each lane and chunk the tokens in the order in which the rank stores them; none for another request's token.
fn tokens(side: &Side, request: &Request<'_>) -> Vec<(u32, u32, Vec<Option<u32>>)> {
    if side.split == Split::Heads {
        return (0..side.width).map(|lane| (lane, 0, (0..request.tokens).map(Some).collect())).collect();
    }
    let mut stored = Vec::new();
    for (index, chunk) in request.chunks.iter().enumerate() {
        let end = request.chunks.get(index + 1).map_or(request.tokens, |next| next.first);
        let mut batch: Vec<Option<u32>> = vec![None; chunk.at as usize];
        batch.extend((chunk.first..end).map(Some));
        batch.resize((chunk.slice * side.width) as usize, None);
        let slices = batch.chunks(chunk.slice as usize);
        stored.extend((0..).zip(slices).map(|(lane, slice)| (lane, index as u32, slice.to_vec())));
    }
    stored
}

/// Visits every byte of a replica's rows: its page, its offset there, its layer and token, and what it holds.
pub fn each(side: &Side, request: &Request<'_>, mut visit: impl FnMut(Key, u64, (u32, u32), u8)) {
    let stored = tokens(side, request);
    for (stage, layers) in (0..).zip(&side.stages) {
        for of in &layers.layers {
            for Place { component, plane, offset, token_stride, head_stride } in of.places.clone() {
                let component = &side.components[component as usize];
                let heads = heads(side, component);
                for (lane, chunk, tokens) in &stored {
                    for (page, tokens) in tokens.chunks(side.page_tokens as usize).enumerate() {
                        for (at, token) in
                            tokens.iter().enumerate().filter_map(|(at, token)| Some((at, (*token)?)))
                        {
                            for (own, head) in heads[*lane as usize].iter().enumerate() {
                                let first = offset + at as u64 * token_stride + own as u64 * head_stride;
                                for byte in 0..component.head_bytes {
                                    let key = (stage, *lane, *chunk, page as u32, plane);
                                    let holds = stamp(of.layer, &component.name, *head, token, byte);
                                    visit(key, first + byte, (of.layer, token), holds);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The runs of some tokens of a layer.
pub fn runs_of(plan: &Plan, request: &Request<'_>, what: (u32, Range<u32>), of: Of) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    plan.runs(request, what, of, |run| {
        runs.push(run);
        Ok(())
    })?;
    Ok(runs)
}

/// The runs of all layers for two ranges of tokens. Each rank of either side has its own of them.
fn all_runs(
    [source, target]: [&Side; 2],
    plan: &Plan,
    request: &Request<'_>,
    ranges: [Range<u32>; 2],
) -> Result<Vec<Run>> {
    let ranks = |side: &Side| {
        let stages = 0..side.stages.len() as u32;
        stages.flat_map(|stage| (0..side.width).map(move |lane| (stage, lane))).collect::<Vec<_>>()
    };
    let mut runs = Vec::new();
    for (layer, tokens) in plan.layers().flat_map(|layer| ranges.clone().map(|tokens| (layer, tokens))) {
        let all = runs_of(plan, request, (layer, tokens.clone()), Of::All)?;
        assert!(all.iter().all(|run| {
            run.layer == layer && tokens.start <= run.token && run.token + run.tokens <= tokens.end
        }));
        for (side, of) in [(source, Of::Sender as fn(u32, u32) -> Of), (target, Of::Receiver)] {
            let mut parts = Vec::new();
            for (stage, lane) in ranks(side) {
                let own = runs_of(plan, request, (layer, tokens.clone()), of(stage, lane))?;
                let end = |run: &Run| if of(0, 0) == Of::Sender(0, 0) { run.from } else { run.to };
                assert!(own.iter().all(|run| (end(run).stage, end(run).lane) == (stage, lane)));
                parts.extend(own);
            }
            assert!(parts.len() == all.len() && all.iter().all(|run| parts.contains(run)));
        }
        runs.extend(all);
    }
    Ok(runs)
}

fn page(pages: &mut Pages, side: &Side, key: Key) {
    pages
        .entry(key)
        .or_insert_with(|| vec![0xEE; side.stages[key.0 as usize].page_bytes[key.4 as usize] as usize]);
}

/// Copies a run, and counts the writes to each byte. Returns how many bytes it has.
fn carry(run: &Run, sent: &Pages, got: &mut Pages, writes: &mut Pages) -> std::result::Result<u64, String> {
    let from = (run.from.stage, run.from.lane, run.chunk, run.from.page, run.from.plane);
    let to = (run.to.stage, run.to.lane, 0, run.to.page, run.to.plane);
    let count = writes.entry(to).or_insert_with(|| vec![0; got[&to].len()]);
    let (held, place) = (sent.get(&from), got.get_mut(&to).unwrap());
    for piece in 0..u64::from(run.pieces) {
        for byte in 0..run.bytes {
            let first = run.from.offset + piece * run.from.stride + byte;
            let second = (run.to.offset + piece * run.to.stride + byte) as usize;
            let held = held.and_then(|page| page.get(first as usize));
            let held = held.ok_or_else(|| format!("{run:?} reads where nothing is"))?;
            *place.get_mut(second).ok_or_else(|| format!("{run:?} writes beyond its page"))? = *held;
            count[second] += 1;
        }
    }
    Ok(run.bytes * u64::from(run.pieces))
}

/// Sends a request's tokens from `from` on, in two parts, as `change` changes the list of runs. Returns what is wrong.
pub fn faults(
    sides: [&Side; 2],
    request: &Request<'_>,
    (from, cut): (u32, u32),
    change: impl FnOnce(&mut Vec<Run>),
) -> Result<Option<String>> {
    let [source, target] = sides;
    let plan = Plan::new(source, target)?;
    let mut sent = Pages::new();
    each(source, request, |key, at, _, holds| {
        page(&mut sent, source, key);
        sent.get_mut(&key).unwrap()[at as usize] = holds;
    });
    let mut runs = all_runs(sides, &plan, request, [from..cut, cut..request.tokens])?;
    change(&mut runs);
    let (mut got, mut writes) = (Pages::new(), Pages::new());
    let mut bytes = 0;
    for run in &runs {
        page(&mut got, target, (run.to.stage, run.to.lane, 0, run.to.page, run.to.plane));
        match carry(run, &sent, &mut got, &mut writes) {
            Ok(carried) => bytes += carried,
            Err(wrong) => return Ok(Some(wrong)),
        }
    }
    let mut wrong = None;
    each(target, request, |key, at, (_, token), holds| {
        let written = writes.get_mut(&key).map_or(0, |page| std::mem::take(&mut page[at as usize]));
        let found = got.get(&key).map_or(0xEE, |page| page[at as usize]);
        let wanted = u8::from(token >= from);
        if written != wanted || wanted > 0 && found != holds {
            wrong.get_or_insert(format!(
                "token {token}, {key:?} byte {at}: written {written} times, {found:#x}"
            ));
        }
    });
    if let Some((page, _)) = writes.iter().find(|(_, page)| page.iter().any(|count| *count > 0)) {
        wrong.get_or_insert(format!("a byte of {page:?} is no row's"));
    }
    if bytes != plan.bytes(request.tokens - from) {
        wrong.get_or_insert(format!("{bytes} bytes"));
    }
    Ok(wrong)
}
