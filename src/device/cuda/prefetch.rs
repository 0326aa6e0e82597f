//! The launch of a prefetch: its lines, its blocks, and the cycles by which it keeps its rate.

use super::abi;

/// Blocks of a prefetch, and threads of a block. A multiprocessor asks L2 for about a line in each cycle, so four of
/// them are enough for any rate that leaves other work its own.
const BLOCKS: u32 = 4;
pub(super) const THREADS: u32 = 128;
/// Bytes of a line of L2.
const LINE: u64 = 128;

/// The blocks and the arguments that bring the lines of `bytes` bytes from `address` on into L2, at `rate` bytes per
/// second or fewer, by blocks of `threads` threads on multiprocessors of `khz` or fewer.
pub(super) fn launch(
    khz: u32,
    threads: u32,
    (address, bytes): (u64, u64),
    rate: u64,
) -> (u32, abi::PrefetchArgs) {
    let first = address - address % LINE;
    let lines = match bytes {
        0 => 0,
        _ => (address - first).saturating_add(bytes).div_ceil(LINE),
    };
    let blocks = lines.div_ceil(threads.max(1).into()).min(BLOCKS.into()) as u32;
    // What a round asks for takes so many cycles at that rate, a part of one counted as a whole.
    let round = u128::from(blocks) * u128::from(threads) * u128::from(LINE);
    let cycles = (round * u128::from(khz) * 1000).div_ceil(u128::from(rate.max(1)));
    (blocks, abi::PrefetchArgs { first, lines, cycles: u64::try_from(cycles).unwrap_or(u64::MAX) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_with_a_byte_of_the_range_is_asked_for_and_no_other() {
        for address in (4096..4096 + 2 * LINE).chain([u64::MAX - 10 * LINE]) {
            for bytes in (0..3 * LINE).step_by(7).chain([1, LINE, LINE + 1, 40_000]) {
                let Some(end) = address.checked_add(bytes) else { continue };
                let (blocks, args) = launch(1, 32, (address, bytes), 1);
                // A line is asked for if it has a byte at or behind the beginning, and one before the end.
                let near = (address / LINE).saturating_sub(1)..=end / LINE;
                let wanted: Vec<u64> = near
                    .filter(|line| line * LINE < end && (line + 1) * LINE > address && bytes > 0)
                    .collect();
                let asked: Vec<u64> = (0..args.lines).map(|line| args.first / LINE + line).collect();
                assert_eq!((asked, args.first % LINE), (wanted, 0), "{address} {bytes}");
                assert_eq!(blocks, [0, 1, 2, 3, 4][args.lines.div_ceil(32).min(4) as usize]);
            }
        }
    }

    /// By the end of any round no more bytes were asked for than the rate allows in its cycles, and with one cycle less
    /// in a round there would be.
    #[test]
    fn the_cycles_of_a_round_are_the_fewest_that_keep_the_rate() {
        for khz in [1, 1_410_000, 1_980_000, 4_000_000] {
            for threads in [32, 64, 128] {
                for bytes in [1, 5000, 1 << 20] {
                    for rate in [1, 999, 1_000_000_007, 500_000_000_000, u64::MAX] {
                        let (blocks, args) = launch(khz, threads, (4096, bytes), rate);
                        let round = u128::from(blocks) * u128::from(threads) * u128::from(LINE);
                        let keeps = |cycles: u64| {
                            // Bytes per round over seconds per round, against the rate.
                            round * u128::from(khz) * 1000 <= u128::from(rate) * u128::from(cycles)
                        };
                        assert!(
                            keeps(args.cycles) && !keeps(args.cycles - 1),
                            "{khz} {threads} {bytes} {rate}"
                        );
                    }
                }
            }
        }
        // As docs/kernels.md has it.
        let (blocks, args) = launch(1_980_000, 128, (0, 1 << 20), 500_000_000_000);
        assert_eq!((blocks, args.cycles), (4, 260));
    }
}
