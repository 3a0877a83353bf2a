/* Three ranks in one process: sums, a gathering and messages round the ring, small and large. */
#include "../clients/programs/client.h"

enum { RANKS = 3, MOST = 1000003 };

static float given[RANKS][MOST], summed[RANKS][MOST], passed[RANKS][MOST], gathered[RANKS][RANKS * MOST];
static ncclComm_t comms[RANKS];
static cudaStream_t streams[RANKS];

static void check(size_t count) {
    for (int rank = 0; rank < RANKS; rank++)
        for (size_t i = 0; i < count; i++) {
            MUST(summed[rank][i] != (float)(3 * (i % 1000) + 3));
            MUST(passed[rank][i] != given[(rank + RANKS - 1) % RANKS][i]);
            for (int from = 0; from < RANKS; from++)
                MUST(gathered[rank][(size_t)from * count + i] != given[from][i]);
        }
}

static void turn(size_t count) {
    MUST(ncclGroupStart());
    for (int rank = 0; rank < RANKS; rank++) {
        ncclComm_t comm = comms[rank];
        cudaStream_t stream = streams[rank];
        MUST(ncclAllReduce(given[rank], summed[rank], count, ncclFloat32, ncclSum, comm, stream));
        MUST(ncclAllGather(given[rank], gathered[rank], count, ncclFloat32, comm, stream));
        MUST(ncclSend(given[rank], count, ncclFloat32, (rank + 1) % RANKS, comm, stream));
        MUST(ncclRecv(passed[rank], count, ncclFloat32, (rank + RANKS - 1) % RANKS, comm, stream));
    }
    MUST(ncclGroupEnd());
    for (int rank = 0; rank < RANKS; rank++)
        MUST(cuStreamSynchronize(streams[rank]));
    check(count);
    printf("%zu\n", count);
}

int main(void) {
    const int devices[RANKS] = {0, 1, 2};
    void *context;
    MUST(cuInit(0));
    for (int rank = 0; rank < RANKS; rank++) {
        MUST(cuDevicePrimaryCtxRetain(&context, rank));
        MUST(cuCtxSetCurrent(context));
        MUST(cuStreamCreate(&streams[rank], 1));
        for (size_t i = 0; i < MOST; i++)
            given[rank][i] = (float)(i % 1000 + (size_t)rank);
    }
    MUST(ncclCommInitAll(comms, RANKS, devices));
    turn(2);
    turn(30000);
    turn(MOST);
    for (int rank = 0; rank < RANKS; rank++)
        MUST(ncclCommDestroy(comms[rank]));
    return 0;
}
