/* Memory of a device: mappings of their own between guard pages, gone when they are freed, so that what would
 * be an illegal address on a GPU is one here. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 512, POISON = 0xff, POISON_BYTES = 1 << 20 };

typedef struct {
    uintptr_t base;
    size_t bytes;
    void *map; /* with the guards; NULL: adopted */
    size_t map_bytes;
    int device;
    CUmemorytype type;
    uint64_t serial;
    host_share_t share; /* bytes is 0: it is the process's own */
} area_t;

/* Sorted by address. */
static pthread_rwlock_t areas_lock = PTHREAD_RWLOCK_INITIALIZER;
static area_t *areas;
static size_t areas_length, areas_capacity;

/* How many areas begin at or below the address; under the lock. */
static size_t begin_at_or_below(uintptr_t address) {
    size_t low = 0, high = areas_length;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (areas[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool insert(const area_t *area) {
    pthread_rwlock_wrlock(&areas_lock);
    bool room = areas_length < areas_capacity;
    if (!room) {
        size_t capacity = areas_capacity == 0 ? 64 : areas_capacity * 2;
        area_t *grown = realloc(areas, capacity * sizeof *areas);
        if (grown != NULL) {
            areas = grown;
            areas_capacity = capacity;
            room = true;
        }
    }
    if (room) {
        size_t at = begin_at_or_below(area->base);
        memmove(&areas[at + 1], &areas[at], (areas_length - at) * sizeof *areas);
        areas[at] = *area;
        areas_length++;
    }
    pthread_rwlock_unlock(&areas_lock);
    return room;
}

static bool removed(uintptr_t base, area_t *area) {
    pthread_rwlock_wrlock(&areas_lock);
    size_t at = begin_at_or_below(base);
    bool found = at > 0 && areas[at - 1].base == base;
    if (found) {
        *area = areas[at - 1];
        memmove(&areas[at - 1], &areas[at], (areas_length - at) * sizeof *areas);
        areas_length--;
    }
    pthread_rwlock_unlock(&areas_lock);
    return found;
}

static _Atomic(void (*)(uint64_t)) told_of_frees;

void host_memory_on_free(void (*told)(uint64_t)) {
    atomic_store(&told_of_frees, told);
}

static void unmap(const area_t *area) {
    if (area->map == NULL)
        return;
    void (*told)(uint64_t) = atomic_load(&told_of_frees);
    if (told != NULL && area->share.bytes != 0)
        told(area->serial);
    munmap(area->map, area->map_bytes);
    if (area->share.bytes != 0)
        close(area->share.descriptor);
    atomic_fetch_sub(&host_live_allocations, 1);
}

static uintptr_t usable_part(const area_t *area) {
    return (uintptr_t)area->map + (area->map_bytes - area->share.bytes) / 2;
}

void host_memory_find(const void *pointer, host_memory_t *found) {
    uintptr_t address = (uintptr_t)pointer;
    *found = (host_memory_t){.own = false, .device = -1, .type = CU_MEMORYTYPE_HOST};
    pthread_rwlock_rdlock(&areas_lock);
    size_t at = begin_at_or_below(address);
    if (at > 0 && address - areas[at - 1].base < areas[at - 1].bytes) {
        const area_t *area = &areas[at - 1];
        *found = (host_memory_t){
            .own = true,
            .device = area->device,
            .base = (void *)area->base,
            .bytes = area->bytes,
            .type = area->type,
            .adopted = area->map == NULL,
            .serial = area->serial,
            .share = area->share,
            .offset = area->share.bytes == 0 ? 0 : area->base - usable_part(area),
        };
    }
    pthread_rwlock_unlock(&areas_lock);
}

/* Put pages into the middle of an area that is all guard. */
static bool fill(area_t *area, char *usable, size_t body, bool shared) {
    if (shared && host_share_make(body, &area->share) == 0) {
        host_share_seal(area->share.descriptor);
        if (mmap(usable, body, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, area->share.descriptor, 0) !=
            MAP_FAILED)
            return true;
        close(area->share.descriptor);
    }
    area->share.bytes = 0;
    return mprotect(usable, body, PROT_READ | PROT_WRITE) == 0;
}

CUresult host_memory_allocate(int device, size_t bytes, CUmemorytype type, bool shared, void **pointer) {
    static _Atomic uint64_t last_serial;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 2)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t body = (bytes + page - 1) / page * page;
    area_t area = {.bytes = bytes, .map_bytes = body + 2 * page, .device = device, .type = type};
    area.serial = atomic_fetch_add(&last_serial, 1) + 1;
    area.map = mmap(NULL, area.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area.map == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *usable = (char *)area.map + page;
    /* against the upper guard: running over the end is the commoner mistake */
    char *base = usable + body - (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    area.base = (uintptr_t)base;
    atomic_fetch_add(&host_live_allocations, 1);
    if (!fill(&area, usable, body, shared) || !insert(&area)) {
        unmap(&area);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (host_config()->temper == HOST_GPULIKE) /* what nobody wrote is not zero on a GPU either */
        memset(base, POISON, bytes < POISON_BYTES ? bytes : POISON_BYTES);
    *pointer = base;
    return CUDA_SUCCESS;
}

/* As on a GPU, freeing waits for the device: there may be work that still uses the memory. */
CUresult host_memory_free(void *pointer) {
    host_memory_t found;
    host_memory_find(pointer, &found);
    if (!found.own || found.adopted || found.base != pointer)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = host_device_synchronize(found.device);
    if (result != CUDA_SUCCESS)
        return result; /* it goes with its failed context */
    return host_memory_drop(pointer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* another was faster */
}

bool host_memory_drop(void *pointer) {
    area_t area;
    if (!removed((uintptr_t)pointer, &area))
        return false;
    host_mempool_forget(pointer);
    unmap(&area);
    return true;
}

void host_memory_free_all(host_device_t *device) {
    pthread_rwlock_wrlock(&areas_lock);
    size_t kept = 0;
    for (size_t i = 0; i < areas_length; i++) {
        if (areas[i].device == device->ordinal && areas[i].map != NULL)
            unmap(&areas[i]);
        else
            areas[kept++] = areas[i];
    }
    areas_length = kept;
    pthread_rwlock_unlock(&areas_lock);
}

CUresult host_memory_adopt(int device, void *base, size_t bytes) {
    area_t area = {.base = (uintptr_t)base, .bytes = bytes, .device = device, .type = CU_MEMORYTYPE_DEVICE};
    return insert(&area) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void host_memory_forget(void *base) {
    area_t area;
    removed((uintptr_t)base, &area);
}

/* ---- exported ------------------------------------------------------------------------------------- */

static CUresult allocate(const char *function, CUmemorytype type, size_t bytes, void **pointer) {
    CUresult result = host_capture_unsafe(function);
    if (result == CUDA_SUCCESS)
        result = host_device_error(host_thread.current);
    return result == CUDA_SUCCESS
               ? host_memory_allocate(host_thread.current->ordinal, bytes, type, false, pointer)
               : result;
}

static CUresult free_typed(const char *function, void *pointer, CUmemorytype type) {
    host_memory_t found;
    CUresult result = host_capture_unsafe(function);
    if (result != CUDA_SUCCESS)
        return result;
    host_memory_find(pointer, &found);
    return found.own && found.type == type ? host_memory_free(pointer) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes) {
    CUresult result = host_enter("cuMemAlloc_v2", HOST_NEEDS_CONTEXT);
    void *pointer = NULL;
    if (result == CUDA_SUCCESS)
        result = ptr != NULL ? allocate("cuMemAlloc_v2", CU_MEMORYTYPE_DEVICE, bytes, &pointer)
                             : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *ptr = (CUdeviceptr)(uintptr_t)pointer;
    return host_leave("cuMemAlloc_v2", NULL, pointer, result);
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
    void *pointer = (void *)(uintptr_t)ptr;
    CUresult result = host_enter("cuMemFree_v2", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = free_typed("cuMemFree_v2", pointer, CU_MEMORYTYPE_DEVICE);
    return host_leave("cuMemFree_v2", NULL, pointer, result);
}

CUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned int flags) {
    const unsigned int known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
    CUresult result = host_enter("cuMemHostAlloc", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS && (ptr == NULL || (flags & ~known) != 0))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = allocate("cuMemHostAlloc", CU_MEMORYTYPE_HOST, bytes, ptr);
    return host_leave("cuMemHostAlloc", NULL, result == CUDA_SUCCESS ? *ptr : NULL, result);
}

CUresult cuMemAllocHost_v2(void **ptr, size_t bytes) {
    CUresult result = host_enter("cuMemAllocHost_v2", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = ptr != NULL ? allocate("cuMemAllocHost_v2", CU_MEMORYTYPE_HOST, bytes, ptr)
                             : CUDA_ERROR_INVALID_VALUE;
    return host_leave("cuMemAllocHost_v2", NULL, result == CUDA_SUCCESS ? *ptr : NULL, result);
}

CUresult cuMemFreeHost(void *ptr) {
    CUresult result = host_enter("cuMemFreeHost", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = free_typed("cuMemFreeHost", ptr, CU_MEMORYTYPE_HOST);
    return host_leave("cuMemFreeHost", NULL, ptr, result);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags) {
    CUresult result = host_enter("cuMemHostGetDevicePointer_v2", HOST_NEEDS_CONTEXT);
    host_memory_t found;
    host_memory_find(host, &found);
    if (result == CUDA_SUCCESS &&
        (device == NULL || flags != 0 || !found.own || found.type != CU_MEMORYTYPE_HOST))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *device = (CUdeviceptr)(uintptr_t)host;
    return host_leave("cuMemHostGetDevicePointer_v2", NULL, host, result);
}
