/* Registered memory and windows: made and ended through the communicator's lane, in call order.
 *
 * 1. A registration's lease is an operation that is never issued: it holds the buffer, and is released when
 *    the registration has ended. Between the two it lies in comm->registrations.
 * 2. Registering memory is local and does not wait for the device, so that it can be done while collectives
 *    run. Making a window is collective; like a split it begins when our operations on the device have ended.
 *    So does the end of either, since an operation may still use the memory.
 * 3. What a communicator leaves registered is deregistered by its close, and goes with the handle in an
 * abort; the leases are released behind that.
 * 4. Operations on registered memory go through the lane: NCCL may choose another algorithm for them, whose
 *    first use waits for the peers.
 */
#define _GNU_SOURCE
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool inside(const pn_registration_t *registration, const void *address) {
    return (uintptr_t)address - (uintptr_t)registration->base < registration->bytes;
}

bool pn_on_registered(const pn_op_t *op) {
    const pn_link_t *list = &op->comm->registrations;
    for (const pn_link_t *at = list->next; at != list; at = at->next) {
        const pn_registration_t *one = PN_OWNER(at, const pn_registration_t, in_comm);
        if (inside(one, op->send) || inside(one, op->recv))
            return true;
    }
    return false;
}

static ncclResult_t make(pn_comm_t *comm, pn_registration_t *registration, const char **function) {
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    void *base = registration->base;
    if (!registration->is_window) {
        *function = "ncclCommRegister";
        return nccl->ncclCommRegister(comm->handle, base, registration->bytes, &registration->handle);
    }
    *function = "ncclCommWindowRegister";
    return nccl->ncclCommWindowRegister(comm->handle, base, registration->bytes, &registration->window,
                                        registration->flags);
}

static ncclResult_t unmake(pn_comm_t *comm, pn_registration_t *registration, const char **function) {
    const pn_nccl_t *nccl = &comm->device->engine->nccl;
    if (registration->is_window) {
        *function = "ncclCommWindowDeregister";
        return nccl->ncclCommWindowDeregister(comm->handle, registration->window);
    }
    *function = "ncclCommDeregister";
    return registration->handle ? nccl->ncclCommDeregister(comm->handle, registration->handle) : ncclSuccess;
}

/* Let the owner of the buffer have it back. Out of the list already; no lock held. */
static void end_lease(pn_registration_t *registration) {
    registration->lease->ended_ns = pn_now_ns();
    atomic_fetch_sub(&pn_counts.registrations, 1);
    pn_op_give(registration->lease);
}

void pn_run_register(pn_task_t *task, pn_comm_t *comm) {
    pn_op_t *op = (pn_op_t *)task;
    pn_registration_t *registration = op->argument;
    pn_device_t *device = comm->device;
    pn_outcome_t why = {PN_FROM_NCCL, 0, NULL};
    char detail[PN_DETAIL_BYTES] = "";
    pn_enter_t saved;
    if ((registration->is_window && !pn_drained(comm, false)) || !pn_go_inside(comm))
        return;
    if ((why.code = (int)pn_enter(device, &saved)) != 0) {
        why.source = PN_FROM_CUDA;
        why.function = "cuCtxSetCurrent";
    } else {
        why.code = (int)make(comm, registration, &why.function);
        pn_leave(device, &saved);
        if (why.code != 0) {
            snprintf(detail, sizeof detail, "%s", device->engine->nccl.ncclGetLastError(comm->handle));
            pn_repair_depth(comm);
        } else if (registration->is_window && !registration->window) {
            why.source = PN_FROM_MISSING; /* success without a window: this system has none */
        }
    }
    if (why.source == PN_FROM_NCCL && why.code == 0) {
        pthread_mutex_lock(&device->lock);
        /* Once it has failed, its owner keeps the buffer until the abort, which ends the registration too. */
        bool told = comm->state <= PN_CLOSING && !pn_op_finished(op);
        if (told)
            pn_link_append(&comm->registrations, &registration->in_comm);
        pthread_mutex_unlock(&device->lock);
        if (told)
            atomic_fetch_add(&pn_counts.registrations, 1);
        pn_end_control(op, (pn_outcome_t){PN_OK, 0, NULL}, NULL);
    } else if (pn_harmless(why)) {
        pn_end_control(op, why, detail);
    } else {
        pn_comm_fail(comm, op->seq, why, PN_FAILED, detail);
    }
    pn_come_out(comm);
}

void pn_run_deregister(pn_task_t *task, pn_comm_t *comm) {
    pn_op_t *op = (pn_op_t *)task;
    pn_registration_t *registration = op->argument;
    pn_device_t *device = comm->device;
    pn_outcome_t why = {PN_FROM_NCCL, 0, NULL};
    char detail[PN_DETAIL_BYTES] = "";
    pn_enter_t saved;
    if (!pn_drained(comm, false) || !pn_go_inside(comm))
        return;
    if ((why.code = (int)pn_enter(device, &saved)) != 0) {
        why.source = PN_FROM_CUDA;
        why.function = "cuCtxSetCurrent";
    } else {
        why.code = (int)unmake(comm, registration, &why.function);
        pn_leave(device, &saved);
    }
    if (why.code != 0) {
        /* Nobody knows whether the device still reaches the memory: it stays the communicator's. */
        snprintf(detail, sizeof detail, "%s", device->engine->nccl.ncclGetLastError(comm->handle));
        pn_end_control(op, why, detail);
    } else {
        pthread_mutex_lock(&device->lock);
        pn_link_remove(&registration->in_comm);
        pthread_mutex_unlock(&device->lock);
        pn_end_control(op, (pn_outcome_t){PN_OK, 0, NULL}, NULL);
        end_lease(registration);
    }
    pn_come_out(comm);
}

void pn_registrations_close(pn_comm_t *comm) {
    const char *function;
    for (const pn_link_t *at = comm->registrations.next; at != &comm->registrations; at = at->next)
        unmake(comm, PN_OWNER(at, pn_registration_t, in_comm), &function);
}

void pn_registrations_gone(pn_comm_t *comm) {
    pn_link_t ended;
    pn_link_init(&ended);
    pthread_mutex_lock(&comm->device->lock);
    while (!pn_link_empty(&comm->registrations)) {
        pn_link_t *link = comm->registrations.next;
        pn_link_remove(link);
        pn_link_append(&ended, link);
    }
    pthread_mutex_unlock(&comm->device->lock);
    while (!pn_link_empty(&ended)) {
        pn_registration_t *one = PN_OWNER(ended.next, pn_registration_t, in_comm);
        pn_link_remove(&one->in_comm);
        end_lease(one);
    }
}
