/* What has come over a connection, cut into HTTP/2's frames and gRPC's messages: conductor/_native.pyi says what arguments and results
 * mean. */
#include "native.h"

/* How pieces of one kind are laid out: a head, which has the size of what follows it. */
typedef struct {
    Py_ssize_t head;
    /* Of what follows; -1 with an error set, for one that is refused. */
    Py_ssize_t (*size)(const unsigned char *head, Py_ssize_t largest);
    /* A new reference, or NULL with an error set. */
    PyObject *(*piece)(const unsigned char *head, const char *payload, Py_ssize_t size);
} Framing;

static uint32_t big_endian(const unsigned char *bytes, int count) {
    uint32_t value = 0;
    for (int i = 0; i < count; i++) value = value << 8 | bytes[i];
    return value;
}

static Py_ssize_t frame_size(const unsigned char *head, Py_ssize_t largest) {
    Py_ssize_t size = big_endian(head, 3);
    if (size <= largest) return size;
    PyErr_Format(PyExc_ConnectionError, "a frame of %zd bytes came, where %zd are allowed", size, largest);
    return -1;
}

static PyObject *frame(const unsigned char *head, const char *payload, Py_ssize_t size) {
    return Py_BuildValue("iiIy#", head[3], head[4], big_endian(head + 5, 4) & 0x7FFFFFFF, payload, size);
}

static Py_ssize_t message_size(const unsigned char *head, Py_ssize_t largest) {
    Py_ssize_t size = big_endian(head + 1, 4);
    if (!head[0] && size <= largest) return size;
    if (head[0])
        PyErr_SetString(PyExc_ConnectionError, "a message came that is compressed");
    else
        PyErr_Format(PyExc_ConnectionError, "a message came that is of %zd bytes", size);
    return -1;
}

static PyObject *message(const unsigned char *Py_UNUSED(head), const char *payload, Py_ssize_t size) {
    return PyBytes_FromStringAndSize(payload, size);
}

/* Appends the whole pieces to `found`; the bytes that they are, or -1 with an error set. */
static Py_ssize_t take_whole(const Framing *framing, const Py_buffer *received, Py_ssize_t largest, PyObject *found) {
    Py_ssize_t begin = 0;
    while (received->len - begin >= framing->head) {
        const unsigned char *head = (const unsigned char *)received->buf + begin;
        Py_ssize_t size = framing->size(head, largest), whole = framing->head + size;
        if (size < 0) return -1;
        if (received->len - begin < whole) break;
        PyObject *piece = framing->piece(head, (const char *)head + framing->head, size);
        int failed = piece ? PyList_Append(found, piece) : -1;
        Py_XDECREF(piece);
        if (failed) return -1;
        begin += whole;
    }
    return begin;
}

static PyObject *split(PyObject *args, const Framing *framing) {
    Py_buffer received;
    Py_ssize_t largest;
    if (!PyArg_ParseTuple(args, "y*n", &received, &largest)) return NULL;
    PyObject *found = PyList_New(0);
    Py_ssize_t used = found ? take_whole(framing, &received, largest, found) : -1;
    PyBuffer_Release(&received);
    if (used < 0) {
        Py_XDECREF(found);
        return NULL;
    }
    return Py_BuildValue("Nn", found, used);
}

PyObject *split_frames(PyObject *Py_UNUSED(module), PyObject *args) {
    static const Framing framing = {9, frame_size, frame};
    return split(args, &framing);
}

PyObject *split_messages(PyObject *Py_UNUSED(module), PyObject *args) {
    static const Framing framing = {5, message_size, message};
    return split(args, &framing);
}
