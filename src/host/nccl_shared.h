/* The memory that the ranks of a communicator share: what lies in it, and what it means. */
#ifndef PYNCCL_HOST_NCCL_SHARED_H
#define PYNCCL_HOST_NCCL_SHARED_H

#include "host.h"

#include <sys/types.h>

#define HOST_MAX_RANKS 64
#define HOST_LINE_BYTES 48           /* payload that travels in the arrival's own cache line */
#define HOST_SLOT_BYTES (512 * 1024) /* payload a rank publishes at once otherwise */
#define HOST_SLOTS 4                 /* arrivals whose lines and slots exist at a time */
#define HOST_OFFERS 64               /* allocations of a rank that others may have mapped at a time */
#define HOST_MAGNITUDES 14           /* sizes of large operations, by powers of two */
#define HOST_RING_BYTES (256 * 1024) /* bytes of a message under way between two ranks */

typedef enum {
    HOST_ALL_REDUCE,
    HOST_REDUCE,
    HOST_BROADCAST,
    HOST_ALL_GATHER,
    HOST_REDUCE_SCATTER,
    HOST_ALL_TO_ALL,
    HOST_GATHER,
    HOST_SCATTER,
    HOST_COLLECTIVES,
    HOST_SEND = HOST_COLLECTIVES,
    HOST_RECV,
    HOST_FUNCTIONS
} host_function_t;

/* ---- shared memory (nccl_segment.c) -------------------------------------------------------------- */

/* What a rank says of an operation; the strict mode compares it. */
typedef struct {
    uint64_t count;
    uint8_t function, type, op, root;
} host_sketch_t;

/* An arrival: the number is written last and read first. Arrival k lies in line k % HOST_SLOTS, and its data,
 * if they are more than a line holds, in that slot. A rank publishes k + 1 when all have published k - 1 and
 * it has done with its data; so then all have done with those of k - 3, and four of each are enough. */
typedef struct {
    _Alignas(64) _Atomic uint32_t arrival;
    uint8_t function, type, op, root;
    uint64_t count;
    unsigned char data[HOST_LINE_BYTES];
} host_line_t;
_Static_assert(sizeof(host_line_t) == 64, "an arrival is one cache line");

/* What a rank that waits long is waiting in, so that ranks in different calls can tell. */
typedef struct {
    _Alignas(64) _Atomic uint64_t sequence; /* 0 while it is written */
    _Atomic uint64_t count;
    _Atomic uint32_t packed;
} host_intent_t;

/* What a rank says when child c of its communicator is made by a split; it uses note c % 2. */
typedef struct {
    _Alignas(64) _Atomic uint32_t told; /* number of the child whose colour and key these are */
    int32_t color, key;
    _Atomic uint32_t offered; /* number of the child for which `id` is its clique's */
    ncclUniqueId id;
} host_note_t;

/* What a rank tells when all register memory together; exchange e uses post e % 2. */
typedef struct {
    _Alignas(64) _Atomic uint32_t told; /* number of the exchange */
    int32_t failure;
    unsigned char words[64];
} host_post_t;

/* What a rank says in ncclCommShrink; the lowest rank that stays answers all others. */
enum { HOST_SHRINK_IDLE, HOST_SHRINK_ASKED, HOST_SHRINK_ANSWERED };
typedef struct {
    _Alignas(64) _Atomic uint32_t state;
    _Atomic uint64_t survivors; /* one bit a rank */
    ncclUniqueId id;
} host_shrink_t;

/* Where ranks 0 and n - 1 find the id of a communicator that grows, and all others rank 0's. */
typedef struct {
    _Alignas(64) _Atomic uint32_t entered; /* number of the child for which the rank has come */
    _Atomic uint32_t told;                 /* number of the child whose id this is */
    ncclUniqueId id;
} host_grow_t;

/* A buffer that others may use: its address for the ranks of this process; for the others an offer, or, where
 * they attach to this process, the address too. */
typedef struct {
    uint64_t address, serial, offset;
    int32_t offer; /* -1: none */
    bool fresh;    /* others may have to map it first */
    bool attached;
} host_exposure_t;

/* What a rank says with the first arrival of a large operation. */
typedef struct {
    _Alignas(64) host_exposure_t send, recv;
    uint64_t factor;   /* what its inputs are multiplied by */
    bool exposed;      /* what others need of its buffers, they can reach */
    bool sends, recvs; /* which of the two that is */
    bool failed;       /* with the second arrival: it could not reach all */
} host_manifest_t;

/* An allocation of a rank, for the others to map. */
typedef struct {
    _Atomic uint64_t serial; /* 0: none */
    host_share_t share;
} host_offer_t;

typedef enum { HOST_ABSENT, HOST_JOINING, HOST_READY, HOST_LEFT } host_presence_t;

typedef struct {
    _Alignas(64) _Atomic uint32_t presence;
    int32_t pid;
    uint64_t start; /* of the process, in clock ticks since boot */
    int32_t device, version;
    uint64_t home;       /* where that process has the secret of this segment: whoever attaches to it looks */
    uint64_t encryption; /* which key the process has set, 0 for none */
    uint64_t ids;        /* a hash of all unique ids that its init was given */
    _Atomic uint32_t finalized;
    _Atomic uint32_t barrier; /* how many barriers it has come to */
    _Atomic int32_t core;     /* on which it was when it last arrived anywhere */
    _Alignas(64) host_bell_t bell;
    host_line_t line[HOST_SLOTS];
    host_manifest_t manifest[HOST_SLOTS];
    _Alignas(64) _Atomic uint32_t visiting; /* it touches others' buffers now */
    _Alignas(64) _Atomic uint32_t closed;   /* nobody may touch its buffers any more */
    _Atomic uint32_t withdrawn;             /* grows when an offer ends */
    host_offer_t offers[HOST_OFFERS];
    host_intent_t intent[2]; /* of a kernel, and of a call that makes first contact */
    host_note_t note[2];
    host_post_t post[2];
    host_shrink_t shrink;
    host_grow_t grow;
    _Atomic uint8_t way[HOST_COLLECTIVES][HOST_MAGNITUDES][2]; /* rank 0's: host_way_t of the next two */
    _Atomic uint8_t connected[HOST_COLLECTIVES];
    _Atomic uint8_t met[HOST_MAX_RANKS];
} host_area_t;

/* One direction between two ranks: a ring of bytes, and the number of the message on its way. */
typedef struct {
    _Alignas(64) _Atomic uint64_t head; /* bytes put in; these are the sender's */
    _Atomic uint32_t offered;
    uint32_t sent_type;
    uint64_t sent_count;
    bool direct; /* it is not put into the ring, since the receiver can reach the sender's buffer, */
    host_exposure_t exposure;
    _Alignas(64) _Atomic uint64_t tail; /* bytes taken out; these are the receiver's */
    _Atomic uint32_t taken, refused;
    _Atomic uint32_t unreached; /* unless it says here that it cannot */
    uint32_t wanted_type;
    uint64_t wanted_count;
    _Alignas(64) unsigned char data[HOST_RING_BYTES];
} host_channel_t;

typedef struct {
    char magic[8];
    uint8_t secret[16];
    _Alignas(64) _Atomic uint32_t ranks; /* set by the first that joins */
    _Atomic uint32_t ready;              /* ranks that have mapped the whole */
    _Atomic uint32_t broken; /* 1 while `reason` is written, then 2: nobody will complete this init */
    char reason[512];
} host_head_t;

typedef struct {
    char magic[8];
    host_share_t share; /* its bytes say nothing: the number of ranks is not known yet */
    uint8_t secret[16];
} host_id_t;

size_t host_segment_bytes(int ranks);
host_area_t *host_segment_area(host_head_t *head, int rank);
unsigned char *host_segment_slot(host_head_t *head, int rank, uint32_t arrival);
host_channel_t *host_segment_channel(host_head_t *head, int from, int to);
/* A new segment and the id by which others find it; this process offers it until all ranks have come. */
ncclResult_t host_segment_offer(ncclUniqueId *unique);
/* Close what needs to be offered no more. With an id: also that one, whoever is missing. */
void host_segment_withdraw(const ncclUniqueId *unique);
/* SystemError unless the process that made an id is alive. */
ncclResult_t host_segment_check(const ncclUniqueId *unique);
/* Map the segment of an id for `ranks` ranks. InvalidUsage: somebody else's number of ranks, or used before.
 */
ncclResult_t host_segment_map(const host_id_t *id, int ranks, host_head_t **head);
void host_segment_break(host_head_t *head, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
