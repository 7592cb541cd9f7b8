/* AVX2 with FMA: 16 numbers are two registers, of which there are 16. Numbers of bfloat16 are widened to float32 before they are multiplied,
 * and rounded as the bfloat16 instructions round. */
#pragma once
#pragma GCC target("avx2,fma")

enum { TOGETHER = 6 };
#include "tiles.h"
#include <immintrin.h>
#include <string.h>

#define INSTRUCTION_SET "AVX2"

/* 16 numbers; 16 pairs of bfloat16; the first so many of 16 places. */
typedef struct {
    __m256 low, high;
} Floats;
typedef struct {
    __m256i low, high;
} Pairs;
typedef int Places;

INLINE Floats zeros(void) { return (Floats){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Floats all_of(float value) { return (Floats){_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
INLINE Floats add(Floats a, Floats b) { return (Floats){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE Floats sub(Floats a, Floats b) { return (Floats){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE Floats mul(Floats a, Floats b) { return (Floats){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE Floats larger(Floats a, Floats b) { return (Floats){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE Floats mul_add(Floats a, Floats b, Floats c) {
    return (Floats){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Floats mul_sub(Floats a, Floats b, Floats c) {
    return (Floats){_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
INLINE Floats sub_mul(Floats a, Floats b, Floats c) {
    return (Floats){_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

INLINE float sum_of(Floats values) {
    const __m256 eight = _mm256_add_ps(values.low, values.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest_of(Floats values) {
    const __m256 eight = _mm256_max_ps(values.low, values.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* A quotient, as the instruction that estimates it is another one in each make of CPU. */
INLINE Floats inverse_of(Floats x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    return (Floats){_mm256_div_ps(one, x.low), _mm256_div_ps(one, x.high)};
}

INLINE Floats nearest_whole(Floats x) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (Floats){_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}

/* What of an exponent `times_power` can tell from another one; NaN stays. */
INLINE Floats bounded_power(Floats x) {
    const __m256 least = _mm256_set1_ps(-127.0f), most = _mm256_set1_ps(128.0f);
    return (Floats){_mm256_min_ps(most, _mm256_max_ps(least, x.low)), _mm256_min_ps(most, _mm256_max_ps(least, x.high))};
}

INLINE __m256 power_of(__m256 whole) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}

/* x * 2^whole for `whole` from -127 on, which stands for 0, to 128, which stands for infinity. */
INLINE Floats times_power(Floats x, Floats whole) {
    return (Floats){_mm256_mul_ps(x.low, power_of(whole.low)), _mm256_mul_ps(x.high, power_of(whole.high))};
}

/* `values` where a and b differ, 0 elsewhere. */
INLINE Floats where_apart(Floats a, Floats b, Floats values) {
    return (Floats){_mm256_and_ps(_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_OQ), values.low),
                    _mm256_and_ps(_mm256_cmp_ps(a.high, b.high, _CMP_NEQ_OQ), values.high)};
}

/* The places of a vector of which `left` numbers are left. */
INLINE Places part_of(Py_ssize_t left) { return left >= 16 ? 16 : (int)left; }

/* `values` where the bit of their place is set, `otherwise` elsewhere. */
INLINE Floats where_set(uint16_t bits, Floats values, Floats otherwise) {
    const __m256i all = _mm256_set1_epi32(bits), low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    const __m256 is_low = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low));
    const __m256 is_high = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high));
    return (Floats){_mm256_blendv_ps(otherwise.low, values.low, is_low), _mm256_blendv_ps(otherwise.high, values.high, is_high)};
}

/* At whole cache lines; anywhere. */
INLINE Floats load(const float *from) { return (Floats){_mm256_load_ps(from), _mm256_load_ps(from + 8)}; }
INLINE void store(float *to, Floats values) { _mm256_store_ps(to, values.low), _mm256_store_ps(to + 8, values.high); }
INLINE Floats load_anywhere(const float *from) { return (Floats){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

INLINE Pairs mask_of(Places part) {
    const __m256i all = _mm256_set1_epi32(part), low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (Pairs){_mm256_cmpgt_epi32(all, low), _mm256_cmpgt_epi32(all, _mm256_add_epi32(low, _mm256_set1_epi32(8)))};
}

/* 0 in places that are none of the part; they are not stored. */
INLINE Floats load_part(const float *from, Places part) {
    const Pairs mask = mask_of(part);
    return (Floats){_mm256_maskload_ps(from, mask.low), _mm256_maskload_ps(from + 8, mask.high)};
}

INLINE void store_part(float *to, Places part, Floats values) {
    const Pairs mask = mask_of(part);
    _mm256_maskstore_ps(to, mask.low, values.low), _mm256_maskstore_ps(to + 8, mask.high, values.high);
}

/* 8 of them. */
INLINE __m256 widened(const bf16 *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

INLINE Floats load_bf16(const bf16 *from) { return (Floats){widened(from), widened(from + 8)}; }

/* The nearest bfloat16, of two the even one, in the lower half of each place; NaN stays. */
INLINE __m256i to_nearest(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values), upper = _mm256_srli_epi32(bits, 16);
    const __m256i even = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)));
}

INLINE __m256i rounded_to_bf16(Floats values) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(to_nearest(values.low), to_nearest(values.high)), 0xd8);
}

INLINE void store_bf16(bf16 *to, Floats values) { _mm256_storeu_si256((__m256i *)to, rounded_to_bf16(values)); }

INLINE Floats load_bf16_part(const bf16 *from, Places part) {
    if (part == 16) return load_bf16(from);
    bf16 all[16] = {0};
    for (int i = 0; i < part; i++) all[i] = from[i];
    return load_bf16(all);
}

INLINE void store_bf16_part(bf16 *to, Places part, Floats values) {
    if (part == 16) {
        store_bf16(to, values);
        return;
    }
    bf16 all[16];
    store_bf16(all, values);
    for (int i = 0; i < part; i++) to[i] = all[i];
}

/* All of `first`, then all of `second`, at a whole cache line. */
INLINE void store_pairs(uint32_t *to, Floats first, Floats second) { store_bf16((bf16 *)to, first), store_bf16((bf16 *)to + 16, second); }

INLINE Pairs load_pairs(const bf16 *from) {
    return (Pairs){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}

/* Eight rows of eight pairs become columns. */
INLINE void transpose_eight(const __m256i in[8], uint32_t *out, Py_ssize_t pitch) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 g + c] has columns c and c + 4 of rows 4 g to 4 g + 3, one a lane. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_store_si256((__m256i *)(out + c * pitch), _mm256_permute2x128_si256(b[c], b[4 + c], 0x20));
        _mm256_store_si256((__m256i *)(out + (c + 4) * pitch), _mm256_permute2x128_si256(b[c], b[4 + c], 0x31));
    }
}

/* Rows of pairs become columns. */
INLINE void transpose(const Pairs in[16], uint32_t *out, Py_ssize_t pitch) {
#pragma GCC unroll 2
    for (int half = 0; half < 16; half += 8) {
        __m256i low[8], high[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) low[i] = in[half + i].low, high[i] = in[half + i].high;
        transpose_eight(low, out + half, pitch);
        transpose_eight(high, out + half + 8 * pitch, pitch);
    }
}

/* How 32 numbers are paired with 32 others: there is nothing to hold. */
typedef struct {
} Pairing;

INLINE Pairing pairing(void) { return (Pairing){}; }

/* Of each number of `first`, 32 of them, and that of `second` a pair. */
INLINE void pair_up(Pairing how, const bf16 *first, const bf16 *second, uint32_t *to) {
    (void)how;
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += 16) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(first + i)), b = _mm256_loadu_si256((const __m256i *)(second + i));
        const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
        _mm256_store_si256((__m256i *)(to + i), _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_store_si256((__m256i *)(to + i + 8), _mm256_permute2x128_si256(low, high, 0x31));
    }
}

/* Pairs of the left side that are widened at once, for all columns: of so many the right side stays in the nearest cache. */
enum { WIDE_PAIRS = 96 };

INLINE void widen(const uint32_t *from, float *to, int pairs) {
    const bf16 *each = (const bf16 *)from;
    int i = 0;
    for (; i + 8 <= 2 * pairs; i += 8) _mm256_store_ps(to + i, widened(each + i));
    for (; i < 2 * pairs; i++) to[i] = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(each[i] << 16)));
}

/* sum += a * b, in the register where the sum is: left to itself the compiler moves sums about, and has no registers left to move them to. */
INLINE void accumulate(__m256 *sum, __m256 a, __m256 b) { __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b)); }

/* The same of one number with two registers, and as little time between the number and its use. */
INLINE void accumulate_both(__m256 sums[2], const float *number, const __m256 columns[2]) {
    __m256 all;
    __asm__("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
            : "+&x"(sums[0]), "+&x"(sums[1]), "=&x"(all)
            : "m"(*number), "x"(columns[0]), "x"(columns[1]));
}

/* Of each pair on the right side the first number, in the lower half, or the second. */
INLINE __m256 numbers_of(const uint32_t *right, int second) {
    if (second) return _mm256_and_ps(_mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)), _mm256_load_ps((const float *)right));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256((const __m256i *)right), 16));
}

/* So many rows read the right side as it lies, from its beginning to its end; more read some columns, then the next ones. */
enum { STREAMING = 1 };

/* How many registers of columns so many rows take at once: what stays of the 16 is for numbers of both sides. */
INLINE int registers_of(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

/* Of 8 * registers columns; `left` [rows][2 * WIDE_PAIRS]. */
INLINE void product_of_columns(int rows, float *sums, const float *left, const uint32_t *right, Py_ssize_t right_pitch, int pairs,
                               Prefetch prefetch) {
    const int registers = registers_of(rows);
    __m256 own[TOGETHER][8];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < registers; c++) own[r][c] = _mm256_load_ps(sums + r * COLUMNS + 8 * c);
    for (int pair = 0; pair < pairs; pair++, left += 2, right += right_pitch) {
        for (int line = 0; line < prefetch.lines; line++, prefetch.next += 16) _mm_prefetch(prefetch.next, _MM_HINT_T1);
#pragma GCC unroll 2
        for (int second = 0; second < 2; second++) {
            if (registers == 2) {
                const __m256 columns[2] = {numbers_of(right, second), numbers_of(right + 8, second)};
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) accumulate_both(own[r], left + r * 2 * WIDE_PAIRS + second, columns);
            } else {
                __m256 numbers[3];
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) numbers[r] = _mm256_broadcast_ss(left + r * 2 * WIDE_PAIRS + second);
#pragma GCC unroll 8
                for (int c = 0; c < registers; c++) {
                    const __m256 column = numbers_of(right + 8 * c, second);
#pragma GCC unroll 3
                    for (int r = 0; r < rows; r++) accumulate(&own[r][c], numbers[r], column);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < registers; c++) _mm256_store_ps(sums + r * COLUMNS + 8 * c, own[r][c]);
}

/* sums [rows][64] += left [rows][pairs] times right [pairs][64], both of pairs of bfloat16. */
INLINE void product(int rows, Floats sums[TOGETHER][4], const uint32_t *left, Py_ssize_t left_pitch, const uint32_t *right,
                    Py_ssize_t right_pitch, int pairs, Prefetch prefetch) {
    const int columns = 8 * registers_of(rows), runs = COLUMNS / columns;
    float wide[TOGETHER][2 * WIDE_PAIRS] __attribute__((aligned(64)));
    for (int begin = 0, count; begin < pairs; begin += count) {
        count = pairs - begin < WIDE_PAIRS ? pairs - begin : WIDE_PAIRS;
        for (int r = 0; r < rows; r++) widen(left + r * left_pitch + begin, wide[r], count);
        for (int run = 0, lines = prefetch.lines; run < runs; run++) {
            const int share = (lines + runs - run - 1) / (runs - run);
            product_of_columns(rows, (float *)sums + run * columns, wide[0], right + begin * right_pitch + run * columns, right_pitch, count,
                               (Prefetch){prefetch.next, share});
            if (prefetch.next) prefetch.next += 16 * share * count;
            lines -= share;
        }
    }
}
