/* The settings: read from the environment once, changed by tests one key at a time. */
#define _GNU_SOURCE
#include "driver.h"
#include "host.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_DEVICES = 8, GPU_LAUNCH_NS = 5000, GPU_DEPTH = 1000, GPU_READ_DELAY_NS = 200000 };

static host_config_t settings = {
    .mode = HOST_STRICT,
    .temper = HOST_QUICK,
    .devices = DEFAULT_DEVICES,
    .nccl_version = NCCL_ABI_VERSION,
    .runtime_connect = true,
    .way = HOST_WAYS,
    .windows = true,
    .seed = 1,
};
/* What was set by hand, and so outlives a change of the temper. */
static bool cost_given, depth_given, delay_given;
static pthread_once_t loaded_once = PTHREAD_ONCE_INIT;
static _Atomic bool loaded;
static pthread_mutex_t set_lock = PTHREAD_MUTEX_INITIALIZER;

static void follow_temper(void) {
    bool gpu = settings.temper == HOST_GPULIKE;
    if (!cost_given)
        settings.launch_cost_ns = gpu ? GPU_LAUNCH_NS : 0;
    if (!depth_given)
        settings.launch_depth = gpu ? GPU_DEPTH : 0;
    if (!delay_given)
        settings.read_delay_ns = gpu ? GPU_READ_DELAY_NS : 0;
    host_attend(HOST_ATTEND_LOCK, gpu);
}

static bool parse_number(const char *text, uint64_t scale, uint64_t most, uint64_t *value) {
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno != 0 || number > most / scale)
        return false;
    *value = number * scale;
    return true;
}

static bool set_number(_Atomic uint32_t *field, const char *text, uint64_t scale, bool *given) {
    if (*text == '\0') { /* back to what the temper says */
        *given = false;
        follow_temper();
        return true;
    }
    uint64_t value;
    if (!parse_number(text, scale, UINT32_MAX, &value))
        return false;
    *field = (uint32_t)value;
    *given = true;
    return true;
}

/* As NCCL and CUDA read a switch: a number, on unless it is 0. */
static bool set_switch(_Atomic bool *field, const char *text) {
    uint64_t value;
    if (!parse_number(text, 1, UINT32_MAX, &value))
        return false;
    *field = value != 0;
    return true;
}

static bool parse_word(const char *text, const char *off, const char *on, bool *value) {
    if (strcmp(text, on) != 0 && strcmp(text, off) != 0)
        return false;
    *value = strcmp(text, on) == 0;
    return true;
}

static bool set_mode(const char *text) {
    bool faithful;
    if (!parse_word(text, "strict", "faithful", &faithful))
        return false;
    settings.mode = faithful ? HOST_FAITHFUL : HOST_STRICT;
    return true;
}

static bool set_temper(const char *text) {
    bool gpu;
    if (!parse_word(text, "quick", "gpulike", &gpu))
        return false;
    settings.temper = gpu ? HOST_GPULIKE : HOST_QUICK;
    follow_temper();
    return true;
}

/* Which of so many words it is, or -1. */
static int find_word(const char *const *words, int count, const char *text) {
    for (int i = 0; i < count; i++)
        if (strcmp(text, words[i]) == 0)
            return i;
    return -1;
}

static bool set_misuse(const char *text) {
    static const char *const words[] = {"ignore", "report", "abort"};
    int found = find_word(words, 3, text);
    if (found >= 0)
        settings.misuse = (host_misuse_t)found;
    return found >= 0;
}

static bool set_way(const char *text) {
    static const char *const words[] = {"cached", "past", "attach", "measured"};
    int found = find_word(words, HOST_WAYS + 1, text);
    if (found >= 0)
        settings.way = (host_way_t)found;
    return found >= 0;
}

static bool set_devices(const char *text) {
    uint64_t value;
    if (host_driver_initialised() || !parse_number(text, 1, HOST_MAX_DEVICES, &value))
        return false;
    settings.devices = (int)value;
    return true;
}

/* "2.21.5"; the oldest that pynccl takes is 2.18. */
static bool set_version(const char *text) {
    uint64_t code = 0;
    for (int part = 0; part < 3; part++) {
        char digits[4];
        size_t length = strcspn(text, ".");
        uint64_t value;
        if (length >= sizeof digits || (text[length] == '\0') != (part == 2))
            return false;
        memcpy(digits, text, length);
        digits[length] = '\0';
        if (!parse_number(digits, 1, 99, &value))
            return false;
        code = code * 100 + value;
        text += length + 1;
    }
    if (code < NCCL_SINCE(2, 18) || code > NCCL_ABI_VERSION)
        return false;
    settings.nccl_version = (int)code;
    return true;
}

static bool set_quirks(const char *text) {
    bool depth_leak = false, no_memory_ops = false;
    while (*text != '\0') {
        size_t length = strcspn(text, ",");
        if (length == strlen("depth-leak") && strncmp(text, "depth-leak", length) == 0)
            depth_leak = true;
        else if (length == strlen("no-memory-ops") && strncmp(text, "no-memory-ops", length) == 0)
            no_memory_ops = true;
        else
            return false;
        text += length;
        text += *text == ',';
    }
    settings.quirk_depth_leak = depth_leak;
    settings.quirk_no_memory_ops = no_memory_ops;
    return true;
}

static bool set_seed(const char *text) {
    uint64_t value;
    if (!parse_number(text, 1, UINT64_MAX, &value))
        return false;
    settings.seed = value;
    return true;
}
static bool set_multi_rank(const char *text) {
    return set_switch(&settings.multi_rank, text);
}
static bool set_runtime_connect(const char *text) {
    return set_switch(&settings.runtime_connect, text);
}
static bool set_windows(const char *text) {
    return set_switch(&settings.windows, text);
}
static bool set_launch_blocking(const char *text) {
    return set_switch(&settings.launch_blocking, text);
}
static bool set_launch_cost(const char *text) {
    return set_number(&settings.launch_cost_ns, text, 1000, &cost_given);
}
static bool set_launch_depth(const char *text) {
    return set_number(&settings.launch_depth, text, 1, &depth_given);
}
static bool set_read_delay(const char *text) {
    return set_number(&settings.read_delay_ns, text, 1000, &delay_given);
}
static bool set_faults(const char *text) {
    return host_fault_parse(text, settings.seed); /* a rule's chances come from the seed as it is now */
}
static bool set_pointers(const char *text) {
    bool own;
    if (!parse_word(text, "any", "own", &own))
        return false;
    settings.refuse_foreign = own;
    return true;
}

static const struct {
    const char *key, *variable;
    bool (*set)(const char *text);
} keys[] = {
    /* "seed" stands before "faults": the environment is read in this order */
    {"mode", "PYNCCL_HOST_MODE", set_mode},
    {"temper", "PYNCCL_HOST_TEMPER", set_temper},
    {"misuse", "PYNCCL_HOST_MISUSE", set_misuse},
    {"devices", "PYNCCL_HOST_DEVICES", set_devices},
    {"quirks", "PYNCCL_HOST_QUIRKS", set_quirks},
    {"nccl_version", "PYNCCL_HOST_NCCL_VERSION", set_version},
    {"pointers", "PYNCCL_HOST_POINTERS", set_pointers},
    {"launch_cost_us", "PYNCCL_HOST_LAUNCH_COST_US", set_launch_cost},
    {"launch_depth", "PYNCCL_HOST_LAUNCH_DEPTH", set_launch_depth},
    {"read_delay_us", "PYNCCL_HOST_READ_DELAY_US", set_read_delay},
    {"seed", "PYNCCL_HOST_SEED", set_seed},
    {"faults", "PYNCCL_HOST_FAULTS", set_faults},
    {"way", "PYNCCL_HOST_WAY", set_way},
    {"multi_rank", "NCCL_MULTI_RANK_GPU_ENABLE", set_multi_rank},
    {"runtime_connect", "NCCL_RUNTIME_CONNECT", set_runtime_connect},
    {"windows", "NCCL_WIN_ENABLE", set_windows},
    {"launch_blocking", "CUDA_LAUNCH_BLOCKING", set_launch_blocking},
};
enum { KEYS = sizeof keys / sizeof keys[0] };

static void load(void) {
    for (int i = 0; i < KEYS; i++) {
        const char *value = getenv(keys[i].variable);
        if (value != NULL && *value != '\0' && !keys[i].set(value))
            fprintf(stderr, "pynccl host engine: %s=%s is not understood and ignored\n", keys[i].variable,
                    value);
    }
    atomic_store_explicit(&loaded, true, memory_order_release);
}

const host_config_t *host_config(void) {
    if (!atomic_load_explicit(&loaded, memory_order_acquire))
        pthread_once(&loaded_once, load);
    return &settings;
}

int pn_host_set(const char *key, const char *value) {
    if (key == NULL || value == NULL)
        return -1;
    host_config();
    bool understood = false;
    pthread_mutex_lock(&set_lock);
    for (int i = 0; i < KEYS && !understood; i++)
        understood = strcmp(key, keys[i].key) == 0 && keys[i].set(value);
    pthread_mutex_unlock(&set_lock);
    return understood ? 0 : -1;
}
