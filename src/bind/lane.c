/* Communicators as objects, and their lanes. */
#define _GNU_SOURCE
#include "bind.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

/* ---- the lane -------------------------------------------------------------------------------------------
 */

static void *lane(void *argument) {
    pn_comm_t *comm = argument;
    pn_device_t *device = comm->device;
    prctl(PR_SET_NAME, "pynccl-lane");
    /* The thread is ours alone, so the context stays current on it. */
    device->engine->cuda.cuCtxSetCurrent(device->context);
    pthread_mutex_lock(&device->lock);
    for (;;) {
        pn_task_t *task = comm->queue_head;
        if (task) {
            comm->queue_head = task->next;
            if (!task->next)
                comm->queue_tail = NULL;
            comm->lane_busy = true;
            pthread_mutex_unlock(&device->lock);
            task->run(task, comm);
            pthread_mutex_lock(&device->lock);
            comm->lane_busy = false;
        } else if (comm->lane_stop) {
            break;
        } else {
            pthread_cond_wait(&comm->lane_wake, &device->lock);
        }
    }
    comm->lane_started = false;
    pthread_mutex_unlock(&device->lock);
    atomic_fetch_sub(&pn_counts.lanes, 1);
    pn_comm_release(comm);
    return NULL;
}

void pn_lane_push(pn_comm_t *comm, pn_task_t *task) {
    task->next = NULL;
    if (comm->queue_tail)
        comm->queue_tail->next = task;
    else
        comm->queue_head = task;
    comm->queue_tail = task;
    if (!comm->lane_started) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, lane, comm) == 0) {
            pthread_detach(thread);
            comm->lane_started = true;
            comm->references++;
            atomic_fetch_add(&pn_counts.lanes, 1);
        }
        /* Without a thread the operation stays queued, and its deadline says so. */
    } else {
        pthread_cond_signal(&comm->lane_wake);
    }
}

/* ---- cliques ---------------------------------------------------------------------------------------------
 */

static pthread_mutex_t clique_lock = PTHREAD_MUTEX_INITIALIZER;
static pn_clique_t *cliques;

void pn_comm_join_clique(pn_comm_t *comm, uint64_t key) {
    pthread_mutex_lock(&clique_lock);
    pn_clique_t *clique = cliques;
    while (clique && clique->key != key)
        clique = clique->next;
    if (!clique && (clique = calloc(1, sizeof *clique))) {
        clique->key = key;
        clique->next = cliques;
        cliques = clique;
    }
    if (clique)
        clique->members++;
    comm->clique = clique;
    pthread_mutex_unlock(&clique_lock);
}

static void leave_clique(pn_comm_t *comm) {
    pthread_mutex_lock(&clique_lock);
    pn_clique_t *clique = comm->clique;
    if (clique && --clique->members == 0) {
        pn_clique_t **at = &cliques;
        while (*at != clique)
            at = &(*at)->next;
        *at = clique->next;
        free(clique);
    }
    comm->clique = NULL;
    pthread_mutex_unlock(&clique_lock);
}

/* ---- life -------------------------------------------------------------------------------------------------
 */

pn_comm_t *pn_comm_new(pn_device_t *device, int rank, int size) {
    pn_comm_t *comm = calloc(1, sizeof *comm);
    if (!comm)
        return NULL;
    comm->device = device;
    comm->references = 1;
    comm->scratch_slot = -1;
    pthread_mutex_init(&comm->handle_lock, NULL);
    pthread_cond_init(&comm->lane_wake, NULL);
    pn_link_init(&comm->pending);
    pn_link_init(&comm->limbo);
    pn_link_init(&comm->registrations);
    pn_link_init(&comm->operators);
    pn_link_init(&comm->in_device);
    pn_track_start(&comm->track, device, NULL, 0);
    if (size)
        pn_comm_set_size(comm, rank, size);
    pthread_mutex_lock(&device->lock);
    pn_link_append(&device->comms, &comm->in_device);
    pthread_mutex_unlock(&device->lock);
    atomic_fetch_add(&pn_counts.communicators, 1);
    return comm;
}

void pn_comm_set_size(pn_comm_t *comm, int rank, int size) {
    comm->rank = rank;
    comm->size = size;
    free(comm->met);
    comm->met = calloc((size_t)size, 1);
}

void pn_comm_free(pn_comm_t *comm) {
    pthread_mutex_destroy(&comm->handle_lock);
    pthread_cond_destroy(&comm->lane_wake);
    free(comm->met);
    free(comm);
}

void pn_comm_hold(pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    comm->references++;
    pthread_mutex_unlock(&comm->device->lock);
}

void pn_comm_release(pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    bool last = --comm->references == 0;
    pthread_mutex_unlock(&comm->device->lock);
    if (last) {
        atomic_fetch_sub(&pn_counts.communicators, 1);
        pn_waiter_ring(true); /* it may be looking at it: it frees it when it is not */
    }
}

CUresult pn_comm_equip(pn_comm_t *comm) {
    pn_device_t *device = comm->device;
    const pn_cuda_t *cuda = &device->engine->cuda;
    CUresult rc = CUDA_SUCCESS;
    if (!device->scratch) {
        CUdeviceptr page;
        if ((rc = cuda->cuMemAlloc_v2(&page, PN_SCRATCH_SLOTS * PN_SCRATCH_BYTES)) != CUDA_SUCCESS)
            return rc;
        pthread_mutex_lock(&device->lock);
        bool late = device->scratch != 0;
        if (!late)
            device->scratch = page;
        pthread_mutex_unlock(&device->lock);
        if (late)
            cuda->cuMemFree_v2(page);
    }
    pthread_mutex_lock(&device->lock);
    for (int slot = 0; slot < PN_SCRATCH_SLOTS && comm->scratch_slot < 0; slot++)
        if (!(device->scratch_used[slot / 64] >> (slot % 64) & 1)) {
            device->scratch_used[slot / 64] |= (uint64_t)1 << (slot % 64);
            comm->scratch_slot = slot;
        }
    pthread_mutex_unlock(&device->lock);
    if (comm->scratch_slot < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    comm->scratch = (void *)(uintptr_t)(device->scratch + (CUdeviceptr)comm->scratch_slot * PN_SCRATCH_BYTES);
    if ((rc = cuda->cuStreamCreateWithPriority(&comm->stream, CU_STREAM_NON_BLOCKING, 0)) != CUDA_SUCCESS)
        return rc;
    atomic_fetch_add(&pn_counts.streams, 1);
    comm->track.stream = comm->stream;
    return cuda->cuStreamGetId(comm->stream, &comm->track.id);
}

void pn_comm_strip(pn_comm_t *comm) {
    pn_device_t *device = comm->device;
    if (comm->stream) {
        device->engine->cuda.cuStreamDestroy_v2(comm->stream);
        atomic_fetch_sub(&pn_counts.streams, 1);
        comm->stream = NULL;
    }
    if (comm->numbers)
        device->engine->cuda.cuMemFreeHost(comm->numbers);
    comm->numbers = NULL;
    pthread_mutex_lock(&device->lock);
    CUstream aside = comm->aside;
    comm->aside = NULL;
    pthread_mutex_unlock(&device->lock);
    if (aside) {
        device->engine->cuda.cuStreamDestroy_v2(aside);
        atomic_fetch_sub(&pn_counts.streams, 1);
    }
    pthread_mutex_lock(&device->lock);
    if (comm->scratch_slot >= 0)
        device->scratch_used[comm->scratch_slot / 64] &= ~((uint64_t)1 << (comm->scratch_slot % 64));
    comm->scratch_slot = -1;
    pthread_mutex_unlock(&device->lock);
}

void pn_comm_gone(pn_comm_t *comm) {
    pn_device_t *device = comm->device;
    pn_link_t free_now;
    pn_link_init(&free_now);
    leave_clique(comm);
    pthread_mutex_lock(&device->lock);
    comm->state = PN_GONE;
    /* The operations that were queued have failed and are in limbo; a group wants to be told. */
    pn_task_t *dropped = NULL;
    for (pn_task_t *task = comm->queue_head, *next; task; task = next) {
        next = task->next;
        if (task->drop) {
            task->next = dropped;
            dropped = task;
        }
    }
    comm->queue_head = comm->queue_tail = NULL;
    comm->lane_stop = true;
    pthread_cond_broadcast(&comm->lane_wake);
    while (!pn_link_empty(&comm->limbo)) {
        pn_link_t *link = comm->limbo.next;
        pn_link_remove(link);
        pn_link_append(&free_now, link);
    }
    pthread_mutex_unlock(&device->lock);
    while (!pn_link_empty(&free_now)) {
        pn_op_t *op = PN_OWNER(free_now.next, pn_op_t, in_comm);
        pn_link_remove(&op->in_comm);
        pn_op_recycle(op);
        pn_op_release(op);
    }
    pn_registrations_gone(comm);
    while (dropped) {
        pn_task_t *task = dropped;
        dropped = task->next;
        task->drop(task);
    }
    pn_comm_strip(comm);
}

void pn_comm_drop(pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    bool over = comm->state == PN_GONE || comm->state == PN_ABORTING;
    bool blank = comm->state == PN_NEW && !comm->lane_started;
    pthread_mutex_unlock(&comm->device->lock);
    if (blank)
        pn_comm_gone(comm);
    else if (!over)
        pn_abort(&comm, 1, NULL, 2000000000);
    pn_comm_release(comm);
}
