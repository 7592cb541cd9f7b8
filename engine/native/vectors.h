/* AVX-512 with bfloat16 products: what the kernels are written in. */
#pragma once
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "native.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 load_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void store_bf16(bf16 *to, __m512 values) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values)); }

INLINE __m512 load_bf16_part(const bf16 *from, __mmask16 part) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(part, from)), 16));
}

INLINE void store_bf16_part(bf16 *to, __mmask16 part, __m512 values) {
    _mm256_mask_storeu_epi16(to, part, (__m256i)_mm512_cvtneps_pbh(values));
}

/* The places of a vector of which `left` numbers are left. */
INLINE __mmask16 part_of(Py_ssize_t left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

/* 2^x to some 8e-5 of itself, bfloat16 having 4e-3. Of an infinite x `rest` is NaN, but the scaling still gives 0 or infinity. */
INLINE __m512 exp2_of(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    /* Of the third degree, the largest error relative to 2^x over [-1/2, 1/2] the smallest. */
    __m512 sum = _mm512_set1_ps(5.517165e-2f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.426111e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.932610e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.999281e-1f));
    return _mm512_scalef_ps(sum, whole);
}

/* 1 / (1 + e^-x) to some 2e-4 of itself; 0 from -1e4 down. */
INLINE __m512 sigmoid_of(__m512 x) {
    const __m512 bounded = _mm512_max_ps(x, _mm512_set1_ps(-1e4f));
    const __m512 power = exp2_of(_mm512_mul_ps(bounded, _mm512_set1_ps(-1.44269504f)));
    return _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

/* silu is x * sigmoid(x); the tanh form of gelu is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)). */
INLINE __m512 activated(__m512 x, int gelu) {
    if (!gelu) return _mm512_mul_ps(x, sigmoid_of(x));
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(x, sigmoid_of(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f))));
}
