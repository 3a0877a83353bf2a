/* The kernels for x86-64 processors with AVX-512. No multiply-add: it would round otherwise than the others.
 */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))),                  \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define HOST_TABLE host_arithmetic_avx512
#include "reduce_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
