/* Operations whose blocks differ in size (uneven.c). */
#ifndef PYNCCL_UNEVEN_H
#define PYNCCL_UNEVEN_H

#include "bind.h"

/* A rank's block in a buffer of uneven blocks, in NCCL's elements. */
typedef struct {
    size_t count, offset;
} pn_part_t;

/* The blocks of an operation that has uneven ones (uneven.c): what goes to each rank, and what comes from
 * each. Where `asks`, the latter is not known at the call: `own` is told to the others, what they have is
 * written to `told`, and the owner, to whom pn_asking_take gives it, fills in op->recv and `recv` before it
 * answers. */
struct pn_uneven {
    pn_part_t *send, *recv;
    bool asks;
    int64_t *own, *told;
    _Atomic uint32_t answer;
    const char *refusal; /* why there is no room */
    pn_op_t *op;
    struct pn_uneven *next;
};

/* An operation with uneven blocks: the native calls; and its parts' contacts, with device->lock held. */
ncclResult_t pn_uneven_call(const pn_op_t *op, ncclRedOp_t redop, CUstream stream);
bool pn_uneven_contacted(const pn_op_t *op);
void pn_uneven_mark(const pn_op_t *op);
/* The lane's, before the call of one that asks: false if that is its end. Inside the communicator. */
bool pn_uneven_ask(pn_op_t *op);
bool pn_asking_some(void);
pn_uneven_t *pn_asking_take(void); /* all that wait for an answer, chained; for whoever holds the GIL */
enum { PN_ANSWER_NONE, PN_ANSWER_FITS, PN_ANSWER_DOES_NOT };
void pn_asking_answer(pn_uneven_t *uneven, bool fits);

#endif
