/* Products with weights that are laid out for them once: panels of 64 outputs, in each of which a pair of neighbouring inputs of all 64 is
 * one row, uint32 [panels][inputs / 2][64]. Few rows (decode) read the weights at the speed of memory; many (prefill) keep a panel in the
 * cache. In a gated product half of a panel's outputs are gates and half what they let through, and only their products go out. */
#pragma once
#include <omp.h>

/* Rows of one piece of work; a panel's pieces follow each other. */
enum { PIECE_ROWS = 20 * TOGETHER };

INLINE void store_row(const Product *of, bf16 *to, Py_ssize_t first, int vectors, const Floats sums[4]) {
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) {
        const Py_ssize_t left = of->outputs - first - 16 * c;
        if (left > 0) store_bf16_part(to + first + 16 * c, part_of(left), sums[c]);
    }
}

/* One panel, or pairs [begin, begin + count) of it; what the pairs before have come to is in `unfinished` [rows][64], and stays there until
 * the last. */
typedef struct {
    const Product *of;
    Py_ssize_t panel, begin, count;
} Part;

INLINE void few_rows(int rows, const Part *part, Py_ssize_t row, float *unfinished, Prefetch prefetch) {
    const Product *of = part->of;
    Floats sums[TOGETHER][4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const Floats bias = of->bias ? load_anywhere(of->bias + part->panel * COLUMNS + 16 * c) : zeros();
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sums[r][c] = part->begin ? load(unfinished + r * COLUMNS + 16 * c) : bias;
    }
    product(rows, sums, of->x + row * of->pairs + part->begin, of->pairs, of->packed + (part->panel * of->pairs + part->begin) * COLUMNS,
            COLUMNS, (int)part->count, prefetch);
    if (part->begin + part->count < of->pairs) {
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) store(unfinished + r * COLUMNS + 16 * c, sums[r][c]);
        return;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        bf16 *to = of->out + (row + r) * of->outputs;
        if (of->kind == PLAIN) {
            store_row(of, to, part->panel * COLUMNS, 4, sums[r]);
        } else {
            for (int c = 0; c < 2; c++) sums[r][c] = mul(activated(sums[r][c], of->kind == GELU), sums[r][c + 2]);
            store_row(of, to, part->panel * COLUMNS / 2, 2, sums[r]);
        }
    }
}

#ifdef SUMS_IN_TILES
#define RUN_ROWS(rows, ...) few_rows(rows, __VA_ARGS__)
#else
enum { FEW = 4 * TOGETHER, FEW_PAIRS = 96 };

INLINE void end_products(void) {}

#define ROWS(n)                                                                                                              \
    static __attribute__((noinline)) void rows_##n(const Part *part, Py_ssize_t row, float *unfinished, Prefetch prefetch) { \
        few_rows(n, part, row, unfinished, prefetch);                                                                        \
    }
ROWS(1)
ROWS(2)
ROWS(3)
ROWS(4)
ROWS(5)
ROWS(6)

static void (*const rows_of[])(const Part *, Py_ssize_t, float *, Prefetch) = {NULL, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6};
#define RUN_ROWS(rows, ...) rows_of[rows](__VA_ARGS__)
#endif

static void run_rows(const Part *part, Py_ssize_t begin, Py_ssize_t end, float *unfinished, const uint32_t *next) {
    int lines = next ? COLUMNS / 16 : 0;
    for (int runs = (int)((end - begin + TOGETHER - 1) / TOGETHER); begin < end; runs--) {
        const int rows = (int)together(end - begin), share = (lines + runs - 1) / runs;
        RUN_ROWS(rows, part, begin, unfinished, (Prefetch){next, share});
        begin += rows, unfinished += rows * COLUMNS, lines -= share;
        if (next) next += share * 16 * part->count;
    }
}

enum { SHARED_ROWS = 8 };

/* Of FEW rows at most the sums of a panel lie aside while its next pairs come: FEW_PAIRS at a time, which stay in a near cache for all rows.
 * Weights are read from memory, and one run would wait for them while the others leave the memory idle: what comes next is prefetched
 * meanwhile. Where a single run reads them as they lie, that is left to the hardware. */
static void run_panel(const Product *of, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t panel, int last) {
    float unfinished[FEW * COLUMNS] __attribute__((aligned(64)));
    const Py_ssize_t rows = end - begin, most = rows > STREAMING && rows <= FEW ? FEW_PAIRS : of->pairs;
    Part part = {of, panel, 0, 0};
    for (; part.begin < of->pairs; part.begin += part.count) {
        part.count = of->pairs - part.begin < most ? of->pairs - part.begin : most;
        const int more = rows > STREAMING && !(last && part.begin + part.count >= of->pairs);
        run_rows(&part, begin, end, unfinished, more ? of->packed + (panel * of->pairs + part.begin + part.count) * COLUMNS : NULL);
    }
}

static void product_share(const Product *of, Py_ssize_t *next) {
    const Py_ssize_t panels = panels_of(of->outputs, of->kind != PLAIN), pieces = (of->rows + PIECE_ROWS - 1) / PIECE_ROWS;
    if (pieces > 1) {
        for (Py_ssize_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < panels * pieces;) {
            const Py_ssize_t piece = i % pieces;
            run_panel(of, of->rows * piece / pieces, of->rows * (piece + 1) / pieces, i / pieces, 1);
        }
    } else {
        /* Each thread has panels that lie side by side; of one in the middle, where enough rows make it worth reading twice, its rows. */
        const Py_ssize_t unit = of->rows >= SHARED_ROWS ? of->rows : 1, threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const Py_ssize_t begin = panels * unit * thread / threads, end = panels * unit * (thread + 1) / threads;
        for (Py_ssize_t at = begin; at < end;) {
            const Py_ssize_t panel = at / unit, past = (panel + 1) * unit < end ? (panel + 1) * unit : end;
            const Py_ssize_t first = unit > 1 ? at % unit : 0, last = unit > 1 ? past - panel * unit : of->rows;
            run_panel(of, first, last, panel, past == end);
            at = past;
        }
    }
    end_products();
}
