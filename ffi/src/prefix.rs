//! Shared prefixes: opening a sequence on published pages, and publishing pages.

use std::ffi::c_void;

use forebay::{Error, Kind, Result, Tokens};

use crate::cache::FbCache;
use crate::cast::{self, Plain, Versioned};
use crate::handle::{change, read};
use crate::sequence::FbOpenConfig;
use crate::status::FbStatus;

/// A key that the caller adds to the block hash of one page, or none. This struct never grows.
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

/// The tokens of consecutive pages, by which the library finds published pages.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FbTokens {
    /// sizeof(fb_tokens).
    pub size: usize,
    /// Token ids from the beginning of a page. The library ignores ids at the end that fill no page. NULL if there are
    /// none.
    pub ids: *const u32,
    /// The number of token ids.
    pub count: u32,
    /// Optional: the number of keys: one for each full page among the ids, or 0.
    pub key_count: u32,
    /// Optional: the caller's keys, for content that ids do not identify, such as which image they represent. Two pages
    /// match only if their ids and keys are equal and everything before them matches too.
    pub keys: *const FbKey,
}

// SAFETY: words and pointers, which are words; two of 4 bytes where one of 8 follows.
unsafe impl Plain for FbTokens {}
impl Versioned for FbTokens {
    const NAME: &'static str = "fb_tokens";
    const REQUIRED: usize = std::mem::offset_of!(FbTokens, key_count);
}

/// Tokens in the caller's memory, and keys in the library's type.
pub(crate) struct Given<'a> {
    ids: &'a [u32],
    keys: Vec<Option<[u8; 16]>>,
}

impl Given<'_> {
    /// # Safety
    /// `tokens` states its real size, and its ids and keys are valid during `'a`.
    pub(crate) unsafe fn of<'a>(tokens: *const FbTokens) -> Result<Given<'a>> {
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

    pub(crate) fn tokens(&self) -> Tokens<'_> {
        Tokens { ids: self.ids, keys: &self.keys }
    }
}

/// Opens a sequence like fb_open, for a prompt whose token ids are known. The sequence shares the leading pages that
/// were published under the same salt (vLLM: a prefix cache hit). `*shared` receives how many tokens those pages have;
/// fb_append continues after them. Admission counts only what is not shared. `prompt` has the prompt's ids, or as many
/// leading ones as may be shared: omit the last token if its row must be computed for its logits. The salt separates
/// equal tokens of different tenants, adapters or weights; it may be empty. FB_OUT_OF_RANGE for more ids than the
/// prompt has tokens, and for keys that are neither none nor one for each full page. On an error the call has taken
/// nothing.
///
/// # Safety
/// The structs state their real sizes, and everything they point to is valid. `salt` has `salt_bytes` bytes.
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

/// Returns how many tokens fb_open_shared would share now. It changes nothing. For all ranks to share the same prefix,
/// take the smallest result of all ranks, and pass only the ids of that many tokens to fb_open_shared on each.
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

/// Starting at token `from`, publishes the full pages whose rows are all accepted and stored, so that other sequences
/// can find them by block hash (vLLM: a cached full block). `next` has the sequence's token ids from `from` on, as far
/// as they are known. `*published` receives how many tokens the sequence's published pages have now. Call it again
/// after more steps have been retired, and before fb_close. A published page also gives other sequences its index keys.
/// So the engine must have written the index keys of the page's tokens: before the join (in stream order) or in the
/// sequence's steps. FB_INVALID_STATE for a sequence that neither fb_open_shared opened nor fb_fork made from such a
/// sequence, or that is not running. FB_BUSY while a ticket's work for it (warm-up, the copy of fb_fork, truncation) is
/// in flight; steps in flight do not matter. FB_OUT_OF_RANGE when `from` differs from the `published` that fb_length
/// returns.
///
/// # Safety
/// `next` states its real size, and everything it points to is valid. `published` has room for the result.
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
