/* Copies with stores past the caches: a line that is written whole need not be read first, and pushes nothing
 * out. A line is stored at once where a register holds one; of parts, the processor must wait for all.
 */
#include "host.h"

#include <string.h>

enum { LINE = 64 };

/* Whole lines; `to` lies at the beginning of one. `twice` also stores them to `slot`, through the caches. */
typedef struct {
    const char *name;
    void (*once)(char *to, const char *from, size_t lines);
    void (*twice)(char *slot, char *to, const char *from, size_t lines);
} copies_t;

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static void once_avx512(char *to, const char *from, size_t lines) {
    for (; lines != 0; lines--, to += LINE, from += LINE)
        _mm512_stream_si512((__m512i *)(void *)to, _mm512_loadu_si512(from));
    _mm_sfence(); /* such stores are ordered by nothing else */
}

__attribute__((target("avx512f"))) static void twice_avx512(char *slot, char *to, const char *from,
                                                            size_t lines) {
    for (; lines != 0; lines--, slot += LINE, to += LINE, from += LINE) {
        __m512i line = _mm512_loadu_si512(from);
        _mm512_storeu_si512(slot, line);
        _mm512_stream_si512((__m512i *)(void *)to, line);
    }
    _mm_sfence();
}

static void once_sse2(char *to, const char *from, size_t lines) {
    for (; lines != 0; lines--, to += LINE, from += LINE)
        for (size_t part = 0; part < LINE; part += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(void *)(to + part),
                             _mm_loadu_si128((const __m128i *)(const void *)(from + part)));
    _mm_sfence();
}

static void twice_sse2(char *slot, char *to, const char *from, size_t lines) {
    memcpy(slot, from, lines * LINE);
    once_sse2(to, slot, lines);
}

static const copies_t kinds[] = {{"avx512", once_avx512, twice_avx512}, {"sse2", once_sse2, twice_sse2}};

static bool is_possible(const copies_t *kind) {
    return kind->once != once_avx512 || __builtin_cpu_supports("avx512f");
}
#elif defined(__aarch64__)
static void once_neon(char *to, const char *from, size_t lines) {
    for (; lines != 0; lines--, to += LINE, from += LINE)
        __asm__ volatile("ldp q0, q1, [%1]\n\t"
                         "ldp q2, q3, [%1, #32]\n\t"
                         "stnp q0, q1, [%0]\n\t"
                         "stnp q2, q3, [%0, #32]"
                         :
                         : "r"(to), "r"(from)
                         : "v0", "v1", "v2", "v3", "memory");
}

static void twice_neon(char *slot, char *to, const char *from, size_t lines) {
    memcpy(slot, from, lines * LINE);
    once_neon(to, slot, lines);
}

static const copies_t kinds[] = {{"neon", once_neon, twice_neon}};

static bool is_possible(const copies_t *kind) {
    (void)kind;
    return true;
}
#else
static void once_plain(char *to, const char *from, size_t lines) {
    memcpy(to, from, lines * LINE);
}

static void twice_plain(char *slot, char *to, const char *from, size_t lines) {
    memcpy(slot, from, lines * LINE);
    memcpy(to, from, lines * LINE);
}

static const copies_t kinds[] = {{"plain", once_plain, twice_plain}};

static bool is_possible(const copies_t *kind) {
    (void)kind;
    return true;
}
#endif

/* The first that this processor can do, unless a test wants another. */
static _Atomic(const copies_t *) chosen;

bool host_copy_choose(const char *name) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (is_possible(&kinds[i]) && (name == NULL || strcmp(name, kinds[i].name) == 0)) {
            atomic_store_explicit(&chosen, &kinds[i], memory_order_relaxed);
            return true;
        }
    return false;
}

static const copies_t *copies(void) {
    if (atomic_load_explicit(&chosen, memory_order_relaxed) == NULL)
        host_copy_choose(NULL);
    return atomic_load_explicit(&chosen, memory_order_relaxed);
}

/* Bytes of `to` before its first whole line. */
static size_t before_line(const void *to, size_t bytes) {
    size_t head = (size_t)(-(uintptr_t)to % LINE);
    return head < bytes ? head : bytes;
}

void host_copy_past(void *to, const void *from, size_t bytes) {
    char *out = to;
    const char *in = from;
    size_t head = before_line(out, bytes), whole = (bytes - head) / LINE * LINE;
    memcpy(out, in, head);
    copies()->once(out + head, in + head, whole / LINE);
    memcpy(out + head + whole, in + head + whole, bytes - head - whole);
}

void host_copy_twice(void *slot, void *to, const void *from, size_t bytes) {
    char *near = slot, *out = to;
    const char *in = from;
    size_t head = before_line(out, bytes), whole = (bytes - head) / LINE * LINE;
    memcpy(near, in, head);
    memcpy(out, in, head);
    copies()->twice(near + head, out + head, in + head, whole / LINE);
    memcpy(near + head + whole, in + head + whole, bytes - head - whole);
    memcpy(out + head + whole, in + head + whole, bytes - head - whole);
}
