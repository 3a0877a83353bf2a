/* ncclCommSplit: every rank of the parent says its colour and key; those of one colour become a communicator.
 */
#include "nccl_group.h"

static host_note_t *note_of(host_clique_t *clique, int rank, uint32_t split) {
    return &host_segment_area(clique->head, rank)->note[split & 1];
}

/* Notes of split s are read by all before anybody can write those of split s + 2. */
static ncclResult_t tell_and_hear(ncclComm_t parent, host_clique_t *clique, uint32_t split, int color,
                                  int key) {
    host_note_t *own = note_of(clique, parent->rank, split);
    own->color = color;
    own->key = key;
    atomic_store(&own->told, split);
    host_clique_ring(clique, parent->rank);
    for (int rank = 0; rank < parent->ranks;) {
        uint32_t seen = host_bell_look(&parent->area->bell);
        if (atomic_load(&note_of(clique, rank, split)->told) == split) {
            rank++;
            continue;
        }
        ncclResult_t result = host_comm_nap(parent, &parent->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
    return ncclSuccess;
}

typedef struct {
    int ranks, rank, leader; /* the leader is a rank of the parent: the child's rank 0 */
} place_t;

/* By key, then by the parent's rank. */
static place_t find_place(ncclComm_t parent, host_clique_t *clique, uint32_t split) {
    const host_note_t *own = note_of(clique, parent->rank, split);
    place_t place = {.leader = parent->rank};
    int least = own->key;
    for (int rank = 0; rank < parent->ranks; rank++) {
        const host_note_t *note = note_of(clique, rank, split);
        if (note->color != own->color)
            continue;
        place.ranks++;
        if (note->key < own->key || (note->key == own->key && rank < parent->rank))
            place.rank++;
        if (note->key < least || (note->key == least && rank < place.leader)) {
            least = note->key;
            place.leader = rank;
        }
    }
    return place;
}

static ncclResult_t wait_for_id(ncclComm_t parent, host_clique_t *clique, int leader, uint32_t split,
                                ncclUniqueId *id) {
    host_note_t *note = note_of(clique, leader, split);
    for (;;) {
        uint32_t seen = host_bell_look(&parent->area->bell);
        if (atomic_load(&note->offered) == split) {
            *id = note->id;
            return ncclSuccess;
        }
        ncclResult_t result = host_comm_nap(parent, &parent->area->bell, seen);
        if (result != ncclSuccess)
            return result;
    }
}

static ncclResult_t make_id(ncclComm_t parent, host_clique_t *clique, uint32_t split, ncclUniqueId *id) {
    ncclResult_t result = host_segment_offer(id);
    if (result != ncclSuccess)
        return result;
    host_note_t *note = note_of(clique, parent->rank, split);
    note->id = *id;
    atomic_store(&note->offered, split);
    host_clique_ring(clique, parent->rank);
    return ncclSuccess;
}

static ncclResult_t split_off(host_job_t *job) {
    ncclComm_t parent = job->parent;
    host_clique_t *clique = atomic_load(&parent->clique);
    ncclResult_t result = tell_and_hear(parent, clique, job->number, job->color, job->key);
    if (result != ncclSuccess || job->color == NCCL_SPLIT_NOCOLOR)
        return result;
    place_t place = find_place(parent, clique, job->number);
    ncclUniqueId id;
    if (place.leader == parent->rank)
        result = make_id(parent, clique, job->number, &id);
    else
        result = wait_for_id(parent, clique, place.leader, job->number, &id);
    return result == ncclSuccess ? host_child_make(job, place.ranks, place.rank, &id) : result;
}

static ncclResult_t run_split(host_job_t *job) {
    ncclComm_t parent = job->parent;
    if (!host_comm_enter_call(parent)) {
        host_child_done(job);
        return host_fail(ncclInternalError, "ncclCommSplit: the parent is aborted");
    }
    ncclResult_t result = host_comm_fault(parent, "init", "ncclCommSplit");
    if (result == ncclSuccess)
        result = host_child_turn(job);
    if (result == ncclSuccess)
        result = split_off(job);
    host_child_done(job);
    host_comm_leave_call(parent);
    return result;
}

/* The communicator is pinned. */
static ncclResult_t queue_split(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                                const ncclConfig_t *config) {
    if (newcomm == NULL)
        return host_fail(ncclInvalidArgument, "ncclCommSplit: the pointer for the new communicator is NULL");
    ncclResult_t result = host_comm_ready(comm, "ncclCommSplit");
    if (result != ncclSuccess)
        return result;
    *newcomm = NULL;
    host_job_t job = {.run = run_split,
                      .undo = host_child_done,
                      .comm = comm,
                      .parent = comm,
                      .function = "ncclCommSplit",
                      .out = newcomm,
                      .color = color,
                      .key = key,
                      .share = comm->config.splitShare == 1 && !atomic_load(&comm->revoked)};
    result = host_config_inherit(config, &comm->config, &job.config);
    if (result != ncclSuccess)
        return result;
    job.number = ++comm->children;
    result = host_group_add_job(&job);
    if (result != ncclSuccess)
        host_child_done(&job);
    return result;
}

/* On a non-blocking parent it answers at once that all is well; the parent is polled. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommSplit", comm);
    entry.record.root = color;
    entry.record.count = (uint64_t)key;
    int device; /* it is the parent's that counts, but NCCL asks first whether there is one */
    if (result == ncclSuccess)
        result = host_init_device("ncclCommSplit", &device);
    if (result == ncclSuccess) {
        host_group_start();
        result = host_comm_pin(comm, "ncclCommSplit");
        if (result == ncclSuccess) {
            result = queue_split(comm, color, key, newcomm, config);
            host_comm_unpin(comm);
        }
        result = host_group_close(result);
    }
    return host_entry_end(&entry, result == ncclInProgress ? ncclSuccess : result);
}
