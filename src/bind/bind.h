/* The binding's engine room: what an operation, a communicator, a device and a waiter are, and who may touch
 * them. C with no Python: nothing here takes the GIL, and nothing here is called by a driver thread.
 *
 * Threads
 *   caller   any thread that issues (usually an event loop's): never waits in here
 *   lane     one a communicator, started on need: makes the native calls that may wait
 *   waiter   one for the process: polls events and async errors (completion.c)
 *   timer    one for the process: keeps the deadlines, makes no native call (deadline.c)
 *   helper   short-lived: one a running abort (control.c)
 *   free     one for the process, started on need: frees memory of ours (memory.c)
 *
 * Locks, in the order in which they may be taken together
 *   device->issue   one thread at a time launches on a device; held over native calls that cannot wait for
 *                   peers. A caller only ever tries it: where that fails, the call goes through the lane.
 *   comm->handle_lock   polling the async error against reclaiming the handle
 *   device->lock    all bookkeeping below; held for a few dozen instructions, never over a native call
 *
 * Life of an operation. The owner (a Work object) embeds it and must stay alive from pn_submit until the
 * operation has come out of pn_done_take: until then the device may use its buffers. It ends in two steps:
 * finished (the outcome is fixed, waiters are told) and released (the buffers are free; put on the done
 * list). After a success both come together. After a failure the release waits until the abort has returned.
 *
 * Failure wins: `state` is read under device->lock when an event is found complete; in a communicator that is
 * not PN_READY (or closing) no event counts as a success.
 */
#ifndef PYNCCL_BIND_H
#define PYNCCL_BIND_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "loader.h"

#define PN_IN_FLIGHT_LIMIT 128 /* a device's launch queue is about 1000 deep, and not ours alone */
#define PN_POLL_BATCH 32       /* pending operations of a communicator at which an issue polls them */
#define PN_DETAIL_BYTES 1024
#define PN_NO_DEADLINE INT64_MAX
#define PN_CONTROL ((uint64_t)1 << 63)
#define PN_SCRATCH_SLOTS 1024
#define PN_SCRATCH_BYTES 16

typedef enum {
    PN_ALL_REDUCE,
    PN_REDUCE,
    PN_BROADCAST,
    PN_ALL_GATHER,
    PN_REDUCE_SCATTER,
    PN_ALL_TO_ALL,
    PN_GATHER,
    PN_SCATTER,
    PN_SEND,
    PN_RECV,
    PN_BARRIER,
    PN_ALL_GATHER_V,
    PN_ALL_TO_ALL_V,
    PN_REDUCE_SCATTER_V,
    PN_GATHER_V,
    PN_SCATTER_V,
    PN_PUT,
    PN_SIGNAL,
    PN_WAIT_SIGNAL,
    PN_COLLECTIVES, /* how many kinds above reach the device */
    PN_INIT = PN_COLLECTIVES,
    PN_SPLIT,
    PN_CLOSE,
    PN_REGISTER,
    PN_DEREGISTER,
    PN_ABORT,
    PN_EVENT, /* awaiting a recorded event of any stream */
    PN_KINDS
} pn_kind_t;

/* Where an outcome comes from; `code` is then a CUresult, an ncclResult_t, or nothing. */
typedef enum {
    PN_OK,
    PN_FROM_NCCL,
    PN_FROM_CUDA,
    PN_FROM_DEADLINE,
    PN_FROM_ABORT,  /* this side aborted */
    PN_FROM_COMM,   /* another operation's failure took the communicator down: see comm->failure */
    PN_FROM_CLOSED, /* the communicator is closed or failed already; nothing was issued */
    PN_FROM_MISSING /* the library has no such function */
} pn_source_t;

typedef struct {
    pn_source_t source;
    int code;
    const char *function; /* the native call that failed, or NULL; static */
} pn_outcome_t;

typedef struct pn_link {
    struct pn_link *prev, *next; /* circular; an unlinked link points at itself */
} pn_link_t;

typedef struct pn_op pn_op_t;
typedef struct pn_comm pn_comm_t;
typedef struct pn_device pn_device_t;
typedef struct pn_group pn_group_t;
typedef struct pn_uneven pn_uneven_t; /* uneven.h */

/* ---- waiting for operations (op.c) ---------------------------------------------------------------- */

/* One a loop: finished waits are pushed by any thread, drained by the loop's thread only. */
typedef struct pn_mailbox {
    _Atomic(struct pn_wait *) head;
    atomic_int signalled; /* an eventfd write is under way or unread */
    int fd;
} pn_mailbox_t;

typedef struct pn_wait {
    struct pn_wait *next;
    pn_mailbox_t *box;
    void *token; /* the loop's; opaque here */
} pn_wait_t;

extern pn_wait_t pn_wait_closed;
#define PN_CLOSED (&pn_wait_closed)

/* ---- one operation ------------------------------------------------------------------------------- */

typedef struct pn_task {
    struct pn_task *next;
    void (*run)(struct pn_task *task, pn_comm_t *comm);
    void (*drop)(struct pn_task *task); /* instead of run; NULL for an operation, which has ended then */
} pn_task_t;

/* A stream's pending operations, oldest first. Only its oldest event is worth polling. */
typedef struct pn_track {
    pn_link_t ops;
    pn_link_t active; /* in device->tracks while `ops` is not empty */
    pn_link_t home;   /* in device->foreign, if the stream is not ours */
    pn_device_t *device;
    CUstream stream;
    unsigned long long id;
    int count;
    int awaited; /* operations in it on which somebody waits */
} pn_track_t;

struct pn_op {
    pn_task_t task; /* first: a lane's queue holds it */
    /* set by the owner before pn_submit */
    pn_comm_t *comm;
    void *owner;
    const void *send;
    void *recv;
    size_t count;
    int32_t datatype, redop, root;
    int32_t kind;
    size_t nbytes;
    CUstream stream;     /* the caller's, where has_stream; otherwise the communicator's own */
    int64_t deadline_ns; /* absolute CLOCK_MONOTONIC */
    bool has_stream;
    bool may_wait;                  /* a configuration, or anything else that forbids an inline call */
    const ncclCollConfig_t *config; /* of this call alone; NULL: the plain call. The owner's until the end */
    /* filled by submit and completion */
    bool awaited;
    bool in_lane;
    uint64_t reached; /* its number among the device's operations */
    uint64_t seq;
    int64_t issued_ns;
    int64_t ended_ns;
    CUevent event;         /* NULL: its group's last operation on the same stream carries the event */
    bool foreign_event;    /* the event is the caller's: not ours to recycle */
    CUevent timed[2];      /* begin and end, where the owner wants the duration; the owner's */
    CUevent from;          /* the hand-off event on the caller's stream, for a deferred call */
    struct pn_gate *gates; /* streams held back until it has run */
    bool gates_closed;     /* the releases are on the stream: no gate can be added any more */
    pn_track_t *track;
    pn_link_t in_track, in_comm;
    pn_link_t in_order;           /* in device->called until it is issued */
    _Atomic(pn_wait_t *) waiters; /* PN_CLOSED once the outcome is fixed */
    pn_outcome_t outcome;
    char *detail; /* malloc'd: NCCL's last-error text for this operation's own failure, or NULL */
    struct pn_op *next_done, *next_parting;
    pn_uneven_t *uneven; /* NULL: all blocks are of one size */
    void *argument;      /* of a control operation: see control.c; of a one-sided one a pn_one_sided_t */
};

/* ---- devices (device.c) --------------------------------------------------------------------------- */

typedef struct pn_gate {
    struct pn_gate *next;
    volatile uint32_t *word; /* pinned host memory that the device can read */
    CUdeviceptr address;
    uint32_t value; /* the wait is over once *word has reached it */
} pn_gate_t;

struct pn_device {
    pn_device_t *next;
    pn_engine_t *engine;
    int ordinal;
    CUdevice device;
    CUcontext context;
    bool has_memory_waits;
    pthread_mutex_t issue, lock;
    /* under lock */
    pn_link_t tracks; /* active ones */
    pn_link_t comms;
    pn_link_t foreign; /* tracks of streams that are not ours; idle ones serve again */
    CUevent *events;   /* idle ones */
    int event_count, event_room;
    pn_gate_t *gates;
    CUdeviceptr
        scratch; /* slots for barrier(): one allocation for the device's life, never freed under work */
    uint64_t scratch_used[PN_SCRATCH_SLOTS / 64];
    int in_flight;
    uint64_t issued_total; /* operations that have reached the device; each keeps its number */
    pn_link_t called;      /* operations of all communicators that are called and not issued, in call order */
    pn_comm_t *watcher;    /* stands for a communicator in waits for streams and events; made on first use */
    CUevent chain;         /* behind the last operation of an ordered communicator; under issue */
    int64_t next_deadline; /* see deadline.c */
    int awaited;
    int64_t awaited_since;
};

/* The device of an engine, made on first use; its primary context is retained for the process's life. */
pn_device_t *pn_device_get(pn_engine_t *engine, int ordinal, pn_outcome_t *why);
extern pn_device_t *_Atomic pn_devices; /* all of them, newest first; only ever grows */

/* The communicator's context made current and the thread's capture mode relaxed (so that our queries and
 * records do not break another thread's capture), and both put back. */
typedef struct {
    CUcontext context;
    CUstreamCaptureMode mode;
    bool changed;
} pn_enter_t;
CUresult pn_enter(pn_device_t *device, pn_enter_t *saved);
void pn_leave(pn_device_t *device, pn_enter_t *saved);
CUresult pn_event_take(pn_device_t *device, CUevent *event); /* entered; no lock held */
void pn_event_put(pn_device_t *device, CUevent event);       /* device->lock held */
/* Hold `stream` back until the operation has run, or has failed; it must not be closed to gates yet, and
 * answers CUDA_ERROR_NOT_READY if it is. Entered; no lock held. */
CUresult pn_gate_add(pn_op_t *op, CUstream stream);
/* Put the releases of an operation's gates on the stream on which it runs. Entered; no lock held. */
CUresult pn_gates_release(pn_op_t *op, CUstream stream);
void pn_gates_open(pn_op_t *op); /* release them from the host; device->lock held */
void pn_gates_put(pn_op_t *op);  /* device->lock held */
pn_track_t *pn_track_find(pn_device_t *device, CUstream stream, CUresult *why); /* entered; no lock held */
pn_track_t *
pn_track_alone(pn_device_t *device); /* one of its own, for an event of any stream; NULL: no memory */
void pn_track_start(pn_track_t *track, pn_device_t *device, CUstream stream, unsigned long long id);

/* ---- communicators (control.c, lane.c) ---------------------------------------------------------- */

typedef enum { PN_NEW, PN_READY, PN_CLOSING, PN_FAILED, PN_ABORTING, PN_GONE } pn_state_t;

#define PN_SIZE_CLASSES 64
#define PN_OPS 6 /* NCCL's five, and one for every user-made operator */

/* The ranks of one clique that live in this process. */
typedef struct pn_clique {
    struct pn_clique *next;
    uint64_t key;
    int members;
} pn_clique_t;

struct pn_comm {
    pn_device_t *device;
    int rank, size;
    ncclComm_t handle;
    pthread_mutex_t handle_lock;
    CUstream stream;
    CUstream aside; /* where producers order themselves while operations are deferred; made on first use */
    pn_track_t track;
    bool ordered;     /* chained with the device's other ordered communicators, in issue order */
    void *scratch;    /* device memory for barrier() */
    int64_t *numbers; /* pinned memory for counts that are asked for; made on first use */
    int scratch_slot;
    pn_clique_t *clique;
    /* under device->lock */
    _Atomic pn_state_t state; /* read without it too: what it says happened before, such as `failure` */
    int references;    /* the Python handle, the lane, a running abort, a group; at 0 the waiter frees it */
    int inside;        /* threads of ours inside a native call on it */
    uint64_t seq;      /* operations called */
    uint64_t controls; /* management calls; their numbers lie apart, above PN_CONTROL */
    uint64_t splits;
    pn_link_t in_device;
    pn_link_t pending; /* unfinished operations, in call order */
    pn_link_t limbo;   /* failed ones whose buffers wait for the abort */
    pn_link_t registrations, operators;
    pn_task_t *queue_head, *queue_tail;
    bool lane_started, lane_busy, lane_stop;
    pthread_cond_t lane_wake;
    int64_t next_error_poll, error_period;
    pn_outcome_t failure;
    uint64_t culprit; /* the seq of the operation that failed first; 0: none of ours */
    int32_t culprit_kind;
    int64_t failed_ns;
    char detail[PN_DETAIL_BYTES];
    uint64_t contacted[PN_COLLECTIVES][PN_OPS][ncclNumTypes]; /* bit = log2 of the size */
    uint8_t *met;                                             /* per peer: 1 sent to, 2 received from */
};

/* The handle, also while another thread's init is about to publish it. */
static inline ncclComm_t pn_handle(pn_comm_t *comm) {
    return __atomic_load_n(&comm->handle, __ATOMIC_ACQUIRE);
}

pn_comm_t *pn_comm_new(pn_device_t *device, int rank, int size);
void pn_comm_set_size(pn_comm_t *comm, int rank, int size);
/* The stream and the scratch slot, made and given back off the loop. Entered. */
CUresult pn_comm_equip(pn_comm_t *comm);
void pn_comm_strip(pn_comm_t *comm);
void pn_comm_join_clique(pn_comm_t *comm, uint64_t key);
/* The end of a communicator whose handle is gone: state, buffers in limbo, stream, lane. No lock held. */
void pn_comm_gone(pn_comm_t *comm);
void pn_comm_drop(pn_comm_t *comm); /* the user's reference; aborts off-thread if it is still open */
/* Take an unfinished operation out of the pending list; false if somebody has, who then finishes it.
 * device->lock held. */
bool pn_take_pending(pn_op_t *op);
/* A group in the lanes lets go of an operation that has failed meanwhile. device->lock held; true: to be
 * released. */
bool pn_let_go(pn_op_t *op);
/* Fail every unfinished operation: the culprit (by its number; 0 for none) with `why` itself, the others with
 * PN_FROM_COMM. The first failure stays. False, and nothing happens, if the culprit has ended meanwhile. */
bool pn_comm_fail(pn_comm_t *comm, uint64_t culprit, pn_outcome_t why, pn_state_t state, const char *detail);
/* Fail what is pending now; then, on a helper thread, raise every abort flag in one native group, wait at
 * most `bound_ns` for threads inside a call, and reclaim. Finishes `op` (or NULL): PN_OK, or PN_FROM_ABORT or
 * PN_FROM_DEADLINE if the handles had to be abandoned. */
void pn_abort(pn_comm_t *const *comms, int count, pn_op_t *op, int64_t bound_ns);
/* What aborts have not got rid of within their bounds: communicators, and threads that are inside a call. */
void pn_abort_overdue(long *communicators, long *threads);
void pn_lane_push(pn_comm_t *comm, pn_task_t *task); /* device->lock held */
void pn_comm_hold(pn_comm_t *comm);
void pn_comm_release(pn_comm_t *comm); /* one reference; no lock held */
void pn_comm_free(pn_comm_t *comm);    /* the waiter's */

/* What a control operation needs and gives. */
typedef struct {
    ncclUniqueId id;
    int color, key;
    ncclConfig_t *config; /* NULL: the library's defaults */
    pn_comm_t *child;     /* made by the caller of a split; its rank and size are filled on success */
    bool member;          /* a split gave this rank a communicator */
} pn_control_t;
void pn_control_submit(pn_op_t *op); /* PN_INIT to PN_DEREGISTER: through the lane, in call order */
/* The pieces of such an operation. Wait until what is on the device now has ended (own_only: what is pending
 * in the communicator), or until the communicator has failed: then false. */
bool pn_drained(pn_comm_t *comm, bool own_only);
/* Alone inside the communicator; false if it is not open. Until pn_come_out no abort releases the operation:
 * it is touched between the two only. */
bool pn_go_inside(pn_comm_t *comm);
void pn_come_out(pn_comm_t *comm);
/* The end of one that leaves the communicator as it is, unless a failure was quicker. */
void pn_end_control(pn_op_t *op, pn_outcome_t why, const char *detail);

/* Whether an operation that was issued up to `number` is still on the device. device->lock held. */
bool pn_has_older(pn_device_t *device, uint64_t number);

/* ---- issuing (issue.c, group.c) ------------------------------------------------------------------- */

/* Issue, inline or through the lane. Always accepts the operation: what goes wrong is its outcome. Returns
 * false if it was refused before any native call because the communicator is not open. */
bool pn_submit(pn_op_t *op);
/* Before pn_submit: make the operation wait for what is now on the producer's stream. */
CUresult pn_hand_off(pn_op_t *op, CUstream producer);
/* Have what comes later on one stream run behind what is now on another. */
CUresult pn_order_streams(pn_device_t *device, CUstream first, CUstream later);
/* The stream that a producer is to order itself before: the communicator's own, or, while operations are
 * still to be issued, one aside. On its own stream they would come behind the producer, which may wait for
 * them. */
CUresult pn_told_stream(pn_comm_t *comm, CUstream *stream);
CUresult pn_aside(pn_comm_t *comm, CUstream *stream);
/* Issue several as one native group. The operations may belong to several communicators. */
bool pn_submit_group(pn_op_t **ops, int count);
/* The native call for one operation on a stream: NCCL's result, the function's name in *function. */
ncclResult_t pn_call(pn_op_t *op, CUstream stream, const char **function);
/* What the native call leaves behind, for one operation: shared by issue.c and group.c. */
CUresult pn_prepare_deferred(pn_op_t *op); /* the hand-off and the gate on the caller's stream; entered */
bool pn_enlist(pn_op_t *op);               /* seq and pending list; device->lock held; false: not open */
void pn_refuse(pn_op_t *op);               /* finish and release one that was never issued */
void pn_back_pressure(pn_comm_t *comm);    /* lanes only: wait until the device has room */
/* The stream on which it runs and that stream's track; waits for the hand-off. Entered. */
CUresult pn_choose_stream(pn_op_t *op, CUstream *stream, pn_track_t **track);
/* Around the call: the chain of ordered communicators, and the events of a timed operation. Entered. */
CUresult pn_before_call(pn_op_t *op, CUstream stream);
CUresult pn_after_call(pn_op_t *op, CUstream stream);
/* Whether nothing that was called before it, by another clique on the device, is still to be issued: NCCL
 * wants one order of all communicators of a device on all ranks, and the order of the calls is the only one
 * that the caller knows. Ranks of its own clique are let by: it may be for them that they wait. device->lock
 * held. */
bool pn_its_turn(const pn_op_t *op);
size_t pn_element_bytes(int datatype);
/* After the call: `event` was recorded behind it on `track`, or is NULL (its group's carries it). */
void pn_issued(pn_op_t *op, pn_track_t *track, CUevent event);
void pn_not_issued(pn_op_t *op, pn_outcome_t why, const char *detail); /* the call failed */
bool pn_harmless(pn_outcome_t why);    /* after which the communicator is as it was */
extern bool pn_launch_blocking;        /* CUDA_LAUNCH_BLOCKING: every launch waits, so nothing is inline */
bool pn_contacted(const pn_op_t *op);  /* device->lock held */
void pn_mark_contacted(pn_op_t *op);   /* device->lock held */
void pn_repair_depth(pn_comm_t *comm); /* after a failed call outside a group: semantics of leaked depth */
extern _Atomic long pn_depth_repairs;

/* ---- completion (op.c, track.c, completion.c, deadline.c) ----------------------------------------- */

void pn_op_start(pn_op_t *op); /* a fresh operation: links and waiters */
static inline bool pn_op_finished(pn_op_t *op) {
    return atomic_load_explicit(&op->waiters, memory_order_acquire) == PN_CLOSED;
}
/* Fix the outcome and tell the waiters. Its links are already undone. No lock held. */
void pn_op_finish(pn_op_t *op, pn_outcome_t outcome);
void pn_op_finish_at(pn_op_t *op, pn_outcome_t outcome, int64_t now);
void pn_op_release(pn_op_t *op); /* its buffers are free: onto the done list */
void pn_op_give(pn_op_t *op);    /* onto the done list, for what was never started */
pn_op_t *pn_done_take(void);     /* the whole done list, oldest first; chained by next_done */
/* Operations whose communicator has failed, and which stay for their buffers' sake: their owners must let go
 * of the communicator, so that it can be dropped and aborted. Taken after the done list, each still has its
 * owner. */
void pn_op_part(pn_op_t *op);
pn_op_t *pn_parting_take(void); /* chained by next_parting */
bool pn_done_some(void);        /* or pn_asking_some, or such operations */
/* Add a wait; false if the operation has finished. */
bool pn_op_wait(pn_op_t *op, pn_wait_t *wait);
/* Wait for what is now on a stream, or for an event that the caller has recorded and keeps. op->comm need not
 * be set; `track` (for an event) is the caller's, and lives as long as the operation. A deadline or an error
 * ends that wait alone. */
CUresult pn_watch_stream(pn_op_t *op, pn_device_t *device, CUstream stream);
CUresult pn_watch_event(pn_op_t *op, pn_device_t *device, CUevent event);
/* Ask the device now, and complete what has ended; true if `op` has finished. Makes native calls. */
bool pn_op_poll(pn_op_t *op);
bool pn_op_spin(pn_op_t *op, int64_t budget_ns);      /* poll until finished or the budget is spent */
bool pn_op_block(pn_op_t *op, int64_t until_ns);      /* for threads without a loop */
CUresult pn_op_order(pn_op_t *op, CUstream stream);   /* stream waits for op, with no host wait */
void pn_op_recycle(pn_op_t *op);                      /* its event, hand-off and gate */
void pn_track_append(pn_track_t *track, pn_op_t *op); /* device->lock held */
void pn_track_leave(pn_op_t *op, int64_t now);        /* out of its track; device->lock held */
void pn_op_put_back(pn_op_t *op);                     /* as pn_op_recycle, with device->lock held */
void pn_track_poll(pn_track_t *track);                /* no lock held */
/* The end of one operation that takes no communicator with it: a wait for a stream or an event. */
void pn_end_alone(pn_comm_t *watcher, uint64_t seq, pn_outcome_t why);
void pn_deadline_set(pn_device_t *device, int64_t deadline_ns); /* a new one; device->lock held */
void pn_waiter_ring(bool now); /* something is pending; `now`: somebody waits */
/* Fairness: awaits of finished work come in bursts, and after so many of them, or so much time, the task has
 * to give way to its loop. The first burst that ends asks for a call of pn_burst_turn when the loop has come
 * round; until then other tasks' bursts are shorter, so that a hundred of them do not add up. All of this
 * thread. */
typedef enum { PN_BURST_GOES_ON, PN_BURST_ENDS, PN_BURST_ENDS_TURN } pn_burst_t;
pn_burst_t pn_burst_await(int64_t now);
void pn_burst_reset(void); /* the task gives way for another reason */
void pn_burst_turn(void);
/* An await may poll for a while before it suspends, but not while others of its loop are suspended already: a
 * thousand of them would hold the loop up one after another. */
void pn_suspended(int change);
bool pn_may_spin(void);
pn_mailbox_t *pn_mailbox_new(void);
pn_wait_t *pn_mailbox_take(pn_mailbox_t *box); /* resets the signal, then takes all, oldest first */
void pn_mailbox_free(pn_mailbox_t *box);
bool pn_done_nudge(int64_t now); /* the waiter's: wake the reaper for what has lain too long */
/* Block until finished operations have lain undrained for a while, or pn_reaper_stop; false to stop. */
bool pn_reaper_wait(void);
void pn_reaper_stop(void);
void pn_reaper_call(void); /* for what cannot wait until somebody drains */

static inline void pn_link_init(pn_link_t *link) {
    link->prev = link->next = link;
}
static inline bool pn_link_empty(const pn_link_t *link) {
    return link->next == link;
}
static inline void pn_link_append(pn_link_t *list, pn_link_t *link) {
    link->prev = list->prev;
    link->next = list;
    list->prev->next = link;
    list->prev = link;
}
static inline void pn_link_remove(pn_link_t *link) {
    link->prev->next = link->next;
    link->next->prev = link->prev;
    pn_link_init(link);
}
#define PN_OWNER(link, type, member) ((type *)((char *)(link) - offsetof(type, member)))

int64_t pn_now_ns(void);

/* ---- counts of live objects, and of what was given up (live.c) --------------------------------------- */

typedef struct {
    long operations, communicators, streams, events, gates, lanes, helpers, mailboxes;
    long memory, registrations, operators; /* memory: allocations */
    long abandoned_communicators, stuck_threads;
} pn_live_t;
typedef struct {
    _Atomic long operations, communicators, streams, events, gates, lanes, helpers, mailboxes;
    _Atomic long memory, registrations, operators;
    _Atomic long abandoned; /* handles that the library refused to let go of */
} pn_counts_t;
extern pn_counts_t pn_counts;
extern atomic_bool pn_forked; /* this process is a child of the one that used the engine */
void pn_live_read(pn_live_t *live);
void pn_live_watch_fork(void);

#endif
