/* Block: kvstore/_native.pyi says what its fields mean. */
#include "native.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

int key_from(PyObject *object, uint64_t key[KEY_BYTES / 8]) {
    if (!PyBytes_Check(object) || PyBytes_GET_SIZE(object) != KEY_BYTES) {
        PyErr_Format(PyExc_TypeError, "a block key is %d bytes, not %R", KEY_BYTES, object);
        return -1;
    }
    memcpy(key, PyBytes_AS_STRING(object), KEY_BYTES);
    return 0;
}

PyObject *key_bytes(const Block *block) { return PyBytes_FromStringAndSize((const char *)block->key, KEY_BYTES); }

static PyObject *block_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"key", "slot", "parent", "tenant", NULL};
    PyObject *key, *parent, *tenant;
    int slot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiOO", names, &key, &slot, &parent, &tenant)) return NULL;
    if (parent != Py_None && !Py_IS_TYPE(parent, &Block_Type)) {
        PyErr_Format(PyExc_TypeError, "a block's parent is a Block or None, not %R", parent);
        return NULL;
    }
    Block *self = (Block *)type->tp_alloc(type, 0); /* zeroed */
    if (!self) return NULL;
    if (key_from(key, self->key)) {
        Py_DECREF(self);
        return NULL;
    }
    if (parent != Py_None) {
        self->parent = (Block *)Py_NewRef(parent);
        self->depth = self->parent->depth + 1;
    }
    self->tenant = Py_NewRef(tenant);
    self->slot = slot;
    return (PyObject *)self;
}

/* Of a chain whose last block goes, many may go: one after the other, not one inside the other, for a chain can be longer than the stack. */
static void block_dealloc(Block *self) {
    while (self) {
        Block *parent = self->parent;
        Py_XDECREF(self->tenant);
        Py_TYPE(self)->tp_free(self);
        if (parent && Py_REFCNT(parent) > 1) {
            Py_DECREF(parent);
            parent = NULL;
        }
        self = parent;
    }
}

static PyObject *block_repr(Block *self) {
    PyObject *key = key_bytes(self);
    PyObject *hex = key ? PyObject_CallMethod(key, "hex", NULL) : NULL;
    PyObject *text = hex ? PyUnicode_FromFormat("<Block %U slot=%d refs=%d>", hex, self->slot, self->refs) : NULL;
    Py_XDECREF(key);
    Py_XDECREF(hex);
    return text;
}

static PyObject *block_key(Block *self, void *closure) {
    (void)closure;
    return key_bytes(self);
}

static PyObject *block_evictable(Block *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->refs == 0 && self->children == 0);
}

static PyObject *block_spare(Block *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->clean && self->dirty_children == 0);
}

static PyObject *block_reference(Block *self, PyObject *unused) {
    (void)unused;
    if (self->uses < MAX_USES) self->uses++;
    return PyLong_FromLong(self->refs++);
}

static PyObject *block_dereference(Block *self, PyObject *unused) {
    (void)unused;
    if (self->refs <= 0) return PyErr_Format(PyExc_AssertionError, "%R is dereferenced more often than referenced", self);
    return PyLong_FromLong(--self->refs);
}

static PyMethodDef methods[] = {
    {"reference", (PyCFunction)block_reference, METH_NOARGS, NULL},
    {"dereference", (PyCFunction)block_dereference, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"slot", T_INT, offsetof(Block, slot), 0, NULL},
    {"parent", T_OBJECT, offsetof(Block, parent), READONLY, NULL},
    {"tenant", T_OBJECT, offsetof(Block, tenant), READONLY, NULL},
    {"refs", T_INT, offsetof(Block, refs), READONLY, NULL},
    {"children", T_INT, offsetof(Block, children), 0, NULL},
    {"dirty_children", T_INT, offsetof(Block, dirty_children), 0, NULL},
    {"depth", T_UINT, offsetof(Block, depth), READONLY, NULL},
    {"last_used", T_LONGLONG, offsetof(Block, last_used), 0, NULL},
    {"key_bits", T_ULONGLONG, offsetof(Block, key), READONLY, NULL},
    {"uses", T_UBYTE, offsetof(Block, uses), 0, NULL},
    {"sampled", T_BOOL, offsetof(Block, sampled), 0, NULL},
    {"clean", T_BOOL, offsetof(Block, clean), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"key", (getter)block_key, NULL, NULL, NULL},
    {"evictable", (getter)block_evictable, NULL, NULL, NULL},
    {"spare", (getter)block_spare, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject Block_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvstore._native.Block",
    .tp_basicsize = sizeof(Block),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = block_new,
    .tp_dealloc = (destructor)block_dealloc,
    .tp_repr = (reprfunc)block_repr,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
};
