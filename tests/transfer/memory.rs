//! Where rows are in a sender's memory, against sums in wider numbers.

use forebay::Kind;
use forebay::os::{NoFaults, Request};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
use forebay::transfer::model::Draw;
use forebay::transfer::sender::Source;
use forebay::transfer::{End, Run};

const BYTES: u64 = 4096;

fn run(plane: u32, page: u32, (offset, stride): (u64, u64), (bytes, pieces): (u64, u32)) -> Run {
    let from = End { stage: 0, lane: 0, page, plane, offset, stride };
    Run {
        layer: 0,
        component: 0,
        chunk: 0,
        token: 0,
        tokens: 1,
        head: 0,
        heads: 1,
        from,
        to: from,
        bytes,
        pieces,
    }
}

/// Every byte that a run names, in numbers that do not overflow.
fn places(planes: &[Plane], origin: u64, run: &Run) -> Vec<u128> {
    let Some(plane) = planes.get(run.from.plane as usize) else { return vec![u128::MAX] };
    let page = u128::from(plane.page_bytes) * u128::from(run.from.page);
    let first = u128::from(origin) + u128::from(plane.offset) + page + u128::from(run.from.offset);
    let piece = |at: u32| first + u128::from(at) * u128::from(run.from.stride);
    (0..run.pieces).flat_map(|at| (0..run.bytes).map(move |byte| piece(at) + u128::from(byte))).collect()
}

#[test]
fn a_run_is_found_where_its_numbers_say_and_nowhere_outside_of_the_memory() {
    let mut draw = Draw::new(3);
    let (mut found, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let planes: Vec<Plane> =
            (0..2).map(|_| Plane { offset: draw.below(900), page_bytes: draw.below(500) }).collect();
        let request =
            Request { bytes: BYTES, huge: false, populate: false, lock: false, node: None, shared: false };
        // Numbers of all sizes: a receiver takes them from the wire.
        let mut number = |usual: u64| match draw.below(20) {
            0 => draw.next() >> draw.below(64),
            _ => draw.below(usual),
        };
        let origin = number(2000);
        let of = run(
            (number(20) / 9) as u32,
            number(5) as u32,
            (number(400), number(200)),
            (1 + number(40).min(60), 1 + (number(5) as u32).min(9)),
        );
        let places = places(&planes, origin, &of);
        let inside = places.iter().all(|place| *place < u128::from(BYTES));
        let first = Planes(planes.clone()).find(BYTES, origin, &of);
        assert_eq!(first.is_ok(), inside, "{planes:?} {origin} {of:?}");
        if !inside {
            refused += 1;
            assert_eq!(first.unwrap_err().kind(), Kind::OutOfRange);
            continue;
        }
        found += 1;
        if found % 20 == 0 {
            let (mut memory, _) = SendMemory::new(&request, Planes(planes), &NoFaults).unwrap();
            let bytes: Vec<u8> = (0..places.len()).map(|at| at as u8 | 1).collect();
            memory.write(origin, &of, &bytes).unwrap();
            let mut all = vec![0; BYTES as usize];
            memory.map().copy_out(0, &mut all).unwrap();
            let mut wanted = vec![0; BYTES as usize];
            places.iter().zip(&bytes).for_each(|(place, byte)| wanted[*place as usize] = *byte);
            assert!(all == wanted, "{of:?}");
            let (mut into, last) = (vec![0; bytes.len()], |place: &u128| all[*place as usize]);
            memory.read(origin, &of, &mut into).unwrap();
            assert_eq!(into, places.iter().map(last).collect::<Vec<_>>());
            let short = &mut vec![0; bytes.len() + 1];
            assert_eq!(memory.read(origin, &of, short).unwrap_err().kind(), Kind::OutOfRange);
        }
    }
    assert!(found > 2000 && refused > 2000, "{found} {refused}");
    // No piece at all is none.
    let none = Planes(vec![Plane { offset: 0, page_bytes: 8 }]);
    assert!(none.find(BYTES, 0, &run(0, 0, (0, 0), (8, 0))).is_err());
}
