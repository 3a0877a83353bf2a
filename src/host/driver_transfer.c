/* Copies and fills. Those with a stream are its next item; the others are the legacy stream's, and waited
 * for. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

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

typedef struct {
    host_work_t work;
    void *to;
    const void *from; /* NULL: fill */
    uint32_t value;
    size_t size; /* of an element that is filled in */
} transfer_t;

static void fill(const transfer_t *transfer) {
    const size_t count = transfer->work.bytes / transfer->size;
    if (transfer->size == 1)
        memset(transfer->to, (int)transfer->value, count);
    else if (transfer->size == 2)
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)transfer->to)[i] = (uint16_t)transfer->value;
    else
        for (size_t i = 0; i < count; i++)
            ((uint32_t *)transfer->to)[i] = transfer->value;
}

static host_progress_t transfer_step(host_work_t *work) {
    const transfer_t *transfer = (transfer_t *)work;
    if (transfer->from != NULL)
        memmove(transfer->to, transfer->from, work->bytes);
    else
        fill(transfer);
    return HOST_DONE;
}

static void release(host_work_t *work) {
    free(work);
}

static host_work_t *again(const host_work_t *work) {
    return host_work_copy(work, sizeof(transfer_t));
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
    made->work = (host_work_t){
        .step = transfer_step, .release = release, .again = again, .kind = HOST_WORK_COPY, .bytes = bytes};
    CUresult result = host_stream_submit(stream, &made->work);
    if (result != CUDA_SUCCESS)
        free(made);
    return result;
}

/* In the legacy stream, and waited for. */
static CUresult transfer_now(const transfer_t *wanted, size_t bytes) {
    CUstream legacy;
    CUresult result = host_stream_resolve(CU_STREAM_LEGACY, &legacy);
    if (result == CUDA_SUCCESS)
        result = transfer(legacy, wanted, bytes);
    return result == CUDA_SUCCESS ? host_stream_synchronize(legacy) : result;
}

/* ---- copies --------------------------------------------------------------------------------------- */

typedef struct {
    const void *pointer;
    bool device;
} side_t;

static side_t device_side(CUdeviceptr pointer) {
    return (side_t){(const void *)(uintptr_t)pointer, true};
}
static side_t host_side(const void *pointer) {
    return (side_t){pointer, false};
}
static side_t either_side(CUdeviceptr pointer) {
    return (side_t){(const void *)(uintptr_t)pointer, false};
}

static CUresult check_copy(side_t to, side_t from, size_t bytes) {
    CUresult result = bytes != 0 ? check_range(to.pointer, bytes, to.device) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && bytes != 0)
        result = check_range(from.pointer, bytes, from.device);
    return result;
}

static CUresult copy(const char *function, side_t to, side_t from, size_t bytes, CUstream stream) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = check_copy(to, from, bytes);
    if (result == CUDA_SUCCESS)
        result =
            transfer(stream, &(transfer_t){.to = (void *)(uintptr_t)to.pointer, .from = from.pointer}, bytes);
    return host_leave(function, stream, to.pointer, result);
}

static CUresult copy_now(const char *function, side_t to, side_t from, size_t bytes) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = host_capture_unsafe(function);
    if (result == CUDA_SUCCESS)
        result = check_copy(to, from, bytes);
    if (result == CUDA_SUCCESS)
        result =
            transfer_now(&(transfer_t){.to = (void *)(uintptr_t)to.pointer, .from = from.pointer}, bytes);
    return host_leave(function, NULL, to.pointer, result);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyAsync", either_side(dst), either_side(src), bytes, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyHtoDAsync_v2", device_side(dst), host_side(src), bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyDtoHAsync_v2", host_side(dst), device_side(src), bytes, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return copy("cuMemcpyDtoDAsync_v2", device_side(dst), device_side(src), bytes, stream);
}

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    return copy_now("cuMemcpy", either_side(dst), either_side(src), bytes);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes) {
    return copy_now("cuMemcpyHtoD_v2", device_side(dst), host_side(src), bytes);
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes) {
    return copy_now("cuMemcpyDtoH_v2", host_side(dst), device_side(src), bytes);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    return copy_now("cuMemcpyDtoD_v2", device_side(dst), device_side(src), bytes);
}

/* ---- fills ---------------------------------------------------------------------------------------- */

static CUresult fill_call(const char *function, CUdeviceptr dst, uint32_t value, size_t size, size_t count,
                          CUstream stream, bool wait) {
    void *to = (void *)(uintptr_t)dst;
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && (dst % size != 0 || count > SIZE_MAX / size))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && wait)
        result = host_capture_unsafe(function);
    if (result == CUDA_SUCCESS && count != 0)
        result = check_range(to, count * size, true);
    transfer_t wanted = {.to = to, .value = value, .size = size};
    if (result == CUDA_SUCCESS)
        result = wait ? transfer_now(&wanted, count * size) : transfer(stream, &wanted, count * size);
    return host_leave(function, stream, to, result);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
    return fill_call("cuMemsetD8Async", dst, value, sizeof value, count, stream, false);
}

CUresult cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count, CUstream stream) {
    return fill_call("cuMemsetD16Async", dst, value, sizeof value, count, stream, false);
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count, CUstream stream) {
    return fill_call("cuMemsetD32Async", dst, value, sizeof value, count, stream, false);
}

CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t count) {
    return fill_call("cuMemsetD8_v2", dst, value, sizeof value, count, NULL, true);
}

CUresult cuMemsetD16_v2(CUdeviceptr dst, unsigned short value, size_t count) {
    return fill_call("cuMemsetD16_v2", dst, value, sizeof value, count, NULL, true);
}

CUresult cuMemsetD32_v2(CUdeviceptr dst, unsigned int value, size_t count) {
    return fill_call("cuMemsetD32_v2", dst, value, sizeof value, count, NULL, true);
}
