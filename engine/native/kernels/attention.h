/* Paged attention over the arena's slabs, [2, block_tokens, kv_heads, head_dim] in bfloat16: K and V of new rows are written where they
 * belong, then each piece walks through its keys, 64 at a time, with running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867;
 * Dao et al., FlashAttention, arXiv 2205.14135). Both products of a tile are one routine: the tile's keys are brought from the pages into
 * a layout for it, which serves all queries of the piece. */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* Of one thread. `queries` [MOST_QUERIES][head_dim], `sums` [MOST_QUERIES][padded] not yet divided by `weights` [MOST_QUERIES][16], whose
 * 16 numbers are to be added; `tops` are the largest scores. Of the tile at hand: `keys` are [head_dim / 2][64] pairs of neighbouring
 * dimensions, `values` [32][padded] pairs of neighbouring keys, `scores` [MOST_QUERIES][64], `bases` and `fadings` see raise_tops. */
typedef struct {
    bf16 *queries;
    float *sums, *tops, *weights, *scores, *bases, *fadings;
    uint32_t *keys, *values;
} Scratch;

static __thread void *scratch_memory = NULL;
static __thread size_t scratch_bytes = 0;

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* 0 where there is no memory. It stays the thread's. */
static int take_scratch(const Plan *plan, Scratch *scratch) {
    const size_t most = MOST_QUERIES, columns = padded(plan), dim = plan->head_dim;
    const struct {
        void **part;
        size_t bytes;
    } parts[] = {{(void **)&scratch->queries, most * dim * 2}, {(void **)&scratch->sums, most * columns * 4},
                 {(void **)&scratch->tops, most * 4},          {(void **)&scratch->weights, most * 64},
                 {(void **)&scratch->scores, most * KEYS * 4}, {(void **)&scratch->bases, most * 4},
                 {(void **)&scratch->fadings, most * 4},       {(void **)&scratch->keys, dim * KEYS * 2},
                 {(void **)&scratch->values, KEYS * columns * 2}};
    enum { PARTS = sizeof parts / sizeof *parts };
    size_t total = 0;
    for (int i = 0; i < PARTS; i++) total += rounded(parts[i].bytes);
    if (total > scratch_bytes) {
        free(scratch_memory);
        scratch_memory = aligned_alloc(64, total);
        scratch_bytes = scratch_memory ? total : 0;
        if (!scratch_memory) return 0;
    }
    char *at = scratch_memory;
    for (int i = 0; i < PARTS; i++) {
        *parts[i].part = at;
        at += rounded(parts[i].bytes);
    }
    /* Columns beyond the head's are never written, but take part in the products. */
    if (plan->head_dim < padded(plan)) memset(scratch->values, 0, KEYS * columns * 2);
    return 1;
}

INLINE bf16 *slab_of(const Attention *of, const Sequence *sequence, Py_ssize_t position) {
    const Plan *plan = of->plan;
    return (bf16 *)plan->arena.buf + sequence->table[position / plan->block_tokens] * plan->slot_elements + of->slab;
}

/* The key of KV head 0 at a position. */
INLINE bf16 *key_of(const Attention *of, const Sequence *sequence, Py_ssize_t position) {
    const Plan *plan = of->plan;
    return slab_of(of, sequence, position) + position % plan->block_tokens * plan->token_elements;
}

/* ---- new rows ---- */

/* Normalises one head, where there is a scale, and rotates dimension i with dimension i + head_dim / 2. */
INLINE void position_head(const Attention *of, const bf16 *from, bf16 *to, const float *cos, const float *sin, const float *scale) {
    const int dim = of->plan->head_dim, half = dim / 2;
    Floats factor = all_of(1.0f);
    if (scale) {
        Floats squares = zeros();
        for (int i = 0; i < dim; i += 16) {
            const Floats value = load_bf16(from + i);
            squares = mul_add(value, value, squares);
        }
        factor = all_of(1.0f / sqrtf(sum_of(squares) / (float)dim + of->eps));
    }
    for (int i = 0; i < half; i += 16) {
        Floats first = load_bf16(from + i), second = load_bf16(from + half + i);
        if (scale) {
            first = mul(mul(first, factor), load_anywhere(scale + i));
            second = mul(mul(second, factor), load_anywhere(scale + half + i));
        }
        const Floats c = load_anywhere(cos + i), s = load_anywhere(sin + i);
        store_bf16(to + i, sub_mul(second, s, mul(first, c)));
        store_bf16(to + half + i, mul_add(first, s, mul(second, c)));
    }
}

/* Its query in place, its key and value into the slab. */
static void place_row(const Attention *of, const Sequence *sequence, Py_ssize_t row) {
    const Plan *plan = of->plan;
    const int heads = plan->heads, kv_heads = plan->kv_heads, dim = plan->head_dim;
    const Py_ssize_t position = sequence->start + row - sequence->row;
    const float *cos = of->cos + position * (dim / 2), *sin = of->sin + position * (dim / 2);
    bf16 *from = of->qkv + row * (heads + 2 * kv_heads) * dim;
    bf16 *key = key_of(of, sequence, position);
    for (int head = 0; head < heads; head++) position_head(of, from + head * dim, from + head * dim, cos, sin, of->query_scale);
    from += heads * dim;
    for (int head = 0; head < kv_heads; head++) position_head(of, from + head * dim, key + head * dim, cos, sin, of->key_scale);
    memcpy(key + plan->half_elements, from + kv_heads * dim, kv_heads * dim * sizeof(bf16));
}

/* What a former owner left in the rest of a block that begins in this pass must not travel with it. */
static void clear_tail(const Attention *of, const Sequence *sequence) {
    const Plan *plan = of->plan;
    const Py_ssize_t end = sequence->start + sequence->count, used = end % plan->block_tokens;
    if (!used || sequence->start > end - used) return;
    bf16 *slab = slab_of(of, sequence, end - 1);
    for (Py_ssize_t token = used; token < plan->block_tokens; token++) {
        memset(slab + token * plan->token_elements, 0, plan->kv_heads * plan->head_dim * sizeof(bf16));
        memset(slab + plan->half_elements + token * plan->token_elements, 0, plan->kv_heads * plan->head_dim * sizeof(bf16));
    }
}

static void place_rows(const Attention *of, Py_ssize_t begin, Py_ssize_t end) {
    const Plan *plan = of->plan;
    for (Py_ssize_t s = 0; s < plan->num_sequences; s++) {
        const Sequence *sequence = &plan->sequences[s];
        const Py_ssize_t last = sequence->row + sequence->count;
        if (last <= begin || sequence->row >= end) continue;
        for (Py_ssize_t row = sequence->row > begin ? sequence->row : begin; row < last && row < end; row++) {
            place_row(of, sequence, row);
        }
        if (last <= end) clear_tail(of, sequence);
    }
}

/* ---- a tile's keys and values ---- */

static const bf16 no_key[MOST_HEAD_DIM] __attribute__((aligned(64)));

/* Where the keys of one head at positions [first, first + KEYS) are; past `end` there are none. */
static void find_keys(const Attention *of, const Sequence *sequence, int head, Py_ssize_t first, Py_ssize_t end, const bf16 *keys[KEYS]) {
    const Plan *plan = of->plan;
    int k = 0;
    while (k < KEYS && first + k < end) {
        const bf16 *key = key_of(of, sequence, first + k) + head * plan->head_dim;
        Py_ssize_t run = plan->block_tokens - (first + k) % plan->block_tokens;
        for (; run > 0 && k < KEYS && first + k < end; run--, k++, key += plan->token_elements) keys[k] = key;
    }
    for (; k < KEYS; k++) keys[k] = NULL;
}

/* Decode waits for memory, and the pages' strides tell the hardware little of what comes next: the tokens of the next tile, all heads of
 * the piece side by side, are prefetched line by line while this one is computed. `lines` are those of a token's keys, and as many of its
 * values, `half` away. */
typedef struct {
    const bf16 *const *tokens;
    Py_ssize_t half;
    int token, line, lines;
} Ahead;

INLINE void prefetch_ahead(Ahead *ahead) {
    if (ahead->token >= KEYS || !ahead->tokens[ahead->token]) return;
    const bf16 *from = ahead->tokens[ahead->token] + 32 * ahead->line;
    _mm_prefetch(from, _MM_HINT_T0);
    _mm_prefetch(from + ahead->half, _MM_HINT_T0);
    if (++ahead->line == ahead->lines) ahead->line = 0, ahead->token++;
}

/* Those of this tile into `scratch`. */
static void bring(const Attention *of, const bf16 *const keys[KEYS], Ahead *ahead, const Scratch *scratch) {
    const Plan *plan = of->plan;
    const Py_ssize_t to_value = plan->half_elements, pitch = padded(plan);
    for (int k = 0; k < KEYS; k += 16) {
        for (int pair = 0; pair < plan->head_dim / 2; pair += 16) {
            Pairs rows[16];
            for (int i = 0; i < 16; i++) {
                if (ahead && i % 2) prefetch_ahead(ahead);
                rows[i] = load_pairs((keys[k + i] ? keys[k + i] : no_key) + 2 * pair);
            }
            transpose(rows, scratch->keys + pair * KEYS + k, KEYS);
        }
    }
    const Pairing how = pairing();
    for (int k = 0; k < KEYS; k += 2) {
        const bf16 *first = keys[k] ? keys[k] + to_value : no_key, *second = keys[k + 1] ? keys[k + 1] + to_value : no_key;
        for (int d = 0; d < plan->head_dim; d += 32) {
            if (ahead) prefetch_ahead(ahead);
            pair_up(how, first + d, second + d, scratch->values + k / 2 * pitch + d);
        }
    }
}

/* ---- a tile's products ---- */

/* Which keys of a tile that begins at `first` the query at `position` sees: bit by bit. */
INLINE uint64_t sight(const Attention *of, Py_ssize_t position, Py_ssize_t first, Py_ssize_t end) {
    const Py_ssize_t last = position + 1 < end ? position + 1 : end, count = last - first;
    uint64_t seen = count >= KEYS ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1;
    const Py_ssize_t hidden = of->window > 0 ? position + 1 - of->window - first : 0;
    if (hidden > 0) seen &= hidden >= KEYS ? 0 : ~0ull << hidden;
    return seen;
}

INLINE Floats largest(const Floats scores[4]) { return larger(larger(scores[0], scores[1]), larger(scores[2], scores[3])); }

/* From the tile's largest scores, as powers of two, to what is subtracted from each score; what was summed up before fades accordingly. A
 * query that has seen nothing yet has no largest score, and nothing of it to fade. */
static void raise_tops(const Attention *of, const Scratch *scratch, Py_ssize_t begin, Py_ssize_t end) {
    const Floats scale = all_of(of->score_scale), never = all_of(-INFINITY);
    for (Py_ssize_t q = begin; q < end; q += 16) {
        const Places part = part_of(end - q);
        const Floats before = load_part(scratch->tops + q, part);
        const Floats after = larger(before, mul(scale, load_part(scratch->bases + q, part)));
        store_part(scratch->tops + q, part, after);
        store_part(scratch->bases + q, part, where_apart(after, never, after));
        store_part(scratch->fadings + q, part, where_apart(before, never, exp2_of(sub(before, after))));
    }
}

/* The weights of a query's keys in the tile, of which its sum of weights becomes more. */
INLINE void weights_of(const Attention *of, const Scratch *scratch, Py_ssize_t query, uint32_t shares[KEYS / 2]) {
    const Floats base = all_of(scratch->bases[query]), scale = all_of(of->score_scale);
    const float *scores = scratch->scores + query * KEYS;
    Floats powers[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) powers[c] = exp2_of(mul_sub(load(scores + 16 * c), scale, base));
    float *weight = scratch->weights + query * 16;
    const Floats added = add(add(powers[0], powers[1]), add(powers[2], powers[3]));
    store(weight, mul_add(load(weight), all_of(scratch->fadings[query]), added));
    store_pairs(shares, powers[0], powers[1]);
    store_pairs(shares + 16, powers[2], powers[3]);
}

#ifdef SUMS_IN_TILES
/* The scores of queries [query, query + rows) with the tile's keys, and the largest of each; `seen` is NULL where each sees all of it. */
static void score(int rows, const Attention *of, const Scratch *scratch, Py_ssize_t query, const uint64_t *seen) {
    const int dim = of->plan->head_dim;
    float *to = scratch->scores + query * KEYS;
    tile_product(rows, (TileProduct){.sums = to,
                                     .left = (const uint32_t *)(scratch->queries + query * dim),
                                     .right = scratch->keys,
                                     .sums_pitch = KEYS,
                                     .left_pitch = dim / 2,
                                     .right_pitch = KEYS,
                                     .tiles = dim / 2 / TILE,
                                     .fresh = 1});
    for (int r = 0; r < rows; r++, to += KEYS) {
        Floats scores[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            scores[c] = load(to + 16 * c);
            if (seen) store(to + 16 * c, scores[c] = where_set((uint16_t)(seen[query + r] >> 16 * c), scores[c], all_of(-INFINITY)));
        }
        scratch->bases[query + r] = largest_of(largest(scores));
    }
}

/* Adds the tile's values to the sums of queries [query, query + rows), each by its weight. */
static void weigh(int rows, const Attention *of, const Scratch *scratch, Py_ssize_t query) {
    const Py_ssize_t pitch = padded(of->plan);
    uint32_t shares[TOGETHER][KEYS / 2] __attribute__((aligned(64)));
    float *to = scratch->sums + query * pitch;
    for (int r = 0; r < rows; r++) {
        weights_of(of, scratch, query + r, shares[r]);
        if (scratch->fadings[query + r] == 1.0f) continue;
        const Floats fading = all_of(scratch->fadings[query + r]);
        for (Py_ssize_t column = 0; column < pitch; column += 16) store(to + r * pitch + column, mul(load(to + r * pitch + column), fading));
    }
    for (Py_ssize_t column = 0; column < pitch; column += COLUMNS) {
        tile_product(rows, (TileProduct){.sums = to + column,
                                         .left = shares[0],
                                         .right = scratch->values + column,
                                         .sums_pitch = pitch,
                                         .left_pitch = KEYS / 2,
                                         .right_pitch = pitch,
                                         .tiles = KEYS / 2 / TILE});
    }
}
#else
INLINE void score_rows(int rows, const Attention *of, const Scratch *scratch, Py_ssize_t query, const uint64_t *seen) {
    const int dim = of->plan->head_dim;
    Floats sums[TOGETHER][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) sums[r][c] = zeros();
    product(rows, sums, (const uint32_t *)(scratch->queries + query * dim), dim / 2, scratch->keys, KEYS, dim / 2, (Prefetch){0});
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            if (seen) sums[r][c] = where_set((uint16_t)(seen[query + r] >> 16 * c), sums[r][c], all_of(-INFINITY));
            store(scratch->scores + (query + r) * KEYS + 16 * c, sums[r][c]);
        }
        scratch->bases[query + r] = largest_of(largest(sums[r]));
    }
}

INLINE void weigh_rows(int rows, const Attention *of, const Scratch *scratch, Py_ssize_t query) {
    const Py_ssize_t pitch = padded(of->plan);
    uint32_t shares[TOGETHER][KEYS / 2] __attribute__((aligned(64)));
    Floats sums[TOGETHER][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) weights_of(of, scratch, query + r, shares[r]);
    for (Py_ssize_t column = 0; column < pitch; column += COLUMNS) {
        float *to = scratch->sums + query * pitch + column;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const Floats fading = all_of(scratch->fadings[query + r]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = mul(load(to + r * pitch + 16 * c), fading);
        }
        product(rows, sums, shares[0], KEYS / 2, scratch->values + column, pitch, KEYS / 2, (Prefetch){0});
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) store(to + r * pitch + 16 * c, sums[r][c]);
    }
}

#define ATTEND(n)                                                                                                                       \
    static __attribute__((noinline)) void score_##n(const Attention *of, const Scratch *scratch, Py_ssize_t query, const uint64_t *seen) { \
        if (seen)                                                                                                                       \
            score_rows(n, of, scratch, query, seen);                                                                                    \
        else                                                                                                                            \
            score_rows(n, of, scratch, query, NULL);                                                                                    \
    }                                                                                                                                   \
    static __attribute__((noinline)) void weigh_##n(const Attention *of, const Scratch *scratch, Py_ssize_t query) {                     \
        weigh_rows(n, of, scratch, query);                                                                                              \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(5)
ATTEND(6)

static void score(int rows, const Attention *of, const Scratch *scratch, Py_ssize_t query, const uint64_t *seen) {
    static void (*const run[])(const Attention *, const Scratch *, Py_ssize_t, const uint64_t *) = {NULL,    score_1, score_2, score_3,
                                                                                                score_4, score_5, score_6};
    run[rows](of, scratch, query, seen);
}

static void weigh(int rows, const Attention *of, const Scratch *scratch, Py_ssize_t query) {
    static void (*const run[])(const Attention *, const Scratch *, Py_ssize_t) = {NULL, weigh_1, weigh_2, weigh_3, weigh_4, weigh_5, weigh_6};
    run[rows](of, scratch, query);
}
#endif

enum { FEW_QUERIES = 12 };

/* Step by step for all of them, so that what one run waits for is hidden behind the others. */
static void attend(const Attention *of, const Scratch *scratch, Py_ssize_t begin, Py_ssize_t end, const uint64_t *seen, Ahead *ahead, int lines) {
    int rows;
    for (Py_ssize_t q = begin; q < end; q += rows) {
        rows = (int)together(end - q);
        score(rows, of, scratch, q, seen);
        for (int i = 0; i < lines; i++) prefetch_ahead(ahead);
    }
    raise_tops(of, scratch, begin, end);
    for (Py_ssize_t q = begin; q < end; q += rows) {
        rows = (int)together(end - q);
        weigh(rows, of, scratch, q);
        for (int i = 0; i < lines; i++) prefetch_ahead(ahead);
    }
}

/* ---- a piece ---- */

/* The queries of one KV head are side by side, row after row, each with its group's heads. */
static void gather_queries(const Attention *of, const Piece *piece, const Scratch *scratch) {
    const Plan *plan = of->plan;
    const int group = plan->heads / plan->kv_heads, dim = plan->head_dim;
    bf16 *to = scratch->queries;
    for (int head = piece->head_begin; head < piece->head_end; head++) {
        for (Py_ssize_t row = piece->begin; row < piece->end; row++, to += group * dim) {
            const bf16 *from = of->qkv + (piece->sequence->row + row) * (plan->heads + 2 * plan->kv_heads) * dim;
            memcpy(to, from + head * group * dim, group * dim * sizeof(bf16));
        }
    }
}

static void walk(const Attention *of, const Piece *piece, const Scratch *scratch) {
    const Plan *plan = of->plan;
    const Sequence *sequence = piece->sequence;
    const Py_ssize_t group = plan->heads / plan->kv_heads, rows = piece->end - piece->begin;
    const Py_ssize_t start = sequence->start + piece->begin;
    uint64_t seen[MOST_QUERIES];
    for (Py_ssize_t first = piece->key_begin; first < piece->key_end; first += KEYS) {
        /* Rows before the tile see none of it, nor do those whose window begins behind it. */
        const Py_ssize_t from = first > start ? first - start : 0;
        const Py_ssize_t behind = of->window > 0 ? first + KEYS - 1 + of->window - start : rows;
        const Py_ssize_t to = behind < rows ? behind : rows;
        if (from >= to) continue;
        const int whole = first + KEYS <= piece->key_end && first + KEYS - 1 <= start + from &&
                          (of->window <= 0 || start + to - of->window <= first);
        for (Py_ssize_t row = from; row < to && !whole; row++) {
            const uint64_t bits = sight(of, start + row, first, piece->key_end);
            for (Py_ssize_t i = 0; i < group; i++) seen[row * group + i] = bits;
        }
        const bf16 *keys[KEYS], *next[KEYS];
        find_keys(of, sequence, piece->head_begin, first + KEYS, piece->key_end, next);
        const int heads = piece->head_end - piece->head_begin;
        for (int head = 0; head < heads; head++) {
            find_keys(of, sequence, piece->head_begin + head, first, piece->key_end, keys);
            Ahead ahead = {next, plan->half_elements, KEYS * head / heads, 0, heads * plan->head_dim / 32};
            const Py_ssize_t queries = (to - from) * group;
            const int few = queries < FEW_QUERIES;
            bring(of, keys, few ? &ahead : NULL, scratch);
            const Py_ssize_t query = head * rows * group;
            Scratch shifted = *scratch;
            shifted.queries += query * plan->head_dim, shifted.sums += query * padded(plan);
            shifted.tops += query, shifted.weights += query * 16;
            const Py_ssize_t runs = (queries + TOGETHER - 1) / TOGETHER;
            attend(of, &shifted, from * group, to * group, whole ? NULL : seen, &ahead,
                   few ? 0 : (int)(KEYS * plan->head_dim / 32 / (2 * runs) + 1));
        }
    }
}

INLINE bf16 *result_of(const Attention *of, const Piece *piece, int head, Py_ssize_t row, Py_ssize_t of_group) {
    const Plan *plan = of->plan;
    const Py_ssize_t group = plan->heads / plan->kv_heads;
    return of->out + ((piece->sequence->row + row) * plan->heads + head * group + of_group) * plan->head_dim;
}

INLINE void store_result(bf16 *to, const float *sums, float weight, int dim) {
    const Floats factor = all_of(1.0f / weight);
    for (int d = 0; d < dim; d += 16) store_bf16(to + d, mul(load_anywhere(sums + d), factor));
}

static void run_piece(const Attention *of, const Cut *cut, const Piece *piece, const Scratch *scratch) {
    const Plan *plan = of->plan;
    const Py_ssize_t group = plan->heads / plan->kv_heads, pitch = padded(plan);
    const Py_ssize_t queries = (piece->end - piece->begin) * group * (piece->head_end - piece->head_begin);
    gather_queries(of, piece, scratch);
    memset(scratch->sums, 0, queries * pitch * sizeof(float));
    memset(scratch->weights, 0, queries * 16 * sizeof(float));
    for (Py_ssize_t q = 0; q < queries; q++) scratch->tops[q] = -INFINITY;
    walk(of, piece, scratch);
    if (piece->part >= 0) {
        float *part = cut->parts + piece->part * part_floats(plan);
        memcpy(part, scratch->sums, queries * pitch * sizeof(float));
        part += MOST_QUERIES * pitch;
        for (Py_ssize_t q = 0; q < queries; q++) {
            part[2 * q] = scratch->tops[q];
            part[2 * q + 1] = sum_of(load(scratch->weights + 16 * q));
        }
        return;
    }
    Py_ssize_t q = 0;
    for (int head = piece->head_begin; head < piece->head_end; head++) {
        for (Py_ssize_t row = piece->begin; row < piece->end; row++) {
            for (Py_ssize_t i = 0; i < group; i++, q++) {
                const float weight = sum_of(load(scratch->weights + 16 * q));
                store_result(result_of(of, piece, head, row, i), scratch->sums + q * pitch, weight, plan->head_dim);
            }
        }
    }
}

/* Puts the parts of one split piece together: of its queries this thread's share. */
static void join(const Attention *of, const Cut *cut, const Split *split, const Scratch *scratch) {
    const Plan *plan = of->plan;
    const Piece *piece = &split->piece;
    const Py_ssize_t group = plan->heads / plan->kv_heads, rows = piece->end - piece->begin, pitch = padded(plan), floats = part_floats(plan);
    const Py_ssize_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), queries = rows * group * (piece->head_end - piece->head_begin);
    const float *parts = cut->parts + split->first * floats;
    for (Py_ssize_t q = queries * thread / threads; q < queries * (thread + 1) / threads; q++) {
        const Py_ssize_t at = MOST_QUERIES * pitch + 2 * q;
        float top = -INFINITY, weight = 0.0f;
        for (Py_ssize_t p = 0; p < split->count; p++) top = fmaxf(top, parts[p * floats + at]);
        memset(scratch->sums, 0, pitch * sizeof(float));
        for (Py_ssize_t p = 0; p < split->count; p++) {
            const float factor = exp2f(parts[p * floats + at] - top);
            weight += factor * parts[p * floats + at + 1];
            const float *sums = parts + p * floats + q * pitch;
            for (Py_ssize_t d = 0; d < pitch; d++) scratch->sums[d] += factor * sums[d];
        }
        const int head = piece->head_begin + (int)(q / (rows * group));
        store_result(result_of(of, piece, head, piece->begin + q / group % rows, q % group), scratch->sums, weight, plan->head_dim);
    }
}

/* ---- a layer ---- */

static void place_share(const Attention *of) {
    const Py_ssize_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), rows = of->plan->rows;
    place_rows(of, rows * thread / threads, rows * (thread + 1) / threads);
}

static void attention_share(const Attention *of, const Cut *cut, AttentionTurns *turns) {
    Scratch scratch;
    if (!take_scratch(of->plan, &scratch)) __atomic_store_n(&turns->failed, 1, __ATOMIC_RELAXED);
    place_share(of);
#pragma omp barrier
    if (turns->failed) return;
    for (Py_ssize_t i; (i = __atomic_fetch_add(&turns->piece, 1, __ATOMIC_RELAXED)) < cut->num_pieces;) {
        run_piece(of, cut, &cut->pieces[i], &scratch);
    }
    end_products();
    if (!cut->num_splits) return;
#pragma omp barrier
    for (Py_ssize_t i = 0; i < cut->num_splits; i++) join(of, cut, &cut->splits[i], &scratch);
}
