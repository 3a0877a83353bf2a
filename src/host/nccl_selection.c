/* ncclCollConfig_t: which structs are taken, and which algorithms a selection leaves.
 *
 * The host engine has one way to do each collective, so that a selection changes nothing but whether the call
 * is accepted. It answers as NCCL does on GPUs of one host without NVLink SHARP, a network that reduces, or
 * symmetric kernels: there, rings do everything, and trees do all-reduces.
 */
#include "nccl.h"

#include <string.h>
#include <strings.h>

enum { LONGEST_TAG = 64 };

#define ALL_REDUCE (1U << HOST_ALL_REDUCE)
#define GATHER_OR_SCATTER (1U << HOST_ALL_GATHER | 1U << HOST_REDUCE_SCATTER)
#define RING_DOES (ALL_REDUCE | GATHER_OR_SCATTER | 1U << HOST_REDUCE | 1U << HOST_BROADCAST)

/* What a tag of a selection may name. A name may stand for kernels of several functions. */
static const struct {
    const char *name;
    unsigned int functions;
    bool present;
} algorithms[] = {
    {"TREE_LL", ALL_REDUCE, true},
    {"TREE_LL128", ALL_REDUCE, true},
    {"TREE_SIMPLE", ALL_REDUCE, true},
    {"RING_LL", RING_DOES, true},
    {"RING_LL128", RING_DOES, true},
    {"RING_SIMPLE", RING_DOES, true},
    {"COLLNET_DIRECT_SIMPLE", ALL_REDUCE | GATHER_OR_SCATTER, false},
    {"COLLNET_CHAIN_SIMPLE", ALL_REDUCE, false},
    {"NVLS_SIMPLE", ALL_REDUCE | GATHER_OR_SCATTER, false},
    {"NVLSTREE_SIMPLE", ALL_REDUCE, false},
    {"PAT_SIMPLE", GATHER_OR_SCATTER, false},
    {"SYMK_AGxLL_R", ALL_REDUCE, false},
    {"SYMK_AGxLLMC_R", ALL_REDUCE, false},
    {"SYMK_RSxTmaLD_AGxTmaST", ALL_REDUCE, false},
    {"SYMK_RSxLD_AGxST", ALL_REDUCE, false},
    {"SYMK_RSxLDMC_AGxSTMC", ALL_REDUCE, false},
    {"SYMK_LL", GATHER_OR_SCATTER, false},
    {"SYMK_LLMC", 1U << HOST_ALL_GATHER, false},
    {"SYMK_TmaST", 1U << HOST_ALL_GATHER, false},
    {"SYMK_ST", 1U << HOST_ALL_GATHER, false},
    {"SYMK_TmaSTMC", 1U << HOST_ALL_GATHER, false},
    {"SYMK_STMC", 1U << HOST_ALL_GATHER, false},
    {"SYMK_RailRing_LsaSTMC", 1U << HOST_ALL_GATHER, false},
    {"SYMK_TmaLD", 1U << HOST_REDUCE_SCATTER, false},
    {"SYMK_LD", 1U << HOST_REDUCE_SCATTER, false},
    {"SYMK_LDMC", 1U << HOST_REDUCE_SCATTER, false},
    {"SYMK_RailA2A_LsaLD", 1U << HOST_REDUCE_SCATTER, false},
    {"SYMK_RailA2A_LsaLDMC", 1U << HOST_REDUCE_SCATTER, false},
};
enum { ALGORITHMS = sizeof algorithms / sizeof algorithms[0] };
#define ALL_SETS ((1U << ALGORITHMS) - 1)
_Static_assert(ALGORITHMS < 32, "a set of algorithms is a 32-bit mask");

/* ---- selections ---------------------------------------------------------------------------------- */

/* selection = term *("," term); term = factor *("+" factor); factor = ["^"] tag. A comma unites, a plus
 * intersects, a caret leaves out; white space says nothing, and empty terms and factors are passed over. */
typedef struct {
    const char *at;
} reader_t;

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static char next_character(reader_t *reader) {
    while (is_space(*reader->at))
        reader->at++;
    return *reader->at;
}

/* A tag names all algorithms that begin with it, in any case; 0: there is none. */
static unsigned int read_tag(reader_t *reader) {
    char tag[LONGEST_TAG];
    size_t length = 0;
    for (char c = next_character(reader); c != '\0' && c != ',' && c != '+'; c = next_character(reader)) {
        if (length == sizeof tag)
            return 0;
        tag[length++] = c;
        reader->at++;
    }
    unsigned int named = 0;
    for (int i = 0; i < ALGORITHMS && length != 0; i++)
        if (strncasecmp(algorithms[i].name, tag, length) == 0)
            named |= 1U << i;
    return named;
}

/* False: an unknown or empty tag, or a term that leaves nothing. */
static bool read_term(reader_t *reader, unsigned int *chosen) {
    unsigned int left = ALL_SETS;
    bool empty = true;
    for (char c = next_character(reader); c != '\0' && c != ','; c = next_character(reader)) {
        if (c == '+') {
            reader->at++;
            continue;
        }
        bool leaves_out = c == '^';
        reader->at += leaves_out;
        unsigned int named = read_tag(reader);
        if (named == 0)
            return false;
        left &= leaves_out ? ~named : named;
        empty = false;
    }
    *chosen |= left;
    return !empty && left != 0;
}

static bool read_selection(const char *text, unsigned int *chosen) {
    reader_t reader = {.at = text};
    *chosen = 0;
    for (char c = next_character(&reader); c != '\0'; c = next_character(&reader)) {
        if (c == ',')
            reader.at++;
        else if (!read_term(&reader, chosen))
            return false;
    }
    return *chosen != 0;
}

static bool is_blank(const char *text) {
    while (is_space(*text))
        text++;
    return *text == '\0';
}

ncclResult_t host_selection_check(const char *function, host_task_t *task) {
    if (task->selection == NULL || is_blank(task->selection))
        return ncclSuccess;
    unsigned int chosen, doing = 0, present = 0;
    bool understood = read_selection(task->selection, &chosen);
    for (int i = 0; i < ALGORITHMS; i++)
        if ((algorithms[i].functions >> task->function & 1) != 0) {
            doing |= 1U << i;
            present |= (unsigned int)algorithms[i].present << i;
        }
    if (understood && (chosen & doing) != 0) {
        task->unavailable = (chosen & present) == 0 && task->forced; /* found out only at the launch */
        return ncclSuccess;
    }
    if (!task->forced)
        return ncclSuccess;
    return host_fail(ncclInvalidArgument, "%s: the selection \"%s\" %s", function, task->selection,
                     understood ? "has no algorithm for this function" : "is not understood");
}

/* ---- the struct ---------------------------------------------------------------------------------- */

static ncclResult_t copy_config(const char *function, const ncclCollConfig_t *given,
                                ncclCollConfig_t *config) {
    size_t size;
    memcpy(&size, given, sizeof size); /* the caller's struct may end right after it */
    *config = (ncclCollConfig_t){.forceAlgSelection = 1, .CTAPolicy = NCCL_CONFIG_UNDEF_INT};
    memcpy(config, given, size < sizeof *config ? size : sizeof *config);
    if (config->magic != NCCL_API_MAGIC)
        return host_fail(ncclInvalidArgument,
                         "%s: the magic number of the config is %#x; was it initialised?", function,
                         config->magic);
    if (config->version < 23200)
        config->launchCompletionEvent = NULL;
    return ncclSuccess;
}

/* Bounds on CTAs and clusters are hints that NCCL ignores where it cannot follow them. */
ncclResult_t host_coll_config_parse(const char *function, const ncclCollConfig_t *given, host_task_t *task) {
    ncclCollConfig_t config;
    if (given == NULL)
        return ncclSuccess;
    ncclResult_t result = copy_config(function, given, &config);
    if (result != ncclSuccess)
        return result;
    if (config.forceAlgSelection != 0 && config.forceAlgSelection != 1)
        return host_fail(ncclInvalidArgument, "%s: forceAlgSelection is %d, not 0 or 1", function,
                         config.forceAlgSelection);
    if (config.CTAPolicy != NCCL_CONFIG_UNDEF_INT && (config.CTAPolicy < 0 || config.CTAPolicy > 3))
        return host_fail(ncclInvalidArgument, "%s: CTAPolicy is %d, not unset nor 0 to 3", function,
                         config.CTAPolicy);
    task->selection = config.algSelection;
    task->forced = config.forceAlgSelection == 1;
    task->launched = config.launchCompletionEvent;
    return ncclSuccess;
}
