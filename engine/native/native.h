/* What the parts of engine._native share. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef uint16_t bf16;

extern PyTypeObject Plan_Type, Layers_Type;

PyObject *rows_norm(PyObject *module, PyObject *args);
PyObject *product_pack(PyObject *module, PyObject *args);
PyObject *product_run(PyObject *module, PyObject *args);
