//! What happens between the ranks: frames, writes from afar, connections that break.

use std::time::Duration;

use forebay::transfer::receiver::{self, Mover, Where};
use forebay::transfer::sender::{self, Computed};
use forebay::transfer::{Fence, Run};
use forebay::{Error, Kind};

use crate::decode::{Landing, Planes, Use};
use crate::prefill::{Origin, Reader, read};
use crate::world::{Happens, Link, Way, World, Wrong};
use std::collections::BTreeMap;

/// Where a receiver's rows come from.
enum From<'a> {
    Shared(&'a [Origin], &'a forebay::transfer::Side),
    Landing(&'a Landing),
    Pages,
}

/// A receiver's mover: it stores rows in the cache's pages, and keys beside them.
struct Hands<'a> {
    from: From<'a>,
    planes: &'a Planes,
    uses: &'a BTreeMap<Fence, Use>,
    /// Draws whether a run is fetched wrong.
    wrong: &'a mut dyn FnMut() -> bool,
    broken: Option<String>,
}

impl Mover for Hands<'_> {
    fn fetch(&mut self, _: u32, _: Fence, at: Where, run: &Run, into: &mut [u8]) -> forebay::Result<()> {
        match (at, &self.from) {
            (Where::Origin { origin, .. }, From::Shared(origins, side)) => {
                read(origins, side, origin, run, into)?
            }
            (Where::Landing(page), From::Landing(pages)) => pages.read(page, run, into),
            (Where::Landing(page), From::Pages) => self.planes.read(page, run, into),
            _ => return Err(Error::new(Kind::Internal, "fetch")),
        }
        if (self.wrong)() {
            into[0] ^= 1;
        }
        Ok(())
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> forebay::Result<()> {
        match self.uses.get(&fence).filter(|of| !of.ended) {
            Some(of) if run.token >= of.first => {
                self.planes.write(of.pages[run.to.page as usize].0, run, bytes);
            }
            Some(of) => self.broken = Some(format!("{run:?} is stored before token {}", of.first)),
            None => self.broken = Some(format!("{fence:?} is stored after its end")),
        }
        Ok(())
    }

    fn holds(&mut self, _: u32) -> bool {
        true
    }
}

impl World {
    pub fn happens(&mut self, happens: Happens) {
        match happens {
            Happens::ToDecode(link, frame) => self.at_decode(link, &frame),
            Happens::ToPrefill(link, frame) => self.at_prefill(link, &frame),
            Happens::Lands { link, write, fence, page, origin, run, last } => {
                self.lands(link, (write, last), (fence, page, origin), &run);
            }
            Happens::Connect(prefill, decode) => self.connect(prefill, decode),
            Happens::Lost(link, end) => self.lost(link, end),
            Happens::Destroyed(link) => {
                self.future.keep(|of| !matches!(of, Happens::Lands { link: of, .. } if *of == link));
                self.decodes[self.links[link as usize].decode].machine.destroyed(link).unwrap();
            }
            other => self.engine(other),
        }
        if self.fault(self.faults.cut) && !self.links.is_empty() {
            let link = self.draw.below(self.links.len() as u32);
            self.cut(link);
        }
    }

    fn connect(&mut self, prefill: usize, decode: usize) {
        let same = |link: &&Link| (link.prefill, link.decode) == (prefill, decode);
        if self.links.iter().filter(same).any(|link| link.up.contains(&true)) {
            return;
        }
        let (number, far) = (self.links.len() as u32, self.way != Way::Shared);
        self.prefills[prefill].machine.connect(number, far).unwrap();
        self.decodes[decode].machine.connect(number, far).unwrap();
        self.links.push(Link { prefill, decode, up: [true; 2] });
    }

    /// A connection breaks. Its ends learn of it at different times, and what was written lands until later still.
    pub fn cut(&mut self, link: u32) {
        let Link { prefill, decode, up } = self.links[link as usize];
        if !up.contains(&true) {
            return;
        }
        self.met.cut += 1;
        let times = [self.now + self.draw.millis(60), self.now + self.draw.millis(60)];
        (0..2).for_each(|end| self.future.at(times[end], Happens::Lost(link, end)));
        let both = times[0].max(times[1]);
        let later = [both + self.draw.millis(300), both + self.draw.millis(80)];
        self.future.at(later[0], Happens::Destroyed(link));
        self.future.at(later[1], Happens::Connect(prefill, decode));
    }

    fn lost(&mut self, link: u32, end: usize) {
        let Link { prefill, decode, up } = &mut self.links[link as usize];
        if !std::mem::replace(&mut up[end], false) {
            return;
        }
        let (prefill, decode) = (*prefill, *decode);
        if end == 0 {
            self.prefills[prefill].machine.disconnect(link);
            return;
        }
        self.decodes[decode].machine.disconnect(link);
        // What was stored in pages that a lost writer still reaches may have changed since it was checked.
        let reached = self.decodes[decode].uses.values().filter(|of| of.reached && !of.ended);
        let reached: Vec<usize> = reached.map(|of| of.attempt).collect();
        if self.way == Way::Pages && self.wrong != Wrong::RunsReached {
            reached.into_iter().for_each(|attempt| self.attempts[attempt].given_up = true);
        }
    }

    fn at_prefill(&mut self, link: u32, frame: &[u8]) {
        let Link { prefill, up, .. } = self.links[link as usize];
        if up[0] && self.prefills[prefill].machine.frame(link, frame).is_err() {
            self.breaks(format!("a frame is refused at {:?}", self.prefills[prefill].rank));
        }
    }

    fn at_decode(&mut self, link: u32, frame: &[u8]) {
        let Link { prefill, decode, up } = self.links[link as usize];
        if !up[1] {
            return;
        }
        let (mut draw, often, calm) =
            (self.draw.clone(), self.faults.fetched, self.now >= crate::world::CALM);
        let rank = &mut self.decodes[decode];
        let from = match self.way {
            Way::Shared => From::Shared(&self.prefills[prefill].origins, &self.sides[0]),
            Way::Landing => From::Landing(&rank.landing),
            Way::Pages => From::Pages,
        };
        let mut wrong = || !calm && draw.often(often);
        let mut hands =
            Hands { from, planes: &rank.planes, uses: &rank.uses, wrong: &mut wrong, broken: None };
        let taken = rank.machine.frame(link, frame, &mut hands);
        let broken = hands.broken.take();
        self.draw = draw;
        if let Some(broken) = broken.or_else(|| taken.err().map(|error| error.to_string())) {
            self.breaks(broken);
        }
    }

    fn lands(&mut self, link: u32, (write, last): (u64, bool), what: (Fence, u32, u64), run: &Run) {
        let (fence, page, origin) = what;
        let Link { prefill, decode, up } = self.links[link as usize];
        let mut bytes = vec![0; run.total() as usize];
        let _ = read(&self.prefills[prefill].origins, &self.sides[0], origin, run, &mut bytes);
        let rank = &mut self.decodes[decode];
        let over = rank.uses.get(&fence).is_none_or(|of| of.ended || of.whole);
        self.met.late_writes += u32::from(over);
        match self.way {
            Way::Pages => rank.planes.write(page, run, &bytes),
            _ => rank.landing.write(page, run, &bytes),
        }
        if last && up[0] {
            self.prefills[prefill].machine.written(link, write, false);
        }
    }

    /// Lets all machines say what they want done.
    pub fn pump(&mut self) {
        let mut frame = Vec::new();
        for index in 0..self.prefills.len() {
            loop {
                let rank = &mut self.prefills[index];
                let mut reader = Reader(&rank.origins, &self.sides[0]);
                match rank.machine.poll(self.now, &mut reader, &mut frame).unwrap() {
                    Some(action) => self.prefilled(index, action, &frame),
                    None => break,
                }
            }
        }
        for index in 0..self.decodes.len() {
            loop {
                match self.decodes[index].machine.poll(self.now, &mut frame) {
                    Some(receiver::Action::Frame { link }) => self.post(link, &frame, false),
                    Some(receiver::Action::Close { link }) => self.close(link, 1),
                    Some(receiver::Action::Event(event)) => self.received(index, event),
                    None => break,
                }
            }
        }
    }

    fn close(&mut self, link: u32, end: usize) {
        self.lost(link, end);
        self.cut(link);
    }

    fn prefilled(&mut self, index: usize, action: sender::Action, frame: &[u8]) {
        match action {
            sender::Action::Frame { link } => self.post(link, frame, true),
            sender::Action::Write { link, write, fence, landing, rows, some } => {
                self.write((link, write, fence), &landing, (&rows, some.as_deref()));
            }
            sender::Action::Close { link } => self.close(link, 0),
            sender::Action::Event(sender::Event::Released { origin, .. }) => {
                let origin = &mut self.prefills[index].origins[origin as usize];
                if std::mem::replace(&mut origin.released, true) {
                    self.breaks("rows are released twice".to_owned());
                }
            }
            sender::Action::Event(sender::Event::Ended { request, reason }) => {
                let of = self.attempts.iter_mut().find(|of| of.request == request && !of.over && !of.running);
                if let Some(attempt) = of.filter(|_| reason != forebay::transfer::Reason::Done) {
                    attempt.given_up = true;
                }
            }
            sender::Action::Event(sender::Event::Met { .. } | sender::Event::Granted { .. }) => {}
        }
    }

    /// Writes rows from afar, run by run, some late.
    fn write(
        &mut self,
        (link, write, fence): (u32, u64, Fence),
        landing: &sender::Landing,
        (rows, some): (&Computed, Option<&[u32]>),
    ) {
        let mut runs = Vec::new();
        let prefill = &self.prefills[self.links[link as usize].prefill];
        let listed = prefill.machine.runs(link, rows, some, |run| {
            runs.push(run);
            Ok(())
        });
        listed.unwrap();
        let late = if self.fault(self.faults.late) { 400 } else { 0 };
        let mut times: Vec<Duration> =
            runs.iter().map(|_| self.now + self.draw.millis(10) + self.draw.millis(late)).collect();
        times.sort_unstable();
        let last = runs.len() - 1;
        for (place, (run, time)) in runs.into_iter().zip(times).enumerate() {
            let page = landing.page(run.to.page).unwrap();
            let (origin, last) = (rows.origin, place == last);
            self.future.at(time, Happens::Lands { link, write, fence, page, origin, run, last });
        }
    }

    /// Sends a frame. The hello comes first, and is not lost: a connection begins with it.
    fn post(&mut self, link: u32, frame: &[u8], to_decode: bool) {
        let hello = frame[0] == 1;
        let copies = match (self.fault(self.faults.lost), self.fault(self.faults.twice)) {
            _ if hello => 1,
            (true, _) => 0,
            (_, true) => 2,
            _ => 1,
        };
        self.met.resent += u32::from(copies != 1);
        for _ in 0..copies {
            let late = if !hello && self.fault(self.faults.late) { 300 } else { 2 };
            let least = Duration::from_millis(if hello { 0 } else { 3 });
            let time = self.now + least + self.draw.millis(late);
            let happens = match to_decode {
                true => Happens::ToDecode(link, frame.to_vec()),
                false => Happens::ToPrefill(link, frame.to_vec()),
            };
            self.future.at(time, happens);
        }
    }
}
