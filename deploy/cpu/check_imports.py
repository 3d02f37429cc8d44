# SPDX-License-Identifier: Apache-2.0
"""The last step of setup.sh: import what serving without a GPU imports."""

import importlib
import importlib.metadata

MODULES = (
    "torch",
    "triton",
    "torchvision",
    "transformers",
    "sgl_kernel",
    "sglang.srt.entrypoints.http_server",
    "tandemkv.server",
    "tandemkv.inference_rank",
    "tandemkv.cache_rank",
    "tandemkv.kernels",
)

for module in MODULES:
    importlib.import_module(module)

entry_points = importlib.metadata.entry_points(group="sglang.srt.plugins")
if "tandemkv" not in entry_points.names:
    raise SystemExit("the plugin tandemkv is not registered: `pip install --no-deps -e .` again")
entry_points["tandemkv"].load()
contract = importlib.import_module("tandemkv.inference_rank.sglang.contract")
contract.check_contract()
print("imports: ok")
