"""The answers of Gemini's API, for the API's own description."""

from __future__ import annotations

from gateway.described import ANY_OBJECT, NUMBER, TEXT, WHOLE, array, one_of, record

ERROR = record({"error": record({"code": WHOLE, "message": TEXT, "status": TEXT, "details": array(ANY_OBJECT)})})
MODEL = record(
    {
        "name": TEXT,
        "version": TEXT,
        "displayName": TEXT,
        "description": TEXT,
        "inputTokenLimit": WHOLE,
        "outputTokenLimit": WHOLE,
        "supportedGenerationMethods": array(TEXT),
        "maxTemperature": NUMBER,
    }
)
_OF_KIND = array(record({"modality": one_of("TEXT"), "tokenCount": WHOLE}))
COUNT = record({"totalTokens": WHOLE, "cachedContentTokenCount": WHOLE, "promptTokensDetails": _OF_KIND})
_PART = {
    "anyOf": [
        record({"text": TEXT}, {"thought": one_of(True)}),
        record({"functionCall": record({"id": TEXT, "name": TEXT, "args": ANY_OBJECT})}),
    ]
}
_SCORE = record({"token": TEXT, "tokenId": WHOLE, "logProbability": NUMBER})
_CANDIDATE = record(
    {"content": record({"role": one_of("model"), "parts": array(_PART)}), "index": WHOLE},
    {
        "finishReason": one_of("STOP", "MAX_TOKENS", "MALFORMED_FUNCTION_CALL"),
        "tokenCount": WHOLE,
        "avgLogprobs": NUMBER,
        "logprobsResult": record({"chosenCandidates": array(_SCORE), "topCandidates": array(record({"candidates": array(_SCORE)}))}),
    },
)
_USAGE = (
    *("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount", "totalTokenCount"),
    "cachedContentTokenCount",
)
CONTENT = record(
    {
        "modelVersion": TEXT,
        "responseId": TEXT,
        "usageMetadata": record({**dict.fromkeys(_USAGE, WHOLE), "promptTokensDetails": _OF_KIND}, {"cacheMissReason": TEXT}),
        "candidates": array(_CANDIDATE),
    }
)
