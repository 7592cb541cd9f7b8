/* AMX: matrix products over tiles of 16 rows of 64 bytes, beside the vectors of AVX-512. A tile's instructions name it by a number that is
 * known when they are compiled. */
#pragma once

/* Two tiles of rows. One routine takes any number of them, as sums are in memory before and after. */
enum { TOGETHER = 32 };
#define SUMS_IN_TILES
#include "vectors512.h"
#include <string.h>
#pragma GCC target("amx-tile,amx-bf16")

#define INSTRUCTION_SET "AMX bfloat16"

enum { TILE = 16 };

/* While one part of a few rows' product is computed, from the second cache, the next one is on its way there. */
enum { STREAMING = 0, FEW = 64, FEW_PAIRS = 384 };

/* A row's sums must not depend on how many rows are beside it: parts end where tiles do. */
_Static_assert(FEW_PAIRS % TILE == 0 && TOGETHER == 2 * TILE && COLUMNS == 4 * TILE && KEYS % (2 * TILE) == 0, "whole tiles");

/* What `_tile_loadconfig` reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Shapes;

/* For the compiler: what was written is in memory from here on. It does not know that tile instructions read it. */
INLINE void settle_memory(void) { __asm__ volatile("" ::: "memory"); }

/* The number of rows for which this thread's tiles are shaped; 0: they are not. */
static __thread int shaped = 0;

/* Up to 16 rows: sums of all columns in tiles 0 to 3, rows in 4, columns in 5 to 7. More: sums of two tiles of columns in 0 and 1 for the
 * first 16 rows, in 2 and 3 for the others, which are in 4 and 5; columns in 6 and 7. */
static void shape_tiles(int rows) {
    if (shaped == rows) return;
    Shapes shapes __attribute__((aligned(64))) = {.palette = 1};
    const uint8_t first = (uint8_t)(rows < TILE ? rows : TILE), second = (uint8_t)(rows - first);
    const uint8_t narrow[] = {first, first, first, first, first, TILE, TILE, TILE}, wide[] = {first, first, second, second, first, second, TILE, TILE};
    memcpy(shapes.rows, second ? wide : narrow, sizeof wide);
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = TILE * sizeof(float);
    settle_memory();
    _tile_loadconfig(&shapes);
    shaped = rows;
}

/* A thread's share is over: whatever else it runs finds the tiles as if they had never been used. */
static void end_products(void) {
    if (shaped) _tile_release();
    shaped = 0;
}

/* A product's sides and sums. `sums` are of rows that lie `sums_pitch` apart; `fresh`: they begin at 0, whatever is there. */
typedef struct {
    float *sums;
    const uint32_t *left, *right;
    Py_ssize_t sums_pitch, left_pitch, right_pitch;
    int tiles, fresh;
    Prefetch prefetch;
} TileProduct;

#define SUMS(instruction, tile, row, column) \
    instruction(tile, of->sums + (row) * of->sums_pitch + (column), of->sums_pitch * (Py_ssize_t)sizeof(float))
/* Tiles 0 and 1 of sums side by side, 2 and 3 as well, which begin at that row and column. */
#define ALL_SUMS(instruction, row, column)             \
    do {                                               \
        SUMS(instruction, 0, 0, 0);                    \
        SUMS(instruction, 1, 0, TILE);                 \
        SUMS(instruction, 2, row, column);             \
        SUMS(instruction, 3, row, (column) + TILE);    \
    } while (0)
#define ROWS_AT(tile, row) _tile_loadd(tile, left + (row) * of->left_pitch, of->left_pitch * (Py_ssize_t)sizeof(uint32_t))
#define COLUMNS_AT(tile, column) _tile_loadd(tile, right + (column), of->right_pitch * (Py_ssize_t)sizeof(uint32_t))

INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void prefetch_share(Prefetch prefetch, int share, int shares) {
    const int lines = TILE * prefetch.lines;
    for (int line = lines * share / shares; line < lines * (share + 1) / shares; line++) _mm_prefetch(prefetch.next + 16 * line, _MM_HINT_T1);
}

/* At most 16 rows. */
static void narrow_product(const TileProduct *of) {
    const uint32_t *left = of->left, *right = of->right;
    if (of->fresh)
        zero_sums();
    else
        ALL_SUMS(_tile_loadd, 0, 2 * TILE);
    for (int tile = 0; tile < of->tiles; tile++, left += TILE, right += TILE * of->right_pitch) {
        prefetch_share(of->prefetch, tile, 1);
        ROWS_AT(4, 0);
        COLUMNS_AT(5, 0);
        _tile_dpbf16ps(0, 4, 5);
        COLUMNS_AT(6, TILE);
        _tile_dpbf16ps(1, 4, 6);
        COLUMNS_AT(7, 2 * TILE);
        _tile_dpbf16ps(2, 4, 7);
        COLUMNS_AT(5, 3 * TILE);
        _tile_dpbf16ps(3, 4, 5);
    }
    ALL_SUMS(_tile_stored, 0, 2 * TILE);
}

/* More of them: 32 of the columns, then the others. */
static void wide_product(TileProduct *of) {
    for (int half = 0; half < 2; half++, of->sums += 2 * TILE, of->right += 2 * TILE) {
        const uint32_t *left = of->left, *right = of->right;
        if (of->fresh)
            zero_sums();
        else
            ALL_SUMS(_tile_loadd, TILE, 0);
        for (int tile = 0; tile < of->tiles; tile++, left += TILE, right += TILE * of->right_pitch) {
            prefetch_share(of->prefetch, half * of->tiles + tile, 2);
            ROWS_AT(4, 0);
            COLUMNS_AT(6, 0);
            _tile_dpbf16ps(0, 4, 6);
            COLUMNS_AT(7, TILE);
            _tile_dpbf16ps(1, 4, 7);
            ROWS_AT(5, TILE);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        ALL_SUMS(_tile_stored, TILE, 0);
    }
}

#undef ALL_SUMS
#undef SUMS
#undef ROWS_AT
#undef COLUMNS_AT

/* Of whole tiles, in memory. */
static void tile_product(int rows, TileProduct of) {
    shape_tiles(rows);
    settle_memory();
    if (rows <= TILE)
        narrow_product(&of);
    else
        wide_product(&of);
}

/* sums [rows][64] += left [rows][pairs] times right [pairs][64], both of pairs of bfloat16. The pairs that do not fill a tile come last, in
 * vectors; what they could have prefetched is left to the hardware. */
static void product(int rows, Floats sums[TOGETHER][4], const uint32_t *left, Py_ssize_t left_pitch, const uint32_t *right,
                    Py_ssize_t right_pitch, int pairs, Prefetch prefetch) {
    const int tiles = pairs / TILE;
    tile_product(rows, (TileProduct){(float *)sums, left, right, COLUMNS, left_pitch, right_pitch, tiles, 0, prefetch});
    for (int pair = tiles * TILE; pair < pairs; pair++) {
        for (int r = 0; r < rows; r++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32((int)left[r * left_pitch + pair]);
            for (int c = 0; c < 4; c++) {
                const __m512bh columns = (__m512bh)_mm512_load_si512(right + pair * right_pitch + TILE * c);
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], both, columns);
            }
        }
    }
}
