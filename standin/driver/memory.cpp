// Memory of the device and of the host, and copies between them.
//
// A device address is the address at which this process reaches the bytes. An allocation ends right before a guard
// page, so a kernel that writes or reads past the end crashes.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "state.h"

namespace driver {

State::State() = default;

State::~State() {
    for (auto& [begin, span] : spans) {
        if (span.map) unmap_pages(span.map, span.map_bytes);
    }
    spans.clear();
    handles.objects.clear();
    for (auto& [begin, bytes] : reservations) munmap(reinterpret_cast<void*>(begin), bytes);
}

bool room_for(size_t bytes) { return bytes <= gpu.options.memory && gpu.used <= gpu.options.memory - bytes; }

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer's own guards begin at the very next byte.
static uintptr_t map_pages(Span& span) {
    void* memory = nullptr;
    if (posix_memalign(&memory, ALIGNMENT, span.bytes)) return 0;
    return span.map = reinterpret_cast<uintptr_t>(memory);
}
void unmap_pages(uintptr_t address, size_t) { free(reinterpret_cast<void*>(address)); }
#else
static uintptr_t map_pages(Span& span) {
    size_t rounded = (span.bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
    span.map_bytes = pages + 2 * PAGE;
    void* map = mmap(nullptr, span.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return 0;
    span.map = reinterpret_cast<uintptr_t>(map);
    if (mprotect(static_cast<char*>(map) + PAGE, pages, PROT_READ | PROT_WRITE)) {
        munmap(map, span.map_bytes);
        return 0;
    }
    return span.map + PAGE + pages - rounded;
}
void unmap_pages(uintptr_t address, size_t bytes) { munmap(reinterpret_cast<void*>(address), bytes); }
#endif

namespace {

// The longest row of a copy in two dimensions, with what is between it and the next.
constexpr size_t MOST_PITCH = 0x7FFFFFFF;
// Fresh memory keeps its old contents on a GPU; here it gets junk, as long as that is cheap.
constexpr size_t SPOILED = 1 << 20;

CUresult allocate(Span::Kind kind, size_t bytes, uintptr_t* out) {
    Span span{kind, bytes};
    uintptr_t begin = map_pages(span);
    if (!begin) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(reinterpret_cast<void*>(begin), 0xA5, bytes < SPOILED ? bytes : SPOILED);
    gpu.spans[begin] = span;
    *out = begin;
    return CUDA_SUCCESS;
}

// Returns the span of this kind that begins at an address.
std::map<uintptr_t, Span>::iterator span_at(uintptr_t begin, Span::Kind kind) {
    auto found = gpu.spans.find(begin);
    return found != gpu.spans.end() && found->second.kind == kind ? found : gpu.spans.end();
}

// Returns the span that contains an address.
std::map<uintptr_t, Span>::iterator span_around(uintptr_t address) {
    auto after = gpu.spans.upper_bound(address);
    if (after == gpu.spans.begin()) return gpu.spans.end();
    auto found = std::prev(after);
    return address - found->first < found->second.bytes ? found : gpu.spans.end();
}

bool in_reservation(uintptr_t address) {
    auto after = gpu.reservations.upper_bound(address);
    if (after == gpu.reservations.begin()) return false;
    auto found = std::prev(after);
    return address - found->first < found->second;
}

CUresult give_back(uintptr_t begin, Span::Kind kind, CUresult unknown) {
    if (span_at(begin, kind) == gpu.spans.end()) return unknown;
    // The driver waits here too, because enqueued work may still use the memory.
    if (CUresult failed = run_all(); failed && !gpu.sticky) return failed;
    auto found = span_at(begin, kind);
    if (found == gpu.spans.end()) return unknown;
    if (found->second.map) unmap_pages(found->second.map, found->second.map_bytes);
    if (kind == Span::Allocation) gpu.used -= found->second.bytes;
    gpu.spans.erase(found);
    return CUDA_SUCCESS;
}

// Whether the range has pages of a file that is not in memory; the system does not pin those.
bool shares_a_file(uintptr_t begin, size_t bytes) {
    FILE* maps = fopen("/proc/self/maps", "re");
    if (!maps) return false;
    char line[512], flags[8], path[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, maps)) {
        uintptr_t from = 0, to = 0;
        path[0] = 0;
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %255s", &from, &to, flags, path) < 3) continue;
        bool in_memory = path[0] != '/' || !strncmp(path, "/memfd:", 7) || !strncmp(path, "/dev/", 5) ||
                         !strncmp(path, "/anon_hugepage", 14);
        found = from < begin + bytes && to > begin && flags[3] == 's' && !in_memory;
    }
    fclose(maps);
    return found;
}

CUresult copy(Action action, CUstream stream, bool wait) {
    if (action.bytes == 0 || action.rows == 0) return CUDA_SUCCESS;
    Place target = place(action.to, (action.rows - 1) * action.to_pitch + action.bytes);
    Place source = place(action.from, (action.rows - 1) * action.from_pitch + action.bytes);
    if (target == Place::Bad || source == Place::Bad) return CUDA_ERROR_INVALID_VALUE;
    bool pageable = target == Place::Pageable || source == Place::Pageable;
    bool host = target != Place::Device && source != Place::Device;
    action.kind = Action::Copy;
    auto found = find_stream(stream);
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (found->capture) {
        if (!pageable) return enqueue(stream, action);
        return broken(*found->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    CUresult result = enqueue(stream, action);
    if (result || !(pageable || host || wait)) return result;
    // Staged copies and copies between two host buffers return when they are done.
    if (!wait) ++gpu.synchronizations;
    return run_until([&] { return found->idle(); });
}

CUresult copy(uintptr_t to, uintptr_t from, size_t bytes, CUstream stream, bool wait) {
    Action action;
    action.to = to;
    action.from = from;
    action.bytes = bytes;
    return copy(std::move(action), stream, wait);
}

// The address at which an end of a copy in two dimensions begins; 0 for an end that is no plain memory.
uintptr_t begin_of(CUmemorytype type, uintptr_t host, CUdeviceptr device, size_t x, size_t y, size_t pitch) {
    switch (type) {
        case CU_MEMORYTYPE_HOST:
            return host + y * pitch + x;
        case CU_MEMORYTYPE_DEVICE:
        case CU_MEMORYTYPE_UNIFIED:
            return device + y * pitch + x;
        default:
            return 0;
    }
}

// Whether every copy of a batch has attributes, each with an order of its source.
bool known_attributes(const CUmemcpyAttributes* attributes, const size_t* indices, size_t many, size_t count) {
    for (size_t index = 0; index < many; ++index) {
        bool rises = index ? indices[index] > indices[index - 1] : indices[index] == 0;
        int order = attributes[index].srcAccessOrder;
        if (!rises || indices[index] >= count || order < 1 || order > 3) return false;
    }
    return true;
}

// The order in which a batch runs, which a driver leaves open.
std::vector<size_t> order_of_batch(size_t count) {
    std::vector<size_t> order(count);
    for (size_t index = 0; index < count; ++index) {
        size_t other = gpu.options.has_seed ? random_below(index + 1) : index;
        order[index] = order[other];
        order[other] = index;
    }
    return order;
}

CUresult fill(Action::Kind kind, uintptr_t to, unsigned value, size_t count, CUstream stream) {
    size_t unit = kind == Action::Fill32 ? 4 : 1;
    if (count == 0) return CUDA_SUCCESS;
    if (to % unit || count > SIZE_MAX / unit) return CUDA_ERROR_INVALID_VALUE;
    Place target = place(to, count * unit);
    if (target == Place::Bad || target == Place::Pageable) return CUDA_ERROR_INVALID_VALUE;
    Action action;
    action.kind = kind;
    action.to = to;
    action.bytes = count * unit;
    action.value = value;
    return enqueue(stream, action);
}

}  // namespace

// A copy must lie within one allocation or registration, or within adjacent mapped pieces.
Place place(uintptr_t address, size_t bytes) {
    if (!address || address + bytes < address) return Place::Bad;
    auto found = span_around(address);
    if (found == gpu.spans.end()) {
        auto next = gpu.spans.lower_bound(address);
        bool meets = next != gpu.spans.end() && next->first < address + bytes;
        return meets || in_reservation(address) ? Place::Bad : Place::Pageable;
    }
    Span::Kind kind = found->second.kind;
    size_t offset = address - found->first;
    if (kind != Span::Mapped) {
        if (bytes > found->second.bytes - offset || found->second.orphaned) return Place::Bad;
        return kind == Span::Allocation ? Place::Device : Place::Pinned;
    }
    bool host = found->second.memory->host;
    for (uintptr_t reached = address; reached < address + bytes; reached = found->first + found->second.bytes) {
        found = span_around(reached);
        if (found == gpu.spans.end() || found->second.kind != Span::Mapped) return Place::Bad;
        if (!found->second.access || found->second.memory->host != host) return Place::Bad;
    }
    return host ? Place::Pinned : Place::Device;
}

}  // namespace driver

using namespace driver;

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
    return enter("cuMemAlloc_v2", CONTEXT | UNSAFE | BLOCKS, [&] {
        if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        if (!room_for(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
        observe();
        if (gpu.sticky) return gpu.sticky;
        uintptr_t begin = 0;
        if (CUresult failed = allocate(Span::Allocation, bytes, &begin)) return failed;
        gpu.used += bytes;
        *out = begin;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    return enter("cuMemFree_v2", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] {
        return address ? give_back(address, Span::Allocation, CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
    });
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    return enter("cuMemGetInfo_v2", CONTEXT, [&] {
        if (!free || !total) return CUDA_ERROR_INVALID_VALUE;
        *total = gpu.options.memory;
        *free = gpu.options.memory - gpu.used;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
    return enter("cuMemHostRegister_v2", CONTEXT | UNSAFE | BLOCKS, [&] {
        uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
        if (!begin || !bytes || begin % PAGE || bytes % PAGE || begin + bytes < begin || flags > 15) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        auto next = gpu.spans.lower_bound(begin);
        bool taken = span_around(begin) != gpu.spans.end() ||
                     (next != gpu.spans.end() && next->first < begin + bytes);
        if (taken) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        // Of all calls about a range, this one fails if a page is not mapped, and changes nothing.
        if (msync(memory, bytes, MS_ASYNC)) return CUDA_ERROR_INVALID_VALUE;
        if (shares_a_file(begin, bytes)) return CUDA_ERROR_INVALID_VALUE;
        if (bytes > gpu.options.registration) return CUDA_ERROR_OUT_OF_MEMORY;
        Span span{Span::Registered, bytes};
        span.maker = current();
        span.portable = flags & CU_MEMHOSTREGISTER_PORTABLE;
        gpu.spans[begin] = span;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemHostUnregister(void* memory) {
    return enter("cuMemHostUnregister", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] {
        auto found = span_at(reinterpret_cast<uintptr_t>(memory), Span::Registered);
        bool gone = found != gpu.spans.end() && found->second.orphaned;
        if (gone) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        // No documentation says that a driver unregisters memory in a context other than the one that registered it.
        if (found != gpu.spans.end() && found->second.maker != current()) return CUDA_ERROR_INVALID_CONTEXT;
        return give_back(reinterpret_cast<uintptr_t>(memory), Span::Registered,
                         CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* memory, unsigned flags) {
    return enter("cuMemHostGetDevicePointer_v2", CONTEXT, [&] {
        uintptr_t address = reinterpret_cast<uintptr_t>(memory);
        if (!out || flags || place(address, 1) != Place::Pinned) return CUDA_ERROR_INVALID_VALUE;
        const Span& span = span_around(address)->second;
        if (!span.portable && span.maker != current()) return CUDA_ERROR_INVALID_VALUE;
        *out = address;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    return enter("cuMemHostAlloc", CONTEXT | UNSAFE | BLOCKS, [&] {
        if (!out || bytes == 0 || flags > 7) return CUDA_ERROR_INVALID_VALUE;
        uintptr_t begin = 0;
        if (CUresult failed = allocate(Span::HostAllocation, bytes, &begin)) return failed;
        *out = reinterpret_cast<void*>(begin);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemFreeHost(void* memory) {
    return enter("cuMemFreeHost", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] {
        return give_back(reinterpret_cast<uintptr_t>(memory), Span::HostAllocation, CUDA_ERROR_INVALID_VALUE);
    });
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
    return enter("cuPointerGetAttribute", CONTEXT, [&] {
        auto found = span_around(address);
        if (!data || found == gpu.spans.end()) return CUDA_ERROR_INVALID_VALUE;
        bool device = place(address, 1) == Place::Device;
        switch (attribute) {
            case CU_POINTER_ATTRIBUTE_CONTEXT:
                *static_cast<void**>(data) = current();
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
                *static_cast<unsigned*>(data) = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_HOST_POINTER:
                if (device) return CUDA_ERROR_INVALID_VALUE;
                [[fallthrough]];
            case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
                *static_cast<CUdeviceptr*>(data) = address;
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_IS_MANAGED:
                *static_cast<unsigned*>(data) = 0;
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
                *static_cast<int*>(data) = current()->ordinal;
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
                *static_cast<CUdeviceptr*>(data) = found->first;
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
                *static_cast<size_t*>(data) = found->second.bytes;
                return CUDA_SUCCESS;
            case CU_POINTER_ATTRIBUTE_MAPPED:
                *static_cast<unsigned*>(data) = 1;
                return CUDA_SUCCESS;
        }
        return CUDA_ERROR_NOT_SUPPORTED;
    });
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return enter("cuMemcpy", CONTEXT | UNSAFE | BLOCKS, [&] { return copy(to, from, bytes, nullptr, true); });
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    return enter("cuMemcpyHtoD_v2", CONTEXT | UNSAFE | BLOCKS, [&] {
        return copy(to, reinterpret_cast<uintptr_t>(from), bytes, nullptr, true);
    });
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    return enter("cuMemcpyDtoH_v2", CONTEXT | UNSAFE | BLOCKS, [&] {
        return copy(reinterpret_cast<uintptr_t>(to), from, bytes, nullptr, true);
    });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enter("cuMemcpyAsync", CONTEXT, [&] { return copy(to, from, bytes, stream, false); });
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copies, CUstream stream) {
    return enter("cuMemcpy2DAsync_v2", CONTEXT, [&] {
        if (!copies) return CUDA_ERROR_INVALID_VALUE;
        const CUDA_MEMCPY2D& c = *copies;
        bool narrow = c.srcPitch >= c.srcXInBytes + c.WidthInBytes && c.dstPitch >= c.dstXInBytes + c.WidthInBytes;
        if (!narrow || c.srcPitch > MOST_PITCH || c.dstPitch > MOST_PITCH) return CUDA_ERROR_INVALID_VALUE;
        Action action;
        uintptr_t host_from = reinterpret_cast<uintptr_t>(c.srcHost), host_to = reinterpret_cast<uintptr_t>(c.dstHost);
        action.from = begin_of(c.srcMemoryType, host_from, c.srcDevice, c.srcXInBytes, c.srcY, c.srcPitch);
        action.to = begin_of(c.dstMemoryType, host_to, c.dstDevice, c.dstXInBytes, c.dstY, c.dstPitch);
        action.bytes = c.WidthInBytes;
        action.rows = c.Height;
        action.from_pitch = c.srcPitch;
        action.to_pitch = c.dstPitch;
        return copy(std::move(action), stream, false);
    });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return enter("cuMemcpyHtoDAsync_v2", CONTEXT, [&] {
        return copy(to, reinterpret_cast<uintptr_t>(from), bytes, stream, false);
    });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enter("cuMemcpyDtoHAsync_v2", CONTEXT, [&] {
        return copy(reinterpret_cast<uintptr_t>(to), from, bytes, stream, false);
    });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enter("cuMemcpyDtoDAsync_v2", CONTEXT, [&] { return copy(to, from, bytes, stream, false); });
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* indices, size_t attribute_count,
                            size_t* failed_at, CUstream stream) {
    return enter("cuMemcpyBatchAsync", CONTEXT, [&] {
        bool given = to && from && bytes && attributes && indices;
        if (!given || !count || !attribute_count || attribute_count > count || !failed_at) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        auto found = find_stream(stream);
        if (!found || found->handle == LEGACY) return CUDA_ERROR_INVALID_HANDLE;
        // The driver has the same trap: the capture goes on, and its graph lacks the copies.
        if (found->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (!gpu.options.batches) return CUDA_ERROR_NOT_SUPPORTED;
        if (!known_attributes(attributes, indices, attribute_count, count)) return CUDA_ERROR_INVALID_VALUE;
        for (size_t index : order_of_batch(count)) {
            if (CUresult failed = copy(to[index], from[index], bytes[index], stream, false)) {
                *failed_at = index;
                return failed;
            }
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return enter("cuMemsetD8Async", CONTEXT, [&] { return fill(Action::Fill8, to, value, count, stream); });
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    return enter("cuMemsetD32Async", CONTEXT, [&] { return fill(Action::Fill32, to, value, count, stream); });
}
