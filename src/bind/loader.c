#define _GNU_SOURCE
#include "loader.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRED true
#define OPTIONAL false

typedef struct {
    const char *name;
    size_t offset;
    int since;
    bool required;
} slot_t;

#define NCCL_SLOT(need, since, result, name, parameters) {#name, offsetof(pn_nccl_t, name), since, need},
#define CUDA_SLOT(need, since, result, name, parameters) {#name, offsetof(pn_cuda_t, name), since, need},
static const slot_t nccl_slots[] = {PN_NCCL_SYMBOLS(NCCL_SLOT)};
static const slot_t cuda_slots[] = {PN_CUDA_SYMBOLS(CUDA_SLOT)};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* A library that imitates an older release cannot hide what that release did not have; it tells. */
typedef int (*absent_t)(const char *function);

static absent_t find_absent(void *handle) {
    absent_t absent = NULL;
    void *symbol = dlsym(handle, "pn_host_absent");
    memcpy(&absent, &symbol, sizeof absent);
    return absent;
}

static bool fill(void *handle, const slot_t *slots, size_t count, void *table, const char *path, char *why,
                 size_t why_size) {
    absent_t absent = find_absent(handle);
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(handle, slots[i].name);
        if (absent && absent(slots[i].name))
            symbol = NULL;
        if (!symbol && slots[i].required) {
            snprintf(why, why_size, "%s has no function %s", path, slots[i].name);
            return false;
        }
        memcpy((char *)table + slots[i].offset, &symbol, sizeof symbol);
    }
    return true;
}

/* RTLD_LOCAL: several copies of libnccl may be in the process, and each engine calls its own. */
static void *open_library(const char *path, char *why, size_t why_size) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        snprintf(why, why_size, "%s", dlerror());
    return handle;
}

pn_engine_t *pn_engine_open(const char *nccl_path, const char *cuda_path, char *why, size_t why_size) {
    pn_engine_t *engine = calloc(1, sizeof *engine);
    if (!engine) {
        snprintf(why, why_size, "out of memory");
        return NULL;
    }
    /* The driver first: libnccl looks for libcuda by itself, and finds the one that is mapped. */
    engine->cuda_handle = open_library(cuda_path, why, why_size);
    if (!engine->cuda_handle)
        goto failed;
    if (!fill(engine->cuda_handle, cuda_slots, COUNT(cuda_slots), &engine->cuda, cuda_path, why, why_size))
        goto failed;
    engine->nccl_handle = open_library(nccl_path, why, why_size);
    if (!engine->nccl_handle)
        goto failed;
    if (!fill(engine->nccl_handle, nccl_slots, COUNT(nccl_slots), &engine->nccl, nccl_path, why, why_size))
        goto failed;
    ncclResult_t result = engine->nccl.ncclGetVersion(&engine->nccl_version);
    if (result != ncclSuccess) {
        snprintf(why, why_size, "%s: ncclGetVersion failed with %d", nccl_path, (int)result);
        goto failed;
    }
    engine->cuda.cuDriverGetVersion(&engine->driver_version);
    return engine;
failed:
    if (engine->nccl_handle)
        dlclose(engine->nccl_handle);
    if (engine->cuda_handle)
        dlclose(engine->cuda_handle);
    free(engine);
    return NULL;
}

static const slot_t *find(const slot_t *slots, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(slots[i].name, name) == 0)
            return &slots[i];
    return NULL;
}

int pn_nccl_since(const char *name) {
    const slot_t *slot = find(nccl_slots, COUNT(nccl_slots), name);
    return slot ? slot->since : 0;
}

void *pn_engine_symbol(const pn_engine_t *engine, const char *name) {
    void *symbol = NULL;
    const slot_t *slot = find(nccl_slots, COUNT(nccl_slots), name);
    if (slot)
        memcpy(&symbol, (const char *)&engine->nccl + slot->offset, sizeof symbol);
    else if ((slot = find(cuda_slots, COUNT(cuda_slots), name)))
        memcpy(&symbol, (const char *)&engine->cuda + slot->offset, sizeof symbol);
    return symbol;
}

const char *pn_engine_path(const pn_engine_t *engine, const char *name) {
    Dl_info info;
    void *symbol = pn_engine_symbol(engine, name);
    return symbol && dladdr(symbol, &info) ? info.dli_fname : NULL;
}
