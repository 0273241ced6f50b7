"""What plugin authors and we test with: suites for storages and plugins, a faulty storage, tiny models, real shapes.

Names are loaded on first use: importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_store.lazy import lazy

if TYPE_CHECKING:
    from multilora_store.testing.adapters import SHAPES, Shape, lora_adapter
    from multilora_store.testing.blobs import BlobsSuite
    from multilora_store.testing.faulty import Fault, FaultyBlobs
    from multilora_store.testing.guards import Guard
    from multilora_store.testing.model_suites import (
        AssemblerSuite,
        AssemblyStepSuite,
        AuditCheckSuite,
        BaseProviderSuite,
    )
    from multilora_store.testing.models import TinyDecoder, TinyMixture, tiny_decoder, tiny_mixture
    from multilora_store.testing.suites import (
        ExporterSuite,
        MergeStrategySuite,
        PluginSuite,
        RetentionPolicySuite,
        SourceSuite,
        declared,
    )

_HOMES = {
    "AssemblerSuite": "model_suites",
    "AssemblyStepSuite": "model_suites",
    "AuditCheckSuite": "model_suites",
    "BaseProviderSuite": "model_suites",
    "BlobsSuite": "blobs",
    "ExporterSuite": "suites",
    "Fault": "faulty",
    "FaultyBlobs": "faulty",
    "Guard": "guards",
    "MergeStrategySuite": "suites",
    "PluginSuite": "suites",
    "RetentionPolicySuite": "suites",
    "SHAPES": "adapters",
    "Shape": "adapters",
    "SourceSuite": "suites",
    "TinyDecoder": "models",
    "TinyMixture": "models",
    "declared": "suites",
    "lora_adapter": "adapters",
    "tiny_decoder": "models",
    "tiny_mixture": "models",
}

__all__ = [
    "SHAPES",
    "AssemblerSuite",
    "AssemblyStepSuite",
    "AuditCheckSuite",
    "BaseProviderSuite",
    "BlobsSuite",
    "ExporterSuite",
    "Fault",
    "FaultyBlobs",
    "Guard",
    "MergeStrategySuite",
    "PluginSuite",
    "RetentionPolicySuite",
    "Shape",
    "SourceSuite",
    "TinyDecoder",
    "TinyMixture",
    "declared",
    "lora_adapter",
    "tiny_decoder",
    "tiny_mixture",
]

__getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
