/* Which way the data of large collectives take between processes. None is always the best: between cores that
 * share a cache it is to write slots through it, at some sizes; between cores that do not, that takes up to
 * seven times as long as writing past it; and what copies by the kernel cost depends on the sizes of pages. A
 * virtual machine may have the first today and the second a minute later. So rank 0 measures, for each
 * function and magnitude, and decides for all.
 *
 * At the end of the n-th operation of a kind it says how the n+2nd goes. Nobody begins that before all have
 * begun the n+1st, so that all know in time; and all have read what it said for the n-th. Ranks that are out
 * of step may read different words; those who would attach then find that not all do, and use their slots.
 */
#include "nccl_collective.h"

/* A trial is so many operations: the first touches what the way needs, of the others the best counts. Long
 * operations are short of nothing but memory, and one of them says enough. */
enum { TRIAL = 4, LONG_TRIAL = 2 };
/* Another way is tried for the first time after so many trials' worth of operations, and again when that
 * would take 1 / PATIENCE of the time since. */
enum { FIRST = 2, PATIENCE = 64 };

/* By powers of two. */
static int magnitude_of(size_t bytes) {
    int magnitude = 0;
    for (size_t most = (size_t)2 * HOST_POLL_BYTES; bytes > most && magnitude < HOST_MAGNITUDES - 1;
         most *= 2)
        magnitude++;
    return magnitude;
}

static host_ways_t *ways_of(const host_collective_t *c) {
    return &c->kernel.comm->ways[c->task.function][magnitude_of(c->kernel.work.bytes)];
}

static _Atomic uint8_t *word_of(const host_collective_t *c) {
    int magnitude = magnitude_of(c->kernel.work.bytes);
    return &host_segment_area(c->kernel.clique->head, 0)->way[c->task.function][magnitude][c->odd];
}

static int trial_of(const host_collective_t *c) {
    return host_collective_is_large(c) ? LONG_TRIAL : TRIAL;
}

bool host_way_attaches(host_clique_t *clique, size_t bytes) {
    host_way_t forced = host_config()->way;
    bool wanted = forced == HOST_WAYS ? bytes >= HOST_ATTACH_BYTES : forced == HOST_WAY_ATTACH;
    return wanted && host_attach_allowed(clique);
}

static bool is_possible(const host_collective_t *c, host_way_t way) {
    return way != HOST_WAY_ATTACH || host_way_attaches(c->kernel.clique, c->kernel.work.bytes);
}

/* As long as nothing is known: what costs least where it is bad. What fits into a second cache is not much
 * dearer past it than through it. A root that only writes slots is as slow as its one core, while two
 * processes can copy at once. */
static host_way_t guess(const host_collective_t *c) {
    if (c->kernel.work.bytes < HOST_ATTACH_BYTES)
        return HOST_WAY_PAST;
    bool from_one = c->shape->rooted && !c->shape->reduces;
    if ((host_collective_is_large(c) || from_one) && is_possible(c, HOST_WAY_ATTACH))
        return HOST_WAY_ATTACH;
    return host_collective_is_large(c) ? HOST_WAY_PAST : HOST_WAY_CACHED;
}

void host_way_begin(host_collective_t *c) {
    host_ways_t *ways = ways_of(c);
    c->odd = ways->odd;
    ways->odd = !ways->odd;
    host_way_t forced = host_config()->way;
    uint8_t word = atomic_load(word_of(c)); /* 0: nothing was said */
    c->way = forced != HOST_WAYS ? forced : word != 0 ? (host_way_t)(word - 1) : guess(c);
    if (c->way == HOST_WAY_ATTACH && !host_attach_allowed(c->kernel.clique))
        c->way = HOST_WAY_CACHED;
    c->timed = true;
    c->clock = host_now_ns();
}

void host_way_pause(host_collective_t *c) {
    c->spent = host_now_ns() - c->clock;
}

void host_way_resume(host_collective_t *c) {
    c->clock = host_now_ns();
}

/* One measurement says little: the thread may have lost its core. */
static void note(const host_collective_t *c, host_ways_t *ways, float cost) {
    host_estimate_t *own = &ways->estimates[c->way];
    bool fresh = own->noted < trial_of(c) - 1; /* of a trial */
    own->noted += fresh;
    if (own->noted == 1 || (fresh && cost < own->cost))
        own->cost = cost;
    else if (!fresh)
        own->cost = (own->cost + (cost < 2 * own->cost ? cost : 2 * own->cost)) / 2;
    for (int other = 0; other < HOST_WAYS; other++)
        ways->estimates[other].since += cost;
}

static bool is_due(const host_estimate_t *estimate, float best, int trial) {
    if (best == 0)
        return false;
    float trials = estimate->tried ? PATIENCE * estimate->cost : FIRST * best;
    return estimate->since >= trials * (float)trial;
}

static host_way_t choose(const host_collective_t *c, host_ways_t *ways) {
    if (ways->left != 0) {
        ways->left--;
        return ways->trial;
    }
    host_way_t best = guess(c);
    for (host_way_t way = HOST_WAY_CACHED; way < HOST_WAYS; way++) {
        float cost = ways->estimates[way].cost;
        if (is_possible(c, way) && cost != 0 &&
            (cost < ways->estimates[best].cost || !ways->estimates[best].cost))
            best = way;
    }
    for (host_way_t way = HOST_WAY_CACHED; way < HOST_WAYS; way++) {
        host_estimate_t *estimate = &ways->estimates[way];
        if (way == best || !is_possible(c, way) || !is_due(estimate, ways->estimates[best].cost, trial_of(c)))
            continue;
        *estimate = (host_estimate_t){.cost = estimate->cost, .tried = true};
        ways->trial = way;
        ways->left = trial_of(c) - 1;
        return way;
    }
    return best;
}

void host_way_end(host_collective_t *c) {
    if (c->kernel.comm->rank != 0)
        return;
    host_ways_t *ways = ways_of(c);
    int64_t ns = c->spent + host_now_ns() - c->clock;
    if (c->timed && c->way == ways->last)
        note(c, ways, (float)ns / (float)c->kernel.work.bytes);
    ways->last = c->timed ? c->way : HOST_WAYS;
    atomic_store(word_of(c), (uint8_t)(choose(c, ways) + 1));
}
