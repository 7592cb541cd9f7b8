/* HolderTable: open addressing with linear probing. A key is a hash already, so its bytes say where it belongs; an entry is the key and a
 * counted reference to the int of its holders, which many entries share: 24 bytes, at 3/8 to 3/4 of the table. The table is in many parts,
 * each of which grows by itself: of 10 million entries some 10,000 at a time, so that nobody waits for all of them. */
#include "native.h"

#include <string.h>

enum { KEY_BYTES = 16, PART_BITS = 10, PARTS = 1 << PART_BITS, FIRST_CAPACITY = 8 };

typedef struct {
    uint64_t key[KEY_BYTES / 8];
    PyObject *holders; /* NULL: the entry is free */
} Entry;

typedef struct {
    Entry *entries;
    size_t capacity; /* a power of two */
    size_t used;
} Part;

typedef struct {
    PyObject_HEAD
    Part parts[PARTS];
    size_t used; /* of all parts */
} Table;

static int key_of(PyObject *object, uint64_t key[2]) {
    if (!PyBytes_Check(object) || PyBytes_GET_SIZE(object) != KEY_BYTES) {
        PyErr_Format(PyExc_TypeError, "a block key is %d bytes, not %R", KEY_BYTES, object);
        return -1;
    }
    memcpy(key, PyBytes_AS_STRING(object), KEY_BYTES);
    return 0;
}

/* Multiplied, so that keys that somebody chose to begin alike still spread. The first bits say in which part, the middle ones where. */
static uint64_t spread_of(const uint64_t key[2]) { return (key[0] ^ key[1]) * 0x9e3779b97f4a7c15u; }

static Part *part_of(Table *table, const uint64_t key[2]) { return &table->parts[spread_of(key) >> (64 - PART_BITS)]; }

static size_t home(const Part *part, const uint64_t key[2]) { return (size_t)(spread_of(key) >> 16) & (part->capacity - 1); }

/* The key's entry, or the free one where it would be. */
static Entry *find(const Part *part, const uint64_t key[2]) {
    size_t at = home(part, key);
    while (part->entries[at].holders && (part->entries[at].key[0] != key[0] || part->entries[at].key[1] != key[1]))
        at = (at + 1) & (part->capacity - 1);
    return &part->entries[at];
}

/* A borrowed reference; NULL: the key is not in the table. */
static PyObject *held_by(Table *table, const uint64_t key[2]) {
    const Part *part = part_of(table, key);
    return part->capacity ? find(part, key)->holders : NULL;
}

static int grow(Part *part) {
    Entry *before = part->entries;
    size_t capacity = part->capacity;
    Entry *entries = PyMem_Calloc(capacity ? 2 * capacity : FIRST_CAPACITY, sizeof *entries);
    if (!entries) {
        PyErr_NoMemory();
        return -1;
    }
    part->entries = entries;
    part->capacity = capacity ? 2 * capacity : FIRST_CAPACITY;
    for (size_t i = 0; i < capacity; i++)
        if (before[i].holders) *find(part, before[i].key) = before[i];
    PyMem_Free(before);
    return 0;
}

/* Frees an entry; those after it that would no longer be found move up. */
static void take_out(Table *table, Part *part, Entry *entry) {
    size_t hole = (size_t)(entry - part->entries), last = part->capacity - 1;
    PyObject *holders = entry->holders;
    for (size_t at = (hole + 1) & last; part->entries[at].holders; at = (at + 1) & last) {
        size_t from_home = (at - home(part, part->entries[at].key)) & last, from_hole = (at - hole) & last;
        if (from_home < from_hole) continue;
        part->entries[hole] = part->entries[at];
        hole = at;
    }
    part->entries[hole].holders = NULL;
    part->used--;
    table->used--;
    Py_DECREF(holders);
}

/* What stands for the holders of entries: one change is worked out once for neighbours that have the same. */
typedef struct {
    PyObject *mask, *share;
    PyObject *before, *after; /* owned; `after` is NULL where nobody is left */
    long changes; /* how many bits */
} Change;

static void forget(Change *change) {
    Py_CLEAR(change->before);
    Py_CLEAR(change->after);
}

/* Makes `change` that of entries with these holders, the mask's bit being set or cleared. -1 with an error set. */
static int work_out(Change *change, PyObject *holders, int set) {
    if (change->before == holders) return 0;
    forget(change);
    PyObject *common = PyNumber_And(holders, change->mask);
    PyObject *count = common ? PyObject_CallMethod(common, "bit_count", NULL) : NULL;
    long has = count ? PyLong_AsLong(count) : -1;
    Py_XDECREF(common);
    Py_XDECREF(count);
    if (has < 0) return -1;
    change->changes = set ? !has : has;
    if (change->changes) {
        PyObject *others = set ? PyNumber_Or(holders, change->mask) : PyNumber_Invert(change->mask);
        if (others && !set) Py_SETREF(others, PyNumber_And(holders, others));
        int left = others ? PyObject_IsTrue(others) : -1;
        if (left > 0) change->after = PyObject_CallOneArg(change->share, others);
        Py_XDECREF(others);
        if (left < 0 || (left > 0 && !change->after)) return -1;
    }
    change->before = Py_NewRef(holders);
    return 0;
}

static void put(Table *table, Part *part, Entry *entry, PyObject *after) {
    if (!after) {
        take_out(table, part, entry);
        return;
    }
    PyObject *before = entry->holders;
    entry->holders = Py_NewRef(after);
    Py_DECREF(before);
}

static PyObject *change_all(Table *table, PyObject *args, int set) {
    PyObject *given, *mask, *share;
    if (!PyArg_ParseTuple(args, "OO!O", &given, &PyLong_Type, &mask, &share)) return NULL;
    PyObject *keys = PySequence_Tuple(given);
    if (!keys) return NULL;
    Change change = {.mask = mask, .share = share};
    Py_ssize_t changed = 0, count = PyTuple_GET_SIZE(keys);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t key[2];
        if (key_of(PyTuple_GET_ITEM(keys, i), key)) goto failed;
        Part *part = part_of(table, key);
        if (set && 4 * part->used >= 3 * part->capacity && grow(part)) goto failed;
        Entry *entry = part->capacity ? find(part, key) : NULL;
        if (!entry || !entry->holders) {
            if (!set) continue;
            memcpy(entry->key, key, sizeof key);
            entry->holders = Py_NewRef(mask);
            part->used++;
            table->used++;
            changed++;
            continue;
        }
        if (work_out(&change, entry->holders, set)) goto failed;
        if (!change.changes) continue;
        put(table, part, find(part, key), change.after);
        changed++;
    }
    forget(&change);
    Py_DECREF(keys);
    return PyLong_FromSsize_t(changed);
failed:
    forget(&change);
    Py_DECREF(keys);
    return NULL;
}

static PyObject *table_add(Table *table, PyObject *args) { return change_all(table, args, 1); }

static PyObject *table_discard(Table *table, PyObject *args) { return change_all(table, args, 0); }

static PyObject *table_get(Table *table, PyObject *object) {
    uint64_t key[2];
    if (key_of(object, key)) return NULL;
    PyObject *holders = held_by(table, key);
    return holders ? Py_NewRef(holders) : PyLong_FromLong(0);
}

/* A prompt's blocks, and the tables and bits that count. */
typedef struct {
    Table *tables[2];
    Py_ssize_t num_tables, num_keys;
    PyObject *keys, *live, *ends;
} Prompt;

/* Who holds the block. Here and below: a new reference, or NULL with an error set. */
static PyObject *holders_of(const Prompt *prompt, Py_ssize_t block) {
    uint64_t key[2];
    PyObject *object = PySequence_GetItem(prompt->keys, block), *all = NULL;
    int wrong = !object || key_of(object, key);
    Py_XDECREF(object);
    if (wrong) return NULL;
    for (Py_ssize_t i = 0; i < prompt->num_tables; i++) {
        PyObject *holders = held_by(prompt->tables[i], key);
        if (!holders) continue;
        Py_XSETREF(all, all ? PyNumber_Or(all, holders) : Py_NewRef(holders));
        if (!all) return NULL;
    }
    if (!all) return PyLong_FromLong(0);
    PyObject *live = PyNumber_And(all, prompt->live);
    Py_DECREF(all);
    return live;
}

/* The same of those among `within`, and all of `least`. */
static PyObject *holders_between(const Prompt *prompt, Py_ssize_t block, PyObject *within, PyObject *least) {
    PyObject *holders = holders_of(prompt, block);
    if (holders) Py_SETREF(holders, PyNumber_And(holders, within));
    if (holders) Py_SETREF(holders, PyNumber_Or(holders, least));
    return holders;
}

/* Here and below: -1 with an error set. */
static int same(PyObject *a, PyObject *b) { return PyObject_RichCompareBool(a, b, Py_EQ); }

static int add_end(const Prompt *prompt, Py_ssize_t blocks, PyObject *holders) {
    PyObject *end = holders ? Py_BuildValue("nO", blocks, holders) : NULL;
    int failed = !end || PyList_Append(prompt->ends, end);
    Py_XDECREF(end);
    return failed ? -1 : 0;
}

/* Adds who drops out between two blocks whose holders differ. Should a store not be prefix-closed for once, everybody is still counted
 * exactly once, somewhere between. */
static int add_drops(const Prompt *prompt, Py_ssize_t low, PyObject *at_low, Py_ssize_t high, PyObject *at_high) {
    int failed = 0;
    Py_INCREF(at_low);
    Py_INCREF(at_high);
    while (!failed && high - low > 1) {
        Py_ssize_t middle = low + (high - low) / 2;
        PyObject *at_middle = holders_between(prompt, middle, at_low, at_high);
        int none = at_middle ? same(at_middle, at_low) : -1, all = none ? none : same(at_middle, at_high);
        if (none < 0 || all < 0) {
            failed = -1;
        } else if (none) {
            low = middle;
        } else if (all) {
            high = middle;
        } else {
            failed = add_drops(prompt, low, at_low, middle, at_middle);
            low = middle;
            Py_SETREF(at_low, Py_NewRef(at_middle));
        }
        Py_XDECREF(at_middle);
    }
    if (!failed) {
        PyObject *dropped = PyNumber_Xor(at_low, at_high);
        failed = add_end(prompt, high, dropped);
        Py_XDECREF(dropped);
    }
    Py_DECREF(at_low);
    Py_DECREF(at_high);
    return failed;
}

static int add_ends(const Prompt *prompt) {
    Py_ssize_t last_key = prompt->num_keys - 1, block = 0;
    PyObject *here = holders_of(prompt, 0), *last = NULL;
    int failed = -1, left = here ? PyObject_IsTrue(here) : -1;
    if (left == 0) failed = 0;
    if (left <= 0) goto end;
    last = last_key ? holders_of(prompt, last_key) : Py_NewRef(here);
    if (last) Py_SETREF(last, PyNumber_And(last, here));
    left = last ? PyObject_IsTrue(last) : -1;
    if (left < 0 || (left && add_end(prompt, prompt->num_keys, last))) goto end;
    int over = same(here, last);
    for (Py_ssize_t step = 1; over == 0; step *= 2) {
        Py_ssize_t further = last_key - block > step ? block + step : last_key;
        PyObject *there = further < last_key ? holders_between(prompt, further, here, last) : Py_NewRef(last);
        int equal = there ? same(there, here) : -1;
        int wrong = equal < 0 || (!equal && add_drops(prompt, block, here, further, there));
        if (there) Py_SETREF(here, there);
        if (wrong) goto end;
        block = further;
        over = same(here, last);
    }
    failed = over < 0 ? -1 : 0;
end:
    Py_XDECREF(here);
    Py_XDECREF(last);
    return failed;
}

PyObject *match_ends(PyObject *Py_UNUSED(module), PyObject *args) {
    Prompt prompt = {.num_tables = 1};
    PyObject *dram, *ssd;
    if (!PyArg_ParseTuple(args, "O!OOO!", &HolderTable_Type, &dram, &ssd, &prompt.keys, &PyLong_Type, &prompt.live)) return NULL;
    prompt.tables[0] = (Table *)dram;
    if (ssd != Py_None) {
        if (!PyObject_TypeCheck(ssd, &HolderTable_Type)) return PyErr_Format(PyExc_TypeError, "ssd is no HolderTable, but %R", ssd);
        prompt.tables[prompt.num_tables++] = (Table *)ssd;
    }
    prompt.num_keys = PySequence_Size(prompt.keys);
    if (prompt.num_keys < 0) return NULL;
    prompt.ends = PyList_New(0);
    if (prompt.ends && ((prompt.num_keys && add_ends(&prompt)) || PyList_Sort(prompt.ends) || PyList_Reverse(prompt.ends)))
        Py_CLEAR(prompt.ends);
    return prompt.ends;
}

static PyObject *table_sweep(Table *table, PyObject *args) {
    Py_ssize_t first, count, cleared = 0;
    PyObject *mask, *share;
    if (!PyArg_ParseTuple(args, "nnO!O", &first, &count, &PyLong_Type, &mask, &share)) return NULL;
    Change change = {.mask = mask, .share = share};
    size_t number = first < 0 ? 0 : (size_t)first % PARTS, at = first < 0 ? 0 : (size_t)first / PARTS;
    /* Places that are free are passed over sooner. */
    for (Py_ssize_t budget = 8 * count; budget > 0 && number < PARTS; budget -= 8) {
        Part *part = &table->parts[number];
        if (at >= part->capacity) {
            number++;
            at = 0;
            budget += 8;
            continue;
        }
        Entry *entry = &part->entries[at];
        if (!entry->holders) {
            at++;
            budget += 7;
            continue;
        }
        if (work_out(&change, entry->holders, 0)) {
            forget(&change);
            return NULL;
        }
        /* Where one was taken out, another may have moved in. */
        int stays = !change.changes || change.after;
        if (change.changes) put(table, part, entry, change.after);
        cleared += change.changes;
        at += stays;
    }
    forget(&change);
    return Py_BuildValue("nn", number < PARTS ? (Py_ssize_t)(at * PARTS + number) : (Py_ssize_t)0, cleared);
}

static PyObject *table_items(Table *table, PyObject *Py_UNUSED(none)) {
    PyObject *items = PyList_New(0);
    for (Part *part = table->parts; items && part < table->parts + PARTS; part++)
        for (size_t i = 0; items && i < part->capacity; i++) {
            const Entry *entry = &part->entries[i];
            if (!entry->holders) continue;
            PyObject *pair = Py_BuildValue("y#O", (const char *)entry->key, (Py_ssize_t)KEY_BYTES, entry->holders);
            if (!pair || PyList_Append(items, pair)) Py_CLEAR(items);
            Py_XDECREF(pair);
        }
    return items;
}

static Py_ssize_t table_length(PyObject *self) { return (Py_ssize_t)((Table *)self)->used; }

static void table_dealloc(Table *table) {
    for (Part *part = table->parts; part < table->parts + PARTS; part++) {
        for (size_t i = 0; i < part->capacity; i++) Py_XDECREF(part->entries[i].holders);
        PyMem_Free(part->entries);
    }
    Py_TYPE(table)->tp_free((PyObject *)table);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)table_add, METH_VARARGS, NULL},
    {"discard", (PyCFunction)table_discard, METH_VARARGS, NULL},
    {"get", (PyCFunction)table_get, METH_O, NULL},
    {"sweep", (PyCFunction)table_sweep, METH_VARARGS, NULL},
    {"items", (PyCFunction)table_items, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods as_sequence = {.sq_length = table_length};

PyTypeObject HolderTable_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "conductor._native.HolderTable",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_methods = methods,
    .tp_as_sequence = &as_sequence,
};
