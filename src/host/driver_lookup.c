/* cuGetProcAddress: how programs that are linked to no libcuda find the driver's functions, by a function's
 * base name and the release whose form of it they know. */
#define _GNU_SOURCE
#include "driver.h"

#include <string.h>

typedef struct {
    const char *name;
    int since;
    void *address;
} function_t;

#define FUNCTION(need, since, result, name, parameters) {#name, since, (void *)name},
static const function_t functions[] = {
    PN_CUDA_SYMBOLS(FUNCTION) PN_CUDA_REST(FUNCTION)
    /* names that cuda.h gives to functions with others */
    {"cuGraphInstantiate", CUDA_SINCE(12, 0), (void *)cuGraphInstantiateWithFlags},
    {"cuDeviceGetUuid", CUDA_SINCE(9, 2), (void *)cuDeviceGetUuid_v2},
};
#undef FUNCTION

/* Is `name` the base name, or that with a version of its form behind it? */
static bool is_form_of(const char *name, const char *base) {
    size_t length = strlen(base);
    if (strncmp(name, base, length) != 0)
        return false;
    const char *rest = name + length;
    return *rest == '\0' ||
           (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '2' && rest[2] <= '9' && rest[3] == '\0');
}

/* The newest form of a function that a program written for `version` can call. */
static CUdriverProcAddressQueryResult look_up(const char *base, int version, void **address) {
    const function_t *best = NULL;
    bool known = false;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        const function_t *found = &functions[i];
        if (!is_form_of(found->name, base))
            continue;
        known = true;
        if (found->since <= version && (best == NULL || found->since > best->since))
            best = found;
    }
    *address = best != NULL ? best->address : NULL;
    return best != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
           : known      ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                        : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *symbolStatus) {
    CUresult result = host_enter("cuGetProcAddress_v2", HOST_NEEDS_NOTHING);
    const cuuint64_t per_thread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if (result == CUDA_SUCCESS && (symbol == NULL || pfn == NULL || cudaVersion > HOST_DRIVER_VERSION ||
                                   (flags & ~(per_thread | CU_GET_PROC_ADDRESS_LEGACY_STREAM)) != 0))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (flags & per_thread)) {
        /* with the functions of the legacy stream such a program would run in another order */
        host_last_error(
            "cuGetProcAddress: the host engine has no functions with a default stream per thread");
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    if (result == CUDA_SUCCESS) {
        CUdriverProcAddressQueryResult status = look_up(symbol, cudaVersion, pfn);
        if (symbolStatus != NULL)
            *symbolStatus = status;
    }
    return host_leave("cuGetProcAddress_v2", NULL, NULL, result);
}

/* Functions without names, by which NVIDIA's own libraries (the CUDA runtime is one) reach into the driver.
 */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    CUresult result = host_enter("cuGetExportTable", HOST_NEEDS_NOTHING);
    if (result == CUDA_SUCCESS && (table == NULL || id == NULL))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        *table = NULL;
        host_last_error(
            "cuGetExportTable: the host engine has no such table; the CUDA runtime library does not "
            "run on it");
        result = CUDA_ERROR_NOT_FOUND;
    }
    return host_leave("cuGetExportTable", NULL, NULL, result);
}
