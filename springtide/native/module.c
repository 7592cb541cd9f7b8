/* The extension module springtide._native: springtide/blocks.py says what its function does. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "blake2b.h"

/* Of an int that is one digit of Python's, which all token ids are: a third of the time that the API's general way takes. -1 for any other. */
static long one_digit(PyObject *object) {
    PyLongObject *number = (PyLongObject *)object;
#if PY_VERSION_HEX >= 0x030C0000
    return PyUnstable_Long_IsCompact(number) ? (long)PyUnstable_Long_CompactValue(number) : -1;
#else
    return Py_SIZE(number) == 1 ? (long)number->ob_digit[0] : Py_SIZE(number) == 0 ? 0 : -1;
#endif
}

/* 0, or -1 with OverflowError or TypeError set. */
static int token_from(PyObject *object, uint32_t *token) {
    long digit = PyLong_CheckExact(object) ? one_digit(object) : -1;
    if (digit >= 0) {
        *token = (uint32_t)digit;
        return 0;
    }
    Py_INCREF(object); /* Its __index__ may take it out of the sequence. */
    PyObject *number = PyNumber_Index(object);
    Py_DECREF(object);
    if (!number) return -1;
    long value = PyLong_AsLong(number);
    Py_DECREF(number);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < 0 || value > (long)UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "a token id is in [0, 2**32), not %ld", value);
        return -1;
    }
    *token = (uint32_t)value;
    return 0;
}

static PyObject *block_keys(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_ssize_t block_tokens;
    PyObject *parent, *given;
    if (!PyArg_ParseTuple(args, "OOn", &parent, &given, &block_tokens)) return NULL;
    if (!PyBytes_Check(parent)) return PyErr_Format(PyExc_TypeError, "parent must be bytes, not %.100s", Py_TYPE(parent)->tp_name);
    if (PyBytes_GET_SIZE(parent) != SALT_BYTES || block_tokens < 1) {
        PyErr_SetString(PyExc_ValueError, "a parent key has 16 bytes, and a block at least one token");
        return NULL;
    }
    PyObject *token_ids = PySequence_Fast(given, "token ids are a sequence");
    uint32_t *tokens = PyMem_New(uint32_t, block_tokens);
    PyObject *keys = PyList_New(0);
    if (!token_ids || !tokens || !keys) {
        if (!tokens) PyErr_NoMemory();
        goto failed;
    }
    uint8_t key[DIGEST_BYTES];
    memcpy(key, PyBytes_AS_STRING(parent), sizeof key);
    Py_ssize_t filled = 0;
    /* A token's __index__ may run anything: the sequence is asked for its size anew each time. */
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(token_ids); i++) {
        if (token_from(PySequence_Fast_GET_ITEM(token_ids, i), &tokens[filled])) goto failed;
        if (++filled < block_tokens) continue;
        filled = 0;
        uint8_t salt[SALT_BYTES];
        memcpy(salt, key, sizeof salt);
        blake2b_salted(key, salt, (const uint8_t *)tokens, sizeof *tokens * (size_t)block_tokens);
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)key, DIGEST_BYTES);
        int appended = bytes ? PyList_Append(keys, bytes) : -1;
        Py_XDECREF(bytes);
        if (appended) goto failed;
    }
    PyMem_Free(tokens);
    Py_DECREF(token_ids);
    return keys;
failed:
    PyMem_Free(tokens);
    Py_XDECREF(token_ids);
    Py_XDECREF(keys);
    return NULL;
}

static PyMethodDef methods[] = {
    {"block_keys", block_keys, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "springtide._native",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
