//! The driver's API as functions, for tests that act as the engine alongside forebay: with its streams, events,
//! captures and memory. Handles and device addresses are plain words.

use std::ffi::{CStr, c_char, c_void};

/// The memory that `cuMemCreate` makes: pinned memory of one device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemoryProperties {
    /// 1: pinned.
    pub kind: i32,
    /// 1: exportable as a descriptor; 8: as a handle for other hosts of a fabric; 0: not exportable.
    pub handle_types: i32,
    /// The place of the memory.
    pub location: Location,
    /// 0.
    pub metadata: u64,
    /// Zeros.
    pub flags: [u8; 8],
}

/// A device, or the host.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// 1: a device.
    pub kind: i32,
    /// Its ordinal.
    pub id: i32,
}

/// The access of one device or the host to a mapped range.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// The device or the host that gets the access.
    pub location: Location,
    /// 0: nothing, 1: read, 3: read and write.
    pub flags: i32,
}

/// An end of a copy in two dimensions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyEnd {
    /// The first byte of a row.
    pub x: usize,
    /// The first row.
    pub y: usize,
    /// 1: the host's memory, at `host`; 2: the device's, or 4: any, at `address`; 3: an array.
    pub kind: u32,
    /// An address of the host.
    pub host: u64,
    /// An address of the device.
    pub address: u64,
    /// An array.
    pub array: u64,
    /// Bytes from row to row.
    pub pitch: usize,
}

/// A copy in two dimensions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy2d {
    /// Where it reads.
    pub from: CopyEnd,
    /// Where it writes.
    pub to: CopyEnd,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

/// A host function of a stream.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Returns the address of a symbol, as a function of the type that the field has.
///
/// # Safety
/// `handle` is open, and the symbol is a function of type `F`.
pub(crate) unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the handle is open, the name ends in a zero byte.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: a function of type F, of the size of a pointer, and not null.
    (!address.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

/// A name that ends in a zero byte.
fn symbol(name: &'static str) -> Option<&'static CStr> {
    CStr::from_bytes_with_nul(name.as_bytes()).ok()
}

/// Takes the place of a function that a driver lacks: returns the code for "not found".
///
/// # Safety
/// This function requires nothing of its caller.
unsafe extern "C" fn absent() -> i32 {
    500
}

macro_rules! calls {
    ($($name:ident = $symbol:literal ($($arg:ident: $type:ty),*);)*) => {
        #[derive(Clone, Copy, Debug)]
        struct Table {
            $($name: unsafe extern "C" fn($($type),*) -> i32,)*
        }

        /// The functions of one driver, named as the driver names them without `cu`; each returns the driver's code, 0
        /// for success.
        #[derive(Debug)]
        pub struct Calls {
            table: Table,
        }

        #[allow(clippy::too_many_arguments, reason = "they are the driver's")]
        impl Calls {
            /// # Safety
            /// `handle` is a stand-in library that stays open as long as the calls are used.
            pub(crate) unsafe fn of(handle: *mut c_void) -> Option<Self> {
                let table = Table {
                    // SAFETY: the library declares each function with these parameters.
                    $($name: unsafe { function(handle, symbol(concat!($symbol, "\0"))?)? },)*
                };
                Some(Calls { table })
            }

            /// Like [`Calls::of`], for a driver that may lack some functions: a missing one returns 500.
            ///
            /// # Safety
            /// `handle` is a driver's library that stays open as long as the calls are used.
            pub(crate) unsafe fn of_any(handle: *mut c_void) -> Option<Self> {
                let table = Table {
                    // SAFETY: NVIDIA's header declares each function with these parameters, and `absent` takes none
                    // of its arguments off the stack.
                    $($name: unsafe {
                        match function(handle, symbol(concat!($symbol, "\0"))?) {
                            Some(found) => found,
                            None => std::mem::transmute_copy(&(absent as unsafe extern "C" fn() -> i32)),
                        }
                    },)*
                };
                Some(Calls { table })
            }

            $(
                #[doc = concat!("`", $symbol, "`.")]
                ///
                /// # Safety
                /// As the driver requires: pointers point to what they name, for as long as the driver may use it.
                pub unsafe fn $name(&self, $($arg: $type),*) -> i32 {
                    // SAFETY: the caller's promise; the library is open.
                    unsafe { (self.table.$name)($($arg),*) }
                }
            )*
        }
    };
}

calls! {
    init = "cuInit"(flags: u32);
    driver_get_version = "cuDriverGetVersion"(version: *mut i32);
    device_get = "cuDeviceGet"(device: *mut i32, ordinal: i32);
    device_get_count = "cuDeviceGetCount"(count: *mut i32);
    device_get_attribute = "cuDeviceGetAttribute"(value: *mut i32, attribute: i32, device: i32);
    device_get_pci_bus_id = "cuDeviceGetPCIBusId"(text: *mut c_char, bytes: i32, device: i32);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut u64, device: i32);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(device: i32);
    ctx_get_current = "cuCtxGetCurrent"(context: *mut u64);
    ctx_set_current = "cuCtxSetCurrent"(context: u64);
    ctx_push_current = "cuCtxPushCurrent_v2"(context: u64);
    ctx_pop_current = "cuCtxPopCurrent_v2"(context: *mut u64);
    ctx_synchronize = "cuCtxSynchronize"();
    mem_alloc = "cuMemAlloc_v2"(address: *mut u64, bytes: usize);
    mem_free = "cuMemFree_v2"(address: u64);
    mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    mem_host_register = "cuMemHostRegister_v2"(memory: u64, bytes: usize, flags: u32);
    mem_host_unregister = "cuMemHostUnregister"(memory: u64);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"(address: *mut u64, memory: u64, flags: u32);
    mem_host_alloc = "cuMemHostAlloc"(memory: *mut u64, bytes: usize, flags: u32);
    mem_free_host = "cuMemFreeHost"(memory: u64);
    pointer_get_attribute = "cuPointerGetAttribute"(data: *mut c_void, attribute: i32, address: u64);
    memcpy_async = "cuMemcpyAsync"(to: u64, from: u64, bytes: usize, stream: u64);
    memcpy_2d_async = "cuMemcpy2DAsync_v2"(copy: *const Copy2d, stream: u64);
    memcpy_htod = "cuMemcpyHtoD_v2"(to: u64, from: u64, bytes: usize);
    memcpy_dtoh = "cuMemcpyDtoH_v2"(to: u64, from: u64, bytes: usize);
    memcpy_batch_async = "cuMemcpyBatchAsync"(
        to: *mut u64, from: *mut u64, bytes: *mut usize, count: usize, attributes: *mut c_void,
        indices: *mut usize, attribute_count: usize, failed_at: *mut usize, stream: u64
    );
    memset_d8_async = "cuMemsetD8Async"(to: u64, value: u8, count: usize, stream: u64);
    memset_d32_async = "cuMemsetD32Async"(to: u64, value: u32, count: usize, stream: u64);
    mem_address_reserve = "cuMemAddressReserve"(
        address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64
    );
    mem_address_free = "cuMemAddressFree"(address: u64, bytes: usize);
    mem_create = "cuMemCreate"(
        handle: *mut u64, bytes: usize, properties: *const MemoryProperties, flags: u64
    );
    mem_release = "cuMemRelease"(handle: u64);
    mem_map = "cuMemMap"(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    mem_unmap = "cuMemUnmap"(address: u64, bytes: usize);
    mem_set_access = "cuMemSetAccess"(address: u64, bytes: usize, access: *const Access, count: usize);
    mem_export = "cuMemExportToShareableHandle"(shared: *mut c_void, handle: u64, kind: i32, flags: u64);
    mem_import = "cuMemImportFromShareableHandle"(handle: *mut u64, shared: usize, kind: i32);
    mem_retain = "cuMemRetainAllocationHandle"(handle: *mut u64, address: u64);
    stream_create = "cuStreamCreate"(stream: *mut u64, flags: u32);
    stream_get_priority = "cuStreamGetPriority"(stream: u64, priority: *mut i32);
    stream_destroy = "cuStreamDestroy_v2"(stream: u64);
    stream_query = "cuStreamQuery"(stream: u64);
    stream_synchronize = "cuStreamSynchronize"(stream: u64);
    stream_wait_event = "cuStreamWaitEvent"(stream: u64, event: u64, flags: u32);
    stream_wait_value = "cuStreamWaitValue32_v2"(stream: u64, address: u64, value: u32, flags: u32);
    event_create = "cuEventCreate"(event: *mut u64, flags: u32);
    event_record = "cuEventRecord"(event: u64, stream: u64);
    event_record_with_flags = "cuEventRecordWithFlags"(event: u64, stream: u64, flags: u32);
    event_query = "cuEventQuery"(event: u64);
    event_synchronize = "cuEventSynchronize"(event: u64);
    event_destroy = "cuEventDestroy_v2"(event: u64);
    event_elapsed_time = "cuEventElapsedTime"(milliseconds: *mut f32, start: u64, end: u64);
    launch_host_func = "cuLaunchHostFunc"(stream: u64, call: HostFunction, data: *mut c_void);
    module_load_data = "cuModuleLoadData"(module: *mut u64, image: *const c_void);
    module_unload = "cuModuleUnload"(module: u64);
    module_get_function = "cuModuleGetFunction"(function: *mut u64, module: u64, name: *const c_char);
    func_get_attribute = "cuFuncGetAttribute"(value: *mut i32, attribute: i32, function: u64);
    func_set_attribute = "cuFuncSetAttribute"(function: u64, attribute: i32, value: i32);
    launch_kernel = "cuLaunchKernel"(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: u64, params: *mut *mut c_void, extra: *mut *mut c_void
    );
    stream_begin_capture = "cuStreamBeginCapture_v2"(stream: u64, mode: i32);
    stream_end_capture = "cuStreamEndCapture"(stream: u64, graph: *mut u64);
    stream_is_capturing = "cuStreamIsCapturing"(stream: u64, status: *mut i32);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut i32);
    graph_create = "cuGraphCreate"(graph: *mut u64, flags: u32);
    graph_conditional_handle_create = "cuGraphConditionalHandleCreate"(
        handle: *mut u64, graph: u64, context: u64, default_value: u32, flags: u32
    );
    graph_instantiate = "cuGraphInstantiateWithFlags"(exec: *mut u64, graph: u64, flags: u64);
    graph_launch = "cuGraphLaunch"(exec: u64, stream: u64);
    graph_exec_destroy = "cuGraphExecDestroy"(exec: u64);
    graph_destroy = "cuGraphDestroy"(graph: u64);
    graph_get_nodes = "cuGraphGetNodes"(graph: u64, nodes: *mut c_void, count: *mut usize);
    get_error_name = "cuGetErrorName"(code: i32, name: *mut *const c_char);
    get_proc_address = "cuGetProcAddress_v2"(
        name: *const c_char, address: *mut *mut c_void, version: i32, flags: u64, status: *mut i32
    );
}
