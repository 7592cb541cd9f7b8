/* A batch: its slices read, checked and joined once; and the copy between two mapped regions. */
#include "../../springtide/native/buffers.h"
#include "native.h"

#include <string.h>

enum { COPY_BYTES = 1 << 20 }; /* between two looks at the fence */

static PyObject *name_local, *name_remote, *name_length, *name_generation;

static int read_signed(PyObject *slice, PyObject *name, int64_t *value) {
    PyObject *number = PyObject_GetAttr(slice, name);
    if (!number) return -1;
    *value = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

static int read_slice(PyObject *slice, int64_t *local, int64_t *remote, int64_t *length, uint64_t *generation) {
    if (read_signed(slice, name_local, local) || read_signed(slice, name_remote, remote) || read_signed(slice, name_length, length)) return -1;
    PyObject *given = PyObject_GetAttr(slice, name_generation);
    PyObject *number = given ? PyNumber_Index(given) : NULL; /* an integer of numpy's, for example */
    Py_XDECREF(given);
    if (!number) return -1;
    *generation = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *generation == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int joins(const Run *run, uint64_t local, uint64_t remote, uint64_t generation, uint64_t granule) {
    return run->local + run->length == local && run->remote + run->length == remote && run->generation == generation && remote % granule;
}

static int add_slice(Batch *self, Py_ssize_t index, PyObject *slice) {
    int64_t local, remote, length;
    uint64_t generation;
    if (read_slice(slice, &local, &remote, &length, &generation)) return -1;
    int64_t granule = (int64_t)self->granule;
    if (length < 1 || local < 0 || local > self->local_bytes - length || remote < 0 || remote > self->remote_bytes - length ||
        remote % granule > granule - length) {
        PyErr_Format(PyExc_ValueError, "slice %zd is out of bounds", index);
        return -1;
    }
    Run *last = self->num_runs ? &self->runs[self->num_runs - 1] : NULL;
    if (last && joins(last, (uint64_t)local, (uint64_t)remote, generation, self->granule))
        last->length += (uint64_t)length;
    else
        self->runs[self->num_runs++] = (Run){(uint64_t)local, (uint64_t)remote, (uint64_t)length, generation, index, VERDICT_DONE};
    self->num_bytes += (uint64_t)length;
    return 0;
}

static PyObject *batch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *slices;
    Py_ssize_t local_bytes, remote_bytes, granule;
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "Onnn", &slices, &local_bytes, &remote_bytes, &granule)) return NULL;
    if (granule < 1) return PyErr_Format(PyExc_ValueError, "a granule has at least 1 byte, not %zd", granule);
    PyObject *sequence = PySequence_Fast(slices, "a batch is a sequence of slices");
    if (!sequence) return NULL;
    Batch *self = (Batch *)type->tp_alloc(type, 0);
    if (!self) goto fail;
    self->granule = (uint64_t)granule;
    self->local_bytes = local_bytes;
    self->remote_bytes = remote_bytes;
    self->num_slices = PySequence_Fast_GET_SIZE(sequence);
    self->runs = PyMem_New(Run, self->num_slices ? self->num_slices : 1);
    if (!self->runs) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < self->num_slices; i++)
        if (add_slice(self, i, PySequence_Fast_GET_ITEM(sequence, i))) goto fail;
    self->remaining = self->num_bytes;
    Py_DECREF(sequence);
    return (PyObject *)self;
fail:
    Py_DECREF(sequence);
    Py_XDECREF(self);
    return NULL;
}

static void batch_dealloc(Batch *self) {
    PyMem_Free(self->runs);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *batch_failed(Batch *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found && i < self->num_runs; i++) {
        uint8_t verdict = __atomic_load_n(&self->runs[i].verdict, __ATOMIC_RELAXED);
        if (verdict == VERDICT_DONE) continue;
        Py_ssize_t end = i + 1 < self->num_runs ? self->runs[i + 1].first_slice : self->num_slices;
        for (Py_ssize_t slice = self->runs[i].first_slice; slice < end; slice++) {
            PyObject *pair = Py_BuildValue("ni", slice, (int)verdict);
            if (!pair || PyList_Append(found, pair)) Py_CLEAR(found);
            Py_XDECREF(pair);
            if (!found) return NULL;
        }
    }
    return found;
}

static int is_stale(const uint64_t *generations, uint64_t granule, const Run *run) {
    return __atomic_load_n(&generations[run->remote / granule], __ATOMIC_ACQUIRE) != run->generation;
}

/* Bytes [begin, end) of the run. What turns stale meanwhile is marked: of a read nothing is to be used, and of a write the owner was to
 * fence this process first. */
static void copy_run(Batch *self, Run *run, char *local, char *remote, const uint64_t *generations, int write, uint64_t begin, uint64_t end) {
    while (begin < end && !__atomic_load_n(&self->interrupted, __ATOMIC_RELAXED)) {
        uint64_t length = end - begin < COPY_BYTES ? end - begin : COPY_BYTES;
        if (__atomic_load_n(&run->verdict, __ATOMIC_RELAXED) || is_stale(generations, self->granule, run)) {
            run_judge(run, VERDICT_STALE);
            return;
        }
        char *here = local + run->local + begin, *there = remote + run->remote + begin;
        memcpy(write ? there : here, write ? here : there, length);
        __atomic_thread_fence(__ATOMIC_ACQ_REL);
        if (is_stale(generations, self->granule, run)) run_judge(run, VERDICT_STALE);
        begin += length;
    }
}

static void copy_share(Batch *self, char *local, char *remote, const uint64_t *generations, int write, uint64_t begin, uint64_t end) {
    uint64_t start = 0;
    for (size_t i = 0; i < self->num_runs && start < end; start += self->runs[i++].length) {
        Run *run = &self->runs[i];
        if (start + run->length <= begin) continue;
        uint64_t from = begin > start ? begin - start : 0, to = end - start < run->length ? end - start : run->length;
        copy_run(self, run, local, remote, generations, write, from, to);
    }
}

static PyObject *batch_copy(Batch *self, PyObject *arguments) {
    PyObject *local_o, *remote_o, *generations_o;
    Py_buffer local, remote, generations;
    int write;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(arguments, "OOOpnn", &local_o, &remote_o, &generations_o, &write, &begin, &end)) return NULL;
    if (buffer_take(&local, local_o, "local", &BYTES, 1)) return NULL;
    if (buffer_take(&remote, remote_o, "remote", &BYTES, 1)) {
        PyBuffer_Release(&local);
        return NULL;
    }
    if (buffer_take(&generations, generations_o, "generations", &UINT64, 0)) {
        PyBuffer_Release(&local);
        PyBuffer_Release(&remote);
        return NULL;
    }
    int fits = local.len >= self->local_bytes && remote.len >= self->remote_bytes && begin >= 0 && begin <= end &&
               generations.len >= (Py_ssize_t)sizeof(uint64_t) * (self->remote_bytes / (Py_ssize_t)self->granule);
    Py_BEGIN_ALLOW_THREADS
    if (fits) copy_share(self, local.buf, remote.buf, generations.buf, write, (uint64_t)begin, (uint64_t)end);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&local);
    PyBuffer_Release(&remote);
    PyBuffer_Release(&generations);
    if (!fits) return PyErr_Format(PyExc_ValueError, "the batch was checked against other regions than these");
    Py_RETURN_NONE;
}

static PyObject *batch_stop(Batch *self, PyObject *unused) {
    (void)unused;
    __atomic_store_n(&self->interrupted, 1, __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static PyObject *batch_num_bytes(Batch *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->num_bytes);
}

static PyObject *batch_outcome(Batch *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(self->outcome);
}

static PyMethodDef batch_methods[] = {
    {"failed", (PyCFunction)batch_failed, METH_NOARGS, NULL},
    {"copy", (PyCFunction)batch_copy, METH_VARARGS, NULL},
    {"stop", (PyCFunction)batch_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef batch_getters[] = {
    {"num_bytes", (getter)batch_num_bytes, NULL, NULL, NULL},
    {"outcome", (getter)batch_outcome, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject Batch_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "messenger._native.SliceBatch",
    .tp_basicsize = sizeof(Batch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = batch_new,
    .tp_dealloc = (destructor)batch_dealloc,
    .tp_methods = batch_methods,
    .tp_getset = batch_getters,
};

int batch_init(void) {
    name_local = PyUnicode_InternFromString("local_offset");
    name_remote = PyUnicode_InternFromString("remote_offset");
    name_length = PyUnicode_InternFromString("length");
    name_generation = PyUnicode_InternFromString("generation");
    return name_local && name_remote && name_length && name_generation ? 0 : -1;
}
