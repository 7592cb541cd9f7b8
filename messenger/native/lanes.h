/* The caller's end of the data lanes to one peer. Every lane is a TCP connection with a thread that moves parts of batches, one exchange of
 * request and answer at a time, so that a batch which is given up costs no more than the lanes that are busy with it.
 *
 * Batches wait in a ring: each lane that is free takes the next part of the first and puts it at the end. A small batch is tried at once
 * by the caller's own thread, on the lane that is kept for such, for as long as an answer on a fast network takes. */
#ifndef SPRINGTIDE_MESSENGER_LANES_H
#define SPRINGTIDE_MESSENGER_LANES_H

#include "native.h"

enum { PART_ENTRIES = 512 };
enum { MAX_LANES = 64 };

typedef enum { EXCHANGED, LATER, BROKEN, GIVEN_UP } Outcome;
typedef enum { FREE, WOKEN, BUSY, CALLERS, HANDED_ON, RETIRED } State;
/* WOKEN: free, and its thread is about to look for work; CALLERS: the thread of the caller tries a small batch on it; HANDED_ON: and has left the rest to the lane's own thread */

typedef struct Lane {
    struct Lanes *lanes;
    pthread_t thread;
    pthread_cond_t wake;
    int fd, alarm; /* alarm: an eventfd that ends a wait for the network */
    int express;
    State state;
    int ended; /* its thread is at its end */
    /* -- the exchange; belongs to whoever made the lane BUSY -- */
    Batch *batch;
    uint32_t count;
    uint64_t part_bytes;
    Header request, answer;
    Entry table[PART_ENTRIES];
    size_t run_of[PART_ENTRIES];
    uint8_t verdicts[PART_ENTRIES];
    uint32_t sums[PART_ENTRIES];
    struct iovec slices[PART_ENTRIES], out[PART_ENTRIES + 3], in[PART_ENTRIES + 3];
    Vector sending, receiving;
    uint64_t seen_bytes, seen_signs; /* of the peer, at the last look */
    uint64_t quiet_ns, still_ns;     /* for so long there has been nothing new, and nothing on this lane */
    char reason[120];
} Lane;

typedef struct Lanes {
    PyObject_HEAD
    Py_buffer memory;
    int checksums, signal; /* signal: the eventfd that Python's loop watches */
    uint64_t silence_ns;
    pthread_mutex_t lock;
    Lane *lanes[MAX_LANES];
    int num_lanes, num_bulk;
    Batch *queue, *queue_end; /* batches with parts left to begin */
    Batch *finished;
    int lost; /* atomic */
    char reason[160];
    uint64_t signs; /* atomic: another number whenever something of the peer has come through */
    int misses, shy; /* of trying at once */
} Lanes;

/* ---- exchange.c: one exchange, by whoever has the lane, without the lock ---- */

void lane_prepare(Lane *lane);
/* Goes on with what `lane_prepare` began, until it is done or the time (of now_ns; 0: none) has come. */
Outcome lane_exchange(Lane *lane, uint64_t until);

/* ---- lanes.c: called with the lock ---- */

void *lane_main(void *lane);
/* Returns whether the batch has ended; else it will be among the finished. Called with the GIL too, and lets go of it. */
int lanes_begin(Lanes *self, Batch *batch);
void lanes_stop_batch(Lanes *self, Batch *batch);
void lanes_interrupt_batch(Lanes *self, Batch *batch);
void lanes_lose(Lanes *self, const char *reason);

#endif
