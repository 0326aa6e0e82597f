//! Memory: limits, registrations, ranges, which bytes a copy may touch, and that no resource is left over.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use crate::support::{DEVICE_MEMORY, GRANULE, Gpu, code, made, seeded, standin};
use forebay_standin::{Copy2d, CopyEnd, MemoryProperties, Options, Resources};

const PAGE: usize = 4096;

/// Pages of this process, to register.
struct Pages(Vec<u8>);

impl Pages {
    fn new(pages: usize) -> Pages {
        Pages(vec![0; (pages + 1) * PAGE])
    }

    fn address(&self) -> u64 {
        (self.0.as_ptr() as u64).next_multiple_of(PAGE as u64)
    }
}

#[test]
fn memory_is_limited_and_is_freed() {
    let Some(standin) = standin(Options { memory: 8 << 20, ..Options::default() }) else { return };
    let gpu = Gpu::new(&standin);
    let first = gpu.memory(6 << 20);
    let mut address = 0;
    assert_eq!(code!(gpu, mem_alloc(&mut address, 3 << 20)), 2);
    let mut handle = 0;
    assert_eq!(code!(gpu, mem_create(&mut handle, 2 * GRANULE, &DEVICE_MEMORY, 0)), 2);
    let handle = gpu.handle(GRANULE);
    let (mut free, mut total) = (0, 0);
    assert_eq!(code!(gpu, mem_get_info(&mut free, &mut total)), 0);
    assert_eq!((free, total), (0, 8 << 20));
    assert_eq!((code!(gpu, mem_free(first)), code!(gpu, mem_release(handle))), (0, 0));
    gpu.memory(8 << 20);
    assert_eq!(code!(gpu, mem_alloc(&mut address, 0)), 1);
}

#[test]
fn fresh_memory_is_not_zero() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    assert_ne!(gpu.word(gpu.memory(PAGE)), 0);
}

#[test]
fn registrations_are_whole_pages_and_do_not_overlap() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let pages = Pages::new(4);
    let at = pages.address();
    assert_eq!(code!(gpu, mem_host_register(at + 8, PAGE, 3)), 1);
    assert_eq!(code!(gpu, mem_host_register(at, 100, 3)), 1);
    assert_eq!(code!(gpu, mem_host_register(at, 2 * PAGE, 3)), 0);
    assert_eq!(code!(gpu, mem_host_register(at + PAGE as u64, 2 * PAGE, 3)), 712);
    assert_eq!(code!(gpu, mem_host_register(at + 2 * PAGE as u64, 2 * PAGE, 3)), 0);
    let mapped = made!(gpu, mem_host_get_device_pointer(at + 100, 0));
    assert_eq!(mapped, at + 100);
    assert_eq!(code!(gpu, mem_host_unregister(at + PAGE as u64)), 713);
    assert_eq!(code!(gpu, mem_host_unregister(at)), 0);
    assert_eq!(code!(gpu, mem_host_unregister(at)), 713);
    assert_eq!(code!(gpu, mem_host_register(PAGE as u64, PAGE, 3)), 1, "nothing is mapped there");
}

#[test]
fn one_registration_may_be_limited() {
    let Some(standin) = standin(Options { registration: PAGE as u64, ..Options::default() }) else { return };
    let gpu = Gpu::new(&standin);
    let pages = Pages::new(2);
    assert_eq!(code!(gpu, mem_host_register(pages.address(), 2 * PAGE, 3)), 2);
    for page in 0..2 {
        assert_eq!(code!(gpu, mem_host_register(pages.address() + page * PAGE as u64, PAGE, 3)), 0);
    }
}

/// A shared mapping of one page.
struct Shared(*mut libc::c_void);

impl Shared {
    fn of(file: &impl AsRawFd) -> Shared {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the system's choice.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), PAGE, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        Shared(at)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: one page, mapped above.
        unsafe { libc::munmap(self.0, PAGE) };
    }
}

#[test]
fn shared_memory_is_registered_and_a_file_is_not() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("registered");
    let file =
        std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    // SAFETY: a name that ends in a zero byte; the descriptor is the caller's.
    let memory = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"pool".as_ptr(), 0)) };
    let memory = std::fs::File::from(memory);
    for (file, code) in [(&file, 1), (&memory, 0)] {
        file.set_len(PAGE as u64).unwrap();
        let shared = Shared::of(file);
        assert_eq!(code!(gpu, mem_host_register(shared.0 as u64, PAGE, 3)), code);
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_copy_lies_in_one_allocation_or_registration() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory, pages) = (gpu.stream(), gpu.memory(2 * PAGE), Pages::new(2));
    let at = pages.address();
    for page in 0..2 {
        assert_eq!(code!(gpu, mem_host_register(at + page * PAGE as u64, PAGE, 3)), 0);
    }
    gpu.copy(memory, at, PAGE, stream);
    assert_eq!(code!(gpu, memcpy_async(memory, at, PAGE + 4, stream)), 1, "two registrations");
    assert_eq!(code!(gpu, memcpy_async(at, memory, PAGE + 4, stream)), 1);
    assert_eq!(code!(gpu, memcpy_async(memory + 4, at, 2 * PAGE, stream)), 1, "beyond the allocation");
    assert_eq!(code!(gpu, memset_d8_async(memory, 0, 2 * PAGE + 1, stream)), 1);
    assert_eq!(code!(gpu, memset_d32_async(memory + 2, 0, 1, stream)), 1);
    assert_eq!(code!(gpu, memcpy_async(memory, 0, 4, stream)), 1);
    assert_eq!(code!(gpu, memcpy_async(memory, at, 4, 12345)), 400);
}

#[test]
fn a_copy_in_two_dimensions_copies_its_rows_and_lies_in_one_allocation_or_registration() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory, pages) = (gpu.stream(), gpu.memory(PAGE), Pages::new(2));
    let at = pages.address();
    for page in 0..2 {
        assert_eq!(code!(gpu, mem_host_register(at + page * PAGE as u64, PAGE, 3)), 0);
    }
    let bytes: Vec<u8> = (0..PAGE).map(|byte| (byte % 251) as u8).collect();
    assert!(standin.write(at, &bytes) && standin.write(memory, &[0; PAGE]));
    let end = |kind, address, pitch| CopyEnd { x: 0, y: 0, kind, host: address, address, array: 0, pitch };
    let copy = |from, to, width, height| {
        let copy = Copy2d { from, to, width, height };
        code!(gpu, memcpy_2d_async(&raw const copy, stream))
    };
    let mut wanted = vec![0; PAGE];
    let mut expect = |from: usize, pitch: usize, to: usize, to_pitch: usize, width: usize, height: usize| {
        for row in 0..height {
            let source = bytes[from + row * pitch..][..width].to_vec();
            wanted[to + row * to_pitch..][..width].copy_from_slice(&source);
        }
        let mut found = vec![1; PAGE];
        assert!(standin.read(memory, &mut found));
        assert_eq!(found, wanted);
    };
    assert_eq!(copy(end(4, at, 300), end(4, memory, 40), 40, 13), 0);
    expect(0, 300, 0, 40, 40, 13);
    let from = CopyEnd { x: 7, y: 2, ..end(1, at, 100) };
    assert_eq!(copy(from, CopyEnd { x: 1, y: 3, ..end(2, memory, 700) }, 93, 2), 0);
    expect(207, 100, 2101, 700, 93, 2);
    assert_eq!(
        (copy(end(4, at, 9), end(4, memory, 9), 9, 0), copy(end(4, at, 9), end(4, memory, 9), 0, 9)),
        (0, 0)
    );
    let apart = end(4, at + 4096 - 400, 300);
    assert_eq!(copy(apart, end(4, memory, 300), 100, 2), 0);
    expect(PAGE - 400, 300, 0, 300, 100, 2);
    assert_eq!(copy(apart, end(4, memory, 300), 100, 3), 1, "two registrations");
    assert_eq!(copy(end(4, at, 300), end(4, memory, 2000), 100, 3), 1, "beyond the allocation");
    assert_eq!(copy(end(4, at, 99), end(4, memory, 100), 100, 2), 1, "rows that overlap");
    assert_eq!(copy(end(4, at, 1 << 31), end(4, memory, 100), 100, 1), 1, "a longer row than a device takes");
    assert_eq!(copy(end(3, at, 100), end(4, memory, 100), 100, 1), 1, "an array");
    assert_eq!(code!(gpu, memcpy_2d_async(std::ptr::null(), stream)), 1);
    expect(0, 0, 0, 0, 0, 0);
}

/// Without a seed in the order of the lists, with one in any; each copy as it would be alone.
#[test]
fn a_batch_copies_in_any_order_and_each_copy_needs_attributes() {
    const COUNT: usize = 8;
    let mut orders = std::collections::BTreeSet::new();
    for seed in [None, Some(1), Some(2), Some(3)] {
        let Some(standin) = standin(Options { seed, ..Options::default() }) else { return };
        let gpu = Gpu::new(&standin);
        let (stream, memory) = (gpu.stream(), gpu.memory(PAGE));
        let bytes: Vec<u8> = (0..PAGE).map(|byte| (byte % 251) as u8).collect();
        assert!(standin.write(memory, &bytes));
        // All copies write the same byte, so that the last one shows.
        let mut from: Vec<u64> = (0..COUNT as u64).map(|copy| memory + copy).collect();
        let (mut to, mut sizes) = (vec![memory + 2048; COUNT], vec![1; COUNT]);
        let mut batch = |orders: [u64; 2], mut indices: [usize; 2], count, failed: *mut usize, stream| {
            let mut attributes = [[orders[0], 0, 0], [orders[1], 0, 0]];
            let lists = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr());
            let (attributes, indices) = (attributes.as_mut_ptr().cast(), indices.as_mut_ptr());
            code!(
                gpu,
                memcpy_batch_async(
                    lists.0, lists.1, lists.2, COUNT, attributes, indices, count, failed, stream
                )
            )
        };
        let mut failed = 0;
        for (orders, indices, count) in [
            ([0, 1], [0, 1], 2),
            ([1, 4], [0, 1], 2),
            ([1, 1], [1, 2], 2),
            ([1, 1], [0, 0], 2),
            ([1, 1], [0, COUNT], 2),
            ([1, 1], [0, 1], 0),
        ] {
            assert_eq!(batch(orders, indices, count, &mut failed, stream), 1, "{orders:?} {indices:?}");
        }
        assert_eq!(batch([1, 0], [0, 0], 1, std::ptr::null_mut(), stream), 1);
        assert_eq!(batch([1, 0], [0, 0], 1, &mut failed, 0), 400, "the legacy stream");
        assert_eq!(batch([1, 3], [0, 5], 2, &mut failed, stream), 0);
        assert_eq!(code!(gpu, stream_synchronize(stream)), 0);
        let mut last = [0];
        assert!(standin.read(memory + 2048, &mut last));
        assert!(seed.is_some() || last == [COUNT as u8 - 1], "{last:?}");
        orders.insert(last);
    }
    assert!(orders.len() > 1, "{orders:?}");
    let Some(standin) = standin(Options { batches: false, ..Options::default() }) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(PAGE));
    let (mut to, mut from, mut size, mut attributes) = ([memory], [memory + 64], [4], [1_u64, 0, 0]);
    let lists = (to.as_mut_ptr(), from.as_mut_ptr(), size.as_mut_ptr(), attributes.as_mut_ptr().cast());
    let (mut first, mut failed) = (0, 0);
    let code = code!(
        gpu,
        memcpy_batch_async(lists.0, lists.1, lists.2, 1, lists.3, &mut first, 1, &mut failed, stream)
    );
    assert_eq!(code, 801);
}

#[test]
fn a_copy_between_two_places_of_the_host_blocks_and_others_do_not() {
    let Some(standin) = standin(seeded(2)) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory, pages) = (gpu.stream(), gpu.memory(PAGE), Pages::new(1));
    let at = pages.address();
    assert_eq!(code!(gpu, mem_host_register(at, PAGE, 3)), 0);
    let before = standin.synchronizations();
    gpu.copy(memory, at, 64, stream);
    gpu.copy(at, memory, 64, stream);
    assert_eq!(standin.synchronizations(), before);
    gpu.copy(at + 64, at, 64, stream);
    assert_eq!(standin.synchronizations(), before + 1);
}

#[test]
fn freeing_first_runs_the_work_that_names_the_memory() {
    let Some(standin) = standin(seeded(7)) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, kept) = (gpu.stream(), gpu.memory(PAGE));
    for turn in 0..50 {
        let memory = gpu.memory(PAGE);
        gpu.fill(memory, turn, 1, stream);
        gpu.copy(kept, memory, 4, stream);
        assert_eq!(code!(gpu, mem_free(memory)), 0);
        assert_eq!(gpu.word(kept), turn);
        assert!(!standin.read(memory, &mut [0; 4]));
        assert_eq!(code!(gpu, mem_free(memory)), 1);
    }
}

#[test]
fn a_graph_that_names_freed_memory_fails() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, memory) = (gpu.stream(), gpu.memory(PAGE));
    let exec = gpu.exec(stream, || gpu.fill(memory, 1, 1, stream));
    assert_eq!(code!(gpu, graph_launch(exec, stream)), 0);
    assert_eq!(code!(gpu, mem_free(memory)), 0);
    let _other = made!(gpu, mem_host_alloc(PAGE, 0));
    let reserved = gpu.reserve(GRANULE);
    assert_eq!(code!(gpu, memset_d32_async(reserved, 1, 1, stream)), 1, "reserved, not mapped");
    let handle = gpu.handle(GRANULE);
    assert_eq!(code!(gpu, mem_map(reserved, GRANULE, 0, handle, 0)), 0);
    assert_eq!(gpu.open(reserved, GRANULE), 0);
    let exec = gpu.exec(stream, || gpu.fill(reserved, 1, 1, stream));
    assert_eq!(code!(gpu, mem_unmap(reserved, GRANULE)), 0);
    assert_eq!(code!(gpu, graph_launch(exec, stream)), 700);
    assert_eq!(code!(gpu, stream_query(stream)), 700);
}

#[test]
fn one_handle_is_mapped_at_two_addresses() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (range, handle, stream) = (gpu.reserve(2 * GRANULE), gpu.handle(GRANULE), gpu.stream());
    let second = range + GRANULE as u64;
    assert_eq!(code!(gpu, mem_map(range, GRANULE, 0, handle, 0)), 0);
    assert_eq!(gpu.open(range, 2 * GRANULE), 1, "half of it is not mapped");
    assert_eq!(code!(gpu, mem_map(range, GRANULE, 0, handle, 0)), 1, "mapped already");
    assert_eq!(code!(gpu, mem_map(second, GRANULE, 0, handle, 0)), 0);
    assert!(!standin.read(range, &mut [0; 4]), "no access before it is given");
    assert_eq!(code!(gpu, memset_d8_async(range, 1, 4, stream)), 1);
    assert_eq!(gpu.open(range, 2 * GRANULE), 0);
    gpu.fill(range, 9, 1, stream);
    assert_eq!(gpu.word(second), 9);
    gpu.fill(second - 4, 8, 2, stream);
    assert_eq!((gpu.word(second - 4), gpu.word(range)), (8, 8), "a fill over both pieces");
    let retained = made!(gpu, mem_retain(second));
    assert_eq!(retained, handle);
    assert_eq!(code!(gpu, mem_address_free(range, 2 * GRANULE)), 1, "still mapped");
    assert_eq!(code!(gpu, mem_unmap(range, GRANULE / 2)), 1);
    assert_eq!(code!(gpu, mem_release(handle)), 0);
    assert_eq!(code!(gpu, mem_release(handle)), 0, "it was retained");
    assert_eq!(code!(gpu, mem_release(handle)), 1);
    assert_eq!(gpu.word(range), 8, "a mapping keeps the memory");
    assert_eq!(code!(gpu, mem_unmap(range, 2 * GRANULE)), 0);
    assert_eq!(code!(gpu, mem_address_free(range, 2 * GRANULE)), 0);
    assert_eq!(standin.held_resources(), Resources { streams: 1, contexts: 1, ..Resources::default() });
}

#[test]
fn sizes_and_offsets_of_mappings_are_granules() {
    for (driver_version, code) in [(12080, 1), (13000, 0)] {
        let Some(standin) = standin(Options { driver_version, ..Options::default() }) else { return };
        let gpu = Gpu::new(&standin);
        let (range, handle) = (gpu.reserve(2 * GRANULE), gpu.handle(2 * GRANULE));
        let mut other = 0;
        assert_eq!(code!(gpu, mem_create(&mut other, PAGE, &DEVICE_MEMORY, 0)), 1);
        assert_eq!(code!(gpu, mem_address_reserve(&mut other, PAGE, 0, 0, 0)), 1);
        assert_eq!(code!(gpu, mem_map(range, PAGE, 0, handle, 0)), 1);
        assert_eq!(code!(gpu, mem_map(range, GRANULE, PAGE, handle, 0)), 1);
        assert_eq!(code!(gpu, mem_map(range, GRANULE, 2 * GRANULE, handle, 0)), 1);
        assert_eq!(code!(gpu, mem_map(range + 2 * GRANULE as u64, GRANULE, 0, handle, 0)), 1);
        assert_eq!(code!(gpu, mem_map(range, GRANULE, GRANULE, handle, 0)), code);
    }
}

#[test]
fn every_free_is_counted() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (memory, stream, event, module) = (gpu.memory(PAGE), gpu.stream(), gpu.event(), gpu.module());
    let (pages, host) = (Pages::new(1), made!(gpu, mem_host_alloc(PAGE, 0)));
    assert_eq!(code!(gpu, mem_host_register(pages.address(), PAGE, 3)), 0);
    let exec = gpu.exec(stream, || gpu.fill(memory, 1, 1, stream));
    let held = standin.held_resources();
    let all = Resources {
        allocations: 1,
        host_allocations: 1,
        registrations: 1,
        streams: 1,
        events: 1,
        execs: 1,
        modules: 1,
        contexts: 1,
        pinned: 2 * PAGE as u64,
        ..Resources::default()
    };
    assert_eq!(held, all);
    for code in [
        code!(gpu, mem_free(memory)),
        code!(gpu, mem_free_host(host)),
        code!(gpu, mem_host_unregister(pages.address())),
        code!(gpu, graph_exec_destroy(exec)),
        code!(gpu, module_unload(module)),
        code!(gpu, event_destroy(event)),
        code!(gpu, stream_destroy(stream)),
        code!(gpu, primary_ctx_release(0)),
    ] {
        assert_eq!(code, 0);
    }
    assert_eq!(standin.held_resources(), Resources::default());
}

/// Set if this test runs as the process that imports.
const IMPORTER: &str = "STANDIN_TEST_DESCRIPTOR";

#[test]
fn memory_crosses_into_another_process() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (range, stream) = (gpu.reserve(GRANULE), gpu.stream());
    if let Ok(descriptor) = std::env::var(IMPORTER) {
        let handle = made!(gpu, mem_import(descriptor.parse().unwrap(), 1));
        assert_eq!(code!(gpu, mem_map(range, GRANULE, 0, handle, 0)), 0);
        assert_eq!(gpu.open(range, GRANULE), 0);
        assert_eq!(gpu.word(range), 41);
        gpu.fill(range + 4, 42, 1, stream);
        return;
    }
    let handle = gpu.handle(GRANULE);
    assert_eq!(code!(gpu, mem_map(range, GRANULE, 0, handle, 0)), 0);
    assert_eq!(gpu.open(range, GRANULE), 0);
    gpu.fill(range, 41, 1, stream);
    let mut descriptor = 0i32;
    assert_eq!(code!(gpu, mem_export((&raw mut descriptor).cast(), handle, 1, 0)), 0);
    // SAFETY: the export made a descriptor for the caller.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // The child gets a copy that survives exec.
    // SAFETY: an open descriptor.
    let inherited = unsafe { OwnedFd::from_raw_fd(libc::dup(descriptor.as_raw_fd())) };
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::memory_crosses_into_another_process"])
        .env(IMPORTER, inherited.as_raw_fd().to_string())
        .status();
    assert!(child.unwrap().success());
    assert_eq!(gpu.word(range + 4), 42);
    let mut other = 0;
    assert_eq!(code!(gpu, mem_import(&mut other, 0, 1)), 1, "no memory of a driver");
}

#[test]
fn memory_for_a_fabric_is_exported_as_64_bytes_or_unavailable() {
    const FABRIC: i32 = 8;
    let properties = MemoryProperties { handle_types: FABRIC, ..DEVICE_MEMORY };
    for fabric in [true, false] {
        let Some(standin) = standin(Options { fabric, ..Options::default() }) else { return };
        let gpu = Gpu::new(&standin);
        let mut handle = 0;
        let made = code!(gpu, mem_create(&mut handle, GRANULE, &properties, 0));
        assert_eq!(made, if fabric { 0 } else { 800 });
        let mut advertised = 0;
        assert_eq!(code!(gpu, device_get_attribute(&mut advertised, 128, 0)), 0);
        assert_eq!(advertised, 1, "the device says so in any case");
        if !fabric {
            continue;
        }
        let mut shared = [0_u8; 80];
        assert_eq!(code!(gpu, mem_export(shared.as_mut_ptr().cast(), handle, 1, 0)), 1, "no descriptor");
        assert_eq!(code!(gpu, mem_export(shared.as_mut_ptr().cast(), handle, FABRIC, 0)), 0);
        assert!(shared[..64].iter().all(|byte| *byte != 0) && shared[64..].iter().all(|byte| *byte == 0));
        assert_eq!(code!(gpu, mem_release(handle)), 0);
    }
}

#[test]
fn a_device_has_a_place_on_the_bus() {
    let Some(standin) = standin(Options { devices: 2, ..Options::default() }) else { return };
    let gpu = Gpu::new(&standin);
    let mut text = [0; 16];
    assert_eq!(code!(gpu, device_get_pci_bus_id(text.as_mut_ptr(), 12, 0)), 1, "too short");
    assert_eq!(code!(gpu, device_get_pci_bus_id(text.as_mut_ptr(), 16, 2)), 101);
    assert_eq!(code!(gpu, device_get_pci_bus_id(text.as_mut_ptr(), 16, 1)), 0);
    // SAFETY: the driver ends its text with a zero.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) }, c"0000:3C:00.0");
}
