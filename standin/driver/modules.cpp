// Modules, functions and launches. The driver inspects an image but does not run it: the kernels are compiled in.

#include <algorithm>
#include <cctype>
#include <cstring>

#include "state.h"

namespace driver {

namespace {

constexpr unsigned MOST_SHARED = 227 << 10;
constexpr unsigned ELF_CUDA = 190;

// The first words of a 64-bit ELF file, up to the flags that matter here.
struct Elf {
    unsigned char magic[16];
    uint16_t type, machine;
    uint32_t version;
    uint64_t entry, program_headers, section_headers;
    uint32_t flags;
    uint16_t header_bytes, program_header_bytes, program_headers_count, section_header_bytes, sections;
};

// From this version of the format on, the second byte of the flags holds the architecture.
constexpr unsigned ARCHITECTURE_MOVED = 8;

// A cubin runs on a device with the same major version and no smaller minor one; PTX is compiled where that is
// possible.
CUresult check_image(const void* image) {
    if (!image) return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(image, "\x7f" "ELF", 4) == 0) {
        Elf elf;
        memcpy(&elf, image, sizeof elf);
        if (elf.machine != ELF_CUDA) return CUDA_ERROR_INVALID_IMAGE;
        unsigned made_for = elf.magic[8] < ARCHITECTURE_MOVED ? elf.flags & 0xFF : elf.flags >> 8 & 0xFF;
        unsigned device = gpu.options.major * 10 + gpu.options.minor;
        bool runs = made_for / 10 == device / 10 && made_for % 10 <= device % 10;
        return runs ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    const char* text = static_cast<const char*>(image);
    if (strncmp(text, "//", 2) && strncmp(text, ".version", 8)) return CUDA_ERROR_INVALID_IMAGE;
    const char* target = strstr(text, ".target sm_");
    if (!target) return CUDA_ERROR_INVALID_PTX;
    unsigned made_for = 0;
    for (const char* at = target + 11; *at >= '0' && *at <= '9'; ++at) {
        made_for = made_for * 10 + static_cast<unsigned>(*at - '0');
    }
    bool newer = made_for > gpu.options.major * 10 + gpu.options.minor;
    return newer ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
}

// A cubin ends with its section table, PTX with a zero byte.
size_t image_bytes(const void* image) {
    if (memcmp(image, "\x7f" "ELF", 4)) return strlen(static_cast<const char*>(image));
    Elf elf;
    memcpy(&elf, image, sizeof elf);
    size_t sections = elf.section_headers + size_t{elf.sections} * elf.section_header_bytes;
    return std::max(sections, elf.program_headers + size_t{elf.program_headers_count} * elf.program_header_bytes);
}

CUresult load(CUmodule* out, const void* image) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult refused = check_image(image)) return refused;
    auto module = std::make_shared<Module>();
    const char* begin = static_cast<const char*>(image);
    module->image.assign(begin, image_bytes(image));
    *out = reinterpret_cast<CUmodule>(gpu.modules.add(module));
    return CUDA_SUCCESS;
}

// Whether the loaded image contains the kernel. The stand-in has it compiled in either way.
bool holds(const Module& module, const char* name) {
    bool cubin = module.image.compare(0, 4, "\x7f" "ELF") == 0;
    std::string wanted = std::string(cubin ? ".text." : ".entry ") + name;
    size_t at = module.image.find(wanted);
    for (; at != std::string::npos; at = module.image.find(wanted, at + 1)) {
        char next = at + wanted.size() < module.image.size() ? module.image[at + wanted.size()] : 0;
        if (!isalnum(static_cast<unsigned char>(next)) && next != '_') return true;
    }
    return false;
}

CUresult check_shape(const Function& function, const Action& action) {
    static constexpr uint64_t MOST_GRID[] = {0x7FFFFFFF, 65535, 65535}, MOST_BLOCK[] = {1024, 1024, 64};
    uint64_t threads = 1;
    for (int axis = 0; axis < 3; ++axis) {
        unsigned grid = action.grid[axis], block = action.block[axis];
        if (!grid || !block || grid > MOST_GRID[axis] || block > MOST_BLOCK[axis]) return CUDA_ERROR_INVALID_VALUE;
        threads *= block;
    }
    if (threads > 1024 || action.shared > MOST_SHARED) return CUDA_ERROR_INVALID_VALUE;
    if (action.shared > static_cast<unsigned>(function.shared_limit)) return CUDA_ERROR_INVALID_VALUE;
    if (threads > kernel_threads(*function.kernel)) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    return CUDA_SUCCESS;
}

CUresult launch(CUfunction handle, Action action, CUstream stream, void** params, void** extra) {
    auto function = gpu.functions.find(handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    if (CUresult refused = check_shape(*function, action)) return refused;
    size_t bytes = kernel_args(*function->kernel);
    if (bytes && (!params || !params[0])) return CUDA_ERROR_INVALID_VALUE;
    action.kind = Action::Kernel;
    action.function = function;
    action.args.resize(bytes);
    if (bytes) memcpy(action.args.data(), params[0], bytes);
    return enqueue(stream, std::move(action));
}

}  // namespace
}  // namespace driver

using namespace driver;

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
    return enter("cuModuleLoadData", CONTEXT | UNSAFE | BLOCKS, [&] { return load(out, image); });
}

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
    return enter("cuModuleLoadDataEx", CONTEXT | UNSAFE | BLOCKS, [&] { return load(out, image); });
}

CUresult cuModuleUnload(CUmodule handle) {
    return enter("cuModuleUnload", CONTEXT | UNSAFE | BLOCKS | GIVES_BACK, [&] {
        auto module = gpu.modules.find(handle);
        if (!module) return CUDA_ERROR_INVALID_HANDLE;
        if (CUresult failed = run_all(); failed && !gpu.sticky) return failed;
        for (uint64_t function : module->functions) gpu.functions.objects.erase(function);
        gpu.modules.remove(handle);
        return CUDA_SUCCESS;
    });
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
    return enter("cuModuleGetFunction", CONTEXT, [&] {
        auto module = gpu.modules.find(handle);
        if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
        if (!module) return CUDA_ERROR_INVALID_HANDLE;
        const standin_kernel* kernel = find_kernel(name);
        if (!kernel || !holds(*module, name)) return CUDA_ERROR_NOT_FOUND;
        uint64_t function = gpu.functions.add(std::make_shared<Function>(Function{kernel}));
        module->functions.push_back(function);
        *out = reinterpret_cast<CUfunction>(function);
        return CUDA_SUCCESS;
    });
}

CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction handle) {
    return enter("cuFuncGetAttribute", CONTEXT, [&] {
        auto function = gpu.functions.find(handle);
        if (!out || attribute < 0 || attribute > CU_FUNC_ATTRIBUTE_LAST) return CUDA_ERROR_INVALID_VALUE;
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        int version = static_cast<int>(gpu.options.major * 10 + gpu.options.minor);
        *out = 0;
        if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) {
            *out = static_cast<int>(kernel_threads(*function->kernel));
        } else if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) {
            *out = 32;
        } else if (attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION || attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION) {
            *out = version;
        } else if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
            *out = function->shared_limit;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    return enter("cuFuncSetAttribute", CONTEXT, [&] {
        auto function = gpu.functions.find(handle);
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
        bool shared = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if (!shared || value < 0 || value > static_cast<int>(MOST_SHARED)) return CUDA_ERROR_INVALID_VALUE;
        function->shared_limit = value;
        return CUDA_SUCCESS;
    });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction handle, int threads, size_t shared) {
    return enter("cuOccupancyMaxActiveBlocksPerMultiprocessor", CONTEXT, [&] {
        if (!out || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu.functions.find(handle)) return CUDA_ERROR_INVALID_HANDLE;
        int by_shared = shared ? static_cast<int>((228 << 10) / (shared + 1024)) : 32;
        *out = std::min(by_shared, std::min(32, 2048 / threads));
        return CUDA_SUCCESS;
    });
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** params,
                        void** extra) {
    return enter("cuLaunchKernel", CONTEXT, [&] {
        Action action;
        const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
        memcpy(action.grid, grid, sizeof grid);
        memcpy(action.block, block, sizeof block);
        action.shared = shared;
        return launch(function, std::move(action), stream, params, extra);
    });
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
    return enter("cuLaunchKernelEx", CONTEXT, [&] {
        if (!config || (config->numAttrs && !config->attrs)) return CUDA_ERROR_INVALID_VALUE;
        // Attributes may let a kernel begin earlier; beginning later obeys them too.
        for (unsigned index = 0; index < config->numAttrs; ++index) {
            int attribute = config->attrs[index].id;
            if (attribute < 0 || attribute > CU_LAUNCH_ATTRIBUTE_LAST) return CUDA_ERROR_INVALID_VALUE;
        }
        Action action;
        const unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
        const unsigned block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
        memcpy(action.grid, grid, sizeof grid);
        memcpy(action.block, block, sizeof block);
        action.shared = config->sharedMemBytes;
        return launch(function, std::move(action), config->hStream, params, extra);
    });
}
