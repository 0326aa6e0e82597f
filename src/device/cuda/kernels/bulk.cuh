// Rows by the bulk copies of sm_90 and later: host memory to shared memory to slot, without a register.
//
// A thread copies rows of its own, one after the other, through a buffer of its own; as many threads do as
// buffers fit, so that `BULK_BYTES` are in flight a block. Rows whose runs, strides or addresses are no
// multiples of 16, or too long for a buffer, take the plain way.
#pragma once

#include "rows.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static const u32 BULK_BYTES = 24 * 1024;
static const u32 MOST_BUFFERS = 64;

struct Bulk {
    alignas(16) unsigned char bytes[BULK_BYTES];
    u64 arrived[MOST_BUFFERS];  // mbarriers
};

static __device__ __forceinline__ u32 shared_address(const void* of) {
    return static_cast<u32>(__cvta_generic_to_shared(of));
}

static __device__ __forceinline__ void bulk_up(u32 buffer, u64 host, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(buffer),
        "l"(host), "r"(bytes), "r"(barrier)
        : "memory");
}

static __device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

static __device__ __forceinline__ void bulk_down(u64 device, u32 buffer, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(device), "r"(buffer),
                 "r"(bytes)
                 : "memory");
}

static __device__ void copy_in_bulk(const Layer& layer, const Stage& stage, u32 rows, u32 buffers, Bulk& bulk,
                                    u32& phase) {
    u32 row_bytes = layer.runs[0] + layer.runs[1];
    u32 barrier = shared_address(&bulk.arrived[threadIdx.x]);
    u32 buffer = shared_address(bulk.bytes) + threadIdx.x * row_bytes;
    for (u32 row = threadIdx.x; row < rows; row += buffers) {
        if (stage.host[row] == 0) continue;
        bulk_up(buffer, stage.host[row], row_bytes, barrier);
        wait_for(barrier, phase);
        phase ^= 1;
        bulk_down(stage.runs[0][row], buffer, layer.runs[0]);
        if (layer.runs[1] > 0) bulk_down(stage.runs[1][row], buffer + layer.runs[0], layer.runs[1]);
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <class RowOf>
static __device__ void copy_rows_in_bulk(const Layer& layer, Stage& stage, Share share, RowOf row_of) {
    __shared__ Bulk bulk;
    u32 row_bytes = layer.runs[0] + layer.runs[1];
    u32 buffers = min(min(BULK_BYTES / row_bytes, MOST_BUFFERS), blockDim.x);
    bool plain = layer.piece_bytes != 16 || buffers == 0;
    if (plain) return copy_rows<false>(layer, stage, share, row_of);
    bool copies = threadIdx.x < buffers;
    if (copies) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                         shared_address(&bulk.arrived[threadIdx.x]))
                     : "memory");
    }
    __syncthreads();
    u32 phase = 0;
    for (u32 first = share.first; first < share.end; first += blockDim.x) {
        u32 rows = stage_rows(slab_of(layer), stage, share, first, row_of);
        if (copies) copy_in_bulk(layer, stage, rows, buffers, bulk, phase);
        __syncthreads();
    }
    // The next stretch makes its barriers anew.
    if (copies) {
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&bulk.arrived[threadIdx.x]))
                     : "memory");
    }
    __syncthreads();
}

#else

// A machine without bulk copies takes the plain way.
template <class RowOf>
static __device__ void copy_rows_in_bulk(const Layer& layer, Stage& stage, Share share, RowOf row_of) {
    copy_rows<false>(layer, stage, share, row_of);
}

#endif
