/* What Python and the C part of the Conductor hand each other, each listed once, field by field. From a list come the struct and what is
 * checked of what is given, so that a field more is a line here and one in Python, where the fields are told. */
#pragma once
#include "../../springtide/native/buffers.h"
#include "native.h"

#include <stddef.h>

#define INT64_MEMBER(name) int64_t name;
#define FLOAT64_MEMBER(name) double name;
#define INT64_FORMAT(name) "l:" #name ":"
#define FLOAT64_FORMAT(name) "d:" #name ":"

/* Rows of a numpy structured array. The subclass of StructuredArray that is called as `Struct` in the plural has these fields in this order. */
#define ROWS(Struct, FIELDS, type)                 \
    typedef struct {                               \
        FIELDS(INT64_MEMBER, FLOAT64_MEMBER)       \
    } Struct;                                      \
    static const ItemType type = {#Struct " rows", NULL, sizeof(Struct), "T{" FIELDS(INT64_FORMAT, FLOAT64_FORMAT) "}"}

/* conductor/core/placement/instance_columns.py */
#define PREFILL_INSTANCE_FIELDS(INT64, FLOAT64) \
    INT64(bit)                                  \
    INT64(node)                                 \
    FLOAT64(queue_ms)                           \
    FLOAT64(reported_at)                        \
    FLOAT64(placed_ms)                          \
    FLOAT64(fixed_ms)                           \
    FLOAT64(per_token_ms)                       \
    FLOAT64(per_pair_ms)                        \
    FLOAT64(slowest_share)                      \
    FLOAT64(ssd_read_ms_per_block)              \
    INT64(slots_total)
ROWS(PrefillInstance, PREFILL_INSTANCE_FIELDS, PREFILL_INSTANCE);

#define DECODE_INSTANCE_FIELDS(INT64, FLOAT64) \
    INT64(bit)                                 \
    INT64(attempts)                            \
    INT64(running)                             \
    FLOAT64(context_tokens)                    \
    INT64(max_batch)                           \
    FLOAT64(fixed_ms)                          \
    FLOAT64(per_sequence_ms)                   \
    FLOAT64(per_context_token_ms)              \
    INT64(slots_free)                          \
    INT64(slots_total)                         \
    FLOAT64(inlining_ms)
ROWS(DecodeInstance, DECODE_INSTANCE_FIELDS, DECODE_INSTANCE);

/* conductor/core/placement/transfer.py */
#define LINK_END_FIELDS(INT64, FLOAT64) \
    INT64(leaving)                      \
    INT64(arriving)
ROWS(LinkEnd, LINK_END_FIELDS, LINK_END);

/* conductor/core/forecast/decode_forecast.py */
#define FORECAST_INSTANCE_FIELDS(INT64, FLOAT64) \
    INT64(ready)                                 \
    INT64(running)                               \
    INT64(decoding)                              \
    FLOAT64(context_tokens)                      \
    FLOAT64(fixed_ms)                            \
    FLOAT64(per_sequence_ms)                     \
    FLOAT64(per_context_token_ms)                \
    FLOAT64(max_batch)                           \
    FLOAT64(pace_s)                              \
    FLOAT64(produced)                            \
    FLOAT64(paced_at)
ROWS(ForecastInstance, FORECAST_INSTANCE_FIELDS, FORECAST_INSTANCE);

#define FORECAST_ATTEMPT_FIELDS(INT64, FLOAT64) \
    INT64(place)                                \
    INT64(law)                                  \
    INT64(in_prefill)                           \
    FLOAT64(joins_at)                           \
    FLOAT64(joined)                             \
    FLOAT64(prompt_tokens)                      \
    FLOAT64(most_tokens)
ROWS(ForecastAttempt, FORECAST_ATTEMPT_FIELDS, FORECAST_ATTEMPT);

#define EXPECTED_BATCH_FIELDS(INT64, FLOAT64) \
    FLOAT64(attempts)                         \
    FLOAT64(context_tokens)                   \
    FLOAT64(step_variance_ms2)
ROWS(ExpectedBatch, EXPECTED_BATCH_FIELDS, EXPECTED_BATCH);

/* An attribute of a Python object: a number, or a column of numbers. Each takes eight bytes in the struct it goes to, in the order of the list. */
typedef struct {
    const char *name;
    const ItemType *type;
    PyObject *interned; /* the name, made when it is first asked for */
} Attribute;

enum { ATTRIBUTE_BYTES = 8 };

#define INT64_ATTRIBUTE(name) {#name, &INT64, NULL},
#define FLOAT64_ATTRIBUTE(name) {#name, &FLOAT64, NULL},
#define INT64_COLUMN(name) int64_t *name;
#define FLOAT64_COLUMN(name) double *name;

/* Asked, PrefillEstimates and DecodeEstimates are those of conductor/core/types/estimates.py, but for what they have beside figures. */
#define ASKED_FIELDS(INT64, FLOAT64) \
    FLOAT64(now)                     \
    INT64(num_tokens)                \
    INT64(block_tokens)              \
    INT64(chunk_tokens)              \
    FLOAT64(chunk_ms)                \
    INT64(most_reused)               \
    INT64(best)                      \
    INT64(source)                    \
    FLOAT64(threshold)               \
    INT64(bytes_per_block)           \
    FLOAT64(assumed_bytes_per_s)
typedef struct {
    ASKED_FIELDS(INT64_MEMBER, FLOAT64_MEMBER)
} Asked;

#define PREFILL_ESTIMATES_FIELDS(INT64, FLOAT64) \
    INT64(local_blocks)                          \
    FLOAT64(queue_ms)                            \
    FLOAT64(transfer_ms)                         \
    FLOAT64(prefill_ms)                          \
    FLOAT64(ttft_ms)                             \
    FLOAT64(saved_ms)                            \
    INT64(slots_total)                           \
    INT64(branch)
typedef struct {
    PREFILL_ESTIMATES_FIELDS(INT64_COLUMN, FLOAT64_COLUMN)
} PrefillEstimates;

#define DECODE_ESTIMATES_FIELDS(INT64, FLOAT64) \
    INT64(prefix_blocks)                        \
    FLOAT64(tbt_ms)                             \
    INT64(batch)                                \
    INT64(running)                              \
    INT64(slots_free)                           \
    INT64(slots_total)                          \
    INT64(max_batch)
typedef struct {
    DECODE_ESTIMATES_FIELDS(INT64_COLUMN, FLOAT64_COLUMN)
} DecodeEstimates;
