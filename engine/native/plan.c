#include "../../springtide/native/buffers.h"
#include "plan.h"
#include <stdlib.h>
#include <string.h>

/* Pieces for each thread that are wanted at least, so that none waits long for the others' last. */
enum { PIECES_PER_THREAD = 2 };

/* Of a piece of a long chunk. */
enum { MANY_QUERIES = 96 };

/* Far beyond any context, and no sum of two of them overflows. */
enum { MOST_TOKENS = 1 << 30 };

static Py_ssize_t least(Py_ssize_t a, Py_ssize_t b) { return a < b ? a : b; }

/* How a sequence's rows are shared out: pieces of `rows` rows and `heads` KV heads. Few rows take all heads of a slab at once, as they lie
 * in memory; many take one, whose keys then stay in the cache. */
typedef struct {
    Py_ssize_t rows;
    int heads;
} Shape;

static Shape shape_of(const Plan *plan, const Sequence *sequence) {
    const Py_ssize_t group = plan->heads / plan->kv_heads;
    if (sequence->count * group * 2 > MANY_QUERIES) {
        const Py_ssize_t rows = MANY_QUERIES / group;
        return (Shape){rows > 1 ? least(rows, sequence->count) : 1, 1};
    }
    return (Shape){sequence->count, (int)least(MOST_QUERIES / (sequence->count * group), plan->kv_heads)};
}

static Py_ssize_t pieces_of(const Plan *plan, const Sequence *sequence) {
    const Shape shape = shape_of(plan, sequence);
    return (sequence->count + shape.rows - 1) / shape.rows * ((plan->kv_heads + shape.heads - 1) / shape.heads);
}

static Piece piece_at(const Plan *plan, const Sequence *sequence, Py_ssize_t window, Py_ssize_t begin, int head) {
    const Shape shape = shape_of(plan, sequence);
    Piece piece = {.sequence = sequence, .head_begin = head, .begin = begin, .part = -1};
    piece.head_end = (int)least(head + shape.heads, plan->kv_heads);
    piece.end = least(begin + shape.rows, sequence->count);
    const Py_ssize_t first = sequence->start + begin + 1 - window;
    piece.key_begin = window > 0 && first > 0 ? first : 0;
    piece.key_end = sequence->start + piece.end;
    piece.cost = (int64_t)(piece.key_end - piece.key_begin + KEYS) * (piece.end - piece.begin + 8) * (piece.head_end - head);
    return piece;
}

static int dearer(const void *a, const void *b) {
    const int64_t x = ((const Piece *)a)->cost, y = ((const Piece *)b)->cost;
    return (x < y) - (x > y);
}

static int cut(Plan *plan, Cut *cut) {
    Py_ssize_t whole = 0, count = 0, parts = 0, splits = 0;
    for (Py_ssize_t s = 0; s < plan->num_sequences; s++) whole += pieces_of(plan, &plan->sequences[s]);
    Piece *pieces = malloc(whole * sizeof(Piece));
    if (!pieces) return -1;
    int64_t cost = 0;
    for (Py_ssize_t s = 0; s < plan->num_sequences; s++) {
        const Sequence *sequence = &plan->sequences[s];
        const Shape shape = shape_of(plan, sequence);
        for (Py_ssize_t begin = 0; begin < sequence->count; begin += shape.rows) {
            for (int head = 0; head < plan->kv_heads; head += shape.heads) {
                pieces[count] = piece_at(plan, sequence, cut->window, begin, head);
                cost += pieces[count++].cost;
            }
        }
    }
    /* A piece that is much of the whole is split by its keys: evenly, where there is no other. */
    const int64_t most = cost / ((whole > 1 ? PIECES_PER_THREAD : 1) * cut->threads) + 1;
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < whole; i++) total += 1 + pieces[i].cost / most;
    cut->pieces = malloc(total * sizeof(Piece));
    cut->splits = malloc(whole * sizeof(Split));
    if (!cut->pieces || !cut->splits) {
        free(pieces);
        return -1;
    }
    Py_ssize_t out = 0;
    for (Py_ssize_t i = 0; i < whole; i++) {
        const Piece *piece = &pieces[i];
        const Py_ssize_t tiles = (piece->key_end - piece->key_begin + KEYS - 1) / KEYS;
        const Py_ssize_t ways = cut->threads > 1 ? least(1 + piece->cost / most, tiles) : 1;
        for (Py_ssize_t way = 0; way < ways; way++) {
            Piece part = *piece;
            part.key_begin = piece->key_begin + tiles * way / ways * KEYS;
            part.key_end = way == ways - 1 ? piece->key_end : piece->key_begin + tiles * (way + 1) / ways * KEYS;
            part.cost = piece->cost / ways;
            part.part = ways > 1 ? parts + way : -1;
            cut->pieces[out++] = part;
        }
        if (ways > 1) {
            cut->splits[splits++] = (Split){*piece, parts, ways};
            parts += ways;
        }
    }
    free(pieces);
    qsort(cut->pieces, out, sizeof(Piece), dearer);
    cut->num_pieces = out;
    cut->num_splits = splits;
    cut->num_parts = parts;
    cut->parts = parts ? malloc(parts * part_floats(plan) * sizeof(float)) : NULL;
    return parts && !cut->parts ? -1 : 0;
}

static void drop(Cut *cut) {
    free(cut->pieces);
    free(cut->splits);
    free(cut->parts);
}

Cut *plan_cut(Plan *plan, Py_ssize_t window, int threads) {
    for (int i = 0; i < plan->num_cuts; i++) {
        if (plan->cuts[i].window == window && plan->cuts[i].threads == threads) return &plan->cuts[i];
    }
    if (plan->num_cuts == MOST_WINDOWS) {
        PyErr_Format(PyExc_ValueError, "the layers have more than %d different windows", MOST_WINDOWS);
        return NULL;
    }
    Cut *fresh = &plan->cuts[plan->num_cuts];
    *fresh = (Cut){.window = window, .threads = threads};
    if (cut(plan, fresh)) {
        drop(fresh);
        PyErr_NoMemory();
        return NULL;
    }
    plan->num_cuts++;
    return fresh;
}

static void plan_dealloc(Plan *plan) {
    for (int i = 0; i < plan->num_cuts; i++) drop(&plan->cuts[i]);
    free(plan->sequences);
    free(plan->tables);
    if (plan->arena.obj) PyBuffer_Release(&plan->arena);
    Py_TYPE(plan)->tp_free((PyObject *)plan);
}

/* The slots of one sequence that have something in them, into `table`; -1 with an error set. */
static int take_slots(Plan *plan, Sequence *sequence, PyObject *slots, int32_t *table) {
    Py_buffer view;
    if (buffer_take(&view, slots, "slots", &INT32, 0)) return -1;
    const Py_ssize_t end = sequence->start + sequence->count;
    const Py_ssize_t blocks = (end + plan->block_tokens - 1) / plan->block_tokens;
    int failed = 0;
    if (view.len / 4 < blocks) {
        PyErr_Format(PyExc_ValueError, "%zd slots of %zd tokens cannot hold %zd tokens", view.len / 4, plan->block_tokens, end);
        failed = -1;
    } else {
        memcpy(table, view.buf, blocks * 4);
        sequence->table = table;
        for (Py_ssize_t i = 0; i < blocks && !failed; i++) {
            if (table[i] >= 0 && table[i] < plan->num_slots) continue;
            PyErr_Format(PyExc_ValueError, "slot %d is outside the arena of %zd slots", table[i], plan->num_slots);
            failed = -1;
        }
    }
    PyBuffer_Release(&view);
    return failed;
}

/* -1 with an error set. */
static int take_sequences(Plan *plan, PyObject *chunks) {
    const Py_ssize_t count = PyList_GET_SIZE(chunks);
    Py_ssize_t blocks = 0;
    plan->sequences = calloc(count ? count : 1, sizeof(Sequence));
    if (!plan->sequences) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        Sequence *sequence = &plan->sequences[i];
        PyObject *slots;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(chunks, i), "nnO", &sequence->start, &sequence->count, &slots)) return -1;
        if (sequence->start < 0 || sequence->count < 1 || sequence->start > MOST_TOKENS || sequence->count > MOST_TOKENS) {
            PyErr_Format(PyExc_ValueError, "a chunk of %zd tokens cannot begin at %zd", sequence->count, sequence->start);
            return -1;
        }
        sequence->row = plan->rows;
        plan->rows += sequence->count;
        blocks += (sequence->start + sequence->count + plan->block_tokens - 1) / plan->block_tokens;
    }
    plan->num_sequences = count;
    plan->tables = malloc((blocks ? blocks : 1) * sizeof(int32_t));
    if (!plan->tables) return PyErr_NoMemory(), -1;
    int32_t *table = plan->tables;
    for (Py_ssize_t i = 0; i < count; i++) {
        Sequence *sequence = &plan->sequences[i];
        if (take_slots(plan, sequence, PyTuple_GET_ITEM(PyList_GET_ITEM(chunks, i), 2), table)) return -1;
        table += (sequence->start + sequence->count + plan->block_tokens - 1) / plan->block_tokens;
    }
    return 0;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *arena, *chunks;
    Py_ssize_t num_slots, slot, half, token, block_tokens, heads, kv_heads, head_dim;
    if (!PyArg_ParseTuple(args, "On(nnn)nnnnO!", &arena, &num_slots, &slot, &half, &token, &block_tokens, &heads, &kv_heads, &head_dim,
                          &PyList_Type, &chunks))
        return NULL;
    if (num_slots < 1 || block_tokens < 1 || kv_heads < 1 || heads < kv_heads || heads % kv_heads || heads / kv_heads > MOST_QUERIES ||
        head_dim < 32 || head_dim % 32 || head_dim > MOST_HEAD_DIM || token < 1 || token / head_dim < kv_heads ||
        half / token < block_tokens || slot / 2 < half) {
        PyErr_Format(PyExc_ValueError, "no paged attention over %zd heads, %zd KV heads of %zd, blocks of %zd, strides of %zd, %zd and %zd",
                     heads, kv_heads, head_dim, block_tokens, slot, half, token);
        return NULL;
    }
    Plan *plan = (Plan *)type->tp_alloc(type, 0);
    if (!plan) return NULL;
    plan->num_slots = num_slots, plan->block_tokens = block_tokens;
    plan->slot_elements = slot, plan->half_elements = half, plan->token_elements = token;
    plan->heads = (int)heads, plan->kv_heads = (int)kv_heads, plan->head_dim = (int)head_dim;
    if (!buffer_take(&plan->arena, arena, "arena", &BFLOAT16, 1)) {
        if (plan->arena.len / 2 / slot < num_slots)
            PyErr_Format(PyExc_ValueError, "an arena of %zd bytes has no %zd slots of %zd elements", plan->arena.len, num_slots, slot);
        else if (!take_sequences(plan, chunks))
            return (PyObject *)plan;
    }
    Py_DECREF(plan);
    return NULL;
}

/* Writes the position of each row, int64 [rows]. */
static PyObject *plan_positions(Plan *plan, PyObject *into) {
    Py_buffer view;
    if (buffer_take(&view, into, "positions", &INT64, 1)) return NULL;
    const int fits = view.len == plan->rows * (Py_ssize_t)sizeof(int64_t);
    if (fits) {
        for (Py_ssize_t s = 0; s < plan->num_sequences; s++) {
            const Sequence *sequence = &plan->sequences[s];
            int64_t *row = (int64_t *)view.buf + sequence->row;
            for (Py_ssize_t i = 0; i < sequence->count; i++) row[i] = sequence->start + i;
        }
    }
    PyBuffer_Release(&view);
    if (!fits) return PyErr_Format(PyExc_ValueError, "positions of %zd rows need as many int64", plan->rows);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"positions", (PyCFunction)plan_positions, METH_O, NULL},
    {"run", (PyCFunction)plan_run, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject Plan_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "engine._native.Plan",
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = plan_new,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_methods = methods,
};
