/* NCCL's arithmetic: which kernels, single steps, and whole reductions. */
#include "reduce.h"

#include <assert.h>
#include <string.h>

/* ---- the table that suits this processor ------------------------------------------------------------- */

static const host_arithmetic_t *best_table(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return host_arithmetic_avx512;
    if (__builtin_cpu_supports("avx2"))
        return host_arithmetic_avx2;
#endif
    return host_arithmetic_portable;
}

static _Atomic(const host_arithmetic_t *) chosen_table;

/* Types and operations come from a collective that has checked them. */
static const host_arithmetic_t *arithmetic_of(ncclDataType_t type) {
    assert((unsigned)type < ncclNumTypes);
    const host_arithmetic_t *table = atomic_load_explicit(&chosen_table, memory_order_relaxed);
    if (table == NULL) {
        table = best_table();
        atomic_store_explicit(&chosen_table, table, memory_order_relaxed);
    }
    return &table[type];
}

bool host_reduce_choose(const char *name) {
    const host_arithmetic_t *table = NULL, *best = best_table();
    if (strcmp(name, "portable") == 0)
        table = host_arithmetic_portable;
#if defined(__x86_64__)
    if (strcmp(name, "avx2") == 0 && best != host_arithmetic_portable)
        table = host_arithmetic_avx2;
    if (strcmp(name, "avx512") == 0 && best == host_arithmetic_avx512)
        table = host_arithmetic_avx512;
#endif
    if (strcmp(name, "best") == 0)
        table = best;
    if (table != NULL)
        atomic_store_explicit(&chosen_table, table, memory_order_relaxed);
    return table != NULL;
}

/* ---- one step ---------------------------------------------------------------------------------------- */

/* Also asked before anything is checked: 0 for what is no type. */
size_t host_type_size(ncclDataType_t type) {
    static const uint8_t sizes[ncclNumTypes] = {
        [ncclInt8] = 1,    [ncclUint8] = 1,    [ncclInt32] = 4,      [ncclUint32] = 4,
        [ncclInt64] = 8,   [ncclUint64] = 8,   [ncclFloat16] = 2,    [ncclFloat32] = 4,
        [ncclFloat64] = 8, [ncclBfloat16] = 2, [ncclFloat8e4m3] = 1, [ncclFloat8e5m2] = 1,
    };
    return (unsigned)type < ncclNumTypes ? sizes[type] : 0;
}

void host_reduce(void *result, const void *a, const void *b, size_t count, ncclDataType_t type,
                 ncclRedOp_t op) {
    assert((unsigned)op <= ncclMin);
    arithmetic_of(type)->combine[op](result, a, b, count);
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

/* ---- whole reductions -------------------------------------------------------------------------------- */

enum { TILE_BYTES = 8 * 1024, LINE_BYTES = 64 }; /* a tile and its sources stay in the first cache */

/* A tile at `at`: combine all sources in the order of the ranks, and leave the result in `last`. */
static void fold_tile(const host_fold_t *fold, size_t at, size_t count, void *tile, void *last) {
    _Alignas(LINE_BYTES) unsigned char scaled[TILE_BYTES];
    const size_t size = host_type_size(fold->type);
    const unsigned char *left = fold->sources[0] + at * size;
    if (fold->factors != NULL) {
        host_premultiply(tile, left, count, fold->type, &fold->factors[0]);
        left = tile;
    }
    for (int i = 1; i < fold->source_count; i++) {
        const unsigned char *right = fold->sources[i] + at * size;
        if (fold->factors != NULL) {
            host_premultiply(scaled, right, count, fold->type, &fold->factors[i]);
            right = scaled;
        }
        void *result = i == fold->source_count - 1 ? last : tile;
        host_reduce(result, left, right, count, fold->type, fold->op);
        left = result;
    }
    if (fold->divisor != 0)
        host_divide(last, count, fold->type, fold->divisor);
}

void host_fold(const host_fold_t *fold) {
    _Alignas(LINE_BYTES) unsigned char tile[TILE_BYTES];
    const size_t size = host_type_size(fold->type), step = TILE_BYTES / size;
    for (size_t at = 0; at < fold->count; at += step) {
        size_t count = fold->count - at < step ? fold->count - at : step;
        /* A result may lie where a source does, so nothing but the last step may write there. */
        void *last = fold->past_caches ? tile : fold->results[0] + at * size;
        fold_tile(fold, at, count, tile, last);
        for (int i = 0; i < fold->result_count; i++) {
            unsigned char *result = fold->results[i] + at * size;
            if (fold->past_caches)
                host_copy_past(result, tile, count * size);
            else if (result != last)
                memcpy(result, last, count * size);
        }
    }
}
