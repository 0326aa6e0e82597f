// Devices, contexts, versions, and the names of errors.

#include <cstdio>
#include <cstring>
#include <unistd.h>

#include "state.h"

namespace driver {

thread_local Thread thread;

Device* current() { return thread.depth ? thread.contexts[thread.depth - 1] : nullptr; }

uint64_t thread_number() { return static_cast<uint64_t>(gettid()); }

namespace {

Device* device_of(const void* context) {
    for (auto& device : gpu.devices) {
        if (device.get() == context) return device.get();
    }
    return nullptr;
}

bool has(CUdevice ordinal) { return ordinal >= 0 && static_cast<size_t>(ordinal) < gpu.devices.size(); }

struct Attribute {
    CUdevice_attribute attribute;
    int value;
};

// Values of the first device; the other devices get theirs from it.
constexpr int FIRST_BUS = 0x3B;

// An H100's values, where forebay asks for them.
const Attribute ATTRIBUTES[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7FFFFFFF},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, FIRST_BUS},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1 << 10},
    // Always 1: some drivers report support and then fail to create such a handle.
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1},
};

int attribute(CUdevice_attribute wanted) {
    if (wanted == CU_DEVICE_ATTRIBUTE_WARP_SIZE) return static_cast<int>(gpu.options.warp);
    if (wanted == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) return static_cast<int>(gpu.options.processors);
    if (wanted == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) return static_cast<int>(gpu.options.major);
    if (wanted == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) return static_cast<int>(gpu.options.minor);
    if (wanted == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
        return static_cast<int>(gpu.options.descriptors);
    }
    if (wanted == CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) return gpu.options.l2 ? 50 << 20 : 0;
    // The GPU is on the host's last NUMA node.
    if (wanted == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID) return static_cast<int>(gpu.options.nodes) - 1;
    if (wanted == CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        return static_cast<int>(gpu.options.host_memory);
    }
    for (const Attribute& known : ATTRIBUTES) {
        if (known.attribute == wanted) return known.value;
    }
    return 0;
}

struct ErrorText {
    CUresult code;
    const char *name, *text;
};

#define ERROR(name, text) {name, #name, text}
const ErrorText ERRORS[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "the provided PTX was compiled with an unsupported toolchain."),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef ERROR

const ErrorText* error_text(CUresult code) {
    for (const ErrorText& error : ERRORS) {
        if (error.code == code) return &error;
    }
    return nullptr;
}

}  // namespace
}  // namespace driver

using namespace driver;

CUresult cuInit(unsigned flags) {
    return enter("cuInit", 0, [&] {
        if (flags) return CUDA_ERROR_INVALID_VALUE;
        if (gpu.options.devices == 0) return CUDA_ERROR_NO_DEVICE;
        while (gpu.devices.size() < gpu.options.devices) {
            gpu.devices.push_back(std::make_unique<Device>(Device{static_cast<int>(gpu.devices.size())}));
        }
        gpu.initialized = true;
        return CUDA_SUCCESS;
    });
}

CUresult cuDriverGetVersion(int* version) {
    return enter("cuDriverGetVersion", THREAD_ONLY, [&] {
        if (!version) return CUDA_ERROR_INVALID_VALUE;
        *version = static_cast<int>(gpu.options.driver_version);
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return enter("cuDeviceGet", INITIALIZED, [&] {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        if (!has(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
        *device = ordinal;
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetCount(int* count) {
    return enter("cuDeviceGetCount", INITIALIZED, [&] {
        if (!count) return CUDA_ERROR_INVALID_VALUE;
        *count = static_cast<int>(gpu.devices.size());
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    return enter("cuDeviceGetName", INITIALIZED, [&] {
        if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        strncpy(name, "stand-in", static_cast<size_t>(length));
        name[length - 1] = 0;
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
    return enter("cuDeviceGetPCIBusId", INITIALIZED, [&] {
        if (!text || length < 13) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", FIRST_BUS + device);
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    return enter("cuDeviceGetUuid_v2", INITIALIZED, [&] {
        if (!uuid) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        memset(uuid->bytes, device + 1, sizeof uuid->bytes);
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    return enter("cuDeviceTotalMem_v2", INITIALIZED, [&] {
        if (!bytes) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        *bytes = gpu.options.memory;
        return CUDA_SUCCESS;
    });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute wanted, CUdevice device) {
    return enter("cuDeviceGetAttribute", INITIALIZED, [&] {
        if (!value || wanted < 1 || wanted > CU_DEVICE_ATTRIBUTE_LAST) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        // A driver does not know attributes that later versions added.
        unsigned since = wanted >= CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 12090
                         : wanted >= CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID                              ? HOST_MEMORY_FROM
                                                                                                   : 0;
        if (gpu.options.driver_version < since) return CUDA_ERROR_INVALID_VALUE;
        *value = attribute(wanted);
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return enter("cuDevicePrimaryCtxRetain", INITIALIZED, [&] {
        if (!context) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        ++gpu.devices[static_cast<size_t>(device)]->retained;
        *context = reinterpret_cast<CUcontext>(gpu.devices[static_cast<size_t>(device)].get());
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return enter("cuDevicePrimaryCtxRelease_v2", INITIALIZED | GIVES_BACK, [&] {
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        Device* released = gpu.devices[static_cast<size_t>(device)].get();
        if (released->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        if (--released->retained) return CUDA_SUCCESS;
        // The context is gone, and with it the memory registered in it.
        for (auto& [begin, span] : gpu.spans) {
            if (span.kind == Span::Registered && span.maker == released) span.orphaned = true;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    return enter("cuDevicePrimaryCtxGetState", INITIALIZED, [&] {
        if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
        if (!has(device)) return CUDA_ERROR_INVALID_DEVICE;
        *flags = 0;
        *active = gpu.devices[static_cast<size_t>(device)]->retained != 0;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    return enter("cuCtxGetCurrent", INITIALIZED | THREAD_ONLY, [&] {
        if (!context) return CUDA_ERROR_INVALID_VALUE;
        *context = reinterpret_cast<CUcontext>(current());
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return enter("cuCtxSetCurrent", INITIALIZED | THREAD_ONLY, [&] {
        if (!context) {
            if (thread.depth) --thread.depth;
            return CUDA_SUCCESS;
        }
        Device* device = device_of(context);
        if (!device) return CUDA_ERROR_INVALID_CONTEXT;
        if (!thread.depth) thread.depth = 1;
        thread.contexts[thread.depth - 1] = device;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return enter("cuCtxPushCurrent_v2", INITIALIZED | THREAD_ONLY, [&] {
        Device* device = device_of(context);
        if (!device) return CUDA_ERROR_INVALID_CONTEXT;
        if (thread.depth == Thread::MOST) return CUDA_ERROR_OUT_OF_MEMORY;
        thread.contexts[thread.depth++] = device;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    return enter("cuCtxPopCurrent_v2", INITIALIZED | THREAD_ONLY, [&] {
        if (!thread.depth) return CUDA_ERROR_INVALID_CONTEXT;
        if (context) *context = reinterpret_cast<CUcontext>(current());
        --thread.depth;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetDevice(CUdevice* device) {
    return enter("cuCtxGetDevice", CONTEXT, [&] {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        *device = current()->ordinal;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return enter("cuCtxGetStreamPriorityRange", CONTEXT, [&] {
        if (least) *least = 0;
        if (greatest) *greatest = GREATEST_PRIORITY;
        return CUDA_SUCCESS;
    });
}

CUresult cuCtxSynchronize() {
    return enter("cuCtxSynchronize", CONTEXT | UNSAFE | BLOCKS, [&] { return run_all(); });
}

CUresult cuGetErrorName(CUresult code, const char** name) {
    const ErrorText* error = error_text(code);
    if (!name) return CUDA_ERROR_INVALID_VALUE;
    *name = error ? error->name : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    const ErrorText* error = error_text(code);
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    *text = error ? error->text : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
