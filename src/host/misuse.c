/* The misuse detector: what NCCL and CUDA leave undefined, or let pass until it crashes, is counted and told.
 * It never changes what a call does or answers. Off, it costs one load a call. */
#define _GNU_SOURCE
#include "host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_BYTES = 256, KEPT = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[KEPT][LINE_BYTES];
static int64_t reports; /* since the last that were taken */

void host_misuse(const char *format, ...) {
    char line[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (host_config()->misuse == HOST_MISUSE_ABORT) {
        fprintf(stderr, "pynccl host engine: misuse: %s\n", line);
        abort();
    }
    pthread_mutex_lock(&lock);
    if (reports < KEPT)
        memcpy(lines[reports], line, sizeof line);
    reports++;
    pthread_mutex_unlock(&lock);
}

int64_t pn_host_misuse_take(char *text, size_t bytes) {
    size_t used = 0;
    pthread_mutex_lock(&lock);
    int64_t taken = reports;
    for (int64_t i = 0; i < taken && i < KEPT && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i > 0 ? "\n" : "", lines[i]);
    if (taken == 0 && bytes > 0)
        text[0] = '\0';
    reports = 0;
    pthread_mutex_unlock(&lock);
    return taken;
}
