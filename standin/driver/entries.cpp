// cuGetProcAddress: the driver's entries by the names that programs ask for, without version suffixes.

#include <cstring>

#include "state.h"

namespace driver {

namespace {

struct Entry {
    const char* name;
    void* address;
};

#define PLAIN(name) {#name, reinterpret_cast<void*>(&name)}
#define SECOND(name) {#name, reinterpret_cast<void*>(&name##_##v2)}
const Entry ENTRIES[] = {
    PLAIN(cuInit), PLAIN(cuDriverGetVersion), PLAIN(cuDeviceGet), PLAIN(cuDeviceGetCount), PLAIN(cuDeviceGetName),
    PLAIN(cuDeviceGetPCIBusId), SECOND(cuDeviceGetUuid), SECOND(cuDeviceTotalMem), PLAIN(cuDeviceGetAttribute),
    PLAIN(cuDevicePrimaryCtxRetain),
    SECOND(cuDevicePrimaryCtxRelease), PLAIN(cuDevicePrimaryCtxGetState), PLAIN(cuCtxGetCurrent),
    PLAIN(cuCtxSetCurrent), SECOND(cuCtxPushCurrent), SECOND(cuCtxPopCurrent), PLAIN(cuCtxGetDevice),
    PLAIN(cuCtxGetStreamPriorityRange), PLAIN(cuCtxSynchronize), SECOND(cuMemAlloc), SECOND(cuMemFree),
    SECOND(cuMemGetInfo), SECOND(cuMemHostRegister), PLAIN(cuMemHostUnregister), SECOND(cuMemHostGetDevicePointer),
    PLAIN(cuMemHostAlloc), PLAIN(cuMemFreeHost), PLAIN(cuPointerGetAttribute), PLAIN(cuMemcpy),
    PLAIN(cuMemcpyAsync), SECOND(cuMemcpy2DAsync), SECOND(cuMemcpyHtoD), SECOND(cuMemcpyDtoH), SECOND(cuMemcpyHtoDAsync),
    SECOND(cuMemcpyDtoHAsync), SECOND(cuMemcpyDtoDAsync), PLAIN(cuMemcpyBatchAsync), PLAIN(cuMemsetD8Async),
    PLAIN(cuMemsetD32Async), PLAIN(cuMemAddressReserve), PLAIN(cuMemAddressFree), PLAIN(cuMemCreate),
    PLAIN(cuMemRelease), PLAIN(cuMemMap), PLAIN(cuMemUnmap), PLAIN(cuMemSetAccess), PLAIN(cuMemGetAccess),
    PLAIN(cuMemGetAllocationGranularity), PLAIN(cuMemExportToShareableHandle),
    PLAIN(cuMemImportFromShareableHandle), PLAIN(cuMemRetainAllocationHandle), PLAIN(cuStreamCreate),
    PLAIN(cuStreamCreateWithPriority), SECOND(cuStreamDestroy), PLAIN(cuStreamQuery), PLAIN(cuStreamSynchronize),
    PLAIN(cuStreamWaitEvent), SECOND(cuStreamWaitValue32), PLAIN(cuStreamGetCtx), PLAIN(cuStreamGetPriority),
    PLAIN(cuStreamGetFlags), PLAIN(cuEventCreate),
    PLAIN(cuEventRecord), PLAIN(cuEventRecordWithFlags), PLAIN(cuEventQuery), PLAIN(cuEventSynchronize),
    SECOND(cuEventDestroy), PLAIN(cuEventElapsedTime), PLAIN(cuLaunchHostFunc), PLAIN(cuModuleLoadData),
    PLAIN(cuModuleLoadDataEx), PLAIN(cuModuleUnload), PLAIN(cuModuleGetFunction), PLAIN(cuFuncGetAttribute),
    PLAIN(cuFuncSetAttribute), PLAIN(cuOccupancyMaxActiveBlocksPerMultiprocessor), PLAIN(cuLaunchKernel),
    PLAIN(cuLaunchKernelEx), SECOND(cuStreamBeginCapture), PLAIN(cuStreamEndCapture), PLAIN(cuStreamIsCapturing),
    SECOND(cuStreamGetCaptureInfo), PLAIN(cuThreadExchangeStreamCaptureMode), PLAIN(cuGraphCreate),
    PLAIN(cuGraphConditionalHandleCreate), PLAIN(cuGraphInstantiateWithFlags),
    PLAIN(cuGraphLaunch), PLAIN(cuGraphUpload), PLAIN(cuGraphExecDestroy), PLAIN(cuGraphDestroy),
    PLAIN(cuGraphGetNodes), PLAIN(cuGetErrorName), PLAIN(cuGetErrorString), SECOND(cuGetProcAddress),
};
#undef PLAIN
#undef SECOND

}  // namespace
}  // namespace driver

using namespace driver;

CUresult cuGetProcAddress_v2(const char* symbol, void** out, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
    return enter("cuGetProcAddress_v2", THREAD_ONLY, [&] {
        if (!symbol || !out) return CUDA_ERROR_INVALID_VALUE;
        *out = nullptr;
        for (const Entry& entry : ENTRIES) {
            if (!strcmp(entry.name, symbol)) *out = entry.address;
        }
        if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    });
}
