/* Vectors of AVX-512: 16 numbers are one register, of which there are 32. */
#pragma once
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "tiles.h"
#include <immintrin.h>

/* 16 numbers; 16 pairs of bfloat16; which of 16 places. */
typedef __m512 Floats;
typedef __m512i Pairs;
typedef __mmask16 Places;

INLINE Floats zeros(void) { return _mm512_setzero_ps(); }
INLINE Floats all_of(float value) { return _mm512_set1_ps(value); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats mul_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats mul_sub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
INLINE Floats sub_mul(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }
INLINE float largest_of(Floats values) { return _mm512_reduce_max_ps(values); }

/* To some 6e-5 of itself. */
INLINE Floats inverse_of(Floats x) { return _mm512_rcp14_ps(x); }

INLINE Floats nearest_whole(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* What of an exponent `times_power` can tell from another one: all of it. */
INLINE Floats bounded_power(Floats x) { return x; }

/* x * 2^whole. Of an infinite `whole` x may be NaN, and it still is 0 or infinity. */
INLINE Floats times_power(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }

/* `values` where a and b differ, 0 elsewhere. */
INLINE Floats where_apart(Floats a, Floats b, Floats values) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_OQ), values); }

/* The places of a vector of which `left` numbers are left. */
INLINE Places part_of(Py_ssize_t left) { return left >= 16 ? 0xffff : (Places)((1u << left) - 1); }

/* `values` where the bit of their place is set, `otherwise` elsewhere. */
INLINE Floats where_set(uint16_t bits, Floats values, Floats otherwise) { return _mm512_mask_mov_ps(otherwise, bits, values); }

/* At whole cache lines; anywhere. */
INLINE Floats load(const float *from) { return _mm512_load_ps(from); }
INLINE void store(float *to, Floats values) { _mm512_store_ps(to, values); }
INLINE Floats load_anywhere(const float *from) { return _mm512_loadu_ps(from); }

/* 0 in places that are none of the part; they are not stored. */
INLINE Floats load_part(const float *from, Places part) { return _mm512_maskz_loadu_ps(part, from); }
INLINE void store_part(float *to, Places part, Floats values) { _mm512_mask_storeu_ps(to, part, values); }

INLINE Floats load_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void store_bf16(bf16 *to, Floats values) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values)); }

INLINE Floats load_bf16_part(const bf16 *from, Places part) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(part, from)), 16));
}

INLINE void store_bf16_part(bf16 *to, Places part, Floats values) {
    _mm256_mask_storeu_epi16(to, part, (__m256i)_mm512_cvtneps_pbh(values));
}

/* All of `first`, then all of `second`, at a whole cache line. */
INLINE void store_pairs(uint32_t *to, Floats first, Floats second) {
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

INLINE Pairs load_pairs(const bf16 *from) { return _mm512_loadu_si512(from); }

/* Rows of pairs become columns. */
INLINE void transpose(const Pairs in[16], uint32_t *out, Py_ssize_t pitch) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 g + c] has columns c, c + 4, c + 8, c + 12 of rows 4 g to 4 g + 3, one a lane. */
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd), high2 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        _mm512_store_si512(out + c * pitch, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_store_si512(out + (c + 8) * pitch, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_store_si512(out + (c + 4) * pitch, _mm512_shuffle_i32x4(low2, high2, 0x88));
        _mm512_store_si512(out + (c + 12) * pitch, _mm512_shuffle_i32x4(low2, high2, 0xdd));
    }
}

/* How 32 numbers are paired with 32 others: held in registers, for many. */
typedef struct {
    __m512i low, high;
} Pairing;

INLINE Pairing pairing(void) {
    uint16_t order[64];
    for (int i = 0; i < 32; i++) order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(i + 32);
    return (Pairing){_mm512_loadu_si512(order), _mm512_loadu_si512(order + 32)};
}

/* Of each number of `first`, 32 of them, and that of `second` a pair. */
INLINE void pair_up(Pairing how, const bf16 *first, const bf16 *second, uint32_t *to) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(a, how.low, b));
    _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(a, how.high, b));
}
