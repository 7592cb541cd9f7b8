/* Memory that Python lends: taken only where its items are of the type that the caller will read and write, whatever their size. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "formats that begin with '<' are taken for the machine's own: little-endian machines only"
#endif

/* `codes` of the struct module stand for a type here: `long` and `long long` are one. Of a struct it is the whole format (PEP 3118), in
 * `fields`, that says what it is: "T{l:place:d:length:}". */
typedef struct {
    const char *name, *codes;
    Py_ssize_t size;
    const char *fields;
} ItemType;

static const ItemType BYTES = {"bytes", "Bbc", 1, NULL}, INT32 = {"int32", "il", 4, NULL}, INT64 = {"int64", "lq", 8, NULL};
static const ItemType UINT64 = {"uint64", "LQ", 8, NULL}, FLOAT64 = {"float64", "d", 8, NULL};
static const ItemType BFLOAT16 = {"bfloat16, as int16", "hH", 2, NULL};

static inline const char *buffer_format(const Py_buffer *view) { return view->format ? view->format : "B"; }

static inline int buffer_is_of(const Py_buffer *view, const ItemType *type) {
    const char *format = buffer_format(view);
    if (view->itemsize != type->size) return 0;
    if (type->fields) return !strcmp(format, type->fields);
    if (strchr("@=<", *format)) format++;
    return *format && !format[1] && strchr(type->codes, *format);
}

/* The length of the field "l:place:" with which the rest of a struct's format begins; 0 at the end. */
static inline size_t buffer_field(const char *rest) {
    const char *name = strchr(rest, ':'), *end = name ? strchr(name + 1, ':') : NULL;
    return end ? (size_t)(end - rest) + 1 : 0;
}

/* As "place (l)". */
static inline void buffer_name_field(char *text, size_t room, const char *rest) {
    size_t length = buffer_field(rest);
    const char *name = strchr(rest, ':');
    if (length)
        snprintf(text, room, "%.*s (%.*s)", (int)(rest + length - name) - 2, name + 1, (int)(name - rest), rest);
    else
        snprintf(text, room, "nothing");
}

/* TypeError: `name` is of another type, of structs which field it is. */
static inline void buffer_refuse(const char *name, const ItemType *type, const char *format) {
    if (!type->fields || strncmp(format, "T{", 2)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array of %s, not of format '%.100s'", name, type->name, format);
        return;
    }
    const char *wanted = type->fields + 2, *given = format + 2;
    int field = 1;
    for (size_t length; (length = buffer_field(wanted)) && !strncmp(wanted, given, length); field++) wanted += length, given += length;
    char of_wanted[100], of_given[100];
    buffer_name_field(of_wanted, sizeof of_wanted, wanted);
    buffer_name_field(of_given, sizeof of_given, given);
    PyErr_Format(PyExc_TypeError, "%s must be an array of %s: field %d is %s, not %s", name, type->name, field, of_wanted, of_given);
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
        buffer_refuse(name, type, buffer_format(view));
    else if (!PyBuffer_IsContiguous(view, 'C'))
        PyErr_Format(PyExc_ValueError, "%s must lie in one piece, row after row", name);
    else if (written && view->readonly)
        PyErr_Format(PyExc_ValueError, "%s must be writable", name);
    else
        return 0;
    PyBuffer_Release(view);
    return -1;
}
