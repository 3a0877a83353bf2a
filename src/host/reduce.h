/* Inside the arithmetic room: number formats, and the table that names a kernel for each type and operation.
 *
 * A kernel is a plain loop over one step that has no branches, so that the compiler turns it into vector
 * code for whatever it is told to build for. Nothing here depends on the order of evaluation, on the
 * floating-point environment beyond its default rounding, or on fused multiply-add: where a product is
 * followed by a sum, the product is exact.
 */
#ifndef PYNCCL_HOST_REDUCE_H
#define PYNCCL_HOST_REDUCE_H

#include "host.h"

/* ---- elements in memory ------------------------------------------------------------------------------ */

/* Payloads are bytes of the caller: not necessarily written under these types, and a slice of a byte buffer
 * may start at any address. */
#define HOST_ELEMENT __attribute__((aligned(1), may_alias))
typedef int8_t HOST_ELEMENT host_i8_t;
typedef int32_t HOST_ELEMENT host_i32_t;
typedef int64_t HOST_ELEMENT host_i64_t;
typedef uint8_t HOST_ELEMENT host_u8_t;
typedef uint16_t HOST_ELEMENT host_u16_t;
typedef uint32_t HOST_ELEMENT host_u32_t;
typedef uint64_t HOST_ELEMENT host_u64_t;
typedef float HOST_ELEMENT host_f32_t;
typedef double HOST_ELEMENT host_f64_t;

/* Element i of the output depends on element i of the inputs alone, so an output that is also an input
 * does not stop vectorisation. */
#ifdef __clang__
#define HOST_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define HOST_ELEMENTWISE _Pragma("GCC ivdep")
#endif

/* ---- the table --------------------------------------------------------------------------------------- */

typedef void (*host_combine_t)(void *accumulator, const void *value, size_t count);
typedef void (*host_scale_t)(void *values, const void *source, size_t count, const void *scalar);
typedef void (*host_divide_t)(void *values, size_t count, int divisor);

/* What can be done with the elements of one type. */
typedef struct {
    size_t size;               /* bytes an element */
    host_combine_t combine[4]; /* by ncclSum, ncclProd, ncclMax, ncclMin: the codes 0 to 3 */
    host_scale_t scale;
    host_divide_t divide; /* NULL for floating types, whose average multiplies beforehand */
} host_arithmetic_t;

extern const host_arithmetic_t host_arithmetic_f16, host_arithmetic_bf16, host_arithmetic_e4m3,
    host_arithmetic_e5m2; /* reduce_float.c */

/* ---- kernels ----------------------------------------------------------------------------------------- */

/* Define step##_combine, the kernel of a step(a, b). */
#define HOST_COMBINE(step, type)                                                                             \
    static void step##_combine(void *accumulator, const void *value, size_t count) {                         \
        type *into = accumulator;                                                                            \
        const type *from = value;                                                                            \
        HOST_ELEMENTWISE for (size_t i = 0; i < count; i++) {                                                \
            into[i] = step(into[i], from[i]);                                                                \
        }                                                                                                    \
    }

/* Define step##_scale, where the second operand is the same for all elements. */
#define HOST_SCALE(step, type)                                                                               \
    static void step##_scale(void *values, const void *source, size_t count, const void *scalar) {           \
        type *into = values;                                                                                 \
        const type *from = source;                                                                           \
        const type factor = *(const type *)scalar;                                                           \
        HOST_ELEMENTWISE for (size_t i = 0; i < count; i++) {                                                \
            into[i] = step(from[i], factor);                                                                 \
        }                                                                                                    \
    }

/* Smaller and larger of two floating numbers, on their bits: a NaN loses to a number, two NaNs give the
 * canonical one, and -0 is below +0, as the GPU's min and max have it. Flipping all but the sign of the
 * negative numbers makes their bits ascend as integers. `top` is the largest magnitude that is not a NaN. */
#define HOST_FLOAT_ORDER(name, bits_t, order_t, top, nan)                                                    \
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

/* ---- number formats ---------------------------------------------------------------------------------- */

/* Conversions between binary32 and the narrow formats; to the narrow side they round to nearest even.
 * A NaN becomes the format's one canonical NaN, as in CUDA's conversions. Subnormals are converted by adding
 * a power of two whose unit in the last place is the subnormal's, which lets the adder do the rounding. */

#define HOST_F32_INFINITY 0x7f800000u
#define HOST_F32_POWER(exponent) ((uint32_t)((exponent) + 127) << 23) /* the bits of 2^exponent */

static inline uint32_t host_f32_bits(float value) {
    union {
        float value;
        uint32_t bits;
    } pun = {.value = value};
    return pun.bits;
}

static inline float host_f32_from(uint32_t bits) {
    union {
        uint32_t bits;
        float value;
    } pun = {.bits = bits};
    return pun.value;
}

/* condition ? yes : no, by masks: written with `?:`, a floating-point operation on either side would become
 * a branch, since it might trap, and a loop with a branch in it is not vectorised. */
static inline uint32_t host_select(bool condition, uint32_t yes, uint32_t no) {
    return no ^ ((yes ^ no) & (0u - (uint32_t)condition));
}

/* A magnitude rounded to a multiple of 2^(exponent - 23), counted in such multiples. */
static inline uint32_t host_f32_multiples(uint32_t magnitude, int exponent) {
    uint32_t anchor = HOST_F32_POWER(exponent);
    return host_f32_bits(host_f32_from(magnitude) + host_f32_from(anchor)) - anchor;
}

/* A magnitude with its lowest `drop` bits rounded away; a carry into the exponent is right as it is. */
static inline uint32_t host_f32_shorten(uint32_t magnitude, int drop) {
    return (magnitude + ((1u << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop;
}

/* The value of a narrow magnitude whose mantissa has `mantissa` bits and whose exponent's bias is `bias`,
 * infinities and NaNs not included. */
static inline uint32_t host_f32_widen(uint32_t magnitude, int mantissa, int bias) {
    uint32_t normal = (magnitude << (23 - mantissa)) + ((uint32_t)(127 - bias) << 23);
    uint32_t least = HOST_F32_POWER(1 - bias); /* the smallest normal number */
    uint32_t subnormal = host_f32_bits(host_f32_from(normal + (1u << 23)) - host_f32_from(least));
    return host_select(magnitude < (1u << mantissa), subnormal, normal);
}

static inline float host_f32_from_f16(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu;
    uint32_t bits = host_f32_widen(magnitude, 10, 15);
    bits = host_select(magnitude >= 0x7c00u, (magnitude << 13) | HOST_F32_INFINITY, bits);
    return host_f32_from(bits | (uint32_t)(half & 0x8000u) << 16);
}

static inline uint16_t host_f16_from_f32(float value) {
    uint32_t bits = host_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half = host_f32_shorten(magnitude, 13) - (112u << 10);
    uint32_t subnormal = host_f32_multiples(magnitude, -1); /* in units of 2^-24 */
    half = host_select(magnitude < HOST_F32_POWER(-14), subnormal, half);
    half = host_select(half > 0x7c00u, 0x7c00u, half);
    half |= (bits >> 16) & 0x8000u;
    return (uint16_t)host_select(magnitude > HOST_F32_INFINITY, 0x7fffu, half);
}

static inline float host_f32_from_bf16(uint16_t brain) {
    return host_f32_from((uint32_t)brain << 16);
}

static inline uint16_t host_bf16_from_f32(float value) {
    uint32_t bits = host_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t brain = host_f32_shorten(magnitude, 16) | ((bits >> 16) & 0x8000u);
    return (uint16_t)host_select(magnitude > HOST_F32_INFINITY, 0x7fffu, brain);
}

static inline float host_f32_from_e4m3(uint8_t byte) {
    uint32_t magnitude = byte & 0x7fu;
    uint32_t bits = host_f32_widen(magnitude, 3, 7);
    bits = host_select(magnitude == 0x7fu, 0x7fffffffu, bits); /* no infinities, one NaN */
    return host_f32_from(bits | (uint32_t)(byte & 0x80u) << 24);
}

static inline float host_f32_from_e5m2(uint8_t byte) {
    return host_f32_from_f16((uint16_t)(byte << 8));
}

/* To fp8 what is too large, infinities included, becomes the largest finite number (CUDA's SATFINITE). */
static inline uint8_t host_e4m3_from_f32(float value) {
    uint32_t bits = host_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t byte = host_f32_shorten(magnitude, 20) - (120u << 3);
    uint32_t subnormal = host_f32_multiples(magnitude, 14); /* in units of 2^-9 */
    byte = host_select(magnitude < HOST_F32_POWER(-6), subnormal, byte);
    byte = host_select(byte > 0x7eu, 0x7eu, byte);
    byte |= (bits >> 24) & 0x80u;
    return (uint8_t)host_select(magnitude > HOST_F32_INFINITY, 0x7fu, byte);
}

static inline uint8_t host_e5m2_from_f32(float value) {
    uint32_t bits = host_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t byte = host_f32_shorten(magnitude, 21) - (112u << 2);
    uint32_t subnormal = host_f32_multiples(magnitude, 7); /* in units of 2^-16 */
    byte = host_select(magnitude < HOST_F32_POWER(-14), subnormal, byte);
    byte = host_select(byte > 0x7bu, 0x7bu, byte);
    byte |= (bits >> 24) & 0x80u;
    return (uint8_t)host_select(magnitude > HOST_F32_INFINITY, 0x7fu, byte);
}

#endif
