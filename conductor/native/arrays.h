/* The memory of numpy arrays, as long as a call lasts; and what an object's attributes are. */
#pragma once
#include "structs.h"

enum { MOST_BUFFERS = 16 };

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
static inline Py_ssize_t items(const Buffers *buffers) {
    const Py_buffer *view = &buffers->held[buffers->count - 1];
    return view->len / view->itemsize;
}

static inline int is_within(int64_t place, Py_ssize_t count) {
    if (place >= 0 && place < count) return 1;
    PyErr_SetString(PyExc_IndexError, "a row names a place that is none");
    return 0;
}

/* A new reference, or NULL with an error set. */
static inline PyObject *attribute_of(PyObject *object, Attribute *attribute) {
    if (!attribute->interned && !(attribute->interned = PyUnicode_InternFromString(attribute->name))) return NULL;
    return PyObject_GetAttr(object, attribute->interned);
}

/* Fills a struct with the numbers that are an object's attributes. -1 with an error set. */
static inline int numbers_of(PyObject *object, Attribute *attributes, size_t count, void *into) {
    for (size_t i = 0; i < count; i++) {
        PyObject *value = attribute_of(object, &attributes[i]);
        if (!value) return -1;
        union {
            double float64;
            int64_t int64;
        } number;
        if (attributes[i].type == &FLOAT64)
            number.float64 = PyFloat_AsDouble(value);
        else
            number.int64 = PyLong_AsLongLong(value);
        Py_DECREF(value);
        if (PyErr_Occurred()) return -1;
        memcpy((char *)into + ATTRIBUTE_BYTES * i, &number, ATTRIBUTE_BYTES);
    }
    return 0;
}

/* Fills a struct with the columns, of at least `least` items that will be written, that are an object's attributes. -1 with an error set. */
static inline int columns_of(Buffers *buffers, PyObject *object, Attribute *attributes, size_t count, Py_ssize_t least, void *into) {
    for (size_t i = 0; i < count; i++) {
        PyObject *value = attribute_of(object, &attributes[i]);
        if (!value) return -1;
        void *column = array(buffers, value, attributes[i].name, attributes[i].type, least, 1);
        Py_DECREF(value); /* the buffer keeps it */
        if (!column) return -1;
        memcpy((char *)into + ATTRIBUTE_BYTES * i, &column, ATTRIBUTE_BYTES);
    }
    return 0;
}
