/* CRC-32 as zlib computes it, sixteen bytes a step ("slicing", Kounavis and Berry 2008). */
#include "native.h"

#include <string.h>

enum { POLYNOMIAL = 0xEDB88320u, SLICES = 16 };

static uint32_t table[SLICES][256];

void crc32_init(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++) sum = (sum >> 1) ^ (sum & 1 ? POLYNOMIAL : 0);
        table[0][byte] = sum;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int slice = 1; slice < SLICES; slice++)
            table[slice][byte] = (table[slice - 1][byte] >> 8) ^ table[0][table[slice - 1][byte] & 255];
}

uint32_t crc32_of(const void *data, size_t num_bytes) {
    const unsigned char *at = data;
    uint32_t sum = ~0u;
    for (; num_bytes >= SLICES; num_bytes -= SLICES, at += SLICES) {
        uint32_t word[4];
        memcpy(word, at, sizeof word);
        word[0] ^= sum;
        sum = 0;
        for (int i = 0; i < 4; i++)
            sum ^= table[15 - 4 * i][word[i] & 255] ^ table[14 - 4 * i][word[i] >> 8 & 255] ^ table[13 - 4 * i][word[i] >> 16 & 255] ^
                   table[12 - 4 * i][word[i] >> 24];
    }
    for (; num_bytes; num_bytes--) sum = (sum >> 8) ^ table[0][(sum ^ *at++) & 255];
    return ~sum;
}
