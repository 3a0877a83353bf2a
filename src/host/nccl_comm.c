/* Communicator handles: making, checking, stopping; state; queries. */
#include "nccl_group.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory of handles --------------------------------------------------------------------------- */

enum { GRAVES = 64 };
static pthread_mutex_t graves_lock = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t graves[GRAVES];
static unsigned int next_grave;

static void bury(ncclComm_t comm) {
    pthread_mutex_lock(&graves_lock);
    ncclComm_t oldest = graves[next_grave % GRAVES];
    graves[next_grave++ % GRAVES] = comm;
    pthread_mutex_unlock(&graves_lock);
    free(oldest);
}

static host_order_t *order_new(void) {
    host_order_t *order = calloc(1, sizeof *order);
    if (order != NULL)
        pthread_mutex_init(&order->lock, NULL);
    return order;
}

static void order_join(host_order_t *order, ncclComm_t comm) {
    pthread_mutex_lock(&order->lock);
    comm->order = order;
    comm->next_family = order->members;
    order->members = comm;
    pthread_mutex_unlock(&order->lock);
    atomic_fetch_add(&order->refs, 1);
}

static void order_leave(ncclComm_t comm) {
    host_order_t *order = comm->order;
    pthread_mutex_lock(&order->lock);
    for (ncclComm_t *link = &order->members; *link != NULL; link = &(*link)->next_family)
        if (*link == comm) {
            *link = comm->next_family;
            break;
        }
    pthread_mutex_unlock(&order->lock);
    if (atomic_fetch_sub(&order->refs, 1) == 1) {
        pthread_mutex_destroy(&order->lock);
        free(order);
    }
}

ncclComm_t host_comm_new(int ranks, int rank, int device, const ncclConfig_t *config, ncclComm_t share) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    host_order_t *order = share != NULL ? share->order : order_new();
    if (comm == NULL || order == NULL) {
        host_last_error("out of memory");
        free(comm);
        if (share == NULL)
            free(order);
        return NULL;
    }
    comm->magic = HOST_COMM_MAGIC;
    comm->refs = 1;
    comm->ranks = ranks;
    comm->rank = rank;
    comm->device = device;
    comm->state = ncclInProgress;
    comm->config = *config;
    comm->needed = ~(uint64_t)0;
    order_join(order, comm);
    atomic_fetch_add(&host_live_communicators, 1);
    return comm;
}

void host_comm_hold(ncclComm_t comm) {
    atomic_fetch_add_explicit(&comm->refs, 1, memory_order_relaxed);
}

void host_comm_release(ncclComm_t comm) {
    if (atomic_fetch_sub_explicit(&comm->refs, 1, memory_order_acq_rel) != 1)
        return;
    order_leave(comm);
    host_windows_free(comm);
    free(comm->operators);
    comm->operators = NULL;
    bury(comm);
}

/* ---- state --------------------------------------------------------------------------------------- */

ncclResult_t host_comm_check(ncclComm_t comm, const char *function) {
    if (comm == NULL)
        return host_fail(ncclInvalidArgument, "%s: the communicator is NULL", function);
    uint64_t magic = atomic_load_explicit(&comm->magic, memory_order_seq_cst);
    if (magic == HOST_COMM_DEAD && host_misuse_watched())
        host_misuse("%s: the communicator %p was destroyed or aborted before", function, (void *)comm);
    if (magic == HOST_COMM_DEAD)
        return host_fail(ncclInvalidArgument, "%s: the communicator was destroyed or aborted before",
                         function);
    if (magic != HOST_COMM_MAGIC)
        return host_fail(ncclInvalidArgument, "%s: this is not a communicator", function);
    return ncclSuccess;
}

void host_comm_set_state(ncclComm_t comm, ncclResult_t error) {
    int healthy = ncclSuccess;
    atomic_compare_exchange_strong(&comm->state, &healthy, (int)error);
}

/* What was revoked needs its peers no more. */
static void look_for_peers(ncclComm_t comm) {
    host_clique_t *clique = atomic_load(&comm->clique);
    if (clique == NULL || atomic_load(&comm->revoked))
        return;
    host_clique_watch(clique);
    if (atomic_load(&clique->dead) != 0)
        host_comm_set_state(comm, ncclRemoteError);
}

ncclResult_t host_comm_state(ncclComm_t comm) {
    ncclResult_t state = (ncclResult_t)atomic_load(&comm->state);
    if (state == ncclSuccess && atomic_load(&comm->background) != 0)
        return ncclInProgress;
    if (state != ncclSuccess || !host_comm_begin(comm))
        return state;
    look_for_peers(comm);
    host_comm_end(comm);
    return (ncclResult_t)atomic_load(&comm->state);
}

void host_comm_spoil(ncclComm_t comm, ncclResult_t result) {
    if (comm->config.blocking == 0 && result != ncclSuccess && result != ncclInProgress)
        host_comm_set_state(comm, result);
}

ncclResult_t host_comm_ready(ncclComm_t comm, const char *function) {
    if (host_comm_stopped(comm))
        return ncclSuccess;
    ncclResult_t state = atomic_load(&comm->polls) > 0 ? ncclInProgress : host_comm_state(comm);
    if (state == ncclInProgress)
        return host_fail(ncclInvalidArgument, "%s: the communicator is still in progress", function);
    return state;
}

ncclResult_t host_comm_usable(ncclComm_t comm, const char *function) {
    if (atomic_load(&comm->revoked))
        return host_fail(ncclInvalidUsage, "%s: the communicator was revoked", function);
    ncclResult_t result = host_comm_ready(comm, function);
    if (result != ncclSuccess)
        return result;
    if (comm->finalize_called)
        return host_fail(ncclInvalidUsage, "%s: the communicator was finalized", function);
    if (comm->suspended)
        return host_fail(ncclInvalidUsage, "%s: the communicator is suspended", function);
    if (atomic_load(&comm->torn))
        return host_fail(ncclInvalidUsage,
                         "%s: operations of the communicator were cut off, and its ranks may be out of step",
                         function);
    return ncclSuccess;
}

ncclResult_t host_comm_progress(ncclComm_t comm, ncclResult_t result) {
    if (comm == NULL || atomic_load(&comm->magic) != HOST_COMM_MAGIC)
        return result;
    if (result != ncclSuccess && result != ncclInProgress) {
        host_comm_spoil(comm, result);
        return result;
    }
    if (host_group_depth() == 0 && atomic_load(&comm->polls) > 0)
        return ncclInProgress;
    return comm->config.blocking != 0 ? ncclSuccess : host_comm_state(comm);
}

static ncclResult_t poll_state(ncclComm_t comm) {
    if (atomic_load(&comm->polls) > 0 && atomic_fetch_sub(&comm->polls, 1) > 0)
        return ncclInProgress;
    return host_comm_state(comm);
}

void host_comm_stop(ncclComm_t comm) {
    host_order_t *order = comm->order;
    pthread_mutex_lock(&order->lock);
    for (ncclComm_t member = order->members; member != NULL; member = member->next_family) {
        atomic_store(&member->stop, 1);
        host_bell_ring(&member->quiet);
        host_clique_t *clique = atomic_load(&member->clique);
        if (clique != NULL)
            host_bell_ring(&member->area->bell);
    }
    pthread_mutex_unlock(&order->lock);
    host_bell_ring(&order->bell);
}

/* The order of the two looks at the magic number matters: whoever reclaims marks the handle first, and then
 * waits for those who are inside. */
ncclResult_t host_comm_pin(ncclComm_t comm, const char *function) {
    ncclResult_t result = host_comm_check(comm, function);
    if (result != ncclSuccess)
        return result;
    atomic_fetch_add(&comm->callers, 1);
    result = host_comm_check(comm, function);
    if (result != ncclSuccess)
        host_comm_unpin(comm);
    return result;
}

void host_comm_unpin(ncclComm_t comm) {
    atomic_fetch_sub(&comm->callers, 1);
    if (host_comm_stopped(comm))
        host_bell_ring(&comm->quiet);
}

bool host_comm_begin(ncclComm_t comm) {
    atomic_fetch_add_explicit(&comm->running, 1, memory_order_seq_cst);
    if (!host_comm_stopped(comm))
        return true;
    host_comm_end(comm);
    return false;
}

void host_comm_end(ncclComm_t comm) {
    atomic_fetch_sub_explicit(&comm->running, 1, memory_order_seq_cst);
    if (host_comm_stopped(comm))
        host_bell_ring(&comm->quiet);
}

bool host_comm_used(ncclComm_t comm) {
    return atomic_load(&comm->running) != 0 || atomic_load(&comm->callers) != 0;
}

void host_comm_settle(ncclComm_t comm) {
    host_visitors_turn_out(comm);
    for (;;) {
        uint32_t seen = host_bell_look(&comm->quiet);
        if (!host_comm_used(comm) && atomic_load(&comm->background) == 0)
            return;
        host_bell_wait(&comm->quiet, seen, HOST_NAP_NS);
    }
}

void host_comm_await_background(ncclComm_t comm) {
    for (;;) {
        uint32_t seen = host_bell_look(&comm->quiet);
        if (atomic_load(&comm->background) == 0)
            return;
        host_bell_wait(&comm->quiet, seen, HOST_NAP_NS);
    }
}

/* ---- calls that wait ----------------------------------------------------------------------------- */

bool host_comm_enter_call(ncclComm_t comm) {
    host_comm_hold(comm);
    atomic_fetch_add(&comm->callers, 1);
    if (!host_comm_stopped(comm))
        return true;
    host_comm_leave_call(comm);
    return false;
}

void host_comm_leave_call(ncclComm_t comm) {
    atomic_fetch_sub(&comm->callers, 1);
    host_bell_ring(&comm->quiet);
    host_comm_release(comm);
}

static ncclResult_t aborted(ncclComm_t comm) {
    return host_fail(ncclInternalError, "aborted while rank %d waited for its peers", comm->rank);
}

static ncclResult_t check_peers(ncclComm_t comm) {
    host_clique_t *clique = atomic_load(&comm->clique);
    if (clique == NULL)
        return ncclSuccess;
    host_clique_watch(clique);
    uint64_t dead = atomic_load(&clique->dead) & atomic_load(&comm->needed);
    if (dead == 0)
        return ncclSuccess;
    int rank = __builtin_ctzll(dead);
    return host_fail(ncclRemoteError, "rank %d (pid %d) is gone", rank,
                     (int)host_segment_area(clique->head, rank)->pid);
}

/* While a communicator is made from another one, it ends with that one, and the other's ranks are watched:
 * some may never come to be its own. */
ncclResult_t host_comm_nap(ncclComm_t comm, host_bell_t *bell, uint32_t seen) {
    ncclComm_t parent = comm->parent;
    if (host_comm_stopped(comm) || (parent != NULL && host_comm_stopped(parent)) || host_background_stopped())
        return aborted(comm);
    ncclResult_t result = check_peers(comm);
    if (result == ncclSuccess && parent != NULL)
        result = check_peers(parent);
    if (result == ncclSuccess)
        host_bell_wait(bell, seen, HOST_NAP_NS);
    return result;
}

ncclResult_t host_comm_hang(ncclComm_t comm, const char *what) {
    for (;;) {
        uint32_t seen = host_bell_look(&comm->quiet);
        ncclResult_t result = host_comm_nap(comm, &comm->quiet, seen);
        if (result != ncclSuccess)
            return host_fail(result, "rank %d was aborted while %s", comm->rank, what);
    }
}

/* ---- queries ------------------------------------------------------------------------------------- */

typedef enum { COUNT, DEVICE, RANK } query_t;

static ncclResult_t answer(const char *function, ncclComm_t comm, query_t query, int *out) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, function, comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, function);
    if (result == ncclSuccess && out == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the pointer for the answer is NULL", function);
    if (result == ncclSuccess)
        result = host_comm_ready(comm, function);
    if (result == ncclSuccess)
        *out = query == COUNT ? comm->ranks : query == DEVICE ? comm->device : comm->rank;
    return host_entry_end(&entry, result);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    return answer("ncclCommCount", comm, COUNT, count);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    return answer("ncclCommCuDevice", comm, DEVICE, device);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    return answer("ncclCommUserRank", comm, RANK, rank);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommGetAsyncError", comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, "ncclCommGetAsyncError");
    if (result == ncclSuccess && asyncError == NULL)
        result = host_fail(ncclInvalidArgument, "ncclCommGetAsyncError: the pointer for the answer is NULL");
    if (result == ncclSuccess)
        *asyncError = poll_state(comm);
    return host_entry_end(&entry, result);
}
