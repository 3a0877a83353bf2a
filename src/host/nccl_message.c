/* Send and receive. Between each two ranks, and in each direction, messages follow one another through a ring
 * of bytes in shared memory; large ones the receiver copies from the sender's buffer, if it can reach that. A
 * send is done when the last byte has been taken, so that it waits for its receive as it would on a GPU,
 * however small it is.
 *
 * All messages of a communicator in one group are one kernel: those with different peers, and the two
 * directions, move on independently; those of one peer and direction go in the order of the calls.
 */
#include "nccl_group.h"

#include <stdlib.h>
#include <string.h>

enum {
    PAST_BYTES = 16 * 1024,
    STEP_BYTES = HOST_RING_BYTES /
        4, /* at once, so that the receiver takes some while the sender puts more */
};

typedef struct {
    char *buffer;
    size_t bytes, moved;
    host_sketch_t sketch;
    uint32_t number; /* of the message between these two ranks, from 1 */
    bool receive, posted;
    bool direct;       /* from buffer to buffer; of a receive: */
    size_t sent;       /* its bytes, */
    host_place_t from; /* and where they are */
    int peer;
    int next; /* the next of the same queue, or -1 */
} message_t;

typedef struct {
    host_kernel_t kernel;
    int count, queues;
    int exposed; /* direct sends under way */
    bool started;
    uint64_t sequence; /* of the collective that comes next */
    int *heads;        /* by queue: the message under way, or -1 */
    message_t messages[];
} exchange_t;

static host_channel_t *channel_of(const exchange_t *e, const message_t *m) {
    int own = e->kernel.comm->rank;
    return host_segment_channel(e->kernel.clique->head, m->receive ? m->peer : own,
                                m->receive ? own : m->peer);
}

static void ring(const exchange_t *e, int peer) {
    host_bell_ring(&host_segment_area(e->kernel.clique->head, peer)->bell);
}

static void copy_cached(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

/* A ring's bytes from `position` on may go round its end. Many of them are sooner written past the caches and
 * read from memory than handed from one core's cache to another's. */
static void copy_in(host_channel_t *channel, uint64_t position, const char *from, size_t bytes) {
    size_t offset = position % HOST_RING_BYTES;
    size_t straight = bytes < HOST_RING_BYTES - offset ? bytes : HOST_RING_BYTES - offset;
    void (*copy)(void *to, const void *from, size_t bytes) =
        bytes < PAST_BYTES ? copy_cached : host_copy_past;
    copy(channel->data + offset, from, straight);
    copy(channel->data, from + straight, bytes - straight);
}

static void copy_out(const host_channel_t *channel, uint64_t position, char *to, size_t bytes) {
    size_t offset = position % HOST_RING_BYTES;
    size_t straight = bytes < HOST_RING_BYTES - offset ? bytes : HOST_RING_BYTES - offset;
    memcpy(to, channel->data + offset, straight);
    memcpy(to + straight, channel->data, bytes - straight);
}

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ---- one message --------------------------------------------------------------------------------- */

typedef enum { WAITING, MOVED, FINISHED, REFUSED } outcome_t;

static host_sketch_t sketch_of(host_function_t function, uint32_t type, uint64_t count) {
    return (host_sketch_t){.function = (uint8_t)function, .type = (uint8_t)type, .count = count};
}

static void offer(exchange_t *e, message_t *m, host_channel_t *channel) {
    ncclComm_t comm = e->kernel.comm;
    channel->sent_type = m->sketch.type;
    channel->sent_count = m->sketch.count;
    channel->direct = m->bytes > HOST_POLL_BYTES &&
                      host_expose(comm, m->buffer, m->bytes, host_way_attaches(e->kernel.clique, m->bytes),
                                  &channel->exposure);
    m->direct = channel->direct;
    e->exposed += m->direct;
    e->kernel.exposed = e->exposed != 0;
    atomic_store(&channel->offered, m->number);
}

static void cover(exchange_t *e, message_t *m) {
    e->exposed -= m->direct;
    e->kernel.exposed = e->exposed != 0;
    m->direct = false;
}

static size_t put_some(message_t *m, host_channel_t *channel) {
    uint64_t head = atomic_load_explicit(&channel->head, memory_order_relaxed);
    size_t room = HOST_RING_BYTES - (size_t)(head - atomic_load(&channel->tail));
    size_t bytes = least(least(room, m->bytes - m->moved), STEP_BYTES);
    if (bytes != 0) {
        copy_in(channel, head, m->buffer + m->moved, bytes);
        atomic_store(&channel->head, head + bytes);
        m->moved += bytes;
    }
    return bytes;
}

static outcome_t send_some(exchange_t *e, message_t *m) {
    host_channel_t *channel = channel_of(e, m);
    outcome_t outcome = WAITING;
    if (!m->posted) {
        offer(e, m, channel);
        m->posted = true;
        outcome = MOVED;
    }
    if (atomic_load(&channel->refused) == m->number) {
        host_report_message(e->kernel.comm, m->number, e->kernel.comm->rank, m->sketch, m->peer,
                            sketch_of(HOST_RECV, channel->wanted_type, channel->wanted_count));
        return REFUSED;
    }
    if (m->direct && atomic_load(&channel->unreached) == m->number)
        cover(e, m);
    if (!m->direct && put_some(m, channel) != 0)
        outcome = MOVED;
    if (outcome == MOVED)
        ring(e, m->peer);
    if (atomic_load(&channel->taken) != m->number)
        return outcome;
    cover(e, m);
    return FINISHED;
}

/* Whoever receives compares, since the sender cannot go on before it has said that it took all. */
static bool is_refused(exchange_t *e, const message_t *m, host_channel_t *channel) {
    host_sketch_t sent = sketch_of(HOST_SEND, channel->sent_type, channel->sent_count);
    size_t size = sent.type < ncclNumTypes ? host_type_size((ncclDataType_t)sent.type) : 0;
    if (host_config()->mode == HOST_FAITHFUL || sent.count * size == m->bytes)
        return false;
    channel->wanted_type = m->sketch.type;
    channel->wanted_count = m->sketch.count;
    atomic_store(&channel->refused, m->number);
    host_report_message(e->kernel.comm, m->number, m->peer, sent, e->kernel.comm->rank, m->sketch);
    ring(e, m->peer);
    return true;
}

/* The first look at a message that has been offered. */
static void accept(exchange_t *e, message_t *m, host_channel_t *channel) {
    size_t size = channel->sent_type < ncclNumTypes ? host_type_size((ncclDataType_t)channel->sent_type) : 0;
    m->posted = true;
    m->sent = channel->sent_count * size;
    m->direct = channel->direct && host_reach(e->kernel.clique, m->peer, &channel->exposure, &m->from);
    if (!channel->direct || m->direct)
        return;
    atomic_store(&channel->unreached, m->number);
    ring(e, m->peer);
}

/* Bytes taken out of the ring. */
static size_t take_some(message_t *m, host_channel_t *channel) {
    uint64_t tail = atomic_load_explicit(&channel->tail, memory_order_relaxed);
    size_t bytes = least((size_t)(atomic_load(&channel->head) - tail), m->bytes - m->moved);
    bytes = least(bytes, STEP_BYTES);
    copy_out(channel, tail, m->buffer + m->moved, bytes);
    if (bytes != 0)
        atomic_store(&channel->tail, tail + bytes);
    return bytes;
}

/* Bytes copied from the sender's buffer. Fewer than wanted may have been sent, in the faithful mode. */
static size_t fetch_some(exchange_t *e, message_t *m) {
    size_t left = least(m->sent, m->bytes) - m->moved;
    size_t bytes = least(left, m->from.far ? HOST_FAR_SLICE_BYTES : HOST_SLICE_BYTES);
    if (bytes == 0 || host_comm_stopped(e->kernel.comm))
        return 0;
    if (!host_visit_begin(e->kernel.comm, e->kernel.clique)) {
        e->kernel.stuck = true; /* its sender was aborted, or another rank */
        return 0;
    }
    host_place_t to = {.at = (unsigned char *)m->buffer + m->moved};
    host_place_t from = {.at = m->from.at + m->moved, .far = m->from.far};
    bool copied = host_copy_between(&e->kernel, m->peer, to, from, bytes);
    host_visit_end(e->kernel.comm);
    return copied ? bytes : 0;
}

static outcome_t receive_some(exchange_t *e, message_t *m) {
    host_channel_t *channel = channel_of(e, m);
    if (!m->posted) {
        if (atomic_load(&channel->offered) != m->number)
            return WAITING;
        if (is_refused(e, m, channel))
            return REFUSED;
        accept(e, m, channel);
    }
    size_t bytes = m->direct ? fetch_some(e, m) : take_some(m, channel);
    m->moved += bytes;
    bool finished = m->moved == m->bytes;
    if (finished)
        atomic_store(&channel->taken, m->number);
    if (finished || (bytes != 0 && !m->direct))
        ring(e, m->peer);
    return finished ? FINISHED : bytes != 0 ? MOVED : WAITING;
}

/* ---- a rank and itself --------------------------------------------------------------------------- */

/* The k-th send to oneself goes to the k-th receive from oneself; they are equal in number. */
static bool copy_to_self(exchange_t *e) {
    ncclComm_t comm = e->kernel.comm;
    int receive = 0;
    for (int i = 0; i < e->count; i++) {
        const message_t *from = &e->messages[i];
        if (from->receive || from->peer != comm->rank)
            continue;
        while (!e->messages[receive].receive || e->messages[receive].peer != comm->rank)
            receive++;
        const message_t *to = &e->messages[receive++];
        if (host_config()->mode == HOST_STRICT && from->bytes != to->bytes) {
            host_report_message(comm, from->number, comm->rank, from->sketch, comm->rank, to->sketch);
            return false;
        }
        size_t bytes = least(from->bytes, to->bytes);
        if (bytes != 0 && from->buffer != to->buffer)
            memmove(to->buffer, from->buffer, bytes);
    }
    return true;
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

static bool may_touch_all(const exchange_t *e) {
    for (int i = 0; i < e->count; i++)
        if (!host_kernel_may_touch(e->kernel.work.device, e->messages[i].buffer, e->messages[i].bytes))
            return false;
    return true;
}

/* As far as one queue goes now; true when nothing is left of it. */
static bool advance_queue(exchange_t *e, int *head) {
    while (*head >= 0) {
        message_t *m = &e->messages[*head];
        outcome_t outcome = m->receive ? receive_some(e, m) : send_some(e, m);
        if (outcome == WAITING)
            return false;
        if (outcome == REFUSED) {
            e->kernel.stuck = true;
            return false;
        }
        if (outcome == FINISHED)
            *head = m->next;
    }
    return true;
}

static host_progress_t advance(host_kernel_t *kernel) {
    exchange_t *e = (exchange_t *)(void *)kernel;
    if (!e->started) {
        e->started = true;
        if (!may_touch_all(e)) {
            kernel->work.status = CUDA_ERROR_ILLEGAL_ADDRESS;
            return HOST_DONE;
        }
        kernel->stuck = !copy_to_self(e);
    }
    bool finished = true;
    for (int queue = 0; queue < e->queues && !kernel->stuck; queue++)
        finished &= advance_queue(e, &e->heads[queue]);
    return finished && !kernel->stuck ? HOST_DONE : HOST_BLOCKED;
}

/* In the strict mode: a peer that waits in a collective will not make its half of a message any more. */
static void linger(host_kernel_t *kernel) {
    exchange_t *e = (exchange_t *)(void *)kernel;
    if (host_config()->mode != HOST_STRICT)
        return;
    for (int queue = 0; queue < e->queues && !kernel->stuck; queue++) {
        const message_t *m = e->heads[queue] >= 0 ? &e->messages[e->heads[queue]] : NULL;
        if (m != NULL)
            kernel->stuck =
                host_intent_passes_by(kernel->comm, HOST_INTENT_KERNEL, e->sequence, m->sketch, m->peer);
    }
}

/* ---- making it ----------------------------------------------------------------------------------- */

static int count_to_self(const host_plan_t *plan, host_function_t function) {
    int count = 0;
    for (const host_task_t *task = plan->messages; task != NULL; task = task->next)
        count += task->function == function && task->root == plan->comm->rank;
    return count;
}

ncclResult_t host_message_check(const host_plan_t *plan) {
    int sends = count_to_self(plan, HOST_SEND), receives = count_to_self(plan, HOST_RECV);
    if (sends == receives)
        return ncclSuccess;
    return host_fail(ncclInvalidUsage,
                     "rank %d sends %d messages to itself and receives %d from itself in one group",
                     plan->comm->rank, sends, receives);
}

static void fill(message_t *m, ncclComm_t comm, const host_task_t *task) {
    m->receive = task->function == HOST_RECV;
    m->buffer = m->receive ? task->recv : (char *)(uintptr_t)task->send;
    m->bytes = task->count * host_type_size(task->type);
    m->peer = task->root;
    m->sketch = host_sketch_of(task);
    m->next = -1;
    m->number = m->receive ? ++comm->received[m->peer] : ++comm->sent[m->peer];
}

/* Messages of one peer and direction form a queue; a rank's messages to itself are in none. */
static void build_queues(exchange_t *e, ncclComm_t comm) {
    int last[2][HOST_MAX_RANKS];
    memset(last, -1, sizeof last);
    for (int i = 0; i < e->count; i++) {
        const message_t *m = &e->messages[i];
        if (m->peer == comm->rank)
            continue;
        int *previous = &last[m->receive][m->peer];
        if (*previous < 0)
            e->heads[e->queues++] = i;
        else
            e->messages[*previous].next = i;
        *previous = i;
    }
}

host_kernel_t *host_message_new(ncclComm_t comm, const host_task_t *tasks) {
    int count = 0;
    for (const host_task_t *task = tasks; task != NULL; task = task->next)
        count++;
    exchange_t *e = calloc(1, sizeof *e + (size_t)count * (sizeof(message_t) + sizeof(int)));
    if (e == NULL)
        return NULL;
    e->count = count;
    e->heads = (int *)(void *)&e->messages[count];
    size_t bytes = 0;
    for (int i = 0; i < count; i++, tasks = tasks->next) {
        fill(&e->messages[i], comm, tasks);
        bytes += e->messages[i].bytes;
    }
    build_queues(e, comm);
    e->sequence = comm->sequence + 1;
    e->kernel.advance = advance;
    e->kernel.linger = linger;
    e->kernel.name = count == 1 && e->messages[0].receive ? "ncclRecv" : "ncclSend";
    e->kernel.work.bytes = bytes;
    return &e->kernel;
}
