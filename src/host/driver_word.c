/* Words in memory that a stream waits for or writes. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

host_bell_t host_memory_bell;

typedef struct {
    host_work_t work;
    _Atomic uint32_t *word;
    uint32_t value;
} word_t;

static host_progress_t wait_step(host_work_t *work) {
    word_t *wait = (word_t *)work;
    work->bell = &host_memory_bell;
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

static void release(host_work_t *work) {
    free(work);
}

static host_work_t *again(const host_work_t *work) {
    return host_work_copy(work, sizeof(word_t));
}

static CUresult submit_word(CUstream stream, CUdeviceptr address, uint32_t value, bool is_wait) {
    if (host_config()->quirk_no_memory_ops)
        return CUDA_ERROR_NOT_SUPPORTED;
    host_memory_t found;
    host_memory_find((void *)(uintptr_t)address, &found);
    /* a device can wait only for memory that it maps */
    if (!found.own || address % sizeof(uint32_t) != 0 ||
        (uintptr_t)address + sizeof(uint32_t) > (uintptr_t)found.base + found.bytes)
        return CUDA_ERROR_INVALID_VALUE;
    word_t *word = malloc(sizeof *word);
    if (word == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    word->work = (host_work_t){
        .step = is_wait ? wait_step : write_step,
        .release = release,
        .again = again,
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
