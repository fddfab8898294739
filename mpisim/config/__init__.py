"""What a run is: the schema, and reading it from TOML.

schema.py holds the frozen sections, load.py reads files and overrides and words the faults,
effects.py names settings that do nothing in a config.
Everything above imports from here: `from mpisim.config import RunConfig, load_config`.
"""

from mpisim.config.load import config_from_mapping, dump_config, load_config, parse_override
from mpisim.config.schema import (
    SCHEMA_VERSION,
    CommSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RunConfig,
    RunSection,
    TraceSection,
    TrainSection,
)

__all__ = [
    "SCHEMA_VERSION",
    "CommSection",
    "DataSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "RunConfig",
    "RunSection",
    "TraceSection",
    "TrainSection",
    "config_from_mapping",
    "dump_config",
    "load_config",
    "parse_override",
]
