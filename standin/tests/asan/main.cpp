// Drives the driver and the kernels in one program that the compiler has sanitized.
//
// `clean` does what forebay does, and some things that the driver refuses; the sanitizers must report nothing. Each
// other argument plants one bad access, which they must report.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include "../../driver/state.h"
#include "fold.h"

extern "C" void standin_configure(const StandinOptions* options);
extern "C" void standin_fail_call(uint64_t from_now, int code);
extern "C" void standin_hold(uint64_t stream, int hold);

namespace {

constexpr size_t GRANULE = 2 << 20;

#define CHECK(is)                                                                  \
    do {                                                                           \
        if (!(is)) {                                                               \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #is);               \
            exit(1);                                                               \
        }                                                                          \
    } while (0)
#define DO(call) CHECK((call) == CUDA_SUCCESS)

struct Add {
    unsigned long long to, from;
    unsigned count, value;
};

CUfunction function, folding;
CUmodule module;

void start(bool seeded, uint64_t seed) {
    StandinOptions options{};
    options.seed = seed;
    options.has_seed = seeded;
    options.memory = 64 << 20;
    standin_configure(&options);
    CUcontext context;
    DO(cuInit(0));
    DO(cuDevicePrimaryCtxRetain(&context, 0));
    DO(cuCtxSetCurrent(context));
    DO(cuModuleLoadData(&module, ".version 8.0\n.target sm_80\n.entry standin_add()\n.entry asan_fold()\n"));
    DO(cuModuleGetFunction(&function, module, "standin_add"));
    DO(cuModuleGetFunction(&folding, module, "asan_fold"));
}

CUresult add(CUdeviceptr to, CUdeviceptr from, unsigned count, CUstream stream) {
    Add args = {to, from, count, 1};
    void* params[] = {&args};
    return cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, stream, params, nullptr);
}

// Sums 1000 ones, in blocks whose threads meet at barriers; returns the result.
unsigned fold(Plant plant) {
    constexpr unsigned COUNT = 1000;
    CUstream stream;
    CUdeviceptr memory;
    DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    DO(cuMemAlloc_v2(&memory, 4 * COUNT + 4));
    DO(cuMemsetD32Async(memory, 1, COUNT, stream));
    DO(cuMemsetD32Async(memory + 4 * COUNT, 0, 1, stream));
    FoldArgs args = {memory, memory + 4 * COUNT, COUNT, plant};
    void* params[] = {&args};
    DO(cuLaunchKernel(folding, 3, 1, 1, 128, 1, 1, 128 * 4, stream, params, nullptr));
    DO(cuStreamSynchronize(stream));
    unsigned sum = *reinterpret_cast<unsigned*>(memory + 4 * COUNT);
    DO(cuMemFree_v2(memory));
    DO(cuStreamDestroy_v2(stream));
    return sum;
}

struct Pair {
    CUstream first, second;
    CUevent fork, join;
};

Pair make_pair() {
    Pair pair;
    DO(cuStreamCreate(&pair.first, CU_STREAM_NON_BLOCKING));
    DO(cuStreamCreate(&pair.second, CU_STREAM_NON_BLOCKING));
    DO(cuEventCreate(&pair.fork, CU_EVENT_DISABLE_TIMING));
    DO(cuEventCreate(&pair.join, CU_EVENT_DISABLE_TIMING));
    return pair;
}

void drop_pair(const Pair& pair) {
    DO(cuStreamDestroy_v2(pair.first));
    DO(cuStreamDestroy_v2(pair.second));
    DO(cuEventDestroy_v2(pair.fork));
    DO(cuEventDestroy_v2(pair.join));
}

void note(void* count) { ++*static_cast<int*>(count); }

CUgraphExec branches(const Pair& pair, CUdeviceptr memory, int* noted) {
    CUgraph graph;
    CUgraphExec exec;
    DO(cuStreamBeginCapture_v2(pair.first, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    DO(add(memory, memory, 100, pair.first));
    DO(cuEventRecord(pair.fork, pair.first));
    DO(cuStreamWaitEvent(pair.second, pair.fork, 0));
    DO(add(memory + 400, memory, 100, pair.second));
    DO(cuLaunchHostFunc(pair.second, note, noted));
    DO(cuEventRecord(pair.join, pair.second));
    DO(add(memory + 800, memory, 100, pair.first));
    DO(cuStreamWaitEvent(pair.first, pair.join, 0));
    DO(cuStreamEndCapture(pair.first, &graph));
    DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
    DO(cuGraphDestroy(graph));
    return exec;
}

void launches() {
    Pair pair = make_pair();
    CUdeviceptr memory;
    int noted = 0;
    DO(cuMemAlloc_v2(&memory, 1200));
    DO(cuMemsetD32Async(memory, 0, 300, pair.first));
    CUgraphExec exec = branches(pair, memory, &noted);
    for (int launch = 0; launch < 10; ++launch) DO(cuGraphLaunch(exec, launch % 2 ? pair.second : pair.first));
    DO(cuGraphExecDestroy(exec));
    DO(cuCtxSynchronize());
    unsigned words[300];
    DO(cuMemcpyDtoH_v2(words, memory, sizeof words));
    CHECK(words[0] == 10 && words[199] == 11 && words[299] == 11 && noted == 10);
    DO(add(memory, memory, 300, pair.second));
    DO(cuMemFree_v2(memory));
    CHECK(cuMemFree_v2(memory) == CUDA_ERROR_INVALID_VALUE);
    drop_pair(pair);
}

void violations() {
    Pair pair = make_pair();
    CUdeviceptr memory;
    CUgraph graph;
    DO(cuMemAlloc_v2(&memory, 400));
    CHECK(cuMemsetD32Async(memory, 0, 101, pair.first) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuMemcpyAsync(memory, memory + 4, 400, pair.first) == CUDA_ERROR_INVALID_VALUE);
    DO(cuStreamBeginCapture_v2(pair.first, CU_STREAM_CAPTURE_MODE_GLOBAL));
    DO(add(memory, memory, 100, pair.first));
    CHECK(cuStreamSynchronize(pair.first) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(add(memory, memory, 100, pair.first) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(cuStreamEndCapture(pair.first, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    // A capture whose streams and events are destroyed before it ends.
    DO(cuStreamBeginCapture_v2(pair.first, CU_STREAM_CAPTURE_MODE_GLOBAL));
    DO(cuEventRecord(pair.fork, pair.first));
    DO(cuStreamWaitEvent(pair.second, pair.fork, 0));
    drop_pair(pair);
    DO(cuMemFree_v2(memory));
}

void held() {
    Pair pair = make_pair();
    CUdeviceptr memory;
    DO(cuMemAlloc_v2(&memory, 400));
    standin_hold(reinterpret_cast<uint64_t>(pair.first), 1);
    DO(add(memory, memory, 100, pair.first));
    CHECK(cuMemFree_v2(memory) == CUDA_ERROR_LAUNCH_TIMEOUT);
    standin_hold(reinterpret_cast<uint64_t>(pair.first), 0);
    DO(cuStreamDestroy_v2(pair.second));
    DO(cuMemFree_v2(memory));
    DO(cuStreamDestroy_v2(pair.first));
    DO(cuEventDestroy_v2(pair.fork));
    DO(cuEventDestroy_v2(pair.join));
}

CUdeviceptr map(CUmemGenericAllocationHandle handle) {
    CUdeviceptr range;
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DO(cuMemAddressReserve(&range, GRANULE, 0, 0, 0));
    DO(cuMemMap(range, GRANULE, 0, handle, 0));
    DO(cuMemSetAccess(range, GRANULE, &access, 1));
    return range;
}

void unmap(CUdeviceptr range, CUmemGenericAllocationHandle handle) {
    DO(cuMemUnmap(range, GRANULE));
    DO(cuMemAddressFree(range, GRANULE));
    DO(cuMemRelease(handle));
}

// A handle made here, exported, and imported under a second address and by a child process.
void imports() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemGenericAllocationHandle own, other;
    int descriptor;
    CUstream stream;
    DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    DO(cuMemCreate(&own, GRANULE, &properties, 0));
    DO(cuMemExportToShareableHandle(&descriptor, own, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    void* shared = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    DO(cuMemImportFromShareableHandle(&other, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    CUdeviceptr first = map(own), second = map(other);
    DO(cuMemsetD32Async(first, 5, 10, stream));
    DO(add(first, second, 10, stream));
    DO(cuStreamSynchronize(stream));
    CHECK(*reinterpret_cast<unsigned*>(second) == 6);
    pid_t child = fork();
    if (child == 0) {
        *reinterpret_cast<unsigned*>(second) = 7;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(*reinterpret_cast<unsigned*>(first) == 7);
    unmap(first, own);
    unmap(second, other);
    DO(cuStreamDestroy_v2(stream));
}

void registrations() {
    constexpr size_t PAGES = 8192;
    void* memory = aligned_alloc(4096, PAGES);
    CUstream stream;
    CUdeviceptr device;
    memset(memory, 0, PAGES);
    DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    DO(cuMemAlloc_v2(&device, PAGES));
    DO(cuMemHostRegister_v2(memory, PAGES, 3));
    uintptr_t host = reinterpret_cast<uintptr_t>(memory);
    DO(cuMemsetD8Async(device, 9, PAGES, stream));
    DO(cuMemcpyAsync(host, device, PAGES, stream));
    CHECK(cuMemcpyAsync(host + 4, device, PAGES, stream) == CUDA_ERROR_INVALID_VALUE);
    CUDA_MEMCPY2D rows{};
    rows.srcMemoryType = rows.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    rows.srcDevice = device;
    rows.dstDevice = host + 92;
    rows.srcPitch = PAGES / 8;
    rows.dstPitch = rows.WidthInBytes = 900;
    rows.Height = 9;
    CHECK(cuMemcpy2DAsync_v2(&rows, stream) == CUDA_ERROR_INVALID_VALUE);
    rows.Height = 8;
    DO(cuMemcpy2DAsync_v2(&rows, stream));
    DO(add(host, device, PAGES / 4, stream));
    DO(cuMemHostUnregister(memory));
    free(memory);
    DO(cuMemFree_v2(device));
    DO(cuStreamDestroy_v2(stream));
}

void refused_calls() {
    for (uint64_t call = 0; call < 8; ++call) {
        CUstream stream = nullptr;
        CUevent event = nullptr;
        CUdeviceptr memory = 0;
        standin_fail_call(call, CUDA_ERROR_OUT_OF_MEMORY);
        bool streamed = !cuStreamCreate(&stream, 0), has_event = !cuEventCreate(&event, 0);
        bool has_memory = !cuMemAlloc_v2(&memory, 64);
        if (streamed && has_memory) (void)add(memory, memory, 16, stream);
        if (streamed && has_event) (void)cuEventRecord(event, stream);
        standin_fail_call(1000, 0);
        if (has_memory) DO(cuMemFree_v2(memory));
        if (has_event) DO(cuEventDestroy_v2(event));
        if (streamed) DO(cuStreamDestroy_v2(stream));
    }
}

void clean() {
    for (int turn = 0; turn < 3; ++turn) CHECK(fold(NONE) == 1000);
    launches();
    violations();
    held();
    imports();
    registrations();
    refused_calls();
    DO(cuModuleUnload(module));
    DO(cuDevicePrimaryCtxRelease_v2(0));
}

// A kernel that writes one word beyond its memory.
void beyond() {
    CUdeviceptr memory;
    DO(cuMemAlloc_v2(&memory, 400));
    (void)add(memory, memory, 101, nullptr);
    (void)cuCtxSynchronize();
}

// A graph whose kernel uses memory that was freed.
void freed() {
    Pair pair = make_pair();
    CUdeviceptr memory;
    int noted = 0;
    DO(cuMemAlloc_v2(&memory, 1200));
    CUgraphExec exec = branches(pair, memory, &noted);
    DO(cuMemFree_v2(memory));
    (void)cuGraphLaunch(exec, pair.first);
    (void)cuCtxSynchronize();
}

// A kernel that reads a misaligned word.
void misaligned() {
    CUdeviceptr memory;
    DO(cuMemAlloc_v2(&memory, 400));
    (void)add(memory, memory + 2, 4, nullptr);
    (void)cuCtxSynchronize();
}

}  // namespace

int main(int count, char** words) {
    const char* word = count > 1 ? words[1] : "";
    uint64_t seed = count > 2 ? strtoull(words[2], nullptr, 10) : 0;
    start(count > 2, seed);
    if (!strcmp(word, "clean")) {
        clean();
    } else if (!strcmp(word, "beyond")) {
        beyond();
    } else if (!strcmp(word, "freed")) {
        freed();
    } else if (!strcmp(word, "misaligned")) {
        misaligned();
    } else if (!strcmp(word, "dynamic")) {
        fold(DYNAMIC);
    } else if (!strcmp(word, "static")) {
        fold(STATIC);
    } else if (!strcmp(word, "frame")) {
        fold(FRAME);
    } else {
        return 2;
    }
    puts("done");
    return 0;
}
