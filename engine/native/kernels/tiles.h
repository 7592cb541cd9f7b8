/* The shape of the one product that attention and the matrix products are made of. Who includes this has said how many rows one run takes
 * at most (TOGETHER). */
#pragma once
#include "../parts.h"

#define INLINE static inline __attribute__((always_inline))

/* What comes next is prefetched while a product is computed: so many cache lines with each pair. */
typedef struct {
    const uint32_t *next;
    int lines;
} Prefetch;

/* How many of `left` rows come next: no run is much smaller than the others. */
INLINE Py_ssize_t together(Py_ssize_t left) {
    if (left >= 2 * TOGETHER || left == TOGETHER) return TOGETHER;
    return left < TOGETHER ? left : (left + 1) / 2;
}
