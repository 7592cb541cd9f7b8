/* What a session does: it serves reads and writes. */
#include "session.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static char zeros[SCRATCH_BYTES]; /* sent for what has turned stale */

/* ---- the fence ---- */

static void enter_section(Session *self) { __atomic_add_fetch(&self->section, 1, __ATOMIC_SEQ_CST); }
static void leave_section(Session *self) { __atomic_add_fetch(&self->section, 1, __ATOMIC_RELEASE); }

/* A slice that has been refused stays refused. */
static int is_refused(Session *self, uint32_t index) {
    const uint64_t *generations = self->generations.buf;
    const Entry *entry = &self->entries[index];
    if (__atomic_load_n(&generations[entry->offset / self->granule], __ATOMIC_ACQUIRE) != entry->generation)
        self->verdicts[index] = VERDICT_STALE;
    return self->verdicts[index] == VERDICT_STALE;
}

/* ---- receiving and sending ---- */

static int fail_with(Session *self, int error) {
    if (!self->error && !self->at_fault) self->error = error;
    return -1;
}

static int refuse(Session *self, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(self->complaint, sizeof self->complaint, format, arguments);
    va_end(arguments);
    self->at_fault = 1;
    return -1;
}

static int is_aborted(Session *self) { return __atomic_load_n(&self->aborted, __ATOMIC_SEQ_CST); }

static int await_input(Session *self) {
    struct pollfd file = {self->fd, POLLIN, 0};
    while (poll(&file, 1, -1) < 0)
        if (errno != EINTR) return fail_with(self, errno);
    return is_aborted(self) ? fail_with(self, ECONNABORTED) : 0;
}

/* At least `num_bytes` in the buffer. 1: the peer ended the stream before the first byte of a request. */
static int need(Session *self, size_t num_bytes, int first) {
    if (self->begin) {
        memmove(self->buffer, self->buffer + self->begin, self->end - self->begin);
        self->end -= self->begin;
        self->begin = 0;
    }
    while (self->end < num_bytes) {
        ssize_t received = recv(self->fd, self->buffer + self->end, RECEIVED_AHEAD - self->end, MSG_DONTWAIT);
        if (received > 0) {
            self->end += (size_t)received;
        } else if (received == 0) {
            return first && !self->end ? 1 : fail_with(self, ECONNRESET);
        } else if (errno == EAGAIN && now_ns() < self->linger_until) {
            sched_yield();
        } else if (errno == EAGAIN) {
            if (await_input(self)) return -1;
        } else if (errno != EINTR) {
            return fail_with(self, errno);
        }
    }
    return 0;
}

/* How much of the window one system call took; 0 after a wait, or when it is to be tried again. */
static ssize_t send_window(Session *self, struct iovec *window, size_t count) {
    struct msghdr message = {.msg_iov = window, .msg_iovlen = count};
    ssize_t sent = sendmsg(self->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (errno == EAGAIN) {
        struct pollfd file = {self->fd, POLLOUT, 0};
        if (poll(&file, 1, -1) < 0 && errno != EINTR) return fail_with(self, errno);
        return is_aborted(self) ? fail_with(self, ECONNABORTED) : 0;
    }
    return errno == EINTR ? 0 : fail_with(self, errno);
}

static int send_bytes(Session *self, const void *data, size_t num_bytes) {
    for (size_t done = 0; done < num_bytes;) {
        struct iovec rest = {(char *)data + done, num_bytes - done};
        ssize_t sent = send_window(self, &rest, 1);
        if (sent < 0) return -1;
        done += (size_t)sent;
    }
    return 0;
}

/* ---- requests ---- */

static int check_entry(Session *self, uint32_t index) {
    const Entry *entry = &self->entries[index];
    uint64_t size = (uint64_t)self->memory.len, granule = self->granule;
    int inside = entry->length > 0 && entry->length <= size && entry->offset <= size - entry->length;
    if (inside && entry->length <= granule && entry->offset % granule <= granule - entry->length) return 0;
    if (inside)
        return refuse(self, "slice %u, offset %llu, length %llu: crosses a granule of %llu bytes", index, (unsigned long long)entry->offset,
                      (unsigned long long)entry->length, (unsigned long long)granule);
    return refuse(self, "slice %u, offset %llu, length %llu: outside the region of %llu bytes", index, (unsigned long long)entry->offset,
                  (unsigned long long)entry->length, (unsigned long long)size);
}

/* Reads the header and the table of the next request, and checks them. 1: the peer has closed. */
static int read_request(Session *self, uint64_t *num_bytes) {
    int status = need(self, sizeof(Header), 1);
    if (status) return status;
    memcpy(&self->request, self->buffer + self->begin, sizeof(Header));
    self->begin += sizeof(Header);
    uint32_t count = self->request.count;
    if (self->request.op != OP_READ && self->request.op != OP_WRITE) return refuse(self, "unknown operation %u", self->request.op);
    if (count > MAX_SLICES) return refuse(self, "%u slices in one message, more than %d", count, MAX_SLICES);
    if (need(self, count * sizeof(Entry), 0)) return -1;
    memcpy(self->entries, self->buffer + self->begin, count * sizeof(Entry));
    self->begin += count * sizeof(Entry);
    memset(self->verdicts, VERDICT_DONE, count);
    *num_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (check_entry(self, i)) return -1;
        self->slices[i] = (struct iovec){(char *)self->memory.buf + self->entries[i].offset, self->entries[i].length};
        *num_bytes += self->entries[i].length;
    }
    if (self->request.op == OP_WRITE && self->request.payload_bytes != *num_bytes)
        return refuse(self, "a write of %llu bytes announces %llu", (unsigned long long)*num_bytes,
                      (unsigned long long)self->request.payload_bytes);
    return 0;
}

static void sum_slices(Session *self, uint32_t *sums) {
    for (uint32_t i = 0; i < self->request.count; i++)
        sums[i] = crc32_of((char *)self->memory.buf + self->entries[i].offset, self->entries[i].length);
}

/* ---- reads ---- */

/* Whether the answer fits the buffer that the request came in. */
static int is_small_read(const Session *self, uint64_t num_bytes) {
    return num_bytes <= ANSWERED_AT_ONCE && num_bytes + self->request.count * 5 + sizeof(Header) <= BUFFER_BYTES && self->begin == self->end;
}

/* Copied first and checked afterwards: one system call, and nothing can turn stale on the way. What has is overwritten with zeros. */
static int serve_small_read(Session *self, uint64_t num_bytes) {
    uint32_t count = self->request.count;
    char *copied = self->buffer + sizeof(Header), *at = copied;
    self->begin = self->end = 0;
    memcpy(self->buffer, &(Header){OP_READ, {0}, count, num_bytes}, sizeof(Header));
    for (uint32_t i = 0; i < count; at += self->slices[i++].iov_len) memcpy(at, self->slices[i].iov_base, self->slices[i].iov_len);
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    for (uint32_t i = 0; i < count; copied += self->slices[i++].iov_len) {
        if (is_refused(self, i)) memset(copied, 0, self->slices[i].iov_len);
        if (self->checksums) self->sums[i] = crc32_of(copied, self->slices[i].iov_len);
    }
    if (self->checksums) at = (char *)memcpy(at, self->sums, count * sizeof(uint32_t)) + count * sizeof(uint32_t);
    memcpy(at, self->verdicts, count);
    return send_bytes(self, self->buffer, (size_t)(at + count - self->buffer));
}

/* What is left of the slices, as much as one system call takes; zeros for what has turned stale. */
static size_t reading_window(Session *self, const Vector *vector, struct iovec window[WINDOW_BUFFERS]) {
    size_t count = vector_window(vector, window);
    for (size_t i = 0; i < count; i++)
        if (is_refused(self, (uint32_t)(vector->next + i))) window[i].iov_base = zeros;
    return count;
}

static int serve_large_read(Session *self, uint64_t num_bytes) {
    uint32_t count = self->request.count;
    Header header = {OP_READ, {0}, count, num_bytes};
    Vector vector = {self->slices, count, 0};
    struct iovec window[WINDOW_BUFFERS];
    if (send_bytes(self, &header, sizeof header)) return -1;
    while (!vector_done(&vector)) { /* after each wait it is looked again */
        ssize_t sent = send_window(self, window, reading_window(self, &vector, window));
        if (sent < 0) return -1;
        vector_advance(&vector, (size_t)sent);
    }
    if (self->checksums) {
        sum_slices(self, self->sums);
        __atomic_thread_fence(__ATOMIC_ACQ_REL);
        for (uint32_t i = 0; i < count; i++)
            if (is_refused(self, i)) self->sums[i] = 0; /* it may be that of somebody else's bytes */
        if (send_bytes(self, self->sums, count * sizeof(uint32_t))) return -1;
    }
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    for (uint32_t i = 0; i < count; i++) is_refused(self, i);
    return send_bytes(self, self->verdicts, count);
}

/* ---- writes ---- */

static char *scratch_of(Session *self) {
    if (!self->discarded) self->discarded = PyMem_RawMalloc(SCRATCH_BYTES);
    return self->discarded;
}

/* One window of the slices, what has turned stale going to scratch memory. Within a section. */
static ssize_t receive_window(Session *self, const Vector *vector) {
    struct iovec window[WINDOW_BUFFERS];
    size_t count = vector_window(vector, window);
    for (size_t i = 0; i < count; i++)
        if (is_refused(self, (uint32_t)(vector->next + i)) && !(window[i].iov_base = scratch_of(self))) return (errno = ENOMEM, -1);
    size_t buffered = self->end - self->begin;
    if (!buffered) {
        struct msghdr message = {.msg_iov = window, .msg_iovlen = count};
        return recvmsg(self->fd, &message, MSG_DONTWAIT);
    }
    size_t taken = buffered < window[0].iov_len ? buffered : window[0].iov_len;
    memcpy(window[0].iov_base, self->buffer + self->begin, taken);
    self->begin += taken;
    return (ssize_t)taken;
}

static int receive_slices(Session *self) {
    Vector vector = {self->slices, self->request.count, 0};
    while (!vector_done(&vector)) {
        enter_section(self);
        ssize_t received = is_aborted(self) ? (errno = ECONNABORTED, -1) : receive_window(self, &vector);
        int error = errno;
        leave_section(self);
        if (received > 0)
            vector_advance(&vector, (size_t)received);
        else if (received == 0)
            return fail_with(self, ECONNRESET);
        else if (error == EAGAIN) {
            if (await_input(self)) return -1;
        } else if (error != EINTR)
            return fail_with(self, error);
    }
    return 0;
}

static int compare_sums(Session *self) {
    uint32_t count = self->request.count;
    size_t size = count * sizeof(uint32_t);
    uint32_t found[MAX_SLICES];
    if (need(self, size, 0)) return -1;
    memcpy(self->sums, self->buffer + self->begin, size);
    self->begin += size;
    sum_slices(self, found);
    for (uint32_t i = 0; i < count; i++)
        if (found[i] != self->sums[i]) self->verdicts[i] = VERDICT_CORRUPT;
    return 0;
}

static int serve_write(Session *self) {
    uint32_t count = self->request.count;
    if (receive_slices(self)) return -1;
    if (self->checksums && compare_sums(self)) return -1;
    for (uint32_t i = 0; i < count; i++) is_refused(self, i);
    char answer[sizeof(Header) + MAX_SLICES];
    memcpy(answer, &(Header){OP_WRITE, {0}, count, 0}, sizeof(Header));
    memcpy(answer + sizeof(Header), self->verdicts, count);
    return send_bytes(self, answer, sizeof(Header) + count);
}

void *session_main(void *argument) {
    Session *self = argument;
    uint64_t num_bytes = 0;
    int status;
    while (!(status = read_request(self, &num_bytes))) {
        if (self->request.op == OP_WRITE)
            status = serve_write(self);
        else
            status = is_small_read(self, num_bytes) ? serve_small_read(self, num_bytes) : serve_large_read(self, num_bytes);
        if (status) break;
        self->linger_until = num_bytes <= ANSWERED_AT_ONCE ? now_ns() + LINGER_NS : 0;
    }
    __atomic_store_n(&self->ended, 1, __ATOMIC_RELEASE);
    uint64_t one = 1;
    while (write(self->signal, &one, sizeof one) < 0 && errno == EINTR) {
    }
    return NULL;
}
