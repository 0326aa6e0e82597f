//! The driver's API as functions, for tests that play the engine beside forebay: its streams, events,
//! captures and memory. Handles and device addresses are plain words.

use std::ffi::{c_char, c_void};

use crate::function;

/// What `cuMemCreate` makes: pinned memory of one device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct MemoryProperties {
    pub kind: i32,
    pub handle_types: i32,
    pub location: Location,
    pub metadata: u64,
    pub flags: [u8; 8],
}

/// A device, or the host.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

/// Who may do what in a mapped range.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Access {
    pub location: Location,
    pub flags: i32,
}

/// A host function of a stream.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

macro_rules! calls {
    ($($name:ident = $symbol:literal ($($arg:ident: $type:ty),*);)*) => {
        #[derive(Clone, Copy, Debug)]
        struct Table {
            $($name: unsafe extern "C" fn($($type),*) -> i32,)*
        }

        /// Functions of one driver, by the names of the driver's own without `cu`; each answers the
        /// driver's code, 0 for success.
        #[derive(Debug)]
        pub struct Calls {
            table: Table,
        }

        #[allow(missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Calls {
            /// # Safety
            /// `handle` is a stand-in library that stays open as long as the calls are used.
            pub(crate) unsafe fn of(handle: *mut c_void) -> Option<Self> {
                let table = Table {
                    // SAFETY: the library declares each function with these parameters.
                    $($name: unsafe { function(handle, $symbol)? },)*
                };
                Some(Calls { table })
            }

            $(
                // SAFETY: the caller's promise is the driver's own: pointers point at what they name.
                pub unsafe fn $name(&self, $($arg: $type),*) -> i32 {
                    // SAFETY: the caller's promise; the library is open.
                    unsafe { (self.table.$name)($($arg),*) }
                }
            )*
        }
    };
}

calls! {
    init = c"cuInit"(flags: u32);
    driver_get_version = c"cuDriverGetVersion"(version: *mut i32);
    device_get = c"cuDeviceGet"(device: *mut i32, ordinal: i32);
    device_get_count = c"cuDeviceGetCount"(count: *mut i32);
    device_get_attribute = c"cuDeviceGetAttribute"(value: *mut i32, attribute: i32, device: i32);
    primary_ctx_retain = c"cuDevicePrimaryCtxRetain"(context: *mut u64, device: i32);
    primary_ctx_release = c"cuDevicePrimaryCtxRelease_v2"(device: i32);
    ctx_get_current = c"cuCtxGetCurrent"(context: *mut u64);
    ctx_set_current = c"cuCtxSetCurrent"(context: u64);
    ctx_push_current = c"cuCtxPushCurrent_v2"(context: u64);
    ctx_pop_current = c"cuCtxPopCurrent_v2"(context: *mut u64);
    ctx_synchronize = c"cuCtxSynchronize"();
    mem_alloc = c"cuMemAlloc_v2"(address: *mut u64, bytes: usize);
    mem_free = c"cuMemFree_v2"(address: u64);
    mem_get_info = c"cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    mem_host_register = c"cuMemHostRegister_v2"(memory: u64, bytes: usize, flags: u32);
    mem_host_unregister = c"cuMemHostUnregister"(memory: u64);
    mem_host_get_device_pointer = c"cuMemHostGetDevicePointer_v2"(address: *mut u64, memory: u64, flags: u32);
    mem_host_alloc = c"cuMemHostAlloc"(memory: *mut u64, bytes: usize, flags: u32);
    mem_free_host = c"cuMemFreeHost"(memory: u64);
    pointer_get_attribute = c"cuPointerGetAttribute"(data: *mut c_void, attribute: i32, address: u64);
    memcpy_async = c"cuMemcpyAsync"(to: u64, from: u64, bytes: usize, stream: u64);
    memcpy_htod = c"cuMemcpyHtoD_v2"(to: u64, from: u64, bytes: usize);
    memcpy_dtoh = c"cuMemcpyDtoH_v2"(to: u64, from: u64, bytes: usize);
    memcpy_batch_async = c"cuMemcpyBatchAsync"(
        to: *mut u64, from: *mut u64, bytes: *mut usize, count: usize, attributes: *mut c_void,
        indices: *mut usize, attribute_count: usize, failed_at: *mut usize, stream: u64
    );
    memset_d8_async = c"cuMemsetD8Async"(to: u64, value: u8, count: usize, stream: u64);
    memset_d32_async = c"cuMemsetD32Async"(to: u64, value: u32, count: usize, stream: u64);
    mem_address_reserve = c"cuMemAddressReserve"(
        address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64
    );
    mem_address_free = c"cuMemAddressFree"(address: u64, bytes: usize);
    mem_create = c"cuMemCreate"(
        handle: *mut u64, bytes: usize, properties: *const MemoryProperties, flags: u64
    );
    mem_release = c"cuMemRelease"(handle: u64);
    mem_map = c"cuMemMap"(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    mem_unmap = c"cuMemUnmap"(address: u64, bytes: usize);
    mem_set_access = c"cuMemSetAccess"(address: u64, bytes: usize, access: *const Access, count: usize);
    mem_export = c"cuMemExportToShareableHandle"(shared: *mut c_void, handle: u64, kind: i32, flags: u64);
    mem_import = c"cuMemImportFromShareableHandle"(handle: *mut u64, shared: usize, kind: i32);
    mem_retain = c"cuMemRetainAllocationHandle"(handle: *mut u64, address: u64);
    stream_create = c"cuStreamCreate"(stream: *mut u64, flags: u32);
    stream_destroy = c"cuStreamDestroy_v2"(stream: u64);
    stream_query = c"cuStreamQuery"(stream: u64);
    stream_synchronize = c"cuStreamSynchronize"(stream: u64);
    stream_wait_event = c"cuStreamWaitEvent"(stream: u64, event: u64, flags: u32);
    event_create = c"cuEventCreate"(event: *mut u64, flags: u32);
    event_record = c"cuEventRecord"(event: u64, stream: u64);
    event_record_with_flags = c"cuEventRecordWithFlags"(event: u64, stream: u64, flags: u32);
    event_query = c"cuEventQuery"(event: u64);
    event_synchronize = c"cuEventSynchronize"(event: u64);
    event_destroy = c"cuEventDestroy_v2"(event: u64);
    event_elapsed_time = c"cuEventElapsedTime"(milliseconds: *mut f32, start: u64, end: u64);
    launch_host_func = c"cuLaunchHostFunc"(stream: u64, call: HostFunction, data: *mut c_void);
    module_load_data = c"cuModuleLoadData"(module: *mut u64, image: *const c_void);
    module_unload = c"cuModuleUnload"(module: u64);
    module_get_function = c"cuModuleGetFunction"(function: *mut u64, module: u64, name: *const c_char);
    func_get_attribute = c"cuFuncGetAttribute"(value: *mut i32, attribute: i32, function: u64);
    func_set_attribute = c"cuFuncSetAttribute"(function: u64, attribute: i32, value: i32);
    launch_kernel = c"cuLaunchKernel"(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: u64, params: *mut *mut c_void, extra: *mut *mut c_void
    );
    stream_begin_capture = c"cuStreamBeginCapture_v2"(stream: u64, mode: i32);
    stream_end_capture = c"cuStreamEndCapture"(stream: u64, graph: *mut u64);
    stream_is_capturing = c"cuStreamIsCapturing"(stream: u64, status: *mut i32);
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode"(mode: *mut i32);
    graph_instantiate = c"cuGraphInstantiateWithFlags"(exec: *mut u64, graph: u64, flags: u64);
    graph_launch = c"cuGraphLaunch"(exec: u64, stream: u64);
    graph_exec_destroy = c"cuGraphExecDestroy"(exec: u64);
    graph_destroy = c"cuGraphDestroy"(graph: u64);
    graph_get_nodes = c"cuGraphGetNodes"(graph: u64, nodes: *mut c_void, count: *mut usize);
    get_error_name = c"cuGetErrorName"(code: i32, name: *mut *const c_char);
    get_proc_address = c"cuGetProcAddress_v2"(
        name: *const c_char, address: *mut *mut c_void, version: i32, flags: u64, status: *mut i32
    );
}
