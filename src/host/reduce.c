/* NCCL's arithmetic: integers, binary32 and binary64, the table of all kernels, and its readers. */
#include "reduce.h"

#include <assert.h>
#include <string.h>

/* ---- integers ---------------------------------------------------------------------------------------- */

/* Sum and product wrap modulo 2^bits. They are the same for signed and unsigned numbers, and are computed
 * unsigned, where wrapping is defined. */
#define WRAPPING(name, type, wide)                                                                           \
    static inline type sum_##name(type a, type b) {                                                          \
        return (type)((wide)a + b);                                                                          \
    }                                                                                                        \
    static inline type prod_##name(type a, type b) {                                                         \
        return (type)((wide)a * b);                                                                          \
    }
WRAPPING(u8, uint8_t, uint32_t)
WRAPPING(u32, uint32_t, uint32_t)
WRAPPING(u64, uint64_t, uint64_t)

/* Order and quotient do depend on the sign. C's division truncates towards zero, as NCCL's does; it is done
 * in a type that holds the divisor as well. */
#define ORDERED(name, type, wide)                                                                            \
    static inline type max_##name(type a, type b) {                                                          \
        return a > b ? a : b;                                                                                \
    }                                                                                                        \
    static inline type min_##name(type a, type b) {                                                          \
        return a < b ? a : b;                                                                                \
    }                                                                                                        \
    static void divide_##name(void *values, size_t count, int divisor) {                                     \
        host_##name##_t *into = values;                                                                      \
        for (size_t i = 0; i < count; i++) {                                                                 \
            into[i] = (type)(into[i] / (wide)divisor);                                                       \
        }                                                                                                    \
    }
ORDERED(i8, int8_t, int32_t)
ORDERED(u8, uint8_t, uint32_t)
ORDERED(i32, int32_t, int32_t)
ORDERED(u32, uint32_t, uint32_t)
ORDERED(i64, int64_t, int64_t)
ORDERED(u64, uint64_t, uint64_t)

HOST_COMBINE(sum_u8, host_u8_t)
HOST_COMBINE(prod_u8, host_u8_t)
HOST_SCALE(prod_u8, host_u8_t)
HOST_COMBINE(sum_u32, host_u32_t)
HOST_COMBINE(prod_u32, host_u32_t)
HOST_SCALE(prod_u32, host_u32_t)
HOST_COMBINE(sum_u64, host_u64_t)
HOST_COMBINE(prod_u64, host_u64_t)
HOST_SCALE(prod_u64, host_u64_t)
HOST_COMBINE(max_i8, host_i8_t)
HOST_COMBINE(min_i8, host_i8_t)
HOST_COMBINE(max_u8, host_u8_t)
HOST_COMBINE(min_u8, host_u8_t)
HOST_COMBINE(max_i32, host_i32_t)
HOST_COMBINE(min_i32, host_i32_t)
HOST_COMBINE(max_u32, host_u32_t)
HOST_COMBINE(min_u32, host_u32_t)
HOST_COMBINE(max_i64, host_i64_t)
HOST_COMBINE(min_i64, host_i64_t)
HOST_COMBINE(max_u64, host_u64_t)
HOST_COMBINE(min_u64, host_u64_t)

/* ---- binary32 and binary64 --------------------------------------------------------------------------- */

/* Which NaN a sum or product of NaNs gives is the processor's choice. */
#define PLAIN(name, type)                                                                                    \
    static inline type sum_##name(type a, type b) {                                                          \
        return a + b;                                                                                        \
    }                                                                                                        \
    static inline type prod_##name(type a, type b) {                                                         \
        return a * b;                                                                                        \
    }
PLAIN(f32, float)
PLAIN(f64, double)
HOST_FLOAT_ORDER(f32, uint32_t, int32_t, 0x7f800000u, 0x7fffffffu)
HOST_FLOAT_ORDER(f64, uint64_t, int64_t, UINT64_C(0x7ff0000000000000), UINT64_C(0x7fffffffffffffff))

HOST_COMBINE(sum_f32, host_f32_t)
HOST_COMBINE(prod_f32, host_f32_t)
HOST_SCALE(prod_f32, host_f32_t)
HOST_COMBINE(max_f32, host_u32_t)
HOST_COMBINE(min_f32, host_u32_t)
HOST_COMBINE(sum_f64, host_f64_t)
HOST_COMBINE(prod_f64, host_f64_t)
HOST_SCALE(prod_f64, host_f64_t)
HOST_COMBINE(max_f64, host_u64_t)
HOST_COMBINE(min_f64, host_u64_t)

/* ---- the table --------------------------------------------------------------------------------------- */

#define INTEGER(name, wrapping)                                                                              \
    static const host_arithmetic_t arithmetic_##name = {                                                     \
        .size = sizeof(host_##name##_t),                                                                     \
        .combine = {sum_##wrapping##_combine, prod_##wrapping##_combine, max_##name##_combine,               \
                    min_##name##_combine},                                                                   \
        .scale = prod_##wrapping##_scale,                                                                    \
        .divide = divide_##name,                                                                             \
    };
INTEGER(i8, u8)
INTEGER(u8, u8)
INTEGER(i32, u32)
INTEGER(u32, u32)
INTEGER(i64, u64)
INTEGER(u64, u64)

static const host_arithmetic_t arithmetic_f32 = {
    .size = sizeof(float),
    .combine = {sum_f32_combine, prod_f32_combine, max_f32_combine, min_f32_combine},
    .scale = prod_f32_scale,
};
static const host_arithmetic_t arithmetic_f64 = {
    .size = sizeof(double),
    .combine = {sum_f64_combine, prod_f64_combine, max_f64_combine, min_f64_combine},
    .scale = prod_f64_scale,
};

/* The one place where a type and an operation meet their kernel. Kernels for a particular processor make
 * another table of this shape, to be chosen in arithmetic_of. */
static const host_arithmetic_t *const portable[ncclNumTypes] = {
    [ncclInt8] = &arithmetic_i8,
    [ncclUint8] = &arithmetic_u8,
    [ncclInt32] = &arithmetic_i32,
    [ncclUint32] = &arithmetic_u32,
    [ncclInt64] = &arithmetic_i64,
    [ncclUint64] = &arithmetic_u64,
    [ncclFloat16] = &host_arithmetic_f16,
    [ncclFloat32] = &arithmetic_f32,
    [ncclFloat64] = &arithmetic_f64,
    [ncclBfloat16] = &host_arithmetic_bf16,
    [ncclFloat8e4m3] = &host_arithmetic_e4m3,
    [ncclFloat8e5m2] = &host_arithmetic_e5m2,
};

/* Types and operations come from a collective that has checked them. */
static const host_arithmetic_t *arithmetic_of(ncclDataType_t type) {
    assert((unsigned)type < ncclNumTypes);
    return portable[type];
}

/* Also asked before anything is checked: 0 for what is no type. */
size_t host_type_size(ncclDataType_t type) {
    return (unsigned)type < ncclNumTypes ? arithmetic_of(type)->size : 0;
}

void host_reduce(void *accumulator, const void *value, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    assert((unsigned)op <= ncclMin);
    arithmetic_of(type)->combine[op](accumulator, value, count);
}

void host_premultiply(void *values, const void *source, size_t count, ncclDataType_t type,
                      const void *scalar) {
    arithmetic_of(type)->scale(values, source, count, scalar);
}

void host_divide(void *values, size_t count, ncclDataType_t type, int ranks) {
    const host_arithmetic_t *arithmetic = arithmetic_of(type);
    assert(arithmetic->divide != NULL && ranks > 0);
    arithmetic->divide(values, count, ranks);
}

/* NCCL rounds 1/n to binary32 on the way to every type but binary64. */
void host_average_factor(void *scalar, ncclDataType_t type, int ranks) {
    const double exact = 1.0 / ranks;
    const float single = (float)exact;
    union {
        double f64;
        float f32;
        uint16_t u16;
        uint8_t u8;
    } factor;
    switch (type) {
    case ncclFloat64:
        factor.f64 = exact;
        break;
    case ncclFloat32:
        factor.f32 = single;
        break;
    case ncclFloat16:
        factor.u16 = host_f16_from_f32(single);
        break;
    case ncclBfloat16:
        factor.u16 = host_bf16_from_f32(single);
        break;
    case ncclFloat8e4m3:
        factor.u8 = host_e4m3_from_f32(single);
        break;
    case ncclFloat8e5m2:
        factor.u8 = host_e5m2_from_f32(single);
        break;
    default:
        assert(!"integers are averaged with host_divide");
        return;
    }
    memcpy(scalar, &factor, host_type_size(type));
}
