/* The kernels for x86-64 processors with AVX2. No multiply-add: it would round otherwise than the others. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define HOST_TABLE host_arithmetic_avx2
#include "reduce_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
