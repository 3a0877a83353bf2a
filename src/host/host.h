/* What the rooms of the host engine know of each other.
 *
 * The engine is a CPU implementation of the CUDA driver subset and of the NCCL host API named in
 * abi/symbols.h. Rooms, and the direction of calls (downwards only):
 *
 *   nccl_*.c      communicators, groups, collectives, point to point, shared segments
 *   driver_*.c    devices, contexts, streams, events, memory, host functions
 *   reduce*.c     NCCL's arithmetic
 *   config.c journal.c fault.c misuse.c bell.c share.c
 *                 settings, call journal, injected faults, misuse, waiting, memory for other processes
 *
 * Rules
 *   1. Internal code calls internal names (host_*), never exported ones: another libcuda may be in the
 *      process.
 *   2. What is not emulated returns an error and says so in the last-error text; nothing succeeds silently.
 *   3. No thread exists before it is needed, and each one ends when its stream or device is gone.
 *   4. Every object starts with a magic number that is overwritten when it is freed, so that a dead handle
 *      is refused.
 *   5. Lock order: group (thread-local, no lock) -> communicator -> device -> stream queue. A stream's run
 *      lock is only ever tried, or taken by a thread that holds no other lock.
 */
#ifndef PYNCCL_HOST_H
#define PYNCCL_HOST_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../abi/prototypes.h"

/* ---- settings (config.c) ------------------------------------------------------------------------- */

typedef enum { HOST_STRICT, HOST_FAITHFUL } host_mode_t;
typedef enum { HOST_QUICK, HOST_GPULIKE } host_temper_t;
/* How large data go from process to process: through slots in shared memory that are written through the
 * caches or past them, or copied by the kernel from one process to the other. */
typedef enum { HOST_WAY_CACHED, HOST_WAY_PAST, HOST_WAY_ATTACH, HOST_WAYS } host_way_t;
typedef enum { HOST_MISUSE_IGNORE, HOST_MISUSE_REPORT, HOST_MISUSE_ABORT } host_misuse_t;

/* Atomic, since tests change them while workers run. */
typedef struct {
    _Atomic host_mode_t mode; /* PYNCCL_HOST_MODE: strict (a mismatch is an error) or faithful (it hangs) */
    _Atomic host_temper_t temper; /* PYNCCL_HOST_TEMPER: quick or gpulike */
    _Atomic host_misuse_t misuse; /* PYNCCL_HOST_MISUSE: ignore, report, or abort the process */
    _Atomic int devices;          /* PYNCCL_HOST_DEVICES, default 8 */
    _Atomic bool multi_rank;      /* NCCL_MULTI_RANK_GPU_ENABLE=1: several ranks may share a device */
    _Atomic bool runtime_connect; /* NCCL_RUNTIME_CONNECT, default true: first contact blocks (gpulike) */
    _Atomic host_way_t way; /* PYNCCL_HOST_WAY: cached, past or attach; HOST_WAYS: what is measured best */
    _Atomic bool windows;   /* NCCL_WIN_ENABLE, default true: registering a window gives one */
    _Atomic bool launch_blocking;     /* CUDA_LAUNCH_BLOCKING=1: a launch returns when its work is done */
    _Atomic bool quirk_depth_leak;    /* PYNCCL_HOST_QUIRKS=depth-leak: reproduce NCCL's leaked group depth */
    _Atomic bool quirk_no_memory_ops; /* PYNCCL_HOST_QUIRKS=no-memory-ops: streams cannot wait for words */
    _Atomic int nccl_version;    /* PYNCCL_HOST_NCCL_VERSION: the release that is imitated; 22105 is 2.21.5 */
    _Atomic bool refuse_foreign; /* PYNCCL_HOST_POINTERS=own: memory of others is refused */
    _Atomic uint32_t launch_cost_ns; /* gpulike 5000, quick 0; PYNCCL_HOST_LAUNCH_COST_US */
    _Atomic uint32_t launch_depth;   /* gpulike 1000, quick unbounded (0); PYNCCL_HOST_LAUNCH_DEPTH */
    /* gpulike: the most that a kernel waits, at random, before it reads; PYNCCL_HOST_READ_DELAY_US, 200 */
    _Atomic uint32_t read_delay_ns;
    _Atomic uint64_t seed; /* PYNCCL_HOST_SEED, for every random choice */
} host_config_t;

/* The settings; the environment is read once, at the first call of any exported function. */
const host_config_t *host_config(void);

/* ---- waiting (bell.c) ------------------------------------------------------------------------------ */

/* A doorbell: a futex word that may lie in private or in shared memory. A waiter reads `rung` with
 * host_bell_look, checks its condition, and then waits for the word to change. */
typedef struct {
    _Atomic uint32_t rung;
    _Atomic uint32_t sleepers;
} host_bell_t;

static inline uint32_t host_bell_look(host_bell_t *bell) {
    return atomic_load_explicit(&bell->rung, memory_order_seq_cst);
}
void host_bell_ring(host_bell_t *bell);
/* Ring only if somebody sleeps on it, or is about to: what has changed was stored before, in one order with
 * all such stores (seq_cst), and who waits for it looks once more between host_bell_arm and host_bell_sleep.
 * That spares everybody else a write to a cache line that others read. */
void host_bell_call(host_bell_t *bell);
void host_bell_arm(host_bell_t *bell);
void host_bell_sleep(host_bell_t *bell, uint32_t seen, int64_t timeout_ns); /* armed; negative: no limit */
void host_bell_disarm(host_bell_t *bell);
/* Sleep until the bell differs from `seen`, at most timeout_ns (negative: without limit). It spins for about
 * two microseconds, then yields, then sleeps. Spurious returns are allowed. */
void host_bell_wait(host_bell_t *bell, uint32_t seen, int64_t timeout_ns);
/* Before the next look at something that may change soon: a pause at first, then way is made for others who
 * want the core. After HOST_PATIENCE tries it does nothing and answers false: it is time to sleep. */
#define HOST_PATIENCE 120
bool host_be_patient(unsigned int tries, bool near);
/* +1 and -1: as long as there are more ranks than cores, way is made at once. */
void host_crowd(int change);
int64_t host_now_ns(void); /* CLOCK_MONOTONIC */
void host_nap_ns(int64_t ns);

static inline void host_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* ---- memory for other processes (share.c) ---------------------------------------------------------- */

/* Where an anonymous file is open, for processes that want to map it too. */
typedef struct {
    int32_t pid, descriptor;
    uint64_t start; /* of the process, in clock ticks since boot */
    uint64_t inode, bytes;
} host_share_t;

/* These give 0 or an errno. The maker owns the descriptor and must keep it open as long as others may come.
 */
int host_share_make(size_t bytes, host_share_t *share);
int host_share_seal(int descriptor); /* its size stays from now on */
/* ESRCH: its process is gone; ESTALE: it is not open there any more. The caller owns what it gets. */
int host_share_open(const host_share_t *share, int *descriptor);
int host_share_map(const host_share_t *share, void **base);
bool host_process_start(pid_t pid, uint64_t *start);

/* ---- work on a stream (driver_stream.c) ------------------------------------------------------------ */

typedef enum { HOST_BLOCKED, HOST_DONE } host_progress_t;
typedef enum { HOST_WORK_KERNEL, HOST_WORK_COPY, HOST_WORK_HOST_FUNCTION, HOST_WORK_MARK } host_work_kind_t;

/* One item in a stream's queue. It is made by a room, pushed by host_stream_submit, run by whoever holds
 * the stream's run lock (its worker thread, or in the quick temper a poller), and released when it is done.
 *
 * `step` never waits: it does what can be done now and answers HOST_BLOCKED or HOST_DONE. With HOST_BLOCKED
 * it names the bell that will ring, or be called, when the condition may have changed. A runner that stays
 * steps the item again for a while, and again when it has armed that bell, before it sleeps. With no bell, or
 * with `unrung` set, it polls instead, every 30 us at first and every 1 ms at last. A blocked item is stepped
 * again every 100 ms in any case. `moves` grows with each step that got somewhere. With HOST_DONE it may set
 * `status`: anything but CUDA_SUCCESS becomes the context's sticky error, as after a faulting kernel.
 *
 * The bell must stay mapped until the item is released. An item starts as zeros but for what its maker sets.
 */
typedef struct host_work host_work_t;
struct host_work {
    host_work_t *next;
    host_progress_t (*step)(host_work_t *work);
    void (*release)(host_work_t *work); /* frees the item; called once, after DONE or when its context died */
    /* A fresh item that does the same, for each launch of a graph that has captured this one, which itself is
     * never run; NULL in what cannot be captured. */
    host_work_t *(*again)(const host_work_t *work);
    host_work_kind_t kind;
    size_t bytes; /* payload; a poller runs items up to HOST_POLL_BYTES only */
    int device;   /* filled by submit */
    host_bell_t *bell;
    CUresult status;
    uint32_t moves;
    bool unrung; /* the condition may come true with no ring: a host store, a time */
    bool near;   /* it waits for somebody who was last on this very core, and may want it */
    /* the runner's */
    bool started;
    bool counted;               /* it takes a place in the device's launch queue */
    uint32_t moves_seen, tries; /* blocked steps since it last moved, up to HOST_PATIENCE */
};

#define HOST_POLL_BYTES (16 * 1024)
#define HOST_POLL_NS (50 * 1000)

/* What `again` mostly is: a copy of an item of so many bytes that has never run; NULL: no memory. */
host_work_t *host_work_copy(const host_work_t *work, size_t bytes);
/* Queue work on a stream (NULL and the legacy and per-thread handles included), at the launch cost and depth
 * of the temper. On an error the item is not queued and not released. It may step and release the item before
 * it returns (quick), and it may block the caller (gpulike with a full launch queue, launch_blocking): hold
 * no lock that a step or a release takes. */
CUresult host_stream_submit(CUstream stream, host_work_t *work);
/* The device a stream belongs to, or an error for a dead or foreign handle. */
CUresult host_stream_device(CUstream stream, int *device);
/* Which capture the stream is part of, 0 for none. */
CUresult host_stream_capturing(CUstream stream, uint64_t *capture);
/* Make `waiter` wait for what is now queued on `signaller` (a record and a wait, in one). */
CUresult host_stream_follow(CUstream waiter, CUstream signaller);
CUresult host_event_record(CUevent event, CUstream stream);

/* The calling thread's current device: that of its current context, or device 0's primary context made
 * current on first use where `create` is set; CUDA_ERROR_INVALID_CONTEXT otherwise. */
CUresult host_current_device(int *device, bool create);
CUresult host_set_current_device(int device); /* as cudaSetDevice; -1 leaves the thread with no context */
/* The device's sticky error, and a way to set it (the first one stays). */
CUresult host_device_status(int device);
void host_device_fail(int device, CUresult error);
/* Wait until all that is queued on the device now is done; its sticky error ends the wait. */
CUresult host_device_synchronize(int device);

/* gpulike: one collective kernel runs at a time on a device, in the order in which they first tried. The
 * quick temper always answers true. Where it answers false it has set the kernel's bell. The slot is freed
 * with host_device_leave, also after an abort, and at the latest when the kernel is released. */
bool host_device_enter(int device, host_work_t *kernel);
void host_device_leave(int device, host_work_t *kernel);

/* Which memory a pointer is in: the engine's own (and of which device), or the process's ordinary memory. */
typedef struct {
    bool own;
    int device;
    void *base;
    size_t bytes;
    CUmemorytype type;
    bool adopted;       /* by host_memory_adopt */
    uint64_t serial;    /* no other allocation of this process has it; 0: adopted */
    host_share_t share; /* share.bytes is 0: other processes cannot map it */
    size_t offset;      /* of `base` in the shared file */
} host_memory_t;
void host_memory_find(const void *pointer, host_memory_t *found);
/* Memory of a device between guard pages, freed by host_memory_free after the device is drained. What is
 * `shared` can be mapped by other processes; where no file can be opened for that, it is ordinary memory. */
CUresult host_memory_allocate(int device, size_t bytes, CUmemorytype type, bool shared, void **pointer);
CUresult host_memory_free(void *pointer);
/* Whoever has given shared memory to others is told its serial when it is freed. */
void host_memory_on_free(void (*told)(uint64_t serial));
/* Make a mapping of another room (a shared segment) count as the device's memory, and forget it again; the
 * room keeps and unmaps it. */
CUresult host_memory_adopt(int device, void *base, size_t bytes);
void host_memory_forget(void *base);

/* ---- arithmetic (reduce.c) ------------------------------------------------------------------------- */

size_t host_type_size(ncclDataType_t type);
/* result[i] = a[i] op b[i], rounded to the element type (fp8 through half); the result may be `a` or `b`.
 * ncclAvg is not accepted here: see host_premultiply and host_divide. */
void host_reduce(void *result, const void *a, const void *b, size_t count, ncclDataType_t type,
                 ncclRedOp_t op);
/* values[i] = source[i] * scalar, in the element type; `scalar` points at one element. */
void host_premultiply(void *values, const void *source, size_t count, ncclDataType_t type,
                      const void *scalar);
/* The factor 1/ranks rounded to a floating type, as NCCL's average uses it. */
void host_average_factor(void *scalar, ncclDataType_t type, int ranks);
/* Integer average: values[i] = values[i] / ranks, truncating towards zero for signed types. */
void host_divide(void *values, size_t count, ncclDataType_t type, int ranks);

/* Two or more sources combined one after the other, in the order in which they are listed. */
typedef struct {
    const unsigned char *const *sources;
    const uint64_t *factors;       /* what each source is multiplied by first, in its first bytes; or NULL */
    unsigned char *const *results; /* the result goes to all of these, each of which may be a source */
    int source_count, result_count;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int divisor;      /* of integers, at the end; 0: none */
    bool past_caches; /* for results that are large and not sources */
} host_fold_t;
void host_fold(const host_fold_t *fold);
/* For tests: "portable", "avx2", "avx512" or "best"; false where this processor cannot. All give the same. */
bool host_reduce_choose(const char *name);

/* ---- copies past the caches (copy.c) ---------------------------------------------------------------- */

void host_copy_past(void *to, const void *from, size_t bytes);
/* Also to `slot`, through the caches. */
void host_copy_twice(void *slot, void *to, const void *from, size_t bytes);
/* For tests: "avx512", "sse2", "neon" or "plain"; false where this processor cannot. */
bool host_copy_choose(const char *name);

/* ---- threads (driver_worker.c) --------------------------------------------------------------------- */

/* A thread that nobody joins; it is counted among the live ones. The name has at most 15 letters. */
CUresult host_thread_start(void *(*body)(void *), void *argument, const char *name);
void host_thread_end(void); /* the last words of each body */

/* ---- journal and faults (journal.c, fault.c) -------------------------------------------------------- */

/* One exported call as a test sees it. The layout is read by ctypes: append only. */
typedef struct {
    uint64_t time_ns;
    uint64_t thread;
    char function[32];
    int32_t device; /* the thread's current device, -1 for none */
    int32_t group_depth;
    int32_t result;             /* ncclResult_t or CUresult */
    int32_t datatype, op, root; /* -1 where the call has none */
    uint64_t count;
    uint64_t comm;   /* the communicator's handle */
    uint64_t stream; /* the stream's handle */
    uint64_t object; /* the event, peer buffer or other argument worth knowing */
    int32_t rank;    /* the communicator's rank, -1 */
    int32_t reserved;
} host_call_t;

/* Written at the end of each exported call while the journal is on (off: one relaxed load). */
bool host_journal_on(void);
void host_journal_add(const host_call_t *call);

/* Faults. A site names where it may strike: "init", "op", "background", "abort", "destroy", "finalize",
 * "call", "event", "host_function". `name` is the function's or the operation's name ("ncclAllReduce"),
 * `rank` the communicator's rank or -1. The first matching rule whose turn it is is taken. */
typedef enum {
    HOST_FAULT_NONE,
    HOST_FAULT_DELAY,       /* ns */
    HOST_FAULT_FAIL,        /* code: the result to return */
    HOST_FAULT_STUCK,       /* until aborted; at site "abort" or "destroy", for ns or for ever (0) */
    HOST_FAULT_KILL,        /* SIGKILL this process */
    HOST_FAULT_REMOTE,      /* the communicator's async error becomes code, its operation stays stuck */
    HOST_FAULT_CUDA_ERROR,  /* code becomes the context's sticky error */
    HOST_FAULT_IN_PROGRESS, /* the call answers ncclInProgress for ns polls */
    HOST_FAULT_SKIP,        /* a host function is not called */
    HOST_FAULT_AFFINITY     /* init leaves the calling thread pinned to one CPU */
} host_fault_kind_t;
typedef struct {
    host_fault_kind_t kind;
    int code;
    int64_t ns;
} host_fault_t;
host_fault_t host_fault_take(const char *site, const char *name, int rank);
/* Rung whenever the rules are replaced, which frees whatever a rule has stuck "for ever". */
extern host_bell_t host_fault_bell;
/* Wait for ns (0: for ever), or until the rules are replaced. */
void host_fault_stall(int64_t ns);

/* The text behind ncclGetLastError: one process-wide buffer, as in NCCL. */
void host_last_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *host_last_error_text(void); /* the calling thread's copy, good until it asks again */

/* ---- misuse (misuse.c) ------------------------------------------------------------------------------ */

static inline bool host_misuse_watched(void) {
    return host_config()->misuse != HOST_MISUSE_IGNORE;
}
/* Report one, in words. */
void host_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* nccl_misuse.c, called where host_misuse_watched(). A claim says that this thread is inside the
 * communicator; true: to be given up with unclaim. */
bool host_misuse_claim(ncclComm_t comm, const char *function);
void host_misuse_unclaim(ncclComm_t comm);
void host_misuse_device(ncclComm_t comm, const char *function);
void host_misuse_group(void); /* a group is open: watch the thread's end */

/* ---- control: what tests and `python -m pynccl host` use besides the two vendors' names -------------- */

/* Set what the environment sets ("temper", "mode", "faults", "quirks", ...); 0, or -1 for an unknown key or
 * value. "faults" replaces the whole rule set; "" removes it. */
PN_EXPORT int pn_host_set(const char *key, const char *value);
/* Whether the release that is imitated does not have this NCCL function. Its name is exported all the same,
 * and calling it is an invalid usage; a loader that asks can leave it out. */
PN_EXPORT int pn_host_absent(const char *function);
PN_EXPORT void pn_host_journal_start(size_t capacity);
PN_EXPORT size_t pn_host_journal_read(host_call_t *calls, size_t capacity); /* returns how many there are */
PN_EXPORT void pn_host_journal_stop(void);

/* Live objects, for leak tests; the layout is read by ctypes: append only. */
typedef struct {
    int64_t streams, events, communicators, segments, threads, allocations, work_items, groups_open;
} host_live_t;
extern _Atomic int64_t host_live_streams, host_live_events, host_live_communicators, host_live_segments,
    host_live_threads, host_live_allocations, host_live_work_items, host_live_groups_open;
/* work_items is what the streams' queues hold; host_live_work_items adds items that are in no queue yet. */
PN_EXPORT void pn_host_live(host_live_t *live);
/* Bytes that collectives of this process have given through shared slots, that is, not in a line with their
 * arrival, and not by letting others read the buffer itself. */
PN_EXPORT uint64_t pn_host_staged(void);

/* So many sums of float32, each followed by a wait for the stream: nanoseconds for all of them, -1 if a call
 * failed. */
PN_EXPORT int64_t pn_host_turns(ncclComm_t comm, CUstream stream, const void *send, void *recv, size_t count,
                                int turns);

/* A copy with stores past the caches. */
PN_EXPORT void pn_host_copy(void *to, const void *from, size_t bytes);

/* How many misuses were reported since the last call; the first of them in words, one a line. */
PN_EXPORT int64_t pn_host_misuse_take(char *text, size_t bytes);

/* A thread of its own holds the driver's lock for so long, as a driver busy elsewhere does. Returns once the
 * lock is held. */
PN_EXPORT void pn_host_hold_driver_lock(unsigned int milliseconds);

#endif
