/* Prototypes of every function in symbols.h and rest.h: what an engine includes before it defines them.
 *
 * With nccl.h or cuda.h included first instead of our own types, this file proves that the lists agree
 * with them (tests/abi): two different declarations of one function do not compile.
 */
#ifndef PYNCCL_PROTOTYPES_H
#define PYNCCL_PROTOTYPES_H

#ifndef PYNCCL_ABI_TYPES_FROM_VENDOR
#include "nccl_abi.h"
#endif
#include "rest.h"
#include "symbols.h"

#define PN_EXPORT __attribute__((visibility("default")))
#define PN_PROTOTYPE(need, since, result, name, parameters) PN_EXPORT result name parameters;
PN_NCCL_SYMBOLS(PN_PROTOTYPE)
PN_CUDA_SYMBOLS(PN_PROTOTYPE)
PN_NCCL_REST(PN_PROTOTYPE)
PN_CUDA_REST(PN_PROTOTYPE)
#undef PN_PROTOTYPE

#endif
