"""`python -m simulator.hardware.fit DIRECTORY`: fits the rooflines' constants to profiles and writes fitted.json beside this file.

DIRECTORY holds the profiles of the Vidur project as CSV: `<accelerator>-<model>-mlp.csv`, the median times in ms of each operator of a
layer by `num_tokens` and `num_tensor_parallel_workers`, and `<accelerator>-dgx-{all_reduce,send_recv}.csv`, those of messages by `size`
in bytes.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from simulator.hardware.regression import fit, relative_errors
from simulator.hardware.roofline import AllReduce, Elementwise, Floats, Line, Products
from simulator.hardware.shapes import LLAMA2_70B, LLAMA3_8B, PRODUCTS_PER_LAYER, ModelShape

FITTED = Path(__file__).with_name("fitted.json")
SOURCE = "operator and link profiles of the Vidur project (https://github.com/microsoft/vidur, MIT), medians"
PROFILES = {"a100-llama2-70b": LLAMA2_70B, "h100-llama2-70b": LLAMA2_70B, "a100-llama3-8b": LLAMA3_8B}
ACCELERATORS = ("a100", "h100")
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
# A layer adds to its residual stream twice; the profile has one addition.
ELEMENTWISE = ("input_layernorm", "attn_rope", "add", "post_attention_layernorm", "mlp_act", "add")
ALL_REDUCE_DEVICES = 8


def fit_products(tokens: Floats, degree: Floats, measured_ms: Floats, shape: ModelShape) -> Products:
    def predicted(constants: Floats) -> Floats:
        return Products(*constants).ms(shape.layer_weights, PRODUCTS_PER_LAYER, tokens, degree)

    return Products(*_plain(fit(predicted, (0.005, 1.5e12, 3e14, 50.0), measured_ms)))


def fit_elementwise(tokens: Floats, degree: Floats, measured_ms: Floats) -> Elementwise:
    return Elementwise(*_plain(fit(lambda constants: Elementwise(*constants).ms(tokens, degree), (0.02, 1e-4, 1e-4), measured_ms)))


def fit_line(units: Floats, measured_ms: Floats) -> Line:
    start = (float(measured_ms.min()), float((measured_ms / units).min()))
    return Line(*_plain(fit(lambda constants: Line(*constants).ms(units), start, measured_ms)))


def fit_all_reduce(num_bytes: Floats, measured_ms: Floats) -> AllReduce:
    def protocols(constants: Iterable[float]) -> AllReduce:
        """From the prompt one's start and rate, and by how much later the bulk one starts and how many times faster it is, less one."""
        fixed_ms, per_byte_ms, later_ms, gain = constants
        return AllReduce(Line(fixed_ms, per_byte_ms), Line(fixed_ms + later_ms, per_byte_ms / (1.0 + gain)))

    line = fit_line(num_bytes, measured_ms)
    start = (line.fixed_ms, line.per_unit_ms, line.fixed_ms, 1.0)
    return protocols(_plain(fit(lambda constants: protocols(constants).ms(num_bytes), start, measured_ms)))


def _plain(constants: Floats) -> list[float]:
    """Six digits are more than the measurements have."""
    return [float(f"{constant:.6g}") for constant in constants]


def fit_operators(path: Path, shape: ModelShape) -> dict[str, Any]:
    table = _Table(path)
    tokens, degree = table.column("num_tokens"), table.column("num_tensor_parallel_workers")
    measured = {part: sum((table.ms(operator) for operator in operators), np.zeros(len(tokens))) for part, operators in _PARTS.items()}
    products = fit_products(tokens, degree, measured["products"], shape)
    elementwise = fit_elementwise(tokens, degree, measured["elementwise"])
    embedding = fit_line(tokens, measured["embedding"])
    predicted = {
        "products": products.ms(shape.layer_weights, PRODUCTS_PER_LAYER, tokens, degree),
        "elementwise": elementwise.ms(tokens, degree),
        "embedding": embedding.ms(tokens),
    }
    errors = {part: relative_errors(predicted[part], measured[part]) for part in _PARTS}
    layer = predicted["products"] + predicted["elementwise"], measured["products"] + measured["elementwise"]
    for each in np.unique(degree):
        errors[f"layer, degree {each:.0f}"] = relative_errors(*(times[degree == each] for times in layer))
    return {
        "products": asdict(products),
        "elementwise": asdict(elementwise),
        "embedding": asdict(embedding),
        "measurements": len(tokens),
        "most_tokens": int(tokens.max()),
        "errors": errors,
    }


def fit_links(directory: Path, accelerator: str) -> dict[str, Any]:
    size, ms = _Table(directory / f"{accelerator}-dgx-all_reduce.csv").messages("all_reduce", ALL_REDUCE_DEVICES, ALL_REDUCE_DEVICES)
    all_reduce = fit_all_reduce(size, ms)
    sent, sent_ms = _Table(directory / f"{accelerator}-dgx-send_recv.csv").messages("send_recv", workers=2, per_node=1)
    between_nodes = fit_line(sent, sent_ms)
    return {
        "all_reduce": asdict(all_reduce),
        "between_nodes": asdict(between_nodes),
        "measurements": {"all_reduce": len(size), "between_nodes": len(sent)},
        "errors": {
            "all_reduce": relative_errors(all_reduce.ms(size), ms),
            "between_nodes": relative_errors(between_nodes.ms(sent), sent_ms),
        },
    }


_PARTS = {"products": PRODUCTS, "elementwise": ELEMENTWISE, "embedding": ("emb",)}


class _Table:
    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            self._rows = list(csv.DictReader(file))

    def column(self, name: str) -> Floats:
        return np.array([float(row[name]) for row in self._rows])

    def ms(self, operator: str) -> Floats:
        return self.column(f"time_stats.{operator}.median")

    def messages(self, operator: str, workers: int, per_node: int) -> tuple[Floats, Floats]:
        """(bytes, milliseconds) of messages among `workers` devices, `per_node` of them on each node."""
        chosen = (self.column("num_workers") == workers) & (self.column("devices_per_node") == per_node)
        return self.column("size")[chosen], self.ms(operator)[chosen]


def fit_all(directory: Path) -> dict[str, Any]:
    """The document of fitted.json. Raises OSError and KeyError when a profile or a column of it is missing."""
    return {
        "source": SOURCE,
        "date": datetime.now(UTC).date().isoformat(),
        "errors_are": "median and 90th percentile of |predicted / measured - 1| over all measurements",
        "operators": {name: fit_operators(directory / f"{name}-mlp.csv", shape) for name, shape in PROFILES.items()},
        "links": {name: fit_links(directory, name) for name in ACCELERATORS},
    }


def main(arguments: Sequence[str], output: Path = FITTED) -> int:
    if len(arguments) != 1:
        print("usage: python -m simulator.hardware.fit DIRECTORY", file=sys.stderr)
        return 2
    output.write_text(json.dumps(fit_all(Path(arguments[0])), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
