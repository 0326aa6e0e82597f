// The state of the stand-in: memory, streams, events, captures, graphs. One lock protects all of it.
//
// The stand-in starts no threads. A stream is a queue; an operation runs as a whole, on the thread of the call that
// runs it. Without a seed it runs as soon as its edges allow. With a seed, the calls by which a host can notice
// progress run a random number of operations of random streams.
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

// The same layout as in lib.rs. A program that only loads the library gets these defaults.
struct StandinOptions {
    uint64_t seed = 0, memory = 8ull << 30, registration = ~0ull, granule = 2 << 20;
    uint32_t has_seed = 0, major = 9, minor = 0, driver_version = 12080, devices = 1, warp = 32, stub = 0,
             descriptors = 1, processors = 1, fabric = 1, conditional_nodes = 1,
             withheld = 0, host_memory = 1, nodes = 2, peer_access = 1, batches = 1, l2 = 1;
};

namespace driver {

constexpr size_t PAGE = 4096;
constexpr size_t ALIGNMENT = 512;
// From this version on, physical memory can be on a node of the host.
constexpr unsigned HOST_MEMORY_FROM = 12020;

// A point of a stream that the stream has reached or will reach.
struct Mark {
    bool reached = false;
    uint64_t when = 0;  // the host's clock at that moment, in nanoseconds
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
    size_t rows = 1, to_pitch = 0, from_pitch = 0;  // of a copy, each row so many bytes
    unsigned value = 0;
    std::weak_ptr<Function> function;
    unsigned grid[3] = {}, block[3] = {}, shared = 0;
    std::vector<unsigned char> args;
    CUhostFn call = nullptr;
    void* data = nullptr;
    MarkPtr mark;        // what to reach or to wait for; for a launch, its end
    uint64_t event = 0;  // for a node that records or waits for an event from outside
    std::shared_ptr<const Graph> graph;
    std::vector<MarkPtr> marks;  // for a launch, by node: the mark of a node with an event
};

struct Node {
    Action action;
    std::vector<unsigned> after;
    unsigned lane;  // index of the captured stream that it comes from
};

struct Graph {
    std::vector<Node> nodes;
    unsigned lanes = 0;
    unsigned conditionals = 0;  // handles that no node has yet
};

struct Capture {
    uint64_t number, origin;
    CUstreamCaptureMode mode;
    uint64_t thread;
    bool broken = false;
    Graph graph;
    std::vector<unsigned> excused;  // nodes that a wait would have joined, but a test left the wait out
};
typedef std::shared_ptr<Capture> CapturePtr;

// A graph that is running.
struct Run {
    Action launch;
    std::vector<unsigned> missing;  // by node: edges that are not met yet
    std::vector<std::vector<unsigned>> next;
    std::vector<unsigned> ready;
    std::vector<unsigned> weight;  // by lane: how likely its nodes are to run next
    size_t left = 0;
};

struct Device;

struct Stream {
    uint64_t handle = 0;
    Device* context = nullptr;  // the context that created it; null for the two default streams
    unsigned flags = 0;
    int priority = 0;  // reported to callers; it has no other effect
    unsigned weight = 1;
    bool held = false;
    bool busy = false;  // one of its host functions runs, outside the lock
    bool gone = false;  // destroyed; enqueued work still runs
    std::deque<Action> queue;
    std::unique_ptr<Run> run;
    CapturePtr capture;
    std::vector<unsigned> frontier;  // the nodes that the next captured node comes after
    unsigned lane = 0;

    bool idle() const { return queue.empty() && !run && !busy; }
    bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
};

struct Event {
    unsigned flags = 0;
    MarkPtr mark;        // the mark of the last record, unless that was captured
    CapturePtr capture;  // the capture of the last record, if it was captured
    std::vector<unsigned> after;
};

struct Physical {
    int descriptor = -1;
    size_t bytes = 0;
    int types = 0;         // handle types that it can be exported as
    bool host = false;     // on a node of the host
    bool imported = false;
    bool counted = false;  // counts against the device's memory; imported memory does not
    ~Physical();
};
typedef std::shared_ptr<Physical> PhysicalPtr;

struct Handle {
    PhysicalPtr memory;
    unsigned references = 1;
};

enum class Place { Bad, Pageable, Pinned, Device };

// A range of memory that the driver has a record of.
struct Span {
    enum Kind { Allocation, HostAllocation, Registered, Mapped };
    Kind kind;
    size_t bytes;
    uintptr_t map = 0;  // the pages that hold it, guards included
    size_t map_bytes = 0;
    PhysicalPtr memory = nullptr;
    int access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    Device* maker = nullptr;  // for a registration: the device whose context made it
    bool portable = true;     // whether other contexts can use it
    bool orphaned = false;    // that context is gone: no call can release it any more
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

// Objects by handle. The stand-in never reuses a handle, so it detects a stale one.
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

    std::map<const char*, uint64_t> calls_of;  // by the name's literal; each entry has one literal
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
    GIVES_BACK = 16,  // works after the device has failed, and returns the failure
    THREAD_ONLY = 32, // touches only the thread's own state: works after the device has failed
};
// Every API call goes through here: counts the call, checks it, and runs `body` under the lock.
CUresult enter(const char* name, unsigned needs, const std::function<CUresult()>& body);
uint64_t next_random();
uint64_t random_below(uint64_t bound);

// memory.cpp and ranges.cpp
Place place(uintptr_t address, size_t bytes);
// Whether the device's memory has room for this many more bytes.
bool room_for(size_t bytes);
void unmap_pages(uintptr_t address, size_t bytes);

// streams.cpp
std::shared_ptr<Stream> find_stream(CUstream handle);
// Appends to a stream's queue, or to its capture.
CUresult enqueue(CUstream handle, Action action);

// run.cpp
// Runs what the seed picks; without a seed, all that can run.
void observe();
// Called after work was enqueued.
void enqueued();
// Runs until `done`; returns LAUNCH_TIMEOUT if no runnable operation leads there.
CUresult run_until(const std::function<bool()>& done);
CUresult run_all();
void fail(CUresult code);
void drop_finished_streams();

// capture.cpp
CUresult capture_action(Stream& stream, Action action);
CUresult capture_record(Stream& stream, Event& event);
CUresult capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool left_out);
// What a potentially unsafe call returns now; it invalidates the captures that it conflicts with.
CUresult unsafe_call();
// A use of the legacy stream invalidates the captures of blocking streams.
CUresult implicit_use();
CUresult broken(Capture& capture, CUresult code);
void abandon_capture(Stream& stream);

// kernels.cpp
const standin_kernel* find_kernel(const char* name);
unsigned kernel_args(const standin_kernel& kernel);
unsigned kernel_threads(const standin_kernel& kernel);
void run_kernel(const standin_kernel& kernel, const Action& action, uint64_t seed);

}  // namespace driver
