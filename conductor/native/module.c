/* The extension module conductor._native: conductor/_native.pyi says what its parts are for. */
#include "native.h"

PyTypeObject *PoolOutlook_Type, *InstanceOutlook_Type;

static PyMethodDef methods[] = {
    {"estimate_prefills", estimate_prefills, METH_VARARGS, NULL},
    {"estimate_decodes", estimate_decodes, METH_VARARGS, NULL},
    {"prompts_ms", (PyCFunction)(void (*)(void))prompts_ms, METH_VARARGS | METH_KEYWORDS, NULL},
    {"queue_class", queue_class, METH_VARARGS, NULL},
    {"queue_factors", queue_factors, METH_VARARGS, NULL},
    {"best_row", (PyCFunction)(void (*)(void))best_row, METH_FASTCALL, NULL},
    {"rows_from", rows_from, METH_VARARGS, NULL},
    {"roomy_rows", roomy_rows, METH_VARARGS, NULL},
    {"least_busy", least_busy, METH_VARARGS, NULL},
    {"spread", spread, METH_VARARGS, NULL},
    {"match_ends", match_ends, METH_VARARGS, NULL},
    {"expect_batches", (PyCFunction)(void (*)(void))expect_batches, METH_VARARGS | METH_KEYWORDS, NULL},
    {"step_times_ms", step_times_ms, METH_VARARGS, NULL},
    {"look_at_pool", (PyCFunction)(void (*)(void))look_at_pool, METH_VARARGS | METH_KEYWORDS, NULL},
    {"look_at_instance", (PyCFunction)(void (*)(void))look_at_instance, METH_VARARGS | METH_KEYWORDS, NULL},
    {"split_frames", split_frames, METH_VARARGS, NULL},
    {"split_messages", split_messages, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "conductor._native",
    .m_size = -1,
    .m_methods = methods,
};

static PyStructSequence_Field of_pool[] = {{"expected_ms", NULL}, {"mean_ms", NULL}, {"idle_mean_ms", NULL}, {NULL, NULL}};
static PyStructSequence_Desc pool_outlook = {"conductor._native.PoolOutlook", NULL, of_pool, Py_ARRAY_LENGTH(of_pool) - 1};

static PyStructSequence_Field of_instance[] = {{"first_ms", NULL}, {"worst_ms", NULL}, {NULL, NULL}};
static PyStructSequence_Desc instance_outlook = {"conductor._native.InstanceOutlook", NULL, of_instance, Py_ARRAY_LENGTH(of_instance) - 1};

static int add_type(PyObject *module, const char *name, PyTypeObject *type) {
    return type ? PyModule_AddObjectRef(module, name, (PyObject *)type) : -1;
}

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&HolderTable_Type)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PoolOutlook_Type = PyStructSequence_NewType(&pool_outlook);
    InstanceOutlook_Type = PyStructSequence_NewType(&instance_outlook);
    PyObject *bins_per_root = PyFloat_FromDouble(BINS_PER_ROOT);
    if (!bins_per_root || add_type(module, "HolderTable", &HolderTable_Type) || add_type(module, "PoolOutlook", PoolOutlook_Type) ||
        add_type(module, "InstanceOutlook", InstanceOutlook_Type) || PyModule_AddObjectRef(module, "BINS_PER_ROOT", bins_per_root))
        Py_CLEAR(module);
    Py_XDECREF(bins_per_root);
    return module;
}
