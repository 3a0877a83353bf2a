/* The memory that all ranks of one communicator share, and the id by which they find it.
 *
 * The process that makes the id keeps the memory's file open until all have come (share.c).
 */
#define _GNU_SOURCE
#include "nccl.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
static const char MAGIC[8] = "pnclique";

/* ---- where things lie ---------------------------------------------------------------------------- */

static size_t slots_offset(int ranks) {
    return (PAGE + (size_t)ranks * sizeof(host_area_t) + PAGE - 1) / PAGE * PAGE;
}

static size_t channels_offset(int ranks) {
    return slots_offset(ranks) + (size_t)ranks * HOST_SLOTS * HOST_SLOT_BYTES;
}

/* Pages come into being when they are touched, so that the rings of pairs that never talk cost nothing. */
size_t host_segment_bytes(int ranks) {
    size_t end = channels_offset(ranks) + (size_t)ranks * (size_t)ranks * sizeof(host_channel_t);
    return (end + PAGE - 1) / PAGE * PAGE;
}

static unsigned char *at(host_head_t *head, size_t offset) {
    return (unsigned char *)head + offset;
}

static int ranks_of(host_head_t *head) {
    return (int)atomic_load_explicit(&head->ranks, memory_order_relaxed);
}

host_area_t *host_segment_area(host_head_t *head, int rank) {
    return (host_area_t *)(void *)at(head, PAGE + (size_t)rank * sizeof(host_area_t));
}

unsigned char *host_segment_slot(host_head_t *head, int rank, uint32_t arrival) {
    size_t slot = (size_t)rank * HOST_SLOTS + arrival % HOST_SLOTS;
    return at(head, slots_offset(ranks_of(head)) + slot * HOST_SLOT_BYTES);
}

host_channel_t *host_segment_channel(host_head_t *head, int from, int to) {
    int ranks = ranks_of(head);
    size_t index = (size_t)from * (size_t)ranks + (size_t)to;
    return (host_channel_t *)(void *)at(head, channels_offset(ranks) + index * sizeof(host_channel_t));
}

void host_segment_break(host_head_t *head, const char *format, ...) {
    uint32_t whole = 0;
    if (!atomic_compare_exchange_strong(&head->broken, &whole, 1))
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(head->reason, sizeof head->reason, format, arguments);
    va_end(arguments);
    atomic_store(&head->broken, 2);
}

/* ---- offers -------------------------------------------------------------------------------------- */

/* A segment that this process keeps open because ranks are still to come. */
typedef struct offer {
    struct offer *next;
    host_id_t id;
} offer_t;

static pthread_mutex_t offers_lock = PTHREAD_MUTEX_INITIALIZER;
static offer_t *offers;

static ncclResult_t system_error(const char *what, int error) {
    return host_fail(ncclSystemError, "%s: %s", what, strerror(error));
}

static ncclResult_t make_segment(host_id_t *id) {
    int error = host_share_make(PAGE, &id->share);
    if (error != 0)
        return system_error("a shared segment cannot be made", error);
    int descriptor = id->share.descriptor;
    if (getrandom(id->secret, sizeof id->secret, 0) == (ssize_t)sizeof id->secret &&
        pwrite(descriptor, id->magic, sizeof id->magic, offsetof(host_head_t, magic)) >= 0 &&
        pwrite(descriptor, id->secret, sizeof id->secret, offsetof(host_head_t, secret)) >= 0)
        return ncclSuccess;
    error = errno;
    close(descriptor);
    return system_error("a shared segment cannot be filled", error);
}

ncclResult_t host_segment_offer(ncclUniqueId *unique) {
    host_segment_withdraw(NULL);
    offer_t *offer = calloc(1, sizeof *offer);
    if (offer == NULL)
        return host_fail(ncclSystemError, "out of memory");
    host_id_t *id = &offer->id;
    memcpy(id->magic, MAGIC, sizeof MAGIC);
    ncclResult_t result = make_segment(id);
    if (result != ncclSuccess) {
        free(offer);
        return result;
    }
    memset(unique, 0, sizeof *unique);
    memcpy(unique->internal, id, sizeof *id);
    pthread_mutex_lock(&offers_lock);
    offer->next = offers;
    offers = offer;
    pthread_mutex_unlock(&offers_lock);
    atomic_fetch_add(&host_live_segments, 1);
    return ncclSuccess;
}

static bool is_complete(const host_id_t *id) {
    uint32_t counts[2]; /* ranks and ready lie side by side */
    _Static_assert(offsetof(host_head_t, ready) == offsetof(host_head_t, ranks) + 4, "read in one piece");
    return pread(id->share.descriptor, counts, sizeof counts, offsetof(host_head_t, ranks)) ==
               sizeof counts &&
           counts[0] != 0 && counts[0] == counts[1];
}

void host_segment_withdraw(const ncclUniqueId *unique) {
    host_id_t wanted;
    if (unique != NULL)
        memcpy(&wanted, unique->internal, sizeof wanted);
    pthread_mutex_lock(&offers_lock);
    for (offer_t **link = &offers; *link != NULL;) {
        offer_t *offer = *link;
        bool named = unique != NULL && memcmp(wanted.secret, offer->id.secret, sizeof wanted.secret) == 0;
        if (!named && !is_complete(&offer->id)) {
            link = &offer->next;
            continue;
        }
        *link = offer->next;
        close(offer->id.share.descriptor);
        free(offer);
        atomic_fetch_sub(&host_live_segments, 1);
    }
    pthread_mutex_unlock(&offers_lock);
}

/* ---- finding a segment --------------------------------------------------------------------------- */

static ncclResult_t open_segment(const host_id_t *id, int *descriptor) {
    int pid = (int)id->share.pid;
    int error = host_share_open(&id->share, descriptor);
    if (error == ESRCH)
        return host_fail(
            ncclSystemError,
            "the process that made this unique id (pid %d) is gone; it must live until init is done", pid);
    if (error == ESTALE)
        return host_fail(
            ncclInvalidUsage,
            "this unique id has served an init already, or its init was given up (made by pid %d)", pid);
    if (error != 0)
        return host_fail(ncclSystemError, "pid %d does not let this process open its shared segment: %s", pid,
                         strerror(error));
    return ncclSuccess;
}

ncclResult_t host_segment_check(const ncclUniqueId *unique) {
    host_id_t id;
    uint64_t start;
    memcpy(&id, unique->internal, sizeof id);
    if (memcmp(id.magic, MAGIC, sizeof MAGIC) != 0)
        return host_fail(ncclSystemError, "this unique id was not made by the host engine of this release");
    if (!host_process_start((pid_t)id.share.pid, &start) || start != id.share.start)
        return host_fail(ncclSystemError, "the process that made this unique id (pid %d) is gone",
                         (int)id.share.pid);
    return ncclSuccess;
}

/* The first rank to come decides the size. */
static ncclResult_t settle_ranks(host_head_t *head, int ranks) {
    uint32_t found = 0;
    if (atomic_compare_exchange_strong(&head->ranks, &found, (uint32_t)ranks) || found == (uint32_t)ranks)
        return ncclSuccess;
    host_segment_break(head, "ranks disagree about their number: one says %d, another %d", (int)found, ranks);
    return host_fail(ncclInvalidUsage, "ranks disagree about their number: one says %d, another %d",
                     (int)found, ranks);
}

static ncclResult_t map_whole(int descriptor, int ranks, host_head_t **head) {
    size_t bytes = host_segment_bytes(ranks);
    /* All come to the same size, so that it does not matter who is first; from then on it stays. */
    int error = ftruncate(descriptor, (off_t)bytes) == 0 ? host_share_seal(descriptor) : errno;
    if (error != 0)
        return system_error("the shared segment cannot be sized", error);
    void *whole = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (whole == MAP_FAILED)
        return system_error("the shared segment cannot be mapped", errno);
    *head = whole;
    return ncclSuccess;
}

ncclResult_t host_segment_map(const host_id_t *id, int ranks, host_head_t **head) {
    int descriptor;
    if (memcmp(id->magic, MAGIC, sizeof MAGIC) != 0)
        return host_fail(ncclSystemError, "this unique id was not made by the host engine of this release");
    ncclResult_t result = open_segment(id, &descriptor);
    if (result != ncclSuccess)
        return result;
    host_head_t *front = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (front == MAP_FAILED) {
        result = system_error("the shared segment cannot be mapped", errno);
    } else {
        if (memcmp(front->magic, MAGIC, sizeof MAGIC) != 0 ||
            memcmp(front->secret, id->secret, sizeof id->secret) != 0)
            result =
                host_fail(ncclSystemError, "the shared segment of pid %d is not the one of this unique id",
                          (int)id->share.pid);
        else
            result = settle_ranks(front, ranks);
        munmap(front, PAGE);
    }
    if (result == ncclSuccess)
        result = map_whole(descriptor, ranks, head);
    close(descriptor);
    return result;
}
