"""vLLM's hidden-states connector where there is no GPU. Runs inside vLLM: kv_connector_module_path names this file.

Its own copies a request's rows through pinned memory on a CUDA stream. Here the same rows are copied at once; all else,
slots, layers, locks and names of files among it, is vLLM's.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms


class Done:
    def query(self) -> bool:
        return True


class CpuHiddenStates(vllms.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        first = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        rows = vllms.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        file = {"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(file, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self._req_copy_events[pending.req_id] = Done()
