/* Copies and fills in stream order, and words in memory that a stream waits for or writes. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

host_bell_t host_memory_bell;

/* A pointer that an item is going to use: an area of ours must hold all of it, and other memory is the
 * process's own business unless the settings say that device pointers must be ours. */
static CUresult check_range(const void *pointer, size_t bytes, bool device_side) {
    host_memory_t found;
    if (pointer == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    host_memory_find(pointer, &found);
    if (!found.own)
        return device_side && host_config()->refuse_foreign ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    size_t offset = (size_t)((const char *)pointer - (const char *)found.base);
    return bytes <= found.bytes - offset ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- copies and fills ----------------------------------------------------------------------------- */

typedef struct {
    host_work_t work;
    void *to;
    const void *from; /* NULL: fill */
    unsigned char value;
} transfer_t;

static host_progress_t transfer_step(host_work_t *work) {
    transfer_t *transfer = (transfer_t *)work;
    if (transfer->from != NULL)
        memmove(transfer->to, transfer->from, work->bytes);
    else
        memset(transfer->to, transfer->value, work->bytes);
    return HOST_DONE;
}

static void release(host_work_t *work) {
    free(work);
}

static CUresult transfer(CUstream stream, const transfer_t *wanted, size_t bytes) {
    if (bytes == 0) {
        CUstream found;
        return host_stream_resolve(stream, &found);
    }
    transfer_t *made = malloc(sizeof *made);
    if (made == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *made = *wanted;
    made->work =
        (host_work_t){.step = transfer_step, .release = release, .kind = HOST_WORK_COPY, .bytes = bytes};
    CUresult result = host_stream_submit(stream, &made->work);
    if (result != CUDA_SUCCESS)
        free(made);
    return result;
}

static CUresult copy(const char *function, void *to, bool to_device, const void *from, bool from_device,
                     size_t bytes, CUstream stream) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && bytes != 0)
        result = check_range(to, bytes, to_device);
    if (result == CUDA_SUCCESS && bytes != 0)
        result = check_range(from, bytes, from_device);
    if (result == CUDA_SUCCESS)
        result = transfer(stream, &(transfer_t){.to = to, .from = from}, bytes);
    return host_leave(function, stream, to, result);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyAsync", (void *)(uintptr_t)dst, false, (const void *)(uintptr_t)src, false, bytes,
                stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyHtoDAsync_v2", (void *)(uintptr_t)dst, true, src, false, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyDtoHAsync_v2", dst, false, (const void *)(uintptr_t)src, true, bytes, stream);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
    void *to = (void *)(uintptr_t)dst;
    CUresult result = host_enter("cuMemsetD8Async", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && bytes != 0)
        result = check_range(to, bytes, true);
    if (result == CUDA_SUCCESS)
        result = transfer(stream, &(transfer_t){.to = to, .value = value}, bytes);
    return host_leave("cuMemsetD8Async", stream, to, result);
}

/* ---- words ---------------------------------------------------------------------------------------- */

typedef struct {
    host_work_t work;
    _Atomic uint32_t *word;
    uint32_t value;
} word_t;

static host_progress_t wait_step(host_work_t *work) {
    word_t *wait = (word_t *)work;
    work->bell = &host_memory_bell;
    work->bell_seen = host_bell_look(&host_memory_bell);
    /* the comparison is cyclic, as the driver defines it */
    uint32_t distance = atomic_load_explicit(wait->word, memory_order_acquire) - wait->value;
    return (int32_t)distance >= 0 ? HOST_DONE : HOST_BLOCKED;
}

static host_progress_t write_step(host_work_t *work) {
    word_t *write = (word_t *)work;
    atomic_store_explicit(write->word, write->value, memory_order_release);
    host_bell_ring(&host_memory_bell);
    return HOST_DONE;
}

static CUresult submit_word(CUstream stream, CUdeviceptr address, uint32_t value, bool is_wait) {
    if (host_config()->quirk_no_memory_ops)
        return CUDA_ERROR_NOT_SUPPORTED;
    host_memory_t found;
    host_memory_find((void *)(uintptr_t)address, &found);
    /* a device can wait only for memory that it maps */
    if (!found.own || address % sizeof(uint32_t) != 0 ||
        check_range((void *)(uintptr_t)address, sizeof(uint32_t), true) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    word_t *word = malloc(sizeof *word);
    if (word == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    word->work = (host_work_t){
        .step = is_wait ? wait_step : write_step,
        .release = release,
        .kind = HOST_WORK_MARK,
        .unrung = is_wait, /* the host may store the value with no word to anybody */
    };
    word->word = (_Atomic uint32_t *)(uintptr_t)address;
    word->value = value;
    CUresult result = host_stream_submit(stream, &word->work);
    if (result != CUDA_SUCCESS)
        free(word);
    return result;
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
    CUresult result = host_enter("cuStreamWaitValue32_v2", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && flags != CU_STREAM_WAIT_VALUE_GEQ) {
        host_last_error("cuStreamWaitValue32: the host engine knows the comparison GEQ only");
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    if (result == CUDA_SUCCESS)
        result = submit_word(stream, addr, value, true);
    return host_leave("cuStreamWaitValue32_v2", stream, (void *)(uintptr_t)addr, result);
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
    CUresult result = host_enter("cuStreamWriteValue32_v2", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && flags != CU_STREAM_WRITE_VALUE_DEFAULT)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = submit_word(stream, addr, value, false);
    return host_leave("cuStreamWriteValue32_v2", stream, (void *)(uintptr_t)addr, result);
}
