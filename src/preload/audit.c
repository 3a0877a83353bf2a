/* An auditor of the dynamic linker (LD_AUDIT, rtld-audit(7)), for `python -m pynccl host`.
 *
 * LD_PRELOAD puts the host engine first for all who ask for a library by its name. Whoever opens one by its
 * path, as some wheels do, would still get that file; this leads them to the engine too. The linker calls it
 * in a namespace of its own, with a C library of its own, so that it shares nothing with the program.
 */
#define _GNU_SOURCE
#include <link.h>
#include <stdlib.h>
#include <string.h>

static char nccl[4096], cuda[4096];

__attribute__((visibility("default"))) unsigned int la_version(unsigned int version) {
    const char *directory = getenv("PYNCCL_HOST_PRELOAD");
    const char nccl_name[] = "/libnccl.so.2", cuda_name[] = "/libcuda.so.1";
    if (directory != NULL && strlen(directory) + sizeof nccl_name <= sizeof nccl) {
        stpcpy(stpcpy(nccl, directory), nccl_name);
        stpcpy(stpcpy(cuda, directory), cuda_name);
    }
    return version < LAV_CURRENT ? version : LAV_CURRENT;
}

static int is_library(const char *path, const char *name) {
    const char *slash = strrchr(path, '/');
    return strncmp(slash != NULL ? slash + 1 : path, name, strlen(name)) == 0;
}

__attribute__((visibility("default"))) char *la_objsearch(const char *name, uintptr_t *cookie,
                                                          unsigned int flag) {
    (void)cookie;
    if (flag == LA_SER_ORIG && nccl[0] != '\0') {
        if (is_library(name, "libnccl.so") || is_library(name, "libpynccl_host.so"))
            return nccl; /* pynccl in the same process shares it, in whatever release */
        if (is_library(name, "libcuda.so"))
            return cuda;
    }
    return (char *)(uintptr_t)name;
}
