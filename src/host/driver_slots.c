/* Where streams and events live: ranges of addresses that are reserved once and never given back. */
#define _GNU_SOURCE
#include "driver.h"

#include <sys/mman.h>

static void *reserve(size_t bytes) {
    void *base =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

CUresult host_pool_open(host_pool_t *pool) {
    if (pool->base == NULL)
        pool->base = reserve((size_t)pool->capacity * pool->slot_bytes);
    if (pool->line == NULL)
        pool->line = reserve((size_t)pool->capacity * sizeof pool->line[0]);
    return pool->base != NULL && pool->line != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void *host_pool_take(host_pool_t *pool) {
    void *slot = NULL;
    pthread_mutex_lock(&pool->lock);
    uint32_t used = atomic_load_explicit(&pool->used, memory_order_relaxed);
    if (pool->line_length > HOST_QUARANTINE || (used == pool->capacity && pool->line_length > 0)) {
        slot = host_pool_at(pool, pool->line[pool->line_head]);
        pool->line_head = (pool->line_head + 1) % pool->capacity;
        pool->line_length--;
    } else if (used < pool->capacity) {
        slot = host_pool_at(pool, used);
        atomic_store_explicit(&pool->used, used + 1, memory_order_release);
    }
    pthread_mutex_unlock(&pool->lock);
    return slot;
}

void host_pool_give(host_pool_t *pool, void *slot) {
    pthread_mutex_lock(&pool->lock);
    pool->line[(pool->line_head + pool->line_length) % pool->capacity] = host_pool_index(pool, slot);
    pool->line_length++;
    pthread_mutex_unlock(&pool->lock);
}
