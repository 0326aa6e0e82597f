// Captures and graphs. A captured stream's work becomes nodes; what the driver forbids invalidates the capture.

#include <algorithm>

#include "state.h"

namespace driver {

namespace {

bool ongoing(const CapturePtr& capture) {
    return std::find(gpu.capturing.begin(), gpu.capturing.end(), capture) != gpu.capturing.end();
}

void join(std::vector<unsigned>& nodes, const std::vector<unsigned>& more) {
    for (unsigned node : more) {
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
    }
}

void release_streams(const CapturePtr& capture) {
    for (auto& [handle, stream] : gpu.streams) {
        if (stream->capture != capture) continue;
        stream->capture = nullptr;
        stream->frontier.clear();
    }
    gpu.capturing.erase(std::remove(gpu.capturing.begin(), gpu.capturing.end(), capture), gpu.capturing.end());
}

// Whether the stream in which the capture began ends after every node.
bool joined(const Capture& capture, const std::vector<unsigned>& frontier) {
    std::vector<bool> seen(capture.graph.nodes.size());
    std::vector<unsigned> open = frontier;
    join(open, capture.excused);
    while (!open.empty()) {
        unsigned node = open.back();
        open.pop_back();
        if (seen[node]) continue;
        seen[node] = true;
        open.insert(open.end(), capture.graph.nodes[node].after.begin(), capture.graph.nodes[node].after.end());
    }
    return std::find(seen.begin(), seen.end(), false) == seen.end();
}

CUresult begin(CUstream handle, CUstreamCaptureMode mode) {
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream->handle == LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->number = ++gpu.captures;
    capture->origin = stream->handle;
    capture->mode = mode;
    capture->thread = thread_number();
    capture->graph.lanes = 1;
    stream->capture = capture;
    stream->frontier.clear();
    stream->lane = 0;
    gpu.capturing.push_back(capture);
    return CUDA_SUCCESS;
}

CUresult end(CUstream handle, CUgraph* out) {
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = nullptr;
    CapturePtr capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream->handle) return broken(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != thread_number()) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    bool whole = joined(*capture, stream->frontier);
    release_streams(capture);
    if (capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!whole) return broken(*capture, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    auto graph = std::make_shared<Graph>(std::move(capture->graph));
    *out = reinterpret_cast<CUgraph>(gpu.graphs.add(graph));
    return CUDA_SUCCESS;
}

CUresult capture_status(CUstream handle, CUstreamCaptureStatus* out, cuuint64_t* number) {
    auto stream = find_stream(handle);
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    bool implicit = false;
    for (auto& [other, captured] : gpu.streams) implicit |= captured->capture && captured->blocking();
    if (stream->handle == LEGACY && implicit) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *out = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!stream->capture) return CUDA_SUCCESS;
    bool good = !stream->capture->broken;
    *out = good ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    if (number) *number = stream->capture->number;
    return CUDA_SUCCESS;
}

CUresult launch(Exec& exec, CUstream handle) {
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    // The driver makes a child graph of such a node; forebay needs none.
    if (stream->capture) return broken(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    Action action;
    action.kind = Action::Launch;
    action.graph = exec.graph;
    for (const Node& node : exec.graph->nodes) {
        action.marks.push_back(nullptr);
        if (!node.action.event) continue;
        auto event = gpu.events.find(node.action.event);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        if (node.action.kind == Action::Record) event->mark = std::make_shared<Mark>();
        action.marks.back() = event->mark;
    }
    if (exec.last && !exec.last->reached) {
        Action wait;
        wait.kind = Action::Wait;
        wait.mark = exec.last;
        if (CUresult failed = enqueue(handle, wait)) return failed;
    }
    action.mark = exec.last = std::make_shared<Mark>();
    return enqueue(handle, action);
}

}  // namespace

CUresult broken(Capture& capture, CUresult code) {
    if (capture.broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture.broken = true;
    return code;
}

CUresult capture_action(Stream& stream, Action action) {
    Capture& capture = *stream.capture;
    if (capture.broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    unsigned node = static_cast<unsigned>(capture.graph.nodes.size());
    capture.graph.nodes.push_back(Node{std::move(action), stream.frontier, stream.lane});
    stream.frontier = {node};
    return CUDA_SUCCESS;
}

CUresult capture_record(Stream& stream, Event& event) {
    if (stream.capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event.mark = nullptr;
    event.capture = stream.capture;
    event.after = stream.frontier;
    return CUDA_SUCCESS;
}

CUresult capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool left_out) {
    if (CapturePtr capture = stream->capture) {
        if (capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (event.capture == capture) {
            join(left_out ? capture->excused : stream->frontier, event.after);
            return CUDA_SUCCESS;
        }
        if (left_out) return CUDA_SUCCESS;
        if (event.capture && ongoing(event.capture)) {
            event.capture->broken = true;
            return broken(*capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
        }
        return broken(*capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    CapturePtr capture = event.capture;
    if (!ongoing(capture)) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    if (capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->handle == LEGACY) return broken(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    // A stream that waits for captured work is captured from then on, even if a test leaves out the edge.
    stream->capture = capture;
    stream->frontier = left_out ? std::vector<unsigned>{} : event.after;
    stream->lane = capture->graph.lanes++;
    return CUDA_SUCCESS;
}

CUresult unsafe_call() {
    CUresult result = CUDA_SUCCESS;
    for (auto& capture : gpu.capturing) {
        bool own = capture->thread == thread_number();
        bool strict = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        bool lax = capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
        bool hit = thread.mode != CU_STREAM_CAPTURE_MODE_RELAXED && own && !lax;
        hit |= thread.mode == CU_STREAM_CAPTURE_MODE_GLOBAL && !own && strict;
        if (!hit) continue;
        result = broken(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    return result;
}

CUresult implicit_use() {
    CUresult result = CUDA_SUCCESS;
    for (auto& [handle, stream] : gpu.streams) {
        if (!stream->capture || !stream->blocking()) continue;
        result = broken(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    return result;
}

void abandon_capture(Stream& stream) {
    CapturePtr capture = stream.capture;
    if (!capture) return;
    capture->broken = true;
    if (capture->origin == stream.handle) release_streams(capture);
    stream.capture = nullptr;
}

}  // namespace driver

using namespace driver;

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return enter("cuStreamBeginCapture_v2", CONTEXT, [&] { return begin(stream, mode); });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return enter("cuStreamEndCapture", CONTEXT | GIVES_BACK, [&] { return end(stream, graph); });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* out) {
    return enter("cuStreamIsCapturing", CONTEXT, [&] {
        return capture_status(handle, out, nullptr);
    });
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* out, cuuint64_t* number, CUgraph* graph,
                                   const CUgraphNode** dependencies, size_t* count) {
    return enter("cuStreamGetCaptureInfo_v2", CONTEXT, [&] {
        if (graph) *graph = nullptr;
        if (dependencies) *dependencies = nullptr;
        if (count) *count = 0;
        return capture_status(handle, out, number);
    });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return enter("cuThreadExchangeStreamCaptureMode", INITIALIZED | THREAD_ONLY, [&] {
        if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        std::swap(*mode, thread.mode);
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphCreate(CUgraph* out, unsigned flags) {
    return enter("cuGraphCreate", CONTEXT, [&] {
        if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
        *out = reinterpret_cast<CUgraph>(gpu.graphs.add(std::make_shared<Graph>()));
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* out, CUgraph handle, CUcontext context, unsigned,
                                        unsigned flags) {
    return enter("cuGraphConditionalHandleCreate", CONTEXT, [&] {
        auto graph = gpu.graphs.find(handle);
        bool known = !context || context == reinterpret_cast<CUcontext>(current());
        if (!out || !graph || !known || flags > 1) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu.options.conditional_nodes) return CUDA_ERROR_NOT_SUPPORTED;
        // The stand-in has no node for this operation.
        *out = ++graph->conditionals;
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
    return enter("cuGraphInstantiateWithFlags", CONTEXT, [&] {
        constexpr unsigned long long PRIORITIES = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        constexpr unsigned long long KNOWN = PRIORITIES | CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        auto graph = gpu.graphs.find(handle);
        if (!out || !graph || graph->conditionals || flags & ~KNOWN) return CUDA_ERROR_INVALID_VALUE;
        if (flags & PRIORITIES) ++gpu.prioritized;
        auto exec = std::make_shared<Exec>();
        exec->graph = graph;
        *out = reinterpret_cast<CUgraphExec>(gpu.execs.add(exec));
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
    return enter("cuGraphLaunch", CONTEXT, [&] {
        auto exec = gpu.execs.find(handle);
        return exec ? launch(*exec, stream) : CUDA_ERROR_INVALID_VALUE;
    });
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream stream) {
    return enter("cuGraphUpload", CONTEXT, [&] {
        return gpu.execs.find(handle) && find_stream(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    return enter("cuGraphExecDestroy", CONTEXT | GIVES_BACK, [&] {
        return gpu.execs.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

CUresult cuGraphDestroy(CUgraph handle) {
    return enter("cuGraphDestroy", CONTEXT | GIVES_BACK, [&] {
        return gpu.graphs.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
    return enter("cuGraphGetNodes", CONTEXT, [&] {
        auto graph = gpu.graphs.find(handle);
        if (!graph || !count) return CUDA_ERROR_INVALID_VALUE;
        // Nodes have no handles in the stand-in; a caller can ask for their number only.
        if (nodes) return CUDA_ERROR_NOT_SUPPORTED;
        *count = graph->nodes.size();
        return CUDA_SUCCESS;
    });
}
