/* ncclConfig_t: which structs are taken, what an unset member means, which values are refused, and what the
 * environment puts in their place. */
#include "nccl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNSET NCCL_CONFIG_UNDEF_INT
enum { MOST_CTAS = 64 };

typedef struct {
    const char *name;
    size_t offset;
    int since; /* a struct, or a library, that is older does not have the member */
    int least, most, fallback;
    const char *variable; /* of the environment, which beats the struct; NULL: none */
} member_t;

#define MEMBER(name, since, least, most, fallback, variable)                                                 \
    {#name, offsetof(ncclConfig_t, name), since, least, most, fallback, variable}

/* In the order of the struct. */
static const member_t members[] = {
    MEMBER(blocking, 21400, 0, 1, 1, "NCCL_COMM_BLOCKING"),
    MEMBER(cgaClusterSize, 21700, 0, INT_MAX, 4, "NCCL_CGA_CLUSTER_SIZE"),
    MEMBER(minCTAs, 21700, 1, INT_MAX, 1, "NCCL_MIN_CTAS"),
    MEMBER(maxCTAs, 21700, 1, INT_MAX, MOST_CTAS, "NCCL_MAX_CTAS"),
    MEMBER(splitShare, 0, 0, 1, 0, "NCCL_COMM_SPLIT_SHARE_RESOURCES"),
    MEMBER(trafficClass, 22500, INT_MIN, INT_MAX, UNSET, NULL),
    MEMBER(collnetEnable, 22700, 0, 1, 0, "NCCL_COLLNET_ENABLE"),
    MEMBER(CTAPolicy, 22700, 0, 3, 0, "NCCL_CTA_POLICY"),
    MEMBER(shrinkShare, 22700, 0, 1, 0, "NCCL_COMM_SHRINK_SHARE_RESOURCES"),
    MEMBER(nvlsCTAs, 22700, 1, INT_MAX, UNSET, "NCCL_NVLS_NCHANNELS"),
    MEMBER(nChannelsPerNetPeer, 22800, 1, 64, UNSET, "NCCL_NCHANNELS_PER_NET_PEER"),
    MEMBER(nvlinkCentricSched, 22800, 0, 1, 0, "NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE"),
    MEMBER(graphUsageMode, 22900, 0, 2, 2, NULL),
    MEMBER(numRmaCtx, 22900, 0, INT_MAX, 1, "NCCL_NUM_RMA_CTX"),
    MEMBER(maxP2pPeers, 23000, 1, INT_MAX, UNSET, "NCCL_P2P_MAX_PEERS"),
    MEMBER(graphStreamOrdering, 23005, 0, 1, 1, "NCCL_GRAPH_STREAM_ORDERING"),
    MEMBER(launchOrderImplicit, 23100, 0, 1, 0, "NCCL_LAUNCH_ORDER_IMPLICIT"),
    MEMBER(numRmaSig, 23100, 0, INT_MAX, 1, NULL),
    MEMBER(rmaEagerInit, 23100, 0, 1, 0, "NCCL_RMA_EAGER_INIT"),
    MEMBER(hostCftMode, 23100, 1, 3, UNSET, NULL),
    MEMBER(nvlsHostMode, 23200, INT_MIN, INT_MAX, UNSET, NULL),
};
enum { MEMBERS = sizeof members / sizeof members[0] };

static int *member_of(ncclConfig_t *config, const member_t *member) {
    return (int *)(void *)((char *)config + member->offset);
}

/* ---- the environment ----------------------------------------------------------------------------- */

/* Read once, as NCCL does; UNSET where there is nothing, or nothing that is understood. */
static int overrides[MEMBERS];
static pthread_once_t overrides_once = PTHREAD_ONCE_INIT;

static bool read_number(const char *text, long least, long most, int *value) {
    char *end;
    errno = 0;
    long number = strtol(text, &end, 0);
    if (end == text || *end != '\0' || errno != 0 || number < least || number > most)
        return false;
    *value = (int)number;
    return true;
}

static void load_overrides(void) {
    for (int i = 0; i < MEMBERS; i++) {
        const char *text = members[i].variable != NULL ? getenv(members[i].variable) : NULL;
        overrides[i] = UNSET;
        if (text == NULL || *text == '\0' || host_nccl_version() < members[i].since)
            continue;
        if (!read_number(text, members[i].least, members[i].most, &overrides[i]))
            fprintf(stderr, "pynccl host engine: %s=%s is out of range and ignored\n", members[i].variable,
                    text);
    }
}

static void override(ncclConfig_t *config) {
    pthread_once(&overrides_once, load_overrides);
    for (int i = 0; i < MEMBERS; i++)
        if (overrides[i] != UNSET)
            *member_of(config, &members[i]) = overrides[i];
    if (config->maxCTAs > MOST_CTAS)
        config->maxCTAs = MOST_CTAS;
    if (config->minCTAs > config->maxCTAs)
        config->minCTAs = config->maxCTAs;
    if (config->CTAPolicy == 3)
        config->CTAPolicy = 2; /* the two policies exclude each other, and the zero-CTA one wins */
    if (config->graphStreamOrdering == 0 && config->graphUsageMode == 2)
        config->graphStreamOrdering = 1; /* captured and other work can be mixed only in order */
}

/* ---- the struct ---------------------------------------------------------------------------------- */

/* Up to 2.30.7, an unset maxCTAs (the least of all integers) is compared with minCTAs. */
static bool compares_unset(void) {
    return host_nccl_version() <= 23007;
}

static ncclResult_t check(ncclConfig_t *config) {
    bool crossed = config->minCTAs > config->maxCTAs && (config->maxCTAs != UNSET || compares_unset());
    if (crossed)
        return host_fail(ncclInvalidArgument, "config: minCTAs is %d and maxCTAs %d", config->minCTAs,
                         config->maxCTAs);
    for (int i = 0; i < MEMBERS; i++) {
        int *value = member_of(config, &members[i]);
        if (*value == UNSET)
            *value = members[i].fallback;
        else if (*value < members[i].least || *value > members[i].most)
            return host_fail(ncclInvalidArgument, "config: %s is %d", members[i].name, *value);
    }
    return ncclSuccess;
}

/* The size of the struct in the release that is imitated: what its last member begins with, and ends. */
static size_t known_size(void) {
    const member_t *last = members;
    for (int i = 0; i < MEMBERS; i++)
        if (members[i].since <= host_nccl_version())
            last = &members[i];
    size_t end = last->offset + sizeof(int), whole = sizeof(void *);
    return (end + whole - 1) / whole * whole;
}

static void clear(ncclConfig_t *config, const member_t *member) {
    *member_of(config, member) = UNSET;
}

/* The magic number of a struct that is too short to hold one counted as right before 2.22. */
static ncclResult_t copy(const ncclConfig_t *given, ncclConfig_t *config) {
    size_t size, most = known_size();
    memcpy(&size, given, sizeof size); /* the caller's struct may end right after it */
    config->magic = host_nccl_version() < 22200 ? NCCL_API_MAGIC : 0;
    config->version = (unsigned int)host_nccl_version();
    memcpy(config, given, size < most ? size : most);
    if (config->magic != NCCL_API_MAGIC)
        return host_fail(ncclInvalidArgument, "config: the magic number is %#x; was it initialised?",
                         config->magic);
    for (int i = 0; i < MEMBERS; i++)
        if (config->version < (unsigned int)members[i].since || host_nccl_version() < members[i].since)
            clear(config, &members[i]);
    return ncclSuccess;
}

ncclResult_t host_config_parse(const ncclConfig_t *given, ncclConfig_t *config) {
    memset(config, 0, sizeof *config);
    for (int i = 0; i < MEMBERS; i++)
        clear(config, &members[i]);
    ncclResult_t result = given != NULL ? copy(given, config) : ncclSuccess;
    if (result == ncclSuccess)
        result = check(config);
    if (result != ncclSuccess)
        return result;
    config->size = sizeof *config;
    config->magic = NCCL_API_MAGIC;
    config->version = (unsigned int)host_nccl_version();
    override(config);
    return ncclSuccess;
}

ncclResult_t host_config_inherit(const ncclConfig_t *given, const ncclConfig_t *parent,
                                 ncclConfig_t *config) {
    if (given != NULL) /* nothing is inherited then */
        return host_config_parse(given, config);
    *config = *parent;
    override(config);
    return ncclSuccess;
}
