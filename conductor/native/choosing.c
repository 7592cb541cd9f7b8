/* Which of some rows are least or greatest in a column: conductor/_native.pyi says what arguments and results mean. */
#include "arrays.h"

typedef struct {
    const double *floats; /* or NULL, and ... */
    const int64_t *ints;
    Py_ssize_t count;
} Column;

/* -1 with an error set. */
static int take_column(Buffers *buffers, PyObject *object, Column *column) {
    Py_buffer *view = &buffers->held[buffers->count];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return -1;
    buffers->count++;
    int is_int = buffer_is_of(view, &INT64);
    if (!is_int && !buffer_is_of(view, &FLOAT64)) {
        PyErr_Format(PyExc_TypeError, "column must be an array of int64 or float64, not of format '%.100s'", buffer_format(view));
        return -1;
    }
    column->floats = is_int ? NULL : view->buf;
    column->ints = view->buf;
    column->count = items(buffers);
    return 0;
}

/* Positive where the value at `row` goes before that at `best`; 0 where they are equal. `sign` is 1 for the least, -1 for the greatest. */
static int beats(const Column *column, int64_t row, int64_t best, int sign) {
    if (column->floats) return sign * ((column->floats[row] < column->floats[best]) - (column->floats[row] > column->floats[best]));
    return sign * ((column->ints[row] < column->ints[best]) - (column->ints[row] > column->ints[best]));
}

static PyObject *extremes(PyObject *args, int sign) {
    PyObject *rows_o, *column_o, *into_o, *found = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &rows_o, &column_o, &into_o)) return NULL;
    Buffers buffers = {.count = 0};
    const int64_t *rows = int64s(&buffers, rows_o, "rows", 1, 0);
    if (!rows) goto end;
    Py_ssize_t count = items(&buffers), kept = 0;
    Column column;
    if (take_column(&buffers, column_o, &column)) goto end;
    int64_t *into = int64s(&buffers, into_o, "into", count, 1);
    if (!into) goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!is_within(rows[i], column.count)) goto end;
        int better = kept ? beats(&column, rows[i], into[0], sign) : 1;
        if (better > 0) kept = 0;
        if (better >= 0) into[kept++] = rows[i];
    }
    found = PyLong_FromSsize_t(kept);
end:
    release(&buffers);
    return found;
}

PyObject *least_rows(PyObject *Py_UNUSED(module), PyObject *args) { return extremes(args, 1); }

PyObject *most_rows(PyObject *Py_UNUSED(module), PyObject *args) { return extremes(args, -1); }
