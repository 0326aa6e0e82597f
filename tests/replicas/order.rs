//! Flips against pulls, under the order checker: what a rank's pulls read is the old set or the new one as a whole, by
//! tags of the memory; a flip that does not wait for a pull is found.

use std::sync::Arc;

use forebay::check::order::Content;
use forebay::check::watch::Watch;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped, Stream};
use forebay::os::Protection;
use forebay::weights::{Border, Outcome, Replica, Replication};
use forebay::{Error, Result};

use crate::naive::holders;
use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, commit, grain, no_faults, replica};

/// The tag of memory that owners fill, and of replicas.
const OWNED: u32 = 1;
const COPIED: u32 = 2;

const fn tag(version: u32) -> Content {
    Content { layer: 0, version }
}

struct Tagged {
    watch: Arc<Watch>,
    faulty: Arc<Faulty>,
    engine: Engine,
}

impl Tagged {
    fn new(rank: u32, folder: &Folder) -> Tagged {
        let watch = Watch::new(HostDevice::new(HostOptions::default()));
        let faulty = Faulty::new(watch.clone(), false);
        faulty.named(rank);
        let device: Arc<dyn Device> = faulty.clone();
        let engine = Engine::new(&device, (rank, 2), &folder.0, &no_faults()).unwrap();
        let tagged = Tagged { watch, faulty, engine };
        for backing in tagged.faulty.imported() {
            let seen = tagged.faulty.mapped(backing).unwrap();
            tagged.watch.holds(&seen, tag(OWNED)).unwrap();
        }
        tagged
    }

    /// Pulls a layer on `stream` and says what a use of the other rank's pages of a tensor expects.
    fn uses(&self, wanted: &Replica, stream: Stream, version: u32) -> Result<()> {
        let (pulls, plan) = (self.engine.ring.pulls(), &self.engine.plan);
        pulls.pull(wanted.layer, stream)?;
        let (window, own) = (pulls.layer(wanted.layer)?, self.engine.own());
        let set = [wanted.clone()].into();
        let pages = (0..window.bytes() / grain()).filter(|page| {
            holders(plan, &set, wanted.layer, *page) == [0, 1].into()
                && !plan.part(wanted.layer, own).unwrap().contains(page)
        });
        pages
            .map(|page| window.part(page * grain(), grain()))
            .try_for_each(|page| self.watch.uses(stream, "attention", &page?, tag(version)))
    }

    /// A change whose replica on the first rank is tagged, up to its border.
    fn shared(&mut self, wanted: &[Replica]) -> Replication {
        let stream = self.engine.stream();
        let mut change = self.engine.ring.replicate(1, wanted, u64::MAX).unwrap();
        let (backing, bytes) = (self.faulty.newest(), change.left());
        while change.advance(grain(), stream).unwrap() > 0 {}
        change.share(&mut self.engine.links, stream, PATIENCE).unwrap();
        if bytes > 0 {
            let piece = Mapped { backing, offset: 0, bytes };
            let seen = self.watch.range(&[piece], Protection::Read).unwrap();
            self.watch.holds(&seen, tag(COPIED)).unwrap();
            // The memory is not mapped for longer than this.
            let other = Mapped { backing: self.watch.backing(bytes).unwrap(), ..piece };
            self.watch.remap(seen, &[other]).unwrap();
        }
        change
    }
}

/// Two ranks under the order checker, of which the first one does `work` with its own replica of the layer.
fn tagged(work: impl Fn(&mut Tagged, &Replica) + Sync) {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        let one = |rank| {
            let mut tagged = Tagged::new(rank, &folder);
            work(&mut tagged, &replica(3, 0, 0));
            tagged
        };
        let ranks = [0, 1].map(|rank| scope.spawn(move || one(rank)));
        let ended = ranks.map(std::thread::ScopedJoinHandle::join);
        assert!(ended.iter().all(std::result::Result::is_ok), "a rank has failed");
    });
}

fn is_stale(error: &Error) -> bool {
    error.place().starts_with("stale read: ")
}

/// Before the border a pull reads the owner's memory, however full the replica is; after it the replica, in all of its
/// pages.
#[test]
fn pulls_read_the_old_set_before_the_border_and_the_new_one_after_it() {
    tagged(|rank, wanted| {
        let stream = rank.engine.stream();
        let mut change = rank.shared(std::slice::from_ref(wanted));
        if rank.engine.own() == 1 {
            return assert_eq!(commit(&mut rank.engine, &mut change), Ok(Outcome::Committed));
        }
        rank.uses(wanted, stream, OWNED).unwrap();
        let error = rank.uses(wanted, stream, COPIED).unwrap_err();
        assert!(is_stale(&error) && error.number("found version") == Some(OWNED.into()), "{error}");
        assert_eq!(commit(&mut rank.engine, &mut change), Ok(Outcome::Committed));
        rank.uses(wanted, stream, COPIED).unwrap();
        let error = rank.uses(wanted, stream, OWNED).unwrap_err();
        assert!(is_stale(&error) && error.number("found version") == Some(COPIED.into()), "{error}");
        // Without it the owner's is read again.
        rank.engine.rank.wait().unwrap();
        rank.engine.ring.drop_replicas().unwrap();
        rank.uses(wanted, stream, OWNED).unwrap();
    });
}

/// The control: a pull that is under way on a stream that the commit does not wait for.
#[test]
fn control_a_flip_that_does_not_wait_for_a_pull_is_found() {
    for waits in [true, false] {
        tagged(|rank, wanted| {
            let mut change = rank.shared(std::slice::from_ref(wanted));
            let other = rank.faulty.stream().unwrap();
            rank.engine.ring.pulls().pull(wanted.layer, other).unwrap();
            let stream = if waits { other } else { rank.engine.stream() };
            let border = Border { stream, ..rank.engine.border() };
            let found = rank.engine.ring.commit_replicas(&mut change, &mut rank.engine.links, border);
            if waits || rank.engine.own() == 1 {
                return assert_eq!(found, Ok(Outcome::Committed));
            }
            let error = found.unwrap_err().to_string();
            assert!(error.contains("remap"), "{error}");
            assert_eq!(rank.engine.ring.pulls().layer(wanted.layer).unwrap_err().to_string(), error);
        });
    }
}
