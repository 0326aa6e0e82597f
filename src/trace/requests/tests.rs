//! Every format read, every contradiction refused at its place.

use super::*;

fn read(text: &str) -> Result<RequestTrace> {
    RequestTrace::from_bytes(text.as_bytes(), &Options::default())
}

/// The place of an error: its text, line, column.
fn fault(text: &str) -> (String, u64, u64) {
    let e = read(text).unwrap_err();
    assert_eq!(e.kind(), Kind::BadFormat, "{e}");
    (e.place().to_owned(), e.number("line").unwrap(), e.number("column").unwrap())
}

fn mooncake(time: u64, length: u32, ids: &str) -> String {
    format!(
        "{{\"timestamp\": {time}, \"input_length\": {length}, \"output_length\": 5, \"hash_ids\": {ids}}}\n"
    )
}

fn all(trace: &RequestTrace) -> Vec<Vec<u32>> {
    (0..trace.requests()).map(|i| trace.blocks(i).to_vec()).collect()
}

#[test]
fn mooncake_ids_become_dense_numbers() {
    let text = mooncake(0, 1025, "[7, 9, 18446744073709551615]") + "\n" + &mooncake(3, 513, "[ 7 ,8]");
    let packed = zstd::encode_all(text.as_bytes(), 1).unwrap();
    for bytes in [text.as_bytes(), &packed] {
        let trace = RequestTrace::from_bytes(bytes, &Options::default()).unwrap();
        assert_eq!((trace.format(), trace.block_tokens()), (Format::Mooncake, Some(512)));
        assert_eq!(all(&trace), [vec![0, 1, 2], vec![0, 3]]);
        assert_eq!((trace.distinct(), trace.input_tokens(0), trace.output_tokens(1)), (4, 1025, 5));
        assert_eq!((trace.tokens_of_run(0, 2), trace.tokens_of_run(0, 3)), (1024, 1025));
    }
}

#[test]
fn a_contradiction_is_named_with_line_and_column() {
    let good = mooncake(5, 512, "[1]");
    let column = |text: &str, what: &str| text.find(what).unwrap() as u64 + 1;
    let many = mooncake(5, 1024, "[10, 11, 12]");
    let place = ("more block ids than the length allows".to_owned(), 2, column(&many, "12]"));
    assert_eq!(fault(&(good.clone() + &many)), place);
    let twice = mooncake(5, 2000, "[10, 11, 10]");
    let place = ("the block id repeats inside the request".to_owned(), 2, column(&twice, "10]"));
    assert_eq!(fault(&(good.clone() + &twice)), place);
    let early = mooncake(4, 512, "[1]");
    let place = ("the timestamp is earlier than the one before".to_owned(), 2, column(&early, "4,"));
    assert_eq!(fault(&(good.clone() + &early)), place);
    let cut = &good[..good.len() - 6];
    assert_eq!(fault(&(good.clone() + cut)).0, "the trace ends in the middle of a line");
    assert_eq!(fault(&(good.clone() + cut)).1, 2);
    for ids in ["[-1]", "[1.5]", "[\"1\"]", "[[1]]", "[18446744073709551616]", "[null]"] {
        let text = mooncake(5, 512, ids);
        let (what, line, at) = fault(&text);
        assert!(what.starts_with("a block id is not a whole number"), "{what}");
        assert_eq!((line, at), (1, column(&text, ids) + 1));
    }
    assert_eq!(fault(&mooncake(1, 1, "3")).0, "the block ids are not a list");
    let (what, line, _) = fault(&(good.clone() + "{\"timestamp\": 9}\n"));
    assert_eq!((what.as_str(), line), ("missing field `input_length`", 2));
    assert_eq!(fault("{\"a\": 1}\n").1, 1);
    assert!(read("").unwrap_err().place().contains("no line"));
}

#[test]
fn a_gzip_and_a_cut_frame_are_refused() {
    let e = RequestTrace::from_bytes(&[0x1F, 0x8B, 8, 0, 0], &Options::default()).unwrap_err();
    assert_eq!(e.place(), "the file is gzip");
    let packed = zstd::encode_all(mooncake(0, 512, "[1]").repeat(50).as_bytes(), 1).unwrap();
    let e = RequestTrace::from_bytes(&packed[..packed.len() - 3], &Options::default()).unwrap_err();
    assert_eq!(e.kind(), Kind::BadFormat, "{e}");
}

/// A line without an end, in zeros.
#[test]
fn a_line_of_100_megabytes_is_refused() {
    let packed = zstd::encode_all(std::io::Read::take(std::io::repeat(b'1'), 100 << 20), 1).unwrap();
    let e = RequestTrace::from_bytes(&packed, &Options::default()).unwrap_err();
    assert_eq!((e.place(), e.number("line")), ("the line is too long", Some(1)));
    assert_eq!(e.number("column"), Some(LINE_MAX as u64 + 1));
}

const SESSIONS: &str = concat!(
    r#"{"id":"a","block_size":64,"hash_id_scope":"local","requests":[{"t":0.5,"in":130,"out":1,"hash_ids":[1,2]},"#,
    r#"{"t":1.0,"type":"subagent","requests":[{"t":9.0,"in":64,"out":1,"hash_ids":[1]},"#,
    r#"{"t":2.0,"in":64,"out":1,"hash_ids":[5]}]},{"t":2.0,"in":64,"out":3,"hash_ids":[1]}]}"#,
    "\n",
    r#"{"id":"b","block_size":64,"hash_id_scope":"local","requests":[{"t":0.0,"in":130,"out":1,"hash_ids":[1,2]}]}"#,
    "\n",
);

#[test]
fn ids_of_a_session_are_its_own_and_sub_agents_are_left_out_unless_asked_for() {
    let in_turn = Options { one_after_another: true, ..Options::default() };
    let trace = RequestTrace::from_bytes(SESSIONS.as_bytes(), &in_turn).unwrap();
    assert_eq!(
        (trace.format(), trace.block_tokens(), trace.interleaved()),
        (Format::Sessions, Some(64), false)
    );
    assert_eq!(all(&trace), [vec![0, 1], vec![], vec![0], vec![2, 3]]);
    let notes = Notes { sessions: 2, subagents: 1, subagent_requests: 2, ..Notes::default() };
    assert_eq!(trace.notes(), notes);
    let options = Options { subagents: true, ..in_turn };
    let trace = RequestTrace::from_bytes(SESSIONS.as_bytes(), &options).unwrap();
    assert_eq!(all(&trace), [vec![0, 1], vec![0], vec![2], vec![0], vec![3, 4]]);
    assert_eq!(trace.notes(), notes);
    let shared = read(&SESSIONS.replace("local", "global")).unwrap();
    assert_eq!(shared.distinct(), 2);
    let (what, line, column) =
        fault(&SESSIONS.replace("\"t\":2.0,\"in\":64,\"out\":3", "\"t\":0.7,\"in\":64,\"out\":3"));
    assert_eq!((what.as_str(), line), ("the timestamp is earlier than the one before", 1));
    assert_eq!(column, SESSIONS.find("2.0,\"in\":64,\"out\":3").unwrap() as u64 + 1);
}

/// Requests of sessions by hand: (0.0, b), (0.5, a), (1.0, a's sub-agent), (2.0, a).
#[test]
fn sessions_are_interleaved_by_their_times() {
    let trace = read(SESSIONS).unwrap();
    assert!(trace.interleaved());
    assert_eq!(all(&trace), [vec![0, 1], vec![2, 3], vec![], vec![2]]);
    assert_eq!((trace.references(), trace.distinct()), (&[0, 1, 2, 3, 2][..], 4));
    let lengths = |trace: &RequestTrace| {
        let of = |i| (trace.input_tokens(i), trace.output_tokens(i));
        (0..trace.requests()).map(of).collect::<Vec<_>>()
    };
    assert_eq!(lengths(&trace), [(130, 1), (130, 1), (0, 0), (64, 3)]);
    // A sub-agent's requests are ordered by their times, next to the requests after their element.
    let options = Options { subagents: true, ..Options::default() };
    let trace = RequestTrace::from_bytes(SESSIONS.as_bytes(), &options).unwrap();
    assert_eq!(all(&trace), [vec![0, 1], vec![2, 3], vec![4], vec![2], vec![2]]);
    // If all times are the same nothing follows from them: the file's order stays, and is reported.
    let alike = ["0.5", "1.0", "2.0", "0.0", "9.0"].iter();
    let alike = alike.fold(SESSIONS.to_owned(), |text, t| text.replace(&format!("\"t\":{t}"), "\"t\":3.0"));
    let trace = read(&alike).unwrap();
    assert!(!trace.interleaved());
    assert_eq!(all(&trace), [vec![0, 1], vec![], vec![0], vec![2, 3]]);
    // Other formats have no sessions to interleave.
    let e = RequestTrace::from_bytes(
        mooncake(0, 512, "[1]").as_bytes(),
        &Options { one_after_another: true, ..Options::default() },
    );
    assert!(e.unwrap_err().place().contains("--one-after-another"));
    assert!(!read(&(mooncake(0, 512, "[1]") + &mooncake(3, 512, "[2]"))).unwrap().interleaved());
}

#[test]
fn ragpulse_joins_five_lists_and_counts_repeats_and_late_requests() {
    let line = |time: &str, ids: &str| {
        let start =
            format!("{{\"timestamp\":\"{time}\",\"input_length\":900,\"output_length\":1,\"hash_ids\":");
        let before = format!("{start}{{\"sys_prompt\":[5],\"passages_ids\":{ids},\"history\":[8],");
        before + "\"web_search\":[],\"user_input\":[9]},\"session_id\":\"x\"}\n"
    };
    let text = line("82", "[1,1,2]") + &line("81", "[2]");
    let trace = read(&text).unwrap();
    assert_eq!((trace.format(), trace.block_tokens()), (Format::RagPulse, None));
    assert_eq!(all(&trace), [vec![0, 1, 1, 2, 3, 4], vec![0, 2, 3, 4]]);
    let notes = trace.notes();
    assert_eq!((notes.repeats, notes.repeating_requests, notes.late), (1, 1, 1));
    assert!(!trace.knows_block_lengths());
    assert_eq!(trace.tokens_of_run(0, 3), 0);
}

#[test]
fn azure_has_lengths_and_no_blocks() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
        .to_owned()
        + "2023-11-16 18:17:04.0,7,8";
    let trace = read(&text).unwrap();
    assert_eq!((trace.format(), trace.requests(), trace.distinct()), (Format::Azure, 2, 0));
    assert_eq!((trace.input_tokens(0), trace.output_tokens(1)), (4808, 8));
    assert_eq!(fault(&text.replace("04.0", "03.0")).1, 3);
    assert_eq!(fault(&text[..text.len() - 3]).0, "the trace ends in the middle of a line");
    for length in ["x", "+4808", "-1", "4294967296", ""] {
        let place = ("a length is not a whole number below 2^32".to_owned(), 2, 29);
        assert_eq!(fault(&text.replace("4808", length)), place);
    }
    let (what, line, column) = fault(&text.replace("11-16 18:17:04", "02-31 18:17:04"));
    assert!(what.starts_with("the timestamp is not") && (line, column) == (3, 1), "{what}");
    assert_eq!(fault(&text.replace("4808,", "4808,1,")).0, "the line has more than three fields");
    assert_eq!(fault(&text.replace("4808,10", "4808")).0, "the line has fewer than three fields");
    assert_eq!(fault(&text.replace("GeneratedTokens", "Other")).1, 1);
}

#[test]
fn content_before_or_after_the_requests_of_a_session_makes_no_difference() {
    let of = |text: &str| read(text).map(|trace| (all(&trace), trace.notes(), trace.distinct()));
    let moved = |scope: &str, first: &str| {
        let lines = SESSIONS.lines().map(|line| {
            let line = line.replace(r#""block_size":64,"hash_id_scope":"local","#, first);
            line.strip_suffix('}').unwrap().to_owned() + scope + "}\n"
        });
        lines.collect::<String>()
    };
    let (size, local, global) =
        (r#","block_size":64"#, r#","hash_id_scope":"local""#, r#","hash_id_scope":"global""#);
    let published = of(SESSIONS).unwrap();
    for (behind, before) in [
        (size.to_owned() + local, ""),
        (size.to_owned(), r#""hash_id_scope":"local","#),
        (local.to_owned(), r#""block_size":64,"#),
        (size.to_owned(), ""),
        (size.to_owned() + r#","hash_id_scope":null,"totals":{}"#, ""),
    ] {
        assert_eq!(of(&moved(&behind, before)).unwrap(), published, "{behind}");
    }
    assert_eq!(of(&moved(&(size.to_owned() + global), "")).unwrap().2, 2);
    assert_eq!(of(&moved(global, r#""block_size":64,"#)).unwrap().2, 2);
    // Errors name the same place in one pass and in two.
    for text in [SESSIONS.to_owned(), moved(size, "")] {
        for (from, to, what) in [
            ("\"hash_ids\":[5]", "\"hash_ids\":5", "the block ids are not a list"),
            ("\"hash_ids\":[5]", "\"x\":5", "a request without `hash_ids`"),
            ("{\"t\":2.0,\"in\":64,\"out\":1", "{\"t\":2.0,\"in\":-4,\"out\":1", "invalid value"),
        ] {
            let options = Options { subagents: true, ..Options::default() };
            let wrong = text.replace(from, to);
            let e = RequestTrace::from_bytes(wrong.as_bytes(), &options).unwrap_err();
            assert!(e.place().starts_with(what) && e.number("line") == Some(1), "{e}");
            // Near the change: a value, its request, or the number's end.
            let (at, column) = (wrong.find(to).unwrap() as i64, e.number("column").unwrap() as i64);
            assert!((at - 40..at + 30).contains(&column), "{what}: column {column}, changed at {at}");
        }
        assert_eq!(fault(&text.replace("\"requests\":[{\"t\":0.0", "\"requests\":3,\"x\":[{\"t\":0.0")).1, 2);
        assert_eq!(fault(text[..300].trim_end()).0, "the trace ends in the middle of a line");
    }
    assert!(fault(&moved("", "")).0.contains("missing field `block_size`"));
    assert!(fault(&moved(size, r#""block_size":64,"#)).0.contains("duplicate field `block_size`"));
    assert!(
        fault(&moved(r#","requests":[]"#, r#""block_size":64,"#)).0.contains("duplicate field `requests`")
    );
}

#[test]
fn a_byte_order_mark_is_passed_over() {
    let mark = "\u{FEFF}";
    let text = mooncake(0, 512, "[1]") + &mooncake(3, 512, "[1]");
    assert_eq!(read(&format!("{mark}{text}")).unwrap().requests(), 2);
    assert_eq!(
        read(&format!("{mark}TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,2\n"))
            .unwrap()
            .requests(),
        1
    );
    // Only at the file's beginning.
    assert_eq!(fault(&text.replace("\n{", &format!("\n{mark}{{"))).1, 2);
}

#[test]
fn the_hint_of_too_many_ids_names_an_option_that_helps() {
    let hint = |text: &str, options: &Options| {
        RequestTrace::from_bytes(text.as_bytes(), options).unwrap_err().to_string()
    };
    let many = mooncake(0, 512, "[1, 2]");
    let of = |tokens| Options { block_tokens: Some(tokens), ..Options::default() };
    assert!(hint(&many, &Options::default()).contains("pass --block-tokens"));
    assert!(!hint(&many, &of(512)).contains("--block-tokens"));
    let session = SESSIONS.replace("\"in\":130", "\"in\":13");
    assert!(!hint(&session, &Options::default()).contains("--block-tokens"));
    let said = many.replace("\"hash_ids\"", "\"block_size\": 512, \"hash_ids\"");
    assert!(!hint(&said, &Options::default()).contains("--block-tokens"));
}

#[test]
fn a_side_file_without_names_is_refused() {
    let path = std::env::temp_dir().join(format!("forebay-{}-side", std::process::id()));
    std::fs::write(&path, "\n \n").unwrap();
    let options = Options { piece_lengths: vec![path.clone()], ..Options::default() };
    let e = RequestTrace::from_bytes(b"", &options).unwrap_err();
    std::fs::remove_file(&path).unwrap();
    assert!(e.place().ends_with("-side: the side file names no piece"), "{e}");
}

#[test]
fn options_of_another_format_are_refused() {
    let options = Options { subagents: true, ..Options::default() };
    let e = RequestTrace::from_bytes(mooncake(0, 1, "[1]").as_bytes(), &options).unwrap_err();
    assert_eq!(e.kind(), Kind::InvalidConfig);
    let options = Options { block_tokens: Some(16), ..Options::default() };
    let trace = RequestTrace::from_bytes(mooncake(0, 33, "[1,2,3]").as_bytes(), &options).unwrap();
    assert_eq!((trace.block_tokens(), trace.tokens_of_run(0, 3)), (Some(16), 33));
}

#[test]
fn lines_that_say_their_block_size_agree() {
    let line = |time: u64, size: &str| {
        mooncake(time, 64, "[1, 2]").replace("\"hash_ids\"", &format!("{size}\"hash_ids\""))
    };
    let (small, large) = ("\"block_size\": 32, ", "\"block_size\": 64, ");
    assert_eq!(read(&(line(0, small) + &line(1, small))).unwrap().block_tokens(), Some(32));
    for other in [large, ""] {
        let (what, number, _) = fault(&(line(0, small) + &line(1, other)));
        assert!(what.starts_with("`block_size` is 0, or not that"), "{what}");
        assert_eq!(number, 2);
    }
    let (_, number, _) = fault(&(mooncake(0, 64, "[1]") + &line(1, small)));
    assert_eq!(number, 2);
    assert_eq!(fault(&line(0, "\"block_size\": 0, ")).1, 1);
    let of = |tokens| Options { block_tokens: Some(tokens), ..Options::default() };
    assert!(RequestTrace::from_bytes(line(0, small).as_bytes(), &of(32)).is_ok());
    assert_eq!(
        RequestTrace::from_bytes(line(0, small).as_bytes(), &of(16)).unwrap_err().number("line"),
        Some(1)
    );
}

#[test]
fn a_format_is_recognised_after_blank_lines() {
    let path = std::env::temp_dir().join(format!("forebay-{}-blank", std::process::id()));
    let line = mooncake(0, 512, "[1]");
    let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,2\n";
    for blank in ["", "\n", "\u{FEFF}", &"\n".repeat(70), &("\u{FEFF}".to_owned() + &" \r\n".repeat(50_000))]
    {
        for (text, told) in
            [(&line[..], Some(true)), (csv, Some(true)), ("TOPKTRC1", Some(false)), ("x", None)]
        {
            std::fs::write(&path, blank.to_owned() + text).unwrap();
            assert_eq!(is_request_trace(&path), Ok(told), "{text} after {} bytes", blank.len());
            let read = RequestTrace::read(&path, &Options::default());
            assert_eq!(read.is_ok(), told == Some(true), "{text} after {} bytes", blank.len());
        }
        std::fs::write(&path, blank).unwrap();
        assert_eq!(is_request_trace(&path), Ok(None));
        let e = RequestTrace::read(&path, &Options::default()).unwrap_err();
        assert!(e.to_string().contains("nothing was recorded"), "{e}");
    }
    std::fs::remove_file(&path).unwrap();
}

/// A small file that decompresses without end is refused by the bytes read so far.
#[test]
fn blank_lines_and_the_whole_content_have_a_limit() {
    let blanks = |count: u64| {
        let text = mooncake(0, 512, "[1]").into_bytes();
        let blank = std::io::Read::take(std::io::repeat(b'\n'), count);
        zstd::encode_all(std::io::Read::chain(&text[..], blank), 1).unwrap()
    };
    assert_eq!(RequestTrace::from_bytes(&blanks(1000), &Options::default()).unwrap().requests(), 1);
    let e = RequestTrace::from_bytes(&blanks(BLANK_MAX + 1), &Options::default()).unwrap_err();
    assert_eq!((e.place(), e.number("most")), ("too many blank lines", Some(BLANK_MAX)));

    let text = mooncake(0, 512, "[1]").repeat(10);
    let read = |most: u64| {
        let mut lines = Lines::within(Box::new(text.as_bytes()), most);
        let mut count = 0;
        while lines.next()?.is_some() {
            count += 1;
        }
        Ok(count)
    };
    let length = text.len() as u64;
    assert_eq!(read(length), Ok(10));
    let e: Error = read(length - 1).unwrap_err();
    assert_eq!(e.place(), "the trace is too long without its compression");
    assert_eq!((e.number("line"), e.number("most bytes")), (Some(10), Some(length - 1)));
}

#[test]
fn leading_blanks_are_read_up_to_a_limit() {
    let folder = std::env::temp_dir().join(format!("forebay-blanks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("blank.jsonl.zst");
    let blank = std::io::Read::take(std::io::repeat(b' '), LINE_MAX as u64 + (1 << 20));
    std::fs::write(&path, zstd::encode_all(blank, 1).unwrap()).unwrap();
    let e = is_request_trace(&path).unwrap_err();
    assert!(e.place().contains("begins with too many blanks"), "{e}");
    assert_eq!(e.number("most"), Some(LINE_MAX as u64));

    // A file that changes under its reader is an error too.
    let path = folder.join("changing.jsonl");
    std::fs::write(&path, mooncake(0, 512, "[1]")).unwrap();
    let read = |change: bool| {
        input::whole(&path, |input| {
            if change {
                std::fs::write(&path, mooncake(0, 512, "[1]").repeat(9)).unwrap();
            }
            stream(input, &Options::default(), HashMap::new(), &Ledger::new(&|_| Ok(())), &mut |_| Ok(()))
                .map(|whole| whole.distinct)
        })
    };
    assert_eq!(read(false), Ok(1));
    let e = read(true).unwrap_err();
    assert_eq!((e.kind(), e.place()), (Kind::Io, "the file was changed while it was read"));
    std::fs::remove_dir_all(&folder).unwrap();
}
