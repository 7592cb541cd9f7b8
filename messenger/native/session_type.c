/* messenger._native.LaneSession: what Python sees of sessions; and the list of all that run, for `settle`. */
#include "../../springtide/native/buffers.h"
#include "session.h"

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>

static pthread_mutex_t sessions_lock = PTHREAD_MUTEX_INITIALIZER;
static Session *sessions;

static void await_section(Session *self) {
    uint64_t seen = __atomic_load_n(&self->section, __ATOMIC_SEQ_CST);
    while (seen & 1 && __atomic_load_n(&self->section, __ATOMIC_ACQUIRE) == seen) sched_yield();
}

PyObject *sessions_settle(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&sessions_lock);
    for (Session *session = sessions; session; session = session->next) await_section(session);
    pthread_mutex_unlock(&sessions_lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void enlist(Session *self) {
    pthread_mutex_lock(&sessions_lock);
    self->next = sessions;
    sessions = self;
    pthread_mutex_unlock(&sessions_lock);
}

static void delist(Session *self) {
    pthread_mutex_lock(&sessions_lock);
    for (Session **at = &sessions; *at; at = &(*at)->next)
        if (*at == self) {
            *at = self->next;
            break;
        }
    pthread_mutex_unlock(&sessions_lock);
}

static void abort_session(Session *self) {
    __atomic_store_n(&self->aborted, 1, __ATOMIC_SEQ_CST);
    if (self->running) shutdown(self->fd, SHUT_RDWR);
}

static void join_session(Session *self) {
    if (self->running) {
        pthread_join(self->thread, NULL);
        self->running = 0;
        delist(self);
    }
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    if (self->generations.obj) PyBuffer_Release(&self->generations);
    PyMem_RawFree(self->discarded);
    self->discarded = NULL;
}

static PyObject *session_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    PyObject *memory, *generations;
    int fd, signal, checksums;
    Py_ssize_t granule;
    if (!PyArg_ParseTuple(arguments, "iOOnip", &fd, &memory, &generations, &granule, &signal, &checksums)) return NULL;
    Session *self = (Session *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->fd = fd;
    self->signal = signal;
    self->granule = (uint64_t)granule;
    self->checksums = checksums;
    if (buffer_take(&self->memory, memory, "memory", &BYTES, 1) || buffer_take(&self->generations, generations, "generations", &UINT64, 0))
        goto fail;
    if (granule < 1 || self->generations.len / (Py_ssize_t)sizeof(uint64_t) != self->memory.len / granule) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of generations do not fit a region of %zd bytes in granules of %zd", self->generations.len,
                     self->memory.len, granule);
        goto fail;
    }
    enlist(self);
    int error = start_thread(&self->thread, session_main, self);
    if (!error) {
        self->running = 1;
        return (PyObject *)self;
    }
    delist(self);
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
fail:
    Py_DECREF(self);
    return NULL;
}

static void session_dealloc(Session *self) {
    abort_session(self);
    join_session(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *session_abort(Session *self, PyObject *unused) {
    (void)unused;
    abort_session(self);
    Py_RETURN_NONE;
}

static PyObject *session_join(Session *self, PyObject *unused) {
    (void)unused;
    join_session(self);
    Py_RETURN_NONE;
}

static PyObject *session_ended(Session *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(__atomic_load_n(&self->ended, __ATOMIC_ACQUIRE));
}

static PyObject *session_complaint(Session *self, void *unused) {
    (void)unused;
    if (!__atomic_load_n(&self->ended, __ATOMIC_ACQUIRE) || !self->at_fault) Py_RETURN_NONE;
    return PyUnicode_FromString(self->complaint);
}

static PyObject *session_error(Session *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(__atomic_load_n(&self->ended, __ATOMIC_ACQUIRE) ? self->error : 0);
}

static PyMethodDef session_methods[] = {
    {"abort", (PyCFunction)session_abort, METH_NOARGS, NULL},
    {"join", (PyCFunction)session_join, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef session_getters[] = {
    {"ended", (getter)session_ended, NULL, NULL, NULL},
    {"complaint", (getter)session_complaint, NULL, NULL, NULL},
    {"error", (getter)session_error, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject Session_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "messenger._native.LaneSession",
    .tp_basicsize = sizeof(Session),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = session_new,
    .tp_dealloc = (destructor)session_dealloc,
    .tp_methods = session_methods,
    .tp_getset = session_getters,
};
