/* Estimates, row by row: conductor/core/kernels/plain_estimating.py says what arguments and results mean, and does it column by column. */
#include "arrays.h"

#include <math.h>

enum { CACHE_AWARE, FETCH, RECOMPUTE };

/* springtide/chunking.py says what these numbers are. */
enum { LEAST_PART = 8, ROUND_TO = 16, ROUND_FROM = 128 };
static const double MOST_FIXED = 0.05, EPSILON = 1e-6;

typedef struct {
    double fixed, per_token, per_pair, slowest_share;
    int64_t chunk, least;
    double budget;
} Chunks;

static double pairs(double fresh, double cached) { return fresh * (cached + fresh / 2); }

static double own_ms(const Chunks *chunks, double fresh, double cached) {
    return chunks->per_token * fresh + chunks->per_pair * pairs(fresh, cached);
}

/* `chunk_ms` is 0 for the default. */
static void set_budget(Chunks *chunks, int64_t chunk, double chunk_ms) {
    chunks->chunk = chunk;
    chunks->least = chunk / LEAST_PART > 1 ? chunk / LEAST_PART : 1;
    double first = own_ms(chunks, (double)chunk, 0), fixed = (1 / MOST_FIXED - 1) * chunks->fixed;
    chunks->budget = chunk_ms != 0 ? chunk_ms - chunks->fixed : first > fixed ? first : fixed;
}

static int64_t first_chunk(const Chunks *chunks, double cached) {
    int64_t fitting = 0;
    if (chunks->budget > 0) {
        double linear = chunks->per_token + chunks->per_pair * cached;
        double divisor = linear + sqrt(linear * linear + 2 * chunks->per_pair * chunks->budget);
        double most = divisor > 0 ? 2 * chunks->budget / divisor + EPSILON : (double)chunks->chunk;
        fitting = most < (double)chunks->chunk ? (int64_t)most : chunks->chunk;
    }
    if (fitting >= ROUND_FROM && fitting < chunks->chunk) fitting -= fitting % ROUND_TO;
    if (fitting < chunks->least) fitting = chunks->least;
    return fitting < chunks->chunk ? fitting : chunks->chunk;
}

static double compute_ms(const Chunks *chunks, int64_t tokens, int64_t cached) {
    int64_t fresh = tokens - cached, passes = fresh;
    double own = own_ms(chunks, (double)fresh, (double)cached);
    if (chunks->budget > 0) {
        double turns = own / chunks->budget - EPSILON;
        /* Rounded up without libm, which is called for every instance. */
        if (turns < (double)passes) passes = (int64_t)turns + (turns > (double)(int64_t)turns);
    }
    /* Integers are divided by only where that changes anything. */
    if ((passes - 1) * chunks->least >= fresh) passes = (fresh + chunks->least - 1) / chunks->least;
    if (passes * chunks->chunk < fresh) passes = (fresh + chunks->chunk - 1) / chunks->chunk;
    double occupied = chunks->slowest_share * (own + (double)passes * chunks->fixed);
    if (chunks->slowest_share == 1) return occupied;
    int64_t allowed = first_chunk(chunks, (double)cached);
    double first = (double)(allowed < fresh ? allowed : fresh);
    double first_ms = chunks->fixed + chunks->per_token * first + chunks->per_pair * pairs(first, (double)cached);
    return occupied + (1.0 - chunks->slowest_share) * first_ms;
}

PyObject *estimate_prefill(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *table_o, *own_o, *held_o, *dram_o, *nodes_o, *leaving_o, *arriving_o, *rates_o, *floats_o, *ints_o;
    double now, chunk_ms, threshold, assumed;
    long long tokens, block_tokens, chunk, most, best, source, block_bytes;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOO(dLLLdLLLdLd)", &table_o, &own_o, &held_o, &dram_o, &nodes_o, &leaving_o, &arriving_o, &rates_o,
                          &floats_o, &ints_o, &now, &tokens, &block_tokens, &chunk, &chunk_ms, &most, &best, &source, &threshold, &block_bytes,
                          &assumed))
        return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const int64_t *own = int64s(&buffers, own_o, "bits", 0, 0);
    if (!own) goto end;
    Py_ssize_t n = items(&buffers);
    const double *table = doubles(&buffers, table_o, "table", 9 * n, 0);
    if (!table) goto end;
    const int64_t *held = int64s(&buffers, held_o, "held", 0, 0);
    if (!held || !all_below(own, n, items(&buffers))) goto end;
    const int64_t *dram = dram_o == Py_None ? held : int64s(&buffers, dram_o, "in_dram", 0, 0);
    if (!dram || !all_below(own, n, items(&buffers))) goto end;
    const int64_t *leaving = int64s(&buffers, leaving_o, "leaving", 0, 0);
    if (!leaving) goto end;
    Py_ssize_t known = items(&buffers);
    const int64_t *nodes = int64s(&buffers, nodes_o, "nodes", n, 0);
    const int64_t *arriving = nodes ? int64s(&buffers, arriving_o, "arriving", known, 0) : NULL;
    if (!arriving || !all_below(nodes, n, known)) goto end;
    const double *rates = rates_o == Py_None ? NULL : doubles(&buffers, rates_o, "rates", known, 0);
    if (PyErr_Occurred()) goto end;
    double *floats = doubles(&buffers, floats_o, "floats", 5 * n, 1);
    int64_t *ints = floats ? int64s(&buffers, ints_o, "ints", 3 * n, 1) : NULL;
    if (!ints) goto end;
    if (source >= known || block_tokens < 1 || chunk < 1) {
        PyErr_SetString(PyExc_ValueError, "a node, a block or a chunk that is none");
        goto end;
    }
    const double *queued = table, *reported_at = table + n, *placed = table + 2 * n, *fixed = table + 3 * n, *per_token = table + 4 * n;
    const double *per_pair = table + 5 * n, *slowest_share = table + 6 * n, *ssd_read = table + 7 * n, *slots = table + 8 * n;
    double *queue = floats, *transfer = floats + n, *computing = floats + 2 * n, *ttft = floats + 3 * n, *saved = floats + 4 * n;
    int64_t *local = ints, *total = ints + n, *branch = ints + 2 * n;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t mine = held[own[i]] < most ? held[own[i]] : most;
        Chunks chunks = {.fixed = fixed[i], .per_token = per_token[i], .per_pair = per_pair[i], .slowest_share = slowest_share[i]};
        set_budget(&chunks, chunk, chunk_ms);
        double compute = compute_ms(&chunks, tokens, mine * block_tokens), read = 0;
        if (dram != held) {
            int64_t at_once = dram[own[i]] < most ? dram[own[i]] : most;
            read = (double)(mine - at_once) * ssd_read[i];
            if (read > 0) {
                double without = compute_ms(&chunks, tokens, at_once * block_tokens);
                if (read + compute >= without) mine = at_once, compute = without, read = 0;
            }
        }
        branch[i] = CACHE_AWARE;
        saved[i] = 0;
        transfer[i] = read;
        if (source >= 0 && nodes[i] != source && best > mine && (double)best >= threshold * (double)mine) {
            int64_t sharers = leaving[source] > arriving[nodes[i]] ? leaving[source] : arriving[nodes[i]];
            double rate = rates && !isnan(rates[nodes[i]]) ? rates[nodes[i]] : assumed;
            double fetch = 1000.0 * (double)((best - mine) * block_bytes) * (double)(1 + sharers) / rate;
            double rest = compute_ms(&chunks, tokens, best * block_tokens);
            branch[i] = RECOMPUTE;
            if (fetch + rest < compute) {
                branch[i] = FETCH;
                saved[i] = compute - rest;
                transfer[i] = read + fetch;
                compute = rest;
            }
        }
        double left = queued[i] - 1000.0 * (now - reported_at[i]);
        queue[i] = (left > 0 ? left : 0) + placed[i];
        computing[i] = compute;
        ttft[i] = queue[i] + transfer[i] + compute;
        local[i] = mine;
        total[i] = (int64_t)slots[i];
    }
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}

PyObject *estimate_decode(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *table_o, *own_o, *held_o, *floats_o, *ints_o;
    long long more;
    if (!PyArg_ParseTuple(args, "OOOOOL", &table_o, &own_o, &held_o, &floats_o, &ints_o, &more)) return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const int64_t *own = int64s(&buffers, own_o, "bits", 0, 0);
    if (!own) goto end;
    Py_ssize_t n = items(&buffers);
    const double *table = doubles(&buffers, table_o, "table", 8 * n, 0);
    if (!table) goto end;
    const int64_t *held = int64s(&buffers, held_o, "held", 0, 0);
    if (!held || !all_below(own, n, items(&buffers))) goto end;
    double *tbt = doubles(&buffers, floats_o, "floats", n, 1);
    int64_t *ints = tbt ? int64s(&buffers, ints_o, "ints", 5 * n, 1) : NULL;
    if (!ints) goto end;
    const double *running = table, *context = table + n, *largest = table + 2 * n, *fixed = table + 3 * n, *per_sequence = table + 4 * n;
    const double *per_context = table + 5 * n, *free_slots = table + 6 * n, *slots = table + 7 * n;
    for (Py_ssize_t i = 0; i < n; i++) {
        double batch = running[i] + 1, at_once = largest[i] > 0 && largest[i] < batch ? largest[i] : batch, turns = batch / at_once;
        tbt[i] = fixed[i] + per_sequence[i] * at_once + per_context[i] * floor((context[i] + (double)more) / turns);
        ints[i] = held[own[i]];
        ints[n + i] = (int64_t)batch;
        ints[2 * n + i] = (int64_t)free_slots[i];
        ints[3 * n + i] = (int64_t)slots[i];
        ints[4 * n + i] = (int64_t)largest[i];
    }
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}

PyObject *estimate_spread(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *column_o;
    long long value;
    PyObject *mask_o;
    if (!PyArg_ParseTuple(args, "OLO", &column_o, &value, &mask_o)) return NULL;
    if (!PyBytes_Check(mask_o)) return PyErr_Format(PyExc_TypeError, "mask must be bytes, not %.100s", Py_TYPE(mask_o)->tp_name);
    const unsigned char *mask = (const unsigned char *)PyBytes_AS_STRING(mask_o);
    Py_ssize_t length = PyBytes_GET_SIZE(mask_o);
    Buffers buffers = {.count = 0};
    int64_t *column = int64s(&buffers, column_o, "column", 0, 1);
    if (!column) return NULL;
    Py_ssize_t n = items(&buffers);
    for (Py_ssize_t byte = 0; byte < length; byte++) {
        for (unsigned left = mask[byte]; left; left &= left - 1) {
            Py_ssize_t at = 8 * byte + __builtin_ctz(left);
            if (at >= n) {
                release(&buffers);
                PyErr_SetString(PyExc_IndexError, "a bit is beyond the column");
                return NULL;
            }
            column[at] = value;
        }
    }
    release(&buffers);
    Py_RETURN_NONE;
}
