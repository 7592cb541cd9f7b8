/* The extension module messenger._native; messenger/_native.pyi says what its parts are for. */
#include "native.h"

static PyMethodDef functions[] = {
    {"settle", sessions_settle, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "messenger._native",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void) {
    crc32_init();
    if (batch_init() || PyType_Ready(&Batch_Type) || PyType_Ready(&Lanes_Type) || PyType_Ready(&Session_Type)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddObjectRef(module, "SliceBatch", (PyObject *)&Batch_Type) || PyModule_AddObjectRef(module, "Lanes", (PyObject *)&Lanes_Type) ||
        PyModule_AddObjectRef(module, "LaneSession", (PyObject *)&Session_Type)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
