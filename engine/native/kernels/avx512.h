/* AVX-512 with its products of bfloat16. */
#pragma once

/* Rows that one run takes: 6 with 4 registers of sums each, and 4 of columns, fill the register file. */
enum { TOGETHER = 6 };
#include "vectors512.h"

#define INSTRUCTION_SET "AVX-512 bfloat16"

/* So many rows and fewer read the right side as it lies, from its beginning to its end. */
enum { STREAMING = TOGETHER };

/* sums [rows][64] += left [rows][pairs] times right [pairs][64], both of pairs of bfloat16. */
INLINE void product(int rows, Floats sums[TOGETHER][4], const uint32_t *left, Py_ssize_t left_pitch, const uint32_t *right,
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
