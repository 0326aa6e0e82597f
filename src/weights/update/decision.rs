//! The decision of an update: one word that all ranks share, beside one word of each rank that says that it is ready.
//!
//! | word | value |
//! |---|---|
//! | 0 | the decision: open (0), committed, aborted |
//! | 1 + rank | 0, or that this rank is ready, and at which step |
//!
//! **Why one word.** A rank may end at any moment, and the others must not be left with two opinions. So no rank
//! announces a decision: the first change of the word, by an exchange that expects it open, is the decision, and every
//! rank follows the word. A rank that sees all others ready at its own step commits; one that gives up aborts. The word
//! never changes again. A rank that ends before its exchange has decided nothing, and one that ends after it has
//! decided for all.
//!
//! **Orders.** A rank writes its own word last of all that it does for the update, and loads acquire what stores
//! released. So a rank that finds the word committed finds all that the others did before they were ready.
//!
//! **Others are not trusted** to write sense: any other value of the decision is [`Look::Strange`]. A rank that writes
//! another one's word is not found out.
//!
//! It is a file of its own without imports, so that the loom models test this very code (`tests/loom_update.rs`).

/// Words in memory that all ranks share. An index beyond them reads 0 and changes nothing.
pub trait Words {
    /// The value of a word; acquires what its writer released.
    fn load(&self, word: usize) -> u64;

    /// Sets a word, and releases what was done before.
    fn store(&self, word: usize, value: u64);

    /// Sets a word to `to` if it is `from`, and returns what it was; acquires and releases.
    fn exchange(&self, word: usize, from: u64, to: u64) -> u64;
}

const DECISION: usize = 0;
/// Values that no stray write of small numbers makes.
const OPEN: u64 = 0;
const COMMITTED: u64 = 0x636F_6D6D_6974_6564;
const ABORTED: u64 = 0x6162_6F72_7465_6421;
/// The bit of a rank's word that says that it is ready; the others are the step.
const READY: u64 = 1 << 63;

/// What was decided, for all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Committed,
    Aborted,
}

/// What a rank sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Decided(Decision),
    /// This rank is not ready yet.
    Waits(u32),
    /// This rank is ready at another step.
    Differs(u32, u64),
    /// The decision is a value that no rank writes.
    Strange(u64),
}

/// A decision that ranks share.
#[derive(Debug)]
pub struct Ballot<W> {
    words: W,
    ranks: u32,
}

/// The words of a ballot.
pub const fn words(ranks: u32) -> usize {
    1 + ranks as usize
}

fn decided(value: u64) -> Look {
    match value {
        COMMITTED => Look::Decided(Decision::Committed),
        ABORTED => Look::Decided(Decision::Aborted),
        other => Look::Strange(other),
    }
}

impl<W: Words> Ballot<W> {
    /// A ballot of so many ranks over words that were 0 at first.
    pub const fn new(words: W, ranks: u32) -> Ballot<W> {
        Ballot { words, ranks }
    }

    pub const fn memory(&self) -> &W {
        &self.words
    }

    /// Says that `rank` is ready at `step`, of which the lower 63 bits count.
    pub fn ready(&self, rank: u32, step: u64) {
        self.words.store(words(rank), step | READY);
    }

    /// Looks at all words, and commits if all ranks are ready at `step`. For a rank that is ready itself.
    pub fn look(&self, step: u64) -> Look {
        let value = self.words.load(DECISION);
        if value != OPEN {
            return decided(value);
        }
        for rank in 0..self.ranks {
            match self.words.load(words(rank)) {
                value if value == step | READY => {}
                value if value & READY == 0 => return Look::Waits(rank),
                value => return Look::Differs(rank, value & !READY),
            }
        }
        self.decide(COMMITTED)
    }

    /// Aborts, unless it is decided already. Returns what is decided.
    pub fn abort(&self) -> Look {
        self.decide(ABORTED)
    }

    fn decide(&self, value: u64) -> Look {
        match self.words.exchange(DECISION, OPEN, value) {
            OPEN => decided(value),
            other => decided(other),
        }
    }
}
