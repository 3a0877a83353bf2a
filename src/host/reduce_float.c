/* Arithmetic of the narrow floating types: each step in binary32, rounded at once to the element type.
 *
 * binary32 has more than twice the digits of binary16 and of bfloat16 and two over, so rounding its sum or
 * product once more gives what a single rounding would have given. That holds below bfloat16's normal
 * range too: a product has 16 digits, and where its last one is lost the whole rounds to zero. For the same
 * reason NCCL's way for fp8, half by half and then rounded to fp8, gives what is computed here; the tests
 * go NCCL's way for every pair.
 */
#include "reduce.h"

/* ---- one step ---------------------------------------------------------------------------------------- */

static inline uint16_t sum_f16(uint16_t a, uint16_t b) {
    return host_f16_from_f32(host_f32_from_f16(a) + host_f32_from_f16(b));
}

static inline uint16_t prod_f16(uint16_t a, uint16_t b) {
    return host_f16_from_f32(host_f32_from_f16(a) * host_f32_from_f16(b));
}

static inline uint16_t sum_bf16(uint16_t a, uint16_t b) {
    return host_bf16_from_f32(host_f32_from_bf16(a) + host_f32_from_bf16(b));
}

static inline uint16_t prod_bf16(uint16_t a, uint16_t b) {
    return host_bf16_from_f32(host_f32_from_bf16(a) * host_f32_from_bf16(b));
}

#define FP8_STEPS(name)                                                                                      \
    static inline uint8_t sum_##name(uint8_t a, uint8_t b) {                                                 \
        return host_##name##_from_f32(host_f32_from_##name(a) + host_f32_from_##name(b));                    \
    }                                                                                                        \
    static inline uint8_t prod_##name(uint8_t a, uint8_t b) {                                                \
        return host_##name##_from_f32(host_f32_from_##name(a) * host_f32_from_##name(b));                    \
    }
FP8_STEPS(e4m3)
FP8_STEPS(e5m2)

HOST_FLOAT_ORDER(f16, uint16_t, int16_t, 0x7c00, 0x7fff)
HOST_FLOAT_ORDER(bf16, uint16_t, int16_t, 0x7f80, 0x7fff)
HOST_FLOAT_ORDER(e4m3, uint8_t, int8_t, 0x7e, 0x7f)
HOST_FLOAT_ORDER(infinite_e5m2, uint8_t, int8_t, 0x7c, 0x7f)

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

/* ---- kernels ----------------------------------------------------------------------------------------- */

HOST_COMBINE(sum_f16, host_u16_t)
HOST_COMBINE(prod_f16, host_u16_t)
HOST_COMBINE(max_f16, host_u16_t)
HOST_COMBINE(min_f16, host_u16_t)
HOST_SCALE(prod_f16, host_u16_t)

HOST_COMBINE(sum_bf16, host_u16_t)
HOST_COMBINE(prod_bf16, host_u16_t)
HOST_COMBINE(max_bf16, host_u16_t)
HOST_COMBINE(min_bf16, host_u16_t)
HOST_SCALE(prod_bf16, host_u16_t)

HOST_COMBINE(sum_e4m3, host_u8_t)
HOST_COMBINE(prod_e4m3, host_u8_t)
HOST_COMBINE(max_e4m3, host_u8_t)
HOST_COMBINE(min_e4m3, host_u8_t)
HOST_SCALE(prod_e4m3, host_u8_t)

HOST_COMBINE(sum_e5m2, host_u8_t)
HOST_COMBINE(prod_e5m2, host_u8_t)
HOST_COMBINE(max_e5m2, host_u8_t)
HOST_COMBINE(min_e5m2, host_u8_t)
HOST_SCALE(prod_e5m2, host_u8_t)

const host_arithmetic_t host_arithmetic_f16 = {
    .size = 2,
    .combine = {sum_f16_combine, prod_f16_combine, max_f16_combine, min_f16_combine},
    .scale = prod_f16_scale,
};
const host_arithmetic_t host_arithmetic_bf16 = {
    .size = 2,
    .combine = {sum_bf16_combine, prod_bf16_combine, max_bf16_combine, min_bf16_combine},
    .scale = prod_bf16_scale,
};
const host_arithmetic_t host_arithmetic_e4m3 = {
    .size = 1,
    .combine = {sum_e4m3_combine, prod_e4m3_combine, max_e4m3_combine, min_e4m3_combine},
    .scale = prod_e4m3_scale,
};
const host_arithmetic_t host_arithmetic_e5m2 = {
    .size = 1,
    .combine = {sum_e5m2_combine, prod_e5m2_combine, max_e5m2_combine, min_e5m2_combine},
    .scale = prod_e5m2_scale,
};
