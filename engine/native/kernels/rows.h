/* What is done row by row between the matrix products. Rows are bfloat16; sums and scales are float32. */
#pragma once
#include <math.h>
#include <omp.h>

/* `x` becomes x + added where something is to be added; `out` is the norm of that. */
INLINE void norm_row(bf16 *x, const bf16 *added, const float *scale, float eps, bf16 *out, Py_ssize_t size) {
    Floats squares = zeros();
    for (Py_ssize_t i = 0; i < size; i += 16) {
        const Places part = part_of(size - i);
        Floats value = load_bf16_part(x + i, part);
        if (added) {
            store_bf16_part(x + i, part, add(value, load_bf16_part(added + i, part)));
            value = load_bf16_part(x + i, part);
        }
        squares = mul_add(value, value, squares);
    }
    const Floats factor = all_of(1.0f / sqrtf(sum_of(squares) / (float)size + eps));
    for (Py_ssize_t i = 0; i < size; i += 16) {
        const Places part = part_of(size - i);
        const Floats value = mul(load_bf16_part(x + i, part), factor);
        store_bf16_part(out + i, part, mul(value, load_part(scale + i, part)));
    }
}

static void norm_share(const NormRows *of) {
    const Py_ssize_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), size = of->size;
    for (Py_ssize_t row = of->rows * thread / threads; row < of->rows * (thread + 1) / threads; row++) {
        norm_row(of->x + row * size, of->added ? of->added + row * size : NULL, of->norm.scale, of->norm.eps, of->out + row * size, size);
    }
}

static void add_share(bf16 *x, const bf16 *added, Py_ssize_t rows, Py_ssize_t size) {
    const Py_ssize_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), end = rows * size * (thread + 1) / threads;
    for (Py_ssize_t i = rows * size * thread / threads; i < end; i += 16) {
        const Places part = part_of(end - i);
        store_bf16_part(x + i, part, add(load_bf16_part(x + i, part), load_bf16_part(added + i, part)));
    }
}
