/* Reduction operators: the built-in ones, and premultiplied sums made by a user. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

/* A handle says to which communicator it belongs, so that another one does not know it. */
enum { HANDLE_MASK = 0x3fffffff };

static uint32_t salt_of(ncclComm_t comm) {
    uint64_t mixed = (uint64_t)(uintptr_t)comm * 0x9e3779b97f4a7c15ull;
    return (uint32_t)(mixed >> 32) & HANDLE_MASK;
}

static host_operator_t *find(ncclComm_t comm, ncclRedOp_t op) {
    uint32_t index = ((uint32_t)op - (uint32_t)ncclNumOps) ^ salt_of(comm);
    if (op < ncclNumOps || index >= (uint32_t)comm->operator_count || !comm->operators[index].used)
        return NULL;
    return &comm->operators[index];
}

static bool is_integer(ncclDataType_t type) {
    return type <= ncclUint64;
}

static void resolve_average(ncclComm_t comm, host_task_t *task) {
    task->op = ncclAvg;
    task->divided = is_integer(task->type);
    task->scaled = !task->divided;
    if (task->scaled)
        host_average_factor(&task->factor, task->type, comm->ranks);
}

/* In the order of NCCL's checks this comes after root and type: range, known operator; the type of a user's
 * operator is compared later, by the caller, when the count is not zero. */
ncclResult_t host_operator_resolve(ncclComm_t comm, host_task_t *task, const char *function) {
    int code = (int)task->op;
    if (code < 0)
        return host_fail(ncclInvalidArgument, "%s: %d is no reduction operator", function, code);
    if (task->op == ncclAvg)
        resolve_average(comm, task);
    if (task->op < ncclNumOps)
        return ncclSuccess;
    host_operator_t *made = find(comm, task->op);
    if (made == NULL)
        return host_fail(ncclInvalidArgument, "%s: operator %d is unknown to this communicator", function,
                         code);
    task->op = HOST_USER_OP;
    task->scaled = true;
    task->scalar = made->scalar;
    task->factor = made->factor;
    if (task->count != 0 && made->type != task->type)
        return host_fail(ncclInvalidArgument, "%s: the operator is for type %d, the data are of type %d",
                         function, (int)made->type, (int)task->type);
    return ncclSuccess;
}

static ncclResult_t new_slot(ncclComm_t comm, int *slot) {
    for (*slot = 0; *slot < comm->operator_count; ++*slot)
        if (!comm->operators[*slot].used)
            return ncclSuccess;
    int wanted = comm->operator_count == 0 ? 4 : 2 * comm->operator_count;
    host_operator_t *grown = realloc(comm->operators, (size_t)wanted * sizeof *grown);
    if (grown == NULL)
        return host_fail(ncclSystemError, "out of memory");
    memset(grown + comm->operator_count, 0, (size_t)(wanted - comm->operator_count) * sizeof *grown);
    comm->operators = grown;
    comm->operator_count = wanted;
    return ncclSuccess;
}

static ncclResult_t create(ncclComm_t comm, ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                           ncclScalarResidence_t residence) {
    static const char name[] = "ncclRedOpCreatePreMulSum";
    ncclResult_t result = host_comm_check(comm, name);
    if (result == ncclSuccess)
        result = host_comm_ready(comm, name);
    if (result != ncclSuccess)
        return result;
    if (op == NULL || scalar == NULL)
        return host_fail(ncclInvalidArgument, "%s: the operator or the scalar is NULL", name);
    if ((int)type < 0 || type >= ncclNumTypes)
        return host_fail(ncclInternalError, "%s: %d is no data type", name, (int)type);
    int slot;
    result = new_slot(comm, &slot);
    if (result != ncclSuccess)
        return result;
    host_operator_t *made = &comm->operators[slot];
    *made = (host_operator_t){.used = true, .type = type};
    if (residence == ncclScalarHostImmediate)
        memcpy(&made->factor, scalar, host_type_size(type));
    else
        made->scalar = scalar;
    *op = (ncclRedOp_t)((uint32_t)ncclNumOps + ((uint32_t)slot ^ salt_of(comm)));
    return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclRedOpCreatePreMulSum", comm);
    entry.record.datatype = (int32_t)datatype;
    if (result == ncclSuccess)
        result = create(comm, op, scalar, datatype, residence);
    return host_entry_end(&entry, result);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclRedOpDestroy", comm);
    entry.record.op = (int32_t)op;
    if (result == ncclSuccess && (int)op >= 0 && op < ncclNumOps)
        result = host_fail(ncclInvalidArgument, "ncclRedOpDestroy: operator %d is built in", (int)op);
    if (result == ncclSuccess && (int)op < 0)
        result = host_fail(ncclInvalidArgument, "ncclRedOpDestroy: %d is no reduction operator", (int)op);
    if (result == ncclSuccess)
        result = host_comm_check(comm, "ncclRedOpDestroy");
    host_operator_t *made = result == ncclSuccess ? find(comm, op) : NULL;
    if (result == ncclSuccess && made == NULL)
        result = host_fail(ncclInvalidArgument,
                           "ncclRedOpDestroy: operator %d is unknown to this communicator", (int)op);
    if (made != NULL)
        made->used = false;
    return host_entry_end(&entry, result);
}
