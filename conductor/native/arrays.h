/* The memory of numpy arrays: of int64 and float64. */
#pragma once
#include "../../springtide/native/buffers.h"
#include "native.h"

enum { MOST_BUFFERS = 12 };

typedef struct {
    Py_buffer held[MOST_BUFFERS];
    int count;
} Buffers;

/* Of the argument `name`, at least `least` items; NULL with an error set. */
static inline void *array(Buffers *buffers, PyObject *object, const char *name, const ItemType *type, Py_ssize_t least, int written) {
    Py_buffer *view = &buffers->held[buffers->count];
    if (buffer_take(view, object, name, type, written)) return NULL;
    buffers->count++;
    if (view->len < type->size * least) {
        PyErr_Format(PyExc_ValueError, "%s has %zd items; %zd are wanted", name, view->len / type->size, least);
        return NULL;
    }
    return view->buf;
}

static inline int64_t *int64s(Buffers *buffers, PyObject *object, const char *name, Py_ssize_t least, int written) {
    return array(buffers, object, name, &INT64, least, written);
}

static inline double *doubles(Buffers *buffers, PyObject *object, const char *name, Py_ssize_t least, int written) {
    return array(buffers, object, name, &FLOAT64, least, written);
}

static inline void release(Buffers *buffers) {
    while (buffers->count) PyBuffer_Release(&buffers->held[--buffers->count]);
}

/* Of the array that was asked for last. */
static inline Py_ssize_t items(const Buffers *buffers) { return buffers->held[buffers->count - 1].len / 8; }

static inline int all_below(const int64_t *values, Py_ssize_t n, Py_ssize_t limit) {
    for (Py_ssize_t i = 0; i < n; i++) {
        if (values[i] < 0 || values[i] >= limit) {
            PyErr_SetString(PyExc_IndexError, "a row names a place that is none");
            return 0;
        }
    }
    return 1;
}
