/* NCCL's table of parameters, which programs list and read.
 *
 * These are the ones that NCCL 2.32 has in it, with its keys, types, words and defaults. All are about the
 * log that NCCL writes; the host engine writes none, and so they say what the environment asks for.
 */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { TEXT_BYTES = 4096 };

typedef enum { STRING, SWITCH, CHOICE, FLAGS_32, FLAGS_64 } kind_t;
typedef struct {
    const char *name;
    uint64_t value;
} word_t;

/* A list of words as a set of bits; ALL is a word too. */
static const word_t levels[] = {
    {"VERSION", 0x02}, {"WARN", 0x04},  {"ATTN", 0x40}, {"INFO", 0x08},
    {"ABORT", 0x10},   {"TRACE", 0x20}, {"ALL", 0x7e},  {NULL, 0},
};
static const word_t subsystems[] = {
    {"INIT", 0x1},    {"COLL", 0x2},           {"P2P", 0x4},        {"SHM", 0x8},
    {"NET", 0x10},    {"GRAPH", 0x20},         {"TUNING", 0x40},    {"ENV", 0x80},
    {"ALLOC", 0x100}, {"ALLOC_HOST", 0x20000}, {"CALL", 0x200},     {"PROXY", 0x400},
    {"NVLS", 0x800},  {"BOOTSTRAP", 0x1000},   {"REG", 0x2000},     {"PROFILE", 0x4000},
    {"RAS", 0x8000},  {"DESTROY", 0x10000},    {"ALL", UINT64_MAX}, {NULL, 0},
};
static const word_t debug_levels[] = {
    {"VERSION", 1}, {"WARN", 2}, {"INFO", 3}, {"ABORT", 4}, {"TRACE", 5}, {"ATTN", 6}, {NULL, 0},
};

typedef struct ncclParamHandle {
    const char *key;
    kind_t kind;
    const word_t *words;
    const char *fallback; /* the text of the default */
    bool hidden;          /* listed only where NCCL_PARAM_DUMP_ALL says so */
    bool lenient;         /* words that it does not know are passed over, and do not void the whole */
    bool cached;          /* read once, and not each time */
} param_t;

static const param_t params[] = {
    {.key = "NCCL_PARAM_DUMP_ALL", .kind = SWITCH, .fallback = "FALSE", .hidden = true},
    {.key = "NCCL_DEBUG_FILE", .kind = STRING, .fallback = ""},
    {.key = "NCCL_DEBUG_TIMESTAMP_FORMAT", .kind = STRING, .fallback = "[%F %T] "},
    {.key = "NCCL_DEBUG_TIMESTAMP_LEVELS", .kind = FLAGS_32, .words = levels, .fallback = "WARN,ATTN"},
    {.key = "NCCL_NO_CACHE", .kind = STRING, .fallback = "", .hidden = true},
    {.key = "NCCL_SET_THREAD_NAME", .kind = SWITCH, .fallback = "FALSE", .cached = true},
    {.key = "NCCL_WARN_ENABLE_DEBUG_INFO", .kind = SWITCH, .fallback = "FALSE", .hidden = true},
    {.key = "NCCL_DEBUG_SUBSYS", .kind = FLAGS_64, .words = subsystems, .fallback = "INIT,ENV,BOOTSTRAP"},
    {.key = "NCCL_DEBUG_LEVELS", .kind = FLAGS_32, .words = levels, .fallback = "", .lenient = true},
    {.key = "NCCL_DEBUG", .kind = CHOICE, .words = debug_levels, .fallback = ""},
};
enum { PARAMS = sizeof params / sizeof params[0] };

/* ---- reading ------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t number; /* of all kinds but STRING */
    char text[TEXT_BYTES];
    bool given; /* by the environment */
} value_t;

static const word_t *find_word(const word_t *words, const char *text, size_t length) {
    for (; words->name != NULL; words++)
        if (strlen(words->name) == length && strncasecmp(words->name, text, length) == 0)
            return words;
    return NULL;
}

/* Without the white space around it. */
static const char *trim(const char *text, size_t *length) {
    while (*length > 0 && strchr(" \t", *text) != NULL) {
        text++;
        --*length;
    }
    while (*length > 0 && strchr(" \t", text[*length - 1]) != NULL)
        --*length;
    return text;
}

/* "A,B" is the set of these, "^A,B" all others. */
static bool read_flags(const param_t *param, const char *text, uint64_t *flags) {
    bool others = *text == '^';
    text += others;
    *flags = 0;
    while (*text != '\0') {
        size_t whole = strcspn(text, ","), length = whole;
        const char *name = trim(text, &length);
        const word_t *word = find_word(param->words, name, length);
        if (word != NULL)
            *flags |= word->value;
        else if (length != 0 && !param->lenient)
            return false;
        text += whole;
        text += *text == ',';
    }
    if (others)
        *flags = ~*flags;
    if (param->kind == FLAGS_32)
        *flags = (uint32_t)*flags;
    return true;
}

static bool read_switch(const char *text, uint64_t *on) {
    *on = strcmp(text, "1") == 0 || strcasecmp(text, "T") == 0 || strcasecmp(text, "TRUE") == 0;
    return *on || strcmp(text, "0") == 0 || strcasecmp(text, "F") == 0 || strcasecmp(text, "FALSE") == 0;
}

static bool read_choice(const param_t *param, const char *text, uint64_t *number) {
    size_t length = strlen(text);
    text = trim(text, &length);
    const word_t *word = find_word(param->words, text, length);
    *number = word != NULL ? word->value : 0;
    return word != NULL;
}

static bool read_number(const param_t *param, const char *text, uint64_t *number) {
    switch (param->kind) {
    case SWITCH:
        return read_switch(text, number);
    case CHOICE:
        return read_choice(param, text, number);
    case FLAGS_32:
    case FLAGS_64:
        return read_flags(param, text, number);
    case STRING:
        break;
    }
    return true;
}

/* ---- writing ------------------------------------------------------------------------------------- */

static void write_flags(const param_t *param, value_t *value) {
    size_t length = 0;
    const word_t *word = param->words;
    for (; strcmp(word->name, "ALL") != 0; word++)
        if ((value->number & word->value) != 0)
            length += (size_t)snprintf(value->text + length, TEXT_BYTES - length, "%s%s",
                                       length == 0 ? "" : ",", word->name);
    if (value->number == word->value)
        snprintf(value->text, TEXT_BYTES, "ALL");
    else if (length == 0)
        snprintf(value->text, TEXT_BYTES, "NONE");
}

static void write_choice(const param_t *param, value_t *value) {
    snprintf(value->text, TEXT_BYTES, "<unknown>");
    for (const word_t *word = param->words; word->name != NULL; word++)
        if (word->value == value->number)
            snprintf(value->text, TEXT_BYTES, "%s", word->name);
}

static void write_text(const param_t *param, const char *source, value_t *value) {
    if (param->kind == STRING)
        snprintf(value->text, TEXT_BYTES, "%s", source);
    else if (param->kind == SWITCH)
        snprintf(value->text, TEXT_BYTES, "%s", value->number != 0 ? "TRUE" : "FALSE");
    else if (param->kind == CHOICE)
        write_choice(param, value);
    else
        write_flags(param, value);
}

static void evaluate(const param_t *param, const char *source, value_t *value) {
    value->given = source != NULL && read_number(param, source, &value->number);
    if (!value->given) {
        source = param->fallback;
        read_number(param, source, &value->number);
    }
    write_text(param, source, value);
}

static void read_param(const param_t *param, value_t *value) {
    static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;
    static value_t cache[PARAMS];
    static bool filled[PARAMS];
    pthread_mutex_lock(&cache_lock); /* for getenv too: several readers are common */
    ptrdiff_t at = param - params;
    if (!param->cached || !filled[at])
        evaluate(param, getenv(param->key), &cache[at]);
    filled[at] = true;
    *value = cache[at];
    pthread_mutex_unlock(&cache_lock);
}

static size_t size_of(const param_t *param, const value_t *value) {
    switch (param->kind) {
    case SWITCH:
        return 1;
    case CHOICE:
    case FLAGS_32:
        return sizeof(uint32_t);
    case FLAGS_64:
        return sizeof(uint64_t);
    case STRING:
        break;
    }
    return strlen(value->text) + 1;
}

static const void *bytes_of(const param_t *param, const value_t *value) {
    return param->kind == STRING ? (const void *)value->text : (const void *)&value->number;
}

static const param_t *find_param(const char *key) {
    for (int i = 0; key != NULL && i < PARAMS; i++)
        if (strcmp(params[i].key, key) == 0)
            return &params[i];
    return NULL;
}

/* ---- by handle ----------------------------------------------------------------------------------- */

/* A handle is never dereferenced before it is known to be one. */
static bool is_handle(ncclParamHandle_t handle) {
    for (int i = 0; i < PARAMS; i++)
        if (handle == &params[i])
            return true;
    return false;
}

ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclParamBind", NULL);
    const param_t *param = find_param(key);
    if (result == ncclSuccess && (out == NULL || param == NULL))
        result = host_fail(ncclInvalidArgument, "ncclParamBind: %s%s",
                           out == NULL ? "no handle for " : "no parameter ", key == NULL ? "(null)" : key);
    if (result == ncclSuccess)
        *out = (ncclParamHandle_t)(uintptr_t)param;
    return host_entry_end(&entry, result);
}

static ncclResult_t get(const char *function, ncclParamHandle_t handle, bool fits, void *out, size_t size) {
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, function, NULL);
    if (result == ncclSuccess && (!is_handle(handle) || out == NULL))
        result = host_fail(ncclInvalidArgument, "%s: handle %p, output %p", function, (void *)handle, out);
    if (result == ncclSuccess && !fits)
        result = host_fail(ncclInvalidArgument, "%s: %s is of another type", function, handle->key);
    if (result == ncclSuccess) {
        value_t value;
        read_param(handle, &value);
        memcpy(out, &value.number, size);
    }
    return host_entry_end(&entry, result);
}

/* A getter takes the one kind that is of its type; there is none for most of the types. */
static bool is_of(ncclParamHandle_t handle, kind_t kind) {
    return is_handle(handle) && handle->kind == kind;
}

ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t *out) {
    return get("ncclParamGetU32", h, is_of(h, FLAGS_32), out, sizeof *out);
}

ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t *out) {
    return get("ncclParamGetU64", h, is_of(h, FLAGS_64), out, sizeof *out);
}

#define NO_SUCH_TYPE(name, type)                                                                             \
    ncclResult_t name(ncclParamHandle_t h, type *out) {                                                      \
        return get(#name, h, false, out, sizeof *out);                                                       \
    }
NO_SUCH_TYPE(ncclParamGetI8, int8_t)
NO_SUCH_TYPE(ncclParamGetI16, int16_t)
NO_SUCH_TYPE(ncclParamGetI32, int32_t)
NO_SUCH_TYPE(ncclParamGetI64, int64_t)
NO_SUCH_TYPE(ncclParamGetU8, uint8_t)
NO_SUCH_TYPE(ncclParamGetU16, uint16_t)

ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char **out) {
    static _Thread_local value_t value;
    const char *text = value.text;
    if (is_of(h, STRING))
        read_param(h, &value);
    ncclResult_t result = get("ncclParamGetStr", h, is_of(h, STRING), out, 0);
    if (result == ncclSuccess)
        *out = text;
    return result;
}

ncclResult_t ncclParamGet(ncclParamHandle_t h, void *out, int maxLen, int *len) {
    value_t value;
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclParamGet", NULL);
    if (result == ncclSuccess && (!is_handle(h) || out == NULL || len == NULL || maxLen <= 0))
        result = host_fail(ncclInvalidArgument, "ncclParamGet: handle %p, output %p of %d bytes, length %p",
                           (void *)h, out, maxLen, (void *)len);
    if (result == ncclSuccess) {
        read_param(h, &value);
        int size = (int)size_of(h, &value);
        *len = size <= maxLen ? size : 0;
        if (size > maxLen)
            result = host_fail(ncclInvalidArgument, "ncclParamGet: %s has %d bytes, there is room for %d",
                               h->key, size, maxLen);
        else
            memcpy(out, bytes_of(h, &value), (size_t)size);
    }
    return host_entry_end(&entry, result);
}

/* ---- by key -------------------------------------------------------------------------------------- */

ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *valueLen) {
    static _Thread_local value_t read;
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclParamGetParameter", NULL);
    const param_t *param = find_param(key);
    if (value != NULL)
        *value = NULL;
    if (valueLen != NULL)
        *valueLen = 0;
    if (result == ncclSuccess && (param == NULL || value == NULL || valueLen == NULL))
        result = host_fail(ncclInvalidArgument, "ncclParamGetParameter: key %s, value %p, length %p",
                           key == NULL ? "(null)" : key, (void *)value, (void *)valueLen);
    if (result == ncclSuccess) {
        read_param(param, &read);
        *value = read.text;
        *valueLen = (int)strlen(read.text);
    }
    return host_entry_end(&entry, result);
}

/* Returns how many; those that are hidden only where the environment asks for them. */
static int list_params(const param_t **list) {
    value_t all;
    int length = 0;
    read_param(find_param("NCCL_PARAM_DUMP_ALL"), &all);
    for (int i = 0; i < PARAMS; i++)
        if (!params[i].hidden || all.number != 0)
            list[length++] = &params[i];
    return length;
}

ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *tableLen) {
    static _Thread_local const char *keys[PARAMS];
    host_entry_t entry;
    ncclResult_t result = host_entry_begin(&entry, "ncclParamGetAllParameterKeys", NULL);
    if (result == ncclSuccess && (table == NULL || tableLen == NULL))
        result = host_fail(ncclInvalidArgument, "ncclParamGetAllParameterKeys: an output is NULL");
    if (result == ncclSuccess) {
        const param_t *list[PARAMS];
        *tableLen = list_params(list);
        for (int i = 0; i < *tableLen; i++)
            keys[i] = list[i]->key;
        *table = keys;
    }
    return host_entry_end(&entry, result);
}

static const char *shown(const param_t *param, const value_t *value) {
    return param->kind == STRING && value->text[0] == '\0' ? "<unset>" : value->text;
}

void ncclParamDumpAll(void) {
    static const char *const types[] = {[STRING] = "const char*",
                                        [SWITCH] = "bool",
                                        [CHOICE] = "ncclDebugLogLevel",
                                        [FLAGS_32] = "uint32_t",
                                        [FLAGS_64] = "uint64_t"};
    const param_t *list[PARAMS];
    int length = list_params(list);
    puts("=== ncclParam Registry Dump ===");
    for (int i = 0; i < length; i++) {
        value_t value, fallback;
        read_param(list[i], &value);
        evaluate(list[i], NULL, &fallback);
        printf("%s (%s)\n    Current value=%s set_by=%s default=%s\n\n", list[i]->key, types[list[i]->kind],
               shown(list[i], &value), value.given ? "EnvPlugin" : "Default", shown(list[i], &fallback));
    }
    fflush(stdout);
}

/* There is no log whose settings could be read again. */
void ncclResetDebugInit(void) {
}
