//! Requests, and the prefill engine: what it computes when, and what it tells besides rows.

use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::sender::Computed;
use forebay::transfer::{Chunk, Split};
use forebay::{Budget, Kind, Open, ages};

use crate::model::{DECODED, K, Tag, WARM};
use crate::prefill::Origin;
use crate::world::{Attempt, Happens, World};

/// What a decode rank warms a group up by, in bytes: ages where they say enough, else selections.
fn payload(steps: u32, selections: &[i32], tokens: u32, budget: u32) -> Vec<u8> {
    let enough = ages::suffice(selections, K as usize, tokens, budget).unwrap();
    let mut bytes = vec![u8::from(enough), steps as u8];
    if enough {
        let mut all = vec![0; tokens as usize];
        ages::from_selections(selections, K as usize, &mut all).unwrap();
        bytes.extend(all);
    } else {
        bytes.extend(selections.iter().flat_map(|position| position.to_le_bytes()));
    }
    bytes
}

/// The selections of such bytes.
pub fn selections(bytes: &[u8]) -> (u32, Vec<i32>) {
    let (steps, rest) = (u32::from(bytes[1]), &bytes[2..]);
    let mut words = vec![-1; (steps * K) as usize];
    match bytes[0] {
        1 => ages::to_selections(rest, K as usize, &mut words).unwrap(),
        _ => words
            .iter_mut()
            .zip(rest.chunks_exact(4))
            .for_each(|(word, bytes)| *word = i32::from_le_bytes(bytes.try_into().unwrap())),
    }
    (steps, words)
}

impl World {
    /// What an engine does.
    pub fn engine(&mut self, happens: Happens) {
        match happens {
            Happens::Begin(index) => self.begin(index),
            Happens::Compute(index) => self.compute(index),
            Happens::Abort(index) => self.attempts[index].given_up |= !self.attempts[index].over,
            Happens::Grant(index, rank) => self.grant(index, rank),
            Happens::Declare(rank, fence, layer) => self.declare(rank, fence, layer),
            Happens::Place(rank, fence, layer) => self.place(rank, fence, layer),
            Happens::JoinEarly(rank, fence) => self.join_early(rank, fence),
            Happens::Warm(rank, fence, layer) => self.warm(rank, fence, layer),
            Happens::Join(rank, fence) => self.join(rank, fence),
            Happens::Step(index) => self.step(index),
            Happens::Finish(index) => self.finish(index),
            _ => {}
        }
    }

    /// Positions below `length`, each once, in any order.
    pub fn positions(&mut self, most: u32, length: u32) -> Vec<u32> {
        let count = self.draw.below(most + 1);
        // Some near the end, as attention selects them.
        let near = self.draw.often(300);
        let mut all = Vec::new();
        for _ in 0..count {
            let position = length - 1 - self.draw.below(if near { length.min(12) } else { length });
            all.extend((!all.contains(&position)).then_some(position));
        }
        all
    }

    /// Plans one more try at a conversation's turn. Each has a number of its own, which its rows say.
    pub fn attempt(&mut self, talk: usize) {
        let of = &self.talks[talk];
        let request = self.attempts.len() as u64 + 1;
        let tokens = of.tags.len() as u32 + of.turns[of.turn];
        let (base, family) = (if of.handles.is_empty() { 0 } else { of.tags.len() as u32 }, of.family);
        let tag = |position: u32| match family {
            Some((name, own)) if position < own => name,
            _ => request,
        };
        let kept = of.tags.iter().copied().take(base as usize);
        let tags: Vec<Tag> = kept.chain((base..tokens).map(tag)).collect();
        let from = if self.draw.often(500) { base } else { 0 };
        let mut ends: Vec<u32> =
            (0..self.draw.below(3)).map(|_| self.draw.of(from + 1, tokens)).chain([tokens]).collect();
        ends.sort_unstable();
        ends.dedup();
        let width = self.sides[0].width;
        let mut chunks = Vec::new();
        for (index, end) in ends.iter().enumerate() {
            let first = if index == 0 { from } else { ends[index - 1] };
            let at = self.draw.below(9);
            let slice = (at + (end - first) + self.draw.below(4)).div_ceil(width);
            chunks.push(Chunk { first, at, slice });
        }
        let layers = self.sides[0].stages[0].layers.len() as u32;
        let order = (0..ends.len()).flat_map(|chunk| (0..layers).map(move |layer| (chunk, layer))).collect();
        let steps = self.draw.of(1, WARM);
        let selections = (0..self.model.groups.len()).map(|_| {
            let step = |world: &mut World| {
                let own = world.positions(K, tokens).into_iter().map(|position| position as i32);
                own.chain(std::iter::repeat(-1)).take(K as usize).collect::<Vec<i32>>()
            };
            (0..steps).flat_map(|_| step(self)).collect()
        });
        let selections = selections.collect();
        let open = Open {
            prompt: tokens,
            promised: DECODED + 1,
            budget: Budget::Slots(self.talks[talk].budget),
            bring_up: self.talks[talk].bring_up,
        };
        self.attempts.push(Attempt {
            request,
            talk,
            open,
            base,
            tags: Rc::new(tags),
            steps,
            selections,
            ends,
            chunks,
            order,
            next: 0,
            began: Duration::ZERO,
            fences: vec![None; self.decodes.len()],
            running: false,
            decodes: self.draw.of(1, DECODED),
            read: Vec::new(),
            given_up: false,
            over: false,
        });
        self.after(150, Happens::Begin(self.attempts.len() - 1));
    }

    fn begin(&mut self, index: usize) {
        let deadline = Some(self.now + Duration::from_secs(4));
        let attempt = &mut self.attempts[index];
        attempt.began = self.now;
        for rank in &mut self.prefills {
            let begun = rank.machine.begin(attempt.request, attempt.open.prompt, deadline);
            attempt.given_up |= begun.is_err();
        }
        (0..self.decodes.len()).for_each(|rank| self.after(60, Happens::Grant(index, rank)));
        self.after(60, Happens::Compute(index));
        // The router looks again when the request takes too long.
        self.future.at(self.now + Duration::from_millis(3001), Happens::Look);
        if self.fault(self.faults.abort) {
            self.after(300, Happens::Abort(index));
        }
    }

    /// Prefill computes one layer of a chunk on all its ranks.
    fn compute(&mut self, index: usize) {
        let attempt = &self.attempts[index];
        if attempt.given_up || attempt.over {
            return;
        }
        let (request, (chunk, layer)) = (attempt.request, attempt.order[attempt.next]);
        let (tokens, last) =
            (attempt.chunks[chunk].first..attempt.ends[chunk], chunk + 1 == attempt.ends.len());
        let divided = Some(attempt.chunks[chunk]).filter(|_| self.sides[0].split == Split::Tokens);
        let group = self.model.groups.iter().position(|(first, _)| last && *first == layer);
        let told = group.map(|group| {
            let budget = self.talks[attempt.talk].budget;
            (group as u8, payload(attempt.steps, &attempt.selections[group], attempt.open.prompt, budget))
        });
        let end = attempt.next + 1 == attempt.order.len();
        for rank in &mut self.prefills {
            rank.origins.push(Origin {
                tags: Rc::clone(&attempt.tags),
                layer,
                tokens: tokens.clone(),
                chunk: divided,
                released: false,
            });
            let origin = rank.origins.len() as u64 - 1;
            let part = Computed { request, layer, tokens: tokens.clone(), chunk: divided, origin };
            // A request that failed meanwhile is over here: what was computed for it is of no use.
            let mut goes_on = rank.machine.computed(&[part]);
            rank.origins[origin as usize].released = goes_on.is_err();
            if let Some((kind, bytes)) = &told {
                goes_on = goes_on.and_then(|()| rank.machine.payload(request, *kind, bytes));
            }
            if end {
                goes_on = goes_on.and_then(|()| rank.machine.finish(request));
            }
            if let Err(error) = goes_on {
                assert_eq!(error.kind(), Kind::Closed, "{error}");
            }
        }
        self.attempts[index].next += 1;
        if !end {
            self.after(12, Happens::Compute(index));
        }
    }
}
