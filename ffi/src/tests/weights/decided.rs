//! Errors behind the decision of an update: the outcome says that the ranks have decided.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::*;

/// The border, by a number that no other test has: it names the memory of its decision.
const STEP: u64 = 0x0_5eed_de05;
/// What a rank writes behind the decision when it is ready for a border.
const READY: u64 = 1 << 63;
const STRANGE: u64 = 0x0505_0505_0505_0505;

/// Overwrites the decision that rank 0 waits for, as another process does that maps it too.
fn overwrite_the_decision() {
    let memory = File::options().read(true).write(true).open("/proc/self/mem").unwrap();
    let until = Instant::now() + Duration::from_millis(SOON.into());
    while Instant::now() < until {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let shared = maps.lines().filter(|line| line.contains(" rw-s "));
        for start in shared.filter_map(|line| u64::from_str_radix(line.split_once('-')?.0, 16).ok()) {
            let mut words = [0; 16];
            // Other tests unmap theirs meanwhile: then nothing can be read.
            let is_read = memory.read_exact_at(&mut words, start).is_ok();
            let word = |at: usize| u64::from_ne_bytes(words[8 * at..][..8].try_into().unwrap());
            if is_read && (word(0), word(1)) == (0, READY | STEP) {
                memory.write_all_at(&STRANGE.to_ne_bytes(), start).unwrap();
                return;
            }
        }
        thread::yield_now();
    }
    panic!("rank 0 waits for no decision");
}

#[test]
fn a_commit_whose_decision_another_process_overwrote_has_failed_and_its_layers_are_lost() {
    let folder = Folder::new();
    both(|number| {
        let mut rank = Rank::shared(&folder, number);
        let update = rank.update(3, &[4, 1]);
        assert_eq!(rank.share_update(update), FbOk, "{}", text_of(update));
        if number == 1 {
            overwrite_the_decision();
            // Until rank 0 has ended, so that it loses no rank meanwhile.
            assert_eq!(rank.event(SOON).0.kind, FB_LINKS_LOST);
        } else {
            let commit = || {
                let (weights, links, mut outcome, mut reason) = (rank.weights, rank.links, 77, [0x33; 64]);
                let (out, text, bytes) = (&raw mut outcome, reason.as_mut_ptr(), reason.len());
                // SAFETY: room for the outcome and the reason; no work uses a window.
                let status = unsafe {
                    fb_weights_commit(weights, update, links, STEP, null_mut(), SOON, out, text, bytes)
                };
                (status, outcome)
            };
            assert_eq!(commit(), (FbCorrupt, FB_UPDATE_FAILED));
            let said = text_of(rank.weights);
            assert!(said.contains(&STRANGE.to_string()), "{said}");
            for layer in 0..MODEL {
                let mut found = sized();
                // SAFETY: it states its size.
                let status = unsafe { fb_weights_layer(rank.weights, layer, &raw mut found) };
                assert_eq!(status, if [4, 1].contains(&layer) { FbCorrupt } else { FbOk }, "layer {layer}");
            }
            assert_eq!(rank.begin(), FbCorrupt);
            // The control: an error of a call in which nothing was decided.
            assert_eq!(commit(), (FbInvalidState, FB_UPDATE_OPEN));
        }
        // SAFETY: nothing is passed.
        assert_eq!(unsafe { fb_update_destroy(update) }, FbOk);
        rank.destroy();
    });
}
