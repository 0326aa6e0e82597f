//! Tests of prefixes that sequences share.

use super::*;

const IDS: [u32; 48] = {
    let mut ids = [0; 48];
    let mut at = 0;
    while at < ids.len() {
        ids[at] = at as u32 * 3 + 1;
        at += 1;
    }
    ids
};

fn tokens(ids: &[u32], keys: &[FbKey]) -> FbTokens {
    FbTokens {
        ids: ids.as_ptr(),
        count: ids.len() as u32,
        keys: keys.as_ptr(),
        key_count: keys.len() as u32,
        ..sized()
    }
}

fn open(cache: *mut FbCache, prompt: &FbTokens, salt: &[u8]) -> (FbStatus, u64, u32) {
    let (mut sequence, mut shared) = (0, 77);
    let config = opening(48, 10);
    let (salt, bytes) = (salt.as_ptr().cast(), salt.len());
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe {
        fb_open_shared(cache, &raw const config, prompt, salt, bytes, &raw mut sequence, &raw mut shared)
    };
    (status, sequence, shared)
}

fn find(cache: *const FbCache, prompt: &FbTokens, salt: &[u8]) -> u32 {
    let mut shared = 77;
    // SAFETY: all pointers are valid and as long as stated.
    let status = unsafe { fb_find_shared(cache, prompt, salt.as_ptr().cast(), salt.len(), &raw mut shared) };
    assert_eq!(status, FbOk, "{}", text_of(cache));
    shared
}

#[test]
fn a_published_prefix_is_found_only_under_its_salt_and_keys() {
    let device = host();
    let cache = make_cache(device, &declared());
    let plain = tokens(&IDS, &[]);
    let (status, sequence, shared) = open(cache, &plain, b"tenant");
    assert_eq!((status, shared), (FbOk, 0), "{}", text_of(cache));
    append(cache, sequence, 0..48);
    let mut published = 77;
    // SAFETY: all pointers are valid.
    unsafe {
        assert_eq!(fb_publish(cache, sequence, 0, &raw const plain, &raw mut published), FbInvalidState);
        assert_eq!(fb_join(cache, sequence, null(), null_mut(), null_mut()), FbOk);
        assert_eq!(fb_publish(cache, sequence, 16, &raw const plain, &raw mut published), FbOutOfRange);
        assert_eq!(published, 77);
        assert_eq!(
            fb_publish(cache, sequence, 0, &raw const plain, &raw mut published),
            FbOk,
            "{}",
            text_of(cache)
        );
        assert_eq!((published, length_of(cache, sequence).published), (48, 48));
    }
    assert_eq!((find(cache, &plain, b"tenant"), find(cache, &plain, b"other")), (48, 0));
    assert_eq!(find(cache, &tokens(&IDS[..40], &[]), b"tenant"), 32);
    let mut keys = [zeroed::<FbKey>(); 3];
    assert_eq!(find(cache, &tokens(&IDS, &keys), b"tenant"), 48, "keys that are not set");
    keys[1] = FbKey { is_set: 1, bytes: [5; 16] };
    assert_eq!(find(cache, &tokens(&IDS, &keys), b"tenant"), 16);
    let (status, second, shared) = open(cache, &tokens(&IDS[..47], &[]), b"tenant");
    assert_eq!((status, shared), (FbOk, 32), "{}", text_of(cache));
    append(cache, second, 32..48);
    // SAFETY: nothing is passed.
    assert_eq!(unsafe { fb_join(cache, second, null(), null_mut(), null_mut()) }, FbOk);
    assert_eq!(read_row(cache, second, 0, 5), row_of(0, 5));
    let mut stats: FbStats = sized();
    // SAFETY: it states its size.
    assert_eq!(unsafe { fb_cache_stats(cache, &raw mut stats) }, FbOk);
    assert_eq!((stats.published_pages, stats.shared_tokens, stats.prompt_tokens), (3, 32, 95));
    close(cache, sequence);
    close(cache, second);
    destroy(cache, device);
}

#[test]
fn invalid_tokens_allocate_nothing() {
    let device = host();
    let cache = make_cache(device, &declared());
    let keys = [FbKey { is_set: 2, ..zeroed() }; 3];
    for (wrong, status) in [
        (tokens(&IDS, &keys), FbInvalidConfig),
        (tokens(&IDS, &keys[..2]), FbInvalidConfig),
        (tokens(&IDS, &[zeroed(); 2]), FbOutOfRange),
        (tokens(&[0; 49], &[]), FbOutOfRange),
        (FbTokens { ids: null(), ..tokens(&IDS, &[]) }, FbInvalidConfig),
        (FbTokens { size: 0, ..tokens(&IDS, &[]) }, FbInvalidConfig),
    ] {
        assert_eq!(open(cache, &wrong, b""), (status, 0, 77));
    }
    let none = FbTokens { ids: null(), ..tokens(&[], &[]) };
    let (status, sequence, shared) = open(cache, &none, b"");
    assert_eq!((status, shared), (FbOk, 0));
    close(cache, sequence);
    destroy(cache, device);
}
