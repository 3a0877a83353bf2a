/* Memory of our own, registered memory, and operators of the user's: what memory.c, register.c and operator.c
 * offer. The rules stand at their heads.
 */
#ifndef PYNCCL_BIND_MEMORY_H
#define PYNCCL_BIND_MEMORY_H

#include "../abi/dlpack_abi.h"
#include "bind.h"

/* What one-sided operations need besides their buffer and peer (op->root). */
typedef struct {
    ncclWindow_t window; /* the peer's memory */
    size_t offset;       /* in it, in bytes */
    int signal, context; /* which of the peer's counters is counted up */
    int awaited;         /* how many descriptors follow, of signals to wait for */
    ncclWaitSignalDesc_t descriptors[];
} pn_one_sided_t;

/* ---- memory of our own ------------------------------------------------------------------------- */

#define PN_DLPACK_MAJOR 1 /* what our views say of themselves; 1.3 brought the C exchange API */
#define PN_DLPACK_MINOR 3

/* Where memory comes from. */
typedef enum {
    PN_MEMORY_NCCL,   /* ncclMemAlloc */
    PN_MEMORY_DRIVER, /* cuMemAlloc */
    PN_MEMORY_HOST,   /* the C library, at a multiple of 64 bytes */
} pn_memory_kind_t;

typedef struct {
    pn_link_t link;
    pn_device_t *device;
    void *base;
    size_t bytes;
    pn_memory_kind_t kind;
    DLManagedTensorVersioned *tensor; /* somebody else's memory, taken over; NULL otherwise */
    _Atomic long references;
    uint64_t after; /* dropped when so many operations had been issued on the device */
} pn_memory_t;

/* With one reference. No bytes: base is NULL, and nothing is allocated. */
pn_memory_t *pn_memory_new(pn_device_t *device, size_t bytes, pn_memory_kind_t kind, pn_outcome_t *why);
/* Take over another library's tensor; its deleter is called with the last reference. NULL: no memory. */
pn_memory_t *pn_memory_of_tensor(pn_device_t *device, DLManagedTensorVersioned *tensor);
pn_memory_t *pn_memory_hold(pn_memory_t *memory);
void pn_memory_drop(pn_memory_t *memory); /* any thread; never waits */
void pn_memory_stop(void);                /* at exit */
/* The allocation of ncclMemAlloc in which an address lies, if it is one of ours. */
bool pn_memory_find(const pn_device_t *device, const void *address, void **base, size_t *bytes);
/* A tensor for a consumer, which holds the memory until its deleter is called; NULL: no memory. `like` has
 * strides. */
DLManagedTensorVersioned *pn_memory_view(pn_memory_t *memory, const DLTensor *like, uint64_t flags);
DLManagedTensor *pn_memory_view_unversioned(pn_memory_t *memory, const DLTensor *like);
/* DLPack's allocator for consumers in C, on the engine that serves the kind of device. */
void pn_memory_serve(pn_engine_t *engine, bool on_gpu);
void pn_memory_set_allocator(DLPackExchangeAPI *table);
/* The unfinished operations that use it: how many; at most `room` are written to *found. Whoever holds the
 * GIL may use them: their owners are let go of under it. */
int pn_memory_pending(pn_memory_t *memory, pn_op_t **found, int room);

/* ---- registered memory (register.c), operators of the user's (operator.c) ------------------------------ */

/* Belongs to the owner of `lease`, a pn_op_t that is never issued: it comes out of pn_done_take when the
 * registration has ended. The owner of an operation that has failed to make it lets go of the lease himself.
 */
typedef struct {
    pn_link_t in_comm;
    pn_op_t *lease;
    void *base;
    size_t bytes;
    int flags; /* of a window */
    bool is_window;
    void *handle;
    ncclWindow_t window;
} pn_registration_t;

/* Operations whose argument is a pn_registration_t; pn_control_submit has them run. */
void pn_run_register(pn_task_t *task, pn_comm_t *comm);
void pn_run_deregister(pn_task_t *task, pn_comm_t *comm);
bool pn_on_registered(const pn_op_t *op);     /* device->lock held */
void pn_registrations_close(pn_comm_t *comm); /* native calls, with the handle still alive */
void pn_registrations_gone(pn_comm_t *comm);  /* their buffers are free */

typedef struct {
    pn_task_t task; /* its destruction */
    pn_link_t in_comm;
    pn_comm_t *comm; /* referred to */
    int32_t code;    /* what an operation's redop says: ncclNumOps or more */
    ncclDataType_t type;
    ncclScalarResidence_t residence;
    void *pointer;
    unsigned char value[16];
    bool made;
    ncclRedOp_t handle;
} pn_operator_t;

/* `scalar` is an address in device memory, or 16 bytes that begin with the value. NULL: no memory. */
pn_operator_t *pn_operator_new(pn_comm_t *comm, int32_t type, const void *scalar, bool on_device);
void pn_operator_end(pn_operator_t *op); /* no operation will name it any more */
/* The native operator behind an operation's redop; made if it is the first. Inside the communicator. */
ncclResult_t pn_operator_resolve(pn_comm_t *comm, ncclRedOp_t *redop, const char **function);

#endif
