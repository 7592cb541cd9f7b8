/* One exchange of request and answer on a lane, by whoever has the lane: it can be left at any moment and gone on with. */
#include "lanes.h"

#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_SILENCE_NS 3000000000u /* of a slow network's peer: springtide.clock's MOST_PATIENCE_S */
#define MOST_STANDSTILL_NS 15000000000u /* of one lane, while others of the peer's move: what it has does not get on */

void lane_prepare(Lane *lane) {
    int sums = lane->lanes->checksums && lane->count, write = lane->batch->op == OP_WRITE;
    size_t slices = lane->count * sizeof(struct iovec);
    struct iovec *out = lane->out, *in = lane->in;
    lane->request = (Header){(uint8_t)lane->batch->op, {0}, lane->count, write ? lane->part_bytes : 0};
    *out++ = (struct iovec){&lane->request, sizeof(Header)};
    *in++ = (struct iovec){&lane->answer, sizeof(Header)};
    if (lane->count) *out++ = (struct iovec){lane->table, lane->count * sizeof(Entry)};
    if (write) {
        memcpy(out, lane->slices, slices);
        out += lane->count;
        for (uint32_t i = 0; sums && i < lane->count; i++) lane->sums[i] = crc32_of(lane->slices[i].iov_base, lane->slices[i].iov_len);
    } else {
        memcpy(in, lane->slices, slices);
        in += lane->count;
    }
    if (sums) *(write ? out++ : in++) = (struct iovec){lane->sums, lane->count * sizeof(uint32_t)};
    if (lane->count) *in++ = (struct iovec){lane->verdicts, lane->count};
    lane->sending = (Vector){lane->out, (size_t)(out - lane->out), 0};
    lane->receiving = (Vector){lane->in, (size_t)(in - lane->in), 0};
}

static Outcome broken(Lane *lane, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(lane->reason, sizeof lane->reason, format, arguments);
    va_end(arguments);
    return BROKEN;
}

static int given_up(const Lane *lane) {
    return __atomic_load_n(&lane->batch->interrupted, __ATOMIC_ACQUIRE) || __atomic_load_n(&lane->lanes->lost, __ATOMIC_ACQUIRE);
}

/* What has come through on any lane, and how long the silence of the peer is borne: longer where the network is slow. */
static uint64_t signs_of_peer(Lane *lane, uint64_t *silence) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    Lanes *lanes = lane->lanes;
    *silence = lanes->silence_ns;
    if (getsockopt(lane->fd, IPPROTO_TCP, TCP_INFO, &info, &size) < 0) return lane->seen_signs;
    uint64_t answers_take = 2000 * ((uint64_t)info.tcpi_rtt + 4 * (uint64_t)info.tcpi_rttvar), bytes = info.tcpi_bytes_acked + info.tcpi_bytes_received;
    if (answers_take > MOST_SILENCE_NS) answers_take = MOST_SILENCE_NS;
    if (answers_take > *silence) *silence = answers_take;
    if (bytes != lane->seen_bytes) {
        __atomic_add_fetch(&lanes->signs, 1, __ATOMIC_RELAXED);
        lane->still_ns = 0;
    }
    lane->seen_bytes = bytes;
    return __atomic_load_n(&lanes->signs, __ATOMIC_RELAXED);
}

/* Whether the peer has been silent for too long: `quarter` more has passed since this was asked last. What is on its way counts as well,
 * on whichever lane; for a time. */
static int is_lost(Lane *lane, uint64_t quarter) {
    uint64_t silence, signs;
    lane->still_ns += quarter;
    signs = signs_of_peer(lane, &silence);
    lane->quiet_ns = signs == lane->seen_signs ? lane->quiet_ns + quarter : 0;
    lane->seen_signs = signs;
    return lane->quiet_ns >= silence || lane->still_ns >= MOST_STANDSTILL_NS;
}

/* EXCHANGED: the socket is ready for `events`. LATER: it is `until` (0: there is no such time). Silence is counted in quarters that pass
 * without anything to see, so that a stop of this process is not laid to the peer. */
static Outcome await_network(Lane *lane, short events, uint64_t until) {
    const uint64_t quarter = lane->lanes->silence_ns / 4;
    lane->quiet_ns = lane->still_ns = 0;
    for (;;) {
        uint64_t now = until ? now_ns() : 0;
        if (until && now >= until) return LATER;
        uint64_t wait = until ? until - now : quarter;
        struct timespec timeout = {(time_t)(wait / 1000000000u), (long)(wait % 1000000000u)};
        struct pollfd files[2] = {{lane->fd, events, 0}, {lane->alarm, POLLIN, 0}};
        int ready = ppoll(files, 2, &timeout, NULL);
        if (ready < 0 && errno != EINTR) return broken(lane, "poll: %s", strerror(errno));
        if (ready == 0 && !until && is_lost(lane, quarter)) return broken(lane, "it was silent for %.1f s", (double)lane->still_ns / 1e9);
        if (ready > 0 && files[1].revents) {
            uint64_t count;
            if (read(lane->alarm, &count, sizeof count) < 0 && errno != EAGAIN) return broken(lane, "alarm: %s", strerror(errno));
            if (given_up(lane)) return GIVEN_UP;
        }
        if (ready > 0 && files[0].revents) return EXCHANGED;
    }
}

static Outcome pump(Lane *lane, Vector *vector, int sending, uint64_t until) {
    struct iovec window[WINDOW_BUFFERS];
    while (!vector_done(vector)) {
        struct msghdr message = {.msg_iov = window, .msg_iovlen = vector_window(vector, window)};
        ssize_t moved = sending ? sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(lane->fd, &message, MSG_DONTWAIT);
        if (moved > 0) {
            vector_advance(vector, (size_t)moved);
            if (!sending) __atomic_add_fetch(&lane->lanes->signs, 1, __ATOMIC_RELAXED);
        } else if (moved == 0) {
            return broken(lane, "it closed the connection");
        } else if (errno == EAGAIN && until && now_ns() < until) {
            sched_yield(); /* to sleep and be woken would take longer than the answer; the peer may need this very core */
        } else if (errno == EAGAIN) {
            Outcome outcome = await_network(lane, sending ? POLLOUT : POLLIN, until);
            if (outcome != EXCHANGED) return outcome;
        } else if (errno != EINTR) {
            return broken(lane, "%s", strerror(errno));
        }
    }
    return EXCHANGED;
}

static Outcome check_answer(Lane *lane) {
    const Header *answer = &lane->answer;
    uint64_t payload = lane->batch->op == OP_READ ? lane->part_bytes : 0;
    if (answer->op != lane->request.op || answer->count != lane->count || answer->payload_bytes != payload)
        return broken(lane, "it answered operation %u of %u slices with operation %u of %u slices and %llu bytes", lane->request.op, lane->count,
                      answer->op, answer->count, (unsigned long long)answer->payload_bytes);
    return EXCHANGED;
}

static Outcome judge(Lane *lane) {
    int sums = lane->lanes->checksums && lane->batch->op == OP_READ;
    for (uint32_t i = 0; i < lane->count; i++) {
        uint8_t verdict = lane->verdicts[i];
        if (verdict > VERDICT_CORRUPT) return broken(lane, "unknown verdict %u on a slice", verdict);
        if (verdict == VERDICT_DONE && sums && crc32_of(lane->slices[i].iov_base, lane->slices[i].iov_len) != lane->sums[i])
            verdict = VERDICT_CORRUPT;
        if (verdict != VERDICT_DONE) run_judge(&lane->batch->runs[lane->run_of[i]], verdict);
    }
    return EXCHANGED;
}

Outcome lane_exchange(Lane *lane, uint64_t until) {
    Outcome outcome = pump(lane, &lane->sending, 1, until);
    if (outcome == EXCHANGED) outcome = pump(lane, &lane->receiving, 0, until);
    if (outcome == EXCHANGED) outcome = check_answer(lane);
    if (outcome == EXCHANGED) outcome = judge(lane);
    return outcome;
}
