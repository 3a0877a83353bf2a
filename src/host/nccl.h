/* Inside the NCCL room: communicators, what ranks share, and the way from a call to a kernel.
 *
 *   nccl_library.c     texts, memory, encryption; entry and exit of every exported call
 *   nccl_version.c     the release that is imitated, and what it does not have
 *   nccl_param.c       the table of parameters
 *   nccl_device.c      the host side of the device API: what a system without support answers
 *   nccl_call.c        collectives and point to point: argument checks
 *   nccl_selection.c   ncclCollConfig_t and its selections of algorithms
 *   nccl_group.c       the thread-local group machine
 *   nccl_job.c         what the end of a group does: jobs on threads, and groups in the background
 *   nccl_launch.c      from the tasks of a group to kernels on streams
 *   nccl_contact.c     the first use of a function or a peer
 *   nccl_capture.c     operations on streams that are being captured
 *   nccl_kernel.c      what every kernel does around its own work: turn, faults, abort
 *   nccl_collective.c  eight collectives as one state machine: arrivals, data through shared memory
 *   nccl_direct.c      the same on buffers that all ranks can reach
 *   nccl_way.c         which way large data take between processes
 *   nccl_offer.c nccl_attach.c            reaching them: shared memory; ordinary memory
 *   nccl_message.c     send and receive
 *   nccl_window.c nccl_rma.c   windows, and one-sided operations on them (nccl_window.h)
 *   nccl_fault.c       injected faults, as a call feels them
 *   nccl_report.c      a mismatch between ranks, in words
 *   nccl_misuse.c      what the misuse detector looks for
 *   nccl_init.c nccl_end.c                communicators are born, and go
 *   nccl_child.c nccl_split.c nccl_shrink.c nccl_grow.c   others are made from them
 *   nccl_revoke.c nccl_suspend.c          they are stopped, or put aside, and live on
 *   nccl_comm.c        handles, state, queries
 *   nccl_stop.c        operations are cut off; barriers between ranks
 *   nccl_config.c nccl_operator.c         ncclConfig_t; user-defined operators
 *   nccl_clique.c      the ranks of one communicator that live in this process; watching the others
 *   nccl_segment.c     the shared memory itself, unique ids
 */
#ifndef PYNCCL_HOST_NCCL_H
#define PYNCCL_HOST_NCCL_H

#include "nccl_shared.h"

#define HOST_NAP_NS (50 * 1000 * 1000)

typedef struct host_plan host_plan_t; /* nccl_group.h */
typedef struct host_kernel host_kernel_t;

#define host_fail(code, ...) (host_last_error(__VA_ARGS__), (code))

/* ---- functions ----------------------------------------------------------------------------------- */

/* A collective is: who gives (all ranks or the root), whether one block or one block for each rank; who takes
 * (all or the root), from whom (all or the root), and whether what is taken is reduced or placed side by
 * side. Nothing else tells the eight apart. */
typedef struct {
    const char *name;
    bool rooted, root_gives, spread, root_takes, from_root, reduces;
} host_shape_t;
extern const host_shape_t host_shapes[HOST_FUNCTIONS];

#define HOST_USER_OP ((ncclRedOp_t)ncclNumOps) /* how a user-defined operator looks to the other ranks */

/* One call of a user, checked and resolved. */
typedef struct host_task {
    struct host_task *next;
    host_function_t function;
    ncclDataType_t type;
    ncclRedOp_t op; /* built in, or HOST_USER_OP */
    int root;       /* of a message: the peer */
    size_t count;
    const void *send;
    void *recv;
    CUstream stream;
    bool scaled;        /* each input is multiplied before it is summed */
    bool divided;       /* the sum is divided by the number of ranks */
    const void *scalar; /* where the factor lies when the kernel runs; NULL: in `factor` */
    uint64_t factor;    /* one element, in its first bytes */
    /* what a ncclCollConfig_t says */
    const char *selection; /* of algorithms; only until it was checked */
    bool forced;           /* a selection that cannot be followed is an error */
    bool unavailable;      /* the selection names what this engine stands for a system without */
    CUevent launched;      /* recorded at the launch, or NULL */
} host_task_t;

/* The same for a one-sided operation: HOST_WAIT_SIGNAL waits for a list of signals, HOST_PUT moves data, and
 * it and HOST_SIGNAL give a signal. */
typedef enum { HOST_PUT, HOST_SIGNAL, HOST_WAIT_SIGNAL } host_rma_kind_t;
typedef struct host_rma {
    struct host_rma *next;
    host_rma_kind_t kind;
    int peer, index, context;
    const void *source;
    size_t bytes, offset; /* in the peer's window */
    ncclWindow_t window;  /* held */
    CUstream stream;
    int waits;
    struct {
        int peer, index;
        uint64_t count;
    } wait[];
} host_rma_t;

/* ---- cliques (nccl_clique.c) --------------------------------------------------------------------- */

/* The ranks of one communicator in this process: they share a mapping and go together. */
typedef struct host_clique {
    struct host_clique *next;
    uint8_t secret[16];
    uint64_t hash; /* equal on all ranks: the order of communicators in a group */
    host_head_t *head;
    int ranks;
    _Atomic int refs; /* members, and kernels that have started */
    struct ncclComm *members;
    int joined, leaving;
    _Atomic int64_t next_look;
    _Atomic uint64_t dead; /* the ranks whose processes are gone, one bit a rank */
    _Atomic bool together; /* all ranks are in this process */
    bool crowded;          /* there are more ranks than cores */
    _Atomic int attach;    /* host_attach_t: what is known of attaching to the processes of its ranks */
    pthread_mutex_t mappings_lock;
    struct host_mapping *mappings[HOST_MAX_RANKS]; /* by rank and offer; NULL until they are needed */
    uint32_t withdrawn[HOST_MAX_RANKS];            /* of each rank, as the mappings know it */
    int watched;
    struct {
        pid_t pid;
        uint64_t start;
        int descriptor; /* a pidfd, or -1 on kernels that have none */
    } watch[HOST_MAX_RANKS];
} host_clique_t;

ncclResult_t host_clique_join(struct ncclComm *comm, const ncclUniqueId *unique);
void host_clique_hold(host_clique_t *clique);
void host_clique_release(host_clique_t *clique);
/* Count one more member as leaving; true for the last of them, who then owns the whole list. */
bool host_clique_leave(struct ncclComm *comm, struct ncclComm **all);
void host_clique_ring(host_clique_t *clique, int except);
void host_clique_call(host_clique_t *clique, int except); /* host_bell_call for each */
/* Begin to watch the processes of the ranks that have come; then, at most every 50 ms, look after them. */
void host_clique_meet(host_clique_t *clique);
void host_clique_watch(host_clique_t *clique);

/* ---- buffers of other ranks (nccl_offer.c) --------------------------------------------------------- */

/* Where a rank's buffer is: in this process, or `far`, and then only the copies of nccl_attach.c get there.
 */
typedef struct {
    unsigned char *at;
    bool far;
} host_place_t;
/* Make it reachable for all ranks, with `attach` also in ordinary memory; false if that cannot be. */
bool host_expose(ncclComm_t comm, const void *pointer, size_t bytes, bool attach, host_exposure_t *exposure);
/* Where another rank's buffer is; false if it cannot be mapped. */
bool host_reach(host_clique_t *clique, int rank, const host_exposure_t *exposure, host_place_t *place);
void host_offers_retire(ncclComm_t comm, uint64_t serial); /* the allocation is no more */
void host_mappings_drop(host_clique_t *clique, bool all);  /* or only what was withdrawn */
/* Others' buffers are touched only between these two; false: one of them is closed. */
bool host_visit_begin(ncclComm_t comm, host_clique_t *clique);
void host_visit_end(ncclComm_t comm);
/* From now on nobody touches this rank's buffers; returns when nobody does. */
void host_visitors_turn_out(ncclComm_t comm);

/* ---- ordinary memory of other processes (nccl_attach.c) -------------------------------------------- */

typedef enum { HOST_ATTACH_UNKNOWN, HOST_ATTACH_ALLOWED, HOST_ATTACH_DENIED } host_attach_t;
/* Whether this process may read and write the memory of all the others. The first call tries it. */
bool host_attach_allowed(host_clique_t *clique);
/* They do without from now on: one of them may not. */
void host_attach_deny(host_clique_t *clique);
/* Copy a slice between this rank and another, one of them far or neither; false: it cannot be, and the kernel
 * is stuck. */
bool host_copy_between(host_kernel_t *kernel, int rank, host_place_t to, host_place_t from, size_t bytes);
/* Such slices: an abort waits for one. */
#define HOST_SLICE_BYTES ((size_t)256 * 1024)
#define HOST_FAR_SLICE_BYTES ((size_t)1024 * 1024)
/* A copy by the kernel is worth its system call from this size on. */
#define HOST_ATTACH_BYTES ((size_t)256 * 1024)
/* From this size on, results are stored past the caches. */
#define HOST_PAST_CACHES_BYTES ((size_t)4 * 1024 * 1024)

/* ---- ways between processes (nccl_way.c) ----------------------------------------------------------- */

/* Whether so many bytes may go by attaching. */
bool host_way_attaches(host_clique_t *clique, size_t bytes);

typedef struct {
    float cost;  /* ns a byte, 0: not measured */
    float since; /* the same, of all operations since it was tried last */
    bool tried;
    int noted; /* measurements of the last trial */
} host_estimate_t;

/* Of one function and magnitude; what is not `odd` only rank 0 uses. */
typedef struct {
    bool odd; /* which of the two words the next operation reads */
    host_way_t last, trial;
    int left; /* operations of the trial to be decided */
    host_estimate_t estimates[HOST_WAYS];
} host_ways_t;

/* ---- communicators (nccl_comm.c) ----------------------------------------------------------------- */

#define HOST_COMM_MAGIC 0x636f6d6d756e6963ull
#define HOST_COMM_DEAD 0xdeadc0de636f6d6dull

/* Operations run one after the other in the order of their tickets. Communicators that share resources
 * (splitShare) share this too, and are aborted together. */
typedef struct {
    _Atomic int refs;
    _Atomic uint64_t issued, turn;
    host_bell_t bell;
    pthread_mutex_t lock;
    struct ncclComm *members;
} host_order_t;

typedef struct host_operator {
    bool used;
    ncclDataType_t type;
    const void *scalar;
    uint64_t factor;
} host_operator_t;

/* A handle's memory is kept for a while after it is freed, with the magic of the dead, so that a late use is
 * refused instead of read from somebody else's memory. */
struct ncclComm {
    _Atomic uint64_t magic;
    _Atomic int refs; /* the handle, kernels, calls that wait */
    struct ncclComm *next_dead, *next_member, *next_family;
    int rank, ranks, device;
    _Atomic(host_clique_t *) clique;
    host_area_t *area;
    host_order_t *order;
    _Atomic int state;        /* ncclResult_t: in progress until init is done, then the asynchronous error */
    _Atomic int64_t polls;    /* by an injected fault: how many more polls say that it is in progress */
    _Atomic uint32_t stop;    /* raised by abort */
    _Atomic uint32_t running; /* steps that may touch shared memory or a user's buffer */
    _Atomic uint32_t callers; /* threads inside a call that waits */
    _Atomic int32_t inside;   /* the misuse detector's: the thread that is inside a call */
    host_bell_t quiet;        /* rung when one of these two may have become 0, and by abort */
    _Atomic uint32_t background; /* groups that run in the background and have it */
    _Atomic uint32_t kernels;    /* launched and not released yet */
    _Atomic uint64_t needed;     /* the ranks whose death ends a wait, one bit a rank */
    struct ncclComm *parent;     /* while it is being made: the parent's abort ends it too */
    _Atomic uint32_t graphs;     /* nodes of live graphs that are its operations */
    bool finalize_called, finalized, suspended;
    _Atomic bool revoked;
    _Atomic bool torn;           /* an operation was cut off half-way, so that ranks may be out of step */
    _Atomic bool aborted;        /* by ncclCommAbort: `stop` stays raised */
    _Atomic bool reclaim_queued; /* destroyed or aborted, if the group it was done in does not fail */
    uint32_t arrival;            /* of the last chunk; only the kernel whose turn it is counts on */
    uint64_t sequence;           /* collectives launched */
    uint32_t children, barriers; /* made by split or grow, or failed to be; barriers it has come to */
    uint32_t id_for;             /* the child for which ncclCommGetUniqueId has given an id */
    _Atomic uint32_t born;       /* of those, how many are done with */
    host_ways_t ways[HOST_COLLECTIVES][HOST_MAGNITUDES];
    uint32_t next_offer; /* to be given up when the table is full, */
    uint64_t offered;    /* but not these, which the kernel under way uses; one bit each */
    uint32_t sent[HOST_MAX_RANKS], received[HOST_MAX_RANKS]; /* messages launched, by peer */
    bool connected[HOST_COLLECTIVES], met[HOST_MAX_RANKS];
    host_operator_t *operators;
    int operator_count;
    ncclConfig_t config;
    ncclWindow_t windows;
    struct host_signals *signals;
    uint32_t window_calls;        /* registrations queued */
    _Atomic uint32_t window_turn; /* which of them is next */
    uint32_t posts;               /* exchanges of windows so far */
};

ncclComm_t host_comm_new(int ranks, int rank, int device, const ncclConfig_t *config, ncclComm_t share);
void host_comm_hold(ncclComm_t comm);
void host_comm_release(ncclComm_t comm);
ncclResult_t host_comm_check(ncclComm_t comm, const char *function);
/* The gate in front of almost every call: in progress is an invalid argument, an error is returned again. */
ncclResult_t host_comm_ready(ncclComm_t comm, const char *function);
/* The first error stays. The text is the caller's business. */
void host_comm_set_state(ncclComm_t comm, ncclResult_t error);
ncclResult_t host_comm_state(ncclComm_t comm);
/* The gate in front of operations: ready, and neither revoked, finalized nor suspended. */
ncclResult_t host_comm_usable(ncclComm_t comm, const char *function);
/* What a call answers that is about to return: in progress, where a fault makes it look so; on a non-blocking
 * communicator, which keeps an error for good, its state. */
ncclResult_t host_comm_progress(ncclComm_t comm, ncclResult_t result);
/* A failure on a non-blocking communicator becomes its state; a blocking one stays as it is. */
void host_comm_spoil(ncclComm_t comm, ncclResult_t result);
/* Raise the abort flag of the communicator and of all that share its resources; nobody is waited for. */
void host_comm_stop(ncclComm_t comm);
/* Wait until what was launched on a stopped communicator, and on those that share its resources, has ended;
 * then let them go on. An error: it is being aborted meanwhile, and stays stopped. */
ncclResult_t host_comm_cut(ncclComm_t comm);
/* Kernels and queries touch shared memory between these two; false: stopped, and there is nothing to end. */
bool host_comm_begin(ncclComm_t comm);
void host_comm_end(ncclComm_t comm);
/* Wait until nobody is between the two, nor inside a call that waits, nor in the background. The communicator
 * is stopped. */
void host_comm_settle(ncclComm_t comm);
bool host_comm_used(ncclComm_t comm); /* somebody is between the two, or inside a call */
/* Wait until no group has it in the background; its state is final then, unless a call is running. */
void host_comm_await_background(ncclComm_t comm);
/* Wait until all ranks have come to as many barriers. */
ncclResult_t host_comm_barrier(ncclComm_t comm);
static inline bool host_comm_stopped(const struct ncclComm *comm) {
    return atomic_load_explicit(&comm->stop, memory_order_seq_cst) != 0;
}
/* A call that is short stays inside between these two, so that an abort by another thread waits for its end.
 * Not to be released by who did not get success. */
ncclResult_t host_comm_pin(ncclComm_t comm, const char *function);
void host_comm_unpin(ncclComm_t comm);
/* A call that will wait: false if the communicator is being aborted already. */
bool host_comm_enter_call(ncclComm_t comm);
void host_comm_leave_call(ncclComm_t comm);
/* One nap of such a call on a bell; an error is the reason to wait no longer. */
ncclResult_t host_comm_nap(ncclComm_t comm, host_bell_t *bell, uint32_t seen);
/* Wait until it is aborted. */
ncclResult_t host_comm_hang(ncclComm_t comm, const char *what);

/* Take a fault at a site inside a call: delays, kills and sticks here; an error is the call's (nccl_fault.c).
 */
ncclResult_t host_comm_fault(ncclComm_t comm, const char *site, const char *function);
/* The same at the door of an exported function, which may have no communicator. */
ncclResult_t host_call_fault(const char *function, ncclComm_t comm);
/* At the sites "abort" and "destroy", where nothing but time ends what is stuck. */
ncclResult_t host_reclaim_fault(ncclComm_t comm, const char *site, const char *function);
_Noreturn void host_process_kill(void);

ncclResult_t host_config_parse(const ncclConfig_t *given, ncclConfig_t *config);
/* The configuration of a child: parsed from what is given, or the parent's. */
ncclResult_t host_config_inherit(const ncclConfig_t *given, const ncclConfig_t *parent, ncclConfig_t *config);
ncclResult_t host_operator_resolve(ncclComm_t comm, host_task_t *task, const char *function);
/* What a call's config says goes into the task; its selection is checked when the rest of the call was. */
ncclResult_t host_coll_config_parse(const char *function, const ncclCollConfig_t *given, host_task_t *task);
ncclResult_t host_selection_check(const char *function, host_task_t *task);

/* ---- launching (nccl_launch.c, nccl_kernel.c) ---------------------------------------------------- */

struct host_kernel {
    host_work_t work; /* first: the stream's view of it */
    ncclComm_t comm;
    host_progress_t (*advance)(host_kernel_t *kernel);
    void (*drop)(host_kernel_t *kernel);   /* what it owns besides itself; may be NULL */
    void (*linger)(host_kernel_t *kernel); /* every 50 ms that it is blocked; may be NULL */
    const char *name;
    uint64_t ticket;
    host_clique_t *clique; /* held from the first step to the release */
    bool solo;             /* needs no turn: a communicator of one rank */
    bool off_device;       /* copy engines and waiting streams take no place on the device */
    bool started;
    bool stuck; /* until aborted */
    bool on_device;
    bool exposed;       /* other ranks may touch its buffers */
    uint32_t looks;     /* blocked steps */
    int64_t not_before; /* by an injected delay */
    int64_t next_look;
};

ncclResult_t host_launch_one(ncclComm_t comm, const host_task_t *task);
/* Record the event that the call's config names, if any. */
ncclResult_t host_launch_event(const host_task_t *task, CUstream stream);
/* Sorts the plans too: communicators in the order of their hash, which is the same on all ranks. */
ncclResult_t host_launch_group(host_plan_t **plans);
/* All but the launch; *microseconds is written if there is a collective to estimate. */
ncclResult_t host_launch_simulated(host_plan_t **plans, float *microseconds);
/* Give a kernel its turn, after all that was launched before: the next thing is to put it on a stream. */
void host_kernel_prepare(host_kernel_t *kernel, ncclComm_t comm);
/* Both; on an error it is freed. */
ncclResult_t host_kernel_submit(host_kernel_t *kernel, ncclComm_t comm, CUstream stream);
host_kernel_t *host_collective_new(ncclComm_t comm, const host_task_t *task);
host_kernel_t *host_solo_new(const host_task_t *task);
/* Whether a kernel may touch so many bytes there; false is an illegal address. */
bool host_kernel_may_touch(int device, const void *pointer, size_t bytes);
ncclResult_t host_message_check(const host_plan_t *plan);
host_kernel_t *host_message_new(ncclComm_t comm, const host_task_t *tasks);
/* It takes the list over; NULL leaves it. */
host_kernel_t *host_rma_new(host_rma_t *list);
void host_rma_free(host_rma_t *list);
/* With rmaEagerInit a communicator has its signals from the beginning. */
ncclResult_t host_rma_begin(ncclComm_t comm);
void host_windows_free(ncclComm_t comm);

/* ---- captured operations (nccl_capture.c) -------------------------------------------------------- */

/* A collective, or the messages of a group, on a stream that is being captured. */
ncclResult_t host_capture_tasks(ncclComm_t comm, const host_task_t *tasks, CUstream stream);
/* Until no graph is left that holds one, or, if asked, the communicator is stopped. */
void host_graphs_wait(ncclComm_t comm, bool until_stopped);

/* ---- mismatches (nccl_report.c) ------------------------------------------------------------------ */

host_sketch_t host_sketch_of(const host_task_t *task);
static inline bool host_sketch_same(host_sketch_t a, host_sketch_t b) {
    return a.count == b.count && a.function == b.function && a.type == b.type && a.op == b.op &&
           a.root == b.root;
}
void host_report_mismatch(ncclComm_t comm, uint64_t sequence, int rank_a, host_sketch_t a, int rank_b,
                          host_sketch_t b);
void host_report_message(ncclComm_t comm, uint32_t number, int from, host_sketch_t sent, int to,
                         host_sketch_t wanted);
typedef enum { HOST_INTENT_KERNEL, HOST_INTENT_CALL } host_intent_kind_t;
void host_intent_say(ncclComm_t comm, host_intent_kind_t kind, uint64_t sequence, host_sketch_t sketch);
/* Strict mode: true, and reported, if another rank waits in a different operation of this number. */
bool host_intent_differs(ncclComm_t comm, uint64_t sequence, host_sketch_t own);
/* The same for a message that waits: true, and reported, if the peer waits in the collective that comes next.
 */
bool host_intent_passes_by(ncclComm_t comm, host_intent_kind_t kind, uint64_t sequence, host_sketch_t own,
                           int peer);

/* ---- entry and exit of exported calls (nccl_library.c) ------------------------------------------- */

typedef struct {
    host_call_t record;
    ncclComm_t claimed; /* for the misuse detector */
} host_entry_t;

/* Anything but success is the result of the call. */
ncclResult_t host_entry_begin(host_entry_t *entry, const char *function, ncclComm_t comm);
ncclResult_t host_entry_end(host_entry_t *entry, ncclResult_t result);
uint64_t host_encryption_digest(void); /* of the key that is set, 0 for none */
/* The release that is imitated, and what it does not have (nccl_version.c). */
static inline int host_nccl_version(void) {
    return host_config()->nccl_version;
}
bool host_function_absent(const char *name);
void host_registrations_drop(ncclComm_t comm); /* what a communicator leaves registered goes with it */

#endif
