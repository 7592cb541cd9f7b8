/* The decode pool at a moment to come, attempt by attempt: conductor/core/kernels/plain_forecasting.py says what arguments and results mean. */
#include "arrays.h"

#include <math.h>

enum { READY, RUNNING, CONTEXT_TOKENS, FIXED, PER_SEQUENCE, PER_CONTEXT_TOKEN, MAX_BATCH, PACE, PRODUCED, PACED_AT, DECODING, INSTANCE_FIGURES };
enum { JOINS_AT, JOINED, PROMPT, MOST, IN_PREFILL, ATTEMPT_FIGURES };
enum { ATTEMPTS, BATCH_TOKENS, STEP_VARIANCE, BATCH_FIGURES };
static const double BINS_PER_ROOT = 4.0;

static double most(double a, double b) { return a > b ? a : b; }

static double share_longer(const double *law, Py_ssize_t bins, double tokens) {
    double bin = sqrt(tokens) * BINS_PER_ROOT;
    return law[bin < (double)(bins - 1) ? (Py_ssize_t)bin : bins - 1];
}

PyObject *forecast_pool(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *instances_o, *attempts_o, *places_o, *laws_o, *survival_o, *batches_o;
    Py_ssize_t count;
    double now, at;
    int joining;
    if (!PyArg_ParseTuple(args, "OOOOOOnddp", &instances_o, &attempts_o, &places_o, &laws_o, &survival_o, &batches_o, &count, &now, &at,
                          &joining))
        return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const double *instances = doubles(&buffers, instances_o, "instances", 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers) / INSTANCE_FIGURES;
    const double *attempts = doubles(&buffers, attempts_o, "attempts", ATTEMPT_FIGURES * count, 0);
    if (!attempts) goto end;
    Py_ssize_t room = items(&buffers) / ATTEMPT_FIGURES;
    const int64_t *places = int64s(&buffers, places_o, "places", count, 0);
    if (!places || !all_below(places, count, n)) goto end;
    const double *survival = doubles(&buffers, survival_o, "survival", 0, 0);
    if (!survival) goto end;
    const Py_buffer *table = &buffers.held[buffers.count - 1];
    if (table->ndim != 2 || table->shape[1] < 1) {
        PyErr_SetString(PyExc_ValueError, "survival is [laws, bins], with at least one bin");
        goto end;
    }
    Py_ssize_t num_laws = table->shape[0], bins = table->shape[1];
    const int64_t *laws = int64s(&buffers, laws_o, "laws", count, 0);
    if (!laws || !all_below(laws, count, num_laws)) goto end;
    double *batches = doubles(&buffers, batches_o, "batches", BATCH_FIGURES * n, 1);
    if (!batches) goto end;
    for (Py_ssize_t i = 0; i < BATCH_FIGURES * n; i++) batches[i] = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t own = places[i];
        const double *law = survival + laws[i] * bins;
        double joins_at = attempts[JOINS_AT * room + i], pace = instances[PACE * n + own], begun = 0, from = now;
        int waiting = attempts[IN_PREFILL * room + i] > 0;
        if (waiting) {
            if (!joining || joins_at > at) continue;
            from = most(joins_at, now);
        } else {
            double produced = instances[PRODUCED * n + own] + (now - instances[PACED_AT * n + own]) / pace;
            begun = most(produced - attempts[JOINED * room + i], 0);
        }
        double more = most(at - from, 0) / pace, length = begun + more;
        if (more > 0 && length >= attempts[MOST * room + i]) continue;
        double stay = share_longer(law, bins, length) / share_longer(law, bins, begun), context = attempts[PROMPT * room + i] + length;
        double step = instances[PER_SEQUENCE * n + own] + instances[PER_CONTEXT_TOKEN * n + own] * context;
        batches[ATTEMPTS * n + own] += stay;
        batches[BATCH_TOKENS * n + own] += stay * context;
        batches[STEP_VARIANCE * n + own] += stay * (1.0 - stay) * (step * step);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        double running = instances[RUNNING * n + i], unknown = most(running - instances[DECODING * n + i], 0);
        batches[ATTEMPTS * n + i] += unknown;
        batches[BATCH_TOKENS * n + i] += unknown * instances[CONTEXT_TOKENS * n + i] / most(running, 1);
    }
    done = Py_NewRef(Py_None);
end:
    release(&buffers);
    return done;
}

PyObject *forecast_with_one_more(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *instances_o, *batches_o;
    Py_ssize_t place;
    long long num_tokens;
    if (!PyArg_ParseTuple(args, "OOnL", &instances_o, &batches_o, &place, &num_tokens)) return NULL;
    Buffers buffers = {.count = 0};
    PyObject *done = NULL;
    const double *instances = doubles(&buffers, instances_o, "instances", 0, 0);
    if (!instances) goto end;
    Py_ssize_t n = items(&buffers) / INSTANCE_FIGURES;
    const double *batches = doubles(&buffers, batches_o, "batches", BATCH_FIGURES * n, 0);
    if (!batches) goto end;
    if (place < 0 || place >= n) {
        PyErr_SetString(PyExc_IndexError, "there is no such instance");
        goto end;
    }
    const double *fixed = instances + FIXED * n, *per_sequence = instances + PER_SEQUENCE * n;
    const double *per_context_token = instances + PER_CONTEXT_TOKEN * n, *largest = instances + MAX_BATCH * n;
    double expected = 0, total = 0, total_fixed = 0, variance = 0;
    Py_ssize_t ready = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int is_ready = instances[READY * n + i] > 0;
        if (!is_ready && i != place) continue;
        double batch = batches[ATTEMPTS * n + i] + (i == place), context = batches[BATCH_TOKENS * n + i];
        if (i == place) context += (double)num_tokens;
        double step = fixed[i] + (per_sequence[i] * batch + per_context_token[i] * context) / most(batch / largest[i], 1);
        if (i == place) expected = step;
        if (!is_ready) continue;
        ready++;
        total += step;
        total_fixed += fixed[i];
        variance += batches[STEP_VARIANCE * n + i];
    }
    double instances_ready = (double)(ready ? ready : 1);
    double mean = total / instances_ready + sqrt(variance) / instances_ready;
    double idle = (total_fixed + (per_sequence[place] + per_context_token[place] * (double)num_tokens)) / instances_ready;
    done = Py_BuildValue("ddd", expected, mean, idle);
end:
    release(&buffers);
    return done;
}
