/* The extension module engine._native: kernels for bfloat16 on x86-64 CPUs, in the best instruction set that this one has. What they compute,
 * in torch: engine/backends/plain.py. */
#include "parts.h"
#include <omp.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

const Kernels *kernels = NULL;

enum { INSTRUCTION_SETS = 3 };

/* Linux lets a process have tiles that asks for them: their contents are more to keep than it would otherwise have room for. It is asked once,
 * when the module is imported; from then on Linux takes no stack for signals that is too small for them. */
static int may_use_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int may = -1;
    if (may < 0) may = !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
    return may;
}

/* Those that this CPU can run, the best first; how many there are. */
static int runnable(const Kernels *found[INSTRUCTION_SETS]) {
    int count = 0;
    __builtin_cpu_init();
    const int fma = __builtin_cpu_supports("fma") != 0;
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16")) {
        if (__builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && may_use_tiles()) found[count++] = &AMX_BF16;
        found[count++] = &AVX512_BF16;
    }
    if (fma && __builtin_cpu_supports("avx2")) found[count++] = &AVX2;
    return count;
}

static PyObject *instruction_sets(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    const Kernels *found[INSTRUCTION_SETS];
    const int count = runnable(found);
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(found[i]->instruction_set);
        if (!name) Py_CLEAR(names);
        if (names) PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

static PyObject *instruction_set(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    if (kernels) return PyUnicode_FromString(kernels->instruction_set);
    return PyErr_Format(PyExc_ValueError, "there are no kernels for this CPU");
}

static PyObject *use(PyObject *module, PyObject *args) {
    (void)module;
    const char *name;
    const Kernels *found[INSTRUCTION_SETS];
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    for (int i = runnable(found); i-- > 0;) {
        if (strcmp(found[i]->instruction_set, name)) continue;
        kernels = found[i];
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "this CPU has no kernels in %s", name);
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
    {"instruction_sets", instruction_sets, METH_NOARGS, NULL},
    {"instruction_set", instruction_set, METH_NOARGS, NULL},
    {"use", use, METH_VARARGS, NULL},
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
    const Kernels *found[INSTRUCTION_SETS];
    if (runnable(found)) kernels = found[0];
    if (PyType_Ready(&Plan_Type) || PyType_Ready(&Layers_Type)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddObjectRef(module, "Plan", (PyObject *)&Plan_Type) ||
                   PyModule_AddObjectRef(module, "Layers", (PyObject *)&Layers_Type) || PyModule_AddIntMacro(module, MOST_HEAD_DIM) ||
                   PyModule_AddIntMacro(module, MOST_QUERIES))) {
        Py_CLEAR(module);
    }
    return module;
}
