// Runs CUDA C++ on a CPU: the definitions that let g++ compile a kernel's source without changes.
//
// Blocks run one after the other, in an order that the seed shuffles. Each CUDA thread of a block is a fibre with its
// own stack. It runs until a barrier or a warp operation; there the seed picks the next thread among those that can go
// on. In about every other block, one thread runs only when no other can. So a result that depends on the order of
// threads between two barriers differs from seed to seed. The header fills shared memory with junk before each block.
//
// Errors that would hang or be undefined on a GPU end the process with a message: a barrier that some threads of a
// block do not reach, or that threads reach on different lines; a warp operation whose mask names a lane that never
// arrives; a misaligned vector access.
//
// Not modelled: blocks that wait for each other, memory that is slow to become visible, time.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <vector>

#if !defined(__x86_64__)
#error "the stack switch is x86-64's"
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// A compiled-in kernel; `args` points to `args_bytes` bytes, the by-value argument of the kernel.
struct standin_kernel {
    const char* name;
    void (*run)(const unsigned grid[3], const unsigned block[3], unsigned shared_bytes, const void* args,
                unsigned long long seed);
    unsigned args_bytes;
    unsigned max_threads;
};

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace standin {

typedef unsigned long long u64;

constexpr unsigned WARP = 32;
constexpr unsigned MOST_THREADS = 1024;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK = 256 << 10;
constexpr size_t FRAMES_LEFT = 4096;
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t GUARD = 4096;

// The source line at which a thread waits.
struct Site {
    const char* file;
    int line;
    bool operator==(const Site& other) const {
        return line == other.line && (file == other.file || (file && other.file && !strcmp(file, other.file)));
    }
};

enum class State : unsigned char { Ready, Barrier, Warp, Ended };

struct Fiber;
// What a warp operation does once all lanes of its mask have arrived.
typedef void (*Meeting)(unsigned mask, Fiber* lanes);

struct Fiber {
    void* stack_pointer;
    uint3 index;
    State state;
    Site site;
    unsigned mask, parameter;
    Meeting meeting;
    u64 value, result;
    char* stack;
    size_t stack_bytes;
};

// The running block. A library runs one at a time: `launch` holds the lock.
struct Block {
    const char* kernel;
    void (*body)(const void*);
    const void* args;
    dim3 grid, shape;
    uint3 index;
    unsigned threads, ready_count, at_barrier, ended;
    unsigned gathered;  // what threads contribute to a barrier that counts
    unsigned starved;   // this thread runs only when no other can
    u64 random;
    char* dynamic;
    unsigned dynamic_bytes;
    Fiber* now;
    Fiber host;
    unsigned short ready[MOST_THREADS];
    unsigned arrived[MOST_THREADS / WARP];
    Fiber fibers[MOST_THREADS];
};

// Stacks stay mapped from launch to launch, each above a guard page.
struct Machine {
    std::mutex lock;
    Block block{};
    char* stacks = nullptr;

    char* stack(unsigned index) {
        if (!stacks) {
            void* map = mmap(nullptr, MOST_THREADS * (STACK + GUARD), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (map == MAP_FAILED) abort();
            stacks = static_cast<char*>(map);
        }
        char* stack = stacks + index * (STACK + GUARD) + GUARD;
        if (!block.fibers[index].stack && mprotect(stack, STACK, PROT_READ | PROT_WRITE)) abort();
        return stack;
    }

    ~Machine() {
        if (stacks) munmap(stacks, MOST_THREADS * (STACK + GUARD));
    }
};

inline Machine machine;
inline Block& block = machine.block;

[[noreturn]] inline void give_up(const char* what) {
    fprintf(stderr, "standin: kernel %s, block (%u, %u, %u): %s\n", block.kernel, block.index.x, block.index.y,
            block.index.z, what);
    fflush(stderr);
    abort();
}

// No thread can go on, and some have not ended: prints which thread waits for what.
[[noreturn]] inline void report_deadlock() {
    fprintf(stderr, "standin: kernel %s: %u of %u threads have ended, %u wait at a barrier\n", block.kernel,
            block.ended, block.threads, block.at_barrier);
    unsigned shown = 0;
    for (unsigned thread = 0; thread < block.threads && shown < 8; ++thread) {
        const Fiber& fiber = block.fibers[thread];
        bool first = thread == 0 || !(block.fibers[thread - 1].site == fiber.site) ||
                     block.fibers[thread - 1].state != fiber.state;
        if (fiber.state == State::Ended || (fiber.state == State::Barrier && !first)) continue;
        ++shown;
        if (fiber.state == State::Barrier) {
            fprintf(stderr, "  thread %u: barrier at %s:%d\n", thread, fiber.site.file, fiber.site.line);
            continue;
        }
        unsigned absent = fiber.mask & ~block.arrived[thread / WARP];
        fprintf(stderr, "  thread %u: warp operation at %s:%d, mask %08x, of which %08x never came\n", thread,
                fiber.site.file, fiber.site.line, fiber.mask, absent);
    }
    give_up(block.at_barrier ? "a barrier that not all threads of the block reach"
                             : "a warp operation whose mask names a lane that never comes");
}

// Saves the caller's registers on its stack, and continues where `to` was left.
__attribute__((naked, noinline, unused)) static void switch_stacks(void** /*from*/, void* /*to*/) {
    asm volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "subq $8, %rsp\n stmxcsr (%rsp)\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "ldmxcsr (%rsp)\n addq $8, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n");
}

inline void jump(Fiber& from, Fiber& to, [[maybe_unused]] bool ends) {
    block.now = &to;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake, to.stack, to.stack_bytes);
    switch_stacks(&from.stack_pointer, to.stack_pointer);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    switch_stacks(&from.stack_pointer, to.stack_pointer);
#endif
}

inline unsigned random_below(unsigned count) {
    block.random ^= block.random << 13;
    block.random ^= block.random >> 7;
    block.random ^= block.random << 17;
    return static_cast<unsigned>(((block.random >> 32) * count) >> 32);
}

inline void make_ready(Fiber& fiber) {
    fiber.state = State::Ready;
    block.ready[block.ready_count++] = static_cast<unsigned short>(&fiber - block.fibers);
}

// Lets any thread run that can; returns when the seed picks the caller.
inline void yield(bool ends = false) {
    if (block.ready_count == 0) report_deadlock();
    unsigned pick = random_below(block.ready_count);
    if (block.ready[pick] == block.starved) pick = (pick + 1) % block.ready_count;
    Fiber& next = block.fibers[block.ready[pick]];
    block.ready[pick] = block.ready[--block.ready_count];
    Fiber& self = *block.now;
    if (&next != &self) jump(self, next, ends);
}

// The first function on a thread's stack.
[[noreturn]] inline void begin() {
#if defined(__SANITIZE_ADDRESS__)
    const void* from = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &from, &bytes);
    if (!block.host.stack) {
        block.host.stack = static_cast<char*>(const_cast<void*>(from));
        block.host.stack_bytes = bytes;
    }
#endif
    block.body(block.args);
    block.now->state = State::Ended;
    if (++block.ended == block.threads) jump(*block.now, block.host, true);
    yield(true);
    abort();
}

// Threads of the previous block mean nothing to the next one: their frames are made anew.
inline void prepare(unsigned thread) {
    Fiber& fiber = block.fibers[thread];
    fiber.stack = machine.stack(thread);
    fiber.stack_bytes = STACK;
    fiber.site = {nullptr, 0};
    fiber.index = {thread % block.shape.x, thread / block.shape.x % block.shape.y,
                   thread / (block.shape.x * block.shape.y)};
    // The layout that `switch_stacks` leaves on a stack: mxcsr, six registers, the return address. At the entry of a
    // function the stack pointer is 8 above a multiple of 16.
    void** top = reinterpret_cast<void**>(fiber.stack + STACK) - 2;
#if defined(__SANITIZE_ADDRESS__)
    // `begin` and the functions it called last never returned, and left the sanitizer's marks of their frames.
    __asan_unpoison_memory_region(fiber.stack + STACK - FRAMES_LEFT, FRAMES_LEFT);
#endif
    unsigned mxcsr = 0;
    asm volatile("stmxcsr %0" : "=m"(mxcsr));
    top[0] = reinterpret_cast<void*>(&begin);
    top[1] = nullptr;
    memset(top - 6, 0, 6 * sizeof(void*));
    top[-7] = reinterpret_cast<void*>(static_cast<uintptr_t>(mxcsr));
    fiber.stack_pointer = top - 7;
    make_ready(fiber);
}

}  // namespace standin

// All static shared memory is in one section, so that it can be filled with junk. The sanitizer guards globals only in
// their default section.
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static
#else
#define __shared__ static __attribute__((section("standin_shared")))
extern "C" __attribute__((weak, visibility("hidden"))) char __start_standin_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_standin_shared[];
#endif

namespace standin {

constexpr int JUNK = 0xA5;

inline void spoil_shared() {
    if (block.dynamic_bytes) memset(block.dynamic, JUNK, block.dynamic_bytes);
#if !defined(__SANITIZE_ADDRESS__)
    if (__start_standin_shared) {
        memset(__start_standin_shared, JUNK, static_cast<size_t>(__stop_standin_shared - __start_standin_shared));
    }
#endif
}

// The clock of all multiprocessors; one block runs at a time.
inline u64 cycles;

// The lines that kernels asked for, and when; kept while a test asks for them.
struct Asked {
    u64 address, cycle;
};
inline std::vector<Asked>* asked;

// Reads the line, and notes it.
inline void prefetch(const char* line) {
    static_cast<void>(*static_cast<const volatile char*>(line));
    if (asked) asked->push_back({reinterpret_cast<u64>(line), cycles});
}

inline u64 scramble(u64 word) {
    word += 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

// Blocks in the order first, first + stride, ... modulo their number, which is coprime to the stride.
inline u64 coprime_stride(u64 seed, u64 count) {
    for (u64 stride = seed % count;; stride = (stride + 1) % count) {
        u64 a = stride, b = count;
        while (b) {
            u64 rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) return stride;
    }
}

inline void run_block(u64 number, u64 seed) {
    block.index = {static_cast<unsigned>(number % block.grid.x),
                   static_cast<unsigned>(number / block.grid.x % block.grid.y),
                   static_cast<unsigned>(number / block.grid.x / block.grid.y)};
    block.random = scramble(seed ^ scramble(number)) | 1;
    block.ready_count = block.at_barrier = block.ended = block.gathered = 0;
    // The starved thread reads late, when the others have long changed the data: a race shows.
    block.starved = random_below(2 * block.threads);
    memset(block.arrived, 0, sizeof block.arrived);
    spoil_shared();
    for (unsigned thread = 0; thread < block.threads; ++thread) prepare(thread);
    block.now = &block.host;
    yield();
}

inline void launch(const standin_kernel& kernel, void (*body)(const void*), const unsigned grid[3],
                   const unsigned shape[3], unsigned shared_bytes, const void* args, u64 seed) {
    std::lock_guard<std::mutex> held(machine.lock);
    block.kernel = kernel.name;
    block.body = body;
    block.args = args;
    block.grid = {grid[0], grid[1], grid[2]};
    block.shape = {shape[0], shape[1], shape[2]};
    u64 threads = u64{shape[0]} * shape[1] * shape[2], blocks = u64{grid[0]} * grid[1] * grid[2];
    if (threads == 0 || threads > kernel.max_threads || threads > MOST_THREADS || blocks == 0) {
        give_up("threads or blocks of a launch");
    }
    block.threads = static_cast<unsigned>(threads);
    // It ends at the end of an allocation, so that the sanitizer detects an access beyond it.
    block.dynamic_bytes = shared_bytes;
    void* dynamic = nullptr;
    if (posix_memalign(&dynamic, 16, shared_bytes ? shared_bytes : 1)) give_up("no memory for shared memory");
    block.dynamic = static_cast<char*>(dynamic);
    block.host.stack = nullptr;
    u64 number = scramble(seed) % blocks, stride = coprime_stride(scramble(seed + 1), blocks);
    for (u64 done = 0; done < blocks; ++done) {
        run_block(number, seed);
        number = (number + stride) % blocks;
    }
    free(block.dynamic);
}

// Every kernel of the library.
struct Registry {
    static constexpr unsigned MOST = 64;
    standin_kernel kernels[MOST];
    unsigned count = 0;
};

inline Registry& registry() {
    static Registry kernels;
    return kernels;
}

struct Registered {
    explicit Registered(const standin_kernel& kernel) {
        if (registry().count == Registry::MOST) abort();
        registry().kernels[registry().count++] = kernel;
    }
};

inline const standin_kernel* find(const char* name) {
    for (unsigned index = 0; index < registry().count; ++index) {
        if (!strcmp(registry().kernels[index].name, name)) return &registry().kernels[index];
    }
    return nullptr;
}

// Waits for all threads of the block and returns the sum of what they contribute.
inline unsigned barrier(unsigned brings, Site site) {
    Fiber& self = *block.now;
    self.state = State::Barrier;
    self.site = site;
    block.gathered += brings;
    if (++block.at_barrier == block.threads) {
        block.at_barrier = 0;
        for (unsigned thread = 0; thread < block.threads; ++thread) {
            Fiber& other = block.fibers[thread];
            if (!(other.site == site)) {
                fprintf(stderr, "standin: %s:%d and %s:%d\n", site.file, site.line, other.site.file,
                        other.site.line);
                give_up("threads of one block wait at different barriers");
            }
            other.result = block.gathered;
            make_ready(other);
        }
        block.gathered = 0;
    }
    yield();
    return static_cast<unsigned>(self.result);
}

inline unsigned thread_number() { return static_cast<unsigned>(block.now - block.fibers); }

// Waits for the lanes of `mask`; the last lane to arrive runs `meeting` for all of them.
inline u64 meet(unsigned mask, Meeting meeting, u64 value, unsigned parameter, Site site) {
    Fiber& self = *block.now;
    unsigned number = thread_number(), lane = number % WARP;
    if (!(mask >> lane & 1)) give_up("a warp operation whose mask leaves out the lane that calls it");
    self.state = State::Warp;
    self.site = site;
    self.mask = mask;
    self.meeting = meeting;
    self.value = value;
    self.parameter = parameter;
    unsigned& arrived = block.arrived[number / WARP];
    arrived |= 1u << lane;
    Fiber* lanes = block.fibers + (number - lane);
    bool complete = (mask & ~arrived) == 0;
    for (unsigned left = mask; complete && left; left &= left - 1) {
        const Fiber& other = lanes[__builtin_ctz(left)];
        complete = other.mask == mask && other.meeting == meeting && other.site == site;
    }
    if (complete) {
        meeting(mask, lanes);
        arrived &= ~mask;
        for (unsigned left = mask; left; left &= left - 1) make_ready(lanes[__builtin_ctz(left)]);
    }
    yield();
    return self.result;
}

// Gives each lane of the mask the result of `of` for that lane.
template <class Of>
inline void for_lanes(unsigned mask, Fiber* lanes, Of of) {
    for (unsigned left = mask; left; left &= left - 1) {
        unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
        lanes[lane].result = of(lane);
    }
}

inline void only_meet(unsigned, Fiber*) {}

inline void ballot(unsigned mask, Fiber* lanes) {
    unsigned set = 0;
    for_lanes(mask, lanes, [&](unsigned lane) {
        set |= unsigned{lanes[lane].value != 0} << lane;
        return 0;
    });
    for_lanes(mask, lanes, [&](unsigned) { return set; });
}

// The parameter is the lane to read; a lane outside the mask has no value.
inline void shuffle(unsigned mask, Fiber* lanes) {
    for_lanes(mask, lanes, [&](unsigned lane) {
        unsigned from = lanes[lane].parameter;
        if (!(mask >> from & 1)) give_up("a shuffle from a lane outside the mask");
        return lanes[from].value;
    });
}

inline void match(unsigned mask, Fiber* lanes) {
    for_lanes(mask, lanes, [&](unsigned lane) {
        unsigned same = 0;
        for (unsigned left = mask; left; left &= left - 1) {
            unsigned other = static_cast<unsigned>(__builtin_ctz(left));
            same |= unsigned{lanes[other].value == lanes[lane].value} << other;
        }
        return same;
    });
}

template <class Fold>
inline void reduce(unsigned mask, Fiber* lanes, Fold fold) {
    unsigned first = static_cast<unsigned>(__builtin_ctz(mask));
    unsigned all = static_cast<unsigned>(lanes[first].value);
    for (unsigned left = mask & (mask - 1); left; left &= left - 1) {
        all = fold(all, static_cast<unsigned>(lanes[__builtin_ctz(left)].value));
    }
    for_lanes(mask, lanes, [&](unsigned) { return all; });
}

inline void reduce_add(unsigned mask, Fiber* lanes) {
    reduce(mask, lanes, [](unsigned a, unsigned b) { return a + b; });
}
inline void reduce_min(unsigned mask, Fiber* lanes) {
    reduce(mask, lanes, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline void reduce_max(unsigned mask, Fiber* lanes) {
    reduce(mask, lanes, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline void reduce_or(unsigned mask, Fiber* lanes) {
    reduce(mask, lanes, [](unsigned a, unsigned b) { return a | b; });
}
inline void reduce_and(unsigned mask, Fiber* lanes) {
    reduce(mask, lanes, [](unsigned a, unsigned b) { return a & b; });
}

template <class T>
inline T shuffled(unsigned mask, T value, unsigned from, Site site) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    u64 word = 0;
    memcpy(&word, &value, sizeof(T));
    word = meet(mask, shuffle, word, from, site);
    memcpy(&value, &word, sizeof(T));
    return value;
}

template <class T>
inline T* aligned(T* address) {
    if (reinterpret_cast<uintptr_t>(address) % alignof(T)) give_up("a misaligned address");
    return address;
}

}  // namespace standin

#define __device__ __attribute__((unused))
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define threadIdx (standin::block.now->index)
#define blockIdx (standin::block.index)
#define blockDim (standin::block.shape)
#define gridDim (standin::block.grid)
#define warpSize 32

#define FOREBAY_UNROLL

// `T* name`, the launch's dynamic shared memory.
#define FOREBAY_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(standin::block.dynamic)

// Defines a kernel and registers it. Its body follows, and can use `args`.
#define FOREBAY_KERNEL(name, Args, most_threads, least_blocks)                                                  \
    static void name##_body(const Args& args);                                                                  \
    static void name##_run(const unsigned grid[3], const unsigned shape[3], unsigned shared, const void* args,  \
                           unsigned long long seed);                                                            \
    static const standin_kernel name##_kernel = {#name, name##_run, sizeof(Args), most_threads};                \
    static const standin::Registered name##_registered(name##_kernel);                                          \
    static void name##_run(const unsigned grid[3], const unsigned shape[3], unsigned shared, const void* args,  \
                           unsigned long long seed) {                                                           \
        auto body = [](const void* given) { name##_body(*static_cast<const Args*>(given)); };                   \
        standin::launch(name##_kernel, body, grid, shape, shared, args, seed);                                  \
    }                                                                                                           \
    static void name##_body([[maybe_unused]] const Args& args)

// The line number distinguishes call sites: callers never pass the last parameters.
#define STANDIN_SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()
#define STANDIN_HERE \
    standin::Site { file, line }

inline void __syncthreads(STANDIN_SITE) { standin::barrier(0, STANDIN_HERE); }
inline int __syncthreads_count(int is, STANDIN_SITE) {
    return static_cast<int>(standin::barrier(is != 0, STANDIN_HERE));
}
inline int __syncthreads_or(int is, STANDIN_SITE) { return standin::barrier(is != 0, STANDIN_HERE) != 0; }
inline int __syncthreads_and(int is, STANDIN_SITE) { return standin::barrier(is == 0, STANDIN_HERE) == 0; }

inline void __syncwarp(unsigned mask = ~0u, STANDIN_SITE) {
    standin::meet(mask, standin::only_meet, 0, 0, STANDIN_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int is, STANDIN_SITE) {
    return static_cast<unsigned>(standin::meet(mask, standin::ballot, is != 0, 0, STANDIN_HERE));
}
inline int __any_sync(unsigned mask, int is, STANDIN_SITE) {
    return standin::meet(mask, standin::ballot, is != 0, 0, STANDIN_HERE) != 0;
}
inline int __all_sync(unsigned mask, int is, STANDIN_SITE) {
    return standin::meet(mask, standin::ballot, is != 0, 0, STANDIN_HERE) == mask;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, STANDIN_SITE) {
    return static_cast<unsigned>(
        standin::meet(mask, standin::match, static_cast<standin::u64>(value), 0, STANDIN_HERE));
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, STANDIN_SITE) {
    return standin::shuffled(mask, value, static_cast<unsigned>(from) % standin::WARP, STANDIN_HERE);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int with, STANDIN_SITE) {
    unsigned lane = standin::thread_number() % standin::WARP;
    return standin::shuffled(mask, value, (lane ^ static_cast<unsigned>(with)) % standin::WARP, STANDIN_HERE);
}
// Reads from `by` lanes below, or above; a lane for which there is none keeps its own value.
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, STANDIN_SITE) {
    unsigned lane = standin::thread_number() % standin::WARP;
    return standin::shuffled(mask, value, lane >= by ? lane - by : lane, STANDIN_HERE);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, STANDIN_SITE) {
    unsigned lane = standin::thread_number() % standin::WARP;
    return standin::shuffled(mask, value, lane + by < standin::WARP ? lane + by : lane, STANDIN_HERE);
}
#define STANDIN_REDUCE(name)                                                                                    \
    inline unsigned __reduce_##name##_sync(unsigned mask, unsigned value, STANDIN_SITE) {                       \
        return static_cast<unsigned>(standin::meet(mask, standin::reduce_##name, value, 0, STANDIN_HERE));      \
    }
STANDIN_REDUCE(add)
STANDIN_REDUCE(min)
STANDIN_REDUCE(max)
STANDIN_REDUCE(or)
STANDIN_REDUCE(and)

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __popcll(unsigned long long word) { return __builtin_popcountll(word); }
inline int __clz(int word) { return word ? __builtin_clz(static_cast<unsigned>(word)) : 32; }
inline int __clzll(long long word) { return word ? __builtin_clzll(static_cast<unsigned long long>(word)) : 64; }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __ffsll(long long word) { return __builtin_ffsll(word); }
inline unsigned __brev(unsigned word) {
    unsigned turned = 0;
    for (unsigned bit = 0; bit < 32; ++bit) turned |= (word >> bit & 1) << (31 - bit);
    return turned;
}

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

template <class T>
inline T __ldg(const T* from) {
    return *standin::aligned(from);
}
template <class T>
inline T __ldcs(const T* from) {
    return *standin::aligned(from);
}

// Each look at the clock takes a cycle, and a thread that sleeps lets so many pass.
inline long long clock64() { return static_cast<long long>(++standin::cycles); }
inline void __nanosleep(unsigned ns) { standin::cycles += ns; }

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Atomic to other threads of the process as well: the host may read its memory while a kernel runs.
#define STANDIN_ATOMICS(T)                                                                                      \
    inline T atomicAdd(T* at, T by) { return __atomic_fetch_add(standin::aligned(at), by, __ATOMIC_RELAXED); } \
    inline T atomicOr(T* at, T by) { return __atomic_fetch_or(standin::aligned(at), by, __ATOMIC_RELAXED); }   \
    inline T atomicAnd(T* at, T by) { return __atomic_fetch_and(standin::aligned(at), by, __ATOMIC_RELAXED); } \
    inline T atomicExch(T* at, T by) { return __atomic_exchange_n(standin::aligned(at), by, __ATOMIC_RELAXED); }\
    inline T atomicCAS(T* at, T was, T by) {                                                                    \
        __atomic_compare_exchange_n(standin::aligned(at), &was, by, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
        return was;                                                                                             \
    }                                                                                                           \
    inline T atomicMin(T* at, T by) {                                                                           \
        T was = __atomic_load_n(standin::aligned(at), __ATOMIC_RELAXED);                                        \
        while (by < was &&                                                                                      \
               !__atomic_compare_exchange_n(at, &was, by, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {          \
        }                                                                                                       \
        return was;                                                                                             \
    }                                                                                                           \
    inline T atomicMax(T* at, T by) {                                                                           \
        T was = __atomic_load_n(standin::aligned(at), __ATOMIC_RELAXED);                                        \
        while (by > was &&                                                                                      \
               !__atomic_compare_exchange_n(at, &was, by, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {          \
        }                                                                                                       \
        return was;                                                                                             \
    }
STANDIN_ATOMICS(int)
STANDIN_ATOMICS(unsigned)
STANDIN_ATOMICS(unsigned long long)
