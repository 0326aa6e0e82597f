// Decides which operation runs next, and runs it.
//
// With a seed each stream has a weight, and within a graph each captured stream has one: how likely it is to run next.
// The weights differ much, so some streams lag far behind others, and they change now and then. In a burst one stream
// runs as far as it can while the others wait.

#include <chrono>
#include <cstring>

#include "state.h"

namespace driver {

namespace {

// A graph's node that waits for an event from outside may not be able to run.
bool node_ready(const Run& run, unsigned node) {
    const Action& action = run.launch.graph->nodes[node].action;
    const MarkPtr& mark = run.launch.marks[node];
    return action.kind != Action::Wait || !mark || mark->reached;
}

bool ready(const Stream& stream) {
    if (stream.held || stream.busy) return false;
    if (stream.run) {
        for (unsigned node : stream.run->ready) {
            if (node_ready(*stream.run, node)) return true;
        }
        return false;
    }
    if (stream.queue.empty()) return false;
    const Action& front = stream.queue.front();
    // The host writes this word without a lock.
    if (front.kind == Action::Await) {
        return __atomic_load_n(reinterpret_cast<const unsigned*>(front.from), __ATOMIC_ACQUIRE) == front.value;
    }
    return front.kind != Action::Wait || front.mark->reached;
}

void reach(const MarkPtr& mark) {
    if (!mark) return;
    mark->reached = true;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    mark->when = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void run_host(Stream& stream, const Action& action) {
    CUhostFn call = action.call;
    void* data = action.data;
    stream.busy = true;
    gpu.lock.unlock();
    thread.in_host_function = true;
    call(data);
    thread.in_host_function = false;
    gpu.lock.lock();
    stream.busy = false;
    gpu.changed.notify_all();
}

void fill(const Action& action) {
    if (action.kind == Action::Fill8) {
        memset(reinterpret_cast<void*>(action.to), static_cast<int>(action.value), action.bytes);
        return;
    }
    unsigned* words = reinterpret_cast<unsigned*>(action.to);
    for (size_t index = 0; index < action.bytes / 4; ++index) words[index] = action.value;
}

bool reachable(uintptr_t address, size_t bytes) { return place(address, bytes) != Place::Bad; }

// A copy, a fill or a kernel.
void execute(const Action& action) {
    uint64_t number = gpu.operations++;
    if (number == gpu.fail_operation_at) return fail(gpu.fail_operation_code);
    if (action.kind == Action::Kernel) {
        auto function = action.function.lock();
        // The module of the kernel was unloaded.
        if (!function) return fail(CUDA_ERROR_ILLEGAL_ADDRESS);
        return run_kernel(*function->kernel, action, gpu.options.has_seed ? next_random() : 0);
    }
    // Memory that a graph uses may have been freed since.
    bool copies = action.kind == Action::Copy;
    size_t between = action.rows - 1;
    bool good = reachable(action.to, between * action.to_pitch + action.bytes) &&
                (!copies || reachable(action.from, between * action.from_pitch + action.bytes));
    if (!good) return fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    if (!copies) return fill(action);
    for (size_t row = 0; row < action.rows; ++row) {
        memmove(reinterpret_cast<void*>(action.to + row * action.to_pitch),
                reinterpret_cast<void*>(action.from + row * action.from_pitch), action.bytes);
    }
}

void begin_run(Stream& stream, Action launch) {
    static constexpr unsigned WEIGHTS[] = {1, 1, 8, 64};
    auto run = std::make_unique<Run>();
    const Graph& graph = *launch.graph;
    run->left = graph.nodes.size();
    run->missing.resize(run->left);
    run->next.resize(run->left);
    for (unsigned node = 0; node < run->left; ++node) {
        run->missing[node] = static_cast<unsigned>(graph.nodes[node].after.size());
        for (unsigned before : graph.nodes[node].after) run->next[before].push_back(node);
        if (!run->missing[node]) run->ready.push_back(node);
    }
    for (unsigned lane = 0; lane < graph.lanes; ++lane) {
        run->weight.push_back(gpu.options.has_seed ? WEIGHTS[random_below(4)] : 1);
    }
    run->launch = std::move(launch);
    if (run->left) {
        stream.run = std::move(run);
    } else {
        reach(run->launch.mark);
    }
}

// Returns the first of the nodes that can run, or with a seed any of them.
size_t pick_node(const Run& run) {
    std::vector<size_t> open;
    uint64_t total = 0;
    size_t first = run.ready.size();
    for (size_t index = 0; index < run.ready.size(); ++index) {
        if (!node_ready(run, run.ready[index])) continue;
        open.push_back(index);
        total += run.weight[run.launch.graph->nodes[run.ready[index]].lane];
        if (first == run.ready.size() || run.ready[index] < run.ready[first]) first = index;
    }
    if (!gpu.options.has_seed) return first;
    uint64_t chosen = random_below(total);
    for (size_t index : open) {
        uint64_t weight = run.weight[run.launch.graph->nodes[run.ready[index]].lane];
        if (chosen < weight) return index;
        chosen -= weight;
    }
    return first;
}

void step_graph(Stream& stream) {
    size_t index = pick_node(*stream.run);
    unsigned node = stream.run->ready[index];
    stream.run->ready.erase(stream.run->ready.begin() + static_cast<std::ptrdiff_t>(index));
    std::shared_ptr<const Graph> graph = stream.run->launch.graph;
    const Action& action = graph->nodes[node].action;
    if (action.kind == Action::Host) {
        run_host(stream, action);
    } else if (action.kind == Action::Record) {
        reach(stream.run->launch.marks[node]);
    } else if (action.kind != Action::Wait) {
        execute(action);
    }
    // A failure, here or while the lock was open, ends all enqueued work.
    if (!stream.run) return;
    Run& run = *stream.run;
    for (unsigned next : run.next[node]) {
        if (--run.missing[next] == 0) run.ready.push_back(next);
    }
    if (--run.left == 0) {
        reach(run.launch.mark);
        stream.run = nullptr;
    }
}

void step(Stream& stream) {
    if (stream.run) return step_graph(stream);
    Action action = std::move(stream.queue.front());
    stream.queue.pop_front();
    switch (action.kind) {
        case Action::Nothing:
        case Action::Wait:
        case Action::Await:
            return;
        case Action::Record:
            return reach(action.mark);
        case Action::Launch:
            return begin_run(stream, std::move(action));
        case Action::Host:
            return run_host(stream, action);
        default:
            return execute(action);
    }
}

std::shared_ptr<Stream> pick_stream() {
    std::vector<std::shared_ptr<Stream>> open;
    uint64_t total = 0;
    for (auto& [handle, stream] : gpu.streams) {
        if (!ready(*stream)) continue;
        if (!gpu.options.has_seed || (gpu.burst && handle == gpu.burst_stream)) {
            if (gpu.burst) --gpu.burst;
            return stream;
        }
        open.push_back(stream);
        total += stream->weight;
    }
    if (open.empty()) return nullptr;
    uint64_t chosen = random_below(total);
    auto picked = open.front();
    for (auto& stream : open) {
        picked = stream;
        if (chosen < stream->weight) break;
        chosen -= stream->weight;
    }
    if (random_below(64) == 0) open[random_below(open.size())]->weight = 1u << random_below(6);
    gpu.burst_stream = picked->handle;
    gpu.burst = random_below(4) ? 0 : 1u << random_below(7);
    return picked;
}

bool run_one() {
    auto stream = pick_stream();
    if (!stream) return false;
    step(*stream);
    if (stream->gone && stream->idle()) gpu.streams.erase(stream->handle);
    return true;
}

bool any_stream_runs() {
    for (auto& [handle, stream] : gpu.streams) {
        if (stream->busy) return true;
    }
    return false;
}

}  // namespace

void observe() {
    uint64_t steps = ~0ull;
    if (gpu.options.has_seed) steps = random_below(4) ? 1ull << random_below(8) : 0;
    while (steps-- && !gpu.sticky && run_one()) {
    }
}

void enqueued() {
    if (!gpu.options.has_seed || random_below(16) == 0) observe();
}

CUresult run_until(const std::function<bool()>& done) {
    std::unique_lock<std::mutex> held(gpu.lock, std::adopt_lock);
    CUresult result = CUDA_SUCCESS;
    while (!(result = gpu.sticky) && !done()) {
        if (run_one()) continue;
        // Another thread is in a host function, so work that depends on it runs afterwards.
        if (any_stream_runs()) {
            gpu.changed.wait(held);
            continue;
        }
        result = CUDA_ERROR_LAUNCH_TIMEOUT;
        break;
    }
    held.release();
    return result;
}

CUresult run_all() {
    return run_until([] {
        for (auto& [handle, stream] : gpu.streams) {
            if (!stream->idle()) return false;
        }
        return true;
    });
}

// As after an illegal address: nothing of the context runs any more, and every call returns this code.
void fail(CUresult code) {
    gpu.sticky = code;
    for (auto& [handle, stream] : gpu.streams) {
        stream->queue.clear();
        stream->run = nullptr;
    }
    drop_finished_streams();
    gpu.changed.notify_all();
}

void drop_finished_streams() {
    for (auto at = gpu.streams.begin(); at != gpu.streams.end();) {
        at = at->second->gone && at->second->idle() ? gpu.streams.erase(at) : std::next(at);
    }
}

}  // namespace driver
