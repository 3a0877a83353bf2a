/* A communicator's beginning and end: init, split, finalize and destroy through its lane, abort on a helper.
 */
#define _GNU_SOURCE
#include "bind.h"
#include "memory.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t hash(const void *bytes, size_t count, uint64_t seed) {
    const unsigned char *at = bytes;
    uint64_t value = seed ^ 14695981039346656037u;
    for (size_t i = 0; i < count; i++)
        value = (value ^ at[i]) * 1099511628211u;
    return value;
}

/* Management calls allocate and synchronise: behind a collective that waits for peers they would wait too,
 * with the device in their hands. So they begin when what we have on the device at this moment has ended. */
bool pn_has_older(pn_device_t *device, uint64_t number) {
    for (pn_link_t *at = device->tracks.next; at != &device->tracks; at = at->next) {
        const pn_track_t *track = PN_OWNER(at, pn_track_t, active);
        const pn_op_t *oldest = PN_OWNER(track->ops.next, pn_op_t, in_track);
        if (oldest->reached <= number && oldest->kind != PN_EVENT)
            return true;
    }
    return false;
}

bool pn_drained(pn_comm_t *comm, bool own_only) {
    pn_device_t *device = comm->device;
    pthread_mutex_lock(&device->lock);
    uint64_t issued = device->issued_total;
    pthread_mutex_unlock(&device->lock);
    for (int64_t nap = 5000;; nap = nap < 1000000 ? 2 * nap : nap) {
        pthread_mutex_lock(&device->lock);
        bool open = comm->state <= PN_CLOSING;
        bool over = own_only ? comm->pending.next == comm->pending.prev : !pn_has_older(device, issued);
        pthread_mutex_unlock(&device->lock);
        if (!open || over)
            return open;
        pn_waiter_ring(true);
        nanosleep(&(struct timespec){0, nap}, NULL);
    }
}

/* An operation that ends at the call: out of the pending list, unless a failure was quicker. */
void pn_end_control(pn_op_t *op, pn_outcome_t why, const char *detail) {
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    pthread_mutex_lock(&device->lock);
    bool mine = pn_take_pending(op);
    if (mine) {
        op->detail = detail && *detail ? strdup(detail) : NULL;
    }
    pthread_mutex_unlock(&device->lock);
    if (mine) {
        pn_op_finish(op, why);
        pn_op_release(op);
    }
}

bool pn_go_inside(pn_comm_t *comm) {
    bool go;
    pthread_mutex_lock(&comm->device->lock);
    for (int64_t nap = 10000; (go = comm->state <= PN_CLOSING) && comm->inside;
         nap = nap < 500000 ? 2 * nap : nap) {
        pthread_mutex_unlock(&comm->device->lock);
        nanosleep(&(struct timespec){0, nap}, NULL);
        pthread_mutex_lock(&comm->device->lock);
    }
    if (go)
        comm->inside++;
    pthread_mutex_unlock(&comm->device->lock);
    return go;
}

void pn_come_out(pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    comm->inside--;
    pthread_mutex_unlock(&comm->device->lock);
}

static void last_error(pn_comm_t *comm, char *detail, size_t size) {
    snprintf(detail, size, "%s", comm->device->engine->nccl.ncclGetLastError(comm->handle));
}

static void run_init(pn_task_t *task, pn_comm_t *comm) {
    pn_op_t *op = (pn_op_t *)task;
    pn_control_t *control = op->argument;
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    pn_outcome_t why = {PN_FROM_CUDA, 0, "cuStreamCreateWithPriority"};
    char detail[PN_DETAIL_BYTES] = "";
    cpu_set_t before;
    if (!pn_drained(comm, false) || !pn_go_inside(comm))
        return;
    ncclUniqueId id = control->id;
    pn_comm_join_clique(comm, hash(&id, sizeof id, 0));
    if ((why.code = (int)pn_comm_equip(comm)) == 0) {
        /* Some releases leave the calling thread bound to the GPU's cores, and with it all its children. */
        bool known = sched_getaffinity(0, sizeof before, &before) == 0;
        ncclConfig_t *config = control->config;
        why = (pn_outcome_t){PN_FROM_NCCL, 0, config ? "ncclCommInitRankConfig" : "ncclCommInitRank"};
        why.code =
            (int)(config ? nccl->ncclCommInitRankConfig(&comm->handle, comm->size, id, comm->rank, config)
                         : nccl->ncclCommInitRank(&comm->handle, comm->size, id, comm->rank));
        if (known)
            sched_setaffinity(0, sizeof before, &before);
        if (why.code != 0) {
            last_error(comm, detail, sizeof detail);
            pn_repair_depth(comm);
        }
    }
    pthread_mutex_lock(&comm->device->lock);
    if (why.code == 0 && comm->state == PN_NEW)
        comm->state = PN_READY;
    pthread_mutex_unlock(&comm->device->lock);
    if (why.code != 0)
        pn_comm_fail(comm, op->seq, why, PN_FAILED, detail);
    else
        pn_end_control(op, (pn_outcome_t){PN_OK, 0, NULL}, NULL);
    pn_come_out(comm);
}

static void run_split(pn_task_t *task, pn_comm_t *comm) {
    pn_op_t *op = (pn_op_t *)task;
    pn_control_t *control = op->argument;
    pn_comm_t *child = control->child;
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    pn_outcome_t why = {PN_FROM_NCCL, 0, "ncclCommSplit"};
    char detail[PN_DETAIL_BYTES] = "";
    if (!pn_drained(comm, false) || !pn_go_inside(comm))
        return;
    /* The control block belongs to the operation's owner, who may go once the operation has failed. */
    int color = control->color, key = control->key;
    pthread_mutex_lock(&comm->device->lock);
    child->references++;
    uint64_t parent = comm->clique->key, nth = ++comm->splits;
    pthread_mutex_unlock(&comm->device->lock);
    why.code = (int)nccl->ncclCommSplit(comm->handle, color, key, &child->handle, control->config);
    bool member = why.code == 0 && child->handle;
    if (why.code != 0) {
        last_error(comm, detail, sizeof detail);
        pn_repair_depth(comm);
    } else if (member) {
        int rank = 0, size = 0;
        why.function = "ncclCommUserRank";
        if ((why.code = (int)nccl->ncclCommUserRank(child->handle, &rank)) == 0)
            why.code = (int)nccl->ncclCommCount(child->handle, &size);
        if (why.code == 0) {
            pn_comm_set_size(child, rank, size);
            pn_comm_join_clique(child, hash(&color, sizeof color, parent + (nth << 32)));
            why = (pn_outcome_t){PN_FROM_CUDA, (int)pn_comm_equip(child), "cuStreamCreateWithPriority"};
        }
    }
    if (why.code == 0) {
        pthread_mutex_lock(&comm->device->lock);
        if (member && child->state == PN_NEW)
            child->state = PN_READY;
        bool told = comm->state <= PN_CLOSING && !pn_op_finished(op);
        if (told)
            control->member = member;
        pthread_mutex_unlock(&comm->device->lock);
        pn_end_control(op, (pn_outcome_t){PN_OK, 0, NULL}, NULL);
        if (!told && member)
            pn_abort(&child, 1, NULL, 2000000000); /* the parent failed meanwhile: nobody will have it */
    } else if (why.code == ncclInvalidArgument && why.source == PN_FROM_NCCL) {
        pn_end_control(op, why, detail);
    } else {
        pn_comm_fail(comm, op->seq, why, PN_FAILED, detail);
    }
    pn_come_out(comm);
    pn_comm_release(child);
}

static void run_close(pn_task_t *task, pn_comm_t *comm) {
    pn_op_t *op = (pn_op_t *)task;
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    pn_outcome_t why = {PN_FROM_NCCL, 0, "ncclCommFinalize"};
    char detail[PN_DETAIL_BYTES] = "";
    if (!pn_drained(comm, true) || !pn_go_inside(comm))
        return;
    pn_registrations_close(comm);
    why.code = (int)nccl->ncclCommFinalize(comm->handle);
    if (why.code == 0) {
        /* From here the handle is dead to everyone else; destroy may not be followed by abort. */
        pthread_mutex_lock(&comm->handle_lock);
        ncclComm_t handle = comm->handle;
        comm->handle = NULL;
        pthread_mutex_unlock(&comm->handle_lock);
        why.function = "ncclCommDestroy";
        why.code = (int)nccl->ncclCommDestroy(handle);
        if (why.code != 0)
            atomic_fetch_add(&pn_counts.abandoned, 1);
    }
    if (why.code != 0) {
        last_error(comm, detail, sizeof detail);
        pn_repair_depth(comm);
        pn_comm_fail(comm, op->seq, why, PN_FAILED, detail);
        pn_come_out(comm);
        return;
    }
    pthread_mutex_lock(&comm->device->lock);
    bool mine = pn_take_pending(op);
    pthread_mutex_unlock(&comm->device->lock);
    pn_come_out(comm);
    pn_comm_gone(comm); /* also after a deadline: the handle is gone, so nothing is left to abort */
    if (mine) {
        pn_op_finish(op, (pn_outcome_t){PN_OK, 0, NULL});
        pn_op_release(op);
    }
}

void pn_control_submit(pn_op_t *op) {
    static void (*const runs[])(pn_task_t *, pn_comm_t *) = {
        [PN_INIT - PN_INIT] = run_init,
        [PN_SPLIT - PN_INIT] = run_split,
        [PN_CLOSE - PN_INIT] = run_close,
        [PN_REGISTER - PN_INIT] = pn_run_register,
        [PN_DEREGISTER - PN_INIT] = pn_run_deregister,
    };
    pn_comm_t *comm = op->comm;
    pn_device_t *device = comm->device;
    pn_op_start(op);
    op->task.run = runs[op->kind - PN_INIT];
    pthread_mutex_lock(&device->lock);
    bool open = comm->state == (op->kind == PN_INIT ? PN_NEW : PN_READY);
    if (open) {
        op->seq = PN_CONTROL | ++comm->controls;
        op->in_lane = true;
        pn_link_append(&comm->pending, &op->in_comm);
        pn_deadline_set(device, op->deadline_ns);
        if (op->kind == PN_CLOSE)
            comm->state = PN_CLOSING;
        pn_lane_push(comm, &op->task);
    }
    pthread_mutex_unlock(&device->lock);
    if (open)
        pn_waiter_ring(true);
    else
        pn_refuse(op);
}
