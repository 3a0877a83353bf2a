/* Everything that the arithmetic room and the copies do, on random bits of every type: a line with a digest
 * for each, which is the same on all processors. Any argument names the tables to use. */
#include "../../src/host/host.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 4099, SOURCES = 3, ROOM = COUNT * 8 + 64 };

static uint64_t state = 88172645463325252u;

static void fill(unsigned char *to, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        to[i] = (unsigned char)(state >> 32);
    }
}

/* Which NaN comes out of an operation is the processor's choice. */
static void make_one_nan(int type, void *values, size_t bytes) {
    float *f32 = values;
    double *f64 = values;
    for (size_t i = 0; type == ncclFloat32 && i < bytes / sizeof *f32; i++)
        f32[i] = f32[i] != f32[i] ? (float)NAN : f32[i];
    for (size_t i = 0; type == ncclFloat64 && i < bytes / sizeof *f64; i++)
        f64[i] = f64[i] != f64[i] ? (double)NAN : f64[i];
}

static void say(const char *what, int type, int op, void *from, size_t bytes) {
    make_one_nan(type, from, bytes);
    uint64_t digest = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ ((const unsigned char *)from)[i]) * 1099511628211u;
    printf("%s type %d op %d: %016llx\n", what, type, op, (unsigned long long)digest);
}

int main(int argc, char **argv) {
    static unsigned char memory[SOURCES][ROOM];
    static _Alignas(64) unsigned char result[ROOM], other[ROOM];
    const unsigned char *sources[SOURCES];
    uint64_t factors[SOURCES];
    if (argc > 1 && !host_reduce_choose(argv[1]))
        return 2;
    for (int i = 0; i < SOURCES; i++) {
        fill(memory[i], sizeof memory[i]);
        sources[i] = memory[i] + i; /* also where no element should begin */
    }
    fill((unsigned char *)factors, sizeof factors);
    for (int type = 0; type < ncclNumTypes; type++) {
        size_t size = host_type_size((ncclDataType_t)type);
        bool whole = type <= ncclUint64;
        for (int op = ncclSum; op <= ncclMin; op++) {
            unsigned char *results[] = {result, other};
            host_fold_t fold = {.sources = sources,
                                .results = results,
                                .source_count = SOURCES,
                                .result_count = 2,
                                .count = COUNT,
                                .type = (ncclDataType_t)type,
                                .op = (ncclRedOp_t)op,
                                .divisor = whole ? 3 : 0};
            host_fold(&fold);
            say("fold", type, op, result, COUNT * size);
            fold.factors = factors;
            fold.past_caches = true;
            host_fold(&fold);
            say("scaled fold", type, op, other, COUNT * size);
        }
        if (!whole) {
            host_average_factor(factors, (ncclDataType_t)type, SOURCES);
            host_premultiply(result, sources[1], COUNT, (ncclDataType_t)type, factors);
            say("average", type, ncclAvg, result, COUNT * size);
        }
    }
    for (size_t skew = 0; skew < 64; skew += 7) {
        host_copy_past(result + skew, sources[1], COUNT);
        host_copy_twice(other + 1, result + COUNT + skew, sources[2], COUNT);
        say("copies", 0, (int)skew, result, 2 * COUNT + skew);
        if (memcmp(other + 1, sources[2], COUNT) != 0)
            return 1;
    }
    return 0;
}
