//! Block hashes: the names of prefix blocks (vLLM: `BlockHash`).
//!
//! A *prefix block* is one page of tokens after a certain prefix. Its block hash is a keyed 256-bit BLAKE3 hash of the
//! parent's hash, the caller's key if there is one, the token ids, the geometry and the tenant's salt. Two blocks are
//! equal only if all bits of their hashes are equal. So tenants or geometries never share a block. Without the cache's
//! secret a client can neither guess the hashes of another tenant's prefixes nor choose the places that its own blocks
//! take in a table.
//!
//! The hash of a page of 64 tokens takes about 0.4 us: the hash function itself compresses five 64-byte pieces, and
//! sees them in one call. No memory is allocated.

use std::fmt;

use crate::geometry::Shape;

/// The hash of a prefix block. See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash(pub(super) [u8; 32]);

impl BlockHash {
    /// The first 32 bits, which give a block its place in a table.
    #[inline]
    pub(super) fn mark(&self) -> u32 {
        let [a, b, c, d, ..] = self.0;
        u32::from_le_bytes([a, b, c, d])
    }
}

/// The secret key of all block hashes. Without it a client cannot guess the block hashes of another tenant's prefixes.
#[derive(Clone, Copy)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Computes the block hashes of one tenant and one geometry.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    /// The hash of the data that all blocks of the tenant share. It is the key of their block hashes.
    common: Secret,
}

/// The tokens that the hash function takes in one call.
const BATCH: usize = 128;

/// The bytes before the tokens: which of the others follow, the parent's hash, and the caller's key.
const HEAD_MAX: usize = 1 + 32 + 16;

impl BlockHasher {
    /// A hasher with the cache's `secret`. Tenants with different salts share no blocks.
    pub fn new(secret: &Secret, shape: &Shape, salt: &[u8]) -> BlockHasher {
        let Shape {
            layers,
            draft_layers,
            runs: [first, second],
            host_stride,
            device_block_align,
            index_key_bytes,
            page_tokens,
            top_k,
            // Which layers share a selection changes no bytes of a block.
            lone_layers: _,
            group_layers: _,
        } = *shape;
        let fields = [
            layers,
            draft_layers,
            first,
            second,
            host_stride,
            device_block_align,
            index_key_bytes,
            page_tokens,
            top_k,
        ];
        BlockHasher::of(secret, &fields, salt)
    }

    /// A hasher with the cache's `secret` for a geometry of other `fields`. Geometries of different fields, and tenants
    /// with different salts, share no blocks. All hashers with one secret have the same number of fields: the salt
    /// follows them without a mark.
    pub fn of(secret: &Secret, fields: &[u32], salt: &[u8]) -> BlockHasher {
        let mut common = blake3::Hasher::new_keyed(&secret.0);
        for field in fields {
            common.update(&field.to_le_bytes());
        }
        common.update(salt);
        BlockHasher { common: Secret(*common.finalize().as_bytes()) }
    }

    /// The hash of the block with `tokens` after `parent`. Without a parent it is the first block of a sequence. The
    /// caller's `key` is part of this hash, and so of all hashes after it.
    pub fn block(&self, parent: Option<&BlockHash>, key: Option<&[u8; 16]>, tokens: &[u32]) -> BlockHash {
        let mut hash = blake3::Hasher::new_keyed(&self.common.0);
        let mut bytes = [0; HEAD_MAX + 4 * BATCH];
        // A parent's hash or a key could be mistaken for tokens, so the first byte says which of them follow.
        bytes[0] = u8::from(parent.is_some()) | u8::from(key.is_some()) << 1;
        let mut end = 1;
        for part in [parent.map(|hash| &hash.0[..]), key.map(|key| &key[..])].into_iter().flatten() {
            bytes[end..end + part.len()].copy_from_slice(part);
            end += part.len();
        }
        // A call for each token would take longer than the hash, so the tokens are gathered first.
        let mut batches = tokens.chunks(BATCH);
        loop {
            let batch = batches.next().unwrap_or_default();
            let (places, _) = bytes[end..].as_chunks_mut::<4>();
            for (place, token) in places.iter_mut().zip(batch) {
                *place = token.to_le_bytes();
            }
            hash.update(&bytes[..end + 4 * batch.len()]);
            if batches.len() == 0 {
                return BlockHash(*hash.finalize().as_bytes());
            }
            end = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: every part in a call of its own.
    fn plain(
        hasher: &BlockHasher,
        parent: Option<&BlockHash>,
        key: Option<&[u8; 16]>,
        tokens: &[u32],
    ) -> [u8; 32] {
        let mut hash = blake3::Hasher::new_keyed(&hasher.common.0);
        hash.update(&[u8::from(parent.is_some()) + 2 * u8::from(key.is_some())]);
        if let Some(BlockHash(parent)) = parent {
            hash.update(parent);
        }
        if let Some(key) = key {
            hash.update(key);
        }
        for token in tokens {
            hash.update(&token.to_le_bytes());
        }
        *hash.finalize().as_bytes()
    }

    #[test]
    fn a_block_of_any_length_has_the_hash_of_its_parts_in_turn() {
        let hasher = BlockHasher::of(&Secret([3; 32]), &[1, 2], b"salt");
        let tokens: Vec<u32> = (0..600_u32).map(|n| n.wrapping_mul(0x9E37_79B9)).collect();
        let (parent, key) = (hasher.block(None, None, &tokens), [5; 16]);
        for length in [0, 1, 3, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 600] {
            for parent in [None, Some(&parent)] {
                for key in [None, Some(&key)] {
                    let hash = hasher.block(parent, key, &tokens[..length]);
                    assert_eq!(hash.0, plain(&hasher, parent, key, &tokens[..length]), "{length} tokens");
                }
            }
        }
    }

    /// Each field that changes a block's bytes is in the hash, in this order.
    #[test]
    fn the_fields_of_a_shape_are_those_of_its_hasher() {
        let (secret, shape) = (Secret([7; 32]), Shape::DEEPSEEK_V3_2);
        let mut common = blake3::Hasher::new_keyed(&secret.0);
        for field in [
            shape.layers,
            shape.draft_layers,
            shape.runs[0],
            shape.runs[1],
            shape.host_stride,
            shape.device_block_align,
            shape.index_key_bytes,
            shape.page_tokens,
            shape.top_k,
        ] {
            common.update(&field.to_le_bytes());
        }
        common.update(b"a");
        assert_eq!(BlockHasher::new(&secret, &shape, b"a").common.0, *common.finalize().as_bytes());
    }
}
