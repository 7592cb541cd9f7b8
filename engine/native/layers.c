/* Whole layers in one go, the residual stream between them: the same products, norms and attention as one by one, with no way back to
 * Python and one team of threads from the first to the last. */
#include "parts.h"
#include <omp.h>

/* Weights are the caller's, and stay where they are. */
typedef struct {
    Norm attention_norm, feed_forward_norm, query_norm, key_norm;
    Product qkv, output, gated, down;
} Weights;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count, hidden;
    Weights *layers;
} Layers;

/* One pass over some of them. `delta` [rows][hidden] is what is still to be added to `stream`; `x` [rows][hidden], `qkv`, `attended` and
 * `inner` are what their names say of the layer at hand. */
typedef struct {
    const Layers *of;
    Plan *plan;
    Py_ssize_t rows;
    bf16 *stream, *delta, *x, *qkv, *attended, *inner;
    const float *cos, *sin;
    float score_scale;
} Pass;

typedef struct {
    Py_ssize_t qkv, output, gated, down;
    AttentionTurns attention;
} Turns;

static void run_norm(const Pass *pass, const Norm *norm, const bf16 *added) {
    const NormRows rows = {pass->stream, added, *norm, pass->x, pass->rows, pass->of->hidden};
    kernels->norm(&rows);
#pragma omp barrier
}

static void run_product(const Pass *pass, Product product, const bf16 *x, bf16 *out, Py_ssize_t *turn) {
    product.x = (const uint32_t *)x, product.out = out, product.rows = pass->rows;
    kernels->product(&product, turn);
#pragma omp barrier
}

/* By each thread of a team. `pending`: there is a `delta` from before. `keys_only`: nothing is wanted but what goes into the slots. */
static void run_layer(const Pass *pass, const Weights *layer, Py_ssize_t slab, const Cut *cut, int pending, int keys_only, Turns *turns) {
    const Attention attention = {pass->plan,
                                 pass->qkv,
                                 pass->attended,
                                 pass->cos,
                                 pass->sin,
                                 layer->query_norm.scale,
                                 layer->key_norm.scale,
                                 layer->query_norm.eps,
                                 pass->score_scale,
                                 slab,
                                 cut->window};
    run_norm(pass, &layer->attention_norm, pending ? pass->delta : NULL);
    run_product(pass, layer->qkv, pass->x, pass->qkv, &turns->qkv);
    if (keys_only) {
        kernels->place(&attention);
        return;
    }
    kernels->attention(&attention, cut, &turns->attention);
#pragma omp barrier
    run_product(pass, layer->output, pass->attended, pass->delta, &turns->output);
    run_norm(pass, &layer->feed_forward_norm, pass->delta);
    run_product(pass, layer->gated, pass->x, pass->inner, &turns->gated);
    run_product(pass, layer->down, pass->inner, pass->delta, &turns->down);
}

/* One (slab, window) for each layer that is run, into `slabs` and `cuts`; -1 with an error set. */
static int take_places(Plan *plan, PyObject *places, Py_ssize_t count, Py_ssize_t *slabs, const Cut **cuts) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t window;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(places, i), "nn", &slabs[i], &window) || attention_slab(plan, slabs[i])) return -1;
        cuts[i] = plan_cut(plan, window, omp_get_max_threads());
        if (!cuts[i]) return -1;
    }
    return 0;
}

static PyObject *layers_run(Layers *layers, PyObject *args) {
    Py_ssize_t begin;
    PyObject *places;
    int pending, keys_only;
    unsigned long long stream, delta, x, qkv, attended, inner, cos, sin;
    Pass pass = {.of = layers};
    if (!PyArg_ParseTuple(args, "nO!O!np(KKKKKKKK)fp", &begin, &PyList_Type, &places, &Plan_Type, &pass.plan, &pass.rows, &pending, &stream,
                          &delta, &x, &qkv, &attended, &inner, &cos, &sin, &pass.score_scale, &keys_only)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(places);
    if (begin < 0 || begin + count > layers->count || pass.rows != pass.plan->rows) {
        return PyErr_Format(PyExc_ValueError, "no layers %zd..%zd of %zd, or no %zd rows of %zd", begin, begin + count, layers->count, pass.rows,
                            pass.plan->rows);
    }
    pass.stream = (bf16 *)stream, pass.delta = (bf16 *)delta, pass.x = (bf16 *)x, pass.qkv = (bf16 *)qkv;
    pass.attended = (bf16 *)attended, pass.inner = (bf16 *)inner, pass.cos = (const float *)cos, pass.sin = (const float *)sin;
    pass.score_scale = attention_scale(pass.score_scale);
    Py_ssize_t *slabs = PyMem_New(Py_ssize_t, count);
    const Cut **cuts = PyMem_New(const Cut *, count);
    Turns *turns = PyMem_Calloc(count, sizeof(Turns));
    int failed = 0;
    if (!slabs || !cuts || !turns) {
        PyErr_NoMemory();
    } else if (!take_places(pass.plan, places, count, slabs, cuts)) {
        Py_BEGIN_ALLOW_THREADS;
#pragma omp parallel
        {
            for (Py_ssize_t i = 0; i < count; i++) {
                const int placed = keys_only && i == count - 1;
                run_layer(&pass, &layers->layers[begin + i], slabs[i], cuts[i], pending || i > 0, placed, &turns[i]);
            }
            if (begin + count == layers->count && !keys_only) kernels->add(pass.stream, pass.delta, pass.rows, layers->hidden);
        }
        for (Py_ssize_t i = 0; i < count; i++) failed |= turns[i].attention.failed;
        Py_END_ALLOW_THREADS;
        if (failed) PyErr_NoMemory();
    }
    PyMem_Free(slabs), PyMem_Free(cuts), PyMem_Free(turns);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* ---- making them ---- */

static int take_norm(PyObject *from, void *into) {
    Norm *norm = into;
    unsigned long long scale;
    if (!PyArg_ParseTuple(from, "Kf", &scale, &norm->eps)) return 0;
    norm->scale = (const float *)scale;
    return 1;
}

static int take_product(PyObject *from, void *into) {
    Product *product = into;
    unsigned long long packed, bias;
    Py_ssize_t inputs;
    int kind;
    if (!PyArg_ParseTuple(from, "KKnni", &packed, &bias, &product->outputs, &inputs, &kind)) return 0;
    product->packed = (const uint32_t *)packed, product->bias = (const float *)bias;
    product->pairs = inputs / 2, product->kind = kind;
    return 1;
}

static PyObject *layers_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    Py_ssize_t hidden;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "nO!", &hidden, &PyList_Type, &list)) return NULL;
    Layers *layers = (Layers *)type->tp_alloc(type, 0);
    if (!layers) return NULL;
    layers->hidden = hidden, layers->count = PyList_GET_SIZE(list);
    layers->layers = PyMem_Calloc(layers->count, sizeof(Weights));
    if (!layers->layers) {
        Py_DECREF(layers);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < layers->count; i++) {
        Weights *layer = &layers->layers[i];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "O&O&O&O&O&O&O&O&", take_norm, &layer->attention_norm, take_product, &layer->qkv,
                              take_norm, &layer->query_norm, take_norm, &layer->key_norm, take_product, &layer->output, take_norm,
                              &layer->feed_forward_norm, take_product, &layer->gated, take_product, &layer->down)) {
            Py_DECREF(layers);
            return NULL;
        }
    }
    return (PyObject *)layers;
}

static void layers_dealloc(Layers *layers) {
    PyMem_Free(layers->layers);
    Py_TYPE(layers)->tp_free((PyObject *)layers);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)layers_run, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject Layers_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "engine._native.Layers",
    .tp_basicsize = sizeof(Layers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = layers_new,
    .tp_dealloc = (destructor)layers_dealloc,
    .tp_methods = methods,
};
