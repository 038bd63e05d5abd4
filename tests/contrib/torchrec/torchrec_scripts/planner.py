"""TorchRec's planner tutorial. It plans for CUDA devices, which takes none. Adapted: ShardingType is imported before it
is used (the notebook's cells ran in another order)."""

import torchrec
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

small_table = torchrec.EmbeddingBagConfig(
    name="small_table",
    embedding_dim=64,
    num_embeddings=10000000,
    feature_names=["small_table_feature"],
    pooling=torchrec.PoolingType.SUM,
)

huge_table = torchrec.EmbeddingBagConfig(
    name="huge_table",
    embedding_dim=1024,
    num_embeddings=50000000,
    feature_names=["large_table_feature"],
    pooling=torchrec.PoolingType.SUM,
)

# Toy model, We will allocate on device "meta", to avoid allocation of data pointer
small_toy_model = torchrec.EmbeddingBagCollection(device="meta", tables=[small_table])

# Create a run-time environment, 1 gpu
topology_1gpu = Topology(world_size=1, compute_device="cuda")

planner = EmbeddingShardingPlanner(
    topology=topology_1gpu,
    debug=True,
)

sharding_plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

# Create a run-time environment, 2 gpu
topology_2gpu = Topology(world_size=2, compute_device="cuda")

planner = EmbeddingShardingPlanner(
    topology=topology_2gpu,
    debug=True,
)

sharding_plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

constraints = {
    "small_table": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]),
}

planner = EmbeddingShardingPlanner(
    topology=topology_2gpu,
    constraints=constraints,
    debug=True,
)
plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

constraints = {
    "small_table": ParameterConstraints(
        pooling_factors=[200.0],
    ),
}

planner = EmbeddingShardingPlanner(
    topology=topology_2gpu,
    constraints=constraints,
    debug=True,
)
plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

# Toy model
huge_toy_model = torchrec.EmbeddingBagCollection(device="meta", tables=[huge_table])

planner = EmbeddingShardingPlanner(
    topology=topology_2gpu,
    debug=True,
)

sharding_plan = planner.plan(huge_toy_model, sharders=[EmbeddingBagCollectionSharder()])
