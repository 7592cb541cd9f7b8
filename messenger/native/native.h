/* The part of Messenger that runs without the GIL: copies, the caller's end of tcp data lanes, and the owner's.
 *
 * Nothing in here knows of asyncio: Python makes connections and shakes hands, then lends the file descriptor of a lane; what has ended is
 * signalled through an eventfd. The bytes on the wire are those of docs/wire.md. */
#ifndef SPRINGTIDE_MESSENGER_NATIVE_H
#define SPRINGTIDE_MESSENGER_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdint.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian, and so is this code"
#endif

/* ---- the wire (docs/wire.md, data lanes) ---- */

enum { OP_READ = 1, OP_WRITE = 2 };
enum { VERDICT_DONE = 0, VERDICT_STALE = 1, VERDICT_CORRUPT = 2 };
enum { MAX_SLICES = 1024 };

typedef struct {
    uint8_t op;
    uint8_t padding[3];
    uint32_t count;
    uint64_t payload_bytes;
} Header;

typedef struct {
    uint64_t offset, length, generation;
} Entry;

_Static_assert(sizeof(Header) == 16 && sizeof(Entry) == 24, "as docs/wire.md has them");

/* ---- scatter/gather ---- */

enum { WINDOW_BUFFERS = 256, WINDOW_BYTES = 256 << 10 };
/* One system call moves so much at most: it stays in the cache between the two copies of a loopback transfer, and it bounds how long a
 * session may be writing on the strength of a generation that it has checked. */

typedef struct {
    struct iovec *buffers; /* what is left; consumed in place */
    size_t count, next;
} Vector;

size_t vector_window(const Vector *vector, struct iovec window[WINDOW_BUFFERS]);
void vector_advance(Vector *vector, size_t num_bytes);
static inline int vector_done(const Vector *vector) { return vector->next == vector->count; }

/* ---- checksums ---- */

void crc32_init(void);
uint32_t crc32_of(const void *data, size_t num_bytes); /* as zlib.crc32 */

/* ---- batches ---- */

typedef struct {
    uint64_t local, remote, length, generation;
    Py_ssize_t first_slice; /* it and those up to the next run's first */
    uint8_t verdict;        /* the worst of any part; written with relaxed atomics */
} Run;

enum { OUTCOME_COMPLETE = 0, OUTCOME_LOST = 1, OUTCOME_INTERRUPTED = 2 };

/* The slices of one read or write, neighbours joined. Used once: by `copy`, or by one set of lanes, whose lock then guards what follows
 * `-- progress --`. */
typedef struct Batch {
    PyObject_HEAD
    Run *runs;
    size_t num_runs;
    Py_ssize_t num_slices;
    uint64_t num_bytes, granule;
    Py_ssize_t local_bytes, remote_bytes; /* of the regions that it was checked against */
    /* -- progress -- */
    int op;
    size_t next_run;
    uint64_t next_offset, remaining;
    int active;      /* lanes that move a part of it now */
    int stopped;     /* no part is to be begun any more */
    int interrupted; /* and those in flight are to be given up; atomic */
    int done, outcome;
    struct Batch *next; /* in the queue, or among the finished */
} Batch;

int batch_init(void);

extern PyTypeObject Batch_Type, Lanes_Type, Session_Type;

static inline void run_judge(Run *run, uint8_t verdict) {
    if (verdict > __atomic_load_n(&run->verdict, __ATOMIC_RELAXED)) __atomic_store_n(&run->verdict, verdict, __ATOMIC_RELAXED);
}

/* ---- sessions ---- */

PyObject *sessions_settle(PyObject *module, PyObject *unused);

/* ---- small things ---- */

uint64_t now_ns(void);
/* Starts a thread with a small stack that no signal is delivered to: they are Python's. */
int start_thread(pthread_t *thread, void *(*main)(void *), void *argument);

#endif
