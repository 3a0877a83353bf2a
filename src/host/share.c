/* Anonymous shared memory, and the way in which another process finds it.
 *
 * It is a file that has no name: whoever makes it keeps it open, and others open it through /proc, where the
 * kernel lets in only who may inspect that process. So nothing can be left behind or guessed: when the last
 * process that has it mapped is gone, however it went, so is the memory.
 */
#define _GNU_SOURCE
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static bool read_start(pid_t pid, uint64_t *start) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return false;
    ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length <= 0)
        return false;
    text[length] = '\0';
    char *field = strrchr(text, ')'); /* the second field; the name in it may hold anything */
    for (int number = 2; field != NULL && number < 22; number++)
        field = strchr(field + 1, ' ');
    if (field == NULL)
        return false;
    *start = strtoull(field + 1, NULL, 10);
    return true;
}

/* A process number may be used again; together with the time of its start it is unique. One's own is asked
 * for once: an emulator may tell each thread another one. */
bool host_process_start(pid_t pid, uint64_t *start) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static pid_t own;
    static uint64_t own_start;
    if (pid != getpid())
        return read_start(pid, start);
    pthread_mutex_lock(&lock);
    if (own != pid && read_start(pid, &own_start))
        own = pid; /* not the parent's, after a fork */
    bool known = own == pid;
    *start = own_start;
    pthread_mutex_unlock(&lock);
    return known;
}

int host_share_make(size_t bytes, host_share_t *share) {
    struct stat status;
    *share = (host_share_t){.pid = getpid(), .bytes = bytes};
    if (!host_process_start(share->pid, &share->start))
        return ENOENT; /* no /proc: nobody could find it */
    share->descriptor = memfd_create("pynccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (share->descriptor < 0)
        return errno;
    if (ftruncate(share->descriptor, (off_t)bytes) != 0 || fstat(share->descriptor, &status) != 0) {
        int error = errno;
        close(share->descriptor);
        return error;
    }
    share->inode = status.st_ino;
    return 0;
}

int host_share_seal(int descriptor) {
    return fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 ? 0 : errno;
}

int host_share_open(const host_share_t *share, int *descriptor) {
    uint64_t start;
    char path[64];
    struct stat status;
    if (!host_process_start(share->pid, &start) || start != share->start)
        return ESRCH;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", share->pid, share->descriptor);
    *descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (*descriptor < 0)
        return errno == ENOENT ? ESTALE : errno;
    if (fstat(*descriptor, &status) != 0 || status.st_ino != share->inode) {
        close(*descriptor);
        return ESTALE;
    }
    return 0;
}

int host_share_map(const host_share_t *share, void **base) {
    int descriptor;
    int error = host_share_open(share, &descriptor);
    if (error != 0)
        return error;
    *base = mmap(NULL, share->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    error = *base == MAP_FAILED ? errno : 0;
    close(descriptor);
    return error;
}
