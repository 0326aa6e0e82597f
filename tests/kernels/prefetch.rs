//! The lines of a prefetch: each is asked for once, no other is, and none before its round.

use forebay_standin::{Launch, Memory};

/// Cycles of a nap on the stand-in, and of the looks at the clock around it.
const NAP: u64 = 110;

#[test]
fn each_line_is_asked_for_once_and_no_sooner_than_in_its_round() {
    for (blocks, threads, lines, cycles) in [
        (1, 32, 1, 0),
        (1, 32, 33, 100),
        (4, 128, 1000, 250),
        (3, 96, 700, 1000),
        (4, 64, 256, 7),
        (2, 32, 0, 9),
    ] {
        // A machine of its own, whose clock begins at 0.
        let Some(kernels) = crate::kernels() else { return };
        let memory = Memory::new(32 * lines);
        let first = memory.address();
        let args = [first as u32, (first >> 32) as u32, lines as u32, 0, cycles as u32, 0];
        let launch = Launch { grid: [blocks, 1, 1], threads, shared: 0, seed: u64::from(blocks) };
        assert!(kernels.run(c"forebay_prefetch", launch, &args));
        let mut asked = vec![None; lines];
        for [address, cycle] in kernels.asked() {
            let at = address - first;
            assert!(at.is_multiple_of(128) && asked[at as usize / 128].replace(cycle).is_none(), "{at}");
        }
        let asked: Vec<u64> = asked.into_iter().map(Option::unwrap).collect();
        assert!(asked.iter().all(|cycle| *cycle >= cycles), "{asked:?}");
        let round = (blocks * threads) as usize;
        // A thread counts its rounds from where it began. It sleeps past the first one's end by a nap at most.
        for (line, cycle) in asked.iter().enumerate() {
            let first = asked[line % round];
            assert!(cycle + NAP >= first + (line / round) as u64 * cycles, "{line}: {cycle}, {first}");
        }
        assert!(memory.is_fenced() && memory.read().iter().all(|word| *word == 0));
    }
}
