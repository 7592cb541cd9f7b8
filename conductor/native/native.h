#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

extern PyTypeObject HolderTable_Type;

PyObject *estimate_prefill(PyObject *module, PyObject *args);
PyObject *estimate_decode(PyObject *module, PyObject *args);
PyObject *estimate_spread(PyObject *module, PyObject *args);
PyObject *forecast_pool(PyObject *module, PyObject *args);
PyObject *forecast_with_one_more(PyObject *module, PyObject *args);
