/* ncclConfig_t: which structs are taken, what an unset member means, which values are refused. */
#include "nccl.h"

#include <string.h>

#define UNSET NCCL_CONFIG_UNDEF_INT

typedef struct {
    const char *name;
    size_t offset;
    unsigned int since; /* a struct whose version is older does not have the member, whatever its size */
    int least, most, fallback;
} member_t;

#define MEMBER(name, since, least, most, fallback)                                                           \
    {#name, offsetof(ncclConfig_t, name), since, least, most, fallback}

static const member_t members[] = {
    MEMBER(blocking, 21400, 0, 1, 1),
    MEMBER(cgaClusterSize, 21700, 0, INT_MAX, 4),
    MEMBER(minCTAs, 21700, 1, INT_MAX, 1),
    MEMBER(maxCTAs, 21700, 1, INT_MAX, 64),
    MEMBER(splitShare, 0, 0, 1, 0),
    MEMBER(trafficClass, 22500, INT_MIN, INT_MAX, UNSET),
    MEMBER(collnetEnable, 22700, 0, 1, 0),
    MEMBER(CTAPolicy, 22700, 0, 3, 0),
    MEMBER(shrinkShare, 22700, 0, 1, 0),
    MEMBER(nvlsCTAs, 22700, 1, INT_MAX, UNSET),
    MEMBER(nChannelsPerNetPeer, 22800, 1, 64, UNSET),
    MEMBER(nvlinkCentricSched, 22800, 0, 1, 0),
    MEMBER(graphUsageMode, 22900, 0, 2, 2),
    MEMBER(numRmaCtx, 22900, 0, INT_MAX, 1),
    MEMBER(maxP2pPeers, 23000, 1, INT_MAX, UNSET),
    MEMBER(graphStreamOrdering, 23005, 0, 1, 1),
    MEMBER(launchOrderImplicit, 23100, 0, 1, 0),
    MEMBER(numRmaSig, 23100, 0, INT_MAX, 1),
    MEMBER(rmaEagerInit, 23100, 0, 1, 0),
    MEMBER(hostCftMode, 23100, 1, 3, UNSET),
    MEMBER(nvlsHostMode, 23200, INT_MIN, INT_MAX, UNSET),
};
enum { MEMBERS = sizeof members / sizeof members[0] };

static int *member_of(ncclConfig_t *config, const member_t *member) {
    return (int *)(void *)((char *)config + member->offset);
}

static ncclResult_t check(ncclConfig_t *config) {
    for (int i = 0; i < MEMBERS; i++) {
        int *value = member_of(config, &members[i]);
        if (*value == UNSET)
            *value = members[i].fallback;
        else if (*value < members[i].least || *value > members[i].most)
            return host_fail(ncclInvalidArgument, "config: %s is %d", members[i].name, *value);
    }
    if (config->minCTAs > config->maxCTAs)
        return host_fail(ncclInvalidArgument, "config: minCTAs is %d and maxCTAs %d", config->minCTAs,
                         config->maxCTAs);
    if (config->CTAPolicy == 3)
        config->CTAPolicy = 2; /* the two policies exclude each other, and the zero-CTA one wins */
    if (config->blocking == 0)
        return host_fail(ncclInvalidArgument,
                         "config: blocking=0 is not emulated by the host engine; use blocking=1");
    return ncclSuccess;
}

ncclResult_t host_config_parse(const ncclConfig_t *given, ncclConfig_t *config) {
    memset(config, 0, sizeof *config);
    for (int i = 0; i < MEMBERS; i++)
        *member_of(config, &members[i]) = UNSET;
    if (given == NULL) {
        config->version = HOST_NCCL_VERSION;
    } else {
        size_t size;
        memcpy(&size, given, sizeof size); /* the caller's struct may end right after it */
        memcpy(config, given, size < sizeof *config ? size : sizeof *config);
        if (config->magic != NCCL_API_MAGIC)
            return host_fail(ncclInvalidArgument, "config: the magic number is %#x; was it initialised?",
                             config->magic);
        for (int i = 0; i < MEMBERS; i++)
            if (config->version < members[i].since)
                *member_of(config, &members[i]) = UNSET;
    }
    config->size = sizeof *config;
    config->magic = NCCL_API_MAGIC;
    return check(config);
}
