/* What a layer is made of, one by one. */
#include "parts.h"
#include <omp.h>

/* ---- products ---- */

/* Which row of the weights column `c` of a panel is; -1 for none. The rows of what the gates let through come after all gates. */
static Py_ssize_t row_of(Py_ssize_t panel, Py_ssize_t c, Py_ssize_t outputs, int gated) {
    if (!gated) return panel * COLUMNS + c < outputs ? panel * COLUMNS + c : -1;
    const Py_ssize_t half = COLUMNS / 2, output = panel * half + c % half;
    return output >= outputs ? -1 : c < half ? output : outputs + output;
}

PyObject *product_pack(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long from, into;
    Py_ssize_t outputs, inputs;
    int gated;
    if (!PyArg_ParseTuple(args, "KKnnp", &from, &into, &outputs, &inputs, &gated)) return NULL;
    const uint32_t *weight = (const uint32_t *)from;
    uint32_t *packed = (uint32_t *)into;
    const Py_ssize_t pairs = inputs / 2;
    Py_BEGIN_ALLOW_THREADS;
#pragma omp parallel for schedule(static)
    for (Py_ssize_t panel = 0; panel < panels_of(outputs, gated); panel++) {
        for (Py_ssize_t c = 0; c < COLUMNS; c++) {
            const Py_ssize_t row = row_of(panel, c, outputs, gated);
            uint32_t *to = packed + panel * pairs * COLUMNS + c;
            for (Py_ssize_t pair = 0; pair < pairs; pair++) to[pair * COLUMNS] = row < 0 ? 0 : weight[row * pairs + pair];
        }
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *product_run(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long x, packed, bias, out;
    Py_ssize_t inputs, next = 0;
    int kind;
    Product of;
    if (!PyArg_ParseTuple(args, "KKnKKnni", &x, &out, &of.rows, &packed, &bias, &of.outputs, &inputs, &kind)) return NULL;
    of.x = (const uint32_t *)x, of.packed = (const uint32_t *)packed, of.bias = (const float *)bias, of.out = (bf16 *)out;
    of.pairs = inputs / 2, of.kind = kind;
    Py_BEGIN_ALLOW_THREADS;
#pragma omp parallel
    kernels->product(&of, &next);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* ---- norms ---- */

/* Of so many elements and more a second thread is worth waking. */
enum { PARALLEL_ELEMENTS = 1 << 14 };

PyObject *rows_norm(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long x, added, scale, out;
    NormRows of;
    if (!PyArg_ParseTuple(args, "KKKfKnn", &x, &added, &scale, &of.norm.eps, &out, &of.rows, &of.size)) return NULL;
    of.x = (bf16 *)x, of.added = (const bf16 *)added, of.norm.scale = (const float *)scale, of.out = (bf16 *)out;
    Py_BEGIN_ALLOW_THREADS;
#pragma omp parallel if (of.rows > 1 && of.rows * of.size >= PARALLEL_ELEMENTS)
    kernels->norm(&of);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* ---- attention ---- */

int attention_slab(const Plan *plan, Py_ssize_t slab) {
    if (slab >= 0 && slab + 2 * plan->half_elements - plan->token_elements + plan->kv_heads * plan->head_dim <= plan->slot_elements) return 0;
    PyErr_Format(PyExc_ValueError, "a slab cannot begin at element %zd of a slot of %zd", slab, plan->slot_elements);
    return -1;
}

PyObject *plan_run(Plan *plan, PyObject *args) {
    unsigned long long qkv, out, cos, sin, query_scale, key_scale;
    float score_scale;
    Attention of = {.plan = plan};
    if (!PyArg_ParseTuple(args, "nKKKKKKffn", &of.slab, &qkv, &out, &cos, &sin, &query_scale, &key_scale, &of.eps, &score_scale,
                          &of.window)) {
        return NULL;
    }
    if (attention_slab(plan, of.slab)) return NULL;
    const Cut *cut = plan_cut(plan, of.window, omp_get_max_threads());
    if (!cut) return NULL;
    of.qkv = (bf16 *)qkv, of.out = (bf16 *)out, of.cos = (const float *)cos, of.sin = (const float *)sin;
    of.query_scale = (const float *)query_scale, of.key_scale = (const float *)key_scale;
    of.score_scale = attention_scale(score_scale);
    AttentionTurns turns = {0};
    Py_BEGIN_ALLOW_THREADS;
#pragma omp parallel num_threads(cut->threads)
    kernels->attention(&of, cut, &turns);
    Py_END_ALLOW_THREADS;
    if (turns.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
