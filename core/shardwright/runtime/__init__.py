"""The engine: dataflows, sharded modules, ``DistributedModelParallel``. Imports torch; planning never imports it."""
