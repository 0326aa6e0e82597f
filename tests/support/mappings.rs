//! What every device does with physical memory that ranges map, another device imports, and that is mapped anew. The
//! oracle is a list of bytes, one for each granule: what a range shows is what its pieces' backings hold.

use forebay::device::{Backing, Device, Mapped, Slice};
use forebay::os::Protection;
use forebay::{Kind, Result};

/// A device, and its memory as it is now.
pub struct Sut<'a> {
    pub device: &'a dyn Device,
    pub read: &'a dyn Fn(Slice) -> Vec<u8>,
    pub write: &'a dyn Fn(Slice, &[u8]) -> Result<()>,
}

const RW: Protection = Protection::ReadWrite;

fn whole(backing: Backing, bytes: u64) -> Mapped {
    Mapped { backing, offset: 0, bytes }
}

impl Sut<'_> {
    fn grain(&self) -> u64 {
        self.device.granularity()
    }

    /// A backing of so many granules that holds `value` everywhere, and the range through which it was written.
    pub fn filled(&self, granules: u64, value: u8) -> Result<(Backing, Slice)> {
        let bytes = granules * self.grain();
        let backing = self.device.backing(bytes)?;
        let range = self.device.range(&[whole(backing, bytes)], RW)?;
        (self.write)(range, &vec![value; bytes as usize])?;
        Ok((backing, range))
    }

    /// The byte of each granule of a slice, all of whose bytes are equal.
    pub fn shows(&self, slice: Slice) -> Vec<u8> {
        let bytes = (self.read)(slice);
        let granules = bytes.chunks(self.grain() as usize);
        granules
            .map(|granule| {
                assert!(granule.iter().all(|byte| *byte == granule[0]), "a granule of several values");
                granule[0]
            })
            .collect()
    }

    fn kind(&self, result: Result<impl Sized>) -> (Kind, String) {
        let error = result.err().expect("a refusal");
        (error.kind(), error.place().to_owned())
    }
}

/// A window as sharded weights have it: own memory in the middle, a slot's around it; then other memory there.
pub fn a_range_keeps_its_addresses_when_it_maps_other_memory(sut: &Sut<'_>) {
    let (device, grain) = (sut.device, sut.grain());
    let piece = |backing| whole(backing, grain);
    let [(a, a_range), (own, _), (b, _)] = [1, 2, 3].map(|value| sut.filled(1, value).unwrap());
    let window = device.range(&[piece(a), piece(own), piece(b)], Protection::Read).unwrap();
    let other = device.range(&[piece(b), piece(a)], RW).unwrap();
    assert_eq!((sut.shows(window), sut.shows(other)), (vec![1, 2, 3], vec![3, 1]));
    let (resident, resident_range) = sut.filled(3, 9).unwrap();
    device.remap(window, &[whole(resident, 3 * grain)]).unwrap();
    assert_eq!((sut.shows(window), sut.shows(other)), (vec![9, 9, 9], vec![3, 1]));
    // The mapping is the memory itself, not a copy of it.
    (sut.write)(resident_range, &vec![8; 3 * grain as usize]).unwrap();
    assert_eq!(sut.shows(window), [8, 8, 8]);
    (sut.write)(a_range, &vec![5; grain as usize]).unwrap();
    device.remap(window, &[piece(b), piece(a), piece(own)]).unwrap();
    assert_eq!((sut.shows(window), sut.shows(other)), (vec![3, 5, 2], vec![3, 5]));
    // A part of a range, and from now on its borders.
    let part = window.part(grain, 2 * grain).unwrap();
    device.remap(part, &[piece(b), piece(b)]).unwrap();
    assert_eq!(sut.shows(window), [3, 3, 3]);
    device.remap(window.part(grain, grain).unwrap(), &[piece(a)]).unwrap();
    assert_eq!((sut.shows(window), sut.shows(part)), (vec![3, 5, 3], vec![5, 3]));
}

pub fn what_does_not_fit_is_refused_and_changes_nothing(sut: &Sut<'_>) {
    let (device, grain) = (sut.device, sut.grain());
    let piece = |backing| whole(backing, grain);
    let [(a, _), (b, _)] = [1, 2].map(|value| sut.filled(1, value).unwrap());
    let (long, _) = sut.filled(2, 7).unwrap();
    let range = device.range(&[whole(long, 2 * grain), piece(a)], RW).unwrap();
    let at = |offset, bytes| range.part(offset, bytes).unwrap();
    let foreign = forebay::device::host::HostDevice::new(forebay::device::host::HostOptions::default());
    let theirs = foreign.backing(foreign.granularity()).unwrap();
    let memory = device.allocate(grain).unwrap();
    let refusals = [
        (
            device.remap(at(0, grain), &[piece(b)]),
            Kind::OutOfRange,
            "a slice that does not end where its range's pieces do",
        ),
        (
            device.remap(at(grain, 2 * grain), &[piece(b), piece(b)]),
            Kind::OutOfRange,
            "a slice that does not end where its range's pieces do",
        ),
        (
            device.remap(at(2 * grain, grain), &[piece(b), piece(b)]),
            Kind::InvalidConfig,
            "pieces of another length",
        ),
        (device.remap(at(0, 2 * grain), &[piece(b)]), Kind::InvalidConfig, "pieces of another length"),
        (device.remap(memory, &[piece(b)]), Kind::OutOfRange, "a slice of no range"),
        (device.remap(range, &[]), Kind::InvalidConfig, "pieces"),
        (
            device.remap(at(2 * grain, grain), &[Mapped { offset: grain, ..piece(b) }]),
            Kind::OutOfRange,
            "piece of a backing",
        ),
        (
            device.remap(at(2 * grain, grain), &[Mapped { offset: 1, ..piece(b) }]),
            Kind::InvalidConfig,
            "page borders",
        ),
        (
            device.remap(at(2 * grain, grain), &[whole(theirs, grain)]),
            Kind::OutOfRange,
            "a backing of another device",
        ),
        (device.give_back(theirs), Kind::OutOfRange, "a backing of another device"),
        (device.export(theirs, RW).map(drop), Kind::OutOfRange, "a backing of another device"),
        (
            device.range(&[piece(a), Mapped { bytes: 0, ..piece(a) }], RW).map(drop),
            Kind::InvalidConfig,
            "page borders",
        ),
    ];
    for (result, kind, place) in refusals {
        assert_eq!(sut.kind(result), (kind, place.to_owned()));
    }
    assert_eq!(sut.shows(range), [7, 7, 1]);
}

pub fn memory_is_given_back_when_no_range_maps_it(sut: &Sut<'_>) {
    let (device, grain) = (sut.device, sut.grain());
    let piece = |backing| whole(backing, grain);
    let [(a, first), (b, second)] = [1, 2].map(|value| sut.filled(1, value).unwrap());
    let both = device.range(&[piece(a), piece(a), piece(b)], RW).unwrap();
    let busy = (Kind::Busy, "a backing that ranges map".to_owned());
    assert_eq!(sut.kind(device.give_back(a)), busy);
    device.remap(first, &[piece(b)]).unwrap();
    assert_eq!(device.give_back(a).unwrap_err().number("pieces"), Some(2));
    device.remap(both.part(0, grain).unwrap(), &[piece(b)]).unwrap();
    assert_eq!(sut.kind(device.give_back(a)), busy);
    device.remap(both.part(grain, grain).unwrap(), &[piece(b)]).unwrap();
    device.give_back(a).unwrap();
    assert_eq!(sut.shows(both), [2, 2, 2]);
    assert_eq!(sut.shows(second), [2]);
    for result in [
        device.give_back(a),
        device.range(&[piece(a)], RW).map(drop),
        device.remap(first, &[piece(a)]),
        device.export(a, RW).map(drop),
    ] {
        assert_eq!(sut.kind(result), (Kind::OutOfRange, "backing".to_owned()));
    }
    // One that no range ever mapped.
    device.give_back(device.backing(grain).unwrap()).unwrap();
}

/// Memory of `sut` that `other` may read: each side's rules, and that the memory outlives its owner's backing.
pub fn a_reader_imports_memory_that_stays(sut: &Sut<'_>, other: &Sut<'_>) {
    let (device, grain) = (sut.device, sut.grain());
    let (shared, range) = sut.filled(2, 4).unwrap();
    let descriptor = device.export(shared, Protection::Read).unwrap();
    let seen = other.device.import_backing(descriptor, 2 * grain, Protection::Read).unwrap();
    let window = other.device.range(&[whole(seen, 2 * grain)], Protection::Read).unwrap();
    assert_eq!(other.shows(window), [4, 4]);
    // The owner's ranges that were there before the export stay writable.
    (sut.write)(range, &vec![6; 2 * grain as usize]).unwrap();
    assert_eq!(other.shows(window), [6, 6]);
    let only_read = (Kind::InvalidState, "memory that may only be read".to_owned());
    assert_eq!(other.kind(other.device.range(&[whole(seen, grain)], RW)), only_read);
    assert_eq!(sut.kind(device.range(&[whole(shared, grain)], RW)), only_read);
    assert_eq!(other.kind(other.device.export(seen, RW)), only_read);
    let place = "memory that was exported with another protection".to_owned();
    assert_eq!(sut.kind(device.export(shared, RW)), (Kind::InvalidState, place));
    let read_only = (Kind::InvalidState, "memory that is mapped to be read only".to_owned());
    assert_eq!(window.protection(), Protection::Read);
    assert_eq!(other.kind((other.write)(window, &vec![0; 2 * grain as usize])), read_only);
    let (stream, from) = (other.device.stream().unwrap(), other.device.allocate(2 * grain).unwrap());
    assert_eq!(other.kind(other.device.copy(stream, from, window)), read_only);
    // The owner maps something else and gives the memory back: the importer keeps it.
    let (spare, _) = sut.filled(2, 0).unwrap();
    device.remap(range, &[whole(spare, 2 * grain)]).unwrap();
    device.give_back(shared).unwrap();
    assert_eq!(other.shows(window), [6, 6]);
    // Sizes are granules.
    let descriptor = device.export(spare, RW).unwrap();
    for bytes in [0, grain + 1] {
        let again = descriptor.try_clone().unwrap();
        assert_eq!(
            other.kind(other.device.import_backing(again, bytes, RW)),
            (Kind::InvalidConfig, "bytes".to_owned())
        );
    }
    let writable = other.device.import_backing(descriptor, 2 * grain, RW).unwrap();
    let both = other.device.range(&[whole(writable, 2 * grain)], RW).unwrap();
    (other.write)(both, &vec![3; 2 * grain as usize]).unwrap();
    assert_eq!(sut.shows(range), [3, 3]);
}
