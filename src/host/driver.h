/* What the driver's files know of each other, and nobody else.
 *
 *   driver_entry.c    in and out of every exported function; the process-wide driver lock; cuInit
 *   driver_device.c   devices and their names
 *   driver_context.c  primary contexts, the current one, sticky errors
 *   driver_slots.c    where streams and events live
 *   driver_gate.c     the gpulike temper: launch cost, launch depth, one collective at a time
 *   driver_queue.c    a stream's queue: pushing, running, retiring
 *   driver_worker.c   the threads behind it: a worker per stream, one janitor
 *   driver_wait.c     waiting for a place in a stream, by running it where that is allowed
 *   driver_order.c    order between streams; launches
 *   driver_stream.c   the stream API      driver_event.c     the event API
 *   driver_memory.c   allocations         driver_pool.c      memory pools, allocation in stream order
 *   driver_pointer.c  what a pointer is   driver_transfer.c  copies and fills
 *   driver_word.c     memory waits and writes                driver_function.c  host functions
 *   driver_lookup.c   functions by name
 *   driver_capture.c  stream capture      driver_graph.c     graphs
 *
 * A stream counts the items it was given (`submitted`) and those it is done with (`finished`). A place in a
 * stream is such a count, and an event is a place: it is done once `finished` has come so far. Streams live
 * in slots that are reused but never unmapped, and the counts go on from one tenant to the next, so that a
 * place stays meaningful however long it is kept.
 */
#ifndef PYNCCL_HOST_DRIVER_H
#define PYNCCL_HOST_DRIVER_H

#include "host.h"

enum {
    HOST_DRIVER_VERSION = 13000,
    HOST_MAX_DEVICES = 64,
    HOST_CONTEXT_DEPTH = 16,
    HOST_MAX_STREAMS = 1 << 16,
    HOST_MAX_EVENTS = 1 << 20,
    HOST_PRIORITY_LEAST = 0,
    HOST_PRIORITY_GREATEST = -5,
    HOST_QUARANTINE = 256, /* how many slots lie unused before one is used again: dead handles stay dead */
};
enum {
    HOST_MAGIC_CONTEXT = 0x63747821,
    HOST_MAGIC_STREAM = 0x73747221,
    HOST_MAGIC_EVENT = 0x65767421,
    HOST_MAGIC_DEAD = 0x64656164,
};

#define HOST_LIKELY(condition) __builtin_expect(!!(condition), 1)

/* ---- devices and contexts ------------------------------------------------------------------------ */

/* A device, its primary context (whose handle is this struct's address) and its launch queue. */
typedef struct CUctx_st {
    int ordinal;
    _Atomic uint32_t magic;      /* HOST_MAGIC_CONTEXT while the primary context is alive */
    _Atomic int error;           /* the sticky error, a CUresult */
    int retained;                /* under the contexts' lock */
    uint64_t id;                 /* of the context, anew each time it comes to life */
    _Atomic bool runtime;        /* retained for good by host_set_current_device, as the CUDA runtime does */
    pthread_mutex_t launch_lock; /* gpulike: launches and event queries take it */
    _Atomic uint32_t queued;     /* items that count against the launch depth */
    host_bell_t room;            /* rings when one of them is done */
    pthread_mutex_t turn_lock;   /* gpulike: which collective runs */
    host_work_t *turn_owner;
    host_work_t **turn_line;
    size_t turn_length, turn_capacity;
    _Atomic bool turn_used;
    host_bell_t turn;         /* rings when the slot is given up */
    _Atomic(CUstream) legacy; /* made on first use */
} host_device_t;

extern host_device_t host_devices[HOST_MAX_DEVICES];

typedef struct {
    host_device_t *current;
    host_device_t *below[HOST_CONTEXT_DEPTH]; /* the contexts that were current when others were pushed */
    int depth;
    CUstream *per_thread; /* the thread's own default stream on each device */
    CUstreamCaptureMode capture_mode;
    bool inside_function; /* a host function is running on this thread */
} host_thread_t;
extern _Thread_local host_thread_t host_thread;

host_device_t *host_device_of(CUcontext context); /* NULL for a handle that never was one */
static inline bool host_device_alive(host_device_t *device) {
    return atomic_load_explicit(&device->magic, memory_order_acquire) == HOST_MAGIC_CONTEXT;
}
static inline CUresult host_device_error(host_device_t *device) {
    return (CUresult)atomic_load_explicit(&device->error, memory_order_acquire);
}

/* ---- in and out of an exported function (driver_entry.c) ------------------------------------------ */

enum {
    HOST_ATTEND_INIT = 1,    /* cuInit was not called, or the process has forked since */
    HOST_ATTEND_LOCK = 2,    /* gpulike, or a thread of a test holds the driver's lock */
    HOST_ATTEND_FAULTS = 4,  /* rules are set */
    HOST_ATTEND_JOURNAL = 8, /* the journal is on */
};
extern _Atomic uint32_t host_attention; /* 0: nothing of all that, which is the fast path */
void host_attend(uint32_t bit, bool on);
bool host_driver_initialised(void);
CUresult host_driver_initialise(void); /* as cuInit(0) */

typedef enum { HOST_NEEDS_NOTHING, HOST_NEEDS_INIT, HOST_NEEDS_CONTEXT } host_need_t;
CUresult host_enter_slowly(const char *function, host_need_t need);
CUresult host_leave_slowly(const char *function, CUstream stream, const void *object, CUresult result);

static inline CUresult host_enter(const char *function, host_need_t need) {
    host_thread_t *thread = &host_thread;
    if (HOST_LIKELY(
            atomic_load_explicit(&host_attention, memory_order_relaxed) == 0 && !thread->inside_function &&
            (need < HOST_NEEDS_CONTEXT || (thread->current != NULL && host_device_alive(thread->current)))))
        return CUDA_SUCCESS;
    return host_enter_slowly(function, need);
}
static inline CUresult host_leave(const char *function, CUstream stream, const void *object,
                                  CUresult result) {
    if (HOST_LIKELY(!(atomic_load_explicit(&host_attention, memory_order_relaxed) & HOST_ATTEND_JOURNAL)))
        return result;
    return host_leave_slowly(function, stream, object, result);
}

/* E3: a real driver holds a lock of its own while it calls a host function, and every call takes it. */
void host_driver_lock(void);
void host_driver_unlock(void);
void host_driver_pass(void); /* wait until nobody holds it */

bool host_fault_parse(const char *text, uint64_t seed); /* "" removes all rules; false: not understood */
uint64_t host_random(uint64_t *state);

/* ---- slots ---------------------------------------------------------------------------------------- */

/* Objects of one kind in one reserved range of addresses: any value can be asked whether it is a handle, and
 * a dead one can be looked at. */
typedef struct {
    const uint32_t capacity, slot_bytes; /* slot_bytes is a power of two */
    char *base;
    _Atomic uint32_t used; /* how many slots were ever given out */
    pthread_mutex_t lock;
    uint32_t *line; /* the free slots, first in, first out */
    uint32_t line_head, line_length;
} host_pool_t;
extern host_pool_t host_stream_pool, host_event_pool;

CUresult host_pool_open(host_pool_t *pool);
void *host_pool_take(host_pool_t *pool); /* NULL: all slots are taken */
void host_pool_give(host_pool_t *pool, void *slot);
static inline bool host_pool_holds(const host_pool_t *pool, const void *handle) {
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)pool->base;
    return offset < (uintptr_t)atomic_load_explicit(&pool->used, memory_order_acquire) * pool->slot_bytes &&
           (offset & (pool->slot_bytes - 1)) == 0;
}
static inline uint32_t host_pool_index(const host_pool_t *pool, const void *slot) {
    return (uint32_t)(((uintptr_t)slot - (uintptr_t)pool->base) / pool->slot_bytes);
}
static inline void *host_pool_at(const host_pool_t *pool, uint32_t index) {
    return pool->base + (size_t)index * pool->slot_bytes;
}

/* ---- captures and graphs (driver_capture.c, driver_graph.c) ---------------------------------------- */

typedef struct {
    CUgraphNode *nodes;
    size_t count;
} host_nodes_t;

/* What an event stands for that was recorded in a capture. */
typedef struct {
    _Atomic uint64_t id; /* of the capture; 0: it was not recorded in one */
    host_nodes_t nodes;
} host_captured_t;

typedef struct host_capture host_capture_t;
extern _Atomic uint32_t host_captures; /* how many go on */
static inline bool host_capturing(void) {
    return !HOST_LIKELY(atomic_load_explicit(&host_captures, memory_order_relaxed) == 0);
}

void host_nodes_clear(host_nodes_t *set);
CUresult host_capture_unsafe_slowly(const char *function);
CUresult host_capture_ask_slowly(const char *function, CUstream stream);
CUresult host_capture_device_slowly(const char *function, host_device_t *device);
/* At the head of a call that no capture would see: not permitted, but to threads in relaxed mode, while one
 * goes on, which it breaks. */
static inline CUresult host_capture_unsafe(const char *function) {
    return host_capturing() ? host_capture_unsafe_slowly(function) : CUDA_SUCCESS;
}
/* The same of a call that asks about, or waits for, a stream or all of a device. */
static inline CUresult host_capture_ask(const char *function, CUstream stream) {
    return host_capturing() ? host_capture_ask_slowly(function, stream) : CUDA_SUCCESS;
}
static inline CUresult host_capture_device(const char *function, host_device_t *device) {
    return host_capturing() ? host_capture_device_slowly(function, device) : CUDA_SUCCESS;
}
/* In place of queueing an item, recording an event, waiting for one, and following a stream. With `captured`,
 * and success, the capture has taken what was meant for the stream, the item included. */
CUresult host_capture_work(CUstream stream, host_work_t *work, bool *captured);
CUresult host_capture_record(CUstream stream, host_captured_t *event);
CUresult host_capture_wait(CUstream stream, const host_captured_t *event, bool *captured);
CUresult host_capture_follow(CUstream waiter, CUstream signaller, bool *captured);
void host_capture_forget(host_captured_t *event);
CUresult host_capture_asked(const host_captured_t *event); /* it is not to be asked */
void host_capture_abandon(CUstream stream);

CUgraph host_graph_new(void);
void host_graph_end(CUgraph graph);  /* nothing will be added any more */
void host_graph_drop(CUgraph graph); /* gives up its handle */
CUgraphNode host_graph_add(CUgraph graph, host_work_t *work, const host_nodes_t *after);
void host_graph_mark(CUgraph graph, const host_nodes_t *ends); /* these, and all that they depend on */
bool host_graph_marked(CUgraphNode node);

/* ---- streams -------------------------------------------------------------------------------------- */

typedef enum { HOST_SLOT_FREE, HOST_SLOT_LIVE, HOST_SLOT_DYING } host_slot_t;

enum { HOST_STREAM_LEGACY = 0x100, HOST_STREAM_PER_THREAD = 0x200 }; /* in `flags`: the implicit ones */

enum { HOST_STREAM_BYTES = 512 };

struct CUstream_st {
    _Atomic uint32_t magic; /* all zeros is a slot that was never used, its mutex included */
    _Atomic int state;      /* a host_slot_t; changed under `lock` */
    host_device_t *device;
    unsigned int flags;
    int priority;
    uint64_t id;

    _Atomic uint64_t submitted, finished;
    _Atomic uint32_t run;   /* the run lock: a host_run_lock_t */
    _Atomic uint32_t polls; /* grows with each poll: the janitor takes what nobody polls */
    host_work_t *batch;     /* items taken from the queue; the runner's, guarded by the run lock */
    host_bell_t done;       /* rings when `finished` moves */

    pthread_mutex_t lock;       /* guards what follows, and `submitted`; never held across a step */
    host_work_t *head, *tail;   /* items waiting to be taken */
    host_bell_t *sleeping_on;   /* the bell on which the runner sleeps */
    host_bell_t call;           /* rings for the worker */
    bool worker;                /* it has a thread, */
    _Atomic bool worker_active; /* which is awake, and will run all that is queued; changed under `lock` */
    uint32_t seen_polls;        /* the janitor's, from its last round */
    uint64_t seen_finished;
    bool seen_pending;

    _Atomic uint64_t capture; /* 0, or which one it is part of; under the captures' lock, as its last nodes */
    host_nodes_t tails;
};
_Static_assert(sizeof(struct CUstream_st) <= HOST_STREAM_BYTES, "a stream fits in its slot");

typedef struct {
    CUstream stream;
    uint64_t count;
} host_place_t;

static inline uint32_t host_streams_used(void) {
    return atomic_load_explicit(&host_stream_pool.used, memory_order_acquire);
}
/* In use, the device's, and without these flags? */
bool host_stream_of(CUstream stream, host_device_t *device, unsigned int unwanted_flags);
static inline CUstream host_stream_slot(uint32_t index) {
    return host_pool_at(&host_stream_pool, index);
}
static inline bool host_stream_idle(CUstream stream) {
    return atomic_load_explicit(&stream->finished, memory_order_acquire) ==
           atomic_load_explicit(&stream->submitted, memory_order_acquire);
}
static inline bool host_place_reached(host_place_t place) {
    return atomic_load_explicit(&place.stream->finished, memory_order_acquire) >= place.count;
}
static inline host_place_t host_stream_end(CUstream stream) {
    return (host_place_t){stream, atomic_load_explicit(&stream->submitted, memory_order_acquire)};
}

/* The stream behind a handle; NULL and the special handles belong to the thread's current context. */
CUresult host_stream_resolve(CUstream handle, CUstream *stream);
CUresult host_stream_make(host_device_t *device, unsigned int flags, int priority, CUstream *stream);
void host_stream_close(CUstream stream); /* no more work; the slot is given back when the queue is empty */
void host_stream_retire(CUstream stream);
/* The device has failed: what is queued on the stream, if it is the device's, is dropped soon. */
void host_stream_fail(CUstream stream, host_device_t *device);
void host_streams_close_all(host_device_t *device); /* returns when nothing of theirs runs any more */

/* driver_queue.c */
typedef enum {
    HOST_RUN_EMPTY,   /* nothing is left */
    HOST_RUN_BLOCKED, /* the head must wait for its bell */
    HOST_RUN_PAUSED,  /* the budget is used up */
    HOST_RUN_WORKER,  /* the head is for the worker: too big, or a host function */
} host_run_t;
typedef enum { HOST_RUNNER_POLLER, HOST_RUNNER_WAITER, HOST_RUNNER_WORKER } host_runner_t;
bool host_run_lock(CUstream stream, bool want); /* try; with `want`, its release rings the worker */
static inline bool host_run_locked(CUstream stream) {
    return atomic_load_explicit(&stream->run, memory_order_relaxed) != 0;
}
void host_run_unlock(CUstream stream);
/* Run items until `finished` has come to `until`; under the run lock. */
host_run_t host_stream_run(CUstream stream, host_runner_t runner, uint64_t until);
void host_stream_sleep(CUstream stream, int64_t waiting_since); /* on the blocked head; under the run lock */
void host_stream_poll(CUstream stream);                         /* quick: run what is ready; never waits */
/* Queue an item with no cost, no limit and no implicit order, and say its place (NULL: not asked). The item
 * may be gone when this returns. */
CUresult host_stream_push(CUstream stream, host_work_t *work, uint64_t *count);
/* Put in what orders a new item of this stream against the legacy default stream. */
CUresult host_stream_barrier(CUstream stream);
bool host_stream_legacy_ready(CUstream legacy); /* and with it the blocking streams that it is behind */
CUresult host_stream_wait_place(CUstream stream, host_place_t place);

/* driver_worker.c */
CUresult host_worker_ensure(CUstream stream); /* it has a thread */
CUresult host_worker_call(CUstream stream);   /* start or wake the worker; it runs until the queue is empty */
void host_janitor_notice(void);               /* a small item was left pending */

/* driver_wait.c */
CUresult host_place_wait(host_place_t place, host_device_t *device);
void host_place_drain(host_place_t place); /* also in a failed context, whose items are dropped */
CUresult host_stream_synchronize(CUstream stream);

/* driver_gate.c */
CUresult host_gate_launch(host_device_t *device, host_work_t *work);
void host_gate_done(host_device_t *device, host_work_t *work);
void host_gate_query(host_device_t *device);

/* driver_event.c */
void host_events_close_all(host_device_t *device);
/* driver_memory.c */
void host_memory_free_all(host_device_t *device);
bool host_memory_drop(void *pointer); /* free at once; the caller knows that nothing uses it any more */

/* driver_pool.c */
CUmemoryPool host_mempool_of(const void *pointer); /* NULL: it was given by none */
void host_mempool_forget(const void *pointer);     /* it has been freed */
void host_mempools_empty(host_device_t *device);   /* the context's memory has gone */

/* driver_word.c */
extern host_bell_t host_memory_bell; /* rings when the engine has written a word that a stream may wait for */

#endif
