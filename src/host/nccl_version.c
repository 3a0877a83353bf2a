/* The release that is imitated. What came later is exported all the same, since a shared object cannot hide a
 * name from the linker while it runs; calling it is refused, and who asks is told that it is absent. */
#include "nccl.h"

#include <string.h>

typedef struct {
    const char *name;
    int since;
} function_t;

#define FUNCTION(need, since, result, name, parameters) {#name, since},
static const function_t functions[] = {PN_NCCL_SYMBOLS(FUNCTION) PN_NCCL_REST(FUNCTION)};
#undef FUNCTION

bool host_function_absent(const char *name) {
    int version = host_nccl_version();
    if (version >= NCCL_ABI_VERSION)
        return false;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (strcmp(functions[i].name, name) == 0)
            return functions[i].since > version;
    return false;
}

int pn_host_absent(const char *function) {
    return function != NULL && host_function_absent(function);
}

ncclResult_t ncclGetVersion(int *version) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclGetVersion", NULL);
    if (result == ncclSuccess && version == NULL)
        result = host_fail(ncclInvalidArgument, "ncclGetVersion: the pointer for the version is NULL");
    if (result == ncclSuccess)
        *version = host_nccl_version();
    return host_entry_end(&entry, result);
}
