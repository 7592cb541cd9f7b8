/* messenger._native.Lanes: what Python sees of lanes. */
#include "../../springtide/native/buffers.h"
#include "lanes.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

static PyObject *submit(Lanes *self, PyObject *arguments) {
    Batch *batch;
    int write, ended = 0;
    if (!PyArg_ParseTuple(arguments, "O!p", &Batch_Type, &batch, &write)) return NULL;
    if (batch->op || batch->local_bytes > self->memory.len)
        return PyErr_Format(PyExc_ValueError, "the batch was used before, or is of another region than these lanes");
    batch->op = write ? OP_WRITE : OP_READ;
    pthread_mutex_lock(&self->lock);
    if (self->lost) {
        batch->outcome = OUTCOME_LOST;
        batch->done = ended = 1;
    } else {
        ended = lanes_begin(self, batch);
    }
    if (!ended) Py_INCREF(batch); /* until it is reaped */
    pthread_mutex_unlock(&self->lock);
    return PyBool_FromLong(ended);
}

static PyObject *stop(Lanes *self, PyObject *argument) {
    Batch *batch = (Batch *)argument;
    if (!PyObject_TypeCheck(argument, &Batch_Type)) return PyErr_Format(PyExc_TypeError, "not a SliceBatch");
    pthread_mutex_lock(&self->lock);
    lanes_stop_batch(self, batch);
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *interrupt(Lanes *self, PyObject *argument) {
    Batch *batch = (Batch *)argument;
    if (!PyObject_TypeCheck(argument, &Batch_Type)) return PyErr_Format(PyExc_TypeError, "not a SliceBatch");
    pthread_mutex_lock(&self->lock);
    lanes_interrupt_batch(self, batch);
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

/* ---- making, reaping, closing ---- */

static void free_lane(Lane *lane) {
    pthread_join(lane->thread, NULL);
    pthread_cond_destroy(&lane->wake);
    close(lane->alarm);
    PyMem_RawFree(lane);
}

static PyObject *attach(Lanes *self, PyObject *arguments) {
    int fd, express;
    if (!PyArg_ParseTuple(arguments, "ip", &fd, &express)) return NULL;
    Lane *lane = PyMem_RawCalloc(1, sizeof(Lane));
    if (!lane) return PyErr_SetFromErrno(PyExc_OSError);
    lane->lanes = self;
    lane->fd = fd;
    lane->express = express;
    lane->alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_cond_init(&lane->wake, NULL);
    pthread_mutex_lock(&self->lock);
    int error = lane->alarm < 0 ? errno : self->lost ? ECONNABORTED : self->num_lanes == MAX_LANES ? EMFILE : 0;
    if (!error) error = start_thread(&lane->thread, lane_main, lane);
    if (!error) {
        self->lanes[self->num_lanes++] = lane;
        if (!express) self->num_bulk++;
    }
    pthread_mutex_unlock(&self->lock);
    if (!error) Py_RETURN_NONE;
    if (lane->alarm >= 0) close(lane->alarm);
    pthread_cond_destroy(&lane->wake);
    PyMem_RawFree(lane);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Takes a lane whose thread is at its end out of the set; NULL when there is none. */
static Lane *take_ended(Lanes *self) {
    Lane *found = NULL;
    pthread_mutex_lock(&self->lock);
    for (int i = 0; i < self->num_lanes && !found; i++) {
        if (!self->lanes[i]->ended) continue;
        found = self->lanes[i];
        self->lanes[i] = self->lanes[--self->num_lanes];
        if (!found->express) self->num_bulk--;
    }
    pthread_mutex_unlock(&self->lock);
    return found;
}

static Batch *take_finished(Lanes *self) {
    pthread_mutex_lock(&self->lock);
    Batch *batch = self->finished;
    if (batch) self->finished = batch->next;
    pthread_mutex_unlock(&self->lock);
    return batch;
}

static PyObject *reap(Lanes *self, PyObject *unused) {
    (void)unused;
    uint64_t count;
    if (read(self->signal, &count, sizeof count) < 0 && errno != EAGAIN) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *batches = PyList_New(0), *files = PyList_New(0);
    Batch *batch;
    Lane *lane;
    int failed = !batches || !files;
    while (!failed && (batch = take_finished(self))) {
        failed = PyList_Append(batches, (PyObject *)batch) < 0;
        Py_DECREF(batch);
    }
    while (!failed && (lane = take_ended(self))) {
        PyObject *fd = PyLong_FromLong(lane->fd);
        free_lane(lane);
        failed = !fd || PyList_Append(files, fd) < 0;
        Py_XDECREF(fd);
    }
    if (failed) {
        Py_XDECREF(batches);
        Py_XDECREF(files);
        return NULL;
    }
    pthread_mutex_lock(&self->lock);
    int lost = self->lost; /* after which the reason does not change */
    pthread_mutex_unlock(&self->lock);
    return Py_BuildValue("NNz", batches, files, lost ? self->reason : NULL);
}

/* After it no thread of these lanes runs; what they still held has finished as lost. Idempotent. */
static void end_all(Lanes *self) {
    pthread_mutex_lock(&self->lock);
    lanes_lose(self, "the lanes were closed");
    pthread_mutex_unlock(&self->lock);
    while (self->num_lanes) free_lane(self->lanes[--self->num_lanes]);
    self->num_bulk = 0;
    if (self->memory.obj) PyBuffer_Release(&self->memory);
}

static PyObject *lose_all(Lanes *self, PyObject *argument) {
    const char *reason = PyUnicode_AsUTF8(argument);
    if (!reason) return NULL;
    pthread_mutex_lock(&self->lock);
    lanes_lose(self, reason);
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *close_all(Lanes *self, PyObject *unused) {
    (void)unused;
    end_all(self);
    Py_RETURN_NONE;
}

static PyObject *get_fileno(Lanes *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(self->signal);
}

static PyObject *lanes_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    PyObject *memory;
    double silence_s;
    int checksums;
    if (!PyArg_ParseTuple(arguments, "Odp", &memory, &silence_s, &checksums)) return NULL;
    Lanes *self = (Lanes *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    pthread_mutex_init(&self->lock, NULL);
    self->signal = -1;
    self->silence_ns = (uint64_t)(silence_s * 1e9);
    self->checksums = checksums;
    if (buffer_take(&self->memory, memory, "memory", &BYTES, 1) == 0) {
        self->signal = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (self->signal >= 0) return (PyObject *)self;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_DECREF(self);
    return NULL;
}

static void lanes_dealloc(Lanes *self) {
    Batch *batch;
    end_all(self);
    while ((batch = take_finished(self))) Py_DECREF(batch);
    if (self->signal >= 0) close(self->signal);
    pthread_mutex_destroy(&self->lock);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"attach", (PyCFunction)attach, METH_VARARGS, NULL}, {"submit", (PyCFunction)submit, METH_VARARGS, NULL},
    {"stop", (PyCFunction)stop, METH_O, NULL},           {"interrupt", (PyCFunction)interrupt, METH_O, NULL},
    {"reap", (PyCFunction)reap, METH_NOARGS, NULL},      {"lose", (PyCFunction)lose_all, METH_O, NULL},
    {"close", (PyCFunction)close_all, METH_NOARGS, NULL}, {"fileno", (PyCFunction)get_fileno, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject Lanes_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "messenger._native.Lanes",
    .tp_basicsize = sizeof(Lanes),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = lanes_new,
    .tp_dealloc = (destructor)lanes_dealloc,
    .tp_methods = methods,
};
