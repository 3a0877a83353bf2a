/* Windows: memory of ncclMemAlloc that all ranks of a communicator register in one call, and reach then. */
#include "nccl_group.h"
#include "nccl_window.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t windows_lock = PTHREAD_MUTEX_INITIALIZER; /* all lists of windows */
static ncclWindow_t all_windows;

/* ---- reaching the memory of another rank --------------------------------------------------------- */

ncclResult_t host_window_map(const host_extent_t *extent, host_reach_t *reach) {
    *reach = (host_reach_t){.bytes = extent->bytes};
    int error = host_share_map(&extent->share, &reach->map);
    if (error != 0) {
        reach->map = NULL;
        return host_fail(ncclSystemError, "memory of pid %d cannot be mapped: %s", extent->share.pid,
                         strerror(error));
    }
    reach->map_bytes = extent->share.bytes;
    reach->base = (char *)reach->map + extent->offset;
    atomic_fetch_add(&host_live_segments, 1);
    return ncclSuccess;
}

static bool is_own(const host_share_t *share) {
    uint64_t start;
    return share->pid == getpid() && host_process_start(share->pid, &start) && start == share->start;
}

void host_window_lose(host_reach_t *reach) {
    if (reach->map == NULL)
        return;
    munmap(reach->map, reach->map_bytes);
    reach->map = NULL;
    atomic_fetch_sub(&host_live_segments, 1);
}

/* ---- the exchange -------------------------------------------------------------------------------- */

static host_post_t *post_of(host_clique_t *clique, int rank, uint32_t number) {
    return &host_segment_area(clique->head, rank)->post[number & 1];
}

/* Posts of exchange e are read by all before anybody can write those of exchange e + 2. */
ncclResult_t host_window_exchange(ncclComm_t comm, const host_extent_t *own, ncclResult_t failure,
                                  host_extent_t *all) {
    host_clique_t *clique = atomic_load(&comm->clique);
    uint32_t number = ++comm->posts;
    if (failure != ncclSuccess && host_config()->mode == HOST_FAITHFUL)
        return failure; /* the others wait for ever */
    host_post_t *post = post_of(clique, comm->rank, number);
    _Static_assert(sizeof *own <= sizeof post->words, "a post holds the description of a memory");
    memcpy(post->words, own, sizeof *own);
    post->failure = (int32_t)failure;
    atomic_store(&post->told, number);
    host_clique_ring(clique, comm->rank);
    ncclResult_t heard = failure;
    for (int rank = 0; rank < comm->ranks;) {
        uint32_t seen = host_bell_look(&comm->area->bell);
        post = post_of(clique, rank, number);
        if (atomic_load(&post->told) != number) {
            ncclResult_t result = host_comm_nap(comm, &comm->area->bell, seen);
            if (result != ncclSuccess)
                return result;
            continue;
        }
        memcpy(&all[rank], post->words, sizeof all[rank]);
        if (heard == ncclSuccess && post->failure != ncclSuccess)
            heard = host_fail(ncclRemoteError, "rank %d failed to register its memory", rank);
        rank++;
    }
    return heard;
}

/* ---- a communicator's list ----------------------------------------------------------------------- */

static ncclWindow_t find_locked(ncclComm_t comm, ncclWindow_t handle) {
    for (ncclWindow_t window = comm->windows; window != NULL; window = window->next)
        if (window == handle)
            return window;
    return NULL;
}

ncclWindow_t host_window_hold(ncclComm_t comm, ncclWindow_t handle) {
    pthread_mutex_lock(&windows_lock);
    ncclWindow_t window = find_locked(comm, handle);
    if (window != NULL)
        atomic_fetch_add(&window->refs, 1);
    pthread_mutex_unlock(&windows_lock);
    return window;
}

ncclWindow_t host_window_around(ncclComm_t comm, const void *address) {
    ncclWindow_t found = NULL;
    pthread_mutex_lock(&windows_lock);
    for (ncclWindow_t window = comm->windows; window != NULL && found == NULL; window = window->next) {
        const host_reach_t *own = &window->reach[comm->rank];
        if ((uintptr_t)address - (uintptr_t)own->base < own->bytes)
            found = window;
    }
    if (found != NULL)
        atomic_fetch_add(&found->refs, 1);
    pthread_mutex_unlock(&windows_lock);
    return found;
}

void host_window_release(ncclWindow_t window) {
    if (atomic_fetch_sub(&window->refs, 1) != 1)
        return;
    for (int rank = 0; rank < window->ranks; rank++)
        host_window_lose(&window->reach[rank]);
    free(window);
}

bool host_window_hold_any(ncclWindow_t handle) {
    pthread_mutex_lock(&windows_lock);
    ncclWindow_t window = all_windows;
    while (window != NULL && window != handle)
        window = window->next_of_all;
    if (window != NULL)
        atomic_fetch_add(&window->refs, 1);
    pthread_mutex_unlock(&windows_lock);
    return window != NULL;
}

static void link_window(ncclComm_t comm, ncclWindow_t window) {
    pthread_mutex_lock(&windows_lock);
    window->next = comm->windows;
    comm->windows = window;
    window->next_of_all = all_windows;
    all_windows = window;
    pthread_mutex_unlock(&windows_lock);
}

static bool unlink_window(ncclComm_t comm, ncclWindow_t window) {
    pthread_mutex_lock(&windows_lock);
    ncclWindow_t *link = &comm->windows;
    while (*link != NULL && *link != window)
        link = &(*link)->next;
    bool found = *link != NULL;
    if (found) {
        *link = window->next;
        for (link = &all_windows; *link != window;)
            link = &(*link)->next_of_all;
        *link = window->next_of_all;
    }
    pthread_mutex_unlock(&windows_lock);
    return found;
}

void host_windows_free(ncclComm_t comm) {
    for (ncclWindow_t window = comm->windows; window != NULL; window = comm->windows) {
        unlink_window(comm, window);
        host_window_release(window);
    }
    host_signals_free(comm);
}

/* ---- registration -------------------------------------------------------------------------------- */

static ncclResult_t describe(ncclComm_t comm, void *buffer, size_t bytes, host_extent_t *place) {
    host_memory_t memory;
    host_memory_find(buffer, &memory);
    size_t offset = (size_t)((char *)buffer - (char *)memory.base);
    if (!memory.own || memory.share.bytes == 0)
        return host_fail(ncclUnhandledCudaError,
                         "rank %d: a window needs memory of ncclMemAlloc, and %p is not", comm->rank, buffer);
    if (offset % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
        return host_fail(ncclInvalidArgument,
                         "rank %d: the window begins %zu bytes into its memory, not at a multiple of %d",
                         comm->rank, offset, NCCL_WIN_REQUIRED_ALIGNMENT);
    if (bytes > memory.bytes - offset)
        return host_fail(ncclUnhandledCudaError,
                         "rank %d: the window has %zu bytes, its memory has %zu from there on", comm->rank,
                         bytes, memory.bytes - offset);
    *place = (host_extent_t){.share = memory.share,
                             .start = (uint64_t)(uintptr_t)buffer,
                             .offset = memory.offset + offset,
                             .bytes = bytes};
    return ncclSuccess;
}

/* Memory of this process is reached as it is. */
static ncclResult_t reach_all(ncclWindow_t window, const host_extent_t *extents) {
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < window->ranks && result == ncclSuccess; rank++)
        if (is_own(&extents[rank].share))
            window->reach[rank] =
                (host_reach_t){.base = (char *)(uintptr_t)extents[rank].start, .bytes = extents[rank].bytes};
        else
            result = host_window_map(&extents[rank], &window->reach[rank]);
    return result;
}

static ncclResult_t make_window(ncclComm_t comm, const host_window_job_t *wanted) {
    size_t ranks = (size_t)comm->ranks;
    host_extent_t own = {0}, none = {0};
    ncclResult_t result = describe(comm, wanted->buffer, wanted->bytes, &own);
    ncclWindow_t window = calloc(1, sizeof *window + ranks * sizeof window->reach[0]);
    host_extent_t *extents = calloc(ranks, sizeof *extents);
    if (result == ncclSuccess && (window == NULL || extents == NULL))
        result = host_fail(ncclSystemError, "out of memory");
    if (extents == NULL) {
        free(window);
        return result;
    }
    result = host_window_exchange(comm, &own, result, extents);
    if (result == ncclSuccess) {
        window->refs = 1;
        window->flags = wanted->flags;
        window->rank = comm->rank;
        window->ranks = comm->ranks;
        result = reach_all(window, extents);
        /* Nobody goes on before all have mapped what may be freed at any time afterwards. */
        result = host_window_exchange(comm, &none, result, extents);
    }
    free(extents);
    if (result != ncclSuccess) {
        if (window != NULL && window->ranks != 0)
            host_window_release(window);
        else
            free(window);
        return result;
    }
    link_window(comm, window);
    __atomic_store_n(wanted->out, window, __ATOMIC_RELEASE);
    return ncclSuccess;
}

/* Registrations of one communicator in a group are made in the order of the calls, on all ranks. */
static ncclResult_t wait_for_turn(ncclComm_t comm, uint32_t turn) {
    for (;;) {
        uint32_t seen = host_bell_look(&comm->quiet);
        if (atomic_load(&comm->window_turn) == turn)
            return ncclSuccess;
        ncclResult_t result = host_comm_nap(comm, &comm->quiet, seen);
        if (result != ncclSuccess)
            return result;
    }
}

static void end_turn(ncclComm_t comm) {
    atomic_fetch_add(&comm->window_turn, 1);
    host_bell_ring(&comm->quiet);
}

static ncclResult_t run_register(host_job_t *job) {
    ncclComm_t comm = job->comm;
    if (!host_comm_enter_call(comm)) {
        end_turn(comm);
        return host_fail(ncclInternalError, "%s: the communicator is aborted", job->function);
    }
    ncclResult_t result = wait_for_turn(comm, job->window.turn);
    /* Host RMA is set up with the first window. */
    if (result == ncclSuccess && comm->signals == NULL && comm->config.numRmaCtx > 0)
        result = host_signals_make(comm);
    if (result == ncclSuccess)
        result = make_window(comm, &job->window);
    end_turn(comm);
    host_comm_leave_call(comm);
    return result;
}

static void undo_register(host_job_t *job) {
    end_turn(job->comm);
}

static bool is_being_made(ncclComm_t comm) {
    if (atomic_load(&comm->state) != ncclInProgress)
        return false;
    host_clique_t *clique = atomic_load(&comm->clique);
    return clique == NULL || atomic_load(&clique->head->ready) < (uint32_t)comm->ranks;
}

static ncclResult_t queue_register(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *out,
                                   int flags) {
    static const char name[] = "ncclCommWindowRegister";
    if (is_being_made(comm))
        return ncclSuccess; /* whether it has windows is not known yet: as if it had none */
    ncclResult_t result = host_comm_ready(comm, name);
    if (result != ncclSuccess)
        return result;
    host_job_t job = {
        .run = run_register,
        .undo = undo_register,
        .comm = comm,
        .function = name,
        .window = {.buffer = buffer, .bytes = bytes, .out = out, .flags = flags, .turn = comm->window_calls}};
    result = host_group_add_job(&job);
    if (result == ncclSuccess)
        comm->window_calls++;
    return result;
}

static ncclResult_t check_arguments(ncclComm_t comm, const void *buffer, size_t bytes, ncclWindow_t *out) {
    static const char name[] = "ncclCommWindowRegister";
    ncclResult_t result = host_comm_check(comm, name);
    if (result != ncclSuccess)
        return result;
    if (out == NULL)
        return host_fail(ncclInvalidArgument, "%s: the pointer for the window is NULL", name);
    *out = NULL;
    if (buffer == NULL || bytes == 0)
        return host_fail(ncclInvalidArgument, "%s: buffer %p of %zu bytes", name, buffer, bytes);
    return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                    int winFlags) {
    static const char name[] = "ncclCommWindowRegister";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    entry.record.count = size;
    entry.record.object = (uint64_t)(uintptr_t)buff;
    if (result == ncclSuccess)
        result = check_arguments(comm, buff, size, win);
    if (result == ncclSuccess && host_config()->windows) {
        host_group_start();
        result = host_comm_pin(comm, name);
        if (result == ncclSuccess) {
            result = queue_register(comm, buff, size, win, winFlags);
            host_comm_unpin(comm);
        }
        result = host_group_close(result);
        if (result == ncclInProgress) /* of a non-blocking communicator, which is polled */
            result = ncclSuccess;
    }
    return host_entry_end(&entry, result);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
    static const char name[] = "ncclCommWindowDeregister";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, name);
    if (result == ncclSuccess && win != NULL) {
        if (unlink_window(comm, win))
            host_window_release(win);
        else
            result =
                host_fail(ncclInternalError, "%s: %p is no window of this communicator", name, (void *)win);
    }
    return host_entry_end(&entry, result);
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr) {
    static const char name[] = "ncclWinGetUserPtr";
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, name, comm);
    if (result == ncclSuccess)
        result = host_comm_check(comm, name);
    if (result == ncclSuccess && outUserPtr == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the pointer for the answer is NULL", name);
    if (result == ncclSuccess && !host_config()->windows) {
        *outUserPtr = NULL;
        return host_entry_end(&entry, result);
    }
    if (result == ncclSuccess && win == NULL)
        result = host_fail(ncclInvalidArgument, "%s: the window is NULL", name);
    if (result == ncclSuccess) {
        ncclWindow_t window = host_window_hold(comm, win);
        if (window == NULL) {
            result =
                host_fail(ncclInternalError, "%s: %p is no window of this communicator", name, (void *)win);
        } else {
            *outUserPtr = window->reach[comm->rank].base;
            host_window_release(window);
        }
    }
    return host_entry_end(&entry, result);
}
