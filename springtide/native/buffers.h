/* Memory that Python lends: taken only where its items are of the type that the caller will read and write, whatever their size. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "formats that begin with '<' are taken for the machine's own: little-endian machines only"
#endif

/* The codes of the struct module that stand for a type here: `long` and `long long` are one. */
typedef struct {
    const char *name, *codes;
    Py_ssize_t size;
} ItemType;

static const ItemType BYTES = {"bytes", "Bbc", 1}, INT32 = {"int32", "il", 4}, INT64 = {"int64", "lq", 8};
static const ItemType UINT64 = {"uint64", "LQ", 8}, FLOAT64 = {"float64", "d", 8}, BFLOAT16 = {"bfloat16, as int16", "hH", 2};

static inline int buffer_is_of(const Py_buffer *view, const ItemType *type) {
    const char *format = view->format ? view->format : "B";
    if (strchr("@=<", *format)) format++;
    return view->itemsize == type->size && *format && !format[1] && strchr(type->codes, *format);
}

/* `view` of the whole of an argument that is called `name`, C-contiguous; the caller releases it. -1 with TypeError or ValueError set, and
 * nothing to release. */
static inline int buffer_take(Py_buffer *view, PyObject *object, const char *name, const ItemType *type, int written) {
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array of %s, not %.100s", name, type->name, Py_TYPE(object)->tp_name);
        return -1;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_FULL_RO)) return -1;
    if (!buffer_is_of(view, type))
        PyErr_Format(PyExc_TypeError, "%s must be an array of %s, not of format '%s'", name, type->name, view->format ? view->format : "B");
    else if (!PyBuffer_IsContiguous(view, 'C'))
        PyErr_Format(PyExc_ValueError, "%s must lie in one piece, row after row", name);
    else if (written && view->readonly)
        PyErr_Format(PyExc_ValueError, "%s must be writable", name);
    else
        return 0;
    PyBuffer_Release(view);
    return -1;
}
