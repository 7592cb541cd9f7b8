/* The compact form of the block index: a block in 96 bytes with its key inside, a hash table of blocks, and a heap of blocks.
 *
 * None of these types is tracked by the garbage collector: ten million tracked objects would stop the store for a second at every full
 * collection. They cannot form a cycle, for a block refers to its parent and its tenant only, and neither refers to a younger block. */
#ifndef SPRINGTIDE_KVSTORE_NATIVE_H
#define SPRINGTIDE_KVSTORE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Block.key_bits is the key's first eight bytes as a little-endian number: little-endian machines only"
#endif

enum { KEY_BYTES = 16 };
enum { MAX_USES = 15 }; /* Block.uses counts no further */
enum { HEAPS = 4 }; /* in so many heaps, each of another lane, a block can be at the same time */

typedef struct Block {
    PyObject_HEAD
    uint64_t key[KEY_BYTES / 8];
    struct Block *parent; /* NULL, or a reference */
    PyObject *tenant;     /* a reference */
    long long last_used;
    int slot;
    int refs;
    int children;
    int dirty_children;
    unsigned depth;
    unsigned places[HEAPS]; /* in the heap of each lane; means nothing unless that heap has the block there */
    unsigned char uses;
    char sampled;
    char clean;
} Block;

extern PyTypeObject Block_Type, BlockTable_Type, BlockHeap_Type;

/* Returns 0, or -1 with an exception when `object` is no key. */
int key_from(PyObject *object, uint64_t key[KEY_BYTES / 8]);
/* A new reference, or NULL with an exception. */
PyObject *key_bytes(const Block *block);

#endif
