/* The ranks of one communicator that live in this process, and the watch over the processes of the others. */
#define _GNU_SOURCE
#include "nccl.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t cliques_lock = PTHREAD_MUTEX_INITIALIZER;
static host_clique_t *cliques;

static uint64_t hash_secret(const uint8_t *secret) {
    uint64_t hash;
    memcpy(&hash, secret, sizeof hash); /* random already */
    return hash;
}

static host_clique_t *find_locked(const uint8_t *secret) {
    for (host_clique_t *clique = cliques; clique != NULL; clique = clique->next)
        if (memcmp(clique->secret, secret, sizeof clique->secret) == 0)
            return clique;
    return NULL;
}

static int count_cores(void) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

/* Memory that is freed is nobody's to map any more. */
static void retire_offers(uint64_t serial) {
    pthread_mutex_lock(&cliques_lock);
    for (host_clique_t *clique = cliques; clique != NULL; clique = clique->next)
        for (ncclComm_t comm = clique->members; comm != NULL; comm = comm->next_member)
            host_offers_retire(comm, serial);
    pthread_mutex_unlock(&cliques_lock);
}

static ncclResult_t open_locked(const host_id_t *id, int ranks, host_clique_t **out) {
    host_clique_t *clique = find_locked(id->secret);
    if (clique != NULL) {
        *out = clique;
        if (clique->ranks == ranks)
            return ncclSuccess;
        host_segment_break(clique->head, "ranks disagree about their number: one says %d, another %d",
                           clique->ranks, ranks);
        return host_fail(ncclInvalidUsage, "ranks disagree about their number: one says %d, another %d",
                         clique->ranks, ranks);
    }
    host_head_t *head;
    ncclResult_t result = host_segment_map(id, ranks, &head);
    if (result != ncclSuccess)
        return result;
    clique = calloc(1, sizeof *clique);
    if (clique == NULL) {
        munmap(head, host_segment_bytes(ranks));
        return host_fail(ncclSystemError, "out of memory");
    }
    memcpy(clique->secret, id->secret, sizeof clique->secret);
    clique->hash = hash_secret(id->secret);
    clique->head = head;
    clique->ranks = ranks;
    pthread_mutex_init(&clique->mappings_lock, NULL);
    clique->crowded = ranks > count_cores();
    if (clique->crowded)
        host_crowd(1);
    host_memory_on_free(retire_offers);
    clique->next = cliques;
    cliques = clique;
    atomic_fetch_add(&host_live_segments, 1);
    *out = clique;
    return ncclSuccess;
}

/* A place in the clique is taken by one compare-and-swap, so that of two equal ranks one is refused. */
static ncclResult_t claim(host_clique_t *clique, struct ncclComm *comm) {
    host_area_t *area = host_segment_area(clique->head, comm->rank);
    uint32_t absent = HOST_ABSENT;
    if (!atomic_compare_exchange_strong(&area->presence, &absent, HOST_JOINING)) {
        host_segment_break(clique->head, "two ranks say that they are rank %d of %d", comm->rank,
                           comm->ranks);
        return host_fail(ncclInvalidUsage, "two ranks say that they are rank %d of %d", comm->rank,
                         comm->ranks);
    }
    area->pid = getpid();
    host_process_start(area->pid, &area->start);
    area->device = comm->device;
    area->version = host_nccl_version();
    area->encryption = host_encryption_digest();
    area->home = (uintptr_t)clique->secret;
    atomic_store(&area->core, -1);
    comm->area = area;
    return ncclSuccess;
}

static void unmap(host_clique_t *clique) {
    for (int i = 0; i < clique->watched; i++)
        if (clique->watch[i].descriptor >= 0)
            close(clique->watch[i].descriptor);
    host_mappings_drop(clique, true);
    if (clique->crowded)
        host_crowd(-1);
    munmap(clique->head, host_segment_bytes(clique->ranks));
    pthread_mutex_destroy(&clique->mappings_lock);
    free(clique);
    atomic_fetch_sub(&host_live_segments, 1);
}

static void remove_locked(host_clique_t *clique) {
    for (host_clique_t **link = &cliques; *link != NULL; link = &(*link)->next)
        if (*link == clique) {
            *link = clique->next;
            return;
        }
}

ncclResult_t host_clique_join(struct ncclComm *comm, const ncclUniqueId *unique) {
    host_id_t id;
    memcpy(&id, unique->internal, sizeof id);
    pthread_mutex_lock(&cliques_lock);
    host_clique_t *clique;
    ncclResult_t result = open_locked(&id, comm->ranks, &clique);
    if (result == ncclSuccess) {
        result = claim(clique, comm);
        if (result == ncclSuccess) {
            host_clique_hold(clique);
            clique->joined++;
            comm->next_member = clique->members;
            clique->members = comm;
            atomic_store(&comm->clique, clique);
        } else if (clique->joined == 0) {
            remove_locked(clique);
            unmap(clique);
        }
    }
    pthread_mutex_unlock(&cliques_lock);
    return result;
}

void host_clique_hold(host_clique_t *clique) {
    atomic_fetch_add(&clique->refs, 1);
}

void host_clique_release(host_clique_t *clique) {
    if (atomic_fetch_sub(&clique->refs, 1) == 1)
        unmap(clique);
}

bool host_clique_leave(struct ncclComm *comm, struct ncclComm **all) {
    host_clique_t *clique = atomic_load(&comm->clique);
    pthread_mutex_lock(&cliques_lock);
    bool last = ++clique->leaving == clique->joined;
    if (last) {
        remove_locked(clique);
        *all = clique->members;
        clique->members = NULL;
    }
    pthread_mutex_unlock(&cliques_lock);
    return last;
}

void host_clique_call(host_clique_t *clique, int except) {
    for (int rank = 0; rank < clique->ranks; rank++)
        if (rank != except)
            host_bell_call(&host_segment_area(clique->head, rank)->bell);
}

void host_clique_ring(host_clique_t *clique, int except) {
    for (int rank = 0; rank < clique->ranks; rank++)
        if (rank != except)
            host_bell_ring(&host_segment_area(clique->head, rank)->bell);
}

/* ---- the watch ----------------------------------------------------------------------------------- */

static bool is_watched(const host_clique_t *clique, pid_t pid) {
    for (int i = 0; i < clique->watched; i++)
        if (clique->watch[i].pid == pid)
            return true;
    return false;
}

static void report_gone(host_clique_t *clique, pid_t pid) {
    for (int rank = 0; rank < clique->ranks; rank++) {
        host_area_t *area = host_segment_area(clique->head, rank);
        uint32_t presence = atomic_load(&area->presence);
        if (area->pid != pid || (presence != HOST_JOINING && presence != HOST_READY))
            continue;
        uint64_t bit = (uint64_t)1 << rank;
        if ((atomic_fetch_or(&clique->dead, bit) & bit) == 0)
            host_last_error("rank %d (pid %d) is gone", rank, (int)pid);
    }
}

static int open_process(pid_t pid) {
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, pid, 0);
#else
    (void)pid;
    return -1;
#endif
}

void host_clique_meet(host_clique_t *clique) {
    pid_t self = getpid();
    bool together = true;
    pthread_mutex_lock(&cliques_lock);
    for (int rank = 0; rank < clique->ranks; rank++) {
        host_area_t *area = host_segment_area(clique->head, rank);
        bool here = atomic_load(&area->presence) == HOST_READY && area->pid == self;
        together &= here;
        if (atomic_load(&area->presence) != HOST_READY || here || is_watched(clique, area->pid))
            continue;
        int descriptor = open_process(area->pid);
        uint64_t start;
        /* Between the two, the number may have passed to another process. */
        if (!host_process_start(area->pid, &start) || start != area->start) {
            report_gone(clique, area->pid);
            if (descriptor >= 0)
                close(descriptor);
            continue;
        }
        clique->watch[clique->watched].pid = area->pid;
        clique->watch[clique->watched].start = start;
        clique->watch[clique->watched++].descriptor = descriptor;
    }
    if (together)
        atomic_store(&clique->together, true);
    pthread_mutex_unlock(&cliques_lock);
}

static bool is_alive(pid_t pid, uint64_t start, int descriptor) {
    uint64_t found;
    if (descriptor < 0)
        return host_process_start(pid, &found) && found == start;
    struct pollfd entry = {.fd = descriptor, .events = POLLIN};
    return poll(&entry, 1, 0) <= 0;
}

void host_clique_watch(host_clique_t *clique) {
    int64_t now = host_now_ns();
    int64_t due = atomic_load_explicit(&clique->next_look, memory_order_relaxed);
    if (now < due || !atomic_compare_exchange_strong(&clique->next_look, &due, now + HOST_NAP_NS))
        return;
    pthread_mutex_lock(&cliques_lock);
    for (int i = 0; i < clique->watched; i++)
        if (!is_alive(clique->watch[i].pid, clique->watch[i].start, clique->watch[i].descriptor))
            report_gone(clique, clique->watch[i].pid);
    pthread_mutex_unlock(&cliques_lock);
    pthread_mutex_lock(&clique->mappings_lock);
    host_mappings_drop(clique, false);
    pthread_mutex_unlock(&clique->mappings_lock);
}
