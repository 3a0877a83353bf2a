/* Memory pools: memory that is allocated and freed in stream order. The engine keeps no free memory in a
 * pool, so that what is used after it was freed is an illegal address here too. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum { MAGIC_POOL = 0x706f6f21 };

struct CUmemPoolHandle_st {
    uint32_t magic;
    int refs; /* its handle, and what it gave; under the lock */
    host_device_t *device;
    CUmemorytype type;
    uint64_t values[CU_MEMPOOL_ATTR_USED_MEM_HIGH + 1]; /* by attribute */
    CUmemoryPool next;
};

/* What a pool gave. */
typedef struct loan {
    struct loan *next;
    CUmemoryPool pool;
    void *pointer;
    size_t bytes;
} loan_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static loan_t *loans;
static CUmemoryPool made; /* by cuMemPoolCreate */
static struct CUmemPoolHandle_st defaults[HOST_MAX_DEVICES];
static struct CUmemPoolHandle_st
    host_defaults[HOST_MAX_DEVICES];           /* of the host's memory, with each context */
static CUmemoryPool current[HOST_MAX_DEVICES]; /* what cuMemAllocAsync takes from; NULL: the default */

static void begin(CUmemoryPool pool, host_device_t *device, CUmemorytype type) {
    *pool = (struct CUmemPoolHandle_st){.magic = MAGIC_POOL, .refs = 1, .device = device, .type = type};
    for (int i = CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES; i < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD; i++)
        pool->values[i] = 1;
}

static CUmemoryPool default_pool(int ordinal, CUmemorytype type) {
    CUmemoryPool pool = type == CU_MEMORYTYPE_DEVICE ? &defaults[ordinal] : &host_defaults[ordinal];
    if (pool->magic != MAGIC_POOL)
        begin(pool, &host_devices[ordinal], type);
    return pool;
}

static bool is_default(CUmemoryPool pool) {
    return (pool >= defaults && pool < defaults + HOST_MAX_DEVICES) ||
           (pool >= host_defaults && pool < host_defaults + HOST_MAX_DEVICES);
}

/* Under the lock, as what follows. */
static bool is_live(CUmemoryPool pool) {
    CUmemoryPool found = made;
    while (found != NULL && found != pool)
        found = found->next;
    return found != NULL || (is_default(pool) && pool->magic == MAGIC_POOL);
}

static void leave(CUmemoryPool pool) {
    if (--pool->refs == 0)
        free(pool);
}

static void unlink_pool(CUmemoryPool pool) {
    CUmemoryPool *link = &made;
    while (*link != pool)
        link = &(*link)->next;
    *link = pool->next;
    for (int i = 0; i < HOST_MAX_DEVICES; i++)
        if (current[i] == pool)
            current[i] = NULL;
    leave(pool);
}

static void count(CUmemoryPool pool, size_t bytes) {
    uint64_t used = pool->values[CU_MEMPOOL_ATTR_USED_MEM_CURRENT] + bytes;
    pool->values[CU_MEMPOOL_ATTR_USED_MEM_CURRENT] = pool->values[CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT] =
        used;
    if (used > pool->values[CU_MEMPOOL_ATTR_USED_MEM_HIGH])
        pool->values[CU_MEMPOOL_ATTR_USED_MEM_HIGH] = used;
    if (used > pool->values[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH])
        pool->values[CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = used;
}

static void end_loan(loan_t **link) {
    loan_t *loan = *link;
    *link = loan->next;
    count(loan->pool, -loan->bytes);
    leave(loan->pool);
    free(loan);
}

static loan_t **find_loan(const void *pointer) {
    loan_t **link = &loans;
    while (*link != NULL && (*link)->pointer != pointer)
        link = &(*link)->next;
    return link;
}

CUmemoryPool host_mempool_of(const void *pointer) {
    pthread_mutex_lock(&lock);
    loan_t *loan = *find_loan(pointer);
    CUmemoryPool pool = loan != NULL ? loan->pool : NULL;
    pthread_mutex_unlock(&lock);
    return pool;
}

void host_mempool_forget(const void *pointer) {
    pthread_mutex_lock(&lock);
    loan_t **link = find_loan(pointer);
    if (*link != NULL)
        end_loan(link);
    pthread_mutex_unlock(&lock);
}

void host_mempools_empty(host_device_t *device) {
    pthread_mutex_lock(&lock);
    for (loan_t **link = &loans; *link != NULL;)
        if ((*link)->pool->device == device)
            end_loan(link);
        else
            link = &(*link)->next;
    for (CUmemoryPool pool = made, next; pool != NULL; pool = next) {
        next = pool->next;
        if (pool->device == device)
            unlink_pool(pool);
    }
    defaults[device->ordinal].magic = host_defaults[device->ordinal].magic = HOST_MAGIC_DEAD;
    current[device->ordinal] = NULL;
    pthread_mutex_unlock(&lock);
}

/* ---- pools ---------------------------------------------------------------------------------------- */

static CUresult check_device(CUdevice dev, const void *out) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return dev >= 0 && dev < host_config()->devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev) {
    CUresult result = host_enter("cuDeviceGetDefaultMemPool", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check_device(dev, pool);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&lock);
        *pool = default_pool(dev, CU_MEMORYTYPE_DEVICE);
        pthread_mutex_unlock(&lock);
    }
    return host_leave("cuDeviceGetDefaultMemPool", NULL, NULL, result);
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev) {
    CUresult result = host_enter("cuDeviceGetMemPool", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check_device(dev, pool);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&lock);
        *pool = current[dev] != NULL ? current[dev] : default_pool(dev, CU_MEMORYTYPE_DEVICE);
        pthread_mutex_unlock(&lock);
    }
    return host_leave("cuDeviceGetMemPool", NULL, NULL, result);
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
    CUresult result = host_enter("cuDeviceSetMemPool", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS)
        result = check_device(dev, pool);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&lock);
        if (is_live(pool) && pool->device->ordinal == dev && pool->type == CU_MEMORYTYPE_DEVICE)
            current[dev] = pool;
        else
            result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&lock);
    }
    return host_leave("cuDeviceSetMemPool", NULL, pool, result);
}

static CUresult pool_at(const char *function, CUmemoryPool *pool, const CUmemLocation *location,
                        CUmemAllocationType type, bool want_default) {
    CUresult result = host_enter(function, HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS &&
        (pool == NULL || location == NULL || type != CU_MEM_ALLOCATION_TYPE_PINNED ||
         (location->type != CU_MEM_LOCATION_TYPE_DEVICE && location->type != CU_MEM_LOCATION_TYPE_HOST)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        result = check_device(location->id, pool);
    if (result == CUDA_SUCCESS) {
        bool on_device = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
        int ordinal = on_device ? location->id : host_thread.current->ordinal;
        pthread_mutex_lock(&lock);
        *pool = default_pool(ordinal, on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
        if (on_device && !want_default && current[ordinal] != NULL)
            *pool = current[ordinal];
        pthread_mutex_unlock(&lock);
    }
    return host_leave(function, NULL, NULL, result);
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return pool_at("cuMemGetDefaultMemPool", pool, location, type, true);
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    return pool_at("cuMemGetMemPool", pool, location, type, false);
}

static CUresult create(CUmemoryPool *pool, const CUmemPoolProps *props) {
    int on_device = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        (!on_device && props->location.type != CU_MEM_LOCATION_TYPE_HOST) ||
        props->handleTypes != CU_MEM_HANDLE_TYPE_NONE || props->maxSize != 0) {
        host_last_error(
            "cuMemPoolCreate: the host engine has pools of pinned memory of a device or of the host, "
            "with no limit, and shared with no other process");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    int ordinal = on_device ? props->location.id : host_thread.current->ordinal;
    if (ordinal < 0 || ordinal >= host_config()->devices)
        return CUDA_ERROR_INVALID_DEVICE;
    CUmemoryPool new = malloc(sizeof *new);
    if (new == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    begin(new, &host_devices[ordinal], on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    pthread_mutex_lock(&lock);
    new->next = made;
    made = new;
    pthread_mutex_unlock(&lock);
    *pool = new;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    CUresult result = host_enter("cuMemPoolCreate", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = pool != NULL && props != NULL ? create(pool, props) : CUDA_ERROR_INVALID_VALUE;
    return host_leave("cuMemPoolCreate", NULL, result == CUDA_SUCCESS ? *pool : NULL, result);
}

/* What it gave lives on until it is freed. */
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    CUresult result = host_enter("cuMemPoolDestroy", HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&lock);
        if (!is_live(pool) || is_default(pool))
            result = CUDA_ERROR_INVALID_VALUE;
        else
            unlink_pool(pool);
        pthread_mutex_unlock(&lock);
    }
    return host_leave("cuMemPoolDestroy", NULL, pool, result);
}

static size_t attribute_bytes(CUmemPool_attribute attribute) {
    if (attribute < CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
        attribute > CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        return 0;
    return attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? sizeof(int) : sizeof(cuuint64_t);
}

static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value) {
    uint64_t wanted = 0;
    memcpy(&wanted, value, attribute_bytes(attribute)); /* the int is the lower half on all we run on */
    bool high = attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    if (attribute > CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && (!high || wanted != 0))
        return CUDA_ERROR_INVALID_VALUE; /* what is counted can only be counted anew */
    pool->values[attribute] = high ? pool->values[CU_MEMPOOL_ATTR_USED_MEM_CURRENT] : wanted;
    return CUDA_SUCCESS;
}

static CUresult attribute_call(const char *function, CUmemoryPool pool, CUmemPool_attribute attribute,
                               void *value, bool set) {
    CUresult result = host_enter(function, HOST_NEEDS_INIT);
    if (result == CUDA_SUCCESS && (value == NULL || attribute_bytes(attribute) == 0))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&lock);
        if (!is_live(pool))
            result = CUDA_ERROR_INVALID_VALUE;
        else if (set)
            result = set_attribute(pool, attribute, value);
        else
            memcpy(value, &pool->values[attribute], attribute_bytes(attribute));
        pthread_mutex_unlock(&lock);
    }
    return host_leave(function, NULL, pool, result);
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    return attribute_call("cuMemPoolSetAttribute", pool, attribute, value, true);
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    return attribute_call("cuMemPoolGetAttribute", pool, attribute, value, false);
}

/* A pool keeps no free memory that could be given back. */
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t bytesToKeep) {
    (void)bytesToKeep;
    CUresult result = host_enter("cuMemPoolTrimTo", HOST_NEEDS_INIT);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS && !is_live(pool))
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return host_leave("cuMemPoolTrimTo", NULL, pool, result);
}

/* A device may use its own pools and those of the host, and no other's, which cannot be changed. */
static CUmemAccess_flags access_of(CUmemoryPool pool, const CUmemLocation *location) {
    bool own = location->type == CU_MEM_LOCATION_TYPE_DEVICE &&
               (pool->type == CU_MEMORYTYPE_HOST || location->id == pool->device->ordinal);
    bool host = location->type == CU_MEM_LOCATION_TYPE_HOST && pool->type == CU_MEMORYTYPE_HOST;
    return own || host ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location) {
    CUresult result = host_enter("cuMemPoolGetAccess", HOST_NEEDS_INIT);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS && (flags == NULL || location == NULL || !is_live(pool)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *flags = access_of(pool, location);
    pthread_mutex_unlock(&lock);
    return host_leave("cuMemPoolGetAccess", NULL, pool, result);
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t length) {
    CUresult result = host_enter("cuMemPoolSetAccess", HOST_NEEDS_INIT);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS && (map == NULL || !is_live(pool)))
        result = CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < length && result == CUDA_SUCCESS; i++)
        if (map[i].flags != access_of(pool, &map[i].location)) {
            host_last_error("cuMemPoolSetAccess: on the host engine a device reaches no other's memory");
            result = CUDA_ERROR_NOT_SUPPORTED;
        }
    pthread_mutex_unlock(&lock);
    return host_leave("cuMemPoolSetAccess", NULL, pool, result);
}

/* ---- allocation in stream order ------------------------------------------------------------------- */

static CUresult lend(CUmemoryPool pool, size_t bytes, void **pointer) {
    loan_t *loan = calloc(1, sizeof *loan);
    if (loan == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = host_memory_allocate(pool->device->ordinal, bytes, pool->type, false, pointer);
    if (result != CUDA_SUCCESS) {
        free(loan);
        return result;
    }
    *loan = (loan_t){.next = loans, .pool = pool, .pointer = *pointer, .bytes = bytes};
    loans = loan;
    pool->refs++;
    count(pool, bytes);
    return CUDA_SUCCESS;
}

/* The memory is there at once, which is early enough for the stream. */
static CUresult allocate(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle) {
    CUstream stream;
    void *pointer = NULL;
    uint64_t capture = 0;
    if (out == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = host_stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = host_stream_capturing(stream, &capture);
    if (result == CUDA_SUCCESS && capture != 0) {
        host_last_error("the host engine does not capture allocations");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (result == CUDA_SUCCESS)
        result = host_device_error(stream->device);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS && pool == NULL) {
        int ordinal = stream->device->ordinal;
        pool = current[ordinal] != NULL ? current[ordinal] : default_pool(ordinal, CU_MEMORYTYPE_DEVICE);
    }
    if (result == CUDA_SUCCESS)
        result = is_live(pool) ? lend(pool, bytes, &pointer) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    if (result == CUDA_SUCCESS)
        *out = (CUdeviceptr)(uintptr_t)pointer;
    return result;
}

CUresult cuMemAllocAsync(CUdeviceptr *ptr, size_t bytes, CUstream stream) {
    CUresult result = host_enter("cuMemAllocAsync", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = allocate(ptr, bytes, NULL, stream);
    return host_leave("cuMemAllocAsync", stream, NULL, result);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream) {
    CUresult result = host_enter("cuMemAllocFromPoolAsync", HOST_NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS)
        result = pool != NULL ? allocate(ptr, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE;
    return host_leave("cuMemAllocFromPoolAsync", stream, pool, result);
}

typedef struct {
    host_work_t work;
    void *pointer;
} free_work_t;

static host_progress_t free_step(host_work_t *work) {
    host_memory_drop(((free_work_t *)work)->pointer);
    return HOST_DONE;
}

static void free_release(host_work_t *work) {
    free(work);
}

CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream stream) {
    CUresult result = host_enter("cuMemFreeAsync", HOST_NEEDS_CONTEXT);
    void *pointer = (void *)(uintptr_t)ptr;
    host_memory_t found;
    host_memory_find(pointer, &found);
    free_work_t *item = NULL;
    if (result == CUDA_SUCCESS && (!found.own || found.adopted || found.base != pointer))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (item = calloc(1, sizeof *item)) == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        item->work = (host_work_t){.step = free_step, .release = free_release, .kind = HOST_WORK_MARK};
        item->pointer = pointer;
        result = host_stream_submit(stream, &item->work);
        if (result != CUDA_SUCCESS)
            free(item);
    }
    return host_leave("cuMemFreeAsync", stream, pointer, result);
}
