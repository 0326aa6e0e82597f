//! What every call checks before it does anything, and failures that a test plans.

use std::ffi::CStr;

use crate::support::{Add, Gpu, code, made, seeded, standin};
use forebay_standin::{Options, Resources};

#[test]
fn nothing_works_before_cu_init_and_without_a_context() {
    let Some(standin) = standin(Options::default()) else { return };
    let mut gpu = Gpu { standin: &standin, api: standin.api(), context: 0 };
    let (mut count, mut address, mut version) = (0, 0, 0);
    assert_eq!(code!(gpu, driver_get_version(&mut version)), 0);
    assert_eq!(version, 12080);
    assert_eq!(code!(gpu, device_get_count(&mut count)), 3);
    assert_eq!(code!(gpu, init(0)), 0);
    assert_eq!(code!(gpu, mem_alloc(&mut address, 4096)), 201);
    gpu.context = made!(gpu, primary_ctx_retain(0));
    assert_eq!(code!(gpu, mem_alloc(&mut address, 4096)), 201, "retained, not current");
    assert_eq!(code!(gpu, ctx_push_current(gpu.context)), 0);
    assert_eq!(code!(gpu, mem_alloc(&mut address, 4096)), 0);
    let elsewhere = || code!(gpu, mem_free(address));
    assert_eq!(std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()), 201, "of another thread");
    let popped = made!(gpu, ctx_pop_current());
    assert_eq!(popped, gpu.context);
    assert_eq!(code!(gpu, mem_free(address)), 201);
    assert_eq!(code!(gpu, ctx_pop_current(&mut gpu.context.clone())), 201);
    assert_eq!(code!(gpu, ctx_set_current(0x1234)), 201);
}

#[test]
fn a_context_that_is_retained_no_more_is_gone() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    assert_eq!(code!(gpu, primary_ctx_release(0)), 0);
    let mut address = 0;
    assert_eq!(code!(gpu, mem_alloc(&mut address, 4096)), 709);
    assert_eq!(code!(gpu, primary_ctx_release(0)), 201);
}

#[test]
fn drivers_that_cannot_be_used_say_why() {
    let cases = [
        (Options { stub: true, ..Options::default() }, 34),
        (Options { devices: 0, ..Options::default() }, 100),
    ];
    for (options, code) in cases {
        let Some(standin) = standin(options) else { return };
        let gpu = Gpu { standin: &standin, api: standin.api(), context: 0 };
        assert_eq!(code!(gpu, init(0)), code);
    }
}

#[test]
fn a_device_reports_the_properties_it_was_given() {
    let options = Options { capability: (7, 5), warp: 64, devices: 2, ..Options::default() };
    let Some(standin) = standin(options) else { return };
    let gpu = Gpu::new(&standin);
    let attribute = |which: i32| made!(gpu, device_get_attribute(which, 1));
    assert_eq!((attribute(75), attribute(76), attribute(10)), (7, 5, 64));
    assert_eq!(made!(gpu, device_get_count()), 2);
    assert_eq!(code!(gpu, device_get(&mut 0, 2)), 101);
    let mut module = 0;
    assert_eq!(
        code!(gpu, module_load_data(&mut module, c".version 8.0\n.target sm_80".as_ptr().cast())),
        209
    );
    assert_eq!(code!(gpu, module_load_data(&mut module, c"nonsense".as_ptr().cast())), 200);
}

#[test]
fn handles_that_are_unknown_or_stale_are_refused() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, event, module) = (gpu.stream(), gpu.event(), gpu.module());
    let function = gpu.function(module);
    assert_eq!(code!(gpu, stream_destroy(stream)), 0);
    assert_eq!(code!(gpu, event_destroy(event)), 0);
    assert_eq!(code!(gpu, module_unload(module)), 0);
    let good = gpu.stream();
    for code in [
        code!(gpu, stream_destroy(stream)),
        code!(gpu, stream_synchronize(stream)),
        code!(gpu, event_record(event, good)),
        code!(gpu, stream_wait_event(good, event, 0)),
        code!(gpu, event_query(event)),
        code!(gpu, stream_begin_capture(stream, 0)),
        gpu.add(function, Add { to: 0, from: 0, count: 0, value: 0 }, good),
    ] {
        assert_eq!(code, 400);
    }
    assert_eq!(code!(gpu, module_get_function(&mut 0, gpu.module(), c"no_kernel".as_ptr())), 500);
}

#[test]
fn launches_outside_the_bounds_are_refused() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let (stream, function) = (gpu.stream(), gpu.function(gpu.module()));
    let launch = |grid: u32, block: u32, shared: u32| {
        let mut args = Add { to: 0, from: 0, count: 0, value: 0 };
        let mut params = [(&raw mut args).cast()];
        code!(
            gpu,
            launch_kernel(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut()
            )
        )
    };
    assert_eq!(launch(1, 256, 48 << 10), 0);
    assert_eq!((launch(0, 32, 0), launch(1, 0, 0), launch(1, 2048, 0)), (1, 1, 1));
    assert_eq!(launch(1, 512, 0), 701, "more than the kernel was compiled for");
    assert_eq!(launch(1, 32, 64 << 10), 1);
    assert_eq!(code!(gpu, func_set_attribute(function, 8, 64 << 10)), 0);
    assert_eq!(launch(1, 32, 64 << 10), 0);
    assert_eq!(made!(gpu, func_get_attribute(0, function)), 256);
}

#[test]
fn the_call_that_is_to_fail_fails_alone_and_does_nothing() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let before = standin.calls();
    standin.fail_call(1, 2);
    gpu.stream();
    assert_eq!(standin.failed_call(), None);
    let mut address = 77;
    assert_eq!(code!(gpu, mem_alloc(&mut address, 4096)), 2);
    assert_eq!((address, standin.calls() - before), (77, 2));
    assert_eq!(standin.failed_call().as_deref(), Some("cuMemAlloc_v2"));
    assert_eq!(standin.held_resources().allocations, 0);
    gpu.memory(4096);
}

#[test]
fn an_operation_that_fails_ends_the_device_and_still_frees_its_memory() {
    for seed in 0..4 {
        let Some(standin) = standin(seeded(seed)) else { return };
        let gpu = Gpu::new(&standin);
        let (stream, event, memory) = (gpu.stream(), gpu.event(), gpu.memory(4096));
        gpu.fill(memory, 1, 1, stream);
        assert_eq!(code!(gpu, stream_synchronize(stream)), 0);
        standin.fail_operation(1, 719);
        let codes: Vec<i32> =
            (2..5).map(|value| code!(gpu, memset_d32_async(memory, value, 1, stream))).collect();
        assert!(codes.iter().all(|code| [0, 719].contains(code)));
        assert_eq!(code!(gpu, stream_synchronize(stream)), 719);
        assert_eq!(gpu.word(memory), 2, "the second of them failed, the third never ran");
        assert_eq!(code!(gpu, event_query(event)), 719);
        assert_eq!(code!(gpu, ctx_get_current(&mut 0)), 0);
        for code in [
            code!(gpu, mem_free(memory)),
            code!(gpu, event_destroy(event)),
            code!(gpu, stream_destroy(stream)),
            code!(gpu, primary_ctx_release(0)),
        ] {
            assert_eq!(code, 719);
        }
        assert_eq!(standin.held_resources(), Resources::default());
    }
}

#[test]
fn two_drivers_share_nothing() {
    let (Some(first), Some(second)) = (standin(Options::default()), standin(Options::default())) else {
        return;
    };
    let (one, two) = (Gpu::new(&first), Gpu::new(&second));
    one.memory(4096);
    first.fail_operation(0, 700);
    assert_eq!(code!(one, memset_d32_async(one.memory(64), 0, 1, one.stream())), 700);
    two.fill(two.memory(64), 0, 1, two.stream());
    assert_eq!((first.held_resources().allocations, second.held_resources().allocations), (2, 1));
}

#[test]
fn the_copy_of_the_library_is_removed_with_its_driver() {
    let Some(standin) = standin(Options::default()) else { return };
    let path = standin.library().to_owned();
    assert!(std::path::Path::new(&path).exists());
    drop(standin);
    assert!(!std::path::Path::new(&path).exists());
}

#[test]
fn names_of_errors_and_entries_are_the_drivers() {
    let Some(standin) = standin(Options::default()) else { return };
    let gpu = Gpu::new(&standin);
    let mut name = std::ptr::null();
    assert_eq!(code!(gpu, get_error_name(905, &mut name)), 0);
    // SAFETY: a literal of the library.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION");
    assert_eq!(code!(gpu, get_error_name(12345, &mut name)), 1);
    let (mut address, mut status) = (std::ptr::null_mut(), 0);
    assert_eq!(code!(gpu, get_proc_address(c"cuMemAlloc".as_ptr(), &mut address, 12080, 0, &mut status)), 0);
    assert!(!address.is_null());
    assert_eq!(code!(gpu, get_proc_address(c"cuNothing".as_ptr(), &mut address, 12080, 0, &mut status)), 500);
    assert!(address.is_null() && status == 1);
}

#[test]
fn cubins_load_on_the_devices_that_they_were_made_for_and_have_their_kernels() {
    let built = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/device/cuda/kernels/built");
    for (name, made_for) in [("sm80", (8, 0)), ("sm90", (9, 0)), ("sm100", (10, 0)), ("sm120", (12, 0))] {
        let image = std::fs::read(built.join(format!("forebay_{name}.cubin"))).unwrap();
        for capability in [(8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)] {
            let Some(standin) = standin(Options { capability, ..Options::default() }) else { return };
            let gpu = Gpu::new(&standin);
            let mut module = 0;
            let loaded = code!(gpu, module_load_data(&mut module, image.as_ptr().cast()));
            assert_eq!(loaded, if capability.0 == made_for.0 { 0 } else { 209 }, "{name} on {capability:?}");
            if loaded != 0 {
                continue;
            }
            let find = |name: &CStr| code!(gpu, module_get_function(&mut 0, module, name.as_ptr()));
            assert_eq!((find(c"forebay_commit"), find(c"forebay_gather"), find(c"forebay_copy")), (0, 0, 0));
            assert_eq!((find(c"forebay"), find(c"standin_add")), (500, 500), "not in the image");
        }
    }
}
