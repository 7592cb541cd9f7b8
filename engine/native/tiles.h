/* The one product that attention and the matrix products are made of. */
#pragma once
#include "vectors.h"

/* Rows that one run takes: with 4 registers of sums each, and 4 of columns, they fill the register file. */
enum { TOGETHER = 6, COLUMNS = 64 };

/* What comes next is prefetched while a product is computed: so many cache lines with each pair. */
typedef struct {
    const uint32_t *next;
    int lines;
} Prefetch;

/* sums [rows][64] += left [rows][pairs] times right [pairs][64], both of pairs of bfloat16. */
INLINE void product(int rows, __m512 sums[TOGETHER][4], const uint32_t *left, Py_ssize_t left_pitch, const uint32_t *right,
                    Py_ssize_t right_pitch, int pairs, Prefetch prefetch) {
    for (int pair = 0; pair < pairs; pair++) {
        for (int line = 0; line < prefetch.lines; line++) _mm_prefetch(prefetch.next + 16 * (pair * prefetch.lines + line), _MM_HINT_T1);
        __m512bh columns[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) columns[c] = (__m512bh)_mm512_load_si512(right + pair * right_pitch + 16 * c);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int)left[r * left_pitch + pair]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], both, columns[c]);
        }
    }
}

/* How many of `left` rows come next: no run is much smaller than the others. */
INLINE Py_ssize_t together(Py_ssize_t left) {
    if (left >= 2 * TOGETHER || left == TOGETHER) return TOGETHER;
    return left < TOGETHER ? left : (left + 1) / 2;
}
