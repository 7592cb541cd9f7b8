/* One forward pass's attention: whose rows are where, and how the work is cut into pieces. */
#pragma once
#include "native.h"

/* Rows [row, row + count) of the batch are at positions [start, start + count) of the sequence whose block i is in slot table[i]. */
typedef struct {
    Py_ssize_t row, count, start;
    const int32_t *table;
} Sequence;

/* Keys are walked through so many at a time. */
enum { KEYS = 64 };

/* The queries of KV heads [head_begin, head_end), rows [begin, end) counted from the sequence's first, against keys
 * [key_begin, key_end). `part` is -1 where these are all their keys; else where the unfinished result goes. */
typedef struct {
    const Sequence *sequence;
    int head_begin, head_end;
    Py_ssize_t begin, end, key_begin, key_end;
    Py_ssize_t part;
    int64_t cost;
} Piece;

/* A piece that was split by its keys into `count` parts, in a row from `first`. */
typedef struct {
    Piece piece;
    Py_ssize_t first, count;
} Split;

/* How layers with one window (0: none) are cut. */
typedef struct {
    Py_ssize_t window;
    int threads;
    Piece *pieces;
    Py_ssize_t num_pieces;
    Split *splits;
    Py_ssize_t num_splits, num_parts;
    float *parts;
} Cut;

enum { MOST_WINDOWS = 8 };

typedef struct {
    PyObject_HEAD
    Py_buffer arena;
    /* From one slot, slab half and token to the next, in elements: the heads may be some of a slab's. */
    Py_ssize_t num_slots, slot_elements, half_elements, token_elements, block_tokens;
    int heads, kv_heads, head_dim;
    Py_ssize_t rows, num_sequences;
    Sequence *sequences;
    int32_t *tables;
    Cut cuts[MOST_WINDOWS];
    int num_cuts;
} Plan;

/* A piece has at most so many queries, a query being one row and one head. */
enum { MOST_QUERIES = 192, MOST_HEAD_DIM = 1024 };

/* Columns of a head's sums, rounded up to whole tiles. */
static inline Py_ssize_t padded(const Plan *plan) { return (plan->head_dim + 63) / 64 * 64; }

/* Floats of one part: sums, then largest score and weight of each query. */
static inline Py_ssize_t part_floats(const Plan *plan) { return MOST_QUERIES * (padded(plan) + 2); }

/* NULL with an error set. */
Cut *plan_cut(Plan *plan, Py_ssize_t window, int threads);

PyObject *plan_run(Plan *plan, PyObject *args);
