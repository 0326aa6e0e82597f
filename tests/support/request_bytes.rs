//! The body of the fuzz target `request_bytes`, which `tests/requests.rs` replays.

use forebay::Kind;
use forebay::trace::requests::{Format, Options, RequestTrace};

/// Any bytes are a request trace, or an error in one line that is not an internal one. A trace's blocks are dense, in
/// the order of first sight, and as many as its lengths allow. Returns whether it was a trace.
pub fn request_bytes(bytes: &[u8], subagents: bool) -> bool {
    let options = Options { subagents, ..Options::default() };
    let trace = match RequestTrace::from_bytes(bytes, &options) {
        Ok(trace) => trace,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains('\n'), "{text}");
            assert_ne!(error.kind(), Kind::Internal, "{text}");
            return false;
        }
    };
    let (mut seen, mut references) = (0, 0);
    for i in 0..trace.requests() {
        let blocks = trace.blocks(i);
        for (j, block) in blocks.iter().enumerate() {
            assert!(*block <= seen, "a block's number is not the next one");
            seen += u32::from(*block == seen);
            let again = blocks[..j].contains(block);
            assert!(!again || trace.format() == Format::RagPulse, "a block repeats in a request");
        }
        if let Some(tokens) = trace.block_tokens() {
            assert!(blocks.len() as u64 <= trace.input_tokens(i).div_ceil(u64::from(tokens)));
        }
        assert!(trace.tokens_of_run(i, blocks.len()) <= trace.input_tokens(i));
        references += blocks.len();
    }
    assert_eq!((seen, references), (trace.distinct(), trace.references().len()));
    true
}
