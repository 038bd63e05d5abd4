"""TorchRec's introduction. Adapted: the CPU for CUDA, a free port; and, where
FBGEMM is not installed, the optimizer's name for its EmbOptimType."""

import os
import warnings

import torch
import torchrec

num_embeddings, embedding_dim = 10, 4
weights = torch.rand(num_embeddings, embedding_dim)
print("Weights:", weights)
embedding_collection = torch.nn.Embedding(num_embeddings, embedding_dim, _weight=weights)
embedding_bag_collection = torch.nn.EmbeddingBag(num_embeddings, embedding_dim, _weight=weights)
print("Embedding Collection Table: ", embedding_collection.weight)
print("Embedding Bag Collection Table: ", embedding_bag_collection.weight)
ids = torch.tensor([[1, 3]])
print("Input row IDS: ", ids)
embeddings = embedding_collection(ids)
print("Embedding Collection Results: ")
print(embeddings)
print("Shape: ", embeddings.shape)
pooled_embeddings = embedding_bag_collection(ids)
print("Embedding Bag Collection Results: ")
print(pooled_embeddings)
print("Shape: ", pooled_embeddings.shape)
print("Mean: ", torch.mean(embedding_collection(ids), dim=1))

ebc = torchrec.EmbeddingBagCollection(
    device="cpu",
    tables=[
        torchrec.EmbeddingBagConfig(
            name="product_table",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=["product"],
            pooling=torchrec.PoolingType.SUM,
        ),
        torchrec.EmbeddingBagConfig(
            name="user_table",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=["user"],
            pooling=torchrec.PoolingType.SUM,
        ),
    ],
)
print(ebc.embedding_bags)

import inspect  # noqa: E402

# Let's look at the ``EmbeddingBagCollection`` forward method
print(inspect.getsource(ebc.forward))

id_list_feature_lengths = torch.tensor([1, 2])
id_list_feature_values = torch.tensor([5, 7, 1])
id_list_feature_offsets = torch.cumsum(id_list_feature_lengths, dim=0)
print("Offsets: ", id_list_feature_offsets)
print("First Batch: ", id_list_feature_values[: id_list_feature_offsets[0]])
print("Second Batch: ", id_list_feature_values[id_list_feature_offsets[0] : id_list_feature_offsets[1]])

from torchrec import JaggedTensor  # noqa: E402

jt = JaggedTensor(values=id_list_feature_values, lengths=id_list_feature_lengths)
print("Offsets: ", jt.offsets())
print("List of Values: ", jt.to_dense())
print(jt)

from torchrec import KeyedJaggedTensor  # noqa: E402

product_jt = JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1]))
user_jt = JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))
kjt = KeyedJaggedTensor.from_jt_dict({"product": product_jt, "user": user_jt})
print("Keys: ", kjt.keys())
print("Lengths: ", kjt.lengths())
print("Values: ", kjt.values())
print("to_dict: ", kjt.to_dict())
print(kjt)

result = ebc(kjt)
print(result.keys())
print(result.values().shape)
result_dict = result.to_dict()
for key, embedding in result_dict.items():
    print(key, embedding.shape)

import torch.distributed as dist  # noqa: E402

os.environ["RANK"] = "0"
os.environ["WORLD_SIZE"] = "1"
os.environ["MASTER_ADDR"] = "localhost"
os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group(backend="gloo")
print(f"Distributed environment initialized: {dist}")

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402

sharder = EmbeddingBagCollectionSharder()
pg = dist.GroupMember.WORLD
assert pg is not None, "Process group is not initialized"
print(f"Process Group: {pg}")
planner = EmbeddingShardingPlanner(
    topology=Topology(
        world_size=1,
        compute_device="cpu",
    )
)
plan = planner.collective_plan(ebc, [sharder], pg)
print(f"Sharding Plan generated: {plan}")

env = ShardingEnv.from_process_group(pg)
sharded_ebc = sharder.shard(ebc, plan.plan[""], env, torch.device("cpu"))
print(f"Sharded EBC Module: {sharded_ebc}")

from typing import List  # noqa: E402, UP035

from torchrec.distributed.types import LazyAwaitable  # noqa: E402


class ExampleAwaitable(LazyAwaitable[torch.Tensor]):
    def __init__(self, size: List[int]) -> None:  # noqa: UP006
        super().__init__()
        self._size = size

    def _wait_impl(self) -> torch.Tensor:
        return torch.ones(self._size)


awaitable = ExampleAwaitable([3, 2])
awaitable.wait()

kjt = kjt.to("cpu")
output = sharded_ebc(kjt)
print(output)
kt = output.wait()
print(type(kt))
print(kt.keys())
print(kt.values().shape)
result_dict = kt.to_dict()
for key, embedding in result_dict.items():
    print(key, embedding.shape)
print("equal to unsharded:", torch.equal(kt.values(), result.values()))

print(sharded_ebc._input_dists)
print(sharded_ebc._output_dists)
print(sharded_ebc._lookups)

model = torchrec.distributed.DistributedModelParallel(ebc, device=torch.device("cpu"))
out = model(kjt)
out.wait()
print(model)

from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
except ImportError:
    optimizer = "exact_row_wise_adagrad"

fused_params = {
    "optimizer": optimizer,
    "learning_rate": 0.02,
    "eps": 0.002,
}
sharder_with_fused_params = EmbeddingBagCollectionSharder(fused_params=fused_params)
sharded_ebc_fused_params = sharder_with_fused_params.shard(ebc, plan.plan[""], env, torch.device("cpu"))
print(f"Original Sharded EBC fused optimizer: {sharded_ebc.fused_optimizer}")
print(f"Sharded EBC with fused parameters fused optimizer: {sharded_ebc_fused_params.fused_optimizer}")
print(f"Type of optimizer: {type(sharded_ebc_fused_params.fused_optimizer)}")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its function
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

import copy  # noqa: E402

ebc_apply_opt = copy.deepcopy(ebc)
optimizer_kwargs = {"lr": 0.5}
for name, param in ebc_apply_opt.named_parameters():
    print(f"{name=}")
    apply_optimizer_in_backward(torch.optim.SGD, [param], optimizer_kwargs)
sharded_ebc_apply_opt = sharder.shard(ebc_apply_opt, plan.plan[""], env, torch.device("cpu"))
print(sharded_ebc_apply_opt.fused_optimizer)
print(type(sharded_ebc_apply_opt.fused_optimizer))

print("Non Fused Model Parameters:")
print(dict(in_backward_optimizer_filter(sharded_ebc_fused_params.named_parameters())).keys())

ebc_output = sharded_ebc_fused_params(kjt).wait().values()
loss = torch.sum(torch.ones_like(ebc_output) - ebc_output)
print(f"First Iteration Loss: {loss}")
loss.backward()
ebc_output = sharded_ebc_fused_params(kjt).wait().values()
loss = torch.sum(torch.ones_like(ebc_output) - ebc_output)
print(f"Second Iteration Loss: {loss}")


class InferenceModule(torch.nn.Module):
    def __init__(self, ebc: torchrec.EmbeddingBagCollection):
        super().__init__()
        self.ebc_ = ebc

    def forward(self, kjt: KeyedJaggedTensor):
        return self.ebc_(kjt)


module = InferenceModule(ebc)
for name, param in module.named_parameters():
    print(name, param.shape, param.dtype)

warnings.simplefilter("ignore", DeprecationWarning)  # torch.ao's, which moves to torchao
from torch import quantization as quant  # noqa: E402
from torchrec.modules.embedding_configs import QuantConfig  # noqa: E402
from torchrec.quant.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

quant_dtype = torch.int8
qconfig = QuantConfig(
    activation=quant.PlaceholderObserver.with_args(dtype=torch.float),
    weight=quant.PlaceholderObserver.with_args(dtype=quant_dtype),
)
qconfig_spec = {
    torchrec.EmbeddingBagCollection: qconfig,
}
mapping = {
    torchrec.EmbeddingBagCollection: QuantEmbeddingBagCollection,
}
module = InferenceModule(ebc)
qebc = quant.quantize_dynamic(
    module,
    qconfig_spec=qconfig_spec,
    mapping=mapping,
    inplace=False,
)
print(f"Quantized EBC: {qebc}")
kjt = kjt.to("cpu")
quantized_result = qebc(kjt)
for name, buffer in qebc.named_buffers():
    print(name, buffer.shape, buffer.dtype)
print("largest error:", float((quantized_result.values() - module(kjt).values()).abs().max()))

from torchrec import distributed as trec_dist  # noqa: E402
from torchrec.distributed.shard import _shard_modules  # noqa: E402

sharded_qebc = _shard_modules(
    module=qebc,
    sharders=[trec_dist.quant_embeddingbag.QuantEmbeddingBagCollectionSharder()],
    device=torch.device("cpu"),
)
print(f"Sharded Quantized EBC: {sharded_qebc}")
print("sharded equal:", torch.equal(sharded_qebc(kjt).values(), quantized_result.values()))

from torchrec.fx import Tracer  # noqa: E402

tracer = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"])
graph = tracer.trace(sharded_qebc)
gm = torch.fx.GraphModule(sharded_qebc, graph)
print("Graph Module Created!")
print(gm.code)
print("traced equal:", torch.equal(gm(kjt).values(), quantized_result.values()))

scripted_gm = torch.jit.script(gm)
print("Scripted Graph Module Created!")
error = (scripted_gm(kjt).values() - quantized_result.values()).abs().max()
print("scripted equal:", float(error) < 1e-6)
dist.destroy_process_group()
