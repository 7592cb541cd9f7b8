/* The memory of numpy arrays whose items have 8 bytes. */
#pragma once
#include "native.h"

enum { MOST_BUFFERS = 12 };

typedef struct {
    Py_buffer held[MOST_BUFFERS];
    int count;
} Buffers;

/* At least `least` items; NULL with an error set. */
static inline void *array(Buffers *buffers, PyObject *object, Py_ssize_t least, int written) {
    Py_buffer *view = &buffers->held[buffers->count];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | (written ? PyBUF_WRITABLE : 0))) return NULL;
    buffers->count++;
    if (view->itemsize != 8 || view->len < 8 * least) {
        PyErr_Format(PyExc_ValueError, "an array has %zd bytes; %zd items of 8 bytes are wanted", view->len, least);
        return NULL;
    }
    return view->buf;
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
