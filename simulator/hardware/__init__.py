"""How long an engine of some accelerator and model takes, and what its node holds and sends: the only part of a node that is modelled."""

from simulator.hardware.catalog import KNOWN, load
from simulator.hardware.hardware import Hardware, PassModel, StepModel, p90_error
from simulator.hardware.measured import from_profile
from simulator.hardware.times import PassTimes, StepTimes

__all__ = ["KNOWN", "Hardware", "PassModel", "PassTimes", "StepModel", "StepTimes", "from_profile", "load", "p90_error"]
