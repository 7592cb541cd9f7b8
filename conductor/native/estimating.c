/* Estimates, instance by instance: conductor/_native.pyi says what arguments and results mean. */
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

static Chunks chunks_of(const PrefillInstance *of, int64_t chunk, double chunk_ms) {
    Chunks chunks = {
        .fixed = of->fixed_ms, .per_token = of->per_token_ms, .per_pair = of->per_pair_ms, .slowest_share = of->slowest_share};
    set_budget(&chunks, chunk, chunk_ms);
    return chunks;
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

/* The class of a time among `classes`, by powers of two of a millisecond: frexp's exponent, without its call. */
static Py_ssize_t class_of(double ms, Py_ssize_t classes) {
    enum { EXPONENT_AT = 52, EXPONENTS = 0x7FF, OF_ONE_HALF = 1022 };
    uint64_t bits;
    memcpy(&bits, &ms, sizeof bits);
    int exponent = (int)(bits >> EXPONENT_AT & EXPONENTS);
    if (exponent == EXPONENTS || exponent < OF_ONE_HALF) return 0;
    return exponent - OF_ONE_HALF < classes ? exponent - OF_ONE_HALF : classes - 1;
}

/* [classes, classes], by the class of own work and that of the work ahead. */
typedef struct {
    const double *factors;
    Py_ssize_t classes;
} QueueFactors;

static double queue_factor(const QueueFactors *of, double own, double ahead) {
    return of->factors[class_of(own, of->classes) * of->classes + class_of(ahead, of->classes)];
}

/* -1 with an error set. */
static int take_factors(Buffers *buffers, PyObject *object, QueueFactors *of) {
    of->factors = doubles(buffers, object, "factors", 1, 0);
    if (!of->factors) return -1;
    const Py_buffer *table = &buffers->held[buffers->count - 1];
    if (table->ndim != 2 || table->shape[0] != table->shape[1]) {
        PyErr_SetString(PyExc_ValueError, "factors is [classes, classes]");
        return -1;
    }
    of->classes = table->shape[0];
    return 0;
}

/* What a prompt takes where so many of its tokens are cached, at instances of one cost. */
typedef struct {
    int is_known;
    int64_t cached;
    double fixed_ms, per_token_ms, per_pair_ms, slowest_share, ms;
} Computed;

/* Most instances cost alike, and hold as much of a prompt as others: so many times are kept at hand, each in the place of its tokens. */
enum { COMPUTED_BITS = 4, COMPUTED = 1 << COMPUTED_BITS };

static double computed_ms(Computed *known, const PrefillInstance *own, const Asked *asked, int64_t blocks) {
    static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u; /* Knuth's multiplicative hashing */
    Computed *at = &known[(uint64_t)blocks * GOLDEN >> (64 - COMPUTED_BITS)];
    int64_t cached = blocks * asked->block_tokens;
    int is_that = at->is_known && at->cached == cached && at->fixed_ms == own->fixed_ms && at->per_token_ms == own->per_token_ms &&
                  at->per_pair_ms == own->per_pair_ms && at->slowest_share == own->slowest_share;
    if (!is_that) {
        Chunks chunks = chunks_of(own, asked->chunk_tokens, asked->chunk_ms);
        *at = (Computed){1,
                         cached,
                         own->fixed_ms,
                         own->per_token_ms,
                         own->per_pair_ms,
                         own->slowest_share,
                         compute_ms(&chunks, asked->num_tokens, cached)};
    }
    return at->ms;
}

static Attribute ASKED[] = {ASKED_FIELDS(INT64_ATTRIBUTE, FLOAT64_ATTRIBUTE)};
static Attribute PREFILL_ESTIMATES[] = {PREFILL_ESTIMATES_FIELDS(INT64_ATTRIBUTE, FLOAT64_ATTRIBUTE)};
static Attribute DECODE_ESTIMATES[] = {DECODE_ESTIMATES_FIELDS(INT64_ATTRIBUTE, FLOAT64_ATTRIBUTE)};

PyObject *estimate_prefills(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *instances_o, *held_o, *dram_o, *links_o, *rates_o, *factors_o, *asked_o, *into_o;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &instances_o, &held_o, &dram_o, &links_o, &rates_o, &factors_o, &asked_o, &into_o)) return NULL;
    Asked asked;
    if (numbers_of(asked_o, ASKED, Py_ARRAY_LENGTH(ASKED), &asked)) return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const PrefillInstance *instances = array(&buffers, instances_o, "instances", &PREFILL_INSTANCE, 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers);
    const int64_t *held = int64s(&buffers, held_o, "held", 0, 0);
    if (!held) goto end;
    Py_ssize_t num_bits = items(&buffers);
    const int64_t *dram = dram_o == Py_None ? held : int64s(&buffers, dram_o, "in_dram", num_bits, 0);
    if (!dram) goto end;
    const LinkEnd *links = array(&buffers, links_o, "links", &LINK_END, 0, 0);
    if (!links) goto end;
    Py_ssize_t num_nodes = items(&buffers);
    const double *rates = rates_o == Py_None ? NULL : doubles(&buffers, rates_o, "rates", num_nodes, 0);
    if (PyErr_Occurred()) goto end;
    QueueFactors factors = {NULL, 0};
    if (factors_o != Py_None && take_factors(&buffers, factors_o, &factors)) goto end;
    PrefillEstimates into;
    if (columns_of(&buffers, into_o, PREFILL_ESTIMATES, Py_ARRAY_LENGTH(PREFILL_ESTIMATES), n, &into)) goto end;
    if (asked.source >= num_nodes || asked.block_tokens < 1 || asked.chunk_tokens < 1) {
        PyErr_SetString(PyExc_ValueError, "a node, a block or a chunk that is none");
        goto end;
    }
    Computed known[COMPUTED] = {0};
    for (Py_ssize_t i = 0; i < n; i++) {
        const PrefillInstance *own = &instances[i];
        if (!is_within(own->bit, num_bits) || !is_within(own->node, num_nodes)) goto end;
        int64_t local = held[own->bit] < asked.most_reused ? held[own->bit] : asked.most_reused, branch = CACHE_AWARE;
        double compute = computed_ms(known, own, &asked, local), read = 0, fetch = 0, saved = 0;
        if (dram != held) {
            int64_t at_once = dram[own->bit] < asked.most_reused ? dram[own->bit] : asked.most_reused;
            read = (double)(local - at_once) * own->ssd_read_ms_per_block;
            if (read > 0) {
                double without = computed_ms(known, own, &asked, at_once);
                if (read + compute >= without) local = at_once, compute = without, read = 0;
            }
        }
        int is_longer = asked.best > local && (double)asked.best >= asked.threshold * (double)local;
        if (asked.source >= 0 && own->node != asked.source && is_longer) {
            int64_t leaving = links[asked.source].leaving, arriving = links[own->node].arriving;
            double rate = rates && !isnan(rates[own->node]) ? rates[own->node] : asked.assumed_bytes_per_s;
            double sharers = (double)(1 + (leaving > arriving ? leaving : arriving));
            double moving = 1000.0 * (double)((asked.best - local) * asked.bytes_per_block) * sharers / rate;
            double rest = computed_ms(known, own, &asked, asked.best);
            branch = RECOMPUTE;
            if (moving + rest < compute) {
                branch = FETCH;
                saved = compute - rest;
                fetch = moving;
                compute = rest;
            }
        }
        double left = own->queue_ms - 1000.0 * (asked.now - own->reported_at), queue = (left > 0 ? left : 0) + own->placed_ms;
        if (factors.factors) queue *= queue_factor(&factors, compute, queue);
        into.local_blocks[i] = local;
        into.queue_ms[i] = queue;
        into.transfer_ms[i] = read + fetch;
        into.prefill_ms[i] = compute;
        into.ttft_ms[i] = queue + (read + fetch + compute);
        into.saved_ms[i] = saved;
        into.slots_total[i] = own->slots_total;
        into.branch[i] = branch;
    }
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}

PyObject *prompts_ms(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"instances", "into", "num_tokens", "cached_tokens", "chunk_tokens", "chunk_ms", NULL};
    PyObject *instances_o, *into_o;
    long long num_tokens, cached_tokens, chunk_tokens;
    double chunk_ms;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO$LLLd", names, &instances_o, &into_o, &num_tokens, &cached_tokens, &chunk_tokens,
                                     &chunk_ms))
        return NULL;
    if (cached_tokens < 0 || num_tokens <= cached_tokens || chunk_tokens < 1)
        return PyErr_Format(PyExc_ValueError, "a prompt or a chunk without tokens");
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const PrefillInstance *instances = array(&buffers, instances_o, "instances", &PREFILL_INSTANCE, 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers);
    double *into = doubles(&buffers, into_o, "into", n, 1);
    if (!into) goto end;
    for (Py_ssize_t i = 0; i < n; i++) {
        Chunks chunks = chunks_of(&instances[i], chunk_tokens, chunk_ms);
        into[i] = compute_ms(&chunks, num_tokens, cached_tokens);
    }
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}

/* As floor, which is in libm, and called for every instance. */
static double rounded_down(double amount) { return amount >= 0 && amount < 0x1p52 ? (double)(int64_t)amount : floor(amount); }

PyObject *estimate_decodes(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *instances_o, *held_o, *into_o;
    long long num_tokens;
    if (!PyArg_ParseTuple(args, "OOLO", &instances_o, &held_o, &num_tokens, &into_o)) return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const DecodeInstance *instances = array(&buffers, instances_o, "instances", &DECODE_INSTANCE, 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers);
    const int64_t *held = int64s(&buffers, held_o, "held", 0, 0);
    if (!held) goto end;
    Py_ssize_t num_bits = items(&buffers);
    DecodeEstimates into;
    if (columns_of(&buffers, into_o, DECODE_ESTIMATES, Py_ARRAY_LENGTH(DECODE_ESTIMATES), n, &into)) goto end;
    for (Py_ssize_t i = 0; i < n; i++) {
        const DecodeInstance *own = &instances[i];
        if (!is_within(own->bit, num_bits)) goto end;
        int64_t batch = own->attempts + 1, at_once = own->max_batch > 0 && own->max_batch < batch ? own->max_batch : batch;
        double context_tokens = own->context_tokens + (double)num_tokens;
        /* Divided by only where that changes anything. */
        if (at_once < batch) context_tokens /= (double)batch / (double)at_once;
        context_tokens = rounded_down(context_tokens);
        into.prefix_blocks[i] = held[own->bit];
        into.tbt_ms[i] = own->fixed_ms + own->per_sequence_ms * (double)at_once + own->per_context_token_ms * context_tokens;
        into.batch[i] = batch;
        into.running[i] = own->running;
        into.slots_free[i] = own->slots_free;
        into.slots_total[i] = own->slots_total;
        into.max_batch[i] = own->max_batch;
    }
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}

PyObject *spread(PyObject *Py_UNUSED(module), PyObject *args) {
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

PyObject *queue_class(PyObject *Py_UNUSED(module), PyObject *args) {
    double ms;
    Py_ssize_t classes;
    if (!PyArg_ParseTuple(args, "dn", &ms, &classes)) return NULL;
    return PyLong_FromSsize_t(class_of(ms, classes));
}

PyObject *queue_factors(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *own_o, *ahead_o, *factors_o, *into_o, *done = NULL;
    if (!PyArg_ParseTuple(args, "OOOO", &own_o, &ahead_o, &factors_o, &into_o)) return NULL;
    Buffers buffers = {.count = 0};
    const double *own = doubles(&buffers, own_o, "own_ms", 0, 0);
    if (!own) goto end;
    Py_ssize_t count = items(&buffers);
    const double *ahead = doubles(&buffers, ahead_o, "ahead_ms", count, 0);
    if (!ahead) goto end;
    QueueFactors factors;
    if (take_factors(&buffers, factors_o, &factors)) goto end;
    double *into = doubles(&buffers, into_o, "into", count, 1);
    if (!into) goto end;
    for (Py_ssize_t i = 0; i < count; i++) into[i] = queue_factor(&factors, own[i], ahead[i]);
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}
