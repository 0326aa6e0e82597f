// A driver whose calls cost nothing and do nothing: the rest of a step's time is forebay's own.
//
// benches/host.rs compiles it and gives it to the CUDA device as the driver's library. It counts each call and reports
// as many devices as there were calls. Memory is the process's, and no kernel touches it; streams and events are
// numbers; every event has completed; host functions run at once.
//
// It imitates two kernels, so that a retirement finds its own step. The report copies the step's number from the oldest
// step descriptor that was loaded and has had no report: steps are finished in the order in which they were prepared. A
// descriptor and a report's slot are the first word of a launch's argument that is in registered host memory, so it
// repeats no structure of the kernels. A dense cache's begin writes its report itself, with the rows' lengths, by which
// the cache frees the pages that a window has left: there it reads the kernel's argument and the descriptor's rows.

#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;
typedef unsigned int u32;

// The same values as in the driver's header.
struct config {
    u32 grid[3], block[3], shared;
    u64 stream;
    const void* attributes;
    u32 attribute_count;
};

enum { STRETCHES = 64, WORDS = 64, BLOCKS = 16, LOAD = 1, REPORT = 2, BEGIN_PAGES = 3, OTHER = 4 };

static u64 calls, handles = 16;
static struct { u64 start, end; } registered[STRETCHES];
static u32 stretches;
static const u32* blocks[BLOCKS];
static u32 loaded, reported;
static int capturing;

static int reserve(u64* out, u64 bytes) {
    void* at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *out = (u64)at;
    return at == MAP_FAILED ? 2 : 0;
}

static int make(u64* out) {
    *out = ++handles;
    return 0;
}

static u32* in_host_memory(const u64* words) {
    for (u32 at = 0; at < WORDS; ++at) {
        for (u32 of = 0; of < stretches; ++of) {
            if (words[at] >= registered[of].start && words[at] < registered[of].end) return (u32*)words[at];
        }
    }
    return 0;
}

// What it needs of the argument of a dense cache's begin.
struct begin {
    const u32* descriptor;
    u64 tensors[5];
    u32* report;
    u32 lanes, batch, tokens, wide, groups;
};

// The descriptor has a head of 4 words, and 4 words of a row and 2 of each of its groups; the report has a head of 8.
static int begin_pages(const struct begin* begin) {
    const u32* row = begin->descriptor + 4;
    memset(begin->report, 0, 8 * sizeof(u32));
    memcpy(begin->report, begin->descriptor, 2 * sizeof(u32));
    for (u32 at = 0; at < begin->descriptor[2]; ++at, row += 4 + 2 * begin->groups) {
        // Only a real device knows the length.
        if (row[1] == ~0u) return 1;
        begin->report[8 + at] = row[1];
    }
    return 0;
}

#define CALL(name, ...) int name(__VA_ARGS__) { ++calls;
#define DOES_NOTHING(name) CALL(name, void) return 0; }
#define MAKES(name) CALL(name, u64* out) return make(out); }

CALL(cuDriverGetVersion, int* out) *out = 12080; return 0; }
DOES_NOTHING(cuInit)
// Returns the number of calls so far, for callers that have no other way to read it.
CALL(cuDeviceGetCount, int* out) *out = (int)calls; return 0; }
CALL(cuDeviceGet, int* out) *out = 0; return 0; }
CALL(cuDeviceGetAttribute, int* out, int attribute)
    // Warp size, capability 9.0, shared memory of a block, processors, copy engines; all other attributes are 1.
    *out = attribute == 10 ? 32 : attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 232448
         : attribute == 16 ? 132 : attribute == 40 ? 3 : 1;
    return 0;
}
CALL(cuDeviceGetName, char* out) strcpy(out, "idle"); return 0; }
CALL(cuDeviceGetPCIBusId, char* out) strcpy(out, "0000:00:00.0"); return 0; }
CALL(cuDevicePrimaryCtxRetain, u64* out) *out = 1; return 0; }
DOES_NOTHING(cuDevicePrimaryCtxRelease_v2)
DOES_NOTHING(cuCtxPushCurrent_v2)
CALL(cuCtxPopCurrent_v2, u64* out) *out = 0; return 0; }
DOES_NOTHING(cuThreadExchangeStreamCaptureMode)
MAKES(cuModuleLoadData)
DOES_NOTHING(cuModuleUnload)
CALL(cuModuleGetFunction, u64* out, u64 module, const char* name)
    (void)module;
    *out = !strcmp(name, "forebay_load") ? LOAD : !strcmp(name, "forebay_report") ? REPORT
         : !strcmp(name, "forebay_begin_pages") ? BEGIN_PAGES : OTHER;
    return 0;
}
CALL(cuFuncGetAttribute, int* out) *out = 1024; return 0; }
DOES_NOTHING(cuFuncSetAttribute)
CALL(cuMemGetInfo_v2, u64* free, u64* total) *free = *total = 1ull << 40; return 0; }
CALL(cuMemAlloc_v2, u64* out, u64 bytes) return reserve(out, bytes); }
DOES_NOTHING(cuMemFree_v2)
CALL(cuMemHostAlloc, u64* out, u64 bytes) return reserve(out, bytes); }
DOES_NOTHING(cuMemFreeHost)
CALL(cuMemHostRegister_v2, u64 address, u64 bytes)
    if (stretches == STRETCHES) return 2;
    registered[stretches].start = address;
    registered[stretches++].end = address + bytes;
    return 0;
}
DOES_NOTHING(cuMemHostUnregister)
CALL(cuMemHostGetDevicePointer_v2, u64* out, u64 address) *out = address; return 0; }
CALL(cuMemGetAllocationGranularity, u64* out) *out = 2 << 20; return 0; }
MAKES(cuMemCreate)
DOES_NOTHING(cuMemRelease)
DOES_NOTHING(cuMemExportToShareableHandle)
MAKES(cuMemImportFromShareableHandle)
CALL(cuMemAddressReserve, u64* out, u64 bytes) return reserve(out, bytes); }
DOES_NOTHING(cuMemAddressFree)
DOES_NOTHING(cuMemMap)
DOES_NOTHING(cuMemUnmap)
DOES_NOTHING(cuMemSetAccess)
DOES_NOTHING(cuMemcpyAsync)
DOES_NOTHING(cuMemcpy2DAsync_v2)
DOES_NOTHING(cuMemsetD8Async)
DOES_NOTHING(cuMemsetD32Async)
CALL(cuCtxGetStreamPriorityRange, int* least, int* greatest) *least = 0; *greatest = -5; return 0; }
MAKES(cuStreamCreateWithPriority)
DOES_NOTHING(cuStreamDestroy_v2)
DOES_NOTHING(cuStreamSynchronize)
DOES_NOTHING(cuStreamWaitEvent)
CALL(cuStreamGetCtx, u64 stream, u64* out) (void)stream; *out = 1; return 0; }
MAKES(cuEventCreate)
DOES_NOTHING(cuEventDestroy_v2)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventQuery)
DOES_NOTHING(cuEventSynchronize)
CALL(cuEventElapsedTime, float* out) *out = 0; return 0; }
CALL(cuLaunchHostFunc, u64 stream, void (*function)(void*), void* data)
    (void)stream;
    function(data);
    return 0;
}
CALL(cuLaunchKernelEx, const struct config* config, u64 function, const u64* const* parameters)
    (void)config;
    if (function == BEGIN_PAGES) return begin_pages((const struct begin*)parameters[0]);
    if (function == LOAD) blocks[loaded++ % BLOCKS] = in_host_memory(parameters[0]);
    if (function == REPORT) {
        u32* slot = in_host_memory(parameters[0]);
        const u32* block = blocks[reported++ % BLOCKS];
        if (!slot || !block) return 1;
        memcpy(slot, block, 2 * sizeof(u32));
    }
    return 0;
}
CALL(cuStreamBeginCapture_v2, u64 stream) (void)stream; capturing = 1; return 0; }
CALL(cuStreamEndCapture, u64 stream, u64* out) (void)stream; capturing = 0; return make(out); }
CALL(cuStreamGetCaptureInfo_v2, u64 stream, int* status, u64* id)
    (void)stream;
    *status = capturing;
    *id = 1;
    return 0;
}
MAKES(cuGraphCreate)
MAKES(cuGraphInstantiateWithFlags)
DOES_NOTHING(cuGraphDestroy)
DOES_NOTHING(cuGraphUpload)
DOES_NOTHING(cuGraphLaunch)
DOES_NOTHING(cuGraphExecDestroy)
DOES_NOTHING(cuGraphConditionalHandleCreate)
CALL(cuGetErrorName, int code, const char** out) (void)code; *out = "IDLE"; return 0; }
