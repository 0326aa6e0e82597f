//! The decode engine: what it does with its caches as rows, keys and ages come.

use std::time::Duration;

use forebay::transfer::{Fence, receiver};
use forebay::{BringUp, Kind, Layer, Sequence, Tokens, WarmUp};

use crate::decode::{Stepping, Use, Warmth};
use crate::engine::selections;
use crate::model::{K, id};
use crate::oracle::Oracle;
use crate::world::{Happens, Way, World, Wrong};

/// Whether a call waits for room.
fn is_full(error: &forebay::Error) -> bool {
    matches!(error.kind(), Kind::Exhausted | Kind::Busy)
}

impl World {
    /// Gives a request pages at a rank, and tells the prefill ranks.
    pub fn grant(&mut self, index: usize, rank: usize) {
        let attempt = &self.attempts[index];
        if attempt.given_up || attempt.over || attempt.fences[rank].is_some() {
            return;
        }
        // Some engines look only seldom at what has ended.
        let (looks, of) = (self.draw.often(500), &mut self.decodes[rank]);
        match looks {
            true => of.settle(),
            false => drop(of.cache.reap(of.streams[0]).unwrap()),
        }
        if !self.grants(index, rank) {
            self.waits(index, Duration::from_secs(1));
            self.future.at(self.now + Duration::from_millis(20), Happens::Grant(index, rank));
        }
    }

    /// A request waits for room. It is given up when that takes too long: others may wait for what it has.
    fn waits(&mut self, index: usize, most: Duration) {
        let attempt = &mut self.attempts[index];
        if self.now - attempt.began > most && !attempt.given_up {
            attempt.given_up = true;
            self.met.waited += 1;
        }
    }

    /// A sequence with pages for a request, and the number of its first tokens that are there.
    fn pages_for(&mut self, index: usize, rank: usize) -> Option<(Sequence, u32)> {
        let (attempt, cache) = (&self.attempts[index], &mut self.decodes[rank].cache);
        let taken = if attempt.base > 0 {
            let handle = self.talks[attempt.talk].handles[rank];
            cache.extend(handle, attempt.open.prompt, attempt.open.promised).map(|()| (handle, attempt.base))
        } else {
            let ids: Vec<u32> = (0..).zip(&*attempt.tags).map(|(at, tag)| id(*tag, at)).collect();
            match self.wrong {
                Wrong::Closes => cache.open_shared(&attempt.open, b"", Tokens::new(&ids)),
                _ => cache.arrive_shared(&attempt.open, b"", Tokens::new(&ids)),
            }
        };
        match taken {
            Ok(taken) => Some(taken),
            Err(error) => {
                assert!(is_full(&error), "{error}");
                self.met.no_room += 1;
                None
            }
        }
    }

    /// Whether a request got pages, and all its prefill ranks are connected.
    fn grants(&mut self, index: usize, rank: usize) -> bool {
        let Some((handle, first)) = self.pages_for(index, rank) else { return false };
        let attempt = &self.attempts[index];
        let (base, request, tokens) = (attempt.base, attempt.request, attempt.open.prompt);
        let (page, layers, groups) =
            (self.model.page, self.model.layers() as usize, self.model.groups.len() as u8);
        let of = &mut self.decodes[rank];
        let (pages, count) = (of.pages(handle), tokens.div_ceil(page) as usize);
        // Pages that it shares have no writers: see `listed`.
        let leading = (first / page) as usize;
        let landing = match self.way {
            Way::Shared => Some(Vec::new()),
            Way::Landing => of.landing.take(count - leading),
            Way::Pages => Some(pages.iter().take(count).skip(leading).map(|(host, _)| *host).collect()),
        };
        let fence = Fence { request, generation: of.generation };
        if !landing.as_ref().is_some_and(|landing| self.tells(rank, fence, (tokens, first), landing)) {
            let of = &mut self.decodes[rank];
            let own = landing.iter().flatten().filter(|_| self.way == Way::Landing);
            own.for_each(|page| of.landing.give_back(*page));
            // No writer was told.
            if base == 0 {
                of.cache.close(handle, of.streams[1]).unwrap();
            }
            return false;
        }
        let mut own = Use {
            attempt: index,
            handle,
            pages,
            tokens,
            first,
            landing: landing.unwrap_or_default(),
            reached: false,
            declared: vec![false; layers],
            placed: vec![false; layers],
            warmth: vec![Warmth::Cold; layers],
            warm: vec![None; usize::from(groups)],
            early: false,
            whole: false,
            joined: false,
            ended: false,
            withheld: None,
            drained: false,
        };
        own.reached = !own.landing.is_empty();
        let of = &mut self.decodes[rank];
        of.generation += 1;
        of.uses.insert(fence, own);
        self.attempts[index].fences[rank] = Some(fence);
        self.met.shared += u32::from(base == 0 && first > 0);
        self.met.later_turns += u32::from(base > 0);
        self.plan(rank, fence, base > 0);
        true
    }

    /// Tells the prefill ranks that a use of pages is granted. Not before all are connected.
    fn tells(&mut self, rank: usize, fence: Fence, of: (u32, u32), landing: &[u32]) -> bool {
        let short = self.fault(self.faults.abort / 2);
        let deadline = self.now + if short { self.draw.millis(200) } else { Duration::from_secs(3) };
        let payloads: Vec<u8> = (0..self.model.groups.len() as u8).collect();
        let wanted = receiver::Wanted {
            fence,
            tokens: of.0,
            first: of.1,
            sender: (0, 0),
            payloads: &payloads,
            landing,
            deadline: Some(deadline),
        };
        self.decodes[rank].machine.grant(&wanted).is_ok()
    }

    /// What the engine tries while a request arrives: an early join, and a join that may be too early.
    fn plan(&mut self, rank: usize, fence: Fence, later: bool) {
        // Without arrivals rows are declared when all are there: no layer is warmed up before.
        if !later && self.wrong != Wrong::Closes && self.draw.often(500) {
            self.after(120, Happens::JoinEarly(rank, fence));
        }
        if self.draw.often(300) {
            self.after(60, Happens::Join(rank, fence));
        }
        if self.wrong == Wrong::DeclaresRows {
            (0..self.model.layers()).for_each(|layer| self.after(60, Happens::Declare(rank, fence, layer)));
        }
    }

    pub fn received(&mut self, rank: usize, event: receiver::Event) {
        match event {
            receiver::Event::Met { .. } => {}
            receiver::Event::Ready { fence, layer } => self.after(10, Happens::Declare(rank, fence, layer)),
            receiver::Event::Payload { fence, kind, bytes } => self.heard(rank, fence, (kind, &bytes)),
            receiver::Event::Whole { fence } => {
                self.met.whole += 1;
                self.decodes[rank].uses.get_mut(&fence).unwrap().whole = true;
                self.advance(rank, fence);
                // It may lack keys that are not placed.
                if self.draw.often(400) {
                    self.after(8, Happens::Join(rank, fence));
                }
                if self.fault(self.faults.cut_whole) {
                    let own = (0..).zip(&self.links).filter(|(_, link)| link.decode == rank);
                    let own: Vec<u32> = own.map(|(number, _)| number).collect();
                    own.into_iter().for_each(|link| self.cut(link));
                }
            }
            receiver::Event::Failed { fence, .. } => {
                let attempt = self.decodes[rank].uses[&fence].attempt;
                self.attempts[attempt].given_up = true;
            }
            receiver::Event::Drained { fence } => {
                self.decodes[rank].uses.get_mut(&fence).unwrap().drained = true;
            }
            receiver::Event::Free { landing } => self.freed(rank, &landing),
        }
    }

    /// No writer reaches these landing pages any more. Pages of the cache among them are released, if they wait for
    /// that.
    fn freed(&mut self, rank: usize, landing: &[u32]) {
        let way = self.way;
        let of = &mut self.decodes[rank];
        for (fence, own) in of.uses.iter_mut().filter(|(_, own)| own.reached) {
            if own.landing.iter().all(|page| landing.contains(page)) {
                own.reached = false;
                let mut reached = of.machine.quarantine().outstanding();
                if self.wrong == Wrong::Nothing && reached.any(|(other, ..)| other == *fence) {
                    self.broken = Some(format!("{fence:?} is free while writers reach its pages"));
                }
                if let Some(withheld) = own.withheld.take() {
                    of.cache.release(withheld).unwrap();
                }
            }
        }
        landing.iter().filter(|_| way == Way::Landing).for_each(|page| of.landing.give_back(*page));
    }

    /// What a group's warm-up selects has come.
    fn heard(&mut self, rank: usize, fence: Fence, (kind, bytes): (u8, &[u8])) {
        let attempt = self.decodes[rank].uses[&fence].attempt;
        self.met.by_ages += u32::from(bytes[0] == 1);
        self.met.by_selections += u32::from(bytes[0] == 0);
        let own = match self.wrong {
            Wrong::TakesOtherAges => {
                let other = &self.attempts[attempt.saturating_sub(1)];
                (other.steps, other.selections[usize::from(kind)].clone())
            }
            _ => selections(bytes),
        };
        self.decodes[rank].uses.get_mut(&fence).unwrap().warm[usize::from(kind)] = Some(own);
        self.advance(rank, fence);
    }

    /// All rows of a layer are there: they are declared. Its keys are placed soon.
    pub fn declare(&mut self, rank: usize, fence: Fence, layer: u32) {
        let of = &mut self.decodes[rank];
        let Some(own) = of.uses.get_mut(&fence).filter(|of| !of.ended && !of.declared[layer as usize]) else {
            return;
        };
        own.declared[layer as usize] = true;
        let (handle, count, attempt) = (own.handle, own.tokens - own.first, own.attempt);
        let wrong = of.wrong_rows(&of.uses[&fence].pages, layer, &self.attempts[attempt].tags);
        if self.wrong != Wrong::Closes {
            of.cache.append_layer_in_place(handle, Layer(layer), count).unwrap();
        }
        if let Some(wrong) = wrong.filter(|_| self.wrong != Wrong::DeclaresRows) {
            self.breaks(format!("{fence:?} is ready: {wrong}"));
        }
        match self.model.keyed_group(layer) {
            Some(_) => self.after(10, Happens::Place(rank, fence, layer)),
            None => self.place(rank, fence, layer),
        }
    }

    /// The keys of a layer whose rows are declared go to device pages, if it has any.
    pub fn place(&mut self, rank: usize, fence: Fence, layer: u32) {
        let stream = self.draw.below(2) as usize;
        let of = &mut self.decodes[rank];
        let Some(own) = of.uses.get_mut(&fence).filter(|of| !of.ended) else { return };
        own.placed[layer as usize] = true;
        let (handle, count, stream) = (own.handle, own.tokens - own.first, of.streams[stream]);
        match (self.model.keyed_group(layer), self.wrong) {
            (None, _) => {}
            (_, Wrong::DeclaresKeys) => of.cache.index_keys_in_place(handle, Layer(layer), count).unwrap(),
            (Some(group), Wrong::Closes) => of.copy_keys(fence, group, stream),
            (Some(group), _) => of.place_keys(fence, group, stream).unwrap(),
        }
        self.advance(rank, fence);
    }

    pub fn join_early(&mut self, rank: usize, fence: Fence) {
        let stream = self.draw.below(2) as usize;
        let of = &mut self.decodes[rank];
        let Some(own) = of.uses.get_mut(&fence).filter(|of| !of.ended && !of.joined && !of.early) else {
            return;
        };
        match of.cache.join_early(own.handle, of.streams[stream]) {
            Ok(_ticket) => {
                own.early = true;
                self.met.early += 1;
                self.advance(rank, fence);
            }
            Err(error) => assert!(is_full(&error), "{error}"),
        }
    }

    /// Plans what can be done with a request next.
    fn advance(&mut self, rank: usize, fence: Fence) {
        let Some(own) = self.decodes[rank].uses.get_mut(&fence).filter(|of| !of.ended && !of.joined) else {
            return;
        };
        if !own.early {
            let whole = own.whole || self.wrong == Wrong::DeclaresRows;
            if whole && own.is_complete() && own.warm.iter().all(Option::is_some) {
                self.after(20, Happens::Join(rank, fence));
            }
            return;
        }
        let mut next = Vec::new();
        for layer in 0..self.model.layers() {
            let group = self.model.group_of(layer);
            let first = self.model.groups[group].0;
            let selected = match layer == first {
                true => own.warm[group].is_some(),
                false => own.warmth[first as usize] == Warmth::Warm,
            };
            let warmth = &mut own.warmth[layer as usize];
            if selected && own.placed[layer as usize] && *warmth == Warmth::Cold {
                *warmth = Warmth::Planned;
                next.push(layer);
            }
        }
        next.into_iter().for_each(|layer| self.after(20, Happens::Warm(rank, fence, layer)));
    }

    pub fn warm(&mut self, rank: usize, fence: Fence, layer: u32) {
        let stream = self.draw.below(2) as usize;
        let of = &mut self.decodes[rank];
        let Some(own) = of.uses.get(&fence).filter(|of| !of.ended) else { return };
        let (group, stream) = (self.model.group_of(layer), of.streams[stream]);
        let warm = match self.model.groups[group].0 == layer {
            true => of.warm_up(own, group..group + 1),
            false => WarmUp::default(),
        };
        let _ticket = of.cache.warm_layer(own.handle, Layer(layer), warm, stream).unwrap();
        let own = of.uses.get_mut(&fence).unwrap();
        own.warmth[layer as usize] = Warmth::Warm;
        self.met.warmed_before_whole += u32::from(!own.whole);
        own.joined = own.warmth.iter().all(|warmth| *warmth == Warmth::Warm);
        assert_eq!(of.cache.is_running(own.handle).unwrap(), own.joined);
        self.advance(rank, fence);
    }

    /// Joins a request that is whole. One that is not is refused.
    pub fn join(&mut self, rank: usize, fence: Fence) {
        let stream = self.draw.below(2) as usize;
        let of = &mut self.decodes[rank];
        let Some(own) = of.uses.get(&fence).filter(|of| !of.ended && !of.joined && !of.early) else { return };
        let (index, handle, stream) = (own.attempt, own.handle, of.streams[stream]);
        let told = own.warm.iter().all(Option::is_some);
        let complete = own.is_complete();
        let waits = !complete && own.first < own.tokens;
        if !waits && (!told || !complete) {
            return;
        }
        if self.wrong == Wrong::Closes && !waits && of.cache.length(handle).unwrap().filled < own.tokens {
            of.cache.append_in_place(handle, own.tokens - own.first).unwrap();
        }
        let groups = if told { 0..self.model.groups.len() } else { 0..0 };
        let warm = if groups.is_empty() { WarmUp::default() } else { of.warm_up(own, groups) };
        let joined = match self.attempts[index].base > 0 {
            true => of.cache.resume(handle, stream, 0),
            false => of.cache.join(handle, stream, warm),
        };
        match joined {
            Ok(_ticket) => {
                assert!(!waits, "a join of what is not complete");
                of.uses.get_mut(&fence).unwrap().joined = true;
            }
            Err(error) if waits => {
                assert_eq!(error.kind(), Kind::InvalidState, "{error}");
                self.met.joins_refused += 1;
                self.met.without_keys +=
                    u32::from(error.place() == "the index keys of a layer are incomplete");
            }
            Err(error) => {
                assert!(is_full(&error), "{error}");
                of.settle();
                self.waits(index, Duration::from_secs(3));
                self.future.at(self.now + Duration::from_millis(20), Happens::Join(rank, fence));
            }
        }
    }

    /// Looks at all requests: which run now, which are given up, and which uses of pages are over.
    pub fn route(&mut self) {
        for index in 0..self.attempts.len() {
            let attempt = &self.attempts[index];
            if attempt.over {
                continue;
            }
            if attempt.given_up {
                self.give_up(index);
            } else if !attempt.running && self.may_run(index) {
                self.start(index);
            }
        }
        for rank in &mut self.decodes {
            rank.uses.retain(|_, of| !of.ended || !of.drained || of.reached);
        }
    }

    fn uses(&self, index: usize) -> Vec<(usize, Fence)> {
        let fences = self.attempts[index].fences.iter().enumerate();
        fences.filter_map(|(rank, fence)| Some((rank, (*fence)?))).collect()
    }

    /// Whether a request has joined on all ranks. Rows in pages that a writer still reaches may change after the check:
    /// a request runs when its writers are done.
    fn may_run(&self, index: usize) -> bool {
        let reached = self.way == Way::Pages && self.wrong != Wrong::RunsReached;
        let uses = self.uses(index);
        let runs = |(rank, fence): &(usize, Fence)| {
            let of = &self.decodes[*rank].uses[fence];
            of.joined && !(reached && of.reached)
        };
        uses.len() == self.decodes.len() && uses.iter().all(runs)
    }

    /// A request begins to decode.
    fn start(&mut self, index: usize) {
        let uses = self.uses(index);
        let attempt = &mut self.attempts[index];
        attempt.running = true;
        attempt.read = attempt.tags.to_vec();
        let mut digests = Vec::new();
        for (rank, fence) in &uses {
            let of = &mut self.decodes[*rank];
            of.settle();
            of.cache.validate().unwrap();
            let own = &of.uses[fence];
            self.met.early_digests += u32::from(own.early);
            digests.push(of.cache.digest(own.handle).unwrap());
            if self.way != Way::Pages || !own.reached {
                let published = of.cache.length(own.handle).unwrap().published;
                let ids = (0..).zip(&*attempt.tags).map(|(at, tag)| id(*tag, at)).skip(published as usize);
                let ids: Vec<u32> = ids.collect();
                of.cache.publish(own.handle, published, Tokens::new(&ids)).unwrap();
            }
        }
        let (rank, fence) = uses[0];
        let own = &self.decodes[rank].uses[&fence];
        if attempt.base == 0 {
            // As if it had joined whole.
            let steps = own.warm[0].as_ref().unwrap().0;
            let words: Vec<i32> =
                own.warm.iter().flatten().flat_map(|(_, words)| words.iter().copied()).collect();
            digests.push(self.twin.digest(&attempt.open, steps, &words));
        }
        let budgets = self.decodes[rank].cache.budgets(own.handle).unwrap();
        let (talk, prompt) = (&mut self.talks[attempt.talk], attempt.open.prompt);
        let noted = std::mem::take(&mut talk.oracles);
        for (group, budget) in budgets.iter().enumerate() {
            let mut oracle = Oracle::new(*budget as usize, prompt);
            if attempt.open.bring_up == BringUp::Whole {
                oracle.bring_up();
            }
            match noted.get(group).filter(|_| attempt.base > 0) {
                // What was noted when it was parked: the newest rows.
                Some(before) => {
                    let newest = before.order.len().saturating_sub(K as usize);
                    drop(oracle.select(before.order[newest..].iter().copied()));
                }
                None => attempt.selections[group].chunks_exact(K as usize).for_each(|step| {
                    drop(oracle.select(step.iter().filter_map(|position| u32::try_from(*position).ok())));
                }),
            }
            talk.oracles.push(oracle);
        }
        if !self.model.shares && digests.iter().any(|digest| *digest != digests[0]) {
            let early: Vec<bool> =
                uses.iter().map(|(rank, fence)| self.decodes[*rank].uses[fence].early).collect();
            self.breaks(format!("digests differ: {digests:?}, early {early:?}"));
        }
        self.after(10, Happens::Step(index));
    }

    /// One step of a request on all its ranks.
    pub fn step(&mut self, index: usize) {
        let attempt = &self.attempts[index];
        if attempt.over || attempt.given_up {
            return;
        }
        let (prompt, request) = (attempt.open.prompt, attempt.request);
        let length = attempt.read.len() as u32;
        let accepted = u32::from(length > prompt);
        let picks: Vec<Vec<u32>> = (0..self.model.groups.len()).map(|_| self.positions(K, length)).collect();
        let talk = &mut self.talks[self.attempts[index].talk];
        let expected: Vec<(u32, u32)> = talk
            .oracles
            .iter_mut()
            .zip(&picks)
            .map(|(oracle, picks)| {
                oracle.commit(accepted, 1);
                let step = oracle.select(picks.iter().copied());
                (step.hits.len() as u32, step.misses.len() as u32)
            })
            .collect();
        self.attempts[index].read.push(request);
        for (rank, fence) in self.uses(index) {
            let (of, tags) = (&mut self.decodes[rank], &self.attempts[index].read);
            let handle = of.uses[&fence].handle;
            match of.step(handle, &Stepping { tags, length, accepted, picks: &picks }) {
                Ok(counts) => {
                    let wanted = |layer| expected[self.model.group_of(layer)];
                    let differ = (0..).zip(&counts).any(|(layer, count)| *count != wanted(layer));
                    if differ && !self.model.shares {
                        self.breaks(format!("{fence:?}: hits and misses {counts:?}, not {expected:?}"));
                    }
                }
                Err(wrong) => self.breaks(format!("{fence:?} decodes: {wrong}")),
            }
        }
        self.met.steps += 1;
        self.attempts[index].decodes -= 1;
        let ends = self.attempts[index].decodes == 0;
        self.after(10, if ends { Happens::Finish(index) } else { Happens::Step(index) });
    }

    /// A turn ends: the sequence is parked for the next one, or ends too.
    pub fn finish(&mut self, index: usize) {
        if self.attempts[index].over || self.attempts[index].given_up {
            return;
        }
        let uses = self.uses(index);
        for (rank, fence) in &uses {
            let of = &self.decodes[*rank];
            of.sync();
            if let Some(wrong) = of.wrong(of.uses[fence].handle, &self.attempts[index].read) {
                self.breaks(format!("{fence:?} ends: {wrong}"));
            }
        }
        self.attempts[index].over = true;
        let talk = self.attempts[index].talk;
        self.talks[talk].tags = std::mem::take(&mut self.attempts[index].read);
        self.talks[talk].turn += 1;
        let last = self.talks[talk].turn == self.talks[talk].turns.len();
        let mut parks = !last && uses.iter().all(|(rank, fence)| !self.decodes[*rank].uses[fence].reached);
        let mut handles = Vec::new();
        for (rank, fence) in &uses {
            let of = &mut self.decodes[*rank];
            let handle = of.uses[fence].handle;
            if parks && let Err(error) = of.cache.park(handle, 1, of.streams[0]) {
                assert!(is_full(&error), "{error}");
                parks = false;
            }
            handles.push(handle);
        }
        for (rank, fence) in uses {
            match parks {
                true => self.decodes[rank].uses.get_mut(&fence).unwrap().ended = true,
                false => self.end(rank, fence),
            }
        }
        self.talks[talk].handles = if parks { handles } else { Vec::new() };
        self.talks[talk].over = last;
        if !last {
            self.attempt(talk);
        }
    }

    /// A try is given up on both sides, and the turn is tried again.
    fn give_up(&mut self, index: usize) {
        self.met.failed += 1;
        let (base, request, talk) =
            (self.attempts[index].base, self.attempts[index].request, self.attempts[index].talk);
        self.attempts[index].over = true;
        for rank in &mut self.prefills {
            let _ = rank.machine.abort(request);
        }
        let uses = self.uses(index);
        for (rank, fence) in &uses {
            let _ = self.decodes[*rank].machine.abort(*fence);
        }
        let stays = |(rank, fence): &(usize, Fence)| {
            let of = &self.decodes[*rank].uses[fence];
            !of.joined && (self.way != Way::Pages || !of.reached)
        };
        // A parked sequence may go back to the tokens that it had, if no one writes behind them any more.
        let back = base > 0 && uses.iter().all(stays) && self.draw.often(600);
        for (rank, fence) in &uses {
            match back {
                true => self.decodes[*rank].uses.get_mut(fence).unwrap().ended = true,
                false => self.end(*rank, *fence),
            }
        }
        for (rank, handle) in self.talks[talk].handles.clone().into_iter().enumerate() {
            let (of, used) = (&mut self.decodes[rank], uses.iter().any(|(other, _)| *other == rank));
            if back {
                let _ticket = of.cache.truncate(handle, base, of.streams[0]).unwrap();
                self.met.shortened += 1;
            } else if !used {
                of.cache.close(handle, of.streams[0]).unwrap();
            }
        }
        if !back {
            self.talks[talk].handles.clear();
        }
        self.attempt(talk);
    }

    /// A sequence ends. Pages that a writer from afar still reaches are withheld until it does not.
    fn end(&mut self, rank: usize, fence: Fence) {
        let (aborts, stream) = (self.draw.often(500), self.draw.below(2) as usize);
        let of = &mut self.decodes[rank];
        let (stream, own) = (of.streams[stream], of.uses.get_mut(&fence).unwrap());
        own.ended = true;
        let reached = own.reached && self.way == Way::Pages;
        if self.wrong == Wrong::Closes || !reached && !aborts {
            return of.cache.close(own.handle, stream).unwrap();
        }
        let withheld = of.cache.abort(own.handle, stream).unwrap();
        if reached && self.wrong != Wrong::ReleasesEarly {
            own.withheld = Some(withheld);
            self.met.withheld += 1;
        } else {
            of.cache.release(withheld).unwrap();
        }
    }
}
