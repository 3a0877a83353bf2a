/* Buffers that other ranks read and write directly: how a rank says where they are, and how others get there.
 *
 * Between the ranks of one process an address is enough. Between processes memory from ncclMemAlloc can be
 * mapped: its owner offers the allocation in a table of its area, and whoever needs it maps it once. Other
 * memory can only be copied from and to (nccl_attach.c).
 * A mapping goes when its owner has withdrawn the offer (the memory was freed, or the table was full).
 */
#include "nccl.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct host_mapping {
    uint64_t serial; /* 0: nothing is mapped */
    void *base;
    size_t bytes;
};

/* ---- the owner ------------------------------------------------------------------------------------ */

static int find_offer(const host_area_t *area, uint64_t serial) {
    for (int i = 0; i < HOST_OFFERS; i++)
        if (atomic_load_explicit(&area->offers[i].serial, memory_order_relaxed) == serial)
            return i;
    return -1;
}

static void withdraw(host_area_t *area, int index) {
    atomic_store(&area->offers[index].serial, 0);
    atomic_fetch_add(&area->withdrawn, 1);
}

/* When the table is full, the offers take turns. Nobody uses those of earlier operations: an operation ends
 * when all ranks are done with its buffers. -1: this one needs them all. */
static int make_offer(ncclComm_t comm, const host_memory_t *memory) {
    int index = find_offer(comm->area, 0);
    for (int tries = 0; index < 0 && tries < HOST_OFFERS; tries++) {
        int next = (int)(comm->next_offer++ % HOST_OFFERS);
        if ((comm->offered & (uint64_t)1 << next) != 0)
            continue;
        index = next;
        withdraw(comm->area, index);
    }
    if (index < 0)
        return -1;
    host_offer_t *offer = &comm->area->offers[index];
    offer->share = memory->share;
    atomic_store(&offer->serial, memory->serial);
    return index;
}

bool host_expose(ncclComm_t comm, const void *pointer, size_t bytes, bool attach, host_exposure_t *exposure) {
    *exposure = (host_exposure_t){.address = (uintptr_t)pointer, .offer = -1};
    if (atomic_load(&atomic_load(&comm->clique)->together))
        return true;
    host_memory_t memory;
    host_memory_find(pointer, &memory);
    size_t before = (size_t)((const char *)pointer - (const char *)memory.base);
    if (memory.own && memory.share.bytes != 0 && bytes <= memory.bytes - before) {
        exposure->serial = memory.serial;
        exposure->offset = memory.offset + before;
        exposure->offer = find_offer(comm->area, memory.serial);
        exposure->fresh = exposure->offer < 0;
        if (exposure->fresh)
            exposure->offer = make_offer(comm, &memory);
    }
    if (exposure->offer >= 0)
        comm->offered |= (uint64_t)1 << exposure->offer;
    else
        exposure->attached = attach;
    return exposure->offer >= 0 || attach;
}

void host_offers_retire(ncclComm_t comm, uint64_t serial) {
    int index = find_offer(comm->area, serial);
    if (index >= 0)
        withdraw(comm->area, index);
}

/* ---- the others ----------------------------------------------------------------------------------- */

static void unmap(struct host_mapping *mapping) {
    if (mapping->serial != 0)
        munmap(mapping->base, mapping->bytes);
    mapping->serial = 0;
}

static bool map(struct host_mapping *mapping, host_offer_t *offer, uint64_t serial) {
    if (mapping->serial == serial)
        return true;
    unmap(mapping);
    if (atomic_load(&offer->serial) != serial || host_share_map(&offer->share, &mapping->base) != 0)
        return false;
    mapping->bytes = offer->share.bytes;
    mapping->serial = serial;
    return true;
}

void host_mappings_drop(host_clique_t *clique, bool all) {
    for (int rank = 0; rank < clique->ranks; rank++) {
        host_area_t *area = host_segment_area(clique->head, rank);
        struct host_mapping *mappings = clique->mappings[rank];
        uint32_t withdrawn = atomic_load(&area->withdrawn);
        if (mappings == NULL || (!all && clique->withdrawn[rank] == withdrawn))
            continue;
        clique->withdrawn[rank] = withdrawn;
        for (int i = 0; i < HOST_OFFERS; i++)
            if (all || mappings[i].serial != atomic_load(&area->offers[i].serial))
                unmap(&mappings[i]);
        if (all)
            free(mappings);
    }
}

bool host_reach(host_clique_t *clique, int rank, const host_exposure_t *exposure, host_place_t *place) {
    host_area_t *area = host_segment_area(clique->head, rank);
    bool here = atomic_load_explicit(&clique->together, memory_order_relaxed) || area->pid == getpid();
    if (here || exposure->attached) {
        *place = (host_place_t){.at = (unsigned char *)(uintptr_t)exposure->address, .far = !here};
        return true;
    }
    bool reached = false;
    pthread_mutex_lock(&clique->mappings_lock);
    struct host_mapping *mappings = clique->mappings[rank];
    if (mappings == NULL)
        mappings = clique->mappings[rank] = calloc(HOST_OFFERS, sizeof *mappings);
    if (mappings != NULL && exposure->offer >= 0 && exposure->offer < HOST_OFFERS) {
        struct host_mapping *mapping = &mappings[exposure->offer];
        reached = map(mapping, &area->offers[exposure->offer], exposure->serial);
        if (reached)
            *place = (host_place_t){.at = (unsigned char *)mapping->base + exposure->offset};
    }
    pthread_mutex_unlock(&clique->mappings_lock);
    return reached;
}

/* ---- visits --------------------------------------------------------------------------------------- */

/* A rank that is aborted may give its buffers away at once, so before others touch them they say so, and it
 * waits for them. Both sides write first and then look, so that one of them sees the other. */
bool host_visit_begin(ncclComm_t comm, host_clique_t *clique) {
    atomic_store(&comm->area->visiting, 1);
    for (int rank = 0; rank < clique->ranks; rank++)
        if (atomic_load(&host_segment_area(clique->head, rank)->closed) != 0) {
            host_visit_end(comm);
            return false;
        }
    return true;
}

void host_visit_end(ncclComm_t comm) {
    atomic_store_explicit(&comm->area->visiting, 0, memory_order_release);
}

enum { VISIT_NS = 20 * 1000, VISITS_END_NS = 1000 * 1000 * 1000 };

/* A visit is short, but its process may have been killed or stopped in the middle. */
void host_visitors_turn_out(ncclComm_t comm) {
    host_clique_t *clique = atomic_load(&comm->clique);
    if (clique == NULL)
        return;
    atomic_store(&comm->area->closed, 1);
    int64_t end = host_now_ns() + VISITS_END_NS;
    for (int rank = 0; rank < clique->ranks; rank++) {
        host_area_t *area = host_segment_area(clique->head, rank);
        while (rank != comm->rank && atomic_load(&area->visiting) != 0 && host_now_ns() < end) {
            uint64_t start;
            if (area->pid != getpid() && (!host_process_start(area->pid, &start) || start != area->start))
                break;
            host_nap_ns(VISIT_NS);
        }
    }
}
