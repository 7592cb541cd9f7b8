#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Bins of `survival` grow with the square root of the length. */
#define BINS_PER_ROOT 4.0

extern PyTypeObject HolderTable_Type;
extern PyTypeObject *PoolOutlook_Type, *InstanceOutlook_Type;

PyObject *estimate_prefills(PyObject *module, PyObject *args);
PyObject *estimate_decodes(PyObject *module, PyObject *args);
PyObject *prompts_ms(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *queue_class(PyObject *module, PyObject *args);
PyObject *queue_factors(PyObject *module, PyObject *args);
PyObject *best_row(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *rows_from(PyObject *module, PyObject *args);
PyObject *roomy_rows(PyObject *module, PyObject *args);
PyObject *least_busy(PyObject *module, PyObject *args);
PyObject *spread(PyObject *module, PyObject *args);
PyObject *match_ends(PyObject *module, PyObject *args);
PyObject *expect_batches(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *step_times_ms(PyObject *module, PyObject *args);
PyObject *look_at_pool(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *look_at_instance(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *split_frames(PyObject *module, PyObject *args);
PyObject *split_messages(PyObject *module, PyObject *args);
