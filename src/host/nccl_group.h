/* Groups, what they hold and how they end; the calls that make communicators. A part of nccl.h, which
 * includes it.
 */
#ifndef PYNCCL_HOST_NCCL_GROUP_H
#define PYNCCL_HOST_NCCL_GROUP_H

#include "nccl.h"

/* ---- groups and jobs (nccl_group.c, nccl_job.c) -------------------------------------------------- */

typedef struct {
    void *buffer;
    size_t bytes;
    ncclWindow_t *out;
    int flags;
    uint32_t turn;
} host_window_job_t;

typedef struct host_job {
    struct host_job *next;
    ncclResult_t (*run)(struct host_job *job);
    /* In place of `run`, when the group failed before; `result` says how. */
    void (*undo)(struct host_job *job);
    ncclComm_t comm;
    const char *function;
    ncclResult_t result;
    bool ran;
    bool ends; /* a destroy or an abort, which makes the whole group a blocking one */
    pthread_t thread;
    struct host_crew *crew;
    /* what only some kinds of job need */
    ncclUniqueId id;
    uint64_t ids;
    ncclComm_t *out, parent;
    ncclConfig_t config;
    int color, key, ranks;
    uint32_t number;    /* of the child */
    uint64_t survivors; /* of a shrink */
    bool share;
    host_window_job_t window;
} host_job_t;

/* What one communicator does in a group. */
struct host_plan {
    struct host_plan *next;
    ncclComm_t comm;
    uint64_t hash;                       /* the clique's */
    host_task_t *collectives, *messages; /* in the order of the calls */
    host_task_t **last_collective, **last_message;
    host_rma_t *rma;   /* by context, and in the order of the calls there */
    CUstream *streams; /* distinct, in the order in which they were first seen */
    int stream_count;
    bool claimed; /* for the misuse detector */
};

int host_group_depth(void);
void host_group_start(void);
ncclResult_t host_group_end(void);
/* End the implicit group of a call whose own result is `result`: an error poisons the group around it. */
ncclResult_t host_group_close(ncclResult_t result);
ncclResult_t host_group_poison(ncclResult_t result);
/* Queue a copy of a job. Jobs of blocking and of non-blocking communicators do not mix. */
ncclResult_t host_group_add_job(const host_job_t *job);
ncclResult_t host_group_add_task(ncclComm_t comm, const host_task_t *task);
/* The group owns the operation, also on an error. */
ncclResult_t host_group_add_rma(ncclComm_t comm, host_rma_t *rma);

/* What an ended group holds, and how it is done (nccl_job.c). All of it is freed. */
typedef struct {
    host_job_t *jobs;
    host_plan_t *plans;
} host_batch_t;
ncclResult_t host_jobs_run(host_job_t *jobs);
/* On a thread of its own: the answer is ncclInProgress, and the communicators tell how it ends. */
ncclResult_t host_batch_run_behind(const host_batch_t *batch);
/* A group that failed before it began, or has failed. */
void host_batch_drop(host_batch_t *batch, ncclResult_t result);
/* Whether the calling thread runs a group in the background, and one of its communicators is stopped. */
bool host_background(void);
bool host_background_stopped(void);

/* The exchange by which a new communicator comes to life (nccl_init.c). `ids` is what all ranks must agree on
 * besides the id. */
ncclResult_t host_init_exchange(ncclComm_t comm, const ncclUniqueId *id, uint64_t ids);
/* The job that makes a communicator out of `id`. */
ncclResult_t host_init_run(host_job_t *job);
void host_init_undo(host_job_t *job);
/* The current device of a call that makes a communicator; and whether there can be such a rank. */
ncclResult_t host_init_device(const char *function, int *device);
ncclResult_t host_init_ranks(const char *function, int ranks, int rank);

/* Children (nccl_child.c). The number of a child is taken when the call is made; those of one parent come to
 * life one after the other. */
ncclResult_t host_child_turn(host_job_t *job);
void host_child_done(host_job_t *job);
/* Make the child of the calling rank and give it out. */
ncclResult_t host_child_make(host_job_t *job, int ranks, int rank, const ncclUniqueId *id);
/* Let go of a communicator that no kernel or call uses any more (nccl_end.c). */
void host_comm_detach(ncclComm_t comm);
/* The same for one that others of its clique in this process may still use: the last of them lets go of all.
 */
ncclResult_t host_comm_reclaim(ncclComm_t comm);

/* First contact, where the temper has it: blocks until the peers make the same calls (nccl_contact.c). */
ncclResult_t host_contact(host_plan_t *plans, bool with_messages);
ncclResult_t host_contact_one(ncclComm_t comm, const host_task_t *task);

#endif
