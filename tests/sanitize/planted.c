/* One fault of each kind that the sanitizers are there to find. */
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

__attribute__((visibility("default"))) int overflow(int index);
__attribute__((visibility("default"))) int undefined(int value);
__attribute__((visibility("default"))) int race(int value);

int overflow(int index) {
    volatile char *bytes = malloc(4);
    if (bytes == NULL)
        return 0;
    bytes[index] = 1;
    free((void *)bytes);
    return 1;
}

int undefined(int value) {
    return INT_MAX + value;
}

static int shared;

static void *add(void *value) {
    shared += *(int *)value;
    return NULL;
}

int race(int value) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, add, &value) != 0)
        return 0;
    shared += value;
    pthread_join(thread, NULL);
    return shared;
}
