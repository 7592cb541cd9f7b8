/* The owner's end of one data lane: a thread that serves the region to one peer, request by request, whatever the owner's Python does.
 *
 * The fence. A session writes into the region only within a section: it makes its section number odd, looks at the generations, takes in at
 * most a window of bytes without waiting for the network, and makes the number even. So an owner that has changed generations and then seen
 * every section end (`settle`) knows that not one byte of an old handle lands any more. */
#ifndef SPRINGTIDE_MESSENGER_SESSION_H
#define SPRINGTIDE_MESSENGER_SESSION_H

#include "native.h"

enum { ANSWERED_AT_ONCE = 64 << 10, SCRATCH_BYTES = WINDOW_BYTES };
enum { LINGER_NS = 50000 };
enum { BUFFER_BYTES = ANSWERED_AT_ONCE + (8 << 10), RECEIVED_AHEAD = 32 << 10 };
/* ANSWERED_AT_ONCE: a read of no more is copied first and sent in one system call. RECEIVED_AHEAD: holds the longest table; what is of the slices after it is copied once more. */

typedef struct Session {
    PyObject_HEAD
    Py_buffer memory, generations;
    uint64_t granule;
    int fd, signal, checksums;
    pthread_t thread;
    int running;          /* the thread is to be joined */
    int aborted, ended;   /* atomic */
    uint64_t section;     /* atomic; odd: the thread may be writing into the region */
    int at_fault, error;  /* the peer broke the protocol: `complaint` says how; else the error number that ended the session, or 0 */
    char complaint[160];
    struct Session *next; /* in the list of all that run */
    /* -- the request; the thread's own -- */
    char buffer[BUFFER_BYTES];
    uint64_t linger_until; /* small requests come one after another: until this time of now_ns the thread looks for the next without sleeping */
    size_t begin, end; /* what of the buffer has been received and not used */
    char *discarded;   /* where the bytes of stale slices go */
    Header request;
    Entry entries[MAX_SLICES];
    struct iovec slices[MAX_SLICES];
    uint8_t verdicts[MAX_SLICES];
    uint32_t sums[MAX_SLICES];
} Session;

void *session_main(void *session);

#endif
