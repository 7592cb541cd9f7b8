/* Who does what: batches in their ring, lanes that take parts of them, and the end of both. */
#include "lanes.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

enum { LARGEST_PART = 2 << 20, SMALLEST_PART = 256 << 10 };
enum { EXPRESS_BYTES = 64 << 10 }; /* what the express lane takes, and what is tried at once */
enum { AT_ONCE_NS = 60000, MISSES_UNTIL_SHY = 8, SHY_BATCHES = 64 };

/* ---- the ring of batches (under the lock) ---- */

static void enqueue(Lanes *self, Batch *batch) {
    batch->next = NULL;
    if (self->queue)
        self->queue_end->next = batch;
    else
        self->queue = batch;
    self->queue_end = batch;
}

static int dequeue(Lanes *self, Batch *batch) {
    Batch *before = NULL;
    for (Batch *at = self->queue; at; before = at, at = at->next) {
        if (at != batch) continue;
        if (before)
            before->next = at->next;
        else
            self->queue = at->next;
        if (self->queue_end == at) self->queue_end = before;
        return 1;
    }
    return 0;
}

static void ring(int eventfd_number) {
    uint64_t one = 1;
    while (write(eventfd_number, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

/* Nobody moves any part of it any more. */
static void finish(Lanes *self, Batch *batch, int outcome) {
    batch->outcome = outcome;
    batch->done = 1;
    batch->next = self->finished;
    self->finished = batch;
    ring(self->signal);
}

/* ---- parts ---- */

static void add_entry(Lane *lane, const Run *run, size_t index, uint64_t offset, uint64_t length) {
    lane->table[lane->count] = (Entry){run->remote + offset, length, run->generation};
    lane->run_of[lane->count] = index;
    lane->slices[lane->count] = (struct iovec){(char *)lane->lanes->memory.buf + run->local + offset, length};
    lane->count++;
    lane->part_bytes += length;
}

/* Large ones first and smaller ones at the end, so that the lanes finish together. */
static uint64_t part_size(const Lanes *self, const Batch *batch) {
    uint64_t size = batch->remaining / (2 * (uint64_t)(self->num_bulk > 0 ? self->num_bulk : 1));
    return size > LARGEST_PART ? LARGEST_PART : size < SMALLEST_PART ? SMALLEST_PART : size;
}

static void take_part(Lane *lane, Batch *batch) {
    uint64_t room = part_size(lane->lanes, batch);
    lane->batch = batch;
    lane->count = 0;
    lane->part_bytes = 0;
    while (batch->next_run < batch->num_runs && lane->count < PART_ENTRIES && room) {
        const Run *run = &batch->runs[batch->next_run];
        uint64_t left = run->length - batch->next_offset, length = left < room ? left : room;
        add_entry(lane, run, batch->next_run, batch->next_offset, length);
        room -= length;
        batch->next_offset += length;
        if (length == left) batch->next_run++, batch->next_offset = 0;
    }
    batch->remaining -= lane->part_bytes;
    batch->active++;
}

static int is_small(const Batch *batch) { return batch->num_bytes <= EXPRESS_BYTES && batch->num_runs <= PART_ENTRIES; }

/* The first batch in the ring that this lane serves; it goes to the end while parts of it are left. */
static Batch *next_batch(Lane *lane) {
    Lanes *self = lane->lanes;
    Batch *batch = self->queue;
    while (batch && lane->express && !is_small(batch)) batch = batch->next;
    if (!batch) return NULL;
    dequeue(self, batch);
    take_part(lane, batch);
    if (batch->remaining) enqueue(self, batch);
    return batch;
}

/* ---- losing, giving up (under the lock) ---- */

void lanes_lose(Lanes *self, const char *reason) {
    if (self->lost) return;
    snprintf(self->reason, sizeof self->reason, "%s", reason);
    __atomic_store_n(&self->lost, 1, __ATOMIC_RELEASE);
    for (Batch *batch = self->queue, *next; batch; batch = next) {
        next = batch->next;
        batch->stopped = 1;
        if (!batch->active) finish(self, batch, OUTCOME_LOST);
    }
    self->queue = self->queue_end = NULL;
    for (int i = 0; i < self->num_lanes; i++) {
        ring(self->lanes[i]->alarm);
        pthread_cond_signal(&self->lanes[i]->wake);
    }
    ring(self->signal);
}

void lanes_stop_batch(Lanes *self, Batch *batch) {
    if (batch->done || batch->stopped) return;
    batch->stopped = 1;
    dequeue(self, batch);
    if (!batch->active) finish(self, batch, OUTCOME_INTERRUPTED);
}

void lanes_interrupt_batch(Lanes *self, Batch *batch) {
    __atomic_store_n(&batch->interrupted, 1, __ATOMIC_RELEASE);
    lanes_stop_batch(self, batch);
    for (int i = 0; i < self->num_lanes; i++)
        if (self->lanes[i]->batch == batch) ring(self->lanes[i]->alarm);
}

/* The lane has ended its part of a batch, one way or the other. Returns whether the batch has ended with it. */
static int leave(Lane *lane, Outcome outcome) {
    Lanes *self = lane->lanes;
    Batch *batch = lane->batch;
    lane->batch = NULL;
    lane->state = outcome == EXCHANGED ? FREE : RETIRED;
    batch->active--;
    if (outcome != EXCHANGED) {
        batch->remaining += lane->part_bytes ? lane->part_bytes : 1;
        batch->stopped = 1;
        dequeue(self, batch);
    }
    if (outcome == BROKEN) lanes_lose(self, lane->reason);
    return !batch->active && !batch->done && (batch->stopped || !batch->remaining);
}

static int outcome_of(const Lanes *self, const Batch *batch) {
    if (!batch->remaining) return OUTCOME_COMPLETE;
    return self->lost ? OUTCOME_LOST : OUTCOME_INTERRUPTED;
}

/* ---- the lane's thread ---- */

/* Under the lock. */
static int goes_on(Lane *lane) {
    if (lane->state == WOKEN) lane->state = FREE;
    return lane->state != RETIRED && !(lane->lanes->lost && lane->state == FREE);
}

/* Under the lock. Whether there is an exchange to make, and whether it was begun before. */
static int has_work(Lane *lane, int *begun) {
    *begun = lane->state == HANDED_ON;
    return *begun || (lane->state == FREE && !lane->lanes->lost && next_batch(lane));
}

void *lane_main(void *argument) {
    Lane *lane = argument;
    Lanes *self = lane->lanes;
    int begun;
    pthread_mutex_lock(&self->lock);
    while (goes_on(lane)) {
        if (!has_work(lane, &begun)) {
            pthread_cond_wait(&lane->wake, &self->lock);
            continue;
        }
        lane->state = BUSY;
        pthread_mutex_unlock(&self->lock);
        if (!begun) lane_prepare(lane);
        Outcome outcome = lane_exchange(lane, 0);
        pthread_mutex_lock(&self->lock);
        Batch *batch = lane->batch;
        if (leave(lane, outcome)) finish(self, batch, outcome_of(self, batch));
    }
    lane->ended = 1;
    ring(self->signal);
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* ---- submitting ---- */

static Lane *free_express_lane(Lanes *self) {
    for (int i = 0; i < self->num_lanes; i++)
        if (self->lanes[i]->express && self->lanes[i]->state == FREE) return self->lanes[i];
    return NULL;
}

/* Under the lock. The lane to try `batch` on at once; NULL when it is too large, must queue, or tries have been in vain lately. */
static Lane *lane_at_once(Lanes *self, const Batch *batch) {
    if (!is_small(batch) || self->queue) return NULL;
    if (self->shy > 0) {
        self->shy--;
        return NULL;
    }
    return free_express_lane(self);
}

static void wake(Lane *lane) {
    if (lane->state == FREE) lane->state = WOKEN;
    pthread_cond_signal(&lane->wake);
}

/* As many free lanes as the batch has parts. Those that were woken for an earlier one have that to do. */
static void wake_lanes(Lanes *self, const Batch *batch) {
    uint64_t parts = batch->remaining / SMALLEST_PART + 1;
    for (int i = 0; i < self->num_lanes && parts; i++) {
        Lane *lane = self->lanes[i];
        if (lane->state != FREE || (lane->express && !is_small(batch))) continue;
        wake(lane);
        parts--;
    }
}

/* Called with the GIL and the lock. Returns whether the batch has ended. */
static int try_at_once(Lanes *self, Lane *lane, Batch *batch) {
    Outcome outcome;
    lane->state = CALLERS;
    take_part(lane, batch);
    pthread_mutex_unlock(&self->lock);
    Py_BEGIN_ALLOW_THREADS
    lane_prepare(lane);
    outcome = lane_exchange(lane, now_ns() + AT_ONCE_NS);
    Py_END_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    if (outcome == LATER) {
        if (++self->misses >= MISSES_UNTIL_SHY) self->shy = SHY_BATCHES;
        lane->state = HANDED_ON;
        wake(lane);
        return 0;
    }
    self->misses = 0;
    leave(lane, outcome);
    // Its thread may have been woken meanwhile, by another lane's loss even, and gone back to sleep.
    if (lane->state == RETIRED || self->queue || self->lost) wake(lane);
    batch->outcome = outcome_of(self, batch);
    batch->done = 1;
    return 1;
}

int lanes_begin(Lanes *self, Batch *batch) {
    Lane *lane = lane_at_once(self, batch);
    if (lane) return try_at_once(self, lane, batch);
    wake_lanes(self, batch);
    enqueue(self, batch);
    return 0;
}
