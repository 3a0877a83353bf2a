/* What belongs to the library rather than to a communicator: texts, memory, encryption, and the
 * door that every exported call goes through. */
#define _GNU_SOURCE
#include "nccl_group.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- the door ------------------------------------------------------------------------------------ */

ncclResult_t host_entry_begin(host_entry_t *entry, const char *function, ncclComm_t comm) {
    host_call_t *record = &entry->record;
    bool known = comm != NULL && atomic_load_explicit(&comm->magic, memory_order_relaxed) == HOST_COMM_MAGIC;
    entry->claimed = known && host_misuse_watched() && host_misuse_claim(comm, function) ? comm : NULL;
    record->function[0] = '\0';
    record->rank = known ? comm->rank : -1;
    if (host_journal_on()) {
        int rank = record->rank;
        memset(record, 0, sizeof *record);
        record->rank = rank;
        record->datatype = record->op = record->root = -1;
        strncpy(record->function, function, sizeof record->function - 1);
        record->comm = (uint64_t)(uintptr_t)comm;
        record->group_depth = host_group_depth();
    }
    if (host_function_absent(function))
        return host_fail(ncclInvalidUsage,
                         "%s: the host engine imitates NCCL %d.%d.%d, which has no such function", function,
                         host_nccl_version() / 10000, host_nccl_version() / 100 % 100,
                         host_nccl_version() % 100);
    return host_call_fault(function, known ? comm : NULL);
}

ncclResult_t host_entry_end(host_entry_t *entry, ncclResult_t result) {
    host_call_t *record = &entry->record;
    if (entry->claimed != NULL)
        host_misuse_unclaim(entry->claimed);
    if (record->function[0] == '\0')
        return result;
    int device = -1;
    if (host_current_device(&device, false) != CUDA_SUCCESS)
        device = -1;
    record->device = device;
    record->time_ns = (uint64_t)host_now_ns();
    record->thread = (uint64_t)syscall(SYS_gettid);
    record->result = (int32_t)result;
    host_journal_add(record);
    return result;
}

/* ---- texts --------------------------------------------------------------------------------------- */

/* NCCL's own words, which programs and tests compare. */
const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[ncclNumResults] = {
        [ncclSuccess] = "no error",
        [ncclUnhandledCudaError] = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        [ncclSystemError] = "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        [ncclInternalError] = "internal error - please report this issue to the NCCL developers",
        [ncclInvalidArgument] = "invalid argument (run with NCCL_DEBUG=WARN for details)",
        [ncclInvalidUsage] = "invalid usage (run with NCCL_DEBUG=WARN for details)",
        [ncclRemoteError] = "remote process exited or there was a network error",
        [ncclInProgress] = "NCCL operation in progress",
        [ncclTimeout] = "timeout",
    };
    if ((int)result < 0 || result >= ncclNumResults)
        return "unknown result code";
    return texts[result];
}

/* The text belongs to the process, so that any communicator, or none, is as good as another. */
const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return host_last_error_text();
}

/* ---- memory -------------------------------------------------------------------------------------- */

ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
    host_entry_t entry;
    int device;
    ncclResult_t result = host_entry_begin(&entry, "ncclMemAlloc", NULL);
    if (result == ncclSuccess) {
        CUresult status = ptr == NULL ? CUDA_ERROR_INVALID_VALUE : host_current_device(&device, true);
        if (status == CUDA_SUCCESS && size == 0)
            *ptr = NULL;
        else if (status == CUDA_SUCCESS)
            status = host_memory_allocate(device, size, CU_MEMORYTYPE_DEVICE, true, ptr);
        if (status != CUDA_SUCCESS)
            result = host_fail(ncclUnhandledCudaError, "ncclMemAlloc: CUDA error %d", (int)status);
    }
    return host_entry_end(&entry, result);
}

ncclResult_t ncclMemFree(void *ptr) {
    host_entry_t entry;
    int device;
    ncclResult_t result = host_entry_begin(&entry, "ncclMemFree", NULL);
    if (result == ncclSuccess) {
        CUresult status = host_current_device(&device, true);
        if (status == CUDA_SUCCESS && ptr != NULL)
            status = host_memory_free(ptr);
        if (status != CUDA_SUCCESS)
            result = host_fail(ncclUnhandledCudaError, "ncclMemFree: CUDA error %d", (int)status);
    }
    return host_entry_end(&entry, result);
}

/* ---- registration -------------------------------------------------------------------------------- */

/* Bookkeeping only: nothing gets faster by it yet, but a handle is checked as NCCL does. */
typedef struct registration {
    struct registration *next;
    ncclComm_t comm;
} registration_t;

static pthread_mutex_t registrations_lock = PTHREAD_MUTEX_INITIALIZER;
static registration_t *registrations;

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommRegister", comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, "ncclCommRegister");
    if (result == ncclSuccess && (buff == NULL || size == 0 || handle == NULL))
        result = host_fail(ncclInvalidArgument, "ncclCommRegister: buffer %p of %zu bytes, handle %p", buff,
                           size, (void *)handle);
    if (result == ncclSuccess) {
        registration_t *made = calloc(1, sizeof *made);
        if (made == NULL) {
            result = host_fail(ncclSystemError, "out of memory");
        } else {
            made->comm = comm;
            pthread_mutex_lock(&registrations_lock);
            made->next = registrations;
            registrations = made;
            pthread_mutex_unlock(&registrations_lock);
            *handle = made;
        }
    }
    return host_entry_end(&entry, result);
}

static bool forget_registration(ncclComm_t comm, const void *handle) {
    registration_t *found = NULL;
    pthread_mutex_lock(&registrations_lock);
    for (registration_t **link = &registrations; *link != NULL; link = &(*link)->next)
        if ((*link == handle || handle == NULL) && (*link)->comm == comm) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&registrations_lock);
    free(found);
    return found != NULL;
}

void host_registrations_drop(ncclComm_t comm) {
    while (forget_registration(comm, NULL))
        ;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclCommDeregister", comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, "ncclCommDeregister");
    if (result == ncclSuccess && handle != NULL && !forget_registration(comm, handle))
        result = host_fail(ncclInvalidUsage, "ncclCommDeregister: %p is no registration of this communicator",
                           handle);
    return host_entry_end(&entry, result);
}

/* ---- encryption ---------------------------------------------------------------------------------- */

enum { LEAST_KEY_BYTES = 32, NO_ENCRYPTION = 0, PRESHARED_KEY = 1 };

static _Atomic uint64_t encryption_digest;

/* FNV-1a; it tells two keys apart, and need not hide them. */
static uint64_t digest_of(const char *key) {
    uint64_t digest = UINT64_C(0xcbf29ce484222325);
    for (; *key != '\0'; key++)
        digest = (digest ^ (unsigned char)*key) * UINT64_C(0x100000001b3);
    return digest | 1;
}

uint64_t host_encryption_digest(void) {
    return atomic_load(&encryption_digest);
}

static ncclResult_t set_encryption(const ncclEncryptionConfig_t *given) {
    ncclEncryptionConfig_t config = {.mode = NO_ENCRYPTION};
    size_t size;
    unsigned int magic;
    memcpy(&size, given, sizeof size);
    memcpy(&magic, (const char *)given + offsetof(ncclEncryptionConfig_t, magic), sizeof magic);
    if (magic != NCCL_API_MAGIC)
        return host_fail(ncclInvalidArgument,
                         "ncclSetEncryption: the magic number is %#x; was the struct initialised?", magic);
    memcpy(&config, given, size < sizeof config ? size : sizeof config);
    if (config.mode != NO_ENCRYPTION && config.mode != PRESHARED_KEY)
        return host_fail(ncclInvalidArgument, "ncclSetEncryption: there is no mode %d", config.mode);
    if (config.mode == PRESHARED_KEY && (config.psk == NULL || strlen(config.psk) < LEAST_KEY_BYTES))
        return host_fail(ncclInvalidArgument, "ncclSetEncryption: the key %s",
                         config.psk == NULL ? "is NULL" : "has fewer than 32 bytes");
    atomic_store(&encryption_digest, config.mode == PRESHARED_KEY ? digest_of(config.psk) : 0);
    return ncclSuccess;
}

/* Ranks of a host talk through shared memory here, so that there are no sockets to encrypt; but ranks with
 * different keys do not find each other, as they would not over TLS. */
ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t *config) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclSetEncryption", NULL);
    if (result == ncclSuccess && config != NULL)
        result = set_encryption(config);
    return host_entry_end(&entry, result);
}
