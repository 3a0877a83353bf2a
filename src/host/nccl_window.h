/* Windows and one-sided operations: what nccl_window.c, nccl_rma.c and nccl_device.c know of each other. */
#ifndef PYNCCL_HOST_NCCL_WINDOW_H
#define PYNCCL_HOST_NCCL_WINDOW_H

#include "nccl.h"

/* Memory of a rank as this process sees it. */
typedef struct {
    char *base;
    size_t bytes;
    void *map; /* what to unmap, NULL where the memory is this process's own */
    size_t map_bytes;
} host_reach_t;

/* A handle is a rank's own, and stands for the windows that all ranks registered in one call. */
struct ncclWindow_vidmem {
    ncclWindow_t next; /* of the communicator */
    ncclWindow_t next_of_all;
    _Atomic int refs; /* the handle, and operations on their way */
    int flags, rank, ranks;
    host_reach_t reach[]; /* by rank */
};

/* The window of a handle, held until it is let go; NULL: the communicator has no such window. */
ncclWindow_t host_window_hold(ncclComm_t comm, ncclWindow_t handle);
/* The same for the one that an address lies in. */
ncclWindow_t host_window_around(ncclComm_t comm, const void *address);
/* The same for a handle of any communicator. */
bool host_window_hold_any(ncclWindow_t handle);
void host_window_release(ncclWindow_t window);

/* ---- what ranks tell each other (nccl_window.c) -------------------------------------------------- */

/* Memory as a rank describes it to the others. */
typedef struct {
    host_share_t share; /* bytes 0: there is none */
    uint64_t start;     /* of the memory in its process */
    uint64_t offset;    /* in the shared file */
    uint64_t bytes;
} host_extent_t;

/* Tell all ranks, and hear from all; a rank that tells a failure makes it fail for all. Calls of one
 * communicator follow one another. */
ncclResult_t host_window_exchange(ncclComm_t comm, const host_extent_t *own, ncclResult_t failure,
                                  host_extent_t *all);
/* Map it, also where it is memory of this process. */
ncclResult_t host_window_map(const host_extent_t *extent, host_reach_t *reach);
void host_window_lose(host_reach_t *reach);

/* ---- signals (nccl_rma.c) ------------------------------------------------------------------------ */

/* The counters of a rank's signals lie in memory of its own that the others reach. */
typedef struct host_signals {
    int contexts, indices, ranks;
    int descriptor;       /* of the own counters, open while others may come to map them */
    uint64_t *consumed;   /* by waits: laid out as the counters */
    host_reach_t reach[]; /* by rank: its counters, by sender, context and index */
} host_signals_t;

/* Collective: makes the counters, once. */
ncclResult_t host_signals_make(ncclComm_t comm);
void host_signals_free(ncclComm_t comm);

#endif
