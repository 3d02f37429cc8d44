# SPDX-License-Identifier: Apache-2.0
"""What verifying the drafts of n-grams calls, in the place of sgl_kernel's CPU kernels.

Signatures are those of the operators, spelling included. B requests have n drafts each,
nodes of a tree that are in an order in which a parent comes before its children; -1 is no node.
"""

import ctypes

import torch


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the slots of a range of positions out of each request's row of the request table.

    Parameters
    ----------
    req_pool_indices, start_offset, end_offset : torch.Tensor
        ``[B]``, integer: row, first and last (exclusive) position of each request.
    req_to_token : torch.Tensor
        ``[num_rows, pool_len]``, int32.
    out_cache_loc : torch.Tensor
        ``[>= sum(end - start)]``, int64: the slots, request after request. Written.
    pool_len : int
        Columns of `req_to_token`; not needed here.
    """
    offset = 0
    bounds = (req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    for row, first, last in zip(*bounds, strict=True):
        out_cache_loc[offset : offset + last - first] = req_to_token[row, first:last]
        offset += last - first


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Gather the slots of accepted drafts, without gaps.

    Parameters
    ----------
    accept_index : torch.Tensor
        ``[B, depth]``, integer: indices into `out_cache_loc`, -1 behind the accepted ones.
    out_cache_loc : torch.Tensor
        ``[B * n]``: slots of all drafts.
    accept_out_cache_loc : torch.Tensor
        ``[B * depth]``, int64. Written from its beginning.
    """
    accepted = accept_index.flatten()
    found = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: len(found)] = found


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Derive positions, first children and next siblings from who is whose ancestor.

    Parameters
    ----------
    tree_mask : torch.Tensor
        ``[B * n * n]``, bool: whether draft j is draft i itself, or an ancestor of it.
    verified_seq_len : torch.Tensor
        ``[B]``, integer: tokens before the drafts.
    positions : torch.Tensor
        ``[B * n]``, int64. Written.
    retrive_index, retrive_next_token, retrive_next_sibling : torch.Tensor
        ``[B, n]``, int64: place among all drafts, first child, next sibling. Written.
    batch_size, draft_token_num : int
        B and n.
    """
    count = draft_token_num
    tree = tree_mask.view(batch_size, count, count).bool().tril(-1)
    depth = tree.sum(-1)
    positions.copy_((verified_seq_len[:, None] + depth).flatten())
    retrive_index.copy_(torch.arange(batch_size * count).view(batch_size, count))
    order = torch.arange(count)
    parents = torch.where(tree.any(-1), (tree * order).amax(-1), -1).tolist()
    children = torch.full((batch_size, count), -1)
    siblings = children.clone()
    for request, of_node in enumerate(parents):
        for node in range(count - 1, 0, -1):
            parent = of_node[node]
            if parent >= 0:
                siblings[request, node] = children[request, parent]
                children[request, parent] = node
    retrive_next_token.copy_(children)
    retrive_next_sibling.copy_(siblings)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree along the drafts that the model would have written itself.

    Parameters
    ----------
    predicts : torch.Tensor
        ``[B * n]``, int32: the model's token behind each accepted draft. Written.
    accept_index : torch.Tensor
        ``[B, depth]``, int32, full of -1: places of accepted drafts, the first of which is the
        root. Written.
    accept_token_num : torch.Tensor
        ``[B]``, int32: how many were accepted, without the root. Written.
    candidates, target_predict : torch.Tensor
        ``[B, n]``: the drafts, and what the model writes behind each.
    retrive_index, retrive_next_token, retrive_next_sibling : torch.Tensor
        As `reconstruct_indices_from_tree_mask` derives them.
    """
    wanted = target_predict.flatten()
    for request in range(len(candidates)):
        places, drafts = retrive_index[request].tolist(), candidates[request].tolist()
        children = retrive_next_token[request].tolist()
        siblings = retrive_next_sibling[request].tolist()
        node = count = 0
        accept_index[request, 0] = last = places[0]
        while count + 1 < accept_index.shape[1]:
            node = children[node]
            while node >= 0 and drafts[node] != wanted[last]:
                node = siblings[node]
            if node < 0:
                break
            predicts[last] = wanted[last]
            count += 1
            accept_index[request, count] = last = places[node]
        accept_token_num[request] = count
        predicts[last] = wanted[last]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy rows of several buffers; all are read before the first is written.

    Parameters
    ----------
    data_ptrs, strides : torch.Tensor
        ``[buffers]``, integer: where each begins, and bytes from a row to the next.
    tgt_loc, src_loc : torch.Tensor
        ``[rows]``, integer: what is written, and what with.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for begin, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(begin + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(begin + target * stride, row, stride)
