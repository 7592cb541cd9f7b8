/* What lanes and sessions share. */
#include "native.h"

#include <signal.h>
#include <time.h>

enum { STACK_BYTES = 256 << 10 };

size_t vector_window(const Vector *vector, struct iovec window[WINDOW_BUFFERS]) {
    size_t count = 0, room = WINDOW_BYTES;
    for (size_t i = vector->next; i < vector->count && count < WINDOW_BUFFERS && room; i++) {
        window[count] = vector->buffers[i];
        if (window[count].iov_len > room) window[count].iov_len = room;
        room -= window[count++].iov_len;
    }
    return count;
}

void vector_advance(Vector *vector, size_t num_bytes) {
    while (num_bytes) {
        struct iovec *buffer = &vector->buffers[vector->next];
        if (num_bytes < buffer->iov_len) {
            buffer->iov_base = (char *)buffer->iov_base + num_bytes;
            buffer->iov_len -= num_bytes;
            return;
        }
        num_bytes -= buffer->iov_len;
        vector->next++;
    }
}

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int start_thread(pthread_t *thread, void *(*main)(void *), void *argument) {
    sigset_t every, before;
    pthread_attr_t attributes;
    sigfillset(&every);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int error = pthread_create(thread, &attributes, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}
