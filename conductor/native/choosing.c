/* Which rows are chosen: conductor/_native.pyi says what arguments and results mean. */
#include "arrays.h"

typedef struct {
    const double *floats; /* or NULL, and ... */
    const int64_t *ints;
    Py_ssize_t count;
    int sign; /* 1 for the least, -1 for the greatest */
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

/* Positive where the value at `row` goes before that at `best`; 0 where they are equal. */
static inline int beats(const Column *column, int64_t row, int64_t best) {
    if (column->floats) {
        double own = column->floats[row], other = column->floats[best];
        return own < other ? column->sign : own > other ? -column->sign : 0;
    }
    int64_t own = column->ints[row], other = column->ints[best];
    return own < other ? column->sign : own > other ? -column->sign : 0;
}

PyObject *best_row(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    enum { BEFORE = 2, MOST_COLUMNS = MOST_BUFFERS - 1 };
    Py_ssize_t num_columns = num_args - BEFORE, num_signs = 0;
    if (num_columns < 1 || num_columns > MOST_COLUMNS)
        return PyErr_Format(PyExc_TypeError, "a row is chosen by 1 to %d columns, not %zd", MOST_COLUMNS, num_columns);
    const char *order = PyUnicode_AsUTF8AndSize(args[1], &num_signs);
    if (!order) return NULL;
    if (num_signs != num_columns || strspn(order, "<>") != (size_t)num_signs)
        return PyErr_Format(PyExc_ValueError, "order is a < or a > for each of %zd columns, not '%.100s'", num_columns, order);
    Buffers buffers = {.count = 0};
    PyObject *found = NULL;
    const int64_t *rows = int64s(&buffers, args[0], "rows", 1, 0);
    if (!rows) goto end;
    Py_ssize_t count = items(&buffers), fewest = PY_SSIZE_T_MAX;
    Column columns[MOST_COLUMNS];
    for (Py_ssize_t i = 0; i < num_columns; i++) {
        if (take_column(&buffers, args[BEFORE + i], &columns[i])) goto end;
        columns[i].sign = order[i] == '<' ? 1 : -1;
        if (columns[i].count < fewest) fewest = columns[i].count;
    }
    int64_t best = rows[0];
    if (!is_within(best, fewest)) goto end;
    for (Py_ssize_t i = 1; i < count; i++) {
        if (!is_within(rows[i], fewest)) goto end;
        int better = 0;
        for (Py_ssize_t j = 0; !better && j < num_columns; j++) better = beats(&columns[j], rows[i], best);
        if (better > 0) best = rows[i];
    }
    found = PyLong_FromLongLong(best);
end:
    release(&buffers);
    return found;
}

PyObject *rows_from(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *column_o, *into_o, *found = NULL;
    long long least;
    if (!PyArg_ParseTuple(args, "OLO", &column_o, &least, &into_o)) return NULL;
    Buffers buffers = {.count = 0};
    const int64_t *column = int64s(&buffers, column_o, "column", 0, 0);
    if (!column) goto end;
    Py_ssize_t count = items(&buffers), kept = 0;
    int64_t *into = int64s(&buffers, into_o, "into", count, 1);
    if (!into) goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        into[kept] = i;
        kept += column[i] >= least;
    }
    found = PyLong_FromSsize_t(kept);
end:
    release(&buffers);
    return found;
}

PyObject *roomy_rows(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *rows_o, *batch_o, *max_batch_o, *slots_free_o, *into_o, *found = NULL;
    long long least_free;
    if (!PyArg_ParseTuple(args, "OOOOLO", &rows_o, &batch_o, &max_batch_o, &slots_free_o, &least_free, &into_o)) return NULL;
    Buffers buffers = {.count = 0};
    const int64_t *batch = int64s(&buffers, batch_o, "batch", 0, 0);
    if (!batch) goto end;
    Py_ssize_t num_instances = items(&buffers);
    const int64_t *max_batch = int64s(&buffers, max_batch_o, "max_batch", num_instances, 0);
    const int64_t *slots_free = max_batch ? int64s(&buffers, slots_free_o, "slots_free", num_instances, 0) : NULL;
    const int64_t *rows = slots_free ? int64s(&buffers, rows_o, "rows", 0, 0) : NULL;
    if (!rows) goto end;
    Py_ssize_t count = items(&buffers), kept = 0;
    int64_t *into = int64s(&buffers, into_o, "into", count, 1);
    if (!into) goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row = rows[i];
        if (!is_within(row, num_instances)) goto end;
        into[kept] = row;
        kept += (max_batch[row] <= 0) | (batch[row] <= max_batch[row]) && slots_free[row] >= least_free;
    }
    found = PyLong_FromSsize_t(kept);
end:
    release(&buffers);
    return found;
}

/* The bits of a mask that were found least so far, the least first, and their amounts. */
typedef struct {
    Py_ssize_t *bits;
    int64_t *amounts;
    Py_ssize_t count, most;
} Least;

static void keep_if_less(Least *least, Py_ssize_t bit, int64_t amount) {
    if (least->count == least->most && (!least->most || amount >= least->amounts[least->count - 1])) return;
    Py_ssize_t at = least->count < least->most ? least->count++ : least->count - 1;
    for (; at && least->amounts[at - 1] > amount; at--) least->bits[at] = least->bits[at - 1], least->amounts[at] = least->amounts[at - 1];
    least->bits[at] = bit;
    least->amounts[at] = amount;
}

PyObject *least_busy(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *mask_o, *node_of_bit_o, *links_o, *found = NULL;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "SOOn", &mask_o, &node_of_bit_o, &links_o, &most)) return NULL;
    enum { MOST_FOUND = 64 };
    if (most < 0 || most > MOST_FOUND) return PyErr_Format(PyExc_ValueError, "%zd bits are asked for; there may be %d", most, MOST_FOUND);
    const unsigned char *mask = (const unsigned char *)PyBytes_AS_STRING(mask_o);
    Py_ssize_t length = PyBytes_GET_SIZE(mask_o);
    Py_ssize_t bits[MOST_FOUND];
    int64_t amounts[MOST_FOUND];
    Least least = {bits, amounts, 0, most};
    Buffers buffers = {.count = 0};
    const int64_t *node_of_bit = int64s(&buffers, node_of_bit_o, "node_of_bit", 0, 0);
    if (!node_of_bit) goto end;
    Py_ssize_t num_bits = items(&buffers);
    const LinkEnd *links = array(&buffers, links_o, "links", &LINK_END, 0, 0);
    if (!links) goto end;
    Py_ssize_t num_nodes = items(&buffers);
    for (Py_ssize_t byte = 0; byte < length; byte++) {
        for (unsigned left = mask[byte]; left; left &= left - 1) {
            Py_ssize_t bit = 8 * byte + __builtin_ctz(left);
            if (!is_within(bit, num_bits) || !is_within(node_of_bit[bit], num_nodes)) goto end;
            keep_if_less(&least, bit, links[node_of_bit[bit]].leaving);
        }
    }
    found = PyList_New(least.count);
    for (Py_ssize_t i = 0; found && i < least.count; i++) {
        PyObject *bit = PyLong_FromSsize_t(bits[i]);
        if (bit)
            PyList_SET_ITEM(found, i, bit);
        else
            Py_CLEAR(found);
    }
end:
    release(&buffers);
    return found;
}
