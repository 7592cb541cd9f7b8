/* BlockHeap: a binary heap in which each block knows its place, so that a block can leave from the middle and nothing stale stays behind. */
#include "native.h"

typedef struct {
    double value;
    Block *block; /* a reference */
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;
    size_t count, room;
    unsigned lane;
} BlockHeap;

static int precedes(const Entry *a, const Entry *b) {
    return a->value < b->value || (a->value == b->value && a->block->last_used < b->block->last_used);
}

static void set(BlockHeap *self, size_t place, Entry entry) {
    self->entries[place] = entry;
    entry.block->places[self->lane] = (unsigned)place;
}

static void sift_up(BlockHeap *self, size_t place, Entry entry) {
    for (; place; place = (place - 1) / 2) {
        Entry *above = &self->entries[(place - 1) / 2];
        if (!precedes(&entry, above)) break;
        set(self, place, *above);
    }
    set(self, place, entry);
}

static void sift_down(BlockHeap *self, size_t place, Entry entry) {
    for (size_t below; (below = 2 * place + 1) < self->count; place = below) {
        if (below + 1 < self->count && precedes(&self->entries[below + 1], &self->entries[below])) below++;
        if (!precedes(&self->entries[below], &entry)) break;
        set(self, place, self->entries[below]);
    }
    set(self, place, entry);
}

static int holds(const BlockHeap *self, const Block *block) {
    unsigned place = block->places[self->lane];
    return place < self->count && self->entries[place].block == block;
}

/* The reference becomes the caller's. */
static Block *take(BlockHeap *self, size_t place) {
    Block *block = self->entries[place].block;
    Entry last = self->entries[--self->count];
    if (place < self->count) {
        if (place && precedes(&last, &self->entries[(place - 1) / 2]))
            sift_up(self, place, last);
        else
            sift_down(self, place, last);
    }
    return block;
}

static PyObject *heap_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"lane", NULL};
    unsigned lane;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I", names, &lane)) return NULL;
    if (lane >= HEAPS) return PyErr_Format(PyExc_ValueError, "lane must be less than %d, not %u", HEAPS, lane);
    BlockHeap *self = (BlockHeap *)type->tp_alloc(type, 0);
    if (self) self->lane = lane;
    return (PyObject *)self;
}

static void heap_dealloc(BlockHeap *self) {
    for (size_t i = 0; i < self->count; i++) Py_DECREF(self->entries[i].block);
    PyMem_RawFree(self->entries);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *heap_push(BlockHeap *self, PyObject *args) {
    Block *block;
    double value;
    if (!PyArg_ParseTuple(args, "O!d", &Block_Type, &block, &value)) return NULL;
    if (holds(self, block)) return PyErr_Format(PyExc_ValueError, "%R is in the heap", block);
    if (self->count == self->room) {
        size_t room = self->room ? self->room + self->room / 2 : 16;
        Entry *entries = room > UINT32_MAX ? NULL : PyMem_RawRealloc(self->entries, room * sizeof *entries);
        if (!entries) return PyErr_NoMemory();
        self->entries = entries;
        self->room = room;
    }
    Py_INCREF(block);
    sift_up(self, self->count++, (Entry){value, block});
    Py_RETURN_NONE;
}

static PyObject *heap_discard(BlockHeap *self, PyObject *object) {
    if (Py_IS_TYPE(object, &Block_Type) && holds(self, (Block *)object)) Py_DECREF(take(self, ((Block *)object)->places[self->lane]));
    Py_RETURN_NONE;
}

static PyObject *heap_peek(BlockHeap *self, PyObject *unused) {
    (void)unused;
    return Py_NewRef(self->count ? (PyObject *)self->entries[0].block : Py_None);
}

static PyObject *heap_pop(BlockHeap *self, PyObject *unused) {
    (void)unused;
    if (!self->count) {
        PyErr_SetString(PyExc_IndexError, "pop from an empty heap");
        return NULL;
    }
    return (PyObject *)take(self, 0);
}

static Py_ssize_t heap_length(BlockHeap *self) { return (Py_ssize_t)self->count; }

static int heap_contains(BlockHeap *self, PyObject *object) { return Py_IS_TYPE(object, &Block_Type) && holds(self, (Block *)object); }

static PyMethodDef methods[] = {
    {"push", (PyCFunction)heap_push, METH_VARARGS, NULL},
    {"discard", (PyCFunction)heap_discard, METH_O, NULL},
    {"peek", (PyCFunction)heap_peek, METH_NOARGS, NULL},
    {"pop", (PyCFunction)heap_pop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = (lenfunc)heap_length, .sq_contains = (objobjproc)heap_contains};

PyTypeObject BlockHeap_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore._native.BlockHeap",
    .tp_basicsize = sizeof(BlockHeap),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = heap_new,
    .tp_dealloc = (destructor)heap_dealloc,
    .tp_methods = methods,
    .tp_as_sequence = &as_sequence,
};
