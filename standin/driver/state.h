// What the stand-in knows: memory, streams, events, captures, graphs. One lock guards all of it.
//
// There are no threads here. Streams are queues; an operation runs when a call of the host lets it, whole, on
// the thread of that call. Without a seed that is as soon as its edges allow; with one, the calls by which a
// host can notice progress run a random number of operations, of random streams.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"

struct standin_kernel;

// As lib.rs declares it. A program that was only given the library finds its defaults here.
struct StandinOptions {
    uint64_t seed = 0, memory = 8ull << 30, registration = ~0ull;
    uint32_t has_seed = 0, major = 9, minor = 0, driver_version = 12080, devices = 1, warp = 32, stub = 0,
             descriptors = 1, processors = 1, fabric = 1, conditional_nodes = 1,
             withheld = 0, host_memory = 1, nodes = 2;
};

namespace driver {

constexpr size_t PAGE = 4096;
constexpr size_t GRANULE = 2 << 20;
constexpr size_t ALIGNMENT = 512;
// From this version on physical memory can be on a node of the host.
constexpr unsigned HOST_MEMORY_FROM = 12020;

// A point of a stream that was, or will be, reached.
struct Mark {
    bool reached = false;
    uint64_t when = 0;  // the host's clock by then, nanoseconds
};
typedef std::shared_ptr<Mark> MarkPtr;

struct Graph;
struct Function;

// An operation of a stream, or a node of a graph.
struct Action {
    enum Kind { Nothing, Copy, Fill8, Fill32, Kernel, Host, Record, Wait, Await, Launch };
    Kind kind = Nothing;
    uintptr_t to = 0, from = 0;
    size_t bytes = 0;
    unsigned value = 0;
    std::weak_ptr<Function> function;
    unsigned grid[3] = {}, block[3] = {}, shared = 0;
    std::vector<unsigned char> args;
    CUhostFn call = nullptr;
    void* data = nullptr;
    MarkPtr mark;        // what to reach, or to wait for; of a launch, its end
    uint64_t event = 0;  // of a node that records or waits for an event from outside
    std::shared_ptr<const Graph> graph;
    std::vector<MarkPtr> marks;  // of a launch: by node, what a node with an event refers to
};

struct Node {
    Action action;
    std::vector<unsigned> after;
    unsigned lane;  // which of the captured streams it comes from
};

struct Graph {
    std::vector<Node> nodes;
    unsigned lanes = 0;
    unsigned conditionals = 0;  // handles that no node has
};

struct Capture {
    uint64_t number, origin;
    CUstreamCaptureMode mode;
    uint64_t thread;
    bool broken = false;
    Graph graph;
    std::vector<unsigned> excused;  // nodes that a wait left out on purpose would have joined
};
typedef std::shared_ptr<Capture> CapturePtr;

// A graph that is running.
struct Run {
    Action launch;
    std::vector<unsigned> missing;  // by node: edges that are not met yet
    std::vector<std::vector<unsigned>> next;
    std::vector<unsigned> ready;
    std::vector<unsigned> weight;  // by lane: how likely its nodes are to come next
    size_t left = 0;
};

struct Device;

struct Stream {
    uint64_t handle = 0;
    Device* context = nullptr;  // in which it was made; none of the two that everybody has
    unsigned flags = 0;
    int priority = 0;  // told, and otherwise of no effect
    unsigned weight = 1;
    bool held = false;
    bool busy = false;  // a host function of it runs, outside the lock
    bool gone = false;  // destroyed: what is enqueued still runs
    std::deque<Action> queue;
    std::unique_ptr<Run> run;
    CapturePtr capture;
    std::vector<unsigned> frontier;  // what the next captured node comes after
    unsigned lane = 0;

    bool idle() const { return queue.empty() && !run && !busy; }
    bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
};

struct Event {
    unsigned flags = 0;
    MarkPtr mark;        // of the last record, unless that was captured
    CapturePtr capture;  // of the last record, if it was
    std::vector<unsigned> after;
};

struct Physical {
    int descriptor = -1;
    size_t bytes = 0;
    int types = 0;         // what it can be exported as
    bool host = false;     // on a node of the host
    bool counted = false;  // against the device's memory; imported memory is not
    ~Physical();
};
typedef std::shared_ptr<Physical> PhysicalPtr;

struct Handle {
    PhysicalPtr memory;
    unsigned references = 1;
};

enum class Place { Bad, Pageable, Pinned, Device };

// A stretch of memory that the driver knows.
struct Span {
    enum Kind { Allocation, HostAllocation, Registered, Mapped };
    Kind kind;
    size_t bytes;
    uintptr_t map = 0;  // the pages behind it, guards included
    size_t map_bytes = 0;
    PhysicalPtr memory = nullptr;
    int access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    Device* maker = nullptr;  // of a registration: in whose context it was made
    bool portable = true;     // whether other contexts know it
    bool orphaned = false;    // that context is gone: nobody reaches it, and it was not given back
};

struct Module {
    std::string image;
    std::vector<uint64_t> functions;
};

struct Function {
    const standin_kernel* kernel;
    int shared_limit = 48 << 10;
};

struct Exec {
    std::shared_ptr<const Graph> graph;
    MarkPtr last;  // the end of its last launch
};

struct Device {
    int ordinal;
    unsigned retained = 0;
};

// Objects by handle. A handle is never given twice, so a stale one is found out.
template <class T>
struct Table {
    std::map<uint64_t, std::shared_ptr<T>> objects;
    uint64_t next;

    explicit Table(unsigned kind) : next((uint64_t{kind} << 40) + 0x1000) {}
    uint64_t add(std::shared_ptr<T> object) {
        next += 16;
        objects[next] = std::move(object);
        return next;
    }
    std::shared_ptr<T> find(const void* handle) const { return find(reinterpret_cast<uint64_t>(handle)); }
    std::shared_ptr<T> find(uint64_t handle) const {
        auto found = objects.find(handle);
        return found == objects.end() ? nullptr : found->second;
    }
    bool remove(const void* handle) { return objects.erase(reinterpret_cast<uint64_t>(handle)) != 0; }
};

constexpr uint64_t LEGACY = 1, PER_THREAD = 2;
constexpr int GREATEST_PRIORITY = -5;

struct State {
    std::mutex lock;
    std::condition_variable changed;

    StandinOptions options{};
    bool initialized = false;
    std::vector<std::unique_ptr<Device>> devices;
    uint64_t random = 1;

    std::map<const char*, uint64_t> calls_of;  // by the name's literal, which each entry has one of
    uint64_t calls = 0, operations = 0, waits = 0, synchronizations = 0, prioritized = 0;
    uint64_t fail_call_at = ~0ull, fail_operation_at = ~0ull;
    CUresult fail_call_code{}, fail_operation_code{};
    const char* failed = nullptr;
    uint64_t unwaited_from = 0, unwaited_to = 0;
    CUresult sticky = CUDA_SUCCESS;

    uint64_t used = 0;  // bytes of device memory
    std::map<uintptr_t, Span> spans;
    std::map<uintptr_t, size_t> reservations;
    Table<Handle> handles{1};
    std::map<uint64_t, std::shared_ptr<Stream>> streams;
    uint64_t next_stream = (uint64_t{2} << 40) + 0x1000;
    Table<Event> events{3};
    Table<Module> modules{4};
    Table<Function> functions{5};
    Table<Graph> graphs{6};
    Table<Exec> execs{7};
    uint64_t captures = 0;
    std::vector<CapturePtr> capturing;
    uint64_t burst_stream = 0;
    unsigned burst = 0;

    State();
    ~State();
};

extern State gpu;

// devices.cpp
struct Thread {
    static constexpr unsigned MOST = 16;
    Device* contexts[MOST];
    unsigned depth;
    CUstreamCaptureMode mode;
    bool in_host_function;
};
extern thread_local Thread thread;
Device* current();
uint64_t thread_number();

// call.cpp
enum Needs : unsigned {
    INITIALIZED = 1,
    CONTEXT = 2 | INITIALIZED,
    UNSAFE = 4,      // conflicts with captures that are not relaxed
    BLOCKS = 8,      // may block the host, or synchronises implicitly
    GIVES_BACK = 16,  // works after the device has failed, and answers that it has
    THREAD_ONLY = 32, // touches nothing but the thread's own: works after the device has failed
};
// Every call of the API: counts, refuses, and runs `body` under the lock.
CUresult enter(const char* name, unsigned needs, const std::function<CUresult()>& body);
uint64_t next_random();
uint64_t random_below(uint64_t bound);

// memory.cpp and ranges.cpp
Place place(uintptr_t address, size_t bytes);
// Whether the device's memory has room for so many bytes more.
bool room_for(size_t bytes);
void unmap_pages(uintptr_t address, size_t bytes);

// streams.cpp
std::shared_ptr<Stream> find_stream(CUstream handle);
// Appends to a stream's queue, or to its capture.
CUresult enqueue(CUstream handle, Action action);

// run.cpp
// Runs whatever the seed picks, or all that can run.
void observe();
// After something was enqueued.
void enqueued();
// Runs until `done`; LAUNCH_TIMEOUT where nothing that can run leads there.
CUresult run_until(const std::function<bool()>& done);
CUresult run_all();
void fail(CUresult code);
void drop_finished_streams();

// capture.cpp
CUresult capture_action(Stream& stream, Action action);
CUresult capture_record(Stream& stream, Event& event);
CUresult capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool left_out);
// What a potentially unsafe call answers now; it breaks the captures that it conflicts with.
CUresult unsafe_call();
// The legacy stream is used: breaks the captures of blocking streams.
CUresult implicit_use();
CUresult broken(Capture& capture, CUresult code);
void abandon_capture(Stream& stream);

// kernels.cpp
const standin_kernel* find_kernel(const char* name);
unsigned kernel_args(const standin_kernel& kernel);
unsigned kernel_threads(const standin_kernel& kernel);
void run_kernel(const standin_kernel& kernel, const Action& action, uint64_t seed);

}  // namespace driver
