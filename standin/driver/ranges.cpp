// Virtual memory management: reservations, physical memory as memfds, mappings, access, descriptors.

#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

namespace driver {

Physical::~Physical() {
    if (descriptor >= 0) close(descriptor);
    if (counted) gpu.used -= bytes;
}

namespace {

// From this version on, a mapping may begin at an offset into a handle's memory; before, the offset had to be zero.
constexpr unsigned OFFSETS_FROM = 13000;

// Reservations, physical memory and mappings begin and end on granules.
bool granules(size_t bytes) { return bytes % gpu.options.granule == 0; }

bool whole(uintptr_t address, size_t bytes) {
    return bytes && granules(address) && granules(bytes) && address + bytes > address;
}

bool on_host(const CUmemLocation& location) { return location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA; }

bool supported(const CUmemAllocationProp* prop) {
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.id < 0) return false;
    size_t id = static_cast<size_t>(prop->location.id);
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE) return id < gpu.devices.size();
    // A host without NUMA nodes still has node 0.
    size_t nodes = gpu.options.nodes ? gpu.options.nodes : 1;
    return on_host(prop->location) && id < nodes && gpu.options.driver_version >= HOST_MEMORY_FROM;
}

bool reserved(uintptr_t address, size_t bytes) {
    auto after = gpu.reservations.upper_bound(address);
    if (after == gpu.reservations.begin()) return false;
    auto found = std::prev(after);
    return address - found->first < found->second && bytes <= found->second - (address - found->first);
}

// Whether mappings cover the range from its first byte to its last, and none reaches outside it.
bool exactly_mapped(uintptr_t address, size_t bytes) {
    uintptr_t reached = address;
    while (reached < address + bytes) {
        auto found = gpu.spans.find(reached);
        if (found == gpu.spans.end() || found->second.kind != Span::Mapped) return false;
        reached += found->second.bytes;
    }
    return reached == address + bytes;
}

bool any_mapped(uintptr_t address, size_t bytes) {
    auto next = gpu.spans.lower_bound(address);
    if (next != gpu.spans.end() && next->first < address + bytes) return true;
    if (next == gpu.spans.begin()) return false;
    auto before = std::prev(next);
    return before->first + before->second.bytes > address;
}

CUresult reserve(CUdeviceptr* out, size_t bytes, size_t alignment) {
    if (alignment < gpu.options.granule) alignment = gpu.options.granule;
    // Reserves more than the caller asked for, so that an aligned part lies inside, and releases the rest.
    size_t more = bytes + alignment;
    void* map = mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    uintptr_t got = reinterpret_cast<uintptr_t>(map);
    uintptr_t begin = (got + alignment - 1) / alignment * alignment;
    if (begin > got) munmap(map, begin - got);
    if (got + more > begin + bytes) {
        munmap(reinterpret_cast<void*>(begin + bytes), got + more - (begin + bytes));
    }
    gpu.reservations[begin] = bytes;
    *out = begin;
    return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* out, size_t bytes, int types, bool host) {
    int descriptor = memfd_create("standin", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    auto memory = std::make_shared<Physical>();
    memory->descriptor = descriptor;
    if (ftruncate(descriptor, static_cast<off_t>(bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
    // Fresh memory keeps its old contents on a GPU; here it gets junk, as long as that is cheap.
    char junk[PAGE];
    memset(junk, 0xA5, sizeof junk);
    if (pwrite(descriptor, junk, sizeof junk, 0) < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    // A file that cannot change its size cannot cause a fault under a mapping; the importer checks for the seals.
    fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    memory->bytes = bytes;
    memory->types = types;
    memory->host = host;
    memory->counted = !host;
    if (!host) gpu.used += bytes;
    *out = gpu.handles.add(std::make_shared<Handle>(Handle{memory}));
    return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, size_t bytes, size_t offset, const PhysicalPtr& memory) {
    void* got = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                     memory->descriptor, static_cast<off_t>(offset));
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    Span span{Span::Mapped, bytes};
    span.memory = memory;
    span.access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    gpu.spans[address] = span;
    return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr address, size_t bytes) {
    if (!whole(address, bytes) || !exactly_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult failed = run_all(); failed && !gpu.sticky) return failed;
    if (!exactly_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    gpu.spans.erase(gpu.spans.find(address), gpu.spans.lower_bound(address + bytes));
    return CUDA_SUCCESS;
}

// The host may touch pages only if their memory says so. A kernel runs on the host here too, so the stand-in only
// records what a device may do with host memory.
CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc& desc) {
    bool all = true, none = true, imported = false;
    for (auto span = gpu.spans.find(address); span != gpu.spans.end() && span->first < address + bytes; ++span) {
        (span->second.memory->host ? none : all) = false;
        imported |= span->second.memory->imported;
    }
    // As of memory on a device that this one cannot reach.
    if (imported && !gpu.options.peer_access) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (on_host(desc.location) && !all) return CUDA_ERROR_INVALID_VALUE;
    bool known = on_host(desc.location) ||
                 (desc.location.type == CU_MEM_LOCATION_TYPE_DEVICE && desc.location.id >= 0 &&
                  static_cast<size_t>(desc.location.id) < gpu.devices.size());
    if (!known) return CUDA_ERROR_INVALID_DEVICE;
    int protection = PROT_NONE;
    if (desc.flags == CU_MEM_ACCESS_FLAGS_PROT_READ) protection = PROT_READ;
    if (desc.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection = PROT_READ | PROT_WRITE;
    if ((on_host(desc.location) || none) && mprotect(reinterpret_cast<void*>(address), bytes, protection)) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (on_host(desc.location)) return CUDA_SUCCESS;
    for (auto span = gpu.spans.find(address); span != gpu.spans.end() && span->first < address + bytes; ++span) {
        span->second.access = desc.flags;
    }
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace driver

using namespace driver;

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
    return enter("cuMemAddressReserve", CONTEXT | UNSAFE | BLOCKS, [&] {
        if (!out || !bytes || !granules(bytes) || (alignment & (alignment - 1)) || flags) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        return reserve(out, bytes, alignment);
    });
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    return enter("cuMemAddressFree", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] {
        auto found = gpu.reservations.find(address);
        bool whole_one = found != gpu.reservations.end() && found->second == bytes;
        if (!whole_one || any_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
        munmap(reinterpret_cast<void*>(address), bytes);
        gpu.reservations.erase(found);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
    return enter("cuMemCreate", CONTEXT | UNSAFE | BLOCKS, [&] {
        if (!out || flags || !bytes || !granules(bytes) || !supported(prop)) return CUDA_ERROR_INVALID_VALUE;
        int types = prop->requestedHandleTypes;
        constexpr int DESCRIPTOR = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, FABRIC = CU_MEM_HANDLE_TYPE_FABRIC;
        if (types & ~(DESCRIPTOR | FABRIC)) return CUDA_ERROR_NOT_SUPPORTED;
        if ((types & DESCRIPTOR) && !gpu.options.descriptors) return CUDA_ERROR_NOT_SUPPORTED;
        if ((types & DESCRIPTOR) && gpu.options.withheld) return CUDA_ERROR_NOT_PERMITTED;
        // As on a system where the user may open no channel of the fabric.
        if ((types & FABRIC) && !gpu.options.fabric) return CUDA_ERROR_NOT_PERMITTED;
        bool host = on_host(prop->location);
        if (host && !gpu.options.host_memory) return CUDA_ERROR_NOT_SUPPORTED;
        if (!host && !room_for(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
        return create(out, bytes, types, host);
    });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return enter("cuMemRelease", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] {
        auto found = gpu.handles.find(handle);
        if (!found) return CUDA_ERROR_INVALID_VALUE;
        if (--found->references == 0) gpu.handles.objects.erase(handle);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    return enter("cuMemMap", CONTEXT | UNSAFE | BLOCKS, [&] {
        auto found = gpu.handles.find(handle);
        if (!found || flags || !whole(address, bytes) || !granules(offset)) return CUDA_ERROR_INVALID_VALUE;
        if (offset && gpu.options.driver_version < OFFSETS_FROM) return CUDA_ERROR_INVALID_VALUE;
        size_t there = found->memory->bytes;
        if (offset > there || bytes > there - offset) return CUDA_ERROR_INVALID_VALUE;
        if (!reserved(address, bytes) || any_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
        return map(address, bytes, offset, found->memory);
    });
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    return enter("cuMemUnmap", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] { return unmap(address, bytes); });
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* desc, size_t count) {
    return enter("cuMemSetAccess", CONTEXT | UNSAFE | BLOCKS, [&] {
        if (!desc || !count || !whole(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
        if (!exactly_mapped(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
        for (size_t index = 0; index < count; ++index) {
            if (CUresult failed = set_access(address, bytes, desc[index])) return failed;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
    return enter("cuMemGetAccess", CONTEXT, [&] {
        auto after = gpu.spans.upper_bound(address);
        if (!flags || !location || after == gpu.spans.begin()) return CUDA_ERROR_INVALID_VALUE;
        auto found = std::prev(after);
        bool inside = address - found->first < found->second.bytes && found->second.kind == Span::Mapped;
        if (!inside) return CUDA_ERROR_INVALID_VALUE;
        *flags = static_cast<unsigned long long>(found->second.access);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags) {
    return enter("cuMemGetAllocationGranularity", INITIALIZED, [&] {
        if (!out || !supported(prop)) return CUDA_ERROR_INVALID_VALUE;
        *out = gpu.options.granule;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    return enter("cuMemExportToShareableHandle", CONTEXT | UNSAFE, [&] {
        auto found = gpu.handles.find(handle);
        if (!out || flags || !found || !(found->memory->types & type)) return CUDA_ERROR_INVALID_VALUE;
        if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
            // No other host exists that could import the handle.
            memset(out, 0x5A, sizeof(CUmemFabricHandle));
            return CUDA_SUCCESS;
        }
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
        int copy = fcntl(found->memory->descriptor, F_DUPFD_CLOEXEC, 0);
        if (copy < 0) return CUDA_ERROR_OPERATING_SYSTEM;
        *static_cast<int*>(out) = copy;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* shared,
                                        CUmemAllocationHandleType type) {
    return enter("cuMemImportFromShareableHandle", CONTEXT | UNSAFE, [&] {
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
        int given = static_cast<int>(reinterpret_cast<intptr_t>(shared));
        constexpr int SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
        int seals = fcntl(given, F_GET_SEALS);
        struct stat status {};
        if (seals < 0 || (seals & SEALS) != SEALS || fstat(given, &status)) return CUDA_ERROR_INVALID_VALUE;
        auto memory = std::make_shared<Physical>();
        memory->descriptor = fcntl(given, F_DUPFD_CLOEXEC, 0);
        if (memory->descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
        memory->bytes = static_cast<size_t>(status.st_size);
        memory->types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        memory->imported = true;
        *out = gpu.handles.add(std::make_shared<Handle>(Handle{memory}));
        return CUDA_SUCCESS;
    });
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* address) {
    return enter("cuMemRetainAllocationHandle", CONTEXT | UNSAFE, [&] {
        auto after = gpu.spans.upper_bound(reinterpret_cast<uintptr_t>(address));
        if (!out || after == gpu.spans.begin()) return CUDA_ERROR_INVALID_VALUE;
        auto span = std::prev(after);
        bool inside = reinterpret_cast<uintptr_t>(address) - span->first < span->second.bytes;
        if (!inside || span->second.kind != Span::Mapped) return CUDA_ERROR_INVALID_VALUE;
        for (auto& [handle, known] : gpu.handles.objects) {
            if (known->memory != span->second.memory) continue;
            ++known->references;
            *out = handle;
            return CUDA_SUCCESS;
        }
        *out = gpu.handles.add(std::make_shared<Handle>(Handle{span->second.memory}));
        return CUDA_SUCCESS;
    });
}
