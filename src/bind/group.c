/* Several operations as one native group.
 *
 * A group that cannot wait is issued by its caller. Otherwise each of its communicators gets a place in its
 * own lane's queue: the lanes meet there, the first communicator's lane issues for all, and the others stand
 * by, so that nothing overtakes the group on any of them.
 *
 * A communicator may fail before its lane gets there. Then nothing of the group is issued: each lane fails
 * the operations of its own communicator. Those of the failed one are not touched, since they may be gone.
 */
#include "bind.h"
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    pn_task_t task;
    pn_group_t *group;
} place_t;

struct pn_group {
    pn_op_t **ops;
    pn_comm_t **owners; /* of the operations, one each */
    int count;
    pn_comm_t **comms; /* distinct; each is referred to */
    int comm_count;
    place_t *places;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int arrived, left;
    bool started, cancelled, done;
};

/* One order for the queues of several lanes: two groups never wait for each other crosswise. */
static pthread_mutex_t placing = PTHREAD_MUTEX_INITIALIZER;

static bool open_comm(pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    /* A close waits behind the group in the same queue. */
    bool open = comm->state == PN_READY || comm->state == PN_CLOSING;
    pthread_mutex_unlock(&comm->device->lock);
    return open;
}

/* Count ourselves into every communicator, or into none. */
static bool go_inside(pn_group_t *group) {
    for (int i = 0; i < group->comm_count; i++) {
        pn_comm_t *comm = group->comms[i];
        pthread_mutex_lock(&comm->device->lock);
        bool open = comm->state == PN_READY || comm->state == PN_CLOSING;
        if (open)
            comm->inside++;
        pthread_mutex_unlock(&comm->device->lock);
        if (!open) {
            while (i-- > 0) {
                pthread_mutex_lock(&group->comms[i]->device->lock);
                group->comms[i]->inside--;
                pthread_mutex_unlock(&group->comms[i]->device->lock);
            }
            return false;
        }
    }
    return true;
}

static void come_out(pn_group_t *group) {
    for (int i = 0; i < group->comm_count; i++) {
        pthread_mutex_lock(&group->comms[i]->device->lock);
        group->comms[i]->inside--;
        pthread_mutex_unlock(&group->comms[i]->device->lock);
    }
}

/* Each operation's own end: pn_issued and pn_not_issued take one count of `inside` back. */
static void inside_for(pn_op_t *op) {
    pthread_mutex_lock(&op->comm->device->lock);
    op->comm->inside++;
    pthread_mutex_unlock(&op->comm->device->lock);
}

static void fail_all(pn_group_t *group, pn_outcome_t why, const char *detail) {
    for (int i = 0; i < group->count; i++) {
        inside_for(group->ops[i]);
        pn_not_issued(group->ops[i], why, detail);
    }
}

/* The last operation on each stream records the event; the earlier ones complete with it. */
static CUresult record(pn_group_t *group, CUstream *streams, CUevent *events) {
    CUresult rc = CUDA_SUCCESS;
    for (int i = group->count - 1; i >= 0 && rc == CUDA_SUCCESS; i--) {
        pn_op_t *op = group->ops[i];
        const pn_cuda_t *cuda = &op->comm->device->engine->cuda;
        pn_enter_t saved;
        bool later = false;
        for (int j = i + 1; j < group->count && !later; j++)
            later = streams[j] == streams[i] && group->ops[j]->comm->device == op->comm->device;
        if ((rc = pn_enter(op->comm->device, &saved)) != CUDA_SUCCESS)
            return rc;
        rc = pn_after_call(op, streams[i]);
        if (rc == CUDA_SUCCESS && op->in_lane)
            rc = pn_gates_release(op, streams[i]);
        if (rc == CUDA_SUCCESS && !later &&
            (rc = pn_event_take(op->comm->device, &events[i])) == CUDA_SUCCESS)
            rc = cuda->cuEventRecord(events[i], streams[i]);
        pn_leave(op->comm->device, &saved);
    }
    return rc;
}

/* The native calls; every communicator is counted as inside. */
static void issue_group(pn_group_t *group) {
    size_t count = (size_t)group->count;
    CUstream *streams = calloc(count, sizeof *streams);
    CUevent *events = calloc(count, sizeof *events);
    pn_track_t **tracks = calloc(count, sizeof *tracks);
    const pn_nccl_t *nccl = &group->ops[0]->comm->device->engine->nccl;
    pn_outcome_t why = {PN_FROM_CUDA, 0, "cuStreamWaitEvent"};
    char detail[PN_DETAIL_BYTES] = "";
    if (!streams || !events || !tracks)
        why.code = CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < group->count && why.code == 0; i++) {
        pn_device_t *device = group->ops[i]->comm->device;
        pn_enter_t saved;
        if ((why.code = (int)pn_enter(device, &saved)) == 0) {
            why.code = (int)pn_choose_stream(group->ops[i], &streams[i], &tracks[i]);
            if (why.code == 0)
                why.code = (int)pn_before_call(group->ops[i], streams[i]);
            pn_leave(device, &saved);
        }
    }
    if (why.code == 0) {
        why = (pn_outcome_t){PN_FROM_NCCL, 0, "ncclGroupStart"};
        ncclResult_t rc = nccl->ncclGroupStart();
        for (int i = 0; i < group->count && rc == ncclSuccess; i++) {
            /* A one-rank communicator executes at the call, on the calling thread's current device. */
            pn_device_t *device = group->ops[i]->comm->device;
            pn_enter_t saved;
            if (pn_enter(device, &saved) != CUDA_SUCCESS) {
                rc = ncclUnhandledCudaError;
                break;
            }
            rc = pn_call(group->ops[i], streams[i], &why.function);
            pn_leave(device, &saved);
        }
        if (rc != ncclSuccess)
            snprintf(detail, sizeof detail, "%s", nccl->ncclGetLastError(group->ops[0]->comm->handle));
        /* A failed call has poisoned the group: this end launches nothing and clears the thread. */
        ncclResult_t end = nccl->ncclGroupEnd();
        if (rc == ncclSuccess && end != ncclSuccess) {
            why.function = "ncclGroupEnd";
            snprintf(detail, sizeof detail, "%s", nccl->ncclGetLastError(group->ops[0]->comm->handle));
            rc = end;
        }
        why.code = (int)rc;
        if (rc != ncclSuccess)
            pn_repair_depth(group->ops[0]->comm);
    }
    if (why.code == 0) {
        why = (pn_outcome_t){PN_FROM_CUDA, 0, "cuEventRecord"};
        why.code = (int)record(group, streams, events);
    }
    if (why.code != 0)
        fail_all(group, why, detail);
    else
        for (int i = 0; i < group->count; i++) {
            inside_for(group->ops[i]);
            pn_issued(group->ops[i], tracks[i], events[i]);
        }
    free(streams);
    free(events);
    free(tracks);
}

/* As pn_its_turn, for all of them; what stands before one of them may be another of them. */
static bool its_turn(pn_group_t *group) {
    bool turn = true;
    for (int i = 0; i < group->count && turn; i++) {
        pn_device_t *device = group->owners[i]->device;
        pthread_mutex_lock(&device->lock);
        const pn_op_t *op = group->owners[i]->state <= PN_CLOSING ? group->ops[i] : NULL;
        for (pn_link_t *at = device->called.next; op && at != &device->called && at != &op->in_order && turn;
             at = at->next) {
            const pn_op_t *before = PN_OWNER(at, pn_op_t, in_order);
            turn = before->comm->clique == op->comm->clique;
            for (int j = 0; j < group->count && !turn; j++)
                turn = group->ops[j] == before;
        }
        pthread_mutex_unlock(&device->lock);
    }
    return turn;
}

static void free_group(pn_group_t *group) {
    for (int i = 0; i < group->comm_count; i++)
        pn_comm_release(group->comms[i]);
    pthread_mutex_destroy(&group->lock);
    pthread_cond_destroy(&group->moved);
    free(group->ops);
    free(group->owners);
    free(group->comms);
    free(group->places);
    free(group);
}

static void leave(pn_group_t *group) {
    pthread_mutex_lock(&group->lock);
    bool last = ++group->left == group->comm_count;
    pthread_mutex_unlock(&group->lock);
    if (last)
        free_group(group);
}

/* The place of a communicator that is gone: its lane will not come. */
static void drop_place(pn_task_t *task) {
    leave(((place_t *)task)->group);
}

/* Nothing was issued: end what belongs to this lane's communicator, unless that has failed itself. */
static void fail_own(pn_group_t *group, pn_comm_t *comm) {
    pthread_mutex_lock(&comm->device->lock);
    bool open = comm->state <= PN_CLOSING;
    if (open)
        comm->inside++; /* until we are out, no abort releases them */
    pthread_mutex_unlock(&comm->device->lock);
    if (!open)
        return;
    for (int i = 0; i < group->count; i++) {
        if (group->owners[i] != comm)
            continue;
        inside_for(group->ops[i]);
        pn_not_issued(group->ops[i], (pn_outcome_t){PN_FROM_NCCL, ncclInvalidUsage, "ncclGroupStart"},
                      "another communicator of the group failed before it was issued");
    }
    pthread_mutex_lock(&comm->device->lock);
    comm->inside--;
    pthread_mutex_unlock(&comm->device->lock);
}

static void cancel(pn_group_t *group) { /* group->lock held */
    group->cancelled = true;
    pthread_cond_broadcast(&group->moved);
}

static void run_place(pn_task_t *task, pn_comm_t *comm) {
    pn_group_t *group = ((place_t *)task)->group;
    bool leader = comm == group->comms[0];
    pn_back_pressure(comm);
    pthread_mutex_lock(&group->lock);
    group->arrived++;
    pthread_cond_broadcast(&group->moved);
    while (!group->cancelled &&
           (leader ? group->arrived < group->comm_count || !its_turn(group) : !group->done)) {
        /* A lane that never comes belongs to a communicator that has failed: look now and then. */
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 1000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&group->moved, &group->lock, &until);
        for (int i = 0; i < group->comm_count && !group->started && !group->cancelled; i++)
            if (!open_comm(group->comms[i]))
                cancel(group);
    }
    if (leader && !group->cancelled) {
        group->started = go_inside(group);
        if (!group->started)
            cancel(group);
    }
    bool issues = leader && group->started, cancelled = group->cancelled;
    pthread_mutex_unlock(&group->lock);
    if (issues) {
        issue_group(group);
        come_out(group);
        pthread_mutex_lock(&group->lock);
        group->done = true;
        pthread_cond_broadcast(&group->moved);
        pthread_mutex_unlock(&group->lock);
    } else if (cancelled) {
        fail_own(group, comm);
    }
    leave(group);
}

static pn_group_t *make_group(pn_op_t **ops, int count) {
    pn_group_t *group = calloc(1, sizeof *group);
    if (!group)
        return NULL;
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->moved, NULL);
    group->count = count;
    group->ops = calloc((size_t)count, sizeof(*group->ops));
    group->owners = calloc((size_t)count, sizeof(*group->owners));
    group->comms = calloc((size_t)count, sizeof(*group->comms));
    group->places = calloc((size_t)count, sizeof(*group->places));
    if (!group->ops || !group->owners || !group->comms || !group->places) {
        free_group(group);
        return NULL;
    }
    memcpy(group->ops, ops, (size_t)count * sizeof *ops);
    for (int i = 0; i < count; i++) {
        pn_comm_t *comm = group->owners[i] = ops[i]->comm;
        int at = 0;
        while (at < group->comm_count && group->comms[at] != comm)
            at++;
        if (at == group->comm_count) {
            group->comms[group->comm_count++] = comm;
            pthread_mutex_lock(&comm->device->lock);
            comm->references++;
            pthread_mutex_unlock(&comm->device->lock);
        }
    }
    for (int i = 0; i < group->comm_count; i++) {
        group->places[i].task.run = run_place;
        group->places[i].task.drop = drop_place;
        group->places[i].group = group;
    }
    return group;
}

/* Nothing in it can wait, and the launch locks of all its devices (at most eight) could be taken. */
static int try_inline(pn_group_t *group, pn_device_t **held) {
    int devices = 0;
    bool can = !pn_launch_blocking;
    for (int i = 0; i < group->count && can; i++) {
        pn_op_t *op = group->ops[i];
        pn_comm_t *comm = op->comm;
        pn_device_t *device = comm->device;
        int at = 0, mates = 0;
        while (at < devices && held[at] != device)
            at++;
        if (at == devices) {
            can = devices < 8 && pthread_mutex_trylock(&device->issue) == 0;
            if (can)
                held[devices++] = device;
        }
        for (int j = 0; j < group->comm_count; j++)
            mates += group->comms[j]->clique == comm->clique;
        pthread_mutex_lock(&device->lock);
        can = can && pn_link_empty(&device->called) && !op->may_wait && !pn_on_registered(op) &&
              !comm->queue_head && !comm->lane_busy && pn_contacted(op) && comm->clique &&
              comm->clique->members == mates && device->in_flight + group->count <= PN_IN_FLIGHT_LIMIT;
        pthread_mutex_unlock(&device->lock);
    }
    if (!can) {
        while (devices > 0)
            pthread_mutex_unlock(&held[--devices]->issue);
        return -1;
    }
    return devices;
}

/* All of them get their place, or none is issued. */
static bool enlist_all(pn_group_t *group, bool in_lane) {
    for (int i = 0; i < group->count; i++) {
        pn_op_t *op = group->ops[i];
        pthread_mutex_lock(&op->comm->device->lock);
        bool open = pn_enlist(op);
        if (open)
            op->in_lane = in_lane;
        pthread_mutex_unlock(&op->comm->device->lock);
        if (open)
            continue;
        for (int j = 0; j < i; j++) {
            inside_for(group->ops[j]);
            pn_not_issued(group->ops[j], (pn_outcome_t){PN_FROM_CLOSED, 0, NULL}, NULL);
        }
        for (int j = i; j < group->count; j++)
            pn_refuse(group->ops[j]);
        return false;
    }
    return true;
}

static CUresult prepare_all(pn_op_t **ops, int count) {
    CUresult rc = CUDA_SUCCESS;
    for (int i = 0; i < count && rc == CUDA_SUCCESS; i++) {
        pn_enter_t saved;
        if (!ops[i]->has_stream)
            continue;
        if ((rc = pn_enter(ops[i]->comm->device, &saved)) == CUDA_SUCCESS) {
            rc = pn_prepare_deferred(ops[i]);
            pn_leave(ops[i]->comm->device, &saved);
        }
    }
    return rc;
}

static void give_up(pn_op_t **ops, int count, pn_outcome_t why) {
    for (int i = 0; i < count; i++) {
        pthread_mutex_lock(&ops[i]->comm->device->lock);
        pn_gates_open(ops[i]);
        pthread_mutex_unlock(&ops[i]->comm->device->lock);
        pn_op_recycle(ops[i]);
        pn_op_finish(ops[i], why);
        pn_op_release(ops[i]);
    }
}

bool pn_submit_group(pn_op_t **ops, int count) {
    pn_group_t *group = make_group(ops, count);
    pn_device_t *held[8];
    bool open = true;
    for (int i = 0; i < count; i++)
        pn_op_start(ops[i]);
    if (!group) {
        give_up(ops, count, (pn_outcome_t){PN_FROM_CUDA, CUDA_ERROR_OUT_OF_MEMORY, "calloc"});
        return true;
    }
    pthread_mutex_lock(&placing);
    int devices = try_inline(group, held);
    CUresult rc = devices < 0 ? prepare_all(ops, count) : CUDA_SUCCESS;
    bool queued = false;
    if (rc != CUDA_SUCCESS) {
        give_up(ops, count, (pn_outcome_t){PN_FROM_CUDA, (int)rc, "cuStreamWaitValue32"});
    } else if ((open = enlist_all(group, devices < 0))) {
        if (devices < 0) {
            queued = true;
            /* With its last place pushed the group belongs to the lanes, which may free it at once. */
            int lanes = group->comm_count;
            for (int i = 0; i < lanes; i++) {
                pn_comm_t *comm = group->comms[i];
                pthread_mutex_lock(&comm->device->lock);
                pn_lane_push(comm, &group->places[i].task);
                pthread_mutex_unlock(&comm->device->lock);
            }
        } else if (go_inside(group)) {
            issue_group(group);
            come_out(group);
        } else {
            fail_all(group, (pn_outcome_t){PN_FROM_CLOSED, 0, NULL}, NULL);
        }
    }
    while (devices > 0)
        pthread_mutex_unlock(&held[--devices]->issue);
    pthread_mutex_unlock(&placing);
    if (!queued)
        free_group(group);
    pn_waiter_ring(false);
    return open;
}
