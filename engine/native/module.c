/* The extension module engine._native: kernels for CPUs with AVX-512 and products of bfloat16. What they compute, in torch:
 * engine/backends/plain.py. */
#include "plan.h"
#include <omp.h>
#include <sys/mman.h>

static PyObject *supported(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    __builtin_cpu_init();
    return PyBool_FromLong(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma"));
}

static PyObject *max_threads(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    return PyLong_FromLong(omp_get_max_threads());
}

static PyObject *prefer_huge_pages(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
    madvise((void *)address, bytes, MADV_HUGEPAGE);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"max_threads", max_threads, METH_NOARGS, NULL},
    {"supported", supported, METH_NOARGS, NULL},
    {"prefer_huge_pages", prefer_huge_pages, METH_VARARGS, NULL},
    {"pack", product_pack, METH_VARARGS, NULL},
    {"product", product_run, METH_VARARGS, NULL},
    {"norm", rows_norm, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "engine._native",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&Plan_Type) || PyType_Ready(&Layers_Type)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddObjectRef(module, "Plan", (PyObject *)&Plan_Type) ||
                   PyModule_AddObjectRef(module, "Layers", (PyObject *)&Layers_Type) || PyModule_AddIntMacro(module, MOST_HEAD_DIM) ||
                   PyModule_AddIntMacro(module, MOST_QUERIES))) {
        Py_CLEAR(module);
    }
    return module;
}
