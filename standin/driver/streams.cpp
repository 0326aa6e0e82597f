// Streams and events.

#include <algorithm>

#include "state.h"

namespace driver {

// The legacy stream and the per-thread one exist from their first use on. All threads share the per-thread one here,
// which only adds order.
std::shared_ptr<Stream> find_stream(CUstream handle) {
    uint64_t number = reinterpret_cast<uint64_t>(handle);
    if (number == 0) number = LEGACY;
    auto found = gpu.streams.find(number);
    if (found != gpu.streams.end()) return found->second->gone ? nullptr : found->second;
    if (number != LEGACY && number != PER_THREAD) return nullptr;
    auto stream = std::make_shared<Stream>();
    stream->handle = number;
    gpu.streams[number] = stream;
    return stream;
}

namespace {

// `later` goes on when `earlier` has reached the end of what is enqueued in it now.
void order(Stream& earlier, Stream& later) {
    if (earlier.idle()) return;
    Action record, wait;
    record.kind = Action::Record;
    wait.kind = Action::Wait;
    record.mark = wait.mark = std::make_shared<Mark>();
    earlier.queue.push_back(record);
    later.queue.push_back(wait);
}

// The order between the legacy stream and the blocking streams.
void order_implicitly(Stream& stream) {
    if (!stream.blocking()) return;
    for (auto& [handle, other] : gpu.streams) {
        bool legacy = stream.handle == LEGACY || handle == LEGACY;
        if (legacy && other.get() != &stream && other->blocking()) order(*other, stream);
    }
}

CUresult create_stream(CUstream* out, unsigned flags, int priority) {
    if (!out || (flags & ~CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
    static constexpr unsigned WEIGHTS[] = {1, 2, 8, 32};
    auto stream = std::make_shared<Stream>();
    stream->handle = gpu.next_stream += 16;
    stream->context = current();
    stream->flags = flags;
    stream->priority = std::max(GREATEST_PRIORITY, std::min(priority, 0));
    stream->weight = WEIGHTS[random_below(4)];
    gpu.streams[stream->handle] = stream;
    *out = reinterpret_cast<CUstream>(stream->handle);
    return CUDA_SUCCESS;
}

CUresult record(CUevent handle, CUstream stream, unsigned flags) {
    auto event = gpu.events.find(handle);
    auto found = find_stream(stream);
    if (!event || !found) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    bool external = flags & CU_EVENT_RECORD_EXTERNAL;
    Action action;
    action.kind = Action::Record;
    if (found->capture) {
        if (!external) return capture_record(*found, *event);
        action.event = reinterpret_cast<uint64_t>(handle);
        return enqueue(stream, action);
    }
    if (external) return CUDA_ERROR_INVALID_VALUE;
    action.mark = std::make_shared<Mark>();
    MarkPtr mark = action.mark;
    if (CUresult failed = enqueue(stream, action)) return failed;
    event->mark = mark;
    event->capture = nullptr;
    event->after.clear();
    return CUDA_SUCCESS;
}

CUresult wait(CUstream stream, CUevent handle, unsigned flags) {
    auto event = gpu.events.find(handle);
    auto found = find_stream(stream);
    if (!event || !found) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    uint64_t number = gpu.waits++;
    bool left_out = number >= gpu.unwaited_from && number < gpu.unwaited_to;
    Action action;
    action.kind = Action::Wait;
    if (flags & CU_EVENT_WAIT_EXTERNAL) {
        if (!found->capture) return CUDA_ERROR_INVALID_VALUE;
        action.event = reinterpret_cast<uint64_t>(handle);
        return left_out ? CUDA_SUCCESS : enqueue(stream, action);
    }
    if (found->capture || event->capture) return capture_wait(found, *event, left_out);
    if (left_out || !event->mark || event->mark->reached) return CUDA_SUCCESS;
    action.mark = event->mark;
    return enqueue(stream, action);
}

// A query or a wait for work that is only captured invalidates the capture.
CUresult captured(Event& event) {
    event.capture->broken = true;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult synchronize(Stream& stream) {
    if (stream.capture) return broken(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return run_until([&] { return stream.idle(); });
}

}  // namespace

CUresult enqueue(CUstream handle, Action action) {
    auto stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->handle == LEGACY) {
        if (CUresult refused = implicit_use()) return refused;
    }
    if (stream->capture) return capture_action(*stream, std::move(action));
    order_implicitly(*stream);
    stream->queue.push_back(std::move(action));
    enqueued();
    return CUDA_SUCCESS;
}

}  // namespace driver

using namespace driver;

CUresult cuStreamCreate(CUstream* out, unsigned flags) {
    return enter("cuStreamCreate", CONTEXT, [&] { return create_stream(out, flags, 0); });
}

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
    return enter("cuStreamCreateWithPriority", CONTEXT, [&] { return create_stream(out, flags, priority); });
}

CUresult cuStreamGetPriority(CUstream handle, int* out) {
    return enter("cuStreamGetPriority", CONTEXT, [&] {
        auto stream = find_stream(handle);
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        *out = stream->priority;
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    return enter("cuStreamDestroy_v2", CONTEXT | GIVES_BACK, [&] {
        auto stream = find_stream(handle);
        if (!stream || stream->handle <= PER_THREAD) return CUDA_ERROR_INVALID_HANDLE;
        abandon_capture(*stream);
        stream->gone = true;
        stream->held = false;
        drop_finished_streams();
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamQuery(CUstream handle) {
    return enter("cuStreamQuery", CONTEXT, [&] {
        auto stream = find_stream(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->capture) return broken(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        if (CUresult refused = unsafe_call()) return refused;
        observe();
        return stream->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

CUresult cuStreamSynchronize(CUstream handle) {
    return enter("cuStreamSynchronize", CONTEXT | BLOCKS, [&] {
        auto stream = find_stream(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (!stream->capture) {
            if (CUresult refused = unsafe_call()) return refused;
        }
        return synchronize(*stream);
    });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return enter("cuStreamWaitEvent", CONTEXT, [&] { return wait(stream, event, flags); });
}

// Waits until a word of memory equals `value`, the one comparison that forebay needs. Outside captures.
CUresult cuStreamWaitValue32_v2(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    return enter("cuStreamWaitValue32_v2", CONTEXT, [&] {
        auto stream = find_stream(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (flags != CU_STREAM_WAIT_VALUE_EQ || address % 4 || place(address, 4) == Place::Bad) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (stream->capture) return broken(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        Action action;
        action.kind = Action::Await;
        action.from = address;
        action.value = value;
        return enqueue(handle, action);
    });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
    return enter("cuStreamGetCtx", CONTEXT, [&] {
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        auto stream = find_stream(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        *out = reinterpret_cast<CUcontext>(stream->context ? stream->context : current());
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* out) {
    return enter("cuStreamGetFlags", CONTEXT, [&] {
        auto stream = find_stream(handle);
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        *out = stream->flags;
        return CUDA_SUCCESS;
    });
}

CUresult cuEventCreate(CUevent* out, unsigned flags) {
    return enter("cuEventCreate", CONTEXT, [&] {
        bool untimed = flags & CU_EVENT_DISABLE_TIMING;
        if (!out || flags > 7 || ((flags & CU_EVENT_INTERPROCESS) && !untimed)) return CUDA_ERROR_INVALID_VALUE;
        auto event = std::make_shared<Event>();
        event->flags = flags;
        *out = reinterpret_cast<CUevent>(gpu.events.add(event));
        return CUDA_SUCCESS;
    });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return enter("cuEventRecord", CONTEXT, [&] { return record(event, stream, 0); });
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return enter("cuEventRecordWithFlags", CONTEXT, [&] { return record(event, stream, flags); });
}

CUresult cuEventQuery(CUevent handle) {
    return enter("cuEventQuery", CONTEXT, [&] {
        auto event = gpu.events.find(handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture) return captured(*event);
        if (CUresult refused = unsafe_call()) return refused;
        observe();
        return !event->mark || event->mark->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

CUresult cuEventSynchronize(CUevent handle) {
    return enter("cuEventSynchronize", CONTEXT | BLOCKS, [&] {
        auto event = gpu.events.find(handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture) return captured(*event);
        if (CUresult refused = unsafe_call()) return refused;
        MarkPtr mark = event->mark;
        return run_until([&] { return !mark || mark->reached; });
    });
}

CUresult cuEventDestroy_v2(CUevent handle) {
    return enter("cuEventDestroy_v2", CONTEXT | GIVES_BACK, [&] {
        return gpu.events.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
}

CUresult cuEventElapsedTime(float* out, CUevent start, CUevent end) {
    return enter("cuEventElapsedTime", CONTEXT, [&] {
        auto first = gpu.events.find(start), last = gpu.events.find(end);
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        if (!first || !last || !first->mark || !last->mark) return CUDA_ERROR_INVALID_HANDLE;
        if ((first->flags | last->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
        if (!first->mark->reached || !last->mark->reached) return CUDA_ERROR_NOT_READY;
        // Negative if the second event was reached first.
        *out = static_cast<float>(static_cast<int64_t>(last->mark->when - first->mark->when)) / 1e6f;
        return CUDA_SUCCESS;
    });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn call, void* data) {
    return enter("cuLaunchHostFunc", CONTEXT, [&] {
        if (!call) return CUDA_ERROR_INVALID_VALUE;
        Action action;
        action.kind = Action::Host;
        action.call = call;
        action.data = data;
        return enqueue(stream, action);
    });
}
