#include "blake2b.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory: little-endian machines only"
#endif

enum { BLOCK_BYTES = 128, ROUNDS = 12 };

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

#define ROTATED_RIGHT(x, n) ((x) >> (n) | (x) << (64 - (n)))
#define MIX(a, b, c, d, x, y)               \
    do {                                    \
        a += b + (x);                       \
        d = ROTATED_RIGHT(d ^ a, 32);       \
        c += d;                             \
        b = ROTATED_RIGHT(b ^ c, 24);       \
        a += b + (y);                       \
        d = ROTATED_RIGHT(d ^ a, 16);       \
        c += d;                             \
        b = ROTATED_RIGHT(b ^ c, 63);       \
    } while (0)
/* The order of the message's words is written out, so that the compiler sees constants: twice as fast as a table. */
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    do {                                                                            \
        MIX(v0, v4, v8, v12, m[s0], m[s1]);                                         \
        MIX(v1, v5, v9, v13, m[s2], m[s3]);                                         \
        MIX(v2, v6, v10, v14, m[s4], m[s5]);                                        \
        MIX(v3, v7, v11, v15, m[s6], m[s7]);                                        \
        MIX(v0, v5, v10, v15, m[s8], m[s9]);                                        \
        MIX(v1, v6, v11, v12, m[s10], m[s11]);                                      \
        MIX(v2, v7, v8, v13, m[s12], m[s13]);                                       \
        MIX(v3, v4, v9, v14, m[s14], m[s15]);                                       \
    } while (0)

static void compress(uint64_t h[8], const uint8_t block[BLOCK_BYTES], uint64_t counted, int last) {
    uint64_t m[16];
    memcpy(m, block, sizeof m);
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = IV[0], v9 = IV[1], v10 = IV[2], v11 = IV[3];
    uint64_t v12 = IV[4] ^ counted, v13 = IV[5], v14 = last ? ~IV[6] : IV[6], v15 = IV[7];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    h[0] ^= v0 ^ v8;
    h[1] ^= v1 ^ v9;
    h[2] ^= v2 ^ v10;
    h[3] ^= v3 ^ v11;
    h[4] ^= v4 ^ v12;
    h[5] ^= v5 ^ v13;
    h[6] ^= v6 ^ v14;
    h[7] ^= v7 ^ v15;
}

void blake2b_salted(uint8_t digest[DIGEST_BYTES], const uint8_t salt[SALT_BYTES], const uint8_t *message, size_t length) {
    uint64_t h[8], words[2];
    memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000 ^ DIGEST_BYTES; /* fanout 1, depth 1, no key */
    memcpy(words, salt, sizeof words);
    h[4] ^= words[0];
    h[5] ^= words[1];
    size_t done = 0;
    for (; length - done > BLOCK_BYTES; done += BLOCK_BYTES) compress(h, message + done, done + BLOCK_BYTES, 0);
    uint8_t rest[BLOCK_BYTES] = {0};
    memcpy(rest, message + done, length - done);
    compress(h, rest, length, 1);
    memcpy(digest, h, DIGEST_BYTES);
}
