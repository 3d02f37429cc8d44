# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool without K/V: its slot ids are the cache rank's.

SGLang's allocator, radix cache, admission and accounting work on slot ids only. The pool
therefore keeps its size, and one page of placeholder buffers; reading or writing them is a bug
(a path of SGLang that bypasses our backend) and raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tandemkv.cache_rank.protocol.errors import ContractError


def make_pool_class(base: type) -> type:
    """Return a subclass of SGLang's ``MHATokenToKVPool`` that holds no K/V."""

    class RemoteKVPool(base):
        """Slot ids of the cache rank."""

        def _create_buffers(self) -> None:
            self.k_scale_buffer = self.v_scale_buffer = None
            self.dq_k_buffer = self.dq_v_buffer = None

            def placeholders(dim: int) -> list[torch.Tensor]:
                shape = (self.page_size, self.head_num, dim)
                return [
                    torch.zeros(shape, dtype=self.store_dtype, device=self.device)
                    for _ in range(self.layer_num)
                ]

            self.k_buffer = placeholders(self.head_dim)
            self.v_buffer = placeholders(self.v_head_dim)
            self._kv_buffer_descs = self._build_kv_buffer_descs()
            self._init_data_ptrs_and_strides()

        def set_kv_buffer(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("set_kv_buffer")

        def get_key_buffer(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("get_key_buffer")

        def get_value_buffer(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("get_value_buffer")

        def get_kv_buffer(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("get_kv_buffer")

        def get_cpu_copy(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("get_cpu_copy")

        def load_cpu_copy(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("load_cpu_copy")

        def move_kv_cache(self, *_: Any, **__: Any) -> NoReturn:
            _refuse("move_kv_cache")

    return RemoteKVPool


def _refuse(name: str) -> NoReturn:
    raise ContractError(
        f"SGLang called {name} of the KV pool, but the cache rank holds the KV: a feature that "
        "reads the pool directly is on; see README, 'Limits'"
    )
