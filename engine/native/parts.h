/* What a layer is made of, and the kernels that compute it. */
#pragma once
#include "plan.h"

/* Outputs of a panel of packed weights (kernels/product.h). */
enum { COLUMNS = 64 };

static inline Py_ssize_t panels_of(Py_ssize_t outputs, int gated) {
    const Py_ssize_t each = gated ? COLUMNS / 2 : COLUMNS;
    return (outputs + each - 1) / each;
}

/* `x` is pairs of bfloat16 [rows][pairs]; `outputs` are those that go out. */
typedef struct {
    const uint32_t *x, *packed;
    const float *bias;
    bf16 *out;
    Py_ssize_t rows, outputs, pairs;
    enum { PLAIN, SILU, GELU } kind;
} Product;

typedef struct {
    const float *scale;
    float eps;
} Norm;

/* `x` [rows][size] becomes x + added where there is something to add; `out` is the norm of that. */
typedef struct {
    bf16 *x;
    const bf16 *added;
    Norm norm;
    bf16 *out;
    Py_ssize_t rows, size;
} NormRows;

/* In one layer: `slab` is where its slabs begin in each slot, `window` to how many tokens one attends, 0 standing for all before it. `cos`
 * and `sin` are [positions][head_dim / 2], `query_scale` and `key_scale` [head_dim] or NULL. Scores are multiplied by `score_scale` to become
 * powers of two. */
typedef struct {
    Plan *plan;
    bf16 *qkv;
    bf16 *out;
    const float *cos, *sin, *query_scale, *key_scale;
    float eps, score_scale;
    Py_ssize_t slab, window;
} Attention;

/* The team's, all 0 at first. `failed`: a thread found no memory. */
typedef struct {
    Py_ssize_t piece;
    int failed;
} AttentionTurns;

/* In one instruction set. Each computes what one thread of a team does of its part: all of them call it, and meet at a barrier before what
 * came out is used. */
typedef struct {
    const char *instruction_set;
    /* `next` is 0 at first, and the team's. */
    void (*product)(const Product *of, Py_ssize_t *next);
    void (*norm)(const NormRows *of);
    /* `x` [rows][size] becomes x + added. */
    void (*add)(bf16 *x, const bf16 *added, Py_ssize_t rows, Py_ssize_t size);
    void (*attention)(const Attention *of, const Cut *cut, AttentionTurns *turns);
    /* What of attention comes first: queries are rotated, keys and values written into their slots. */
    void (*place)(const Attention *of);
} Kernels;

extern const Kernels AMX_BF16, AVX512_BF16, AVX2;

/* Those that are used; NULL where this CPU can run none. */
extern const Kernels *kernels;

/* -1 with an error set where a slab that begins there does not lie in a slot. */
int attention_slab(const Plan *plan, Py_ssize_t slab);

static inline float attention_scale(float of_e) { return of_e * 1.44269504f; }
