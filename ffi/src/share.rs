//! Shared prefixes: open behind what others have published, and publish.

use std::ffi::c_void;

use forebay::{Error, Kind, Result, Tokens};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::sequence::FbOpenConfig;
use crate::status::FbStatus;

/// A page's key of the caller's, or none. It never grows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbKey {
    /// 1 if there is a key, 0 if not.
    pub is_set: u32,
    /// The key.
    pub bytes: [u8; 16],
}

// SAFETY: a word and bytes, a multiple of the word's size.
unsafe impl Plain for FbKey {}

/// What pages hold, so that they can be found again.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTokens {
    /// sizeof(fb_tokens).
    pub size: usize,
    /// Token ids, from the beginning of a page. A rest that fills no page is passed over. NULL if there are none.
    pub ids: *const u32,
    /// How many.
    pub count: u32,
    /// Optional: how many keys: one for each full page among the ids, or none.
    pub key_count: u32,
    /// Optional: keys of the caller's, for what ids do not say: which image they stand for, for example. Pages are one
    /// only if keys and ids are the same, and so is all that stands before them.
    pub keys: *const FbKey,
}

// SAFETY: words and pointers, which are words; two of 4 bytes where one of 8 follows.
unsafe impl Plain for FbTokens {}
impl Versioned for FbTokens {
    const NAME: &'static str = "fb_tokens";
    const REQUIRED: usize = std::mem::offset_of!(FbTokens, key_count);
}

/// Tokens as the caller's memory holds them, keys as the library takes them.
struct Given<'a> {
    ids: &'a [u32],
    keys: Vec<Option<[u8; 16]>>,
}

impl Given<'_> {
    /// # Safety
    /// `tokens` states its size truly, and its ids and keys are there during `'a`.
    unsafe fn of<'a>(tokens: *const FbTokens) -> Result<Given<'a>> {
        // SAFETY: the same contract, for all of them.
        let (ids, keys) = unsafe {
            let tokens = cast::versioned(tokens)?;
            let ids = cast::slice(tokens.ids, tokens.count as usize, "ids")?;
            (ids, cast::slice(tokens.keys, tokens.key_count as usize, "keys")?)
        };
        if let Some(key) = keys.iter().position(|key| key.is_set > 1) {
            return Err(Error::new(Kind::InvalidConfig, "argument").at("is_set").with("key", key as u64));
        }
        Ok(Given { ids, keys: keys.iter().map(|key| (key.is_set == 1).then_some(key.bytes)).collect() })
    }

    fn tokens(&self) -> Tokens<'_> {
        Tokens { ids: self.ids, keys: &self.keys }
    }
}

/// As fb_open, for a prompt whose token ids are known: its leading pages that were published before, under the same
/// salt, are taken over. `*shared` says how many tokens those are; fb_append goes on behind them. Admission counts
/// only what is not shared. `prompt` has the prompt's ids, or as many leading ones as may be shared: leave out the
/// last one where its row is to be computed anew, for the logits behind it. The salt tells apart what equal tokens do
/// not: tenants, adapters, versions of the weights; it may be empty. FB_OUT_OF_RANGE for more ids than the prompt has
/// tokens, and for keys that are neither one a full page nor none. Nothing is taken on an error.
///
/// # Safety
/// The structs state their sizes truly, and what they name is there; `salt` has `salt_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_open_shared(
    cache: *mut FbCache,
    config: *const FbOpenConfig,
    prompt: *const FbTokens,
    salt: *const c_void,
    salt_bytes: usize,
    sequence: *mut u64,
    shared: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        change(cache, |cache| {
            let (sequence, shared) = (cast::out(sequence, "sequence")?, cast::out(shared, "shared")?);
            let open = FbOpenConfig::declare(&cast::versioned(config)?, cache)?;
            let (prompt, salt) = (Given::of(prompt)?, cast::slice(salt.cast::<u8>(), salt_bytes, "salt")?);
            let (opened, tokens) = cache.cache.open_shared(&open, salt, prompt.tokens())?;
            sequence.set(cache.number_of(opened));
            shared.set(tokens);
            Ok(())
        })
    }
}

/// How many tokens fb_open_shared would take over now. Changes nothing. Caches of several ranks share alike only if
/// each is offered what the one that finds least would find.
///
/// # Safety
/// As fb_open_shared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_find_shared(
    cache: *const FbCache,
    prompt: *const FbTokens,
    salt: *const c_void,
    salt_bytes: usize,
    shared: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for all of them.
    unsafe {
        read(cache, |cache| {
            let shared = cast::out(shared, "shared")?;
            let (prompt, salt) = (Given::of(prompt)?, cast::slice(salt.cast::<u8>(), salt_bytes, "salt")?);
            shared.set(cache.cache.find_shared(salt, prompt.tokens())?);
            Ok(())
        })
    }
}

/// Publishes what can be published, for others to find: full pages behind the `from` tokens that are, whose rows are accepted
/// and stored. `next` has the sequence's token ids from there on, as far as they are known. `*published` says how many
/// tokens are published now; call it again when more steps have been retired, and before fb_close. FB_INVALID_CONFIG for
/// a sequence that fb_open_shared did not open, or that is not running; FB_BUSY while work that the library enqueued
/// for it is in flight; FB_OUT_OF_RANGE when `from` is not what fb_length says is published.
///
/// # Safety
/// `next` states its size truly, and what it names is there; `published` has room for the answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_publish(
    cache: *mut FbCache,
    sequence: u64,
    from: u32,
    next: *const FbTokens,
    published: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        change(cache, |cache| {
            let (published, next) = (cast::out(published, "published")?, Given::of(next)?);
            let sequence = cache.sequence(sequence)?;
            published.set(cache.cache.publish(sequence, from, next.tokens())?);
            Ok(())
        })
    }
}
