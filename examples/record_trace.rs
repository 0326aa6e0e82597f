//! Records the selections of a decode loop and the requests that arrived, and reads both again.
//!
//! Run it with `cargo run --example record_trace --features trace -- FOLDER`; `forebay replay` then reads the two files
//! there. Without a folder the example writes them to a temporary one and removes it again.

use forebay::trace::requests::{Arrival, Options, RequestTrace, RequestWriter};
use forebay::trace::{Frames, Recording, SelectionTrace, TraceWriter};

const LAYERS: u32 = 2;
const K: u32 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let named = std::env::args_os().nth(1).map(std::path::PathBuf::from);
    let temporary = std::env::temp_dir().join(format!("forebay-record-{}", std::process::id()));
    let folder = named.as_ref().unwrap_or(&temporary);
    std::fs::create_dir_all(folder)?;

    // One sequence per file. The last 32 positions of its prompt warm the pool in a replay.
    let path = folder.join("selections.topk.zst");
    let mut recording = Recording::default();
    recording.layers = LAYERS;
    recording.k = K;
    recording.first_position = 968;
    recording.decode_start = 1000;
    recording.label = "a window that wanders".to_owned();
    let mut writer = TraceWriter::create(&path, &recording, Frames::default())?;
    for position in 968..1200 {
        // The indexer's work, as a kernel emits it: [layers][k] positions in any order. Positions of drafts are
        // recorded once they are accepted.
        let entries: Vec<i32> = (0..LAYERS * K).map(|i| (position - (i * 7) % 448 - i / K) as i32).collect();
        writer.record(position, &entries)?;
        if position % 100 == 0 {
            writer.flush()?; // Flushed steps can be read again even if this process is killed now.
        }
    }
    println!("{} bytes of memory held, {} bytes written", writer.memory(), writer.file_bytes());
    writer.finish()?;
    let trace = SelectionTrace::read(&path)?;
    println!("{}: {} steps, {} positions", path.display(), trace.header().steps, trace.members());

    // Requests as Mooncake's lines: a conversation of turns, each with the blocks of all turns before it.
    let path = folder.join("requests.jsonl");
    let mut writer = RequestWriter::create(&path, 64)?;
    let blocks: Vec<u64> = (0..40).collect();
    for turn in 1..=10 {
        let prompt = blocks.get(..4 * turn).unwrap_or(&blocks);
        writer.record(&Arrival {
            milliseconds: 1500 * turn as u64,
            input_tokens: 64 * prompt.len() as u32,
            output_tokens: 100,
            blocks: prompt,
        })?;
    }
    writer.finish()?;
    let trace = RequestTrace::read(&path, &Options::default())?;
    println!("{}: {} requests, {} blocks", path.display(), trace.requests(), trace.references().len());
    if named.is_none() {
        std::fs::remove_dir_all(&temporary)?;
    }
    Ok(())
}
