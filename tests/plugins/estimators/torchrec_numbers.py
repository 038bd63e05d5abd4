"""TorchRec's own estimates of every option of some tables, as JSON. Run by a Python that has TorchRec 1.8.

    python torchrec_numbers.py CASES.json NUMBERS.json

CASES is a list of cases (see `Case` in torchrec_cases.py), NUMBERS becomes the same list, each case with `options`: for
each option of each table its type, its kernel and its shards, equal neighbours counted:
[count, rows, columns, forward and backward, compute and communication each, prefetch (milliseconds), HBM, DDR (bytes)].
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

import torch  # noqa: E402
import torchrec  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.fbgemm_qcomm_codec import (  # noqa: E402
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import Topology  # noqa: E402
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator  # noqa: E402
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats  # noqa: E402
from torchrec.distributed.planner.types import ParameterConstraints  # noqa: E402
from torchrec.distributed.types import CacheParams  # noqa: E402

OPTIMIZERS = {
    "sgd": torchrec.optim.SGD,
    "adam": torchrec.optim.Adam,
    "row_wise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
}


def module_of(case):
    configs = [
        {
            "name": table["name"],
            "embedding_dim": table["columns"],
            "num_embeddings": table["rows"],
            "feature_names": [f"{table['name']}_{i}" for i in range(len(table["pooling_factors"]))],
            "data_type": torchrec.DataType[case["data_type"]],
        }
        for table in case["tables"]
    ]
    if case["pooling"] == "NONE":
        tables = [torchrec.EmbeddingConfig(**config) for config in configs]
        module = torchrec.EmbeddingCollection(device=torch.device("meta"), tables=tables)
    else:
        pooling = torchrec.PoolingType[case["pooling"]]
        tables = [torchrec.EmbeddingBagConfig(**config, pooling=pooling) for config in configs]
        module = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"), tables=tables, is_weighted=case["is_weighted"]
        )
    for parameter in module.parameters():
        parameter._optimizer_classes = [OPTIMIZERS[case["optimizer"]]]
    return module


def cache_of(case):
    given = case["cache"]
    if not given:
        return None
    stats = given.get("stats")
    if stats:
        counts = torch.tensor(stats["mrc_hist_counts"], dtype=torch.float64)
        stats = EmbeddingOffloadStats(**{**stats, "mrc_hist_counts": counts})
    return CacheParams(load_factor=given.get("load_factor"), stats=stats)


def codecs_of(case):
    if not case["codecs"]:
        return None
    forward, backward = (CommType[name.upper()] for name in case["codecs"])
    return get_qcomm_codecs_registry(QCommsConfig(forward, backward), device=torch.device("cuda"))


def options_of(case):
    topology = Topology(
        world_size=case["ranks"], local_world_size=case["local"], compute_device="cuda", **case["bandwidths"]
    )
    constraints = {
        table["name"]: ParameterConstraints(
            pooling_factors=table["pooling_factors"],
            sharding_types=case["sharding_types"],
            min_partition=case["min_partition"],
            cache_params=cache_of(case),
            is_weighted=case["is_weighted"],
        )
        for table in case["tables"]
    }
    enumerator = EmbeddingEnumerator(
        topology=topology, batch_size=case["batch_size"], constraints=constraints
    )
    codecs = codecs_of(case)
    sharders = [
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
        EmbeddingCollectionSharder(qcomm_codecs_registry=codecs),
    ]
    options = [
        [option.name, option.sharding_type, option.compute_kernel, shards_of(option)]
        for option in enumerator.enumerate(module_of(case), sharders)
    ]
    return sorted(options)


def shards_of(option):
    rows = [
        (
            *shard.size,
            shard.perf.fwd_compute,
            shard.perf.fwd_comms,
            shard.perf.bwd_compute,
            shard.perf.bwd_comms,
            shard.perf.prefetch_compute,
            shard.storage.hbm,
            shard.storage.ddr,
        )
        for shard in option.shards
    ]
    return [[len(list(equal)), *map(rounded, row)] for row, equal in itertools.groupby(rows)]


def rounded(value):
    return float(f"{value:.12g}") if isinstance(value, float) else value


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    for case in cases:
        case["options"] = options_of(case)
    with open(sys.argv[2], "w") as file:
        json.dump(cases, file, separators=(",", ":"))
