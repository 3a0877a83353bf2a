/* Injected faults.
 *
 *   rules   = rule *(";" rule)
 *   rule    = site ":" kind ["=" value] *("," filter)
 *   filter  = "name=" text | "rank=" n | "call=" k | "times=" n | "every=" n | "probability=" p
 *
 * `name` and `rank` say which calls a rule counts. Of those it takes, from the k-th on (k is 1 unless given),
 * each n-th (`every`), at most so many (`times`; just the k-th where only `call` is given), each with the
 * probability p, drawn from the seed. A delay has a unit: ns, us, ms or s.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RULES = 64, NAME_BYTES = 48 };

typedef enum { VALUE_NONE, VALUE_CODE, VALUE_TIME, VALUE_TIME_OR_NONE, VALUE_POLLS } value_t;
static const struct {
    const char *name;
    host_fault_kind_t kind;
    value_t value;
} kinds[] = {
    {"delay", HOST_FAULT_DELAY, VALUE_TIME},
    {"fail", HOST_FAULT_FAIL, VALUE_CODE},
    {"stuck", HOST_FAULT_STUCK, VALUE_TIME_OR_NONE},
    {"kill", HOST_FAULT_KILL, VALUE_NONE},
    {"remote", HOST_FAULT_REMOTE, VALUE_CODE},
    {"cuda_error", HOST_FAULT_CUDA_ERROR, VALUE_CODE},
    {"in_progress", HOST_FAULT_IN_PROGRESS, VALUE_POLLS},
    {"skip", HOST_FAULT_SKIP, VALUE_NONE},
    {"affinity", HOST_FAULT_AFFINITY, VALUE_NONE},
};
/* Which kinds make sense where: a rule that could never strike is refused. */
#define BIT(kind) (1U << HOST_FAULT_##kind)
static const struct {
    const char *name;
    unsigned int kinds;
} sites[] = {
    {"init", BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL) | BIT(REMOTE) | BIT(CUDA_ERROR) |
                 BIT(IN_PROGRESS) | BIT(AFFINITY)},
    {"op",
     BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL) | BIT(REMOTE) | BIT(CUDA_ERROR) | BIT(IN_PROGRESS)},
    {"background", BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL)},
    {"abort", BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL)},
    {"destroy", BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL) | BIT(IN_PROGRESS)},
    {"finalize", BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL) | BIT(IN_PROGRESS)},
    {"call",
     BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(KILL) | BIT(REMOTE) | BIT(CUDA_ERROR) | BIT(IN_PROGRESS)},
    {"event", BIT(DELAY) | BIT(FAIL) | BIT(STUCK) | BIT(CUDA_ERROR)},
    {"host_function", BIT(DELAY) | BIT(SKIP)},
};
enum { KINDS = sizeof kinds / sizeof kinds[0], SITES = sizeof sites / sizeof sites[0] };

typedef struct {
    const char *site;
    host_fault_t fault;
    char name[NAME_BYTES]; /* "": any */
    int rank;              /* -1: any */
    uint64_t call, times, every;
    double probability;
    uint64_t seen, taken, random;
} rule_t;

static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;
static rule_t rules[MAX_RULES];
static int rules_length;
host_bell_t host_fault_bell;

/* The splitmix64 generator. */
uint64_t host_random(uint64_t *state) {
    uint64_t mixed = *state += UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ (mixed >> 31);
}

/* ---- reading -------------------------------------------------------------------------------------- */

static bool read_count(const char *text, uint64_t least, uint64_t *value) {
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    *value = strtoull(text, &end, 10);
    return *end == '\0' && *value >= least;
}

static bool read_time(const char *text, int64_t *ns) {
    static const struct {
        const char *unit;
        double ns;
    } units[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
    char *end;
    if ((*text < '0' || *text > '9') && *text != '.')
        return false;
    double number = strtod(text, &end);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strcmp(end, units[i].unit) == 0 && number * units[i].ns < 9e18) {
            *ns = (int64_t)(number * units[i].ns);
            return true;
        }
    return false;
}

static bool read_value(value_t wanted, const char *text, host_fault_t *fault) {
    uint64_t number;
    if (text == NULL)
        return wanted == VALUE_NONE || wanted == VALUE_TIME_OR_NONE;
    if (wanted == VALUE_TIME || wanted == VALUE_TIME_OR_NONE)
        return read_time(text, &fault->ns);
    if (wanted == VALUE_NONE || !read_count(text, 1, &number) || number > INT32_MAX)
        return false;
    if (wanted == VALUE_CODE)
        fault->code = (int)number;
    else
        fault->ns = (int64_t)number; /* polls */
    return true;
}

/* Cut "key=value" in two; NULL where there is no value. */
static char *cut(char *text) {
    char *equals = strchr(text, '=');
    if (equals == NULL)
        return NULL;
    *equals = '\0';
    return equals + 1;
}

static bool read_head(char *head, rule_t *rule) {
    char *kind = strchr(head, ':');
    if (kind == NULL)
        return false;
    *kind++ = '\0';
    const char *value = cut(kind);
    for (int s = 0; s < SITES; s++) {
        if (strcmp(head, sites[s].name) != 0)
            continue;
        for (int k = 0; k < KINDS; k++) {
            if (strcmp(kind, kinds[k].name) != 0)
                continue;
            rule->site = sites[s].name;
            rule->fault.kind = kinds[k].kind;
            return (sites[s].kinds & 1U << kinds[k].kind) != 0 &&
                   read_value(kinds[k].value, value, &rule->fault);
        }
    }
    return false;
}

static bool read_filter(char *key, rule_t *rule) {
    const char *value = cut(key);
    uint64_t number;
    if (value == NULL || *value == '\0')
        return false;
    if (strcmp(key, "name") == 0) {
        size_t length = strlen(value);
        if (length >= NAME_BYTES)
            return false;
        memcpy(rule->name, value, length + 1);
        return true;
    }
    if (strcmp(key, "rank") == 0) {
        bool good = read_count(value, 0, &number) && number <= INT32_MAX;
        rule->rank = good ? (int)number : -1;
        return good;
    }
    if (strcmp(key, "call") == 0)
        return read_count(value, 1, &rule->call);
    if (strcmp(key, "times") == 0)
        return read_count(value, 1, &rule->times);
    if (strcmp(key, "every") == 0)
        return read_count(value, 1, &rule->every);
    if (strcmp(key, "probability") == 0) {
        char *end;
        rule->probability = strtod(value, &end);
        return *end == '\0' && rule->probability >= 0 && rule->probability <= 1;
    }
    return false;
}

static bool read_rule(char *text, uint64_t seed, rule_t *rule) {
    *rule = (rule_t){.rank = -1, .every = 1, .probability = 1, .random = seed};
    char *rest = NULL;
    char *part = strtok_r(text, ",", &rest);
    if (part == NULL || !read_head(part, rule))
        return false;
    while ((part = strtok_r(NULL, ",", &rest)) != NULL)
        if (!read_filter(part, rule))
            return false;
    if (rule->times == 0)
        rule->times = rule->call != 0 ? 1 : UINT64_MAX;
    if (rule->call == 0)
        rule->call = 1;
    return true;
}

bool host_fault_parse(const char *text, uint64_t seed) {
    char *copy = strdup(text);
    rule_t *read = calloc(MAX_RULES, sizeof *read);
    int length = 0;
    bool understood = copy != NULL && read != NULL;
    char *rest = NULL;
    for (char *part = understood ? strtok_r(copy, ";", &rest) : NULL; part != NULL && understood;
         part = strtok_r(NULL, ";", &rest)) {
        understood = length < MAX_RULES && read_rule(part, seed + (uint64_t)length, &read[length]);
        length++;
    }
    if (understood) {
        pthread_mutex_lock(&rules_lock);
        memcpy(rules, read, (size_t)length * sizeof *read);
        rules_length = length;
        pthread_mutex_unlock(&rules_lock);
        host_attend(HOST_ATTEND_FAULTS, length != 0);
        host_bell_ring(&host_fault_bell);
    }
    free(copy);
    free(read);
    return understood;
}

/* ---- striking ------------------------------------------------------------------------------------- */

static bool counts(const rule_t *rule, const char *site, const char *name, int rank) {
    return strcmp(rule->site, site) == 0 && (rule->rank < 0 || rule->rank == rank) &&
           (rule->name[0] == '\0' || (name != NULL && strcmp(rule->name, name) == 0));
}

/* Is it the rule's turn? It counts the call in any case, and has its turn only where no earlier one had. */
static bool strikes(rule_t *rule, bool taken_already) {
    rule->seen++;
    if (taken_already || rule->seen < rule->call || (rule->seen - rule->call) % rule->every != 0 ||
        rule->taken >= rule->times)
        return false;
    if (rule->probability < 1 && (double)(host_random(&rule->random) >> 11) * 0x1p-53 >= rule->probability)
        return false;
    rule->taken++;
    return true;
}

host_fault_t host_fault_take(const char *site, const char *name, int rank) {
    host_fault_t taken = {.kind = HOST_FAULT_NONE};
    if (HOST_LIKELY(!(atomic_load_explicit(&host_attention, memory_order_relaxed) & HOST_ATTEND_FAULTS)))
        return taken;
    pthread_mutex_lock(&rules_lock);
    for (int i = 0; i < rules_length; i++)
        if (counts(&rules[i], site, name, rank) && strikes(&rules[i], taken.kind != HOST_FAULT_NONE))
            taken = rules[i].fault;
    pthread_mutex_unlock(&rules_lock);
    return taken;
}

void host_fault_stall(int64_t ns) {
    uint32_t seen = host_bell_look(&host_fault_bell);
    int64_t end = ns != 0 ? host_now_ns() + ns : INT64_MAX;
    while (host_bell_look(&host_fault_bell) == seen) {
        int64_t left = ns != 0 ? end - host_now_ns() : -1;
        if (ns != 0 && left <= 0)
            return;
        host_bell_wait(&host_fault_bell, seen, left);
    }
}
