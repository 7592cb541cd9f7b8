/* What is done row by row between the matrix products. Rows are bfloat16; sums and scales are float32. */
#include "parts.h"
#include "vectors.h"
#include <math.h>
#include <omp.h>

/* Of so many elements and more a second thread is worth waking. */
enum { PARALLEL_ELEMENTS = 1 << 14 };

/* `x` becomes x + added where something is to be added; `out` is the norm of that. */
INLINE void norm_row(bf16 *x, const bf16 *added, const float *scale, float eps, bf16 *out, Py_ssize_t size) {
    __m512 squares = _mm512_setzero_ps();
    for (Py_ssize_t i = 0; i < size; i += 16) {
        const __mmask16 part = part_of(size - i);
        __m512 value = load_bf16_part(x + i, part);
        if (added) {
            store_bf16_part(x + i, part, _mm512_add_ps(value, load_bf16_part(added + i, part)));
            value = load_bf16_part(x + i, part);
        }
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)size + eps));
    for (Py_ssize_t i = 0; i < size; i += 16) {
        const __mmask16 part = part_of(size - i);
        const __m512 value = _mm512_mul_ps(load_bf16_part(x + i, part), factor);
        store_bf16_part(out + i, part, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(part, scale + i)));
    }
}

void norm_share(const NormRows *of) {
    const Py_ssize_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), size = of->size;
    for (Py_ssize_t row = of->rows * thread / threads; row < of->rows * (thread + 1) / threads; row++) {
        norm_row(of->x + row * size, of->added ? of->added + row * size : NULL, of->norm.scale, of->norm.eps, of->out + row * size, size);
    }
}

void add_share(bf16 *x, const bf16 *added, Py_ssize_t rows, Py_ssize_t size) {
    const Py_ssize_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), end = rows * size * (thread + 1) / threads;
    for (Py_ssize_t i = rows * size * thread / threads; i < end; i += 16) {
        const __mmask16 part = part_of(end - i);
        store_bf16_part(x + i, part, _mm512_add_ps(load_bf16_part(x + i, part), load_bf16_part(added + i, part)));
    }
}

PyObject *rows_norm(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long x, added, scale, out;
    NormRows of;
    if (!PyArg_ParseTuple(args, "KKKfKnn", &x, &added, &scale, &of.norm.eps, &out, &of.rows, &of.size)) return NULL;
    of.x = (bf16 *)x, of.added = (const bf16 *)added, of.norm.scale = (const float *)scale, of.out = (bf16 *)out;
    Py_BEGIN_ALLOW_THREADS;
#pragma omp parallel if (of.rows > 1 && of.rows * of.size >= PARALLEL_ELEMENTS)
    norm_share(&of);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
