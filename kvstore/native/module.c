/* The extension module kvstore._native: kvstore/_native.pyi says what its parts are for. */
#include "native.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore._native",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&Block_Type) || PyType_Ready(&BlockTable_Type) || PyType_Ready(&BlockHeap_Type)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddObjectRef(module, "Block", (PyObject *)&Block_Type) ||
        PyModule_AddObjectRef(module, "BlockTable", (PyObject *)&BlockTable_Type) ||
        PyModule_AddObjectRef(module, "BlockHeap", (PyObject *)&BlockHeap_Type) ||
        PyModule_AddIntMacro(module, MAX_USES)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
