//! Prompts that grow, and sequences that give up their lane: chunks that are admitted one by one, prompts that are cut
//! before they join, sequences that park and resume.
//!
//! For the model a parked sequence is a prompt whose rows are all of it. It remembers for each group the end of the
//! oracle's list, which is what a resume begins with.

use super::model::{State, blocks, budgets, reach};
use super::run::World;
use super::share::By;
use forebay::Kind;

impl World {
    /// The lane that a sequence was given.
    pub fn learn_lane(&mut self, seq: usize) {
        let s = &mut self.seqs[seq];
        let rows = 0..self.config.query_rows;
        s.landing = rows.map(|row| self.cache.landing_slot(s.handle, row).unwrap()).collect();
        let base = *self.landing_base.get_or_insert(s.landing[0]);
        s.lane = (s.landing[0] - base) / self.config.query_rows;
    }

    /// Lanes of no sequence.
    pub fn free_lanes(&self) -> u32 {
        let taken = |state| !matches!(state, State::Gone | State::Parked);
        self.config.lanes - self.seqs.iter().filter(|s| taken(s.state)).count() as u32
    }

    /// Bytes of the largest row.
    pub fn largest_row(&self) -> u64 {
        (0..self.layers()).map(|layer| u64::from(self.format(layer).row_bytes())).max().unwrap()
    }

    /// The pages of a sequence from `first` on that others use.
    pub fn shared_pages(&mut self, seq: usize, first: usize) -> Vec<usize> {
        let mut pages: Vec<usize> = (first..self.seqs[seq].pages.len()).collect();
        pages.retain(|page| {
            let alone = u32::from(self.held_alone(seq, *page));
            self.pages.owners(self.seqs[seq].pages[*page]) - alone > 1
        });
        pages
    }

    /// A sequence that a wish selects: most often one in one of `states`.
    fn pick_in(&self, wish: u8, states: &[State]) -> Option<usize> {
        let fitting: Vec<usize> =
            (0..self.seqs.len()).filter(|seq| states.contains(&self.seqs[*seq].state)).collect();
        match usize::from(wish).checked_rem(fitting.len()) {
            Some(place) if wish < 220 => fitting.get(place).copied(),
            _ => self.pick(wish),
        }
    }

    /// Whether slots, or promises, are free for a sequence whose budgets become `table`.
    fn has_slots_for(&self, seq: usize, table: &[u32]) -> bool {
        let s = &self.seqs[seq];
        let own = if self.config.share.is_some() { blocks(&s.least) } else { s.blocks.clone() };
        let mut wanted = blocks(table).into_iter().zip(own).zip(self.room_to_promise());
        wanted.all(|((wanted, own), room)| wanted.saturating_sub(own) <= room)
    }

    /// Admits more tokens.
    pub fn extend(&mut self, wish: u8, prompt: u8, promised: u8) {
        let Some(seq) = self.pick_in(wish, &[State::Filling, State::Parked]) else { return };
        let s = &self.seqs[seq];
        let prompt = match prompt {
            250.. => s.prompt.saturating_sub(1),
            240..250 => 400,
            _ => s.prompt + u32::from(prompt) % 40,
        };
        let promised = match promised {
            240.. => 0,
            _ => s.admitted.saturating_sub(prompt) + u32::from(promised) % 20,
        };
        let (handle, waits) = (s.handle, s.state == State::Filling);
        let tokens = prompt + promised;
        let fits = prompt >= s.prompt && (s.admitted..=self.config.max_tokens).contains(&tokens);
        let table = budgets(&self.config, &s.asked, tokens, &self.groups).unwrap();
        let pages = reach(&self.config, tokens.min(self.config.max_tokens)).div_ceil(self.page_tokens());
        let more = pages.saturating_sub(s.pages.len() as u32);
        let expected = match () {
            () if !s.is_prompt() => Some(Kind::InvalidState),
            () if !fits => Some(Kind::OutOfRange),
            () if waits && !self.has_slots_for(seq, &table) => Some(Kind::Exhausted),
            () => (!self.room(more)).then_some(Kind::Exhausted),
        };
        if expected == Some(Kind::Exhausted) {
            self.note("extend without room");
        }
        let before = self.snapshot();
        let result = self.cache.extend(handle, prompt, promised);
        if self.expect(before, result, expected).is_none() {
            return;
        }
        let more = self.pages.take(more);
        let s = &mut self.seqs[seq];
        s.pages.extend(more);
        (s.prompt, s.admitted) = (prompt, tokens);
        if waits && self.config.share.is_some() {
            s.least = table;
        } else if waits {
            (s.blocks, s.least, s.budgets) = (blocks(&table), table.clone(), table);
        }
        self.learn_pages(seq);
        self.note(if waits { "extend" } else { "extend while parked" });
    }

    /// Truncates a prompt that has not joined.
    pub fn truncate_prompt(&mut self, seq: usize, to: u32) {
        let first = (to / self.page_tokens()) as usize;
        let shared = !self.shared_pages(seq, first).is_empty();
        let expected = match () {
            () if to > self.seqs[seq].prompt => Some(Kind::OutOfRange),
            () => shared.then_some(Kind::InvalidState),
        };
        let before = self.snapshot();
        let result = self.cache.truncate(self.seqs[seq].handle, to, self.engine.host);
        let Some(ticket) = self.expect(before, result, expected) else { return };
        assert!(ticket.poll().is_some(), "nothing is enqueued");
        self.remove_block_hashes(seq, first, &[]);
        let s = &mut self.seqs[seq];
        s.rows.iter_mut().for_each(|rows| rows.truncate(to as usize));
        (s.prompt, s.stored) = (to, s.stored.min(to));
        let parked = s.state == State::Parked;
        self.note(if parked { "truncate while parked" } else { "truncate a prompt" });
    }

    /// Parks a sequence, or is refused.
    pub fn park(&mut self, wish: u8, accepted: u8, stream: u8) {
        let Some(seq) = self.pick_in(wish, &[State::Running]) else { return };
        if !(stream / 3).is_multiple_of(4) {
            (0..self.open.len()).for_each(|micro| self.finish(micro as u8));
            while !self.flights.is_empty() {
                self.retire(1);
            }
        }
        let on = self.engine.stream(u32::from(stream) % 3);
        self.release_held(seq);
        self.settle_resize(seq);
        let s = &self.seqs[seq];
        let landed = s.landed.len() as u32;
        let accepted = if accepted > 230 { landed + 1 } else { u32::from(accepted) % (landed + 1) };
        let parked = self.seqs.iter().filter(|s| s.state == State::Parked).count() as u32;
        let expected = match s.state {
            State::Running | State::Filling if s.in_flight > 0 => Some(Kind::Busy),
            State::Running | State::Filling if accepted > landed => Some(Kind::OutOfRange),
            State::Running | State::Filling => (parked == self.config.parked).then_some(Kind::Exhausted),
            _ => Some(Kind::InvalidState),
        };
        let (handle, before) = (s.handle, self.snapshot());
        let result = self.cache.park(handle, accepted, on);
        let done = self.expect(before, result, expected).is_some();
        let prompt =
            !self.seqs[seq].is_prompt() && expected.is_none() && !self.cache.is_running(handle).unwrap();
        if prompt {
            self.become_prompt(seq, accepted);
        }
        if done {
            let groups = self.groups.len();
            let s = &mut self.seqs[seq];
            s.state = State::Parked;
            (s.budgets, s.blocks, s.least) = (vec![0; groups], vec![0; groups], vec![0; groups]);
            self.note(if prompt { "park" } else { "park a prompt" });
        }
    }

    /// A running sequence is a prompt from now on, also if the device failed before it was parked.
    fn become_prompt(&mut self, seq: usize, accepted: u32) {
        let top_k = self.config.shape.top_k as usize;
        let s = &mut self.seqs[seq];
        let newest = |order: &Vec<u32>| order[order.len().saturating_sub(top_k)..].to_vec();
        s.noted = Some(s.oracles.iter().map(|oracle| newest(&oracle.order)).collect());
        s.commit(accepted, Vec::new());
        (s.prompt, s.stored, s.micro, s.state) = (s.length(), s.length(), None, State::Filling);
    }

    /// Resumes a sequence, or is refused.
    pub fn resume(&mut self, wish: u8, bound: u8, stream: u8) {
        let Some(seq) = self.pick_in(wish, &[State::Parked]) else { return };
        let parked = self.seqs[seq].state == State::Parked;
        if parked && !(stream / 3).is_multiple_of(4) {
            self.fill(seq);
        }
        let (s, on) = (&self.seqs[seq], self.engine.stream(u32::from(stream) % 3));
        let complete = s.rows.iter().all(|rows| rows.len() as u32 == s.prompt);
        let table = budgets(&self.config, &s.asked, s.admitted, &self.groups).unwrap();
        let expected = match () {
            () if !parked || !complete => Some(Kind::InvalidState),
            () if self.free_lanes() == 0 || !self.has_slots_for(seq, &table) => Some(Kind::Exhausted),
            () => self.join_is_busy(&table).then_some(Kind::Busy),
        };
        let (handle, before) = (s.handle, self.snapshot());
        let bytes = u64::from(bound) * self.largest_row();
        let result = self.claim(|cache| cache.resume(handle, on, bytes));
        // A device that fails half-way leaves it with a lane.
        if !parked || self.cache.is_parked(handle).unwrap() {
            self.learn_budgets(By::Join(None), on);
            self.expect(before, result.map(|_| ()), expected);
            return;
        }
        assert_eq!(expected, None, "resumed");
        let s = &mut self.seqs[seq];
        (s.state, s.least) = (State::Filling, table.clone());
        if self.config.share.is_none() {
            (s.blocks, s.budgets) = (blocks(&table), table);
        }
        self.learn_budgets(By::Join(Some(seq)), on);
        self.learn_lane(seq);
        let Some(ticket) = self.expect(before, result, None) else { return };
        let noted = self.seqs[seq].noted.take();
        let warm = noted.map(|groups| groups.into_iter().map(|step| vec![step]).collect());
        self.engine.drain(on);
        self.note(if warm.is_some() { "resume" } else { "resume a prompt" });
        self.joined(seq, warm, bound.into(), &ticket);
    }
}
