/* The extension module conductor._native. Its twins in Python, which say what its parts are for: conductor/core/kernels/plain_estimating.py of
 * `prefill`, `decode` and `spread`, conductor/core/kernels/plain_forecasting.py of `pool` and `with_one_more`, conductor/core/kernels/plain_table.py of
 * HolderTable. */
#include "native.h"

static PyMethodDef methods[] = {
    {"prefill", estimate_prefill, METH_VARARGS, NULL},
    {"decode", estimate_decode, METH_VARARGS, NULL},
    {"spread", estimate_spread, METH_VARARGS, NULL},
    {"pool", forecast_pool, METH_VARARGS, NULL},
    {"with_one_more", forecast_with_one_more, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "conductor._native",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&HolderTable_Type)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "HolderTable", (PyObject *)&HolderTable_Type)) Py_CLEAR(module);
    return module;
}
