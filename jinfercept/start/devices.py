"""Chooses the devices that serve a model: of those that JAX sees, or those of a mesh that the user has."""

from typing import Any

import jax
from jax.sharding import Mesh

from jinfercept.config import ModelOptions
from jinfercept.errors import ConfigError, shown
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model
from jinfercept.models.protocol import CutModel, ServedModel


def choose_devices(options: ModelOptions, mesh: Mesh | None, *, across_hosts: bool) -> ModelMesh:
    """The devices that the options or the mesh name; by default JAX's default device. Starts JAX's backend.

    With `across_hosts`, as many devices of each of JAX's processes; by default all.

    Raises:
        ConfigError: there are fewer devices, or the mesh cuts arrays along several axes.
    """
    if across_hosts:
        return _of_hosts(options, mesh)
    if mesh is not None:
        return _of_mesh(options, mesh)
    size, ids = options.tensor_parallel_size, options.device_ids
    if ids is None and size in (None, 1):
        return ModelMesh.default()
    devices = jax.local_devices()
    if (more := max(ids) + 1 if ids else size or 1) > len(devices):
        raise ConfigError(
            "JAX has no device of this number" if ids else "JAX has fewer devices",
            got=f"{', '.join(map(str, ids)) if ids else f'tensor_parallel_size={size}'}; JAX has {len(devices)}, of platform "
            f"{devices[0].platform}",
            fix=_more_devices(more) if devices[0].platform == "cpu" else f"use at most {len(devices)}, counted from 0",
        )
    return ModelMesh(tuple(devices[index] for index in ids or range(more)))


def on_devices(model: ServedModel, mesh: ModelMesh) -> ServedModel:
    """The model as these devices serve it. Raises `ConfigError` if they cannot."""
    if isinstance(model, Model):
        return model.on_devices(mesh.size)
    if mesh.size == 1:
        return model
    if not isinstance(model, CutModel):
        raise ConfigError(
            "a model of one's own says how several devices cut its weights",
            got=f"{type(model).__name__} without partition_specs()",
            fix="add the method, see models/protocol.py and examples/own_model.py",
        )
    for what, size in (("query heads", model.config.num_heads), ("KV heads", model.config.num_kv_heads)):
        if size % mesh.size:
            raise ConfigError(
                f"the {what} do not divide evenly among the devices",
                got=f"{size} on {mesh.size} devices",
                fix="use a divisor, or repeat the KV heads in the model",
            )
    return model


def _of_hosts(options: ModelOptions, mesh: Mesh | None) -> ModelMesh:
    # Host by host, so that all hosts choose the same.
    if mesh is not None:
        raise ConfigError("a mesh cannot be given with several hosts", got="a mesh", fix="leave it out")
    by_host: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_host.setdefault(device.process_index, []).append(device)
    num_hosts, fewest = len(by_host), min(map(len, by_host.values()))
    size, ids = options.tensor_parallel_size, options.device_ids
    if ids is None:
        ids = range(fewest if size is None else size // num_hosts)
    if size not in (None, num_hosts * len(ids)) or not ids or max(ids) >= fewest:
        raise ConfigError(
            "every host must give the same number of devices",
            got=f"tensor_parallel_size={size}, devices={options.devices}; {num_hosts} hosts have "
            f"{', '.join(str(len(devices)) for devices in by_host.values())}",
            fix=f"leave both out, or tensor_parallel_size of a multiple of {num_hosts}, up to {num_hosts * fewest}",
        )
    return ModelMesh(tuple(devices[index] for devices in by_host.values() for index in ids))


def _of_mesh(options: ModelOptions, mesh: Mesh) -> ModelMesh:
    if not isinstance(mesh, Mesh):
        raise ConfigError("mesh must be a jax.sharding.Mesh", got=shown(mesh), fix="jax.make_mesh((2,), ('tp',))")
    if options.tensor_parallel_size not in (None, mesh.size) or options.devices is not None:
        raise ConfigError(
            "mesh cannot be combined with devices or tensor_parallel_size",
            got=f"mesh of {mesh.size}, tensor_parallel_size={options.tensor_parallel_size}, devices={options.devices}",
            fix="give the mesh alone",
        )
    if sum(size > 1 for size in mesh.shape.values()) > 1:
        raise ConfigError(
            "only one axis of mesh may be longer than one",
            got=dict(mesh.shape),
            fix="give a part of it with one axis, such as Mesh(mesh.devices[0], mesh.axis_names[1:])",
        )
    return ModelMesh(tuple(mesh.devices.flat))


def _more_devices(count: int) -> str:
    return (
        f"on a CPU, before JAX starts: XLA_FLAGS=--xla_force_host_platform_device_count={count}, or "
        f"jax.config.update('jax_num_cpu_devices', {count})"
    )
