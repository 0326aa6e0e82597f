//! The body of the fuzz target `side_bytes`, which `tests/transfer.rs` replays.

use forebay::transfer::{Of, Plan, Request, Side};
use forebay::{Error, Kind};

/// Reads any bytes as a side. What is a side is the same again from its own bytes, and is paired with itself, or
/// refused by its field; a short request's runs stay inside their pages. Returns the error.
pub fn side_bytes(bytes: &[u8]) -> Option<Error> {
    let side = match Side::decode(bytes) {
        Ok(side) => side,
        Err(error) => {
            assert!(matches!(error.kind(), Kind::BadFormat | Kind::BadVersion), "{error}");
            return Some(error);
        }
    };
    let plan = match Plan::new(&side, &side) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(matches!(error.kind(), Kind::InvalidConfig | Kind::Unsupported), "{error}");
            return Some(error);
        }
    };
    assert_eq!(side.encode().as_deref(), Ok(bytes));
    let request = Request { tokens: 3, replicas: [0, side.replicas - 1], chunks: &[] };
    for layer in plan.layers().take(2) {
        let mut visits = 0;
        let visited = plan.runs(&request, (layer, 0..3), Of::Receiver(0, 0), |run| {
            for (end, stages) in [(run.from, &side.stages), (run.to, &side.stages)] {
                let last = end.offset + u64::from(run.pieces - 1) * end.stride + run.bytes;
                assert!(last <= stages[end.stage as usize].page_bytes[end.plane as usize]);
            }
            visits += 1;
            if visits > 1000 { Err(Error::new(Kind::Exhausted, "test")) } else { Ok(()) }
        });
        assert!(visited.is_ok() || visits > 1000);
    }
    None
}
