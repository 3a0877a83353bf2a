/* NCCL's arithmetic, one loop for each type and operation. It is compiled once for each set of instructions:
 * whoever includes it says the name of the table in HOST_TABLE, and nothing else of it can be seen outside.
 */
#include "reduce.h"

/* Element i of the output depends on element i of the inputs alone, so an output that is also an input
 * does not stop vectorisation. */
#ifdef __clang__
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

/* Define step##_combine, the kernel of a step(a, b). */
#define COMBINE(step, type)                                                                                  \
    static void step##_combine(void *result, const void *a, const void *b, size_t count) {                   \
        type *into = result;                                                                                 \
        const type *left = a, *right = b;                                                                    \
        ELEMENTWISE for (size_t i = 0; i < count; i++) {                                                     \
            into[i] = step(left[i], right[i]);                                                               \
        }                                                                                                    \
    }

/* Define step##_scale, where the second operand is the same for all elements. */
#define SCALE(step, type)                                                                                    \
    static void step##_scale(void *values, const void *source, size_t count, const void *scalar) {           \
        type *into = values;                                                                                 \
        const type *from = source;                                                                           \
        const type factor = *(const type *)scalar;                                                           \
        ELEMENTWISE for (size_t i = 0; i < count; i++) {                                                     \
            into[i] = step(from[i], factor);                                                                 \
        }                                                                                                    \
    }

/* ---- integers ---------------------------------------------------------------------------------------- */

/* Sum and product wrap modulo 2^bits. They are the same for signed and unsigned numbers, and are computed
 * unsigned, where wrapping is defined. */
#define WRAPPING(name, type, wide)                                                                           \
    static inline type sum_##name(type a, type b) {                                                          \
        return (type)((wide)a + b);                                                                          \
    }                                                                                                        \
    static inline type prod_##name(type a, type b) {                                                         \
        return (type)((wide)a * b);                                                                          \
    }                                                                                                        \
    COMBINE(sum_##name, host_##name##_t)                                                                     \
    COMBINE(prod_##name, host_##name##_t)                                                                    \
    SCALE(prod_##name, host_##name##_t)
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
    }                                                                                                        \
    COMBINE(max_##name, host_##name##_t)                                                                     \
    COMBINE(min_##name, host_##name##_t)
ORDERED(i8, int8_t, int32_t)
ORDERED(u8, uint8_t, uint32_t)
ORDERED(i32, int32_t, int32_t)
ORDERED(u32, uint32_t, uint32_t)
ORDERED(i64, int64_t, int64_t)
ORDERED(u64, uint64_t, uint64_t)

/* ---- floating numbers -------------------------------------------------------------------------------- */

/* Smaller and larger of two floating numbers, on their bits: a NaN loses to a number, two NaNs give the
 * canonical one, and -0 is below +0, as the GPU's min and max have it. Flipping all but the sign of the
 * negative numbers makes their bits ascend as integers. `top` is the largest magnitude that is not a NaN. */
#define FLOAT_ORDER(name, bits_t, order_t, top, nan)                                                         \
    static inline order_t order_##name(bits_t a) {                                                           \
        const bits_t flip = (bits_t)((order_t)a >> (8 * sizeof(order_t) - 1));                               \
        return (order_t)(a ^ (bits_t)(flip >> 1));                                                           \
    }                                                                                                        \
    static inline bits_t number_##name(bits_t a, bits_t b, bits_t chosen) {                                  \
        const bits_t magnitude = (bits_t) - 1 >> 1;                                                          \
        const bool a_is_nan = (bits_t)(a & magnitude) > top;                                                 \
        const bool b_is_nan = (bits_t)(b & magnitude) > top;                                                 \
        chosen = a_is_nan ? b : chosen;                                                                      \
        chosen = b_is_nan ? a : chosen;                                                                      \
        return a_is_nan & b_is_nan ? nan : chosen;                                                           \
    }                                                                                                        \
    static inline bits_t min_##name(bits_t a, bits_t b) {                                                    \
        return number_##name(a, b, order_##name(a) < order_##name(b) ? a : b);                               \
    }                                                                                                        \
    static inline bits_t max_##name(bits_t a, bits_t b) {                                                    \
        return number_##name(a, b, order_##name(a) > order_##name(b) ? a : b);                               \
    }

/* Which NaN a sum or product of NaNs gives is the processor's choice. */
#define PLAIN(name, type, bits_t)                                                                            \
    static inline type sum_##name(type a, type b) {                                                          \
        return a + b;                                                                                        \
    }                                                                                                        \
    static inline type prod_##name(type a, type b) {                                                         \
        return a * b;                                                                                        \
    }                                                                                                        \
    COMBINE(sum_##name, host_##name##_t)                                                                     \
    COMBINE(prod_##name, host_##name##_t)                                                                    \
    SCALE(prod_##name, host_##name##_t)                                                                      \
    COMBINE(max_##name, bits_t)                                                                              \
    COMBINE(min_##name, bits_t)
FLOAT_ORDER(f32, uint32_t, int32_t, 0x7f800000u, 0x7fffffffu)
FLOAT_ORDER(f64, uint64_t, int64_t, UINT64_C(0x7ff0000000000000), UINT64_C(0x7fffffffffffffff))
PLAIN(f32, float, host_u32_t)
PLAIN(f64, double, host_u64_t)

/* The narrow types are computed in binary32 and rounded at once to the element type. binary32 has more than
 * twice the digits of binary16 and of bfloat16 and two over, so rounding its sum or product once more gives
 * what a single rounding would have given. That holds below bfloat16's normal range too: a product has 16
 * digits, and where its last one is lost the whole rounds to zero. For the same reason NCCL's way for fp8,
 * half by half and then rounded to fp8, gives what is computed here; the tests go NCCL's way for every pair.
 */
#define NARROW(name, type, bits_t)                                                                           \
    static inline type sum_##name(type a, type b) {                                                          \
        return host_##name##_from_f32(host_f32_from_##name(a) + host_f32_from_##name(b));                    \
    }                                                                                                        \
    static inline type prod_##name(type a, type b) {                                                         \
        return host_##name##_from_f32(host_f32_from_##name(a) * host_f32_from_##name(b));                    \
    }                                                                                                        \
    COMBINE(sum_##name, bits_t)                                                                              \
    COMBINE(prod_##name, bits_t)                                                                             \
    SCALE(prod_##name, bits_t)                                                                               \
    COMBINE(max_##name, bits_t)                                                                              \
    COMBINE(min_##name, bits_t)
FLOAT_ORDER(f16, uint16_t, int16_t, 0x7c00, 0x7fff)
FLOAT_ORDER(bf16, uint16_t, int16_t, 0x7f80, 0x7fff)
FLOAT_ORDER(e4m3, uint8_t, int8_t, 0x7e, 0x7f)
FLOAT_ORDER(infinite_e5m2, uint8_t, int8_t, 0x7c, 0x7f)

/* e5m2 has infinities, and the conversion back from half at the end of a step makes them finite. */
static inline uint8_t finite_e5m2(uint8_t byte) {
    return (uint8_t)((byte & 0x7f) == 0x7c ? byte - 1 : byte);
}

static inline uint8_t min_e5m2(uint8_t a, uint8_t b) {
    return finite_e5m2(min_infinite_e5m2(a, b));
}

static inline uint8_t max_e5m2(uint8_t a, uint8_t b) {
    return finite_e5m2(max_infinite_e5m2(a, b));
}

NARROW(f16, uint16_t, host_u16_t)
NARROW(bf16, uint16_t, host_u16_t)
NARROW(e4m3, uint8_t, host_u8_t)
NARROW(e5m2, uint8_t, host_u8_t)

/* ---- the table --------------------------------------------------------------------------------------- */

#define INTEGER(name, wrapping)                                                                              \
    {.combine = {sum_##wrapping##_combine, prod_##wrapping##_combine, max_##name##_combine,                  \
                 min_##name##_combine},                                                                      \
     .scale = prod_##wrapping##_scale,                                                                       \
     .divide = divide_##name}
#define FLOATING(name)                                                                                       \
    {.combine = {sum_##name##_combine, prod_##name##_combine, max_##name##_combine, min_##name##_combine},   \
     .scale = prod_##name##_scale}

const host_arithmetic_t HOST_TABLE[ncclNumTypes] = {
    [ncclInt8] = INTEGER(i8, u8),     [ncclUint8] = INTEGER(u8, u8),     [ncclInt32] = INTEGER(i32, u32),
    [ncclUint32] = INTEGER(u32, u32), [ncclInt64] = INTEGER(i64, u64),   [ncclUint64] = INTEGER(u64, u64),
    [ncclFloat16] = FLOATING(f16),    [ncclFloat32] = FLOATING(f32),     [ncclFloat64] = FLOATING(f64),
    [ncclBfloat16] = FLOATING(bf16),  [ncclFloat8e4m3] = FLOATING(e4m3), [ncclFloat8e5m2] = FLOATING(e5m2),
};
