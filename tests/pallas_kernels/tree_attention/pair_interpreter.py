"""Teach the interpreter of jax 0.12 what it lacks for `blackwell_pair`: copies, products and commits over a pair.

It reaches into jax's private interpreter, so it is for this test alone. The semantics are those of the hardware: a
leader-tracked partitioned copy completes once both blocks have issued it and counts on the first block's barrier; a
pair's product reads each block's left operand and the right operand's halves from both; a commit arrives at the
barrier of both. No race detection: the copies' and products' clocks are not modelled.
"""

import dataclasses
import functools
import threading
import time

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret


def install(monkeypatch):
    """Patch the interpreter until the test ends."""
    lock, issued, completed = threading.Lock(), {}, {}
    key_type = callbacks.HostAllocationKey

    def on_block(key, block):
        return dataclasses.replace(key, block_id=block)

    def until(condition):
        for _ in range(60_000):
            if condition():
                return
            time.sleep(0.001)
        raise TimeoutError("the other block of the pair did not arrive within a minute")

    def until_allocated(memory, key):
        until(lambda: key in memory.mem)

    lone_product = callbacks.TcGen05Mma.__call__

    def product(self, pipeline_clock, tma_thread_id):
        if self.collective_axis is None:
            return lone_product(self, pipeline_clock, tma_thread_id)
        memory = callbacks._get_shared_memory()
        info = callbacks.memory.GPULoggingInfo(self.mesh_location, self.thread, self.source_info)

        def read(key, access):
            return np.asarray(memory.get_buffer_content(key, access, self.thread, logging_info=info)[0])

        right = np.concatenate([read(on_block(self.b_key, block), self.b_access) for block in range(2)], axis=1)
        for block in range(2):
            accumulator = on_block(self.acc_key, block)
            result = np.matmul(read(on_block(self.a_key, block), self.a_access), right, dtype=np.float32)
            if self.accumulate:
                result = result + read(accumulator, self.acc_access)
            memory.store_buffer_content(
                accumulator, self.acc_access, result, self.thread, increment_clock=False, logging_info=info
            )
        assert self.barrier_key is None
        return None

    lone_commit = callbacks.tcgen05_commit_arrive

    def commit(*, token, mesh_location, thread, barrier_key_as_array, collective_axis=None, source_info=None):
        if collective_axis is None:
            return lone_commit(
                token=token,
                mesh_location=mesh_location,
                thread=thread,
                barrier_key_as_array=barrier_key_as_array,
                source_info=source_info,
            )
        memory, key = callbacks._get_shared_memory(), key_type.from_array(barrier_key_as_array)
        for block in range(2):
            until_allocated(memory, on_block(key, block))
            info = callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
            memory.get_barrier(on_block(key, block)).arrive(thread, None, info)
        return token

    def copy(*, token, mesh_location, thread, source, source_at, target, target_at, barrier, axis, source_info=None):
        source_at, target_at = (
            jax.tree.map(int, callbacks._remove_noop_transforms(transforms)) for transforms in (source_at, target_at)
        )
        name = (tuple(np.asarray(target).tolist()[5:]), str(target_at))
        if thread.block_id != 0:
            with lock:
                issued[name] = issued.get(name, 0) + 1
            return token
        with lock:
            completed[name] = turn = completed.get(name, 0) + 1
        until(lambda: issued.get(name, 0) >= turn)
        memory = callbacks._get_shared_memory()
        info = callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
        source, target, barrier = (key_type.from_array(key) for key in (source, target, barrier))
        access = memory.access(source, source_at)
        value, (_, dtype), _ = memory.get_buffer_content(source, access, thread, logging_info=info)
        if value is None or value.shape != access.shape:
            value = callbacks._pad_to_requested(value, access.shape, dtype, 0)
        for block, half in enumerate(np.split(np.asarray(value), 2, axis=axis)):
            until_allocated(memory, on_block(target, block))
            place = memory.access(on_block(target, block), target_at)
            memory.store_buffer_content(on_block(target, block), place, half, thread, logging_info=info)
        memory.get_barrier(barrier).arrive(thread, None, info)
        return token

    lone_copy = jaxpr_interpret.JaxprInterpreter._interpret_copy_gmem_to_smem_p

    def interpret_copy(self, eqn, token, get_invals):
        leader_tracked = eqn.params.get("leader_tracked")
        if leader_tracked is None:
            return lone_copy(self, eqn, token, get_invals)
        trees = [eqn.params[f"{part}_transforms_treedef"] for part in ("src", "dst", "barrier")]
        source, target, barrier, *leaves = get_invals()
        at, start = [], 0
        for tree in trees[:2]:
            at.append(leaves[start : start + tree.num_leaves])
            start += tree.num_leaves
        barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, trees[2], leaves[start:])
        (source, source_at), (target, target_at) = (
            jaxpr_interpret.resolve_ref(eqn.invars[i].aval, ref, jax.tree.unflatten(trees[i], at[i]))
            for i, ref in enumerate((source, target))
        )
        return callback.io_callback(
            functools.partial(callbacks.fail_on_exception(copy), axis=leader_tracked.axis, source_info=eqn.source_info),
            callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            source=source,
            source_at=source_at,
            target=target,
            target_at=target_at,
            barrier=barrier,
        ), []

    monkeypatch.setattr(callbacks.TcGen05Mma, "__call__", product)
    monkeypatch.setattr(callbacks, "tcgen05_commit_arrive", callbacks.fail_on_exception(commit))
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_copy_gmem_to_smem_p", interpret_copy)
