/* Engines: a table of NCCL and CUDA driver functions, filled by name from one handle a library. */
#ifndef PYNCCL_LOADER_H
#define PYNCCL_LOADER_H

#include "../abi/nccl_abi.h"
#include "../abi/symbols.h"

#define PN_MEMBER(need, since, result, name, parameters) result(*name) parameters;
typedef struct {
    PN_NCCL_SYMBOLS(PN_MEMBER)
} pn_nccl_t;
typedef struct {
    PN_CUDA_SYMBOLS(PN_MEMBER)
} pn_cuda_t;
#undef PN_MEMBER

/* An engine is opened once for a pair of paths and lives as long as the process: code of the library may
 * still run on threads that we cannot join. */
typedef struct pn_engine {
    pn_nccl_t nccl;
    pn_cuda_t cuda;
    int nccl_version;
    int driver_version;
    void *nccl_handle;
    void *cuda_handle;
} pn_engine_t;

/* Open both libraries (they may be one file) and fill the tables. On failure NULL, and `why` tells which
 * library, which name, and the loader's own words. Opens nothing else and calls only ncclGetVersion and
 * cuDriverGetVersion. */
pn_engine_t *pn_engine_open(const char *nccl_path, const char *cuda_path, char *why, size_t why_size);

/* The release that brought an NCCL function, as NCCL_SINCE; 0 for a name that is not in the list. */
int pn_nccl_since(const char *name);
/* The function in the engine's table by name, or NULL: absent from the library or from the list. */
void *pn_engine_symbol(const pn_engine_t *engine, const char *name);
/* The path from which a loaded function comes, or NULL. */
const char *pn_engine_path(const pn_engine_t *engine, const char *name);

#endif
