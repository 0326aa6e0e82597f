//! Request traces of every format, cut at every byte and damaged at random: the reader returns a trace or an error.
#![cfg(feature = "trace")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/request_bytes.rs"]
mod body;

use body::request_bytes;
use proptest::prelude::*;

/// A few requests in each format.
const TRACES: [&str; 4] = [
    concat!(
        r#"{"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [7, 9, 8589934592]}"#,
        "\n",
        r#"{"timestamp": 3, "input_length": 513, "output_length": 5, "hash_ids": [7, 8]}"#,
        "\n",
    ),
    concat!(
        r#"{"id":"a","block_size":64,"hash_id_scope":"local","requests":[{"t":0.5,"in":130,"out":1,"hash_ids":[1,2]},"#,
        r#"{"t":1.0,"type":"subagent","requests":[{"t":9.0,"in":64,"out":1,"hash_ids":[1]}]}]}"#,
        "\n",
        r#"{"id":"b","block_size":64,"hash_id_scope":"local","requests":[{"t":0,"in":130,"out":1,"hash_ids":[1,2]}]}"#,
        "\n",
    ),
    concat!(
        r#"{"timestamp":"82","input_length":900,"output_length":1,"hash_ids":{"sys_prompt":[5],"#,
        r#""passages_ids":[1,1,2],"history":[],"web_search":[],"user_input":[9]},"session_id":"x"}"#,
        "\n",
    ),
    concat!(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n",
        "2023-11-16 18:17:03.9799600,4808,10\r\n",
        "2023-11-16 18:17:04.0319600,3180,8",
    ),
];

#[test]
fn a_trace_cut_anywhere_is_a_shorter_trace_or_an_error() {
    for trace in TRACES {
        assert!(request_bytes(trace.as_bytes(), false), "the control: the whole one is a trace: {trace}");
        let taken = (0..trace.len()).filter(|cut| request_bytes(&trace.as_bytes()[..*cut], false)).count();
        // Texts that end with a whole line, with or without its end, or inside the CSV's last number.
        assert!(taken <= 8, "{taken} cuts of {trace} were read as whole");
    }
}

proptest! {
    #[test]
    fn damage_makes_an_error_or_another_trace(
        which in 0..TRACES.len(),
        subagents: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..6),
    ) {
        let mut bytes = TRACES[which].as_bytes().to_vec();
        for (place, value, how) in changes {
            let place = place.index(bytes.len().max(1));
            match how {
                0 => bytes.insert(place.min(bytes.len()), value),
                1 if !bytes.is_empty() => drop(bytes.remove(place)),
                // A digit, a bracket or a comma reaches further than most bytes.
                _ if !bytes.is_empty() => bytes[place] = b"0123456789[]{},:\"\n-."[usize::from(value) % 20],
                _ => {}
            }
        }
        request_bytes(&bytes, subagents);
    }

    #[test]
    fn random_bytes_are_refused(noise in prop::collection::vec(any::<u8>(), 0..300)) {
        request_bytes(&noise, false);
    }
}
