/* Memory of our own: allocated for arrays, freed when nothing refers to it any more.
 *
 * 1. An array, each view that another library has taken of it by DLPack, and each operation that uses it
 * holds a reference. Any thread may drop one, with the GIL or without, and never waits.
 * 2. With the last reference the memory goes to a thread of ours, which frees it: a native free waits for the
 *    device, so it is called neither on an event loop nor by the garbage collector.
 * 3. That thread frees when the operations that were on the device at that moment have ended, and the aborts
 *    of its communicators have returned: a free that waits for a kernel which waits for a peer would hold the
 *    driver.
 *    The C library's own memory is freed at once: it holds nobody up.
 * 4. At exit, and in the child of a fork, nothing is freed any more: the process gives everything back.
 */
#define _GNU_SOURCE
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define HOST_ALIGNMENT 64 /* what XLA asks of memory that it takes over without a copy */
#define NAP_MIN_NS 20000
#define NAP_MAX_NS (10 * 1000 * 1000)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
/* under the lock */
static pn_link_t living = {&living, &living};
static pn_link_t dropped = {&dropped, &dropped}; /* oldest first */
static bool started, stopped;

/* Returns why->code. */
static int allocate(pn_memory_t *memory, pn_outcome_t *why) {
    const pn_engine_t *engine = memory->device->engine;
    CUdeviceptr address = 0;
    pn_enter_t saved;
    *why = (pn_outcome_t){PN_FROM_CUDA, 0, "cuCtxSetCurrent"};
    if ((why->code = (int)pn_enter(memory->device, &saved)) != 0)
        return why->code;
    if (memory->kind == PN_MEMORY_DRIVER) {
        why->function = "cuMemAlloc";
        why->code = (int)engine->cuda.cuMemAlloc_v2(&address, memory->bytes);
        memory->base = (void *)(uintptr_t)address;
    } else {
        *why = (pn_outcome_t){PN_FROM_NCCL, 0, "ncclMemAlloc"};
        why->code = (int)engine->nccl.ncclMemAlloc(&memory->base, memory->bytes);
    }
    pn_leave(memory->device, &saved);
    return why->code;
}

/* With one reference. The C library's memory lies behind the struct, in the same block. */
static pn_memory_t *describe(pn_device_t *device, size_t bytes, pn_memory_kind_t kind) {
    size_t behind = kind == PN_MEMORY_HOST && bytes ? bytes + HOST_ALIGNMENT : 0;
    pn_memory_t *memory = behind < bytes && behind ? NULL : malloc(sizeof *memory + behind);
    if (!memory)
        return NULL;
    *memory = (pn_memory_t){.device = device, .bytes = bytes, .kind = kind};
    pn_link_init(&memory->link);
    atomic_init(&memory->references, 1);
    uintptr_t end = (uintptr_t)(memory + 1) + HOST_ALIGNMENT - 1;
    if (behind)
        memory->base = (void *)(end - end % HOST_ALIGNMENT);
    return memory;
}

pn_memory_t *pn_memory_new(pn_device_t *device, size_t bytes, pn_memory_kind_t kind, pn_outcome_t *why) {
    pn_memory_t *memory = describe(device, bytes, kind);
    *why = (pn_outcome_t){PN_FROM_CUDA, CUDA_ERROR_OUT_OF_MEMORY, "malloc"};
    if (!memory)
        return NULL;
    if (bytes && kind != PN_MEMORY_HOST && allocate(memory, why) != 0) {
        free(memory);
        return NULL;
    }
    if (kind != PN_MEMORY_HOST) {
        pthread_mutex_lock(&lock);
        pn_link_append(&living, &memory->link);
        pthread_mutex_unlock(&lock);
    }
    atomic_fetch_add(&pn_counts.memory, 1);
    *why = (pn_outcome_t){PN_OK, 0, NULL};
    return memory;
}

pn_memory_t *pn_memory_of_tensor(pn_device_t *device, DLManagedTensorVersioned *tensor) {
    pn_memory_t *memory = describe(device, 0, PN_MEMORY_HOST);
    if (memory)
        memory->tensor = tensor;
    return memory;
}

pn_memory_t *pn_memory_hold(pn_memory_t *memory) {
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
    return memory;
}

bool pn_memory_find(const pn_device_t *device, const void *address, void **base, size_t *bytes) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (const pn_link_t *at = living.next; at != &living && !found; at = at->next) {
        const pn_memory_t *memory = PN_OWNER(at, const pn_memory_t, link);
        if (memory->device != device || memory->kind != PN_MEMORY_NCCL ||
            (uintptr_t)address - (uintptr_t)memory->base >= memory->bytes)
            continue;
        *base = memory->base;
        *bytes = memory->bytes;
        found = true;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- the end ----------------------------------------------------------------------------------------- */

static bool may_be_freed(pn_memory_t *memory) {
    pn_device_t *device = memory->device;
    pthread_mutex_lock(&device->lock);
    bool may = !pn_has_older(device, memory->after);
    for (const pn_link_t *at = device->comms.next; at != &device->comms && may; at = at->next)
        may = pn_link_empty(&PN_OWNER(at, const pn_comm_t, in_device)->limbo);
    pthread_mutex_unlock(&device->lock);
    return may;
}

static void give_back(pn_memory_t *memory) {
    pn_device_t *device = memory->device;
    pn_enter_t saved;
    int failed = -1;
    if (pn_enter(device, &saved) == CUDA_SUCCESS) {
        failed = memory->kind == PN_MEMORY_DRIVER
                     ? (int)device->engine->cuda.cuMemFree_v2((CUdeviceptr)(uintptr_t)memory->base)
                     : (int)device->engine->nccl.ncclMemFree(memory->base);
        pn_leave(device, &saved);
    }
    if (!failed) /* otherwise the context is in error, and the memory goes with it: it stays counted */
        atomic_fetch_sub(&pn_counts.memory, 1);
    free(memory);
}

/* One that can be freed now, out of the list. */
static pn_memory_t *next_to_free(void) {
    for (pn_link_t *at = dropped.next; at != &dropped; at = at->next) {
        pn_memory_t *memory = PN_OWNER(at, pn_memory_t, link);
        if (may_be_freed(memory)) {
            pn_link_remove(&memory->link);
            return memory;
        }
    }
    return NULL;
}

static void *run(void *unused) {
    (void)unused;
    int64_t nap = NAP_MIN_NS;
    prctl(PR_SET_NAME, "pynccl-free");
    pthread_mutex_lock(&lock);
    while (!stopped) {
        pn_memory_t *memory = next_to_free();
        if (!memory && pn_link_empty(&dropped)) {
            pthread_cond_wait(&work, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        if (memory) {
            give_back(memory);
            nap = NAP_MIN_NS;
        } else {
            pn_waiter_ring(true); /* what it waits for may be done, and nobody has looked */
            nanosleep(&(struct timespec){0, nap}, NULL);
            nap = nap < NAP_MAX_NS ? 2 * nap : nap;
        }
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

void pn_memory_drop(pn_memory_t *memory) {
    pthread_t thread;
    if (atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) != 1 || pn_forked)
        return;
    if (memory->tensor) {
        if (memory->tensor->deleter)
            memory->tensor->deleter(memory->tensor);
        free(memory);
        return;
    }
    if (memory->kind == PN_MEMORY_HOST) {
        atomic_fetch_sub(&pn_counts.memory, 1);
        free(memory);
        return;
    }
    pthread_mutex_lock(&memory->device->lock);
    memory->after = memory->device->issued_total;
    pthread_mutex_unlock(&memory->device->lock);
    pthread_mutex_lock(&lock);
    pn_link_remove(&memory->link);
    if (!memory->base) {
        atomic_fetch_sub(&pn_counts.memory, 1);
        free(memory); /* of no bytes */
    } else {
        pn_link_append(&dropped, &memory->link);
        if (!started && !stopped && pthread_create(&thread, NULL, run, NULL) == 0) {
            pthread_detach(thread);
            started = true;
        }
        pthread_cond_signal(&work);
    }
    pthread_mutex_unlock(&lock);
}

void pn_memory_stop(void) {
    pthread_mutex_lock(&lock);
    stopped = true;
    pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
}

/* ---- views by DLPack ------------------------------------------------------------------------------------
 */

/* What a consumer holds: the shape and the strides lie behind the struct itself. */
typedef struct {
    DLManagedTensorVersioned tensor;
    int64_t extent[];
} versioned_t;
typedef struct {
    DLManagedTensor tensor;
    int64_t extent[];
} unversioned_t;

/* Consumers call these on whatever thread drops their last array, some of them without the GIL. */
static void delete_versioned(DLManagedTensorVersioned *tensor) {
    pn_memory_drop(tensor->manager_ctx);
    free(tensor);
}
static void delete_unversioned(DLManagedTensor *tensor) {
    pn_memory_drop(tensor->manager_ctx);
    free(tensor);
}

static void fill(DLTensor *tensor, const DLTensor *like, int64_t *extent) {
    size_t bytes = (size_t)like->ndim * sizeof *extent;
    *tensor = *like;
    tensor->shape = extent;
    tensor->strides = extent + like->ndim;
    if (bytes) {
        memcpy(tensor->shape, like->shape, bytes);
        memcpy(tensor->strides, like->strides, bytes);
    }
}

DLManagedTensorVersioned *pn_memory_view(pn_memory_t *memory, const DLTensor *like, uint64_t flags) {
    versioned_t *made = calloc(1, sizeof *made + 2 * (size_t)like->ndim * sizeof(int64_t));
    if (!made)
        return NULL;
    made->tensor.version = (DLPackVersion){PN_DLPACK_MAJOR, PN_DLPACK_MINOR};
    made->tensor.manager_ctx = pn_memory_hold(memory);
    made->tensor.deleter = delete_versioned;
    made->tensor.flags = flags;
    fill(&made->tensor.dl_tensor, like, made->extent);
    return &made->tensor;
}

DLManagedTensor *pn_memory_view_unversioned(pn_memory_t *memory, const DLTensor *like) {
    unversioned_t *made = calloc(1, sizeof *made + 2 * (size_t)like->ndim * sizeof(int64_t));
    if (!made)
        return NULL;
    made->tensor.manager_ctx = pn_memory_hold(memory);
    made->tensor.deleter = delete_unversioned;
    fill(&made->tensor.dl_tensor, like, made->extent);
    return &made->tensor;
}

/* The engines on which DLPack's allocator makes memory: those that were used last, by kind. */
static pn_engine_t *_Atomic serving[2];

void pn_memory_serve(pn_engine_t *engine, bool on_gpu) {
    atomic_store(&serving[on_gpu], engine);
}

/* Uninitialised memory for a consumer, who may not hold the GIL. */
static int allocate_tensor(DLTensor *prototype, DLManagedTensorVersioned **out, void *context,
                           void (*set_error)(void *context, const char *kind, const char *message)) {
    DLTensor tensor = *prototype;
    int64_t strides[64], count = 1;
    bool on_gpu = tensor.device.device_type == kDLCUDA, on_cpu = tensor.device.device_type == kDLCPU;
    pn_engine_t *engine = on_gpu || on_cpu ? atomic_load(&serving[on_gpu]) : NULL;
    if (!engine || tensor.ndim > 64) {
        set_error(context, "BufferError", "pynccl has no memory on this device yet");
        return -1;
    }
    for (int axis = tensor.ndim - 1; axis >= 0; axis--) {
        strides[axis] = count;
        count *= tensor.shape[axis];
    }
    pn_outcome_t why;
    size_t bits = (size_t)tensor.dtype.bits * tensor.dtype.lanes;
    pn_device_t *device = pn_device_get(engine, tensor.device.device_id, &why);
    pn_memory_t *memory =
        device ? pn_memory_new(device, ((size_t)count * bits + 7) / 8, PN_MEMORY_NCCL, &why) : NULL;
    *out = NULL;
    if (memory) {
        tensor.data = memory->base;
        tensor.strides = strides;
        tensor.byte_offset = 0;
        *out = pn_memory_view(memory, &tensor, 0);
        pn_memory_drop(memory);
    }
    if (!*out) {
        set_error(context, "MemoryError", "ncclMemAlloc failed");
        return -1;
    }
    return 0;
}

void pn_memory_set_allocator(DLPackExchangeAPI *table) {
    table->managed_tensor_allocator = allocate_tensor;
}

int pn_memory_pending(pn_memory_t *memory, pn_op_t **found, int room) {
    pn_device_t *device = memory->device;
    int count = 0;
    if (!memory->bytes)
        return 0;
    pthread_mutex_lock(&device->lock);
    for (const pn_link_t *at = device->comms.next; at != &device->comms; at = at->next) {
        const pn_comm_t *comm = PN_OWNER(at, const pn_comm_t, in_device);
        for (const pn_link_t *link = comm->pending.next; link != &comm->pending; link = link->next) {
            pn_op_t *op = PN_OWNER(link, pn_op_t, in_comm);
            uintptr_t base = (uintptr_t)memory->base;
            if (op->kind < PN_COLLECTIVES &&
                ((uintptr_t)op->send - base < memory->bytes || (uintptr_t)op->recv - base < memory->bytes)) {
                if (count < room)
                    found[count] = op;
                count++;
            }
        }
    }
    pthread_mutex_unlock(&device->lock);
    return count;
}
