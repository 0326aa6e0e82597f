//! A scenario over the whole module, run once for each call it makes, with that call failing.

mod map;
mod region;
mod shared;

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use super::*;
use crate::sync::Arc;

const BYTES: u64 = 16 << 20;
/// Marks a child process of this test.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Takes one of every resource. `Err` as soon as a call fails.
fn scenario(faults: &dyn Faults) -> crate::error::Result<()> {
    let all = Request { bytes: BYTES, huge: true, populate: true, lock: true, node: Some(0), shared: true };
    let (map, _) = Map::new(&all, faults)?;
    let (private, _) = Map::new(&Request { shared: false, ..all }, faults)?;
    private.copy_in(0, &[1])?;
    let map = Arc::new(map);
    let half = BYTES / 2;
    let back = Piece { map: &map, offset: half, bytes: half };
    let front = Piece { map: &map, offset: 0, bytes: half };
    let range = Range::new(&[back, front, back], Protection::ReadWrite, faults)?;
    range.copy_in(0, &[1])?;
    let (a, b) = UnixStream::pair().unwrap();
    credentials(&a, faults)?;
    let exported = map.export(Protection::Read, faults)?;
    send(&a, b"a map", Some(exported.as_fd()), faults)?;
    wait(&[(b.as_fd(), false)], std::time::Duration::MAX, faults)?;
    let received = receive(&b, &mut [0; 16], faults)?.and_then(|received| received.descriptor);
    let adopted = Map::adopt(received.unwrap(), map.len(), Protection::Read, faults)?;
    let mut byte = [0];
    adopted.copy_out(half, &mut byte)?;
    assert_eq!(byte, [1]);
    random(&mut [0; 8], faults)?;
    // SAFETY: the mathematics library of the system.
    unsafe { Library::open("libm.so.6", faults) }?.symbol("cos", faults)?;
    let path = std::env::temp_dir().join(format!("forebay-scenario-{}", std::process::id()));
    let written = write_whole(&path, b"bytes", faults);
    let _ = fs::remove_file(&path);
    written
}

/// Open descriptors, mappings of ours, and pages of address space of this process.
fn held() -> (usize, usize, u64) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    (
        fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.lines().filter(|line| line.contains("/memfd:forebay")).count(),
        pages.split(' ').next().unwrap().parse().unwrap(),
    )
}

/// In a process of its own, because other tests open and map at the same time.
#[test]
fn nothing_is_held_after_any_failed_call() {
    let name = "os::tests::nothing_is_held_after_any_failed_call";
    if std::env::var_os(CHILD).is_none() {
        let exe = std::env::current_exe().unwrap();
        let run = Command::new(exe).args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && said.contains("1 passed"), "{said}{:?}", run.stderr);
        return;
    }
    let counted = Inject::nth(u64::MAX, 0);
    scenario(&counted).unwrap();
    let start = held();
    let mut failed = 0;
    for n in 0..counted.count() {
        for errno in [libc::EPERM, libc::ENOMEM, libc::EINVAL] {
            failed += u32::from(scenario(&Inject::nth(n, errno)).is_err());
            let now = held();
            assert_eq!((now.0, now.1), (start.0, start.1), "call {n}, errno {errno}");
            // The smallest thing that could leak is half a map; the allocator may grow by less.
            assert!((now.2 - start.2.min(now.2)) * page_size() < BYTES / 2, "call {n}, errno {errno}");
        }
    }
    // Most calls have no fallback: those of the second map, the range, the socket, library and file.
    assert!(failed > 30 && counted.count() > 20, "{failed} of {}", counted.count());
    // The control: a resource that is held is counted.
    let request = Request { bytes: 1, huge: false, populate: false, lock: false, node: None, shared: true };
    let kept = Map::new(&request, &NoFaults).unwrap();
    assert_eq!((held().0, held().1), (start.0 + 1, start.1 + 1));
    drop(kept);
}

#[test]
fn injection_counts_and_aims() {
    let each = Inject::call(Call::Lock, 7);
    let seen: Vec<_> = [Call::Map, Call::Lock, Call::Bind, Call::Lock].map(|call| each.before(call)).into();
    assert_eq!((seen, each.count()), (vec![None, Some(7), None, Some(7)], 4));
    let second = Inject::nth(1, 9);
    let seen: Vec<_> = [Call::Map, Call::Map, Call::Map].map(|call| second.before(call)).into();
    assert_eq!((seen, second.count()), (vec![None, Some(9), None], 3));
    assert_eq!(NoFaults.before(Call::Map), None);
}

#[test]
fn a_map_and_a_range_cross_threads() {
    fn crosses<T: Send + Sync + 'static>() {}
    crosses::<Map>();
    crosses::<Range>();
    crosses::<Library>();
}
