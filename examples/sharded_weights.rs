//! Two ranks share the weights of six layers: each keeps half of every sharded layer, and pulls the other half while
//! earlier layers compute. The program prints what a rank holds and compares every use with the whole weights.
//!
//! Run it with `cargo run --example sharded_weights`. The ranks are threads here, each with a device of its own; the
//! same calls serve processes of a host, which meet in a folder (`Links::meet`).

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Faults, NoFaults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Patterns, Plan, Pulls, Ring, RingOptions, Sharding, Tensor, Windows};
use forebay::{Error, Kind, Result};

const RANKS: u32 = 2;
const LAYERS: usize = 6;
/// Bytes of one layer's output projection.
const BYTES: usize = 256 << 10;
const NAME: &str = "o_proj";

/// The weights of a layer, whole, as each rank would load them.
fn weights(layer: usize) -> Vec<u8> {
    (0..BYTES).map(|at| (at / 7 + 31 * layer) as u8).collect()
}

/// One rank: plan, windows, fill, share, and a step.
fn rank(rank: u32, socket: UnixStream) -> Result<String> {
    let host = HostDevice::new(HostOptions::default());
    let (device, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (host.clone(), Arc::new(NoFaults));
    let layers = vec![vec![Tensor { name: NAME.to_owned(), bytes: BYTES as u64, align: 256 }]; LAYERS];
    let sharding = Sharding { grain: device.granularity(), ..Sharding::new(Patterns::new(&[NAME])?) };
    let plan = Plan::new(&layers, Group { id: 0, rank, ranks: RANKS }, &sharding)?;
    let (held, saved) = (plan.bytes(), plan.bytes().saved(plan.whole()));

    // The engine has each tensor whole for a moment, and the windows keep this rank's part of it.
    let mut windows = Windows::new(&device, plan, Pulls::default(), &faults)?;
    let (stream, buffer) = (device.stream()?, device.allocate(BYTES as u64)?);
    for layer in 0..LAYERS {
        host.write(buffer, &weights(layer))?;
        windows.fill(layer, NAME, buffer, stream)?;
    }

    // The ranks say who they are, compare their plans, and give each other their parts.
    let hello = windows.hello([0; 32], stream)?;
    let mut links = Links::over(vec![socket], hello, Limits::default(), faults)?;
    windows.share(&mut links, stream, Duration::from_secs(30))?;

    // A step: the engine's work between `enter` and `leave` reads the layer's window. Behind `leave` come the experts.
    let mut ring = Ring::new(&device, windows, RingOptions::default())?;
    let compute = device.stream()?;
    let wrong = Arc::new(AtomicU64::new(0));
    for _ in 0..2 {
        ring.begin(1, 0)?;
        for layer in 0..LAYERS {
            ring.enter(layer, 0, compute)?;
            let (window, host, wrong) = (ring.pulls().tensor(layer, NAME)?, host.clone(), Arc::clone(&wrong));
            let project = move || {
                let mut read = vec![0; BYTES];
                let same = host.read(window, &mut read).is_ok() && read == weights(layer);
                wrong.fetch_add(u64::from(!same), Ordering::Relaxed);
            };
            device.call(compute, Arc::new(project))?;
            ring.leave(layer, 0, compute)?;
        }
        ring.end(compute)?;
    }
    let done = device.event()?;
    device.record(done, compute)?;
    device.synchronize(done)?;
    if wrong.load(Ordering::Relaxed) > 0 {
        return Err(Error::new(Kind::Corrupt, "example").at("a window showed other weights"));
    }
    links.end()?;
    while !links.is_over() {
        links.event(Duration::from_secs(1))?;
    }
    let buffers = held.buffers.iter().sum::<u64>();
    Ok(format!("{rank:>4} {:>9} {:>9} {buffers:>9} {saved:>9}", held.resident, held.shards))
}

/// What both ranks hold, as a table.
pub fn table() -> Result<String> {
    let failed = |_| Error::new(Kind::Io, "example").at("socketpair");
    let (a, b) = UnixStream::pair().map_err(failed)?;
    let mut table = format!("rank  resident     parts   buffers     saved   (bytes of {})\n", LAYERS * BYTES);
    thread::scope(|scope| {
        let ranks = [a, b].into_iter().zip(0..).map(|(socket, own)| scope.spawn(move || rank(own, socket)));
        for thread in ranks.collect::<Vec<_>>() {
            let line =
                thread.join().map_err(|_| Error::new(Kind::Internal, "example").at("a rank ended"))??;
            table.push_str(&line);
            table.push('\n');
        }
        Ok(table)
    })
}

/// Prints it.
pub fn main() -> Result<()> {
    print!("{}", table()?);
    Ok(())
}
