/* BlockTable: open addressing with linear probing. Beside each place stands one byte of its key's hash, so that a place that is somebody
 * else's is seldom looked at, and a batch of look-ups fetches memory for many keys at once. */
#include "native.h"

#include <string.h>

enum { BATCH = 32 };

typedef struct {
    PyObject_HEAD
    uint8_t *tags; /* 0: the place is free */
    Block **blocks;
    size_t mask; /* places less one */
    size_t count;
    uint64_t seed[2];
} BlockTable;

/* Keys come from other processes: the seed is random, so that nobody can choose keys that meet in one place. */
static uint64_t hash_of(const BlockTable *self, const uint64_t key[2]) {
    __uint128_t product = (__uint128_t)(key[0] ^ self->seed[0]) * (key[1] ^ self->seed[1] ^ (key[0] << 1));
    return (uint64_t)(product >> 64) ^ (uint64_t)product;
}

static uint8_t tag_of(uint64_t hash) { return (uint8_t)(hash >> 56) | 1; }

static int same_key(const Block *block, const uint64_t key[2]) { return block->key[0] == key[0] && block->key[1] == key[1]; }

/* The place of the key, or the free one where it would go. */
static size_t find(const BlockTable *self, const uint64_t key[2], uint64_t hash) {
    uint8_t tag = tag_of(hash);
    size_t place = hash & self->mask;
    while (self->tags[place] && !(self->tags[place] == tag && same_key(self->blocks[place], key))) place = (place + 1) & self->mask;
    return place;
}

static int make_places(BlockTable *self, size_t places) {
    uint8_t *tags = PyMem_RawCalloc(places, 1);
    Block **blocks = PyMem_RawCalloc(places, sizeof *blocks);
    if (!tags || !blocks) {
        PyMem_RawFree(tags);
        PyMem_RawFree(blocks);
        PyErr_NoMemory();
        return -1;
    }
    self->tags = tags;
    self->blocks = blocks;
    self->mask = places - 1;
    return 0;
}

static void put(BlockTable *self, Block *block, uint64_t hash) {
    size_t place = find(self, block->key, hash);
    self->tags[place] = tag_of(hash);
    self->blocks[place] = block;
}

static int grow(BlockTable *self) {
    uint8_t *tags = self->tags;
    Block **blocks = self->blocks;
    size_t places = self->mask + 1;
    if (make_places(self, 2 * places)) return -1;
    for (size_t i = 0; i < places; i++)
        if (tags[i]) put(self, blocks[i], hash_of(self, blocks[i]->key));
    PyMem_RawFree(tags);
    PyMem_RawFree(blocks);
    return 0;
}

static int random_seed(uint64_t seed[2]) {
    PyObject *os = PyImport_ImportModule("os");
    PyObject *bytes = os ? PyObject_CallMethod(os, "urandom", "i", 16) : NULL;
    Py_XDECREF(os);
    if (!bytes) return -1;
    memcpy(seed, PyBytes_AS_STRING(bytes), 16);
    Py_DECREF(bytes);
    return 0;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"capacity", NULL};
    Py_ssize_t capacity;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &capacity)) return NULL;
    if (capacity < 0 || capacity > PY_SSIZE_T_MAX / 64) {
        PyErr_Format(PyExc_ValueError, "capacity is a number of blocks, not %zd", capacity);
        return NULL;
    }
    BlockTable *self = (BlockTable *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    size_t places = 16;
    while (places - places / 4 < (size_t)capacity) places *= 2;
    if (random_seed(self->seed) || make_places(self, places)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void table_dealloc(BlockTable *self) {
    for (size_t i = 0; self->tags && i <= self->mask; i++)
        if (self->tags[i]) Py_DECREF(self->blocks[i]);
    PyMem_RawFree(self->tags);
    PyMem_RawFree(self->blocks);
    Py_TYPE(self)->tp_free(self);
}

static Py_ssize_t table_length(BlockTable *self) { return (Py_ssize_t)self->count; }

static PyObject *table_get(BlockTable *self, PyObject *object) {
    uint64_t key[2];
    if (key_from(object, key)) return NULL;
    size_t place = find(self, key, hash_of(self, key));
    return Py_NewRef(self->tags[place] ? (PyObject *)self->blocks[place] : Py_None);
}

static PyObject *table_add(BlockTable *self, PyObject *object) {
    if (!Py_IS_TYPE(object, &Block_Type)) return PyErr_Format(PyExc_TypeError, "add takes a Block, not %R", object);
    Block *block = (Block *)object;
    uint64_t hash = hash_of(self, block->key);
    if (self->tags[find(self, block->key, hash)]) return PyErr_Format(PyExc_KeyError, "%R: its key is there", object);
    if (self->count >= self->mask - self->mask / 4 && grow(self)) return NULL;
    put(self, (Block *)Py_NewRef(block), hash);
    self->count++;
    Py_RETURN_NONE;
}

/* Fills the gap with the next block that may stand there, and so on: no place is ever marked as deleted, look-ups never slow down. */
static PyObject *table_remove(BlockTable *self, PyObject *object) {
    if (!Py_IS_TYPE(object, &Block_Type)) return PyErr_Format(PyExc_TypeError, "remove takes a Block, not %R", object);
    Block *block = (Block *)object;
    size_t gap = find(self, block->key, hash_of(self, block->key));
    if (!self->tags[gap] || self->blocks[gap] != block) return PyErr_Format(PyExc_KeyError, "%R is not there", object);
    for (size_t next = (gap + 1) & self->mask; self->tags[next]; next = (next + 1) & self->mask) {
        size_t home = hash_of(self, self->blocks[next]->key) & self->mask;
        if (((next - home) & self->mask) < ((next - gap) & self->mask)) continue;
        self->tags[gap] = self->tags[next];
        self->blocks[gap] = self->blocks[next];
        gap = next;
    }
    self->tags[gap] = 0;
    self->count--;
    Py_DECREF(block);
    Py_RETURN_NONE;
}

/* One group of a look-up: the block of each key, or NULL. Each loop asks for the memory that the next one reads. */
static int find_group(const BlockTable *self, PyObject **keys, size_t count, Block **found) {
    uint64_t key[BATCH][2], hash[BATCH];
    for (size_t i = 0; i < count; i++) {
        if (key_from(keys[i], key[i])) return -1;
        hash[i] = hash_of(self, key[i]);
        __builtin_prefetch(&self->tags[hash[i] & self->mask]);
        __builtin_prefetch(&self->blocks[hash[i] & self->mask]);
    }
    for (size_t i = 0; i < count; i++) {
        size_t place = hash[i] & self->mask;
        while (self->tags[place] && self->tags[place] != tag_of(hash[i])) place = (place + 1) & self->mask;
        if (self->tags[place]) __builtin_prefetch(self->blocks[place]);
    }
    for (size_t i = 0; i < count; i++) {
        size_t place = find(self, key[i], hash[i]);
        found[i] = self->tags[place] ? self->blocks[place] : NULL;
    }
    return 0;
}

static PyObject *table_match(BlockTable *self, PyObject *argument) {
    PyObject *keys = PySequence_Fast(argument, "match takes a sequence of keys");
    PyObject *list = keys ? PyList_New(0) : NULL;
    if (!list) goto failed;
    Block *parent = NULL;
    Py_ssize_t total = PySequence_Fast_GET_SIZE(keys);
    for (Py_ssize_t begin = 0; begin < total; begin += BATCH) {
        Block *found[BATCH];
        size_t count = (size_t)(total - begin < BATCH ? total - begin : BATCH);
        if (find_group(self, PySequence_Fast_ITEMS(keys) + begin, count, found)) goto failed;
        for (size_t i = 0; i < count; i++) {
            if (!found[i] || found[i]->parent != parent) goto done;
            if (PyList_Append(list, (PyObject *)found[i])) goto failed;
            parent = found[i];
        }
    }
done:
    Py_DECREF(keys);
    return list;
failed:
    Py_XDECREF(keys);
    Py_XDECREF(list);
    return NULL;
}

static PyObject *table_by_depth(BlockTable *self, PyObject *unused) {
    (void)unused;
    size_t deepest = 0;
    for (size_t i = 0; i <= self->mask; i++)
        if (self->tags[i] && self->blocks[i]->depth > deepest) deepest = self->blocks[i]->depth;
    size_t *begins = PyMem_RawCalloc(deepest + 2, sizeof *begins);
    PyObject *list = begins ? PyList_New((Py_ssize_t)self->count) : PyErr_NoMemory();
    if (list) {
        for (size_t i = 0; i <= self->mask; i++)
            if (self->tags[i]) begins[self->blocks[i]->depth + 1]++;
        for (size_t depth = 1; depth <= deepest; depth++) begins[depth] += begins[depth - 1];
        for (size_t i = 0; i <= self->mask; i++)
            if (self->tags[i]) PyList_SET_ITEM(list, (Py_ssize_t)begins[self->blocks[i]->depth]++, Py_NewRef((PyObject *)self->blocks[i]));
    }
    PyMem_RawFree(begins);
    return list;
}

static PyMethodDef methods[] = {
    {"get", (PyCFunction)table_get, METH_O, NULL},
    {"add", (PyCFunction)table_add, METH_O, NULL},
    {"remove", (PyCFunction)table_remove, METH_O, NULL},
    {"match", (PyCFunction)table_match, METH_O, NULL},
    {"by_depth", (PyCFunction)table_by_depth, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = (lenfunc)table_length};

PyTypeObject BlockTable_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore._native.BlockTable",
    .tp_basicsize = sizeof(BlockTable),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = table_new,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_methods = methods,
    .tp_as_sequence = &as_sequence,
};
