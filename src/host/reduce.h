/* Inside the arithmetic room: number formats, and what a table of kernels looks like.
 *
 *   reduce.c           which table; readers of it; whole reductions, tile by tile
 *   reduce_kernels.h   all kernels, compiled once for each set of instructions:
 *   reduce_portable.c reduce_avx2.c reduce_avx512.c
 *
 * A kernel is a plain loop over one step that has no branches, so that the compiler turns it into vector
 * code. Nothing here depends on the order of evaluation, on the floating-point environment beyond its default
 * rounding, or on fused multiply-add (where a product is followed by a sum, the product is exact), so that
 * all tables give the same bits.
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

/* The result may be one of the inputs. */
typedef void (*host_combine_t)(void *result, const void *a, const void *b, size_t count);
typedef void (*host_scale_t)(void *values, const void *source, size_t count, const void *scalar);
typedef void (*host_divide_t)(void *values, size_t count, int divisor);

/* What can be done with the elements of one type. */
typedef struct {
    host_combine_t combine[4]; /* by ncclSum, ncclProd, ncclMax, ncclMin: the codes 0 to 3 */
    host_scale_t scale;
    host_divide_t divide; /* NULL for floating types, whose average multiplies beforehand */
} host_arithmetic_t;

extern const host_arithmetic_t host_arithmetic_portable[ncclNumTypes];
#if defined(__x86_64__)
extern const host_arithmetic_t host_arithmetic_avx2[ncclNumTypes];
extern const host_arithmetic_t host_arithmetic_avx512[ncclNumTypes];
#endif

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
