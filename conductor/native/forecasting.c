/* The decode instances' batches at a moment to come, attempt by attempt: conductor/_native.pyi says what arguments and results mean. */
#include "arrays.h"

#include <math.h>

static double most(double a, double b) { return a > b ? a : b; }

/* [laws, bins]: the share of outputs under each law that are longer than a bin's edge. */
typedef struct {
    const double *shares;
    Py_ssize_t laws, bins;
} Survival;

/* -1 with an error set. */
static int take_survival(Buffers *buffers, PyObject *object, Survival *survival) {
    survival->shares = doubles(buffers, object, "survival", 0, 0);
    if (!survival->shares) return -1;
    const Py_buffer *table = &buffers->held[buffers->count - 1];
    if (table->ndim != 2 || table->shape[1] < 1) {
        PyErr_SetString(PyExc_ValueError, "survival is [laws, bins], with at least one bin");
        return -1;
    }
    survival->laws = table->shape[0];
    survival->bins = table->shape[1];
    return 0;
}

static double share_longer(const Survival *survival, int64_t law, double tokens) {
    double bin = sqrt(tokens) * BINS_PER_ROOT;
    return survival->shares[law * survival->bins + (bin < (double)(survival->bins - 1) ? (Py_ssize_t)bin : survival->bins - 1)];
}

typedef struct {
    double now, at;
    int joining; /* or of those only that are in a batch now */
} Moment;

/* With what probability an attempt is in its instance's batch, and its context tokens if it is. */
typedef struct {
    double stay, context_tokens;
} Presence;

/* Tokens that an attempt in the instance's batch all the time would have had by now. */
static double produced(const ForecastInstance *instance, double now) {
    return instance->produced + (now - instance->paced_at) / instance->pace_s;
}

/* `produced` is that of the instance now. */
static Presence presence(const ForecastInstance *instance, double produced, const ForecastAttempt *attempt, const Survival *survival,
                         const Moment *moment) {
    double begun = 0, from = moment->now;
    if (attempt->in_prefill) {
        if (!moment->joining || attempt->joins_at > moment->at) return (Presence){0, 0};
        from = most(attempt->joins_at, moment->now);
    } else {
        begun = most(produced - attempt->joined, 0);
    }
    double more = most(moment->at - from, 0) / instance->pace_s, length = begun + more;
    if (more == 0) return (Presence){1, attempt->prompt_tokens + length};
    if (length >= attempt->most_tokens) return (Presence){0, 0};
    double stay = share_longer(survival, attempt->law, length) / share_longer(survival, attempt->law, begun);
    return (Presence){stay, attempt->prompt_tokens + length};
}

/* What an attempt adds to the variance of its instance's step. */
static double step_variance_ms2(const ForecastInstance *instance, const Presence *presence) {
    double step_ms = instance->per_sequence_ms + instance->per_context_token_ms * presence->context_tokens;
    return presence->stay * (1.0 - presence->stay) * (step_ms * step_ms);
}

/* What an instance reports beyond the attempts that are known here, such as those of a Conductor before this one. */
static double unknown_attempts(const ForecastInstance *instance) { return most((double)(instance->running - instance->decoding), 0); }

static double unknown_tokens(const ForecastInstance *instance) {
    return unknown_attempts(instance) * instance->context_tokens / most((double)instance->running, 1);
}

/* Attempts beyond the largest batch wait for a place in it. */
static double step_ms(const ForecastInstance *instance, double attempts, double context_tokens) {
    double all_ms = instance->per_sequence_ms * attempts + instance->per_context_token_ms * context_tokens;
    return instance->fixed_ms + (attempts > instance->max_batch ? all_ms / (attempts / instance->max_batch) : all_ms);
}

PyObject *expect_batches(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"instances", "attempts", "survival", "into", "now", "at", "joining", NULL};
    PyObject *instances_o, *attempts_o, *survival_o, *into_o;
    Moment moment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO$ddp", names, &instances_o, &attempts_o, &survival_o, &into_o, &moment.now,
                                     &moment.at, &moment.joining))
        return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    double *produced_now = NULL;
    Survival survival;
    const ForecastInstance *instances = array(&buffers, instances_o, "instances", &FORECAST_INSTANCE, 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers);
    const ForecastAttempt *attempts = array(&buffers, attempts_o, "attempts", &FORECAST_ATTEMPT, 0, 0);
    if (!attempts) goto end;
    Py_ssize_t count = items(&buffers);
    if (take_survival(&buffers, survival_o, &survival)) goto end;
    ExpectedBatch *into = array(&buffers, into_o, "into", &EXPECTED_BATCH, n, 1);
    if (!into) goto end;
    memset(into, 0, (size_t)n * sizeof *into);
    produced_now = PyMem_New(double, n + 1);
    if (!produced_now) {
        PyErr_NoMemory();
        goto end;
    }
    /* Where there are fewer attempts than instances, each is asked about its own. */
    int is_for_all = count >= n;
    for (Py_ssize_t i = 0; is_for_all && i < n; i++) produced_now[i] = produced(&instances[i], moment.now);
    for (Py_ssize_t i = 0; i < count; i++) {
        const ForecastAttempt *attempt = &attempts[i];
        if (!is_within(attempt->place, n) || !is_within(attempt->law, survival.laws)) goto end;
        const ForecastInstance *own = &instances[attempt->place];
        ExpectedBatch *batch = &into[attempt->place];
        double so_far = is_for_all ? produced_now[attempt->place] : produced(own, moment.now);
        Presence there = presence(own, so_far, attempt, &survival, &moment);
        batch->attempts += there.stay;
        batch->context_tokens += there.stay * there.context_tokens;
        batch->step_variance_ms2 += step_variance_ms2(own, &there);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (instances[i].running <= instances[i].decoding) continue;
        into[i].attempts += unknown_attempts(&instances[i]);
        into[i].context_tokens += unknown_tokens(&instances[i]);
    }
    done = Py_NewRef(Py_None);
end:
    PyMem_Free(produced_now);
    release(&buffers);
    return done;
}

PyObject *step_times_ms(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *instances_o, *batches_o, *times = NULL;
    if (!PyArg_ParseTuple(args, "OO", &instances_o, &batches_o)) return NULL;
    Buffers buffers = {.count = 0};
    const ForecastInstance *instances = array(&buffers, instances_o, "instances", &FORECAST_INSTANCE, 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers);
    const ExpectedBatch *batches = array(&buffers, batches_o, "batches", &EXPECTED_BATCH, n, 0);
    if (!batches) goto end;
    times = PyList_New(n);
    for (Py_ssize_t i = 0; times && i < n; i++) {
        double attempts = batches[i].attempts;
        PyObject *time = PyFloat_FromDouble(attempts > 0 ? step_ms(&instances[i], attempts, batches[i].context_tokens) : 0);
        if (time)
            PyList_SET_ITEM(times, i, time);
        else
            Py_CLEAR(times);
    }
end:
    release(&buffers);
    return times;
}

/* A named tuple of `type`; NULL with an error set. */
static PyObject *named(PyTypeObject *type, const double *values, Py_ssize_t count) {
    PyObject *result = PyStructSequence_New(type);
    for (Py_ssize_t i = 0; result && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (value)
            PyStructSequence_SET_ITEM(result, i, value);
        else
            Py_CLEAR(result);
    }
    return result;
}

PyObject *look_at_pool(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"instances", "batches", "place", "num_tokens", NULL};
    PyObject *instances_o, *batches_o;
    Py_ssize_t place;
    long long num_tokens;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO$nL", names, &instances_o, &batches_o, &place, &num_tokens)) return NULL;
    Buffers buffers = {.count = 0};
    PyObject *outlook = NULL;
    const ForecastInstance *instances = array(&buffers, instances_o, "instances", &FORECAST_INSTANCE, 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers);
    const ExpectedBatch *batches = array(&buffers, batches_o, "batches", &EXPECTED_BATCH, n, 0);
    if (!batches || !is_within(place, n)) goto end;
    double expected = 0, total = 0, total_fixed = 0, variance = 0;
    Py_ssize_t ready = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const ForecastInstance *own = &instances[i];
        if (!own->ready && i != place) continue;
        double attempts = batches[i].attempts + (i == place), context_tokens = batches[i].context_tokens;
        if (i == place) context_tokens += (double)num_tokens;
        double step = step_ms(own, attempts, context_tokens);
        if (i == place) expected = step;
        if (!own->ready) continue;
        ready++;
        total += step;
        total_fixed += own->fixed_ms;
        variance += batches[i].step_variance_ms2;
    }
    const ForecastInstance *joined = &instances[place];
    double num_ready = (double)(ready ? ready : 1), alone = joined->per_sequence_ms + joined->per_context_token_ms * (double)num_tokens;
    const double found[] = {expected, total / num_ready + sqrt(variance) / num_ready, (total_fixed + alone) / num_ready};
    outlook = named(PoolOutlook_Type, found, Py_ARRAY_LENGTH(found));
end:
    release(&buffers);
    return outlook;
}

/* Pairwise (Higham 1993), as numpy adds: the error does not grow with their number. */
static double sum(const double *values, Py_ssize_t count) {
    enum { ABREAST = 8, AT_ONCE = 128 };
    if (count > AT_ONCE) {
        Py_ssize_t half = count / 2 - count / 2 % ABREAST;
        return sum(values, half) + sum(values + half, count - half);
    }
    double parts[ABREAST] = {0};
    Py_ssize_t i = 0;
    for (; i + ABREAST <= count; i += ABREAST)
        for (int part = 0; part < ABREAST; part++) parts[part] += values[i + part];
    double total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    for (; i < count; i++) total += values[i];
    return total;
}

PyObject *look_at_instance(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"instances", "attempts", "survival", "moments", "place", "num_tokens", "now", NULL};
    PyObject *instances_o, *attempts_o, *survival_o, *moments_o;
    Py_ssize_t place;
    long long num_tokens;
    Moment moment = {.joining = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO$nLd", names, &instances_o, &attempts_o, &survival_o, &moments_o, &place, &num_tokens,
                                     &moment.now))
        return NULL;
    Buffers buffers = {.count = 0};
    PyObject *outlook = NULL;
    double *stay = NULL;
    Survival survival;
    const ForecastInstance *instances = array(&buffers, instances_o, "instances", &FORECAST_INSTANCE, 0, 0);
    if (!instances || !is_within(place, items(&buffers))) goto end;
    const ForecastAttempt *attempts = array(&buffers, attempts_o, "attempts", &FORECAST_ATTEMPT, 0, 0);
    if (!attempts) goto end;
    Py_ssize_t count = items(&buffers);
    if (take_survival(&buffers, survival_o, &survival)) goto end;
    const double *moments = doubles(&buffers, moments_o, "moments", 1, 0);
    if (!moments) goto end;
    Py_ssize_t num_moments = items(&buffers);
    stay = PyMem_New(double, 3 * (count + 1));
    if (!stay) {
        PyErr_NoMemory();
        goto end;
    }
    double *tokens = stay + count, *variances = tokens + count;
    const ForecastInstance *own = &instances[place];
    double produced_now = produced(own, moment.now);
    double found[] = {0, -INFINITY};
    for (Py_ssize_t i = 0; i < num_moments; i++) {
        moment.at = moments[i];
        Py_ssize_t here = 0;
        for (Py_ssize_t j = 0; j < count; j++) {
            if (attempts[j].place != place) continue;
            if (!is_within(attempts[j].law, survival.laws)) goto end;
            Presence there = presence(own, produced_now, &attempts[j], &survival, &moment);
            stay[here] = there.stay;
            tokens[here] = there.stay * there.context_tokens;
            variances[here++] = step_variance_ms2(own, &there);
        }
        double in_batch = 1 + sum(stay, here) + unknown_attempts(own);
        double context_tokens = (double)num_tokens + sum(tokens, here) + unknown_tokens(own);
        double expected = step_ms(own, in_batch, context_tokens);
        if (i == 0) found[0] = expected;
        found[1] = most(expected + sqrt(sum(variances, here)), found[1]);
    }
    outlook = named(InstanceOutlook_Type, found, Py_ARRAY_LENGTH(found));
end:
    PyMem_Free(stay);
    release(&buffers);
    return outlook;
}
